"""The SLO gate in the engine: which rows a slice computes, and that no text depends on it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.tiny import native_engine, small
from tests.worker.engine.test_engine import finish, order, text

from rookery import protocol
from rookery.scheduling.slo import PERIOD_SECONDS
from rookery.scheduling.worker_time import WorkerTime
from rookery.worker.engine.kv_cache import SegmentStore
from rookery.worker.engine.native.engine import NativeEngine
from rookery.worker.engine.runner import BaseRunner
from rookery.worker.engine.sequences import SequenceChunk
from rookery.worker.engine.slo_gate import EXPECT_SECONDS, SloGate, measure_costs
from rookery.worker.model.adapter import PARTS, init_adapter
from rookery.worker.model.lora import LoraManager


class Clock:
    """Seconds that pass only when a test says so."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


def gated(clock: Callable[[], float], *, enabled: bool = True, **options: Any) -> NativeEngine:
    decoder = small("llama")
    loras = LoraManager(decoder.config, decoder.dtype, decoder.device, 64)
    loras.add("a", init_adapter(decoder.config, 8, 16.0, list(PARTS), 0))
    gate = SloGate(enabled=enabled, headroom=0.2, clock=clock)
    engine = native_engine(decoder, loras, text, gate=gate, **{"max_rows": 8, "kv_budget_bytes": 1 << 26, **options})
    for kind, size, seconds in (("decode", 1, 0.01), ("decode", 8, 0.08), ("prefill", 16, 0.1), ("train", 1, 1.0)):
        gate.costs.record(kind, size, seconds, first=True)  # type: ignore[arg-type]
    gate.costs.record = lambda *args, **options: None  # type: ignore[method-assign]  # these costs stay
    return engine


def chat(name: str = "chat", **changes: Any) -> protocol.Generate:
    return order(name, **{"client": True, "reserved": True, "ttft_ms": 2000.0, "tpot_ms": 100.0, "seed": 99, **changes})


def ref(version: int) -> protocol.AdapterRef:
    return protocol.AdapterRef(policy="p", version=version, hash="a", rank=8, alpha=16.0)


def tokens(engine: NativeEngine) -> dict[str, int]:
    return {row.params.request: len(row.tokens) for row in engine.admission.running}


def filled(engine: NativeEngine, name: str) -> int:
    return next(row.filled for row in engine.admission.running if row.params.request == name)


def slow_step(engine: NativeEngine, clock: Clock, tenant: str) -> float:
    """A step that takes 0.2 s more than it did here, for a client of the tenant; its seconds on the clock."""
    began = time.perf_counter()
    engine.step()
    engine.gate.record("decode", 1, 0.2, {tenant: 1.0})
    seconds = 0.2 + time.perf_counter() - began
    clock.now += seconds
    return seconds


def test_the_next_client_is_expected_for_a_while() -> None:
    """Else a worker begins lanes between two requests, and each waits for a slice on half of the cores."""
    clock = Clock()
    engine = gated(clock)
    engine.submit(order("rollout", max_tokens=5))
    assert not engine.gate.expects_clients, "nobody came yet"
    engine.submit(chat(max_tokens=5))
    assert engine.gate.expects_clients
    finish(engine)
    assert not engine.gate.tracked and engine.gate.expects_clients
    clock.now += EXPECT_SECONDS
    assert not engine.gate.expects_clients


def test_a_decode_step_has_as_many_rollouts_as_the_slack_of_the_chat_allows() -> None:
    clock = Clock()
    engine = gated(clock)
    for number in range(7):
        engine.submit(order(f"r{number}", seed=number, max_tokens=50))
    engine.submit(chat(max_tokens=50))
    engine.step()
    assert set(tokens(engine).values()) == {0}, "their prompt is one"
    engine.step()
    # 75 ms after its first token the chat's second is due; a step of n rows takes n / 80 s: five rollouts, the oldest
    assert tokens(engine) == {f"r{number}": 2 if number < 5 else 1 for number in range(7)} | {"chat": 2}
    clock.now += 10
    before = tokens(engine)
    engine.step()
    steps = {name: count - before[name] for name, count in tokens(engine).items()}
    assert [name for name, count in steps.items() if count] == ["chat"], "it is late: nothing beside it"
    engine.abort("chat")
    before = tokens(engine)
    engine.step()
    assert all(count == before[name] + 1 for name, count in tokens(engine).items()), "nobody waits: all"


def test_prompts_of_rollouts_wait_or_are_cut_to_the_slack() -> None:
    clock = Clock()
    engine = gated(clock)
    engine.submit(chat(prompt=list(range(1, 9)), shared_prefix=8, ttft_ms=400.0, max_tokens=30))
    engine.submit(order("r", prompt=list(range(1, 101)), shared_prefix=0))
    for _ in range(2):
        engine.step()
    assert tokens(engine)["chat"] == 2 and not filled(engine, "r"), "a prompt takes longer than a token may"
    engine.step()
    assert 0 < filled(engine, "r") < 30, "the chat was quick: part of the prompt fits"


