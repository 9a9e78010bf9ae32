# SPDX-License-Identifier: GPL-3.0-or-later
"""Commands of the host: found in the system's folders, without a shell, in English, and always with an end."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ansible_collections.ringmaster.inference.plugins.module_utils import commands
from ansible_collections.ringmaster.inference.plugins.module_utils.commands import Answer, CommandRunner


@pytest.fixture
def tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of commands beside the system's own."""
    monkeypatch.setattr(commands, "SYSTEM_PATH", f"{tmp_path}:{commands.SYSTEM_PATH}")
    return tmp_path


def tool(folder: Path, name: str, script: str) -> None:
    path = folder / name
    path.write_text(f"#!/bin/sh\n{script}\n", encoding="utf-8")
    path.chmod(0o755)


def test_answer_of_a_command(tools: Path) -> None:
    tool(tools, "dcb", 'echo "out $1 $2"; echo " wrong " >&2; exit 3')
    answer = CommandRunner().run(["dcb", "a b", "$(reboot)"])
    assert answer == Answer(3, "out a b $(reboot)\n", "wrong")
    assert not answer.ok
    assert not answer.missing


def test_success(tools: Path) -> None:
    tool(tools, "dcb", "exit 0")
    assert CommandRunner().run(["dcb"]) == Answer(0)
    assert CommandRunner().run(["dcb"]).ok


def test_missing_command_is_an_answer() -> None:
    answer = CommandRunner().run(["no-such-command-here"])
    assert answer.missing
    assert not answer.ok
    assert answer.status is None
    assert "no-such-command-here" in answer.complaint


def test_a_file_that_is_no_program_is_an_answer(tools: Path) -> None:
    (tools / "broken").write_bytes(b"\x7fELF\0\0")
    (tools / "broken").chmod(0o755)
    answer = CommandRunner().run(["broken"])
    assert answer.status is None
    assert not answer.missing
    assert answer.complaint.startswith("can't be run")


def test_the_callers_path_is_not_searched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool(tmp_path, "only-here", "exit 0")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert CommandRunner().run(["only-here"]).missing


def test_messages_are_in_english_and_input_is_empty(tools: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LC_ALL", "de_DE.UTF-8")
    tool(tools, "locale-of", 'echo "$LC_ALL"; cat')
    assert CommandRunner().run(["locale-of"]).output == "C\n"


def test_bytes_that_are_no_text(tools: Path) -> None:
    tool(tools, "binary", "printf 'a\\377b'; printf '\\376' >&2")
    assert CommandRunner().run(["binary"]) == Answer(0, "a\N{REPLACEMENT CHARACTER}b", "\N{REPLACEMENT CHARACTER}")


def test_killed_command_says_so(tools: Path) -> None:
    tool(tools, "dies", "kill -9 $$")
    assert CommandRunner().run(["dies"]) == Answer(-9, "", "killed by signal 9")


def test_a_command_that_hangs_is_killed_with_what_it_started(tools: Path) -> None:
    tool(tools, "hangs", f"echo begun; sleep 60 & echo $! > {tools}/child; wait")
    answer = CommandRunner().run(["hangs", "-a"], timeout=0.5)
    assert answer == Answer(None, "", "no answer within 0.5 s: hangs -a")
    child = int((tools / "child").read_text())
    assert gone(child)


def test_a_daemon_that_keeps_the_pipe_open_does_not_hold_the_reader(tools: Path) -> None:
    tool(tools, "leaves", f"setsid sleep 60 & echo $! > {tools}/child")
    begin = time.monotonic()
    answer = CommandRunner().run(["leaves"], timeout=0.5)
    os.kill(int((tools / "child").read_text()), 9)
    assert answer.status is None
    assert time.monotonic() - begin < 30


def gone(process: int) -> bool:
    """Whether a process ends within some seconds; one that ended and waits to be fetched counts as gone."""
    for _attempt in range(100):
        try:
            state = Path(f"/proc/{process}/stat").read_text(encoding="ascii").rpartition(")")[2].split()[0]
        except (FileNotFoundError, ProcessLookupError):
            return True
        if state == "Z":
            return True
        time.sleep(0.05)
    return False


@given(st.text(max_size=20), st.lists(st.text(max_size=10), max_size=3))
def test_no_words_make_it_fail(name: str, words: list[str]) -> None:
    assert CommandRunner().run([f"no-such-command-{name}", *words]).status is None
    CommandRunner().run(["true", *words])
