"""Requests as other programs send them: protocol upgrades, methods, and bodies that are no JSON object."""

from __future__ import annotations

import gzip
import json
import socket
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from tests.support.faces import MODEL, job, served

from rookery.server.launcher import EmbeddedService


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedService]:
    with served(tmp_path_factory.mktemp("foreign")) as running:
        yield running


@pytest.fixture
def http(service: EmbeddedService) -> Iterator[httpx.Client]:
    headers = {"Authorization": f"Bearer {service.key}"}
    with httpx.Client(base_url=service.url, headers=headers, timeout=30) as client:
        yield client


H2C = "Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABkAAQAAP__\r\n"
SOCKET = "Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n"


def response_of(connection: socket.socket, buffer: bytearray) -> tuple[int, Any]:
    """Status and JSON body of the next response; what follows it stays in ``buffer``."""
    while b"\r\n\r\n" not in buffer:
        read = connection.recv(1 << 16)
        assert read, bytes(buffer)
        buffer += read
    head, _, rest = bytes(buffer).partition(b"\r\n\r\n")
    lengths = [line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")]
    length = int(lengths[0].split(b":")[1])
    while len(rest) < length:
        rest += connection.recv(1 << 16)
    buffer[:] = rest[length:]
    return int(head.split()[1]), json.loads(rest[:length])


@pytest.mark.parametrize("chunked", [False, True])
@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize(
    "headers",
    [
        "",
        H2C,
        "Connection: keep-alive, Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\n",
        SOCKET + "Sec-WebSocket-Version: 13\r\n",
        "Connection: upgrade\r\n",
        "Upgrade: TLS/1.0\r\nConnection: Upgrade\r\n",
    ],
    ids=["none", "h2c", "h2c-keep-alive", "websocket", "connection-alone", "tls"],
)
def test_wish_for_another_protocol_does_not_change_a_request(
    service: EmbeddedService, headers: str, split: bool, chunked: bool
) -> None:
    """The body arrives with the head or after it, and a second request follows on the same connection."""
    url, body = httpx.URL(service.url), json.dumps(job()).encode()
    length = "Transfer-Encoding: chunked" if chunked else f"Content-Length: {len(body)}"
    head = (
        f"POST /api/v1/jobs/dry-run HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {service.key}\r\n{headers}"
        f"Content-Type: application/json\r\n{length}\r\n\r\n"
    ).encode()
    sent = b"%x\r\n%s\r\n0\r\n\r\n" % (len(body), body) if chunked else body
    buffer = bytearray()
    with socket.create_connection((url.host, url.port or 80), timeout=30) as connection:
        for _ in range(2):
            if split:
                connection.sendall(head)
                connection.sendall(sent[:100])
                connection.sendall(sent[100:])
            else:
                connection.sendall(head + sent)
            status, found = response_of(connection, buffer)
            assert status == 200 and found["spec"]["name"] == "sums", found


def test_pipelined_wishes_for_another_protocol_are_all_answered(service: EmbeddedService) -> None:
    url, buffer = httpx.URL(service.url), bytearray()
    request = f"GET /healthz HTTP/1.1\r\nHost: x\r\n{H2C}\r\n".encode()
    with socket.create_connection((url.host, url.port or 80), timeout=30) as connection:
        connection.sendall(request * 3)
        for _ in range(3):
            assert response_of(connection, buffer)[0] == 200


def test_connection_is_closed_where_the_client_asks_for_it(service: EmbeddedService) -> None:
    url = httpx.URL(service.url)
    request = b"GET /healthz HTTP/1.1\r\nHost: x\r\nConnection: close, Upgrade\r\nUpgrade: h2c\r\n\r\n"
    with socket.create_connection((url.host, url.port or 80), timeout=30) as connection:
        connection.sendall(request)
        received = b""
        while read := connection.recv(1 << 16):
            received += read
    assert received.startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize(("path", "status"), [("/wire/worker", 426), ("/wire/host", 426), ("/healthz", 200)])
@pytest.mark.parametrize(
    "body", ["Content-Length: 3\r\n\r\nabc", "Transfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\n\r\n"]
)
def test_a_get_with_a_body_is_no_socket(service: EmbeddedService, path: str, status: int, body: str) -> None:
    url = httpx.URL(service.url)
    request = f"GET {path} HTTP/1.1\r\nHost: x\r\n{SOCKET}Sec-WebSocket-Version: 13\r\n{body}".encode()
    with socket.create_connection((url.host, url.port or 80), timeout=10) as connection:
        connection.sendall(request)
        assert response_of(connection, bytearray())[0] == status


@pytest.mark.parametrize(
    ("path", "status"),
    [("/healthz", 200), ("/api/v1/jobs", 200), ("/api/v1/jobs/", 200), ("/nothing", 404), ("/wire/data/x", 404)],
)
def test_a_wish_for_a_socket_is_ignored_where_there_is_none(service: EmbeddedService, path: str, status: int) -> None:
    """A proxy may send its headers with every request."""
    url, buffer = httpx.URL(service.url), bytearray()
    head = f"GET {path} HTTP/1.1\r\nHost: x\r\nX-API-Key: {service.key}\r\n{SOCKET}Sec-WebSocket-Version: 13\r\n\r\n"
    with socket.create_connection((url.host, url.port or 80), timeout=10) as connection:
        connection.sendall(head.encode() * 2)
        for _ in range(2):
            found, body = response_of(connection, buffer)
            assert found == status and (status == 200 or body["error"])


@pytest.mark.parametrize("path", ["/wire/worker", "/wire/worker/", "/wire/%68ost", "/wire/host?a=b"])
def test_a_socket_of_any_spelling_is_one(service: EmbeddedService, path: str) -> None:
    url = httpx.URL(service.url)
    head = f"GET {path} HTTP/1.1\r\nHost: x\r\nX-API-Key: {service.key}\r\n{SOCKET}Sec-WebSocket-Version: 13\r\n\r\n"
    with socket.create_connection((url.host, url.port or 80), timeout=10) as connection:
        connection.sendall(head.encode())
        assert connection.recv(1 << 12).split()[1] in (b"101", b"403")  # the administrator's key is no worker's


@pytest.mark.parametrize("headers", ["", H2C, SOCKET])
def test_connect_is_refused_and_closes_its_connection(service: EmbeddedService, headers: str) -> None:
    with socket.create_connection((service.settings.server.host, int(service.url.rsplit(":", 1)[1]))) as connection:
        connection.sendall(f"CONNECT example.com:443 HTTP/1.1\r\nHost: x\r\n{headers}\r\n".encode())
        status, body = response_of(connection, bytearray())
        assert status == 501 and "no proxy" in body["error"]
        assert connection.recv(1) == b""


@pytest.mark.parametrize(
    ("last", "status"),
    [
        ("CONNECT example.com:443 HTTP/1.1\r\nHost: x\r\n\r\n", 501),
        ("no request\r\n\r\n", 400),
        ("POST /api/v1/jobs HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nno length\r\n", 400),
    ],
    ids=["connect", "no-request", "broken-body"],
)
@pytest.mark.parametrize("earlier", [0, 1, 3])
def test_refused_request_is_answered_after_earlier_ones(
    service: EmbeddedService, earlier: int, last: str, status: int
) -> None:
    buffer = bytearray()
    with socket.create_connection((service.settings.server.host, int(service.url.rsplit(":", 1)[1]))) as connection:
        connection.settimeout(30)
        connection.sendall(b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n" * earlier + last.encode())
        assert [response_of(connection, buffer)[0] for _ in range(earlier + 1)] == [200] * earlier + [status]
        assert connection.recv(1) == b""


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/api/v1/jobs/dry-run", job(nonsense=1)),
        ("/api/v1/jobs/dry-run", job(nonsense="é" * 40_000)),
        ("/api/v1/jobs/dry-run", {}),
        ("/v1/chat/completions", {"model": "none"}),
        ("/api/v1/sample", {"target": "none"}),
    ],
    ids=["job", "long", "empty", "chat", "sample"],
)
def test_a_byte_order_mark_before_json_means_nothing(http: httpx.Client, path: str, body: dict[str, Any]) -> None:
    """As PowerShell and editors of Windows write files."""
    content, headers = json.dumps(body, ensure_ascii=False).encode(), {"Content-Type": "application/json"}
    plain, marked = (http.post(path, content=mark + content, headers=headers) for mark in (b"", b"\xef\xbb\xbf"))
    assert marked.status_code == plain.status_code != 500
    assert plain.is_success or marked.json() == plain.json()


