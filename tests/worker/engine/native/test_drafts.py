"""Speculative decoding in the engine: whatever the drafts are, texts and log-probabilities are the same bits."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.chaos.mutations import DRAFT_UNCHECKED, applied
from tests.support.draws import examples
from tests.support.tiny import native_engine, small, trained_adapter
from tests.worker.engine.test_exactness import BEST, RANKS, RUNNERS

from rookery import protocol
from rookery.scheduling.speculation import DraftAccount, StepCosts
from rookery.worker.engine.native.drafts import Speculator, SuffixIndex
from rookery.worker.engine.native.engine import NativeEngine
from rookery.worker.engine.native.runner import DenseRunner, KernelRunner
from rookery.worker.engine.request import EngineRequest, StopStrings
from rookery.worker.model.adapter import Adapter
from rookery.worker.model.lora import LoraManager

VOCABULARY = 211
Texts = dict[str, tuple[list[int], list[float], list[int], str]]
"""Of each request: tokens, log-probabilities, versions, finish."""


class Told(Speculator):
    """Drafts what it is told, as long as there is room, and counts tokens that could not be verified."""

    def __init__(self, draft: Callable[[EngineRequest], Sequence[int]]) -> None:
        super().__init__()
        self.told = draft

    def propose(self, rows: Sequence[EngineRequest], room: Sequence[int], **_: bool) -> list[list[int]]:
        return [list(self.told(row))[: max(most, 0)] for row, most in zip(rows, room, strict=True)]


def make(
    speculator: Speculator | None, runner: type[KernelRunner | DenseRunner] = BEST, **options: int
) -> NativeEngine:
    decoder = small("llama")
    loras = LoraManager(decoder.config, decoder.dtype, decoder.device, 64)
    for key, weights in adapters().items():
        loras.add(key, weights)
    kept = {"max_rows": 8, "kv_budget_bytes": 1 << 26, **options}
    made = runner(decoder, loras, kept["kv_budget_bytes"])
    text = lambda tokens: "".join(chr(65 + t % 26) for t in tokens)  # noqa: E731
    return native_engine(decoder, loras, text, runner=made, speculator=speculator, **kept)


@cache
def adapters() -> dict[str, Adapter]:
    return {key: trained_adapter(small("llama"), rank, seed) for seed, (key, rank) in enumerate(RANKS.items())}


@cache
def plain_texts(temperature: float) -> Texts:
    return run(make(None), orders_of(temperature))


def version(key: str, number: int = 1, policy: str = "") -> protocol.AdapterRef:
    return protocol.AdapterRef(policy=policy or key, version=number, hash=key, rank=RANKS[key], alpha=1.0)


def order(name: str, key: str = "a", **changes: Any) -> protocol.Generate:
    plain: dict[str, Any] = {
        "adapter": version(key) if key else None, "prompt": prompt(), "shared_prefix": 20, "max_tokens": 24,
        "temperature": 1.0, "seed": sum(map(ord, name)), "stop_tokens": [], "group": f"group of {key}",
    }  # fmt: skip
    return protocol.Generate(request=name, **{**plain, **changes})


def prompt(seed: int = 0, length: int = 20) -> list[int]:
    return torch.randint(0, VOCABULARY, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def run(engine: NativeEngine, orders: Sequence[protocol.Generate]) -> Texts:
    for one in orders:
        engine.submit(one)
    return finish(engine, {})


def finish(engine: NativeEngine, texts: Texts) -> Texts:
    while True:
        busy = engine.step() or engine.active or engine.waiting
        take(engine, texts)
        if not busy:
            assert engine.store.used_tokens == 0
            return texts


def take(engine: NativeEngine, texts: Texts) -> None:
    for chunk in engine.drain():
        tokens, logprobs, versions, _ = texts.get(chunk.request, ([], [], [], ""))
        versions = versions + [chunk.version] * len(chunk.tokens)
        texts[chunk.request] = (tokens + chunk.tokens, logprobs + chunk.logprobs, versions, chunk.finish)


def mixed(texts: Texts, right: float, gamma: int, seed: int = 0) -> Told:
    """Drafts of up to ``gamma`` tokens of ``texts``, each right with this probability."""
    source = random.Random(seed)

    def draft(row: EngineRequest) -> list[int]:
        coming = texts[row.params.request][0][len(row.tokens) - len(row.params.prefix_tokens) :][:gamma]
        return [token if source.random() < right else source.randrange(VOCABULARY) for token in coming]

    return Told(draft)


def orders_of(temperature: float) -> list[protocol.Generate]:
    """Two groups of different tenants, a chat, one resumed, and ends of every kind."""
    group = [order(f"a{i}", temperature=temperature) for i in range(3)]
    other = [order(f"b{i}", "b", prompt=prompt(1, 9), shared_prefix=5, temperature=temperature) for i in range(2)]
    return [
        *group,
        *other,
        order("base", "", group="", temperature=temperature, max_tokens=17, client=True, reserved=True),
        order("resumed", "c", prefix_tokens=prompt(2, 5), temperature=temperature, group="of c"),
        order("stopped", "a", stop_tokens=list(range(0, VOCABULARY, 7)), temperature=temperature),
        order("string", "a", stop=["A", "BC"], temperature=temperature),
        order("short", "b", max_tokens=2, temperature=temperature, episode="e"),
    ]


@pytest.mark.parametrize("runner", RUNNERS)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("gamma", [1, 8])
def test_texts_are_the_same_with_drafts(gamma: int, temperature: float, runner: type[DenseRunner]) -> None:
    orders = orders_of(temperature)
    plain_engine = make(None, runner)
    plain = run(plain_engine, orders)
    assert runner is not BEST or plain == plain_texts(temperature)
    assert {finish for *_, finish in plain.values()} == {"length", "stop"}
    engine = make(mixed(plain, 0.8, gamma), runner)
    assert run(engine, orders) == plain
    assert 0 < engine.stats["accepted_tokens"] < engine.stats["draft_tokens"]
    assert engine.generated == plain_engine.generated
    assert engine.stats["decode_steps"] < plain_engine.stats["decode_steps"]


@settings(max_examples=examples(10), deadline=None)
@given(
    seed=st.integers(0, 1 << 30),
    right=st.sampled_from([0.0, 0.5, 0.9, 1.0]),
    gamma=st.integers(1, 12),
    temperature=st.sampled_from([0.0, 0.7, 1.0, 1.5]),
    rows=st.integers(1, 6),
    tokens=st.sampled_from([260, 420, 5000]),
)
def test_any_drafts_in_any_room(
    seed: int, right: float, gamma: int, temperature: float, rows: int, tokens: int
) -> None:
    """Also where the cache is full and requests are preempted: a draft takes no room from a row."""
    orders = orders_of(temperature)[: 3 + seed % 8]
    plain = plain_texts(temperature)
    token = make(None).store.token_bytes
    engine = make(mixed(plain, right, gamma, seed), max_rows=rows, kv_budget_bytes=token * tokens)
    assert run(engine, orders) == {one.request: plain[one.request] for one in orders}
    assert right == 0.0 or engine.stats["accepted_tokens"] > 0


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("cut", [2, 6, 13])
def test_a_version_that_comes_between_two_steps(cut: int, recompute: bool) -> None:
    """The engine with drafts reaches the same number of tokens, drafted up to there, and switches."""

    def go(speculator: Speculator | None) -> Texts:
        engine, texts = make(speculator), Texts()
        engine.submit(order("r", adapter=version("a", 1, "p"), in_flight="switch"))
        while len(texts.get("r", ([],))[0]) < cut:
            engine.step()
            take(engine, texts)
        assert len(texts["r"][0]) == cut
        engine.switch_adapter("r", version("b", 2, "p"), recompute=recompute)
        return finish(engine, texts)

    plain = go(None)
    assert plain["r"][2] == [1] * cut + [2] * (24 - cut)

    def draft(row: EngineRequest) -> list[int]:
        at = len(row.tokens)
        return plain["r"][0][at : min(at + 4, cut - 1)] if at < cut else [*plain["r"][0][at : at + 3], 7]

    assert go(Told(draft)) == plain


def test_the_next_turn_extends_the_cache_that_a_draft_left() -> None:
    """A text that ends inside its draft leaves a cache with only its own tokens."""
    first = order("t0", max_tokens=10, episode="e")
    plain_engine = make(None)
    plain = run(plain_engine, [first])
    said = plain["t0"][0]
    later = order("t1", prompt=[*prompt(), *said, 3, 4, 5], shared_prefix=20, episode="e")
    wanted = run(plain_engine, [later])
    engine = make(Told(lambda row: [*(said[len(row.tokens) :][:3] if row.params.request == "t0" else []), 1, 2, 3]))
    assert run(engine, [first]) == plain
    assert run(engine, [later]) == wanted
    assert engine.stats["reused_tokens"] == plain_engine.stats["reused_tokens"] > 0
    ends = order("t2", stop_tokens=[said[4]], episode="f")
    plain = run(plain_engine, [ends])
    engine = make(Told(lambda row: said[len(row.tokens) :][:8]))
    assert run(engine, [ends]) == plain


def test_an_unchecked_draft_is_noticed() -> None:
    orders, plain = orders_of(1.0), plain_texts(1.0)
    with applied(DRAFT_UNCHECKED):
        assert run(make(mixed(plain, 0.8, 4)), orders) != plain


class Free(StepCosts):
    """As if a step took as long with any number of positions."""

    def observe(self, rows: int, positions: int, seconds: float) -> None:
        """Whatever this machine's steps take."""

    def seconds(self, rows: int, drafts: int) -> np.ndarray:
        return np.ones(drafts + 1)


