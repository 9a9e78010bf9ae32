# SPDX-License-Identifier: GPL-3.0-or-later
"""What the daemon shows of itself: one moment, taken once, from which every page is made."""

from __future__ import annotations

from typing import NamedTuple

from ringmaster_scheduler.core import EngineView, Health, Outcome


class Snapshot(NamedTuple):
    """The daemon at a moment. `uptime` in seconds; `members_error` is empty while the members file is in use as it is;
    `members_loaded` whether it ever was. The counts are since the start."""

    engines: tuple[EngineView, ...]
    outcomes: dict[Outcome, int]
    read_failures: dict[str, int]
    members_file: str
    members_loaded: bool
    members_error: str
    members_failures: int
    spoe_listening: bool
    spoe_connections: int
    spoe_protocol_errors: int
    internal_errors: int
    uptime: float

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
        return reasons

    def warnings(self) -> list[str]:
        """Return what is wrong without keeping the scheduler from its work."""
        warnings = [
            f"engine {view.engine.name} is {view.health.value}: {view.reason}"
            for view in self.engines
            if view.health is not Health.HEALTHY
        ]
        if self.members_loaded and self.members_error:
            warnings.append(f"members file not used, former members kept: {self.members_error}")
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
            "members": {"file": self.members_file, "loaded": self.members_loaded, "error": self.members_error},
            "spoe": {"connections": self.spoe_connections, "protocol_errors": self.spoe_protocol_errors},
            "decisions": {outcome.value: count for outcome, count in self.outcomes.items()},
            "engines": [_engine_document(view) for view in self.engines],
        }


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
        "placed_since_reading": view.placed,
        "placements": view.placements,
        "load": round(view.load, 4),
    }
