# Copyright (c) 2026, the Ringmaster authors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

from typing import Any, ClassVar

from ansible_collections.ringmaster.inference.plugins.plugin_utils.raw_action import Host, RawAction, difference
from ansible_collections.ringmaster.inference.plugins.plugin_utils.raw_mounts import parse_swaps
from ansible_collections.ringmaster.inference.plugins.plugin_utils.raw_shell import RawError, shown

SWAPS = "/proc/swaps"
CONTAINER_MARKS = ("/run/systemd/container", "/run/.containerenv", "/.dockerenv")

# $1: the table of swap that is on, then what tells that this is a container.
_LOOK = """
say_file swaps "$1"
shift
for mark in "$@"; do [ ! -e "$mark" ] || say container "$mark"; done
"""
_ON = """
attempt "switch swap on $1 on" swapon -- "$1"
"""
_OFF = """
attempt "switch swap on $1 off" swapoff -- "$1"
"""


class ActionModule(RawAction):
    """Swap that is on, on a host without Python; see the module's documentation."""

    arguments: ClassVar[dict[str, Any]] = {
        "state": {"type": "str", "choices": ["on", "off"], "required": True},
        "devices": {"type": "list", "elements": "str"},
    }
    rules: ClassVar[dict[str, Any]] = {"required_if": [("state", "on", ["devices"])]}

    def perform(self, host: Host, options: dict[str, Any]) -> dict[str, Any]:
        for device in options["devices"] or []:
            if not device.startswith("/"):
                raise RawError("devices to be absolute paths", repr(device), "give the path of the device or file")
        answer = host.ask(_LOOK, SWAPS, *CONTAINER_MARKS)
        before = [swap.path for swap in parse_swaps(answer.text("swaps"))]
        if options["state"] == "on":
            devices = [device for device in options["devices"] if device not in before]
        else:
            devices = [device for device in before if options["devices"] is None or device in options["devices"]]
        if devices and answer.has("container"):
            # The swap of the machine, which all its containers share.
            return {"changed": False, "swaps": list(map(shown, before)), "unavailable": "this host is a container"}
        for device in devices if not self.check_mode else []:
            host.change(_ON if options["state"] == "on" else _OFF, device)
        after = before + devices if options["state"] == "on" else [each for each in before if each not in devices]
        result: dict[str, Any] = {"changed": bool(devices), "swaps": list(map(shown, after))}
        if self.diff_mode and devices:
            result["diff"] = difference(
                "swap", "".join(f"{each}\n" for each in before), "".join(f"{each}\n" for each in after)
            )
        return result
