# SPDX-License-Identifier: GPL-3.0-or-later
"""The rule of every reader (docs/conventions.md, "Hardware"): what can't be known is null, with its reason."""

from __future__ import annotations

from typing import Any


def assert_every_null_has_a_reason(value: Any) -> None:
    """Look through a document: an object with ``unknown`` gives a reason there for each of its fields that is null."""
    if isinstance(value, list):
        for each in value:
            assert_every_null_has_a_reason(each)
    elif isinstance(value, dict):
        for name, each in value.items():
            if each is None and "unknown" in value:
                assert value["unknown"].get(name), f"{name} is null without a reason"
            assert_every_null_has_a_reason(each)
