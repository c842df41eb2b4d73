"""What a worker could not pull, and whose fault that is.

* Where the service's own copy of the artifact is intact, the fault lies between it and the worker: the worker is
  suspect, and what it owes goes on with others.
* Where it is not, no worker can have it and none is suspect: the worker is excused from holding it, and what names the
  artifact fails by itself, with that reason.
* However many workers complain of one artifact at a time, its bytes are hashed once.
"""

from __future__ import annotations

import asyncio
import logging

from rookery import protocol
from rookery.controller.fleet.fleet import Fleet, Worker
from rookery.errors import CorruptArtifact, NotFound
from rookery.storage.artifacts import Artifacts
from rookery.storage.writer import Writer

log = logging.getLogger("rookery.controller.fleet.fleet")


class PullFailures:
    def __init__(self, fleet: Fleet, artifacts: Artifacts, writer: Writer) -> None:
        self._fleet = fleet
        self._artifacts = artifacts
        self._writer = writer
        self._complaints: dict[str, list[tuple[Worker, str]]] = {}
        """By artifact, while it is looked at: who could not have it, and why."""
        self._tasks: set[asyncio.Task[None]] = set()
        fleet.handle(protocol.PullFailed, self.on_pull_failed)

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def on_pull_failed(self, worker: Worker, message: protocol.PullFailed) -> None:
        if message.hash not in worker.named:
            return  # nothing that it was given to do: perhaps what an earlier connection asked for
        self._fleet.failed_pulls += 1
        under_way = self._complaints.setdefault(message.hash, [])
        under_way.append((worker, message.error))
        if len(under_way) == 1:
            task = asyncio.create_task(self._judge(message.hash))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _judge(self, digest: str) -> None:
        try:
            await self._writer(self._artifacts.verify, digest)
            fault = ""
        except (CorruptArtifact, NotFound, OSError) as error:
            fault = str(error)
        finally:
            complaints = self._complaints.pop(digest)
        for worker, why in complaints:
            if fault:
                log.error("worker %s cannot have an artifact: %s", worker.name, fault, extra={"worker": worker.name})
                self._fleet.clear_missing(worker, digest)
            else:
                self._fleet.suspect(worker, f"it cannot pull artifact {digest[:12]}, which is here: {why}")
