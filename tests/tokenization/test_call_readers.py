"""Calls that the templates of many families write are read back with the same names and arguments."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rookery.simulation.fakes.text import byte_tokenizer
from rookery.tokenization.call_readers import READERS
from rookery.tokenization.call_values import ToolCall, python_calls, read_json
from rookery.tokenization.chat import Chat


def family(each: str, begin: str = "", between: str = "", end: str = "", before: str = "") -> str:
    """A template in whose messages ``each`` writes the function ``f`` of a call."""
    return (
        before + "{% for tool in tools or [] %}{{ tool | tojson }}{% endfor %}{% for m in messages %}<|im_start|>"
        "{{ m.role }}\n{{ m.content }}{% if m.tool_calls %}"
        + begin
        + "{% for call in m.tool_calls %}{% set f = call.function %}"
        + each
        + "{% if not loop.last %}"
        + between
        + "{% endif %}{% endfor %}"
        + end
        + "{% endif %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )


PLAIN = "{{ {'name': f.name, 'arguments': f.arguments} | tojson }}"
TEXT_OR_JSON = "{{ v if v is string else v | tojson }}"
ITEMS = "{% for k, v in f.arguments.items() %}"
IN_PYTHON = (
    "{{ f.name }}({% for k, v in f.arguments.items() %}{{ k }}={% if v is string %}'{{ v }}'{% else %}{{ v | string }}"
    "{% endif %}{{ ', ' if not loop.last }}{% endfor %})"
)
GEMMA = (
    "{% macro value(v) %}{% if v is string %}Q{{ v }}Q{% elif v is boolean %}{{ 'true' if v else 'false' }}"
    "{% elif v is mapping %}{{ '{' }}{% for k, one in v | dictsort %}{{ k }}:{{ value(one) }}{{ ',' if not loop.last }}"
    "{% endfor %}{{ '}' }}{% elif v is sequence %}[{% for one in v %}{{ value(one) }}{{ ',' if not loop.last }}"
    "{% endfor %}]{% else %}{{ v }}{% endif %}{% endmacro %}"
)
IN_GEMMA = "{{ 'call:' + f.name }}{{ value(f.arguments) }}"
IN_TAGS = (
    '<｜DSML｜invoke name="{{ f.name }}">\n' + ITEMS + '<｜DSML｜parameter name="{{ k }}" '
    "string=\"{{ 'true' if v is string else 'false' }}\">" + TEXT_OR_JSON
    + "</｜DSML｜parameter>\n{% endfor %}</｜DSML｜invoke>\n"
)  # fmt: skip

FAMILIES: dict[str, tuple[str, str]] = {
    "Qwen": ("hermes", family("<tool_call>\n" + PLAIN + "\n</tool_call>", between="\n")),
    "Qwen Coder": ("hermes", family(
        "<tool_call>\n<function={{ f.name }}>\n" + ITEMS + "<parameter={{ k }}>\n" + TEXT_OR_JSON
        + "\n</parameter>\n{% endfor %}</function>\n</tool_call>", between="\n")),
    "GLM": ("hermes", family(
        "\n<tool_call>{{ f.name }}\n" + ITEMS + "<arg_key>{{ k }}</arg_key>\n<arg_value>" + TEXT_OR_JSON
        + "</arg_value>\n{% endfor %}</tool_call>")),
    "Llama 3": ("llama3", family("{{ {'name': f.name, 'parameters': f.arguments} | tojson }}", between="; ")
                + "{# <|python_tag|> #}"),
    "Mistral": ("mistral", family(PLAIN, "[TOOL_CALLS] [", ", ", "]")),
    "Mistral Small": ("mistral", family("[TOOL_CALLS]{{ f.name }}[ARGS]{{ f.arguments | tojson }}")),
    "Jamba": ("jamba", family(PLAIN, "<tool_calls>[", ", ", "]</tool_calls>")),
    "MiniMax-M1": ("jamba", family(PLAIN, "<tool_calls>\n", "\n", "\n</tool_calls>")),
    "Granite": ("granite", family(PLAIN, "<|tool_call|>[", ", ", "]")),
    "Phi-4-mini": ("granite", family(PLAIN, "<|tool_call|>[", ", ", "]<|/tool_call|>")),
    "Nemotron": ("nemotron", family(PLAIN, "<TOOLCALL>[", ", ", "]</TOOLCALL>")),
    "InternLM": ("intern", family("<|action_start|><|plugin|>" + PLAIN + "<|action_end|>")),
    "Command A": ("command", family(
        "{{ {'tool_call_id': '0', 'tool_name': f.name, 'parameters': f.arguments} | tojson }}",
        "<|START_ACTION|>[\n", ",\n", "\n]<|END_ACTION|>")),
    "Apertus": ("apertus", family("{{ {f.name: f.arguments} | tojson }}", "<|tools_prefix|>[", ", ",
                                  "]<|tools_suffix|>")),
    "Seed-OSS": ("seed", family(
        "<seed:tool_call>\n<function={{ f.name }}>\n" + ITEMS + "<parameter={{ k }}>{{ v | string }}</parameter>\n"
        "{% endfor %}</function>\n</seed:tool_call>")),
    "MiniMax-M2": ("minimax", family(
        '<invoke name="{{ f.name }}">\n' + ITEMS + '<parameter name="{{ k }}">' + TEXT_OR_JSON
        + "</parameter>\n{% endfor %}</invoke>\n", "<minimax:tool_call>\n", "", "</minimax:tool_call>")),
    "Gemma 4": ("gemma", family("<|tool_call>" + IN_GEMMA + "<tool_call|>", before=GEMMA.replace("Q", '<|"|>'))),
    "FunctionGemma": ("function_gemma", family(
        "<start_function_call>" + IN_GEMMA + "<end_function_call>", before=GEMMA.replace("Q", "<escape>"))),
    "LFM2.5": ("lfm", family(IN_PYTHON, "<|tool_call_start|>[", ", ", "]<|tool_call_end|>")),
    "OLMo 3": ("olmo", family(IN_PYTHON, "<function_calls>\n", "{{ '\\n' }}", "\n</function_calls>")),
    "Llama 4": ("pythonic", family(IN_PYTHON, "[", ", ", "]")),
    "gpt-oss": ("harmony", family(
        "<|channel|>commentary to=functions.{{ f.name }} json<|message|>{{ f.arguments | tojson }}<|call|>",
        between="<|start|>assistant")),
    "DeepSeek V3": ("deepseek", family(
        "<｜tool▁call▁begin｜>{{ call.type }}<｜tool▁sep｜>{{ f.name }}\n```json\n{{ f.arguments | tojson }}\n```"
        "<｜tool▁call▁end｜>", "<｜tool▁calls▁begin｜>", "\n", "<｜tool▁calls▁end｜>")),
    "DeepSeek V3.1": ("deepseek", family(
        "{{ '<｜tool▁call▁begin｜>' + f.name + '<｜tool▁sep｜>' + f.arguments + '<｜tool▁call▁end｜>' }}",
        "<｜tool▁calls▁begin｜>", "", "<｜tool▁calls▁end｜>")),
    "DeepSeek V3.2": ("deepseek_v32", family(IN_TAGS, "<｜DSML｜function_calls>\n", "", "</｜DSML｜function_calls>")),
    "DeepSeek V4": ("deepseek_v4", family(IN_TAGS, "<｜DSML｜tool_calls>\n", "", "</｜DSML｜tool_calls>")),
    "Kimi K2": ("kimi", family(
        "<|tool_call_begin|>{{ call.id }}<|tool_call_argument_begin|>{{ f.arguments | tojson }}<|tool_call_end|>",
        "<|tool_calls_section_begin|>", "", "<|tool_calls_section_end|>")),
    "arguments as text": ("hermes", family(
        "<tool_call>\n" + '{"name": "{{ f.name }}", "arguments": {{ f.arguments }}}' + "\n</tool_call>", between="\n")),
}  # fmt: skip

RAW = ("lfm", "olmo", "pythonic")
"""Their templates write texts between quotes as they are: one with a quote or a backslash cannot be read."""

TEXTS = [
    "", "x", " x ", "1", "007", "true", "null", "None", "a\nb", "\n", "é 漢 🙂", "{", "}", "]", ", b=2", "a: b", "[1]",
    '{"a": 1}', "</tool_call>", "<tool_call>", "see </tool_call>\n<tool_call>", "[TOOL_CALLS]", "[ARGS]{}",
    "</tool_calls>", "<|/tool_call|>", "</TOOLCALL>", "<|action_end|>", "<|END_ACTION|>", "<|tools_suffix|>",
    "</seed:tool_call>", "</minimax:tool_call>",
    "</｜DSML｜function_calls>", "</｜DSML｜tool_calls>", "</｜DSML｜invoke>",
    "<|call|>", "<|end|> <|start|>", "<｜tool▁calls▁end｜>", "<｜tool▁call▁end｜>", "<|tool_calls_section_end|>", "```",
    "</function>", "</invoke>", "<tool_call|>", "<end_function_call>", "<|tool_call_end|>", "</function_calls>",
]  # fmt: skip
QUOTED = ['say "x"', "it's", "\\", "\\n", r"\d+", 'a"</tool_call>']

PARAMETERS = {
    "type": "object",
    "properties": {
        "text": {"type": "string"}, "number": {"type": "integer"}, "real": {"type": "number"},
        "flag": {"type": "boolean"}, "list": {"type": "array"},
    },
}  # fmt: skip
TOOLS = [{"type": "function", "function": {"name": "put", "description": "?", "parameters": PARAMETERS}}]
USER = {"role": "user", "content": "?"}


def arguments(texts: list[str]) -> st.SearchStrategy[dict[str, Any]]:
    text = st.sampled_from(texts)
    return st.fixed_dictionaries(
        {"text": text},
        optional={
            "number": st.integers(-(2**70), 2**70), "real": st.floats(-1e300, 1e300), "flag": st.booleans(),
            "list": st.lists(st.one_of(text, st.integers(-9, 9)), max_size=3),
        },
    )  # fmt: skip


def written(chat: Chat, given: list[dict[str, Any]]) -> str:
    """The reply with these calls of ``put``, as the template writes it."""
    calls = [{"id": "abcdefghi", "type": "function", "function": {"name": "put", "arguments": one}} for one in given]
    messages, more = chat.tools.adapt([USER, {"role": "assistant", "content": "", "tool_calls": calls}], TOOLS)
    text = chat.render(messages, add_generation_prompt=False, **more)
    return text.rpartition("assistant\n")[2].removesuffix("<|im_end|>\n")


CHATS = {name: Chat(byte_tokenizer(), template, special={}, ends=[2], context=512)
         for name, (_, template) in FAMILIES.items()}  # fmt: skip


@pytest.mark.parametrize("name", FAMILIES)
def test_format_is_the_one_whose_reader_reads_the_calls_of_the_template(name: str) -> None:
    support = CHATS[name].tools
    assert (support.style, support.argument, support.calls) == (FAMILIES[name][0], "tools", True)


@settings(deadline=None, max_examples=50)
@given(data=st.data())
@pytest.mark.parametrize("name", FAMILIES)
def test_written_calls_are_read_back(name: str, data: st.DataObject) -> None:
    """Whatever mark of a format their texts have, whole and as a stream."""
    style, chat = FAMILIES[name][0], CHATS[name]
    calls = data.draw(st.lists(arguments(TEXTS if style in RAW else TEXTS + QUOTED), min_size=1, max_size=2))
    reply = written(chat, calls)
    make = lambda: chat.call_reader(TOOLS)  # noqa: E731
    found = make().feed(reply, last=True)
    assert [(one.name, json.loads(one.arguments)) for one in found if isinstance(one, ToolCall)] == [
        ("put", one) for one in calls
    ], reply
    assert len(found) == len(calls)
    size, reader = data.draw(st.integers(1, 9)), make()
    streamed = [one for at in range(0, len(reply), size) for one in reader.feed(reply[at : at + size], last=False)]
    assert [*streamed, *reader.feed("", last=True)] == found


@pytest.mark.parametrize("name", FAMILIES)
def test_calls_and_text_of_a_reply_are_read(name: str) -> None:
    style, chat = FAMILIES[name][0], CHATS[name]
    content, calls = chat.read_reply(chat.encode(written(chat, [{"text": "a"}])), (), TOOLS)
    assert (content.strip(), [(called, json.loads(given)) for called, given in calls]) == ("", [("put", {"text": "a"})])
    if READERS[style].opening:
        before = "I will.\n" + written(chat, [{"text": "a"}])
        content, calls = chat.read_reply(chat.encode(before), (), TOOLS)
        assert (content.strip(), len(calls)) == ("I will.", 1)


NO_CALLS = [
    ("hermes", "<tool_call>other\n</tool_call>"),
    ("hermes", "<tool_call>put\n<arg_key>a</arg_key>\n<arg_value>1\n</tool_call>"),
    ("hermes", "<tool_call>put" + "<arg_key>a</arg_key><arg_value>1</arg_value>" * 2 + "</tool_call>"),
    ("hermes", '<tool_call>{"name": "put", "arguments": {"a": 1, "a": 2}}</tool_call>'),
    ("hermes", '<tool_call>{"name": "put", "arguments": {"a": "x</tool_call>'),
    ("mistral", '[TOOL_CALLS]put[ARGS]{"a": 1, "a": 2}'),
    ("jamba", '<tool_calls>[{"name": "put"}, 1]</tool_calls>'),
    ("jamba", "<tool_calls>put</tool_calls>"),
    ("command", '<|START_ACTION|>[{"name": "put", "parameters": {}}]<|END_ACTION|>'),
    ("apertus", '<|tools_prefix|>[{"put": {}, "add": {}}]<|tools_suffix|>'),
    ("minimax", '<minimax:tool_call><invoke name="put"><parameter name="a">1</invoke></minimax:tool_call>'),
    ("jamba", '<tool_calls>{"name": "put", "arguments": {}}\n{"name": </tool_calls>'),
    *(("deepseek_v4", f'<｜DSML｜tool_calls><｜DSML｜invoke name="put">{text}</｜DSML｜tool_calls>') for text in (
        '<｜DSML｜parameter name="a" string="false">x</｜DSML｜parameter></｜DSML｜invoke>',
        '<｜DSML｜parameter name="a">x</｜DSML｜parameter></｜DSML｜invoke>',
        '<｜DSML｜parameter name="a" string="true">x</｜DSML｜parameter>' * 2 + "</｜DSML｜invoke>",
        '<｜DSML｜parameter name="a" string="true">x</｜DSML｜invoke>',
        '{"a": 1}</｜DSML｜invoke>', "")),
    ("gemma", "<|tool_call>call:put{a:1<tool_call|>"),
    ("gemma", "<|tool_call>call:put{a:1,a:2}<tool_call|>"),
    ("gemma", "<|tool_call>call:put{a:}<tool_call|>"),
    ("gemma", "<|tool_call>put{a:1}<tool_call|>"),
    ("deepseek", "<｜tool▁calls▁begin｜>put{}<｜tool▁calls▁end｜>"),
    ("deepseek", "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>put<｜tool▁sep｜>1<｜tool▁call▁end｜>"),
    ("deepseek", "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>put<｜tool▁sep｜>{} and<｜tool▁call▁end｜>"),
    ("kimi", "<|tool_calls_section_begin|><|tool_call_begin|>put<|tool_call_argument_begin|>{}<|tool_call_end|>"),
    ("kimi", "<|tool_calls_section_begin|><|tool_call_begin|>functions.put:0{}<|tool_call_end|>"),
    ("lfm", "<|tool_call_start|>[put(1)]<|tool_call_end|>"),
    ("lfm", "<|tool_call_start|>[put(a=open('x'))]<|tool_call_end|>"),
    ("lfm", "<|tool_call_start|>[put(a=b'x')]<|tool_call_end|>"),
    ("lfm", "<|tool_call_start|>[put(a={'b': 1, 'b': 2})]<|tool_call_end|>"),
    ("lfm", "<|tool_call_start|>[put(a=1, a=2)]<|tool_call_end|>"),
    ("lfm", "<|tool_call_start|>[put(a=1e999)]<|tool_call_end|>"),
    ("lfm", "<|tool_call_start|>[put(a='it's')]<|tool_call_end|>"),
    ("lfm", "<|tool_call_start|>x = put(a=1)<|tool_call_end|>"),
    ("pythonic", "[other(a=1)]"),
    ("pythonic", "[1, 2]"),
    ("pythonic", "put(a=1)"),
]  # fmt: skip


@pytest.mark.parametrize(("style", "text"), NO_CALLS)
def test_text_that_is_no_call_stays_text(style: str, text: str) -> None:
    for size in (len(text), 1, 4):
        reader = READERS[style](["put"])
        pieces = [one for at in range(0, len(text), size) for one in reader.feed(text[at : at + size], last=False)]
        pieces += reader.feed("", last=True)
        assert "".join(one for one in pieces if isinstance(one, str)) == text and reader.calls == 0


PYTHON = [
    ("[f(a='x', b=[1, -2.5], c={'d': None})]", [("f", {"a": "x", "b": [1, -2.5], "c": {"d": None}})]),
    ('[f(a={"b": true, "c": false, "d": null})]', [("f", {"a": {"b": True, "c": False, "d": None}})]),
    ("[a.b(), c(d=True)]", [("a.b", {}), ("c", {"d": True})]),
    (r"[f(a='\d', b='\\d', c='\n')]", [("f", {"a": r"\d", "b": r"\d", "c": "\n"})]),
    ("f(a='x\ny')\nf(a=1)", [("f", {"a": "x\ny"}), ("f", {"a": 1})]),
]  # fmt: skip


@pytest.mark.parametrize(("text", "calls"), PYTHON)
def test_calls_in_the_syntax_of_python(text: str, calls: list[tuple[str, Any]]) -> None:
    assert [(one.name, json.loads(one.arguments)) for one in python_calls(text)] == calls


def test_malformed_calls_are_read_in_linear_time() -> None:
    for style, block in (
        ("hermes", "<tool_call>f<arg_value></tool_call>"),
        ("hermes", "<tool_call><function=f><parameter=a></tool_call>"),
        ("hermes", '<tool_call>{"</tool_call>'),
        ("gemma", '<|tool_call>call:f{a:<|"|><tool_call|>'),
        ("minimax", '<minimax:tool_call><parameter name="a"></minimax:tool_call>'),
        ("deepseek_v4", '<｜DSML｜tool_calls><｜DSML｜parameter name="a" string="true"></｜DSML｜tool_calls>'),
    ):
        reader, text = READERS[style](["f"]), block * 5_000
        for at in range(0, len(text), 1_000):
            reader.feed(text[at : at + 1_000], last=False)
        reader.feed("", last=True)
    nested = "<|tool_call>call:f{a:" + "[" * 100_000
    assert READERS["gemma"](["f"]).feed(nested, last=True) == [nested]
    assert [*python_calls("[" * 10_000)] == [*python_calls("f(a=" + "-" * 10_000)] == []
    assert read_json('{"a": 1, "a": 2}') is None
