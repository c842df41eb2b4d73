"""Built-in environments, the JSONL reader, the order of prompts."""

from __future__ import annotations

import gzip
import importlib
import importlib.util
import itertools
import json
import random
import re
import shutil
import tracemalloc
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support import faulty
from tests.support.datasets import read_jsonl
from tests.support.draws import examples
from tests.support.libraries import installed

from rookery.environments import datasets
from rookery.environments.base import Environment, Reply, Split
from rookery.environments.builtins import BUILTINS, find
from rookery.environments.calculator import calculate
from rookery.environments.datasets import PromptDataset, repeated_note
from rookery.environments.demonstrations import count_rows
from rookery.environments.jsonl import QUESTION_PARTS, UNREAD, Jsonl, JsonlOptions
from rookery.environments.messages import MessageRefused, conversation
from rookery.environments.reasoning_gym import REPLIES_ARE_CODE, ReasoningGym, ReasoningGymOptions
from rookery.environments.verifiers.pool import LITERAL, restored, stored
from rookery.environments.verifiers.verifiers import VERIFIERS
from rookery.errors import UserError

ROWS = [{"prompt": f"{number} + 1 = ?", "answer": number + 1} for number in range(10)]


def play(environment: Environment, prompt: Any, *replies: str) -> tuple[float, dict[str, float], list[str]]:
    """Reward, metrics and everything that the environment said."""
    episode = environment.for_episode()
    episode.prompt, episode.seed = prompt, 0
    first: Any = episode.reset(prompt, 0)
    received = [message["content"] for message in first]
    total, metrics = 0.0, {}
    for turn, text in enumerate(replies):
        step: Any = episode.step(Reply(text=text, tokens=[], messages=[], turn=turn))
        total += step.reward
        metrics.update(step.metrics)
        received += [message["content"] for message in step.messages]
        assert step.done == (turn == len(replies) - 1)
    return total, metrics, received


# --- jsonl ----------------------------------------------------------------------------------------------------------


def test_jsonl_plays_a_row() -> None:
    environment = BUILTINS["jsonl"]({"rows": ROWS, "verifier": "number", "eval_last": 3})
    train, held_out = list(environment.prompts("train")), list(environment.prompts("eval"))
    assert (train, held_out) == (ROWS[:7], ROWS[7:])
    assert play(environment, train[0], "It is 1")[0] == 1
    assert play(environment, train[0], "It is 2")[::2] == (0, ["0 + 1 = ?"])


def test_jsonl_asks_a_judge_about_the_reply() -> None:
    verifier = {"name": "judge", "policy": "critic", "prompt": "Is it {answer}, from 0 to 4? { other }", "scale": 4}
    row = {"prompt": "2+2?", "answer": 4}
    of_scale = {"3/4": 0.75, "Score: **3** / 4, fine": 0.75, "1 out of 4": 0.25, "Rating: 2 (of 4)": 0.5,
                "2.5/4": 0.625, "3 of 5 tests pass: 2/4": 0.5, "4/4. No: 1": 0.25, "[[3]]/4": 0.75,
                "I give 3 of 4: 3": 0.75, "2/4 : 1": 0.25,
                "3/4. I took off 1 point.": 0.75, "2/4.0": 0.5, "1/4, as 2 + 2 is 4.": 0.25, "3/4\n\n**2**": 0.5,
                "1/4 (see rule 3)": 0.25, "Form 1/4, content 3/4 (of 9).": 0.75,
                "I give this 3 points out of 4": 0.75, "3 (4 is perfect)": 0.75, "Score: 3\nIn 2024 ...": 0.75,
                "My rating: **3**. It misses 1 point.": 0.75, "The score is 3 because 1+1=2": 0.75,
                "Score: 3\nConfidence: 90%": 0.75, "A perfect score is 4, this one is 3": 0.75,
                "1. It is clear.\n2. I give 3": 0.75, "Score: 1\nTotal: 2": 0.5, "# 3\n\nLine 2 is good": 0.75,
                '{"score": 3, "errors": 2}': 0.75, '{"errors": 2, "Score": "3"}': 0.75, '{"score": 3}\nIt has 2': 0.75,
                '{"score": 3}, so {"Score": "3.0"}': 0.75, '{"score": "3/4", "errors": 2}': 0.75,
                '{"score": 3, "rating": 1}': 0.75, '{"mark": 1, "SCORE": 3}': 0.75, '{"grade": 3, "errors": 2}': 0.75,
                '{"score": "3 of 4 points", "errors": 2}': 0.75, '{"result": {"score": 3}}': 0.75,
                "Score: 3 - fine, but 2 parts are missing": 0.75, "Score: 3 – it has 2 errors": 0.75,
                "**Score: 3** — of which 1": 0.75, '{"errors": 3}': 0.75}  # fmt: skip
    answers = [("3", 0.75, 0.0), ("0", 0.0, 0.0), ("4", 1.0, 0.0)]
    answers += [(said, reward, 0.0) for said, reward in of_scale.items()]
    answers += [
        (said, 0.0, 1.0)
        for said in (
            "fine",
            "3/40",
            "I say 9.",
            "-2",
            "In 2024",
            "5/4",
            "Score: 3 of 5",
            '{"score": 9, "errors": 2}',
            'It says {"score": 4}, but: {"score": 1}',
            '{"score": null, "most": 4}',
            '{"score": "none", "most": 4}',
            '{"score": "", "most": 4}',
            '{"score": [1], "most": 4}',
            '{"score": {"value": 1}, "most": 4}',
            '{"score": true, "most": 4}',
            '{"score": NaN, "most": 4}',
            '{"score": 1, "score": 3}',
            '{"score": 3} or {"score": null}',
            '{"rating": 1, "grade": 3}',
            "Score: 3 - 2",
        )
    ]
    cut = [
        ("3/4. It is", 0.75, 0.0),
        ('{"score": 3} as 2', 0.75, 0.0),
        ('{"score": "3"} as 2', 0.75, 0.0),
        ("3\n\nIt has", 0.75, 0.0),
        ("Score: 3 (it", 0.75, 0.0),
    ]
    cut += [(said, 0.0, 1.0) for said in ("From 0 to 4, where 4 is best, this", "Of 3 lines, one", "3", "Score: 1")]
    every = [(*one, "stop") for one in answers] + [(*one, "length") for one in cut]
    for said, reward, unjudged, finish in every:
        environment = Jsonl(JsonlOptions.model_validate({"verifier": verifier, "rows": [row]}))
        environment.prompt = row
        asked = environment.step(Reply(text="four", tokens=[1], messages=[], turn=0))
        assert asked.messages == [{"role": "user", "content": "Is it 4, from 0 to 4? { other }"}]
        assert (asked.policy, asked.done, asked.reward) == ("critic", False, 0.0)
        judged = environment.step(Reply(text=said, tokens=[1], messages=[], turn=1, finish=finish))
        assert (judged.done, judged.reward, judged.metrics) == (True, reward, {"unjudged": unjudged}), said
    large = VERIFIERS["judge"].model_validate({**verifier, "scale": 2e6})
    assert large.score("500000/2000000, as 9 are missing", row)[0] == 0.25


