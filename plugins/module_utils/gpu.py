# Copyright (c) 2026, the Ringmaster authors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What the cards of a host are and how they are, read from NVML, the driver's files and ``nvidia-smi``.

:class:`GpuReader` reads one card at a time and can run inside a :class:`~.nvml.ReaderProcess`. :func:`survey` puts a
host's cards together, those too that NVML does not list or that do not answer. Nothing here imports Ansible.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from ansible_collections.ringmaster.inference.plugins.module_utils.cards import card_model
from ansible_collections.ringmaster.inference.plugins.module_utils.commands import CommandRunner
from ansible_collections.ringmaster.inference.plugins.module_utils.file_tree import FileTree
from ansible_collections.ringmaster.inference.plugins.module_utils.nvml import (
    GPU_IS_LOST,
    NOT_SUPPORTED,
    RESET_REQUIRED,
    Facts,
    GpuError,
    NoAnswerError,
    Nvml,
    NvmlUnavailableError,
    Reading,
    as_flag,
    as_integer,
    as_text,
    as_watts,
    element,
    member,
    pci_address,
)

Call = Callable[..., Any]
"""``call("card", 3)``: a reader's method by name, as ReaderProcess.call takes it."""

# nvmlClocksEventReasons in nvml.h, by nvidia-smi's names (``clocks_event_reasons.…``).
CLOCK_EVENT_REASONS = {
    0x1: "gpu_idle",
    0x2: "applications_clocks_setting",
    0x4: "sw_power_cap",
    0x8: "hw_slowdown",
    0x10: "sync_boost",
    0x20: "sw_thermal_slowdown",
    0x40: "hw_thermal_slowdown",
    0x80: "hw_power_brake_slowdown",
    0x100: "display_clocks_setting",
}

# nvmlDeviceGpuRecoveryAction_t in nvml.h. What nvidia-smi and the kernel log say for them is in RECOVERY_ACTION_WORDS.
RECOVERY_ACTIONS = {
    0: "none",
    1: "reset",
    2: "reboot",
    3: "drain_p2p",
    4: "drain_and_reset",
    5: "recover_imex_domain",
    6: "bus_reset",
    7: "system_reboot",
}
RECOVERY_ACTION_WORDS = {
    "none": "none",
    "reset": "reset",
    "gpu reset": "reset",
    "gpu reset required": "reset",
    "reboot": "reboot",
    "node reboot": "reboot",
    "node reboot required": "reboot",
    "drain p2p": "drain_p2p",
    "drain and reset": "drain_and_reset",
    "recover imex domain": "recover_imex_domain",
    "imex error": "recover_imex_domain",
    "bus reset": "bus_reset",
    "gpu bus reset": "bus_reset",
    "system reboot": "system_reboot",
}

FIELD_MEMORY_TEMPERATURE = 82
FIELD_RECOVERY_ACTION = 230

IDENTITY = ("index", "uuid", "pci_address", "model", "serial")
READINGS = (
    "vbios_version",
    "memory_total_bytes",
    "memory_used_bytes",
    "memory_free_bytes",
    "utilization_percent",
    "performance_state",
    "temperature_celsius",
    "temperature_memory_celsius",
    "temperature_slowdown_celsius",
    "temperature_shutdown_celsius",
    "power_watts",
    "power_limit_watts",
    "power_limit_default_watts",
    "power_limit_min_watts",
    "power_limit_max_watts",
    "clock_event_reasons",
    "ecc_current",
    "ecc_pending",
    "ecc_corrected_volatile",
    "ecc_corrected_aggregate",
    "ecc_uncorrected_volatile",
    "ecc_uncorrected_aggregate",
    "remapped_rows_corrected",
    "remapped_rows_uncorrected",
    "remapped_rows_pending",
    "remapped_rows_failed",
    "remap_banks",
    "retired_pages_single_bit",
    "retired_pages_double_bit",
    "retired_pages_pending",
    "pcie_width",
    "pcie_width_max",
    "pcie_generation",
    "pcie_generation_max",
    "pcie_replay_counter",
    "mig_current",
    "mig_pending",
    "persistence_mode",
    "recovery_action",
    "processes",
)

