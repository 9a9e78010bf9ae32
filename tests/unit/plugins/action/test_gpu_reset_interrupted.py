# SPDX-License-Identifier: GPL-3.0-or-later
"""A reset that is killed anywhere, on controller or host, ends as before or is reported, and never resets twice."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ansible_collections.ringmaster.inference.plugins.module_utils.commands import Answer
from tests.support.gpu_reset_world import (
    DAEMON,
    ENGINE,
    EXPORTER,
    UUID,
    Killed,
    PowerLost,
    World,
    as_before,
    run_task,
)


def finish(world: World, monkeypatch: pytest.MonkeyPatch, **given: Any) -> dict[str, Any]:
    """Let the host go on by itself, then run the task undisturbed until a run is neither unfinished nor new."""
    world.left = None
    world.background()
    result: dict[str, Any] = {}
    for _attempt in range(3):
        result = run_task(world, monkeypatch, **given)
        if result["outcome"] != "unknown":
            break
    return result


def check_end(world: World, result: dict[str, Any]) -> None:
    assert as_before(world), (world.active, world.persistence)
    assert len({name for name, *_uuids in world.resets}) == len(world.resets), "a run reset a card twice"
    assert world.ledger.unfinished() is None
    # Nothing asks for a reset any more once one has helped: that refusal is the end as well.
    assert result["outcome"] == "verified" or result["problems"][0]["code"] == "no_reason", result
    assert not world.drained
    assert world.needs[UUID] == "none"


def test_controller_or_host_killed_at_each_moment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    moment = 0
    while True:
        world = World(tmp_path / str(moment), left=moment)
        first: dict[str, Any] = {}
        try:
            first = run_task(world, monkeypatch)
        except Killed:
            pass
        if world.left is not None:
            break
        check_end(world, first if first.get("outcome") == "verified" else finish(world, monkeypatch))
        moment += 1
    assert first["outcome"] == "verified"
    assert moment > 60


@pytest.mark.parametrize("enabled", [True, False])
def test_power_lost_at_each_moment(enabled: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    moment = 0
    while True:
        world = World(tmp_path / str(moment), left=moment, kill=PowerLost, enabled=enabled)
        first: dict[str, Any] = {}
        try:
            first = run_task(world, monkeypatch)
        except PowerLost:
            if world.boot == 1:
                world.reboot()
        if world.left is not None:
            break
        moment += 1
        # Before the host's part nothing was touched, and after the end nothing is: what the boot did not start is then
        # not this module's.
        touched = any(run.handed and not run.closed for run in world.ledger.runs())
        result = first if first.get("outcome") == "verified" else finish(world, monkeypatch)
        assert result["outcome"] == "verified" or result["problems"][0]["code"] == "no_reason", result
        assert world.ledger.unfinished() is None
        assert len(world.resets) <= 1
        assert not world.drained
        if enabled or touched:
            assert as_before(world), (world.active, world.persistence)
    assert moment > 60


kills = st.lists(st.integers(0, 60), max_size=6)
faults = st.fixed_dictionaries(
    {
        "stuck": st.sets(st.sampled_from([ENGINE, EXPORTER, DAEMON]), max_size=1),
        "broken": st.sets(st.sampled_from([ENGINE, EXPORTER]), max_size=1),
        "smi": st.sampled_from([Answer(0, "ok"), Answer(255, "In use by another client"), Answer(None, "", "timeout")]),
        "mends": st.booleans(),
        "full": st.none() | st.integers(0, 30),
        "enabled": st.booleans(),
    }
)


@given(kills=kills, powers=st.lists(st.booleans(), min_size=6, max_size=6), fault=faults)
def test_any_kills_and_faults(kills: list[int], powers: list[bool], fault: dict[str, Any]) -> None:
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as monkeypatch:
        world = World(Path(folder), **fault)
        for moment, power in zip(kills, powers):
            world.left, world.kill = moment, PowerLost if power else Killed
            boot = world.boot
            try:
                run_task(world, monkeypatch, max_resets=100)
            except Killed:
                if power and world.boot == boot:
                    world.reboot()
            world.background()
        # The faults are mended, as the messages ask for; what is left to do, the task does.
        world.left, world.full, world.smi, world.mends = None, None, Answer(0, "ok"), True
        world.stuck, world.broken = set(), set()
        result = run_task(world, monkeypatch, max_resets=100)
        if result["next_step"] in ("reboot", "power_cycle"):
            assert world.drained or not world.ledger.runs(), "a card that is not well must stay out of service"
            world.reboot()
            result = run_task(world, monkeypatch, max_resets=100)
        if result["outcome"] == "unknown":
            result = run_task(world, monkeypatch, max_resets=100)
        assert len({name for name, *_uuids in world.resets}) == len(world.resets), "a run reset a card twice"
        assert world.ledger.unfinished() is None, result
        if world.enabled:
            assert as_before(world), (world.active, world.persistence, result)
        assert not world.drained, result
        assert result["outcome"] == "verified" or result["problems"][0]["code"] == "no_reason", result
