# Copyright (c) 2026, the Ringmaster authors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What an operation of the driver stack changed, change after change, and the package files to go back with.

One folder an operation: ``generations.json``, written in one step before a change begins, and ``files/`` with the
package files; beside the folders, what all operations share: the keys that the package manager trusts because of them
(``trusted_keys.json``). A generation is a set of packages that was left: name, version before, version after. It is
``open`` while its change runs, ``applied`` once the packages are there, ``confirmed`` once the host came back healthy.
One that is open when a run begins was cut: it goes on, for what it has as "before" is still what was there before.
Nothing here imports Ansible.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from ansible_collections.ringmaster.inference.plugins.module_utils import durable

DIRECTORY = "/var/lib/ringmaster/packages"
OPEN, APPLIED, CONFIRMED = "open", "applied", "confirmed"
SCHEMA = 1


class GenerationsError(Exception):
    """The record can't be read, or can't be written."""


@dataclass
class Entry:
    """A package. `before` None: it was not there. `after` None: it was removed. `file`: name of that of `before`."""

    name: str
    before: str | None
    after: str | None
    file: str | None = None


@dataclass
class Generation:
    """A set that was left. `held`: names that were held then. `settings`: content of the operation's own files then
    (pins, locks), None for one that was not there. `facts`: what else was true then (cards, driver that was loaded)."""

    number: int
    state: str
    profile: str
    entries: list[Entry] = field(default_factory=list)
    held: list[str] = field(default_factory=list)
    settings: dict[str, str | None] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)


class Generations:
    """Those of one operation, the oldest first. Nothing is written before :meth:`save`."""

    def __init__(self, operation: str, directory: str = DIRECTORY) -> None:
        self.base = directory
        self.directory = os.path.join(directory, operation)
        self.files = os.path.join(self.directory, "files")
        self.document = os.path.join(self.directory, "generations.json")
        self._keys = os.path.join(directory, "trusted_keys.json")
        self.generations = self._load()

    def _load(self) -> list[Generation]:
        try:
            with open(self.document, encoding="utf-8") as file:
                document = json.load(file)
            if document["schema"] != SCHEMA:
                raise ValueError(f"schema {document['schema']!r}")
            return [
                Generation(**{**each, "entries": [Entry(**entry) for entry in each["entries"]]})
                for each in document["generations"]
            ]
        except FileNotFoundError:
            return []
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise GenerationsError(
                f"Expected a record of changes in {self.document}. Found {error}. "
                "To do: bring the file back from a backup, or move it away (the way back is then lost)."
            ) from error

    def brought_keys(self) -> set[str]:
        """Names of the keys that the package manager has learnt to trust by changes of any operation.

        Raises GenerationsError for a note that can't be read.
        """
        return set(self._key_note()["brought"])

    def expect_keys(self, trusted: Iterable[str]) -> None:
        """Write down what the package manager trusts before a change. Raises OSError, GenerationsError."""
        fresh = not os.path.exists(self.document) and not self.others()
        # Without any record a note is one that a killed run has left.
        note = {"brought": [], "before": None} if fresh else self._key_note()
        if note["before"] is None:
            self._write_key_note(note["brought"], sorted(trusted))

    def note_keys(self, trusted: Iterable[str]) -> None:
        """Write down what it trusts since then. Raises OSError, GenerationsError."""
        note = self._key_note()
        if note["before"] is not None:
            self._write_key_note(sorted({*note["brought"], *(set(trusted) - set(note["before"]))}), None)

    def _key_note(self) -> dict[str, Any]:
        try:
            with open(self._keys, encoding="utf-8") as file:
                note = json.load(file)
            for names in (note["brought"], note["before"] or []):
                if not all(isinstance(name, str) for name in names):
                    raise ValueError(f"{names!r}")
            return {"brought": list(note["brought"]), "before": note["before"]}
        except FileNotFoundError:
            return {"brought": [], "before": None}
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise GenerationsError(
                f"Expected names of keys in {self._keys}. Found {error!r}. "
                "To do: remove the file; the package manager then goes on trusting keys that came with earlier changes."
            ) from error

    def _write_key_note(self, brought: list[str], before: list[str] | None) -> None:
        os.makedirs(self.base, mode=0o755, exist_ok=True)
        durable.replace(self._keys, json.dumps({"brought": brought, "before": before}) + "\n", 0o600)

    @property
    def last(self) -> Generation | None:
        """The newest one."""
        return self.generations[-1] if self.generations else None

    def begin(self, profile: str) -> Generation:
        """The generation that a change belongs to: the one that a cut run left open, else a new one."""
        if self.last and self.last.state == OPEN:
            return self.last
        number = self.last.number + 1 if self.last else 1
        self.generations.append(Generation(number, OPEN, profile))
        return self.generations[-1]

    def target(self, first: bool) -> list[Entry]:
        """What to go back to: before the last change, or before the first one. One entry a package.

        Of a package of which several versions are there at a time (kernels of EL), one entry for each that came.
        """
        chains: dict[str, list[Entry]] = {}
        for generation in self.generations if first else self.generations[-1:]:
            for entry in generation.entries:
                mine = chains.setdefault(entry.name, [])
                chain = next((each for each in mine if each.after == entry.before), None)
                if chain:
                    chain.after = entry.after
                else:
                    mine.append(Entry(**asdict(entry)))
        # What changed by other hands in between has no chain to the beginning; the oldest "before" is what counts.
        return [
            entry
            for mine in chains.values()
            for entry in (mine if all(each.before is None for each in mine) else mine[:1])
            if entry.before != entry.after
        ]

    def drop(self, first: bool) -> None:
        """Forget the last generation, or all."""
        self.generations = [] if first else self.generations[:-1]

    def save(self) -> None:
        """Write the record in one step, and remove package files that no generation names.

        Raises OSError; the record is then as it was.
        """
        os.makedirs(self.files, mode=0o700, exist_ok=True)
        content = {"schema": SCHEMA, "generations": [asdict(each) for each in self.generations]}
        durable.replace(self.document, json.dumps(content, indent=1) + "\n", 0o600)
        durable.sync_directory(self.directory)

    def prune(self, keep: Iterable[str]) -> None:
        """Remove package files that neither a generation nor `keep` names."""
        named = {entry.file for each in self.generations for entry in each.entries if entry.file} | set(keep)
        with contextlib.suppress(FileNotFoundError):
            for name in os.listdir(self.files):
                path = os.path.join(self.files, name)
                if name not in named and os.path.isfile(path):
                    os.unlink(path)

    def remove(self) -> None:
        """Remove record and files, and the folder of all operations once it is empty. Raises OSError."""
        if not self.others():
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self._keys)
        if os.path.isdir(self.directory):
            shutil.rmtree(self.directory)
        with contextlib.suppress(OSError):
            os.rmdir(self.base)

    def others(self) -> list[str]:
        """Other operations that have a record."""
        try:
            names = os.listdir(self.base)
        except FileNotFoundError:
            return []
        return sorted(
            name
            for name in names
            if name != os.path.basename(self.directory)
            and os.path.exists(os.path.join(self.base, name, "generations.json"))
        )


def summary(generation: Generation | None) -> Mapping[str, Any] | None:
    """A generation for a result."""
    return (
        None if generation is None else {key: value for key, value in asdict(generation).items() if key != "settings"}
    )
