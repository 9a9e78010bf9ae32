# SPDX-License-Identifier: GPL-3.0-or-later
"""The decision: which engine answers a request, that it waits, or why it is refused.

Pure: no socket, no file, no clock. Every call that depends on time takes `now`, in seconds of any clock that does not
run backwards, so that a simulation can run a day in a minute and the same calls always give the same decisions.

How an engine is judged:

* *Healthy*: its last good reading is younger than `stale_after`.
* *Unhealthy*: it is not, and reading it has failed since; or nothing listens at its address any more.
* *Out*: its health weight is 0, for a reason of `health`. It gets nothing, as if it were drained.
* *Unknown*: nobody has looked. The engine is new, or the scheduler itself stood still (suspended, starved) and old
  readings say nothing about the engines. The difference matters: see `DecisionCore.decide`.

How requests and engines come together:

* An engine *has room* while it holds fewer requests than its limit (`watermark`) and has less prefill before it than
  the window. While one has room, a request is placed on the best (`score`, `affinity`).
* When none has, or others with an earlier deadline wait, the request goes unbound into HAProxy's queue, which is in
  order of deadline. `adjust` looks where room has come up, several times a second, and lets HAProxy take as many as
  fit, by raising that server's ``maxconn``. An engine that ends a request takes the next by itself.
* The *caps* (``maxconn``) therefore follow what the engines hold whenever somebody waits or soon will, and are as wide
  as the engine's limit otherwise. Without HAProxy's ear (no push came through of late) nothing would wait as decided:
  then every request is placed on the best engine, and HAProxy's own configuration limits them.

What a health weight does: it is taken relative to the best usable engine of the model, so that a fault of all engines
takes nothing from anybody. An engine of a tenth may hold a tenth of its limit, and is *paced*: with each request that
the model's engines take it gains its share of one, a tenth of what it took while no engine was paced, or of what its
capacity would give it, whichever is less; and it takes one only when it has gained a whole one. So its share is a tenth
at any load, also where nobody has much to do: the traffic that it still gets is what shows that it has recovered.

HAProxy's queue knows no pace: whoever has a slot takes from it, and a slot is the least that a ``maxconn`` can be. So a
paced engine is *held back*: drained in HAProxy, which then gives it what is placed there by name, and of the queue as
many as it is granted. Not, though, with fewer than two engines that are not paced, on hosts of their own: what HAProxy
knows first it must be able to cope with alone. Nobody waits beyond half his time while an engine that is held back has
nothing to do.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Final, NamedTuple

from ringmaster_scheduler import score
from ringmaster_scheduler.affinity import PrefixMemory
from ringmaster_scheduler.capacity import Capacity, PrefillOfCard
from ringmaster_scheduler.domain import (
    Decision,
    Ended,
    Engine,
    Health,
    Outcome,
    Reading,
    Reason,
    Request,
    ServerCounts,
)
from ringmaster_scheduler.fairness import RecentUse
from ringmaster_scheduler.in_flight import InFlight
from ringmaster_scheduler.lengths import OutputLengths
from ringmaster_scheduler.policy import PRIORITY_LIMIT, Policy, RequestClass
from ringmaster_scheduler.waiting import DrainRate, WaitingLine
from ringmaster_scheduler.watermark import Watermark

_NEVER: Final = float("-inf")

_ON_THE_WAY: Final = 0.1
"""Seconds from a decision until HAProxy's counts show it, at most; measured are 1 to 5 ms."""

_CERTAIN: Final = 0.5
"""Part of the presumed rate at which answers end that is taken for certain."""

_MEAN_OVER: Final = 100
"""Requests over which the mean lengths of a pool fade."""

_MOST_GAINED: Final = 4.0
_LEAST_GAINED: Final = -4.0
"""Requests that an engine of low weight can have gained, or owe: what it could not take when it had no room it does not
take later in one burst."""


_USUAL: Final = 300.0
"""Seconds over which it is learnt what each engine of a model usually takes: longer than most rules need to find a
fault, for what an engine takes while it falls ill is not what it usually takes."""

_PRESUMED_USUAL: Final = 30
"""Requests an engine for which the capacities count: so few are no more than chance."""

_LEAST_USUAL: Final = 0.25
"""Least of that, over what the capacity would give: an engine that had little by chance is not to have next to nothing
once it is ill, or nobody would see that it has recovered."""

_PATIENCE: Final = 0.5
"""Part of its time that a request waits before it goes to an engine that is held back and has nothing to do."""

HOSTS_LEFT: Final = 2
"""Hosts whose engines have to be left to HAProxy's queue before others of the model are held back from it."""


class Settings(NamedTuple):
    """Times in seconds, all over 0: age at which a reading goes stale, how long a placement may be invisible, and what
    a client is told to wait when no engine of its pool is healthy."""

    stale_after: float
    placement_grace: float
    retry_after: int


class EngineView(NamedTuple):
    """One engine as the console, the metrics and the log see it.

    `reason` is empty or names what went wrong last, which a healthy engine is forgiven until its reading is stale.
    `weight` is that of its health, 0 while it is out, with the `reasons` for it, and `share` what it is relative to the
    best of its model. `held_back`: HAProxy's queue gives it only what it is granted.
    `held` counts the requests of this gateway, known or not, `foreign` those of others; `tokens` what all of them
    need; `limit` how many requests it may hold and `cap` the ``maxconn`` that HAProxy is to have. Rates in tokens/s.
    `avoided` says that HAProxy, by its own checks or somebody's word, sends nothing to an engine that is healthy.
    `placements` counts since the daemon's start; `score` in seconds is what the pick compares; `reading` is the last
    one, however old.
    """

    engine: Engine
    health: Health
    reason: str
    drained: bool
    weight: float
    share: float
    held_back: bool
    reasons: tuple[Reason, ...]
    over_watermark: bool
    avoided: bool
    reading: Reading | None
    held: int
    foreign: int
    tokens: int
    limit: int
    cap: int
    prefill_rate: float
    sequence_rate: float
    terms: score.Terms
    placements: int


class LineView(NamedTuple):
    """The queue of one model: who waits in the order in which they will be taken, and the rate in tokens/s at which it
    drains; `unknown` are requests that came before the scheduler's start."""

    model: str
    waiting: tuple[InFlight, ...]
    unknown: int
    tokens: int
    drain_rate: float


