# SPDX-License-Identifier: GPL-3.0-or-later
"""A stand-in for the module ``pynvml`` with cards made up by a test, and a driver's files for them."""

from __future__ import annotations

import os
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any


class NVMLError(Exception):
    """As pynvml's: the return code is in `value`."""

    def __init__(self, value: Any) -> None:
        super().__init__(f"NVML error {value}")
        self.value = value


class Code:
    """Makes a call fail with a return code."""

    def __init__(self, value: Any) -> None:
        self.value = value


class Hang:
    """Makes a call hang, as one into the driver of a card that fell off its bus may."""


class Crash:
    """Makes a call take the process down, as a broken library does."""


def field(value: Any = 0, code: int = 0, kind: int = 3) -> SimpleNamespace:
    """A field value as pynvml's structure: `kind` is its nvmlValueType_t, 3 an unsigned 64-bit number."""
    member = ("dVal", "uiVal", "ulVal", "ullVal", "sllVal", "siVal", "usVal")[kind]
    return SimpleNamespace(nvmlReturn=code, valueType=kind, value=SimpleNamespace(**{member: value}))


def a100(position: int = 0, **changes: Any) -> dict[str, Any]:
    """Answers of an A100-SXM4-80GB, by function without ``nvmlDeviceGet``, some by arguments, and `changes`."""
    bus = (0x07, 0x0F, 0x47, 0x4E, 0x87, 0x90, 0xB7, 0xBD)[position]
    answers: dict[str, Any] = {
        "UUID": f"GPU-{position:08x}-0a52-4d5e-9a63-2f0e8d9c7b11",
        "PciInfo": SimpleNamespace(busId=f"00000000:{bus:02X}:00.0"),
        "Name": "NVIDIA A100-SXM4-80GB",
        "Serial": f"15647200046{position:02d}",
        "VbiosVersion": "92.00.36.00.02",
        "MemoryInfo": SimpleNamespace(total=85899345920, used=4194304, free=85895151616),
        "UtilizationRates": SimpleNamespace(gpu=0, memory=0),
        "PerformanceState": 0,
        "Temperature": {(0,): 34},
        "TemperatureThreshold": {(0,): 92, (1,): 89},
        "PowerUsage": 61200,
        "PowerManagementLimit": 400000,
        "PowerManagementDefaultLimit": 400000,
        "PowerManagementLimitConstraints": [100000, 400000],
        "CurrentClocksEventReasons": 0x1,
        "EccMode": [1, 1],
        "TotalEccErrors": {(0, 0): 0, (0, 1): 3, (1, 0): 0, (1, 1): 0},
        "MigMode": [0, 0],
        "RemappedRows": (0, 0, 0, 0),
        "RowRemapperHistogram": SimpleNamespace(max=640, high=0, partial=0, low=0, none=0),
        "RetiredPages_v2": Code(3),
        "RetiredPagesPendingStatus": Code(3),
        "CurrPcieLinkWidth": 16,
        "MaxPcieLinkWidth": 16,
        "CurrPcieLinkGeneration": 4,
        "MaxPcieLinkGeneration": 4,
        "PcieReplayCounter": 0,
        "PersistenceMode": 1,
        "ComputeRunningProcesses": [],
        "GraphicsRunningProcesses": [],
        "MPSComputeRunningProcesses": [],
        "fields": {82: field(41), 230: field(0), 91: field(12)} | {number: field(25000) for number in SPEED_FIELDS},
        "NvLinkState": dict.fromkeys([(link,) for link in range(12)], 1),
        "NvLinkVersion": dict.fromkeys([(link,) for link in range(12)], 5),
        "NvLinkRemoteDeviceType": dict.fromkeys([(link,) for link in range(12)], 2),
        "NvLinkRemotePciInfo": {
            (link,): SimpleNamespace(busId=f"00000000:{0xC4 + link // 2:02X}:00.0") for link in range(12)
        },
        "NvLinkErrorCounter": {(link, counter): 0 for link in range(12) for counter in range(4)},
    }
    return answers | changes


def l40s(position: int = 0, **changes: Any) -> dict[str, Any]:
    """Answers of an L40S: ECC that can be switched, no NVLink, no MIG."""
    without = ("NvLinkState", "NvLinkVersion", "NvLinkRemoteDeviceType", "NvLinkRemotePciInfo", "NvLinkErrorCounter")
    answers = a100(
        position,
        Name="NVIDIA L40S",
        MemoryInfo=SimpleNamespace(total=48305799168, used=0, free=48305799168),
        MigMode=Code(3),
        fields={82: field(code=3), 230: field(0), 91: field(code=3)},
        **dict.fromkeys(without, Code(3)),
    )
    return answers | changes


