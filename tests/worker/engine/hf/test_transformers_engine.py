"""The engine over models of transformers: its texts against transformers' own generation, its log-probabilities against
the trainer's, its texts against the native engine's, and where it keeps the protocol by means of its own.

In float32. Log-probabilities agree within ``TOLERANCE``, the order of sums.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from msgspec.structs import replace
from tests.support.families import FAMILIES, small_model
from tests.support.tiny import native_engine
from tests.worker.engine.test_engine import finish, order, text
from tests.worker.engine.test_in_flight import Run
from tests.worker.trainer.hf.test_transformers_trainer import write
from tests.worker.trainer.test_trainer import finish as finish_training
from tests.worker.trainer.test_trainer import forward_backward
from tests.worker.trainer.test_trainer import ref as trainer_ref

from rookery import protocol
from rookery.errors import UserError
from rookery.worker.engine.hf.runner import (
    SequenceRunner,
    SequenceStore,
    StreamRunner,
    cache_bytes,
    transformers_runner,
)
from rookery.worker.engine.native.engine import NativeEngine
from rookery.worker.engine.native.runner import best_runner
from rookery.worker.memory import NoRoom
from rookery.worker.model.adapter import read_adapter
from rookery.worker.model.config import DecoderConfig
from rookery.worker.model.decoder import Decoder
from rookery.worker.model.lora import LoraManager
from rookery.worker.model.published import fuse
from rookery.worker.model.transformers_model import TransformersModel
from rookery.worker.trainer.hf.trainer import TransformersBackbone
from rookery.worker.trainer.packed_trainer import PackedTrainer

RANKS = {"a": 4, "b": 7}
TOLERANCE = 1e-4


def make(
    model: TransformersModel,
    folder: Path,
    runner: type[StreamRunner] | type[SequenceRunner] | None = None,
    *,
    budget: int = 1 << 26,
    adapters: int = 1 << 26,
    **options: int,
) -> NativeEngine:
    """With two adapters of two policies."""
    loras = LoraManager(model.projections, model.dtype, model.device, 16, adapters)
    made = (runner or transformers_runner)(model, loras, budget)
    engine = native_engine(model, loras, text, runner=made, **{"max_rows": 9, "kv_budget_bytes": budget, **options})
    for seed, (name, rank) in enumerate(RANKS.items()):
        if not (folder / name).exists():
            write(folder / name, model, rank, seed)
        engine.add_adapter(ref(name), folder / name)
    return engine


def ref(name: str, policy: str = "") -> protocol.AdapterRef:
    return protocol.AdapterRef(policy=policy or name, version=1, hash=name, rank=RANKS.get(name, 4), alpha=1.0)


def prompt(start: int, length: int) -> list[int]:
    return [(start + 7 * i) % 170 + 1 for i in range(length)]


@pytest.mark.parametrize("family", FAMILIES)
def test_texts_are_those_of_transformers(tmp_path: Path, family: str) -> None:
    """Greedy, of unequal lengths in one batch with an adapter's; slices cut the prompts."""
    engine = make(TransformersModel(small_model(family)), tmp_path, prefill_tokens=8)
    prompts = {str(n): prompt(n, n) for n in (3, 9, 14)}
    for name, tokens in prompts.items():
        engine.submit(order(name, prompt=tokens, shared_prefix=0, temperature=0.0, max_tokens=9))
    engine.submit(order("adapted", prompt=prompt(5, 5), shared_prefix=0, adapter=ref("a"), max_tokens=9))
    done = finish(engine)
    judge = small_model(family)
    for name, tokens in prompts.items():
        with torch.no_grad():
            given = judge.generate(torch.tensor([tokens]), max_new_tokens=9, min_new_tokens=9, do_sample=False)
        assert done[name][0] == given[0, len(tokens) :].tolist()
    assert len(done["adapted"][0]) == 9 and engine.store.used_tokens == 0


