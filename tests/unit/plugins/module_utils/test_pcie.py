# SPDX-License-Identifier: GPL-3.0-or-later
"""PCI Express functions from files as the kernel has them, whole, for a user without rights, and damaged."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ansible_collections.ringmaster.inference.plugins.module_utils.counters import take
from ansible_collections.ringmaster.inference.plugins.module_utils.file_tree import FileTree
from ansible_collections.ringmaster.inference.plugins.module_utils.pci_configuration import (
    PORT_TYPES,
    ConfigurationSpace,
)
from ansible_collections.ringmaster.inference.plugins.module_utils.pcie import (
    PcieReader,
    kind_of,
    normal_address,
    parse_errors,
    parse_speed,
)
from tests.support.unknown import assert_every_null_has_a_reason

ROOT, UP, DOWN, GPU, NIC = "0000:00:01.1", "0000:04:00.0", "0000:05:00.0", "0000:07:00.0", "0000:3b:00.0"
NIC_ROOT = "0000:00:03.1"
NO_ERRORS = (
    "RxErr 0\nBadTLP 0\nBadDLLP 0\nRollover 0\nTimeout 0\nNonFatalErr 0\nCorrIntErr 0\nHeaderOF 0\nTOTAL_ERR_COR 0\n"
)
TYPES = {name: number for number, name in PORT_TYPES.items()}


def space(port_type: str = "endpoint", aspm: int = 0, acs: int | None = None, serial: bytes | None = None) -> bytes:
    """Configuration space with a PCI Express capability at 0x60 behind another one, and extended ones in a chain."""
    content = bytearray(4096)
    struct.pack_into("<HHHH", content, 0, 0x10DE, 0x20B2, 0x0406, 0x0010)
    content[0x34] = 0x40
    struct.pack_into("<BB", content, 0x40, 0x01, 0x60)  # power management
    struct.pack_into("<BBH", content, 0x60, 0x10, 0, 2 | TYPES[port_type] << 4)
    struct.pack_into("<I", content, 0x6C, 4 | 16 << 4 | 3 << 10)
    struct.pack_into("<H", content, 0x70, 0x0040 | aspm)
    chain = [(0x100, 0x0001)]
    if acs is not None:
        chain.append((0x150, 0x000D))
        struct.pack_into("<HH", content, 0x154, 0x005F, acs)
    if serial is not None:
        chain.append((0x200, 0x0003))
        content[0x204:0x20C] = serial
    for index, (offset, identifier) in enumerate(chain):
        following = chain[index + 1][0] if index + 1 < len(chain) else 0
        struct.pack_into("<I", content, offset, identifier | 1 << 16 | following << 20)
    return bytes(content)


class Machine:
    """A tree with a GPU behind a switch and a network adapter at a root port of its own."""

    def __init__(self, root: Path) -> None:
        self.root = root
        (root / "sys/bus/pci/devices").mkdir(parents=True)
        self.write("/proc/sys/kernel/random/boot_id", "5f0c1d5e-1c5b-4b9c-9a53-0a6a2c1f9b11\n")
        self.write("/sys/module/pcie_aspm/parameters/policy", "[default] performance powersave powersupersave \n")
        self.function(f"pci0000:00/{ROOT}", "0x060400", space("root_port", acs=0x1D), vendor="0x1022")
        self.function(f"pci0000:00/{ROOT}/{UP}", "0x060400", space("switch_upstream_port"), vendor="0x1000")
        self.function(f"pci0000:00/{ROOT}/{UP}/{DOWN}", "0x060400", space("switch_downstream_port", acs=0))
        self.gpu = self.function(f"pci0000:00/{ROOT}/{UP}/{DOWN}/{GPU}", "0x030200", space(aspm=2))
        self.function(
            f"pci0000:00/{NIC_ROOT}", "0x060400", space("root_port"), max_link_width="16", current_link_width="8"
        )
        nic = f"pci0000:00/{NIC_ROOT}/{NIC}"
        serial = bytes.fromhex("c4b2a10003d23fb8")
        self.nic = self.function(
            nic, "0x020000", space(serial=serial), vendor="0x15b3", max_link_width="8", current_link_width="8"
        )
        (self.nic / "net/ens1f0np0").mkdir(parents=True)
        (self.nic / "infiniband/mlx5_0").mkdir(parents=True)
        (self.root / "sys/bus/pci/drivers/nvidia").mkdir(parents=True)
        (self.gpu / "driver").symlink_to("/sys/bus/pci/drivers/nvidia")
        for port in (ROOT, NIC_ROOT):
            for severity in ("cor", "fatal", "nonfatal"):
                self.write(f"/sys/devices/pci0000:00/{port}/aer_rootport_total_err_{severity}", "0\n")

    def write(self, path: str, content: str | bytes) -> None:
        file = self.root / path.lstrip("/")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(content.encode() if isinstance(content, str) else content)

    def function(self, place: str, class_code: str, config: bytes, **files: str) -> Path:
        folder = self.root / "sys/devices" / place
        given = {
            "class": class_code,
            "vendor": "0x10de",
            "device": "0x20b2",
            "subsystem_vendor": "0x10de",
            "subsystem_device": "0x1463",
            "revision": "0xa1",
            "numa_node": "0",
            "local_cpulist": "0-31,64-95",
            "current_link_speed": "16.0 GT/s PCIe",
            "max_link_speed": "16.0 GT/s PCIe",
            "current_link_width": "16",
            "max_link_width": "16",
            **files,
        }
        for name, content in given.items():
            self.write(f"/sys/devices/{place}/{name}", content + "\n")
        self.write(f"/sys/devices/{place}/config", config)
        self.write(f"/sys/devices/{place}/aer_dev_correctable", NO_ERRORS)
        self.write(f"/sys/devices/{place}/aer_dev_nonfatal", "Undefined 0\nCmpltTO 0\nTOTAL_ERR_NONFATAL 0\n")
        self.write(f"/sys/devices/{place}/aer_dev_fatal", "Undefined 0\nCmpltTO 0\nTOTAL_ERR_FATAL 0\n")
        (self.root / "sys/bus/pci/devices" / folder.name).symlink_to(f"../../../devices/{place}")
        return folder

    @property
    def reader(self) -> PcieReader:
        return PcieReader(FileTree(str(self.root)))

    def read(self, *addresses: str) -> dict[str, dict[str, Any]]:
        found = self.reader.devices(addresses)
        json.dumps(found, allow_nan=False).encode("utf-8")
        assert_every_null_has_a_reason(found)
        return {device["pci_address"]: device for device in found}


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


@pytest.fixture(scope="module")
def shared_machine(tmp_path_factory: pytest.TempPathFactory) -> Machine:
    """For tests that leave it as they found it."""
    return Machine(tmp_path_factory.mktemp("machine"))


def test_a_healthy_machine(machine: Machine) -> None:
    devices = machine.read()
    assert list(devices) == [ROOT, NIC_ROOT, UP, DOWN, GPU, NIC]
    assert [device["kind"] for device in devices.values()] == [
        "root_port",
        "root_port",
        "switch_port",
        "switch_port",
        "gpu",
        "nic",
    ]
    gpu = devices[GPU]
    assert gpu["ports_above"] == [DOWN, UP, ROOT]
    assert (gpu["class"], gpu["class_code"], gpu["vendor"], gpu["vendor_id"]) == (
        "3D controller",
        "0x030200",
        "NVIDIA",
        "0x10de",
    )
    assert (gpu["device_id"], gpu["subsystem_device_id"], gpu["revision"]) == ("0x20b2", "0x1463", "0xa1")
    assert (gpu["driver"], gpu["numa_node"], gpu["local_cpus"]) == ("nvidia", 0, "0-31,64-95")
    assert gpu["link"] == {
        "speed_gt_per_second": 16.0,
        "speed_maximum_gt_per_second": 16.0,
        "speed_below_maximum": False,
        "width": 16,
        "width_maximum": 16,
        "width_expected": 16,
        "width_downgraded": False,
        "unknown": {},
    }
    assert gpu["aspm"] == {"state": "l1", "source": "link_control", "supported": "l0s_l1", "unknown": {}}
    assert gpu["acs"]["supported"] is False
    assert gpu["port_type"] == "endpoint"
    assert gpu["errors"]["correctable"]["counts"]["RxErr"] == 0
    assert gpu["errors"]["correctable"]["reported_total"] == 0
    assert "root_port" not in gpu["errors"]
    assert devices[NIC]["netdevs"] == ["ens1f0np0"]
    assert devices[NIC]["rdma_devices"] == ["mlx5_0"]
    assert devices[NIC]["vendor"] == "NVIDIA Mellanox"
    assert devices[NIC]["serial_number"] == "b8-3f-d2-03-00-a1-b2-c4"
    assert devices[NIC]["driver"] is None
    assert devices[ROOT]["port_type"] == "root_port"
    assert devices[ROOT]["acs"]["controls"]["request_redirect"] is True
    assert devices[ROOT]["acs"]["control"] == "0x001d"
    assert devices[ROOT]["acs"]["redirects_peer_to_peer"] is True
    assert devices[DOWN]["acs"]["redirects_peer_to_peer"] is False
    assert devices[ROOT]["errors"]["root_port"]["counts"] == {"correctable": 0, "nonfatal": 0, "fatal": 0}
    assert [device["problems"] for device in devices.values()] == [[]] * 6
    assert machine.reader.aspm_policy() == "default"


def test_a_port_is_not_blamed_for_a_narrow_device(machine: Machine) -> None:
    port = machine.read()[NIC_ROOT]["link"]
    assert (port["width"], port["width_maximum"], port["width_expected"]) == (8, 16, 8)
    assert port["width_downgraded"] is False


def test_lost_lanes_are_a_problem_at_both_ends(machine: Machine) -> None:
    for folder in (machine.gpu, machine.gpu.parent):
        (folder / "current_link_width").write_text("8\n")
    devices = machine.read()
    for address in (GPU, DOWN):
        assert devices[address]["link"]["width_downgraded"] is True
        assert devices[address]["problems"] == ["link runs on 8 of 16 lanes"]
    assert devices[UP]["problems"] == []


def test_a_card_in_a_narrow_slot_is_reported(machine: Machine) -> None:
    (machine.gpu / "current_link_width").write_text("8\n")
    for name in ("current_link_width", "max_link_width"):
        (machine.gpu.parent / name).write_text("8\n")
    devices = machine.read()
    assert devices[GPU]["link"]["width_downgraded"] is True
    assert devices[DOWN]["link"]["width_downgraded"] is False


@pytest.mark.parametrize("whole", [True, False], ids=["by its type", "by its place"])
def test_a_switch_s_port_that_faces_up_is_judged_by_the_link_above_it(machine: Machine, whole: bool) -> None:
    upstream = machine.gpu.parent.parent
    (upstream / "current_link_width").write_text("8\n")
    for folder in (upstream / DOWN, upstream / DOWN / GPU):
        (folder / "max_link_width").write_text("8\n")
    if not whole:
        (upstream / "config").write_bytes(space()[:64])
    assert machine.read()[UP]["link"]["width_downgraded"] is True


def test_speed_of_an_idle_card_is_told_but_no_problem(machine: Machine) -> None:
    (machine.gpu / "current_link_speed").write_text("2.5 GT/s PCIe")
    gpu = machine.read()[GPU]
    assert gpu["link"]["speed_gt_per_second"] == 2.5
    assert gpu["link"]["speed_below_maximum"] is True
    assert gpu["problems"] == []


@pytest.mark.parametrize("width", ["0", "255", "Unknown", "", "-8", "33"])
def test_width_that_is_not_known(machine: Machine, width: str) -> None:
    (machine.gpu / "current_link_width").write_text(width)
    link = machine.read()[GPU]["link"]
    assert link["width"] is None
    assert link["width_downgraded"] is None
    assert "current_link_width" in link["unknown"]["width"]


@pytest.mark.parametrize(
    ("text", "speed"),
    [
        ("16.0 GT/s PCIe", 16.0),
        ("16 GT/s", 16.0),
        ("2.5 GT/s PCIe", 2.5),
        ("64.0 GT/s PCIe", 64.0),
        ("Unknown", None),
        ("Unknown speed", None),
        ("", None),
        (None, None),
        ("nan GT/s", None),
        ("1.2.3 GT/s", None),
    ],
)
def test_speed(text: str | None, speed: float | None) -> None:
    assert parse_speed(text) == speed


@pytest.mark.parametrize(
    ("given_address", "normal"),
    [
        ("0000:07:00.0", "0000:07:00.0"),
        ("00000000:3B:00.0", "0000:3b:00.0"),
        ("07:00.0", "0000:07:00.0"),
        ("00010000:e1:00.0", "10000:e1:00.0"),
        ("10000:e1:00.0", "10000:e1:00.0"),
        ("0000:07:00", None),
        ("0000:07:20.0", None),
        ("0000:07:00.8", None),
        ("../../etc", None),
        ("", None),
        (":", None),
    ],
)
def test_addresses_in_every_form(given_address: str, normal: str | None) -> None:
    assert normal_address(given_address) == normal


def test_classes() -> None:
    found = {
        code: kind_of(code) for code in (0x030000, 0x030200, 0x120000, 0x020000, 0x020700, 0x0C0600, 0x0C0330, 0x010802)
    }
    assert found == {
        0x030000: "gpu",
        0x030200: "gpu",
        0x120000: "gpu",
        0x020000: "nic",
        0x020700: "nic",
        0x0C0600: "nic",
        0x0C0330: None,
        0x010802: None,
    }


def test_only_what_is_asked_for_with_its_ports(machine: Machine) -> None:
    assert list(machine.read(GPU)) == [ROOT, UP, DOWN, GPU]
    assert list(machine.read("0000:99:00.0")) == []


def test_virtual_functions_and_a_management_controllers_display_are_left_out(machine: Machine) -> None:
    place = f"pci0000:00/{NIC_ROOT}/0000:3b:00.2"
    virtual = machine.function(place, "0x020000", b"")
    (virtual / "physfn").symlink_to("../0000:3b:00.0")
    display = machine.function("pci0000:00/0000:02:00.0", "0x030000", space()[:256])
    for name in ("current_link_width", "max_link_width", "current_link_speed", "max_link_speed"):
        (display / name).unlink()
    assert list(machine.read()) == [ROOT, NIC_ROOT, UP, DOWN, GPU, NIC]


def test_interface_of_a_paravirtual_adapter(machine: Machine) -> None:
    place = "pci0000:00/0000:00:05.0"
    machine.write(f"/sys/devices/{place}/virtio2/net/eth0/address", "")
    machine.function(place, "0x020000", space()[:256], vendor="0x1af4")
    assert machine.read()["0000:00:05.0"]["netdevs"] == ["eth0"]


def test_flat_tree_without_links(tmp_path: Path) -> None:
    """Nothing tells which ports are above; nothing is made up."""
    folder = tmp_path / "sys/bus/pci/devices" / GPU
    folder.mkdir(parents=True)
    (folder / "class").write_text("0x030200")
    (folder / "current_link_width").write_text("16")
    gpu = PcieReader(FileTree(str(tmp_path))).devices()[0]
    assert gpu["ports_above"] == []
    assert gpu["link"]["width"] == 16
    assert gpu["link"]["width_downgraded"] is None
    assert_every_null_has_a_reason(gpu)


def test_no_pci_at_all(tmp_path: Path) -> None:
    reader = PcieReader(FileTree(str(tmp_path)))
    assert reader.devices() == []
    assert reader.aspm_policy() is None
    assert reader.tree.boot_id() is None


@pytest.mark.parametrize(
    ("cut", "type_reason", "acs_reason"),
    [
        (0, "only root", "only root"),
        (64, "only root", "only root"),
        (256, "", "extended configuration space can't be read"),
    ],
)
def test_configuration_space_that_is_cut(machine: Machine, cut: int, type_reason: str, acs_reason: str) -> None:
    root = machine.gpu.parent.parent.parent
    (root / "config").write_bytes(space("root_port", acs=0x1D)[:cut])
    (machine.gpu / "config").write_bytes(space(aspm=2)[:cut])
    devices = machine.read()
    assert type_reason in devices[ROOT]["unknown"].get("port_type", "")
    assert acs_reason in devices[ROOT]["acs"]["unknown"]["controls"]
    assert devices[ROOT]["acs"]["supported"] is None
    assert devices[ROOT]["acs"]["redirects_peer_to_peer"] is None
    assert devices[GPU]["aspm"]["state"] == ("l1" if cut == 256 else None)
    assert devices[ROOT]["kind"] == "root_port", "the place tells what the function itself can't"


@pytest.mark.parametrize(
    ("l0s", "l1", "state"), [("0", "0", "disabled"), ("1", "0", "l0s"), ("0", "1", "l1"), ("1", "1", "l0s_l1")]
)
def test_aspm_from_the_kernels_switches_where_the_register_can_not_be_read(
    machine: Machine, l0s: str, l1: str, state: str
) -> None:
    (machine.gpu / "config").write_bytes(space(aspm=2)[:64])
    (machine.gpu / "link").mkdir()
    (machine.gpu / "link/l0s_aspm").write_text(l0s)
    (machine.gpu / "link/l1_aspm").write_text(l1)
    aspm = machine.read()[GPU]["aspm"]
    assert (aspm["state"], aspm["source"]) == (state, "sysfs")
    (machine.gpu / "link/l1_aspm").write_text("")
    assert machine.read()[GPU]["aspm"]["state"] is None


def test_the_register_outranks_the_kernels_switches(machine: Machine) -> None:
    """With pcie_aspm=off the kernel leaves what the firmware set."""
    (machine.gpu / "link").mkdir()
    (machine.gpu / "link/l0s_aspm").write_text("0")
    (machine.gpu / "link/l1_aspm").write_text("0")
    assert machine.read()[GPU]["aspm"]["state"] == "l1"


def test_a_card_off_the_bus(machine: Machine) -> None:
    (machine.gpu / "config").write_bytes(b"\xff" * 4096)
    (machine.gpu / "current_link_width").write_text("63")
    (machine.gpu / "current_link_speed").write_text("Unknown")
    gpu = machine.read()[GPU]
    assert gpu["problems"] == ["does not answer: its configuration space reads as all ones"]
    assert gpu["aspm"]["state"] is None
    assert gpu["acs"]["supported"] is None
    assert gpu["link"]["width"] is None
    assert gpu["serial_number"] is None


def test_errors_by_name_with_names_that_nobody_knows() -> None:
    text = "RxErr 3\nBrand New Error 7\nTOTAL_ERR_COR 4"
    assert parse_errors(text) == ({"RxErr": 3, "Brand New Error": 7}, 4, [])


@pytest.mark.parametrize("line", ["RxErr", "RxErr x", "RxErr -1", "5", "RxErr 99999999999999999999", "\ufffd"])
def test_lines_that_are_no_counter_are_told_and_not_counted(line: str) -> None:
    assert parse_errors(f"{line}\nBadTLP 1") == ({"BadTLP": 1}, None, [line])


def test_error_files_that_are_missing_or_junk(machine: Machine) -> None:
    (machine.gpu / "aer_dev_correctable").unlink()
    (machine.gpu / "aer_dev_fatal").write_bytes(b"\xff\0junk")
    (machine.gpu / "aer_dev_nonfatal").write_bytes(b"CmpltTO 2\n\xff\xff\nTLP 1")
    errors = machine.read()[GPU]["errors"]
    assert errors["correctable"] is None
    assert "no such file" in errors["unknown"]["correctable"]
    assert "4.19" in errors["unknown"]["correctable"]
    assert errors["fatal"] is None
    assert errors["nonfatal"]["counts"] == {"CmpltTO": 2, "TLP": 1}
    assert errors["nonfatal"]["reported_total"] is None
    assert "found also" in errors["nonfatal"]["unknown"]["counts"]


def test_root_port_without_some_of_its_counters(machine: Machine) -> None:
    root = machine.gpu.parent.parent.parent
    (root / "aer_rootport_total_err_fatal").unlink()
    (root / "aer_rootport_total_err_cor").write_text("N/A")
    errors = machine.read()[ROOT]["errors"]
    assert errors["root_port"]["counts"] == {"nonfatal": 0}
    assert set(errors["root_port"]["unknown"]) == {"counts.correctable", "counts.fatal"}
    (root / "aer_rootport_total_err_nonfatal").unlink()
    assert machine.read()[ROOT]["errors"]["root_port"] is None


def test_deltas_against_a_baseline(machine: Machine) -> None:
    reader = machine.reader
    baseline = take(reader.tree.boot_id(), reader.counted(reader.devices()))
    (machine.gpu / "aer_dev_correctable").write_text(NO_ERRORS.replace("BadTLP 0", "BadTLP 4") + "New 1\n")
    (machine.gpu / "aer_dev_nonfatal").write_text("CmpltTO 2\nUndefined 0\n")
    (machine.gpu.parent.parent.parent / "aer_rootport_total_err_nonfatal").write_text("2\n")
    devices = reader.devices()
    reader.compare(devices, baseline)
    assert_every_null_has_a_reason(devices)
    found = {device["pci_address"]: device for device in devices}
    correctable = found[GPU]["errors"]["correctable"]
    assert correctable["deltas"]["BadTLP"] == 4
    assert correctable["deltas"]["RxErr"] == 0
    assert correctable["deltas"]["New"] is None
    assert correctable["delta"] is None
    assert found[GPU]["errors"]["nonfatal"]["delta"] == 2
    assert found[GPU]["problems"] == ["new nonfatal errors since the baseline: CmpltTO 2"]
    assert found[ROOT]["errors"]["root_port"]["deltas"] == {"correctable": 0, "nonfatal": 2, "fatal": 0}
    assert found[NIC]["errors"]["fatal"]["delta"] == 0
    assert found[NIC]["problems"] == []


def test_no_deltas_after_a_boot_or_for_another_card(machine: Machine) -> None:
    reader = machine.reader
    baseline = take(reader.tree.boot_id(), reader.counted(reader.devices()))
    (machine.gpu / "subsystem_device").write_text("0x1500\n")
    devices = reader.devices()
    reader.compare(devices, baseline)
    found = {device["pci_address"]: device["errors"]["fatal"] for device in devices}
    assert found[GPU]["delta"] is None
    assert "another device" in found[GPU]["unknown"]["delta"]
    assert found[NIC]["delta"] == 0

    machine.write("/proc/sys/kernel/random/boot_id", "another\n")
    devices = reader.devices()
    reader.compare(devices, baseline)
    assert all(device["errors"]["fatal"]["delta"] is None for device in devices)
    assert all("booted" in device["errors"]["fatal"]["unknown"]["deltas"] for device in devices)


def test_without_a_baseline_the_reason_is_the_callers(machine: Machine) -> None:
    devices = machine.reader.devices()
    machine.reader.compare(devices, None, "no baseline was asked for")
    assert devices[0]["errors"]["fatal"]["unknown"]["deltas"] == "no baseline was asked for"
    assert_every_null_has_a_reason(devices)


@given(st.text(alphabet="RxErr TOTAL_ERR_COR 0123456789-\n\0", max_size=60) | st.text(max_size=60))
def test_no_text_makes_the_error_parser_fail(text: str) -> None:
    counts, _total, _strange = parse_errors(text)
    assert all(count >= 0 for count in counts.values())


@given(st.text(max_size=30))
def test_no_text_makes_the_other_parsers_fail(text: str) -> None:
    parse_speed(text)
    normal = normal_address(text)
    assert normal is None or normal_address(normal) == normal


def all_of(content: bytes) -> tuple[Any, ...]:
    found = ConfigurationSpace(content)
    return (
        found.port_type,
        found.aspm_enabled,
        found.aspm_supported,
        found.acs_control,
        found.serial_number,
        found.silent,
        found.whole,
    )


@given(st.binary(max_size=600))
def test_no_configuration_space_makes_the_parser_fail_or_go_in_circles(content: bytes) -> None:
    all_of(content)
    all_of(space()[:64] + content)
    all_of((space()[:256] + content).ljust(4096, b"\0"))


@given(st.lists(st.tuples(st.integers(0, 4095), st.integers(0, 255)), max_size=30), st.integers(0, 4096))
def test_no_damage_makes_the_parser_fail(damage: list[tuple[int, int]], length: int) -> None:
    content = bytearray(space("root_port", acs=0x1D, serial=b"12345678"))
    for offset, byte in damage:
        content[offset] = byte
    all_of(bytes(content[:length]))


def test_capability_lists_in_a_circle() -> None:
    content = bytearray(space())
    content[0x60:0x62] = bytes([0x05, 0x40])  # back to the first
    struct.pack_into("<I", content, 0x100, 0x0001 | 1 << 16 | 0x100 << 20)
    found = ConfigurationSpace(bytes(content))
    assert found.port_type is None
    assert found.acs_control is None


def test_registers_at_the_end_of_a_space_that_is_cut() -> None:
    content = space(acs=0x1D)
    assert ConfigurationSpace(content[:0x158]).acs_control == 0x1D
    assert ConfigurationSpace(content[:0x157]).acs_control is None
    assert ConfigurationSpace(content[:0x72]).aspm_enabled == (False, False)
    assert ConfigurationSpace(content[:0x71]).aspm_enabled is None


@given(
    st.dictionaries(
        st.sampled_from(
            ["class", "vendor", "revision", "numa_node", "local_cpulist", "current_link_speed", "max_link_width"]
            + ["config", "aer_dev_fatal", "aer_dev_correctable", "subsystem_device"]
        ),
        st.none() | st.binary(max_size=80),
    )
)
def test_no_files_make_the_reader_fail(shared_machine: Machine, files: dict[str, bytes | None]) -> None:
    gpu = shared_machine.gpu
    intact = {name: (gpu / name).read_bytes() for name in files}
    for name, content in files.items():
        if content is None:
            (gpu / name).unlink()
        else:
            (gpu / name).write_bytes(content)
    try:
        devices = shared_machine.reader.devices()
        shared_machine.reader.compare(devices, take(None, shared_machine.reader.counted(devices)))
        assert_every_null_has_a_reason(devices)
    finally:
        for name, content in intact.items():
            (gpu / name).write_bytes(content)


def endpoints(machine: Machine) -> dict[str, Any]:
    return {endpoint.address: endpoint for endpoint in PcieReader(FileTree(str(machine.root))).endpoints()}


def test_endpoints_are_cards_and_rdma_adapters_with_the_ports_above(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    found = endpoints(machine)
    assert (found[GPU].kind, found[GPU].ports) == ("gpu", (DOWN, UP, ROOT))
    adapter = PcieReader(FileTree(str(tmp_path))).devices([NIC])[-1]
    assert (NIC in found) is bool(adapter["rdma_devices"])


def test_health_says_the_same_as_the_whole_device(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    whole = {device["pci_address"]: device for device in PcieReader(FileTree(str(tmp_path))).devices([GPU])}
    told = PcieReader(FileTree(str(tmp_path))).health(endpoints(machine)[GPU])
    assert told is not None
    assert_every_null_has_a_reason(told)
    link = whole[GPU]["link"]
    assert (told["width"], told["width_max"]) == (link["width"], link["width_maximum"])
    assert (told["speed"], told["speed_max"]) == (link["speed_gt_per_second"], link["speed_maximum_gt_per_second"])
    for severity in ("correctable", "nonfatal", "fatal"):
        entry = whole[GPU]["errors"][severity]
        assert told[severity] == (entry["reported_total"] if entry else None)


def test_health_does_not_expect_more_than_the_slot_has(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    tree = FileTree(str(tmp_path))
    endpoint = endpoints(machine)[GPU]
    own = {"max_link_width": "16\n", "max_link_speed": "32.0 GT/s PCIe\n"}
    slot = {"max_link_width": "8\n", "max_link_speed": "16.0 GT/s PCIe\n"}
    for device, files in ((GPU, own), (DOWN, slot), (UP, {"max_link_width": "4\n"})):
        for name, text in files.items():
            Path(tree.locate(f"/sys/bus/pci/devices/{device}/{name}")).write_text(text)
    told = PcieReader(tree).health(endpoint)
    assert told is not None
    assert (told["width_max"], told["speed_max"]) == (8, 16.0)
    Path(tree.locate(f"/sys/bus/pci/devices/{DOWN}/max_link_width")).write_text("255\n")
    told = PcieReader(tree).health(endpoint)
    assert told is not None
    assert told["width_max"] == 16


def test_health_sums_the_ports_above_and_leaves_out_those_without_reporting(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    tree = FileTree(str(tmp_path))
    reader = PcieReader(tree)
    endpoint = endpoints(machine)[GPU]
    files = {port: Path(tree.locate(f"/sys/bus/pci/devices/{port}/aer_dev_correctable")) for port in (DOWN, UP, ROOT)}
    for port, count in ((DOWN, 3), (UP, 4), (ROOT, 5)):
        files[port].write_text(f"RxErr {count}\nTOTAL_ERR_COR {count}\n")
    told = reader.health(endpoint)
    assert told is not None
    assert told["above_correctable"] == 12
    files[UP].unlink()
    told = reader.health(endpoint)
    assert told is not None
    assert told["above_correctable"] == 8
    files[DOWN].write_text("not a counter at all\n")
    told = reader.health(endpoint)
    assert told is not None
    assert told["above_correctable"] is None
    assert DOWN in told["unknown"]["above_correctable"]


def test_health_of_a_function_that_is_gone(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    endpoint = endpoints(machine)[GPU]
    (tmp_path / "sys/bus/pci/devices" / GPU).unlink()
    assert PcieReader(FileTree(str(tmp_path))).health(endpoint) is None
