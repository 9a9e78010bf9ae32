# SPDX-License-Identifier: GPL-3.0-or-later
"""What a daemon tells systemd."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from ansible_collections.ringmaster.inference.plugins.module_utils.service_manager import ServiceManager


def test_states_come_as_lines_of_one_datagram(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener:
        listener.bind(str(tmp_path / "notify"))
        manager = ServiceManager({"NOTIFY_SOCKET": str(tmp_path / "notify")})
        manager.tell("READY=1", "STATUS=well")
        assert listener.recv(100) == b"READY=1\nSTATUS=well"
        manager.close()
        manager.close()
        manager.tell("STOPPING=1")  # to nobody


def test_abstract_address() -> None:
    name = f"\0ringmaster-test-{os.getpid()}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener:
        listener.bind(name)
        manager = ServiceManager({"NOTIFY_SOCKET": f"@{name[1:]}"})
        manager.tell("READY=1")
        assert listener.recv(100) == b"READY=1"
        manager.close()


def test_manager_that_does_not_listen_is_no_failure(tmp_path: Path) -> None:
    manager = ServiceManager({"NOTIFY_SOCKET": str(tmp_path / "nothing")})
    manager.tell("READY=1")
    manager.close()
    ServiceManager({}).tell("READY=1")


@pytest.mark.parametrize(
    ("environment", "interval"),
    [
        ({}, None),
        ({"WATCHDOG_USEC": "3000000"}, 1.5),
        ({"WATCHDOG_USEC": "0"}, None),
        ({"WATCHDOG_USEC": "x"}, None),
        ({"WATCHDOG_USEC": "3000000", "WATCHDOG_PID": "1"}, None),
        ({"WATCHDOG_USEC": "3000000", "WATCHDOG_PID": str(os.getpid())}, 1.5),
    ],
)
def test_watchdog_is_fed_twice_in_its_time(environment: dict[str, str], interval: float | None) -> None:
    assert ServiceManager(environment).watchdog_interval == interval
