"""Packs groups of trajectories into one flat batch of tokens, and lays out attention over it.

Promises:

* A group's prompt is in the batch once, whatever the number of its members; every member's tail follows it. Tail tokens
  after the last one that carries loss are omitted (no trained value depends on them), and so is the last one itself: it
  is predicted, never read.
* A group's loss tokens keep the order of the batch: members in order, tokens in order. A token carries loss if its
  weight is not 0; the others are attended to as well. A datum's targets all keep their order.
* A token attends to its own prompt and to its own tail up to itself, and to nothing else. Padding of an attention block
  repeats rows of the same group, so a NaN in one group cannot reach another.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from itertools import accumulate, pairwise
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from rookery import protocol
from rookery.errors import count_of

PADDING_SHARE = 1.25
"""Sequences attend in one batch while padding them to the longest costs at most this factor: a batched product saves
calls, a padded one wastes arithmetic; 25% is about where the two meet on short sequences."""

TARGET_SHARE = 1 / 4096
"""Memory of one more target of a row, as a share of a token's: some ten numbers, of a token's some hundred thousand.
It takes no time: its row is projected once for all its targets."""

PACK_TOKENS = 64
"""Tails of a group attend together, padded to the longest. Tails above this length are sorted into packs of similar
length first; below it the padding costs less than another call."""


class LossToken(NamedTuple):
    """A token that carries loss. ``source`` is the index of the token that predicts it within [prompt, tail, tail, …];
    ``logprob`` is the behaviour policy's."""

    source: int
    target: int
    logprob: float
    advantage: float
    weight: float
    member: int = 0


@dataclass(frozen=True)
class LossTokens:
    """The fields of several :class:`LossToken`, an array each: a datum has millions of them."""

    sources: np.ndarray
    targets: np.ndarray
    logprobs: np.ndarray
    advantages: np.ndarray
    weights: np.ndarray
    members: np.ndarray

    @classmethod
    def of(cls, tokens: Sequence[LossToken]) -> LossTokens:
        """Raises ``ValueError`` for a token id that no array holds."""
        sources, targets, logprobs, advantages, weights, members = zip(*tokens, strict=True) if tokens else [()] * 6
        return cls(
            np.array(sources, np.int64),
            _integers(targets),
            np.array(logprobs, np.float32),
            np.array(advantages, np.float32),
            np.array(weights, np.float32),
            np.array(members, np.int64),
        )

    @classmethod
    def join(cls, parts: Sequence[LossTokens]) -> LossTokens:
        """All of ``parts``, in order."""
        if not parts:
            return cls.of([])
        return cls(*(np.concatenate([getattr(part, field.name) for part in parts]) for field in fields(cls)))

    def __len__(self) -> int:
        return len(self.sources)

    def __getitem__(self, span: slice) -> LossTokens:
        return LossTokens(*(getattr(self, field.name)[span] for field in fields(self)))

    @cached_property
    def heads(self) -> np.ndarray:
        """The indices of the tokens that another row, or another member's, predicts than the token before them."""
        changes = (np.diff(self.sources) != 0) | (np.diff(self.members) != 0)
        return np.flatnonzero(np.concatenate(([True], changes))) if len(self) else np.zeros(0, np.int64)


