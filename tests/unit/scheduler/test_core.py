# SPDX-License-Identifier: GPL-3.0-or-later
"""The decision core, in simulated time: who is picked, who waits, who is refused."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from ringmaster_scheduler.core import Cap, DecisionCore, EngineView, Settings
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
from ringmaster_scheduler.policy import Policy, RequestClass

SETTINGS = Settings(stale_after=1.0, placement_grace=0.5, retry_after=7)
POLICY = Policy(
    classes=(RequestClass("fast", 1000, 10.0), RequestClass("slow", None, 60.0)),
    prefill_window=0.5,
    prefill_rate=1000.0,
    sequence_rate=10.0,
    output_tokens=100,
    decode_weight=0.1,
)
LEFT = Decision(Outcome.LEFT_TO_HAPROXY, reason="nothing_known")


def make_engine(
    name: str,
    model: str = "m",
    adapters: tuple[str, ...] = (),
    max_num_seqs: int = 100,
    port: int = 1,
    max_model_len: int = 32768,
) -> Engine:
    return Engine(name, name, "192.0.2.1", port, "vllm", model, adapters, "a100-80g", max_num_seqs, max_model_len)


def make_core(
    *engines: Engine, read_at: float | None = 0.0, policy: Policy = POLICY, follows: bool = True, gateways: int = 1
) -> DecisionCore:
    """Return a core whose engines were read once, and whose HAProxy follows for as long as a test needs it."""
    core = DecisionCore(SETTINGS, replace(policy, control_timeout=60.0))
    core.set_engines(engines, gateways)
    if read_at is not None:
        for engine in engines:
            core.record_reading(engine, Reading(read_at, 0, 0))
    if follows:
        core.record_counts({}, {}, 0.0)
    core.adjust(0.0)
    if follows:
        push(core, 0.0)
    return core


def push(core: DecisionCore, now: float) -> dict[str, int]:
    """Give HAProxy the caps, and return them."""
    caps = core.caps()
    for cap in caps:
        core.applied(cap, now)
    return {cap.engine: cap.maxconn for cap in caps}


def ask(core: DecisionCore, now: float, prompt: int = 100, **arguments: Any) -> Decision:
    return core.decide(Request(arguments.pop("model", "m"), prompt_tokens=prompt, **arguments), now)


def placed(core: DecisionCore, now: float, count: int, model: str = "m") -> Counter[str | None]:
    return Counter(ask(core, now, prompt=1, model=model).engine for _unused in range(count))


def view(core: DecisionCore, name: str, now: float) -> EngineView:
    return next(each for each in core.views(now) if each.engine.name == name)


def health(core: DecisionCore, name: str, now: float) -> tuple[Health, str]:
    found = view(core, name, now)
    return found.health, found.reason


A, B, C = make_engine("a"), make_engine("b"), make_engine("c")


def test_when_what_an_engine_has_was_placed_is_told_while_it_has_it() -> None:
    core = make_core(A)
    for now in (0.1, 0.3):
        ask(core, now, id=f"r{now}")
    assert core.placed_at("a") == (0.1, 0.3)
    core.record_end(Ended("r0.1", "a", 200), 0.5)
    assert core.placed_at("a") == (0.3,)
    assert core.placed_at("nobody") == ()


class TestPick:
    def test_engine_with_the_least_prefill_before_it_is_chosen(self) -> None:
        core = make_core(A, B)
        first = ask(core, 0.1, prompt=400)
        assert [ask(core, 0.1, prompt=50).engine for _unused in range(4)].count(first.engine) == 0

    def test_prefill_is_over_after_its_time(self) -> None:
        core = make_core(A, B)
        first = ask(core, 0.1, prompt=400).engine
        core.adjust(0.8)
        core.record_end(Ended("", first, 200), 0.8)
        assert {ask(core, 0.9, prompt=1).engine, ask(core, 0.9, prompt=1).engine} == {"a", "b"}

    def test_work_is_relative_to_what_was_measured(self) -> None:
        slow = B._replace(card="l40s")
        core = make_core(A, slow, policy=replace(POLICY, prefill_window=60.0))
        for engine, tokens in ((A, 4000), (slow, 1000)):  # one prefills 4,000 tokens/s, the other 1,000
            for step in range(1, 9):
                core.record_reading(engine, Reading(step * 0.25, 9, 3, prompt_tokens=tokens * step // 4))
        core.adjust(2.0)
        assert [round(each.prefill_rate) for each in core.views(2.0)] == [4000, 1000]
        for engine in (A, slow):
            core.record_reading(engine, Reading(3.0, 0, 0))
        core.adjust(3.0)
        shares = Counter(ask(core, 3.0, prompt=100).engine for _unused in range(100))
        assert 76 <= shares["a"] <= 86

    def test_engines_of_one_card_lend_each_other_what_was_measured(self) -> None:
        core = make_core(A, B)
        for step in range(1, 9):
            core.record_reading(A, Reading(step * 0.25, 9, 3, prompt_tokens=1000 * step))
        core.adjust(2.0)
        assert [round(each.prefill_rate) for each in core.views(2.0)] == [4000, 4000]

    def test_requests_of_other_gateways_count(self) -> None:
        core = make_core(A, B)
        core.record_reading(A, Reading(0.1, 30, 0))
        core.adjust(0.1)
        assert placed(core, 0.1, 20) == {"b": 20}

    def test_fuller_memory_is_avoided(self) -> None:
        core = make_core(A, B)
        core.record_reading(A, Reading(0.1, 0, 0, kv_use=0.6, kv_tokens=100_000))
        core.record_reading(B, Reading(0.1, 0, 0, kv_use=0.1, kv_tokens=100_000))
        core.adjust(0.1)
        assert ask(core, 0.2).engine == "b"

    def test_equal_engines_take_turns(self) -> None:
        core = make_core(A, B, C)
        order = []
        for step in range(1, 7):
            order.append(ask(core, step * 1.0 - 0.9, id=str(step)).engine)
            core.record_end(Ended(str(step), order[-1], 200), step * 1.0 - 0.1)
            for engine in (A, B, C):
                core.record_reading(engine, Reading(step * 1.0 - 0.05, 0, 0))
            core.adjust(step * 1.0)
        assert order == ["a", "b", "c"] * 2

    def test_adapter_goes_to_engines_that_hold_it(self) -> None:
        core = make_core(A, make_engine("b", adapters=("sql",)), make_engine("c", adapters=("sql", "chat")))
        assert set(placed(core, 0.1, 6, "sql")) == {"b", "c"}
        assert set(placed(core, 0.1, 2, "chat")) == {"c"}
        assert set(placed(core, 0.1, 30)) == {"a", "b", "c"}

    def test_adapter_that_runs_is_preferred_to_one_that_had_to_be_loaded(self) -> None:
        holds, loads = make_engine("a", adapters=("sql",)), make_engine("b", adapters=("sql",))
        core = make_core(holds, loads)
        core.record_reading(holds, Reading(0.1, 1, 0, adapters=("sql",), max_adapters=1))
        core.record_reading(loads, Reading(0.1, 0, 0, adapters=("chat",), max_adapters=1))
        core.adjust(0.1)
        assert set(placed(core, 0.1, 3, "sql")) == {"a"}
        assert set(placed(core, 0.1, 3)) == {"b"}

    def test_adapter_of_a_part_of_the_engines_never_goes_unbound(self) -> None:
        core = make_core(A, make_engine("b", adapters=("sql",), max_num_seqs=3))
        assert [ask(core, 0.1, prompt=900, model="sql").engine for _unused in range(3)] == ["b"] * 3


class TestWeight:
    """What a health weight makes of an engine's share."""

    def shares(self, core: DecisionCore, engines: list[Engine], count: int = 400, overlap: int = 5) -> Counter[str]:
        """Place requests of which so many run at a time."""
        found: Counter[str] = Counter()
        running: list[Ended] = []
        for number in range(count):
            now = 0.2 + number * 0.05
            decision = ask(core, now, prompt=5, id=str(number))
            assert decision.engine is not None
            found[decision.engine] += 1
            running.append(Ended(str(number), decision.engine, 200))
            while len(running) > overlap:
                core.record_end(running.pop(0), now)
            for engine in engines:
                core.record_reading(engine, Reading(now, 0, 0))
            core.adjust(now)
            push(core, now)
        return found

    @pytest.mark.parametrize("overlap", [1, 5, 40])
    def test_tenth_of_the_weight_is_a_tenth_of_the_share_at_any_load(self, overlap: int) -> None:
        core = make_core(A, B, C)
        core.set_weight("a", 0.1, 0.1)
        found = self.shares(core, [A, B, C], 420, overlap)
        assert abs(found["a"] - 420 * 0.1 / 2.1) <= 2
        assert abs(found["b"] - found["c"]) <= 4

    def test_engine_that_fails_at_once_keeps_nothing_of_what_it_was_given_for_that(self) -> None:
        core = make_core(A, B, C)
        now = 0.2
        for number in range(600):
            now = 0.2 + number * 0.01
            for engine in (A, B, C):
                core.record_reading(engine, Reading(now, 0, 0))
            core.adjust(now)
            decision = ask(core, now, prompt=5, id=str(number))
            if decision.engine == "a":
                core.record_end(Ended(str(number), "a", 500), now)
            elif number > 30:
                core.record_end(Ended(str(number - 30), None, 200), now)
        assert view(core, "a", now).placements > 300
        core.set_weight("a", 0.1, now)
        assert Counter(self.shares_from(core, now, 600))["a"] <= 0.1 * 600 / 2.1 * 1.2

    def test_nobody_waits_long_while_one_that_is_held_back_has_nothing_to_do(self) -> None:
        core = make_core(A, B, C)
        core.set_weight("c", 0.5, 0.1)
        core.adjust(0.1)
        push(core, 0.1)
        for number in range(300):
            ask(core, 0.2, prompt=400, id=str(number))
        waiting = core.lines()[0].waiting
        assert waiting
        for request in list(core._states["c"].held):
            core.record_end(Ended(request.id, "c", 200), 0.3)
        granted = 0
        for step in range(1, 100):
            now = 0.3 + step * 0.1
            for engine in (A, B):
                core.record_reading(engine, Reading(now, 100, 50))
            core.record_reading(C, Reading(now, 0, 0))
            counts = {each.engine.name: ServerCounts(each.held, 0) for each in core.views(now)}
            core.record_counts(counts, {"m": len(core.lines()[0].waiting)}, now)
            core.adjust(now)
            granted += sum(cap.granted for cap in core.caps())
            if granted:
                break
        assert granted
        assert now - 0.2 < waiting[0].deadline - waiting[0].at

    def test_engine_that_had_next_to_nothing_still_gets_what_shows_that_it_has_recovered(self) -> None:
        core = make_core(A, B, C)
        # What it is given does not end, so that it is given no more.
        for number in range(600):
            now = 0.2 + number * 0.01
            for engine in (A, B, C):
                core.record_reading(engine, Reading(now, 0, 0))
            core.adjust(now)
            decision = core.decide(Request("m", str(number), prompt_tokens=5, prefix=None), now)
            if decision.engine != "a":
                core.record_end(Ended(str(number), decision.engine, 200), now)
        assert view(core, "a", now).placements < 10
        core.set_weight("a", 0.1, now)
        for number in range(600):
            core.record_end(Ended(str(number), "a", 200), now)
        assert 2 <= Counter(self.shares_from(core, now, 600))["a"] <= 12

    @staticmethod
    def shares_from(core: DecisionCore, begin: float, count: int) -> list[str | None]:
        """Engines of so many requests that end at once."""
        found = []
        for number in range(count):
            now = begin + number * 0.01
            for engine in (A, B, C):
                core.record_reading(engine, Reading(now, 0, 0))
            core.adjust(now)
            decision = ask(core, now, prompt=5, id=f"later-{number}")
            found.append(decision.engine)
            core.record_end(Ended(f"later-{number}", decision.engine, 200), now)
        return found

    def test_engine_is_held_back_while_two_others_are_left(self) -> None:
        core = make_core(A, B, C)
        core.set_weight("a", 0.1, 0.1)
        core.adjust(0.1)
        assert [each.held_back for each in core.views(0.1)] == [True, False, False]
        core.set_weight("b", 0.1, 0.1)
        core.adjust(0.1)
        assert not any(each.held_back for each in core.views(0.1))
        core.set_weight("b", 1.0, 0.1)
        core.set_drained(["c"])
        core.adjust(0.1)
        assert not any(each.held_back for each in core.views(0.1))

    def test_limit_and_cap_shrink_with_the_weight(self) -> None:
        core = make_core(A, B)
        core.set_weight("a", 0.1, 0.1)
        core.adjust(0.1)
        assert [each.limit for each in core.views(0.1)] == [10, 100]
        assert push(core, 0.1)["a"] <= 10
        core.set_weight("a", 0.001, 0.1)
        core.adjust(0.1)
        assert [each.limit for each in core.views(0.1)] == [1, 100]

    def test_weights_are_relative_to_the_best_usable_engine(self) -> None:
        core = make_core(A, B, C)
        for name, weight in (("a", 0.1), ("b", 0.1), ("c", 0.05)):
            core.set_weight(name, weight, 0.1)
        core.adjust(0.1)
        assert [each.share for each in core.views(0.1)] == [1.0, 1.0, 0.5]
        assert [each.limit for each in core.views(0.1)] == [100, 100, 50]
        core.set_drained(["a", "b"])
        core.adjust(0.2)
        assert view(core, "c", 0.2).share == 1.0
        assert {ask(core, 0.2, prompt=1).engine for _unused in range(20)} == {"c"}

    def test_engine_that_is_out_gets_nothing_even_as_the_last(self) -> None:
        core = make_core(A, B)
        core.set_weight("a", 0.0, 0.1, (Reason("hung", "engine/a", 0.0, "stands still", 0.1),))
        assert placed(core, 0.1, 20) == {"b": 20}
        assert view(core, "a", 0.1).reasons[0].rule == "hung"
        core.set_weight("b", 0.0, 0.1)
        decision = ask(core, 0.2)
        assert (decision.outcome, decision.status, decision.reason) == (Outcome.NO_HEALTHY_ENGINE, 503, "no_engine")
        core.set_weight("b", 1.0, 0.3)
        assert ask(core, 0.3).engine == "b"
        core.set_weight("a", 1.0, 0.4)
        assert view(core, "a", 0.4).share == 1.0

    def test_drain_and_out_end_each_by_itself(self) -> None:
        core = make_core(A, B)
        core.set_weight("a", 0.0, 0.1)
        core.set_drained(["a"])
        core.set_weight("a", 1.0, 0.1)
        assert placed(core, 0.1, 10) == {"b": 10}
        core.set_drained([])
        assert "a" in placed(core, 0.2, 10)

    def test_who_waits_is_not_taken_by_an_engine_that_is_out(self) -> None:
        core = make_core(make_engine("a", max_num_seqs=1), make_engine("b", max_num_seqs=1))
        for number in range(4):
            ask(core, 0.1, id=str(number))
        assert len(core.lines()[0].waiting) == 2
        core.set_weight("a", 0.0, 0.2)
        core.adjust(0.2)
        push(core, 0.2)
        core.record_end(Ended("0", "a", 200), 0.3)
        core.record_end(Ended("1", "b", 200), 0.3)
        core.adjust(0.3)
        held = {each.engine.name: each.held for each in core.views(0.3)}
        assert held == {"a": 0, "b": 1}

    def test_adapter_of_an_engine_of_low_weight_alone_still_goes_there(self) -> None:
        core = make_core(A, make_engine("b", adapters=("sql",)))
        core.set_weight("b", 0.1, 0.1)
        core.adjust(0.1)
        assert set(placed(core, 0.1, 5, "sql")) == {"b"}

    @pytest.mark.parametrize("weight", [-0.1, 1.1, float("nan")])
    def test_impossible_weight_is_refused(self, weight: float) -> None:
        core = make_core(A)
        with pytest.raises(ValueError, match="from 0 to 1"):
            core.set_weight("a", weight, 0.1)
        with pytest.raises(KeyError):
            core.set_weight("nobody", 1.0, 0.1)


