# Copyright (c) 2026, the Ringmaster authors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Tells systemd how a daemon is, by the protocol of sd_notify(3): datagrams to the socket named in NOTIFY_SOCKET.

Nothing here imports Ansible.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Mapping


class ServiceManager:
    """The service manager of this process; does nothing when there is none."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._socket: socket.socket | None = None
        self._address = environment.get("NOTIFY_SOCKET", "")
        if self._address:
            if self._address.startswith("@"):  # an address in Linux' abstract name space
                self._address = "\0" + self._address[1:]
            self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
        self.watchdog_interval = self._watchdog_interval(environment)

    @staticmethod
    def _watchdog_interval(environment: Mapping[str, str]) -> float | None:
        """Return how often in seconds the watchdog is to be fed, half its time as the manual asks; None is never."""
        limit = environment.get("WATCHDOG_USEC", "")
        if environment.get("WATCHDOG_PID", str(os.getpid())) != str(os.getpid()) or not limit.isdigit():
            return None
        return int(limit) / 2_000_000 or None

    def tell(self, *states: str) -> None:
        """Send states such as READY=1; a manager that does not listen is no reason to fail."""
        if self._socket is not None:
            with contextlib.suppress(OSError):  # the watchdog, if any, says what follows
                self._socket.sendto("\n".join(states).encode(), self._address)

    def close(self) -> None:
        """Give the socket back."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None
