"""Mistakes about several policies of a job, each made on purpose: the invariants of a run in memory that is restarted
notice every one of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.chaos.mutations import Change, Mutation, applied
from tests.controller.jobs.test_job import finish
from tests.controller.jobs.test_policies import chain, submit, trained
from tests.support.peers import Service, user_message

from rookery import protocol
from rookery.controller.jobs.policy_loop import PolicyLoop
from rookery.controller.jobs.trajectory import EpisodeResult, Trajectory, episode_result_decoder
from rookery.controller.training.policy_versions import PolicyVersions
from rookery.storage.repositories import jobs

EVERY, STEPS, GROUPS, STALENESS = 2, 3, 2, 1
POLICIES: dict[str, Any] = {
    "main": {"rank": 4},
    "judge": {"rank": 8, "seed": 1},
    "opponent": {"train": False, "follows": {"policy": "main", "every": EVERY}},
}
MOMENTS = (30, 55)
"""Calls of the writer after which the service dies."""


def play(message: protocol.Reset | protocol.StepEpisode) -> dict[str, Any] | None:
    if isinstance(message, protocol.Reset):
        return None
    if message.turn < 2:
        speaker = ("opponent", "judge")[message.turn]
        return {"messages": [user_message(f"now {speaker}")], "policy": speaker}
    return {"done": True, "rewards": {"main": float(len(message.messages[1].content) % 3),
                                      "judge": float(len(message.text) % 3)}}  # fmt: skip


def wrong(service: Service, worker: Any, job: str) -> Iterator[str]:
    """Each invariant that does not hold."""
    ids = {name: service.database.read(jobs.get_policy, "alice", job, name).id for name in ("main", "judge")}
    found = service.database.read(jobs.recent_episodes, "alice", job, 1000)
    results: dict[str, EpisodeResult] = {
        row.id: episode_result_decoder.decode(row.trajectories) for _, row in found if row.trajectories
    }
    for name, id in ids.items():
        try:
            versions = chain(service, job, name)
        except AssertionError:
            yield "chain"
            continue
        consumed = Counter(
            uses[id] for row in service.groups(job) if (uses := row["uses"]) and uses.get(id) is not None
        )
        consumed.pop(-1, None)
        if consumed != dict.fromkeys(range(1, len(versions)), GROUPS) or len(versions) != STEPS + 1:
            yield "groups"
    for result in results.values():
        for whole in result.trajectories:
            flags = [0] * len(whole.mask)
            for name in POLICIES:
                part = whole.of(name)
                flags = [a + b for a, b in zip(flags, part.mask, strict=True)]
            if flags != [int(flag) for flag in whole.mask]:
                yield "masks"
        of_main, of_opponent = result.of("main"), result.of("opponent")
        if of_main is not None and of_opponent is not None:
            played = {version for version in of_opponent.versions if version % EVERY}
            if played:
                yield "opponent"
    for name in ids:
        wanted = {
            tuple(t.tokens): tuple(r.policy == name for r in t.replies for _ in range(r.start, r.stop))
            for result in results.values()
            for t in result.trajectories
        }
        for batch in trained(worker, service, job, name):
            for member in (member for unit in batch.groups for member in unit.members):
                sampled = [weight for weight, lp in zip(member.weights, member.logprobs, strict=True) if weight]
                if tuple(member.tokens) in wanted and len(sampled) != sum(wanted[tuple(member.tokens)]):
                    yield "gradient"


MISTAKES = [
    Mutation("train on the tokens of all policies",
             (Change(Trajectory, "of", "if reply.policy == policy:", "if True:"),), frozenset({"masks", "gradient"})),
    Mutation("let a follower play the newest version",
             (Change(PolicyVersions, "followed", "return None if version is None else self._versions[version]",
                     "return self.head"),), frozenset({"opponent"})),
    Mutation("commit without the groups that the policy consumed",
             (Change(PolicyLoop, "_commit", "[group.id for group in groups]", "[]"),),
             frozenset({"groups", "raises"})),
]  # fmt: skip


async def outcome(folder: Path) -> set[str]:
    """The invariants that a run violates, of those at every moment of a crash."""
    seen: set[str] = set()
    for moment in MOMENTS:
        service = Service(folder / str(moment))
        await service.start()
        try:
            job = await submit(service, policies=POLICIES, stop__steps=STEPS, algorithm__max_staleness=STALENESS,
                               environment__return_timeout=5)  # fmt: skip
            await service.crash()
            worker = await finish(service, job, calls=[moment], after=True, script=play, environments={"task": True})
            seen.update(wrong(service, worker, job))
        except AssertionError:
            seen.add("raises")
        await service.close()
    return seen


async def test_the_shipped_code_violates_nothing(tmp_path: Path) -> None:
    assert await outcome(tmp_path) == set()


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda one: one.name.replace(" ", "-"))
async def test_mistake_about_policies_is_noticed(mistake: Mutation, tmp_path: Path) -> None:
    with applied(mistake):
        seen = await outcome(tmp_path)
    assert seen & mistake.caught, seen
