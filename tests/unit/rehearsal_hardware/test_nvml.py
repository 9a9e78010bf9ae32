# SPDX-License-Identifier: GPL-3.0-or-later
"""The NVML stand-in, judged by NVIDIA's own nvidia-ml-py."""

from __future__ import annotations

import inspect
import os
import re
import subprocess
import threading
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from rehearsal.hardware import Machine, build, library
from tests.unit.rehearsal_hardware.conftest import Start


def code_of(nvml: ModuleType, call: Any, *arguments: Any) -> int:
    """The NVML code that a call fails with; 0 when it succeeds."""
    try:
        call(*arguments)
    except nvml.NVMLError as error:
        return int(error.value)
    return 0


def test_cards_are_found_by_index_uuid_serial_and_every_form_of_pci_address(a100: Machine, start_nvml: Start) -> None:
    nvml = start_nvml(a100)
    assert nvml.nvmlDeviceGetCount() == 4
    card = nvml.nvmlDeviceGetHandleByIndex(2)
    pci = nvml.nvmlDeviceGetPciInfo(card)
    assert (pci.domain, pci.bus, pci.device) == (0, 0x83, 0)
    assert pci.busId == "00000000:83:00.0"
    assert pci.busIdLegacy == "0000:83:00.0"
    assert (pci.pciDeviceId, pci.pciSubSystemId) == (0x20B210DE, 0x146310DE)
    for found in (
        nvml.nvmlDeviceGetHandleByUUID(nvml.nvmlDeviceGetUUID(card)),
        nvml.nvmlDeviceGetHandleBySerial(nvml.nvmlDeviceGetSerial(card)),
        *(nvml.nvmlDeviceGetHandleByPciBusId(text) for text in ("00000000:83:00.0", "0000:83:00.0", "83:00.0")),
    ):
        assert nvml.nvmlDeviceGetIndex(found) == 2
    assert code_of(nvml, nvml.nvmlDeviceGetHandleByIndex, 4) == nvml.NVML_ERROR_INVALID_ARGUMENT
    assert code_of(nvml, nvml.nvmlDeviceGetHandleByUUID, "GPU-nobody") == nvml.NVML_ERROR_NOT_FOUND
    assert code_of(nvml, nvml.nvmlDeviceGetHandleByPciBusId, "0000:07:00.0") == nvml.NVML_ERROR_NOT_FOUND
    for hostile in ("", ":::", "zz:00.0", "0000:83:00.0:1", "9" * 200):
        assert code_of(nvml, nvml.nvmlDeviceGetHandleByPciBusId, hostile) == nvml.NVML_ERROR_INVALID_ARGUMENT


def test_system_is_told(a100: Machine, start_nvml: Start) -> None:
    nvml = start_nvml(a100)
    assert nvml.nvmlSystemGetDriverVersion() == "580.95.05"
    assert nvml.nvmlSystemGetNVMLVersion() == "13.580.95.05"
    assert nvml.nvmlSystemGetCudaDriverVersion() == nvml.nvmlSystemGetCudaDriverVersion_v2() == 13000
    assert "python" in nvml.nvmlSystemGetProcessName(os.getpid())
    assert code_of(nvml, nvml.nvmlSystemGetProcessName, 4_000_000) == nvml.NVML_ERROR_NOT_FOUND
    assert nvml.nvmlErrorString(nvml.NVML_ERROR_GPU_IS_LOST) == "GPU is lost"
    assert nvml.nvmlErrorString(4711) == "Unknown Error"


