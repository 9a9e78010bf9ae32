# Copyright (c) 2026, the Ringmaster authors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What a model consists of: its files with their checksums, as somebody trusted has written them down.

Two forms are read::

    {"schema": 1, "files": {"model-00001-of-00002.safetensors": {"sha256": "…", "size": 4976698672}, …}}

and the lines of ``sha256sum`` (with ``*`` for binary mode, with escaped names, or with ``--tag``), which have no sizes.
A manifest decides where files are written and which bytes an engine loads, so nothing in it is taken on trust but the
checksums: names that lead out of the folder, that hide something from a reader, or that clash are refused.

Nothing here imports Ansible.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import stat
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, BinaryIO, NoReturn

SCHEMA = 1
# A model has some hundreds of files, and a manifest a hundred bytes for each; these keep a mistaken file from memory.
LARGEST_MANIFEST = 16 << 20  # bytes
MOST_FILES = 100_000
LONGEST_NAME = 255  # bytes of one part of a path, the limit of Linux' file systems (NAME_MAX)
LONGEST_PATH = 1024  # bytes of a path in a model, far below PATH_MAX with any folder before it
LARGEST_FILE = 1 << 50  # bytes; a number beyond it is a mistake
CHUNK = 4 << 20  # bytes read at a time

# Formats that are Python pickles, or archives with one inside: whoever loads them runs what their author wrote.
# https://docs.python.org/3/library/pickle.html, https://pytorch.org/docs/stable/generated/torch.load.html
PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle", ".joblib", ".dill")

_SHA256 = re.compile(r"[0-9a-fA-F]{64}\Z")
_SUM_LINE = re.compile(r"(\\?)([0-9a-fA-F]{64})[ ][ *](.+)\Z", re.DOTALL)
_TAG_LINE = re.compile(r"(\\?)SHA256 \((.+)\) = ([0-9a-fA-F]{64})\Z", re.DOTALL)
_ESCAPE = re.compile(r"\\(.?)", re.DOTALL)
_ESCAPED = {"\\": "\\", "n": "\n", "r": "\r"}


class ModelError(Exception):
    """Something is not as it has to be; the text says what was expected, what was found and what to do."""

    def __init__(self, expected: str, found: str, remedy: str) -> None:
        super().__init__(f"Expected {expected}. Found {found}. To do: {remedy}.")


@dataclass(frozen=True, order=True)
class ModelFile:
    """One file of a model. ``path`` is relative, ``sha256`` in small letters, ``size`` in bytes or None if not told."""

    path: str
    sha256: str
    size: int | None


@dataclass(frozen=True)
class Manifest:
    """The files of a model, by path in order."""

    files: tuple[ModelFile, ...]

    @property
    def identity(self) -> str:
        """16 hexadecimal digits that stand for names and contents of all files, however the manifest was written."""
        lines = "".join(f"{file.sha256}  {file.path}\0" for file in self.files)
        return hashlib.sha256(lines.encode("utf-8")).hexdigest()[:16]

    @property
    def size(self) -> int | None:
        """Bytes of all files, None if one of them is not known."""
        sizes = [file.size for file in self.files if file.size is not None]
        return sum(sizes) if len(sizes) == len(self.files) else None

    def document(self) -> dict[str, Any]:
        """The JSON form."""
        return {
            "schema": SCHEMA,
            "files": {
                file.path: {"sha256": file.sha256} | ({} if file.size is None else {"size": file.size})
                for file in self.files
            },
        }

    def text(self) -> str:
        """The JSON form as it is written into a file."""
        return json.dumps(self.document(), indent=1, ensure_ascii=False) + "\n"


def parse(text: str, pickles_allowed: bool = False) -> Manifest:
    """The manifest in one of the two forms.

    Raises ModelError for everything that is neither, for a manifest of no files, and for what :func:`checked` refuses.
    """
    if len(text) > LARGEST_MANIFEST:
        _refuse(f"{len(text)} characters", f"give one of {LARGEST_MANIFEST} at most")
    text = text.removeprefix("\N{ZERO WIDTH NO-BREAK SPACE}")
    files = _parse_document(text) if text.lstrip()[:1] == "{" else _parse_sums(text)
    return checked(files, pickles_allowed)


