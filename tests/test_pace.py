"""Every call to another machine ends: the connect, a silence, and the whole where bytes come now and then."""

from __future__ import annotations

import ast
import asyncio
import contextlib
import io
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import pytest

import rookery
from rookery.client.connection import HttpConnection
from rookery.client.hub import push_folder
from rookery.environments.outbound import AnswerLimits, request_json
from rookery.pace import SLOWEST, TooSlow, TransferPace
from rookery.protocol import AdapterRef, Shard
from rookery.settings import Settings
from rookery.storage.object_artifacts import ObjectArtifacts, open_store
from rookery.worker.engine.vllm.attached import Attached
from rookery.worker.engine.vllm.backend import SamplingTask
from rookery.worker.transfer.cache import AdapterCache, CacheEvents
from rookery.worker.transfer.client import TransferClient
from rookery.worker.transfer.http import RunningHash, service_client
from rookery.worker.transfer.peers import PeerClient
from rookery.worker.transfer.published import PublishedArtifacts, Reads

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n"

BEGINNINGS = {
    "silent": (b"", b""),
    "a head that does not end": (b"", b"H"),
    "headers that do not end": (HEAD, b"X"),
    "a body that does not end": (HEAD + b"Content-Length: 900000\r\n\r\n", b" "),
    "a refusal that does not end": (HEAD.replace(b"200", b"500") + b"Content-Length: 900000\r\n\r\n", b" "),
    "chunks that do not end": (HEAD + b"Transfer-Encoding: chunked\r\n\r\n", b"1\r\n \r\n"),
}
"""Bytes that a server sends at once, and those that it sends every few milliseconds for ever."""

DIGEST, SHARD = "a" * 64, Shard(name="x.safetensors", size=900_000, sha256="b" * 64)


@contextlib.contextmanager
def endless(beginning: bytes, piece: bytes) -> Iterator[str]:
    """The address of a server that answers so, until the end."""
    ended, peers = threading.Event(), list[socket.socket]()

    def answer(peer: socket.socket) -> None:
        with contextlib.suppress(OSError):
            peer.recv(1 << 16)
            peer.sendall(beginning)
            while piece and not ended.wait(0.01):
                peer.sendall(piece)

    def serve() -> None:
        with contextlib.suppress(OSError):
            while True:
                peer, _ = listener.accept()
                peers.append(peer)
                threading.Thread(target=answer, args=(peer,), daemon=True).start()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=serve, daemon=True).start()
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            ended.set()
            for peer in peers:
                peer.close()


# --- the calls --------------------------------------------------------------------------------------------------------


def ask_stranger(url: str, folder: Path) -> None:
    request_json(url, "x", {}, allowed="*", most=AnswerLimits(seconds=0.3))


def push(url: str, folder: Path) -> None:
    (folder / "adapter_config.json").write_text("{}")
    push_folder(
        folder, "a/b", lambda repo: "", token="hf_x", private=True, message="x", endpoint=url, silent_seconds=0.1
    )


def read_object(url: str, folder: Path) -> None:
    files = open_store("s3://bucket/x", url, seconds=60, silent=1)
    artifacts = ObjectArtifacts(files, "s3://bucket/x", folder, files, read_seconds=0.5)
    with artifacts.reading(DIGEST, SHARD) as pieces:
        list(pieces)


def read_mark(url: str, folder: Path) -> None:
    ObjectArtifacts(open_store("s3://bucket/x", url, seconds=1), "s3://bucket/x", folder).open(DIGEST)


async def no_other_source(digest: str, failed: str) -> list[str]:
    return []


@contextlib.asynccontextmanager
async def transfers(url: str, folder: Path) -> AsyncIterator[TransferClient]:
    reads = Reads()
    client = TransferClient(
        service_client(url, 0.2), PeerClient(0.2, reads, no_other_source), AdapterCache(folder, 1 << 30),
        CacheEvents(), PublishedArtifacts(), reads,
    )  # fmt: skip
    try:
        yield client
    finally:
        await client.close()