def test_a100_answers_every_call_that_a_reader_makes(a100: Machine, start_nvml: Start) -> None:
    nvml = start_nvml(a100)
    card = nvml.nvmlDeviceGetHandleByIndex(0)
    expected: dict[str, Any] = {
        "Name": "NVIDIA A100-SXM4-80GB",
        "Architecture": nvml.NVML_DEVICE_ARCH_AMPERE,
        "CudaComputeCapability": (8, 0),
        "VbiosVersion": "92.00.45.00.05",
        "BoardPartNumber": "692-2G506-0212-002",
        "MinorNumber": 0,
        "NumFans": 0,
        "PersistenceMode": 1,
        "ComputeMode": nvml.NVML_COMPUTEMODE_DEFAULT,
        "PerformanceState": nvml.NVML_PSTATE_0,
        "EccMode": [1, 1],
        "DefaultEccMode": [1],
        "RemappedRows": (0, 0, 0, 0),
        "CurrPcieLinkWidth": 16,
        "MaxPcieLinkWidth": 16,
        "CurrPcieLinkGeneration": 4,
        "MaxPcieLinkGeneration": 4,
        "GpuMaxPcieLinkGeneration": 4,
        "PcieReplayCounter": 0,
        "PcieSpeed": 16000,
        "PowerUsage": 62310,
        "PowerManagementLimit": 400_000,
        "EnforcedPowerLimit": 400_000,
        "PowerManagementDefaultLimit": 400_000,
        "PowerManagementLimitConstraints": [100_000, 400_000],
        "CurrentClocksEventReasons": nvml.nvmlClocksEventReasonGpuIdle,
        "CurrentClocksThrottleReasons": nvml.nvmlClocksEventReasonGpuIdle,
        "SupportedClocksEventReasons": 0x1FF,
        "MigMode": [0, 0],
        "MaxMigDeviceCount": 7,
        "ComputeRunningProcesses": [],
        "GraphicsRunningProcesses": [],
        "MPSComputeRunningProcesses": [],
    }
    found = {name: getattr(nvml, f"nvmlDeviceGet{name}")(card) for name in expected}
    assert {name: tuple(v) if isinstance(expected[name], tuple) else v for name, v in found.items()} == expected
    assert nvml.nvmlDeviceGetTemperature(card, nvml.NVML_TEMPERATURE_GPU) == 32
    assert nvml.nvmlDeviceGetTemperatureV(card, nvml.NVML_TEMPERATURE_GPU) == 32
    thresholds = [nvml.nvmlDeviceGetTemperatureThreshold(card, kind) for kind in range(4)]
    assert thresholds == [92, 89, 95, 85]
    clocks = [nvml.nvmlDeviceGetMaxClockInfo(card, kind) for kind in range(nvml.NVML_CLOCK_COUNT)]
    assert clocks == [1410, 1410, 1593, 1290]
    banks = nvml.nvmlDeviceGetRowRemapperHistogram(card)
    assert (banks.max, banks.high, banks.partial, banks.low, banks.none) == (640, 0, 0, 0, 0)
    rates = nvml.nvmlDeviceGetUtilizationRates(card)
    assert (rates.gpu, rates.memory) == (0, 0)
    for call, arguments in (
        (nvml.nvmlDeviceGetFanSpeed, ()),
        (nvml.nvmlDeviceGetRetiredPages_v2, (0,)),
        (nvml.nvmlDeviceGetRetiredPagesPendingStatus, ()),
    ):
        assert code_of(nvml, call, card, *arguments) == nvml.NVML_ERROR_NOT_SUPPORTED


def test_memory_counts_reserve_apart_in_the_second_version_only(a100: Machine, start_nvml: Start) -> None:
    nvml = start_nvml(a100)
    card = nvml.nvmlDeviceGetHandleByIndex(0)
    a100.state.set("gpus/0/memory_used_mib", 70_000)
    mib = 1 << 20
    first, second = nvml.nvmlDeviceGetMemoryInfo(card), nvml.nvmlDeviceGetMemoryInfo(card, version=nvml.nvmlMemory_v2)
    assert (first.total, first.used, first.free) == (81920 * mib, 70_614 * mib, 11_306 * mib)
    assert (second.total, second.reserved, second.used, second.free) == (
        *(81920 * mib, 614 * mib, 70_000 * mib),
        11_306 * mib,
    )
    assert code_of(nvml, nvml.nvmlDeviceGetMemoryInfo, card, 0x01000028) == nvml.NVML_ERROR_ARGUMENT_VERSION_MISMATCH


