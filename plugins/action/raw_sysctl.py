# Copyright (c) 2026, the Ringmaster authors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

from ansible_collections.ringmaster.inference.plugins.plugin_utils import raw_files as files
from ansible_collections.ringmaster.inference.plugins.plugin_utils import raw_settings as settings
from ansible_collections.ringmaster.inference.plugins.plugin_utils.raw_action import Host, RawAction, difference
from ansible_collections.ringmaster.inference.plugins.plugin_utils.raw_shell import RawError, shown

KERNEL = "/proc/sys"
DEFAULT_FILE = "/etc/sysctl.d/90-ansible.conf"

_READ = """
if [ -e "$1" ]; then
  value=$(cat "$1" 2>&1) || trouble "read $1" "$value"
  say value "$value"
fi
"""
_SET = """
complaint=$( (printf "%s\\n" "$2" >"$1") 2>&1) || trouble "set $1 to $2" "$complaint"
value=$(cat "$1" 2>&1) || trouble "read $1" "$value"
say value "$value"
"""


class ActionModule(RawAction):
    """A kernel setting of a host without Python; see the module's documentation."""

    arguments: ClassVar[dict[str, Any]] = {
        "name": {"type": "str", "required": True},
        "value": {"type": "str"},
        "state": {"type": "str", "choices": ["present", "absent"], "default": "present"},
        "file": {"type": "str", "default": DEFAULT_FILE},
        "live": {"type": "bool", "default": True},
        "persist": {"type": "bool", "default": True},
    }
    rules: ClassVar[dict[str, Any]] = {"required_if": [("state", "present", ["value"])]}

    def perform(self, host: Host, options: dict[str, Any]) -> dict[str, Any]:
        name, file = options["name"].strip(), files.checked_path(options["file"], "file")
        kernel = f"{KERNEL}/{settings.path_of(name)}"
        value = settings.checked_value(options["value"]) if options["state"] == "present" else None
        kept = files.look(host, file, files.LARGEST_EDIT)
        if kept.kind not in ("file", "absent"):
            raise files.not_a_file(kept)
        if kept.kind == "file" and kept.content is None:
            raise RawError(f"{shown(file)} of up to {files.LARGEST_EDIT} bytes", f"{kept.size}", "name another file")
        before = (kept.content or b"").decode("utf-8", "surrogateescape")
        after = settings.replaced(before, name, value) if options["persist"] else before
        answer = host.ask(_READ, kernel)
        now = " ".join(answer.text("value").split()) if answer.has("value") else None
        if value is not None and options["live"] and now is None:
            raise RawError(
                f"the kernel setting {name}",
                f"that this kernel has none ({kernel})",
                "load the module that brings it, correct the name, or set live to false",
            )
        sets = value is not None and options["live"] and now != value
        writes = before != after
        if sets and not self.check_mode and value is not None:
            # Live first: a value that the kernel refuses must not come again at the next boot.
            found = " ".join(host.change(_SET, kernel, value).text("value").split())
            if found != value:
                raise RawError(
                    f"the kernel to take {value} for {name}", f"that it made {found} of it", "give a value it takes"
                )
        if writes and not self.check_mode:
            wanted = files.Attributes() if kept.kind == "file" else files.Attributes(0o644)
            if after.strip() or kept.kind == "absent":
                parent = kept.missing_parents[:1]
                if parent:
                    files.make_directory(host, parent[0], files.Attributes(0o755))
                files.write_content(host, kept, after.encode("utf-8", "surrogateescape"), wanted)
            else:
                files.remove_file(host, file)
        result: dict[str, Any] = {
            "changed": sets or writes,
            "name": name,
            "value": value if sets else now,
        }
        if self.diff_mode and result["changed"]:
            result["diff"] = []
            if sets:
                result["diff"].append(difference(name, f"{now}\n", f"{value}\n"))
            if writes:
                new = replace(kept, kind="file", mode=kept.mode if kept.kind == "file" else 0o644)
                result["diff"].append(files.content_diff(kept, after.encode("utf-8", "surrogateescape"), new))
        return result
