"""Engine and trainer compute the same bits by any number of threads: whatever the planner gives them, texts,
log-probabilities, gradients and optimizer steps do not change."""

from __future__ import annotations

import random
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.draws import examples
from tests.support.tiny import SIZES, native_engine, smollm2, trained_adapter
from tests.worker.engine.test_exactness import run
from tests.worker.test_lanes import in_thread

from rookery import protocol
from rookery.spec.policy import LOSS_PARAMETERS
from rookery.worker import teams
from rookery.worker.engine.native import kernels
from rookery.worker.engine.native.drafts import Speculator
from rookery.worker.engine.native.runner import KernelRunner
from rookery.worker.model.adapter import PARTS
from rookery.worker.model.config import DecoderConfig
from rookery.worker.model.decoder import Decoder
from rookery.worker.model.lora import LoraManager
from rookery.worker.model.published import fuse
from rookery.worker.trainer.native.backbone import NativeBackbone
from rookery.worker.trainer.optim import AdapterExport
from rookery.worker.trainer.packed_pass import PassLimits
from rookery.worker.trainer.packed_trainer import PackedTrainer

THREADS = (1, 2, 3)
RANKS = (1, 2, 3, 5, 8, 16, 24, 33, 48, 64)
WORDS = 224
"""A multiple of a vector's numbers, as that of most models is: a kernel computes their softmax."""
COMMON = SIZES | {"vocab_size": WORDS, "num_hidden_layers": 2, "hidden_size": 128, "intermediate_size": 192}
MODELS = {
    "llama": transformers.LlamaConfig(**COMMON),
    "many heads of queries": transformers.LlamaConfig(
        **COMMON | {"hidden_size": 256, "num_attention_heads": 16, "num_key_value_heads": 1}
    ),
    "mistral window": transformers.MistralConfig(**COMMON, sliding_window=7, head_dim=32),
    "qwen3": transformers.Qwen3Config(**COMMON, head_dim=32),
}
LOSSES = [
    *(protocol.Loss(name=name, params=params) for name, params in LOSS_PARAMETERS.items()),
    protocol.Loss(name="dpo", params={"beta": 0.3}),
]
CLIPPED = protocol.Adam(lr=0.01, weight_decay=0.1, clip=1e-3)
"""The norm of the gradient reaches each weight."""


@cache
def model(name: str) -> Decoder:
    torch.manual_seed(3)
    config = MODELS[name]
    config._attn_implementation = "eager"
    found = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    for weight in found.parameters():
        torch.nn.init.normal_(weight, 1.0 if weight.ndim == 1 else 0.0, 0.15)
    ours = DecoderConfig.from_hf(config.to_dict())
    weights = {key: weight.detach().to(torch.bfloat16) for key, weight in found.state_dict().items()}
    made = Decoder(ours, fuse(ours, weights), pack=True)
    assert kernels.usable(made, None)
    return made


def by_threads(compute: Any) -> list[Any]:
    """The result of ``compute()`` in a thread with a team of each size."""

    def of(threads: int) -> Any:
        torch.get_num_threads()
        teams.use(threads)
        return compute()

    return [in_thread(lambda threads=threads: of(threads)) for threads in THREADS]


def assert_equal(found: list[Any]) -> None:
    first, *others = found
    for threads, other in zip(THREADS[1:], others, strict=True):
        assert first.keys() == other.keys()
        for name, value in first.items():
            same = torch.equal(value, other[name]) if isinstance(value, torch.Tensor) else value == other[name]
            assert same, f"{name} by {threads} threads is not that by {THREADS[0]}"


# --- training ---------------------------------------------------------------------------------------------------------


