# SPDX-License-Identifier: GPL-3.0-or-later
"""ethtool -i, -S, -a, -A on a port of an mlx5 adapter."""

from __future__ import annotations

import os

from rehearsal.hardware import Machine
from rehearsal.hardware.commands import pfc, port_of, real_command

# Counters of `ethtool -S` that every port has (Documentation/networking/…/mellanox/mlx5/counters.rst).
COUNTERS = (
    *("rx_packets", "rx_bytes", "tx_packets", "tx_bytes", "rx_out_of_buffer", "rx_steer_missed_packets"),
    *("rx_vport_unicast_packets", "rx_vport_unicast_bytes", "tx_vport_unicast_packets", "tx_vport_unicast_bytes"),
    *("rx_vport_rdma_unicast_packets", "rx_vport_rdma_unicast_bytes"),
    *("tx_vport_rdma_unicast_packets", "tx_vport_rdma_unicast_bytes"),
    *("tx_packets_phy", "rx_packets_phy", "rx_crc_errors_phy", "tx_bytes_phy", "rx_bytes_phy"),
    *("tx_discards_phy", "rx_discards_phy", "tx_errors_phy", "rx_undersize_pkts_phy", "rx_fragments_phy"),
    *("rx_jabbers_phy", "rx_oversize_pkts_phy", "rx_symbol_err_phy", "rx_corrected_bits_phy"),
    *("rx_buffer_passed_thres_phy", "link_down_events_phy", "rx_pcs_symbol_err_phy"),
    *("rx_pci_signal_integrity", "tx_pci_signal_integrity", "outbound_pci_stalled_rd", "outbound_pci_stalled_wr"),
    *("rx_global_pause", "rx_global_pause_duration", "tx_global_pause", "tx_global_pause_duration"),
    *("tx_pause_storm_warning_events", "tx_pause_storm_error_events"),
)
BY_PRIORITY = ("rx_{}_bytes", "rx_{}_packets", "rx_{}_discards", "rx_{}_marked", "tx_{}_bytes", "tx_{}_packets")
# These appear only while priority flow control is on for the priority.
WITH_PFC = (
    *("rx_{}_pause", "rx_{}_pause_duration", "rx_{}_pause_transition"),
    *("tx_{}_pause", "tx_{}_pause_duration"),
)
ON = ("off", "on")
# All of them, as ethtool.c reads them.
LISTED = (*COUNTERS, *BY_PRIORITY, *(f"!{pattern}" for pattern in WITH_PFC))


def run(arguments: list[str], machine: Machine) -> int:
    """Run ethtool; prints, and gives the exit status."""
    option = arguments[0] if len(arguments) > 1 else ""
    netdev = arguments[1] if option else "".join(arguments)
    state, port = machine.state, port_of(machine.state, netdev)
    if not port or option not in ("-i", "-S", "-a", "-A"):
        return real_command("ethtool", arguments)
    if option == "-i":
        print("driver: mlx5_core")
        print(f"version: {state.text('host/kernel')}")
        print(f"firmware-version: {state.text(f'{port}/firmware_version')} ({state.text(f'{port}/psid')})")
        print("expansion-rom-version: ")
        print(f"bus-info: {state.text(f'{port}/pci_address')}")
        for ability in ("statistics", "test", "eeprom-access", "register-dump", "priv-flags"):
            print(f"supports-{ability}: {'no' if ability in ('eeprom-access', 'register-dump') else 'yes'}")
    elif option == "-S":
        print("NIC statistics:")
        for name in _counters(pfc(state, port)):
            print(f"     {name}: {state.integer(f'{port}/ethtool/{name}')}")
    elif option == "-a":
        print(f"Pause parameters for {netdev}:")
        print(f"Autonegotiate:\t{ON[state.integer(f'{port}/pause_autonegotiate')]}")
        print(f"RX:\t\t{ON[state.integer(f'{port}/pause_rx')]}")
        print(f"TX:\t\t{ON[state.integer(f'{port}/pause_tx')]}\n")
    else:
        return _set_pause(machine, port, arguments[2:])
    return 0


def _counters(flags: list[bool]) -> list[str]:
    names = list(COUNTERS)
    for priority, on in enumerate(flags):
        patterns = BY_PRIORITY + (WITH_PFC if on else ())
        names += [pattern.format(f"prio{priority}") for pattern in patterns]
    return names


def _set_pause(machine: Machine, port: str, words: list[str]) -> int:
    names = {"rx": "pause_rx", "tx": "pause_tx", "autoneg": "pause_autonegotiate"}
    pairs = dict(zip(words[::2], words[1::2]))
    if len(words) % 2 or not set(pairs) <= set(names) or not set(pairs.values()) <= set(ON):
        print("ethtool: bad command line argument(s)\nFor more information run ethtool -h")
        return 1
    if os.geteuid() != 0:
        print("netlink error: Operation not permitted")
        return 75
    if pairs.get("autoneg") == "on":  # the adapter has no such thing
        print("netlink error: Invalid argument")
        return 76
    machine.state.update(port, {names[name]: ON.index(value) for name, value in pairs.items()})
    return 0
