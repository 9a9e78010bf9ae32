# SPDX-License-Identifier: GPL-3.0-or-later
"""What readers say, entered into the state: there, gone, unknown with a reason, and counted."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringmaster_agent.books import EngineBook, HardwareBook, XidBook
from ringmaster_agent.changes import State
from ringmaster_agent.configuration import Engine
from ringmaster_agent.throttling import LONGEST_GAP, ClockLoss

ENGINE = Engine("gpu-1.main", "127.0.0.1", 8100, "m")


@pytest.fixture
def state() -> State:
    return State("a", "gpu-1", "b")


def report(values: dict[str, Any], seconds: float = 10.0, **changes: Any) -> dict[str, Any]:
    return {
        "lane": "nvml",
        "readers": ["gpu", "nvlink"],
        "seconds": seconds,
        "values": values,
        "unknown": {},
        "failed": {},
        **changes,
    }


def test_what_a_lane_no_longer_tells_of_is_gone(state: State) -> None:
    book = HardwareBook(state)
    book.take(report({"gpu/a": {"state": "ok"}, "nvlink/a": {"down": []}}))
    book.take(report({"pcie/x": {"correctable": 0}}, lane="pcie", readers=["pcie"]))
    book.take(report({"gpu/a": {"state": "ok"}}))
    assert set(state.values) == {"gpu/a", "pcie/x"}
    assert state.read == {"gpu": 10.0, "nvlink": 10.0, "pcie": 10.0}


def test_reader_that_fails_makes_everything_of_it_unknown_but_what_it_is(state: State) -> None:
    book = HardwareBook(state)
    book.take(report({"gpu/a": {"state": "ok", "model": "A100", "power_watts": 60}}, unknown={"gpu/a": "x: y"}))
    book.take(report({}, 11.0, failed={"gpu": "no driver", "nvlink": "no driver"}))
    assert state.values["gpu/a"] == {"state": None, "model": "A100", "power_watts": None, "clock_lost_seconds": None}
    assert state.unknown == {"gpu": "no driver", "nvlink": "no driver", "gpu/a": "no driver"}
    assert state.read["gpu"] == 10.0  # so that its age tells
    book.take(report({"gpu/a": {"state": "ok", "model": "A100", "clock_event_reasons": []}}, 12.0))
    assert state.unknown == {}
    assert state.read["gpu"] == 12.0


def test_process_that_is_gone_takes_all_lanes_with_it(state: State) -> None:
    book = HardwareBook(state)
    book.take(report({"gpu/a": {"state": "ok"}}))
    book.take(report({"pcie/x": {"correctable": 0}}, lane="pcie", readers=["pcie"]))
    book.fail("killed")
    assert set(state.unknown) == {"gpu", "nvlink", "pcie", "gpu/a", "pcie/x"}
    assert state.values["pcie/x"]["correctable"] is None


def test_clock_lost_outlives_a_restart_of_the_reading_process(state: State) -> None:
    book = HardwareBook(state)
    slow = {"clock_event_reasons": ["hw_thermal_slowdown"], "sm_clock_mhz": 700, "sm_clock_max_mhz": 1400}
    for moment in (1.0, 2.0):
        book.take(report({"gpu/a": dict(slow)}, moment))
    book.fail("killed")
    for moment in (3.0, 4.0):
        book.take(report({"gpu/a": dict(slow)}, moment))
    assert state.values["gpu/a"]["clock_lost_seconds"] == 1.5


def test_engine_that_is_not_read_is_unknown(state: State) -> None:
    book = EngineBook(state)
    book.take(ENGINE, None, "cannot connect", 1.0)
    assert state.values == {"engine/gpu-1.main": {}}
    book.take(ENGINE, {"running": 1}, "", 2.0)
    assert (state.values, state.unknown) == ({"engine/gpu-1.main": {"running": 1}}, {})
    book.take(ENGINE, None, "gone", 3.0)
    assert state.values == {"engine/gpu-1.main": {"running": None}}
    assert state.unknown == {"engine/gpu-1.main": "gone", "engine:gpu-1.main": "gone"}
    assert state.read == {"engine:gpu-1.main": 2.0}


def test_canary_that_is_not_answered_is_no_success(state: State) -> None:
    book = EngineBook(state)
    book.take_canary(ENGINE, {"answer": "ab", "error": None, "number": 1}, 1.0)
    book.take_canary(ENGINE, {"answer": None, "error": "late", "number": 2}, 2.0)
    assert state.read == {"canary:gpu-1.main": 1.0}
    assert state.unknown == {"canary/gpu-1.main": "late", "canary:gpu-1.main": "late"}


def event(code: int, slot: str = "0000:07:00", action: str = "drain") -> dict[str, Any]:
    return {"xid": code, "pci_slot": slot, "action": action}


def test_xids_are_counted_by_card_and_code(state: State) -> None:
    book = XidBook(state)
    for code, seconds in ((31, 1.0), (31, 2.5), (79, 3.0)):
        book.take(event(code), seconds)
    book.take(event(31, "0000:0f:00"), 4.0)
    assert state.values["xid/0000:07:00.0"] == {
        "31": {"count": 2, "seconds": 2.5, "recent": [1.0, 2.5], "action": "drain"},
        "79": {"count": 1, "seconds": 3.0, "recent": [3.0], "action": "drain"},
    }
    assert state.values["xid/0000:0f:00.0"]["31"]["count"] == 1
    for number in range(100):
        book.take(event(31), 10.0 + number)
    assert state.values["xid/0000:07:00.0"]["31"]["recent"] == [10.0 + number for number in range(68, 100)]
    book.clear()
    book.take(event(31), 1.0)
    assert state.values["xid/0000:07:00.0"]["31"]["count"] == 1


THROTTLED = {"clock_event_reasons": ["gpu_idle", "sw_thermal_slowdown"], "sm_clock_mhz": 350, "sm_clock_max_mhz": 1400}


@pytest.mark.parametrize(
    ("change", "lost"),
    [
        ({}, 0.75),
        ({"clock_event_reasons": ["hw_power_brake_slowdown"]}, 0.75),
        ({"clock_event_reasons": ["sw_power_cap"]}, 0),
        ({"clock_event_reasons": []}, 0),
        ({"clock_event_reasons": [], "sm_clock_mhz": None}, 0),
        ({"clock_event_reasons": None}, None),
        ({"sm_clock_mhz": None}, None),
        ({"sm_clock_max_mhz": None}, None),
        ({"sm_clock_mhz": 1500}, 0),
    ],
)
def test_only_clock_that_heat_or_brake_takes_is_lost(change: dict[str, Any], lost: float | None) -> None:
    loss = ClockLoss()
    assert loss.sample(THROTTLED, 100.0) == 0
    assert loss.sample({**THROTTLED, **change}, 101.0) == lost


def test_a_gap_says_nothing() -> None:
    loss = ClockLoss()
    loss.sample(THROTTLED, 0.0)
    assert loss.sample(THROTTLED, LONGEST_GAP + 1) is None
    assert loss.sample(THROTTLED, LONGEST_GAP + 1) == 0  # no time has passed
    assert loss.sample(THROTTLED, LONGEST_GAP) == 0


def test_samples_that_are_seldom_by_design_have_no_gaps() -> None:
    loss = ClockLoss()
    loss.sample(THROTTLED, 0.0)
    assert [loss.sample(THROTTLED, moment) for moment in (60.0, 120.0, 180.0)] == [None, 45.0, 90.0]


def test_card_that_no_longer_answers_does_not_seem_to_run_at_full_clock(state: State) -> None:
    book = HardwareBook(state)
    slow = {"clock_event_reasons": ["hw_thermal_slowdown"], "sm_clock_mhz": 700, "sm_clock_max_mhz": 1400}
    for moment in (1.0, 2.0):
        book.take(report({"gpu/a": dict(slow)}, moment))
    book.take(report({"gpu/a": dict.fromkeys(slow)}, 3.0, unknown={"gpu/a": "no answer"}))
    assert state.values["gpu/a"]["clock_lost_seconds"] is None
    book.take(report({"gpu/a": dict(slow)}, 4.0))
    assert state.values["gpu/a"]["clock_lost_seconds"] == 1.0
    book.take(report({"gpu/a": dict(slow)}, 40.0))
    assert state.values["gpu/a"]["clock_lost_seconds"] is None
    assert state.unknown["gpu/a"]


@given(st.lists(st.tuples(st.floats(0, 30), st.integers(1, 2000)), max_size=20))
def test_it_only_grows_and_no_faster_than_time(samples: list[tuple[float, int]]) -> None:
    loss, moment, before = ClockLoss(), 0.0, 0.0
    for step, clock in samples:
        moment += step
        now = loss.sample({**THROTTLED, "sm_clock_mhz": clock}, moment)
        if now is not None:
            assert before <= now <= moment + 0.01
            before = now
