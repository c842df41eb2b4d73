"""Versions that workers of one machine hand over before they are committed: real files, processes and transfers."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import httpx
import pytest
from tests.support.dialled import Dialled
from tests.support.peers import eventually
from tests.worker.transfer.test_client import FILES, Peer, transfers

from rookery import protocol
from rookery.worker.transfer.cache import AdapterCache, CacheEvents, sha256
from rookery.worker.transfer.client import TransferClient
from rookery.worker.transfer.http import TransferFailed

WEIGHTS = "adapter_model.safetensors"


@pytest.fixture
def service(tmp_path: Path) -> Iterator[Dialled]:
    with Dialled(tmp_path / "artifacts") as service:
        yield service


def write(folder: Path) -> None:
    for name, content in FILES.items():
        (folder / name).write_bytes(content)


def private(root: Path) -> list[Path]:
    """Private folders of the cache."""
    return list((root / "adapters").glob(".*.*"))


async def handed(
    service: Dialled, trainer: TransferClient, receiver: TransferClient
) -> tuple[protocol.Manifest, list[bool]]:
    """The trainer uploads a version, and the receiver takes it over before the first byte is sent."""
    seen = []

    async def staged(digest: str, folder: Path) -> None:
        assert not [path for path, _ in service.requests if "uploads" in path]
        there = await receiver.receive_handed(digest, folder.name)
        seen.append((there / WEIGHTS).samefile(folder / WEIGHTS))
        assert sha256(there / WEIGHTS) == sha256(folder / WEIGHTS)
        assert not (there / "trainer_state.safetensors").exists()

    manifest = await trainer.upload(service.tickets.upload(), write, staged)
    return manifest, seen


async def test_handed_over_version_is_in_place_when_it_is_committed(service: Dialled, tmp_path: Path) -> None:
    events = CacheEvents()
    trainer, receiver = transfers(service, tmp_path), transfers(service, tmp_path, events=events)
    assert trainer.cache_identity == receiver.cache_identity
    manifest, seen = await handed(service, trainer, receiver)
    assert seen == [True], "both map the same file"
    assert events.take() == [protocol.HandedOver(hash=manifest.hash)]
    assert trainer.cached() == receiver.cached() == [], "it is not committed"
    ref = service.ref(manifest, 1)
    trainer.adopt(ref)
    async with receiver.pulled(ref) as folder, trainer.pulled(ref) as other:
        assert folder == other
        for shard in manifest.shards:
            if shard.name != "trainer_state.safetensors":
                assert (folder / shard.name).read_bytes() == FILES[shard.name]
    assert trainer.cached() == receiver.cached() == [manifest.hash]
    assert [path for path, _ in service.requests if manifest.hash in path] == [], "nothing was pulled"
    assert (receiver.bytes_from_service, receiver.bytes_from_peers) == (0, 0)
    assert private(tmp_path) == []
    await trainer.close()
    await receiver.close()


async def test_version_that_is_not_committed_leaves_no_trace(service: Dialled, tmp_path: Path) -> None:
    trainer, receiver = transfers(service, tmp_path), transfers(service, tmp_path)
    for end in (
        lambda digest: (trainer.withdraw([digest]), receiver.withdraw([digest])),
        lambda digest: (trainer.withdraw_all(), receiver.withdraw_all()),
        lambda digest: (trainer.evict(digest), receiver.evict(digest)),
    ):
        manifest, _ = await handed(service, trainer, receiver)
        assert len(private(tmp_path)) == 2
        end(manifest.hash)
        assert list((tmp_path / "adapters").iterdir()) == []
    with pytest.raises(TransferFailed):
        await trainer.upload("no ticket", write, lambda digest, folder: receiver.receive_handed(digest, folder.name))
    receiver.withdraw_all()
    assert list((tmp_path / "adapters").iterdir()) == []
    await trainer.close()
    await receiver.close()


@pytest.mark.parametrize("at", ["announcement", "upload", "end"])
async def test_announced_version_whose_upload_does_not_end_is_abandoned(
    service: Dialled, tmp_path: Path, at: str
) -> None:
    """Engines have it, and nothing else says that no commit will name it."""
    abandoned, announced = list[str](), list[str]()
    trainer = transfers(service, tmp_path, abandoned=abandoned.append)

    async def staged(digest: str, folder: Path) -> None:
        announced.append(digest)
        if at == "announcement":
            raise asyncio.CancelledError

    ticket = service.tickets.upload() if at == "end" else "no ticket"
    with suppress(asyncio.CancelledError, TransferFailed):
        await trainer.upload(ticket, write, staged)
    assert abandoned == ([] if at == "end" else announced)
    assert trainer.withdraw_all() == (announced if at == "end" else [])
    assert private(tmp_path) == []
    await trainer.close()


async def test_artifact_of_the_cache_is_not_withdrawn(service: Dialled, tmp_path: Path) -> None:
    events = CacheEvents()
    trainer, receiver = transfers(service, tmp_path), transfers(service, tmp_path, events=events)
    manifest, _ = await handed(service, trainer, receiver)
    async with receiver.pulled(service.ref(manifest, 1)):
        assert events.take() == [
            protocol.HandedOver(hash=manifest.hash),
            protocol.AdaptersCached(hashes=[manifest.hash]),
        ], "in the order in which they happened"
        assert receiver.withdraw([manifest.hash, "a" * 64]) == ["a" * 64], "engines keep what is committed"
        assert trainer.withdraw_all() == [], "it has the same cache"
    await trainer.close()
    await receiver.close()


async def test_uncommitted_version_is_not_served(service: Dialled, tmp_path: Path) -> None:
    peer, trainer = Peer(service, tmp_path), transfers(service, tmp_path)
    manifest, _ = await handed(service, trainer, peer.transfers)
    headers = {protocol.READ_HEADER: peer.reads.sign(manifest.hash)}
    async with httpx.AsyncClient(trust_env=False, timeout=30) as http:
        assert (await http.get(f"{peer.url}/artifacts/{manifest.hash}", headers=headers)).status_code == 404
        [name, _] = [path.name for path in private(tmp_path)]
        headers = {protocol.READ_HEADER: peer.reads.sign(name)}
        assert (await http.get(f"{peer.url}/artifacts/{name}/{WEIGHTS}", headers=headers)).status_code == 404
        await peer.pull(service.ref(manifest, 1))
        headers = {protocol.READ_HEADER: peer.reads.sign(manifest.hash)}
        found = await http.get(f"{peer.url}/artifacts/{manifest.hash}/{WEIGHTS}", headers=headers)
        assert found.content == FILES[WEIGHTS]
    await trainer.close()
    await peer.close()


@pytest.mark.parametrize("name", ["../adapters", ".1.x", "a" * 64, ".1." + "0" * 32, "", "."])
async def test_hand_over_from_no_private_folder_is_refused(service: Dialled, tmp_path: Path, name: str) -> None:
    receiver = transfers(service, tmp_path)
    with pytest.raises(TransferFailed):
        await receiver.receive_handed("a" * 64, name)
    assert list((tmp_path / "adapters").iterdir()) == []
    await receiver.close()


async def test_wrong_bytes_are_not_taken_over(service: Dialled, tmp_path: Path) -> None:
    trainer, receiver, errors = transfers(service, tmp_path), transfers(service, tmp_path), []

    async def staged(digest: str, folder: Path) -> None:
        for name, content in ((WEIGHTS, b"x" * len(FILES[WEIGHTS])), ("manifest.json", b"{}")):
            good = (folder / name).read_bytes()
            (folder / name).write_bytes(content)
            with pytest.raises(TransferFailed) as error:
                await receiver.receive_handed(digest, folder.name)
            errors.append(str(error.value))
            (folder / name).write_bytes(good)

    ticket = service.tickets.upload()
    manifest = await trainer.upload(ticket, write, staged)
    assert service.collect(ticket) == manifest
    assert "wrong hash" in errors[0] and "corrupt" in errors[1]
    async with receiver.pulled(service.ref(manifest, 1)) as folder:  # it pulls instead
        assert (folder / WEIGHTS).read_bytes() == FILES[WEIGHTS]
    assert receiver.bytes_from_service > len(FILES[WEIGHTS])
    await trainer.close()
    await receiver.close()


KILLED = """
import asyncio, sys
from pathlib import Path
from rookery.worker.transfer.cache import AdapterCache
cache = AdapterCache(Path(sys.argv[1]), 1 << 30)
folder = cache.staging_folder()
(folder / "adapter_model.safetensors").write_bytes(b"x" * 100_000)
print(folder.name, flush=True)
sys.stdin.read()
"""


def killed_trainer(root: Path) -> str:
    """The private folder of a process that was killed after it wrote a version."""
    trainer = subprocess.Popen([sys.executable, "-c", KILLED, str(root)], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        assert trainer.stdout is not None
        return trainer.stdout.readline().decode().strip()
    finally:
        trainer.send_signal(signal.SIGKILL)
        trainer.communicate()


async def test_files_of_a_killed_trainer_are_deleted_by_a_process_that_lives(service: Dialled, tmp_path: Path) -> None:
    receiver = transfers(service, tmp_path)
    name = await asyncio.to_thread(killed_trainer, tmp_path / "adapters")
    assert [path.name for path in private(tmp_path)] == [name]
    with suppress(TransferFailed):  # its files are gone: the version is pulled, if it is ever committed
        await receiver.receive_handed("a" * 64, name)
    await eventually(lambda: list((tmp_path / "adapters").iterdir()) == [])
    await receiver.close()


def test_private_folder_of_a_living_process_stays_for_every_process_id(tmp_path: Path) -> None:
    """The ids of another container's processes are unknown here, and those of dead ones may be taken."""
    root = tmp_path / "adapters"
    cache = AdapterCache(root, 1 << 30)
    own, nobody = cache.staging_folder(), str(2**22 + 1)
    foreign = root / f".{nobody}.{'0' * 32}"
    own.rename(foreign)
    (dead := root / f".{os.getpid()}.{'1' * 32}").mkdir()
    AdapterCache(root, 1 << 30)
    assert foreign.is_dir() and not dead.exists()
    foreign.rename(own)
    cache.delete_staging(own)
    (last := root / f".{nobody}.{'2' * 32}").mkdir()
    cache.delete_private_leftovers()
    assert not last.exists() and private(tmp_path) == []


async def test_artifact_that_is_unpublished_while_it_arrives_is_deleted(service: Dialled, tmp_path: Path) -> None:
    events = CacheEvents()
    here, ref = transfers(service, tmp_path, events=events), service.ref(service.store(FILES), 1)
    async with here.pulled(ref) as folder:  # in use until the end of the block
        here.evict(ref.hash)
        assert (folder / WEIGHTS).read_bytes() == FILES[WEIGHTS]
    assert here.cached() == []
    events.take()
    here.replicate(ref)
    await eventually(lambda: bool(here.receiving))
    here.evict(ref.hash)
    await eventually(lambda: not here.receiving and not here.cached())
    assert here.cached() == []
    assert events.take() == [], "it does not report what it does not have"
    async with here.pulled(ref):  # named again: it stays
        here.evict(ref.hash)
        async with here.pulled(ref):
            pass
    assert here.cached() == [ref.hash]
    await here.close()


def test_cache_is_the_same_for_all_that_share_its_folder(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir(mode=0o700)
    (tmp_path / "link").symlink_to(tmp_path / "b")
    one, two, other = (AdapterCache(tmp_path / name, 1) for name in ("b", "link", "c"))
    assert one.identity == two.identity != other.identity
