# SPDX-License-Identifier: GPL-3.0-or-later
"""A site in simulated time: clients from a trace, HAProxy with its queues, a policy, and engines.

HAProxy is modelled as its documentation and the measurements have it: a request with a server goes there, or waits in
that server's own queue while it holds ``maxconn`` requests; one without goes to the server that ``leastconn`` chooses
among those with a free slot, or waits in the backend's queue. A slot that becomes free takes whichever head is first
in order of arrival plus priority offset. A queue's time-out, a client that leaves, a refusal: each ends the request.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from tests.bench.simulator.engines import Engine
from tests.bench.simulator.engines import Sequence as EngineSequence
from tests.bench.simulator.traces import Ask

ON_THE_WAY = 0.001
"""Seconds from the decision to the engine's queue: HAProxy, the network, the tokenizer."""


class Verdict(NamedTuple):
    """What a policy says: a server, or None for the backend's queue; or a refusal with a status and seconds to wait."""

    server: str | None = None
    priority: int = 0
    status: int = 0
    retry_after: int | None = None


class Request:
    """One request on its way; all times in seconds, None while it has not happened."""

    __slots__ = (
        "ask",
        "ended_at",
        "engine",
        "first_token_at",
        "id",
        "key",
        "left",
        "queued",
        "retry_after",
        "sequence",
        "started_at",
        "status",
    )

    def __init__(self, ask: Ask, number: int) -> None:
        self.ask = ask
        self.id = f"request-{number}"
        self.key = 0.0
        self.queued = False
        self.engine: str | None = None
        self.sequence: EngineSequence | None = None
        self.started_at: float | None = None
        self.first_token_at: float | None = None
        self.ended_at: float | None = None
        self.status = 0
        self.retry_after: int | None = None
        self.left = False

    @property
    def time_to_first_token(self) -> float | None:
        """Seconds from the client's request to its first token."""
        return None if self.first_token_at is None else self.first_token_at - self.ask.at


class Policy(Protocol):
    """Decides, and is told what the scheduler would be told."""

    name: str

    def start(self, site: Site) -> None:
        """Get to know the site, and schedule whatever happens by itself."""

    def decide(self, request: Request, now: float) -> Verdict:
        """Answer HAProxy's question."""

    def ended(self, request: Request, now: float) -> None:
        """Take the log line of a request that ended."""


class Server:
    """One server line of HAProxy's backend."""

    __slots__ = ("drained", "engine", "last_turn", "maxconn", "own_queue", "served", "up", "weight")

    def __init__(self, engine: Engine, maxconn: int) -> None:
        self.engine = engine
        self.maxconn = maxconn
        self.served: set[Request] = set()
        self.last_turn = 0
        self.own_queue: list[tuple[float, int, Request]] = []
        self.weight = 100
        self.up = True
        self.drained = False

    def has_slot(self, named: bool = False) -> bool:
        """Whether HAProxy would connect one more request. One that a decision has `named` goes to a drained server,
        too."""
        return self.up and (named or not self.drained) and len(self.served) < self.maxconn