VITALS = (
    "utilization_percent",
    "temperature_celsius",
    "power_watts",
    "clock_event_reasons",
    "sm_clock_mhz",
    "sm_clock_max_mhz",
    "ecc_corrected_volatile",
    "ecc_uncorrected_volatile",
    "remapped_rows_corrected",
    "remapped_rows_uncorrected",
    "remapped_rows_pending",
    "remapped_rows_failed",
    "pcie_width",
    "pcie_width_max",
    "pcie_generation",
    "pcie_generation_max",
    "pcie_replay_counter",
    "recovery_action",
)
# nvmlEccCounterType_t in nvml.h.
_ECC_COUNTERS = {"volatile": 0, "aggregate": 1}
_LARGEST_CLOCK = 100_000  # MHz, more than any card has
_SM_CLOCK = 1  # nvmlClockType_t: the clock of the streaming multiprocessors


class UnknownGpuError(GpuError):
    """A card was asked for that the host does not have."""


class GpuReader:
    """Reads cards by NVML's index, which goes by PCI address and may change when a card fails."""

    def __init__(self, nvml: Nvml, files: FileTree) -> None:
        self.nvml = nvml
        self.files = files
        # What does not change while a card has its uuid, for `vitals`: field → reading, by uuid.
        self._constants: dict[str, dict[str, Reading]] = {}

    def system(self) -> dict[str, Any]:
        """``{driver_version, nvml_version, count, unknown}``. Raises NvmlUnavailableError."""
        self.nvml.open()
        facts = Facts()
        facts.put("driver_version", as_text(self.nvml.call("nvmlSystemGetDriverVersion")))
        facts.put("nvml_version", as_text(self.nvml.call("nvmlSystemGetNVMLVersion")))
        # More than a machine can hold is a broken answer, not a reason to ask for ever.
        count = facts.put("count", as_integer(self.nvml.call("nvmlDeviceGetCount"), most=256))
        if count is None:
            raise NvmlUnavailableError(
                "NVML to count its cards", facts.unknown["count"], "run `nvidia-smi -L` and read `dmesg | grep -i nvrm`"
            )
        return {**facts.values, "unknown": facts.unknown}

    def identity(self, index: int) -> dict[str, Any]:
        """``{index, uuid, pci_address, model, serial, state, unknown}``; `state` is as in :meth:`card`."""
        self.nvml.open()
        facts = Facts()
        handle = self.nvml.call("nvmlDeviceGetHandleByIndex", index)
        codes = self._identity(facts, index, handle)
        return {**facts.values, "state": _state(handle, codes), "unknown": facts.unknown}

    def card(self, index: int) -> dict[str, Any]:
        """All fields of IDENTITY and READINGS, ``state``, ``unknown`` and ``unread`` (see gpu_info's documentation).

        `state` is ``answers``, ``lost`` (off the bus), ``reset_required`` or ``failed``.
        """
        self.nvml.open()
        facts = Facts()
        handle = self.nvml.call("nvmlDeviceGetHandleByIndex", index)
        codes = self._identity(facts, index, handle)
        if handle.reason:
            for field in READINGS:
                facts.put(field, handle)
        else:
            self._read(facts, handle.value)
        return {
            **facts.values,
            "state": _state(handle, codes),
            "unknown": facts.unknown,
            "unread": facts.failed,
        }

    def vitals(self, index: int) -> dict[str, Any]:
        """What tells of a card's health and changes by itself, for those that ask every second.

        ``{index, uuid, pci_address, model, state, unknown, unread}`` and the fields of VITALS. Where the card is and
        what it is called, and its greatest clock and link, are asked anew only if another uuid answers for this index.
        """
        self.nvml.open()
        facts = Facts()
        facts.values["index"] = index
        handle = self.nvml.call("nvmlDeviceGetHandleByIndex", index)
        if handle.reason:
            for field in (*IDENTITY[1:4], *VITALS):
                facts.put(field, handle)
            codes = {handle.code}
        else:
            codes = self._read_vitals(facts, handle.value)
        return {**facts.values, "state": _state(handle, codes), "unknown": facts.unknown, "unread": facts.failed}

    def _read_constants(self, handle: Any, uuid: str | None) -> dict[str, Reading]:
        known = self._constants.get(uuid or "")
        if known is None:
            call = self.nvml.call
            known = {
                "pci_address": as_address(call("nvmlDeviceGetPciInfo", handle)),
                "model": as_text(call("nvmlDeviceGetName", handle)),
                "sm_clock_max_mhz": as_integer(call("nvmlDeviceGetMaxClockInfo", handle, _SM_CLOCK), 1, _LARGEST_CLOCK),
                **self._pcie_maxima(handle),
            }
            if uuid is not None and not any(reading.failed for reading in known.values()):
                self._constants[uuid] = known
        return known

    def _identity(self, facts: Facts, index: int, handle: Reading) -> set[int | None]:
        facts.values["index"] = index
        if handle.reason:
            for field in IDENTITY[1:]:
                facts.put(field, handle)
            return {handle.code}
        uuid = as_text(self.nvml.call("nvmlDeviceGetUUID", handle.value))
        address = self.nvml.call("nvmlDeviceGetPciInfo", handle.value)
        model = as_text(self.nvml.call("nvmlDeviceGetName", handle.value))
        facts.put("uuid", uuid)
        facts.put("pci_address", as_address(address))
        facts.put("model", model)
        facts.put("serial", as_text(self.nvml.call("nvmlDeviceGetSerial", handle.value)))
        # Every reading of a lost card says so, but for what the library remembers.
        alive = self.nvml.call("nvmlDeviceGetMemoryInfo", handle.value)
        return {uuid.code, address.code, model.code, alive.code}

    def _read(self, facts: Facts, handle: Any) -> None:
        call = self.nvml.call

        facts.put("vbios_version", as_text(call("nvmlDeviceGetVbiosVersion", handle)))
        memory = call("nvmlDeviceGetMemoryInfo", handle)
        for name in ("total", "used", "free"):
            facts.put(f"memory_{name}_bytes", as_integer(member(memory, name)))
        self._read_utilization(facts, handle)
        facts.put("performance_state", as_integer(call("nvmlDeviceGetPerformanceState", handle), most=15))

        more = self.nvml.fields(handle, [FIELD_MEMORY_TEMPERATURE, FIELD_RECOVERY_ACTION])
        facts.put("temperature_celsius", _as_celsius(self._temperature(handle)))
        facts.put("temperature_memory_celsius", _as_celsius(more[0]))
        # nvmlTemperatureThresholds_t in nvml.h: 0 shutdown, 1 slowdown.
        for number, name in ((1, "slowdown"), (0, "shutdown")):
            threshold = call("nvmlDeviceGetTemperatureThreshold", handle, number)
            facts.put(f"temperature_{name}_celsius", _as_celsius(threshold))

        facts.put("power_watts", as_watts(call("nvmlDeviceGetPowerUsage", handle)))
        facts.put("power_limit_watts", as_watts(call("nvmlDeviceGetPowerManagementLimit", handle)))
        facts.put("power_limit_default_watts", as_watts(call("nvmlDeviceGetPowerManagementDefaultLimit", handle)))
        limits = call("nvmlDeviceGetPowerManagementLimitConstraints", handle)
        facts.put("power_limit_min_watts", as_watts(element(limits, 0)))
        facts.put("power_limit_max_watts", as_watts(element(limits, 1)))
        self._read_clock_event_reasons(facts, handle)

        self._read_mode(facts, "ecc", call("nvmlDeviceGetEccMode", handle))
        self._read_ecc_errors(facts, handle, ("volatile", "aggregate"))

        self._read_mode(facts, "mig", call("nvmlDeviceGetMigMode", handle))
        self._read_remapped_rows(facts, handle)
        histogram = call("nvmlDeviceGetRowRemapperHistogram", handle)
        banks = {name: as_integer(member(histogram, name)) for name in ("max", "high", "partial", "low", "none")}
        odd = [reading for reading in banks.values() if reading.reason]
        facts.put("remap_banks", odd[0] if odd else Reading({name: bank.value for name, bank in banks.items()}))
        # nvmlPageRetirementCause_t: 0 several single-bit errors, 1 a double-bit error.
        for cause, name in ((0, "single_bit"), (1, "double_bit")):
            pages = self.nvml.first(("nvmlDeviceGetRetiredPages_v2", "nvmlDeviceGetRetiredPages"), handle, cause)
            facts.put(f"retired_pages_{name}", _as_length(pages))
        facts.put("retired_pages_pending", as_flag(call("nvmlDeviceGetRetiredPagesPendingStatus", handle)))

        self._read_pcie(facts, handle, self._pcie_maxima(handle))
        facts.put("persistence_mode", as_flag(call("nvmlDeviceGetPersistenceMode", handle)))
        facts.put("recovery_action", _as_recovery_action(more[1]))
        facts.put("processes", self._processes(handle))

    def _read_vitals(self, facts: Facts, handle: Any) -> set[int | None]:
        """Identity and the fields of VITALS; gives the return codes that tell a lost card."""
        call = self.nvml.call
        uuid = as_text(call("nvmlDeviceGetUUID", handle))
        constants = self._read_constants(handle, facts.put("uuid", uuid))
        for field in ("pci_address", "model"):
            facts.put(field, constants[field])
        utilization = self._read_utilization(facts, handle)
        temperature = self._temperature(handle)
        facts.put("temperature_celsius", _as_celsius(temperature))
        facts.put("power_watts", as_watts(call("nvmlDeviceGetPowerUsage", handle)))
        reasons = self._read_clock_event_reasons(facts, handle)
        clock = call("nvmlDeviceGetClockInfo", handle, _SM_CLOCK)
        facts.put("sm_clock_mhz", as_integer(clock, 1, _LARGEST_CLOCK))
        facts.put("sm_clock_max_mhz", constants["sm_clock_max_mhz"])
        self._read_ecc_errors(facts, handle, ("volatile",))
        rows = self._read_remapped_rows(facts, handle)
        self._read_pcie(facts, handle, constants)
        facts.put("recovery_action", _as_recovery_action(self.nvml.fields(handle, [FIELD_RECOVERY_ACTION])[0]))
        return {reading.code for reading in (uuid, utilization, temperature, reasons, clock, rows)}

    def _read_utilization(self, facts: Facts, handle: Any) -> Reading:
        utilization = self.nvml.call("nvmlDeviceGetUtilizationRates", handle)
        facts.put("utilization_percent", as_integer(member(utilization, "gpu"), most=100))
        return utilization

    def _read_clock_event_reasons(self, facts: Facts, handle: Any) -> Reading:
        reasons = self.nvml.first(
            ("nvmlDeviceGetCurrentClocksEventReasons", "nvmlDeviceGetCurrentClocksThrottleReasons"), handle
        )
        facts.put("clock_event_reasons", _as_clock_event_reasons(reasons))
        return reasons

    def _read_ecc_errors(self, facts: Facts, handle: Any, since: Iterable[str]) -> None:
        # nvmlMemoryErrorType_t: 0 corrected, 1 uncorrected.
        for kind, name in enumerate(("corrected", "uncorrected")):
            for counter in since:
                errors = self.nvml.call("nvmlDeviceGetTotalEccErrors", handle, kind, _ECC_COUNTERS[counter])
                facts.put(f"ecc_{name}_{counter}", as_integer(errors))

    def _pcie_maxima(self, handle: Any) -> dict[str, Reading]:
        call = self.nvml.call
        return {
            "pcie_width_max": _as_width(call("nvmlDeviceGetMaxPcieLinkWidth", handle)),
            "pcie_generation_max": as_integer(call("nvmlDeviceGetMaxPcieLinkGeneration", handle), 1, 15),
        }

    def _read_pcie(self, facts: Facts, handle: Any, maxima: Mapping[str, Reading]) -> None:
        call = self.nvml.call
        facts.put("pcie_width", _as_width(call("nvmlDeviceGetCurrPcieLinkWidth", handle)))
        facts.put("pcie_width_max", maxima["pcie_width_max"])
        facts.put("pcie_generation", as_integer(call("nvmlDeviceGetCurrPcieLinkGeneration", handle), 1, 15))
        facts.put("pcie_generation_max", maxima["pcie_generation_max"])
        facts.put("pcie_replay_counter", as_integer(call("nvmlDeviceGetPcieReplayCounter", handle)))

    def _temperature(self, handle: Any) -> Reading:
        # The first of them goes away with CUDA 14, the second is not in drivers before 570. Sensor 0 is the GPU.
        return self.nvml.first(("nvmlDeviceGetTemperature", "nvmlDeviceGetTemperatureV"), handle, 0)

    @staticmethod
    def _read_mode(facts: Facts, name: str, answer: Reading) -> None:
        facts.put(f"{name}_current", as_flag(element(answer, 0)))
        facts.put(f"{name}_pending", as_flag(element(answer, 1)))

    def _read_remapped_rows(self, facts: Facts, handle: Any) -> Reading:
        rows = told = self.nvml.call("nvmlDeviceGetRemappedRows", handle)
        if rows.reason and self._mig(facts, handle):
            # A card that can be partitioned has a row remapper; NVML only does not tell of it meanwhile.
            rows = Reading(reason="NVML does not tell remapped rows while MIG is on", code=NOT_SUPPORTED)
        facts.put("remapped_rows_corrected", as_integer(element(rows, 0)))
        facts.put("remapped_rows_uncorrected", as_integer(element(rows, 1)))
        facts.put("remapped_rows_pending", as_flag(element(rows, 2)))
        facts.put("remapped_rows_failed", as_flag(element(rows, 3)))
        return told

    def _mig(self, facts: Facts, handle: Any) -> bool:
        if "mig_current" in facts.values:
            return bool(facts.values["mig_current"])
        return bool(as_flag(element(self.nvml.call("nvmlDeviceGetMigMode", handle), 0)).value)

    def _processes(self, handle: Any) -> Reading:
        found: dict[tuple[int, str], dict[str, Any]] = {}
        for kind, functions in (
            ("compute", ("nvmlDeviceGetComputeRunningProcesses", "nvmlDeviceGetComputeRunningProcesses_v2")),
            ("graphics", ("nvmlDeviceGetGraphicsRunningProcesses", "nvmlDeviceGetGraphicsRunningProcesses_v2")),
            ("mps", ("nvmlDeviceGetMPSComputeRunningProcesses", "nvmlDeviceGetMPSComputeRunningProcesses_v3")),
        ):
            answer = self.nvml.first(functions, handle)
            if answer.reason:
                if kind == "compute":
                    return answer
                continue  # cards and drivers without MPS or graphics have none such
            if not isinstance(answer.value, (list, tuple)):
                return Reading(reason="NVML gave no list of processes")
            for process in answer.value:
                pid = as_integer(member(Reading(process), "pid"), most=(1 << 32) - 1)
                if pid.reason:
                    return pid
                found.setdefault((pid.value, kind), self._process(pid.value, kind, process))
        return Reading([found[key] for key in sorted(found)])

    def _process(self, pid: int, kind: str, process: Any) -> dict[str, Any]:
        facts = Facts()
        facts.values.update(pid=pid, type=kind)
        name = as_text(self.nvml.call("nvmlSystemGetProcessName", pid))
        if name.reason:
            # NVML does not know processes of other containers.
            command = self.files.text(f"/proc/{pid}/comm")
            name = as_text(Reading(command)) if command else name
        facts.put("name", name)
        memory = member(Reading(process), "usedGpuMemory")
        if memory.value in (None, (1 << 64) - 1):
            memory = Reading(reason="the driver does not tell a process' memory here", code=NOT_SUPPORTED)
        facts.put("memory_bytes", as_integer(memory))
        return {**facts.values, "unknown": facts.unknown}


