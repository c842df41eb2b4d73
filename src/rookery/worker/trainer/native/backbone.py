"""The decoder that the native engine samples with as a ``Backbone``: passes over packed batches, with bounded memory.

Promises, beyond those of :mod:`rookery.worker.trainer.packed_pass`: a group's shared prompt is computed once, forward
and backward; where compiled kernels run, forward passes take the engine's (``kernel_pass``), bit for bit.

A short batch keeps its layers' activations (about 0.5 MB per token on the 135M model). A long one keeps each layer's
input only (35 kB per token there) and computes every layer once more, one at a time, in the backward pass: about a
third more work. ``PassLimits`` says which batches are long.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from rookery.worker.engine.native import kernels
from rookery.worker.model.config import DecoderConfig
from rookery.worker.model.decoder import AttentionBackend, Decoder, LoraProduct
from rookery.worker.model.layers import rms_norm, rms_norm_backward
from rookery.worker.trainer.loss_head import Normalise, TokenLogprobs, soft_logprobs, token_logprobs
from rookery.worker.trainer.native.attention import AttentionFactory, attention_for
from rookery.worker.trainer.packed_pass import BackwardPass, PackedLora, PassLimits, PolicyRows
from rookery.worker.trainer.packing import PackedBatch, SoftTargets

RECOMPUTE_TOKENS = 2048
"""On a CPU, longer batches recompute their layers in the backward pass: a 4,000-token group then needs some hundred MB
instead of 2 GB on the 135M model, and slices of the usual size keep their speed."""

_LAYER_COPIES = 3
"""Copies of a layer's activations during its backward pass: themselves, their gradients, float32 copies of some."""


def pass_limits(config: DecoderConfig, itemsize: int, memory_bytes: float) -> PassLimits:
    """Limits for ``memory_bytes`` and numbers of ``itemsize`` bytes."""
    recomputed = config.layers * config.hidden + _LAYER_COPIES * layer_numbers(config)
    kept = (config.layers + _LAYER_COPIES) * layer_numbers(config)
    resident, longest = (int(memory_bytes / (itemsize * numbers)) for numbers in (kept, recomputed))
    # the share is of a token whose layers are kept; of one whose layers are recomputed it is less
    return PassLimits(resident, longest, 2 * config.kv_heads * config.head_dim / layer_numbers(config))


def limits_for(decoder: Decoder, memory_bytes: float = math.inf) -> PassLimits:
    """The limits of passes whose activations take ``memory_bytes``; without it batches of any length are computed. On a
    CPU attention copies no keys."""
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
class _Half:
    """Attention or MLP of a block in a pass: the residual stream ``x`` before it, its norm's ``weight`` and output
    ``h``, and the graph of what it adds to the stream; None if that depends on no adapter."""

    x: Tensor
    weight: Tensor
    h: Tensor
    added: GradientEdge | None