@pytest.mark.parametrize(
    ("prompt", "rows", "says"),
    [
        (
            "{answr}?",
            [{"answer": 4}],
            r"dataset: row 1: no row has the field answr .* 'answer'; .* { answr }",
        ),
        ("{answer} {b}", [{"answer": 4}, {"a": 1}], "the field b that"),
        ("{answer}", [{"answer": None}, {"answer": None}], "the field answer that"),
        ("{answer}?", [{"a": 1}, {"answer": 4}], ["?", "4?"]),
        ("{answer}: {note}", [{"answer": True, "note": ["é", 1.5]}], ['true: ["é", 1.5]']),
        ("{answer} {note}", [{"answer": 4}, {"answer": 5, "note": "hard"}, {"note": None}], ["4 ", "5 hard", " "]),
        ("{prompt}: {a b} {}", [{}], ["1+1?: {a b} {}"]),
        ("Good?", [{}], ["Good?"]),
    ],
)
def test_the_question_to_a_judge_names_fields_of_the_rows(prompt: str, rows: list[Any], says: str | list[str]) -> None:
    given = {"verifier": {"name": "judge", "policy": "critic", "prompt": prompt}}
    options = JsonlOptions.model_validate({**given, "rows": [{"prompt": "1+1?", **row} for row in rows]})
    if isinstance(says, str):
        with pytest.raises(UserError, match=says):
            Jsonl(options)
        return
    environment, asked = Jsonl(options), []
    for row in environment.prompts("train"):
        episode: Any = environment.for_episode()
        episode.prompt = row
        asked.append(episode.step(Reply(text="2", tokens=[1], messages=[], turn=0)).messages[0]["content"])
    assert asked == says


def test_jsonl_takes_messages_and_files(tmp_path: Path) -> None:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    path, held_out = tmp_path / "train.jsonl", tmp_path / "eval.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + json.dumps({"messages": messages, "city": "Rome\u2028"}).encode() + b"\r\n\n")
    held_out.write_text(json.dumps({"prompt": "Hi", "city": "Oslo"}))
    verifier = {"name": "json", "fields": {"capital": "city"}, "strict": True}
    environment = BUILTINS["jsonl"]({"path": str(path), "eval_path": str(held_out), "verifier": verifier})
    (row,) = environment.prompts("train")
    assert environment.reset(row, 0) == messages
    assert play(environment, row, json.dumps({"capital": "Rome\u2028"}))[0] == 1
    assert [row["city"] for row in environment.prompts("eval")] == ["Oslo"]


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ('{"prompt": "a"}\n{"prompt": }', "dataset: line 2 is not JSON .* write one JSON object per line"),
        ('{"prompt": "a", "answer": NaN}', "line 1: answer: given NaN, allowed: a finite number"),
        ('{"prompt": "a"}\n{"prompt": "cut \\ud83d"}', r"line 2: prompt: given .* allowed: whole characters"),
        ('{"prompt": "a"}\n{"prompt": "a", "score": 1e400}', "line 2: score: given 1e400, allowed: a number between"),
        ("\n\n", "no rows; write"),
        ("\n" * 100_001, "more than 100000 blank lines; remove them"),
        ('{"prompt": "a"}\n\n[1]', "line 3 is list, not an object"),
        ('{"question": "a"}', "line 1 has neither prompt nor messages, but 'question'; give one"),
        ('{"prompt": "a", "messages": []}', "line 1 has both"),
        ('{"prompt": null, "messages": null}', "line 1 has neither prompt nor messages, but 'prompt', 'messages'"),
        ('{"prompt": " "}', 'line 1: prompt is " "; give a text'),
        ('{"prompt": "\\u200b\\n"}', "line 1: prompt is .*; give a text that is not empty"),
        ('{"prompt": ["a"]}', 'line 1: prompt.0 is "a"; give'),
        ('{"prompt": []}', r"line 1: prompt is \[\]; give a text, or a list"),
        ('{"prompt": {"role": "user", "content": "a"}}', "line 1: prompt is .*; give a text, or a list"),
        ('{"prompt": "a", "tools": [{"name": "f"}]}', "line 1: tools is .*, but no chat template gets it; describe"),
        ('{"prompt": "a", "images": ["a.png"]}', "line 1: images is .*, but models read texts alone"),
        ('{"messages": "a"}', "line 1: messages is .* give a list"),
        ('{"messages": [{"role": "user", "content": "a"}, {"role": "user"}]}', r"line 1: messages\.1 is .* give"),
        ('{"messages": []}', "line 1: messages is"),
        ('{"messages": [{"role": "user", "content": "  "}]}', "line 1: messages is .*; give a text that is not empty"),
        (b'{"prompt": "a"}\n{"prompt": "\xff"}', "line 2 is not UTF-8; save"),
        ('{"prompt": "a"}' + "[" * 100_000, "line 1 is not JSON"),
        ('[\n  {"prompt": "a"}\n]', "line 1 is not JSON .*; the file is one value over many lines: write each row"),
        ('\n{\r\n"prompt": "a"}', "line 2 is not JSON .*; the file is one value over many lines"),
        (gzip.compress(b'{"prompt": "a"}', mtime=0), "it is gzip; give a text in UTF-8 with one JSON object per line"),
        (b"PAR1\x15\x04\x15\x10", "it is Parquet; give a text"),
        ('{"prompt": "a"}\n'.encode("utf-16"), "it is UTF-16; give a text in UTF-8"),
        ("prompt,answer\na,b\n", "line 1 is not JSON .*; write one JSON object per line"),
        ('{"prompt": "a"}\n'.encode("utf-32"), "it is UTF-32; give a text in UTF-8"),
        ('{"prompt": "a"}\n'.encode("utf-32-be"), "it is UTF-32; give a text in UTF-8"),
        ('{"prompt": "a"}\n'.encode("utf-16-le"), "it is UTF-16; give a text in UTF-8"),
        ('{"prompt": "a"}\n'.encode("utf-16-be"), "it is UTF-16; give a text in UTF-8"),
        ("<!DOCTYPE html><html>Not found", "it is HTML; give a text in UTF-8"),
        ("version https://git-lfs.github.com/spec/v1\noid sha256:1\n", "it is a pointer of Git LFS; give"),
        (
            '{"prompt": "a"}\n{"prompt": "a", "ans',
            "line 2 is not JSON .Unterminated string starting at: character 17.;",
        ),
        (
            '{"prompt": "[{\\"role\\": \\"user\\", \\"content\\": \\"a\\"}]"}',
            "prompt is a list of messages as a text; give",
        ),
        ("{\"prompt\": \"[{'content': 'a', 'role': 'user'}]\"}", "prompt is a list of messages as a text; give"),
        ("{\"messages\": \"[{'role': 'user', 'content': 'a'}]\"}", "messages is a list of messages as a text; give"),
    ],
)
def test_malformed_rows_are_refused_with_line_and_remedy(content: str | bytes, says: str) -> None:
    with pytest.raises(UserError, match=says) as caught:
        read_jsonl(content if isinstance(content, bytes) else content.encode())
    assert "\n" not in str(caught.value)


