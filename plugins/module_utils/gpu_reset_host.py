# Copyright (c) 2026, the Ringmaster authors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What a card's reset needs of a real host: systemd, NVML, nvidia-smi, the kernel log. Nothing here imports Ansible."""

from __future__ import annotations

import os
import re
import subprocess
import time
from collections.abc import Callable, Sequence
from typing import Any

from ansible_collections.ringmaster.inference.plugins.module_utils.cards import card_model
from ansible_collections.ringmaster.inference.plugins.module_utils.commands import Answer, CommandRunner
from ansible_collections.ringmaster.inference.plugins.module_utils.file_tree import FileTree, parse_integer
from ansible_collections.ringmaster.inference.plugins.module_utils.gpu import survey
from ansible_collections.ringmaster.inference.plugins.module_utils.gpu_reset import (
    FABRIC_MANAGER,
    HOLDERS,
    Card,
    Facts,
    Link,
    Request,
    Unit,
)
from ansible_collections.ringmaster.inference.plugins.module_utils.gpu_reset_ledger import Ledger
from ansible_collections.ringmaster.inference.plugins.module_utils.gpu_reset_processes import Processes
from ansible_collections.ringmaster.inference.plugins.module_utils.gpu_reset_sequence import RUNNING, HostError
from ansible_collections.ringmaster.inference.plugins.module_utils.nvlink import NvlinkReader, survey_links
from ansible_collections.ringmaster.inference.plugins.module_utils.nvml import (
    GpuError,
    NoAnswerError,
    Nvml,
    ReaderProcess,
    as_integer,
    find_library,
)
from ansible_collections.ringmaster.inference.plugins.module_utils.xid import FALLEN_OFF_THE_BUS, XidReader

LONGEST_OUTPUT = 1 << 16  # bytes
# Python warns of a child that nobody refers to any more.
_LEFT_RUNNING: list[subprocess.Popen[bytes]] = []
# What stops with a unit, by systemd's names for the inverse of Requires=, Requisite=, BindsTo=, PartOf=, and for
# PropagatesStopTo=.
STOPPED_WITH = ("RequiredBy", "RequisiteOf", "BoundBy", "ConsistsOf", "PropagatesStopTo")
_TIME_SPAN = re.compile(r"([0-9.]+)(us|ms|s|min|h|d|w|month|y)\b")
_SECONDS = {
    "us": 1e-6,
    "ms": 1e-3,
    "s": 1.0,
    "min": 60.0,
    "h": 3600.0,
    "d": 86400.0,
    "w": 604800.0,
    "month": 2629800.0,
    "y": 31557600.0,
}


class ResetReader(NvlinkReader):
    """Reads of a card what a reset needs beyond its readings and links, and sets its persistence mode."""

    def architecture(self, index: int) -> int | None:
        """NVML's number of the card's architecture (nvmlDeviceArchitecture_t); None if NVML does not tell."""
        self.nvml.open()
        handle = self.nvml.call("nvmlDeviceGetHandleByIndex", index)
        if handle.reason:
            return None
        # NVML_DEVICE_ARCH_UNKNOWN has all bits set, which a reading takes for no value.
        number = as_integer(self.nvml.call("nvmlDeviceGetArchitecture", handle.value), most=1000)
        return None if number.reason else int(number.value)

    def persist(self, uuid: str, on: bool) -> str:
        """Set persistence mode; gives a complaint or an empty text."""
        self.nvml.open()
        handle = self.nvml.call("nvmlDeviceGetHandleByUUID", uuid)
        answer = handle if handle.reason else self.nvml.call("nvmlDeviceSetPersistenceMode", handle.value, int(on))
        return answer.reason