def trained(model: TransformersModel, folder: Path, tokens: list[int], start: int, temperature: float) -> list[float]:
    """The trainer's log-probabilities of ``tokens`` from ``start`` on."""
    trainer = PackedTrainer(TransformersBackbone(model), max_rank=16, slice_tokens=4096)
    trainer.load("p", 1, trainer_ref("p"), folder)
    rest = tokens[start:]
    zeros = [0.0] * len(rest)
    member = protocol.GroupMember(tokens=rest, logprobs=zeros, advantages=zeros, weights=[1.0] * len(rest))
    batch = protocol.TrainingBatch(groups=[protocol.SharedPrefixGroup(prompt=tokens[:start], members=[member])])
    trainer.forward_backward(forward_backward(logprobs=True, forward_only=True, temperature=temperature), batch)
    (result,) = finish_training(trainer).values()  # type: ignore[arg-type]
    return torch.frombuffer(bytearray(result.logprobs), dtype=torch.float32).tolist()


@pytest.mark.heavy
@pytest.mark.parametrize("family", FAMILIES)
def test_mixed_adapters_share_a_batch_and_agree_with_the_trainer(tmp_path: Path, family: str) -> None:
    """Groups of two policies and of the base model, with prompts shared in part or whole, in one batch; a text that
    resumes goes on with the same tokens; the scores of a prompt are the trainer's log-probabilities."""
    model = TransformersModel(small_model(family))
    engine = make(model, tmp_path)
    asked = {}
    for number, name in enumerate(("a", "b", "")):
        for member, shared in enumerate((0, 6, 11)):
            plain = order(f"{name}{member}", prompt=prompt(number, 11), shared_prefix=shared, seed=member)
            asked[plain.request] = replace(plain, adapter=ref(name) if name else None, temperature=0.8)
    said = dict(Run(engine).submit(*asked.values()).end())
    assert len({tuple(one.tokens) for one in said.values()}) == 9  # none has another's adapter or seed
    for name in RANKS:
        one, two = said[f"{name}1"], said[f"{name}2"]
        whole = asked[f"{name}1"].prompt + one.tokens
        assert one.logprobs == pytest.approx(trained(model, tmp_path / name, whole, 11, 0.8), abs=TOLERANCE)
        resumed = Run(engine).submit(replace(asked[f"{name}2"], request="r", prefix_tokens=two.tokens[:5])).end()["r"]
        assert resumed.tokens == two.tokens[5:]
        assert resumed.logprobs == pytest.approx(two.logprobs[5:], abs=TOLERANCE)
        scored = order("s", prompt=whole, shared_prefix=0, adapter=ref(name), max_tokens=1, prompt_logprobs=12)
        engine.submit(scored)
        scores = finish(engine)["s"][1].prompt_logprobs
        wanted = trained(model, tmp_path / name, whole, len(whole) - 12, 1.0)
        assert [score.logprob for score in scores] == pytest.approx(wanted, abs=TOLERANCE)


@pytest.mark.parametrize("runner", [StreamRunner, SequenceRunner])
@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_both_runners_sample_the_native_engines_texts(
    tmp_path: Path, family: str, runner: type[StreamRunner] | type[SequenceRunner]
) -> None:
    """Where the native engine knows the family; else each other's."""
    model = TransformersModel(small_model(family))
    made = make(model, tmp_path, runner)
    if family == "llama":
        published = small_model(family)
        config = DecoderConfig.from_hf(published.config.to_dict())
        decoder = Decoder(config, fuse(config, published.state_dict()))
        loras = LoraManager(config, decoder.dtype, decoder.device, 16)
        loras.add("a", read_adapter(tmp_path / "a", config))
        dense = best_runner(decoder, loras, 1 << 26, compiled=False)  # kernels take seconds to compile
        other = native_engine(decoder, loras, text, max_rows=8, kv_budget_bytes=1 << 26, runner=dense)
    else:
        other = make(model, tmp_path)
    asked = [order(str(n), prompt=prompt(n, 9), shared_prefix=5, seed=n, adapter=ref("a")) for n in range(3)]
    texts = [Run(engine).submit(*asked).end() for engine in (made, other)]
    for name, one in texts[0].items():
        assert one.tokens == texts[1][name].tokens
        assert one.logprobs == pytest.approx(texts[1][name].logprobs, abs=TOLERANCE)


