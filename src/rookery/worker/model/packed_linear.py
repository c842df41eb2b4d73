"""Frozen projections, kept also in the layout that the CPU's matrix kernels read.

Promises: a product with a packed weight gives the numbers of the same product with a plain one, bit for bit, forward
and backward; in bfloat16 those of ``torch.nn.functional.linear`` of the same rows. A product with a plain weight lays
it out anew in every call, which costs as much as some twenty rows of arithmetic; a packed one is laid out once, at the
price of the weight's size in memory that processes do not share. In float32 PyTorch would take its BLAS, which is
slower at few rows and whose results depend on their number (``worker/exact.py``). Where tile instructions multiply,
rows go in blocks for the same reason, each a product of its own.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from rookery.worker.model.batch_invariance import TILE_DEPTH, TILE_ROWS, tiled

_PACKED_FOR_ROWS = 64
"""The number of rows that the layout is chosen for. It decides about speed alone, and hardly: a layout for 64 rows is
as good at 2 and at 512."""


class PackedLinear:
    """``x`` [tokens, in] → ``x Wᵀ + b`` [tokens, out]; ``weight`` [out, in] and ``bias`` [out] are frozen."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None, *, pack: bool = False) -> None:
        """``pack`` asks for the second layout; without kernels for it (another device, another dtype) nothing
        happens."""
        self.weight = weight
        self.bias = bias
        self._read: Tensor | None = None
        """What oneDNN multiplies by; None where the product is PyTorch's own affair."""
        self._most_rows = TILE_ROWS if weight.shape[1] > TILE_DEPTH and tiled(weight.dtype, weight.device) else None
        """Of a block."""
        if _multiplies(weight):
            if pack:
                self._read = torch.ops.mkldnn._reorder_linear_weight(weight, _PACKED_FOR_ROWS)
            elif weight.dtype == torch.float32:
                self._read = weight

    def __call__(self, x: Tensor) -> Tensor:
        own = self._read is not None or self._most_rows is not None
        if own and x.requires_grad and torch.is_grad_enabled():
            return _Product.apply(x, self)
        return self.forward(x)

    def forward(self, x: Tensor) -> Tensor:
        """Without a derivative."""
        if self._most_rows is None or len(x) <= self._most_rows:
            return self.whole(x)
        blocks = -(-len(x) // self._most_rows)
        return torch.cat([self.whole(rows) for rows in x.tensor_split(blocks)])

    def whole(self, x: Tensor) -> Tensor:
        """As one product, whatever its rows depend on: for results that nobody compares bit for bit."""
        if self._read is None:
            return F.linear(x, self.weight, self.bias)
        return torch.ops.mkldnn._linear_pointwise(x, self._read, self.bias, "none", [], "")


class _Product(torch.autograd.Function):
    """oneDNN's product has no derivative of its own, and blocks of rows need no blocks in theirs."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, projection: PackedLinear) -> Tensor:
        ctx.weight = projection.weight
        return projection.forward(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0] @ ctx.weight, None


def _multiplies(weight: Tensor) -> bool:
    """Whether oneDNN is here and has kernels for this weight; in float32 they were tried on x86 alone."""
    kernels = hasattr(torch.ops.mkldnn, "_linear_pointwise") and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")
    if not kernels or weight.device.type != "cpu":
        return False
    if weight.dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return weight.dtype == torch.float32 and torch.backends.cpu.get_cpu_capability().startswith("AVX")
