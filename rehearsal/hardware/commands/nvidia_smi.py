# SPDX-License-Identifier: GPL-3.0-or-later
"""nvidia-smi: listing, queries, NVLink, modes, and a reset under the conditions of a real one.

Texts and exit statuses are those of nvidia-smi 580 where they are known: a refused reset says "In use by another
client" and ends with 255. How it words that NVLink peers are missing is not public; the words here are this
simulation's own.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from xml.sax.saxutils import escape

from rehearsal.hardware import Machine
from rehearsal.hardware.lifecycle import reset_card
from rehearsal.hardware.state import State

BAD_ARGUMENT, NO_PERMISSION, QUERY_FAILED, NOT_LOADED, GPU_LOST, OTHER = 2, 4, 6, 9, 15, 255
NOT_AVAILABLE = "[N/A]"
RECOVERY = (
    *("None", "Reset", "Reboot", "Drain P2P", "Drain and Reset"),
    *("IMEX Error", "GPU Bus Reset", "System Reboot"),
)
# Bit → name in XML and queries; the first eight are NVML's clock event reasons.
REASONS = {
    0x1: "gpu_idle",
    0x2: "applications_clocks_setting",
    0x4: "sw_power_cap",
    0x8: "hw_slowdown",
    0x40: "hw_thermal_slowdown",
    0x80: "hw_power_brake_slowdown",
    0x10: "sync_boost",
    0x20: "sw_thermal_slowdown",
    0x100: "display_clocks_setting",
}


@dataclass(frozen=True)
class Card:
    """A card, read as nvidia-smi shows it."""

    state: State
    folder: str
    index: int

    def text(self, name: str) -> str:
        """A value of the card, or [N/A]."""
        return self.state.text(f"gpus/{self.folder}/{name}") or NOT_AVAILABLE

    def number(self, name: str) -> int:
        """A number of the card; 0 where it has none."""
        return self.state.integer(f"gpus/{self.folder}/{name}")

    def has(self, name: str) -> bool:
        """Whether the card has such a thing."""
        return self.state.has(f"gpus/{self.folder}/{name}")

    def switch(self, name: str) -> str:
        """Enabled, Disabled or [N/A]."""
        return ("Disabled", "Enabled")[self.number(name)] if self.has(name) else NOT_AVAILABLE

    def yes(self, name: str) -> str:
        """Yes, No or [N/A]."""
        return ("No", "Yes")[self.number(name)] if self.has(name) else NOT_AVAILABLE

    @property
    def lost(self) -> bool:
        """Whether the card has fallen off its bus."""
        return bool(self.number("lost"))

    @property
    def address(self) -> str:
        """PCI address in nvidia-smi's form, with eight digits of the domain."""
        return f"0000{self.state.text(f'gpus/{self.folder}/pci_address')}".upper()

    def answers_to(self, wanted: str) -> bool:
        """Whether an argument of -i means this card: index, UUID, serial or PCI address."""
        plain = self.state.text(f"gpus/{self.folder}/pci_address")
        names = {
            str(self.index),
            self.text("uuid"),
            self.text("serial"),
            self.address,
            plain.upper(),
            plain.upper()[5:],
        }
        return wanted in names or wanted.upper() in names

    def processes(self) -> list[tuple[int, str, str, int]]:
        """Living processes: pid, kind, name and MiB."""
        folder = f"gpus/{self.folder}/processes"
        found = []
        for pid in self.state.names(folder):
            if pid.isdecimal() and os.path.exists(f"/proc/{pid}"):
                kind = self.state.text(f"{folder}/{pid}/kind")
                found.append((int(pid), kind, _process_name(pid), self.state.integer(f"{folder}/{pid}/memory_mib")))
        return found

    def memory(self) -> dict[str, int]:
        """Total, reserved, used and free, in MiB."""
        total, reserved = self.number("memory_total_mib"), self.number("memory_reserved_mib")
        used = min(self.number("memory_used_mib") + sum(one[3] for one in self.processes()), total - reserved)
        return {"total": total, "reserved": reserved, "used": used, "free": total - reserved - used}

    def ecc(self, since: str, kind: str, place: str = "") -> str:
        """An ECC count; without a place, of all."""
        if not self.number("ecc_current"):
            return NOT_AVAILABLE
        folder = f"ecc/{since}/{kind}"
        places = [place] if place else self.state.names(f"gpus/{self.folder}/{folder}")
        return str(sum(self.number(f"{folder}/{one}") for one in places))

    def links(self) -> list[str]:
        """Numbers of its NVLinks."""
        return self.state.names(f"gpus/{self.folder}/nvlinks")


