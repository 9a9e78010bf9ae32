# SPDX-License-Identifier: GPL-3.0-or-later
"""The state of a node from the lines of its agent: whole, healed, and closed to what is not of the form."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringmaster_scheduler.merge import AgentState, StreamError, parse
from tests.unit.scheduler.fake_agent import FakeAgent


def line(**changes: Any) -> bytes:
    whole = {
        "schema": 1,
        "type": "snapshot",
        "agent": "x",
        "host": "a",
        "boot": "b",
        "sequence": 1,
        "seconds": 10.5,
        "read": {},
        "values": {},
        "unknown": {},
    }
    return json.dumps({key: value for key, value in {**whole, **changes}.items() if value != "left out"}).encode()


def sample(**hardware: Any) -> dict[str, Any]:
    return {"seconds": 1.0, "boot": "b", "driver": "d", "hardware": hardware, "ethernet": {}}


def take(state: AgentState, *lines: bytes) -> None:
    for position, each in enumerate(lines):
        state.apply(parse(each), position == 0)


def test_changes_add_up_to_what_a_snapshot_would_have_said() -> None:
    agent = FakeAgent("a", noise=True)
    agent.advance()
    state = AgentState("a")
    take(state, agent.snapshot())
    for second in range(200):
        agent.advance()
        if second == 50:
            agent.missing = {name: agent.subjects.pop(name) for name in ("port/mlx5_1/1", "nvlink/GPU-a-0")}
        if second == 100:
            agent.subjects.update(agent.missing)
            agent.gpu["pcie_width_max"] = None
        state.apply(parse(agent.change() if second % 3 else agent.alive()), False)
    state.apply(parse(agent.change()), False)
    whole = AgentState("a")
    take(whole, agent.snapshot())
    assert state.subjects == whole.subjects
    assert "pcie_width_max" not in state.subjects["gpu/GPU-a-0"]
    assert state.read == whole.read
    assert "temperature_celsius" not in state.subjects["gpu/GPU-a-0"]  # no rule looks at it


def test_gap_restart_and_reboot_end_the_connection_without_blame() -> None:
    for change, message in (
        ({"sequence": 3}, "expected sequence 2, found 3"),
        ({"sequence": 1}, "expected sequence 2, found 1"),
        ({"sequence": 2, "agent": "y"}, "started again"),
        ({"sequence": 2, "boot": "y"}, "started again"),
        ({"sequence": 2, "type": "alive"}, "expected sequence 1, found 2"),
    ):
        state = AgentState("a")
        take(state, line())
        with pytest.raises(StreamError, match=message) as caught:
            state.apply(parse(line(**{"type": "change", **change})), False)
        assert not caught.value.hostile
        assert (state.sequence, state.agent, state.boot) == (1, "x", "b")


def test_what_a_new_connection_is_told_apart_by() -> None:
    state = AgentState("a")
    first = state.apply(parse(line(read={"gpu": 5})), True)
    assert (first.new_agent, first.new_boot, first.read) == (False, False, {"gpu"})
    again = state.apply(parse(line(read={"gpu": 5, "xid": 6})), True)
    assert (again.new_agent, again.new_boot, again.read) == (False, False, {"xid"})
    restarted = state.apply(parse(line(agent="y", read={"gpu": 5})), True)
    assert (restarted.new_agent, restarted.new_boot) == (True, False)
    rebooted = state.apply(parse(line(agent="z", boot="c", read={"gpu": 5})), True)
    assert (rebooted.new_agent, rebooted.new_boot, rebooted.read) == (True, True, {"gpu"})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"", "no JSON"),
        (b"\xff\x00", "no JSON"),
        (b"[" * 100_000, "no JSON"),
        (b"[]", "no object"),
        (b'{"schema": 1, "seconds": NaN}', "NaN is no number"),
        (line(schema=2), "expected schema 1, found 2"),
        (line(schema=True), "expected schema 1, found True"),
        (line(schema="left out"), "expected schema 1, found None"),
        (line(type="delta"), "of type 'delta'"),
        (line(type=["snapshot"]), "of type"),
        (line(agent=""), "agent is ''"),
        (line(host=7), "host is 7"),
        (line(boot="b" * 300), "boot is"),
        (line(sequence=-1), "sequence is -1"),
        (line(sequence=True), "sequence is True"),
        (line(sequence=10**400), "sequence is"),
        (line(seconds=-0.5), "seconds is"),
        (line(seconds="1"), "seconds is"),
        (line(seconds=1).replace(b'"seconds": 1', b'"seconds": 1e999'), "seconds is inf"),
        (line(read=[]), "read is no object"),
        (line(read={"gpu": None}), "read.gpu is None"),
        (line(values=3), "values is no object"),
        (line(values={"gpu/a": 3}), "gpu/a is 3"),
        (line(values={"gpu/a": {"pcie_width": -1}}), "gpu/a pcie_width: no count"),
        (line(values={"gpu/a": {"pcie_width": 1.5}}), "gpu/a pcie_width: no count"),
        (line(values={"gpu/a": {"pcie_width": 1 << 70}}), "gpu/a pcie_width: no count"),
        (line(values={"gpu/a": {"clock_lost_seconds": "x"}}), "no number"),
        (line(values={"gpu/a": {"remapped_rows_pending": 2}}), "neither true nor false"),
        (line(values={"gpu/a": {"remapped_rows_pending": []}}), "neither true nor false"),
        (line(values={"gpu/a": {"clock_event_reasons": "hot"}}), "no list of words"),
        (line(values={"nvlink/a": {"down": [None]}}), "no list of counts"),
        (line(values={"port/a/1": {"sample": {}}}), "port/a/1 sample: no time"),
        (line(values={"port/a/1": {"sample": [1]}}), "no JSON object"),
        (line(values={"port/a/1": {"sample": sample(out_of_sequence=1 << 65)}}), "port/a/1 sample: no count"),
        (line(values={"port/a/1": {"sample": {**sample(), "seconds": 10**400}}}), "port/a/1 sample: "),
        (line(values={"port/a/1": {"sample": {**sample(), "seconds": 1e300}}}), "seconds is 1e"),
        (line(values={"xid/a": {"79": 1}}), "xid/a 79: no object"),
        (line(values={"xid/a": {"79": {"seconds": 1, "recent": [1] * 33}}}), "xid/a 79: no list of times"),
        (line(values={"xid/a": {"79": {"seconds": 1, "recent": ["1"]}}}), "xid/a 79: no number"),
        (line(values={"xid/a": {"7\u0669": {"seconds": 1}}}), "a code that is"),
        (line(unknown={str(number): "x" for number in range(5000)}), "over 4096"),
        (line(values={"xid/a": {"79; rm": {}}}), "a code that is"),
        (line(values={"gpu/a\n": {}}), "a subject that is"),
        (line(values={f"gpu/{number}": {} for number in range(5000)}), "over 4096 subjects"),
        (line(unknown={"gpu": 3}), "a reason that is 3"),
        (line(host="b"), "the agent of another host"),
        (line(type="change"), "expected a snapshot"),
    ],
)
def test_hostile_line_is_refused_and_changes_nothing(text: bytes, message: str) -> None:
    state = AgentState("a")
    with pytest.raises(StreamError, match=message) as caught:
        state.apply(parse(text), True)
    assert caught.value.hostile
    assert (state.subjects, state.read, state.sequence) == ({}, {}, 0)


def test_unknown_subjects_and_quantities_are_ignored() -> None:
    state = AgentState("a")
    take(state, line(values={"fan/1": {"speed": "x"}, "gpu/a": {"smell": [], "pcie_width": 16}, "engine/a.main": None}))
    assert state.subjects == {"gpu/a": {"pcie_width": 16}}


def test_only_counters_that_are_judged_are_kept() -> None:
    state = AgentState("a")
    many = {f"counter_{number}": number for number in range(20_000)}
    take(state, line(values={"port/a/1": {"sample": sample(out_of_sequence=3, **many)}}))
    assert state.subjects["port/a/1"]["sample"].hardware == {"out_of_sequence": 3}


def test_an_agent_can_not_fill_the_memory_with_xids_line_by_line() -> None:
    state = AgentState("a")
    take(state, line())
    messages = [
        parse(
            line(
                type="change",
                sequence=sequence,
                values={"xid/a": {str(sequence * 1000 + code): {"seconds": 1} for code in range(250)}},
            )
        )
        for sequence in range(2, 7)
    ]
    for message in messages[:4]:
        state.apply(message, False)
    with pytest.raises(StreamError, match="over 1024 cards and codes"):
        state.apply(messages[4], False)
    assert len(state.subjects["xid/a"]) == 1000


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=8,
)
SUBJECTS = st.sampled_from(["gpu/a", "nvlink/a", "port/m/1", "pcie/a", "xid/a", "canary/a", "fan/a"])
QUANTITIES = st.sampled_from(
    ["state", "pcie_width", "down", "links", "sample", "correctable", "79", "answer", "number", "clock_event_reasons"]
)


@given(
    st.dictionaries(
        st.sampled_from(["schema", "type", "agent", "host", "sequence", "seconds", "read", "values", "unknown"]), JSON
    ),
    st.dictionaries(SUBJECTS, st.dictionaries(QUANTITIES, JSON) | JSON),
)
def test_any_line_is_used_or_refused(changes: dict[str, Any], values: dict[str, Any]) -> None:
    state = AgentState("a")
    try:
        state.apply(parse(line(**{"values": values, **changes})), True)
    except StreamError:
        return
    for subject, quantities in state.subjects.items():
        assert "/" in subject
        assert None not in quantities.values()


@given(st.binary(max_size=200))
def test_any_bytes_are_used_or_refused(text: bytes) -> None:
    with pytest.raises(StreamError):
        parse(text)


@given(st.lists(st.sampled_from(["change", "alive", "gap", "again", "restart"]), max_size=30), st.integers(0, 99))
def test_state_is_that_of_the_agent_whatever_is_lost(course: list[str], seed: int) -> None:
    agent = FakeAgent("a", seed, noise=True)
    state = AgentState("a")
    first = True
    for event in course:
        agent.advance()
        if event == "gap" and not first:
            agent.change()
        elif event == "restart":
            agent.restart()
        if first or event == "again":
            text, first = agent.snapshot(), True
        else:
            text = agent.alive() if event == "alive" else agent.change()
        try:
            state.apply(parse(text), first)
            first = False
        except StreamError as error:
            if error.hostile:
                raise
            first = True
    agent.advance()
    state.apply(parse(agent.snapshot()), True)
    whole = AgentState("a")
    whole.apply(parse(agent.snapshot()), True)
    assert (state.subjects, state.read, state.sequence) == (whole.subjects, whole.read, whole.sequence)
