# SPDX-License-Identifier: GPL-3.0-or-later
"""Which engines an operator has drained, kept over a restart of the daemon."""

from __future__ import annotations

import json

from ringmaster_scheduler.replacing import replace


class DrainedFile:
    """A JSON list of names in a file; an empty path keeps nothing."""

    def __init__(self, path: str) -> None:
        self._path = path
        # Why the last `load` found something that it could not use.
        self.error = ""

    def load(self) -> set[str]:
        """Return the names. A file that is missing or no list of names counts as empty, for the daemon has to start;
        `error` then says so."""
        if not self._path:
            return set()
        try:
            with open(self._path, encoding="utf-8") as file:
                content = json.load(file)
        except FileNotFoundError:
            return set()
        except (OSError, ValueError, RecursionError) as error:
            self.error = f"{self._path}: {getattr(error, 'strerror', None) or error}"
            return set()
        if not isinstance(content, list) or not all(isinstance(name, str) for name in content):
            self.error = f"{self._path}: expected a list of names"
            return set()
        return set(content)

    def save(self, names: set[str]) -> None:
        """Replace the names in one step. Raises OSError."""
        if not self._path:
            return
        replace(self._path, json.dumps(sorted(names)).encode())
