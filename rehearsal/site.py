# SPDX-License-Identifier: GPL-3.0-or-later
"""The main job: the site's playbook on the fleet, a real answer through the edge, and the summary."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rehearsal import chat, fleet
from rehearsal.checkout import Checkout, RehearsalError, read_json, say

EDGE_PORT = 8080
SCHEDULER_PORT = 8406
PROMETHEUS_PORT = 9090


def inventory(checkout: Checkout) -> dict[str, Any]:
    """The inventory as ansible-inventory lists it: groups, and `_meta.hostvars` (values not templated)."""
    finished = subprocess.run(
        ["ansible-inventory", "--inventory", str(checkout.inventory), "--list"],
        capture_output=True,
        text=True,
        env=checkout.environment,
        check=False,
    )
    if finished.returncode != 0:
        raise RehearsalError(f"the inventory {checkout.inventory} can't be read: {finished.stderr.strip()}")
    document: dict[str, Any] = json.loads(finished.stdout)
    return document
