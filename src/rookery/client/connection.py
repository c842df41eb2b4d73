"""HTTP requests to one service: JSON in and out, errors as :class:`~rookery.errors.RookeryError`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import chain
from typing import IO, Any

import httpx

from rookery import errors
from rookery.aio import LineSplitter, client_tls

TIMEOUT = httpx.Timeout(60.0, connect=5.0, read=600.0)
"""Reads may take minutes: a sample waits in the engine's queue, and a dry run may prepare a model."""

QUIET_SECONDS = 30.0
"""A stream without an event or heartbeat for this long counts as broken."""


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


def record(value: Any) -> Any:
    """``value`` with every mapping in it as a :class:`Record`."""
    if isinstance(value, dict):
        return Record({key: record(inner) for key, inner in value.items()})
    return [record(inner) for inner in value] if isinstance(value, list) else value


class HttpConnection:
    """Requests to the service at ``url`` with ``key``. They raise :class:`ConnectionBroken` if it cannot be reached,
    else :class:`RequestRefused` or the error of :mod:`rookery.errors` for the response's status. No error shows the
    key."""

    def __init__(self, url: str, key: str | None, ca_file: str = "") -> None:
        """``ca_file`` is as in :func:`~rookery.aio.client_tls`."""
        self.url = url.rstrip("/")
        headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        transport = httpx.HTTPTransport(retries=2, verify=client_tls(url, ca_file) or True)
        try:
            self._http = httpx.Client(base_url=self.url, timeout=TIMEOUT, transport=transport, headers=headers)
        except (httpx.InvalidURL, UnicodeEncodeError) as error:
            raise errors.UserError(
                f"{url} with this key cannot be used ({error}); check ROOKERY_URL, ROOKERY_KEY"
            ) from None

    def call(self, method: str, path: str, **request: Any) -> Any:
        """The response's JSON, with its objects as records; None for a response without content."""
        response = self._send(method, path, **request)
        try:
            return record(response.json()) if response.status_code != 204 else None
        except ValueError:
            raise errors.Unavailable(f"the server at {self.url} is not a Rookery service; set ROOKERY_URL") from None

    def download(self, path: str, file: IO[bytes]) -> None:
        """Write the response's content to ``file`` as it arrives."""
        try:
            with self._http.stream("GET", path) as response:
                if response.status_code >= 400:
                    response.read()
                    _raise_error(response)
                for chunk in response.iter_bytes():
                    file.write(chunk)
        except (httpx.TransportError, httpx.InvalidURL) as error:
            raise self._broken(error) from None

    def stream(self, path: str, method: str = "GET", **request: Any) -> Iterator[tuple[str, Record]]:
        """Server-sent events as (kind, data); comments are ``("heartbeat", {})``. Data that is not JSON counts as a
        broken connection."""
        timeout = httpx.Timeout(5.0, read=QUIET_SECONDS)
        try:
            with self._http.stream(method, path, timeout=timeout, **request) as response:
                if response.status_code >= 400:
                    response.read()
                    _raise_error(response)
                kind = ""
                for line in chain.from_iterable(map(LineSplitter().feed, response.iter_bytes())):
                    if line.startswith(b"event: "):
                        kind = line.removeprefix(b"event: ").decode(errors="replace")
                    elif line == b"data: [DONE]":
                        return
                    elif line.startswith(b"data: "):
                        yield kind, self._data(line.removeprefix(b"data: "))
                    elif line.startswith(b":"):
                        yield "heartbeat", Record()
        except httpx.TransportError as error:
            raise self._broken(error) from None

    def close(self) -> None:
        self._http.close()

    def _send(self, method: str, path: str, **request: Any) -> httpx.Response:
        try:
            response = self._http.request(method, path, **request)
        except (httpx.TransportError, httpx.InvalidURL) as error:
            raise self._broken(error) from None
        if response.status_code >= 400:
            _raise_error(response)
        return response

    def _data(self, line: bytes) -> Record:
        try:
            data: Record = record(json.loads(line))
        except ValueError as error:
            raise self._broken(error) from None
        return data

    def _broken(self, error: Exception) -> errors.RookeryError:
        if isinstance(error, httpx.LocalProtocolError):  # its text contains the header, which may be the key
            return errors.UserError(
                f"a request to {self.url} cannot be sent: a key may have no line breaks or control characters;"
                " check ROOKERY_KEY"
            )
        if "CERTIFICATE_VERIFY_FAILED" in str(error):
            return errors.UserError(f"the certificate of {self.url} is not trusted here; set ROOKERY_CA_FILE")
        if isinstance(error, httpx.ConnectError | httpx.ConnectTimeout):
            return ConnectionBroken(
                f"no Rookery service answers at {self.url}; start one with: rookery serve (or set ROOKERY_URL)"
            )
        return ConnectionBroken(f"the connection to {self.url} broke ({type(error).__name__}: {error}); try again")


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


def _raise_error(response: httpx.Response) -> None:
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
    if response.status_code < 500:
        raise RequestRefused(message, problems or [message])
    raise errors.RookeryError(message)
