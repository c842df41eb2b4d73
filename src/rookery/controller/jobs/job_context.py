"""The shared state of one running job, and its progress: counters, rewards, tokens per second, present waits.

* :class:`JobContext` is assembled once and passed to the job's groups, episodes, steps and evaluations. Everything
  random in a job is derived from its spec's seed and from the place of what it is for
  (:func:`~rookery.controller.jobs.trajectory.derive_seed`), so that it is the same after any restart.
* Counters are stored in the same transaction as the events that they count.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, TypeVar

from rookery import protocol
from rookery.clock import Clock
from rookery.controller.context import ControllerContext
from rookery.controller.fleet.env_hosts import EnvironmentRef
from rookery.controller.training.policy_run import PolicyRun
from rookery.controller.training.policy_versions import PolicyVersions
from rookery.scheduling.health import NoSignal
from rookery.spec.job import JobSpec
from rookery.spec.policy import PolicySpec
from rookery.storage.models import JobRow, VersionRow
from rookery.storage.repositories import jobs, tenants
from rookery.storage.repositories.versions import steps
from rookery.storage.store import Store
from rookery.tokenization.chat import Chat

T = TypeVar("T")

HeldOut: TypeAlias = tuple[list[bytes], dict[str, protocol.BestConstant]]
"""Held-out prompts, and by policy the fixed reply that earns most on them where one is known."""

RATE_SECONDS = 30.0
"""Window of the shown tokens per second: long enough to span a training step."""

NO_SIGNAL = "no_signal"
"""Kind of the event of a run of steps without a signal."""

EVENTS_READ = 1000
"""Newest events among which a restart looks for one."""

SHOWN_REWARDS = 64
"""Steps kept for the sparkline."""

_METRIC_NAMES = {
    "entropy:sum": "entropy",
    "kl:sum": "kl",
    "ratio:sum": "ratio",
    "clipped:sum": "clipped_share",
    "logp_diff:sum": "logp_diff_mean",
    "logp_diff:max": "logp_diff_max",
    "loss:sum": "loss",
}
"""Names of the trainer's metrics in a row."""