@pytest.mark.parametrize("path", ["/healthz", "/v1/models", "/api/v1/jobs", "/metrics", "/docs", "/nothing"])
def test_head_is_get_without_the_body(http: httpx.Client, path: str) -> None:
    head, get = http.head(path), http.get(path)
    assert head.status_code == get.status_code
    assert head.content == b""
    assert head.headers["content-type"] == get.headers["content-type"]


def test_head_of_a_stream_ends(http: httpx.Client) -> None:
    submitted = http.post("/api/v1/jobs", json=job()).json()
    for _ in range(2):
        assert http.head(f"/api/v1/jobs/{submitted['id']}/metrics/stream").status_code == 200
    http.post(f"/api/v1/jobs/{submitted['id']}/cancel")


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [
        ("GET", "/v1/chat/completions", {"POST"}),
        ("HEAD", "/v1/completions", {"POST"}),
        ("POST", "/v1/models", {"GET"}),
        ("GET", "/api/v1/jobs/dry-run", {"POST"}),
        ("GET", "/api/v1/datasets", {"POST"}),
        ("PUT", "/api/v1/jobs", {"GET", "POST"}),
        ("DELETE", "/healthz", {"GET"}),
        ("PATCH", "/v1/files/file-x", {"GET", "DELETE"}),
        ("POST", "/v1/models/qwen/x", {"GET", "DELETE"}),
        ("PUT", "/api/v1/jobs/x/episodes", {"GET"}),
        ("GET", "/agents/e/v1/chat/completions", {"POST"}),
        ("GET", "/tinker/oai/api/v1/chat/completions", {"POST"}),
        ("PUT", "/tinker/api/v1/create_session", {"POST"}),
    ],
)
def test_methods_that_a_path_lacks_are_refused_with_those_it_has(
    http: httpx.Client, method: str, path: str, allowed: set[str]
) -> None:
    refused = http.request(method, path)
    assert refused.status_code == 405
    assert set(refused.headers["allow"].split(", ")) >= allowed
    if method != "HEAD":
        error = refused.json()["error"]
        assert path in (error["message"] if isinstance(error, dict) else error)


