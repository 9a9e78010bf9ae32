# SPDX-License-Identifier: GPL-3.0-or-later
"""Stand-ins for commands of hardware: each module has ``run(arguments, machine)``, prints, and gives an exit status."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from rehearsal.hardware.state import State


def port_of(state: State, netdev: str) -> str:
    """Path of the state of the port with this network interface; empty if none of the simulated ports has it."""
    for index in state.names("ports"):
        if state.text(f"ports/{index}/netdev") == netdev:
            return f"ports/{index}"
    return ""


def pfc(state: State, port: str) -> list[bool]:
    """Whether priority flow control is on, for each of the eight priorities."""
    return [flag == "1" for flag in state.text(f"{port}/pfc").split(",")]


def set_pfc(state: State, port: str, flags: Sequence[bool]) -> None:
    """Switch priority flow control; the adapter then keeps a buffer apart for the priorities that have it."""
    text = ",".join(str(int(flag)) for flag in flags)
    state.update(port, {"pfc": text, "buffer": text})


def dscp_entries(state: State, port: str) -> dict[int, int]:
    """DSCP → priority, as application entries say."""
    entries = state.text(f"{port}/dscp_priority")
    pairs = [entry.split(":") for entry in entries.split(",") if entry]
    return {int(dscp): int(priority) for dscp, priority in sorted(pairs, key=lambda pair: int(pair[0]))}


def set_dscp_entries(state: State, port: str, entries: dict[int, int]) -> None:
    """Write the entries. The driver trusts DSCP while there is one, and PCP while there is none."""
    text = ",".join(f"{dscp}:{priority}" for dscp, priority in sorted(entries.items()))
    state.update(port, {"dscp_priority": text, "trust": "dscp" if entries else "pcp"})


def real_command(name: str, arguments: Sequence[str]) -> int:
    """Give way to the host's own command, for what is not simulated. Gives 1 if there is none."""
    for folder in ("/usr/sbin", "/usr/bin", "/sbin", "/bin"):
        path = f"{folder}/{name}"
        if os.access(path, os.X_OK):
            os.execv(path, [path, *arguments])
    print(f"{name}: no such device among the simulated ones, and no other {name} on this host", file=sys.stderr)
    return 1
