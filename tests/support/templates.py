# SPDX-License-Identifier: GPL-3.0-or-later
"""A role's own variables, for tests that have its templates filled in without a run of Ansible."""

from __future__ import annotations

from typing import Any

from ansible.template import trust_as_template


def trusted(value: Any) -> Any:
    """Mark every text in a value as a template of ours, as Ansible does with what it reads from a role."""
    if isinstance(value, str):
        return trust_as_template(value)
    if isinstance(value, dict):
        return {key: trusted(item) for key, item in value.items()}
    return [trusted(item) for item in value] if isinstance(value, list) else value
