"""A worker's planner: its knowledge of slices and of the work of tenants, for :mod:`rookery.scheduling.pipelines`.

The work of all jobs of a tenant counts as one job's here. Durations are seconds alone on all cores: those of a slice
beside another are divided by its measured slowdown. A tenant's stage has ended when nothing of it is left in the
engine, or the trainer. Its stage *environment* is the time from then until the other of the two has work of it: its
environments and graders run, or the service commits a version and sends the next prompts.
"""

from __future__ import annotations

import math
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from copy import deepcopy
from statistics import fmean, median
from typing import Literal

import torch
from cachetools import LRUCache

from rookery.scheduling.costs import CostTable, Kind
from rookery.scheduling.pipelines import (
    BUCKETS,
    ENGINE,
    MOST_STAGES,
    NO_WORK,
    TRAINER,
    TURNS,
    JobStages,
    LaneChoice,
    LaneCosts,
    SlowdownTable,
    Stage,
    StageKind,
    StagePredictor,
    choose,
    overlaps,
)
from rookery.worker import device, teams
from rookery.worker.engine.runner import Runner
from rookery.worker.engine.sequences import SequenceChunk
from rookery.worker.trainer.packed_pass import Backbone
from rookery.worker.trainer.packing import LossTokens, PackedGroup, pack_groups

PLAN_SECONDS = 0.5
"""A plan is made again after so long, or when other tenants have work: stages last longer, and a plan takes about a
millisecond."""

PLANS_APART = 100
"""Times as long as the last plan took, until the next one: with many tenants a plan takes longer, and it must not take
more than a hundredth of the time."""

MOST_APART = 10.0
"""Seconds: another program may have had the processor during the last plan."""

MOST_AWAY = 64
"""Tenants without work whose return is predicted, those that left last."""

RETRY_SECONDS = 60.0
"""After so long in turns, what was measured at the start counts again: in turns nothing else corrects the table."""

TAIL_ROWS = BUCKETS[0]
"""So few rows that decode are a tail."""

LEFT = 0.1
"""Of a stage that takes longer than the last one did, so much is assumed to be left."""

MEASURE_TOKENS, FEWEST_TOKENS = 256, 32
"""Of the training pass that the start measures: half of a short real one, and fewer on a slow processor, so that all is
measured in time. With less, its products are no longer like those of real ones."""

MEASURE_SECONDS = 4.0
"""The start measures no further work on another split of the cores after so long."""

PASSES = 2
"""Training passes beside each kind of the engine's work."""


def splits(threads: int, device_name: str = "cpu") -> list[int]:
    """Threads of the engine's lane that are worth a comparison, turns first. A GPU is not divided by the threads that
    start its kernels: there is one way to run beside."""
    if device_name.startswith("cuda"):
        return [TURNS, lane_threads(threads)]
    quarters = {round(threads * part / 4) for part in (1, 2, 3)}
    return [TURNS, *sorted((one for one in quarters if 0 < one < threads), key=lambda one: abs(one - threads / 2))]