class Site:
    """Everything, and the calendar of what happens next."""

    def __init__(
        self, engines: Sequence[Engine], policy: Policy, maxconn: int = 256, queue_timeout: float = 60.0
    ) -> None:
        self.now = 0.0
        self.servers = {engine.name: Server(engine, maxconn) for engine in engines}
        self.queue: list[tuple[float, int, Request]] = []
        self.policy = policy
        self.queue_timeout = queue_timeout
        self.requests: list[Request] = []
        self._calendar: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()
        self._open = 0

    def after(self, seconds: float, action: Callable[[], None]) -> None:
        """Do something later."""
        heapq.heappush(self._calendar, (self.now + seconds, next(self._numbers), action))

    def at(self, time: float, action: Callable[[], None]) -> None:
        """Do something at a moment."""
        heapq.heappush(self._calendar, (time, next(self._numbers), action))

    def every(self, seconds: float, action: Callable[[], None]) -> None:
        """Do something again and again, for as long as requests are open or to come."""

        def again() -> None:
            action()
            if self._open:
                self.after(seconds, again)

        self.after(seconds, again)

    def run(self, trace: Sequence[Ask]) -> list[Request]:
        """Play a trace to its end and return its requests."""
        self._open = len(trace)
        self.policy.start(self)
        for number, ask in enumerate(trace):
            request = Request(ask, number)
            self.requests.append(request)
            heapq.heappush(self._calendar, (ask.at, next(self._numbers), lambda request=request: self._arrive(request)))
        while self._calendar:
            self.now, _unused, action = heapq.heappop(self._calendar)
            action()
        return self.requests

    # HAProxy --------------------------------------------------------------------------------------------------------

    def _arrive(self, request: Request) -> None:
        verdict = self.policy.decide(request, self.now)
        request.retry_after = verdict.retry_after
        if verdict.status:
            self._end(request, verdict.status)
            return
        request.key = self.now + verdict.priority / 1000
        if request.ask.patience is not None:
            self.after(request.ask.patience, lambda: self._leave(request))
        server = self.servers.get(verdict.server) if verdict.server is not None else self._least_connections()
        if server is not None and server.has_slot(named=verdict.server is not None):
            self._serve(server, request)
            return
        request.queued = True
        queue = self.queue if server is None else server.own_queue
        heapq.heappush(queue, (request.key, next(self._numbers), request))
        self.after(self.queue_timeout, lambda: self._time_out(request))

    def _least_connections(self) -> Server | None:
        free = [server for server in self.servers.values() if server.has_slot() and server.weight]
        # Of several that have as few, the one whose last turn is longest ago, as HAProxy does.
        return min(free, key=lambda server: (len(server.served) / server.weight, server.last_turn), default=None)

    def set_maxconn(self, name: str, maxconn: int) -> None:
        """Do what ``set maxconn server`` does."""
        self.servers[name].maxconn = maxconn
        self._fill(self.servers[name])

    def grant(self, name: str, maxconn: int) -> None:
        """Do what ``set maxconn server`` does with a drained server that is ready for the moment."""
        server = self.servers[name]
        drained, server.drained = server.drained, False
        self.set_maxconn(name, maxconn)
        server.drained = drained

    def set_drained(self, name: str, drained: bool) -> None:
        """Do what ``set server state`` does with drain and ready."""
        self.servers[name].drained = drained
        self._fill(self.servers[name])

    def _fill(self, server: Server) -> None:
        while server.has_slot(named=True):
            queues = [server.own_queue, self.queue] if server.has_slot() else [server.own_queue]
            heads = [queue for queue in queues if self._clean(queue)]
            if not heads:
                return
            _key, _unused, request = heapq.heappop(min(heads, key=lambda queue: queue[0][0]))
            self._serve(server, request)

    @staticmethod
    def _clean(queue: list[tuple[float, int, Request]]) -> bool:
        """Drop what has left from the head of a queue; whether anything is left in it."""
        while queue and queue[0][2].ended_at is not None:
            heapq.heappop(queue)
        return bool(queue)

    def queued(self, name: str | None = None) -> int:
        """Requests that wait, in the backend's queue or in a server's own."""
        queue = self.queue if name is None else self.servers[name].own_queue
        return sum(request.ended_at is None for _key, _unused, request in queue)

    def _serve(self, server: Server, request: Request) -> None:
        request.queued = False
        request.engine = server.engine.name
        request.started_at = self.now
        server.served.add(request)
        server.last_turn = next(self._numbers)
        ask = request.ask
        request.sequence = EngineSequence(request, ask.prompt, ask.output, ask.prefix, ask.prefix_tokens)
        self.after(ON_THE_WAY, lambda: self._reach(server, request))

    def _time_out(self, request: Request) -> None:
        if request.queued and request.ended_at is None:
            self._end(request, 429)

    def _leave(self, request: Request) -> None:
        """The client gives up, unless it has a byte."""
        if request.ended_at is not None or request.first_token_at is not None:
            return
        request.left = True
        if request.engine is not None and request.sequence is not None:
            server = self.servers[request.engine]
            server.engine.remove(request.sequence)
            self._end(request, 499)
        else:
            self._end(request, 499)

    def _end(self, request: Request, status: int) -> None:
        if request.ended_at is not None:
            return
        request.status = status
        request.ended_at = self.now
        self._open -= 1
        if request.engine is not None:
            server = self.servers[request.engine]
            server.served.discard(request)
            self._fill(server)
        self.policy.ended(request, self.now)

    # Engines --------------------------------------------------------------------------------------------------------

    def _reach(self, server: Server, request: Request) -> None:
        if request.ended_at is not None:
            return
        assert request.sequence is not None
        engine = server.engine
        engine.add(request.sequence)
        if engine.busy_until is None:
            self._begin(engine)
        elif engine.interrupt(self.now):
            self._finish_later(engine)

    def _begin(self, engine: Engine) -> None:
        while not engine.begin(self.now):
            if not engine.waiting:
                return
        self._finish_later(engine)

    def _finish_later(self, engine: Engine) -> None:
        due = engine.busy_until
        assert due is not None

        def finish() -> None:
            if engine.busy_until != due:
                return  # a leap was cut short
            engine.finish(self.now, self._first_token, self._ended)
            self._begin(engine)

        heapq.heappush(self._calendar, (due, next(self._numbers), finish))

    def _first_token(self, sequence: EngineSequence) -> None:
        request = sequence.request
        assert isinstance(request, Request)
        request.first_token_at = self.now

    def _ended(self, sequence: EngineSequence) -> None:
        request = sequence.request
        assert isinstance(request, Request)
        self._end(request, 200)
