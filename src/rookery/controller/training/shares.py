"""A batch divided among several training workers: its shares, and their answers as one.

A share has whole trajectories, in the batch's order. A loss is a sum over tokens whose weights hold the step's
normalisation, so the shares' gradients add up to the batch's: equal to one worker's up to the order of float32 sums.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rookery import protocol
from rookery.scheduling.trainers import divide

Item = tuple[int, protocol.GroupMember] | protocol.Datum
"""A trajectory and the number of its group, or a sequence without a group."""


def split_batch(batch: protocol.TrainingBatch, parts: int) -> list[protocol.TrainingBatch]:
    """At most ``parts`` shares with about equally many tokens. A prompt is in each share that has members of its
    group."""
    items: list[Item] = [(number, member) for number, group in enumerate(batch.groups) for member in group.members]
    items += batch.data
    if not items:
        return [batch]
    sizes = [
        len(protocol.integers(item.tokens))
        if isinstance(item, protocol.Datum)
        else len(item[1].tokens) + len(batch.groups[item[0]].prompt) / len(batch.groups[item[0]].members)
        for item in items
    ]
    return [_share(batch, items[span]) for span in divide(sizes, parts)]


def _share(batch: protocol.TrainingBatch, items: Sequence[Item]) -> protocol.TrainingBatch:
    members: dict[int, list[protocol.GroupMember]] = {}
    for item in items:
        if not isinstance(item, protocol.Datum):
            members.setdefault(item[0], []).append(item[1])
    return protocol.TrainingBatch(
        groups=[
            protocol.SharedPrefixGroup(prompt=batch.groups[number].prompt, members=some)
            for number, some in members.items()
        ],
        data=[item for item in items if isinstance(item, protocol.Datum)],
    )


def join_batches(shares: Iterable[bytes]) -> bytes:
    """The encoded batch with all groups and data of the encoded ``shares``."""
    joined = protocol.TrainingBatch()
    for content in shares:
        share = protocol.decode(protocol.batches, content)
        joined.groups += share.groups
        joined.data += share.data
    return protocol.encode(joined)


def join_metrics(answers: Iterable[protocol.OperationDone]) -> dict[str, float]:
    """Sums, and maxima where a name ends in ``:max``, as one worker would report them."""
    joined: dict[str, float] = {}
    for answer in answers:
        protocol.add_metrics(joined, answer.metrics)
    return joined
