"""The service of a simulation: the shipped controller on a database in memory, a virtual clock and seeded randomness.

Only what the controller is given from outside differs from :mod:`rookery.server`: clock, ids, random bytes, storage
writer, links. Must be made inside a :class:`~rookery.simulation.clock.VirtualLoop`.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import struct
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from random import Random
from typing import Any, Literal

from rookery.aio import BackgroundTasks
from rookery.clock import RandomIds
from rookery.controller.controller import Controller
from rookery.controller.fleet.env_hosts import SERVICE
from rookery.controller.options import ControllerOptions
from rookery.controller.services import Services
from rookery.protocol.connection import Connection
from rookery.settings import Settings
from rookery.simulation.clock import InlineWriter, VirtualClock
from rookery.simulation.fakes.connection import MemoryConnection, connection_pair
from rookery.simulation.fakes.host import NO_SPEAKERS, FakeHost, fixed_turns, uniform_reward
from rookery.simulation.fakes.text import Length, chat
from rookery.simulation.fakes.worker import FakeWorker, worker_hello
from rookery.spec.machine import Machine, Workload
from rookery.storage.artifacts import Artifacts
from rookery.storage.db import Database
from rookery.storage.repositories.tenants import create_tenant
from rookery.storage.store import Store
from rookery.tokenization.chat import Chat

MODEL = "smollm2-135m-instruct"
"""A name that the catalogue knows; nothing of it is loaded."""


DEFAULTS = ControllerOptions()


Serve = Callable[[Connection], Coroutine[Any, Any, None]]
"""Serves one connection of the controller until it ends."""

MEMORY = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
"""Where a simulation keeps its artifacts, as ``tempfile`` understands it: nothing of it outlives the run, so where the
system has a folder in memory no disk is waited for."""


class SimulatedService:
    def __init__(
        self,
        folder: Path,
        length: Length,
        *,
        context: int,
        seed: int,
        tenants: Sequence[str],
        settings: dict[str, Any] | None = None,
        options: ControllerOptions = DEFAULTS,
    ) -> None:
        """``folder`` is this run's alone; ``length`` is what the model's replies are like, ``context`` its longest
        sequence in tokens. The source of tickets of the ``options`` is replaced by a seeded one."""
        self.length = length
        self.log = EventLog()
        self._serving = BackgroundTasks()
        self.settings = Settings(data=folder, cache=folder / "cache", **(settings or {}))
        self.database = Database("sqlite://")
        self.database.create()
        for tenant in tenants:
            self.database.write(create_tenant, tenant, tenant, 0.0)
        source = Random(seed)
        model = chat(context)

        async def chat_of(name: str) -> Chat:
            return model

        self.controller = Controller(
            Services(
                settings=self.settings,
                clock=VirtualClock(),
                ids=RandomIds(source),
                store=Store(self.database, InlineWriter()),
                artifacts=Artifacts(folder / "artifacts"),
                chat=chat_of,
            ),
            check_environment=lambda id, options: None,
            jobs_folder=folder / "jobs",
            options=replace(options, random_bytes=source.randbytes),
        )

    def worker(
        self,
        name: str,
        machine: Machine,
        *,
        roles: Sequence[Literal["rollout", "train"]] = ("rollout", "train"),
        kind: Literal["reserved", "preemptible"] = "reserved",
        price: float = 0.0,
    ) -> FakeWorker:
        """A worker that is not started yet; its name is its process's too."""
        hello = worker_hello(machine, name, MODEL, roles=list(roles), kind=kind, price=price, loading=True)
        dial = self.dial(name, self.controller.serve_worker)
        return FakeWorker(dial, self.controller.tickets, hello, machine, self.length)

    def host(
        self, seconds: Mapping[str, float], *, prompt_tokens: int, turns: int = 1,
        reward: Callable[[str, int], float] = uniform_reward, speakers: Mapping[str, Sequence[str]] = NO_SPEAKERS,
    ) -> FakeHost:  # fmt: skip
        """An environment host that is not joined yet. ``seconds`` maps each environment's full name to the time of its
        ``reset`` and ``step``; a message has about ``prompt_tokens`` tokens of one byte. In the environments of
        ``speakers`` each of these policies replies once."""
        return FakeHost(
            self.dial("host", partial(self.controller.serve_host, owner=SERVICE)),
            environments=dict.fromkeys(seconds, True),
            observe=fixed_turns(turns, "x" * prompt_tokens, reward, speakers),
            seconds=lambda environment: seconds.get(environment, 0.0),
        )

    def dial(self, name: str, serve: Serve) -> Callable[[], MemoryConnection]:
        """Opens connections to the controller, whose frames are logged under ``name``."""

        def dial() -> MemoryConnection:
            ours, theirs = connection_pair(partial(self.log.add, name))
            self._serving.start(serve(theirs))
            return ours

        return dial

    async def close(self) -> None:
        await self.controller.stop()
        await self._serving.cancel()
        self.database.close()


def modelled_job(
    environment: str, load: Workload, number: int, seed: int, staleness: int, micro_batch: int, stop: Mapping[str, Any]
) -> dict[str, Any]:
    """The specification of job ``number`` of a simulation, on a built-in ``environment`` of a simulated host."""
    return {
        "name": f"job-{number}",
        "base_model": MODEL,
        "environment": {"id": environment, "step_timeout": max(60.0, 2 * load.environment)},
        "algorithm": {
            "group_size": load.group_size,
            "groups_per_step": load.groups_per_step,
            "max_staleness": staleness,
            "micro_batch": micro_batch,
        },
        "sampling": {"max_tokens": load.max_tokens},
        "stop": dict(stop),
        "seed": seed * 1000 + number,
    }


class EventLog:
    """Every frame that crosses the controller's connections, both ways, with its virtual time. Two runs are the same if
    their digests are."""

    def __init__(self) -> None:
        self.frames = 0
        self._hash = hashlib.sha256()

    def add(self, connection: str, direction: str, frame: bytes) -> None:
        """``frame`` crosses ``connection`` now, towards (``>``) or from (``<``) the peer."""
        self.frames += 1
        now = asyncio.get_running_loop().time()
        header = f"{direction}{connection}\0".encode()
        self._hash.update(struct.pack("<d", now) + header + struct.pack("<I", len(frame)))
        self._hash.update(frame)

    def digest(self) -> str:
        """SHA-256 over every frame so far, in hex."""
        return self._hash.hexdigest()
