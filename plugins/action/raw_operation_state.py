# Copyright (c) 2026, the Ringmaster authors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

from typing import Any, ClassVar

from ansible_collections.ringmaster.inference.plugins.module_utils.operation_state import (
    DEFAULT_DIRECTORY,
    OperationStateError,
    Outcome,
)
from ansible_collections.ringmaster.inference.plugins.plugin_utils.raw_action import Host, RawAction
from ansible_collections.ringmaster.inference.plugins.plugin_utils.raw_operation_state import RawOperationState


class ActionModule(RawAction):
    """What a host without Python looked like before an operation; see the module's documentation."""

    arguments: ClassVar[dict[str, Any]] = {
        "name": {"type": "str", "required": True},
        "state": {"type": "str", "choices": ["recorded", "restored", "read", "absent"], "required": True},
        "measured": {"type": "dict"},
        "files": {"type": "list", "elements": "str", "default": []},
        "directory": {"type": "str", "default": DEFAULT_DIRECTORY},
    }
    rules: ClassVar[dict[str, Any]] = {"required_if": [("state", "recorded", ["measured"])]}

    def perform(self, host: Host, options: dict[str, Any]) -> dict[str, Any]:
        try:
            return self._perform(RawOperationState(host, options["name"], options["directory"]), options)
        except OperationStateError as error:
            return {"failed": True, "changed": host.changed, "msg": str(error)}

    def _perform(self, operation: RawOperationState, options: dict[str, Any]) -> dict[str, Any]:
        write = not self.check_mode
        if options["state"] == "recorded":
            outcome = operation.record(options["measured"], options["files"], write=write)
        elif options["state"] == "restored":
            outcome = operation.restore(write=write, contents_in_diff=self.diff_mode)
        elif options["state"] == "absent":
            outcome = operation.remove(write=write)
        else:
            outcome = Outcome(False, operation.load())
        record = outcome.record
        result: dict[str, Any] = {
            "changed": outcome.changed,
            "recorded": record is not None,
            "measured": record.measured if record else {},
            "files": {path: entry.summary() for path, entry in record.files.items()} if record else {},
            "paths": outcome.paths,
        }
        if options["state"] == "read":
            result["others"] = operation.others()
        if record:
            result["recorded_at"] = record.recorded_at
        if self.diff_mode and outcome.diff:
            result["diff"] = outcome.diff
        return result