class Progress:
    """Counters, rates and present waits."""

    def __init__(
        self,
        store: Store,
        clock: Clock,
        row: JobRow,
        spec: JobSpec,
        on_metrics: Callable[[dict[str, Any]], None],
    ) -> None:
        """``on_metrics`` is called with the metrics row of each committed step."""
        self.counters: Counter[str] = Counter(row.counters)
        self.stages: Counter[str] = Counter()
        """How many episodes wait for the engine, and how many for their environment."""
        self.rewards: deque[float] = deque(maxlen=SHOWN_REWARDS)
        self.staleness: float | None = None
        self.computing = 0
        """Policies for which the trainer computes."""
        self.new_models: list[str] = []
        """The base models of policies whose first version is being created."""
        self._store = store
        self._clock = clock
        self._on_metrics = on_metrics
        self._row = row
        self._spec = spec
        self.unstored = False
        """A transaction failed: the counters may count work that is not stored."""
        self.held_out: asyncio.Task[HeldOut] | None = None
        """The held-out prompts, while no evaluation has stored them."""
        self.committed = 0
        """The number of the last committed optimizer step, of any policy."""
        self.committing = asyncio.Lock()
        """Held by the policy that commits: steps have the numbers in which they were committed."""
        self._no_signal = NoSignal(spec)
        self._began = clock.monotonic()
        self._earlier_seconds = float(row.rng.get("seconds", 0.0))
        self._sampled: deque[tuple[float, int]] = deque()

    def of_policy(self, policy: str, counts: Mapping[str, int]) -> dict[str, int]:
        """``counts`` of one policy as the job's counters have them: the job's sum, and where it has several policies,
        that of each under ``COUNTER/POLICY``."""
        named = {f"{name}/{policy}": count for name, count in counts.items()} if self._spec.several_policies else {}
        return {**counts, **named}

    # --- writes -------------------------------------------------------------------------------------------------------

    async def store(self, function: Callable[..., Any], *values: Any, **named: Any) -> None:
        """Write to the database, with the job's counters in the same transaction."""
        await self.count({}, lambda counters: self._store.write(function, *values, **named, counters=counters))

    async def count(self, counts: Mapping[str, int], write: Callable[[dict[str, int]], Awaitable[T]]) -> T:
        """The result of ``write(counters)``: a transaction of an event that ``counts`` count, which stores the job's
        counters with them. They count from its submission on, since later transactions store them again; where it
        fails they do not count."""
        self.counters.update(counts)
        try:
            return await write(dict(self.counters))
        except Exception:
            self.counters.subtract(counts)
            self.unstored = True
            raise

    async def add_event(self, kind: str, text: str) -> None:
        """Add a line to the job's log."""
        now = self._clock.time()
        await self._store.write(tenants.add_event, self._row.tenant, self._row.id, now, kind, text)

    async def recover(self) -> dict[str, float]:
        """Read the committed steps. Returns the last reward of each policy."""
        last: dict[str, float] = {}
        for row in await self._store.read(steps, self._row.tenant, self._row.id):
            self.committed = row["step"]
            self._show(row)
            if row.get("reward") is not None:
                last[self._policy_of(row)] = row["reward"]
            self._no_signal.add(self._policy_of(row), row)
        for line in self._no_signal.present():
            events = await self._store.read(tenants.events, self._row.tenant, self._row.id, EVENTS_READ)
            if not any(event.kind == NO_SIGNAL and event.text == line for event in events):
                await self.add_event(NO_SIGNAL, line)  # a crash came between the step and its event
        return last

    async def publish(self, metrics: dict[str, Any], version: int) -> None:
        """Show a committed step, whose metrics are stored, to followers."""
        row = {**metrics, "version": version}
        self._show(row)
        if line := self._no_signal.add(self._policy_of(row), row):
            await self.add_event(NO_SIGNAL, line)
        self._on_metrics(row)

    def _show(self, row: dict[str, Any]) -> None:
        """The job's reward and staleness are those of its first trained policy."""
        if self._policy_of(row) != self._spec.trained[0]:
            return
        self.staleness = row.get("staleness_mean")
        if row.get("reward") is not None:
            self.rewards.append(row["reward"])

    def _policy_of(self, row: dict[str, Any]) -> str:
        return str(row.get("policy") or self._spec.trained[0])

    @contextmanager
    def training(self) -> Iterator[None]:
        """The trainer computes for a policy within."""
        self.computing += 1
        try:
            yield
        finally:
            self.computing -= 1

    @contextmanager
    def creating(self, model: str) -> Iterator[None]:
        """The first version of a policy on ``model`` is created within, by a worker that trains."""
        self.new_models.append(model)
        try:
            yield
        finally:
            self.new_models.remove(model)

    @contextmanager
    def waiting_for(self, stage: Literal["engine", "environment"]) -> Iterator[None]:
        """An episode waits for it within."""
        self.stages[stage] += 1
        try:
            yield
        finally:
            self.stages[stage] -= 1

    def add_sampled(self, count: int) -> None:
        """Count sampled tokens."""
        self.counters["tokens"] += count
        self._sampled.append((self._clock.monotonic(), count))
        self._trim_window()

    # --- reads --------------------------------------------------------------------------------------------------------

    def seconds(self) -> float:
        """Seconds for which the job has run, over all restarts."""
        return self._earlier_seconds + self._clock.monotonic() - self._began

    def tokens_per_second(self) -> float:
        self._trim_window()
        seconds = self._clock.monotonic() - self._began
        return sum(count for _, count in self._sampled) / min(RATE_SECONDS, max(1.0, seconds))

    def _trim_window(self) -> None:
        """Drop samples from before the window."""
        now = self._clock.monotonic()
        while self._sampled and now - self._sampled[0][0] > RATE_SECONDS:
            self._sampled.popleft()


