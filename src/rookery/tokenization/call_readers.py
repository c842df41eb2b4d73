"""Readers of tool calls in replies: one for each format in which chat templates write them.

Promises:

* Text that does not parse stays text. Text is released as soon as it cannot be part of a call; the pieces of a stream,
  joined, are those of the whole reply.
* The text that ends a call may stand in its arguments: it counts outside of their quotes only (:class:`Quotes`).
* A name or a parameter that stands twice in an object makes it no call.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from rookery.tokenization.call_values import (
    DECODER,
    DSML,
    FUNCTIONS,
    FUNCTIONS_ON_LINES,
    INVOCATIONS,
    ToolCall,
    XmlForm,
    call_of,
    gemma_calls,
    glm_calls,
    json_calls,
    made_call,
    python_calls,
    xml_calls,
)

Piece = str | ToolCall

LONGEST_MARK = 200
"""Characters of a text that opens or ends a quoted part."""


@dataclass(frozen=True)
class Quotes:
    """The parts of a call in which the text that ends a call is content."""

    opening: str
    """A regular expression."""
    closing: str = ""
    """Empty: the text that opened the part."""
    unquoted: str = ""
    """A regular expression of text that no quoted part has: the call is malformed."""
    escapes: bool = False
    """A backslash quotes the next character."""


@cache
def _marks(quotes: Quotes, ends: tuple[str, ...]) -> re.Pattern[str]:
    """All that matters in a call that one of ``ends`` may end."""
    parts = [
        r"\\." if quotes.escapes else "", rf"(?P<open>{quotes.opening})", re.escape(quotes.closing), quotes.unquoted,
        *map(re.escape, ends),
    ]  # fmt: skip
    return re.compile("|".join(filter(None, parts)), re.DOTALL)


IN_JSON = Quotes('"', unquoted=r"[\x00-\x1f]", escapes=True)
IN_PYTHON = Quotes("[\"']", escapes=True)
IN_PARAMETER = Quotes(rf"<parameter[= ][^<>]{{1,{LONGEST_MARK - 20}}}>", "</parameter>")
IN_DSML = Quotes(
    rf'<｜DSML｜parameter name="[^<>"]{{1,{LONGEST_MARK - 60}}}" string="(?:true|false)">', "</｜DSML｜parameter>"
)
IN_GLM = Quotes("<arg_value>", "</arg_value>")


class CallReader:
    """Reads one reply. White space around calls belongs to neither text nor call."""

    opening = ""
    """Text from which on a call may follow."""
    closing: tuple[str, ...] = ()
    """Texts that end the calls; without one they end with the reply."""
    quotes: Quotes | None = None
    """Where such a text is content."""

    def __init__(self, names: Sequence[str], parameters: Mapping[str, Mapping[str, Any]] | None = None) -> None:
        """``names`` are the tools', ``parameters`` the JSON schemas of their arguments by name."""
        self.names = frozenset(names)
        self.calls = 0
        self.parameters = parameters or {}
        self._held = ""
        self._inside = False
        self._searched = 0
        self._malformed = False
        """No quotes fit the block: the first text that may end it does."""
        self._quoted = ""
        """The text that ends the quoted part which the search is in."""
        self._unclosed: set[str] = set()
        """Texts that end quoted parts, and that the rest of the reply does not have."""
        self._space = ""

    def feed(self, text: str, *, last: bool) -> list[Piece]:
        """The further pieces; ``last``: no text follows."""
        self._held += text
        pieces: list[Piece] = []
        while self._held:
            if not self._inside:
                at = self._held.find(self.opening)
                if at < 0:
                    kept = 0 if last else overlap(self._held, self.opening)
                    pieces += self._text(self._held[: len(self._held) - kept])
                    self._held = self._held[len(self._held) - kept :]
                    break
                pieces += self._text(self._held[:at])
                self._held, self._inside, self._searched = self._held[at:], True, len(self.opening)
                self._quoted, self._malformed = "", False
            end = self._end(last)
            if end < 0 and not last:
                break
            block, self._held = (self._held, "") if end < 0 else (self._held[:end], self._held[end:])
            self._inside = False
            calls = list(self.parse(block))
            self.calls += len(calls)
            self._space = "" if calls else self._space
            pieces += calls or self._text(block)
        if last and not self.calls and self._space:
            pieces.append(self._space)
        return pieces

    def parse(self, block: str) -> Iterator[ToolCall]:
        """The calls of a block from ``opening`` to ``closing``; none if it does not parse."""
        raise NotImplementedError

    def quotes_of(self, inner: str) -> Quotes | None:
        """The quotes of a block by the text after its opening, which may have just begun."""
        return self.quotes

    def inner(self, block: str) -> str:
        """A block without its marks."""
        text = block.removeprefix(self.opening)
        for closing in self.closing:
            text = text.removesuffix(closing)
        return text.strip()

    def _end(self, last: bool) -> int:
        """The place after the block in the held text; -1 where no text ends it yet."""
        begun = self._held[len(self.opening) : len(self.opening) + LONGEST_MARK].lstrip()
        quotes = None if self._malformed else self.quotes_of(begun)
        if quotes is not None and self.closing:
            end = self._outside(quotes, last)
            if end >= 0 or not (self._malformed or (last and self._quoted)):
                return end
            self._malformed, self._searched = True, len(self.opening)
        found = [at + len(text) for text in self.closing if (at := self._held.find(text, self._searched)) >= 0]
        self._searched = max(self._searched, len(self._held) - max(map(len, self.closing), default=0))
        return min(found, default=-1)

    def _outside(self, quotes: Quotes, last: bool) -> int:
        """As :meth:`_end`, of texts outside of quotes; notes a block that no quotes fit."""
        for mark in _marks(quotes, self.closing).finditer(self._held, self._searched):
            self._searched, text = mark.end(), mark[0]
            if self._quoted:
                if text == self._quoted:
                    self._quoted = ""
                elif quotes.unquoted and re.fullmatch(quotes.unquoted, text):
                    self._malformed = True
                    return -1
            elif text in self.closing:
                return self._searched
            elif mark["open"]:
                self._quoted = quotes.closing or text
                if self._quoted in self._unclosed:
                    self._malformed = True
                    return -1
        if last and self._quoted:
            self._unclosed.add(self._quoted)
        partial = max(self._held.rfind(sign, self._searched) for sign in ("<\\" if quotes.escapes else "<"))
        self._searched = partial if partial >= max(0, len(self._held) - LONGEST_MARK) else len(self._held)
        return -1

    def _text(self, text: str) -> list[Piece]:
        """Trailing white space is held until text follows it."""
        whole = self._space + text
        shown = whole.rstrip()
        self._space = whole[len(shown) :]
        if self.calls:
            shown = shown.lstrip() if not text.strip() else shown
        return [shown] if shown else []


