# Copyright (c) 2026, the Ringmaster authors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

import re
from typing import Any, ClassVar

from ansible_collections.ringmaster.inference.plugins.plugin_utils.raw_action import Host, RawAction, difference
from ansible_collections.ringmaster.inference.plugins.plugin_utils.raw_shell import RawError, StepError, shown

# Debian Policy 5.6.1 (names) and 5.6.12 (versions). The last character is held to what no option of apt-get looks like:
# it reads NAME- as "remove".
_PACKAGE = re.compile(r"(?P<name>[a-z0-9][a-z0-9+.-]*[a-z0-9+](?::[a-z0-9-]+)?)(?:=(?P<version>[A-Za-z0-9.+:~-]+))?\Z")

# $@: names. dpkg-query says which of them it does not know by its status 1.
_LOOK = """
for name in "$@"; do
  found=$(dpkg-query --show --showformat="\\${db:Status-Status} \\${Version}\\n" -- "$name" 2>/dev/null)
  case $? in
    0 | 1) say name "$name"; say found "$found" ;;
    *) trouble "ask dpkg for $name" "$(dpkg-query --show -- "$name" 2>&1)" ;;
  esac
done
"""
# How old the lists are, in seconds; nothing where there are none. apt's own stamp is only there where its periodic job
# runs, so that the folder counts too.
_AGE = """
now=$(date +%s)
for stamp in /var/lib/apt/periodic/update-success-stamp /var/lib/apt/lists; do
  changed=$(stat -c %Y "$stamp" 2>/dev/null) && [ -n "$(ls -A /var/lib/apt/lists 2>/dev/null)" ] &&
    say age "$((now - changed))"
done
true
"""
# $1: seconds to wait for another apt. The option DPkg::Lock::Timeout does not hold for the lock of the lists. What is
# begun goes on when the connection is lost: a package manager that is cut leaves a host half changed.
_UPDATE = """
trap "" HUP
end=$(($(date +%s) + $1))
while :; do
  complaint=$(apt-get --quiet update 2>&1 </dev/null) && break
  case $complaint in
    *"Could not get lock"* | *"Unable to lock"*) [ "$(date +%s)" -lt "$end" ] && sleep 5 && continue ;;
  esac
  trouble "refresh the lists of packages" "$complaint"
done
touch /var/lib/apt/lists
"""
# $1: seconds, then apt-get's command with its options and the packages.
_CHANGE = """
trap "" HUP
seconds=$1; shift
export DEBIAN_FRONTEND=noninteractive NEEDRESTART_MODE=l
attempt "have apt-get $*" apt-get --quiet --yes --option=DPkg::Lock::Timeout="$seconds" \
  --option=Dpkg::Options::=--force-confdef --option=Dpkg::Options::=--force-confold "$@"
"""


class ActionModule(RawAction):
    """Packages of a Debian host without Python; see the module's documentation."""

    arguments: ClassVar[dict[str, Any]] = {
        "name": {"type": "list", "elements": "str", "default": []},
        "state": {"type": "str", "choices": ["present", "absent"], "default": "present"},
        "update_cache": {"type": "bool", "default": False},
        "cache_valid_time": {"type": "int", "default": 0},
        "install_recommends": {"type": "bool", "default": False},
        "purge": {"type": "bool", "default": False},
        "lock_timeout": {"type": "int", "default": 300},
    }

    def perform(self, host: Host, options: dict[str, Any]) -> dict[str, Any]:
        wanted = {name: _checked(name) for name in options["name"]}
        timeout = str(max(0, options["lock_timeout"]))
        before = _installed(host, [name for name, _version in wanted.values()])
        if options["state"] == "present":
            missing = [
                each
                for each, (name, version) in wanted.items()
                if before[name] is None or (version and before[name] != version)
            ]
        else:
            missing = [name for name, _version in wanted.values() if before[name] is not None]
        refreshed = options["update_cache"] and self._stale(host, options["cache_valid_time"])
        if refreshed and not self.check_mode:
            # A change of its own it is not: nothing that is installed is another than before.
            host.change(_UPDATE, timeout)
        if missing and not self.check_mode:
            if options["state"] == "present":
                words = ["install", "--no-install-recommends"] if not options["install_recommends"] else ["install"]
                words += ["--allow-downgrades"] if any("=" in each for each in missing) else []
            else:
                words = ["purge" if options["purge"] else "remove"]
            try:
                host.change(_CHANGE, timeout, *words, "--", *missing)
            except StepError as trouble:
                raise _explained(trouble) from None
        result: dict[str, Any] = {"changed": bool(missing), "packages": missing, "cache_updated": refreshed}
        if self.diff_mode and missing:
            present = options["state"] == "present"
            after = {_checked(each)[0]: (_checked(each)[1] or "present") if present else "absent" for each in missing}
            result["diff"] = difference("packages", {name: before[name] or "absent" for name in after}, after)
        return result

    def _stale(self, host: Host, valid: int) -> bool:
        ages = [int(age) for age in host.ask(_AGE).texts("age")]
        # A clock that was set back gives an age below 0, which says nothing.
        return not any(0 <= age < valid for age in ages)


def _checked(package: str) -> tuple[str, str]:
    found = _PACKAGE.match(package)
    if not found:
        raise RawError("name of a package, or NAME=VERSION", repr(package), "correct name")
    return found["name"], found["version"] or ""


def _installed(host: Host, names: list[str]) -> dict[str, str | None]:
    """Version of each that is installed; None: not installed, or only its configuration is left."""
    versions: dict[str, str | None] = {}
    for part in host.ask(_LOOK, *names).groups("name"):
        # A name without an architecture can be known for several.
        states = [line.split(" ", 1) for line in part.text("found").split("\n") if " " in line]
        versions[part.text("name")] = next((version for state, version in states if state == "installed"), None)
    return versions


def _explained(trouble: StepError) -> RawError:
    remedies = {
        "Unable to locate package": "correct the name, or set update_cache to true",
        "was not found": "correct the version, or set update_cache to true",
        "dpkg --configure -a": "run dpkg --configure -a on the host: an earlier run was cut",
        "Could not get lock": "wait until the other package manager is ready, or raise lock_timeout",
        "Unmet dependencies": "run apt-get --fix-broken install on the host and see what it says",
    }
    remedy = next((text for mark, text in remedies.items() if mark in trouble.complaint), "mend that and run again")
    return RawError(f"to {trouble.step}", shown(trouble.complaint[-1500:]), remedy)
