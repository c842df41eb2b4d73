"""Gauges of workers: bounded at the door, and summed so that no worker hides the others."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.room import beat

from rookery import protocol
from rookery.protocol.gauges import GAUGES, MOST_GAUGES, over_workers

figures = st.dictionaries(st.sampled_from(sorted(GAUGES)), st.floats())


def accepted(gauges: dict[str, Any]) -> bool:
    try:
        protocol.decode(protocol.from_worker, protocol.encode(beat(gauges=gauges)))
    except protocol.BadFrame:
        return False
    return True


@pytest.mark.parametrize(
    ("gauges", "taken"),
    [
        ({}, True),
        ({"unknown_here": 1.0}, True),
        ({f"g{n}": 0.0 for n in range(MOST_GAUGES)}, True),
        ({f"g{n}": 0.0 for n in range(MOST_GAUGES + 1)}, False),
        ({"g" * 64: 0.0}, True),
        ({"g" * 65: 0.0}, False),
        ({"": 0.0}, False),
        ({"a b": 0.0}, False),
        ({"a\nb 1": 0.0}, False),
        ({"name\n": 0.0}, False),
        ({'a{b="c"}': 0.0}, False),
        ({"Name": 0.0}, False),
        ({"ä": 0.0}, False),
        ({"name": "1"}, False),
        ({"name": None}, False),
        ({"name": {"a": 1.0}}, False),
    ],
)
def test_a_heartbeat_brings_a_bounded_number_of_plain_names(gauges: dict[str, Any], taken: bool) -> None:
    assert accepted(gauges) is taken


@given(st.lists(figures, max_size=5))
def test_a_figure_that_is_not_finite_does_not_hide_others(workers: list[dict[str, float]]) -> None:
    found = over_workers(workers)
    finite = [{name: value for name, value in one.items() if math.isfinite(value)} for one in workers]
    assert found == over_workers(finite)
    assert found.keys() == GAUGES.keys() and not any(map(math.isnan, found.values()))


def test_figures_of_workers_are_summed_or_compared() -> None:
    found = over_workers([{"draft_tokens": 3.0, "engine_gap_nats": 0.1}, {"draft_tokens": 4.0, "engine_gap_nats": 0.3}])
    assert (found["draft_tokens"], found["engine_gap_nats"], found["forced_slices"]) == (7.0, 0.3, 0)


def test_every_gauge_has_a_help_text_and_a_name_that_the_door_accepts() -> None:
    assert accepted(dict.fromkeys(GAUGES, 0.0))
    for name, gauge in GAUGES.items():
        assert gauge.help and "\n" not in gauge.help, name
        assert not gauge.unit or gauge.unit in name.split("_"), name
