"""The native trainer against PEFT and transformers, against itself alone and unshared, and under faults.

Models are small and random, in float32, so that equalities are tight: gradients agree within 2e-5 of their largest
entry (sums in another order), one AdamW step within 2e-6 (eps is 1e-3, or entries that are nothing but rounding would
be whole steps of either sign). In bfloat16 a gradient is as near to the float32 one as PEFT's own in bfloat16, and one
with a shared prompt within 3% of the unshared one (norm of the difference over the norm).
"""

from __future__ import annotations

import math
import random
import subprocess
import sys
from array import array
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import peft
import pytest
import torch
import transformers
from safetensors.torch import save_file
from tests.support.families import SIZES, flat_lora
from torch import Tensor

from rookery import protocol
from rookery.controller.training.shares import join_metrics, split_batch
from rookery.errors import UserError
from rookery.worker.model.adapter import PARTS, init_adapter
from rookery.worker.model.config import DecoderConfig
from rookery.worker.model.decoder import Decoder
from rookery.worker.model.published import fuse
from rookery.worker.trainer.loss_head import TokenLogprobs
from rookery.worker.trainer.native.attention import AttentionFactory, ChunkedAttention, ChunkSizes, VarlenAttention
from rookery.worker.trainer.native.backbone import NativeBackbone
from rookery.worker.trainer.operation_queue import EXPECTED_SECONDS, Export, OperationQueue, TrainerResult
from rookery.worker.trainer.optim import GRADIENT_FILE, AdapterExport
from rookery.worker.trainer.packed_pass import PassLimits
from rookery.worker.trainer.packed_trainer import PackedTrainer

HF = SIZES | {"tie_word_embeddings": True}
LLAMA = transformers.LlamaConfig(**HF)
AIPO = protocol.Loss(name="aipo", params={"rho": 4.0})
GSPO = protocol.Loss(name="gspo", params={"clip_low_threshold": 0.8, "clip_high_threshold": 1.2})
ATTENTIONS: dict[str, AttentionFactory | None] = {
    "kernels": None,
    "whole": partial(ChunkedAttention, chunks=ChunkSizes()),
    "chunked": partial(ChunkedAttention, chunks=ChunkSizes(queries=4, scores=64)),
    "fused": VarlenAttention,
}
"""A CPU's, by compiled kernels (where they run, also in the other tests) and in two sizes without, and a GPU's, which
computes by plain products here."""
ADAM = protocol.Adam(lr=1e-2, beta1=0.9, beta2=0.95, eps=1e-3, weight_decay=0.1, clip=1.0)


def published(config: transformers.PreTrainedConfig = LLAMA) -> transformers.PreTrainedModel:
    torch.manual_seed(5)
    config._attn_implementation = "eager"
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    for weight in model.parameters():  # larger than the usual start: attention and softmax far from uniform
        torch.nn.init.normal_(weight, 1.0 if weight.ndim == 1 else 0.0, 0.25)
    return model


def decoder(config: transformers.PreTrainedConfig = LLAMA, dtype: torch.dtype = torch.float32) -> Decoder:
    ours = DecoderConfig.from_hf(config.to_dict())
    return Decoder(ours, {name: w.detach().to(dtype) for name, w in fuse(ours, published(config).state_dict()).items()})


def member(rng: random.Random, length: int, *, every: int = 1) -> protocol.GroupMember:
    """A tail whose tokens carry loss except each ``every``-th (the environment's) where ``every`` > 1."""
    return protocol.GroupMember(
        tokens=[rng.randrange(HF["vocab_size"]) for _ in range(length)],
        logprobs=[-6.0 - rng.random() for _ in range(length)],
        advantages=[rng.gauss(0, 1) for _ in range(length)],
        weights=[0.0 if every > 1 and i % every == 0 else 0.05 + rng.random() / 20 for i in range(length)],
    )


def unit(rng: random.Random, prompt: int, tails: list[int], *, every: int = 1) -> protocol.SharedPrefixGroup:
    tokens = [rng.randrange(HF["vocab_size"]) for _ in range(prompt)]
    return protocol.SharedPrefixGroup(prompt=tokens, members=[member(rng, n, every=every) for n in tails])


def units(seed: int) -> list[protocol.SharedPrefixGroup]:
    """Shared and single prompts, tails of one to many tokens, tokens of the environment between."""
    rng = random.Random(seed)
    return [unit(rng, 7, [5, 9, 1, 3]), unit(rng, 1, [12]), unit(rng, 11, [4, 20, 17], every=3), unit(rng, 3, [1, 1])]


def ref(policy: str, parent: str = "v0") -> protocol.AdapterRef:
    return protocol.AdapterRef(policy=policy, version=0, hash=parent, rank=1, alpha=1.0)


def about(policy: str, op: str) -> dict[str, object]:
    return {
        "op": op, "policy": policy, "lease": 1, "parent": ref(policy), "steps": 0, "tenant": f"tenant of {policy}",
    }  # fmt: skip


def forward_backward(policy: str = "p", *, op: str = "fb", **given: object) -> protocol.ForwardBackward:
    fields = about(policy, op) | {"batch_ticket": "", "loss": AIPO, "temperature": 0.7}
    return protocol.ForwardBackward(**(fields | given))  # type: ignore[arg-type]


def optim(policy: str = "p", *, op: str = "opt", **given: object) -> protocol.OptimStep:
    return protocol.OptimStep(**(about(policy, op) | {"adam": ADAM, "operations": 1} | given))  # type: ignore[arg-type]


def adapter_folder(folder: Path, rank: int, seed: int, targets: tuple[str, ...] = PARTS) -> Path:
    """An adapter with B ≠ 0, so that every gradient is alive."""
    folder.mkdir(parents=True, exist_ok=True)
    adapter = init_adapter(DecoderConfig.from_hf(LLAMA.to_dict()), rank, 2.0 * rank, list(targets), seed)
    generator = torch.Generator().manual_seed(seed + 100)
    for _, b in adapter.weights.values():
        b.copy_(torch.randn(b.shape, generator=generator) * 0.1)
    AdapterExport(adapter).write(folder)
    return folder


def trainer(
    of: Decoder,
    folders: dict[str, Path],
    limits: PassLimits | None = None,
    attention: AttentionFactory | None = None,
    *,
    compiled: bool = True,
    backbone: type[NativeBackbone] = NativeBackbone,
    **given: object,
) -> PackedTrainer:
    made = PackedTrainer(
        backbone(of, limits, attention, compiled=compiled), **({"max_rank": 16, "slice_tokens": 256} | given)
    )  # type: ignore[arg-type]
    for policy, folder in folders.items():
        made.load(policy, 1, ref(policy), folder)
    return made


def results(of: PackedTrainer) -> dict[str, TrainerResult]:
    while of.queue.step():
        pass
    assert of.queue.pending == 0
    return {one.done.op: one for one in of.queue.drain()}