def survey(call: Call, files: FileTree, commands: CommandRunner, wanted: Iterable[str] = ()) -> dict[str, Any]:
    """The host's cards: ``{driver_version, nvml_version, gpus, unknown}``, `gpus` in the order of their PCI addresses.

    `call` runs a :class:`GpuReader`'s methods. `wanted` names cards by uuid, index or PCI address; empty is all. A card
    that gives no answer, or that is on the PCI bus but not in NVML, is among them, with its `state` and a reason for
    each field. Raises NvmlUnavailableError and UnknownGpuError.
    """
    system = _system(call)
    wanted = list(wanted)
    cards = [ask(call, "identity" if wanted else "card", index) for index in range(system["count"])]
    place(cards, files)
    cards += unlisted(cards, files)
    if wanted:
        cards = [
            # What is known of its place stays known where the card itself does not tell.
            _merged(ask(call, "card", card["index"]), card) if card["index"] is not None else card
            for card in select(cards, wanted)
        ]
    cards = [_complete(card) for card in cards]
    _add_recovery_actions(cards, commands)
    cards.sort(key=lambda card: (card["pci_address"] is None, card["pci_address"] or "", card["index"] or 0))
    unknown = dict(system["unknown"])
    return {
        "driver_version": system["driver_version"],
        "nvml_version": system["nvml_version"],
        "gpus": cards,
        "unknown": unknown,
    }


