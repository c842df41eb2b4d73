"""TLS, the headers of pages, and keys, which no log and no process list shows."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import re
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import httpx
import pytest
from sqlalchemy import Connection
from tests.support.faces import job, served
from tests.support.tinkered import place_model, running
from tests.support.waiting import until

from rookery.client import Client
from rookery.clock import SystemClock
from rookery.controller.weights.tickets import Tickets
from rookery.errors import UserError
from rookery.network import client_tls
from rookery.server.launcher import EmbeddedService
from rookery.server.routes.gateway import WebSocketConnection
from rookery.settings import Settings
from rookery.storage.artifacts import Artifacts
from rookery.storage.repositories import tenants


def certify(pem: Path, key: Path) -> None:
    """Writes a self-signed certificate and its key."""
    made = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    names = ["-subj", "/CN=rookery.test", "-days", "2", "-keyout", str(key), "-out", str(pem)]
    subprocess.run([*made, *names], check=True, capture_output=True)


@pytest.fixture(scope="module")
def secured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedService]:
    """A service with TLS, a self-signed certificate, logs of every level, a real worker and a real environment host."""
    folder = tmp_path_factory.mktemp("secured")
    pem = folder / "certificate.pem"
    certify(pem, folder / "key")
    place_model(folder)
    with running(
        folder, tls_cert=str(pem), tls_key=str(folder / "key"), log_level="DEBUG", head_seconds=2.0
    ) as service:
        yield service


def test_worker_host_and_client_use_tls(secured: EmbeddedService) -> None:
    assert secured.url.startswith("https://")
    with Client(secured.url, secured.key, settings=secured.settings) as client:
        trained = client.submit(job(base_model=secured.settings.server.models, stop={"steps": 1}))
        assert trained.wait(240).state == "completed"
    with pytest.raises(UserError, match="ROOKERY_CA_FILE"):
        Client(secured.url, secured.key, settings=Settings.load({})).health()


PLACED = "rookery.example.org:8443"
"""The name and the port by which clients reach a proxy."""


@pytest.mark.parametrize(
    ("headers", "public_url", "address"),
    [
        ({}, "", f"http://{PLACED}"),
        ({"X-Forwarded-For": "10.1.2.3"}, "", f"http://{PLACED}"),
        ({"X-Forwarded-Proto": "https"}, "", f"https://{PLACED}"),
        ({"X-Forwarded-Proto": "https, http"}, "", f"https://{PLACED}"),
        ({"X-Forwarded-Proto": "ftp"}, "", f"http://{PLACED}"),
        ({"X-Forwarded-Proto": "http"}, "https://example.org/rookery/", "https://example.org/rookery"),
    ],
)
def test_addresses_in_responses_are_those_that_clients_reach(
    tmp_path: Path, headers: dict[str, str], public_url: str, address: str
) -> None:
    """Behind a TLS proxy they were http://: downloads failed, or brought a ticket in clear text."""
    settings = {"public_url": public_url} if public_url else {}
    with served(tmp_path, **settings) as service:
        key = {"Authorization": f"Bearer {service.key}", "X-Rookery-Page": "1"}
        with httpx.Client(base_url=service.url, headers={**key, "Host": PLACED, **headers}, timeout=60) as http:
            session = http.post("/tinker/api/v1/create_session", json={}).raise_for_status().json()["session_id"]
            exported = http.get(f"/tinker/api/v1/sessions/{session}/trace_export").json()["url"]
            assert exported.startswith(f"{address}/tinker/api/v1/traces/")
            assert http.get(exported.removeprefix(address)).status_code == 200
            cookie = http.post("/api/v1/sign-in").raise_for_status().headers["Set-Cookie"]
            assert ("Secure" in cookie) == (headers.get("X-Forwarded-Proto", "").startswith("https"))