class Cap(NamedTuple):
    """A ``maxconn`` that HAProxy is to have for an engine of a model's backend. `granted` is how many requests of the
    queue it is to take now though it is held back."""

    model: str
    engine: str
    maxconn: int
    granted: int = 0


class EngineState:
    """What the core knows of one engine, and its place in every pool it serves."""

    __slots__ = (
        "applied_cap",
        "avoided_until",
        "cap",
        "capacity",
        "closed",
        "credit",
        "credit_at",
        "drained",
        "engine",
        "expected",
        "failure",
        "foreign",
        "granted",
        "healthy_until",
        "held",
        "held_back",
        "limit",
        "line",
        "order",
        "pace",
        "placements",
        "prices",
        "reading",
        "reasons",
        "recent",
        "recent_at",
        "score",
        "seats",
        "share",
        "surplus",
        "taken",
        "tokens",
        "turn",
        "unknown",
        "used",
        "usual",
        "watermark",
        "weight",
    )

    def __init__(self, engine: Engine, order: int, policy: Policy) -> None:
        self.engine = engine
        self.order = order
        self.line: Line
        self.reading: Reading | None = None
        self.healthy_until = _NEVER
        self.failure = ""
        self.drained = False
        # Gets nothing: an operator drained it, or its health weight is 0.
        self.closed = False
        # Until when HAProxy, by its last word, sends nothing there.
        self.avoided_until = _NEVER
        self.weight = 1.0
        self.reasons: tuple[Reason, ...] = ()
        # Its weight over that of the best usable engine of its model, 1 for one that is not paced.
        self.share = 1.0
        # Requests that it has gained and not taken, up to `credit_at` of the line's clock, and its gain a tick.
        self.credit = 0.0
        self.credit_at = 0.0
        self.pace = 0.0
        # What it takes while all are well, over what its capacity would give it, and the requests taken since the last
        # look at that.
        self.usual = 1.0
        self.taken = 0
        # Drained in HAProxy to keep its pace; and the requests of the queue that it may take all the same.
        self.held_back = False
        self.granted = 0
        self.capacity = Capacity(policy)
        self.watermark = Watermark(policy)
        # Requests of this gateway in the order in which they were placed; the sums are over them.
        self.held: dict[InFlight, None] = {}
        self.tokens = 0
        self.expected = 0
        # Requests of this gateway of which only HAProxy knows, and of other gateways.
        self.unknown = 0
        self.foreign = 0
        self.surplus = 0
        self.limit = engine.max_num_seqs
        self.cap = engine.max_num_seqs
        self.applied_cap: int | None = None
        self.placements = 0
        # Tokens that were placed of late, fading; for the bound of affinity.
        self.recent = 0.0
        self.recent_at = 0.0
        # KV tokens that are in use, by the last reading.
        self.used = 0.0
        self.prices = score.Prices(0.0, 0.0, 0.0)
        self.score = 0.0
        self.turn = 0
        self.seats: list[_Seat] = []

    @property
    def count(self) -> int:
        """Requests of this gateway."""
        return len(self.held) + self.unknown

    def usable(self, now: float) -> bool:
        """Whether requests may be sent there at all."""
        return now <= self.healthy_until and not self.closed and now > self.avoided_until

    def gained(self) -> float:
        """Return the requests that it may take by its pace."""
        return min(_MOST_GAINED, self.credit + (self.line.clock - self.credit_at) * self.pace)

    def charge(self, requests: float) -> None:
        """Count requests that it took, or, below 0, that another one took in its place."""
        if self.share < 1.0:
            self.credit = max(_LEAST_GAINED, self.gained() - requests)
            self.credit_at = self.line.clock

    def may_take(self) -> bool:
        """Whether its pace lets it take one more request now."""
        return self.share >= 1.0 or self.gained() >= 1.0

    def recent_work(self, policy: Policy, now: float) -> float:
        """Return the tokens placed on it of late, fading over the policy's memory."""
        faded = 1 - (now - self.recent_at) / policy.load_memory
        return self.recent * faded if faded > 0 else 0.0

    def needed(self) -> float:
        """Return the KV tokens that all it holds will need to their end."""
        needed = self.tokens + (self.unknown + self.foreign) * self.line.mean_tokens
        return max(needed, self.used)

    def price(self, policy: Policy) -> None:
        """Take up what was measured, and what the engine said of its memory."""
        reading, capacity = self.reading, self.capacity
        kv_tokens = None if reading is None else reading.kv_tokens
        self.used = reading.kv_use * kv_tokens if reading is not None and reading.kv_use and kv_tokens else 0.0
        self.prices = score.prices(
            policy,
            capacity.prefill_rate,
            capacity.sequence_rate,
            self.engine.max_num_seqs,
            kv_tokens,
            self.line.mean_prompt,
        )

    def terms(self, now: float) -> score.Terms:
        """Return what the pick compares, term by term."""
        decode, memory, service = self.prices
        output = self.expected + (self.unknown + self.foreign) * self.line.mean_output
        return score.Terms(self.capacity.work(now), output * decode, self.needed() * memory, service)

    def weigh(self, now: float) -> None:
        """Work out what the pick compares: the score of `terms`, at a fraction of the cost."""
        decode, memory, service = self.prices
        line = self.line
        others = self.unknown + self.foreign
        work = self.capacity.prefill_until - now
        if work < 0.0:
            work = 0.0
        needed = self.tokens + others * line.mean_tokens
        if needed < self.used:
            needed = self.used
        output = self.expected + others * line.mean_output
        self.score = work + output * decode + needed * memory + service


class _Seat:
    """An engine's place in one pool's heap; only the heap entry with this `version` counts, 0 is none. `extra` is what
    the pool's adapter costs on this engine, in seconds."""

    __slots__ = ("extra", "key", "pool", "state", "version")

    def __init__(self, pool: _Pool, state: EngineState) -> None:
        self.pool = pool
        self.state = state
        self.version = 0
        self.extra = 0.0
        self.key: tuple[float, int] = (0.0, 0)

    def present_key(self) -> tuple[float, int]:
        """Sort key of the pick: lowest score first, and of equals the one whose last turn is longest ago."""
        return self.state.score + self.extra, self.state.turn


_Entry = tuple[tuple[float, int], int, int, _Seat]


