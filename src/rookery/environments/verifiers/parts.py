"""The part of a reply that is judged: what follows a marker, what a tag encloses.

Markers may be special tokens of the model's tokenizer, as ``</think>`` is for some: the part is looked for in the text
with special tokens, and read without them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from pydantic import ConfigDict, Field

from rookery.bounds import TAG, GivenModel, Name
from rookery.tokenization.written import THOUGHT_BEGIN, THOUGHT_END


class ReplyPart(GivenModel):
    """Options that separate the answer from the rest of a reply, such as a model's thinking."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    skips_thinking: ClassVar[bool] = True
    """Whether thinking that a reply marks is left out."""

    after: Name | None = Field(None, min_length=1)
    """Only the text after the last place of this marker is judged, such as `</think>`; a reply without it is wrong.
    With or without it, thinking inside `<think>…</think>`, or between the marks of other models, is not judged, and a
    reply that does not end its `<think>` is wrong; only `regex` sees the whole reply."""
    tag: Name | None = Field(None, pattern=TAG)
    """Only the text inside the last `<tag>…</tag>` is judged; a reply without it is wrong. With `after`, the tag counts
    after the marker."""

    @property
    def selects(self) -> bool:
        """Whether a part is judged, not the whole reply."""
        return self.after is not None or self.tag is not None

    def part(self, text: str, raw: str = "", special: Sequence[str] = ()) -> str | None:
        """The part of a reply that is judged, None where the reply lacks it. A reply with special tokens has them in
        ``raw`` and ``special``, as :class:`~rookery.environments.base.Reply` does; they are left out of the part."""
        whole = raw if special else text
        part = _after_thinking(whole) if self.skips_thinking else whole
        if self.after is not None and part is not None:
            end = whole.rfind(self.after) + len(self.after)
            part = whole[end:] if self.after in whole and end >= len(whole) - len(part) else None
        if self.tag is not None and part is not None:
            part = last_tagged(part, self.tag)
        return text if part == whole else _without(special, part)

    def enclose(self, answer: str) -> str:
        """A reply whose judged part is ``answer``."""
        tagged = answer if self.tag is None else f"<{self.tag}>{answer}</{self.tag}>"
        return tagged if self.after is None else self.after + tagged


def spoken(text: str, raw: str = "", special: Sequence[str] = ()) -> str | None:
    """The text of a reply after its thinking, None where that has no end. A reply with special tokens has them in
    ``raw`` and ``special``, as :class:`~rookery.environments.base.Reply` does."""
    whole = raw if special else text
    part = _after_thinking(whole)
    return text if part == whole else _without(special, part)


def _after_thinking(whole: str) -> str | None:
    """None where the last thinking has no end, wherever it begins."""
    rest = after_thoughts(whole)
    return None if THOUGHT_BEGIN.search(rest) else rest


def after_thoughts(text: str) -> str:
    """The text after the last end of a thought; the whole text without one."""
    end = 0
    for found in THOUGHT_END.finditer(text):
        end = found.end()
    return text[end:]


def opened_thought(text: str) -> str:
    """The mark with which a text opens a thought that has no end; empty without one."""
    found = THOUGHT_BEGIN.search(after_thoughts(text))
    return "" if found is None else found[0]


def _without(special: Sequence[str], part: str | None) -> str | None:
    """A part of a reply without its special tokens."""
    for token in special:
        part = part and part.replace(token, "")
    return part


def last_tagged(text: str, tag: str) -> str | None:
    """The text inside the last complete ``<tag>…</tag>``, None without one."""
    opening, closing = f"<{tag}>", f"</{tag}>"
    end = text.rfind(closing)
    start = text.rfind(opening, 0, max(0, end))
    if start == -1:
        return None
    start += len(opening)
    return text[start : text.index(closing, start)]
