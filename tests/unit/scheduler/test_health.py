# SPDX-License-Identifier: GPL-3.0-or-later
"""The health rules in simulated time: what moves a weight, how soon, what moves it back, and what moves none."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ringmaster_scheduler.domain import Engine, Reading
from ringmaster_scheduler.health import HealthBook, Verdict
from ringmaster_scheduler.health_rules import Rule
from ringmaster_scheduler.merge import AgentState, parse
from tests.unit.scheduler.fake_agent import TABLE, FakeAgent, rules

HOSTS = ("a", "b", "c")


def make_engine(host: str, name: str = "main", card: str = "a100-80g", model: str = "m") -> Engine:
    return Engine(f"{host}.{name}", host, "192.0.2.1", 8100, "vllm", model, (), card, 256)


class Fleet:
    """Three hosts of one engine each, their agents, and the book that follows them; time goes in seconds."""

    def __init__(
        self,
        table: tuple[Rule, ...] | None = None,
        noise: bool = False,
        engines: Iterable[Engine] | None = None,
        readings: bool = True,
    ) -> None:
        self.now = 5000.0
        self.engines = list(engines) if engines is not None else [make_engine(host) for host in HOSTS]
        hosts = list(dict.fromkeys(engine.host for engine in self.engines))
        self.agents = {host: FakeAgent(host, seed, noise) for seed, host in enumerate(hosts)}
        self.book = HealthBook(rules() if table is None else table)
        self.book.set_members(self.engines, hosts, self.now)
        self.states = {host: AgentState(host) for host in hosts}
        self.connected: dict[str, bool] = dict.fromkeys(hosts, False)
        self.silent: set[str] = set()
        self.usable = {engine.name for engine in self.engines}
        self.readings = readings
        self.work = {engine.name: 0 for engine in self.engines}
        self.hanging: set[str] = set()
        self.started = dict.fromkeys(self.work, 1.7e9)
        self.verdicts: dict[str, Verdict] = {}
        self.history: list[tuple[float, dict[str, float]]] = []

    def step(self, before: Callable[[], None] | None = None) -> None:
        """Let a second pass."""
        self.now += 1.0
        for agent in self.agents.values():
            agent.advance()
        if before is not None:
            before()
        for host, agent in self.agents.items():
            if host in self.silent:
                self.connected[host] = False
            elif not self.connected[host]:
                self.hear(host, agent.snapshot(), True)
            else:
                self.hear(host, agent.change(), False)
        if self.readings:
            for engine in self.engines:
                self.read(engine)
        self.verdicts = self.book.evaluate(self.now, self.usable)
        self.history.append((self.now, {name: verdict.weight for name, verdict in self.verdicts.items()}))

    def read(self, engine: Engine) -> None:
        if engine.name not in self.hanging:
            self.work[engine.name] += 100
        work = self.work[engine.name]
        self.book.observe_reading(
            engine,
            Reading(
                self.now,
                8,
                0,
                generation_tokens=work,
                prompt_tokens=work,
                iterations=work,
                process_start=self.started[engine.name],
            ),
        )

    def hear(self, host: str, line: bytes, first: bool) -> None:
        message = parse(line)
        change = self.states[host].apply(message, first)
        self.connected[host] = True
        self.book.observe_agent(self.states[host], None if message.type == "alive" else change, self.now)

    def run(self, seconds: int, each: Callable[[], None] | None = None) -> None:
        for _unused in range(seconds):
            self.step(each)

    def until(
        self, weight: float, engine: str = "a.main", most: int = 4000, each: Callable[[], None] | None = None
    ) -> int:
        """Let time pass until an engine has a weight; return the seconds it took."""
        for passed in range(1, most + 1):
            self.step(each)
            if self.verdicts[engine].weight == pytest.approx(weight):
                return passed
        raise AssertionError(f"after {most} s {engine} has {self.verdicts[engine]}")

    def reasons(self, engine: str = "a.main") -> list[str]:
        return [reason.rule for reason in self.verdicts[engine].reasons]


def grow(values: dict[str, Any], key: str, by: float) -> Callable[[], None]:
    def act() -> None:
        values[key] += by

    return act


def put(values: dict[str, Any], **changes: Any) -> None:
    values.update(changes)


# Each rule by its own scenario ---------------------------------------------------------------------------------------


def test_lossy_port_gets_a_tenth_within_four_windows_and_is_back_after_six_good_ones() -> None:
    fleet = Fleet()
    fleet.run(97)  # somewhere within a window
    fleet.agents["a"].loss = 0.001
    assert fleet.until(0.1) <= 4 * 60 + 2
    assert fleet.reasons() == ["roce_retransmits"]
    assert "0.1" in fleet.verdicts["a.main"].reasons[0].text
    assert {fleet.verdicts[name].weight for name in ("b.main", "c.main")} == {1.0}
    fleet.agents["a"].loss = 0.0
    assert 5 * 60 <= fleet.until(1.0) <= 7 * 60 + 5


def test_two_bad_windows_are_not_three() -> None:
    fleet = Fleet()
    fleet.run(62)
    fleet.agents["a"].loss = 0.001
    fleet.run(110)
    fleet.agents["a"].loss = 0.0
    fleet.run(300)
    assert {weight for _unused, weights in fleet.history for weight in weights.values()} == {1.0}


def test_at_a_tenth_of_the_traffic_recovery_takes_longer_but_comes() -> None:
    fleet = Fleet()
    fleet.run(10)
    agent = fleet.agents["a"]
    agent.loss = 0.001
    fleet.until(0.1)
    agent.loss, agent.packets_per_second = 0.0, 500  # 30,000 a window, where 100,000 are asked
    passed = fleet.until(1.0)
    assert 6 * 4 * 60 - 120 <= passed <= 6 * 5 * 60 + 120


@pytest.mark.parametrize("packets_per_second", [0, 3])
def test_a_port_that_carries_next_to_nothing_recovers_too(packets_per_second: int) -> None:
    fleet = Fleet()
    fleet.run(10)
    agent = fleet.agents["a"]
    agent.loss = 0.001
    fleet.until(0.1)
    agent.loss, agent.packets_per_second = 0.0, packets_per_second
    assert fleet.until(1.0) <= 6 * 5 * 60 + 120


def test_a_port_that_loses_what_little_it_carries_does_not_recover() -> None:
    fleet = Fleet()
    fleet.run(10)
    agent = fleet.agents["a"]
    agent.loss = 0.001
    fleet.until(0.1)
    agent.packets_per_second = 500
    fleet.run(3600)
    assert fleet.verdicts["a.main"].weight == 0.1


def test_little_traffic_makes_no_port_bad() -> None:
    fleet = Fleet()
    agent = fleet.agents["a"]
    agent.loss, agent.packets_per_second = 0.01, 1000
    fleet.run(1800)
    assert fleet.reasons() == []


GROWING: list[tuple[str, str, str, float, float, int]] = [
    # rule, whose counter, which, growth a second, weight, seconds at most
    ("pcie_correctable_storm", "nic", "correctable", 50, 0.5, 4 * 30 + 2),
    ("pcie_correctable_storm", "gpu", "above_correctable", 50, 0.5, 4 * 30 + 2),
    ("pcie_uncorrected_errors", "nic", "nonfatal", 1, 0.1, 3 * 60 + 2),
    ("pcie_replays", "card", "pcie_replay_counter", 1, 0.5, 4 * 60 + 2),
    ("nvlink_errors", "links", "errors", 500, 0.5, 4 * 10 + 2),
    ("ecc_uncorrected", "card", "ecc_uncorrected_volatile", 1, 0.1, 2 * 10 + 2),
    ("throttled", "card", "clock_lost_seconds", 0.4, 0.6, 3 * 30 + 2),
    ("throttled", "card", "clock_lost_seconds", 0.99, 0.1, 3 * 30 + 2),
]


@pytest.mark.parametrize(("rule", "whose", "counter", "growth", "weight", "most"), GROWING)
def test_growing_counter(rule: str, whose: str, counter: str, growth: float, weight: float, most: int) -> None:
    fleet = Fleet()
    fleet.run(45)
    agent = fleet.agents["a"]
    values = {"card": agent.gpu, "links": agent.nvlink}.get(whose) or agent.pcie(whose)
    assert fleet.until(weight, most=most, each=grow(values, counter, growth)) <= most
    assert fleet.reasons() == [rule]
    back = TABLE[rule]["back"] * TABLE[rule]["window_s"]
    assert fleet.until(1.0) <= max(back, TABLE[rule]["hold_s"]) + 2 * TABLE[rule]["window_s"] + 5
    assert {fleet.verdicts[name].weight for name in ("b.main", "c.main")} == {1.0}


STATES: list[tuple[str, str, dict[str, Any], float]] = [
    ("pcie_link_narrow", "card", {"pcie_width": 8}, 0.5),
    ("pcie_link_narrow", "card", {"pcie_width": 1}, 0.1),
    ("pcie_link_narrow", "nic", {"width": 4}, 0.25),
    ("pcie_link_slow", "card", {"pcie_generation": 3}, 0.5),
    ("nvlink_down", "links", {"down": [2]}, 0.1),
    ("nvlink_down", "links", {"down": list(range(12))}, 0.1),
    ("nvlink_down", "links", {"links": 11}, 0.1),
    ("row_remap_failed", "card", {"remapped_rows_failed": True}, 0.0),
    ("card_lost", "card", {"state": "lost"}, 0.0),
    ("card_lost", "card", {"state": "reset_required"}, 0.0),
    ("card_lost", "card", {"state": "no_answer"}, 0.0),
    ("card_lost", "card", {"state": "failed"}, 0.0),
    ("card_lost", "card", {"state": "not_listed"}, 0.0),
    ("recovery_action", "card", {"recovery_action": "drain_and_reset"}, 0.0),
]


@pytest.mark.parametrize(("rule", "whose", "fault", "weight"), STATES)
def test_bad_state(rule: str, whose: str, fault: dict[str, Any], weight: float) -> None:
    fleet = Fleet()
    fleet.run(20)
    agent = fleet.agents["a"]
    values = {"card": agent.gpu, "links": agent.nvlink}.get(whose) or agent.pcie(whose)
    well = {key: values[key] for key in fault}
    values.update(fault)
    window = TABLE[rule]["window_s"]
    assert fleet.until(weight, most=1000) <= (TABLE[rule]["windows"] + 1) * (window + 1) + 2
    assert fleet.reasons() == [rule]
    fleet.run(300)
    assert fleet.verdicts["a.main"].weight == pytest.approx(weight)
    values.update(well)
    assert fleet.until(1.0) <= max(TABLE[rule]["back"] * window, TABLE[rule]["hold_s"]) + 3 * window + 2


def test_pending_remap_is_named_and_costs_nothing() -> None:
    fleet = Fleet()
    fleet.agents["a"].gpu["remapped_rows_pending"] = True
    fleet.run(60)
    assert fleet.reasons() == ["row_remap_pending"]
    assert fleet.verdicts["a.main"].weight == 1.0


def test_idle_card_may_slow_its_link_down() -> None:
    fleet = Fleet()
    put(fleet.agents["a"].gpu, pcie_generation=1, utilization_percent=0, clock_event_reasons=["gpu_idle"])
    put(fleet.agents["b"].gpu, pcie_generation=1, utilization_percent=20)
    fleet.run(300)
    assert fleet.reasons() == fleet.reasons("b.main") == []


def test_cards_without_nvlink_or_without_a_bridge_are_well() -> None:
    fleet = Fleet()
    put(fleet.agents["a"].nvlink, links=0, expected=0, down=[])
    put(fleet.agents["b"].nvlink, bridge=True, down=list(range(12)))
    put(fleet.agents["c"].nvlink, expected=None, bridge=None, down=list(range(12)))
    fleet.run(300)
    assert fleet.reasons() == fleet.reasons("b.main") == fleet.reasons("c.main") == []


@pytest.mark.parametrize("fault", [{"down": list(range(12))}, {"links": 0}])
def test_links_that_a_card_needs_no_bridge_for_are_missed_also_if_none_was_ever_up(fault: dict[str, Any]) -> None:
    fleet = Fleet()
    fleet.agents["a"].nvlink.update(fault)
    assert fleet.until(0.1) <= 20
    assert fleet.reasons() == ["nvlink_down"]


def test_bridge_that_fails_wholly_is_as_bad_as_one_that_fails_in_part() -> None:
    fleet = Fleet()
    links = fleet.agents["a"].nvlink
    links["bridge"] = True
    fleet.run(10)
    links["down"] = [2, 3]
    fleet.until(0.1)
    links["down"] = list(range(12))
    fleet.run(300)
    assert fleet.verdicts["a.main"].weight == 0.1


@pytest.mark.parametrize(
    ("code", "action", "driver", "rule", "weight"),
    [
        (95, "reset", None, "xid_fatal", 0.0),
        (79, "power_cycle", None, "xid_fatal", 0.0),
        (48, "drain", "none", "xid_overruled", 0.5),
        (61, "report", "none", "xid_noted", 1.0),
        (63, "reset_later", "none", "xid_noted", 1.0),
    ],
)
def test_xid(code: int, action: str, driver: str | None, rule: str, weight: float) -> None:
    fleet = Fleet()
    agent = fleet.agents["a"]
    agent.gpu["recovery_action"] = driver
    fleet.run(10)
    agent.xid(code, action)
    # The driver is asked in the same second; its word counts once it is later than the Xid.
    fleet.run(12)
    assert fleet.reasons() == [rule]
    assert fleet.verdicts["a.main"].weight == weight
    if weight < 1:
        assert 560 <= fleet.until(1.0) <= 640


def test_drivers_word_that_is_older_than_the_xid_does_not_outrank_it() -> None:
    fleet = Fleet()
    agent = fleet.agents["a"]
    fleet.run(10)
    agent.readers.remove("gpu")  # it hangs, as NVML does after some Xids
    fleet.run(1)
    agent.xid(119, "reset")
    fleet.run(6)
    assert fleet.reasons() == ["xid_fatal"]


def test_xids_of_applications_count_when_they_repeat() -> None:
    fleet = Fleet()
    fleet.run(10)
    for expected in ([], [], ["xid_of_applications"]):
        fleet.agents["a"].xid(31, "restart_application")
        fleet.run(30)
        assert fleet.reasons() == expected


def test_xids_of_applications_that_are_far_apart_do_not_count_together() -> None:
    fleet = Fleet()
    fleet.run(10)
    for _unused in range(4):
        fleet.agents["a"].xid(31, "restart_application")
        fleet.run(650)
    assert {weights["a.main"] for _unused, weights in fleet.history} == {1.0}


def test_xid_43_is_nothing() -> None:
    fleet = Fleet()
    fleet.agents["a"].xid(43, "none")
    fleet.run(60)
    assert fleet.reasons() == []


def test_silent_agent_costs_a_half_and_later_a_quarter_is_left() -> None:
    fleet = Fleet()
    fleet.run(10)
    fleet.silent.add("a")
    fleet.run(28)
    assert fleet.reasons() == []
    assert fleet.until(0.5) <= 20
    assert fleet.until(0.25) <= 620
    assert fleet.reasons() == ["agent_silent", "agent_silent_long"]
    fleet.run(3600)
    assert fleet.verdicts["a.main"].weight == 0.25
    fleet.silent.clear()
    assert fleet.until(1.0) <= 30


def test_agent_that_never_came_counts_as_silent() -> None:
    fleet = Fleet()
    fleet.silent.add("a")
    assert 30 < fleet.until(0.5) <= 50


def test_stale_reader_counts_but_not_while_the_whole_agent_is_silent() -> None:
    fleet = Fleet()
    fleet.run(10)
    fleet.agents["a"].readers.remove("gpu")
    assert 120 <= fleet.until(0.5) <= 140
    assert fleet.reasons() == ["reader_stale"]
    assert "gpu" in fleet.verdicts["a.main"].reasons[0].text
    fleet.agents["a"].readers.append("gpu")
    assert fleet.until(1.0) <= 40
    fleet.silent.add("a")
    fleet.run(400)
    assert fleet.reasons() == ["agent_silent"]


def fail_reader(agent: FakeAgent, name: str) -> None:
    agent.readers.remove(name)
    agent.unknown[name] = "NVML gives no answer"


def test_reader_that_can_not_read_stays_stale_over_restarts_of_its_agent() -> None:
    fleet = Fleet()
    fleet.run(10)
    agent = fleet.agents["a"]
    fail_reader(agent, "gpu")
    fleet.until(0.5)
    for _unused in range(3):
        restart_agent(fleet)
        agent.read.pop("gpu", None)
        reasons, agent.unknown = agent.unknown, {}  # it takes a while until it knows
        fleet.run(40)
        agent.unknown = reasons
        fleet.run(60)
        assert fleet.verdicts["a.main"].weight == 0.5
    agent.readers.append("gpu")
    agent.unknown = {}
    assert fleet.until(1.0) <= 40


def test_reader_that_never_read_since_the_hosts_start_is_stale() -> None:
    fleet = Fleet()
    agent = fleet.agents["a"]
    fail_reader(agent, "nvlink")
    fail_reader(fleet.agents["b"], "xid")  # a journal without the kernel's lines, as in a container
    assert 120 <= fleet.until(0.5) <= 140
    assert fleet.reasons() == ["reader_stale"]
    fleet.run(200)
    assert fleet.reasons("b.main") == []


def test_reader_whose_hardware_is_gone_is_not_waited_for() -> None:
    fleet = Fleet()
    fleet.run(10)
    agent = fleet.agents["a"]
    agent.readers.remove("rdma")
    restart_agent(fleet)
    agent.subjects = {name: values for name, values in agent.subjects.items() if not name.startswith("port/")}
    fleet.run(400)
    assert {weights["a.main"] for _unused, weights in fleet.history} == {1.0}


@pytest.mark.parametrize("period", [1, 6, 8, 20, 60])
@pytest.mark.parametrize(("rule", "fault"), [("card_lost", {"state": "lost"}), ("pcie_link_narrow", {"pcie_width": 8})])
def test_states_are_seen_however_seldom_the_hardware_is_read(rule: str, fault: dict[str, Any], period: int) -> None:
    fleet = Fleet()
    agent = fleet.agents["a"]
    agent.interval = period
    fleet.run(3 * period)
    agent.gpu.update(fault)
    fleet.until(0.0 if rule == "card_lost" else 0.5, most=8 * max(period, 10))
    assert fleet.reasons() == [rule]
    agent.gpu.update(state="ok", pcie_width=16)
    fleet.until(1.0, most=20 * max(period, 10))


def test_reader_that_a_silent_card_makes_slow_still_tells_of_it() -> None:
    fleet = Fleet()
    fleet.run(10)
    agent = fleet.agents["a"]
    agent.gpu["state"] = "no_answer"
    agent.interval = 17
    fleet.until(0.0, most=120)


def test_adapter_is_judged_while_the_cards_can_not_be_read() -> None:
    fleet = Fleet()
    fleet.agents["a"].readers.remove("gpu")
    fleet.agents["a"].pcie("nic")["width"] = 8
    assert fleet.until(0.5) <= 60
    assert fleet.reasons() == ["pcie_link_narrow"]


def test_agent_of_a_host_that_is_being_started_is_not_held_against_it() -> None:
    fleet = Fleet()
    fleet.run(10)
    fleet.silent.add("a")
    engines, fleet.engines = fleet.engines, [engine for engine in fleet.engines if engine.host != "a"]
    fleet.run(600)
    assert fleet.reasons() == []
    fleet.engines = engines
    fleet.silent.clear()
    fleet.run(20)
    assert fleet.reasons() == []


def test_scheduler_that_stood_still_holds_its_own_silence_against_nobody() -> None:
    fleet = Fleet()
    fleet.run(10)
    fleet.silent.update(HOSTS)
    fleet.now += 500
    fleet.step()
    fleet.silent.clear()
    fleet.run(20)
    assert {weight for _unused, weights in fleet.history for weight in weights.values()} == {1.0}


# The engine itself ---------------------------------------------------------------------------------------------------


def test_hung_engine_is_out_within_ten_seconds_and_back_after_its_restart() -> None:
    fleet = Fleet()
    fleet.run(10)
    fleet.hanging.add("a.main")
    assert 8 <= fleet.until(0.0) <= 10
    assert fleet.reasons() == ["hung"]
    fleet.run(100)
    assert fleet.verdicts["a.main"].weight == 0.0
    fleet.started["a.main"] += 100
    fleet.work["a.main"] = 0
    assert fleet.until(1.0) <= 2


def test_hung_is_seen_without_any_agent_and_takes_even_the_last_engine_out() -> None:
    engine = make_engine("a")
    book = HealthBook(rules())
    book.set_members([engine], [], 0.0)
    for step in range(40):
        book.observe_reading(engine, Reading(step * 0.25, 3, 0, generation_tokens=5, iterations=9))
    assert book.evaluate(10.0, {"a.main"})["a.main"].weight == 0.0


def test_busy_engine_is_never_hung() -> None:
    """500 requests wait for ten minutes; long prompts are prefilled in chunks, so that for up to 20 s no token comes
    and only iterations tell."""
    engine = make_engine("a")
    book = HealthBook(rules())
    book.set_members([engine], [], 0.0)
    source = random.Random(2)
    tokens = prompts = iterations = 0
    now, calm = 0.0, 0.0
    while now < 600:
        now += 0.25
        iterations += source.choice([0, 1, 1, 2])
        if now >= calm:
            tokens += 40
            prompts += 1000
            if source.random() < 0.05:
                calm = now + source.uniform(0, 20)
        book.observe_reading(
            engine,
            Reading(now, 256, 500, generation_tokens=tokens, prompt_tokens=prompts, iterations=iterations),
        )
        assert book.evaluate(now, {"a.main"})["a.main"].weight == 1.0


def test_engine_that_tells_no_counter_or_has_nothing_to_do_is_not_hung() -> None:
    engine = make_engine("a")
    book = HealthBook(rules())
    book.set_members([engine], [], 0.0)
    for step in range(200):
        book.observe_reading(engine, Reading(step * 0.25, 3, 0))
    for step in range(200, 400):
        book.observe_reading(engine, Reading(step * 0.25, 0, 0, generation_tokens=5, prompt_tokens=5, iterations=5))
    assert book.evaluate(100.0, {"a.main"})["a.main"].weight == 1.0


def test_hung_engine_whose_clients_have_all_left_is_tried_again() -> None:
    engine = make_engine("a")
    book = HealthBook(rules())
    book.set_members([engine], [], 0.0)
    for step in range(60):
        book.observe_reading(engine, Reading(step * 0.25, 3, 0, generation_tokens=5))
    assert book.evaluate(15.0, set())["a.main"].weight == 0.0
    for step in range(60, 60 + 4 * 9):
        book.observe_reading(engine, Reading(step * 0.25, 0, 0, generation_tokens=5))
    assert book.evaluate(24.0, set())["a.main"].weight == 1.0


class Lone:
    """One engine whose readings a test makes by hand, four a second; its agent is that of host a."""

    def __init__(self) -> None:
        self.engine = make_engine("a")
        silent = {"enabled": False}
        self.book = HealthBook(rules(agent_silent=silent, agent_silent_long=silent, reader_stale=silent))
        self.book.set_members([self.engine], ["a"], 0.0)
        self.agent = FakeAgent("a")
        self.state = AgentState("a")
        self.now = 0.0
        self.tokens = 5
        self.heard = False

    def run(self, seconds: float, running: int = 0, waiting: int = 0, placed: Iterable[float] = ()) -> float:
        """Return the engine's weight after some seconds."""
        for _unused in range(int(seconds * 4)):
            self.now += 0.25
            self.agent.seconds += 0.25
            reading = Reading(self.now, running, waiting, generation_tokens=self.tokens, iterations=self.tokens)
            self.book.observe_reading(self.engine, reading, tuple(placed))
        return self.weight

    @property
    def weight(self) -> float:
        return self.book.evaluate(self.now, {"a.main"})["a.main"].weight

    def miss(self) -> None:
        """A question of the canary was not answered within 30 s."""
        self.agent.canary("a.main", None, error="no answer within 30 s", took=30.0)
        line = self.agent.change() if self.heard else self.agent.snapshot()
        change = self.state.apply(parse(line), not self.heard)
        self.heard = True
        self.book.observe_agent(self.state, change, self.now)


