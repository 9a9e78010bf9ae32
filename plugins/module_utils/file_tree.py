# Copyright (c) 2026, the Ringmaster authors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Small kernel files (``/sys``, ``/proc``), read below a root that the caller chooses.

Hardware readers take a :class:`FileTree` instead of opening ``/sys`` themselves, so that the node agent, the modules
and the tests share one reader. A file of the kernel may be missing, may refuse to be read (an empty GID slot answers
EINVAL, a device that fell off its bus EIO), may hold ``N/A`` or bytes that are no text: none of these is an error of
the reader, and each has its own answer here. Nothing here imports Ansible.
"""

from __future__ import annotations

import errno
import os
import re
import stat
from collections.abc import Iterable

# A kernel attribute is one page; the longest file read here (/proc/cmdline, ethtool-like lists) is far below this. A
# longer one is refused: its beginning alone could be taken for the whole.
LARGEST_FILE = 1 << 20
_PIECE = 1 << 16  # bytes of one reading: a whole attribute of any kernel, whose pages have 64 KiB at most
LARGEST_CPU = 1 << 16  # above the kernel's own limit on every architecture (NR_CPUS, 8192 on x86-64)
BOOT_ID = "/proc/sys/kernel/random/boot_id"
_INTEGER = re.compile(r"[+-]?[0-9]{1,40}\Z")
_HEXADECIMAL = re.compile(r"0[xX][0-9a-fA-F]{1,32}\Z")


class FileTree:
    """Files below `root`. Paths are absolute as the kernel documents them: ``tree.text("/sys/class/net/eth0/mtu")``.

    Symbolic links are followed as the kernel would below that root: an absolute target starts at `root` again, and
    no ``..`` leads out of it.
    """

    def __init__(self, root: str = "/") -> None:
        self.root = os.path.abspath(root)

    def text(self, path: str) -> str | None:
        """Content without white space at both ends (``""`` for an empty file); None if it is missing or unreadable.

        Bytes that are not UTF-8 and NUL bytes become U+FFFD, so that what was no number does not become one; NUL bytes
        at the end are dropped, since the kernel ends some strings with one. :meth:`complaint` says why it was None.
        """
        content = self.raw(path)
        return None if content is None else content.strip()

    def raw(self, path: str) -> str | None:
        """Content as it is (line ends kept), else as :meth:`text`."""
        content = self.data(path)
        if content is None:
            return None
        return content.rstrip(b"\0").decode("utf-8", "replace").replace("\0", "\N{REPLACEMENT CHARACTER}")

    def data(self, path: str) -> bytes | None:
        """Content as bytes (PCI configuration space, EFI variables); None if it is missing or unreadable."""
        try:
            return self._read(path)
        except (OSError, ValueError):
            return None

    def complaint(self, path: str) -> str:
        """Why `path` can't be read, for people: ``no such file``, ``Invalid argument``; empty if it can be read."""
        try:
            self._read(path)
        except OSError as error:
            if error.errno in (errno.ENOENT, errno.ENOTDIR):
                return "no such file"
            return os.strerror(error.errno) if error.errno else str(error)
        except ValueError as error:
            return str(error)
        return ""

    def boot_id(self) -> str | None:
        """What tells this boot of the kernel from any other; None where it can't be read."""
        return self.text(BOOT_ID) or None

    def integer(self, path: str) -> int | None:
        """A decimal or ``0x`` number; None if the file is missing or holds anything else."""
        return parse_integer(self.text(path))

    def names(self, path: str) -> list[str]:
        """Names in a folder, numbers in them in order (``mlx5_2`` before ``mlx5_10``); empty if there is no folder.

        Names that are not UTF-8 are left out; the kernel gives none to what is read here.
        """
        try:
            found = os.listdir(self.locate(path))
        except (OSError, ValueError):
            return []
        return sorted((name for name in found if _is_text(name)), key=lambda name: (natural_order(name), name))

    def exists(self, path: str) -> bool:
        """Whether something is there, links followed."""
        try:
            return os.path.lexists(self.locate(path))
        except (OSError, ValueError):
            return False

    def resolve(self, path: str) -> str | None:
        """The path below the root that `path` leads to once all links are followed; None if nothing is there."""
        try:
            located = self.locate(path)
        except (OSError, ValueError):
            return None
        if not os.path.lexists(located):
            return None
        relative = os.path.relpath(located, self.root)
        return "/" if relative == "." else f"/{relative}"

    def writable(self, path: str) -> bool:
        """Whether this user may write the file: rights, and not a file system that is mounted to be read only."""
        try:
            return os.access(self.locate(path), os.W_OK)
        except (OSError, ValueError):
            return False

    def write(self, path: str, content: str | bytes, offset: int | None = None) -> None:
        """Write into a file that is there, all of it or from a byte on; raises OSError where the kernel refuses."""
        flags = os.O_WRONLY | os.O_CLOEXEC | (os.O_TRUNC if offset is None else 0)
        descriptor = os.open(self.locate(path), flags)
        try:
            os.pwrite(descriptor, content.encode("utf-8") if isinstance(content, str) else content, offset or 0)
        finally:
            os.close(descriptor)

    def locate(self, path: str) -> str:
        """Where `path` really lies on this machine, all links followed below the root.

        Raises OSError (ELOOP) for links in a circle. Nothing need be there.
        """
        pending = [part for part in reversed(path.split("/")) if part]
        done: list[str] = []
        links = 0
        while pending:
            part = pending.pop()
            if part == ".":
                continue
            if part == "..":
                done = done[:-1]
                continue
            here = os.path.join(self.root, *done, part)
            if not os.path.islink(here):
                done.append(part)
                continue
            links += 1
            if links > 40:  # the kernel's own limit
                raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), path)
            target = os.readlink(here)
            if target.startswith("/"):
                done = []
            pending += [piece for piece in reversed(target.split("/")) if piece]
        return os.path.join(self.root, *done)

    def _located(self, path: str) -> str:
        if "\0" in path:
            raise ValueError("a NUL byte in the path")
        # Under the machine's own root the kernel follows the links itself.
        return os.path.join("/", path) if self.root == "/" else self.locate(path)

    def _read(self, path: str) -> bytes:
        descriptor = _open(self._located(path))
        try:
            # Not through a file object, which takes most of the time: some readers come back every second.
            content = piece = os.read(descriptor, _PIECE)
            while piece and len(content) <= LARGEST_FILE:
                piece = os.read(descriptor, _PIECE)
                content += piece
        finally:
            os.close(descriptor)
        if len(content) > LARGEST_FILE:
            raise ValueError(f"longer than {LARGEST_FILE} bytes")
        return content


