"""What asynchrony should gain, from what generation and training cost by themselves. Pure.

LlamaRL's argument (arXiv 2505.24034), for a step of B samples on G equal devices, with costs per sample t(b) that fall
as the micro-batch b grows, and memory M per device:

    synchronous    (B/G) · min over bytes_g(b_g) + bytes_t(b_t) <= M  of  t_g(b_g) + t_t(b_t)
    asynchronous   (B/G) · (min over bytes_g(b_g) <= M of t_g(b_g)  +  min over bytes_t(b_t) <= M of t_t(b_t))

Synchronous phases use all devices by turns, so both have to fit into each; asynchronous ones divide the devices, in
proportion to t_g and t_t, and each device holds one phase only. So asynchrony never loses, and it gains exactly where
the joint constraint binds. What the argument leaves out are *bubbles*: times in which a synchronous step leaves its
devices idle (a commit, a slow environment). They are the whole gain where memory binds nothing.

Two things are different on a real, small machine, and have formulas of their own here: devices cannot be divided in any
proportion (:func:`apart`), or there is only one of them (:func:`shared`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Phase:
    """Generation or training on one device: by micro-batch in samples, seconds per sample, and bytes that it needs."""

    seconds: Mapping[int, float]
    size: Mapping[int, float]

    def best(self, budget: float) -> int:
        """The quickest micro-batch within ``budget`` bytes. Raises ``ValueError`` where none fits."""
        fitting = [batch for batch in self.seconds if self.size[batch] <= budget]
        if not fitting:
            raise ValueError(f"no micro-batch fits {budget:.0f} bytes: the least is {min(self.size.values()):.0f}")
        return min(fitting, key=lambda batch: (self.seconds[batch], batch))


@dataclass(frozen=True)
class Choice:
    """Micro-batches, and the seconds per sample of both phases together."""

    generation: int
    training: int
    seconds: float


def jointly(generation: Phase, training: Phase, budget: float) -> Choice:
    """The best pair that fits into one budget together. Raises ``ValueError`` where none does."""
    pairs = [
        Choice(g, t, generation.seconds[g] + training.seconds[t])
        for g in generation.seconds
        for t in training.seconds
        if generation.size[g] + training.size[t] <= budget
    ]
    if not pairs:
        raise ValueError(f"no pair of micro-batches fits {budget:.0f} bytes")
    return min(pairs, key=lambda pair: (pair.seconds, pair.generation, pair.training))


def separately(generation: Phase, training: Phase, budget: float) -> Choice:
    """The best of each, each with the budget to itself."""
    g, t = generation.best(budget), training.best(budget)
    return Choice(g, t, generation.seconds[g] + training.seconds[t])


def tight_budget(generation: Phase, training: Phase) -> float:
    """The least budget that holds the smallest micro-batches together, and the quickest generation alone: by itself
    generation gives nothing up, beside training it has to."""
    quickest = generation.size[generation.best(float("inf"))]
    return max(quickest, min(generation.size.values()) + min(training.size.values()))


def shared(generation: float, training: float, bubbles: float, staleness: int) -> float:
    """Seconds of a step where both phases share one processor: the compute of both, and the bubbles as far as the
    ``staleness`` further steps that may be under way do not fill them."""
    compute = generation + training
    return max(compute, (compute + bubbles) / (staleness + 1))


def apart(generation: float, training: float, bubbles: float, staleness: int) -> float:
    """Seconds of a step with a device for each phase: without lag one after the other, with enough of it the slower
    phase alone."""
    return max(generation, training, (generation + training + bubbles) / (staleness + 1))