class Work:
    """Random work of one to three policies: two batches each, a clipped step, and a batch after it."""

    def __init__(self, seed: int, decoder: Decoder, folder: Path) -> None:
        self.rng, self.decoder = random.Random(seed), decoder
        rng = self.rng
        self.slice_tokens = rng.choice([48, 256, 4096])
        self.limits = PassLimits(resident_tokens=rng.choice([0, 1 << 14]), max_tokens=1 << 14)
        self.policies = [f"p{number}" for number in range(rng.randint(1, 3))]
        self.ranks = {policy: rng.choice(RANKS) for policy in self.policies}
        self.folders, self.given, self.batches = {}, {}, {}
        for number, policy in enumerate(self.policies):
            self.folders[policy] = self.write(folder / policy, self.ranks[policy], number)
            loss = rng.choice(LOSSES)
            self.given[policy] = {
                "loss": loss,
                "temperature": rng.choice([1.0, 0.7]) if loss.name != "dpo" else 1.0,
                "kl_weight": rng.choice([0.0, 0.1]) if loss.name != "dpo" else 0.0,
                "reference": self.ref(f"{policy} start") if rng.random() < 0.5 else None,
            }
            self.folders[f"{policy} start"] = self.write(folder / f"{policy} start", rng.choice(RANKS), number + 9)
            self.batches[policy] = [self.batch(loss) for _ in range(3)]

    def write(self, folder: Path, rank: int, seed: int) -> Path:
        folder.mkdir(parents=True)
        targets = self.rng.sample(PARTS, self.rng.randint(1, len(PARTS)))
        AdapterExport(trained_adapter(self.decoder, rank, seed, 0.1, targets)).write(folder)
        return folder

    def ref(self, policy: str) -> protocol.AdapterRef:
        return protocol.AdapterRef(policy=policy, version=0, hash=policy, rank=1, alpha=1.0)

    def tokens(self, most: int) -> list[int]:
        return [self.rng.randrange(WORDS) for _ in range(self.rng.choice([1, 2, self.rng.randint(1, most)]))]

    def batch(self, loss: protocol.Loss) -> protocol.TrainingBatch:
        rng, groups = self.rng, []
        for _ in range(rng.randint(1, 4)):
            members = []
            for number in range(2 if loss.name == "dpo" else rng.randint(1, 4)):
                tokens = self.tokens(300)
                sign = [1.0 - 2 * number] * len(tokens)
                members.append(
                    protocol.GroupMember(
                        tokens=tokens,
                        logprobs=[-5.0 - rng.random() for _ in tokens],
                        advantages=sign if loss.name == "dpo" else [rng.gauss(0, 1) for _ in tokens],
                        weights=[
                            float(loss.name == "dpo" or not at or rng.random() < 0.9) for at in range(len(tokens))
                        ],
                    )
                )
            groups.append(protocol.SharedPrefixGroup(prompt=self.tokens(150), members=members))
        data = []
        if loss.name == "cross_entropy":  # targets of one row are a distribution
            tokens = self.tokens(60)
            rows = sorted(rng.randrange(len(tokens)) for _ in range(40))
            data = [protocol.Datum(tokens=tokens, rows=rows, targets=[rng.randrange(WORDS) for _ in rows])]
        return protocol.TrainingBatch(groups=groups, data=data)

    def compute(self) -> dict[str, Any]:
        trainer = PackedTrainer(
            NativeBackbone(self.decoder, self.limits), max_rank=64, slice_tokens=self.slice_tokens, most_idle=64
        )
        for policy in self.policies:
            trainer.load(policy, 1, self.ref(policy), self.folders[policy])
            if (start := self.given[policy]["reference"]) is not None:
                trainer.load_reference(policy, start, self.folders[start.policy])
        found: dict[str, Any] = {}

        def run_all() -> None:
            while trainer.queue.step():
                pass
            for done, _ in trainer.queue.drain():
                assert not done.error, done.error
                metrics = {name: value for name, value in done.metrics.items() if name != "seconds"}
                found[f"log-probabilities of {done.op}"], found[f"metrics of {done.op}"] = done.logprobs, metrics
            for policy in self.policies:
                found[f"gradient of {policy}, {len(found)}"] = trainer.held[policy].state.gradient.clone()

        def about(policy: str, number: int, steps: int) -> dict[str, Any]:
            return {
                "op": f"{policy} {number}", "policy": policy, "tenant": policy, "lease": 1, "parent": self.ref(policy),
                "steps": steps, "operations": number % 2,
            }  # fmt: skip

        def queue(policy: str, number: int, steps: int) -> None:
            op = protocol.ForwardBackward(
                **about(policy, number, steps), **self.given[policy], batch_ticket="", logprobs=True
            )
            trainer.forward_backward(op, self.batches[policy][number])

        for policy in self.policies:
            queue(policy, 0, 0)
            queue(policy, 1, 0)
        run_all()
        for policy in self.policies:
            step = about(policy, 0, 0) | {"op": f"{policy} step", "operations": 2}
            trainer.optim_step(protocol.OptimStep(**step, adam=CLIPPED))
            queue(policy, 2, 1)
        run_all()
        for policy in self.policies:
            state = trainer.held[policy].state
            found |= {f"weights of {policy}": state.masters, f"second moment of {policy}": state.exp_avg_sq}
            assert state.step == 1
        return found


@settings(max_examples=examples(8), deadline=None)
@given(seed=st.integers(0, 1 << 32), name=st.sampled_from(list(MODELS)))
def test_training_is_the_same_bits_by_any_number_of_threads(
    tmp_path_factory: pytest.TempPathFactory, seed: int, name: str
) -> None:
    """All losses, KL penalties and references, distributions as targets, ranks from 1 to 64, several policies in a
    pass, batches in slices, layers kept or computed again, gradients of two batches, and a clipped step."""
    work = Work(seed, model(name), tmp_path_factory.mktemp("policies"))
    assert_equal(by_threads(work.compute))


