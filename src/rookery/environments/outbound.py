"""Requests to servers that a stranger's job names, from a process of the service.

The address is looked up once, judged (:func:`rookery.network.reachable`), and connected to: redirects are not followed,
and proxies are not used.
"""

from __future__ import annotations

import http.client
import json
import socket
import ssl
from typing import Any
from urllib.parse import urlsplit

from rookery.errors import UserError, short
from rookery.network import reachable

SECONDS = 20.0
"""Longest wait for a connection, and for each part of an answer."""

ANSWER_BYTES = 4 << 20
"""Largest answer."""

_allowed = ""


def set_reachable_hosts(allowed: str) -> None:
    """The hosts that the administrator allows. Called once when a process starts."""
    global _allowed
    _allowed = allowed


def reachable_hosts() -> str:
    """The hosts that the administrator allows."""
    return _allowed


def connection(url: str, name: str, *, allowed: str | None = None, seconds: float = SECONDS) -> socket.socket:
    """A connection to the host of ``url``, which ``name`` gave, without TLS. ``allowed`` replaces the hosts that the
    administrator allows. Blocks; raises :class:`UserError`."""
    ip, port = reachable(url, name, _allowed if allowed is None else allowed)
    try:
        return socket.create_connection((ip, port), seconds)
    except OSError as error:
        raise UserError(f"{name}: {short(url)} does not answer ({error.strerror or error})") from None


def request_json(
    url: str,
    name: str,
    body: Any = None,
    headers: dict[str, str] | None = None,
    *,
    allowed: str | None = None,
    seconds: float = SECONDS,
) -> Any:
    """The JSON that ``url`` answers: POST with ``body``, GET without. ``allowed`` is as for a connection. Blocks;
    raises :class:`UserError`."""
    parts = urlsplit(url)
    opened = connection(url, name, allowed=allowed, seconds=seconds)
    client = http.client.HTTPConnection(parts.netloc)
    try:
        if parts.scheme == "https":
            opened = ssl.create_default_context().wrap_socket(opened, server_hostname=parts.hostname)
        client.sock = opened
        content = None if body is None else json.dumps(body)
        given = {"Content-Type": "application/json", "Accept": "application/json", **(headers or {})}
        client.request("GET" if body is None else "POST", parts.path or "/", content, given)
        response = client.getresponse()
        answer = response.read(ANSWER_BYTES + 1)
    except (OSError, http.client.HTTPException) as error:
        raise UserError(f"{name}: {short(url)} does not answer ({error or type(error).__name__})") from None
    finally:
        client.close()
        opened.close()
    if response.status >= 300:
        raise UserError(f"{name}: {short(url)} answers {response.status}: {short(answer.decode('utf-8', 'replace'))}")
    if len(answer) > ANSWER_BYTES:
        raise UserError(f"{name}: {short(url)} answers more than {ANSWER_BYTES >> 20} MB")
    try:
        return json.loads(answer)
    except ValueError:
        raise UserError(f"{name}: {short(url)} answers no JSON") from None
