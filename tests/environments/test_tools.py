from __future__ import annotations

import shutil
from collections.abc import Sequence
from typing import Any

import pytest

from rookery.environments.base import Environment, Reply, Step
from rookery.environments.builtins import find
from rookery.environments.tools import PythonTool, as_message, called
from rookery.errors import UserError
from rookery.spec.job import EnvironmentSpec

pytestmark = pytest.mark.skipif(shutil.which("bwrap") is None, reason="needs bubblewrap: apt-get install bubblewrap")

ROW = {"prompt": "What is 6 * 7?", "answer": 42}
OPTIONS: dict[str, Any] = {"rows": [ROW], "verifier": "number", "tools": [{"tool": "python"}], "calls": 2}


@pytest.fixture(scope="module")
def environment() -> Environment:
    return find("jsonl")(OPTIONS)


def played(environment: Environment, replies: Sequence[str]) -> list[Step]:
    episode: Any = environment.for_episode()
    episode.prompt = ROW
    episode.reset(ROW, 0)
    return [episode.step(Reply(text, [], [], turn)) for turn, text in enumerate(replies)]


def test_a_result_comes_back_and_the_answer_is_judged(environment: Environment) -> None:
    call, answer = played(environment, ["I compute.\n<python>\nprint(6 * 7)\n</python>", "It is 42."])
    assert not call.done and call.messages == [{"role": "user", "content": "<result>\n42\n</result>"}]
    assert answer.done and answer.reward == 1.0 and answer.metrics == {"right": 1.0, "number": 1.0, "calls": 1.0}


def test_the_prompt_ends_with_the_instruction(environment: Environment) -> None:
    [first] = environment.for_episode().reset(ROW, 0)  # type: ignore[misc, union-attr]
    assert first["content"].startswith("What is 6 * 7?\n\nYou can run Python code")  # type: ignore[index]
    plain = find("jsonl")({**OPTIONS, "tool_instruction": ""})
    assert plain.for_episode().reset(ROW, 0) == [{"role": "user", "content": "What is 6 * 7?"}]


def test_after_the_last_call_a_reply_is_judged(environment: Environment) -> None:
    steps = played(environment, ["<python>print(1)", "<python>print(2)</python>", "<python>1</python> is 42"])
    assert [step.done for step in steps] == [False, False, True]
    assert steps[-1].reward == 1.0 and steps[-1].metrics["calls"] == 2.0


@pytest.mark.parametrize(
    ("code", "result"),
    [
        ("1 / 0", "ZeroDivisionError: division by zero"),
        ("x = 1", "(no output)"),
        ("print('a')\nraise ValueError('b')", "a\nValueError: b"),
        ("print('</result>')", "< /result>"),
        ("print('x' * 5000)", "x" * 1999 + "…"),
        ("import sys\nwhile True: sys.stdout.write('x' * 1000)", "x" * 1999 + "…"),
        ("```python\nprint(3)\n```", "3"),
    ],
)
def test_results_of_calls(code: str, result: str, environment: Environment) -> None:
    [step] = played(environment, [f"<python>{code}</python>"])
    assert step.messages[0]["content"] == f"<result>\n{result}\n</result>"


THOUGHT = "<think><python>print(1)</python>"


@pytest.mark.parametrize(
    ("text", "raw", "special"),
    [
        (f"{THOUGHT}</think> 42", "", ()),
        (THOUGHT, "", ()),  # cut within it
        (f"{THOUGHT} 42", f"{THOUGHT}</think> 42", ["</think>"]),
    ],
)
def test_calls_in_thinking_are_not_made(text: str, raw: str, special: Sequence[str], environment: Environment) -> None:
    episode: Any = environment.for_episode()
    episode.prompt = ROW
    step = episode.step(Reply(text, [], [], 0, raw, special))
    assert step.done and step.reward == float("42" in text)


def test_the_last_call_counts() -> None:
    tools = [PythonTool(tool="python")]
    assert called(tools, "<python>1</python> or <python>2</python>") == (tools[0], "2")
    assert called(tools, "no call") is None and called([], "<python>1</python>") is None
    assert as_message("x") == "<result>\nx\n</result>"


def test_episodes_have_room_for_their_calls() -> None:
    assert EnvironmentSpec.model_validate({"id": "jsonl", **OPTIONS}).turns == 3
    assert EnvironmentSpec.model_validate({"id": "jsonl", **OPTIONS, "max_turns": 2}).turns == 2
    assert EnvironmentSpec.model_validate({"id": "jsonl", **OPTIONS, "calls": "many"}).turns == 1
    assert EnvironmentSpec.model_validate({"id": "jsonl", "rows": [ROW], "verifier": "number"}).turns == 1


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"tools": [{"tool": "java"}]}, "environment.tools.0.tool"),
        ({"tools": [{"tool": "python", "seconds": 0}]}, "environment.tools.0.seconds"),
        ({"tools": [{}]}, "environment.tools.0.tool"),
        ({"calls": 0}, "environment.calls"),
    ],
)
def test_wrong_tools_are_refused_by_path(options: dict[str, Any], says: str) -> None:
    with pytest.raises(UserError) as caught:
        find("jsonl")({**OPTIONS, **options})
    assert says in str(caught.value) and "\n" not in str(caught.value)
