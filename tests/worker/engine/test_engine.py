"""The options of a request to the engine, and the events of its life."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from tests.support.tiny import native_engine, small, smollm2, smollm2_folder

from rookery import protocol
from rookery.tokenization.chat import Chat
from rookery.worker.engine import kv_cache
from rookery.worker.engine.native.engine import NativeEngine
from rookery.worker.engine.request import StopStrings
from rookery.worker.engine.slo_gate import SloGate
from rookery.worker.model.adapter import PARTS, Adapter, init_adapter
from rookery.worker.model.batch_invariance import LANES
from rookery.worker.model.lora import LoraManager


def text(tokens: list[int]) -> str:
    return "".join(chr(97 + token % 26) for token in tokens)


def make(**options: Any) -> NativeEngine:
    decoder = small("llama")
    loras = LoraManager(decoder.config, decoder.dtype, decoder.device, 64)
    loras.add("a", init_adapter(decoder.config, 8, 16.0, list(PARTS), 0))
    return native_engine(decoder, loras, text, **{"max_rows": 8, "kv_budget_bytes": 1 << 26, **options})


def order(name: str = "r", **changes: object) -> protocol.Generate:
    plain: dict[str, object] = {
        "adapter": None,
        "prompt": [1, 2, 3, 4],
        "shared_prefix": 4,
        "max_tokens": 12,
        "temperature": 1.0,
        "seed": 7,
        "stop_tokens": [],
    }
    return protocol.Generate(request=name, **{**plain, **changes})  # type: ignore[arg-type]


def finish(engine: NativeEngine) -> dict[str, tuple[list[int], protocol.TokenChunk]]:
    """All tokens of each request, and its last chunk; offsets are checked on the way."""
    tokens: dict[str, list[int]] = {}
    ends: dict[str, int] = {}
    last: dict[str, protocol.TokenChunk] = {}
    while True:
        busy = engine.step()
        for chunk in engine.drain():
            held = tokens.setdefault(chunk.request, [])
            assert chunk.offset == ends.get(chunk.request, chunk.offset)
            ends[chunk.request] = chunk.offset + len(chunk.tokens)
            assert len(chunk.tokens) == len(chunk.logprobs)
            held.extend(chunk.tokens)
            last[chunk.request] = chunk
        if not busy and not engine.active and not engine.waiting:
            return {name: (tokens[name], last[name]) for name in tokens}


def generate(engine: NativeEngine, **changes: object) -> tuple[list[int], protocol.TokenChunk]:
    engine.submit(order(**changes))
    return finish(engine)["r"]


def test_a_stop_string_ends_the_text_with_the_token_that_completes_it() -> None:
    tokens, _ = generate(make())
    stop = text(tokens[5:8])
    cut, chunk = generate(make(), stop=["never this one", stop])
    assert chunk.finish == "stop"
    assert text(cut).endswith(stop) and stop not in text(cut[:-1])
    # begun before the interruption, completed after it
    resumed, chunk = generate(make(), stop=[stop], prefix_tokens=cut[:-1])
    assert (resumed, chunk.finish, chunk.offset) == (cut[-1:], "stop", len(cut) - 1)


def test_stop_strings_are_found_over_split_characters() -> None:
    chat = Chat.load(smollm2_folder())
    sentence = "Grüße 🙂🙃 from the aviary, über alles. END of it"
    tokens = chat.encode(sentence)
    for stop in ("🙃", "END", "üß", "the aviary", ". EN"):
        stops = StopStrings([stop], chat.decode)
        at = next(n for n in range(1, len(tokens) + 1) if stops.found(tokens[:n]))
        assert stop in chat.decode(tokens[:at]) and stop not in chat.decode(tokens[: at - 1])
    invalid = [token for token in range(200) if chat.decode([token]) == "\N{REPLACEMENT CHARACTER}"][:9]
    stops = StopStrings(["END"], chat.decode)
    assert stops.found([*invalid, *tokens])


def test_given_tokens_that_already_end_the_text() -> None:
    for changes, finish_ in (
        ({"prefix_tokens": [5, 9], "stop_tokens": [9]}, "stop"),
        ({"prefix_tokens": [5, 9], "max_tokens": 2}, "length"),
        ({"prefix_tokens": [5, 9], "stop": [text([5, 9])]}, "stop"),
    ):
        engine = make()
        engine.submit(order(**changes))
        (chunk,) = engine.drain()
        assert (chunk.finish, chunk.offset, chunk.tokens) == (finish_, 2, [])
        assert not engine.step() and not engine.active


def test_the_context_ends_a_text() -> None:
    tokens, chunk = generate(make(max_context=10))
    assert (len(tokens), chunk.finish) == (6, "length")


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"prompt": [1] * 5000, "shared_prefix": 0}, "context is 4096"),
        ({"shared_prefix": 5}, "shared_prefix is 5"),
        ({"prompt": [1, 2, 3, 211]}, "vocabulary"),
        ({"prefix_tokens": [-1]}, "vocabulary"),
        ({"temperature": -1.0}, "temperature"),
        ({"max_tokens": 4000}, "cache"),
    ],
)
def test_work_that_can_never_run_is_refused_and_leaves_nothing(changes: dict[str, object], says: str) -> None:
    engine = make(kv_budget_bytes=1 << 20)
    with pytest.raises(ValueError, match=says):
        engine.submit(order(**changes))
    assert not engine.step() and not engine.drain()
    engine.submit(order())
    with pytest.raises(ValueError, match="already running"):
        engine.submit(order())


def test_abort_while_waiting_and_while_running() -> None:
    engine = make(max_rows=1)
    whole, _ = generate(make(), seed=3)
    for name in ("first", "second", "third"):
        engine.submit(order(name, seed=3))
    for _ in range(5):
        engine.step()
    assert (engine.active, engine.waiting) == (1, 2)
    engine.abort("first")
    engine.abort("second")
    engine.abort("unknown")
    chunks = {chunk.request: chunk for chunk in engine.drain()}
    assert chunks["first"].finish == chunks["second"].finish == "abort"
    assert chunks["first"].tokens == whole[: len(chunks["first"].tokens)]
    tokens, chunk = finish(engine)["third"]
    assert (tokens, chunk.finish) == (whole, "length")
    assert engine.store.used_tokens == 0


def test_retained_prompts_keep_no_logits_and_start_the_same_texts() -> None:
    """A vocabulary's row for each prompt would be a worker's largest growth from job to job."""
    engine, prompts = make(), [[*range(first, first + 20)] for first in range(1, 40)]
    whole = {}
    for _ in range(2):
        for number, prompt in enumerate(prompts):
            for member in range(2):
                engine.submit(order(f"{number}.{member}", prompt=prompt, shared_prefix=20, seed=member, max_tokens=3))
        texts = {name: tokens for name, (tokens, _) in finish(engine).items()}
        whole = whole or texts
        assert texts == whole and engine.stats["prefill_tokens"] == 20 * len(prompts), "computed once"
    kept = [segment.metadata for segment in engine.store.retained.values()]
    assert len(kept) == len(prompts) and {tuple(hidden.shape) for hidden in kept} == {(64,)}
    assert {hidden.untyped_storage().nbytes() for hidden in kept} == {64 * engine.decoder.dtype.itemsize}


@pytest.mark.parametrize("kept", [1, 2, 3])
def test_the_segment_that_was_retained_first_makes_room_first(kept: int) -> None:
    store = kv_cache.SegmentStore(4 * LANES, 1)  # one segment is scratch
    for round in range(2):  # also after restored segments were retained again
        for key in "abc"[:kept]:
            found = store.restore(key, 1) if round else None
            slot = found[0] if found is not None else store.allocate(1)
            assert slot is not None
            store.retain(slot, key, key, 0.0)
            assert store.used_tokens == 0
    taken = [store.allocate(1) for _ in range(3 - kept)]
    for key in "abc"[:kept]:
        assert store.contains(key)
        taken.append(store.allocate(1))
        assert not store.contains(key) and store.used_tokens == len(taken) * LANES
    assert None not in taken and store.allocate(1) is None and store.bytes == 3 * LANES


def test_a_segment_that_has_no_room_to_grow_stays_retained() -> None:
    store = kv_cache.SegmentStore(4 * LANES, 1)
    slots = [store.allocate(1) for _ in range(2)]
    for key, slot in zip("ab", slots, strict=True):
        assert slot is not None
        store.retain(slot, key, key, 0.0)
    assert store.restore("a", 4 * LANES) is None
    assert store.contains("a") and (store.used_tokens, store.bytes) == (0, LANES)
    assert store.restore("a", LANES) == (slots[0], "a") and (store.used_tokens, store.bytes) == (LANES, LANES)


def test_prompts_of_waiting_requests_are_computed_in_the_same_step() -> None:
    prompts = [[10 * i + j for j in range(1, 9)] for i in range(6)]
    orders = [
        order(f"{i}.{member}", prompt=prompt, shared_prefix=8, max_tokens=3 + member, seed=2 * i + member)
        for i, prompt in enumerate(prompts)
        for member in range(2)
    ]
    texts = []
    for rows in (2, len(orders)):
        engine = make(max_rows=rows)
        for one in orders:
            engine.submit(one)
        texts.append({name: tokens for name, (tokens, _) in finish(engine).items()})
        assert engine.stats["prefill_slices"] == 1
        assert engine.stats["prefill_tokens"] == 48
    assert texts[0] == texts[1]


def test_a_prompt_computed_along_gives_way_to_the_rows() -> None:
    prompts = [list(range(i, i + 20)) for i in range(0, 80, 20)]
    orders = [order(str(i), prompt=prompt, shared_prefix=20, max_tokens=40, seed=i) for i, prompt in enumerate(prompts)]

    def texts(engine: NativeEngine) -> dict[str, list[int]]:
        for one in orders:
            engine.submit(one)
        found = {name: tokens for name, (tokens, _) in finish(engine).items()}
        assert engine.store.used_tokens == 0
        return found

    roomy = make()
    expected = texts(roomy)
    for places in (4, 6, 8):
        assert texts(make(max_rows=1, kv_budget_bytes=(1 + places) * LANES * roomy.store.token_bytes)) == expected


def test_an_adapter_with_nan_ends_only_its_requests() -> None:
    clean, _ = generate(make())
    engine = make()
    config = engine.decoder.config
    fresh = init_adapter(config, 8, 16.0, list(PARTS), 0)
    broken = Adapter(8, 16.0, {site: (a, torch.full_like(b, torch.nan)) for site, (a, b) in fresh.weights.items()})
    engine.loras.add("broken", broken)
    ref = protocol.AdapterRef(policy="p", version=1, hash="broken", rank=8, alpha=16.0)
    for i in range(3):
        engine.submit(order(f"bad{i}", adapter=ref))
    engine.submit(order())
    engine.submit(order("later", prompt=[9, 8, 7], shared_prefix=1, adapter=ref))
    results = finish(engine)
    assert results["r"] == (clean, results["r"][1])
    assert all(results[name][1].finish == "error" for name in ("bad0", "bad1", "bad2", "later"))
    assert "not numbers" in results["bad0"][1].error
    # nor do their places harm who comes next
    for i in range(8):
        engine.submit(order(f"next{i}", shared_prefix=i % 5))
    results = finish(engine)
    assert all(results[f"next{i}"][0] == results[f"next{i % 5}"][0] for i in range(8))
    assert results["next4"][0] == clean


def test_caches_of_ended_episodes_do_not_fill_the_budget() -> None:
    """Not even those of an adapter in constant use, such as the first version of many jobs."""
    now, sizes = 0.0, []
    engine = make(gate=SloGate(enabled=False, clock=lambda: now))
    for i in range(30):
        generate(engine, episode=f"e{i}", prompt=[i, 2, 3, 4])
        sizes.append(engine.memory()["kv_cache"].used)
        now += kv_cache.RETAIN_SECONDS / 8
    assert sizes[0] < sizes[4] < sizes[8] == sizes[9] == sizes[29]


def test_slices_are_bounded_and_take_turns() -> None:
    engine = make(prefill_tokens=16, max_rows=64)
    engine.submit(order("running", max_tokens=30))
    for _ in range(3):
        engine.step()
    engine.submit(order("long", prompt=list(range(100)), shared_prefix=100))
    before = engine.generated
    for _ in range(12):
        filled = engine.stats["prefill_tokens"]
        engine.step()
        assert engine.stats["prefill_tokens"] - filled <= 16
    assert engine.generated - before >= 5


def test_a_shared_prompt_is_computed_once() -> None:
    engine = make()
    for i in range(8):
        engine.submit(order(f"r{i}", prompt=list(range(40)), shared_prefix=40, seed=i))
    finish(engine)
    assert engine.stats["prefill_tokens"] == 40


def test_smollm2_answers() -> None:
    chat, decoder = Chat.load(smollm2_folder()), smollm2()
    loras = LoraManager(decoder.config, decoder.dtype, decoder.device, 64)
    engine = native_engine(decoder, loras, chat.decode, max_rows=8, kv_budget_bytes=1 << 28)

    def ask(messages: Sequence[dict[str, str]], stop: list[str]) -> str:
        prompt = chat.prompt(messages)
        engine.submit(
            order(
                prompt=prompt,
                shared_prefix=len(prompt),
                max_tokens=40,
                temperature=0.0,
                stop=stop,
                stop_tokens=chat.stop_tokens,
            )
        )
        tokens, chunk = finish(engine)["r"]
        assert chunk.finish
        return chat.decode(tokens)

    question = [{"role": "user", "content": "Name three colors."}]
    whole = ask(question, [])
    assert "Red" in whole and "Green" in whole
    assert ask(question, ["Gre"]) == whole[: whole.index("Green") + len("Green")]
