"""The optimizer steps of a job for a reader: a line per step, and advice.

The lines show the metrics that ``docs/quickstart.md`` says to watch, on a terminal as a table of as many as its width
allows; ``--json`` has all. :func:`~rookery.scheduling.health.advice` has a line for each
metric of that page that needs attention.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rookery.scheduling.health import ADVICE_STEPS, advice, known, policy_of, several

Row = Mapping[str, Any]

MOST_NAME = 16
"""Characters of a policy's name in the table; a longer one is cut."""

HEADER_ROWS = 20
"""Lines after which a terminal shows the header again."""


@dataclass(frozen=True)
class StepColumn:
    """A metric in the table. ``head`` is its name in two lines, ``rank`` its order among those that get a place."""

    metric: str
    head: tuple[str, str]
    width: int
    form: Callable[[float], str]
    rank: int


def _fixed(digits: int) -> Callable[[float], str]:
    return lambda value: f"{value:.{digits}f}"


def _short(value: float) -> str:
    """A number of any size in at most six characters."""
    size = abs(value)
    if size >= 99_999.5:
        return f"{value:.0e}"
    return f"{value:.0f}" if size >= 99.95 else f"{value:.1f}" if size >= 9.995 else f"{value:.2f}"


def _small(value: float) -> str:
    return f"{value:.4f}" if value == 0 or 1e-4 <= abs(value) < 10 else f"{value:.0e}"


_ROW_SECONDS = ("seconds/waiting", "seconds/train", "seconds/commit")

STEP_COLUMNS = (
    StepColumn("step", ("step", ""), 5, _fixed(0), 0),
    StepColumn("reward", ("reward", ""), 6, _fixed(3), 1),
    StepColumn("zero_variance_share", ("zero_", "var"), 5, _fixed(2), 2),
    StepColumn("length_mean", ("length", "mean"), 6, _short, 3),
    StepColumn("length_max", ("length", "max"), 6, _short, 15),
    StepColumn("staleness_mean", ("stale-", "ness"), 6, _fixed(2), 4),
    StepColumn("entropy", ("en-", "tropy"), 5, _fixed(2), 10),
    StepColumn("logp_diff_mean", ("logp_", "diff"), 6, _small, 9),
    StepColumn("ratio", ("ratio", ""), 5, _fixed(2), 11),
    StepColumn("kl", ("kl", ""), 6, _small, 14),
    StepColumn("grad_norm", ("grad_", "norm"), 6, _short, 13),
    StepColumn("tokens/s", ("tokens", "/s"), 6, _short, 5),
    StepColumn("seconds/queue", ("queue", "s"), 5, _short, 12),
    StepColumn("seconds/generation", ("gen", "s"), 5, _short, 6),
    StepColumn("seconds/environment", ("env", "s"), 5, _short, 8),
    StepColumn("seconds/waiting", ("wait", "s"), 5, _short, 7),
    StepColumn("seconds/train", ("train", "s"), 5, _short, 7),
    StepColumn("seconds/commit", ("commit", "s"), 6, _short, 16),
)
"""Every column in the order of the table. ``tokens/s`` is :func:`tokens_per_second`."""

ROW_COLUMNS = (
    StepColumn("step", ("step", ""), 5, _fixed(0), 0),
    StepColumn("loss", ("loss", ""), 7, _small, 1),
    StepColumn("accuracy", ("accu-", "racy"), 6, _fixed(2), 2),
    StepColumn("margin", ("margin", ""), 6, _short, 3),
    *(column for column in STEP_COLUMNS if column.metric in ("length_mean", "length_max", "entropy", "grad_norm")),
    *(column for column in STEP_COLUMNS if column.metric in ("tokens/s", *_ROW_SECONDS)),
)
"""The columns for a job on rows, which has no rewards."""


def tokens_per_second(row: Row, before: Row | None) -> float | None:
    """Tokens that the job sampled per second between two steps of one policy, on rows those that it learned; None for
    the first one."""
    if before is None or not row.get("time", 0.0) > before.get("time", 0.0):
        return None
    if _on_rows(row):
        tokens = row.get("tokens", 0)
    else:
        tokens = row.get("tokens_sampled", 0) - before.get("tokens_sampled", 0)
    return float(tokens / (row["time"] - before["time"]))


