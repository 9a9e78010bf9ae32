# Copyright (c) 2026, the Ringmaster authors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What a package manager would do, read from its simulation, and whether one operation's step may do that.

``apt-get --simulate`` and ``dnf --assumeno`` say what they would do in text. Both are read here into one form, and are
believed only if they are whole: the changes have to tally with the summary at the end. A step may then change its own
packages and bring along packages of nobody; it may not touch another step's, remove what is not its own, or leave a
wanted package at another version. Formats: apt 2.6 and 3.0 and dnf 4.14 as seen, dnf 5 as documented; messages in
English (``LC_ALL=C``). Nothing here imports Ansible.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from ansible_collections.ringmaster.inference.plugins.module_utils.stack_packages import (
    OPERATIONS,
    OWN_VERSION,
    owner,
    plain_name,
)
from ansible_collections.ringmaster.inference.plugins.module_utils.stack_profiles import operations_of, packages
from ansible_collections.ringmaster.inference.plugins.module_utils.stack_versions import (
    compare,
    fits,
    numbers,
    upstream,
)

ACTIONS = ("install", "upgrade", "downgrade", "reinstall", "remove")
TOOLS = {"Debian": "apt-get --simulate", "RedHat": "dnf --assumeno"}


@dataclass(frozen=True)
class Change:
    """One package. `before` and `after` are versions; None where there is none, or where dnf does not tell the old."""

    name: str
    action: str
    before: str | None
    after: str | None

    def document(self) -> dict[str, str | None]:
        """For a result."""
        return {"name": self.name, "action": self.action, "before": self.before, "after": self.after}


@dataclass(frozen=True)
class Transaction:
    """What would happen. `errors` are the package manager's reasons why nothing would, or that the text is not whole;
    `held` are packages on hold that would be changed all the same."""

    changes: tuple[Change, ...] = ()
    errors: tuple[str, ...] = ()
    held: tuple[str, ...] = ()


def parse(family: str, output: str) -> Transaction:
    """Read a simulation; `output` is standard output followed by standard error, in English."""
    return parse_dnf(output) if family == "RedHat" else parse_apt(output)


# -- apt ---------------------------------------------------------------------------------------------------------------

_APT_CHANGE = re.compile(r"(Inst|Remv|Purg) (\S+)(?: \[([^\]\s]*)\])?(?: \((\S+)[^)]*\))?")
_APT_SUMMARY = re.compile(
    r"([0-9]+) upgraded, ([0-9]+) newly installed, (?:([0-9]+) reinstalled, )?(?:([0-9]+) downgraded, )?"
    r"([0-9]+) to remove and [0-9]+ not upgraded\."
)
# The summary of "Output-Version 30", which apt 3 has.
_APT_3_SUMMARY = re.compile(r"\s+(?:Upgrading|Installing|Reinstalling|Downgrading|Removing): [0-9]+, ")
_APT_3_COUNT = re.compile(r"(?<!Not )(Upgrading|Installing|Reinstalling|Downgrading|Removing): ([0-9]+)")
_APT_HELD = ("The following held packages will be changed:", "Changing held packages:")
_APT_UNMET = "The following packages have unmet dependencies:"


def parse_apt(output: str) -> Transaction:
    """Read what ``apt-get --simulate`` printed."""
    changes: list[Change] = []
    errors: list[str] = []
    held: list[str] = []
    said: dict[str, int] | None = None
    block = ""
    for line in output.splitlines():
        if line[:1] == " " and block in _APT_HELD:
            held += line.split()
            continue
        if line[:1] == " " and block == _APT_UNMET:
            errors.append(" ".join(line.split()))
            continue
        block = line.strip()
        if line.startswith("E: "):
            errors.append(line[3:].strip())
        said = _apt_summary(line) or said
        if line.startswith(("Inst ", "Remv ", "Purg ")):
            match = _APT_CHANGE.match(line)
            change = _apt_change(match) if match else None
            if change:
                changes.append(change)
            else:
                errors.append(f"a line of the simulation can't be read: {line[:120]}")
    if not errors:
        missing = ["the simulation has no summary at its end, so it may not be whole"]
        errors += missing if said is None else _differences(said, changes)
    return Transaction(tuple(changes), tuple(errors), tuple(held))