def identities(call: Call, files: FileTree) -> list[dict[str, Any]]:
    """Who the cards are, without reading how they are: :meth:`GpuReader.identity` of each, and the unlisted ones."""
    cards = [ask(call, "identity", index) for index in range(_system(call)["count"])]
    place(cards, files)
    return cards + unlisted(cards, files)


def _system(call: Call) -> dict[str, Any]:
    try:
        system: dict[str, Any] = call("system")
    except NoAnswerError as error:
        raise NvmlUnavailableError(
            "NVML to tell the driver's version and how many cards there are",
            str(error),
            "read `dmesg | grep -i nvrm` on the host; a driver that hangs needs a reboot",
        ) from error
    return system


def ask(call: Call, method: str, index: int) -> dict[str, Any]:
    """`method` of card `index`; if it gives no answer, a card in state ``no_answer``."""
    try:
        card: dict[str, Any] = call(method, index)
    except NoAnswerError as error:
        return no_answer(index, str(error))
    return card


def no_answer(index: int, reason: str) -> dict[str, Any]:
    """A card that gave no answer, with nothing known of it but its index."""
    fields = IDENTITY[1:]
    return {
        "index": index,
        **dict.fromkeys(fields),
        "state": "no_answer",
        "unknown": dict.fromkeys(fields, reason),
        "reason": reason,
    }


