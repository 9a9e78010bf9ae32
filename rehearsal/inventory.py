# SPDX-License-Identifier: GPL-3.0-or-later
"""The fleet's inventory, read as Ansible reads it."""

from __future__ import annotations

import json
import subprocess
from dataclasses import dataclass
from typing import Any

from rehearsal.checkout import Checkout, RehearsalError


@dataclass(frozen=True)
class Inventory:
    """Groups with their hosts, and each host's variables (not templated)."""

    groups: dict[str, list[str]]
    variables: dict[str, dict[str, Any]]

    def images(self) -> dict[str, str]:
        """Host → name of its image. Raises RehearsalError when a host names none."""
        without = sorted(host for host, values in self.variables.items() if not values.get("rehearsal_image"))
        if without:
            raise RehearsalError(
                f"expected rehearsal_image for every host, found none for {', '.join(without)}; to do: set it there"
            )
        return {host: str(values["rehearsal_image"]) for host, values in sorted(self.variables.items())}


def read(checkout: Checkout) -> Inventory:
    """Read the rehearsal's inventory. Raises RehearsalError when it can't be read or lists no host."""
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
    variables: dict[str, dict[str, Any]] = document.pop("_meta")["hostvars"]
    if not variables:
        raise RehearsalError(f"expected hosts in {checkout.inventory}, found none; to do: list them in its hosts.yml")
    groups = {name: group for name, group in document.items() if isinstance(group, dict)}

    def members(name: str) -> set[str]:
        group = groups.get(name, {})
        return set(group.get("hosts", [])).union(*(members(child) for child in group.get("children", [])))

    return Inventory({name: sorted(members(name)) for name in groups}, variables)