def _process_name(pid: str) -> str:
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            return file.read().split(b"\0", 1)[0].decode("utf-8", "replace") or "-"
    except OSError:
        return "-"


def _cards(state: State) -> list[Card]:
    folders = [folder for folder in state.names("gpus") if state.integer(f"gpus/{folder}/present")]
    return [Card(state, folder, index) for index, folder in enumerate(folders)]


def _touch(cards: list[Card]) -> None:
    """Ask the driver about cards: one that hangs holds the caller, one that is slow takes its time."""
    for card in cards:
        while card.number("hang"):
            time.sleep(0.05)
        time.sleep(card.number("busy_milliseconds") / 1000)


# -- queries -----------------------------------------------------------------------------------------------------------


def _watts(card: Card, name: str) -> str:
    return f"{card.number(name) / 1000:.2f}" if card.has(name) else NOT_AVAILABLE


def _bits(card: Card) -> str:
    return f"0x{card.number('clocks_event_reasons'):016X}"


Read = Callable[[Card], str]
# Field of --query-gpu → unit and reader.
FIELDS: dict[str, tuple[str, Read]] = {
    "timestamp": ("", lambda _card: time.strftime("%Y/%m/%d %H:%M:%S.000")),
    "driver_version": ("", lambda card: card.state.text("driver/version")),
    "count": ("", lambda card: str(len(_cards(card.state)))),
    "index": ("", lambda card: str(card.index)),
    "name": ("", lambda card: card.text("name")),
    "uuid": ("", lambda card: card.text("uuid")),
    "serial": ("", lambda card: card.text("serial")),
    "vbios_version": ("", lambda card: card.text("vbios_version")),
    "pci.bus_id": ("", lambda card: card.address),
    "pci.domain": ("", lambda card: f"0x{card.address[4:8]}"),
    "pci.bus": ("", lambda card: f"0x{card.address[9:11]}"),
    "pci.device": ("", lambda card: f"0x{card.address[12:14]}"),
    "memory.total": ("MiB", lambda card: str(card.memory()["total"])),
    "memory.reserved": ("MiB", lambda card: str(card.memory()["reserved"])),
    "memory.used": ("MiB", lambda card: str(card.memory()["used"])),
    "memory.free": ("MiB", lambda card: str(card.memory()["free"])),
    "compute_mode": ("", lambda card: ("Default", "", "Prohibited", "Exclusive_Process")[card.number("compute_mode")]),
    "pstate": ("", lambda card: f"P{card.number('performance_state')}"),
    "utilization.gpu": ("%", lambda card: card.text("utilization_gpu_percent")),
    "utilization.memory": ("%", lambda card: card.text("utilization_memory_percent")),
    "ecc.mode.current": ("", lambda card: card.switch("ecc_current")),
    "ecc.mode.pending": ("", lambda card: card.switch("ecc_pending")),
    "retired_pages.pending": ("", lambda card: card.yes("retired_pages_pending")),
    "pcie.link.gen.current": ("", lambda card: card.text("pcie_generation")),
    "pcie.link.gen.gpucurrent": ("", lambda card: card.text("pcie_generation")),
    "pcie.link.gen.max": ("", lambda card: card.text("pcie_generation_maximum")),
    "pcie.link.width.current": ("", lambda card: card.text("pcie_width")),
    "pcie.link.width.max": ("", lambda card: card.text("pcie_width_maximum")),
    "temperature.gpu": ("", lambda card: card.text("temperature_celsius")),
    "temperature.memory": ("", lambda card: card.text("temperature_memory_celsius").strip("[]")),
    "power.draw": ("W", lambda card: _watts(card, "power_milliwatts")),
    "power.draw.instant": ("W", lambda card: _watts(card, "power_milliwatts")),
    "power.draw.average": ("W", lambda card: _watts(card, "power_milliwatts")),
    "power.limit": ("W", lambda card: _watts(card, "power_limit_milliwatts")),
    "enforced.power.limit": ("W", lambda card: _watts(card, "power_limit_milliwatts")),
    "power.default_limit": ("W", lambda card: _watts(card, "power_limit_default_milliwatts")),
    "power.min_limit": ("W", lambda card: _watts(card, "power_limit_minimum_milliwatts")),
    "power.max_limit": ("W", lambda card: _watts(card, "power_limit_maximum_milliwatts")),
    "clocks.current.graphics": ("MHz", lambda card: card.text("clock_graphics_mhz")),
    "clocks.current.sm": ("MHz", lambda card: card.text("clock_graphics_mhz")),
    "clocks.current.memory": ("MHz", lambda card: card.text("clock_memory_mhz")),
    "clocks.max.graphics": ("MHz", lambda card: card.text("clock_graphics_maximum_mhz")),
    "clocks.max.sm": ("MHz", lambda card: card.text("clock_graphics_maximum_mhz")),
    "clocks.max.memory": ("MHz", lambda card: card.text("clock_memory_maximum_mhz")),
    "mig.mode.current": ("", lambda card: card.switch("mig_current")),
    "mig.mode.pending": ("", lambda card: card.switch("mig_pending")),
    "persistence_mode": ("", lambda card: card.switch("persistence")),
    "fan.speed": ("%", lambda card: card.text("fan_speed_percent")),
    "clocks_event_reasons.active": ("", _bits),
    "clocks_event_reasons.supported": ("", lambda card: f"0x{card.number('clocks_event_reasons_supported'):016X}"),
    "remapped_rows.correctable": ("", lambda card: card.text("remapped_rows_correctable")),
    "remapped_rows.uncorrectable": ("", lambda card: card.text("remapped_rows_uncorrectable")),
    "remapped_rows.pending": ("", lambda card: card.yes("remapped_rows_pending")),
    "remapped_rows.failure": ("", lambda card: card.yes("remapped_rows_failure")),
}


