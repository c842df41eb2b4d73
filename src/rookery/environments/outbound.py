"""Requests to servers that a stranger's job names, from a process of the service.

The address is looked up once, judged (:func:`rookery.network.reachable`), and connected to: redirects are not followed,
and proxies are not used.
"""

from __future__ import annotations

import http.client
import io
import json
import re
import socket
import ssl
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from rookery.errors import UserError, short
from rookery.network import reachable

SECONDS = 20.0
"""Longest time of a request, from the first packet to the last byte of the answer."""

ANSWER_BYTES = 4 << 20
"""Largest answer, where the caller gives no limit."""

BUSY = frozenset({408, 425, 429, 502, 503, 504, 529})
"""Statuses of a server that may answer the same request later."""

_HEADER_NAME = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]+")
_HEADER_VALUE = re.compile(r"[\t\x20-\x7e]*")

_allowed = ""


class ServerBusy(UserError):
    """The server is busy, limits requests, or accepts no connection: the same request may be answered later, such as
    after ``retry_after`` seconds, where it says so."""

    def __init__(self, message: str, retry_after: float = 0.0) -> None:
        super().__init__(message)
        self.retry_after = retry_after


def set_reachable_hosts(allowed: str) -> None:
    """The hosts that the administrator allows. Called once when a process starts."""
    global _allowed
    _allowed = allowed


def reachable_hosts() -> str:
    """The hosts that the administrator allows."""
    return _allowed


def connection(
    url: str,
    name: str,
    *,
    allowed: str | None = None,
    seconds: float = SECONDS,
    confidential: bool = False,
    redact: Callable[[str], str] = str,
) -> socket.socket:
    """A connection to the host of ``url``, which ``name`` gave, without TLS. ``allowed`` replaces the hosts that the
    administrator allows; ``confidential`` and ``redact`` are as for a request. Blocks; raises :class:`UserError`,
    :class:`ServerBusy` for one that is not accepted."""
    if not urlsplit(url).path.isascii():
        raise UserError(
            f"{name}: given {short(repr(url))}, allowed: a path in ASCII, with others written such as %C3%BC"
        )
    ip, port = reachable(url, name, _allowed if allowed is None else allowed, confidential)
    try:
        return socket.create_connection((ip, port), seconds)
    except OSError as error:
        raise ServerBusy(f"{name}: {short(redact(url))} does not answer ({error.strerror or error})") from None


def check_headers(headers: Mapping[str, str]) -> None:
    """Raises ``ValueError``, without the value, which may be a key, for a header that cannot be sent."""
    for name, value in headers.items():
        if _HEADER_NAME.fullmatch(name) is None:
            raise ValueError(f"the header {short(repr(name))} has no name of ASCII letters, digits and -")
        if _HEADER_VALUE.fullmatch(value) is None:
            raise ValueError(f"the header {short(name)} has characters besides printable ASCII in its value")


class _Timed(io.RawIOBase):
    """A connection whose waits all end at one time."""

    def __init__(self, connected: socket.socket, until: float) -> None:
        self._connected, self._until = connected, until

    def set_timeout(self) -> None:
        left = self._until - time.monotonic()
        if left <= 0:
            raise TimeoutError("timed out")
        self._connected.settimeout(left)

    def sendall(self, data: bytes) -> None:
        self.set_timeout()
        self._connected.sendall(data)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        self.set_timeout()
        return self._connected.recv_into(buffer)

    def makefile(self, mode: str) -> io.BufferedReader:
        return io.BufferedReader(_Timed(self._connected, self._until))  # the client closes each of the two


@dataclass(frozen=True)
class AnswerLimits:
    """The most that a request waits for, and reads."""

    seconds: float = SECONDS
    """Of the whole request."""
    size: int = ANSWER_BYTES
    """In bytes."""


ANSWER_LIMITS = AnswerLimits()


def request_json(
    url: str,
    name: str,
    body: Any = None,
    headers: dict[str, str] | None = None,
    *,
    allowed: str | None = None,
    most: AnswerLimits = ANSWER_LIMITS,
    confidential: bool = False,
    redact: Callable[[str], str] = str,
) -> Any:
    """The JSON that ``url`` answers: POST with ``body``, GET without. ``allowed`` is as for a connection. A
    ``confidential`` request has a secret. In errors, ``redact`` changes each whole text before it is cut. Blocks;
    raises :class:`UserError`, of which :class:`ServerBusy` may pass."""
    seconds, limit = most.seconds, most.size
    until, shown = time.monotonic() + seconds, short(redact(url))
    given = {"Content-Type": "application/json", "Accept": "application/json", **(headers or {})}
    try:
        check_headers(given)
    except ValueError as error:
        raise UserError(f"{name}: {error}") from None
    parts = urlsplit(url)
    opened = connection(url, name, allowed=allowed, seconds=seconds, confidential=confidential, redact=redact)
    client = http.client.HTTPConnection(parts.netloc)
    try:
        _Timed(opened, until).set_timeout()
        if parts.scheme == "https":
            opened = ssl.create_default_context().wrap_socket(opened, server_hostname=parts.hostname)
        client.sock = _Timed(opened, until)
        client.request(
            "GET" if body is None else "POST", parts.path or "/", None if body is None else json.dumps(body), given
        )
        response = client.getresponse()
        answer = response.read(limit + 1)
    except TimeoutError:
        raise UserError(f"{name}: {shown} does not answer within {seconds:g} s") from None
    except (OSError, ValueError, http.client.HTTPException) as error:
        line = one_line(str(error), redact) or type(error).__name__
        raise UserError(f"{name}: {shown} does not answer ({line})") from None
    finally:
        client.close()
        opened.close()
    if len(answer) > limit:
        size = f"{limit >> 20} MB" if limit >= 1 << 20 else f"{limit >> 10} kB"
        raise UserError(f"{name}: {shown} answers {response.status} with more than {size}")
    if response.status >= 300:
        line = f"{name}: {shown} answers {response.status}: {one_line(answer.decode('utf-8', 'replace'), redact)}"
        if response.status in BUSY:
            raise ServerBusy(line, _seconds(response.getheader("Retry-After", "")))
        raise UserError(line)
    try:
        return json.loads(answer)
    except (ValueError, RecursionError):
        raise UserError(f"{name}: {shown} answers no JSON") from None


def _seconds(header: str) -> float:
    """The seconds of a ``Retry-After``; 0 without any."""
    return float(header) if re.fullmatch(r"[0-9]{1,6}(\.[0-9]{1,6})?", header.strip()) else 0.0


def one_line(text: str, redact: Callable[[str], str] = str) -> str:
    """A server's text, or an error that quotes one, cut to a part of a line after ``redact`` has changed it."""
    return short(" ".join(redact(text)[:1000].split()))
