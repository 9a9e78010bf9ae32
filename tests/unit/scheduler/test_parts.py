# SPDX-License-Identifier: GPL-3.0-or-later
"""The parts of the decision, each alone: line, drain rate, watermark, capacity, lengths, fairness, prefixes."""

from __future__ import annotations

import asyncio
import json
import random
import socket
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringmaster_scheduler.affinity import PrefixMemory
from ringmaster_scheduler.capacity import Capacity, PrefillOfCard
from ringmaster_scheduler.core import Line
from ringmaster_scheduler.domain import Ended, Reading
from ringmaster_scheduler.drained import DrainedFile
from ringmaster_scheduler.fairness import RecentUse
from ringmaster_scheduler.in_flight import InFlight
from ringmaster_scheduler.lengths import OutputLengths
from ringmaster_scheduler.log_receiver import LineError, LogReceiver, parse
from ringmaster_scheduler.policy import Policy
from ringmaster_scheduler.score import adapter_time, affinity_pays
from ringmaster_scheduler.waiting import DrainRate, WaitingLine
from ringmaster_scheduler.watermark import Watermark

POLICY = Policy()


def waiting(number: int, at: float, patience: float, tokens: int) -> InFlight:
    return InFlight(f"r{number}", "m", "k", "fast", tokens, False, 0, at, at + patience, Line("m", POLICY))


class TestWaitingLine:
    @given(
        st.lists(st.tuples(st.floats(0, 2000), st.floats(0, 500), st.integers(1, 10**6)), max_size=60),
        st.randoms(use_true_random=False),
    )
    def test_against_the_plain_definition(self, asks: list[tuple[float, float, int]], source: random.Random) -> None:
        line = WaitingLine()
        present: list[InFlight] = []
        for number, (at, patience, tokens) in enumerate(sorted(asks)):
            for old in [each for each in present if each.at < at - 300]:  # as HAProxy's time-out does
                present.remove(old)
                line.leave(old)
            request = waiting(number, at, patience, tokens)
            line.enter(request)
            present.append(request)
            if source.random() < 0.3:
                gone = present.pop(source.randrange(len(present)))
                line.leave(gone)
            in_order = sorted(present, key=lambda each: (each.deadline, each.at))
            assert [each.deadline for each in line] == [each.deadline for each in in_order]
            first = line.first()
            assert (first.deadline if first else None) == (in_order[0].deadline if in_order else None)
            assert (line.count, line.tokens) == (len(present), sum(each.tokens for each in present))
            deadline = at + 250.0
            # Deadlines within one slot of a quarter of a second count together.
            sure = sum(each.tokens for each in present if each.deadline <= deadline - 0.25)
            possible = sum(each.tokens for each in present if each.deadline <= deadline + 0.25)
            assert sure <= line.tokens_before(deadline, at) <= possible

    def test_equal_deadlines_go_in_order_of_arrival(self) -> None:
        line = WaitingLine()
        for number in range(5):
            line.enter(waiting(number, 1.0, 2.0, 1))
        assert [each.id for each in line] == ["r0", "r1", "r2", "r3", "r4"]

    def test_heap_is_cleaned(self) -> None:
        line = WaitingLine()
        for number in range(2000):
            request = waiting(number, 1.0, 2.0 + number, 1)
            line.enter(request)
            if number % 100:
                line.leave(request)
        assert len(line._heap) <= 4 * line.count + 64


class TestDrainRate:
    def test_presumed_then_measured(self) -> None:
        rate = DrainRate(10.0)
        assert rate.value(500.0) == 500.0
        for step in range(1001):
            rate.observe(True, step * 0.01)
            rate.took(10)
        assert rate.value(500.0) == pytest.approx(1000, rel=0.05)

    def test_time_without_anybody_waiting_does_not_count(self) -> None:
        rate = DrainRate(10.0)
        for step in range(501):
            rate.observe(True, step * 0.01)
            rate.took(10)
        rate.observe(False, 5.0)
        rate.took(10**9)
        before = rate.value(1.0)
        rate.observe(True, 5.5)
        assert rate.value(1.0) == pytest.approx(before, rel=0.1)

    def test_standstill_is_slow_but_not_for_ever(self) -> None:
        rate = DrainRate(10.0)
        rate.observe(True, 0.0)
        rate.observe(True, 100.0)
        assert rate.value(500.0) == 1.0