@pytest.mark.parametrize(
    ("path", "there", "absent"),
    [("/v1/x", "/v1/fine_tuning/jobs", "{"), ("/tinker/oai/api/v1/x", "/v1/models", "/v1/files")],
)
def test_unknown_path_names_the_paths_that_are_there(http: httpx.Client, path: str, there: str, absent: str) -> None:
    for method in ("GET", "POST", "PATCH"):
        refused = http.request(method, path)
        assert refused.status_code == 404
        line = refused.json()["error"]["message"]
        assert there in line and absent not in line and "/v1/chat/completions" in line


@pytest.mark.parametrize(
    ("method", "path"),
    [("GET", "/healthz"), ("GET", "/v1/models"), ("GET", "/api/v1/jobs"), ("POST", "/api/v1/jobs/dry-run"),
     ("POST", "/v1/chat/completions"), ("GET", f"/v1/models/{MODEL}"), ("GET", "/tinker"), ("POST", "/v1/nothing"),
     ("GET", "/wire/worker"), ("GET", "/docs"), ("PUT", "/api/v1/jobs")],
)  # fmt: skip
def test_slash_at_the_end_of_a_path_makes_no_difference(http: httpx.Client, method: str, path: str) -> None:
    plain, slashed = http.request(method, path), http.request(method, f"{path}/")
    assert plain.status_code == slashed.status_code and not plain.has_redirect_location
    assert plain.text.replace(path, "") == slashed.text.replace(path, "") or plain.status_code == 200


