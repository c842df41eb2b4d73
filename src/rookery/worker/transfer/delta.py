"""The difference between two files of equal size: positions and values of the words that changed.

Values overwrite, they are not added: the result is bit for bit the file that the difference was taken from, whatever
its numbers are. One optimizer step at a small learning rate leaves most bfloat16 weights as they were, because a
change below half of a weight's last bit is rounded away. A LoRA's float32 weights change in nearly every word.

A difference is a header and one part for each :data:`BLOCK_WORDS` words: how the positions are written, their number,
the length of the positions, then positions and values. Positions are a mask of one bit a word, or gaps between changed
words, in bytes of which 255 continues a gap, whichever is shorter. Words have two or four bytes, whichever makes the
difference shorter in the first part that has changes.
"""

from __future__ import annotations

import shutil
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt

Read = Callable[[int], bytes]
WordArray = npt.NDArray[np.uint16] | npt.NDArray[np.uint32]

BLOCK_WORDS = 1 << 22
"""Words of a part, so that neither side holds more than some tens of megabytes."""

WORTH_SHARE = 0.5
"""A difference is used below this share of the file's size: reading, comparing and rebuilding cost about a copy."""

ESCAPE = 255
"""A byte of a gap that the next one continues."""

_MAGIC = b"RKD1"
_HEADER = struct.Struct("<4sBQ")
"""Magic, bytes of a word, size of the file."""
_PART = struct.Struct("<BII")
"""0 for a mask or 1 for gaps, changed words, bytes of the positions."""
_TYPES: dict[int, type[np.uint16] | type[np.uint32]] = {2: np.uint16, 4: np.uint32}


class BadDelta(Exception):
    """Bytes that are no difference to this base; the message is one line."""


def write_delta(base: Path, new: Path, delta: Path, block_words: int = BLOCK_WORDS) -> bool:
    """Write to ``delta`` what makes ``base`` to ``new``; False, and no file, where that is not worth it
    (:data:`WORTH_SHARE`) or their sizes differ. The files do not change meanwhile."""
    size = new.stat().st_size
    if base.stat().st_size != size or size % 4 or not size:
        return False
    most = int(size * WORTH_SHARE)
    with delta.open("wb") as file:
        width = _best_width(base, new, size, block_words)
        file.write(_HEADER.pack(_MAGIC, width, size))
        before, after = _words(base, width, size), _words(new, width, size)
        for at in range(0, len(after), block_words):
            file.write(_part(before[at : at + block_words], after[at : at + block_words]))
            if file.tell() >= most:
                break
        worth = file.tell() < most
    if not worth:
        delta.unlink()
    return worth


def apply_delta(base: Path, delta: Path, new: Path, block_words: int = BLOCK_WORDS) -> None:
    """Write to ``new`` what ``delta`` makes of ``base``, both with parts of ``block_words``. Raises :class:`BadDelta`;
    the caller checks the hash."""
    size = base.stat().st_size
    with delta.open("rb") as file:
        head = file.read(_HEADER.size)
        if len(head) < _HEADER.size:
            raise BadDelta("it has no header")
        magic, width, of = _HEADER.unpack(head)
        if magic != _MAGIC or width not in _TYPES or of != size or size % 4 or not size:
            raise BadDelta(f"it is none for a file of {size} bytes")
        shutil.copyfile(base, new)
        with new.open("r+b") as target:
            words: WordArray = np.memmap(target, dtype=_TYPES[width], mode="r+", shape=(size // width,))
            for at in range(0, len(words), block_words):
                _overwrite(words[at : at + block_words], file.read)
            words.flush()  # type: ignore[union-attr]
        if file.read(1):
            raise BadDelta("it goes on after its end")


def _best_width(base: Path, new: Path, size: int, block_words: int) -> int:
    """The bytes of a word with which the first changed part is shortest."""
    halves, others = _words(base, 2, size), _words(new, 2, size)
    for at in range(0, len(halves), block_words):
        before, after = halves[at : at + block_words], others[at : at + block_words]
        if (before != after).any():
            wide = (before.view(np.uint32), after.view(np.uint32))
            return 2 if len(_part(before, after)) <= len(_part(*wide)) else 4
    return 4


def _words(path: Path, width: int, size: int) -> WordArray:
    words: WordArray = np.memmap(path, dtype=_TYPES[width], mode="r", shape=(size // width,))
    return words


def _part(before: WordArray, after: WordArray) -> bytes:
    changed = before != after
    at = np.flatnonzero(changed)
    mask = np.packbits(changed)
    kind, positions = 0, mask
    if len(at) < len(mask):  # a gap takes a byte at least
        gaps = np.diff(at, prepend=-1) - 1
        if (taken := len(at) + int((gaps // ESCAPE).sum())) < len(mask):
            kind, positions = 1, _gap_bytes(gaps, taken)
    return _PART.pack(kind, len(at), len(positions)) + positions.tobytes() + after[at].tobytes()


def _gap_bytes(gaps: npt.NDArray[np.int64], taken: int) -> npt.NDArray[np.uint8]:
    written = np.full(taken, ESCAPE, np.uint8)
    ends = np.cumsum(gaps // ESCAPE + 1) - 1
    written[ends] = gaps % ESCAPE
    return written


def _overwrite(words: WordArray, read: Read) -> None:
    """Carry out one part."""
    head = read(_PART.size)
    if len(head) < _PART.size:
        raise BadDelta("it ends early")
    kind, count, length = _PART.unpack(head)
    if kind > 1 or count > len(words) or length > len(words) // 8 + 1:
        raise BadDelta("a part of it is damaged")
    positions = np.frombuffer(_exactly(read, length), np.uint8)
    if kind == 0:
        at = np.flatnonzero(np.unpackbits(positions)[: len(words)])
    else:
        last = positions != ESCAPE
        at = np.cumsum(positions, dtype=np.int64)[last] + np.arange(int(last.sum()))
    if len(at) != count or (count and at[-1] >= len(words)):
        raise BadDelta("a part of it is damaged")
    words[at] = np.frombuffer(_exactly(read, count * words.itemsize), words.dtype)


def _exactly(read: Read, length: int) -> bytes:
    found = read(length)
    if len(found) < length:
        raise BadDelta("it ends early")
    return found
