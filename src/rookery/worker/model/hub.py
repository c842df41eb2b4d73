"""Requests to the Hugging Face hub that end: a hub that is silent, or sends a few bytes at a time, is given up within
seconds.

The hub's library asks for a repository without a time limit and repeats each request that times out five times. Here
every wait for bytes has a limit, and a request whose second attempt got no answer either is not repeated. A download
may take as long as it brings bytes: of each request, the head of the answer and then :data:`PROGRESS_BYTES` after
:data:`PROGRESS_BYTES` have a limit. Where one is missed the connection is ended, and the hub is asked nothing more.

Requests of the library's other protocol, Xet, are made outside of Python and have its own limits.
"""

from __future__ import annotations

import importlib
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

from rookery.errors import short
from rookery.network import unusable_proxy

SECONDS = 10.0
"""Longest silence of the hub during a request: a hub that answers does so within two."""
ATTEMPTS = 2
"""Attempts of one request without an answer, after which the hub counts as silent."""
PROGRESS_BYTES = 10 << 10
"""Of an answer, after which its time begins again."""


class NoClient(Exception):
    """The hub's library cannot send anything from this process, such as with a proxy that it does not speak."""


class HubSilent(Exception):
    """The hub does not answer, or next to nothing comes."""


@contextmanager
def bounded_requests(seconds: float = SECONDS) -> Iterator[None]:
    """Within, every request of the hub's library in this process has limits: ``seconds`` of silence, and twice as long
    for the head of an answer and for each part of it. The library raises :class:`HubSilent`, or the error of a broken
    connection, for one that misses them. Raises :class:`NoClient`."""
    import huggingface_hub

    try:
        usual = huggingface_hub.get_session()
    except Exception as error:  # of the libraries below it
        raise NoClient(unusable_proxy() or short(" ".join(str(error).split()))) from error
    unanswered: Counter[str] = Counter()
    watch = AnswerWatch(2 * seconds)

    def sending(request: Any) -> None:
        asked = f"{request.method} {request.url}"
        if watch.gave_up:
            raise HubSilent(f"less than {PROGRESS_BYTES} bytes came within {watch.seconds:g} s")
        if unanswered[asked] >= ATTEMPTS:
            raise HubSilent(f"no answer within {ATTEMPTS} x {seconds:g} s")
        unanswered[asked] += 1
        given = request.extensions.get("timeout", {})
        request.extensions["timeout"] = {
            kind: seconds if given.get(kind) is None else min(seconds, given[kind])
            for kind in ("connect", "read", "write", "pool")
        }
        request.extensions["trace"] = partial(watch.traced, request)

    def answered(response: Any) -> None:
        del unanswered[f"{response.request.method} {response.request.url}"]
        watch.answered(response)

    def with_usual(event: str, hook: Any) -> list[Any]:
        """The usual hooks and this one, without those of an earlier call here."""
        return [*(one for one in usual.event_hooks[event] if getattr(one, "__module__", "") != __name__), hook]

    hooks: Any = {"request": with_usual("request", sending), "response": with_usual("response", answered)}
    library: Any = importlib.import_module(type(usual).__module__.partition(".")[0])

    def client() -> Any:
        limits = library.Limits(max_keepalive_connections=0)  # each request has a connection, which the watch sees
        return type(usual)(event_hooks=hooks, follow_redirects=True, timeout=seconds, limits=limits)

    huggingface_hub.set_client_factory(client)
    with watch.running():
        yield


@dataclass(eq=False)
class _Asked:
    """A request under way."""

    connection: socket.socket
    since: float
    """When the present part of the answer began."""
    response: Any = None
    """None before the head of the answer has arrived."""
    came: int = 0
    """Bytes of the answer before the present part."""


class AnswerWatch:
    """Ends the connections of requests whose answers make no progress for ``seconds``."""

    def __init__(self, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.seconds = seconds
        self.gave_up = False
        """A connection was ended."""
        self._clock = clock
        self._asked: dict[Any, _Asked] = {}
        self._lock = threading.Lock()
        self._ended = threading.Event()

    def traced(self, request: Any, event: str, info: Mapping[str, Any]) -> None:
        """The library below has done a part of a request: the extension ``trace`` of httpx."""
        with self._lock:
            if event.endswith((".connect_tcp.complete", ".start_tls.complete")):
                connection = info["return_value"].get_extra_info("socket")
                self._asked[request] = _Asked(connection, self._clock())
            elif event.endswith((".response_closed.complete", ".start_tls.failed")):
                self._asked.pop(request, None)

    def answered(self, response: Any) -> None:
        """The head of an answer has arrived."""
        with self._lock:
            if (asked := self._asked.get(response.request)) is not None:
                asked.response, asked.since = response, self._clock()

    def look(self) -> None:
        """Look at all requests under way."""
        with self._lock:
            for asked in self._asked.values():
                came = 0 if asked.response is None else asked.response.num_bytes_downloaded
                if came - asked.came >= PROGRESS_BYTES:
                    asked.came, asked.since = came, self._clock()
                elif self._clock() - asked.since > self.seconds:
                    self.gave_up = True
                    with suppress(OSError):  # it has just ended
                        socket.socket.shutdown(asked.connection, socket.SHUT_RDWR)  # TLS would answer, and wait

    @contextmanager
    def running(self) -> Iterator[None]:
        """Within, a thread looks several times in ``seconds``."""
        thread = threading.Thread(target=self._run, name="hub", daemon=True)
        thread.start()
        try:
            yield
        finally:
            self._ended.set()
            thread.join()

    def _run(self) -> None:
        while not self._ended.wait(min(1.0, self.seconds / 4)):
            self.look()
