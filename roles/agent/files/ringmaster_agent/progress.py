# SPDX-License-Identifier: GPL-3.0-or-later
"""Whether an engine gets on: busy is not hung.

An engine whose ``/health`` says 200 may have stopped all the same. What tells is that it owes answers and that none of
its counters of work grows: tokens made, prompt tokens taken in, steps done. One that is merely busy does steps all the
time.
"""

from __future__ import annotations

from ansible_collections.ringmaster.inference.plugins.module_utils.engine_metrics import EngineMetrics


class Progress:
    """Follows one engine's readings."""

    def __init__(self) -> None:
        self._counters: tuple[int | None, ...] | None = None
        self._life: float | None = None
        self._grew_at = 0.0

    def stalled(self, metrics: EngineMetrics, now: float) -> float | None:
        """For how many seconds it has owed answers without getting on; 0 if it gets on or owes none.

        None if it owes answers but shows no counter of work. `now` is the time of the reading on a clock that is not
        set. Requests that only wait count as well: an engine that has stopped takes none of them in.
        """
        counters = metrics.generation_tokens, metrics.prompt_tokens, metrics.iterations
        # A counter that fell is a new life as well, of an engine that does not tell its start.
        if counters != self._counters or metrics.process_start != self._life or not _owes(metrics):
            self._counters, self._life, self._grew_at = counters, metrics.process_start, now
        if not _owes(metrics):
            return 0.0
        if all(counter is None for counter in counters):
            return None
        return round(max(now - self._grew_at, 0.0), 1)


def _owes(metrics: EngineMetrics) -> bool:
    return metrics.running + metrics.waiting > 0
