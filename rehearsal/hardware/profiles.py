# SPDX-License-Identifier: GPL-3.0-or-later
"""Machines that can be simulated, as data: their cards, network ports and PCIe tree.

Figures of cards are those of NVIDIA's data sheets and of `nvidia-smi -q` on such cards; serial numbers, UUIDs and
addresses are derived from the host's name, so that no two hosts share one and a host keeps its own.
"""

from __future__ import annotations

import hashlib
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field

from rehearsal.hardware.commands import ethtool
from rehearsal.hardware.state import TYPE_CHECKING, State

if TYPE_CHECKING:
    from rehearsal.hardware.state import Value

DRIVER: dict[str, Value] = {"version": "580.95.05", "nvml_version": "13.580.95.05", "cuda_version": 13000, "loaded": 1}
# A host as its vendor ships it: nothing tuned, the IOMMU translates, frequency follows load.
_CMDLINE = "BOOT_IMAGE=/vmlinuz-6.1.0-37-amd64 root=UUID=2f0c5e1b-7f5f-4f0e-9d49-5c2b1a7e9d10 ro"
HOST: dict[str, Value] = {
    "kernel": "6.1.0-37-amd64",
    "cmdline_base": _CMDLINE,  # what the boot loader says by itself
    "cmdline": f"{_CMDLINE} quiet",
    "governor": "schedutil",
    "secure_boot": 0,
    "lockdown": "none",
    "empty_slot": "",
}

_EVERY_CARD: dict[str, Value] = {
    "brand": 14,  # NVML_BRAND_NVIDIA
    "present": 1,
    "persistence": 1,
    "compute_mode": 0,
    "performance_state": 0,
    "fans": 0,  # passive boards: the chassis cools them
    "recovery_action": 0,
    "ecc_current": 1,
    "ecc_pending": 1,
    "ecc_default": 1,
    "pcie_generation": 4,
    "pcie_generation_maximum": 4,
    "pcie_width": 16,
    "pcie_width_maximum": 16,
    "pcie_replays": 0,
    "utilization_gpu_percent": 0,
    "utilization_memory_percent": 0,
    "clocks_event_reasons": 1,  # idle
    "clocks_event_reasons_supported": 0x1FF,
    "energy_millijoules": 184_467_000,
    "inforom_image_version": "G500.0202.00.02",
}
_ROW_REMAPPER: dict[str, Value] = {
    "remapped_rows_correctable": 0,
    "remapped_rows_uncorrectable": 0,
    "remapped_rows_pending": 0,
    "remapped_rows_failure": 0,
    "remapper_banks_high": 0,
    "remapper_banks_partial": 0,
    "remapper_banks_low": 0,
    "remapper_banks_none": 0,
}

