# SPDX-License-Identifier: GPL-3.0-or-later
"""The scheduler's picture of the queue of one HAProxy backend, and of how fast it drains.

HAProxy holds the requests; here is only who waits, in the same order, which is that of their deadlines. So the
scheduler knows which request the next free slot takes, how much work stands before a deadline, and, from the rate at
which the queue has drained, when that work will be gone.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator
from typing import Final

from ringmaster_scheduler.in_flight import InFlight

_SLOT: Final = 0.25
"""Seconds of deadline that are summed up together; the finest answer, Retry-After, is in whole seconds."""

_SLOTS: Final = 4096
"""1,024 s: what HAProxy's priority offsets can span, twice 524 s."""

_PAST: Final = 400.0
"""Seconds that a deadline may be past while the request still waits; HAProxy's time-out in the queue is far shorter."""


class _Sums:
    """Sums over a ring of slots, in logarithmic time (a Fenwick tree)."""

    __slots__ = ("_tree", "total")

    def __init__(self) -> None:
        self._tree = [0] * (_SLOTS + 1)
        self.total = 0

    def add(self, slot: int, amount: int) -> None:
        self.total += amount
        position = slot % _SLOTS + 1
        while position <= _SLOTS:
            self._tree[position] += amount
            position += position & -position

    def _up_to(self, slot: int) -> int:
        position = slot % _SLOTS + 1
        found = 0
        while position > 0:
            found += self._tree[position]
            position -= position & -position
        return found

    def between(self, first: int, last: int) -> int:
        """Return the sum from slot `first` to slot `last`, which may lie beyond the ring's seam."""
        found = self._up_to(last) - (self._up_to(first - 1) if first % _SLOTS else 0)
        return found if first % _SLOTS <= last % _SLOTS else found + self.total


class WaitingLine:
    """Requests that wait in one backend's queue, by deadline; of equal ones, the first that came goes first."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, InFlight]] = []
        self._sums = _Sums()
        self._entered = 0
        self.count = 0
        # Requests that HAProxy has in its queue and of which the scheduler knows nothing: it was started after them.
        self.unknown = 0

    def __bool__(self) -> bool:
        return self.count > 0

    def __iter__(self) -> Iterator[InFlight]:
        """Iterate in the order in which they will be taken."""
        return (entry[2] for entry in sorted(self._heap, key=lambda entry: entry[:2]) if entry[2].waiting)

    @property
    def tokens(self) -> int:
        """Tokens of all that wait."""
        return self._sums.total

    def enter(self, request: InFlight) -> None:
        """Add a request."""
        request.waiting = True
        self._entered += 1
        self.count += 1
        self._sums.add(int(request.deadline / _SLOT), request.tokens)
        heapq.heappush(self._heap, (request.deadline, self._entered, request))

    def leave(self, request: InFlight) -> None:
        """Take a request out, wherever it stands."""
        request.waiting = False
        self.count -= 1
        self._sums.add(int(request.deadline / _SLOT), -request.tokens)
        self._clean()

    def first(self) -> InFlight | None:
        """Return the request that goes next."""
        return self._heap[0][2] if self.count else None

    def tokens_before(self, deadline: float, now: float) -> int:
        """Return the tokens of all requests that go before one with this deadline."""
        return self._sums.between(int((now - _PAST) / _SLOT), int(deadline / _SLOT))

    def _clean(self) -> None:
        heap = self._heap
        while heap and not heap[0][2].waiting:
            heapq.heappop(heap)
        if len(heap) > 64 and len(heap) > 4 * self.count:
            self._heap = [entry for entry in heap if entry[2].waiting]
            heapq.heapify(self._heap)


class DrainRate:
    """The rate in tokens/s at which engines take requests while others wait; measured, for whatever limits it.

    Only time in which somebody waits counts: then the engines take what they can.
    """

    _ENOUGH: Final = 3.0
    """Seconds of waiting time after which the measured rate alone counts."""

    def __init__(self, memory: float) -> None:
        self._memory = memory
        self._tokens = 0.0
        self._time = 0.0
        self._at: float | None = None

    def observe(self, saturated: bool, now: float) -> None:
        """Say whether somebody waits; to be called at every change, and often."""
        if self._at is not None:
            elapsed = now - self._at
            kept = math.exp(-elapsed / self._memory)
            self._tokens *= kept
            self._time *= kept
            self._time += self._memory * (1 - kept)
        self._at = now if saturated else None

    def took(self, tokens: int) -> None:
        """Count a request that an engine took while somebody waited."""
        if self._at is not None:
            self._tokens += tokens

    def value(self, presumed: float, least: float = 1.0) -> float:
        """Return the rate; `presumed` counts until enough was measured, and `least` is certain."""
        if self._time <= 0:
            return presumed
        measured = max(least, self._tokens / self._time)
        enough = min(self._ENOUGH, self._memory / 2)
        if self._time >= enough:
            return measured
        share = self._time / enough
        return measured * share + presumed * (1 - share)
