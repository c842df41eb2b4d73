"""Tuned values by which rollouts are ordered and placed. Experiments and tests pass others to the controller."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class RolloutRules:
    dispatch_ahead: int = 16
    """Requests that may wait in a worker for a row (theta of RLBoost's Algorithm 2): enough that freed rows are filled
    without a round trip."""
    tenant_turn_share: float = 0.5
    """Share of a worker's rows that one tenant's requests take before the next tenant's turn. Rows that share an
    adapter decode faster; a lower share lets a single request wait less."""
    context_order: bool = True
    """Of a job whose step waits for all of its groups, one member of each group begins first, then the members of the
    groups whose finished members were the longest, so that no long reply begins last."""
    rollout_chunk_tokens: int = 64
    """Each time that a rollout has had this many tokens, it may continue on another worker, where that saves more time
    than the prefill costs. 0 leaves it where it began."""
    merge_tails: bool = True
    """The few rollouts of a worker that trains move into the batch of one that does not, where that is predicted to
    gain more than their tokens cost to prefill again."""
    reconnect_seconds: float = 6.0
    """After a restart with unfinished jobs, rollouts wait this long for the worker that still has them: workers dial in
    at most five seconds apart."""
    scale_window: int = 30
    """The last optimizer steps by which the number of rollout workers is computed, at most. Fewer follow the noise of
    single steps, more follow a load that grows too late."""


ROLLOUT_RULES = RolloutRules()
"""The values that a service uses."""
