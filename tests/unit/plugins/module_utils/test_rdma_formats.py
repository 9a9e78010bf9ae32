# SPDX-License-Identifier: GPL-3.0-or-later
"""What sysfs, ethtool, ibv_devinfo and ip print about RDMA ports, good, odd and hostile."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ansible_collections.ringmaster.inference.plugins.module_utils import rdma_formats as formats
from ansible_collections.ringmaster.inference.plugins.module_utils.rdma_formats import Rate

ETHTOOL = """NIC statistics:
     rx_packets: 123
     rx_vport_rdma_unicast_packets: 9000123
     tx_vport_rdma_unicast_packets: 18446744073709551615
     rx_discards_phy: 7
     rx_prio3_pause_duration: 600
     rx_pci_signal_integrity: 0
     outbound_pci_stalled_rd: 1
     tx_pause_storm_warning_events: 2
     rx_global_pause: 3
     link_down_events_phy: 1
     rx_out_of_buffer: 5
     rx0_packets: 99
     ch0_events: 1
     rx_crc_errors_phy: lots
     tx_discards_phy"""
IBV_DEVINFO = """hca_id:\tmlx5_0
\ttransport:\t\t\tInfiniBand (0)
\tfw_ver:\t\t\t\t22.41.1000
\tphys_port_cnt:\t\t\t2
\t\tport:\t1
\t\t\tstate:\t\t\tPORT_ACTIVE (4)
\t\t\tmax_mtu:\t\t4096 (5)
\t\t\tactive_mtu:\t\t1024 (3)
\t\t\tlink_layer:\t\tEthernet
\t\tport:\t2
\t\t\tactive_mtu:\t\t4096 (5)

