# SPDX-License-Identifier: GPL-3.0-or-later
"""ibv_devinfo of rdma-core."""

from __future__ import annotations

from rehearsal.hardware import Machine
from rehearsal.hardware.state import State

# RoCE MTU → libibverbs' number for it.
MTUS = {256: 1, 512: 2, 1024: 3, 2048: 4, 4096: 5}
# What a RoCE packet's headers take of the interface's MTU (iboe_get_mtu in Linux' ib_addr.h).
HEADERS = 96


def active_mtu(netdev_mtu: int) -> int:
    """The largest RoCE MTU that fits; the smallest where none does."""
    return max([mtu for mtu in MTUS if mtu <= netdev_mtu - HEADERS], default=256)


def netdev_number(machine: Machine, port: str, name: str) -> int:
    """A number of the port's network interface as the kernel gives it: mtu, ifindex."""
    text = machine.tree.read(f"sys/class/net/{machine.state.text(f'{port}/netdev')}/{name}")
    return int(text) if text.isdecimal() else 0


def run(arguments: list[str], machine: Machine) -> int:
    """Run ibv_devinfo; prints, and gives the exit status."""
    state = machine.state
    wanted = arguments[arguments.index("-d") + 1] if "-d" in arguments[:-1] else ""
    ports = [f"ports/{index}" for index in state.names("ports")]
    ports = [port for port in ports if wanted in ("", state.text(f"{port}/device"))]
    if not ports:
        print("No IB devices found" if not wanted else f"No IB device {wanted} found")
        return 1
    if "-l" in arguments:
        print("\n".join([f"{len(ports)} HCAs found:", *(f"\t{state.text(f'{port}/device')}" for port in ports), ""]))
        return 0
    for port in ports:
        print("\n".join(_device(state, port, active_mtu(netdev_number(machine, port, "mtu")))))
    return 0


def _device(state: State, port: str, mtu: int) -> list[str]:
    guid = state.text(f"{port}/node_guid")
    colons = ":".join(guid[start : start + 4] for start in range(0, 16, 4))
    hca_type = state.text(f"{port}/hca_type")
    up = state.integer(f"{port}/link")
    device = {
        "transport": "InfiniBand (0)",
        "fw_ver": state.text(f"{port}/firmware_version"),
        "node_guid": colons,
        "sys_image_guid": colons,
        "vendor_id": "0x02c9",
        "vendor_part_id": hca_type[2:],
        "hw_ver": "0x0",
        "board_id": state.text(f"{port}/psid"),
        "phys_port_cnt": "1",
    }
    values = {
        "state": "PORT_ACTIVE (4)" if up else "PORT_DOWN (1)",
        "max_mtu": "4096 (5)",
        "active_mtu": f"{mtu} ({MTUS[mtu]})",
        "sm_lid": "0",
        "port_lid": "0",
        "port_lmc": "0x00",
        "link_layer": "Ethernet",
    }
    lines = [f"hca_id:\t{state.text(f'{port}/device')}"]
    lines += [f"\t{name}:{_tabs(name, 32)}{value}" for name, value in device.items()]
    lines.append("\t\tport:\t1")
    lines += [f"\t\t\t{name}:{_tabs(name, 24)}{value}" for name, value in values.items()]
    return [*lines, ""]


def _tabs(name: str, column: int) -> str:
    return "\t" * ((column - len(name) - 1 + 7) // 8)
