"""Chat template and tokenizer of one base model: messages to tokens and back, without torch or transformers.

Promises:

* ``render``, ``prompt``, ``encode`` and ``decode`` give what transformers' ``apply_chat_template``, tokenizer call
  (without special tokens) and ``decode(skip_special_tokens=True)`` give for the same folder.
* Tokens in, tokens out: ``extend`` only appends to the sampled tokens. Where the template would write the conversation
  so far differently, it returns None instead of guessing.
* A template is untrusted text: it runs in jinja2's sandbox, its work is bounded
  (:mod:`rookery.tokenization.template_bounds`), and whatever it raises is its refusal of the conversation.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import threading
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any, NoReturn, TypeVar, cast

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.nodes
import jinja2.parser
from tokenizers import Encoding, Tokenizer

from rookery.errors import UserError, count_of
from rookery.tokenization.call_readers import READERS, CallReader, read_whole
from rookery.tokenization.detokenizer import StreamingText, TokenBytes
from rookery.tokenization.grammar import GrammarTokenizer
from rookery.tokenization.registry import config_path
from rookery.tokenization.template_bounds import BoundedEnvironment
from rookery.tokenization.token_ids import shared_ids
from rookery.tokenization.tool_calls import ToolSupport, called, message_key, support_of
from rookery.tokenization.written import THOUGHT_MARKS

T = TypeVar("T")

Message = Mapping[str, Any]
"""``{"role": …, "content": …}``, with calls of tools also ``tool_calls``."""

TOOL_TEMPLATE = "additional_chat_templates/tool_use.jinja"
"""The template of conversations with tools in the folder of a model that has a separate one."""

GIVEN = frozenset({"messages", "tools", "documents", "add_generation_prompt"})
"""Names in every template whose values the service gives."""

_SENTINEL = "\ue000reply\ue001"
"""Placeholder for the reply, to find out what a template writes around one: private-use characters, no white space."""


NO_VALUES: Mapping[str, Any] = MappingProxyType({})
"""No further values of a template."""

CHARACTERS_PER_TOKEN = 32
"""A text with more characters than this times the model's context is too long, and is refused before it is tokenized.
Ordinary text has three to five characters per token."""

LONG_TEXT, LONG_REPLY = 10_000, 2_500
"""Characters of a text that is encoded, and tokens of one that is decoded, without Python's lock, so that other threads
run meanwhile; the library does so in its own threads, and only for batches."""


REFUSALS = (
    jinja2.TemplateError, TypeError, ValueError, ArithmeticError, LookupError, AttributeError, RecursionError,
)  # fmt: skip
"""Exceptions of a template's expressions and calls."""

LONGEST_REFUSAL = 1000
"""Characters of its reason."""


class PromptTooLong(UserError):
    """The prompt leaves no room for a completion in the model's context. The message begins as OpenAI's does, by
    which litellm and crewAI recognise it."""

    tokens: int | None = None
    """The length of the prompt; None for a text that is too long to be tokenized."""

    @classmethod
    def of(cls, context: int, tokens: int) -> PromptTooLong:
        """The error for a prompt of so many tokens."""
        error = cls(
            f"this model's maximum context length is {count_of(context, 'token')}; the prompt has {tokens}: shorten it"
        )
        error.tokens = tokens
        return error


