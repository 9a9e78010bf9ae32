# SPDX-License-Identifier: GPL-3.0-or-later
"""The record of a host before an operation's first apply: kept exactly, put back exactly, and never half."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import signal
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ansible_collections.ringmaster.inference.plugins.module_utils import operation_state
from ansible_collections.ringmaster.inference.plugins.module_utils.operation_state import (
    OperationState,
    OperationStateError,
)

MEASURED = {"version": "absent", "service": "inactive"}
SYSTEM_CALLS = ("mkdir", "chmod", "fsync", "replace", "unlink", "rmdir", "symlink", "fchmod", "open")


class Host:
    """A small file tree that stands for a host's, and an operation that will own some of it."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.tree = root / "host"
        self.tree.mkdir()
        self.state = OperationState("edge", str(root / "lib" / "operations"))
        self.config = self.tree / "etc" / "haproxy.cfg"
        self.config.parent.mkdir()
        self.config.write_bytes(b"before\n")
        self.config.chmod(0o640)
        self.kept = self.tree / "etc" / "kept.d"
        self.kept.mkdir(mode=0o750)
        self.link = self.tree / "etc" / "current"
        self.link.symlink_to("kept.d")
        self.new = self.tree / "opt" / "ringmaster" / "edge" / "daemon.py"
        self.new_tree = self.tree / "srv"
        self.files = [str(each) for each in (self.config, self.kept, self.link, self.new, self.new_tree)]

    def record(self) -> Any:
        return self.state.record(MEASURED, self.files)

    def apply(self) -> None:
        """What a role would do: every path is another one afterwards."""
        self.config.write_bytes(b"after\n")
        self.config.chmod(0o600)
        self.kept.rmdir()
        self.kept.write_bytes(b"a file now")
        self.link.unlink()
        self.link.mkdir()
        (self.link / "inside").write_bytes(b"x")
        self.new.parent.mkdir(parents=True)
        self.new.write_bytes(b"program")
        (self.new_tree / "deep" / "deeper").mkdir(parents=True)
        (self.new_tree / "deep" / "deeper" / "file").write_bytes(b"x")

    def snapshot(self) -> dict[str, Any]:
        """Everything in the tree: kind, mode, owner, content or target."""
        found: dict[str, Any] = {}
        for path in sorted(self.tree.rglob("*")):
            status = path.lstat()
            content: Any = None
            if stat.S_ISLNK(status.st_mode):
                content = os.readlink(path)
            elif stat.S_ISREG(status.st_mode):
                content = path.read_bytes()
            found[str(path)] = (oct(status.st_mode), status.st_uid, status.st_gid, content)
        return found


@pytest.fixture
def host(tmp_path: Path) -> Host:
    return Host(tmp_path)


def test_first_record_is_kept_and_later_ones_change_nothing(host: Host) -> None:
    first = host.record()
    assert first.changed
    assert first.record.measured == MEASURED
    assert sorted(first.paths) == sorted(host.files)

    host.apply()
    second = host.state.record({"version": "3.0"}, host.files)
    assert not second.changed
    assert second.record == first.record


def test_restore_brings_everything_back_and_only_once(host: Host) -> None:
    before = host.snapshot()
    host.record()
    host.apply()
    assert host.snapshot() != before

    outcome = host.state.restore()
    assert outcome.changed
    assert outcome.record.measured == MEASURED
    assert host.snapshot() == before
    assert not host.state.restore().changed
    assert host.state.load() is not None, "the record stays until it is removed"


def test_restore_without_a_record_changes_nothing(host: Host) -> None:
    before = host.snapshot()
    outcome = host.state.restore()
    assert not outcome.changed
    assert outcome.record is None
    assert host.snapshot() == before


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may give files away")
def test_owner_and_setuid_come_back(host: Host) -> None:
    os.chown(host.config, 12, 34)
    host.config.chmod(0o4755)
    os.lchown(host.link, 56, 78)
    os.chown(host.kept, 9, 9)
    before = host.snapshot()
    host.record()
    host.apply()
    os.chown(host.config, 0, 0)
    host.state.restore()
    assert host.snapshot() == before