class HermesReader(CallReader):
    """``<tool_call>{"name": …, "arguments": {…}}</tool_call>``; in the same brackets Qwen3-Coder's
    ``<function=NAME><parameter=KEY>VALUE</parameter></function>`` and GLM's
    ``NAME<arg_key>KEY</arg_key><arg_value>VALUE</arg_value>``."""

    opening = "<tool_call>"
    closing = ("</tool_call>",)

    def quotes_of(self, inner: str) -> Quotes | None:
        if inner.startswith(("{", "[")):
            return IN_JSON
        return IN_PARAMETER if inner.startswith("<") else IN_GLM

    def parse(self, block: str) -> Iterator[ToolCall]:
        inner = self.inner(block)
        if inner.startswith("<"):
            yield from xml_calls(inner, FUNCTIONS_ON_LINES, self.parameters)
        elif inner.startswith(("{", "[")):
            yield from json_calls(inner)
        else:
            yield from glm_calls(inner, self.names, self.parameters)


class LlamaReader(CallReader):
    """A reply that is ``{"name": …, "parameters": {…}}``, after ``<|python_tag|>`` or not, or several with ``;``. Since
    any JSON may be a reply, all names must be tools'."""

    tag = "<|python_tag|>"
    begins: tuple[str, ...] = ("{", "[")
    """A reply that is a call begins with the tag, or with one of these."""

    def __init__(self, names: Sequence[str], parameters: Mapping[str, Mapping[str, Any]] | None = None) -> None:
        super().__init__(names, parameters)
        self._plain = False

    def feed(self, text: str, *, last: bool) -> list[Piece]:
        if self._plain:
            return self._text(text) + ([self._space] if last and self._space else [])
        self._held += text
        begun = self._held.lstrip()
        may_call = begun.startswith((*self.begins, self.tag))
        if not last and (may_call or self.tag.startswith(begun)):
            return []
        calls = list(self.parse(begun.removeprefix(self.tag))) if may_call else []
        calls = calls if all(call.name in self.names for call in calls) else []
        self.calls, held, self._held = len(calls), self._held, ""
        if calls:
            return list(calls)
        self._plain = True
        return self.feed(held, last=last)

    def parse(self, block: str) -> Iterator[ToolCall]:
        yield from json_calls(block, ";")


