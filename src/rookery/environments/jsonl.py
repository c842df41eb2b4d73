"""The built-in ``jsonl``: single-turn tasks from a JSONL file and a named verifier, without Python.

A row is ``{"prompt": "…"}`` or ``{"messages": [{"role": …, "content": …}, …]}`` (also under the name ``prompt``, as TRL
and verl write it) plus the fields that the verifier compares with (``answer`` by default). All rows are checked,
including what the verifier needs, before the first episode; an error names the row's number. A row is its own prompt,
so an episode that resumes after a crash needs no file.
"""

from __future__ import annotations

import copy
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, overload

from pydantic import BeforeValidator, ConfigDict, Discriminator, Field, model_validator

from rookery.bounds import ENTRIES, INTEGER, MESSAGES, GivenModel, JsonSize, Line, Name, Text
from rookery.environments.base import Environment, MadePrompts, Message, Reply, Split, SplitSizes, Step
from rookery.environments.jsonl_rows import CheckRow, scan
from rookery.environments.judges import ask_judge
from rookery.environments.messages import MessageRefused, conversation, form_of, readable, refuse_as_text, shown
from rookery.environments.models import AsksModels
from rookery.environments.tools import Tool, as_message, called
from rookery.environments.verifiers.parts import spoken
from rookery.environments.verifiers.texts import folded, is_blank, visible
from rookery.environments.verifiers.verifiers import Grader, Judge, Verifier
from rookery.errors import UserError, count_of, short
from rookery.protocol import BestConstant
from rookery.spec import values
from rookery.spec.job import TOOL_CALLS

UNREAD = {
    "tools": "no chat template gets it; describe the tools in a system message",
    "chat_template_kwargs": "no chat template gets it; leave it out",
    "images": "models read texts alone here; leave it out",
    "videos": "models read texts alone here; leave it out",
    "audios": "models read texts alone here; leave it out",
    "functions": "no chat template gets it; describe the tools in a system message",
    "image": "models read texts alone here; leave it out",
}
"""Fields that change the prompt in rows of TRL and verl: without them the policy would read another prompt."""

NO_MESSAGE = dict.fromkeys(
    ("system", "system_prompt"), "no model reads it; write it as the first message, of the role system"
)
"""Further such fields; a verifier may read them."""

QUESTION_PARTS = (
    "instruction", "input", "context", "history", "question", "problem", "query", "passage", "article", "choices",
    "options",
)  # fmt: skip
"""Fields that hold a part of the question in rows of others, such as Alpaca's or MMLU's; a verifier may read them."""

MOST_TOOLS = 8
"""Most tools of an environment."""

FORMS = 100
"""Sequences of roles that are noted for a check against the chat template: data of one task has a few."""

INLINE_ROW_BYTES = 1 << 20
"""Limit of a row in the job itself."""

Rows = Annotated[list[Annotated[dict[str, Any], JsonSize(INLINE_ROW_BYTES)]], Field(max_length=ENTRIES)]


def _named(value: Any) -> Any:
    return {"name": value} if isinstance(value, str) else value


class FileOptions(GivenModel):
    """The options of an environment whose prompts are the rows of files."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    rows: Rows | None = None
    """Rows in the job itself. The service stores them as a dataset and puts `dataset` in their place."""
    path: Line | None = None
    """A JSONL file on your machine. The Python client and `rookery run` upload it and put `dataset` in its place.
    Relative paths start at the job file's folder."""
    dataset: Name | None = None
    """Hash of an uploaded file, as `POST /api/v1/datasets` answered it."""
    eval_rows: Rows | None = None
    """Held-out rows in the job itself, stored like `rows`."""
    eval_path: Line | None = None
    """A JSONL file with held-out rows, uploaded like `path`."""
    eval_dataset: Name | None = None
    """Hash of an uploaded file with held-out rows."""
    eval_last: int = Field(0, ge=0, le=INTEGER)
    """Number of rows at the end that are held out from training."""

    @model_validator(mode="after")
    def _one_source(self) -> FileOptions:
        if sum(source is not None for source in (self.rows, self.path, self.dataset)) != 1:
            raise ValueError("exactly one of rows, path and dataset")
        held_out = (self.eval_rows, self.eval_path, self.eval_dataset, self.eval_last or None)
        if sum(source is not None for source in held_out) > 1:
            raise ValueError("at most one of eval_rows, eval_path, eval_dataset and eval_last")
        return self


