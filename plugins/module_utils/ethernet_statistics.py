# Copyright (c) 2026, the Ringmaster authors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The counters of ``ethtool -S``, asked of the kernel without starting ``ethtool``: for those that ask every second.

The requests are those of Linux' ``include/uapi/linux/ethtool.h`` and take no privilege. Which counter has which name
is the driver's own affair and changes while it runs (mlx5 counts pauses of a priority only while flow control is on
for it), so that names are asked for with every reading, and taken apart only when they changed. Nothing here imports
Ansible.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import socket
import struct
from collections.abc import Callable

from ansible_collections.ringmaster.inference.plugins.module_utils.rdma_formats import is_port_statistic

SIOCETHTOOL = 0x8946
STRING_SET_STATISTICS = 1  # ETH_SS_STATS
GET_STRINGS = 0x1B  # ETHTOOL_GSTRINGS
GET_STATISTICS = 0x1D  # ETHTOOL_GSTATS
GET_STRING_SET_INFO = 0x37  # ETHTOOL_GSSET_INFO

NAME_BYTES = 32  # ETH_GSTRING_LEN
INTERFACE_BYTES = 16  # IFNAMSIZ, with the NUL byte
MOST_STATISTICS = 100_000
# The kernel writes as many counters as there are in that moment, whatever room it was given: queues that came since
# they were counted must find some.
SPARE_STATISTICS = 8192

Request = Callable[[str, bytearray], None]
"""Hands a command of ethtool to an interface's driver, and takes the answer in the same buffer. Raises OSError."""


class EthernetStatistics:
    """Counters of network interfaces. `request` stands in for the kernel in tests."""

    def __init__(self, request: Request | None = None) -> None:
        self._kernel = _Kernel()
        self._request = request or self._kernel.request
        self._buffer = bytearray()
        # Interface → names as the driver gave them, and where those of the port are among them.
        self._names: dict[str, tuple[bytes, list[tuple[int, str]]]] = {}

    def close(self) -> None:
        """Give the socket back; the next reading opens another one."""
        self._kernel.close()

    def read(self, netdev: str) -> tuple[dict[str, int] | None, str]:
        """The port's counters as :func:`.rdma_formats.parse_ethtool_statistics` gives them, or None and the reason."""
        try:
            count = self._count(netdev)
            wanted = self._wanted(netdev, count)
            command = self._command(8 * (count + SPARE_STATISTICS), struct.pack("=II", GET_STATISTICS, count))
            self._request(netdev, command)
        except OSError as error:
            return None, f"{netdev}: {os.strerror(error.errno) if error.errno else error}"
        if struct.unpack_from("=I", command, 4)[0] != count:
            return None, f"{netdev}: the driver changed its counters while they were read"
        return {name: struct.unpack_from("=Q", command, 8 + 8 * position)[0] for position, name in wanted}, ""

    def _count(self, netdev: str) -> int:
        command = self._command(8, struct.pack("=IIQ", GET_STRING_SET_INFO, 0, 1 << STRING_SET_STATISTICS))
        self._request(netdev, command)
        _command, _reserved, there, count = struct.unpack_from("=IIQI", command)
        if not there or count > MOST_STATISTICS:
            raise OSError(f"the driver has {count if there else 'no'} counters")
        return int(count)

    def _wanted(self, netdev: str, count: int) -> list[tuple[int, str]]:
        head = struct.pack("=III", GET_STRINGS, STRING_SET_STATISTICS, count)
        command = self._command(NAME_BYTES * (count + SPARE_STATISTICS), head)
        self._request(netdev, command)
        if struct.unpack_from("=I", command, 8)[0] != count:
            raise OSError("the driver changed its counters while they were read")
        names = bytes(memoryview(command)[12 : 12 + NAME_BYTES * count])
        known = self._names.get(netdev)
        if known is None or known[0] != names:
            known = names, _positions(names)
            self._names[netdev] = known
        return known[1]

    def _command(self, room: int, head: bytes) -> bytearray:
        """A buffer that begins with `head` and has `room` bytes behind it; one for all, as most of it is never used."""
        if len(self._buffer) < len(head) + room:
            self._buffer = bytearray(len(head) + room)
        self._buffer[: len(head)] = head
        return self._buffer


def _positions(names: bytes) -> list[tuple[int, str]]:
    found = []
    for start in range(0, len(names), NAME_BYTES):
        name = names[start : start + NAME_BYTES].split(b"\0", 1)[0].decode("utf-8", "replace")
        if is_port_statistic(name):
            found.append((start // NAME_BYTES, name))
    return found


class _Kernel:
    """Requests by a socket of this process' network namespace."""

    def __init__(self) -> None:
        self._socket: socket.socket | None = None

    def request(self, netdev: str, command: bytearray) -> None:
        name = netdev.encode("utf-8")
        if len(name) >= INTERFACE_BYTES:
            raise OSError("a name that is too long for a network interface")
        # struct ifreq: the name, and a union of which a pointer is used here.
        pinned = (ctypes.c_char * len(command)).from_buffer(command)
        request = struct.pack(f"={INTERFACE_BYTES}s{ctypes.sizeof(ctypes.c_void_p)}s", name, _pointer(pinned))
        if self._socket is None:
            self._socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC)
        fcntl.ioctl(self._socket, SIOCETHTOOL, request.ljust(40, b"\0"))

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None


def _pointer(pinned: ctypes.Array[ctypes.c_char]) -> bytes:
    return struct.pack("P", ctypes.addressof(pinned))
