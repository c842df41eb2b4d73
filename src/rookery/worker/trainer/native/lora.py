"""The LoRA of every policy in a packed stream, and its gradients.

Promises: each policy's rows meet its own weights only, forward and backward; its weight gradients are added to its own
float32 vectors as a side effect of the backward pass (they are no inputs of autograd, which would make, sum and keep a
tensor per weight and pass). One autograd node per projection serves all policies.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rookery.worker.trainer.native.optim import LoraSite, PolicyState


@dataclass(frozen=True)
class PolicyRows:
    """Rows ``start`` … ``stop - 1`` of the stream belong to ``policy``."""

    start: int
    stop: int
    policy: PolicyState


@dataclass(frozen=True)
class _Rows:
    start: int
    stop: int
    site: LoraSite
    scale: float


class _Delta(torch.autograd.Function):
    """y + B A x, in place. ``anchor`` is any tensor that requires a gradient: the first layer's x does not."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor, anchor: Tensor, rows: Sequence[_Rows]) -> Tensor:
        inner = []
        for r in rows:
            h = x[r.start : r.stop] @ r.site.a.t()
            for part in r.site.parts:
                y[r.start : r.stop, part.outputs].addmm_(h[:, part.ranks], part.b.t())
            inner.append(h)
        ctx.save_for_backward(x, *inner)
        ctx.rows = rows
        ctx.mark_dirty(y)
        return y

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor, None, None]:
        x, *inner = ctx.saved_tensors
        (d_y,) = gradients
        needed = ctx.needs_input_grad[0]
        covered = sum(r.stop - r.start for r in ctx.rows) == len(x)
        d_x = (torch.empty_like(x) if covered else torch.zeros_like(x)) if needed else None
        for r, h in zip(ctx.rows, inner, strict=True):
            d_rows = d_y[r.start : r.stop]
            d_h = torch.empty_like(h)
            for part in r.site.parts:
                d_part = d_rows[:, part.outputs]
                torch.mm(d_part, part.b, out=d_h[:, part.ranks])
                part.d_b.add_(d_part.t() @ h[:, part.ranks], alpha=r.scale)
            r.site.d_a.add_(d_h.t() @ x[r.start : r.stop])
            if d_x is not None:
                torch.mm(d_h, r.site.a, out=d_x[r.start : r.stop])
        return d_x, d_y, None, None


class PackedLora:
    """The ``Lora`` of a packed stream."""

    def __init__(self, segments: Sequence[PolicyRows]) -> None:
        self._segments = segments
        device = segments[0].policy.masters.device if segments else None
        self._anchor = torch.zeros((), device=device, requires_grad=True)

    def __call__(self, layer: int, site: str, x: Tensor, y: Tensor) -> Tensor:
        """See ``Lora``; ``y`` is changed in place. Rows of policies without this projection stay the base's."""
        rows = [
            _Rows(s.start, s.stop, s.policy.sites[layer, site], s.policy.scale)
            for s in self._segments
            if (layer, site) in s.policy.sites
        ]
        return _Delta.apply(x, y, self._anchor, rows) if rows else y
