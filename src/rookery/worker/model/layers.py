"""The decoder's building blocks: frozen linear layers, RMSNorm, SwiGLU and RoPE, with their backward passes.

Promises:

* Generation and training share the forward results bit for bit: with gradients enabled each block returns the numbers
  that it returns without.
* A packed linear layer returns the numbers of the same layer with a plain weight, bit for bit, forward and backward; in
  bfloat16 those of ``torch.nn.functional.linear`` on the same rows.
* Backward passes compute in float32 where rounding would bias the result, and save nothing but their inputs, so that a
  layer's activations cost what its matrix products need and little more. A sum biases it whose terms are much smaller
  than the number that they are added to: in bfloat16 most of them vanish. So the gradient of the residual stream, to
  which every layer adds a little, is float32.

A product with a plain weight lays the weight out for the CPU's kernels in every call, which costs as much as about
twenty rows of arithmetic. A packed weight is laid out once, at the price of its size in memory that processes do not
share. In float32 PyTorch would call its BLAS instead of oneDNN, which is slower for few rows and whose results depend
on their number (see ``batch_invariance``). Where AMX multiplies, rows are split into blocks for the same reason.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from rookery.worker.model.batch_invariance import TILE_DEPTH, TILE_ROWS, uses_amx

_PACKED_FOR_ROWS = 64
"""The number of rows that the layout is chosen for. It affects speed only, and little: a layout for 64 rows is as good
at 2 and at 512."""


class PackedLinear:
    """``x`` [tokens, in] → ``x Wᵀ + b`` [tokens, out]; ``weight`` [out, in] and ``bias`` [out] are frozen."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None, *, pack: bool = False) -> None:
        """``pack`` asks for the packed layout; it is ignored where oneDNN has no kernels for the weight's device and
        dtype."""
        self.weight = weight
        self.bias = bias
        self._onednn_weight: Tensor | None = None
        """The weight as oneDNN reads it; None where ``F.linear`` computes the product."""
        self._block_rows = TILE_ROWS if weight.shape[1] > TILE_DEPTH and uses_amx(weight.dtype, weight.device) else None
        """Most rows of one product."""
        if _has_onednn_kernels(weight):
            if pack:
                self._onednn_weight = torch.ops.mkldnn._reorder_linear_weight(weight, _PACKED_FOR_ROWS)
            elif weight.dtype == torch.float32:
                self._onednn_weight = weight

    def __call__(self, x: Tensor) -> Tensor:
        custom = self._onednn_weight is not None or self._block_rows is not None
        if custom and x.requires_grad and torch.is_grad_enabled():
            return _BlockedLinear.apply(x, self)
        return self.forward(x)

    def forward(self, x: Tensor) -> Tensor:
        """The product without a backward pass."""
        if self._block_rows is None or len(x) <= self._block_rows:
            return self.single_product(x)
        blocks = -(-len(x) // self._block_rows)
        return torch.cat([self.single_product(rows) for rows in x.tensor_split(blocks)])

    def single_product(self, x: Tensor) -> Tensor:
        """One product of all rows, whose results may depend on the number of rows: for results that are not compared
        bit for bit."""
        if self._onednn_weight is None:
            return F.linear(x, self.weight, self.bias)
        return torch.ops.mkldnn._linear_pointwise(x, self._onednn_weight, self.bias, "none", [], "")


class _BlockedLinear(torch.autograd.Function):
    """A backward pass for oneDNN's product, which has none; it needs no blocks of rows."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, projection: PackedLinear) -> Tensor:
        ctx.weight = projection.weight
        return projection.forward(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0] @ ctx.weight, None


def _has_onednn_kernels(weight: Tensor) -> bool:
    """Whether this build of PyTorch has oneDNN with kernels for this weight; in float32 they are tested on x86."""
    kernels = hasattr(torch.ops.mkldnn, "_linear_pointwise") and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")
    if not kernels or weight.device.type != "cpu":
        return False
    if weight.dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return weight.dtype == torch.float32 and torch.backends.cpu.get_cpu_capability().startswith("AVX")


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.eps = eps
        return F.rms_norm(x, (x.shape[-1],), weight, eps)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        x, weight = ctx.saved_tensors
        return rms_norm_backward(gradients[0], x, weight, ctx.eps).to(x.dtype), None, None


class _SwiGlu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor) -> Tensor:
        ctx.save_for_backward(y)
        gate, up = y.chunk(2, -1)
        return F.silu(gate) * up

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        (y,) = ctx.saved_tensors
        return swiglu_backward(gradients[0], y)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """``x / √(mean(x²) + eps) · weight`` over the last dimension (arXiv:1910.07467); ``weight`` is frozen."""
    if torch.is_grad_enabled():
        return _RmsNorm.apply(x, weight, eps)
    return F.rms_norm(x, (x.shape[-1],), weight, eps)


def rms_norm_backward(g: Tensor, x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """The gradient by x of ``rms_norm(x, weight, eps)``, whose own is ``g``; at least float32, because it is added to
    the larger gradient of the residual stream."""
    wide = torch.promote_types(x.dtype, torch.float32)
    size = x.shape[-1]
    full, scaled = x.to(wide), g.to(wide) * weight.to(wide)
    inverse = torch.linalg.vecdot(full, full).div_(size).add_(eps).rsqrt_()
    along = torch.linalg.vecdot(scaled, full).mul_(inverse.pow(3)).div_(size)
    return scaled.mul_(inverse.unsqueeze(-1)).sub_(full * along.unsqueeze(-1))


def swiglu(y: Tensor) -> Tensor:
    """``silu(gate) · up`` of y = [gate, up] [tokens, 2 · inner] (arXiv:2002.05202)."""
    if torch.is_grad_enabled():
        return _SwiGlu.apply(y)
    gate, up = y.chunk(2, -1)
    return F.silu(gate) * up


def swiglu_backward(g: Tensor, y: Tensor) -> Tensor:
    """The gradient by y of ``swiglu(y)``, whose own is ``g``."""
    gate, up = y.chunk(2, -1)
    d = torch.empty_like(y)
    d_gate, d_up = d.chunk(2, -1)
    torch.mul(g, F.silu(gate), out=d_up)
    torch.ops.aten.silu_backward.grad_input(g * up, gate, grad_input=d_gate)
    return d


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """RoPE of x [tokens, heads, head_dim]; ``cos`` and ``sin`` [tokens, 1, head_dim], the sine's first half negated."""
    return x * cos + x.roll(x.shape[-1] // 2, -1) * sin