def test_access_control_list_comes_back(host: Host) -> None:
    # Version 2; user::rw-, user 12: r--, group::---, mask::r--, other::---
    value = bytes.fromhex(
        "02000000 01000600ffffffff 020004000c000000 04000000ffffffff 10000400ffffffff 20000000ffffffff"
    )
    try:
        os.setxattr(host.config, "system.posix_acl_access", value)
    except OSError:
        pytest.skip("the file system has no access control lists")
    before = host.snapshot()
    host.record()
    os.removexattr(host.config, "system.posix_acl_access")
    assert host.state.restore().changed
    assert os.getxattr(host.config, "system.posix_acl_access") == value
    assert host.snapshot() == before


def test_only_an_attribute_differs(host: Host) -> None:
    host.record()
    host.config.chmod(0o644)
    outcome = host.state.restore()
    assert outcome.paths == [str(host.config)]
    assert stat.S_IMODE(host.config.stat().st_mode) == 0o640


def test_parents_that_were_missing_go_only_if_empty(host: Host) -> None:
    host.record()
    host.apply()
    neighbour = host.tree / "opt" / "ringmaster" / "scheduler"
    neighbour.mkdir()
    host.state.restore()
    assert neighbour.is_dir()
    assert not host.new.parent.exists()

    neighbour.rmdir()
    outcome = host.state.restore()
    assert outcome.paths == [str(host.tree / "opt" / "ringmaster"), str(host.tree / "opt")]
    assert not (host.tree / "opt").exists()


def test_new_paths_of_a_later_version_are_added(host: Host) -> None:
    host.record()
    host.apply()
    added = host.tree / "etc" / "added"
    added.write_bytes(b"there before this version")
    inside = host.new_tree / "deep"
    outcome = host.state.record({"version": "3.0"}, [*host.files, str(added), str(inside)])
    assert outcome.changed
    assert outcome.paths == [str(added), str(inside)]
    assert outcome.record.measured == MEASURED
    assert outcome.record.files[str(inside)].kind == "absent", "beneath a directory that was absent at first"

    added.write_bytes(b"after")
    host.state.restore()
    assert added.read_bytes() == b"there before this version"
    assert not host.new_tree.exists()


def test_records_are_for_their_owner_only(host: Host) -> None:
    old = os.umask(0)
    try:
        host.record()
    finally:
        os.umask(old)
    for path in (Path(host.state.base), *Path(host.state.base).rglob("*")):
        assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600), path
    assert stat.S_IMODE(Path(host.state.base).parent.stat().st_mode) == 0o755


def test_remove_forgets_and_leaves_nothing(host: Host) -> None:
    host.record()
    assert host.state.remove().changed
    assert not Path(host.state.base).exists()
    assert not host.state.remove().changed
    assert host.state.load() is None


def test_remove_leaves_other_operations(host: Host) -> None:
    host.record()
    other = OperationState("registry", host.state.base)
    other.record({}, [])
    host.state.remove()
    assert other.load() is not None


def test_others_are_those_with_a_record(host: Host) -> None:
    assert host.state.others() == {}
    host.record()
    assert host.state.others() == {}
    base = Path(host.state.base)
    OperationState("vllm", str(base)).record({"python3-uvloop": "absent"}, [])
    (base / "cut" / "contents").mkdir(parents=True)  # a first recording that did not finish
    (base / "lost+found").mkdir()
    (base / "file").write_bytes(b"x")
    assert host.state.others() == {"vllm": {"python3-uvloop": "absent"}}
    (base / "vllm" / "state.json").write_bytes(b"{")
    with pytest.raises(OperationStateError, match="of operation vllm"):
        host.state.others()


def test_check_mode_tells_and_touches_nothing(host: Host) -> None:
    before = host.snapshot()
    would = host.state.record(MEASURED, host.files, write=False)
    assert would.changed
    assert not Path(host.state.base).exists()

    did = host.record()
    assert would.paths == did.paths
    assert would.record.files == did.record.files
    host.apply()
    applied = host.snapshot()
    would = host.state.restore(write=False)
    assert host.snapshot() == applied
    did = host.state.restore()
    assert (would.changed, would.paths, would.diff) == (did.changed, did.paths, did.diff)
    assert host.snapshot() == before
    assert host.state.remove(write=False).changed
    assert host.state.load() is not None


