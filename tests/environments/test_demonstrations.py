"""Rows that are trained on as they are: which are taken, how they are read, which are refused and why."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rookery.environments.builtins import find
from rookery.environments.demonstrations import MOST_TURNS, count_rows, demonstration, preference
from rookery.errors import UserError

USER, REPLY = {"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}
OTHER = {"role": "assistant", "content": "5"}
TURNS = [USER, {**REPLY, "weight": 0}, {"role": "user", "content": "3+3?"}, {**OTHER, "content": "6"}]


@pytest.mark.parametrize(
    ("row", "weights"),
    [
        ({"messages": [USER, REPLY]}, [0, 1]),
        ({"messages": TURNS}, [0, 0, 0, 1]),
        ({"messages": [USER, {**REPLY, "content": "", "weight": 0}, USER, REPLY]}, [0, 0, 0, 1]),
        ({"prompt": [USER, REPLY], "completion": [USER, REPLY]}, [0, 0, 0, 1]),
        ({"messages": [USER, {**REPLY, "weight": 0.5}]}, [0, 0.5]),
        ({"messages": [{"role": "system", "content": "s"}, USER, REPLY], "id": 7}, [0, 0, 1]),
        ({"prompt": "2+2?", "completion": "4"}, [0, 1]),
        ({"prompt": [USER, OTHER, USER], "completion": [REPLY]}, [0, 0, 0, 1]),
    ],
)
def test_demonstrations_are_learned_in_the_turns_of_the_assistant(row: dict[str, Any], weights: list[float]) -> None:
    found = demonstration(row)
    assert found.weights == weights
    assert all(set(message) == {"role", "content"} for message in found.messages)


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "2+2?", "chosen": "4", "rejected": "5"},
        {"prompt": [USER], "chosen": [REPLY], "rejected": [OTHER]},
        {"input": {"messages": [USER]}, "preferred_output": [REPLY], "non_preferred_output": [OTHER]},
    ],
)
def test_preferences_are_two_replies_to_one_prompt(row: dict[str, Any]) -> None:
    found = preference(row)
    assert (found.prompt, found.chosen, found.rejected) == ([USER], REPLY, OTHER)


REFUSED = [
    ("demonstrations", [1], "is list, not an object"),
    ("demonstrations", {}, "it has no prompt, but no fields; give messages, or prompt and completion"),
    ("demonstrations", {"prompt": "a"}, "it has no completion, but 'prompt'; give messages, or prompt and completion"),
    ("demonstrations", {"prompt": "a", "response": "b"}, "it has no completion, but 'prompt', 'response'; give"),
    ("demonstrations", {"conversations": []}, "it has no prompt, but 'conversations'; give messages, or prompt and"),
    ("demonstrations", {"prompt": "a", "completion": None}, 'completion is null; give a text, or a list of {"role"'),
    ("demonstrations", {"prompt": 5, "completion": "a"}, 'prompt is 5; give a text, or a list of {"role": …,'),
    ("demonstrations", {"prompt": "a", "completion": " "}, "give a text that is not empty"),
    ("demonstrations", {"messages": []}, "messages is []"),
    ("demonstrations", {"messages": [USER, {**REPLY, "content": " "}]}, "messages.1 is an empty reply"),
    ("demonstrations", {"prompt": "a", "completion": [{**REPLY, "content": ""}]}, "completion is an empty reply"),
    ("demonstrations", {"prompt": [USER, REPLY], "completion": "b"}, "prompt.1 is the assistant's"),
    ("demonstrations", {"prompt": "a", "completion": "b", "system": "s"}, "of the role system"),
    ("demonstrations", {"prompt": "a", "completion": "b", "image": "a.png"}, "models read texts alone"),
    ("preferences", {"prompt": "a", "chosen": [REPLY], "rejected": [{**REPLY, "content": ""}]}, "that is not empty"),
    ("preferences", {"prompt": "a", "chosen": "b", "rejected": "c", "system": "s"}, "of the role system"),
    ("demonstrations", {"messages": "a"}, "give a list"),
    ("demonstrations", {"messages": [USER]}, "no turn of the assistant"),
    ("demonstrations", {"messages": [REPLY]}, "nothing comes before it"),
    ("demonstrations", {"messages": [USER, {**REPLY, "weight": 0}]}, "weight above 0"),
    ("demonstrations", {"messages": [USER, {**REPLY, "weight": 2}]}, "messages.1.weight is 2"),
    ("demonstrations", {"messages": [USER, {**REPLY, "weight": True}]}, "a number from 0 to 1"),
    ("demonstrations", {"messages": [{**USER, "weight": 1}, REPLY]}, "only turns of the assistant have one"),
    ("demonstrations", {"prompt": [USER, {**OTHER, "weight": 1}, USER], "completion": "c"}, "prompt.1.weight is 1"),
    ("demonstrations", {"messages": [USER, {**REPLY, "tool_calls": [1]}]}, "tool_calls"),
    ("demonstrations", {"messages": [USER, REPLY], "tools": [{"type": "function"}]}, "tools is"),
    ("demonstrations", {"messages": [USER, REPLY], "completion": "4"}, "another form"),
    ("demonstrations", {"messages": [USER, {"role": "asistant", "content": "a"}]}, "assistant"),
    ("demonstrations", {"messages": [USER, REPLY] * (MOST_TURNS + 1)}, "divide the conversation"),
    ("preferences", {"prompt": "a", "chosen": "b"}, "it has no rejected, but 'prompt', 'chosen'; give prompt, chosen"),
    ("preferences", {"chosen": [USER, REPLY], "rejected": [USER, OTHER]}, "it has no prompt, but 'chosen', 'rejected'"),
    ("preferences", {"prompt": None, "chosen": "b", "rejected": "c"}, "prompt is null; give a text, or a list of"),
    ("preferences", {"preferred_output": [REPLY]}, "it has no input, but 'preferred_output'; give input, preferred_"),
    ("preferences", {"input": {"messages": [USER]}, "preferred_output": [REPLY]}, "it has no non_preferred_output"),
    ("preferences", {"prompt": "a", "chosen": "b", "rejected": "b"}, "are the same"),
    ("preferences", {"prompt": [USER, REPLY], "chosen": "b", "rejected": "c"}, "the assistant's"),
    ("preferences", {"prompt": "a", "chosen": [USER], "rejected": "c"}, "one message of the assistant"),
    ("preferences", {"prompt": "a", "chosen": [REPLY, REPLY], "rejected": "c"}, "one message of the assistant"),
    ("preferences", {"input": {}, "preferred_output": [REPLY], "non_preferred_output": [OTHER]}, "input.messages"),
    ("preferences", {"input": 3, "preferred_output": [REPLY], "non_preferred_output": [OTHER]}, "input.messages"),
    ("preferences", {"messages": [USER, REPLY]}, "it has no prompt, but 'messages'; give prompt, chosen and rejected"),
]


@pytest.mark.parametrize(("id", "row", "reason"), REFUSED)
def test_other_rows_are_refused_in_one_line(id: str, row: Any, reason: str, tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(row) + "\n")
    with pytest.raises(UserError) as refused:
        find(id).validate_options({"path": str(path)})
    line = str(refused.value)
    assert reason in line and line.startswith("dataset: line 1") and "\n" not in line


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "2+2?", "answer": "4"},
        {"messages": [USER], "answer": "4"},
        {"messages": [USER, REPLY]},
        {"prompt": "a", "completion": "b"},
        {"prompt": "a", "chosen": "b", "rejected": "c"},
    ],
)
def test_an_upload_takes_the_rows_of_every_environment_of_files(row: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(3 * (json.dumps(row) + "\n"))
    assert count_rows(path, 1 << 20, 10) == 3


def test_held_out_rows_with_the_same_question_are_counted() -> None:
    rows = [{"prompt": f"{n % 4}?", "completion": str(n)} for n in range(6)]
    sizes = find("demonstrations").validate_options({"rows": rows, "eval_last": 2})
    assert (sizes.train, sizes.held_out, sizes.repeated) == (4, 2, 2)
    assert sizes.forms == [(["user", "assistant"], "eval: row 1")]