def place(cards: list[dict[str, Any]], files: FileTree) -> None:
    """Give cards that no longer tell where they are the PCI addresses that are left over, if that is beyond doubt.

    NVML's order is that of the PCI addresses, so as many cards as addresses can be matched in order.
    """
    silent = [card for card in cards if card["pci_address"] is None]
    known = {card["pci_address"] for card in cards}
    left = [
        address
        for address in on_the_bus(files)
        if address not in known
        and (_bound_driver(files, address) == "nvidia" or files.exists(f"/proc/driver/nvidia/gpus/{address}"))
    ]
    if len(silent) != len(left):
        return
    for card, address in zip(sorted(silent, key=lambda each: each["index"]), left):
        card["pci_address"] = address
        card["unknown"].pop("pci_address", None)
        for field, value in _information(files, address).items():
            if card[field] is None:
                card[field] = value
                card["unknown"].pop(field, None)


def unlisted(cards: list[dict[str, Any]], files: FileTree) -> list[dict[str, Any]]:
    """Cards on the PCI bus that NVML does not list, in state ``not_listed``."""
    known = {card["pci_address"] for card in cards}
    found = []
    for address in on_the_bus(files):
        if address in known:
            continue
        driver = _bound_driver(files, address)
        reason = "on the PCI bus, but NVML does not list it: " + (
            f"it belongs to the kernel driver {driver}" if driver else "no kernel driver is bound to it"
        )
        card: dict[str, Any] = {"index": None, "pci_address": address, "uuid": None, "model": None, "serial": None}
        card.update(_information(files, address))
        unknown = {field: reason for field in IDENTITY if card[field] is None}
        found.append({**card, "state": "not_listed", "unknown": unknown, "reason": reason})
    return found