class TestWatermark:
    @staticmethod
    def over(uses: list[float], interval: float = 0.25) -> list[bool]:
        watermark = Watermark(POLICY)
        found = []
        before: Reading | None = None
        for step, use in enumerate(uses):
            reading = Reading(step * interval, 1, 0, use, 1000, 0)
            watermark.observe(before, reading)
            before = reading
            found.append(watermark.over)
        return found

    def test_between_the_marks_nothing_changes(self) -> None:
        assert self.over([0.5, 0.8, 0.86, 0.8, 0.75, 0.71, 0.75, 0.7, 0.69, 0.69, 0.69, 0.8]) == [
            *[False] * 2,
            *[True] * 8,
            *[False] * 2,
        ]

    @given(st.lists(st.floats(0, 1), min_size=2, max_size=200))
    def test_it_changes_at_most_once_in_its_hold_time(self, uses: list[float]) -> None:
        found = self.over(uses)
        changes = [step * 0.25 for step in range(1, len(found)) if found[step] != found[step - 1]]
        assert all(later - earlier >= POLICY.watermark_hold for earlier, later in zip(changes, changes[1:]))

    def test_preemption_counts_at_once(self) -> None:
        watermark = Watermark(POLICY)
        readings = [Reading(0.0, 9, 0, 0.5, 1000, 3), Reading(0.25, 9, 0, 0.5, 1000, 4)]
        watermark.observe(None, readings[0])
        watermark.observe(*readings)
        assert watermark.over

    def test_engine_that_was_started_anew_has_not_preempted(self) -> None:
        watermark = Watermark(POLICY)
        watermark.observe(Reading(0.0, 9, 0, 0.5, 1000, 30), Reading(0.25, 0, 0, 0.0, 1000, 0))
        assert not watermark.over

    @pytest.mark.parametrize(
        ("over", "most", "held", "free", "limit"),
        [
            (False, 256, 10, None, 256),
            (False, 256, 10, 100_000, 110),
            (False, 256, 10, 10**9, 256),
            (False, 256, 10, -5, 16),
            (False, 256, 100, 0, 100),
            (False, 8, 3, -5, 8),
            (True, 256, 200, 10**9, 16),
            (True, 8, 3, 10**9, 8),
        ],
    )
    def test_limit(self, over: bool, most: int, held: int, free: float | None, limit: int) -> None:
        watermark = Watermark(POLICY)
        watermark.over = over
        assert watermark.limit(most, held, free, 1000.0) == limit


class TestCapacity:
    @staticmethod
    def learn(readings: list[Reading], most: int = 100, mean_prompt: float = 1000) -> Capacity:
        capacity = Capacity(POLICY)
        before: Reading | None = None
        for reading in readings:
            capacity.observe(before, reading, most, 0, mean_prompt)
            before = reading
        capacity.settle(PrefillOfCard([capacity]))
        return capacity

    def test_presumed_until_measured(self) -> None:
        idle = [Reading(step * 0.25, 0, 0, prompt_tokens=0, generation_tokens=0) for step in range(20)]
        assert self.learn(idle).prefill_rate == POLICY.prefill_rate

    @pytest.mark.parametrize(("running", "kv_use", "known"), [(50, 0.3, True), (99, 0.3, False), (50, 0.9, False)])
    def test_waiting_for_slots_or_memory_says_nothing_of_prefill(
        self, running: int, kv_use: float, known: bool
    ) -> None:
        busy = [
            Reading(step * 0.25, running, 5, kv_use, 10**6, 0, prompt_tokens=step * 250, generation_tokens=0)
            for step in range(20)
        ]
        assert (self.learn(busy).prefill_rate == pytest.approx(1000)) is known

    def test_long_prompts_that_are_counted_when_done_average_out(self) -> None:
        readings = []
        for step in range(200):
            at = step * 0.25
            done = int(at / 0.8) * 8000  # one prompt of 8,000 tokens after the other, 10,000 tokens/s
            readings.append(Reading(at, 2, 0 if step % 10 == 9 else 1, 0.3, 10**6, 0, done, 0))
        assert self.learn(readings).prefill_rate == pytest.approx(10_000, rel=0.2)

    def test_short_prompts_that_wait_for_the_end_of_a_step_say_nothing(self) -> None:
        """Twenty prompts of 25 tokens a second: two are always waiting, and all that waited are done a step later."""
        offered = [
            Reading(step * 0.25, 10, 2, 0.1, 10**6, 0, int(step * 0.25 * 20) * 25, step * 50) for step in range(200)
        ]
        assert self.learn(offered, mean_prompt=25).prefill_rate == POLICY.prefill_rate

    def test_work_falls_by_itself_and_is_pulled_back_by_an_empty_queue(self) -> None:
        capacity = Capacity(POLICY)
        for _unused in range(10):
            capacity.place(POLICY.prefill_rate, 5.0)  # a second each
        assert capacity.work(5.0) == pytest.approx(10)
        assert capacity.work(8.0) == pytest.approx(7)
        capacity.observe(None, Reading(8.0, 3, 0), 100, 0, 1000)
        assert capacity.work(8.0) == pytest.approx(1)
        assert capacity.work(100.0) == 0

    def test_position_is_what_a_sequence_produced(self) -> None:
        capacity = self.learn([Reading(step, 10, 0, generation_tokens=step * 300) for step in range(11)])
        assert capacity.position(10.0) == pytest.approx(300)
        assert capacity.position(10.5) == pytest.approx(315)
        assert capacity.sequence_rate == pytest.approx(30)

    @given(st.lists(st.tuples(*[st.integers(0, 10**9)] * 4), max_size=30))
    def test_whatever_counters_say_rates_are_over_0(self, counters: list[tuple[int, int, int, int]]) -> None:
        readings = [
            Reading(step * 0.25, running, waiting_now, 0.5, 1000, 0, prompt, generation)
            for step, (running, waiting_now, prompt, generation) in enumerate(counters)
        ]
        capacity = self.learn(readings)
        assert capacity.prefill_rate >= 1
        assert capacity.sequence_rate >= 1
        assert capacity.work(1000.0) == 0


