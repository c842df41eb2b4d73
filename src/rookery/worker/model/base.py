"""The base model of a worker as its engine and its trainer use it."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from rookery.worker.model.adapter import Projections


class ResidentModel(Protocol):
    """The base model as engine and trainer use it; only runners and backbones know which class it has."""

    @property
    def context(self) -> int:
        """Tokens of the longest sequence."""
        ...

    @property
    def vocab(self) -> int: ...

    @property
    def bytes(self) -> int: ...

    @property
    def dtype(self) -> torch.dtype: ...

    @property
    def device(self) -> torch.device: ...

    @property
    def projections(self) -> Projections: ...

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """hidden [n, hidden], as its runner computes them → logits [n, vocab]."""
        ...
