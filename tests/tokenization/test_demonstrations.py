"""Which tokens of a conversation are learned: exactly those that the policy would have to sample."""

from __future__ import annotations

import itertools
import json
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.peers import model_folder
from tests.tokenization.test_tool_calls import ADD, CODER, QWEN, SMOLLM3, STRICT, TURNS, made

from rookery.controller.spec_warnings import form_problems
from rookery.environments.base import SplitSizes
from rookery.environments.messages import form_of
from rookery.errors import UserError
from rookery.simulation.fakes.text import SPECIAL, byte_tokenizer
from rookery.tokenization.chat import Chat
from rookery.tokenization.demonstrations import learned_sequences
from rookery.tokenization.written import controls

USER, REPLY = {"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "It is 4."}
MORE, LAST = {"role": "user", "content": "Sure?"}, {"role": "assistant", "content": "Yes é 漢."}


@pytest.fixture
def chat(tmp_path: Path) -> Chat:
    return Chat.load(model_folder(tmp_path / "model"))


def learned(chat: Chat, sequence: object) -> list[tuple[str, float]]:
    """The runs of learned tokens as text, each with its weight."""
    runs: list[tuple[list[int], float]] = []
    before = 0.0
    for token, weight in zip(sequence.tokens, sequence.weights, strict=True):  # type: ignore[attr-defined]
        if weight and weight == before:
            runs[-1][0].append(token)
        elif weight:
            runs.append(([token], weight))
        before = weight
    return [(chat.decode(tokens), weight) for tokens, weight in runs]


def test_a_reply_is_learned_after_its_prompt_and_up_to_its_end(chat: Chat) -> None:
    [one] = learned_sequences(chat, [USER, REPLY], [0.0, 1.0])
    assert one.prompt == chat.prompt([USER])
    assert learned(chat, one) == [("It is 4.", 1.0)]
    count = sum(weight > 0 for weight in one.weights)
    assert one.tokens[count - 1] in chat.stop_tokens, "the end of the turn is learned"
    assert not any(one.weights[count:]), "what the template writes after it is not"


def test_turns_have_their_weights(chat: Chat) -> None:
    messages = [USER, REPLY, MORE, LAST]
    [one] = learned_sequences(chat, messages, [0.0, 1.0, 0.0, 0.5])
    assert learned(chat, one) == [("It is 4.", 1.0), ("Yes é 漢.", 0.5)]
    assert one.prompt + one.tokens == chat.encode(chat.render(messages, add_generation_prompt=False))
    [last] = learned_sequences(chat, messages, [0.0, 0.0, 0.0, 1.0])
    assert last.prompt == chat.prompt(messages[:3])
    assert learned(chat, last) == [("Yes é 漢.", 1.0)]


def test_a_template_that_rewrites_earlier_turns_gives_each_a_sequence(tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "model")
    (folder / "chat_template.jinja").write_text(
        "{% for m in messages %}<|im_start|>{{ m.role }}\n"
        "{{ m.content.split('</think>')[-1] if not loop.last else m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    chat = Chat.load(folder)
    first = {"role": "assistant", "content": "hm</think>4"}
    found = learned_sequences(chat, [USER, first, MORE, LAST], [0.0, 1.0, 0.0, 1.0])
    assert [learned(chat, one) for one in found] == [[("hm</think>4", 1.0)], [("Yes é 漢.", 1.0)]]
    assert "hm" not in chat.decode(found[1].prompt)


@pytest.mark.parametrize(
    ("opening", "written", "taken"),
    [
        ("<think>\n", "<think></think>", "<think>"),  # as Nemotron's template writes a reply without a thought
        ("<think>\n\n</think>\n\n", "", ""),
        ("", "<think></think>", ""),
        ("Reply: é", "Reply: è", "Reply: "),
        ("Re", "Re", "Re"),
    ],
)
def test_the_opening_of_a_reply_is_not_learned(opening: str, written: str, taken: str, tmp_path: Path) -> None:
    """As far as a template opens a reply as it writes a past one: its role is never learned."""
    folder = model_folder(tmp_path / "model")
    (folder / "chat_template.jinja").write_text(
        "{% for m in messages %}<|im_start|>{{ m.role }}\n"
        f"{{% if m.role == 'assistant' %}}{written}{{% endif %}}{{{{ m.content }}}}<|im_end|>\n{{% endfor %}}"
        f"{{% if add_generation_prompt %}}<|im_start|>assistant\n{opening}{{% endif %}}"
    )
    chat = Chat.load(folder)
    [one] = learned_sequences(chat, [USER, REPLY, MORE, LAST], [0.0, 1.0, 0.0, 1.0])
    rest = written.removeprefix(taken)
    assert learned(chat, one) == [(f"{rest}It is 4.", 1.0), (f"{rest}Yes é 漢.", 1.0)]
    assert chat.decode(one.prompt).endswith(f"assistant\n{taken}")


@pytest.mark.parametrize("template", [QWEN, SMOLLM3, CODER, STRICT], ids=["qwen", "smollm3", "coder", "no tools"])
def test_calls_are_learned_in_the_form_in_which_they_are_read(template: str) -> None:
    """After the prompt that a client's conversation with the same tools has."""
    chat, answer = made(template), {"role": "assistant", "content": "It is 2."}
    messages: list[dict[str, Any]] = [*TURNS, answer]
    for weights in ([0.0, 1.0, 0.0, 0.5], [0.0, 0.0, 0.0, 1.0], [0.0, 1.0, 0.0, 0.0]):
        [one] = learned_sequences(chat, messages, weights, [ADD])
        first = next(number for number, weight in enumerate(weights) if weight)
        assert one.prompt == chat.conversation(messages[:first], [ADD])
        turns = [number for number, weight in enumerate(weights) if weight]
        runs = learned(chat, one)
        assert [weight for _, weight in runs] == [weights[number] for number in turns]
        for number, (text, _) in zip(turns, runs, strict=True):
            content, calls = chat.read_reply(chat.encode(text), (), [ADD])
            given = [(name, json.loads(arguments)) for name, arguments in calls]
            assert (content.strip(), given) == (messages[number]["content"], [("add", {"a": 1})] * (number == 1))
    [plain] = learned_sequences(chat, [USER, answer], [0.0, 1.0])
    assert plain.prompt == chat.prompt([USER])


TURN_BY_TURN = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.mark.parametrize("number", [1, 2])
def test_the_end_of_a_reply_is_learned_where_it_begins_the_next_turn(number: int) -> None:
    """As GLM's templates have it: without it the model never learns to end a reply."""
    mark = SPECIAL.index("<|im_start|>")
    chat = Chat(byte_tokenizer(), TURN_BY_TURN, special={}, ends=[mark], context=512)
    messages = [USER, REPLY, MORE, LAST][: 2 * number]
    [one] = learned_sequences(chat, messages, [0.0, 1.0] * number)
    learnt = [token for token, weight in zip(one.tokens, one.weights, strict=True) if weight]
    assert learnt == [*chat.encode("It is 4."), mark, *([*chat.encode("Yes é 漢."), mark] if number == 2 else [])]
    assert one.prompt + one.tokens == [*chat.encode(chat.render(messages, add_generation_prompt=False)), mark]
    [pair] = learned_sequences(chat, [USER, REPLY, MORE], [0.0, 1.0, 0.0])
    assert pair.tokens == [*chat.encode("It is 4."), mark] and all(pair.weights)


def test_a_long_conversation_is_cut_at_its_end(chat: Chat) -> None:
    [one] = learned_sequences(chat, [USER, REPLY], [0.0, 1.0])
    assert one.cut(one.length) == one
    shorter = one.cut(len(one.prompt) + 3)
    assert (shorter.prompt, shorter.tokens, len(shorter.weights)) == (one.prompt, one.tokens[:3], 3)
    assert not any(one.cut(2).weights) and len(one.cut(2).prompt) == 2


MARKED = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}{% generation %}{{ m.content }}"
    "<|im_end|>{% endgeneration %}\n{% else %}{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.mark.parametrize(
    "texts",
    [["2+2?", "4"], ["a", "b", "c", "d"], ["é 漢", "🙂\n\n x ", "?", "<think>hm</think>1"], ["a"] * 6],
)
def test_learned_tokens_are_those_that_transformers_masks(texts: list[str], tmp_path: Path) -> None:
    """Of a template that marks what the assistant generates."""
    from transformers import PreTrainedTokenizerFast

    folder = model_folder(tmp_path / "model")
    (folder / "chat_template.jinja").write_text(MARKED)
    chat = Chat.load(folder)
    messages = [{"role": ("user", "assistant")[n % 2], "content": text} for n, text in enumerate(texts)]
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"), chat_template=MARKED)
    theirs = tokenizer.apply_chat_template(messages, return_dict=True, return_assistant_tokens_mask=True)
    [one] = learned_sequences(chat, messages, [float(n % 2) for n in range(len(texts))])
    assert one.prompt + one.tokens == theirs["input_ids"]
    assert [0.0] * len(one.prompt) + one.weights == theirs["assistant_masks"]