class Chat:
    """The chat template and tokenizer of one model folder. Safe to use from several threads."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        template: str,
        *,
        special: Mapping[str, str],
        ends: Sequence[int],
        context: int,
        now: Callable[[], datetime] = datetime.now,
        tool_template: str = "",
    ) -> None:
        """``special`` are the named tokens that a template may use (``bos_token`` …), ``ends`` the end-of-text token
        ids of the model's configuration, ``context`` the longest sequence in tokens, ``now`` the wall clock for
        templates that write the date, ``tool_template`` the template of conversations with tools where the model has
        a separate one. Raises :class:`UserError` for an invalid template."""
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self._tokenizer = tokenizer
        self.token_bytes = TokenBytes(tokenizer)
        """The bytes of single tokens."""
        self._special = dict(special)
        self._grammars: dict[int, GrammarTokenizer] = {}
        self._lock = threading.Lock()
        self._added = tokenizer.get_added_tokens_decoder()
        self._tool_source = tool_template or template
        environment = self._environment = _environment(now)
        try:
            self._template = environment.from_string(template)
            self._tool_template = environment.from_string(self._tool_source)
            read = _read_values(environment, template) | _read_values(environment, tool_template)
            self.values = frozenset(read - GIVEN - self._special.keys() - environment.globals.keys())
            """Names of the further values that the template reads, such as ``enable_thinking``."""
        except jinja2.TemplateError as error:
            raise UserError(f"the model's chat template is not valid: {_one_line(error)}") from None
        self.context = context
        self.stop_tokens = sorted({*ends, *self._turn_end()})
        """Token ids that end a reply: the configured ones and the one that the template writes after a reply."""

    @classmethod
    def load(cls, folder: Path, now: Callable[[], datetime] = datetime.now) -> Chat:
        """Reads tokenizer.json, tokenizer_config.json, chat_template.jinja, :data:`TOOL_TEMPLATE`, the configuration
        and generation_config.json of a folder, prepared or published."""
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise UserError(f"{folder} has no tokenizer.json; save a fast tokenizer in the model's folder")
        try:
            tokenizer = Tokenizer.from_file(str(path))
        except Exception as error:  # the tokenizers library raises bare Exception
            raise UserError(f"{path} is not a tokenizer: {_one_line(error)}") from None
        settings = _object(folder / "tokenizer_config.json")
        special = _named_tokens({**_object(folder / "special_tokens_map.json"), **settings})
        path = config_path(folder)
        config, generation = _object(path), _object(folder / "generation_config.json")
        ends = [*_ids(config.get("eos_token_id")), *_ids(generation.get("eos_token_id"))]
        if "eos_token" in special and (end := tokenizer.token_to_id(special["eos_token"])) is not None:
            ends.append(end)
        context = config.get("max_position_embeddings")
        if not isinstance(context, int) or context <= 0:
            raise UserError(f"base_model: {path.name} has no max_position_embeddings")
        template, tool_template = _templates_of(folder, settings)
        return cls(
            tokenizer, template, special=special, ends=ends, context=context, now=now, tool_template=tool_template
        )

    @cached_property
    def vocabulary(self) -> str:
        """A hash of the tokens with their ids: models with the same one mean the same text by the same ids."""
        tokens = sorted(self._tokenizer.get_vocab().items())
        return hashlib.sha256(json.dumps(tokens).encode()).hexdigest()

    def encode(self, text: str) -> list[int]:
        """Token ids of a text, without added special tokens."""
        if len(text) <= LONG_TEXT:
            return shared_ids(self._tokenizer.encode(text, add_special_tokens=False).ids)
        [encoding] = self._tokenizer.encode_batch_fast([text], add_special_tokens=False)
        return shared_ids(encoding.ids)

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of token ids without special tokens."""
        return self._decode(tokens, skip_special_tokens=True)

    def _decode(self, tokens: Sequence[int], *, skip_special_tokens: bool) -> str:
        if len(tokens) <= LONG_REPLY:
            return str(self._tokenizer.decode(list(tokens), skip_special_tokens=skip_special_tokens))
        [text] = self._tokenizer.decode_batch([list(tokens)], skip_special_tokens=skip_special_tokens)
        return str(text)

    def grammars(self, vocabulary: int | None = None) -> GrammarTokenizer:
        """The tokens for grammars; ``vocabulary``: the number of logits, where it is not the tokenizer's size."""
        size = vocabulary or self._tokenizer.get_vocab_size()
        with self._lock:
            if size not in self._grammars:
                self._grammars[size] = GrammarTokenizer(self._tokenizer, size, self.stop_tokens)
            return self._grammars[size]

    def without_special(self, text: str) -> str:
        """A text in which special tokens are written, without them."""
        return self._written_special.sub("", text)

    @cached_property
    def _written_special(self) -> re.Pattern[str]:
        texts = sorted((token.content for token in self._added.values() if token.special), key=len, reverse=True)
        return re.compile("|".join(map(re.escape, texts)) or "(?!)")

    @cached_property
    def turn_marks(self) -> re.Pattern[str]:
        """The special tokens that the template writes around messages, and those that end a reply, as texts; not those
        of thoughts."""
        asked = [{"role": "user", "content": "?"}]
        written = [asked, [*asked, {"role": "assistant", "content": "?"}], [{"role": "system", "content": "?"}, *asked]]
        found = {self._added[token].content for token in self.stop_tokens if token in self._added}
        for messages in written:
            with contextlib.suppress(UserError):
                found.update(self._written_special.findall(self.render(messages)))
        marks = sorted((mark for mark in found if not THOUGHT_MARKS.fullmatch(mark)), key=len, reverse=True)
        return re.compile("|".join(map(re.escape, marks)) or "(?!)")

    @cached_property
    def end_marks(self) -> list[str]:
        """The texts of the tokens that end a reply."""
        return [str(self._added[token].content) for token in self.stop_tokens if token in self._added]

    def without_marks(self, messages: Sequence[Message]) -> list[Message]:
        """The messages with a space within each mark of turns that a text spells. A reply that another model reads, and
        a text of an environment, begin and end no turn."""
        return [
            {**message, "content": self.turn_marks.sub(lambda mark: f"{mark[0][0]} {mark[0][1:]}", content)}
            if isinstance(content := message.get("content"), str)
            else message
            for message in messages
        ]

    def ends(self, texts: Iterable[str], tokens: Iterable[int] | None = None) -> list[int]:
        """The token ids that end a reply with these stop texts: ``tokens``, by default the model's, and the special
        tokens among the texts, which no decoded text shows."""
        special, given = self._special_ids, self.stop_tokens if tokens is None else tokens
        return [*dict.fromkeys([*given, *(special[text] for text in texts if text in special)])]

    @cached_property
    def _special_ids(self) -> dict[str, int]:
        """The id of each special token, of which some models have thousands, by its text."""
        return {token.content: id for id, token in self._added.items() if token.special}

    def decode_special(self, tokens: Sequence[int]) -> tuple[str, list[str]]:
        """The text of a reply with its special tokens, and these, each once; ``("", [])`` for a reply without any. The
        token that ended the reply is left out."""
        if tokens and tokens[-1] in self.stop_tokens:
            tokens = tokens[:-1]
        found = dict.fromkeys(token for token in tokens if token in self._added and self._added[token].special)
        if not found:
            return "", []
        text = self._decode(tokens, skip_special_tokens=False)
        return text, [self._added[token].content for token in found]

    @cached_property
    def prompt_end(self) -> str:
        """The text with which the template opens a reply; empty where it opens none."""
        asked = [{"role": "user", "content": "?"}]
        try:
            written, prompt = self.render(asked, add_generation_prompt=False), self.render(asked)
        except UserError:
            return ""
        return prompt[len(written) :] if prompt.startswith(written) else ""

    @cached_property
    def tools(self) -> ToolSupport:
        """The template's form of tools."""
        return support_of(self._tool_source, self.render)

    def render(self, messages: Sequence[Message], *, add_generation_prompt: bool = True, **arguments: Any) -> str:
        """The conversation as the model reads it, up to the start of its reply; ``arguments`` are further ones of the
        template.

        Raises :class:`UserError` if the template refuses these messages (unknown roles, no user message …).
        """
        if not messages:
            raise UserError("a conversation needs at least one message")
        plain = [{key: value for key, value in message.items() if value is not None} for message in messages]
        template = self._template if arguments.get("tools") is None else self._tool_template
        try:
            with self._environment.bounded(len(plain) + len(arguments.get("tools") or ())):
                return template.render(
                    messages=plain,
                    add_generation_prompt=add_generation_prompt,
                    **{"tools": None, "documents": None, **self._special, **arguments},
                )
        except REFUSALS as error:
            roles = ", ".join(str(message.get("role")) for message in plain)
            raise UserError(f"the chat template refuses messages with roles [{roles}]: {_one_line(error)}") from None

    def prompt(self, messages: Sequence[Message]) -> list[int]:
        """Token ids of :meth:`render`."""
        return self.encode(self.render(messages))

    def conversation(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] = (),
        *,
        opening: str = "",
        values: Mapping[str, Any] = NO_VALUES,
    ) -> list[int]:
        """The prompt of a client's conversation, with ``tools``, calls and results as the template can write them
        (:class:`ToolSupport`), and the ``opening`` of the reply; ``values``: further ones of the template. A
        conversation that ends with the assistant's text is continued within it. Raises :class:`UserError` where the
        template cannot."""
        written, arguments = self.tools.adapt(messages, tools)
        arguments = {**values, **arguments}
        last = written[-1] if written else {}
        if last.get("role") != "assistant" or not last.get("content"):
            return self.encode(self.render(written, **arguments) + opening)
        marked = [*written[:-1], {**last, "content": last["content"] + _SENTINEL}]
        text, found, _ = self.render(marked, add_generation_prompt=False, **arguments).rpartition(_SENTINEL)
        if not found:
            raise UserError("the chat template does not write the assistant's last text: it cannot be continued")
        return self.encode(text)

    def extend(
        self,
        tokens: Sequence[int],
        messages: Sequence[Message],
        reply_text: str,
        reply_tokens: Sequence[int],
        new_messages: Sequence[Message],
    ) -> list[int] | None:
        """The next turn's prompt, which starts with exactly ``tokens``, or None if the template would rewrite them.

        ``tokens`` is the sequence so far, ending in ``reply_tokens``, whose text is ``reply_text``; ``messages`` are
        those before the reply, ``new_messages`` those after it. White space that a template trims around a reply does
        not matter: the sampled tokens stay. None means that the template drops or rewrites earlier text (such as the
        reasoning of past turns), or that the reply ended with a token that the template does not write there.
        """
        written = [*messages, {"role": "assistant", "content": reply_text}, *new_messages]
        return self._extended(
            tokens, reply_tokens, written, len(messages), {}, lambda text: text.strip() == reply_text.strip()
        )

    def continuation(
        self,
        tokens: Sequence[int],
        reply_tokens: Sequence[int],
        messages: Sequence[Message],
        index: int,
        tools: Sequence[Mapping[str, Any]] = (),
        values: Mapping[str, Any] = NO_VALUES,
    ) -> list[int] | None:
        """As :meth:`extend`, of a client's conversation (:meth:`conversation`), in which the reply is the message at
        ``index``: calls count as written where the template writes the same calls, in whatever form."""
        written, arguments = self.tools.adapt(messages, tools)
        arguments = {**values, **arguments}
        reply = messages[index]
        content, calls = reply.get("content") or "", reply.get("tool_calls")

        def same(text: str) -> bool:
            if not calls:
                return text.strip() == content.strip()
            found = read_whole(self.call_reader(tools), text)
            return message_key(*found) == message_key(content, [called(call) for call in calls])

        return self._extended(tokens, reply_tokens, written, index + len(written) - len(messages), arguments, same)

    def _extended(
        self,
        tokens: Sequence[int],
        reply_tokens: Sequence[int],
        messages: Sequence[Message],
        index: int,
        arguments: Mapping[str, Any],
        same: Callable[[str], bool],
    ) -> list[int] | None:
        """``tokens`` and what follows the reply, the message at ``index``, where the template writes before it what it
        wrote, and in its place a text that is the ``same``; else None."""
        before = self.render(messages[:index], **arguments)
        after = self.render(messages, **arguments)
        rest = self._after_reply(messages, index, arguments, after)
        if not rest or not (after.startswith(before) and after.endswith(rest)):
            return None
        if len(before) + len(rest) > len(after) or not same(after[len(before) : len(after) - len(rest)]):
            return None
        tail = self._encode_tail(after, len(after) - len(rest))
        if reply_tokens and reply_tokens[-1] in self.stop_tokens:
            if tail[:1] != [reply_tokens[-1]]:
                return None
            tail = tail[1:]
        return [*tokens, *tail]

    def _after_reply(self, messages: Sequence[Message], index: int, arguments: Mapping[str, Any], written: str) -> str:
        """The text that the template writes after the reply at ``index``, of the whole conversation's, ``written``;
        empty where it cannot be told."""
        marked = [*messages[:index], {"role": "assistant", "content": _SENTINEL}, *messages[index + 1 :]]
        try:
            _, found, rest = self.render(marked, **arguments).rpartition(_SENTINEL)
        except UserError:  # as of results whose calls the mark has replaced
            reply = self.render(messages[: index + 1], add_generation_prompt=False, **arguments)
            kept = reply.rstrip()
            ends = (self._added[token].content for token in self.stop_tokens if token in self._added)
            end = max((text for text in ends if kept.endswith(text)), key=len, default="")
            return written[len(kept) - len(end) :] if written.startswith(reply) else ""
        return rest if found else ""

    def read_reply(
        self, tokens: Sequence[int], stops: Sequence[str], tools: Sequence[Mapping[str, Any]]
    ) -> tuple[str, list[tuple[str, Any]]]:
        """The text of a whole reply up to a stop string, and its calls of ``tools``, name and arguments, as a client
        gets them."""
        reads = bool(tools) or self.tools.style == "harmony"
        text = StreamingText(self.token_bytes, stops, special=reads)
        if not reads:
            return text.take(tokens, last=True), []
        if tokens and tokens[-1] in self.stop_tokens:
            tokens = tokens[:-1]
        content, calls = read_whole(self.call_reader(tools), text.take(tokens, last=True))
        return self.without_special(content), calls

    def call_reader(self, tools: Sequence[Mapping[str, Any]]) -> CallReader:
        """Reads the calls of ``tools`` in a reply, their arguments as the tools' schemas declare them."""
        functions = [tool["function"] for tool in tools]
        parameters = {function["name"]: function.get("parameters") or {} for function in functions}
        return READERS[self.tools.style](list(parameters), parameters)

    def pieces(self, text: str, edges: Sequence[int]) -> list[list[int]]:
        """Token ids of ``text`` cut at the rising offsets ``edges``, one list more than there are edges; a piece is
        encoded separately where a token would straddle an edge."""
        starts, stops = [0, *edges], [*edges, len(text)]
        encoding = self._encoding(text)
        if any(first < edge < last for first, last in encoding.offsets for edge in edges):
            return [self.encode(text[start:stop]) for start, stop in zip(starts, stops, strict=True)]
        found: list[list[int]] = [[] for _ in starts]
        at = 0
        for token, (first, _) in zip(encoding.ids, encoding.offsets, strict=True):
            while at < len(edges) and first >= edges[at]:
                at += 1
            found[at].append(token)
        return [shared_ids(piece) for piece in found]

    def shared(self, text: str, other: str) -> int:
        """The length of the beginning of ``text`` whose tokens ``other`` begins with too."""
        encoding, tokens = self._encoding(text), self.encode(other)
        differing = (at for at, token in enumerate(encoding.ids) if tokens[at : at + 1] != [token])
        first = next(differing, len(encoding.ids))
        return int(encoding.offsets[first][0]) if first < len(encoding.ids) else len(text)

    def _encoding(self, text: str) -> Encoding:
        """The token ids of a text, with the place of each in it."""
        if len(text) <= LONG_TEXT:
            return self._tokenizer.encode(text, add_special_tokens=False)
        [encoding] = self._tokenizer.encode_batch([text], add_special_tokens=False)
        return encoding

    def _encode_tail(self, text: str, start: int) -> list[int]:
        """Token ids of ``text[start:]`` within ``text``; encoded separately where a token straddles ``start``."""
        encoding = self._encoding(text)
        if any(first < start < last for first, last in encoding.offsets):
            return self.encode(text[start:])
        tail = [token for token, (first, _) in zip(encoding.ids, encoding.offsets, strict=True) if first >= start]
        return shared_ids(tail)

    def _turn_end(self) -> list[int]:
        text = self.render(
            [{"role": "user", "content": "?"}, {"role": "assistant", "content": _SENTINEL}], add_generation_prompt=False
        )
        tail = self.encode(text.rpartition(_SENTINEL)[2])[:1]
        return [token for token in tail if token in self._added and self._added[token].special]


