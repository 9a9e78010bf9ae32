# SPDX-License-Identifier: GPL-3.0-or-later
"""dcb, mlnx_qos, ethtool, ibv_devinfo and rdma: what one sets, the others show."""

from __future__ import annotations

import json
from collections.abc import Callable
from types import ModuleType

import pytest

from rehearsal.hardware import Machine
from rehearsal.hardware.commands import dcb, ethtool, ibv_devinfo, mlnx_qos, rdma, update_grub

Run = Callable[..., "tuple[int, str]"]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """A function that runs a command on a machine and gives status and output."""

    def start(command: ModuleType, machine: Machine, text: str) -> tuple[int, str]:
        status: int = command.run(text.split(), machine)
        return status, capsys.readouterr().out

    return start


def test_dcb_sets_and_shows_pfc(a100: Machine, run: Run) -> None:
    assert json.loads(run(dcb, a100, "-j pfc show dev ens1f0np0")[1]) == {
        "pfc_cap": 8,
        "macsec_bypass": False,
        "delay": 0,
        "prio_pfc": [False] * 8,
    }
    assert run(dcb, a100, "pfc set dev ens1f0np0 prio-pfc all:off 3:on")[0] == 0
    shown = json.loads(run(dcb, a100, "-j -s pfc show dev ens1f0np0")[1])
    assert shown["prio_pfc"] == [number == 3 for number in range(8)]
    assert shown["requests"] == shown["indications"] == [0] * 8
    _status, text = run(dcb, a100, "pfc show dev ens1f0np0")
    assert text.startswith("pfc-cap 8 macsec-bypass off delay 0")
    assert "prio-pfc 0:off 1:off 2:off 3:on 4:off" in text
    assert json.loads(run(dcb, a100, "-j pfc show dev ens1f1np1")[1])["prio_pfc"] == [False] * 8
    assert json.loads(run(dcb, a100, "-j buffer show dev ens1f0np0")[1])["prio_buffer"] == [0, 0, 0, 1, 0, 0, 0, 0]


@pytest.mark.parametrize(
    "words", ["pfc set dev ens1f0np0 prio-pfc 9:on", "pfc set dev ens1f0np0 prio-pfc 3:maybe", "ets set dev ens1f0np0"]
)
def test_dcb_refuses_nonsense_and_changes_nothing(words: str, a100: Machine, run: Run) -> None:
    assert run(dcb, a100, words)[0] != 0
    assert a100.state.text("ports/0/pfc") == "0,0,0,0,0,0,0,0"


def test_trust_follows_the_application_entries(a100: Machine, run: Run) -> None:
    assert run(dcb, a100, "-j -N app show dev ens1f0np0")[1] == "{}\n"
    run(dcb, a100, "app replace dev ens1f0np0 dscp-prio 26:3 AF41:4")
    assert json.loads(run(dcb, a100, "-j -N app show dev ens1f0np0")[1]) == {"dscp_prio": [[26, 3], [34, 4]]}
    assert json.loads(run(dcb, a100, "-j app show dev ens1f0np0")[1]) == {"dscp_prio": [["AF31", 3], ["AF41", 4]]}
    assert a100.state.text("ports/0/trust") == "dscp"
    assert run(dcb, a100, "app del dev ens1f0np0 dscp-prio 26:5")[0] != 0
    run(dcb, a100, "app replace dev ens1f0np0 dscp-prio 26:5")
    assert json.loads(run(dcb, a100, "-j -N app show dev ens1f0np0")[1])["dscp_prio"][0] == [26, 5]
    run(dcb, a100, "app flush dev ens1f0np0 dscp-prio")
    assert a100.state.text("ports/0/trust") == "pcp"
    assert run(dcb, a100, "-j apptrust show dev ens1f0np0")[0] != 0


def test_firmware_gives_the_negotiation_away(a100: Machine, run: Run) -> None:
    a100.state.set("ports/0/dcbx", "firmware")
    assert "host" not in json.loads(run(dcb, a100, "-j dcbx show dev ens1f0np0")[1])
    run(dcb, a100, "dcbx set dev ens1f0np0 host ieee")
    assert json.loads(run(dcb, a100, "-j dcbx show dev ens1f0np0")[1]) == {"host": True, "ieee": True}


