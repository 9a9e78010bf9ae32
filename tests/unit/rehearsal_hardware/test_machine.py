# SPDX-License-Identifier: GPL-3.0-or-later
"""The kernel's files of a simulated machine, as formats and as one coherent tree; resets and boots."""

from __future__ import annotations

import json
import os
import struct
import subprocess
from pathlib import Path

import pytest

from rehearsal.hardware import Machine, build, lifecycle, pci, tree
from rehearsal.hardware.profiles import PROFILES
from rehearsal.hardware.state import State


def read(machine: Machine, path: str) -> str:
    """A file of the tree as a program reads it."""
    return (machine.root / path).read_text()


@pytest.mark.parametrize("profile", sorted(PROFILES))
def test_every_link_of_the_tree_leads_somewhere(profile: str, tmp_path: Path) -> None:
    machine = build(profile, tmp_path)
    dangling = [path for path in machine.root.rglob("*") if path.is_symlink() and not path.exists()]
    assert dangling == []
    for function in PROFILES[profile].functions:
        device = (machine.root / "sys/bus/pci/devices" / function.address).resolve()
        assert device.name == function.address
        if function.above:
            assert device.parent.name == function.above
        assert (device / "driver" / function.address).resolve() == device


def test_two_hosts_share_no_identity(tmp_path: Path) -> None:
    one, other = (build("a100-sxm4x4", tmp_path / host, host) for host in ("gpu-1", "gpu-2"))
    for name in ("gpus/0/uuid", "gpus/0/serial", "ports/0/mac", "ports/0/node_guid"):
        assert one.state.text(name) != other.state.text(name)
    assert one.state.text("gpus/0/uuid") != one.state.text("gpus/1/uuid")
    again = build("a100-sxm4x4", tmp_path / "again", "gpu-1")
    assert again.state.text("gpus/0/uuid") == one.state.text("gpus/0/uuid"), "a host keeps its own"


def test_nvlinks_have_two_ends(a100: Machine) -> None:
    state = a100.state
    addresses = {state.text(f"gpus/{index}/pci_address"): index for index in state.names("gpus")}
    joined = [
        (index, addresses[state.text(f"gpus/{index}/nvlinks/{link}/remote_address")])
        for index in state.names("gpus")
        for link in state.names(f"gpus/{index}/nvlinks")
    ]
    for one, other in set(joined):
        assert joined.count((one, other)) == joined.count((other, one)) == 4


def test_ports_are_told_as_the_kernel_tells_them(a100: Machine) -> None:
    port = "sys/class/infiniband/mlx5_0/ports/1"
    assert read(a100, f"{port}/state") == "4: ACTIVE\n"
    assert read(a100, f"{port}/phys_state") == "5: LinkUp\n"
    assert read(a100, f"{port}/rate") == "100 Gb/sec (4X EDR)\n"
    assert read(a100, f"{port}/link_layer") == "Ethernet\n"
    assert read(a100, f"{port}/gids/3") == "0000:0000:0000:0000:0000:ffff:c0a8:d30b\n"  # 192.168.211.11
    assert read(a100, f"{port}/gid_attrs/types/3") == "RoCE v2\n"
    assert read(a100, f"{port}/gid_attrs/types/2") == "IB/RoCE v1\n"
    assert read(a100, f"{port}/gid_attrs/ndevs/3") == "ens1f0np0\n"
    assert read(a100, f"{port}/gids/4") == f"{':'.join(['0000'] * 8)}\n"
    assert not (a100.root / port / "gid_attrs/types/4").exists()
    assert read(a100, "sys/class/infiniband/mlx5_1/device/net/ens1f1np1/dev_port") == "1\n"
    assert read(a100, "sys/class/net/ens1f0np0/device/vendor") == "0x15b3\n"
    a100.state.set("ports/0/link", 0)
    a100.tree.refresh()
    assert read(a100, f"{port}/state") == "1: DOWN\n"


def test_only_the_vendors_driver_has_its_own_files(a100: Machine, l40s: Machine) -> None:
    assert read(l40s, "sys/class/net/ens1f0np0/qos/trust") == "pcp\n"
    assert read(l40s, "sys/class/net/ens1f0np0/ecn/roce_np/enable/3") == "1\n"
    for path in ("qos", "ecn"):
        assert not (a100.root / "sys/class/net/ens1f0np0" / path).exists()


