"""The passes of a training group: which process reads which sequences.

Promise: every sequence is read once, whole, by one process.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from rookery import protocol
from rookery.worker.trainer.native.packing import PackedGroup


@dataclass(frozen=True)
class PassResult:
    """Sums of metrics over the sequences of one process, and their log-probabilities, one tensor each."""

    metrics: dict[str, float]
    logprobs: list[Tensor]


def sequences_of(group: PackedGroup) -> list[protocol.Datum]:
    """The trajectories of a group, in order, each with a copy of the prompt. Together they have the group's
    targets in the group's order."""
    found, start, at, length = [], len(group.prompt), 0, len(group.prompt)
    for tail in group.tails:
        first = at
        while at < len(group.targets) and group.members[at] == group.members[first]:
            at += 1
        loss = slice(first, at)
        rows = [source if source < length else source - start + length for source in group.sources[loss]]
        found.append(
            protocol.Datum(
                tokens=[*group.prompt, *tail],
                rows=rows,
                targets=group.targets[loss],
                logprobs=group.logprobs[loss],
                advantages=group.advantages[loss],
                weights=group.weights[loss],
            )
        )
        start += len(tail)
    return found


def plan_passes(lengths: list[int], processes: int, slice_tokens: int) -> list[list[list[int]]]:
    """Passes that cover sequences of these ``lengths``; of each pass, the indices of each process's sequences, none for
    some if there are too few. Sequences of a pass are of similar length, and take at most ``slice_tokens`` tokens in a
    process, padding included, or are single."""
    order = sorted(range(len(lengths)), key=lambda at: -lengths[at])
    passes = []
    while order:
        rows = max(1, slice_tokens // max(1, lengths[order[0]])) * processes
        taken, order = order[:rows], order[rows:]
        passes.append([taken[rank::processes] for rank in range(processes)])
    return passes
