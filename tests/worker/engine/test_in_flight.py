"""Versions that arrive while requests run: what the engine computes, and what a worker sends."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.draws import examples
from tests.support.peers import settle
from tests.support.tiny import native_engine, reference, small, trained_adapter

from rookery import protocol
from rookery.worker.compute import Touches
from rookery.worker.core import WorkerCore
from rookery.worker.engine.native.engine import NativeEngine
from rookery.worker.generation import GenerationManager
from rookery.worker.model.adapter import PARTS, Adapter, write_adapter
from rookery.worker.model.decoder import Decoder
from rookery.worker.model.lora import LoraManager
from rookery.worker.trainer.operation_queue import OperationQueue
from rookery.worker.transfer.http import TransferFailed

VERSIONS = ["v0", "v1", "v2", "v3"]
RANK = 8

# --- the engine -------------------------------------------------------------------------------------------------------


def make(decoder: Decoder, **options: int) -> NativeEngine:
    loras = LoraManager(decoder.config, decoder.dtype, decoder.device, 64)
    for seed, key in enumerate(VERSIONS):
        loras.add(key, trained_adapter(decoder, RANK, seed, targets=PARTS))
    kept = {"max_rows": 16, "kv_budget_bytes": 1 << 26, **options}
    return native_engine(decoder, loras, lambda tokens: "".join(chr(65 + t % 26) for t in tokens), **kept)


def version(number: int, key: str = "") -> protocol.AdapterRef:
    return protocol.AdapterRef(policy="p", version=number, hash=key or VERSIONS[number], rank=RANK, alpha=2.0 * RANK)


def prompt(length: int, seed: int = 0) -> list[int]:
    return torch.randint(0, 211, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def order(
    name: str = "r", number: int = 0, *, length: int = 20, shared: int = 12, **changes: object
) -> protocol.Generate:
    plain: dict[str, object] = {
        "adapter": version(number),
        "prompt": prompt(length),
        "shared_prefix": shared,
        "max_tokens": 16,
        "temperature": 1.0,
        "seed": 7,
        "stop_tokens": [],
    }
    return protocol.Generate(request=name, **{**plain, **changes})  # type: ignore[arg-type]


@dataclass
class Said:
    """The output of a request: parallel lists, except its end."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    finish: str = ""


class Run:
    """An engine and what its requests have said."""

    def __init__(self, engine: NativeEngine) -> None:
        self.engine = engine
        self.said: dict[str, Said] = {}

    def submit(self, *orders: protocol.Generate) -> Run:
        for one in orders:
            self.said[one.request] = Said()
            self.engine.submit(one)
        return self

    def step(self) -> bool:
        busy = self.engine.step()
        for chunk in self.engine.drain():
            said = self.said[chunk.request]
            assert not said.finish
            said.tokens += chunk.tokens
            said.logprobs += chunk.logprobs
            said.versions += [chunk.version] * len(chunk.tokens)
            said.finish = chunk.finish
        return busy or bool(self.engine.active or self.engine.waiting)

    def until(self, name: str, count: int) -> Run:
        """As long as it takes for a request to have so many tokens."""
        while len(self.said[name].tokens) < count:
            assert self.step()
        return self

    def end(self) -> dict[str, Said]:
        while self.step():
            pass
        assert {said.finish for said in self.said.values()} == {"length"}
        assert self.engine.store.used_tokens == 0
        return self.said


@pytest.mark.parametrize("cut", [0, 7, 15])
@pytest.mark.parametrize(("length", "shared"), [(20, 12), (20, 20), (1, 0)])
def test_a_recomputed_cache_equals_a_resumption_on_the_newer_version(length: int, shared: int, cut: int) -> None:
    decoder = small("llama")
    whole = Run(make(decoder)).submit(order(length=length, shared_prefix=shared)).end()["r"]
    run = Run(make(decoder)).submit(order(length=length, shared_prefix=shared)).until("r", cut)
    before = len(run.said["r"].tokens)
    assert run.engine.switch_adapter("r", version(1), recompute=True)
    switched = run.end()["r"]
    given = switched.tokens[:before]
    resumed = (
        Run(make(decoder)).submit(order(number=1, length=length, shared_prefix=shared, prefix_tokens=given)).end()["r"]
    )
    assert (given, switched.logprobs[:before]) == (whole.tokens[:before], whole.logprobs[:before])
    assert (switched.tokens[before:], switched.logprobs[before:]) == (resumed.tokens, resumed.logprobs)
    assert switched.logprobs[before:] != whole.logprobs[before:], "the newer version says something else"
    assert switched.versions == [0] * before + [1] * (16 - before)