def test_engine_that_hangs_with_requests_that_only_wait_is_hung_and_not_let_back() -> None:
    lone = Lone()
    assert lone.run(20) == 1.0
    assert lone.run(7, waiting=50) == 1.0
    assert lone.run(3, waiting=50) == 0.0
    assert lone.run(120, waiting=50) == 0.0
    lone.tokens += 1
    assert lone.run(1, waiting=50) == 1.0


def test_engine_that_hung_while_it_was_idle_shows_no_request_and_is_found_by_what_was_placed_there() -> None:
    lone = Lone()
    lone.run(20)
    placed = [lone.now]
    assert lone.run(7, placed=placed) == 1.0
    assert lone.run(3, placed=placed) == 0.0
    # Its clients leave; that it shows nothing says nothing, and after three minutes it is tried again.
    assert lone.run(170) == 0.0
    assert lone.run(20) == 1.0


def test_idle_engine_whose_client_is_slow_to_take_the_answer_is_not_hung() -> None:
    lone = Lone()
    lone.run(20)
    placed = [lone.now]
    lone.tokens += 20
    assert lone.run(300, placed=placed) == 1.0


def test_two_questions_without_any_answer_or_progress_are_a_hang() -> None:
    lone = Lone()
    lone.run(20)
    weights = []
    for _unused in range(3):
        lone.run(60)
        lone.miss()
        weights.append(lone.weight)
    assert weights == [1.0, 0.0, 0.0]
    assert lone.run(300) == 0.0
    lone.tokens += 1
    assert lone.run(1) == 1.0


