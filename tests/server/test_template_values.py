"""Values of a model's chat template in requests: reasoning or none, as clients for vLLM and for OpenAI ask for it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from openai import OpenAI
from tests.support.faces import MODEL, TEMPLATE, ThreadedWorker, served, tokenizer, write_model
from tests.support.waiting import until
from tokenizers import Tokenizer

READ = "{% if enable_thinking is defined and not enable_thinking %}<no>{% endif %}{{ level }}"
EFFORT = (
    "{% if reasoning_effort is not defined %}{% set reasoning_effort = 'medium' %}{% endif %}{{ reasoning_effort }}"
)
HELLO: list[Any] = [{"role": "user", "content": "Hello?"}]


def opened(tmp_path_factory: pytest.TempPathFactory, end: str) -> Iterator[tuple[OpenAI, Tokenizer]]:
    """A client of a service whose model's template ends so."""
    root = tmp_path_factory.mktemp("values")
    config = write_model(root / "cache") / "tokenizer_config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "chat_template": TEMPLATE + end}))
    with (
        served(root) as service,
        ThreadedWorker.of(service),
        OpenAI(base_url=f"{service.url}/v1", api_key=service.key, max_retries=0) as client,
    ):
        until(lambda: any(model.id == MODEL for model in client.models.list()))
        yield client, tokenizer(root)


@pytest.fixture(scope="module")
def thinking(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[OpenAI, Tokenizer]]:
    yield from opened(tmp_path_factory, READ)


@pytest.fixture(scope="module")
def levelled(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[OpenAI, Tokenizer]]:
    yield from opened(tmp_path_factory, EFFORT)


def end_of_prompt(face: tuple[OpenAI, Tokenizer], **asked: Any) -> str:
    """The text that the template writes behind the beginning of the reply."""
    client, words = face
    body = {"return_token_ids": True, **asked}
    answer: Any = client.chat.completions.create(model=MODEL, messages=HELLO, extra_body=body)
    return words.decode(answer.choices[0].prompt_token_ids).rpartition("assistant\n")[2]


@pytest.mark.parametrize(
    ("asked", "written"),
    [
        ({}, ""),
        ({"chat_template_kwargs": {}}, ""),
        ({"chat_template_kwargs": {"enable_thinking": True}}, ""),
        ({"chat_template_kwargs": {"enable_thinking": False, "level": 3}}, "<no>3"),
        ({"reasoning_effort": "none"}, "<no>"),
        ({"reasoning_effort": "none", "chat_template_kwargs": {"enable_thinking": True}}, ""),
        ({"reasoning_effort": None}, ""),
    ],
    ids=str,
)
def test_a_template_gets_the_values_of_a_request(
    thinking: tuple[OpenAI, Tokenizer], asked: dict[str, Any], written: str
) -> None:
    assert end_of_prompt(thinking, **asked) == written


@pytest.mark.parametrize(("asked", "written"), [(None, "medium"), ("low", "low"), ("none", "none")])
def test_an_effort_is_a_value_that_the_template_reads(
    levelled: tuple[OpenAI, Tokenizer], asked: str | None, written: str
) -> None:
    assert end_of_prompt(levelled, reasoning_effort=asked) == written
    client, _ = levelled
    effort: Any = {"effort": asked}
    answer = client.responses.create(model=MODEL, input="Hello?", reasoning=effort)
    assert answer.reasoning and answer.reasoning.effort == asked
    expected = end_of_prompt(levelled)
    usage = client.responses.create(model=MODEL, input="Hello?").usage
    assert answer.usage and usage
    assert answer.usage.input_tokens - usage.input_tokens == len(written) - len(expected)


def test_values_that_the_template_does_not_read_are_refused(
    thinking: tuple[OpenAI, Tokenizer], levelled: tuple[OpenAI, Tokenizer]
) -> None:
    for face, asked, param, said in (
        (thinking, {"chat_template_kwargs": {"thinking": False}}, "chat_template_kwargs", "enable_thinking, level"),
        (levelled, {"chat_template_kwargs": {"enable_thinking": False}}, "chat_template_kwargs", "reasoning_effort"),
        (thinking, {"reasoning_effort": "low"}, "reasoning_effort", "give 'none'"),
    ):
        with pytest.raises(openai.BadRequestError) as refused:
            end_of_prompt(face, **asked)
        assert refused.value.param == param and said in refused.value.message
