"""Files of rows, one JSON object a line, read a line at a time."""

from __future__ import annotations

from codecs import BOM_UTF8
from collections.abc import Callable, Iterator
from json import JSONDecodeError
from typing import IO, Any

from rookery.errors import UserError, count_of
from rookery.spec import values

ROW_BYTES, ROWS = 1 << 30, 1 << 40
"""Limits of a file that is read where the service's limits do not apply: an environment on a user's own machine."""

MOST_BLANK = 100_000
"""Blank lines of a file: they are skipped, and each takes the time of a row."""

FORMATS = {
    b"\x1f\x8b": "gzip", b"BZh": "bzip2", b"\xfd7zXZ": "xz", b"\x28\xb5\x2f\xfd": "Zstandard", b"PK\x03\x04": "zip",
    b"PAR1": "Parquet", b"ARROW1": "Arrow", b"SQLite format 3": "SQLite", b"%PDF": "PDF", b"<!": "HTML",
    b"<html": "HTML", b"version https://git-lfs": "a pointer of Git LFS", b"\xff\xfe\0\0": "UTF-32",
    b"\0\0\xfe\xff": "UTF-32", b"{\0\0\0": "UTF-32", b"\0\0\0{": "UTF-32", b"\xff\xfe": "UTF-16",
    b"\xfe\xff": "UTF-16", b"{\0": "UTF-16", b"\0{": "UTF-16",
}  # fmt: skip
"""The first bytes of files of other formats, which are no JSON: the first that fit count."""

CheckRow = Callable[[Any, str], None]
"""``check(row, where)`` raises :class:`~rookery.errors.UserError` for a row that is not one of its environment's."""


def scan(
    file: IO[bytes], where: str = "dataset", row_bytes: int = ROW_BYTES, rows: int = ROWS, *, check: CheckRow
) -> Iterator[tuple[int, dict[str, Any]]]:
    """The offset and the content of each row of a JSONL file; blank lines are skipped, and so is a byte order mark at
    the beginning of a line, as joined files have them. One line is in memory.

    Raises :class:`UserError` with one line: ``where``, the line's number, the mistake, and what to do."""
    number = offset = count = blank = 0
    while line := file.readline(row_bytes + 1):  # only \n ends a line: other separators may stand inside a string
        number, start, offset = number + 1, offset, offset + len(line)
        if number == 1 and (kind := next((kind for first, kind in FORMATS.items() if line.startswith(first)), "")):
            raise UserError(f"{where}: it is {kind}; give a text in UTF-8 with one JSON object per line")
        if len(line) > row_bytes:
            raise UserError(f"{where}: line {number} has more than {row_bytes} bytes; make the row shorter")
        if line.startswith(BOM_UTF8):
            line, start = line.removeprefix(BOM_UTF8), start + len(BOM_UTF8)
        if not line.strip():
            blank += 1
            if blank > MOST_BLANK:
                raise UserError(f"{where}: it has more than {MOST_BLANK} blank lines; remove them")
            continue
        try:
            row = values.decode(line)
        except values.ValueRefused as error:
            raise UserError(f"{where}: line {number}: {error}") from None
        except UnicodeDecodeError:
            raise UserError(f"{where}: line {number} is not UTF-8; save the file as UTF-8") from None
        except ValueError as error:
            remedy = "write one JSON object per line"
            if line.strip() in (b"[", b"{"):
                remedy = "the file is one value over many lines: write each row, an object, on a line of its own"
            at = f"{error.msg}: character {error.pos + 1}" if isinstance(error, JSONDecodeError) else error
            raise UserError(f"{where}: line {number} is not JSON ({at}); {remedy}") from None
        check(row, f"{where}: line {number}")
        count += 1
        if count > rows:
            raise UserError(f"{where}: it has more than {count_of(rows, 'row')}; give fewer")
        yield start, row
    if not count:
        raise UserError(f'{where}: no rows; write one JSON object per line, like {{"prompt": "2+2?", "answer": "4"}}')
