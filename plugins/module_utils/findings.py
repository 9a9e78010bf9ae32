# Copyright (c) 2026, the Ringmaster authors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What a reader found about one thing: values by field, and for each value that can't be known the reason why."""

from __future__ import annotations

from typing import Any

from ansible_collections.ringmaster.inference.plugins.module_utils.file_tree import FileTree


class Findings:
    """Collects fields. A field that is None has a reason in ``unknown``; neither zero nor "off" ever stands for it."""

    def __init__(self) -> None:
        self.values: dict[str, Any] = {}
        self.unknown: dict[str, str] = {}

    def note(self, field: str, value: Any, reason: str = "") -> None:
        """Keep `value`; if it is None, `reason` says why."""
        self.values[field] = value
        if value is None:
            self.unknown[field] = reason or "not known"

    def note_file(self, field: str, value: Any, tree: FileTree, path: str, expected: str) -> None:
        """Keep what was read from the file at `path`; if it is None, the reason is what the file says instead."""
        self.note(field, value, why(tree, path, expected) if value is None else "")

    def document(self) -> dict[str, Any]:
        """All fields, and ``unknown``: ``{field: reason}``."""
        return {**self.values, "unknown": self.unknown}


def why(tree: FileTree, path: str, expected: str) -> str:
    """Why the file at `path` gave no value: that it can't be read, or that it holds something else than `expected`."""
    complaint = tree.complaint(path)
    if complaint:
        return f"{path}: {complaint}"
    found = tree.text(path) or ""
    return f"{path}: expected {expected}, found {found[:40]!r}"
