"""Rows that are trained on as they are: which are taken, how they are read, which are refused and why."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rookery.environments.builtins import find
from rookery.environments.demonstrations import MOST_TURNS, count_rows, demonstration, preference
from rookery.environments.messages import example_of, form_of
from rookery.errors import UserError

USER, REPLY = {"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}
OTHER = {"role": "assistant", "content": "5"}
SYSTEM = {"role": "system", "content": "Be brief."}
TURNS = [USER, {**REPLY, "weight": 0}, {"role": "user", "content": "3+3?"}, {**OTHER, "content": "6"}]


CALL = {"id": "call_1", "type": "function", "function": {"name": "add", "arguments": '{"a": 2}'}}
CALLING = {"role": "assistant", "content": None, "tool_calls": [CALL]}
RESULT = {"role": "tool", "content": "4", "tool_call_id": "call_1"}
COMPARED = {"prompt": "a", "chosen": "b", "rejected": "c"}
AS_TEXT = '[{"role": "user", "content": "2+2?"}]'
PAIR: dict[str, Any] = {"input": {"messages": [USER]}, "preferred_output": [REPLY], "non_preferred_output": [OTHER]}


def calling(arguments: Any, **fields: Any) -> dict[str, Any]:
    function = {"name": "add", "arguments": arguments, **fields}
    return {"role": "assistant", "content": "", "tool_calls": [{**CALL, "function": function}]}


def tool(**fields: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "add", **fields}}


def made_call(number: int, **arguments: Any) -> dict[str, Any]:
    about = {"name": "add", "arguments": arguments}
    return {"id": f"call{number:05d}", "type": "function", "function": about}


PLAIN_TOOL = tool(description="", parameters={"type": "object", "properties": {}})


@pytest.mark.parametrize(
    ("row", "weights"),
    [
        ({"messages": [USER, REPLY]}, [0, 1]),
        ({"messages": TURNS}, [0, 0, 0, 1]),
        ({"messages": [USER, {**REPLY, "content": "", "weight": 0}, USER, REPLY]}, [0, 0, 0, 1]),
        ({"prompt": [USER, REPLY], "completion": [USER, REPLY]}, [0, 0, 0, 1]),
        ({"messages": [USER, {**REPLY, "weight": 0.5}]}, [0, 0.5]),
        ({"messages": [{"role": "system", "content": "s"}, USER, REPLY], "id": 7}, [0, 0, 1]),
        ({"messages": [USER, {**REPLY, "annotations": [], "refusal": None, "tool_calls": []}], "weight": 1}, [0, 1]),
        ({"prompt": "2+2?", "completion": "4", "label": True, "weight": None}, [0, 1]),
        ({"messages": [USER, REPLY], "label": False}, [0, 1]),
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
        {"prompt": "2+2?", "chosen": "4", "rejected": "5", "score_chosen": 7.0, "score_rejected": 7},
        {"prompt": "2+2?", "chosen": "4", "rejected": "5", "score_chosen": None, "score_rejected": 7},
        {"prompt": "2+2?", "chosen": "4", "rejected": "5", "chosen_tokens": 1, "rejected_tokens": 9, "score": 1},
        {"prompt": "2+2?", "chosen": "4", "rejected": "5", "score_chosen": [1], "score_rejected": [2]},
        {"prompt": "2+2?", "chosen": "4", "rejected": "5", "score_chosen": "low", "score_rejected": "9"},
        {"prompt": "2+2?", "chosen": "4", "rejected": "5", "preferred_score": 2, "non_preferred_score": 1},
    ],
)
def test_preferences_are_two_replies_to_one_prompt(row: dict[str, Any]) -> None:
    found = preference(row)
    assert (found.prompt, found.chosen, found.rejected) == ([USER], REPLY, OTHER)


def test_calls_of_tools_are_taken_as_openai_writes_them() -> None:
    """Ids may repeat, as in OpenAI's examples; arguments may be an object; content may be null or left out."""
    bare = {"role": "assistant", "tool_calls": [CALL, {**CALL, "id": "call_2"}]}
    plain = {"role": "assistant", "tool_calls": [{"id": "call_1", "function": {"name": "add", "arguments": {"b": 1}}}]}
    rows = [USER, {**CALLING, "weight": 0}, RESULT, bare, {**RESULT, "name": "add", "tool_call_id": "call_2"}, plain]
    found = demonstration({"messages": rows, "tools": [tool(strict=True)], "parallel_tool_calls": False})
    results = [message for message in found.messages if message["role"] == "tool"]
    assert [message.get("tool_calls") for message in found.messages if message["role"] == "assistant"] == [
        [made_call(0, a=2)], [made_call(1, a=2), made_call(2, a=2)], [made_call(3, b=1)],
    ]  # fmt: skip
    assert results == [{**RESULT, "tool_call_id": "call00000"}, {**RESULT, "name": "add", "tool_call_id": "call00002"}]
    assert (found.weights, found.tools) == ([0, 0, 0, 1, 0, 1], [PLAIN_TOOL])
    assert {message["content"] for message in found.messages} == {"2+2?", "", "4"}


