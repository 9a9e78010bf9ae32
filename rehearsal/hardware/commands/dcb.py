# SPDX-License-Identifier: GPL-3.0-or-later
"""dcb of iproute2, as it works on a port of the kernel's own mlx5 driver."""

from __future__ import annotations

import json
import sys

from rehearsal.hardware import Machine
from rehearsal.hardware.commands import dscp_entries, pfc, port_of, real_command, set_dscp_entries, set_pfc
from rehearsal.hardware.state import TYPE_CHECKING, State

if TYPE_CHECKING:
    from typing import Any

BUFFER_BYTES = (262_016, 130_944)  # what the adapter has, and what one of two buffers gets
# Names that iproute2 shows for DSCP values unless -N is given (RFC 2474, 2597, 3246).
DSCP_NAMES = {
    **{8 * number: f"CS{number}" for number in range(8)},
    **{8 * family + 2 * drop: f"AF{family}{drop}" for family in range(1, 5) for drop in range(1, 4)},
    46: "EF",
}


class _RefusedError(Exception):
    """The command can't do what it was asked; the text is what the real one prints."""


def run(arguments: list[str], machine: Machine) -> int:
    """Run dcb; prints, and gives the exit status."""
    flags = [word for word in arguments if word.startswith("-")]
    words = [word for word in arguments if not word.startswith("-")]
    netdev = words[words.index("dev") + 1] if "dev" in words[:-1] else ""
    port = port_of(machine.state, netdev)
    if not port:
        return real_command("dcb", arguments)
    what, action = words[0], words[1]
    values = words[words.index("dev") + 2 :]
    try:
        if action == "show":
            _print(_show(machine.state, port, what, flags), what, flags)
        else:
            _change(machine.state, port, what, action, values)
            machine.tree.refresh()
    except _RefusedError as refusal:
        print(refusal, file=sys.stderr)
        return 1
    return 0


def _show(state: State, port: str, what: str, flags: list[str]) -> dict[str, Any]:
    if what == "pfc":
        shown: dict[str, Any] = {"pfc_cap": 8, "macsec_bypass": False, "delay": 0, "prio_pfc": pfc(state, port)}
        if "-s" in flags:
            shown["requests"] = [state.integer(f"{port}/ethtool/tx_prio{number}_pause") for number in range(8)]
            shown["indications"] = [state.integer(f"{port}/ethtool/rx_prio{number}_pause") for number in range(8)]
        return shown
    if what == "dcbx":
        return {"host": True, "ieee": True} if state.text(f"{port}/dcbx") == "os" else {"ieee": True, "cee": True}
    if what == "app":
        entries = dscp_entries(state, port)
        names: dict[int, str] = {} if "-N" in flags else DSCP_NAMES
        return {"dscp_prio": [[names.get(dscp, dscp), one] for dscp, one in entries.items()]} if entries else {}
    if what == "buffer":
        total, half = BUFFER_BYTES
        flags_on = [int(flag) for flag in pfc(state, port)]
        return {"prio_buffer": flags_on, "buffer_size": [half, half, 0, 0, 0, 0, 0, 0], "total_size": total}
    if what == "apptrust":  # the driver does not offer it
        raise _RefusedError("Attribute not found: No such file or directory")
    raise _RefusedError(f'Object "{what}" is unknown, try "dcb help".')


def _print(shown: dict[str, Any], what: str, flags: list[str]) -> None:
    if "-j" in flags:
        print(json.dumps(shown, separators=(",", ":")))
        return
    on = {True: "on", False: "off"}
    if what == "pfc":
        print(f"pfc-cap {shown['pfc_cap']} macsec-bypass {on[shown['macsec_bypass']]} delay {shown['delay']} ")
        print("prio-pfc", " ".join(f"{number}:{on[flag]}" for number, flag in enumerate(shown["prio_pfc"])), "")
    elif what == "dcbx":
        print(" ".join(shown), "")
    elif what == "app" and shown:
        print("dscp-prio", " ".join(f"{dscp}:{priority}" for dscp, priority in shown["dscp_prio"]), "")
    elif what == "buffer":
        print("prio-buffer", " ".join(f"{number}:{value}" for number, value in enumerate(shown["prio_buffer"])), "")
        print(f"total-size {shown['total_size']}b")


def _change(state: State, port: str, what: str, action: str, values: list[str]) -> None:
    if what == "pfc" and action == "set":
        set_pfc(state, port, _flags(pfc(state, port), values))
    elif what == "dcbx" and action == "set":
        if not values or not set(values) <= {"host", "lld-managed", "cee", "ieee", "static"}:
            raise _RefusedError(f'What is "{" ".join(values)}"?')
        state.set(f"{port}/dcbx", "os" if "host" in values else "firmware")
    elif what == "app" and action in ("add", "replace", "del", "flush"):
        set_dscp_entries(state, port, _entries(dscp_entries(state, port), action, values))
    else:
        raise _RefusedError(f'Command "{action}" is unknown, try "dcb {what} help".')


def _flags(former: list[bool], values: list[str]) -> list[bool]:
    flags, parameter = list(former), ""
    for word in values:
        key, colon, value = word.partition(":")
        if not colon:
            parameter = word
        elif parameter != "prio-pfc" or value not in ("on", "off") or (key != "all" and key not in "01234567"):
            raise _RefusedError(f'What is "{word}"?')
        else:
            for number in range(8) if key == "all" else [int(key)]:
                flags[number] = value == "on"
    return flags


def _entries(entries: dict[int, int], action: str, values: list[str]) -> dict[int, int]:
    if not values:
        return {} if action == "flush" else entries
    if values[0] != "dscp-prio":
        raise _RefusedError(f'What is "{values[0]}"?')
    if action == "flush":
        return {}
    codes = {name: dscp for dscp, name in DSCP_NAMES.items()}
    changed = dict(entries)
    for word in values[1:]:
        name, _colon, priority = word.partition(":")
        dscp = codes.get(name.upper(), int(name) if name.isdecimal() else -1)
        if not 0 <= dscp < 64 or priority not in tuple("01234567"):
            raise _RefusedError(f'What is "{word}"?')
        if action != "del":
            # The driver maps a DSCP to one priority: a new entry takes the place of the former one.
            changed[dscp] = int(priority)
        elif changed.pop(dscp, None) != int(priority):
            raise _RefusedError("RTNETLINK answers: No such file or directory")
    return changed
