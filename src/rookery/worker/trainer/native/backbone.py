"""One pass of the decoder over a packed batch, forward and backward, with bounded memory.

A short batch keeps its layers' activations (about 0.5 MB per token on the 135M model). A long one keeps each layer's
input only (35 kB per token there) and computes every layer once more, one at a time, in the backward pass: about a
third more work. :class:`PassLimits` says which batches are long.
"""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from rookery.worker.model.config import DecoderConfig
from rookery.worker.model.decoder import AttentionBackend, Decoder, LoraProduct
from rookery.worker.trainer.native.packing import PackedBatch

RECOMPUTE_TOKENS = 2048
"""On a CPU, longer batches recompute their layers in the backward pass: a 4,000-token group then needs some hundred MB
instead of 2 GB on the 135M model, and slices of the usual size keep their speed."""

_LAYER_COPIES = 3
"""Copies of a layer's activations during its backward pass: themselves, their gradients, float32 copies of some."""


@dataclass(frozen=True)
class PassLimits:
    """In tokens. ``resident_tokens``: the longest batch whose activations are kept. ``max_tokens``: the longest batch
    that is computed at all. ``copied_key_share``: memory of a key that attention copies for one more sequence, as a
    share of a token's."""

    resident_tokens: int
    max_tokens: int
    copied_key_share: float = 0.0


def pass_limits(config: DecoderConfig, itemsize: int, memory_bytes: float) -> PassLimits:
    """Limits for ``memory_bytes`` and numbers of ``itemsize`` bytes."""
    recomputed = config.layers * config.hidden + _LAYER_COPIES * layer_numbers(config)
    kept = (config.layers + _LAYER_COPIES) * layer_numbers(config)
    resident, longest = (int(memory_bytes / (itemsize * numbers)) for numbers in (kept, recomputed))
    # the share is of a token whose layers are kept; of one whose layers are recomputed it is less
    return PassLimits(resident, longest, 2 * config.kv_heads * config.head_dim / layer_numbers(config))


def limits_for(decoder: Decoder, memory_bytes: float = math.inf) -> PassLimits:
    """For passes whose activations take ``memory_bytes``; without it batches of any length are computed. On a CPU
    attention copies no keys."""
    limits = PassLimits(sys.maxsize, sys.maxsize)
    if memory_bytes < math.inf:
        limits = pass_limits(decoder.config, decoder.dtype.itemsize, memory_bytes)
    if decoder.device.type == "cuda":
        return limits
    return PassLimits(min(limits.resident_tokens, RECOMPUTE_TOKENS), limits.max_tokens)


def layer_numbers(config: DecoderConfig) -> int:
    """Numbers per token that a layer's backward pass needs: its input, both norms' outputs and the middle of the
    residual stream; queries and keys before and after normalisation and rotation, values, attention's output; gate and
    up and their product."""
    attention = config.head_dim * (3 * config.heads + 3 * config.kv_heads)
    return 4 * config.hidden + attention + 3 * config.inner


@dataclass
class ForwardPass:
    """A finished forward pass. ``hidden`` [tokens, hidden] is the input of ``Decoder.project``, detached."""

    hidden: Tensor
    _decoder: Decoder
    _batch: PackedBatch
    _attend: AttentionBackend
    _lora: LoraProduct
    _output: Tensor | None
    _inputs: list[Tensor]

    def backward(self, d_hidden: Tensor) -> None:
        """Propagates d loss / d hidden back, once; ``lora`` accumulates the gradients."""
        if self._output is not None:
            self._output.backward(d_hidden)
            self._output = None
            return
        rotation = self._decoder.rotation(self._batch.positions)
        last = self._inputs.pop().requires_grad_()
        (gradient,) = torch.autograd.grad(self._decoder.final_norm(last), last, d_hidden)
        del last
        for i in reversed(range(self._decoder.config.layers)):
            x = self._inputs.pop().requires_grad_()
            y = self._decoder.layer(i, x, rotation, self._attend, self._lora)
            (gradient,) = torch.autograd.grad(y, x, gradient)


def forward(
    decoder: Decoder, batch: PackedBatch, attend: AttentionBackend, lora: LoraProduct, *, recompute: bool
) -> ForwardPass:
    """With ``recompute``, layers are computed again in the backward pass instead of being kept."""
    if not recompute:
        with torch.enable_grad():
            output = decoder.forward(batch.tokens, batch.positions, attend, lora)
        return ForwardPass(output.detach(), decoder, batch, attend, lora, output, [])
    with torch.no_grad():
        rotation = decoder.rotation(batch.positions)
        inputs = [F.embedding(batch.tokens, decoder.embedding)]
        for i in range(decoder.config.layers):
            inputs.append(decoder.layer(i, inputs[-1], rotation, attend, lora))
        return ForwardPass(decoder.final_norm(inputs[-1]), decoder, batch, attend, lora, None, inputs)


@torch.no_grad()
def infer(decoder: Decoder, batch: PackedBatch, attend: AttentionBackend, lora: LoraProduct | None) -> Tensor:
    """Hidden states without gradients; without ``lora``, those of the base model."""
    return decoder.forward(batch.tokens, batch.positions, attend, lora)