def merged(family: str, adapted: Adapter) -> transformers.PreTrainedModel:
    """transformers' model in float32 with an adapter in its weights."""
    model = reference(family)
    names = {"q": "self_attn.q_proj", "k": "self_attn.k_proj", "v": "self_attn.v_proj", "o": "self_attn.o_proj"}
    names |= {"gate": "mlp.gate_proj", "up": "mlp.up_proj", "down": "mlp.down_proj"}
    with torch.no_grad():
        for (layer, part), (a, b) in adapted.weights.items():
            weight = model.get_parameter(f"model.layers.{layer}.{names[part]}.weight")
            weight += adapted.scale * b.float() @ a.float()
    return model


def kept_reference(family: str, texts: Sequence[tuple[int, Sequence[int]]]) -> torch.Tensor:
    """Log-probabilities [tokens, vocab] after each token of the texts, one after another, each computed by its own
    version upon the keys and values that the earlier ones computed."""
    cache, rows = transformers.DynamicCache(), []
    for number, tokens in texts:
        model = merged(family, trained_adapter(small(family, torch.float32), RANK, number, targets=PARTS))
        with torch.no_grad():
            logits = model(torch.tensor([list(tokens)]), past_key_values=cache, use_cache=True).logits[0]
        rows.append(logits.double().log_softmax(-1))
    return torch.cat(rows)


TOLERANCE = 2e-3
"""Nats between float32 in the engine's order of summation and in transformers'; versions differ by whole nats."""


@pytest.mark.parametrize("family", ["llama", "qwen3", "mistral window"])
@pytest.mark.parametrize("shared", [0, 12, 20])
def test_a_kept_cache_of_the_older_version_is_attended_to(family: str, shared: int) -> None:
    decoder = small(family, torch.float32)
    run = Run(make(decoder)).submit(order(shared_prefix=shared)).until("r", 5)
    assert run.engine.switch_adapter("r", version(1), recompute=False)
    run.until("r", 11)
    assert run.engine.switch_adapter("r", version(2), recompute=False)
    said = run.end()["r"]
    assert said.versions == [0] * 5 + [1] * 6 + [2] * 5
    text = prompt(20) + said.tokens
    # the last token before a switch is not cached yet when it comes: the newer version computes it
    parts = [(0, text[:24]), (1, text[24:30]), (2, text[30:35])]
    wanted = kept_reference(family, parts)[19:].gather(1, torch.tensor(said.tokens)[:, None])[:, 0]
    assert torch.tensor(said.logprobs).sub(wanted).abs().max() < TOLERANCE
    alone = [(number, text[:35]) for number in (0, 1, 2)]
    for number, end in alone:  # no version by itself says this
        other = kept_reference(family, [(number, end)])[19:].gather(1, torch.tensor(said.tokens)[:, None])[:, 0]
        assert torch.tensor(said.logprobs).sub(other).abs().max() > 100 * TOLERANCE


@pytest.mark.parametrize("steps", [0, 1, 2, 3])
@pytest.mark.parametrize("shared", [20, 19])
def test_a_switch_before_the_first_token_uses_no_partial_cache(shared: int, steps: int) -> None:
    """A group's prompt may be there in part, or wholly with the logits after it: those are the older version's."""
    decoder = small("llama")
    fresh = Run(make(decoder)).submit(order(number=1, shared_prefix=shared)).end()["r"]
    run = Run(make(decoder, prefill_tokens=8)).submit(order(shared_prefix=shared))
    for _ in range(steps):
        run.step()
    assert run.said["r"].tokens == []
    run.engine.switch_adapter("r", version(1), recompute=False)
    said = run.end()["r"]
    assert said.versions == [1] * 16
    whole_prompt = shared == 19 and steps == 3  # the last token is still to come: the newer version computes it
    assert (said == fresh) != whole_prompt


