"""The HTTP connections of a peer server, which any machine of the network may open: their number is bounded, and each
has to send a request within a time, with a head of a bounded size."""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

MOST_CONNECTIONS = 256
"""Open connections: far more than readers, and far fewer than the files that a process may open."""

HEAD_SECONDS = 15.0
"""Time that a connection has to send the head of a request, and after its response that of the next."""


HEAD_BYTES = 64 << 10
"""Largest head of a request. The parser keeps all of one header until that is complete."""


class PeerHttp(HttpToolsProtocol):
    """uvicorn's HTTP with these bounds. Routes find it as ``request.state.connection``."""

    def __init__(self, config: Any, server_state: Any, app_state: dict[str, Any], _loop: Any = None) -> None:
        super().__init__(config, server_state, {**app_state, "connection": self}, _loop)
        self._timer: asyncio.TimerHandle | None = None
        self._head_bytes = 0
        """Received while a head is awaited."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > MOST_CONNECTIONS:
            self.abort()
        else:
            self._await_head()

    def data_received(self, data: bytes) -> None:
        if self._timer is not None:
            self._head_bytes += len(data)
            if self._head_bytes > HEAD_BYTES:
                self.abort()
                return
        super().data_received(data)

    def on_headers_complete(self) -> None:
        self._head_arrived()
        super().on_headers_complete()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._head_arrived()
        self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._head_arrived()
        super().connection_lost(exc)

    def abort(self) -> None:
        """End the connection, whether or not the other side reads what was sent."""
        self.transport.abort()

    def _await_head(self) -> None:
        self._head_bytes = 0
        self._timer = self.loop.call_later(HEAD_SECONDS, self.abort)

    def _head_arrived(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
