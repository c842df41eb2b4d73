"""Threads next to other programs: fewer where they wait for cores, as many as before when the cores are free."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rookery.scheduling.threads import QUIET_LOOKS, CoreUse, Team, adapt

QUIET, BUSY = CoreUse(2.0, 0.02, 2.0), CoreUse(1.2, 0.8, 1.0)


def looks(team: Team, use: CoreUse, times: int, most: int = 2, *, fixed: bool = False) -> Team:
    for _ in range(times):
        team = adapt(team, use, most, fixed=fixed)
    return team


@pytest.mark.parametrize(
    ("most", "free", "threads"),
    [(2, 2.0, 2), (2, 1.6, 2), (2, 1.4, 1), (2, 1.0, 1), (2, 0.0, 1), (16, 15.1, 15), (16, 8.0, 8), (1, 0.3, 1)],
)
def test_crowded_threads_are_as_many_as_others_leave_cores(most: int, free: float, threads: int) -> None:
    team = adapt(Team(most), CoreUse(1.0, 1.0, free), most)
    assert team == Team(threads, brief=threads == most > 1)


def test_where_fewer_threads_wait_as_well_all_compute_and_spin_briefly() -> None:
    """Until the other programs end."""
    team = adapt(adapt(Team(2), CoreUse(1.0, 1.0, 1.0), 2), CoreUse(0.6, 0.4, 0.6), 2)
    assert team == Team(2, brief=True)
    assert looks(team, CoreUse(1.0, 1.0, 1.0), 50) == Team(2, brief=True)
    assert looks(team, QUIET, QUIET_LOOKS) == Team(2)


@pytest.mark.parametrize("use", [CoreUse(1.0, 1.0, None), BUSY])
def test_where_the_number_is_fixed_or_nothing_is_known_threads_spin_briefly(use: CoreUse) -> None:
    crowded = adapt(Team(2), use, 2, fixed=use.free is not None)
    assert crowded == Team(2, brief=True)
    assert looks(crowded, QUIET, QUIET_LOOKS - 1, fixed=True).brief
    assert not looks(crowded, QUIET, QUIET_LOOKS, fixed=True).brief


def test_one_thread_next_to_a_program_stays_one_until_the_program_ends() -> None:
    team = adapt(Team(2), BUSY, 2)
    assert team == Team(1)
    team = looks(team, CoreUse(1.0, 0.0, 1.0), 100)  # it has its core, the program has the other
    assert team.threads == 1
    team = looks(team, CoreUse(1.0, 0.0, 2.0), QUIET_LOOKS)
    assert team.threads == 2 and not team.brief


def test_a_short_pause_of_the_other_program_changes_nothing() -> None:
    team = adapt(Team(2), BUSY, 2)
    for _ in range(20):
        team = looks(team, CoreUse(1.0, 0.0, 2.0), QUIET_LOOKS - 1)
        team = looks(team, CoreUse(1.0, 0.0, 1.0), 1)
    assert team.threads == 1


def test_a_little_waiting_changes_nothing() -> None:
    assert looks(Team(2), CoreUse(1.6, 0.4, 1.4), 50) == Team(2)


@pytest.mark.parametrize("use", [CoreUse(0.01, 0.05, 0.0), CoreUse(-1.0, 3.0, 0.0), CoreUse(3.0, -1.0, 0.0)])
def test_an_idle_worker_and_ended_threads_change_nothing(use: CoreUse) -> None:
    assert adapt(Team(2, quiet=3), use, 2) == Team(2, quiet=3)


@given(
    st.integers(1, 64), st.booleans(),
    st.lists(st.tuples(st.floats(-1, 4), st.floats(-1, 4), st.none() | st.floats(-2, 80)), max_size=60),
)  # fmt: skip
def test_the_team_has_one_to_all_threads_and_recovers(
    most: int, fixed: bool, uses: list[tuple[float, float, float | None]]
) -> None:
    """Whatever was measured. More threads need so many looks at free cores, or compute where fewer waited as well."""
    team, since = Team(most), 0
    for use in uses:
        after = adapt(team, CoreUse(*use), most, fixed=fixed)
        assert 1 <= after.threads <= most and (not fixed or after.threads == most)
        assert not after.brief or after.threads > 1 or fixed
        since = since + 1 if after.threads <= team.threads else 0
        assert since or after.brief or team.quiet >= QUIET_LOOKS - 1
        team = after
    assert looks(team, CoreUse(2.0, 0.0, float(most)), QUIET_LOOKS, most, fixed=fixed) == Team(most)
