# SPDX-License-Identifier: GPL-3.0-or-later
"""Faults by name: what they do, when they end, and what a boot makes of them."""

from __future__ import annotations

import os
import re
import time
from pathlib import Path

import pytest

from rehearsal.hardware import Machine, build, faults, lifecycle
from rehearsal.hardware.state import State


def snapshot(state: State) -> dict[str, str]:
    """All values but what only grows: counts, and the number of lines in the log."""
    grows = re.compile(r"faults/|host/kernel_messages|.*/(ecc|aer|counters|hw_counters|ethtool)/|.*_errors$|.*remapp")
    paths = (path for path in state.folder.rglob("*") if path.is_file())
    names = (str(path.relative_to(state.folder)) for path in paths)
    return {name: state.text(name) for name in names if not grows.match(name)}


def log(machine: Machine) -> list[str]:
    """Lines of the kernel log."""
    file = machine.root / "dev/kmsg"
    return file.read_text().splitlines() if file.exists() else []


@pytest.mark.parametrize("fault", [one for one in faults.FAULTS if one.about != "host"], ids=lambda one: one.example)
def test_every_fault_changes_something_and_mending_puts_all_values_back(fault: faults.Fault, a100: Machine) -> None:
    before = snapshot(a100.state)
    everything = {path: path.read_bytes() for path in a100.state.folder.rglob("*") if path.is_file()}
    target = "" if fault.about == "port" else "1"
    phrase = fault.example.replace("process holds a card 4096 MiB", "memory full")  # the process has a test of its own
    assert faults.inject(a100, phrase, target)
    faults.advance(a100, 2.0)
    changed = {path: path.read_bytes() for path in a100.state.folder.rglob("*") if path.is_file()}
    assert changed != everything
    faults.mend(a100)
    assert snapshot(a100.state) == before
    assert faults.records(a100) == {}


def test_examples_are_the_words_of_their_own_fault() -> None:
    for fault in faults.FAULTS:
        assert faults.find(fault.example)[0] is fault
        assert (
            faults.find(f"  {fault.example.upper() if 'nvmlDevice' not in fault.example else fault.example} ")[0]
            is fault
        )


@pytest.mark.parametrize("phrase", ["", "xid", "xid many", "roce loss", "nvlink three down", "pfc", "xid 79 now"])
def test_other_words_are_told_with_what_there_is(phrase: str) -> None:
    with pytest.raises(faults.UnknownFaultError, match="expected a fault such as xid 79"):
        faults.find(phrase)


def test_unknown_parts_are_told(a100: Machine, l40s: Machine) -> None:
    for phrase, target in (("xid 79", "9"), ("xid 79", "mlx5_0"), ("pfc off", "2"), ("aer storm", "eth0")):
        with pytest.raises(faults.UnknownFaultError, match="expected one of"):
            faults.inject(a100, phrase, target)
    with pytest.raises(faults.UnknownFaultError, match="NVLink"):
        faults.inject(a100, "nvlink 12 down")
    with pytest.raises(faults.UnknownFaultError, match="NVLink"):
        faults.inject(l40s, "nvlink 0 down")
    assert faults.records(a100) == faults.records(l40s) == {}


def test_xid_79_is_logged_and_takes_the_card_away(a100: Machine) -> None:
    assert faults.inject(a100, "xid 79", "2") == ["gpus/2"]
    lines = log(a100)
    assert re.fullmatch(
        r"4,0,[0-9]+,-;NVRM: Xid \(PCI:0000:83:00\): 79, pid='<unknown>', name=<unknown>, "
        r"GPU has fallen off the bus\.",
        lines[0],
    )
    assert lines[1].startswith("4,1,")
    assert a100.state.integer("gpus/2/lost") == 1
    device = a100.root / "sys/bus/pci/devices/0000:83:00.0"
    assert (device / "current_link_width").read_text() == "63\n"
    faults.mend(a100, "2")
    assert not a100.state.has("gpus/2/lost")
    assert (device / "current_link_width").read_text() == "16\n"


