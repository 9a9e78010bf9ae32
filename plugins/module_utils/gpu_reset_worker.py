# Copyright (c) 2026, the Ringmaster authors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The worker: the process on the host that carries out a run's host part whatever becomes of the controller.

It is a transient service of systemd, so it outlives the connection that started it, and systemd starts it again if it
is killed; the ledger then tells it how far it got. Its program is a copy of this collection's modules in
``/var/lib/ringmaster/gpu_reset``, since what Ansible copies to a host is removed when the module ends. Nothing here
imports Ansible.
"""

from __future__ import annotations

import contextlib
import fcntl
import importlib.util
import os
import sys
import zipfile
from collections.abc import Iterator

from ansible_collections.ringmaster.inference.plugins.module_utils.commands import CommandRunner
from ansible_collections.ringmaster.inference.plugins.module_utils.file_tree import FileTree
from ansible_collections.ringmaster.inference.plugins.module_utils.gpu_reset import (
    Plan,
    Problem,
    Request,
)
from ansible_collections.ringmaster.inference.plugins.module_utils.gpu_reset_host import SystemHost
from ansible_collections.ringmaster.inference.plugins.module_utils.gpu_reset_ledger import (
    Ledger,
    LedgerError,
    Process,
)
from ansible_collections.ringmaster.inference.plugins.module_utils.gpu_reset_sequence import (
    Host,
    HostPart,
    Limits,
    Outcome,
)

UNIT = "ringmaster-gpu-reset.service"
# A worker that dies again and again is a matter for a person.
MOST_STARTS = 5
_PACKAGE = "ansible_collections.ringmaster.inference.plugins.module_utils"
_MAIN = f"""import sys
from {_PACKAGE}.gpu_reset_worker import main
sys.exit(main(sys.argv[1:]))
"""


class Workers:
    """Starts the worker of a run and tells whether one is there."""

    def __init__(self, commands: CommandRunner, ledger: Ledger) -> None:
        self.commands, self.ledger = commands, ledger

    def alive(self) -> bool:
        """Whether a worker runs or is about to be started again by systemd."""
        answer = self.commands.run(["systemctl", "show", "--property=ActiveState", "--", UNIT])
        return answer.output.strip().partition("=")[2] in ("active", "activating", "deactivating", "reloading")

    def start(self, run: str) -> str:
        """Start the worker of `run`; gives a complaint or an empty text."""
        program = os.path.join(self.ledger.directory, "worker.zip")
        try:
            write_program(program)
        except OSError as error:
            return f"{program} can't be written: {error.strerror or error}"
        properties = {
            "Restart": "on-failure",
            "RestartSec": "1",
            # A nvidia-smi that resets a card just now must come to its end.
            "KillMode": "process",
            "OOMScoreAdjust": "-900",
        }
        answer = self.commands.run(
            [
                "systemd-run",
                f"--unit={UNIT}",
                "--collect",
                "--quiet",
                f"--description=Reset of a GPU, run {run}",
                *(f"--property={name}={value}" for name, value in properties.items()),
                "--",
                sys.executable,
                program,
                run,
            ]
        )
        return "" if answer.ok else f"systemd-run: {answer.complaint or f'status {answer.status}'}"


def write_program(path: str) -> None:
    """Write the worker's program: the modules that this process has loaded, as a zip archive that Python can run."""
    temporary = f"{path}.new"
    with open(temporary, "wb") as file:
        os.fchmod(file.fileno(), 0o600)
        with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr("__main__.py", _MAIN)
            for name, source in _sources():
                archive.writestr(name, source)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


def _sources() -> Iterator[tuple[str, str]]:
    parts = _PACKAGE.split(".")
    for length in range(1, len(parts) + 1):
        yield "/".join([*parts[:length], "__init__.py"]), ""
    for name in sorted(sys.modules):
        if not name.startswith(f"{_PACKAGE}."):
            continue
        spec = importlib.util.find_spec(name)
        source = getattr(spec.loader, "get_source", lambda _name: None)(name) if spec else None
        if source is not None:
            yield f"{name.replace('.', '/')}.py", source


def work(run_name: str, ledger: Ledger, host: Host, process: Process | None) -> Outcome | None:
    """Carry out the host's part of a run; None if there is nothing to do. Raises LedgerError."""
    with _alone(ledger) as alone:
        run = ledger.run(run_name)
        if not alone or run is None or run.closed or run.outcome is not None:
            return None
        if run.workers >= MOST_STARTS:
            problem = Problem(
                "worker",
                "the worker to come to its end",
                f"that it died {run.workers} times",
                f"read `journalctl --unit {UNIT}` and the ledger, then run this task again",
                "run_again",
            )
            outcome = Outcome("failed", bool(run.reset_at), False, (problem,), "run_again", None)
            ledger.append("outcome", run.name, outcome=outcome.document(), boot_id=host.boot_id())
            return outcome
        ledger.append("worker", run.name, process=process.document() if process else None)
        plan, request = Plan.parse(run.plan), Request.parse(run.plan.get("request"))
        if plan is None or request is None:
            problem = Problem(
                "ledger",
                f"the plan of run {run.name} in {ledger.path}",
                "that it can't be read",
                "start the services by hand if they are stopped; then run this task again with unfinished: abandon",
            )
            outcome = Outcome("failed", bool(run.reset_at), False, (problem,), "", None)
            ledger.append("outcome", run.name, outcome=outcome.document(), boot_id=host.boot_id())
            return outcome

        def note(event: str, **more: object) -> None:
            ledger.append(event, run_name, **more)
            _say(event, *(f"{key}={value}" for key, value in more.items() if isinstance(value, str)))

        return HostPart(run, plan, request, Limits.parse(run.plan.get("limits")), host, note).carry_out()


@contextlib.contextmanager
def _alone(ledger: Ledger) -> Iterator[bool]:
    """Whether this is the host's only worker, for as long as the context lasts. The kernel frees the lock then."""
    path = os.path.join(ledger.directory, "worker.lock")
    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
        else:
            yield True
    finally:
        os.close(handle)


def main(arguments: list[str]) -> int:
    """The worker's program: ``worker.zip RUN``. A status other than 0 makes systemd start it again."""
    ledger = Ledger()
    host = SystemHost(FileTree("/"), CommandRunner(), ledger)
    try:
        outcome = work(arguments[0], ledger, host, host.processes.identity(os.getpid()))
    except (LedgerError, OSError) as error:
        _say(error)
        return 1
    for problem in outcome.problems if outcome else ():
        _say(problem)
    return 0


def _say(*parts: object) -> None:
    """A line for the journal."""
    sys.stderr.write(" ".join(map(str, parts)) + "\n")
