"""From units of trajectories to one flat stream of tokens, and to the blocks in which attention over it is computed.

Promises:

* Every token of a unit's prompt stands in the stream once, whatever the number of members; every member's tail follows
  it. Tail tokens after the last one that carries loss are left out (nothing that is trained depends on them), and so is
  the last one itself: it is predicted, never read.
* The order of a batch is kept in ``Unit``'s loss tokens: members in order, tokens in order. A token carries loss where
  its weight is not 0; the others are attended to like any other. A datum's targets keep their order, all of them.
* A token attends to its own prompt and its own tail up to itself, to nothing else. Padding of a block repeats rows of
  the same unit, so what is wrong in one unit (a NaN) cannot reach another.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from rookery import protocol

PADDING_SHARE = 1.25
"""Sequences attend in one batch while padding them to the longest costs at most this factor: a batched product saves
calls, a padded one wastes arithmetic; 25% is about where the two meet on short sequences."""

BUNDLE_TOKENS = 64
"""Members' tails of a unit attend together, padded to the longest. Tails above this length are sorted into bundles of
like length first; below it the waste is smaller than another call."""


@dataclass(frozen=True)
class PackedGroup:
    """What one unit of the wire brings into a stream: ``prompt`` and the members' ``tails`` as they are read, and per
    loss token: ``sources`` (index of the predicting token within [prompt, tail, tail, …]), ``targets``, the behaviour
    log-probs, advantages, weights and the member it belongs to."""

    prompt: list[int]
    tails: list[list[int]]
    sources: list[int]
    targets: list[int]
    logprobs: list[float]
    advantages: list[float]
    weights: list[float]
    members: list[int]

    @property
    def tokens(self) -> int:
        """Tokens in the stream."""
        return len(self.prompt) + sum(map(len, self.tails))

    def room(self, copied: float) -> float:
        """Of memory, in tokens, where a key that is copied takes ``copied`` of a token: a GPU's attention copies a
        prompt's for each of the members that share it."""
        return self._room(self.tokens, len(self.tails), copied)

    def _room(self, tokens: int, members: int, copied: float) -> float:
        """The same, of a piece with so many ``tokens`` and ``members``."""
        return tokens + (copied * len(self.prompt) * members if members > 1 else 0.0)

    @classmethod
    def from_wire(cls, unit: protocol.SharedPrefixGroup) -> PackedGroup:
        """Raises ``ValueError`` for an empty prompt or lists of unlike length."""
        if not unit.prompt:
            raise ValueError("a unit needs a prompt of at least one token")
        packed = cls(list(unit.prompt), [], [], [], [], [], [], [])
        start = len(unit.prompt)
        for number, member in enumerate(unit.members):
            if not len(member.tokens) == len(member.logprobs) == len(member.advantages) == len(member.weights):
                raise ValueError(f"member {number}: tokens, logprobs, advantages and weights differ in length")
            loss = [i for i, weight in enumerate(member.weights) if weight != 0]
            if not loss:
                continue
            for i in loss:
                packed.sources.append(start + i - 1 if i else len(unit.prompt) - 1)
                packed.targets.append(member.tokens[i])
                packed.logprobs.append(member.logprobs[i])
                packed.advantages.append(member.advantages[i])
                packed.weights.append(member.weights[i])
                packed.members.append(number)
            packed.tails.append(list(member.tokens[: loss[-1]]))
            start += loss[-1]
        return packed

    @classmethod
    def from_datum(cls, datum: protocol.Datum) -> PackedGroup:
        """Every target is a loss token, also one of weight 0: its log-probability is asked for. Tokens behind the last
        row with a target are left out. Raises ``ValueError`` for lists of unlike length, or a row that is none."""
        lists = (datum.rows, datum.targets, datum.logprobs, datum.advantages, datum.weights)
        if len({len(values) for values in lists}) > 1:
            raise ValueError("a datum's rows, targets, logprobs, advantages and weights differ in length")
        if datum.rows and not 0 <= min(datum.rows) <= max(datum.rows) < len(datum.tokens):
            raise ValueError(f"a datum of {len(datum.tokens)} tokens has a target at row {max(datum.rows)}")
        read = datum.tokens[: max(datum.rows, default=-1) + 1]
        return cls(
            list(read), [[]], datum.rows, datum.targets, datum.logprobs, datum.advantages, datum.weights,
            [0] * len(datum.rows),
        )  # fmt: skip

    def split(self, most: int, room: float, copied: float) -> list[PackedGroup]:
        """In pieces of consecutive members, each of one member or of at most ``most`` tokens that take at most ``room``
        of memory, every one with the whole prompt. A trajectory stays whole, and a gradient is a sum: what is computed
        is the same."""

        def fits(tokens: int, members: int) -> bool:
            return tokens <= most and self._room(tokens, members, copied) <= room

        if len(self.tails) < 2 or fits(self.tokens, len(self.tails)):
            return [self]
        edges, tokens = [0], len(self.prompt)
        for number, tail in enumerate(self.tails):
            if number > edges[-1] and not fits(tokens + len(tail), number + 1 - edges[-1]):
                edges.append(number)
                tokens = len(self.prompt)
            tokens += len(tail)
        before = list(accumulate(map(len, self.tails), initial=0))
        targets = list(accumulate(Counter(self.members).values(), initial=0))  # every tail has some, in its order
        last = len(self.prompt) - 1
        pieces = []
        for first, end in pairwise([*edges, len(self.tails)]):
            loss = slice(targets[first], targets[end])
            pieces.append(
                PackedGroup(
                    prompt=self.prompt,
                    tails=self.tails[first:end],
                    sources=[source - before[first] if source > last else last for source in self.sources[loss]],
                    targets=self.targets[loss],
                    logprobs=self.logprobs[loss],
                    advantages=self.advantages[loss],
                    weights=self.weights[loss],
                    members=self.members[loss],
                )
            )
        return pieces