def lane_threads(threads: int) -> int:
    """The threads of the engine's lane, which has half of the worker's."""
    return max(1, threads // 2)


def trainer_threads(threads: int, lane: int, *, computes: bool) -> int:
    """The threads of the trainer next to a lane with so many of the worker's threads that ``computes`` or waits: a lane
    of one thread that waits has no team, so that all others are the trainer's."""
    return threads if lane == 1 and not computes else max(1, threads - lane)


def parts_of(device_name: str, threads: int, lane: int, *, computes: bool) -> tuple[float, float]:
    """The parts of the device that the engine's lane and the trainer beside it compute with. A GPU is not divided by
    threads: each of two streams counts as half of it."""
    if device_name.startswith("cuda"):
        return 0.5, 1 - computes / 2
    return lane / threads, trainer_threads(threads, lane, computes=computes) / threads


Part = Literal["engine", "trainer"]


def _environment_after(part: Part, tenant: str) -> str:
    """The predictor's name of the time between this part's work for a tenant and the other's."""
    return f"{tenant} environment after {part}"


class LanePlan:
    """Its methods need the lock of the two threads, but :meth:`choose`, which takes longer."""

    def __init__(
        self,
        modes: Sequence[int],
        table: SlowdownTable,
        costs: CostTable,
        depth: int,
        clock: Callable[[], float] = time.monotonic,
        predictor: StagePredictor | None = None,
    ) -> None:
        """``modes``: :func:`splits`. ``table`` and ``costs``: as measured at the start, the latter of the engine's
        slices alone on all cores."""
        self._modes = modes
        self._first = table
        self._costs = deepcopy(costs)
        """Of slices alone on all cores. The gate's own follow slices as they are, also those with fewer cores."""
        self._depth = depth
        self._clock = clock
        self.table = deepcopy(table)
        self._token_seconds = 0.0
        """Seconds of a trained token, alone."""
        self._engine_seconds: Counter[StageKind] = Counter()
        """Seconds, by kind, of the engine's slices that ended during the trainer's present slice."""
        self._engine_kind: StageKind = "decode"
        """The kind of most of these seconds in the last slice of the trainer with any."""
        self._spent: defaultdict[str, dict[StageKind, float]] = defaultdict(dict)
        """The seconds of the present stages, by tenant."""
        self._present: dict[Part, set[str]] = {"engine": set(), "trainer": set()}
        self._away: LRUCache[str, tuple[Part, float]] = LRUCache(MOST_AWAY)
        """Tenants with work in neither: the part that they left, and when."""
        self._rows: LRUCache[str, int] = LRUCache(MOST_STAGES)
        """The rows of each tenant when it last had work in the engine."""
        self._predictor = predictor or StagePredictor()
        self._planned_at = -math.inf
        self._planned_for: object = None
        self._took = 0.0
        """Seconds of the last plan."""
        self._turns_since = clock()
        self.choice = LaneChoice(TURNS, 0.0, NO_WORK)

    # --- slices -------------------------------------------------------------------------------------------------------

    def on_engine(
        self, kind: Kind, size: int, seconds: float, threads: int | None, tokens: Mapping[str, float]
    ) -> None:
        """A slice of the engine, of ``size`` tokens, with so many of each tenant's; ``threads`` of its lane, 0 without
        one, None with fewer cores than the worker has."""
        total = sum(tokens.values())
        if threads == TURNS and size:
            self._costs.record(kind, size, seconds)
        expected = self._costs.predict(kind, size)
        stage: StageKind = "prefill" if kind == "prefill" else "decode"
        self._engine_seconds[stage] += seconds  # type: ignore[assignment]
        if threads and total and expected:
            self.table.record(threads, stage, int(total), engine=seconds / expected)
        for tenant, part in tokens.items():
            if not part:
                continue
            if kind == "prefill":
                self._spend(tenant, "prefill", (expected or seconds) * part / total)
            else:  # others' rows in the batch are not its work
                own = self._costs.predict("decode", int(part)) or seconds
                self._spend(tenant, "tail" if total <= TAIL_ROWS else "decode", own)

    def on_trainer(
        self, seconds: float, tokens: Mapping[str, float], trained: float, threads: int | None, rows: int
    ) -> None:
        """A slice of the trainer: ``trained`` tokens, 0 for an optimizer step; beside a lane of so many ``threads``, 0
        without one, None for a part of the time, or with fewer cores. ``rows`` were in the engine beside it."""
        kind: StageKind = "train" if trained else "optimizer"
        beside = max(self._engine_seconds, key=self._engine_seconds.__getitem__, default=self._engine_kind)
        self._engine_seconds, self._engine_kind = Counter(), beside
        alone = seconds
        if trained and threads == TURNS:
            each = seconds / trained
            self._token_seconds += (each - self._token_seconds) * (0.2 if self._token_seconds else 1.0)
        elif trained and self._token_seconds:
            alone = self._token_seconds * trained
            if threads is not None and rows:
                self.table.record(threads, beside, rows, trainer=seconds / alone)
        elif threads and rows:
            alone = seconds / self.table.slowdown(threads, beside, rows)[1]
        total = sum(tokens.values())
        for tenant, part in tokens.items():
            if part:
                self._spend(tenant, kind, alone * part / total)

    def end_stages(self, part: Part, present: Collection[str]) -> None:
        """After each slice of the engine, or the trainer: these tenants have work there; stages of others have
        ended."""
        kinds, now = ENGINE if part == "engine" else TRAINER, set(present)
        for tenant in self._present[part] - now:
            spent = self._spent[tenant]
            for kind in sorted(kinds & spent.keys()):
                self._predictor.record(f"{tenant} {kind}", spent.pop(kind))
            if not spent:
                del self._spent[tenant]
        left, self._present[part] = self._present[part] - now, now
        for tenant in left.difference(*self._present.values()):
            self._away[tenant] = part, self._clock()
        for tenant in [one for one in now if one in self._away]:
            before, since = self._away.pop(tenant)
            if before != part:
                self._predictor.record(_environment_after(before, tenant), self._clock() - since)

    def _spend(self, tenant: str, kind: StageKind, seconds: float) -> None:
        spent = self._spent[tenant]
        spent[kind] = spent.get(kind, 0.0) + seconds

    # --- decisions ----------------------------------------------------------------------------------------------------

    def due(self, rows: Mapping[str, int], training: Collection[str]) -> list[JobStages] | None:
        """The work that a choice is due for; None while the last one stands. ``rows``: that each tenant has in the
        engine; ``training``: tenants with operations."""
        now = self._clock()
        rows = {tenant: max(1, count) for tenant, count in rows.items()}
        self._rows.update(rows)
        work = set(rows), set(training)
        apart = PLAN_SECONDS if work == self._planned_for else 0.0
        if all(work):
            apart = max(apart, min(PLANS_APART * self._took, MOST_APART))
        if now - self._planned_at < apart:
            return None
        self._planned_at, self._planned_for = now, work
        if self.choice.active:
            self._turns_since = now
        elif now - self._turns_since > RETRY_SECONDS:
            self.table = deepcopy(self._first)
            self._turns_since = now
        self._took = 0.0
        return self.foreseen(*work)

    def choose(self, chains: Sequence[JobStages] | None) -> LaneChoice:
        """The mode for the work that :meth:`due` gave, in the thread that asked it."""
        if chains is None:
            return self.choice
        began = self._clock()
        costs = LaneCosts(self.table, lambda count: self._costs.predict("decode", count))
        self.choice = choose(chains, self._modes, costs, self.choice.threads, self._depth)
        if overlaps(chains):
            self._took = self._clock() - began
        return self.choice

    def slowdowns(self, rows: int, threads: int) -> tuple[float, float]:
        """The slowdowns of engine and trainer while both have work, in this mode."""
        return self.table.slowdown(threads, "decode" if rows else "prefill", rows)

    def foreseen(self, generating: Collection[str], training: Collection[str]) -> list[JobStages]:
        """The predicted rest of each tenant's present work, and the work that follows it in its step."""
        now = self._clock()
        chains: list[JobStages] = []
        for tenant in sorted({*generating, *training}):
            engine = self._generation(tenant, present=tenant in generating)
            trainer = self._training(tenant, present=tenant in training)
            if tenant in generating and tenant in training:
                chains += [engine, trainer]
            elif tenant in generating:
                chains.append(engine + self._environment(tenant, "engine", trainer))
            else:
                chains.append(trainer + self._environment(tenant, "trainer", engine))
        for tenant, (part, since) in sorted(self._away.items()):
            if (
                tenant not in generating
                and tenant not in training
                and (past := now - since) < (self._predictor.predict(_environment_after(part, tenant)) or 0.0)
            ):
                of_other = self._training if part == "engine" else self._generation
                chains.append(self._environment(tenant, part, of_other(tenant, present=False), past))
        return [chain for chain in chains if chain]

    def _environment(self, tenant: str, part: Part, others: JobStages, past: float = 0.0) -> JobStages:
        """The stages ``others`` of the other part, after the rest of the time between the two."""
        between = self._predictor.predict(_environment_after(part, tenant))
        return (Stage("environment", between - past), *others) if others and between else others

    def _generation(self, tenant: str, *, present: bool) -> JobStages:
        rows = self._rows.get(tenant, 1)
        return self._stages(tenant, ("prefill", "decode", "tail"), rows, present=present)

    def _training(self, tenant: str, *, present: bool) -> JobStages:
        return self._stages(tenant, ("train", "optimizer"), 0, present=present)

    def _stages(self, tenant: str, kinds: Sequence[StageKind], rows: int, *, present: bool) -> JobStages:
        """One part of a tenant's step, or the rest of it if it is ``present``: endless if it is that and unknown."""
        spent: Mapping[StageKind, float] = self._spent.get(tenant, {}) if present else {}
        found = []
        for kind in kinds:
            predicted = self._predictor.predict(f"{tenant} {kind}")
            if predicted is not None:
                left = predicted - spent.get(kind, 0.0)
                later = any(spent.get(other) for other in kinds[kinds.index(kind) + 1 :])
                if left > LEFT * predicted or not later:
                    found.append(Stage(kind, max(left, LEFT * predicted), rows))
        if present and not found:
            found.append(Stage(kinds[1] if kinds[0] == "prefill" else kinds[0], math.inf, rows))
        return tuple(found)


def measure_slowdowns(
    threads: int, runner: Runner, backbone: Backbone, costs: CostTable, max_rows: int, where: torch.device
) -> SlowdownTable:
    """A training pass beside decode steps, and beside prefills, on every split of the cores. In the calling thread,
    which trains later on; ``costs`` are those of the engine's slices alone."""
    table = SlowdownTable()
    kinds = [(split, rows) for split in splits(threads, where.type)[1:] for rows in (*BUCKETS, 0)]
    tokens = affordable_tokens(lambda count: _train(backbone, count, where), len(kinds) * PASSES)
    alone = min(_train(backbone, tokens, where) for _ in range(2))
    began = time.perf_counter()
    for split, rows in kinds:
        slots = [slot for _ in range(max(1, min(rows, max_rows))) if (slot := runner.store.allocate(128))]
        each = 1 if rows else 128
        expected = costs.predict("decode" if rows else "prefill", len(slots) * each)
        if not slots or not expected or time.perf_counter() - began > MEASURE_SECONDS:
            for slot in slots:
                runner.store.free(slot)
            continue
        chunks = [SequenceChunk("", [0] * each, 0, slot) for slot in slots]
        lane = _Generating(runner, chunks, split, where, decodes=bool(rows))
        lane.start()
        try:
            teams.use(max(1, threads - split))
            trained = fmean([_train(backbone, tokens, where) for _ in range(PASSES)])
        finally:
            lane.end()
            teams.use(threads)
            for slot in slots:
                runner.store.free(slot)
        kind: StageKind = "decode" if rows else "prefill"
        if lane.took:
            table.record(split, kind, rows, engine=median(lane.took) / expected, trainer=trained / alone)
    return table


def affordable_tokens(train: Callable[[int], float], passes: int) -> int:
    """The tokens of a training pass, so that so many passes beside other work, which double its time, end in
    :data:`MEASURE_SECONDS`. ``train(tokens)`` gives the seconds of one alone."""
    tokens = FEWEST_TOKENS
    train(tokens)  # the first one takes longer
    while tokens < MEASURE_TOKENS and 2 * train(tokens) * 2 * passes <= MEASURE_SECONDS:
        tokens *= 2
    return tokens


class _Generating(threading.Thread):
    """Slices of the engine until it is ended, in a lane of ``threads``."""

    def __init__(
        self, runner: Runner, chunks: list[SequenceChunk], threads: int, where: torch.device, *, decodes: bool
    ) -> None:
        super().__init__(name="engine", daemon=True)
        self._runner, self._chunks, self._threads, self._where = runner, chunks, threads, where
        self._slice = runner.decode if decodes else runner.prefill
        self._ended = threading.Event()
        self.took: list[float] = []
        """Seconds of each."""

    def run(self) -> None:
        teams.use(self._threads)
        with device.own_stream(self._where), torch.no_grad():
            self._runner.prepare_adapters([""])
            while not self._ended.is_set():
                began = time.perf_counter()
                self._slice(self._chunks)
                device.finish(self._where)
                self.took.append(time.perf_counter() - began)

    def end(self) -> None:
        self._ended.set()
        self.join()


def _train(backbone: Backbone, tokens: int, where: torch.device) -> float:
    """Seconds of a forward and a backward pass of the base model."""
    batch = pack_groups([PackedGroup([0] * tokens, [], LossTokens.of([]))], where)
    began = time.perf_counter()
    passed = backbone.forward(batch, [], recompute=False)
    passed.backward(torch.zeros_like(passed.hidden))
    device.finish(where)
    return time.perf_counter() - began
