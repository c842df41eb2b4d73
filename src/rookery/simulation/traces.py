"""How many preemptible instances there are to be had, over time: traces, read from CSV or drawn from a seed.

The format: a header line ``time,instances``, then one line per change: seconds from the start, and how many instances
are available from then on. Times ascend from 0; the last line's count holds to the trace's end, which its time is.
Lines that begin with ``#`` are comments.

The packaged traces are synthetic. :data:`SHIPPED` says how each was drawn; none was recorded on a real market.
"""

from __future__ import annotations

import asyncio
import csv
import io
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from importlib import resources
from itertools import pairwise
from pathlib import Path
from random import Random

from rookery.errors import UserError
from rookery.simulation.fakes.worker import FakeWorker

HEADER = ["time", "instances"]

MOST_INSTANCES = 100_000
"""More is taken for a mistake in the file."""

HOUR = 3600.0


@dataclass(frozen=True)
class Trace:
    """``changes`` are (seconds, instances), ascending from second 0; ``seconds`` is its length."""

    name: str
    changes: tuple[tuple[float, int], ...]
    seconds: float

    def at(self, time: float) -> int:
        """Instances available at ``time``."""
        return next((count for since, count in reversed(self.changes) if since <= time), 0)

    def faster(self, factor: float) -> Trace:
        """The same, in so many times less time."""
        changes = tuple((since / factor, count) for since, count in self.changes)
        return Trace(self.name, changes, self.seconds / factor)

    def cut(self, seconds: float) -> Trace:
        """Its first ``seconds``; a trace that is shorter begins again at its end."""
        changes: list[tuple[float, int]] = []
        for round_ in range(math.ceil(seconds / self.seconds)):
            begin = round_ * self.seconds
            changes += [(begin + since, count) for since, count in self.changes if begin + since < seconds]
        return Trace(self.name, tuple(_only_changes(changes)), seconds)

    def mean(self) -> float:
        """Instances available on average."""
        ends = [since for since, _ in self.changes[1:]] + [self.seconds]
        spans = zip(self.changes, ends, strict=True)
        return sum(count * (end - since) for (since, count), end in spans) / self.seconds

    def csv(self) -> str:
        """As a file has it."""
        lines = [",".join(HEADER), *(f"{since:.12g},{count}" for since, count in self.changes)]
        return "\n".join([*lines, f"{self.seconds:.12g},{self.changes[-1][1]}"]) + "\n"


def parse(text: str, name: str) -> Trace:
    """The trace in a CSV file's ``text``. Raises :class:`UserError`, which names the line."""
    reader = csv.reader(io.StringIO(text))
    rows: list[tuple[float, int]] = []
    header = True
    for cells in reader:
        where = f"trace {name}, line {reader.line_num}"
        if not cells or cells[0].startswith("#"):
            continue
        if header:
            if [cell.strip() for cell in cells] != HEADER:
                raise UserError(f"{where}: given {','.join(cells)!r}, allowed: the header {','.join(HEADER)}")
            header = False
            continue
        rows.append(_row(cells, where, rows[-1][0] if rows else None))
    if len(rows) < 2:
        raise UserError(f"trace {name}: needs two lines at least below its header: the start, and its end")
    return Trace(name, tuple(_only_changes(rows[:-1])), rows[-1][0])


def _row(cells: list[str], where: str, before: float | None) -> tuple[float, int]:
    if len(cells) != 2:
        raise UserError(f"{where}: given {len(cells)} values, allowed: two, a time and a number of instances")
    try:
        time, count = float(cells[0]), int(cells[1])
    except ValueError:
        raise UserError(f"{where}: given {','.join(cells)!r}, allowed: seconds and a whole number") from None
    if not math.isfinite(time) or (time != 0 if before is None else time <= before):
        wanted = "0 on the first line" if before is None else f"more than {before:g}, the line before's"
        raise UserError(f"{where}: time: given {cells[0]}, allowed: {wanted}")
    if not 0 <= count <= MOST_INSTANCES:
        raise UserError(f"{where}: instances: given {count}, allowed: 0 to {MOST_INSTANCES}")
    return time, count


def _only_changes(rows: Iterable[tuple[float, int]]) -> Iterator[tuple[float, int]]:
    before = None
    for time, count in rows:
        if count != before:
            yield time, count
        before = count


def load_trace(name: str) -> Trace:
    """A packaged trace by its name, or one from a CSV file by its path. Raises :class:`UserError`."""
    if name in SHIPPED:
        file = resources.files("rookery.simulation").joinpath(f"traces/{name}.csv")
        return parse(file.read_text(encoding="utf-8"), name)
    try:
        return parse(Path(name).read_text(encoding="utf-8"), Path(name).stem)
    except (OSError, UnicodeDecodeError):
        known = ", ".join(SHIPPED)
        raise UserError(f"trace: given {name!r}, allowed: one of {known}, or the path of a CSV file") from None


# --- drawn ------------------------------------------------------------------------------------------------------------


def calm(random: Random) -> Trace:
    """Four hours about six instances: a change of one every 8 minutes on average, back towards six with twice the
    probability, between 3 and 8."""
    count, usual, low, high = 6, 6, 3, 8
    changes, time = [(0.0, count)], 0.0
    while (time := time + random.expovariate(1 / (8 * 60))) < 4 * HOUR:
        up = random.random() < (0.5 if count == usual else 2 / 3 if count < usual else 1 / 3)
        count = min(high, max(low, count + (1 if up else -1)))
        changes.append((round(time), count))
    return Trace("calm", tuple(_only_changes(changes)), 4 * HOUR)


