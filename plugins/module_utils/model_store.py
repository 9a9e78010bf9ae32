# Copyright (c) 2026, the Ringmaster authors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Versions of a model's files on a host, one of them in service.

One model has one directory::

    ROOT/NAME/current             link to versions/VERSION: what engines load
    ROOT/NAME/previous            link to the version that was in service before
    ROOT/NAME/versions/VERSION/   a whole version, every file of it checked; nothing is ever written in here
    ROOT/NAME/incoming/VERSION/   one that is being fetched; a killed run leaves it and the next one goes on with it
    ROOT/NAME/records/VERSION.json  size, time and SHA-256 of each file as it was when it was checked

VERSION is the manifest's identity, and ``IDENTITY-2`` and so on where a damaged version is replaced. A directory gets
its place below ``versions`` by being renamed, and the links are replaced in one step, so a run that is killed at any
point leaves the former version in service.

Files belong to an owner who is not the engine's user, and nobody else on the host can read them (0640, 0750).
Nothing here imports Ansible.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import re
import shutil
import stat
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, BinaryIO

from ansible_collections.ringmaster.inference.plugins.module_utils import durable
from ansible_collections.ringmaster.inference.plugins.module_utils.model_manifest import (
    CHUNK,
    Manifest,
    ModelError,
    ModelFile,
    digest_of,
    folders_of,
)
from ansible_collections.ringmaster.inference.plugins.module_utils.model_sources import Source, SourceInterruptedError

SCHEMA = 1
DIRECTORY_MODE = 0o750
FILE_MODE = 0o640
# Tries in a row that bring no byte, and the wait before the first of them, doubled each time (seconds).
MOST_TRIES = 5
FIRST_WAIT = 1.0
# What was fetched of a file is read again when a run goes on with it; it then goes on for so many times longer.
LEAST_GAIN = 5.0

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}\Z")
_VERSION = re.compile(r"([0-9a-f]{16})(?:-([1-9][0-9]{0,5}))?\Z")
_KNOWN = {"versions", "incoming", "records", "current", "previous", ".lock"}
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT)


@dataclass(frozen=True)
class Difference:
    """A file of a version that is not as it has to be. ``kind``: ``missing``, ``checksum``, ``size``, ``type``,
    ``extra``, or ``attributes`` (owner, group or mode), which alone does no harm to the content."""

    path: str
    kind: str
    found: str

    def __str__(self) -> str:
        return f"{self.path}: {self.found}"


@dataclass
class Situation:
    """What there is of a wanted manifest. ``version`` is the whole one, if there is one, ``differences`` what is not
    right with it or with a damaged one; ``needed_bytes`` what has to be fetched yet, ``total_bytes`` all of it,
    ``unknown_sizes`` how many missing files have no known size, ``reused_files`` how many other versions have."""

    identity: str
    version: str | None = None
    differences: list[Difference] = field(default_factory=list)
    total_bytes: int = 0
    needed_bytes: int = 0
    unknown_sizes: int = 0
    free_bytes: int = 0
    reused_files: int = 0


@dataclass
class Part:
    """Bytes that somebody else brought to the host: a file with spans of the model's files, one after the other."""

    path: str
    sha256: str
    spans: list[tuple[str, int, int]]  # file, offset in it, bytes


