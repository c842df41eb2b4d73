"""Differences between two versions' files."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterator
from pathlib import Path
from random import Random

import msgspec
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.support.dialled import Dialled
from tests.support.peers import MODEL
from tests.support.weights import VirtualStore
from tests.worker.transfer.test_client import Peer

from rookery import protocol
from rookery.worker.transfer import peers
from rookery.worker.transfer.delta import BLOCK_WORDS, BadDelta, apply_delta, write_delta
from rookery.worker.transfer.peers import ServingRules


def changed(base: bytes, share: float, seed: int, width: int = 2) -> bytes:
    """``base`` with other bits in this share of its words."""
    random = np.random.default_rng(seed)
    words = np.frombuffer(base, f"<u{width}").copy()
    at = random.random(len(words)) < share
    words[at] ^= random.integers(1, 1 << 8 * width, int(at.sum()), dtype=words.dtype)
    return words.tobytes()


def rebuilt(folder: Path, base: bytes, new: bytes, block: int = BLOCK_WORDS) -> tuple[bytes, int] | None:
    """The file that a receiver makes, and the bytes that it read; None without a difference."""
    for name, content in (("base", base), ("new", new)):
        (folder / name).write_bytes(content)
    if not write_delta(folder / "base", folder / "new", folder / "delta", block):
        assert not (folder / "delta").exists()
        return None
    apply_delta(folder / "base", folder / "delta", folder / "made", block)
    return (folder / "made").read_bytes(), (folder / "delta").stat().st_size


@given(
    size=st.integers(1, 3000),
    share=st.floats(0, 0.4),
    seed=st.integers(0, 1 << 30),
    width=st.sampled_from([2, 4]),
    block=st.integers(4, 4000).map(lambda words: words // 2 * 2),
)
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_result_is_the_new_file_bit_for_bit(
    tmp_path: Path, size: int, share: float, seed: int, width: int, block: int
) -> None:
    base = np.random.default_rng(seed).bytes(4 * size)
    new = changed(base, share, seed, width)
    if (found := rebuilt(tmp_path, base, new, block)) is not None:
        assert found[0] == new
        assert found[1] < len(new) / 2


@pytest.mark.parametrize(
    ("share", "width", "most"),
    [(0.0, 2, 0.001), (0.001, 2, 0.006), (0.02, 2, 0.04), (0.2, 2, 0.28), (0.02, 4, 0.03), (0.4, 2, 0.49)],
)
def test_size_follows_the_share_of_changed_words(tmp_path: Path, share: float, width: int, most: float) -> None:
    base = np.random.default_rng(1).bytes(1 << 20)
    found = rebuilt(tmp_path, base, changed(base, share, 2, width))
    assert found is not None
    assert found[1] / len(base) < most


def test_difference_above_half_of_the_size_or_of_unlike_files_is_none(tmp_path: Path) -> None:
    base = np.random.default_rng(1).bytes(1 << 16)
    assert rebuilt(tmp_path, base, changed(base, 0.6, 2)) is None
    assert rebuilt(tmp_path, base, base + bytes(4)) is None
    assert rebuilt(tmp_path, base[:-1], changed(base, 0.01, 2)[:-1]) is None, "no whole words"
    assert rebuilt(tmp_path, b"", b"") is None


def test_long_gaps_between_changed_words(tmp_path: Path) -> None:
    base = bytes(1 << 20)
    for at in (0, 254, 255, 256, 509, 510, (1 << 19) - 1):
        new = bytearray(base)
        new[2 * at] = 1
        new[2 * at ^ 4096] ^= 2
        found = rebuilt(tmp_path, base, bytes(new))
        assert found is not None and found[0] == bytes(new)


@pytest.mark.parametrize("seed", range(6))
def test_damaged_difference_is_refused_or_gives_another_file(tmp_path: Path, seed: int) -> None:
    """It never writes outside the file, and never ends the process: the hash decides about the rest."""
    random = np.random.default_rng(seed)
    base = random.bytes(1 << 12)
    assert rebuilt(tmp_path, base, changed(base, 0.05, seed)) is not None
    good = (tmp_path / "delta").read_bytes()
    for _ in range(100):
        bad = bytearray(good)
        bad[int(random.integers(len(bad)))] ^= int(random.integers(1, 256))
        bad = bad[: int(random.integers(len(bad) + 1))] if random.random() < 0.3 else bad
        (tmp_path / "delta").write_bytes(bytes(bad) + (b"x" if random.random() < 0.1 else b""))
        try:
            apply_delta(tmp_path / "base", tmp_path / "delta", tmp_path / "made")
        except BadDelta as error:
            assert "\n" not in str(error)
        assert not (tmp_path / "made").exists() or (tmp_path / "made").stat().st_size == len(base)


def test_a_difference_to_an_empty_file_is_refused(tmp_path: Path) -> None:
    """No worker writes one, but a source may send any bytes."""
    for name, content in (("base", b""), ("delta", struct.pack("<4sBQ", b"RKD1", 2, 0))):
        (tmp_path / name).write_bytes(content)
    with pytest.raises(BadDelta, match="it is none for a file of 0 bytes"):
        apply_delta(tmp_path / "base", tmp_path / "delta", tmp_path / "made")


# --- over sockets -----------------------------------------------------------------------------------------------------

CONFIG = b'{"model_type": "tiny"}'


@pytest.fixture
def service(tmp_path: Path) -> Iterator[Dialled]:
    with Dialled(tmp_path / "artifacts") as service:
        yield service


def full(service: Dialled, weights: bytes, version: int, *sources: str, base: str = "") -> protocol.AdapterRef:
    ref = service.ref(service.store({"config.json": CONFIG, "model.safetensors": weights}), version)
    return msgspec.structs.replace(ref, rank=0, sources=list(sources), base=base)


def publish(peer: Peer, weights: bytes, version: int) -> protocol.AdapterRef:
    """A version in the cache of the worker that made it."""
    files = {"config.json": CONFIG, "model.safetensors": weights}
    manifest = protocol.manifest_of(
        protocol.Shard(name=name, size=len(content), sha256=hashlib.sha256(content).hexdigest())
        for name, content in files.items()
    )
    folder = peer.root / "adapters" / manifest.hash
    folder.mkdir()
    for name, content in {**files, "manifest.json": msgspec.json.encode(manifest), ".adapter": b""}.items():
        (folder / name).write_bytes(content)
    return protocol.AdapterRef(policy="p", version=version, hash=manifest.hash, rank=0, alpha=0.0, sources=[peer.url])


async def test_receivers_have_the_trainers_bytes_after_each_step(service: Dialled, tmp_path: Path) -> None:
    """The store names bases, real peers read: one in ten orders is lost with its connection, and the worker is away
    for a step or none; one worker joins late, and one begins again with an empty cache. A receiver reads the difference
    where it has the version before, and else the whole file."""
    rules = ServingRules(expect_seconds=0.02)  # a worker that is away was to be the source of another one
    random, virtual = Random(5), VirtualStore()
    trainer = Peer(service, tmp_path / "trainer", rules=rules)
    workers = {"trainer": virtual.join("trainer", roles=["train"], address=trainer.url)}
    receivers = dict[str, Peer]()
    weights, newest, wholes, differences, lost = np.random.default_rng(0).bytes(1 << 13), None, 0, 0, 0

    def join(name: str, folder: str) -> None:
        """A new connection; the store orders the version in use at once."""
        if name not in receivers:
            receivers[name] = Peer(service, tmp_path / folder, rules=rules)
        workers[name] = virtual.join(
            name, receivers[name].transfers.cached(), [newest] if newest else [], address=receivers[name].url
        )

    async def deliver(name: str, digest: str) -> None:
        """The order for ``digest`` crosses the wire, and the worker carries it out and reports it."""
        nonlocal wholes, differences
        peer, before = receivers[name], receivers[name].transfers.rebuilt
        orders = [
            protocol.decode(protocol.to_worker, protocol.encode(message)) for message in virtual.messages(workers[name])
        ]
        [ref] = [ref for order in orders if isinstance(order, protocol.Replicate) for ref in order.refs]
        assert ref.hash == digest
        has = previous is not None and previous.hash in workers[name].cached
        assert ref.base == (previous.hash if has else ""), "the version before, where it is"
        await peer.pull(ref)
        found = peer.root / "adapters" / ref.hash
        assert (found / "model.safetensors").read_bytes() == weights
        assert (found / "config.json").read_bytes() == CONFIG
        assert peer.transfers.rebuilt - before == has
        differences, wholes = differences + has, wholes + (not has)
        virtual.store.on_cached(workers[name], protocol.AdaptersCached(epoch=1, hashes=[digest]))

    join("steady", "steady")
    previous = newest
    for step in range(80):
        if step == 70:
            virtual.lose(workers["late"])
            await receivers.pop("late").close()
        if step in (50, 70):  # each with an empty cache
            join("late", f"late {step}")
            virtual.messages(workers["late"])
        weights, previous = changed(weights, 0.02, step), newest
        newest = msgspec.structs.replace(publish(trainer, weights, step), sources=[])
        virtual.store.on_cached(workers["trainer"], protocol.AdaptersCached(epoch=1, hashes=[newest.hash]))
        virtual.store.publish(MODEL, newest)
        gone = {name for name in receivers if random.random() < 0.1 and step < 79}
        for name in sorted(gone):
            lost += 1
            virtual.messages(workers[name])
            virtual.lose(workers[name])
            if random.random() < 0.5:
                join(name, name)
        for name in list(receivers):
            if workers[name].state != "serving" and name not in gone:
                join(name, name)  # after a step without it
            if workers[name].state == "serving":
                await deliver(name, newest.hash)
    assert lost > 5 and differences > 80
    assert 3 < wholes < 3 + lost, "first versions, and those after a step without the connection"
    assert service.requests == [] and all(peer.transfers.corrupt == 0 for peer in receivers.values())
    for peer in (trainer, *receivers.values()):
        await peer.close()


async def test_difference_is_read_only_where_it_pays_and_both_ends_have_the_base(
    service: Dialled, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, here = Peer(service, tmp_path / "source"), Peer(service, tmp_path / "here")
    first = np.random.default_rng(0).bytes(1 << 16)
    base = full(service, first, 0)
    await source.pull(base)
    await here.pull(base)
    near, far = changed(first, 0.01, 1), changed(first, 0.9, 2)
    cases = [(near, base.hash, 1), (far, base.hash, 0), (near[::-1], "", 0), (near[:-4], "f" * 64, 0)]
    for number, (weights, of, files) in enumerate(cases, 1):
        ref = full(service, weights, number, source.url, base=of)
        await source.pull(msgspec.structs.replace(ref, sources=[], base=""))
        before, sent = here.transfers.rebuilt, source.server.bytes_sent
        await here.pull(ref)
        assert (here.root / "adapters" / ref.hash / "model.safetensors").read_bytes() == weights
        assert here.transfers.rebuilt - before == files, number
        assert (source.server.bytes_sent - sent < len(weights) / 10) == (files == 1)
    assert here.transfers.corrupt == 0

    def wrong(base: Path, new: Path, delta: Path) -> bool:
        return write_delta(base, new.parents[1] / other.hash / new.name, delta)

    other = full(service, changed(first, 0.01, 7), 8)
    await source.pull(other)
    monkeypatch.setattr(peers, "write_delta", wrong)
    ref = full(service, changed(first, 0.01, 9), 9, source.url, base=base.hash)
    await source.pull(msgspec.structs.replace(ref, sources=[], base=""))
    await here.pull(ref)
    assert (here.root / "adapters" / ref.hash / "model.safetensors").read_bytes() == changed(first, 0.01, 9)
    assert here.transfers.corrupt == 1, "a difference that makes other bytes costs one read of the file"
    await source.close()
    await here.close()