def test_mlnx_qos_sets_and_shows(l40s: Machine, run: Run) -> None:
    _status, text = run(mlnx_qos, l40s, "-i ens1f0np0")
    assert text.startswith("DCBX mode: OS controlled\nPriority trust state: pcp\nReceive buffer size (bytes): 130944,")
    assert "\tenabled     0   0   0   0   0   0   0   0\n" in text
    run(mlnx_qos, l40s, "-i ens1f0np0 --trust dscp --pfc 0,0,0,1,0,0,0,0")
    _status, text = run(mlnx_qos, l40s, "-i ens1f0np0 --dscp2prio set,48,6")
    assert "Priority trust state: dscp\ndscp2prio mapping:\n\tprio:0 dscp:07,06,05,04,03,02,01,00,\n" in text
    assert "\tpriority    0   1   2   3   4   5   6   7\n\tenabled     0   0   0   1   0   0   0   0\n" in text
    assert (l40s.root / "sys/class/net/ens1f0np0/qos/trust").read_text() == "dscp\n"
    run(mlnx_qos, l40s, "-i ens1f0np0 -d fw")
    assert run(mlnx_qos, l40s, "-i ens1f0np0")[1].startswith("DCBX mode: Firmware controlled\n")
    for wrong in ("-i ens9", "-i ens1f0np0 --pfc 0,1", "-i ens1f0np0 --trust dscp --dscp2prio set,1,1", "--pfc 1"):
        assert run(mlnx_qos, l40s, wrong)[0] != 0


def test_ethtool_shows_pause_counters_only_with_pfc(a100: Machine, run: Run) -> None:
    a100.state.set("ports/0/ethtool/rx_prio3_pause", 7)
    _status, text = run(ethtool, a100, "-S ens1f0np0")
    assert text.startswith("NIC statistics:\n     rx_packets: 0\n")
    assert "tx_vport_rdma_unicast_packets: 0\n" in text
    assert "prio3_pause" not in text
    run(dcb, a100, "pfc set dev ens1f0np0 prio-pfc 3:on")
    assert "     rx_prio3_pause: 7\n" in run(ethtool, a100, "-S ens1f0np0")[1]


def test_ethtool_sets_and_shows_global_pause(a100: Machine, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.geteuid", lambda: 0)
    assert "\nRX:\t\ton\nTX:\t\ton\n" in run(ethtool, a100, "-a ens1f0np0")[1]
    assert run(ethtool, a100, "-A ens1f0np0 rx off tx off")[0] == 0
    assert "\nRX:\t\toff\nTX:\t\toff\n" in run(ethtool, a100, "-a ens1f0np0")[1]
    assert run(ethtool, a100, "-A ens1f0np0 rx sometimes")[0] != 0
    assert "firmware-version: 22.41.1000 (MT_0000000359)\n" in run(ethtool, a100, "-i ens1f0np0")[1]
    assert "bus-info: 0000:05:00.0\n" in run(ethtool, a100, "-i ens1f0np0")[1]


@pytest.mark.parametrize(
    ("mtu", "expected"), [(9000, 4096), (4192, 4096), (4191, 2048), (2144, 2048), (1500, 1024), (300, 256), (68, 256)]
)
def test_roce_mtu_is_the_largest_that_fits(mtu: int, expected: int) -> None:
    assert ibv_devinfo.active_mtu(mtu) == expected


def test_ibv_devinfo_and_rdma_tell_of_the_same_ports(a100: Machine, run: Run) -> None:
    (a100.root / "sys/class/net/ens1f0np0/mtu").write_text("9000\n")
    a100.state.set("ports/1/link", 0)
    _status, text = run(ibv_devinfo, a100, "")
    first, second = text.split("hca_id:\t")[1:]
    assert first.startswith("mlx5_0\n\ttransport:\t\t\tInfiniBand (0)\n\tfw_ver:\t\t\t\t22.41.1000\n")
    assert "\t\t\tstate:\t\t\tPORT_ACTIVE (4)\n" in first
    assert "\t\t\tactive_mtu:\t\t4096 (5)\n" in first
    assert "\t\t\tstate:\t\t\tPORT_DOWN (1)\n" in second
    assert "\t\t\tactive_mtu:\t\t1024 (3)\n" in second
    links = json.loads(run(rdma, a100, "-j link")[1])
    assert [(link["ifname"], link["state"], link["netdev"]) for link in links] == [
        ("mlx5_0", "ACTIVE", "ens1f0np0"),
        ("mlx5_1", "DOWN", "ens1f1np1"),
    ]
    a100.state.set("ports/0/hw_counters/out_of_sequence", 12)
    (statistic,) = json.loads(run(rdma, a100, "-j statistic show link mlx5_0/1")[1])
    assert (statistic["ifname"], statistic["out_of_sequence"]) == ("mlx5_0", 12)
    assert run(rdma, a100, "-j link show mlx5_9/1")[0] != 0


def test_update_grub_decides_the_next_command_line(a100: Machine, run: Run) -> None:
    defaults = a100.root / "etc/default"
    (defaults / "grub.d").mkdir(parents=True)
    (defaults / "grub").write_text('GRUB_CMDLINE_LINUX_DEFAULT="quiet"\nGRUB_CMDLINE_LINUX="iommu=pt"\n')
    (defaults / "grub.d/90.cfg").write_text('GRUB_CMDLINE_LINUX="$GRUB_CMDLINE_LINUX pcie_aspm.policy=performance"\n')
    former = a100.state.text("host/cmdline")
    assert run(update_grub, a100, "")[0] == 0
    assert a100.state.text("host/cmdline") == former
    assert a100.state.text("host/cmdline_next").endswith(" ro iommu=pt pcie_aspm.policy=performance quiet")