def check_letters(
    chat: Chat, source: Sequence[Message] | str | Sequence[int], tools: Sequence[Mapping[str, Any]] = ()
) -> int:
    """The letters of a prompt: a conversation with ``tools``, a text, or token ids, which have none. Raises
    :class:`PromptTooLong` for a text that is far too long, before it is tokenized."""
    texts: list[object] = [source]
    if not isinstance(source, str):
        texts = [text for message in source if isinstance(message, Mapping) for text in message.values()]
    letters, most = sum(map(len, _texts([*texts, *tools]))), chat.context * CHARACTERS_PER_TOKEN
    if letters > most:
        raise PromptTooLong(
            f"this model's maximum context length is {count_of(chat.context, 'token')}; the prompt has"
            f" {count_of(letters, 'character')}, the model's context holds at most {most}: shorten it"
        )
    return letters


async def tokenized(
    threads: Callable[..., Awaitable[Any]],
    chat: Chat,
    messages: Sequence[Message],
    work: Callable[..., T],
    *arguments: Any,
) -> T:
    """``work(*arguments)``, which makes the tokens of a prompt of these ``messages``: where they are long in one of the
    ``threads``, in the tenant's turn. Raises :class:`PromptTooLong` as :func:`check_letters` does."""
    long = check_letters(chat, messages) > LONG_TEXT
    return cast(T, await threads(work, *arguments)) if long else work(*arguments)


