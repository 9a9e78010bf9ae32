# Copyright (c) 2026, the Ringmaster authors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Asks an installed engine what it takes, and keeps the answer.

The engine's own Python runs the program of ``engine_flags_probe``. Building the parser takes the engine half a minute
of processor time, so what it said is kept in a directory, one file a version, and asked again only if anything that is
installed beside the engine changed. The file of a command line's words, which may hold a secret, exists for the time of
the question and can be read by its owner only; kept is a checksum of them. Nothing here imports Ansible.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import re
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ansible_collections.ringmaster.inference.plugins.module_utils import durable, engine_flags_probe
from ansible_collections.ringmaster.inference.plugins.module_utils.commands import CommandRunner
from ansible_collections.ringmaster.inference.plugins.module_utils.engine_flags_catalogue import (
    Catalogue,
    CatalogueError,
    from_document,
)

SCHEMA = 1
DEFAULT_TIMEOUT = 180.0  # seconds; a busy host with a cold disk takes a minute to import the engine
_MOST_COMPLAINTS = 64  # command lines of which the engine's answer is kept, the newest
_LARGEST_CACHE = 16 << 20  # bytes; a catalogue takes 40 kB
_LONGEST_TAIL = 600  # characters of what a failed program said


class InstalledError(Exception):
    """The engine can't be asked; the text says what was expected, what was found and what to do."""

    def __init__(self, expected: str, found: str, remedy: str) -> None:
        super().__init__(f"Expected {expected}. Found {found}. To do: {remedy}.")


@dataclass(frozen=True)
class Installed:
    """What the engine said. ``complaint`` is what its own parser says of the words, None if it takes them (or if none
    were given); ``cached`` whether none of it had to be asked again."""

    catalogue: Catalogue
    complaint: str | None
    cached: bool


def python_of(executable: str) -> str:
    """The Python that belongs to an engine's program: itself, the one beside it, or that of its first line.

    Raises:
        InstalledError: there is no such program, or nothing tells its Python.
    """
    if not os.path.isfile(executable) or not os.access(executable, os.X_OK):
        raise InstalledError(
            f"the engine's program at {executable}", "no program", "install the engine, or name its program"
        )
    if re.match(r"(python|pypy)[0-9.]*\Z", os.path.basename(executable)):
        return executable
    for name in ("python3", "python"):
        beside = os.path.join(os.path.dirname(executable), name)
        if os.access(beside, os.X_OK):
            return beside
    with open(executable, "rb") as file:
        first = file.readline(4096)
    match = re.match(rb"#!\s*(/\S*/(?:python|pypy)[0-9.]*)\s*$", first)
    if match is None or not os.access(match[1], os.X_OK):
        raise InstalledError(
            f"a Python beside {executable} or in its first line", "none", "name the Python of the engine's environment"
        )
    return os.fsdecode(match[1])