def test_connection_without_a_handshake_is_closed(secured: EmbeddedService) -> None:
    url = httpx.URL(secured.url)
    for sent in (b"", b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n", b"\x16\x03\x01\x02\x00\x01"):
        with socket.create_connection((url.host, url.port or 443), timeout=30) as half:
            half.sendall(sent)
            try:
                while half.recv(1 << 16):
                    pass
            except ConnectionResetError:
                pass


def test_no_log_and_no_process_list_has_a_key(secured: EmbeddedService) -> None:
    with Client(secured.url, secured.key, settings=secured.settings) as client:
        tenant = client.add_tenant("ada")
        keys = [
            secured.key,
            client.add_key(tenant.id).key,
            (secured.settings.data / "worker.token").read_text().strip(),
        ]
        with Client(secured.url, keys[1], settings=secured.settings) as ada:
            assert ada.views() == []
        until(client.workers)
    hidden = re.compile("|".join(re.escape(key.removeprefix("tml-")) for key in keys).encode())
    logs = {path: path.read_bytes() for path in (secured.settings.data / "logs").iterdir()}
    assert {path.name.split("-")[0] for path in logs} >= {"service.jsonl", "worker", "environments.log"}
    assert [path for path, text in logs.items() if hidden.search(text)] == []
    for process in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            assert not hidden.search(process.read_bytes()), process
        except OSError:
            continue  # it has ended


def test_keys_are_looked_up_by_their_digest(secured: EmbeddedService, monkeypatch: pytest.MonkeyPatch) -> None:
    """The database compares digests, and how much of a digest a wrong key has right says nothing about the key's text:
    two keys that differ in their last character have nothing in common there."""
    with Client(secured.url, secured.key, settings=secured.settings) as client:
        fresh = client.add_key("admin").key  # nobody has presented it: a key that was valid is known for a second
    asked: list[str] = []
    valid_key = tenants.valid_key

    def recorded(connection: Connection, key_hash: str, now: float) -> Any:
        asked.append(key_hash)
        return valid_key(connection, key_hash, now)

    monkeypatch.setattr(tenants, "valid_key", recorded)
    near = fresh[:-1] + ("a" if fresh[-1] != "a" else "b")
    with httpx.Client(base_url=secured.url, verify=False, timeout=60) as http:  # its certificate is the test's own
        for key in (fresh, near):
            for headers in ({"X-API-Key": key}, {"Authorization": f"Bearer {key}"}):
                assert http.get("/api/v1/health", headers=headers).status_code == (200 if key == fresh else 401)
    digests = [hashlib.sha256(key.encode()).hexdigest() for key in (fresh, near)]
    assert asked[-2:] == [digests[1]] * 2 and {*asked[:-2]} == {digests[0]}, "a valid key is known for a second"


def test_tickets_are_compared_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a comparison whose time does not depend on its arguments, whatever is presented."""
    compared: list[tuple[bytes, bytes]] = []

    def recorded(one: bytes, other: bytes) -> bool:
        compared.append((one, other))
        return compare_digest(one, other)

    compare_digest = hmac.compare_digest
    monkeypatch.setattr(hmac, "compare_digest", recorded)
    tickets, digest = Tickets(Artifacts(tmp_path), SystemClock(), 60.0), "0" * 64
    until, signature, tenant = tickets.grant("alice", digest).split(".")
    given = [signature, signature[:-1] + ("0" if signature[-1] != "0" else "1"), signature[:10], ""]
    assert [tickets.reader(f"{until}.{one}.{tenant}", digest) for one in given] == ["alice", None, None, None]
    for other in (f"{until}.{signature}.bob", f"{int(until) + 1}.{signature}.alice", f"{until}.{signature}", "", ".."):
        assert tickets.reader(other, digest) is None
    assert tickets.reader(f"{until}.{signature}.alice", "1" * 64) is None
    assert compared[:4] == [(one.encode(), signature.encode()) for one in given]


def test_every_response_has_the_headers_that_browsers_heed(secured: EmbeddedService) -> None:
    with httpx.Client(base_url=secured.url, verify=False, timeout=60) as http:  # its certificate is the test's own
        for method, path, status in (
            ("GET", "/docs", 200),
            ("GET", "/docs/", 200),
            ("HEAD", "/healthz", 200),
            ("GET", "/api/v1/jobs", 401),
            ("GET", "/nothing", 404),
            ("GET", "/v1/x", 401),
            ("POST", "/healthz", 405),
            ("OPTIONS", "/v1/models", 405),
            ("GET", "/wire/worker", 426),
        ):
            response = http.request(method, path)
            policy = response.headers["content-security-policy"]
            assert response.status_code == status and "default-src 'none'" in policy
            assert ("script-src" in policy) == path.startswith("/docs") and "frame-ancestors 'none'" in policy
            assert response.headers["x-content-type-options"] == "nosniff"
            assert (response.headers["x-frame-options"], response.headers["referrer-policy"]) == ("DENY", "no-referrer")


def test_renewed_certificates_are_followed_by_both_ends(tmp_path: Path) -> None:
    """As certbot and cert-manager renew them: in the same files, in which the key may be a moment later."""
    pem, key, next_pem, next_key = (tmp_path / name for name in ("a.pem", "a.key", "b.pem", "b.key"))
    certify(pem, key)
    certify(next_pem, next_key)

    def shown() -> bytes | None:
        """The certificate that the service shows."""
        with socket.create_connection(address) as plain, trust.wrap_socket(plain, server_hostname=address[0]) as secure:
            return secure.getpeercert(binary_form=True)

    with served(tmp_path / "service", tls_cert=str(pem), tls_key=str(key)) as service:
        address = ("127.0.0.1", int(service.url.rpartition(":")[2]))
        trust = client_tls(service.url, str(pem))
        assert trust is not None
        first = shown()
        next_pem.replace(pem)
        assert shown() == shown() == first, "no key fits the new one yet"
        next_key.replace(key)
        assert shown() == shown() != first
        pem.write_text("no certificate")
        renewed = shown()
        pem.unlink()
        assert shown() == renewed != first
    log = (service.settings.data / "logs" / "service.jsonl").read_text(encoding="utf-8")
    assert log.count("the earlier one stays in use") == 5, "three mistakes of the service's files, two of the client's"


def test_unusable_certificate_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty.pem").touch()
    for name in ("empty.pem", "nothing.pem"):
        with pytest.raises(UserError, match=name), served(tmp_path, tls_cert=str(tmp_path / name)):
            pass


async def test_a_peer_that_reads_nothing_is_not_waited_for_when_its_connection_closes() -> None:
    """A close frame waits behind what was sent before, and a process that was stopped reads nothing of it."""
    ended: list[str] = []

    class Stopped:
        state = SimpleNamespace(connection=SimpleNamespace(abort=lambda: ended.append("aborted")))

        async def close(self, code: int, reason: str) -> None:
            await asyncio.Event().wait()

    await WebSocketConnection(cast(Any, Stopped()), 1, close_seconds=0.01).close("no heartbeat for 20 s")
    assert ended == ["aborted"]
