# SPDX-License-Identifier: GPL-3.0-or-later
"""The decision core, in simulated time."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from ringmaster_scheduler.core import Decision, DecisionCore, Engine, Health, Outcome, Reading, Request, Settings

SETTINGS = Settings(stale_after=1.0, placement_grace=0.5, retry_after=7)


def make_engine(
    name: str, model: str = "m", adapters: tuple[str, ...] = (), max_num_seqs: int = 100, port: int = 1
) -> Engine:
    return Engine(name, name, "192.0.2.1", port, "vllm", model, adapters, "a100-80g", max_num_seqs)


def make_core(*engines: Engine, read_at: float | None = 0.0) -> DecisionCore:
    core = DecisionCore(SETTINGS)
    core.set_engines(engines)
    if read_at is not None:
        for engine in engines:
            core.record_reading(engine, Reading(read_at, 0, 0))
    return core


def placed(core: DecisionCore, now: float, count: int, model: str = "m") -> Counter[str | None]:
    return Counter(core.decide(Request(model), now).engine for _unused in range(count))


def view(core: DecisionCore, name: str, now: float) -> tuple[Health, str]:
    found = next(each for each in core.views(now) if each.engine.name == name)
    return found.health, found.reason


A, B, C = make_engine("a"), make_engine("b"), make_engine("c")


def test_least_loaded_engine_is_chosen() -> None:
    core = make_core(A, B, C)
    core.record_reading(A, Reading(0.1, 5, 0))
    core.record_reading(B, Reading(0.1, 2, 2))
    core.record_reading(C, Reading(0.1, 0, 6))
    assert core.decide(Request("m"), 0.2) == Decision(Outcome.PLACED, "b")


def test_waiting_requests_count_as_running_ones() -> None:
    core = make_core(A, B)
    core.record_reading(A, Reading(0.1, 1, 0))
    core.record_reading(B, Reading(0.1, 0, 2))
    assert core.decide(Request("m"), 0.2).engine == "a"


def test_load_is_relative_to_capacity() -> None:
    core = make_core(make_engine("small", max_num_seqs=50), make_engine("large", max_num_seqs=200))
    assert placed(core, 0.1, 250) == {"small": 50, "large": 200}


@given(count=st.integers(1, 9), requests=st.integers(0, 100))
def test_equal_engines_share_within_one(count: int, requests: int) -> None:
    core = make_core(*(make_engine(str(index)) for index in range(count)))
    shares = placed(core, 0.1, requests)
    assert sum(shares.values()) == requests
    assert max(shares.values(), default=0) - min(shares[str(index)] for index in range(count)) <= 1


def test_equal_engines_take_turns_when_requests_end_at_once() -> None:
    core = make_core(A, B, C)
    order = []
    for step in range(1, 10):
        now = step * 1.0
        for engine in (A, B, C):  # each reading shows an idle engine, and is late enough to settle all placements
            core.record_reading(engine, Reading(now, 0, 0))
        order.append(core.decide(Request("m"), now).engine)
    assert order == ["a", "b", "c"] * 3


def test_placement_counts_until_a_reading_that_must_have_seen_it() -> None:
    core = make_core(A, B)
    core.record_reading(B, Reading(0.0, 1, 0))
    assert core.decide(Request("m"), 0.25).engine == "a"
    for begun_at in (0.375, 0.7421875):  # too early: the request may still be on its way
        core.record_reading(A, Reading(begun_at, 0, 0))
        assert [each.placed for each in core.views(begun_at)] == [1, 0]
    core.record_reading(A, Reading(0.75, 1, 0))  # begun one grace later
    assert [(each.placed, each.load) for each in core.views(0.75)] == [(0, 0.01), (0, 0.01)]


def test_burst_between_readings_is_spread() -> None:
    core = make_core(A, B)
    core.record_reading(A, Reading(0.0, 10, 0))
    assert placed(core, 0.1, 30) == {"a": 10, "b": 20}


def test_older_reading_says_nothing() -> None:
    core = make_core(A)
    core.record_reading(A, Reading(0.5, 3, 0))
    core.record_reading(A, Reading(0.4, 9, 0))
    assert core.views(0.5)[0].load == 0.03


def test_stale_engine_is_not_chosen_and_comes_back() -> None:
    core = make_core(A, B)
    core.record_reading(B, Reading(0.8, 50, 0))
    assert placed(core, 1.0, 3) == {"a": 3}
    assert placed(core, 1.01, 3) == {"b": 3}
    core.record_reading(A, Reading(1.02, 0, 0))
    assert core.decide(Request("m"), 1.03).engine == "a"


def test_engine_where_nothing_listens_is_out_at_once() -> None:
    core = make_core(A, B)
    core.record_failure(A, "cannot connect: Connection refused", gone=True)
    assert placed(core, 0.1, 3) == {"b": 3}
    assert view(core, "a", 0.1) == (Health.UNHEALTHY, "cannot connect: Connection refused")


def test_one_failed_reading_is_forgiven_until_the_last_is_stale() -> None:
    core = make_core(A)
    core.record_failure(A, "no answer within 0.5 s")
    assert view(core, "a", 1.0) == (Health.HEALTHY, "no answer within 0.5 s")
    assert core.decide(Request("m"), 1.0).engine == "a"
    assert view(core, "a", 1.1) == (Health.UNHEALTHY, "no answer within 0.5 s")
    core.record_reading(A, Reading(1.2, 0, 0))
    assert view(core, "a", 1.2) == (Health.HEALTHY, "")


def test_unknown_model_is_refused() -> None:
    assert make_core(A).decide(Request("other"), 0.1) == Decision(Outcome.UNKNOWN_MODEL, status=404)


def test_pool_without_a_healthy_engine_is_refused_with_a_time() -> None:
    core = make_core(A, B, make_engine("z", model="other"))
    core.record_failure(A, "down", gone=True)
    core.record_failure(B, "down", gone=True)
    assert core.decide(Request("m"), 0.1) == Decision(Outcome.NO_HEALTHY_ENGINE, status=503, retry_after=7)
    assert core.decide(Request("other"), 0.1).engine == "z"


@pytest.mark.parametrize("model", ["m", "other"])
def test_without_members_everything_is_left_to_haproxy(model: str) -> None:
    assert DecisionCore(SETTINGS).decide(Request(model), 0.0) == Decision(Outcome.LEFT_TO_HAPROXY)


def test_before_the_first_reading_a_pool_is_left_to_haproxy() -> None:
    core = make_core(A, B, read_at=None)
    assert core.decide(Request("m"), 0.0) == Decision(Outcome.LEFT_TO_HAPROXY)
    core.record_failure(A, "down", gone=True)  # B may be well
    assert core.decide(Request("m"), 0.0) == Decision(Outcome.LEFT_TO_HAPROXY)
    assert view(core, "b", 0.0) == (Health.UNKNOWN, "not read yet")


def test_scheduler_that_stood_still_blames_no_engine() -> None:
    core = make_core(A, B)
    assert core.decide(Request("m"), 60.0) == Decision(Outcome.LEFT_TO_HAPROXY)
    assert view(core, "a", 60.0) == (Health.UNKNOWN, "last read 60.0 s ago")


def test_request_without_a_model_is_left_to_haproxy() -> None:
    assert make_core(A).decide(Request(None), 0.1) == Decision(Outcome.LEFT_TO_HAPROXY)


def test_adapter_goes_to_engines_that_hold_it() -> None:
    core = make_core(A, make_engine("b", adapters=("sql",)), make_engine("c", adapters=("sql", "chat")))
    assert set(placed(core, 0.1, 6, "sql")) == {"b", "c"}
    assert set(placed(core, 0.1, 2, "chat")) == {"c"}
    assert set(placed(core, 0.1, 9)) == {"a", "b", "c"}


def test_load_is_shared_by_all_names_of_an_engine() -> None:
    core = make_core(A, make_engine("b", adapters=("sql",)))
    assert placed(core, 0.1, 10, "sql") == {"b": 10}
    assert placed(core, 0.1, 10) == {"a": 10}
    assert placed(core, 0.1, 10) == {"a": 5, "b": 5}


def test_members_change_keeps_what_is_known_of_those_that_stay() -> None:
    core = make_core(A, B)
    core.record_reading(A, Reading(0.1, 4, 0))
    placed(core, 0.2, 3)
    grown = make_engine("a", adapters=("sql",), max_num_seqs=50)
    core.set_engines((C, grown))
    a = core.views(0.3)[1]
    assert (a.engine, a.health, a.load, a.placements) == (grown, Health.HEALTHY, 0.08, 0)
    assert core.decide(Request("sql"), 0.3).engine == "a"
    assert view(core, "c", 0.3) == (Health.UNKNOWN, "not read yet")


def test_engine_that_moved_is_a_new_one() -> None:
    core = make_core(A)
    moved = make_engine("a", port=2)
    core.set_engines((moved,))
    core.record_reading(A, Reading(0.1, 0, 0))  # of the former process, was under way
    core.record_failure(A, "down", gone=True)
    assert view(core, "a", 0.1) == (Health.UNKNOWN, "not read yet")
    core.record_reading(moved, Reading(0.1, 0, 0))
    assert core.decide(Request("m"), 0.1).engine == "a"


def test_heap_does_not_grow_with_readings() -> None:
    core = make_core(A, B)
    for step in range(1, 20_000):
        core.record_reading(A, Reading(step * 0.001, 20_000 - step, 0))
        core.decide(Request("m"), step * 0.001)
    assert len(core._pools["m"].heap) <= 64


class AgainstTheScan(RuleBasedStateMachine):
    """The core against the plain definition: of the healthy engines of the pool, the least key wins."""

    ENGINES = tuple(
        make_engine(name, model, adapters, capacity)
        for name, model, adapters, capacity in (
            ("a", "m", (), 10),
            ("b", "m", ("sql",), 10),
            ("c", "m", ("sql", "chat"), 20),
            ("d", "n", (), 10),
            ("e", "n", ("chat",), 5),
        )
    )

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.core = DecisionCore(SETTINGS)
        self.twin = DecisionCore(SETTINGS)
        self.members: tuple[Engine, ...] = ()

    @rule(chosen=st.sets(st.sampled_from(ENGINES)))
    def members_change(self, chosen: set[Engine]) -> None:
        self.members = tuple(sorted(chosen))
        self.core.set_engines(self.members)
        self.twin.set_engines(self.members)

    @rule(seconds=st.floats(0, 1.5, allow_subnormal=False))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds

    @rule(engine=st.sampled_from(ENGINES), running=st.integers(0, 9), waiting=st.integers(0, 3), age=st.floats(0, 0.5))
    def engine_is_read(self, engine: Engine, running: int, waiting: int, age: float) -> None:
        for core in (self.core, self.twin):
            core.record_reading(engine, Reading(self.now - age, running, waiting))

    @rule(engine=st.sampled_from(ENGINES), gone=st.booleans())
    def reading_fails(self, engine: Engine, gone: bool) -> None:
        for core in (self.core, self.twin):
            core.record_failure(engine, "down", gone)

    @rule(model=st.sampled_from(["m", "n", "sql", "chat", "other"]))
    @precondition(lambda self: self.members)
    def request_comes(self, model: str) -> None:
        before = {each.engine.name: each for each in self.core.views(self.now)}
        pool = [each for each in before.values() if model in (each.engine.model, *each.engine.adapters)]
        healthy = [each for each in pool if each.health is Health.HEALTHY]
        decision = self.core.decide(Request(model), self.now)
        assert decision == self.twin.decide(Request(model), self.now)
        if healthy:
            assert decision.outcome is Outcome.PLACED
            assert decision.engine is not None
            chosen = before[decision.engine]
            assert chosen in healthy
            assert chosen.load == min(each.load for each in healthy)
            after = next(each for each in self.core.views(self.now) if each.engine == chosen.engine)
            assert (after.placed, after.placements) == (chosen.placed + 1, chosen.placements + 1)
        elif not pool:
            assert decision.status == 404
        elif any(each.health is Health.UNKNOWN for each in pool):
            assert decision.outcome is Outcome.LEFT_TO_HAPROXY
        else:
            assert decision.status == 503

    @invariant()
    def loads_add_up(self) -> None:
        for each in self.core.views(self.now):
            seen = each.reading.running + each.reading.waiting if each.reading else 0
            assert each.load == (seen + each.placed) / each.engine.max_num_seqs
            assert 0 <= each.placed <= each.placements

    def teardown(self) -> None:
        """Whatever happened: readings begun a grace later settle every placement."""
        later = self.now + SETTINGS.placement_grace + 0.001  # for rounding
        for engine in self.members:
            self.core.record_reading(engine, Reading(later, 0, 0))
        assert all(each.load == 0 for each in self.core.views(later))


TestAgainstTheScan = AgainstTheScan.TestCase