def test_xid_that_asks_for_a_reset_says_so_to_nvml_and_in_the_log(a100: Machine) -> None:
    faults.inject(a100, "xid 119", "0")
    assert a100.state.integer("gpus/0/recovery_action") == 1
    assert "154, GPU recovery action changed from 0x0 (None) to 0x1" in log(a100)[-1]
    faults.inject(a100, "xid 13", "1")
    assert a100.state.integer("gpus/1/recovery_action") == 0
    assert len(faults.records(a100)) == 1, "a line alone leaves nothing to mend"


def test_uncorrectable_error_waits_for_a_reset_to_remap_its_row(a100: Machine, tmp_path: Path) -> None:
    faults.inject(a100, "ecc uncorrected 1", "0")
    counts = ("ecc/volatile/uncorrected/dram", "ecc/aggregate/uncorrected/dram", "remapped_rows_pending")
    assert [a100.state.integer(f"gpus/0/{name}") for name in counts] == [1, 1, 1]
    assert a100.state.integer("gpus/0/remapper_banks_maximum") + a100.state.integer("gpus/0/remapper_banks_high") == 640
    lifecycle.reset_card(a100.state, "0")
    assert [a100.state.integer(f"gpus/0/{name}") for name in counts] == [0, 1, 0]
    old = build("t4x2", tmp_path)
    faults.inject(old, "ecc uncorrected 1", "0")
    assert old.state.integer("gpus/0/retired_pages_pending") == 1
    assert len(old.state.names("gpus/0/retired_pages/1")) == 1


def test_nvlink_goes_down_at_both_ends(a100: Machine) -> None:
    state = a100.state
    faults.inject(a100, "nvlink 5 down", "0")
    down = [
        (index, link)
        for index in state.names("gpus")
        for link in state.names(f"gpus/{index}/nvlinks")
        if state.text(f"gpus/{index}/nvlinks/{link}/state") == "0"
    ]
    (here, link), (peer, other) = down
    assert (here, link) == ("0", "5")
    assert state.text(f"gpus/0/nvlinks/{link}/remote_address") == state.text(f"gpus/{peer}/pci_address")
    assert state.text(f"gpus/{peer}/nvlinks/{other}/remote_address") == state.text("gpus/0/pci_address")


def test_loss_is_a_ratio_of_two_counters_that_grow_together(a100: Machine) -> None:
    faults.inject(a100, "roce loss 0.1 %", "mlx5_0")
    remainders: dict[str, float] = {}
    for _step in range(40):
        faults.advance(a100, 0.25, remainders)
    packets = a100.state.integer("ports/0/ethtool/tx_vport_rdma_unicast_packets")
    errors = a100.state.integer("ports/0/hw_counters/packet_seq_err")
    assert packets == 500_000
    assert errors / packets == pytest.approx(0.001)
    counter = a100.root / "sys/class/infiniband/mlx5_0/ports/1/hw_counters/packet_seq_err"
    assert int(counter.read_text()) == errors
    assert a100.state.integer("ports/1/hw_counters/packet_seq_err") == 0


def test_queue_counters_wrap_at_32_bits_and_others_do_not(a100: Machine) -> None:
    a100.state.set("ports/0/hw_counters/rx_write_requests", (1 << 32) - 5)
    a100.state.set("ports/0/ethtool/tx_packets_phy", (1 << 32) - 5)
    faults.inject(a100, "roce traffic", "mlx5_0")
    faults.advance(a100, 1.0)
    assert a100.state.integer("ports/0/hw_counters/rx_write_requests") == faults.PACKETS // 16 - 5
    assert a100.state.integer("ports/0/ethtool/tx_packets_phy") == (1 << 32) - 5 + faults.PACKETS


def test_storm_is_seen_at_both_ends_of_the_link_and_reported_by_the_root_port(a100: Machine) -> None:
    faults.inject(a100, "aer storm", "3")
    faults.advance(a100, 1.0)
    device = (a100.root / "sys/bus/pci/devices/0000:84:00.0").resolve()
    assert "BadTLP 200\n" in (device / "aer_dev_correctable").read_text()
    assert "RxErr 300\n" in (device.parent / "aer_dev_correctable").read_text()
    root = a100.root / "sys/bus/pci/devices/0000:80:01.1"
    assert (root / "aer_rootport_total_err_cor").read_text() == "500\n"


