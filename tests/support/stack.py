# SPDX-License-Identifier: GPL-3.0-or-later
"""The stack profiles that the collection ships, for tests that change a part of one."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import yaml

FOLDER = Path(__file__).resolve().parents[2] / "meta" / "stack_profiles"
NAMES = sorted(path.stem for path in FOLDER.glob("*.yml"))
_READ: dict[str, Any] = {}


def profile(name: str, /, **changes: Any) -> dict[str, Any]:
    """A fresh copy of a profile. Changes are by path, with two underscores for a dot: ``driver__version="1.2"``."""
    if name not in _READ:
        _READ[name] = yaml.safe_load((FOLDER / f"{name}.yml").read_text(encoding="utf-8"))
    document: dict[str, Any] = copy.deepcopy(_READ[name])
    for path, value in changes.items():
        *folders, last = path.split("__")
        section = document
        for folder in folders:
            section = section[folder]
        section[last] = value
    return document
