"""Requests of a worker before its engine has them: their adapters, and the answers to those that it cannot run."""

from __future__ import annotations

import errno
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.support.peers import eventually, settle

from rookery import protocol
from rookery.worker import generation
from rookery.worker.compute import IDLE, ComputeStatus
from rookery.worker.generation import TEXT_PARAMETERS, GenerationManager, HeldRequest
from rookery.worker.memory import NoRoom, NotOnThisWorker
from rookery.worker.transfer.http import CorruptDownload, ReadRefused, Unreachable


class Machine:
    """Compute thread, engine and transfers of a worker with room for two adapters."""

    def __init__(self) -> None:
        self.users: dict[str, list[str]] = {}
        """Requests by the adapter in memory that they use."""
        self.begun: list[str] = []
        self.switched: list[str] = []
        self.problem: Exception | None = None
        """Of the next pull."""

    @property
    def status(self) -> ComputeStatus:
        return ComputeStatus(IDLE, frozenset(self.users))

    def call(self, function: Callable[[Any], Any], touches: str = "") -> Future[Any]:
        answer: Future[Any] = Future()
        try:
            answer.set_result(function(self))
        except Exception as error:
            answer.set_exception(error)
        return answer

    @asynccontextmanager
    async def pulled(self, ref: protocol.AdapterRef) -> AsyncIterator[Path]:
        if self.problem is not None:
            raise self.problem
        yield Path("adapter")

    def submit(self, generate: protocol.Generate, folder: Path | None, arrived: float, grammar: None) -> bool:
        assert generate.adapter is not None
        if not self._ensure(generate.adapter.hash, folder):
            return False
        self.users[generate.adapter.hash].append(generate.request)
        self.begun.append(generate.request.split("/")[0])
        return True

    def switch(self, request: str, ref: protocol.AdapterRef, folder: Path | None, *, recompute: bool) -> bool:
        if not self._ensure(ref.hash, folder):
            return False
        self.switched.append(request.split("/")[0])
        return True

    def _ensure(self, key: str, folder: Path | None) -> bool:
        if key not in self.users and folder is not None:
            idle = [key for key, users in self.users.items() if not users]
            if len(self.users) - len(idle) >= 2:
                raise NoRoom
            for other in idle:
                del self.users[other]
            self.users[key] = []
        return key in self.users


def manager(machine: Machine) -> GenerationManager:
    return GenerationManager(machine, machine, lambda urgent: None)  # type: ignore[arg-type]


def ref(policy: str, version: int = 1) -> protocol.AdapterRef:
    return protocol.AdapterRef(policy=policy, version=version, hash=f"{policy}{version}", rank=64, alpha=64.0)


def order(name: str, adapter: protocol.AdapterRef | None, **changes: Any) -> protocol.Generate:
    generate = protocol.Generate(
        request=name, assignment="1.1", adapter=adapter, prompt=[1], shared_prefix=0, max_tokens=8, temperature=1.0,
        seed=1, stop_tokens=[],
    )  # fmt: skip
    return msgspec.structs.replace(generate, **changes)


async def filled(machine: Machine) -> GenerationManager:
    """Rollouts of two policies hold both adapters in memory, and one of a third waits."""
    held = manager(machine)
    for name in ("a", "b"):
        held.generate(order(f"{name}-rollout", ref(name)))
    await eventually(lambda: len(machine.begun) == 2)
    held.generate(order("c-rollout", ref("c")))
    await settle()
    assert held.waiting() == 1
    machine.begun.clear()
    return held


def free(machine: Machine, held: GenerationManager, key: str) -> None:
    """No request uses the adapter any more, since the last one has ended."""
    machine.users[key].clear()
    end = protocol.TokenChunk(request="last", offset=0, tokens=[], logprobs=[], version=1, policy=key, finish="stop")
    held.collect([end])


