"""Tools that the policy uses in the turns of a ``jsonl`` episode, by a tag: ``<python>print(6 * 7)</python>``.

The result comes back as a message, ``<result>42</result>``, and the policy replies again. A call is the last tag of a
reply; its end may be missing where the reply ends, as it does with a stop text.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

from pydantic import ConfigDict, Discriminator, Field, PrivateAttr

from rookery.bounds import GivenModel, Line
from rookery.environments.sandbox.rows import code_of
from rookery.environments.sandbox.sandbox import Program, ProgramLimits, Sandbox
from rookery.environments.search import SearchIndex, require_search, texts_of

FEWEST = 10
"""Fewest characters of a text that a search found."""

LONGEST_RESULT = 100_000
"""Most characters of a result: it becomes part of the prompt."""


class PythonTool(GivenModel):
    """The tool `python`: runs the code in `<python>…</python>` in the [sandbox](environments.md#code), each call as a
    new program, and returns its output, or the last line of an error."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    tool: Literal["python"]
    """Which tool."""
    seconds: float = Field(2.0, gt=0, le=60)
    """Processor time of one call."""
    memory_mb: int = Field(256, ge=16, le=4096)
    """Memory of one call, in addition to an idle interpreter's."""
    result_chars: int = Field(2000, ge=10, le=LONGEST_RESULT)
    """Characters of a result; the rest is cut."""
    _sandbox: Sandbox = PrivateAttr(default_factory=Sandbox)

    def model_post_init(self, context: object) -> None:
        super().model_post_init(context)
        self._sandbox.require()

    @property
    def instruction(self) -> str:
        """How the policy calls it."""
        return (
            "You can run Python code: write it as <python>code</python> and end your reply there. What it prints comes"
            " back as <result>output</result>."
        )

    def check(self) -> None:
        """Nothing but its options can be wrong."""

    def call(self, text: str) -> str:
        """The result of a call. Raises :class:`~rookery.environments.sandbox.sandbox.SandboxError`."""
        limits = ProgramLimits(self.seconds, self.memory_mb << 20, 4 * self.result_chars)
        ran = self._sandbox.run(Program(code_of(text).strip("\n"), path="call.py"), limits)
        lines = [ran.stdout.rstrip()] if ran.stdout.strip() else []
        if ran.status != "ok":
            lines.append(ran.last_line)
        return cut("\n".join(lines) or "(no output)", self.result_chars)


class SearchTool(GivenModel):
    """The tool `search`: the texts of a corpus that fit the query in `<search>…</search>` best, by BM25."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    tool: Literal["search"]
    """Which tool."""
    index: Line
    """The corpus: a JSONL file on your machine, which the Python client and `rookery run` upload, or the hash of an
    uploaded one. A row has `text`, and a `title` where wanted."""
    results: int = Field(3, ge=1, le=20)
    """Most texts of one call."""
    result_chars: int = Field(2000, ge=10, le=LONGEST_RESULT)
    """Characters of a result; the rest is cut."""
    _index: SearchIndex = PrivateAttr()

    def model_post_init(self, context: object) -> None:
        super().model_post_init(context)
        require_search()
        self._index = SearchIndex(self.index)

    @property
    def instruction(self) -> str:
        """How the policy calls it."""
        return (
            "You can search: write <search>words</search> and end your reply there. The texts that fit best come back"
            " as <result>texts</result>."
        )

    def check(self) -> None:
        """Raises :class:`~rookery.errors.UserError` for a corpus that cannot be searched."""
        for _ in texts_of(Path(self.index)):
            pass

    def call(self, text: str) -> str:
        """The result of a call. Raises RuntimeError where the search failed."""
        each = max(FEWEST, self.result_chars // self.results)
        found = [cut(one, each) for one in self._index.find(text, self.results)]
        return cut("\n\n".join(found) or "(nothing found)", self.result_chars)


AnyTool = PythonTool | SearchTool
TOOLS = ("python", "search")
Tool = Annotated[AnyTool, Discriminator("tool")]


def called(tools: Sequence[AnyTool], text: str) -> tuple[AnyTool, str] | None:
    """The last call in a reply without its thinking: the tool and the text of the tag; None without one."""
    found: tuple[int, AnyTool, str] | None = None
    for tool in tools:
        start = text.rfind(f"<{tool.tool}>")
        if start >= 0 and (found is None or start > found[0]):
            begin = start + len(tool.tool) + 2
            end = text.find(f"</{tool.tool}>", begin)
            found = (start, tool, text[begin : end if end >= 0 else len(text)])
    return None if found is None else (found[1], found[2])


def as_message(result: str) -> str:
    """A result as the policy reads it; it cannot end its own tag."""
    return f"<result>\n{re.sub('</(?=result>)', '< /', result)}\n</result>"


def cut(text: str, most: int) -> str:
    """At most ``most`` characters of a text."""
    return text if len(text) <= most else text[: most - 1] + "…"