def test_files_with_byte_order_marks_are_joined(tmp_path: Path) -> None:
    """As ``cat`` joins what programs of Windows wrote."""
    row = b'\xef\xbb\xbf{"prompt": "a", "answer": "b"}\r\n'
    assert read_jsonl(row * 3) == [{"prompt": "a", "answer": "b"}] * 3
    (path := tmp_path / "rows.jsonl").write_bytes(row * 3)
    environment = find("jsonl")({"path": str(path), "verifier": "exact"})
    assert list(environment.prompts("train")) == [{"prompt": "a", "answer": "b"}] * 3


@pytest.mark.parametrize(
    ("verifier", "reads"),
    [
        ("exact", False),
        ({"name": "exact", "answer": "system"}, True),
        ({"name": "json", "fields": {"os": "system"}}, True),
        ({"name": "json", "fields": {"system": "answer"}}, False),
        ({"name": "judge", "policy": "critic", "prompt": "Is it {answer} for {system}?"}, True),
        ({"name": "judge", "policy": "critic", "prompt": "Is it {answer} for { system }?"}, False),
        ({"name": "grader", "grader": {"type": "string_check", "input": "{{ sample.output_text }}",
                                       "reference": "{{ item.system }}", "operation": "eq"}}, True),
        ({"name": "grader", "grader": {"type": "string_check", "input": "{{ sample.output_text }}",
                                       "reference": "{{ item.answer }}", "operation": "eq"}}, False),
    ],
)  # fmt: skip
@pytest.mark.parametrize("name", ["system", "system_prompt"])
def test_a_system_text_that_no_model_reads_is_refused(verifier: Any, reads: bool, name: str) -> None:
    """It is no message. A verifier may compare with a field of that name."""
    row = {"prompt": "Which one?", "answer": "Linux", "system": None, name: "Linux"}
    if reads and name == "system":
        find("jsonl").validate_options({"rows": [row], "verifier": verifier})
        return
    with pytest.raises(UserError, match=rf'row 1: {name} is "Linux", but no model reads it; write it as the first'):
        find("jsonl").validate_options({"rows": [row], "verifier": verifier})


@pytest.mark.parametrize("name", QUESTION_PARTS)
def test_a_part_of_the_question_that_no_message_has_is_refused(name: str) -> None:
    """It may be there twice, be read by the verifier, or be no text."""
    asks = {"name": "judge", "policy": "critic", "prompt": f"Is it right for {{{name}}}?"}
    for prompt, value, verifier in (("Sum: 1\n2", "1 2", "exact"), ("Sum", "1 2", asks), ("Sum", 12, "exact")):
        rows = [{"prompt": prompt, name: value, "answer": "3"}]
        find("jsonl").validate_options({"rows": rows, "verifier": verifier})
    with pytest.raises(UserError, match=f'row 1: {name} is "1 2", but no message has it; write it into the prompt'):
        find("jsonl").validate_options({"rows": [{"prompt": "Sum", name: "1 2", "answer": "3"}], "verifier": "exact"})


CHOICES = ["Paris", "Rome"]


@pytest.mark.parametrize(
    ("name", "value", "prompt", "missing"),
    [
        ("choices", CHOICES, "Which one?", True),
        ("choices", CHOICES, "Which one? (A) Paris (B) Rome", False),
        ("choices", {"text": CHOICES, "label": ["A", "B"]}, "Which one? A: Paris", True),
        ("choices", {"text": CHOICES, "label": ["A", "B"]}, "Which one? A: Paris\nB: Rome", False),
        ("options", {"A": "Paris", "B": "Rome"}, "Which one?", True),
        ("question", [{"role": "user", "content": "Which one?"}], "Which one?", False),
        ("question", [{"role": "user", "content": "Which other?"}], "Which one?", True),
        ("history", [{"content": "a"}], "Which one?", True),
        ("input", {"messages": []}, "Which one?", False),
        ("problem", "2 + 2", "Answer it.", True),
        ("problem", None, "Answer it.", False),
    ],
)
def test_choices_and_questions_stand_in_the_prompt(name: str, value: Any, prompt: str, missing: bool) -> None:
    """As in rows of ARC, MMLU, MedQA and others, whose prompt somebody else writes."""
    options = {"rows": [{"prompt": prompt, name: value, "answer": "A"}], "verifier": "exact"}
    if not missing:
        find("jsonl").validate_options(options)
        return
    with pytest.raises(UserError, match=f"row 1: {name} is .*, but no message has it; write it into the prompt"):
        find("jsonl").validate_options(options)


@pytest.mark.parametrize("blank", ["", " \n", "\u200b"])
def test_a_question_that_is_blank_is_refused(blank: str) -> None:
    """As a column that is missing leaves one; the message of another role may be blank."""
    system, asked = {"role": "system", "content": "Be brief."}, user("2+2?")
    for messages, where in (([system, user(blank)], "messages.1"), ([asked, system, user(blank)], "messages.2")):
        with pytest.raises(UserError, match=rf"line 1: {where} is .*: it asks nothing; write the question, or leave"):
            read_jsonl(json.dumps({"messages": messages}).encode())
    for messages in ([{**system, "content": blank}, asked], [asked, {"role": "tool", "content": blank}]):
        assert len(read_jsonl(json.dumps({"messages": messages}).encode())) == 1


def test_rows_leave_room_for_the_prompt_of_a_judge() -> None:
    """A task of an agent, and a conversation to learn from, are no answer of an environment: they may be longer."""
    rows = [{"messages": [user("a")] * count, "answer": "b"} for count in (253, 254)]
    Jsonl(JsonlOptions.model_validate({"verifier": "exact", "rows": rows[:1]}))
    with pytest.raises(UserError, match="row 1 has 254 messages; give at most 253"):
        Jsonl(JsonlOptions.model_validate({"verifier": "exact", "rows": rows[1:]}))
    assert len(read_jsonl(json.dumps(rows[1]).encode())) == 1


