"""A policy that follows another one of its job: the version with which it replies, restarts, retention."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.controller.jobs.test_job import finish
from tests.controller.jobs.test_policies import chain, submit, trained
from tests.support.peers import ADAPTER, Service, eventually, user_message

from rookery import protocol
from rookery.controller.jobs.trajectory import EpisodeResult, decode_turns, episode_result_decoder
from rookery.controller.views import JobView
from rookery.errors import UserError
from rookery.scheduling.job_rules import followed_version
from rookery.storage.repositories import jobs, tenants

EVERY = 2
SELF_PLAY: dict[str, Any] = {
    "player": {"rank": 4},
    "opponent": {"train": False, "follows": {"policy": "player", "every": EVERY}},
}
JOB: dict[str, Any] = {"policies": SELF_PLAY, "stop__steps": 5, "checkpoints": {"keep_last": 1, "keep_best": False}}


def game(message: protocol.Reset | protocol.StepEpisode) -> dict[str, Any] | None:
    """The player and the opponent reply in turn, twice each; the player wins by the longer words."""
    if isinstance(message, protocol.Reset):
        return None
    if message.turn < 3:
        speaker = "player" if message.turn == 1 else "opponent"
        return {"messages": [user_message(f"now {speaker}")], "policy": speaker}
    words = [len(text.content) for text in message.messages if text.role == "assistant"]
    return {"done": True, "rewards": {"player": float(words[0] + words[2] > words[1] + words[3])}}


def results(service: Service, job: str) -> dict[str, EpisodeResult]:
    found = service.database.read(jobs.recent_episodes, "alice", job, 100)
    return {row.id: episode_result_decoder.decode(row.trajectories) for _, row in found}


def versions_of(result: EpisodeResult, name: str) -> set[int]:
    part = result.of(name)
    assert part is not None
    return part.versions


def text_of_head(service: Service, job: str) -> str:
    return service.artifacts.path(chain(service, job, "player")[-1].hash, ADAPTER).read_text()


async def test_every_look_at_a_job_that_is_taken_up_again_sees_its_committed_steps(service: Service) -> None:
    """Its steps, rewards and versions are read back one after the other; none is shown before it is known."""
    await service.join(script=game)
    job = await submit(service, **JOB | {"stop__steps": 100})
    await eventually(lambda: service.database.read(jobs.get_job, "alice", job).step > 4)
    await service.crash()
    queries = (await service.start()).queries
    seen = []
    while (runner := service.controller.jobs.runners[job]).job is None or not runner.job.recovered:
        seen.append(await queries.show("alice", job))
    seen.append(await queries.show("alice", job))

    def figures(view: JobView) -> object:
        return view.step, view.rewards, view.counters, [(one.name, one.version) for one in view.policies]

    assert len(seen) > 1 and seen[-1].step >= 4
    assert [figures(view) for view in seen] == [figures(seen[-1])] * len(seen)


async def test_follower_plays_the_version_of_the_last_multiple_and_learns_nothing(service: Service) -> None:
    worker, _ = await service.join(script=game)
    job = await submit(service, **JOB)
    view = await service.ends(job)
    assert view.reason == "5 steps" and (view.step, view.steps) == (5, 5)
    assert [(policy.name, policy.version, policy.follows, policy.step) for policy in view.policies] == [
        ("player", 5, "", 5),
        ("opponent", 5, "player", None),  # the job is over: version 4 is deleted
    ]
    seen = set()
    for result in results(service, job).values():
        (player,) = versions_of(result, "player")
        assert versions_of(result, "opponent") == {player // EVERY * EVERY}
        seen.add((player, player // EVERY * EVERY))
    assert seen == {(0, 0), (1, 0), (2, 2), (3, 2), (4, 4)}
    assert [policy.name for policy in service.database.read(jobs.policies, "alice", job)] == ["player"], (
        "it has no weights"
    )
    replies = {
        tuple(t.tokens): t for r in results(service, job).values() if (p := r.of("player")) for t in p.trajectories
    }
    members = [m for batch in trained(worker, service, job, "player") for unit in batch.groups for m in unit.members]
    assert members
    for member in members:
        assert [bool(weight) for weight in member.weights] == replies[tuple(member.tokens)].mask
    assert [row.version for row in chain(service, job, "player") if row.kept] == [5]
    with pytest.raises(UserError, match=r"it replies with versions of player; give .*/player@VERSION"):
        await service.controller.completions.find("alice", f"{job}/opponent")


async def test_running_job_shows_the_version_of_its_follower_and_retention_keeps_it(service: Service) -> None:
    worker, _ = await service.join(script=game)
    job = await submit(service, **JOB)
    shown: dict[int, tuple[int, list[int]]] = {}

    async def look(op: Any) -> None:
        if isinstance(op, protocol.OptimStep):
            view = await service.controller.queries.show("alice", job)
            kept = [row.version for row in chain(service, job, "player") if row.kept]
            shown[op.parent.version] = (view.policies[-1].version, kept)

    worker.answer = look
    await service.ends(job)
    assert {step: version for step, (version, _) in shown.items()} == {0: 0, 1: 0, 2: 2, 3: 2, 4: 4}
    assert shown[3][1] == [2, 3]


async def test_evaluations_meet_version_zero(service: Service) -> None:
    worker, _ = await service.join(script=game)
    job = await submit(service, **JOB, evaluation={"prompts": 1, "every": 1})
    await service.ends(job)
    evaluated = [one for one in worker.generates if "-e" in one.request]
    met = {(one.request.split("-e")[1].split("-")[0], one.adapter.version) for one in evaluated if one.adapter}
    assert met == {(str(version), played) for version in range(6) for played in {version, 0}}
    assert all("all " not in event.text for event in service.database.read(tenants.events, "alice", job, 100))


@pytest.mark.parametrize("in_flight", ["switch", "recompute"])
async def test_a_published_version_does_not_change_a_follower_in_its_reply(service: Service, in_flight: str) -> None:
    await service.join(script=game)
    changes = JOB | {"algorithm": {"group_size": 2, "groups_per_step": 1, "max_staleness": 3, "in_flight": in_flight}}
    job = await submit(service, **changes | {"stop__steps": 12})
    await service.ends(job)
    met: dict[str, set[int]] = {}
    for group, row in service.database.read(jobs.recent_episodes, "alice", job, 100):
        turns = [turn for turn in decode_turns(row.turns, "main") if turn.policy == "opponent"]
        met.setdefault(group.id, set()).update(version for turn in turns for version in turn.versions)
    assert all(len(versions) == 1 and versions <= {0, 2, 4, 6, 8, 10, 12} for versions in met.values()), met
    assert len(set().union(*met.values())) > 1


@pytest.mark.parametrize("after", [True, False])
async def test_a_crash_changes_no_version_that_a_follower_plays(tmp_path: Path, after: bool) -> None:
    calm = Service(tmp_path / "calm")
    await calm.start()
    await calm.worker(shortest=2).join()
    await calm.host(script=game, environments={"task": True}).join()
    job = await submit(calm, **JOB)
    await calm.ends(job)
    wanted = text_of_head(calm, job), {name.split("-g")[1]: result for name, result in results(calm, job).items()}
    await calm.close()
    for moment in range(14, 110, 12 + 2 * after):
        service = Service(tmp_path / str(moment))
        await service.start()
        job = await submit(service, **JOB, environment__return_timeout=5)
        await service.crash()
        await finish(service, job, calls=[moment], after=after, script=game, environments={"task": True})
        found = {name.split("-g")[1]: result for name, result in results(service, job).items()}
        assert text_of_head(service, job) == wanted[0]
        assert {name: [t.versions for t in one.trajectories] for name, one in found.items()} == {
            name: [t.versions for t in one.trajectories] for name, one in wanted[1].items()
        }
        await service.close()


async def test_a_later_version_is_followed_where_the_bytes_are_lost(service: Service) -> None:
    worker, _ = await service.join(script=game)
    stopped = JOB | {"policies": {**SELF_PLAY, "opponent": {**SELF_PLAY["opponent"]}}, "stop__steps": 9}
    stopped["policies"]["opponent"]["follows"] = {"policy": "player", "every": 4}
    job = await submit(service, **stopped)

    async def pause(op: Any) -> None:
        if isinstance(op, protocol.OptimStep) and op.parent.version == 6:
            await service.controller.pause("alice", job)

    worker.answer = pause
    await service.ends(job, "paused")
    rows = chain(service, job, "player")
    assert [row.version for row in rows if row.kept] == [4, 6]
    service.corrupt(rows[4].hash)
    worker.answer = None
    await service.controller.resume("alice", job)
    await service.ends(job)
    lines = [
        event.text for event in service.database.read(tenants.events, "alice", job, 100) if event.kind == "corrupt"
    ]
    assert len(lines) == 1 and "version 4 of player is lost" in lines[0] and "\n" not in lines[0]


# --- pure -------------------------------------------------------------------------------------------------------------


@given(steps=st.lists(st.integers(1, 4), max_size=30), every=st.integers(1, 9), data=st.data())
def test_followed_version_is_the_first_since_the_last_multiple(steps: list[int], every: int, data: Any) -> None:
    """Of versions that are kept; swapped exactly when a commit reaches or passes a multiple."""
    totals = [0]
    for step in steps:
        totals.append(totals[-1] + step)
    played = []
    for head in range(len(totals)):
        line = [(version, totals[version], True) for version in range(head, -1, -1)]
        found = followed_version(line, every)
        assert found == min(v for v in range(head + 1) if totals[v] // every == totals[head] // every)
        assert totals[head] - totals[found] < every
        kept = data.draw(st.sets(st.integers(0, head))) | {head}
        among = followed_version([(version, step, version in kept) for version, step, _ in line], every)
        assert among == min(v for v in kept if totals[v] // every == totals[head] // every)
        played.append(found)
    assert played == sorted(played)
    assert followed_version([], every) is None
