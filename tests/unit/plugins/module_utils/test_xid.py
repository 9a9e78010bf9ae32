# SPDX-License-Identifier: GPL-3.0-or-later
"""Xid lines of all forms, good and hostile, from a journal with and without the cursor, and from the kernel's ring."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ansible_collections.ringmaster.inference.plugins.module_utils.commands import Answer, CommandRunner
from ansible_collections.ringmaster.inference.plugins.module_utils.file_tree import FileTree
from ansible_collections.ringmaster.inference.plugins.module_utils.xid import (
    XidReader,
    attach,
    entries,
    parse,
)
from ansible_collections.ringmaster.inference.plugins.module_utils.xid_table import ACTIONS, XIDS

BOOT = "9d0a4d5e9a632f0e8d9c7b115f1c0b1e"
OFF_THE_BUS = "NVRM: Xid (PCI:0000:05:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus."


def event(message: str) -> dict[str, Any]:
    found = parse(message)
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("message", "xid", "slot", "pid", "process", "action"),
    [
        (OFF_THE_BUS, 79, "0000:05:00", None, None, "power_cycle"),
        ("NVRM: Xid (PCI:0000:10:1c): 63, pid=1896, Row Remapper", 63, "0000:10:1c", 1896, None, "reset_later"),
        ("NVRM: GPU 0000:29:00.0: GPU has fallen off the bus.", 79, "0000:29:00", None, None, "power_cycle"),
        ("NVRM: GPU at PCI:0000:29:00: GPU has fallen off the bus.", 79, "0000:29:00", None, None, "power_cycle"),
        ("NVRM: Xid (PCI:0000:CB:00): 109, pid=17, name=pt_main, Ch 8", 109, "0000:cb:00", 17, "pt_main", "reset"),
        ("NVRM: Xid (0000:03:00): 13, 0001 00000000 0000c0c0", 13, "0000:03:00", None, None, "restart_application"),
        ("NVRM: Xid (PCI:0000:02:00 GPU-I:05): 48, pid=3, name=python3, x", 48, "0000:02:00", 3, "python3", "drain"),
        ("NVRM: Xid (PCI:0019:01:00): 149, NETIR Fatal Link -1 (0x0f)", 149, "0019:01:00", None, None, "report"),
        ("  NVRM: Xid (PCI:0000:05:00): 48, pid=1, name=a, DBE\n", 48, "0000:05:00", 1, "a", "drain"),
        ("NVRM: Xid (PCI:0000:05:00): 95", 95, "0000:05:00", None, None, "reset"),
    ],
)
def test_lines(message: str, xid: int, slot: str, pid: int | None, process: str | None, action: str) -> None:
    found = event(message)
    assert (found["xid"], found["pci_slot"], found["pid"], found["process"], found["action"]) == (
        xid,
        slot,
        pid,
        process,
        action,
    )
    for field in ("pid", "process", "recovery_action", "meaning"):
        assert (found[field] is None) == (field in found["unknown"])


@pytest.mark.parametrize(
    ("words", "recovery", "action"),
    [
        ("from 0x0 (None) to 0x4 (Drain and Reset)", "drain_and_reset", "reset"),
        ("from 0x0 (None) to 0x1 (GPU Reset Required)", "reset", "reset"),
        ("from 0x0 (None) to 0x2 (Node Reboot Required)", "reboot", "reboot"),
        ("from 0x0 (None) to 0x3 (Drain P2P)", "drain_p2p", "drain"),
        ("from 0x4 (Drain and Reset) to 0x0 (None)", "none", "none"),
        ("from (None) to (Reboot)", "reboot", "reboot"),
        ("from 0x0 (None) to 0x9 (Something New)", None, "report"),
        ("from 0x0 (None)", None, "report"),
        ("", None, "report"),
    ],
)
def test_the_recovery_action_is_read_from_its_line(words: str, recovery: str | None, action: str) -> None:
    found = event(f"NVRM: Xid (PCI:0009:01:00): 154, GPU recovery action changed {words}")
    assert (found["recovery_action"], found["action"]) == (recovery, action)
    assert (recovery is None) == ("recovery_action" in found["unknown"])


def test_a_code_that_is_not_in_the_table_is_reported_and_not_guessed() -> None:
    found = event("NVRM: Xid (PCI:0000:05:00): 999, pid=1, name=a, Something")
    assert (found["meaning"], found["action"]) == (None, "report")
    assert "999" in found["unknown"]["meaning"]


@pytest.mark.parametrize(
    "message",
    [
        "",
        "nvidia-smi: NVRM: Xid (PCI:0000:05:00): 79, said a process",
        "audit: comm=NVRM: Xid (PCI:0000:05:00): 79,",
        "NVRM: GPU at PCI:0000:00:05: GPU-efbdfde9-5798-a6e7-4c46-12518fa15375",
        "NVRM: loading NVIDIA UNIX x86_64 Kernel Module  535.183.01",
        "nvidia-nvswitch: SXid (PCI:0000:c4:00.0): 12028, Non-fatal, Link 32 egress non-posted PRIV error",
    ],
)
def test_other_lines_are_none(message: str) -> None:
    assert parse(message) is None


@pytest.mark.parametrize(
    "message",
    [
        "NVRM: Xid",
        "NVRM: Xid (PCI:0000:05:00)",
        "NVRM: Xid (PCI:0000:05:00): seventy-nine,",
        "NVRM: Xid (PCI:0000:zz:00): 79, x",
        "NVRM: Xid (PCI:::::::): 79, x",
        "NVRM: Xid (PCI:0000:05:ff): 79, x",
        "NVRM: Xid (PCI:0000:05:00): 12345678901234567890, x",
    ],
)
def test_broken_lines_are_told_apart(message: str) -> None:
    with pytest.raises(ValueError, match="NVRM: Xid"):
        parse(message)


def test_a_process_can_not_forge_a_code() -> None:
    found = event("NVRM: Xid (PCI:0000:05:00): 31, pid=7, name=x): 79, y\x1b[2J, NVRM: Xid (PCI:0000:07:00): 79, z")
    assert (found["xid"], found["pci_slot"], found["process"]) == (31, "0000:05:00", "x): 79")
    assert "\x1b" not in found["message"]


def test_the_table() -> None:
    assert {xid.action for xid in XIDS.values()} <= set(ACTIONS)
    assert XIDS[79].action == "power_cycle"
    assert {code for code, xid in XIDS.items() if xid.action == "reset"} == {
        46, 62, 64, 95, 109, 110, 119, 120, 136, 140, 143, 155, 156, 158,
    }  # fmt: skip


@given(st.text() | st.text().map(lambda text: f"NVRM: Xid (PCI:0000:05:00): {text}"))
def test_any_line(message: str) -> None:
    try:
        found = parse(message)
    except ValueError:
        return
    if found:
        json.dumps(found)
        assert found["message"].isprintable()


# The journal


def entry(number: int, message: Any, boot: str = BOOT, **changes: Any) -> str:
    return json.dumps(
        {
            "__CURSOR": cursor(number, boot),
            "__REALTIME_TIMESTAMP": str(1772366400000000 + number),
            "__MONOTONIC_TIMESTAMP": str(1_500_000 + number),
            "_BOOT_ID": boot,
            "MESSAGE": message,
        }
        | changes
    )


def cursor(number: int, boot: str = BOOT, sequence: str = "a1") -> str:
    return f"s={sequence};i={number};b={boot};m={number};t={number};x={number:x}"


class Host(CommandRunner):
    """A host whose journal holds `lines`; a line is its number and message, or text that journalctl prints besides."""

    def __init__(self, *lines: str, journal: Answer | None = None, ring: Answer | None = None) -> None:
        self.lines = lines
        self.journal = journal
        self.ring = ring or Answer(None, complaint="not found: dmesg")
        self.asked: list[list[str]] = []

    def run(self, command: Sequence[str], timeout: float = 20) -> Answer:
        self.asked.append(list(command))
        if command[0] == "dmesg":
            return self.ring
        if self.journal is not None:
            return self.journal
        start = next((word.partition("=")[2] for word in command if word.startswith("--cursor=")), None)
        most = next(int(word.partition("=")[2]) for word in command if word.startswith("--lines="))
        lines = list(self.lines)
        if start is None:
            return Answer(0, "\n".join(lines[-most:]))
        known = [each.cursor for each in entries("\n".join(lines))]
        # As journalctl does: what it does not find, it starts near.
        return Answer(0, "\n".join(lines[known.index(start) if start in known else 0 :][:most]))


def reader(host: Host, root: Path) -> XidReader:
    boot = root / "proc/sys/kernel/random/boot_id"
    boot.parent.mkdir(parents=True, exist_ok=True)
    boot.write_text("9d0a4d5e-9a63-2f0e-8d9c-7b115f1c0b1e\n")
    return XidReader(FileTree(str(root)), host)


def test_all_since_the_start(tmp_path: Path) -> None:
    host = Host(entry(1, "Linux version 6.8"), entry(2, OFF_THE_BUS), entry(3, "usb 1-1: new device"))
    found = reader(host, tmp_path).read()
    assert found["source"] == "journal"
    assert (found["start"], found["gap"], found["unparsed"], found["unknown"]) == ("boot", None, [], {})
    assert found["cursor"] == cursor(3)
    (event,) = found["events"]
    assert event["xid"] == 79
    assert event["time"] == "2026-03-01T12:00:00.000002Z"
    assert event["since_boot_seconds"] == 1.500002
    assert event["this_boot"] is True
    assert "--dmesg" in host.asked[0]


def test_only_what_is_new_since_a_cursor_also_from_before_the_last_start(tmp_path: Path) -> None:
    former = "0" * 32
    host = Host(
        entry(1, OFF_THE_BUS, former), entry(2, "x", former), entry(3, OFF_THE_BUS, former), entry(4, OFF_THE_BUS)
    )
    found = reader(host, tmp_path).read(cursor(2, former))
    assert [event["this_boot"] for event in found["events"]] == [False, True]
    assert (found["start"], found["gap"], found["cursor"]) == ("cursor", None, cursor(4))
    assert "--dmesg" not in host.asked[0]
    assert "_TRANSPORT=kernel" in host.asked[0]
    again = reader(host, tmp_path).read(found["cursor"])
    assert (again["events"], again["cursor"]) == ([], cursor(4))


def test_an_entry_that_moved_to_disk_is_still_the_same(tmp_path: Path) -> None:
    moved = cursor(2, sequence="b2").replace("i=2", "i=99")

    class Moved(Host):
        def run(self, command: Sequence[str], timeout: float = 20) -> Answer:
            return Answer(0, "\n".join(self.lines))

    found = reader(Moved(entry(2, "x"), entry(3, OFF_THE_BUS)), tmp_path).read(moved)
    assert (len(found["events"]), found["start"], found["gap"]) == (1, "cursor", None)


@pytest.mark.parametrize("gone", [cursor(77), "s=1", "what was ever", "--file=/etc/shadow", "x" * 900, "\0"])
def test_a_cursor_that_is_gone_starts_again_and_says_so(tmp_path: Path, gone: str) -> None:
    found = reader(Host(entry(1, OFF_THE_BUS), entry(2, "x")), tmp_path).read(gone)
    assert len(found["events"]) == 1
    assert found["start"] == "boot"
    assert "cursor" in found["gap"]
    assert found["cursor"] == cursor(2)


def test_a_journal_that_was_emptied_keeps_the_cursor_and_says_so(tmp_path: Path) -> None:
    found = reader(Host(), tmp_path).read(cursor(1))
    assert found["events"] is None
    assert found["cursor"] == cursor(1)
    assert "no longer has" in found["gap"]
    assert "no line of the kernel" in found["unknown"]["events"]


def test_a_storm_is_read_in_pages_to_its_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(XidReader, "PAGE", 10)
    monkeypatch.setattr(XidReader, "PAGES", 5)
    storm = [entry(number, "pcieport: AER: Corrected error") for number in range(42)]
    host = Host(*storm, entry(42, OFF_THE_BUS))
    found = reader(host, tmp_path).read(cursor(0))
    assert (len(found["events"]), found["gap"], found["cursor"]) == (1, None, cursor(42))
    assert len(host.asked) == 5
    longer = Host(*storm, *(entry(number, "x") for number in range(42, 80)), entry(80, OFF_THE_BUS))
    part = reader(longer, tmp_path).read(cursor(0))
    assert (part["events"], part["cursor"]) == ([], cursor(50))
    assert "only 50 lines were read" in part["gap"]
    assert len(reader(longer, tmp_path).read(part["cursor"])["events"]) == 1
    start = reader(longer, tmp_path).read()
    assert len(start["events"]) == 1
    assert "only the last 10 lines" in start["gap"]


def test_messages_that_journald_gives_as_bytes_and_as_lists(tmp_path: Path) -> None:
    odd = [
        entry(1, list(OFF_THE_BUS.encode() + b"\xff\xfe")),
        entry(2, [OFF_THE_BUS, "x"]),
        entry(3, [list(OFF_THE_BUS.encode())]),
        entry(4, None),
        entry(5, 7),
        entry(6, [300, -1]),
        entry(7, [[[1]]]),
        entry(8, {}),
        entry(9, OFF_THE_BUS, __REALTIME_TIMESTAMP="soon", __MONOTONIC_TIMESTAMP=None, _BOOT_ID=5),
        entry(10, OFF_THE_BUS, __REALTIME_TIMESTAMP="9" * 19),
    ]
    found = reader(Host(*odd), tmp_path).read()
    assert [event["xid"] for event in found["events"]] == [79] * 5
    assert found["events"][0]["message"].endswith("\ufffd\ufffd")
    last = found["events"][3]
    assert (last["time"], last["since_boot_seconds"], last["this_boot"]) == (None, None, None)
    assert last["unknown"].keys() >= {"time", "since_boot_seconds", "this_boot"}


def test_notes_and_cut_lines_between_the_entries(tmp_path: Path) -> None:
    host = Host("-- No entries --", entry(1, OFF_THE_BUS), entry(2, OFF_THE_BUS)[:40], "[1]", "{}", '"text"')
    found = reader(host, tmp_path).read()
    assert len(found["events"]) == 1
    assert found["cursor"] == cursor(1)


def test_broken_lines_are_shown_beside_the_events(tmp_path: Path) -> None:
    found = reader(Host(entry(1, "NVRM: Xid (PCI:0000:05:00): new form")), tmp_path).read()
    assert (found["events"], found["unparsed"]) == ([], ["NVRM: Xid (PCI:0000:05:00): new form"])


# Without a journal

RING = Answer(0, f"[    0.000000] Linux version 6.8\n<4>[   12.500000] {OFF_THE_BUS}\n{OFF_THE_BUS}\nno time at all\n")
NO_JOURNAL = Answer(None, complaint="not found: journalctl")


def test_the_kernels_own_ring_has_no_cursor_and_no_time_of_day(tmp_path: Path) -> None:
    found = reader(Host(journal=NO_JOURNAL, ring=RING), tmp_path).read()
    assert (found["source"], found["start"], found["cursor"], found["gap"]) == ("kernel_ring", "boot", None, None)
    assert "cursor" in found["unknown"]
    assert [event["since_boot_seconds"] for event in found["events"]] == [12.5, None]
    assert [event["this_boot"] for event in found["events"]] == [True, True]
    assert "gap" in found
    asked = reader(Host(journal=NO_JOURNAL, ring=RING), tmp_path).read(cursor(1))
    assert "ring" in asked["gap"]


@pytest.mark.parametrize(
    ("journal", "says"),
    [
        (NO_JOURNAL, "no journalctl"),
        (Answer(1, "", "No journal files were opened due to insufficient permissions."), "insufficient permissions"),
        (Answer(0, "-- No entries --\n", "Hint: You are currently not seeing messages from the system."), "not seeing"),
        (Answer(0, ""), "no line of the kernel"),
        (Answer(1, ""), "status 1"),
        (Answer(None, complaint="no answer within 60 s: journalctl"), "no answer"),
    ],
)
def test_a_log_that_can_not_be_read_is_not_a_quiet_one(tmp_path: Path, journal: Answer, says: str) -> None:
    denied = Answer(1, "", "dmesg: read kernel buffer failed: Operation not permitted")
    found = reader(Host(journal=journal, ring=denied), tmp_path).read()
    assert found["events"] is None
    assert says in found["unknown"]["events"]
    assert "not permitted" in found["unknown"]["events"]
    assert {name for name in ("events", "unparsed", "cursor", "source", "start") if found[name] is None} == found[
        "unknown"
    ].keys()


@given(st.text(), st.none() | st.text(max_size=20), st.text())
def test_any_journal(output: str, start: str | None, ring: str) -> None:
    host = Host(journal=Answer(0, output), ring=Answer(0, ring))
    json.dumps(XidReader(FileTree("/nowhere"), host).read(start), allow_nan=False)


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(max_size=4), lambda each: st.lists(each, max_size=3)
    )
)
def test_any_entry(value: Any) -> None:
    text = entry(1, value, __CURSOR=value, _BOOT_ID=value, __REALTIME_TIMESTAMP=value, __MONOTONIC_TIMESTAMP=value)
    assert len(list(entries(text))) == 1


# Cards


def test_an_event_is_of_the_card_in_its_slot() -> None:
    events = [event(OFF_THE_BUS), event(OFF_THE_BUS.replace("05:00", "06:00"))]
    card = {
        "pci_address": "0000:05:00.0",
        "uuid": "GPU-1",
        "index": None,
        "model": "NVIDIA L40S",
        "unknown": {"index": "no"},
    }
    attach(events, [card])
    assert (events[0]["pci_address"], events[0]["uuid"], events[0]["index"]) == ("0000:05:00.0", "GPU-1", None)
    assert events[0]["unknown"]["index"] == "no"
    assert events[1]["pci_address"] is None
    assert events[1]["unknown"]["uuid"] == "no card of the host is in this slot"
