# Copyright (c) 2026, the Ringmaster authors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What an operation found on a host before its first apply, kept on that host, and put back on demand.

One operation has one directory::

    DIRECTORY/NAME/state.json        the record: what was measured, and each path with its kind, owner, group and mode
    DIRECTORY/NAME/contents/SHA256   contents of the files, named by their checksum

``state.json`` is replaced in one step and only after every content it names is on the disk, so a run that is killed,
or a disk that fills up, leaves either the record from before or the whole new one.

A path is noted as one of four kinds:

``file``
    content, owner, group, mode, and the SELinux label, capabilities and access control list if it has them.
``directory``
    owner, group, mode and the same attributes, but not what is in it: list the files in it that matter.
``link``
    the target, owner and group. The link itself is the path; what it points to has to be listed on its own.
``absent``
    nothing was there. Restoring removes what is there now, a directory with all it holds. A directory that several
    operations share must therefore not be listed; it is looked after as a parent: parents that were missing are noted
    with the path, and restoring removes those that have become empty.

Modification times are not kept. Nothing here imports Ansible.
"""

from __future__ import annotations

import base64
import contextlib
import errno
import hashlib
import json
import os
import re
import shutil
import stat
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field, fields
from datetime import datetime, timezone
from typing import Any, BinaryIO

from ansible_collections.ringmaster.inference.plugins.module_utils.durable import sync_directory

SCHEMA = 1
DEFAULT_DIRECTORY = "/var/lib/ringmaster/operations"

# Extended attributes that belong to "exactly as it was". Others (user.*, trusted.*) are not what a package manager or
# a role sets on a configuration file.
ATTRIBUTES = (
    "security.selinux",
    "security.capability",
    "system.posix_acl_access",
    "system.posix_acl_default",
)
# The label is given by the system's policy when nothing was recorded; removing it would leave the file unlabelled.
ATTRIBUTES_NEVER_REMOVED = frozenset({"security.selinux"})

# Ansible's own default for max_file_size_for_diff (bytes): larger contents are not shown in a diff.
LARGEST_DIFF = 104_448

_NAME = re.compile(r"[a-z][a-z0-9_]{0,63}\Z")
_SHA256 = re.compile(r"[0-9a-f]{64}\Z")
_CHUNK = 1 << 20
_KINDS = ("file", "directory", "link", "absent")


class OperationStateError(Exception):
    """Something is not as it has to be; the text says what was expected, what was found and what to do."""

    def __init__(self, expected: str, found: str, remedy: str) -> None:
        super().__init__(f"Expected {expected}. Found {found}. To do: {remedy}.")


@dataclass(frozen=True)
class Entry:
    """One path as it was found. ``mode`` is the permission bits (0 to 0o7777), ``size`` is in bytes."""

    kind: str
    mode: int = 0
    uid: int = 0
    gid: int = 0
    sha256: str = ""
    size: int = 0
    target: str = ""
    attributes: dict[str, str] = field(default_factory=dict)  # name of the extended attribute -> base64 of its value
    missing_parents: list[str] = field(default_factory=list)  # directories that were not there either, deepest first

    def same_as(self, other: Entry) -> bool:
        """Whether nothing has to be done to get from one to the other."""
        if self.kind != other.kind:
            return False
        if self.kind == "absent":
            return True
        if (self.uid, self.gid, self.sha256, self.target) != (other.uid, other.gid, other.sha256, other.target):
            return False
        return self.kind == "link" or (self.mode, self.attributes) == (other.mode, other.attributes)

    def summary(self) -> dict[str, Any]:
        """The entry for people: no checksum, the mode as chmod takes it."""
        if self.kind == "absent":
            return {"kind": "absent"}
        result: dict[str, Any] = {"kind": self.kind, "owner": self.uid, "group": self.gid}
        if self.kind == "link":
            result["target"] = self.target
        else:
            result["mode"] = f"{self.mode:04o}"
        if self.kind == "file":
            result["size"] = self.size
        return result


@dataclass
class Record:
    """The document in ``state.json``. ``recorded_at`` is UTC, ISO 8601."""

    name: str
    recorded_at: str
    measured: dict[str, Any]
    files: dict[str, Entry]


@dataclass
class Outcome:
    """What a call found and did, or in check mode would do. ``paths`` are the ones added, put back or removed."""

    changed: bool
    record: Record | None
    paths: list[str] = field(default_factory=list)
    diff: list[dict[str, Any]] = field(default_factory=list)


class OperationState:
    """The state before the first apply of operation ``name``, kept under ``directory``.

    Raises:
        OperationStateError: from every method, if the name or a path cannot be used, the record is damaged, or the
            system refuses (no room, no permission). What was recorded before is then unchanged.
    """

    def __init__(self, name: str, directory: str = DEFAULT_DIRECTORY) -> None:
        if not _NAME.match(name):
            raise OperationStateError(
                "the name of an operation: a small letter, then small letters, digits and underscores (64 at most)",
                repr(name),
                "give the role's name",
            )
        if not os.path.isabs(directory):
            raise OperationStateError("an absolute path in directory", repr(directory), "give an absolute path")
        self.name = name
        self.base = os.path.normpath(directory)
        self.directory = os.path.join(self.base, name)
        self.document = os.path.join(self.directory, "state.json")
        self.contents = os.path.join(self.directory, "contents")

    def load(self) -> Record | None:
        """The record, or None if nothing was recorded.

        A directory without ``state.json`` is a first recording that did not finish. The apply had then not begun, so
        it counts as nothing recorded.
        """
        try:
            with open(self.document, encoding="utf-8") as document:
                text = document.read()
        except (FileNotFoundError, NotADirectoryError):
            return None
        except UnicodeDecodeError as error:
            raise self._damaged("text that is not UTF-8") from error
        except OSError as error:
            raise self._refused(error, self.document) from error
        try:
            return parse_record(json.loads(text), self.name)
        except (ValueError, RecursionError) as error:
            raise self._damaged(str(error) or type(error).__name__) from error

    def others(self) -> dict[str, dict[str, Any]]:
        """What each other operation with a record here measured before its first apply, by the operation's name.

        A damaged record of another operation is an error: nobody can tell what that operation relies on.
        """
        try:
            names = sorted(os.listdir(self.base))
        except (FileNotFoundError, NotADirectoryError):
            return {}
        except OSError as error:
            raise self._refused(error, self.base) from error
        records = [OperationState(name, self.base).load() for name in names if name != self.name and _NAME.match(name)]
        return {record.name: record.measured for record in records if record is not None}

    def record(self, measured: dict[str, Any], files: Iterable[str], write: bool = True) -> Outcome:
        """Keep ``measured`` and the present state of ``files``, unless they are already recorded.

        An existing record is never changed, except that paths it does not know yet are added as they are now. Such a
        path beneath one that was absent at first is noted as absent, whatever is there now: the operation made it.
        """
        paths = [self._checked(path) for path in files]
        known = self.load()
        record = known or Record(self.name, utc_now(), measured, {})
        added = sorted(set(paths) - set(record.files))
        if known and not added:
            return Outcome(False, known)
        absent = absent_at_first(record)
        entries = dict(record.files)
        try:
            if write:
                self._make_directories()
            for path in added:
                if beneath(path, absent):
                    entries[path] = Entry("absent")
                else:
                    entries[path] = self._examine(path, keep=write)
            record = Record(record.name, record.recorded_at, record.measured, entries)
            if write:
                self._write_document(record)
        except OSError as error:
            raise self._refused(error, self.directory) from error
        return Outcome(True, record, added, [record_diff(known, record)])

    def restore(self, write: bool = True, contents_in_diff: bool = False) -> Outcome:
        """Put every recorded path back, or remove it if it was absent. The record stays, so this can be run again.

        Every stored content is checked before the first path is touched. Each path changes in one step.
        """
        record = self.load()
        if record is None:
            return Outcome(False, None)
        try:
            self._check_contents(record)
            current = {path: self._examine(path, keep=False) for path in record.files}
            differing = [path for path in sorted(record.files) if not current[path].same_as(record.files[path])]
            for path in differing:
                if current[path].kind == "directory" and record.files[path].kind != "directory":
                    _refuse_mounts(path)
            removed = {path for path in differing if record.files[path].kind == "absent"}
            emptied = _emptied_parents(record, removed)
            diff = self._restore_diff(record, current, differing, contents_in_diff)
            diff += [kind_diff(path, {"kind": "directory"}, {"kind": "absent"}) for path in emptied]
            if write:
                self._put_back(record, differing, emptied)
        except OSError as error:
            raise self._refused(error, self.directory) from error
        return Outcome(bool(differing or emptied), record, differing + emptied, diff)

    def remove(self, write: bool = True) -> Outcome:
        """Forget the record, a damaged one too. The base directory goes as well once no operation is left in it."""
        if not os.path.lexists(self.directory):
            return Outcome(False, None)
        if write:
            try:
                # The document goes first: without it the rest means nothing, and a run cut here can be repeated.
                if os.path.lexists(self.document):
                    os.unlink(self.document)
                    sync_directory(self.directory)
                _remove(self.directory)
                _remove_if_empty(self.base)
            except OSError as error:
                raise self._refused(error, self.directory) from error
        return Outcome(True, None, [self.directory], [kind_diff(self.directory, {"recorded": True}, {})])

    # Recording

    def _checked(self, path: str) -> str:
        normal = os.path.normpath(path)
        if not os.path.isabs(path) or normal in ("/", "//") or "\0" in path or ".." in path.split("/"):
            raise OperationStateError(
                "absolute paths without '..' in files, and not '/'", repr(path), "give the path of what the role owns"
            )
        if normal == self.base or beneath(normal, {self.base}) or beneath(self.base, {normal}):
            raise OperationStateError(
                f"files outside {self.base}, where the records are, and none of its parents",
                repr(path),
                "take it out of the list",
            )
        return normal

    def _make_directories(self) -> None:
        # Parents are for other things too (/var/lib/ringmaster); the records are root's alone. Modes are set apart
        # from mkdir because the umask cuts those.
        _make_parents(os.path.dirname(self.base))
        for path in (self.base, self.directory, self.contents):
            if not os.path.lexists(path):
                os.mkdir(path, 0o700)
                sync_directory(os.path.dirname(path))
            elif not stat.S_ISDIR(os.lstat(path).st_mode):
                raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), path)
            if path != self.base:
                os.chmod(path, 0o700)

    def _examine(self, path: str, keep: bool) -> Entry:
        """Note a path as it is now, with ``keep`` also its content."""
        try:
            found = os.lstat(path)
        except (FileNotFoundError, NotADirectoryError):
            return Entry("absent", missing_parents=_missing_parents(path))
        mode, uid, gid = stat.S_IMODE(found.st_mode), found.st_uid, found.st_gid
        if stat.S_ISLNK(found.st_mode):
            return Entry("link", uid=uid, gid=gid, target=os.readlink(path))
        if stat.S_ISDIR(found.st_mode):
            return Entry("directory", mode, uid, gid, attributes=_read_attributes(path))
        if not stat.S_ISREG(found.st_mode):
            raise OperationStateError(
                "a regular file, a directory, a symbolic link or nothing",
                f"{path}, which is {_special(found.st_mode)}",
                "take it out of the list of files",
            )
        sha256, size = self._copy_in(path) if keep else _digest(path)
        return Entry("file", mode, uid, gid, sha256, size, attributes=_read_attributes(path))

    def _copy_in(self, path: str) -> tuple[str, int]:
        """Copy a file's content in. The checksum is of what was copied, so it is true even if the file changes."""
        digest = hashlib.sha256()
        size = 0
        temporary = os.path.join(self.contents, ".incoming")
        with open(_open_regular(path), "rb") as source, _new_file(temporary) as copy:
            for chunk in iter(lambda: source.read(_CHUNK), b""):
                digest.update(chunk)
                size += len(chunk)
                copy.write(chunk)
        os.replace(temporary, os.path.join(self.contents, digest.hexdigest()))
        return digest.hexdigest(), size

    def _write_document(self, record: Record) -> None:
        sync_directory(self.contents)
        document = {
            "schema": SCHEMA,
            "name": record.name,
            "recorded_at": record.recorded_at,
            "measured": record.measured,
            "files": {path: asdict(entry) for path, entry in record.files.items()},
        }
        temporary = os.path.join(self.directory, ".state.json.incoming")
        with _new_file(temporary) as output:
            output.write(json.dumps(document, indent=1, sort_keys=True).encode("utf-8") + b"\n")
        os.replace(temporary, self.document)
        sync_directory(self.directory)

    # Restoring

    def _check_contents(self, record: Record) -> None:
        for path, entry in sorted(record.files.items()):
            if entry.kind != "file":
                continue
            try:
                sha256, size = _digest(os.path.join(self.contents, entry.sha256))
            except FileNotFoundError as error:
                raise self._damaged(f"no stored content of {path}") from error
            if sha256 != entry.sha256:
                raise self._damaged(f"stored content of {path} that is not what was recorded ({size} bytes)")

    def _put_back(self, record: Record, differing: list[str], emptied: list[str]) -> None:
        wanted = {path: record.files[path] for path in differing}
        for path in sorted(wanted, reverse=True):  # what is inside a directory before the directory
            if wanted[path].kind == "absent":
                _remove(path)
        for path in sorted(wanted):  # a directory before what is inside it
            if wanted[path].kind == "directory":
                _restore_directory(path, wanted[path])
        for path in sorted(wanted):
            if wanted[path].kind == "file":
                _restore_file(path, wanted[path], os.path.join(self.contents, wanted[path].sha256))
            elif wanted[path].kind == "link":
                _restore_link(path, wanted[path])
        for path in emptied:
            _remove_if_empty(path)

    def _restore_diff(
        self, record: Record, current: dict[str, Entry], differing: list[str], contents: bool
    ) -> list[dict[str, Any]]:
        diff: list[dict[str, Any]] = []
        for path in differing:
            now, then = current[path], record.files[path]
            if now.summary() != then.summary():
                diff.append(kind_diff(path, now.summary(), then.summary()))
            if contents and now.sha256 != then.sha256:
                before = _shown(path, path, now, then)
                after = _shown(path, os.path.join(self.contents, then.sha256), then, now)
                diff.append({"before_header": path, "after_header": path, "before": before, "after": after})
        return diff

    # Errors

    def _damaged(self, found: str) -> OperationStateError:
        return OperationStateError(
            f"a record of operation {self.name} with schema {SCHEMA} in {self.document}",
            f"a damaged or unknown one: {found}",
            f"put {self.directory} back from a backup, or, if the state before the first apply is no longer wanted, "
            f"remove the record with state=absent. It was left as it is",
        )

    def _refused(self, error: OSError, where: str) -> OperationStateError:
        path = error.filename if isinstance(error.filename, str) else where
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            return OperationStateError(
                f"room to write {path}",
                f"none ({error.strerror})",
                "free some space and run again. What was recorded before is unchanged",
            )
        if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
            return OperationStateError(
                f"to be allowed to read and change {path}",
                f"that it is refused ({error.strerror})",
                "run as root (become), and see that the file system is writable and the file not immutable (lsattr)",
            )
        return OperationStateError(
            f"to read and change {path}",
            str(error.strerror or error),
            "mend that and run again. What was recorded before is unchanged",
        )