# Cut half-way


def run_until(number: int, work: Any) -> bool:
    """Run ``work`` in a process of its own that dies at system call ``number``; whether it died."""
    child = os.fork()
    if child == 0:
        signal.alarm(60)  # whatever happens, the parent does not wait for ever
        left = [number]

        def dying(call: Any) -> Any:
            def wrapped(*arguments: Any, **keywords: Any) -> Any:
                left[0] -= 1
                if left[0] < 0:
                    os._exit(9)
                return call(*arguments, **keywords)

            return wrapped

        for name in SYSTEM_CALLS:
            setattr(os, name, dying(getattr(os, name)))
        with contextlib.suppress(Exception):
            work()
            os._exit(0)
        os._exit(1)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert status in (0, 9)
    return status == 9


def steps(tmp_path: Path, work: Any) -> Any:
    """A fresh host for each system call at which a run of ``work`` can die, and one at which it does not."""
    for number in range(500):
        root = tmp_path / str(number)
        root.mkdir()
        host = Host(root)
        yield host, lambda host=host, number=number: run_until(number, lambda: work(host))
        if (root / "survived").exists():
            return
    raise AssertionError("more than 500 system calls")


def test_record_killed_at_any_step_is_old_or_new(tmp_path: Path) -> None:
    died = 0
    for host, run in steps(tmp_path, lambda host: host.record()):
        before = host.snapshot()
        if run():
            died += 1
        else:
            (host.root / "survived").touch()
        host.state.load()
        host.record()
        host.apply()
        host.state.restore()
        assert host.snapshot() == before
        assert not list(Path(host.state.directory).rglob(".*")), "nothing of the killed run is left"
    assert died > 10


def test_restore_killed_at_any_step_can_be_run_again(tmp_path: Path) -> None:
    died = 0
    for host, run in steps(tmp_path, lambda host: host.state.restore()):
        before = host.snapshot()
        host.record()
        host.apply()
        if run():
            died += 1
        else:
            (host.root / "survived").touch()
        assert host.state.restore().record.measured == MEASURED
        assert host.snapshot() == before
    assert died > 10


def test_added_paths_killed_at_any_step_leave_a_whole_record(tmp_path: Path) -> None:
    def add(host: Host) -> None:
        host.state.record({}, [*host.files, str(host.tree / "etc" / "added")])

    for host, run in steps(tmp_path, add):
        (host.tree / "etc" / "added").write_bytes(b"x")
        first = host.record().record
        if not run():
            (host.root / "survived").touch()
        loaded = host.state.load()
        assert loaded is not None
        assert loaded.measured == first.measured
        assert {path: loaded.files[path] for path in first.files} == first.files
        host.state.restore()