# --- what a template leaves out ---------------------------------------------------------------------------------------


def chatml(reply: str, others: str = "{{ m.content }}") -> str:
    """A template that writes ``reply`` for the assistant's messages ``m``."""
    return (
        "{% for tool in tools or [] %}{{ tool | tojson }}{% endfor %}{% for m in messages %}<|im_start|>{{ m.role }}\n"
        f"{{% if m.role == 'assistant' %}}{reply}{{% else %}}{others}{{% endif %}}<|im_end|>\n{{% endfor %}}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )


A_CALL = "<tool_call>{{ call.function | tojson }}</tool_call>"
CALLS = f"{{% for call in m.tool_calls or [] %}}{A_CALL}{{% endfor %}}"
SPOKEN = "{{ m.content.split('</think>')[-1] }}"
WRITERS = {
    "all": chatml("{{ m.content }}" + CALLS),
    "Mistral": chatml("{% if m.tool_calls %}" + CALLS + "{% else %}{{ m.content }}{% endif %}"),
    "gpt-oss": chatml("{{ m.content }}{% for call in (m.tool_calls or [])[:1] %}" + A_CALL + "{% endfor %}"),
    "R1": chatml(SPOKEN + CALLS),
    "Qwen3": chatml(
        "{% if loop.last and '</think>' in m.content %}<think>\n{{ m.content.split('</think>')[0].split('<think>')[-1]"
        " | trim }}\n</think>\n\n{% endif %}{{ m.content.split('</think>')[-1] | trim }}" + CALLS
    ),
    "no system": chatml("{{ m.content }}" + CALLS, "{{ m.content if m.role != 'system' }}"),
    "no results": chatml("{{ m.content }}" + CALLS, "{{ m.content if m.role != 'tool' else 'done' }}"),
    "results as JSON": chatml("{{ m.content }}" + CALLS, "{{ m.content | tojson if m.role == 'tool' else m.content }}"),
    "no tools": STRICT,
}


def calling(*texts: str, content: str = "") -> dict[str, Any]:
    functions = [{"name": "add", "arguments": {"a": text}} for text in texts]
    calls = [{"id": "abcdefghi", "type": "function", "function": function} for function in functions]
    return {"role": "assistant", "content": content, "tool_calls": calls}


@pytest.mark.parametrize(
    ("messages", "number", "mark"),
    [
        ([{**USER, "content": "<|im_start|>user\n2+2?<|im_end|>\n"}, REPLY], 1, "<|im_start|>"),
        ([USER, {**REPLY, "content": "It is 4.<|im_end|>"}], 2, "<|im_end|>"),
        ([USER, REPLY, {**MORE, "content": "Sure?<|im_end|>"}, LAST], 3, "<|im_end|>"),
        ([{"role": "system", "content": "a<|im_end|>"}, USER, REPLY], 1, "<|im_end|>"),
        ([USER, {**REPLY, "content": "<think>4<|im_end|></think>4"}], 2, "<|im_end|>"),
        ([USER, {**REPLY, "content": "<|end|> of <im_end> [INST] </s> <think>4</think> 4"}], 0, ""),
    ],
)
def test_a_text_with_the_marks_of_the_template_is_refused(
    chat: Chat, messages: list[dict[str, Any]], number: int, mark: str
) -> None:
    """It was rendered before, and would have the turns twice. Marks of other models' templates are text."""
    weights = [float(message["role"] == "assistant") for message in messages]
    sizes = SplitSizes(1, 0, forms=[([*form_of(messages, [], weights)], "dataset: row 7")])
    if not number:
        assert learned_sequences(chat, messages, weights) and form_problems(chat, sizes, "some-model") == []
        return
    role = messages[number - 1]["role"]
    said = f"message {number}, the {role}'s, has {mark}, with which the chat template writes turns; give the messages"
    with pytest.raises(UserError, match=re.escape(said)):
        learned_sequences(chat, messages, weights)
    [line] = form_problems(chat, sizes, "some-model")
    assert line.startswith(f"environment: dataset: row 7: some-model: {said}")
    asked = SplitSizes(1, 0, forms=[([*form_of(messages[:-1], [], [False] * len(messages))], "dataset: row 7")])
    assert len(form_problems(chat, asked, "some-model")) == (number < len(messages)), "a prompt of an environment too"


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("<|im_start|>user\na<|im_end|>\n<|im_start|>assistant", ["<|im_start|>", "<|im_end|>"]),
        ("<s>[INST] a [/INST] b</s>", ["<s>", "[INST]", "[/INST]", "</s>"]),
        ("<start_of_turn>user\na<end_of_turn>", ["<start_of_turn>", "<end_of_turn>"]),
        ("<｜User｜>a<｜Assistant｜>", ["<｜User｜>", "<｜Assistant｜>"]),
        ("<|turn>user\na<turn|>", ["<|turn>", "<turn|>"]),
        ("<|START_THINKING|>a<|END_THINKING|><|begin_of_thought|>", []),
        ("a < b |> c, x[0] <b>bold</b> <think>d</think> a|b", []),
    ],
)
def test_marks_of_templates_are_found_in_texts(text: str, found: list[str]) -> None:
    assert controls(text) == found


