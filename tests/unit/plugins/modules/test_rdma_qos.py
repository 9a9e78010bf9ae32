# SPDX-License-Identifier: GPL-3.0-or-later
"""The module rdma_qos: what it changes, says it would change, keeps over a reboot, and refuses."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import yaml
from ansible.module_utils.testing import patch_module_args

from ansible_collections.ringmaster.inference.plugins.module_utils.commands import Answer
from ansible_collections.ringmaster.inference.plugins.modules import rdma_qos
from tests.support.rdma_host import RdmaHost

NETDEV = "ens1np0"
UNIT_PATH = f"/etc/systemd/system/ringmaster-rdma-qos@{NETDEV}.service"
LOSSLESS = {
    "netdev": NETDEV,
    "mtu": 9000,
    "dscp_to_priority": {"26": 3},
    "trust": "dscp",
    "pfc_priorities": [3],
    "global_pause_rx": False,
    "global_pause_tx": False,
    "roce_mode": "RoCE v2",
    "traffic_class": 106,
}


@pytest.fixture
def host(tmp_path: Path) -> Iterator[RdmaHost]:
    host = RdmaHost(tmp_path, ports=2)
    with (
        mock.patch.object(rdma_qos, "FileTree", return_value=host.tree),
        mock.patch.object(rdma_qos, "CommandRunner", return_value=host),
    ):
        yield host


class Module:
    """Runs the module."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self.capsys = capsys

    def __call__(self, check_mode: bool = False, diff: bool = True, **arguments: Any) -> dict[str, Any]:
        modes = {"_ansible_check_mode": check_mode, "_ansible_diff": diff}
        with patch_module_args({**arguments, **modes}), contextlib.suppress(SystemExit):
            rdma_qos.main()
        return json.loads(self.capsys.readouterr().out)


@pytest.fixture
def module(host: RdmaHost, capsys: pytest.CaptureFixture[str]) -> Module:
    return Module(capsys)


def snapshot(host: RdmaHost) -> dict[str, bytes]:
    """Every file of the host."""
    return {str(path): path.read_bytes() for path in sorted(host.root.rglob("*")) if path.is_file()}


def test_first_run_changes_and_second_does_not(host: RdmaHost, module: Module) -> None:
    first = module(**LOSSLESS)
    assert first["changed"] is True
    assert set(first["changed_settings"]) == set(LOSSLESS) - {"netdev", "roce_mode"}
    assert first["settings"] == {name: value for name, value in LOSSLESS.items() if name != "netdev"}
    assert first["files"] == [UNIT_PATH]
    assert first["mtu_kept_by"] == "unit"
    host.commands.clear()
    before = snapshot(host)
    second = module(**LOSSLESS)
    assert (second["changed"], second["changed_settings"], host.changes) == (False, [], [])
    assert second["settings"] == first["settings"]
    assert snapshot(host) == before
    assert second["diff"] == [
        {
            "before_header": f"settings of {NETDEV}",
            "after_header": f"settings of {NETDEV}",
            "before": first["settings"],
            "after": first["settings"],
        }
    ]


def test_check_mode_says_the_same_and_changes_nothing(host: RdmaHost, module: Module) -> None:
    before = snapshot(host)
    would = module(check_mode=True, **LOSSLESS)
    assert host.changes == []
    assert snapshot(host) == before
    did = module(**LOSSLESS)
    for key in ("changed", "settings", "changed_settings", "files", "diff", "mtu_kept_by"):
        assert would[key] == did[key], key
    assert module(check_mode=True, **LOSSLESS)["changed"] is False


def test_check_mode_knows_the_entries_that_mlnx_qos_brings(host: RdmaHost, module: Module) -> None:
    host.tools = {*host.tools, "mlnx_qos"} - {"dcb"}
    would = module(check_mode=True, **LOSSLESS)
    assert would["settings"]["dscp_to_priority"] == {**{str(dscp): dscp >> 3 for dscp in range(64)}, "26": 3}
    assert module(**LOSSLESS)["settings"] == would["settings"]


def test_result_is_what_return_says(module: Module) -> None:
    returned = yaml.safe_load(rdma_qos.RETURN)
    always = {name for name, value in returned.items() if value["returned"] in ("success", "if O(state=present)")}
    assert set(module(diff=False, **LOSSLESS)) - {"changed", "invocation"} == always
    gone = module(diff=False, netdev=NETDEV, state="absent")
    assert set(gone) - {"changed", "invocation"} == {
        name for name, value in returned.items() if value["returned"] == "success"
    }


