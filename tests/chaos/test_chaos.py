"""``kill -9`` of everything that can be killed, at random moments of real runs: what must be true afterwards is.

Each round is fixed by its seed, which a failure names. ``ROOKERY_CHAOS_ROUNDS`` makes more of them.
"""

from __future__ import annotations

import json
import math
import os
import random
import signal
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest
from tests.chaos.driver import PATIENCE_SECONDS, Deployment, Steady, wait_until
from tests.support.small_model import save_small_model

from rookery.client import Job, Record
from rookery.controller.jobs.trajectory import EpisodeResult, episode_result_decoder
from rookery.environments.builtins import find
from rookery.environments.datasets import PromptDataset
from rookery.worker.model.convert import prepare

pytestmark = [pytest.mark.heavy, pytest.mark.timeout(8 * PATIENCE_SECONDS)]

ROUNDS = int(os.environ.get("ROOKERY_CHAOS_ROUNDS", "1"))

VICTIMS = ["worker", "environments", "host", "joined", "service", "everything"]
"""The service's own worker and environment host, a user's host, a worker that joined, the service, all of them."""

DEATHS = 4
"""Of the service, where nothing else dies."""

LATER_SECONDS = 0.4
"""Victims die up to this long after the event that dooms them: an episode, a step and a commit fit in it."""

RETURN_SECONDS = 20
"""The time for which episodes that cannot be replayed wait for a host of unknown state."""

STEPS, GROUPS, MEMBERS = 6, 2, 4

ROWS = [{"prompt": f"Write of {number}.", "answer": ""} for number in range(7)]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The cache, with a small model in it, and that model's name."""
    folder = tmp_path_factory.mktemp("chaos")
    model = save_small_model(folder / "small")
    prepare(str(model), folder / "cache")
    return folder / "cache", model


def submit(town: Deployment, kind: str, *, seed: int, max_staleness: int = 0) -> Job:
    """A job whose rewards differ within groups: ``jsonl`` runs in the service's own host, the others in a user's."""
    verifier = {"name": "regex", "pattern": "[a-m].*[n-z]"}
    own: dict[str, Any] = {"hosted": kind, "max_turns": Steady.turns}
    if kind == "fickle":
        own["return_timeout"] = RETURN_SECONDS
    return town.client.submit(
        {
            "name": kind,
            "base_model": town.model,
            "environment": {"id": "jsonl", "rows": ROWS, "verifier": verifier} if kind == "jsonl" else own,
            "policies": {"main": {"rank": 4, "optimizer": {"lr": 0.01}}},
            "algorithm": {"group_size": MEMBERS, "groups_per_step": GROUPS, "max_staleness": max_staleness},
            "sampling": {"max_tokens": 48 if kind == "jsonl" else 16},
            "stop": {"steps": STEPS},
            "seed": seed,
        }
    )


