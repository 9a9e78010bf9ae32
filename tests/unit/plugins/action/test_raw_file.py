# SPDX-License-Identifier: GPL-3.0-or-later
"""Files and directories of a host without Python, written by a real shell."""

from __future__ import annotations

import getpass
import hashlib
import os
import signal
import stat
import subprocess
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from ansible_collections.ringmaster.inference.plugins.plugin_utils import raw_files
from ansible_collections.ringmaster.inference.plugins.plugin_utils.raw_shell import command

if TYPE_CHECKING:
    from tests.unit.plugins.action.conftest import RawHost

HOSTILE = (
    "with space",
    "-rf",
    "it's",
    'say "hi"',
    "line\nend",
    "$(touch pwned)",
    "`touch pwned`",
    "${HOME}",
    "tab\there",
    "Ünïcödé ☃",
    "back\\slash\\n",
    "glob*?[a]",
    "%s %d",
    "; touch pwned",
    "No such file or directory",
    "ends in line\n",
)


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.lstat().st_mode)


def diffs(result: dict[str, Any]) -> str:
    found = result["diff"]
    return str([(each["before"], each["after"]) for each in (found if isinstance(found, list) else [found])])


def test_new_file_is_its_owners_alone_unless_said_otherwise(raw_host: RawHost) -> None:
    path = raw_host.folder / "file"
    result = raw_host.twice("raw_file", path=str(path), content="text\n")
    assert result["changed"]
    assert result["checksum"] == hashlib.sha256(b"text\n").hexdigest()
    assert path.read_bytes() == b"text\n"
    assert mode_of(path) == 0o600
    assert raw_host.left_over() == []


@pytest.mark.parametrize("name", HOSTILE)
def test_any_name_is_only_a_name(raw_host: RawHost, name: str) -> None:
    folder = raw_host.folder / "names"
    folder.mkdir()
    raw_host.twice("raw_directory", path=f"{folder}/{name}", mode="0750")
    raw_host.twice("raw_file", path=f"{folder}/{name}/{name}", content=name, mode="0640")
    assert [each.name for each in folder.iterdir()] == [name]
    assert (folder / name / name).read_text(encoding="utf-8") == name
    assert raw_host.twice("raw_file", path=f"{folder}/{name}/{name}", state="absent")["changed"]
    assert raw_host.twice("raw_directory", path=f"{folder}/{name}", state="absent")["changed"]
    assert list(folder.iterdir()) == []
    assert not list(raw_host.folder.rglob("pwned"))


@pytest.mark.parametrize("content", ["", "no end", "\n", "\r\n mixed \n", "\0nul\0", "\udcff\udcfe", "ü" * 70_000])
def test_any_content_arrives_as_it_is(raw_host: RawHost, content: str) -> None:
    path = raw_host.folder / "file"
    raw_host.twice("raw_file", path=str(path), content=content)
    assert path.read_bytes() == content.encode("utf-8", "surrogateescape")


def test_content_is_on_no_command_line_and_in_no_result(raw_host: RawHost) -> None:
    path = raw_host.folder / "file"
    path.write_text("old-secret\n")
    path.chmod(0o600)
    result = raw_host.run("raw_file", path=str(path), content="new-secret\n", diff=True)
    assert path.read_text() == "new-secret\n"
    said = str(result) + "".join(raw_host.commands)
    assert "old-secret" not in said
    assert "new-secret" not in said
    assert "not readable by all" in diffs(result)


@pytest.mark.parametrize(("before", "after"), [("0644", "0600"), ("0600", "0644")])
def test_what_one_side_keeps_from_others_neither_side_shows(raw_host: RawHost, before: str, after: str) -> None:
    raw_host.folder.chmod(0o755)
    path = raw_host.folder / "file"
    raw_host.run("raw_file", path=str(path), content="old-secret", mode=before)
    result = raw_host.run("raw_file", path=str(path), content="new-secret", mode=after, diff=True)
    assert "secret" not in diffs(result)
    assert mode_of(path) == int(after, 8)


def test_difference_of_what_all_can_read_is_shown(raw_host: RawHost, monkeypatch: pytest.MonkeyPatch) -> None:
    path = raw_host.folder / "file"
    path.write_text("a\nb\n")
    path.chmod(0o644)
    # Folders of pytest are nobody else's.
    monkeypatch.setattr(raw_files.Found, "readable_by_all", property(lambda self: bool(self.mode & 0o004)))
    result = raw_host.run("raw_file", path=str(path), content="a\nc\n", diff=True, check=True)
    assert result["diff"] == [
        {"before_header": str(path), "after_header": str(path), "before": "a\nb\n", "after": "a\nc\n"}
    ]
    assert path.read_text() == "a\nb\n"
    binary = raw_host.run("raw_file", path=str(path), content="\0\udcff", diff=True, check=True)
    assert "not text" in diffs(binary)
    large = raw_host.run("raw_file", path=str(path), content="x" * (raw_files.LARGEST_DIFF + 1), diff=True, check=True)
    assert "too large" in diffs(large)


