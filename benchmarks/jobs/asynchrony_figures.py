"""What the asynchrony cells say: costs, the micro-batches of each budget, predicted against measured steps. Pure."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from benchmarks.jobs.asynchrony_theory import Choice, Phase, apart, jointly, separately, shared, tight_budget
from benchmarks.lib.cells import Cell, table
from benchmarks.lib.harness import Result, Verdict
from benchmarks.lib.workload import COMPLETIONS, PROMPTS, REPLY_TOKENS

CORES = (2, 1)
"""A worker that has the machine, and one of two that share it."""
ROWS = (4, 8, 16, 32, 64)
UNITS = (1, 2, 4, 8)
"""Groups in one pass of the trainer: it does not divide a group."""
STALENESS = (0, 2)
STEPS = 10
SAMPLES = PROMPTS * COMPLETIONS
BUDGETS = {"free": math.inf, "tight": 1.0, "eased": 1.1}
"""Memory, as multiples of the tight budget. A tenth more holds no larger pass by itself, so with a core for each phase
*eased* is as *tight*; beside training it holds several times as many rows."""
SLOW_SECONDS = 2.0
"""Latency of the slow environment: of the order of a step's compute, so that it is a bubble worth filling."""
TOLERANCE = 0.1
"""Between a predicted gain and a measured one: about what two runs of one thing differ by on such a machine."""
ROOM = (1.0, 1.05, 1.1, 1.25, 2.0)
"""Multiples of the tight budget at which the theory is asked again: from where it binds hardest to where it hardly
does."""
MEBIBYTE = 2**20


Budget = Literal["free", "tight", "eased"]


@dataclass(frozen=True)
class Place:
    """Under which memory budget, on which workers, with which environment jobs were run."""

    budget: Budget
    layout: Literal["shared", "apart"]
    latency: float = 0.0

    @property
    def key(self) -> str:
        return f"{self.budget}/{self.layout}/{self.latency:g}"

    @property
    def words(self) -> str:
        where = "one worker, both cores" if self.layout == "shared" else "two workers, a core each"
        slow = f", environment of {self.latency:g} s" if self.latency else ""
        return f"{self.budget} memory, {where}{slow}"

    @property
    def cores(self) -> int:
        """Of each phase."""
        return 2 if self.layout == "shared" else 1


PLACES = (
    Place("free", "shared"), Place("free", "shared", SLOW_SECONDS), Place("free", "apart"),
    Place("tight", "apart"), Place("eased", "shared"), Place("tight", "shared"),
)  # fmt: skip
"""Measured in this order: the slowest last."""
APART: dict[Budget, Budget] = {"free": "free", "eased": "tight", "tight": "tight"}
"""By budget, the one whose runs with a core for each phase are its own as well."""


def costs_key(cores: int, repeat: int) -> str:
    return f"costs/{cores}/{repeat}"


def job_key(place: Place, lag: int, repeat: int) -> str:
    return f"job/{place.key}/{lag}/{repeat}"


# --- costs and choices ------------------------------------------------------------------------------------------------


def phases(cells: Mapping[str, Cell], cores: int) -> tuple[Phase, Phase] | None:
    """Generation and training with so many cores: medians of the costs, in seconds per sample and bytes, by samples at
    a time. A pass's bytes are the slope of the trainer's peak memory over its size, times the size: what is there
    whatever the size is not the pass's. Bytes do not depend on the cores, and are those of all. None before anything
    was measured."""
    every = [cell for key, cell in cells.items() if key.startswith("costs/")]
    found = [cell for cell in every if cell["cores"] == cores]
    if not found:
        return None

    def median(phase: str, size: int, what: str) -> float:
        among = found if what == "seconds" else every
        return statistics.median(cell[phase][str(size)][what] for cell in among)

    peaks = [median("training", units, "peak") for units in UNITS]
    slope = statistics.linear_regression([units * COMPLETIONS for units in UNITS], peaks).slope
    generation = Phase(
        {rows: median("generation", rows, "seconds") / SAMPLES for rows in ROWS},
        {rows: median("generation", rows, "bytes") for rows in ROWS},
    )
    batches = {units: units * COMPLETIONS for units in UNITS}
    training = Phase(
        {samples: median("training", units, "seconds") / SAMPLES for units, samples in batches.items()},
        {samples: slope * samples for samples in batches.values()},
    )
    return generation, training