@pytest.mark.parametrize("fields", [{"interactive": True}, {"ttft_ms": 2000.0}], ids=["in its room", "among rollouts"])
async def test_a_chat_does_not_wait_behind_rollouts_for_the_memory_of_adapters(fields: dict[str, Any]) -> None:
    machine = Machine()
    held = await filled(machine)
    held.generate(order("later-rollout", ref("a")))
    held.generate(order("chat", ref("a"), **fields))
    await eventually(lambda: machine.begun == ["chat"])
    held.generate(order("d-chat", ref("d"), **fields))
    await settle()
    assert held.waiting() == 3
    free(machine, held, "b1")
    await eventually(lambda: machine.begun == ["chat", "d-chat"])
    free(machine, held, "d1")
    await eventually(lambda: machine.begun == ["chat", "d-chat", "c-rollout", "later-rollout"])


async def test_a_running_request_switches_to_a_version_in_memory_while_others_wait_for_room() -> None:
    machine = Machine()
    held = await filled(machine)
    machine.users["a2"] = []
    held.switch(protocol.SwitchAdapter(request="a-rollout", assignment="1.1", adapter=ref("a", 2)))
    await eventually(lambda: machine.switched == ["a-rollout"])


async def test_clients_keep_an_adapter_from_others_for_a_while_only(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine()
    held = await filled(machine)
    monkeypatch.setattr(generation, "FENCE_SECONDS", 0.0)
    held.generate(order("chat", ref("a"), interactive=True))
    await eventually(lambda: machine.begun == ["chat"])
    end = protocol.TokenChunk(
        request="a-rollout/1.1", offset=0, tokens=[], logprobs=[], version=1, policy="a", finish="stop"
    )
    machine.users["a1"].remove("a-rollout/1.1")
    held.collect([end])
    held.generate(order("next", ref("a"), interactive=True))
    await settle()
    assert held.waiting() == 2 and machine.begun == ["chat"]
    free(machine, held, "a1")
    await eventually(lambda: machine.begun == ["chat", "c-rollout"])


FULL = OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize(
    ("problem", "finish", "reason"),
    [
        (FULL, "abort", "No space left"),
        (MemoryError("out of memory"), "abort", "out of memory"),
        (ReadRefused("507"), "abort", "507"),
        (NotOnThisWorker("an adapter of rank 64 does not fit"), "abort", "rank 64"),
        (Unreachable("the service does not answer"), "abort", ""),
        (CorruptDownload("other bytes"), "error", "other bytes"),
        (ValueError("a token id is outside the vocabulary"), "error", "vocabulary"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else "",
)
async def test_a_request_that_another_worker_may_run_is_aborted_with_the_reason(
    problem: Exception, finish: str, reason: str
) -> None:
    machine = Machine()
    held = manager(machine)
    machine.problem = problem
    held.generate(order("r", ref("a")))
    await eventually(lambda: bool(held.held["r"].finish))
    [chunk] = held.take(0.0)
    assert chunk.finish == finish and reason in chunk.error and bool(chunk.error) == bool(reason)


CIRCUMSTANCES = {
    "request", "assignment", "adapter", "prefix_tokens", "interactive", "tenant", "weight", "order", "ttft_ms",
    "tpot_ms", "episode", "group",
}  # fmt: skip


def test_a_held_text_continues_under_other_circumstances() -> None:
    names = set(protocol.Generate.__struct_fields__) - {"epoch"}
    assert names == CIRCUMSTANCES | set(TEXT_PARAMETERS), "a new parameter must be one of these"
    held = HeldRequest(order("r", ref("a")), "r/1.1")
    for field, value in {"weight": 3.0, "tenant": "b", "order": 5.0, "interactive": True, "group": "g"}.items():
        assert held.continues(order("r", ref("a"), **{field: value})), field
    others = {"seed": 2, "prompt": [2], "max_tokens": 9, "stop": ["x"], "logits": protocol.LogitsParams(top_p=0.5)}
    for field, value in others.items():
        assert not held.continues(order("r", ref("a"), **{field: value})), field
