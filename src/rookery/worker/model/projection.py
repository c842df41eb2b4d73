"""Frozen projections, kept also in the layout that the CPU's matrix kernels read.

Promises: the same numbers as ``torch.nn.functional.linear``, bit for bit, forward and backward. A product with a plain
weight lays it out anew in every call, which costs as much as some twenty rows of arithmetic; a packed one is laid out
once, at the price of the weight's size in memory that processes do not share.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

_PACKED_FOR_ROWS = 64
"""The number of rows that the layout is chosen for. It decides about speed alone, and hardly: a layout for 64 rows is
as good at 2 and at 512."""


class Projection:
    """``x`` [tokens, in] → ``x Wᵀ + b`` [tokens, out]; ``weight`` [out, in] and ``bias`` [out] are frozen."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None, *, pack: bool = False) -> None:
        """``pack`` asks for the second layout; without kernels for it (another device, another dtype) nothing
        happens."""
        self.weight = weight
        self.bias = bias
        self._packed = _pack(weight) if pack and _packs(weight) else None

    def __call__(self, x: Tensor) -> Tensor:
        if self._packed is None:
            return F.linear(x, self.weight, self.bias)
        if x.requires_grad and torch.is_grad_enabled():
            return _Packed.apply(x, self)
        return self.forward(x)

    def forward(self, x: Tensor) -> Tensor:
        return torch.ops.mkldnn._linear_pointwise(x, self._packed, self.bias, "none", [], "")


class _Packed(torch.autograd.Function):
    """The kernel for packed weights has no derivative of its own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, projection: Projection) -> Tensor:
        ctx.weight = projection.weight
        return projection.forward(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0] @ ctx.weight, None


def _packs(weight: Tensor) -> bool:
    kernels = hasattr(torch.ops.mkldnn, "_linear_pointwise") and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")
    return kernels and weight.device.type == "cpu" and weight.dtype == torch.bfloat16


def _pack(weight: Tensor) -> Tensor:
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, _PACKED_FOR_ROWS)
    return packed