def test_remove_killed_at_any_step_can_be_run_again(tmp_path: Path) -> None:
    for host, run in steps(tmp_path, lambda host: host.state.remove()):
        host.record()
        if not run():
            (host.root / "survived").touch()
        host.state.remove()
        assert not Path(host.state.directory).exists()


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_full_disk_leaves_the_old_record_and_says_what_to_do(
    host: Host, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    first = host.record().record

    def full(*arguments: Any, **keywords: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    added = host.tree / "etc" / "added"
    added.write_bytes(b"x")
    with monkeypatch.context() as patched:
        patched.setattr(os, call, full)
        with pytest.raises(OperationStateError, match=r"Expected room .* Found none .* To do: free some space"):
            host.state.record({}, [*host.files, str(added)])
    assert host.state.load() == first
    if call == "fsync":
        assert not list(Path(host.state.directory).rglob(".*")), "what was half written must not keep the disk full"


def test_full_disk_while_restoring_leaves_the_present_file(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    before = host.snapshot()
    host.record()
    host.config.write_bytes(b"after\n")

    def full(*arguments: Any, **keywords: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", full)
        with pytest.raises(OperationStateError, match="Expected room"):
            host.state.restore()
    assert host.config.read_bytes() == b"after\n"
    assert sorted(path.name for path in host.config.parent.iterdir()) == ["current", "haproxy.cfg", "kept.d"]
    host.state.restore()
    assert host.snapshot() == before


# Damage and wrong input


def test_damaged_record_is_reported_and_left_alone(host: Host) -> None:
    host.record()
    document = Path(host.state.document)
    whole = json.loads(document.read_text(encoding="utf-8"))
    entry = whole["files"][str(host.config)]
    damaged: list[Any] = [
        b"",
        b"\xff\xfe",
        b"{",
        b"[" * 100_000,
        [],
        {**whole, "schema": 2},
        {**whole, "name": "registry"},
        {**whole, "files": []},
        {**whole, "measured": None},
        {**whole, "files": {"relative": entry}},
        {**whole, "files": {str(host.config): {}}},
        {**whole, "files": {str(host.config): {**entry, "kind": "socket"}}},
        {**whole, "files": {str(host.config): {**entry, "mode": "0644"}}},
        {**whole, "files": {str(host.config): {**entry, "mode": True}}},
        {**whole, "files": {str(host.config): {**entry, "mode": 0o10000}}},
        {**whole, "files": {str(host.config): {**entry, "uid": -1}}},
        {**whole, "files": {str(host.config): {**entry, "sha256": "../../etc/shadow"}}},
        {**whole, "files": {str(host.config): {**entry, "attributes": {"user.x": ""}}}},
        {**whole, "files": {str(host.config): {**entry, "attributes": {"security.selinux": "*"}}}},
        {**whole, "files": {str(host.config): {**entry, "missing_parents": ["/elsewhere"]}}},
        {**whole, "files": {str(host.config): {**entry, "surprise": 1}}},
    ]
    host.apply()
    applied = host.snapshot()
    for each in damaged:
        content = each if isinstance(each, bytes) else json.dumps(each).encode()
        document.write_bytes(content)
        for work in (host.record, host.state.load, host.state.restore):
            with pytest.raises(OperationStateError, match=r"(?s)Expected a record .* Found a damaged .* To do: "):
                work()
        assert document.read_bytes() == content
        assert host.snapshot() == applied
    assert host.state.remove().changed, "the way out that the message names"


@pytest.mark.parametrize("damage", ["changed", "missing"])
def test_damaged_content_stops_before_anything_is_touched(host: Host, damage: str) -> None:
    record = host.record().record
    stored = Path(host.state.contents, record.files[str(host.config)].sha256)
    if damage == "changed":
        stored.write_bytes(b"tampered")
    else:
        stored.unlink()
    host.apply()
    applied = host.snapshot()
    with pytest.raises(OperationStateError, match=r"damaged .* stored content"):
        host.state.restore()
    assert host.snapshot() == applied


@given(st.binary(max_size=300))
def test_no_document_makes_a_traceback(tmp_path_factory: pytest.TempPathFactory, content: bytes) -> None:
    state = OperationState("edge", str(tmp_path_factory.mktemp("any")))
    os.makedirs(state.contents)
    Path(state.document).write_bytes(content)
    with pytest.raises(OperationStateError):
        state.load()


KEYS = st.sampled_from(["schema", "name", "recorded_at", "measured", "files", "/a", "kind", "mode"]) | st.text()
VALUES = st.none() | st.booleans() | st.integers() | st.text() | st.just("edge")


@given(st.recursive(VALUES, lambda each: st.lists(each) | st.dictionaries(KEYS, each)))
def test_no_json_makes_a_traceback(document: Any) -> None:
    with contextlib.suppress(ValueError):
        operation_state.parse_record(document, "edge")


@pytest.mark.parametrize("name", ["", "Edge", "../edge", "edge/..", "edge\n", "1edge", "e" * 65])
def test_names_that_cannot_be_used(tmp_path: Path, name: str) -> None:
    with pytest.raises(OperationStateError, match="Expected the name of an operation"):
        OperationState(name, str(tmp_path))


def test_relative_directory_is_refused() -> None:
    with pytest.raises(OperationStateError, match="Expected an absolute path"):
        OperationState("edge", "var/lib")


@pytest.mark.parametrize("path", ["relative", "/", "//", "/etc/../etc/x", "", "/a\0b"])
def test_paths_that_cannot_be_owned(host: Host, path: str) -> None:
    with pytest.raises(OperationStateError, match="Expected absolute paths"):
        host.state.record(MEASURED, [path])
    assert host.state.load() is None


def test_the_records_themselves_cannot_be_owned(host: Host) -> None:
    for path in (host.state.base, host.state.document, os.path.dirname(host.state.base)):
        with pytest.raises(OperationStateError, match="where the records are"):
            host.state.record(MEASURED, [path])


def test_a_pipe_is_refused(host: Host) -> None:
    pipe = host.tree / "pipe"
    os.mkfifo(pipe)
    with pytest.raises(OperationStateError, match="a named pipe"):
        host.state.record(MEASURED, [str(pipe)])
    assert host.state.load() is None


def test_a_link_in_the_place_of_the_record_is_not_followed(host: Host) -> None:
    elsewhere = host.root / "elsewhere"
    elsewhere.mkdir()
    os.makedirs(host.state.base)
    os.symlink(elsewhere, host.state.directory)
    with pytest.raises(OperationStateError, match="Not a directory"):
        host.record()
    assert not list(elsewhere.iterdir())


def test_a_file_system_mounted_in_a_tree_to_be_removed_is_left(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    host.record()
    host.apply()
    applied = host.snapshot()
    mounted = str(host.new_tree / "deep")
    monkeypatch.setattr(os.path, "ismount", lambda path: path == mounted)
    with pytest.raises(OperationStateError, match=r"Found one at .*deep\. To do: unmount it"):
        host.state.restore()
    assert host.snapshot() == applied


def test_parent_that_is_a_file_counts_as_absent(host: Host) -> None:
    path = host.config / "beneath"
    outcome = host.state.record(MEASURED, [str(path)])
    assert outcome.record.files[str(path)].kind == "absent"
    assert not host.state.restore().changed


# Diffs


def texts(diff: list[dict[str, Any]]) -> str:
    return json.dumps(diff)


@pytest.fixture
def open_host() -> Iterator[Host]:
    """A host whose tree all may read. Not among pytest's folders: every run of pytest on the machine closes them."""
    with tempfile.TemporaryDirectory(dir="/tmp") as directory:
        os.chmod(directory, 0o755)
        yield Host(Path(directory))


def test_diff_shows_text_that_all_may_read(open_host: Host) -> None:
    host = open_host
    host.config.chmod(0o644)
    host.record()
    host.config.write_bytes(b"after\n")
    diff = host.state.restore(write=False, contents_in_diff=True).diff
    assert {"before": "after\n", "after": "before\n"}.items() <= next(
        each for each in diff if isinstance(each["before"], str)
    ).items()


@pytest.mark.parametrize("hidden", ["before", "after", "directory"])
def test_diff_never_shows_what_not_all_may_read(open_host: Host, hidden: str) -> None:
    host = open_host
    host.config.write_bytes(b"old secret\n")
    host.config.chmod(0o640 if hidden == "before" else 0o644)
    host.record()
    host.config.write_bytes(b"new secret\n")
    host.config.chmod(0o600 if hidden == "after" else 0o644)
    if hidden == "directory":
        host.config.parent.chmod(0o750)
    outcome = host.state.restore(write=False, contents_in_diff=True)
    assert outcome.changed
    assert "content not shown: not readable by all" in texts(outcome.diff)
    assert "secret" not in texts(outcome.diff)


@pytest.mark.parametrize("content", [b"\xff\x00", b"x" * (operation_state.LARGEST_DIFF + 1)])
def test_diff_leaves_out_what_is_no_text_or_large(open_host: Host, content: bytes) -> None:
    host = open_host
    host.config.chmod(0o644)
    host.record()
    host.config.write_bytes(content)
    assert "content not shown" in texts(host.state.restore(write=False, contents_in_diff=True).diff)