def _active(bit: int) -> Read:
    return lambda card: ("Not Active", "Active")[bool(card.number("clocks_event_reasons") & bit)]


def _ecc_count(since: str, kind: str, place: str) -> Read:
    return lambda card: card.ecc(since, kind, place)


FIELDS.update({f"clocks_event_reasons.{name}": ("", _active(bit)) for bit, name in REASONS.items()})
FIELDS.update(
    {
        f"ecc.errors.{kind}.{since}.{place}": ("", _ecc_count(since, kind, file))
        for kind in ("corrected", "uncorrected")
        for since in ("volatile", "aggregate")
        for place, file in {"total": "", "device_memory": "dram", "dram": "dram", "sram": "sram"}.items()
    }
)
# Other names for the same fields: short ones, and those of older drivers.
ALIASES = {
    "gpu_name": "name",
    "gpu_uuid": "uuid",
    "gpu_serial": "serial",
    "gpu_bus_id": "pci.bus_id",
    "clocks.gr": "clocks.current.graphics",
    "clocks.sm": "clocks.current.sm",
    "clocks.mem": "clocks.current.memory",
    "pcie.link.gen.gpumax": "pcie.link.gen.max",
}


def _field(name: str) -> str:
    return ALIASES.get(name, name.replace("clocks_throttle_reasons", "clocks_event_reasons"))


def _query_gpus(options: argparse.Namespace, cards: list[Card]) -> int:
    names = [name.strip() for name in (options.query_gpu or options.query_remapped_rows).split(",")]
    for name in names:
        if _field(name) not in FIELDS:
            print(f'Field "{name}" is not a valid field to query.\n')
            return BAD_ARGUMENT
    header = [f"{name} [{unit}]" if (unit := FIELDS[_field(name)][0]) else name for name in names]
    rows = []
    for card in cards:
        values = []
        for name in names:
            unit, read = FIELDS[_field(name)]
            value = read(card)
            values.append(f"{value} {unit}" if options.units and unit and value != NOT_AVAILABLE else value)
        rows.append(["[GPU is lost]"] * len(names) if card.lost else values)
    _print_rows(options, header, rows)
    return GPU_LOST if any(card.lost for card in cards) else 0


def _query_processes(options: argparse.Namespace, cards: list[Card]) -> int:
    readers: dict[str, Callable[[Card, tuple[int, str, str, int]], str]] = {
        "timestamp": lambda _card, _one: time.strftime("%Y/%m/%d %H:%M:%S.000"),
        "pid": lambda _card, one: str(one[0]),
        "name": lambda _card, one: one[2],
        "used_gpu_memory": lambda _card, one: f"{one[3]} MiB" if options.units else str(one[3]),
        "gpu_name": lambda card, _one: card.text("name"),
        "gpu_uuid": lambda card, _one: card.text("uuid"),
        "gpu_bus_id": lambda card, _one: card.address,
        "gpu_serial": lambda card, _one: card.text("serial"),
    }
    others = {"process_name": "name", "used_memory": "used_gpu_memory"}
    names = [name.strip() for name in options.query_compute_apps.split(",")]
    for name in names:
        if others.get(name, name) not in readers:
            print(f'Field "{name}" is not a valid field to query.\n')
            return BAD_ARGUMENT
    header = [f"{name} [MiB]" if name in ("used_memory", "used_gpu_memory") else name for name in names]
    rows = [
        [readers[others.get(name, name)](card, process) for name in names]
        for card in cards
        for process in ([] if card.lost else card.processes())
        if process[1] == "compute"
    ]
    _print_rows(options, header, rows)
    return GPU_LOST if any(card.lost for card in cards) else 0