class MistralReader(CallReader):
    """``[TOOL_CALLS][{"name": …, "arguments": {…}}, …]``, or ``[TOOL_CALLS]NAME[ARGS]{…}`` for each call."""

    opening = "[TOOL_CALLS]"

    def parse(self, block: str) -> Iterator[ToolCall]:
        calls: list[ToolCall | None] = []
        while block:
            begun = _MISTRAL.match(block)
            assert begun is not None  # it begins with ``opening``
            try:
                value, end = DECODER.raw_decode(block, begun.end())
            except (ValueError, RecursionError):
                return
            if begun["name"]:
                calls.append(made_call(begun["name"], value))
            else:
                calls += [call_of(one) for one in (value if isinstance(value, list) else [value])]
            block = block[end:].lstrip()
            if block and not block.startswith(self.opening):
                return
        if None not in calls:
            yield from (call for call in calls if call)


_MISTRAL = re.compile(r"\[TOOL_CALLS\]\s*(?:(?P<name>[\w.-]+)(?:\[CALL_ID\]\w+)?(?:\[ARGS\])?\s*(?=\{))?")


class HarmonyReader(CallReader):
    """Channels of gpt-oss: ``final`` is the text, ``commentary to=functions.NAME`` a call, also without ``functions.``
    before the name of a tool, and text for another recipient or without one; ``analysis`` is neither."""

    closing = ("<|end|>", "<|call|>", "<|return|>", "<|start|>")

    def __init__(self, names: Sequence[str], parameters: Mapping[str, Mapping[str, Any]] | None = None) -> None:
        super().__init__(names, parameters)
        self._header: str | None = None
        self._called = ""
        """The name of the tool that the present part calls."""

    def quotes_of(self, inner: str) -> Quotes | None:
        return IN_JSON if self._called and inner.startswith("{") else None

    def feed(self, text: str, *, last: bool) -> list[Piece]:
        self._held += text
        pieces: list[Piece] = []
        while self._held:
            if self._header is None:
                header, found, rest = self._held.partition("<|message|>")
                if not found:
                    if last and "<|channel|>" not in header:  # a model that was not asked for channels
                        pieces += self._text(header)
                    break
                self._header, self._held = header, rest
                self._searched, self._quoted, self._malformed = 0, "", False
                recipient = _RECIPIENT.search(header)
                known = recipient is not None and (recipient[1] or recipient[2] in self.names)
                self._called = recipient[2] if recipient is not None and known else ""
            end = self._end(last)
            if end < 0 and not last and self._called:
                break
            kept = max(overlap(self._held, mark) for mark in self.closing) if end < 0 and not last else 0
            body = self._held[: end if end >= 0 else len(self._held) - kept]
            self._held, self._searched = self._held[len(body) :], 0
            if end >= 0:
                body = next(body.removesuffix(mark) for mark in self.closing if body.endswith(mark))
            call = call_of({"name": self._called, "arguments": body}) if self._called else None
            if call is not None:
                self.calls += 1
                pieces.append(call)
            elif self._called or "analysis" not in self._header:
                pieces += self._text(body)
            if end < 0:
                break
            self._header = None
        if last and not self.calls and self._space:
            pieces.append(self._space)
        return pieces


_RECIPIENT = re.compile(r"to=(functions\.)?([\w.-]+)")


class ForcedReader(CallReader):
    """A reply that is one call as JSON, because a grammar made it so."""

    def feed(self, text: str, *, last: bool) -> list[Piece]:
        self._held += text
        if not last:
            return []
        calls = list(json_calls(self._held))
        self.calls = len(calls)
        return list(calls) if calls else [self._held] if self._held else []


class JsonReader(CallReader):
    """JSON objects one after the other, or a list of them, between two marks."""

    quotes = IN_JSON

    def parse(self, block: str) -> Iterator[ToolCall]:
        yield from json_calls(self.inner(block), "", self.usual)

    def usual(self, value: Any) -> Any:
        """An object of the format with the usual fields."""
        return value


class JambaReader(JsonReader):
    """``<tool_calls>[{"name": …, "arguments": {…}}, …]</tool_calls>``, as Hunyuan and Apriel write it too; MiniMax-M1
    writes an object a line there."""

    opening, closing = "<tool_calls>", ("</tool_calls>",)