def utc_now() -> str:
    """The moment of a record, in UTC and to the second."""
    return datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")


def parse_record(document: Any, name: str) -> Record:
    """The record in a document. Raises ValueError saying what is wrong with it."""
    if not isinstance(document, dict):
        raise ValueError("no JSON object")
    if document.get("schema") != SCHEMA:
        raise ValueError(f"schema {document.get('schema')!r}")
    if document.get("name") != name:
        raise ValueError(f"the record of operation {document.get('name')!r}")
    recorded_at, measured, files = (document.get(key) for key in ("recorded_at", "measured", "files"))
    if not isinstance(recorded_at, str) or not isinstance(measured, dict) or not isinstance(files, dict):
        raise ValueError("no recorded_at, measured or files")
    return Record(name, recorded_at, measured, {path: _parse_entry(path, entry) for path, entry in files.items()})


def _parse_entry(path: str, document: Any) -> Entry:
    if not path.startswith("/") or not isinstance(document, dict):
        raise ValueError(f"no entry for {path!r}")
    if set(document) != {each.name for each in fields(Entry)}:
        raise ValueError(f"an entry for {path} with unknown or missing keys")
    kind, attributes, parents = document["kind"], document["attributes"], document["missing_parents"]
    if (
        kind not in _KINDS
        or any(not _is_count(document[key]) for key in ("mode", "uid", "gid", "size"))
        or document["mode"] > 0o7777
        or not isinstance(document["sha256"], str)
        or (kind == "file" and not _SHA256.match(document["sha256"]))
        or not isinstance(document["target"], str)
        or (kind == "link" and not document["target"])
        or not isinstance(attributes, dict)
        or any(name not in ATTRIBUTES for name in attributes)
        or not isinstance(parents, list)
        or any(not isinstance(parent, str) or not path.startswith(parent + "/") for parent in parents)
    ):
        raise ValueError(f"an entry for {path} that makes no sense")
    try:
        for value in attributes.values():
            base64.b64decode(value, validate=True)
    except (TypeError, ValueError) as error:
        raise ValueError(f"an entry for {path} with a broken extended attribute") from error
    return Entry(**document)


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def beneath(path: str, directories: set[str]) -> bool:
    """Whether one of the directories is above a path."""
    parent = os.path.dirname(path)
    while parent not in directories:
        if parent == os.path.dirname(parent):
            return False
        parent = os.path.dirname(parent)
    return True