def test_a_newer_versions_requests_do_not_share_the_older_ones_prompt() -> None:
    decoder = small("llama", torch.float32)
    fresh = Run(make(decoder)).submit(order("new", number=1, shared_prefix=20)).end()["new"]
    run = Run(make(decoder)).submit(order(shared_prefix=20)).until("r", 4)
    run.engine.switch_adapter("r", version(1), recompute=False)
    before = run.engine.stats["prefill_tokens"]
    run.submit(order("new", number=1, shared_prefix=20), order("old", seed=9, shared_prefix=20)).step()
    assert run.engine.stats["prefill_tokens"] - before == 20, "the newer prompt is computed, the older one is there"
    said = run.end()
    assert said["new"].tokens == fresh.tokens
    assert said["new"].logprobs == pytest.approx(fresh.logprobs, abs=TOLERANCE)


@pytest.mark.parametrize("shared", [0, 12])
@pytest.mark.parametrize("between", [False, True])
def test_a_later_turn_extends_the_kept_cache(shared: int, between: bool) -> None:
    """Whether the newer version came during a turn or between two."""
    decoder = small("llama", torch.float32)
    run = Run(make(decoder)).submit(order(shared_prefix=shared, episode="e")).until("r", 6)
    if not between:
        run.engine.switch_adapter("r", version(1), recompute=False)
    first = run.end()["r"]
    text = [*prompt(20), *first.tokens, 3, 4, 5]
    before = run.engine.stats.copy()
    later = order("later", number=1, prompt=text, shared_prefix=shared, episode="e", in_flight="switch", seed=8)
    said = run.submit(later).end()["later"]
    assert run.engine.stats["prefill_tokens"] - before["prefill_tokens"] == 4
    assert run.engine.stats["reused_tokens"] - before["reused_tokens"] == 35
    text += said.tokens
    cut = 35 if between else 25
    wanted = kept_reference("llama", [(0, text[:cut]), (1, text[cut:54])])[38:]
    wanted = wanted.gather(1, torch.tensor(said.tokens)[:, None])[:, 0]
    assert torch.tensor(said.logprobs).sub(wanted).abs().max() < TOLERANCE


@pytest.mark.parametrize("changes", [{"in_flight": "recompute"}, {"adapter": protocol.AdapterRef(
    policy="another", version=1, hash="v1", rank=RANK, alpha=2.0 * RANK), "in_flight": "switch"}])  # fmt: skip
def test_the_cache_of_two_versions_is_not_shared(changes: dict[str, object]) -> None:
    decoder = small("llama")
    run = Run(make(decoder)).submit(order(episode="e")).until("r", 6)
    run.engine.switch_adapter("r", version(1), recompute=False)
    text = [*prompt(20), *run.end()["r"].tokens, 3, 4, 5]
    later = order("later", prompt=text, episode="e", **{"adapter": version(1), **changes})
    fresh = Run(make(decoder)).submit(later).end()["later"]
    assert run.submit(later).end()["later"] == fresh


def test_a_version_of_the_same_bytes_changes_the_stamp_alone() -> None:
    decoder = small("llama")
    whole = Run(make(decoder)).submit(order()).end()["r"]
    for recompute in (False, True):
        run = Run(make(decoder)).submit(order()).until("r", 5)
        before = run.engine.stats["prefill_tokens"]
        assert run.engine.switch_adapter("r", version(1, "v0"), recompute=recompute)
        said = run.end()["r"]
        assert (said.tokens, said.logprobs) == (whole.tokens, whole.logprobs)
        assert said.versions == [0] * 5 + [1] * 11
        assert run.engine.stats["prefill_tokens"] == before


def test_requests_that_cannot_switch_version() -> None:
    engine = make(small("llama"))
    assert not engine.switch_adapter("unknown", version(1), recompute=True)
    run = Run(engine).submit(order(), order("base", adapter=None))
    for name, ref, says in (
        ("r", version(1, "nowhere"), "not resident"),
        ("base", version(1), "does not run on policy p"),
        ("r", protocol.AdapterRef(policy="q", version=1, hash="v1", rank=8, alpha=1.0), "does not run on policy q"),
    ):
        with pytest.raises(ValueError, match=says):
            engine.switch_adapter(name, ref, recompute=False)
    assert set(run.end()["r"].versions) == {0}
    assert not engine.switch_adapter("r", version(1), recompute=False), "it is complete"


def test_an_older_version_leaves_memory_with_its_last_request() -> None:
    run = Run(make(small("llama"))).submit(order(), order("mate", seed=8)).until("r", 4)
    run.engine.loras.evict("v0")
    run.engine.switch_adapter("r", version(1), recompute=False)
    assert len(run.engine.loras) == len(VERSIONS)
    run.engine.switch_adapter("mate", version(1), recompute=True)
    assert len(run.engine.loras) == len(VERSIONS) - 1
    run.end()


