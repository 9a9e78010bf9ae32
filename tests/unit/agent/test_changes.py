# SPDX-License-Identifier: GPL-3.0-or-later
"""The messages of the stream: the last snapshot and every change after it make the state, whatever happened."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringmaster_agent.changes import TELL_SECONDS, State


class Subscriber:
    """Does what docs/conventions.md tells a subscriber to do."""

    def __init__(self, snapshot: bytes) -> None:
        self.state: dict[str, Any] = json.loads(snapshot)
        assert self.state["type"] == "snapshot"

    def take(self, line: bytes) -> None:
        message = json.loads(line)
        if message["type"] == "alive":
            assert message["sequence"] == self.state["sequence"]
            return
        assert message["type"] == "change"
        assert message["sequence"] == self.state["sequence"] + 1
        self.state["sequence"] = message["sequence"]
        for subject, quantities in message["values"].items():
            if quantities is None:
                self.state["values"].pop(subject, None)
            else:
                self.state["values"].setdefault(subject, {}).update(quantities)
        self.state["read"].update(message["read"])
        for name, reason in message["unknown"].items():
            if reason is None:
                self.state["unknown"].pop(name, None)
            else:
                self.state["unknown"][name] = reason

    def agrees(self, snapshot: bytes) -> bool:
        other = json.loads(snapshot)
        return all(self.state[key] == other[key] for key in ("sequence", "values", "read", "unknown", "agent", "boot"))


def state() -> State:
    return State("a1", "gpu-1", "b00t")


subjects = st.sampled_from(["gpu/a", "gpu/b", "port/x/1"])
readers = st.sampled_from(["gpu", "rdma"])
quantities = st.dictionaries(
    st.sampled_from(["one", "two", "three"]),
    st.none() | st.integers(-3, 3) | st.floats() | st.booleans() | st.lists(st.text(max_size=2), max_size=2),
    max_size=3,
)
reasons = st.sampled_from(["", "no answer", "lost \ud800"])
actions = st.one_of(
    st.tuples(st.just("put"), subjects, quantities, reasons),
    st.tuples(st.just("remove"), subjects),
    st.tuples(st.just("succeed"), readers, st.floats(0, 1e6)),
    st.tuples(st.just("explain"), readers, reasons),
    st.tuples(st.just("tell")),
    st.tuples(st.just("join")),
    st.tuples(st.just("alive")),
)


@given(st.lists(actions, max_size=30))
def test_changes_make_the_state(happened: list[tuple[Any, ...]]) -> None:
    known = state()
    listening = [Subscriber(known.snapshot(0.0))]
    for name, *arguments in [*happened, ("tell",)]:
        if name in ("tell", "join"):
            # Whoever joins is told what the others are told at the same time.
            line = known.change(1.0)
            for one in listening:
                one.take(line)
            if name == "join":
                listening.append(Subscriber(known.snapshot(1.0)))
        elif name == "alive":
            for one in listening:
                one.take(known.alive(1.0))
        else:
            getattr(known, name)(*copy.deepcopy(arguments))
    assert not known.changed
    for one in listening:
        assert one.agrees(known.snapshot(2.0))


@given(st.lists(actions, max_size=30))
def test_lines_are_one_json_object_without_odd_numbers(happened: list[tuple[Any, ...]]) -> None:
    known = state()
    for name, *arguments in happened:
        if name in ("put", "remove", "succeed", "explain"):
            getattr(known, name)(*copy.deepcopy(arguments))
    for line in (known.change(0.1234567), known.snapshot(0.1), known.alive(0.1)):
        assert line.endswith(b"\n")
        assert line.count(b"\n") == 1
        message = json.loads(line, parse_constant=pytest.fail)
        assert {"schema": 1, "agent": "a1", "host": "gpu-1", "boot": "b00t"}.items() <= message.items()
    assert known.sequence == 1


def test_only_what_changed_is_told() -> None:
    known = state()
    known.put("gpu/a", {"power": 60.0, "lost": False})
    known.change(0)
    known.put("gpu/a", {"power": 61.0, "lost": False}, "")
    assert json.loads(known.change(0))["values"] == {"gpu/a": {"power": 61.0}}
    known.put("gpu/a", {"power": 61.0})
    assert json.loads(known.change(0))["values"] == {"gpu/a": {"lost": None}}
    known.put("gpu/a", {"power": 61.0})
    assert not known.changed


def test_subject_that_went_and_came_between_two_messages_keeps_nothing_old() -> None:
    known = state()
    known.put("gpu/a", {"one": 1, "two": 2})
    known.change(0)
    known.remove("gpu/a")
    known.put("gpu/a", {"one": 3})
    assert json.loads(known.change(0))["values"] == {"gpu/a": {"one": 3, "two": None}}
    known.remove("gpu/a")
    assert json.loads(known.change(0))["values"] == {"gpu/a": None}


def test_reader_that_found_nothing_new_is_told_about_once_a_second() -> None:
    known = state()
    known.succeed("gpu", 10.0)
    assert known.changed
    known.change(0)
    known.succeed("gpu", 10.0 + TELL_SECONDS / 2)
    assert not known.changed
    known.succeed("gpu", 10.0 + TELL_SECONDS)
    assert known.changed
    assert json.loads(known.change(0))["read"] == {"gpu": 10.0 + TELL_SECONDS}


def test_what_was_told_does_not_change_afterwards() -> None:
    known = state()
    quantities = {"one": 1}
    known.put("gpu/a", quantities)
    quantities["one"] = 2
    assert json.loads(known.change(0))["values"] == {"gpu/a": {"one": 1}}
