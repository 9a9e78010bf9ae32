# SPDX-License-Identifier: GPL-3.0-or-later
"""What the daemon shows of itself: one moment, taken once, from which every page is made."""

from __future__ import annotations

from typing import NamedTuple

from ringmaster_scheduler.core import EngineView, LineView
from ringmaster_scheduler.domain import Health, Outcome, Reason
from ringmaster_scheduler.score import Terms


class AgentView(NamedTuple):
    """A host's agent: `error` is why its stream does not come, empty while it does; `age` are the seconds since its
    last line, None if there was none. `lines`, `connections` and `refused`, connections that were ended because of what
    came over them, count since the start."""

    host: str
    address: str
    port: int
    up: bool
    error: str
    age: float | None
    lines: int
    connections: int
    refused: int


class Snapshot(NamedTuple):
    """The daemon at a moment. `uptime` in seconds; `members_kind` is `file` or `registry`, `members_file` where it is;
    `members_error` is empty while it is in use as it is; `members_loaded` whether it ever was; `members_held`
    names engines that it does not list and that are kept for a while; `members_age` are the seconds since the registry
    last confirmed the members, None if it did not; `haproxy_error` is empty while HAProxy takes what is pushed,
    `haproxy_absent` says that none runs; `drained_error` is why the kept drains could not be read, if so. `estimated`
    counts requests whose tokens were estimated from their length; `weight_changes` are by engine. The counts are since
    the start."""

    engines: tuple[EngineView, ...]
    outcomes: dict[Outcome, int]
    read_failures: dict[str, int]
    members_kind: str
    members_file: str
    members_loaded: bool
    members_error: str
    members_failures: int
    members_held: tuple[str, ...]
    members_age: float | None
    spoe_listening: bool
    spoe_connections: int
    spoe_protocol_errors: int
    internal_errors: int
    estimated: int
    log_lines: int
    log_errors: int
    haproxy_error: str
    haproxy_absent: bool
    drained_error: str
    haproxy_pushes: int
    haproxy_failures: int
    lines: tuple[LineView, ...]
    shares: dict[str, float]
    uptime: float
    agents: tuple[AgentView, ...]
    weight_changes: dict[str, int]
    kept_error: str

    def reasons(self) -> list[str]:
        """Return why the scheduler cannot do its work now; an empty list if it can."""
        reasons = []
        if not self.spoe_listening:
            reasons.append("HAProxy cannot connect: the SPOE port is not open")
        if not self.members_loaded:
            reasons.append(f"no members: {self.members_file}: {self.members_error}")
        elif not self.engines:
            reasons.append(f"no members: {self.members_file} lists no engine")
        elif all(view.health is not Health.HEALTHY for view in self.engines):
            reasons.append("no engine is healthy")
        elif all(view.health is not Health.HEALTHY or not view.weight for view in self.engines):
            reasons.append("every healthy engine is out by a health rule")
        elif all(view.health is not Health.HEALTHY or view.avoided for view in self.engines):
            reasons.append("HAProxy sends nothing to any healthy engine")
        return reasons

    def warnings(self) -> list[str]:
        """Return what is wrong without keeping the scheduler from its work."""
        warnings = [
            f"engine {view.engine.name} is {view.health.value}: {view.reason}"
            for view in self.engines
            if view.health is not Health.HEALTHY
        ]
        warnings += [
            f"engine {view.engine.name} is healthy, but HAProxy sends nothing there"
            for view in self.engines
            if view.avoided
        ]
        if self.drained_error:
            warnings.append(f"drains may be forgotten: {self.drained_error}")
        if self.kept_error:
            warnings.append(f"a restart forgets which engines are out: {self.kept_error}")
        warnings += [f"engine {view.engine.name} is drained" for view in self.engines if view.drained]
        warnings += [
            f"engine {view.engine.name} {'is out' if not view.weight else f'has weight {view.weight:g}'}:"
            f" {'; '.join(map(describe, view.reasons))}"
            for view in self.engines
            if view.weight < 1
        ]
        warnings += [
            f"the agent of {agent.host} is not followed: {agent.error}" for agent in self.agents if not agent.up
        ]
        if self.haproxy_error:
            warnings.append(f"HAProxy does not follow: {self.haproxy_error}")
        if self.members_loaded and self.members_error:
            warnings.append(f"members {self.members_kind} not used, former members kept: {self.members_error}")
        for name in self.members_held:
            warnings.append(f"engine {name} is kept for a while, though the {self.members_kind} lists it no more")
        return warnings

    def health_document(self) -> dict[str, object]:
        """Return what /healthz answers."""
        reasons = self.reasons()
        return {"status": "failing" if reasons else "ok", "reasons": reasons, "warnings": self.warnings()}

    def document(self) -> dict[str, object]:
        """Return what /v1/state answers: all of it, in plain types."""
        return {
            **self.health_document(),
            "uptime_s": round(self.uptime, 1),
            "members": {
                "from": self.members_kind,
                "file": self.members_file,
                "loaded": self.members_loaded,
                "error": self.members_error,
                "held": list(self.members_held),
                "confirmed_s_ago": None if self.members_age is None else round(self.members_age, 1),
            },
            "spoe": {"connections": self.spoe_connections, "protocol_errors": self.spoe_protocol_errors},
            "haproxy": {
                "error": self.haproxy_error,
                "absent": self.haproxy_absent,
                "pushes": self.haproxy_pushes,
                "failures": self.haproxy_failures,
                "log_lines": self.log_lines,
                "log_errors": self.log_errors,
            },
            "tokens_estimated": self.estimated,
            "decisions": {outcome.value: count for outcome, count in self.outcomes.items()},
            "queues": [
                {
                    "model": line.model,
                    "waiting": len(line.waiting),
                    "unknown": line.unknown,
                    "tokens": line.tokens,
                    "drain_tokens_per_s": round(line.drain_rate, 1),
                }
                for line in self.lines
            ],
            "keys": {key_id: round(share, 4) for key_id, share in self.shares.items()},
            "engines": [_engine_document(view) for view in self.engines],
            "agents": {agent.host: {"up": agent.up, "error": agent.error} for agent in self.agents},
        }