def test_compared_replies_may_call_tools() -> None:
    for row in (
        {"input": {"messages": [USER, CALLING, RESULT], "tools": [tool()]},
         "preferred_output": [CALLING], "non_preferred_output": [REPLY]},
        {"prompt": [USER, CALLING, RESULT], "chosen": [CALLING], "rejected": [REPLY], "tools": [tool()]},
    ):  # fmt: skip
        found = preference(row)
        assert found.chosen == {"role": "assistant", "content": "", "tool_calls": [made_call(1, a=2)]}
        assert (found.rejected, found.tools) == (REPLY, [PLAIN_TOOL])
        asked: Any = find("preferences")({"rows": [row]}).reset(row, 0)
        assert asked[1] == {"role": "assistant", "content": '{"name": "add", "arguments": {"a": 2}}'}
    with pytest.raises(ValueError, match="are the same"):
        preference({"prompt": "a", "chosen": [CALLING], "rejected": [CALLING]})


def test_the_form_of_a_row_has_its_calls() -> None:
    rows = [
        {"messages": [USER, REPLY]},
        {"messages": [USER, {**CALLING, "tool_calls": [CALL] * 2}, RESULT, REPLY], "tools": [tool()]},
    ]
    sizes = find("demonstrations").validate_options({"rows": rows})
    forms = [form for form, _ in sizes.forms]
    assert forms == [["user", "assistant"], ["+tools", "user", "assistant+2", "tool", "assistant"]]
    messages, tools = example_of(forms[1])
    assert tools == [{"type": "function", "function": {**PLAIN_TOOL["function"], "name": "f"}}]
    assert [len(message.get("tool_calls", ())) for message in messages] == [0, 2, 0, 0]
    assert form_of(*example_of(forms[1])) == tuple(forms[1]) and form_of(*example_of(forms[0])) == tuple(forms[0])


