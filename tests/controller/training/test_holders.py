"""The table of the workers that hold the trainer states of policies."""

from __future__ import annotations

from itertools import product
from typing import Any, get_args

import pytest

from rookery.controller.training.holders import TRANSITIONS, HolderEvent, HolderState, StateHolders

WAYS: dict[HolderState, tuple[HolderEvent, ...]] = {
    "none": (), "training": ("assign",), "offloaded": ("assign", "offload"),
}  # fmt: skip
"""The events that lead to each state."""


@pytest.mark.parametrize(("state", "event"), list(product(get_args(HolderState), get_args(HolderEvent))))
def test_each_event_of_each_state_is_in_the_table_or_refused(state: HolderState, event: HolderEvent) -> None:
    holders, first, second = StateHolders(), object(), object()
    worker: Any = first
    for before in WAYS[state]:
        holders.apply("p", before, worker if before == "assign" else None)
    given: Any = second if event == "assign" else None
    if (following := TRANSITIONS.get((state, event))) is None:
        with pytest.raises(RuntimeError, match=f"policy p is {state}, which has no event '{event}'"):
            holders.apply("p", event, given)
        following = state
    else:
        holders.apply("p", event, given)
    holder = second if event == "assign" and following != state else first
    assert holders.training("p") is (holder if following == "training" else None)
    assert holders.offloaded("p") is (holder if following == "offloaded" else None)
    assert [*holders] == ["p"] * (following == "training")


def test_a_lost_worker_holds_nothing() -> None:
    holders = StateHolders()
    lost, other = object(), object()
    workers: Any = {"trained": lost, "kept": lost, "elsewhere": other}
    for policy, worker in workers.items():
        holders.apply(policy, "assign", worker)
    holders.apply("kept", "offload")
    gone: Any = lost
    holders.lose(gone)
    assert [*holders] == ["elsewhere"] and holders.offloaded("kept") is None
