"""The training batch that a worker fetches with a ticket: trajectories grouped by common prompt, single sequences."""

from __future__ import annotations

import msgspec

from rookery.protocol.common import Struct


class GroupMember(Struct, kw_only=True):
    """One trajectory after its group's prompt: parallel lists with one entry per token of the tail.

    ``logprobs`` are the behaviour policy's; entries where ``weights`` is 0 are ignored (tokens of the environment carry
    no loss). ``weights`` multiply the token's loss term: the algorithm's normalisation lives there, not in the loss."""

    tokens: list[int]
    logprobs: list[float]
    advantages: list[float]
    weights: list[float]


class SharedPrefixGroup(Struct, kw_only=True):
    """Trajectories with one common prompt, which the trainer computes once, forward and backward. A prompt has at
    least one token: the first tail token is predicted from the prompt's last."""

    prompt: list[int]
    members: list[GroupMember]


class Datum(Struct, kw_only=True):
    """A sequence with arbitrary targets: ``targets[i]`` is scored as the token after ``tokens[: rows[i] + 1]``.
    The other lists are parallel to ``targets``, with the meaning that they have in :class:`GroupMember`, except that a
    target is scored whatever its weight. A row may have several targets (a distribution), or none."""

    tokens: list[int]
    rows: list[int]
    targets: list[int]
    logprobs: list[float]
    advantages: list[float]
    weights: list[float]


class TrainingBatch(Struct, kw_only=True):
    """The data of one ``forward_backward``."""

    groups: list[SharedPrefixGroup] = msgspec.field(default_factory=list)
    data: list[Datum] = msgspec.field(default_factory=list)
