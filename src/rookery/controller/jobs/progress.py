"""How far a job is and what it shows of that: counters, rewards, metrics rows, tokens per second, what it waits for.

* What a job counts is stored in the same transaction as what it counts.
* A metrics row exists for every committed step and for no other, whatever ended the process before.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from rookery.controller.context import ControllerContext
from rookery.controller.jobs.episode import StageCounts
from rookery.controller.training.policy_versions import EARLIER, steps_of
from rookery.spec.job import JobSpec
from rookery.storage.rows import JobRow, VersionRow
from rookery.telemetry.metrics import MetricsLog

RATE_SECONDS = 30.0
"""Window of the shown tokens per second: long enough to span a training step."""

SHOWN_REWARDS = 64
"""Steps kept for the sparkline."""

OWN_OPERATIONS = 2
"""Of one step, with its trainer: forward-backward and the optimizer's."""

_SHOWN = {
    "entropy:sum": "entropy",
    "kl:sum": "kl",
    "ratio:sum": "ratio",
    "clipped:sum": "clipped_share",
    "logp_diff:sum": "logp_diff_mean",
    "logp_diff:max": "logp_diff_max",
    "loss:sum": "loss",
}
"""What the trainer's metrics are called in a row."""


class Progress:
    def __init__(self, world: ControllerContext, row: JobRow, spec: JobSpec, metrics: MetricsLog) -> None:
        self.counters: Counter[str] = Counter(row.counters)
        self.phases = StageCounts()
        self.rewards: deque[float] = deque(maxlen=SHOWN_REWARDS)
        self.staleness: float | None = None
        self.training = False
        """Whether a step is being taken."""
        self._world = world
        self._row = row
        self._model = spec.base_model
        self._metrics = metrics
        self._began = world.clock.monotonic()
        self._spent = float(row.rng.get("seconds", 0.0))
        self._sampled: deque[tuple[float, int]] = deque()

    # --- counted and told ---------------------------------------------------------------------------------------------

    async def store(self, write: Callable[..., Awaitable[Any]], *values: Any, **named: Any) -> None:
        """Write to the database, and in the same transaction what this job has counted, this write's part included."""
        await write(*values, **named, counters=dict(self.counters))

    async def say(self, kind: str, text: str) -> None:
        """A line in the job's own log."""
        world = self._world
        await world.store.add_event(self._row.tenant, self._row.id, world.clock.time(), kind, text)

    async def recover(self, step: int, lineage: Sequence[VersionRow]) -> None:
        """Bring metrics and rewards to those of the committed steps, and only those: a crash may have come between a
        commit and its row."""
        for row in await self._world.store.run(self._recover, step, lineage):
            self.rewards.append(row["reward"])

    def _recover(self, step: int, lineage: Sequence[VersionRow]) -> list[dict[str, Any]]:
        self._metrics.truncate_after(step)
        rows = self._metrics.read()
        last = rows[-1]["step"] if rows else 0
        for version in lineage:
            for metrics in steps_of(version):
                if metrics["step"] > last:
                    row = {name: value for name, value in metrics.items() if name != EARLIER}
                    rows.append({**row, "version": version.version})
                    self._metrics.append(rows[-1])
        return rows

    async def show(self, row: dict[str, Any]) -> None:
        """A committed step's metrics become visible."""
        await self._world.store.run(self._metrics.append, row)
        self.rewards.append(row["reward"])
        self.staleness = row["staleness_mean"]
        self._world.measured(self._row.id, row)

    def sampled(self, count: int) -> None:
        """Count sampled tokens."""
        self.counters["tokens"] += count
        self._sampled.append((self._world.clock.monotonic(), count))
        self._let_go()

    # --- looked at ----------------------------------------------------------------------------------------------------

    def seconds(self) -> float:
        """How long the job has run, over all restarts."""
        return self._spent + self._world.clock.monotonic() - self._began

    def tokens_per_second(self) -> float:
        self._let_go()
        ran = self._world.clock.monotonic() - self._began
        return sum(count for _, count in self._sampled) / min(RATE_SECONDS, max(1.0, ran))

    def _let_go(self) -> None:
        """Forget what was sampled before the window."""
        now = self._world.clock.monotonic()
        while self._sampled and now - self._sampled[0][0] > RATE_SECONDS:
            self._sampled.popleft()

    def waits_for(self) -> str:
        """What keeps the job from being further right now."""
        fleet, model = self._world.fleet, self._model
        if not fleet.serving("train", model) or not fleet.serving("rollout", model):
            return "worker: " + fleet.missing("rollout and training", model)
        if self.training:
            return "trainer" + self._shared()
        position = self._world.rollouts.position(self._row.tenant, self._row.id)
        if self.phases.engine:
            queue = f", {position} ahead in the queue" if position else ""
            return f"engine ({self.phases.engine} {'reply' if self.phases.engine == 1 else 'replies'}{queue})"
        if self.phases.environment:
            return f"environment ({self.phases.environment} episodes)"
        return ""

    def _shared(self) -> str:
        """With how many operations the job shares a trainer, where others are under way: they take turns."""
        trainers = self._world.fleet.serving("train", self._model)
        operations = sum(worker.beat.training for worker in trainers if worker.beat is not None)
        return f" ({operations} operations take turns)" if operations > OWN_OPERATIONS else ""


def per_token(metrics: dict[str, float]) -> dict[str, float]:
    """Trainer metrics as shown: sums over loss tokens become means."""
    tokens = max(1.0, metrics.get("tokens", 0.0))
    row = {}
    for name, value in metrics.items():
        shown = _SHOWN.get(name, name)
        row[shown] = value / tokens if name.endswith(":sum") and name != "loss:sum" else value
    return row
