"""The gauges of a worker: the one table of their names, units and help texts.

A worker's heartbeat carries any of them by name; ``/metrics``, the views and the documentation take all of the table.
So a new one is an entry here and a line where it is measured: an engine's, a trainer's or the gate's ``gauges()``, or
the worker's connection. Decisions use the typed fields of :class:`~rookery.protocol.Heartbeat` instead.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

MOST_GAUGES = 100
"""In one heartbeat: a worker is a stranger."""

GaugeName = Annotated[str, Meta(max_length=64, pattern=r"^[a-z][a-z0-9_]*\Z")]

Gauges = Annotated[dict[GaugeName, float], Meta(max_length=MOST_GAUGES)]
"""By name, as a heartbeat brings them. Names outside of the table appear in the worker's view only."""


class Gauge(msgspec.Struct, frozen=True):
    """The description of one figure of a worker."""

    help: str
    unit: str = ""
    """Empty for a count."""
    over: Literal["sum", "max"] = "sum"
    """How the figures of several workers become the service's."""


GAUGES: dict[str, Gauge] = {
    "worker_memory_bytes": Gauge("Resident memory of the workers' processes", "bytes"),
    "worker_memory_budget_bytes": Gauge("Memory that workers may take; 0 before the base model is loaded", "bytes"),
    "worker_trained_tokens": Gauge("Tokens trained on; a prompt counts once in each pass", "tokens"),
    "adapters_in_memory": Gauge("Adapters that engines have attached"),
    "pulled_from_peers_bytes": Gauge("Artifacts pulled from other workers", "bytes"),
    "rebuilt_files": Gauge("Files of versions rebuilt from an earlier version and a difference"),
    "pulled_from_service_bytes": Gauge("Artifacts pulled from the service", "bytes"),
    "served_to_peers_bytes": Gauge("Artifacts that other workers read from these", "bytes"),
    "draft_tokens": Gauge("Draft tokens that decode steps verified", "tokens"),
    "draft_tokens_accepted": Gauge("Draft tokens that became part of a text", "tokens"),
    "engine_gap_nats": Gauge(
        "Largest difference of an engine's log-probabilities from its trainer's, per token", "nats", "max"
    ),
    "slo_requests": Gauge("Requests with objectives that ended"),
    "slo_requests_within": Gauge("Requests that ended within their objectives"),
    "slo_cache_cuts": Gauge("Times that interactive requests halved the cache of rollouts"),
    "forced_slices": Gauge("Slices that would have been empty although requests were there"),
    "lanes_beside": Gauge("Workers that train beside decoding now, each on some of its cores"),
    "lanes_beside_seconds": Gauge("Time for which workers trained beside decoding", "seconds"),
    "lanes_predicted_gain": Gauge(
        "Time that running beside each other now is predicted to save, as a share", "", "max"
    ),
    "worker_stalls": Gauge("Times that a worker had work and finished no slice for some seconds"),
    "worker_failed_posts": Gauge("Calls that failed in a worker's compute thread while nobody waited for them"),
}
"""By name, which is also the metric's after ``rookery_``. Counts are since the worker's process began."""


def over_workers(workers: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """The service's figure of each gauge of the table, of those of its workers. A figure that is not finite is left
    out: it would hide all others."""
    known = list(workers)
    figures: dict[str, float] = {}
    for name, gauge in GAUGES.items():
        values = [value for gauges in known if math.isfinite(value := gauges.get(name, 0.0))]
        figures[name] = max(values, default=0.0) if gauge.over == "max" else sum(values)
    return figures
