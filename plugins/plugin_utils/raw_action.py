# Copyright (c) 2026, the Ringmaster authors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What the action plugins for hosts without Python share: the way to the host, the form of options and errors."""

from __future__ import annotations

import os
from abc import abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

from ansible.plugins.action import ActionBase

from ansible_collections.ringmaster.inference.plugins.plugin_utils.raw_shell import (
    Answer,
    RawError,
    StepError,
    command,
    read,
    shown,
)

# Complaints of the system, and what helps. They are the same for every tool, since they are the kernel's.
_REMEDIES = {
    "Permission denied": "run as root (become: true)",
    "Operation not permitted": "run as root (become: true), and see that the file is not immutable (lsattr)",
    "Read-only file system": "make the file system writable for the change (mount -o remount,rw)",
    "No space left on device": "free some space and run again",
    "Disk quota exceeded": "free some space and run again",
}
# A message is for a person: more of what a tool said is cut.
_LONGEST_COMPLAINT = 2000


def helped(complaint: str, otherwise: str) -> str:
    """What to do about a complaint of the system."""
    for text, remedy in _REMEDIES.items():
        if text in complaint:
            return remedy
    return otherwise


class Host:
    """The way to a host on which nothing but a shell and coreutils are presumed."""

    def __init__(self, action: ActionBase) -> None:
        self.action = action
        self.changed = False  # whether a script that changes the host was begun

    def ask(self, script: str, *words: str) -> Answer:
        """Run a script that reads. Raises RawError when there is no answer, and StepError when a step of it failed."""
        given = self.action._low_level_execute_command(command(script, words))
        try:
            return read(given["stdout"])
        except ValueError as error:
            said = (given["stdout"] + given["stderr"]).strip()[-_LONGEST_COMPLAINT:]
            raise RawError(
                "the host to run a script with /bin/sh, od, printf and tr",
                f"{error} (status {given['rc']}): {said or 'no output'}",
                "see that the login works (ansible.builtin.raw: id) and that coreutils or busybox are installed",
            ) from None

    def change(self, script: str, *words: str) -> Answer:
        """Run a script that changes the host. Raises as :meth:`ask` does."""
        self.changed = True
        return self.ask(script, *words)

    def send(self, content: bytes) -> str:
        """Bring bytes to the host. Gives the path of a file for the become user, which is gone when the task ends."""
        remote = self._incoming()
        self.action._transfer_data(remote, content)
        return self._readable(remote)

    def send_file(self, path: str) -> str:
        """Bring a file of the controller to the host, as :meth:`send` does."""
        remote = self._incoming()
        self.action._transfer_file(path, remote)
        return self._readable(remote)

    def _incoming(self) -> str:
        shell = self.action._connection._shell
        if shell.tmpdir is None:
            self.action._make_tmp_path()
        return str(shell.join_path(shell.tmpdir, "content"))

    def _readable(self, remote: str) -> str:
        folder = os.path.dirname(remote)
        self.action._fixup_perms2((folder, remote), execute=False)
        return remote


class RawAction(ActionBase):  # type: ignore[misc] # ansible carries no types
    """Base of the action plugins. A plugin gives its options and does its work in :meth:`perform`."""

    _supports_check_mode = True
    _supports_async = False
    TRANSFERS_FILES = False

    # As a module's argument_spec.
    arguments: ClassVar[dict[str, Any]] = {}
    # What else validate_argument_spec() takes: required_if and the like.
    rules: ClassVar[dict[str, Any]] = {}

    @abstractmethod
    def perform(self, host: Host, options: dict[str, Any]) -> dict[str, Any]:
        """Do the work and give the task's result. Raises RawError and StepError."""

    @property
    def check_mode(self) -> bool:
        """Whether nothing may be changed."""
        return bool(self._task.check_mode)

    @property
    def diff_mode(self) -> bool:
        """Whether the difference is asked for."""
        return bool(self._task.diff)

    def run(self, tmp: str | None = None, task_vars: dict[str, Any] | None = None) -> dict[str, Any]:
        """As Ansible calls it."""
        result: dict[str, Any] = super().run(tmp, task_vars)
        _validation, options = self.validate_argument_spec(self.arguments, **self.rules)
        host = Host(self)
        try:
            result.update(self.perform(host, options))
        except RawError as error:
            result.update(failed=True, changed=host.changed, msg=str(error))
        except StepError as trouble:
            complaint = trouble.complaint[-_LONGEST_COMPLAINT:] or "that it failed without a word"
            remedy = helped(complaint, "mend that and run again")
            message = str(RawError(f"to {trouble.step}", complaint, remedy))
            result.update(failed=True, changed=host.changed, msg=message)
        return result


def difference(what: str, before: Mapping[str, Any] | str, after: Mapping[str, Any] | str) -> dict[str, Any]:
    """A diff in the form that Ansible shows."""

    def printable(side: Mapping[str, Any] | str) -> Any:
        return shown(side) if isinstance(side, str) else dict(side)

    return {
        "before_header": shown(what),
        "after_header": shown(what),
        "before": printable(before),
        "after": printable(after),
    }