@dataclass(frozen=True)
class AttentionBlock:
    """Attention of ``bundles × members`` padded tails of ``queries.shape[2]`` tokens, each over ``prefix`` shared keys
    and its own tail. ``queries`` [bundles, members, tail] and ``keys`` [bundles, members, prefix + tail] are row
    numbers of the stream; ``lengths`` [bundles, members] of real tails, ``prefixes`` [bundles] of real prefixes."""

    prefix: int
    queries: Tensor
    keys: Tensor
    lengths: Tensor
    prefixes: Tensor


@dataclass(frozen=True)
class PackedBatch:
    """Units in one stream. ``spans[i]`` and ``loss_spans[i]`` are (start, stop) of unit i's rows and loss tokens.
    ``rows`` [loss tokens] names the row whose output predicts each of ``targets``; ``members`` numbers trajectories
    within their unit. ``blocks`` and ``sequences`` are two ways to say who attends to whom."""

    tokens: Tensor
    positions: Tensor
    bundles: list[Pack]
    spans: list[tuple[int, int]]
    loss_spans: list[tuple[int, int]]
    rows: Tensor
    targets: Tensor
    logprobs: Tensor
    advantages: Tensor
    weights: Tensor
    members: Tensor

    def blocks(self) -> list[AttentionBlock]:
        """Bundles of like shape side by side, padded."""
        return _blocks(self.bundles, self.tokens.device)

    def sequences(self) -> list[Span]:
        """Every row in one part, in order of the rows; nothing is padded."""
        parts = [Span(b.start, b.prefix, start, length) for b in self.bundles for start, length in b.tails]
        return sorted(parts, key=lambda part: part.start)


@dataclass(frozen=True)
class Span:
    """Rows ``start`` … ``start + length - 1`` attend, causally, to ``prefix`` rows from ``shared`` on and to
    themselves."""

    shared: int
    prefix: int
    start: int
    length: int


@dataclass(frozen=True)
class Pack:
    """Tails (start row, length) that share a prefix (start row, length)."""

    start: int
    prefix: int
    tails: list[tuple[int, int]]

    @property
    def longest(self) -> int:
        return max(length for _, length in self.tails)


