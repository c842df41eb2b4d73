"""Checks of the JSON schemas that chats bring, in a confined process.

A few hundred bytes of schema can take minutes and gigabytes to compile. They are compiled in a child process with a
limit of processor time and of memory first, and go to a worker only where that succeeds. Tenants take turns, one check
at a time each. :mod:`rookery.server.schema_process` is the child.
"""

from __future__ import annotations

import hashlib
import json
import signal
import threading
from collections.abc import Callable, Mapping

from cachetools import LRUCache

from rookery.environments.verifiers.pool import VerifierError, VerifierPool, VerifierTimeout
from rookery.errors import Unavailable
from rookery.server.openai import UnsupportedField
from rookery.turns import TenantThreads

SCHEMA_SECONDS, SCHEMA_BYTES = 1.0, 128 << 20
"""Processor time and memory for all schemas of a request: those that people write compile in milliseconds, and one of
1500 optional properties in 0.2 s. The worker compiles the one that the replies follow again, once for all of them, in
a separate thread."""

SCHEMA_THREADS = 4
"""Tenants whose schemas are checked at the same time, less one."""

RESULTS = 4096
"""Requests' schemas whose result is kept: agents send the same tools with every turn."""

OUT_OF_MEMORY = ("MemoryError", *(str(signal.strsignal(number)) for number in (signal.SIGABRT, signal.SIGSEGV)))
"""How the reports of a check begin that had too little memory, for its data or for its stack."""


class SchemaChecks:
    """The checks of schemas for one event loop, which they do not block."""

    def __init__(self) -> None:
        self._pool = VerifierPool("schema", limit=SCHEMA_SECONDS, module="rookery.server.schema_process")
        self._threads = TenantThreads(SCHEMA_THREADS, "schema")
        self._lock = threading.Lock()
        self._known: LRUCache[str, tuple[str, str]] = LRUCache(RESULTS)
        """By the hash of the question: why it was refused, and the name of what; empty for a right one."""

    @property
    def spent(self) -> Callable[[str, float], None]:
        """Called with a tenant and the processor time of a check."""
        return self._threads.spent

    @spent.setter
    def spent(self, spent: Callable[[str, float], None]) -> None:
        self._threads.spent = spent

    async def check(self, offered: Mapping[str, str], followed: Mapping[str, str]) -> None:
        """Checks schemas, each by the name of what gave it: ``offered`` ones are only shown to the model, ``followed``
        ones make a grammar. Raises :class:`UnsupportedField` for the first that is no JSON schema, cannot be followed
        or takes too much work; :class:`Unavailable` where the check itself failed."""
        if offered or followed:
            await self._threads(self._check, {"offered": dict(offered), "followed": dict(followed)})

    def close(self) -> None:
        """End the children; a check that runs fails."""
        self._pool.close()
        self._threads.close()

    def _check(self, question: dict[str, dict[str, str]]) -> None:
        digest = hashlib.sha256(json.dumps(question).encode()).hexdigest()
        with self._lock:
            found = self._known.get(digest)
        if found is None:
            found = self._ask(question)
            with self._lock:
                self._known[digest] = found
        reason, param = found
        if reason:
            raise UnsupportedField(reason, param)

    def _ask(self, question: dict[str, dict[str, str]]) -> tuple[str, str]:
        param = next(iter(question["followed"]), "tools")
        try:
            refused, found = self._pool.score(question, memory=SCHEMA_BYTES)
            return refused, found or param
        except VerifierTimeout:
            reason = f"takes more than {SCHEMA_SECONDS:g} s of processor time"
        except VerifierError as error:  # the library ends its process where it gets no memory, or panics
            ended = str(error).startswith(OUT_OF_MEMORY)
            reason = f"takes more than {SCHEMA_BYTES >> 20} MB of memory" if ended else f"fails: {error}"
        except RuntimeError as error:
            raise Unavailable(f"the schema could not be checked: {error}") from None
        return f"compiling the schemas of {param} {reason}; make their patterns simpler, or the schemas smaller", param
