"""HTTP requests to one service: JSON in and out, errors as :class:`~rookery.errors.RookeryError`.

* The time limit of a request follows from its purpose: a silent service does not hold a list for minutes.
* A process that was forked opens new connections: two processes on one connection would read each other's
  responses. A connection is pickled and copied as its address and its key.
"""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import closing, suppress
from email.utils import parsedate_to_datetime
from itertools import zip_longest
from typing import IO, Any, NoReturn
from urllib.parse import quote, urlsplit

import httpcore
import httpx

from rookery import errors
from rookery.folders import temporary_errors
from rookery.lines import LineSplitter
from rookery.network import http_tls, proxy_of, service_url
from rookery.pace import TooSlow, TransferPace
from rookery.telemetry.numbers import figure

BUSY_TRIES, BUSY_SECONDS = 5, 2.0
"""A read that the service refuses, since the tenant asks too much of it, is sent so often in all, where the wait that
the service names is no longer than this: a list on a busy machine comes later instead of failing."""

CONNECT_SECONDS = 3.0
"""Time limit of an attempt to connect, of which there are three: together less than ``READ_SECONDS``."""

CONNECT_RETRIES = 2

READ_SECONDS = 10.0
"""Time limit of a request that only reads."""

CHANGE_SECONDS = 60.0
"""Time limit of a request that changes something: it may wait for the end of a job's work, and for the database."""

WORK_SECONDS = 600.0
"""Time limit of a request that waits for work: a sample in an engine's queue, a model that is fetched, a large
upload."""

LEAST_SECONDS = 0.001
"""Of a wait whose time is over: 0 would be a socket that does not wait."""

QUIET_SECONDS = 30.0
"""A stream without an event or heartbeat for this long counts as broken."""

MOST_SECONDS = 1e6
"""Longest time limit that a caller may give: the sockets of a platform take no more than three weeks."""


class RequestRefused(errors.UserError):
    """The service refused the request; ``problems`` has one line per reason."""

    def __init__(self, message: str, problems: list[str]) -> None:
        super().__init__(message)
        self.problems = problems


class ConnectionBroken(errors.Unavailable):
    """The connection broke or could not be made; the request may be sent again."""


class Record(dict[str, Any]):
    """A JSON object whose fields are also attributes: ``row.reward``, ``row["reward/format"]``."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(f"no {name!r} here; there is {', '.join(self)}") from None

    def figure(self, name: str, form: str = ".3f") -> str:
        """The number in the field ``name`` as a text in this form, and a dash where there is none: a field may be null,
        such as the mean of an evaluation in which every episode failed, or missing, such as a metric of another
        algorithm."""
        return figure(self.get(name), form)


def record(value: Any) -> Any:
    """``value`` with every mapping in it as a :class:`Record`."""
    if isinstance(value, dict):
        return Record({key: record(inner) for key, inner in value.items()})
    return [record(inner) for inner in value] if isinstance(value, list) else value


NEXT_PAGE = "X-Next-Page"
"""The header of a list's page with the place of the next one."""


def segment(kind: str, text: str) -> str:
    """``text``, the id or name of a ``kind`` of thing, as a part of a path. Raises :class:`~rookery.errors.NotFound`
    for one that would lead to another path: dots are resolved before a request is sent, and slashes are decoded before
    the service looks for a route. Nothing has such a name."""
    if text not in ("", ".", "..") and {"/", "\\", "\0"}.isdisjoint(text):
        with suppress(UnicodeEncodeError):  # bytes of a command line that are no UTF-8
            return quote(text, safe="~")
    raise errors.NotFound(f"no {kind} {errors.short(text)!r}")


class WaitingClock:
    """The time of a client, which waits in its caller's thread."""

    def monotonic(self) -> float:
        """Seconds since an arbitrary moment; never goes backwards."""
        return time.monotonic()

    def sleep(self, seconds: float) -> None:
        """Return after ``seconds``."""
        time.sleep(seconds)


