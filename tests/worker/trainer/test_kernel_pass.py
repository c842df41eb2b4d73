"""With compiled kernels, training computes the log-probabilities that sampling recorded, and the gradient of the plain
pass.

Sampling sums a row's exponentials in another order than training, so equal logits give log-probabilities within
``SAME`` nats; a single logit that was rounded otherwise in bfloat16 is a hundred times as far away.
"""

from __future__ import annotations

import random
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.tiny import COMPUTED, native_engine, small, smollm2, trained_adapter
from tests.worker.engine.test_golden import run

from rookery import protocol
from rookery.worker.engine.native import kernels
from rookery.worker.engine.native.runner import KernelRunner
from rookery.worker.model.adapter import Adapter
from rookery.worker.model.decoder import Decoder
from rookery.worker.model.lora import LoraManager
from rookery.worker.trainer.native.backbone import NativeBackbone
from rookery.worker.trainer.optim import AdapterExport
from rookery.worker.trainer.packed_pass import PassLimits
from rookery.worker.trainer.packed_trainer import PackedTrainer

if not kernels.load(None):
    pytest.skip(kernels.runtime.why_unavailable(), allow_module_level=True)

SAME = 1e-5
RANKS = {"a": 16, "b": 3, "c": 24}
LOSS = protocol.Loss(name="cross_entropy")


def adapters(decoder: Decoder, strength: float) -> dict[str, Adapter]:
    return {policy: trained_adapter(decoder, rank, seed, strength) for seed, (policy, rank) in enumerate(RANKS.items())}


def reference(policy: str) -> protocol.AdapterRef:
    return protocol.AdapterRef(policy=policy, version=0, hash=policy, rank=RANKS[policy], alpha=1.0)


def sample(decoder: Decoder, made: dict[str, Adapter], tokens: int) -> dict[str, list[protocol.SharedPrefixGroup]]:
    """Of every policy two groups with different prompts: three texts that share it, and one that does not."""
    loras = LoraManager(decoder.config, decoder.dtype, decoder.device, 64)
    for policy, adapter in made.items():
        loras.add(policy, adapter)
    runner = KernelRunner(decoder, loras, 1 << 26)
    engine = native_engine(decoder, loras, lambda _: "", max_rows=8, kv_budget_bytes=1 << 26, runner=runner)
    source = random.Random(1)
    prompts = {(policy, size): [source.randrange(200) for _ in range(11 * size)] for policy in made for size in (3, 1)}
    requests = [
        {
            "name": f"{policy} {size} {i}",
            "adapter": policy,
            "prompt": prompt,
            "shared_prefix": len(prompt) if size > 1 else 0,
            "max_tokens": tokens + i,
            "temperature": 1.0,
            "seed": i,
        }
        for (policy, size), prompt in prompts.items()
        for i in range(size)
    ]
    texts = run(engine, requests)
    groups: dict[str, list[protocol.SharedPrefixGroup]] = {policy: [] for policy in made}
    for (policy, size), prompt in prompts.items():
        members = []
        for i in range(size):
            found, logprobs = texts[f"{policy} {size} {i}"]
            ones = [1.0] * len(found)
            members.append(protocol.GroupMember(tokens=found, logprobs=logprobs, advantages=ones, weights=ones))
        groups[policy].append(protocol.SharedPrefixGroup(prompt=prompt, members=members))
    return groups


def train(
    decoder: Decoder,
    groups: dict[str, list[protocol.SharedPrefixGroup]],
    folders: dict[str, Path],
    limits: PassLimits | None = None,
    **options: Any,
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor], float]:
    """Log-probabilities and gradients by policy, all policies in one pass, and its seconds."""
    trainer = PackedTrainer(NativeBackbone(decoder, limits, **options), max_rank=64, slice_tokens=4096)
    for policy, found in groups.items():
        trainer.load(policy, 1, reference(policy), folders[policy])
        op = protocol.ForwardBackward(
            op=policy, policy=policy, tenant=policy, lease=1, parent=reference(policy), steps=0, batch_ticket="",
            loss=LOSS, temperature=1.0, logprobs=True,
        )  # fmt: skip
        trainer.forward_backward(op, protocol.TrainingBatch(groups=found))
    while trainer.queue.step():
        pass
    done = {finished.op: finished for finished, _ in trainer.queue.drain()}
    logprobs = {policy: torch.frombuffer(bytearray(done[policy].logprobs), dtype=torch.float32) for policy in groups}
    gradients = {policy: trainer.held[policy].state.gradient for policy in groups}
    return logprobs, gradients, sum(finished.metrics["seconds"] for finished in done.values())


