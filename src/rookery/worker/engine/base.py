"""The engine protocol: an engine generates tokens for requests with the adapters that are attached to it.

A worker's compute thread drives one engine and knows nothing else of it, so that engines of several kinds can serve
the same protocol messages. ``native``, ``hf`` and ``vllm`` in this folder implement it.

Promises that every engine keeps:

* Every sampled token comes with the version that sampled it and its log-probability under the distribution that it was
  sampled from.
* A request resumes from ``prefix_tokens``: none of them is generated again, and token i uses the noise of
  (``seed``, i), counted from the first of them.
* Full means wait: a request that fits the limits but not the present load is queued, never refused.
* A fault in one request ends that request with ``finish="error"`` and touches no other.
* ``submit``, ``abort``, ``switch_adapter``, ``add_adapter`` and ``evict_adapter`` return at once; time passes only in
  ``step``.

Engines are not thread-safe: the thread that calls ``step`` makes all other calls.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from rookery import protocol
from rookery.scheduling.worker_time import WorkerTime
from rookery.tokenization.grammar import ReplyGrammar
from rookery.worker.memory import MemoryUse


@dataclass(frozen=True)
class EngineLimits:
    """Limits of an engine. Requests and adapters beyond these are refused; load beyond them waits."""

    max_rows: int
    """Requests that compute at once."""
    max_context: int
    """Tokens of one sequence, prompt and answer together."""
    max_rank: int
    """Highest rank of an adapter."""


class Engine(Protocol):
    """One base model that serves requests. See the module for the promises."""

    @property
    def limits(self) -> EngineLimits: ...

    @property
    def longest_text(self) -> int:
        """Tokens of a text, its prompt included, that the engine holds whatever part of its prompt is shared."""
        ...

    @property
    def active(self) -> int:
        """Requests that compute."""
        ...

    @property
    def waiting(self) -> int:
        """Requests in the queue."""
        ...

    @property
    def generated(self) -> int:
        """Tokens sampled since the start."""
        ...

    def tenants(self) -> dict[str, int]:
        """The rows that rollouts of each tenant have, 0 if all of its rollouts wait. Empty while requests of clients
        are there."""
        ...

    def sharing(self) -> Collection[str]:
        """The tenants among which the engine's time is divided: those whose rollouts have rows, or whose clients that
        state no objective."""
        ...

    def tenant_tokens(self) -> Mapping[str, float]:
        """Tokens in the present slice, or the last one, of the tenants that share its time: rollouts', and those of
        clients while none of their requests states an objective."""
        ...

    def share_time(self, time: WorkerTime) -> None:
        """The worker's time among its tenants, by which an engine may choose what a slice computes."""
        ...

    def describe(self) -> str:
        """One line for the log: what its requests wait for."""
        ...

    def gauges(self) -> dict[str, float]:
        """Figures for the operator, by their names in :data:`rookery.protocol.gauges.GAUGES`; a figure that it does not
        have is absent."""
        ...

    # --- adapters ---------------------------------------------------------------------------------------------------

    def adapters(self) -> list[str]:
        """Hashes of the adapters that new requests may use."""
        ...

    def has_adapter(self, key: str) -> bool:
        """Whether new requests may use the adapter with the hash ``key``."""
        ...

    def add_adapter(self, ref: protocol.AdapterRef, folder: Path) -> None:
        """Attaches the adapter ``ref`` of the PEFT ``folder`` under its hash; evicts others that no request uses. Does
        nothing if it is attached. Raises ``UserError`` when the folder holds no adapter of this base model or one that
        is too large for it, ``NoRoom`` while the adapters in use leave no room, ``Unavailable`` or ``PassingFault``
        where a repetition may succeed."""
        ...

    def memory(self) -> dict[str, MemoryUse]:
        """Bytes of each part of the memory budget that this engine uses: ``kv_cache`` and ``adapters``."""
        ...

    @property
    def free_tokens(self) -> int:
        """Tokens of the KV cache that no request occupies; 0 for an engine that does not say."""
        ...

    def evict_adapter(self, key: str) -> None:
        """Removes an adapter: at once, or when the last request that uses it ends. Unknown keys are ignored."""
        ...

    # --- requests ---------------------------------------------------------------------------------------------------

    def submit(self, generate: protocol.Generate, grammar: ReplyGrammar | None = None) -> None:
        """Queues a request; ``grammar`` is that of its schema, after its ``prefix_tokens``. Raises ``ValueError`` with
        a one-line reason when it can never run here (a token id is outside the vocabulary, its name is in use, …),
        :class:`~rookery.worker.memory.NotOnThisWorker` where another worker may run it (its prompt exceeds the context,
        …); nothing is kept of it then."""
        ...

    def abort(self, request: str) -> None:
        """Ends a request; its last chunk has ``finish="abort"``. Unknown requests are ignored."""
        ...

    def switch_adapter(self, request: str, ref: protocol.AdapterRef, *, recompute: bool) -> bool:
        """Samples ``request`` with ``ref``, another version of its policy, from its next token on. With ``recompute``
        its cache is computed again under the new version, else it is kept. False (and nothing changes) for a request
        that has ended or is unknown. Raises ``ValueError`` when ``ref`` is not attached or of another policy."""
        ...

    def close(self) -> None:
        """End the engine's processes and connections; the last call."""
        ...

    # --- compute ----------------------------------------------------------------------------------------------------

    def step(self) -> bool:
        """Computes one bounded slice, about as long as one decode step of a full batch; False when there was nothing
        to compute. An engine that computes elsewhere waits here for its next outputs, as long at most."""
        ...

    def drain(self) -> list[protocol.TokenChunk]:
        """Tokens sampled since the last call, one chunk per request and version. Each request's chunks are contiguous:
        ``offset`` counts answer tokens, those of ``prefix_tokens`` included. The last chunk has ``finish`` set."""
        ...