@pytest.mark.parametrize(
    ("verifier", "answer", "says"),
    [
        ("exact", None, "answer is null, neither a text nor a number; write the text of a right reply, in quotes"),
        ("exact", "", "which an empty reply equals"),
        ({"name": "regex", "pattern": "(.)"}, ["yes"], "neither a text nor a number"),
        ("number", "3/4", "not a number; write it in digits"),
        ({"name": "json", "fields": {"a": "b"}}, 1, "the row has no field 'b'"),
        ("math", "3 \N{EN DASH} 5", "can be read in several ways; write it in LaTeX"),
        ("math", "(?", "math-verify finds no expression; write it in LaTeX"),
    ],
)
def test_answers_that_nothing_can_equal_are_refused_with_their_line(
    tmp_path: Path, verifier: Any, answer: Any, says: str
) -> None:
    """At the submission, in training and held-out rows, from files and inline."""
    if verifier == "math":
        pytest.importorskip("math_verify")
    good, bad = {"prompt": "a", "answer": 5}, {"prompt": "b", "answer": answer}
    good |= {"b": 1} if isinstance(verifier, dict) and verifier["name"] == "json" else {}
    path, name = tmp_path / "rows.jsonl", verifier if isinstance(verifier, str) else verifier["name"]
    path.write_text("\n\n".join(json.dumps(row) for row in (good, good, bad)))
    for options, where in [
        ({"path": str(path)}, "dataset: line 5: "),
        ({"rows": [good, good, bad]}, "dataset: row 3: "),
        ({"rows": [good], "eval_path": str(path)}, "eval: line 5: "),
        ({"path": str(path), "eval_last": 1}, "eval: line 5: "),
    ]:
        with pytest.raises(UserError) as caught:
            BUILTINS["jsonl"].validate_options({**options, "verifier": verifier})
        assert str(caught.value).startswith(where) and says in str(caught.value)
        assert str(caught.value).endswith(f" (verifier {name})") and "\n" not in str(caught.value)
    BUILTINS["jsonl"].validate_options({"rows": [good], "verifier": verifier})


def test_a_marker_that_is_a_special_token_separates_the_answer() -> None:
    row = {"prompt": "a", "answer": 5}
    environment = BUILTINS["jsonl"]({"rows": [row], "verifier": {"name": "number", "after": "</think>"}})
    episode = environment.for_episode()
    episode.prompt = row
    raw = "so 4</think>5 is it"
    step: Any = episode.step(Reply(text="so 45 is it", tokens=[], messages=[], turn=0, raw=raw, special=["</think>"]))
    assert (step.reward, step.metrics["answered"]) == (1, 1)
    step = episode.step(Reply(text="so 5", tokens=[], messages=[], turn=0))
    assert (step.reward, step.metrics["answered"]) == (0, 0)


def user(content: Any, **more: Any) -> dict[str, Any]:
    return {"role": "user", "content": content, **more}


CALL = {"type": "function", "function": {"name": "weather", "arguments": "{}"}}
MESSAGES: list[tuple[list[Any], str]] = [
    ([user("a"), {"role": "assistant", "content": "", "tool_calls": [CALL]}, {"role": "tool", "content": "5 C"}],
     r"{0}\.1\.tool_calls is .*, but only role and content reach the model; write the calls into content"),
    ([user("a"), {"role": "assistant", "content": None, "tool_calls": [CALL]}], r"{0}\.1\.tool_calls is"),
    ([user("a"), {"role": "tool", "content": "5", "tool_call_id": "1"}], r"{0}\.1\.tool_call_id is \"1\", .* leave it"),
    ([user("a", name="ada")], r"{0}\.0\.name is \"ada\", .* write it into content, or leave it out"),
    ([user("a", weight=0)], r"{0}\.0\.weight is 0, but only role and content"),
    ([user("a"), {"role": "assistant", "content": "b", "reasoning_content": "c"}, user("d")],
     r"{0}\.1\.reasoning_content is"),
    ([user("2+2?"), {"role": "assistant", "content": "4"}],
     r"{0}\.1 is the assistant's: .* leave it out, and give the answer in a field of its own, such as answer"),
    ([user("a"), user("b"), {"role": "assistant", "content": ""}], r"{0}\.2 is the assistant's"),
    ([user(None)], r"{0}\.0 is .*; give \{{\"role\""),
    ([user(5)], r"{0}\.0\.content is 5; give a text, or a list"),
    ([user([])], r"{0}\.0\.content is \[\]; give a text"),
    ([user([{"type": "text", "text": "a"}, {"type": "image_url", "image_url": "b"}])], r"{0}\.0\.content is .* give"),
    ([user([{"type": "text", "text": "a", "cache_control": {}}])], r"{0}\.0\.content is .* give a text"),
    ([{"role": "usr", "content": "a"}], r"{0}\.0\.role is \"usr\"; did you mean user\?"),
    ([{"role": "developer", "content": "a"}, user("b")], r"{0}\.0\.role is \"developer\"; write system"),
    ([{"role": "narrator", "content": "a"}], r"{0}\.0\.role is \"narrator\"; give system, user, assistant, tool"),
    ([{"from": "human", "value": "a"}], r"{0}\.0\.from is \"human\", but only role and content"),
    ([{"content": "a"}], r"{0}\.0 is .*; give \{{\"role\""),
]  # fmt: skip


@pytest.mark.parametrize(("messages", "says"), MESSAGES, ids=[says[5:35] for _, says in MESSAGES])
def test_messages_that_the_policy_would_read_differently_are_refused(messages: list[Any], says: str) -> None:
    """In rows under both names, and when a hosted environment gives them."""
    for name in ("messages", "prompt"):
        with pytest.raises(UserError, match="line 1: " + says.format(name)) as caught:
            read_jsonl(json.dumps({name: messages, "answer": "4"}).encode())
        assert "\n" not in str(caught.value)
    with pytest.raises(MessageRefused, match=says.format("messages")):
        conversation(messages)


def test_a_prompt_may_be_messages_as_trl_and_verl_write_them() -> None:
    prompt = [{"role": "system", "content": "Be brief."}, user("2+2?", name=None, tool_calls=None)]
    parts = [{"type": "text", "text": "2+"}, {"type": "text", "text": "2?", "image_url": None}]
    rows = [
        {"prompt": prompt, "answer": "4", "messages": None, "tools": None},
        {"messages": [prompt[0], user(parts)], "answer": "4"},
        {"prompt": prompt, "answer": "4", "reward_model": {"style": "rule", "ground_truth": "4"}, "images": []},
    ]
    environment = BUILTINS["jsonl"]({"rows": rows, "verifier": "exact"})
    for row in environment.prompts("train"):
        assert environment.reset(row, 0) == [{"role": "system", "content": "Be brief."}, user("2+2?")]
        assert play(environment, row, "4")[0] == 1


