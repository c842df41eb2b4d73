"""Rows that are trained on as they are, without a rollout: demonstrations for ``sft``, pairs of replies for ``dpo``.

A demonstration is ``{"messages": […]}``, of which the assistant's turns are learned, each with a ``weight`` from 0 to 1
(1 where absent), or ``{"prompt": …, "completion": …}``. A preference is ``{"prompt": …, "chosen": …, "rejected": …}``,
or, as OpenAI writes it, ``{"input": {"messages": […]}, "preferred_output": […], "non_preferred_output": […]}``. Prompts
and completions are texts or messages, replies texts or one message each. Messages may have calls of tools and their
results, and a row, or its ``input``, ``tools``. The check of a row is the conversion that the run does.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rookery.environments.base import Reply, Step
from rookery.environments.jsonl import (
    NO_MESSAGE,
    QUESTION_PARTS,
    UNREAD,
    FileOptions,
    RowFiles,
    check_row,
    field_names,
    left_out,
    refuse_blank,
)
from rookery.environments.jsonl_rows import scan
from rookery.environments.messages import form_of, offered_tools, refuse_as_text, shown, with_calls
from rookery.environments.search import check_text
from rookery.environments.verifiers.numbers import plain_number
from rookery.environments.verifiers.texts import decimal_of, is_blank
from rookery.errors import UserError


class DemonstrationsOptions(FileOptions):
    """Options of ``{id: demonstrations}``, for the algorithm `sft`. A row has `messages`, of which the assistant's
    turns are learned, each times its `weight` (0 to 1, 1 where absent), or a `prompt` and a `completion`: texts, or
    lists of messages; and `tools` where the messages call some. Give exactly one of `rows`, `path` and `dataset`, and
    at most one of the `eval_` fields. All rows are checked when the job is submitted."""


class PreferencesOptions(FileOptions):
    """Options of ``{id: preferences}``, for the algorithm `dpo`. A row has a `prompt`, which is a text or a list of
    messages, and a `chosen` and a `rejected` reply to it, each a text or a list with one message of the assistant; or,
    as OpenAI names them, `input`, `preferred_output` and `non_preferred_output`; and `tools` where the messages call
    some. Give exactly one of `rows`, `path` and `dataset`, and at most one of the `eval_` fields. All rows are checked
    when the job is submitted."""


ROW_UNREAD = {
    **{name: remedy for name, remedy in UNREAD.items() if name != "tools"},
    **NO_MESSAGE,
    "functions": "only tools are read; write them as tools",
}
"""Fields that change the conversation in rows of others."""

_SCORE = re.compile("score|rating|reward", re.IGNORECASE)
"""The names of figures of which the better reply has the higher one."""
_WORSE = {"chosen": "rejected", "preferred": "non_preferred"}
_BETTER = re.compile("chosen|(?<!non_)preferred")
"""The names of the better reply, and by them those of the other."""

MOST_TURNS = 128
"""Learned turns of one conversation: each is rendered with all that precedes it, and may become a sequence."""


@dataclass(frozen=True)
class Demonstration:
    """A conversation, and the weight of each of its messages in the loss: 0 for those that are not the assistant's.
    ``messages`` and ``tools`` are as :func:`~rookery.environments.messages.with_calls` gives them."""

    messages: list[dict[str, Any]]
    weights: list[float]
    tools: list[dict[str, Any]]

    @property
    def prompt(self) -> list[dict[str, Any]]:
        """The messages before the first that is learned."""
        return self.messages[: next(number for number, weight in enumerate(self.weights) if weight)]


@dataclass(frozen=True)
class Preference:
    """A conversation, and two replies to it; messages and ``tools`` are as in a :class:`Demonstration`."""

    prompt: list[dict[str, Any]]
    chosen: dict[str, Any]
    rejected: dict[str, Any]
    tools: list[dict[str, Any]]


def demonstration(row: Mapping[str, Any]) -> Demonstration:
    """Raises ``ValueError`` with one line: the field, the mistake, what to do."""
    if row.get("messages") is not None:
        _refuse(row, "prompt", "completion")
        given, learned = _listed(row["messages"], "messages"), 0
    else:
        asked, reply = (_field(row, name, "messages, or prompt and completion") for name in ("prompt", "completion"))
        prompt = _messages(asked, "prompt", "user")
        given = [*prompt, *_messages(reply, "completion", "assistant")]
        learned = len(prompt)
    _refuse(row, *ROW_UNREAD)
    _refuse_weight(row)
    if learned and row.get("label") is False:
        raise ValueError("label is false, but every completion is imitated; leave the row out, or give pairs to dpo")
    weights = [_weight(message, f"messages.{number}") for number, message in enumerate(given)]
    plain = [_without_weight(message) for message in given]
    for number, message in enumerate(given[:learned]):
        if weights[number] and isinstance(message, Mapping) and message.get("weight") is not None:
            raise ValueError(f"prompt.{number}.weight is {shown(message['weight'])}; only the completion is learned:"
                             " leave the weight out, or give messages")  # fmt: skip
    messages = with_calls(plain, before_reply=False)
    if learned and messages[learned]["role"] == "assistant":
        with_calls(plain[:learned], "prompt")
    weights = [
        weight if message["role"] == "assistant" and number >= learned else 0.0
        for number, (message, weight) in enumerate(zip(messages, weights, strict=True))
    ]
    for number, (message, weight) in enumerate(zip(messages, weights, strict=True)):
        if weight and is_blank(message["content"]) and not message.get("tool_calls"):
            where = "completion" if learned else f"messages.{number}"
            raise ValueError(f"{where} is an empty reply, which teaches to end at once; write its text, or weight 0")
    if messages[0]["role"] == "assistant":
        raise ValueError("messages.0 is the assistant's: nothing comes before it; begin with a user's or system's")
    if sum(weight > 0 for weight in weights) > MOST_TURNS:
        raise ValueError(
            f"more than {MOST_TURNS} turns of the assistant are learned; divide the conversation into rows"
        )
    if left := left_out(row, messages, QUESTION_PARTS):
        raise ValueError(left)
    if not any(weights):
        raise ValueError("no turn of the assistant with a weight above 0; give one, or leave the row out")
    refuse_blank(messages[: next(number for number, weight in enumerate(weights) if weight)],
                 "prompt" if learned else "messages")  # fmt: skip
    return Demonstration(messages, weights, offered_tools(row.get("tools")))


def preference(row: Mapping[str, Any]) -> Preference:
    """Raises ``ValueError`` as :func:`demonstration`."""
    _refuse(row, *ROW_UNREAD)
    _refuse_weight(row)
    if row.get("input") is not None or "preferred_output" in row:
        _refuse(row, "prompt", "chosen", "rejected")
        names = ("input.messages", "preferred_output", "non_preferred_output")
        form = "input, preferred_output and non_preferred_output"
        given = _field(row, "input", form)
        asked, inner = (given.get("messages"), given) if isinstance(given, Mapping) else (given, {})
        _refuse(inner, *ROW_UNREAD)
        if inner.get("tools") and row.get("tools"):
            raise ValueError("the row has tools, and its input has some; give one of them")
        tools = offered_tools(inner.get("tools") or row.get("tools"), "input.tools" if inner.get("tools") else "tools")
    else:
        names, form = ("prompt", "chosen", "rejected"), "prompt, chosen and rejected"
        asked, tools = _field(row, "prompt", form), offered_tools(row.get("tools"))
    replies = [_field(row, name, form) for name in names[1:]]
    prompt = with_calls(_messages(asked, names[0], "user"), names[0])
    refuse_blank(prompt, names[0])
    made = sum(len(message.get("tool_calls", ())) for message in prompt)
    chosen, rejected = (_reply(reply, name, made) for reply, name in zip(replies, names[1:], strict=True))
    _refuse_better_rejected(row)
    if left := left_out(row, prompt, QUESTION_PARTS):
        raise ValueError(left)
    if {**chosen, "content": chosen["content"].strip()} == {**rejected, "content": rejected["content"].strip()}:
        raise ValueError(f"{names[1]} and {names[2]} are the same; give two different replies, or leave the row out")
    return Preference(prompt, chosen, rejected, tools)


def check_demonstration(row: Any, where: str) -> None:
    """Raises :class:`UserError` unless ``row`` is a demonstration."""
    _check(demonstration, row, where, '{"messages": [{"role": "user", …}, {"role": "assistant", …}]}')


def check_preference(row: Any, where: str) -> None:
    """Raises :class:`UserError` unless ``row`` is a preference."""
    _check(preference, row, where, '{"prompt": …, "chosen": …, "rejected": …}')


def check_any(row: Any, where: str) -> None:
    """Raises :class:`UserError` unless ``row`` is one of an environment of files, of the kind that its fields tell."""
    fields = row if isinstance(row, Mapping) else {}
    messages = fields.get("messages")
    last = messages[-1] if isinstance(messages, list) and messages else None
    if any(fields.get(name) is not None for name in ("chosen", "rejected", "preferred_output", "non_preferred_output")):
        check_preference(row, where)
    elif fields.get("completion") is not None or (isinstance(last, Mapping) and last.get("role") == "assistant"):
        check_demonstration(row, where)
    elif fields.get("text") is not None and fields.get("prompt") is None and messages is None:
        check_text(row, where)
    else:
        check_row(row, where)


def count_rows(path: Path, row_bytes: int, rows: int) -> int:
    """Checks a whole file and returns the number of its rows. Raises :class:`UserError` as
    :func:`~rookery.environments.jsonl.scan` does."""
    with path.open("rb") as file:
        return sum(1 for _ in scan(file, row_bytes=row_bytes, rows=rows, check=check_any))


class Demonstrations(RowFiles):
    """Conversations whose assistant turns are learned; it has no episodes."""

    def __init__(self, options: DemonstrationsOptions, indexed: Mapping[str, array[int]] | None = None) -> None:
        """As :class:`RowFiles`."""
        super().__init__(options, indexed, check_demonstration)

    def asked(self, row: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
        return demonstration(row).prompt

    def form(self, row: Mapping[str, Any]) -> tuple[str, ...]:
        found = demonstration(row)
        return form_of(found.messages, found.tools, found.weights)

    def step(self, reply: Reply) -> Step:
        raise NotImplementedError("demonstrations have no rewards; give the algorithm sft")


class Preferences(RowFiles):
    """Pairs of replies; it has no episodes."""

    def __init__(self, options: PreferencesOptions, indexed: Mapping[str, array[int]] | None = None) -> None:
        """As :class:`RowFiles`."""
        super().__init__(options, indexed, check_preference)

    def asked(self, row: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
        return preference(row).prompt

    def form(self, row: Mapping[str, Any]) -> tuple[str, ...]:
        found = preference(row)
        learned = [*(False for _ in found.prompt), True]
        forms = [form_of([*found.prompt, reply], found.tools, learned) for reply in (found.chosen, found.rejected)]
        return max(forms, key=lambda form: len(form[-1]))  # the one with more calls or thoughts

    def step(self, reply: Reply) -> Step:
        raise NotImplementedError("preferences have no rewards; give the algorithm dpo")


def _check(convert: Any, row: Any, where: str, form: str) -> None:
    if not isinstance(row, dict):
        raise UserError(f"{where} is {type(row).__name__}, not an object; write {form}")
    try:
        convert(row)
    except ValueError as error:
        raise UserError(f"{where}: {error}") from None


def _refuse(row: Mapping[str, Any], *names: str) -> None:
    for name in names:
        if row.get(name):
            remedy = ROW_UNREAD.get(name, "the row has another form; leave it out")
            raise ValueError(f"{name} is {shown(row[name])}, but {remedy}")


def _refuse_weight(row: Mapping[str, Any]) -> None:
    """A whole row has no weight, unless it is that of every row."""
    given = row.get("weight")
    if given is not None and (isinstance(given, bool) or given != 1):
        raise ValueError(
            f"weight is {shown(given)}, but a row has none; give it to turns of the assistant in messages, or leave the"
            " row out"
        )


def _refuse_better_rejected(row: Mapping[str, Any]) -> None:
    """The scores of both replies, such as ``score_chosen`` and ``score_rejected``, agree with the order."""
    spelt = {name.lower(): name for name in row}
    for name, chosen in row.items():
        other = spelt.get(_BETTER.sub(lambda better: _WORSE[better[0]], name.lower()), name)
        rejected = row[other] if other != name and _SCORE.search(name) else None
        scores = [plain_number(one) if isinstance(one, str) else decimal_of(one) for one in (chosen, rejected)]
        if scores[0] is not None and scores[1] is not None and scores[0] < scores[1]:
            raise ValueError(
                f"{name} is {shown(chosen)}, less than {other}, {shown(rejected)}; exchange the two replies, or leave"
                " the row out"
            )


def _field(row: Mapping[str, Any], name: str, form: str) -> Any:
    """The value of a field that rows of this form have."""
    if name not in row:
        raise ValueError(f"it has no {name}, but {field_names(row)}; give {form}")
    return row[name]


def _listed(value: Any, name: str, also: str = "") -> list[Any]:
    if not isinstance(value, list) or not value:
        raise ValueError(f'{name} is {shown(value)}; give {also}a list of {{"role": …, "content": …}}')
    return value


def _messages(value: Any, name: str, role: str) -> list[Any]:
    """A text as one message of ``role``, or the messages that are given."""
    if isinstance(value, str):
        if is_blank(value):
            raise ValueError(f"{name} is {shown(value)}; give a text that is not empty")
        refuse_as_text(value, name)
        return [{"role": role, "content": value}]
    return _listed(value, name, "a text, or ")


def _reply(value: Any, name: str, made: int) -> dict[str, Any]:
    """The message of a reply, before which so many calls were ``made``."""
    messages = with_calls(_messages(value, name, "assistant"), name, before_reply=False, first=made)
    if len(messages) != 1 or messages[0]["role"] != "assistant":
        raise ValueError(f"{name} is {shown(value)}; give a text, or one message of the assistant")
    if is_blank(messages[0]["content"]) and not messages[0].get("tool_calls"):
        raise ValueError(f"{name} is {shown(value)}; give a reply that is not empty")
    return messages[0]


def _weight(message: Any, where: str) -> float:
    given = message.get("weight") if isinstance(message, Mapping) else None
    if given is None:
        return 1.0
    if message.get("role") != "assistant":
        raise ValueError(f"{where}.weight is {shown(given)}, but only turns of the assistant have one; leave it out")
    if isinstance(given, bool) or not isinstance(given, int | float) or not 0 <= given <= 1:
        raise ValueError(f"{where}.weight is {shown(given)}; give a number from 0 to 1")
    return float(given)


def _without_weight(message: Any) -> Any:
    if not isinstance(message, Mapping):
        return message
    return {name: value for name, value in message.items() if name != "weight"}