def _on_rows(row: Row) -> bool:
    return row.get("rows") is not None


class StepLines:
    """The lines of one job's steps, in order: a table of ``width`` characters, or for None the metrics by name."""

    def __init__(self, width: int | None) -> None:
        self._width = width
        self._columns: Sequence[StepColumn] | None = None
        """Chosen with the first step."""
        self._name = 0
        """Width of the column of policies; 0 in a job with one."""
        self._before: dict[str, Row] = {}
        """The last step of each policy."""
        self._recent: defaultdict[str, list[Row]] = defaultdict(list)
        """Its last steps."""
        self._count = 0
        self._advised: set[tuple[str, str]] = set()

    def of(self, row: Row, spec: Mapping[str, Any]) -> Iterator[str]:
        """The line of a step, after the header where it is due, and advice that was not given yet."""
        policy, values = policy_of(row, spec), self.figures(row, spec)
        recent = self._recent[policy] = [*self._recent[policy], row][-ADVICE_STEPS:]
        every = ROW_COLUMNS if _on_rows(row) else STEP_COLUMNS
        if self._columns is None and self._width is not None:
            self._name = min(MOST_NAME, max([0, *(max(len("policy"), len(name)) for name in several(spec))]))
            self._columns = fitting(self._width - self._name - (self._name > 0), every)
        if self._columns is None:
            shown = [(c.metric, values.get(c.metric)) for c in every[1:]]
            yield f"step {row['step']:>5}  {policy}{'  ' * bool(policy)}" + "  ".join(
                f"{name} {value:.4g}" for name, value in shown if known(value)
            )
        else:
            if self._count == 0:
                yield legend(self._columns)
            if self._count % HEADER_ROWS == 0:
                for part in (0, 1):
                    yield self._line([(c.head[part], c.width) for c in self._columns], ("policy", "")[part])
            cells = [(c, values.get(c.metric)) for c in self._columns]
            yield self._line([(c.form(value) if known(value) else "-", c.width) for c, value in cells], policy)
        self._count += 1
        for metric, line in advice(recent, spec, policy).items():
            if (policy, metric) not in self._advised:
                self._advised.add((policy, metric))
                yield f"advice{f' ({policy})' * bool(policy)}: {line}"

    def figures(self, row: Row, spec: Mapping[str, Any]) -> dict[str, Any]:
        """The metrics of the next step, with the sampled tokens per second since the step before."""
        policy = policy_of(row, spec)
        before, self._before[policy] = self._before.get(policy), row
        return {**row, "tokens/s": tokens_per_second(row, before)}

    def back(self, step: int) -> None:
        """The job went back to ``step``: forget the rows of later steps."""
        self._before.clear()
        for policy, rows in self._recent.items():
            self._recent[policy] = [row for row in rows if row["step"] <= step]

    def _line(self, cells: list[tuple[str, int]], policy: str) -> str:
        """A line of the table: the step, the policy where the job has several, and the metrics."""
        names = [(policy[: self._name], self._name)] if self._name else []
        return _joined([*cells[:1], *names, *cells[1:]])


def legend(columns: Sequence[StepColumn]) -> str:
    """The names of the metrics in the table."""
    first = columns[1].metric if len(columns) > 1 else "step"
    names = ", ".join(column.metric for column in columns if column.metric not in ("step", first))
    return f"Columns after {first}: {names}. The quickstart says what is healthy."


def fitting(width: int, columns: Sequence[StepColumn] = STEP_COLUMNS) -> list[StepColumn]:
    """The ``columns`` that a line of ``width`` characters holds, in the order of the table."""
    chosen: set[str] = set()
    for column in sorted(columns, key=lambda one: one.rank):
        if sum(c.width + 1 for c in columns if c.metric in chosen) + column.width <= width:
            chosen.add(column.metric)
    return [column for column in columns if column.metric in chosen]


def _joined(cells: Sequence[tuple[str, int]]) -> str:
    return " ".join(f"{text:>{width}}" for text, width in cells).rstrip()