def checked(files: Iterable[ModelFile], pickles_allowed: bool = False) -> Manifest:
    """The manifest of these files.

    Raises ModelError for paths that are absolute, lead out, are not in their plain form or have characters that
    can't be seen; for two files of one name or a file that is a folder of another one; for pickles unless allowed.
    """
    found: dict[str, ModelFile] = {}
    for file in files:
        complaint = path_complaint(file.path)
        if complaint:
            _refuse(
                f"{file.path!r}: {complaint}", "rename the file, or take it out of the manifest if it is not needed"
            )
        if file.path in found:
            _refuse(f"{file.path!r} twice", "leave the one line that is right")
        found[file.path] = file
        if len(found) > MOST_FILES:
            _refuse(f"more than {MOST_FILES} files", "give the manifest of one model")
    if not found:
        _refuse("no file at all", "make it with module model_manifest, or with sha256sum in the model's folder")
    for path in found:
        for folder in folders_of(path):
            if folder in found:
                _refuse(f"{folder!r} as a file and as the folder of {path!r}", "leave the one that is right")
    if not pickles_allowed:
        refuse_pickles(found)
    return Manifest(tuple(sorted(found.values())))


def refuse_pickles(paths: Iterable[str]) -> None:
    """Raises ModelError naming the files among `paths` that are pickles by their suffix."""
    pickles = sorted(path for path in paths if path.lower().endswith(PICKLE_SUFFIXES))
    if pickles:
        shown = ", ".join(pickles[:5]) + (f" and {len(pickles) - 5} more" if len(pickles) > 5 else "")
        raise ModelError(
            "weights in a format that is only data, such as safetensors",
            f"{shown}: a pickle is a program; whoever loads it runs what its author wrote, with the engine's rights",
            "use the model's safetensors (or convert it on a machine without secrets), take files that are not needed, "
            "such as training_args.bin, out of the manifest, or allow pickles of an author whom you trust",
        )


def path_complaint(path: str) -> str:
    """What is wrong with a file's path in a model; empty if nothing is."""
    if not path or path.startswith("/"):
        return "not a relative path"
    if not path.isprintable():
        return "a character that cannot be seen or printed"
    if "\\" in path:
        return "a backslash"
    parts = path.split("/")
    if any(part in ("", ".", "..") for part in parts):
        return "an empty part, '.' or '..'"
    if any(part != part.strip() for part in parts):
        return "a space at the beginning or the end of a name"
    if any(len(part.encode("utf-8")) > LONGEST_NAME for part in parts) or len(path.encode("utf-8")) > LONGEST_PATH:
        return f"longer than {LONGEST_PATH} bytes, or a part longer than {LONGEST_NAME}"
    return ""


def of_directory(directory: str, follow_links: bool = False, pickles_allowed: bool = False) -> Manifest:
    """The manifest of all files in a directory that is trusted. Reads every byte.

    Names that start with a dot (.git, .cache, .gitattributes) are passed over, since no engine loads one. Raises
    ModelError for a link (unless they are followed), anything else that is no file or directory, names that
    :func:`checked` refuses, or what can't be read.
    """
    paths = list(_walk(directory, "", follow_links))
    # Before hours of reading.
    checked([ModelFile(path, "", None) for path in paths], pickles_allowed)
    files = []
    for path in paths:
        with open_file(directory, path, follow_links) as file:
            digest, size = digest_of(file)
        files.append(ModelFile(path, digest, size))
    return checked(files, pickles_allowed)


def digest_of(file: BinaryIO) -> tuple[str, int]:
    """SHA-256 in hexadecimal digits, and bytes, from where the file stands to its end."""
    digest = hashlib.sha256()
    size = 0
    while True:
        chunk = file.read(CHUNK)
        if not chunk:
            return digest.hexdigest(), size
        digest.update(chunk)
        size += len(chunk)


def open_file(directory: str, path: str, follow_links: bool = False) -> BinaryIO:
    """A regular file below a directory, opened for reading; no link on the way unless they are followed.

    Raises ModelError if it is missing, a link, a device or a pipe, or can't be read.
    """
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK  # opening a pipe must not wait for its other end
    whole = os.path.join(directory, path)
    try:
        descriptor = os.open(whole, flags) if follow_links else _open_without_links(directory, path, flags)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENOTDIR):
            _refuse_link(whole)
        raise ModelError(
            f"to read {whole}", error.strerror or str(error), "see that source and manifest belong together"
        ) from error
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise ModelError(f"{whole} to be a regular file", "something else", "put the file itself there")
    return open(descriptor, "rb")


