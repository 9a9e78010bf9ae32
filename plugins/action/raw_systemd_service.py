# Copyright (c) 2026, the Ringmaster authors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

import re
from typing import Any, ClassVar

from ansible_collections.ringmaster.inference.plugins.plugin_utils.raw_action import Host, RawAction, difference
from ansible_collections.ringmaster.inference.plugins.plugin_utils.raw_shell import RawError

# Characters of unit names as systemd.unit(5) has them. One that begins with a dash would be an option.
_UNIT = re.compile(r"(?!-)[A-Za-z0-9:_.\\@-]{1,250}\Z")
_TYPES = ("service", "socket", "timer", "mount", "automount", "swap", "target", "path", "slice", "device", "scope")

_LOOK = """
state=$(systemctl show --property=LoadState --property=ActiveState --property=SubState --property=UnitFileState \
  --property=NeedDaemonReload --property=Result -- "$1" 2>&1 </dev/null) || trouble "ask systemd for $1" "$state"
say state "$state"
"""
_MANAGER = """
attempt "have systemd do $1" systemctl "$1"
"""
# systemctl comes back when the unit is up, or has failed.
_VERB = """
attempt "$1 $2" systemctl "$1" -- "$2"
"""
# What a person would look for next, where a unit does not do what is asked.
_STATUS = """
say status "$(systemctl status --no-pager --full --lines=10 -- "$1" 2>&1 </dev/null)"
"""

# States of a unit file in which it is started with the system, or by what refers to it.
_ENABLED = ("enabled", "alias")
_FIXED = {
    "static": "a unit that has no [Install] section, and is started by others",
    "generated": "a unit that a generator makes at each boot",
    "transient": "a unit that lives in memory only",
    "enabled-runtime": "a unit that is enabled until the next boot only",
    "masked": "a unit that is masked",
    "masked-runtime": "a unit that is masked until the next boot",
    "bad": "a unit file that is not valid",
}


class ActionModule(RawAction):
    """A unit of systemd on a host without Python; see the module's documentation."""

    arguments: ClassVar[dict[str, Any]] = {
        "name": {"type": "str"},
        "state": {"type": "str", "choices": ["started", "stopped", "restarted", "reloaded"]},
        "enabled": {"type": "bool"},
        "daemon_reload": {"type": "bool", "default": False},
        "daemon_reexec": {"type": "bool", "default": False},
    }
    rules: ClassVar[dict[str, Any]] = {
        "required_by": {"state": ["name"], "enabled": ["name"]},
    }

    def perform(self, host: Host, options: dict[str, Any]) -> dict[str, Any]:
        name = _checked(options["name"]) if options["name"] is not None else ""
        if not name and not options["daemon_reload"] and not options["daemon_reexec"]:
            raise RawError("name, daemon_reload or daemon_reexec", "none of them", "say what is to be done")
        if not self.check_mode:
            for asked, verb in (("daemon_reload", "daemon-reload"), ("daemon_reexec", "daemon-reexec")):
                if options[asked]:
                    host.change(_MANAGER, verb)
        if not name:
            # systemd reads the same files again: nothing on the host is another than before.
            return {"changed": False}
        before = _state(host, name)
        if before["load"] == "not-found":
            return self._without_unit(name, options)
        if before["reload"] == "yes" and not self.check_mode:
            host.change(_MANAGER, "daemon-reload")
            before = _state(host, name)
        verbs = _verbs(name, before, options)
        after = dict(before)
        if not self.check_mode:
            for verb in verbs:
                host.change(_VERB, verb, name)
            if verbs:
                after = _state(host, name)
                self._refuse_failed(host, name, options, after)
        else:
            after.update(_expected(verbs))
        result: dict[str, Any] = {
            "changed": bool(verbs),
            "name": name,
            "state": after["active"],
            "enabled": after["file"] in _ENABLED,
        }
        if self.diff_mode and verbs:
            result["diff"] = difference(name, _shown(before), {**_shown(after), "done": verbs})
        return result

    def _without_unit(self, name: str, options: dict[str, Any]) -> dict[str, Any]:
        """What is not there is neither running nor enabled. In check mode, a task before this one would bring it."""
        wanted = options["state"] not in (None, "stopped") or options["enabled"]
        if wanted and not self.check_mode:
            raise RawError(f"the unit {name}", "that systemd knows none", "install what brings it, or correct the name")
        return {"changed": bool(wanted), "name": name, "state": "inactive", "enabled": False}

    def _refuse_failed(self, host: Host, name: str, options: dict[str, Any], after: dict[str, str]) -> None:
        """A program that ends right after its start fails when systemctl has long said that all is well."""
        ended = after["active"] in ("failed", "inactive") or after["sub"].startswith("auto-restart")
        if options["state"] in ("started", "restarted", "reloaded") and ended:
            # A unit of the type oneshot without RemainAfterExit is inactive when it has done its work.
            if after["active"] == "inactive" and after["result"] == "success":
                return
            said = host.ask(_STATUS, name).text("status")[-1500:]
            raise RawError(
                f"{name} to run", f"{after['active']} ({after['sub']}, {after['result']}): {said}", "mend the unit"
            )


def _checked(name: str) -> str:
    if not _UNIT.match(name):
        raise RawError("name of a unit", repr(name), "correct name")
    return name if name.rsplit(".", 1)[-1] in _TYPES and "." in name else f"{name}.service"


def _state(host: Host, name: str) -> dict[str, str]:
    lines = host.ask(_LOOK, name).text("state").split("\n")
    values = dict(line.split("=", 1) for line in lines if "=" in line)
    try:
        return {
            "load": values["LoadState"],
            "active": values["ActiveState"],
            "sub": values["SubState"],
            "file": values.get("UnitFileState", ""),
            "reload": values.get("NeedDaemonReload", "no"),
            "result": values.get("Result", ""),
        }
    except KeyError as error:
        raise RawError(f"systemd's property {error} of {name}", "none", "see what systemctl show says") from None


def _verbs(name: str, before: dict[str, str], options: dict[str, Any]) -> list[str]:
    """What systemctl has to do, in its order."""
    verbs = []
    is_enabled = before["file"] in _ENABLED
    if options["enabled"] is True and not is_enabled:
        if before["file"] in _FIXED and before["file"] != "enabled-runtime":
            raise RawError(
                f"{name} to be a unit that can be enabled",
                _FIXED[before["file"]],
                "leave enabled out, or mend the unit",
            )
        verbs.append("enable")
    if options["enabled"] is False and (is_enabled or before["file"] == "enabled-runtime"):
        verbs.append("disable")
    runs = before["active"] in ("active", "reloading", "activating")
    if before["load"] == "masked" and options["state"] not in (None, "stopped"):
        raise RawError(f"{name} to be a unit that can be started", _FIXED["masked"], "unmask it")
    if options["state"] == "started" and not runs:
        verbs.append("start")
    elif options["state"] == "stopped" and (runs or before["active"] == "deactivating"):
        verbs.append("stop")
    elif options["state"] == "restarted":
        verbs.append("restart")
    elif options["state"] == "reloaded":
        verbs.append("reload" if runs else "start")
    return verbs


def _expected(verbs: list[str]) -> dict[str, str]:
    """How the unit would be after these."""
    expected = {}
    for verb in verbs:
        if verb in ("enable", "disable"):
            expected["file"] = f"{verb}d"
        else:
            expected["active"] = "inactive" if verb == "stop" else "active"
    return expected


def _shown(state: dict[str, str]) -> dict[str, str]:
    return {"active": state["active"], "unit_file": state["file"]}
