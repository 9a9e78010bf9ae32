# SPDX-License-Identifier: GPL-3.0-or-later
"""A program's folder, from whatever is in it to exactly the program."""

from __future__ import annotations

import os
import stat
import tempfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ansible_collections.ringmaster.inference.plugins.module_utils import durable
from ansible_collections.ringmaster.inference.plugins.module_utils.program_files import Program, ProgramError

NAMES = st.lists(st.sampled_from("abc"), min_size=1, max_size=3).map(lambda parts: "/".join([*parts, "x.py"]))
FILES = st.dictionaries(NAMES, st.text(max_size=20), max_size=6)


def done(program: Program) -> tuple[tuple[str, ...], tuple[str, ...]]:
    plan = program.plan()
    program.carry_out(plan)
    assert not program.plan().changes
    return plan.written, plan.removed


@given(FILES, FILES)
def test_from_any_program_to_any_other(former: dict[str, str], wanted: dict[str, str]) -> None:
    with tempfile.TemporaryDirectory() as root:
        folder = Path(root) / "opt" / "program"
        done(Program(str(folder), former))
        written, removed = done(Program(str(folder), wanted))
        assert set(written) == {name for name, text in wanted.items() if former.get(name) != text}
        tops = {name.split("/")[0] for name in wanted}
        left = {name for name in former if name.split("/")[0] in tops}
        assert set(removed) == left - wanted.keys()
        for name, text in wanted.items():
            assert (folder / name).read_bytes() == text.encode("utf-8")
        for path in (folder.parent, *folder.rglob("*")):
            assert stat.S_IMODE(path.stat().st_mode) == (0o755 if path.is_dir() else 0o644)


def test_the_owner_s_umask_decides_nothing(tmp_path: Path) -> None:
    before = os.umask(0o077)
    try:
        done(Program(str(tmp_path / "p"), {"a/b.py": "x"}))
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "p" / "a").stat().st_mode) == 0o755


def test_what_is_not_as_it_has_to_be_is_mended(tmp_path: Path) -> None:
    wanted = Program(str(tmp_path), {"a/b.py": "x", "a/c.py": "y", "a/d.py": "z"})
    done(wanted)
    elsewhere = tmp_path / "elsewhere.py"
    elsewhere.write_text("x")
    (tmp_path / "a/b.py").unlink()
    (tmp_path / "a/b.py").symlink_to(elsewhere)
    (tmp_path / "a/c.py").chmod(0o666)
    (tmp_path / "a").chmod(0o777)
    assert wanted.plan().folders == (tmp_path / "a",)
    assert done(wanted) == (("a/b.py", "a/c.py"), ())
    assert elsewhere.read_text() == "x"
    assert not (tmp_path / "a/b.py").is_symlink()


def test_caches_and_what_is_outside_the_packages_stay(tmp_path: Path) -> None:
    for name in ("a/__pycache__/b.cpython-313.pyc", "other/e.py", "requirements.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("")
    assert done(Program(str(tmp_path), {"a/b.py": ""})) == (("a/b.py",), ())
    assert (tmp_path / "a/__pycache__/b.cpython-313.pyc").exists()
    assert (tmp_path / "other/e.py").exists()


@pytest.mark.parametrize("name", ["", "/a.py", "a//b.py", "../a.py", "a/../b.py", "a/.", "a\0.py"])
def test_names_that_lead_elsewhere_are_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(ProgramError, match="Expected names of files below"):
        Program(str(tmp_path), {name: ""})


@pytest.mark.parametrize("folder", ["program", "/opt/../etc"])
def test_a_folder_that_is_not_absolute_is_refused(folder: str) -> None:
    with pytest.raises(ProgramError, match="Expected an absolute path"):
        Program(folder, {})


def test_a_link_in_place_of_a_folder_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "p").mkdir(mode=0o755)
    (tmp_path / "p" / "a").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ProgramError, match=r"Expected the folder .*/p/a, or nothing of that name"):
        Program(str(tmp_path / "p"), {"a/b.py": ""}).plan()
    (tmp_path / "p" / "a").unlink()
    (tmp_path / "p" / "a").write_text("")
    with pytest.raises(ProgramError, match=r"Expected the folder .*/p/a, or nothing of that name"):
        Program(str(tmp_path / "p"), {"a/b.py": ""}).plan()
    (tmp_path / "p" / "a").unlink()
    (tmp_path / "p" / "a" / "b.py").mkdir(parents=True)
    with pytest.raises(ProgramError, match=r"Expected the file .*/p/a/b.py"):
        Program(str(tmp_path / "p"), {"a/b.py": ""}).plan()


def test_a_run_that_ends_between_two_files_is_taken_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done(Program(str(tmp_path), {"a/b.py": "1", "a/c.py": "1", "a/d.py": "1"}))
    wanted = Program(str(tmp_path), {"a/b.py": "2", "a/c.py": "2"})
    replace = durable.replace

    def full(path: str, content: str | bytes, mode: int) -> None:
        if path.endswith("c.py"):
            raise OSError(28, "No space left on device")
        replace(path, content, mode)

    monkeypatch.setattr(durable, "replace", full)
    with pytest.raises(OSError, match="No space left"):
        wanted.carry_out(wanted.plan())
    monkeypatch.undo()
    assert done(wanted) == (("a/c.py",), ("a/d.py",))
