# Copyright (c) 2026, the Ringmaster authors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Versions of packages and drivers: which is newer, and whether what is installed is what is wanted.

Sources: Debian Policy 5.6.12 for Debian's order; rpm's documentation (rpm-version(7)) for that of RPM. Nothing here
imports Ansible.
"""

from __future__ import annotations

import re

# A version that ends so means every package revision of one upstream version: ``580.159.04-*``.
ANY_REVISION = "-*"
FAMILIES = ("Debian", "RedHat")


def numbers(version: str | None) -> tuple[int, ...] | None:
    """The numbers of a version of numbers and dots only (``535.129.03`` → 535, 129, 3); None for anything else."""
    if version is None or not re.match(r"[0-9]{1,9}(\.[0-9]{1,9}){0,9}\Z", version):
        return None
    return tuple(int(part) for part in version.split("."))


def leading_numbers(text: str | None) -> tuple[int, ...] | None:
    """The numbers that a text begins with (``6.1.0-57-amd64`` → 6, 1, 0); None if it begins with none."""
    match = re.match(r"[0-9]{1,9}(\.[0-9]{1,9}){0,9}", text or "")
    return numbers(match[0]) if match else None


def below(version: str | None, least: str | None) -> bool | None:
    """Whether a version of numbers is lower than `least` (missing numbers are 0); None if either is no such version."""
    first, second = numbers(version), numbers(least)
    if first is None or second is None:
        return None
    length = max(len(first), len(second))
    return first + (0,) * (length - len(first)) < second + (0,) * (length - len(second))


def upstream(version: str) -> str:
    """A package's version without its epoch and its package revision: ``3:580.159.04-1.el9`` → ``580.159.04``."""
    return re.sub(r"^[0-9]+:", "", version).rpartition("-")[0] or re.sub(r"^[0-9]+:", "", version)


def compare(family: str, first: str, second: str) -> int:
    """-1, 0 or 1: the first version is older, the same or newer, as the package manager of `family` orders them.

    For RPM an epoch that only one of the two names is not compared: people and repositories often leave it out.
    """
    if family == "RedHat":
        return _compare_rpm(first, second)
    return _compare_debian(first, second)


def fits(family: str, wanted: str | None, installed: str) -> bool:
    """Whether an installed version is the wanted one. `wanted` may be None (any) or end in ``-*`` (any revision)."""
    if wanted is None:
        return True
    if wanted.endswith(ANY_REVISION):
        return upstream(installed) == upstream(wanted)
    if family == "RedHat" and "-" not in wanted:
        return upstream(installed) == upstream(wanted + "-0")
    return compare(family, wanted, installed) == 0


def _compare_debian(first: str, second: str) -> int:
    for left, right in zip(_debian_parts(first), _debian_parts(second)):
        order = _compare_debian_part(left, right)
        if order:
            return order
    return 0


def _debian_parts(version: str) -> tuple[str, str, str]:
    epoch, colon, rest = version.partition(":")
    if not colon:
        epoch, rest = "0", version
    upstream_part, dash, revision = rest.rpartition("-")
    return epoch, (upstream_part if dash else rest), (revision if dash else "0")


def _compare_debian_part(first: str, second: str) -> int:
    while first or second:
        left, right = _split_off(first, r"[^0-9]*"), _split_off(second, r"[^0-9]*")
        if left != right:
            return -1 if _debian_weights(left) < _debian_weights(right) else 1
        first, second = first[len(left) :], second[len(right) :]
        left, right = _split_off(first, r"[0-9]*"), _split_off(second, r"[0-9]*")
        order = _compare_digits(left, right)
        if order:
            return order
        first, second = first[len(left) :], second[len(right) :]
    return 0


def _debian_weights(text: str) -> list[tuple[int, int]]:
    """``~`` before the end, the end before letters, letters before all others."""
    weights = [(-1 if character == "~" else 1 if character.isalpha() else 2, ord(character)) for character in text]
    return [*weights, (0, 0)]


def _compare_rpm(first: str, second: str) -> int:
    (left_epoch, left), (right_epoch, right) = _rpm_epoch(first), _rpm_epoch(second)
    if left_epoch is not None and right_epoch is not None and left_epoch != right_epoch:
        return _compare_digits(left_epoch, right_epoch)
    left_version, _dash, left_release = left.partition("-")
    right_version, _dash, right_release = right.partition("-")
    order = _compare_rpm_part(left_version, right_version)
    return order or _compare_rpm_part(left_release, right_release)


def _rpm_epoch(version: str) -> tuple[str | None, str]:
    match = re.match(r"([0-9]+):(.*)\Z", version, re.DOTALL)
    return (match[1], match[2]) if match else (None, version)


def _compare_rpm_part(first: str, second: str) -> int:
    separators = r"[^A-Za-z0-9~^]*"
    while True:
        first, second = first[len(_split_off(first, separators)) :], second[len(_split_off(second, separators)) :]
        mark = next((each for each in "~^" if each in (first[:1], second[:1])), "")
        if mark:
            if first[:1] != second[:1]:
                # A tilde is older than all; a caret newer than the end, and older than anything else that follows.
                other = second if first[:1] == mark else first
                marked = 1 if mark == "^" and not other else -1
                return marked if first[:1] == mark else -marked
            first, second = first[1:], second[1:]
            continue
        if not first or not second:
            return (first > second) - (first < second)
        pattern = r"[0-9]+" if first[0].isascii() and first[0].isdigit() else r"[A-Za-z]+"
        left, right = _split_off(first, pattern), _split_off(second, pattern)
        if not right:  # a number is newer than letters
            return 1 if left[0].isdigit() else -1
        step = _compare_digits(left, right) if left[0].isdigit() else (left > right) - (left < right)
        if step:
            return step
        first, second = first[len(left) :], second[len(right) :]


def _compare_digits(first: str, second: str) -> int:
    left, right = first.lstrip("0"), second.lstrip("0")
    return ((len(left), left) > (len(right), right)) - ((len(left), left) < (len(right), right))


def _split_off(text: str, pattern: str) -> str:
    match = re.match(pattern, text)
    return match[0] if match else ""
