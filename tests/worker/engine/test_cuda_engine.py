"""The GPU's way to generate, run on the CPU in float32: the same texts as the CPU's engine, whatever happens to them.

Log-probabilities agree within 1e-4 (sums in another order). Only the fused kernels and the CUDA graphs are missing:
``worker/model/decoder.py`` computes by plain products here, and a recorded step runs as it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.support.tiny import native_engine, small, trained_adapter
from tests.worker.engine.test_exactness import RANKS, order, prompt, run
from torch import Tensor

from rookery import protocol
from rookery.worker.engine.kv_cache import KVCache, KVSlot
from rookery.worker.engine.native.cuda.graph_runner import LEAST_KEYS, MAX_GRAPHS, CudaGraphRunner, bucket
from rookery.worker.engine.native.engine import NativeEngine
from rookery.worker.engine.sequences import SequenceChunk
from rookery.worker.model.adapter import PARTS, Adapter, init_adapter
from rookery.worker.model.batch_invariance import LANES, key_capacity
from rookery.worker.model.decoder import Decoder
from rookery.worker.model.lora import GroupedMatmul, LoraManager, batched_matmul, grouped_matmul

pytestmark = pytest.mark.heavy

CLOSE = 1e-4


def dense(decoder: Decoder, **options: int) -> NativeEngine:
    return _engine(decoder, None, **options)


def pooled(decoder: Decoder, product: GroupedMatmul = grouped_matmul, **options: int) -> NativeEngine:
    return _engine(decoder, product, **options)


def _engine(
    decoder: Decoder, product: GroupedMatmul | None, *, kv: int = 1 << 26, most_graphs: int = MAX_GRAPHS, **options: int
) -> NativeEngine:
    loras = LoraManager(decoder.config, decoder.dtype, decoder.device, 64)
    for seed, (key, rank) in enumerate(RANKS.items()):
        loras.add(key, trained_adapter(decoder, rank, seed))
    runner = CudaGraphRunner(decoder, loras, kv, product, most_graphs) if product is not None else None
    return native_engine(
        decoder, loras, lambda tokens: "", **{"max_rows": 32, "prefill_tokens": 64, "kv_budget_bytes": kv, **options},
        runner=runner,
    )  # fmt: skip


def mixed(decoder: Decoder, *, episode: str = "") -> list[protocol.Generate]:
    """Groups that share a prompt wholly and in part, texts of their own, four adapters of three ranks and none."""
    orders = []
    for i in range(14):
        text = prompt(decoder, i // 3, 5 + 37 * (i // 3))
        key = ["a", "b", "c", "d", ""][i // 3 % 5]
        shared = [len(text), len(text) // 2, 0][i // 3 % 3]
        own = [] if shared == len(text) else [i]
        orders.append(
            order(f"r{i}", key, text + own, shared, seed=i, max_tokens=6 + 5 * i, temperature=0.5 * (i % 3),
                  episode=f"{episode}{i}" if episode else "")
        )  # fmt: skip
    return orders


def same(ours: dict[str, tuple[list[int], list[float]]], theirs: dict[str, tuple[list[int], list[float]]]) -> None:
    assert ours.keys() == theirs.keys()
    for name, (tokens, logprobs) in ours.items():
        assert tokens == theirs[name][0], name
        assert logprobs == pytest.approx(theirs[name][1], abs=CLOSE)


@cache
def texts_of_the_cpu(family: str) -> dict[str, tuple[list[int], list[float]]]:
    decoder = small(family, torch.float32)
    return run(dense(decoder), mixed(decoder))


@pytest.mark.parametrize(
    ("family", "product"),
    [
        *((family, grouped_matmul) for family in ("llama", "mistral window", "qwen2 window", "qwen3", "smollm3")),
        *((family, batched_matmul) for family in ("llama one head", "qwen3")),
    ],
)
def test_the_texts_are_those_of_the_cpu(family: str, product: GroupedMatmul) -> None:
    decoder = small(family, torch.float32)
    same(run(pooled(decoder, product), mixed(decoder)), texts_of_the_cpu(family))


def test_too_little_room_only_delays() -> None:
    decoder = small("llama", torch.float32)
    orders = mixed(decoder)
    token = 2 * decoder.config.layers * decoder.config.kv_heads * decoder.config.head_dim * 4
    tight = pooled(decoder, kv=token * 700)
    same(run(tight, orders), texts_of_the_cpu("llama"))
    assert tight.stats["preempted"] > 0
    assert tight.store.used_tokens == 0


def test_a_next_turn_takes_up_its_cache_where_it_lies() -> None:
    decoder = small("qwen3", torch.float32)
    ours, theirs = pooled(decoder), dense(decoder)
    first = mixed(decoder, episode="e")
    told = run(ours, first)
    same(told, run(theirs, first))
    second = []
    for one in first:
        longer = [*one.prompt, *told[one.request][0], 3, 1, 4]
        key = one.adapter.hash if one.adapter is not None else ""
        second.append(
            order(one.request + "+", key, longer, one.shared_prefix, seed=9, max_tokens=20, episode=one.episode)
        )
    before = ours.stats["reused_tokens"]
    same(run(ours, second), run(theirs, second))
    assert ours.stats["reused_tokens"] > before
    assert ours.store.used_tokens == 0


def test_a_request_that_switches_version_continues_as_on_the_cpu() -> None:
    decoder = small("llama", torch.float32)
    texts = []
    for engine in (pooled(decoder), dense(decoder)):
        for i in range(2):
            engine.submit(order(f"r{i}", "a", [*range(40), i], 40, seed=i, max_tokens=30))
        for _ in range(8):
            engine.step()
        for i, recompute in enumerate((True, False)):
            ref = protocol.AdapterRef(policy="a", version=4, hash="d", rank=16, alpha=1.0)
            assert engine.switch_adapter(f"r{i}", ref, recompute=recompute)
        while engine.step():
            pass
        texts.append({chunk.request: (chunk.version, chunk.tokens) for chunk in engine.drain()})
    assert texts[0] == texts[1]


def test_an_invalid_adapter_affects_no_other_adapter() -> None:
    decoder = small("llama", torch.float32)
    clean = run(dense(decoder), [order("r", "a", [1, 2, 3], 3)])["r"][0]
    for product in (grouped_matmul, batched_matmul):
        engine = pooled(decoder, product)
        fresh = init_adapter(decoder.config, 8, 16.0, list(PARTS), 0)
        broken = {site: (a, torch.full_like(b, torch.nan)) for site, (a, b) in fresh.weights.items()}
        engine.loras.add("broken", Adapter(8, 16.0, broken))
        ref = protocol.AdapterRef(policy="p", version=1, hash="broken", rank=8, alpha=16.0)
        texts: dict[str, list[int]] = {}
        for i in range(5):
            bad = order(f"bad{i}", "", [1, 2, 3, i], i % 4)
            engine.submit(protocol.Generate(**{f: getattr(bad, f) for f in bad.__struct_fields__} | {"adapter": ref}))
        engine.submit(order("r", "a", [1, 2, 3], 3))
        ends = {}
        while engine.step() or engine.active:
            for chunk in engine.drain():
                texts.setdefault(chunk.request, []).extend(chunk.tokens)
                ends[chunk.request] = chunk.finish
        assert texts["r"] == clean
        assert {ends[f"bad{i}"] for i in range(5)} == {"error"}
        # nor do the ranges that it leaves full of NaN harm who comes next
        assert run(engine, [order("r2", "a", [1, 2, 3], 3)])["r2"][0] == clean


@pytest.mark.parametrize("most", [50, 200])
def test_a_slice_of_prefill_copies_a_bounded_number_of_keys(most: int) -> None:
    """However few tokens each text adds to a long shared prompt; one alone is computed whatever it looks at."""
    decoder = small("llama", torch.float32)
    engine, seen = pooled(decoder, prefill_keys=most), []
    prefill = engine.runner.prefill

    def counted(streams: Sequence[SequenceChunk]) -> tuple[Tensor, Tensor]:
        seen.append([s.prefix_length + s.start + len(s.tokens) for s in streams])
        return prefill(streams)

    engine.runner.prefill = counted  # type: ignore[method-assign]
    text = prompt(decoder, 0, 60)
    orders = [order(f"r{i}", "", [*text, i, i + 1], len(text), seed=i) for i in range(12)]
    orders += [order(f"w{i}", "", prompt(decoder, i, 20), 20, seed=i) for i in range(30)]  # more than there are rows
    same(run(engine, orders), run(dense(decoder), orders))
    assert all(sum(keys) <= most or len(keys) == 1 for keys in seen)
    assert max(map(len, seen)) == (2 if most == 50 else 3), "and no fewer than it may"


def test_recorded_steps_are_dropped_when_the_adapters_move_and_only_then() -> None:
    decoder = small("llama", torch.float32)
    engine = pooled(decoder)
    runner = engine.runner
    assert isinstance(runner, CudaGraphRunner)
    address = runner.store.k.data_ptr()
    run(engine, [order("base", "", [5, 6, 7], 0)])
    run(engine, [order("one", "b", [5, 6, 7], 0)])
    kept = dict(runner.graphs)
    assert {of.adapters for of in kept} == {0, 4}
    run(engine, [order("two", "d", [5, 6, 7], 0, max_tokens=150), order("three", "b", [8], 0)])  # a place was free
    run(engine, [order("four", "a", [5, 6, 7], 0, max_tokens=150)])  # fewer targets; the others idle meanwhile
    assert all(runner.graphs[of] is step for of, step in kept.items())
    run(engine, [order("five", "c", [5, 6, 7], 0)])  # a larger rank: other tensors
    now = runner.graphs
    assert all((now.get(of) is step) == (of.adapters == 0) for of, step in kept.items())
    assert runner.store.k.data_ptr() == address


def test_prefill_leaves_adapters_where_recorded_steps_know_them() -> None:
    """Also where it multiplies each one's rows apart, and those that run have not stood side by side for long."""
    decoder = small("llama", torch.float32)
    engine = pooled(decoder, batched_matmul)
    runner = engine.runner
    assert isinstance(runner, CudaGraphRunner)
    runner.prepare_adapters(["a", "c", "b"])  # the one of the largest rank between
    turns = [[order(f"{key}{turn}", key, [5, 6, 7 + turn], 0) for key in "ab"] for turn in range(2)]
    texts = run(engine, turns[0])
    kept, state = dict(runner.graphs), engine.loras.slots.layout_version
    texts |= run(engine, turns[1])
    assert kept and engine.loras.slots.layout_version == state
    assert all(runner.graphs[of] is step for of, step in kept.items())
    same(texts, run(dense(decoder), [*turns[0], *turns[1]]))