def _apt_change(match: re.Match[str]) -> Change | None:
    kind, name, before, after = match.groups()
    if kind != "Inst":
        return Change(name, "remove", before, None)
    if after is None:
        return None
    if before is None:
        return Change(name, "install", None, after)
    order = compare("Debian", after, before)
    return Change(name, ("downgrade", "reinstall", "upgrade")[order + 1], before, after)


def _apt_summary(line: str) -> dict[str, int] | None:
    match = _APT_SUMMARY.match(line)
    if match:
        upgraded, new, reinstalled, downgraded, removed = (int(number or 0) for number in match.groups())
        return dict(zip(ACTIONS, (new, upgraded, downgraded, reinstalled, removed)))
    if _APT_3_SUMMARY.match(line):
        found = {word.lower(): int(number) for word, number in _APT_3_COUNT.findall(line)}
        words = ("installing", "upgrading", "downgrading", "reinstalling", "removing")
        return {action: found.get(word, 0) for action, word in zip(ACTIONS, words)}
    return None


def _differences(said: Mapping[str, int], changes: Collection[Change]) -> list[str]:
    return [
        f"the simulation's summary says {number} to {action}, its lines {found}"
        for action, number in said.items()
        if number != (found := sum(change.action == action for change in changes))
    ]


# -- dnf ---------------------------------------------------------------------------------------------------------------

_DNF_GROUPS = {
    "Installing": "install",
    "Installing dependencies": "install",
    "Installing weak dependencies": "install",
    "Installing group/module packages": "install",
    "Upgrading": "upgrade",
    "Downgrading": "downgrade",
    "Reinstalling": "reinstall",
    "Removing": "remove",
    "Removing dependent packages": "remove",
    "Removing unused dependencies": "remove",
}
# "Install  8 Packages" in dnf 4, " Installing:  8 packages" in dnf 5; neither counts reinstalled ones alike.
_DNF_SUMMARY = re.compile(
    r"\s*(Install|Upgrade|Downgrade|Remove|Installing|Upgrading|Downgrading|Removing):?\s+([0-9]+) packages?\s*\Z",
    re.IGNORECASE,
)
_DNF_SUMMARY_ACTIONS = {"install": "install", "upgrad": "upgrade", "downgr": "downgrade", "remov": "remove"}
_DNF_VERSION = re.compile(r"(?:[0-9]+:)?[^\s:-]+-[^\s:-]+\Z")
_DNF_SKIPPED = ("Skipping packages with conflicts", "Skipping packages with broken dependencies")


def parse_dnf(output: str) -> Transaction:
    """Read what ``dnf --assumeno`` printed, with its standard error."""
    changes: list[Change] = []
    errors: list[str] = []
    said: dict[str, int] = {}
    group: str | None = None
    pending: list[str] = []
    ended = False
    for line in output.splitlines():
        stripped = line.strip()
        heading = stripped.rstrip(":")
        counted = _DNF_SUMMARY.match(line)
        if counted:
            action = next(value for key, value in _DNF_SUMMARY_ACTIONS.items() if counted[1].lower().startswith(key))
            said[action] = said.get(action, 0) + int(counted[2])
        elif stripped.startswith("Transaction Summary"):
            group, pending = None, []
        elif line[:1] not in ("", " ") and stripped.endswith(":") and heading in _DNF_GROUPS:
            group, pending = _DNF_GROUPS[heading], []
        elif stripped in ("Nothing to do.", "Operation aborted.", "Operation aborted by the user."):
            group, ended = None, True
        elif line.startswith(_DNF_SKIPPED):
            group = None
            errors.append(stripped.rstrip(":"))
        elif re.match(r"(Error|Problem)\b.*:", stripped) or stripped.startswith("No match for argument:"):
            group = None
            if stripped != "Error:":
                errors.append(stripped)
        elif errors and stripped.startswith("- "):
            errors.append(stripped[2:])
        elif line[:1] not in ("", " ") or not stripped:
            group, pending = None, []
        elif group and not stripped.startswith(("replacing ", "Replacing ")):
            # A row that is too long for the table goes on in the next line.
            pending += stripped.split()
            if len(pending) >= 4:
                change = _dnf_change(pending, group)
                changes += [change] if change else []
                errors += [] if change else [f"a row of the table can't be read: {' '.join(pending)[:120]}"]
                pending = []
    if not errors:
        said_all = {action: said.get(action, 0) for action in ACTIONS if action != "reinstall"}
        errors += _differences(said_all, changes)
        if not ended:
            errors.append("the simulation's end is missing, so it may not be whole")
    return Transaction(tuple(changes), tuple(dict.fromkeys(errors)))