def test_faults_end_in_time_and_the_keeper_with_them(a100: Machine) -> None:
    a100.state.set("ports/0/pfc", "0,0,0,1,0,0,0,0")
    faults.inject(a100, "pfc off", "ens1f0np0", seconds=0.2)
    faults.inject(a100, "roce traffic", "mlx5_1", seconds=0.6)
    began = time.monotonic()
    faults.keep(a100)
    assert 0.5 < time.monotonic() - began < 30
    assert a100.state.text("ports/0/pfc") == "0,0,0,1,0,0,0,0"
    assert a100.state.integer("ports/1/ethtool/tx_packets_phy") > 0
    assert faults.records(a100) == {}


def test_newest_fault_is_mended_first(a100: Machine) -> None:
    faults.inject(a100, "pcie width 8", "0")
    faults.inject(a100, "pcie width 4", "0")
    faults.mend(a100)
    assert a100.state.integer("gpus/0/pcie_width") == 16


def test_mending_one_part_leaves_the_others(a100: Machine) -> None:
    faults.inject(a100, "lost card", "0")
    faults.inject(a100, "lost card", "1")
    faults.inject(a100, "port down", "mlx5_1")
    assert faults.mend(a100, "1") == 1
    assert a100.state.has("gpus/0/lost")
    assert not a100.state.has("gpus/1/lost")
    assert faults.mend(a100, "ens1f1np1") == 1
    assert a100.state.integer("ports/1/link") == 1


def test_boot_cures_what_is_volatile_forgets_settings_and_leaves_broken_hardware(a100: Machine) -> None:
    for phrase in ("lost card", "throttle thermal", "nvlink 3 down", "pcie width 8", "ecc off", "driver unloaded"):
        faults.inject(a100, phrase)
    faults.inject(a100, "lost card for good", "1")
    lifecycle.boot(a100.state)
    faults.boot(a100)
    state = a100.state
    assert not state.has("gpus/0/lost")
    assert state.integer("gpus/0/clock_graphics_mhz") == 210
    assert state.integer("driver/loaded") == 1
    assert state.integer("gpus/1/lost") == 1
    assert state.integer("gpus/0/nvlinks/3/state") == 0
    assert state.integer("gpus/0/pcie_width") == 8
    assert (state.integer("gpus/0/ecc_current"), state.integer("gpus/0/ecc_pending")) == (0, 0)
    assert faults.mend(a100) == 3, "what stays can still be mended"
    assert state.integer("gpus/0/nvlinks/3/state") == 1
    assert state.integer("gpus/0/pcie_width") == 16
    assert state.integer("gpus/0/ecc_current") == 0, "somebody's setting is somebody's to change"


def test_ecc_that_was_set_again_is_on_after_the_boot(a100: Machine) -> None:
    faults.inject(a100, "ecc off", "0")
    a100.state.set("gpus/0/ecc_pending", 1)
    lifecycle.boot(a100.state)
    faults.boot(a100)
    assert a100.state.integer("gpus/0/ecc_current") == 1


def test_process_holds_a_card_until_it_is_told_to_end(a100: Machine) -> None:
    faults.inject(a100, "process holds a card 2048 MiB", "2")
    folder = "gpus/2/processes"
    end = time.monotonic() + 20
    while not a100.state.names(folder) and time.monotonic() < end:
        time.sleep(0.05)
    (pid,) = a100.state.names(folder)
    assert a100.state.integer(f"{folder}/{pid}/memory_mib") == 2048
    assert str(a100.root / "dev/nvidia2") in [str(file.resolve()) for file in Path(f"/proc/{pid}/fd").iterdir()]
    faults.mend(a100)
    while a100.state.names(folder) and time.monotonic() < end:
        time.sleep(0.05)
    assert a100.state.names(folder) == []


def test_a_read_of_the_log_gives_one_line(a100: Machine) -> None:
    """As of /dev/kmsg: journald takes what one read gives for one line."""
    pipe = a100.root / "dev/kmsg"
    os.mkfifo(pipe)
    with pipe.open("r+b", buffering=0) as reader:
        faults.inject(a100, "xid 79", "2")
        first, second = reader.read(8192), reader.read(8192)
    assert first is not None
    assert second is not None
    assert (first.count(b"\n"), second.count(b"\n")) == (1, 1)
    assert first.startswith(b"4,0,")
    assert second.startswith(b"4,1,")
