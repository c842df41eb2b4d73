"""The grammars that a worker's replies follow: compiled once, in a separate thread.

Promises:

* All replies to a tenant's schema share one compiled grammar, as long as it is kept: the one used longest ago is
  deleted first. A grammar whose lexer has failed is compiled again.
* Neither the compute thread nor the I/O thread compiles, or reads the beginning of a reply that another worker wrote.
* Tenants take turns, one grammar at a time.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence

from rookery.children import lower_thread_priority
from rookery.tokenization.grammar import Grammar, GrammarTokenizer, ReplyGrammar
from rookery.turns import TenantThreads, work_of
from rookery.worker.memory import MemoryUse

KEPT_BYTES = 64 << 20
"""Of compiled grammars that are kept, by estimate; part of a worker's undivided memory. The last one is kept in any
case."""

LOW_PRIORITY = 5
"""Niceness of the thread: it uses a core that computes."""


class Grammars:
    """The grammars of the replies in one event loop."""

    def __init__(self, tokens: Callable[[], GrammarTokenizer]) -> None:
        """``tokens()`` returns the model's tokens; the first call may take a second."""
        self._tokens = tokens
        self._threads = TenantThreads(1, "grammar")
        self._lowered = False
        self._lock = threading.Lock()
        self._kept: OrderedDict[tuple[str, str, str], Grammar] = OrderedDict()
        """By tenant, schema and the text that frees of it, the one used longest ago first."""
        self.prepared = 0
        """By the thread, since the start."""

    async def reply(self, tenant: str, schema: str, tokens: Sequence[int], unless: str = "") -> ReplyGrammar:
        """The state of a reply to a tenant's schema, or one that begins with ``unless``, after its first ``tokens``.
        Raises :class:`~rookery.errors.UserError` as :class:`Grammar`."""
        kept = self._find((tenant, schema, unless))
        if kept is not None and not tokens:
            return ReplyGrammar(kept)
        with work_of(tenant):
            return await self._threads(self._prepare, (tenant, schema, unless), tokens)

    def memory(self) -> MemoryUse:
        """The memory of the grammars that are kept, by estimate."""
        with self._lock:
            return MemoryUse(sum(grammar.bytes for grammar in self._kept.values()), KEPT_BYTES)

    def _find(self, key: tuple[str, str, str]) -> Grammar | None:
        with self._lock:
            grammar = self._kept.get(key)
            if grammar is None or grammar.failed_by is not None:
                return None
            self._kept.move_to_end(key)
            return grammar

    def _prepare(self, key: tuple[str, str, str], tokens: Sequence[int]) -> ReplyGrammar:
        """Prepare the grammar of ``key``, in the thread."""
        if not self._lowered:
            lower_thread_priority(LOW_PRIORITY)
            self._lowered = True
        grammar = self._find(key)
        if grammar is None:
            grammar = Grammar(self._tokens(), *key[1:])
            self._keep(key, grammar)
        reply = ReplyGrammar(grammar, tokens)
        self.prepared += 1
        return reply

    def _keep(self, key: tuple[str, str, str], grammar: Grammar) -> None:
        with self._lock:
            self._kept[key] = grammar
            self._kept.move_to_end(key)
            used = sum(kept.bytes for kept in self._kept.values())
            while used > KEPT_BYTES and len(self._kept) > 1:
                used -= self._kept.popitem(last=False)[1].bytes
