"""Deletions of artifacts: in a place that is slow, or does not answer, of artifacts that come to be named again, and of
those that a cancelled caller's row write names."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.support.peers import ManualClock, eventually, settle

from rookery import protocol
from rookery.controller.training.dispatcher import TrainingDispatcher
from rookery.controller.weights.gc import RUN_SECONDS, ArtifactCollector
from rookery.errors import UnreadableArtifact
from rookery.storage.artifacts import Artifacts, Staging
from rookery.storage.db import Database
from rookery.storage.repositories import tenants
from rookery.storage.store import StorageWriter, Store
from rookery.turns import work_of


class Place(Artifacts):
    """A place behind a network."""

    remote = True

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.reached, self.answers = threading.Event(), threading.Event()
        self.answers.set()
        self.away: set[str] = set()

    def delete(self, hash: str) -> None:
        self.reached.set()
        assert self.answers.wait(20)
        if hash in self.away:
            raise UnreadableArtifact("it is denied")
        super().delete(hash)


class References:
    def __init__(self) -> None:
        self.unpublished: list[str] = []

    def unpublish(self, hashes: list[str]) -> None:
        self.unpublished += hashes


class Scene:
    def __init__(self, root: Path) -> None:
        self.database, self.place, self.references = (
            Database("sqlite:///" + str(root / "db")),
            Place(root),
            References(),
        )
        self.database.create()
        self.database.write(tenants.create_tenant, "alice", "Alice", 0.0)
        self.writers = [StorageWriter() for _ in range(3)]
        self.store = Store(self.database, *self.writers)
        references: Any = self.references
        self.collector = ArtifactCollector(self.store, self.place, references)

    def upload(self, content: bytes) -> str:
        """A dataset of alice."""
        with self.place.begin() as staging:
            staging.write("x", [content])
            digest = staging.commit().hash
        self.database.write(tenants.add_upload, "alice", "dataset", digest, 1, 0.0)
        return digest

    def staged(self, content: bytes) -> Staging:
        staging = self.place.begin()
        staging.write("x", [content])
        return staging

    async def name(self, digest: str) -> None:
        """A row of alice comes to name the artifact."""
        await self.store.write(tenants.add_upload, "alice", "dataset", digest, 1, 0.0)

    async def commit_version(self) -> None:
        """As a commit of trained weights does."""
        references: Any = SimpleNamespace(withdraw=lambda digest: None)
        rest: Any = SimpleNamespace(settings=None, clock=None, ids=None, store=self.store)
        training = TrainingDispatcher(rest, rest, references, self.collector, rest, rest)
        manifest = await self.store.transfer(self.collector.commit, self.staged(b"1"))
        async with training.with_ticket("policy", manifest.hash):
            await self.name(manifest.hash)

    async def keep_upload(self) -> None:
        """As an upload of a dataset or an adapter does."""
        async with self.collector.storing(self.staged(b"1")) as manifest:
            await self.name(manifest.hash)

    async def copy_referenced(self) -> None:
        """As a policy that begins from stored weights does."""
        digest = self.staged(b"1").commit().hash
        ref = protocol.AdapterRef(policy="policy", version=0, hash=digest, rank=8, alpha=16.0)
        async with self.collector.referenced(ref):
            await self.name(digest)

    def named(self) -> set[str]:
        return {row.hash for row in self.database.read(tenants.uploads, "alice")}


@pytest.fixture
async def scene(tmp_path: Path) -> AsyncIterator[Scene]:
    scene = Scene(tmp_path)
    yield scene
    scene.place.answers.set()
    for writer in scene.writers:
        writer.close()
    scene.database.close()


async def test_deletion_in_a_slow_place_delays_no_transaction(scene: Scene) -> None:
    digest = scene.upload(b"1")
    scene.place.answers.clear()
    deleting = asyncio.create_task(scene.collector.delete_unnamed(tenants.delete_upload, "alice", digest))
    assert await asyncio.to_thread(scene.place.reached.wait, 20)
    async with asyncio.timeout(20):
        await scene.store.write(tenants.add_event, "alice", None, 0.0, "text", "another write")
    assert not deleting.done() and not scene.named()
    scene.place.answers.set()
    await deleting
    assert not scene.place.hashes() and scene.references.unpublished == [digest] and not scene.collector.left


async def test_deletion_that_the_place_does_not_take_is_tried_again(scene: Scene) -> None:
    one, other, third = (scene.upload(content) for content in (b"1", b"2", b"3"))
    scene.place.away = {one, third}

    def delete_all(connection: Any) -> list[str]:
        return [digest for row in (one, other, third) if (digest := tenants.delete_upload(connection, "alice", row))]

    with pytest.raises(UnreadableArtifact):
        await scene.collector.delete_unnamed(delete_all)
    assert not scene.named() and scene.place.hashes() == {one, third}
    await scene.collector.delete_left()
    assert scene.place.hashes() == scene.collector.left == {one, third}
    scene.database.write(tenants.add_upload, "alice", "dataset", third, 1, 0.0)
    scene.place.away.clear()
    await scene.collector.delete_left()
    assert scene.place.hashes() == {third} and not scene.collector.left
    assert sorted(scene.references.unpublished) == sorted([one, other])


async def test_cancelled_deletion_is_tried_again(scene: Scene) -> None:
    digest = scene.upload(b"1")
    scene.place.answers.clear()
    deleting = asyncio.create_task(scene.collector.delete_unnamed(tenants.delete_upload, "alice", digest))
    assert await asyncio.to_thread(scene.place.reached.wait, 20)
    deleting.cancel()
    await asyncio.wait([deleting])
    scene.place.answers.set()
    await scene.collector.delete_left()
    assert not scene.place.hashes() and not scene.collector.left


@pytest.mark.parametrize("cancellations", [1, 2])
@pytest.mark.parametrize("caller", [Scene.commit_version, Scene.keep_upload, Scene.copy_referenced])
async def test_cancelled_row_write_never_loses_its_artifact(scene: Scene, caller: Any, cancellations: int) -> None:
    """The write waits behind another call of its tenant while its caller is cancelled, and others try a deletion."""
    began, over = threading.Event(), threading.Event()

    def block() -> None:
        began.set()
        assert over.wait(20)

    with work_of("alice"):
        blocked = asyncio.create_task(scene.store.run(block))
        assert await asyncio.to_thread(began.wait, 20)
        task = asyncio.create_task(caller(scene))
    await eventually(lambda: bool(scene.collector.references))
    for _ in range(2):  # its row write is in the line after the stored bytes were reported
        await scene.store.transfer(list)
    for _ in range(cancellations):
        task.cancel()
        await scene.store.transfer(list)
        await scene.store.transfer(list)
    [digest] = scene.place.hashes()
    scene.collector.left.add(digest)
    await scene.collector.delete_left()
    over.set()
    await blocked
    await asyncio.wait([task])
    with work_of("alice"):
        await scene.store.run(list)
    await eventually(lambda: not scene.collector.references)
    assert task.cancelled() and scene.named() == scene.place.hashes() == {digest}


async def test_cancelled_upload_leaves_no_reference(scene: Scene) -> None:
    """It is cancelled while its bytes are stored."""
    began, over = threading.Event(), threading.Event()

    def block() -> None:
        began.set()
        assert over.wait(20)

    blocked = asyncio.create_task(scene.store.transfer(block))
    assert await asyncio.to_thread(began.wait, 20)
    task = asyncio.create_task(scene.keep_upload())
    await settle(2)
    task.cancel()
    await settle(1)
    over.set()
    await asyncio.wait([blocked, task])
    assert task.cancelled() and not scene.collector.references and not scene.named()


async def test_orphans_are_deleted_once_services_ran_for_long_and_not_by_the_wall_clock(scene: Scene) -> None:
    """Two services run one after the other; before each the wall clock is set ahead by a year."""
    digest, clock, keep = scene.staged(b"1").commit().hash, ManualClock(), 3 * RUN_SECONDS
    stored = scene.place.root / ".orphans" / "ran"
    for times in ((1, 2), (3, 4)):
        clock.ahead += 365 * 86400.0
        await scene.collector.collect_all(keep)
        assert scene.place.hashes() == {digest}
        counting = asyncio.create_task(scene.collector.count_time(clock))
        for number in times:
            await settle()
            await clock.advance(RUN_SECONDS, steps=1)
            text = str(number * RUN_SECONDS)
            await eventually(lambda text=text: stored.exists() and stored.read_text() == text)
            await scene.store.transfer(lambda: None)
        counting.cancel()
        await asyncio.gather(counting, return_exceptions=True)
    await scene.collector.collect_all(keep)
    assert not scene.place.hashes()
