# Copyright (c) 2026, the Ringmaster authors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Processes by what ``/proc`` tells: who has a card open or mapped, who is still the one that it was.

Nothing here imports Ansible. A process may end, or begin another program, while it is looked at.
"""

from __future__ import annotations

import os
import pwd
import re
from collections.abc import Iterable, Sequence

from ansible_collections.ringmaster.inference.plugins.module_utils.file_tree import FileTree, parse_integer
from ansible_collections.ringmaster.inference.plugins.module_utils.gpu_reset import Card, Holder
from ansible_collections.ringmaster.inference.plugins.module_utils.gpu_reset_ledger import Process

# Major numbers of NVIDIA's devices and of the display system's, fixed in the kernel's list
# (Documentation/admin-guide/devices.txt).
MAJORS = (195, 226)
LONGEST_COMMAND = 160
_SECRET_OPTION = re.compile(r"(?:key|token|password|passwd|secret|credential)", re.IGNORECASE)


class Processes:
    """The processes of the host whose ``/proc`` and ``/dev`` lie in `files`."""

    def __init__(self, files: FileTree) -> None:
        self.files = files

    def identity(self, pid: int) -> Process | None:
        """What names process `pid` beyond doubt; None if there is none such."""
        started = self._started(pid)
        boot_id = self.files.boot_id()
        namespace = self._link("/proc/self/ns/pid")
        if started is None or not boot_id or not namespace:
            return None
        return Process(boot_id, namespace, pid, started)

    def runs(self, process: Process) -> bool | None:
        """Whether that very process still runs; None if it is one of another machine or container."""
        here = self.identity(os.getpid())
        if here is None or (here.boot_id, here.namespace) != (process.boot_id, process.namespace):
            return None
        return self._started(process.pid) == process.started

    def running_reset(self) -> str:
        """A ``nvidia-smi`` that resets cards now, for people; empty if there is none."""
        for pid in self._pids():
            words = self._words(pid)
            if words and os.path.basename(words[0]) == "nvidia-smi" and {"-r", "--gpu-reset"} & set(words[1:]):
                return f"process {pid} ({' '.join(words)[:LONGEST_COMMAND]})"
        return ""

    def holders(self, cards: Sequence[Card]) -> tuple[tuple[Holder, ...], str]:
        """Who has one of `cards` open or mapped, and what kept this from looking everywhere (empty: nothing).

        A card's devices are ``/dev/nvidiaN`` and its nodes of the kernel's display system; ``/dev/nvidiactl`` and
        ``/dev/nvidia-uvm`` serve all cards and say nothing of one. Where a card's number is not known, every
        ``/dev/nvidiaN`` counts.
        """
        devices = self._devices(cards)
        compute = {pid for card in cards for pid in card.processes or ()}
        holders = []
        blind = ""
        for pid in self._pids():
            try:
                found = self._held(pid, devices)
            except PermissionError as error:
                blind = blind or f"that process {pid} can't be looked into ({error.strerror})"
                continue
            if found is None and pid in compute:
                found = "a card", "in use (NVML)"
            if found is not None:
                holders.append(Holder(pid, self.command(pid), self._user(pid), self._unit(pid), *found))
        return tuple(holders), blind

    def command(self, pid: int) -> str:
        """The command line for people, cut, and without what may be a secret; the program's name if there is none."""
        words = self._words(pid)
        shown: list[str] = []
        hide = False
        for word in words:
            shown.append("…" if hide else re.sub(r"(?i)((?:key|token|password|passwd|secret)[\w-]*=).*", r"\1…", word))
            hide = word.startswith("-") and "=" not in word and bool(_SECRET_OPTION.search(word))
        text = " ".join(shown) or self.files.text(f"/proc/{pid}/comm") or "ended"
        printable = "".join(character if character.isprintable() else "\N{REPLACEMENT CHARACTER}" for character in text)
        return printable if len(printable) <= LONGEST_COMMAND else f"{printable[: LONGEST_COMMAND - 1]}…"

    def _pids(self) -> Iterable[int]:
        return (int(name) for name in self.files.names("/proc") if name.isascii() and name.isdigit())

    def _words(self, pid: int) -> list[str]:
        data = self.files.data(f"/proc/{pid}/cmdline") or b""
        return [word.decode("utf-8", "replace") for word in data.split(b"\0") if word]

    def _started(self, pid: int) -> int | None:
        # The name in brackets may hold anything, brackets and spaces too; what follows the last one is numbers.
        fields = (self.files.text(f"/proc/{pid}/stat") or "").rpartition(")")[2].split()
        return parse_integer(fields[19]) if len(fields) > 19 and fields[0] not in ("Z", "X") else None

    def _devices(self, cards: Sequence[Card]) -> dict[str, tuple[int, int, int] | None]:
        """Path of each device of the cards → what stat says of it: file system, inode, device number."""
        names = set()
        for card in cards:
            if card.minor is None:
                names |= {name for name in self.files.names("/dev") if re.match(r"nvidia[0-9]+\Z", name)}
            else:
                names.add(f"nvidia{card.minor}")
            if card.pci_address:
                nodes = self.files.names(f"/sys/bus/pci/devices/{card.pci_address}/drm")
                names |= {f"dri/{name}" for name in nodes if name.startswith(("card", "renderD"))}
        return {f"/dev/{name}": self._status(f"/dev/{name}") for name in sorted(names)}

    def _held(self, pid: int, devices: dict[str, tuple[int, int, int] | None]) -> tuple[str, str] | None:
        """Device and how process `pid` has it. Raises PermissionError."""
        folder = self._real(f"/proc/{pid}/fd")
        try:
            descriptors = os.listdir(folder)
        except PermissionError:
            raise
        except OSError:
            return None  # it has ended
        for name in descriptors:
            device = self._device(f"/proc/{pid}/fd/{name}", devices)
            if device:
                return device, "open"
        return self._mapped(pid, devices)

    def _device(self, link: str, devices: dict[str, tuple[int, int, int] | None]) -> str | None:
        target = self._link(link)
        if not target.startswith("/"):
            return None  # a socket or a pipe, or it was closed meanwhile
        if target.removesuffix(" (deleted)") in devices:
            return target
        # Another mount namespace (a container) may name the device in another way.
        status = self._status(link)
        for path, known in devices.items():
            if status and known and (status[:2] == known[:2] or (status[2] and status[2] == known[2])):
                return path
        return None

    def _mapped(self, pid: int, devices: dict[str, tuple[int, int, int] | None]) -> tuple[str, str] | None:
        try:
            with open(self._real(f"/proc/{pid}/maps"), "rb") as maps:
                for line in maps:
                    # address permissions offset device inode path
                    fields = line.decode("utf-8", "replace").split(None, 5)
                    if len(fields) == 6 and fields[5].rstrip("\n").removesuffix(" (deleted)") in devices:
                        return fields[5].strip(), "mapped"
        except PermissionError:
            raise
        except OSError:
            return None  # it has ended
        return None

    def _status(self, path: str) -> tuple[int, int, int] | None:
        try:
            status = os.stat(self._real(path))
        except OSError:
            return None
        number = status.st_rdev if os.major(status.st_rdev) in MAJORS else 0
        return status.st_dev, status.st_ino, number

    def _user(self, pid: int) -> str:
        try:
            number = os.stat(self._real(f"/proc/{pid}")).st_uid
        except OSError:
            return "unknown"
        try:
            return pwd.getpwuid(number).pw_name
        except KeyError:
            return str(number)

    def _unit(self, pid: int) -> str:
        """The unit of systemd that the process belongs to, by its control group; empty if it belongs to none."""
        for line in (self.files.text(f"/proc/{pid}/cgroup") or "").splitlines():
            hierarchy, _colon, rest = line.partition(":")
            controllers, _colon, path = rest.partition(":")
            if hierarchy != "0" and controllers != "name=systemd":
                continue
            # The first one: what lies below a service or scope is its own affair (containers, a user's manager).
            for part in path.split("/"):
                if part.endswith((".service", ".scope")):
                    # systemd puts an underscore before a name that the kernel could take for a file of its own.
                    return part.removeprefix("_")
        return ""

    def _link(self, path: str) -> str:
        try:
            return os.readlink(self._real(path))
        except OSError:
            return ""

    def _real(self, path: str) -> str:
        # Not FileTree.locate: it would follow /proc's links by their text, and those lead to what only the kernel
        # knows.
        return os.path.join(self.files.root, path.lstrip("/"))