class TestAffinity:
    def test_same_prefix_goes_to_the_same_engine(self) -> None:
        core = make_core(A, B, C)
        first = ask(core, 0.1, prefix="p", prompt=300)
        assert first.reason == "least_loaded"
        core.adjust(0.3)
        assert ask(core, 0.3, prefix="p", prompt=300) == first._replace(reason="prefix")
        assert ask(core, 0.3, prefix="q", prompt=300).engine != first.engine

    def test_prefix_is_not_worth_a_longer_wait(self) -> None:
        core = make_core(A, B)
        first = ask(core, 0.1, prefix="p", prompt=450)
        assert ask(core, 0.1, prefix="p", prompt=100).engine != first.engine

    def test_hot_prefix_spreads(self) -> None:
        core = make_core(A, B, C)
        shares: Counter[str | None] = Counter()
        now = 0.1
        for number in range(60):
            now += 0.05
            decision = ask(core, now, prefix="p", prompt=50, id=str(number))
            shares[decision.engine] += 1
            core.record_end(Ended(str(number), decision.engine, 200), now + 0.04)
            for engine in (A, B, C):
                core.record_reading(engine, Reading(now + 0.04, 0, 0))
            core.adjust(now + 0.04)
        assert max(shares.values()) <= 1.3 * 20
        assert min(shares.values()) > 0

    def test_dead_holder_is_no_holder(self) -> None:
        core = make_core(A, B)
        holder = {"a": A, "b": B}[str(ask(core, 0.1, prefix="p").engine)]
        core.record_failure(holder, "down", gone=True)
        assert ask(core, 0.1, prefix="p").engine not in (None, holder.name)

    def test_prefix_is_forgotten_in_time(self) -> None:
        core = make_core(A, B, policy=replace(POLICY, affinity_memory=1.0))
        ask(core, 0.1, prefix="p")
        core.record_reading(A, Reading(2.0, 0, 0))
        core.record_reading(B, Reading(2.0, 0, 0))
        assert ask(core, 2.0, prefix="p").reason == "least_loaded"


