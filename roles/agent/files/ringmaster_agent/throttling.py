# SPDX-License-Identifier: GPL-3.0-or-later
"""How much clock a card has lost to heat or a power brake, as a counter in seconds of full clock.

A card whose clock is held at half its maximum for ten seconds has lost five. Clocks that are low for other reasons (an
idle card, a power cap that was set on purpose) are no loss.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from ansible_collections.ringmaster.inference.plugins.module_utils.gpu_health import SLOWDOWNS

# Samples further apart than this, and than twice the gap before, say nothing of the time between them, in seconds.
LONGEST_GAP: Final = 10.0


class ClockLoss:
    """Counts for one card, since the agent's start."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._sampled_at: float | None = None
        self._gap = 0.0

    def sample(self, card: Mapping[str, Any], now: float) -> float | None:
        """Take a sample, `now` on a clock that nobody sets; gives the sum so far.

        None while what was lost is not known: the sum would say that nothing was.
        """
        before, self._sampled_at = self._sampled_at, now
        gap = 0.0 if before is None else max(0.0, now - before)
        longest, self._gap = max(LONGEST_GAP, 2 * self._gap), gap
        reasons, clock, most = (card.get(name) for name in ("clock_event_reasons", "sm_clock_mhz", "sm_clock_max_mhz"))
        if reasons is None or gap > longest:
            return None
        if any(reason in SLOWDOWNS for reason in reasons):
            if clock is None or not most:
                return None
            self.seconds = round(self.seconds + max(0.0, 1 - clock / most) * gap, 3)
        return self.seconds
