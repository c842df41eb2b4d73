"""The jinja2 environment in which chat templates run: sandboxed, and with a bound on the work of one rendering.

A template comes with a model, which a stranger may have published. Short conversations are rendered on the event loop
of the service: a template that never ends would end the service, and again after each start.

* Each pass through a loop and each call of a macro is a step. A rendering has as many steps as the length of its
  conversation justifies, and a limit of processor time.
* No product, power or argument of a method makes a text, a list or a number far larger than any conversation.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import jinja2.nodes
from jinja2 import TemplateError
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

from rookery.bounds import LONGEST_TEXT

STEPS, STEPS_OF_EACH = 100_000, 2_000
"""Steps of a rendering, and further ones for each message and tool: templates take some tens, or as many as there are
messages. A step takes less than a microsecond."""

SECONDS = 5.0
"""Processor time of a rendering: that of steps which take longer."""

STEPS_OF_LOOK = 16
"""Between two looks at the processor time."""

SIZED = frozenset(("center", "expandtabs", "generate_lorem_ipsum", "ljust", "rjust", "to_bytes", "zfill"))
"""Names of functions whose result is as long as an argument says."""

LONGEST_NUMBER = 4096
"""Bits of a product or a power."""


class _Work(threading.local):
    """The rest of the bounds of the rendering in this thread."""

    steps = 0
    until = 0.0


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    """Its templates are rendered within :meth:`bounded`."""

    intercepted_binops = frozenset(("*", "**"))

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._work = _Work()

    @contextmanager
    def bounded(self, parts: int) -> Iterator[None]:
        """A conversation of so many messages and tools is rendered within, by this thread."""
        self._work.steps = STEPS + STEPS_OF_EACH * parts
        self._work.until = time.thread_time() + SECONDS
        yield

    @property
    def step(self) -> None:
        """Read by templates: a call would go through the sandbox. Raises ``TemplateError``."""
        work = self._work
        work.steps -= 1
        if work.steps < 0 or (work.steps % STEPS_OF_LOOK == 0 and time.thread_time() > work.until):
            raise TemplateError("it takes too much work, as one that never ends")

    def _parse(self, source: str, name: str | None, filename: str | None) -> jinja2.nodes.Template:
        parsed = super()._parse(source, name, filename)
        for node in [*parsed.find_all((jinja2.nodes.For, jinja2.nodes.Macro, jinja2.nodes.CallBlock))]:
            assert isinstance(node, jinja2.nodes.For | jinja2.nodes.Macro | jinja2.nodes.CallBlock)
            step = jinja2.nodes.ExprStmt(jinja2.nodes.EnvironmentAttribute("step"), lineno=node.lineno)
            node.body.insert(0, step)
        return parsed

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        bits = [value.bit_length() for value in (left, right) if isinstance(value, int)]
        if operator == "**" and len(bits) == 2 and bits[0] * max(1, right) > LONGEST_NUMBER:
            raise TemplateError("a power is too large")
        if operator == "*" and len(bits) == 2 and sum(bits) > LONGEST_NUMBER:
            raise TemplateError("a product is too large")
        for value, times in ((left, right), (right, left)) if operator == "*" else ():
            if isinstance(value, str | list | tuple) and isinstance(times, int) and len(value) * times > LONGEST_TEXT:
                raise TemplateError("a repeated text or list is too long")
        return super().call_binop(context, operator, left, right)

    def call(self, context: Context, called: Any, /, *given: Any, **named: Any) -> Any:
        """A method such as ``ljust`` makes as much as its argument says. Macros and others take any number of a
        conversation, such as an argument of a tool."""
        sized = getattr(called, "__name__", "") in SIZED
        if sized and any(isinstance(value, int) and value > LONGEST_TEXT for value in (*given, *named.values())):
            raise TemplateError("the argument of a call is too large")
        return super().call(context, called, *given, **named)
