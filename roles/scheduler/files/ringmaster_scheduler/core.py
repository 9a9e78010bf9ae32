# SPDX-License-Identifier: GPL-3.0-or-later
"""The decision: which engine answers a request, or why none does.

Pure: no socket, no file, no clock. Every call that depends on time takes `now`, in seconds of any clock that does not
run backwards, so that a simulation can run a day in a second and the same calls always give the same decisions.

How an engine is judged:

* *Healthy*: its last good reading is younger than `stale_after`.
* *Unhealthy*: it is not, and reading it has failed since; or nothing listens at its address any more.
* *Unknown*: nobody has looked. The engine is new, or the scheduler itself stood still (suspended, starved) and old
  readings say nothing about the engines. The difference matters: see `DecisionCore.decide`.

The load of an engine is what its last reading showed, running and waiting, plus the requests placed on it that this
reading cannot have shown. A request needs a moment from the decision until the engine counts it, so that a placement
keeps counting until a reading that was begun `placement_grace` after it. Until then it may count twice, which does no
harm: it is a short surcharge on every engine in proportion to what it just got. Counting it not at all would send a
whole burst to the engine that looks empty.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterable
from enum import Enum
from typing import Final, NamedTuple

_NEVER: Final = float("-inf")
# A heap is rebuilt when it holds this many times more entries than seats; small heaps are left alone.
_HEAP_SLACK: Final = 4
_SMALL_HEAP: Final = 64


class Engine(NamedTuple):
    """An engine as the members document describes it."""

    name: str
    host: str
    address: str
    port: int
    kind: str
    model: str
    adapters: tuple[str, ...]
    card: str
    max_num_seqs: int


class Reading(NamedTuple):
    """What an engine said of itself.

    `begun_at` is when it was asked, in seconds: the answer is at least that fresh. `kv_use` is the share of KV blocks
    in use, 0 to 1, and `kv_tokens` the size of the KV pool in tokens; None where the engine does not tell.
    """

    begun_at: float
    running: int
    waiting: int
    kv_use: float | None = None
    kv_tokens: int | None = None


class Request(NamedTuple):
    """What the decision looks at; `model` is None when HAProxy could not tell it."""

    model: str | None


class Outcome(Enum):
    """Kind of a decision."""

    PLACED = "placed"
    UNKNOWN_MODEL = "unknown_model"
    NO_HEALTHY_ENGINE = "no_healthy_engine"
    LEFT_TO_HAPROXY = "left_to_haproxy"


class Decision(NamedTuple):
    """`engine` is set when placed; `status` is an HTTP status when refused, else 0; `retry_after` in seconds."""

    outcome: Outcome
    engine: str | None = None
    status: int = 0
    retry_after: int | None = None


class Health(Enum):
    """What is thought of an engine at a moment."""

    HEALTHY = "healthy"
    UNHEALTHY = "unhealthy"
    UNKNOWN = "unknown"


class EngineView(NamedTuple):
    """One engine as the console, the metrics and the log see it.

    `reason` is empty or names what went wrong last, which a healthy engine is forgiven until its reading is stale.
    `placed` counts the placements that are added to the reading now, `placements` all since the daemon's start;
    `load` is the relative load that the pick compares; `reading` the last one, however old.
    """

    engine: Engine
    health: Health
    reason: str
    reading: Reading | None
    placed: int
    placements: int
    load: float


class Settings(NamedTuple):
    """Times in seconds, all over 0: age at which a reading goes stale, how long a placement may be invisible, and what
    a client is told to wait when no engine of its pool is healthy."""

    stale_after: float
    placement_grace: float
    retry_after: int


class _EngineState:
    """What the core knows of one engine, and its place in every pool it serves."""

    __slots__ = (
        "engine",
        "order",
        "reading",
        "healthy_until",
        "failure",
        "placed_at",
        "placements",
        "load",
        "turn",
        "seats",
        "decision",
    )

    def __init__(self, engine: Engine, order: int) -> None:
        self.engine = engine
        self.order = order
        self.reading: Reading | None = None
        self.healthy_until = _NEVER
        self.failure = ""
        self.placed_at: deque[float] = deque()
        self.placements = 0
        self.load = 0.0
        self.turn = 0
        self.seats: list[_Seat] = []
        self.decision = Decision(Outcome.PLACED, engine=engine.name)

    def weigh(self) -> None:
        """Work out the relative load: outstanding requests over those the engine can run at once.

        This is the one place where capacity enters. It is a count of sequences for as long as nothing measures the
        engines' tokens/s; a faster card is to be given the larger `max-num-seqs` until then.
        """
        seen = self.reading.running + self.reading.waiting if self.reading else 0
        self.load = (seen + len(self.placed_at)) / self.engine.max_num_seqs

    def key(self) -> tuple[float, int]:
        """Sort key of the pick: least loaded first, and of equals the one whose last turn is longest ago."""
        return self.load, self.turn


class _Seat:
    """An engine's place in one pool's heap; only the heap entry with this `version` counts, 0 is none."""

    __slots__ = ("pool", "state", "version", "key")

    def __init__(self, pool: _Pool, state: _EngineState) -> None:
        self.pool = pool
        self.state = state
        self.version = 0
        self.key: tuple[float, int] = (0.0, 0)


_Entry = tuple[tuple[float, int], int, int, _Seat]


class _Pool:
    """All engines that can serve one name of a model or adapter, in a heap ordered by their key.

    A decision changes the key of one engine in all its pools, and always upwards. So an entry may be too low, never
    too high, and the pick puts right what it finds on top: a decision costs the logarithm of the pool's size. Only a
    reading can lower a key; it enters a new entry, which supersedes the old one.
    """

    __slots__ = ("seats", "heap", "last_version")

    def __init__(self) -> None:
        self.seats: list[_Seat] = []
        self.heap: list[_Entry] = []
        self.last_version = 0

    def entry(self, seat: _Seat) -> _Entry:
        self.last_version += 1
        seat.version = self.last_version
        seat.key = seat.state.key()
        return seat.key, seat.state.order, seat.version, seat

    def lower(self, seat: _Seat) -> None:
        """Enter a seat whose engine was read, unless its entry already stands low enough."""
        if seat.version and seat.key <= seat.state.key():
            return
        heapq.heappush(self.heap, self.entry(seat))
        if len(self.heap) > _SMALL_HEAP and len(self.heap) > _HEAP_SLACK * len(self.seats):
            self.heap = [entry for entry in self.heap if entry[2] == entry[3].version]
            heapq.heapify(self.heap)

    def least_loaded(self, now: float) -> _Seat | None:
        """Return the healthy seat with the lowest key; its entry is then the heap's top."""
        heap = self.heap
        while heap:
            key, _unused, version, seat = heap[0]
            if version != seat.version:
                heapq.heappop(heap)
            elif now > seat.state.healthy_until:
                heapq.heappop(heap)
                seat.version = 0
            elif key != seat.state.key():
                heapq.heapreplace(heap, self.entry(seat))
            else:
                return seat
        return None