def test_busy_engine_that_is_late_with_the_canary_is_not_hung() -> None:
    lone = Lone()
    for _unused in range(600):
        lone.tokens += 40
        assert lone.run(1, waiting=500) == 1.0
        if int(lone.now) % 60 == 0:
            lone.miss()
    assert lone.weight == 1.0


def test_votes_of_seldom_questions_do_not_fade_before_the_next_and_out_stays_out_until_then() -> None:
    fleet = Fleet()
    period = 2400

    def ask(wrong: bool) -> None:
        for engine in fleet.engines:
            text = f"g-{fleet.now}" if wrong and engine.name == "b.main" else "right"
            fleet.agents[engine.host].canary(engine.name, text, interval=period)
            fleet.run(5)

    for wrong in (False, True, True):
        ask(wrong)
        fleet.run(period - 15)
    assert fleet.verdicts["b.main"].weight == 0.0
    for weight in (0.0, 0.0, 1.0):
        ask(False)
        assert fleet.verdicts["b.main"].weight == weight
        fleet.run(period - 15)


def ask_all(fleet: Fleet, wrong: Iterable[str] = (), garbage: str = "g", period: int = 30) -> None:
    """Every engine is asked once in a period, one after the other."""
    for step in range(period):
        for position, engine in enumerate(fleet.engines):
            if step == (position * 7) % period:
                answer = f"{garbage}-{fleet.now}" if engine.name in wrong else "right"
                fleet.agents[engine.host].canary(engine.name, answer)
        fleet.step()


