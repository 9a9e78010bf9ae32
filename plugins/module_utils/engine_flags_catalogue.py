# Copyright (c) 2026, the Ringmaster authors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What one version of an engine takes on its command line: its options with their values, choices and ranges.

A catalogue comes from the engine itself (``engine_flags_probe``); the one that is built in was taken from vLLM 0.32.0
in the same way. Nothing here imports Ansible.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ansible_collections.ringmaster.inference.plugins.module_utils import engine_flags_catalogue_vllm

ONE = "one"
_TAKES = (ONE, "?", "*", "+")


class CatalogueError(Exception):
    """A document is no catalogue; the text says where."""


@dataclass(frozen=True)
class Option:
    """One option of the engine.

    ``takes`` is how many words belong to it, as argparse counts: "one", "?" (one or none), "+" (one or more), "*", or a
    number. ``kind`` is what each of them has to be (see ``engine_flags_values``). ``none``: the word None, and none at
    all, stand for no value. ``choices`` are the values the parser takes, ``allowed`` those that the configuration takes
    after the parser took any, ``known`` those the help names where others are taken as well. ``limits`` has ``least``,
    ``above``, ``most``, ``below``. ``fields`` describes the object of kind "object"; None if nothing is known of it.
    """

    flag: str
    names: tuple[str, ...]
    negations: tuple[str, ...] = ()
    takes: str | int = ONE
    kind: str = "text"
    none: bool = False
    choices: tuple[Any, ...] = ()
    allowed: tuple[str, ...] = ()
    known: tuple[str, ...] = ()
    limits: Mapping[str, float] = field(default_factory=dict)
    fields: Mapping[str, Any] | None = None
    repeatable: bool = False
    ends: bool = False

    @property
    def switch(self) -> bool:
        """Whether it takes no value at all."""
        return self.takes == 0


@dataclass(frozen=True)
class Catalogue:
    """The options of one version. ``version`` is the engine's own, with its local part (``0.32.0+cpu``)."""

    engine: str
    version: str
    options: Mapping[str, Option]
    by_name: Mapping[str, Option]

    def find(self, name: str) -> Option | None:
        """The option with this name, long or short or negated; None if there is none."""
        return self.by_name.get(name)


def from_document(engine: str, version: str, document: Any) -> Catalogue:
    """Read what ``engine_flags_probe`` says of an engine.

    Raises:
        CatalogueError: the document is not of that form (a damaged cache, an answer of another program).
    """
    if not isinstance(document, Mapping) or not document:
        raise CatalogueError("expected an object with an entry for each option")
    options = {str(flag): _option(str(flag), entry) for flag, entry in document.items()}
    by_name: dict[str, Option] = {}
    for option in options.values():
        for name in (*option.names, *option.negations):
            by_name[name] = option
    return Catalogue(engine, version, options, by_name)


@functools.cache
def built_in(engine: str, version: str) -> Catalogue | None:
    """The catalogue that is at hand without an engine; None if there is none for this version."""
    known = engine == "vllm" and release(version) == release(engine_flags_catalogue_vllm.VERSION)
    return newest_vllm() if known else None


def newest_vllm() -> Catalogue:
    """The built-in catalogue, of the last release of vLLM that the history knows: how its command lines are written."""
    options = json.loads(engine_flags_catalogue_vllm.OPTIONS)
    return from_document("vllm", engine_flags_catalogue_vllm.VERSION, options)


def release(version: str) -> tuple[int, ...]:
    """The numbers of a version, without zeros at their end: (0, 32) for 0.32.0, 0.32.0+cpu and 0.32.0rc1; () for text.

    Candidates and post-releases count as the release they belong to: the history knows no finer.
    """
    numbers = []
    for part in version.strip().lower().removeprefix("v").split("."):
        digits = ""
        for character in part:
            if not ("0" <= character <= "9"):
                break
            digits += character
        if not digits or len(digits) > 9:
            break
        numbers.append(int(digits))
        if digits != part:
            break
    while numbers and numbers[-1] == 0 and len(numbers) > 1:
        numbers.pop()
    return tuple(numbers)


def _option(flag: str, entry: Any) -> Option:
    if not flag.startswith("--") or not isinstance(entry, Mapping):
        raise CatalogueError(f"expected an object under a flag, found {flag!r}")
    takes = entry.get("takes", ONE)
    if takes not in _TAKES and not (isinstance(takes, int) and 0 <= takes <= 64):
        raise CatalogueError(f"{flag}: takes is {takes!r}")
    limits, fields = entry.get("limits", {}), entry.get("fields")
    if not isinstance(limits, Mapping) or not isinstance(fields, (Mapping, type(None))):
        raise CatalogueError(f"{flag}: limits and fields have to be objects")
    lists = {}
    for name in ("names", "negations", "choices", "allowed", "known"):
        value = entry.get(name, [flag] if name == "names" else [])
        if not isinstance(value, list) or (
            name in ("names", "negations") and not all(isinstance(v, str) for v in value)
        ):
            raise CatalogueError(f"{flag}: {name} has to be a list")
        lists[name] = tuple(value)
    return Option(
        flag=flag,
        takes=takes,
        kind=str(entry.get("kind", "text")),
        none=bool(entry.get("none")),
        limits=limits,
        fields=fields,
        repeatable=bool(entry.get("repeatable")),
        ends=bool(entry.get("ends")),
        **lists,
    )