CARDS: dict[str, dict[str, Value]] = {
    "a100-sxm4-80gb": {
        **_EVERY_CARD,
        **_ROW_REMAPPER,
        "remapper_banks_maximum": 640,
        "name": "NVIDIA A100-SXM4-80GB",
        "architecture": 7,  # Ampere
        "compute_capability": "8.0",
        "pci_device": "20b2",
        "pci_subsystem": "1463",
        "board_part_number": "692-2G506-0212-002",
        "vbios_version": "92.00.45.00.05",
        "memory_total_mib": 81920,
        "memory_reserved_mib": 614,
        "memory_bus_bits": 5120,
        "temperature_celsius": 32,
        "temperature_memory_celsius": 38,
        "temperature_shutdown_celsius": 92,
        "temperature_slowdown_celsius": 89,
        "temperature_maximum_celsius": 85,
        "temperature_memory_maximum_celsius": 95,
        "power_milliwatts": 62_310,
        "power_limit_milliwatts": 400_000,
        "power_limit_default_milliwatts": 400_000,
        "power_limit_minimum_milliwatts": 100_000,
        "power_limit_maximum_milliwatts": 400_000,
        "clock_graphics_mhz": 210,
        "clock_graphics_maximum_mhz": 1410,
        "clock_memory_mhz": 1593,
        "clock_memory_maximum_mhz": 1593,
        "clock_video_mhz": 585,
        "clock_video_maximum_mhz": 1290,
        "cores": 6912,
        "mig_current": 0,
        "mig_pending": 0,
        "mig_devices_maximum": 7,
        "nvlink_version": 4,  # NVML's code for the third generation
        "nvlink_mb_per_second": 25_000,
    },
    "l40s": {
        **_EVERY_CARD,
        **_ROW_REMAPPER,
        "remapper_banks_maximum": 192,
        "name": "NVIDIA L40S",
        "architecture": 8,  # Ada
        "compute_capability": "8.9",
        "performance_state": 8,
        "pcie_generation": 1,  # an idle link falls to the lowest speed
        "pci_device": "26b9",
        "pci_subsystem": "1851",
        "board_part_number": "900-2G133-0080-000",
        "vbios_version": "95.02.66.00.02",
        "memory_total_mib": 46068,
        "memory_reserved_mib": 497,
        "memory_bus_bits": 384,
        "temperature_celsius": 29,
        "temperature_shutdown_celsius": 95,
        "temperature_slowdown_celsius": 92,
        "temperature_maximum_celsius": 87,
        "power_milliwatts": 33_870,
        "power_limit_milliwatts": 350_000,
        "power_limit_default_milliwatts": 350_000,
        "power_limit_minimum_milliwatts": 100_000,
        "power_limit_maximum_milliwatts": 350_000,
        "clock_graphics_mhz": 210,
        "clock_graphics_maximum_mhz": 2520,
        "clock_memory_mhz": 405,
        "clock_memory_maximum_mhz": 9001,
        "clock_video_mhz": 1185,
        "clock_video_maximum_mhz": 1965,
        "cores": 18176,
    },
    "t4": {
        **_EVERY_CARD,
        "retired_pages_pending": 0,
        "name": "Tesla T4",
        "brand": 2,  # NVML_BRAND_TESLA
        "architecture": 6,  # Turing
        "compute_capability": "7.5",
        "performance_state": 8,
        "pcie_generation": 1,
        "pcie_generation_maximum": 3,
        "pci_device": "1eb8",
        "pci_subsystem": "12a2",
        "board_part_number": "900-2G183-0000-001",
        "vbios_version": "90.04.38.00.03",
        "memory_total_mib": 15360,
        "memory_reserved_mib": 423,
        "memory_bus_bits": 256,
        "temperature_celsius": 34,
        "temperature_shutdown_celsius": 96,
        "temperature_slowdown_celsius": 93,
        "temperature_maximum_celsius": 85,
        "power_milliwatts": 9_870,
        "power_limit_milliwatts": 70_000,
        "power_limit_default_milliwatts": 70_000,
        "power_limit_minimum_milliwatts": 60_000,
        "power_limit_maximum_milliwatts": 70_000,
        "clock_graphics_mhz": 300,
        "clock_graphics_maximum_mhz": 1590,
        "clock_memory_mhz": 405,
        "clock_memory_maximum_mhz": 5001,
        "clock_video_mhz": 540,
        "clock_video_maximum_mhz": 1470,
        "cores": 2560,
    },
}

# What PCI functions of a kind say of themselves (sysfs, lspci).
KINDS: dict[str, dict[str, str]] = {
    "root": {"vendor": "1022", "device": "1483", "class": "060400", "driver": "pcieport"},
    "upstream": {"vendor": "1000", "device": "c010", "class": "060400", "driver": "pcieport"},
    "downstream": {"vendor": "1000", "device": "c010", "class": "060400", "driver": "pcieport"},
    "gpu": {"vendor": "10de", "class": "030200", "driver": "nvidia", "revision": "a1"},
    "nic": {"vendor": "15b3", "device": "101d", "class": "020000", "driver": "mlx5_core", "subsystem": "0016"},
    "nvme": {"vendor": "144d", "device": "a80a", "class": "010802", "driver": "nvme", "subsystem": "a801"},
    "nvswitch": {"vendor": "10de", "device": "1af1", "class": "068000", "driver": "nvidia-nvswitch"},
}
GENERATIONS = {1: "2.5", 2: "5.0", 3: "8.0", 4: "16.0", 5: "32.0"}  # GT/s

