"""Transfers of a worker against a real HTTP server and real peers that break off, lie, refuse or hang."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import shutil
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import httpx
import msgspec
import pytest
from safetensors import SafetensorError
from tests.support.dialled import Dialled
from tests.support.peers import eventually, settle

from rookery import protocol
from rookery.errors import UserError
from rookery.worker.transfer import client, peers
from rookery.worker.transfer.cache import AdapterCache, CacheEvents
from rookery.worker.transfer.client import TransferClient
from rookery.worker.transfer.http import CorruptDownload, TransferFailed
from rookery.worker.transfer.peers import PeerServer, listen
from rookery.worker.transfer.prefetch import Prefetcher

FILES = {
    "adapter_config.json": b"{}",
    "adapter_model.safetensors": os.urandom(64 << 10),
    "trainer_state.safetensors": os.urandom(32 << 10),
}


@pytest.fixture
def service(tmp_path: Path) -> Iterator[Dialled]:
    with Dialled(tmp_path / "artifacts") as service:
        yield service


async def no_renewal(digest: str) -> str:
    raise TransferFailed("no new ticket came")


def transfers(
    service: Dialled,
    root: Path,
    *,
    capacity: int = 1 << 30,
    peer_seconds: float = 10.0,
    renew: Callable[[str], Awaitable[str]] = no_renewal,
    events: CacheEvents | None = None,
) -> TransferClient:
    return TransferClient(
        service.url,
        root / "adapters",
        capacity,
        renew,
        CacheEvents() if events is None else events,
        timeout_seconds=10,
        peer_seconds=peer_seconds,
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


async def test_expired_ticket_is_renewed_once(service: Dialled, tmp_path: Path) -> None:
    manifest = service.store(FILES)
    asked: list[str] = []

    async def renew(digest: str) -> str:
        asked.append(digest)
        return service.tickets.grant(digest) if len(asked) == 1 else "no"

    here = transfers(service, tmp_path, renew=renew)
    async with here.pulled(service.ref(manifest, 1, ticket=False)):
        assert asked == [manifest.hash]
    other = service.store({"adapter_config.json": b"[]"})
    with pytest.raises(TransferFailed, match="ticket"):
        async with here.pulled(service.ref(other, 1, ticket=False)):
            pass
    assert asked == [manifest.hash, other.hash]
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
        with pytest.raises(type(error)):  # every artifact is in use or recently used
            async with here.pulled(service.ref(old, 1)):
                pass
    await here.close()
    assert all(not path.name.startswith(".") for path in root.iterdir())


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


class Peer:
    """A worker's cache and its peer server."""

    def __init__(self, service: Dialled, root: Path) -> None:
        self.root = root / "peer"
        self.transfers = transfers(service, self.root)
        listening, self.url = listen(service.url, None, 0)
        assert listening is not None
        self.server = PeerServer(self.root / "adapters", listening)
        self.server.start()

    async def pull(self, ref: protocol.AdapterRef, *, state: bool = False) -> None:
        async with self.transfers.pulled(ref, state=state):
            pass

    async def get(self, path: str, ticket: str = "t", **headers: str) -> httpx.Response:
        async with httpx.AsyncClient(trust_env=False) as http:
            return await http.get(f"{self.url}{path}", headers={"X-Rookery-Ticket": ticket, **headers})


@pytest.fixture
async def peer(service: Dialled, tmp_path: Path) -> AsyncIterator[Peer]:
    peer = Peer(service, tmp_path)
    yield peer
    await peer.server.stop()
    await peer.transfers.close()


