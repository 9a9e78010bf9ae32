# Copyright (c) 2026, the Ringmaster authors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Commands of the host (``dcb``, ``ethtool``, ``nvidia-smi``), run without a shell and with an end.

Readers take a :class:`CommandRunner`, so that tests give recorded answers. A command that is not installed is no
error but an answer of its own. Nothing here imports Ansible.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass

# Where the system's own tools lie; the PATH of a service or of sudo often lacks the sbin folders.
SYSTEM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
# A query of a driver takes milliseconds. One that takes longer than this hangs (a card off its bus does that).
DEFAULT_TIMEOUT = 20.0  # seconds


@dataclass(frozen=True)
class Answer:
    """What a command said. `status` is its exit status; None if it was not found or did not end in time."""

    status: int | None
    output: str = ""
    complaint: str = ""

    @property
    def ok(self) -> bool:
        """Whether the command was there, ended in time and said that it succeeded."""
        return self.status == 0

    @property
    def missing(self) -> bool:
        """Whether the command is not installed."""
        return self.status is None and self.complaint.startswith("not found")


class CommandRunner:
    """Runs the host's commands. Messages are in English, whatever the host's language is."""

    def locate(self, name: str) -> str | None:
        """Path of an installed command; None if it is not installed."""
        return shutil.which(name, path=SYSTEM_PATH)

    def run(self, command: Sequence[str], timeout: float = DEFAULT_TIMEOUT) -> Answer:
        """Run `command` (a list of words, no shell) for at most `timeout` seconds; never raises for what it does.

        A command that does not end in time is killed with all that it started.
        """
        environment = {**os.environ, "LC_ALL": "C", "PATH": SYSTEM_PATH}
        program = self.locate(command[0])
        if program is None:
            return Answer(None, complaint=f"not found: {command[0]}")
        try:
            process = subprocess.Popen(
                [program, *command[1:]],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env=environment,
                start_new_session=True,
            )
        except (OSError, ValueError) as error:
            return Answer(None, complaint=f"can't be run: {error}")
        try:
            output, complaint = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            _abandon(process)
            return Answer(None, complaint=f"no answer within {timeout:g} s: {' '.join(command)}")
        return Answer(
            process.returncode,
            output.decode("utf-8", "replace"),
            complaint.decode("utf-8", "replace").strip() or _end(process.returncode),
        )


def _end(status: int) -> str:
    """Why a command ended that said nothing about it; empty if it ended by itself."""
    return f"killed by signal {-status}" if status < 0 else ""


def _abandon(process: subprocess.Popen[bytes]) -> None:
    """Kill a command with its whole process group. One that a hung driver holds does not die; it is not waited for."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.communicate(timeout=1)
    process.poll()  # it may have ended itself, and left its output open to a daemon that it started
    for pipe in (process.stdout, process.stderr):
        if pipe:
            pipe.close()
