# Copyright (c) 2026, the Ringmaster authors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Kernel settings: their names, their values and the files that hold them (sysctl.d(5))."""

from __future__ import annotations

import re

from ansible_collections.ringmaster.inference.plugins.plugin_utils.raw_shell import RawError

_PART = re.compile(r"[A-Za-z0-9_:@%+-][A-Za-z0-9_.:@%+-]*\Z")


def path_of(name: str) -> str:
    """Where a setting is below /proc/sys. Raises RawError for a name that is none.

    As sysctl(8) has it, the first separator decides: ``net.ipv4.conf.eth0/100.forwarding`` and
    ``net/ipv4/conf/eth0.100/forwarding`` are one setting.
    """
    separator = re.search(r"[./]", name)
    path = name
    if separator is not None and separator[0] == ".":
        path = name.translate(str.maketrans("./", "/."))
    parts = path.split("/")
    if len(parts) < 2 or not all(_PART.match(part) for part in parts):
        raise RawError("name of a kernel setting like net.core.somaxconn", repr(name), "correct name")
    return path


def checked_value(value: str) -> str:
    """The value, with single spaces. Raises RawError for one that a line can't hold."""
    if re.search(r"[^\x20-\x7e\t]", value) or not value.strip():
        raise RawError("value to be one line of printable characters", repr(value), "correct value")
    return " ".join(value.split())


def parse_line(line: str) -> tuple[str, str] | None:
    """Path below /proc/sys and value of a line; None for comments and what is no setting.

    A name that begins with ``-`` is one whose absence systemd-sysctl does not complain of.
    """
    text = line.strip()
    if not text or text[0] in "#;":
        return None
    name, equals, value = text.partition("=")
    try:
        return (path_of(name.strip().lstrip("-")), " ".join(value.split())) if equals else None
    except RawError:
        return None


def replaced(text: str, name: str, value: str | None) -> str:
    """The file with this setting, once; None: without it. Other lines stay as they are."""
    path = path_of(name)
    lines: list[str] = []
    placed = value is None
    for line in text.split("\n"):
        setting = parse_line(line)
        if setting is None or setting[0] != path:
            lines.append(line)
        elif not placed:
            lines.append(line if setting[1] == value else f"{name} = {value}")
            placed = True
    if not placed:
        if lines and lines[-1] == "":
            lines.pop()
        lines += [f"{name} = {value}", ""]
    return "\n".join(lines)
