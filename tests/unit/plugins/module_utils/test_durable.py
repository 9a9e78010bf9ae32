# SPDX-License-Identifier: GPL-3.0-or-later
"""Files that are replaced: whole, with their mode, and nothing left beside them when it fails."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from ansible_collections.ringmaster.inference.plugins.module_utils.durable import move, replace, sync_directory


@pytest.mark.parametrize("content", ["né\n", "né\n".encode()])
@pytest.mark.parametrize("mode", [0o600, 0o644])
def test_content_and_mode_are_those_given(tmp_path: Path, content: str | bytes, mode: int) -> None:
    file = tmp_path / "file"
    for _unused in range(2):
        replace(str(file), content, mode)
        assert file.read_text(encoding="utf-8") == "né\n"
        assert file.stat().st_mode & 0o7777 == mode
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_link_is_replaced_and_not_followed(tmp_path: Path) -> None:
    target, link = tmp_path / "target", tmp_path / "link"
    target.write_text("theirs")
    link.symlink_to(target)
    replace(str(link), "ours", 0o600)
    assert target.read_text() == "theirs"
    assert not link.is_symlink()


@pytest.mark.parametrize("call", ["fchmod", "fsync", "replace"])
def test_a_failure_leaves_the_file_as_it_was_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    file = tmp_path / "file"
    replace(str(file), "before", 0o600)

    def full(*_arguments: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        patched.setattr(os, call, full)
        with pytest.raises(OSError, match="No space left"):
            replace(str(file), "after", 0o600)
    assert file.read_text() == "before"
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_text_that_is_none_is_refused_before_anything_is_made(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="surrogates"):
        replace(str(tmp_path / "file"), "\udc80", 0o600)
    assert list(tmp_path.iterdir()) == []


def test_a_missing_directory_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        replace(str(tmp_path / "missing" / "file"), "x", 0o600)
    with pytest.raises(FileNotFoundError):
        sync_directory(str(tmp_path / "missing"))
    sync_directory(str(tmp_path))


def test_a_file_is_moved_over_another(tmp_path: Path) -> None:
    (tmp_path / "arriving").mkdir()
    (tmp_path / "arriving" / "file").write_text("new")
    (tmp_path / "file").write_text("old")
    move(str(tmp_path / "arriving" / "file"), str(tmp_path / "file"))
    assert (tmp_path / "file").read_text() == "new"
    with pytest.raises(FileNotFoundError):
        move(str(tmp_path / "arriving" / "file"), str(tmp_path / "file"))
    assert (tmp_path / "file").read_text() == "new"
