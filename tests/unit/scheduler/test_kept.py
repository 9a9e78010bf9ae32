# SPDX-License-Identifier: GPL-3.0-or-later
"""Which engines are out, kept over a restart."""

from __future__ import annotations

from pathlib import Path

import pytest

from ringmaster_scheduler.kept import KeptFile

RULE = {"kind": "engine", "scope": "a.main", "rule": "hung", "subject": "engine/a.main", "text": "stands still for 9 s"}


def test_what_was_kept_is_found_again(tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    KeptFile(str(path)).save([RULE], {"a.main"})
    found = KeptFile(str(path))
    assert found.load() == ([RULE], {"a.main"})
    assert found.error == ""


def test_file_is_written_only_when_something_else_holds(tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    kept = KeptFile(str(path))
    kept.save([RULE], {"a.main"})
    path.unlink()
    kept.save([{**RULE, "text": "stands still for 10 s"}], {"a.main"})
    assert not path.exists()
    kept.save([], set())
    assert KeptFile(str(path)).load() == ([], set())
    assert path.exists()


@pytest.mark.parametrize("text", ["", "[]", "{", '{"rules": [1], "out": []}', '{"rules": {}, "out": 3}', "[" * 10_000])
def test_other_content_counts_as_empty_and_is_said(text: str, tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    path.write_text(text)
    kept = KeptFile(str(path))
    assert kept.load() == ([], set())
    assert kept.error.startswith(str(path))


def test_without_a_path_or_a_folder_nothing_breaks(tmp_path: Path) -> None:
    nowhere = KeptFile("")
    nowhere.save([RULE], {"a.main"})
    assert nowhere.load() == ([], set())
    missing = KeptFile(str(tmp_path / "none" / "out.json"))
    assert missing.load() == ([], set())
    missing.save([RULE], {"a.main"})
    assert "No such file" in missing.error