def _print_rows(options: argparse.Namespace, header: list[str], rows: list[list[str]]) -> None:
    for row in [header, *rows] if options.header else rows:
        print(", ".join(row))


# -- the long report ---------------------------------------------------------------------------------------------------


def _complain_of_lost(cards: list[Card]) -> int:
    """nvidia-smi gives up at the first card whose handle it can't get."""
    for card in cards:
        if card.lost:
            print(
                f"Unable to determine the device handle for GPU{card.index}: {card.address[4:]}: GPU is lost. "
                "Reboot the system to recover this GPU"
            )
            return GPU_LOST
    return 0


Tree = dict[str, "str | Tree | list[Tree]"]


def _report(card: Card) -> Tree:
    def unit(name: str, suffix: str) -> str:
        return f"{card.text(name)} {suffix}" if card.has(name) else "N/A"

    def plain(text: str) -> str:
        return text.strip("[]") if text == NOT_AVAILABLE else text

    def watts(name: str) -> str:
        return f"{_watts(card, name)} W" if card.has(name) else "N/A"

    memory, bits = card.memory(), card.number("clocks_event_reasons")
    rows: str | Tree = "N/A"
    if card.has("remapper_banks_maximum"):
        rows = {
            "remapped_row_corr": card.text("remapped_rows_correctable"),
            "remapped_row_unc": card.text("remapped_rows_uncorrectable"),
            "remapped_row_pending": card.yes("remapped_rows_pending"),
            "remapped_row_failure": card.yes("remapped_rows_failure"),
            "row_remapper_histogram": {
                f"row_remapper_histogram_{short}": f"{card.number(f'remapper_banks_{name}')} bank(s)"
                for short, name in _BANKS.items()
            },
        }
    return {
        "product_name": card.text("name"),
        "product_brand": "NVIDIA",
        "product_architecture": {6: "Turing", 7: "Ampere", 8: "Ada Lovelace"}.get(
            card.number("architecture"), "Unknown"
        ),
        "persistence_mode": card.switch("persistence"),
        "mig_mode": {
            "current_mig": plain(card.switch("mig_current")),
            "pending_mig": plain(card.switch("mig_pending")),
        },
        "mig_devices": "None",
        "serial": card.text("serial"),
        "uuid": card.text("uuid"),
        "minor_number": card.text("minor_number"),
        "vbios_version": card.text("vbios_version"),
        "multigpu_board": "No",
        "board_part_number": card.text("board_part_number"),
        "gpu_recovery_action": RECOVERY[card.number("recovery_action")],
        "gsp_firmware_version": card.state.text("driver/version"),
        "pci": {
            "pci_bus": card.address[9:11],
            "pci_device": card.address[12:14],
            "pci_domain": card.address[4:8],
            "pci_device_id": f"{card.text('pci_device').upper()}10DE",
            "pci_bus_id": card.address,
            "pci_sub_system_id": f"{card.text('pci_subsystem').upper()}10DE",
            "pci_gpu_link_info": {
                "pcie_gen": {
                    "max_link_gen": card.text("pcie_generation_maximum"),
                    "current_link_gen": card.text("pcie_generation"),
                    "device_current_link_gen": card.text("pcie_generation"),
                    "max_device_link_gen": card.text("pcie_generation_maximum"),
                    "max_host_link_gen": card.text("pcie_generation_maximum"),
                },
                "link_widths": {
                    "max_link_width": f"{card.text('pcie_width_maximum')}x",
                    "current_link_width": f"{card.text('pcie_width')}x",
                },
            },
            "replay_counter": card.text("pcie_replays"),
            "replay_rollover_counter": "0",
        },
        "fan_speed": unit("fan_speed_percent", "%"),
        "performance_state": f"P{card.number('performance_state')}",
        "clocks_event_reasons": {
            f"clocks_event_reason_{name}": ("Not Active", "Active")[bool(bits & bit)] for bit, name in REASONS.items()
        },
        "fb_memory_usage": {name: f"{mib} MiB" for name, mib in memory.items()},
        "compute_mode": FIELDS["compute_mode"][1](card),
        "utilization": {
            "gpu_util": unit("utilization_gpu_percent", "%"),
            "memory_util": unit("utilization_memory_percent", "%"),
        },
        "ecc_mode": {
            "current_ecc": plain(card.switch("ecc_current")),
            "pending_ecc": plain(card.switch("ecc_pending")),
        },
        "ecc_errors": {
            since: {
                "sram_correctable": plain(card.ecc(since, "corrected", "sram")),
                "sram_uncorrectable_parity": "0" if card.number("ecc_current") else "N/A",
                "sram_uncorrectable_secded": plain(card.ecc(since, "uncorrected", "sram")),
                "dram_correctable": plain(card.ecc(since, "corrected", "dram")),
                "dram_uncorrectable": plain(card.ecc(since, "uncorrected", "dram")),
            }
            for since in ("volatile", "aggregate")
        },
        "retired_pages": {
            **{
                name: {"retired_count": _pages(card, cause), "retired_pagelist": ""}
                for cause, name in (("0", "multiple_single_bit_retirement"), ("1", "double_bit_retirement"))
            },
            "pending_blacklist": plain(card.yes("retired_pages_pending")),
            "pending_retirement": plain(card.yes("retired_pages_pending")),
        },
        "remapped_rows": rows,
        "temperature": {
            "gpu_temp": unit("temperature_celsius", "C"),
            "gpu_temp_max_threshold": unit("temperature_shutdown_celsius", "C"),
            "gpu_temp_slow_threshold": unit("temperature_slowdown_celsius", "C"),
            "gpu_temp_max_gpu_threshold": unit("temperature_maximum_celsius", "C"),
            "memory_temp": unit("temperature_memory_celsius", "C"),
            "gpu_temp_max_mem_threshold": unit("temperature_memory_maximum_celsius", "C"),
        },
        "gpu_power_readings": {
            "power_state": f"P{card.number('performance_state')}",
            "average_power_draw": watts("power_milliwatts"),
            "instant_power_draw": watts("power_milliwatts"),
            "current_power_limit": watts("power_limit_milliwatts"),
            "requested_power_limit": watts("power_limit_milliwatts"),
            "default_power_limit": watts("power_limit_default_milliwatts"),
            "min_power_limit": watts("power_limit_minimum_milliwatts"),
            "max_power_limit": watts("power_limit_maximum_milliwatts"),
        },
        "clocks": _clocks(card, ""),
        "max_clocks": _clocks(card, "_maximum"),
        "processes": {
            "process_info": [
                {
                    "gpu_instance_id": "N/A",
                    "compute_instance_id": "N/A",
                    "pid": str(pid),
                    "type": {"compute": "C", "graphics": "G", "mps": "M+C"}.get(kind, kind),
                    "process_name": name,
                    "used_memory": f"{mib} MiB",
                }
                for pid, kind, name, mib in card.processes()
            ]
        },
    }


