"""Choices while their tokens arrive, without a service."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest

from rookery.clock import RandomIds, SystemClock
from rookery.controller.prompts import PreparedPrompt
from rookery.controller.rollout.request import SamplingResult
from rookery.server.completion_formats import Choice, TextFormat
from rookery.server.openai import CompletionRequest
from rookery.server.openai_responses import ResponsesFormat, ResponsesRequest
from rookery.simulation.fakes.text import chat
from rookery.tokenization.call_readers import READERS, CallReader, ForcedReader

CALL = '{"name": "add", "arguments": {"a": 1}}'
REPLIES: list[tuple[type[CallReader], str]] = [
    (ForcedReader, CALL),
    (READERS["llama3"], CALL),
    (READERS["mistral"], f"[TOOL_CALLS]{CALL}"),
    (READERS["hermes"], f"<tool_call>{CALL}"),
    (READERS["hermes"], f"<tool_call>{CALL}</tool_call>"),
    (READERS["harmony"], '<|channel|>commentary to=functions.add<|message|>{"a": 1}'),
]


def begun(reader: type[CallReader], prompt: Sequence[int] = (5,), seed: int = 3) -> Choice:
    return Choice(0, PreparedPrompt(cast(Any, None), chat(512), list(prompt)), seed, [], reader(["add"]))


def arriving(choice: Choice, text: str, *, sizes: int) -> Iterator[str]:
    """The reply's tokens, ``sizes`` at a time, and what of its text can be sent; its end is reported after all of them
    have arrived."""
    tokens = [*chat(512).encode(text), chat(512).stop_tokens[0]]
    for size in [*range(sizes, len(tokens), sizes), len(tokens)]:
        choice.reply = SamplingResult(tokens=tokens[:size], logprobs=[0.0] * size)
        yield choice.next_text(last=False)
    choice.reply = SamplingResult(tokens=tokens, logprobs=[0.0] * len(tokens), finish="stop")
    yield choice.next_text(last=True)


def arrive(choice: Choice, text: str, *, sizes: int) -> None:
    for _ in arriving(choice, text, sizes=sizes):
        pass


@pytest.mark.parametrize("sizes", [1, 7, 1000])
@pytest.mark.parametrize(("reader", "text"), REPLIES)
def test_calls_are_read_where_the_end_is_reported_later(reader: type[CallReader], text: str, sizes: int) -> None:
    choice = begun(reader)
    arrive(choice, text, sizes=sizes)
    assert [(call.name, call.arguments) for _, call in choice.calls] == [("add", '{"a": 1}')]
    assert (choice.content, choice.finish) == ("", "tool_calls")


def test_ids_of_calls_differ_by_prompt_and_seed_and_repeat_otherwise() -> None:
    ids = []
    for prompt, seed in (([5], 3), ([5, 6], 3), ([5], 4), ([5], 3)):
        choice = begun(ForcedReader, prompt, seed)
        arrive(choice, CALL, sizes=1000)
        ids.append(choice.calls[0][0])
    assert len(set(ids)) == 3 and ids[0] == ids[3]


BRACKETED = f"<tool_call>{CALL}</tool_call>"


@pytest.mark.parametrize("sizes", [1, 7, 1000])
@pytest.mark.parametrize(
    ("text", "kinds"),
    [
        (f"{BRACKETED}Done.", ["function_call", "message"]),
        (f"{BRACKETED}{BRACKETED}Done.{BRACKETED}", ["function_call", "function_call", "message", "function_call"]),
        (f"Wait.{BRACKETED}Done.", ["message", "function_call", "message"]),
        (f"Wait.{BRACKETED}{BRACKETED}Now.{BRACKETED}Done.",
         ["message", "function_call", "function_call", "message", "function_call", "message"]),
        (BRACKETED, ["function_call"]),
        ("Done.", ["message"]),
        ("", ["message"]),
    ],
)  # fmt: skip
def test_items_of_a_streamed_response_are_sent_one_by_one(text: str, kinds: list[str], sizes: int) -> None:
    """As OpenAI sends them: mirascope's client fails where an item begins before the last one has ended."""
    asked = ResponsesRequest.model_validate({"model": "m", "input": "x"})
    context = SimpleNamespace(ids=RandomIds(), clock=SystemClock())
    form = ResponsesFormat(cast(Any, SimpleNamespace(context=context)), asked, "m", trainable=True)
    choice, events = begun(READERS["hermes"]), form.begin()
    for _ in arriving(choice, text, sizes=sizes):
        events += form.grow(choice)
    events += form.end(choice, {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2})
    sent = [json.loads(line[6:]) for line in events.decode().splitlines() if line.startswith("data: ")]
    output = sent[-1]["response"]["output"]
    assert [item["type"] for item in output] == kinds
    assert len({item["id"] for item in output}) == len(output)
    ended: list[Any] = []
    opened = False
    for event in sent[2:-1]:
        assert event["output_index"] == len(ended)
        if event["type"] == "response.output_item.added":
            assert not opened and event["item"]["id"] == output[len(ended)]["id"]
            opened = True
        elif event["type"] == "response.output_item.done":
            ended.append(event["item"])
            opened = False
        else:
            assert opened and event["item_id"] == output[len(ended)]["id"]
    assert ended == output
    given = [{"role": "user", "content": "x"}, *output, {"role": "user", "content": "y"}]
    _, *reply, _ = ResponsesRequest.model_validate({"model": "m", "input": given}).as_chat().messages
    assert [message.content or "" for message in reply] == [choice.content], "it comes back as one message"
    assert [call.id for message in reply for call in message.tool_calls or []] == [name for name, _ in choice.calls]


def test_an_echoed_prompt_is_written_once_for_all_choices() -> None:
    tokens = chat(512).encode("a b") * 2000
    prompt = PreparedPrompt(cast(Any, None), chat(512), tokens)
    context = SimpleNamespace(ids=RandomIds(), clock=SystemClock())
    options = CompletionRequest.model_validate({"model": "m", "prompt": tokens, "echo": True, "n": 128})
    form = TextFormat(cast(Any, SimpleNamespace(context=context)), options, "m", logprobs=False, trainable=True)
    choices = [Choice(number, prompt, 3, []) for number in range(128)]
    began = time.thread_time()
    messages = [json.loads(bytes(message)) for message in form.body(choices, {})["choices"]]
    assert {message["text"] for message in messages} == {"a b" * 2000}
    assert time.thread_time() - began < 1
