"""While an engine has requests, each of its steps computes, whatever the mix of requests and however late they are."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hypothesis import example, given, settings
from hypothesis import strategies as st
from tests.support.draws import examples
from tests.support.tiny import native_engine, small
from tests.worker.engine.test_engine import order, text
from tests.worker.engine.test_slo_gate import Clock, chat, gated, tokens

from rookery import protocol
from rookery.scheduling.costs import Kind
from rookery.worker.engine.native.engine import NativeEngine
from rookery.worker.engine.request import EngineRequest
from rookery.worker.engine.slo_gate import SloGate
from rookery.worker.model.adapter import PARTS, init_adapter
from rookery.worker.model.lora import LoraManager

LENGTHS = (1, 2, 31, 32, 33, 50, 64, 90)
"""Of prompts, in tokens: around the width of a range of the cache."""

WEIGHTS = ("", "a", "b", "full")
"""Hashes of what a request may run on: the base model, two adapters of one policy, a full-parameter version."""


@dataclass(frozen=True)
class Group:
    """Requests with one prompt."""

    prompt: int = 32
    shared: float = 1.0
    """Share of the prompt that is the group's."""
    members: int = 1
    adapter: str = ""
    client: bool = False
    reserved: bool = False
    ttft_ms: float = 0.0
    tpot_ms: float = 0.0
    tokens: int = 3
    order: float = 0.0
    episode: bool = False
    """Each member is followed by a second turn of its episode."""
    in_flight: str = "finish"
    tenant: str = "a"


@dataclass(frozen=True)
class Mix:
    """The input of an engine over time: each group comes after so many steps, and time passes at each step."""

    groups: list[tuple[int, Group]]
    rows: int = 4
    cache: int = 512
    """Tokens of the KV cache."""
    prefill_tokens: int = 32
    step_seconds: float = 0.01
    slice_seconds: float = 0.01
    """Told to the gate of each slice: where it is long, tenants' clients are soon beyond their share."""
    headroom: float = 0.2
    gate: bool = True
    training: bool = False
    """A training slice is asked for before each step."""
    abort: int = 0
    """The step at which the oldest request is aborted; 0: none is."""
    switch: int = 0
    """The step at which requests on adapter a switch to b; 0: none does."""


groups = st.builds(
    Group,
    prompt=st.sampled_from(LENGTHS),
    shared=st.sampled_from([0.0, 0.5, 1.0]),
    members=st.sampled_from([1, 2, 5]),
    adapter=st.sampled_from(WEIGHTS),
    client=st.booleans(),
    reserved=st.booleans(),
    ttft_ms=st.sampled_from([0.0, 1.0, 2000.0]),
    tpot_ms=st.sampled_from([0.0, 1.0, 250.0]),
    tokens=st.sampled_from([1, 2, 5, 34]),
    order=st.sampled_from([0.0, 1.0]),
    episode=st.booleans(),
    in_flight=st.sampled_from(["finish", "switch", "recompute"]),
    tenant=st.sampled_from("abc"),
)
mixes = st.builds(
    Mix,
    groups=st.lists(st.tuples(st.integers(0, 12), groups), min_size=1, max_size=4),
    rows=st.integers(1, 6),
    cache=st.sampled_from([192, 256, 384, 1024]),
    prefill_tokens=st.sampled_from([7, 64]),
    step_seconds=st.sampled_from([0.0, 0.01, 0.5, 10.0]),
    slice_seconds=st.sampled_from([0.01, 0.5, 5.0]),
    headroom=st.sampled_from([0.0, 0.2, 0.9]),
    gate=st.booleans(),
    training=st.booleans(),
    abort=st.sampled_from([0, 3, 9]),
    switch=st.sampled_from([0, 4, 11]),
)


class TimedGate(SloGate):
    """Every slice takes equally long, whatever the machine does meanwhile."""

    slice_seconds = 0.01

    def record(self, kind: Kind, size: int, seconds: float, clients: Mapping[str, float]) -> None:
        super().record(kind, size, self.slice_seconds, clients)


def build(mix: Mix, clock: Clock) -> NativeEngine:
    decoder = small("llama")
    loras = LoraManager(decoder.config, decoder.dtype, decoder.device, 64)
    for seed, key in enumerate(("a", "b")):
        loras.add(key, init_adapter(decoder.config, 8, 16.0, list(PARTS), seed))
    loras.add_full("full", decoder.bytes, lambda: small("llama tied"))
    gate = TimedGate(enabled=mix.gate, headroom=mix.headroom, clock=clock)
    gate.slice_seconds = mix.slice_seconds
    config = decoder.config
    token = 2 * config.layers * config.kv_heads * config.head_dim * decoder.dtype.itemsize
    engine = native_engine(
        decoder, loras, text, max_rows=mix.rows, kv_budget_bytes=mix.cache * token, gate=gate,
        prefill_tokens=mix.prefill_tokens,
    )  # fmt: skip
    for kind, size, seconds in (("decode", 1, 0.01), ("decode", 8, 0.08), ("prefill", 16, 0.1), ("train", 1, 1.0)):
        gate.costs.record(kind, size, seconds, first=True)  # type: ignore[arg-type]
    gate.costs.record = lambda *args, **options: None  # type: ignore[method-assign]  # these costs stay
    return engine


