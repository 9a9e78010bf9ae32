# SPDX-License-Identifier: GPL-3.0-or-later
"""How many requests an engine may hold, by its key-value memory.

Over the watermark the engine would soon preempt: it frees the memory of its youngest request and computes it all again
later, which is the most expensive way of waiting. So it gets no more than a few requests until it is well below again.
A preemption says the same, later.

Below, it may have as many as its free memory will hold to their end, at their expected length.
"""

from __future__ import annotations

from typing import Final

from ringmaster_scheduler.domain import Reading
from ringmaster_scheduler.policy import Policy

_NEVER: Final = float("-inf")


class Watermark:
    """Whether one engine is over its watermark."""

    __slots__ = ("_policy", "changed_at", "over")

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self.over = False
        self.changed_at = _NEVER

    def observe(self, before: Reading | None, reading: Reading) -> None:
        """Take a reading; `before` is the one before it."""
        if reading.kv_use is None:
            over = False
        elif self.over:
            over = reading.kv_use >= self._policy.watermark_low
        else:
            over = reading.kv_use > self._policy.watermark
        preempted = (
            before is not None
            and before.preemptions is not None
            and reading.preemptions is not None
            and reading.preemptions > before.preemptions
        )
        if preempted:
            over = True
        if over == self.over:
            if preempted:
                self.changed_at = reading.begun_at
            return
        if preempted or reading.begun_at - self.changed_at >= self._policy.watermark_hold:
            self.over = over
            self.changed_at = reading.begun_at

    def limit(self, most: int, held: int, free_tokens: float | None, mean_tokens: float) -> int:
        """Return how many requests the engine may hold.

        Args:
            most: its ``max-num-seqs``.
            held: requests it holds now.
            free_tokens: KV tokens up to the watermark that nothing held will need; None if that is not known.
            mean_tokens: KV tokens that one more request will need.
        """
        low = min(self._policy.maxconn_low, most)
        if self.over:
            return low
        if free_tokens is None:
            return most
        more = int(free_tokens / mean_tokens) if free_tokens > 0 else 0
        return max(low, min(most, held + more))