class TestQueue:
    def test_without_room_a_request_waits_unbound(self) -> None:
        core = make_core(A)
        assert ask(core, 0.1, prompt=600).engine == "a"
        decision = ask(core, 0.1, prompt=600)
        assert decision.outcome is Outcome.QUEUED
        assert (decision.engine, decision.status, decision.priority, decision.reason) == (None, 0, 10_000, "queued")
        assert decision.retry_after is not None

    def test_caps_hold_what_waits_and_let_it_in_when_room_comes_up(self) -> None:
        core = make_core(A)
        ask(core, 0.1, prompt=900)
        core.adjust(0.12)
        assert push(core, 0.12) == {"a": 1}
        ask(core, 0.2, prompt=900)
        core.adjust(0.22)
        assert push(core, 0.22) == {}
        core.adjust(0.6)  # 0.4 s of the first prompt are left, less than the window
        assert push(core, 0.6) == {"a": 2}
        assert core.lines()[0].waiting == ()
        core.record_reading(A, Reading(3.0, 2, 0))
        core.adjust(3.0)
        assert push(core, 3.0) == {"a": 100}

    def test_earlier_deadline_overtakes(self) -> None:
        core = make_core(A)
        ask(core, 0.1, prompt=600)
        assert ask(core, 0.15, prompt=2000).priority == 60_000
        core.adjust(0.3)
        push(core, 0.3)  # the slow one was let in
        ask(core, 0.31, prompt=2000, id="slow")
        ask(core, 0.32, prompt=100, id="fast")
        assert [request.id for request in core.lines()[0].waiting] == ["fast", "slow"]

    def test_request_before_all_that_wait_is_placed_at_once_and_its_cap_is_urgent(self) -> None:
        core = make_core(A, B)
        ask(core, 0.1, prompt=1900)
        ask(core, 0.1, prompt=1900)
        ask(core, 0.1, prompt=1900, id="slow")
        core.adjust(0.12)
        push(core, 0.12)
        core.record_reading(A, Reading(1.6, 1, 0))
        core.record_reading(B, Reading(1.6, 1, 0))
        core._states["a"].capacity.prefill_until = 1.6
        core._pools["m"].rebuild(core.policy, 1.6)
        decision = ask(core, 1.6, prompt=100)
        assert (decision.engine, core.urgent) == ("a", True)
        assert push(core, 1.6)["a"] == 2
        assert not core.urgent

    def test_end_lets_the_first_that_waits_in(self) -> None:
        core = make_core(make_engine("a", max_num_seqs=1))
        ask(core, 0.1, id="one")
        ask(core, 0.1, id="two")
        push(core, 0.1)
        core.record_end(Ended("one", "a", 200, 0.0, 0.1, 0.5), 0.6)
        assert core.lines()[0].waiting == ()
        assert (view(core, "a", 0.6).held, view(core, "a", 0.6).placements) == (1, 2)

    def test_client_that_leaves_the_queue_is_gone_from_it(self) -> None:
        core = make_core(make_engine("a", max_num_seqs=1))
        ask(core, 0.1, id="one")
        ask(core, 0.1, id="two")
        core.record_end(Ended("two", None, 499), 0.2)
        assert (core.lines()[0].waiting, core.in_flight) == ((), 1)

    def test_deadline_that_cannot_be_met_is_refused_with_the_time_it_takes(self) -> None:
        core = make_core(make_engine("a", max_num_seqs=1))
        core._states["a"].line.drain.value = lambda *_unused: 100.0  # type: ignore[method-assign]
        ask(core, 0.1)
        for _unused in range(5):
            assert ask(core, 0.1, prompt=100).outcome is Outcome.QUEUED  # 200 tokens each, with the answer
        decision = ask(core, 0.1, prompt=100)
        assert decision == Decision(Outcome.QUEUED, None, 0, 10, 10_000, "queued")
        assert ask(core, 0.1, prompt=100) == Decision(Outcome.NOT_IN_TIME, None, 429, 12, None, "deadline")
        assert ask(core, 0.1, prompt=2000).outcome is Outcome.QUEUED  # more patient

    def test_heavy_key_waits_behind_a_light_one_but_not_for_ever(self) -> None:
        core = make_core(make_engine("a", max_num_seqs=1))
        for number in range(8):
            ask(core, 0.1, prompt=100, key_id="heavy", id=f"heavy-{number}")
        core._use.forget(0.2)
        light = ask(core, 0.2, key_id="light")
        heavy = ask(core, 0.3, key_id="heavy")
        assert light.priority is not None
        assert heavy.priority is not None
        assert light.priority < heavy.priority <= 2 * 10_000

    def test_without_haproxys_ear_everything_is_placed(self) -> None:
        core = make_core(A, B, follows=False)
        assert all(ask(core, 0.1, prompt=600).engine is not None for _unused in range(20))

    def test_two_gateways_leave_each_other_room(self) -> None:
        core = make_core(A, gateways=2)
        core.record_reading(A, Reading(0.1, 80, 0))
        core.adjust(0.1)
        assert view(core, "a", 0.1).limit == 50
        core.record_reading(A, Reading(0.2, 10, 0))
        core.adjust(0.2)
        assert view(core, "a", 0.2).limit == 90