class InstalledEngine:
    """One installed engine. ``environment`` is added to that of its Python; ``cache`` is None where nothing may be
    kept."""

    def __init__(
        self,
        engine: str,
        executable: str,
        runner: CommandRunner,
        environment: Mapping[str, str] | None = None,
        cache: str | None = None,
        timeout: float = DEFAULT_TIMEOUT,
    ) -> None:
        self.engine = engine
        self.python = python_of(executable)
        self.runner = runner
        self.environment = dict(environment or {})
        self.cache = cache
        self.timeout = timeout

    def ask(self, words: Sequence[str] | None, keep: bool = True) -> Installed:
        """The engine's catalogue, and its parser's word on `words`. `keep`: whether the answer may be written down.

        Raises:
            InstalledError: the engine does not answer, or its answer can't be read.
        """
        who = self._run(None, catalogue=False)
        version, identity = str(who["version"]), f"{who['identity']} {self._digest_of_environment()}"
        kept = self._load(version, identity)
        key = _digest(json.dumps(list(words))) if words is not None else None
        catalogue = self._catalogue(version, kept.get("catalogue")) if kept else None
        if catalogue and (key is None or key in kept["complaints"]):
            return Installed(catalogue, kept["complaints"].get(key), cached=True)
        answer = self._run(words, catalogue=catalogue is None)
        if catalogue is None:
            kept = {"schema": SCHEMA, "identity": identity, "catalogue": answer.get("catalogue"), "complaints": {}}
            catalogue = self._catalogue(version, kept["catalogue"])
            if catalogue is None:
                raise InstalledError("a catalogue of options", "something else", "report it with the engine's version")
        complaint = answer.get("complaint")
        complaint = None if complaint is None else str(complaint)
        if key is not None:
            newest = list(kept["complaints"].items())[-(_MOST_COMPLAINTS - 1) :]
            # A complaint may quote a value; the command line it is of is asked again instead.
            kept["complaints"] = dict(newest) if complaint is not None else {**dict(newest), key: None}
        if keep:
            self._save(version, kept)
        return Installed(catalogue, complaint, cached=False)

    def _digest_of_environment(self) -> str:
        return _digest(json.dumps(self.environment, sort_keys=True))

    def _catalogue(self, version: str, document: Any) -> Catalogue | None:
        try:
            return from_document(self.engine, version, document)
        except CatalogueError:
            return None

    def _run(self, words: Sequence[str] | None, catalogue: bool) -> dict[str, Any]:
        specification = importlib.util.find_spec(engine_flags_probe.__name__)
        loader = specification.loader if specification else None
        program = loader.get_source(engine_flags_probe.__name__)  # type: ignore[union-attr] # of a zip file as well
        descriptor, path = tempfile.mkstemp(prefix="ringmaster-engine-flags-")  # mode 0600
        try:
            with open(descriptor, "w", encoding="utf-8") as file:
                request = {
                    "engine": self.engine,
                    "words": None if words is None else list(words),
                    "catalogue": catalogue,
                }
                json.dump({**request, "environment": self.environment}, file)
            answer = self.runner.run([self.python, "-I", "-B", "-c", program, path], self.timeout)
        finally:
            os.unlink(path)
        if not answer.ok:
            found = answer.complaint[-_LONGEST_TAIL:] if answer.status is not None else answer.complaint.split(":")[0]
            raise InstalledError(
                f"{self.engine} in the environment of {self.python} to tell its options",
                f"{found or 'no reason'} (status {answer.status})",
                "mend the installation, or give a longer timeout",
            )
        try:
            result = json.loads(answer.output)
            return {**result, "version": result["version"], "identity": result["identity"]}
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise InstalledError(
                f"an answer in JSON from {self.python}", f"{type(error).__name__}: {error}", "mend the installation"
            ) from None

    def _path(self, version: str) -> str:
        return os.path.join(self.cache or "", f"{self.engine}-{re.sub(r'[^A-Za-z0-9.+-]', '_', version)[:64]}.json")

    def _load(self, version: str, identity: str) -> dict[str, Any]:
        """What is kept of this engine; empty if nothing is, or nothing that can be used."""
        if self.cache is None:
            return {}
        try:
            with open(self._path(version), encoding="utf-8") as file:
                kept = json.loads(file.read(_LARGEST_CACHE))
        except (OSError, ValueError, RecursionError):
            return {}
        if not isinstance(kept, dict) or kept.get("schema") != SCHEMA or kept.get("identity") != identity:
            return {}
        return kept if isinstance(kept.get("complaints"), dict) else {}

    def _save(self, version: str, kept: Mapping[str, Any]) -> None:
        """Keep an answer. That it can't be kept (a full disk, no permission) makes no answer worse."""
        if self.cache is None:
            return
        try:
            os.makedirs(self.cache, mode=0o755, exist_ok=True)
            durable.replace(self._path(version), json.dumps(kept) + "\n", 0o644)
        except OSError:
            return


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()