class SystemHost:
    """A :class:`~.gpu_reset_sequence.Host` that is a real one.

    NVML is read in a process of its own each time: it keeps every card open until it ends, and would hold up the reset.
    """

    def __init__(
        self,
        files: FileTree,
        commands: CommandRunner,
        ledger: Ledger,
        library: Callable[[], Any] = find_library,
    ) -> None:
        self.files, self.commands, self.ledger, self._library = files, commands, ledger, library
        self.processes = Processes(files)

    def boot_id(self) -> str:
        return self.files.boot_id() or ""

    def uptime(self) -> float:
        """Seconds since the boot, sleep included."""
        try:
            return float((self.files.text("/proc/uptime") or "").split()[0])
        except (IndexError, ValueError):
            return 0.0

    def facts(self, request: Request) -> Facts:
        # Cards first: the process that reads them must be gone before holders are looked for.
        cards = self.cards()
        holders, blind = self.processes.holders(cards)
        return Facts(
            now=time.time(),
            boot_id=self.boot_id(),
            root=os.geteuid() == 0,
            cards=cards,
            holders=holders,
            units=self.units(request.services),
            fabric_manager=self.unit(FABRIC_MANAGER).active == "active",
            running_reset=self.processes.running_reset(),
            fallen=self.fallen(),
            blind=blind,
            runs=tuple(self.ledger.runs()),
        )

    def cards(self) -> tuple[Card, ...]:
        try:
            with ReaderProcess(ResetReader(Nvml(self._library(), self.files), self.files)) as process:
                found = survey(process.call, self.files, self.commands)["gpus"]
                links = {card["pci_address"]: card["links"] for card in survey_links(process.call, self.files)}
                return tuple(
                    self._card(gpu, _architecture(process, gpu["index"]), links.get(gpu["pci_address"]))
                    for gpu in found
                )
        except (GpuError, NoAnswerError) as error:
            raise HostError(str(error)) from error

    def _card(self, gpu: dict[str, Any], architecture: int | None, links: list[dict[str, Any]] | None) -> Card:
        processes = gpu["processes"]
        joined = _links(gpu["model"], links)
        return Card(
            uuid=gpu["uuid"],
            pci_address=gpu["pci_address"],
            model=gpu["model"],
            state=gpu["state"],
            architecture=architecture,
            minor=self._minor(gpu["pci_address"]),
            recovery_action=gpu["recovery_action"],
            persistence=gpu["persistence_mode"],
            ecc_current=gpu["ecc_current"],
            ecc_pending=gpu["ecc_pending"],
            rows_pending=gpu["remapped_rows_pending"],
            rows_failed=gpu["remapped_rows_failed"],
            pages_pending=gpu["retired_pages_pending"],
            processes=None if processes is None else tuple(process["pid"] for process in processes),
            links=joined,
            links_expected=_links_expected(gpu["model"], joined),
        )

    def _minor(self, address: str | None) -> int | None:
        for line in (self.files.text(f"/proc/driver/nvidia/gpus/{address}/information") or "").splitlines():
            name, _colon, value = line.partition(":")
            if name.strip() == "Device Minor":
                return parse_integer(value)
        return None

    def set_persistence(self, uuid: str, on: bool) -> str:
        try:
            with ReaderProcess(ResetReader(Nvml(self._library(), self.files), self.files)) as process:
                return str(process.call("persist", uuid, on))
        except (GpuError, NoAnswerError) as error:
            return str(error)

    def reset(self, uuids: Sequence[str], seconds: float) -> Answer:
        program = self.commands.locate("nvidia-smi")
        if program is None:
            return Answer(None, complaint="not found: nvidia-smi")
        # Into a file: through a pipe it would die of what it says if this process were killed.
        output = os.path.join(self.ledger.directory, "nvidia-smi.log")
        return run_to_its_end([program, "-r", "-i", ",".join(uuids)], output, seconds)

    def running_reset(self) -> str:
        return self.processes.running_reset()

    def fallen(self) -> frozenset[str] | None:
        """PCI addresses of the cards that fell off the bus since the boot (Xid 79); None if the log can't be read."""
        events = self._events()
        if events is None:
            return None
        return frozenset(f"{event['pci_slot']}.0" for event in events if event["xid"] == FALLEN_OFF_THE_BUS)

    def log_position(self) -> str:
        # The kernel's log and the journal both count from the boot, so this serves for either.
        return f"{self.monotonic():.6f}"

    def xids(self, position: str, addresses: Sequence[str]) -> list[int] | None:
        events = self._events()
        if events is None:
            return None
        since = float(position or 0)
        slots = {address.rpartition(".")[0] for address in addresses}
        return [
            event["xid"]
            for event in events
            if event["pci_slot"] in slots
            and (event["since_boot_seconds"] is None or event["since_boot_seconds"] > since)
        ]

    def _events(self) -> list[dict[str, Any]] | None:
        """Xids since the boot."""
        events = XidReader(self.files, self.commands).read()["events"]
        return None if events is None else [event for event in events if event["this_boot"] is not False]

    def units(self, names: Sequence[str]) -> dict[str, Unit]:
        """The units of those names, those that hold every card, and all that stops with one of them."""
        units: dict[str, Unit] = {}
        pending = [*names, *HOLDERS]
        while pending:
            name = pending.pop()
            if name not in units:
                units[name] = self.unit(name)
                pending += units[name].dependents
        return units

    def unit(self, name: str) -> Unit:
        properties = ("LoadState", "ActiveState", "TimeoutStopUSec", "SendSIGKILL", *STOPPED_WITH)
        answer = self.commands.run(["systemctl", "show", f"--property={','.join(properties)}", "--", name])
        values = dict(line.partition("=")[::2] for line in answer.output.splitlines())
        if not answer.ok or not values.get("LoadState"):
            return Unit(name, "unknown", "unknown")
        dependents = {unit for each in STOPPED_WITH for unit in values.get(each, "").split()}
        kills = values.get("SendSIGKILL") == "yes"
        return Unit(
            name,
            values["LoadState"],
            values.get("ActiveState", "unknown"),
            tuple(sorted(dependents - {name})),
            seconds_of(values.get("TimeoutStopUSec", "")) if kills else None,
        )

    def stop(self, unit: str, seconds: float) -> str:
        answer = self.commands.run(["systemctl", "stop", "--", unit], timeout=seconds)
        state = self.unit(unit).active
        if state in ("inactive", "failed"):
            return ""
        return f"it in state {state} ({answer.complaint or f'systemctl: status {answer.status}'})"

    def start(self, unit: str, seconds: float) -> str:
        if self.unit(unit).active == "failed":
            # One that was started too often meanwhile would be refused.
            self.commands.run(["systemctl", "reset-failed", "--", unit])
        answer = self.commands.run(["systemctl", "start", "--", unit], timeout=seconds)
        state = self.unit(unit).active
        if answer.ok and state in RUNNING:
            return ""
        return f"it in state {state} ({answer.complaint or f'systemctl: status {answer.status}'})"

    def monotonic(self) -> float:
        return time.monotonic()

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)