def test_port_above_a_card_shows_the_cards_link(a100: Machine) -> None:
    a100.state.set("gpus/0/pcie_width", 8)
    a100.tree.refresh()
    card = (a100.root / "sys/bus/pci/devices/0000:03:00.0").resolve()
    for end in (card, card.parent):
        assert (end / "current_link_width").read_text() == "8\n"
        assert (end / "max_link_width").read_text() == "16\n"
        (status,) = struct.unpack_from("<H", (end / "config").read_bytes(), pci.LINK_STATUS)
        assert status >> 4 & 0x3F == 8
    assert (card.parent.parent / "current_link_width").read_text() == "16\n", "the switch's own link is another one"


def test_lost_card_reads_as_ones_and_comes_back(a100: Machine) -> None:
    device = a100.root / "sys/bus/pci/devices/0000:03:00.0"
    a100.state.set("gpus/0/lost", 1)
    a100.tree.refresh()
    assert (device / "current_link_speed").read_text() == "Unknown\n"
    assert (device / "config").read_bytes() == b"\xff" * pci.SIZE
    a100.state.set("gpus/0/lost", 0)
    a100.tree.refresh()
    assert (device / "current_link_speed").read_text() == "16.0 GT/s PCIe\n"
    assert struct.unpack_from("<HH", (device / "config").read_bytes()) == (0x10DE, 0x20B2)


def test_bits_that_setpci_wrote_stay(a100: Machine) -> None:
    config = a100.root / "sys/bus/pci/devices/0000:02:00.0/config"
    (control,) = struct.unpack_from("<H", config.read_bytes(), pci.ACS_CONTROL)
    assert control == pci.ACS_ISOLATING
    with config.open("r+b") as file:
        file.seek(pci.ACS_CONTROL)
        file.write(b"\0\0")
    a100.state.set("gpus/0/pcie_width", 4)
    a100.tree.refresh()
    assert struct.unpack_from("<H", config.read_bytes(), pci.ACS_CONTROL) == (0,)


def test_words_that_an_operator_writes_are_taken_up(a100: Machine) -> None:
    policy = a100.root / "sys/module/pcie_aspm/parameters/policy"
    assert policy.read_text() == "[default] performance powersave powersupersave\n"
    policy.write_text("performance\n")
    scheduler = a100.root / "sys/block/nvme0n1/queue/scheduler"
    scheduler.write_text("kyber")
    a100.tree.settle()
    assert policy.read_text() == "default [performance] powersave powersupersave\n"
    assert scheduler.read_text() == "none mq-deadline [kyber] bfq\n"
    device = a100.root / "sys/bus/pci/devices/0000:03:00.0"
    assert (device / "link/l1_aspm").read_text() == "0\n"
    (control,) = struct.unpack_from("<H", (device / "config").read_bytes(), pci.LINK_CONTROL)
    assert control & 3 == 0
    (device / "link/l1_aspm").write_text("1")
    a100.tree.settle()
    (control,) = struct.unpack_from("<H", (device / "config").read_bytes(), pci.LINK_CONTROL)
    assert control & 3 == 2


def test_counters_are_totals_of_their_kinds(a100: Machine) -> None:
    a100.state.set("pci/0000:03:00.0/aer/correctable/BadTLP", 3)
    a100.state.set("pci/0000:03:00.0/aer/correctable/RxErr", 4)
    a100.tree.refresh()
    lines = read(a100, "sys/bus/pci/devices/0000:03:00.0/aer_dev_correctable").splitlines()
    assert lines[0] == "RxErr 4"
    assert lines[-1] == "TOTAL_ERR_COR 7"
    assert read(a100, "sys/bus/pci/devices/0000:03:00.0/aer_dev_fatal").endswith("TOTAL_ERR_FATAL 0\n")


def test_boot_options_decide_what_the_kernel_shows(a100: Machine, tmp_path: Path) -> None:
    base = a100.state.text("host/cmdline_base")
    a100.state.set("host/cmdline_next", f"{base} pcie_aspm.policy=performance iommu=pt processor.max_cstate=1")
    lifecycle.boot(a100.state)
    booted = Machine(a100.state, type(a100.tree)(tmp_path / "booted", a100.state))
    booted.tree.build()
    assert read(booted, "proc/cmdline").endswith("processor.max_cstate=1\n")
    assert "[performance]" in read(booted, "sys/module/pcie_aspm/parameters/policy")
    assert read(booted, "sys/kernel/iommu_groups/0/type") == "identity\n"
    assert sorted(os.listdir(booted.root / "sys/devices/system/cpu/cpu0/cpuidle")) == ["state0", "state1"]