def adapter(key: str) -> protocol.AdapterRef | None:
    return protocol.AdapterRef(policy="p", version=ord(key[0]), hash=key, rank=8, alpha=16.0) if key else None


def generate(number: int, group: Group, member: int, turn: int = 0, before: tuple[int, ...] = ()) -> protocol.Generate:
    prompt = [1 + (number + index) % 200 for index in range(group.prompt)]
    changes: dict[str, Any] = {
        "adapter": adapter(group.adapter), "prompt": [*prompt, *before], "max_tokens": group.tokens,
        "shared_prefix": int(group.shared * len(prompt)), "seed": member,
        "client": group.client or group.reserved, "reserved": group.reserved,
        "ttft_ms": group.ttft_ms, "tpot_ms": group.tpot_ms, "order": group.order, "in_flight": group.in_flight,
        "episode": f"e{number}.{member}" if group.episode else "", "tenant": group.tenant,
    }  # fmt: skip
    return order(f"{number}.{member}.{turn}", **changes)


class Run:
    """An engine that runs a mix as a worker does: rollouts that leave are submitted again with their tokens."""

    def __init__(self, mix: Mix) -> None:
        self.mix, self.clock = mix, Clock()
        self.engine = build(mix, self.clock)
        self.open: dict[str, protocol.Generate] = {}
        self.tokens: dict[str, list[int]] = {}
        self.aborted = ""
        self.count = 0

    def submit(self, request: protocol.Generate) -> None:
        try:
            self.engine.submit(request)
        except ValueError as error:
            assert "does not fit this worker's cache" in str(error)
            return
        self.open[request.request] = request
        self.tokens.setdefault(request.request, [*request.prefix_tokens])

    def arrive(self) -> None:
        for number, (at, group) in enumerate(self.mix.groups):
            if at == self.count:
                for member in range(group.members):
                    self.submit(generate(number, group, member))
        if self.count == self.mix.abort and self.open:
            self.aborted = next(iter(self.open))
            self.engine.abort(self.aborted)
        if self.count == self.mix.switch:
            newer = adapter("b")
            assert newer is not None
            for name, request in self.open.items():
                if request.adapter is not None and request.adapter.hash == "a" and request.in_flight != "finish":
                    self.engine.switch_adapter(name, newer, recompute=request.in_flight == "recompute")

    def collect(self) -> None:
        for chunk in self.engine.drain():
            name = chunk.request
            self.tokens[name].extend(chunk.tokens)
            if not chunk.finish:
                continue
            request, tokens = self.open.pop(name), self.tokens[name]
            assert chunk.finish in ("length", "abort"), chunk.error
            if chunk.finish == "abort" and name != self.aborted:  # as the service does, to another worker
                self.submit(protocol.Generate(**{**_fields(request), "prefix_tokens": tokens}))
            elif chunk.finish == "length" and name.endswith(".0") and request.episode:
                number, member, _ = map(int, name.split("."))
                self.submit(generate(number, self.mix.groups[number][1], member, 1, (*tokens, 7)))

    def step(self) -> None:
        """One step, in which the work falls: it samples, or it computes prompts, and while it samples nothing, requests
        are preempted at most as often as there are rows."""
        self.arrive()
        self.count += 1
        self.clock.now += self.mix.step_seconds
        if self.mix.training:
            self.engine.gate.allows_training()
        engine, before, had = self.engine, _computed(self.engine), self.engine.active + self.engine.waiting
        stepped = engine.step()
        assert stepped == (had > 0), engine.describe()
        assert not had or _computed(engine) > before, engine.describe()
        self.collect()


def _fields(request: protocol.Generate) -> dict[str, Any]:
    return {name: getattr(request, name) for name in request.__struct_fields__}


def _computed(engine: NativeEngine) -> float:
    """Positions that it has computed, and tokens that it has sampled."""
    return engine.generated + engine.stats["prefill_tokens"]


