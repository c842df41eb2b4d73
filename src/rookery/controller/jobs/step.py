"""One optimizer step in the making. Its groups are differentiated portion by portion, as they become complete; the
gradients add up in the trainer, and what only the whole step knows is applied by the optimizer step. Pure.

The step's gradient is the same sum however its groups were portioned. Nothing here is durable: the groups stay ready in
the database until the step's commit consumes them all at once, so a crash in between takes every portion back.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from rookery.controller.jobs.batch import CompleteGroup, describe, scale
from rookery.spec.job import JobSpec


@dataclass
class StepAccumulator:
    """The step after ``number`` others."""

    spec: JobSpec
    number: int
    groups: list[CompleteGroup] = field(default_factory=list)
    """Handed out for it so far."""
    waited: float = 0.0
    """Seconds for which it waited for groups …"""
    trained: float = 0.0
    """… and for its trainer."""
    _sums: dict[str, float] = field(default_factory=dict)

    @property
    def missing(self) -> int:
        """Groups that it still lacks."""
        return self.spec.algorithm.groups_per_step - len(self.groups)

    @property
    def scale(self) -> float:
        """What the sum of its gradients is multiplied with, once nothing is missing."""
        return scale(self.spec, self.groups)

    def take(self, groups: Sequence[CompleteGroup]) -> None:
        """``groups`` are part of it."""
        self.groups.extend(groups)

    def add(self, metrics: Mapping[str, float]) -> None:
        """What the trainer said of a portion: sums, except maxima where the name ends in ``:max``."""
        for name, value in metrics.items():
            before = self._sums.get(name)
            if before is not None:
                value = max(before, value) if name.endswith(":max") else before + value
            self._sums[name] = value

    def figures(self) -> dict[str, float]:
        """Of its groups, as :func:`~rookery.controller.jobs.batch.describe` has them."""
        return describe(self.groups, self.number)

    def sums(self) -> dict[str, float]:
        """What the trainer said of the whole, the loss as it was stepped on."""
        found = dict(self._sums)
        if "loss:sum" in found:
            found["loss:sum"] *= self.scale
        return found
