# SPDX-License-Identifier: GPL-3.0-or-later
"""Following the kernel log: with a journalctl that tells, says nothing, ends, and has lost its place."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from ansible_collections.ringmaster.inference.plugins.module_utils.commands import CommandRunner
from ansible_collections.ringmaster.inference.plugins.module_utils.file_tree import BOOT_ID, FileTree
from ringmaster_agent import xid_log
from ringmaster_agent.changes import State
from ringmaster_agent.xid_log import XidLog

BOOT = "2f0c5e1b-7f5f-4f0e-9d49-5c2b1a7e9d10"


def entry(number: int, message: str | list[int]) -> str:
    return json.dumps(
        {
            "__CURSOR": f"s=1;i={number};b={BOOT.replace('-', '')};m=1;t=1;x={number}",
            "__REALTIME_TIMESTAMP": "1700000000000000",
            "__MONOTONIC_TIMESTAMP": str(number * 1_000_000),
            "_BOOT_ID": BOOT.replace("-", ""),
            "MESSAGE": message,
        }
    )


XID = "NVRM: Xid (PCI:0000:07:00): 31, pid=2117, name=python3, MMU Fault"


class Journal(CommandRunner):
    """A journalctl that prints what a test wrote for each of its starts, and then what the script says."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.starts = folder / "starts"

    def script(self, text: str) -> None:
        program = self.folder / "journalctl"
        program.write_text(f'#!/bin/sh\necho "$@" >>"{self.starts}"\ncount=$(wc -l <"{self.starts}")\n{text}\n')
        program.chmod(0o755)

    def lines(self, *lines: str) -> str:
        path = self.folder / f"lines-{len(os.listdir(self.folder))}"
        path.write_text("".join(f"{line}\n" for line in lines))
        return f'cat "{path}"'

    def locate(self, name: str) -> str | None:
        program = self.folder / name
        return str(program) if program.exists() else None


@pytest.fixture
def journal(tmp_path: Path) -> Journal:
    folder = tmp_path / "journal"
    folder.mkdir()
    return Journal(folder)


async def follow(journal: Journal, tmp_path: Path, condition: Callable[[State], bool]) -> State:
    """Follow the log until the condition holds."""
    boot_id = tmp_path / BOOT_ID.lstrip("/")
    boot_id.parent.mkdir(parents=True, exist_ok=True)
    boot_id.write_text(f"{BOOT}\n")
    state = State("a", "gpu-1", BOOT)
    log = XidLog(state, FileTree(str(tmp_path)), journal, lambda: None)
    task = asyncio.create_task(log.run())
    try:
        for _unused in range(1000):
            log.look()
            if condition(state):
                return state
            await asyncio.sleep(0.02)
        raise AssertionError(f"found {state.values}, {state.unknown}")
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(xid_log, "LONGEST_PAUSE", 0.1)


def count(state: State, code: str = "31") -> int:
    return int(state.values.get("xid/0000:07:00.0", {}).get(code, {}).get("count", 0))


async def test_xids_since_the_boot_and_as_they_come(journal: Journal, tmp_path: Path) -> None:
    first = journal.lines(entry(1, "Linux version 6.8"), entry(2, XID), entry(3, "usb 1-1: new device"), "-- noise")
    then = journal.lines(entry(4, list(XID.encode())), entry(5, XID.replace("31", "79")))
    journal.script(f"{first}; sleep 0.3; {then}; exec sleep 60")
    state = await follow(journal, tmp_path, lambda state: count(state) == 2 and count(state, "79") == 1)
    assert "--boot" in journal.starts.read_text()
    told = state.values["xid/0000:07:00.0"]
    assert told["31"]["action"] == "restart_application"
    assert told["79"]["action"] == "power_cycle"
    assert 4 <= told["31"]["seconds"] < 4 + 10**8  # monotonic, plus what the machine has slept
    assert "xid" in state.read
    assert state.unknown == {}


async def test_journalctl_that_ends_is_started_where_it_was(journal: Journal, tmp_path: Path) -> None:
    first = journal.lines(entry(1, "Linux version"), entry(2, XID))
    again = journal.lines(entry(2, XID), entry(3, XID))
    journal.script(f'if [ "$count" = 1 ]; then {first}; exit 1; fi; {again}; exec sleep 60')
    state = await follow(journal, tmp_path, lambda state: count(state) == 2 and not state.unknown)
    assert "--cursor=s=1;i=2;" in journal.starts.read_text().splitlines()[1]
    assert state.values["xid/0000:07:00.0"]["31"]["count"] == 2


async def test_journal_that_lost_the_place_is_read_from_the_boot_on(journal: Journal, tmp_path: Path) -> None:
    first = journal.lines(entry(1, "Linux version"), entry(2, XID))
    rotated = journal.lines(entry(7, XID))
    whole = journal.lines(entry(6, XID), entry(7, XID), entry(8, XID))
    journal.script(
        f'case "$count" in 1) {first}; exit 0;; 2) {rotated}; exec sleep 60;; *) {whole}; exec sleep 60;; esac'
    )
    await follow(journal, tmp_path, lambda state: count(state) == 3 and not state.unknown)
    assert "--boot" in journal.starts.read_text().splitlines()[2]


async def test_journal_that_may_not_be_read_is_unknown_with_its_words(
    journal: Journal, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(xid_log, "FIRST_LINE_SECONDS", 0.3)
    journal.script("echo 'Hint: You are currently not seeing messages' >&2; exec sleep 60")
    state = await follow(journal, tmp_path, lambda state: "xid" in state.unknown)
    assert state.unknown["xid"] == "journalctl: Hint: You are currently not seeing messages"
    assert "xid" not in state.read


async def test_host_without_journalctl(journal: Journal, tmp_path: Path) -> None:
    state = await follow(journal, tmp_path, lambda state: bool(state.unknown))
    assert state.unknown == {"xid": "this host has no journalctl"}


async def test_line_that_is_no_xid_after_all_is_passed_over(journal: Journal, tmp_path: Path) -> None:
    odd = journal.lines(entry(1, "NVRM: Xid (nonsense"), entry(2, "x" * 2_000_000), entry(3, XID))
    journal.script(f"{odd}; exec sleep 60")
    state = await follow(journal, tmp_path, lambda state: count(state) == 1)
    assert list(state.values) == ["xid/0000:07:00.0"]


async def test_xid_of_another_boot_is_not_counted(journal: Journal, tmp_path: Path) -> None:
    former = entry(1, XID).replace(BOOT.replace("-", ""), "f" * 32)
    journal.script(f"{journal.lines(former, entry(2, XID))}; exec sleep 60")
    await follow(journal, tmp_path, lambda state: count(state) == 1)
