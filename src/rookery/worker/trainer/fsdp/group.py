"""The processes of a training group on one machine: the worker's compute thread is the first, it launches the others.

Promises:

* The others run what the first one runs, in its order, and end with it, however it ends.
* An error that leaves them in step (:data:`~rookery.worker.failures.SURVIVED`) is raised, and the group can be used.
* When one of them ends, the next call raises :class:`GroupLost`: the group is not repaired, the worker starts again.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from rookery import protocol
from rookery.folders import temporary_folder
from rookery.worker.failures import SURVIVED, WorkerBroken
from rookery.worker.trainer.fsdp.shard import PolicyShard
from rookery.worker.transfer.http import one_line

TIMEOUT = timedelta(minutes=10)
"""A collective that takes longer fails: the slowest honest one waits for another process's longest pass."""


ENDS_SECONDS = 5.0
"""After a failed call, a process that ends within this time is the cause."""


class GroupLost(WorkerBroken):
    """A process of the group has ended, or waits for a collective that another one left."""


@dataclass(frozen=True)
class Failed:
    """The result of a call that raised one of :data:`~rookery.worker.failures.SURVIVED`."""

    error: str


@dataclass(frozen=True)
class GroupOptions:
    """``model`` is the prepared folder; ``dtype`` that of computation; ``device`` ``cpu`` or ``cuda`` (one GPU per
    process); ``recompute`` as in :func:`rookery.worker.trainer.fsdp.module.build`."""

    processes: int
    model: Path
    dtype: torch.dtype
    device: str = "cpu"
    recompute: bool = False


class TrainingGroup:
    """Belongs to one thread; a process has at most one group at a time."""

    def __init__(self, options: GroupOptions) -> None:
        self.options = options
        self._rendezvous = temporary_folder()
        spawn = multiprocessing.get_context("spawn")
        self._others: list[Connection] = []
        self._processes = []
        threads = max(1, torch.get_num_threads() // options.processes)
        for rank in range(1, options.processes):
            ours, theirs = spawn.Pipe()
            process = spawn.Process(
                target=_follow, args=(theirs, rank, options, self._rendezvous.name, threads), daemon=True
            )
            process.start()
            theirs.close()
            self._others.append(ours)
            self._processes.append(process)
        self._shard = _join(0, options, self._rendezvous.name)

    def call(self, method: str, *args: Any, each: Sequence[Any] | None = None) -> list[Any]:
        """Run a method of :class:`PolicyShard` in every process; the results, the first process's first. ``each`` has a
        last argument for each process."""
        try:
            for rank, other in enumerate(self._others, 1):
                other.send((method, args if each is None else (*args, each[rank])))
            own, failure = None, None
            try:
                own = getattr(self._shard, method)(*(args if each is None else (*args, each[0])))
            except SURVIVED as error:
                failure = error
            results = [own]
            for rank, other in enumerate(self._others, 1):
                if failure is not None and not other.poll(ENDS_SECONDS):
                    raise GroupLost(f"process {rank} of the training group waits for the first one") from failure
                results.append(other.recv())
        except (RuntimeError, OSError, EOFError) as error:
            sentinels = {process.sentinel: rank for rank, process in enumerate(self._processes, 1)}
            ended = wait(sentinels, ENDS_SECONDS) if sentinels else []
            if not ended:
                raise
            rank = min(rank for sentinel, rank in sentinels.items() if sentinel in ended)
            raise GroupLost(f"process {rank} of the training group has ended") from error
        if failure is not None:
            raise failure
        for rank, result in enumerate(results):
            if isinstance(result, Failed):
                raise OSError(f"process {rank} of the training group: {result.error}")
        return results

    def zero_grad(self) -> None:
        self.call("zero_grad")

    def adamw(self, adam: protocol.Adam, scale: float) -> dict[str, float]:
        metrics: dict[str, float] = self.call("optim_step", adam, scale)[0]
        return metrics

    @property
    def pids(self) -> list[int]:
        """The ids of the other processes."""
        return [process.pid or 0 for process in self._processes]

    def close(self) -> None:
        """End the other processes."""
        for other in self._others:
            other.close()
        dist.destroy_process_group()
        for process in self._processes:
            process.join()
        self._rendezvous.cleanup()


def _join(rank: int, options: GroupOptions, rendezvous: str) -> PolicyShard:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # a group does not leave its machine
    if options.device == "cuda":
        torch.cuda.set_device(rank)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if options.device == "cuda" else "gloo",
        init_method=f"file://{rendezvous}/store",
        rank=rank,
        world_size=options.processes,
        timeout=TIMEOUT,
    )
    mesh = init_device_mesh(options.device, (options.processes,))
    return PolicyShard(options.model, mesh, options.dtype, recompute=options.recompute)


def _follow(commands: Connection, rank: int, options: GroupOptions, rendezvous: str, threads: int) -> None:
    """The main function of the other processes."""
    torch.set_num_threads(threads)
    shard = _join(rank, options, rendezvous)
    while True:
        try:
            method, args = commands.recv()
        except EOFError:
            break
        try:
            result = getattr(shard, method)(*args)
        except SURVIVED as error:
            result = Failed(one_line(error))
        commands.send(result)
    dist.destroy_process_group()
