# SPDX-License-Identifier: GPL-3.0-or-later
"""The module around the reader: cursors, the cursor's file, and which card an event is of."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from ansible_collections.ringmaster.inference.plugins.module_utils.commands import Answer, CommandRunner
from ansible_collections.ringmaster.inference.plugins.module_utils.file_tree import FileTree
from ansible_collections.ringmaster.inference.plugins.module_utils.nvml import NvmlUnavailableError
from ansible_collections.ringmaster.inference.plugins.modules import xid_info
from tests.support.nvml import Library, a100, driver_files

Run = Callable[..., dict[str, Any]]
XID = "NVRM: Xid (PCI:0000:0f:00): 48, pid=7, name=python3, DBE"


def entry(number: int, message: str) -> str:
    return json.dumps({"__CURSOR": f"i={number}", "__REALTIME_TIMESTAMP": "1", "MESSAGE": message})


class Journal(CommandRunner):
    lines = (entry(1, XID), entry(2, "x"), entry(3, XID))

    def run(self, command: Sequence[str], timeout: float = 20) -> Answer:
        start = next((word.partition("=")[2] for word in command if word.startswith("--cursor=")), "i=1")
        begin = int(start[2:]) - 1 if start[2:].isdigit() else 0
        return Answer(0, "\n".join(self.lines[begin:]))


@pytest.fixture
def call(module_run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Run:
    def run(library: Library | None = None, **arguments: Any) -> dict[str, Any]:
        def find() -> Library:
            if library is None:
                raise NvmlUnavailableError("nvidia-ml-py", "none", "install it")
            return library

        monkeypatch.setattr(xid_info, "find_library", find)
        monkeypatch.setattr(xid_info, "CommandRunner", Journal)
        monkeypatch.setattr(xid_info, "FileTree", lambda _root: FileTree(str(tmp_path)))
        return module_run(xid_info.main, **arguments)

    return run


def test_events_are_of_cards(call: Run, tmp_path: Path) -> None:
    result = call(Library(a100(0), a100(1)))
    assert result["changed"] is False
    assert [event["uuid"] for event in result["events"]] == ["GPU-00000001-0a52-4d5e-9a63-2f0e8d9c7b11"] * 2
    assert [event["index"] for event in result["events"]] == [1, 1]
    assert result["cursor"] == "i=3"


def test_without_nvml_the_drivers_own_files_tell_the_card(call: Run, tmp_path: Path) -> None:
    driver_files(tmp_path, "0000:0f:00.0")
    event = call(None)["events"][0]
    assert (event["pci_address"], event["uuid"], event["index"]) == ("0000:0f:00.0", "GPU-from-the-file-of-0f", None)
    assert "install it" in event["unknown"]["index"]


def test_without_any_card_the_slot_is_left(call: Run) -> None:
    event = call(None)["events"][0]
    assert (event["pci_slot"], event["pci_address"]) == ("0000:0f:00", None)
    assert "install it" in event["unknown"]["pci_address"]


def test_a_cursor(call: Run) -> None:
    assert len(call(None, cursor="i=2")["events"]) == 1
    assert call(None, cursor="i=3")["events"] == []


def test_a_file_keeps_the_cursor(call: Run, tmp_path: Path) -> None:
    path = tmp_path / "xid.cursor"
    assert len(call(None, cursor_file=str(path), _ansible_check_mode=True)["events"]) == 2
    assert not path.exists()
    first = call(None, cursor_file=str(path))
    assert (len(first["events"]), first["changed"], first["start"]) == (2, False, "boot")
    assert path.read_text() == "i=3\n"
    second = call(None, cursor_file=str(path))
    assert (second["events"], second["start"]) == ([], "cursor")
    path.write_bytes(b"\xff\x00\x01")
    third = call(None, cursor_file=str(path))
    assert (len(third["events"]), third["start"]) == (2, "boot")
    assert third["gap"]
    assert [name.name for name in tmp_path.iterdir()] == ["xid.cursor"]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"cursor_file": "{tmp}/none/xid"}, "a directory that exists"),
        ({"cursor_file": "{tmp}"}, "to keep a cursor in"),
        ({"cursor_file": "{tmp}/a", "cursor": "i=1"}, "mutually exclusive"),
        ({"timeout": -1}, "time limit"),
    ],
)
def test_failures_say_what_to_do(call: Run, tmp_path: Path, arguments: dict[str, Any], says: str) -> None:
    given = {name: value.format(tmp=tmp_path) if isinstance(value, str) else value for name, value in arguments.items()}
    result = call(None, **given)
    assert result["failed"]
    assert says in result["msg"]


def test_documentation_agrees_with_the_result(call: Run) -> None:
    documented = yaml.safe_load(xid_info.RETURN)
    result = call(Library(a100(0), a100(1)))
    assert documented.keys() == result.keys() - {"changed", "invocation"}
    assert documented["events"]["contains"].keys() == result["events"][0].keys()
