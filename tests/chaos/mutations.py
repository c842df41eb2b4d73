"""Mistakes that somebody could make in the controller, an order or the engine: each is the shipped source with one
thing changed, for as long as :func:`applied` is entered."""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

from rookery.controller.controller import Controller
from rookery.controller.fleet.fleet import Fleet
from rookery.controller.jobs import buffer as buffer_module
from rookery.controller.jobs import policy_loop as policy_loop_module
from rookery.controller.jobs.buffer import GroupBuffer
from rookery.controller.jobs.policy_loop import PolicyLoop
from rookery.controller.jobs.trajectory import Trajectory
from rookery.controller.rollout.scheduler import RolloutScheduler
from rookery.controller.training.dispatcher import TrainingDispatcher
from rookery.controller.training.policy_run import PolicyRun
from rookery.controller.training.policy_versions import PolicyVersions
from rookery.controller.weights import handed as handed_module
from rookery.controller.weights.store import WeightStore
from rookery.protocol import TokenLog
from rookery.scheduling import replication as replication_module
from rookery.scheduling.rollout_order import RolloutOrder
from rookery.storage.repositories import versions as versions_module
from rookery.worker.engine.native import engine as engine_module


@dataclass(frozen=True)
class Change:
    """In the source of ``where.name``, ``old`` is written as ``new``. ``home`` is the module that defines a function
    which ``where`` only uses."""

    where: Any
    name: str
    old: str
    new: str


@dataclass(frozen=True)
class Mutation:
    """``caught``: the invariants of which one must notice. ``plan``: what in the run makes it matter soon."""

    name: str
    changes: tuple[Change, ...]
    caught: frozenset[str]
    plan: dict[str, Any] = field(default_factory=dict)


def _one(name: str, where: Any, function: str, old: str, new: str, *caught: str, **plan: Any) -> Mutation:
    return Mutation(name, (Change(where, function, old, new),), frozenset(caught), plan)


COMMITTED_EARLY = """head = self.versions.head
    self._continue_from(protocol.AdapterRef(policy=self.versions.row.id, version=head.version + 1 if head else 0,
        hash=manifest.hash, rank=self.versions.row.rank, alpha=self.versions.row.alpha))
    ref = await"""
"""The trainer hears of a version before the database does."""

ANYBODY = "(one := self._find(chunk.request)) and one.at_worker and one"
"""The request of a chunk, under whatever assignment and from whatever worker the chunk came."""