class HttpConnection:
    """Requests to the service at ``url`` with ``key``. They raise :class:`ConnectionBroken` if it cannot be reached,
    else :class:`RequestRefused` or the error of :mod:`rookery.errors` for the response's status. No error shows the
    key."""

    def __init__(
        self,
        url: str,
        key: str | None,
        ca_file: str = "",
        *,
        key_from: str = "",
        seconds: float | None = None,
        clock: WaitingClock | None = None,
    ) -> None:
        """``ca_file`` is as in :func:`~rookery.network.client_tls`. ``key_from`` says where the key was found, for the
        error of a wrong one. ``seconds`` is the time limit of every request in place of that of its purpose. Raises
        :class:`~rookery.errors.UserError` for one that is none."""
        if seconds is not None and not (isinstance(seconds, int | float) and 0 < seconds <= MOST_SECONDS):
            shown = errors.short(repr(seconds))
            raise errors.UserError(f"seconds: given {shown}, allowed: a number above 0, at most {MOST_SECONDS:,.0f}")
        self.url = service_url(url, "the service's address (ROOKERY_URL)")
        self._key, self._ca_file, self._key_from, self._seconds = key, ca_file, key_from, seconds
        self.clock = clock or WaitingClock()
        self._ahead: float | None = None
        """By how much the service's clock is ahead of the monotonic one; None before the first response."""
        self._opened: dict[int, httpx.Client] = {}
        self._client()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_opened": {}, "_ahead": None}

    def __repr__(self) -> str:
        return f"HttpConnection({self.url!r})"

    def _client(self) -> httpx.Client:
        """This process's connections. Those of a process from which it was forked stay open there."""
        if (opened := self._opened.get(os.getpid())) is not None:
            return opened
        headers = {} if self._key is None else {"Authorization": f"Bearer {self._key}"}
        way = PacedTransport(
            retries=CONNECT_RETRIES,
            verify=http_tls(self.url, self._ca_file),
            proxy=proxy_of(self.url),
            trust_env=False,  # it would read SSL_CERT_FILE also for an address without TLS
        )
        try:
            made = httpx.Client(base_url=self.url, transport=way, headers=headers, trust_env=False)
            made.event_hooks = {"response": [self._note_date]}
        except UnicodeEncodeError:
            raise errors.UserError(
                "the API key has characters that no key has: letters, digits and dashes; copy it again (ROOKERY_KEY)"
            ) from None
        except httpx.InvalidURL as error:
            raise errors.UserError(f"{self.url} cannot be used ({error}); check ROOKERY_URL") from None
        return self._opened.setdefault(os.getpid(), made)

    def _note_date(self, response: httpx.Response) -> None:
        with suppress(TypeError, ValueError, OverflowError):  # a proxy's answer may have another date, or none
            date = parsedate_to_datetime(response.headers.get("Date", ""))
            self._ahead = date.timestamp() - self.clock.monotonic()

    def service_now(self) -> float:
        """Unix seconds by the service's clock as its newest response gave them: up to a second behind, and more where
        it is busy. By this machine's before the first. Compare no time of the service with another clock: this one may
        be wrong by hours."""
        return time.time() if self._ahead is None else self.clock.monotonic() + self._ahead

    def call(self, method: str, path: str, *, seconds: float | None = None, **request: Any) -> Any:
        """The response's JSON, with its objects as records; None for a response without content. ``seconds`` is the
        longest silence, by default that of reading or changing something."""
        limit = self._seconds or seconds or (READ_SECONDS if method == "GET" else CHANGE_SECONDS)
        return self._content(self._send(method, path, limit, **request))

    def rows(self, path: str, **params: Any) -> Iterator[Record]:
        """The rows of a list, page by page as they are read."""
        while True:
            response = self._send("GET", path, self._seconds or READ_SECONDS, params=params)
            yield from self._content(response)
            if not (after := response.headers.get(NEXT_PAGE)):
                return
            params["after"] = after

    def download(self, path: str, file: IO[bytes], kind: str = "") -> httpx.Headers:
        """Write the response's content to the temporary ``file`` as it arrives; returns its headers. Content of another
        ``kind`` is no answer of the service."""
        limit = self._seconds or CHANGE_SECONDS
        try:
            with self._client().stream("GET", path, timeout=_timeout(limit)) as response:
                response.stream = Paced(response.stream, limit)
                if response.status_code >= 400:
                    response.read()
                    self._raise_error(response)
                if kind and response.headers.get("content-type", "") != kind:
                    raise self._foreign()
                for chunk in response.iter_bytes():
                    with temporary_errors():
                        file.write(chunk)
                return response.headers
        except (httpx.TransportError, httpx.InvalidURL) as error:
            raise self._broken(error, limit) from None

    def stream(self, path: str, method: str = "GET", **request: Any) -> Iterator[tuple[str, Record]]:
        """Server-sent events as (kind, data); comments are ``("heartbeat", {})``. Data that is not JSON counts as a
        broken connection."""
        limit = self._seconds or QUIET_SECONDS
        try:
            sent = self._request(method, path, limit, **request)
            with closing(self._client().send(sent, stream=True)) as response:
                if response.status_code >= 400:
                    response.stream = Paced(response.stream, limit)
                    response.read()
                    self._raise_error(response)
                if not response.headers.get("content-type", "").startswith("text/event-stream"):
                    raise self._foreign()
                kind = ""
                for line in _lines(response, limit):
                    if line.startswith(b"event: "):
                        kind = line.removeprefix(b"event: ").decode(errors="replace")
                    elif line == b"data: [DONE]":
                        return
                    elif line.startswith(b"data: "):
                        yield kind, self._data(line.removeprefix(b"data: "))
                    elif line.startswith(b":"):
                        yield "heartbeat", Record()
        except (httpx.TransportError, httpx.InvalidURL) as error:
            raise self._broken(error, limit) from None

    def close(self) -> None:
        """Close this process's connections; a later request opens new ones."""
        if (opened := self._opened.pop(os.getpid(), None)) is not None:
            opened.close()

    def _request(self, method: str, path: str, seconds: float, **content: Any) -> httpx.Request:
        """Raises :class:`~rookery.errors.UserError` for content that no request can have."""
        try:
            return self._client().build_request(method, path, timeout=_timeout(seconds), **content)
        except UnicodeEncodeError:
            raise errors.UserError("a text is not Unicode: it has bytes that are no UTF-8; give it in UTF-8") from None
        except (TypeError, ValueError) as error:  # a value that is no JSON, a number such as NaN
            raise errors.UserError(f"the request cannot be written: {error}") from None

    def _send(self, method: str, path: str, seconds: float, **request: Any) -> httpx.Response:
        for left in reversed(range(BUSY_TRIES)):
            try:
                sent = self._client().send(self._request(method, path, seconds, **request), stream=True)
                with closing(sent) as response:
                    response.stream = Paced(response.stream, seconds)
                    response.read()
            except (httpx.TransportError, httpx.InvalidURL) as error:
                raise self._broken(error, seconds) from None
            wait = _seconds(response.headers.get("Retry-After", ""))
            if not left or method != "GET" or response.status_code != 429 or wait > BUSY_SECONDS:
                break
            self.clock.sleep(wait)
        if response.status_code >= 400:
            self._raise_error(response)
        return response

    def _content(self, response: httpx.Response) -> Any:
        """The response's JSON, with its objects as records; None for a response without content."""
        try:
            return record(response.json()) if response.status_code != 204 else None
        except ValueError:
            raise self._foreign() from None

    def _foreign(self) -> errors.Unavailable:
        """The error of an answer in another form, such as a load balancer's page."""
        return errors.Unavailable(f"the server at {self.url} is not a Rookery service; set ROOKERY_URL")

    def _data(self, line: bytes) -> Record:
        try:
            data: Record = record(json.loads(line))
        except ValueError as error:
            raise self._broken(error) from None
        return data

    def _raise_error(self, response: httpx.Response) -> NoReturn:
        """Raises the error for a response's status. That of a wrong key names where the key is from."""
        try:
            _raise_error(response)
        except errors.Unauthorized as error:
            raise errors.Unauthorized(
                f"{error} (the key is from {self._key_from})" if self._key_from else str(error)
            ) from None

    def _broken(self, error: Exception, seconds: float = CHANGE_SECONDS) -> errors.RookeryError:
        if isinstance(error, httpx.LocalProtocolError):  # its text contains the header, which may be the key
            return errors.UserError(
                f"a request to {self.url} cannot be sent: a key may have no line breaks or control characters;"
                " check ROOKERY_KEY"
            )
        if "CERTIFICATE_VERIFY_FAILED" in str(error):
            return errors.UserError(f"the certificate of {self.url} is not trusted here; set ROOKERY_CA_FILE")
        if isinstance(error, httpx.ProxyError):
            proxy = urlsplit(proxy_of(self.url) or "").hostname
            return ConnectionBroken(
                f"the proxy {proxy} does not let this reach {self.url} ({error}); add its host to no_proxy, or correct"
                " http_proxy or https_proxy"
            )
        if isinstance(error, httpx.ReadTimeout | httpx.WriteTimeout | httpx.PoolTimeout):
            return ConnectionBroken(f"the service at {self.url} did not answer within {seconds:g} s; try again later")
        if isinstance(error, httpx.ConnectError | httpx.ConnectTimeout):
            if any(isinstance(cause, socket.gaierror) for cause in _causes(error)):
                return ConnectionBroken(f"no machine has the name in {self.url}; correct ROOKERY_URL or --url")
            if any(isinstance(cause, NameSilent) for cause in _causes(error)):
                return ConnectionBroken(
                    f"no address of the name in {self.url} came within {min(CONNECT_SECONDS, seconds):g} s; try again"
                    " when its name server answers, or set ROOKERY_URL to an address"
                )
            return ConnectionBroken(
                f"no Rookery service answers at {self.url}; start one with: rookery serve (or set ROOKERY_URL)"
            )
        return ConnectionBroken(f"the connection to {self.url} broke ({type(error).__name__}: {error}); try again")


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    """An error, and those that led to it."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


_ERRORS = {
    kind.status: kind
    for kind in (
        errors.Unauthorized,
        errors.Forbidden,
        errors.NotFound,
        errors.Conflict,
        errors.Unavailable,
        errors.StorageFull,
    )
}


GATEWAY_ERRORS = (502, 504)
"""Statuses of a proxy or load balancer whose service is away, as during its restart."""


def _seconds(text: str) -> float:
    """The value of ``Retry-After``; 1 for a date, or none."""
    return float(text) if text.isascii() and text.isdigit() and len(text) < 6 else 1.0


def _lines(response: httpx.Response, seconds: float) -> Iterator[bytes]:
    """The lines of a stream of events. Bytes without a line for ``seconds`` are silence."""
    splitter, clock = LineSplitter(), time.monotonic
    left = seconds
    blocks = response.iter_bytes()
    while True:
        began = clock()
        block = next(blocks, None)
        if block is None:
            return
        left -= clock() - began  # the time that a caller takes for an event does not count
        for line in splitter.feed(block):
            left = seconds
            yield line
        if left <= 0:
            raise httpx.ReadTimeout(f"no event came within {seconds:g} s")


class Paced(httpx.SyncByteStream):
    """The bytes of a response, which must come at a pace: a proxy may send one now and then."""

    def __init__(self, stream: Any, seconds: float) -> None:
        self._stream, self._seconds = stream, seconds

    def __iter__(self) -> Iterator[bytes]:
        try:
            yield from TransferPace(self._seconds).blocks(self._stream)
        except TooSlow as error:
            raise httpx.ReadTimeout(str(error)) from None

    def close(self) -> None:
        self._stream.close()


class PacedTransport(httpx.HTTPTransport):
    """Connections on which each wait ends. Libraries limit single silences, and none while a name is looked up.

    ================================  ==========================================================================
    wait                              limit
    ================================  ==========================================================================
    for the addresses of a name       the time to connect, together with the next one
    for a connection                  the same for all addresses of the name, of which each gets an equal part
    for TLS                           the time to connect
    until a piece is sent             the time of a change
    for the head of the response      the longest silence, with any number of responses of the class ``1xx``
    for the body                      the slowest pace (:class:`Paced`); for an event, the longest silence
    ================================  ==========================================================================
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        pool: Any = self._pool
        pool._network_backend = _PacedBackend(pool._network_backend)

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        response = super().handle_request(request)
        connection = response.extensions.get("network_stream")
        if isinstance(connection, _PacedConnection):
            connection.responds()
        return response


