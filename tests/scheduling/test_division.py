"""Where the next chunk of a request is sampled: what a move saves against what it costs."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from rookery.scheduling.division import Site, moves, saved_per_token
from rookery.scheduling.slo import CostTable

FLAT = CostTable.of({"decode": [(1, 0.01), (64, 0.01)], "prefill": [(1, 1e-4), (4096, 0.4)]})
LINEAR = CostTable.of({"decode": [(1, 0.01), (64, 0.64)], "prefill": [(1, 1e-4), (4096, 0.4)]})


def site(costs: CostTable, executing: int, pending: int = 0, free: int = 8, free_tokens: int = 10**6) -> Site:
    return Site(costs, executing, pending, free, free_tokens)


def test_a_flat_curve_gives_a_reason_to_move_only_where_requests_wait() -> None:
    assert not moves(site(FLAT, 60), site(FLAT, 2), 200, 500)
    assert moves(site(FLAT, 60, pending=3), site(FLAT, 2), 200, 500)
    assert not moves(site(FLAT, 60, pending=3), site(FLAT, 2), 4000, 100), "its prefill costs more"


def test_a_linear_curve_balances_rows() -> None:
    assert moves(site(LINEAR, 20), site(LINEAR, 2), 200, 500)
    assert not moves(site(LINEAR, 20), site(LINEAR, 19), 200, 500)
    assert not moves(site(LINEAR, 20), site(LINEAR, 2), 200, 0)


def test_the_target_has_a_row_memory_and_costs() -> None:
    crowded = site(LINEAR, 20, pending=5)
    for target in (
        site(LINEAR, 2, free=0),
        site(LINEAR, 2, pending=1),
        site(LINEAR, 2, free_tokens=699),
        site(CostTable(), 2),
        site(CostTable.of({"decode": [(1, 0.01)]}), 2),
    ):
        assert not moves(crowded, target, 200, 500)
    assert moves(crowded, site(LINEAR, 2, free_tokens=700), 200, 500)
    assert not moves(site(CostTable(), 20), site(LINEAR, 2), 200, 500)


@given(st.integers(1, 64), st.integers(0, 63), st.integers(1, 4000), st.integers(1, 4000))
def test_a_move_is_never_undone_at_once(here: int, there: int, tokens: int, left: int) -> None:
    """Where it pays to go, it does not pay to come back: requests do not oscillate between equal workers."""
    if moves(site(LINEAR, here), site(LINEAR, there), tokens, left):
        assert not moves(site(LINEAR, there + 1), site(LINEAR, here - 1), tokens, left)


@given(st.integers(2, 64), st.integers(0, 63))
def test_saved_seconds_are_those_of_all_rows(here: int, there: int) -> None:
    """On two equal workers: the sum over all rows of the time per token before, less after."""

    def total(rows: int) -> float:
        return rows * LINEAR.predict("decode", rows)

    saved = total(here) + total(there) - total(here - 1) - total(there + 1)
    assert abs(saved_per_token(site(LINEAR, here), site(LINEAR, there)) - saved) < 1e-9
