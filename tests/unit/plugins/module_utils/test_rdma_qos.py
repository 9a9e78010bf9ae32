# SPDX-License-Identifier: GPL-3.0-or-later
"""Settings of a RoCE port: read, refused, compared, set, and told exactly when only half of them came into force."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ansible_collections.ringmaster.inference.plugins.module_utils import rdma_qos
from ansible_collections.ringmaster.inference.plugins.module_utils.commands import Answer
from ansible_collections.ringmaster.inference.plugins.module_utils.rdma_qos import (
    Quality,
    RdmaQos,
    RdmaQosError,
    Wanted,
    check,
    parse_map,
)
from tests.support.rdma_host import RdmaHost

NETDEV = "ens1np0"
LOSSLESS = Wanted(
    mtu=9000,
    global_pause_rx=False,
    global_pause_tx=False,
    trust="dscp",
    dscp_to_priority={26: 3},
    pfc_priorities=[3],
    roce_mode="RoCE v2",
    traffic_class=106,
)


@pytest.fixture
def host(tmp_path: Path) -> RdmaHost:
    return RdmaHost(tmp_path)


@pytest.fixture
def ofed(tmp_path: Path) -> RdmaHost:
    return RdmaHost(tmp_path, tools=["mlnx_qos"], ofed=True)


def quality(host: RdmaHost) -> Quality:
    """The settings of the first port as read."""
    qos = RdmaQos(host.tree, host)
    return qos.quality.read(qos.find(NETDEV))


def brought_about(host: RdmaHost, wanted: Wanted) -> Quality:
    """What the module does with a port."""
    qos = RdmaQos(host.tree, host)
    port = qos.find(NETDEV)
    found = qos.quality.read(port)
    qos.check_port(port, wanted, found)
    return qos.apply(port, wanted, found, qos.differences(port, wanted, found))


def refusal(host: RdmaHost, wanted: Wanted) -> str:
    """Why that is refused; nothing may have been changed."""
    with pytest.raises(RdmaQosError) as caught:
        brought_about(host, wanted)
    assert host.changes == []
    return str(caught.value)


# Reading


def test_settings_as_found_with_dcb(host: RdmaHost) -> None:
    host.ports[NETDEV].pfc = {3}
    host.ports[NETDEV].apps = {26: 3}
    document = quality(host).document()
    unknown = document.pop("unknown")
    assert document == {
        "tool": "dcb",
        "dcbx_owner": "host",
        "trust": "dscp",
        "dscp_to_priority": {"26": 3},
        "pfc_priorities": [3],
        "pfc_capacity": 8,
        "ecn_priorities": None,
        "ecn_notification_priorities": None,
        "ecn_reaction_priorities": None,
        "global_pause_rx": True,
        "global_pause_tx": True,
        "roce_mode": "RoCE v2",
        "traffic_class": 0,
        "driver_traffic_class": None,
    }
    assert unknown.keys() == {name for name, value in document.items() if value is None}
    assert "no such file" in unknown["ecn_priorities"]


def test_settings_as_found_with_mlnx_qos(ofed: RdmaHost) -> None:
    ofed.write("/sys/class/net/ens1np0/ecn/roce_rp/enable/5", "0\n")
    ofed.write("/sys/class/infiniband/mlx5_0/tc/1/traffic_class", "Global tclass=106\n")
    found = quality(ofed)
    assert found.tool == "mlnx_qos"
    assert found.ecn_notification_priorities == list(range(8))
    assert found.ecn_reaction_priorities == [0, 1, 2, 3, 4, 6, 7]
    assert found.ecn_priorities == [0, 1, 2, 3, 4, 6, 7]
    assert found.driver_traffic_class == 106


def test_host_with_no_tool_at_all(host: RdmaHost) -> None:
    host.tools = set()
    found = quality(host)
    assert found.pfc_priorities is None
    assert found.unknown["pfc_priorities"] == "neither dcb nor mlnx_qos is installed"
    assert found.unknown["global_pause_rx"] == "not found: ethtool"
    assert found.dcbx_owner is None
    assert "dcbx_owner" in found.unknown


def test_default_roce_mode_is_unknown_until_somebody_made_its_folder(host: RdmaHost, tmp_path: Path) -> None:
    (tmp_path / "sys/kernel/config/rdma_cm/mlx5_0").rename(tmp_path / "away")
    assert "nobody made this folder" in quality(host).unknown["roce_mode"]
    (tmp_path / "sys/kernel/config/rdma_cm").rmdir()
    assert "not loaded" in quality(host).unknown["traffic_class"]


@pytest.mark.parametrize("content", ["", "RoCE v3\n", "\xff"])
def test_default_roce_mode_that_is_not_understood(host: RdmaHost, content: str) -> None:
    host.write("/sys/kernel/config/rdma_cm/mlx5_0/ports/1/default_roce_mode", content)
    assert quality(host).roce_mode is None


# Refusals, before anything is changed


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ({64: 3}, "DSCPs from 0 to 63"),
        ({-1: 3}, "DSCPs from 0 to 63"),
        ({"AF31": 3}, "'AF31'"),
        ({True: 3}, "DSCPs from 0 to 63"),
        ({26: 8}, "priorities from 0 to 7"),
        ({26: "x"}, "'x' for DSCP 26"),
        ({26: None}, "None for DSCP 26"),
        ({26: 3, "26": 3}, "DSCP 26 twice"),
    ],
)
def test_map_that_is_none(entries: dict[Any, Any], message: str) -> None:
    with pytest.raises(RdmaQosError, match=message):
        parse_map(entries)


def test_map_with_text_as_json_has_it() -> None:
    assert parse_map({"26": "3", 8: 1}) == {26: 3, 8: 1}


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        (Wanted(pfc_priorities=[3, 8]), "from 0 to 7 in pfc_priorities. Found 8"),
        (Wanted(ecn_priorities=[-1]), "from 0 to 7 in ecn_priorities"),
        (Wanted(traffic_class=256), "traffic_class from 0 to 255"),
        (Wanted(mtu=67), "mtu from 68"),
        (Wanted(trust="pcp", dscp_to_priority={26: 3}), "trust=pcp"),
        (Wanted(pfc_priorities=[3], global_pause_tx=True), "global pause to be off"),
    ],
)
def test_values_that_no_port_can_have(wanted: Wanted, message: str) -> None:
    with pytest.raises(RdmaQosError, match=message):
        check(wanted)


def test_values_that_are_fine() -> None:
    check(LOSSLESS)
    check(Wanted(pfc_priorities=[], global_pause_rx=True, global_pause_tx=True, trust="pcp", dscp_to_priority={}))


@pytest.mark.parametrize("netdev", ["", "a/b", "..", "-x", "a b", "x" * 16, "a;b", "ens1\n"])
def test_name_that_is_no_interface(host: RdmaHost, netdev: str) -> None:
    with pytest.raises(RdmaQosError, match="name of a network interface"):
        RdmaQos(host.tree, host).find(netdev)


def test_interface_that_is_not_there_or_not_a_roce_ports(host: RdmaHost) -> None:
    qos = RdmaQos(host.tree, host)
    with pytest.raises(RdmaQosError, match=r"\(ens1np0\). Found nope: no such interface"):
        qos.find("nope")
    host.write("/sys/class/net/eno1/mtu", "1500\n")
    with pytest.raises(RdmaQosError, match="eno1: no RDMA device behind it"):
        qos.find("eno1")
    host.link("/sys/devices/virtual/net/bond0/lower_ens1np0", "/sys/class/net/ens1np0")
    host.link("/sys/class/net/bond0", "/sys/devices/virtual/net/bond0")
    with pytest.raises(RdmaQosError, match="bond0: it stands on ens1np0"):
        qos.find("bond0")
    host.write(host.port_file(0, "link_layer"), "InfiniBand\n")
    with pytest.raises(RdmaQosError, match="link layer InfiniBand"):
        qos.find(NETDEV)


def test_more_priorities_than_the_port_has(host: RdmaHost) -> None:
    host.ports[NETDEV].pfc_capacity = 2
    assert "at most 2 priorities" in refusal(host, Wanted(pfc_priorities=[1, 2, 3]))
    assert brought_about(host, Wanted(pfc_priorities=[3, 3, 4])).pfc_priorities == [3, 4]


def test_lldpad_owns_the_port(host: RdmaHost) -> None:
    host.write("/proc/4711/comm", "lldpad\n")
    assert "systemctl disable --now lldpad" in refusal(host, LOSSLESS)
    assert brought_about(host, Wanted(traffic_class=106)).traffic_class == 106, "what it does not negotiate is free"


@pytest.mark.parametrize("kind", ["inbox", "ofed"])
def test_firmware_owns_the_port_until_it_is_taken_over(tmp_path: Path, kind: str) -> None:
    host = RdmaHost(tmp_path, tools=["mlnx_qos" if kind == "ofed" else "dcb"], ofed=kind == "ofed")
    host.ports[NETDEV].host_dcbx = False
    assert "dcbx=host" in refusal(host, Wanted(pfc_priorities=[3]))
    after = brought_about(host, Wanted(pfc_priorities=[3], take_dcbx=True))
    assert (after.dcbx_owner, after.pfc_priorities) == ("host", [3])


def test_mtu_beyond_the_driver(host: RdmaHost) -> None:
    assert "from 68 to 9978" in refusal(host, Wanted(mtu=9979))


def test_trust_in_dscp_needs_an_entry_where_the_driver_has_no_switch(host: RdmaHost) -> None:
    assert "trusts DSCP only while there are some" in refusal(host, Wanted(trust="dscp"))
    host.ports[NETDEV].apps = {26: 3}
    assert brought_about(host, Wanted(trust="dscp")).trust == "dscp"


def test_what_the_host_can_not_do(host: RdmaHost, tmp_path: Path) -> None:
    qos = RdmaQos(host.tree, host)
    port = qos.find(NETDEV)
    wanted = Wanted(ecn_priorities=[3], pfc_priorities=[3], traffic_class=106, roce_mode="RoCE v2", mtu=9000)
    assert list(qos.impossible(port, wanted, qos.quality.read(port))) == ["ecn_priorities"]
    (tmp_path / "sys/kernel/config/rdma_cm").rename(tmp_path / "away")
    host.tools.discard("dcb")
    reasons = qos.impossible(port, wanted, qos.quality.read(port))
    assert set(reasons) == {"ecn_priorities", "pfc_priorities", "traffic_class", "roce_mode"}
    assert all(reasons.values())


# Setting


def test_everything_through_dcb_and_only_once(host: RdmaHost) -> None:
    after = brought_about(host, LOSSLESS)
    assert (after.trust, after.dscp_to_priority, after.pfc_priorities) == ("dscp", {26: 3}, [3])
    assert (after.global_pause_rx, after.global_pause_tx, after.traffic_class) == (False, False, 106)
    assert host.read("/sys/class/net/ens1np0/mtu") == "9000\n"
    assert host.changes == [
        ["ip", "link", "set", "dev", NETDEV, "mtu", "9000"],
        ["ethtool", "-A", NETDEV, "rx", "off", "tx", "off"],
        ["dcb", "app", "replace", "dev", NETDEV, "dscp-prio", "26:3"],
        ["dcb", "pfc", "set", "dev", NETDEV, "prio-pfc", "all:off", "3:on"],
    ]
    host.commands.clear()
    brought_about(host, LOSSLESS)
    assert host.changes == []


def test_everything_through_mlnx_qos_and_only_once(ofed: RdmaHost) -> None:
    wanted = Wanted(**{**vars(LOSSLESS), "ecn_priorities": [3], "traffic_class": None})
    after = brought_about(ofed, wanted)
    assert (after.trust, after.pfc_priorities, after.ecn_priorities) == ("dscp", [3], [3])
    assert after.dscp_to_priority is not None
    assert after.dscp_to_priority[26] == 3
    assert after.dscp_to_priority[8] == 1, "the entries of others stay"
    ofed.commands.clear()
    brought_about(ofed, wanted)
    assert ofed.changes == []


def test_only_what_differs_is_set(host: RdmaHost) -> None:
    brought_about(host, LOSSLESS)
    host.ports[NETDEV].pfc = set()
    host.commands.clear()
    brought_about(host, LOSSLESS)
    assert [command[:2] for command in host.changes] == [["dcb", "pfc"]]


def test_entries_of_others_stay_unless_the_map_is_exclusive(host: RdmaHost) -> None:
    host.ports[NETDEV].apps = {8: 1, 26: 2}
    assert brought_about(host, Wanted(dscp_to_priority={26: 3})).dscp_to_priority == {8: 1, 26: 3}
    wanted = Wanted(dscp_to_priority={26: 3}, dscp_exclusive=True)
    assert brought_about(host, wanted).dscp_to_priority == {26: 3}
    assert brought_about(host, Wanted(dscp_to_priority={}, dscp_exclusive=True)).trust == "pcp"


def test_trust_in_pcp_removes_the_entries(host: RdmaHost) -> None:
    host.ports[NETDEV].apps = {8: 1, 26: 2}
    after = brought_about(host, Wanted(trust="pcp"))
    assert (after.trust, after.dscp_to_priority) == ("pcp", {})


def test_exclusive_map_through_mlnx_qos_removes_what_the_tool_brings(ofed: RdmaHost) -> None:
    after = brought_about(ofed, Wanted(trust="dscp", dscp_to_priority={26: 3}, dscp_exclusive=True))
    assert after.dscp_to_priority == {26: 3}


def test_pause_comes_back_only_after_pfc_is_gone(host: RdmaHost) -> None:
    brought_about(host, LOSSLESS)
    host.commands.clear()
    brought_about(host, Wanted(pfc_priorities=[], global_pause_rx=True, global_pause_tx=True))
    assert [command[:2] for command in host.changes] == [["dcb", "pfc"], ["ethtool", "-A"]]


def test_one_direction_of_pause(host: RdmaHost) -> None:
    after = brought_about(host, Wanted(global_pause_rx=False))
    assert (after.global_pause_rx, after.global_pause_tx) == (False, True)


def test_folder_in_configfs_is_made(host: RdmaHost, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "sys/kernel/config/rdma_cm/mlx5_0"
    folder.rename(tmp_path / "away")

    def make(path: str) -> None:
        # The kernel fills a new folder by itself.
        assert path == str(folder)
        (tmp_path / "away").rename(folder)

    monkeypatch.setattr(rdma_qos.os, "mkdir", make)
    after = brought_about(host, Wanted(roce_mode="IB/RoCE v1", traffic_class=104))
    assert (after.roce_mode, after.traffic_class) == ("IB/RoCE v1", 104)


def test_traffic_class_is_set_in_both_places(ofed: RdmaHost) -> None:
    qos = RdmaQos(ofed.tree, ofed)
    port = qos.find(NETDEV)
    ofed.write("/sys/kernel/config/rdma_cm/mlx5_0/ports/1/default_roce_tos", "106\n")
    wanted = Wanted(traffic_class=106)
    assert qos.differences(port, wanted, qos.quality.read(port)) == {"traffic_class": (None, 106)}
    after = brought_about(ofed, wanted)
    assert (after.traffic_class, after.driver_traffic_class) == (106, 106)
    assert ofed.read("/sys/class/infiniband/mlx5_0/tc/1/traffic_class") == "106\n"


@pytest.mark.parametrize(
    ("content", "value"),
    [
        ("Global tclass=106\n", 106),
        ("tclass=4 src_ip=10.0.0.1\nGlobal tclass=106\n", 106),
        ("106", 106),
        ("", None),
        ("tclass=4 src_ip=10.0.0.1\n", None),
        ("Global tclass=256\n", None),
        ("Global tclass=-1\n", None),
    ],
)
def test_traffic_class_of_the_driver(ofed: RdmaHost, content: str, value: int | None) -> None:
    ofed.write("/sys/class/infiniband/mlx5_0/tc/1/traffic_class", content)
    assert quality(ofed).driver_traffic_class == value


# Half of it


def test_half_of_it_is_told_exactly(host: RdmaHost) -> None:
    host.broken = lambda command: (
        Answer(1, complaint="RTNETLINK answers: Invalid argument")
        if list(command[:3]) == ["dcb", "pfc", "set"]
        else None
    )
    with pytest.raises(RdmaQosError) as caught:
        brought_about(host, LOSSLESS)
    details = caught.value.details
    assert details["failed_settings"] == ["pfc_priorities"]
    assert details["in_force"] == {
        "mtu": 9000,
        "global_pause_rx": False,
        "global_pause_tx": False,
        "trust": "dscp",
        "dscp_to_priority": {"26": 3},
        "roce_mode": "RoCE v2",
    }
    assert details["not_in_force"] == {"pfc_priorities": [], "traffic_class": 0}
    message = str(caught.value)
    assert "Invalid argument" in message
    assert "mtu=9000" in message
    assert "pfc_priorities=[]" in message
    assert "To do:" in message


def test_command_that_lies_is_found_out(host: RdmaHost) -> None:
    host.broken = lambda command: Answer(0) if list(command[:3]) == ["dcb", "pfc", "set"] else None
    with pytest.raises(RdmaQosError, match=r"pfc_priorities is \[\], not \[3\]"):
        brought_about(host, Wanted(pfc_priorities=[3]))


def test_kernel_file_that_refuses(host: RdmaHost) -> None:
    host.remove("/sys/kernel/config/rdma_cm/mlx5_0/ports/1/default_roce_tos")
    with pytest.raises(RdmaQosError, match=r"default_roce_tos: No such file"):
        brought_about(host, Wanted(traffic_class=106))


# What a boot has to do


def lines(host: RdmaHost, wanted: Wanted) -> list[str]:
    """Lines of the unit that keeps the settings."""
    qos = RdmaQos(host.tree, host)
    port = qos.find(NETDEV)
    steps = qos.steps(port, wanted, qos.quality.read(port))
    return [action.line(host) for step in steps for action in step.actions]


def test_boot_does_all_whatever_is_in_force_now(host: RdmaHost) -> None:
    before = lines(host, LOSSLESS)
    brought_about(host, LOSSLESS)
    assert lines(host, LOSSLESS) == before
    folder = "/sys/kernel/config/rdma_cm/mlx5_0"
    assert before == [
        "/usr/sbin/ip link set dev ens1np0 mtu 9000",
        "/usr/sbin/ethtool -A ens1np0 rx off tx off",
        "/usr/sbin/dcb app replace dev ens1np0 dscp-prio 26:3",
        "/usr/sbin/dcb pfc set dev ens1np0 prio-pfc all:off 3:on",
        f"/bin/sh -c \"mkdir -p {folder} && echo 'RoCE v2' > {folder}/ports/1/default_roce_mode\"",
        f'/bin/sh -c "mkdir -p {folder} && echo 106 > {folder}/ports/1/default_roce_tos"',
    ]


def test_boot_sets_every_switch_of_ecn(ofed: RdmaHost) -> None:
    written = lines(ofed, Wanted(ecn_priorities=[3]))
    assert len(written) == 16
    assert '/bin/sh -c "echo 1 > /sys/class/net/ens1np0/ecn/roce_rp/enable/3"' in written
    assert '/bin/sh -c "echo 0 > /sys/class/net/ens1np0/ecn/roce_np/enable/4"' in written


def test_boot_takes_the_negotiation_again(host: RdmaHost) -> None:
    assert lines(host, Wanted(pfc_priorities=[3], take_dcbx=True))[0] == "/usr/sbin/dcb dcbx set dev ens1np0 host ieee"


# Nothing makes a traceback


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60, deadline=None)
@given(output=st.text(max_size=80), status=st.sampled_from([0, 1, None]))
def test_no_answer_of_a_tool_makes_a_traceback(
    tmp_path_factory: pytest.TempPathFactory, output: str, status: int | None
) -> None:
    host = RdmaHost(tmp_path_factory.mktemp("host"), tools=["dcb", "mlnx_qos"], ofed=True)

    def broken(_command: Sequence[str]) -> Answer:
        return Answer(status, output, output)

    host.broken = broken
    document = quality(host).document()
    json.dumps(document)
    assert {name for name, value in document.items() if value is None} - {"tool"} <= document["unknown"].keys()
    with pytest.raises(RdmaQosError):
        brought_about(host, LOSSLESS)
