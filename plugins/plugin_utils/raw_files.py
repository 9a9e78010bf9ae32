# Copyright (c) 2026, the Ringmaster authors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Files and directories of a host without Python: looked at, written in one step, removed.

A file is written beside its place, readable to its owner only, compared with the checksum of what it has to be, given
owner and mode, brought to the disk and renamed. A run that is cut leaves the old file whole; what it leaves beside it
has a name that the next run knows and replaces.
"""

from __future__ import annotations

import hashlib
import posixpath
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from ansible_collections.ringmaster.inference.plugins.plugin_utils.raw_action import Host, difference
from ansible_collections.ringmaster.inference.plugins.plugin_utils.raw_mounts import parse_table
from ansible_collections.ringmaster.inference.plugins.plugin_utils.raw_shell import Answer, RawError, batches, shown

# Ansible's own default for max_file_size_for_diff (bytes): larger contents are not shown in a diff.
LARGEST_DIFF = 104_448
# A configuration file that is edited is read as a whole; more than this (bytes) is none.
LARGEST_EDIT = 1 << 20

_MODE = re.compile(r"0?[0-7]{3,4}\Z")
# Names of a directory service can have spaces and backslashes. A colon would name owner and group at once.
_NAME = re.compile(r"(?:[^-+:\x00-\x1f\x7f0-9][^:\x00-\x1f\x7f]*|[0-9]+)\Z")

# For every path its kind, and what belongs to that. $1: how large a content may be (bytes) to be told; 0 for none.
# Whether all may read a file is a matter of the modes of the folders on the way, too; they come deepest first.
_LOOK = """
limit=$1; shift
for path in "$@"; do
  say path "$path"
  regular=no
  if [ -h "$path" ]; then
    say kind link
    say target "$(readlink "$path" && echo .)"
  elif [ -f "$path" ]; then
    say kind file
    regular=yes
    sum=$( (sha256sum <"$path") 2>&1) || trouble "read $path" "$sum"
    say sum "${sum%% *}"
  elif [ -d "$path" ]; then
    say kind directory
  elif complaint=$(stat -c %f "$path" 2>&1); then
    say kind special
  else
    case $complaint in
      *": No such file or directory" | *": Not a directory") say kind absent ;;
      *) trouble "look at $path" "$complaint" ;;
    esac
  fi
  if status=$(stat -c "%a %u %g %s" "$path" 2>/dev/null); then
    say status "$status"
    say names "$(stat -c %U:%G "$path")"
  fi
  if [ "$limit" -gt 0 ] && [ $regular = yes ] && [ "${status##* }" -le "$limit" ]; then say_file content "$path"; fi
  folder=$path
  modes=
  while [ -n "$folder" ]; do
    folder=${folder%/*}
    modes="$modes $(stat -L -c %a "${folder:-/}" 2>/dev/null || echo missing)"
  done
  say modes "$modes"
done
"""

# $1 path, $2 where it is written, $3 where the content is, $4 its sha256, $5 mode, $6 owner, $7 group (empty: as it
# comes), then the command that validates it. Without noclobber, a link that somebody put there would be followed.
_WRITE = """
path=$1 temporary=$2 source=$3 sum=$4 mode=$5 owner=$6 group=$7
shift 7
umask 077
trap "rm -f \\"\\$temporary\\"" EXIT
trap "exit 1" HUP INT TERM
attempt "remove what a former run left beside $path" rm -f "$temporary"
complaint=$( (set -C; cat <"$source" >"$temporary") 2>&1) || trouble "write beside $path" "$complaint"
found=$(sha256sum <"$temporary")
[ "${found%% *}" = "$sum" ] || trouble "write $path whole" "another checksum than $sum: ${found%% *}"
[ -z "$owner" ] || attempt "give $path to $owner" chown "$owner" "$temporary"
[ -z "$group" ] || attempt "give $path to the group $group" chgrp "$group" "$temporary"
[ -z "$mode" ] || attempt "set the mode of $path" chmod "$mode" "$temporary"
[ $# -eq 0 ] || attempt "have the new content of $path validated" "$@"
sync "$temporary" 2>/dev/null || sync
[ ! -d "$path" ] || trouble "write $path" "a directory in its place"
attempt "put $path in its place" mv -f "$temporary" "$path"
trap - EXIT
folder=${path%/*}
sync "${folder:-/}" 2>/dev/null || sync
"""

# $1 path, $2 mode, $3 owner, $4 group; empty: left as it is. chown first, since it takes away setuid bits.
_ATTRIBUTES = """
[ -z "$3" ] || attempt "give $1 to $3" chown "$3" "$1"
[ -z "$4" ] || attempt "give $1 to the group $4" chgrp "$4" "$1"
[ -z "$2" ] || attempt "set the mode of $1" chmod "$2" "$1"
"""

# $1 path. Parents get the mode that mkdir gives them; the directory itself is nobody else's until its mode is set.
_MAKE_DIRECTORY = """
parent=${1%/*}
umask 022
[ -z "$parent" ] || attempt "make $parent" mkdir -p "$parent"
umask 077
attempt "make $1" mkdir "$1"
"""

_REMOVE_FILE = """
attempt "remove $1" rm -f "$1"
folder=${1%/*}
sync "${folder:-/}" 2>/dev/null || sync
"""

_REMOVE_DIRECTORY = """
attempt "remove $1" rm -rf "$1"
"""

_MOUNTS = """
say_file mounts /proc/self/mounts
"""


@dataclass(frozen=True)
class Found:
    """A path as it is on a host. ``kind`` is file, directory, link, special (device, socket, pipe) or absent."""

    path: str
    kind: str
    mode: int = 0  # permission bits, 0 to 0o7777
    uid: int = 0
    gid: int = 0
    owner: str = ""
    group: str = ""
    size: int = 0  # bytes
    sha256: str = ""
    target: str = ""
    content: bytes | None = None  # None: not asked for, or too large
    missing_parents: tuple[str, ...] = ()  # deepest first
    folders_open: bool = True  # whether everyone may enter all folders on the way

    @property
    def readable_by_all(self) -> bool:
        """Whether every user of the host can read it."""
        return self.folders_open and bool(self.mode & 0o004)

    def summary(self) -> dict[str, Any]:
        """What a diff shows of it besides the content."""
        if self.kind == "absent":
            return {"state": "absent"}
        result: dict[str, Any] = {"state": self.kind, "owner": self.owner, "group": self.group}
        if self.kind == "link":
            result["target"] = shown(self.target)
        else:
            result["mode"] = f"{self.mode:04o}"
        return result


@dataclass(frozen=True)
class Attributes:
    """Mode, owner and group that are wanted; None: as it is."""

    mode: int | None = None
    owner: str | None = None
    group: str | None = None

    def applied_to(self, found: Found) -> Found:
        """The path as it is to be. A name is known as such; which number it has is the host's matter."""
        return replace(
            found,
            mode=found.mode if self.mode is None else self.mode,
            owner=found.owner if _same(self.owner, found.owner, found.uid) else self.owner or "",
            group=found.group if _same(self.group, found.group, found.gid) else self.group or "",
        )

    def missing_in(self, found: Found) -> Attributes:
        """Those that have to be changed. A new owner or group takes bits from the mode: it is set again then."""
        owner = None if _same(self.owner, found.owner, found.uid) else self.owner
        group = None if _same(self.group, found.group, found.gid) else self.group
        mode = found.mode if self.mode is None else self.mode
        return Attributes(mode if mode != found.mode or owner or group else None, owner, group)

    def words(self) -> tuple[str, str, str]:
        """As arguments of a script: mode, owner, group; empty where nothing is asked."""
        return (f"{self.mode:04o}" if self.mode is not None else "", self.owner or "", self.group or "")


def _same(wanted: str | None, name: str, number: int) -> bool:
    return wanted is None or (int(wanted) == number if wanted.isdecimal() else wanted == name)


ATTRIBUTE_ARGUMENTS: dict[str, Any] = {
    "mode": {"type": "raw"},
    "owner": {"type": "str"},
    "group": {"type": "str"},
}


def attributes(options: dict[str, Any]) -> Attributes:
    """The attributes in a task's options. Raises RawError.

    A mode must be text: YAML reads ``0644`` as the number 420, and ``644`` as another mode than it looks like.
    """
    mode = options.get("mode")
    if mode is not None and not (isinstance(mode, str) and _MODE.match(mode)):
        raise RawError("mode to be octal digits in quotation marks", repr(mode), "write it like this: mode: '0644'")
    for name in ("owner", "group"):
        value = options.get(name)
        if value is not None and not _NAME.match(value):
            raise RawError(f"{name} to be a name or a number", repr(value), "correct it")
    return Attributes(int(mode, 8) if mode is not None else None, options.get("owner"), options.get("group"))


def checked_path(path: str, option: str = "path") -> str:
    """The path, normalised. Raises RawError for one that is not absolute, climbs or is the root."""
    normal = posixpath.normpath(path)
    if not path.startswith("/") or ".." in path.split("/") or normal in ("/", "//") or "\0" in path:
        raise RawError(f"{option} to be an absolute path without '..', and not '/'", repr(path), "give the whole path")
    return "/" + normal.lstrip("/")


def _look(host: Host, limit: int, paths: Sequence[str]) -> list[Found]:
    parts = host.ask(_LOOK, str(limit), *paths).groups("path")
    # A host whose tools do not do what they have to says nothing, or something else.
    if [part.text("path") for part in parts] != list(paths):
        raise RawError(
            "the host to tell of the paths that it was asked for",
            ", ".join(shown(part.text("path")) for part in parts) or "no path",
            "see that printf, od and tr of the host do what POSIX says",
        )
    return [_found(part) for part in parts]


def _found(part: Answer) -> Found:
    path, kind = part.text("path"), part.text("kind")
    modes = part.text("modes").split()
    missing = tuple(folder for folder, mode in zip(_folders(path), modes) if mode == "missing")
    is_open = all(int(mode, 8) & 0o001 for mode in modes if mode != "missing")
    if kind == "absent" or not part.has("status"):
        return Found(path, "absent", missing_parents=missing, folders_open=is_open)
    mode, uid, gid, size = part.text("status").split(" ")
    owner, group = part.text("names").split(":", 1)
    return Found(
        path,
        kind,
        int(mode, 8),
        int(uid),
        int(gid),
        owner,
        group,
        int(size),
        sha256=part.text("sum") if kind == "file" else "",
        # readlink ends its answer with a line end of its own, and the script with a dot after it.
        target=part.text("target")[:-2] if kind == "link" else "",
        content=part.data("content") if part.has("content") and kind == "file" else None,
        missing_parents=missing,
        folders_open=is_open,
    )


def _folders(path: str) -> list[str]:
    """The folders on the way to a path, deepest first, as the script _LOOK goes through them."""
    return [path[: found.start()] or "/" for found in reversed(list(re.finditer("/", path)))]


def look_at_all(host: Host, paths: Sequence[str]) -> list[Found]:
    """Paths of the host, without contents. Raises RawError and StepError."""
    return [found for part in batches(paths) for found in _look(host, 0, part)]


def look(host: Host, path: str, limit: int = 0) -> Found:
    """A path of the host; the content of a file of up to `limit` bytes with it. Raises RawError and StepError."""
    return _look(host, limit, [path])[0]


def temporary(path: str) -> str:
    """Where a file is written before it takes its place: the same name at every run, and short, whatever the path."""
    name = hashlib.sha256(path.encode("utf-8", "surrogateescape")).hexdigest()[:16]
    return posixpath.join(posixpath.dirname(path), f".ringmaster-{name}")


def write(host: Host, found: Found, source: str, sha256: str, wanted: Attributes, validate: Sequence[str] = ()) -> None:
    """Put the content at `source` (a path of the host) in the place of what was found there.

    What is not wanted otherwise stays as it was; a new file is its owner's alone. In `validate` the word ``%s``, or a
    part of a word, stands for the new file. Raises RawError and StepError.
    """
    if found.kind == "file":
        wanted = Attributes(
            found.mode if wanted.mode is None else wanted.mode,
            wanted.owner or str(found.uid),
            wanted.group or str(found.gid),
        )
    beside = temporary(found.path)
    check = [word.replace("%s", beside) for word in validate]
    host.change(_WRITE, found.path, beside, source, sha256, *wanted.words(), *check)


def write_content(host: Host, found: Found, content: bytes, wanted: Attributes, validate: Sequence[str] = ()) -> None:
    """As :func:`write`, with content from here."""
    write(host, found, host.send(content), hashlib.sha256(content).hexdigest(), wanted, validate)


def set_attributes(host: Host, path: str, wanted: Attributes) -> None:
    """Change what is wanted of an existing path. Raises StepError."""
    host.change(_ATTRIBUTES, path, *wanted.words())


def make_directory(host: Host, path: str, wanted: Attributes) -> None:
    """Make a directory, with its parents (0755). Raises StepError."""
    host.change(_MAKE_DIRECTORY + _ATTRIBUTES, path, *wanted.words())


def remove_file(host: Host, path: str) -> None:
    """Remove a file or a link. Raises StepError."""
    host.change(_REMOVE_FILE, path)


def refuse_mounts(host: Host, path: str) -> None:
    """Removing a tree must not reach into what somebody mounted inside of it. Raises RawError."""
    table = host.ask(_MOUNTS).text("mounts")
    inside = [each.path for each in parse_table(table) if each.path == path or each.path.startswith(path + "/")]
    if inside:
        raise RawError(
            f"no file system mounted at or below {path}, which is to be removed",
            f"one at {shown(inside[-1])}",
            "unmount it and run again",
        )


def remove_directory(host: Host, path: str) -> None:
    """Remove a directory and all that is in it, unless something is mounted there. Raises RawError and StepError."""
    refuse_mounts(host, path)
    host.change(_REMOVE_DIRECTORY, path)


def not_a_file(found: Found) -> RawError:
    """What to say where a file was to be and something else is."""
    kinds = {"link": f"a symbolic link to {shown(found.target)}", "directory": "a directory"}
    remedies = {"link": "name the file itself, or remove the link first", "directory": "name another path"}
    return RawError(
        f"a regular file or nothing at {shown(found.path)}",
        kinds.get(found.kind, "a device, a socket or a pipe"),
        remedies.get(found.kind, "name another path"),
    )


def content_diff(before: Found, content: bytes | None, after: Found) -> dict[str, Any]:
    """The difference of two contents; None: there is no file.

    What not every user of the host can read, before or after, is not shown: it may hold a secret. Nor is what is no
    text or too large.
    """
    sides = [side for side in (before, after) if side.kind == "file"]
    old = before.content if before.kind == "file" else b""
    new = content if content is not None else b""
    if not all(side.readable_by_all for side in sides):
        return _without_contents(before, after, content, "not readable by all")
    if old is None or len(new) > LARGEST_DIFF:
        return _without_contents(before, after, content, "too large")
    try:
        return difference(before.path, old.decode("utf-8"), new.decode("utf-8"))
    except UnicodeDecodeError:
        return _without_contents(before, after, content, "not text")


def _without_contents(before: Found, after: Found, new: bytes | None, reason: str) -> dict[str, Any]:
    sums = (before.sha256, hashlib.sha256(new).hexdigest() if new is not None else after.sha256)
    texts = [f"(content not shown: {reason}; sha256 {each[:12]})\n" if each else "" for each in sums]
    return difference(before.path, texts[0], texts[1])