class JobRecord:
    """A job that is over, as it was stored: the rows of its versions, groups and episodes, and its metrics."""

    def __init__(self, town: Deployment, job: Job) -> None:
        self.row = town.rows("select * from jobs where id = ?", job.id)[0]
        self.spec = json.loads(self.row["spec"])
        self.policy = town.rows("select * from policies where job = ?", job.id)[0]
        self.versions = town.rows("select * from versions where policy = ? order by version", self.policy["id"])
        self.groups = town.rows("select * from groups where job = ? order by ordinal", job.id)
        self.episodes = town.rows("select * from episodes where job = ? order by group_id, member", job.id)
        self.metrics = [
            {**json.loads(row["metrics"]), "version": row["version"]}
            for row in town.rows("select * from steps where job = ? order by step", job.id)
        ]
        ordinals = {group["id"]: group["ordinal"] for group in self.groups}
        self.outcomes: dict[tuple[int, int], EpisodeResult] = {
            (ordinals[episode["group_id"]], episode["member"]): episode_result_decoder.decode(episode["trajectories"])
            for episode in self.episodes
            if episode["state"] == "done"
        }

    @property
    def sampled(self) -> int:
        """Tokens of all episodes that ended well."""
        return sum(outcome.num_action_tokens for outcome in self.outcomes.values())

    def check(self) -> None:
        """Whatever died meanwhile: the job completed, and everything that is promised of it is true."""
        assert (self.row["state"], self.row["reason"]) == ("completed", f"{STEPS} steps")
        self._versions_are_a_chain()
        self._no_prompt_was_skipped_or_repeated()
        self._groups_train_once()
        self._tokens_are_fresh_enough()

    def _versions_are_a_chain(self) -> None:
        numbers = list(range(STEPS + 1))
        assert [version["version"] for version in self.versions] == numbers
        assert [version["parent"] for version in self.versions] == [None, *numbers[:-1]]
        assert [version["step"] for version in self.versions] == numbers
        assert self.policy["head_version"] == STEPS
        assert [(row["step"], row["version"]) for row in self.metrics] == [(step, step) for step in numbers[1:]]

    def _no_prompt_was_skipped_or_repeated(self) -> None:
        count = self.row["cursor"]
        assert [group["ordinal"] for group in self.groups] == list(range(count))
        environment = Steady()
        if self.spec["environment"].get("id") == "jsonl":
            options = {"rows": ROWS, "verifier": self.spec["environment"]["verifier"]}  # rows are stored as a dataset
            environment = find("jsonl")(options)
        order, _ = PromptDataset(environment, "train").take(0, count, self.spec["seed"], True, wrap=True)
        assert [group["prompt"] for group in self.groups] == order

    def _groups_train_once(self) -> None:
        states = Counter(group["state"] for group in self.groups)
        assert set(states) <= {"consumed", "failed", "dropped"} and states["consumed"] == STEPS * GROUPS
        consumed = Counter(group["consumed_by"] for group in self.groups if group["state"] == "consumed")
        assert consumed == dict.fromkeys(range(1, STEPS + 1), GROUPS)
        assert all(group["consumed_by"] is None for group in self.groups if group["state"] != "consumed")
        members = Counter(episode["group_id"] for episode in self.episodes)
        assert members == {group["id"]: MEMBERS for group in self.groups}
        for row in self.metrics:  # what was trained on is what is stored
            rewards = [outcome.reward for outcome in self._consumed(row["version"])]
            assert row["episodes"] == len(rewards)
            assert row["reward"] == pytest.approx(sum(rewards) / len(rewards))

    def _tokens_are_fresh_enough(self) -> None:
        oldest = self.spec["algorithm"]["max_staleness"]
        for version in range(1, STEPS + 1):
            for outcome in self._consumed(version):
                assert all(0 <= version - 1 - began <= oldest for began in outcome.versions)
                for trajectory in outcome.trajectories:
                    for own, applied, value in zip(
                        trajectory.mask, trajectory.versions, trajectory.logprobs, strict=True
                    ):
                        assert (applied >= 0, value <= 0, math.isfinite(value)) == (own, True, True)

    def _consumed(self, version: int) -> list[EpisodeResult]:
        ordinals = {group["ordinal"] for group in self.groups if group["consumed_by"] == version}
        return [outcome for (ordinal, _), outcome in self.outcomes.items() if ordinal in ordinals]

    def assert_equal_episodes(self, other: JobRecord) -> int:
        """Episodes of both, sampled from the same weights, are equal to the last bit. Returns their number."""
        mine, theirs = ([version["hash"] for version in story.versions] for story in (self, other))
        alike = 0
        for outcome in self.outcomes.keys() & other.outcomes.keys():
            # all but where and how long it ran
            one, two = (
                msgspec.structs.replace(story.outcomes[outcome], seconds={}, steps=[]) for story in (self, other)
            )
            if [mine[version] for version in one.versions] == [theirs[version] for version in two.versions]:
                assert one == two, f"episode {outcome} differs"
                alike += 1
        return alike


Moment = tuple[int, float]
"""Episodes that have ended, and seconds after the last of them."""


