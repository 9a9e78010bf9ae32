# Copyright (c) 2026, the Ringmaster authors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

import re
from typing import Any, ClassVar

from ansible_collections.ringmaster.inference.plugins.plugin_utils import raw_files as files
from ansible_collections.ringmaster.inference.plugins.plugin_utils.raw_action import Host, RawAction
from ansible_collections.ringmaster.inference.plugins.plugin_utils.raw_mounts import Mount, parse_swaps, parse_table
from ansible_collections.ringmaster.inference.plugins.plugin_utils.raw_shell import Answer, shown

# Where systems and their users keep interpreters.
INTERPRETER_FOLDERS = (
    "/usr/local/sbin",
    "/usr/local/bin",
    "/usr/sbin",
    "/usr/bin",
    "/sbin",
    "/bin",
    "/usr/libexec",
    "/opt/*/bin",
    "/usr/local/*/bin",
    "/usr/lib/*/bin",
    "/home/*/bin",
    "/home/*/.local/bin",
    "/root/.local/bin",
    "/home/*/.pyenv/versions/*/bin",
    "/snap/bin",
)
# python, python3, python3.13, pypy3, micropython, platform-python; not python3-config.
_INTERPRETER = re.compile(r"(?:micropython|platform-python|(?:python|pypy)(?:\d+(?:\.\d+)*)?t?)\Z")

# $1: the root of the tree that is looked at, empty for the host's. The folders that follow are patterns of the shell.
_LOOK = """
root=$1; shift
tell() { [ ! -r "$root$2" ] || say_file "$1" "$root$2"; }
if [ -r "$root/etc/os-release" ]; then say_file os_release "$root/etc/os-release"
else tell os_release /usr/lib/os-release; fi
say architecture "$(uname -m)"
say kernel "$(uname -r)"
say node "$(uname -n)"
say user "$(id -u)"
tell memory /proc/meminfo
tell swaps /proc/swaps
tell fstab /etc/fstab
tell mounts /proc/self/mounts
tell container /run/systemd/container
for mark in /run/.containerenv /.dockerenv; do [ ! -e "$root$mark" ] || say container_mark "$mark"; done
[ ! -d "$root/run/systemd/system" ] || say systemd yes
for device in "$root"/dev/watchdog*; do [ ! -c "$device" ] || say watchdog "${device#"$root"}"; done
for file in /etc/rpi/swap.conf /etc/dphys-swapfile; do [ ! -e "$root$file" ] || say swap_file "$file"; done
for tool in systemctl apt-get dnf logrotate swapoff; do
  ! place=$(command -v "$tool" 2>/dev/null) || { say tool "$tool"; say place "$place"; }
done
for pattern in "$@"; do
  IFS=
  for folder in $root$pattern; do
    unset IFS
    for file in "$folder"/*python* "$folder"/pypy*; do
      [ -f "$file" ] && [ -x "$file" ] && say interpreter "$(readlink -f "$file")" && say name "${file##*/}"
    done
  done
done
true
"""

# Distributions that name their family nowhere else but in ID.
_FAMILIES = {
    "Debian": ("debian", "ubuntu", "raspbian"),
    "RedHat": ("rhel", "fedora", "centos", "rocky", "almalinux"),
}
ROOT = ""


class ActionModule(RawAction):
    """What a host without Python is; see the module's documentation."""

    arguments: ClassVar[dict[str, Any]] = {"paths": {"type": "list", "elements": "str", "default": []}}

    def perform(self, host: Host, options: dict[str, Any]) -> dict[str, Any]:
        paths = [files.checked_path(path, "paths") for path in options["paths"]]
        answer = host.ask(_LOOK, ROOT, *INTERPRETER_FOLDERS)
        result = {"changed": False, "host": described(answer)}
        result["paths"] = {shown(each.path): _file(each) for each in files.look_at_all(host, paths)}
        return result


