# Copyright (c) 2026, the Ringmaster authors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What the kernel, ``ethtool``, ``ibv_devinfo`` and ``ip`` print about RDMA ports, taken apart.

Each function takes the text as it was printed and returns what it says, or None where it says nothing that is
understood; none raises, whatever the text is. Formats: Linux ``Documentation/ABI/stable/sysfs-class-infiniband``,
``drivers/infiniband/core/sysfs.c`` and ``drivers/infiniband/hw/mlx5/counters.c``, ethtool(8), rdma-core's
``ibv_devinfo``, iproute2's ``ip -json``. Nothing here imports Ansible.
"""

from __future__ import annotations

import ipaddress
import json
import math
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from ansible_collections.ringmaster.inference.plugins.module_utils.file_tree import parse_integer

ROCE_V2 = "RoCE v2"
ROCE_V1 = "IB/RoCE v1"
EMPTY_GID = "0000:0000:0000:0000:0000:0000:0000:0000"

# The steps of an InfiniBand MTU in bytes; what RoCE uses is derived from the network interface's, which has to carry up
# to 96 bytes of headers besides (Linux include/rdma/ib_addr.h, iboe_get_mtu).
RDMA_MTUS = (4096, 2048, 1024, 512, 256)
ROCE_HEADERS = 96  # bytes

# PCI device numbers of the mlx5 driver (Linux drivers/net/ethernet/mellanox/mlx5/core/main.c), printed in decimal.
MODELS = {
    "MT4113": "Connect-IB",
    "MT4115": "ConnectX-4",
    "MT4117": "ConnectX-4 Lx",
    "MT4119": "ConnectX-5",
    "MT4121": "ConnectX-5 Ex",
    "MT4123": "ConnectX-6",
    "MT4125": "ConnectX-6 Dx",
    "MT4126": "ConnectX virtual function",
    "MT4127": "ConnectX-6 Lx",
    "MT4129": "ConnectX-7",
    "MT4131": "ConnectX-8",
    "MT41682": "BlueField",
    "MT41686": "BlueField-2",
    "MT41692": "BlueField-3",
}

# Error fields of the port's PMA view stop at their largest value instead of wrapping: name -> width in bits.
SATURATING_BITS = {
    "symbol_error": 16,
    "port_rcv_errors": 16,
    "port_xmit_discards": 16,
    "link_downed": 8,
    "link_error_recovery": 8,
    "local_link_integrity_errors": 4,
    "excessive_buffer_overrun_errors": 4,
}

# Of the thousand lines of `ethtool -S`, those about the port; the rest is about each queue of the driver.
_PORT_STATISTIC = re.compile(
    r"(?:[rt]x_vport_rdma_\w+|\w+_phy|[rt]x_prio[0-7]_\w+|[rt]x_global_pause\w*|tx_pause_storm_\w+|[rt]x_pci_signal_integrity"
    r"|outbound_pci_\w+|rx_out_of_buffer|rx_steer_missed_packets)\Z"
)
_STATE = re.compile(r"(\d{1,3}): (\w+)\Z", re.ASCII)
_RATE = re.compile(r"(\d{1,6}(?:\.\d{1,3})?) Gb/sec(?: \((\d{1,3})X(?: (\w+))?\))?\Z", re.ASCII)
_PCI_ADDRESS = re.compile(r"(?:([0-9a-fA-F]{4,8}):)?([0-9a-fA-F]{2}):([0-9a-fA-F]{2})\.([0-7])\Z")


@dataclass(frozen=True)
class Rate:
    """Speed of a link, `gigabits` a second. `lanes` and `generation` (``EDR``) are None where the kernel omits them."""

    gigabits: float
    lanes: int | None
    generation: str | None


def parse_state(text: str | None) -> str | None:
    """The word of ``4: ACTIVE`` or ``5: LinkUp``."""
    found = _STATE.match(text or "")
    return found.group(2) if found else None


def parse_rate(text: str | None) -> Rate | None:
    """``100 Gb/sec (4X EDR)``, ``2.5 Gb/sec (1X SDR)``, also without the bracket."""
    found = _RATE.match(text or "")
    if not found:
        return None
    return Rate(float(found.group(1)), int(found.group(2)) if found.group(2) else None, found.group(3))


def parse_pci_address(text: str | None) -> str | None:
    """``0000:3b:00.0`` from a name in ``/sys/bus/pci/devices`` or a path that ends with one."""
    found = _PCI_ADDRESS.match((text or "").rsplit("/", 1)[-1])
    if not found:
        return None
    domain = int(found.group(1) or "0", 16)
    return f"{domain:04x}:{found.group(2)}:{found.group(3)}.{found.group(4)}".lower()


def parse_gid(text: str | None) -> str | None:
    """A GID in the kernel's long form, small letters; None for an empty slot or no GID."""
    address = _address(text)
    if address is None or address.version != 6 or int(address) == 0:
        return None
    # Not `exploded`, which Python 3.13 writes with dots for an IPv4-mapped address.
    return ":".join(f"{int(address) >> shift & 0xFFFF:04x}" for shift in range(112, -1, -16))


