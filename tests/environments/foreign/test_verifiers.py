"""``{id: verifiers}`` with the real library, which has an environment of its own: ``make test-environments``."""

from __future__ import annotations

import asyncio
import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.support.faces import ThreadedWorker, job, served, tokenizer, write_model
from tests.support.waiting import until

from rookery import protocol
from rookery.client import Client
from rookery.environments.base import Environment, Reply, Split, Step
from rookery.environments.builtins import find
from rookery.environments.episodes import Episodes, UserCodeExecutor
from rookery.environments.foreign.verifiers import parse_verifiers, set_verifiers
from rookery.errors import RookeryError, UserError
from rookery.tokenization.registry import CONFIG

ROOT = Path(__file__).parents[3]
PYTHON = ROOT / ".bench" / "verifiers" / "bin" / "python"
OLD = ROOT / ".bench" / "verifiers-0.1" / "bin" / "python"
PACKAGES = ROOT / ".bench" / "verifiers" / "lib"

SECONDS = 300.0

real = [
    pytest.mark.heavy,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not PYTHON.exists(), reason="verifiers is not here: make test-environments"),
]


@contextmanager
def installed() -> Iterator[None]:
    """The package of these tests among those of the library."""
    [site] = PACKAGES.glob("python*/site-packages")
    shutil.copy(Path(__file__).with_name("sums_v1.py"), site)
    yield


def asked(**changes: Any) -> dict[str, Any]:
    environment = {
        "id": "verifiers", "package": "sums-v1", "config": {"taskset": {"most": 6}}, "max_turns": 2, "eval_last": 2,
        "step_timeout": "5m", **changes,
    }  # fmt: skip
    return job(environment=environment, sampling={"max_tokens": 40}, evaluation={"prompts": 2})