def test_garbage_engine_is_out_within_two_canary_periods_and_back_after_three_right_answers() -> None:
    fleet = Fleet()
    ask_all(fleet)
    begun = fleet.now
    ask_all(fleet, ["b.main"])
    ask_all(fleet, ["b.main"])
    assert fleet.verdicts["b.main"].weight == 0.0
    assert fleet.reasons("b.main") == ["canary_wrong"]
    out_at = next(at for at, weights in fleet.history if not weights["b.main"])
    assert out_at - begun <= 2 * 30
    assert {fleet.verdicts[name].weight for name in ("a.main", "c.main")} == {1.0}
    for weight in (0.0, 0.0, 1.0):
        ask_all(fleet)
        assert fleet.verdicts["b.main"].weight == weight


def test_one_wrong_answer_and_answers_that_failed_say_nothing() -> None:
    fleet = Fleet()
    ask_all(fleet)
    ask_all(fleet, ["b.main"])
    for _unused in range(5):
        fleet.agents["b"].canary("b.main", None, error="no answer within 10 s")
        fleet.run(10)
    ask_all(fleet)
    ask_all(fleet, ["b.main"])
    assert fleet.reasons("b.main") == []


def test_of_two_the_one_that_answers_as_was_agreed_before_is_right() -> None:
    fleet = Fleet(engines=[make_engine("a"), make_engine("b")])
    ask_all(fleet)
    for _unused in range(2):
        ask_all(fleet, ["a.main"])
    assert [fleet.verdicts[name].weight for name in ("a.main", "b.main")] == [0.0, 1.0]