def test_processes_are_those_that_live(a100: Machine, start_nvml: Start) -> None:
    nvml = start_nvml(a100)
    card = nvml.nvmlDeviceGetHandleByIndex(1)
    values: dict[str, int | str] = {"kind": "compute", "memory_mib": 1234}
    a100.state.update(f"gpus/1/processes/{os.getpid()}", {**values})
    a100.state.update("gpus/1/processes/4000000", {**values})  # above the kernel's largest pid here: it died
    for version in ("", "_v2", "_v3"):
        (process,) = getattr(nvml, f"nvmlDeviceGetComputeRunningProcesses{version}")(card)
        assert (process.pid, process.usedGpuMemory) == (os.getpid(), 1234 << 20)
    assert nvml.nvmlDeviceGetGraphicsRunningProcesses(card) == []
    assert nvml.nvmlDeviceGetMemoryInfo(card).used == (614 + 1234) << 20


def test_ecc_counts_by_place_and_are_gone_while_ecc_is_off(a100: Machine, start_nvml: Start) -> None:
    nvml = start_nvml(a100)
    card = nvml.nvmlDeviceGetHandleByIndex(0)
    a100.state.set("gpus/0/ecc/volatile/corrected/dram", 3)
    a100.state.set("gpus/0/ecc/volatile/corrected/sram", 2)
    a100.state.set("gpus/0/ecc/aggregate/uncorrected/dram", 7)
    corrected, uncorrected = nvml.NVML_MEMORY_ERROR_TYPE_CORRECTED, nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED
    volatile, aggregate = nvml.NVML_VOLATILE_ECC, nvml.NVML_AGGREGATE_ECC
    total = nvml.nvmlDeviceGetTotalEccErrors
    assert [total(card, corrected, volatile), total(card, uncorrected, volatile)] == [5, 0]
    assert [total(card, corrected, aggregate), total(card, uncorrected, aggregate)] == [0, 7]
    place = nvml.nvmlDeviceGetMemoryErrorCounter
    assert place(card, corrected, volatile, nvml.NVML_MEMORY_LOCATION_DRAM) == 3
    assert place(card, corrected, volatile, nvml.NVML_MEMORY_LOCATION_SRAM) == 2
    cbu = nvml.NVML_MEMORY_LOCATION_CBU
    assert code_of(nvml, place, card, corrected, volatile, cbu) == nvml.NVML_ERROR_NOT_SUPPORTED
    assert code_of(nvml, total, card, 2, volatile) == nvml.NVML_ERROR_INVALID_ARGUMENT
    fields = nvml.nvmlDeviceGetFieldValues(card, [3, 4, 5, 6])
    assert [(value.nvmlReturn, value.value.ullVal) for value in fields] == [(0, 5), (0, 0), (0, 0), (0, 7)]
    a100.state.set("gpus/0/ecc_current", 0)
    assert code_of(nvml, total, card, corrected, volatile) == nvml.NVML_ERROR_NOT_SUPPORTED


def test_fields(a100: Machine, l40s: Machine, start_nvml: Start) -> None:
    nvml = start_nvml(a100)
    card = nvml.nvmlDeviceGetHandleByIndex(0)
    a100.state.set("gpus/0/recovery_action", 2)
    a100.state.update("gpus/0/nvlinks/7", {"state": 0})
    a100.state.update("gpus/0/nvlinks/8", {"crc_flit_errors": 12})
    speeds = nvml.nvmlDeviceGetFieldValues(card, [*range(84, 90), *range(132, 138)])
    assert [(value.nvmlReturn, value.value.uiVal) for value in speeds] == [
        (3, 0) if link == 7 else (0, 25_000) for link in range(12)
    ]
    scoped = nvml.nvmlDeviceGetFieldValues(card, [(164, 3), (164, 7), (164, 12), (163, 8), (165, 7)])
    assert [(value.nvmlReturn, value.value.ullVal) for value in scoped] == [
        *((0, 25_000), (3, 0), (2, 0)),
        *((0, 12), (0, 0)),
    ]
    plain = nvml.nvmlDeviceGetFieldValues(card, [91, 230, 82, 142, 143, 144, 145, 185, 186, 38, 98, 4711])
    assert [(value.nvmlReturn, value.value.ullVal) for value in plain] == [
        *((0, 12), (0, 2), (0, 38), (0, 0), (0, 0), (0, 0), (0, 0)),
        *((0, 62_310), (0, 62_310), (0, 12), (0, 12), (3, 0)),
    ]
    assert all(abs(value.timestamp / 1e6 - time.time()) < 60 for value in plain)


