"""A body of ``multipart/form-data`` (RFC 7578) as it arrives: small fields, and one file that is never held whole. The
fields may come before the file and after it."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from urllib.parse import unquote

from rookery.errors import UserError, short

HEAD_BYTES = 16 << 10
"""The headers of one part."""

FIELD_BYTES = 4 << 10
"""The value of a field that is not a file."""

FIELDS = 16
"""Fields besides the file."""

_BOUNDARY = re.compile(r'multipart/form-data\s*;.*?boundary=(?:"([^"]{1,70})"|([^\s;"]{1,70}))', re.IGNORECASE)
_PARAMETER = re.compile(r';\s*(name|filename)=(?:"((?:[^"\\]|\\.)*)"|([^\s;"]+))', re.IGNORECASE)
_ENCODED = re.compile(r";\s*filename\*=utf-8'[^']*'([^\s;]+)", re.IGNORECASE)

NAME_LENGTH = 200
"""Of a file's name; a longer one is cut."""


@dataclass
class Form:
    """The fields, those after the file once its content was read, and the file's content; ``filename`` is the client's
    name of it, without folders."""

    fields: dict[str, str] = field(default_factory=dict)
    filename: str = ""
    content: AsyncIterator[bytes] | None = None
    """None in a body without a file."""


class Multipart:
    def __init__(
        self,
        content_type: str,
        body: AsyncIterator[bytes],
        check: Callable[[str, str], object] = lambda name, value: None,
    ) -> None:
        """``check(name, value)`` is called with each field as it comes, and raises :class:`UserError` for a wrong one.
        Raises it too where ``content_type`` names no boundary."""
        found = _BOUNDARY.match(content_type)
        if found is None:
            raise UserError("the body is no multipart/form-data with a boundary; send purpose and file as a form")
        self._mark = b"\r\n--" + (found[1] or found[2]).encode()
        self._body = body
        self._check = check
        self._held = b"\r\n"  # the first boundary has no line before it
        self._at = 0
        """Of the bytes in ``_held``, those that were passed."""
        self._over = False

    async def form(self) -> Form:
        """Everything up to the content of the file, which then is read once. Raises :class:`UserError`."""
        form = Form()
        await self._take(self._mark, HEAD_BYTES)
        await self._fields(form)
        return form

    async def _fields(self, form: Form) -> None:
        """Read fields up to the content of the file, or to the end of the form. Raises :class:`UserError`."""
        while not await self._closed():
            head = (await self._take(b"\r\n\r\n", HEAD_BYTES)).decode("utf-8", "replace")
            line = next((one for one in head.split("\r\n") if one.lower().startswith("content-disposition:")), "")
            about = {key.lower(): plain or _unescaped(quoted) for key, quoted, plain in _PARAMETER.findall(line)}
            if (encoded := _ENCODED.search(line)) is not None:  # RFC 5987: it replaces the other
                about["filename"] = unquote(encoded[1])
            if "filename" in about:
                if about.get("name") != "file":
                    raise UserError("the form has a file under another name; send it as file")
                if form.content is not None:
                    raise UserError("the form has a second file; send one")
                form.filename, form.content = _base_name(about["filename"]), self._file(form)
                return
            if len(form.fields) >= FIELDS:
                raise UserError(f"the form has more than {FIELDS} fields; send purpose and file")
            name = about.get("name", "")
            if name in form.fields:
                raise UserError(f"the form has the field {short(repr(name))} twice; send it once")
            form.fields[name] = (await self._take(self._mark, FIELD_BYTES)).decode("utf-8", "replace")
            self._check(name, form.fields[name])

    async def _closed(self) -> bool:
        """Whether the boundary that was just read is the last one."""
        while len(self._held) < self._at + 2 and await self._more():
            pass
        end = self._held[self._at : self._at + 2]
        self._at += 2
        if end not in (b"--", b"\r\n"):
            raise UserError("the form is cut off, or not well-formed")
        return end == b"--"

    async def _take(self, mark: bytes, most: int) -> bytes:
        """The bytes before the next ``mark``, which is passed."""
        while (end := self._held.find(mark, self._at)) < 0:
            if len(self._held) > self._at + most or not await self._more():
                raise UserError("the form is cut off, or a field of it is too long; send purpose and file")
        found, self._at = self._held[self._at : end], end + len(mark)
        return found

    async def _file(self, form: Form) -> AsyncIterator[bytes]:
        """The content of the file; then the fields that follow it are read into ``form``."""
        while (end := self._held.find(self._mark, self._at)) < 0:
            keep = len(self._held) - len(self._mark) + 1  # the boundary may have begun
            if keep > self._at:
                yield self._held[self._at : keep]
                self._at = keep
            if not await self._more():
                raise UserError("the file is cut off: the form does not end")
        if end > self._at:
            yield self._held[self._at : end]
        self._at = end + len(self._mark)
        await self._fields(form)

    async def _more(self) -> bool:
        """Read on; False at the end of the body."""
        if self._over:
            return False
        try:
            piece = await anext(self._body)
        except StopAsyncIteration:
            self._over = True
            return False
        self._held, self._at = self._held[self._at :] + piece, 0
        return True


def _unescaped(quoted: str) -> str:
    """A quoted parameter as browsers and clients write it: quotes as ``\\"`` or ``%22``, line ends as ``%0D%0A``."""
    for written, meant in (('\\"', '"'), ("\\\\", "\\"), ("%22", '"'), ("%0D", "\r"), ("%0A", "\n")):
        quoted = quoted.replace(written, meant)
    return quoted


def _base_name(name: str) -> str:
    """The last part of a path of any system, in printable characters."""
    last = re.split(r"[/\\]", name)[-1]
    return "".join(one for one in last if one.isprintable())[:NAME_LENGTH]