def test_of_two_that_never_agreed_nobody_knows() -> None:
    fleet = Fleet(engines=[make_engine("a"), make_engine("b")])
    for _unused in range(4):
        ask_all(fleet, ["a.main"])
    assert [fleet.verdicts[name].weight for name in ("a.main", "b.main")] == [1.0, 1.0]


def test_engines_of_another_card_that_agree_among_themselves_are_right() -> None:
    fleet = Fleet(engines=[make_engine(host, card="l40s" if host in "de" else "a100-80g") for host in "abcde"])
    for _unused in range(4):
        for engine in fleet.engines:
            fleet.agents[engine.host].canary(engine.name, f"as a {engine.card} rounds")
        fleet.run(10)
    assert {verdict.weight for verdict in fleet.verdicts.values()} == {1.0}


def test_agent_cannot_speak_for_another_hosts_engine() -> None:
    fleet = Fleet()
    ask_all(fleet)
    for number in range(5):
        fleet.agents["a"].canary("b.main", f"slander {number}")
        fleet.run(5)
    assert fleet.reasons("b.main") == []


def test_garbage_may_not_answer_even_as_the_last_while_a_lost_card_may() -> None:
    fleet = Fleet()
    ask_all(fleet)
    fleet.usable = {"a.main"}
    fleet.agents["a"].gpu["state"] = "lost"
    fleet.run(30)
    assert fleet.verdicts["a.main"].weight == 0.01
    fleet.usable = {"a.main", "c.main"}
    fleet.step()
    assert fleet.verdicts["a.main"].weight == 0.0
    fleet.usable = {"a.main"}
    for _unused in range(2):
        ask_all(fleet, ["a.main"])
    assert fleet.verdicts["a.main"].weight == 0.0