def absent_at_first(record: Record) -> set[str]:
    """Paths, and directories above them, that were not there when they were recorded."""
    absent = {path for path, entry in record.files.items() if entry.kind == "absent"}
    for entry in record.files.values():
        absent.update(entry.missing_parents)
    return absent


def _missing_parents(path: str) -> list[str]:
    missing = []
    parent = os.path.dirname(path)
    while not os.path.lexists(parent):
        missing.append(parent)
        parent = os.path.dirname(parent)
    return missing


def _emptied_parents(record: Record, removed: set[str]) -> list[str]:
    """Directories that were missing before and hold nothing once ``removed`` is gone, deepest first."""
    parents = {parent for entry in record.files.values() for parent in entry.missing_parents}
    gone = set(removed)
    emptied = []
    for parent in sorted(parents, key=lambda path: (-path.count("/"), path)):
        if parent in gone or not os.path.isdir(parent) or os.path.islink(parent) or os.path.ismount(parent):
            continue
        if all(os.path.join(parent, name) in gone for name in os.listdir(parent)):
            gone.add(parent)
            emptied.append(parent)
    return emptied


def _special(mode: int) -> str:
    for test, what in (
        (stat.S_ISSOCK, "a socket"),
        (stat.S_ISFIFO, "a named pipe"),
        (stat.S_ISBLK, "a block device"),
        (stat.S_ISCHR, "a character device"),
    ):
        if test(mode):
            return what
    return "of an unknown kind"


