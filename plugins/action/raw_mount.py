# Copyright (c) 2026, the Ringmaster authors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

from ansible_collections.ringmaster.inference.plugins.plugin_utils import raw_files as files
from ansible_collections.ringmaster.inference.plugins.plugin_utils import raw_mounts as mounts
from ansible_collections.ringmaster.inference.plugins.plugin_utils.raw_action import Host, RawAction, difference
from ansible_collections.ringmaster.inference.plugins.plugin_utils.raw_shell import RawError, shown

DEFAULT_TABLE = "/etc/fstab"
MOUNTED = "/proc/self/mounts"

_READ = """
say_file mounted "$1"
"""
# systemd makes units of the table, and would go on with those of the former one.
_RELOAD = """
if [ -d /run/systemd/system ]; then attempt "have systemd read the table again" systemctl daemon-reload; fi
"""
# $1 the table, $2 mount point. The options are those of the table.
_MOUNT = """
[ -d "$2" ] || attempt "make the mount point $2" mkdir -p "$2"
attempt "mount $2" mount -T "$1" -- "$2"
"""
# $1 mount point, $2 options.
_REMOUNT = """
attempt "mount $1 anew with $2" mount -o "remount,$2" -- "$1"
"""
_UNMOUNT = """
attempt "unmount $1" umount -- "$1"
"""
_STATES = ("mounted", "present", "absent", "absent_from_fstab", "remounted")


class ActionModule(RawAction):
    """A line of fstab on a host without Python, and the mount; see the module's documentation."""

    arguments: ClassVar[dict[str, Any]] = {
        "path": {"type": "str", "required": True},
        "src": {"type": "str"},
        "fstype": {"type": "str"},
        "opts": {"type": "list", "elements": "str", "default": ["defaults"]},
        "dump": {"type": "int", "default": 0},
        "passno": {"type": "int", "default": 0},
        "state": {"type": "str", "choices": [*_STATES], "required": True},
        "fstab": {"type": "str", "default": DEFAULT_TABLE},
    }
    rules: ClassVar[dict[str, Any]] = {
        "required_if": [("state", "mounted", ["src", "fstype"]), ("state", "present", ["src", "fstype"])]
    }

    def perform(self, host: Host, options: dict[str, Any]) -> dict[str, Any]:
        wanted = _wanted(options)
        if options["state"] == "remounted":
            return self._remounted(host, wanted)
        table = files.checked_path(options["fstab"], "fstab")
        kept = files.look(host, table, files.LARGEST_EDIT)
        if kept.kind not in ("file", "absent"):
            raise files.not_a_file(kept)
        if kept.kind == "file" and kept.content is None:
            raise RawError(f"{shown(table)} of up to {files.LARGEST_EDIT} bytes", f"{kept.size}", "see what it is")
        before = (kept.content or b"").decode("utf-8", "surrogateescape")
        kept_out = options["state"] in ("absent", "absent_from_fstab")
        after = mounts.replaced(before, wanted.key, None if kept_out else wanted)
        writes = before != after
        top = _mounted(host, wanted.path)
        verb = ""
        if options["state"] == "mounted":
            if top is not None and top.type != wanted.type:
                raise RawError(
                    f"{shown(wanted.path)} to be mounted as {wanted.type}, or not yet",
                    f"{top.type} ({shown(top.source)}) there",
                    "unmount that first",
                )
            verb = "mount" if top is None else "remount" if writes else ""
        elif options["state"] == "absent" and top is not None:
            verb = "unmount"
        if not self.check_mode:
            if verb == "unmount":
                host.change(_UNMOUNT, wanted.path)
            if writes:
                wanted_mode = files.Attributes() if kept.kind == "file" else files.Attributes(0o644)
                files.write_content(host, kept, after.encode("utf-8", "surrogateescape"), wanted_mode)
                host.change(_RELOAD)
            if verb == "mount":
                host.change(_MOUNT, table, wanted.path)
            elif verb == "remount":
                host.change(_REMOUNT, wanted.path, ",".join(wanted.options))
        result: dict[str, Any] = {"changed": writes or bool(verb), "path": shown(wanted.path)}
        if self.diff_mode and result["changed"]:
            result["diff"] = []
            if verb in ("mount", "unmount"):
                mounted = {"mounted": verb == "unmount"}
                result["diff"].append(difference(wanted.path, mounted, {"mounted": verb == "mount"}))
            if writes:
                new = replace(kept, kind="file", mode=kept.mode if kept.kind == "file" else 0o644)
                result["diff"].append(files.content_diff(kept, after.encode("utf-8", "surrogateescape"), new))
        return result

    def _remounted(self, host: Host, wanted: mounts.Mount) -> dict[str, Any]:
        top = _mounted(host, wanted.path)
        if top is None:
            raise RawError(f"{shown(wanted.path)} to be mounted", "that it is not", "mount it first")
        changed = not set(wanted.options) <= set(top.options)
        if changed and not self.check_mode:
            host.change(_REMOUNT, wanted.path, ",".join(wanted.options))
        result: dict[str, Any] = {"changed": changed, "path": shown(wanted.path)}
        if self.diff_mode and changed:
            options = {"options": ",".join(wanted.options)}
            result["diff"] = difference(wanted.path, {"options": ",".join(top.options)}, options)
        return result


def _wanted(options: dict[str, Any]) -> mounts.Mount:
    path = options["path"]
    swap = path in ("none", "swap")
    if swap and options["state"] in ("mounted", "remounted"):
        raise RawError("the mount point of a file system", f"{path!r}", "use raw_swap for swap that is on")
    if swap and options["src"] is None:
        raise RawError("src, which tells one line of swap from another", "none", "give src")
    if not swap and path != "/":
        path = files.checked_path(path)
    for name in ("src", "fstype"):
        if options[name] is not None and not options[name]:
            raise RawError(f"{name} to be something", "nothing", f"give {name}")
    for option in options["opts"]:
        if not option or "," in option:
            raise RawError("opts to be a list of single options", repr(option), "give each as an item of its own")
    if options["dump"] < 0 or options["passno"] < 0:
        raise RawError("dump and passno to be 0 or more", "less", "correct them")
    return mounts.Mount(
        options["src"] or "",
        path,
        options["fstype"] or "",
        tuple(options["opts"]),
        options["dump"],
        options["passno"],
    )


def _mounted(host: Host, path: str) -> mounts.Mount | None:
    """What is mounted at a path: the last one covers those before it."""
    found = [mount for mount in mounts.parse_table(host.ask(_READ, MOUNTED).text("mounted")) if mount.path == path]
    return found[-1] if found else None