class AlwaysOn(DraftAccount):
    """As if drafts never cost anything."""

    def allows(self, rows: int) -> bool:
        return True


def free(**bounds: int) -> Speculator:
    return Speculator(Free, AlwaysOn, **bounds)


def test_drafts_come_from_siblings_only() -> None:
    """A greedy group: whoever comes later says what the first said. Equal texts of another tenant, of a request without
    a group, or of another group are not known."""

    def go(speculator: Speculator, second: protocol.Generate) -> int:
        """Decode steps of the second request."""
        engine = make(speculator)
        first = run(engine, [order("one", temperature=0.0, max_tokens=60)])["one"]
        before = engine.stats["decode_steps"]
        said = run(engine, [second])[second.request]
        assert second.adapter is None or second.adapter.hash != "a" or said[:2] == first[:2]
        return int(engine.stats["decode_steps"] - before)

    plain: dict[str, Any] = {"temperature": 0.0, "max_tokens": 60}
    assert go(free(), order("two", **plain)) < 20
    for stranger in (
        order("two", **plain, group=""),
        order("two", **plain, group="another"),
        order("two", **plain, adapter=version("a", 1, "another tenant's policy of the same bytes")),
    ):
        assert go(free(), stranger) > 20


@settings(max_examples=examples(60), deadline=None)
@given(st.lists(st.lists(st.integers(0, 3), max_size=30), min_size=1, max_size=4), st.integers(0, 1 << 30))
def test_a_draft_has_the_tokens_that_followed_the_longest_suffix(texts: list[list[int]], seed: int) -> None:
    index, states = SuffixIndex(), [0] * len(texts)
    source, said = random.Random(seed), [list[int]() for _ in texts]
    for _ in range(sum(map(len, texts))):  # the texts grow beside each other
        which = source.choice([i for i, text in enumerate(texts) if len(said[i]) < len(text)])
        said[which].append(texts[which][len(said[which])])
        states[which] = index.extend(states[which], said[which][-1])
    for text, state in zip(texts, states, strict=True):
        followed = Counter[int]()
        matched = len(text)
        while matched and not (followed := _followers(text[len(text) - matched :], texts)):
            matched -= 1
        draft = index.draft(state, 1)
        assert bool(draft) == bool(followed)
        if draft:
            token, length, share = draft[0]
            assert length == matched and followed[token] == max(followed.values())
            assert share == pytest.approx(followed[token] / followed.total())
    assert len(index) <= 1 + 2 * sum(map(len, texts))


