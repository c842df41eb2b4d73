"""Whether a device computes what the CPU computes in float32: attention, LoRA, logits, log-probabilities, gradients,
texts, on random models small enough for both.

The device's model is in bfloat16 where the device multiplies that, and the reference has the very same weights in
float32: what differs is rounding on the way. Tolerances are about twice what bfloat16 on a CPU gives."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from benchmarks.lib.orders import RANK, ref, trained_adapter
from benchmarks.micro.gpu_models import random_weights
from torch import Tensor

from rookery import protocol
from rookery.worker.engine.native.cuda.graph_runner import CudaGraphRunner
from rookery.worker.engine.native.engine import NativeEngine
from rookery.worker.engine.native.runner import DenseRunner, WeightSets
from rookery.worker.model.config import DecoderConfig
from rookery.worker.model.decoder import Decoder
from rookery.worker.model.lora import LoraManager, best_grouped_matmul
from rookery.worker.model.varlen_attention import (
    KeyRanges,
    SequenceBounds,
    merge_attention,
    range_attention,
    varlen_attention,
)
from rookery.worker.trainer.microbatch import PassItem, QueuedBatch, run_pass
from rookery.worker.trainer.native.attention import AttentionFactory, ChunkedAttention, ChunkSizes, VarlenAttention
from rookery.worker.trainer.native.backbone import RECOMPUTE_TOKENS, NativeBackbone
from rookery.worker.trainer.optim import AdapterExport, PolicyState
from rookery.worker.trainer.packed_pass import PassLimits
from rookery.worker.trainer.packing import PackedGroup

SMALL = {
    "vocab_size": 4096,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 2048,
}
MODELS = {
    "qwen3": {**SMALL, "model_type": "qwen3", "tie_word_embeddings": True},
    "mistral, window of 48": {**SMALL, "model_type": "mistral", "sliding_window": 48},
}
LIMITS = PassLimits(RECOMPUTE_TOKENS, RECOMPUTE_TOKENS)
DEVIATION = 0.06
"""Of the weights: with it attention is neither uniform nor on one key."""

B_DEVIATION = 0.02
"""Of the adapters' second factors."""
REQUESTS, TOKENS = 12, 40


@dataclass(frozen=True)
class Check:
    """``value`` may be at most ``most``."""

    what: str
    value: float
    most: float

    @property
    def holds(self) -> bool:
        return self.value <= self.most  # not a number does not


def checks(
    device: torch.device,
    dtype: torch.dtype,
    models: Mapping[str, dict[str, Any]] = MODELS,
    requests: int = REQUESTS,
) -> list[Check]:
    """All of them, with these small ``models`` and so many ``requests``. ``dtype`` is the device's model's."""
    found = [*_attention(device, dtype), _lora(device, dtype)]
    for name, raw in models.items():
        config = DecoderConfig.from_hf(raw)
        weights = random_weights(config, torch.device("cpu"), dtype, DEVIATION)
        there = Decoder(config, {key: weight.to(device) for key, weight in weights.items()})
        exact = {key: weight.float() for key, weight in weights.items()}
        here = Decoder(config, exact)
        found += [Check(f"{name}: {check.what}", check.value, check.most) for check in _model(here, there, requests)]
        wide = Decoder(config, {key: weight.to(device) for key, weight in exact.items()})
        ours, theirs = _texts(wide, requests, pooled=True), _texts(here, requests, pooled=False)
        apart = sum(_unlike(ours[request][0], tokens) for request, (tokens, _) in theirs.items())
        found.append(Check(f"{name}: share of tokens unlike the CPU's, float32", apart / (requests * TOKENS), 0.01))
    return found


# --- the parts ------------------------------------------------------------------------------------------------------