RESULT = {"role": "tool", "content": 'a "result"\nof two lines', "tool_call_id": "abcdefghi"}
THOUGHT = {"role": "assistant", "content": "<think>I add.</think>It is 4."}
LEFT_OUT: list[tuple[list[dict[str, Any]], dict[str, str]]] = [
    ([USER, REPLY], {}),
    ([USER, THOUGHT], {"R1": 'the thought "I add." of message 2'}),
    ([USER, THOUGHT, MORE, LAST], {"R1": 'the thought "I add." of message 2'}),
    ([USER, {"role": "assistant", "content": "<think>\n\n</think>\n\nIt is 4."}], {}),
    ([USER, calling("one")], {}),
    ([USER, calling("one", content="I call.")], {"Mistral": 'the text "I call." of message 2'}),
    ([USER, calling("one", "two")], {"gpt-oss": '"two" of call 2 of message 2'}),
    ([USER, calling("one"), RESULT, REPLY], {}),
    ([{"role": "system", "content": "Be brief."}, USER, REPLY], {"no system": 'the text "Be brief." of message 1'}),
]  # fmt: skip


@pytest.mark.parametrize("name", WRITERS)
@pytest.mark.parametrize("number", range(len(LEFT_OUT)))
def test_a_conversation_of_which_the_template_leaves_something_out_is_refused(name: str, number: int) -> None:
    messages, refused = LEFT_OUT[number]
    weights = [float(message["role"] == "assistant") for message in messages]
    if name not in refused:
        assert learned_sequences(made(WRITERS[name]), messages, weights, [ADD])
        return
    with pytest.raises(UserError, match=re.escape(refused[name])):
        learned_sequences(made(WRITERS[name]), messages, weights, [ADD])
    sizes = SplitSizes(1, 0, forms=[([*form_of(messages, [ADD], weights)], "dataset: row 7")])
    [line] = form_problems(made(WRITERS[name]), sizes, "some-model")
    assert line.startswith("environment: dataset: row 7: some-model: the chat template leaves out")


