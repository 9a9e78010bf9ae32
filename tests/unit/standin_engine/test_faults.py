# SPDX-License-Identifier: GPL-3.0-or-later
"""The file that switches faults."""

from __future__ import annotations

import json
import logging
import os
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from standin_engine.faults import NAMES, Faults, parse


def test_every_fault_can_be_switched_on_and_off(tmp_path: Path) -> None:
    path = tmp_path / "faults.json"
    faults = Faults(path)
    faults.refresh()
    assert not any(faults.is_on(name) for name in NAMES)
    path.write_text(json.dumps({name: {} for name in NAMES}))
    faults.refresh()
    assert all(faults.is_on(name) for name in NAMES)
    path.unlink()
    faults.refresh()
    assert not any(faults.is_on(name) for name in NAMES)


def test_a_fault_ends_at_its_time(tmp_path: Path) -> None:
    path = tmp_path / "faults.json"
    path.write_text(json.dumps({"hang": {"until": time.time() - 1}, "slow": {"factor": 3, "until": time.time() + 60}}))
    faults = Faults(path)
    faults.refresh()
    assert not faults.is_on("hang")
    assert faults.slow_factor == 3


def test_without_a_factor_slow_is_five_times_and_off_is_once(tmp_path: Path) -> None:
    path = tmp_path / "faults.json"
    faults = Faults(path)
    assert faults.slow_factor == 1
    path.write_text('{"slow": {}}')
    faults.refresh()
    assert faults.slow_factor == 5


def test_a_crash_that_was_ordered_before_the_start_is_not_due(tmp_path: Path) -> None:
    path = tmp_path / "faults.json"
    path.write_text('{"crash": {}}')
    os.utime(path, (time.time() - 60, time.time() - 60))
    faults = Faults(path)
    faults.refresh()
    assert not faults.crash_is_due
    path.write_text('{"crash": {}, "slow": {}}')
    os.utime(path, (time.time() + 1, time.time() + 1))
    faults.refresh()
    assert faults.crash_is_due


@pytest.mark.parametrize(
    "broken",
    [
        '{"hang": {"until"',
        "",
        "[]",
        '{"hangs": {}}',
        '{"hang": true}',
        '{"hang": {"until": "tomorrow"}}',
        '{"slow": {"factor": 0}}',
        '{"slow": {"factor": "NaN"}}',
        '{"slow": {"factor": NaN}}',
        '{"slow": {"factor": 1e999}}',
        '{"slow": {"factor": 1001}}',
    ],
)
def test_a_broken_file_is_said_once_and_changes_nothing(
    broken: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "faults.json"
    path.write_text('{"hang": {}}')
    faults = Faults(path)
    faults.refresh()
    path.write_text(broken)
    with caplog.at_level(logging.WARNING):
        faults.refresh()
        faults.refresh()
    assert faults.is_on("hang")
    assert len(caplog.records) == 1
    assert str(path) in caplog.text


json_values: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["until", "factor", "x"]), inner),
)


@given(st.dictionaries(st.sampled_from([*sorted(NAMES), "unknown"]), json_values))
def test_any_document_is_either_refused_or_usable(document: dict[str, Any]) -> None:
    try:
        faults = parse(json.dumps(document))
    except ValueError:
        return
    assert set(faults) <= NAMES
    assert all(isinstance(fault, dict) for fault in faults.values())
