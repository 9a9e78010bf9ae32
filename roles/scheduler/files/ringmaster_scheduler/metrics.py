# SPDX-License-Identifier: GPL-3.0-or-later
"""The daemon's own Prometheus metrics.

Collected from a snapshot when asked, so that a decision pays for none of it. No label comes from a request.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from prometheus_client import GCCollector, PlatformCollector, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily, Metric
from prometheus_client.registry import Collector, CollectorRegistry

from ringmaster_scheduler import __version__
from ringmaster_scheduler.core import EngineView, Health
from ringmaster_scheduler.status import Snapshot

_PREFIX = "ringmaster_scheduler"


class SnapshotCollector(Collector):
    """Turns a snapshot into metrics."""

    def __init__(self, snapshot: Callable[[], Snapshot]) -> None:
        self._snapshot = snapshot

    def collect(self) -> Iterator[Metric]:
        snapshot = self._snapshot()
        yield InfoMetricFamily(_PREFIX, "The scheduler.", {"version": __version__})
        decisions = CounterMetricFamily(f"{_PREFIX}_decisions", "Decisions by their outcome.", labels=["outcome"])
        for outcome, count in snapshot.outcomes.items():
            decisions.add_metric([outcome.value], count)
        yield decisions
        for name, help_text, count in (
            (
                "spoe_protocol_errors",
                "SPOE connections closed because HAProxy broke the protocol.",
                snapshot.spoe_protocol_errors,
            ),
            ("internal_errors", "Decisions that failed and were left to HAProxy.", snapshot.internal_errors),
            ("members_failures", "Times that the members file could not be used.", snapshot.members_failures),
        ):
            yield CounterMetricFamily(f"{_PREFIX}_{name}", help_text, value=count)
        for name, help_text, value in (
            ("spoe_connections", "Open SPOE connections.", snapshot.spoe_connections),
            (
                "members_current",
                "1 while the members file is in use as it is, 0 while former members are kept.",
                int(snapshot.members_loaded and not snapshot.members_error),
            ),
        ):
            yield GaugeMetricFamily(f"{_PREFIX}_{name}", help_text, value=value)
        yield from _engine_metrics(snapshot)


def _engine_metrics(snapshot: Snapshot) -> Iterator[Metric]:
    placements = CounterMetricFamily(f"{_PREFIX}_placements", "Requests placed on the engine.", labels=["engine"])
    failures = CounterMetricFamily(
        f"{_PREFIX}_reading_failures", "Readings of the engine that failed.", labels=["engine"]
    )
    described = ["engine", "model", "card"]
    healthy = GaugeMetricFamily(f"{_PREFIX}_engine_healthy", "1 healthy, 0 unhealthy or unknown.", labels=described)
    gauges: list[tuple[GaugeMetricFamily, Callable[[EngineView], float | None]]] = [
        (_engine_gauge("placed", "Placements that the last reading cannot have shown."), lambda view: view.placed),
        (_engine_gauge("load_ratio", "Outstanding requests over max-num-seqs."), lambda view: view.load),
        (
            _engine_gauge("running", "Running requests at the last reading."),
            lambda view: view.reading and view.reading.running,
        ),
        (
            _engine_gauge("waiting", "Waiting requests at the last reading."),
            lambda view: view.reading and view.reading.waiting,
        ),
        (
            _engine_gauge("kv_use_ratio", "Share of KV blocks in use at the last reading."),
            lambda view: view.reading and view.reading.kv_use,
        ),
        (
            _engine_gauge("kv_tokens", "Size of the KV pool in tokens."),
            lambda view: view.reading and view.reading.kv_tokens,
        ),
    ]
    for view in snapshot.engines:
        name = view.engine.name
        placements.add_metric([name], view.placements)
        failures.add_metric([name], snapshot.read_failures.get(name, 0))
        healthy.add_metric([name, view.engine.model, view.engine.card], int(view.health is Health.HEALTHY))
        for family, value_of in gauges:
            value = value_of(view)
            if value is not None:
                family.add_metric([name], value)
    yield placements
    yield failures
    yield healthy
    for family, _unused in gauges:
        yield family


def _engine_gauge(name: str, help_text: str) -> GaugeMetricFamily:
    return GaugeMetricFamily(f"{_PREFIX}_engine_{name}", help_text, labels=["engine"])


def make_registry(snapshot: Callable[[], Snapshot]) -> CollectorRegistry:
    """Return a registry with the daemon's metrics and those of its process."""
    registry = CollectorRegistry()
    ProcessCollector(registry=registry)
    PlatformCollector(registry=registry)
    GCCollector(registry=registry)
    registry.register(SnapshotCollector(snapshot))
    return registry
