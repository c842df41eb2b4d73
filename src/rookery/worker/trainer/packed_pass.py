"""A base model as a trainer uses it: one differentiable pass over a packed batch, with the LoRA of each policy.

Promises of every implementation:

* Base weights are frozen. A policy's gradient is added to its own state as a side effect of the backward pass; rows of
  other policies, and rows of none, do not contribute.
* A token attends to the tokens that :mod:`rookery.worker.trainer.packing` states.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from rookery.worker.model.base import ResidentModel
from rookery.worker.trainer.loss_head import TokenLogprobs
from rookery.worker.trainer.packed_lora import PolicyRows
from rookery.worker.trainer.packing import PackedBatch, SoftTargets


@dataclass(frozen=True)
class PassLimits:
    """In tokens. ``resident_tokens``: the longest batch whose activations are kept. ``max_tokens``: the longest batch
    that is computed at all. ``copied_key_share``: memory of a key that attention copies for one more sequence, as a
    share of a token's."""

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
        """With ``recompute``, layers are computed again in the backward pass instead of being kept."""
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
        """Of ``targets`` [n] int64 after ``hidden`` [n, hidden]; ``temperatures`` [n] float32, None: all 1. With
        ``soft``, hidden and temperatures have an entry for each of its runs."""
        ...