def test_l40s_has_no_nvlink_no_mig_and_no_memory_temperature(l40s: Machine, start_nvml: Start) -> None:
    nvml = start_nvml(l40s)
    card = nvml.nvmlDeviceGetHandleByIndex(0)
    assert nvml.nvmlDeviceGetName(card) == "NVIDIA L40S"
    assert code_of(nvml, nvml.nvmlDeviceGetNvLinkState, card, 0) == nvml.NVML_ERROR_NOT_SUPPORTED
    assert code_of(nvml, nvml.nvmlDeviceGetMigMode, card) == nvml.NVML_ERROR_NOT_SUPPORTED
    temperature, links = nvml.nvmlDeviceGetFieldValues(card, [82, 91])
    assert temperature.nvmlReturn == nvml.NVML_ERROR_NOT_SUPPORTED
    assert (links.nvmlReturn, links.value.uiVal) == (0, 0)
    # Idle links fall to the lowest speed, never in width.
    assert nvml.nvmlDeviceGetCurrPcieLinkGeneration(card) == 1
    assert nvml.nvmlDeviceGetCurrPcieLinkWidth(card) == 16
    other = nvml.nvmlDeviceGetHandleByIndex(1)
    far = nvml.nvmlDeviceGetHandleByIndex(2)
    assert nvml.nvmlDeviceGetTopologyCommonAncestor(card, other) == nvml.NVML_TOPOLOGY_HOSTBRIDGE
    assert nvml.nvmlDeviceGetTopologyCommonAncestor(card, far) == nvml.NVML_TOPOLOGY_SYSTEM
    assert nvml.nvmlDeviceGetP2PStatus(card, other, nvml.NVML_P2P_CAPS_INDEX_NVLINK) != nvml.NVML_P2P_STATUS_OK


def test_t4_retires_pages_instead_of_remapping_rows(tmp_path: Path, start_nvml: Start) -> None:
    machine = build("t4x2", tmp_path)
    machine.state.set("gpus/0/retired_pages/1/0x3f1a", 1_700_000_000_000_000)
    nvml = start_nvml(machine)
    card = nvml.nvmlDeviceGetHandleByIndex(0)
    assert code_of(nvml, nvml.nvmlDeviceGetRemappedRows, card) == nvml.NVML_ERROR_NOT_SUPPORTED
    assert nvml.nvmlDeviceGetRetiredPages_v2(card, 0) == []
    assert nvml.nvmlDeviceGetRetiredPages_v2(card, 1) == [{"address": 0x3F1A, "timestamp": 1_700_000_000_000_000}]
    assert nvml.nvmlDeviceGetRetiredPages(card, 1) == [0x3F1A]
    assert nvml.nvmlDeviceGetRetiredPagesPendingStatus(card) == 0


def test_rows_are_hidden_by_mig(a100: Machine, start_nvml: Start) -> None:
    nvml = start_nvml(a100)
    card = nvml.nvmlDeviceGetHandleByIndex(0)
    a100.state.set("gpus/0/mig_current", 1)
    assert code_of(nvml, nvml.nvmlDeviceGetRemappedRows, card) == nvml.NVML_ERROR_NOT_SUPPORTED


