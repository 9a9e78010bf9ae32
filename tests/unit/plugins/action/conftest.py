# SPDX-License-Identifier: GPL-3.0-or-later
"""A host for the action plugins that need no Python there: a folder, and a connection that runs a real shell."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from ansible.parsing.dataloader import DataLoader
from ansible.playbook.play_context import PlayContext
from ansible.playbook.task import Task
from ansible.plugins.connection import ConnectionBase
from ansible.plugins.loader import action_loader
from ansible.template import Templar

BUSYBOX = shutil.which("busybox")


class ShellConnection(ConnectionBase):  # type: ignore[misc] # ansible carries no types
    """Runs commands on this machine as ssh would on another: through a shell, with or without a terminal."""

    transport = "ringmaster.inference.shell"
    has_pipelining = False

    def __init__(self, host: RawHost) -> None:
        super().__init__(PlayContext())
        self.host = host
        self._shell.set_options(direct={"remote_tmp": str(host.folder / "remote_tmp")})

    def _connect(self) -> ShellConnection:
        return self

    def exec_command(self, cmd: str, in_data: Any = None, sudoable: bool = True) -> tuple[int, bytes, bytes]:
        self.host.commands.append(cmd)
        if self.host.busybox:
            cmd = cmd.replace("/bin/sh", f"{self.host.busybox} sh")
        finished = subprocess.run(
            ["/bin/sh", "-c", cmd],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            env=self.host.environment(),
            cwd="/" if self.host.user else self.host.folder,
            user=self.host.user,
            timeout=60,
            check=False,
        )
        output, errors = finished.stdout, finished.stderr
        if self.host.terminal:
            output, errors = b"Welcome!\r\n" + (errors + output).replace(b"\n", b"\r\n"), b"Connection closed.\r\n"
        return finished.returncode, output[: self.host.cut_at], errors

    def put_file(self, in_path: str, out_path: str) -> None:
        shutil.copyfile(in_path, out_path)

    def fetch_file(self, in_path: str, out_path: str) -> None:
        raise AssertionError("no plugin fetches a file")

    def close(self) -> None:
        """Nothing is open."""


class RawHost:
    """A host that is a folder of this machine. Programs of the system are scripts in `stubs`, which come first."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.stubs = folder / "stubs"
        self.stubs.mkdir()
        self.log = folder / "log"
        self.log.touch()
        self.commands: list[str] = []
        self.terminal = False
        self.busybox: str | None = None
        self.cut_at: int | None = None
        self.user: int | None = None  # another one than that of the tests
        self.connection = ShellConnection(self)

    def environment(self) -> dict[str, str]:
        return {"PATH": f"{self.stubs}:{os.environ['PATH']}", "HOME": str(self.folder), "LOG": str(self.log)}

    def stub(self, name: str, script: str = "") -> None:
        """A program that notes its call in the log, a line of words in brackets, and does what the script says."""
        path = self.stubs / name
        note = f'{{ printf "{name}"; for word in "$@"; do printf " [%s]" "$word"; done; echo; }} >>"$LOG"'
        path.write_text(f"#!/bin/sh\n{note}\n{script}\n", encoding="utf-8")
        path.chmod(0o755)

    def calls(self) -> list[str]:
        return self.log.read_text(encoding="utf-8").splitlines()

    def run(self, plugin: str, *, check: bool = False, diff: bool = False, **given: Any) -> dict[str, Any]:
        """One task of a plugin."""
        task = Task()
        task.action = f"ringmaster.inference.{plugin}"
        task.args = given
        task.check_mode = check
        task.diff = diff
        loader = DataLoader()
        action = action_loader.get(
            task.action,
            task=task,
            connection=self.connection,
            play_context=PlayContext(),
            loader=loader,
            templar=Templar(loader=loader),
            shared_loader_obj=None,
        )
        try:
            result: dict[str, Any] = action.run(task_vars={})
        finally:
            action.cleanup()
        return result

    def twice(self, plugin: str, **given: Any) -> dict[str, Any]:
        """A dry run, the run, and the same again: each has to say what the one before it has done."""
        before = self.tree()
        dry = self.run(plugin, check=True, **given)
        assert self.tree() == before, "a dry run changed something"
        result = self.run(plugin, **given)
        assert not result.get("failed"), result
        assert dry["changed"] == result["changed"]
        again = self.run(plugin, **given)
        assert not again["changed"], again
        assert not self.run(plugin, check=True, **given)["changed"]
        return result

    def tree(self) -> dict[str, tuple[int, bytes]]:
        """All that is in the folder but the log: mode and content."""
        found = {}
        for path in sorted(self.folder.rglob("*")):
            if path != self.log and not path.is_relative_to(self.folder / "remote_tmp"):
                status = path.lstat()
                content = path.read_bytes() if path.is_file() and not path.is_symlink() else b""
                found[str(path)] = (status.st_mode, content)
        return found

    def left_over(self) -> list[Path]:
        """Files that a task should have taken away."""
        sent = (path for path in (self.folder / "remote_tmp").rglob("*") if path.is_file())
        return [*self.folder.rglob(".ringmaster-*"), *sent]


@pytest.fixture(params=["plain", "terminal", "busybox"])
def raw_host(request: pytest.FixtureRequest, tmp_path: Path) -> RawHost:
    """A host over a plain connection, over one with a terminal, and with busybox in the place of dash and coreutils."""
    host = RawHost(tmp_path)
    host.terminal = request.param == "terminal"
    if request.param == "busybox":
        if BUSYBOX is None:
            pytest.fail("expected busybox, found none; to do: rehearsal/setup, which installs it")
        host.busybox = BUSYBOX
        for tool in subprocess.run([BUSYBOX, "--list"], capture_output=True, text=True, check=True).stdout.split():
            if (Path("/usr/bin") / tool).exists() or (Path("/bin") / tool).exists():
                (host.stubs / tool).symlink_to(BUSYBOX)
    return host


@pytest.fixture
def plain_host(tmp_path: Path) -> RawHost:
    """A host over a plain connection. Programs that could do something to this machine have to be stubs here."""
    return RawHost(tmp_path)