def described(answer: Answer) -> dict[str, Any]:
    """The host in the form that is documented. What could not be read is None, and `unknown` says why."""
    unknown: dict[str, str] = {}

    def text(name: str, where: str) -> str | None:
        if answer.has(name):
            return answer.text(name)
        unknown[name] = f"{where} can't be read"
        return None

    release = _os_release(text("os_release", "/etc/os-release") or "")
    memory = _memory(text("memory", "/proc/meminfo") or "")
    swaps = text("swaps", "/proc/swaps")
    fstab = text("fstab", "/etc/fstab")
    mounted = text("mounts", "/proc/self/mounts")
    marks = {"/run/.containerenv": "podman", "/.dockerenv": "docker"}
    container = answer.text("container").strip() if answer.has("container") else ""
    if not container and answer.has("container_mark"):
        container = marks[answer.text("container_mark")]
    swap_files = answer.texts("swap_file")
    places = dict(zip(answer.texts("tool"), answer.texts("place")))
    interpreters = {
        place for place, name in zip(answer.texts("interpreter"), answer.texts("name")) if _INTERPRETER.match(name)
    }
    return {
        "distribution": release.get("ID"),
        "version": release.get("VERSION_ID"),
        "codename": release.get("VERSION_CODENAME"),
        "family": _family(release),
        "architecture": answer.text("architecture"),
        "kernel": answer.text("kernel"),
        "node": shown(answer.text("node")),
        "root": answer.text("user") == "0",
        "systemd": answer.has("systemd"),
        "container": container,
        "memory_total_bytes": memory.get("MemTotal"),
        "memory_available_bytes": memory.get("MemAvailable"),
        "swap_total_bytes": memory.get("SwapTotal"),
        "swaps": [{"path": shown(swap.path), "type": swap.type, "size_bytes": swap.size} for swap in parse_swaps(swaps)]
        if swaps is not None
        else None,
        "swap_tool": _swap_tool(swap_files),
        "python": sorted(shown(place) for place in interpreters),
        "watchdogs": answer.texts("watchdog"),
        "tools": places,
        "fstab": list(map(_mount, parse_table(fstab))) if fstab is not None else None,
        "mounts": list(map(_mount, parse_table(mounted))) if mounted is not None else None,
        "unknown": unknown,
    }


def _os_release(text: str) -> dict[str, str]:
    """Values as os-release(5) has them: assignments of a shell, quoted or not."""
    values = {}
    for line in text.splitlines():
        found = re.match(r"\s*([A-Z][A-Z0-9_]*)=(.*?)\s*\Z", line)
        if found:
            value = found[2]
            if len(value) > 1 and value[0] == value[-1] and value[0] in "\"'":
                value = re.sub(r"\\([\"'$`\\])", r"\1", value[1:-1])
            values[found[1]] = shown(value)
    return values


def _family(release: dict[str, str]) -> str | None:
    names = [release.get("ID", ""), *release.get("ID_LIKE", "").split()]
    for family, members in _FAMILIES.items():
        if any(name in members for name in names):
            return family
    return None


def _memory(text: str) -> dict[str, int]:
    """Lines of /proc/meminfo, in bytes. Its "kB" are of 1024 bytes."""
    return {found[1]: int(found[2]) * 1024 for found in re.finditer(r"(?m)^(\w+):\s+(\d+) kB$", text)}


def _swap_tool(swap_files: list[str]) -> str:
    """What manages swap: rpi-swap takes the place of dphys-swapfile, whose file may be left over."""
    if "/etc/rpi/swap.conf" in swap_files:
        return "rpi-swap"
    return "dphys-swapfile" if swap_files else "none"


def _mount(mount: Mount) -> dict[str, Any]:
    return {
        "source": shown(mount.source),
        "path": shown(mount.path),
        "type": mount.type,
        "options": list(mount.options),
        "dump": mount.dump,
        "passno": mount.passno,
    }


def _file(found: files.Found) -> dict[str, Any]:
    result = found.summary()
    if found.kind == "file":
        result.update(sha256=found.sha256, size_bytes=found.size)
    return result