class TestRefusals:
    def test_unknown_model(self) -> None:
        assert ask(make_core(A), 0.1, model="other") == Decision(
            Outcome.UNKNOWN_MODEL, status=404, reason="unknown_model"
        )

    def test_pool_without_a_healthy_engine(self) -> None:
        core = make_core(A, B, make_engine("z", model="other"))
        core.record_failure(A, "down", gone=True)
        core.record_failure(B, "down", gone=True)
        assert ask(core, 0.1) == Decision(Outcome.NO_HEALTHY_ENGINE, None, 503, 7, None, "no_engine")
        assert ask(core, 0.1, model="other").engine == "z"

    def test_pool_whose_engines_are_all_drained(self) -> None:
        core = make_core(A, B)
        core.set_drained(["a", "b", "not there yet"])
        assert ask(core, 0.1).status == 503
        core.set_drained(["a"])
        assert placed(core, 0.1, 2) == {"b": 2}
        core.set_drained([])
        assert set(placed(core, 0.1, 4)) == {"a", "b"}

    @pytest.mark.parametrize(
        ("request_of", "status"),
        [
            ({"prompt_tokens": 999}, 0),
            ({"prompt_tokens": 1000}, 400),
            ({"prompt_tokens": 10**12}, 400),
            ({"prompt_tokens": None, "body_bytes": 15_000}, 0),
            ({"prompt_tokens": None, "body_bytes": 17_000}, 413),
            ({"prompt_tokens": None, "body_bytes": None}, 0),
            ({"prompt_tokens": -5}, 0),
        ],
    )
    def test_prompt_that_fits_no_engine(self, request_of: dict[str, Any], status: int) -> None:
        core = make_core(make_engine("a", max_model_len=1000))
        assert core.decide(Request("m", **request_of), 0.1).status == status

    def test_prompt_that_fits_some_goes_to_one_of_them(self) -> None:
        core = make_core(make_engine("small", max_model_len=1000), make_engine("large", max_model_len=100_000))
        assert [ask(core, 0.1, prompt=1500).engine for _unused in range(3)] == ["large"] * 3

    def test_memory_that_is_too_small_for_a_prompt(self) -> None:
        core = make_core(A)
        core.record_reading(A, Reading(0.1, 0, 0, kv_use=0.0, kv_tokens=500))
        core.adjust(0.1)
        assert ask(core, 0.1, prompt=500).status == 400