def test_pfc_that_was_switched_off_by_hand_is_mended(host: RdmaHost, module: Module) -> None:
    module(**LOSSLESS)
    host.ports[NETDEV].pfc = set()
    mended = module(**LOSSLESS)
    assert mended["changed_settings"] == ["pfc_priorities"]
    assert mended["diff"][0]["before"]["pfc_priorities"] == []
    assert host.ports[NETDEV].pfc == {3}


def test_unit_that_was_removed_by_hand_is_mended(host: RdmaHost, module: Module) -> None:
    module(**LOSSLESS)
    host.remove(UNIT_PATH)
    mended = module(**LOSSLESS)
    assert (mended["changed"], mended["changed_settings"]) == (True, [])
    assert module(**LOSSLESS)["changed"] is False


def test_settings_that_are_not_kept(host: RdmaHost, module: Module) -> None:
    result = module(**LOSSLESS, persistent=False)
    assert (result["changed"], result["files"], result["mtu_kept_by"]) == (True, [], None)
    assert not host.tree.exists(UNIT_PATH)
    module(**LOSSLESS)
    result = module(**LOSSLESS, persistent=False)
    assert (result["changed"], result["changed_settings"]) == (True, [])
    assert not host.tree.exists(UNIT_PATH)
    assert module(**LOSSLESS, persistent=False)["changed"] is False


def test_absent_removes_what_keeps_them_and_leaves_the_port(host: RdmaHost, module: Module) -> None:
    module(**LOSSLESS)
    assert module(check_mode=True, netdev=NETDEV, state="absent")["changed"] is True
    assert host.tree.exists(UNIT_PATH)
    gone = module(netdev=NETDEV, state="absent")
    assert gone["changed"] is True
    assert gone["diff"][0]["after"] == ""
    assert not host.tree.exists(UNIT_PATH)
    assert host.ports[NETDEV].pfc == {3}
    assert module(netdev=NETDEV, state="absent")["changed"] is False


def test_absent_for_a_card_that_is_gone(host: RdmaHost, module: Module) -> None:
    host.write("/etc/systemd/system/ringmaster-rdma-qos@gone0.service", "[Unit]\n")
    assert module(netdev="gone0", state="absent")["changed"] is True
    assert module(netdev="never0", state="absent")["changed"] is False


def test_back_to_what_was_before(host: RdmaHost, module: Module) -> None:
    host.ports[NETDEV].apps = {8: 1}
    module(**LOSSLESS)
    back = module(
        netdev=NETDEV,
        mtu=1500,
        trust="dscp",
        dscp_to_priority={"8": 1},
        dscp_exclusive=True,
        pfc_priorities=[],
        global_pause_rx=True,
        global_pause_tx=True,
        traffic_class=0,
        persistent=False,
    )
    assert back["changed"] is True
    port = host.ports[NETDEV]
    assert (port.apps, port.pfc, port.pause_rx, port.pause_tx) == ({8: 1}, set(), True, True)
    assert not host.tree.exists(UNIT_PATH)


def test_ecn_with_the_inbox_driver_is_reported_and_fails_only_if_required(host: RdmaHost, module: Module) -> None:
    result = module(**LOSSLESS, ecn_priorities=[3])
    assert "no such file" in result["unsupported"]["ecn_priorities"]
    assert "ecn_priorities" not in result["settings"]
    assert module(**LOSSLESS, ecn_priorities=[3])["changed"] is False
    host.commands.clear()
    refused = module(netdev=NETDEV, ecn_priorities=[3], pfc_priorities=[4], required=["ecn_priorities"])
    assert refused["failed"] is True
    assert "ecn_priorities" in refused["msg"]
    assert host.changes == []


def test_host_without_a_tool_is_told_what_to_install(host: RdmaHost, module: Module) -> None:
    host.tools.discard("dcb")
    refused = module(**LOSSLESS)
    assert "neither dcb nor mlnx_qos is installed" in refused["msg"]
    assert "install iproute2" in refused["msg"]
    assert host.changes == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"netdev": NETDEV}, "a setting for ens1np0"),
        ({"netdev": "nope0", "pfc_priorities": [3]}, "no such interface"),
        ({"netdev": "a/../b", "state": "absent"}, "name of a network interface"),
        ({"netdev": NETDEV, "pfc_priorities": [8]}, "from 0 to 7"),
        ({"netdev": NETDEV, "dscp_to_priority": {"64": 3}}, "DSCPs from 0 to 63"),
        ({"netdev": NETDEV, "mtu": 1}, "mtu from 68"),
        ({"netdev": NETDEV, "roce_mode": "RoCE v3"}, "roce_mode"),
    ],
)
def test_refused_before_anything_is_changed(
    host: RdmaHost, module: Module, arguments: dict[str, Any], message: str
) -> None:
    before = snapshot(host)
    result = module(**arguments)
    assert result["failed"] is True
    assert message in result["msg"]
    assert host.changes == []
    assert snapshot(host) == before