class TestOutputLengths:
    def test_of_the_key_then_the_class_then_presumed(self) -> None:
        lengths = OutputLengths(POLICY)
        assert lengths.expect("a", "fast", None) == POLICY.output_tokens
        for _unused in range(20):
            lengths.learn("a", "fast", 40)
        assert lengths.expect("a", "fast", None) == 40
        assert lengths.expect("stranger", "fast", None) == 40
        assert lengths.expect("a", "slow", None) == POLICY.output_tokens
        for _unused in range(20):
            lengths.learn("b", "fast", 400)
        assert lengths.expect("a", "fast", None) == 40

    @pytest.mark.parametrize(("asked", "expected"), [(None, 40), (10, 10), (1000, 40), (0, 40)])
    def test_max_tokens_only_limits(self, asked: int | None, expected: int) -> None:
        lengths = OutputLengths(POLICY)
        for _unused in range(20):
            lengths.learn("a", "fast", 40)
        assert lengths.expect("a", "fast", asked) == expected

    def test_change_of_habit_is_followed(self) -> None:
        lengths = OutputLengths(POLICY)
        for tokens in [40] * 1000 + [400] * 500:
            lengths.learn("a", "fast", tokens)
        assert lengths.expect("a", "fast", None) == pytest.approx(400, rel=0.05)

    def test_many_keys_do_not_fill_the_memory(self) -> None:
        lengths = OutputLengths(POLICY)
        for number in range(12_000):
            lengths.learn(f"key-{number}", "fast", 40)
        assert len(lengths._of_key) <= 10_000


class TestRecentUse:
    def test_who_is_alone_is_never_slowed_down(self) -> None:
        use = RecentUse(60.0)
        use.use("a", 1000, 1e6)
        assert use.excess("a") == 0

    def test_excess_is_over_the_equal_share(self) -> None:
        use = RecentUse(60.0)
        for key, tokens in (("a", 900), ("b", 50), ("c", 50)):
            use.use(key, tokens, 5.0)
        assert use.excess("a") == pytest.approx((0.9 - 1 / 3) / (2 / 3))
        assert use.excess("b") == use.excess("c") == use.excess("stranger") == 0
        assert sum(use.shares().values()) == pytest.approx(1)

    def test_use_fades(self) -> None:
        use = RecentUse(60.0)
        use.use("a", 1000, 0.0)
        use.use("b", 1000, 120.0)
        assert use.excess("a") == 0
        assert use.excess("b") > 0.7
        use.use("b", 1, 900.0)
        use.forget(900.0)
        assert set(use.shares()) == {"b"}

    def test_forgetting_when_weights_are_brought_back_keeps_who_is_active(self) -> None:
        use = RecentUse(60.0)
        for now in range(0, 2401, 10):
            use.use("hog", 1000, float(now))
        use.forget(2400.5)
        assert use.shares() == {"hog": 1.0}

    @given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 10**7), st.floats(0, 10_000)), max_size=50))
    def test_excess_is_a_share_whatever_the_gaps(self, uses: list[tuple[str, int, float]]) -> None:
        use = RecentUse(60.0)
        now = 1e5
        for key, tokens, gap in uses:
            now += gap
            use.use(key, tokens, now)
            use.forget(now)
            assert all(0 <= use.excess(each) <= 1 + 1e-9 for each in "abc")