class TestReal:
    pytestmark = real

    def test_a_job_trains_on_the_tokens_of_traces(self, tmp_path: Path) -> None:
        settings = {"verifiers": f"{PYTHON} sums-v1"}
        with installed(), served(tmp_path, **settings) as service, Client(service.url, service.key) as client:
            token = (service.settings.data / "worker.token").read_text(encoding="utf-8").strip()
            for changes, said in (
                ({"package": "others"}, "one of the administrator's: sums-v1"),
                ({"tokenizer": "/etc"}, "environment.tokenizer: the service fills it in"),
                ({"policies": ["main"]}, "environment.policies: the service fills it in"),
            ):
                with pytest.raises(RookeryError, match=said):
                    client.submit(asked(**changes))
            with ThreadedWorker(service.url, token, tokenizer(tmp_path), ("1 2 3 4 5 6 7", "no")):
                made = client.submit(asked())
                until(lambda: made.show().state in ("completed", "paused", "failed"), patience=SECONDS)
                assert made.show().state == "completed", made.show()
                rows = list(made.metrics(follow=False))
                refused = client.submit(asked(config={"agent": {"harness": {"id": "bash"}}}))
                until(lambda: refused.show().state == "paused", patience=SECONDS)
                assert "runs a model's programs" in refused.show().reason
        assert rows and all(0 < row.reward < 1 for row in rows), rows
        assert {"reward/length", "reward/reward_right"} <= set(rows[0]), rows[0]

    def test_each_role_but_the_trained_one_is_a_policy_of_its_name(self, tmp_path: Path) -> None:
        settings = {"verifiers": f"{PYTHON} sums-v1"}
        roles = {"config": {"id": "user-sim", "user": {"max_turns": 2}}, "max_turns": 6}
        config = write_model(tmp_path / "cache") / CONFIG
        config.write_text(config.read_text().replace("512", "4096"))  # the instructions of the simulated user are long
        with installed(), served(tmp_path, **settings) as service, Client(service.url, service.key) as client:
            token = (service.settings.data / "worker.token").read_text(encoding="utf-8").strip()
            with ThreadedWorker(service.url, token, tokenizer(tmp_path), ("1 2 3 4 5 6 7", "no")):
                for changes, said in (
                    (roles, "environment.agent: given '', allowed: one of assistant, user, whose replies are trained"),
                    (
                        {**roles, "agent": "assistant"},
                        "environment.package: the environment has the roles assistant, user; each but assistant is a"
                        " policy of the job with its name: add policies.user",
                    ),
                ):
                    refused = client.submit(asked(**changes))
                    until(lambda one=refused: one.show().state == "paused", patience=SECONDS)
                    assert said in refused.show().reason
                wanted = asked(**roles, agent="assistant")
                wanted["policies"] |= {"user": {"train": False, "base": True}}
                made = client.submit(wanted)
                until(lambda: made.show().state in ("completed", "paused", "failed"), patience=SECONDS)
                assert made.show().state == "completed", made.show().reason
                episode = made.episode(made.episodes()[0].episode)
        assert {turn.policy for turn in episode.turns} == {"main", "user"}

    def test_an_episode_that_is_cut_has_the_reward_of_the_library(self, tmp_path: Path) -> None:
        """Here before the simulated user answers: the only reply to its question is judged."""
        config = write_model(tmp_path / "cache") / CONFIG
        config.write_text(config.read_text().replace("512", "4096"))
        settings = {"verifiers": f"{PYTHON} sums-v1"}
        with installed(), served(tmp_path, **settings) as service, Client(service.url, service.key) as client:
            token = (service.settings.data / "worker.token").read_text(encoding="utf-8").strip()
            with ThreadedWorker(service.url, token, tokenizer(tmp_path), ("1 2 3 4 5 6 7", "no")):
                wanted = asked(config={"id": "user-sim", "user": {"max_turns": 2}}, max_turns=2, agent="assistant")
                wanted["policies"] |= {"user": {"train": False, "base": True}}
                made = client.submit(wanted)
                until(lambda: made.show().state in ("completed", "paused", "failed"), patience=SECONDS)
                assert made.show().state == "completed", made.show().reason
                episodes = [made.episode(one.episode) for one in made.episodes()]
        assert all([turn.policy for turn in one.turns] == ["user", "main"] for one in episodes)
        right = {one.messages[one.turns[1].message].content.startswith("1"): one.reward for one in episodes}
        assert right == {True: 1.0, False: 0.0} and {one.finish for one in episodes} == {"max_turns"}

    @pytest.mark.skipif(not OLD.exists(), reason="verifiers 0.1 is not here: make test-environments")
    def test_classes_of_the_old_library_need_the_lines_of_the_docs(self) -> None:
        script, page = Path(__file__).with_name("old_classes.py"), ROOT / "docs" / "environments.md"
        folders = [str(ROOT / "src"), *(path for path in sys.path if path.endswith("site-packages"))]
        ran = subprocess.run([str(OLD), str(script), str(page), *folders], capture_output=True, text=True, check=False)
        assert ran.returncode == 0, ran.stderr[-3000:]
        found = json.loads(ran.stdout.splitlines()[-1])
        assert [one["role"] for one in found["first"]] == ["system", "user"]
        assert found["done"] and found["reward"] == 2.25 and found["metrics"]["known"] == 1


class Tokens(Environment):
    """Renders itself: each reply is continued once."""

    deterministic = True

    def prompts(self, split: Split) -> list[Any]:
        return [{"number": number} for number in range(8)]

    def reset(self, prompt: Any, seed: int) -> Step:
        self.tokens = [65, 66, 67 + prompt["number"]]
        return Step(tokens=self.tokens)

    def step(self, reply: Reply) -> Step:
        assert len(reply.logprobs) == len(reply.tokens) > 0 and reply.finish == "stop"
        if reply.turn == 1:
            return Step(reward=float(len(reply.tokens) > 2), done=True)
        self.tokens = [*self.tokens, *reply.tokens, 68]
        return Step(tokens=self.tokens, metrics={"again": 1.0})