def test_nvlinks_lead_to_the_peers(a100: Machine, start_nvml: Start) -> None:
    nvml = start_nvml(a100)
    cards = [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(4)]
    addresses = [nvml.nvmlDeviceGetPciInfo(card).busId for card in cards]
    ends = [nvml.nvmlDeviceGetNvLinkRemotePciInfo(cards[0], link).busId for link in range(12)]
    assert sorted(ends) == sorted(addresses[1:] * 4)
    assert nvml.nvmlDeviceGetNvLinkRemoteDeviceType(cards[0], 0) == nvml.NVML_NVLINK_DEVICE_TYPE_GPU
    assert nvml.nvmlDeviceGetP2PStatus(cards[0], cards[3], nvml.NVML_P2P_CAPS_INDEX_NVLINK) == nvml.NVML_P2P_STATUS_OK
    assert nvml.nvmlDeviceGetTopologyCommonAncestor(cards[0], cards[1]) == nvml.NVML_TOPOLOGY_SINGLE
    a100.state.update("gpus/0/nvlinks/5", {"state": 0, "replay_errors": 9})
    assert nvml.nvmlDeviceGetNvLinkState(cards[0], 4) == 1
    assert nvml.nvmlDeviceGetNvLinkState(cards[0], 5) == 0
    error = nvml.nvmlDeviceGetNvLinkErrorCounter
    assert code_of(nvml, error, cards[0], 5, nvml.NVML_NVLINK_ERROR_DL_REPLAY) == nvml.NVML_ERROR_NOT_SUPPORTED
    a100.state.set("gpus/0/nvlinks/5/state", 1)
    assert error(cards[0], 5, nvml.NVML_NVLINK_ERROR_DL_REPLAY) == 9
    assert code_of(nvml, nvml.nvmlDeviceGetNvLinkState, cards[0], 12) == nvml.NVML_ERROR_INVALID_ARGUMENT


def test_nvlinks_of_eight_cards_lead_to_switches(tmp_path: Path, start_nvml: Start) -> None:
    nvml = start_nvml(build("a100-sxm4x8", tmp_path))
    card = nvml.nvmlDeviceGetHandleByIndex(7)
    ends = [nvml.nvmlDeviceGetNvLinkRemotePciInfo(card, link).busId for link in range(12)]
    assert len(set(ends)) == 6
    assert nvml.nvmlDeviceGetNvLinkRemoteDeviceType(card, 0) == nvml.NVML_NVLINK_DEVICE_TYPE_SWITCH


def test_lost_card_fails_on_all_calls_and_the_others_go_on(a100: Machine, start_nvml: Start) -> None:
    nvml = start_nvml(a100)
    lost, well = nvml.nvmlDeviceGetHandleByIndex(2), nvml.nvmlDeviceGetHandleByIndex(3)
    a100.state.set("gpus/2/lost", 1)
    for name in ("Name", "UUID", "PciInfo", "EccMode", "PowerUsage", "ComputeRunningProcesses", "RemappedRows"):
        call = getattr(nvml, f"nvmlDeviceGet{name}")
        assert code_of(nvml, call, lost) == nvml.NVML_ERROR_GPU_IS_LOST, name
        call(well)
    assert code_of(nvml, nvml.nvmlDeviceGetHandleByIndex, 2) == nvml.NVML_ERROR_GPU_IS_LOST
    assert code_of(nvml, nvml.nvmlDeviceGetFieldValues, lost, [230]) == nvml.NVML_ERROR_GPU_IS_LOST
    assert nvml.nvmlDeviceGetCount() == 4


def test_hung_card_blocks_until_it_is_mended(a100: Machine, start_nvml: Start) -> None:
    nvml = start_nvml(a100)
    card = nvml.nvmlDeviceGetHandleByIndex(0)
    a100.state.set("gpus/0/hang", 1)
    answers: list[str] = []
    caller = threading.Thread(target=lambda: answers.append(nvml.nvmlDeviceGetName(card)))
    caller.start()
    caller.join(timeout=0.3)
    assert caller.is_alive()
    assert answers == []
    a100.state.set("gpus/0/hang", 0)
    caller.join(timeout=10)
    assert answers == ["NVIDIA A100-SXM4-80GB"]


def test_injected_code_of_one_function(a100: Machine, start_nvml: Start) -> None:
    nvml = start_nvml(a100)
    card = nvml.nvmlDeviceGetHandleByIndex(0)
    a100.state.set("errors/nvmlDeviceGetPowerUsage", nvml.NVML_ERROR_TIMEOUT)
    assert code_of(nvml, nvml.nvmlDeviceGetPowerUsage, card) == nvml.NVML_ERROR_TIMEOUT
    assert nvml.nvmlDeviceGetEnforcedPowerLimit(card) == 400_000


