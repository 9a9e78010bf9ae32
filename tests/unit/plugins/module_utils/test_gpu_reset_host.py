# SPDX-License-Identifier: GPL-3.0-or-later
"""What a real host tells a reset: NVML's cards and links, systemd's units, nvidia-smi, the kernel log."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ansible_collections.ringmaster.inference.plugins.module_utils.commands import Answer, CommandRunner
from ansible_collections.ringmaster.inference.plugins.module_utils.file_tree import FileTree
from ansible_collections.ringmaster.inference.plugins.module_utils.gpu_reset import HOLDERS, Request, reset_together
from ansible_collections.ringmaster.inference.plugins.module_utils.gpu_reset_host import SystemHost, seconds_of
from ansible_collections.ringmaster.inference.plugins.module_utils.gpu_reset_ledger import Ledger
from ansible_collections.ringmaster.inference.plugins.module_utils.gpu_reset_sequence import HostError
from tests.support.nvml import Code, Library, a100, driver_files, l40s

UNIT = """Id=engine@main.service
LoadState=loaded
ActiveState=active
TimeoutStopUSec=1min 30s
SendSIGKILL=yes
RequiredBy=monitor.service
RequisiteOf=
BoundBy=
ConsistsOf=engine-a.service engine-b.service
PropagatesStopTo=
"""


class Commands(CommandRunner):
    """Recorded answers by the first words of a command, and what was asked."""

    def __init__(self, answers: dict[str, Answer | Callable[[Sequence[str]], Answer]] | None = None) -> None:
        self.answers = answers or {}
        self.asked: list[str] = []

    def locate(self, name: str) -> str | None:
        return None

    def run(self, command: Sequence[str], timeout: float = 20.0) -> Answer:
        text = " ".join(command)
        self.asked.append(text)
        for start, answer in self.answers.items():
            if text.startswith(start):
                return answer if isinstance(answer, Answer) else answer(command)
        return Answer(None, complaint=f"not found: {command[0]}")


class LibraryByUuid(Library):
    """Finds cards by uuid as well, and keeps in a file what is set: cards are set in a process of its own."""

    def __init__(self, folder: Path, *cards: dict[str, Any]) -> None:
        super().__init__(*cards)
        self.folder = folder

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> int:  # noqa: N802
        for index, card in enumerate(self.cards):
            if card["UUID"] == uuid:
                return index
        raise self.NVMLError(6)

    def nvmlDeviceSetPersistenceMode(self, handle: int, mode: int) -> None:  # noqa: N802
        (self.folder / f"persistence-{handle}").write_text(str(mode))


def host_of(root: Path, library: Any, answers: dict[str, Any] | None = None) -> SystemHost:
    return SystemHost(FileTree(str(root)), Commands(answers), Ledger(str(root / "ledger")), lambda: library)


def journal(*events: tuple[float, str]) -> Answer:
    lines = [
        {
            "MESSAGE": message,
            "__CURSOR": f"s={number}",
            "_BOOT_ID": "b" * 32,
            "__MONOTONIC_TIMESTAMP": str(int(at * 1e6)),
        }
        for number, (at, message) in enumerate(events)
    ]
    return Answer(0, "".join(json.dumps(line) + "\n" for line in lines))


# Cards


def test_cards_of_an_l40s_host(tmp_path: Path) -> None:
    driver_files(tmp_path, "0000:07:00.0", "0000:0f:00.0")
    for address, minor in (("0000:07:00.0", "3"), ("0000:0f:00.0", "x")):
        information = tmp_path / "proc/driver/nvidia/gpus" / address / "information"
        information.write_text(information.read_text() + f"Device Minor: \t {minor}\n")
    one, two = host_of(tmp_path, Library(l40s(0, Architecture=8), l40s(1, Architecture=Code(3)))).cards()
    assert (one.uuid, one.pci_address) == ("GPU-00000000-0a52-4d5e-9a63-2f0e8d9c7b11", "0000:07:00.0")
    assert (one.architecture, one.minor, one.links, one.links_expected) == (8, 3, (), 0)
    assert (two.architecture, two.minor) == (None, None)
    assert (one.recovery_action, one.persistence, one.ecc_current, one.rows_pending) == ("none", True, True, False)
    assert one.pages_pending is None


def test_links_of_an_a100_on_nvswitches(tmp_path: Path) -> None:
    driver_files(tmp_path, "0000:07:00.0", "0000:0f:00.0")
    cards = host_of(tmp_path, Library(a100(0, Architecture=7), a100(1, Architecture=7))).cards()
    assert cards[0].links_up == tuple(range(12))
    assert {link.remote for link in cards[0].links} == {"switch"}
    assert cards[0].links_expected == 12
    assert len(reset_together(cards[0], cards, False)) == 2


def test_links_that_nvml_does_not_tell_are_those_of_the_model(tmp_path: Path) -> None:
    driver_files(tmp_path, "0000:07:00.0")
    (card,) = host_of(tmp_path, Library(a100(0, Architecture=7, NvLinkState=Code(999)))).cards()
    assert [link.up for link in card.links] == [None] * 12


def test_host_without_nvml(tmp_path: Path) -> None:
    with pytest.raises(HostError, match="nvidia"):
        host_of(tmp_path, Library(init=Code(9))).cards()


def test_lost_card_is_still_known_by_the_drivers_files(tmp_path: Path) -> None:
    driver_files(tmp_path, "0000:07:00.0", "0000:0f:00.0")
    lost, _well = host_of(tmp_path, Library(l40s(0, handle=Code(15)), l40s(1))).cards()
    assert (lost.state, lost.uuid, lost.recovery_action) == ("lost", "GPU-from-the-file-of-07", None)


def test_persistence_mode(tmp_path: Path) -> None:
    library = LibraryByUuid(tmp_path, l40s(0), l40s(1))
    host = host_of(tmp_path, library)
    assert host.set_persistence("GPU-00000001-0a52-4d5e-9a63-2f0e8d9c7b11", True) == ""
    assert (tmp_path / "persistence-1").read_text() == "1"
    assert "found none" in host.set_persistence("GPU-99999999-0a52-4d5e-9a63-2f0e8d9c7b11", True)
    assert "kernel module" in host_of(tmp_path, Library(init=Code(9))).set_persistence("GPU-x", False)


class Smi(Commands):
    """Knows one command, a script."""

    def __init__(self, folder: Path, script: str) -> None:
        super().__init__()
        self.program = folder / "nvidia-smi"
        self.program.write_text(f"#!/bin/sh\n{script}\n")
        self.program.chmod(0o755)

    def locate(self, name: str) -> str | None:
        return str(self.program) if name == "nvidia-smi" else None


def reset(folder: Path, script: str, seconds: float = 30) -> Answer:
    ledger = Ledger(str(folder / "ledger"))
    with ledger.locked():
        pass
    host = SystemHost(FileTree(str(folder)), Smi(folder, script), ledger, Library)
    return host.reset(["GPU-a", "GPU-b"], seconds)


def test_reset_names_every_card_in_one_command(tmp_path: Path) -> None:
    assert reset(tmp_path, 'echo "$@"') == Answer(0, "-r -i GPU-a,GPU-b\n")
    assert (tmp_path / "ledger/nvidia-smi.log").read_text() == "-r -i GPU-a,GPU-b\n"


def test_reset_that_is_refused_says_why(tmp_path: Path) -> None:
    answer = reset(tmp_path, "echo In use by another client; echo really >&2; exit 255")
    assert (answer.status, answer.output) == (255, "In use by another client\nreally\n")


def test_reset_that_does_not_end_is_not_killed(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "go")
    answer = reset(tmp_path, f"read line <{tmp_path}/go; echo $line >{tmp_path}/end", seconds=0.05)
    assert answer.status is None
    assert "is left running" in answer.complaint
    (tmp_path / "go").write_text("done\n")  # waits until somebody reads it: so it still runs
    deadline = time.monotonic() + 60
    while not (tmp_path / "end").exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_reset_without_nvidia_smi_or_folder(tmp_path: Path) -> None:
    assert host_of(tmp_path, Library()).reset(["GPU-a"], 1).missing
    host = SystemHost(FileTree(str(tmp_path)), Smi(tmp_path, "true"), Ledger(str(tmp_path / "none")), Library)
    assert "can't be run" in host.reset(["GPU-a"], 1).complaint


def test_facts_of_a_host(tmp_path: Path) -> None:
    driver_files(tmp_path, "0000:07:00.0")
    (tmp_path / "proc/sys/kernel/random").mkdir(parents=True)
    (tmp_path / "proc/sys/kernel/random/boot_id").write_text("bbbb\n")
    unit = Answer(0, "LoadState=loaded\nActiveState=active\n")
    host = host_of(tmp_path, Library(l40s(0)), {"systemctl show": unit, "journalctl": journal((5, "kernel"))})
    found = host.facts(Request("GPU-x", services=("engine@main.service",)))
    assert found.boot_id == "bbbb"
    assert set(found.units) == {"engine@main.service", *HOLDERS}
    assert found.fabric_manager
    assert (found.blind, found.holders, found.fallen, found.runs) == ("", (), frozenset(), ())


# Units


def test_unit(tmp_path: Path) -> None:
    unit = host_of(tmp_path, Library(), {"systemctl show": Answer(0, UNIT)}).unit("engine@main.service")
    assert unit.runs
    assert unit.dependents == ("engine-a.service", "engine-b.service", "monitor.service")
    assert unit.kill_after_seconds == 90.0


def test_unit_that_systemd_never_kills(tmp_path: Path) -> None:
    text = UNIT.replace("SendSIGKILL=yes", "SendSIGKILL=no")
    assert host_of(tmp_path, Library(), {"systemctl show": Answer(0, text)}).unit("a").kill_after_seconds is None
    text = UNIT.replace("1min 30s", "infinity")
    assert host_of(tmp_path, Library(), {"systemctl show": Answer(0, text)}).unit("a").kill_after_seconds is None


@pytest.mark.parametrize("answer", [Answer(None, complaint="not found: systemctl"), Answer(1), Answer(0, "\0junk")])
def test_unit_that_systemd_does_not_tell_of(tmp_path: Path, answer: Answer) -> None:
    unit = host_of(tmp_path, Library(), {"systemctl show": answer}).unit("a.service")
    assert (unit.loaded, unit.runs) == ("unknown", False)


def test_units_are_followed_to_what_stops_with_them(tmp_path: Path) -> None:
    known = {"a.service": "b.service", "b.service": "a.service c.service"}

    def show(command: Sequence[str]) -> Answer:
        return Answer(0, f"LoadState=loaded\nActiveState=active\nBoundBy={known.get(command[-1], '')}\n")

    units = host_of(tmp_path, Library(), {"systemctl show": show}).units(["a.service"])
    assert set(units) == {"a.service", "b.service", "c.service", *HOLDERS}


def test_stop_and_start_believe_the_unit_and_not_the_command(tmp_path: Path) -> None:
    state = {"now": "active"}

    def show(_command: Sequence[str]) -> Answer:
        return Answer(0, f"LoadState=loaded\nActiveState={state['now']}\n")

    answers: dict[str, Any] = {"systemctl show": show, "systemctl stop": Answer(None, complaint="no answer within 5 s")}
    host = host_of(tmp_path, Library(), answers)
    assert host.stop("a.service", 5) == "it in state active (no answer within 5 s)"
    state["now"] = "failed"
    assert host.stop("a.service", 5) == "", "it was stopped, only not well"
    answers["systemctl start"] = Answer(0)
    assert "it in state failed" in host.start("a.service", 5)
    assert "systemctl reset-failed -- a.service" in host.commands.asked  # type: ignore[attr-defined]
    state["now"] = "active"
    assert host.start("a.service", 5) == ""
    answers["systemctl start"] = Answer(1, complaint="Job for a.service failed")
    assert "Job for a.service failed" in host.start("a.service", 5)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("1min 30s", 90.0),
        ("90s", 90.0),
        ("500ms", 0.5),
        ("1h 2min 3.500s", 3723.5),
        ("5min", 300.0),
        ("infinity", None),
        ("", None),
        ("s", None),
        ("..s", None),
        ("5 parsecs", None),
        ("1month 1y", 34187400.0),
    ],
)
def test_time_spans(text: str, seconds: float | None) -> None:
    assert seconds_of(text) == seconds


@given(st.text(alphabet="0123456789.smhinu d", max_size=20) | st.text(max_size=20))
def test_no_text_breaks_the_time_spans(text: str) -> None:
    found = seconds_of(text)
    assert found is None or found >= 0


@given(st.text(max_size=200))
def test_no_answer_of_systemd_breaks_the_reader(tmp_path_factory: pytest.TempPathFactory, text: str) -> None:
    host_of(tmp_path_factory.mktemp("unit"), Library(), {"systemctl show": Answer(0, text)}).unit("a")


# Kernel log

LINE = "NVRM: Xid (PCI:0000:0{bus}:00): {code}, pid='<unknown>', name=<unknown>, text"


def test_xids_since_a_position_and_of_the_cards_asked_for(tmp_path: Path) -> None:
    log = journal(
        (10, LINE.format(bus=7, code=79)),
        (20.5, LINE.format(bus=7, code=119)),
        (21, LINE.format(bus=8, code=74)),
        (22, "something else"),
    )
    host = host_of(tmp_path, Library(), {"journalctl": log})
    assert host.fallen() == {"0000:07:00.0"}
    assert host.xids("20.0", ["0000:07:00.0"]) == [119]
    assert host.xids("", ["0000:07:00.0", "0000:08:00.0"]) == [79, 119, 74]
    assert float(host.log_position()) > 0


def test_kernel_log_that_cannot_be_read(tmp_path: Path) -> None:
    host = host_of(tmp_path, Library())
    assert host.fallen() is None
    assert host.xids("1.0", ["0000:07:00.0"]) is None


def test_uptime(tmp_path: Path) -> None:
    assert host_of(tmp_path, Library()).uptime() == 0.0
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/uptime").write_text("123.45 400.00\n")
    assert host_of(tmp_path, Library()).uptime() == 123.45