def select(cards: list[dict[str, Any]], wanted: Iterable[str]) -> list[dict[str, Any]]:
    """Those of `cards` that `wanted` names by uuid, index or PCI address, each once. Raises UnknownGpuError."""
    chosen: list[dict[str, Any]] = []
    for name in wanted:
        text = str(name).strip()
        address = pci_address(text)
        for card in cards:
            uuid = card["uuid"]
            if (
                (uuid is not None and uuid.lower() == text.lower())
                or (card["index"] is not None and text == str(card["index"]))
                or (address is not None and card["pci_address"] == address)
            ):
                if card not in chosen:
                    chosen.append(card)
                break
        else:
            present = [f"{card['index']} ({card['uuid']}, {card['pci_address']})" for card in cards]
            raise UnknownGpuError(
                f"a card {text}",
                ", ".join(present) or "no card",
                "name a card by its uuid, index or PCI address, as ringmaster.inference.gpu_info shows them",
            )
    return chosen


def on_the_bus(files: FileTree) -> list[str]:
    """PCI addresses of NVIDIA's display and 3D controllers, in order: by sysfs, and by the driver's own list."""
    found = set()
    for name in files.names("/sys/bus/pci/devices"):
        folder = f"/sys/bus/pci/devices/{name}"
        # Base class 03 with subclass 00 (VGA) or 02 (3D); NVSwitch and audio functions have other classes.
        if files.text(f"{folder}/vendor") == "0x10de" and (files.text(f"{folder}/class") or "")[:6] in (
            "0x0300",
            "0x0302",
        ):
            found.add(pci_address(name))
    for name in files.names("/proc/driver/nvidia/gpus"):
        found.add(pci_address(name))
    return sorted(address for address in found if address)


