"""The cost of work: a worker's paid time, shared among the jobs and tenants that it worked for. At every moment

    used + idle + pending = seconds connected × price     (:class:`WorkerMeter`)

**An interval** lies between two heartbeats. A heartbeat reports the seconds that the worker's process has decoded and
trained so far. The difference to the last one is the interval's busy time (scaled down to the interval where a late
heartbeat makes it longer); the rest is idle. Time of a connection after its last heartbeat is idle.

**Decoding** is charged to the accounts whose tokens arrived, in proportion to the tokens. **Training** is charged to
the accounts whose operations ended: each claims the seconds that its worker reports for it, scaled down as the busy
time is, and gets no more than there are. Busy time without a known account (a long prompt before its first token, an
operation under way) is pending; it becomes idle when no such work has been under way for :data:`PENDING_SECONDS`: its
result never came.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field
from typing import Generic, Literal, TypeVar

import msgspec

HOUR = 3600.0

PENDING_SECONDS = 30.0
"""How long an answer may follow the last sign of its work: a commit's comes after its upload."""

LONGEST_SECONDS = 10 * 365 * 24 * HOUR
"""Longer times are cut to this: a worker that reports nonsense must not break the counters."""

Kind = Literal["reserved", "preemptible"]
Account = TypeVar("Account")


class WorkDone(msgspec.Struct, omit_defaults=True):
    """Work of one sort."""

    seconds: float = 0.0
    """Seconds of computing."""
    cost: float = 0.0
    """The cost in price units."""
    tokens: int = 0
    """Sampled, or trained on."""

    def add(self, other: WorkDone) -> None:
        self.seconds += other.seconds
        self.cost += other.cost
        self.tokens += other.tokens


class UsageRecord(msgspec.Struct, omit_defaults=True):
    """The usage of one kind of worker by one account."""

    decode: WorkDone = msgspec.field(default_factory=WorkDone)
    train: WorkDone = msgspec.field(default_factory=WorkDone)

    @property
    def seconds(self) -> float:
        return self.decode.seconds + self.train.seconds

    @property
    def cost(self) -> float:
        return self.decode.cost + self.train.cost

    def add(self, other: UsageRecord) -> None:
        self.decode.add(other.decode)
        self.train.add(other.train)


Usage = dict[Kind, UsageRecord]
"""By kind of worker; a kind that was not used is absent."""


@dataclass
class Interval(Generic[Account]):
    """The time since the last heartbeat and the charges that became known in it."""

    seconds: float
    cost: float
    idle: float
    """Cost of idle time, of this interval or pending since an earlier one."""
    used: dict[Account, UsageRecord] = field(default_factory=dict)

    def of(self, account: Account) -> UsageRecord:
        return self.used.setdefault(account, UsageRecord())


class WorkerMeter(Generic[Account]):
    """One connection of one worker. Times are seconds of one monotonic clock; ``price`` is per hour, not negative."""

    def __init__(self, price: float, at: float) -> None:
        self._price = price / HOUR
        self._at = at
        self._reported: tuple[float, float] | None = None
        self._decode_seen = self._train_seen = at
        """The last sign of each sort of work."""
        self._decode_pending = self._train_pending = 0.0
        """Busy seconds without an account."""
        self._train_reported = 0.0
        """Seconds of training before they were scaled down to their intervals: claims are seconds like these."""
        self._sampled: Counter[Account] = Counter()
        self._trained: Counter[Account] = Counter()
        self._claims: dict[Account, float] = {}

    @property
    def pending(self) -> float:
        """Cost of the work without an account."""
        return (self._decode_pending + self._train_pending) * self._price

    def sampled(self, account: Account, tokens: int) -> None:
        """So many tokens arrived."""
        self._sampled[account] += tokens

    def trained(self, account: Account, tokens: float, seconds: float) -> None:
        """An operation ended that took so long."""
        self._trained[account] += round(tokens) if math.isfinite(tokens) else 0
        self._claims[account] = self._claims.get(account, 0.0) + _valid(seconds)

    def accounts(self) -> set[Account]:
        """The accounts that are still to be charged."""
        return {*self._sampled, *self._claims}

    def heartbeat(
        self, at: float, decode_seconds: float, train_seconds: float, *, decoding: bool, training: bool
    ) -> Interval[Account]:
        """Close the interval since the last heartbeat. Seconds count from the start of the worker's process; the first
        heartbeat's are the ones from which later ones count. ``decoding`` and ``training``: whether such work is under
        way."""
        before = self._reported or (decode_seconds, train_seconds)
        self._reported = (decode_seconds, train_seconds)
        decode, train = _valid(decode_seconds - before[0]), _valid(train_seconds - before[1])
        interval = self._advance(at, decode, train)
        if decoding or decode:
            self._decode_seen = self._at
        elif self._at - self._decode_seen > PENDING_SECONDS:
            interval.idle += self._decode_pending * self._price
            self._decode_pending = 0.0
        if training or train:
            self._train_seen = self._at
        elif self._at - self._train_seen > PENDING_SECONDS:
            interval.idle += self._train_pending * self._price
            self._train_pending = self._train_reported = 0.0
            self._claims.clear()
        return interval

    def close(self, at: float) -> Interval[Account]:
        """The connection ended: pending time is idle."""
        interval = self._advance(at, 0.0, 0.0)
        interval.idle += self.pending
        self._decode_pending = self._train_pending = self._train_reported = 0.0
        return interval

    def _advance(self, at: float, decode: float, train: float) -> Interval[Account]:
        """The interval up to ``at`` with so much busy time, and every charge that is known now."""
        seconds, busy = max(0.0, at - self._at), decode + train
        share = min(1.0, seconds / busy) if busy else 0.0
        self._at += seconds
        self._decode_pending += decode * share
        self._train_pending += train * share
        self._train_reported += train
        interval = Interval[Account](seconds, seconds * self._price, max(0.0, seconds - busy) * self._price)
        sampled = sum(self._sampled.values())
        for account, tokens in self._sampled.items():
            part = self._decode_pending * tokens / sampled
            interval.of(account).decode.add(WorkDone(part, part * self._price, tokens))
        if sampled:
            self._decode_pending = 0.0
            self._sampled.clear()
        claimed = sum(self._claims.values())
        share = min(1.0, self._train_reported / claimed) if claimed else 0.0
        scale = self._train_pending / self._train_reported if self._train_reported else 0.0
        for account, claim in self._claims.items():
            part = claim * share * scale
            interval.of(account).train.add(WorkDone(part, part * self._price))
        self._train_pending = max(0.0, self._train_pending - claimed * share * scale)
        self._train_reported = max(0.0, self._train_reported - claimed * share)
        self._claims = {a: c * (1 - share) for a, c in self._claims.items()} if share < 1 else {}
        for account, tokens in self._trained.items():
            interval.of(account).train.tokens += tokens
        self._trained.clear()
        return interval


def _valid(seconds: float) -> float:
    """Not negative and finite; 0 for what is not a number."""
    return min(LONGEST_SECONDS, seconds) if seconds > 0 else 0.0