def test_boot_starts_what_is_volatile_anew_and_keeps_the_rest(a100: Machine) -> None:
    state = a100.state
    state.update(
        "gpus/0",
        {
            "ecc_pending": 0,
            "power_limit_milliwatts": 300_000,
            "ecc/volatile/corrected/dram": 5,
            "ecc/aggregate/corrected/dram": 5,
            "remapped_rows_pending": 1,
            "remapped_rows_uncorrectable": 1,
            "lost": 1,
        },
    )
    state.update("ports/0", {"pfc": "0,0,0,1,0,0,0,0", "pause_rx": 0, "hw_counters/out_of_sequence": 7})
    former = state.text("host/boot_id")
    uuid = state.text("gpus/0/uuid")
    lifecycle.boot(state)
    assert state.text("host/boot_id") != former
    assert state.text("gpus/0/uuid") == uuid
    values = ("ecc_current", "persistence", "power_limit_milliwatts", "remapped_rows_pending")
    assert [state.integer(f"gpus/0/{name}") for name in values] == [0, 0, 400_000, 0]
    assert not state.has("gpus/0/lost")
    assert not state.has("gpus/0/ecc/volatile")
    assert state.integer("gpus/0/ecc/aggregate/corrected/dram") == 5
    assert state.integer("gpus/0/remapped_rows_uncorrectable") == 1
    assert state.text("ports/0/pfc") == "0,0,0,0,0,0,0,0"
    assert state.integer("ports/0/pause_rx") == 1
    assert not state.has("ports/0/hw_counters")


def test_state_names_are_in_order_and_unfinished_writes_are_none(tmp_path: Path) -> None:
    state = State(tmp_path)
    for name in ("10", "9", "b"):
        state.set(f"folder/{name}", 1)
    (tmp_path / "folder" / ".9.4711").write_text("half")
    assert state.names("folder") == ["9", "10", "b"]
    assert state.names("nowhere") == []
    assert state.text("folder/nothing", "else") == "else"


def test_bits_that_are_written_while_a_link_is_refreshed_stay(a100: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """setpci may write between the moment at which the simulation reads the file and that at which it writes it."""
    address = next(name for name in a100.state.names("pci") if a100.state.text(f"pci/{name}/kind") == "downstream")
    config = (a100.root / "sys/bus/pci/devices" / address / "config").resolve()
    set_link, mark = pci.set_link, pci.SIZE - 1

    def written_meanwhile(content: bytearray, link: dict[str, int], aspm_l1: bool) -> None:
        with config.open("r+b") as file:
            file.seek(mark)
            file.write(b"\x5a")
        set_link(content, link, aspm_l1)

    monkeypatch.setattr(pci, "set_link", written_meanwhile)
    before = config.read_bytes()
    a100.state.set(f"pci/{address}/aspm_l1", not a100.state.integer(f"pci/{address}/aspm_l1"))
    a100.tree.refresh()
    after = config.read_bytes()
    assert after[mark] == 0x5A
    assert after[:mark] != before[:mark], "the link's own bits are written"


def test_lscpu_reads_the_processors(a100: Machine) -> None:
    """Engines ask it which processors belong to which node; where a mask is missing, it ends by a signal."""
    (a100.root / "proc/cpuinfo").write_text(Path("/proc/cpuinfo").read_text())  # a host has that of its kernel
    command = ["lscpu", "--sysroot", str(a100.root), "--json", "--extended=CPU,CORE,NODE", "--online"]
    finished = subprocess.run(command, capture_output=True, text=True, check=True)
    count = a100.state.integer("host/cpus", 1)
    found = json.loads(finished.stdout)["cpus"]
    assert [(each["cpu"], each["core"]) for each in found] == [(cpu, cpu) for cpu in range(count)]
    assert [each["node"] for each in found] == sorted(each["node"] for each in found)
    assert {each["node"] for each in found} == ({0, 1} if count > 1 else {0})


def test_a_set_of_processors_is_printed_as_the_kernel_prints_it() -> None:
    assert tree._cpu_mask([]) == "0"
    assert tree._cpu_mask([0, 1]) == "3"
    assert tree._cpu_mask([0, 33]) == "2,00000001"
    assert tree._cpu_mask(range(64)) == "ffffffff,ffffffff"
