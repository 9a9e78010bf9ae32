# SPDX-License-Identifier: GPL-3.0-or-later
"""Cards as NVML, the driver's files and nvidia-smi tell them: good ones, odd ones, lost ones."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ansible_collections.ringmaster.inference.plugins.module_utils.commands import Answer, CommandRunner
from ansible_collections.ringmaster.inference.plugins.module_utils.file_tree import FileTree
from ansible_collections.ringmaster.inference.plugins.module_utils.gpu import (
    IDENTITY,
    READINGS,
    RECOVERY_ACTIONS,
    VITALS,
    GpuReader,
    UnknownGpuError,
    identities,
    recovery_actions,
    survey,
)
from ansible_collections.ringmaster.inference.plugins.module_utils.gpu_health import judge
from ansible_collections.ringmaster.inference.plugins.module_utils.nvml import (
    Nvml,
    NvmlUnavailableError,
    ReaderProcess,
)
from tests.support.nvml import Code, Crash, Hang, Library, a100, driver_files, field, l40s


class NoCommands(CommandRunner):
    """A host without nvidia-smi, which counts how often it was asked for."""

    def __init__(self, answer: Answer | None = None) -> None:
        self.asked: list[list[str]] = []
        self.answer = answer or Answer(None, complaint="not found: nvidia-smi")

    def run(self, command: Sequence[str], timeout: float = 20) -> Answer:
        self.asked.append(list(command))
        return self.answer


def read(library: Library, root: Path, *wanted: str, commands: CommandRunner | None = None) -> dict[str, Any]:
    files = FileTree(str(root))
    reader = GpuReader(Nvml(library, files), files)
    found = survey(lambda method, *given: getattr(reader, method)(*given), files, commands or NoCommands(), wanted)
    json.dumps(found, allow_nan=False)
    return found


def one(library: Library, root: Path, *wanted: str, commands: CommandRunner | None = None) -> dict[str, Any]:
    (card,) = read(library, root, *wanted, commands=commands)["gpus"]
    assert isinstance(card, dict)
    return card


def test_a_healthy_card(tmp_path: Path) -> None:
    found = read(Library(a100(2)), tmp_path)
    assert found["driver_version"] == "580.95.05"
    assert found["unknown"] == {}
    (card,) = found["gpus"]
    assert list(card) == [*IDENTITY, *READINGS, "card", "state", "unknown", "unread"]
    retired = ("retired_pages_single_bit", "retired_pages_double_bit", "retired_pages_pending")
    assert sorted(card["unknown"]) == sorted(retired)
    assert card["unread"] == []
    shown = {name: value for name, value in card.items() if name not in ("unknown", "unread", *retired)}
    assert shown == {
        "index": 0,
        "uuid": "GPU-00000002-0a52-4d5e-9a63-2f0e8d9c7b11",
        "pci_address": "0000:47:00.0",
        "model": "NVIDIA A100-SXM4-80GB",
        "serial": "1564720004602",
        "vbios_version": "92.00.36.00.02",
        "memory_total_bytes": 85899345920,
        "memory_used_bytes": 4194304,
        "memory_free_bytes": 85895151616,
        "utilization_percent": 0,
        "performance_state": 0,
        "temperature_celsius": 34,
        "temperature_memory_celsius": 41,
        "temperature_slowdown_celsius": 89,
        "temperature_shutdown_celsius": 92,
        "power_watts": 61.2,
        "power_limit_watts": 400.0,
        "power_limit_default_watts": 400.0,
        "power_limit_min_watts": 100.0,
        "power_limit_max_watts": 400.0,
        "clock_event_reasons": ["gpu_idle"],
        "ecc_current": True,
        "ecc_pending": True,
        "ecc_corrected_volatile": 0,
        "ecc_corrected_aggregate": 3,
        "ecc_uncorrected_volatile": 0,
        "ecc_uncorrected_aggregate": 0,
        "remapped_rows_corrected": 0,
        "remapped_rows_uncorrected": 0,
        "remapped_rows_pending": False,
        "remapped_rows_failed": False,
        "remap_banks": {"max": 640, "high": 0, "partial": 0, "low": 0, "none": 0},
        "pcie_width": 16,
        "pcie_width_max": 16,
        "pcie_generation": 4,
        "pcie_generation_max": 4,
        "pcie_replay_counter": 0,
        "mig_current": False,
        "mig_pending": False,
        "persistence_mode": True,
        "recovery_action": "none",
        "processes": [],
        "card": "a100-80g",
        "state": "answers",
    }


def test_a_t4_retires_pages_and_has_no_rows_and_no_ecc_of_an_a100(tmp_path: Path) -> None:
    card = one(
        Library(
            a100(
                Name="Tesla T4",
                RemappedRows=Code(3),
                RowRemapperHistogram=Code(3),
                RetiredPages_v2={(0,): [{"address": 4096, "timestamp": 1}], (1,): []},
                RetiredPagesPendingStatus=1,
                MigMode=Code(3),
            )
        ),
        tmp_path,
    )
    assert card["retired_pages_single_bit"] == 1
    assert card["retired_pages_double_bit"] == 0
    assert card["retired_pages_pending"] is True
    assert card["remapped_rows_pending"] is None
    assert card["remap_banks"] is None
    assert card["unread"] == []
    assert {"remapped_rows_failed", "remap_banks", "mig_current"} <= card["unknown"].keys()


def test_ecc_that_is_not_there_is_unknown_and_not_off(tmp_path: Path) -> None:
    card = one(Library(l40s(EccMode=Code(3), TotalEccErrors=Code(3))), tmp_path)
    assert card["ecc_current"] is None
    assert card["ecc_uncorrected_volatile"] is None
    assert card["ecc_current"] != card["mig_current"] or card["unknown"]["ecc_current"]


def test_remapped_rows_are_not_told_while_mig_is_on(tmp_path: Path) -> None:
    card = one(Library(a100(MigMode=[1, 1], RemappedRows=Code(3))), tmp_path)
    assert card["remapped_rows_failed"] is None
    assert card["unknown"]["remapped_rows_failed"] == "NVML does not tell remapped rows while MIG is on"
    assert card["mig_current"] is True


def test_an_old_library_and_bytes(tmp_path: Path) -> None:
    card = one(
        Library(
            a100(UUID=b"GPU-1", Name=b"A100-SXM4-40GB", PciInfo=SimpleNamespace(busId=b"00000000:07:00.0")),
            missing=["nvmlDeviceGetCurrentClocksEventReasons", "nvmlDeviceGetRowRemapperHistogram"],
        ),
        tmp_path,
    )
    assert (card["uuid"], card["model"], card["pci_address"]) == ("GPU-1", "A100-SXM4-40GB", "0000:07:00.0")
    assert "newer nvidia-ml-py" in card["unknown"]["remap_banks"]
    assert card["clock_event_reasons"] is None
    old = one(
        Library(
            a100(CurrentClocksThrottleReasons=0x48, RetiredPages={(0,): [1, 2], (1,): [3]}),
            missing=["nvmlDeviceGetCurrentClocksEventReasons", "nvmlDeviceGetRetiredPages_v2"],
        ),
        tmp_path,
    )
    assert old["clock_event_reasons"] == ["hw_slowdown", "hw_thermal_slowdown"]
    assert (old["retired_pages_single_bit"], old["retired_pages_double_bit"]) == (2, 1)


def test_a_new_library_without_the_old_temperature(tmp_path: Path) -> None:
    card = one(Library(a100(Temperature=Code(13), TemperatureV={(0,): 51})), tmp_path)
    assert card["temperature_celsius"] == 51


def test_clock_event_reasons_in_words(tmp_path: Path) -> None:
    card = one(Library(a100(CurrentClocksEventReasons=0x4 | 0x80 | 0x200)), tmp_path)
    assert card["clock_event_reasons"] == ["sw_power_cap", "hw_power_brake_slowdown", "unknown_0x200"]
    assert one(Library(a100(CurrentClocksEventReasons=0)), tmp_path)["clock_event_reasons"] == []


@pytest.mark.parametrize(("width", "known"), [(16, 16), (8, 8), (0, None), (255, None), (33, None), (-1, None)])
def test_a_width_that_is_not_one(tmp_path: Path, width: int, known: int | None) -> None:
    assert one(Library(a100(CurrPcieLinkWidth=width)), tmp_path)["pcie_width"] == known


def test_processes(tmp_path: Path) -> None:
    (tmp_path / "proc/12").mkdir(parents=True)
    (tmp_path / "proc/12/comm").write_text("python3\n")
    process = SimpleNamespace
    card = one(
        Library(
            a100(
                ComputeRunningProcesses=[
                    process(pid=12, usedGpuMemory=1024),
                    process(pid=11, usedGpuMemory=None),
                    process(pid=12, usedGpuMemory=1024),
                ],
                GraphicsRunningProcesses=[process(pid=12, usedGpuMemory=(1 << 64) - 1)],
                MPSComputeRunningProcesses=Code(3),
            ),
            process_names={11: "/usr/bin/nvidia-cuda-mps-server\x1b[0m"},
        ),
        tmp_path,
    )
    assert [(each["pid"], each["type"], each["name"], each["memory_bytes"]) for each in card["processes"]] == [
        (11, "compute", "/usr/bin/nvidia-cuda-mps-server\ufffd[0m", None),
        (12, "compute", "python3", 1024),
        (12, "graphics", "python3", None),
    ]
    assert "memory_bytes" in card["processes"][0]["unknown"]


@pytest.mark.parametrize("answer", [Code(4), "text", [object()], [SimpleNamespace(pid="x")], 7])
def test_processes_that_can_not_be_told_are_not_none(tmp_path: Path, answer: Any) -> None:
    card = one(Library(a100(ComputeRunningProcesses=answer)), tmp_path)
    assert card["processes"] is None
    assert card["unknown"]["processes"]


# The recovery action

REPORT = """<?xml version="1.0" ?>
<!DOCTYPE nvidia_smi_log SYSTEM "nvsmi_device_v12.dtd">
<nvidia_smi_log>
    <gpu id="00000000:07:00.0">
        <gpu_recovery_action>None</gpu_recovery_action>
    </gpu>
    <gpu id="00000000:0F:00.0">
        <gpu_recovery_action>Drain and Reset</gpu_recovery_action>
    </gpu>
    <gpu id="00000000:47:00.0">
        <product_name>NVIDIA A100-SXM4-80GB</product_name>
    </gpu>
