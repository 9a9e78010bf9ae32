# SPDX-License-Identifier: GPL-3.0-or-later
"""mlnx_qos of NVIDIA's OFED tools."""

from __future__ import annotations

import argparse

from rehearsal.hardware import Machine
from rehearsal.hardware.commands import dscp_entries, pfc, port_of, set_dscp_entries, set_pfc

FAILED = 1


def run(arguments: list[str], machine: Machine) -> int:
    """Run mlnx_qos; prints, and gives the exit status."""
    parser = argparse.ArgumentParser(prog="mlnx_qos", allow_abbrev=False)
    parser.add_argument("-i", "--interface", required=True)
    parser.add_argument("-f", "--pfc")
    parser.add_argument("--trust", choices=("pcp", "dscp"))
    parser.add_argument("--dscp2prio", action="append", default=[])
    parser.add_argument("-d", "--dcbx", choices=("fw", "os"))
    try:
        options = parser.parse_args(arguments)
    except SystemExit as ended:
        return 0 if ended.args == (0,) else 2
    state, port = machine.state, port_of(machine.state, options.interface)
    if not port:
        print(f"Can't open interface {options.interface}: No such device")
        return FAILED
    if options.trust and options.dscp2prio:
        print("Can't set trust and dscp2prio in one command")
        return FAILED
    if options.dcbx:
        state.set(f"{port}/dcbx", {"os": "os", "fw": "firmware"}[options.dcbx])
    if options.pfc:
        flags = options.pfc.split(",")
        if len(flags) != 8 or not set(flags) <= {"0", "1"}:
            print("Bad value for the option --pfc: eight of 0 or 1, with commas")
            return FAILED
        set_pfc(state, port, [flag == "1" for flag in flags])
    if options.trust == "dscp":
        # With the trust come the default entries: eight DSCPs in a row have one priority.
        set_dscp_entries(state, port, {**{dscp: dscp >> 3 for dscp in range(64)}, **dscp_entries(state, port)})
    elif options.trust == "pcp":
        set_dscp_entries(state, port, {})
    for change in options.dscp2prio:
        parts = change.split(",")
        if len(parts) != 3 or parts[0] not in ("set", "del") or not all(part.isdecimal() for part in parts[1:]):
            print("Bad value for the option --dscp2prio: set|del,DSCP,PRIORITY")
            return FAILED
        entries = dscp_entries(state, port)
        if parts[0] == "set":
            entries[int(parts[1])] = int(parts[2])
        else:
            entries.pop(int(parts[1]), None)
        set_dscp_entries(state, port, entries)
    if options.dcbx or options.pfc or options.trust or options.dscp2prio:
        machine.tree.refresh()
    _show(machine, port)
    return 0


def _show(machine: Machine, port: str) -> None:
    state = machine.state
    flags = [int(flag) for flag in pfc(state, port)]
    print(f"DCBX mode: {'OS' if state.text(f'{port}/dcbx') == 'os' else 'Firmware'} controlled")
    print(f"Priority trust state: {state.text(f'{port}/trust')}")
    if state.text(f"{port}/trust") == "dscp":
        print("dscp2prio mapping:")
        entries = dscp_entries(state, port)
        for priority in range(8):
            codes = [f"{dscp:02}" for dscp in sorted(entries, reverse=True) if entries[dscp] == priority]
            for start in range(0, len(codes), 8):
                print(f"\tprio:{priority} dscp:{','.join(codes[start : start + 8])},")
    print("Receive buffer size (bytes): 130944,130944,0,0,0,0,0,0,max_buffer_size=262016")
    print("Cable len: 7")
    print("PFC configuration:")
    for name, values in {"priority": range(8), "enabled": flags, "buffer": flags}.items():
        print(f"\t{name:12}{'   '.join(map(str, values))}")
    for number in range(8):
        # The first two priorities change places, as in the adapter's default.
        print(
            f"tc: {number} ratelimit: unlimited, tsa: vendor\n\t priority:  {(1, 0)[number] if number < 2 else number}"
        )
