# SPDX-License-Identifier: GPL-3.0-or-later
"""What a host keeps of Ansible's archives changes nothing but the time: no answer, and no name in a traceback."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

PROGRAM = Path(__file__).parents[3] / "rehearsal" / "host" / "rehearsal_compiled.py"
ASK = """
import rehearsal_compiled, sys
sys.path.insert(0, sys.argv[1])
import sent
print(sent.ANSWER, sent.f.__code__.co_filename)
"""


@pytest.fixture
def host(tmp_path: Path) -> Path:
    """A folder with the program, set to keep what it compiles in ``kept`` beside it."""
    text = PROGRAM.read_text(encoding="utf-8")
    assert '"/var/cache/rehearsal-compiled"' in text
    changed = text.replace('"/var/cache/rehearsal-compiled"', repr(str(tmp_path / "kept")))
    (tmp_path / "rehearsal_compiled.py").write_text(changed, encoding="utf-8")
    (tmp_path / "kept").mkdir()
    return tmp_path


def ask(host: Path, archive: str, answer: int) -> None:
    """Send an archive with a module, and have it imported."""
    path = host / archive
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("sent.py", f"ANSWER = {answer}\ndef f():\n    pass\n")
    command = [sys.executable, "-c", ASK, str(path)]
    found = subprocess.run(command, cwd=host, capture_output=True, text=True, check=True)
    assert (found.stdout.split(), found.stderr) == ([str(answer), f"{path}/sent.py"], "")


def test_each_source_is_kept_once_and_the_archive_is_named(host: Path) -> None:
    for archive, answer in (("one.zip", 1), ("two.zip", 1), ("three.zip", 2), ("four.zip", 1)):
        ask(host, archive, answer)
    assert len(list((host / "kept").iterdir())) == 2


@pytest.mark.parametrize("damage", [b"", b"\x00", b"\xe3 cut", b"N"])
def test_what_was_kept_and_damaged_is_made_anew(damage: bytes, host: Path) -> None:
    ask(host, "one.zip", 1)
    (kept,) = (host / "kept").iterdir()
    kept.write_bytes(damage)
    ask(host, "two.zip", 1)
    assert len(kept.read_bytes()) > 100


def test_a_host_that_can_keep_nothing_answers(host: Path) -> None:
    (host / "kept").rmdir()
    ask(host, "one.zip", 1)
