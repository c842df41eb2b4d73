"""Which tokens of a conversation are learned: exactly those that the policy would have to sample."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.support.peers import model_folder
from tests.tokenization.test_tool_calls import ADD, CODER, QWEN, SMOLLM3, STRICT, TURNS, made

from rookery.tokenization.chat import Chat
from rookery.tokenization.demonstrations import learned_sequences

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


def test_a_long_conversation_is_cut_at_its_end(chat: Chat) -> None:
    [one] = learned_sequences(chat, [USER, REPLY], [0.0, 1.0])
    assert one.cut(one.length) == one
    shorter = one.cut(len(one.prompt) + 3)
    assert (shorter.prompt, shorter.tokens, len(shorter.weights)) == (one.prompt, one.tokens[:3], 3)
    assert not any(one.cut(2).weights) and len(one.cut(2).prompt) == 2