def test_computing_again_takes_bounded_slices_in_the_same_position() -> None:
    engine = make(small("llama"), max_rows=2, prefill_tokens=16)
    run = Run(engine).submit(*(order(name, seed=seed, max_tokens=60) for seed, name in enumerate("abc"))).until("a", 40)
    rows = list(engine.admission.running)
    engine.switch_adapter("a", version(1), recompute=True)
    assert (engine.admission.running, engine.waiting) == (rows, 1)
    grown = len(run.said["b"].tokens)
    while len(run.said["a"].tokens) == 40:
        filled = engine.stats["prefill_tokens"]
        run.step()
        assert engine.stats["prefill_tokens"] - filled <= 16
    assert len(run.said["b"].tokens) - grown >= 2, "its neighbour goes on meanwhile"
    assert run.end()["a"].versions == [0] * 40 + [1] * 20


@settings(max_examples=examples(6))
@given(
    requests=st.lists(
        st.tuples(
            st.integers(1, 40),  # length of the prompt
            st.floats(0, 1),  # the part of it that is shared
            st.lists(st.tuples(st.integers(0, 11), st.booleans()), max_size=3),  # switches: at which token, recompute
            st.booleans(),  # an episode's
        ),
        min_size=1,
        max_size=8,
    ),
    rows=st.integers(1, 8),
    slice_tokens=st.integers(4, 64),
    tight=st.booleans(),
)
def test_a_switch_of_version_changes_no_other_request(
    requests: list[tuple[int, float, list[tuple[int, bool]], bool]], rows: int, slice_tokens: int, tight: bool
) -> None:
    """Any requests, switches at any moments, with little room or much. Who never switches says what it says alone; who
    recomputes says what a chain of resumed requests says; every token carries the version that was due."""
    decoder = small("llama")
    token = make(decoder).store.token_bytes
    engine = make(decoder, max_rows=rows, prefill_tokens=slice_tokens, kv_budget_bytes=token * (200 if tight else 9999))
    run, due, orders = Run(engine), {}, {}
    for number, (length, part, switches, episode) in enumerate(requests):
        name = f"r{number}"
        orders[name] = order(
            name,
            length=length,
            shared_prefix=int(part * length),
            seed=number,
            max_tokens=12,
            episode=name if episode else "",
        )
        due[name] = [(at, n + 1, recompute) for n, (at, recompute) in enumerate(sorted(switches, key=lambda s: s[0]))]
    run.submit(*orders.values())
    happened: dict[str, list[tuple[int, int, bool]]] = {name: [] for name in orders}
    busy = True
    while busy:
        for name, switches in due.items():
            while switches and len(run.said[name].tokens) >= switches[0][0] and not run.said[name].finish:
                _, number, recompute = switches.pop(0)
                assert engine.switch_adapter(name, version(number), recompute=recompute)
                happened[name].append((len(run.said[name].tokens), number, recompute))
        busy = run.step()
    for name, said in run.end().items():
        spans = [(0, 0, True), *happened[name]]
        wanted = [max(number for at, number, _ in spans if at <= i) for i in range(12)]
        assert said.versions == wanted
        assert all(math.isfinite(value) for value in said.logprobs)
        if all(recompute for _, _, recompute in spans):
            for (at, number, _), end in zip(spans, [*(s[0] for s in spans[1:]), 12], strict=True):
                if end > at:
                    resumed = msgspec.structs.replace(
                        orders[name],
                        adapter=version(number),
                        prefix_tokens=said.tokens[:at],
                        max_tokens=end,
                        episode="",
                    )
                    fresh = Run(make(decoder)).submit(resumed).end()[name]
                    assert (said.tokens[at:end], said.logprobs[at:end]) == (fresh.tokens, fresh.logprobs)


# --- the worker's requests --------------------------------------------------------------------------------------------