def test_several_at_once_combine_and_out_wins() -> None:
    fleet = Fleet()
    fleet.run(10)
    agent = fleet.agents["a"]
    agent.gpu["pcie_width"] = 8
    agent.pcie("nic")["width"] = 8
    fleet.until(0.5)
    assert fleet.until(0.05, each=grow(agent.gpu, "ecc_uncorrected_volatile", 1)) <= 40
    assert fleet.reasons() == ["ecc_uncorrected", "pcie_link_narrow"]
    fleet.hanging.add("a.main")
    fleet.until(0.0)
    assert fleet.reasons()[0] == "hung"


def test_a_hosts_hardware_concerns_all_its_engines() -> None:
    fleet = Fleet(engines=[make_engine("a", "one"), make_engine("a", "two"), make_engine("b")])
    fleet.agents["a"].gpu["pcie_width"] = 8
    fleet.run(60)
    assert [fleet.verdicts[name].weight for name in ("a.one", "a.two", "b.main")] == [0.5, 0.5, 1.0]


# What moves no weight ------------------------------------------------------------------------------------------------


def reset_counters(fleet: Fleet) -> None:
    agent = fleet.agents["a"]
    agent.sample["hardware"].update(dict.fromkeys(agent.sample["hardware"], 0))
    agent.sample["ethernet"].update(dict.fromkeys(agent.sample["ethernet"], 0))
    put(agent.nvlink, errors=0)
    put(agent.gpu, pcie_replay_counter=0, clock_lost_seconds=0.0)


def wrap_counters(fleet: Fleet) -> None:
    fleet.agents["a"].sample["hardware"]["packet_seq_err"] = (1 << 32) - 3


def lose_files(fleet: Fleet) -> None:
    """Files are missing, and there again the next time: what is in them is not known, and counters stood still."""
    agent = fleet.agents["a"]
    names = ("port/mlx5_0/1", f"gpu/GPU-{agent.host}-0", f"nvlink/GPU-{agent.host}-0", "pcie/0000:30:00.0")
    if agent.missing:
        agent.subjects.update(agent.missing)
        agent.missing = {}
        return
    agent.missing = {name: agent.subjects[name] for name in names}
    agent.subjects.update({name: dict.fromkeys(agent.subjects[name]) for name in names})


