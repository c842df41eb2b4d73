"""Transfers of a worker against a real HTTP server and real peers that break off, lie, refuse or hang."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import shutil
import socket
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import httpx
import msgspec
import pytest
from safetensors import SafetensorError
from tests.support.dialled import Dialled
from tests.support.disks import make_read_only, mounted
from tests.support.peers import eventually

from rookery import protocol
from rookery.errors import UserError
from rookery.worker.transfer import client, peer_http
from rookery.worker.transfer.cache import AdapterCache, CacheEvents, locked
from rookery.worker.transfer.client import TransferClient
from rookery.worker.transfer.http import CorruptDownload, TransferFailed, service_client
from rookery.worker.transfer.peers import PeerClient, PeerServer, ServingRules, listen
from rookery.worker.transfer.published import PublishedArtifacts, Reads

FILES = {
    "adapter_config.json": b"{}",
    "adapter_model.safetensors": os.urandom(64 << 10),
    "trainer_state.safetensors": os.urandom(32 << 10),
}


@pytest.fixture
def service(tmp_path: Path) -> Iterator[Dialled]:
    with Dialled(tmp_path / "artifacts") as service:
        yield service


def reads(service: Dialled, key: protocol.ReadKey | None = None) -> Reads:
    """As after a welcome of the service, or of one with another key."""
    welcome = service.welcome("worker", 1)
    found = Reads()
    found.use(msgspec.structs.replace(welcome, reads=key or welcome.reads))
    return found


async def nobody(digest: str, failed: str) -> list[str]:
    raise TransferFailed("no other sources were named")


def transfers(
    service: Dialled,
    root: Path,
    *,
    capacity: int = 1 << 30,
    peer_seconds: float = 10.0,
    ask: Callable[[str, str], Awaitable[list[str]]] = nobody,
    events: CacheEvents | None = None,
    published: PublishedArtifacts | None = None,
    abandoned: Callable[[str], None] = lambda digest: None,
) -> TransferClient:
    signed = reads(service)
    return TransferClient(
        service_client(service.url, 10),
        PeerClient(peer_seconds, signed, ask),
        AdapterCache(root / "adapters", capacity),
        CacheEvents() if events is None else events,
        PublishedArtifacts() if published is None else published,
        signed,
        abandoned=abandoned,
    )


async def pulled_weights(here: TransferClient, ref: protocol.AdapterRef) -> bytes:
    async with here.pulled(ref) as folder:
        return (folder / "adapter_model.safetensors").read_bytes()


async def test_pull_fetches_each_needed_shard_once(service: Dialled, tmp_path: Path) -> None:
    here, ref = transfers(service, tmp_path), service.ref(service.store(FILES), 1)
    async with here.pulled(ref) as folder, here.pulled(ref) as again:
        assert folder == again
        assert (folder / "adapter_model.safetensors").read_bytes() == FILES["adapter_model.safetensors"]
        assert not (folder / "trainer_state.safetensors").exists()
    assert here.cached() == [ref.hash]
    async with here.pulled(ref, state=True) as folder:
        assert (folder / "trainer_state.safetensors").read_bytes() == FILES["trainer_state.safetensors"]
    assert len(service.requests) == len(FILES)
    await here.close()


async def test_broken_transfer_resumes_at_the_last_byte(service: Dialled, tmp_path: Path) -> None:
    here, ref = transfers(service, tmp_path), service.ref(service.store(FILES), 1)
    service.cut = 40 << 10
    assert await pulled_weights(here, ref) == FILES["adapter_model.safetensors"]
    ranges = [asked for path, asked in service.requests if path.endswith("adapter_model.safetensors")]
    assert ranges[0] == ""
    assert len(ranges) > 1
    assert all(0 < int(asked.removeprefix("bytes=").rstrip("-")) <= 64 << 10 for asked in ranges[1:])
    await here.close()


async def test_workers_of_unlike_containers_share_one_folder(service: Dialled, tmp_path: Path) -> None:
    """Each is process 1 of its container; both pull a version at the same time."""
    one, two = transfers(service, tmp_path), transfers(service, tmp_path)
    for cut in (None, 100 << 10):
        weights = os.urandom(256 << 10)
        ref = service.ref(service.store({"adapter_model.safetensors": weights}), 1)
        service.cut = cut
        assert await asyncio.gather(pulled_weights(one, ref), pulled_weights(two, ref)) == [weights, weights]
        assert [path.name for path in (tmp_path / "adapters" / ref.hash).glob("*.part")] == []
    await one.close()
    await two.close()


def test_files_that_are_written_are_no_leftovers_of_other_processes(tmp_path: Path) -> None:
    root = tmp_path / "adapters"
    cache = AdapterCache(root, 1)
    (folder := root / ("a" * 64)).mkdir()
    (earlier := folder / "adapter_model.safetensors.1.part").write_bytes(b"of a killed process 1")
    (part := cache.part_of(folder / "adapter_model.safetensors")).write_bytes(b"half")
    with locked(part):
        other = AdapterCache(root, 1)
        assert other.part_of(folder / "adapter_model.safetensors") != part
        assert part.read_bytes() == b"half" and not earlier.exists()
    other.delete_private_leftovers()
    assert not part.exists()


async def test_corrupt_shard_is_fetched_twice_and_refused(service: Dialled, tmp_path: Path) -> None:
    here, manifest = transfers(service, tmp_path), service.store(FILES)
    path = service.artifacts.path(manifest.hash, "adapter_model.safetensors")
    good = path.read_bytes()
    path.write_bytes(bytes([good[0] ^ 1]) + good[1:])
    with pytest.raises(CorruptDownload, match=r"adapter_model\.safetensors"):
        async with here.pulled(service.ref(manifest, 1)):
            pass
    assert here.corrupt == 2
    assert [name for name, _ in service.requests].count(f"{manifest.hash}/adapter_model.safetensors") == 2
    assert here.cached() == []
    path.write_bytes(good)
    async with here.pulled(service.ref(manifest, 1)) as folder:
        assert (folder / "adapter_model.safetensors").read_bytes() == good
    await here.close()


async def test_shard_damaged_on_disk_is_fetched_again(service: Dialled, tmp_path: Path) -> None:
    ref = service.ref(service.store(FILES), 1)
    first = transfers(service, tmp_path)
    async with first.pulled(ref) as folder:
        pass
    await first.close()
    (folder / "adapter_model.safetensors").write_bytes(b"x" * (64 << 10))
    (folder / "manifest.json").write_bytes(b"{")
    second = transfers(service, tmp_path)
    assert await pulled_weights(second, ref) == FILES["adapter_model.safetensors"]
    assert second.corrupt == 2
    await second.close()


async def test_refused_read_fails_at_once(service: Dialled, tmp_path: Path) -> None:
    here, manifest = transfers(service, tmp_path), service.store(FILES)
    service.refused.add(manifest.hash)
    with pytest.raises(TransferFailed, match="refused"):
        async with here.pulled(service.ref(manifest, 1)):
            pass
    service.refused.clear()
    assert await pulled_weights(here, service.ref(manifest, 1)) == FILES["adapter_model.safetensors"]
    await here.close()


async def test_upload_has_the_hash_that_the_service_computes(service: Dialled, tmp_path: Path) -> None:
    here, ticket = transfers(service, tmp_path), service.tickets.upload()

    def write(folder: Path) -> None:
        for name, content in FILES.items():
            (folder / name).write_bytes(content)

    manifest = await here.upload(ticket, write)
    assert manifest == service.collect(ticket)
    assert service.artifacts.verify(manifest.hash) == manifest
    async with here.pulled(service.ref(manifest, 1)):  # kept in the cache: nothing is pulled
        assert service.requests == []
    async with here.pulled(service.ref(manifest, 1), state=True):
        assert [name for name, _ in service.requests] == [f"{manifest.hash}/trainer_state.safetensors"]
    with pytest.raises(TransferFailed):
        await here.upload(ticket, write)
    await here.close()
    assert all(not path.name.startswith(".") for path in (tmp_path / "adapters").iterdir())


async def test_least_recently_used_artifacts_are_evicted_first(service: Dialled, tmp_path: Path) -> None:
    manifests = [service.store({"adapter_model.safetensors": os.urandom(10 << 10)}) for _ in range(4)]
    here = transfers(service, tmp_path, capacity=25 << 10)
    for age, manifest in enumerate(manifests[:3]):
        async with here.pulled(service.ref(manifest, 1)) as folder:
            pass
        long_ago = folder.stat().st_mtime - 3600 + age
        os.utime(folder, (long_ago, long_ago))
    async with here.pulled(service.ref(manifests[3], 1)):
        assert set(here.cached()) == {manifests[2].hash, manifests[3].hash}
    here.evict(manifests[2].hash)
    assert here.cached() == [manifests[3].hash]
    here.evict(manifests[3].hash)
    await here.close()


async def test_artifact_under_deletion_is_not_reported_as_cached(
    service: Dialled, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here, ref = transfers(service, tmp_path), service.ref(service.store(FILES), 1)
    async with here.pulled(ref):
        assert here.cached() == [ref.hash]
    monkeypatch.setattr(shutil, "rmtree", lambda *_: None)  # a deletion that never ends
    here.evict(ref.hash)
    assert here.cached() == []
    assert len(list((tmp_path / "adapters").iterdir())) == 1
    await here.close()


async def test_eviction_works_on_a_full_disk(service: Dialled, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where no file can be created."""
    here, ref = transfers(service, tmp_path), service.ref(service.store(FILES), 1)
    async with here.pulled(ref):
        pass

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "mkdir", full)
    here.evict(ref.hash)
    assert here.cached() == []
    await eventually(lambda: not any((tmp_path / "adapters").iterdir()))
    await here.close()


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENOSPC, "No space left on device"),
        SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)"),
    ],
    ids=["os", "safetensors"],
)
async def test_full_disk_evicts_unused_artifacts_and_retries(
    service: Dialled, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    """For a pull and for a commit of 10 kB each, with space for 25 kB; artifacts in use stay."""
    here, root, size = transfers(service, tmp_path), tmp_path / "adapters", 10 << 10
    old, used, new = (service.store({"adapter_model.safetensors": os.urandom(size)}) for _ in range(3))
    fill, tries = client.download, []

    def unused(*digests: str) -> None:
        """Pretend that they were last used an hour ago."""
        for digest in digests:
            long_ago = (root / digest).stat().st_mtime - 3600
            os.utime(root / digest, (long_ago, long_ago))

    def take() -> None:
        if sum(path.stat().st_size for path in root.rglob("*") if path.is_file()) + size > 25 << 10:
            raise error

    async def limited(*given: Any) -> None:
        take()
        await fill(*given)

    def write(folder: Path) -> None:
        tries.append(folder)
        if len(tries) == 1:
            (folder / "begun").write_bytes(b"half")
        take()
        (folder / "adapter_model.safetensors").write_bytes(os.urandom(size))

    monkeypatch.setattr(client, "download", limited)
    async with here.pulled(service.ref(old, 1)), here.pulled(service.ref(used, 1)):
        pass
    async with here.pulled(service.ref(used, 1)):
        unused(old.hash, used.hash)
        async with here.pulled(service.ref(new, 1)):
            assert set(here.cached()) == {used.hash, new.hash}
        unused(new.hash)
        manifest = await here.upload(service.tickets.upload(), write)
        assert len(tries) == 2 and [shard.name for shard in manifest.shards] == ["adapter_model.safetensors"]
        assert set(here.cached()) == {used.hash, manifest.hash}
        with pytest.raises(TransferFailed, match=r"cache cannot be used \(no space left on device\)"):  # all are in use
            async with here.pulled(service.ref(old, 1)):
                pass
    await here.close()
    assert all(not path.name.startswith(".") for path in root.iterdir())


async def test_cache_that_is_deleted_is_made_again(service: Dialled, tmp_path: Path) -> None:
    """Its user deletes it while the worker runs. One that cannot be used is named without its path."""
    here, ref, root = transfers(service, tmp_path), service.ref(service.store(FILES), 1), tmp_path / "adapters"

    def write(folder: Path) -> None:
        (folder / "adapter_model.safetensors").write_bytes(os.urandom(1 << 10))

    for unusable in (False, True, False):
        shutil.rmtree(root, ignore_errors=True)
        if unusable:
            root.write_text("a file in its place")
        assert here.cached() == []
        context = pytest.raises(TransferFailed, match=r"^the worker's cache cannot be used \([\w ]+\)$")
        with context if unusable else contextlib.nullcontext():
            assert await pulled_weights(here, ref) == FILES["adapter_model.safetensors"]
        root.unlink() if unusable else shutil.rmtree(root)
        if unusable:
            root.write_text("a file in its place")
        with context if unusable else contextlib.nullcontext():
            assert (await here.upload(service.tickets.upload(), write)).hash in here.cached()
            assert root.stat().st_mode & 0o777 == 0o700
        if unusable:
            root.unlink()
    await here.close()


async def test_cache_that_became_read_only_is_read(service: Dialled, tmp_path: Path) -> None:
    root = tmp_path / "adapters"
    with mounted(root):
        here, ref = transfers(service, tmp_path), service.ref(service.store(FILES), 1)
        await pulled_weights(here, ref)
        mend = make_read_only(root)
        assert await pulled_weights(here, ref) == FILES["adapter_model.safetensors"]
        with pytest.raises(TransferFailed, match=r"cache cannot be used \(read-only file system\)"):
            await pulled_weights(here, service.ref(service.store({"adapter_model.safetensors": b"other"}), 2))
        mend()
        await here.close()


async def test_cache_folder_is_private_to_its_owner(service: Dialled, tmp_path: Path) -> None:
    """Adapters of all tenants are in it; a folder that was created with wider permissions is corrected."""
    root = tmp_path / "adapters"
    root.mkdir(0o755)
    root.chmod(0o755)
    here, ref = transfers(service, tmp_path), service.ref(service.store(FILES), 1)
    assert root.stat().st_mode & 0o777 == 0o700
    async with here.pulled(ref):
        assert root.stat().st_mode & 0o777 == 0o700
    await here.close()
    AdapterCache(tmp_path / "new" / "adapters", 1 << 20)
    assert (tmp_path / "new" / "adapters").stat().st_mode & 0o777 == 0o700


async def test_cache_folder_of_another_user_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def denied(*_: object) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    root = tmp_path / "adapters"
    root.mkdir()
    root.chmod(0o755)
    monkeypatch.setattr(Path, "chmod", denied)
    with pytest.raises(UserError, match="belongs to another"):
        AdapterCache(root, 1 << 20)


@pytest.mark.parametrize("name", ["../escape", ".hidden/x", "/etc/x"])
async def test_manifest_cannot_name_files_outside_its_folder(service: Dialled, tmp_path: Path, name: str) -> None:
    manifest = protocol.manifest_of([protocol.Shard(name=name, size=1, sha256="0" * 64)])
    folder = service.artifacts.root / manifest.hash
    folder.mkdir()
    (folder / "manifest.json").write_bytes(msgspec.json.encode(manifest))
    (folder / name).parent.mkdir(exist_ok=True)
    here = transfers(service, tmp_path)
    service.artifacts.open = lambda digest: manifest  # type: ignore[method-assign]
    with pytest.raises(CorruptDownload, match="outside"):
        async with here.pulled(service.ref(manifest, 1)):
            pass
    await here.close()


# --- peers ------------------------------------------------------------------------------------------------------------

SIZE = len(FILES["adapter_model.safetensors"])


PATIENT = ServingRules(expect_seconds=60.0, stall_seconds=60.0)
"""A loaded machine changes no route."""


class Peer:
    """A worker's cache and its peer server."""

    def __init__(self, service: Dialled, root: Path, *, rules: ServingRules | None = None, **options: Any) -> None:
        self.root = root
        self.published = PublishedArtifacts()
        self.transfers = transfers(service, self.root, published=self.published, **options)
        listening, self.url = listen(service.url, None, 0)
        assert listening is not None
        self.reads = reads(service)
        self.server = PeerServer(self.root / "adapters", listening, self.published, self.reads, rules)
        self.server.start()

    async def close(self) -> None:
        await self.server.stop()
        await self.transfers.close()

    async def pull(self, ref: protocol.AdapterRef, *, state: bool = False) -> None:
        async with self.transfers.pulled(ref, state=state):
            pass

    async def get(self, path: str, signature: str, **headers: str) -> httpx.Response:
        async with httpx.AsyncClient(trust_env=False, timeout=60) as http:
            return await http.get(f"{self.url}{path}", headers={protocol.READ_HEADER: signature, **headers})


@pytest.fixture
async def peer(service: Dialled, tmp_path: Path) -> AsyncIterator[Peer]:
    peer = Peer(service, tmp_path / "peer")
    yield peer
    await peer.close()


async def test_peer_server_serves_signed_reads_only(service: Dialled, peer: Peer) -> None:
    peer.server.rules = usual = ServingRules(expect_seconds=0.02)
    ref, other = (service.ref(service.store(files), 1) for files in (FILES, {"adapter_config.json": b"[]"}))
    await peer.pull(ref, state=True)
    await peer.pull(other)
    shard = f"/artifacts/{ref.hash}/adapter_model.safetensors"
    good, now, key = peer.reads.sign(ref.hash), time.time(), service.welcome("", 0).reads
    assert (await peer.get(shard, good)).content == FILES["adapter_model.safetensors"]
    part = await peer.get(shard, good, Range="bytes=1000-")
    assert (part.status_code, part.content) == (206, FILES["adapter_model.safetensors"][1000:])
    manifest = msgspec.json.decode((await peer.get(f"/artifacts/{ref.hash}", good)).content, type=protocol.Manifest)
    assert manifest.hash == ref.hash
    foreign = protocol.read_key("another key")
    missing = "0" * 64
    for path, signature in [
        (shard, ""),
        (shard, peer.reads.sign(other.hash)),
        (shard, good[:-1] + ("0" if good[-1] != "0" else "1")),
        (shard, protocol.sign_read(foreign, ref.hash, now)),
        (shard, protocol.sign_read(protocol.ReadKey(id=key.id, secret=foreign.secret), ref.hash, now)),
        (shard, protocol.sign_read(key, ref.hash, now - 600)),
        (shard, protocol.sign_read(key, ref.hash, now + 600)),
        (f"/artifacts/{ref.hash}/trainer_state.safetensors", good),
        (f"/artifacts/{ref.hash}/manifest.json", good),
        (f"/artifacts/{ref.hash}/.adapter", good),
        (f"/artifacts/{ref.hash}/..%2f{other.hash}%2fadapter_config.json", good),
        (f"/artifacts/{ref.hash}/../{other.hash}/adapter_config.json", good),
        (f"/artifacts/{missing}/adapter_config.json", peer.reads.sign(missing)),
        ("/artifacts/..%2f..", peer.reads.sign("../..")),
        ("/artifacts/..", peer.reads.sign("..")),
        ("/", good),
    ]:
        assert (await peer.get(path, signature)).status_code == 404, path
    peer.server.rules = replace(usual, responses=0)
    assert (await peer.get(shard, good)).status_code == 503
    peer.server.rules = usual
    peer.published.unpublish(ref.hash)
    assert (await peer.get(shard, good)).status_code == 404
    peer.published.publish(ref.hash)
    assert (await peer.get(shard, good)).status_code == 200
    assert peer.server.bytes_sent > 2 * SIZE


async def test_reader_that_was_stopped_keeps_no_other_from_its_response(service: Dialled, tmp_path: Path) -> None:
    peer = Peer(service, tmp_path / "peer", rules=ServingRules(responses=1, read_seconds=0.1))
    ref = service.ref(service.store({**FILES, "adapter_model.safetensors": bytes(64 << 20)}), 1)
    await peer.pull(ref)
    signed, before = peer.reads.sign(ref.hash), peer.server.bytes_sent

    async def answered() -> bool:
        return (await peer.get(f"/artifacts/{ref.hash}", signed)).status_code == 200

    with socket.socket() as stopped:
        stopped.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        stopped.connect(("127.0.0.1", httpx.URL(peer.url).port or 0))
        head = f"GET /artifacts/{ref.hash}/adapter_model.safetensors HTTP/1.1\r\nHost: peer\r\n"
        stopped.sendall(f"{head}{protocol.READ_HEADER}: {signed}\r\n\r\n".encode())
        await eventually(lambda: peer.server.bytes_sent > before)
        await eventually(answered)
    await peer.close()


async def test_connections_without_a_request_end(peer: Peer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Any machine of the network can open some: as many as a worker may open files would end its work."""
    monkeypatch.setattr(peer_http, "MOST_CONNECTIONS", 4)
    monkeypatch.setattr(peer_http, "HEAD_SECONDS", 0.2)
    address = "127.0.0.1", httpx.URL(peer.url).port or 0
    loop = asyncio.get_running_loop()
    with contextlib.ExitStack() as opened:
        silent = [opened.enter_context(socket.create_connection(address)) for _ in range(8)]
        for one in silent[:4]:
            with contextlib.suppress(ConnectionError):  # one that was in excess
                one.sendall(b"GET /artifacts/0 HTTP/1.1\r\nHost:")
        for one in silent:
            one.setblocking(False)
            with contextlib.suppress(ConnectionError):
                assert await asyncio.wait_for(loop.sock_recv(one, 1), 60) == b""
    assert (await peer.get("/artifacts/0", "")).status_code == 404


async def test_a_head_without_end_is_not_kept(peer: Peer) -> None:
    """The parser would hold a header of any size."""
    with socket.create_connection(("127.0.0.1", httpx.URL(peer.url).port or 0)) as endless:
        endless.sendall(b"GET /artifacts/0 HTTP/1.1\r\nX-Endless: ")
        with pytest.raises(ConnectionError):
            for _ in range(1024):
                endless.sendall(b"a" * (1 << 16))
    assert (await peer.get("/artifacts/0", "")).status_code == 404


async def test_worker_without_a_welcome_permits_no_read(service: Dialled, peer: Peer) -> None:
    assert not Reads().permits(peer.reads.sign("0" * 64), "0" * 64)
    assert Reads().sign("0" * 64) == ""


@pytest.mark.parametrize(
    ("address", "port", "told"),
    [(None, None, ""), ("far.example:7100", 0, "http://far.example:7100"), (None, 0, "http://127.0.0.1:"),
     ("[fe80::1]:71", 0, "http://[fe80::1]:71"), ("fd00::5", 0, "http://[fd00::5]:"), ("10.0.0.5", 0, "http://10.0.0.5:")],
)  # fmt: skip
def test_address_of_the_peer_server(address: str | None, port: int | None, told: str) -> None:
    listening, url = listen("http://127.0.0.1:7077", address, port)
    assert url.startswith(told)
    assert (listening is None) == (told == "")
    if listening is not None:
        listening.close()


@pytest.mark.parametrize(
    ("address", "port"),
    [
        ("host", None),
        (":7100", None),
        ("host:x", 0),
        (None, 70000),
        ("a host", 0),
        ("10.0.0.5:7100/x", 0),
        ("fd00::5", None),
    ],
)
def test_invalid_peer_address_is_refused(address: str | None, port: int | None) -> None:
    with pytest.raises(UserError):
        listen("http://127.0.0.1:7077", address, port)


def served_by(service: Dialled, manifest: protocol.Manifest, *peers: str) -> protocol.AdapterRef:
    return service.ref(manifest, 1, sources=peers)


async def test_adapter_comes_from_a_peer_and_trainer_state_from_the_service(
    service: Dialled, peer: Peer, tmp_path: Path
) -> None:
    manifest = service.store(FILES)
    events = CacheEvents()
    here, ref = transfers(service, tmp_path, events=events), served_by(service, manifest, peer.url)
    await peer.pull(ref)
    service.requests.clear()
    assert await pulled_weights(here, ref) == FILES["adapter_model.safetensors"]
    assert service.requests == []
    assert events.take() == [protocol.AdaptersCached(hashes=[ref.hash])]
    assert (here.bytes_from_peers, here.bytes_from_service) == (SIZE + len(FILES["adapter_config.json"]), 0)
    async with here.pulled(ref, state=True):
        assert [name for name, _ in service.requests] == [f"{ref.hash}/trainer_state.safetensors"]
    await here.close()


class FaultyPeer:
    """Serves like a worker up to byte ``at`` of the shard, then breaks off, sends nothing more, or sends zeros; or it
    sends a manifest without end."""

    def __init__(
        self, manifest: protocol.Manifest, does: Literal["breaks", "hangs", "lies", "refuses", "floods"], at: int
    ) -> None:
        self.manifest, self.does, self.at = manifest, does, at
        self.asked: list[str] = []
        self.sent = 0
        """Bytes of a manifest without end."""
        self._server: asyncio.Server | None = None

    async def __aenter__(self) -> FaultyPeer:
        self._server = await asyncio.start_server(self._answer, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._server is not None
        self._server.close()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        lines = (await reader.readuntil(b"\r\n\r\n")).decode().lower().split("\r\n")
        path = lines[0].split()[1]
        self.asked.append(path)
        name = path.rsplit("/", 1)[-1]
        content = FILES.get(name, msgspec.json.encode(self.manifest))
        begin = next((int(x.split("=")[1].rstrip("-")) for x in lines if x.startswith("range:")), 0)
        status = "206 Partial Content" if begin else "200 OK"
        if self.does == "floods":
            writer.write(b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n")
            with contextlib.suppress(ConnectionError):
                while self.sent < 1 << 30:
                    writer.write(bytes(1 << 16))
                    await writer.drain()
                    self.sent += 1 << 16
            return
        if self.does == "refuses":
            status, content, begin = "404 Not Found", b"", 0
        head = f"HTTP/1.1 {status}\r\nContent-Length: {len(content) - begin}\r\nConnection: close\r\n\r\n"
        writer.write(head.encode())
        if name != "adapter_model.safetensors" or self.does == "refuses":
            writer.write(content[begin:])
        elif self.does == "lies":
            writer.write(content[begin : self.at] + bytes(len(content) - max(begin, self.at)))
        else:
            writer.write(content[begin : max(begin, self.at)])
            await writer.drain()
            if self.does == "hangs":
                await reader.read()  # until the client closes
        writer.close()


@pytest.mark.parametrize("does", ["breaks", "hangs", "refuses"])
async def test_next_peer_and_then_the_service_resume_where_a_peer_stopped(
    service: Dialled, tmp_path: Path, does: Literal["breaks", "hangs", "refuses"]
) -> None:
    manifest = service.store(FILES)
    here = transfers(service, tmp_path, peer_seconds=1.0 if does == "hangs" else 10.0)
    async with FaultyPeer(manifest, does, 20_000) as one, FaultyPeer(manifest, does, 50_000) as two:
        ref = served_by(service, manifest, "http://127.0.0.1:1", one.url, two.url)
        assert await pulled_weights(here, ref) == FILES["adapter_model.safetensors"]
        ranges = dict(service.requests)
        shard = f"{manifest.hash}/adapter_model.safetensors"
        if does == "refuses":
            assert ranges[shard] == ""
            assert here.bytes_from_peers == 0
        else:
            assert ranges[shard] == "bytes=50000-"
            assert here.bytes_from_service == SIZE - 50_000
        assert here.corrupt == 0
        asked = len(one.asked) + len(two.asked)
        other = service.store({"adapter_config.json": b"[]"})
        one.manifest = two.manifest = other
        async with here.pulled(served_by(service, other, one.url, two.url)):
            again = len(one.asked) + len(two.asked) > asked
        assert again == (does == "refuses"), "only a peer that failed is backed off"
    await here.close()


async def test_wrong_bytes_from_a_peer_cost_one_fetch_from_the_service(service: Dialled, tmp_path: Path) -> None:
    manifest = service.store(FILES)
    here = transfers(service, tmp_path)
    async with FaultyPeer(manifest, "lies", 30_000) as liar:
        assert await pulled_weights(here, served_by(service, manifest, liar.url)) == FILES["adapter_model.safetensors"]
        assert (here.corrupt, here.bytes_from_service >= SIZE) == (1, True)
    await here.close()


async def test_manifest_without_end_is_not_held(service: Dialled, tmp_path: Path) -> None:
    manifest = service.store(FILES)
    here = transfers(service, tmp_path)
    async with FaultyPeer(manifest, "floods", 0) as peer:
        assert await pulled_weights(here, served_by(service, manifest, peer.url)) == FILES["adapter_model.safetensors"]
        assert peer.asked and peer.sent < 64 << 20  # with the buffers of both ends
    await here.close()


async def test_failed_pull_is_reported(service: Dialled, tmp_path: Path) -> None:
    events = CacheEvents()
    here = transfers(service, tmp_path, events=events)
    ref = service.ref(service.store(FILES), 1)
    service.refused.add(ref.hash)
    with pytest.raises(TransferFailed) as failure:
        async with here.pulled(ref):
            pass
    assert events.take() == [protocol.PullFailed(hash=ref.hash, error=str(failure.value))]
    await here.close()


# --- artifacts that arrive --------------------------------------------------------------------------------------------


class Trickle:
    """A source that sends a shard in blocks, the next one when :attr:`go` is released."""

    def __init__(self, manifest: protocol.Manifest, content: bytes, block: int = 16 << 10) -> None:
        self.manifest, self.content, self.block = manifest, content, block
        self.go = asyncio.Semaphore(0)
        self.asked = 0

    async def __aenter__(self) -> Trickle:
        self._server = await asyncio.start_server(self._answer, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        line = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")[0]
        shard = line.split()[1].endswith("safetensors")
        content = self.content if shard else msgspec.json.encode(self.manifest)
        writer.write(f"HTTP/1.1 200 OK\r\nContent-Length: {len(content)}\r\nConnection: close\r\n\r\n".encode())
        self.asked += shard
        for begin in range(0, len(content), self.block):
            if shard:
                await self.go.acquire()
            writer.write(content[begin : begin + self.block])
            await writer.drain()
        writer.close()


BIG = {"adapter_model.safetensors": os.urandom(256 << 10)}


async def test_artifact_is_served_while_it_arrives(service: Dialled, tmp_path: Path) -> None:
    manifest = service.store(BIG)
    one, two = (Peer(service, tmp_path / name, rules=PATIENT, peer_seconds=60.0) for name in ("one", "two"))
    async with Trickle(manifest, BIG["adapter_model.safetensors"]) as source:
        last = asyncio.create_task(two.pull(served_by(service, manifest, one.url)))  # its order comes first
        first = asyncio.create_task(one.pull(served_by(service, manifest, source.url)))
        for _ in range(8):
            source.go.release()
        await eventually(lambda: two.transfers.bytes_from_peers == 8 * source.block)
        assert 0 < two.transfers.receiving[manifest.hash] <= 8 * source.block and not first.done()
        for _ in range(8):
            source.go.release()
        await asyncio.gather(first, last)
        assert (source.asked, service.requests) == (1, []), "one copy left the source, none the service"
    for peer in (one, two):
        path = peer.root / "adapters" / manifest.hash / "adapter_model.safetensors"
        assert path.read_bytes() == BIG["adapter_model.safetensors"]
        await peer.close()


async def test_reader_of_a_stopped_receiver_continues_from_another_source(service: Dialled, tmp_path: Path) -> None:
    manifest = service.store(BIG)
    whole = Peer(service, tmp_path / "whole")
    await whole.pull(service.ref(manifest, 1))
    asked: list[str] = []

    async def ask(digest: str, failed: str) -> list[str]:
        asked.append(failed)
        return [whole.url]

    one = Peer(service, tmp_path / "one", rules=ServingRules(stall_seconds=0.2))
    two = Peer(service, tmp_path / "two", ask=ask)
    service.requests.clear()
    async with Trickle(manifest, BIG["adapter_model.safetensors"]) as source:
        first = asyncio.create_task(one.pull(served_by(service, manifest, source.url)))
        last = asyncio.create_task(two.pull(served_by(service, manifest, one.url)))
        for _ in range(4):
            source.go.release()
        await last
        assert asked == [one.url]
        assert two.transfers.bytes_from_peers == len(BIG["adapter_model.safetensors"]), "no byte twice"
        assert service.requests == [] and not first.done()
        first.cancel()
    for peer in (whole, one, two):
        await peer.close()


@pytest.mark.parametrize("to", ["a worker", "the service"])
async def test_source_that_the_controller_replaces_is_left_at_the_next_block(
    service: Dialled, tmp_path: Path, to: str
) -> None:
    manifest, content = service.store(BIG), BIG["adapter_model.safetensors"]
    whole, here = Peer(service, tmp_path / "whole"), Peer(service, tmp_path / "here")
    await whole.pull(service.ref(manifest, 1))
    async with Trickle(manifest, content) as slow:
        pull = asyncio.create_task(here.pull(served_by(service, manifest, slow.url)))
        for _ in range(4):
            slow.go.release()
        await eventually(lambda: here.transfers.bytes_from_peers == 4 * slow.block)
        here.transfers.replace_sources(manifest.hash, [slow.url, whole.url])
        here.transfers.replace_sources("0" * 64, [whole.url])
        slow.go.release()
        await eventually(lambda: here.transfers.bytes_from_peers == 5 * slow.block)
        assert not pull.done(), "the same source goes on"
        here.transfers.replace_sources(manifest.hash, [whole.url] if to == "a worker" else [])
        slow.go.release()
        await pull
    assert (here.root / "adapters" / manifest.hash / "adapter_model.safetensors").read_bytes() == content
    got = (here.transfers.bytes_from_peers, here.transfers.bytes_from_service)
    assert got == ((len(content), 0) if to == "a worker" else (6 * slow.block, len(content) - 6 * slow.block))
    assert slow.asked == 1 and here.transfers.corrupt == 0
    for peer in (whole, here):
        await peer.close()


async def test_unpublished_artifact_is_read_to_its_end_by_running_readers(service: Dialled, tmp_path: Path) -> None:
    content = os.urandom(16 << 20)
    manifest = service.store({"adapter_model.safetensors": content})
    peer = Peer(service, tmp_path / "peer", rules=ServingRules(block_bytes=4 << 10))
    await peer.pull(service.ref(manifest, 1))
    path = f"/artifacts/{manifest.hash}/adapter_model.safetensors"
    headers = {protocol.READ_HEADER: peer.reads.sign(manifest.hash)}
    async with (
        httpx.AsyncClient(trust_env=False, timeout=60) as http,
        http.stream("GET", peer.url + path, headers=headers) as read,
    ):
        blocks = read.aiter_raw()
        received = await anext(blocks)
        peer.transfers.evict(manifest.hash)
        assert (await http.get(peer.url + path, headers=headers)).status_code == 404, "no new reader"
        async for block in blocks:
            received += block
    assert received == content
    await peer.close()


async def test_retained_artifacts_are_evicted_last_and_evictions_are_reported(service: Dialled, tmp_path: Path) -> None:
    events = CacheEvents()
    here = transfers(service, tmp_path, capacity=150 << 10, events=events)
    refs = [service.ref(service.store({"adapter_model.safetensors": os.urandom(64 << 10)}), n) for n in range(4)]
    here.retain([refs[0].hash])
    reports: list[protocol.Message] = []
    for ref in refs:
        async with here.pulled(ref) as folder:
            pass
        os.utime(folder, (0, ref.version))
        reports += events.take()
    assert set(here.cached()) == {refs[0].hash, refs[3].hash}, "the oldest one is retained"
    evicted = [digest for report in reports if isinstance(report, protocol.AdaptersEvicted) for digest in report.hashes]
    assert evicted == [refs[1].hash, refs[2].hash]
    await here.close()


async def test_no_process_evicts_an_artifact_that_another_one_uses(service: Dialled, tmp_path: Path) -> None:
    """Nor, while there are others, one that another process retains."""
    one, two = transfers(service, tmp_path), transfers(service, tmp_path, capacity=100 << 10)
    refs = [service.ref(service.store({"adapter_model.safetensors": os.urandom(64 << 10)}), n) for n in range(3)]
    used, retained, idle = (ref.hash for ref in refs)
    other = AdapterCache(tmp_path / "adapters", 100 << 10)
    one.retain([retained])

    def age() -> None:
        for number, ref in enumerate(refs):
            if (folder := tmp_path / "adapters" / ref.hash).exists():
                os.utime(folder, (number, number))

    async with one.pulled(refs[0]):
        for ref in refs[1:]:
            async with one.pulled(ref):
                pass
        age()
        assert await other.evict() == [idle, retained]
        assert set(one.cached()) == {used}
        two.evict(used)
        assert one.cached() == [used], "the process that uses it deletes it"
        one.evict(used)
    assert one.cached() == []
    async with one.pulled(refs[1]), one.pulled(refs[2]):
        age()
    assert await other.evict() == [idle]
    one.retain([])
    await one.close()
    await two.close()


@pytest.mark.parametrize("disk_full", [False, True])
async def test_artifacts_are_evicted_after_the_clock_was_set_back(disk_full: bool, tmp_path: Path) -> None:
    """Artifacts that were used before it have times that are yet to come: they are the oldest."""
    root = tmp_path / "adapters"
    cache = AdapterCache(root, 3000)
    for name, ago in {"a": -90_000.0, "b": -86_400.0, "c": 5.0, "d": 3600.0}.items():
        (root / name).mkdir()
        (root / name / "adapter_model.safetensors").write_bytes(bytes(1000))
        os.utime(root / name, (time.time() - ago, time.time() - ago))
    assert await cache.evict(disk_full=disk_full) == (["b", "a", "d"] if disk_full else ["b"])


@pytest.mark.parametrize("ahead", [-7200.0, 7200.0])
async def test_artifacts_are_as_old_as_the_clock_of_their_file_system_shows(
    ahead: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A shared folder has the times of its server."""
    root, present = tmp_path / "adapters", time.time
    cache = AdapterCache(root, 0)
    for name, ago in {"recent": 5.0, "older": 3600.0}.items():
        (root / name).mkdir()
        (root / name / "adapter_model.safetensors").write_bytes(bytes(1000))
        os.utime(root / name, (present() - ago, present() - ago))
    monkeypatch.setattr(time, "time", lambda: present() + ahead)
    assert await cache.evict(disk_full=True) == ["older"]


async def test_an_artifact_that_arrives_slowly_is_not_evicted(service: Dialled, tmp_path: Path) -> None:
    ref = service.ref(service.store(FILES), 1)
    one, other = transfers(service, tmp_path), AdapterCache(tmp_path / "adapters", 0)
    service.cut, service.answers_held = 8 << 10, threading.Event()
    one.replicate(ref)
    await eventually(lambda: (tmp_path / "adapters" / ref.hash / "manifest.json").exists())
    for _ in range(3):
        os.utime(tmp_path / "adapters" / ref.hash, (0, 0))
        assert one.receiving
        assert await other.evict() == []
    service.answers_held.set()
    assert await pulled_weights(one, ref) == FILES["adapter_model.safetensors"]
    await one.close()
