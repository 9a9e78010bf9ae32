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
from ringmaster_scheduler.core import EngineView
from ringmaster_scheduler.domain import Health
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
            (
                "members_failures",
                "Times that the members file or registry could not be used.",
                snapshot.members_failures,
            ),
            ("tokens_estimated", "Requests whose tokens were estimated from their length.", snapshot.estimated),
            ("log_lines", "Ends of requests that HAProxy's log told.", snapshot.log_lines),
            ("log_errors", "Datagrams that were no line of the access log.", snapshot.log_errors),
            ("haproxy_pushes", "Commands that HAProxy has taken.", snapshot.haproxy_pushes),
            (
                "haproxy_failures",
                "Times that HAProxy could not be asked, or refused a command.",
                snapshot.haproxy_failures,
            ),
        ):
            yield CounterMetricFamily(f"{_PREFIX}_{name}", help_text, value=count)
        for name, help_text, value in (
            ("spoe_connections", "Open SPOE connections.", snapshot.spoe_connections),
            (
                "members_current",
                "1 while the members file or registry is in use as it is, 0 while former members are kept.",
                int(snapshot.members_loaded and not snapshot.members_error),
            ),
            ("haproxy_follows", "1 while HAProxy takes what is pushed.", int(not snapshot.haproxy_error)),
        ):
            yield GaugeMetricFamily(f"{_PREFIX}_{name}", help_text, value=value)
        if snapshot.members_age is not None:
            yield GaugeMetricFamily(
                f"{_PREFIX}_members_age_seconds",
                "Time since the registry last confirmed the members.",
                value=snapshot.members_age,
            )
        yield from _agent_metrics(snapshot)
        yield from _queue_metrics(snapshot)
        yield from _engine_metrics(snapshot)


def _agent_metrics(snapshot: Snapshot) -> Iterator[Metric]:
    up = GaugeMetricFamily(f"{_PREFIX}_agent_up", "1 while the agent's stream comes.", labels=["host"])
    age = GaugeMetricFamily(f"{_PREFIX}_agent_age_seconds", "Time since the agent's last line.", labels=["host"])
    lines = CounterMetricFamily(f"{_PREFIX}_agent_lines", "Lines of the agent's stream.", labels=["host"])
    connections = CounterMetricFamily(
        f"{_PREFIX}_agent_connections", "Times that the agent's stream began.", labels=["host"]
    )
    refused = CounterMetricFamily(
        f"{_PREFIX}_agent_refused", "Connections ended because of what came over them.", labels=["host"]
    )
    for agent in snapshot.agents:
        up.add_metric([agent.host], int(agent.up))
        if agent.age is not None:
            age.add_metric([agent.host], agent.age)
        lines.add_metric([agent.host], agent.lines)
        connections.add_metric([agent.host], agent.connections)
        refused.add_metric([agent.host], agent.refused)
    yield from (up, age, lines, connections, refused)


def _queue_metrics(snapshot: Snapshot) -> Iterator[Metric]:
    families = [
        GaugeMetricFamily(f"{_PREFIX}_queue_{name}", help_text, labels=["model"])
        for name, help_text in (
            ("requests", "Requests that wait for the model."),
            ("tokens", "Tokens that these will need."),
            ("drain_tokens_per_second", "Measured rate at which engines take them."),
        )
    ]
    for line in snapshot.lines:
        for family, value in zip(families, (len(line.waiting) + line.unknown, line.tokens, line.drain_rate)):
            family.add_metric([line.model], value)
    yield from families


def _engine_metrics(snapshot: Snapshot) -> Iterator[Metric]:
    placements = CounterMetricFamily(f"{_PREFIX}_placements", "Requests placed on the engine.", labels=["engine"])
    failures = CounterMetricFamily(
        f"{_PREFIX}_reading_failures", "Readings of the engine that failed.", labels=["engine"]
    )
    described = ["engine", "model", "card"]
    healthy = GaugeMetricFamily(f"{_PREFIX}_engine_healthy", "1 healthy, 0 unhealthy or unknown.", labels=described)
    gauges: list[tuple[GaugeMetricFamily, Callable[[EngineView], float | None]]] = [
        (_engine_gauge("held", "Requests of this gateway on the engine."), lambda view: view.held),
        (_engine_gauge("foreign", "Requests of other gateways on the engine."), lambda view: view.foreign),
        (_engine_gauge("limit", "Requests it may hold, by its memory."), lambda view: view.limit),
        (_engine_gauge("maxconn", "The maxconn that HAProxy is to have."), lambda view: view.cap),
        (_engine_gauge("drained", "1 while it gets no more requests."), lambda view: int(view.drained)),
        (_engine_gauge("weight_ratio", "Health weight, 0 (out) to 1."), lambda view: view.weight),
        (
            _engine_gauge("share_ratio", "Health weight relative to the best engine of the model."),
            lambda view: view.share,
        ),
        (
            _engine_gauge("over_watermark", "1 while its KV use is over the watermark."),
            lambda view: int(view.over_watermark),
        ),
        (_engine_gauge("score_seconds", "What the pick compares."), lambda view: view.terms.score),
        (
            _engine_gauge("prefill_tokens_per_second", "Measured rate of prefill."),
            lambda view: view.prefill_rate,
        ),
        (
            _engine_gauge("sequence_tokens_per_second", "Measured rate of one running sequence."),
            lambda view: view.sequence_rate,
        ),
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
    changes = CounterMetricFamily(f"{_PREFIX}_weight_changes", "Changes of the health weight.", labels=["engine"])
    reasons = GaugeMetricFamily(
        f"{_PREFIX}_engine_rule_active", "1 while the health rule holds for the engine.", labels=["engine", "rule"]
    )
    for view in snapshot.engines:
        name = view.engine.name
        changes.add_metric([name], snapshot.weight_changes.get(name, 0))
        for rule in dict.fromkeys(reason.rule for reason in view.reasons):
            reasons.add_metric([name, rule], 1)
        placements.add_metric([name], view.placements)
        failures.add_metric([name], snapshot.read_failures.get(name, 0))
        healthy.add_metric([name, view.engine.model, view.engine.card], int(view.health is Health.HEALTHY))
        for family, value_of in gauges:
            value = value_of(view)
            if value is not None:
                family.add_metric([name], value)
    yield placements
    yield failures
    yield changes
    yield reasons
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
