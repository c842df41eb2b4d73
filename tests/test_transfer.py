"""A worker's transfers against a real HTTP server: broken, corrupt, refused."""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import pytest

from dialled import Dialled
from rookery import wire
from rookery.worker.fetch import CorruptArtifact, TransferFailed
from rookery.worker.transfer import Transfers

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
    service: Dialled, root: Path, *, cap: int = 1 << 30, renew: Callable[[str], Awaitable[str]] = no_renewal
) -> Transfers:
    return Transfers(
        service.url,
        root / "adapters",
        cap,
        renew,
        timeout_seconds=10,
        peer_seconds=0.5,
        arrived=lambda digest: None,
        failed=lambda digest, reason: None,
    )


async def test_only_what_is_needed_is_pulled_and_once(service: Dialled, tmp_path: Path) -> None:
    here, ref = transfers(service, tmp_path), service.ref(service.store(FILES), 1)
    async with here.pulled(ref) as folder, here.pulled(ref) as again:
        assert folder == again
        assert (folder / "adapter_model.safetensors").read_bytes() == FILES["adapter_model.safetensors"]
        assert not (folder / "trainer_state.safetensors").exists()
    assert here.here() == [ref.hash]
    async with here.pulled(ref, state=True) as folder:
        assert (folder / "trainer_state.safetensors").read_bytes() == FILES["trainer_state.safetensors"]
    assert len(service.requests) == len(FILES)
    await here.close()


async def test_a_broken_transfer_goes_on_where_it_stopped(service: Dialled, tmp_path: Path) -> None:
    here, ref = transfers(service, tmp_path), service.ref(service.store(FILES), 1)
    service.cut = 40 << 10
    async with here.pulled(ref) as folder:
        assert (folder / "adapter_model.safetensors").read_bytes() == FILES["adapter_model.safetensors"]
    ranges = [asked for path, asked in service.requests if path.endswith("adapter_model.safetensors")]
    assert ranges[0] == ""
    assert len(ranges) > 1
    assert all(0 < int(asked.removeprefix("bytes=").rstrip("-")) <= 64 << 10 for asked in ranges[1:])
    await here.close()


async def test_a_corrupt_shard_is_fetched_twice_and_refused(service: Dialled, tmp_path: Path) -> None:
    here, manifest = transfers(service, tmp_path), service.store(FILES)
    path = service.artifacts.path(manifest.hash, "adapter_model.safetensors")
    good = path.read_bytes()
    path.write_bytes(bytes([good[0] ^ 1]) + good[1:])
    with pytest.raises(CorruptArtifact, match=r"adapter_model\.safetensors"):
        async with here.pulled(service.ref(manifest, 1)):
            pass
    assert here.corrupt == 2
    assert [name for name, _ in service.requests].count(f"{manifest.hash}/adapter_model.safetensors") == 2
    assert here.here() == []
    path.write_bytes(good)
    async with here.pulled(service.ref(manifest, 1)) as folder:
        assert (folder / "adapter_model.safetensors").read_bytes() == good
    await here.close()


async def test_damage_on_this_disk_is_mended(service: Dialled, tmp_path: Path) -> None:
    ref = service.ref(service.store(FILES), 1)
    first = transfers(service, tmp_path)
    async with first.pulled(ref) as folder:
        pass
    await first.close()
    (folder / "adapter_model.safetensors").write_bytes(b"x" * (64 << 10))
    (folder / "manifest.json").write_bytes(b"{")
    second = transfers(service, tmp_path)
    async with second.pulled(ref) as folder:
        assert (folder / "adapter_model.safetensors").read_bytes() == FILES["adapter_model.safetensors"]
    assert second.corrupt == 2
    await second.close()


async def test_an_expired_ticket_is_renewed_once(service: Dialled, tmp_path: Path) -> None:
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


async def test_an_upload_has_the_hash_that_the_service_computes(service: Dialled, tmp_path: Path) -> None:
    here, ticket = transfers(service, tmp_path), service.tickets.upload()

    def write(folder: Path) -> None:
        for name, content in FILES.items():
            (folder / name).write_bytes(content)

    manifest = await here.upload(ticket, write)
    assert manifest == service.collect(ticket)
    assert service.artifacts.verify(manifest.hash) == manifest
    async with here.pulled(service.ref(manifest, 1)):  # kept: nothing is pulled
        assert service.requests == []
    async with here.pulled(service.ref(manifest, 1), state=True):
        assert [name for name, _ in service.requests] == [f"{manifest.hash}/trainer_state.safetensors"]
    with pytest.raises(TransferFailed):
        await here.upload(ticket, write)
    await here.close()
    assert all(not path.name.startswith(".") for path in (tmp_path / "adapters").iterdir())


async def test_what_was_not_used_for_longest_goes_first(service: Dialled, tmp_path: Path) -> None:
    manifests = [service.store({"adapter_model.safetensors": os.urandom(10 << 10)}) for _ in range(4)]
    here = transfers(service, tmp_path, cap=25 << 10)
    for age, manifest in enumerate(manifests[:3]):
        async with here.pulled(service.ref(manifest, 1)) as folder:
            pass
        long_ago = folder.stat().st_mtime - 3600 + age
        os.utime(folder, (long_ago, long_ago))
    async with here.pulled(service.ref(manifests[3], 1)):
        assert set(here.here()) == {manifests[2].hash, manifests[3].hash}
    here.forget(manifests[2].hash)
    assert here.here() == [manifests[3].hash]
    await here.close()


@pytest.mark.parametrize("name", ["../escape", ".hidden/x", "/etc/x"])
async def test_a_manifest_cannot_leave_its_folder(service: Dialled, tmp_path: Path, name: str) -> None:
    manifest = wire.manifest_of([wire.Shard(name=name, size=1, sha256="0" * 64)])
    folder = service.artifacts._root / manifest.hash
    folder.mkdir()
    import msgspec

    (folder / "manifest.json").write_bytes(msgspec.json.encode(manifest))
    (folder / name).parent.mkdir(exist_ok=True)
    here = transfers(service, tmp_path)
    service.artifacts.open = lambda digest: manifest  # type: ignore[method-assign]
    with pytest.raises(CorruptArtifact, match="outside"):
        async with here.pulled(service.ref(manifest, 1)):
            pass
    await here.close()
