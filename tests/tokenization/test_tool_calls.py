"""Calls of tools: each format is read from whole and cut texts, and templates offer tools as they can."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.tiny import smollm2_folder
from tokenizers import Tokenizer

from rookery.errors import UserError
from rookery.simulation.fakes.text import byte_tokenizer
from rookery.tokenization.call_readers import READERS, CallReader, ForcedReader, Piece
from rookery.tokenization.call_values import ToolCall, read_json
from rookery.tokenization.chat import Chat
from rookery.tokenization.grammar import GrammarTokenizer
from rookery.tokenization.reply_schemas import forced_schema
from rookery.tokenization.tool_calls import message_key, style_of

ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add two numbers.",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}},
    },
}
ONE, TWO = ToolCall("add", '{"a": 1}'), ToolCall("add", '{"a": "x<y", "b": [2]}')

READ: list[tuple[str, str, list[Piece]]] = [
    ("hermes", "Hello, all.", ["Hello, all."]),
    ("hermes", '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>', [ONE]),
    ("hermes", 'Well.\n<tool_call>{"name": "add", "arguments": "{\\"a\\": 1}"}</tool_call>\n', ["Well.", ONE]),
    ("hermes", '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>\n<tool_call>{"name": "add", '
               '"arguments": {"a": "x<y", "b": [2]}}</tool_call>', [ONE, TWO]),
    ("hermes", '<tool_call>{"name": "add", "arguments": {"a": 1}}', [ONE]),
    ("hermes", "<tool_call>add one</tool_call> then", ["<tool_call>add one</tool_call> then"]),
    ("hermes", '<tool_call>{"name": "add", "arguments": [1]}</tool_call>',
     ['<tool_call>{"name": "add", "arguments": [1]}</tool_call>']),
    ("hermes", "a <tool_ca", ["a <tool_ca"]),
    ("hermes", "<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>", [ONE]),
    ("llama3", '{"name": "add", "parameters": {"a": 1}}', [ONE]),
    ("llama3", '<|python_tag|>{"name": "add", "parameters": {"a": 1}}; {"name": "add", "parameters": '
               '{"a": "x<y", "b": [2]}}', [ONE, TWO]),
    ("llama3", '{"name": "Ada", "parameters": {}}', ['{"name": "Ada", "parameters": {}}']),
    ("llama3", '{"name": "add", "parameters": {"a": 1}}; {"name": "Ada", "parameters": {}}',
     ['{"name": "add", "parameters": {"a": 1}}; {"name": "Ada", "parameters": {}}']),
    ("llama3", '{"sum": 3} ', ['{"sum": 3} ']),
    ("llama3", "Three. {not a call}", ["Three. {not a call}"]),
    ("mistral", '[TOOL_CALLS] [{"name": "add", "arguments": {"a": 1}}, {"name": "add", "arguments": '
                '{"a": "x<y", "b": [2]}}]', [ONE, TWO]),
    ("mistral", 'So:[TOOL_CALLS]add[ARGS]{"a": 1}[TOOL_CALLS]add[CALL_ID]ab1[ARGS]{"a": "x<y", "b": [2]}',
     ["So:", ONE, TWO]),
    ("mistral", "[TOOL_CALLS] add them", ["[TOOL_CALLS] add them"]),
    ("harmony", "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Three.",
     ["Three."]),
    ("harmony", "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary to=functions.add "
                '<|constrain|>json<|message|>{"a": 1}<|call|>', [ONE]),
    ("harmony", '<|channel|>commentary to=functions.add<|message|>{"a": 1}', [ONE]),
    ("harmony", "<|channel|>commentary to=functions.add<|message|>one<|call|>", ["one"]),
    ("harmony", "Three.", ["Three."]),
    ("harmony", '<|channel|>commentary to=add<|message|>{"a": 1}<|call|>', [ONE]),
    ("harmony", '<|channel|>commentary to=other<|message|>{"a": 1}<|call|>', ['{"a": 1}']),
    ("harmony", "<|channel|>commentary<|message|>I will add.<|end|><|start|>assistant<|channel|>final<|message|>1",
     ["I will add.1"]),
    ("harmony", '<|channel|>analysis to=python<|message|>1<|call|>', []),
    ("harmony", '<|channel|>commentary to=add<|message|>{"a": "<|call|>"}<|call|> <|channel|>final<|message|>1<|end|>',
     [ToolCall("add", '{"a": "<|call|>"}'), "1"]),
    ("harmony", '<|channel|>commentary to=add<|message|>{"a": "<|call|><|channel|>final<|message|>1',
     ['{"a": "1']),
    ("mistral", '[TOOL_CALLS]add[ARGS]{"a": 1}[TOOL_CALLS]add[ARGS]{"a":',
     ['[TOOL_CALLS]add[ARGS]{"a": 1}[TOOL_CALLS]add[ARGS]{"a":']),
    ("mistral", "[TOOL_CALLS]add[ARGS]{}[TOOL_CALLS]bad", ["[TOOL_CALLS]add[ARGS]{}[TOOL_CALLS]bad"]),
    ("llama3", '{"name": "add", "age": 5}', ['{"name": "add", "age": 5}']),
    ("llama3", '{"type": "function", "name": "add"}', [ToolCall("add", "{}")]),
    *(("hermes", text, [text]) for text in (
        '<tool_call>{"name": "add", "args": {"a": 1}}</tool_call>',
        '<tool_call>{"name": "add", "input": {"a": 1}}</tool_call>',
        '<tool_call><function=add>{"a": 1}</function></tool_call>',
        "<tool_call><function=add><parameter=a>\nx</parameter>y\n</parameter></function></tool_call>",
        "<tool_call><function=add><parameter=a>\n1\n</function></tool_call>")),
]  # fmt: skip


UNWRITABLE = ['{"a": "\\ud83d"}', '{"\\ude00": 1}', '{"a": NaN}', '{"a": [-Infinity]}', '{"a": 1e999}']
"""Arguments that Python reads and JSON in UTF-8 cannot hold."""


@pytest.mark.parametrize("arguments", UNWRITABLE)
def test_arguments_that_json_cannot_hold_stay_text(arguments: str) -> None:
    call = f'{{"name": "add", "arguments": {arguments}}}'
    texts: list[tuple[type[CallReader], str]] = [
        (READERS["hermes"], f"<tool_call>{call}</tool_call>"),
        (READERS["hermes"], f'<tool_call>{{"name": "add", "arguments": {json.dumps(arguments)}}}</tool_call>'),
        (READERS["llama3"], call),
        (READERS["mistral"], f"[TOOL_CALLS]{call}"),
        (READERS["mistral"], f"[TOOL_CALLS]add[ARGS]{arguments}"),
        (ForcedReader, call),
    ]
    for reader, text in texts:
        assert joined(reader(["add"]).feed(text, last=True)) == [text]
    harmony = f"<|channel|>commentary to=functions.add<|message|>{arguments}<|call|>"
    assert joined(READERS["harmony"](["add"]).feed(harmony, last=True)) == [arguments]
    xml = f"<tool_call><function=add><parameter=a>{arguments}</parameter></function></tool_call>"
    assert joined(READERS["hermes"](["add"]).feed(xml, last=True)) == [ToolCall("add", json.dumps({"a": arguments}))]
    assert read_json(arguments) is None


TYPED: list[tuple[dict[str, Any], str, Any]] = [
    ({"type": "string"}, "123", "123"),
    ({"type": "string"}, '{"a": 1}', '{"a": 1}'),
    ({"type": "string"}, '"quoted"', '"quoted"'),
    ({"type": "string"}, "null", "null"),
    ({"enum": ["1", "2"]}, "1", "1"),
    ({"const": "true"}, "true", "true"),
    ({"$ref": "#/$defs/Code"}, "007", "007"),
    ({"$ref": "#/$defs/Ring"}, "7", 7),
    ({"anyOf": [{"$ref": "#/$defs/Code"}, {"type": "null"}]}, "12", "12"),
    ({"anyOf": [{"$ref": "#/$defs/Code"}, {"type": "null"}]}, "null", None),
    ({"type": ["string", "integer"]}, "12", 12),
    ({"type": ["string", "integer"]}, "1.5", "1.5"),
    ({"type": "integer"}, "12", 12),
    ({"type": "boolean"}, "true", True),
    ({"type": "array"}, '["1"]', ["1"]),
    ({"type": "object"}, "no JSON", "no JSON"),
    ({}, "12", 12),
    ({}, "word", "word"),
    ({}, "True", "True"),
    ({"type": "boolean"}, "True", True),
    ({"type": "boolean"}, "False", False),
    ({"type": ["string", "null"]}, "None", None),
    ({"type": "integer"}, "None", "None"),
    ({"type": "string"}, "None", "None"),
    ({"type": "object"}, "{'a': True, 'b': [None]}", {"a": True, "b": [None]}),
    ({"type": "array"}, "['x', 1]", ["x", 1]),
    ({"type": "array"}, "[(1, 2)]", "[(1, 2)]"),
    ({"type": "object"}, "{1: 2}", "{1: 2}"),
    ({"type": "object"}, "{'a': b'x'}", "{'a': b'x'}"),
    ({"type": "array"}, r"['\d']", r"['\d']"),
    ({"type": "array"}, "{'a': 1}", "{'a': 1}"),
    ({"type": 3, "anyOf": 4, "enum": "x", "$ref": 5}, "12", 12),
]


@pytest.mark.parametrize(("declared", "text", "value"), TYPED)
def test_parameter_is_read_as_its_schema_declares_it(declared: dict[str, Any], text: str, value: Any) -> None:
    definitions = {"Code": {"type": "string"}, "Ring": {"$ref": "#/$defs/Ring"}}
    reader = READERS["hermes"](["put"], {"put": {"properties": {"x": declared}, "$defs": definitions}})
    call = f"<tool_call>\n<function=put>\n<parameter=x>\n{text}\n</parameter>\n</function>\n</tool_call>"
    assert reader.feed(call, last=True) == [ToolCall("put", json.dumps({"x": value}))]


def joined(pieces: list[Piece]) -> list[Piece]:
    """With texts that follow each other as one."""
    found: list[Piece] = []
    for piece in pieces:
        if isinstance(piece, str) and found and isinstance(found[-1], str):
            found[-1] += piece
        else:
            found.append(piece)
    return found


@pytest.mark.parametrize(("style", "text", "pieces"), READ, ids=[f"{style} {text[:30]}" for style, text, _ in READ])
def test_calls_are_read_and_text_that_does_not_parse_stays(style: str, text: str, pieces: list[Piece]) -> None:
    assert joined(READERS[style](["add"]).feed(text, last=True)) == pieces
    for size in (1, 3):
        reader = READERS[style](["add"])
        read = [piece for at in range(0, len(text), size) for piece in reader.feed(text[at : at + size], last=False)]
        assert joined([*read, *reader.feed("", last=True)]) == pieces


MARKS = ["<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", "<|python_tag|>", "<|channel|>final", "<|message|>",
         "<|end|>", "<|call|>", "<|channel|>commentary to=functions.add", '{"name": "add", "arguments": {}}', "{", "}",
         " ", "\n", "x", ";", "<", "<tool_calls>", "</tool_calls>", "<|tool_call|>", "<minimax:tool_call>",
         "</minimax:tool_call>", '<invoke name="add">', "</invoke>", "<function=add>", "</function>", "<parameter=a>",
         "</parameter>", "add", "<arg_key>a</arg_key>", "<arg_value>", "</arg_value>", "<|tool_call>", "call:add{a:",
         '<|"|>', "<tool_call|>", "<|tool_call_start|>", "<|tool_call_end|>", "[add(a=", "'",
         "<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>add<｜tool▁sep｜>", "<｜tool▁call▁end｜>",
         "<｜tool▁calls▁end｜>",
         "<|tool_calls_section_begin|>", "<|tool_call_begin|>functions.add:0<|tool_call_argument_begin|>",
         "<|tool_calls_section_end|>",
         "<｜DSML｜function_calls>", '<｜DSML｜invoke name="add">', '<｜DSML｜parameter name="a" string="false">',
         "</｜DSML｜parameter>", "</｜DSML｜invoke>", "</｜DSML｜function_calls>", "<｜DSML｜tool_calls>",
         "</｜DSML｜tool_calls>", '"', ")]", "\\"]  # fmt: skip


@settings(deadline=None, max_examples=150)
@given(text=st.lists(st.sampled_from(MARKS), max_size=12).map("".join), data=st.data())
@pytest.mark.parametrize("style", [*READERS, "forced"])
def test_pieces_of_a_stream_are_those_of_the_whole_text(style: str, text: str, data: st.DataObject) -> None:
    make = READERS.get(style, ForcedReader)
    reader, read, at = make(["add"]), [], 0
    while at < len(text):
        end = at + data.draw(st.integers(1, 9))
        read += reader.feed(text[at:end], last=False)
        at = end
    assert joined([*read, *reader.feed("", last=True)]) == joined(make(["add"]).feed(text, last=True))


@pytest.mark.parametrize("arguments", [{}, {"a": 1}, {"a": None}, {"b": [], "a": ""}])
def test_calls_as_text_and_as_data_are_the_same_message(arguments: dict[str, Any]) -> None:
    text = json.dumps(arguments, indent=1)
    assert message_key(" So: ", [("f", text)]) == message_key("So:", [("f", arguments)])
    assert message_key("", [("f", text)]) != message_key("", [("f", {**arguments, "c": 1})])
    assert message_key("", [("f", "{")]) == message_key("", [("f", "{")]) != message_key("", [("f", {})])


def test_long_text_is_read_in_linear_time() -> None:
    for style in READERS:
        reader = READERS[style](["add"])
        for _ in range(20_000):
            reader.feed("{<tool_call>", last=False)
        reader.feed("", last=True)
    with pytest.raises(StopIteration):
        next(iter(READERS["hermes"](["add"]).parse("<tool_call>" + "[" * 100_000)))
    for part in ("<parameter=a>", "<parameter=", "<parameter=a", "<parameter= "):
        text = f"<tool_call><function=add>{part * 50_000}</function></tool_call>"
        assert READERS["hermes"](["add"]).feed(text, last=True) == [text]


# --- templates, written in the manner of each family ------------------------------------------------------------------

QWEN = (
    "{%- if tools %}<|im_start|>system\n# Tools\n{%- for tool in tools %}\n{{ tool | tojson }}{%- endfor %}"
    "\nUse <tool_call></tool_call>.<|im_end|>\n{%- endif %}"
    "{%- for m in messages %}{%- if m.role == 'tool' %}<|im_start|>user\n<tool_response>\n{{ m.content }}\n"
    "</tool_response><|im_end|>\n{%- else %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    '{%- for call in m.tool_calls or [] %}\n<tool_call>\n{"name": "{{ call.function.name }}", "arguments": '
    "{{ call.function.arguments | tojson }}}\n</tool_call>{%- endfor %}<|im_end|>\n{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SMOLLM3 = (
    "{%- if xml_tools %}<|im_start|>system\n{%- for tool in xml_tools %}\n{{ tool | string }}{%- endfor %}"
    "\n<tool_call><|im_end|>\n{%- endif %}{%- for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
    "{%- endfor %}{%- if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CODER = (
    "{%- for tool in tools or [] %}{{ tool | tojson }}<tool_call><function=…>{%- endfor %}{%- for m in messages %}"
    "<|im_start|>{{ m.role }}\n{{ m.content }}{%- for call in m.tool_calls or [] %}\n<tool_call>\n"
    "<function={{ call.function.name }}>\n{%- for key, value in call.function.arguments.items() %}\n"
    "<parameter={{ key }}>\n{{ value if value is string else value | tojson }}\n</parameter>{%- endfor %}\n</function>"
    "\n</tool_call>{%- endfor %}<|im_end|>\n{%- endfor %}"
    "{%- if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
STRICT = (
    "{%- for m in messages %}{%- if m.role not in ('system', 'user', 'assistant') %}{{ raise_exception('no role') }}"
    "{%- endif %}<|im_start|>{{ m.role }}\n{{ m.content | trim }}<|im_end|>\n{%- endfor %}"
    "{%- if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

CALL = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
TURNS = [
    {"role": "user", "content": "1 + 1?"},
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "content": "TWO", "tool_call_id": "c1"},
]


def made(template: str) -> Chat:
    return Chat(byte_tokenizer(), template, special={}, ends=[2], context=512)


@pytest.mark.parametrize("template", [QWEN, SMOLLM3, STRICT], ids=["qwen", "smollm3", "no tools"])
def test_template_offers_tools_and_writes_calls_and_results(template: str) -> None:
    chat = made(template)
    text = bytes(b for token in chat.conversation(TURNS, [ADD]) for b in chat.token_bytes.written(token)).decode()
    assert "Add two numbers." in text and text.endswith("<|im_start|>assistant\n")
    assert '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>' in text and "TWO" in text
    assert text.count("<|im_start|>") == 5
    assert chat.conversation(TURNS[:1]) == chat.encode(chat.render(TURNS[:1]))


def test_formats_are_derived_from_templates() -> None:
    assert style_of(QWEN) == style_of(SMOLLM3) == style_of(STRICT) == "hermes"
    assert style_of("{{ bos_token }}[INST]...[/INST][TOOL_CALLS]") == "mistral"
    assert style_of("...<|python_tag|>...") == "llama3"
    assert style_of("<|start|>assistant<|channel|>final<|message|>") == "harmony"


@pytest.mark.parametrize("template", [QWEN, STRICT])
def test_conversation_that_ends_with_the_assistant_is_continued(template: str) -> None:
    chat = made(template)
    prompt = chat.conversation([{"role": "user", "content": "Count."}, {"role": "assistant", "content": "One, "}])
    begun = chat.encode(chat.render([{"role": "user", "content": "Count."}]))
    assert prompt == [*begun, *chat.encode("One, ")]
    with pytest.raises(UserError, match="cannot be continued"):
        made("{{ messages[0].content }}").conversation([{"role": "user", "content": "a"}, {"role": "assistant",
                                                                                      "content": "b"}])  # fmt: skip


@pytest.mark.parametrize("template", [QWEN, SMOLLM3, CODER])
@pytest.mark.parametrize("text", ["02139", "12", "true", "null", "1.50", '{"a": 1}', "x", ""])
def test_a_call_that_a_conversation_repeats_is_continued(template: str, text: str) -> None:
    """Whatever a text looks like: its parameter is declared as one."""
    chat = made(template)
    parameters = {"type": "object", "properties": {"zip": {"type": "string"}, "n": {"type": "integer"}}}
    tools = [{"type": "function", "function": {"name": "find", "parameters": parameters}}]
    before: list[dict[str, Any]] = [{"role": "user", "content": "Where?"}]
    function = {"name": "find", "arguments": {"zip": text, "n": 3}}
    calling = {"role": "assistant", "content": "", "tool_calls": [{**CALL, "function": function}]}
    written, arguments = chat.tools.adapt([*before, calling], tools)
    reply = chat.render(written, add_generation_prompt=False, **arguments).rpartition("assistant\n")[2]
    sampled = [token for letter in reply.removesuffix("<|im_end|>\n") for token in chat.encode(letter)]
    content, [(name, given)] = chat.read_reply(sampled, (), tools)
    assert (content.strip(), name, json.loads(given)) == ("", "find", function["arguments"])
    tokens = [*chat.conversation(before, tools), *sampled]
    longer = chat.continuation(tokens, sampled, [*before, calling, {"role": "tool", "content": "x"}], 1, tools)
    assert longer is not None and longer[: len(tokens)] == tokens


def test_calls_whose_ids_are_their_names_are_numbered_in_a_conversation() -> None:
    """As Kimi's template writes them, whatever ids the client gave, also the same one twice."""
    chat = made(
        "{%- for tool in tools or [] %}{{ tool | tojson }}{%- endfor %}{%- for m in messages %}<|im_start|>"
        "{{ m.role }}\n{%- if m.role == 'tool' %}## Return of {{ m.tool_call_id }}\n{% endif %}{{ m.content }}"
        "{%- if m.tool_calls %}<|tool_calls_section_begin|>{%- for call in m.tool_calls %}<|tool_call_begin|>"
        "{{ call.id }}<|tool_call_argument_begin|>{{ call.function.arguments | tojson }}<|tool_call_end|>{%- endfor %}"
        "<|tool_calls_section_end|>{%- endif %}<|im_end|>\n{%- endfor %}"
        "{%- if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    turns = [*TURNS, {**TURNS[1], "tool_calls": [CALL, {**CALL, "id": "c2"}]}, {**TURNS[2], "tool_call_id": "c2"}]
    text = chat.decode(chat.conversation([*turns, TURNS[2]], [ADD]))
    assert re.findall(r"functions\.\w+:\d", text) == [f"functions.add:{n}" for n in (0, 0, 1, 2, 2, 1)]


@pytest.mark.parametrize("space", ["", "\n"])
@pytest.mark.parametrize("stopped", [True, False])
def test_a_call_is_continued_where_a_template_demands_one_before_a_result(space: str, stopped: bool) -> None:
    """As that of gpt-oss does."""
    chat = made(
        "{%- for tool in tools or [] %}{{ tool | tojson }}<tool_call>{%- endfor %}{%- for m in messages %}"
        "{%- if m.role == 'tool' and not messages[loop.index0 - 1].tool_calls and messages[loop.index0 - 1].role != "
        "'tool' %}{{ raise_exception('no call before it') }}{%- endif %}<|im_start|>{{ m.role }}\n{{ m.content }}"
        "{%- for call in m.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{%- endfor %}"
        f"<|im_end|>{{{{ '{space}' }}}}{{%- endfor %}}"
        "{%- if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    sampled = chat.encode('<tool_call>{"arguments":  {"a": 1}, "name": "add"}</tool_call>')
    sampled += [2] if stopped else []
    tokens = [*chat.conversation(TURNS[:1], [ADD]), *sampled]
    again = {**TURNS[2], "content": "THREE"}
    longer = chat.continuation(tokens, sampled, [*TURNS, again], 1, [ADD])
    assert longer is not None and longer[: len(tokens)] == tokens
    whole = chat.conversation([*TURNS, again], [ADD])
    assert longer[len(tokens) :] == whole[whole.index(2, len(tokens) - len(sampled)) + stopped :]


def test_smollm2_has_tools_although_its_template_has_none() -> None:
    chat = Chat.load(smollm2_folder())
    assert (chat.tools.argument, chat.tools.style) == ("", "hermes")
    assert "Add two numbers." in chat.decode(chat.conversation(TURNS, [ADD]))


def test_schema_of_a_forced_call_is_one_of_its_tools() -> None:
    def tool(name: str, item: dict[str, Any], **further: Any) -> dict[str, Any]:
        parameters = {"type": "object", "$id": "http://x.y/z", "properties": {"x": {"$ref": "#/$defs/Item"}, **further},
                      "required": ["x"], "additionalProperties": False, "$defs": {"Item": item}}  # fmt: skip
        return {"type": "function", "function": {"name": name, "parameters": parameters}}

    number = tool("number", {"type": "integer"})
    word = tool("word", {"enum": ["a", "b"]}, again={"$ref": "#"}, data={"const": {"$ref": "#/x"}})
    grammars = made(QWEN).grammars()
    cases = [
        ([ADD, number, word], {"name": "number", "arguments": {"x": 1}}, True),
        ([ADD, number, word], {"name": "number", "arguments": {"x": "a"}}, False),
        ([ADD, number, word], {"name": "word", "arguments": {"x": "a"}}, True),
        ([ADD, number, word], {"name": "word", "arguments": {"x": 1}}, False),
        ([word], {"name": "word", "arguments": {"x": "a", "again": {"x": "b"}, "data": {"$ref": "#/x"}}}, True),
        ([word], {"name": "word", "arguments": {"x": "a", "again": {"name": "word"}}}, False),
        ([number], {"name": "number", "arguments": {"x": 1}}, True),
    ]
    for tools, call, fits in cases:
        matcher = grammars.matcher(json.dumps(forced_schema(tools)))
        accepted = matcher.consume_tokens(made(QWEN).encode(json.dumps(call))) and matcher.is_accepting()
        assert accepted == fits, (call, matcher.get_error())


OPENINGS = sorted({reader.opening for reader in READERS.values() if reader.opening})


@pytest.mark.parametrize("special", [False, True])
@pytest.mark.parametrize("opening", OPENINGS)
def test_a_reply_follows_its_schema_unless_it_begins_with_a_call(opening: str, special: bool) -> None:
    """Of a model that writes the mark of a call in letters, and of one that has special tokens for it."""
    tokenizer = Tokenizer.from_str(byte_tokenizer().to_str())  # other tests share that one
    if special:
        tokenizer.add_special_tokens(re.findall(r"<[^<>]+>|\[[A-Z_]+\]", opening))
    grammars = GrammarTokenizer(tokenizer, tokenizer.get_vocab_size(), [2])
    schema = json.dumps({"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]})
    for text, fits in (
        ('{"ok": true}', True),
        (opening, True),
        (f"{opening}any{opening} <text>\n", True),
        ('{"ok": true}' + opening, False),
        (f"I {opening}", False),
        ("{}", False),
    ):
        matcher, tokens = grammars.matcher(schema, opening), tokenizer.encode(text, add_special_tokens=False).ids
        assert (matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()) == fits, text
    plain, tokens = grammars.matcher(schema), tokenizer.encode(opening, add_special_tokens=False).ids
    assert plain.try_consume_tokens(tokens) < len(tokens)


@pytest.mark.parametrize("parameters", [{"$defs": []}, {"definitions": 1}, {"properties": {"x": {"properties": None}}}])
def test_forced_call_of_a_tool_with_wrong_parts_is_refused(parameters: dict[str, Any]) -> None:
    with pytest.raises(UserError, match="must be an object"):
        forced_schema([{"type": "function", "function": {"name": "a", "parameters": parameters}}])
