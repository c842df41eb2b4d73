"""Whole jobs whose versions are published while episodes run, in virtual time: which version samples what, and what is
kept for whom."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from tests.controller.jobs.test_policies import PAIR, debate
from tests.support.peers import ScriptedWorker, Service, job_of

from rookery import protocol
from rookery.controller.episode_views import EpisodeView
from rookery.controller.jobs.trajectory import decode_turns
from rookery.protocol.connection import ConnectionClosed
from rookery.simulation.clock import InlineWriter, VirtualClock
from rookery.simulation.clock import run as run_virtually
from rookery.storage.models import PolicyRow
from rookery.storage.repositories import jobs
from rookery.storage.repositories import versions as version_rows

MODES = ["finish", "switch", "recompute"]
LONG = 60
"""Tokens of a reply at most, and at least half as many."""
TOKEN, TRAINING = 0.01, 0.2
"""Virtual seconds that a token takes, and an operation of training: a reply takes some seconds beside eleven others, so
that versions come meanwhile."""
PATIENCE = 500.0
"""Virtual seconds after which a scene has failed."""
MOMENT = 0.25
"""Between two looks at what a test waits for."""


class Paced(ScriptedWorker):
    """A scripted worker whose work takes time."""

    def __init__(self, service: Service, name: str = "worker", **script: Any) -> None:
        super().__init__(
            service.controller.serve_worker, service.controller.tickets, name, chunk=1, shortest=LONG // 2, **script
        )
        service.peers.append(self)
        self.gone: list[protocol.AdapterRef] = []
        """Versions that a reply began with, and that were not kept while it ran."""

    async def say(self, message: protocol.Message, epoch: int | None = None) -> None:
        if isinstance(message, protocol.Output):
            await asyncio.sleep(TOKEN)
        await super().say(message, epoch)

    async def _train(self, op: Any) -> None:
        await asyncio.sleep(TRAINING)
        with suppress(ConnectionClosed):
            await super()._train(op)

    def next_chunk(self, request: str) -> protocol.TokenChunk:
        begun = next(generate for generate in reversed(self.generates) if generate.request == request)
        if begun.adapter is not None and begun.adapter.hash not in self.tickets.artifacts.hashes():
            self.gone.append(begun.adapter)
        return super().next_chunk(request)

    @property
    def switches(self) -> list[protocol.SwitchAdapter]:
        return [message for message in self.other if isinstance(message, protocol.SwitchAdapter)]


def play(folder: Path, scene: Callable[[Service], Awaitable[None]]) -> None:
    """A scene with a service in virtual time; nobody beats in it, and nobody is suspect for that."""

    async def main() -> None:
        service = Service(folder, VirtualClock(), InlineWriter, suspect_seconds=1e6, request_timeout_seconds=1e6)
        await service.start()
        try:
            async with asyncio.timeout(PATIENCE):
                await scene(service)
        finally:
            await service.close()
            service.database.close()

    run_virtually(main())


async def submit(service: Service, in_flight: str, **changes: Any) -> str:
    job = job_of(**{"sampling__max_tokens": LONG, **changes, "algorithm__in_flight": in_flight})
    view, _ = await service.controller.submit("alice", job)
    return view.id


async def end(service: Service, job: str) -> list[tuple[EpisodeView, list[int]]]:
    """Wait for the job to be complete: its finished episodes with the versions of their own tokens, in order."""
    view = await service.controller.queries.wait("alice", job)
    assert view.state == "completed", view.reason
    rows = await service.controller.queries.episodes.trajectories("alice", job, 10_000)
    return [
        (row, [v for trajectory in row.trajectories or () for v in trajectory.versions if v >= 0])
        for row in rows
        if row.state == "done"
    ]


async def until(holds: Callable[[], bool]) -> None:
    while True:
        if holds():
            return
        await asyncio.sleep(MOMENT)


def head_of(service: Service, job: str) -> int:
    return service.database.read(jobs.policies, "alice", job)[0].head_version or 0


@pytest.mark.parametrize(("in_flight", "micro_batch"), [*((mode, 0) for mode in MODES), ("switch", 2)])
def test_on_policy_tokens_are_sampled_by_the_parent_version(tmp_path: Path, in_flight: str, micro_batch: int) -> None:
    """Whatever the setting, with episodes of several turns, workers that die, evaluations at the side, and training
    that begins before the last group is complete."""

    async def scene(service: Service) -> None:
        await service.host(turns=3).join()
        for number in range(3):
            mortal = Paced(service, f"mortal-{number}", roles=["rollout"])
            mortal.chunks_left = 150 + 40 * number
            await mortal.join()
        stable = await Paced(service).join()
        algorithm = {"group_size": 2, "groups_per_step": 3, "micro_batch": micro_batch}
        evaluation = {"every": 1, "prompts": 2}
        job = await submit(service, in_flight, stop__steps=4, algorithm=algorithm, evaluation=evaluation)
        episodes = await end(service, job)
        versions = service.check_history(job)
        assert [version.step for version in versions] == [0, 1, 2, 3, 4]
        for row, sampled in episodes:
            assert row.group_state == "consumed"
            assert set(sampled) == {versions[row.consumed_by].parent} == {row.version}
        assert Counter(row.consumed_by for row, _ in episodes) == dict.fromkeys((1, 2, 3, 4), 6)
        assert stable.switches == [], "nothing to train on ran when a version was published"
        assert service.controller.queries.health().totals["worker_losses"] == 3
        for row in await service.controller.queries.metrics("alice", job):
            assert (row["versions_mean"], row["lag_share/0"], row["staleness_max"]) == (1.0, 1.0, 0.0)

    play(tmp_path, scene)


@pytest.mark.parametrize("in_flight", MODES)
def test_switched_episodes_count_their_oldest_token_as_age(tmp_path: Path, in_flight: str) -> None:
    async def scene(service: Service) -> None:
        worker = await Paced(service).join()
        host = await service.host(turns=3).join()
        changes = {"stop__steps": 8, "algorithm__max_staleness": 2, "evaluation": {"every": 2, "prompts": 2}}
        job = await submit(service, in_flight, **changes)
        episodes = await end(service, job)
        service.check_history(job)
        by_group: dict[str, set[int]] = {}
        for row, sampled in episodes:
            assert sampled == sorted(sampled), "no token is of an older version than one before it"
            assert row.version == sampled[0]
            by_group.setdefault(row.group, set()).update(sampled)
        for row in service.groups(job):
            if row["state"] == "consumed":
                assert row["min_version"] == min(by_group[row["id"]])
                assert row["consumed_by"] - 1 - row["min_version"] <= 2
        metrics = await service.controller.queries.metrics("alice", job)
        for row in metrics:
            shares = {int(name.rpartition("/")[2]): share for name, share in row.items() if "lag_share/" in name}
            assert sum(shares.values()) == pytest.approx(1.0)
            assert row["staleness_max"] == max(shares)
        assert max(row["staleness_max"] for row in metrics) >= 1
        several = sum(len(set(sampled)) > 1 for _, sampled in episodes)
        if in_flight == "finish":
            assert (several, worker.switches) == (0, [])
            assert {row["versions_mean"] for row in metrics} == {1.0}
        else:
            assert several > len(episodes) / 4
            assert max(row["versions_mean"] for row in metrics) > 1
            assert {switch.recompute for switch in worker.switches} == {in_flight == "recompute"}
            assert {switch.request.split("-")[2][0] for switch in worker.switches} == {"g"}, "evaluations never switch"
        for generate in worker.generates:
            assert generate.adapter is not None
            if generate.request.startswith(f"{job}-g"):
                assert generate.in_flight == in_flight
            else:
                assert generate.request.startswith(f"{job}-e{generate.adapter.version}-")
                assert generate.in_flight == "finish"
        assert set(host.executed.values()) == {1}

    play(tmp_path, scene)


def test_a_chat_with_a_jobs_adapter_ends_on_its_version(tmp_path: Path) -> None:
    async def scene(service: Service) -> None:
        worker = await Paced(service).join()
        await service.host().join()
        job = await submit(service, "switch", stop__steps=6, algorithm__max_staleness=2)
        await until(lambda: head_of(service, job) >= 1)
        began = head_of(service, job)
        sampling = {"max_tokens": 400, "temperature": 1.0, "seed": 5, "stop": []}
        await service.controller.completions.sample("alice", job, [{"role": "user", "content": "hello"}], sampling)
        assert head_of(service, job) > began, "a version was published meanwhile"
        await end(service, job)
        [asked] = [generate for generate in worker.generates if not generate.request.startswith(job)]
        assert asked.in_flight == "finish"
        assert worker.switches
        assert asked.request not in {switch.request for switch in worker.switches}

    play(tmp_path, scene)


def test_version_is_kept_while_its_replies_run(tmp_path: Path) -> None:
    """Its worker may still be pulling it, whatever it was told since."""

    async def scene(service: Service) -> None:
        worker = await Paced(service).join()
        await service.host(turns=2).join()
        keep = {"keep_last": 1, "keep_best": False}
        job = await submit(service, "switch", stop__steps=8, algorithm__max_staleness=3, checkpoints=keep)
        await end(service, job)
        assert worker.switches
        assert worker.gone == []
        assert [version.version for version in service.check_history(job) if version.kept] == [8]

    play(tmp_path, scene)


@pytest.mark.parametrize("in_flight", ["switch", "recompute"])
def test_after_a_restart_episodes_continue_on_the_head(tmp_path: Path, in_flight: str) -> None:
    async def scene(service: Service) -> None:
        await Paced(service).join()
        host = await service.host(turns=3).join()
        keep = {"keep_last": 1, "keep_best": False}
        job = await submit(service, in_flight, stop__steps=6, algorithm__max_staleness=2, checkpoints=keep)

        def halfway() -> bool:
            """An episode has said a part, with a version that is not kept any more."""
            open_ones = [
                e for group in service.database.read(jobs.open_groups, job) for e in group.episodes if e.state == "open"
            ]
            policy = service.database.read(jobs.policies, "alice", job)[0].id
            kept = {v.version for v in service.database.read(version_rows.versions, "alice", policy) if v.kept}
            return any(e.version not in kept and decode_turns(e.turns, "main") for e in open_ones)

        await until(halfway)
        await service.crash()
        head = head_of(service, job)
        await service.start()
        worker = await Paced(service).join()
        await service.reconnect(host).join()
        episodes = await end(service, job)
        service.check_history(job)
        assert min(g.adapter.version for g in worker.generates if g.adapter is not None) == head
        for row, sampled in episodes:
            assert sampled == sorted(sampled)
            if row.group_state == "consumed":
                assert row.consumed_by - 1 - sampled[0] <= 2
        assert "its version was lost" not in {row["reason"] for row in service.groups(job)}
        across = [row for row, sampled in episodes if sampled[0] < head <= sampled[-1]]
        assert across, "what an older version began was gone on with by the head"
        assert set(host.executed.values()) == {1}

    play(tmp_path, scene)


def test_groups_sampled_by_a_lost_version_are_dropped(tmp_path: Path) -> None:
    async def scene(service: Service) -> None:
        await Paced(service).join()
        host = await service.host(turns=3).join()
        job = await submit(service, "switch", stop__steps=40, algorithm__max_staleness=2)

        def said_by_the_head() -> bool:
            """The head has said a turn of an open episode, whatever began it."""
            said = [
                t
                for g in service.database.read(jobs.open_groups, job)
                for e in g.episodes
                for t in decode_turns(e.turns, "main")
            ]
            return any(head_of(service, job) in turn.versions for turn in said)

        await until(lambda: head_of(service, job) >= 3 and said_by_the_head())
        await service.crash()
        policy, lost = service.database.read(jobs.policies, "alice", job)[0], head_of(service, job)
        service.corrupt(service.database.read(version_rows.version, "alice", policy.id, lost).hash)
        service.stop_at(job, lost + 3)
        await service.start()
        worker = await Paced(service).join()
        await service.reconnect(host).join()
        episodes = await end(service, job)
        assert service.check_history(job)[lost].lost
        assert lost not in {g.adapter.version for g in worker.generates if g.adapter is not None}
        reasons = Counter(row["reason"] for row in service.groups(job) if row["state"] == "dropped")
        assert reasons["its version was lost"] >= 1
        assert all(lost not in sampled for row, sampled in episodes if (row.consumed_by or 0) > lost)

    play(tmp_path, scene)


@pytest.mark.parametrize("lost", list(PAIR))
def test_groups_that_a_lost_version_began_count_as_dropped_for_its_policy(tmp_path: Path, lost: str) -> None:
    async def scene(service: Service) -> None:
        await Paced(service).join()
        host = await service.host(script=debate).join()
        job = await submit(service, "switch", policies=PAIR, stop__steps=40, algorithm__max_staleness=2)

        def policy() -> PolicyRow:
            return service.database.read(jobs.get_policy, "alice", job, lost)

        def said_by_the_head() -> bool:
            rows = [e for g in service.database.read(jobs.open_groups, job) for e in g.episodes]
            turns = [t for row in rows for t in decode_turns(row.turns, "solver") if t.policy == lost]
            return any(policy().head_version in turn.versions for turn in turns)

        await until(lambda: (policy().head_version or 0) >= 3 and said_by_the_head())
        await service.crash()
        head = policy().head_version or 0
        service.corrupt(service.database.read(version_rows.version, "alice", policy().id, head).hash)
        service.stop_at(job, head + 3)
        await service.start()
        await Paced(service).join()
        await service.reconnect(host).join()
        view = await service.controller.queries.wait("alice", job)
        assert view.state == "completed", view.reason
        assert any(row["reason"] == "its version was lost" and row["state"] == "dropped" for row in service.groups(job))
        parts = {name: view.counters.get(f"groups_dropped_stale/{name}", 0) for name in PAIR}
        assert parts[lost] > 0 and view.counters["groups_dropped_stale"] == sum(parts.values())

    play(tmp_path, scene)