class TestHealth:
    def test_stale_engine_is_not_chosen_and_comes_back(self) -> None:
        core = make_core(A, B)
        core.record_reading(B, Reading(0.8, 50, 0))
        assert placed(core, 1.0, 3) == {"a": 3}
        assert placed(core, 1.01, 3) == {"b": 3}
        core.record_reading(A, Reading(1.02, 0, 0))
        assert ask(core, 1.03).engine == "a"

    def test_engine_where_nothing_listens_is_out_at_once(self) -> None:
        core = make_core(A, B)
        core.record_failure(A, "cannot connect: Connection refused", gone=True)
        assert placed(core, 0.1, 3) == {"b": 3}
        assert health(core, "a", 0.1) == (Health.UNHEALTHY, "cannot connect: Connection refused")

    def test_one_failed_reading_is_forgiven_until_the_last_is_stale(self) -> None:
        core = make_core(A)
        core.record_failure(A, "no answer within 0.5 s")
        assert health(core, "a", 1.0) == (Health.HEALTHY, "no answer within 0.5 s")
        assert ask(core, 1.0).engine == "a"
        assert health(core, "a", 1.1) == (Health.UNHEALTHY, "no answer within 0.5 s")
        core.record_reading(A, Reading(1.2, 0, 0))
        assert health(core, "a", 1.2) == (Health.HEALTHY, "")

    @pytest.mark.parametrize("model", ["m", "other"])
    def test_without_members_everything_is_left_to_haproxy(self, model: str) -> None:
        assert ask(DecisionCore(SETTINGS), 0.0, model=model) == LEFT

    def test_before_the_first_reading_a_pool_is_left_to_haproxy(self) -> None:
        core = make_core(A, B, read_at=None)
        assert ask(core, 0.0) == LEFT
        core.record_failure(A, "down", gone=True)  # B may be well
        assert ask(core, 0.0) == LEFT
        core.set_drained(["b"])  # but gets nothing
        assert ask(core, 0.0).status == 503
        assert health(core, "b", 0.0) == (Health.UNKNOWN, "not read yet")

    def test_scheduler_that_stood_still_blames_no_engine(self) -> None:
        core = make_core(A, B)
        assert ask(core, 60.0) == LEFT
        assert health(core, "a", 60.0) == (Health.UNKNOWN, "last read 60.0 s ago")

    def test_request_without_a_model_is_left_to_haproxy(self) -> None:
        assert make_core(A).decide(Request(None), 0.1) == LEFT

    def test_older_reading_says_nothing(self) -> None:
        core = make_core(A)
        core.record_reading(A, Reading(0.5, 3, 0))
        core.record_reading(A, Reading(0.4, 9, 0))
        assert view(core, "a", 0.5).foreign == 3