def test_the_last_message_of_an_episode_may_be_the_assistants() -> None:
    ended = [user("a"), {"role": "assistant", "content": "b"}]
    assert conversation(ended, before_reply=False) == ended
    with pytest.raises(MessageRefused, match="name is"):
        conversation([user("a", name="b")], before_reply=False)


@settings(max_examples=examples(60))
@given(
    rows=st.lists(
        st.dictionaries(st.text(), st.text() | st.integers(-(2**63), 2**64 - 1) | st.none(), max_size=3), min_size=1
    )
)
def test_any_well_formed_rows_come_back(rows: list[dict[str, Any]]) -> None:
    whole = [
        {key: value for key, value in row.items() if key not in ("messages", *UNREAD)} | {"prompt": "a"} for row in rows
    ]
    text = "\n".join(json.dumps(row, ensure_ascii=False) for row in whole)
    assert read_jsonl(text.encode()) == whole


def test_rows_of_a_file_are_read_when_needed_and_hold_little_memory(tmp_path: Path) -> None:
    """Every row was held as Python objects, 24 times the file."""
    count, path = 40_000, tmp_path / "rows.jsonl"
    with path.open("w") as file:
        file.writelines(f'{{"prompt": "{number}", "answer": "1"}}\n' for number in range(count))
    tracemalloc.start()
    try:
        environment = BUILTINS["jsonl"]({"path": str(path), "verifier": "exact", "eval_last": 10})
        prompts = PromptDataset(environment, "train")
        taken, size = prompts.take(count - 11, 2, 0, False, wrap=True)
        shuffled, _ = prompts.take(0, 3, 0, True, wrap=True)
        held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert size == count - 10
    assert [json.loads(row)["prompt"] for row in taken] == [str(count - 11), "0"]
    assert len(set(shuffled)) == 3
    assert held < path.stat().st_size
    assert [row["prompt"] for row in environment.prompts("eval")] == [str(count - 10 + n) for n in range(10)]


def test_sizes_of_the_splits_count_held_out_rows_that_are_trained_on(tmp_path: Path) -> None:
    """By their prompt alone, however it is written."""
    path = tmp_path / "train.jsonl"
    train = [{"prompt": "1 + É?", "answer": "2"}, {"prompt": "2+2?", "answer": "4"}, {"prompt": "3+3?", "answer": "6"}]
    path.write_text("\n".join(json.dumps(row) for row in train))
    held_out = [
        {"prompt": [user("1\N{NO-BREAK SPACE}+\ne\u0301? ")], "answer": "3"},
        {"messages": [user("9+9?")], "answer": "18"},
        train[1],
    ]
    for source in ({"path": str(path)}, {"rows": train}):
        sizes = find("jsonl").validate_options({**source, "eval_rows": held_out, "verifier": "exact"})
        assert (sizes.train, sizes.held_out, sizes.repeated, sizes.asked) == (3, 3, 2, True)
    sizes = find("jsonl").validate_options({"rows": [*train, *train], "eval_last": 2, "verifier": "exact"})
    assert (sizes.train, sizes.held_out, sizes.repeated) == (4, 2, 2)
    sizes = find("jsonl").validate_options({"rows": train, "verifier": "exact"})
    assert (sizes.train, sizes.held_out, sizes.repeated, sizes.asked) == (3, 0, 0, False)
    assert find("calculator").validate_options({"eval_prompts": 0}).held_out == 0


@pytest.mark.parametrize(
    ("limits", "says"),
    [((20, 9), "line 2 has more than 20 bytes"), ((99, 1), "more than 1 row;"), ((99, 2), "")],
)
def test_count_of_rows_has_limits(tmp_path: Path, limits: tuple[int, int], says: str) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"prompt": "a"}\n{"prompt": "a longer one"}\n')
    if not says:
        assert count_rows(path, *limits) == 2
        return
    with pytest.raises(UserError, match=says):
        count_rows(path, *limits)


@pytest.mark.parametrize(
    ("id", "options", "says"),
    [
        ("jsnl", {}, 'environment.id: given "jsnl"; did you mean jsonl'),
        ("jsonl", {"rows": ROWS}, "environment.verifier: missing"),
        (
            "jsonl",
            {"rows": ROWS, "verifier": "exat"},
            r'environment\.verifier\.name: given "exat", allowed: one of exact',
        ),
        ("jsonl", {"rows": ROWS, "verifier": "exact", "paht": 1}, "environment.paht: unknown field; did you mean path"),
        ("jsonl", {"verifier": "exact"}, "exactly one of rows, path and dataset"),
        (
            "jsonl",
            {"rows": ROWS, "verifier": {"name": "number", "tolerance": -1}},
            "environment.verifier.tolerance: given -1",
        ),
        ("jsonl", {"rows": ROWS, "verifier": {"name": "regex", "pattern": "("}}, "not a valid regular expression"),
        ("jsonl", {"rows": ROWS, "verifier": {"name": "exact", "answer": "y"}}, "row 1: the row has no field 'y'"),
        ("jsonl", {"rows": ROWS, "verifier": "exact", "eval_last": 10}, "eval_last: given 10, allowed: less than"),
        ("jsonl", {"path": "/absent", "verifier": "exact"}, "cannot be read .No such file"),
        ("jsonl", {"dataset": "ab", "verifier": "exact"}, "only the service can read"),
        ("calculator", {"low": 5, "high": 6, "prompts": 9}, "at most 8"),
        ("calculator", {"instruction": "sum"}, "environment.instruction: .*{expression}"),
        ("calculator", {"operations": ["/"]}, "environment.operations.0"),
    ],
)
def test_wrong_options_are_refused_by_path(id: str, options: dict[str, Any], says: str) -> None:
    with pytest.raises(UserError, match=says) as caught:
        find(id)(options)
    assert "\n" not in str(caught.value)


@pytest.mark.skipif(importlib.util.find_spec("reasoning_gym") is not None, reason="the extra is installed")
def test_reasoning_gym_names_its_extra() -> None:
    find("reasoning-gym").check({"task": "spell_backward"})
    with pytest.raises(UserError, match=r"pip install 'rookery\[reasoning-gym\]'"):
        find("reasoning-gym")({"task": "spell_backward"})


