# SPDX-License-Identifier: GPL-3.0-or-later
"""What the lanes make of a host's hardware: subjects, quantities, and reasons where something is not known."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ansible_collections.ringmaster.inference.plugins.module_utils.ethernet_statistics import EthernetStatistics
from ansible_collections.ringmaster.inference.plugins.module_utils.file_tree import FileTree, KeptFileTree
from ansible_collections.ringmaster.inference.plugins.module_utils.gpu import VITALS
from ansible_collections.ringmaster.inference.plugins.module_utils.nvlink import FIELDS_ERROR_TOTAL
from ansible_collections.ringmaster.inference.plugins.module_utils.nvml import NvmlUnavailableError
from ansible_collections.ringmaster.inference.plugins.module_utils.rdma_health import Sample
from rehearsal.hardware import Machine, build
from ringmaster_agent import hardware
from ringmaster_agent.hardware import CardLane, PcieLane, RdmaLane, Report, lanes
from tests.support.nvml import Code, Library, a100, driver_files, field, l40s

ADDRESSES = ("0000:07:00.0", "0000:0f:00.0", "0000:47:00.0")


def cards(tmp_path: Path, *answers: dict[str, Any], **system: Any) -> tuple[CardLane, Library]:
    library = Library(*answers, **system)
    driver_files(tmp_path, *ADDRESSES[: len(answers)])
    return CardLane(FileTree(str(tmp_path)), lambda: library), library


def read(lane: Any, **suspended: str) -> Report:
    return lane.read({name.replace("_", " "): reason for name, reason in suspended.items()}, lambda _step: None)


def card(position: int = 0) -> dict[str, Any]:
    answers = a100(position, ClockInfo={(1,): 1410}, MaxClockInfo={(1,): 1410})
    answers["fields"] |= {number: field(0) for number in FIELDS_ERROR_TOTAL}
    return answers


def test_card_tells_everything_that_the_stream_has(tmp_path: Path) -> None:
    lane, _library = cards(tmp_path, card())
    report = read(lane)
    uuid = card()["UUID"]
    told = report.values[f"gpu/{uuid}"]
    assert {
        "index": 0,
        "pci_address": "0000:07:00.0",
        "model": "NVIDIA A100-SXM4-80GB",
        "state": "ok",
    }.items() <= told.items()
    assert {name for name in VITALS if told[name] is None} == set()
    assert told["clock_event_reasons"] == ["gpu_idle"]
    assert report.values[f"nvlink/{uuid}"]["links"] == 12
    assert report.unknown == {}
    json.dumps(report.values, allow_nan=False)


def test_card_without_nvlink_has_no_such_subject(tmp_path: Path) -> None:
    lane, _library = cards(tmp_path, l40s())
    assert [subject for subject in read(lane).values if subject.startswith("nvlink/")] == []


def test_lost_card_is_told_with_one_reason_and_the_others_are_read(tmp_path: Path) -> None:
    lane, _library = cards(tmp_path, card(), a100(1, handle=Code(15)), a100(2))
    report = read(lane)
    states = {told["pci_address"]: told["state"] for name, told in report.values.items() if name.startswith("gpu/")}
    assert states == dict(zip(ADDRESSES, ("ok", "lost", "ok")))
    # Its uuid is the one that the driver's own file has.
    assert "fallen off the bus" in report.unknown["gpu/GPU-from-the-file-of-0f"]
    assert len(report.unknown["gpu/GPU-from-the-file-of-0f"]) < 200


def test_suspended_card_is_not_asked(tmp_path: Path) -> None:
    lane, library = cards(tmp_path, card(), a100(1), a100(2))
    library.cards[1]["handle"] = AssertionError("asked")
    report = read(lane, gpu_1="no answer within 5 s")
    told = report.values["gpu/GPU-from-the-file-of-0f"]
    assert (told["state"], told["utilization_percent"]) == ("no_answer", None)
    assert report.unknown["gpu/GPU-from-the-file-of-0f"].endswith(": no answer within 5 s")
    assert report.values["nvlink/GPU-from-the-file-of-0f"]["down"] is None


def test_silent_card_keeps_its_place_between_two_walks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lane, _library = cards(tmp_path, card(), a100(1, handle=Code(15)))
    first = read(lane)
    monkeypatch.setattr(hardware.gpu_module, "on_the_bus", lambda _files: pytest.fail("walked"))
    assert read(lane).values == first.values


def test_card_that_nvml_does_not_list_is_told(tmp_path: Path) -> None:
    lane, library = cards(tmp_path, card(), a100(1))
    library.cards.pop()
    report = read(lane)
    assert report.values["gpu/GPU-from-the-file-of-0f"]["state"] == "not_listed"


def test_after_a_while_an_ill_card_is_asked_in_a_new_session(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = 0

    def find() -> Library:
        nonlocal opened
        opened += 1
        return Library(card(), a100(1, handle=Code(15)) if opened == 1 else card(1))

    driver_files(tmp_path, *ADDRESSES[:2])
    lane = CardLane(FileTree(str(tmp_path)), find)
    assert len(read(lane).unknown) == 2
    read(lane)
    assert opened == 1
    monkeypatch.setattr(hardware, "ILL_SESSION_SECONDS", -1.0)
    read(lane)
    assert read(lane).unknown == {}
    assert opened == 2


def test_missing_driver_is_raised_and_tried_again(tmp_path: Path) -> None:
    lane, library = cards(tmp_path, card(), init=Code(9))
    for _unused in range(2):
        with pytest.raises(NvmlUnavailableError, match="kernel module"):
            read(lane)
    library.system.pop("init")
    assert len(read(lane).values) == 2


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return build("a100-sxm4x8", tmp_path)


@pytest.fixture
def kept(machine: Machine) -> Iterator[KeptFileTree]:
    tree = KeptFileTree(str(machine.root))
    yield tree
    tree.close()


@pytest.fixture
def pcie(machine: Machine, kept: KeptFileTree) -> PcieLane:
    return PcieLane(FileTree(str(machine.root)), kept)


def test_pcie_of_cards_and_adapters(machine: Machine, pcie: PcieLane) -> None:
    report = read(pcie)
    kinds = [told["kind"] for told in report.values.values()]
    assert (kinds.count("gpu"), kinds.count("nic"), len(kinds)) == (8, 8, 16)
    assert report.unknown == {}
    assert {told["width"] for told in report.values.values()} == {16}


def test_growth_of_error_counters_is_seen_through_kept_files(machine: Machine, pcie: PcieLane) -> None:
    address = machine.state.text("gpus/0/pci_address")
    above = machine.state.text(f"pci/{address}/above")
    assert read(pcie).values[f"pcie/{address}"]["correctable"] == 0
    machine.state.set(f"pci/{address}/aer/correctable/BadTLP", 7)
    machine.state.set(f"pci/{above}/aer/nonfatal/CmpltTO", 3)
    machine.tree.refresh()
    told = read(pcie).values[f"pcie/{address}"]
    assert (told["correctable"], told["above_correctable"], told["above_nonfatal"]) == (7, 0, 3)


def test_device_that_is_gone_is_left_out(machine: Machine, pcie: PcieLane, kept: KeptFileTree) -> None:
    address = machine.state.text("gpus/0/pci_address")
    read(pcie)
    folder = machine.root / "sys/bus/pci/devices" / address
    folder.unlink()
    kept.close()  # a descriptor of sysfs answers ENODEV then
    assert f"pcie/{address}" not in read(pcie).values


def test_suspended_function_is_not_read(machine: Machine, pcie: PcieLane) -> None:
    address = machine.state.text("gpus/0/pci_address")
    report = pcie.read({f"pcie {address}": "no answer within 5 s"}, lambda _step: None)
    assert report.values[f"pcie/{address}"] == {"kind": "gpu", "correctable": None, "nonfatal": None, "fatal": None}
    assert report.unknown[f"pcie/{address}"] == "correctable, nonfatal, fatal: no answer within 5 s"


class Statistics(EthernetStatistics):
    """Counters of interfaces made up by a test."""

    def __init__(self, **counters: dict[str, int]) -> None:
        self.counters = counters

    def read(self, netdev: str) -> tuple[dict[str, int] | None, str]:
        return (self.counters[netdev], "") if netdev in self.counters else (None, f"{netdev}: No such device")


def test_ports_are_told_as_samples_of_what_is_judged(machine: Machine, kept: KeptFileTree) -> None:
    netdev = machine.state.text("ports/0/netdev")
    counters = {"tx_vport_rdma_unicast_packets": 5, "rx_prio3_discards": 1, "tx_bytes_phy": 9}
    lane = RdmaLane(FileTree(str(machine.root)), kept, Statistics(**{netdev: counters}))
    machine.state.set("ports/0/hw_counters/out_of_sequence", 12)
    machine.tree.refresh_counters("0")
    report = read(lane)
    assert len(report.values) == 8
    told = report.values["port/mlx5_0/1"]
    assert (told["netdev"], told["state"]) == (netdev, "ACTIVE")
    sample = Sample.from_document(told["sample"])
    assert sample.hardware["out_of_sequence"] == 12
    assert "rx_write_requests" not in sample.hardware
    assert sample.ethernet == {"tx_vport_rdma_unicast_packets": 5, "rx_prio3_discards": 1}
    assert report.unknown["port/mlx5_1/1"].startswith("sample: ens")
    machine.state.set("ports/0/link", 0)
    machine.tree.refresh()
    assert read(lane).values["port/mlx5_0/1"]["state"] == "DOWN"


def test_host_without_such_hardware_has_no_lane(tmp_path: Path, machine: Machine) -> None:
    (tmp_path / "empty").mkdir()
    assert lanes(str(tmp_path / "empty")) == {}
    assert sorted(lanes(str(machine.root))) == ["nvml", "pcie", "rdma"]


@pytest.mark.parametrize("count", [1, 3, 4, 20])
def test_many_names_for_one_reason_are_not_listed(count: int) -> None:
    report = Report()
    names = [f"q{number}" for number in range(count)]
    report.put("gpu/a", dict.fromkeys(names), dict.fromkeys(names, "lost"))
    assert report.unknown["gpu/a"].count("q") == min(count, 3 if count <= 3 else 2)


def test_reason_for_something_that_is_not_told_is_left_out() -> None:
    report = Report()
    report.put("gpu/a", {"one": 1}, {"serial": "unknown"})
    assert report.unknown == {}


def test_every_step_is_named_before_it_is_taken(machine: Machine, pcie: PcieLane, tmp_path: Path) -> None:
    def steps(lane: Any) -> Iterator[str]:
        taken: list[str] = []
        lane.read({}, taken.append)
        yield from taken

    assert next(steps(pcie)) == "pcie"
    assert len(list(steps(pcie))) == 16  # no walk again
    lane, _library = cards(tmp_path / "nvml", card(), a100(1))
    assert list(steps(lane)) == ["nvml", "gpu 0", "gpu 1", "nvml"]