def budget(cells: Mapping[str, Cell], name: str) -> float:
    """Bytes of caches and activations per device. Raises ``ValueError`` before costs were measured."""
    both = phases(cells, CORES[0])
    if both is None:
        raise ValueError("no costs have been measured")
    return BUDGETS[name] * tight_budget(*both)


def choices(cells: Mapping[str, Cell], place: Place) -> Choice:
    """The best micro-batches there. Raises ``ValueError`` before costs were measured."""
    both = phases(cells, place.cores)
    if both is None:
        raise ValueError("no costs have been measured")
    choose = jointly if place.layout == "shared" else separately
    return choose(*both, budget(cells, place.budget))


def micro_batches(cells: Mapping[str, Cell], place: Place) -> tuple[int, int]:
    """Rows and groups in a pass there: those of the runs that are there, so that all are of one kind, else the best.
    Raises ``ValueError`` before costs were measured."""
    runs = [cell for key, cell in cells.items() if key.startswith(f"job/{place.key}/")]
    if runs:
        return runs[0]["rows"], runs[0]["units"]
    best = choices(cells, place)
    return best.generation, best.training // COMPLETIONS


# --- steps ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Step:
    """Of jobs at one place with one staleness: seconds per step, predicted and measured (median and all runs)."""

    place: Place
    staleness: int
    rows: int
    samples: int
    generation: float
    training: float
    bubbles: float
    predicted: float
    busy: float
    """Measured: seconds per step in which workers computed, together."""
    runs: list[float]

    @property
    def measured(self) -> float:
        return statistics.median(self.runs)


def steps(cells: Mapping[str, Cell]) -> list[Step]:
    """Those whose costs and whose synchronous job are measured too: the time per step in which no worker computed for
    that are the bubbles."""
    found = []
    for place in PLACES:
        both = phases(cells, place.cores)
        plain = [cell for key, cell in cells.items() if key.startswith(f"job/{place.key}/0/")]
        if both is None or not plain:
            continue
        bubbles = statistics.median(max(0.0, cell["step"] - cell["decode"] - cell["train"]) for cell in plain)
        for lag in STALENESS:
            runs = [cell for key, cell in cells.items() if key.startswith(f"job/{place.key}/{lag}/")]
            if runs:
                rows, samples = runs[0]["rows"], runs[0]["units"] * COMPLETIONS
                generation = SAMPLES * both[0].seconds[rows]
                training = SAMPLES * both[1].seconds[samples]
                predict = shared if place.layout == "shared" else apart
                predicted = predict(generation, training, bubbles, lag)
                times = [run["step"] for run in runs]
                busy = statistics.median(run["decode"] + run["train"] for run in runs)
                found.append(Step(place, lag, rows, samples, generation, training, bubbles, predicted, busy, times))
    return found


@dataclass(frozen=True)
class Gain:
    """Of an asynchronous arrangement over a synchronous one, as the formulas have it and as it was measured."""

    what: str
    predicted: float
    measured: float


def gains(found: list[Step]) -> list[Gain]:
    """Lag at each place; and a core for each phase with lag, over both cores for both by turns without."""
    at = {(step.place, step.staleness): step for step in found}
    pairs = [(f"{place.words}: lag 2 over lag 0", (place, 0), (place, 2)) for place in PLACES]
    pairs += [
        (f"{name} memory: a core for each phase, lag 2, over both cores by turns, lag 0",
         (Place(name, "shared"), 0), (Place(alone, "apart"), 2))
        for name, alone in APART.items()
    ]  # fmt: skip
    return [
        Gain(what, at[before].predicted / at[after].predicted, at[before].measured / at[after].measured)
        for what, before, after in pairs
        if before in at and after in at
    ]


def theory(cells: Mapping[str, Cell]) -> list[tuple[str, float, float]]:
    """(budget, synchronous seconds, asynchronous seconds) of a step by LlamaRL's formulas with G = 2 devices, the
    machine's cores. Synchronous is both phases with both cores, as they were measured together, not half of one."""
    together, one = phases(cells, CORES[0]), phases(cells, CORES[1])
    if together is None or one is None:
        return []
    found = []
    for name in BUDGETS:
        least = budget(cells, name)
        sync, later = jointly(*together, least), separately(*one, least)
        found.append((name, SAMPLES * sync.seconds, SAMPLES * later.seconds / CORES[0]))
    return found