async def read_batch(url: str, folder: Path) -> None:
    async with transfers(url, folder) as client:
        await client.fetch_batch("ticket")


async def pull(url: str, folder: Path) -> None:
    ref = AdapterRef(policy="x", version=0, hash=DIGEST, rank=1, alpha=1.0)
    async with transfers(url, folder) as client, client.pulled(ref):
        pass


async def upload(url: str, folder: Path) -> None:
    async with transfers(url, folder) as client:
        await client.upload("ticket", lambda staging: (staging / "x").write_bytes(b"x"))


async def read_peer(url: str, folder: Path) -> None:
    peers = PeerClient(0.2, Reads(), no_other_source)
    peers.set_sources(DIGEST, [url])
    try:
        assert await peers.manifest(DIGEST) is None
        peers.set_sources(DIGEST, [url])
        peers.mark_failed("another")
        await peers.download(DIGEST, SHARD, folder / "part", RunningHash())
    finally:
        await peers.close()
    raise TimeoutError


async def start_vllm(url: str, folder: Path) -> None:
    await Attached(Settings().replace(vllm_url=url), silent_seconds=0.3).start()


async def sample_vllm(url: str, folder: Path) -> None:
    server = Attached(Settings().replace(vllm_url=url), silent_seconds=0.3)
    with contextlib.suppress(Exception):  # it is asked all the same
        await server.start()
    async for _ in server.sample(SamplingTask("x", None, [1, 2], 0, 0, 1.0, 8, [])):
        pass


async def score_vllm(url: str, folder: Path) -> None:
    server = Attached(Settings().replace(vllm_url=url), silent_seconds=0.3)
    with contextlib.suppress(Exception):
        await server.start()
    await server.sample(SamplingTask("x", None, [1, 2], 0, 0, 1.0, 8, [], scored=range(1, 2))).__anext__()


def ask_service(url: str, folder: Path) -> None:
    HttpConnection(url, None, seconds=0.3).call("GET", "/x")


def read_service(url: str, folder: Path) -> None:
    HttpConnection(url, None, seconds=0.3).download("/x", io.BytesIO())


def follow_service(url: str, folder: Path) -> None:
    list(HttpConnection(url, None, seconds=0.3).stream("/x"))


HEADS = ["silent", "a head that does not end", "headers that do not end", "a refusal that does not end"]
"""Of streams, whose bodies need not end."""

REPEATED = ["a head that does not end", "a body that does not end"]
"""Of calls that are repeated before they fail."""

CALLS: list[tuple[Callable[[str, Path], object], list[str]]] = [
    (ask_stranger, [*BEGINNINGS]),
    (push, [*BEGINNINGS]),
    (read_object, REPEATED),
    (read_mark, REPEATED),
    (read_batch, REPEATED[1:]),
    (pull, REPEATED),
    (upload, REPEATED[1:]),
    (read_peer, [*BEGINNINGS]),
    (start_vllm, [*BEGINNINGS]),
    (sample_vllm, [*BEGINNINGS]),
    (score_vllm, REPEATED),
    (ask_service, [*BEGINNINGS]),
    (read_service, [*BEGINNINGS]),
    (follow_service, HEADS),
]

LIMITED = {
    "client/connection.py": "ask_service, read_service, follow_service; the silences in a stream's body have a limit",
    "client/hub.py": "push",
    "client/job.py": "through client/connection.py",
    "cluster/ray.py": "CONNECT_SECONDS; afterwards Ray's library",
    "environments/agent.py": "the agent's client of the service, with the limits of OpenAI's library",
    "environments/openenv.py": "opens, sends and receives within reply_seconds",
    "environments/outbound.py": "ask_stranger: judges, sinks of jobs, OpenEnv's schema",
    "protocol/connection.py": "OPEN_SECONDS, then heartbeats",
    "server/connections.py": "takes connections, makes none",
    "storage/object_artifacts.py": "read_object, read_mark; a part that is sent has ``StoreRules.upload``",
    "telemetry/metrics.py": "Weights & Biases of the operator, in a thread, with the limits of its library",
    "telemetry/tracing.py": "in a thread with a bounded queue; close(seconds) leaves it",
    "worker/engine/vllm/attached.py": "start_vllm, sample_vllm, score_vllm",
    "worker/model/convert.py": "through worker/model/hub.py",
    "worker/model/hub.py": "tests/worker/model/test_hub.py",
    "worker/transfer/client.py": "read_batch, pull, upload",
    "worker/transfer/http.py": "read_batch, pull",
    "worker/transfer/peers.py": "read_peer",
}
"""The files that open connections to other machines, each with the calls above or with its limits."""

