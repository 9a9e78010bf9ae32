# SPDX-License-Identifier: GPL-3.0-or-later
"""Ports that a test has to name before its server listens, kept from everybody else until the test ends."""

from __future__ import annotations

import socket


def reserve_port() -> socket.socket:
    """Bind a TCP port of all IPv4 addresses without listening; its number is ``getsockname()[1]``.

    A port that is looked up and given back may be taken by another process before the server comes. On Linux a socket
    that is bound with SO_REUSEADDR and does not listen leaves the port to servers that also set SO_REUSEADDR before
    they bind (HAProxy, asyncio and http.server do), while the kernel gives it to nobody who asks for any free port;
    connections to it are refused until a server listens. The caller closes it when the port is no more needed.
    """
    reservation = socket.socket()
    reservation.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    reservation.bind(("", 0))
    return reservation


def port_of(reservation: socket.socket) -> int:
    """Return the number of a reserved port."""
    return int(reservation.getsockname()[1])
