# SPDX-License-Identifier: GPL-3.0-or-later
"""The fleet of `make rehearse`, as the benches that play on it need it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

from rehearsal import fleet, inventory
from rehearsal.checkout import Checkout

ROOT = Path(__file__).resolve().parents[2]


class Rehearsed(NamedTuple):
    """A fleet that is up: the address of each host, its inventory, the first gateway and the first model."""

    checkout: Checkout
    addresses: dict[str, str]
    hosts: inventory.Inventory
    gateway: str
    model: str

    def secret(self, name: str) -> str:
        """Return a secret that was made when the fleet started."""
        return (self.checkout.state / "secrets" / name).read_text().strip()


def rehearsed() -> Rehearsed:
    """Look at the fleet of this checkout, or of the state that RINGMASTER_REHEARSAL_STATE names."""
    state = Path(os.environ.get("RINGMASTER_REHEARSAL_STATE", ROOT / ".rehearsal"))
    checkout = Checkout(ROOT, ROOT / "inventories" / "rehearsal", state)
    hosts = inventory.read(checkout)
    gateway = hosts.groups["gateways"][0]
    model = next(iter(hosts.variables[gateway]["ringmaster_models"]))
    return Rehearsed(checkout, fleet.addresses(checkout), hosts, gateway, model)
