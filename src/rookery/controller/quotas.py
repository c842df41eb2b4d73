"""Quotas of tenants: how much of the service one of them may use at once, in a second, in a day, and in all. Budgets of
a job: what its spec may ask of the service's memory, decided before anything is stored or started.

* Each limit is a setting, ``tenant_…``, that the administrator may override for one tenant; only :class:`Quotas` reads
  either. ``weight`` is a tenant's share of engines and trainers, relative to the others' (1 without an override).
* A request beyond a limit is refused with the numbers and the time after which to try again, and is counted under the
  setting's name. Jobs are not refused for work in progress: they wait (:mod:`rookery.controller.jobs.runner`).
* A limit is reserved where it is checked, with nothing awaited in between, and released when that work has ended or
  is counted elsewhere: however many requests come in one moment, they use no more of it than they would one by one.
* A day is one of UTC. Its tokens, sampled and trained ones, are stored with the usage: a crash forgets those since the
  last flush.
* The options of a job's environment travel with every episode: they are small, and rows are stored once as a dataset.
  All groups of a step are complete before it is taken, so the tokens of ``max_staleness + 1`` steps are in memory.
"""

from __future__ import annotations

import asyncio
import json
import math
import time
from collections import Counter, defaultdict
from collections.abc import AsyncIterable, AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager, contextmanager
from functools import partial
from itertools import islice
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

from rookery.aio import Signal
from rookery.clock import Clock
from rookery.controller.service_time import CHECK_BURST, CHECK_PAUSE, LONGEST_PAUSE, KeylessTime, ServiceTime
from rookery.errors import RookeryError, TooManyRequests, Unavailable, count_of
from rookery.settings import LimitSettings
from rookery.spec import values
from rookery.spec.job import EnvironmentSpec, JobSpec
from rookery.spec.policy import ROW_ALGORITHMS
from rookery.storage.repositories import tenants
from rookery.storage.repositories.tenants import ROW_BYTES
from rookery.storage.store import Store

LIMITS = (
    "jobs", "waiting_jobs", "requests", "request_tokens", "queued_bytes", "adapters", "bytes", "tokens_per_day",
    "models", "hosts", "requests_per_second", "metadata_bytes", "uploads",
    "database_bytes",
    "service_share",
)  # fmt: skip
"""Limits of a tenant, by the name of the setting after ``tenant_``."""

REFUSED = (
    "options_bytes", "job_tokens", "start_crashes", "allowed_models",
    *(f"tenant_{name}" for name in LIMITS if name != "jobs"),
)  # fmt: skip
"""The limits whose refusals are counted. Jobs wait."""

DAY = 86400.0

BURST_SECONDS = 5.0
"""A client that was quiet may send the requests of so many seconds at once, as one that opens its page does."""

RETRY_SECONDS = {
    "requests": 2.0, "request_tokens": 2.0, "queued_bytes": 2.0, "models": 30.0, "waiting_jobs": 60.0,
    "adapters": math.inf, "bytes": math.inf, "hosts": 30.0, "metadata_bytes": math.inf, "service_share": 1.0,
    "uploads": 2.0, "database_bytes": 60.0,
}  # fmt: skip
"""When to try again: requests end within seconds, a base model is free when all work on it ends, and stored things
stay until somebody deletes them."""

STORING_RETRY_SECONDS = 2.0
"""When to try again where a limit of stored things is reached only with those that are stored now."""

METADATA_SECONDS = 60.0
"""At the limit of its rows' bytes a tenant's rows are read again after this time: some may be deleted."""

DATABASE_SECONDS = 5.0
"""The bytes that a tenant's work takes in the database are read again after this time."""

OPERATION_BYTES = 4096
"""Counted for each operation of a client in memory besides its data: the objects around it."""


OPTIONS_BYTES = 64 << 10
"""Largest options of a job's environment as JSON, without rows: options travel with every episode, and rows are stored
once, as a dataset."""

LARGE_ROWS_SHOWN = 3
"""Rows that are too large are named up to this number: the others are likely of the same kind."""

IN_MEMORY = {"algorithm", "environment", "sampling", "policies", "checkpoints"}
"""The parts of a job that :func:`tokens_in_memory` reads."""