@given(mixes)
@settings(max_examples=examples(30))
@example(Mix([(0, Group(members=8, client=True, ttft_ms=1.0))], step_seconds=10.0))  # objectives without priority, late
@example(
    Mix([(0, Group(members=8)), (2, Group(prompt=31, members=3, client=True, ttft_ms=1.0))], rows=2, step_seconds=10.0)
)
@example(Mix([(0, Group(members=4)), (2, Group(adapter="full", ttft_ms=1.0, reserved=True))], step_seconds=10.0))
@example(  # a late request waits for the row of another tenant's client, who is beyond its share
    Mix(
        [
            (0, Group(client=True, reserved=True, ttft_ms=2000.0, tokens=34, tenant="c")),
            (3, Group(client=True, reserved=True, ttft_ms=1.0, tenant="b")),
        ],
        rows=1,
        step_seconds=0.5,
        slice_seconds=5.0,
        training=True,
    )
)
def test_every_step_computes_until_all_requests_have_ended(mix: Mix) -> None:
    run = Run(mix)
    last = max(at for at, _ in mix.groups)
    sampled, idle = run.engine.generated, 0
    while run.count <= last or run.engine.active or run.engine.waiting:
        run.step()
        idle = 0 if run.engine.generated > sampled else idle + 1
        sampled = run.engine.generated
        assert idle <= 2000, f"no token in {idle} steps: {run.engine.describe()}"
    assert not run.open and not run.engine.gate.tracked
    assert run.engine.gauges()["forced_slices"] == 0, "the gate itself leaves no step empty"
    assert run.engine.store.used_tokens == 0


def test_requests_with_objectives_in_rows_of_rollouts_are_never_held_back() -> None:
    """Sixteen chats with eight replies are more than a worker's reserved rows: the others come without priority."""
    clock = Clock()
    engine = gated(clock)
    for number in range(4):
        engine.submit(chat(f"chat-{number}", reserved=False, seed=number, max_tokens=5))
    engine.submit(order("r", max_tokens=5))
    for _ in range(2):
        engine.step()
    before = tokens(engine)
    clock.now += 100
    engine.step()
    steps = {name: count - before[name] for name, count in tokens(engine).items()}
    assert steps == {**{f"chat-{number}": 1 for number in range(4)}, "r": 0}, "late: the rollout waits, they do not"
    assert engine.gauges()["forced_slices"] == 0


def test_a_request_that_waits_behind_rollouts_does_not_hold_them_back() -> None:
    clock = Clock()
    engine = gated(clock, max_rows=2)
    for name in ("r0", "r1"):
        engine.submit(order(name, max_tokens=4))
    engine.submit(chat("late", reserved=False, max_tokens=2))
    clock.now += 100
    assert engine.gate.allows_training(), "training cannot help it either"
    steps = 0
    while engine.step():
        steps += 1
    assert engine.gauges()["forced_slices"] == 0
    assert steps == 5, "a prompt and three steps of both rollouts, then its own"


class ClosedGate(SloGate):
    """Holds back everything, as a fault in the gate would."""

    def is_client(self, row: EngineRequest) -> bool:
        return False

    def prefill_tokens(self, rows: Any, limit: int) -> int:
        return limit if self.open else 0

    def decode_rows(self, rows: list[EngineRequest]) -> list[EngineRequest]:
        return rows if self.open else []


def test_a_gate_that_holds_back_everything_is_opened_and_counted() -> None:
    decoder = small("llama")
    loras = LoraManager(decoder.config, decoder.dtype, decoder.device, 64)
    engine = native_engine(decoder, loras, text, max_rows=4, kv_budget_bytes=1 << 24, gate=ClosedGate())
    for number in range(6):
        engine.submit(order(f"r{number}", seed=number, max_tokens=5))
    ended = set()
    for _ in range(60):
        assert engine.step() == bool(6 - len(ended))
        ended |= {chunk.request for chunk in engine.drain() if chunk.finish == "length"}
        if len(ended) == 6:
            break
    assert len(ended) == 6 and engine.gauges()["forced_slices"] > 5 and not engine.gate.open


def test_retained_caches_that_divide_the_memory_are_discarded() -> None:
    """A retained tail lies between two free ranges, neither of which holds the prompt that it follows."""
    mix = Mix([], cache=32 * 9, rows=1)
    engine = build(mix, Clock())
    prompt = list(range(1, 129))
    free = engine.store
    begin = free.allocate(96)
    engine.submit(order("one", prompt=prompt[:96] + [5] * 30, shared_prefix=96, max_tokens=2, episode="e"))
    while engine.step():
        pass
    assert begin is not None
    free.free(begin)
    said = next(chunk.tokens for chunk in engine.drain())
    engine.submit(order("two", prompt=[*prompt[:96], *[5] * 30, *said, 9], shared_prefix=96, max_tokens=2, episode="e"))
    for _ in range(20):
        engine.step()
    assert not engine.active and not engine.waiting