def _open_regular(path: str) -> int:
    # O_NONBLOCK: a pipe put in the file's place in between must not hold the run.
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "no longer a regular file", path)
    return descriptor


@contextlib.contextmanager
def _new_file(path: str) -> Iterator[BinaryIO]:
    """A new file that only its owner can read, on the disk at the end and gone after an error (a full disk needs room).

    One that a killed run left under the same name is replaced.
    """
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        with open(descriptor, "wb") as output:
            yield output
            output.flush()
            os.fsync(output.fileno())
    except OSError:
        os.unlink(path)
        raise


def _digest(path: str) -> tuple[str, int]:
    digest = hashlib.sha256()
    size = 0
    with open(_open_regular(path), "rb") as source:
        for chunk in iter(lambda: source.read(_CHUNK), b""):
            digest.update(chunk)
            size += len(chunk)
    return digest.hexdigest(), size


def _read_attributes(path: str) -> dict[str, str]:
    values = {name: _read_attribute(path, name) for name in ATTRIBUTES}
    return {name: value for name, value in values.items() if value is not None}


def _read_attribute(path: str, name: str) -> str | None:
    try:
        return base64.b64encode(os.getxattr(path, name, follow_symlinks=False)).decode("ascii")
    except OSError as error:
        if error.errno in (errno.ENODATA, errno.ENOTSUP):
            return None
        raise


