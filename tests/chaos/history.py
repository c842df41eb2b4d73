"""What must hold of groups, versions and leases, told from the database's transactions as they succeed and from the
bytes of the artifacts that they name.

* **durable** – when a version is committed, and at every start after, its artifact is there and verifies; a frame
  names only versions that are committed and kept.
* **chain** – a version's parent is the head before it, its number the next one; its bytes are exactly what training on
  the steps that it claims makes of its parent's.
* **lease** – leases only grow, and only the newest commits.
* **groups** – each is consumed by at most one version, after it was ready, and by one whose training had its episodes:
  no more and no less. Ordinals have no gap.
* **stale** – no group is trained on at a step more than ``max_staleness`` after the one that its oldest token came
  from.
* **jobs** – none fails; each that was begun ends when the faults do.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Concatenate, Literal, ParamSpec, TypeVar

import msgspec
from sqlalchemy import Connection
from tests.chaos.events import Events
from tests.chaos.invariants import Lasting

from rookery import protocol
from rookery.algorithms.advantages import advantages
from rookery.controller.jobs.trajectory import episode_result_decoder
from rookery.errors import RookeryError
from rookery.simulation.fakes.trainer import ADAPTER, AdapterState, Example, chain_of
from rookery.spec.job import JobSpec
from rookery.storage.artifacts import Artifacts
from rookery.storage.db import Database
from rookery.storage.models import FINAL_JOB_STATES, GroupRow, JobState, PolicyRow, VersionRow
from rookery.storage.repositories import versions as version_rows

Trace = tuple[int, int]
"""A training sequence as told apart from others: hashes of its prompt and of what follows."""


def traces(example: Example) -> Counter[Trace]:
    """The sequences of a group in a training batch."""
    assert isinstance(example, protocol.SharedPrefixGroup)
    return Counter((hash(tuple(example.prompt)), hash(tuple(member.tokens))) for member in example.members)


@dataclass
class _Group:
    job: str
    state: str = "open"
    oldest: int | None = None
    """The oldest version among its episodes' tokens."""
    rewards: list[float] = field(default_factory=list)
    traces: list[list[Trace]] = field(default_factory=list)
    """By surviving episode."""


@dataclass
class _Policy:
    job: str
    lease: int = 0
    head: int | None = None
    versions: dict[int, VersionRow] = field(default_factory=dict)
    chains: dict[int, str] = field(default_factory=dict)