# NVML_FI_DEV_NVLINK_SPEED_MBPS_L0 … L11
SPEED_FIELDS = [84, 85, 86, 87, 88, 89, 132, 133, 134, 135, 136, 137]


class Library:
    """The functions of pynvml that the readers call. `init`, `count` and the like may be a Code, a Hang, a Crash."""

    NVMLError = NVMLError
    NVML_NVLINK_MAX_LINKS = 18
    __version__ = ""

    def __init__(self, *cards: dict[str, Any], **system: Any) -> None:
        self.cards = list(cards)
        self.system = system
        self.calls: list[tuple[Any, ...]] = []

    def nvmlInit(self) -> None:  # noqa: N802
        _give(self.system.get("init"))

    def nvmlSystemGetDriverVersion(self) -> Any:  # noqa: N802
        return _give(self.system.get("driver", "580.95.05"))

    def nvmlSystemGetNVMLVersion(self) -> Any:  # noqa: N802
        return _give(self.system.get("nvml", "13.580.95.05"))

    def nvmlSystemGetProcessName(self, pid: int) -> Any:  # noqa: N802
        return _give(self.system.get("process_names", {}).get(pid, Code(6)))

    def nvmlDeviceGetCount(self) -> Any:  # noqa: N802
        return _give(self.system.get("count", len(self.cards)))

    def nvmlDeviceGetHandleByIndex(self, index: int) -> Any:  # noqa: N802
        if not 0 <= index < len(self.cards):
            raise NVMLError(2)
        _give(self.cards[index].get("handle"))
        return index

    def nvmlDeviceGetFieldValues(self, handle: int, identifiers: list[Any]) -> Any:  # noqa: N802
        fields = _give(self.cards[handle].get("fields", {}))
        if not isinstance(fields, dict):
            return fields
        return [fields.get(identifier, field(code=3)) for identifier in identifiers]

    def __getattr__(self, name: str) -> Any:
        if name in self.system.get("missing", ()):
            raise AttributeError(name)
        if name.startswith("nvmlDeviceSet"):
            return lambda handle, *values: self._set(name[len("nvmlDeviceSet") :], handle, values)
        if not name.startswith("nvmlDeviceGet"):
            raise AttributeError(name)

        def call(handle: int, *arguments: Any) -> Any:
            known = _give(self.cards[handle].get(name[len("nvmlDeviceGet") :], Code(13)))
            return _give(known.get(arguments, Code(2))) if isinstance(known, dict) else known

        return call

    def _set(self, what: str, handle: int, values: tuple[Any, ...]) -> None:
        self.calls.append((what, handle, *values))
        _give(self.cards[handle].get(f"set {what}"))
        if what == "EccMode" and not self.cards[handle].get("deaf"):
            self.cards[handle]["EccMode"] = [self.cards[handle]["EccMode"][0], values[0]]


def _give(answer: Any) -> Any:
    if isinstance(answer, Code):
        raise NVMLError(answer.value)
    if isinstance(answer, Hang):
        time.sleep(600)
    if isinstance(answer, Crash):
        os._exit(139)
    if isinstance(answer, Exception):
        raise answer
    return answer


def driver_files(root: Path, *addresses: str, driver: str = "nvidia", listed: bool = True) -> None:
    """Functions on the PCI bus below `root`, and the driver's own list of them."""
    for address in addresses:
        function = root / "sys/bus/pci/devices" / address
        function.mkdir(parents=True)
        (function / "vendor").write_text("0x10de\n")
        (function / "class").write_text("0x030200\n")
        if driver:
            target = root / "sys/bus/pci/drivers" / driver
            target.mkdir(parents=True, exist_ok=True)
            (function / "driver").symlink_to(f"/sys/bus/pci/drivers/{driver}")
        if listed:
            information = root / "proc/driver/nvidia/gpus" / address / "information"
            information.parent.mkdir(parents=True)
            information.write_text(
                "Model: \t\t NVIDIA A100-SXM4-80GB\nIRQ:   \t\t 42\n"
                f"GPU UUID: \t GPU-from-the-file-of-{address[5:7]}\nBus Location: \t {address}\n"
            )