LIBRARIES = (
    "aiohttp", "http.client", "httpx", "huggingface_hub", "obstore", "openai", "opentelemetry", "ray", "requests",
    "urllib.request", "wandb", "websockets",
)  # fmt: skip


def reached(source: str) -> bool:
    """Whether a module imports a library that opens connections, or opens one itself."""
    for node in ast.walk(ast.parse(source)):
        names = [one.name for one in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom) and node.module:
            names = [node.module, *(f"{node.module}.{one.name}" for one in node.names)]
        if any(name == library or name.startswith(f"{library}.") for name in names for library in LIBRARIES):
            return True
        if isinstance(node, ast.Attribute) and node.attr in ("create_connection", "open_connection"):
            return True
    return False


def test_each_file_that_opens_connections_has_its_limits_in_the_table() -> None:
    root = Path(rookery.__file__).parent
    found = {str(path.relative_to(root)) for path in root.rglob("*.py") if reached(path.read_text(encoding="utf-8"))}
    assert found == LIMITED.keys()
    called = {call.__name__ for call, _ in CALLS}
    assert all(any(name in text for text in LIMITED.values()) for name in called)


@pytest.mark.parametrize(
    ("call", "name"),
    [(call, name) for call, names in CALLS for name in names],
    ids=[f"{call.__name__}-{name}" for call, names in CALLS for name in names],
)
def test_a_server_that_sends_next_to_nothing_is_given_up(
    call: Callable[[str, Path], object], name: str, tmp_path: Path, s3_keys: None
) -> None:
    began = time.monotonic()
    with endless(*BEGINNINGS[name]) as url, pytest.raises(Exception) as raised:
        done = call(url, tmp_path)
        if asyncio.iscoroutine(done):
            asyncio.run(asyncio.wait_for(done, 60.0))
    assert time.monotonic() - began < 50, "without a limit it is waited for without end"
    assert "\n" not in str(raised.value)


# --- the pace ---------------------------------------------------------------------------------------------------------


def received(waits: list[tuple[float, int]], seconds: float, pauses: float = 0.0) -> int:
    """The bytes that come at this pace, each block after a wait; the reader takes its time after each."""
    passed = [0.0]

    def blocks() -> Iterator[bytes]:
        for wait, size in waits:
            passed.append(wait)
            yield bytes(size)

    came = 0
    for block in TransferPace(seconds, lambda: sum(passed)).blocks(blocks()):
        came += len(block)
        passed.append(pauses)
    return came


@pytest.mark.parametrize(
    ("waits", "passes"),
    [
        ([(1.0, 1024)] * 1000, True),
        ([(9.0, 10_000)] * 1000, True),
        ([(1.0, 900)] * 1000, False),
        ([(9.0, 1 << 20)], True),
        ([(0.1, 1 << 20), (1.0, 1), *[(1.0, 1)] * 20], False),
    ],
)
def test_a_pace_is_kept_at_each_moment(waits: list[tuple[float, int]], passes: bool) -> None:
    """A fast beginning earns no time for later."""
    if passes:
        assert received(waits, 10.0, pauses=1000.0) == sum(size for _, size in waits)
        return
    with pytest.raises(TooSlow, match=f"less than {SLOWEST:g} bytes per second"):
        received(waits, 10.0)
