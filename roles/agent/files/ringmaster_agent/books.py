# SPDX-License-Identifier: GPL-3.0-or-later
"""Enters into the state what the readers say: what is there, what is gone, and what is unknown and why."""

from __future__ import annotations

from typing import Any, Final

from ringmaster_agent.changes import State
from ringmaster_agent.configuration import Engine
from ringmaster_agent.throttling import ClockLoss

# What a thing is, which stays known when it can't be read any more.
_IDENTITY: Final = frozenset({"index", "pci_address", "model", "kind", "netdev", "expected", "bridge"})


class HardwareBook:
    """Takes the reports of the process that reads the hardware (see `hardware_process`)."""

    def __init__(self, state: State) -> None:
        self._state = state
        self._subjects: dict[str, set[str]] = {}
        self._readers: dict[str, tuple[str, ...]] = {}
        self._losses: dict[str, ClockLoss] = {}

    def take(self, report: dict[str, Any]) -> None:
        """Enter what one lane read, or that it could not."""
        lane, seconds, values = report["lane"], report["seconds"], report["values"]
        self._readers[lane] = tuple(report["readers"])
        for reader in self._readers[lane]:
            reason = report["failed"].get(reader, "")
            self._state.explain(reader, reason)
            if not reason:
                self._state.succeed(reader, seconds)
        if report["failed"]:
            self._forget(lane, next(iter(report["failed"].values())))
            return
        for subject, quantities in values.items():
            if subject.startswith("gpu/"):
                lost = self._losses.setdefault(subject, ClockLoss()).sample(quantities, seconds)
                quantities["clock_lost_seconds"] = lost
                if lost is None:
                    report["unknown"].setdefault(subject, "clock_lost_seconds: not known for the time before")
            self._state.put(subject, quantities, report["unknown"].get(subject, ""))
        for subject in self._subjects.get(lane, set()) - set(values):
            self._state.remove(subject)
        self._subjects[lane] = set(values)

    def fail(self, reason: str) -> None:
        """Nothing of the hardware can be read for now."""
        for lane, readers in self._readers.items():
            for reader in readers:
                self._state.explain(reader, reason)
            self._forget(lane, reason)

    def _forget(self, lane: str, reason: str) -> None:
        for subject in self._subjects.get(lane, ()):
            known = self._state.values.get(subject, {})
            unknown = {name: value if name in _IDENTITY else None for name, value in known.items()}
            self._state.put(subject, unknown, reason)


class EngineBook:
    """Takes what is read of the engines, and their canaries."""

    def __init__(self, state: State) -> None:
        self._state = state

    def take(self, engine: Engine, quantities: dict[str, Any] | None, reason: str, seconds: float) -> None:
        """Enter a reading, or why there is none."""
        subject, reader = f"engine/{engine.name}", f"engine:{engine.name}"
        self._state.explain(reader, reason)
        if quantities is None:
            self._state.put(subject, {}, reason)
            return
        self._state.put(subject, quantities)
        self._state.succeed(reader, seconds)

    def take_canary(self, engine: Engine, quantities: dict[str, Any], seconds: float) -> None:
        """Enter what became of a question."""
        subject, reader = f"canary/{engine.name}", f"canary:{engine.name}"
        self._state.put(subject, quantities, quantities["error"] or "")
        self._state.explain(reader, quantities["error"] or "")
        if quantities["answer"] is not None:
            self._state.succeed(reader, seconds)


MOST_RECENT: Final = 32
"""Times of Xids that are told for each card and code, the last ones: how many came in some minutes, not since the
boot."""


class XidBook:
    """Counts Xids of this boot by card and code, and keeps when the last ones came."""

    def __init__(self, state: State) -> None:
        self._state = state
        self._cards: dict[str, dict[str, dict[str, Any]]] = {}

    def clear(self) -> None:
        """Count anew: what was counted is read again from the boot on."""
        self._cards.clear()

    def take(self, event: dict[str, Any], seconds: float) -> None:
        """Enter an event, as ``module_utils/xid.py`` gives it, that happened at that moment of CLOCK_BOOTTIME."""
        address = f"{event['pci_slot']}.0"  # the driver leaves out the function; a card is always the first one
        codes = self._cards.setdefault(address, {})
        code = str(event["xid"])
        before = codes.get(code, {"count": 0, "recent": []})
        # A new object each time: what was told must not change afterwards.
        codes[code] = {
            "count": before["count"] + 1,
            "seconds": round(seconds, 3),
            "recent": [*before["recent"], round(seconds, 3)][-MOST_RECENT:],
            "action": event["action"],
        }
        self._state.put(f"xid/{address}", codes)