def _attention(device: torch.device, dtype: torch.dtype) -> list[Check]:
    """Against one sequence at a time in float64."""
    generator = torch.Generator().manual_seed(0)
    queries, keys = [70, 1, 200], [70, 300, 456]

    def made(count: int, heads: int) -> Tensor:
        return torch.randn(count, heads, 64, generator=generator).to(dtype)

    q, k, v, g = made(271, 8), made(826, 2), made(826, 2), made(271, 8)
    found = []
    for window in (0, 33):
        leaves = [x.double().requires_grad_() for x in (q, k, v)]
        wanted = varlen_attention(
            leaves[0], leaves[1], leaves[2], SequenceBounds.from_lengths(queries, keys, "cpu"), window
        )
        wanted_gradients = torch.autograd.grad(wanted, leaves, g.double())
        leaves = [x.to(device).requires_grad_() for x in (q, k, v)]
        got = varlen_attention(
            leaves[0], leaves[1], leaves[2], SequenceBounds.from_lengths(queries, keys, device), window
        )
        gradients = torch.autograd.grad(got, leaves, g.to(device))
        found.append(Check(f"attention over sequences, window {window}", _apart(got, wanted), 0.005))
        worst = max(_apart(*pair) for pair in zip(gradients, wanted_gradients, strict=True))
        found.append(Check(f"its gradients, window {window}", worst, 0.01))
    starts, lengths = [[0, 10, 400, 90], [700, 500, 800, 90]], [[0, 20, 300, 1], [100, 7, 1, 0]]
    out = []
    for where, values in ((torch.device("cpu"), (x.double() for x in (q[:4], k, v))), (device, (q[:4], k, v))):
        at = [torch.tensor(x, device=where) for x in (*starts, *lengths)]
        mine = [x.to(where) for x in values]
        both = [
            range_attention(mine[0], mine[1], mine[2], KeyRanges(at[i], at[2 + i], max_length=512)) for i in range(2)
        ]
        out.append(merge_attention(both[0], both[1]))
    return [*found, Check("attention over two ranges of a pool", _apart(out[1], out[0]), 0.005)]


def _lora(device: torch.device, dtype: torch.dtype) -> Check:
    """Both factors of a stream of four adapters and some rows that are nobody's, against float64 row by row."""
    generator = torch.Generator().manual_seed(0)
    ends = [3, 3, 40, 64, 70]
    x = torch.randn(70, 256, generator=generator).to(dtype)
    a, b = (torch.randn(5, *shape, generator=generator).to(dtype) for shape in ((48, 256), (384, 48)))
    product, on = best_grouped_matmul(device, dtype), torch.tensor(ends, dtype=torch.int32, device=device)
    inner = product(x.to(device), a.to(device).transpose(1, 2), on)
    got = product(inner, b.to(device).transpose(1, 2), on)
    owner = torch.searchsorted(torch.tensor(ends), torch.arange(70), right=True)
    wanted = torch.stack([b[o].double() @ (a[o].double() @ row.double()) for o, row in zip(owner, x, strict=True)])
    return Check("LoRA of many adapters", _apart(got, wanted), 0.005)


def _model(here: Decoder, there: Decoder, requests: int) -> list[Check]:
    """The device's model against the reference."""
    units = _units(here.config)
    results = []
    for decoder, attention in ((here, _packed), (there, VarlenAttention)):
        state = PolicyState(
            AdapterExport(trained_adapter(here.config, 0, B_DEVIATION)), here.config, decoder.dtype, decoder.device
        )
        logp = []
        for forward_only in (True, False):
            work = QueuedBatch(_operation(forward_only), units)
            run_pass(NativeBackbone(decoder, LIMITS, attention), [PassItem(work, state, units)])
            logp.append(torch.frombuffer(bytearray(work.logprobs()), dtype=torch.float32))
        results.append((*logp, state.gradient.cpu()))
    (wanted, _, gradient), (scored, trained, ours) = results
    texts = _texts(there, requests, pooled=True)
    stamped = torch.tensor([x for _, logprobs in texts.values() for x in logprobs])
    rescored = _rescored(here, texts)
    return [
        Check("log-probabilities of given tokens, mean difference in nats", _mean(scored, wanted), 0.1),
        Check("the same, of a pass with gradients", _mean(trained, wanted), 0.1),
        Check("gradient, norm of the difference over the norm", _apart(ours, gradient), 0.05),
        Check("log-probabilities of sampled tokens, mean difference in nats", _mean(stamped, rescored), 0.1),
        Check("the same, largest", float((stamped - rescored).abs().max()), 0.5),
    ]


# --- what they work on ----------------------------------------------------------------------------------------------


_packed: AttentionFactory = partial(ChunkedAttention, chunks=ChunkSizes())
"""The CPU's."""


