# SPDX-License-Identifier: GPL-3.0-or-later
"""The state of simulated hardware: a folder of small files with one value each.

The NVML library (C), the stand-in commands and the faults all read and write these files, so a change by one is seen
by all at once, also by a process that has the library loaded. A missing file means: this piece of hardware has no such
thing (an L40S has no NVLink, a passive board no fan).
"""

from __future__ import annotations

import os

# What few callers need is imported where they need it: a stand-in command starts with this module, and often. To
# import `typing` would take a third of such a command's time; type checkers know the name.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from pathlib import Path
    from typing import Union

    Value = Union[str, int, float, bool]

# Unit tests and builds beside a real host name another folder; the library in C knows both names, too.
ENVIRONMENT = "RINGMASTER_REHEARSAL_HARDWARE"
FOLDER = "/var/lib/ringmaster-rehearsal/hardware"


class State:
    """The files below `folder`; paths are relative: ``gpus/0/ecc_pending``."""

    def __init__(self, folder: Path | str) -> None:
        self._path = os.fspath(folder)

    @property
    def folder(self) -> Path:
        """Where the files lie."""
        from pathlib import Path

        return Path(self._path)

    @classmethod
    def of_this_host(cls) -> State:
        """The state that the environment names, else the host's own."""
        return cls(os.environ.get(ENVIRONMENT) or FOLDER)

    def text(self, path: str, default: str = "") -> str:
        """The value without white space around it; `default` if there is no such file."""
        try:
            with open(f"{self._path}/{path}") as file:
                return file.read().strip()
        except (FileNotFoundError, NotADirectoryError):
            return default

    def integer(self, path: str, default: int = 0) -> int:
        """A decimal number; `default` if there is no such file. Raises ValueError for anything else."""
        return int(self.text(path) or default)

    def has(self, path: str) -> bool:
        """Whether there is a value, or a folder of values."""
        return os.path.exists(f"{self._path}/{path}")

    def names(self, path: str) -> list[str]:
        """Names in a folder, numbers in order; empty if there is no such folder."""
        try:
            found = [name for name in os.listdir(f"{self._path}/{path}") if not name.startswith(".")]
        except (FileNotFoundError, NotADirectoryError):
            return []
        return sorted(found, key=lambda name: (0, int(name), "") if name.isdecimal() else (1, 0, name))

    def set(self, path: str, value: Value) -> None:
        """Write a value in one step (a reader sees the old one or the new one); True is written as 1."""
        text = str(int(value)) if isinstance(value, bool) else str(value)
        folder, name = os.path.split(f"{self._path}/{path}")
        os.makedirs(folder, exist_ok=True)
        # Names with a dot are no values; the number keeps two writers apart.
        fresh = f"{folder}/.{name}.{os.getpid()}"
        with open(fresh, "w") as file:
            file.write(f"{text}\n")
        os.replace(fresh, f"{folder}/{name}")

    def update(self, path: str, values: dict[str, Value]) -> None:
        """Write several values of one folder."""
        for name, value in values.items():
            self.set(f"{path}/{name}", value)

    def add(self, path: str, amount: int) -> None:
        """Add to a counter; one that is missing starts at 0."""
        self.set(path, self.integer(path) + amount)

    def remove(self, path: str) -> None:
        """Remove a value or a folder of values, if it is there."""
        target = self.folder / path
        if target.is_dir():
            import shutil

            shutil.rmtree(target)
        else:
            target.unlink(missing_ok=True)
