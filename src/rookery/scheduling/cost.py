"""What work costs: a worker's paid time, shared out to those it worked for.

Whole numbers only: time in nanoseconds, money in billionths of the price unit. So nothing is rounded away on the way:

    what its users pay + what is idle + what waits to be attributed = price × time     (:class:`Meter`, at any moment)

**Time and money.** A worker is paid for from its hello to the end of that connection. At time t of it the money is
⌊price · t⌋, and an interval costs the difference between its two ends: the sum over intervals is the whole, wherever
they are cut.

**An interval** lies between two beats. A beat reports how many seconds its worker has decoded and trained so far. What
came since the last beat is the interval's busy time (scaled down to the interval where a late beat makes it longer),
the rest is idle. The interval's money goes to the three in proportion. What a connection does after its last beat is
idle, for nobody tells how busy it was.

**Decoding** is paid by those whose tokens arrived, in proportion to the tokens. **Training** is paid by those whose
operations ended: each claims the seconds that its worker says it took, and gets no more than there is. Busy time that
nobody can be named for yet (a long prompt before its first token, an operation under way) waits; what still waits when
none of that work has been under way for :data:`LINGER` is idle: its result never came.

**Idle** is nobody's: it is the fleet's, and shown.

**On reserved capacity alone** (:func:`reserved_alone`) a job would have cost what it paid for reserved workers, and for
each second on a preemptible worker

    speed of preemptible workers / speed of reserved ones × price of reserved ones

where speed is tokens per second of that work (decoding, training), over everybody's work on that base model, and the
price is the mean over the reserved workers' busy time. Where either kind has not done that work yet, they count as
equally fast; where no reserved worker has been busy, the figure is not known. Idle time is in neither figure.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Generic, Literal, TypeVar

import msgspec

SECOND = 10**9
"""Nanoseconds."""
UNIT = 10**9
"""Billionths of the price unit."""
HOUR = 3600 * SECOND

LINGER = 30 * SECOND
"""How long an answer may follow the last sign of the work that it answers: a commit's comes after its upload."""

LONGEST = 10 * 365 * 24 * HOUR
"""No time that a worker tells of is longer: one that sends nonsense must not break the account."""

Kind = Literal["reserved", "preemptible"]
Account = TypeVar("Account")


class WorkDone(msgspec.Struct, omit_defaults=True):
    """Some work of one sort: how long it took, what it cost, what came of it."""

    time: int = 0
    """Nanoseconds of computing."""
    money: int = 0
    """Billionths of the price unit."""
    tokens: int = 0
    """Sampled, or trained on."""

    def add(self, other: WorkDone) -> None:
        self.time += other.time
        self.money += other.money
        self.tokens += other.tokens


class ResourceUsage(msgspec.Struct, omit_defaults=True):
    """What somebody used of one kind of worker."""

    decode: WorkDone = msgspec.field(default_factory=WorkDone)
    train: WorkDone = msgspec.field(default_factory=WorkDone)

    @property
    def money(self) -> int:
        return self.decode.money + self.train.money

    @property
    def time(self) -> int:
        return self.decode.time + self.train.time

    def add(self, other: ResourceUsage) -> None:
        self.decode.add(other.decode)
        self.train.add(other.train)


Bill = dict[Kind, ResourceUsage]
"""By kind of worker; a kind that was not used is not there."""


def nanoseconds(seconds: float) -> int:
    """Whole, not negative, at most :data:`LONGEST`; nothing for what is not a number."""
    return min(LONGEST, round(min(seconds, LONGEST) * SECOND)) if seconds > 0 else 0


def split(total: int, weights: Iterable[int]) -> list[int]:
    """Whole parts of ``total`` in proportion to ``weights`` (not negative, some positive), together exactly ``total``:
    each part ends where the proportion, rounded down, puts its end."""
    parts = list(weights)
    whole, before, done = sum(parts), 0, 0
    shares = []
    for part in parts:
        before += part
        end = total * before // whole
        shares.append(end - done)
        done = end
    return shares


class SettledUsage(Generic[Account]):
    """What became of an interval's money: some is somebody's, some is idle. What waits stays with the meter."""

    def __init__(self) -> None:
        self.used: dict[Account, ResourceUsage] = {}
        self.time = 0
        """Nanoseconds that were paid for."""
        self.money = 0
        """What they cost."""
        self.idle = 0
        """Of money, this interval's or an earlier one's: nobody's."""

    def of(self, payer: Account) -> ResourceUsage:
        return self.used.setdefault(payer, ResourceUsage())


class _Pool:
    """Busy time that waits for whoever it was spent on."""

    def __init__(self) -> None:
        self.time = 0
        self.money = 0
        self.seen = 0
        """When there was last a sign of such work."""

    def put(self, time: int, money: int) -> None:
        self.time += time
        self.money += money

    def take(self, time: int) -> WorkDone:
        """So much of the time, and its part of the money."""
        money = self.money * time // self.time if self.time else 0
        self.time -= time
        self.money -= money
        return WorkDone(time, money)

    def over(self) -> int:
        """Empty it; the money that was in it."""
        return self.take(self.time).money


