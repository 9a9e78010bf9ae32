# SPDX-License-Identifier: GPL-3.0-or-later
"""What is known of the nodes, for people: each host with its agent, its engines' weights, and the rules that say
anything there."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from ringmaster_scheduler.core import EngineView
from ringmaster_scheduler.domain import Reason
from ringmaster_scheduler.health import HealthBook
from ringmaster_scheduler.status import AgentView


def documents(
    book: HealthBook, views: Iterable[EngineView], agents: Mapping[str, AgentView], now: float
) -> list[dict[str, Any]]:
    """Return every host that has an engine or an agent, by name."""
    engines: dict[str, list[EngineView]] = {}
    for view in views:
        engines.setdefault(view.engine.host, []).append(view)
    return [
        {
            "host": host,
            "agent": agent_document(agents[host]) if host in agents else None,
            "engines": [
                {
                    "name": view.engine.name,
                    "health": view.health.value,
                    "drained": view.drained,
                    "weight": view.weight,
                    "reasons": [reason_document(reason, now) for reason in view.reasons],
                    "stalled_s": round(book.stalled(view.engine.name), 1),
                }
                for view in engines.get(host, ())
            ],
            "watches": _watches(book, host, now),
            "unknown": dict(state.unknown) if (state := _state(book, host)) is not None else {},
        }
        for host in sorted({*engines, *agents})
    ]


def _state(book: HealthBook, host: str) -> Any:
    known = book.hosts.get(host)
    return None if known is None else known.state


def _watches(book: HealthBook, host: str, now: float) -> list[dict[str, Any]]:
    found = []
    for watch, gate in book.watches(host):
        rule = watch.rule
        found.append(
            {
                "rule": rule.name,
                "subject": watch.subject,
                "holds": watch.active,
                # Windows in a row that speak for a change, of how many it takes.
                "row": watch.row,
                "row_needed": rule.back if watch.active else rule.windows,
                "seen": watch.text,
                "seen_ago_s": round(now - watch.evidence_at, 1),
                "effect": rule.document()["effect"],
                "held_for_s": None if gate is None else round(max(0.0, gate.changed_at + rule.hold - now), 1),
            }
        )
    return found


def reason_document(reason: Reason, now: float) -> dict[str, Any]:
    """Return a reason as plain types."""
    return {
        "rule": reason.rule,
        "subject": reason.subject,
        "factor": reason.factor,
        "seen": reason.text,
        "for_s": round(now - reason.since, 1),
    }


def agent_document(view: AgentView) -> dict[str, Any]:
    """Return an agent's stream as plain types."""
    return {
        "address": view.address,
        "port": view.port,
        "up": view.up,
        "error": view.error,
        "heard_ago_s": None if view.age is None else round(view.age, 1),
        "lines": view.lines,
        "connections": view.connections,
        "refused": view.refused,
    }
