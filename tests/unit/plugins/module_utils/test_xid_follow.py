# SPDX-License-Identifier: GPL-3.0-or-later
"""Following the kernel log: the command, and each line that it prints."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ansible_collections.ringmaster.inference.plugins.module_utils.commands import CommandRunner
from ansible_collections.ringmaster.inference.plugins.module_utils.file_tree import FileTree
from ansible_collections.ringmaster.inference.plugins.module_utils.xid import XidReader, cursor_of, followed

BOOT = "2f0c5e1b-7f5f-4f0e-9d49-5c2b1a7e9d10"
CURSOR = "s=a;i=1;b=c;m=d;t=e;x=f"
LINE = "NVRM: Xid (PCI:0000:05:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus."


def entry(message: Any, **fields: Any) -> bytes:
    known = {"__CURSOR": CURSOR, "__MONOTONIC_TIMESTAMP": "2500000", "_BOOT_ID": BOOT.replace("-", "")}
    return json.dumps({**known, "MESSAGE": message, **fields}).encode() + b"\n"


def test_command_begins_at_the_boot_or_at_a_cursor(tmp_path: Path) -> None:
    reader = XidReader(FileTree(str(tmp_path)), CommandRunner())
    for cursor, since in ((None, "--boot"), ("", "--boot"), (CURSOR, f"--cursor={CURSOR}")):
        command = reader.follow(cursor)
        assert command[0] == "journalctl"
        assert {"--follow", "--no-tail", "--output=json", "_TRANSPORT=kernel", since} <= set(command)
    with pytest.raises(ValueError, match="given as cursor is none"):
        reader.follow("x --vacuum-size=1 \n")


@pytest.mark.parametrize("message", [LINE, list(LINE.encode()), [LINE, "twice"], f"  {LINE}\n"])
def test_xid_in_any_form_of_an_entry(message: Any) -> None:
    event, complaint = followed(entry(message), BOOT)
    assert complaint == ""
    assert event is not None
    assert (event["xid"], event["pci_slot"], event["since_boot_seconds"]) == (79, "0000:05:00", 2.5)
    assert event["this_boot"] is True


def test_entry_of_another_boot_is_told() -> None:
    event, _complaint = followed(entry(LINE, _BOOT_ID="f" * 32), BOOT)
    assert event is not None
    assert event["this_boot"] is False


@pytest.mark.parametrize(
    "line",
    [b"", b"-- No entries --\n", entry("usb 1-1"), entry(None), entry("a process named NVRM: Xid (PCI"), b"{NVRM:\n"],
)
def test_other_lines_are_nothing(line: bytes) -> None:
    assert followed(line, BOOT) == (None, "")


def test_line_that_only_begins_like_one_is_complained_of() -> None:
    assert followed(entry("NVRM: Xid (what)"), BOOT) == (None, "NVRM: Xid (what)")


def test_cursor() -> None:
    assert cursor_of(entry(LINE)) == CURSOR
    assert cursor_of(b"-- No entries --\n") is None
    assert cursor_of(b'{"__CURSOR": 1}\n') is None


@given(st.binary(max_size=100))
def test_no_line_makes_it_fail(junk: bytes) -> None:
    for line in (junk, b'{"MESSAGE":[' + junk, b'{"MESSAGE":"NVRM: Xid (PCI:0000:05:00): ' + junk + b'"}'):
        followed(line, BOOT)
        cursor_of(line)
