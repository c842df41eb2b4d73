"""Whatever a peer sends to ``/wire/worker`` or ``/wire/host``, before its hello or after, the service lives and other
peers keep working."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import httpx
import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.faces import MODEL, ThreadedWorker, served
from tests.support.fuzzing import EPOCH, Failures, frames, fuzzed, of_epoch, tuned
from tests.support.waiting import until
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import ClientConnection, connect

from rookery import protocol
from rookery.server.launcher import EmbeddedService

EXAMPLES = 50

WORKER = protocol.FromWorker.__args__
HOST = protocol.FromHost.__args__
OTHERS = (*protocol.ToWorker.__args__, *protocol.ToHost.__args__)
"""Messages that only the service sends."""


@pytest.fixture(scope="module")
def failures() -> Iterator[list[str]]:
    with Failures() as failures:
        yield failures.records


class Peers:
    """A service with a well-behaved worker and a running chat, and the tokens of peers."""

    def __init__(self, service: EmbeddedService, token: str) -> None:
        self.service = service
        self.http = httpx.Client(base_url=service.url, headers={"X-API-Key": service.key}, timeout=60)
        tenant = self.http.post("/api/v1/tenants", json={"name": "ada"}).json()["id"]
        self.tokens = {"worker": token, "host": self.http.post(f"/api/v1/tenants/{tenant}/keys", json={}).json()["key"]}

    def hello(self, kind: str, instance: str) -> protocol.Message:
        if kind == "host":
            environments = [protocol.HostedEnvironment(name="mine"), protocol.HostedEnvironment(name="yours")]
            return protocol.HostHello(protocol=protocol.PROTOCOL, instance=instance, environments=environments)
        return protocol.Hello(
            protocol=protocol.PROTOCOL, name="odd", instance=instance, model=MODEL,
            model_hash="0" * 64, roles=["rollout", "train"], max_rows=4, max_context=512, max_rank=64, device="cpu",
            dtype="none",
        )  # fmt: skip

    def dial(self, kind: str) -> ClientConnection:
        headers = {"Authorization": f"Bearer {self.tokens[kind]}"}
        url = self.service.url.replace("http", "ws", 1) + f"/wire/{kind}"
        return connect(url, additional_headers=headers, close_timeout=2)

    def chat(self) -> None:
        body = {"model": MODEL, "messages": [{"role": "user", "content": "2+2?"}]}
        reply = self.http.post("/v1/chat/completions", json=body)
        assert reply.status_code == 200, reply.text

    def state(self, name: str) -> str:
        rows = self.http.get("/api/v1/workers").json()
        return next((row["state"] for row in rows if row["name"] == name), "")


@pytest.fixture(scope="module")
def peers(tmp_path_factory: pytest.TempPathFactory, failures: list[str]) -> Iterator[Peers]:
    root = tmp_path_factory.mktemp("wire")
    with served(root, rejoin_seconds=1.0) as service:
        token = (root / "data" / "worker.token").read_text().strip()
        with ThreadedWorker.of(service):
            peers = Peers(service, token)
            until(lambda: peers.state("scripted") == "serving")
            yield peers
            peers.http.close()


def names() -> dict[str, st.SearchStrategy[Any]]:
    """Values that let a message reach the code behind the first checks."""
    return tuned(
        epoch=[EPOCH] * 9 + [EPOCH + 1, -1], protocol=[protocol.PROTOCOL] * 9 + [1],
        model=[MODEL, MODEL, "", "other"], name=["odd", "builtin:jsonl", "mine", "a\nb"], instance=["i", "odd-1", ""],
        hash=["0" * 64, "", "x"], hashes=st.lists(st.sampled_from(["0" * 64, "x"]), max_size=3), loading=[False, True],
    )  # fmt: skip


def send(socket: ClientConnection, sent: list[bytes]) -> None:
    with suppress(ConnectionClosed):  # by the service, at a bad one
        for frame in sent:
            socket.send(frame)


@pytest.mark.parametrize("kind", ["worker", "host"])
def test_no_frame_before_the_hello_harms_the_service(peers: Peers, failures: list[str], kind: str) -> None:
    before = psutil.Process().memory_info().rss
    kinds = WORKER if kind == "worker" else HOST

    @fuzzed(EXAMPLES)
    @given(st.lists(frames((*kinds, *kinds[:1] * 9, *OTHERS[:3]), names()), min_size=1, max_size=3))
    def run(sent: list[bytes]) -> None:
        with peers.dial(kind) as socket:
            send(socket, sent)

    run()
    check(peers, failures, before)


@pytest.mark.parametrize("kind", ["worker", "host"])
def test_no_frame_after_the_hello_harms_the_service(peers: Peers, failures: list[str], kind: str) -> None:
    before = psutil.Process().memory_info().rss
    kinds = WORKER if kind == "worker" else HOST
    decoder = protocol.to_worker if kind == "worker" else protocol.to_host

    @fuzzed(EXAMPLES)
    @given(st.integers(0, 3), st.lists(frames((*kinds, *OTHERS[:1]), names()), min_size=1, max_size=6))
    def run(instance: int, sent: list[bytes]) -> None:
        with peers.dial(kind) as socket:
            socket.send(protocol.encode(peers.hello(kind, f"odd-{instance}")))
            welcome: Any = protocol.decode(decoder, bytes(socket.recv(timeout=10)))
            send(socket, [of_epoch(frame, welcome.epoch) for frame in sent])

    run()
    check(peers, failures, before)


def check(peers: Peers, failures: list[str], before: int) -> None:
    peers.chat()
    assert peers.state("scripted") == "serving"
    assert not failures, failures[0]
    assert psutil.Process().memory_info().rss - before < 128 << 20
    metrics = httpx.get(f"{peers.service.url}/metrics", timeout=60)
    assert metrics.status_code == 200
    for path in ("workers", "health", "costs", "jobs"):
        assert peers.http.get(f"/api/v1/{path}").status_code == 200, path
