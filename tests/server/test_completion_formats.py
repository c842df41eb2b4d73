"""Choices while their tokens arrive, without a service."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import pytest

from rookery.controller.completions import PreparedPrompt
from rookery.controller.rollout.request import SamplingResult
from rookery.server.completion_formats import Choice
from rookery.simulation.fakes.text import chat
from rookery.tokenization.tool_calls import READERS, CallReader, ForcedReader

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


def arrive(choice: Choice, text: str, *, sizes: int) -> None:
    """The reply's tokens, ``sizes`` at a time; its end is reported after all of them have arrived."""
    tokens = [*chat(512).encode(text), chat(512).stop_tokens[0]]
    for size in [*range(sizes, len(tokens), sizes), len(tokens)]:
        choice.reply = SamplingResult(tokens=tokens[:size], logprobs=[0.0] * size)
        choice.next_text(last=False)
    choice.reply = SamplingResult(tokens=tokens, logprobs=[0.0] * len(tokens), finish="stop")
    choice.next_text(last=True)


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