class _PacedBackend:
    """A backend of httpcore whose connections are :class:`_PacedConnection`."""

    def __init__(self, backend: Any) -> None:
        self._backend = backend

    def connect_tcp(self, host: str, port: int, timeout: float, **options: Any) -> _PacedConnection:
        until = time.monotonic() + timeout
        found = _addresses(host, port, timeout)
        while True:
            address, left = found.pop(0), max(until - time.monotonic(), LEAST_SECONDS)
            try:
                return _PacedConnection(self._backend.connect_tcp(address, port, left / (len(found) + 1), **options))
            except (httpcore.ConnectError, httpcore.ConnectTimeout):
                if not found:
                    raise

    def sleep(self, seconds: float) -> None:
        self._backend.sleep(seconds)


class NameSilent(httpcore.ConnectTimeout):
    """No address of the service's name came in time."""


def _addresses(host: str, port: int, seconds: float) -> list[str]:
    """The addresses of a host, each once, the families in turn: one of them may lead nowhere. Raises the errors of
    httpcore; no library limits the time that the system looks a name up, so a thread waits for it."""
    found: Future[list[Any]] = Future()

    def look_up() -> None:
        try:
            found.set_result(socket.getaddrinfo(host, port, type=socket.SOCK_STREAM))
        except (OSError, UnicodeError) as error:
            found.set_exception(error)

    threading.Thread(target=look_up, name=f"addresses of {host}", daemon=True).start()
    try:
        addresses = [(family, str(address[0])) for family, _, _, _, address in found.result(seconds)]
    except TimeoutError:
        raise NameSilent(f"no address of {host} came within {seconds:g} s") from None
    except (OSError, UnicodeError) as error:
        raise httpcore.ConnectError(str(error)) from error
    first = [one for family, one in addresses if family == addresses[0][0]]
    others = [one for family, one in addresses if family != addresses[0][0]]
    return [one for pair in zip_longest(dict.fromkeys(first), dict.fromkeys(others)) for one in pair if one is not None]


