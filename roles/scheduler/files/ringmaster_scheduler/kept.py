# SPDX-License-Identifier: GPL-3.0-or-later
"""Which rules keep engines out, kept over a restart of the daemon.

Without it a restart would send requests to an engine that answers wrong, until that was found out again; and HAProxy,
left alone, would be told to.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, Final

from ringmaster_scheduler.replacing import replace

_KEYS: Final = ("kind", "scope", "rule", "subject", "text")


class KeptFile:
    """A JSON file with what `HealthBook.closed` tells and the names of the engines that are out; an empty path keeps
    nothing."""

    def __init__(self, path: str) -> None:
        self._path = path
        # Why the last `load` or `save` failed.
        self.error = ""
        self._saved: Any = None

    def load(self) -> tuple[list[dict[str, str]], set[str]]:
        """Return the rules, and the names of the engines that are out. A file that is missing or of another form counts
        as empty: then all is found out anew."""
        if not self._path:
            return [], set()
        try:
            with open(self._path, encoding="utf-8") as file:
                content = json.load(file)
            rules = [{key: str(entry[key]) for key in _KEYS} for entry in content["rules"]]
            return rules, {str(name) for name in content["out"]}
        except FileNotFoundError:
            return [], set()
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            self.error = f"{self._path}: {getattr(error, 'strerror', None) or error}"
            return [], set()

    def save(self, rules: Sequence[dict[str, str]], out: set[str]) -> None:
        """Replace the file in one step, if it is another one than before. What can't be written is not kept, which
        `error` says: the engines are out all the same."""
        # What was seen goes on changing; which rule holds where does not.
        present = [{key: value for key, value in entry.items() if key != "text"} for entry in rules], sorted(out)
        if not self._path or present == self._saved:
            return
        try:
            replace(self._path, json.dumps({"rules": list(rules), "out": sorted(out)}).encode())
        except OSError as error:
            self.error = f"{self._path}: {error.strerror}"
            return
        self.error = ""
        self._saved = present