ROWS = {"rows": "dataset", "eval_rows": "eval_dataset"}
"""Options of an environment of files that hold rows, with the option that names their stored dataset."""


class Quotas:
    def __init__(
        self,
        settings: LimitSettings,
        clock: Clock,
        store: Store,
        refused: Counter[str],
        models_in_use: Callable[[str], set[str]],
        working: Callable[[], set[str]],
    ) -> None:
        """``refused`` counts the refusals by setting; ``models_in_use(tenant)`` are the base models that the tenant's
        jobs and training runs use now; ``working()`` are the tenants whose jobs run now."""
        self.tenant_shares: dict[str, float] = {}
        """By tenant; absent is 1."""
        self.overrides: dict[str, dict[str, float]] = {}
        """By tenant: the limits that are not the service's settings, and its weight."""
        self._models_in_use = models_in_use
        self._settings = settings
        self._clock = clock
        self._store = store
        self._refused = refused
        self._in_use: dict[str, Counter[str]] = {}
        """By tenant and limit: the generations and hosts that there are, and all that is reserved."""
        self._models: dict[str, Counter[str]] = {}
        """By tenant: base models of generations that wait or run, and of training runs that are created."""
        self._released: WeakValueDictionary[str, Signal] = WeakValueDictionary()
        """By tenant, while its generations wait for room: notified when some was released."""
        self._turns: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        """By tenant: of generations that wait for room. A lock lives as long as a task holds it or waits for it."""
        self.queued: Counter[str] = Counter()
        """By tenant: bytes of operations that wait, or belong to a step that is not committed."""
        self._queued_of: Counter[str] = Counter()
        """By training run: bytes of operations that wait, or belong to a step that is not committed."""
        self._first: dict[str, str] = {}
        """By tenant beyond its limit: the training run that has room there, until the tenant is below it again."""
        self._metadata: dict[str, tuple[int, float]] = {}
        """By tenant: the bytes of its rows, and when they were read."""
        self._reading: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        """By tenant: of the read of those bytes."""
        self._database: dict[str, tuple[int, float]] = {}
        """By tenant: the bytes that its work takes in the database, and when they were read."""
        self._arriving: Counter[str] = Counter()
        """By tenant: bytes of uploads under way that are written, or are about to be."""
        self._uploaded: Counter[str] = Counter()
        """By tenant: bytes of uploads that have ended and are stored."""
        self._stored: dict[str, int] = {}
        """By tenant: the bytes that it stored when they were last read, without those of ``_uploaded`` until then."""
        share, refuse = partial(self.limit, name="service_share"), partial(self._refuse, "service_share")
        self.service_time = ServiceTime(clock, share, refuse, working)
        self.host_time = self.service_time.apart(longest_pause=LONGEST_PAUSE)
        """Of messages of environment hosts: those of a job's episodes do not wait for its tenant's requests."""
        self.keyless_time = KeylessTime(clock, self.service_time.in_use)
        self.check_time = self.service_time.apart(burst=CHECK_BURST, longest_pause=CHECK_PAUSE)
        """Of checks of jobs and datasets, with that of the processes in which they run."""
        self.job_seconds: defaultdict[str, float] = defaultdict(float)
        """By tenant: the event loop's time for its jobs and its clients' models since the start, of which its
        :class:`~rookery.tenant_loop.TenantLoop` gives tenants equal parts."""
        self._day = 0
        self._tokens: Counter[str] = Counter()
        """Tokens of the day ``_day`` by tenant."""
        self._allowance: defaultdict[str, tuple[float, float]] = defaultdict(lambda: (float("-inf"), 0.0))
        """By tenant: when its last request came, and how many it could still send then."""

    async def start(self) -> None:
        """Read the overrides, and today's tokens of an earlier process."""
        for row in await self._store.read(tenants.list_tenants):
            self.override(row.id, row.limits)
        self._day, tokens = await self._store.read(tenants.tokens_of_day)
        self._tokens = Counter(tokens)

    def forget(self, tenant: str) -> None:
        """The tenant is deleted."""
        known: tuple[dict[str, Any], ...] = (
            self._metadata, self._allowance, self.overrides, self.tenant_shares, self._stored, self._uploaded,
            self._database,
        )  # fmt: skip
        for of_tenant in known:
            of_tenant.pop(tenant, None)

    # --- limits -------------------------------------------------------------------------------------------------------

    def override(self, tenant: str, limits: Mapping[str, float]) -> None:
        """These limits of the tenant are not the service's settings."""
        self.overrides[tenant] = dict(limits)
        self.tenant_shares[tenant] = limits.get("weight", 1.0)

    def limit(self, tenant: str, name: str) -> float:
        """A limit of the tenant by its name in :data:`LIMITS`."""
        return float(self.overrides.get(tenant, {}).get(name, getattr(self._settings, f"tenant_{name}")))

    def view(self, tenant: str) -> dict[str, Any]:
        """The tenant's limits, its weight, and what counts against the limits now."""
        limits = {name: self.limit(tenant, name) for name in LIMITS}
        return {
            "limits": {**limits, "weight": self.tenant_shares.get(tenant, 1.0)},
            "overrides": self.overrides.get(tenant, {}),
            "tokens_today": self.day()[1].get(tenant, 0),
            "requests": self.in_use(tenant)["requests"],
            **self.service_seconds(tenant),
        }

    def spend_on_jobs(self, tenant: str, seconds: float) -> None:
        """The event loop has worked for a job of the tenant, or for a model of its clients."""
        self.job_seconds[tenant] += seconds

    def service_seconds(self, tenant: str) -> dict[str, Any]:
        """Processor time of the service for the tenant since the start, in all and by kind of work."""
        kinds = {
            "requests": self.service_time.seconds, "hosts": self.host_time.seconds, "checks": self.check_time.seconds,
            "jobs": self.job_seconds,
        }  # fmt: skip
        parts = {kind: seconds.get(tenant, 0.0) for kind, seconds in kinds.items()}
        return {"service_seconds": sum(parts.values()), "service_parts": parts}

    def _refuse(self, name: str, reason: str, retry_after: float | None = None) -> TooManyRequests:
        self._refused[f"tenant_{name}"] += 1
        return TooManyRequests(reason, RETRY_SECONDS[name] if retry_after is None else retry_after)

    # --- requests -----------------------------------------------------------------------------------------------------

    def count_request(self, tenant: str) -> None:
        """A request to the API has come. Raises :class:`TooManyRequests` beyond ``requests_per_second``."""
        rate, now = self.limit(tenant, "requests_per_second"), self._clock.monotonic()
        since, left = self._allowance[tenant]
        left = min(rate * BURST_SECONDS, left + (now - since) * rate)
        if left < 1:
            raise self._refuse(
                "requests_per_second", f"more than {count_of(rate, 'request')} in a second", (1 - left) / rate
            )
        self._allowance[tenant] = (now, left - 1)

    @contextmanager
    def generating(self, tenant: str, model: str, tokens: int, count: int = 1) -> Iterator[None]:
        """``count`` generations that a client asks for, of at most so many tokens, wait or run within. Raises
        :class:`TooManyRequests` beyond a limit."""
        self.check_tokens(tenant)
        self.check_model(tenant, model)
        self._check("requests", tenant, count, "generations of yours wait or run")
        self._check("request_tokens", tenant, tokens, "tokens of yours wait or run")
        with self.generating_beyond_limits(tenant, model, tokens, count):
            yield

    @contextmanager
    def generating_beyond_limits(self, tenant: str, model: str, tokens: int, count: int = 1) -> Iterator[None]:
        """As :meth:`generating`, of generations that no limit refuses; later ones are refused for them, too."""
        with self._using(tenant, model, requests=count, request_tokens=tokens):
            yield

    async def generate_in_turn(self, reserved: ExitStack, tenant: str, model: str, tokens: int, count: int) -> None:
        """As :meth:`generating`, until ``reserved`` is closed: of generations that an earlier process accepted. They
        wait until there is room, one after another."""
        async with self._turns.setdefault(tenant, asyncio.Lock()):
            released = self._released.setdefault(tenant, Signal())
            while not (self._fits("requests", tenant, count) and self._fits("request_tokens", tenant, tokens)):
                await released.next.wait()
            reserved.enter_context(self.generating_beyond_limits(tenant, model, tokens, count))

    def in_use(self, tenant: str) -> Counter[str]:
        """By limit, the generations and hosts of the tenant that there are, and all that is reserved."""
        return Counter(self._in_use.get(tenant, {}))

    def _fits(self, name: str, tenant: str, more: float, now: float = 0.0) -> bool:
        """Whether ``more``, with those in use and ``now`` others, are within a limit. One alone always is."""
        now += self.in_use(tenant)[name]
        return not now or now + more <= self.limit(tenant, name)

    def _check(self, name: str, tenant: str, more: float, what: str, now: float = 0.0) -> None:
        """Raises :class:`TooManyRequests` where ``more`` do not fit."""
        if not self._fits(name, tenant, more, now):
            now, most = now + self.in_use(tenant)[name], self.limit(tenant, name)
            raise self._refuse(name, f"{now:.0f} {what}, allowed: at most {most:.0f}")

    @contextmanager
    def _using(self, tenant: str, model: str = "", **amounts: int) -> Iterator[None]:
        """The amounts count against the limits of these names within, and the base model as one that is used."""
        counts = (self._in_use, amounts), (self._models, {model: 1} if model else {})
        for counted, more in counts:
            counted.setdefault(tenant, Counter()).update(more)
        try:
            yield
        finally:
            for counted, more in counts:
                left = counted.pop(tenant, Counter())
                left.subtract(more)
                if left := +left:  # none of them is zero
                    counted[tenant] = left
            if (released := self._released.get(tenant)) is not None:
                released.notify()

    @contextmanager
    def hosting(self, tenant: str) -> Iterator[None]:
        """An environment host of the tenant is connected within. Raises :class:`TooManyRequests`."""
        self._check("hosts", tenant, 1, "environment hosts of yours are connected")
        with self._using(tenant, hosts=1):
            yield

    def check_queued(self, tenant: str, run: str, size: int, *, data: bool, frees: bool) -> None:
        """A client sends an operation of ``size`` bytes to a training run. Raises :class:`TooManyRequests`.

        * The parts of a batch free nothing before its step, and may arrive in any order. Where those of several runs
          fill the limit, one run has room for as much again: its batch becomes whole, and frees its room.
        * An operation without ``data``, such as the step that ends a gradient, has room beyond that.
        * The refusal is lasting where the run alone exceeds the limit, and no operation before this one ``frees`` room.
        """
        most, now, own = self.limit(tenant, "queued_bytes"), self.queued[tenant], self._queued_of[run]
        if not now or now + size <= (most if data else 3 * most):
            return
        fits = not own or own + size <= most
        if data and fits and self._first.get(tenant, run) == run:
            self._first[tenant] = run
            return
        reason = (
            f"{now} bytes of operations of yours wait, or belong to a step that is not committed, allowed: at most"
            f" {most:.0f}"
        )
        if not data or fits or frees:
            raise self._refuse("queued_bytes", reason)
        reason += f"; with this one model {run} has {own + size} since its last step: give it smaller batches"
        raise self._refuse("queued_bytes", reason, math.inf)

    def count_queued(self, tenant: str, run: str, size: int) -> None:
        """The operations of a training run in memory have ``size`` bytes more."""
        self.queued[tenant] += size
        self._queued_of[run] += size
        if not self._queued_of[run]:
            del self._queued_of[run]
        first = self._first.get(tenant)
        if first not in self._queued_of or self.queued[tenant] <= self.limit(tenant, "queued_bytes"):
            self._first.pop(tenant, None)

    @contextmanager
    def queueing(self, tenant: str, now: int) -> Iterator[None]:
        """The tenant, ``now`` jobs of which are queued, queues another one within. Raises :class:`TooManyRequests`."""
        self._check("waiting_jobs", tenant, 1, "jobs of yours are queued", now)
        with self._using(tenant, waiting_jobs=1):
            yield

    def models(self, tenant: str) -> set[str]:
        """The base models that the tenant uses now."""
        return self._models_in_use(tenant) | self._models.get(tenant, Counter()).keys()

    def check_model(self, tenant: str, model: str) -> None:
        """The tenant asks for work on a base model. Raises :class:`TooManyRequests`."""
        used, most = self.models(tenant), self.limit(tenant, "models")
        if model not in used and len(used) >= most:
            raise self._refuse(
                "models",
                f"{model}: you use {count_of(len(used), 'base model')} ({', '.join(sorted(used))}), allowed: {most:g}",
            )

    @contextmanager
    def using_model(self, tenant: str, model: str) -> Iterator[None]:
        """The tenant uses a base model within. Raises :class:`TooManyRequests`."""
        self.check_model(tenant, model)
        with self._using(tenant, model):
            yield

    async def check_stored(self, tenant: str) -> None:
        """The tenant will store something. Raises :class:`TooManyRequests` at a limit."""
        await self._check_stored(tenant, int)

    @asynccontextmanager
    async def storing(self, tenant: str) -> AsyncIterator[None]:
        """The tenant stores an adapter within. Raises :class:`TooManyRequests` at a limit; so the last one stored may
        exceed it. Those that others have begun to store before count, too."""
        before = self.in_use(tenant)["adapters"]
        with self._using(tenant, adapters=1):
            await self._check_stored(tenant, lambda: min(before, self.in_use(tenant)["adapters"] - 1))
            yield

    async def _check_stored(self, tenant: str, reserved: Callable[[], int]) -> None:
        """``reserved()``: adapters that are about to be stored. Uploads under way count with the bytes that have
        arrived."""
        uploaded = self._uploaded[tenant]  # until the read: it may miss later ones
        adapters, size = await self._store.read(tenants.stored, tenant)
        self._stored[tenant] = size - uploaded
        for name, stored, soon in (("adapters", adapters, reserved()), ("bytes", size, self._arriving[tenant])):
            most = self.limit(tenant, name)
            if stored + soon >= most:
                what = "adapters" if name == "adapters" else "bytes of adapters and datasets"
                if stored < most:
                    reason = f"you store {stored} {what}, and {soon} more now, allowed: {most:.0f}"
                    raise self._refuse(name, reason, STORING_RETRY_SECONDS)
                raise self._refuse(
                    name, f"you store {stored} {what}, allowed: {most:.0f}; delete some, or ask the administrator"
                )

    @contextmanager
    def uploading(self, tenant: str) -> Iterator[Callable[[int], None]]:
        """An upload of the tenant, after :meth:`check_stored`, is under way within; it is stored at the end unless an
        exception ends it. Its function counts a piece of so many bytes that is about to be written. Both raise
        :class:`TooManyRequests`, the function where everything that the tenant stores, and its uploads under way, would
        exceed the limit."""
        self._check("uploads", tenant, 1, "uploads of yours are under way")
        size = 0

        def count(piece: int) -> None:
            nonlocal size
            most, stored = self.limit(tenant, "bytes"), self._stored.get(tenant, 0) + self._uploaded[tenant]
            soon = self._arriving[tenant]
            if stored + soon + piece > most:
                raise self._refuse(
                    "bytes",
                    f"you store {stored} bytes of adapters and datasets, {soon} more arrive, allowed: {most:.0f};"
                    " delete some, or ask the administrator",
                    None if stored + size + piece > most else STORING_RETRY_SECONDS,
                )
            size += piece
            self._arriving[tenant] += piece

        with self._using(tenant, uploads=1):
            try:
                yield count
                self._uploaded[tenant] += size
            finally:
                self._arriving[tenant] -= size

    @asynccontextmanager
    async def describing(self, tenant: str, text: Any = "") -> AsyncIterator[None]:
        """A row with ``text``, which is JSON-like, is stored within. Raises :class:`TooManyRequests` at the limit. The
        sum is kept in memory, and read again at the limit: rows may be deleted. A row that may be stored counts."""
        await self._read_metadata(tenant)
        size, most = ROW_BYTES + len(json.dumps(text)), self.limit(tenant, "metadata_bytes")
        if (now := self._described(tenant)) >= most:
            raise self._refuse(
                "metadata_bytes",
                f"your jobs, uploads, sessions, training runs, samplers and checkpoints take {now} bytes of the"
                f" database, allowed: {most:.0f}; delete jobs, uploads or checkpoints, or ask the administrator",
            )
        with self._using(tenant, metadata_bytes=size):
            try:
                yield
            except RookeryError as error:
                if not isinstance(error, Unavailable):
                    size = 0  # it was refused
                raise
            finally:  # a write whose caller is cancelled, or whose answer is lost, may succeed
                known, read = self._metadata.get(tenant, (0, -math.inf))
                self._metadata[tenant] = (known + size, read)

    def _described(self, tenant: str) -> int:
        """The bytes of the tenant's rows, with those that are stored now."""
        return self._metadata.get(tenant, (0, -math.inf))[0] + self.in_use(tenant)["metadata_bytes"]

    async def _read_metadata(self, tenant: str) -> None:
        """Read the bytes of the tenant's rows if they are not known, or may be fewer."""
        async with self._reading.setdefault(tenant, asyncio.Lock()):
            before, read = self._metadata.setdefault(tenant, (0, -math.inf))
            now, full = self._clock.monotonic(), self._described(tenant) >= self.limit(tenant, "metadata_bytes")
            if read == -math.inf or (full and now - read > METADATA_SECONDS):
                found = await self._store.read(tenants.metadata_bytes, tenant)
                self._metadata[tenant] = (found + self._metadata[tenant][0] - before, now)

    async def check_database(self, tenant: str) -> None:
        """The tenant's work is about to add rows to the database. Raises :class:`TooManyRequests` at the limit; so the
        last ones may exceed it."""
        now, most = self._clock.monotonic(), self.limit(tenant, "database_bytes")
        size, read = self._database.get(tenant, (0, -math.inf))
        if now - read >= DATABASE_SECONDS:
            size = await self._store.read(tenants.database_bytes, tenant)
            self._database[tenant] = (size, now)
        if size >= most:
            raise self._refuse(
                "database_bytes",
                f"your jobs' episodes and your clients' results take {size} bytes of the database, allowed: {most:.0f};"
                " delete jobs, wait until results expire, or ask the administrator",
            )

    # --- tokens of a day ----------------------------------------------------------------------------------------------

    def add_tokens(self, tenant: str, tokens: float) -> None:
        """Tokens were sampled or trained on for the tenant."""
        if math.isfinite(tokens):
            self.day()[1][tenant] += int(tokens)

    def day(self) -> tuple[int, Counter[str]]:
        """Today, in days since the epoch, and its tokens by tenant. A clock that is set back over midnight begins no
        new day."""
        today = int(self._clock.time() // DAY)
        if today > self._day or today < self._day - 1:
            self._day, self._tokens = today, Counter()
        return self._day, self._tokens

    def used_up(self, tenant: str) -> str:
        """Why the tenant's work waits for the next day; empty where it does not."""
        most = self.limit(tenant, "tokens_per_day")
        day, tokens = self.day()
        if not most or tokens[tenant] < most:
            return ""
        next_day = time.strftime("%Y-%m-%d", time.gmtime((day + 1) * DAY))
        tokens_used = count_of(most, "token of today is", "tokens of today are")
        return f"the tenant's {tokens_used} used up; it continues by itself on {next_day}, 00:00 UTC"

    def check_tokens(self, tenant: str) -> None:
        """Raises :class:`TooManyRequests` where today's tokens are used up."""
        if reason := self.used_up(tenant):
            seconds = DAY - self._clock.time() % DAY
            raise self._refuse("tokens_per_day", reason.partition(";")[0], seconds)


async def counted(chunks: AsyncIterable[bytes], count: Callable[[int], None]) -> AsyncIterator[bytes]:
    """The pieces of an upload, each once ``count`` has its size."""
    async for chunk in chunks:
        count(len(chunk))
        yield chunk


# --- budgets of a job -------------------------------------------------------------------------------------------------


def row_problems(spec: JobSpec, limits: LimitSettings) -> list[str]:
    """One line per inline row that is larger than an uploaded one may be, up to a few. Takes up to half a second."""
    large = (
        f"environment.{name}.{number}: {size} bytes, allowed: at most {limits.row_bytes} (the service's"
        " ROOKERY_ROW_BYTES)"
        for name in ROWS
        if isinstance(rows := spec.environment.options.get(name), list)
        for number, row in enumerate(rows)
        if (size := len(values.encode(row))) > limits.row_bytes
    )
    return list(islice(large, LARGE_ROWS_SHOWN))


def job_problems(spec: JobSpec, limits: LimitSettings, refused: Counter[str]) -> list[str]:
    """One line per limit that the job exceeds; ``refused`` counts them."""
    problems = []
    options = {name: value for name, value in spec.environment.options.items() if name not in ROWS}
    size = len(json.dumps(options))
    if size > OPTIONS_BYTES:
        refused["options_bytes"] += 1
        problems.append(
            f"environment: its options have {size} bytes without rows, allowed: at most {OPTIONS_BYTES}"
            "; give rows as a dataset"
        )
    if spec.algorithm.on_rows:
        return problems + _row_problems(spec, limits, refused)
    held = groups_in_memory(spec.model_dump(include=IN_MEMORY))
    if held.tokens > limits.job_tokens:
        refused["job_tokens"] += 1
        summed = ", summed over the policies that train" if spec.several_trained else ""
        problems.append(
            f"algorithm: {count_of(held.groups, 'group')} in memory (groups_per_step x (max_staleness + 1){summed}) x"
            f" group_size {held.group_size} x max_tokens {held.max_tokens} x turns {held.turns} ="
            f" {count_of(held.tokens, 'token')}, allowed: at most {limits.job_tokens} (the service's"
            " ROOKERY_JOB_TOKENS)"
        )
    return problems


def _row_problems(spec: JobSpec, limits: LimitSettings, refused: Counter[str]) -> list[str]:
    """As :func:`job_problems`, of the batches of a job on rows."""
    algorithm = spec.algorithm
    tokens = tokens_in_memory(spec.model_dump(include=IN_MEMORY))
    if tokens <= limits.job_tokens:
        return []
    refused["job_tokens"] += 1
    return [
        f"algorithm: the batches since a commit (checkpoints.commit_every {spec.checkpoints.commit_every}) and the next"
        f" one, of batch_size {algorithm.batch_size} rows of max_length {algorithm.max_length}, are up to {tokens}"
        f" tokens, allowed: at most {limits.job_tokens} (the service's ROOKERY_JOB_TOKENS)"
    ]


def tokens_in_memory(spec: Mapping[str, Any]) -> int:
    """Tokens that the groups, or the batches, of a stored job may hold at once."""
    if spec["algorithm"]["name"] in ROW_ALGORITHMS:
        replies = 2 if spec["algorithm"]["name"] == "dpo" else 1
        batches = spec["checkpoints"]["commit_every"] + 1  # those kept for a replay, and the next
        return int(batches * replies * spec["algorithm"]["batch_size"] * spec["algorithm"]["max_length"])
    return groups_in_memory(spec).tokens


class GroupsInMemory(NamedTuple):
    """The most groups that a job holds at once, and the bounds of what is in one."""

    groups: int
    """Of all policies that train: each waits for its groups, which may be others than those of its partners."""
    group_size: int
    max_tokens: int
    """Of the policy with the longest replies."""
    turns: int

    @property
    def tokens(self) -> int:
        return math.prod(self)


def groups_in_memory(spec: Mapping[str, Any]) -> GroupsInMemory:
    """The groups of a stored job that samples."""
    policies = [*spec.get("policies", {}).values()]

    def value(section: str, field: str, policy: Mapping[str, Any]) -> int:
        """A field of the job, as this policy has it."""
        own = (policy.get(section) or {}).get(field)
        return int(spec[section][field] if own is None else own)

    trained = [policy for policy in policies if policy.get("train", True)]
    return GroupsInMemory(
        groups=sum(
            value("algorithm", "groups_per_step", policy) * (value("algorithm", "max_staleness", policy) + 1)
            for policy in trained or [{}]
        ),
        group_size=int(spec["algorithm"]["group_size"]),
        max_tokens=max(value("sampling", "max_tokens", policy) for policy in policies or [{}]),
        turns=EnvironmentSpec.model_construct(**spec["environment"]).turns,
    )


def groups_at_once(spec: JobSpec, limits: LimitSettings) -> int:
    """Groups of the job that may run at once; at least one."""
    return max(1, limits.job_episodes // spec.algorithm.group_size)


def as_jsonl(rows: Sequence[Any]) -> bytes:
    """Rows as the content of a JSONL file."""
    return b"".join(values.encode(row) + b"\n" for row in rows)