def test_values_that_are_no_numbers_are_an_unknown_error(a100: Machine, start_nvml: Start) -> None:
    nvml = start_nvml(a100)
    card = nvml.nvmlDeviceGetHandleByIndex(0)
    for junk in ("", "-1", "lots", "12 13"):
        a100.state.set("gpus/0/power_milliwatts", junk)
        assert code_of(nvml, nvml.nvmlDeviceGetPowerUsage, card) == nvml.NVML_ERROR_UNKNOWN


def test_root_sets_what_others_may_not(a100: Machine, start_nvml: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    nvml = start_nvml(a100)
    card = nvml.nvmlDeviceGetHandleByIndex(0)
    if os.geteuid() == 0:
        nvml.nvmlDeviceSetEccMode(card, 0)
        assert nvml.nvmlDeviceGetEccMode(card) == [1, 0]
        nvml.nvmlDeviceSetPersistenceMode(card, 0)
        assert nvml.nvmlDeviceGetPersistenceMode(card) == 0
        nvml.nvmlDeviceSetPowerManagementLimit(card, 300_000)
        assert nvml.nvmlDeviceGetPowerManagementLimit(card) == 300_000
        a100.state.set("gpus/0/ecc/volatile/corrected/dram", 5)
        nvml.nvmlDeviceClearEccErrorCounts(card, nvml.NVML_VOLATILE_ECC)
        assert nvml.nvmlDeviceGetTotalEccErrors(card, 0, 0) == 0
    else:
        assert code_of(nvml, nvml.nvmlDeviceSetEccMode, card, 0) == nvml.NVML_ERROR_NO_PERMISSION
        assert code_of(nvml, nvml.nvmlDeviceSetPersistenceMode, card, 0) == nvml.NVML_ERROR_NO_PERMISSION
    assert code_of(nvml, nvml.nvmlDeviceSetEccMode, card, 7) == nvml.NVML_ERROR_INVALID_ARGUMENT
    for limit in (99_999, 400_001):
        assert code_of(nvml, nvml.nvmlDeviceSetPowerManagementLimit, card, limit) == nvml.NVML_ERROR_INVALID_ARGUMENT


def test_driver_that_is_not_loaded(a100: Machine, start_nvml: Start) -> None:
    a100.state.set("driver/loaded", 0)
    with pytest.raises(Exception, match="Driver Not Loaded"):
        start_nvml(a100)


def test_calls_before_init_are_told_so(a100: Machine, start_nvml: Start) -> None:
    nvml = start_nvml(a100)
    nvml.nvmlShutdown()
    assert code_of(nvml, nvml.nvmlDeviceGetCount) == nvml.NVML_ERROR_UNINITIALIZED
    nvml.nvmlInit()


def test_every_getter_of_the_binding_answers_or_fails_cleanly(a100: Machine, start_nvml: Start) -> None:
    """Called with a card alone: an answer, an NVML error, or Python's own complaint about arguments; never a crash."""
    nvml = start_nvml(a100)
    card = nvml.nvmlDeviceGetHandleByIndex(0)
    answered, missing = [], []
    for name, call in inspect.getmembers(nvml, inspect.isfunction):
        if not re.match(r"nvml(Device|System)Get", name):
            continue
        try:
            call(card)
        except nvml.NVMLError as error:
            if error.value == nvml.NVML_ERROR_FUNCTION_NOT_FOUND:
                missing.append(name)
        except (TypeError, ValueError, AttributeError, LookupError):
            continue
        else:
            answered.append(name)
    assert "nvmlDeviceGetName" in answered
    assert "nvmlDeviceGetGpuOperationMode" in missing


def test_library_needs_no_newer_libc_than_the_oldest_host_has(tmp_path: Path) -> None:
    built = tmp_path / "library.so"
    command = ["gcc", *library.FLAGS, *library.WARNINGS, "-o", str(built), str(library.SOURCE)]
    subprocess.run(command, check=True, capture_output=True)
    symbols = subprocess.run(["objdump", "-T", str(built)], check=True, capture_output=True, text=True).stdout
    versions = {tuple(map(int, text.split("."))) for text in re.findall(r"GLIBC_([0-9.]+)", symbols)}
    assert versions
    assert max(versions) <= (2, 17)