# A network port of a ConnectX-6 Dx after its driver started: what a boot brings back.
PORT_DEFAULTS: dict[str, Value] = {
    "link": 1,
    "dcbx": "os",  # or "firmware": the adapter's own DCBX agent owns the port
    "pfc": "0,0,0,0,0,0,0,0",
    "dscp_priority": "",  # DSCP:PRIORITY entries, with commas
    "trust": "pcp",
    "buffer": "0,0,0,0,0,0,0,0",
    "pause_autonegotiate": 0,
    "pause_rx": 1,
    "pause_tx": 1,
}
NIC: dict[str, Value] = {
    "firmware_version": "22.41.1000",
    "psid": "MT_0000000359",
    "hca_type": "MT4125",
    "rate": "100 Gb/sec (4X EDR)",
    "speed_mb_per_second": 100_000,
}


@dataclass(frozen=True)
class Function:
    """A PCI function: its address, the bridge above it (empty: on the root complex), kind and NUMA node."""

    address: str
    above: str
    kind: str
    numa_node: int


@dataclass(frozen=True)
class Profile:
    """A machine: which card it carries, its PCIe tree, and how its network driver came."""

    card: str
    functions: list[Function]
    # Where all cards hang on NVSwitches, two links lead to each of them; else the links are shared out among the peers.
    nvlinks: int = 0
    # "inbox": the kernel's mlx5 and iproute2's dcb; "ofed": DOCA-OFED's mlx5 with sysfs files of its own, and mlnx_qos.
    network_driver: str = "inbox"
    commands: list[str] = field(default_factory=list)

    def of_kind(self, kind: str) -> list[Function]:
        """The functions of a kind, in the order of their addresses."""
        return sorted((one for one in self.functions if one.kind == kind), key=lambda one: one.address)


def _switched(bus: int, numa_node: int, below: list[list[str]]) -> Iterator[Function]:
    """A root port with a PCIe switch: each entry of `below` is one slot with the kinds of its functions."""
    root, upstream = f"0000:{bus:02x}:01.1", f"0000:{bus + 1:02x}:00.0"
    yield Function(root, "", "root", numa_node)
    yield Function(upstream, root, "upstream", numa_node)
    for slot, kinds in enumerate(below):
        port = f"0000:{bus + 2:02x}:{slot:02x}.0"
        yield Function(port, upstream, "downstream", numa_node)
        for number, kind in enumerate(kinds):
            yield Function(f"0000:{bus + 3 + slot:02x}:00.{number}", port, kind, numa_node)


def _direct(bus: int, numa_node: int, below: list[list[str]]) -> Iterator[Function]:
    """One root port for each slot, no switch between."""
    for slot, kinds in enumerate(below):
        port = f"0000:{bus:02x}:{slot + 1:02x}.1"
        yield Function(port, "", "root", numa_node)
        for number, kind in enumerate(kinds):
            yield Function(f"0000:{bus + 1 + slot:02x}:00.{number}", port, kind, numa_node)


_TWO_PORTS = ["nic", "nic"]
PROFILES: dict[str, Profile] = {
    # HGX A100 with four cards: four links to each of the three peers, no NVSwitch.
    "a100-sxm4x4": Profile(
        "a100-sxm4-80gb",
        [
            *_switched(0x00, 0, [["gpu"], ["gpu"], _TWO_PORTS, ["nvme"]]),
            *_switched(0x80, 1, [["gpu"], ["gpu"]]),
        ],
        nvlinks=12,
        commands=["dcb"],
    ),
    # HGX A100 with eight cards: two links from each card to each of six NVSwitches; Fabric Manager rules them.
    "a100-sxm4x8": Profile(
        "a100-sxm4-80gb",
        [
            *_switched(0x00, 0, [["gpu"], ["gpu"], ["nic"], ["nic"], ["nvme"]]),
            *_switched(0x40, 0, [["gpu"], ["gpu"], ["nic"], ["nic"]]),
            *_switched(0x80, 1, [["gpu"], ["gpu"], ["nic"], ["nic"]]),
            *_switched(0xA0, 1, [["gpu"], ["gpu"], ["nic"], ["nic"]]),
            *_switched(0xC0, 1, [["nvswitch"]] * 6),
        ],
        nvlinks=12,
        commands=["dcb"],
    ),
    "l40sx4": Profile(
        "l40s",
        [
            *_direct(0x00, 0, [["gpu"], ["gpu"], _TWO_PORTS, ["nvme"]]),
            *_direct(0x80, 1, [["gpu"], ["gpu"]]),
        ],
        network_driver="ofed",
        commands=["mlnx_qos"],
    ),
    "t4x2": Profile("t4", [*_direct(0x00, 0, [["gpu"], ["gpu"], _TWO_PORTS])], commands=["dcb", "mlnx_qos"]),
}


