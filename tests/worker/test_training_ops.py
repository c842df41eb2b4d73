"""Training operations of a worker between the connection and the compute thread."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from tests.support.peers import settle

from rookery import protocol
from rookery.worker.trainer.operation_queue import TrainerResult
from rookery.worker.training_ops import TrainingOps

PARENT = protocol.AdapterRef(policy="p", version=1, hash="v1", rank=8, alpha=8.0)


def step(name: str) -> protocol.OptimStep:
    return protocol.OptimStep(
        op=name, policy="p", tenant="ann", lease=1, parent=PARENT, steps=0, operations=0, adam=protocol.Adam(lr=1e-4)
    )


class Machine:
    """Compute thread, queue and trainer of a worker that holds the policy; its calls wait while it is ``stuck``."""

    def __init__(self) -> None:
        self.queued: list[str] = []
        self.queue = self
        self.free = asyncio.Event()
        self.free.set()

    async def call(self, function: Callable[[Any], Any], *, touches: str = "states") -> Any:
        await self.free.wait()
        return function(self)

    def post(self, name: str, function: Callable[[Any], Any], *, touches: str = "states", **concerns: object) -> None:
        function(self)

    def trainer_of(self, rank: int) -> Machine:
        return self

    def holds(self, *state: object) -> bool:
        return True

    def optim_step(self, op: protocol.OptimStep) -> None:
        self.queued.append(op.op)

    def cancel(self, op: str) -> None:
        if op in self.queued:
            self.queued.remove(op)


def done(op: str) -> TrainerResult:
    return TrainerResult(protocol.OperationDone(op=op))


@pytest.mark.parametrize("stage", ["preparing", "queued", "computed"])
async def test_a_cancelled_operation_leaves_the_trainer_and_is_not_answered(stage: str) -> None:
    machine, sending = Machine(), asyncio.Event()
    answers: list[str] = []

    async def answer(done: protocol.OperationDone) -> None:
        await sending.wait()
        answers.append(done.op)

    operations = TrainingOps(machine, None, answer, answer)  # type: ignore[arg-type]
    if stage == "preparing":
        machine.free.clear()
    operations.start(step("cancelled"))
    await settle()
    assert machine.queued == ([] if stage == "preparing" else ["cancelled"])
    if stage == "computed":
        machine.queued.clear()
        operations.collect([done("cancelled")])
        await settle()
    operations.cancel("cancelled")
    machine.free.set()
    sending.set()
    operations.start(step("kept"))
    await settle()
    assert machine.queued == ["kept"]
    operations.collect([done("cancelled"), done("kept")])
    await settle()
    assert answers == ["kept"]