class Meter(Generic[Account]):
    """One connection of one worker. Times are seconds of one monotonic clock; ``price`` is per hour, not negative."""

    def __init__(self, price: float, at: float) -> None:
        self._price = round(price * UNIT)
        self._began = at
        self._now = 0
        self._paid = 0
        self._busy: tuple[float, float] | None = None
        """What the last beat said."""
        self._decode, self._train = _Pool(), _Pool()
        self._sampled: Counter[Account] = Counter()
        self._claims: dict[Account, int] = {}
        self._trained: Counter[Account] = Counter()

    @property
    def waiting(self) -> int:
        """Money that nobody can be named for yet."""
        return self._decode.money + self._train.money

    def sampled(self, payer: Account, tokens: int) -> None:
        """So many tokens came."""
        self._sampled[payer] += tokens

    def trained(self, payer: Account, tokens: float, seconds: float) -> None:
        """An operation ended that took so long."""
        self._trained[payer] += round(tokens) if math.isfinite(tokens) else 0
        self._claims[payer] = self._claims.get(payer, 0) + nanoseconds(seconds)

    def owes(self) -> set[Account]:
        """Who is still to be charged for something."""
        return {*self._sampled, *self._claims}

    def beat(
        self, at: float, decode_seconds: float, train_seconds: float, *, decoding: bool, training: bool
    ) -> SettledUsage[Account]:
        """Close the interval since the last beat. Seconds are those since the worker's process began, so the first
        beat's are what later ones are counted from; ``decoding`` and ``training`` say whether any of it is under
        way."""
        before = self._busy or (decode_seconds, train_seconds)
        self._busy = (decode_seconds, train_seconds)
        settled: SettledUsage[Account] = SettledUsage()
        busy = [nanoseconds(now - then) for now, then in zip(self._busy, before, strict=True)]
        self._pass(settled, at, *busy)
        self._charge(settled)
        self._give_up(self._decode, settled, bool(decoding or busy[0]))
        if self._give_up(self._train, settled, bool(training or busy[1])):
            self._claims.clear()
        return settled

    def close(self, at: float) -> SettledUsage[Account]:
        """The connection is over: what is left is settled."""
        settled: SettledUsage[Account] = SettledUsage()
        self._pass(settled, at, 0, 0)
        self._charge(settled)
        settled.idle += self._decode.over() + self._train.over()
        return settled

    def _pass(self, settled: SettledUsage[Account], at: float, decode: int, train: int) -> None:
        """Time goes on to ``at``, so much of it busy."""
        now = max(self._now, round((at - self._began) * SECOND))
        paid = self._price * now // HOUR
        time, money = now - self._now, paid - self._paid
        self._now, self._paid = now, paid
        settled.time, settled.money = time, money
        if decode + train > time:
            decode, train = split(time, (decode, train))
        idle = time - decode - train
        parts = split(money, (decode, train, idle)) if time else [0, 0, money]
        self._decode.put(decode, parts[0])
        self._train.put(train, parts[1])
        settled.idle += parts[2]

    def _charge(self, settled: SettledUsage[Account]) -> None:
        """Whoever can be named pays."""
        if self._sampled:
            counts = list(self._sampled.values())
            times, moneys = split(self._decode.time, counts), split(self._decode.money, counts)
            for payer, tokens, time, money in zip(self._sampled, counts, times, moneys, strict=True):
                settled.of(payer).decode.add(WorkDone(time, money, tokens))
            self._decode.over()
            self._sampled.clear()
        claimed = sum(self._claims.values())
        if claimed:
            there = min(claimed, self._train.time)
            for payer, time in zip(list(self._claims), split(there, self._claims.values()), strict=True):
                settled.of(payer).train.add(self._train.take(time))
                self._claims[payer] -= time
        for payer, tokens in self._trained.items():
            settled.of(payer).train.tokens += tokens
        self._trained.clear()
        self._claims = {payer: time for payer, time in self._claims.items() if time}

    def _give_up(self, pool: _Pool, settled: SettledUsage[Account], under_way: bool) -> bool:
        """Whether nothing has been heard of such work for so long that nothing will be."""
        if under_way:
            pool.seen = self._now
        over = self._now - pool.seen > LINGER
        if over:
            settled.idle += pool.over()
        return over


def reserved_alone(bill: Mapping[Kind, ResourceUsage], everybody: Mapping[Kind, ResourceUsage]) -> int | None:
    """What the work on ``bill`` would have cost on reserved workers alone; ``everybody``: all that was done on its base
    model. See the module's text."""
    reserved = everybody.get("reserved", ResourceUsage())
    if not reserved.time:
        return None
    preemptible, mine = everybody.get("preemptible", ResourceUsage()), bill.get("preemptible", ResourceUsage())
    total = bill["reserved"].money if "reserved" in bill else 0
    for there, here, work in (
        (preemptible.decode, reserved.decode, mine.decode),
        (preemptible.train, reserved.train, mine.train),
    ):
        speeds = there.tokens * here.time, there.time * here.tokens  # as a fraction, of preemptible and reserved ones
        faster, slower = speeds if all(speeds) else (1, 1)
        total += work.time * faster * reserved.money // (slower * reserved.time)
    return total