class ForwardPass:
    """A finished forward pass. ``hidden`` [tokens, hidden] is the input of ``Decoder.project``, detached.

    Each half of a block is a separate graph. Between them the gradient of the residual stream is summed in float32:
    every half adds little to it, and in bfloat16 a part of that is lost."""

    def __init__(
        self, decoder: Decoder, batch: PackedBatch, attend: AttentionBackend, lora: LoraProduct, *, recompute: bool
    ) -> None:
        """With ``recompute``, layers are computed again in the backward pass instead of being kept."""
        self._decoder, self._attend, self._lora = decoder, attend, lora
        self._rotation = decoder.rotation(batch.positions)
        self._layers: list[list[_Half] | Tensor] = []
        """The halves of each layer or, to compute them again, its input."""
        with torch.no_grad():
            x = F.embedding(batch.tokens, decoder.embedding)
            for i in range(decoder.config.layers):
                halves, y = self._halves(i, x) if not recompute else (x, self._again(i, x))
                self._layers.append(halves)
                x = y
            self._last, self.hidden = x, decoder.final_norm(x)

    def _again(self, i: int, x: Tensor) -> Tensor:
        return self._decoder.layer(i, x, self._rotation, self._attend, self._lora)

    def _halves(self, i: int, x: Tensor) -> tuple[list[_Half], Tensor]:
        """The halves of layer ``i`` with their graphs, and its output."""
        decoder, w, halves = self._decoder, self._decoder.layers[i], []
        for attention in (True, False):
            weight = w.attention_norm if attention else w.mlp_norm
            h = rms_norm(x, weight, decoder.config.eps)
            h.requires_grad_(i > 0 or not attention)  # before the first half there is no adapter
            with torch.enable_grad():
                if attention:
                    added = decoder.attention(i, h, self._rotation, self._attend, self._lora)
                else:
                    added = decoder.mlp(i, h, self._lora)
            halves.append(_Half(x, weight, h, get_gradient_edge(added) if added.requires_grad else None))
            x = x + added.detach()
        return halves, x

    @torch.no_grad()
    def backward(self, d_hidden: Tensor) -> None:
        """Propagates d loss / d hidden back, once; ``lora`` accumulates the gradients."""
        decoder, eps = self._decoder, self._decoder.config.eps
        gradient = rms_norm_backward(d_hidden, self._last, decoder.norm, eps)
        for i in reversed(range(decoder.config.layers)):
            halves = self._layers.pop()
            if isinstance(halves, Tensor):
                halves, _ = self._halves(i, halves)
            while halves:
                half = halves.pop()
                d = gradient.to(decoder.dtype)
                if half.h.requires_grad and half.added is not None:
                    (d,) = torch.autograd.grad(half.added, half.h, d)
                    gradient.add_(rms_norm_backward(d, half.x, half.weight, eps))
                elif half.added is not None:
                    torch.autograd.backward(half.added, d)


class NativeBackbone:
    """The decoder as a :class:`~rookery.worker.trainer.packed_pass.Backbone`."""

    def __init__(
        self,
        decoder: Decoder,
        limits: PassLimits | None = None,
        attention: AttentionFactory | None = None,
        *,
        compiled: bool = True,
        cache: Path | None = None,
        between_layers: Callable[[], None] = lambda: None,
    ) -> None:
        """``limits`` and ``attention`` default to those of the decoder's device; without ``attention``, ``compiled``
        allows the CPU kernels, whose code is cached under ``cache``. With them, ``between_layers`` is called between
        two layers of a pass with gradients, forward and backward; it may use the decoder."""
        self.model = self._decoder = decoder
        self._between_layers, self.paused = between_layers, 0.0
        self._compiled = compiled and attention is None and kernels.usable(decoder, cache)
        self._normalise: Normalise | None = None
        if self._compiled:
            from rookery.worker.trainer.native import kernel_pass

            self._normalise = kernel_pass.normalise(decoder)
        self._attention = attention or attention_for(decoder)
        self.limits = limits or limits_for(decoder)

    def infer(self, batch: PackedBatch, policies: Sequence[PolicyRows]) -> Tensor:
        if self._compiled:
            from rookery.worker.trainer.native import kernel_pass

            return kernel_pass.infer(self._decoder, batch, policies)
        lora, attend = PackedLora(policies) if policies else None, self._attention(self._decoder, batch)
        with torch.no_grad():
            return self._decoder.forward(batch.tokens, batch.positions, attend, lora)

    def forward(self, batch: PackedBatch, policies: Sequence[PolicyRows], *, recompute: bool) -> BackwardPass:
        if self._compiled:
            from rookery.worker.trainer.native import kernel_pass

            return kernel_pass.KernelPass(self._decoder, batch, policies, self._pause, recompute=recompute)
        attend = self._attention(self._decoder, batch)
        return ForwardPass(self._decoder, batch, attend, PackedLora(policies), recompute=recompute)

    def _pause(self) -> None:
        began = time.perf_counter()
        self._between_layers()
        self.paused += time.perf_counter() - began

    def logprobs(
        self,
        hidden: Tensor,
        targets: Tensor,
        temperatures: Tensor | None,
        *,
        derivatives: bool,
        soft: SoftTargets | None = None,
    ) -> TokenLogprobs:
        if soft is not None:
            return soft_logprobs(self._decoder, hidden, soft, targets, temperatures, derivatives=derivatives)
        return token_logprobs(
            self._decoder, hidden, targets, temperatures, derivatives=derivatives, normalise=self._normalise
        )