def _followers(suffix: Sequence[int], texts: Sequence[Sequence[int]]) -> Counter[int]:
    size = len(suffix)
    return Counter(
        text[at + size]
        for text in texts
        for at in range(len(text) - size)
        if list(text[at : at + size]) == list(suffix)
    )


@pytest.mark.parametrize(("idle", "states"), [(3, 1 << 17), (64, 600)])
def test_memory_is_bounded_and_freed(idle: int, states: int) -> None:
    speculator, text = free(max_idle=idle, max_states=states), 2 * (20 + 100)

    def draft(name: str, group: str, seed: int) -> None:
        request = EngineRequest(
            order(name, group=group), "", StopStrings([], str), protocol.TokenLog(prompt(seed, 100))
        )
        speculator.begin(request)
        speculator.observe(1, 1, 1, 1e3)
        speculator.propose([request], [8])
        speculator.end(request)

    for group in range(8):
        for member in range(2):
            draft(f"{group}-{member}", f"g{group}", 10 * group + member)
    before = speculator.states
    assert text < before <= min(idle * 2 * text, states + text)
    draft("alone", "", 3)
    assert 0 < speculator.states <= before


def test_steps_of_a_lane_have_separate_costs() -> None:
    """Drafts that pay on all cores are not tried on a part of them before a plain step was seen there."""
    speculator = Speculator()
    request = EngineRequest(order("r", group="g"), "", StopStrings([], str), protocol.TokenLog([1, 2] * 50))
    speculator.begin(request)
    for beside in (False, True):
        assert speculator.propose([request], [8], beside=beside) == [[]]
        speculator.observe(1, 1, 1, 1e3, beside=beside)
        assert speculator.propose([request], [8], beside=beside) == [[1]]
        speculator.observe(1, 2, 2, 1e3, beside=beside)


def test_texts_without_an_index_are_bounded() -> None:
    """While drafts do not pay, texts of a group that goes on were kept until its end."""
    speculator = free(max_states=500, at_once=300)
    requests = [
        EngineRequest(order(str(i), group="g"), "", StopStrings([], str), protocol.TokenLog(prompt(i, 100)))
        for i in range(20)
    ]
    for request in requests:
        speculator.begin(request)
    for request in requests[:-1]:
        speculator.end(request)
    assert 0 < speculator.unread <= 500
    before = speculator.states
    for _ in range(3):
        speculator.propose(requests[-1:], [8])
        assert speculator.states - before <= 2 * 300, "a step does not wait for all of them"
        before = speculator.states
    assert speculator.unread == 0 < speculator.states
    speculator.end(requests[-1])
    assert speculator.unread == 0