class JsonlOptions(FileOptions):
    """Options of ``{id: jsonl}``: one row, one reply, one verdict. A row has a `prompt` (a text, or the messages
    of a chat) or `messages`, and the fields that the verifier compares with. A message has `role` and `content`; the
    last one is not the assistant's. Give exactly one of `rows`, `path` and `dataset`, and at most one of the `eval_`
    fields. All rows are checked when the job is submitted."""

    verifier: Annotated[Verifier, Discriminator("name"), BeforeValidator(_named)]
    """Judges the reply: a name, or a mapping with `name` and the options of that [verifier](#verifiers)."""
    tools: list[Tool] = Field(default_factory=list, max_length=MOST_TOOLS)
    """Tools that the policy may use before it answers: `{tool: python}`, `{tool: search, index: corpus.jsonl}`, each at
    most once: [tools](environments.md#tools)."""
    calls: int = Field(TOOL_CALLS, ge=1, le=100)
    """Most calls of tools in an episode. The reply after them is judged, whatever it calls."""
    tool_role: Literal["user", "tool"] = "user"
    """Role of the messages with results; many chat templates have no `tool`."""
    tool_instruction: Text | None = None
    """Text after the last message of each prompt, which says how tools are called. When absent, that of each tool."""


class RowFiles(Environment):
    """Base of the environments whose prompts are the rows of files, checked one by one."""

    deterministic = True

    def __init__(self, options: FileOptions, indexed: Mapping[str, array[int]] | None, check: CheckRow) -> None:
        """Reads and checks the rows; raises :class:`UserError`. ``indexed``: the offsets of the rows by the option that
        names their file, where another process has checked them with these options."""
        if options.dataset is not None or options.eval_dataset is not None:
            raise UserError("dataset: names an upload, which only the service can read; give rows or path")
        known = indexed or {}
        rows = _rows("dataset", options.rows, options.path, known.get("path"), check)
        held_out = _rows("eval", options.eval_rows, options.eval_path, known.get("eval_path"), check)
        self.sources: dict[str, Sequence[dict[str, Any]]] = {"path": rows, "eval_path": held_out}
        """All rows by the option that names their file."""
        if options.eval_last:
            if options.eval_last >= len(rows):
                raise UserError(
                    f"eval_last: given {options.eval_last}, allowed: less than the {count_of(len(rows), 'row')}"
                )
            rows, held_out = rows[: -options.eval_last], rows[-options.eval_last :]
        self._splits: dict[str, Sequence[dict[str, Any]]] = {"train": rows, "eval": held_out}

    def prompts(self, split: Split) -> Iterable[Any]:
        return self._splits[split]

    def check_answers(self) -> None:
        """Raises :class:`UserError` for a row that only another library can find wrong. Takes up to half a minute."""

    def asked(self, row: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
        """The messages of a row that ask."""
        raise NotImplementedError

    def reset(self, prompt: Any, seed: int) -> Sequence[Message]:
        return [readable(message) for message in self.asked(prompt)]

    def form(self, row: Mapping[str, Any]) -> tuple[str, ...]:
        """The roles and calls of a row's messages, which a chat template may refuse."""
        asked = self.asked(row)
        return form_of(asked, learned=[False] * len(asked))

    def sizes(self) -> SplitSizes:
        """The sizes of the splits and the forms of their prompts; reads all rows again."""
        train, held_out = self._splits["train"], self._splits["eval"]
        forms: dict[tuple[str, ...], str] = {}
        asked: list[int] = []
        for index, row in enumerate(held_out):
            asked.append(_question(self.asked(row)))
            _add_form(forms, self.form(row), "eval", held_out, index)
        known, found = set(asked), set()
        for index, row in enumerate(train):
            if known and (question := _question(self.asked(row))) in known:
                found.add(question)
            _add_form(forms, self.form(row), "dataset", train, index)
        repeated = sum(question in found for question in asked)
        by = "environment.eval_last, eval_rows or eval_path"
        shown = [([*roles], where) for roles, where in forms.items()]
        return SplitSizes(len(train), len(held_out), repeated, by, asked=bool(held_out), forms=shown)


MOST_ASKED = MESSAGES - 3
"""Messages of a row: an instruction for tools, the reply and a judge's question come with them in one frame."""


class Jsonl(RowFiles, AsksModels):
    """An environment over checked rows: one row, one reply, one verdict."""

    def __init__(self, options: JsonlOptions, indexed: Mapping[str, array[int]] | None = None) -> None:
        """As :class:`RowFiles`."""
        super().__init__(options, indexed, partial(_check_asked, options.verifier))
        self._verifier = options.verifier
        self._options = options
        self._calls = 0
        """Calls of tools in this episode."""
        self._asked = False
        """The judge of this episode was asked."""
        if indexed is None:
            self._verifier.check_options()
            for tool in options.tools:
                tool.check()
            self._check(self._verifier.first_unfit)

    def check_answers(self) -> None:
        """Raises :class:`UserError` for a row whose answer the verifier's library cannot read. Takes up to half a
        minute."""
        self._check(self._verifier.first_unread)

    def _check(self, first: Callable[[Iterable[Mapping[str, Any]]], tuple[int, str] | None]) -> None:
        for where, rows in (("dataset", self._splits["train"]), ("eval", self._splits["eval"])):
            unfit = first(rows.as_written() if isinstance(rows, IndexedRows) else rows)
            if unfit is not None:
                index, reason = unfit
                raise UserError(f"{where}: {_where(rows, index)}: {reason} (verifier {self._verifier.name})")

    def asked(self, row: Mapping[str, Any]) -> list[Message]:
        return messages_of(row)

    def reset(self, prompt: Any, seed: int) -> Sequence[Message]:
        messages = messages_of(prompt)
        given = self._options.tool_instruction
        instruction = "\n".join(tool.instruction for tool in self._options.tools) if given is None else given
        if instruction and self._options.tools:
            last = messages[-1]
            messages[-1] = {**last, "content": f"{last['content']}\n\n{instruction}"}
        return messages

    def step(self, reply: Reply) -> Step:
        text = spoken(reply.text, reply.raw, reply.special) or ""
        call = called(self._options.tools, text) if self._calls < self._options.calls else None
        if call is not None and not self._asked:
            self._calls += 1
            result = {"role": self._options.tool_role, "content": as_message(call[0].call(call[1]))}
            return Step(messages=[result], metrics={"calls": float(self._calls)})
        step = self._judged(reply)
        return replace(step, metrics={**step.metrics, "calls": float(self._calls)}) if self._options.tools else step

    def _judged(self, reply: Reply) -> Step:
        if isinstance(self._verifier, Judge) and not self._asked:
            self._asked = True
            question = {"role": "user", "content": self._verifier.question(self.prompt)}
            if self._verifier.policy is not None:
                return Step(messages=[question], policy=self._verifier.policy)
            assert self._verifier.model is not None  # the options have one of the two
            answer = ask_judge(self._verifier.model, [*reply.messages, question])
            reward, metrics = self._verifier.reading(answer.finish).score(answer.text, self.prompt)
            return Step(reward=reward, done=True, metrics=metrics)
        verifier: Verifier = self._verifier
        if isinstance(verifier, Grader):
            verifier = verifier.asking(self.ask)
        elif isinstance(verifier, Judge):
            verifier = verifier.reading(reply.finish)
        reward, metrics = verifier.score(reply.text, self.prompt, reply.raw, reply.special)
        return Step(reward=reward, done=True, metrics=metrics)

    def best_constant(self, prompts: Sequence[Any]) -> BestConstant | None:
        return self._verifier.best_constant(prompts)

    def for_episode(self) -> Environment:
        return copy.copy(self)  # rows and verifier are immutable


def _question(messages: Sequence[Mapping[str, Any]]) -> int:
    """A hash of the text that messages ask with, as it reads in any case, to compare rows by."""
    return hash(tuple(folded(readable(message)["content"]) for message in messages))


def _add_form(
    forms: dict[tuple[str, ...], str], roles: tuple[str, ...], where: str, rows: Sequence[Any], index: int
) -> None:
    """Note the place of a row with a new sequence of roles."""
    if roles not in forms and len(forms) < FORMS:
        forms[roles] = f"{where}: {_where(rows, index)}"


def _where(rows: Sequence[Any], index: int) -> str:
    return f"line {rows.line(index)}" if isinstance(rows, IndexedRows) else f"row {index + 1}"


def messages_of(row: Mapping[str, Any]) -> list[Message]:
    """First messages of a row's episode. Raises :class:`~rookery.environments.messages.MessageRefused`."""
    name = "messages" if row.get("prompt") is None else "prompt"
    given = row[name]
    return [{"role": "user", "content": given}] if isinstance(given, str) else conversation(given, name)


class IndexedRows(MadePrompts):
    """The rows of a JSONL file, read from the file when they are needed: only the place of each is in memory."""

    def __init__(self, path: Path, offsets: array[int]) -> None:
        self._path = path
        self.offsets = offsets

    @classmethod
    def of(cls, path: Path, where: str, check: CheckRow) -> IndexedRows:
        """Reads and checks the whole file, a line at a time. Raises :class:`UserError` as :func:`scan` does."""
        with path.open("rb") as file:
            return cls(path, array("Q", (offset for offset, _ in scan(file, where, check=check))))

    def __len__(self) -> int:
        return len(self.offsets)

    @property
    def nbytes(self) -> int:
        return self.offsets.itemsize * len(self.offsets)

    def line(self, index: int) -> int:
        """The number of a row's line in the file, from 1."""
        with self._path.open("rb") as file:
            return 1 + sum(1 for _ in iter(file.readline, b"") if file.tell() <= self.offsets[index])

    @overload
    def __getitem__(self, index: int) -> dict[str, Any]: ...
    @overload
    def __getitem__(self, index: slice) -> IndexedRows: ...
    def __getitem__(self, index: int | slice) -> dict[str, Any] | IndexedRows:
        if isinstance(index, slice):
            return IndexedRows(self._path, self.offsets[index])
        return next(iter(self[index : index + 1 or None]))

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return self._read(values.decode)

    def as_written(self) -> Iterator[dict[str, Any]]:
        """The rows with numbers that are not what is written as :class:`~rookery.spec.values.Rounded`."""
        return self._read(values.decode_written)

    def _read(self, decode: Callable[[bytes], Any]) -> Iterator[dict[str, Any]]:
        with self._path.open("rb") as file:
            for offset in self.offsets:
                file.seek(offset)
                yield decode(file.readline())


def check_row(row: Any, where: str) -> None:
    """Raises :class:`UserError` unless ``row`` is a row as the module docstring defines it."""
    if not isinstance(row, dict):
        raise UserError(f'{where} is {type(row).__name__}, not an object; write {{"prompt": …, "answer": …}}')
    given = [name for name in ("prompt", "messages") if row.get(name) is not None]
    if len(given) == 2:
        raise UserError(f"{where} has both prompt and messages; give one of them")
    if not given:
        raise UserError(f"{where} has neither prompt nor messages, but {field_names(row)}; give one of them")
    (name,) = given
    asked = row[name]
    try:
        if isinstance(asked, str):
            refuse_as_text(asked, name)
        if not (isinstance(asked, str) and name == "prompt") and not (isinstance(asked, list) and asked):
            text = "a text, or " if name == "prompt" else ""
            raise UserError(f'{where}: {name} is {shown(asked)}; give {text}a list of {{"role": …, "content": …}}')
        messages = messages_of(row)
        if isinstance(asked, str) and is_blank(asked):
            raise UserError(f"{where}: {name} is {shown(asked)}; give a text that is not empty")
        refuse_blank(messages, name)
    except MessageRefused as error:
        raise UserError(f"{where}: {error}") from None
    _refuse_unread(row, where, UNREAD)


def _refuse_unread(row: Mapping[str, Any], where: str, fields: Mapping[str, str]) -> None:
    for unread, remedy in fields.items():
        if row.get(unread):
            raise UserError(f"{where}: {unread} is {shown(row[unread])}, but {remedy}")


def left_out(row: Mapping[str, Any], messages: Iterable[Mapping[str, Any]], names: Iterable[str]) -> str:
    """The first of the fields ``names`` with a text that no message has, and what to do, in one line; empty without
    one."""
    given = [(name, row[name]) for name in names if row.get(name) and not _holds_messages(name, row[name])]
    read = " ".join(visible(readable(message)["content"]) for message in messages) if given else ""
    for name, value in given:
        if any(visible(text) not in read for text in _texts(value)):
            return f"{name} is {shown(value)}, but no message has it; write it into the prompt, or leave it out"
    return ""


def _holds_messages(name: str, value: Any) -> bool:
    """Whether a field is the ``input`` of OpenAI's preferences, which are read."""
    return name == "input" and isinstance(value, Mapping)


def _texts(value: Any) -> Iterator[str]:
    """The texts in lists and mappings; of messages those that they say."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        yield from _texts(value["content"] if "content" in value else [*value.values()])
    elif isinstance(value, list):
        for part in value:
            yield from _texts(part)


def refuse_blank(messages: Sequence[Mapping[str, Any]], name: str) -> None:
    """Raises :class:`MessageRefused` where the last of the messages ``name``, which asks, is a user's without a text,
    and where none has one."""
    if all(is_blank(message["content"]) and not message.get("tool_calls") for message in messages):
        raise MessageRefused(f"{name} is {shown([*messages])}; give a text that is not empty")
    if messages[-1]["role"] == "user" and is_blank(messages[-1]["content"]):
        last = f"{name}.{len(messages) - 1}"
        raise MessageRefused(f"{last} is {shown(messages[-1])}: it asks nothing; write the question, or leave it out")


def _check_asked(verifier: Verifier, row: Any, where: str) -> None:
    """As :func:`check_row`, for a row whose messages are an environment's answer, and those that a judge reads, with
    fields for the ``verifier``."""
    check_row(row, where)
    _refuse_unread(row, where, {name: why for name, why in NO_MESSAGE.items() if not verifier.may_read(name)})
    messages = messages_of(row)
    if left := left_out(row, messages, (name for name in QUESTION_PARTS if not verifier.may_read(name))):
        raise UserError(f"{where}: {left}")
    if len(messages) > MOST_ASKED:
        raise UserError(f"{where} has {count_of(len(messages), 'message')}; give at most {MOST_ASKED}")


def _rows(
    where: str, rows: list[dict[str, Any]] | None, path: str | None, offsets: array[int] | None, check: CheckRow
) -> Sequence[dict[str, Any]]:
    if rows is not None:
        for number, row in enumerate(rows, 1):
            check(row, f"{where}: row {number}")
            try:
                values.check(row)
            except ValueError as error:
                raise UserError(f"{where}: row {number}: {error}") from None
        return rows
    if path is None:
        return []
    if offsets is not None:
        return IndexedRows(Path(path), offsets)
    try:
        return IndexedRows.of(Path(path), where, check)
    except OSError as error:
        raise UserError(f"{where}: {path} cannot be read ({error.strerror}); give a JSONL file") from None


def field_names(row: Mapping[str, Any]) -> str:
    """The fields that a row has, for the line of a mistake."""
    return short(", ".join(map(repr, row))) or "no fields"