@pytest.mark.parametrize("shared", [0, 40, 44])
def test_caches_of_sequences_stay_within_their_slots(tmp_path: Path, shared: int) -> None:
    """Each member's cache begins with a copy of the group's prompt: the budget counts it."""
    engine = make(TransformersModel(small_model("qwen3_5_text")), tmp_path, budget=1 << 19)
    store = engine.store
    assert isinstance(store, SequenceStore)
    for n in range(9):
        engine.submit(order(str(n), prompt=prompt(1, 44), shared_prefix=shared, seed=n, max_tokens=4, episode=f"e{n}"))
    most = 0
    while engine.step():
        most = max(most, held := sum(map(cache_bytes, store.caches.values())))
        assert held <= store.bytes <= store.budget
    assert most > store.budget / 4 and store.used_tokens == 0


@pytest.mark.heavy
@pytest.mark.parametrize("family", ["qwen3_moe", "qwen3_5_text"])
def test_a_request_switches_adapters_and_a_small_cache_only_delays(tmp_path: Path, family: str) -> None:
    model = TransformersModel(small_model(family))
    engine = make(model, tmp_path)
    asked = order(prompt=prompt(1, 9), shared_prefix=4, adapter=ref("a", "p"))
    run = Run(engine).submit(asked).until("r", 5)
    assert engine.switch_adapter("r", ref("b", "p"), recompute=True)
    switched = run.end()["r"]
    given = switched.tokens[:5]
    resumed = Run(engine).submit(replace(asked, adapter=ref("b", "p"), prefix_tokens=given)).end()["r"]
    assert switched.tokens[5:] == resumed.tokens
    many = [order(str(n), prompt=prompt(n, 30), shared_prefix=20, max_tokens=24, seed=n) for n in range(3)]
    episodes = [replace(one, episode=one.request) for one in many]
    wanted = {name: one.tokens for name, one in Run(engine).submit(*episodes).end().items()}
    room = 2 * engine.store.token_bytes * (96 + 32 + engine.store.state_tokens)
    small = make(model, tmp_path, budget=room)
    assert {name: one.tokens for name, one in Run(small).submit(*episodes).end().items()} == wanted
    use = small.memory()
    assert use["kv_cache"].used <= use["kv_cache"].budget == room
    later = replace(episodes[0], prompt=episodes[0].prompt + wanted["0"] + [3, 4], request="later")
    fresh = replace(later, episode="")
    assert [Run(engine).submit(one).end()["later"].tokens for one in (later, later, fresh)].count(
        Run(make(model, tmp_path)).submit(fresh).end()["later"].tokens
    ) == 3


def test_adapters_beyond_the_budget_wait_and_full_versions_are_refused(tmp_path: Path) -> None:
    model = TransformersModel(small_model("qwen3_moe"))
    size = make(model, tmp_path).memory()["adapters"].used
    engine = make(model, tmp_path, adapters=size)
    engine.submit(order("a", adapter=ref("a")))
    write(tmp_path / "c", model, 7, 5)
    engine.submit(order("b", adapter=ref("b")))
    with pytest.raises(NoRoom):
        engine.add_adapter(replace(ref("c"), rank=7), tmp_path / "c")
    finish(engine)
    engine.add_adapter(replace(ref("c"), rank=7), tmp_path / "c")
    assert engine.adapters() == ["c"] and not engine.has_adapter("a")
    with pytest.raises(UserError, match="serves LoRA only"):
        engine.add_adapter(replace(ref("full"), rank=0), tmp_path)
    assert isinstance(engine.runner, StreamRunner | SequenceRunner)