_BANKS = {"max": "maximum", "high": "high", "partial": "partial", "low": "low", "none": "none"}


def _pages(card: Card, cause: str) -> str:
    if not card.has("retired_pages_pending"):
        return "N/A"
    return str(len(card.state.names(f"gpus/{card.folder}/retired_pages/{cause}")))


def _clocks(card: Card, suffix: str) -> Tree:
    names = {"graphics": "graphics", "sm": "graphics", "mem": "memory", "video": "video"}
    return {f"{short}_clock": f"{card.text(f'clock_{name}{suffix}_mhz')} MHz" for short, name in names.items()}


def _xml(tree: Tree, depth: int) -> list[str]:
    lines, indent = [], "\t" * depth
    for name, value in tree.items():
        for one in value if isinstance(value, list) else [value]:
            if isinstance(one, str):
                lines.append(f"{indent}<{name}>{escape(one)}</{name}>")
            else:
                lines += [f"{indent}<{name}>", *_xml(one, depth + 1), f"{indent}</{name}>"]
    return lines


def _query(options: argparse.Namespace, cards: list[Card]) -> int:
    status = _complain_of_lost(cards)
    if status:
        return status
    state = cards[0].state if cards else State.of_this_host()
    cuda = state.integer("driver/cuda_version")
    head = {
        "timestamp": time.strftime("%a %b %e %H:%M:%S %Y"),
        "driver_version": state.text("driver/version"),
        "cuda_version": f"{cuda // 1000}.{cuda % 1000 // 10}",
        "attached_gpus": str(len(_cards(state))),
    }
    if options.xml:
        lines = [
            '<?xml version="1.0" ?>',
            '<!DOCTYPE nvidia_smi_log SYSTEM "nvsmi_device_v13.dtd">',
            "<nvidia_smi_log>",
        ]
        lines += _xml(dict(head), 1)
        for card in cards:
            lines += [f'\t<gpu id="{card.address}">', *_xml(_report(card), 2), "\t</gpu>"]
        print("\n".join([*lines, "</nvidia_smi_log>"]))
        return 0
    wanted = (options.display or "ROW_REMAPPER,ECC").upper().split(",")
    if not set(wanted) <= {"ROW_REMAPPER", "ECC"}:
        print(f"Invalid combination of input arguments. {options.display} is not in this simulation.")
        return BAD_ARGUMENT
    print("\n==============NVSMI LOG==============\n")
    for label, value in zip(("Timestamp", "Driver Version", "CUDA Version", "Attached GPUs"), head.values()):
        print(f"{label:50}: {value}")
    for card in cards:
        print(f"GPU {card.address}")
        print("\n".join(_ecc_text(card) if "ECC" in wanted else []))
        print("\n".join(_rows_text(card) if "ROW_REMAPPER" in wanted else []))
    return 0


