# SPDX-License-Identifier: GPL-3.0-or-later
"""RDMA devices and ports as they are read from a host, with each file missing, empty, refused or full of junk."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ansible_collections.ringmaster.inference.plugins.module_utils import rdma_health
from ansible_collections.ringmaster.inference.plugins.module_utils.commands import Answer
from ansible_collections.ringmaster.inference.plugins.module_utils.rdma import Port, RdmaReader, choose_gid
from tests.support.rdma_host import RdmaHost


@pytest.fixture
def host(tmp_path: Path) -> RdmaHost:
    return RdmaHost(tmp_path)


def port_of(host: RdmaHost) -> Port:
    """The first port."""
    return RdmaReader(host.tree, host).all_ports()[0]


def described(host: RdmaHost, **wish: Any) -> dict[str, Any]:
    """What the reader says of the first port."""
    return RdmaReader(host.tree, host).port(port_of(host), **wish)


def gid(index: int, address: str, netdev: str = "X", kind: str = "RoCE v2") -> dict[str, Any]:
    """An entry of the GID table."""
    return {"index": index, "gid": "", "type": kind, "netdev": netdev, "address": address}


def test_host_without_rdma(tmp_path: Path) -> None:
    host = RdmaHost(tmp_path, ports=0)
    assert RdmaReader(host.tree, host).device_names() == []
    assert RdmaReader(host.tree, host).all_ports() == []


def test_device(host: RdmaHost) -> None:
    assert RdmaReader(host.tree, host).device("mlx5_0") == {
        "device": "mlx5_0",
        "model": "ConnectX-6 Dx",
        "hca_type": "MT4125",
        "firmware": "22.41.1000",
        "psid": "MT_0000000359",
        "node_guid": "b83f:d203:00a1:b2c4",
        "node_type": "CA",
        "pci_address": "0000:3b:00.0",
        "driver": "mlx5_core",
        "numa_node": 0,
        "unknown": {},
    }


def test_port(host: RdmaHost) -> None:
    document = described(host)
    assert {name: document[name] for name in ("device", "port", "netdev", "pci_address", "numa_node")} == {
        "device": "mlx5_0",
        "port": 1,
        "netdev": "ens1np0",
        "pci_address": "0000:3b:00.0",
        "numa_node": 0,
    }
    assert (document["state"], document["phys_state"], document["roce"]) == ("ACTIVE", "LinkUp", True)
    assert (document["rate_gb_per_second"], document["lanes"], document["generation"]) == (100.0, 4, "EDR")
    assert [each["index"] for each in document["gids"]] == [0, 1, 2, 3], "slot 4 is empty"
    assert document["gids"][3] == {
        "index": 3,
        "gid": "0000:0000:0000:0000:0000:ffff:c0a8:0005",
        "type": "RoCE v2",
        "netdev": "ens1np0",
        "address": "192.168.0.5",
    }
    assert document["roce_v2_gid_index"] == 3
    assert document["unknown"] == {}


def test_device_of_a_subfunction_belongs_to_the_function_above_it(host: RdmaHost) -> None:
    function = "/sys/devices/pci0000:3a/0000:3a:00.0/0000:3b:00.0"
    base = f"{function}/mlx5_core.sf.4/infiniband/mlx5_9"
    host.write(f"{base}/ports/1/link_layer", "Ethernet\n")
    host.link(f"{base}/device", f"{function}/mlx5_core.sf.4")
    host.link("/sys/class/infiniband/mlx5_9", base)
    reader = RdmaReader(host.tree, host)
    assert reader.device("mlx5_9")["pci_address"] == "0000:3b:00.0"
    assert reader.port(reader.ports("mlx5_9")[0])["function"] == "sub"


def test_virtual_function_is_told_from_the_physical_one(host: RdmaHost) -> None:
    assert described(host)["function"] == "physical"
    host.link("/sys/class/infiniband/mlx5_0/device/physfn", "/sys/devices/pci0000:3a")
    assert described(host)["function"] == "virtual"


@pytest.mark.parametrize("content", [b"", b"\n", b"\xff\xfe\x00junk", b"N/A", b"4: ACTIVE (maybe)\n"])
@pytest.mark.parametrize("name", ["state", "phys_state", "rate"])
def test_port_file_that_says_nothing(host: RdmaHost, name: str, content: bytes) -> None:
    host.write(host.port_file(0, name), content)
    document = described(host)
    key = "rate_gb_per_second" if name == "rate" else name
    assert document[key] is None
    assert host.port_file(0, name) in document["unknown"][key]


@pytest.mark.parametrize("name", ["state", "rate", "link_layer"])
def test_port_file_that_is_missing(host: RdmaHost, name: str) -> None:
    host.remove(host.port_file(0, name))
    document = described(host)
    key = "rate_gb_per_second" if name == "rate" else name
    assert document[key] is None
    assert document["unknown"][key].endswith("no such file")


def test_no_numa_node_is_unknown_and_not_minus_one(host: RdmaHost) -> None:
    host.write("/sys/class/infiniband/mlx5_0/device/numa_node", "-1\n")
    document = described(host)
    assert document["numa_node"] is None
    assert document["unknown"]["numa_node"] == "the firmware tells no NUMA node"


def test_no_name_is_made_up_for_an_unknown_type(host: RdmaHost) -> None:
    host.write("/sys/class/infiniband/mlx5_0/hca_type", "MT9999\n")
    device = RdmaReader(host.tree, host).device("mlx5_0")
    assert device["model"] is None
    assert "MT9999" in device["unknown"]["model"]


def test_infiniband_port_is_no_roce_port(host: RdmaHost) -> None:
    host.write(host.port_file(0, "link_layer"), "InfiniBand\n")
    document = described(host)
    assert document["roce"] is False
    assert document["roce_v2_gid_index"] is None
    assert document["roce_mtu_bytes"] is None
    assert all(each["address"] is None for each in document["gids"])


# Interfaces


def test_port_whose_interface_is_in_another_namespace(host: RdmaHost, tmp_path: Path) -> None:
    shutil.rmtree(tmp_path / "sys/devices/pci0000:3a/0000:3a:00.0/0000:3b:00.0/net")
    for slot in range(4):
        host.write(host.port_file(0, f"gid_attrs/ndevs/{slot}"), "")
    document = described(host)
    assert document["netdev"] is None
    assert document["mtu_bytes"] is None
    assert {"netdev", "mtu_bytes", "gid_netdev", "roce_v2_gid_index", "roce_mtu_bytes"} <= document["unknown"].keys()


def test_two_ports_of_one_function_are_told_apart(host: RdmaHost) -> None:
    function = "/sys/class/infiniband/mlx5_0/device"
    host.write(f"{function}/net/second/dev_port", "1\n")
    host.write(f"{function}/infiniband/mlx5_0/ports/2/link_layer", "Ethernet\n")
    assert [port.netdev for port in RdmaReader(host.tree, host).all_ports()] == ["ens1np0", "second"]


def test_representors_beside_the_port_are_not_its_interface(host: RdmaHost) -> None:
    host.write("/sys/class/infiniband/mlx5_0/device/net/aaa_representor/dev_port", "0\n")
    assert described(host)["netdev"] == "ens1np0"


def test_port_of_a_bond_uses_the_bonds_gids(host: RdmaHost) -> None:
    for slot in range(4):
        host.write(host.port_file(0, f"gid_attrs/ndevs/{slot}"), "bond0\n")
    host.write("/sys/devices/virtual/net/bond0/mtu", "9000\n")
    host.link("/sys/class/net/ens1np0/master", "/sys/devices/virtual/net/bond0")
    document = described(host)
    assert (document["netdev"], document["gid_netdev"], document["roce_v2_gid_index"]) == ("ens1np0", "bond0", 3)


# The choice of the GID


def test_ipv4_mapped_address_of_the_host_is_chosen() -> None:
    gids = [gid(1, "fe80::1"), gid(3, "fd00::5"), gid(5, "10.0.0.9"), gid(7, "10.0.0.5")]
    assert choose_gid(gids, "X", ["fd00::5", "10.0.0.5"]) == 7
    assert choose_gid(gids, "X", ["10.0.0.5", "10.0.0.9"]) == 7
    assert choose_gid(gids, "X", ["10.0.0.9", "10.0.0.5"]) == 5


def test_else_a_routable_ipv6_address_and_never_the_link_local_one() -> None:
    assert choose_gid([gid(1, "fe80::1"), gid(3, "fd00::5")], "X", ["fe80::1", "fd00::5"]) == 3
    assert choose_gid([gid(1, "fe80::1")], "X", ["fe80::1"]) is None


def test_only_version_2_of_that_interface_counts() -> None:
    gids = [gid(2, "10.0.0.5", kind="IB/RoCE v1"), gid(3, "10.0.0.5", netdev="X.100"), gid(5, "10.0.0.5")]
    assert choose_gid(gids, "X", ["10.0.0.5"]) == 5
    assert choose_gid(gids, "X.100", ["10.0.0.5"]) == 3
    assert choose_gid(gids, "Y", ["10.0.0.5"]) is None


def test_without_ip_the_first_mapped_address_will_do() -> None:
    assert choose_gid([gid(1, "fd00::5"), gid(3, "10.0.0.9")], "X", []) == 3


def test_address_that_is_asked_for_is_the_only_one_that_will_do(host: RdmaHost) -> None:
    assert described(host, address="192.168.0.5")["roce_v2_gid_index"] == 3
    document = described(host, address="192.168.0.6")
    assert document["roce_v2_gid_index"] is None
    assert "192.168.0.6" in document["unknown"]["roce_v2_gid_index"]


def test_vlan_has_a_gid_of_its_own(host: RdmaHost) -> None:
    for attribute, value in (
        ("gids", "0000:0000:0000:0000:0000:ffff:0a64:0005"),
        ("gid_attrs/types", "RoCE v2"),
        ("gid_attrs/ndevs", "ens1np0.100"),
    ):
        host.write(host.port_file(0, f"{attribute}/5"), value)
    host.addresses["ens1np0.100"] = ["10.100.0.5"]
    document = described(host)
    assert document["roce_v2_gid_index_by_netdev"] == {"ens1np0": 3, "ens1np0.100": 5}
    assert document["roce_v2_gid_index"] == 3
    assert described(host, wanted_netdev="ens1np0.100")["roce_v2_gid_index"] == 5


# MTU


def test_active_mtu_comes_from_the_port_where_a_tool_tells_it(host: RdmaHost) -> None:
    host.write("/sys/class/net/ens1np0/mtu", "9000\n")
    document = described(host)
    assert (document["mtu_bytes"], document["roce_mtu_bytes"], document["roce_mtu_source"]) == (9000, 4096, "derived")
    text = "hca_id:\tmlx5_0\n\t\tport:\t1\n\t\t\tactive_mtu:\t\t2048 (4)\n"
    host.broken = lambda command: Answer(0, text) if command[0] == "ibv_devinfo" else None
    document = described(host)
    assert (document["roce_mtu_bytes"], document["roce_mtu_source"]) == (2048, "ibv_devinfo")


# Counters


def test_counters(host: RdmaHost) -> None:
    host.ports["ens1np0"].statistics = {"rx_discards_phy": 3}
    counters = RdmaReader(host.tree, host).counters(port_of(host))
    assert counters["counters"] == {
        "link_downed": 255,
        "port_rcv_data": 1000,
        "port_xmit_data": 2000,
        "port_xmit_wait": None,
        "symbol_error": 0,
    }
    assert counters["saturated_counters"] == ["link_downed"]
    assert (counters["received_bytes"], counters["sent_bytes"]) == (4000, 8000)
    assert "lifespan" not in counters["hw_counters"]
    assert counters["hw_counters"]["packet_seq_err"] == 0
    assert counters["ethtool_counters"] == {"rx_discards_phy": 3}
    assert list(counters["unknown"]) == ["counters.port_xmit_wait"]
    assert "N/A (no PMA)" in counters["unknown"]["counters.port_xmit_wait"]


def test_port_without_counters(host: RdmaHost, tmp_path: Path) -> None:
    folder = tmp_path / "sys/devices/pci0000:3a/0000:3a:00.0/0000:3b:00.0/infiniband/mlx5_0/ports/1"
    shutil.rmtree(folder / "counters")
    shutil.rmtree(folder / "hw_counters")
    host.tools.discard("ethtool")
    counters = RdmaReader(host.tree, host).counters(port_of(host))
    assert (counters["counters"], counters["hw_counters"], counters["ethtool_counters"]) == ({}, {}, None)
    assert {"counters", "hw_counters", "ethtool_counters", "received_bytes"} <= counters["unknown"].keys()
    assert "not found: ethtool" in counters["unknown"]["ethtool_counters"]


def test_one_ethtool_call_a_port(host: RdmaHost) -> None:
    RdmaReader(host.tree, host).counters(port_of(host))
    assert [command for command in host.commands if command[0] == "ethtool"] == [["ethtool", "-S", "ens1np0"]]


def test_sample_leaves_out_what_can_not_be_read(host: RdmaHost) -> None:
    host.write(host.port_file(0, "hw_counters/packet_seq_err"), "N/A")
    host.ports["ens1np0"].statistics = {"tx_vport_rdma_unicast_packets": 7}
    sample = RdmaReader(host.tree, host).sample(port_of(host))
    assert "packet_seq_err" not in sample.hardware
    assert "lifespan" not in sample.hardware
    assert sample.hardware["out_of_sequence"] == 0
    assert sample.ethernet == {"tx_vport_rdma_unicast_packets": 7}
    assert (sample.boot, sample.driver) == ("2f0c5e1b-7f5f-4f0e-9d49-5c2b1a7e9d10", "4")


# The session


def test_session_of_this_very_process(host: RdmaHost) -> None:
    reader = RdmaReader(host.tree, host)
    assert reader.session_netdevs({"SSH_CONNECTION": "10.0.0.1 50022 10.0.0.5 22"}, process=1) == ["eno1"]
    assert reader.session_netdevs({"SSH_CONNECTION": "10.0.0.1 50022 10.9.9.9 22"}, process=1) is None
    assert reader.session_netdevs({}, process=1) is None


def test_sudo_hides_the_session_but_not_from_root(host: RdmaHost) -> None:
    host.write("/proc/300/stat", "300 (python3 (x) y) S 200 1 1\n")
    host.write("/proc/300/environ", b"HOME=/root\0SUDO_USER=deploy\0")
    host.write("/proc/200/stat", "200 (sudo) S 100 1 1\n")
    host.write("/proc/100/stat", "100 (sh) S 1 1 1\n")
    host.write("/proc/100/environ", b"HOME=/home/deploy\0SSH_CONNECTION=10.0.0.1 50022 192.168.0.5 22\0SHELL=/bin/sh\0")
    assert RdmaReader(host.tree, host).session_netdevs({}, process=300) == ["ens1np0"]


def test_parents_in_a_circle_end(host: RdmaHost) -> None:
    host.write("/proc/300/stat", "300 (a) S 301 1 1\n")
    host.write("/proc/301/stat", "301 (b) S 300 1 1\n")
    assert RdmaReader(host.tree, host).session_netdevs({}, process=300) is None


def test_session_over_a_bond_or_vlan_counts_for_what_is_beneath_it(host: RdmaHost) -> None:
    host.addresses["bond0.7"] = ["10.7.0.5"]
    host.link("/sys/class/net/bond0.7/lower_bond0", "/sys/class/net/bond0")
    host.link("/sys/class/net/bond0/lower_ens1np0", "/sys/class/net/ens1np0")
    session = {"SSH_CONNECTION": "10.7.0.1 50022 10.7.0.5 22"}
    assert RdmaReader(host.tree, host).session_netdevs(session, process=1) == ["bond0", "bond0.7", "ens1np0"]


# Nothing makes a traceback

FILES = [
    *("fw_ver", "hca_type", "node_type", "ports/1/state", "ports/1/rate", "ports/1/link_layer", "ports/1/gids/3"),
    *("ports/1/gid_attrs/types/3", "ports/1/gid_attrs/ndevs/3", "ports/1/hw_counters/packet_seq_err"),
    *("ports/1/counters/link_downed", "device/numa_node", "device/net/ens1np0/mtu", "device/net/ens1np0/dev_port"),
    *("device/net/ens1np0/ifindex",),
]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60, deadline=None)
@given(contents=st.dictionaries(st.sampled_from(FILES), st.binary(max_size=60)), output=st.text(max_size=60))
def test_no_content_makes_a_traceback(
    tmp_path_factory: pytest.TempPathFactory, contents: dict[str, bytes], output: str
) -> None:
    host = RdmaHost(tmp_path_factory.mktemp("host"))
    for name, content in contents.items():
        host.write(f"/sys/class/infiniband/mlx5_0/{name}", content)
    host.broken = lambda _command: Answer(0, output)
    reader = RdmaReader(host.tree, host)
    for port in reader.all_ports():
        json.dumps(
            [reader.device(port.device), reader.port(port), reader.counters(port), reader.sample(port).document()]
        )
        document = reader.port(port)
        assert {name for name, value in document.items() if value is None} <= document["unknown"].keys()


def test_sample_reads_only_what_it_is_asked_for(host: RdmaHost) -> None:
    sample = RdmaReader(host.tree, host).sample(port_of(host), {}, ("out_of_sequence", "no_such_counter"))
    assert sample.hardware == {"out_of_sequence": 0}
    assert host.commands == []


def test_names_that_a_judgement_looks_at_are_all_there() -> None:
    """A window over samples with these counters only says the same as one over all."""
    everything = dict.fromkeys((*rdma_health.HARDWARE_COUNTERS, "rx_write_requests"), 10)
    ethernet = dict.fromkeys((*rdma_health.ETHERNET_COUNTERS, "rx_bytes_phy"), 10)

    def sample(seconds: float, factor: int, narrow: bool) -> rdma_health.Sample:
        names = (rdma_health.HARDWARE_COUNTERS, rdma_health.ETHERNET_COUNTERS) if narrow else (everything, ethernet)
        hardware, wire = (dict.fromkeys(chosen, 10 * factor) for chosen in names)
        wire |= dict.fromkeys((rdma_health.SENDER_PACKETS, rdma_health.RECEIVER_PACKETS), 200_000 * factor)
        return rdma_health.Sample(seconds, "b", "4", hardware, wire)

    windows = [rdma_health.judge(sample(0, 1, narrow), sample(60, 2, narrow)) for narrow in (False, True)]
    assert windows[0].document() == windows[1].document()
    assert windows[0].ratio is not None
    unknown = [name for group in windows[1].apart.values() for name in group["unknown"]]
    assert unknown == []