@pytest.mark.parametrize("tokens", [127, 128, 2048])
@pytest.mark.parametrize("name", ["llama", "many heads of queries"])
def test_long_texts_are_the_same_bits_by_any_number_of_threads(tmp_path: Path, name: str, tokens: int) -> None:
    """Sums over the tokens of one text, whose length is a power of two: oneDNN may give each thread a part."""
    rng, work = random.Random(tokens), Work(1, model(name), tmp_path)
    text = [rng.randrange(WORDS) for _ in range(tokens)]
    ones = [1.0] * tokens
    member = protocol.GroupMember(tokens=text, logprobs=[-5.0] * tokens, advantages=ones, weights=ones)
    group = protocol.SharedPrefixGroup(prompt=text[:1], members=[member])
    policy = work.policies[0]
    work.policies, work.slice_tokens = [policy], 4096
    work.given[policy] |= {"loss": LOSSES[0], "kl_weight": 0.0}
    work.batches[policy] = [protocol.TrainingBatch(groups=[group])] * 3
    assert_equal(by_threads(work.compute))


@pytest.mark.heavy
def test_the_real_model_trains_the_same_bits_by_any_number_of_threads(tmp_path: Path) -> None:
    """Its products are larger: 49,152 words, 1,536 inner numbers, slices of 512 tokens."""
    work = Work(2, smollm2(torch.bfloat16), tmp_path)
    work.policies, work.slice_tokens = work.policies[:1], 512
    assert_equal(by_threads(work.compute))


# --- generation -------------------------------------------------------------------------------------------------------


def texts_of(seed: int, decoder: Decoder) -> dict[str, tuple[list[int], list[float]]]:
    """Random requests of several adapters with shared prompts, some resumed; then the next turns of some of them."""
    rng = random.Random(seed)
    ranks = {key: rng.choice(RANKS) for key in "abc"}
    loras = LoraManager(decoder.config, decoder.dtype, decoder.device, 64)
    for number, (key, rank) in enumerate(ranks.items()):
        loras.add(key, trained_adapter(decoder, rank, number))
    budget = rng.choice([1 << 26, 1 << 19])
    engine = native_engine(
        decoder,
        loras,
        lambda _: "",
        max_rows=rng.choice([2, 8, 32]),
        kv_budget_bytes=budget,
        runner=KernelRunner(decoder, loras, budget),
        speculator=Speculator() if rng.random() < 0.5 else None,
        prefill_tokens=rng.choice([7, 64, 512]),
    )
    prompts = [[rng.randrange(WORDS) for _ in range(rng.randint(1, 120))] for _ in range(3)]
    requests = []
    for number in range(rng.randint(2, 14)):
        prompt, key = rng.choice(prompts), rng.choice(["", *ranks])
        adapter = protocol.AdapterRef(policy=key, version=1, hash=key, rank=1, alpha=1.0) if key else None
        tokens = rng.randint(3, 40)
        shared = rng.choice([0, len(prompt)])
        requests.append(
            protocol.Generate(
                request=f"r{number}", adapter=adapter, prompt=[*prompt, number], shared_prefix=shared,
                prefix_tokens=[rng.randrange(WORDS) for _ in range(rng.choice([0, 2]))], max_tokens=tokens,
                temperature=rng.choice([0.0, 0.7, 1.0]), seed=number, stop_tokens=[], episode=f"e{number}",
                group=f"{prompts.index(prompt)} {key}",
            )
        )  # fmt: skip
    found = run(engine, requests)
    turns = []
    for one in requests[::2]:
        text = [*one.prompt, *one.prefix_tokens, *found[one.request][0]]
        turns.append(
            protocol.Generate(
                request=f"{one.request} again", adapter=one.adapter, prompt=[*text, 5], max_tokens=6, temperature=1.0,
                shared_prefix=one.shared_prefix, seed=one.seed, stop_tokens=[], episode=one.episode, group=one.group,
            )
        )  # fmt: skip
    return found | run(engine, turns)


@settings(max_examples=examples(8), deadline=None)
@given(seed=st.integers(0, 1 << 32), name=st.sampled_from(list(MODELS)))
def test_texts_are_the_same_bits_by_any_number_of_threads(seed: int, name: str) -> None:
    """Adapters of ranks from 1 to 64 in one batch, prompts in slices, preempted and resumed requests, caches that are
    kept for the next turn, with drafts and without."""
    assert_equal(by_threads(lambda: texts_of(seed, model(name))))
