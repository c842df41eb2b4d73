"""Requests of a worker before its engine has them: their adapters, and the answers to those that it cannot run."""

from __future__ import annotations

import errno
from array import array
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import msgspec
import pytest
from tests.support.peers import eventually, settle

from rookery import protocol
from rookery.controller.rollout.request import SamplingRequest, SamplingResult
from rookery.errors import Unavailable
from rookery.worker.compute_status import IDLE, ComputeStatus
from rookery.worker.engine.vllm.backend import VllmEnded
from rookery.worker.failures import PassingFault
from rookery.worker.generation import (
    DELIVERIES,
    FRAME_BYTES,
    LOADS,
    SENT_BYTES,
    STAGES,
    Delivery,
    DeliveryEvent,
    GenerationManager,
    HeldRequest,
    Stage,
    StageEvent,
)
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
        self.faults: list[Exception] = []
        """Of the next submissions."""

    @property
    def status(self) -> ComputeStatus:
        return ComputeStatus(IDLE, frozenset(self.users))

    async def call(self, function: Callable[[Any], Any], touches: str = "") -> Any:
        await settle(1)
        return function(self)

    def post(self, name: str, function: Callable[[Any], Any], *, touches: str, **concerns: object) -> None:
        """An abort: the requests that a test drops are not in ``users``."""

    @asynccontextmanager
    async def pulled(self, ref: protocol.AdapterRef) -> AsyncIterator[Path]:
        if self.problem is not None:
            raise self.problem
        yield Path("adapter")

    def submit(self, generate: protocol.Generate, folder: Path | None, arrived: float, grammar: None) -> bool:
        assert generate.adapter is not None
        if self.faults:
            raise self.faults.pop(0)
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


@pytest.mark.parametrize("fields", [{"reserved": True}, {}], ids=["in a reserved row", "among rollouts, no objective"])
async def test_a_chat_does_not_wait_behind_rollouts_for_the_memory_of_adapters(fields: dict[str, Any]) -> None:
    machine = Machine()
    held = await filled(machine)
    held.generate(order("later-rollout", ref("a")))
    held.generate(order("chat", ref("a"), client=True, **fields))
    await eventually(lambda: machine.begun == ["chat"])
    held.generate(order("d-chat", ref("d"), client=True, **fields))
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


async def test_clients_keep_an_adapter_from_others_for_a_while_only() -> None:
    machine = Machine()
    held = await filled(machine)
    held.fence_seconds = 0.0
    held.generate(order("chat", ref("a"), client=True))
    await eventually(lambda: machine.begun == ["chat"])
    end = protocol.TokenChunk(
        request="a-rollout/1.1", offset=0, tokens=[], logprobs=[], version=1, policy="a", finish="stop"
    )
    machine.users["a1"].remove("a-rollout/1.1")
    held.collect([end])
    held.generate(order("next", ref("a"), client=True))
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


@pytest.mark.parametrize(
    ("fault", "repeated", "reason"),
    [
        (Unavailable("the engine is busy"), LOADS, ""),
        (PassingFault("a fault"), LOADS, "a fault"),
        (VllmEnded("it has ended"), 1, ""),
    ],
    ids=["busy", "fault", "ended"],
)
async def test_a_load_is_repeated_where_that_may_help_before_the_request_leaves(
    fault: Exception, repeated: int, reason: str
) -> None:
    machine = Machine()
    held = manager(machine)
    held.first_pause = 0.001
    machine.faults = [fault] * (repeated - 1)
    held.generate(order("r", ref("a")))
    await eventually(lambda: machine.begun == ["r"])
    machine.faults = [fault] * repeated
    held.generate(order("s", ref("b")))
    await eventually(lambda: bool(held.held["s"].finish))
    [chunk] = held.take(0.0)
    assert chunk.finish == "abort" and reason in chunk.error and bool(chunk.error) == bool(reason)
    assert not machine.faults and machine.begun == ["r"]


CIRCUMSTANCES = {
    "request", "assignment", "adapter", "prefix_tokens", "client", "reserved", "tenant", "weight", "order", "ttft_ms",
    "tpot_ms", "episode", "group",
}  # fmt: skip


def test_a_held_text_continues_under_other_circumstances() -> None:
    names = set(protocol.Generate.__struct_fields__) - {"epoch"}
    assert names == CIRCUMSTANCES | set(protocol.TEXT_PARAMETERS), "a new parameter must be one of these"
    held = HeldRequest(order("r", ref("a")), "r/1.1")
    earlier = SamplingRequest("alice", "job", "model", held.generate)
    for field, value in {"weight": 3.0, "tenant": "b", "order": 5.0, "reserved": True, "group": "g"}.items():
        assert held.continues(other := order("r", ref("a"), **{field: value})), field
        assert replace(earlier, generate=other).continues_text_of(earlier), "the service decides alike"
    others = {"seed": 2, "prompt": [2], "max_tokens": 9, "stop": ["x"], "logits": protocol.LogitsParams(top_p=0.5)}
    for field, value in others.items():
        assert not held.continues(other := order("r", ref("a"), **{field: value})), field
        assert not replace(earlier, generate=other).continues_text_of(earlier), "the service decides alike"


