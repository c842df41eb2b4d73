"""Attention over a packed stream by fused kernels: a GPU's, where ``trainer.attention`` is a CPU's.

Promises: what a token attends to is what ``packing`` promises; a shared prompt's keys and values are computed once, and
the gradients that its members send back are summed in float32.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rookery.worker.model.decoder import Decoder
from rookery.worker.model.varlen_attention import Sequences, varlen
from rookery.worker.trainer.native.packing import PackedBatch


class _Repeated(torch.autograd.Function):
    """``x[rows]`` [len(rows), …] of x [tokens, …], where a row may be taken many times."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, rows: Tensor) -> Tensor:
        ctx.save_for_backward(rows)
        ctx.tokens = len(x)
        return x.index_select(0, rows)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (rows,) = ctx.saved_tensors
        (g,) = gradients
        wide = torch.promote_types(g.dtype, torch.float32)
        summed = torch.zeros(ctx.tokens, *g.shape[1:], dtype=wide, device=g.device)
        return summed.index_add_(0, rows, g.to(wide)).to(g.dtype), None


class VarlenAttention:
    """The ``Attend`` of a packed stream: each prompt and each tail is a sequence of queries, whose keys are the shared
    prompt's, if any, and its own."""

    def __init__(self, decoder: Decoder, stream: PackedBatch) -> None:
        parts = stream.sequences()
        self._windows = decoder.config.windows
        self._sequences = Sequences.of(
            [part.length for part in parts], [part.prefix + part.length for part in parts], decoder.device
        )
        self._keys: Tensor | None = None
        if any(part.prefix for part in parts):
            ranges = [
                torch.arange(begin, begin + length)
                for part in parts
                for begin, length in ((part.shared, part.prefix), (part.start, part.length))
            ]
            self._keys = torch.cat(ranges).to(decoder.device)

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """See ``Attend``."""
        if self._keys is not None:
            k, v = (_Repeated.apply(x, self._keys) for x in (k, v))
        return varlen(q, k, v, self._sequences, self._windows[layer])