class DecisionCore:
    """Members and readings in, decisions out."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._states: dict[str, _EngineState] = {}
        self._pools: dict[str, _Pool] = {}
        self._turn = 0
        self._unknown_model = Decision(Outcome.UNKNOWN_MODEL, status=404)
        self._no_healthy_engine = Decision(Outcome.NO_HEALTHY_ENGINE, status=503, retry_after=settings.retry_after)
        self._left_to_haproxy = Decision(Outcome.LEFT_TO_HAPROXY)
        self.outcomes: dict[Outcome, int] = dict.fromkeys(Outcome, 0)

    def set_engines(self, engines: Iterable[Engine]) -> None:
        """Take a new list of engines, whose names differ.

        What was read of and placed on an engine stays with it for as long as its name, address and port stay.
        """
        states: dict[str, _EngineState] = {}
        pools: dict[str, _Pool] = {}
        for order, engine in enumerate(engines):
            state = self._states.get(engine.name)
            if state is None or (state.engine.address, state.engine.port) != (engine.address, engine.port):
                state = _EngineState(engine, order)
            state.engine = engine
            state.order = order
            state.weigh()
            state.seats = []
            for name in dict.fromkeys((engine.model, *engine.adapters)):
                pool = pools.setdefault(name, _Pool())
                seat = _Seat(pool, state)
                pool.seats.append(seat)
                state.seats.append(seat)
                pool.lower(seat)
            states[engine.name] = state
        self._states = states
        self._pools = pools

    def record_reading(self, engine: Engine, reading: Reading) -> None:
        """Take a good reading of an engine; one that is older than the last, or of a former member, says nothing."""
        state = self._state(engine)
        if state is None or (state.reading is not None and reading.begun_at < state.reading.begun_at):
            return
        state.reading = reading
        state.healthy_until = reading.begun_at + self._settings.stale_after
        state.failure = ""
        seen_before = reading.begun_at - self._settings.placement_grace
        placed_at = state.placed_at
        while placed_at and placed_at[0] <= seen_before:
            placed_at.popleft()
        state.weigh()
        for seat in state.seats:
            seat.pool.lower(seat)

    def record_failure(self, engine: Engine, reason: str, gone: bool = False) -> None:
        """Take a reading that failed. `gone` says that nothing listens there: no need to wait until the last good
        reading is stale."""
        state = self._state(engine)
        if state is not None:
            state.failure = reason
            if gone:
                state.healthy_until = _NEVER

    def _state(self, engine: Engine) -> _EngineState | None:
        state = self._states.get(engine.name)
        if state is not None and (state.engine.address, state.engine.port) == (engine.address, engine.port):
            return state
        return None

    def decide(self, request: Request, now: float) -> Decision:
        """Place a request on the least-loaded healthy engine of its model's pool, or say why not.

        The scheduler refuses only what it knows to be hopeless: a model that no member serves (404), a pool whose
        engines were all asked and are all unhealthy (503). While it knows nothing (no members yet, engines not read
        yet, readings stale because the scheduler itself stood still, or HAProxy could not tell the model) it leaves
        the request to HAProxy, which balances by itself. Its own ignorance must never be an outage: a restart of
        the scheduler under load would else answer 503 for engines that are all well.
        """
        decision = self._decide(request, now)
        self.outcomes[decision.outcome] += 1
        return decision

    def _decide(self, request: Request, now: float) -> Decision:
        if request.model is None or not self._states:
            return self._left_to_haproxy
        pool = self._pools.get(request.model)
        if pool is None:
            return self._unknown_model
        seat = pool.least_loaded(now)
        if seat is None:
            # No healthy engine; those nobody could look at may be well. An empty heap makes this the only full scan.
            if all(each.state.failure for each in pool.seats):
                return self._no_healthy_engine
            return self._left_to_haproxy
        state = seat.state
        state.placed_at.append(now)
        state.placements += 1
        self._turn += 1
        state.turn = self._turn
        state.weigh()
        heapq.heapreplace(pool.heap, pool.entry(seat))
        return state.decision

    def views(self, now: float) -> list[EngineView]:
        """Return every engine as it stands, in the order of the members."""
        return [self._view(state, now) for state in self._states.values()]

    def _view(self, state: _EngineState, now: float) -> EngineView:
        if now <= state.healthy_until:
            health, reason = Health.HEALTHY, state.failure
        elif state.failure:
            health, reason = Health.UNHEALTHY, state.failure
        elif state.reading is None:
            health, reason = Health.UNKNOWN, "not read yet"
        else:
            health, reason = Health.UNKNOWN, f"last read {now - state.reading.begun_at:.1f} s ago"
        return EngineView(
            state.engine, health, reason, state.reading, len(state.placed_at), state.placements, state.load
        )