def written(made: dict[str, Adapter], folder: Path) -> dict[str, Path]:
    for policy, adapter in made.items():
        (folder / policy).mkdir(parents=True)
        AdapterExport(adapter).write(folder / policy)
    return {policy: folder / policy for policy in made}


@pytest.mark.parametrize(
    "family", ["llama", "mistral window", "qwen3", "smollm3", pytest.param("smollm2", marks=pytest.mark.heavy)]
)
def test_logprobs_of_training_are_those_of_sampling(tmp_path: Path, family: str) -> None:
    decoder = smollm2(COMPUTED) if family == "smollm2" else small(family)
    made = adapters(decoder, 0.02 if family == "smollm2" else 0.1)
    groups = sample(decoder, made, 6)
    for limits in (None, PassLimits(resident_tokens=0, max_tokens=4096)):
        logprobs, *_ = train(decoder, groups, written(made, tmp_path / str(limits is None)), limits)
        for policy, found in groups.items():
            sampled = torch.tensor([x for group in found for member in group.members for x in member.logprobs])
            assert (logprobs[policy] - sampled).abs().max() < SAME
        if family == "smollm2":
            break


@pytest.mark.skipif(torch.bfloat16 != COMPUTED, reason="float32 products depend on the number of threads")
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_one_thread_and_two_compute_the_same_bits(tmp_path: Path, family: str) -> None:
    decoder, threads = small(family), torch.get_num_threads()
    made = adapters(decoder, 0.1)
    folders, found = written(made, tmp_path), []
    try:
        for number in (1, 2):
            torch.set_num_threads(number)
            groups = sample(decoder, made, 20)
            found.append((groups, *train(decoder, groups, folders)[:2]))
    finally:
        torch.set_num_threads(threads)
    one, two = found
    assert repr(one[0]) == repr(two[0])
    for policy in made:
        assert torch.equal(one[1][policy], two[1][policy])
        assert torch.equal(one[2][policy], two[2][policy])


@pytest.mark.parametrize("family", ["llama biased", "mistral window", "qwen3", "smollm3"])
def test_gradient_is_that_of_the_plain_pass(tmp_path: Path, family: str) -> None:
    decoder = small(family, torch.float32)
    made = adapters(decoder, 0.1)
    groups, folders = sample(decoder, made, 20), written(made, tmp_path)
    _, wanted, _ = train(decoder, groups, folders, compiled=False)
    for limits in (None, PassLimits(resident_tokens=0, max_tokens=4096)):
        _, found, _ = train(decoder, groups, folders, limits)
        for policy, gradient in wanted.items():
            assert (found[policy] - gradient).abs().max() < 2e-5 * gradient.abs().max()


PAUSE = 1e6
"""Seconds by which the clock is ahead after a stop between layers."""


@pytest.mark.parametrize("resident", [0, 4096], ids=["computed again", "kept"])
def test_generation_between_layers_changes_no_bit_and_is_not_charged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, resident: int
) -> None:
    decoder = small("llama")
    made = adapters(decoder, 0.1)
    groups, folders, limits = sample(decoder, made, 6), written(made, tmp_path), PassLimits(resident, 4096)
    wanted, texts = train(decoder, groups, folders, limits), []
    stops, present, ahead = 2 * len(decoder.layers), time.perf_counter, 0.0
    monkeypatch.setattr(time, "perf_counter", lambda: present() + ahead)

    def between_layers() -> None:
        nonlocal ahead
        texts.append(sample(decoder, made, 6))
        if len(texts) in (1, stops):  # in the pass forwards, and in the pass backwards
            ahead += PAUSE

    *found, seconds = train(decoder, groups, folders, limits, between_layers=between_layers)
    assert texts == [groups] * stops and seconds < PAUSE
    for before, after in zip(wanted, found, strict=False):
        assert all(torch.equal(before[policy], after[policy]) for policy in groups)
