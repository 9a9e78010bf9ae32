# Copyright (c) 2026, the Ringmaster authors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Small kernel files (``/sys``, ``/proc``, ``/dev``), read below a root that the caller chooses.

Hardware readers take a :class:`FileTree` instead of opening ``/sys`` themselves, so that the node agent, the modules
and the tests share one reader. A file of the kernel may be missing, may refuse to be read (an empty GID slot answers
EINVAL, a device that fell off its bus EIO), may hold ``N/A`` or bytes that are no text: none of these is an error of
the reader, and each has its own answer here. Nothing here imports Ansible.
"""

from __future__ import annotations

import errno
import os
import posixpath
import re

# A kernel attribute is one page; the longest file read here (/proc/cmdline, ethtool-like lists) is far below this.
LARGEST_FILE = 1 << 20
_INTEGER = re.compile(r"[+-]?[0-9]{1,40}\Z")


class FileTree:
    """Files below `root`. Paths are absolute as the kernel documents them: ``tree.text("/sys/class/net/eth0/mtu")``.

    Symbolic links are followed as the kernel would below that root: an absolute target starts at `root` again, and
    no ``..`` leads out of it.
    """

    def __init__(self, root: str = "/") -> None:
        self.root = os.path.abspath(root)

    def text(self, path: str) -> str | None:
        """Content without white space at both ends; None if the file is missing, empty of meaning or unreadable.

        Bytes that are not UTF-8 become U+FFFD, NUL bytes are removed. :meth:`complaint` says why it was None.
        """
        content = self.raw(path)
        return None if content is None else content.strip()

    def raw(self, path: str) -> str | None:
        """Content as it is (line ends kept), else as :meth:`text`."""
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

    def integer(self, path: str) -> int | None:
        """A decimal or ``0x`` number; None if the file is missing or holds anything else."""
        return parse_integer(self.text(path))

    def names(self, path: str) -> list[str]:
        """Names in a folder, numbers in them in order (``mlx5_2`` before ``mlx5_10``); empty if there is no folder."""
        try:
            return sorted(os.listdir(self.locate(path)), key=natural_order)
        except (OSError, ValueError):
            return []

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

    def locate(self, path: str) -> str:
        """Where `path` really lies on this machine, all links followed below the root.

        Raises OSError (ELOOP) for links in a circle and ValueError for a path with a NUL byte.
        """
        if self.root == "/":
            return os.path.realpath(path)
        pending = [part for part in path.split("/") if part]
        done: list[str] = []
        links = 0
        while pending:
            part = pending.pop(0)
            if part == ".":
                continue
            if part == "..":
                done = done[:-1]
                continue
            here = posixpath.join(self.root, *done, part)
            if not os.path.islink(here):
                done.append(part)
                continue
            links += 1
            if links > 40:  # the kernel's own limit
                raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), path)
            target = os.readlink(here)
            if target.startswith("/"):
                done = []
            pending = [piece for piece in target.split("/") if piece] + pending
        return posixpath.join(self.root, *done)

    def _read(self, path: str) -> str:
        with open(self.locate(path), "rb") as file:
            content = file.read(LARGEST_FILE)
        return content.replace(b"\0", b"").decode("utf-8", "replace")


def parse_integer(text: str | None) -> int | None:
    """A decimal or ``0x`` number with nothing around it but white space; None for anything else."""
    if text is None:
        return None
    stripped = text.strip()
    if _INTEGER.match(stripped):
        return int(stripped)
    if re.match(r"0[xX][0-9a-fA-F]{1,32}\Z", stripped):
        return int(stripped, 16)
    return None


def natural_order(name: str) -> list[tuple[int, int, str]]:
    """Sort key that puts the numbers in names in order: ``cpu2`` before ``cpu10``."""
    parts = re.split(r"([0-9]+)", name)
    return [(1, int(part), "") if part.isascii() and part.isdigit() else (0, 0, part) for part in parts]
