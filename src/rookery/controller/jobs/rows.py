"""Batches of rows: demonstrations and preferences as training batches, without a rollout. Pure.

The loss of a step is the mean over its learned tokens (``sft``: by their weights) or over its pairs (``dpo``). The
trainer adds sums; the optimizer step scales them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rookery import protocol
from rookery.controller.training.policy_run import ForwardRequest
from rookery.environments.demonstrations import demonstration, preference
from rookery.environments.messages import shown
from rookery.errors import UserError
from rookery.spec import values
from rookery.spec.job import JobSpec
from rookery.tokenization.chat import Chat
from rookery.tokenization.demonstrations import LearnedSequence, learned_sequences

LEARNED = {"sft": "cross_entropy", "dpo": "dpo"}
"""The trainer's loss of each algorithm on rows."""


@dataclass(frozen=True)
class RowBatch:
    """The rows of one step, or of one pass over held-out rows."""

    request: ForwardRequest
    weight: float
    """The sum of the weights of its tokens, or the number of its pairs: what a mean is over."""
    rows: int
    lengths: list[int]
    """Tokens of each sequence."""
    cut: int
    """Rows that were longer than ``max_length``."""
    empty: int
    """Rows that teach nothing once they were rendered and cut: without a learned token, or with two equal replies."""


def longest(spec: JobSpec, chat: Chat) -> int:
    """The most tokens of a sequence."""
    return min(spec.algorithm.max_length or chat.context, chat.context)


def row_batch(spec: JobSpec, chat: Chat, rows: Sequence[bytes], *, forward_only: bool = False) -> RowBatch:
    """The batch of ``rows``, each the JSON of a checked row. Blocks. Raises ``ValueError`` or
    :class:`~rookery.errors.UserError` for a row that the chat template refuses."""
    algorithm, most = spec.algorithm, longest(spec, chat)
    paired = algorithm.on_pairs
    convert = _pair if paired else _demonstrated
    groups: list[protocol.SharedPrefixGroup] = []
    lengths: list[int] = []
    cut = empty = 0
    for row in rows:
        long, made = False, []
        for sequences in _named(convert, chat, values.decode(row)):
            long |= any(one.length > most for one in sequences)
            kept = [one.cut(most) for one in sequences]
            alike = paired and kept[0] == kept[1]
            if all(any(one.weights) for one in kept) and not alike:
                made.append(kept)
        cut += long
        empty += not made
        for kept in made:
            lengths += [one.length for one in kept]
            groups.append(_group(kept, paired))
    weight = float(len(groups))
    if algorithm.name == "sft":
        weight = sum(sum(member.weights) for group in groups for member in group.members)
    return RowBatch(
        ForwardRequest(
            batch=protocol.encode(protocol.TrainingBatch(groups=groups)),
            loss=protocol.Loss(
                name=LEARNED[algorithm.name], params={} if algorithm.beta is None else {"beta": algorithm.beta}
            ),
            forward_only=forward_only,
        ),
        weight, len(rows), lengths, cut, empty,
    )  # fmt: skip


def _named(
    convert: Callable[[Chat, Any], list[list[LearnedSequence]]], chat: Chat, row: Any
) -> list[list[LearnedSequence]]:
    """The sequences of a row, whose beginning an error names."""
    try:
        return convert(chat, row)
    except UserError as error:
        raise UserError(f"{shown(row)}: {error}") from None


def step_metrics(batch: RowBatch, sums: Mapping[str, float]) -> dict[str, float]:
    """The metrics of a step on ``batch``, of which ``sums`` are the trainer's: means over tokens or over pairs. A batch
    that teaches nothing has no loss: NaN."""
    metrics = {
        "loss": sums.get("loss:sum", math.nan) / batch.weight if batch.weight else math.nan,
        "rows": float(batch.rows),
        "rows_cut": float(batch.cut),
        "rows_empty": float(batch.empty),
        "length_mean": sum(batch.lengths) / max(1, len(batch.lengths)),
        "length_max": float(max(batch.lengths, default=0)),
    }
    pairs = sums.get("pairs")
    if pairs:
        metrics |= {
            name.removesuffix(":pairs"): value / pairs for name, value in sums.items() if name.endswith(":pairs")
        }
    return metrics


def _demonstrated(chat: Chat, row: Any) -> list[list[LearnedSequence]]:
    found = demonstration(row)
    return [[sequence] for sequence in learned_sequences(chat, found.messages, found.weights, found.tools)]


def _pair(chat: Chat, row: Any) -> list[list[LearnedSequence]]:
    """The two replies, chosen first, after the same prompt."""
    found = preference(row)
    pair = [
        learned_sequences(chat, [*found.prompt, reply], [0.0] * len(found.prompt) + [1.0], found.tools)[0]
        for reply in (found.chosen, found.rejected)
    ]
    shared = 0  # templates can write the prompt differently before different replies
    for one, other in zip(pair[0].prompt, pair[1].prompt, strict=False):
        if one != other:
            break
        shared += 1
    return [[_shortened(one, shared) for one in pair]] if shared else []


def _shortened(one: LearnedSequence, prompt: int) -> LearnedSequence:
    """The sequence with a prompt of ``prompt`` tokens."""
    rest = one.prompt[prompt:]
    return LearnedSequence(one.prompt[:prompt], [*rest, *one.tokens], [0.0] * len(rest) + one.weights)


def _group(sequences: Sequence[LearnedSequence], paired: bool) -> protocol.SharedPrefixGroup:
    signs = (1.0, -1.0) if paired else (1.0,) * len(sequences)
    return protocol.SharedPrefixGroup(
        prompt=sequences[0].prompt,
        members=[
            protocol.GroupMember(
                tokens=one.tokens, logprobs=[0.0] * len(one.tokens), advantages=[sign] * len(one.tokens),
                weights=one.weights,
            )
            for one, sign in zip(sequences, signs, strict=True)
        ],
    )  # fmt: skip
