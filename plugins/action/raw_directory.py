# Copyright (c) 2026, the Ringmaster authors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

from ansible_collections.ringmaster.inference.plugins.plugin_utils import raw_files as files
from ansible_collections.ringmaster.inference.plugins.plugin_utils.raw_action import Host, RawAction, difference
from ansible_collections.ringmaster.inference.plugins.plugin_utils.raw_shell import RawError, shown


class ActionModule(RawAction):
    """A directory of a host without Python; see the module's documentation."""

    arguments: ClassVar[dict[str, Any]] = {
        "path": {"type": "str", "required": True},
        "state": {"type": "str", "choices": ["present", "absent"], "default": "present"},
        **files.ATTRIBUTE_ARGUMENTS,
    }

    def perform(self, host: Host, options: dict[str, Any]) -> dict[str, Any]:
        path = files.checked_path(options["path"])
        wanted = files.attributes(options)
        found = files.look(host, path)
        if found.kind not in ("directory", "absent"):
            what = f"a symbolic link to {shown(found.target)}" if found.kind == "link" else "something else"
            raise RawError(f"a directory or nothing at {shown(path)}", what, "name another path, or remove it first")
        if options["state"] == "absent":
            after = replace(found, kind="absent")
            if found.kind == "directory":
                files.refuse_mounts(host, path)
        else:
            # Without a mode a new directory gets what most are given.
            if found.kind == "absent" and wanted.mode is None:
                wanted = replace(wanted, mode=0o755)
            after = wanted.applied_to(replace(found, kind="directory"))
        lacking = wanted.missing_in(found)
        changed = found.summary() != after.summary()
        if changed and not self.check_mode:
            if options["state"] == "absent":
                files.remove_directory(host, path)
            elif found.kind == "absent":
                files.make_directory(host, path, wanted)
            else:
                files.set_attributes(host, path, lacking)
        result: dict[str, Any] = {"changed": changed, "path": shown(path)}
        if self.diff_mode and changed:
            result["diff"] = difference(path, found.summary(), after.summary())
        return result