def _write_metadata(descriptor: int, entry: Entry) -> None:
    """Owner, attributes and mode, in the order in which none undoes another (chown drops capabilities and setuid)."""
    found = os.fstat(descriptor)
    if (found.st_uid, found.st_gid) != (entry.uid, entry.gid):
        os.fchown(descriptor, entry.uid, entry.gid)
    for name in ATTRIBUTES:
        if name in entry.attributes:
            os.setxattr(descriptor, name, base64.b64decode(entry.attributes[name]))
        elif name not in ATTRIBUTES_NEVER_REMOVED:
            try:
                os.removexattr(descriptor, name)
            except OSError as error:
                if error.errno not in (errno.ENODATA, errno.ENOTSUP):
                    raise
    os.fchmod(descriptor, entry.mode)


def _make_parents(path: str) -> None:
    if os.path.isdir(path):
        return
    _make_parents(os.path.dirname(path))
    os.mkdir(path, 0o755)
    os.chmod(path, 0o755)
    sync_directory(os.path.dirname(path))


def _temporary(path: str) -> str:
    # The same name at every run, so that what a killed run left is found and replaced, and short, whatever the path.
    return os.path.join(os.path.dirname(path), ".ringmaster-" + hashlib.sha256(path.encode("utf-8")).hexdigest()[:16])


