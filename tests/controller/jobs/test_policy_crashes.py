"""Jobs with several policies, drawn at random, in a service that dies at random moments: what then holds of every
policy's chain of versions, of its groups and of the masks of its tokens."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.controller.jobs.test_job import finish
from tests.controller.jobs.test_policies import chain, submit, trained
from tests.support.peers import ScriptedWorker, Service, user_message

from rookery import protocol
from rookery.controller.jobs.trajectory import EpisodeResult, Trajectory, episode_result_decoder
from rookery.storage.models import VersionRow
from rookery.storage.repositories import jobs

TRAINED = ("main", "judge", "third")
EVERY = 2


class Drawn:
    """A job, and who replies in each of its groups."""

    def __init__(self, seed: int) -> None:
        random = self.random = Random(seed)
        self.trained = TRAINED[: random.choice((2, 3))]
        self.commit_every = random.choice((1, 1, 2))
        self.steps = {name: random.randint(2, 4) for name in self.trained}
        self.groups = {name: random.randint(1, 3) for name in self.trained}
        self.staleness = {name: random.randint(self.commit_every - 1, 3) for name in self.trained}
        policies: dict[str, Any] = {
            name: {
                "rank": 4,
                "algorithm": {"groups_per_step": self.groups[name], "max_staleness": self.staleness[name],
                              "micro_batch": random.choice((0, 2)), "buffer": random.choice(("edf", "fifo"))},
                "stop": {"steps": self.steps[name]},
            }
            for name in self.trained
        }  # fmt: skip
        policies["opponent"] = {"train": False, "follows": {"policy": "main", "every": EVERY}}
        policies["base"] = {"train": False, "base": True}
        names = random.sample(list(policies), len(policies))
        self.policies = {name: policies[name] for name in names}

    async def submit(self, service: Service) -> str:
        return await submit(
            service, policies=self.policies, stop__steps=9, checkpoints__commit_every=self.commit_every,
            checkpoints__keep_last=99, environment__return_timeout=5,
        )  # fmt: skip

    def speakers(self, episode: str) -> list[str]:
        """Policies that reply, the same in all episodes of a group. Each policy that trains replies in most groups."""
        random = Random(episode.split("-g")[1].split("-")[0])
        present = [name for name in self.trained if random.random() < 0.7] or [random.choice(self.trained)]
        return random.choices([*present, "opponent", "base"], k=random.randint(0, 2)) + random.sample(
            present, len(present)
        )

    def play(self, message: protocol.Reset | protocol.StepEpisode) -> dict[str, Any]:
        speakers, turn = self.speakers(message.episode), getattr(message, "turn", -1)
        if turn + 1 < len(speakers):
            return {"messages": [user_message(f"turn {turn}")], "policy": speakers[turn + 1]}
        said = len(getattr(message, "text", ""))
        rewards = {name: float((said + number) % 3) for number, name in enumerate(self.trained) if name in speakers}
        return {"done": True, "reward": 0.5, "rewards": rewards}

    def moments(self) -> list[int]:
        """Calls of the writer after which the service dies."""
        return [self.random.randint(8, 110) for _ in range(self.random.randint(1, 3))]


def check_masks(result: EpisodeResult, policies: list[str]) -> None:
    """Each sampled token is of one policy, with its log-probability and version; no other token is of any."""
    parts = {name: part for name in policies if (part := result.of(name)) is not None}
    assert set(parts) == {*result.speakers}
    assert sum((part.sampled for part in parts.values()), Counter[int]()) == result.sampled
    for at, whole in enumerate(result.trajectories):
        trajectories = [part.trajectories[at] for part in parts.values()]
        owners = [sum(one.mask[place] for one in trajectories) for place in range(len(whole.mask))]
        assert owners == [int(flag) for flag in whole.mask]
        for one in trajectories:
            assert (one.prompt, one.tokens) == (whole.prompt, whole.tokens)
            for place, mine in enumerate(one.mask):
                wanted = (whole.logprobs[place], whole.versions[place]) if mine else (0.0, -1)
                assert (one.logprobs[place], one.versions[place]) == wanted
                assert not mine or any(reply.start <= place < reply.stop for reply in one.replies)


def check_policy(drawn: Drawn, name: str, id: str, versions: list[VersionRow], groups: list[dict[str, Any]]) -> None:
    """The steps of its chain add up, and each version consumed the groups of its steps, each once."""
    steps = [version.step for version in versions]
    assert steps[0] == 0 and steps[-1] == drawn.steps[name]
    assert all(1 <= after - before <= drawn.commit_every for before, after in pairwise(steps))
    uses = [version for row in groups if (version := (row["uses"] or {}).get(id)) is not None and version >= 0]
    wanted = {number: drawn.groups[name] * (steps[number] - steps[number - 1]) for number in range(1, len(steps))}
    assert Counter(uses) == wanted


def check(drawn: Drawn, service: Service, worker: ScriptedWorker, job: str) -> None:
    groups = service.groups(job)
    assert [row["ordinal"] for row in groups] == list(range(len(groups)))
    assert len({row["prompt"] for row in groups}) == len(groups)
    versions = {name: chain(service, job, name) for name in drawn.trained}
    ids = {name: service.database.read(jobs.get_policy, "alice", job, name).id for name in drawn.trained}
    for name in drawn.trained:
        check_policy(drawn, name, ids[name], versions[name], groups)
    found = service.database.read(jobs.recent_episodes, "alice", job, 10_000)
    results = {row.id: episode_result_decoder.decode(row.trajectories) for _, row in found if row.trajectories}
    assert results
    for result in results.values():
        check_masks(result, list(drawn.policies))
    steps = [version.step for version in versions["main"]]
    followed = {
        next(v for v, step in enumerate(steps) if step // EVERY == k) for k in {step // EVERY for step in steps}
    }
    for row in groups:
        played = [result for id, result in results.items() if id.startswith(f"{row['id']}-")]
        for part in (part for result in played if (part := result.of("opponent")) is not None):
            assert part.versions <= followed
        for name in drawn.trained:
            used = (row["uses"] or {}).get(ids[name])
            parts = [part for result in played if (part := result.of(name)) is not None]
            if used is not None and used > 0:
                oldest = min(version for part in parts for version in part.versions)
                age = versions[name][used - 1].step - versions[name][oldest].step
                assert 0 <= age <= drawn.staleness[name]
    for name in drawn.trained:
        mine = {
            (tuple(one.prompt), tuple(one.tokens)): [float(flag) for flag in one.mask]
            for result in results.values() if (part := result.of(name)) is not None for one in part.trajectories
        }  # fmt: skip
        for batch in trained(worker, service, job, name):
            for unit in batch.groups:
                for member in unit.members:
                    weighed = [float(weight != 0) for weight in member.weights]
                    assert weighed == mine.get((tuple(unit.prompt), tuple(member.tokens)), weighed)


@pytest.mark.parametrize("seed", [*range(6), *(pytest.param(seed, marks=pytest.mark.heavy) for seed in range(6, 60))])
async def test_chains_groups_and_masks_hold_after_any_crashes(tmp_path: Path, seed: int) -> None:
    drawn = Drawn(seed)
    service = Service(tmp_path)
    await service.start()
    job = await drawn.submit(service)
    await service.crash()
    after = drawn.random.random() < 0.5
    worker = await finish(
        service, job, calls=drawn.moments(), after=after, script=drawn.play, environments={"task": True}
    )
    check(drawn, service, worker, job)
    await service.close()


# --- pure -------------------------------------------------------------------------------------------------------------


Part = tuple[str, int, int]
"""The speaker, empty for the environment, the number of tokens, and the version of the first one."""

PARTS = st.lists(
    st.tuples(st.sampled_from(["", "a", "b", "c"]), st.integers(0, 5), st.integers(0, 4)), min_size=1, max_size=12
)


@given(st.lists(PARTS, min_size=1, max_size=3))
def test_masks_of_any_episode_are_disjoint_and_their_union_is_all_sampled_tokens(episode: list[list[Part]]) -> None:
    """Also of replies without a token, of tokens of version 0, and of several trajectories."""
    trajectories, speakers, number = [], list[str](), 0
    for parts in episode:
        whole = Trajectory(prompt=[1, 2, 3])
        for speaker, count, version in parts:
            tokens = list(range(number, number + count))
            number += count
            if speaker:
                log = protocol.TokenLog(tokens, [-1.0 - n for n in tokens], [version + n % 2 for n in tokens])
                whole.append_action(log, speaker)
                speakers.append(speaker)
            else:
                whole.append_observation(tokens)
        trajectories.append(whole)
    replies = [""] * len(speakers)
    result = EpisodeResult(trajectories, [], replies, 0.25, {}, "done", {}, [], {"a": 1.0}, speakers)
    check_masks(result, ["a", "b", "c"])
    for name in ("a", "b", "c", "nobody"):
        part = result.of(name)
        assert (part is None) == (name not in speakers)
        if part is not None:
            assert part.reward == (1.25 if name == "a" else 0.25)
            assert part.num_action_tokens == sum(
                count for parts in episode for speaker, count, _ in parts if speaker == name
            )
