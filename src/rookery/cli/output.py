"""The output of every command: text for a person, JSON for a script.

* A character that the stream's encoding lacks is written as a similar one, and JSON as an escape: no output fails for
  its letters. A stream that was closed before the start is one to nowhere.
* Cursor codes go to a terminal only, also where ``FORCE_COLOR`` asks for colours in a pipe, and none comes from a text
  of somebody else: a prompt, a reply, a name.
"""

from __future__ import annotations

import codecs
import io
import json
import os
import re
import sys
import unicodedata
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import datetime
from typing import Any, TextIO

from rich.console import Console, ConsoleOptions, ConsoleRenderable, RenderableType, RenderHook, RenderResult
from rich.segment import Segment

from rookery.errors import RookeryError
from rookery.telemetry.rows import printable

READER_GONE = 1
"""Exit code where the reader of the output has ended, such as ``head``."""

PIPED_WIDTH = 160
"""Columns of a table that is not shown on a terminal."""

NAME_WIDTH = 28
"""Columns of the names of fields."""

SIMILAR = {
    "…": "...", "–": "-", "—": "-", "−": "-", "→": "->", "±": "+/-", "·": "-", "─": "-", "≤": "<=", "≥": ">=",
    "‘": "'", "’": "'", "“": '"', "”": '"', "\u00a0": " ", "\u202f": " ",
    **dict(zip("▁▂▃▄▅▆▇█", "12345678", strict=True)),
}  # fmt: skip
"""The substitutes of characters that an encoding lacks; any other becomes a question mark."""

_CONTROLS = re.compile("[\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069]")
"""Characters that :func:`visible` does not leave as they are, and that JSON does not escape."""

ENCODING_ERRORS = "rookery.similar"
"""The name of the error handler of :data:`SIMILAR`."""


def _similar(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    text = "".join(SIMILAR.get(letter, "?") for letter in error.object[error.start : error.end])
    return text.encode(error.encoding, "replace").decode(error.encoding), error.end


LEAST_COLUMNS = 20
"""The narrowest output in which a line can be read. ``COLUMNS=0`` comes from terminals without a size, as in containers
and continuous integration; the libraries would print nothing at all."""


def prepare_streams() -> None:
    """Make the standard streams fit for every text. A closed one becomes the null device: else the next file that is
    opened would get its number, and with it what is printed. Input in another encoding is read with half characters,
    which the client refuses. A width in which nothing can be read is none."""
    if os.environ.get("COLUMNS", "").isdecimal() and int(os.environ["COLUMNS"]) < LEAST_COLUMNS:
        del os.environ["COLUMNS"]
    codecs.register_error(ENCODING_ERRORS, _similar)
    for number, (name, mode) in enumerate((("stdin", "r"), ("stdout", "w"), ("stderr", "w"))):
        if getattr(sys, name) is not None:
            continue
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest free number, which is this one
            os.set_inheritable(number, True)
        setattr(sys, name, open(number, mode, encoding="utf-8", closefd=False))  # noqa: SIM115 - it stays open
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors=ENCODING_ERRORS)
    if hasattr(sys.stdin, "reconfigure"):
        with suppress(io.UnsupportedOperation):  # something has been read already
            sys.stdin.reconfigure(errors="surrogateescape")


class OutputLost(RookeryError):
    """Standard output takes no more."""

    def __init__(self, error: OSError) -> None:
        super().__init__(f"the output cannot be written ({error.strerror}); give it another place")


@contextmanager
def writing() -> Iterator[None]:
    """Within, an error of standard output raises :class:`OutputLost`, or ends the process where a pipe's reader has
    ended. Then nothing more is written."""
    try:
        yield
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # else the interpreter tries again at its end
        if isinstance(error, BrokenPipeError):
            sys.exit(READER_GONE)
        raise OutputLost(error) from None


def flush_output() -> None:
    """Write what is still buffered."""
    with writing():
        sys.stdout.flush()


def is_terminal(stream: TextIO | None = None) -> bool:
    """Whether cursor codes may be written: a terminal reads standard output."""
    return (stream or sys.stdout).isatty() and os.environ.get("TERM", "") not in ("dumb", "unknown")


def console(stream: TextIO | None = None) -> Console:
    """A console on standard output, as wide as its terminal."""
    terminal = is_terminal(stream)
    made = Console(
        file=stream, highlight=False, force_interactive=terminal, width=None if terminal else PIPED_WIDTH, emoji=False
    )
    made.push_render_hook(_VisibleTexts())
    return made


def show(value: RenderableType) -> None:
    """Print a text, as it is, or a table. Lines of a text are not broken: they may be commands to copy."""
    with writing():
        console().print(value, markup=False, soft_wrap=True)


def print_json(value: Any) -> None:
    """One JSON document on one line."""
    encoding = (getattr(sys.stdout, "encoding", None) or "utf-8").lower().replace("-", "").replace("_", "")
    text = json.dumps(value, ensure_ascii=not encoding.startswith("utf"))
    with writing():
        print(_CONTROLS.sub(lambda found: f"\\u{ord(found[0]):04x}", text), flush=True)


def time_of(seconds: float) -> str:
    """Unix seconds as local time; empty for 0."""
    return datetime.fromtimestamp(seconds).strftime("%Y-%m-%d %H:%M:%S") if seconds else ""


UNSHOWN = {"LRE", "RLE", "LRO", "RLO", "PDF", "LRI", "RLI", "FSI", "PDI"}
"""Classes of the characters that embed, override or isolate a direction (UAX 9): with them a line reads as another."""


def visible(text: str) -> str:
    """``text`` without the control characters that move a terminal's cursor, change its colours or reverse the
    direction of letters; U+2028 and U+2029, which break lines, become spaces. Joiners of emoji and scripts stay."""
    if text.isprintable():
        return text
    return "".join(filter(None, map(_visible, text)))


def _visible(letter: str) -> str:
    if letter.isprintable() or letter in "\n\t":
        return letter
    kind = unicodedata.category(letter)
    if kind in ("Zl", "Zp"):
        return " "
    return "" if kind == "Cc" or unicodedata.bidirectional(letter) in UNSHOWN else letter


class _Visible:
    """A renderable whose texts bring no control characters; the console's own codes stay."""

    def __init__(self, inner: ConsoleRenderable) -> None:
        self._inner = inner

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        for segment in console.render(self._inner, options):
            yield segment if segment.control else Segment(visible(segment.text), segment.style)


class _VisibleTexts(RenderHook):
    def process_renderables(self, renderables: list[ConsoleRenderable]) -> list[ConsoleRenderable]:
        return [_Visible(renderable) for renderable in renderables]


def fields(lines: Mapping[str, Any] | Iterable[tuple[str, Any]]) -> None:
    """Print ``name value`` lines of a single thing, without those that are empty."""
    for name, value in lines.items() if isinstance(lines, Mapping) else lines:
        if value not in ("", None):
            show(f"{name:<{NAME_WIDTH}} {printable(str(value))}")