GYM = """
import os


class Dataset:
    drawn = 0

    def __init__(self, task, size, seed, config):
        if task not in ("count", "puzzle24"):
            raise ValueError(f"Dataset '{task}' not registered")
        self.size, self.seed, self.config = size, seed, config

    def __getitem__(self, number):
        assert 0 <= number < self.size
        Dataset.drawn += 1
        question = f"{(self.seed + number) % self.config.get('different', 10**9)}?"
        return {"question": question, "answer": str(self.seed + number), "metadata": {"shape": (1, {2}), **self.config}}

    def score_answer(self, answer, entry):
        print("not an answer")
        while answer == "for ever":
            pass
        if answer == "open":
            open(os.devnull)
        if answer.startswith("eval "):
            return eval(answer.removeprefix("eval "))
        if answer == "exit":
            raise SystemExit
        if answer == "variables":
            return any(name.startswith("ROOKERY_") for name in os.environ)
        if answer == "shape":
            return entry["metadata"]["shape"] == (1, {2})
        return answer == entry["answer"] if answer != "raise" else entry[answer]


def create_dataset(task, size, seed, **config):
    return Dataset(task, size, seed, config)
"""
"""The library's interface, as far as we use it: entry i of a dataset is drawn from its seed + i."""


@pytest.fixture
def gym(tmp_path: Path) -> Iterator[None]:
    """A library in the place of reasoning-gym, here and in the processes that score."""
    with installed(tmp_path, "reasoning_gym", GYM):
        yield


def test_reasoning_gym_holds_out_other_entries(gym: None) -> None:
    environment = find("reasoning-gym")(
        {"task": "count", "size": 5, "eval_size": 3, "tag": "answer", "config": {"x": 1}}
    )
    train, held_out = list(environment.prompts("train")), list(environment.prompts("eval"))
    assert [entry["answer"] for entry in train + held_out] == [str(number) for number in range(8)]
    assert (len(train), train[0]["metadata"]) == (5, {"shape": [1, "{2}"], "x": 1})
    assert play(environment, train[2], "hm <answer> 2 </answer>")[:2] == (1, {"right": 1, "unjudged": 0})
    assert play(environment, train[2], "2")[0] == 0
    with pytest.raises(UserError, match=r"environment\.task: absent: Dataset 'absent' not registered"):
        find("reasoning-gym")({"task": "absent"})


def test_reasoning_gym_trains_on_no_held_out_question(gym: None) -> None:
    """Of 40 questions of which 7 differ, 4 are held out."""
    options = {"task": "count", "size": 40, "eval_size": 4, "seed": 2, "config": {"different": 7}}
    environment = find("reasoning-gym")(options)
    train, held_out = ([entry["question"] for entry in environment.prompts(split)] for split in ("train", "eval"))
    assert not set(train) & set(held_out) and len(held_out) == 4 and len(set(train)) == 3
    left_out = 40 - len(train)
    assert environment.note("train") == (
        f"{left_out} of 40 training questions are held-out questions too, and are left out"
    )
    assert not environment.note("eval")
    everything = find("reasoning-gym")({**options, "eval_size": 7})
    with pytest.raises(UserError, match="every training question is a held-out one too; give a smaller eval_size"):
        list(everything.prompts("train"))


def test_many_questions_of_reasoning_gym_are_shuffled_and_drawn_when_asked_for(gym: None) -> None:
    """Of 40 questions, 4 are held out: nothing but these is drawn before its turn, and each epoch has the others."""

    def questions(start: int, count: int, *, shuffle: bool = True, seed: int = 1) -> list[str]:
        options = {"task": "count", "size": 40, "eval_size": 4, "seed": 2, "config": {"different": different}}
        environment = ReasoningGym(ReasoningGymOptions.model_validate(options), listed=39)
        drawn = importlib.import_module("reasoning_gym").Dataset
        drawn.drawn = 0
        taken, size = PromptDataset(environment, "train").take(start, count, seed, shuffle, wrap=True)
        assert size == 40 and drawn.drawn <= 4 + 2 * count
        return [json.loads(prompt)["question"] for prompt in taken]

    different = 10**9
    everything = [f"{number}?" for number in range(2, 42)]
    assert questions(0, 40, shuffle=False) == everything
    first, second = questions(0, 40), questions(40, 40)
    assert sorted(first) == sorted(second) == sorted(everything) and everything != first != second
    assert questions(25, 3) == first[25:28] and questions(0, 40, seed=2) != first
    different = 20  # each question comes twice, and those that are held out too: 22 … 25 of 42
    assert set(questions(0, 80)) == {f"{number}?" for number in range(20) if number not in (2, 3, 4, 5)}
    different = 4
    with pytest.raises(UserError, match="every training question is a held-out one too; give a smaller eval_size"):
        questions(0, 1)


@pytest.mark.skipif(importlib.util.find_spec("reasoning_gym") is None, reason="the extra is not installed")
@pytest.mark.parametrize("task", ["chain_sum", "spell_backward", "basic_arithmetic", "leg_counting"])
def test_splits_of_the_library_are_disjoint(task: str) -> None:
    config = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1} if task == "chain_sum" else {}
    environment = find("reasoning-gym")({"task": task, "config": config})
    train, held_out = ([entry["question"] for entry in environment.prompts(split)] for split in ("train", "eval"))
    assert train and len(held_out) == 64 and not set(train) & set(held_out)


def test_held_out_prompts_that_are_trained_on_are_counted() -> None:
    class Both(Environment):
        def prompts(self, split: Split) -> Iterable[Any]:
            return [{"n": 1}, {"n": 2}, {"n": 3}] if split == "train" else ({"n": n} for n in (2, 3, 3, 4))

    train, held_out = PromptDataset(Both(), "train"), PromptDataset(Both(), "eval")
    assert repeated_note(train, held_out).startswith("3 of 4 held-out prompts are training prompts too")
    assert repeated_note(PromptDataset(Listed(2), "train"), held_out) == ""
    endless = PromptDataset(Streamed(-1), "train")
    assert repeated_note(endless, held_out) == ""


def test_reasoning_gym_scores_by_the_entry_as_the_library_made_it(gym: None) -> None:
    """Which JSON does not give back; a prompt that was stored without it is scored as it is."""
    environment = find("reasoning-gym")({"task": "count"})
    prompt = json.loads(json.dumps(next(iter(environment.prompts("train")))))
    assert play(environment, prompt, "shape")[0] == 1
    del prompt[LITERAL]
    assert play(environment, prompt, "shape")[0] == 0
    assert play(environment, prompt, "0")[0] == 1


def test_an_entry_is_stored_with_its_literal_only_where_that_helps() -> None:
    for entry in ({"a": (1, [2])}, {"a": {2: {3}}}):
        assert restored(json.loads(json.dumps(stored(entry)))) == entry
    for entry in ({"a": [1, None]}, {"a": (1, float("nan"))}, {"a": ({1}, object())}):
        assert list(stored(entry)) == ["a"]