def per_token(metrics: dict[str, float]) -> dict[str, float]:
    """Trainer metrics as shown: sums over loss tokens become means."""
    tokens = max(1.0, metrics.get("tokens", 0.0))
    row = {}
    for name, value in metrics.items():
        shown = _METRIC_NAMES.get(name, name)
        row[shown] = value / tokens if name.endswith(":sum") and name != "loss:sum" else value
    return row


@dataclass(frozen=True)
class JobPolicy:
    """One policy of a job."""

    name: str
    about: PolicySpec
    """Its section of the job."""
    spec: JobSpec
    """The job as this policy alone sees it (:meth:`JobSpec.of_policy`)."""
    chat: Chat
    """The chat template and tokenizer of its base model."""
    versions: PolicyVersions | None
    """Its committed versions, or those of the policy that it follows; None for the base model itself."""
    warm_start: protocol.AdapterRef | None = None
    """The weights from which it begins while it has no version."""

    @property
    def model(self) -> str:
        """Its base model."""
        return self.spec.base_model

    @property
    def keeps_start(self) -> bool:
        """Whether its version 0 is the artifact itself from which it begins. An uploaded folder becomes one of this
        service's by the work of a trainer, and training adds an optimizer's state."""
        start = self.about.warm_start
        return not self.about.train and start is not None and start.job is not None

    @property
    def newest(self) -> VersionRow | None:
        """The version that it replies with from now on; None for the base model."""
        follows = self.about.follows
        if self.versions is None or follows is None:
            return self.versions.head if self.versions is not None else None
        return self.versions.followed(follows.every)


@dataclass(frozen=True)
class JobContext:
    controller: ControllerContext
    """The services of the controller."""
    row: JobRow
    """The job as it was stored when this process took it up."""
    spec: JobSpec
    """The validated job spec."""
    environment: EnvironmentRef
    """The environment of its episodes."""
    policies: dict[str, JobPolicy]
    """Its policies by name, in the order of its spec."""
    progress: Progress
    """Its counters, metrics and rewards."""

    def policy_run(self, policy: JobPolicy) -> PolicyRun:
        """The training of ``policy``, which has versions."""
        rooms, store = self.controller.rooms, self.controller.store
        assert policy.versions is not None
        return PolicyRun(
            rooms.training, rooms.weights, lambda policy: store.write(jobs.next_lease, policy),
            policy.model, policy.versions, policy.about.trainers,
        )  # fmt: skip

    @property
    def first(self) -> JobPolicy:
        """The policy that begins an episode, unless the environment names another one."""
        return next(iter(self.policies.values()))

    @property
    def scored(self) -> JobPolicy:
        """The policy whose reward is that of an episode, and of a step of the job, where one figure is shown: the first
        that trains."""
        return self.trained[0]

    def whose(self, policy: JobPolicy) -> str:
        """The beginning of a line about a policy: its name where the job has several, else nothing."""
        return f"{policy.name} " if self.spec.several_policies else ""

    @property
    def trained(self) -> list[JobPolicy]:
        """The policies that train."""
        return [policy for policy in self.policies.values() if policy.about.train]

    @property
    def committed_steps(self) -> int:
        """Committed optimizer steps of all policies that train."""
        heads = [policy.versions.head for policy in self.trained if policy.versions is not None]
        return sum(head.step for head in heads if head is not None)

    def newest(self) -> dict[str, int]:
        """The newest version of each policy that has versions; that of a follower is the one that it uses."""
        rows = {name: policy.newest for name, policy in self.policies.items()}
        return {name: row.version for name, row in rows.items() if row is not None}

    def refs(self, versions: Mapping[str, int]) -> dict[str, protocol.AdapterRef | None]:
        """References to ``versions``; None for the base model."""
        return {
            name: policy.versions.ref(versions[name]) if policy.versions is not None else None
            for name, policy in self.policies.items()
        }

    @contextmanager
    def using(self, versions: Mapping[str, int]) -> Iterator[None]:
        """Within, retention keeps these versions of the policies."""
        with ExitStack() as uses:
            for name, version in versions.items():
                policy = self.policies[name]
                assert policy.versions is not None
                uses.enter_context(policy.versions.using(version))
            yield
