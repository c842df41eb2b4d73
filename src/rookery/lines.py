"""The lines of a streamed response."""

from __future__ import annotations

from collections.abc import Iterator


class LineSplitter:
    """The complete lines of a stream without their ends. Only a newline ends a line: ``str.splitlines``, which httpx
    uses, would also split at characters that may be part of a JSON string."""

    def __init__(self) -> None:
        self._parts: list[bytes] = []

    def feed(self, chunk: bytes) -> Iterator[bytes]:
        """The lines that end in the next ``chunk``."""
        *ends, rest = chunk.split(b"\n")
        for end in ends:
            yield b"".join([*self._parts, end])
            self._parts.clear()
        self._parts.append(rest)
