"""The bars of measures, and their verdicts from rows. A run and the page call the same functions: where a bar moves,
the page judges the stored rows again, and nothing is measured for it. A verdict whose rows are missing has no figure:
the page lists it as to be measured again."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from functools import partial

from benchmarks.lib.harness import Row, Verdict, ratio
from benchmarks.lib.intervals import alternated

Rows = Mapping[str, Row]
"""By their names."""

DECODE_MOST = {8: 1.7, 64: 1.8}
"""A decode step with 4 adapters over its linear layers in Rookery's layout, by the number of sequences."""
ONE_ROW_MOST = 8.0
"""Milliseconds of a decode step of one sequence."""
ADAPTERS_MOST = 1.12
"""A decode step of 64 sequences with 4 adapters over one without."""
VLLM_LEAST = (
    (64, "4 adapters", "vLLM, 4 adapters", 7.0),
    (64, "4 adapters", "vLLM, no adapters", 1.05),
    (64, "no adapters", "vLLM, no adapters", 1.2),
    (8, "4 adapters", "vLLM, no adapters", 1.2),
)
"""Sequences, adapters of Rookery, the beginning of the peer's rows, and the least ratio of speeds."""
TRAINING_LEAST = {"8 x 128": (2.0, 0.75), "8 x 512": (4.0, 0.75)}
"""Over the peer, and of the floor, by shape."""
TENANTS = 4
PACKED_LEAST = 0.95
PEFT = "PEFT + transformers"
GRPO_LEAST = {0: 7.0, 1: 9.0}
"""Over TRL at its best, by staleness."""
LANES_LEAST = {64: 1.15, 16: 1.17, 4: 1.2}
"""The rates' sum as planned over that in turns, by rows that decode."""
LANES_ALONE = 0.98
"""Of the speed in turns, with one kind of work only."""

NO_FIGURE = "-"
NO_ROWS = "not in this run"
NO_PEER = "the peer did not run"


def generation(rows: Rows) -> list[Verdict]:
    found = []
    for count, most in DECODE_MOST.items():
        step = rows.get(f"{count} sequences, Rookery's decode step, 4 adapters")
        floor = rows.get(f"{count} sequences, floor: the same in Rookery's layout of the weights")
        plain = rows.get(f"{count} sequences, the linear layers of a step, by torch's linear")
        why = f"{ratio(step, plain):.2f} x what they take by torch's linear" if step and plain else ""
        found.append(_at_most(f"decode step <= {most:g} x its floor, {count} sequences", over(step, floor), most, why))
    bare = rows.get("1 sequences, Rookery's decode step, no adapters")
    milliseconds = bare.median if bare else None
    found.append(_at_most(f"decode step of one sequence <= {ONE_ROW_MOST:g} ms", milliseconds, ONE_ROW_MOST, form=_ms))
    step, bare = (rows.get(f"64 sequences, Rookery's decode step, {name}") for name in ("4 adapters", "no adapters"))
    target = f"decode step of 64 with 4 adapters <= {ADAPTERS_MOST:g} x one without"
    found.append(_at_most(target, over(step, bare), ADAPTERS_MOST))
    for count, own, peer, least in VLLM_LEAST:
        ours = rows.get(f"{count} sequences, Rookery, {own}")
        best = max(_named(rows, f"{count} sequences, {peer}"), key=lambda row: row.median, default=None)
        target = f"{count} sequences {'over' if own[0] == '4' else 'with'} {own} >= {least:g} x {peer}"
        found.append(_at_least(target, over(ours, best), least, NO_PEER if ours and not best else ""))
    return found


def training(rows: Rows) -> list[Verdict]:
    found = []
    for shape, (times, share) in TRAINING_LEAST.items():
        ours, floor = rows.get(f"{shape}, Rookery"), rows.get(f"{shape}, floor")
        peer = max(_named(rows, f"{shape}, PEFT"), key=lambda row: row.median, default=None)
        found.append(_at_least(f"{shape} >= {share:.0%} of the floor", over(ours, floor), share, form=percent))
        target = f"{shape} >= {times:g} x {PEFT} at its best"
        found.append(_at_least(target, over(ours, peer), times, NO_PEER if ours and not peer else ""))
    alone = rows.get("8 x 128, one tenant (paired with the next)")
    packed = rows.get(f"{TENANTS} tenants with 2 x 128 each, packed")
    why = f"median of {len(packed.values)} pairs" if packed else ""
    target = f"{TENANTS} tenants packed >= {PACKED_LEAST:.0%} of one"
    return [*found, _at_least(target, paired(packed, alone), PACKED_LEAST, why, form=percent)]


def grpo_step(rows: Rows) -> list[Verdict]:
    found = []
    best = min(_named(rows, "TRL"), key=lambda row: row.median, default=None)
    for staleness, least in GRPO_LEAST.items():
        ours = rows.get(f"Rookery, staleness {staleness}")
        target = f"a step at staleness {staleness} >= {least:g} x faster than TRL at its best"
        found.append(_at_least(target, over(best, ours), least, NO_PEER if ours and not best else ""))
    return found


def lanes(rows: Rows) -> list[Verdict]:
    found = []
    for count, least in LANES_LEAST.items():
        turns, planned = (rows.get(f"{count} rows, {arm}: rates, summed") for arm in ("turns", "auto"))
        why = f"turns sum to {turns.median:.2f}" if turns else ""
        target = f"{count} rows: as planned over turns >= {least:g}"
        found.append(_at_least(target, paired(planned, turns), least, why, form=_plain))
    for kind in ("generation", "training"):
        row = rows.get(f"{kind} alone: with the planner over turns")
        found.append(
            _at_least(f"{kind} alone: within 2%", alternated(row.values) if row else None, LANES_ALONE, form=_plain)
        )
    return found


JUDGED: dict[str, Callable[[Rows], list[Verdict]]] = {
    "generation": generation, "training": training, "grpo_step": grpo_step, "lanes": lanes,
}  # fmt: skip
"""By the name of the result."""


def over(first: Row | None, second: Row | None) -> float | None:
    """Median over median, of rows that are there."""
    return ratio(first, second) if first and second else None


def paired(first: Row | None, second: Row | None) -> float | None:
    """The ratio of rows that are there, whose repeats were measured in turns."""
    if not first or not second:
        return None
    return alternated([a / b for a, b in zip(first.values, second.values, strict=True)])


def _named(rows: Rows, start: str) -> list[Row]:
    return [row for name, row in rows.items() if name.startswith(start)]


def _plain(value: float, digits: int) -> str:
    return f"{value:.{2 + digits}f}"


def _times(value: float, digits: int) -> str:
    return f"{_plain(value, digits)} x"


def _ms(value: float, digits: int) -> str:
    return f"{value:.{1 + digits}f} ms"


def percent(value: float, digits: int) -> str:
    return f"{value:.{digits}%}"


Form = Callable[[float, int], str]
"""A figure with so many more digits than usual."""


def shown(value: float, bar: float, form: Form = _times) -> str:
    """With as many digits as tell it from the bar: 0.987 is not 0.99."""
    digits = 0
    while value != bar and digits < 3 and form(value, digits) == form(bar, digits):
        digits += 1
    return form(value, digits)


def _verdict(
    holds: Callable[[float, float], bool], target: str, value: float | None, bar: float, why: str = "", *,
    form: Form = _times,
) -> Verdict:  # fmt: skip
    if value is None:
        return Verdict(target, NO_FIGURE, None, why or NO_ROWS)
    return Verdict(target, shown(value, bar, form), holds(value, bar), why)


_at_least, _at_most = partial(_verdict, operator.ge), partial(_verdict, operator.le)
