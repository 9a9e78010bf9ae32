# SPDX-License-Identifier: GPL-3.0-or-later
"""Times between streamed chunks as the engine itself sees them: the measure for what a proxy adds.

A tool of the rehearsal, off by default; vLLM has nothing like it.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any

CAPACITY = 2**18
"""Intervals kept: 26 s at 10,000 chunks a second, in 4 MiB."""


def percentile(ordered: Sequence[float], share: float) -> float:
    """The smallest value that is not exceeded by that share (0 to 1) of the ordered values."""
    return ordered[max(0, min(len(ordered) - 1, -int(-share * len(ordered) // 1) - 1))]


class IntervalTrace:
    """A ring of the last intervals."""

    def __init__(self, capacity: int = CAPACITY) -> None:
        self._times = array("d", bytes(8 * capacity))
        self._intervals = array("d", bytes(8 * capacity))
        self._capacity = capacity
        self._next = 0

    def record(self, time: float, milliseconds: float) -> None:
        """Note an interval that ended at ``time`` (Unix time, seconds)."""
        position = self._next
        self._times[position] = time
        self._intervals[position] = milliseconds
        self._next = position + 1 if position + 1 < self._capacity else 0

    def summary(self, since: float) -> dict[str, Any]:
        """Count, percentiles and maximum, in milliseconds, of the intervals that ended at ``since`` or later."""
        # Never-used places hold the time 0; they are no intervals, whatever is asked for.
        since = max(since, 1.0)
        ordered = sorted(interval for time, interval in zip(self._times, self._intervals) if time >= since)
        if not ordered:
            return {"count": 0, "p50": None, "p90": None, "p99": None, "max": None}
        return {
            "count": len(ordered),
            "p50": percentile(ordered, 0.50),
            "p90": percentile(ordered, 0.90),
            "p99": percentile(ordered, 0.99),
            "max": ordered[-1],
        }
