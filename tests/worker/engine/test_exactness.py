"""Promise 9 on CPU, in the type that workers compute in here, without exceptions: a request's logits and text are the
same bits alone, batched, beside other tenants, resumed from the middle, and on its next turn with the cache kept or
lost."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.draws import examples
from tests.support.tiny import COMPUTED, FAMILIES, divide, native_engine, small, smollm2, trained_adapter

from rookery import protocol
from rookery.worker.engine.native import kernels
from rookery.worker.engine.native.engine import NativeEngine
from rookery.worker.engine.native.runner import DenseRunner, KernelRunner
from rookery.worker.model.batch_invariance import LANES
from rookery.worker.model.decoder import Decoder
from rookery.worker.model.lora import LoraManager

BEST: type[KernelRunner | DenseRunner] = KernelRunner if kernels.load(None) else DenseRunner
"""The configuration of workers here."""
RUNNERS = list(dict.fromkeys((BEST, DenseRunner)))
DENSE = ("llama", "llama one head", "mistral window", "qwen3", "smollm3")
"""Families that differ in attention, checked without kernels too."""
RANKS = {"a": 16, "b": 4, "c": 32, "d": 16}


class Recorder(Decoder):
    """Keeps every row of logits that is ever projected, by its bits."""

    rows: set[bytes]

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        logits = super().compute_logits(hidden)
        self.rows.update(row.view(torch.uint8).numpy().tobytes() for row in logits)
        return logits


def world(
    decoder: Decoder, runner: type[KernelRunner | DenseRunner] = BEST, **options: int
) -> tuple[NativeEngine, Recorder]:
    recorder = Recorder.__new__(Recorder)
    recorder.__dict__.update(decoder.__dict__)
    recorder.rows = set()
    loras = LoraManager(decoder.config, decoder.dtype, decoder.device, 64)
    for seed, (key, rank) in enumerate(RANKS.items()):
        loras.add(key, trained_adapter(decoder, rank, seed))
    kept = {"max_rows": 32, "kv_budget_bytes": 1 << 28, **options}
    made = runner(recorder, loras, kept["kv_budget_bytes"])
    engine = native_engine(
        recorder, loras, lambda tokens: "".join(chr(65 + t % 26) for t in tokens), runner=made, **kept
    )
    return engine, recorder


def order(
    name: str,
    key: str,
    prompt: Sequence[int],
    shared: int,
    *,
    prefix_tokens: Sequence[int] = (),
    max_tokens: int = 8,
    seed: int = 1,
    temperature: float = 1.0,
    episode: str = "",
) -> protocol.Generate:
    ref = protocol.AdapterRef(policy=key, version=3, hash=key, rank=RANKS[key], alpha=1.0) if key else None
    return protocol.Generate(
        request=name,
        adapter=ref,
        prompt=list(prompt),
        shared_prefix=shared,
        prefix_tokens=list(prefix_tokens),
        max_tokens=max_tokens,
        temperature=temperature,
        seed=seed,
        stop_tokens=[],
        episode=episode,
    )


def run(engine: NativeEngine, orders: Sequence[protocol.Generate]) -> dict[str, tuple[list[int], list[float]]]:
    """Tokens and log-probabilities of each request, sampled ones only."""
    results: dict[str, tuple[list[int], list[float]]] = {o.request: ([], []) for o in orders}
    for o in orders:
        engine.submit(o)
    finished = set()
    while engine.step() or engine.active or engine.waiting:
        for chunk in engine.drain():
            results[chunk.request][0].extend(chunk.tokens)
            results[chunk.request][1].extend(chunk.logprobs)
            if chunk.finish:
                finished.add(chunk.request)
                assert chunk.finish == "length", chunk.error
    for chunk in engine.drain():
        results[chunk.request][0].extend(chunk.tokens)
        results[chunk.request][1].extend(chunk.logprobs)
        finished.add(chunk.request)
    assert finished == set(results)
    return results


def prompt(decoder: Decoder, seed: int, length: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, decoder.config.vocab, (length,), generator=generator).tolist()


def check_everything(
    decoder: Decoder,
    key: str,
    length: int,
    shared: int,
    max_tokens: int,
    cut: int,
    temperature: float,
    company: int,
    runner: type[KernelRunner | DenseRunner] = BEST,
) -> None:
    text = prompt(decoder, length, length)
    about = {"max_tokens": max_tokens, "temperature": temperature, "seed": 5}
    engine, recorder = world(decoder, runner)
    alone = run(engine, [order("x", key, text, shared, **about)])["x"]
    rows = recorder.rows

    # beside members of its group, other tenants with other adapters, and the bare base
    others = [order(f"g{i}", key, [*text[:shared], i], shared, seed=i, max_tokens=3 + i) for i in range(3)]
    for i in range(company):
        theirs = prompt(decoder, 100 + i, 1 + 17 * i % 61)
        others.append(order(f"o{i}", ["a", "b", "c", "d", ""][i % 5], theirs, len(theirs) * (i % 3) // 2, seed=i))
    engine, recorder = world(decoder, runner)
    batched = run(engine, [*others[::2], order("x", key, text, shared, **about), *others[1::2]])["x"]
    assert batched == alone
    assert rows <= recorder.rows

    # in slices of prefill that cut the prompt elsewhere, with hardly any room
    engine, recorder = world(decoder, runner, prefill_tokens=7, max_rows=2)
    assert run(engine, [*others[:2], order("x", key, text, shared, **about)])["x"] == alone
    assert rows <= recorder.rows

    # resumed from the middle by another worker
    engine, recorder = world(decoder, runner)
    resumed = run(engine, [order("x", key, text, shared, prefix_tokens=alone[0][:cut], **about), *others[:2]])["x"]
    assert resumed == (alone[0][cut:], alone[1][cut:])
    assert recorder.rows & rows

    # the next turn, with the cache kept and with it lost
    engine, recorder = world(decoder, runner)
    run(engine, [order("x", key, text, shared, episode="e", **about)])
    before = engine.stats["reused_tokens"]
    longer = text + alone[0] + prompt(decoder, 7, 1 + cut)
    kept = run(engine, [order("y", key, longer, shared, episode="e", **about), *others])["y"]
    assert engine.stats["reused_tokens"] - before >= len(text) - shared + max_tokens - 1
    engine, lost = world(decoder, runner)
    assert run(engine, [order("y", key, longer, shared, **about)])["y"] == kept
    assert lost.rows <= recorder.rows


@pytest.mark.parametrize(
    ("family", "runner"),
    [*((family, BEST) for family in FAMILIES), *((family, DenseRunner) for family in DENSE if BEST is not DenseRunner)],
)
def test_every_family(family: str, runner: type[KernelRunner | DenseRunner]) -> None:
    check_everything(small(family), "a", 41, 20, 9, 4, 1.0, 7, runner)


@settings(max_examples=examples(5))
@given(
    family=st.sampled_from(["llama", "mistral window", "qwen3", "llama one head"]),
    key=st.sampled_from(["", *RANKS]),
    length=st.integers(1, 200),
    share=st.floats(0, 1),
    max_tokens=st.integers(2, 40),
    cut=st.floats(0, 1),
    temperature=st.sampled_from([0.0, 0.7, 1.0, 1.5]),
    company=st.integers(0, 12),
)
def test_any_lengths(
    family: str, key: str, length: int, share: float, max_tokens: int, cut: float, temperature: float, company: int
) -> None:
    middle = min(int(cut * max_tokens), max_tokens - 1)
    check_everything(small(family), key, length, int(share * length), max_tokens, middle, temperature, company)


@pytest.mark.parametrize(("length", "shared"), [(180, 0), (330, 190), (390, 385)])
def test_where_a_contraction_over_the_keys_is_cut(length: int, shared: int) -> None:
    """Texts and prefixes that grow past 192 and 384 keys (``worker/model/batch_invariance.py``)."""
    check_everything(small("llama"), "b", length, shared, 24, 11, 1.0, 2, DenseRunner)


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("threads", "length", "shared", "max_tokens", "runner"),
    [
        (2, 48, 48, 12, BEST),
        (1, 60, 30, 12, DenseRunner),
        (3, 230, 5, 6, BEST),
    ],
)
def test_smollm2(
    threads: int, length: int, shared: int, max_tokens: int, runner: type[KernelRunner | DenseRunner]
) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        check_everything(smollm2(), "c", length, shared, max_tokens, max_tokens // 2, 1.0, 4, runner)
    finally:
        torch.set_num_threads(before)


@pytest.mark.skipif(torch.bfloat16 != COMPUTED, reason="divided products are bfloat16's")
def test_divided_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where tile instructions multiply, on any processor."""
    divide(monkeypatch, depth=LANES, rows=8)
    check_everything(small.__wrapped__("llama"), "b", 90, 40, 24, 11, 1.0, 7, DenseRunner)


def test_a_budget_too_small_for_all_only_delays() -> None:
    decoder = small("llama")
    text = prompt(decoder, 0, 30)
    orders = [order(f"r{i}", "abcd"[i % 4], [*text, i], 31, seed=i, max_tokens=60) for i in range(12)]
    engine, _ = world(decoder)
    plenty = run(engine, orders)
    token = engine.store.token_bytes
    engine, _ = world(decoder, kv_budget_bytes=token * 450)
    assert run(engine, orders) == plenty
    assert engine.stats["preempted"] > 0
    assert engine.store.tokens <= 450 and engine.store.used_tokens == 0