class GraniteReader(JsonReader):
    """``<|tool_call|>[{"name": …, "arguments": {…}}, …]``, by Phi-4-mini up to ``<|/tool_call|>``."""

    opening, closing = "<|tool_call|>", ("<|/tool_call|>",)


class NemotronReader(JsonReader):
    """``<TOOLCALL>[{"name": …, "arguments": {…}}, …]</TOOLCALL>``."""

    opening, closing = "<TOOLCALL>", ("</TOOLCALL>",)


class InternReader(JsonReader):
    """``<|action_start|><|plugin|>{"name": …, "parameters": {…}}<|action_end|>``."""

    opening, closing = "<|action_start|><|plugin|>", ("<|action_end|>",)


class CommandReader(JsonReader):
    """``<|START_ACTION|>[{"tool_call_id": …, "tool_name": …, "parameters": {…}}, …]<|END_ACTION|>``."""

    opening, closing = "<|START_ACTION|>", ("<|END_ACTION|>",)

    def usual(self, value: Any) -> Any:
        if not isinstance(value, dict) or "tool_name" not in value:
            return None
        return {"name": value["tool_name"], "arguments": value.get("parameters", {})}


class ApertusReader(JsonReader):
    """``<|tools_prefix|>[{NAME: {…}}, …]<|tools_suffix|>``."""

    opening, closing = "<|tools_prefix|>", ("<|tools_suffix|>",)

    def usual(self, value: Any) -> Any:
        if not isinstance(value, dict) or len(value) != 1:
            return None
        [(name, arguments)] = value.items()
        return {"name": name, "arguments": arguments}


class NamedReader(CallReader):
    """Calls between two marks, each a name before its arguments in JSON."""

    quotes = IN_JSON
    named = re.compile("")
    """The text before the arguments, with the group ``name``."""
    ended = re.compile("")
    """The text after them."""

    def parse(self, block: str) -> Iterator[ToolCall]:
        text, at, calls = self.inner(block), 0, list[ToolCall]()
        while at < len(text):
            if (named := self.named.match(text, at)) is None:
                return
            try:
                value, at = DECODER.raw_decode(text, named.end())
            except (ValueError, RecursionError):
                return
            ended, call = self.ended.match(text, at), made_call(named["name"], value)
            if ended is None or call is None:
                return
            calls.append(call)
            at = ended.end()
        yield from calls


class DeepSeekReader(NamedReader):
    """``<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>NAME<｜tool▁sep｜>{…}<｜tool▁call▁end｜>…<｜tool▁calls▁end｜>``; by
    V3 and R1 with ``function`` as the name, and NAME before the arguments in a block of Markdown."""

    opening, closing = "<｜tool▁calls▁begin｜>", ("<｜tool▁calls▁end｜>",)
    named = re.compile(
        r"\s*<｜tool▁call▁begin｜>(?:function<｜tool▁sep｜>(?=[^<{]*```))?(?P<name>[^\s<]+)\s*(?:<｜tool▁sep｜>|```json)\s*"
    )
    ended = re.compile(r"\s*(?:```)?\s*(?:<｜tool▁call▁end｜>|\Z)\s*")


class KimiReader(NamedReader):
    """``<|tool_calls_section_begin|><|tool_call_begin|>functions.NAME:0<|tool_call_argument_begin|>{…}
    <|tool_call_end|>…<|tool_calls_section_end|>``."""

    opening, closing = "<|tool_calls_section_begin|>", ("<|tool_calls_section_end|>",)
    named = re.compile(
        r"\s*<\|tool_call_begin\|>\s*(?:functions\.)?(?P<name>[^\s<]+):\d+\s*<\|tool_call_argument_begin\|>\s*"
    )
    ended = re.compile(r"\s*(?:<\|tool_call_end\|>|\Z)\s*")


class XmlReader(CallReader):
    """Calls in tags, as :class:`HermesReader` reads Qwen3-Coder's, between two other marks."""

    quotes = IN_PARAMETER
    form: XmlForm = FUNCTIONS

    def parse(self, block: str) -> Iterator[ToolCall]:
        yield from xml_calls(self.inner(block), self.form, self.parameters)


class SeedReader(XmlReader):
    """``<seed:tool_call><function=NAME><parameter=KEY>VALUE</parameter></function></seed:tool_call>``."""

    opening, closing = "<seed:tool_call>", ("</seed:tool_call>",)


