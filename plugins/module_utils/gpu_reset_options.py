# Copyright (c) 2026, the Ringmaster authors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The options of ``gpu_reset``, shared by the action plugin, which checks them, and the module, which gets them."""

from __future__ import annotations

from typing import Any

_HOOK: dict[str, Any] = {
    "type": "dict",
    "options": {
        "url": {"type": "str"},
        "method": {"type": "str", "default": "POST"},
        "headers": {"type": "dict", "no_log": True},
        "body": {"type": "raw"},
        "validate_certs": {"type": "bool", "default": True},
        "command": {"type": "list", "elements": "str"},
        "where": {"type": "str", "choices": ["controller", "host"], "default": "controller"},
        "timeout": {"type": "int", "default": 600},
    },
    "mutually_exclusive": [("url", "command")],
    "required_one_of": [("url", "command")],
}

ARGUMENTS: dict[str, Any] = {
    "uuid": {"type": "str", "required": True},
    "reason": {"type": "str"},
    "services": {"type": "list", "elements": "str", "default": []},
    "drain": _HOOK,
    "undrain": _HOOK,
    "max_resets": {"type": "int", "default": 2},
    "window": {"type": "int", "default": 86400},
    "stop_timeout": {"type": "int", "default": 300},
    "start_timeout": {"type": "int", "default": 1800},
    "reset_timeout": {"type": "int", "default": 300},
    "verify_timeout": {"type": "int", "default": 60},
    "unfinished": {"type": "str", "choices": ["finish", "abandon"], "default": "finish"},
}
# Numbers that must be more than nothing.
POSITIVE = ("max_resets", "window", "stop_timeout", "start_timeout", "reset_timeout", "verify_timeout")