def test_folder_that_keeps_others_out_keeps_its_files_secret(raw_host: RawHost) -> None:
    folder = raw_host.folder / "closed"
    folder.mkdir(mode=0o700)
    path = folder / "file"
    result = raw_host.run("raw_file", path=str(path), content="secret", mode="0644", diff=True)
    assert "secret" not in diffs(result)


def test_mode_that_is_not_asked_for_stays(raw_host: RawHost) -> None:
    path = raw_host.folder / "file"
    path.write_text("old")
    path.chmod(0o751)
    raw_host.twice("raw_file", path=str(path), content="new")
    assert mode_of(path) == 0o751


def test_mode_alone_leaves_the_file_itself(raw_host: RawHost) -> None:
    path = raw_host.folder / "file"
    path.write_text("content")
    path.chmod(0o644)
    inode = path.stat().st_ino
    result = raw_host.twice("raw_file", path=str(path), mode="4750")
    assert result["changed"]
    assert mode_of(path) == 0o4750
    assert path.stat().st_ino == inode


def test_owner_by_name_and_number_are_the_same(raw_host: RawHost) -> None:
    path = raw_host.folder / "file"
    path.write_text("content")
    for owner in (getpass.getuser(), str(os.getuid())):
        assert not raw_host.run("raw_file", path=str(path), content="content", owner=owner)["changed"]
    assert raw_host.run("raw_file", path=str(path), content="content", owner="somebody-else", check=True)["changed"]


def test_owner_that_does_not_exist_leaves_the_old_file(raw_host: RawHost) -> None:
    path = raw_host.folder / "file"
    path.write_text("old")
    result = raw_host.run("raw_file", path=str(path), content="new", owner="no-such-user")
    assert result["failed"]
    assert "no-such-user" in result["msg"]
    assert path.read_text() == "old"
    assert raw_host.left_over() == []


@pytest.mark.parametrize("mode", [420, 644, "u+x", "rw-r--r--", "99999", "8", ""])
def test_mode_that_yaml_may_have_changed_is_refused(plain_host: RawHost, mode: Any) -> None:
    result = plain_host.run("raw_file", path=str(plain_host.folder / "file"), content="", mode=mode)
    assert result["failed"]
    assert "quotation marks" in result["msg"]
    assert not (plain_host.folder / "file").exists()


@pytest.mark.parametrize("path", ["relative", "/", "//", "/..", "/tmp/../etc/passwd", "", "/nul\0", "-/x"])
def test_path_that_is_none_is_refused(plain_host: RawHost, path: str) -> None:
    for plugin in ("raw_file", "raw_directory"):
        result = plain_host.run(plugin, path=path, state="absent")
        assert result["failed"]
        assert "absolute path" in result["msg"]
    assert plain_host.commands == []


@pytest.mark.parametrize("owner", ["-R", "+1", "a:b", "", "a\nb", "1a"])
def test_owner_that_is_no_name_is_refused(plain_host: RawHost, owner: str) -> None:
    for option in ("owner", "group"):
        result = plain_host.run("raw_file", path=str(plain_host.folder / "file"), content="", **{option: owner})
        assert result["failed"]
        assert option in result["msg"]
    assert plain_host.commands == []


def test_group_of_a_directory_service_is_a_name(plain_host: RawHost) -> None:
    path = plain_host.folder / "file"
    path.write_text("content")
    real = subprocess.run(["sh", "-c", "command -v stat"], capture_output=True, text=True, check=True).stdout.strip()
    plain_host.stub("stat", f'[ "$2" = %U:%G ] && echo "me:SITE\\\\domain users" || exec {real} "$@"')
    assert not plain_host.run("raw_file", path=str(path), content="content", group="SITE\\domain users")["changed"]