</nvidia_smi_log>
"""


@pytest.mark.parametrize("number", sorted(RECOVERY_ACTIONS))
def test_the_driver_tells_its_recovery_action(tmp_path: Path, number: int) -> None:
    commands = NoCommands()
    card = one(Library(a100(fields={230: field(number)})), tmp_path, commands=commands)
    assert card["recovery_action"] == RECOVERY_ACTIONS[number]
    assert commands.asked == []


def test_an_action_that_nobody_knows_yet_is_no_good_sign(tmp_path: Path) -> None:
    card = one(Library(a100(fields={230: field(9)})), tmp_path)
    assert card["recovery_action"] == "unknown_9"
    assert judge(card)["verdict"] == "unknown"


def test_nvidia_smi_is_asked_once_where_nvml_does_not_tell(tmp_path: Path) -> None:
    commands = NoCommands(Answer(0, REPORT))
    silent = {230: field(code=3)}
    library = Library(a100(0, fields=silent), a100(1, fields=silent), a100(2, fields=silent))
    cards = read(library, tmp_path, commands=commands)["gpus"]
    assert [card["recovery_action"] for card in cards] == ["none", "drain_and_reset", None]
    assert cards[2]["unknown"]["recovery_action"].endswith("nor does nvidia-smi -q -x tell")
    assert "recovery_action" not in cards[1]["unknown"]
    assert commands.asked == [["nvidia-smi", "-q", "-x"]]


def test_no_nvidia_smi_either(tmp_path: Path) -> None:
    card = one(Library(a100(fields=Code(13))), tmp_path)
    assert card["recovery_action"] is None
    assert card["unknown"]["recovery_action"].endswith("nvidia-smi: not found: nvidia-smi")


@given(st.one_of(st.text(), st.integers(0, len(REPORT)).map(lambda end: REPORT[:end])))
def test_any_report_is_read(document: str) -> None:
    assert set(recovery_actions(document).values()) <= {*RECOVERY_ACTIONS.values()}


# Cards that do not answer


def test_a_lost_card_keeps_its_place(tmp_path: Path) -> None:
    driver_files(tmp_path, "0000:07:00.0", "0000:0f:00.0", "0000:47:00.0")
    cards = read(Library(a100(0), a100(1, handle=Code(15)), a100(2)), tmp_path)["gpus"]
    assert [card["pci_address"] for card in cards] == ["0000:07:00.0", "0000:0f:00.0", "0000:47:00.0"]
    lost = cards[1]
    assert (lost["state"], lost["index"], lost["uuid"]) == ("lost", 1, "GPU-from-the-file-of-0f")
    assert lost["ecc_current"] is None
    assert "fallen off the bus" in lost["unknown"]["ecc_current"]
    assert judge(lost)["verdict"] == "power_cycle"
    assert [judge(card)["verdict"] for card in cards] == ["ok", "power_cycle", "ok"]


def test_a_card_that_is_lost_while_the_library_remembers_its_name(tmp_path: Path) -> None:
    gone = {name: Code(15) for name in a100() if name not in ("UUID", "PciInfo", "Name", "Serial")}
    card = one(Library(a100(**gone)), tmp_path)
    assert (card["state"], card["uuid"]) == ("lost", "GPU-00000000-0a52-4d5e-9a63-2f0e8d9c7b11")
    assert judge(card)["verdict"] == "power_cycle"


@pytest.mark.parametrize(
    ("code", "state", "verdict"),
    [(15, "lost", "power_cycle"), (16, "reset_required", "reset"), (14, "failed", "unknown")],
)
def test_what_a_card_says_when_it_is_opened(tmp_path: Path, code: int, state: str, verdict: str) -> None:
    card = one(Library(a100(handle=Code(code))), tmp_path)
    assert card["state"] == state
    assert judge(card)["verdict"] == verdict
    assert card["pci_address"] is None
    assert card["unknown"].keys() >= set(READINGS) | {"uuid", "pci_address", "model", "serial"}


def test_places_that_could_be_mixed_up_are_not_guessed(tmp_path: Path) -> None:
    driver_files(tmp_path, "0000:07:00.0", "0000:0f:00.0", "0000:47:00.0")
    cards = read(Library(a100(0), a100(1, handle=Code(15))), tmp_path)["gpus"]
    assert [(card["index"], card["pci_address"], card["state"]) for card in cards] == [
        (0, "0000:07:00.0", "answers"),
        (None, "0000:0f:00.0", "not_listed"),
        (None, "0000:47:00.0", "not_listed"),
        (1, None, "lost"),
    ]


def test_a_card_that_belongs_to_a_virtual_machine(tmp_path: Path) -> None:
    driver_files(tmp_path, "0000:07:00.0")
    driver_files(tmp_path, "0000:0f:00.0", driver="vfio-pci", listed=False)
    driver_files(tmp_path, "0000:47:00.0", driver="", listed=False)
    cards = read(Library(a100(0)), tmp_path)["gpus"]
    assert [card["state"] for card in cards] == ["answers", "not_listed", "not_listed"]
    assert "vfio-pci" in cards[1]["unknown"]["uuid"]
    assert "no kernel driver" in cards[2]["unknown"]["uuid"]
    assert judge(cards[1])["verdict"] == "unknown"


def test_switches_and_sound_are_no_cards(tmp_path: Path) -> None:
    driver_files(tmp_path, "0000:07:00.0")
    for address, vendor, kind in (
        ("0000:07:00.1", "0x10de", "0x040300"),
        ("0000:c4:00.0", "0x10de", "0x068000"),
        ("0000:3b:00.0", "0x15b3", "0x020000"),
        ("0000:03:00.0", "0x1a03", "0x030000"),
    ):
        function = tmp_path / "sys/bus/pci/devices" / address
        function.mkdir()
        (function / "vendor").write_text(vendor)
        (function / "class").write_text(kind)
    assert len(read(Library(a100(0)), tmp_path)["gpus"]) == 1


def test_a_card_that_hangs_and_one_that_crashes_hide_no_other(tmp_path: Path) -> None:
    driver_files(tmp_path, "0000:07:00.0", "0000:0f:00.0", "0000:47:00.0")
    files = FileTree(str(tmp_path))
    library = Library(a100(0, RemappedRows=Hang()), a100(1, Name=Crash()), a100(2))
    with ReaderProcess(GpuReader(Nvml(library, files), files), seconds=0.5) as process:
        cards = survey(process.call, files, NoCommands())["gpus"]
    assert [card["state"] for card in cards] == ["no_answer", "no_answer", "answers"]
    assert cards[0]["unknown"]["ecc_current"] == "no answer within 0.5 s"
    assert "ended without an answer" in cards[1]["unknown"]["ecc_current"]
    assert [card["pci_address"] for card in cards] == ["0000:07:00.0", "0000:0f:00.0", "0000:47:00.0"]
    assert [judge(card)["verdict"] for card in cards] == ["unknown", "unknown", "ok"]


def test_nvml_that_hangs_as_a_whole(tmp_path: Path) -> None:
    files = FileTree(str(tmp_path))
    with ReaderProcess(GpuReader(Nvml(Library(init=Hang()), files), files), seconds=0.3) as process:
        with pytest.raises(NvmlUnavailableError, match=r"no answer within 0\.3 s"):
            survey(process.call, files, NoCommands())


@pytest.mark.parametrize("count", [Code(999), "many", -1, 100000, None])
def test_a_count_that_is_none(tmp_path: Path, count: Any) -> None:
    with pytest.raises(NvmlUnavailableError, match="count"):
        read(Library(count=count), tmp_path)


def test_a_host_without_cards(tmp_path: Path) -> None:
    assert read(Library(), tmp_path)["gpus"] == []


# Which cards


@pytest.mark.parametrize(
    "name", ["1", "GPU-00000001-0a52-4d5e-9a63-2f0e8d9c7b11", "00000000:0F:00.0", "0f:00.0", " 1 "]
)
def test_a_card_is_found_by_each_of_its_names(tmp_path: Path, name: str) -> None:
    card = one(Library(a100(0), a100(1)), tmp_path, name)
    assert card["index"] == 1
    assert card["power_watts"] == 61.2


def test_a_card_named_twice_is_read_once(tmp_path: Path) -> None:
    assert len(read(Library(a100(0), a100(1)), tmp_path, "1", "0f:00.0", "0")["gpus"]) == 2


@pytest.mark.parametrize("name", ["2", "GPU-none", "0000:ff:00.0", "", "-1"])
def test_a_card_that_is_not_there_is_refused_with_those_that_are(tmp_path: Path, name: str) -> None:
    with pytest.raises(UnknownGpuError, match=r"0000:07:00\.0.*To do: name a card"):
        read(Library(a100(0)), tmp_path, name)


def test_a_lost_card_can_be_asked_for_by_its_address(tmp_path: Path) -> None:
    driver_files(tmp_path, "0000:07:00.0", "0000:0f:00.0")
    card = one(Library(a100(0), a100(1, handle=Code(15))), tmp_path, "0000:0f:00.0")
    assert (card["state"], card["index"], card["uuid"]) == ("lost", 1, "GPU-from-the-file-of-0f")


def test_identities_do_not_read_the_rest(tmp_path: Path) -> None:
    files = FileTree(str(tmp_path))
    reader = GpuReader(Nvml(Library(a100(0)), files), files)
    (card,) = identities(lambda method, *given: getattr(reader, method)(*given), files)
    assert set(card) == {*IDENTITY, "state", "unknown"}


# Anything

answers = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-5, 1 << 65),
    st.floats(),
    st.text(max_size=5),
    st.binary(max_size=5),
    st.lists(st.one_of(st.integers(), st.text(max_size=3), st.none()), max_size=5),
    st.integers(0, 1000).map(Code),
    st.just(Code("odd")),
    st.just(ValueError("odd")),
    st.just(SimpleNamespace()),
)


@given(st.dictionaries(st.sampled_from([*a100(), "handle"]), answers), st.text(max_size=30))
def test_whatever_a_card_answers_is_a_document_and_a_verdict(changes: dict[str, Any], information: str) -> None:
    class Files(FileTree):
        def text(self, path: str) -> str | None:
            return information

        def names(self, path: str) -> list[str]:
            return ["0000:07:00.0", information]

    library = Library(a100(0), a100(1) | changes)
    files = Files("/nowhere")
    reader = GpuReader(Nvml(library, files), files)
    found = survey(lambda method, *given: getattr(reader, method)(*given), files, NoCommands(Answer(0, information)))
    json.dumps(found, allow_nan=False)
    for card in found["gpus"]:
        for name in (*IDENTITY, *READINGS, "card"):
            assert (card[name] is None) == (name in card["unknown"])
            assert card["unknown"].get(name) != ""
        assert set(card["unread"]) <= set(card["unknown"])
        verdict = judge(card)
        assert (verdict["verdict"] == "ok") == (verdict["reasons"] == [])


def vitals(library: Library, root: Path) -> Any:
    files = FileTree(str(root))
    reader = GpuReader(Nvml(library, files), files)
    return lambda index=0: reader.vitals(index)


def with_clock(**changes: Any) -> dict[str, Any]:
    return a100(ClockInfo={(1,): 210}, MaxClockInfo={(1,): 1410}, **changes)


def test_vitals_say_the_same_as_the_whole_card(tmp_path: Path) -> None:
    answers = with_clock(
        CurrentClocksEventReasons=0x28,
        TotalEccErrors={(0, 0): 5, (0, 1): 6, (1, 0): 7, (1, 1): 8},
        RemappedRows=(1, 2, 1, 0),
        CurrPcieLinkWidth=8,
        PcieReplayCounter=9,
    )
    whole = one(Library(answers), tmp_path)
    told = vitals(Library(answers), tmp_path)()
    json.dumps(told, allow_nan=False)
    shared = set(VITALS) & set(whole)
    assert set(VITALS) - shared == {"sm_clock_mhz", "sm_clock_max_mhz"}
    assert {name: told[name] for name in shared} == {name: whole[name] for name in shared}
    assert (told["sm_clock_mhz"], told["sm_clock_max_mhz"]) == (210, 1410)
    assert (told["state"], told["unknown"], told["unread"]) == ("answers", {}, [])


def test_vitals_of_a_card_that_lacks_something_say_why(tmp_path: Path) -> None:
    told = vitals(Library(l40s(RemappedRows=Code(3))), tmp_path)()
    for name in ("remapped_rows_pending", "sm_clock_mhz", "sm_clock_max_mhz"):
        assert told[name] is None
        assert told["unknown"][name]
    assert told["state"] == "answers"


def test_vitals_ask_for_what_never_changes_only_once(tmp_path: Path) -> None:
    library = Library(with_clock())
    read_vitals = vitals(library, tmp_path)
    first = read_vitals()
    for name in ("Name", "PciInfo", "MaxClockInfo", "MaxPcieLinkWidth", "MaxPcieLinkGeneration"):
        library.cards[0][name] = AssertionError(name)
    assert read_vitals() == first


def test_vitals_of_another_card_at_the_same_index_are_its_own(tmp_path: Path) -> None:
    library = Library(with_clock())
    read_vitals = vitals(library, tmp_path)
    read_vitals()
    library.cards[0] = l40s(1)
    told = read_vitals()
    assert (told["model"], told["pci_address"]) == ("NVIDIA L40S", "0000:0f:00.0")


@pytest.mark.parametrize(
    ("changes", "state"),
    [
        ({"handle": Code(15)}, "lost"),
        ({"handle": Code(16)}, "reset_required"),
        ({"handle": Code(999)}, "failed"),
        ({"UUID": Code(15)}, "lost"),
        ({"UtilizationRates": Code(15), "Temperature": Code(15)}, "lost"),
    ],
)
def test_vitals_tell_a_card_that_is_gone(tmp_path: Path, changes: dict[str, Any], state: str) -> None:
    told = vitals(Library(with_clock(**changes)), tmp_path)()
    assert told["state"] == state
    assert all(told["unknown"].get(name) for name in VITALS if told[name] is None)


def test_vitals_of_a_card_with_mig_do_not_call_its_rows_missing(tmp_path: Path) -> None:
    told = vitals(Library(with_clock(MigMode=[1, 1], RemappedRows=Code(999))), tmp_path)()
    assert "while MIG is on" in told["unknown"]["remapped_rows_pending"]
    assert "remapped_rows_pending" not in told["unread"]
