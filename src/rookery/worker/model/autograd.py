"""The decoder's elementwise parts with backward passes of their own.

Promises: the forward results are those of the plain formulas, bit for bit (generation and training share them); the
backward passes compute in float32 what rounding would bias, and keep nothing but their inputs, so that a layer's
activations cost what its matmuls need and little more.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.eps = eps
        return F.rms_norm(x, (x.shape[-1],), weight, eps)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        x, weight = ctx.saved_tensors
        (g,) = gradients
        wide = torch.promote_types(x.dtype, torch.float32)
        size = x.shape[-1]
        full, scaled = x.to(wide), g.to(wide) * weight.to(wide)
        inverse = torch.linalg.vecdot(full, full).div_(size).add_(ctx.eps).rsqrt_()
        along = torch.linalg.vecdot(scaled, full).mul_(inverse.pow(3)).div_(size)
        return scaled.mul_(inverse.unsqueeze(-1)).sub_(full * along.unsqueeze(-1)).to(x.dtype), None, None


class _SwiGlu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor) -> Tensor:
        ctx.save_for_backward(y)
        gate, up = y.chunk(2, -1)
        return F.silu(gate) * up

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        (y,) = ctx.saved_tensors
        (g,) = gradients
        gate, up = y.chunk(2, -1)
        d = torch.empty_like(y)
        d_gate, d_up = d.chunk(2, -1)
        torch.mul(g, F.silu(gate), out=d_up)
        torch.ops.aten.silu_backward.grad_input(g * up, gate, grad_input=d_gate)
        return d


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return x * cos + x.roll(x.shape[-1] // 2, -1) * sin

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        (g,) = gradients
        return g * cos + (g * sin).roll(g.shape[-1] // 2, -1), None, None


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """``x / √(mean(x²) + eps) · weight`` over the last dimension (arXiv:1910.07467); ``weight`` is frozen."""
    if torch.is_grad_enabled():
        return _RmsNorm.apply(x, weight, eps)
    return F.rms_norm(x, (x.shape[-1],), weight, eps)


def swiglu(y: Tensor) -> Tensor:
    """``silu(gate) · up`` of y = [gate, up] [tokens, 2 · inner] (arXiv:2002.05202)."""
    if torch.is_grad_enabled():
        return _SwiGlu.apply(y)
    gate, up = y.chunk(2, -1)
    return F.silu(gate) * up


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """RoPE of x [tokens, heads, head_dim]; ``cos`` and ``sin`` [tokens, 1, head_dim], the sine's first half negated."""
    if torch.is_grad_enabled():
        return _Rotate.apply(x, cos, sin)
    return x * cos + x.roll(x.shape[-1] // 2, -1) * sin
