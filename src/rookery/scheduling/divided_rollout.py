"""Divided rollout: when a request in progress moves to another worker. Pure.

A request is divided into chunks of a fixed number of tokens; at the end of each it may move (Seer, arXiv 2511.14617).
Seer keeps KV caches in a pool that all instances reach. Here a move costs a prefill of prompt and text at its target,
for which the rows there wait too. So a chunk moves only where that is less than the time it saves, in seconds of rows:

    saved = left · (T_s(n) - T_t(m + 1))        the request decodes faster
          + left · T_s(n)                       where requests wait at the source: one decodes in its place; else
          + left · (n - 1) · (T_s(n) - T_s(n - 1))                     the others there decode faster
          - left · m · (T_t(m + 1) - T_t(m))    those at the target decode slower
    cost  = (m + 1) · prefill(prompt + text)

n and m are the rows that source and target decode, T their seconds of a decode step, as they report them. ``left`` is
the number of tokens that the request is expected to have still: at least a chunk.
"""

from __future__ import annotations

from dataclasses import dataclass

from rookery.scheduling.costs import CostTable

LEAST_SAVING = 1.5
"""Saved time over cost from which a chunk moves: lengths are estimates, and costs moving averages."""


@dataclass(frozen=True, slots=True)
class DecodingWorker:
    """A worker that may sample the chunk."""

    costs: CostTable
    executing: int
    pending: int = 0
    """Requests that wait there for a row or for memory."""
    free: int = 0
    """Rows that a new request would get at once."""
    free_tokens: int = 0
    """Free tokens of its KV cache."""


def moves(source: DecodingWorker, target: DecodingWorker, tokens: int, left: int) -> bool:
    """Whether a request of ``tokens`` tokens, its prompt included, should leave the source: the target has a row and
    memory for it, both report their costs, and the time saved is worth its prefill."""
    if not target.free or target.pending or target.free_tokens < tokens + left or left < 1:
        return False
    prefill = target.costs.predict("prefill", tokens)
    saved = left * saved_per_token(source, target)
    return prefill > 0 and saved > LEAST_SAVING * (target.executing + 1) * prefill


def saved_per_token(source: DecodingWorker, target: DecodingWorker) -> float:
    """Seconds of rows that the move saves for each token that is left; 0 where a worker does not report its costs."""
    n, m = max(1, source.executing), target.executing
    here, there = source.costs.predict("decode", n), target.costs.predict("decode", m + 1)
    if not (here and there):
        return 0.0
    relief = here if source.pending else (n - 1) * (here - source.costs.predict("decode", n - 1)) if n > 1 else 0.0
    return here - there + relief - m * (there - target.costs.predict("decode", m))