async def test_peer_server_serves_named_artifacts_to_named_tickets_until_they_expire(
    service: Dialled, peer: Peer, monkeypatch: pytest.MonkeyPatch
) -> None:
    ref, other = (service.ref(service.store(files), 1) for files in (FILES, {"adapter_config.json": b"[]"}))
    await peer.pull(ref, state=True)
    await peer.pull(other)
    shard = f"/artifacts/{ref.hash}/adapter_model.safetensors"
    assert (await peer.get(shard)).status_code == 404
    peer.server.serve(ref.hash, "t", 60)
    assert (await peer.get(shard)).content == FILES["adapter_model.safetensors"]
    part = await peer.get(shard, Range="bytes=1000-")
    assert (part.status_code, part.content) == (206, FILES["adapter_model.safetensors"][1000:])
    manifest = msgspec.json.decode((await peer.get(f"/artifacts/{ref.hash}")).content, type=protocol.Manifest)
    assert manifest.hash == ref.hash
    peer.server.serve(other.hash, "over", -1)
    for path, ticket in [
        (shard, "another"),
        (shard, ""),
        (f"/artifacts/{ref.hash}/trainer_state.safetensors", "t"),
        (f"/artifacts/{ref.hash}/manifest.json", "t"),
        (f"/artifacts/{ref.hash}/.adapter", "t"),
        (f"/artifacts/{ref.hash}/..%2f{other.hash}%2fadapter_config.json", "t"),
        (f"/artifacts/{ref.hash}/../{other.hash}/adapter_config.json", "t"),
        (f"/artifacts/{other.hash}/adapter_config.json", "t"),
        (f"/artifacts/{other.hash}/adapter_config.json", "over"),
        ("/artifacts/..%2f..", "t"),
        ("/", "t"),
    ]:
        assert (await peer.get(path, ticket)).status_code == 404, path
    monkeypatch.setattr(peers, "MAX_RESPONSES", 0)
    assert (await peer.get(shard)).status_code == 503
    monkeypatch.undo()
    peer.server.revoke(ref.hash)
    assert (await peer.get(shard)).status_code == 404


@pytest.mark.parametrize(
    ("address", "port", "told"),
    [(None, None, ""), ("far.example:7100", 0, "http://far.example:7100"), (None, 0, "http://127.0.0.1:"),
     ("[fe80::1]:71", 0, "http://[fe80::1]:71")],
)  # fmt: skip
def test_address_of_the_peer_server(address: str | None, port: int | None, told: str) -> None:
    listening, url = listen("http://127.0.0.1:7077", address, port)
    assert url.startswith(told)
    assert (listening is None) == (told == "")
    if listening is not None:
        listening.close()


@pytest.mark.parametrize(("address", "port"), [("host", None), (":7100", None), ("host:x", 0), (None, 70000)])
def test_invalid_peer_address_is_refused(address: str | None, port: int | None) -> None:
    with pytest.raises(UserError):
        listen("http://127.0.0.1:7077", address, port)


def served_by(service: Dialled, manifest: protocol.Manifest, *peers: str) -> protocol.AdapterRef:
    return msgspec.structs.replace(service.ref(manifest, 1), peers=list(peers))


async def test_adapter_comes_from_a_peer_and_trainer_state_from_the_service(
    service: Dialled, peer: Peer, tmp_path: Path
) -> None:
    manifest = service.store(FILES)
    events = CacheEvents()
    here, ref = transfers(service, tmp_path, events=events), served_by(service, manifest, peer.url)
    await peer.pull(ref)
    peer.server.serve(ref.hash, ref.ticket, 60)
    service.requests.clear()
    assert await pulled_weights(here, ref) == FILES["adapter_model.safetensors"]
    assert service.requests == []
    assert events.take(1) == [protocol.AdaptersCached(epoch=1, hashes=[ref.hash])]
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
    ref = service.ref(service.store(FILES), 1, ticket=False)
    with pytest.raises(TransferFailed):
        async with here.pulled(ref):
            pass
    assert events.take(1) == [protocol.PullFailed(epoch=1, hash=ref.hash, error="no new ticket came")]
    await here.close()


# --- prefetch ---------------------------------------------------------------------------------------------------------


async def test_slow_receiver_skips_versions_replaced_by_newer_ones(service: Dialled, tmp_path: Path) -> None:
    begun: list[str] = []
    here = transfers(service, tmp_path)
    go = asyncio.Event()
    pull = here._pull

    async def slowly(digest: str, state: bool) -> Path:
        begun.append(digest)
        await go.wait()
        return await pull(digest, state)

    here._pull = slowly  # type: ignore[method-assign]
    stored = [service.store({"adapter_config.json": str(version).encode()}) for version in range(6)]
    refs = [service.ref(manifest, version, "a") for version, manifest in enumerate(stored)]
    other = service.ref(service.store({"adapter_config.json": b"b"}), 0, "b")
    ahead = Prefetcher(here)
    ahead.prefetch(refs[:2])
    await settle()
    assert begun == [refs[0].hash, refs[1].hash], "two at a time; neither replaces the other"
    for ref in (refs[2], refs[3], other, refs[4], refs[5]):
        ahead.prefetch([ref])
    ahead.discard(refs[5].hash)
    go.set()
    await eventually(lambda: len(here.cached()) >= 3)
    assert set(here.cached()) == {refs[0].hash, refs[1].hash, other.hash}
    assert refs[2].hash not in begun
    await here.close()
