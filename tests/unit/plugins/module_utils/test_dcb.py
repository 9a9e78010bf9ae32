# SPDX-License-Identifier: GPL-3.0-or-later
"""What dcb and mlnx_qos print, and which commands set a port."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ansible_collections.ringmaster.inference.plugins.module_utils import dcb
from ansible_collections.ringmaster.inference.plugins.module_utils.commands import Answer
from tests.support.rdma_host import RdmaHost

PFC = (
    '{"pfc_cap":8,"macsec_bypass":false,"delay":0,"prio_pfc":[false,false,false,true,false,false,false,false],'
    '"requests":[0,0,0,17,0,0,0,0]}'
)
MLNX_QOS = """****** WARNING: lldpad service is running and may overwrite your settings ******

DCBX mode: OS controlled
Priority trust state: dscp
dscp2prio mapping:
\tprio:0 dscp:07,06,05,04,03,02,01,00,
\tprio:3 dscp:31,30,29,28,27,26,25,24,
\tprio:3 dscp:40,
Receive buffer size (bytes): 130944,130944,0,0,0,0,0,0,max_buffer_size=262016
Cable len: 7
PFC configuration:
\tpriority    0   1   2   3   4   5   6   7
\tenabled     0   0   0   1   0   0   0   0
\tbuffer      0   0   0   1   0   0   0   0
tc: 0 ratelimit: unlimited, tsa: vendor
\t priority:  1"""


def test_pfc_of_dcb() -> None:
    assert dcb.parse_pfc(PFC) == ([3], 8)
    assert dcb.parse_pfc('{"prio_pfc":[true,true,true,true,true,true,true,true]}') == (list(range(8)), None)


@pytest.mark.parametrize(
    "text", ["", "{}", "[]", "pfc-cap 8", '{"prio_pfc":[true]}', '{"prio_pfc":[1,0,0,0,0,0,0,0]}', '{"prio_pfc":null}']
)
def test_no_pfc(text: str) -> None:
    assert dcb.parse_pfc(text) is None


def test_entries_of_dcb_in_the_forms_of_its_releases() -> None:
    assert dcb.parse_app('{"dscp_prio":[[26,3],[46,5]]}') == {26: 3, 46: 5}
    assert dcb.parse_app('{"ethtype_prio":[[1,2," "]],"dscp_prio":[[26,3," "]]}') == {26: 3}
    assert dcb.parse_app("{ }") == {}
    assert dcb.parse_app('{"dscp_prio":[[24,2],[24,3],[24,1]]}') == {24: 3}, "the highest of one DSCP counts"


@pytest.mark.parametrize(
    "text",
    ["", '{"dscp_prio":[["AF31",3]]}', '{"dscp_prio":[[64,3]]}', '{"dscp_prio":[[26]]}', '{"dscp_prio":{"26":3}}'],
)
def test_entries_that_are_not_understood(text: str) -> None:
    assert dcb.parse_app(text) is None


def test_owner_of_the_negotiation() -> None:
    assert dcb.parse_dcbx('{"host":true,"ieee":true}') is True
    assert dcb.parse_dcbx('{"lld_managed":true,"ieee":true}') is False
    assert dcb.parse_dcbx('{"host":true,"lld_managed":true}') is False
    assert dcb.parse_dcbx("Operation not supported") is None


def test_order_of_trust() -> None:
    assert dcb.parse_apptrust('{"order":["dscp","pcp"]}') == "dscp"
    assert dcb.parse_apptrust('{"order":["dscp ","pcp "]}') is None
    assert dcb.parse_apptrust('{"order":[]}') is None


def test_mlnx_qos() -> None:
    found = dcb.parse_mlnx_qos(MLNX_QOS)
    assert found.trust == "dscp"
    assert found.pfc_priorities == [3]
    assert found.dcbx_host is True
    assert found.dscp_to_priority == {**dict.fromkeys(range(8), 0), **dict.fromkeys(range(24, 32), 3), 40: 3}
    assert found.pfc_capacity is None
    assert "pfc_capacity" in found.unknown


def test_mlnx_qos_of_a_card_without_trust() -> None:
    text = MLNX_QOS.replace("Priority trust state: dscp", "Priority trust state: none").replace("OS", "Firmware")
    found = dcb.parse_mlnx_qos(text)
    assert found.trust is None
    assert found.dscp_to_priority is None
    assert found.dcbx_host is False
    assert {"trust", "dscp_to_priority"} <= found.unknown.keys()


def test_mlnx_qos_that_says_nothing_leaves_all_unknown() -> None:
    found = dcb.parse_mlnx_qos("Traceback (most recent call last):\n  File")
    assert (found.trust, found.dscp_to_priority, found.pfc_priorities, found.dcbx_host) == (None, None, None, None)
    assert {"trust", "dscp_to_priority", "pfc_priorities", "dcbx_host"} <= found.unknown.keys()


values: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: (
        st.lists(inner) | st.dictionaries(st.sampled_from(["prio_pfc", "pfc_cap", "dscp_prio", "host", "order"]), inner)
    ),
)


@given(st.one_of(values.map(json.dumps), st.text(), st.just("[" * 50_000)))
def test_nothing_that_dcb_prints_makes_a_traceback(text: str) -> None:
    for parse in (dcb.parse_pfc, dcb.parse_app, dcb.parse_dcbx, dcb.parse_apptrust, dcb.parse_mlnx_qos):
        parse(text)


@given(st.lists(st.one_of(st.sampled_from(MLNX_QOS.splitlines()), st.text())).map("\n".join))
def test_nothing_that_mlnx_qos_prints_makes_a_traceback(text: str) -> None:
    found = dcb.parse_mlnx_qos(text)
    assert all(each in range(8) for each in found.pfc_priorities or ())
    assert all(dscp in range(64) and each in range(8) for dscp, each in (found.dscp_to_priority or {}).items())


def test_in_tree_driver_trusts_by_its_entries(tmp_path: Path) -> None:
    host = RdmaHost(tmp_path)
    tool = dcb.DcbTool(host.tree, host)
    assert tool.read("ens1np0", "mlx5_core").trust == "pcp"
    host.ports["ens1np0"].apps = {26: 3}
    assert tool.read("ens1np0", "mlx5_core").trust == "dscp"


def test_trust_of_another_driver_is_not_guessed(tmp_path: Path) -> None:
    host = RdmaHost(tmp_path)
    host.ports["ens1np0"].apps = {26: 3}
    found = dcb.DcbTool(host.tree, host).read("ens1np0", "other")
    assert found.trust is None
    assert "other" in found.unknown["trust"]
    assert found.dscp_to_priority == {26: 3}


def test_trust_in_sysfs_outranks_the_entries(tmp_path: Path) -> None:
    host = RdmaHost(tmp_path, ofed=True)
    host.ports["ens1np0"].apps = {26: 3}
    assert dcb.DcbTool(host.tree, host).read("ens1np0", "mlx5_core").trust == "pcp"


def test_driver_without_dcb_leaves_all_unknown_with_the_kernels_words(tmp_path: Path) -> None:
    host = RdmaHost(tmp_path)
    host.broken = lambda _command: Answer(1, complaint="Attribute read: Operation not supported")
    found = dcb.DcbTool(host.tree, host).read("ens1np0", "mlx5_core")
    assert found.pfc_priorities is None
    assert all("Operation not supported" in reason for reason in found.unknown.values())
    assert found.unknown.keys() == {"trust", "dscp_to_priority", "pfc_priorities", "pfc_capacity", "dcbx_host"}


@pytest.mark.parametrize(
    ("tools", "ofed", "name"),
    [
        ((), False, None),
        (("dcb",), False, "dcb"),
        (("mlnx_qos",), False, "mlnx_qos"),
        (("dcb", "mlnx_qos"), False, "dcb"),
        (("dcb", "mlnx_qos"), True, "mlnx_qos"),
        (("dcb",), True, "dcb"),
    ],
)
def test_which_tool(tmp_path: Path, tools: tuple[str, ...], ofed: bool, name: str | None) -> None:
    host = RdmaHost(tmp_path, tools=tools, ofed=ofed)
    tool = dcb.tool_for("ens1np0", host.tree, host)
    assert (tool.name if tool else None) == name


def test_commands_of_dcb() -> None:
    tool = dcb.DcbTool(None, None)  # type: ignore[arg-type] # commands need neither
    assert tool.pfc("X", {4, 3}) == ["dcb", "pfc", "set", "dev", "X", "prio-pfc", "all:off", "3:on", "4:on"]
    assert tool.pfc("X", []) == ["dcb", "pfc", "set", "dev", "X", "prio-pfc", "all:off"]
    assert tool.trust_and_map("X", "dscp", {26: 3, 8: 1}, {0: 0}) == [
        ["dcb", "app", "replace", "dev", "X", "dscp-prio", "8:1", "26:3"],
        ["dcb", "app", "del", "dev", "X", "dscp-prio", "0:0"],
    ]
    assert tool.trust_and_map("X", "pcp", {}, {}) == [["dcb", "app", "flush", "dev", "X", "dscp-prio"]]


def test_commands_of_mlnx_qos_never_mix_trust_and_entries() -> None:
    tool = dcb.MlnxQosTool(None, None)  # type: ignore[arg-type] # commands need neither
    assert tool.pfc("X", [3]) == ["mlnx_qos", "-i", "X", "--pfc", "0,0,0,1,0,0,0,0"]
    assert tool.trust_and_map("X", "dscp", {26: 3}, {8: 1}) == [
        ["mlnx_qos", "-i", "X", "--trust", "dscp"],
        ["mlnx_qos", "-i", "X", "--dscp2prio", "set,26,3", "--dscp2prio", "del,8,1"],
    ]
    assert tool.trust_and_map("X", "pcp", {}, {}) == [["mlnx_qos", "-i", "X", "--trust", "pcp"]]


def test_lldpad_is_seen_by_its_name(tmp_path: Path) -> None:
    host = RdmaHost(tmp_path)
    host.write("/proc/1/comm", "systemd\n")
    host.write("/proc/self/comm", "lldpad\n")
    assert not dcb.lldpad_runs(host.tree)
    host.write("/proc/4711/comm", "lldpad\n")
    assert dcb.lldpad_runs(host.tree)