def finish(of: PackedTrainer) -> dict[str, protocol.OperationDone]:
    return {op: one.done for op, one in results(of).items()}


def exported(of: PackedTrainer, op: str = "opt") -> Export:
    export = results(of)[op].export
    assert export is not None
    return export


def gradient(of: PackedTrainer, policy: str = "p") -> Tensor:
    return of.held[policy].state.gradient.clone()


def masters(of: PackedTrainer, policy: str = "p") -> Tensor:
    return of.held[policy].state.masters.clone()


def close(given: Tensor, wanted: Tensor, share: float = 2e-5) -> None:
    assert given.shape == wanted.shape
    assert (given - wanted).abs().max() <= share * wanted.abs().max()


def reference(
    folder: Path,
    batch: list[protocol.SharedPrefixGroup],
    config: transformers.PreTrainedConfig = LLAMA,
    dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, list[float]]:
    """AIPO's gradient by PEFT, transformers and autograd, one sequence at a time, in the order of a policy's flat
    vector; and the loss tokens' log-probs."""
    model = peft.PeftModel.from_pretrained(published(config).to(dtype), folder, is_trainable=True)
    logprobs: list[float] = []
    for one in batch:
        for m in one.members:
            ids = torch.tensor([one.prompt + m.tokens])
            scores = torch.log_softmax(model(ids).logits[0].double() / 0.7, -1)
            logp = scores[len(one.prompt) - 1 : -1].gather(1, torch.tensor(m.tokens)[:, None])[:, 0]
            q, a, w = (torch.tensor(x, dtype=torch.float64) for x in (m.logprobs, m.advantages, m.weights))
            (-w * (logp.detach() - q).exp().clamp(max=4.0) * a * logp).sum().backward()
            logprobs += [x for x, weight in zip(logp.tolist(), m.weights, strict=True) if weight]
    found = {name: p.grad.float() for name, p in model.named_parameters() if p.grad is not None}
    return flat_lora(found, config.num_hidden_layers), logprobs


by_peft: dict[str, tuple[tuple[Tensor, list[float]], tuple[Tensor, list[float]]]] = {}
"""The model of one configuration's tests: every attention's gradient and log-probabilities are PEFT's. In float64, and
in float32."""

ROUNDING = 2.0
"""At most so many times the rounding error of PEFT in float32, by their root mean squares. The largest error of one
token depends on the processor: on some, two float32 programs that are both right differ by more than 2e-5 there."""


def as_exact(given: Tensor, exact: Tensor, in_float32: Tensor) -> None:
    """``given`` is as near to the float64 values as PEFT is in float32."""
    error, rounding = ((one.double() - exact.double()).square().mean().sqrt().item() for one in (given, in_float32))
    assert given.shape == exact.shape and error <= ROUNDING * rounding, (error, rounding)


@pytest.mark.parametrize(
    "config",
    [
        LLAMA,
        transformers.MistralConfig(**HF, sliding_window=6),
        transformers.Qwen3Config(**HF),
    ],
    ids=["llama", "mistral with a window", "qwen3"],
)
@pytest.mark.parametrize("attention", ATTENTIONS.values(), ids=ATTENTIONS)
def test_gradient_equals_that_of_peft(
    tmp_path: Path, config: transformers.PreTrainedConfig, attention: AttentionFactory | None
) -> None:
    """Shared prompts, masks, temperature and loss against a model that computes each sequence by itself."""
    if config is LLAMA:
        folder = adapter_folder(tmp_path / "p", 4, 1)
    else:
        folder = tmp_path
        torch.manual_seed(1)
        adapter = init_adapter(DecoderConfig.from_hf(config.to_dict()), 4, 8.0, list(PARTS), 1)
        for _, b in adapter.weights.values():
            b.normal_(0, 0.1)
        AdapterExport(adapter).write(folder)
    if config.model_type not in by_peft:
        doubles, floats = (reference(folder, units(0), config, dtype) for dtype in (torch.float64, torch.float32))
        by_peft[config.model_type] = doubles, floats
    (wanted, logprobs), (gradient_in_float32, logprobs_in_float32) = by_peft[config.model_type]
    ours = trainer(decoder(config), {"p": folder}, attention=attention)
    ours.forward_backward(forward_backward(), protocol.TrainingBatch(groups=units(0)))
    metrics = finish(ours)["fb"].metrics
    close(gradient(ours), wanted)
    as_exact(gradient(ours), wanted, gradient_in_float32)
    assert metrics["tokens"] == len(logprobs)
    ours.forward_backward(forward_backward(op="only", forward_only=True), protocol.TrainingBatch(groups=units(0)))
    given = torch.frombuffer(bytearray(finish(ours)["only"].logprobs), dtype=torch.float32)
    as_exact(given, *(torch.tensor(one, dtype=torch.float64) for one in (logprobs, logprobs_in_float32)))
    close(gradient(ours), wanted)  # forward_only adds nothing


def fused_targets() -> dict[str, tuple[str, ...]]:
    return {"a": PARTS, "b": ("q", "v"), "c": ("k", "o", "up"), "d": PARTS, "e": ("gate", "down")}


