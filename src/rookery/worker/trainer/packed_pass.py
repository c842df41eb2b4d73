"""A base model as a trainer uses it: one differentiable pass over a packed batch, with the LoRA of each policy.

Promises of every implementation:

* Base weights are frozen. A policy's gradient is added to its own state as a side effect of the backward pass; rows of
  other policies, and rows of none, do not contribute.
* A token attends to the tokens that :mod:`rookery.worker.trainer.packing` states.

The LoRA is :class:`PackedLora` for all of them. Each policy's rows are multiplied by its own weights only, forward and
backward. Its weight gradients are added to its own float32 vectors; they are no inputs of autograd, which would create,
sum and keep a tensor per weight and pass. One autograd node per projection serves all policies.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from rookery.worker.model.adapter import ResidentModel
from rookery.worker.trainer.loss_head import TokenLogprobs
from rookery.worker.trainer.optim import LoraSite, PolicyState
from rookery.worker.trainer.packing import PackedBatch, SoftTargets


@dataclass(frozen=True)
class PolicyRows:
    """Rows ``start`` … ``stop - 1`` of the batch belong to ``policy``."""

    start: int
    stop: int
    policy: PolicyState


@dataclass(frozen=True)
class PassLimits:
    """The limits of a pass, in tokens. ``resident_tokens``: the longest batch whose activations are kept.
    ``max_tokens``: the longest batch that is computed at all. ``copied_key_share``: memory of a key that attention
    copies for one more sequence, as a share of a token's."""

    resident_tokens: int
    max_tokens: int
    copied_key_share: float = 0.0


class BackwardPass(Protocol):
    """A finished forward pass."""

    @property
    def hidden(self) -> Tensor:
        """Hidden states [tokens, hidden], as :meth:`Backbone.logprobs` reads them, detached."""
        ...

    def backward(self, d_hidden: Tensor) -> None:
        """Propagates d loss / d hidden back, once."""
        ...


class Backbone(Protocol):
    paused: float
    """Seconds within passes in which others computed."""

    @property
    def model(self) -> ResidentModel: ...

    @property
    def limits(self) -> PassLimits: ...

    def infer(self, batch: PackedBatch, policies: Sequence[PolicyRows]) -> Tensor:
        """Hidden states [tokens, hidden] without gradients; rows of no policy are those of the base model."""
        ...

    def forward(self, batch: PackedBatch, policies: Sequence[PolicyRows], *, recompute: bool) -> BackwardPass:
        """A pass that can be gone through backwards. With ``recompute``, layers are computed again in the backward pass
        instead of being kept."""
        ...

    def logprobs(
        self,
        hidden: Tensor,
        targets: Tensor,
        temperatures: Tensor | None,
        *,
        derivatives: bool,
        soft: SoftTargets | None = None,
    ) -> TokenLogprobs:
        """The log-probabilities of ``targets`` [n] int64 after ``hidden`` [n, hidden]; ``temperatures`` [n] float32,
        None: all 1. With ``soft``, hidden and temperatures have an entry for each of its runs."""
        ...


# --- the LoRA of its policies ---------------------------------------------------------------------------------------

SUMMED_ROWS = 1024
"""Rows that a weight's gradient sums in one product. In bfloat16 the sums of up to so many are the same bits by one to
eight threads; of 2,048 oneDNN gives each thread a part, so that the sum depends on their number."""


class _AddLora(torch.autograd.Function):
    """y + B A x, in place, at the projection ``key`` (layer, site). ``anchor`` is any tensor that requires a gradient:
    the first layer's x does not. ``y`` may be a view, so it is the first input, where autograd looks for the view that
    a function changes."""

    @staticmethod
    def forward(
        ctx: Any, y: Tensor, x: Tensor, anchor: Tensor, policies: Sequence[PolicyRows], key: tuple[int, str]
    ) -> Tensor:
        inner = []
        ctx.rows = [(slice(p.start, p.stop), p.policy.sites[key], p.policy.scale) for p in policies]
        for rows, site, _ in ctx.rows:
            h = x[rows] @ site.a.t()
            for part in site.parts:
                y[rows, part.outputs].addmm_(h[:, part.ranks], part.b.t())
            inner.append(h)
        ctx.save_for_backward(x, *inner)
        ctx.mark_dirty(y)
        return y

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor | None, None, None, None]:
        x, *inner = ctx.saved_tensors
        d_x = torch.zeros_like(x) if ctx.needs_input_grad[1] else None
        for (rows, site, scale), h in zip(ctx.rows, inner, strict=True):
            add_gradients(site, scale, x[rows], h, gradients[0][rows], None if d_x is None else d_x[rows])
        return gradients[0], d_x, None, None, None


def add_gradients(site: LoraSite, scale: float, x: Tensor, h: Tensor, d_y: Tensor, d_x: Tensor | None) -> None:
    """Adds the gradients of one policy's rows of y = B h with h = A x: by its weights to its vectors, and by x to
    ``d_x``. ``scale`` is its adapter's."""
    d_h = torch.empty_like(h)
    pieces = [slice(begin, begin + SUMMED_ROWS) for begin in range(0, len(x), SUMMED_ROWS)]
    for part in site.parts:
        d_part = d_y[:, part.outputs]
        torch.mm(d_part, part.b, out=d_h[:, part.ranks])
        for rows in pieces:
            part.d_b.add_(d_part[rows].t() @ h[rows, part.ranks], alpha=scale)
    for rows in pieces:
        site.d_a.add_(d_h[rows].t() @ x[rows])
    if d_x is not None:
        d_x.addmm_(d_h, site.a)


class PackedLora:
    """The ``Lora`` of a packed batch."""

    def __init__(self, policies: Sequence[PolicyRows]) -> None:
        self._policies = policies
        device = policies[0].policy.masters.device if policies else None
        self._anchor = torch.zeros((), device=device, requires_grad=True)

    def __call__(self, layer: int, site: str, x: Tensor, y: Tensor) -> Tensor:
        """``y`` is changed in place. Rows of policies without this projection keep the base's output."""
        present = [rows for rows in self._policies if (layer, site) in rows.policy.sites]
        return _AddLora.apply(y, x, self._anchor, present, (layer, site)) if present else y