class History:
    """The account of all that was ever committed; it outlives controllers."""

    def __init__(self, events: Events, artifacts: Artifacts) -> None:
        self.events = events
        self.lasting = Lasting(self.named)
        self.specs: dict[str, JobSpec] = {}
        self.states: dict[str, JobState] = {}
        self._trained_examples: dict[str, Counter[Trace]] = {}
        """By digest, the groups that trainers fetched."""
        self._artifacts = artifacts
        self._policies: dict[str, _Policy] = {}
        self._groups: dict[str, _Group] = {}
        self._cursors: Counter[str] = Counter()

    def add_example(self, digest: str, example: Example) -> None:
        """A trainer has fetched a group."""
        self._trained_examples[digest] = traces(example)

    # --- what frames may name -----------------------------------------------------------------------------------------

    def named(self, ref: protocol.AdapterRef, frame: str) -> None:
        row = self._policies[ref.policy].versions.get(ref.version)
        name = f"version {ref.version} of {ref.policy}"
        if row is None:
            self.events.fail("durable", f"{frame} names {name}, which is not committed", ref.policy)
        elif row.hash != ref.hash:
            self.events.fail("durable", f"{frame} names {name} by another hash than it has", ref.policy)
        elif not row.kept:
            self.events.fail("durable", f"{frame} names {name}, whose bytes were let go", ref.policy)

    # --- what the database was told -----------------------------------------------------------------------------------

    def submitted(self, job: str, spec: Mapping[str, Any], policies: Sequence[PolicyRow]) -> None:
        self.specs[job] = JobSpec.model_validate(spec)
        for policy in policies:
            self._policies[policy.id] = _Policy(job)

    def is_now(self, job: str, state: JobState, reason: str) -> None:
        self.events.note("job", job, state, reason)
        self.states[job] = state
        if state == "running":
            self.lasting.runs[job] = self.lasting.runs.get(job, 0) + 1
        if state == "failed":
            self.events.fail("jobs", f"{job} failed: {reason}", job)
        if state in FINAL_JOB_STATES:
            for group in self._groups.values():
                if group.job == job and group.state in ("open", "ready"):
                    group.state = "dropped"

    def leased(self, policy: str, lease: int) -> None:
        if lease <= self._policies[policy].lease:
            self.events.fail("lease", f"{policy} is leased as {lease} after {self._policies[policy].lease}", policy)
        self._policies[policy].lease = lease

    def fenced(self) -> None:
        """Nobody holds a lease any more."""
        for policy in self._policies.values():
            policy.lease += 1

    def added(self, job: str, groups: Sequence[GroupRow]) -> None:
        for group in groups:
            if group.split != "train":
                continue
            if group.ordinal != self._cursors[job]:
                self.events.fail("groups", f"{group.id} comes where number {self._cursors[job]} should", job)
            self._cursors[job] += 1
            self._groups[group.id] = _Group(job)

    def turned(self, episode: str, turns: int) -> None:
        self.lasting.durable.add(f"{episode}.{turns - 1}")

    def closed(self, episode: str, state: str, trajectories: bytes, reward: float | None) -> None:
        group = self._groups[episode.rpartition("-")[0]]
        if state != "done":
            return
        outcome = episode_result_decoder.decode(trajectories)
        group.rewards.append(reward or 0.0)
        group.traces.append(
            [(hash(tuple(t.prompt)), hash(tuple(t.tokens))) for t in outcome.trajectories if t.num_action_tokens]
        )
        group.oldest = min([*outcome.versions, *([group.oldest] if group.oldest is not None else [])])

    def grouped(self, group: str, state: Literal["ready", "failed", "dropped"]) -> None:
        if self._groups[group].state not in ("open", "ready"):
            self.events.fail("groups", f"{group} becomes {state}, it was {self._groups[group].state}", group)
        self._groups[group].state = state

    def retired(self, policy: str, version: int) -> None:
        versions = self._policies[policy].versions
        versions[version] = replace(versions[version], kept=False)
        self.events.note("retired", policy, version)

    # --- a commit -----------------------------------------------------------------------------------------------------

    def committed(self, job: str, row: VersionRow, lease: int, groups: Sequence[str]) -> None:
        """The transaction that makes ``row`` has succeeded."""
        policy = self._policies[row.policy]
        name = f"version {row.version} of {row.policy}"
        self.events.note("committed", row.policy, row.version, *groups)
        if lease != policy.lease:
            self.events.fail("lease", f"{name} was committed under lease {lease}, {policy.lease} is the newest", job)
        if row.parent != policy.head or row.version != len(policy.versions):
            self.events.fail("chain", f"{name} comes from {row.parent}, the head is {policy.head}", job)
        parent = policy.versions[row.parent].step if row.parent is not None else 0
        state = self._read(row, name)
        if state is not None:
            before = policy.chains[row.parent] if row.parent is not None else ""
            if row.parent is not None and state.parent != before:
                self.events.fail("chain", f"{name} was not trained from its parent", job)
            if state.chain != chain_of(state.parent, state.steps) or len(state.steps) != row.step - parent:
                self.events.fail("chain", f"{name} has {len(state.steps)} steps of {row.step - parent}", job)
            policy.chains[row.version] = state.chain
            if row.parent is not None:
                self._trained(job, policy, name, parent, state, groups)
        policy.versions[row.version], policy.head = row, row.version
        for group in groups:
            if self._groups[group].state != "ready":
                self.events.fail("groups", f"{name} consumed {group}, which is {self._groups[group].state}", group)
            self._groups[group] = _Group(job, "consumed")

    def _read(self, row: VersionRow, name: str) -> AdapterState | None:
        try:
            self._artifacts.verify(row.hash)
            return msgspec.json.decode(self._artifacts.path(row.hash, ADAPTER).read_bytes(), type=AdapterState)
        except RookeryError as error:
            self.events.fail("durable", f"{name} is committed and its artifact is not whole: {error}", row.policy)
            return None

    def _trained(
        self, job: str, policy: _Policy, name: str, step: int, state: AdapterState, groups: Sequence[str]
    ) -> None:
        """What the version consumed is what its trainer was given, each sequence once, in time."""
        algorithm = self.specs[job].algorithm
        wanted: Counter[Trace] = Counter()
        origin: dict[Trace, int] = {}
        for group_id in groups:
            group = self._groups[group_id]
            scores = advantages(algorithm.name, group.rewards)
            oldest = policy.versions[group.oldest].step if group.oldest is not None else 0
            for score, sequences in zip(scores, group.traces, strict=True):
                if score != 0.0 or algorithm.kl_weight > 0:
                    wanted.update(sequences)
                    origin.update(dict.fromkeys(sequences, oldest))
        found: Counter[Trace] = Counter()
        for at, taken in enumerate(state.steps, step):
            for digest in taken.examples:
                for trace, count in self._trained_examples[digest].items():
                    found[trace] += count
                    if at - origin.get(trace, at) > algorithm.max_staleness:
                        old, allowed = at - origin[trace], algorithm.max_staleness
                        self.events.fail("stale", f"{name} was trained on what was {old} steps old of {allowed}", job)
        if found != wanted:
            twice, missing = sum((found - wanted).values()), sum((wanted - found).values())
            what = f"{name} was trained on {twice} sequences that it does not consume, not on {missing} that it does"
            self.events.fail("groups", what, job)

    # --- now and then -------------------------------------------------------------------------------------------------

    def check_heads(self) -> None:
        """What every job would go on from is there."""
        for name, policy in self._policies.items():
            if policy.head is not None:
                self._read(policy.versions[policy.head], f"version {policy.head} of {name}")

    def check_all(self, database: Database, tenants: Mapping[str, str]) -> None:
        """The database tells the same history, and whatever it keeps is whole. ``tenants``: by job."""
        for name, policy in self._policies.items():
            rows = [
                replace(row, evaluation=None) for row in database.read(version_rows.versions, tenants[policy.job], name)
            ]
            if rows != list(policy.versions.values()):
                self.events.fail("chain", f"{name}: the database tells another history", name)
            for row in rows:
                if row.kept:
                    self._read(row, f"version {row.version} of {name}")

    @property
    def versions(self) -> int:
        return sum(len(policy.versions) for policy in self._policies.values())