def gid_address(gid: str | None) -> str | None:
    """The IP address that a RoCE GID stands for: IPv4 for a mapped one (``::ffff:a.b.c.d``), else the IPv6 address."""
    address = _address(gid)
    if not isinstance(address, ipaddress.IPv6Address):
        return None
    return str(address.ipv4_mapped or address)


def is_link_local(address: str | None) -> bool:
    """Whether it is an IPv6 address that no router carries on (``fe80::/10``)."""
    parsed = _address(address)
    return isinstance(parsed, ipaddress.IPv6Address) and parsed.is_link_local


def _address(text: str | None) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address((text or "").strip())
    except ValueError:
        return None


def same_address(one: str | None, other: str | None) -> bool:
    """Whether two texts mean the same IP address; an IPv4 address and the IPv6 form that holds it are the same."""

    def plain(text: str | None) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
        address = _address(text)
        return (address.ipv4_mapped or address) if isinstance(address, ipaddress.IPv6Address) else address

    return plain(one) is not None and plain(one) == plain(other)


def roce_mtu(netdev_mtu: int) -> int | None:
    """The MTU in bytes that RoCE takes on an interface with that MTU; None if the interface's is too small for any."""
    return next((mtu for mtu in RDMA_MTUS if mtu <= netdev_mtu - ROCE_HEADERS), None)


def parse_ethtool_statistics(text: str) -> dict[str, int]:
    """The port's counters of ``ethtool -S``; those of single queues, and values that are no number, are left out."""
    found = {}
    for line in text.splitlines():
        name, colon, value = line.strip().rpartition(":")
        number = parse_integer(value)
        if colon and number is not None and number >= 0 and is_port_statistic(name):
            found[name] = number
    return found


def is_port_statistic(name: str) -> bool:
    """Whether a counter of ``ethtool -S`` is about the port; the others are about single queues of the driver."""
    return _PORT_STATISTIC.match(name) is not None


def parse_ethtool_pause(text: str) -> tuple[bool | None, bool | None]:
    """Global pause of ``ethtool -a``: whether it is on for receiving and for sending."""

    def on(direction: str) -> bool | None:
        found = re.search(rf"^{direction}:\s*(on|off)\s*$", text, re.MULTILINE | re.ASCII)
        return None if found is None else found.group(1) == "on"

    return on("RX"), on("TX")


def parse_active_mtus(text: str) -> dict[tuple[str, int], int]:
    """Active MTU in bytes by RDMA device and port, of ``ibv_devinfo``."""
    found: dict[tuple[str, int], int] = {}
    device, port = "", 0
    for line in text.splitlines():
        name, _colon, value = (part.strip() for part in line.partition(":"))
        if name == "hca_id":
            device, port = value, 0
        elif name == "port":
            port = parse_integer(value) or 0
        elif name == "active_mtu" and device and port > 0:
            mtu = parse_integer(value.split(" ")[0])
            if mtu in RDMA_MTUS:
                found[device, port] = mtu
    return found


@dataclass(frozen=True)
class Link:
    """A network interface of ``ip -json -details address show``. MTUs are in bytes; the bounds are the driver's."""

    netdev: str
    mtu: int | None = None
    minimum_mtu: int | None = None
    maximum_mtu: int | None = None
    addresses: tuple[str, ...] = ()


def parse_links(text: str) -> dict[str, Link]:
    """Interfaces by name, their addresses in the kernel's order (the first of a network is the primary one)."""
    try:
        document = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    links = {}
    for entry in _dicts(document):
        name = entry.get("ifname")
        if not isinstance(name, str) or not name:
            continue
        addresses = [each.get("local") for each in _dicts(entry.get("addr_info"))]
        links[name] = Link(
            name,
            _count(entry.get("mtu")),
            _count(entry.get("min_mtu")) or None,
            _count(entry.get("max_mtu")) or None,  # 0 is "the driver names none"
            tuple(address for address in addresses if isinstance(address, str) and _address(address)),
        )
    return links


def _dicts(value: Any) -> Iterable[dict[str, Any]]:
    return [each for each in value if isinstance(each, dict)] if isinstance(value, list) else []


def _count(value: Any) -> int | None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value) or value < 0:
        return None
    return int(value)