def moments(chance: random.Random, jobs: list[Job], count: int) -> list[Moment]:
    """Somewhere in the run of these jobs, in their order."""
    episodes = len(jobs) * STEPS * GROUPS * MEMBERS
    ended = sorted(chance.sample(range(episodes * 9 // 10), count))
    return [(number, chance.uniform(0, LATER_SECONDS)) for number in ended]


def over(jobs: list[Job]) -> bool:
    return all(job.show().state not in ("queued", "running") for job in jobs)


def end_of(town: Deployment, jobs: list[Job]) -> list[JobRecord]:
    """Waits until the jobs are over; none may have stopped by itself."""
    for job in jobs:
        wait_until(lambda job=job: over([job]), f"{job.name} is over: {job.show()}")
        view = job.show()
        assert view.state == "completed", (view.reason, [f"{event.kind} {event.text}" for event in job.events()])
    return [JobRecord(town, job) for job in jobs]


# --- kill -9 ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(ROUNDS))
def test_kills_at_random_moments(home: tuple[Path, Path], tmp_path: Path, seed: int) -> None:
    cache, model = home
    chance = random.Random(f"chaos {seed}")
    victims = chance.choices(VICTIMS, k=len(VICTIMS)) if seed else chance.sample(VICTIMS, len(VICTIMS))
    print(f"seed {seed}: {', '.join(victims)}")
    with Deployment(tmp_path, cache, model, workers=1) as town:
        town.join("joined")
        town.host()
        calm = end_of(town, [submit(town, kind, seed=seed) for kind in ("jsonl", "steady")])
        jobs = [submit(town, kind, seed=seed) for kind in ("jsonl", "steady")]
        jobs.append(submit(town, "fickle", seed=seed, max_staleness=2))
        for victim, moment in zip(victims, moments(chance, jobs, len(victims)), strict=True):
            town.wait_for_episodes(jobs, moment)
            print(f"{victim} dies when {town.episodes_ended(jobs)} episodes have ended")
            town.kill(victim)
        stories = end_of(town, jobs)
        for story in [*calm, *stories]:
            story.check()
        for before, after in zip(calm, stories, strict=False):
            alike = after.assert_equal_episodes(before)
            print(f"{alike} of {len(after.outcomes)} episodes compared")
            assert alike >= GROUPS * MEMBERS  # those of version 0 at least: its weights are a function of the seed
            assert len(after.outcomes) == STEPS * GROUPS * MEMBERS  # no episode of theirs was lost
        town.shut_down()
        town.serve()
        assert town.staged_files() == set()


@pytest.mark.parametrize("count", [1, 3])
def test_service_crash_loses_no_token(home: tuple[Path, Path], tmp_path: Path, count: int) -> None:
    """The workers outlive it and keep what they sampled; the same job gives the same text and the same weights."""
    joined = JOINED[:count]
    # Where there are others, a request that moves leaves what was not sent yet, and a worker that comes back late finds
    # its requests with them: some tokens are sampled twice, none is received twice.
    most = 1.0 if count == 1 else 1.05
    cache, model = home
    chance = random.Random("service")
    with Deployment(tmp_path, cache, model, workers=0) as town:
        for name in joined:
            town.join(name)
        for name in joined:
            town.wait_serving(name)
        calm = end_of(town, [submit(town, "jsonl", seed=3)])[0]
        before = generated(town, calm.sampled, joined)
        assert calm.sampled <= before <= most * calm.sampled
        jobs = [submit(town, "jsonl", seed=3), submit(town, "jsonl", seed=4, max_staleness=2)]
        for moment in moments(chance, jobs, DEATHS):
            town.wait_for_episodes(jobs, moment)
            wait_until(lambda: busy(town, joined) or over(jobs), "every worker has something to lose")
            town.kill("service")
        strict, ahead = end_of(town, jobs)
        assert strict.assert_equal_episodes(calm) == len(calm.outcomes) == STEPS * GROUPS * MEMBERS
        for story in (strict, ahead):
            story.check()
            assert json.loads(story.row["counters"])["tokens"] == story.sampled
        tokens = before + strict.sampled + ahead.sampled
        assert tokens <= generated(town, tokens, joined) <= most * tokens
        for name in joined:
            assert "resumes at token" in town.log(name), "it was found again by the service after"


JOINED = ("one", "two", "three")


def busy(town: Deployment, workers: Sequence[str]) -> bool:
    """Whether each of these has requests. Which one is given any is for the scheduler: moments alone may miss one."""
    return {row.name for row in town.client.workers() if row.requests} >= set(workers)


def generated(town: Deployment, least: int, workers: Sequence[str] = JOINED) -> int:
    """Tokens that these workers' processes have sampled together, once they have reported ``least``."""

    def total() -> int:
        return sum(int(town.wait_serving(worker).beat["generated"]) for worker in workers)

    wait_until(lambda: total() >= least, f"{', '.join(workers)} have sampled {least} tokens")
    return total()


# --- a worker that stops, and one that is told to end -----------------------------------------------------------------

REQUESTS = 8
FIRST_TOKENS = 60
"""Received of all requests together before a worker is acted on."""


def ask(town: Deployment, pool: ThreadPoolExecutor) -> list[Future[Record]]:
    return [
        pool.submit(town.client.sample, town.model, "Go on.", max_tokens=400, seed=seed) for seed in range(REQUESTS)
    ]


def texts(replies: list[Future[Record]]) -> list[Any]:
    return [(reply.tokens, reply.logprobs) for reply in (future.result(PATIENCE_SECONDS) for future in replies)]


def test_requests_of_a_stopped_or_draining_worker_resume_elsewhere(home: tuple[Path, Path], tmp_path: Path) -> None:
    cache, model = home
    with Deployment(tmp_path, cache, model, workers=0) as town, ThreadPoolExecutor(REQUESTS) as pool:
        town.join("one")
        town.wait_serving("one")
        calm = texts(ask(town, pool))
        tokens = sum(len(reply[0]) for reply in calm)
        assert town.metric_total("sampled_tokens") == tokens

        replies = ask(town, pool)
        wait_until(lambda: town.metric_total("sampled_tokens") >= tokens + FIRST_TOKENS, "tokens of every kind came")
        town.joined["one"].send_signal(signal.SIGSTOP)
        wait_until(lambda: town.worker("one").state == "suspect", "a worker that is stopped is suspect")
        received = town.metric_total("sampled_tokens") - tokens
        town.join("two")
        assert texts(replies) == calm
        assert town.metric_total("sampled_tokens") == 2 * tokens
        assert generated(town, tokens - received, ["two"]) == tokens - received

        town.joined["one"].send_signal(signal.SIGCONT)
        town.wait_serving("one")
        losses = town.metric_total("worker_losses")
        replies = ask(town, pool)
        wait_until(
            lambda: town.metric_total("sampled_tokens") >= 2 * tokens + FIRST_TOKENS, "tokens of every kind came"
        )
        process = town.joined.pop("two")
        process.terminate()
        assert process.wait(PATIENCE_SECONDS) == 0, town.log_tail("two")
        assert texts(replies) == calm
        assert town.metric_total("sampled_tokens") == 3 * tokens
        assert town.metric_total("worker_losses") == losses
        assert not psutil.pid_exists(process.pid)