def _swap_in(temporary: str, path: str) -> None:
    if os.path.isdir(path) and not os.path.islink(path):
        _remove(path)
    os.replace(temporary, path)
    sync_directory(os.path.dirname(path))


def _restore_file(path: str, entry: Entry, content: str) -> None:
    _make_parents(os.path.dirname(path))
    temporary = _temporary(path)
    with open(_open_regular(content), "rb") as source, _new_file(temporary) as copy:
        shutil.copyfileobj(source, copy, _CHUNK)
        copy.flush()
        _write_metadata(copy.fileno(), entry)
    _swap_in(temporary, path)


def _restore_link(path: str, entry: Entry) -> None:
    _make_parents(os.path.dirname(path))
    temporary = _temporary(path)
    if os.path.lexists(temporary):
        os.unlink(temporary)
    os.symlink(entry.target, temporary)
    os.lchown(temporary, entry.uid, entry.gid)
    _swap_in(temporary, path)


def _restore_directory(path: str, entry: Entry) -> None:
    _make_parents(os.path.dirname(path))
    if os.path.lexists(path) and (os.path.islink(path) or not os.path.isdir(path)):
        os.unlink(path)
    if not os.path.lexists(path):
        os.mkdir(path, 0o700)
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        _write_metadata(descriptor, entry)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    sync_directory(os.path.dirname(path))


def _refuse_mounts(path: str) -> None:
    """Removing a tree must not reach into another file system that someone mounted inside it."""
    device = os.lstat(path).st_dev
    for directory, names, _files in os.walk(path):
        for name in [".", *names]:
            inside = os.path.normpath(os.path.join(directory, name))
            if os.path.ismount(inside) or os.lstat(inside).st_dev != device:
                raise OperationStateError(
                    f"no file system mounted in {path}, which was not there before and is to be removed",
                    f"one at {inside}",
                    "unmount it and run again",
                )


def _remove(path: str) -> None:
    if os.path.isdir(path) and not os.path.islink(path):
        shutil.rmtree(path)
    elif os.path.lexists(path):
        os.unlink(path)
    else:
        return
    sync_directory(os.path.dirname(path))


def _remove_if_empty(path: str) -> None:
    try:
        os.rmdir(path)
    except OSError as error:
        # Something came in meanwhile, or an operation above removed it already: both are as they should be.
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOENT):
            raise
    else:
        sync_directory(os.path.dirname(path))


# Diffs


def kind_diff(path: str, before: dict[str, Any], after: dict[str, Any]) -> dict[str, Any]:
    """A difference in what a path is, as Ansible shows it."""
    return {"before_header": path, "after_header": path, "before": before, "after": after}


def record_diff(known: Record | None, record: Record) -> dict[str, Any]:
    """What a record gains over the one that was there, as Ansible shows it."""

    def shown(each: Record | None) -> dict[str, Any]:
        if each is None:
            return {}
        return {
            "measured": each.measured,
            "files": {path: each.files[path].summary() for path in sorted(each.files)},
        }

    header = f"state of operation {record.name} before its first apply"
    return kind_diff(header, shown(known), shown(record))


def _world_readable(path: str, entry: Entry) -> bool:
    """Whether anyone on the host may read it: the file itself and every directory on the way that is there."""
    if not entry.mode & stat.S_IROTH:
        return False
    parent = os.path.dirname(path)
    while True:
        try:
            if not os.stat(parent).st_mode & stat.S_IXOTH:
                return False
        except FileNotFoundError:
            pass
        if parent == os.path.dirname(parent):
            return True
        parent = os.path.dirname(parent)


def _shown(path: str, content: str, entry: Entry, other: Entry) -> str:
    """The content for a diff, or why it is not shown. What one side keeps from others, neither side shows."""
    if entry.kind != "file":
        return ""
    if any(each.kind == "file" and not _world_readable(path, each) for each in (entry, other)):
        return f"(content not shown: not readable by all; sha256 {entry.sha256[:12]})\n"
    if entry.size > LARGEST_DIFF:
        return f"(content not shown: {entry.size} bytes; sha256 {entry.sha256[:12]})\n"
    with open(_open_regular(content), "rb") as source:
        data = source.read()
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        return f"(content not shown: not text; sha256 {entry.sha256[:12]})\n"
