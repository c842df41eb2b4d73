"""The invariants of groups, versions and leases, checked on the database's transactions as they succeed and from the
bytes of the artifacts that they name.

* **durable** – when a version is committed, and at every start after, its artifact is there and verifies; a frame
  names only versions that are committed and kept.
* **chain** – a version's parent is the head before it, its number the next one; its bytes are exactly what training on
  the steps that it claims makes of its parent's.
* **lease** – leases only grow, and only the newest commits.
* **groups** – each is consumed by at most one version of each policy, after it was ready, and by one whose training had
  its episodes: no more and no less. Ordinals have no gap.
* **follows** – a policy that plays an earlier version of another one moves each so many of its steps only.
* **masks** – each sampled token belongs to one policy, and a policy is trained on its tokens alone.
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
from rookery.controller.jobs.trajectory import EpisodeResult, episode_result_decoder
from rookery.errors import RookeryError
from rookery.simulation.fakes.trainer import ADAPTER, AdapterState, Example, chain_of
from rookery.spec.job import JobSpec
from rookery.storage.artifacts import Artifacts
from rookery.storage.db import Database
from rookery.storage.models import FINAL_JOB_STATES, GroupRow, JobState, PolicyRow, VersionRow
from rookery.storage.repositories import versions as version_rows

Trace = tuple[int, int, int]
"""A training sequence as told apart from others: hashes of its prompt, of what follows, and of which tokens of that are
trained on."""


def trace_of(prompt: Sequence[int], tokens: Sequence[int], trained: Sequence[float]) -> Trace:
    return hash(tuple(prompt)), hash(tuple(tokens)), hash(tuple(weight != 0 for weight in trained))


def traces(example: Example) -> Counter[Trace]:
    """The sequences of a group in a training batch."""
    assert isinstance(example, protocol.SharedPrefixGroup)
    return Counter(trace_of(example.prompt, member.tokens, member.weights) for member in example.members)


@dataclass
class _Use:
    """A group as one policy is trained on it."""

    oldest: int | None = None
    """The oldest version among the policy's tokens in its episodes."""
    rewards: list[float] = field(default_factory=list)
    traces: list[list[Trace]] = field(default_factory=list)
    """By surviving episode."""
    state: str = "open"


@dataclass
class _Group:
    job: str
    state: str = "open"
    uses: dict[str, _Use] = field(default_factory=dict)
    """By the ids of the policies that train."""


@dataclass
class _Policy:
    job: str
    name: str
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
            self._policies[policy.id] = _Policy(job, policy.name)

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
            if group.ordinal != self._cursors[job]:
                self.events.fail("groups", f"{group.id} comes where number {self._cursors[job]} should", job)
            self._cursors[job] += 1
            trained = self.specs[job].trained
            uses = {id: _Use() for id, one in self._policies.items() if one.job == job and one.name in trained}
            self._groups[group.id] = _Group(job, uses=uses)

    def turned(self, episode: str, turns: int) -> None:
        self.lasting.durable.add(f"{episode}.{turns - 1}")

    def closed(self, episode: str, state: str, trajectories: bytes) -> None:
        group = self._groups[episode.rpartition("-")[0]]
        if state != "done":
            return
        outcome = episode_result_decoder.decode(trajectories)
        self._check_masks(episode, group, outcome)
        for id, use in group.uses.items():
            part = outcome.of(self._policies[id].name)
            if part is None:
                continue
            use.rewards.append(part.reward)
            use.traces.append([trace_of(t.prompt, t.tokens, t.mask) for t in part.trajectories if t.num_action_tokens])
            use.oldest = min([*part.versions, *([use.oldest] if use.oldest is not None else [])])

    def _check_masks(self, episode: str, group: _Group, outcome: EpisodeResult) -> None:
        names = self.specs[group.job].policies
        if len(names) == 1:
            return
        for trajectory in outcome.trajectories:
            parts = [trajectory.of(name).mask for name in names]
            if [sum(flags) for flags in zip(*parts, strict=True)] != [int(flag) for flag in trajectory.mask]:
                self.events.fail("masks", f"{episode}: a token is of two policies, or of none", group.job)
        for name, spec in names.items():
            if spec.follows is not None and (part := outcome.of(name)) is not None:
                for version in part.versions:
                    self._check_followed(episode, group.job, spec.follows.policy, spec.follows.every, version)

    def _check_followed(self, episode: str, job: str, name: str, every: int, version: int) -> None:
        [leader] = [one for one in self._policies.values() if (one.job, one.name) == (job, name)]
        step = leader.versions[version].step
        if version and step // every == leader.versions[version - 1].step // every:
            self.events.fail("follows", f"{episode}: a follower, moved each {every} steps, played step {step}", job)

    def grouped(self, group: str, state: Literal["ready", "failed", "dropped"], policy: str = "") -> None:
        """``policy``: only that one makes no use of it any more."""
        known = self._groups[group]
        if known.state not in ("open", "ready"):
            self.events.fail("groups", f"{group} becomes {state}, it was {known.state}", group)
        for id, use in known.uses.items():
            if policy in ("", id) and use.state in ("open", "ready"):
                use.state = state
        left = {use.state for use in known.uses.values()}
        known.state = state if left <= {state} else "ready" if "ready" in left else "consumed"

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
                self._trained(row, name, parent, state, groups)
        policy.versions[row.version], policy.head = row, row.version
        for group in groups:
            known = self._groups[group]
            use = known.uses[row.policy]
            if known.state != "ready" or use.state != "ready":
                self.events.fail("groups", f"{name} consumed {group}, which is {use.state} for its policy", group)
            known.uses[row.policy] = _Use(state="consumed")
            if all(use.state != "ready" for use in known.uses.values()):
                known.state = "consumed"

    def _read(self, row: VersionRow, name: str) -> AdapterState | None:
        try:
            self._artifacts.verify(row.hash)
            return msgspec.json.decode(self._artifacts.path(row.hash, ADAPTER).read_bytes(), type=AdapterState)
        except RookeryError as error:
            self.events.fail("durable", f"{name} is committed and its artifact is not whole: {error}", row.policy)
            return None

    def _trained(self, row: VersionRow, name: str, step: int, state: AdapterState, groups: Sequence[str]) -> None:
        """A version consumed the sequences that its trainer was given, each once, in time."""
        id, policy = row.policy, self._policies[row.policy]
        job, algorithm = policy.job, self.specs[policy.job].algorithm
        wanted: Counter[Trace] = Counter()
        origin: dict[Trace, int] = {}
        for group_id in groups:
            use = self._groups[group_id].uses[id]
            scores = advantages(algorithm.name, use.rewards)
            oldest = policy.versions[use.oldest].step if use.oldest is not None else 0
            for score, sequences in zip(scores, use.traces, strict=True):
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
        """The version from which each job would continue exists."""
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
                history.turned(episode, len(msgspec.msgpack.decode(b"".join(turns))))
            case "finish_episode", (episode, _) if result:
                history.closed(episode, "done", named["trajectories"])
            case "fail_episode", (episode, *_) if result:
                history.closed(episode, "failed", b"")
            case "finish_group", (group, state, _):
                history.grouped(group, state)
            case "drop_groups", _:
                for group in result:
                    history.grouped(group, "dropped", named.get("policy", ""))
            case "commit_step", (version, of):
                history.committed(of.job, result, version.lease, of.groups)
            case "retire_version", (policy, version):
                history.retired(policy, version)
