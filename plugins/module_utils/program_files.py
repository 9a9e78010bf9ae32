# Copyright (c) 2026, the Ringmaster authors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The files of a Python program in a folder of its own: what is missing or differs, what is left of a former program.

Nothing here imports Ansible.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from ansible_collections.ringmaster.inference.plugins.module_utils import durable

# Everybody may read a program; only its owner may change it.
FILE_MODE = 0o644
FOLDER_MODE = 0o755


class ProgramError(Exception):
    """Something is not as it has to be; the text says what was expected, what was found and what to do."""

    def __init__(self, expected: str, found: str, remedy: str) -> None:
        super().__init__(f"Expected {expected}. Found {found}. To do: {remedy}.")


@dataclass(frozen=True)
class Plan:
    """What makes the folder hold the program. ``folders`` are absolute; the others are names below the folder."""

    folders: tuple[Path, ...]
    written: tuple[str, ...]
    removed: tuple[str, ...]

    @property
    def changes(self) -> bool:
        """Whether anything has to be done."""
        return bool(self.folders or self.written or self.removed)


class Program:
    """A program that is wanted: text of each file by its name below ``folder``, with ``/`` between the parts.

    Raises ProgramError for a name that leads out of the folder, and for a folder that is not absolute.
    """

    def __init__(self, folder: str, files: Mapping[str, str]) -> None:
        self.folder = Path(folder)
        self.files = {name: text.encode("utf-8") for name, text in files.items()}
        if not self.folder.is_absolute() or ".." in self.folder.parts:
            raise ProgramError("an absolute path for the program", f"{folder!r}", "name its folder from / on")
        for name in files:
            if not name or "\0" in name or any(part in ("", ".", "..") for part in name.split("/")):
                raise ProgramError(
                    "names of files below the program's folder",
                    f"{name!r}",
                    "name it by folders and file, with / between",
                )

    def plan(self) -> Plan:
        """Compare the folder with what is wanted. Raises OSError, and ProgramError for a link in its way."""
        folders = [folder for folder in self._folders() if not _is_folder(folder)]
        written = [name for name, content in self.files.items() if not _is_file(self.folder / name, content)]
        removed = [name for name in self._present() if name not in self.files]
        return Plan(tuple(folders), tuple(sorted(written)), tuple(sorted(removed)))

    def carry_out(self, plan: Plan) -> None:
        """Do what the plan says. Each file is replaced in one step; what a killed run left is found by the next plan.

        Raises OSError.
        """
        for folder in plan.folders:
            if not folder.exists():
                folder.mkdir()
            folder.chmod(FOLDER_MODE)
            os.chown(folder, os.geteuid(), os.getegid())
        for name in plan.written:
            durable.replace(str(self.folder / name), self.files[name], FILE_MODE)
        for name in plan.removed:
            (self.folder / name).unlink()

    def diff(self, plan: Plan) -> list[dict[str, str]]:
        """Before and after of each file that the plan touches, as Ansible shows them. To be asked before it is done."""
        return [
            {
                "before_header": str(self.folder / name),
                "after_header": str(self.folder / name),
                "before": _text_of(self.folder / name),
                "after": self.files.get(name, b"").decode("utf-8"),
            }
            for name in plan.written + plan.removed
        ]

    def _folders(self) -> Iterator[Path]:
        """The folders that have to be there, each after the one above it."""
        missing_above = []
        for folder in self.folder.parents:
            if folder.exists():
                break
            missing_above.append(folder)
        yield from reversed(missing_above)
        inner = {parent for name in self.files for parent in (self.folder / name).parents}
        yield from sorted(folder for folder in inner if folder.is_relative_to(self.folder))

    def _present(self) -> Iterator[str]:
        """Names of Python's sources that are there in the program's own packages. Caches of Python are left alone."""
        for top in sorted({name.split("/")[0] for name in self.files if "/" in name}):
            for folder, _folders, names in os.walk(self.folder / top):
                for name in names:
                    if name.endswith(".py"):
                        yield str((Path(folder) / name).relative_to(self.folder))


def _is_folder(path: Path) -> bool:
    """Whether it is there as it has to be. Raises ProgramError for something else of that name."""
    try:
        found = path.lstat()
    except FileNotFoundError:
        return False
    except NotADirectoryError:
        found = None
    if found is None or not stat.S_ISDIR(found.st_mode):
        raise ProgramError(
            f"the folder {path}, or nothing of that name", "something else", "look what it is, and remove it"
        )
    return stat.S_IMODE(found.st_mode) == FOLDER_MODE and _is_own(found)


def _is_file(path: Path, content: bytes) -> bool:
    """Whether it is there with this content, as it has to be. Raises ProgramError for a folder of that name."""
    try:
        found = path.lstat()
    except FileNotFoundError:
        return False
    if stat.S_ISDIR(found.st_mode):
        raise ProgramError(f"the file {path}, or nothing of that name", "a folder", "look what it is, and remove it")
    if not stat.S_ISREG(found.st_mode) or stat.S_IMODE(found.st_mode) != FILE_MODE or not _is_own(found):
        return False
    return found.st_size == len(content) and path.read_bytes() == content


def _is_own(found: os.stat_result) -> bool:
    return (found.st_uid, found.st_gid) == (os.geteuid(), os.getegid())


def _text_of(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return ""
