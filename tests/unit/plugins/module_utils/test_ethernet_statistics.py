# SPDX-License-Identifier: GPL-3.0-or-later
"""Counters of an interface by ethtool's interface of the kernel: drivers that change their minds, and none at all."""

from __future__ import annotations

import errno
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ansible_collections.ringmaster.inference.plugins.module_utils.ethernet_statistics import (
    GET_STATISTICS,
    GET_STRING_SET_INFO,
    GET_STRINGS,
    MOST_STATISTICS,
    NAME_BYTES,
    EthernetStatistics,
)
from ansible_collections.ringmaster.inference.plugins.module_utils.rdma_formats import parse_ethtool_statistics


class Driver:
    """Answers as a driver with these counters would; `grow` adds one between two commands."""

    def __init__(self, counters: dict[str, int], grow: bool = False) -> None:
        self.counters = counters
        self.grow = grow
        self.asked: list[int] = []

    def request(self, netdev: str, command: bytearray) -> None:
        if netdev != "ens1":
            raise OSError(errno.ENODEV, "No such device")
        (number,) = struct.unpack_from("=I", command)
        self.asked.append(number)
        if number == GET_STRING_SET_INFO:
            assert struct.unpack_from("=Q", command, 8) == (2,)
            struct.pack_into("=QI", command, 8, 2 if self.counters else 0, len(self.counters))
            return
        if self.grow:
            self.counters[f"rx_prio{len(self.counters) % 8}_pause"] = 1
        struct.pack_into("=I", command, 8 if number == GET_STRINGS else 4, len(self.counters))
        for position, (name, value) in enumerate(self.counters.items()):
            if number == GET_STRINGS:
                struct.pack_into(f"={NAME_BYTES}s", command, 12 + NAME_BYTES * position, name.encode())
            else:
                assert number == GET_STATISTICS
                struct.pack_into("=Q", command, 8 + 8 * position, value)


NAMES = st.sampled_from(
    [
        "rx_packets_phy",
        "tx_vport_rdma_unicast_packets",
        "rx_prio3_pause",
        "rx0_packets",
        "ch0_events",
        "link_down_events_phy",
    ]
)


@given(st.dictionaries(NAMES, st.integers(0, (1 << 64) - 1), min_size=1))
def test_same_as_ethtool_prints(counters: dict[str, int]) -> None:
    printed = "NIC statistics:\n" + "".join(f"     {name}: {value}\n" for name, value in counters.items())
    assert EthernetStatistics(Driver(counters).request).read("ens1") == (parse_ethtool_statistics(printed), "")


def test_names_that_change_places_are_noticed() -> None:
    driver = Driver({"rx_prio3_pause": 1, "rx_packets_phy": 2})
    statistics = EthernetStatistics(driver.request)
    statistics.read("ens1")
    driver.counters = {"rx_prio4_pause": 5, "rx_packets_phy": 6}
    assert statistics.read("ens1")[0] == {"rx_prio4_pause": 5, "rx_packets_phy": 6}


def test_counters_that_come_while_they_are_read_spoil_the_reading() -> None:
    driver = Driver({"rx_packets_phy": 1}, grow=True)
    counters, reason = EthernetStatistics(driver.request).read("ens1")
    assert counters is None
    assert reason == "ens1: the driver changed its counters while they were read"


def test_interface_that_is_gone_and_driver_without_counters() -> None:
    assert EthernetStatistics(Driver({"a": 1}).request).read("ens9") == (None, "ens9: No such device")
    assert EthernetStatistics(Driver({}).request).read("ens1") == (None, "ens1: the driver has no counters")
    driver = Driver({"a": 1})

    def absurd(_netdev: str, command: bytearray) -> None:
        struct.pack_into("=QI", command, 8, 2, MOST_STATISTICS + 1)

    driver.request = absurd  # type: ignore[method-assign]
    assert EthernetStatistics(driver.request).read("ens1")[0] is None


@pytest.mark.parametrize("netdev", ["", "no-such-interface", "x" * 16, "x" * 300])
def test_kernel_itself_is_asked_and_refuses(netdev: str) -> None:
    statistics = EthernetStatistics()
    counters, reason = statistics.read(netdev)
    statistics.close()
    assert counters is None
    assert reason.startswith(f"{netdev}: ")


def test_kernel_itself_is_asked_about_the_loopback_interface() -> None:
    statistics = EthernetStatistics()
    for _unused in range(2):
        assert statistics.read("lo") == (None, "lo: the driver has no counters")
        statistics.close()
