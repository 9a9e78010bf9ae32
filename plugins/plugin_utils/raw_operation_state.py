# Copyright (c) 2026, the Ringmaster authors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The state before an operation's first apply, on a host without Python.

Place and form of the record are those of module_utils/operation_state.py, so that the module reads what was kept here.
Extended attributes (SELinux label, capabilities, access control list) are not kept: coreutils do not tell them.
"""

from __future__ import annotations

import json
import posixpath
from collections.abc import Iterable
from dataclasses import asdict, replace
from typing import Any

from ansible_collections.ringmaster.inference.plugins.module_utils.operation_state import (
    SCHEMA,
    Entry,
    OperationState,
    Outcome,
    Record,
    absent_at_first,
    beneath,
    kind_diff,
    parse_record,
    record_diff,
    utc_now,
)
from ansible_collections.ringmaster.inference.plugins.plugin_utils import raw_files as files
from ansible_collections.ringmaster.inference.plugins.plugin_utils.raw_action import Host
from ansible_collections.ringmaster.inference.plugins.plugin_utils.raw_shell import RawError, batches, shown

# A record is a list of paths; more than this (bytes) is none.
_LARGEST_RECORD = 1 << 22

_OTHERS = """
for document in "$1"/*/state.json; do
  [ -f "$document" ] || continue
  name=${document%/state.json}
  say name "${name##*/}"
  say_file document "$document"
done
true
"""
# $1 the folder above all records, $2 that of all records, $3 that of this one, $4 that of its contents.
_DIRECTORIES = """
umask 022
attempt "make $1" mkdir -p "$1"
umask 077
for folder in "$2" "$3" "$4"; do
  [ -d "$folder" ] || attempt "make $folder" mkdir "$folder"
done
attempt "keep $3 to root" chmod 0700 "$3" "$4"
"""
# $1 the folder of contents, then files. The checksum is of what was copied, so it is true even if the file changes. All
# are brought to the disk at the end: the document that names them is written later.
_KEEP = """
contents=$1; shift
umask 077
for path in "$@"; do
  attempt "remove what a former run left" rm -f "$contents/.incoming"
  complaint=$( (cat <"$path" >"$contents/.incoming") 2>&1) || trouble "copy $path to $contents" "$complaint"
  sum=$(sha256sum <"$contents/.incoming")
  attempt "keep the content of $path" mv -f "$contents/.incoming" "$contents/${sum%% *}"
  say path "$path"
  say sum "${sum%% *}"
  say size "$(wc -c <"$contents/${sum%% *}")"
done
sync -f "$contents" 2>/dev/null || sync
"""
# $1 the folder of contents, then checksums: those whose content is gone or another.
_DAMAGED = """
contents=$1; shift
for wanted in "$@"; do
  sum=$(sha256sum 2>/dev/null <"$contents/$wanted")
  [ "${sum%% *}" = "$wanted" ] || say damaged "$wanted"
