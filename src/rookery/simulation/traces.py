"""How many preemptible instances there are to be had, over time: traces in CSV files.

The format: a header line ``time,instances``, then one line per change: seconds from the start, and how many instances
are available from then on. Times ascend from 0; the last line's count holds to the trace's end, which its time is.
Lines that begin with ``#`` are comments.

The packaged traces are synthetic: none was recorded on a real market. Each file says how it was drawn.
"""

from __future__ import annotations

import asyncio
import csv
import io
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Literal

from rookery.aio import BackgroundTasks
from rookery.errors import UserError
from rookery.simulation.fakes.worker import FakeWorker
from rookery.simulation.profiles import read_input

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

    def faster(self, factor: float) -> Trace:
        """This trace, in so many times less time."""
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


def parse(text: str, name: str) -> Trace:
    """The trace in a CSV file's ``text``. Raises :class:`UserError`, which names the line."""
    reader = csv.reader(io.StringIO(text))
    rows: list[tuple[float, int]] = []
    header = False
    for cells in reader:
        where = f"trace {name}, line {reader.line_num}"
        if not cells or cells[0].startswith("#"):
            continue
        if header:
            rows.append(_row(cells, where, rows[-1][0] if rows else None))
        elif [cell.strip() for cell in cells] != HEADER:
            raise UserError(f"{where}: given {','.join(cells)!r}, allowed: the header {','.join(HEADER)}")
        header = True
    if len(rows) < 2:
        raise UserError(f"trace {name}: needs two lines at least below its header: the start, and its end")
    return Trace(name, tuple(_only_changes(rows[:-1])), rows[-1][0])


def _row(cells: list[str], where: str, before: float | None) -> tuple[float, int]:
    try:
        first, second = cells
        time, count = float(first), int(second)
    except ValueError:
        raise UserError(f"{where}: given {','.join(cells)!r}, allowed: seconds and a whole number") from None
    if not math.isfinite(time) or (time != 0 if before is None else time <= before):
        wanted = "0 on the first line" if before is None else f"more than {before:g}, the line before's"
        raise UserError(f"{where}: time: given {first}, allowed: {wanted}")
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
    return parse(read_input("trace", name, "csv"), Path(name).stem)


LOOK_SECONDS = 30.0
"""How often it is looked at how many instances are worth renting."""


@dataclass(eq=False)
class SpotInstance:
    worker: FakeWorker
    began: float
    state: Literal["rented", "preempted", "returned"] = "rented"
    """Whether it is rented still, or the market took it, or it was worth no more."""
    ended: float | None = None
    """When its worker ended; it is paid for until then."""

    def seconds(self, now: float) -> float:
        """The seconds of renting, until ``now`` at most."""
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
        self._endings = BackgroundTasks()

    @property
    def rented(self) -> list[SpotInstance]:
        """Instances without a notice."""
        return [instance for instance in self.instances if instance.state == "rented"]

    @property
    def preemptions(self) -> int:
        return sum(instance.state == "preempted" for instance in self.instances)

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
            self._end(taken, "preempted", drain=self._notice > 0)
        worth = self._worth()
        wanted = available if worth is None else min(available, worth)
        for _ in range(len(rented) - wanted):
            self._end(rented.pop(), "returned", drain=True)
        for _ in range(wanted - len(rented)):
            instance = SpotInstance(self._make(f"spot-{len(self.instances)}"), asyncio.get_running_loop().time())
            self.instances.append(instance)
            instance.worker.start()
        entry = (asyncio.get_running_loop().time(), available, wanted)
        if not self.history or self.history[-1][1:] != entry[1:]:
            self.history.append(entry)

    def _end(self, instance: SpotInstance, state: Literal["preempted", "returned"], *, drain: bool) -> None:
        instance.state = state
        self._endings.start(self._leave(instance, drain))

    async def _leave(self, instance: SpotInstance, drain: bool) -> None:
        if drain:
            leaving = asyncio.create_task(instance.worker.drain())
            await asyncio.wait({leaving}, timeout=self._notice or None)
        await instance.worker.kill()
        instance.ended = asyncio.get_running_loop().time()

    async def close(self) -> None:
        """Every instance ends. Raises what went wrong in one."""
        for instance in self.rented:
            self._end(instance, "returned", drain=False)
        await self._endings.wait()
