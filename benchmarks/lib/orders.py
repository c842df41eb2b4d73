"""A controller's orders to an engine and a trainer, without a controller: adapters, requests, optimizer steps."""

from __future__ import annotations

import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from rookery import protocol
from rookery.worker.engine.native.engine import NativeEngine
from rookery.worker.model.adapter import PARTS, Adapter, init_adapter
from rookery.worker.model.config import DecoderConfig
from rookery.worker.model.decoder import Decoder
from rookery.worker.model.layers import PackedLinear
from rookery.worker.trainer.base import Trainer
from rookery.worker.trainer.native.backbone import NativeBackbone
from rookery.worker.trainer.packed_trainer import PackedTrainer

RANK, ALPHA = 16, 32.0
B_DEVIATION = 0.01
"""Of an adapter's second factor, so that it changes the output: a fresh one's is zero, and could be skipped."""


def ref(i: int, version: int = 0, rank: int = RANK) -> protocol.AdapterRef:
    """Policy ``i``'s."""
    return protocol.AdapterRef(policy=str(i), version=version, hash=str(i), rank=rank, alpha=ALPHA)


def trained_adapter(config: DecoderConfig, seed: int, deviation: float = B_DEVIATION) -> Adapter:
    """On every linear layer, and not without effect."""
    adapter = init_adapter(config, RANK, ALPHA, list(PARTS), seed)
    generator = torch.Generator().manual_seed(seed)
    for _, b in adapter.weights.values():
        b.normal_(0.0, deviation, generator=generator)
    return adapter


def unit(tokens: Sequence[int]) -> protocol.SharedPrefixGroup:
    """A sequence with loss on every token but the first."""
    return protocol.SharedPrefixGroup(prompt=list(tokens[:1]), members=[member(tokens[1:])])


def member(tokens: Sequence[int]) -> protocol.GroupMember:
    """A reply, each token of which counts alike."""
    own = len(tokens)
    return protocol.GroupMember(
        tokens=list(tokens), logprobs=[0.0] * own, advantages=[1.0] * own, weights=[1.0 / own] * own
    )


@dataclass(frozen=True)
class Generated:
    """``seconds`` from the first step to the last token; ``step_seconds`` of a mean decode step, sampling and
    bookkeeping included."""

    tokens: int
    seconds: float
    step_seconds: float
    prefill_seconds: float


def generate(engine: NativeEngine, requests: Iterable[protocol.Generate]) -> Generated:
    """All of them to their ends."""
    before, generated = dict(engine.stats), engine.generated
    for request in requests:
        engine.submit(request)
    began = time.perf_counter()
    while engine.step():
        engine.drain()
    seconds = time.perf_counter() - began
    spent = Counter({name: value - before.get(name, 0.0) for name, value in engine.stats.items()})
    steps = max(1.0, spent["decode_steps"])  # one token needs none
    return Generated(engine.generated - generated, seconds, spent["decode_seconds"] / steps, spent["prefill_seconds"])


def trainer_of(decoder: Decoder, policies: int, slice_tokens: int) -> PackedTrainer:
    """With so many fresh policies resident."""
    trainer = PackedTrainer(NativeBackbone(decoder), max_rank=RANK, slice_tokens=slice_tokens)
    load_policies(trainer, policies)
    return trainer


def load_policies(trainer: Trainer, policies: int, rank: int = RANK) -> None:
    """So many fresh ones; of rank 0 all parameters are trained."""
    with tempfile.TemporaryDirectory() as folder:
        for i in range(policies):
            where = Path(folder) / str(i)
            where.mkdir()
            op = protocol.InitAdapter(
                op="", policy=str(i), rank=rank, alpha=ALPHA, targets=list(PARTS), seed=i, upload=""
            )
            trainer.initial_version(op, None).write(where)
            trainer.load(str(i), 1, ref(i, rank=rank), where)


def await_device() -> None:
    """Wait for the work of a GPU, where there is one."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def optimizer_steps(
    trainer: Trainer, batches: Sequence[protocol.TrainingBatch], loss: protocol.Loss, taken: int = 0, rank: int = RANK
) -> float:
    """One step of each policy on its batch, packed, after so many ``taken`` before: seconds, a GPU's work included.
    Raises ``RuntimeError`` for an operation that fails."""
    began = time.perf_counter()
    for i, batch in enumerate(batches):
        parent = ref(i, rank=rank)
        where: dict[str, Any] = {"policy": str(i), "lease": 1, "parent": parent, "steps": taken, "tenant": str(i)}
        forward = protocol.ForwardBackward(op=f"f{i}", batch_ticket="", loss=loss, temperature=1.0, **where)
        trainer.forward_backward(forward, batch)
        trainer.optim_step(protocol.OptimStep(op=f"o{i}", operations=1, adam=protocol.Adam(lr=1e-4, clip=1.0), **where))
    while trainer.queue.step():
        pass
    await_device()
    seconds = time.perf_counter() - began
    problems = [done.error for done, _ in trainer.queue.drain() if done.error]
    if problems:
        raise RuntimeError(problems[0])
    return seconds


def linear_layers(decoder: Decoder) -> list[PackedLinear]:
    """Of all layers, in their order; the output projection is none of them."""
    return [site for layer in decoder.layers for site in (layer.qkv, layer.o, layer.gate_up, layer.down)]