class Bench:
    """A worker's requests with the engine that computes them, a slice at a time, and adapters that arrive when they are
    told to."""

    def __init__(self, folder: Path, *arrived: int) -> None:
        self._folder = folder
        self.decoder = small("llama")
        loras = LoraManager(self.decoder.config, self.decoder.dtype, self.decoder.device, 64)
        engine = native_engine(self.decoder, loras, lambda tokens: "", max_rows=4, kv_budget_bytes=1 << 24)
        self.core = WorkerCore(engine, OperationQueue())
        self.arrived = {key: asyncio.Event() for key in VERSIONS}
        self.arrive(*arrived)
        self.refused: set[str] = set()
        self.requests = GenerationManager(self, self, lambda urgent: None)  # type: ignore[arg-type]
        self.sent: list[protocol.TokenChunk] = []

    # as Compute

    @property
    def status(self) -> SimpleNamespace:
        return SimpleNamespace(adapters=frozenset(self.core.engine.adapters()))

    async def call(self, function: Callable[[WorkerCore], Any], *, touches: Touches) -> Any:
        await settle(1)
        return function(self.core)

    def post(self, name: str, function: Callable[[WorkerCore], Any], *, touches: Touches, **concerns: object) -> None:
        function(self.core)

    # as Transfers

    @asynccontextmanager
    async def pulled(self, ref: protocol.AdapterRef) -> AsyncIterator[Path]:
        await self.arrived[ref.hash].wait()
        if ref.hash in self.refused:
            raise TransferFailed(f"artifact {ref.hash} is gone")
        folder = self._folder / ref.hash
        if not folder.exists():
            folder.mkdir()
            version = VERSIONS.index(ref.hash)
            write_adapter(folder, trained_adapter(self.decoder, RANK, version, targets=PARTS))
        yield folder

    # as the compute thread and the link

    def arrive(self, *numbers: int) -> None:
        for number in numbers:
            self.arrived[VERSIONS[number]].set()

    async def compute(self, name: str, count: int) -> None:
        """Compute until so many tokens of a request have been sampled and kept."""
        while (held := self.requests.held[name]).length < count:
            assert not held.finish, held.error
            await settle()
            self.core.engine.step()
            self.requests.collect(self.core.engine.drain())

    def take(self, name: str = "r") -> Said:
        """The sent parts, joined."""
        said = Said()
        for chunk in self.requests.take(0.0):
            assert chunk.request == name
            assert not said.finish
            assert len(chunk.tokens) == len(chunk.logprobs)
            self.sent.append(chunk)
            said.tokens += chunk.tokens
            said.logprobs += chunk.logprobs
            said.versions += [chunk.version] * len(chunk.tokens)
            said.finish = chunk.finish
        return said

    def switch(self, number: int, name: str = "r", recompute: bool = True) -> None:
        self.requests.switch(protocol.SwitchAdapter(request=name, adapter=version(number), recompute=recompute))


def chain(*spans: tuple[int, int]) -> Said:
    """The text of a request that versions sampled in turns (version, last token), each continuing the text before."""
    said = Said()
    for number, end in spans:
        part = (
            Run(make(small("llama"))).submit(order(number=number, prefix_tokens=said.tokens, max_tokens=end)).end()["r"]
        )
        said = Said(said.tokens + part.tokens, said.logprobs + part.logprobs, said.versions + part.versions, "length")
    return said


async def test_a_request_runs_on_until_the_newer_version_is_here(tmp_path: Path) -> None:
    bench = Bench(tmp_path, 0)
    bench.requests.generate(order(in_flight="recompute"))
    await bench.compute("r", 3)
    bench.switch(1)
    await bench.compute("r", 6)
    assert bench.requests.waiting() == 0, "it has what it runs with"
    bench.arrive(1)
    await bench.compute("r", 16)
    said = bench.take()
    assert said == chain((0, 6), (1, 16))
    assert [(chunk.offset, chunk.version, chunk.finish) for chunk in bench.sent] == [(0, 0, ""), (6, 1, "length")]
    bench.switch(2)
    bench.switch(2, name="unknown")
    await settle()
    assert bench.take() == Said()


async def test_a_still_newer_version_supersedes_the_one_that_is_waited_for(tmp_path: Path) -> None:
    bench = Bench(tmp_path, 0)
    bench.requests.generate(order(in_flight="recompute"))
    await bench.compute("r", 3)
    bench.switch(1)
    await bench.compute("r", 5)
    bench.switch(2)
    bench.arrive(1)
    await bench.compute("r", 8)
    bench.arrive(2)
    await bench.compute("r", 16)
    assert bench.take() == chain((0, 8), (2, 16))