def figures(cells: Mapping[str, Cell]) -> Result:
    result = Result("asynchrony", "Asynchrony: theory against measured steps", "python -m benchmarks.jobs.asynchrony")
    found = steps(cells)
    made = gains(found)
    result.data["tables"] = [_costs_table(cells), _steps_table(found), _gains_table(cells, made), _room_table(cells)]
    result.data["steps"] = [
        {"place": s.place.words, "staleness": s.staleness, "predicted": s.predicted, "measured": s.measured,
         "generation": s.generation, "training": s.training, "bubbles": s.bubbles}
        for s in found
    ]  # fmt: skip
    result.data["costs"] = [
        {"phase": name, "cores": cores, "samples": list(phase.seconds), "seconds": list(phase.seconds.values())}
        for cores in CORES
        if (both := phases(cells, cores)) is not None
        for name, phase in zip(("generation", "training"), both, strict=True)
    ]
    for gain in made:
        target = f"gain as predicted, within {TOLERANCE:.0%}: {gain.what}"
        shown = f"{gain.measured:.2f} x, predicted {gain.predicted:.2f} x"
        met = abs(gain.measured / gain.predicted - 1) <= TOLERANCE
        small = met and abs(gain.predicted - 1) < TOLERANCE
        why = "less than runs differ by: it shows no more than that" if small else ""
        result.verdicts.append(Verdict(target, shown, met, why))
    lengths = [cell["length_mean"] for key, cell in cells.items() if key.startswith("job/")]
    if lengths:
        told = f"Tokens per reply in the jobs: {min(lengths):.1f} to {max(lengths):.1f}"
        result.notes.append(f"{told}; the costs are for {REPLY_TOKENS}.")
    return result


def _costs_table(cells: Mapping[str, Cell]) -> dict[str, Any]:
    head = ["phase", "samples at a time", *(f"ms per sample, {c} core{'s' * (c > 1)}" for c in CORES), "MiB"]
    measured = {cores: phases(cells, cores) for cores in CORES}
    rows: list[list[Any]] = []
    for number, name in enumerate(("generation", "training")):
        known = {cores: both[number] for cores, both in measured.items() if both is not None}
        for size in ROWS if name == "generation" else [units * COMPLETIONS for units in UNITS]:
            times = [1000 * known[cores].seconds[size] if cores in known else None for cores in CORES]
            if known:
                rows.append([name, size, *times, next(iter(known.values())).size[size] / MEBIBYTE])
    return table("Costs by micro-batch; memory of caches and activations", head, rows)


def _steps_table(found: list[Step]) -> dict[str, Any]:
    head = ["where", "lag", "rows", "samples in a pass", "generation, s", "training, s", "bubbles, s",
            "predicted step, s", "measured step, s", "measured / predicted", "measured compute, s", "runs"]  # fmt: skip
    rows = [
        [s.place.words, s.staleness, s.rows, s.samples, s.generation, s.training, s.bubbles, s.predicted, s.measured,
         s.measured / s.predicted, s.busy, len(s.runs)]
        for s in found
    ]  # fmt: skip
    return table("A step, predicted from the costs and measured", head, rows)


def _gains_table(cells: Mapping[str, Cell], made: list[Gain]) -> dict[str, Any]:
    rows: list[list[Any]] = [
        [f"{name} memory, by LlamaRL's formulas: devices divided in any proportion", sync / later, None]
        for name, sync, later in theory(cells)
    ]
    rows += [[gain.what, gain.predicted, gain.measured] for gain in made]
    return table("Gains of asynchrony", ["gain", "predicted", "measured"], rows)


def _room_table(cells: Mapping[str, Cell]) -> dict[str, Any]:
    """How much of the gain where memory binds is left with a little more of it; from the costs alone."""
    rows: list[list[Any]] = []
    together, one = phases(cells, CORES[0]), phases(cells, CORES[1])
    if together is not None and one is not None:
        least = budget(cells, "tight")
        for share in ROOM:
            sync, later = jointly(*together, share * least), separately(*one, share * least)
            step = apart(SAMPLES * one[0].seconds[later.generation], SAMPLES * one[1].seconds[later.training], 0.0, 2)
            rows.append(
                [share, share * least / MEBIBYTE, sync.generation, sync.training, SAMPLES * sync.seconds, step,
                 SAMPLES * sync.seconds / step]
            )  # fmt: skip
    head = ["of tight memory", "MiB", "rows", "samples in a pass", "both cores by turns, s", "a core each, s", "gain"]
    return table("Predicted: a little more memory than tight, bubbles left out", head, rows)