P = ParamSpec("P")
T = TypeVar("T")


class WatchedDatabase(Database):
    """The shipped one; each transaction that changes what is accounted for is told as it succeeds."""

    history: History
    """Set before it is used."""

    def write(self, function: Callable[Concatenate[Connection, P], T], *arguments: P.args, **named: P.kwargs) -> T:
        result: Any = super().write(function, *arguments, **named)
        self._account(function.__name__, result, arguments, named)
        return result  # type: ignore[no-any-return]

    def _account(self, function: str, result: Any, arguments: Sequence[Any], named: Mapping[str, Any]) -> None:
        history = self.history
        match function, arguments:
            case "submit_job", (_, policies, *_):
                row, created = result
                if created:
                    history.submitted(row.id, row.spec, policies)
            case "set_job_state", (job, state, reason, *_):
                history.is_now(job, state, reason)
            case "fence", _:
                history.fenced()
            case "next_lease", (policy,):
                history.leased(policy, result)
            case "add_groups", (job, groups):
                history.added(job, groups)
            case "save_turns", (episode, turns) if result:
                history.turned(episode, len(msgspec.msgpack.decode(turns)))
            case "finish_episode", (episode, state, _) if result:
                history.closed(episode, state, named.get("trajectories", b""), named.get("reward"))
            case "finish_group", (group, state, _):
                history.grouped(group, state)
            case "drop_groups", _:
                for group in result:
                    history.grouped(group, "dropped")
            case "commit_step", _:
                history.committed(named["job"], result, named["lease"], named["groups"])
            case "retire_version", (policy, version):
                history.retired(policy, version)