class _PacedConnection:
    """A connection of httpcore."""

    def __init__(self, connection: Any) -> None:
        self._connection = connection
        self._waits = False
        """For the head of a response, since a part of its request was sent."""
        self._until = 0.0
        """When that must have come, of the monotonic clock; 0 before the first read."""

    def write(self, content: bytes, timeout: float) -> None:
        self._waits = True
        self._connection.write(content, timeout)

    def read(self, most: int, timeout: float) -> bytes:
        if self._waits:
            now = time.monotonic()
            self._until = self._until or now + timeout
            if now >= self._until:
                raise httpx.ReadTimeout(f"no response came within {timeout:g} s")
            timeout = self._until - now
        return bytes(self._connection.read(most, timeout))

    def responds(self) -> None:
        """The head has come."""
        self._waits, self._until = False, 0.0

    def start_tls(self, *context: Any, **options: Any) -> _PacedConnection:
        return _PacedConnection(self._connection.start_tls(*context, **options))

    def get_extra_info(self, name: str) -> Any:
        return self._connection.get_extra_info(name)

    def close(self) -> None:
        self._connection.close()


def _timeout(seconds: float) -> httpx.Timeout:
    """The limits of a request whose response may be silent for ``seconds``."""
    return httpx.Timeout(max(seconds, CHANGE_SECONDS), connect=min(CONNECT_SECONDS, seconds), read=seconds)


def _raise_error(response: httpx.Response) -> NoReturn:
    """Raises the error for a response's status."""
    try:
        body = response.json()
        error = body["error"]  # an object in the OpenAI API, else a text
        message = str(error["message"] if isinstance(error, dict) else error)
        problems = [str(line) for line in body.get("problems") or []]
    except (ValueError, KeyError, TypeError, AttributeError):
        message, problems = f"{response.request.url} returned {response.status_code}: is that a Rookery service?", []
    if response.status_code in _ERRORS:
        raise _ERRORS[response.status_code](message)
    if response.status_code == errors.TooManyRequests.status:
        raise errors.TooManyRequests(message, _seconds(response.headers.get("Retry-After", "")))
    if response.status_code in GATEWAY_ERRORS:
        raise errors.Unavailable(message)
    if response.status_code < 500:
        raise RequestRefused(message, problems or [message])
    raise errors.RookeryError(message)