def _rows_text(card: Card) -> list[str]:
    if not card.has("remapper_banks_maximum"):
        return ["    Remapped Rows                                 : N/A"]
    lines = ["    Remapped Rows"]
    for label, value in {
        "Correctable Error": card.text("remapped_rows_correctable"),
        "Uncorrectable Error": card.text("remapped_rows_uncorrectable"),
        "Pending": card.yes("remapped_rows_pending"),
        "Remapping Failure Occurred": card.yes("remapped_rows_failure"),
    }.items():
        lines.append(f"        {label:42}: {value}")
    lines.append("        Bank Remap Availability Histogram")
    labels = {"Max": "maximum", "High": "high", "Partial": "partial", "Low": "low", "None": "none"}
    lines += [
        f"            {label:38}: {card.number(f'remapper_banks_{name}')} bank(s)" for label, name in labels.items()
    ]
    return lines


def _ecc_text(card: Card) -> list[str]:
    lines = ["    ECC Mode"]
    for label, name in (("Current", "ecc_current"), ("Pending", "ecc_pending")):
        lines.append(f"        {label:42}: {card.switch(name).strip('[]')}")
    lines.append("    ECC Errors")
    for since in ("volatile", "aggregate"):
        lines.append(f"        {since.title()}")
        for place in ("sram", "dram"):
            for kind, label in (("corrected", "Correctable"), ("uncorrected", "Uncorrectable")):
                count = card.ecc(since, kind, place).strip("[]")
                lines.append(f"            {f'{place.upper()} {label}':38}: {count}")
    return lines


# -- NVLink ------------------------------------------------------------------------------------------------------------


def _nvlink(arguments: list[str], machine: Machine) -> int:
    parser = argparse.ArgumentParser(prog="nvidia-smi nvlink", add_help=False)
    parser.add_argument("-s", "--status", action="store_true")
    parser.add_argument("-e", "--errorcounters", action="store_true")
    parser.add_argument("-i", "--id")
    try:
        options = parser.parse_args(arguments)
    except SystemExit:
        return BAD_ARGUMENT
    if options.status == options.errorcounters:
        return BAD_ARGUMENT
    cards = _selected(machine.state, options.id)
    if cards is None:
        return QUERY_FAILED
    _touch(cards)
    status = _complain_of_lost(cards)
    if status:
        return status
    for card in cards:
        if not card.links():
            continue
        print(f"GPU {card.index}: {card.text('name')} (UUID: {card.text('uuid')})")
        for link in card.links():
            active, folder = card.number(f"nvlinks/{link}/state"), f"nvlinks/{link}"
            if not active:
                print(f"\t Link {link}: <inactive>")
            elif options.status:
                print(f"\t Link {link}: {card.number('nvlink_mb_per_second') / 1000:g} GB/s")
            else:
                for label, name in (("Replay", "replay"), ("Recovery", "recovery"), ("CRC", "crc_flit")):
                    print(f"\t Link {link}: {label} Errors: {card.number(f'{folder}/{name}_errors')}")
    return 0


# -- changes -----------------------------------------------------------------------------------------------------------


