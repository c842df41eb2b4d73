"""Groups and episodes over HTTP, by the client and at the command line: what was stored is what is shown."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.support.faces import ThreadedWorker, job, served

import rookery
from rookery.cli import main
from rookery.cli.jobs import conversation_lines
from rookery.client import Client, Job
from rookery.client.report import HEIGHT, WIDTH, chart, outcome
from rookery.controller import episodes
from rookery.errors import NotFound
from rookery.server.launcher import EmbeddedService


class Guess(rookery.Environment):
    """Two turns; the second step of every third prompt fails for one of the replies."""

    def prompts(self, split: str) -> list[str]:
        return [f"guess {number}" for number in range(40)]

    async def reset(self, prompt: str, seed: int) -> list[dict[str, str]]:
        self.turn = 0
        return [{"role": "user", "content": prompt}]

    async def step(self, reply: rookery.Reply) -> rookery.Step:
        self.turn += 1
        if int(self.prompt.split()[1]) % 3 == 0 and self.turn == 2 and reply.text == "five":
            raise RuntimeError("a broken <b>tool</b>")
        good = float(reply.text == "4")
        again = [{"role": "tool", "content": "again"}] if self.turn == 1 else []
        return rookery.Step(messages=again, reward=good, done=self.turn == 2, metrics={f"turn{self.turn}": good})


@dataclass
class Recorded:
    service: EmbeddedService
    client: Client
    job: Job


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Recorded]:
    """A job that has ended."""
    with (
        served(tmp_path_factory.mktemp("episodes"), failure_rate_window=10**6) as service,
        ThreadedWorker.of(service),
        Client(service.url, service.key) as client,
    ):
        spec = job()
        made = client.train(
            base_model=spec["base_model"], environment={"hosted": Guess(), "max_turns": 2},
            policies=spec["policies"], algorithm={"group_size": 4, "groups_per_step": 3}, stop={"steps": 4},
        )  # fmt: skip
        assert made.wait().state == "completed"
        yield Recorded(service, client, client.job(made.id))


def test_step_shows_the_groups_that_it_consumed_with_advantages(recorded: Recorded) -> None:
    for row in recorded.job.metrics(follow=False):
        groups = recorded.job.groups(row.step)
        assert len(groups) == 3 and {group.consumed_by for group in groups} == {row.version}
        rewards = [one.reward for group in groups for one in group.members if one.state == "done"]
        assert sum(rewards) / len(rewards) == pytest.approx(row.reward)
        for group in groups:
            done = [one for one in group.members if one.state == "done"]
            assert group.zero_variance == (len({one.reward for one in done}) == 1)
            assert sum(one.advantage for one in done) == pytest.approx(0, abs=1e-9)
            assert all(one.advantage is None for one in group.members if one.state == "failed")
    assert recorded.job.groups(99) == []


def test_episode_has_the_reward_and_the_tokens_of_each_turn(recorded: Recorded) -> None:
    done = recorded.job.episodes(failed=False, limit=100)
    assert len(done) > 30 and [one.finished for one in done] == sorted((one.finished for one in done), reverse=True)
    scored = 0
    for line in done:
        one = recorded.job.episode(line.episode)
        assert [message.role for message in one.messages] == ["user", "assistant", "tool", "assistant"]
        assert sum(turn.reward for turn in one.turns) == one.reward == line.reward
        assert [turn.metrics for turn in one.turns] == [{"turn1": one.turns[0].reward}, {"turn2": one.turns[1].reward}]
        assert [turn.finish for turn in one.turns] == ["stop", "stop"]
        assert [(turn.message, turn.follows, turn.trained) for turn in one.turns] == [(1, None, True), (3, None, True)]
        assert all(turn.workers == [[0, "scripted"]] and turn.generation_seconds >= 0 for turn in one.turns)
        assert {turn.policy for turn in one.turns} == {"main"} and all(turn.rewards == {} for turn in one.turns)
        sampled = 0
        for strip in one.trajectories:
            spoken = [
                index for start, stop, policy in strip.replies for index in range(start, stop) if policy == "main"
            ]
            assert spoken == [index for index, action in enumerate(strip.mask) if action]
            texts = "".join(text for text, action in zip(strip.texts, strip.mask, strict=True) if action)
            sampled += sum(strip.mask)
            assert len(strip.tokens) == len(strip.texts) == len(strip.versions) and "<|im_end|>" in texts
            if strip.trainer_logprobs is not None:
                scored += 1
                assert [value is not None for value in strip.trainer_logprobs] == strip.mask
        assert sampled == sum(turn.tokens for turn in one.turns) == line.tokens
        assert one.trajectories[0].workers == [[0, "scripted"]]
    assert scored > 0, "groups with variance were differentiated"


def test_letters_of_several_tokens_are_whole_in_the_strip(recorded: Recorded) -> None:
    said = "Größe 😀 سؤال 漢字"
    rows = [{"prompt": said, "answer": "4"}] * 3
    made = recorded.client.submit(job(name="letters", environment={"id": "jsonl", "rows": rows, "verifier": "exact"}))
    assert made.wait().state == "completed"
    for line in made.episodes(failed=False):
        for strip in made.episode(line.episode).trajectories:
            texts = [*strip.prompt_texts, *strip.texts]
            assert said in "".join(texts) and "\ufffd" not in "".join(texts)
            assert len(texts) == len(strip.prompt) + len(strip.tokens)


def test_episodes_are_found_by_text_reward_state_and_step(recorded: Recorded) -> None:
    job = recorded.job
    failed = job.episodes(failed=True, limit=100)
    assert failed and all("a broken <b>tool</b>" in one.error and one.reward is None for one in failed)
    assert {one.episode for one in job.episodes(text="a broken", limit=100)} == {one.episode for one in failed}
    assert all("five" in "".join(one.replies) for one in job.episodes(text="five", limit=100))
    assert job.episodes(text="guess%") == [] and job.episodes(text="nowhere") == []
    of_step = job.episodes(step=2, limit=100)
    assert {one.group for one in of_step} == {group.group for group in job.groups(2)}
    every = job.episodes(limit=1000)
    assert len({one.episode for one in every}) == len(every) > 40, "pages do not overlap"
    headers = {"Authorization": f"Bearer {recorded.service.key}"}
    with httpx.Client(base_url=f"{recorded.service.url}/api/v1/jobs/{job.id}", headers=headers, timeout=60) as http:
        assert http.get("/episodes", params={"min_reward": "nan"}).status_code == 422
        best = http.get("/episodes", params={"min_reward": 2}).json()["episodes"]
        assert best and all(one["reward"] == 2 for one in best)
        assert http.get("/episodes", params={"before": "x"}).status_code == 400
        failures = http.get("/failures").json()
        assert sum(one["episodes"] for one in failures) == len(failed)
        assert http.get("/groups", params={"state": "dropped"}).json()["total"] == 0


@pytest.mark.parametrize(
    ("state", "reward", "shown"),
    [("done", 0.5, "reward 0.5"), ("done", None, "no reward"), ("failed", None, "failed"), ("failed", 1.0, "failed"),
     ("open", None, "open"), ("dropped", None, "dropped"), ("dropped", 2.0, "reward 2")],
)  # fmt: skip
def test_outcome_of_an_episode_in_every_state(state: str, reward: float | None, shown: str) -> None:
    assert outcome({"state": state, "reward": reward}) == shown


def test_an_episode_that_has_not_ended_is_shown_whole() -> None:
    turn = {"reward": None, "tokens": 2, "finish": "stop", "generation_seconds": 0.5, "environment_seconds": 0.25,
            "message": 1}  # fmt: skip
    messages = [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}]
    one = {"episode": "g-0", "state": "open", "reward": None, "error": "", "turns": [turn], "messages": messages}
    assert conversation_lines(one) == [
        "g-0: open", "user:", "  2+2?", "assistant:", "  4",
        "  → no reward, 2 tokens, ended by stop, 0.50 s generation, 0.25 s environment",
    ]  # fmt: skip


def test_texts_that_are_not_kept_leave_rewards(tmp_path_factory: pytest.TempPathFactory) -> None:
    root = tmp_path_factory.mktemp("trimmed")
    with (
        served(root, trajectory_keep=4) as service,
        ThreadedWorker.of(service),
        Client(service.url, service.key) as client,
    ):
        made = client.submit(job(stop={"steps": 4}))
        assert made.wait().state == "completed"
        rows = made.episodes(limit=100)
        gone = [one for one in rows if not one.replies]
        assert gone and all(one.reward is not None for one in gone)
        one = made.episode(gone[-1].episode)
        assert one.messages is None and one.trajectories == [] and one.metrics
        assert one.prompt is None and rows[0].prompt is not None
        with pytest.raises(NotFound):
            made.episode("none")


def test_command_prints_the_figures_of_the_page(recorded: Recorded, capsys: pytest.CaptureFixture[str]) -> None:
    where = ["--url", recorded.service.url, "--key", recorded.service.key]

    def main_result(*given: str) -> tuple[int, str]:
        code = run_command(["jobs", "episodes", recorded.job.id, *given, *where])
        return code, capsys.readouterr().out

    code, printed = main_result("--failed", "--limit", "1")
    assert code == 0 and "failed" in printed and "error: " in printed
    first = recorded.job.episodes(failed=False, limit=1)[0]
    code, printed = main_result("--id", first.episode)
    assert code == 0 and "→ reward" in printed and "tool:" in printed
    code, printed = main_result("--text", "nowhere")
    assert code == 0 and "no episode that is kept is like that" in printed
    code, printed = main_result("--step", "1", "--json")
    assert code == 0 and printed.startswith("[")


def test_exported_file_is_complete_escaped_and_needs_no_service(recorded: Recorded, tmp_path: Path) -> None:
    target = tmp_path / "out.html"
    where = ["--url", recorded.service.url, "--key", recorded.service.key]
    assert run_command(["jobs", "export", recorded.job.id, str(target), *where]) == 0
    written = target.read_text(encoding="utf-8")
    assert "a broken &lt;b&gt;tool&lt;/b&gt;" in written and "<b>tool</b>" not in written
    assert "default-src 'none'" in written and "<script" not in written
    assert not re.search(r"""(?:src|href)=|https?://|url\(""", written), "it loads nothing"
    elements = re.findall(r"<svg .*?</svg>", written)
    assert len(elements) >= 5 and all("nan" not in one for one in elements)
    assert written.count("<article>") == len(recorded.job.episodes(limit=100))