MUTATIONS = [
    _one(
        "skip the epoch check", Fleet, "_deliver", "message.epoch != worker.epoch or ", "", "epochs",
    ),
    _one(
        "frames of a connection given up count", Fleet, "_deliver", ' or worker.state in ("suspect", "gone")', "",
        "epochs", half_opens=0.05, slow_latency=4.0,
    ),
    _one("epochs do not grow", Fleet, "_register", "self.epoch += 1", "pass", "epochs"),
    _one(
        "acknowledge before the commit", PolicyRun, "commit", "ref = await", COMMITTED_EARLY, "durable",
    ),
    _one(
        "commit what is not durable yet", TrainingDispatcher, "uploading",
        "manifest = await self._transfer(self._publish, message.policy, upload)", "manifest = done.manifest", "durable",
        "raises",
    ),
    _one(
        "trust what an upload is said to be", TrainingDispatcher, "uploading", "manifest.hash != done.manifest.hash",
        "False",
        "chain", upload_corrupt=0.2,
    ),
    _one(
        "forget a token offset", TokenLog, "receive", "skip = start + len(self.tokens) - chunk.offset", "skip = 0",
        "tokens",
    ),
    _one(
        "resend without the tokens received", RolloutScheduler, "_give", "prefix_tokens=inflight.result.tokens",
        "prefix_tokens=[]", "given",
    ),
    _one(
        "take tokens from whoever sends them", RolloutScheduler, "on_output",
        "self.pool.find(worker, chunk.assignment)", ANYBODY, "tokens", "epochs", "given", "jobs", seeding=True,
        latency=0.5,
    ),
    _one(
        "forget to requeue what a lost worker had", RolloutScheduler, "on_worker_lost",
        'self._requeue(inflight, "lost", "lost")', 'self.apply(inflight, "finish")', "jobs",
    ),
    _one(
        "forget the tokens of a request whose caller left", RolloutScheduler, "sample",
        "returns = bool(request.generate.episode and inflight.result.tokens)", "returns = False", "given",
        database_failures=0.01,
    ),
    _one(
        "skip the lease check", versions_module, "_check_head", "owner.lease != lease", "False", "lease", "durable",
        commit_deaths=1.0, restart_every=1000.0, down=2.0,
    ),
    _one(
        "leave leases to a dead controller", Controller, "start", "await store.write(jobs.fence)", "pass",
        "durable", "jobs", "chain", commit_deaths=1.0, restart_every=1000.0, down=2.0,
    ),
    Mutation(
        "train on a stale group",
        (
            Change(buffer_module, "select_batch", "step - group.step > max_staleness", "False"),
            Change(buffer_module, "select_batch", "step - group.step <= max_staleness", "True"),
            Change(policy_loop_module, "admission_budget", "max_staleness + 1", "max_staleness + 3"),
        ),
        frozenset({"stale"}),
    ),
    _one(
        "forget the gradients of other trainers", PolicyRun, "_divided", "gradients=refs", "gradients=[]", "groups",
    ),
    _one(
        "forget the share of a lost trainer", PolicyRun, "_divided", "batch=join_batches(lost)",
        "batch=join_batches([])", "groups", phase_deaths=0.1, trainers=0.4, lifetime=60.0,
    ),
    _one(
        "commit without what was consumed", PolicyLoop, "_commit", "[group.id for group in groups]", "[]", "groups",
    ),
    _one(
        "let go of versions in use", PolicyVersions, "retire",
        "self._used | self._held", "self._held", "durable",
        answer=3.0,
    ),
    _one(
        "hand out a complete group twice", GroupBuffer, "take",
        "self.ready = [group for group in self.ready if group.id not in taken]", "pass", "groups", "jobs",
    ),
    _one(
        "leave a request with the worker that it is taken from", RolloutScheduler, "_abort",
        "assignment.worker.post(abort)", "resume and assignment.worker.post(abort)", "given",
    ),
    _one(
        "lose the offset of a chunk that moves", RolloutScheduler, "_requeue", "self.apply(inflight, event)",
        "reason == 'divided' and inflight.result.clear(); self.apply(inflight, event)", "given", "tokens",
    ),
    _one(
        "move a chunk whose tokens are still on their way", RolloutScheduler, "on_output",
        'self.apply(inflight, "divide", Details(target))', "self._requeue(inflight, 'return', 'divided')",
        "given", "tokens", "room",
    ),
    _one(
        "train a policy on the tokens of its partner", Trajectory, "of", "if reply.policy == policy:", "if True:",
        "masks", partners=1.0,
    ),
    _one(
        "let a follower play the newest version", PolicyVersions, "followed",
        "return None if version is None else self._versions[version]", "return self.head", "follows", "durable",
        partners=1.0,
    ),
    Mutation(
        "give a policy again what it consumed before a restart",
        (
            Change(GroupBuffer, "restore", 'not group.uses or group.uses.get(self.id, "") is None', "True"),
            Change(versions_module, "use_shared", "uses.get(policy, DROPPED) is not None", "policy not in uses"),
        ),
        frozenset({"groups", "jobs"}),
        {"partners": 1.0, "restart_every": 15.0},
    ),
    _one(
        "name a source that failed its receiver", WeightStore, "_reroute", "excluded={*move.failed, *besides}",
        "excluded=set(besides)",
        "holders",
    ),
    _one(
        "keep a lost worker among the sources", WeightStore, "on_worker_lost", "worker.serves = False", "return",
        "holders",
    ),
    _one(
        "keep an earlier process of an address among the sources", WeightStore, "on_worker_joined",
        "earlier.serves = False", "pass", "holders", half_opens=0.05,
    ),
    _one(
        "read an evicted artifact from where it was", WeightStore, "on_evicted",
        "self._remove_holder(worker, digest, entry)", "pass",
        "holders", evictions=0.5,
    ),
    _one(
        "let two workers read from each other", replication_module.SourceTable, "_reads_from",
        "if receiver not in self._readers:", "if True:", "holders", pull=2.0, lifetime=10.0,
    ),
    _one(
        "hand a version to workers of other machines", handed_module, "_share",
        "return bool(here.cache) and (here.cache, here.host, one.reads) == (there.cache, there.host, other.reads)",
        "return bool(here.cache)", "holders",
    ),
    _one(
        "take every source for one of the same site", replication_module.SourceTable, "_push",
        '("site", one.site)', '("site", "s0")', "holders",
    ),
]  # fmt: skip

DRAFT_UNCHECKED = _one("accept a draft without check", engine_module, "accepted_tokens", "token != sampled[i]", "False")
"""In the engine, which the simulated fleet has not: the test of drafts notices it."""

ORDER_STARVES = _one("an order that starves", RolloutOrder, "next", "self._taken % GUARD == GUARD - 1", "False")
"""A step of the simulated fleet ends, and nobody waits for ever: the test of the order notices it."""


@contextmanager
def applied(mutation: Mutation) -> Iterator[None]:
    """The mistake is made within."""
    with ExitStack() as stack:
        for change in mutation.changes:
            stack.enter_context(_changed(change))
        yield


@contextmanager
def _changed(change: Change) -> Iterator[None]:
    shipped = getattr(change.where, change.name)
    source = _SOURCES.get(shipped) or textwrap.dedent(inspect.getsource(shipped))
    assert change.old in source, f"{change.name} does not say {change.old!r} any more"
    source = source.replace(change.old, change.new)
    space: dict[str, Any] = dict(shipped.__globals__)
    defined: dict[str, Any] = {}
    code = compile(f"from __future__ import annotations\n{source}", f"<{change.name}, changed>", "exec")
    exec(code, space, defined)
    wrong = defined[change.name]
    _SOURCES[wrong] = source
    static = isinstance(inspect.getattr_static(change.where, change.name), staticmethod)
    setattr(change.where, change.name, staticmethod(wrong) if static else wrong)
    try:
        yield
    finally:
        setattr(change.where, change.name, shipped)


_SOURCES: dict[Any, str] = {}
"""Of functions that were changed already: no file has it."""