def _set(options: argparse.Namespace, cards: list[Card]) -> int:
    if os.geteuid() != 0:
        print("Unable to set the mode: Insufficient Permissions\nTerminating early due to previous errors.")
        return NO_PERMISSION
    status = _complain_of_lost(cards)
    for card in [] if status else cards:
        folder = f"gpus/{card.folder}"
        if options.persistence is not None:
            word = ("Disabled", "Enabled")[options.persistence]
            print(f"{word} persistence mode for GPU {card.address}.")
            card.state.set(f"{folder}/persistence", options.persistence)
        if options.ecc is not None:
            if not card.has("ecc_pending"):
                print(f"Unable to set ECC mode for GPU {card.address}: Not Supported")
                return 3
            print(f"{('Disabled', 'Enabled')[options.ecc]} Ecc support for GPU {card.address}.")
            card.state.set(f"{folder}/ecc_pending", options.ecc)
        if options.power_limit is not None:
            watts, least = options.power_limit, card.number("power_limit_minimum_milliwatts") / 1000
            most, former = card.number("power_limit_maximum_milliwatts") / 1000, _watts(card, "power_limit_milliwatts")
            if not least <= watts <= most:
                print(
                    f"Provided power limit {watts:.2f} W is not a valid power limit which should be between "
                    f"{least:.2f} W and {most:.2f} W for GPU {card.address}\nTerminating early due to previous errors."
                )
                return BAD_ARGUMENT
            card.state.set(f"{folder}/power_limit_milliwatts", round(watts * 1000))
            print(f"Power limit for GPU {card.address} was set to {watts:.2f} W from {former} W.")
    if not status:
        print("All done.")
        if options.ecc is not None:
            print("Reboot required.")
    return status


def holders(machine: Machine, card: Card) -> list[int]:
    """Processes that have the card's device file open, or that CUDA counts on it."""
    found = {one[0] for one in card.processes()}
    device = str(machine.root / f"dev/nvidia{card.number('minor_number')}")
    for pid in filter(str.isdecimal, os.listdir("/proc")):
        if device in _open_files(pid):
            found.add(int(pid))
    return sorted(found)


def _open_files(pid: str) -> set[str]:
    files = set()
    # A process may end, or close a file, while it is looked at.
    with contextlib.suppress(OSError):
        for handle in os.listdir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):
                files.add(os.readlink(f"/proc/{pid}/fd/{handle}"))
    return files


def _fabric_manager_runs(state: State) -> bool:
    told = state.text("host/fabric_manager")
    if told:
        return told == "running"
    try:
        command = ["systemctl", "is-active", "--quiet", "nvidia-fabricmanager"]
        return subprocess.run(command, check=False, capture_output=True).returncode == 0
    except FileNotFoundError:
        return False


def _peers(machine: Machine, card: Card) -> list[Card]:
    """Cards that a reset of this one must include: all that NVLink joins to it, unless Fabric Manager runs."""
    if not card.links() or _fabric_manager_runs(machine.state):
        return []
    ends = {card.state.text(f"gpus/{card.folder}/nvlinks/{link}/remote_address") for link in card.links()}
    switched = any(card.number(f"nvlinks/{link}/remote_is_switch") for link in card.links())
    others = [one for one in _cards(machine.state) if one.index != card.index and one.links()]
    return [one for one in others if switched or one.state.text(f"gpus/{one.folder}/pci_address") in ends]


def _reset(machine: Machine, cards: list[Card], chosen: bool) -> int:
    if os.geteuid() != 0:
        print("\n".join(["The following GPUs could not be reset:", *_each(cards, "Insufficient Permissions")]))
        return NO_PERMISSION
    if chosen:
        named = {card.index for card in cards}
        missing = {peer.index: peer for card in cards for peer in _peers(machine, card) if peer.index not in named}
        if missing:
            print(
                "\n".join(
                    [
                        "The following GPUs could not be reset:",
                        *_each(cards, "Not Supported"),
                        "",
                        "NVLink joins them to the following GPUs, which must be reset in the same command:",
                        *(f"  GPU {peer.address}" for _index, peer in sorted(missing.items())),
                    ]
                )
            )
            return OTHER
    if any(card.lost for card in cards):
        print("\n".join(["The following GPUs could not be reset:", *_each(cards, "GPU is lost", lambda one: one.lost)]))
        return GPU_LOST
    busy = [card for card in cards if card.number("persistence") or holders(machine, card)]
    if busy:
        count = len(busy)
        many = f"{count} device is" if count == 1 else f"{count} devices are"
        print("\n".join(["", "The following GPUs could not be reset:", *_each(busy, "In use by another client"), ""]))
        print(
            f"{many} currently being used by one or more other processes (e.g., Fabric Manager, CUDA application, "
            "graphics application such as an X server, or a monitoring application such as another instance of "
            f"nvidia-smi). Please first kill all processes using {'this device' if count == 1 else 'these devices'} "
            "and all compute applications running in the system."
        )
        return OTHER
    failing = [card for card in cards if card.number("reset_failures")]
    if failing:
        for card in failing:
            card.state.set(f"gpus/{card.folder}/reset_failures", card.number("reset_failures") - 1)
        print("\n".join(["The following GPUs could not be reset:", *_each(failing, "Unknown Error")]))
        return OTHER
    for card in cards:
        reset_card(card.state, card.folder)
        print(f"GPU {card.address} was successfully reset.")
    machine.tree.refresh()
    print("All done.")
    return 0