class Line:
    """What the engines of one model share: HAProxy's backend with its queue. The means fade over admitted requests,
    and are the same for all engines from one `adjust` to the next."""

    __slots__ = (
        "_least",
        "_output",
        "_presumed",
        "_prompt",
        "_seen",
        "_seen_at",
        "clock",
        "drain",
        "mean_output",
        "mean_prompt",
        "mean_tokens",
        "model",
        "states",
        "surplus",
        "tick",
        "waiting",
    )

    def __init__(self, model: str, policy: Policy) -> None:
        self.model = model
        self.states: list[EngineState] = []
        self.waiting = WaitingLine()
        self.drain = DrainRate(policy.drain_memory)
        self.mean_prompt = self._prompt = 1000.0
        self.mean_output = self._output = float(policy.output_tokens)
        self.mean_tokens = self.mean_prompt + self.mean_output
        self._presumed = self._least = 1.0
        self.surplus = 0
        # By which paced engines gain: each request that one of the engines takes moves it on by `tick`.
        self.clock = 0.0
        self.tick = 1.0
        # Requests from which it is known what each engine usually takes, fading since then.
        self._seen = 0.0
        self._seen_at = _NEVER

    def learn(self, request: InFlight) -> None:
        """Count a request that was let in."""
        self._prompt += (request.prompt - self._prompt) / _MEAN_OVER
        self._output += (request.expected - self._output) / _MEAN_OVER

    def settle(self, now: float) -> None:
        """Bring up to date what holds until the next `adjust`."""
        self.mean_prompt, self.mean_output = self._prompt, self._output
        self.mean_tokens = self.mean_prompt + self.mean_output
        prefill = sum(state.capacity.prefill_rate for state in self.states if state.usable(now))
        self._presumed = max(1.0, prefill * self.mean_tokens / self.mean_prompt)
        # What is being answered will end and make room, also where nothing was taken for longer than the rate's memory.
        sequences = sum(state.count * state.capacity.sequence_rate for state in self.states if state.usable(now))
        self._least = max(1.0, _CERTAIN * sequences / self.mean_output * self.mean_tokens)

    def settle_pace(self, now: float) -> None:
        """Bring shares and paces up to date. A pace is the part of all requests that an engine is to take if nobody
        takes what ill engines leave; as others do, a tick makes it more."""
        usable = [state for state in self.states if state.usable(now)]
        best = max((state.weight for state in usable), default=1.0) or 1.0
        if all(state.weight >= best for state in usable):
            self._learn_usual(usable, now)
        rates = sum(state.capacity.prefill_rate for state in usable) or 1.0
        usual = sum(state.capacity.prefill_rate * state.usual for state in usable) or 1.0
        left = 1.0
        for state in self.states:
            state.credit = state.gained()
            state.credit_at = self.clock
            share = min(1.0, state.weight / best) if state.weight else 1.0
            if share >= 1.0 or state.share >= 1.0:
                state.credit = 0.0
            state.share = share
            state.taken = 0
        for state in usable:
            # One that was given much because it fails at once is not to keep it.
            rate = state.capacity.prefill_rate
            part = min(rate * state.usual / usual, rate / rates)
            state.pace = part * state.share
            left -= part - state.pace
        self.tick = 1 / left

    def _learn_usual(self, usable: list[EngineState], now: float) -> None:
        taken = sum(state.taken for state in usable)
        if taken <= 0:
            return
        faded = self._seen * math.exp(min(0.0, self._seen_at - now) / _USUAL)
        self._seen = max(faded, _PRESUMED_USUAL * len(usable)) + taken
        self._seen_at = now
        rate = sum(state.capacity.prefill_rate for state in usable)
        for state in usable:
            part = state.taken / taken * rate / state.capacity.prefill_rate
            state.usual = max(_LEAST_USUAL, state.usual + (part - state.usual) * taken / self._seen)

    def hold_back(self, now: float, controlled: bool) -> None:
        """Settle which engines HAProxy's queue is to pass over."""
        left = {state.engine.host for state in self.states if state.share >= 1.0 and state.usable(now)}
        enough = controlled and len(left) >= HOSTS_LEFT
        for state in self.states:
            state.held_back = enough and state.share < 1.0 and state.usable(now)
            if not state.held_back:
                state.granted = 0

    @property
    def drain_rate(self) -> float:
        """The tokens/s at which requests are taken out of the queue."""
        return self.drain.value(self._presumed, self._least)


class _Pool:
    """All engines that can serve one name of a model or adapter, in a heap ordered by their key.

    Every `adjust` makes the heap anew. In between, a decision only raises the key of an engine in all its pools, so
    that an entry may be too low, never too high, and the pick puts right what it finds on top: a decision costs the
    logarithm of the pool's size. What has no room is left out until the next `adjust`, or until one of its requests
    ends.
    """

    __slots__ = (
        "adapter",
        "heap",
        "last_version",
        "line",
        "longest",
        "lowest",
        "prefixes",
        "recent_per_rate",
        "seats",
        "shortest",
    )

    def __init__(self, line: Line, adapter: str | None, policy: Policy) -> None:
        self.line = line
        self.adapter = adapter
        self.seats: list[_Seat] = []
        self.heap: list[_Entry] = []
        self.last_version = 0
        self.prefixes = PrefixMemory(policy)
        # The longest prompts that fit every engine, and that fit any; 0 where it is not known.
        self.shortest = 0
        self.longest = 0
        # For affinity: the best score, and the work given of late per token/s of prefill.
        self.lowest = 0.0
        self.recent_per_rate = 0.0

    @property
    def whole(self) -> bool:
        """Whether every engine of the backend is in the pool, so that any may take its requests out of the queue."""
        return len(self.seats) == len(self.line.states)

    def entry(self, seat: _Seat) -> _Entry:
        self.last_version += 1
        seat.version = self.last_version
        seat.key = seat.present_key()
        return seat.key, seat.state.order, seat.version, seat

    def enter(self, seat: _Seat) -> None:
        """Enter a seat whose key may have fallen."""
        if not seat.version or seat.key > seat.present_key():
            heapq.heappush(self.heap, self.entry(seat))

    def rebuild(self, policy: Policy, now: float) -> None:
        """Enter every seat anew, and sum up what is asked of all."""
        recent = rates = 0.0
        lowest = float("inf")
        for seat in self.seats:
            state = seat.state
            if state.usable(now):
                recent += state.recent_work(policy, now)
                rates += state.capacity.prefill_rate * state.share
                lowest = min(lowest, state.score)
            if self.adapter is not None:
                seat.extra = score.adapter_time(policy, self.adapter, seat.state.reading)
        self.lowest = lowest
        self.recent_per_rate = recent / rates if rates else 0.0
        self.heap = [self.entry(seat) for seat in self.seats]
        heapq.heapify(self.heap)
        fitting = [fit(seat.state) for seat in self.seats]
        known = [each for each in fitting if each]
        self.shortest = min(known, default=0)
        self.longest = max(known) if len(known) == len(fitting) and known else 0


