"""Deletions of artifacts: in a place that is slow, or does not answer, and of artifacts that come to be named again."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from rookery.controller.weights.gc import ArtifactCollector
from rookery.errors import UnreadableArtifact
from rookery.storage.artifacts import Artifacts
from rookery.storage.db import Database
from rookery.storage.repositories import tenants
from rookery.storage.store import StorageWriter, Store


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