def test_half_of_it_is_told_and_the_former_unit_stays(host: RdmaHost, module: Module) -> None:
    module(netdev=NETDEV, traffic_class=104)
    unit = host.read(UNIT_PATH)
    host.broken = lambda command: (
        Answer(1, complaint="Invalid argument") if list(command[1:3]) == ["pfc", "set"] else None
    )
    failed = module(**LOSSLESS)
    assert failed["failed"] is True
    assert failed["failed_settings"] == ["pfc_priorities"]
    assert failed["in_force"]["mtu"] == 9000
    assert failed["not_in_force"] == {"pfc_priorities": [], "traffic_class": 104}
    assert host.read(UNIT_PATH) == unit


def test_unit_that_fails_leaves_the_settings_in_force_and_says_so(host: RdmaHost, module: Module) -> None:
    host.broken = lambda command: (
        Answer(1, complaint="Job failed") if list(command[:2]) == ["systemctl", "start"] else None
    )
    for _attempt in range(2):
        failed = module(**LOSSLESS)
        assert failed["failed"] is True
        assert failed["in_force"]["pfc_priorities"] == [3]
        assert "journalctl" in failed["msg"]
        host.failed_units = {f"ringmaster-rdma-qos@{NETDEV}.service"}


def test_negotiation_is_taken_over_only_when_asked(host: RdmaHost, module: Module) -> None:
    host.ports[NETDEV].host_dcbx = False
    assert "dcbx=host" in module(netdev=NETDEV, pfc_priorities=[3])["msg"]
    taken = module(netdev=NETDEV, pfc_priorities=[3], dcbx="host")
    assert taken["changed_settings"] == ["dcbx_owner", "pfc_priorities"]
    assert taken["diff"][0]["before"] == {"pfc_priorities": [], "dcbx_owner": "firmware"}
    assert taken["diff"][0]["after"] == taken["settings"] == {"pfc_priorities": [3], "dcbx_owner": "host"}
    assert "dcb dcbx set" in host.read(UNIT_PATH)
    assert module(netdev=NETDEV, pfc_priorities=[3], dcbx="host")["changed"] is False


def test_pause_that_stays_on_beside_pfc_is_a_warning(module: Module) -> None:
    with mock.patch.object(rdma_qos.AnsibleModule, "warn") as warn:
        module(**LOSSLESS)
        module(netdev=NETDEV, pfc_priorities=[], global_pause_rx=True)
        assert not warn.called
        module(netdev=NETDEV, pfc_priorities=[3])
        assert "Global pause is on" in warn.call_args.args[0]


def test_mtu_that_a_manager_keeps_is_not_in_the_unit(host: RdmaHost, module: Module) -> None:
    host.write("/run/systemd/netif/links/4", "")
    text = "            Network File: /etc/systemd/network/ens1.network\n"
    host.broken = lambda command: Answer(0, text) if command[0] == "networkctl" else None
    host.write("/etc/systemd/network/ens1.network", f"[Match]\nName={NETDEV}\n")
    drop_in = f"/etc/systemd/network/ens1.network.d/90-ringmaster-mtu-{NETDEV}.conf"
    result = module(**LOSSLESS)
    assert (result["mtu_kept_by"], result["files"]) == ("networkd", [drop_in, UNIT_PATH])
    assert "mtu" not in host.read(UNIT_PATH)
    assert module(**LOSSLESS)["changed"] is False
    only = module(netdev=NETDEV, mtu=9000)
    assert (only["changed"], only["files"]) == (True, [drop_in])
    assert not host.tree.exists(UNIT_PATH)


def test_each_port_has_a_unit_of_its_own(host: RdmaHost, module: Module) -> None:
    module(**LOSSLESS)
    module(**{**LOSSLESS, "netdev": "ens2np0"})
    assert module(**LOSSLESS)["changed"] is False
    module(netdev=NETDEV, state="absent")
    assert module(**{**LOSSLESS, "netdev": "ens2np0"})["changed"] is False
