"""Unexpected exceptions in a service: the response, the log, and the connection afterwards."""

from __future__ import annotations

import json
from collections.abc import Iterator
from http.client import HTTPConnection
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
from tests.support.faces import served

from rookery.controller.controller import Controller
from rookery.controller.queries import JobQueries
from rookery.controller.sessions.sessions import Sessions
from rookery.server import auth
from rookery.server.launcher import EmbeddedService


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedService]:
    with served(tmp_path_factory.mktemp("errors")) as service:
        yield service


def deep(levels: int) -> Any:
    return [deep(levels - 1)] if levels else 0


def fails(*arguments: Any, **more: Any) -> Any:
    raise ValueError("an internal secret")


SMALL, LARGE = b'{"a": 1}', json.dumps({"a": "x" * 500_000}).encode()


@pytest.mark.parametrize(
    ("owner", "name", "broken", "method", "path", "body"),
    [
        (JobQueries, "list", fails, "GET", "/api/v1/jobs", b""),
        (JobQueries, "models", lambda self: [{"name": object()}], "GET", "/api/v1/models", b""),
        (JobQueries, "models", lambda self: [{"name": deep(300)}], "GET", "/api/v1/models", b""),
        (JobQueries, "health", fails, "GET", "/metrics", b""),
        (Controller, "submit", fails, "POST", "/api/v1/jobs", SMALL),
        (Controller, "submit", fails, "POST", "/api/v1/jobs", LARGE),
        (auth.FailedKeys, "check", fails, "POST", "/api/v1/jobs", LARGE),
        (auth.FailedKeys, "check", fails, "POST", "/api/v1/datasets", LARGE),
        (Sessions, "create", fails, "POST", "/tinker/api/v1/create_session", b'{"sdk_version": "1"}'),
        (auth.FailedKeys, "check", fails, "GET", "/v1/models", b""),
    ],
)
def test_an_unexpected_error_costs_no_later_request_of_its_connection(
    service: EmbeddedService, monkeypatch: pytest.MonkeyPatch, owner: type, name: str, broken: Any, method: str,
    path: str, body: bytes,
) -> None:  # fmt: skip
    """A client that keeps its connection read the response with status 500 and lost its next request."""
    parts, headers = urlsplit(service.url), {"X-API-Key": service.key, "Content-Type": "application/json"}
    connection = HTTPConnection(parts.hostname or "", parts.port, timeout=30)
    connection.request("GET", "/healthz")
    connection.getresponse().read()
    kept = connection.sock
    with monkeypatch.context() as patched:
        patched.setattr(owner, name, broken)
        for _ in range(3):
            connection.request(method, path, body or None, headers)
            response = connection.getresponse()
            content = response.read()
            assert response.status == 500, content
            assert response.getheader("X-Content-Type-Options") == "nosniff"
            assert b"internal error" in content and b"secret" not in content
    connection.request(method, path, body or None, headers)
    assert connection.getresponse().read() is not None
    connection.request("GET", "/healthz")
    assert connection.getresponse().status == 200
    assert connection.sock is kept
    connection.close()
    log = "".join(path.read_text() for path in (service.settings.data / "logs").iterdir())
    assert f"{path.removeprefix('/tinker')} failed" in log and "Traceback" in log


def test_an_error_within_a_response_ends_its_connection(
    service: EmbeddedService, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing else shows the client that the response is not whole."""

    async def events(*arguments: Any) -> Any:
        yield b"event: job\n\n"
        raise ValueError("no more")

    monkeypatch.setattr("rookery.server.routes.jobs._follow_job", events)
    monkeypatch.setattr(JobQueries, "show", lambda *arguments: _done())
    with (
        httpx.Client(base_url=service.url, headers={"X-API-Key": service.key}) as client,
        pytest.raises(httpx.RemoteProtocolError),
    ):
        client.get("/api/v1/jobs/x/metrics/stream")
    assert httpx.get(f"{service.url}/healthz").status_code == 200


async def _done() -> None:
    return None