def lose_and_find_subjects(fleet: Fleet) -> None:
    agent = fleet.agents["a"]
    if agent.missing:
        agent.subjects.update(agent.missing)
        agent.missing = {}
        return
    names = ("port/mlx5_1/1", "pcie/0000:30:00.0", f"nvlink/GPU-{agent.host}-0")
    agent.missing = {name: agent.subjects.pop(name) for name in names}


def restart_agent(fleet: Fleet) -> None:
    fleet.agents["a"].restart()
    fleet.connected["a"] = False


def silence_agent(fleet: Fleet) -> None:
    fleet.silent ^= {"a"} if fleet.now % 100 < 20 else set()


def clock_forwards(fleet: Fleet) -> None:
    fleet.agents["a"].seconds += 3600


def clock_backwards(fleet: Fleet) -> None:
    fleet.agents["a"].seconds = max(10.0, fleet.agents["a"].seconds - 300)


def reload_driver(fleet: Fleet) -> None:
    fleet.agents["a"].reload_driver()


def reboot(fleet: Fleet) -> None:
    fleet.agents["a"].reboot()
    fleet.connected["a"] = False


def scheduler_clock(fleet: Fleet) -> None:
    fleet.now += 400


def lose_a_line(fleet: Fleet) -> None:
    fleet.agents["a"].change()
    fleet.connected["a"] = False


DISTURBANCES: list[Callable[[Fleet], None]] = [
    reset_counters,
    wrap_counters,
    lose_files,
    lose_and_find_subjects,
    restart_agent,
    clock_forwards,
    clock_backwards,
    reload_driver,
    reboot,
    scheduler_clock,
    lose_a_line,
]


@pytest.mark.parametrize("disturb", [None, *DISTURBANCES], ids=lambda each: getattr(each, "__name__", "nothing"))
def test_thirty_minutes_of_noise_move_no_weight(disturb: Callable[[Fleet], None] | None) -> None:
    fleet = Fleet(noise=True)
    source = random.Random(4)
    for second in range(1800):
        if disturb is not None and second and second % 97 == 0:
            disturb(fleet)
        if second % 20 == 0:
            for engine in fleet.engines:
                error = "no answer" if source.random() < 0.1 else None
                fleet.agents[engine.host].canary(engine.name, None if error else "right", f"p{second % 3}", error)
        fleet.step()
        assert {verdict.weight for verdict in fleet.verdicts.values()} == {1.0}, (second, fleet.verdicts)


def restart_and_read_nothing(fleet: Fleet) -> None:
    """The agent is started again and can read nothing; the next time it can."""
    agent = fleet.agents["a"]
    restart_agent(fleet)
    if agent.missing:
        agent.subjects.update(agent.missing)
        agent.missing, agent.unknown = {}, {name: agent.unknown[name] for name in agent.unknown if name == "pcie"}
        agent.readers = [name for name in ("gpu", "nvlink", "pcie", "rdma", "xid") if name not in agent.unknown]
        return
    agent.unknown = dict.fromkeys(agent.readers, "NVML gives no answer") | agent.unknown
    agent.readers, agent.read = [], {}
    agent.missing, agent.subjects = agent.subjects, {}


def card_gives_no_answer(fleet: Fleet) -> None:
    agent = fleet.agents["a"]
    if agent.missing:
        agent.subjects.update(agent.missing)
        agent.missing = {}
        return
    names = (f"gpu/GPU-{agent.host}-0", f"nvlink/GPU-{agent.host}-0")
    agent.missing = {name: agent.subjects[name] for name in names}
    agent.subjects.update({name: dict.fromkeys(agent.subjects[name]) for name in names})
    agent.gpu["state"] = "no_answer"


def read_seldom(fleet: Fleet) -> None:
    fleet.agents["a"].interval = 8


def lossy(agent: FakeAgent) -> None:
    agent.loss = 0.001


def lost(agent: FakeAgent) -> None:
    if agent.gpu["state"] is not None:
        agent.gpu["state"] = "lost"


def hot(agent: FakeAgent) -> None:
    if agent.gpu["clock_lost_seconds"] is not None:
        agent.gpu["clock_lost_seconds"] += 0.4


def unreadable(agent: FakeAgent) -> None:
    if "pcie" in agent.readers:
        fail_reader(agent, "pcie")


def half_joined(agent: FakeAgent) -> None:
    links = agent.subjects.get(f"nvlink/GPU-{agent.host}-0", {})
    if links.get("links") is not None:
        links["down"] = [2]


FAULTS: dict[str, Callable[[FakeAgent], None]] = {
    "roce_retransmits": lossy,
    "card_lost": lost,
    "throttled": hot,
    "reader_stale": unreadable,
    "nvlink_down": half_joined,
}


# A card whose links are gone has none that could be down: that ends the rule, and is no disturbance.
@pytest.mark.parametrize(
    ("disturb", "rule"),
    [
        pytest.param(disturb, rule, id=f"{disturb.__name__}-{rule}")
        for disturb in (*DISTURBANCES, restart_and_read_nothing, card_gives_no_answer, read_seldom)
        for rule in FAULTS
        if (disturb, rule) != (lose_and_find_subjects, "nvlink_down")
    ],
)
def test_what_is_no_recovery_brings_no_weight_back(disturb: Callable[[Fleet], None], rule: str) -> None:
    fleet = Fleet(engines=[make_engine("a"), make_engine("b")])
    agent = fleet.agents["a"]

    def keep() -> None:
        if agent.subjects:
            FAULTS[rule](agent)

    fleet.run(10)
    for _unused in range(400):
        fleet.step(keep)
        if rule in fleet.reasons():
            break
    for _unused in range(5 if rule == "roce_retransmits" else 2):  # that one takes six minutes to recover
        disturb(fleet)
        keep()
        for _second in range(97):
            fleet.step(keep)
            assert rule in fleet.reasons(), fleet.verdicts
    assert fleet.verdicts["b.main"].weight == 1.0


