"""TCP links that count bytes and break."""

from __future__ import annotations

import asyncio
import contextlib

BLOCK_BYTES = 1 << 16


class Relay:
    """A port that passes every connection on to another one."""

    def __init__(self, host: str, port: int) -> None:
        self._target = host, port
        self._server: asyncio.Server | None = None
        self._open: set[asyncio.StreamWriter] = set()
        self.answered = 0
        """Bytes that came back from the target."""

    async def start(self) -> str:
        """The URL of this end."""
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        return f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    def cut(self) -> None:
        """Every connection breaks, with what is on its way."""
        for writer in self._open:
            writer.transport.abort()

    async def close(self) -> None:
        self.cut()
        if self._server is not None:
            self._server.close()
            await self._server.wait_closed()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        ends = {writer}
        with contextlib.suppress(OSError):
            answers, there = await asyncio.open_connection(*self._target)
            ends.add(there)
            self._open |= ends
            await asyncio.gather(self._pass(reader, there), self._pass(answers, writer, answer=True))
        self._open -= ends
        for end in ends:
            end.transport.abort()

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, answer: bool = False) -> None:
        while block := await reader.read(BLOCK_BYTES):
            self.answered += len(block) * answer
            writer.write(block)
            await writer.drain()
        writer.write_eof()