def describe(reason: Reason) -> str:
    """Return a reason in words."""
    return f"{reason.rule} on {reason.subject}: {reason.text}"


def _engine_document(view: EngineView) -> dict[str, object]:
    engine, reading = view.engine, view.reading
    return {
        "name": engine.name,
        "host": engine.host,
        "address": engine.address,
        "port": engine.port,
        "kind": engine.kind,
        "model": engine.model,
        "adapters": list(engine.adapters),
        "card": engine.card,
        "max_num_seqs": engine.max_num_seqs,
        "health": view.health.value,
        "healthy": view.health is Health.HEALTHY,
        "reason": view.reason,
        "running": reading and reading.running,
        "waiting": reading and reading.waiting,
        "kv_use": reading and reading.kv_use,
        "kv_tokens": reading and reading.kv_tokens,
        "drained": view.drained,
        "weight": view.weight,
        "weight_reasons": [
            {"rule": each.rule, "subject": each.subject, "factor": each.factor, "seen": each.text}
            for each in view.reasons
        ],
        "share": round(view.share, 4),
        "held_back": view.held_back,
        "over_watermark": view.over_watermark,
        "held": view.held,
        "foreign": view.foreign,
        "tokens": view.tokens,
        "limit": view.limit,
        "maxconn": view.cap,
        "prefill_tokens_per_s": round(view.prefill_rate, 1),
        "sequence_tokens_per_s": round(view.sequence_rate, 1),
        "score": terms_document(view.terms),
        "placements": view.placements,
    }


def terms_document(terms: Terms) -> dict[str, float]:
    """Return the terms of the pick in seconds, and their score."""
    document = {name: round(value, 4) for name, value in terms._asdict().items()}
    document["score"] = round(terms.score, 4)
    return document
