# SPDX-License-Identifier: GPL-3.0-or-later
"""Who used how much of late, and what that costs in the queue.

A key that used more than its equal share of the tokens of the last minute gets a later deadline: at most twice its
class's. So under overload by one key another's requests go first, and yet every deadline passes: nothing starves. A
key that is alone is never slowed down.
"""

from __future__ import annotations

import math
from typing import Final

_NEGLIGIBLE: Final = 0.001
"""Share of all use under which a key no longer counts as active."""

_REBASE: Final = 40.0
"""Memories after which the growing weights are brought back to one; e^40 is far from where floats lose precision."""


class RecentUse:
    """Tokens used by each key over the last `memory` seconds, fading.

    Kept as growing weights: a token at time t weighs e^(t/memory), so that nothing has to be touched as time passes.
    """

    def __init__(self, memory: float) -> None:
        self._memory = memory
        self._base: float | None = None
        self._used: dict[str, float] = {}
        self._total = 0.0
        self._active = 0

    def use(self, key_id: str, tokens: int, now: float) -> None:
        """Count tokens of a request that was let in."""
        weight = tokens * self._weight(now)
        known = self._used.get(key_id)
        if known is None:
            self._active += 1
            known = 0.0
        self._used[key_id] = known + weight
        self._total += weight

    def excess(self, key_id: str) -> float:
        """Return by how much a key used more than its equal share: 0 for not at all, 1 for all of what others could
        use."""
        used = self._used.get(key_id)
        if used is None or self._active < 2:
            return 0.0
        equal = 1.0 / self._active
        over = used / self._total - equal
        return over / (1.0 - equal) if over > 0 else 0.0

    def forget(self, now: float) -> None:
        """Drop keys that are no longer active; to be called every now and then."""
        weight = self._weight(now)  # first, for it may bring all weights back to one
        least = max(sum(self._used.values()), weight) * _NEGLIGIBLE
        self._used = {key_id: used for key_id, used in self._used.items() if used > least}
        self._total = sum(self._used.values())
        self._active = len(self._used)

    def _weight(self, now: float) -> float:
        """Return what a token weighs now, after bringing the weights back to one if they have grown too far."""
        if self._base is None:
            self._base = now
        elif now - self._base > _REBASE * self._memory:
            factor = math.exp(max(-700.0, (self._base - now) / self._memory))
            self._used = {key_id: used * factor for key_id, used in self._used.items()}
            self._total *= factor
            self._base = now
        return math.exp((now - self._base) / self._memory)

    def shares(self) -> dict[str, float]:
        """Return each active key's share of the recent use."""
        return {key_id: used / self._total for key_id, used in self._used.items()} if self._total else {}
