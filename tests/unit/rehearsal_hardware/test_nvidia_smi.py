# SPDX-License-Identifier: GPL-3.0-or-later
"""nvidia-smi: what it prints, what it refuses, and what a reset needs and does."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from xml.etree import ElementTree

import pytest

from rehearsal.hardware import Machine, build
from rehearsal.hardware.commands import nvidia_smi

Smi = Callable[..., "tuple[int, str]"]
FACTS = (
    "index,uuid,name,pci.bus_id,driver_version,memory.total,memory.used,ecc.mode.current,ecc.mode.pending,"
    "ecc.errors.corrected.volatile.total,ecc.errors.uncorrected.volatile.total,ecc.errors.uncorrected.aggregate.total,"
    "retired_pages.pending,pcie.link.gen.current,pcie.link.gen.max,pcie.link.width.current,pcie.link.width.max,"
    "temperature.gpu,temperature.memory,power.draw,power.limit,mig.mode.current,persistence_mode,"
    "clocks_event_reasons.active"
)


@pytest.fixture
def smi(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Smi:
    """A function that runs nvidia-smi as root on a machine and gives status and output."""
    monkeypatch.setattr("os.geteuid", lambda: 0)

    def run(machine: Machine, *arguments: str) -> tuple[int, str]:
        status = nvidia_smi.run(list(arguments), machine)
        return status, capsys.readouterr().out

    return run


@pytest.fixture
def holder(a100: Machine) -> Iterator[subprocess.Popen[bytes]]:
    """A process that has card 0 open, and nothing else to do with it."""
    code = f"file = open({str(a100.root / 'dev/nvidia0')!r}); print(flush=True); input()"
    command = [sys.executable, "-c", code]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        yield process
        process.kill()


def ready(machine: Machine) -> None:
    """Switch persistence off: nothing holds a card then."""
    for index in machine.state.names("gpus"):
        machine.state.set(f"gpus/{index}/persistence", 0)


def test_query_gives_every_field_in_order(a100: Machine, smi: Smi) -> None:
    a100.state.set("gpus/0/ecc/volatile/corrected/dram", 3)
    status, output = smi(a100, f"--query-gpu={FACTS}", "--format=csv,noheader,nounits")
    assert status == 0
    uuid = a100.state.text("gpus/0/uuid")
    assert output.splitlines()[0] == (
        f"0, {uuid}, NVIDIA A100-SXM4-80GB, 00000000:03:00.0, 580.95.05, 81920, 0, Enabled, Enabled, 3, 0, 0, [N/A], "
        "4, 4, 16, 16, 32, 38, 62.31, 400.00, Disabled, Enabled, 0x0000000000000001"
    )
    assert len(output.splitlines()) == 4


def test_units_and_header(l40s: Machine, smi: Smi) -> None:
    status, output = smi(l40s, "--query-gpu=memory.total,temperature.memory,power.limit", "--format=csv", "-i", "2")
    assert (status, output) == (
        0,
        "memory.total [MiB], temperature.memory, power.limit [W]\n46068 MiB, N/A, 350.00 W\n",
    )


def test_names_of_older_drivers(a100: Machine, smi: Smi) -> None:
    a100.state.set("gpus/0/clocks_event_reasons", 0x40)
    names = "clocks_throttle_reasons.active,clocks_throttle_reasons.hw_thermal_slowdown,gpu_uuid"
    _status, output = smi(a100, f"--query-gpu={names}", "--format=csv,noheader", "-i", "0")
    assert output == f"0x0000000000000040, Active, {a100.state.text('gpus/0/uuid')}\n"


def test_unknown_fields_options_and_cards_are_told(a100: Machine, smi: Smi) -> None:
    assert smi(a100, "--query-gpu=health", "--format=csv") == (2, 'Field "health" is not a valid field to query.\n\n')
    assert smi(a100, "--query-gpu=index")[0] == 2
    assert smi(a100, "--no-such-option")[0] == 2
    assert smi(a100, "-L", "-i", "7")[0] == 6
    a100.state.set("driver/loaded", 0)
    assert smi(a100, "-L")[0] == 9


@pytest.mark.parametrize("wanted", ["1", "00000000:04:00.0", "0000:04:00.0", "04:00.0", "uuid"])
def test_cards_are_chosen_by_every_name(wanted: str, a100: Machine, smi: Smi) -> None:
    name = a100.state.text("gpus/1/uuid") if wanted == "uuid" else wanted
    status, output = smi(a100, "--query-gpu=index", "--format=csv,noheader", "-i", name)
    assert (status, output) == (0, "1\n")


def test_report_is_xml_with_the_names_of_a_real_one(a100: Machine, smi: Smi) -> None:
    a100.state.set("gpus/0/recovery_action", 4)
    a100.state.update(f"gpus/0/processes/{os.getpid()}", {"kind": "compute", "memory_mib": 512})
    status, output = smi(a100, "-q", "-x")
    assert status == 0
    document = ElementTree.fromstring(output)
    assert document.tag == "nvidia_smi_log"
    assert document.findtext("attached_gpus") == "4"
    gpu = document.find("gpu")
    assert gpu is not None
    assert gpu.get("id") == "00000000:03:00.0"
    for path, expected in {
        "gpu_recovery_action": "Drain and Reset",
        "ecc_mode/current_ecc": "Enabled",
        "remapped_rows/remapped_row_pending": "No",
        "remapped_rows/row_remapper_histogram/row_remapper_histogram_max": "640 bank(s)",
        "pci/pci_gpu_link_info/link_widths/current_link_width": "16x",
        "pci/pci_device_id": "20B210DE",
        "processes/process_info/pid": str(os.getpid()),
        "processes/process_info/used_memory": "512 MiB",
        "fb_memory_usage/used": "512 MiB",
        "retired_pages/pending_retirement": "N/A",
    }.items():
        assert gpu.findtext(path) == expected, path


def test_row_remapper_as_text(a100: Machine, tmp_path: Path, smi: Smi) -> None:
    a100.state.update("gpus/0", {"remapped_rows_uncorrectable": 1, "remapped_rows_pending": 1})
    _status, output = smi(a100, "-q", "-d", "ROW_REMAPPER", "-i", "0")
    assert re.search(r"^        Pending +: Yes$", output, re.MULTILINE)
    assert re.search(r"^            Max +: 640 bank\(s\)$", output, re.MULTILINE)
    _status, output = smi(build("t4x2", tmp_path), "-q", "-d", "ROW_REMAPPER", "-i", "0")
    assert re.search(r"^    Remapped Rows +: N/A$", output, re.MULTILINE)


def test_nvlink_status_and_errors(a100: Machine, l40s: Machine, smi: Smi) -> None:
    a100.state.update("gpus/1/nvlinks/2", {"state": 0})
    a100.state.set("gpus/1/nvlinks/3/crc_flit_errors", 7)
    _status, output = smi(a100, "nvlink", "-s", "-i", "1")
    lines = output.splitlines()
    assert lines[0] == f"GPU 1: NVIDIA A100-SXM4-80GB (UUID: {a100.state.text('gpus/1/uuid')})"
    assert lines[1:5] == ["\t Link 0: 25 GB/s", "\t Link 1: 25 GB/s", "\t Link 2: <inactive>", "\t Link 3: 25 GB/s"]
    assert "\t Link 3: CRC Errors: 7\n" in smi(a100, "nvlink", "-e", "-i", "1")[1]
    assert smi(l40s, "nvlink", "-s") == (0, "")
    assert smi(a100, "nvlink")[0] == 2


def test_lost_card(a100: Machine, smi: Smi) -> None:
    a100.state.set("gpus/1/lost", 1)
    status, output = smi(a100, "--query-gpu=index,name", "--format=csv,noheader")
    assert status == 15
    assert output.splitlines()[1] == "[GPU is lost], [GPU is lost]"
    for arguments in (("-L",), ("-q", "-x"), ("nvlink", "-s"), ("-pm", "1")):
        status, output = smi(a100, *arguments)
        assert status == 15
        assert output.startswith("Unable to determine the device handle for GPU1: 0000:04:00.0: GPU is lost.")
    ready(a100)
    status, output = smi(a100, "-r")
    assert status == 15
    assert "  GPU 00000000:04:00.0: GPU is lost" in output


def test_modes_are_set_by_root_only(a100: Machine, smi: Smi, monkeypatch: pytest.MonkeyPatch) -> None:
    status, output = smi(a100, "-e", "0", "-i", "0")
    assert (status, output.splitlines()[-1]) == (0, "Reboot required.")
    assert (a100.state.integer("gpus/0/ecc_current"), a100.state.integer("gpus/0/ecc_pending")) == (1, 0)
    assert smi(a100, "-pm", "0", "-i", "1")[1].startswith("Disabled persistence mode for GPU 00000000:04:00.0.\n")
    assert smi(a100, "-pl", "300", "-i", "1")[0] == 0
    assert a100.state.integer("gpus/1/power_limit_milliwatts") == 300_000
    assert smi(a100, "-pl", "500")[0] == 2
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    assert smi(a100, "-pm", "1")[0] == 4
    assert smi(a100, "-r")[0] == 4
    assert a100.state.integer("gpus/1/persistence") == 0


def test_reset_makes_pending_current_and_clears_what_is_volatile(a100: Machine, smi: Smi) -> None:
    ready(a100)
    a100.state.update(
        "gpus/1",
        {"ecc_pending": 0, "remapped_rows_pending": 1, "ecc/volatile/corrected/dram": 4, "recovery_action": 1},
    )
    a100.state.set("gpus/1/nvlinks/0/replay_errors", 9)
    status, output = smi(a100, "-r")
    assert status == 0
    assert output.splitlines()[1] == "GPU 00000000:04:00.0 was successfully reset."
    assert output.splitlines()[-1] == "All done."
    values = ("ecc_current", "remapped_rows_pending", "recovery_action", "nvlinks/0/replay_errors")
    assert [a100.state.integer(f"gpus/1/{name}") for name in values] == [0, 0, 0, 0]
    assert not a100.state.has("gpus/1/ecc/volatile")


def test_reset_is_refused_while_persistence_or_a_process_holds_a_card(
    a100: Machine, smi: Smi, holder: subprocess.Popen[bytes]
) -> None:
    status, output = smi(a100, "-r")
    assert status == 255
    assert output.count("In use by another client") == 4
    ready(a100)
    status, output = smi(a100, "-r")
    assert status == 255
    assert "  GPU 00000000:03:00.0: In use by another client\n\n1 device is currently being used" in output
    holder.kill()
    holder.wait()
    assert smi(a100, "-r")[0] == 0


def test_reset_of_one_linked_card_needs_its_peers_or_fabric_manager(a100: Machine, smi: Smi) -> None:
    ready(a100)
    status, output = smi(a100, "-r", "-i", "0,2")
    assert status == 255
    assert re.findall(r"^  GPU (\S+)$", output, re.MULTILINE) == ["00000000:04:00.0", "00000000:84:00.0"]
    assert smi(a100, "-r", "-i", "0,1,2,3")[0] == 0
    a100.state.set("host/fabric_manager", "running")
    assert smi(a100, "-r", "-i", "0")[0] == 0


def test_reset_on_switches_needs_fabric_manager(tmp_path: Path, smi: Smi) -> None:
    machine = build("a100-sxm4x8", tmp_path)
    ready(machine)
    machine.state.set("host/fabric_manager", "stopped")
    status, output = smi(machine, "-r", "-i", "5")
    assert status == 255
    assert len(re.findall(r"^  GPU \S+$", output, re.MULTILINE)) == 7
    machine.state.set("host/fabric_manager", "running")
    assert smi(machine, "-r", "-i", "5")[0] == 0


def test_card_without_nvlink_is_reset_alone(l40s: Machine, smi: Smi) -> None:
    ready(l40s)
    assert smi(l40s, "-r", "-i", "2") == (0, "GPU 00000000:81:00.0 was successfully reset.\nAll done.\n")


def test_reset_that_fails_comes_back_otherwise_or_not_at_all(l40s: Machine, smi: Smi) -> None:
    ready(l40s)
    l40s.state.set("gpus/0/reset_failures", 1)
    assert smi(l40s, "-r", "-i", "0")[0] == 255
    l40s.state.set("gpus/0/uuid_after_reset", "GPU-another")
    assert smi(l40s, "-r", "-i", "0")[0] == 0
    assert l40s.state.text("gpus/0/uuid") == "GPU-another"
    l40s.state.set("gpus/3/present_after_reset", 0)
    assert smi(l40s, "-r", "-i", "3")[0] == 0
    assert len(smi(l40s, "-L")[1].splitlines()) == 3


def test_processes_of_a_card(a100: Machine, smi: Smi) -> None:
    a100.state.update(f"gpus/2/processes/{os.getpid()}", {"kind": "compute", "memory_mib": 77})
    fields = "--query-compute-apps=pid,gpu_uuid,used_gpu_memory"
    _status, output = smi(a100, fields, "--format=csv,noheader,nounits")
    assert output == f"{os.getpid()}, {a100.state.text('gpus/2/uuid')}, 77\n"
    assert smi(a100, "--query-compute-apps=pid", "--format=csv,noheader", "-i", "0") == (0, "")