async def test_a_request_stays_on_its_version_where_the_newer_one_cannot_be_loaded(tmp_path: Path) -> None:
    bench = Bench(tmp_path, 0, 1, 2)
    bench.refused.add("v1")
    bench.requests.generate(order(in_flight="recompute"))
    await bench.compute("r", 3)
    bench.switch(1)
    await bench.compute("r", 6)
    assert bench.requests.failed_switches == 1
    bench.switch(2)
    await bench.compute("r", 16)
    assert bench.take() == chain((0, 6), (2, 16))
    assert (bench.requests.failed_switches, bench.requests.failed) == (1, 0)


async def test_a_request_that_has_not_begun_begins_with_the_loaded_version(tmp_path: Path) -> None:
    for refused in (False, True):
        bench = Bench(tmp_path)
        if refused:
            bench.refused.add("v0")
        bench.requests.generate(order(in_flight="recompute"))
        bench.switch(1)
        await settle()
        assert (bench.requests.waiting(), bench.core.engine.waiting) == (1, 0)
        bench.arrive(0)
        await settle()
        assert bench.core.engine.waiting == (not refused)
        bench.arrive(1)
        await bench.compute("r", 16)
        assert bench.take() == chain((1, 16)), "it switched before its first token, or began with the newer one"
        assert bench.requests.failed == 0


async def test_tokens_keep_their_versions_over_a_broken_link(tmp_path: Path) -> None:
    bench = Bench(tmp_path, 0, 1, 2)
    bench.requests.generate(order(in_flight="recompute"))
    await bench.compute("r", 4)
    bench.switch(1)
    await bench.compute("r", 7)
    received = bench.take()
    await bench.compute("r", 9)
    bench.requests.on_disconnect(1.0)
    assert bench.requests.take(1.0) == []
    # meanwhile another version was published: the frame that said so was lost with the link
    claim = order(number=2, prefix_tokens=received.tokens[:2], in_flight="recompute")
    other = msgspec.structs.replace(claim.adapter, sources=["http://peer"])  # type: ignore[type-var]
    bench.requests.generate(msgspec.structs.replace(claim, adapter=other))
    await bench.compute("r", 16)
    rest = bench.take()
    whole = chain((0, 4), (1, 9), (2, 16))
    assert received == Said(whole.tokens[:7], whole.logprobs[:7], whole.versions[:7])
    assert rest == Said(whole.tokens[2:], whole.logprobs[2:], whole.versions[2:], "length")
    assert bench.core.engine.generated == 16, "nothing was sampled twice"


@pytest.mark.parametrize(("number", "in_flight"), [(0, "recompute"), (2, "finish")])
async def test_a_folder_without_its_claim_begins_again(tmp_path: Path, number: int, in_flight: str) -> None:
    """An older version than it runs on; a newer one of a request that finishes on its own."""
    bench = Bench(tmp_path, 0, 1, 2)
    bench.requests.generate(order(number=1, in_flight=in_flight))
    await bench.compute("r", 5)
    bench.take()
    bench.requests.on_disconnect(1.0)
    bench.requests.generate(order(number=number, in_flight=in_flight, assignment="again"))
    await bench.compute("r", 16)
    assert bench.take() == chain((number, 16))


async def test_messages_of_an_earlier_assignment_change_nothing(tmp_path: Path) -> None:
    """The request continues under the name of its present assignment; its chunks carry that."""
    bench = Bench(tmp_path, 0, 1)
    bench.requests.generate(order(in_flight="recompute", assignment="1"))
    await bench.compute("r", 5)
    received = bench.take()
    bench.requests.on_disconnect(1.0)
    bench.requests.generate(order(in_flight="recompute", assignment="2", prefix_tokens=received.tokens[:3]))
    bench.requests.abort(protocol.Abort(request="r", assignment="1"))
    bench.requests.abort(protocol.Abort(request="r", assignment="1", resume=True))
    bench.requests.switch(protocol.SwitchAdapter(request="r", assignment="1", adapter=version(1)))
    await bench.compute("r", 16)
    rest = bench.take()
    assert received.tokens[:3] + rest.tokens == chain((0, 16)).tokens and set(rest.versions) == {0}
    assert [chunk.assignment for chunk in bench.sent] == ["1"] + ["2"] * (len(bench.sent) - 1)
    assert bench.core.engine.generated == 16, "nothing is sampled twice"
    bench.requests.abort(protocol.Abort(request="r", assignment="2"))
    assert not bench.requests.held