class KeptFileTree(FileTree):
    """A tree whose files stay open from one reading to the next, for those that read the same few of them for ever.

    Reading an attribute of sysfs anew is then one system call instead of five. It is only for attributes as sysfs has
    them, at most one page each; a device that was taken away, or a file that another one has replaced, is noticed, and
    what is in its place is opened. Each path that was read holds a descriptor until :meth:`close`.
    """

    def __init__(self, root: str = "/") -> None:
        super().__init__(root)
        self._descriptors: dict[str, int] = {}

    def close(self) -> None:
        """Give all descriptors back."""
        while self._descriptors:
            os.close(self._descriptors.popitem()[1])

    def _read(self, path: str) -> bytes:
        descriptor = self._descriptors.get(path)
        if descriptor is not None:
            try:
                content = os.pread(descriptor, _PIECE, 0)
                # A file that was replaced lives on without a name; the kernel's own attributes answer ENODEV then.
                if len(content) < _PIECE and os.fstat(descriptor).st_nlink:
                    return content
            except OSError:
                pass
            os.close(self._descriptors.pop(path))
        descriptor = _open(self._located(path))
        try:
            content = os.pread(descriptor, _PIECE, 0)
        except OSError:
            os.close(descriptor)
            raise
        if len(content) >= _PIECE:
            os.close(descriptor)
            raise ValueError(f"longer than {_PIECE} bytes")
        self._descriptors[path] = descriptor
        return content


def _open(located: str) -> int:
    """Open a file to read. Raises OSError, and ValueError for what is no file."""
    # A pipe would keep the reader waiting for its other end, a device may do anything when it is opened.
    if not stat.S_ISREG(os.stat(located).st_mode):
        raise ValueError("not a regular file")
    return os.open(located, os.O_RDONLY | os.O_CLOEXEC)


def parse_integer(text: str | None) -> int | None:
    """A decimal or ``0x`` number with nothing around it but white space; None for anything else."""
    if text is None:
        return None
    stripped = text.strip()
    if _INTEGER.match(stripped):
        return int(stripped)
    if _HEXADECIMAL.match(stripped):
        return int(stripped, 16)
    return None


def parse_choice(text: str | None) -> tuple[str | None, list[str]]:
    """The chosen word and all words of a list as the kernel shows it: ``[none] mq-deadline`` → none, both.

    A single word without brackets is chosen (``none`` of a disk that knows no other scheduler). The chosen word is None
    where no word or several stand in brackets.
    """
    words = (text or "").split()
    chosen = [word[1:-1] for word in words if len(word) > 2 and word[0] == "[" and word[-1] == "]"]
    choices = [word.strip("[]") for word in words]
    if not chosen and len(words) == 1:
        chosen = choices
    return (chosen[0] if len(chosen) == 1 and chosen[0] else None), [choice for choice in choices if choice]


def parse_cpus(text: str | None) -> list[int] | None:
    """The CPUs of a list as the kernel writes it (``0-3,8``), in order; empty for an empty list; None if it is none."""
    if text is None:
        return None
    numbers: set[int] = set()
    for part in text.strip().split(",") if text.strip() else []:
        ends = part.strip().split("-")
        if len(ends) > 2 or not all(re.match(r"[0-9]{1,6}\Z", end) for end in ends):
            return None
        first, last = int(ends[0]), int(ends[-1])
        if first > last or last >= LARGEST_CPU:
            return None
        numbers.update(range(first, last + 1))
    return sorted(numbers)


def format_cpus(numbers: Iterable[int]) -> str:
    """CPU numbers as the kernel writes a list of them: ``0-3,8``."""
    ranges: list[list[int]] = []
    for number in sorted(set(numbers)):
        if ranges and number == ranges[-1][1] + 1:
            ranges[-1][1] = number
        else:
            ranges.append([number, number])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in ranges)


def natural_order(name: str) -> list[tuple[int, int, str]]:
    """Sort key that puts the numbers in names in order: ``cpu2`` before ``cpu10``."""
    key = []
    for part in re.split(r"([0-9]+)", name):
        digits = part.lstrip("0")
        # Of two numbers the longer one is the greater; so the length of a number does not matter.
        key.append((1, len(digits), digits) if re.match(r"[0-9]+\Z", part) else (0, 0, part))
    return key


def _is_text(name: str) -> bool:
    try:
        name.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True