def _state(handle: Reading, codes: set[int | None]) -> str:
    if GPU_IS_LOST in codes:
        return "lost"
    if RESET_REQUIRED in codes:
        return "reset_required"
    return "failed" if handle.reason else "answers"


def _merged(card: dict[str, Any], known: dict[str, Any]) -> dict[str, Any]:
    for field in IDENTITY:
        if card[field] is None and known[field] is not None:
            card[field] = known[field]
            card["unknown"].pop(field, None)
    return card


def _complete(card: dict[str, Any]) -> dict[str, Any]:
    """The card with every field, in order; what was never asked has the card's own reason."""
    reason = card.get("reason", "")
    unknown = dict(card["unknown"])
    complete: dict[str, Any] = {}
    for field in IDENTITY + READINGS:
        complete[field] = card.get(field)
        if field not in card:
            unknown[field] = reason
    model = card_model(complete["model"])
    complete["card"] = model.name if model else None
    if model is None:
        unknown["card"] = unknown.get("model") or f"the model {complete['model']} is not known here"
    complete["state"] = card["state"]
    complete["unknown"] = unknown
    complete["unread"] = card.get("unread", [field for field in READINGS if field in unknown])
    return complete


def _add_recovery_actions(cards: list[dict[str, Any]], commands: CommandRunner) -> None:
    """Ask nvidia-smi where NVML has no recovery action to tell: its own NVML may be newer than nvidia-ml-py."""
    silent = [card for card in cards if card["recovery_action"] is None and card["state"] == "answers"]
    if not silent:
        return
    answer = commands.run(["nvidia-smi", "-q", "-x"], timeout=10)
    actions = recovery_actions(answer.output) if answer.ok else {}
    for card in silent:
        action = actions.get(card["pci_address"] or "")
        if action is not None:
            card["recovery_action"] = action
            card["unknown"].pop("recovery_action", None)
            card["unread"] = [field for field in card["unread"] if field != "recovery_action"]
        else:
            why = "nor does nvidia-smi -q -x tell" if answer.ok else f"nvidia-smi: {answer.complaint or answer.status}"
            card["unknown"]["recovery_action"] += f"; {why}"