class TestMembers:
    def test_change_keeps_what_is_known_of_those_that_stay(self) -> None:
        core = make_core(A, B)
        core.record_reading(A, Reading(0.1, 4, 0))
        placed(core, 0.2, 3)
        held = view(core, "a", 0.2).held
        grown = make_engine("a", adapters=("sql",), max_num_seqs=50)
        core.set_engines((C, grown))
        a = view(core, "a", 0.3)
        assert (a.engine, a.health, a.foreign, a.held) == (grown, Health.HEALTHY, 4, held)
        assert core.in_flight == held
        assert ask(core, 0.3, model="sql").engine == "a"
        assert health(core, "c", 0.3) == (Health.UNKNOWN, "not read yet")

    def test_engine_that_moved_is_a_new_one(self) -> None:
        core = make_core(A)
        moved = make_engine("a", port=2)
        core.set_engines((moved,))
        core.record_reading(A, Reading(0.1, 0, 0))  # of the former process, was under way
        core.record_failure(A, "down", gone=True)
        assert health(core, "a", 0.1) == (Health.UNKNOWN, "not read yet")
        core.record_reading(moved, Reading(0.1, 0, 0))
        assert ask(core, 0.1).engine == "a"

    def test_drained_engine_that_comes_later_is_drained(self) -> None:
        core = make_core(A)
        core.set_drained(["b"])
        core.set_engines((A, B))
        core.record_reading(B, Reading(0.1, 0, 0))
        assert placed(core, 0.2, 3) == {"a": 3}

    def test_model_that_goes_takes_its_queue_along(self) -> None:
        core = make_core(make_engine("a", max_num_seqs=1))
        ask(core, 0.1)
        ask(core, 0.1)
        core.set_engines((make_engine("z", model="other"),))
        assert core.in_flight == 0