def _each(cards: list[Card], reason: str, which: Callable[[Card], bool] = lambda _card: True) -> list[str]:
    return [f"  GPU {card.address}: {reason}" for card in cards if which(card)]


# -- command line ------------------------------------------------------------------------------------------------------


def _selected(state: State, wanted: str | None) -> list[Card] | None:
    """The cards that -i names, in its order; all without it; None, with a complaint, if one of them is not there."""
    cards = _cards(state)
    if wanted is None:
        return cards
    chosen: list[Card] = []
    for name in wanted.split(","):
        found = [card for card in cards if card.answers_to(name.strip())]
        if not found:
            print(f"No devices were found\n{name}: not a card of this machine", file=sys.stderr)
            return None
        chosen += [card for card in found if card not in chosen]
    return chosen


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="nvidia-smi", allow_abbrev=False)
    parser.add_argument("-L", "--list-gpus", action="store_true")
    parser.add_argument("-q", "--query", action="store_true")
    parser.add_argument("-x", "--xml-format", action="store_true", dest="xml")
    parser.add_argument("-d", "--display")
    parser.add_argument("-i", "--id")
    parser.add_argument("--query-gpu")
    parser.add_argument("--query-compute-apps")
    parser.add_argument("--query-remapped-rows")
    parser.add_argument("--format", default="")
    parser.add_argument("-pm", "--persistence-mode", type=_mode, dest="persistence")
    parser.add_argument("-e", "--ecc-config", type=_mode, dest="ecc")
    parser.add_argument("-pl", "--power-limit", type=float)
    parser.add_argument("-r", "--gpu-reset", action="store_true", dest="reset")
    return parser


def _mode(text: str) -> int:
    return {"0": 0, "DISABLED": 0, "1": 1, "ENABLED": 1}[text.upper()]


def run(arguments: list[str], machine: Machine) -> int:
    """Run nvidia-smi; prints, and gives the exit status."""
    state = machine.state
    if not state.integer("driver/loaded"):
        print(
            "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver. Make sure that the latest "
            "NVIDIA driver is installed and running."
        )
        return NOT_LOADED
    if arguments[:1] == ["nvlink"]:
        return _nvlink(arguments[1:], machine)
    try:
        options = _parser().parse_args(arguments)
    except SystemExit as ended:
        return 0 if ended.args == (0,) else BAD_ARGUMENT
    cards = _selected(state, options.id)
    if cards is None:
        return QUERY_FAILED
    forms = options.format.split(",")
    options.header, options.units = "noheader" not in forms, "nounits" not in forms
    if (options.query_gpu or options.query_compute_apps or options.query_remapped_rows) and "csv" not in forms:
        print('"--format=" switch is missing. Please specify "csv" as part of format.')
        return BAD_ARGUMENT
    _touch(cards)
    if options.reset:
        return _reset(machine, cards, options.id is not None)
    if options.persistence is not None or options.ecc is not None or options.power_limit is not None:
        return _set(options, cards)
    if options.query_gpu or options.query_remapped_rows:
        return _query_gpus(options, cards)
    if options.query_compute_apps:
        return _query_processes(options, cards)
    if options.query:
        return _query(options, cards)
    status = _complain_of_lost(cards)
    if not options.list_gpus:
        print(f"NVIDIA-SMI {state.text('driver/version')}   Driver Version: {state.text('driver/version')}")
    for card in [] if status else cards:
        print(f"GPU {card.index}: {card.text('name')} (UUID: {card.text('uuid')})")
    return status