def write(name: str, state: State, host: str, cpus: int = 4) -> None:
    """Write the state of a factory-new machine `host` of profile `name`. Raises KeyError for an unknown profile."""
    profile = PROFILES[name]
    state.set("profile", name)
    state.update("driver", DRIVER)
    state.update("host", {**HOST, "cpus": cpus, "network_driver": profile.network_driver})
    state.set("host/ethtool_counters", "\n".join(ethtool.LISTED))
    for command in ("dcb", "mlnx_qos"):
        state.set(f"host/commands/{command}", command in profile.commands)
    for function in profile.functions:
        state.update(
            f"pci/{function.address}",
            {"kind": function.kind, "above": function.above, "numa_node": function.numa_node, "aspm_l1": 1},
        )
        if function.kind != "gpu":  # a card's link is told with the card, since NVML tells it, too
            _write_link(state, f"pci/{function.address}", 4, 4 if function.kind == "nvme" else 16)
    for index, function in enumerate(profile.of_kind("gpu")):
        state.update(f"gpus/{index}", {**CARDS[profile.card], **_identity(host, index, function)})
        _write_nvlinks(state, profile, index)
    for index, port in enumerate(ports(name, host)):
        state.update(f"ports/{index}", {**NIC, **PORT_DEFAULTS, **port})


def ports(name: str, host: str) -> list[dict[str, Value]]:
    """What tells the network ports of a machine apart: PCI address, device, interface, MAC address and GUID."""
    found: list[dict[str, Value]] = []
    slots: list[str] = []
    for index, function in enumerate(PROFILES[name].of_kind("nic")):
        slot, _dot, number = function.address.partition(".")
        slots += [] if slot in slots else [slot]
        # The ports of one adapter have addresses in a row, as its vendor burns them in.
        mac = f"b83fd2{_digest(host, slot)[:5]}{number}"
        found.append(
            {
                "pci_address": function.address,
                "device": f"mlx5_{index}",
                "netdev": f"ens{slots.index(slot) + 1}f{number}np{number}",
                "mac": ":".join(mac[start : start + 2] for start in range(0, 12, 2)),
                "node_guid": f"{mac[:6]}0300{mac[6:]}",
            }
        )
    return found


def _digest(*parts: object) -> str:
    return hashlib.sha256("/".join(map(str, parts)).encode()).hexdigest()


def _identity(host: str, index: int, function: Function) -> dict[str, Value]:
    number = int(_digest(host, "gpu", index), 16)
    return {
        "uuid": f"GPU-{uuid.UUID(int=number % (1 << 128), version=4)}",
        "serial": 1_320_000_000_000 + number % 10_000_000_000,
        "pci_address": function.address,
        "numa_node": function.numa_node,
        "minor_number": index,
        "module_id": index + 1,
    }


def _write_link(state: State, path: str, generation: int, width: int) -> None:
    """A PCIe link at its best. A bridge has one upwards; below, it shows the link of what it carries."""
    state.update(
        path,
        {
            "pcie_generation": generation,
            "pcie_generation_maximum": generation,
            "pcie_width": width,
            "pcie_width_maximum": width,
        },
    )


def _write_nvlinks(state: State, profile: Profile, index: int) -> None:
    """Where each NVLink of a card leads: shared out among its peers, or among the NVSwitches."""
    switches = profile.of_kind("nvswitch")
    peers = [one for number, one in enumerate(profile.of_kind("gpu")) if number != index]
    ends = switches or peers
    device = KINDS["nvswitch"]["device"] if switches else CARDS[profile.card]["pci_device"]
    for link in range(profile.nvlinks):
        end = ends[link * len(ends) // profile.nvlinks]
        state.update(
            f"gpus/{index}/nvlinks/{link}",
            {"state": 1, "remote_address": end.address, "remote_is_switch": bool(switches), "remote_device": device},
        )
