# SPDX-License-Identifier: GPL-3.0-or-later
"""The state before the first apply on a host without Python: the same record as the module's, and the way back."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from ansible_collections.ringmaster.inference.plugins.module_utils.operation_state import OperationState
from ansible_collections.ringmaster.inference.plugins.plugin_utils import raw_files

if TYPE_CHECKING:
    from tests.unit.plugins.action.conftest import RawHost


@pytest.fixture
def site(raw_host: RawHost) -> Path:
    """Files of each kind, with names that a shell could stumble over."""
    folder = raw_host.folder / "si te"
    folder.mkdir()
    (folder / "file 'a'").write_bytes(b"content\0\xff")
    (folder / "file 'a'").chmod(0o640)
    (folder / "directory").mkdir(mode=0o750)
    (folder / "link").symlink_to("-target\n")
    return folder


def paths_of(site: Path) -> list[str]:
    return [str(site / name) for name in ("file 'a'", "directory", "link", "absent", "new/deep/absent")]


def state(host: RawHost, what: str, **given: Any) -> dict[str, Any]:
    return host.run("raw_operation_state", name="op", state=what, directory=f"{host.folder}/lib/operations", **given)


def snapshot(site: Path) -> dict[str, tuple[int, bytes]]:
    found = {}
    for path in sorted(site.rglob("*")):
        mode = path.lstat().st_mode
        content = path.read_bytes() if stat.S_ISREG(mode) else os.readlink(path).encode() if path.is_symlink() else b""
        found[str(path)] = (mode, content)
    return found


def spoil(site: Path) -> None:
    """What a role, and somebody after it, could make of the files."""
    (site / "file 'a'").write_text("other")
    (site / "file 'a'").chmod(0o4755)
    (site / "directory").rmdir()
    (site / "directory").write_text("a file now")
    (site / "link").unlink()
    (site / "link").mkdir()
    (site / "link" / "inside").write_text("x")
    (site / "absent").mkdir()
    (site / "absent" / ".hidden").write_text("x")
    (site / "new" / "deep").mkdir(parents=True)
    (site / "new" / "deep" / "absent").symlink_to("/nowhere")


def test_all_is_put_back(raw_host: RawHost, site: Path) -> None:
    before = snapshot(site)
    given = {"measured": {"service": "absent", "text": "ü'\n"}, "files": paths_of(site)}
    dry = state(raw_host, "recorded", check=True, **given)
    assert dry["changed"]
    assert not (raw_host.folder / "lib").exists()
    first = state(raw_host, "recorded", **given)
    assert first["changed"]
    assert not state(raw_host, "recorded", **given)["changed"]
    spoil(site)
    spoiled = snapshot(site)
    dry = state(raw_host, "restored", check=True)
    assert snapshot(site) == spoiled
    restored = state(raw_host, "restored", diff=True)
    assert not restored.get("failed"), restored
    assert sorted(dry["paths"]) == sorted(restored["paths"])
    assert snapshot(site) == before
    assert not state(raw_host, "restored")["changed"]
    assert state(raw_host, "read")["measured"] == given["measured"]
    assert raw_host.left_over() == []


def test_record_is_one_that_the_module_reads(raw_host: RawHost, site: Path) -> None:
    state(raw_host, "recorded", measured={"a": [1, None, {"b": "ü"}]}, files=paths_of(site))
    there = OperationState("op", f"{raw_host.folder}/lib/operations").load()
    here = OperationState("op", f"{raw_host.folder}/module")
    here.record({"a": [1, None, {"b": "ü"}]}, paths_of(site))
    own = here.load()
    assert there is not None
    assert own is not None
    assert there.measured == own.measured
    assert {path: entry.same_as(own.files[path]) for path, entry in there.files.items()} == dict.fromkeys(
        own.files, True
    )
    assert [entry.missing_parents for entry in there.files.values()] == [
        entry.missing_parents for entry in own.files.values()
    ]
    spoil(site)
    OperationState("op", f"{raw_host.folder}/lib/operations").restore()
    assert (site / "file 'a'").read_bytes() == b"content\0\xff"


def test_many_files_fit_no_command_line_but_are_kept(plain_host: RawHost) -> None:
    folder = plain_host.folder / "it's many"
    folder.mkdir()
    for number in range(120):
        (folder / f"{number:03}{'x' * 200}").write_text(str(number))
    before = snapshot(folder)
    state(plain_host, "recorded", measured={}, files=[str(path) for path in folder.iterdir()])
    for path in folder.iterdir():
        path.write_text("other")
    assert len(state(plain_host, "restored", check=True)["paths"]) == 120
    for path in sorted(folder.iterdir())[2:]:
        path.write_text(str(int(path.name[:3])))
    assert len(state(plain_host, "restored")["paths"]) == 2
    assert snapshot(folder) == before
    assert max(len(command) for command in plain_host.commands) < 1 << 17


def test_records_are_for_root_alone(raw_host: RawHost, site: Path) -> None:
    state(raw_host, "recorded", measured={}, files=paths_of(site))
    base = raw_host.folder / "lib" / "operations"
    assert [stat.S_IMODE(path.stat().st_mode) for path in (base.parent, base, base / "op")] == [0o755, 0o700, 0o700]
    for path in base.rglob("*"):
        assert not stat.S_IMODE(path.stat().st_mode) & 0o077


def test_first_state_stays_and_later_paths_are_added(raw_host: RawHost, site: Path) -> None:
    state(raw_host, "recorded", measured={"n": 1}, files=[str(site / "absent")])
    (site / "absent").mkdir()
    (site / "absent" / "made by the role").write_text("x")
    more = [str(site / "absent"), str(site / "absent" / "made by the role"), str(site / "file 'a'")]
    again = state(raw_host, "recorded", measured={"n": 2}, files=more)
    assert again["measured"] == {"n": 1}
    assert again["paths"] == sorted(more[1:])
    assert again["files"][more[1]] == {"kind": "absent"}


def test_run_that_was_cut_before_the_document_counts_as_none(raw_host: RawHost, site: Path) -> None:
    folder = raw_host.folder / "lib" / "operations" / "op" / "contents"
    folder.mkdir(parents=True)
    (folder / ".incoming").write_text("half")
    assert not state(raw_host, "read")["recorded"]
    assert not state(raw_host, "restored")["changed"]
    assert state(raw_host, "recorded", measured={}, files=paths_of(site))["changed"]
    assert not (folder / ".incoming").exists()


@pytest.mark.parametrize("document", [b"", b"{", b"[]", b"\xff", b'{"schema": 9}', b"[" * 100_000])
def test_damaged_record_is_told_and_left(raw_host: RawHost, site: Path, document: bytes) -> None:
    state(raw_host, "recorded", measured={}, files=paths_of(site))
    path = raw_host.folder / "lib" / "operations" / "op" / "state.json"
    path.write_bytes(document)
    for what in ("read", "restored", "recorded"):
        result = state(raw_host, what, **({"measured": {}} if what == "recorded" else {}))
        assert result["failed"]
        assert "damaged" in result["msg"]
    assert path.read_bytes() == document
    assert state(raw_host, "absent")["changed"]


def test_content_that_is_gone_or_another_stops_the_way_back(raw_host: RawHost, site: Path) -> None:
    state(raw_host, "recorded", measured={}, files=paths_of(site))
    (content,) = (raw_host.folder / "lib/operations/op/contents").iterdir()
    spoil(site)
    spoiled = snapshot(site)
    content.write_text("other")
    assert state(raw_host, "restored")["failed"]
    content.unlink()
    assert state(raw_host, "restored")["failed"]
    assert snapshot(site) == spoiled


def test_directory_in_which_something_is_mounted_stops_the_way_back(
    raw_host: RawHost, site: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state(raw_host, "recorded", measured={}, files=paths_of(site))
    spoil(site)
    spoiled = snapshot(site)
    table = raw_host.folder / "mounts"
    table.write_text(f"tmpfs {str(site / 'absent').replace(' ', chr(92) + '040')}/x tmpfs rw 0 0\n")
    monkeypatch.setattr(raw_files, "_MOUNTS", raw_files._MOUNTS.replace("/proc/self/mounts", str(table)))
    result = state(raw_host, "restored")
    assert result["failed"]
    assert "unmount" in result["msg"]
    assert snapshot(site) == spoiled


def test_other_operations_are_read(raw_host: RawHost, site: Path) -> None:
    base = f"{raw_host.folder}/lib/operations"
    OperationState("other", base).record({"package": "absent"}, [])
    state(raw_host, "recorded", measured={"own": 1}, files=[])
    assert state(raw_host, "read")["others"] == {"other": {"package": "absent"}}
    (Path(base) / "other" / "state.json").write_text("{}")
    result = state(raw_host, "read")
    assert result["failed"]
    assert "other" in result["msg"]


def test_record_goes_with_all_of_it(raw_host: RawHost, site: Path) -> None:
    state(raw_host, "recorded", measured={}, files=paths_of(site))
    dry = state(raw_host, "absent", check=True)
    assert dry["changed"]
    assert state(raw_host, "absent")["changed"]
    assert not (raw_host.folder / "lib" / "operations").exists()
    assert not state(raw_host, "absent")["changed"]


@pytest.mark.parametrize(
    "given",
    [
        {"name": "../op", "state": "read"},
        {"name": "Op", "state": "absent"},
        {"name": "op", "state": "read", "directory": "relative"},
        {"name": "op", "state": "recorded", "measured": {}, "files": ["relative"]},
        {"name": "op", "state": "recorded", "measured": {}, "files": ["/"]},
        {"name": "op", "state": "recorded", "measured": {}, "files": ["/var/lib/ringmaster/operations/op"]},
    ],
)
def test_what_can_not_be_recorded_is_refused_before_the_host_is_asked(
    plain_host: RawHost, given: dict[str, Any]
) -> None:
    result = plain_host.run("raw_operation_state", **given)
    assert result["failed"]
    assert plain_host.commands == []


def test_pipe_is_refused(raw_host: RawHost) -> None:
    os.mkfifo(raw_host.folder / "pipe")
    result = state(raw_host, "recorded", measured={}, files=[str(raw_host.folder / "pipe")])
    assert result["failed"]
    assert "pipe" in result["msg"]
    assert not (raw_host.folder / "lib").exists()


def test_document_is_written_as_it_is_documented(raw_host: RawHost, site: Path) -> None:
    state(raw_host, "recorded", measured={"a": 1}, files=[str(site / "link")])
    document = json.loads((raw_host.folder / "lib/operations/op/state.json").read_text())
    assert document["schema"] == 1
    assert document["files"][str(site / "link")]["target"] == "-target\n"