SERIES = [[1.0], [None, 2.0, None], [0.0, 0.0], [1.7e308, -1.7e308], [float("nan"), 1.0, 2.0]]


@pytest.mark.parametrize("values", SERIES)
def test_chart_of_any_values_stays_in_its_box(values: list[float | None]) -> None:
    found = re.findall(r"[ML]([-\d.]+) ([-\d.]+)", chart(list(range(1, len(values) + 1)), values))
    assert found and all(0 <= float(x) <= WIDTH and 0 <= float(y) <= HEIGHT for x, y in found)


def run_command(arguments: list[str]) -> int:
    try:
        main(arguments)
    except SystemExit as end:
        return int(end.code or 0)
    return 0


def test_prompts_are_decoded_outside_of_the_loop(recorded: Recorded, monkeypatch: pytest.MonkeyPatch) -> None:
    """They may have megabytes."""
    inside, decode = [], episodes.shown_prompt

    def shown(prompt: bytes) -> Any:
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            inside.append(False)
        else:
            inside.append(True)
        return decode(prompt)

    monkeypatch.setattr(episodes, "shown_prompt", shown)
    for read in (recorded.job.groups, lambda: recorded.job.episode(recorded.job.groups()[0].members[0].episode)):
        inside.clear()
        read()
        assert inside and not any(inside)
