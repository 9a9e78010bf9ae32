# SPDX-License-Identifier: GPL-3.0-or-later
"""rdma of iproute2: `link show` and `statistic show link`."""

from __future__ import annotations

import json
import sys
from typing import Any

from rehearsal.hardware import Machine
from rehearsal.hardware.commands.ibv_devinfo import netdev_number
from rehearsal.hardware.tree import HARDWARE_COUNTERS


def run(arguments: list[str], machine: Machine) -> int:
    """Run rdma; prints, and gives the exit status."""
    flags = [word for word in arguments if word.startswith("-")]
    words = [word for word in arguments if not word.startswith("-") and word != "show"]
    statistic = words[:1] == ["statistic"]
    words = words[1:] if statistic else words
    if words[:1] != ["link"]:
        print(f"Unknown object {' '.join(words[:1])!r}: this simulation has link and statistic", file=sys.stderr)
        return 1
    state, found = machine.state, []
    for number, index in enumerate(state.names("ports")):
        port = f"ports/{index}"
        device = state.text(f"{port}/device")
        if len(words) > 1 and words[1] not in (device, f"{device}/1"):
            continue
        found.append(_statistic(machine, port, device) if statistic else _link(machine, port, device, number))
    if len(words) > 1 and not found:
        print(f"Wrong device name: {words[1]}", file=sys.stderr)
        return 1
    if any("j" in flag for flag in flags):
        print(json.dumps(found, separators=(",", ":")))
    else:
        for one in found:
            values = " ".join(f"{name} {value}" for name, value in one.items() if name not in _HEAD)
            print(f"link {one['ifname']}/{one['port']} {values} ")
    return 0


_HEAD = ("ifindex", "ifname", "port", "netdev_index")


def _link(machine: Machine, port: str, device: str, number: int) -> dict[str, Any]:
    up = machine.state.integer(f"{port}/link")
    return {
        "ifindex": number,
        "ifname": device,
        "port": 1,
        "state": "ACTIVE" if up else "DOWN",
        "physical_state": "LINK_UP" if up else "DISABLED",
        "netdev": machine.state.text(f"{port}/netdev"),
        "netdev_index": netdev_number(machine, port, "ifindex"),
    }


def _statistic(machine: Machine, port: str, device: str) -> dict[str, Any]:
    counters = {name: machine.state.integer(f"{port}/hw_counters/{name}") for name in HARDWARE_COUNTERS}
    return {"ifname": device, "port": 1, **counters}