@dataclass(frozen=True)
class PackedGroup:
    """A ``SharedPrefixGroup`` or ``Datum`` ready to be packed: ``prompt`` and the members' ``tails`` as they are read,
    and the tokens that carry ``loss``."""

    prompt: list[int]
    tails: list[list[int]]
    loss: LossTokens

    @property
    def tokens(self) -> int:
        """Tokens in the packed batch."""
        return len(self.prompt) + sum(map(len, self.tails))

    @property
    def unshared_tokens(self) -> int:
        """Tokens of :meth:`sequences`."""
        return self.tokens + len(self.prompt) * (len(self.tails) - 1)

    def memory(self, copied_key_share: float) -> float:
        """Memory of a pass over the group, in tokens. A GPU's attention copies the prompt's keys for each member that
        shares them; a copied key takes ``copied_key_share`` of a token. A row's targets after the first count too."""
        targets = TARGET_SHARE * (len(self.loss) - len(self.loss.heads))
        return self._memory(self.tokens, len(self.tails), copied_key_share) + targets

    def _memory(self, tokens: int, members: int, copied_key_share: float) -> float:
        """The memory of a piece with this many ``tokens`` and ``members``."""
        return tokens + (copied_key_share * len(self.prompt) * members if members > 1 else 0.0)

    @classmethod
    def from_group(cls, group: protocol.SharedPrefixGroup) -> PackedGroup:
        """Raises ``ValueError`` for an empty prompt or lists of different lengths."""
        if not group.prompt:
            raise ValueError("a group needs a prompt of at least one token")
        tails: list[list[int]] = []
        parts: list[LossTokens] = []
        start = len(group.prompt)
        for number, member in enumerate(group.members):
            if not len(member.tokens) == len(member.logprobs) == len(member.advantages) == len(member.weights):
                raise ValueError(f"member {number}: tokens, logprobs, advantages and weights differ in length")
            loss = np.flatnonzero(np.array(member.weights, np.float64))
            if not len(loss):
                continue
            last = int(loss[-1])
            sources = np.where(loss > 0, start + loss - 1, len(group.prompt) - 1)
            part = LossTokens(
                sources,
                _integers(member.tokens)[loss],
                _chosen(member.logprobs, loss),
                _chosen(member.advantages, loss),
                _chosen(member.weights, loss),
                np.full(len(loss), number, np.int64),
            )
            parts.append(part)
            tails.append(list(member.tokens[:last]))
            start += last
        return cls(list(group.prompt), tails, LossTokens.join(parts))

    @classmethod
    def from_datum(cls, datum: protocol.Datum) -> PackedGroup:
        """Every target is a loss token, also one of weight 0: its log-probability is requested. Tokens after the last
        row with a target are omitted. Raises ``ValueError`` for lists of different lengths, a row out of range or one
        with more than :data:`rookery.protocol.ROW_TARGETS` targets."""
        tokens, rows, targets = (_integers(protocol.integers(x)) for x in (datum.tokens, datum.rows, datum.targets))
        if not datum.rows and len(tokens) and len(targets) % len(tokens) == 0:
            rows = np.arange(len(tokens)).repeat(len(targets) // len(tokens))
        given = ((datum.logprobs, 0.0), (datum.advantages, 0.0), (datum.weights, 1.0))
        logprobs, advantages, weights = (
            np.array(protocol.floats(values), np.float32) if values else np.full(len(rows), default, np.float32)
            for values, default in given
        )
        loss = LossTokens(rows, targets, logprobs, advantages, weights, np.zeros(len(rows), np.int64))
        if len({len(values) for values in (rows, targets, logprobs, advantages, weights)}) > 1:
            raise ValueError("a datum's rows, targets, logprobs, advantages and weights differ in length")
        if len(rows) and not 0 <= rows.min() <= rows.max() < len(tokens):
            raise ValueError(f"a datum of {count_of(len(tokens), 'token')} has a target at row {rows.max()}")
        if len(rows) and (most := np.bincount(rows).max()) > protocol.ROW_TARGETS:
            raise ValueError(f"a datum has {most} targets in a row, allowed: at most {protocol.ROW_TARGETS}")
        read = tokens[: rows.max(initial=-1) + 1].tolist()
        return cls(read, [[]], loss)

    def check(self, context: int, vocab: int, max_tokens: int) -> None:
        """Raises ``ValueError`` if a model with this context and vocabulary cannot read it, ``MemoryError`` if a
        trajectory has more than ``max_tokens``, which fit the memory of a pass."""
        longest = len(self.prompt) + max(map(len, self.tails), default=0)
        if longest > context:
            raise ValueError(
                f"a trajectory of {count_of(longest, 'token')} is longer than the model's context of {context}"
            )
        targets = self.loss.targets
        read = [tokens for tokens in (self.prompt, *self.tails, targets.tolist()) if tokens]
        if any(min(tokens) < 0 or max(tokens) >= vocab for tokens in read):
            raise ValueError(f"a token id is outside of the vocabulary of {vocab}")
        if longest > max_tokens:
            limit = f"the {max_tokens} that fit this worker's memory"
            raise MemoryError(f"a trajectory of {count_of(longest, 'token')} is longer than {limit}")

    def check_pair(self, max_tokens: int) -> None:
        """Raises ``ValueError`` unless it has two trajectories, ``MemoryError`` if both have more than ``max_tokens``:
        a loss of pairs reads them in one pass."""
        if len(self.tails) != 2:
            raise ValueError(f"a loss of pairs needs groups of two trajectories, given {len(self.tails)}")
        if self.tokens > max_tokens:
            raise MemoryError(
                f"a pair of {count_of(self.tokens, 'token')} is longer than the {max_tokens} of this worker's memory"
            )

    def split(self, max_tokens: int, max_memory: float, copied_key_share: float) -> list[PackedGroup]:
        """Pieces of consecutive members with the whole prompt each: of one member, or of at most ``max_tokens`` tokens
        and ``max_memory`` (as :meth:`memory`). A trajectory stays whole and a gradient is a sum, so the result does not
        change."""

        def fits(tokens: int, members: int) -> bool:
            return tokens <= max_tokens and self._memory(tokens, members, copied_key_share) <= max_memory

        if len(self.tails) < 2 or fits(self.tokens, len(self.tails)):
            return [self]
        edges, tokens = [0], len(self.prompt)
        for number, tail in enumerate(self.tails):
            if number > edges[-1] and not fits(tokens + len(tail), number + 1 - edges[-1]):
                edges.append(number)
                tokens = len(self.prompt)
            tokens += len(tail)
        before = list(accumulate(map(len, self.tails), initial=0))
        edge = [0, *(np.flatnonzero(np.diff(self.loss.members)) + 1).tolist(), len(self.loss)]  # each tail has some
        last = len(self.prompt) - 1
        pieces = []
        for first, end in pairwise([*edges, len(self.tails)]):
            loss = self.loss[edge[first] : edge[end]]
            sources = np.where(loss.sources > last, loss.sources - before[first], loss.sources)
            pieces.append(PackedGroup(self.prompt, self.tails[first:end], replace(loss, sources=sources)))
        return pieces

    def sequences(self) -> list[protocol.Datum]:
        """The trajectories, in order, each with a copy of the prompt. Together they have the
        targets in the group's order."""
        found, start, length = [], len(self.prompt), len(self.prompt)
        edge = [0, *(np.flatnonzero(np.diff(self.loss.members)) + 1).tolist(), len(self.loss)]
        for tail, (first, end) in zip(self.tails, pairwise(edge), strict=True):
            loss = self.loss[first:end]
            found.append(
                protocol.Datum(
                    tokens=[*self.prompt, *tail],
                    rows=np.where(loss.sources < length, loss.sources, loss.sources - start + length).tolist(),
                    targets=loss.targets.tolist(),
                    logprobs=loss.logprobs.tolist(),
                    advantages=loss.advantages.tolist(),
                    weights=loss.weights.tolist(),
                )
            )
            start += len(tail)
        return found


def plan_passes(lengths: list[int], processes: int, slice_tokens: int) -> list[list[list[int]]]:
    """Passes that cover sequences of these ``lengths``; of each pass, the indices of each process's sequences, none for
    some if there are too few. Sequences of a pass are of similar length, and take at most ``slice_tokens`` tokens in a
    process, padding included, or are single. Every sequence is read once, whole, by one process."""
    order = sorted(range(len(lengths)), key=lambda at: -lengths[at])
    passes = []
    while order:
        rows = max(1, slice_tokens // max(1, lengths[order[0]])) * processes
        taken, order = order[:rows], order[rows:]
        passes.append([taken[rank::processes] for rank in range(processes)])
    return passes


@dataclass(frozen=True)
class AttentionBlock:
    """Attention of ``packs × members`` padded tails of ``queries.shape[2]`` tokens, each over ``prefix`` shared keys
    and its own tail. ``queries`` [packs, members, tail] and ``keys`` [packs, members, prefix + tail] are row numbers of
    the batch; ``lengths`` [packs, members] are those of real tails, ``prefixes`` [packs] of real prefixes."""

    prefix: int
    queries: Tensor
    keys: Tensor
    lengths: Tensor
    prefixes: Tensor


@dataclass(frozen=True)
class SoftTargets:
    """Loss tokens in runs of those that one row predicts: ``heads`` [runs] is the first token of each, ``ends`` are the
    ends of all."""

    heads: Tensor
    ends: list[int]

    def of_rows(self, first: int, stop: int) -> tuple[slice, Tensor]:
        """The loss tokens of the runs ``first`` … ``stop - 1``, and the run of each, numbered from ``first``."""
        before = self.ends[first - 1] if first else 0
        counts = torch.tensor([before, *self.ends[first:stop]]).diff()
        runs = torch.arange(len(counts)).repeat_interleave(counts)
        return slice(before, self.ends[stop - 1]), runs.to(self.heads.device)


@dataclass(frozen=True)
class PackedBatch:
    """Groups in one flat batch. ``row_ranges[i]`` and ``loss_ranges[i]`` are (start, stop) of group i's rows and loss
    tokens. ``sources`` [loss tokens] is the row whose output predicts each of ``targets``; ``members`` numbers
    trajectories within their group. ``soft`` is set where a row has several targets of a trajectory. :meth:`blocks` and
    :meth:`spans` are two layouts of the same attention."""

    tokens: Tensor
    positions: Tensor
    packs: list[Pack]
    row_ranges: list[tuple[int, int]]
    loss_ranges: list[tuple[int, int]]
    soft: SoftTargets | None
    sources: Tensor
    targets: Tensor
    logprobs: Tensor
    advantages: Tensor
    weights: Tensor
    members: Tensor

    @property
    def predictors(self) -> Tensor:
        """The rows that predict the loss tokens, once for each run of soft targets."""
        return self.sources if self.soft is None else self.sources[self.soft.heads]

    def blocks(self) -> list[AttentionBlock]:
        """Packs of similar shape together, padded."""
        return _blocks(self.packs, self.tokens.device)

    def spans(self) -> list[Span]:
        """Every row in one span, in order of the rows; nothing is padded."""
        spans = [Span(pack.start, pack.prefix, start, length) for pack in self.packs for start, length in pack.tails]
        return sorted(spans, key=lambda span: span.start)


@dataclass(frozen=True)
class Span:
    """Rows ``start`` … ``start + length - 1`` attend, causally, to the ``prefix`` rows from ``shared`` on and to
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


def pack_groups(groups: Sequence[PackedGroup], device: torch.device | str = "cpu") -> PackedBatch:
    """One batch of ``groups`` in their order."""
    tokens: list[int] = []
    positions: list[int] = []
    row_ranges, loss_ranges, packs, at = [], [], [], 0
    for group in groups:
        start, prompt = len(tokens), len(group.prompt)
        tokens += group.prompt
        positions += range(prompt)
        tails = []
        for tail in group.tails:
            if tail:
                tails.append((len(tokens), len(tail)))
            tokens += tail
            positions += range(prompt, prompt + len(tail))
        if len(group.tails) == 1:
            packs.append(Pack(start, 0, [(start, len(tokens) - start)]))
        else:
            packs.append(Pack(start, 0, [(start, prompt)]))
            packs += [Pack(start, prompt, alike) for alike in _by_length(tails)]
        loss_ranges.append((at, at := at + len(group.loss)))
        row_ranges.append((start, len(tokens)))

    def joined(values: Iterable[np.ndarray]) -> Tensor:
        return torch.from_numpy(np.concatenate([*values] or [np.zeros(0)])).to(device)

    losses = [group.loss for group in groups]
    heads = [loss.heads + begin for loss, (begin, _) in zip(losses, loss_ranges, strict=True)]
    soft = None
    if sum(map(len, heads)) < at:
        whole = joined(heads)
        soft = SoftTargets(whole, [*whole[1:].tolist(), at])
    return PackedBatch(
        tokens=torch.tensor(tokens, dtype=torch.int64, device=device),
        positions=torch.tensor(positions, dtype=torch.int64, device=device),
        packs=packs,
        row_ranges=row_ranges,
        loss_ranges=loss_ranges,
        soft=soft,
        sources=joined(loss.sources + begin for loss, (begin, _) in zip(losses, row_ranges, strict=True)),
        targets=joined(loss.targets for loss in losses),
        logprobs=joined(loss.logprobs for loss in losses),
        advantages=joined(loss.advantages for loss in losses),
        weights=joined(loss.weights for loss in losses),
        members=joined(loss.members for loss in losses),
    )


def _chosen(values: Sequence[float], at: np.ndarray) -> np.ndarray:
    """The values ``at`` these places, in float32; one that is too large is infinite."""
    with np.errstate(over="ignore"):
        return np.array(values, np.float64)[at].astype(np.float32)


def _integers(values: Iterable[int]) -> np.ndarray:
    try:
        return np.array(values, np.int64)
    except OverflowError:
        raise ValueError("a token id is outside of every vocabulary") from None


def _by_length(tails: list[tuple[int, int]]) -> list[list[tuple[int, int]]]:
    """Tails of one group, in lists of similar length."""
    lists: list[list[tuple[int, int]]] = []
    for tail in sorted(tails, key=lambda tail: -tail[1]):
        longest = lists[-1][0][1] if lists else 0
        if lists and (longest <= PACK_TOKENS or longest <= PADDING_SHARE * tail[1]):
            lists[-1].append(tail)
        else:
            lists.append([tail])
    return lists


def _blocks(packs: list[Pack], device: torch.device | str) -> list[AttentionBlock]:
    """Packs of similar shape together. Blocks without a prefix come first: in them every prompt attends to itself."""
    blocks: list[list[Pack]] = []
    for pack in sorted(packs, key=lambda p: (p.prefix > 0, -len(p.tails), -p.longest - p.prefix, -p.prefix)):
        if blocks and _fits(blocks[-1], pack):
            blocks[-1].append(pack)
        else:
            blocks.append([pack])
    return [_block(block, device) for block in blocks]


def _fits(block: list[Pack], pack: Pack) -> bool:
    """Whether padding ``block`` and ``pack`` to one shape stays within bounds; a prefix is in a block at most once."""
    first = block[0]
    if (pack.prefix > 0) != (first.prefix > 0) or len(pack.tails) != len(first.tails):
        return False
    if pack.prefix and any(other.start == pack.start for other in block):
        return False
    together = [*block, pack]
    prefix, tail = max(p.prefix for p in together), max(p.longest for p in together)
    real = sum((p.prefix + p.longest) * p.longest for p in together)
    return len(together) * (prefix + tail) * tail <= PADDING_SHARE * real


def _block(packs: list[Pack], device: torch.device | str) -> AttentionBlock:
    prefix, tail = max(pack.prefix for pack in packs), max(pack.longest for pack in packs)
    starts = torch.tensor([pack.start for pack in packs]).view(-1, 1, 1)
    prefixes = torch.tensor([pack.prefix for pack in packs])
    tails = torch.tensor([pack.tails for pack in packs])  # [packs, members, (start, length)]
    lengths = tails[:, :, 1]
    queries = tails[:, :, :1] + torch.minimum(torch.arange(tail), lengths[:, :, None] - 1)
    shared = starts + torch.minimum(torch.arange(prefix), (prefixes.view(-1, 1, 1) - 1).clamp(min=0))
    keys = torch.cat([shared.expand(-1, tails.shape[1], -1), queries], dim=2)
    return AttentionBlock(prefix, queries.to(device), keys.to(device), lengths.to(device), prefixes.to(device))