class MinimaxReader(XmlReader):
    """``<minimax:tool_call><invoke name="NAME"><parameter name="KEY">VALUE</parameter></invoke>…``."""

    opening, closing, form = "<minimax:tool_call>", ("</minimax:tool_call>",), INVOCATIONS


class DeepSeekTagsReader(XmlReader):
    """``<｜DSML｜function_calls><｜DSML｜invoke name="NAME"><｜DSML｜parameter name="KEY" string="true">VALUE
    </｜DSML｜parameter></｜DSML｜invoke>…</｜DSML｜function_calls>``, of V3.2; ``string`` is ``false`` for JSON."""

    opening, closing, form = "<｜DSML｜function_calls>", ("</｜DSML｜function_calls>",), DSML
    quotes = IN_DSML


class DeepSeekToolsReader(DeepSeekTagsReader):
    """The elements of :class:`DeepSeekTagsReader` in ``<｜DSML｜tool_calls>…</｜DSML｜tool_calls>``, of V4."""

    opening, closing = "<｜DSML｜tool_calls>", ("</｜DSML｜tool_calls>",)


class GemmaReader(CallReader):
    """``<|tool_call>call:NAME{KEY:VALUE,…}<tool_call|>``, of Gemma 4; texts stand in its special quotes."""

    opening, closing = "<|tool_call>", ("<tool_call|>",)
    quote = '<|"|>'
    quotes = Quotes(re.escape('<|"|>'))

    def parse(self, block: str) -> Iterator[ToolCall]:
        yield from gemma_calls(self.inner(block), self.quote)


class FunctionGemmaReader(GemmaReader):
    """``<start_function_call>call:NAME{KEY:VALUE,…}<end_function_call>``."""

    opening, closing = "<start_function_call>", ("<end_function_call>",)
    quote = "<escape>"
    quotes = Quotes("<escape>")


class PythonReader(CallReader):
    """Calls in Python's syntax between two marks."""

    quotes = IN_PYTHON

    def parse(self, block: str) -> Iterator[ToolCall]:
        yield from python_calls(self.inner(block))


class LfmReader(PythonReader):
    """``<|tool_call_start|>[NAME(KEY=VALUE, …), …]<|tool_call_end|>``."""

    opening, closing = "<|tool_call_start|>", ("<|tool_call_end|>",)


class OlmoReader(PythonReader):
    """``<function_calls>NAME(KEY=VALUE, …)</function_calls>``, a call a line."""

    opening, closing = "<function_calls>", ("</function_calls>",)


class PythonicReader(LlamaReader):
    """A reply that is ``[NAME(KEY=VALUE, …), …]``, as Llama 4 and some templates of Llama 3.2 have it."""

    tag, begins = "<|python_start|>", ("[",)

    def parse(self, block: str) -> Iterator[ToolCall]:
        yield from python_calls(block.strip().removesuffix("<|python_end|>"))


READERS: dict[str, type[CallReader]] = {
    "hermes": HermesReader,
    "llama3": LlamaReader,
    "mistral": MistralReader,
    "harmony": HarmonyReader,
    "jamba": JambaReader,
    "granite": GraniteReader,
    "nemotron": NemotronReader,
    "intern": InternReader,
    "command": CommandReader,
    "apertus": ApertusReader,
    "deepseek": DeepSeekReader,
    "deepseek_v32": DeepSeekTagsReader,
    "deepseek_v4": DeepSeekToolsReader,
    "kimi": KimiReader,
    "seed": SeedReader,
    "minimax": MinimaxReader,
    "gemma": GemmaReader,
    "function_gemma": FunctionGemmaReader,
    "lfm": LfmReader,
    "olmo": OlmoReader,
    "pythonic": PythonicReader,
}
"""Readers by the name of their format."""


def overlap(text: str, mark: str) -> int:
    """Length of the text's end that may be the beginning of ``mark``."""
    return next((n for n in range(min(len(mark) - 1, len(text)), 0, -1) if text.endswith(mark[:n])), 0)


def read_whole(reader: CallReader, text: str) -> tuple[str, list[tuple[str, str]]]:
    """The text of a whole reply without its calls, and these: name and arguments."""
    pieces = reader.feed(text, last=True)
    calls = [(piece.name, piece.arguments) for piece in pieces if isinstance(piece, ToolCall)]
    return "".join(piece for piece in pieces if isinstance(piece, str)), calls