def test_source_on_the_controller(raw_host: RawHost, tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.write_bytes(bytes(range(256)) * 5000)
    path = raw_host.folder / "file"
    raw_host.twice("raw_file", path=str(path), src=str(source), mode="0755")
    assert path.read_bytes() == source.read_bytes()
    missing = raw_host.run("raw_file", path=str(path), src=str(tmp_path / "missing"))
    assert missing["failed"]
    assert "src" in missing["msg"]


def test_validation_sees_the_new_file_in_its_final_mode(raw_host: RawHost) -> None:
    raw_host.stub("validator", 'grep -q valid "$2" && [ "$(stat -c %a "$2")" = 640 ]')
    path = raw_host.folder / "it's"
    raw_host.twice("raw_file", path=str(path), content="valid", mode="0640", validate="validator 'a b' %s")
    assert raw_host.calls()[0].startswith("validator [a b] [")
    refused = raw_host.run("raw_file", path=str(path), content="wrong", mode="0640", validate="validator 'a b' %s")
    assert refused["failed"]
    assert "validated" in refused["msg"]
    assert path.read_text() == "valid"
    assert raw_host.left_over() == []


@pytest.mark.parametrize("validate", ["visudo -cf", "visudo 'cf %s"])
def test_validation_that_would_not_look_at_the_file_is_refused(plain_host: RawHost, validate: str) -> None:
    result = plain_host.run("raw_file", path=str(plain_host.folder / "f"), content="", validate=validate)
    assert result["failed"]
    assert "validate" in result["msg"]


def test_link_is_neither_followed_nor_replaced(raw_host: RawHost) -> None:
    target = raw_host.folder / "target"
    target.write_text("precious")
    path = raw_host.folder / "link"
    path.symlink_to(target)
    result = raw_host.run("raw_file", path=str(path), content="new")
    assert result["failed"]
    assert str(target) in result["msg"]
    assert target.read_text() == "precious"
    assert raw_host.twice("raw_file", path=str(path), state="absent")["changed"]
    assert target.read_text() == "precious"


def test_link_in_the_place_of_the_new_file_is_not_followed(raw_host: RawHost) -> None:
    victim = raw_host.folder / "victim"
    victim.write_text("precious")
    path = raw_host.folder / "file"
    Path(raw_files.temporary(str(path))).symlink_to(victim)
    raw_host.run("raw_file", path=str(path), content="new")
    assert path.read_text() == "new"
    assert victim.read_text() == "precious"


def test_directory_and_pipe_are_no_files(raw_host: RawHost) -> None:
    os.mkfifo(raw_host.folder / "pipe")
    for path in (raw_host.folder / "pipe", raw_host.folder):
        result = raw_host.run("raw_file", path=str(path), content="new")
        assert result["failed"]
        assert "regular file" in result["msg"]
    assert raw_host.run("raw_file", path=str(raw_host.folder), state="absent")["failed"]


def test_missing_directory_is_told_and_forgiven_in_a_dry_run(raw_host: RawHost) -> None:
    path = raw_host.folder / "missing" / "file"
    result = raw_host.run("raw_file", path=str(path), content="new")
    assert result["failed"]
    assert str(path.parent) in result["msg"]
    assert raw_host.run("raw_file", path=str(path), content="new", check=True)["changed"]


def test_full_disk_leaves_the_old_file(raw_host: RawHost) -> None:
    path = raw_host.folder / "file"
    path.write_text("old")
    # Writes nothing and says what the kernel would.
    (raw_host.stubs / "cat").unlink(missing_ok=True)
    raw_host.stub("cat", 'echo "cat: write error: No space left on device" >&2; exit 1')
    result = raw_host.run("raw_file", path=str(path), content="new")
    assert result["failed"]
    assert "free some space" in result["msg"]
    assert path.read_text() == "old"
    assert raw_host.left_over() == []


def test_content_that_changes_on_the_way_is_not_taken(plain_host: RawHost) -> None:
    path = plain_host.folder / "file"
    path.write_text("old")
    plain_host.stub("cat", "head -c 2")
    result = plain_host.run("raw_file", path=str(path), content="new content")
    assert result["failed"]
    assert "whole" in result["msg"]
    assert path.read_text() == "old"


def test_run_that_is_killed_leaves_the_old_file_and_the_next_one_clears_up(plain_host: RawHost, tmp_path: Path) -> None:
    path = plain_host.folder / "file"
    path.write_text("old")
    source = tmp_path / "source"
    source.write_text("new")
    # Killed before the rename, with no chance to clear up.
    plain_host.stub("chmod", "sleep 60")
    beside = Path(raw_files.temporary(str(path)))
    digest = hashlib.sha256(b"new").hexdigest()
    line = command(raw_files._WRITE, [str(path), str(beside), str(source), digest, "0644", "", ""])
    with subprocess.Popen(
        ["/bin/sh", "-c", f"exec {line}"],
        env=plain_host.environment(),
        stdout=subprocess.DEVNULL,
        process_group=0,
    ) as process:
        end = time.monotonic() + 30
        while not (beside.exists() and beside.stat().st_size == 3) and time.monotonic() < end:
            time.sleep(0.01)
        os.killpg(process.pid, signal.SIGKILL)
    assert path.read_text() == "old"
    assert beside.exists()
    assert mode_of(beside) == 0o600
    (plain_host.stubs / "chmod").unlink()
    plain_host.run("raw_file", path=str(path), content="new")
    assert path.read_text() == "new"
    assert plain_host.left_over() == []


@pytest.mark.parametrize("cut_at", [0, 10, 60, 200])
def test_answer_that_is_cut_is_no_answer(plain_host: RawHost, cut_at: int) -> None:
    plain_host.cut_at = cut_at
    result = plain_host.run("raw_file", path=str(plain_host.folder / "file"), content="new")
    assert result["failed"]
    assert "/bin/sh" in result["msg"]


@pytest.mark.parametrize("tool", ["od", "tr"])
def test_shell_that_can_not_is_told(plain_host: RawHost, tool: str) -> None:
    plain_host.stub(tool, "exit 127")
    result = plain_host.run("raw_file", path=str(plain_host.folder / "file"), content="new")
    assert result["failed"]
    assert tool in result["msg"]


def test_folder_that_may_not_be_entered_is_not_taken_for_empty(plain_host: RawHost) -> None:
    folder = plain_host.folder / "closed"
    folder.mkdir(mode=0)
    if os.getuid() == 0:  # root may enter it
        plain_host.user = 65534
    for state in ("present", "absent"):
        result = plain_host.run("raw_file", path=str(folder / "file"), state=state)
        assert result["failed"]
        assert "become" in result["msg"]
    folder.chmod(0o700)


def test_content_that_is_no_text_is_refused(plain_host: RawHost) -> None:
    result = plain_host.run("raw_file", path=str(plain_host.folder / "file"), content={"a": 1})
    assert result["failed"]
    assert "to_json" in result["msg"]


def test_nothing_to_put_in_a_new_file_is_told(plain_host: RawHost) -> None:
    result = plain_host.run("raw_file", path=str(plain_host.folder / "file"), mode="0644")
    assert result["failed"]
    assert "content or src" in result["msg"]


def test_directory_with_parents(raw_host: RawHost) -> None:
    path = raw_host.folder / "a" / "b" / "c"
    raw_host.twice("raw_directory", path=str(path), mode="0700")
    assert [mode_of(each) for each in (path, path.parent, path.parent.parent)] == [0o700, 0o755, 0o755]
    raw_host.twice("raw_directory", path=str(path), mode="0750")
    assert mode_of(path) == 0o750
    plain = raw_host.folder / "plain"
    raw_host.twice("raw_directory", path=str(plain))
    assert mode_of(plain) == 0o755
    plain.chmod(0o711)
    assert not raw_host.run("raw_directory", path=str(plain))["changed"]


def test_directory_goes_with_all_it_holds(raw_host: RawHost) -> None:
    path = raw_host.folder / "a"
    (path / "b").mkdir(parents=True)
    (path / "b" / "file").write_text("x")
    (path / "link").symlink_to(raw_host.folder)
    result = raw_host.run("raw_directory", path=str(path), state="absent", diff=True)
    assert result["diff"]["after"] == {"state": "absent"}
    assert not path.exists()
    assert raw_host.log.exists()


def test_directory_in_which_something_is_mounted_stays(raw_host: RawHost, monkeypatch: pytest.MonkeyPatch) -> None:
    path = raw_host.folder / "a b"
    (path / "c").mkdir(parents=True)
    table = raw_host.folder / "mounts"
    table.write_text(f"proc /proc proc rw 0 0\ntmpfs {str(path / 'c').replace(' ', chr(92) + '040')} tmpfs rw 0 0\n")
    monkeypatch.setattr(raw_files, "_MOUNTS", raw_files._MOUNTS.replace("/proc/self/mounts", str(table)))
    for check in (True, False):
        result = raw_host.run("raw_directory", path=str(path), state="absent", check=check)
        assert result["failed"]
        assert "unmount" in result["msg"]
    assert (path / "c").exists()


def test_file_and_link_are_no_directories(raw_host: RawHost) -> None:
    link = raw_host.folder / "link"
    link.symlink_to(raw_host.folder)
    for path in (raw_host.log, link):
        for state in ("present", "absent"):
            result = raw_host.run("raw_directory", path=str(path), state=state)
            assert result["failed"]
            assert "directory" in result["msg"]
    assert link.is_symlink()
