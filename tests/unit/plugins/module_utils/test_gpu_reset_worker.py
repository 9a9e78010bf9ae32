# SPDX-License-Identifier: GPL-3.0-or-later
"""The worker's program runs by itself, is started as a service that outlives its starter, and is only ever one."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
import zipfile
from collections.abc import Sequence
from pathlib import Path

import pytest

from ansible_collections.ringmaster.inference.plugins.module_utils.commands import Answer, CommandRunner
from ansible_collections.ringmaster.inference.plugins.module_utils.gpu_reset_ledger import Ledger
from ansible_collections.ringmaster.inference.plugins.module_utils.gpu_reset_worker import (
    MOST_STARTS,
    Workers,
    main,
    work,
    write_program,
)
from tests.support.gpu_reset_world import World, WorldHost, options, steps_of


class Commands(CommandRunner):
    """Keeps what is run; `answer` is what it says."""

    def __init__(self, answer: Answer) -> None:
        self.answer = answer
        self.asked: list[list[str]] = []

    def run(self, command: Sequence[str], timeout: float = 20.0) -> Answer:
        self.asked.append(list(command))
        return self.answer


def test_program_needs_nothing_but_python(tmp_path: Path) -> None:
    program = tmp_path / "worker.zip"
    write_program(str(program))
    assert oct(program.stat().st_mode)[-3:] == "600"
    check = (
        f"import sys; sys.path.insert(0, {str(program)!r})\n"
        "from ansible_collections.ringmaster.inference.plugins.module_utils import gpu_reset_worker as worker\n"
        f"assert worker.__file__.startswith({str(program)!r}), worker.__file__\n"
        "assert not any(name.split('.')[0] == 'ansible' for name in sys.modules), 'it imports Ansible'\n"
    )
    finished = subprocess.run([sys.executable, "-I", "-c", check], capture_output=True, text=True, check=False)
    assert finished.returncode == 0, finished.stderr
    with zipfile.ZipFile(program) as archive:
        assert "__main__.py" in archive.namelist()


def test_program_runs_and_says_what_is_wrong(tmp_path: Path) -> None:
    program = tmp_path / "worker.zip"
    write_program(str(program))
    finished = subprocess.run(
        [sys.executable, str(program), "no-such-run"], capture_output=True, text=True, check=False, cwd=tmp_path
    )
    # There is no such run, and on most machines no ledger either: both are answers, not tracebacks.
    assert "Traceback" not in finished.stderr


def test_started_as_a_service_of_its_own(tmp_path: Path) -> None:
    ledger = Ledger(str(tmp_path))
    commands = Commands(Answer(0))
    assert Workers(commands, ledger).start("run-1") == ""
    (command,) = commands.asked
    assert command[0] == "systemd-run"
    assert "--unit=ringmaster-gpu-reset.service" in command
    assert "--property=Restart=on-failure" in command
    assert "--property=KillMode=process" in command
    assert command[-3:] == [sys.executable, str(tmp_path / "worker.zip"), "run-1"]


def test_start_that_fails(tmp_path: Path) -> None:
    workers = Workers(Commands(Answer(1, complaint="Unit was already loaded")), Ledger(str(tmp_path)))
    assert workers.start("run-1") == "systemd-run: Unit was already loaded"
    workers = Workers(Commands(Answer(0)), Ledger(str(tmp_path / "missing")))
    assert "can't be written" in workers.start("run-1")


@pytest.mark.parametrize(
    ("answer", "alive"),
    [
        ("ActiveState=active\n", True),
        ("ActiveState=activating\n", True),
        ("ActiveState=inactive\n", False),
        ("ActiveState=failed\n", False),
        ("", False),
    ],
)
def test_alive(tmp_path: Path, answer: str, alive: bool) -> None:
    assert Workers(Commands(Answer(0, answer)), Ledger(str(tmp_path))).alive() is alive


def begun(tmp_path: Path) -> tuple[World, str]:
    """A world with a run that was handed over."""
    world = World(tmp_path)
    steps = steps_of(world)
    given = {name: value for name, value in options().items() if name not in ("drain", "undrain")}
    run = steps.open(given, None, 10.0, False)["run"]
    steps.begin(run, "key", None)
    return world, run


def test_only_one_works_at_a_time(tmp_path: Path) -> None:
    world, run = begun(tmp_path)
    lock = os.open(os.path.join(world.ledger.directory, "worker.lock"), os.O_RDWR | os.O_CREAT, 0o600)
    fcntl.flock(lock, fcntl.LOCK_EX)
    assert work(run, world.ledger, WorldHost(world), None) is None
    assert world.resets == []
    os.close(lock)
    outcome = work(run, world.ledger, WorldHost(world), None)
    assert outcome is not None
    assert outcome.result == "verified"
    assert work(run, world.ledger, WorldHost(world), None) is None, "what has an outcome is not done again"
    assert len(world.resets) == 1


def test_unknown_run_is_nothing_to_do(tmp_path: Path) -> None:
    world, _run = begun(tmp_path)
    assert work("another", world.ledger, WorldHost(world), None) is None


def test_worker_that_died_too_often_gives_up(tmp_path: Path) -> None:
    world, run = begun(tmp_path)
    for _start in range(MOST_STARTS):
        world.ledger.append("worker", run)
    outcome = work(run, world.ledger, WorldHost(world), None)
    assert outcome is not None
    assert (outcome.result, outcome.problems[0].code) == ("failed", "worker")


def test_plan_that_cannot_be_read_is_reported(tmp_path: Path) -> None:
    world, _run = begun(tmp_path)
    world.ledger.append("opened", "broken", uuid="GPU-x", boot_id="boot-1", plan={"uuids": 5})
    outcome = work("broken", world.ledger, WorldHost(world), None)
    assert outcome is not None
    assert outcome.problems[0].code == "ledger"
    assert world.resets == []


def test_status_makes_systemd_start_it_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = "ansible_collections.ringmaster.inference.plugins.module_utils.gpu_reset_worker.Ledger"
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(name, lambda: Ledger(str(tmp_path / "file")))
    assert main(["run"]) == 1
    monkeypatch.setattr(name, lambda: Ledger(str(tmp_path)))
    assert main(["run"]) == 0