REFUSED = [
    ("demonstrations", [1], "is list, not an object"),
    ("demonstrations", {}, "it has no prompt, but no fields; give messages, or prompt and completion"),
    *(
        ("demonstrations", {"prompt": "a", "completion": "b", name: AS_TEXT}, f"{name} is a list of messages as a text")
        for name in ("prompt", "completion")
    ),
    *(("preferences", {**COMPARED, name: AS_TEXT}, f"{name} is a list of messages as a text") for name in COMPARED),
    ("demonstrations", {"prompt": "a"}, "it has no completion, but 'prompt'; give messages, or prompt and completion"),
    ("demonstrations", {"prompt": "a", "response": "b"}, "it has no completion, but 'prompt', 'response'; give"),
    ("demonstrations", {"conversations": []}, "it has no prompt, but 'conversations'; give messages, or prompt and"),
    ("demonstrations", {"prompt": "a", "completion": None}, 'completion is null; give a text, or a list of {"role"'),
    ("demonstrations", {"prompt": 5, "completion": "a"}, 'prompt is 5; give a text, or a list of {"role": …,'),
    ("demonstrations", {"prompt": "a", "completion": " "}, "give a text that is not empty"),
    ("demonstrations", {"prompt": "a", "completion": "\u200b"}, "give a text that is not empty"),
    ("demonstrations", {"prompt": "\ufeff \u2060", "completion": "b"}, "give a text that is not empty"),
    ("demonstrations", {"messages": [USER, {**REPLY, "content": "\u200b\n"}]}, "messages.1 is an empty reply"),
    ("preferences", {"prompt": "a", "chosen": "b", "rejected": "\u00ad"}, "that is not empty"),
    ("demonstrations", {"messages": []}, "messages is []"),
    ("demonstrations", {"messages": [USER, {**REPLY, "content": " "}]}, "messages.1 is an empty reply"),
    ("demonstrations", {"prompt": "a", "completion": [{**REPLY, "content": ""}]}, "completion is an empty reply"),
    ("demonstrations", {"prompt": [USER, REPLY], "completion": "b"}, "prompt.1 is the assistant's"),
    ("demonstrations", {"prompt": "a", "completion": "b", "system": "s"}, "of the role system"),
    ("demonstrations", {"prompt": "Sum", "input": "1 2", "completion": "3"}, 'input is "1 2", but no message has it'),
    ("demonstrations", {"prompt": "a", "completion": "b", "history": [["x", "y"]]}, "but no message has it; write it"),
    ("demonstrations", {"messages": [USER, REPLY], "system_prompt": "s"}, "of the role system"),
    ("demonstrations", {"prompt": "a", "completion": "b", "image": "a.png"}, "models read texts alone"),
    ("preferences", {"prompt": "a", "chosen": [REPLY], "rejected": [{**REPLY, "content": ""}]}, "that is not empty"),
    ("preferences", {"prompt": "a", "chosen": "b", "rejected": "c", "system": "s"}, "of the role system"),
    ("preferences", {"prompt": "a", "chosen": "b", "rejected": "c", "context": "s"}, 'context is "s", but no message'),
    ("demonstrations", {"messages": [{**USER, "content": ""}, REPLY]}, "messages is [{"),
    ("demonstrations", {"messages": [SYSTEM, {**USER, "content": " "}, REPLY]}, "messages.1 is {"),
    ("demonstrations", {"prompt": [{**USER, "content": ""}], "completion": "b"}, "give a text that is not empty"),
    ("demonstrations", {"prompt": [SYSTEM, {**USER, "content": ""}], "completion": "b"}, "prompt.1 is {"),
    ("preferences", {"prompt": [{**USER, "content": ""}], "chosen": "b", "rejected": "c"}, "prompt is [{"),
    ("preferences", {**PAIR, "input": {"messages": [SYSTEM, {**USER, "content": ""}]}}, "input.messages.1 is {"),
    ("demonstrations", {"prompt": "a", "completion": "b", "question": "c"}, 'question is "c", but no message has it'),
    ("preferences", {"prompt": "a", "chosen": "b", "rejected": "c", "choices": ["d"]}, 'choices is ["d"], but no mess'),
    ("demonstrations", {"messages": "a"}, "give a list"),
    ("demonstrations", {"messages": [USER]}, "no turn of the assistant"),
    ("demonstrations", {"messages": [REPLY]}, "nothing comes before it"),
    ("demonstrations", {"messages": [USER, {**REPLY, "weight": 0}]}, "weight above 0"),
    ("demonstrations", {"messages": [USER, {**REPLY, "weight": 2}]}, "messages.1.weight is 2"),
    ("demonstrations", {"messages": [USER, {**REPLY, "weight": True}]}, "a number from 0 to 1"),
    ("demonstrations", {"messages": [{**USER, "weight": 1}, REPLY]}, "only turns of the assistant have one"),
    ("demonstrations", {"prompt": [USER, {**OTHER, "weight": 1}, USER], "completion": "c"}, "prompt.1.weight is 1"),
    ("demonstrations", {"messages": [USER, {**REPLY, "tool_calls": [1]}]}, "messages.1.tool_calls.0 is 1; give"),
    ("demonstrations", {"messages": [USER, {**REPLY, "tool_calls": {"a": 1}}]}, "messages.1.tool_calls is"),
    ("demonstrations", {"messages": [USER, {**REPLY, "tool_calls": [CALL] * 129}]}, "a list of at most 128"),
    ("demonstrations", {"messages": [{**USER, "tool_calls": [CALL]}, REPLY]}, "messages.0 has tool_calls, but only"),
    ("demonstrations", {"messages": [USER, calling("{")]}, 'tool_calls.0.function.arguments is "{"; give an object'),
    ("demonstrations", {"messages": [USER, calling("[1]")]}, "function.arguments is"),
    ("demonstrations", {"messages": [USER, calling('{"a": NaN}')]}, "function.arguments is"),
    ("demonstrations", {"messages": [USER, calling(5)]}, "function.arguments is 5"),
    ("demonstrations", {"messages": [USER, calling("{}", name="")]}, 'tool_calls.0.function.name is ""; give a text'),
    ("demonstrations", {"messages": [USER, calling("{}", output=1)]}, "tool_calls.0.function.output is 1, which no"),
    ("demonstrations", {"messages": [USER, {**CALLING, "tool_calls": [{**CALL, "type": "custom"}]}]}, "calls.0 is {"),
    ("demonstrations", {"messages": [USER, CALLING, {**RESULT, "tool_call_id": "x"}, REPLY]}, 'tool_call_id is "x"'),
    ("demonstrations", {"messages": [USER, {**RESULT}, REPLY]}, "messages.1.tool_call_id is"),
    ("demonstrations", {"messages": [USER, {**CALLING, "function_call": {"name": "f"}}]}, "1.function_call is"),
    ("demonstrations", {"messages": [USER, REPLY], "tools": [{"type": "function"}]}, "tools.0 is"),
    ("demonstrations", {"messages": [USER, REPLY], "tools": {"a": 1}}, "tools is"),
    ("demonstrations", {"messages": [USER, REPLY], "tools": [tool(parameters=[1])]}, "tools.0.function is"),
    ("demonstrations", {"messages": [USER, REPLY], "tools": [tool(parameters={"properties": {"a": 1}})]}, "tools.0"),
    ("demonstrations", {"messages": [USER, REPLY], "tools": [tool(returns="x")]}, "tools.0.function.returns is"),
    ("demonstrations", {"messages": [USER, REPLY], "functions": [{"name": "f"}]}, "write them as tools"),
    ("preferences", {**PAIR, "tools": [tool()], "input": {**PAIR["input"], "tools": [tool()]}}, "give one of them"),
    ("preferences", {**PAIR, "input": {**PAIR["input"], "tools": [1]}}, "input.tools.0 is 1"),
    ("demonstrations", {"messages": [USER, REPLY], "weight": 0}, "weight is 0, but a row has none; give it to turns"),
    ("demonstrations", {"prompt": "a", "completion": "b", "weight": 0.5}, "weight is 0.5, but a row has none"),
    ("demonstrations", {"prompt": "a", "completion": "b", "weight": True}, "weight is true"),
    ("demonstrations", {"prompt": "a", "completion": "b", "label": False}, "label is false, but every completion is"),
    ("preferences", {"prompt": "a", "chosen": "b", "rejected": "c", "weight": 0}, "weight is 0, but a row has none"),
    ("demonstrations", {"messages": [USER, REPLY], "completion": "4"}, "another form"),
    ("demonstrations", {"messages": [USER, {"role": "asistant", "content": "a"}]}, "assistant"),
    ("demonstrations", {"messages": [USER, REPLY] * (MOST_TURNS + 1)}, "divide the conversation"),
    ("preferences", {"prompt": "a", "chosen": "b"}, "it has no rejected, but 'prompt', 'chosen'; give prompt, chosen"),
    ("preferences", {"chosen": [USER, REPLY], "rejected": [USER, OTHER]}, "it has no prompt, but 'chosen', 'rejected'"),
    ("preferences", {"prompt": None, "chosen": "b", "rejected": "c"}, "prompt is null; give a text, or a list of"),
    ("preferences", {"preferred_output": [REPLY]}, "it has no input, but 'preferred_output'; give input, preferred_"),
    ("preferences", {"input": {"messages": [USER]}, "preferred_output": [REPLY]}, "it has no non_preferred_output"),
    ("preferences", {"prompt": "a", "chosen": "b", "rejected": "b"}, "are the same"),
    ("preferences", {"prompt": "a", "chosen": "b", "rejected": " b\n"}, "are the same"),
    ("preferences", {"prompt": [USER, REPLY], "chosen": "b", "rejected": "c"}, "the assistant's"),
    ("preferences", {"prompt": "a", "chosen": [USER], "rejected": "c"}, "one message of the assistant"),
    ("preferences", {"prompt": "a", "chosen": [REPLY, REPLY], "rejected": "c"}, "one message of the assistant"),
    ("preferences", {"input": {}, "preferred_output": [REPLY], "non_preferred_output": [OTHER]}, "input.messages"),
    ("preferences", {"input": 3, "preferred_output": [REPLY], "non_preferred_output": [OTHER]}, "input.messages"),
    ("preferences", {"messages": [USER, REPLY]}, "it has no prompt, but 'messages'; give prompt, chosen and rejected"),
    ("preferences", {**COMPARED, "score_chosen": 2.0, "score_rejected": 7}, "score_chosen is 2.0, less than score_rej"),
    ("preferences", {**COMPARED, "chosen-rating": -1, "rejected-rating": 0}, "chosen-rating is -1, less than rejected"),
    ("preferences", {**COMPARED, "chosenReward": 0, "rejectedReward": 0.1}, "exchange the two replies, or leave the"),
    ("preferences", {**COMPARED, "score_chosen": "9", "score_rejected": "10.0"}, 'score_chosen is "9", less than'),
    (
        "preferences",
        {**COMPARED, "rating_Chosen": 1, "Rating_rejected": 2},
        "rating_Chosen is 1, less than Rating_reje",
    ),
    ("preferences", {**PAIR, "preferred_score": 1, "non_preferred_score": 2}, "preferred_score is 1, less than non_p"),
    ("preferences", {**PAIR, "score_chosen": 1, "score_rejected": 2}, "score_chosen is 1, less than score_rejected, 2"),
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
