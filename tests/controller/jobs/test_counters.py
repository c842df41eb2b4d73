"""The counters of a job: after each transaction the database has those of the work that it stores."""

from __future__ import annotations

import asyncio
import re
from collections import Counter, defaultdict
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from sqlalchemy import Connection, select
from tests.controller.jobs.test_policies import debate, submit
from tests.support.peers import Service, settle

from rookery import protocol
from rookery.algorithms.advantages import has_variance
from rookery.controller.jobs.trajectory import EpisodeResult, episode_result_decoder
from rookery.storage.models import EvaluationRow, GroupRow
from rookery.storage.repositories import jobs

TURNS = 10
"""Of the event loop, between a call of the writer and its transaction: other calls come meanwhile."""


class LateWriter:
    """Carries out the calls in their order, each some turns after it was made, and calls ``look()`` after each."""

    def __init__(self) -> None:
        self.look: Callable[[], None] = lambda: None
        self._last: asyncio.Task[Any] | None = None

    async def __call__(self, call: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        mine = asyncio.ensure_future(self._run(self._last, partial(call, *arguments, **named)))
        self._last = mine
        return await asyncio.shield(mine)

    async def _run(self, before: asyncio.Task[Any] | None, call: Callable[[], Any]) -> Any:
        if before is not None:
            await asyncio.wait([before])
        await settle(TURNS)
        result = call()
        self.look()
        return result

    def close(self) -> None: ...


def stored_work(connection: Connection, job: str) -> dict[str, int]:
    """The counters of the work that the database holds."""
    found = Counter[str](dict.fromkeys(("episodes", "evaluation_failures"), 0))
    results = defaultdict[str, list[EpisodeResult]](list)
    for group, episode in jobs.recent_episodes(connection, "alice", job, 1000):
        found["episodes"] += 1
        results[group.id].append(episode_result_decoder.decode(episode.trajectories))
    names = {policy.id: policy.name for policy in jobs.policies(connection, "alice", job)}
    for name, uses in connection.execute(select(GroupRow.id, GroupRow.uses).where(GroupRow.job == job)):
        for policy, version in uses.items():
            if version is not None and version >= 0:
                parts = [part for result in results[name] if (part := result.of(names[policy])) is not None]
                flat = not has_variance([part.reward for part in parts])
                found[f"zero_variance_groups/{names[policy]}"] += flat
    held_out = connection.execute(select(EvaluationRow.results).where(EvaluationRow.job == job)).scalars()
    found["evaluation_failures"] = sum(bool(one["error"]) for results in held_out for one in results["held_out"])
    return found


def boom_in_the_first_held_out_episode(
    message: protocol.Reset | protocol.StepEpisode,
) -> dict[str, Any] | None:
    """Else a debate in which every verifier earns as much."""
    if isinstance(message, protocol.StepEpisode) and re.search("-e[0-9]+-0-", message.episode):
        return {"error": "boom"}
    answer = debate(message)
    if answer is not None and "rewards" in answer:
        answer["rewards"]["verifier"] = 1.0
    return answer


async def test_the_database_counts_the_work_that_it_stores_after_each_transaction(tmp_path: Path) -> None:
    """Commits, evaluations and the ends of episodes come at the same time. So a crash at any moment loses no count and
    adds none."""
    writer = LateWriter()
    service = Service(tmp_path, writer=lambda: writer)
    await service.start()
    await service.worker(shortest=2).join()
    await service.host(script=boom_in_the_first_held_out_episode, environments={"task": True}).join()
    job = await submit(
        service, stop__steps=4, algorithm={"group_size": 2, "groups_per_step": 2, "max_staleness": 2},
        evaluation={"prompts": 3, "every": 1},
    )  # fmt: skip
    wrong, seen = list[Any](), set[str]()

    def look() -> None:
        row = service.database.read(jobs.get_job, "alice", job)
        stored = service.database.read(stored_work, job)
        counted = {name: row.counters.get(name, 0) for name in stored}
        seen.update(name for name, count in stored.items() if count)
        if counted != stored:
            wrong.append((counted, stored))

    writer.look = look
    await service.ends(job)
    assert not wrong, wrong[0]
    assert seen == {"episodes", "zero_variance_groups/verifier", "zero_variance_groups/solver", "evaluation_failures"}
    await service.close()