class TestBooks:
    def test_lost_end_is_made_up_for_by_haproxys_counts(self) -> None:
        core = make_core(A)
        ask(core, 0.1, id="lost")
        ask(core, 0.1, id="kept")
        for now in (0.3, 0.5):
            core.record_counts({"a": ServerCounts(1, 0)}, {"m": 0}, now)
        assert view(core, "a", 0.5).held == 1
        core.record_end(Ended("kept", "a", 200), 0.6)
        core.record_counts({"a": ServerCounts(0, 0)}, {"m": 0}, 0.8)
        assert view(core, "a", 0.8).held == 0

    def test_one_look_that_came_between_is_not_believed(self) -> None:
        core = make_core(A)
        ask(core, 0.1)
        core.record_counts({"a": ServerCounts(0, 0)}, {"m": 0}, 0.3)
        core.record_counts({"a": ServerCounts(1, 0)}, {"m": 0}, 0.5)
        core.record_counts({"a": ServerCounts(0, 0)}, {"m": 0}, 0.7)
        assert core.in_flight == 1

    def test_lost_end_is_made_up_for_by_readings_where_haproxy_says_nothing(self) -> None:
        core = make_core(A, follows=False)
        for _unused in range(5):
            ask(core, 0.1)
        core.record_reading(A, Reading(0.7, 2, 1))
        assert view(core, "a", 0.7).held == 3

    def test_restarted_scheduler_knows_at_once_what_is_under_way(self) -> None:
        core = make_core(A, B)
        core.record_counts({"a": ServerCounts(40, 0), "b": ServerCounts(3, 1)}, {"m": 5}, 0.1)
        core.adjust(0.1)
        assert [each.held for each in core.views(0.1)] == [40, 4]
        assert core.lines()[0].unknown == 5
        assert ask(core, 0.1).engine == "b"
        core.record_counts({"a": ServerCounts(0, 0), "b": ServerCounts(1, 0)}, {"m": 0}, 0.3)
        assert [each.held for each in core.views(0.3)] == [0, 1]
        assert core.lines()[0].unknown == 0

    def test_queue_that_drained_unheard_is_followed(self) -> None:
        core = make_core(make_engine("a", max_num_seqs=2), make_engine("b", max_num_seqs=2))
        for number in range(6):
            ask(core, 0.1, id=str(number), prompt=1)
        assert len(core.lines()[0].waiting) == 2
        core.set_weight("a", 1.0, 0.1)
        for now in (0.3, 0.5):
            core.record_counts({"a": ServerCounts(3, 0), "b": ServerCounts(2, 0)}, {"m": 0}, now)
        assert core.lines()[0].waiting == ()
        assert [each.held for each in core.views(0.5)] == [3, 2]

    def test_ids_that_clients_use_twice_are_two_requests(self) -> None:
        core = make_core(A, B)
        engines = [ask(core, 0.1, id="same").engine for _unused in range(2)]
        assert set(engines) == {"a", "b"}
        core.record_end(Ended("same", "b", 200), 0.2)
        assert [each.held for each in core.views(0.2)] == [1, 0]
        core.record_end(Ended("same", "a", 200), 0.3)
        core.record_end(Ended("same", "a", 200), 0.4)
        assert core.in_flight == 0

    def test_retry_on_another_engine_ends_once(self) -> None:
        core = make_core(A, B)
        first = ask(core, 0.1, id="retried").engine
        core.record_end(Ended("retried", "b" if first == "a" else "a", 200, 0.0, 0.1, 0.5), 0.6)
        assert core.in_flight == 0

    def test_length_of_answers_is_learnt_per_key_and_class(self) -> None:
        core = make_core(make_engine("a", max_num_seqs=4))
        now, made = 0.1, 0
        for number in range(12):
            key = "short" if number % 2 else "long"
            tokens = 20 if number % 2 else 200
            core.record_reading(A, Reading(now, 1, 0, generation_tokens=made))
            ask(core, now, id=str(number), key_id=key)
            made += tokens
            core.record_reading(A, Reading(now + 0.9, 1, 0, generation_tokens=made))
            core.record_end(Ended(str(number), "a", 200, 0.0, 0.0, 0.9), now + 0.9)
            now += 1.0
        learnt = core.lengths()["fast"]
        assert learnt["short"] == pytest.approx(20, abs=8)
        assert learnt["long"] == pytest.approx(200, abs=40)

    def test_cap_that_haproxy_lost_is_given_again(self) -> None:
        core = make_core(A, B)
        assert core.caps() == []
        core.record_counts({"a": ServerCounts(0, 0, maxconn=7), "b": ServerCounts(0, 0, maxconn=100)}, {"m": 0}, 0.1)
        assert core.caps() == [Cap("m", "a", 100)]

    def test_engine_that_haproxy_avoids_gets_nothing(self) -> None:
        core = make_core(A, B)
        for avoided in ({"a": ServerCounts(0, 0, up=False), "b": ServerCounts(0, 0)}, {"b": ServerCounts(0, 0)}):
            core.record_counts(avoided, {"m": 0}, 0.1)
            assert placed(core, 0.2, 6) == {"b": 6}
            assert [each.avoided for each in core.views(0.2)] == [True, False]
        core.record_counts({"a": ServerCounts(0, 0), "b": ServerCounts(0, 0)}, {"m": 0}, 0.3)
        assert placed(core, 0.4, 6)["a"] > 0
        # When all are avoided HAProxy knows what to say; the scheduler has nothing against them.
        core.record_counts(dict.fromkeys("ab", ServerCounts(0, 0, up=False)), {"m": 0}, 0.5)
        assert ask(core, 0.6) == LEFT

    def test_ill_engine_has_no_room_for_the_queue(self) -> None:
        core = make_core(A, B)
        core.record_failure(B, "hangs", gone=True)
        core.adjust(0.1)
        assert push(core, 0.1) == {"b": 1}
        core.record_failure(A, "hangs", gone=True)  # then HAProxy's own checks decide
        core.adjust(0.2)
        assert push(core, 0.2) == {"b": 100}

    def test_requests_of_other_gateways_or_of_a_former_haproxy_leave_no_room(self) -> None:
        core = make_core(A)
        core.record_reading(A, Reading(0.1, 100, 0))
        core.adjust(0.1)
        assert view(core, "a", 0.1).limit == 1

    def test_slot_that_is_free_on_a_drained_engine_takes_nobody(self) -> None:
        core = make_core(make_engine("a", max_num_seqs=1), make_engine("b", max_num_seqs=1))
        first = ask(core, 0.1, id="first").engine
        ask(core, 0.1, id="second")
        assert ask(core, 0.1, id="third").outcome is Outcome.QUEUED
        assert first is not None
        core.set_drained([first])
        core.record_end(Ended("first", first, 200), 0.2)
        assert view(core, first, 0.2).held == 0
        assert [each.id for each in core.lines()[0].waiting] == ["third"]

    @pytest.mark.parametrize(
        ("able", "other", "request_of"),
        [
            ({"adapters": ("sql",)}, {}, {"model": "sql"}),
            ({"max_model_len": 32768}, {"max_model_len": 4096}, {"prompt": 20_000}),
        ],
    )
    def test_what_not_every_engine_can_take_never_waits_unbound(
        self, able: dict[str, Any], other: dict[str, Any], request_of: dict[str, Any]
    ) -> None:
        a, b = make_engine("a", max_num_seqs=2, **able), make_engine("b", max_num_seqs=2, **other)
        core = make_core(a, b)
        assert [ask(core, 0.1, **request_of).engine for _unused in range(5)] == ["a"] * 5
        core.adjust(0.1)
        assert push(core, 0.1).get("a", 2) == 2  # those over its limit wait in its own queue
        core.record_failure(a, "hangs", gone=True)
        assert ask(core, 0.2, **request_of).status == 503

    def test_line_that_nobody_was_taken_from_for_a_while_is_no_reason_to_refuse_for_an_hour(self) -> None:
        core = make_core(make_engine("a", max_num_seqs=16), policy=replace(POLICY, prefill_window=60.0))
        for number in range(24):  # answers of 100 tokens take 10 s: 1.6 requests/s
            ask(core, 0.1, prompt=10, id=str(number))
        now = 0.1
        while now < 8:
            now += 0.1
            core.record_reading(make_engine("a", max_num_seqs=16), Reading(now, 16, 0))
            core.record_counts({"a": ServerCounts(16, 0)}, {"m": 8}, now)
            core.adjust(now)
        decision = ask(core, now, prompt=10, id="new")
        assert decision.outcome is Outcome.QUEUED
        refused = [each for each in (ask(core, now, prompt=10) for _unused in range(99)) if each.status == 429]
        assert refused
        assert all(each.retry_after is not None and 8 <= each.retry_after <= 30 for each in refused)

    def test_heap_does_not_grow(self) -> None:
        core = make_core(A, B)
        for step in range(1, 5_000):
            ask(core, step * 0.001, id=str(step), prompt=1)
            core.record_end(Ended(str(step), "a", 200), step * 0.001)
            core.record_reading(A, Reading(step * 0.001, 5_000 - step, 0))
            if step % 20 == 0:
                core.adjust(step * 0.001)
        assert len(core._pools["m"].heap) <= 100
        assert core.in_flight < 10