class TestPrefixMemory:
    def test_least_recently_used_goes_first(self) -> None:
        memory = PrefixMemory(Policy(affinity_prefixes=2, affinity_engines=2))
        for prefix, name in (("p", "a"), ("q", "a"), ("p", "b"), ("r", "a")):
            memory.use(prefix, name, 1.0)
        assert [memory.holders(prefix, 1.0) for prefix in "pqr"] == [["a", "b"], [], ["a"]]
        memory.use("p", "c", 1.0)
        assert memory.holders("p", 1.0) == ["b", "c"]
        assert memory.holders("p", 1.0 + POLICY.affinity_memory + 1) == []

    def test_none_are_kept_where_none_are_wanted(self) -> None:
        memory = PrefixMemory(Policy(affinity_prefixes=0))
        memory.use("p", "a", 1.0)
        assert len(memory) == 0


@pytest.mark.parametrize(
    ("load", "mean", "behind", "pays"), [(130, 100, 0.0, True), (136, 100, 0.0, False), (0, 0, 0.3, False)]
)
def test_affinity_has_a_bound(load: float, mean: float, behind: float, pays: bool) -> None:
    assert affinity_pays(POLICY, load, mean, 10, behind, 0.2) is pays


@pytest.mark.parametrize(
    ("adapter", "running", "most", "seconds"),
    [
        (None, ("chat",), 1, 0.0),
        ("sql", ("sql",), 1, 0.0),
        ("sql", ("chat",), 2, POLICY.adapter_load_time),
        ("sql", ("chat",), 1, POLICY.adapter_wait_time),
        ("sql", (), None, 0.0),
    ],
)
def test_adapter_that_is_not_there_costs(
    adapter: str | None, running: tuple[str, ...], most: int | None, seconds: float
) -> None:
    assert adapter_time(POLICY, adapter, Reading(0.0, 0, 0, adapters=running, max_adapters=most)) == seconds


class TestLogLine:
    def test_of_a_request_that_was_served(self) -> None:
        line = {
            "request_id": "r",
            "engine": "a.main",
            "status": 200,
            "ms_queue": 12,
            "ms_first_byte": 30,
            "ms_total": 900,
            "retries": "+1",
        }
        ended = parse(json.dumps(line).encode())
        assert ended == ("r", "a.main", 200, 0.012, 0.03, 0.9)

    def test_of_a_client_that_left_the_queue(self) -> None:
        line = b'{"request_id":"r","engine":"<NOSRV>","status":503,"ms_queue":-1,"ms_first_byte":-1,"ms_total":7}'
        assert parse(line) == ("r", None, 503, None, None, 0.007)

    @pytest.mark.parametrize("pool", ["public", "dispatch", "spoe-agents", 5, None])
    def test_of_a_request_that_no_pool_was_given(self, pool: Any) -> None:
        """Refused before the decision: its id may be that of a request that runs."""
        line = {"request_id": "r", "engine": "<NOSRV>", "status": 401, "pool": pool}
        assert parse(json.dumps(line).encode()) is None
        assert parse(json.dumps({**line, "pool": "pool_m"}).encode()) is not None

    async def test_line_that_makes_trouble_does_not_keep_the_next_ones_away(self) -> None:
        taken: list[str] = []

        def take(ended: Ended) -> None:
            taken.append(ended.id)
            if ended.id == "0":
                raise RuntimeError

        receiver = LogReceiver(take)
        asyncio.get_running_loop().set_exception_handler(lambda *_unused: None)
        receiver.start("127.0.0.1", 0)
        try:
            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender:
                for number in range(3):
                    line = {"request_id": str(number), "engine": "a", "status": 200}
                    sender.sendto(json.dumps(line).encode(), ("127.0.0.1", receiver.port))
            for _unused in range(1000):
                if len(taken) == 3:
                    break
                await asyncio.sleep(0.01)
            assert taken == ["0", "1", "2"]
        finally:
            receiver.close()

    @given(st.binary(max_size=200) | st.recursive(st.none() | st.integers() | st.text(), st.lists).map(json.dumps))
    def test_any_datagram_is_a_line_or_refused(self, datagram: bytes | str) -> None:
        try:
            parse(datagram if isinstance(datagram, bytes) else datagram.encode("utf-8", "surrogatepass"))
        except LineError:
            return


class TestDrainedFile:
    def test_names_are_kept(self, tmp_path: Path) -> None:
        file = DrainedFile(str(tmp_path / "drained.json"))
        assert file.load() == set()
        file.save({"b", "a"})
        assert file.load() == {"a", "b"}
        assert [path.name for path in tmp_path.iterdir()] == ["drained.json"]

    @pytest.mark.parametrize("content", [b"", b"\xff", b"{}", b"5", b'["a", 5]', b"[" * 100_000])
    def test_damaged_file_does_not_keep_the_daemon_from_its_start(self, tmp_path: Path, content: bytes) -> None:
        path = tmp_path / "drained.json"
        path.write_bytes(content)
        assert DrainedFile(str(path)).load() <= {"a"}