def _units(config: DecoderConfig) -> list[PackedGroup]:
    """A group that shares a prompt, and texts of their own."""
    generator = torch.Generator().manual_seed(0)

    def text(length: int) -> list[int]:
        return torch.randint(0, config.vocab, (length,), generator=generator).tolist()

    def unit(prompt: int, tails: Sequence[int]) -> PackedGroup:
        return PackedGroup.from_group(
            protocol.SharedPrefixGroup(prompt=text(prompt), members=[_member(text(n)) for n in tails])
        )

    return [unit(90, [60, 100, 7, 33]), unit(1, [128]), unit(20, [64])]


def _member(tokens: list[int]) -> protocol.GroupMember:
    n = len(tokens)
    advantages = [(-1.0) ** i for i in range(n)]
    return protocol.GroupMember(tokens=tokens, logprobs=[-8.0] * n, advantages=advantages, weights=[1.0 / n] * n)


def _operation(forward_only: bool) -> protocol.ForwardBackward:
    return protocol.ForwardBackward(
        op="", policy="", lease=1, parent=ref(0), steps=0, batch_ticket="", temperature=1.0,
        loss=protocol.Loss(name="cross_entropy"), forward_only=forward_only, logprobs=True,
    )  # fmt: skip


def _texts(decoder: Decoder, requests: int, *, pooled: bool) -> dict[int, tuple[list[int], list[float]]]:
    """Tokens and log-probabilities of every request, sampled together: groups that share a prompt, under two adapters
    and none."""
    loras = LoraManager(decoder.config, decoder.dtype, decoder.device, RANK)
    for seed in range(2):
        loras.add(str(seed), trained_adapter(decoder.config, seed, B_DEVIATION))
    made = CudaGraphRunner if pooled else DenseRunner
    weights = WeightSets(decoder, loras, made(decoder, loras, 1 << 28))
    engine = NativeEngine(weights, lambda tokens: "", max_rows=requests)
    for request in range(requests):
        prompt = _prompt(request)
        engine.submit(
            protocol.Generate(
                request=str(request), adapter=ref(request % 3) if request % 3 < 2 else None, prompt=prompt,
                shared_prefix=len(prompt) if request < 6 else 0, max_tokens=TOKENS, temperature=1.0, seed=request,
                stop_tokens=[],
            )
        )  # fmt: skip
    texts: dict[int, tuple[list[int], list[float]]] = {request: ([], []) for request in range(requests)}
    while engine.step():
        for chunk in engine.drain():
            texts[int(chunk.request)][0].extend(chunk.tokens)
            texts[int(chunk.request)][1].extend(chunk.logprobs)
    return texts


def _prompt(request: int) -> list[int]:
    generator = torch.Generator().manual_seed(100 + request % 3)
    return torch.randint(0, SMALL["vocab_size"], (70 + 13 * (request % 3),), generator=generator).tolist()


def _rescored(decoder: Decoder, texts: dict[int, tuple[list[int], list[float]]]) -> Tensor:
    """The log-probabilities of sampled texts by one pass over each."""
    found = []
    for request, (tokens, _) in texts.items():
        adapter = trained_adapter(decoder.config, request % 3, B_DEVIATION)
        if request % 3 == 2:
            for _, b in adapter.weights.values():
                b.zero_()
        state = PolicyState(AdapterExport(adapter), decoder.config, decoder.dtype, decoder.device)
        unit = PackedGroup.from_group(protocol.SharedPrefixGroup(prompt=_prompt(request), members=[_member(tokens)]))
        work = QueuedBatch(_operation(True), [unit])
        run_pass(NativeBackbone(decoder, LIMITS, _packed), [PassItem(work, state, [unit])])
        found.append(torch.frombuffer(bytearray(work.logprobs()), dtype=torch.float32))
    return torch.cat(found)


# --- differences ----------------------------------------------------------------------------------------------------


def _apart(ours: Tensor, theirs: Tensor) -> float:
    """Norm of the difference over the norm."""
    ours, theirs = ours.detach().cpu().double(), theirs.detach().cpu().double()
    return float((ours - theirs).norm() / theirs.norm())


def _mean(ours: Tensor, theirs: Tensor) -> float:
    return float((ours - theirs).abs().mean())


def _unlike(ours: list[int], theirs: list[int]) -> int:
    """Tokens from the first difference on."""
    same = next((i for i, pair in enumerate(zip(ours, theirs, strict=True)) if pair[0] != pair[1]), len(theirs))
    return len(theirs) - same