def _dnf_change(words: list[str], action: str) -> Change | None:
    name, _architecture, version = words[:3]
    if not _DNF_VERSION.match(version):
        return None
    return Change(name, action, version if action == "remove" else None, None if action == "remove" else version)


# -- what is allowed ---------------------------------------------------------------------------------------------------


def check(
    transaction: Transaction,
    profile: Mapping[str, Any],
    operations: Iterable[str],
    installed: Mapping[str, Collection[str]],
) -> list[dict[str, str]]:
    """What forbids the step of `operations` to do this: ``reason`` and ``to_do`` of each; empty if nothing does.

    `installed` has the versions of every installed package by its name. With all operations the whole set is checked
    at once. An error of the package manager comes first.
    """
    family = profile["os"]["family"]
    mine = [operation for operation in OPERATIONS if operation in set(operations)]
    owners = operations_of(profile)
    wanted = {name: version for operation in mine for name, version in packages(profile, operation).items()}
    problems = [
        *(
            _problem(error, "look at the repositories, the key and the holds, then simulate again")
            for error in transaction.errors
        ),
        *(
            _problem(f"{name} is held and would be changed", "release the hold, or change the profile")
            for name in transaction.held
        ),
    ]
    for change in transaction.changes:
        name = plain_name(change.name)
        problems += _forbidden(change, owners.get(name) or owner(name), mine, wanted, profile)
    if not transaction.errors:
        problems += _missing(transaction, wanted, installed, family)
    return problems


def _forbidden(
    change: Change, of: str | None, mine: Collection[str], wanted: Mapping[str, str | None], profile: Mapping[str, Any]
) -> list[dict[str, str]]:
    name, family = plain_name(change.name), profile["os"]["family"]
    did = f"would {change.action} {change.name}"
    versions = " → ".join(version for version in (change.before, change.after) if version)
    shown = f"{did} ({versions})" if versions else did
    if of is not None and of not in mine:
        return [_problem(f"{shown}, which belongs to {of}", f"bring {of} to its profile first, and hold it")]
    if change.action == "remove":
        if name in wanted:
            return [_problem(f"{shown}, which the profile wants", "name all packages of the set, at one version")]
        if of is None:
            return [_problem(f"{shown}, which belongs to no operation", "remove what conflicts by hand, or keep it")]
        return []
    if of is None:
        if change.action == "downgrade":
            return [_problem(f"{shown}, which belongs to no operation", "take packages that go with the system")]
        return []
    if name in wanted:
        if change.after is not None and not fits(family, wanted[name], change.after):
            return [_problem(f"{shown}, and the profile wants {wanted[name]}", "correct the profile or the repository")]
        return []
    driver = profile["driver"]
    found = numbers(upstream(change.after)) if change.after else None
    # A package that comes along with the driver and has a driver's version, but not this one, is of another driver.
    other = found is not None and 100 <= found[0] <= 9999 and found != numbers(driver["version"])
    if of == "driver" and other and name not in OWN_VERSION:
        return [_problem(f"{shown}, which is not of driver {driver['version']}", "name all packages of the set")]
    return []


def _missing(
    transaction: Transaction,
    wanted: Mapping[str, str | None],
    installed: Mapping[str, Collection[str]],
    family: str,
) -> list[dict[str, str]]:
    coming = {plain_name(change.name) for change in transaction.changes if change.after}
    problems = []
    for name, version in wanted.items():
        if name in coming or any(fits(family, version, each) for each in installed.get(name, ())):
            continue
        found = ", ".join(installed.get(name, ())) or "nothing"
        problems.append(
            _problem(
                f"{name} {version or ''}".strip() + f" is wanted, {found} is installed, and nothing would change that",
                "look whether the repository has it",
            )
        )
    return problems


def along(transaction: Transaction, profile: Mapping[str, Any]) -> list[str]:
    """Names of packages of no operation that would come along, or change."""
    listed = operations_of(profile)
    names = {plain_name(change.name) for change in transaction.changes if change.action != "remove"}
    return sorted(name for name in names if name not in listed and owner(name) is None)


def _problem(reason: str, to_do: str) -> dict[str, str]:
    return {"reason": reason, "to_do": to_do}