def pack(units: Sequence[PackedGroup], device: torch.device | str = "cpu") -> PackedBatch:
    """One stream of ``units`` in their order."""
    tokens: list[int] = []
    positions: list[int] = []
    rows: list[int] = []
    members: list[int] = []
    spans, loss_spans, bundles = [], [], []
    for unit in units:
        start, prompt = len(tokens), len(unit.prompt)
        tokens += unit.prompt
        positions += range(prompt)
        tails = []
        for tail in unit.tails:
            if tail:
                tails.append((len(tokens), len(tail)))
            tokens += tail
            positions += range(prompt, prompt + len(tail))
        if len(unit.tails) == 1:
            bundles.append(Pack(start, 0, [(start, len(tokens) - start)]))
        else:
            bundles.append(Pack(start, 0, [(start, prompt)]))
            bundles += [Pack(start, prompt, part) for part in _alike(tails)]
        loss_spans.append((len(rows), len(rows) + len(unit.sources)))
        rows += [start + source for source in unit.sources]
        members += unit.members
        spans.append((start, len(tokens)))

    def floats(name: str) -> Tensor:
        return torch.tensor([x for unit in units for x in getattr(unit, name)], dtype=torch.float32, device=device)

    return PackedBatch(
        tokens=torch.tensor(tokens, dtype=torch.int64, device=device),
        positions=torch.tensor(positions, dtype=torch.int64, device=device),
        bundles=bundles,
        spans=spans,
        loss_spans=loss_spans,
        rows=torch.tensor(rows, dtype=torch.int64, device=device),
        targets=torch.tensor([t for unit in units for t in unit.targets], dtype=torch.int64, device=device),
        logprobs=floats("logprobs"),
        advantages=floats("advantages"),
        weights=floats("weights"),
        members=torch.tensor(members, dtype=torch.int64, device=device),
    )


def _alike(tails: list[tuple[int, int]]) -> list[list[tuple[int, int]]]:
    """Tails of one unit in bundles of like length."""
    parts: list[list[tuple[int, int]]] = []
    for tail in sorted(tails, key=lambda t: -t[1]):
        longest = parts[-1][0][1] if parts else 0
        if parts and (longest <= BUNDLE_TOKENS or longest <= PADDING_SHARE * tail[1]):
            parts[-1].append(tail)
        else:
            parts.append([tail])
    return parts


def _blocks(bundles: list[Pack], device: torch.device | str) -> list[AttentionBlock]:
    """Bundles of like shape side by side. Blocks without a prefix come first: they are the ones in which every prompt
    attends to itself."""
    groups: list[list[Pack]] = []
    for bundle in sorted(bundles, key=lambda b: (b.prefix > 0, -len(b.tails), -b.longest - b.prefix, -b.prefix)):
        if groups and _fits(groups[-1], bundle):
            groups[-1].append(bundle)
        else:
            groups.append([bundle])
    return [_block(group, device) for group in groups]


def _fits(group: list[Pack], bundle: Pack) -> bool:
    """Whether padding ``group`` and ``bundle`` to one shape stays within bounds; a prefix may stand in a block once."""
    first = group[0]
    if (bundle.prefix > 0) != (first.prefix > 0) or len(bundle.tails) != len(first.tails):
        return False
    if bundle.prefix and any(other.start == bundle.start for other in group):
        return False
    together = [*group, bundle]
    prefix, tail = max(b.prefix for b in together), max(b.longest for b in together)
    real = sum((b.prefix + b.longest) * b.longest for b in together)
    return len(together) * (prefix + tail) * tail <= PADDING_SHARE * real


def _block(group: list[Pack], device: torch.device | str) -> AttentionBlock:
    prefix, tail = max(b.prefix for b in group), max(b.longest for b in group)
    starts = torch.tensor([b.start for b in group]).view(-1, 1, 1)
    prefixes = torch.tensor([b.prefix for b in group])
    tails = torch.tensor([b.tails for b in group])  # [bundles, members, (start, length)]
    lengths = tails[:, :, 1]
    queries = tails[:, :, :1] + torch.minimum(torch.arange(tail), lengths[:, :, None] - 1)
    shared = starts + torch.minimum(torch.arange(prefix), (prefixes.view(-1, 1, 1) - 1).clamp(min=0))
    keys = torch.cat([shared.expand(-1, tails.shape[1], -1), queries], dim=2)
    return AttentionBlock(prefix, queries.to(device), keys.to(device), lengths.to(device), prefixes.to(device))