_XML_GPU = re.compile(r'<gpu id="([^"]{1,40})">(.*?)(?=<gpu id="|\Z)', re.DOTALL)
_XML_ACTION = re.compile(r"<gpu_recovery_action>([^<]{1,60})</gpu_recovery_action>")


def recovery_actions(document: str) -> dict[str, str]:
    """Recovery actions by PCI address from what ``nvidia-smi -q -x`` says, also if it is cut off."""
    actions = {}
    for name, content in _XML_GPU.findall(document):
        address, found = pci_address(name), _XML_ACTION.search(content)
        if address and found:
            action = RECOVERY_ACTION_WORDS.get(" ".join(found.group(1).split()).lower())
            if action:
                actions[address] = action
    return actions


def _as_recovery_action(reading: Reading) -> Reading:
    answer = as_integer(reading)
    if answer.reason:
        return answer
    action = RECOVERY_ACTIONS.get(answer.value)
    # Known to be something, but not what: no card is good on the strength of that.
    return Reading(action or f"unknown_{answer.value}")


def _as_clock_event_reasons(reading: Reading) -> Reading:
    answer = as_integer(reading)
    if answer.reason:
        return answer
    bits = [1 << position for position in range(64) if answer.value >> position & 1]
    return Reading([CLOCK_EVENT_REASONS.get(bit, f"unknown_{bit:#x}") for bit in bits])


def as_address(reading: Reading) -> Reading:
    text = as_text(member(reading, "busId"))
    if text.reason:
        return text
    address = pci_address(text.value)
    return Reading(address) if address else Reading(reason=f"NVML gave {text.value!r}, which is no PCI address")


def _as_celsius(reading: Reading) -> Reading:
    return as_integer(reading, -100, 300)


def _as_width(reading: Reading) -> Reading:
    if reading.value in (0, 255):
        return Reading(reason="the link's width is not known to the card")
    return as_integer(reading, 1, 32)


def _as_length(reading: Reading) -> Reading:
    if reading.reason:
        return reading
    if not isinstance(reading.value, (list, tuple)):
        return Reading(reason="NVML gave no list")
    return Reading(len(reading.value))


def _bound_driver(files: FileTree, address: str) -> str:
    target = files.resolve(f"/sys/bus/pci/devices/{address}/driver")
    return posixpath.basename(target) if target else ""


def _information(files: FileTree, address: str) -> dict[str, str]:
    """Model and uuid from the driver's own file; of a card that was never started it has question marks."""
    known = {}
    for line in (files.text(f"/proc/driver/nvidia/gpus/{address}/information") or "").splitlines():
        name, _colon, value = line.partition(":")
        field = {"Model": "model", "GPU UUID": "uuid"}.get(name.strip())
        text = as_text(Reading(value))
        if field and not text.reason and "?" not in text.value:
            known[field] = text.value
    return known