def test_packed_policies_train_as_if_alone(tmp_path: Path) -> None:
    """Five policies of different ranks, targets and losses in one pass: each gradient and step as if alone."""
    ranks = {"a": 1, "b": 3, "c": 8, "d": 16, "e": 5}
    losses = {
        "a": AIPO,
        "b": protocol.Loss(name="cross_entropy"),
        "c": GSPO,
        "d": protocol.Loss(name="ppo", params={"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}),
        "e": protocol.Loss(name="dro", params={"beta": 0.05}),
    }
    folders = {p: adapter_folder(tmp_path / p, ranks[p], i, fused_targets()[p]) for i, p in enumerate(ranks)}
    base = decoder()

    def queue(at: PackedTrainer, policy: str, seed: int) -> None:
        op = forward_backward(policy, op=f"fb {policy}", loss=losses[policy], temperature=0.5 + seed / 10)
        at.forward_backward(op, protocol.TrainingBatch(groups=units(seed)))

    packed = trainer(base, folders, slice_tokens=4096)
    for seed, policy in enumerate(ranks):
        queue(packed, policy, seed)
    assert packed.queue.step()
    assert len(packed.queue.drain()) == len(ranks)  # it was one pass
    alone = {}
    for seed, policy in enumerate(ranks):
        alone[policy] = trainer(base, {policy: folders[policy]})
        queue(alone[policy], policy, seed)
        finish(alone[policy])
        close(gradient(packed, policy), gradient(alone[policy], policy))
    for policy, solo in alone.items():
        for one in (packed, solo):
            one.optim_step(optim(policy))
            assert finish(one)["opt"].metrics["skipped"] == 0
        assert (masters(packed, policy) - masters(solo, policy)).abs().max() < 2e-6


def unshared(of: list[protocol.SharedPrefixGroup]) -> list[protocol.SharedPrefixGroup]:
    return [protocol.SharedPrefixGroup(prompt=one.prompt, members=[m]) for one in of for m in one.members]


def test_shared_prompt_equals_unshared(tmp_path: Path) -> None:
    folder = adapter_folder(tmp_path / "p", 8, 2)
    made = []
    for batch in (units(4), unshared(units(4))):
        one = trainer(decoder(), {"p": folder}, slice_tokens=4096)
        one.forward_backward(forward_backward(), protocol.TrainingBatch(groups=batch))
        finish(one)
        made.append(one)
    shared, apart = made
    close(gradient(shared), gradient(apart))
    assert shared.trained < apart.trained  # the prompts were computed once
    for one in made:
        one.optim_step(optim())
        finish(one)
    assert (masters(shared) - masters(apart)).abs().max() < 2e-6


def test_bfloat16_gradient_is_as_close_as_that_of_peft(tmp_path: Path) -> None:
    folder = adapter_folder(tmp_path / "p", 8, 2)
    gradients = []
    for dtype, batch in ((torch.float32, units(4)), (torch.bfloat16, units(4)), (torch.bfloat16, unshared(units(4)))):
        one = trainer(decoder(dtype=dtype), {"p": folder})
        one.forward_backward(forward_backward(), protocol.TrainingBatch(groups=batch))
        finish(one)
        gradients.append(gradient(one))
    exact, shared, apart = gradients
    theirs, _ = reference(folder, units(4), dtype=torch.bfloat16)
    assert (shared - exact).norm() < 1.2 * (theirs - exact).norm()
    assert (shared - apart).norm() < 0.03 * exact.norm()


def test_recomputing_layers_and_small_slices_change_nothing(tmp_path: Path) -> None:
    folder = adapter_folder(tmp_path / "p", 8, 2)
    gradients = []
    for given in ({}, {"limits": PassLimits(resident_tokens=0, max_tokens=4096)}, {"slice_tokens": 16}):
        one = trainer(decoder(), {"p": folder}, **given)
        one.forward_backward(forward_backward(), protocol.TrainingBatch(groups=units(4)))
        finish(one)
        gradients.append(gradient(one))
    close(gradients[1], gradients[0])
    close(gradients[2], gradients[0])


@pytest.mark.parametrize("loss", [AIPO, GSPO], ids=["aipo", "gspo"])
def test_group_larger_than_a_slice_is_split_between_its_members(tmp_path: Path, loss: protocol.Loss) -> None:
    """Gradient, sums and the order of log-probs are those of one pass; no slice is longer than the longest trajectory,
    or than twice a prompt, of which a slice then is no more than half. A trajectory stays whole: gspo looks at it."""
    folder = adapter_folder(tmp_path / "p", 8, 2)
    rng = random.Random(3)
    groups = [unit(rng, 6, [9, 1, 14, 5, 12, 30, 7], every=4), unit(rng, 20, [3] * 12), unit(rng, 4, [2, 2])]
    groups[0].members[2].weights[:] = [0.0] * 14  # a member without loss
    batch = protocol.TrainingBatch(groups=groups)
    whole, cut = (trainer(decoder(), {"p": folder}, slice_tokens=tokens) for tokens in (4096, 32))
    for at in (whole, cut):
        at.forward_backward(forward_backward(op="only", loss=loss, forward_only=True), batch)
        at.forward_backward(forward_backward(loss=loss), batch)
    slices, before = [], 0
    while cut.queue.step():
        slices.append(cut.trained - before)
        before = cut.trained
    assert len(slices) > 8 and max(slices) <= 2 * 20
    wanted, given = finish(whole), {done.op: done for done, _ in cut.queue.drain()}
    assert [finished.error for finished in given.values()] == ["", ""]
    close(gradient(cut), gradient(whole))
    for op, finished in given.items():
        assert finished.metrics.keys() == wanted[op].metrics.keys()
        for name in ("tokens", "loss:sum", "ratio:sum", "clipped:sum"):
            assert finished.metrics[name] == pytest.approx(wanted[op].metrics[name], rel=1e-4)
    logp, there = (torch.frombuffer(bytearray(of["only"].logprobs), dtype=torch.float32) for of in (given, wanted))
    assert logp.tolist() == pytest.approx(there.tolist(), abs=2e-5)


def test_memory_limit_splits_groups_and_refuses_longer_trajectories(tmp_path: Path) -> None:
    """A prompt may be most of a piece; a group that fits is not affected."""
    at = trainer(
        decoder(), {"p": adapter_folder(tmp_path / "p", 4, 3)}, limits=PassLimits(resident_tokens=32, max_tokens=32)
    )
    rng = random.Random(0)
    fits = protocol.TrainingBatch(groups=[unit(rng, 24, [9] * 5)])  # the last token is not read
    at.forward_backward(forward_backward(op="fits"), fits)
    at.queue.step()
    assert at.trained == 32
    finish(at)
    at.forward_backward(forward_backward(op="long"), protocol.TrainingBatch(groups=[unit(rng, 24, [3, 10])]))
    refused = finish(at)["long"]
    assert refused.category == "lost"  # another worker may have more
    assert refused.error == "a trajectory of 33 tokens is longer than the 32 that fit this worker's memory"
    at.forward_backward(forward_backward(operations=1), fits)
    at.optim_step(optim(operations=2))
    assert finish(at)["opt"].error == ""


def test_copied_prompt_keys_count_as_memory(tmp_path: Path) -> None:
    """A group of 64 tokens whose members copy its prompt of 16 at half a token each takes 112 tokens of memory: two
    pieces of 40 tokens fill 64 each, and are recomputed if fewer may stay resident."""
    twice: list[bool] = []

    class Recorded(NativeBackbone):
        def forward(self, *given: Any, recompute: bool) -> Any:
            twice.append(recompute)
            return super().forward(*given, recompute=recompute)

    folder, rng = adapter_folder(tmp_path / "p", 4, 3), random.Random(0)
    batch = protocol.TrainingBatch(groups=[unit(rng, 16, [9] * 6), unit(rng, 8, [3])])  # the last token is not read
    gradients = []
    for limits, wanted in (
        (PassLimits(resident_tokens=74, max_tokens=74), [74]),
        (PassLimits(resident_tokens=64, max_tokens=64, copied_key_share=0.5), [40, 40, 10]),
        (PassLimits(resident_tokens=63, max_tokens=64, copied_key_share=0.5), [40, 40, 10]),
    ):
        at, slices = trainer(decoder(), {"p": folder}, limits, compiled=False, backbone=Recorded), []
        at.forward_backward(forward_backward(), batch)
        while at.queue.pending:
            before = at.trained
            at.queue.step()
            slices.append(at.trained - before)
        assert slices == wanted
        gradients.append(gradient(at))
    assert twice == [False] + [False] * 3 + [True, True, False]
    close(gradients[1], gradients[0])
    close(gradients[2], gradients[0])


def test_environment_tokens_are_attended_to_but_carry_no_loss(tmp_path: Path) -> None:
    folder = adapter_folder(tmp_path / "p", 4, 3)
    rng = random.Random(1)
    one = unit(rng, 5, [6])
    one.members[0].weights[2] = 0.0  # the environment's token

    def run(changed: protocol.SharedPrefixGroup) -> tuple[Tensor, dict[str, float]]:
        at = trainer(decoder(), {"p": folder})
        at.forward_backward(forward_backward(), protocol.TrainingBatch(groups=[changed]))
        metrics = finish(at)["fb"].metrics
        return gradient(at), metrics

    before, metrics = run(one)
    assert metrics["tokens"] == 5
    one.members[0].logprobs[2] = float("nan")
    one.members[0].advantages[2] = float("nan")
    assert torch.equal(run(one)[0], before)  # its log-prob and advantage are ignored
    one.members[0].tokens[2] = (one.members[0].tokens[2] + 1) % HF["vocab_size"]
    assert not torch.equal(run(one)[0], before)  # but the token is read


def test_adamw_equals_the_published_step(tmp_path: Path) -> None:
    """Two steps against the formula in float64: clipping by the global norm, bias correction, decoupled decay."""
    at = trainer(decoder(), {"p": adapter_folder(tmp_path / "p", 4, 3)})
    w, m, v = masters(at).double(), 0.0, 0.0
    for step in (1, 2):
        at.forward_backward(forward_backward(steps=step - 1), protocol.TrainingBatch(groups=units(step)))
        finish(at)
        g = gradient(at).double()
        at.optim_step(optim(steps=step - 1))
        metrics = finish(at)["opt"].metrics
        assert metrics["grad_norm"] == pytest.approx(g.norm().item(), rel=1e-5)
        g = g * min(1.0, ADAM.clip / g.norm().item())
        m = ADAM.beta1 * m + (1 - ADAM.beta1) * g
        v = ADAM.beta2 * v + (1 - ADAM.beta2) * g**2
        corrected = (m / (1 - ADAM.beta1**step)) / ((v / (1 - ADAM.beta2**step)).sqrt() + ADAM.eps)
        w = w * (1 - ADAM.lr * ADAM.weight_decay) - ADAM.lr * corrected
        assert (masters(at).double() - w).abs().max() < 2e-6


def test_metrics_are_sums(tmp_path: Path) -> None:
    folder = adapter_folder(tmp_path / "p", 4, 3)
    batch = protocol.TrainingBatch(groups=units(2))
    at = trainer(decoder(), {"p": folder}, slice_tokens=16)
    at.forward_backward(forward_backward(op="only", forward_only=True), batch)
    logp = torch.frombuffer(bytearray(finish(at)["only"].logprobs), dtype=torch.float32).double()
    at.forward_backward(forward_backward(), batch)
    metrics = finish(at)["fb"].metrics
    of = [(m, i) for one in batch.groups for m in one.members for i, weight in enumerate(m.weights) if weight]
    q, a, w = (torch.tensor([getattr(m, k)[i] for m, i in of]).double() for k in ("logprobs", "advantages", "weights"))
    ratio = (logp - q).exp()
    assert metrics["tokens"] == len(of)
    assert metrics["loss:sum"] == pytest.approx((-w * ratio.clamp(max=4) * a * logp).sum().item(), rel=1e-4)
    assert metrics["ratio:sum"] == pytest.approx(ratio.sum().item(), rel=1e-4)
    assert metrics["clipped:sum"] == (ratio > 4).sum().item()
    assert metrics["logp_diff:sum"] == pytest.approx((logp - q).abs().sum().item(), rel=1e-4)
    assert metrics["logp_diff:max"] == pytest.approx((logp - q).abs().max().item(), rel=1e-4)
    assert metrics["seconds"] > 0


def test_entropy_and_kl_to_the_base(tmp_path: Path) -> None:
    """Entropy and the k3 penalty against full logits of the decoder with the adapter on and off."""
    folder = adapter_folder(tmp_path / "p", 4, 3)
    rng = random.Random(2)
    one = unit(rng, 4, [6])
    model = peft.PeftModel.from_pretrained(published(), folder).eval()
    with torch.no_grad():
        ids = torch.tensor([one.prompt + one.members[0].tokens])
        on = torch.log_softmax(model(ids).logits[0, 3:-1].double() / 0.7, -1)
        with model.disable_adapter():
            off = torch.log_softmax(model(ids).logits[0, 3:-1].double() / 0.7, -1)
    tokens = torch.tensor(one.members[0].tokens)[:, None]
    gap = (off.gather(1, tokens) - on.gather(1, tokens))[:, 0]
    k3 = gap.exp() - gap - 1
    at = trainer(decoder(), {"p": folder})
    at.forward_backward(forward_backward(op="plain"), protocol.TrainingBatch(groups=[one]))
    at.forward_backward(forward_backward(op="kl", kl_weight=0.3, operations=1), protocol.TrainingBatch(groups=[one]))
    done = finish(at)
    metrics = done["kl"].metrics
    assert metrics["kl:sum"] == pytest.approx(k3.sum().item(), rel=1e-3)
    assert metrics["entropy:sum"] == pytest.approx(-(on.exp() * on).sum().item(), rel=1e-4)
    added = metrics["loss:sum"] - done["plain"].metrics["loss:sum"]
    assert added == pytest.approx(0.3 * (torch.tensor(one.members[0].weights) * k3).sum().item(), rel=1e-3)


class FullOnce(NativeBackbone):
    """The memory of its device is full at the end of the first backward pass."""

    fits = False

    def forward(self, *given: Any, recompute: bool) -> Any:
        passed = super().forward(*given, recompute=recompute)
        if not self.fits:
            self.fits, backward = True, passed.backward

            def full(d_hidden: Tensor) -> None:
                backward(d_hidden)
                raise torch.OutOfMemoryError("CUDA out of memory")

            passed.backward = full  # type: ignore[method-assign]
        return passed


def test_pass_out_of_memory_is_lost_and_next_passes_are_shorter(tmp_path: Path) -> None:
    """On a GPU, within the backward pass: the operations run again as if the pass had not begun."""
    folders = {p: adapter_folder(tmp_path / p, 4, i) for i, p in enumerate("xy")}
    at = trainer(decoder(), folders, slice_tokens=4096, backbone=FullOnce)
    for policy in "xy":
        at.forward_backward(forward_backward(policy, op=f"fb {policy}"), protocol.TrainingBatch(groups=units(0)))
        at.optim_step(optim(policy, op=f"opt {policy}"))
    done = finish(at)
    at.load("x", 1, ref("x"), folders["x"])
    at.forward_backward(forward_backward("x", op="again"), protocol.TrainingBatch(groups=units(0)))
    at.optim_step(optim("x", op="opt again"))
    done |= finish(at)
    assert {op: answer.category for op, answer in done.items()} == {
        "fb x": "lost", "fb y": "lost", "opt x": "stale", "opt y": "stale", "again": "", "opt again": "",
    }  # fmt: skip
    assert at.slice_tokens == 2048 and not at.queue.pending
    alone = trainer(decoder(), folders, slice_tokens=2048)
    alone.forward_backward(forward_backward("x", op="again"), protocol.TrainingBatch(groups=units(0)))
    alone.optim_step(optim("x", op="opt again"))
    assert finish(alone)["opt again"].metrics["grad_norm"] == done["opt again"].metrics["grad_norm"]


def test_nan_skips_one_policy_and_changes_no_other(tmp_path: Path) -> None:
    """A NaN in one policy's loss, then in its weights: its step is skipped, the other's is the same bit for bit."""
    folders = {p: adapter_folder(tmp_path / p, 4, i) for i, p in enumerate("xy")}
    base = decoder()

    def run(advantage: float, weights: float) -> tuple[PackedTrainer, dict[str, protocol.OperationDone]]:
        at = trainer(base, folders, slice_tokens=4096)
        at.held["x"].state.sites[1, "qkv"].a.mul_(weights)
        bad = units(0)
        bad[0].members[1].advantages[2] = advantage
        at.forward_backward(forward_backward("x", op="fb x"), protocol.TrainingBatch(groups=bad))
        at.forward_backward(forward_backward("y", op="fb y"), protocol.TrainingBatch(groups=units(1)))
        at.optim_step(optim("x", op="opt x"))
        at.optim_step(optim("y", op="opt y"))
        return at, finish(at)

    fine, _ = run(1.0, 1.0)
    for given in ((float("nan"), 1.0), (1.0, float("nan")), (float("inf"), 1.0)):
        at, done = run(*given)
        assert done["opt x"].metrics["skipped"] == 1
        assert done["opt y"].metrics["skipped"] == 0
        assert done["fb x"].metrics["nonfinite"] >= 1
        assert not math.isfinite(done["fb x"].metrics["loss:sum"])
        before = trainer(base, folders)
        assert torch.equal(masters(at, "x"), masters(before, "x"))
        assert at.held["x"].state.step == 0
        assert torch.equal(masters(at, "y"), masters(fine, "y"))
        assert at.holds("x", 1, "v0", 0) and at.holds("y", 1, "v0", 1)
        # the policy continues with its next batch
        at.held["x"].state._refresh()
        at.forward_backward(forward_backward("x"), protocol.TrainingBatch(groups=units(0)))
        at.optim_step(optim("x"))
        assert finish(at)["opt"].metrics["skipped"] == 0


@pytest.mark.parametrize("changes", [{"eps": 0.0}, {"eps": 1e-50}, {"lr": 1e39}, {"lr": 1e30, "weight_decay": 1e30}])
def test_step_whose_result_is_not_finite_changes_nothing(tmp_path: Path, changes: dict[str, float]) -> None:
    """B is 0 at first, and so is the gradient of A: without eps its update is 0 / 0."""
    config = DecoderConfig.from_hf(LLAMA.to_dict())
    (tmp_path / "p").mkdir()
    AdapterExport(init_adapter(config, 4, 8.0, list(PARTS), 1)).write(tmp_path / "p")
    bad, plain = (trainer(decoder(), {"p": tmp_path / "p"}) for _ in range(2))
    batch = protocol.TrainingBatch(groups=units(0))
    bad.forward_backward(forward_backward(), batch)
    bad.optim_step(optim(adam=msgspec.structs.replace(ADAM, **changes)))
    before = masters(bad)
    assert finish(bad)["opt"].metrics["skipped"] == 1
    assert torch.equal(masters(bad), before) and bad.held["p"].state.step == 0
    for at in (bad, plain):
        at.forward_backward(forward_backward(), batch)
        at.optim_step(optim(adam=msgspec.structs.replace(ADAM, eps=1e-37)))  # small, and yet enough
        assert finish(at)["opt"].metrics["skipped"] == 0
    assert torch.equal(masters(bad), masters(plain)) and bool(masters(bad).isfinite().all())


def test_export_resumes_bit_for_bit(tmp_path: Path) -> None:
    """Exported, loaded elsewhere, and trained on: the same next step; and the export is a snapshot."""
    first = trainer(decoder(), {"p": adapter_folder(tmp_path / "p", 4, 3)})
    first.forward_backward(forward_backward(), protocol.TrainingBatch(groups=units(0)))
    first.optim_step(optim(upload="ticket"))
    export = exported(first)

    def next_step(at: PackedTrainer, parent: str, steps: int) -> Tensor:
        at.forward_backward(
            forward_backward(parent=ref("p", parent), steps=steps), protocol.TrainingBatch(groups=units(1))
        )
        at.optim_step(optim(parent=ref("p", parent), steps=steps))
        assert not finish(at)["opt"].error
        return masters(at)

    wanted = next_step(first, "v0", 1)
    (tmp_path / "v1").mkdir()
    names = export.write(tmp_path / "v1")
    assert names == ["adapter_config.json", "adapter_model.safetensors", "trainer_state.safetensors"]
    second = PackedTrainer(NativeBackbone(decoder()), max_rank=16, slice_tokens=256)
    second.load("p", 2, ref("p", "v1"), tmp_path / "v1")
    second.forward_backward(
        forward_backward(lease=2, parent=ref("p", "v1"), op="fb"), protocol.TrainingBatch(groups=units(1))
    )
    second.optim_step(optim(lease=2, parent=ref("p", "v1")))
    finish(second)
    assert torch.equal(masters(second), wanted)
    assert torch.equal(second.held["p"].state.exp_avg_sq, first.held["p"].state.exp_avg_sq)


def test_operations_run_only_on_the_state_they_name(tmp_path: Path) -> None:
    folder = adapter_folder(tmp_path / "p", 4, 3)
    at = trainer(decoder(), {"p": folder})
    batch = protocol.TrainingBatch(groups=units(0))
    assert at.holds("p", 1, "v0", 0)
    for wrong in ({"lease": 2}, {"steps": 1}, {"parent": ref("p", "other")}, {"policy": "q"}):
        at.forward_backward(forward_backward(**wrong), batch)
        at.optim_step(optim(**wrong))
        done = finish(at)
        assert done["fb"].category == done["opt"].category == "stale"
    at.optim_step(optim())
    assert finish(at)["opt"].category == "stale"  # nothing was accumulated
    at.forward_backward(forward_backward(), batch)
    at.optim_step(optim(upload="t"))
    assert at.holds("p", 1, "v0", 1) and not at.holds("p", 1, "v0", 0)  # the queued step counts
    finish(at)
    at.mark_committed("p", 1, ref("p", "v1"))
    assert at.holds("p", 1, "v1", 0) and at.holds("p", 1, "v0", 1) and not at.holds("p", 1, "v0", 0)
    at.load("p", 2, ref("p", "v0"), folder)
    assert at.holds("p", 2, "v0", 0) and not at.holds("p", 1, "v1", 0)
    at.evict("p")
    assert not at.holds("p", 2, "v0", 0)


def test_step_refuses_a_gradient_that_misses_an_operation(tmp_path: Path) -> None:
    at = trainer(decoder(), {"p": adapter_folder(tmp_path / "p", 4, 3)}, slice_tokens=16)
    batch = protocol.TrainingBatch(groups=units(0))
    at.forward_backward(forward_backward(), batch)
    finish(at)
    wanted = gradient(at)
    at.forward_backward(forward_backward(operations=1), batch)
    finish(at)
    close(gradient(at), 2 * wanted)
    for operations in (0, 1, 3):
        at.forward_backward(forward_backward(operations=operations), batch)
        at.optim_step(optim(operations=operations))
        assert [result.category for result in finish(at).values()] == ["stale", "stale"]
    at.forward_backward(
        forward_backward(op="bad", operations=2),
        protocol.TrainingBatch(groups=[protocol.SharedPrefixGroup(prompt=[], members=[])]),
    )
    at.optim_step(optim(operations=3))
    done = finish(at)
    assert done["bad"].category == "failed" and done["opt"].category == "stale"
    # half of an operation is in the gradient when it is cancelled: no step may use it, and no operation follows it
    at.forward_backward(forward_backward(op="half", operations=2), batch)
    at.queue.step()
    at.queue.cancel("half")
    for operations in range(4):
        at.forward_backward(forward_backward(operations=operations), batch)
        at.optim_step(optim(operations=operations))
        assert [result.category for result in finish(at).values()] == ["stale", "stale"]
    at.load("p", 2, ref("p"), tmp_path / "p")
    at.forward_backward(forward_backward(lease=2), batch)
    at.optim_step(optim(lease=2))
    assert finish(at)["opt"].error == ""


def test_step_without_operations_steps_on_a_gradient_of_zero(tmp_path: Path) -> None:
    at = trainer(decoder(), {"p": adapter_folder(tmp_path / "p", 4, 3)})
    at.optim_step(optim(operations=0))
    metrics = finish(at)["opt"].metrics
    assert (metrics["grad_norm"], metrics["skipped"]) == (0, 0)
    assert at.holds("p", 1, "v0", 1)


@pytest.mark.parametrize(
    ("batch", "loss", "says"),
    [
        (protocol.SharedPrefixGroup(prompt=[], members=[]), AIPO, "at least one token"),
        (
            protocol.SharedPrefixGroup(
                prompt=[1], members=[protocol.GroupMember(tokens=[1], logprobs=[], advantages=[], weights=[])]
            ),
            AIPO,
            "length",
        ),
        (unit(random.Random(0), 500, [20]), AIPO, "context of 512"),
        (protocol.SharedPrefixGroup(prompt=[173], members=[member(random.Random(0), 2)]), AIPO, "vocabulary"),
        (unit(random.Random(0), 2, [2]), protocol.Loss(name="stable"), "no loss is named 'stable'"),
        (unit(random.Random(0), 2, [2]), protocol.Loss(name="aipo"), "rho"),
    ],
)
def test_invalid_batch_or_loss_fails_with_a_reason(
    tmp_path: Path, batch: protocol.SharedPrefixGroup, loss: protocol.Loss, says: str
) -> None:
    at = trainer(decoder(), {"p": adapter_folder(tmp_path / "p", 4, 3)})
    at.forward_backward(forward_backward(loss=loss), protocol.TrainingBatch(groups=[batch]))
    finished = finish(at)["fb"]
    assert finished.category == "failed" and says in finished.error


class CountingBackbone(NativeBackbone):
    """Counts the rows that it projects to the vocabulary in one direction."""

    projected = 0

    def logprobs(self, hidden: Tensor, *given: Any, **named: Any) -> TokenLogprobs:
        self.projected += len(hidden)
        return super().logprobs(hidden, *given, **named)


@pytest.mark.parametrize("forward_only", [False, True])
def test_targets_of_one_row_equal_those_of_rows_alone(tmp_path: Path, forward_only: bool) -> None:
    """The loss of a distribution is the sum of its targets' losses, and a row is projected once for all of them."""
    rng, folder, tokens = random.Random(1), adapter_folder(tmp_path / "p", 4, 3), 9
    rows = sorted(rng.randrange(tokens) for _ in range(50)) + [8] * 200 + [2, 2]

    def of(at: Sequence[int], *, packed: bool) -> protocol.Datum:
        values = {name: [random.Random(f"{name} {i}").gauss(0, 1) for i in at] for name in ("advantages", "weights")}
        numbers = {"rows": [rows[i] for i in at], "targets": [(7 * i) % 61 for i in at]}
        whole: dict[str, Any] = {"logprobs": [-5.0] * len(at), **values, **numbers, "tokens": list(range(40, 49))}
        kinds = {name: "i" if isinstance(given[0], int) else "f" for name, given in whole.items()}
        if packed:
            whole = {name: array(kinds[name], given).tobytes() for name, given in whole.items()}
        return protocol.Datum(**whole)

    found = []
    everything = [unit(rng, 4, [3, 2])]
    for data in ([of(range(len(rows)), packed=True)], [of([i], packed=False) for i in range(len(rows))]):
        backbone = CountingBackbone(decoder(), None, None)
        at = PackedTrainer(backbone, max_rank=16, slice_tokens=4096)
        at.load("p", 1, ref("p"), folder)
        op = forward_backward(loss=protocol.Loss(name="cross_entropy"), forward_only=forward_only, logprobs=True)
        at.forward_backward(op, protocol.TrainingBatch(groups=everything, data=data))
        found.append((finish(at)["fb"], gradient(at), backbone.projected))
    (done, soft, projected), (wanted, alone, each) = found
    given, expected = (torch.frombuffer(bytearray(one.logprobs), dtype=torch.float32) for one in (done, wanted))
    torch.testing.assert_close(given, expected, atol=5e-5, rtol=0)
    for name in ("loss:sum", "entropy:sum", "tokens") if not forward_only else ("loss:sum",):
        assert done.metrics[name] == pytest.approx(wanted.metrics[name], rel=1e-4)
    assert (projected, each) == (5 + len(set(rows)) + 1, 5 + len(rows))
    if not forward_only:
        assert alone.any()
        close(soft, alone)


def test_groups_without_loss_count_no_tokens(tmp_path: Path) -> None:
    at = trainer(decoder(), {"p": adapter_folder(tmp_path / "p", 4, 3)})
    quiet = unit(random.Random(0), 3, [4])
    quiet.members[0].weights[:] = [0.0] * 4
    at.forward_backward(forward_backward(), protocol.TrainingBatch(groups=[quiet]))
    assert finish(at)["fb"].metrics["tokens"] == 0
    assert at.trained == 0


def test_tenants_alternate(tmp_path: Path) -> None:
    """A tenant with many groups queued does not delay one with few: passes rotate."""
    folders = {p: adapter_folder(tmp_path / p, 2, i) for i, p in enumerate("xy")}
    at = trainer(decoder(), folders, slice_tokens=64)
    rng = random.Random(0)
    at.forward_backward(
        forward_backward("x", op="much"), protocol.TrainingBatch(groups=[unit(rng, 10, [11]) for _ in range(30)])
    )
    at.forward_backward(
        forward_backward("y", op="little"), protocol.TrainingBatch(groups=[unit(rng, 10, [11]) for _ in range(3)])
    )
    for _ in range(3):
        at.queue.step()
    assert [done.op for done, _ in at.queue.drain()] == ["little"]
    assert at.queue.pending == 1
    assert at.trained <= 3 * 64


def test_tenants_that_fit_a_slice_together_share_one_pass(tmp_path: Path) -> None:
    """Four batches of 254 tokens fill 1,016 of 1,024 tokens; one that fits only in part waits for the next pass."""
    rng = random.Random(0)
    batch = protocol.TrainingBatch(groups=[unit(rng, 60, [68]), unit(rng, 60, [68])])  # the last token is not read
    folders = {p: adapter_folder(tmp_path / p, 2, i) for i, p in enumerate("abcde")}
    at = trainer(decoder(), folders, slice_tokens=1024)
    for policy in "abcde":
        at.forward_backward(forward_backward(policy, op=policy), batch)
    assert at.queue.step()
    assert (at.trained, [done.op for done, _ in at.queue.drain()]) == (1016, list("abcd"))
    assert at.queue.step()
    assert (at.trained, [done.op for done, _ in at.queue.drain()]) == (5 * 254, ["e"])


@pytest.mark.parametrize("loss", [AIPO, GSPO], ids=["aipo", "gspo"])
@pytest.mark.parametrize("parts", [2, 3, 50])
def test_shares_of_a_batch_sum_to_its_gradient(tmp_path: Path, parts: int, loss: protocol.Loss) -> None:
    """One trainer's share, and the exported gradients of the others added to it, against the whole batch in one: the
    gradient, the sums of the metrics and the step."""
    folder = adapter_folder(tmp_path / "p", 8, 2)
    batch = protocol.TrainingBatch(groups=units(4))
    whole, first = trainer(decoder(), {"p": folder}), trainer(decoder(), {"p": folder})
    whole.forward_backward(forward_backward(loss=loss), batch)
    answers, exports = [], []
    for number, share in enumerate(shares := split_batch(batch, parts)):
        of = trainer(decoder(), {"p": folder}) if number else first
        of.forward_backward(forward_backward(loss=loss, upload="ticket" if number else ""), share)
        done, export = results(of)["fb"]
        answers.append(done)
        if number:
            exports.append(tmp_path / f"share {number}")
            exports[-1].mkdir()
            assert export is not None
            assert export.write(exports[-1]) == [GRADIENT_FILE]
    assert len(shares) == min(parts, 10)
    first.forward_backward(forward_backward(loss=loss, operations=1), protocol.TrainingBatch(), exports)
    answers.append(finish(first)["fb"])
    wanted = finish(whole)["fb"].metrics
    close(gradient(first), gradient(whole))
    given = join_metrics(answers)
    assert given | {"seconds": 0} == pytest.approx(wanted | {"seconds": 0}, rel=1e-4, abs=1e-4)
    for one in (first, whole):
        one.optim_step(optim(operations=2 if one is first else 1))
        assert finish(one)["opt"].metrics["skipped"] == 0
    assert (masters(first) - masters(whole)).abs().max() < 2e-6


def test_share_that_is_not_finite_skips_the_step(tmp_path: Path) -> None:
    folder = adapter_folder(tmp_path / "p", 8, 2)
    helper, first = trainer(decoder(), {"p": folder}), trainer(decoder(), {"p": folder})
    bad = units(4)[:1]
    bad[0].members[0].advantages[0] = math.inf
    helper.forward_backward(forward_backward(upload="ticket"), protocol.TrainingBatch(groups=bad))
    exported(helper, "fb").write(tmp_path)
    before = masters(first)
    first.forward_backward(forward_backward(), protocol.TrainingBatch(groups=units(4)), [tmp_path])
    first.optim_step(optim())
    assert finish(first)["opt"].metrics["skipped"] == 1
    assert torch.equal(masters(first), before)


def write_gradient(folder: Path, name: str, count: int) -> None:
    """A gradient of an adapter with ``count`` weights, and damaged ones."""
    path = folder / GRADIENT_FILE
    if name == "its adapter's":
        save_file({"gradient": torch.ones(count)}, path)
    elif name == "another adapter's":
        save_file({"gradient": torch.ones(count // 2)}, path)
    elif name == "one number":
        save_file({"gradient": torch.ones(1)}, path)
    elif name == "no real numbers":
        save_file({"gradient": torch.ones(count, dtype=torch.complex64)}, path)
    elif name == "another name":
        save_file({"moments": torch.ones(count)}, path)
    elif name == "no safetensors":
        path.write_bytes(b"damaged")
    elif name == "a fault of the disk":
        path.mkdir()


@pytest.mark.parametrize(
    ("name", "category", "step"),
    [
        ("its adapter's", "", ""),
        ("another adapter's", "failed", "stale"),
        ("one number", "failed", "stale"),
        ("no real numbers", "failed", "stale"),
        ("another name", "failed", "stale"),
        ("no safetensors", "failed", "stale"),
        ("missing", "failed", "stale"),
        ("a fault of the disk", "lost", "lost"),
    ],
)
def test_gradient_that_cannot_be_added(tmp_path: Path, name: str, category: str, step: str) -> None:
    """Another adapter's fails the operation; a fault of this worker's disk loses it, so that another worker repeats
    it. No step is taken on a part of a gradient, and the other policy of the pass has its result."""
    at = trainer(decoder(), {policy: adapter_folder(tmp_path / policy, 8, 2) for policy in "py"}, slice_tokens=4096)
    write_gradient(tmp_path, name, len(masters(at)))
    at.forward_backward(forward_backward(), protocol.TrainingBatch(groups=units(4)), [tmp_path])
    at.forward_backward(forward_backward("y", op="other"), protocol.TrainingBatch(groups=units(4)))
    at.optim_step(optim())
    results = finish(at)
    assert {op: result.category for op, result in results.items()} == {"fb": category, "opt": step, "other": ""}
    assert ("a gradient does not fit its adapter" in results["fb"].error) == (category == "failed")


class FullBackbone(NativeBackbone):
    """Memory is full in its first pass."""

    full = True

    def forward(self, *given: Any, **named: Any) -> Any:
        if self.full:
            self.full = False
            raise MemoryError("full")
        return super().forward(*given, **named)


def test_fault_in_a_pass_loses_only_the_policies_of_that_pass(tmp_path: Path) -> None:
    at = PackedTrainer(FullBackbone(decoder()), max_rank=16, slice_tokens=16)
    rng = random.Random(0)
    for policy in "xyz":
        at.load(policy, 1, ref(policy), adapter_folder(tmp_path / policy, 4, 1))
        groups = [unit(rng, 10, [11]) for _ in range(2)]
        at.forward_backward(forward_backward(policy, op=policy), protocol.TrainingBatch(groups=groups))
    done = finish(at)
    assert {op: result.category for op, result in done.items()} == {"x": "lost", "y": "", "z": ""}
    assert set(at.held) == {"y", "z"}


def test_rank_above_max_rank_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="max_rank 4"):
        trainer(decoder(), {"p": adapter_folder(tmp_path / "p", 8, 0)}, max_rank=4)


def test_initial_versions(tmp_path: Path) -> None:
    """Version 0 from a seed has B = 0; from an adapter it has that adapter's weights."""
    at = trainer(decoder(), {})
    op = protocol.InitAdapter(op="i", policy="p", rank=4, alpha=8.0, targets=["q", "down"], seed=7, upload="t")
    new, again = at.initial_version(op, None), at.initial_version(op, None)
    assert new.adapter.modules == ["q_proj", "down_proj"]
    for (a, b), (other, _) in zip(new.adapter.weights.values(), again.adapter.weights.values(), strict=True):
        assert torch.equal(a, other) and not b.any()
    folder = adapter_folder(tmp_path / "source", 4, 1)
    assert at.initial_version(op, folder).adapter.weights[0, "up"][1].any()
    with pytest.raises(UserError, match="rank 4"):
        at.initial_version(msgspec.structs.replace(op, rank=8), folder)


MEMORY = """
import random, resource, sys
sys.path.insert(0, {tests!r})
import torch
from pathlib import Path
from tests.worker.trainer import test_trainer as t
from rookery.worker.model.config import DecoderConfig
from rookery.worker.model.decoder import Decoder
import transformers
torch.manual_seed(0)
config = DecoderConfig.from_hf(transformers.LlamaConfig(
    vocab_size=16384, hidden_size=192, intermediate_size=512, num_hidden_layers=12, num_attention_heads=6,
    num_key_value_heads=2, max_position_embeddings=8192, tie_word_embeddings=True).to_dict())
w = lambda *shape: torch.randn(*shape) * 0.05
weights = {{"embed": w(16384, 192), "norm": w(192)}}
for i in range(12):
    for name, shape in {{"attention_norm": (192,), "mlp_norm": (192,), "qkv": (320, 192), "o": (192, 192),
                        "gate_up": (1024, 192), "down": (192, 512)}}.items():
        weights[f"layers.{{i}}.{{name}}"] = w(*shape)
from rookery.worker.model.adapter import init_adapter, PARTS
folder = Path({folder!r}); folder.mkdir()
t.AdapterExport(init_adapter(config, 8, 16.0, list(PARTS), 0)).write(folder)
at = t.trainer(Decoder(config, weights), {{"p": folder}}, slice_tokens=8192)
def peak(operations, prompt, tails):
    group = t.unit(random.Random(0), prompt, tails)
    at.forward_backward(t.forward_backward(operations=operations), t.protocol.TrainingBatch(groups=[group]))
    assert not t.finish(at)["fb"].error
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (1 << 20 if sys.platform == "darwin" else 1 << 10)
small = peak(0, 50, [50] * 2)
print(peak(1, 500, [440] * 8) - small)
"""


@pytest.mark.heavy
def test_memory_of_a_4000_token_group_is_bounded(tmp_path: Path) -> None:
    """In a process of its own, growth of the peak over a 150-token group's. Twelve layers' activations of 4,020 tokens
    in float32 are 890 MB (measured without recomputation), all logits 230 MB, all of one layer's scores 390 MB."""
    script = MEMORY.format(tests=str(Path(__file__).parents[3]), folder=str(tmp_path / "p"))
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert float(done.stdout.split()[-1]) < 400


def test_trainers_behind_one_queue_share_it_by_tenant(tmp_path: Path) -> None:
    """The tenant that was trained least is next, whichever trainer computes for it; a pass never mixes trainers."""
    rng = random.Random(0)
    one, two = (PackedTrainer(NativeBackbone(decoder()), max_rank=16, slice_tokens=20) for _ in range(2))
    for at, policy in ((one, "x"), (two, "y")):
        at.load(policy, 1, ref(policy), adapter_folder(tmp_path / policy, 4, 1))
    both = OperationQueue(one, two)
    batch = [unit(rng, 10, [11]) for _ in range(4)]
    for at, policy in ((one, "x"), (two, "y")):
        at.forward_backward(forward_backward(policy, op=policy), protocol.TrainingBatch(groups=list(batch)))
        at.optim_step(optim(policy, op=f"step {policy}"))
    assert both.pending == 4 and set(both.tenants()) == {"tenant of x", "tenant of y"}
    shares = []
    while both.step():
        shares.append(set(both.tenant_tokens()))
    assert shares == [{"tenant of x"}, {"tenant of y"}] * 5
    assert [done.op for done, _ in both.drain()] == ["x", "y", "step x", "step y"]
    assert both.gauges()["worker_trained_tokens"] == 2 * one.trained == 2 * two.trained


@pytest.mark.parametrize(("slice_tokens", "least"), [(800, 80), (160, 20), (16, 20)])
def test_a_tiny_batch_does_not_shrink_a_pass_to_its_size(tmp_path: Path, slice_tokens: int, least: int) -> None:
    rng = random.Random(0)
    at = PackedTrainer(NativeBackbone(decoder()), max_rank=16, slice_tokens=slice_tokens)
    for policy, count in (("x", 1), ("y", 20)):
        at.load(policy, 1, ref(policy), adapter_folder(tmp_path / policy, 4, 1))
        groups = [unit(rng, 10, [11]) for _ in range(count)]
        at.forward_backward(forward_backward(policy, op=policy), protocol.TrainingBatch(groups=groups))
    assert at.queue.step()
    assert least <= sum(at.queue.tenant_tokens().values()) <= max(2 * 22, slice_tokens // 8)


def test_a_tenant_that_trained_lately_finds_no_long_pass(tmp_path: Path) -> None:
    """Its next operation would wait for all of it. After :data:`EXPECTED_SECONDS` passes are full again."""
    rng, passes = random.Random(0), []
    now = [0.0]
    at = PackedTrainer(NativeBackbone(decoder()), max_rank=16, slice_tokens=800, clock=lambda: now[0])
    for policy, count in (("x", 10), ("y", 80)):
        at.load(policy, 1, ref(policy), adapter_folder(tmp_path / policy, 4, 1))
        groups = [unit(rng, 10, [11]) for _ in range(count)]
        at.forward_backward(forward_backward(policy, op=policy), protocol.TrainingBatch(groups=groups))
        if policy == "x":
            assert at.queue.step() and at.queue.expected() == {"tenant of x": 10 * 20}
    for now[0] in (0.0, 2 * EXPECTED_SECONDS):
        assert at.queue.step()
        passes.append(sum(at.queue.tenant_tokens().values()))
    assert passes == [2 * 10 * 20, 800]
