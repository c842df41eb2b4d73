"""Conversations as token sequences that are learned from: which tokens are the assistant's, and with which weight.

A reply is learned as it would be sampled: after the prompt that the chat template writes for it, as far as the
template writes the same before a past reply, up to and with the token that ends it, which in some templates begins the
next turn. Where the template writes earlier turns differently once others follow (such as those without their
reasoning), each reply has a separate sequence. A conversation of which the template leaves something out, or whose
texts have its marks, is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from rookery.errors import UserError
from rookery.tokenization.chat import Chat, Message
from rookery.tokenization.written import missing, without_space


@dataclass(frozen=True)
class LearnedSequence:
    """``prompt`` has at least one token; ``weights`` are those of ``tokens``, which follow it: 0 for tokens that
    are not learned."""

    prompt: list[int]
    tokens: list[int]
    weights: list[float]

    @property
    def length(self) -> int:
        return len(self.prompt) + len(self.tokens)

    def cut(self, length: int) -> LearnedSequence:
        """Its first ``length`` tokens."""
        kept = max(0, length - len(self.prompt))
        return LearnedSequence(self.prompt[:length], self.tokens[:kept], self.weights[:kept])


@dataclass(frozen=True)
class _Turn:
    """A reply in the text of its conversation: ``text`` ends with it, and it begins at ``start``."""

    text: str
    start: int
    weight: float


def rendered(
    chat: Chat,
    messages: Sequence[Message],
    tools: Sequence[Mapping[str, Any]] = (),
    *,
    add_generation_prompt: bool = True,
) -> str:
    """A conversation of a row as the template writes it: with ``tools``, or calls of them, as a client's conversation
    with tools is written. Raises :class:`UserError` where the template refuses it."""
    if not tools and not any(message.get("tool_calls") for message in messages):
        return chat.render(messages, add_generation_prompt=add_generation_prompt)
    written, arguments = chat.tools.adapt(messages, tools)
    return chat.render(written, add_generation_prompt=add_generation_prompt, **arguments)


def learned_sequences(
    chat: Chat, messages: Sequence[Message], weights: Sequence[float], tools: Sequence[Mapping[str, Any]] = ()
) -> list[LearnedSequence]:
    """The sequences of a conversation with ``tools``; ``weights`` are those of its messages. Raises :class:`UserError`
    where the chat template refuses it, or leaves something out of a learned message or of one before it."""
    _check_marks(chat, messages)
    turns = _turns(chat, messages, weights, tools)
    whole = turns[-1].text if turns else ""
    if all(whole.startswith(turn.text) for turn in turns):
        return [_sequence(chat, whole, turns)] if turns else []
    return [_sequence(chat, turn.text, [turn]) for turn in turns]


def check_written(
    chat: Chat, messages: Sequence[Message], learned: Sequence[bool], tools: Sequence[Mapping[str, Any]] = ()
) -> None:
    """Raises :class:`UserError` where the chat template refuses a conversation, or leaves something out of it;
    ``learned`` messages are looked at as :func:`learned_sequences` does."""
    _check_marks(chat, messages)
    whole = rendered(chat, messages, tools)
    _turns(chat, messages, [float(one) for one in learned], tools)
    _check_context(whole, messages, learned)


def _check_marks(chat: Chat, messages: Sequence[Message]) -> None:
    """Raises :class:`UserError` for a text with a special token with which the template writes turns: one that was
    rendered already, or that would end its own message."""
    for number, message in enumerate(messages, 1):
        if (found := chat.turn_marks.search(message.get("content") or "")) is not None:
            raise UserError(
                f"message {number}, the {message['role']}'s, has {found[0]}, with which the chat template writes turns;"
                " give the messages as they were before a template was applied, or leave the row out"
            )


def _turns(
    chat: Chat, messages: Sequence[Message], weights: Sequence[float], tools: Sequence[Mapping[str, Any]]
) -> list[_Turn]:
    write = partial(rendered, chat, tools=tools)
    learned = [number for number, weight in enumerate(weights) if weight]
    turns = [_turn(chat, write, messages, number, weights[number]) for number in learned]
    if turns:
        _check_context(turns[-1].text, messages[: learned[-1]], weights)
    return turns


def _check_context(text: str, messages: Sequence[Message], learned: Sequence[float]) -> None:
    """Refuse a text that leaves out messages that are not learned: those that are may be rewritten once others
    follow."""
    squeezed = without_space(text)
    for number, message in enumerate(messages):
        if not learned[number] and (gone := missing(squeezed, message, thoughts=message["role"] != "assistant")):
            raise _left_out(gone, number, message)


def _left_out(gone: str, number: int, message: Message) -> UserError:
    return UserError(
        f"the chat template leaves out {gone} of message {number + 1}, the {message['role']}'s; write it where the"
        " template keeps it, or leave the row out"
    )


def _turn(chat: Chat, write: Callable[..., str], messages: Sequence[Message], number: int, weight: float) -> _Turn:
    """The reply ``messages[number]``."""
    before, reply = messages[:number], messages[number]
    prompt = write(before)
    text = write([*before, reply], add_generation_prompt=False)
    start = len(prompt)
    if not text.startswith(prompt):  # the template opens a reply in another way than it writes one, as with a thought
        history = write(before, add_generation_prompt=False)
        start = max(len(history), chat.shared(text, prompt)) if text.startswith(history) else len(text)
    if start == len(text):
        raise UserError("the chat template writes a conversation differently once a reply follows it")
    if gone := missing(without_space(text[start:]), reply):  # its beginning may be what the template opens a reply with
        history = write(before, add_generation_prompt=False)
        if not text.startswith(history) or missing(without_space(text[len(history) :]), reply):
            raise _left_out(gone, len(before), reply)
    return _Turn(text + _end(chat, write, messages[: number + 2], text, start), start, weight)


def _end(chat: Chat, write: Callable[..., str], messages: Sequence[Message], text: str, start: int) -> str:
    """The token that ends the reply at ``start`` of ``text`` where the template writes none after it, but begins the
    next turn with one, as GLM's does; empty for others. The last of ``messages`` is the reply or follows it."""
    if any(mark in text[start:] for mark in chat.end_marks):
        return ""
    replied = messages if messages[-1]["role"] == "assistant" else messages[:-1]
    asked = {"role": "tool" if replied[-1].get("tool_calls") else "user", "content": "?"}
    following = messages if replied is not messages else [*messages, asked]
    try:
        written = write(following, add_generation_prompt=False)
    except (UserError, KeyError):  # no such message may follow
        return ""
    rest = written[len(text) :] if written.startswith(text) else ""
    return next((mark for mark in chat.end_marks if rest.startswith(mark)), "")


def _sequence(chat: Chat, text: str, turns: Sequence[_Turn]) -> LearnedSequence:
    """The tokens of ``text``, in which ``turns`` are learned."""
    edges = [edge for turn in turns for edge in (turn.start, len(turn.text))]
    first, *rest = chat.pieces(text, edges[:-1])
    prompt, tokens, weights = first or chat.encode(text[: edges[0]]), list[int](), list[float]()
    for number, piece in enumerate(rest):
        if number % 2:  # between two replies
            tokens += piece
            weights += [0.0] * len(piece)
            continue
        learned = _up_to_end(chat, piece)
        tokens += piece
        weights += [turns[number // 2].weight] * learned + [0.0] * (len(piece) - learned)
    return LearnedSequence(prompt, tokens, weights)


def _up_to_end(chat: Chat, piece: Sequence[int]) -> int:
    """How many tokens of a reply are learned: those up to the last that ends one; all where there is none."""
    ends = [at for at, token in enumerate(piece) if token in chat.stop_tokens]
    return ends[-1] + 1 if ends else len(piece)
