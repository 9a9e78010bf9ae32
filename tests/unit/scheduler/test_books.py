# SPDX-License-Identifier: GPL-3.0-or-later
"""The core against an HAProxy in miniature, in any order of events: nothing is lost, kept twice, or counted for
ever."""

from __future__ import annotations

import heapq
from collections import Counter

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from ringmaster_scheduler.core import DecisionCore, Settings
from ringmaster_scheduler.domain import Decision, Ended, Engine, Outcome, Reading, Request, ServerCounts
from ringmaster_scheduler.policy import Policy, RequestClass

SETTINGS = Settings(stale_after=1.0, placement_grace=0.3, retry_after=5)
POLICY = Policy(
    classes=(RequestClass("fast", 500, 2.0), RequestClass("slow", None, 10.0)),
    prefill_rate=1000.0,
    prefill_window=0.5,
    output_tokens=50,
    control_timeout=3.0,
)


def engine(name: str, model: str, adapters: tuple[str, ...], most: int, longest: int = 4000) -> Engine:
    return Engine(name, name, "192.0.2.1", 1, "vllm", model, adapters, "l40s", most, longest)


ENGINES = (
    engine("a", "m", ("sql",), 3),
    engine("b", "m", ("sql",), 2, 2000),
    engine("c", "m", (), 4),
    engine("d", "n", (), 2),
)
MODEL_OF = {each.name: each.model for each in ENGINES}


class Served:
    """A request as HAProxy has it."""

    def __init__(self, request_id: str, model: str, key: float) -> None:
        self.id = request_id
        self.model = model
        self.key = key
        self.server: str | None = None