hca_id:\tmlx5_1
\t\tport:\t1
\t\t\tactive_mtu:\t\t17 (9)
"""


@pytest.mark.parametrize(
    ("text", "word"),
    [("4: ACTIVE", "ACTIVE"), ("5: LinkUp", "LinkUp"), ("5: ACTIVE_DEFER", "ACTIVE_DEFER"), ("1: DOWN", "DOWN")],
)
def test_state(text: str, word: str) -> None:
    assert formats.parse_state(text) == word


@pytest.mark.parametrize("text", [None, "", "ACTIVE", "4:ACTIVE", "4: ", "4: ACTIVE and more", "٤: ACTIVE"])
def test_no_state(text: str | None) -> None:
    assert formats.parse_state(text) is None


@pytest.mark.parametrize(
    ("text", "rate"),
    [
        ("100 Gb/sec (4X EDR)", Rate(100.0, 4, "EDR")),
        ("25 Gb/sec (1X EDR)", Rate(25.0, 1, "EDR")),
        ("2.5 Gb/sec (1X SDR)", Rate(2.5, 1, "SDR")),
        ("400 Gb/sec (4X NDR)", Rate(400.0, 4, "NDR")),
        ("10 Gb/sec (4X)", Rate(10.0, 4, None)),
        ("56 Gb/sec", Rate(56.0, None, None)),
    ],
)
def test_rate(text: str, rate: Rate) -> None:
    assert formats.parse_rate(text) == rate


@pytest.mark.parametrize(
    "text", [None, "", "100", "100 Gb/s", "100 Gb/sec (4X EDR", "-1 Gb/sec", "1e9 Gb/sec", "∞ Gb/sec"]
)
def test_no_rate(text: str | None) -> None:
    assert formats.parse_rate(text) is None


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("0000:3b:00.0", "0000:3b:00.0"),
        ("/sys/devices/pci0000:3a/0000:3B:00.1", "0000:3b:00.1"),
        ("00000000:07:00.0", "0000:07:00.0"),
        ("07:00.0", "0000:07:00.0"),
        ("10000:01:00.0", "10000:01:00.0"),
        ("mlx5_core.sf.4", None),
        ("pci0000:3a", None),
        (None, None),
    ],
)
def test_pci_address(text: str | None, address: str | None) -> None:
    assert formats.parse_pci_address(text) == address


def test_gid_and_the_address_it_stands_for() -> None:
    mapped = "0000:0000:0000:0000:0000:ffff:c0a8:d3f2"
    assert formats.parse_gid(f"{mapped}\n") == mapped
    assert formats.gid_address(mapped) == "192.168.211.242"
    assert formats.gid_address("fe80:0000:0000:0000:ba3f:d2ff:fea1:b2c4") == "fe80::ba3f:d2ff:fea1:b2c4"
    assert formats.is_link_local("fe80::ba3f:d2ff:fea1:b2c4")
    assert not formats.is_link_local("192.168.211.242")
    assert not formats.is_link_local(None)


@pytest.mark.parametrize("text", [None, "", formats.EMPTY_GID, "192.168.1.1", "zz", "0000:0000"])
def test_empty_slot_is_no_gid(text: str | None) -> None:
    assert formats.parse_gid(text) is None


def test_the_same_address_in_other_words() -> None:
    assert formats.same_address("192.168.1.5", "::ffff:192.168.1.5")
    assert formats.same_address("fd00::1", "fd00:0::0001")
    assert not formats.same_address("192.168.1.5", "192.168.1.6")
    assert not formats.same_address("", "")


@pytest.mark.parametrize(
    ("netdev", "roce"),
    [(1500, 1024), (2143, 1024), (2144, 2048), (4191, 2048), (4192, 4096), (9000, 4096), (100, None)],
)
def test_roce_mtu_is_what_fits_beside_its_headers(netdev: int, roce: int | None) -> None:
    assert formats.roce_mtu(netdev) == roce


def test_ethtool_statistics_of_the_port_only() -> None:
    found = formats.parse_ethtool_statistics(ETHTOOL)
    assert found == {
        "rx_vport_rdma_unicast_packets": 9000123,
        "tx_vport_rdma_unicast_packets": 2**64 - 1,
        "rx_discards_phy": 7,
        "rx_prio3_pause_duration": 600,
        "rx_pci_signal_integrity": 0,
        "outbound_pci_stalled_rd": 1,
        "tx_pause_storm_warning_events": 2,
        "rx_global_pause": 3,
        "link_down_events_phy": 1,
        "rx_out_of_buffer": 5,
    }


def test_pause() -> None:
    text = "Pause parameters for ens1np0:\nAutonegotiate:\toff\nRX:\t\toff\nTX:\t\ton\nRX negotiated: on\n"
    assert formats.parse_ethtool_pause(text) == (False, True)
    assert formats.parse_ethtool_pause("RX:\t\tmaybe") == (None, None)


def test_active_mtu_by_device_and_port() -> None:
    assert formats.parse_active_mtus(IBV_DEVINFO) == {("mlx5_0", 1): 1024, ("mlx5_0", 2): 4096}


def test_links_with_their_addresses_in_order() -> None:
    text = json.dumps(
        [
            {"ifname": "lo", "mtu": 65536, "min_mtu": 0, "max_mtu": 0, "addr_info": [{"local": "127.0.0.1"}]},
            {
                "ifname": "ens1np0",
                "mtu": 9000,
                "min_mtu": 68,
                "max_mtu": 9978,
                "addr_info": [{"local": "10.0.0.1"}, {"local": "fe80::1"}, {}, {"local": 7}, None, {"local": "junk"}],
            },
            {"mtu": 5},
            17,
        ]
    )
    links = formats.parse_links(text)
    assert links == {
        "lo": formats.Link("lo", 65536, None, None, ("127.0.0.1",)),
        "ens1np0": formats.Link("ens1np0", 9000, 68, 9978, ("10.0.0.1", "fe80::1")),
    }


@pytest.mark.parametrize("text", ["", "null", "{}", "[[]]", '[{"ifname": 3}]', "[" * 100000, "Object unknown"])
def test_no_links(text: str) -> None:
    assert formats.parse_links(text) == {}


junk = st.one_of(
    st.text(),
    st.binary().map(lambda data: data.decode("utf-8", "replace")),
    st.lists(
        st.sampled_from([*ETHTOOL.splitlines(), *IBV_DEVINFO.splitlines(), ":", "port: -1", "active_mtu: 4096"])
    ).map("\n".join),
)


@given(junk)
def test_no_text_makes_a_traceback(text: str) -> None:
    for parse in (
        formats.parse_state,
        formats.parse_rate,
        formats.parse_pci_address,
        formats.parse_gid,
        formats.gid_address,
        formats.is_link_local,
        formats.parse_ethtool_statistics,
        formats.parse_ethtool_pause,
        formats.parse_active_mtus,
        formats.parse_links,
    ):
        parse(text)


values: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.sampled_from(["ifname", "mtu", "addr_info", "local"]), inner),
)


@given(values)
def test_no_document_of_ip_makes_a_traceback(document: Any) -> None:
    formats.parse_links(json.dumps(document))
