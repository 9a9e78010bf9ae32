# Copyright (c) 2026, the Ringmaster authors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Tables of file systems: /etc/fstab (fstab(5)) and /proc/self/mounts, which have one form, and /proc/swaps."""

from __future__ import annotations

import re
from dataclasses import dataclass

_ESCAPE = re.compile(r"\\([0-7]{3})")
# Fields end at a space or a tab, lines at a line end, and a field that begins with # is a comment.
_ESCAPED = frozenset(" \t\n\r\\#")


@dataclass(frozen=True)
class Mount:
    """One line of a table. ``path`` is V(none) for swap."""

    source: str
    path: str
    type: str
    options: tuple[str, ...] = ("defaults",)
    dump: int = 0
    passno: int = 0

    @property
    def key(self) -> tuple[str, str]:
        """What tells this line from others: the mount point, or the source where there is none (swap)."""
        return (self.path, self.source if self.path in ("none", "swap") else "")

    def line(self) -> str:
        """The line for a table, without its end."""
        fields = [self.source, self.path, self.type, ",".join(self.options)]
        return " ".join([*(escape(field) for field in fields), str(self.dump), str(self.passno)])


def escape(field: str) -> str:
    """A field as it stands in a table."""
    return "".join(f"\\{ord(character):03o}" if character in _ESCAPED else character for character in field)


def unescape(field: str) -> str:
    r"""A field as it is meant: ``\040`` is a space. Escapes are of bytes, so that several can make one character."""
    data = re.sub(
        rb"\\([0-7]{3})",
        lambda found: bytes([int(found[1], 8) & 0xFF]),
        field.encode("utf-8", "surrogateescape"),
    )
    return data.decode("utf-8", "surrogateescape")


def parse_line(line: str) -> Mount | None:
    """What a line says; None for a comment, an empty line, and one that makes no sense."""
    if line.lstrip(" \t").startswith("#"):
        return None
    fields = [field for field in re.split(r"[ \t]+", line.strip(" \t\r")) if field]
    if len(fields) < 3:
        return None
    numbers = [int(field) if field.isascii() and field.isdecimal() else 0 for field in fields[4:6]] + [0, 0]
    options = tuple(unescape(fields[3]).split(",")) if len(fields) > 3 else ("defaults",)
    return Mount(unescape(fields[0]), unescape(fields[1]), unescape(fields[2]), options, numbers[0], numbers[1])


def parse_table(text: str) -> list[Mount]:
    """All lines of a table that say something."""
    return [mount for mount in map(parse_line, text.split("\n")) if mount]


@dataclass(frozen=True)
class Swap:
    """Swap that is on."""

    path: str
    type: str  # file or partition
    size: int  # bytes


def parse_swaps(text: str) -> list[Swap]:
    """Swap in a table of the form of /proc/swaps: one line of headings, sizes in units of 1024 bytes."""
    swaps = []
    for line in text.split("\n")[1:]:
        fields = re.split(r"[ \t]+", line.strip(" \t\r"))
        if len(fields) >= 3 and fields[2].isascii() and fields[2].isdecimal():
            # A file that was removed while it is in use is named so.
            path = unescape(fields[0]).removesuffix(" (deleted)")
            swaps.append(Swap(path, fields[1], int(fields[2]) * 1024))
    return swaps


def replaced(text: str, key: tuple[str, str], wanted: Mount | None) -> str:
    """The table with the wanted line in the place of those with this key; None: without them.

    A line that already says what is wanted stays as it is written, as do comments and all other lines. A new line comes
    last.
    """
    lines: list[str] = []
    placed = wanted is None
    for line in text.split("\n"):
        mount = parse_line(line)
        if mount is None or mount.key != key:
            lines.append(line)
        elif not placed and wanted is not None:
            lines.append(line if mount == wanted else wanted.line())
            placed = True
    if not placed and wanted is not None:
        if lines and lines[-1] == "":
            lines.pop()
        lines += [wanted.line(), ""]
    return "\n".join(lines)