class AgainstHaproxy(RuleBasedStateMachine):
    """HAProxy obeys decisions and caps; the test says what happens in the world. A twin core, told the same, must
    always decide the same."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.core = DecisionCore(SETTINGS, POLICY)
        self.twin = DecisionCore(SETTINGS, POLICY)
        self.members: tuple[Engine, ...] = ENGINES
        self.drained: set[str] = set()
        # What HAProxy holds for down, and what it said of that at the last look, and when.
        self.down: set[str] = set()
        self.told_down: set[str] = set()
        self.looked_at = 0.0
        # What HAProxy's queue passes over, by the last look.
        self.held_back: set[str] = set()
        self.queues: dict[str, list[tuple[float, int, Served]]] = {"m": [], "n": []}
        self.own: dict[str, list[tuple[float, int, Served]]] = {each.name: [] for each in ENGINES}
        self.served: dict[str, list[Served]] = {each.name: [] for each in ENGINES}
        self.caps = {each.name: each.max_num_seqs for each in ENGINES}
        self.arrived = 0
        self.waiting_since: dict[int, float] = {}
        for core in (self.core, self.twin):
            core.set_engines(self.members)
        self.look()
        self.read_all()
        self.adjust()

    # HAProxy ----------------------------------------------------------------------------------------------------------

    def fill(self, name: str, granted: bool = False) -> None:
        """Give free slots of a server to whoever is due first."""
        while len(self.served[name]) < self.caps[name]:
            queues = [self.own[name]]
            if granted or name not in self.held_back:
                queues.append(self.queues[MODEL_OF[name]])
            heads = [queue for queue in queues if queue]
            if not heads:
                return
            _key, _unused, request = heapq.heappop(min(heads, key=lambda queue: queue[0][:2]))
            self.serve(name, request)

    def serve(self, name: str, request: Served) -> None:
        request.server = name
        self.served[name].append(request)

    def least(self, model: str) -> str | None:
        free = [
            name
            for name in self.served
            if MODEL_OF[name] == model and name not in self.held_back and len(self.served[name]) < self.caps[name]
        ]
        return min(free, key=lambda name: len(self.served[name]), default=None)

    def end(self, request: Served, status: int, told: bool) -> None:
        if told:
            ended = Ended(request.id, request.server, status, 0.0, 0.1, 0.3)
            for core in (self.core, self.twin):
                core.record_end(ended, self.now)

    # Events -----------------------------------------------------------------------------------------------------------

    @rule(
        model=st.sampled_from(["m", "m", "m", "n", "sql", "other"]),
        prompt=st.integers(1, 5000),
        key=st.sampled_from(["one", "two", ""]),
        prefix=st.sampled_from([None, None, "p", "q"]),
        again=st.booleans(),
        known=st.booleans(),
    )
    def request_comes(self, model: str, prompt: int, key: str, prefix: str | None, again: bool, known: bool) -> None:
        self.arrived += 1
        request_id = "same" if again else f"r{self.arrived}"
        request = Request(model, request_id, prompt if known else None, 4 * prompt, None, key, prefix)
        before = self.core.in_flight
        decision = self.core.decide(request, self.now)
        assert decision == self.twin.decide(request, self.now)
        self.check(decision, model, prompt, known)
        let_in = decision.outcome in (Outcome.PLACED, Outcome.QUEUED)
        assert self.core.in_flight - before == int(self.core.last is not None)
        assert not (self.core.last is not None and not let_in)
        if decision.status:
            return
        backend = "m" if model == "sql" else model
        if backend not in self.queues:
            return
        served = Served(request_id, backend, self.now + (decision.priority or 0) / 1000)
        entry = (served.key, self.arrived, served)
        name = decision.engine
        if name is not None:
            heapq.heappush(self.own[name], entry)
            self.fill(name)
            return
        free = self.least(backend)
        if free is None:
            heapq.heappush(self.queues[backend], entry)
        else:
            self.serve(free, served)

    def check(self, decision: Decision, model: str, prompt: int, known: bool) -> None:
        """What holds for every decision."""
        assert (decision.engine is not None) == (decision.outcome is Outcome.PLACED)
        assert decision.priority is None or 0 < decision.priority <= 2 * 10_000
        assert decision.retry_after is None or 1 <= decision.retry_after <= 3600
        if decision.status in (429, 503):
            assert decision.retry_after is not None
        if decision.engine is None:
            return
        chosen = next(each for each in self.core.views(self.now) if each.engine.name == decision.engine)
        assert model in (chosen.engine.model, *chosen.engine.adapters)
        assert chosen.health.value == "healthy"
        assert not chosen.drained
        assert decision.engine not in self.told_down or self.now - self.looked_at > self.core.policy.control_timeout
        assert chosen.limit <= chosen.engine.max_num_seqs
        # What not every engine of the backend can take must not wait unbound, and waits before one that can.
        all_can = all(
            model in (each.model, *each.adapters) and prompt < each.max_model_len
            for each in self.members
            if each.model == chosen.engine.model
        )
        assert not all_can or chosen.held <= chosen.limit
        assert not known or prompt < chosen.engine.max_model_len

    @rule(seconds=st.floats(0, 0.7, allow_subnormal=False), running=st.integers(0, 9))
    def time_passes(self, seconds: float, running: int) -> None:
        self.now += seconds
        self.read_all(running)
        self.adjust()

    def read_all(self, others: int = 0) -> None:
        for each in self.members:
            running = len(self.served[each.name])
            reading = Reading(self.now, running, others % 2, min(1.0, running / 4), 20_000, others, running, running)
            for core in (self.core, self.twin):
                core.record_reading(each, reading)

    @rule()
    def adjust(self) -> None:
        for core in (self.core, self.twin):
            core.adjust(self.now)
        caps = self.core.caps()
        assert caps == self.twin.caps()
        for cap in caps:
            assert 1 <= cap.maxconn <= 4
            self.caps[cap.engine] = cap.maxconn
            for core in (self.core, self.twin):
                core.applied(cap, self.now)
            self.fill(cap.engine, cap.granted > 0)

    @rule(data=st.data(), status=st.sampled_from([200, 200, 500, 502]), told=st.booleans())
    @precondition(lambda self: any(self.served.values()))
    def request_ends(self, data: st.DataObject, status: int, told: bool) -> None:
        name = data.draw(st.sampled_from([name for name, served in self.served.items() if served]))
        request = self.served[name].pop(data.draw(st.integers(0, len(self.served[name]) - 1)))
        self.fill(name)
        self.end(request, status, told)

    @rule(data=st.data(), told=st.booleans())
    @precondition(lambda self: any(self.queues.values()))
    def client_leaves_the_queue(self, data: st.DataObject, told: bool) -> None:
        queue = self.queues[data.draw(st.sampled_from([name for name, queue in self.queues.items() if queue]))]
        _key, _unused, request = queue.pop(data.draw(st.integers(0, len(queue) - 1)))
        heapq.heapify(queue)
        self.end(request, 499, told)

    @rule()
    def look(self) -> None:
        servers = {
            each.name: ServerCounts(
                len(self.served[each.name]), len(self.own[each.name]), each.name not in self.down, self.caps[each.name]
            )
            for each in self.members
        }
        waiting = {name: len(queue) for name, queue in self.queues.items()}
        self.told_down, self.looked_at = self.down & servers.keys(), self.now
        self.held_back = {view.engine.name for view in self.core.views(self.now) if view.held_back}
        for core in (self.core, self.twin):
            core.record_counts(servers, waiting, self.now)

    @rule(names=st.sets(st.sampled_from("abcd")))
    def checks_of_haproxy_fail(self, names: set[str]) -> None:
        self.down = names

    @rule(names=st.sets(st.sampled_from("abcd")))
    def operator_drains(self, names: set[str]) -> None:
        self.drained = names
        for core in (self.core, self.twin):
            core.set_drained(names)

    @rule(name=st.sampled_from("abcd"), weight=st.sampled_from([0.0, 0.1, 0.5, 1.0, 1.0]))
    def health_moves(self, name: str, weight: float) -> None:
        if name in (each.name for each in self.members):
            for core in (self.core, self.twin):
                core.set_weight(name, weight, self.now)

    @rule(name=st.sampled_from("abcd"))
    def engine_dies(self, name: str) -> None:
        for core in (self.core, self.twin):
            core.record_failure(next(each for each in ENGINES if each.name == name), "down", gone=True)

    @rule(chosen=st.sets(st.sampled_from(ENGINES), min_size=1))
    def members_change(self, chosen: set[Engine]) -> None:
        self.members = tuple(sorted(chosen))
        # What was said of one that leaves is forgotten, and holds for it no more when it comes back.
        self.told_down &= {each.name for each in self.members}
        for core in (self.core, self.twin):
            core.set_engines(self.members, 2)

    @rule()
    def haproxy_restarts(self) -> None:
        """All it had is gone without a word."""
        for each in (*self.queues.values(), *self.own.values(), *self.served.values()):
            each.clear()  # type: ignore[attr-defined]
        self.caps = {each.name: each.max_num_seqs for each in ENGINES}
        self.held_back = set()

    # What always holds
    # --------------------------------------------------------------------------------------------------

    @invariant()
    def books_add_up(self) -> None:
        places: Counter[int] = Counter()
        for state in self.core._states.values():
            assert state.tokens == sum(request.tokens for request in state.held) >= 0
            assert state.expected == sum(request.expected for request in state.held) >= 0
            assert min(state.unknown, state.foreign, state.limit - 1, state.cap - 1) >= 0
            assert all(request.state is state and not request.waiting for request in state.held)
            places.update(id(request) for request in state.held)
        for line in self.core._lines.values():
            waiting = list(line.waiting)
            assert line.waiting.count == len(waiting)
            assert line.waiting.tokens == sum(request.tokens for request in waiting)
            assert line.waiting.tokens_before(self.now + 30, self.now) == line.waiting.tokens
            assert [request.deadline for request in waiting] == sorted(request.deadline for request in waiting)
            assert all(request.state is None and request.waiting for request in waiting)
            places.update(id(request) for request in waiting)
        assert set(places.values()) <= {1}
        known = set()
        for request in self.core._requests.values():
            while request is not None:
                known.add(id(request))
                request = request.same_id  # type: ignore[assignment]
        assert known == set(places)

    def teardown(self) -> None:
        """Whatever happened: HAProxy's counts settle everything, with or without the lines of its log."""
        for each in (*self.queues.values(), *self.own.values(), *self.served.values()):
            each.clear()  # type: ignore[attr-defined]
        for _unused in range(2):
            self.now += 1.0
            self.look()
        assert self.core.in_flight == 0
        assert self.core._requests == {}
        assert all(each.held == 0 and each.tokens == 0 for each in self.core.views(self.now))


TestAgainstHaproxy = AgainstHaproxy.TestCase
