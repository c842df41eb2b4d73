"""Which training worker holds the trainer state of each policy, and whether it trains it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from rookery.controller.fleet.worker import Worker
from rookery.errors import next_state

HolderState = Literal[
    "none",  # no worker holds the policy's state
    "training",  # a worker trains the policy
    "offloaded",  # a worker keeps its state in main memory for a return
]
HolderEvent = Literal["assign", "offload", "evict", "lose"]

TRANSITIONS: dict[tuple[HolderState, HolderEvent], HolderState] = {
    ("none", "assign"): "training",
    ("offloaded", "assign"): "training",
    ("training", "offload"): "offloaded",
    ("none", "evict"): "none",
    ("training", "evict"): "none",
    ("offloaded", "evict"): "none",
    ("training", "lose"): "none",
    ("offloaded", "lose"): "none",
}
"""The state that follows each event. A policy moves to another worker by way of "none"."""


class StateHolders:
    def __init__(self) -> None:
        self._of: dict[str, tuple[Worker, HolderState]] = {}
        """By policy, for those whose state is not "none"."""

    def __iter__(self) -> Iterator[str]:
        """The policies that a worker trains."""
        return (policy for policy, (_, state) in self._of.items() if state == "training")

    def training(self, policy: str) -> Worker | None:
        """The worker that trains ``policy``."""
        return self._in(policy, "training")

    def offloaded(self, policy: str) -> Worker | None:
        """The worker that keeps the state of ``policy`` in main memory."""
        return self._in(policy, "offloaded")

    def apply(self, policy: str, event: HolderEvent, worker: Worker | None = None) -> None:
        """``worker`` is the one to which the policy is assigned, else that which has it. Raises ``RuntimeError`` for an
        event that the state of ``policy`` does not have."""
        holder, state = self._now(policy)
        following, worker = next_state(TRANSITIONS, state, event, f"policy {policy}"), worker or holder
        self._of.pop(policy, None)
        if following != "none":
            assert worker is not None
            self._of[policy] = worker, following

    def lose(self, worker: Worker) -> None:
        """The worker is gone, with all states that it held."""
        for policy in [policy for policy, (holder, _) in self._of.items() if holder is worker]:
            self.apply(policy, "lose")

    def _in(self, policy: str, state: HolderState) -> Worker | None:
        holder, current = self._now(policy)
        return holder if current == state else None

    def _now(self, policy: str) -> tuple[Worker | None, HolderState]:
        return self._of.get(policy, (None, "none"))