def fit(state: EngineState) -> int:
    """Return the longest prompt that an engine can take, which leaves one token for the answer; 0 if that is not
    known."""
    found = state.engine.max_model_len
    if state.reading is not None and state.reading.kv_tokens is not None:
        found = min(found, state.reading.kv_tokens) if found else state.reading.kv_tokens
    return max(1, found - 1) if found else 0


class DecisionCore:
    """Members, readings, counts and ends in; decisions and caps out."""

    def __init__(self, settings: Settings, policy: Policy | None = None) -> None:
        self._settings = settings
        self.policy = policy or Policy()
        self._states: dict[str, EngineState] = {}
        self._pools: dict[str, _Pool] = {}
        self._lines: dict[str, Line] = {}
        self._requests: dict[str, InFlight] = {}
        self._drained: set[str] = set()
        self._gateways = 1
        self._turn = 0
        # No deadline is later, so that nothing waits longer.
        self._longest_retry = math.ceil(2 * max(kind.deadline for kind in self.policy.classes))
        self._heard_at = _NEVER
        self._lengths = OutputLengths(self.policy)
        self._use = RecentUse(self.policy.fairness_memory)
        self._forgotten_at = _NEVER
        self._unknown_model = Decision(Outcome.UNKNOWN_MODEL, status=404, reason="unknown_model")
        self._no_engine = Decision(
            Outcome.NO_HEALTHY_ENGINE, status=503, retry_after=settings.retry_after, reason="no_engine"
        )
        self._left_to_haproxy = Decision(Outcome.LEFT_TO_HAPROXY, reason="nothing_known")
        self.outcomes: dict[Outcome, int] = dict.fromkeys(Outcome, 0)
        self.estimated = 0
        # The record of the last request that was let in, for whoever keeps a log of decisions.
        self.last: InFlight | None = None
        # Whether a cap waits for its way to HAProxy, on which a request that was placed depends.
        self.urgent = False

    # Members --------------------------------------------------------------------------------------------------------

    def set_engines(self, engines: Iterable[Engine], gateways: int = 1) -> None:
        """Take a new list of engines, whose names differ, and the number of gateways that share them.

        What is known of an engine stays with it for as long as its name, address and port stay. An adapter's name that
        engines of several models have belongs to the first of these models.
        """
        self._gateways = max(1, gateways)
        former, self._states = self._states, {}
        lines: dict[str, Line] = {}
        pools: dict[str, _Pool] = {}
        for order, engine in enumerate(engines):
            line = lines.get(engine.model)
            if line is None:
                line = lines[engine.model] = self._lines.get(engine.model) or Line(engine.model, self.policy)
                line.states = []
            state = former.get(engine.name)
            if state is None or not _same(state.engine, engine):
                state = EngineState(engine, order, self.policy)
            else:
                del former[engine.name]
            state.engine = engine
            state.order = order
            state.line = line
            state.limit = min(state.limit, engine.max_num_seqs)
            state.drained = engine.name in self._drained
            state.closed = state.drained or not state.weight
            state.seats = []
            line.states.append(state)
            self._states[engine.name] = state
            for name in dict.fromkeys((engine.model, *engine.adapters)):
                pool = pools.get(name)
                if pool is None:
                    pool = pools[name] = _Pool(line, None if name == engine.model else name, self.policy)
                    if name in self._pools and self._pools[name].line is line:
                        pool.prefixes = self._pools[name].prefixes
                if pool.line is line:
                    seat = _Seat(pool, state)
                    pool.seats.append(seat)
                    state.seats.append(seat)
        for state in former.values():
            for request in tuple(state.held):
                self._forget(request)
        for model, line in self._lines.items():
            if model not in lines:
                for request in tuple(line.waiting):
                    self._forget(request)
        self._lines = lines
        self._pools = pools
        for state in self._states.values():
            state.price(self.policy)
            state.weigh(state.recent_at)
        for pool in pools.values():
            pool.rebuild(self.policy, max(state.recent_at for state in self._states.values()))

    def set_drained(self, names: Iterable[str]) -> None:
        """Take the names of the engines that get no more requests; names of no member are kept for when it comes."""
        self._drained = set(names)
        for name, state in self._states.items():
            state.drained = name in self._drained
            state.closed = state.drained or not state.weight
            self._reenter(state)

    @property
    def drained(self) -> frozenset[str]:
        """The names that were set, members or not."""
        return frozenset(self._drained)

    def set_weight(self, name: str, weight: float, now: float, reasons: tuple[Reason, ...] = ()) -> None:
        """Take an engine's health weight, 0 (it is out) to 1, and why. Raises KeyError for no member, ValueError out of
        range."""
        if not 0 <= weight <= 1:
            raise ValueError(f"expected a weight from 0 to 1, found {weight}")
        state = self._states[name]
        state.weight, state.reasons = weight, reasons
        state.closed = state.drained or not weight
        state.line.settle_pace(now)
        self._reenter(state)

    # What engines and HAProxy say -----------------------------------------------------------------------------------

    def record_reading(self, engine: Engine, reading: Reading) -> None:
        """Take a good reading of an engine; one that is older than the last, or of a former member, says nothing."""
        state = self._state(engine)
        if state is None or (state.reading is not None and reading.begun_at < state.reading.begun_at):
            return
        before, state.reading = state.reading, reading
        now = reading.begun_at
        state.healthy_until = now + self._settings.stale_after
        state.failure = ""
        young, unseen = 0, 0
        for request in reversed(state.held):
            assert request.placed_at is not None
            if request.placed_at <= now - self._settings.placement_grace:
                break
            young += 1
            unseen += request.prompt
        state.capacity.observe(before, reading, state.engine.max_num_seqs, unseen, state.line.mean_prompt)
        state.watermark.observe(before, reading)
        shown = reading.running + reading.waiting
        if not self._controlled(now):
            # Only the engine can tell what has ended.
            self._drop_oldest(state, len(state.held) - young - shown)
            state.unknown = 0
        state.foreign = max(0, shown - state.count)
        state.price(self.policy)
        state.weigh(now)
        self._reenter(state)

    def placed_at(self, name: str) -> tuple[float, ...]:
        """Return when each of this gateway's requests that an engine has was placed, the oldest first."""
        state = self._states.get(name)
        return () if state is None else tuple(request.placed_at or 0.0 for request in state.held)

    def record_failure(self, engine: Engine, reason: str, gone: bool = False) -> None:
        """Take a reading that failed. `gone` says that nothing listens there: no need to wait until the last good
        reading is stale."""
        state = self._state(engine)
        if state is not None:
            state.failure = reason
            if gone:
                state.healthy_until = _NEVER

    def record_counts(self, servers: Mapping[str, ServerCounts], waiting: Mapping[str, int], begun_at: float) -> None:
        """Take HAProxy's counts, which were asked for at `begun_at`: by engine, and of each model's queue.

        They are the truth about this gateway's requests. What the books have too much, beyond what may be under way,
        and twice in a row, has ended unheard; what they lack came before the scheduler's start, or left the queue
        unheard.
        """
        self._heard_at = begun_at
        for name, known in self._states.items():
            row = servers.get(name)
            avoided = not row.up if row is not None else known.engine.model in waiting
            known.avoided_until = begun_at + self.policy.control_timeout if avoided else _NEVER
            if row is not None and row.maxconn is not None:
                known.applied_cap = row.maxconn
        for model, line in self._lines.items():
            if model not in waiting:
                continue
            queued = waiting[model]
            lacking = [
                state
                for state in line.states
                if state.engine.name in servers and servers[state.engine.name].requests > len(state.held)
            ]
            settled = sum(request.at <= begun_at - _ON_THE_WAY for request in line.waiting)
            surplus = max(0, settled - queued)
            for _unused in range(min(surplus, line.surplus)):
                first = line.waiting.first()
                assert first is not None
                while lacking and servers[lacking[0].engine.name].requests <= len(lacking[0].held):
                    lacking.pop(0)
                if lacking:
                    self._take(first, lacking[0], begun_at)
                else:
                    self._forget(first)
            line.surplus = surplus
            line.waiting.unknown = max(0, queued - line.waiting.count)
            line.drain.observe(bool(line.waiting), begun_at)
        for name, counts in servers.items():
            state = self._states.get(name)
            if state is None:
                continue
            shown = counts.requests
            young = 0
            for request in reversed(state.held):
                assert request.placed_at is not None
                if request.placed_at <= begun_at - _ON_THE_WAY:
                    break
                young += 1
            surplus = max(0, len(state.held) - young - shown)
            self._drop_oldest(state, min(surplus, state.surplus))
            state.surplus = surplus
            state.unknown = max(0, shown - len(state.held))
            state.weigh(begun_at)
            self._reenter(state)

    def record_end(self, ended: Ended, now: float) -> None:
        """Take the end of a request. One that is not known, for it came before the scheduler's start, says nothing."""
        request = self._find(ended)
        if request is None:
            return
        state = request.state
        if state is not None and ended.engine is not None and state.engine.name != ended.engine:
            actual = self._states.get(ended.engine)
            if actual is not None:
                state.charge(-1.0)
                actual.charge(1.0)
                state.taken -= 1
                actual.taken += 1
            self._swap(request, state, ended.engine)
        self._forget(request)
        request.ended = ended
        state = None if ended.engine is None else self._states.get(ended.engine)
        if state is None:
            return
        if ended.status == 200:
            self._learn(request, ended, state, now)
        state.weigh(now)
        first = state.line.waiting.first()
        # The slot is free, and HAProxy has given it to whoever was first.
        has_room = state.applied_cap is not None and state.count < state.applied_cap and state.usable(now)
        if first is not None and has_room and not state.held_back:
            self._take(first, state, now)
        self._reenter(state)

    def _learn(self, request: InFlight, ended: Ended, state: EngineState, now: float) -> None:
        """Learn the answer's length from how far the engine's sequences came while it was decoded: nobody has counted
        its tokens."""
        if ended.total_time is None or request.placed_at is None:
            return
        served = min(ended.total_time - (ended.queue_time or 0.0), now - request.placed_at)
        # A stream's headers come at once, long before its first token; an answer in one piece comes at the end. Neither
        # tells when decoding began.
        first = request.prefill_time
        if ended.first_byte_time is not None and first < ended.first_byte_time <= 0.9 * served:
            first = ended.first_byte_time
        if served > 0:
            tokens = (state.capacity.position(now) - request.position) * max(0.0, 1 - first / served)
            self._lengths.learn(request.key_id, request.class_name, max(1.0, tokens))

    def applied(self, cap: Cap, now: float) -> None:
        """Note that HAProxy has taken a cap."""
        self._heard_at = max(self._heard_at, now)
        state = self._states.get(cap.engine)
        if state is not None:
            state.applied_cap = cap.maxconn
            state.granted = max(0, state.granted - cap.granted)

    # The decision ---------------------------------------------------------------------------------------------------

    def decide(self, request: Request, now: float) -> Decision:
        """Place a request, let it wait, or say why not.

        The scheduler refuses only what it knows to be hopeless: a model that no member serves (404), a prompt that
        fits no engine (400, 413), a pool whose engines were all asked and are all unhealthy or drained (503), a queue
        that is too long (429). While it knows nothing (no members yet, engines not read yet, readings stale because
        the scheduler itself stood still, or HAProxy could not tell the model) it leaves the request to HAProxy, which
        balances by itself. Its own ignorance must never be an outage: a restart of the scheduler under load would else
        answer 503 for engines that are all well.
        """
        self.last = None
        decision = self._decide(request, now)
        self.outcomes[decision.outcome] += 1
        return decision

    def _decide(self, request: Request, now: float) -> Decision:
        if request.model is None or not self._states:
            return self._left_to_haproxy
        pool = self._pools.get(request.model)
        if pool is None:
            return self._unknown_model
        line, policy = pool.line, self.policy
        tokens = request.prompt_tokens
        estimated = tokens is None
        if tokens is None:
            tokens = round(
                line.mean_prompt if request.body_bytes is None else request.body_bytes / policy.bytes_per_token
            )
            self.estimated += 1
        tokens = max(1, tokens)
        if pool.longest:
            refusal = self._too_long(pool, request, tokens, estimated)
            if refusal is not None:
                return refusal
            if estimated and tokens > pool.longest:
                tokens = pool.longest
        kind = policy.class_of(tokens)
        expected = self._lengths.expect(request.key_id, kind.name, request.max_tokens)
        patience = kind.deadline * (1 + self._use.excess(request.key_id))
        deadline = now + patience
        record = InFlight(
            request.id, request.model, request.key_id, kind.name, tokens, estimated, expected, now, deadline, line
        )
        priority = min(PRIORITY_LIMIT, round(patience * 1000))
        first = line.waiting.first()
        controlled = self._controlled(now)
        seat: _Seat | None = None
        reason = ""
        if first is None or deadline < first.deadline or not pool.whole or (pool.shortest and tokens > pool.shortest):
            seat, reason = self._pick(pool, record, request.prefix, controlled, now)
        elif not any(state.usable(now) for state in line.states):
            reason = "nobody"
        elif request.prefix is not None and first.deadline - now > kind.deadline / 2:
            # In the queue it would lose its engine, and cost several times as much. Who waits first has time enough.
            seat, reason = self._holder(pool, record, request.prefix, controlled, now), "prefix"
        if seat is not None:
            return self._place(record, seat, reason, request.prefix, priority, now)
        if reason == "nobody":
            return self._nobody(pool, now)
        if not controlled:
            return Decision(Outcome.QUEUED, priority=priority, reason="queued", retry_after=self._settings.retry_after)
        return self._queue(record, kind, priority, now)

    def _too_long(self, pool: _Pool, request: Request, tokens: int, estimated: bool) -> Decision | None:
        """Return the refusal of a prompt that fits no engine, None if it may fit one."""
        if not estimated:
            status = 400 if tokens > pool.longest else 0
        else:
            certain = (request.body_bytes or 0) / self.policy.bytes_per_token_most
            status = 413 if certain > pool.longest else 0
        if not status:
            return None
        return Decision(Outcome.PROMPT_TOO_LONG, status=status, reason="prompt_too_long")

    def _nobody(self, pool: _Pool, now: float) -> Decision:
        """Return the decision for a pool without a usable engine. Those that nobody could look at may be well."""
        for seat in pool.seats:
            state = seat.state
            unseen = not state.failure and now > state.healthy_until
            # One that is well and that HAProxy avoids: HAProxy then knows better what to say.
            avoided = now <= state.healthy_until and now <= state.avoided_until
            if not state.closed and (unseen or avoided):
                return self._left_to_haproxy
        return self._no_engine

    def _pick(
        self, pool: _Pool, record: InFlight, prefix: str | None, controlled: bool, now: float
    ) -> tuple[_Seat | None, str]:
        """Return the seat for a request, and why that one. Without one the reason is "nobody" if no engine is
        usable."""
        fits_all = not pool.shortest or record.prompt <= pool.shortest
        if fits_all:
            if prefix is not None:
                holder = self._holder(pool, record, prefix, controlled, now)
                if holder is not None:
                    return holder, "prefix"
            best = self._best(pool, controlled, now)
            if best is not None:
                return best, "least_loaded"
        if not fits_all or not pool.whole:
            return self._pick_fitting(pool, record, now)
        return None, "" if any(seat.state.usable(now) for seat in pool.seats) else "nobody"

    def _best(self, pool: _Pool, controlled: bool, now: float) -> _Seat | None:
        """Return the seat with the lowest key of those with room; its entry is then the heap's top."""
        heap = pool.heap
        window = self.policy.prefill_window if controlled else float("inf")
        while heap:
            key, _unused, version, seat = heap[0]
            state = seat.state
            if version != seat.version:
                heapq.heappop(heap)
            elif (
                now > state.healthy_until
                or state.closed
                or now <= state.avoided_until
                or len(state.held) + state.unknown >= state.limit
                or state.capacity.prefill_until - now >= window
                or (state.share < 1.0 and not state.may_take())
            ):
                heapq.heappop(heap)
                seat.version = 0
            elif key != (state.score + seat.extra, state.turn):
                heapq.heapreplace(heap, pool.entry(seat))
            else:
                return seat
        return None

    def _pick_fitting(self, pool: _Pool, record: InFlight, now: float) -> tuple[_Seat | None, str]:
        """Pick for a request that not every engine of the backend can take, so that it can't wait unbound: of those
        that can, the best, with or without room."""
        fitting = [
            seat
            for seat in pool.seats
            if seat.state.usable(now) and (not fit(seat.state) or fit(seat.state) >= record.prompt)
        ]
        free = [seat for seat in fitting if seat.state.count < seat.state.limit]
        in_turn = [seat for seat in free if seat.state.may_take()]
        seat = min(in_turn or free or fitting, key=_Seat.present_key, default=None)
        return seat, "nobody" if seat is None else "least_loaded"

    def _holder(self, pool: _Pool, record: InFlight, prefix: str, controlled: bool, now: float) -> _Seat | None:
        """Return the best of the engines that hold the prefix, if going there pays.

        It may have as much more than the window before it as the prefix saves.
        """
        names = pool.prefixes.holders(prefix, now)
        if not names:
            return None
        policy = self.policy
        found: _Seat | None = None
        for seat in [seat for name in names for seat in self._seats_of(name, pool)]:
            has_room = seat.state.usable(now) and seat.state.count < seat.state.limit and seat.state.may_take()
            if has_room and (found is None or seat.present_key() < found.present_key()):
                found = seat
        if found is None:
            return None
        state = found.state
        saved = policy.affinity_saving * record.prompt / state.capacity.prefill_rate
        if controlled and state.capacity.work(now) >= policy.prefill_window + saved:
            return None
        pays = score.affinity_pays(
            policy,
            state.recent_work(self.policy, now),
            pool.recent_per_rate * state.capacity.prefill_rate * state.share,
            record.prompt,
            found.present_key()[0] - pool.lowest,
            saved,
        )
        return found if pays else None

    def _seats_of(self, name: str, pool: _Pool) -> Iterator[_Seat]:
        state = self._states.get(name)
        return (seat for seat in (state.seats if state is not None else ()) if seat.pool is pool)

    def _place(
        self, record: InFlight, seat: _Seat, reason: str, prefix: str | None, priority: int, now: float
    ) -> Decision:
        state = seat.state
        self._remember(record)
        saving = self.policy.affinity_saving if reason == "prefix" else 0.0
        self._hold(record, state, now, saving)
        if prefix is not None:
            seat.pool.prefixes.use(prefix, state.engine.name, now)
        count = min(len(state.held) + state.unknown, state.limit)
        if count > state.cap:
            state.cap = count
            self.urgent = True
        record.decided = decision = Decision(Outcome.PLACED, state.engine.name, 0, None, priority, reason)
        return decision

    def _queue(self, record: InFlight, kind: RequestClass, priority: int, now: float) -> Decision:
        """Let a request wait, unless it could not start within its class's time."""
        line = record.line
        rate = line.drain_rate
        before = line.waiting.tokens_before(record.deadline, now) + line.waiting.unknown * line.mean_tokens
        wait = before / rate
        retry_after = max(1, min(self._longest_retry, round(wait)))
        if wait > kind.deadline:
            return Decision(Outcome.NOT_IN_TIME, status=429, retry_after=retry_after, reason="deadline")
        if not line.waiting:
            line.drain.observe(True, now)
        self._remember(record)
        line.waiting.enter(record)
        record.decided = decision = Decision(Outcome.QUEUED, None, 0, retry_after, priority, "queued")
        return decision

    # The books ------------------------------------------------------------------------------------------------------

    def _remember(self, record: InFlight) -> None:
        record.same_id = self._requests.get(record.id)
        self._requests[record.id] = record
        record.line.learn(record)
        self._use.use(record.key_id, record.tokens, record.at)
        self.last = record

    def _hold(self, request: InFlight, state: EngineState, now: float, saving: float = 0.0) -> None:
        """Put a request on an engine, which need not compute the share `saving` of its prompt."""
        request.state = state
        request.engine = state.engine.name
        request.terms = state.terms(now)
        request.placed_at = now
        state.held[request] = None
        state.tokens += request.prompt + request.expected
        state.expected += request.expected
        state.placements += 1
        state.taken += 1
        self._turn += 1
        state.turn = self._turn
        state.recent = state.recent_work(self.policy, now) + request.prompt + request.expected
        state.recent_at = now
        request.position = state.capacity.position(now)
        state.capacity.place(request.prompt * (1 - saving), now)
        request.prefill_time = state.capacity.prefill_until - now
        state.line.drain.took(request.prompt + request.expected)
        state.line.clock += state.line.tick
        state.charge(1.0)
        state.weigh(now)

    def _take(self, request: InFlight, state: EngineState, now: float) -> None:
        """Move a request from the line to the engine that HAProxy has given it to, as far as can be told."""
        line = request.line
        line.waiting.leave(request)
        request.guessed = True
        self._hold(request, state, now)
        if not line.waiting:
            line.drain.observe(False, now)

    def _release(self, request: InFlight, state: EngineState) -> None:
        del state.held[request]
        state.tokens -= request.prompt + request.expected
        state.expected -= request.expected
        request.state = None

    def _forget(self, request: InFlight) -> None:
        """Strike a request out of the books."""
        if request.waiting:
            request.line.waiting.leave(request)
        elif request.state is not None:
            self._release(request, request.state)
        known = self._requests.get(request.id)
        if known is request:
            if request.same_id is None:
                del self._requests[request.id]
            else:
                self._requests[request.id] = request.same_id
            return
        while known is not None:
            if known.same_id is request:
                known.same_id = request.same_id
                return
            known = known.same_id

    def _find(self, ended: Ended) -> InFlight | None:
        """Return the request that ended. Clients choose ids, so that several may have one: then the server tells, as
        far as it is known."""
        first = found = self._requests.get(ended.id)
        while found is not None:
            name = None if found.state is None else found.state.engine.name
            if name == ended.engine:
                return found
            found = found.same_id
        return first

    def _swap(self, request: InFlight, state: EngineState, name: str) -> None:
        """Put right that HAProxy gave two requests of the line the other way round, so that both engines' counts
        stay."""
        actual = self._states.get(name)
        if actual is None or not request.guessed:
            return
        for other in actual.held:
            if other.guessed:
                placed_at = other.placed_at
                self._release(other, actual)
                other.state = state
                other.placed_at = placed_at
                state.held[other] = None
                state.tokens += other.tokens
                state.expected += other.expected
                return

    def _drop_oldest(self, state: EngineState, count: int) -> None:
        for request in list(state.held)[: max(0, count)]:
            self._forget(request)

    def _state(self, engine: Engine) -> EngineState | None:
        state = self._states.get(engine.name)
        return state if state is not None and _same(state.engine, engine) else None

    def _reenter(self, state: EngineState) -> None:
        for seat in state.seats:
            seat.pool.enter(seat)

    def _controlled(self, now: float) -> bool:
        """Whether HAProxy follows the caps."""
        return now - self._heard_at <= self.policy.control_timeout

    # Caps -----------------------------------------------------------------------------------------------------------

    def adjust(self, now: float) -> None:
        """Look where room has come up, give it to those that wait, and set the caps; to be called 20 to 50 times a
        second.

        A cap that is raised lets HAProxy take from its queue at once, in order of deadline. So engines are filled one
        after the other, as they will be pushed.
        """
        if now - self._forgotten_at >= 1.0:
            self._forgotten_at = now
            self._use.forget(now)
        controlled = self._controlled(now)
        for line in self._lines.values():
            self._settle_capacities(line)
            line.settle(now)
            line.settle_pace(now)
            line.hold_back(now, controlled)
            line.drain.observe(bool(line.waiting), now)
            for state in line.states:
                state.price(self.policy)
                state.limit = self._limit(state)
                state.weigh(now)
            if line.waiting and controlled:
                self._fill(line, now)
            self._set_caps(line, now)
        for pool in self._pools.values():
            pool.rebuild(self.policy, now)

    @staticmethod
    def _settle_capacities(line: Line) -> None:
        """Let engines of one card know what the others have measured."""
        of_card: dict[str, list[Capacity]] = {}
        for state in line.states:
            of_card.setdefault(state.engine.card, []).append(state.capacity)
        for capacities in of_card.values():
            card = PrefillOfCard(capacities)
            for capacity in capacities:
                capacity.settle(card)

    def _limit(self, state: EngineState) -> int:
        """Return how many requests of this gateway an engine may hold; at a tenth of the weight it is a tenth."""
        most, reading = state.engine.max_num_seqs, state.reading
        free: float | None = None
        if reading is not None and reading.kv_tokens is not None:
            free = self.policy.watermark * reading.kv_tokens - state.needed()
        held = state.count + state.foreign
        limit = state.watermark.limit(most, held, free, state.line.mean_tokens)
        if state.share < 1.0:
            limit = max(1, round(limit * state.share))
        # What other gateways hold is theirs, but no gateway takes another's share.
        share = limit // self._gateways if self._gateways > 1 else 0
        return max(1, limit - state.foreign, share)

    def _fill(self, line: Line, now: float) -> None:
        window = self.policy.prefill_window
        for state in sorted(line.states, key=lambda state: (state.score, state.turn)):
            if not state.usable(now):
                continue
            while state.count < state.limit and state.capacity.work(now) < window:
                first = line.waiting.first()
                if first is None:
                    return
                if not state.may_take() and not (state.held_back and not state.count and _overdue(first, now)):
                    break
                self._take(first, state, now)
                state.granted += state.held_back

    def _set_caps(self, line: Line, now: float) -> None:
        window = self.policy.prefill_window
        waiting = bool(line.waiting)
        usable = {state for state in line.states if state.usable(now)}
        tight = waiting or any(state.capacity.work(now) >= window / 2 for state in usable)
        held = sum(state.count for state in usable)
        for state in line.states:
            if not state.weight:
                # Not one more from the queue, also before the look has drained it; 0 would be no limit.
                state.cap = 1
            elif state.held_back:
                # What it holds: more is placed by name, which raises it, or granted.
                state.cap = max(1, min(state.limit, state.count))
            elif waiting or (usable and state not in usable):
                # Who ends a request takes the next by itself; one that took more than its pace is not to.
                ahead = state.share < 1.0 and state.gained() < 0.0
                state.cap = min(state.limit, max(1, state.count - ahead))
            elif state.share < 1.0:
                # A slot that is seen free is taken by whatever finds no other one.
                state.cap = min(state.limit, max(1, state.count + int(max(0.0, state.gained()))))
            elif not tight:
                state.cap = state.limit
            else:
                room = (window - state.capacity.work(now)) * state.capacity.prefill_rate / line.mean_prompt
                state.cap = max(1, min(state.limit, state.count + max(0, int(room))))
            if state.share < 1.0 and not state.held_back:
                # What it is thought to hold may be a guess, and HAProxy fills whatever is let free.
                state.cap = min(state.cap, max(1, math.ceil(held * state.pace * line.tick)))

    def caps(self) -> list[Cap]:
        """Return the caps that HAProxy does not have yet, those first that let requests in."""
        self.urgent = False
        found = [
            (
                not state.granted and state.applied_cap is not None and state.cap < state.applied_cap,
                state.score,
                state.order,
                state,
            )
            for state in self._states.values()
            if state.cap != state.applied_cap or state.granted
        ]
        found.sort(key=lambda each: each[:3])
        states = [each[3] for each in found]
        return [Cap(state.line.model, state.engine.name, state.cap, state.granted) for state in states]

    # For people -----------------------------------------------------------------------------------------------------

    def views(self, now: float) -> list[EngineView]:
        """Return every engine as it stands, in the order of the members."""
        return [self._view(state, now) for state in self._states.values()]

    def _view(self, state: EngineState, now: float) -> EngineView:
        if now <= state.healthy_until:
            health, reason = Health.HEALTHY, state.failure
        elif state.failure:
            health, reason = Health.UNHEALTHY, state.failure
        elif state.reading is None:
            health, reason = Health.UNKNOWN, "not read yet"
        else:
            health, reason = Health.UNKNOWN, f"last read {now - state.reading.begun_at:.1f} s ago"
        return EngineView(
            engine=state.engine,
            health=health,
            reason=reason,
            drained=state.drained,
            weight=state.weight,
            share=state.share,
            held_back=state.held_back,
            reasons=state.reasons,
            over_watermark=state.watermark.over,
            avoided=now <= state.avoided_until and now <= state.healthy_until,
            reading=state.reading,
            held=state.count,
            foreign=state.foreign,
            tokens=state.tokens,
            limit=state.limit,
            cap=state.cap,
            prefill_rate=state.capacity.prefill_rate,
            sequence_rate=state.capacity.sequence_rate,
            terms=state.terms(now),
            placements=state.placements,
        )

    @property
    def models(self) -> tuple[str, ...]:
        """The models of the members."""
        return tuple(self._lines)

    def well(self, now: float) -> set[str]:
        """Return the engines that are healthy and not drained, whatever their weight."""
        return {name for name, state in self._states.items() if now <= state.healthy_until and not state.drained}

    def weights(self) -> dict[str, tuple[float, tuple[Reason, ...]]]:
        """Return every engine's health weight with the reasons for it."""
        return {name: (state.weight, state.reasons) for name, state in self._states.items()}

    def lines(self) -> list[LineView]:
        """Return the queue of every model."""
        return [
            LineView(line.model, tuple(line.waiting), line.waiting.unknown, line.waiting.tokens, line.drain_rate)
            for line in self._lines.values()
        ]

    @property
    def in_flight(self) -> int:
        """Requests in the books, on engines and in lines."""
        return sum(len(state.held) for state in self._states.values()) + sum(
            line.waiting.count for line in self._lines.values()
        )

    def shares(self) -> dict[str, float]:
        """Return each active key's share of the recent use."""
        return self._use.shares()

    def lengths(self) -> dict[str, dict[str, float]]:
        """Return the learnt lengths of answers by class and key, in tokens."""
        return self._lengths.document()


def _overdue(request: InFlight, now: float) -> bool:
    """Whether a request has waited so long that any engine will do."""
    return now - request.at > _PATIENCE * (request.deadline - request.at)


def _same(one: Engine, other: Engine) -> bool:
    """Whether two descriptions are of one engine that was not moved."""
    return (one.address, one.port, one.model) == (other.address, other.port, other.model)