# --- the parts that are pure ----------------------------------------------------------------------------------------


@given(rows=st.integers(1, 600), keys=st.integers(1, 1 << 17), prefix=st.integers(0, 1 << 17), places=st.integers(0, 9))
def test_a_bucket_holds_its_step_and_wastes_little(rows: int, keys: int, prefix: int, places: int) -> None:
    of = bucket(rows, keys, prefix, places)
    assert rows <= of.rows <= max(1, rows * 3 // 2)
    assert keys <= of.keys <= max(LEAST_KEYS, 4 * keys)
    assert prefix <= of.prefix and (of.prefix == 0) == (prefix == 0)
    assert bucket(of.rows, of.keys, of.prefix, places) == of, "what is padded is padded to itself"


def test_few_buckets_serve_many_steps() -> None:
    assert len({bucket(rows, 1, 0, 0) for rows in range(1, 257)}) == 16
    assert len({bucket(1, keys, 0, 0) for keys in range(1, 1 << 16)}) == 4


def test_the_number_of_graphs_is_bounded() -> None:
    decoder = small("llama", torch.float32)
    engine = pooled(decoder, most_graphs=2)
    assert isinstance(engine.runner, CudaGraphRunner)
    orders = [order(f"r{i}", "", [5, 6, 7 + i], 0, max_tokens=3 + 2 * i) for i in range(4)]
    texts = run(engine, orders)  # steps of 4, 3, 2 and 1 rows
    assert {shape.rows for shape in engine.runner.graphs} == {1, 2}
    same(texts, run(dense(decoder), orders))


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(1, 300), st.integers(0, 9)), max_size=60))
def test_ranges_of_the_pool_never_overlap(steps: list[tuple[int, int, int]]) -> None:
    config = small("llama").config
    token = 2 * config.layers * config.kv_heads * config.head_dim * 2
    pool = KVCache(config, torch.bfloat16, "cpu", 1500 * token)
    held: list[KVSlot] = []
    for what, length, which in steps:
        if what < 2:
            place = pool.allocate(length)
            if place is not None:
                held.append(place)
            else:
                assert not pool.retained, "parked segments make room first"
        elif held:
            place = held.pop(which % len(held))
            if what == 2:
                pool.free(place)
            elif what == 3:
                pool.retain(place, which, None, 0.0)
            else:
                held.append(pool.resize(place, length) or place)
            if what == 3 and length % 2 and (revived := pool.restore(which, length)) is not None:
                held.append(revived[0])
        taken = [*held, *(kept.slot for kept in pool.retained.values())]
        used = sorted((place.start, place.start + place.capacity) for place in taken)
        assert all(stop <= start for (_, stop), (start, _) in pairwise(used))
        assert not used or (used[0][0] >= LANES and used[-1][1] <= pool.tokens)
        assert pool.used_tokens == sum(place.capacity for place in held)
        assert len(pool.free_ranges) == len(set(pool.free_ranges))
        assert all(stop < start for (_, stop), (start, _) in pairwise(pool.free_ranges))
    for place in held:
        pool.free(place)
    largest = 960
    assert pool.allocate(largest) is not None and key_capacity(largest) <= pool.tokens - LANES
