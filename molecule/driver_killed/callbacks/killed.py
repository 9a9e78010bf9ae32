# SPDX-License-Identifier: GPL-3.0-or-later
"""Kills the controller between two tasks: before the next one, or the end, once a task has changed something on any
host."""

from __future__ import annotations

import os
import signal
from typing import Any

from ansible.plugins.callback import CallbackBase

DOCUMENTATION = """
name: killed
type: aggregate
short_description: kills its ansible-playbook after the first task that changed something
description: For the scenario driver_killed.
requirements: [to be enabled]
"""


class CallbackModule(CallbackBase):
    """Nothing is said to the hosts, and nothing is written: as if the machine had been switched off."""

    CALLBACK_VERSION = 2.0
    CALLBACK_TYPE = "aggregate"
    CALLBACK_NAME = "killed"
    CALLBACK_NEEDS_ENABLED = True

    def __init__(self) -> None:
        super().__init__()
        self._changed: list[str] = []

    def v2_runner_on_ok(self, result: Any) -> None:
        if result.is_changed():
            self._changed.append(f"{result.task.get_name()} on {result.host.get_name()}")

    def _kill_after_a_change(self, *_what: object, **_how: object) -> None:
        if self._changed:
            os.write(1, f"killed after {', '.join(sorted(self._changed))}\n".encode())
            os.kill(os.getpid(), signal.SIGKILL)

    v2_playbook_on_task_start = v2_playbook_on_handler_task_start = _kill_after_a_change
    v2_playbook_on_play_start = v2_playbook_on_stats = _kill_after_a_change
