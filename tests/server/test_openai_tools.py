"""Tools and response formats in chats, by the real ``openai`` client: forced calls of a random model, and calls that a
scripted worker writes."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import jsonschema_rs
import openai
import pytest
from openai import OpenAI
from openai.types.chat import ChatCompletionContentPartTextParam, completion_create_params
from openai.types.completion_create_params import CompletionCreateParamsNonStreaming as TextParams
from openai.types.responses import (
    ResponseInputTextParam,
    ResponseOutputTextParam,
    input_token_count_params,
    response_create_params,
)
from tests.support.faces import MODEL, ThreadedWorker, served, tokenizer
from tests.support.small_model import save_small_model
from tests.support.waiting import until

from rookery.server.openai import (
    ChatRequest,
    CompletionRequest,
    OpenAIModel,
    TextPart,
    UnsupportedField,
    read_arguments,
)
from rookery.server.openai_responses import InputPart, ResponsesInput, ResponsesRequest
from rookery.server.token_face import TokenRequest
from rookery.tokenization.call_readers import READERS
from rookery.tokenization.registry import CONFIG, model_folder

USER: list[Any] = [{"role": "user", "content": "What is 1 + 2?"}]
ADD: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "add", "description": "Add two numbers.", "strict": True,
        "parameters": {"type": "object", "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 9}},
                       "required": ["a"], "additionalProperties": False},
    },
}  # fmt: skip
NOW: dict[str, Any] = {"type": "function", "function": {"name": "now"}}
SCHEMA = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"],
          "additionalProperties": False}  # fmt: skip
NAMED = {"type": "function", "function": {"name": "add"}}
CALLS = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[OpenAI, str]]:
    """A random model: a schema alone makes its text JSON."""
    root = tmp_path_factory.mktemp("tools")
    base = str(save_small_model(root / "small", context=2048))
    settings = {"models": base, "workers": 1, "threads": 1, "flush_seconds": 0.02, "answer_tokens": 120}
    with (
        served(root, **settings) as service,
        OpenAI(base_url=f"{service.url}/v1", api_key=service.key, max_retries=0) as client,
    ):
        until(lambda: client.models.list().data)
        yield client, base


@pytest.fixture(scope="module")
def scripted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OpenAI]:
    """A worker that calls a tool twice after a word, whatever it is asked."""
    with served(tmp_path_factory.mktemp("scripted")) as service:
        config = model_folder(service.settings.cache, MODEL) / CONFIG
        config.write_text(config.read_text().replace("512", "4096"))
        words = tokenizer(service.settings.cache.parent)
        token = (service.settings.data / "worker.token").read_text().strip()
        text = f"Wait.\n{CALLS}\n{CALLS}"
        with (
            ThreadedWorker(service.url, token, words, (text, text)),
            OpenAI(base_url=f"{service.url}/v1", api_key=service.key, max_retries=0) as client,
        ):
            until(lambda: client.models.list().data)
            yield client


def asked(client: OpenAI, model: str = MODEL, **options: Any) -> Any:
    return client.chat.completions.create(**{"model": model, "messages": USER, "seed": 3, **options})


def streamed(client: OpenAI, model: str = MODEL, **options: Any) -> tuple[str, list[dict[str, Any]], str]:
    """Content, calls and finish reason of a stream."""
    content, calls, finish = "", [], ""
    for chunk in asked(client, model, stream=True, **options):
        choice = chunk.choices[0]
        assert not (choice.delta.content and choice.delta.tool_calls), "autogen and haystack read one of them"
        content += choice.delta.content or ""
        for call in choice.delta.tool_calls or []:
            assert call.index == len(calls)
            calls.append({"id": call.id, "name": call.function.name, "arguments": call.function.arguments})
        finish = choice.finish_reason or finish
    return content, calls, finish


def test_calls_of_a_reply_are_returned_whole_and_streamed(scripted: OpenAI) -> None:
    choice = asked(scripted, tools=[ADD, NOW]).choices[0]
    assert (choice.message.content, choice.finish_reason) == ("Wait.", "tool_calls")
    calls = choice.message.tool_calls
    assert [(call.function.name, json.loads(call.function.arguments)) for call in calls] == [("add", {"a": 1})] * 2
    assert len({call.id for call in calls}) == 2
    content, parts, finish = streamed(scripted, tools=[ADD, NOW])
    assert (content, finish) == ("Wait.", "tool_calls")
    assert parts == [{"id": call.id, "name": "add", "arguments": call.function.arguments} for call in calls]
    many = asked(scripted, tools=[ADD, NOW], n=8).choices
    assert [(len(one.message.tool_calls), one.finish_reason) for one in many] == [(2, "tool_calls")] * 8
    assert len({call.id for one in many for call in one.message.tool_calls}) == 16
    one = asked(scripted, tools=[ADD], parallel_tool_calls=False).choices[0]
    assert len(one.message.tool_calls) == 1
    for plain in (asked(scripted), asked(scripted, tools=[ADD], tool_choice="none"), asked(scripted, tools=[])):
        assert plain.choices[0].message.tool_calls is None
        assert CALLS in plain.choices[0].message.content and plain.choices[0].finish_reason == "stop"


@pytest.mark.parametrize("options", [{}, {"parallel_tool_calls": False}, {"n": 2}], ids=str)
def test_the_sdks_stream_closes_every_call(scripted: OpenAI, options: dict[str, Any]) -> None:
    """Which it does before the chunk with the end of the choice."""
    strict = {"type": "function", "function": {**ADD["function"], "strict": True}}
    with scripted.chat.completions.stream(model=MODEL, messages=USER, tools=[strict], seed=3, **options) as stream:
        kinds = [event.type for event in stream]
        whole = stream.get_final_completion()
    calls = sum(len(choice.message.tool_calls or []) for choice in whole.choices)
    assert calls == (1 if "parallel_tool_calls" in options else 2 * options.get("n", 1))
    assert kinds.count("tool_calls.function.arguments.done") == calls
    assert [choice.finish_reason for choice in whole.choices] == ["tool_calls"] * options.get("n", 1)


def test_results_and_null_content_come_back(scripted: OpenAI) -> None:
    first = asked(scripted, tools=[ADD]).choices[0].message
    messages = [*USER, first.to_dict(), *(
        {"role": "tool", "tool_call_id": call.id, "content": "2"} for call in first.tool_calls
    )]  # fmt: skip
    assert asked(scripted, tools=[ADD], messages=messages).choices[0].message.tool_calls
    for text in ("{}", '{"x": "\\ud83d"}', '{"x": NaN}', "[" * 400, "no JSON"):
        function = {"name": "add", "arguments": text}
        calls = [{"id": call.id, "type": "function", "function": function} for call in first.tool_calls]
        messages[1] = {"role": "assistant", "content": None, "tool_calls": calls}
        assert asked(scripted, tools=[ADD], messages=messages, max_tokens=200).choices[0].message.tool_calls


def test_forced_call_follows_the_schema_of_its_tool(small: tuple[OpenAI, str]) -> None:
    for choice in ("required", NAMED):
        answer = asked(*small, tools=[ADD, NOW], tool_choice=choice)
        call = answer.choices[0].message.tool_calls[0].function
        assert answer.to_dict()["trainable"] is False and answer.choices[0].finish_reason == "tool_calls"
        if call.name == "add" or choice == NAMED:
            jsonschema_rs.validate(ADD["function"]["parameters"], json.loads(call.arguments))
        content, calls, finish = streamed(*small, tools=[ADD, NOW], tool_choice=choice)
        assert (content, finish, calls[0]["arguments"]) == ("", "tool_calls", call.arguments)


def test_of_allowed_tools_the_others_are_not_offered(small: tuple[OpenAI, str]) -> None:
    def chosen(mode: str) -> dict[str, Any]:
        return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": [NOW]}}

    ids: dict[str, Any] = {"extra_body": {"return_token_ids": True}, "max_tokens": 2}
    alone = asked(*small, tools=[NOW], **ids)
    allowed = asked(*small, tools=[ADD, NOW], tool_choice=chosen("auto"), **ids)
    assert allowed.choices[0].prompt_token_ids == alone.choices[0].prompt_token_ids
    [call] = asked(*small, tools=[ADD, NOW], tool_choice=chosen("required")).choices[0].message.tool_calls
    assert call.function.name == "now"
    choice: Any = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "now"}]}
    tools: Any = [TOOL, {"type": "function", "name": "now"}]
    answer = small[0].responses.create(model=small[1], input="?", tools=tools, tool_choice=choice, max_output_tokens=90)
    assert [item.name for item in answer.output if item.type == "function_call"] == ["now"]
    assert answer.to_dict()["tool_choice"] == choice


def test_a_refusal_is_text_of_the_assistant(small: tuple[OpenAI, str]) -> None:
    """Also where it stands alone, as in a message that a client sends back."""
    said = "I will not"
    messages: list[dict[str, Any]] = [
        {"role": "assistant", "content": said},
        {"role": "assistant", "content": None, "refusal": said},
        {"role": "assistant", "content": [{"type": "refusal", "refusal": said}]},
        {"role": "assistant", "content": [{"type": "text", "text": "I will "}, {"type": "refusal", "refusal": "not"}]},
    ]
    ids: dict[str, Any] = {"extra_body": {"return_token_ids": True}, "max_tokens": 1}
    read = [asked(*small, messages=[*USER, one, *USER], **ids).choices[0].prompt_token_ids for one in messages]
    assert all(prompt == read[0] for prompt in read)


def test_forced_call_of_a_tool_that_closes_no_object_ends(small: tuple[OpenAI, str]) -> None:
    parameters = {"type": "object", "properties": {"on": {"type": "boolean"}}, "required": ["on"]}
    flag = {"type": "function", "function": {"name": "flag", "parameters": parameters}}
    choices = asked(*small, tools=[flag], tool_choice="required", temperature=1.5, n=64).choices
    found = [json.loads(choice.message.tool_calls[0].function.arguments) for choice in choices]
    assert {tuple(given) for given in found} == {("on",)} and {given["on"] for given in found} == {True, False}


def test_reply_follows_its_response_format(small: tuple[OpenAI, str]) -> None:
    answer = asked(*small, response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}})
    jsonschema_rs.validate(SCHEMA, json.loads(answer.choices[0].message.content))
    assert answer.choices[0].finish_reason == "stop" and answer.to_dict()["trainable"] is False
    free = asked(*small, response_format={"type": "json_object"}, temperature=0.2, max_tokens=100)
    assert free.choices[0].message.content.startswith("{")
    plain = asked(*small, response_format={"type": "text"})
    assert plain.choices[0].message.content == asked(*small).choices[0].message.content


def test_reply_with_tools_and_a_format_is_a_call_or_the_json(small: tuple[OpenAI, str], scripted: OpenAI) -> None:
    """As agents send both that have tools and a type of output."""
    schema = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, "strict": True}}
    both: dict[str, Any] = {"tools": [ADD], "response_format": schema}
    for bias, begins in ((100, "{"), (-100, "<")):  # towards either
        seen = small[0].completions.create(model=small[1], prompt="{", max_tokens=1, extra_body={
            "return_token_ids": True}).choices[0].prompt_token_ids  # fmt: skip
        text = asked(*small, **both, logit_bias={str(seen[0]): bias}, max_tokens=60).choices[0].message.content
        assert text.startswith(begins)
        if begins == "{":
            jsonschema_rs.validate(SCHEMA, json.loads(text))
        else:
            assert text.startswith("<tool_call>")
    calls = asked(scripted, **both).choices[0].message.tool_calls
    assert calls and calls[0].function.name == "add", "a call is read as without a format"


@pytest.mark.parametrize("style", READERS)
def test_format_with_tools_is_refused_where_calls_begin_as_other_text(style: str) -> None:
    given = {"model": "m", "messages": USER, "tools": [ADD], "response_format": {"type": "json_object"}}
    for choice in ("none", "required", NAMED):
        assert ChatRequest.model_validate({**given, "tool_choice": choice}).unless(style) == ""
    either = ChatRequest.model_validate(given)
    if READERS[style].opening:
        assert either.unless(style) == READERS[style].opening
    else:
        with pytest.raises(UnsupportedField, match="response_format together with tools"):
            either.unless(style)


def test_continued_reply_follows_the_given_text(small: tuple[OpenAI, str]) -> None:
    begun = asked(*small, max_tokens=8, extra_body={"return_token_ids": True}).choices[0]
    messages = [*USER, {"role": "assistant", "content": "Well, "}]
    further = asked(*small, messages=messages, max_tokens=8, extra_body={"return_token_ids": True}).choices[0]
    assert further.prompt_token_ids == [*begun.prompt_token_ids, *b"Well, "] or (
        len(further.prompt_token_ids) == len(begun.prompt_token_ids) + 6
    )
    assert not further.message.content.startswith("Well")


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools.0.function.name"),
    ({"tools": [{"type": "function", "function": {"name": "a", "parameters": {"type": "banana"}}}]},
     "tools.0.function.parameters"),
    ({"tools": [{"type": "function", "function": {"name": "a", "parameters": {"$ref": "#/no"}}}]},
     "tools.0.function.parameters"),
    ({"tools": [{"type": "web_search"}]}, "tools.0.type"),
    ({"tools": [{"type": "function", "function": {"name": "a", "parameters": {"x": "y" * 70_000}}}]},
     "tools.0.function.parameters"),
    *(({"tools": [{"type": "function", "function": {"name": "a", "parameters": {"type": kind}}}]},
       "tools.0.function.parameters") for kind in ("string", "array", ["string", "null"])),
    ({"tools": [NOW] * 129}, "tools"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tool_choice": "perhaps", "tools": [NOW]}, "tool_choice"),
    ({"tool_choice": {"type": "custom", "custom": {"name": "now"}}, "tools": [NOW]}, "tool_choice"),
    ({"tool_choice": {"type": "allowed_tools"}, "tools": [NOW]}, "tool_choice.allowed_tools"),
    ({"tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "none", "tools": [NOW]}}, "tools": [NOW]},
     "tool_choice.allowed_tools.mode"),
    *(({"tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": [NAMED]}}, "tools": [NOW]},
       "tool_choice") for mode in ("auto", "required")),
    ({"tool_choice": {"type": "function"}, "tools": [NOW]}, "tool_choice.function"),
    ({"tools": [NOW], "tool_choice": NAMED}, "tool_choice"),
    ({"tools": [{"type": "function", "function": {"name": "a", "parameters": {"type": "object", "properties": {
        "x": {"not": {"type": "string"}}}}}}], "tool_choice": "required"}, "tools"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "banana"}}}},
     "response_format"),
    ({"response_format": {"type": "grammar"}}, "response_format.type"),
    ({"messages": [{"role": "assistant", "content": None}]}, "messages.0.content"),
    ({"messages": [{"role": "user", "content": None}]}, "messages.0.content"),
    ({"messages": [{"role": "user", "content": [{"type": "refusal", "refusal": "x"}]}]}, "messages.0.content"),
    ({"messages": [{"role": "tool", "content": None, "tool_call_id": "x"}]}, "messages.0.content"),
    ({"messages": [*USER, {"role": "assistant", "tool_calls": [
        {"id": "1", "type": "function", "function": {"name": "add", "arguments": "{}"}}]}]}, "messages.1.tool_calls"),
    ({"messages": [{"role": "user", "content": "x", "tool_calls": [
        {"id": "1", "type": "function", "function": {"name": "add", "arguments": "{}"}}]}]}, "messages.0.tool_calls"),
    ({"messages": [*USER, {"role": "assistant", "content": "One"}], "tools": [NOW]}, "messages"),
    ({"extra_body": {"functions": [{"name": "f"}]}}, "functions"),
]  # fmt: skip


@pytest.mark.parametrize(("options", "param"), REFUSED, ids=[param for _, param in REFUSED])
def test_wrong_tools_and_formats_are_refused_by_name(small: tuple[OpenAI, str], options: Any, param: str) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        asked(*small, **options)
    assert refused.value.param == param, refused.value.message
    assert "\n" not in refused.value.message and len(refused.value.message) < 600


NESTED = '{"a": ' + "[" * 70 + "]" * 70 + "}"
ARGUMENTS: list[tuple[str, Any]] = [
    ('{"a": 1}', {"a": 1}), (" ", {}), ("[1]", "[1]"), ('{"a"', '{"a"'), ('{"a": NaN}', '{"a": NaN}'),
    (NESTED, json.loads(NESTED)), (f'{{"a": 1{"0" * 300}}}', {"a": 10**300}),
    (f"[{'{},' * 99_998}{{}}", f"[{'{},' * 99_998}{{}}"), (f"[{'{},' * 100_000}{{}}]", None), ('"",' * 500_000, None),
]  # fmt: skip


@pytest.mark.parametrize(("text", "read"), ARGUMENTS, ids=lambda value: str(value)[:10])
def test_arguments_of_calls_become_objects_within_the_limit_of_a_body(text: str, read: Any) -> None:
    call = {"function": {"name": "f", "arguments": text}}
    messages: list[dict[str, Any]] = [{"role": "user"}, {"tool_calls": [call]}]
    if read is not None:
        read_arguments(messages)
        assert call == {"function": {"name": "f", "arguments": read}}
        return
    where = "messages.1.tool_calls.0.function.arguments"
    with pytest.raises(UnsupportedField, match=f"{where} has more than 200000 items") as refused:
        read_arguments(messages)
    assert refused.value.param == where


HEAVY = {"allOf": [{"type": "string", "pattern": f"(a|b)*a(a|b){{{i}}}c"} for i in range(1, 41)]}
"""In less than two kilobytes, a grammar that takes minutes and gigabytes to compile."""


def test_schema_that_is_heavy_to_compile_is_refused(small: tuple[OpenAI, str]) -> None:
    tools = [{"type": "function", "function": {"name": "a", "parameters": {"properties": {"x": HEAVY}}}}]
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": HEAVY}}
    for options in ({"tools": tools}, {"response_format": form}):
        for _ in range(2):  # the second time by what is known of the first
            with pytest.raises(openai.BadRequestError, match="make their patterns simpler") as refused:
                asked(*small, **options)
            assert refused.value.param == next(iter(options)) and "\n" not in refused.value.message
    with pytest.raises(openai.BadRequestError, match="make their patterns simpler"):
        small[0].responses.create(model=small[1], input="x", tools=[{"type": "function", **tools[0]["function"]}])


def test_schema_that_takes_too_much_work_while_sampling_is_refused(small: tuple[OpenAI, str]) -> None:
    plain = {"anyOf": [{"type": "object"}] * 900}
    later = {"type": "object", "properties": {"s": {"type": "string", "maxLength": 3}, "k": plain},
             "required": ["s", "k"], "additionalProperties": False}  # fmt: skip
    for schema, problem in ((plain, "the schema cannot be followed"), (later, "the reply cannot follow its schema")):
        form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
        with pytest.raises(openai.BadRequestError, match=problem) as refused:
            asked(*small, response_format=form)
        assert "\n" not in refused.value.message and len(refused.value.message) < 600


def test_embeddings_are_refused_in_one_line(small: tuple[OpenAI, str]) -> None:
    with pytest.raises(openai.BadRequestError, match="embeddings are not supported: the models here write text"):
        small[0].embeddings.create(model=small[1], input="x")


# --- the Responses API ------------------------------------------------------------------------------------------------

TOOL = {"type": "function", **ADD["function"]}


def test_response_has_the_text_and_calls_of_the_chat(scripted: OpenAI) -> None:
    answer = scripted.responses.create(model=MODEL, input="What is 1 + 2?", tools=[TOOL], metadata={"run": "1"})
    assert (answer.status, answer.output_text, answer.model, answer.metadata) == (
        "completed", "Wait.", MODEL, {"run": "1"}
    )  # fmt: skip
    calls = [item for item in answer.output if item.type == "function_call"]
    assert [(call.name, json.loads(call.arguments)) for call in calls] == [("add", {"a": 1})] * 2
    outputs = [{"type": "function_call_output", "call_id": call.call_id, "output": "3"} for call in calls]
    further: list[Any] = [{"role": "user", "content": "What is 1 + 2?"}, *(item.to_dict() for item in answer.output)]
    again = scripted.responses.create(model=MODEL, input=[*further, *outputs], instructions="Be brief.", store=False)
    assert again.output_text.startswith("Wait.") and len(again.output) == 1
    assert again.usage and answer.usage and again.usage.input_tokens > 100


def test_reasoning_among_the_items_is_not_read(scripted: OpenAI) -> None:
    item = {"type": "reasoning", "id": "r", "summary": [{"type": "summary_text", "text": "x" * 70_000}],
            "content": [{"type": "reasoning_text", "text": "x"}], "encrypted_content": "y" * 70_000}  # fmt: skip
    plain = scripted.responses.create(model=MODEL, input=USER)
    with_it = scripted.responses.create(model=MODEL, input=[item, *USER])
    assert plain.usage and with_it.usage and with_it.usage.input_tokens == plain.usage.input_tokens


def test_parts_of_the_items_have_their_text(scripted: OpenAI) -> None:
    """A refusal has it under its own name; a part without any is a mistake."""

    def read(part: dict[str, str]) -> int:
        given: list[Any] = [*USER, {"role": "assistant", "content": [part]}, *USER]
        usage = scripted.responses.create(model=MODEL, input=given).usage
        assert usage is not None
        return usage.input_tokens

    said = "I will never do that, no no no"
    assert read({"type": "refusal", "refusal": said}) == read({"type": "output_text", "text": said})
    for part in ({"type": "refusal"}, {"type": "output_text"}):
        with pytest.raises(openai.BadRequestError, match="text"):
            read(part)


def test_streamed_response_ends_with_the_whole_one(scripted: OpenAI) -> None:
    with scripted.responses.stream(model=MODEL, input="What is 1 + 2?", tools=[TOOL]) as stream:
        events = list(stream)
        whole = stream.get_final_response()
    kinds = [event.type for event in events]
    assert kinds[:2] == ["response.created", "response.in_progress"] and kinds[-1] == "response.completed"
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == "Wait."
    assert [item.type for item in whole.output] == ["message", "function_call", "function_call"]
    added = [event.output_index for event in events if event.type == "response.output_item.added"]
    done = [event.output_index for event in events if event.type == "response.output_item.done"]
    assert added == [0, 1, 2] and sorted(done) == [0, 1, 2]


def test_calls_are_of_the_sdks_types(scripted: OpenAI) -> None:
    with OpenAI(
        base_url=scripted.base_url, api_key=scripted.api_key, max_retries=0, _strict_response_validation=True
    ) as strict:
        assert asked(strict, tools=[ADD]).choices[0].message.tool_calls
        assert list(asked(strict, tools=[ADD], stream=True))
        assert strict.responses.create(model=MODEL, input="?", tools=[TOOL]).output
        assert list(strict.responses.create(model=MODEL, input="?", tools=[TOOL], stream=True))


def test_pieces_of_a_streamed_response_have_their_log_probabilities(small: tuple[OpenAI, str]) -> None:
    client, base = small
    more: Any = {"include": ["message.output_text.logprobs"], "top_logprobs": 1}
    plain: Any = {"model": base, "input": "?", "max_output_tokens": 30, "extra_body": {"seed": 5}}
    *events, last = client.responses.create(**plain, **more, stream=True)
    assert last.type in ("response.completed", "response.incomplete")
    [whole] = [part["logprobs"] for item in last.response.to_dict()["output"] for part in item["content"]]
    pieces = [event.to_dict()["logprobs"] for event in events if event.type == "response.output_text.delta"]
    assert len(pieces) > 1 and all(pieces), "each has those of its tokens"
    joined = [one for piece in pieces for one in piece]
    assert joined == whole[: len(joined)] and len(whole) - len(joined) <= 1, "the end of the reply has no text"
    silent = client.responses.create(**plain, stream=True)
    assert not any(event.logprobs for event in silent if event.type == "response.output_text.delta")


def test_response_follows_its_format_and_is_incomplete_where_cut(small: tuple[OpenAI, str]) -> None:
    client, base = small
    form: Any = {"format": {"type": "json_schema", "name": "x", "schema": SCHEMA, "strict": True}}
    answer = client.responses.create(model=base, input="?", text=form)
    jsonschema_rs.validate(SCHEMA, json.loads(answer.output_text))
    assert answer.to_dict()["trainable"] is False
    cut = client.responses.create(model=base, input="?", max_output_tokens=2, include=["message.output_text.logprobs"])
    assert cut.status in ("incomplete", "completed")
    if cut.status == "incomplete":
        assert cut.incomplete_details and cut.incomplete_details.reason == "max_output_tokens"
    streamed: Any = [*client.responses.create(model=base, input="?", max_output_tokens=2, stream=True)][-1]
    for response in (cut, streamed.response):
        assert [item.status for item in response.output] == [response.status]


@pytest.mark.parametrize(
    "asked",
    [
        {"input": "What is 1 + 2?"},
        {"input": USER, "instructions": "Be brief.", "tools": [TOOL]},
        {"input": USER, "tools": [TOOL], "tool_choice": {"type": "function", "name": "add"}},
        {"input": USER, "text": {"format": {"type": "json_schema", "name": "x", "schema": SCHEMA}}},
        {"input": [*USER, {"type": "function_call", "call_id": "1", "name": "add", "arguments": "{}"},
                   {"type": "function_call_output", "call_id": "1", "output": "3"}], "tools": [TOOL]},
        {"input": [*USER, {"role": "assistant", "content": "It is"}], "reasoning": {"effort": "none"}},
    ],
)  # fmt: skip
def test_input_tokens_are_those_that_a_response_reads(small: tuple[OpenAI, str], asked: dict[str, Any]) -> None:
    client, model = small
    count = client.responses.input_tokens.count(model=model, **asked)
    usage = client.responses.create(model=model, max_output_tokens=1, **asked).usage
    assert usage and count.input_tokens == usage.input_tokens and count.object == "response.input_tokens"


def test_input_tokens_are_counted_beyond_the_context(small: tuple[OpenAI, str]) -> None:
    """A client counts to learn whether its text fits."""
    client, model = small
    few, many = (client.responses.input_tokens.count(model=model, input="x" * size).input_tokens for size in (1, 4001))
    assert many == few + 4000 > 2048, "a token is a byte"
    with pytest.raises(openai.BadRequestError, match="maximum context length") as refused:
        client.responses.create(model=model, input="x" * 4001)
    assert (refused.value.param, refused.value.code) == ("input", "context_length_exceeded")
    with pytest.raises(openai.BadRequestError, match="maximum context length") as refused:
        client.responses.input_tokens.count(model=model, input="x" * 100_000)
    assert (refused.value.param, refused.value.code) == ("input", "context_length_exceeded")
    with pytest.raises(openai.NotFoundError) as missing:
        client.responses.input_tokens.count(model="nobody's", input="x")
    assert missing.value.code == "model_not_found"


def test_a_response_that_is_not_stored_has_the_code_by_which_clients_send_the_whole_conversation(
    small: tuple[OpenAI, str],
) -> None:
    for ask in (small[0].responses.create, small[0].responses.input_tokens.count):
        with pytest.raises(openai.BadRequestError) as refused:
            ask(model=small[1], input="x", previous_response_id="resp_1")
        assert refused.value.code == "previous_response_not_found"
        assert "previous response" in refused.value.message and "not found" in refused.value.message


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"background": True}, "background"),
        ({"input": [*USER, {"type": "item_reference", "id": "msg_1"}, *USER]}, "input.1"),
        ({"truncation": "auto"}, "truncation"),
        ({"tools": [{"type": "web_search"}]}, "tools.0.type"),
        ({"tools": [{"type": "function", "name": "a", "parameters": {"type": "banana"}}]}, "tools.0.parameters"),
        ({"tools": [{"type": "function", "name": "a b"}]}, "tools.0.name"),
        ({"tool_choice": {"type": "web_search"}}, "tool_choice"),
        ({"tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": []}}, "tool_choice.tools"),
        ({"tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "x"}]}},
         "tool_choice"),
        ({"text": {"verbosity": "low"}}, "text.verbosity"),
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format.schema"),
        ({"text": {"format": {"type": "text", "grammar": "x"}}}, "text.format.grammar"),
        ({"text": {"format": {"type": "json_schema", "name": "x", "schema": {"type": "banana"}}}}, "text.format"),
        ({"instructions": "Be brief.", "input": [
            {"type": "reasoning", "id": "r", "summary": []}, *USER,
            {"type": "function_call", "call_id": "c", "name": "add", "arguments": "{}"}]}, "input.2.tool_calls"),
        ({"input": "x" * 60_000}, "input"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "input.0.content"),
        ({"input": [{"type": "message", "content": "x"}]}, "input.0.role"),
        ({"input": [{"role": "user", "content": "x"}, {"type": "function_call", "call_id": "c"}]}, "input.1.name"),
        ({"input": [{"role": "user"}]}, "input.0.content"),
        ({"input": []}, "input"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"include": ["file_search_call.results"]}, "include"),
        ({"reasoning": {"effort": "high"}}, "reasoning.effort"),
        ({"reasoning": {"summary": "detailed"}}, "reasoning.summary"),
        ({"reasoning": "high"}, "reasoning"),
        ({"reasoning": ["high"]}, "reasoning"),
        ({"input": [*USER, {"role": "assistant", "content": "So", "tool_calls": [TOOL]}, *USER]}, "input.1.tool_calls"),
        ({"input": [{"role": "user", "content": "x", "arguments": "{}"}]}, "input.0.arguments"),
        ({"input": [{"role": "user", "content": "x", "output": "3"}]}, "input.0.output"),
        ({"input": [*USER, {"type": "function_call", "name": "add", "content": "x"}, *USER]}, "input.1.content"),
        ({"input": [*USER, {"type": "function_call_output", "output": "x", "role": "user"}]}, "input.1.role"),
        ({"input": [{"role": "user", "content": [{"type": "input_text", "text": "x", "detail": "high"}]}]},
         "input.0.content.0.detail"),
        ({"stream_options": {"include_usage": True}}, "stream_options.include_usage"),
        ({"tools": [{**TOOL, "defer_loading": True}]}, "tools.0.defer_loading"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
    ],
)  # fmt: skip
def test_wrong_responses_requests_are_refused_by_name(small: tuple[OpenAI, str], options: Any, param: str) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        small[0].responses.create(**{"model": small[1], "input": "x", **options})
    assert str(refused.value.param).startswith(param), refused.value.message
    line = refused.value.message
    assert "messages" not in line and "response_format" not in line and "\n" not in line, "names of this API"


CALL = {"id": "1", "type": "function", "function": {"name": "add", "arguments": "{}"}}
FORM = {"type": "json_schema", "name": "x", "schema": SCHEMA}
WHOLE: list[tuple[str, type[OpenAIModel], dict[str, Any]]] = [
    ("/v1/chat/completions", ChatRequest, {
        "messages": [{"role": "user", "content": [{"type": "text", "text": "x"}]},
                     {"role": "assistant", "tool_calls": [CALL]},
                     {"role": "tool", "tool_call_id": "1", "content": "3"}],
        "tools": [ADD], "tool_choice": {"type": "function", "function": {"name": "add"}}}),
    ("/v1/chat/completions", ChatRequest, {
        "messages": USER, "stream": True, "stream_options": {},
        "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}}),
    ("/v1/completions", CompletionRequest, {"prompt": "x", "stream": True, "stream_options": {}}),
    ("/v1/responses", ResponsesRequest, {
        "input": [{"role": "user", "content": [{"type": "input_text", "text": "x"}]},
                  {"type": "function_call", "call_id": "1", "name": "add", "arguments": "{}"},
                  {"type": "function_call_output", "call_id": "1", "output": [{"type": "input_text", "text": "3"}]}],
        "tools": [TOOL], "tool_choice": {"type": "function", "name": "add"}}),
    ("/v1/responses", ResponsesRequest, {
        "input": "x", "stream": True, "stream_options": {}, "text": {"format": FORM}, "reasoning": {}}),
    ("/inference/v1/generate", TokenRequest, {"token_ids": [1], "sampling_params": {"stream_options": {}}}),
    ("/v1/chat/completions", ChatRequest, {
        "messages": USER, "tools": [ADD],
        "tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [NAMED]}}}),
    ("/v1/responses", ResponsesRequest, {
        "input": "x", "tools": [TOOL], "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [
            {"type": "function", "name": "add"}]}}),
    ("/v1/responses/input_tokens", ResponsesInput, {"input": "x", "text": {"format": FORM}, "reasoning": {}}),
]  # fmt: skip
"""Requests that have every model of theirs."""


def models_of(annotation: Any) -> set[type[OpenAIModel]]:
    """The models of requests that an annotation names, and those within them."""
    if isinstance(annotation, type) and issubclass(annotation, OpenAIModel):
        return {annotation}.union(*(models_of(field.annotation) for field in annotation.model_fields.values()))
    return set().union(*map(models_of, get_args(annotation)))


def places(model: OpenAIModel, given: Any, where: str) -> Iterator[tuple[str, type[OpenAIModel], dict[str, Any]]]:
    """Each model of a request: its path, its type and what was given for it."""
    yield where, type(model), given
    for name, field in type(model).model_fields.items():
        value, part = getattr(model, name), given.get(field.alias or name)
        many = value if isinstance(value, list) else [value]
        for number, one in enumerate(many):
            path = f"{where}{field.alias or name}." + (f"{number}." if isinstance(value, list) else "")
            if isinstance(one, OpenAIModel) and isinstance(part, dict | list):
                yield from places(one, part[number] if isinstance(value, list) else part, path)


def test_an_unknown_field_is_refused_in_every_model_of_a_request(small: tuple[OpenAI, str]) -> None:
    client, model = small
    found: set[type[OpenAIModel]] = set()
    for path, kind, body in WHOLE:
        whole = {"model": model, **copy.deepcopy(body)}
        url = f"{str(client.base_url).partition('/v1')[0]}{path}"
        for where, of, given in [*places(kind.model_validate(whole), whole, "")]:
            found.add(of)
            given["no_such_field"] = "x"
            with pytest.raises(openai.BadRequestError) as refused:
                client.post(url, body=whole, cast_to=object)
            name = f"{where}no_such_field".removeprefix("sampling_params.")
            assert (refused.value.param, refused.value.code) == (name, "unknown_parameter")
            del given["no_such_field"]
    assert found == set().union(*(models_of(kind) for _, kind, _ in WHOLE))


SENT = {
    "/v1/chat/completions": completion_create_params.CompletionCreateParamsNonStreaming,
    "/v1/completions": TextParams,
    "/v1/responses": response_create_params.ResponseCreateParamsNonStreaming,
    "/v1/responses/input_tokens": input_token_count_params.InputTokenCountParams,
}
"""The parameters of the SDK by path."""


@pytest.mark.parametrize(("path", "kind", "body"), [WHOLE[1], WHOLE[2], WHOLE[4], WHOLE[-1]], ids=SENT)
def test_every_parameter_of_the_sdk_is_read_refused_or_documented_as_without_effect(
    scripted: OpenAI, path: str, kind: type[OpenAIModel], body: dict[str, Any]
) -> None:
    page = (Path(__file__).parents[2] / "docs" / "serving.md").read_text(encoding="utf-8")
    whole = {name: value for name, value in body.items() if not name.startswith("stream")}
    plain, read = {"model": MODEL, **whole}, kind.model_fields
    url, names = f"{str(scripted.base_url).partition('/v1')[0]}{path}", SENT[path].__annotations__
    assert whole.keys() < names.keys()
    for name in names:
        if name in read:
            accepted = (read[name].description or "").startswith("No effect")
        else:
            try:
                scripted.post(url, body={**plain, name: {"a": 1}}, cast_to=object)
                accepted = True
            except openai.BadRequestError as refused:
                accepted = False
                assert refused.param == name and refused.message.count(name), refused.message
        assert not accepted or f"`{name}`" in page, f"docs/serving.md: {name} has no effect"


@pytest.mark.parametrize(
    ("part", "kind", "sent"),
    [
        (TextPart, "text", ChatCompletionContentPartTextParam),
        (InputPart, "input_text", ResponseInputTextParam),
        (InputPart, "output_text", ResponseOutputTextParam),
    ],
)
def test_every_field_of_the_sdks_texts_is_accepted(part: type[OpenAIModel], kind: str, sent: Any) -> None:
    """They say where the text comes from, or what is cached."""
    others = {
        name: {"a": 1} for name in {*sent.__annotations__, "prompt_cache_breakpoint", "parsed"} - {"text", "type"}
    }
    given = part.model_validate({"type": kind, "text": "x", **others})
    assert not given.unread and part.model_validate({"type": kind, "text": "x", "color": "red"}).unread


def test_fields_that_clients_send_back_are_accepted(small: tuple[OpenAI, str]) -> None:
    client, model = small
    part = {"type": "output_text", "text": "So", "annotations": [{"type": "url_citation"}], "logprobs": []}
    items: list[Any] = [
        *USER, {"type": "message", "id": "m", "status": "completed", "role": "assistant", "content": [part],
                "phase": "final_answer", "created_by": None},
        {"type": "function_call", "id": "f", "status": "completed", "call_id": "1", "name": "add", "arguments": "{}",
         "namespace": None, "parsed_arguments": {"a": 1}},
        {"type": "function_call_output", "id": "o", "status": None, "call_id": "1", "output": "3"}]  # fmt: skip
    options: dict[str, Any] = {"stream_options": {"include_obfuscation": False}, "reasoning": {"effort": "none"}}
    answer = client.responses.create(model=model, input=items, max_output_tokens=2, **options, stream=False)
    assert answer.usage and answer.usage.output_tokens
    messages: list[Any] = [
        {"role": "user", "content": [{"type": "text", "text": "x", "cache_control": {"type": "ephemeral"}}]},
        {"role": "assistant", "content": None, "tool_calls": [{**CALL, "index": 1}], "annotations": []},
        {"role": "assistant", "content": "{}", "parsed": {"a": 1}, "tool_calls": [
            {**CALL, "function": {**CALL["function"], "parsed_arguments": {"a": 1}}}]},
        {"role": "tool", "tool_call_id": "1", "content": "3"}]  # fmt: skip
    assert asked(client, model, messages=messages, tools=[ADD], max_tokens=2).usage
