"""One pass of the decoder over a packed stream, forward and backward, with bounded memory.

A short stream keeps its layers' activations (about 0.5 MB per token on the 135M model). A long one keeps each layer's
input only (35 kB per token there) and computes every layer once more, one at a time, on the way back: about a third
more work. Which is short is a question of memory (``lengths``).
"""

from __future__ import annotations

import sys
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from rookery.worker.device import free_bytes
from rookery.worker.model.config import DecoderConfig
from rookery.worker.model.decoder import Attend, Decoder, Lora
from rookery.worker.trainer.native.packing import PackedBatch

RECOMPUTE_TOKENS = 2048
"""On a CPU, streams longer than this recompute their layers in the backward pass: a 4,000-token group then needs some
hundred MB instead of 2 GB on the 135M model, and slices of the usual size keep their speed."""

PASS_SHARE = 0.5
"""Of a GPU's memory that is free when the trainer begins, what the layers of a pass may take; the other half is for
training states and logits."""

_LAYER_AT_WORK = 3
"""How often a layer's numbers are there while it computes back: themselves, their gradients, float32 copies of some."""


@dataclass(frozen=True)
class PassLimits:
    """``kept``: the longest stream whose activations are kept. ``most``: the longest that is computed at all.
    ``copied``: what a key that attention copies, for one more sequence, takes of a token's room."""

    resident_tokens: int
    max_tokens: int
    copied_key_share: float = 0.0


def lengths(config: DecoderConfig, number_bytes: int, room: float) -> PassLimits:
    """What fits into ``room`` bytes when numbers have ``number_bytes``."""
    recomputed = config.layers * config.hidden + _LAYER_AT_WORK * layer_numbers(config)
    kept = (config.layers + _LAYER_AT_WORK) * layer_numbers(config)
    kept_fit, recomputed_fit = (int(room / (number_bytes * numbers)) for numbers in (kept, recomputed))
    # of a token whose layers are kept; of one whose layers are computed twice it is less
    return PassLimits(kept_fit, recomputed_fit, 2 * config.kv_heads * config.head_dim / layer_numbers(config))


def lengths_for(decoder: Decoder) -> PassLimits:
    """On the decoder's device, as it is now. A CPU computes streams of any length, and keeps no copies."""
    if decoder.device.type != "cuda":
        return PassLimits(RECOMPUTE_TOKENS, sys.maxsize)
    return lengths(decoder.config, decoder.dtype.itemsize, PASS_SHARE * free_bytes(decoder.device))


def layer_numbers(config: DecoderConfig) -> int:
    """Numbers per token that a layer's backward pass wants: its input, both norms' outputs and the middle of the
    residual stream; queries and keys before and after they are normalised and rotated, values, attention's output; gate
    and up and their product."""
    attention = config.head_dim * (3 * config.heads + 3 * config.kv_heads)
    return 4 * config.hidden + attention + 3 * config.inner


@dataclass
class ForwardPass:
    """A finished forward pass. ``hidden`` [tokens, hidden] is what ``Decoder.project`` reads, detached."""

    hidden: Tensor
    _decoder: Decoder
    _stream: PackedBatch
    _attend: Attend
    _lora: Lora
    _output: Tensor | None
    _inputs: list[Tensor]

    def backward(self, d_hidden: Tensor) -> None:
        """Sends d loss / d hidden back, once; gradients land where ``lora`` puts them."""
        if self._output is not None:
            self._output.backward(d_hidden)
            self._output = None
            return
        rotation = self._decoder.rotation(self._stream.positions)
        last = self._inputs.pop().requires_grad_()
        (gradient,) = torch.autograd.grad(self._decoder.finish(last), last, d_hidden)
        del last
        for i in reversed(range(self._decoder.config.layers)):
            x = self._inputs.pop().requires_grad_()
            y = self._decoder.layer(i, x, rotation, self._attend, self._lora)
            (gradient,) = torch.autograd.grad(y, x, gradient)


def forward(decoder: Decoder, stream: PackedBatch, attend: Attend, lora: Lora, *, recompute: bool) -> ForwardPass:
    """With ``recompute``, layers are computed once more in the backward pass instead of being kept."""
    if not recompute:
        with torch.enable_grad():
            output = decoder.forward(stream.tokens, stream.positions, attend, lora)
        return ForwardPass(output.detach(), decoder, stream, attend, lora, output, [])
    with torch.no_grad():
        rotation = decoder.rotation(stream.positions)
        inputs = [F.embedding(stream.tokens, decoder.embedding)]
        for i in range(decoder.config.layers):
            inputs.append(decoder.layer(i, inputs[-1], rotation, attend, lora))
        return ForwardPass(decoder.finish(inputs[-1]), decoder, stream, attend, lora, None, inputs)


@torch.no_grad()
def infer(decoder: Decoder, stream: PackedBatch, attend: Attend, lora: Lora | None) -> Tensor:
    """The hidden states alone; without ``lora``, those of the base model."""
    return decoder.forward(stream.tokens, stream.positions, attend, lora)