def test_a_reply_that_computes_for_ever_scores_nothing_and_delays_no_other(gym: None) -> None:
    environment = ReasoningGym(ReasoningGymOptions(task="count"), limit=2.0)
    prompt = next(iter(environment.prompts("train")))
    with ThreadPoolExecutor() as threads:
        late = threads.submit(play, environment, prompt, "for ever")
        assert play(environment, prompt, "0")[0] == 1
        assert not late.done(), "the honest reply waited for the other"
        assert late.result()[:2] == (0, {"right": 0, "unjudged": 1})
    assert play(environment, prompt, "0")[:2] == (1, {"right": 1, "unjudged": 0})


def test_a_reply_on_which_the_scorer_raises_scores_nothing(gym: None) -> None:
    environment = find("reasoning-gym")({"task": "count"})
    prompt = next(iter(environment.prompts("train")))
    for reply in ("raise", "exit"):
        assert play(environment, prompt, reply)[:2] == (0, {"right": 0, "unjudged": 1})
    assert play(environment, prompt, "0")[:2] == (1, {"right": 1, "unjudged": 0})


def test_the_scoring_process_has_no_secrets_and_opens_no_file(gym: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROOKERY_TOKEN", "secret")
    environment = find("reasoning-gym")({"task": "count"})
    prompt = next(iter(environment.prompts("train")))
    assert play(environment, prompt, "variables")[:2] == (0, {"right": 0, "unjudged": 0})
    assert play(environment, prompt, "open")[:2] == (0, {"right": 0, "unjudged": 1})


@pytest.mark.skipif(shutil.which("bwrap") is None, reason="needs bubblewrap")
@pytest.mark.parametrize(
    ("answer", "reward", "unjudged"),
    [
        ("eval 1.0", 1.0, 0.0),
        ("eval 0.25", 0.25, 0.0),
        ("wrong", 0.0, 0.0),
        ("shape", 1.0, 0.0),
        ("eval __import__('os').fork()", 0.0, 1.0),
        ("eval __import__('socket').socket() and 1.0", 0.0, 1.0),
        ("eval __import__('os')._exit(0)", 0.0, 1.0),
        ("eval float('nan')", 0.0, 1.0),
        ("variables", 0.0, 0.0),
    ],
)
def test_a_task_that_runs_replies_as_code_is_scored_in_the_sandbox(
    answer: str, reward: float, unjudged: float, puzzles: Environment
) -> None:
    prompt = next(iter(puzzles.prompts("train")))
    assert play(puzzles, prompt, answer)[:2] == (reward, {"right": float(reward == 1), "unjudged": unjudged})


@pytest.fixture(scope="module")
def puzzles(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Environment]:
    """A task of the stand-in library that runs replies."""
    folder = tmp_path_factory.mktemp("gym")
    folder.chmod(0o755)  # the sandbox reads it as another user
    with installed(folder, "reasoning_gym", GYM):
        yield find("reasoning-gym")({"task": "puzzle24", "size": 5, "eval_size": 0})


@pytest.mark.usefixtures("no_programs")
def test_a_task_that_runs_replies_as_code_needs_a_sandbox(gym: None) -> None:
    find("reasoning-gym").validate_options({"task": "count"})
    with pytest.raises(UserError, match="apt-get install bubblewrap"):
        find("reasoning-gym").validate_options({"task": "puzzle24"})


@pytest.mark.skipif(importlib.util.find_spec("reasoning_gym") is None, reason="the extra is not installed")
def test_no_other_task_of_the_library_runs_replies_as_code() -> None:
    factory = importlib.import_module("reasoning_gym.factory")
    runs = {"eval", "exec", "compile", "parse_expr", "sympify"}
    found = {name for name, (made, _) in factory.DATASETS.items() if runs & {*made.score_answer.__code__.co_names}}
    # number_sorting runs its own answer, which the reply has no part in; composite asks the others.
    assert found - {"number_sorting"} == {*REPLIES_ARE_CODE} - {"composite"}


# --- calculator -----------------------------------------------------------------------------------------------------


def test_the_calculator_has_to_be_called_and_its_result_used() -> None:
    environment = BUILTINS["calculator"]({})
    prompt = {"expression": "47 * 38", "answer": 1786}
    assert play(environment, prompt, "CALC(47 * 38)", "1786") == (
        1.0,
        {"called": 1, "asked": 1, "right": 1},
        [
            "You have a calculator. To use it, reply with CALC and the expression in brackets, and nothing else.\n"
            "What is 47 * 38?",
            "The calculator says 1786. Reply with that number only.",
        ],
    )
    assert play(environment, prompt, "CALC(47 * 38)", "it is 1787")[0] == 0.5
    assert play(environment, prompt, "CALC(1 + 1)")[0] == 0.2
    assert play(environment, prompt, "1786")[0] == 0  # guessed, or known: either way without the tool
    assert play(environment, prompt, "CALC(47 *")[0] == 0
    assert play(environment, prompt, "<think>CALC(1 + 1)?</think>CALC(47 * 38)", "<think>1</think>1786")[0] == 1
    assert play(environment, prompt, "<think>CALC(47 * 38)")[0] == 0
    for call in ("CALC(47 * 38) (done)", "CALC(47 * 38) and CALC(47*38)", "`CALC((47) * (40 - 2))`"):
        assert play(environment, prompt, call, "1786")[0] == 1, call
    assert play(environment, prompt, "CALC(" + "(" * 60 + "1" + ")" * 60 + ")")[0] == 0


def test_the_calculators_sums_are_distinct_and_held_out() -> None:
    environment = BUILTINS["calculator"]({"low": 1, "high": 8, "prompts": 100, "eval_prompts": 28})
    splits: list[Split] = ["train", "eval"]
    train, held_out = ([prompt["expression"] for prompt in environment.prompts(split)] for split in splits)
    assert (len(train), len(held_out), len({*train, *held_out})) == (100, 28, 128)
    assert [prompt["expression"] for prompt in environment.prompts("train")] == train


def test_the_calculator_computes_sums_and_nothing_else() -> None:
    assert calculate(" (2 + 3) * -4 / 8 ") == -2.5
    assert calculate("6 / 2") == 3
    for text in (
        "2 ** 99",
        "__import__('os')",
        "1 / 0",
        "'a' * 9",
        "2 +",
        "f(1)",
        "",
        "True + 1",
        "1e300 * 1e300 // 1",
        "1e300 * 1e300",
        "1e400",
        "1e400 - 1e400",
        "(",
    ):
        with pytest.raises(ValueError):
            calculate(text)


# --- the order of prompts -------------------------------------------------------------------------------------------


class Listed(Environment):
    def __init__(self, count: int) -> None:
        self.count = count

    def prompts(self, split: Split) -> Iterable[Any]:
        return range(self.count)


class Streamed(Listed):
    """No length; ends after ``count``, or never where that is negative."""

    def prompts(self, split: Split) -> Iterable[Any]:
        return itertools.count() if self.count < 0 else iter(range(self.count))


def numbers(
    prompts: PromptDataset, start: int, count: int, *, seed: int = 0, shuffle: bool = True, wrap: bool = True
) -> list[int]:
    taken, _ = prompts.take(start, count, seed, shuffle, wrap=wrap)
    return [json.loads(prompt) for prompt in taken]


@settings(max_examples=examples(40))
@given(size=st.integers(1, 20), cuts=st.lists(st.integers(1, 9), min_size=1, max_size=8), seed=st.integers(0, 3))
def test_prompts_are_a_function_of_seed_and_index(size: int, cuts: list[int], seed: int) -> None:
    """However they are asked for: no index is skipped or repeated, and every epoch holds each prompt once."""
    whole = numbers(PromptDataset(Listed(size), "train"), 0, sum(cuts), seed=seed)
    parts, start, again = [], 0, PromptDataset(Streamed(size), "train")
    for count in cuts:
        parts += numbers(again, start, count, seed=seed)
        start += count
    assert parts == whole
    for epoch in range(len(whole) // size):
        assert sorted(whole[epoch * size : (epoch + 1) * size]) == list(range(size))


def test_epochs_and_seeds_differ_and_eval_ends() -> None:
    prompts = PromptDataset(Listed(50), "train")
    first, second = numbers(prompts, 0, 50), numbers(prompts, 50, 50)
    assert first != second and sorted(first) == sorted(second)
    assert numbers(prompts, 0, 50, seed=1) != first
    assert numbers(prompts, 48, 5, shuffle=False) == [48, 49, 0, 1, 2]
    assert numbers(PromptDataset(Listed(3), "eval"), 1, 9, shuffle=False, wrap=False) == [1, 2]
    assert prompts.take(0, 1, 0, True, wrap=True)[1] == 50


def test_endless_prompts_are_streamed() -> None:
    endless = PromptDataset(Streamed(-1), "train", stream_after=10)
    assert endless.take(0, 1, 0, True, wrap=True)[1] == -1
    assert numbers(endless, 5, 3) == [5, 6, 7]
    assert numbers(endless, 20, 2) == [20, 21]
    assert numbers(endless, 2, 2) == [2, 3]  # a resumed job asks again
    long = PromptDataset(Streamed(13), "train", stream_after=10)
    assert numbers(long, 11, 5) == [11, 12, 0, 1, 2]
    assert numbers(long, 26, 2) == [0, 1]
    assert numbers(PromptDataset(Streamed(13), "eval", stream_after=10), 11, 5, wrap=False) == [11, 12]


@pytest.mark.parametrize("asked", [[0, 11], [0, 5, 0]])
def test_an_iterator_that_is_used_up_is_reported(asked: list[int]) -> None:
    class Once(Environment):
        left = iter(range(13))

        def prompts(self, split: Split) -> Iterable[Any]:
            return self.left

    prompts = PromptDataset(Once(), "train", stream_after=10)
    for start in asked[:-1]:
        assert numbers(prompts, start, 2) == [start, start + 1]
    for _ in range(2):
        with pytest.raises(ValueError, match=r"gave 1[13] entries, and [02] when it was called again; return a new"):
            numbers(prompts, asked[-1], 3)


def test_prompts_that_are_missing_or_no_json_are_reported() -> None:
    with pytest.raises(ValueError, match="gave none"):
        numbers(PromptDataset(Listed(0), "train"), 0, 1)

    class Odd(Environment):
        def prompts(self, split: Split) -> Iterable[Any]:
            return [1, {2}]

    with pytest.raises(ValueError, match="prompt 1: given set, allowed: texts, numbers"):
        numbers(PromptDataset(Odd(), "train"), 0, 1)
    with pytest.raises(RuntimeError, match="no prompts"):
        numbers(PromptDataset(faulty.RaisesInPrompts(), "train"), 0, 1)


class Table:
    """It has the length of its rows and gives the names of its columns, as a data frame does."""

    def __len__(self) -> int:
        return 3

    def __iter__(self) -> Iterator[str]:
        return iter(["question", "answer"])


class Indexed:
    """It has neither a length nor an iterator, only items."""

    def __getitem__(self, index: int) -> int:
        return [7, 8][index]


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ("abc", "gave str; return a list of prompts, or another iterable with an order"),
        (b"abc", "gave bytes; return a list"),
        ({"train": [1], "test": [2]}, "gave dict; return a list"),
        ({"a", "b"}, "gave set; return a list"),
        (frozenset({"a"}), "gave frozenset; return a list"),
        (Table(), "gave Table of the length 3 with 2 entries; return a list of prompts"),
        ({"a": 1, "b": 2}.keys(), ["a", "b"]),
        ({"a": 1, "b": 2}.items(), [["a", 1], ["b", 2]]),
        ({"a": 1, "b": 2}.values(), [1, 2]),
        (Indexed(), [7, 8]),
        ((7, 8), [7, 8]),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
def test_values_whose_entries_are_no_prompts_are_reported(given: Any, says: str | list[Any]) -> None:
    """The names of splits or columns, and characters, would be trained on as prompts; a set has another order in each
    process."""

    class Returns(Environment):
        def prompts(self, split: Split) -> Iterable[Any]:
            return given  # type: ignore[no-any-return]

    prompts = PromptDataset(Returns(), "train")
    if isinstance(says, str):
        with pytest.raises(ValueError, match=re.escape(says)):
            prompts.take(0, 2, 0, False, wrap=True)
        return
    assert [json.loads(one) for one in prompts.take(0, 2, 0, False, wrap=True)[0]] == says


def test_episodes_share_nothing_with_the_object_handed_over() -> None:
    class Remembers(Environment):
        def __init__(self) -> None:
            self.said: list[str] = []

    handed = Remembers()
    handed.for_episode().said.append("x")  # type: ignore[attr-defined]
    assert handed.said == []
    handed.said = (item for item in "x")  # type: ignore[assignment]
    with pytest.raises(TypeError, match=r"Remembers cannot be copied .*for_episode"):
        handed.for_episode()


def test_the_order_of_a_split_is_drawn_once_however_many_other_jobs_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """A permutation of five million rows takes seconds."""
    drawn: list[str] = []

    class Drawing(random.Random):
        def __init__(self, seed: str) -> None:
            drawn.append(seed)
            super().__init__(seed)

    monkeypatch.setattr(datasets, "Random", Drawing)
    environment = BUILTINS["jsonl"]({"rows": ROWS, "verifier": "number"})
    splits = [PromptDataset(environment, "train") for _ in range(100)]
    for _ in range(3):
        for seed, split in enumerate(splits):
            split.take(0, 25, seed, True, wrap=True)
    assert len(drawn) == 100 * 3, "one of each of the three epochs"
