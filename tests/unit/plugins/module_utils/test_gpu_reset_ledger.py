# SPDX-License-Identifier: GPL-3.0-or-later
"""The ledger survives what cuts it, and tells of each run how far it got."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ansible_collections.ringmaster.inference.plugins.module_utils.gpu_reset_ledger import (
    Ledger,
    LedgerError,
    Process,
    fold,
)

UUID = "GPU-00000000-0000-0000-0000-000000000001"
PLAN = {"uuids": [UUID]}


@pytest.fixture
def ledger(tmp_path: Path) -> Ledger:
    return Ledger(str(tmp_path / "lib" / "gpu_reset"))


def opened(ledger: Ledger, name: str = "one") -> None:
    ledger.append("opened", name, uuid=UUID, boot_id="boot", plan=PLAN)


def test_nothing_recorded(ledger: Ledger) -> None:
    assert ledger.read() == ([], [])
    assert ledger.unfinished() is None


def test_line_by_line(ledger: Ledger) -> None:
    opened(ledger)
    ledger.append("phase", "one", phase="drain")
    ledger.append("handed", "one", key="k", by=Process("b", "pid:[1]", 7, 8).document())
    ledger.append("worker", "one", process=Process("b", "pid:[1]", 9, 10).document())
    ledger.append("phase", "one", phase="reset", log="12.5")
    run = ledger.unfinished()
    assert run is not None
    assert (run.phase, run.handed, run.workers, run.host_phases) == ("reset", ["k"], 1, ["reset"])
    assert run.worker == Process("b", "pid:[1]", 9, 10)
    assert run.opened_by == Process("b", "pid:[1]", 7, 8)
    assert run.reset_at
    assert run.reset_answer is None
    assert run.log_position == "12.5"
    ledger.append("reset", "one", answer={"ok": True}, log="14.5")
    ledger.append("outcome", "one", outcome={"result": "failed"}, boot_id="boot")
    run = ledger.run("one")
    assert run is not None
    assert (run.outcome, run.outcome_boot_id, run.log_position) == ({"result": "failed"}, "boot", "14.5")
    ledger.append("handed", "one", key="l")
    run = ledger.run("one")
    assert run is not None
    assert (run.outcome, run.workers, run.handed) == (None, 0, ["k", "l"])
    ledger.append("closed", "one", how="verified")
    assert ledger.unfinished() is None


def test_line_that_was_cut_is_skipped_and_named_and_does_not_swallow_the_next(ledger: Ledger) -> None:
    opened(ledger)
    with open(ledger.path, "ab") as file:
        file.write(b'{"event": "phase", "run": "one", "pha')
    ledger.append("phase", "one", phase="stop")
    records, damaged = ledger.read()
    assert [record["event"] for record in records] == ["opened", "phase"]
    assert damaged == [2]
    run = ledger.unfinished()
    assert run is not None
    assert run.phase == "stop"


@given(st.binary(max_size=200), st.integers(0, 10_000))
def test_no_damage_breaks_the_reader(tmp_path_factory: pytest.TempPathFactory, junk: bytes, at: int) -> None:
    ledger = Ledger(str(tmp_path_factory.mktemp("junk") / "gpu_reset"))
    opened(ledger)
    ledger.append("phase", "one", phase="stop")
    content = Path(ledger.path).read_bytes()
    at %= len(content)
    Path(ledger.path).write_bytes(content[:at] + junk + content[at:])
    ledger.read()
    ledger.runs()
    ledger.append("phase", "two", phase="stop")
    assert ledger.read()[0][-1]["run"] == "two"


values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.just(10**400)
    | st.floats()
    | st.sampled_from(["one", "two", UUID, "stop", "reset"]),
    lambda inner: (
        st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from(["phase", "pid", "ok"]), inner, max_size=3)
    ),
    max_leaves=6,
)
lines = st.fixed_dictionaries(
    {
        "event": st.sampled_from(
            ["opened", "phase", "handed", "worker", "reset", "outcome", "closed", "refused", "later"]
        )
        | values,
        "run": st.sampled_from(["one", "two"]) | values,
    },
    optional={
        name: values | st.just(PLAN)
        for name in (
            "plan",
            "uuid",
            "boot_id",
            "phase",
            "outcome",
            "answer",
            "process",
            "by",
            "key",
            "lease_seconds",
            "at",
        )
    },
)


@given(st.lists(lines, max_size=12))
def test_any_lines_can_be_folded(records: list[dict[str, Any]]) -> None:
    for run in fold(records):
        assert run.name
        assert 0 <= run.lease_seconds <= 1e12
        json.dumps([run.phases, run.handed, run.closed], default=str)


def test_only_root_may_read(ledger: Ledger) -> None:
    old = os.umask(0)
    try:
        opened(ledger)
        with ledger.locked():
            pass
    finally:
        os.umask(old)
    assert oct(os.stat(ledger.directory).st_mode)[-3:] == "700"
    assert {oct(path.stat().st_mode)[-3:] for path in Path(ledger.directory).iterdir()} == {"600"}


def test_link_in_the_place_of_the_ledger_is_not_followed(ledger: Ledger, tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("")
    Path(ledger.directory).mkdir(parents=True)
    Path(ledger.path).symlink_to(victim)
    with pytest.raises(LedgerError, match="Expected to read and write"):
        opened(ledger)
    assert victim.read_text() == ""


def test_directory_that_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "gpu_reset").write_text("")
    ledger = Ledger(str(tmp_path / "gpu_reset"))
    with pytest.raises(LedgerError):
        ledger.read()
    with pytest.raises(LedgerError), ledger.locked():
        pass


def test_full_disk(ledger: Ledger, monkeypatch: pytest.MonkeyPatch) -> None:
    opened(ledger)
    monkeypatch.setattr(os, "write", lambda _handle, data: len(data) - 3)
    with pytest.raises(LedgerError, match="full disk"):
        ledger.append("phase", "one", phase="stop")


def test_lock_is_free_again_when_its_holder_is_killed(ledger: Ledger) -> None:
    with ledger.locked():
        pass
    program = (
        "import fcntl,os,sys,time; handle=os.open(sys.argv[1], os.O_RDWR); fcntl.flock(handle, fcntl.LOCK_EX); "
        "print(1, flush=True); time.sleep(60)"
    )
    holder = subprocess.Popen(
        [sys.executable, "-c", program, f"{ledger.directory}/lock"], stdout=subprocess.PIPE, text=True
    )
    with holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "1\n"
        holder.kill()
    with ledger.locked():
        pass


def test_processes() -> None:
    process = Process("boot", "pid:[4026531836]", 17, 4711)
    assert Process.parse(process.document()) == process
    for field in process.document():
        assert Process.parse({**process.document(), field: None}) is None
    assert Process.parse("17") is None
