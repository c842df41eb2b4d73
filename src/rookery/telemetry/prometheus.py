"""Figures for Prometheus, in a registry of their own: two services in one process do not mix.

The controller counts; nothing here keeps a figure. :meth:`Prometheus.render` takes what was counted and writes it down
in Prometheus' text format, with the process's own memory and CPU time. Labels are states and names of workers, never
a tenant, a job or a text: whoever may scrape learns nothing about anybody.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import msgspec
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

CONTENT_TYPE = CONTENT_TYPE_LATEST


class Figures(msgspec.Struct, kw_only=True):
    """What was counted. Totals only grow while the service runs."""

    jobs: Mapping[str, int]
    """Jobs by state."""
    workers: Mapping[str, int]
    """Workers by state."""
    totals: Mapping[str, int | float]
    """By name: steps, sampled_tokens, trained_tokens, groups_dropped_stale, episodes_failed, worker_losses, …"""
    gauges: Mapping[str, int | float]
    """By name: requests_waiting, requests_running, environment_hosts, …"""


class _Counted(Collector):
    def __init__(self) -> None:
        self.figures = Figures(jobs={}, workers={}, totals={}, gauges={})

    def collect(self) -> Iterator[Metric]:
        for name, states in (("jobs", self.figures.jobs), ("workers", self.figures.workers)):
            family = GaugeMetricFamily(f"rookery_{name}", f"{name.capitalize()} by state", labels=["state"])
            for state, count in states.items():
                family.add_metric([state], count)
            yield family
        for name, value in self.figures.totals.items():
            yield CounterMetricFamily(f"rookery_{name}", f"{_readable(name)} since the service started", value=value)
        for name, value in self.figures.gauges.items():
            yield GaugeMetricFamily(f"rookery_{name}", f"{_readable(name)} now", value=value)


class Prometheus:
    """One service's registry."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self._counted = _Counted()
        self._registry.register(self._counted)
        ProcessCollector(registry=self._registry)

    def render(self, figures: Figures) -> bytes:
        """The text that a scrape of ``/metrics`` answers, of type :data:`CONTENT_TYPE`."""
        self._counted.figures = figures
        return generate_latest(self._registry)


def _readable(name: str) -> str:
    return name.replace("_", " ").capitalize()
