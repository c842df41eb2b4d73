"""Versions of a whole model, from one process to others over sockets: two hundred steps in which orders are lost, and
receivers and the trainer are killed."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from pathlib import Path
from random import Random
from typing import Any

import httpx
import numpy as np
import pytest
from tests.support.ports import free_port
from tests.support.relays import Relay
from tests.support.waiting import until
from tests.worker.transfer.test_delta import CONFIG, changed

from rookery.storage.artifacts import Artifacts

ROOT = Path(__file__).parents[3]
STEPS, SIZE = 200, 1 << 16
KEPT = 3
"""Versions."""
WEIGHTS = "model.safetensors"


class Processes:
    """A service and workers, each a process; the connection of a worker goes over a relay."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.artifacts = Artifacts(folder / "artifacts")
        self.port = free_port()
        self.running: dict[str, subprocess.Popen[bytes]] = {}
        self.relays: dict[str, Relay] = {}
        self.http = httpx.Client(base_url=f"http://127.0.0.1:{self.port}", timeout=30.0, trust_env=False)

    def start(self, name: str, *words: str) -> None:
        self.running[name] = subprocess.Popen([sys.executable, "-m", *words], cwd=ROOT)

    async def serve(self) -> None:
        words = ["--artifacts", str(self.artifacts.root), "--host", "127.0.0.1", "--port", str(self.port)]
        self.start("service", "benchmarks.lib.weights_service", *words)

    async def join(self, name: str) -> None:
        """Start a worker, with what an earlier process of this name left."""
        (self.folder / name).mkdir(mode=0o700, exist_ok=True)
        relay = self.relays[name] = Relay("127.0.0.1", self.port)
        self.start(
            name, "benchmarks.lib.weights_node", "--connect", await relay.start(), "--name", name, "--site", "",
            "--address", "127.0.0.1", "--port", str(free_port()), "--cache", str(self.folder / name),
            "--peer-seconds", "5",
        )  # fmt: skip

    async def kill(self, name: str) -> None:
        self.running[name].kill()
        await asyncio.to_thread(self.running.pop(name).wait)
        await self.relays.pop(name).close()

    def store(self, weights: bytes) -> str:
        """A version that the service and the trainer have."""
        staging = self.artifacts.begin()
        for file, content in (("config.json", CONFIG), (WEIGHTS, weights)):
            staging.write(file, [content])
        digest = staging.commit().hash
        made = self.folder / "trainer" / digest
        made.mkdir()
        for path in (self.artifacts.root / digest).iterdir():
            os.link(path, made / path.name)
        (made / ".adapter").touch()
        return digest

    async def replicate(self, digest: str, version: int, *receivers: str) -> None:
        given = {"policy": "p", "version": version, "receivers": ",".join(receivers)}
        await asyncio.to_thread(self.http.post, f"/replicate/{digest}", params=given)

    async def publish(self, digest: str, version: int) -> None:
        await self.replicate(digest, version, "trainer")
        await self.until(lambda state: "trainer" in state["arrived"], digest)
        await self.replicate(digest, version, *self.receivers)

    @property
    def receivers(self) -> list[str]:
        return [name for name in self.relays if name != "trainer"]

    async def arrives(self, digest: str, weights: bytes) -> None:
        """All receivers have the trainer's bytes."""
        for name in self.receivers:
            here = self.folder / name / digest
            await asyncio.to_thread(until, (here / ".adapter").exists, f"{name} waits for {digest}", pause=0.01)
            assert (here / WEIGHTS).read_bytes() == weights, name

    async def until(self, holds: Callable[[dict[str, Any]], bool], digest: str = "none") -> dict[str, Any]:
        """The state of the service, about one artifact, as soon as it is so."""

        def look() -> dict[str, Any] | None:
            with suppress(httpx.HTTPError):  # the service is not there yet
                state: dict[str, Any] = self.http.get(f"/state/{digest}").json()
                return state if holds(state) else None
            return None

        return await asyncio.to_thread(until, look, pause=0.01)

    async def settle(self, *names: str) -> None:
        await self.until(lambda state: {*names} <= {*state["working"]})

    async def close(self) -> None:
        for process in self.running.values():
            process.kill()
        for process in self.running.values():
            await asyncio.to_thread(process.wait)
        for relay in self.relays.values():
            await relay.close()
        self.http.close()


@pytest.fixture
async def here(tmp_path: Path) -> AsyncIterator[Processes]:
    processes = Processes(tmp_path)
    try:
        await processes.serve()
        for name in ("trainer", "steady", "killed", "absent"):
            await processes.join(name)
        await processes.settle("trainer", "steady", "killed", "absent")
        yield processes
    finally:
        await processes.close()


@pytest.mark.heavy
@pytest.mark.timeout(600)
async def test_receivers_have_the_trainers_bytes_after_200_steps(here: Processes) -> None:
    """One order in twenty is lost with its connection. One worker joins late; one is killed while it receives, and
    begins again with its cache, and without; one misses two versions, and later finds the version before damaged; the
    trainer is killed while others read from it."""
    random, weights, digests = Random(3), np.random.default_rng(0).bytes(SIZE), list[str]()
    for step in range(STEPS):
        if step == 100:
            await here.join("late")
            await here.settle("late")
        if step == 62:
            await here.join("absent")
        if step == 140:
            damaged = here.folder / "absent" / digests[-1] / WEIGHTS
            damaged.unlink()
            damaged.write_bytes(bytes(SIZE))
        weights = changed(weights, 0.02, step)
        digests.append(here.store(weights))
        await here.publish(digests[-1], step)
        for name in here.receivers:
            if random.random() < 0.05:
                here.relays[name].cut()
        if step in (40, 80, 120):
            await here.kill("killed")
            if step == 80:
                shutil.rmtree(here.folder / "killed")
            await here.join("killed")
        if step == 60:
            await here.kill("absent")
        if step == 180:
            await here.kill("trainer")
            await here.join("trainer")
        await here.arrives(digests[-1], weights)
        if step == 180:
            await here.settle("trainer")
        if step >= KEPT:
            await asyncio.to_thread(here.http.post, f"/evict/{digests[step - KEPT]}")
    state = await here.until(lambda state: state["pulled"]["steady"]["rebuilt"] > 0.7 * STEPS)
    steady = state["pulled"]["steady"]
    pulled = steady["pulled_from_peers_bytes"] + steady["pulled_from_service_bytes"]
    assert pulled < 0.5 * STEPS * SIZE, "most versions as differences"
    assert steady["corrupt"] == 0 and state["pulled"]["absent"]["corrupt"] > 0