class Store:
    """The versions of model ``name`` under ``root``.

    ``uid`` and ``gid`` own all that is written. ``reserve_bytes`` of the disk stay free. Every method raises ModelError
    if something can't be done; what is in service then stays so.
    """

    def __init__(
        self,
        root: str,
        name: str,
        uid: int,
        gid: int,
        reserve_bytes: int = 0,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        if not _NAME.match(name) or not os.path.isabs(root) or os.path.normpath(root).strip("/") == "":
            raise ModelError(
                "an absolute root and a name of letters, digits, '.', '_' and '-' (128 at most)",
                f"{root!r} and {name!r}",
                "give the model another name on the hosts; clients ask for it by the name in ringmaster_models",
            )
        self.root = os.path.normpath(root)
        self.name = name
        self.base = os.path.join(self.root, name)
        self.uid, self.gid = uid, gid
        self.reserve_bytes = reserve_bytes
        self._clock, self._sleep = clock, sleep

    # What is there

    def current(self) -> str | None:
        """The version in service."""
        return self._target("current")

    def previous(self) -> str | None:
        """The version that was in service before."""
        return self._target("previous")

    def versions(self) -> list[str]:
        """All whole versions, by name."""
        return sorted(name for name in _names(self._path("versions")) if _VERSION.match(name))

    def incoming(self) -> dict[str, int]:
        """Bytes that lie there of each version that was not finished."""
        names = [name for name in _names(self._path("incoming")) if _VERSION.match(name)]
        return {name: sum(found.st_size for found in self._files("incoming", name)) for name in names}

    def document(self) -> dict[str, Any]:
        """All of that for people and for evidence, sizes in bytes."""
        current = self.current()
        files = (self._record(current) if current else {}) or {}
        return {
            "name": self.name,
            "path": self._path("current"),
            "version": current,
            "previous": self.previous(),
            "versions": self.versions(),
            "incoming": self.incoming(),
            "files": len(files),
            "bytes": sum(entry["size"] for entry in files.values()),
        }

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Keeps a second run away from this model. Makes its directories."""
        strange = sorted(set(_names(self.base)) - _KNOWN)
        strange = [name for name in strange if not name.startswith(".ringmaster-")]
        if strange:
            raise ModelError(
                f"{self.base} to be made by this collection",
                f"other files in it: {', '.join(map(repr, strange[:5]))}",
                "move them to another directory, from which this model can be placed (source kind directory)",
            )
        for folder in (self.root, self.base, self._path("versions"), self._path("incoming"), self._path("records")):
            self._make_directory(folder)
        descriptor = os.open(self._path(".lock"), os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                raise ModelError(
                    f"nobody else at work on {self.base}", "another run", "wait for its end and run again"
                ) from error
            yield
        finally:
            os.close(descriptor)

    def situation(self, manifest: Manifest, full: bool = False) -> Situation:
        """Whether the host has `manifest` whole. With `full` every byte is read, else only of those files whose size or
        time is not what it was when they were checked. :meth:`demand` says what is missing."""
        result = Situation(manifest.identity)
        for version in reversed(self.versions()):
            if _identity(version) != manifest.identity:
                continue
            found = self.differences(version, manifest, full)
            if all(each.kind == "attributes" for each in found):
                result.version, result.differences = version, found
                break
            result.differences = result.differences or found
        return result

    def demand(self, situation: Situation, manifest: Manifest, source: Source | None) -> None:
        """Note in `situation` what has to be fetched. `source` is asked for sizes that the manifest does not give."""
        situation.free_bytes = self._free()
        done = self._record(manifest.identity, incoming=True) or {}
        damaged = {each.path for each in situation.differences}
        reusable = self._reusable()
        for file in manifest.files:
            is_done = self._is_done(manifest, file, done)
            size = int(done[file.path]["size"]) if is_done else self._size(file, source)
            situation.total_bytes += size or 0
            if is_done:
                continue
            if file.sha256 in reusable and file.path not in damaged:
                situation.reused_files += 1
            elif size is None:
                situation.unknown_sizes += 1
            else:
                partial = _size_of(self._path("incoming", manifest.identity, file.path)) or 0
                situation.needed_bytes += size - partial if partial <= size else size

    def distrust(self, situation: Situation, manifest: Manifest) -> None:
        """Forget that damaged files were found right once, so that they count as damaged without reading all again."""
        damaged = {each.path for each in situation.differences if each.kind != "attributes"}
        for version in self.versions():
            record = self._record(version)
            if _identity(version) == manifest.identity and record and damaged & set(record):
                self._write_record(version, {path: entry for path, entry in record.items() if path not in damaged})

    def differences(self, version: str, manifest: Manifest, full: bool = False) -> list[Difference]:
        """What is not right with a version, by path. Without `full`, files are taken as unchanged whose size and time
        are those of the record that was made when they were checked."""
        directory = self._path("versions", version)
        record = self._record(version) or {}
        result = []
        wanted = {file.path: file for file in manifest.files}
        folders = {folder for path in wanted for folder in folders_of(path)}
        for path, file in wanted.items():
            result += self._file_differences(directory, file, record.get(path), full)
        for path, found in _entries(directory):
            if stat.S_ISDIR(found.st_mode):
                if path not in folders:
                    result.append(Difference(path, "extra", "a directory that is not in the manifest"))
                elif self._attributes(found) != (self.uid, self.gid, DIRECTORY_MODE):
                    result.append(Difference(path, "attributes", self._attributes_found(found)))
            elif path not in wanted:
                result.append(Difference(path, "extra", "not in the manifest"))
        top = os.stat(directory)
        if self._attributes(top) != (self.uid, self.gid, DIRECTORY_MODE):
            result.append(Difference(".", "attributes", self._attributes_found(top)))
        return sorted(result, key=lambda each: each.path)

    # Fetching

    def check_room(self, situation: Situation) -> None:
        """Raises ModelError unless what has to be fetched fits on the disk and leaves the reserve."""
        if situation.needed_bytes and situation.free_bytes - situation.needed_bytes < self.reserve_bytes:
            raise ModelError(
                f"{format_bytes(situation.needed_bytes + self.reserve_bytes)} free on the file system of {self.root}: "
                f"{format_bytes(situation.needed_bytes)} for {self.name}, and a reserve of "
                f"{format_bytes(self.reserve_bytes)}",
                f"{format_bytes(situation.free_bytes)}",
                "remove other models there, or versions of this one "
                f"({', '.join(self.versions()) or 'there are none'}), or put the models on a larger disk. "
                f"Nothing was fetched, and {self.current() or 'nothing'} stays in service",
            )

    def fetch(self, manifest: Manifest, source: Source, time_limit: float = 0.0) -> bool:
        """Bring the files that are missing into ``incoming``, each checked. True if all are there; False if
        `time_limit` seconds (0: none) were over before. Run again, it goes on where it was."""
        reusable = self._reusable()
        deadline = self._clock() + time_limit if time_limit else None
        with self._incoming_of(manifest) as done:
            for file in manifest.files:
                if self._is_done(manifest, file, done):
                    continue
                if deadline is not None and self._clock() >= deadline:
                    return False
                target = self._incoming_file(manifest, file)
                if not self._reuse(file, reusable, target) and not self._fetch_file(file, target, source, deadline):
                    return False
                self._finish(manifest, file, target, done)
        return True

    def wanted(self, manifest: Manifest) -> list[tuple[str, int]]:
        """Files that are missing in ``incoming``, each with the bytes that are there. For one who brings parts."""
        reusable = self._reusable()
        result = []
        with self._incoming_of(manifest) as done:
            for file in manifest.files:
                if self._is_done(manifest, file, done):
                    continue
                target = self._incoming_file(manifest, file)
                if self._reuse(file, reusable, target):
                    self._finish(manifest, file, target, done)
                    continue
                partial = _size_of(target) or 0
                # A file that is there whole was never checked: the run before was cut just then. It comes once more.
                result.append((file.path, partial if file.size is not None and partial < file.size else 0))
        return result

    def append(self, manifest: Manifest, part: Part) -> None:
        """Take in a part. A file that is whole by it is checked; a wrong one is removed and named.

        The manifest has to give sizes, or nobody could tell which file is whole.
        """
        files = {file.path: file for file in manifest.files}
        with self._incoming_of(manifest) as done, open(part.path, "rb") as incoming:
            if digest_of(incoming)[0] != part.sha256:
                raise ModelError("a part as it was sent", "other bytes", "run again; it goes on where it was")
            incoming.seek(0)
            for path, offset, length in part.spans:
                file = files[path]
                target = self._incoming_file(manifest, file)
                with _opened(target) as output:
                    if os.fstat(output.fileno()).st_size < offset:
                        raise ModelError(f"the bytes of {path} before {offset}", "none", "run again")
                    output.truncate(offset)
                    output.seek(offset)
                    _copy(incoming, output, length)
                    whole = offset + length == file.size
                    if whole:
                        output.seek(0)
                        found = digest_of(output)[0]
                        if found != file.sha256:
                            os.unlink(target)
                            raise self._wrong(file, "the controller", found)
                    os.fsync(output.fileno())
                if whole:
                    self._finish(manifest, file, target, done)

    # Going into service

    def place(self, manifest: Manifest) -> str:
        """Give a version that is whole in ``incoming`` its place. Returns its name."""
        done = self._record(manifest.identity, incoming=True) or {}
        missing = [file.path for file in manifest.files if not self._is_done(manifest, file, done)]
        if missing:
            raise ModelError(f"all files of {self.name}", f"{missing[0]} missing", "run again; it goes on where it was")
        taken = {name for name in self.versions() if _identity(name) == manifest.identity}
        version = manifest.identity
        number = 1
        while version in taken:
            number += 1
            version = f"{manifest.identity}-{number}"
        source = self._path("incoming", manifest.identity)
        # What a manifest of the same identity does not name can only be what was torn off a name that it does.
        wanted = {file.path for file in manifest.files}
        for path, found in list(_entries(source)):
            if not stat.S_ISDIR(found.st_mode) and path not in wanted:
                os.unlink(os.path.join(source, path))
        for folder, _folders, _files in os.walk(source, topdown=False):
            self._own_directory(folder)
            durable.sync_directory(folder)
        self._write_record(version, done)
        os.rename(source, self._path("versions", version))
        for folder in ("versions", "incoming"):
            durable.sync_directory(self._path(folder))
        _unlink(self._record_path(manifest.identity, incoming=True))
        return version

    def activate(self, version: str) -> bool:
        """Put a whole version in service, in one step. Returns whether it was another one before."""
        current = self.current()
        if current == version:
            return False
        if not os.path.isdir(self._path("versions", version)):
            raise ModelError(f"version {version} of {self.name}", "that it is not there", "place it first")
        if current is not None and _identity(current) != _identity(version):
            self._set_link("previous", current)
        self._set_link("current", version)
        return True

    def mend_attributes(self, version: str) -> None:
        """Owner, group and mode of a version and all in it."""
        directory = self._path("versions", version)
        for path, found in _entries(directory):
            if stat.S_ISDIR(found.st_mode):
                self._own_directory(os.path.join(directory, path))
            elif stat.S_ISREG(found.st_mode):
                self._own_file(os.path.join(directory, path))
        self._own_directory(directory)

    def note_unchanged(self, version: str, manifest: Manifest) -> None:
        """Record the files of a version as they are, after all of them were found right."""
        directory = self._path("versions", version)
        record = {}
        for file in manifest.files:
            found = os.lstat(os.path.join(directory, file.path))
            record[file.path] = _noted(file, found)
        if record != self._record(version):
            self._write_record(version, record)

    def outdated(self, keep: int) -> list[str]:
        """What :meth:`prune` removes: versions beside the current one and `keep` others, the previous one first of
        them."""
        current, previous = self.current(), self.previous() if keep else None
        others = [version for version in self.versions() if version not in (current, previous)]
        # A damaged version that was replaced by another copy of itself is nothing to go back to.
        replaced = [version for version in others if current and _identity(version) == _identity(current)]
        others = [version for version in others if version not in replaced]
        others.sort(key=lambda version: (_changed(self._path("versions", version)), version), reverse=True)
        kept = max(keep - (1 if previous and previous != current else 0), 0)
        return sorted([*replaced, *others[kept:]])

    def prune(self, keep: int) -> list[str]:
        """Remove older versions and what was fetched and is not wanted any more; returns the versions."""
        removed = self.outdated(keep)
        for version in removed:
            # Out of the way first, so that a run killed here leaves no half version among the whole ones.
            condemned = self._path("incoming", f".removed-{version}")
            shutil.rmtree(condemned, ignore_errors=True)
            os.rename(self._path("versions", version), condemned)
            shutil.rmtree(condemned)
        if os.path.lexists(self._path("previous")) and self.previous() is None:
            _unlink(self._path("previous"))
        self._drop_other_incoming("")
        for name in _names(self._path("records")):
            if name.removesuffix(".json") not in self.versions():
                _unlink(self._path("records", name))
        return removed

    def exists(self) -> bool:
        """Whether the model has a directory."""
        return os.path.lexists(self.base)

    def remove(self) -> bool:
        """The model and all its versions are gone. Returns whether there was something."""
        if not self.exists():
            return False
        with self.locked():
            for link in ("current", "previous"):
                _unlink(self._path(link))
            shutil.rmtree(self.base)
        return True

    # Files

    def _fetch_file(self, file: ModelFile, target: str, source: Source, deadline: float | None) -> bool:
        """Whether the file is there, and right, before the deadline."""
        while True:
            with _opened(target) as output:
                begin = self._clock()
                arriving = _Arriving(output, file)
                resumed = arriving.count > 0
                if deadline is not None:
                    deadline = max(deadline, self._clock() + LEAST_GAIN * (self._clock() - begin))
                complete = self._receive(arriving, source, deadline)
                output.flush()
                os.fsync(output.fileno())
            if not complete:
                return False
            if arriving.sha256 == file.sha256:
                return True
            os.unlink(target)
            if not resumed:
                raise self._wrong(file, source.description, arriving.sha256)
            # Perhaps it was what a former run left: once more, from the beginning.

    def _receive(self, arriving: _Arriving, source: Source, deadline: float | None) -> bool:
        """Whether all bytes came before the deadline."""
        file = arriving.file
        tries = furthest = 0
        while file.size is None or arriving.count < file.size:
            furthest = max(furthest, arriving.count)
            try:
                with source.open(file, arriving.count) as stream:
                    if file.size is not None and stream.size not in (None, file.size):
                        raise _odd_size(file, source, f"{stream.size} bytes")
                    if stream.offset != arriving.count:
                        arriving.restart()  # the source can't begin in the middle
                    for chunk in stream.chunks:
                        if file.size is not None and arriving.count + len(chunk) > file.size:
                            raise _odd_size(file, source, "more")
                        arriving.write(chunk)
                        # What only comes again is no progress: a source that never gets further has an end.
                        tries = 0 if arriving.count > furthest else tries
                        if deadline is not None and self._clock() >= deadline:
                            return arriving.count == (stream.size if file.size is None else file.size)
                if file.size is not None and arriving.count < file.size:
                    raise _odd_size(file, source, f"{arriving.count} bytes")
                return True
            except SourceInterruptedError as error:
                tries += 1
                if tries >= MOST_TRIES:
                    raise ModelError(
                        f"{source.description} to send {file.path}",
                        f"{tries} tries in a row that brought no byte; the last one: {error}",
                        "see that the source can be reached from the host, and run again; it goes on where it was",
                    ) from error
                self._sleep(FIRST_WAIT * 2 ** (tries - 1))
        return True

    def _reuse(self, file: ModelFile, reusable: dict[str, str], target: str) -> bool:
        """Whether the file could be had from a version that is here, as a second name of the same bytes."""
        if file.sha256 not in reusable:
            return False
        _unlink(target)
        try:
            os.link(reusable[file.sha256], target, follow_symlinks=False)
        except OSError:  # a file system without such names
            return False
        with open(target, "rb") as linked:
            if digest_of(linked)[0] == file.sha256:
                return True
        os.unlink(target)
        return False

    def _finish(self, manifest: Manifest, file: ModelFile, target: str, done: dict[str, Any]) -> None:
        self._own_file(target)
        done[file.path] = _noted(file, os.lstat(target))
        self._write_record(manifest.identity, done, incoming=True)

    def _wrong(self, file: ModelFile, source: str, found: str) -> ModelError:
        return ModelError(
            f"{file.path} of {self.name} with SHA-256 {file.sha256}",
            f"{found} from {source}",
            "have the source mended: the file was changed or is damaged there, or the manifest is another revision's. "
            f"What came of it was removed, and {self.current() or 'nothing'} stays in service",
        )

    def _incoming_file(self, manifest: Manifest, file: ModelFile) -> str:
        folder = self._path("incoming", manifest.identity)
        for part in file.path.split("/")[:-1]:
            folder = os.path.join(folder, part)
            self._make_directory(folder)
        return os.path.join(folder, os.path.basename(file.path))

    @contextlib.contextmanager
    def _incoming_of(self, manifest: Manifest) -> Iterator[dict[str, Any]]:
        """The record of what is in ``incoming`` of a version, whose directory is made, while something is put there."""
        try:
            self._drop_other_incoming(manifest.identity)
            self._make_directory(self._path("incoming", manifest.identity))
            yield self._record(manifest.identity, incoming=True) or {}
        except OSError as error:
            stays = f"{self.current() or 'nothing'} stays in service"
            if error.errno not in _NO_ROOM:
                raise ModelError(
                    f"to write files of {self.name} below {self.base}", str(error), f"mend that and run again; {stays}"
                ) from error
            # A full disk hurts all else on the host: what was fetched goes.
            shutil.rmtree(self._path("incoming", manifest.identity), ignore_errors=True)
            _unlink(self._record_path(manifest.identity, incoming=True))
            raise ModelError(
                f"room for all files of {self.name} on the file system of {self.root}",
                f"none ({error.strerror})",
                f"free some space and run again. What was fetched of this version was removed, and {stays}",
            ) from error

    def _is_done(self, manifest: Manifest, file: ModelFile, done: dict[str, Any]) -> bool:
        entry = done.get(file.path)
        if entry is None or entry["sha256"] != file.sha256:
            return False
        found = _lstat(self._path("incoming", manifest.identity, file.path))
        return found is not None and _same(entry, found)

    def _reusable(self) -> dict[str, str]:
        """Files of whole versions that seem as they were when they were checked, by SHA-256."""
        result = {}
        for version in self.versions():
            for path, entry in (self._record(version) or {}).items():
                whole = self._path("versions", version, path)
                found = _lstat(whole)
                if found is not None and _same(entry, found):
                    result[entry["sha256"]] = whole
        return result

    def _files(self, *parts: str) -> Iterator[os.stat_result]:
        for _path, found in _entries(self._path(*parts)):
            if stat.S_ISREG(found.st_mode):
                yield found

    def _file_differences(self, directory: str, file: ModelFile, entry: Any, full: bool) -> list[Difference]:
        path = os.path.join(directory, file.path)
        found = _lstat(path)
        if found is None:
            return [Difference(file.path, "missing", "missing")]
        if not stat.S_ISREG(found.st_mode):
            return [Difference(file.path, "type", "not a regular file")]
        if file.size is not None and found.st_size != file.size:
            return [Difference(file.path, "size", f"{found.st_size} bytes instead of {file.size}")]
        result = []
        if full or entry is None or entry["sha256"] != file.sha256 or not _same(entry, found):
            with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC), "rb") as opened:
                digest = digest_of(opened)[0]
            if digest != file.sha256:
                return [Difference(file.path, "checksum", f"SHA-256 {digest} instead of {file.sha256}")]
        if self._attributes(found) != (self.uid, self.gid, FILE_MODE):
            result.append(Difference(file.path, "attributes", self._attributes_found(found)))
        return result

    def _size(self, file: ModelFile, source: Source | None) -> int | None:
        if file.size is not None:
            return file.size
        for version in self.versions():
            entry = (self._record(version) or {}).get(file.path)
            if entry and entry["sha256"] == file.sha256:
                return int(entry["size"])
        if source is None:
            return None
        with contextlib.suppress(SourceInterruptedError):
            return source.size(file)
        return None

    def _free(self) -> int:
        path = self.base
        while not os.path.isdir(path):
            path = os.path.dirname(path)
        found = os.statvfs(path)
        return found.f_bavail * found.f_frsize

    # Directories, links, records

    def _path(self, *parts: str) -> str:
        return os.path.join(self.base, *parts)

    def _target(self, link: str) -> str | None:
        try:
            target = os.readlink(self._path(link))
        except OSError:
            return None
        folder, version = os.path.split(target)
        if folder != "versions" or not _VERSION.match(version) or not os.path.isdir(self._path("versions", version)):
            return None
        return version

    def _set_link(self, link: str, version: str) -> None:
        temporary = self._path(f".ringmaster-{link}")
        _unlink(temporary)
        os.symlink(os.path.join("versions", version), temporary)
        os.lchown(temporary, self.uid, self.gid)
        os.replace(temporary, self._path(link))
        durable.sync_directory(self.base)

    def _make_directory(self, path: str) -> None:
        if not os.path.isdir(path):
            # The parents of the root are the system's, what is in it is ours.
            os.makedirs(os.path.dirname(path), mode=0o755, exist_ok=True)
            os.mkdir(path, 0o700)
            self._own_directory(path)
            durable.sync_directory(os.path.dirname(path))
        elif path != self.root and self._attributes(os.stat(path)) != (self.uid, self.gid, DIRECTORY_MODE):
            self._own_directory(path)

    def _own_directory(self, path: str) -> None:
        os.chown(path, self.uid, self.gid, follow_symlinks=False)
        os.chmod(path, DIRECTORY_MODE)

    def _own_file(self, path: str) -> None:
        os.chown(path, self.uid, self.gid, follow_symlinks=False)
        os.chmod(path, FILE_MODE)

    @staticmethod
    def _attributes(found: os.stat_result) -> tuple[int, int, int]:
        return found.st_uid, found.st_gid, stat.S_IMODE(found.st_mode)

    @staticmethod
    def _attributes_found(found: os.stat_result) -> str:
        return f"owner {found.st_uid}, group {found.st_gid}, mode {stat.S_IMODE(found.st_mode):04o}"

    def _record_path(self, version: str, incoming: bool = False) -> str:
        return self._path("incoming", f".{version}.json") if incoming else self._path("records", f"{version}.json")

    def _record(self, version: str, incoming: bool = False) -> dict[str, Any] | None:
        """Files as they were when they were checked; None if there is no record, or a damaged one: they are read."""
        try:
            with open(self._record_path(version, incoming), encoding="utf-8") as file:
                document = json.load(file)
            files = document["files"] if document["schema"] == SCHEMA else None
            if not isinstance(files, dict) or not all(_is_entry(entry) for entry in files.values()):
                return None
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            return None
        return files

    def _write_record(self, version: str, files: dict[str, Any], incoming: bool = False) -> None:
        text = json.dumps({"schema": SCHEMA, "files": files}, indent=1, sort_keys=True) + "\n"
        durable.replace(self._record_path(version, incoming), text, FILE_MODE)

    def _drop_other_incoming(self, identity: str) -> None:
        for name in _names(self._path("incoming")):
            if name not in (identity, f".{identity}.json"):
                path = self._path("incoming", name)
                shutil.rmtree(path) if os.path.isdir(path) else _unlink(path)


def format_bytes(count: int) -> str:
    """For people: ``131.4 GiB``."""
    value = float(count)
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if abs(value) < 1024:
            return f"{value:.0f} {unit}" if unit == "bytes" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"


class _Arriving:
    """A file that is being written, with the checksum of what there is of it. Begins with what a former run left."""

    def __init__(self, output: BinaryIO, file: ModelFile) -> None:
        self.file = file
        self._output = output
        if file.size is not None and os.fstat(output.fileno()).st_size > file.size:
            output.truncate(0)
        self._digest = hashlib.sha256()
        self.count = 0
        while True:
            chunk = output.read(CHUNK)
            if not chunk:
                break
            self._digest.update(chunk)
            self.count += len(chunk)
        output.seek(self.count)

    @property
    def sha256(self) -> str:
        return self._digest.hexdigest()

    def write(self, chunk: bytes) -> None:
        self._output.write(chunk)
        self._digest.update(chunk)
        self.count += len(chunk)

    def restart(self) -> None:
        self._output.seek(0)
        self._output.truncate(0)
        self._digest = hashlib.sha256()
        self.count = 0


def _odd_size(file: ModelFile, source: Source, found: str) -> ModelError:
    return ModelError(
        f"{file.path} with {file.size} bytes from {source.description}",
        found,
        "see that source and manifest belong together",
    )


def _opened(target: str) -> BinaryIO:
    found = _lstat(target)
    if found is not None and found.st_nlink > 1:
        # A second name of a file of a whole version, left by a run that was cut: what is written must not get in there.
        os.unlink(target)
    return open(os.open(target, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600), "r+b")


def _copy(source: BinaryIO, target: BinaryIO, length: int) -> None:
    while length:
        chunk = source.read(min(CHUNK, length))
        if not chunk:
            raise ModelError("a part with all bytes of its spans", "a shorter one", "run again")
        target.write(chunk)
        length -= len(chunk)
    target.flush()


def _noted(file: ModelFile, found: os.stat_result) -> dict[str, Any]:
    return {"sha256": file.sha256, "size": found.st_size, "mtime_ns": found.st_mtime_ns}


def _same(entry: dict[str, Any], found: os.stat_result) -> bool:
    return stat.S_ISREG(found.st_mode) and (entry["size"], entry["mtime_ns"]) == (found.st_size, found.st_mtime_ns)


def _is_entry(entry: Any) -> bool:
    return (
        isinstance(entry, dict)
        and isinstance(entry.get("sha256"), str)
        and isinstance(entry.get("size"), int)
        and isinstance(entry.get("mtime_ns"), int)
    )


def _identity(version: str) -> str:
    return version.partition("-")[0]


def _entries(directory: str) -> Iterator[tuple[str, os.stat_result]]:
    """Everything below a directory, by path relative to it; links are not followed."""
    for folder, folders, files in os.walk(directory):
        for name in sorted(folders + files):
            whole = os.path.join(folder, name)
            yield os.path.relpath(whole, directory), os.lstat(whole)


def _names(directory: str) -> list[str]:
    try:
        return sorted(os.listdir(directory))
    except (FileNotFoundError, NotADirectoryError):
        return []


def _lstat(path: str) -> os.stat_result | None:
    try:
        return os.lstat(path)
    except (FileNotFoundError, NotADirectoryError):
        return None


def _size_of(path: str) -> int | None:
    found = _lstat(path)
    return found.st_size if found is not None and stat.S_ISREG(found.st_mode) else None


def _changed(path: str) -> int:
    return os.lstat(path).st_ctime_ns


def _unlink(path: str) -> None:
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)