def test_training_waits_for_the_slack_of_chats() -> None:
    clock = Clock()
    engine = gated(clock)
    assert engine.gate.allows_training()
    engine.submit(chat(max_tokens=100))
    engine.submit(order("r", max_tokens=100))
    assert engine.gate.allows_training(), "1.5 s are left to the first token, and a training slice takes 1.25"
    clock.now += 0.3
    assert engine.gate.allows_training(0.9), "the rest of one takes 0.35"
    assert not engine.gate.allows_training()
    for _ in range(5):
        engine.step()
    assert tokens(engine) == {"chat": 5, "r": 1}, "rollouts wait with it, so that the chat gains time"
    for _ in range(20):
        engine.step()
    assert engine.gate.allows_training()
    engine.step()
    assert tokens(engine)["r"] == 2


@pytest.mark.parametrize(("weights", "share"), [({}, 0.5), ({"jobs": 3.0}, 0.75), ({"chats": 3.0}, 0.25)])
def test_clients_hold_back_other_tenants_no_more_than_their_share(weights: dict[str, float], share: float) -> None:
    """Chats that are always late, next to rollouts and training of another tenant."""
    clock = Clock()
    engine = gated(clock)
    engine.share_time(WorkerTime(weights))
    engine.gate.trained = {"jobs"}
    engine.submit(order("r", tenant="jobs", max_tokens=400))
    engine.submit(chat(tenant="chats", max_tokens=400))
    engine.gate.set_arrival("chat", clock.now - 100)
    while tokens(engine).get("chat") is None:
        engine.step()
    trained, decoded, before = 0.0, 0.0, tokens(engine)["r"]
    for _ in range(200):
        decoded += slow_step(engine, clock, "chats")
        if engine.gate.allows_training():
            clock.now += 1.0
            trained += 1.0
    assert abs(trained / (trained + decoded) - share) < 0.1
    assert tokens(engine)["r"] > before, "so do rollouts"


def test_clients_of_the_tenant_that_trains_go_first_always() -> None:
    clock = Clock()
    engine = gated(clock)
    engine.gate.trained = {""}
    engine.submit(order("r", max_tokens=400))
    engine.submit(chat(max_tokens=400))
    for _ in range(200):
        slow_step(engine, clock, "")
    assert not engine.gate.allows_training() and tokens(engine)["r"] < 5


def test_requests_within_their_objectives_are_counted() -> None:
    clock = Clock()
    engine = gated(clock)
    engine.submit(chat("quick", max_tokens=2))
    engine.submit(chat("late", max_tokens=2))
    engine.gate.set_arrival("late", clock.now - 5)
    finish(engine)
    engine.submit(chat("gone"))
    engine.abort("gone")
    assert (engine.gate.met, engine.gate.ended, engine.gate.tracked) == (1, 2, {})


def test_no_text_depends_on_the_gate() -> None:
    texts = []
    for enabled in (True, False):
        clock = Clock()
        engine = gated(clock, enabled=enabled, kv_budget_bytes=1 << 18)
        for number in range(6):
            engine.submit(order(f"r{number}", seed=number, max_tokens=40, prompt=list(range(1, 40)), shared_prefix=30))
        seen: dict[str, list[int]] = {}
        for turn in range(400):
            if turn in (5, 30):
                engine.submit(chat(f"chat-{turn}", max_tokens=20, seed=turn))
            clock.now += 0.03
            engine.step()
            for chunk in engine.drain():
                seen.setdefault(chunk.request, []).extend(chunk.tokens)
                if chunk.finish == "abort":  # as the controller does
                    name, number = chunk.request, int(chunk.request[1:])
                    engine.submit(order(name, seed=number, max_tokens=40, prompt=list(range(1, 40)), shared_prefix=30,
                                        prefix_tokens=seen[name]))  # fmt: skip
        assert not engine.active and not engine.waiting
        texts.append(seen)
    assert texts[0] == texts[1] and len(texts[0]) == 8


def test_chats_that_need_the_cache_send_rollouts_away_with_their_tokens() -> None:
    clock = Clock()
    engine = gated(clock)
    engine = gated(clock, kv_budget_bytes=1000 * engine.store.token_bytes)
    calm = gated(clock)
    for each in (engine, calm):
        for number in range(5):
            each.submit(order(f"r{number}", seed=number, max_tokens=60, prompt=list(range(1, 91)), shared_prefix=0))
    for _ in range(10):
        engine.step()
    engine.submit(chat("one", prompt=list(range(1, 150)), shared_prefix=149, max_tokens=5))
    engine.submit(chat("two", prompt=list(range(2, 150)), shared_prefix=148, max_tokens=5))
    seen: dict[str, list[int]] = {}
    away = []
    while engine.active or engine.waiting:
        clock.now += 1.0
        engine.step()
        for chunk in engine.drain():
            assert chunk.offset == len(seen.get(chunk.request, []))
            seen.setdefault(chunk.request, []).extend(chunk.tokens)
            away += [chunk.request] if chunk.finish == "abort" else []
    assert engine.gate.cache_cuts == 1 and away and all(name.startswith("r") for name in away)
    complete = {name: sampled for name, (sampled, _) in finish(calm).items()}
    for name in away:
        assert seen[name] == complete[name][: len(seen[name])], "what was sampled stands; another worker goes on"
    assert all(seen[name] == complete[name] for name in complete if name not in away)