def test_an_environment_may_render_itself(tmp_path: Path) -> None:
    with served(tmp_path) as service, Client(service.url, service.key) as client, ThreadedWorker.of(service):
        made = client.train(**{**job(), "environment": {"hosted": Tokens(), "max_turns": 2}, "evaluation": {}})
        assert made.wait(timeout=100).state == "completed"
        rows = list(made.metrics(follow=False))
        shown = [made.episode(row.episode) for row in made.episodes()]
    assert all(row["turns_mean"] == 2 and row["reward/again"] == 1 for row in rows), rows
    assert all(len(one.trajectories) == 1 for one in shown), "the second turn continues the first"


class RewardsLast(Tokens):
    """Never ends an episode, and knows what it earned."""

    scores_when_cut = True

    def step(self, reply: Reply) -> Step:
        if reply.finish in ("max_turns", "context"):
            assert reply.turn > 0 and not reply.tokens and not reply.text
            return Step(reward=0.25 * reply.turn, metrics={reply.finish: 1.0}, rewards={"main": 0.5})
        self.tokens = [*self.tokens, *reply.tokens, *[68] * self.prompt["number"]]
        return Step(tokens=self.tokens, reward=0.125, metrics={"again": 1.0})


@pytest.mark.parametrize(("number", "finish", "turns"), [(1, "max_turns", 3), (300, "context", 2)])
def test_an_episode_that_is_cut_has_the_last_reward_of_its_environment(
    number: int, finish: str, turns: int, tmp_path: Path
) -> None:
    class One(RewardsLast):
        def prompts(self, split: Split) -> list[Any]:
            return [{"number": number}]

        def reset(self, prompt: Any, seed: int) -> Step:
            self.tokens = [65, 66]
            return Step(tokens=self.tokens)

    with served(tmp_path) as service, Client(service.url, service.key) as client, ThreadedWorker.of(service):
        made = client.train(**{**job(), "environment": {"hosted": One(), "max_turns": 3}, "evaluation": {}})
        assert made.wait(timeout=100).state == "completed", made.show().reason
        episode = made.episode(made.episodes()[0].episode)
    assert episode.reward == 0.125 * turns + 0.25 * turns + 0.5 and episode.metrics[finish] == 1.0
    assert [turn.reward for turn in episode.turns] == [0.125] * (turns - 1) + [0.125 + 0.25 * turns]
    assert episode.turns[-1].rewards == {"main": 0.5} and episode.finish == finish


@pytest.mark.parametrize("tokens", [[True], [1.5], [-1], ["a"]])
def test_tokens_that_are_no_ids_fail_the_episode(tokens: list[Any], tmp_path: Path) -> None:
    class Wrong(Tokens):
        def reset(self, prompt: Any, seed: int) -> Step:
            return Step(tokens=tokens)

    async def reset() -> protocol.Observation:
        async def prototype(name: str, options: dict[str, Any]) -> Environment:
            return Wrong()

        def nobody(*asked: Any) -> Any:
            raise AssertionError

        message = protocol.Reset(call="", episode="e", job="j", environment="n", options={}, prompt=b"{}", seed=0)
        return await Episodes(UserCodeExecutor(), prototype, nobody, nobody, nobody, nobody).reset(message)

    assert "expected a list of token ids" in asyncio.run(reset()).error


def test_a_job_without_the_setting_is_refused() -> None:
    set_verifiers("")
    with pytest.raises(UserError, match="ROOKERY_VERIFIERS"):
        find("verifiers").check({"package": "sums-v1"})


@pytest.mark.parametrize("text", ["python sums", "/usr/bin/python3", "sums-v1"])
def test_a_setting_in_another_form_is_refused(text: str) -> None:
    with pytest.raises(UserError, match="PYTHON PACKAGE"):
        parse_verifiers(text)


def test_options_are_checked_before_anything_starts() -> None:
    set_verifiers("/usr/bin/python3 sums-v1")
    try:
        find("verifiers").check({"package": "sums-v1"})
        for options in (
            {},
            {"package": "other"},
            {"package": "sums-v1", "more": 1},
            {"package": "sums-v1", "config": 1},
        ):
            with pytest.raises(UserError, match=r"environment\."):
                find("verifiers").check(options)
    finally:
        set_verifiers("")