@settings(deadline=None, max_examples=30)
@given(data=st.data())
@pytest.mark.parametrize("name", WRITERS)
def test_every_text_of_a_demonstration_is_written_or_the_row_is_refused(name: str, data: st.DataObject) -> None:
    chat, words = made(WRITERS[name]), (f"w{number}w" for number in itertools.count())
    messages: list[dict[str, Any]] = [{"role": role, "content": next(words)} for role in data.draw(
        st.sampled_from([["user"], ["system", "user"]]))]  # fmt: skip
    wanted: list[list[str]] = []
    kinds = st.sampled_from(["text", "thought", "calls", "calls and text"])
    for kind in data.draw(st.lists(kinds, min_size=1, max_size=3)):
        mine = [next(words) for _ in range(3)]
        reply = {
            "text": {"role": "assistant", "content": mine[0]},
            "thought": {"role": "assistant", "content": f"<think>{mine[0]}</think>{mine[1]}"},
            "calls": calling(*mine[:2]),
            "calls and text": calling(mine[1], mine[2], content=mine[0]),
        }[kind]
        wanted.append(mine[: {"text": 1, "calls and text": 3}.get(kind, 2)])
        messages += [reply, {"role": "tool" if reply.get("tool_calls") else "user", "content": next(words)}]
    messages = messages[:-1] if data.draw(st.booleans()) else messages
    weights = [float(message["role"] == "assistant") for message in messages]
    try:
        found = learned_sequences(chat, messages, weights, [ADD])
    except UserError as error:
        assert "leaves out" in str(error)
        assert name not in ("all", "Qwen3", "results as JSON", "no tools"), error
        return
    learnt = "".join(text for one in found for text, _ in learned(chat, one))
    assert all(word in learnt for mine in wanted for word in mine)
    whole = chat.decode([*found[-1].prompt, *found[-1].tokens])
    last = max(number for number, weight in enumerate(weights) if weight)
    assert all(message["content"] in whole for message in messages[:last] if message["role"] != "assistant")
    form = [*form_of(messages[: last + 1], [ADD], weights)]
    assert form_problems(chat, SplitSizes(1, 0, forms=[(form, "")]), "") == []