def test_a_compressed_body_is_named(http: httpx.Client) -> None:
    headers = {"Content-Type": "application/json", "Content-Encoding": "gzip"}
    for path in ("/v1/chat/completions", "/api/v1/jobs", "/api/v1/datasets", "/api/v1/adapters"):
        refused = http.post(path, content=gzip.compress(CHAT), headers=headers)
        assert refused.status_code in (400, 422) and "Content-Encoding gzip, which is not read" in refused.text


@pytest.mark.parametrize("path", ["/wire/worker", "/wire/host"])
def test_a_socket_whose_upgrade_a_proxy_removed_gets_that_reason(http: httpx.Client, path: str) -> None:
    refused = http.get(path)
    assert refused.status_code == 426 and "proxy_set_header Upgrade" in refused.json()["error"]


CHAT = json.dumps({"model": MODEL, "messages": [{"role": "user", "content": "x"}]}).encode()


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/api/v1/jobs", "/api/v1/jobs/dry-run"])
@pytest.mark.parametrize(
    ("body", "kind", "line"),
    [
        (CHAT, None, "it has no Content-Type; send it with Content-Type: application/json"),
        (CHAT, "text/plain", "it has Content-Type text/plain"),
        (CHAT, "application/x-www-form-urlencoded", "Content-Type: application/json"),
        (CHAT, "text/json", "it has Content-Type text/json"),
        (CHAT, "application/jsonl", "it has Content-Type application/jsonl"),
        (b"[[]]", "Application/JSON; charset=utf-8", "must be a JSON object"),
        (b"[[]]", "application/vnd.api+json", "must be a JSON object"),
        (b"", "application/json", "the body is empty"),
        (b"", None, "the body is empty"),
        (b'{"a":', "application/json", "not JSON in UTF-8"),
        (CHAT.decode().encode("utf-16"), "application/json", "not JSON in UTF-8"),
        (b"[[]]", "application/json", "must be a JSON object"),
        (b"null", "application/json", "must be a JSON object"),
        (b'"x"', "application/json", "must be a JSON object"),
        (b"3", "application/json", "must be a JSON object"),
    ],
)
def test_bodies_that_are_no_json_object_are_named(
    http: httpx.Client, path: str, body: bytes, kind: str | None, line: str
) -> None:
    refused = http.post(path, content=body, headers={"Content-Type": kind} if kind else {})
    assert refused.status_code in (400, 422)
    error = refused.json()["error"]
    assert line in (error["message"] if path.startswith("/v1/") else error)


@pytest.mark.parametrize(
    ("content", "line"),
    [
        ([{"type": "image_url", "image_url": {"url": "data:,"}}], "part 0 is of the type image_url"),
        ([{"type": "text", "text": "a"}, {"type": "input_audio"}], "part 1 is of the type input_audio"),
        ([[]], "part 0 is of the type list"),
        (["x"], "part 0 is of the type str"),
        (5, "give a text, or a list of parts of the type text"),
        ({"type": "text", "text": "x"}, "give a text, or a list of parts of the type text"),
        (None, "null is not supported"),
    ],
)
def test_contents_that_are_no_text_are_named(http: httpx.Client, content: Any, line: str) -> None:
    messages = [{"role": "user", "content": content}]
    refused = http.post("/v1/chat/completions", json={"model": MODEL, "messages": messages})
    error = refused.json()["error"]
    assert refused.status_code == 400 and error["param"] == "messages.0.content" and line in error["message"]


@pytest.mark.parametrize("prompt", [[[]], [[1], []], [""], ["x", ""], "", []])
def test_empty_prompts_are_refused(http: httpx.Client, prompt: Any) -> None:
    refused = http.post("/v1/completions", json={"model": MODEL, "prompt": prompt})
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "prompt"


def test_version_is_named_after_the_at_sign(http: httpx.Client) -> None:
    submitted = http.post("/api/v1/jobs", json=job()).json()
    refused = http.get(f"/v1/models/{submitted['id']}@")
    http.post(f"/api/v1/jobs/{submitted['id']}/cancel")
    assert refused.status_code == 400 and "after the @" in refused.json()["error"]["message"]