def test_the_frozen_cache_grows_at_the_next_version() -> None:
    clock = Clock()
    engine = gated(clock)
    budget = engine.gate.budget
    assert budget is not None
    engine.submit(order("r", adapter=ref(1)))
    assert budget.cut(engine.store.tokens, {"p": 1}) and budget.frozen
    engine.submit(order("r2", adapter=ref(1)))
    assert budget.frozen
    engine.submit(order("r3", adapter=ref(2)))
    assert not budget.frozen


@pytest.mark.parametrize("adapter", [None, ref(1)], ids=["base", "one version"])
def test_rollouts_fill_the_cache_again_after_a_burst_of_chats(adapter: protocol.AdapterRef | None) -> None:
    clock = Clock()
    engine = gated(clock)
    engine = gated(clock, kv_budget_bytes=1000 * engine.store.token_bytes)

    def submit(name: str) -> None:
        engine.submit(order(name, adapter=adapter, prompt=list(range(1, 91)), shared_prefix=0, max_tokens=60))

    def steps(count: int) -> int:
        """The most requests that ran at once, with as many waiting as the cache may hold."""
        most = 0
        for step in range(count):
            while engine.active + engine.waiting < 6:
                submit(f"{clock.now}-{step}-{engine.active + engine.waiting}")
            engine.step()
            engine.drain()
            most = max(most, engine.active)
        return most

    before = steps(3)
    for number in range(4):
        prompt = list(range(number + 1, 150))
        engine.submit(chat(f"c{number}", prompt=prompt, shared_prefix=len(prompt), max_tokens=2))
    while any(request.params.reserved for request in (*engine.admission.running, *engine.admission.waiting)):
        engine.step()
        engine.drain()
    assert engine.gate.cache_cuts == 1 and steps(3) < before
    clock.now += PERIOD_SECONDS
    assert steps(8) >= before


@pytest.mark.parametrize("enabled", [True, False])
def test_a_request_is_a_clients_also_without_a_reserved_row_and_without_objectives(enabled: bool) -> None:
    engine = gated(Clock(), enabled=enabled)
    engine.submit(order("r", tenant="jobs"))
    assert engine.tenants() == {"jobs": 0}
    engine.submit(chat(reserved=False, ttft_ms=0.0, tpot_ms=0.0, tenant="chats"))
    assert [engine.gate.is_client(row) for row in engine.admission.waiting] == [False, True]
    assert engine.tenants() == {} and not engine.gate.tracked, "no tenant takes turns with a client"


class SlowRunner(BaseRunner):
    """Its slices compute nothing, and take so many seconds a token."""

    def __init__(self, store: SegmentStore, clock: Clock, token_seconds: float) -> None:
        super().__init__(None, None, store)
        self._clock, self._token_seconds = clock, token_seconds

    def prefill(self, streams: Sequence[SequenceChunk]) -> tuple[torch.Tensor, torch.Tensor]:
        return self.decode(streams), torch.empty(0)

    def decode(self, streams: Sequence[SequenceChunk]) -> torch.Tensor:
        self._clock.now += self._token_seconds * sum(len(chunk.tokens) for chunk in streams)
        return torch.empty(0)


@pytest.mark.parametrize("token_seconds", [1e-4, 1e-2, 1.0])
def test_a_large_model_does_not_start_for_minutes(token_seconds: float) -> None:
    """Slices that would take long are predicted from shorter ones, in proportion."""
    engine, clock, gate = gated(Clock()), Clock(), SloGate()
    runner, began = SlowRunner(engine.store, clock, token_seconds), clock.now
    measure_costs(gate.costs, runner, engine.decoder.device, 8, 512, clock)
    assert clock.now - began < 40
    for kind, sizes in (("decode", (1, 4, 8)), ("prefill", (16, 128, 512))):
        for size in sizes:
            assert gate.costs.predict(kind, size) == pytest.approx(size * token_seconds)  # type: ignore[arg-type]


def test_costs_are_measured_before_the_first_request(tmp_path: Path) -> None:
    engine = gated(Clock())
    gate = SloGate()
    measure_costs(gate.costs, engine.runner, engine.decoder.device, 8, 64)
    assert 0 < gate.costs.predict("decode", 8) < 5 and gate.costs.predict("prefill", 64) > 0
    assert gate.costs.predict("train", 1) == 3 * gate.costs.predict("prefill", 64)
    assert engine.store.used_tokens == 0