async def read_tokens(
    threads: Callable[..., Awaitable[Any]], work: Callable[[Sequence[int]], T], tokens: Sequence[int]
) -> T:
    """``work(tokens)``: where they are many in one of the ``threads``, in the tenant's turn."""
    return cast(T, await threads(work, tokens)) if len(tokens) > LONG_REPLY else work(tokens)


def _texts(value: object) -> Iterator[str]:
    """The texts in JSON-like data."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping | list):
        for part in [*value.keys(), *value.values()] if isinstance(value, Mapping) else value:
            yield from _texts(part)


class _GenerationTag(jinja2.ext.Extension):
    """``{% generation %} … {% endgeneration %}`` marks the assistant's text in some templates; it renders its
    content."""

    tags = {"generation"}  # noqa: RUF012 (jinja2 declares it so)

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment(now: Callable[[], datetime]) -> BoundedEnvironment:
    """The jinja2 environment that chat templates expect, as transformers documents it."""

    def raise_exception(message: str) -> NoReturn:
        raise jinja2.TemplateError(message)

    def tojson(
        value: Any,
        ensure_ascii: bool = False,
        indent: int | None = None,
        separators: tuple[str, str] | None = None,
        sort_keys: bool = False,
    ) -> str:
        # jinja2's own filter escapes HTML, which would change the model's input
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    environment = BoundedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda layout: now().strftime(layout)
    return environment


def _read_values(environment: jinja2.Environment, template: str) -> set[str]:
    """Names whose values a template takes from outside: those that it reads and does not set, and of those that it sets
    the ones for which it first tests whether they are defined."""
    parsed = environment.parse(template)
    read = jinja2.meta.find_undeclared_variables(parsed)
    made = {name.name for name in parsed.find_all(jinja2.nodes.Name) if name.ctx != "load"}
    tests = (test for test in parsed.find_all(jinja2.nodes.Test) if test.name in ("defined", "undefined"))
    tested = {test.node.name for test in tests if isinstance(test.node, jinja2.nodes.Name)}
    return read - (made - tested)


def _templates_of(folder: Path, settings: Mapping[str, Any]) -> tuple[str, str]:
    """The template of conversations, and that of those with tools; empty where it is the same."""
    files = {"default": folder / "chat_template.jinja", "tool_use": folder / TOOL_TEMPLATE}
    found: Any = {name: file.read_text(encoding="utf-8") for name, file in files.items() if file.is_file()}
    if not found:
        found = settings.get("chat_template")
        if isinstance(found, list):
            found = {entry["name"]: entry["template"] for entry in found}
        elif not isinstance(found, dict):
            found = {"default": found}
    template, tool_template = found.get("default"), found.get("tool_use") or ""
    if not isinstance(template, str):
        raise UserError(f"{folder} has no chat template (chat_template.jinja); give an instruction-tuned model")
    return template, tool_template


def _named_tokens(settings: Mapping[str, Any]) -> dict[str, str]:
    """Tokens such as ``bos_token``; each is a string or an object with ``content``."""
    named = {}
    for key, value in settings.items():
        if key.endswith("_token"):
            text = value.get("content") if isinstance(value, dict) else value
            if isinstance(text, str):
                named[key] = text
    return named


def _ids(value: Any) -> list[int]:
    return [value] if isinstance(value, int) else [item for item in value or [] if isinstance(item, int)]


def _object(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(f"{path} is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise UserError(f"{path} is not a JSON object")
    return value


def _one_line(error: BaseException) -> str:
    return " ".join(str(error)[:LONGEST_REFUSAL].split()) or type(error).__name__
