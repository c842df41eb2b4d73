from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from rookery.environments.base import Reply
from rookery.environments.builtins import find
from rookery.environments.judges import parse_judges, set_judges
from rookery.errors import UserError
from rookery.spec.job import EnvironmentSpec

ROW = {"prompt": "Write a haiku about {topic}.", "topic": "rain"}


class Endpoint(ThreadingHTTPServer):
    answer: Any = "I give 7 of 10: 7"
    finish: str = "stop"
    seen: list[tuple[str, str | None, Any]]
    busy: list[int]
    """Statuses of the next answers, before the first good one."""

    @property
    def setting(self) -> str:
        return f"strict=http://127.0.0.1:{self.server_port}/v1 large JUDGE_KEY"


class Handler(BaseHTTPRequestHandler):
    server: Endpoint

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.seen.append((self.path, self.headers["Authorization"], body))
        choice = {"message": {"content": self.server.answer}, "finish_reason": self.server.finish}
        answer = json.dumps({"choices": [choice]}).encode()
        status = self.server.busy.pop(0) if self.server.busy else 200 if self.server.answer is not None else 500
        self.send_response(status)
        if status == 429:
            self.send_header("Retry-After", "0.01")
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, *arguments: Any) -> None:
        pass


@pytest.fixture
def endpoint(monkeypatch: pytest.MonkeyPatch) -> Iterator[Endpoint]:
    server = Endpoint(("127.0.0.1", 0), Handler)
    server.seen, server.busy = [], []
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setenv("JUDGE_KEY", "secret")
    set_judges(server.setting)
    yield server
    set_judges("")
    server.shutdown()
    server.server_close()


def judged(verifier: dict[str, Any]) -> Any:
    episode: Any = find("jsonl")({"rows": [ROW], "verifier": {"name": "judge", **verifier}}).for_episode()
    episode.prompt = ROW
    messages = [*episode.reset(ROW, 0), {"role": "assistant", "content": "Rain"}]
    return episode.step(Reply("Rain", [], messages, 0))


def test_a_model_outside_of_the_job_judges(endpoint: Endpoint) -> None:
    step = judged({"model": "strict", "prompt": "Is it about {topic}? 0 to 10."})
    assert step.done and step.reward == 0.7 and step.metrics == {"unjudged": 0.0}
    [(path, key, body)] = endpoint.seen
    assert (path, key, body["model"]) == ("/v1/chat/completions", "Bearer secret", "large")
    assert [message["role"] for message in body["messages"]] == ["user", "assistant", "user"]
    assert body["messages"][-1]["content"] == "Is it about rain? 0 to 10."


def test_an_answer_without_a_number_is_unjudged(endpoint: Endpoint) -> None:
    endpoint.answer = "good"
    step = judged({"model": "strict"})
    assert step.reward == 0.0 and step.metrics == {"unjudged": 1.0}


def test_an_answer_that_was_cut_is_unjudged(endpoint: Endpoint) -> None:
    endpoint.answer, endpoint.finish = "From 0 to 10, where 10 is best, this", "length"
    step = judged({"model": "strict"})
    assert step.reward == 0.0 and step.metrics == {"unjudged": 1.0}


def test_a_judge_that_fails_fails_the_episode(endpoint: Endpoint) -> None:
    endpoint.answer = None
    with pytest.raises(UserError, match=r"judge strict: .* answers 500"):
        judged({"model": "strict"})


def test_a_judge_that_is_busy_is_asked_again(endpoint: Endpoint) -> None:
    endpoint.busy = [429, 503, 529, 429]
    set_judges(endpoint.setting, first_pause=0.01)
    assert judged({"model": "strict"}).reward == 0.7 and len(endpoint.seen) == 5
    set_judges(endpoint.setting, first_pause=0.01, repeat_seconds=0.05)
    endpoint.busy = [503] * 100
    with pytest.raises(UserError, match=r"judge strict: .* answers 503"):
        judged({"model": "strict"})
    assert endpoint.busy


@pytest.mark.parametrize(
    ("verifier", "says"),
    [
        ({}, "exactly one of policy"),
        ({"policy": "judge", "model": "strict"}, "exactly one of policy"),
        ({"model": "other"}, "given 'other', but there are strict; the administrator names models in ROOKERY_JUDGES"),
        ({"model": "http://127.0.0.1"}, "the administrator names models"),
    ],
)
def test_an_unnamed_judge_is_refused(verifier: dict[str, Any], says: str, endpoint: Endpoint) -> None:
    with pytest.raises(UserError) as caught:
        find("jsonl")({"rows": [ROW], "verifier": {"name": "judge", **verifier}})
    assert says in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("text", ["strict", "strict=http://x", "=http://x y", "a=ftp://x y", "a=http://x y K more"])
def test_a_wrong_setting_is_refused(text: str) -> None:
    with pytest.raises(UserError, match="setting ROOKERY_JUDGES"):
        parse_judges(text)


@pytest.mark.parametrize("verifier", [{}, {"policy": None}, {"prompt": "Good?"}])
def test_a_job_with_a_judge_that_names_none_leaves_the_line_to_the_verifier(verifier: dict[str, Any]) -> None:
    options = {"id": "jsonl", "rows": [ROW], "verifier": {"name": "judge", **verifier}}
    assert EnvironmentSpec.model_validate(options).judge is None
    with pytest.raises(UserError, match="exactly one of policy"):
        find("jsonl")({"rows": [ROW], "verifier": options["verifier"]})


def test_a_question_may_be_a_rubric(endpoint: Endpoint) -> None:
    assert judged({"model": "strict", "prompt": "Is it good? " * 300}).done


def test_an_episode_with_an_outside_judge_has_one_turn() -> None:
    options = {"id": "jsonl", "rows": [ROW], "verifier": {"name": "judge", "model": "strict"}}
    assert EnvironmentSpec.model_validate(options).turns == 1 and EnvironmentSpec.model_validate(options).judge is None
