# SPDX-License-Identifier: GPL-3.0-or-later
"""From what the readers say to the messages of the stream: state in, messages out, and nothing else.

The form of a message is set down in docs/conventions.md ("Node agent and scheduler"). A subscriber that takes the last
snapshot and applies every change after it has the state as it is: that is what this module promises.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any, Final

SCHEMA: Final = 1

TELL_SECONDS: Final = 0.9
"""That a reader succeeded and found nothing new makes no message of its own within so many seconds of the last one."""

Quantities = dict[str, Any]


class State:
    """What is known of the host, and what of it nobody was told yet.

    `values` is subject → quantity → value, where None is unknown; `read` is reader → when it last succeeded; `unknown`
    is subject or reader → the reason. All are for reading only.
    """

    def __init__(self, agent: str, host: str, boot: str) -> None:
        self._head = {"schema": SCHEMA, "agent": agent, "host": host, "boot": boot}
        self.sequence = 0
        self.values: dict[str, Quantities] = {}
        self.read: dict[str, float] = {}
        self.unknown: dict[str, str] = {}
        self._changed_values: dict[str, Quantities | None] = {}
        self._changed_read: dict[str, float] = {}
        self._changed_unknown: dict[str, str | None] = {}
        # When each reader had succeeded by what was told, and whether that is so long ago that it is to be told anew.
        self._told: dict[str, float] = {}
        self._due = False
        # Subjects that are gone without anybody having been told, with the names of what they had.
        self._gone: dict[str, tuple[str, ...]] = {}

    def put(self, subject: str, quantities: Mapping[str, Any], reason: str = "") -> None:
        """Set all that is known of a subject, and why something of it is not known, if so.

        A quantity that was there before and is missing now becomes unknown.
        """
        before = self.values.get(subject)
        now = {name: _clean(value) for name, value in quantities.items()}
        if before is None:
            # One that is back before anybody was told that it was gone: what it no longer has must not be kept.
            now.update((name, None) for name in self._gone.pop(subject, ()) if name not in now)
            self.values[subject] = now
            self._changed_values[subject] = dict(now)
        else:
            now.update((name, None) for name in before if name not in now)
            different = {name: value for name, value in now.items() if name not in before or before[name] != value}
            if different:
                self.values[subject] = now
                self._changed_values[subject] = {**(self._changed_values.get(subject) or {}), **different}
        self.explain(subject, reason)

    def remove(self, subject: str) -> None:
        """A subject is gone, and so is the reason why something of it was not known."""
        quantities = self.values.pop(subject, None)
        if quantities is not None:
            self._changed_values[subject] = None
            self._gone[subject] = tuple(quantities)
        self.explain(subject, "")

    def succeed(self, reader: str, seconds: float) -> None:
        """A reader succeeded at that moment of CLOCK_BOOTTIME."""
        seconds = round(seconds, 3)
        if self.read.get(reader) != seconds:
            self.read[reader] = self._changed_read[reader] = seconds
            self._due = self._due or seconds - self._told.get(reader, -math.inf) >= TELL_SECONDS

    def explain(self, name: str, reason: str) -> None:
        """Say why a subject or a reader is not known; an empty reason: it is."""
        if reason:
            if self.unknown.get(name) != reason:
                self.unknown[name] = self._changed_unknown[name] = reason
        elif self.unknown.pop(name, None) is not None:
            self._changed_unknown[name] = None

    @property
    def changed(self) -> bool:
        """Whether there is something to tell. That a reader succeeded once more is, after a while, see TELL_SECONDS."""
        return bool(self._changed_values or self._changed_unknown or self._due)

    @property
    def untold(self) -> bool:
        """Whether the state has anything that was not told, however small: before a snapshot it has to be."""
        return self.changed or bool(self._changed_read)

    def change(self, seconds: float) -> bytes:
        """The message with all that changed since the last one, as a line of the stream; what it tells is told then."""
        self.sequence += 1
        self._told.update(self._changed_read)
        self._due = False
        told = self._changed_read, self._changed_values, self._changed_unknown
        self._changed_read, self._changed_values, self._changed_unknown, self._gone = {}, {}, {}, {}
        return self._line("change", seconds, *told)

    def snapshot(self, seconds: float) -> bytes:
        """The message with all that was told so far. What was not, comes with the next change: ask for that before."""
        return self._line("snapshot", seconds, self.read, self.values, self.unknown)

    def alive(self, seconds: float) -> bytes:
        """The message that tells only that the agent lives."""
        return self._line("alive", seconds, {}, {}, {})

    def _line(
        self, kind: str, seconds: float, read: Mapping[str, Any], values: Mapping[str, Any], unknown: Mapping[str, Any]
    ) -> bytes:
        message = {
            **self._head,
            "type": kind,
            "sequence": self.sequence,
            "seconds": round(seconds, 3),
            "read": read,
            "values": values,
            "unknown": unknown,
        }
        return json.dumps(message, allow_nan=False, separators=(",", ":")).encode("ascii") + b"\n"


def _clean(value: Any) -> Any:
    """The value, or None for a number that JSON does not know."""
    return None if isinstance(value, float) and not math.isfinite(value) else value