def test_rule_that_nobody_can_look_at_any_more_ends() -> None:
    fleet = Fleet()
    ask_all(fleet)
    for _unused in range(2):
        ask_all(fleet, ["a.main"])
    assert fleet.verdicts["a.main"].weight == 0.0
    assert 1700 <= fleet.until(1.0) <= 1900


def test_members_that_go_and_come_take_their_rules_along() -> None:
    fleet = Fleet()
    fleet.hanging.add("a.main")
    fleet.run(15)
    assert fleet.verdicts["a.main"].weight == 0.0
    fleet.book.set_members(fleet.engines[1:], ["b", "c"], fleet.now)
    assert set(fleet.book.evaluate(fleet.now, fleet.usable)) == {"b.main", "c.main"}
    fleet.book.set_members(fleet.engines, HOSTS, fleet.now)
    assert fleet.book.evaluate(fleet.now, fleet.usable)["a.main"].weight == 1.0


def test_what_keeps_an_engine_out_survives_a_restart_of_the_scheduler() -> None:
    fleet = Fleet()
    ask_all(fleet)
    fleet.agents["c"].gpu["state"] = "lost"
    for _unused in range(2):
        ask_all(fleet, ["a.main"])
    kept = fleet.book.closed()
    again = Fleet()
    again.book.restore(
        [*kept, {"kind": "host", "scope": "gone", "rule": "card_lost", "subject": "", "text": ""}], again.now
    )
    again.step()
    assert [again.verdicts[name].weight for name in ("a.main", "b.main", "c.main")] == [0.0, 1.0, 0.0]
    for _unused in range(4):  # of the first answer alone nobody knows
        ask_all(again)
    assert {verdict.weight for verdict in again.verdicts.values()} == {1.0}


def test_windows_can_be_shortened() -> None:
    fleet = Fleet(rules(roce_retransmits={"window_s": 3, "packets": 1000, "hold_s": 5}))
    fleet.run(10)
    fleet.agents["a"].loss = 0.001
    assert fleet.until(0.1) <= 4 * 3 + 1
    fleet.agents["a"].loss = 0.0
    assert fleet.until(1.0) <= 7 * 3 + 1


# Whatever happens ----------------------------------------------------------------------------------------------------

EVENTS = st.lists(
    st.tuples(
        st.sampled_from(
            ["loss", "well", "width", "wide", "lost", "found", "hang", "go on", "silent", "heard", "restart", "reboot"]
        ),
        st.sampled_from(HOSTS),
        st.integers(1, 40),
    ),
    max_size=15,
)


def play(events: list[tuple[str, str, int]], watch: Callable[[Fleet], None] = lambda _fleet: None) -> Fleet:
    short = {"window_s": 3, "packets": 1000, "hold_s": 20}
    fleet = Fleet(rules(roce_retransmits=short, pcie_link_narrow={"window_s": 3, "hold_s": 15}))
    for event, host, seconds in events:
        agent = fleet.agents[host]
        if event in ("loss", "well"):
            agent.loss = 0.01 if event == "loss" else 0.0
        elif event in ("width", "wide"):
            agent.gpu["pcie_width"] = 4 if event == "width" else 16
        elif event in ("lost", "found"):
            agent.gpu["state"] = "lost" if event == "lost" else "ok"
        elif event in ("hang", "go on"):
            (fleet.hanging.add if event == "hang" else fleet.hanging.discard)(f"{host}.main")
        elif event in ("silent", "heard"):
            (fleet.silent.add if event == "silent" else fleet.silent.discard)(host)
        elif event == "restart":
            agent.restart()
            fleet.connected[host] = False
        else:
            agent.reboot()
            fleet.connected[host] = False
        for _unused in range(seconds):
            fleet.step()
            watch(fleet)
    return fleet


@settings(max_examples=40)
@given(EVENTS)
def test_weights_stay_in_their_range_holds_are_held_and_soft_rules_empty_no_pool(
    events: list[tuple[str, str, int]],
) -> None:
    seen: dict[tuple[str, str], tuple[float, float]] = {}

    def watch(fleet: Fleet) -> None:
        for verdict in fleet.verdicts.values():
            assert verdict.weight == 0 or 0.01 <= verdict.weight <= 1
            assert verdict.weight or any(not reason.factor for reason in verdict.reasons)
        # Only an engine that hangs or answers wrong may be out where no other one is left.
        if not any("hung" in fleet.reasons(name) for name in fleet.verdicts):
            assert any(verdict.weight for verdict in fleet.verdicts.values())
        held = {rule.name: rule.hold for rule in fleet.book.rules}
        for name, verdict in fleet.verdicts.items():
            present = {reason.rule: reason.factor for reason in verdict.reasons}
            for rule, hold in held.items():
                value, at = seen.get((name, rule), (1.0, float("-inf")))
                if present.get(rule, 1.0) != value:
                    assert fleet.now - at >= hold, rule
                    seen[name, rule] = present.get(rule, 1.0), fleet.now

    play(events, watch)


@settings(max_examples=20)
@given(EVENTS)
def test_same_inputs_give_the_same_weights(events: list[tuple[str, str, int]]) -> None:
    assert play(events).history == play(events).history