done
true
"""
# What is in each of the directories, as far as they are there.
_LIST = """
for folder in "$@"; do
  [ -d "$folder" ] && [ ! -h "$folder" ] || continue
  say folder "$folder"
  for entry in "$folder"/* "$folder"/.[!.]* "$folder"/..?*; do
    [ -e "$entry" ] || [ -h "$entry" ] || continue
    say entry "$entry"
  done
done
true
"""
_REMOVE_EMPTY = """
for folder in "$@"; do rmdir "$folder" 2>/dev/null; done
true
"""
# $1 path, $2 target, $3 owner, $4 group. ln has to be kept from going into a directory that an old link leads to.
_LINK = """
attempt "remove what is at $1" rm -f "$1"
attempt "make the link $1" ln -s -- "$2" "$1"
attempt "give the link $1 to $3:$4" chown -h "$3:$4" "$1"
"""
# The document goes first: without it the rest means nothing, and a run that is cut here can be repeated.
_FORGET = """
attempt "remove $1" rm -f "$1"
sync "$2" 2>/dev/null || sync
attempt "remove $2" rm -rf "$2"
rmdir "$3" 2>/dev/null
true
"""


class RawOperationState(OperationState):
    """The record of operation ``name`` under ``directory`` on a host.

    Raises OperationStateError, RawError and StepError: from every method, with what was recorded before unchanged.
    """

    def __init__(self, host: Host, name: str, directory: str) -> None:
        super().__init__(name, directory)
        self.host = host

    def load(self) -> Record | None:
        """The record, or None if nothing was recorded."""
        found = files.look(self.host, self.document, _LARGEST_RECORD)
        if found.kind == "absent":
            return None
        if found.content is None:
            raise self._damaged("something that is no file, or a huge one")
        try:
            return parse_record(json.loads(found.content.decode("utf-8")), self.name)
        except (ValueError, RecursionError) as error:
            raise self._damaged(str(error) or type(error).__name__) from error

    def others(self) -> dict[str, dict[str, Any]]:
        """What each other operation with a record here measured before its first apply, by the operation's name."""
        measured: dict[str, dict[str, Any]] = {}
        for part in self.host.ask(_OTHERS, self.base).groups("name"):
            name = part.text("name")
            if name == self.name:
                continue
            try:
                measured[name] = parse_record(json.loads(part.text("document")), name).measured
            except (ValueError, RecursionError) as error:
                raise OperationState(name, self.base)._damaged(str(error) or type(error).__name__) from error
        return measured

    def record(self, measured: dict[str, Any], files: Iterable[str], write: bool = True) -> Outcome:
        """Keep `measured` and the paths as they are now, as the module does."""
        paths = [self._checked(path) for path in files]
        known = self.load()
        record = known or Record(self.name, utc_now(), measured, {})
        added = sorted(set(paths) - set(record.files))
        if known and not added:
            return Outcome(False, known)
        absent = absent_at_first(record)
        entries = dict(record.files)
        ours = [path for path in added if beneath(path, absent)]
        entries.update(dict.fromkeys(ours, Entry("absent")))
        entries.update(self._examine_all([path for path in added if path not in ours]))
        if write:
            parent = posixpath.dirname(self.base)
            self.host.change(_DIRECTORIES, parent, self.base, self.directory, self.contents)
            contents = [path for path in added if entries[path].kind == "file"]
            for batch in batches(contents):
                for part in self.host.change(_KEEP, self.contents, *batch).groups("path"):
                    path = part.text("path")
                    entries[path] = replace(entries[path], sha256=part.text("sum"), size=int(part.text("size")))
        record = Record(record.name, record.recorded_at, record.measured, entries)
        if write:
            self._put_document(record)
        return Outcome(True, record, added, [record_diff(known, record)])

    def restore(self, write: bool = True, contents_in_diff: bool = False) -> Outcome:
        """Put every recorded path back, or remove it if it was absent. The record stays, so this can be run again.

        Every stored content is checked before the first path is touched.
        """
        record = self.load()
        if record is None:
            return Outcome(False, None)
        sums = sorted({entry.sha256 for entry in record.files.values() if entry.kind == "file"})
        for batch in batches(sums):
            damaged = self.host.ask(_DAMAGED, self.contents, *batch).texts("damaged")
            if damaged:
                raise self._damaged(f"no stored content {damaged[0]}, or another")
        current = self._examine_all(record.files)
        differing = [path for path in sorted(record.files) if not self._same(current[path], record.files[path])]
        for path in differing:
            if current[path].kind == "directory" and record.files[path].kind != "directory":
                files.refuse_mounts(self.host, path)
        emptied = self._emptied(record, {path for path in differing if record.files[path].kind == "absent"})
        diff = [kind_diff(path, current[path].summary(), record.files[path].summary()) for path in differing]
        diff += [kind_diff(path, {"kind": "directory"}, {"kind": "absent"}) for path in emptied]
        if write:
            self._put_all_back(record, current, differing)
            for batch in batches(emptied):
                self.host.change(_REMOVE_EMPTY, *batch)
        return Outcome(bool(differing or emptied), record, differing + emptied, diff if contents_in_diff else [])

    def remove(self, write: bool = True) -> Outcome:
        """Forget the record, a damaged one too. The base directory goes as well once no operation is left in it."""
        if files.look(self.host, self.directory).kind == "absent":
            return Outcome(False, None)
        if write:
            self.host.change(_FORGET, self.document, self.directory, self.base)
        return Outcome(True, None, [self.directory], [kind_diff(self.directory, {"recorded": True}, {})])

    def _examine_all(self, paths: Iterable[str]) -> dict[str, Entry]:
        return {found.path: _entry(found) for found in files.look_at_all(self.host, list(paths))}

    def _same(self, now: Entry, then: Entry) -> bool:
        """Attributes that a record of the module has are left alone, as they can't be read."""
        return replace(now, attributes=then.attributes).same_as(then)

    def _put_document(self, record: Record) -> None:
        document = {
            "schema": SCHEMA,
            "name": record.name,
            "recorded_at": record.recorded_at,
            "measured": record.measured,
            "files": {path: asdict(entry) for path, entry in record.files.items()},
        }
        text = json.dumps(document, indent=1, sort_keys=True) + "\n"
        files.write_content(
            self.host, files.look(self.host, self.document), text.encode("utf-8"), files.Attributes(0o600)
        )

    def _emptied(self, record: Record, removed: set[str]) -> list[str]:
        """Directories that were missing before and hold nothing once `removed` is gone, deepest first."""
        parents = {parent for entry in record.files.values() for parent in entry.missing_parents}
        ordered = sorted(parents - removed, key=lambda path: (-path.count("/"), path))
        held = {
            part.text("folder"): part.texts("entry")
            for batch in batches(ordered)
            for part in self.host.ask(_LIST, *batch).groups("folder")
        }
        gone = set(removed)
        emptied = []
        for parent in ordered:
            if parent in held and all(entry in gone for entry in held[parent]):
                gone.add(parent)
                emptied.append(parent)
        return emptied

    def _put_all_back(self, record: Record, current: dict[str, Entry], differing: list[str]) -> None:
        wanted = {path: record.files[path] for path in differing}
        for path in sorted(wanted, reverse=True):  # what is inside a directory before the directory
            if wanted[path].kind == "absent" or current[path].kind not in ("absent", wanted[path].kind):
                self._clear(path)
        for kind in ("directory", "file", "link"):
            for path in sorted(wanted):  # a directory before what is inside it
                if wanted[path].kind == kind:
                    self._put_path_back(path, wanted[path])

    def _clear(self, path: str) -> None:
        kind = files.look(self.host, path).kind
        if kind == "directory":
            files.remove_directory(self.host, path)
        elif kind != "absent":
            files.remove_file(self.host, path)

    def _put_path_back(self, path: str, entry: Entry) -> None:
        found = files.look(self.host, path)
        if found.missing_parents:
            files.make_directory(self.host, found.missing_parents[0], files.Attributes(0o755))
        wanted = files.Attributes(entry.mode, str(entry.uid), str(entry.gid))
        if entry.kind == "directory":
            if found.kind == "absent":
                files.make_directory(self.host, path, wanted)
            else:
                files.set_attributes(self.host, path, wanted)
        elif entry.kind == "file":
            files.write(self.host, found, posixpath.join(self.contents, entry.sha256), entry.sha256, wanted)
        else:
            self.host.change(_LINK, path, entry.target, str(entry.uid), str(entry.gid))


def _entry(found: files.Found) -> Entry:
    """What was found, as a record has it."""
    if found.kind == "special":
        raise RawError(
            "a regular file, a directory, a symbolic link or nothing",
            f"{shown(found.path)}, which is a device, a socket or a pipe",
            "take it out of the list of files",
        )
    if found.kind == "absent":
        return Entry("absent", missing_parents=list(found.missing_parents))
    if found.kind == "link":
        return Entry("link", uid=found.uid, gid=found.gid, target=found.target)
    if found.kind == "directory":
        return Entry("directory", found.mode, found.uid, found.gid)
    return Entry("file", found.mode, found.uid, found.gid, found.sha256, found.size)