def bursty(random: Random) -> Trace:
    """Four hours of at most eight instances: every 25 minutes on average somebody else takes half of them or more
    within a minute; they come back one by one, each after about two minutes."""
    most = count = 8
    changes, time, taken = [(0.0, count)], 0.0, random.expovariate(1 / (25 * 60))
    while time < 4 * HOUR:
        back = time + random.expovariate(1 / 120) if count < most else math.inf
        if back < taken:
            time, count = back, count + 1
            changes.append((round(time), count))
            continue
        gone = math.ceil(count * random.uniform(0.5, 1.0))
        for second in sorted(random.uniform(0, 60) for _ in range(gone)):
            count -= 1
            changes.append((round(taken + second), count))
        time = taken + 60
        taken = time + random.expovariate(1 / (25 * 60))
    kept: dict[float, int] = {since: number for since, number in changes if since < 4 * HOUR}
    return Trace("bursty", tuple(_only_changes(sorted(kept.items()))), 4 * HOUR)


def diurnal(random: Random) -> Trace:
    """A day: eight instances at night, none or one when everybody else is at work, as a cosine with noise of one
    instance that lasts for about half an hour."""
    changes = []
    noise = 0.0
    for minute in range(0, 24 * 60, 10):
        noise = 0.7 * noise + random.gauss(0, 0.7)
        level = 4 + 4 * math.cos(2 * math.pi * (minute / 60 - 2) / 24)  # most at two in the morning
        changes.append((60.0 * minute, min(8, max(0, round(level + noise)))))
    return Trace("diurnal", tuple(_only_changes(changes)), 24 * HOUR)


SHIPPED: dict[str, tuple[Callable[[Random], Trace], int]] = {
    "calm": (calm, 1),
    "bursty": (bursty, 1),
    "diurnal": (diurnal, 1),
}
"""The packaged traces: what draws each, and its seed."""


def generate_shipped(name: str) -> Trace:
    """The packaged trace, generated again."""
    make, seed = SHIPPED[name]
    return make(Random(f"{name} {seed}"))


LOOK_SECONDS = 30.0
"""How often it is looked at how many instances are worth renting."""


@dataclass(eq=False)
class SpotInstance:
    worker: FakeWorker
    began: float
    leaving: bool = False
    ended: float | None = None
    preempted: bool = False

    def seconds(self, now: float) -> float:
        """Of renting, until ``now`` at most."""
        return (now if self.ended is None else self.ended) - self.began


class SpotMarket:
    def __init__(
        self,
        trace: Trace,
        make: Callable[[str], FakeWorker],
        random: Random,
        *,
        notice: float = 0.0,
        worth: Callable[[], int | None] = lambda: None,
    ) -> None:
        """``make`` makes the worker of a new instance from its name. ``notice`` is how many seconds before its end an
        instance hears of it; 0 is not at all. ``worth`` tells how many are worth renting now; None is all."""
        self.instances: list[SpotInstance] = []
        """All that there ever were, in the order in which they began."""
        self.history: list[tuple[float, int, int]] = []
        """(second, available, rented) at each change."""
        self._trace = trace
        self._make = make
        self._random = random
        self._notice = notice
        self._worth = worth
        self._endings: dict[asyncio.Task[None], None] = {}

    @property
    def rented(self) -> list[SpotInstance]:
        """Instances without a notice."""
        return [instance for instance in self.instances if not instance.leaving]

    @property
    def preemptions(self) -> int:
        return sum(instance.preempted for instance in self.instances)

    async def run(self) -> None:
        """Follow the trace to its end."""
        now = asyncio.get_running_loop().time
        changes = [*self._trace.changes, (self._trace.seconds, 0)]
        for (since, available), (until, _) in pairwise(changes):
            await asyncio.sleep(max(0.0, since - now()))
            while True:
                self._follow(available)
                if now() >= until:
                    break
                await asyncio.sleep(min(LOOK_SECONDS, until - now()))

    def _follow(self, available: int) -> None:
        rented = self.rented
        for _ in range(len(rented) - available):
            taken = rented.pop(self._random.randrange(len(rented)))
            taken.preempted = True
            self._end(taken, drain=self._notice > 0)
        worth = self._worth()
        wanted = available if worth is None else min(available, worth)
        for _ in range(len(rented) - wanted):
            self._end(rented.pop(), drain=True)
        for _ in range(wanted - len(rented)):
            instance = SpotInstance(self._make(f"spot-{len(self.instances)}"), asyncio.get_running_loop().time())
            self.instances.append(instance)
            instance.worker.start()
        entry = (asyncio.get_running_loop().time(), available, wanted)
        if not self.history or self.history[-1][1:] != entry[1:]:
            self.history.append(entry)

    def _end(self, instance: SpotInstance, *, drain: bool) -> None:
        instance.leaving = True
        task = asyncio.create_task(self._leave(instance, drain))
        self._endings[task] = None
        task.add_done_callback(lambda done: self._endings.pop(done, None))

    async def _leave(self, instance: SpotInstance, drain: bool) -> None:
        if drain:
            leaving = asyncio.create_task(instance.worker.drain())
            await asyncio.wait({leaving}, timeout=self._notice or None)
        await instance.worker.kill()
        instance.ended = asyncio.get_running_loop().time()

    async def close(self) -> None:
        """Every instance ends. Raises what went wrong in one."""
        for instance in self.rented:
            self._end(instance, drain=False)
        await asyncio.gather(*self._endings)