def run_to_its_end(command: Sequence[str], output: str, seconds: float) -> Answer:
    """Run a command that must not be killed, since that can freeze a card; what it says is kept in the file `output`.

    One that has not ended after `seconds` is left running.
    """
    try:
        with open(output, "w+b") as file:
            process = subprocess.Popen(
                list(command),
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                env={**os.environ, "LC_ALL": "C"},
                start_new_session=True,
            )
            try:
                status = process.wait(timeout=seconds)
            except subprocess.TimeoutExpired:
                _LEFT_RUNNING.append(process)
                return Answer(None, complaint=f"no end within {seconds:g} s; process {process.pid} is left running")
            file.seek(0)
            said = file.read(LONGEST_OUTPUT).decode("utf-8", "replace")
    except OSError as error:
        return Answer(None, complaint=f"can't be run: {error}")
    return Answer(status, said, f"killed by signal {-status}" if status < 0 and not said.strip() else "")


def _architecture(process: ReaderProcess, index: int | None) -> int | None:
    if index is None:
        return None
    try:
        number: int | None = process.call("architecture", index)
    except NoAnswerError:
        return None
    return number


def _links(model: str | None, links: list[dict[str, Any]] | None) -> tuple[Link, ...]:
    if links is None:
        # A card that does not tell of its links has those of its model, and where they lead to is not known.
        known = card_model(model)
        return tuple(Link(number, None) for number in range(known.nvlinks or 0 if known else 0))
    return tuple(
        Link(
            link["link"],
            None if link["state"] is None else link["state"] == "active",
            link["peer_kind"],
            link["peer_pci_address"],
        )
        for link in links
    )


def _links_expected(model: str | None, links: tuple[Link, ...]) -> int | None:
    """How many links must be up; None if that is not known. Of boards that a bridge may join: all or none."""
    known = card_model(model)
    if known is None:
        return None
    return 0 if known.bridge and not any(link.up for link in links) else known.nvlinks


def seconds_of(text: str) -> float | None:
    """Seconds of a time span as ``systemctl show`` prints it (``1min 30s``); None for ``infinity`` and what is none."""
    parts = _TIME_SPAN.findall(text)
    if not parts or _TIME_SPAN.sub("", text).strip():
        return None
    try:
        return sum(float(number) * _SECONDS[unit] for number, unit in parts)
    except ValueError:
        return None