@pytest.mark.parametrize("event", get_args(StageEvent))
@pytest.mark.parametrize("stage", get_args(Stage))
def test_a_request_has_no_other_events_than_those_of_its_stage(stage: Stage, event: StageEvent) -> None:
    held = HeldRequest(order("r", ref("a")), "r/1.1", stage=stage)
    if (stage, event) in STAGES:
        held.advance(event)
        assert held.stage == STAGES[stage, event]
    else:
        with pytest.raises(RuntimeError, match=f"request r/1.1 is {stage}, which has no event '{event}'"):
            held.advance(event)


@pytest.mark.parametrize("event", get_args(DeliveryEvent))
@pytest.mark.parametrize("delivery", get_args(Delivery))
def test_an_output_has_no_other_events_than_those_of_its_delivery(delivery: Delivery, event: DeliveryEvent) -> None:
    held = HeldRequest(order("r", ref("a")), "r/1.1", delivery=delivery)
    if (delivery, event) in DELIVERIES:
        held.deliver(event, 5.0)
        assert held.delivery == DELIVERIES[delivery, event]
        assert held.idle_since == (0.0 if held.delivery == delivery else 5.0)
    else:
        with pytest.raises(RuntimeError, match=f"request r/1.1 is {delivery}, which has no event '{event}'"):
            held.deliver(event, 5.0)


def scored(tokens: int, width: int) -> protocol.PromptLogprobs:
    row = tokens * width
    return protocol.PromptLogprobs(
        logprobs=array("f", range(tokens)).tobytes(),
        top_tokens=array("i", range(row)).tobytes(),
        top_logprobs=array("f", range(row)).tobytes(),
    )


def ended(held: GenerationManager, name: str, tokens: int, **fields: Any) -> None:
    """The engine has sampled all tokens of a request."""
    held.generate(order(name, None, **fields.pop("order", {})))
    log = {"tokens": list(range(1, tokens + 1)), "logprobs": [-1.0] * tokens}
    held.collect([protocol.TokenChunk(request=f"{name}/1.1", offset=0, version=1, finish="stop", **log, **fields)])


def received(held: GenerationManager) -> tuple[dict[str, SamplingResult], list[int]]:
    """Everything that is not sent yet, as a service joins it, and the sizes of the messages."""
    results: dict[str, SamplingResult] = {}
    sizes = []
    while chunks := held.take(0.0):
        sizes.append(len(protocol.encode(protocol.Output(epoch=1, chunks=chunks))))
        for chunk in chunks:
            result = results.setdefault(chunk.request, SamplingResult())
            assert not result.finish
            count = result.receive(chunk)
            assert count == len(chunk.tokens)
            result.top_logprobs += chunk.top_logprobs
            if chunk.prompt_logprobs is not None:
                assert not count
                result.prompt_logprobs.receive(chunk.prompt_logprobs)
            result.finish = chunk.finish
    return results, sizes


async def test_output_of_any_size_goes_in_small_messages_tokens_before_scores() -> None:
    held, scores, likeliest = manager(Machine()), scored(5000, 100), [(1 << 30, -0.1)] * 20
    logits = {"order": {"logits": protocol.LogitsParams(top_logprobs=20)}}
    ended(held, "scored", 3, prompt_logprobs=scores)
    ended(held, "likeliest", 4000, top_logprobs=[likeliest] * 4000, **logits)
    ended(held, "long", 30_000)
    for number in range(300):
        ended(held, f"short {number}", 2)
    first = held.take(0.0)
    assert not any(chunk.prompt_logprobs for chunk in first)
    held.on_disconnect(1.0)
    assert held.take(1.0) == [], "nobody has claimed them"
    for request in held.running():
        held.generate(msgspec.structs.replace(held.held[request].generate, assignment="1.2"))
    results, sizes = received(held)
    assert max(sizes) < 1.2 * FRAME_BYTES and sum(sizes) > 4 << 20
    assert results.keys() == set(held.running()) and {result.finish for result in results.values()} == {"stop"}
    assert results["scored"].prompt_logprobs == scores and results["scored"].tokens == [1, 2, 3]
    assert results["likeliest"].top_logprobs == [likeliest] * 4000
    assert len(results["long"].tokens) == 30_000


async def test_scores_of_ended_requests_that_were_sent_take_bounded_memory() -> None:
    held, scores = manager(Machine()), scored(20_000, 100)
    names = [f"{number}" for number in range(6)]
    for name in names:
        ended(held, name, 1, prompt_logprobs=scores)
    results, _ = received(held)
    assert list(results) == names and all(result.prompt_logprobs == scores for result in results.values())
    assert held.running() == names[-(SENT_BYTES // scores.size) :]
    ended(held, "plain", 1)
    assert list(received(held)[0]) == ["plain"] and "plain" in held.running()