def _open_without_links(directory: str, path: str, flags: int) -> int:
    # The directory itself may be reached over links: it was named by the operator.
    folder = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        *folders, name = path.split("/")
        for part in folders:
            inner = os.open(part, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder)
            os.close(folder)
            folder = inner
        return os.open(name, flags | os.O_NOFOLLOW, dir_fd=folder)
    finally:
        os.close(folder)


def _walk(directory: str, below: str, follow_links: bool) -> Iterator[str]:
    try:
        with os.scandir(os.path.join(directory, below)) as entries:
            found = sorted(entries, key=lambda entry: entry.name)
    except OSError as error:
        raise ModelError(
            f"to read the directory {os.path.join(directory, below)}",
            error.strerror or str(error),
            "give the directory that holds the model's files",
        ) from error
    for entry in found:
        if entry.name.startswith("."):
            continue
        path = f"{below}/{entry.name}" if below else entry.name
        if entry.is_symlink() and not follow_links:
            _refuse_link(os.path.join(directory, path))
        if entry.is_dir(follow_symlinks=False):
            yield from _walk(directory, path, follow_links)
        elif entry.is_file():
            yield path
        else:
            raise ModelError(
                "nothing but files and directories in a model",
                f"{os.path.join(directory, path)!r}, which is neither",
                "remove it from the model's directory",
            )


def _parse_document(text: str) -> Iterator[ModelFile]:
    try:
        document = json.loads(text, object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        _refuse(f"text that is no JSON: {error}", "make it again")
    if document.get("schema") != SCHEMA or not isinstance(document.get("files"), dict):
        _refuse(f"keys {', '.join(sorted(document)) or 'none'}", f"give schema {SCHEMA} and the object files")
    for path, entry in document["files"].items():
        if not isinstance(entry, dict):
            _refuse(f"{entry!r} for {path!r}", "give an object with sha256 and size")
        sha256, size = entry.get("sha256"), entry.get("size")
        if not isinstance(sha256, str) or not _SHA256.match(sha256):
            _refuse(f"sha256 {sha256!r} for {path!r}", "give 64 hexadecimal digits")
        if size is not None and (isinstance(size, bool) or not isinstance(size, int) or not 0 <= size <= LARGEST_FILE):
            _refuse(f"size {size!r} for {path!r}", f"give a whole number of bytes, 0 to {LARGEST_FILE}")
        yield ModelFile(path, sha256.lower(), size)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    # Of two equal keys json keeps the last one without a word: then a manifest says another thing than a reader sees.
    result = dict(pairs)
    if len(result) != len(pairs):
        raise ValueError("an object with one key twice")
    return result


def _parse_sums(text: str) -> Iterator[ModelFile]:
    for number, line in enumerate(text.split("\n"), start=1):
        line = line.removesuffix("\r")
        if not line.strip() or line.startswith("#"):
            continue
        tagged = _TAG_LINE.match(line)
        plain = _SUM_LINE.match(line)
        if tagged:
            escaped, path, sha256 = tagged.groups()
        elif plain:
            escaped, sha256, path = plain.groups()
        else:
            _refuse(f"line {number}: {line[:80]!r}", "give lines of sha256sum, or the JSON form")
        if escaped:
            path = _ESCAPE.sub(lambda match: _ESCAPED.get(match.group(1), "\\"), path)
        yield ModelFile(path.removeprefix("./"), sha256.lower(), None)


def folders_of(path: str) -> Iterator[str]:
    """The folders that a file lies in, the outermost first: ``a`` and ``a/b`` of ``a/b/c``."""
    parts = path.split("/")
    for count in range(1, len(parts)):
        yield "/".join(parts[:count])


def _refuse(found: str, remedy: str) -> NoReturn:
    raise ModelError("a manifest of a model: relative paths, each with its SHA-256", found, remedy)


def _refuse_link(path: str) -> NoReturn:
    raise ModelError(
        "files in the model's source, and no links: a link can name any file of the machine",
        f"the link {path!r}, or one on the way to it",
        "copy the model with its links resolved (cp --recursive --dereference), or say that links are followed",
    )
