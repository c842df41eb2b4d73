"""The metrics of a service in Prometheus' text format, in a registry per service.

The controller counts; nothing is stored here. :meth:`Prometheus.render` formats the current values together with the
memory and CPU time of the process. Labels are states, never a tenant, a job or a text, so a scrape reveals nothing
about any tenant.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

CONTENT_TYPE = CONTENT_TYPE_LATEST


@dataclass(frozen=True, kw_only=True)
class ServiceMetrics:
    """The values of one scrape. Totals never decrease while the service runs."""

    jobs: Mapping[str, int] = field(default_factory=dict)
    """Jobs by state."""
    workers: Mapping[str, int] = field(default_factory=dict)
    """Workers by state."""
    totals: Mapping[str, int | float] = field(default_factory=dict)
    """By name: steps, sampled_tokens, trained_tokens, groups_dropped_stale, episodes_failed, worker_losses, …"""
    gauges: Mapping[str, int | float] = field(default_factory=dict)
    """By name: requests_waiting, requests_running, environment_hosts, …"""


class _ServiceCollector(Collector):
    def __init__(self) -> None:
        self.metrics = ServiceMetrics()

    def collect(self) -> Iterator[Metric]:
        for name, states in (("jobs", self.metrics.jobs), ("workers", self.metrics.workers)):
            family = GaugeMetricFamily(f"rookery_{name}", f"{name.capitalize()} by state", labels=["state"])
            for state, count in states.items():
                family.add_metric([state], count)
            yield family
        for name, value in self.metrics.totals.items():
            yield CounterMetricFamily(f"rookery_{name}", f"{_readable(name)} since the service started", value=value)
        for name, value in self.metrics.gauges.items():
            yield GaugeMetricFamily(f"rookery_{name}", f"{_readable(name)} now", value=value)


class Prometheus:
    """One service's registry."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self._collector = _ServiceCollector()
        self._registry.register(self._collector)
        ProcessCollector(registry=self._registry)

    def render(self, metrics: ServiceMetrics) -> bytes:
        """The response to a scrape of ``/metrics``, of type :data:`CONTENT_TYPE`."""
        self._collector.metrics = metrics
        return generate_latest(self._registry)


def _readable(name: str) -> str:
    return name.replace("_", " ").capitalize()
