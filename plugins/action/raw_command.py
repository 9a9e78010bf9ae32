# Copyright (c) 2026, the Ringmaster authors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

from typing import Any, ClassVar

from ansible_collections.ringmaster.inference.plugins.plugin_utils.raw_action import Host, RawAction
from ansible_collections.ringmaster.inference.plugins.plugin_utils.raw_shell import RawError, shown

# The command's output is kept in a variable and its errors in another: no file is needed, which a host whose file
# system is full or read-only could not give.
_RUN = """
exec 3>&1
errors=$(
  exec 4>&1
  output=$("$@" </dev/null 2>&4 3>&- 4>&-)
  status=$?
  { say status "$status"; say output "$output"; } >&3
)
say errors "$errors"
"""


class ActionModule(RawAction):
    """A command on a host without Python; see the module's documentation."""

    arguments: ClassVar[dict[str, Any]] = {"argv": {"type": "list", "elements": "str", "required": True}}

    def perform(self, host: Host, options: dict[str, Any]) -> dict[str, Any]:
        if not options["argv"] or not options["argv"][0]:
            raise RawError("argv to begin with a command", "none", "give one")
        result: dict[str, Any] = {"cmd": options["argv"], "changed": True}
        if self.check_mode:
            return {**result, "changed": False, "skipped": True, "msg": "Not run in check mode."}
        answer = host.change(_RUN, *options["argv"])
        status = int(answer.text("status"))
        output, errors = shown(answer.text("output")), shown(answer.text("errors"))
        result.update(
            rc=status,
            stdout=output,
            stderr=errors,
            stdout_lines=output.splitlines(),
            stderr_lines=errors.splitlines(),
        )
        if status:
            result.update(failed=True, msg=f"The command ended with status {status}.")
        return result
