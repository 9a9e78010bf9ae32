# Copyright (c) 2026, the Ringmaster authors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The disks under a directory, and how they read: the block device's read-ahead and each disk's IO scheduler.

A directory lies on one block device, which may be a partition, or a volume of the device mapper or of md that in turn
lies on disks. Read-ahead counts at the device that the file system is on; schedulers count at the disks. A directory on
overlay, tmpfs, NFS, btrfs or ZFS names no block device, and a container's disks belong to its host: then nothing is
known here and nothing is changed. (Linux: ``Documentation/ABI/stable/sysfs-block``, ``Documentation/block/``.)

Nothing here imports Ansible.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from ansible_collections.ringmaster.inference.plugins.module_utils.file_tree import FileTree, parse_choice

NVME, SOLID_STATE, ROTATING, OTHER = "nvme", "solid_state", "rotating", "other"
# By preference. NVMe has queues of its own for each CPU, and a scheduler only costs time; a SATA or SAS disk has one
# queue, where deadlines keep reads from waiting behind writes; of a rotating disk the order of reads decides.
SCHEDULERS: Mapping[str, Sequence[str]] = {
    NVME: ("none",),
    SOLID_STATE: ("mq-deadline",),
    ROTATING: ("bfq", "mq-deadline"),
}
# Weights are read from beginning to end. The value is that of TuneD's profile throughput-performance.
READ_AHEAD_KB = 4096
# The kernel takes any number; a gigabyte of read-ahead for each open file would be a mistake.
MOST_READ_AHEAD_KB = 1 << 20

_BLOCK = "/sys/dev/block"
_CLASS = "/sys/class/block"
_SAFE_IN_RULE = re.compile(r"[A-Za-z0-9_.:/@+=, -]+\Z")  # neither quotes nor wildcards of udev
_DEEPEST = 8  # volumes on volumes


class StorageError(Exception):
    """A setting could not be written; the text says what was expected, what was found and what to do."""


@dataclass(frozen=True)
class Device:
    """A whole block device. ``read_ahead_kb`` in KiB and ``scheduler`` are None where the kernel tells none."""

    name: str
    kind: str
    read_ahead_kb: int | None
    scheduler: str | None
    schedulers: tuple[str, ...]
    match: str  # by which a udev rule knows it, at this and every later boot


@dataclass
class Storage:
    """What is under a directory. ``device`` is what the file system is on, ``disks`` what that lies on (itself, if it
    is a disk); None and empty where ``unknown`` says why."""

    path: str
    device: Device | None = None
    disks: list[Device] = field(default_factory=list)
    unknown: str = ""


@dataclass(frozen=True)
class Setting:
    """One value of one device: ``attribute`` is ``read_ahead_kb`` or ``scheduler``."""

    device: Device
    attribute: str
    before: str
    after: str


class StorageReader:
    """Reads block devices below ``/sys``. `inside_container` says why nothing may be told, or is empty."""

    def __init__(
        self,
        tree: FileTree,
        inside_container: str = "",
        device_number: Callable[[str], int] = lambda path: os.stat(path).st_dev,
    ) -> None:
        self._tree = tree
        self._inside_container = inside_container
        self._device_number = device_number

    def find(self, path: str) -> Storage:
        """The devices under the nearest directory at or above `path` that is there."""
        if self._inside_container:
            return Storage(path, unknown=f"a container ({self._inside_container}), whose disks are its host's")
        number = self._number(path)
        if os.major(number) == 0:
            return Storage(path, unknown="a file system without a block device (overlay, tmpfs, NFS, btrfs, ZFS)")
        link = f"{_BLOCK}/{os.major(number)}:{os.minor(number)}"
        found = self._tree.resolve(link)
        if found is None:
            return Storage(path, unknown=f"{link}: {self._tree.complaint(link) or 'nothing there'}")
        name = self._whole(found)
        disks = sorted(set(self._disks(name, 0)))
        return Storage(path, self._device(name), [self._device(disk) for disk in disks])

    def device(self, name: str) -> Device | None:
        """A device by its name, as ``nvme0n1``; None if there is none."""
        return self._device(name) if self._tree.exists(f"{_CLASS}/{name}/queue") else None

    def _number(self, path: str) -> int:
        while not os.path.exists(path):
            path = os.path.dirname(path)
        return self._device_number(path)

    def _whole(self, found: str) -> str:
        """Name of the device that a partition is of; a whole device's own."""
        if self._tree.exists(f"{found}/partition"):
            found = os.path.dirname(found)
        return os.path.basename(found)

    def _disks(self, name: str, depth: int) -> list[str]:
        slaves = self._tree.names(f"{_CLASS}/{name}/slaves")
        if not slaves or depth >= _DEEPEST:
            return [name]
        result: list[str] = []
        for slave in slaves:
            found = self._tree.resolve(f"{_CLASS}/{name}/slaves/{slave}")
            if found is not None:
                result += self._disks(self._whole(found), depth + 1)
        return result

    def _device(self, name: str) -> Device:
        queue = f"{_CLASS}/{name}/queue"
        chosen, choices = parse_choice(self._tree.text(f"{queue}/scheduler"))
        return Device(
            name,
            self._kind(name),
            self._tree.integer(f"{queue}/read_ahead_kb"),
            chosen,
            tuple(choices),
            self._match(name),
        )

    def _kind(self, name: str) -> str:
        # A virtual disk (vda, xvda) tells what its host likes to tell, and the host has a scheduler of its own.
        if re.match(r"nvme[0-9]", name):
            return NVME
        rotational = self._tree.text(f"{_CLASS}/{name}/queue/rotational")
        if re.match(r"sd[a-z]", name) and rotational in ("0", "1"):
            return ROTATING if rotational == "1" else SOLID_STATE
        return OTHER

    def _match(self, name: str) -> str:
        # A disk's name may be another one's after the next boot; its identity is not.
        for attribute, key in (
            ("dm/uuid", "ATTR{dm/uuid}"),
            ("md/uuid", "ATTR{md/uuid}"),
            ("wwid", "ATTR{wwid}"),
            ("device/wwid", "ATTRS{wwid}"),
        ):
            value = self._tree.text(f"{_CLASS}/{name}/{attribute}")
            if value and _SAFE_IN_RULE.match(value):
                return f'{key}=="{value}"'
        return f'KERNEL=="{name}"'


def wanted(
    storage: Storage, read_ahead_kb: int, schedulers: Mapping[str, Sequence[str]]
) -> tuple[list[Setting], dict[str, str]]:
    """All settings for what was found, also those that are right already, and by ``DEVICE.ATTRIBUTE`` why others can't
    be made.

    `read_ahead_kb` 0 leaves read-ahead alone; a kind without schedulers is left alone.
    """
    settings: list[Setting] = []
    unavailable: dict[str, str] = {}
    if storage.device is None:
        return settings, {storage.path: storage.unknown}
    top = storage.device
    if read_ahead_kb and top.read_ahead_kb is None:
        unavailable[f"{top.name}.read_ahead_kb"] = "the kernel tells none"
    elif read_ahead_kb:
        settings.append(Setting(top, "read_ahead_kb", str(top.read_ahead_kb), str(read_ahead_kb)))
    for disk in storage.disks:
        preferred = schedulers.get(disk.kind, ())
        choice = next((each for each in preferred if each in disk.schedulers), None)
        if choice is not None:
            settings.append(Setting(disk, "scheduler", disk.scheduler or "", choice))
        elif preferred:
            unavailable[f"{disk.name}.scheduler"] = (
                f"none of {', '.join(preferred)} among {', '.join(disk.schedulers) or 'none'}"
            )
    return settings, unavailable


def write(tree: FileTree, setting: Setting) -> None:
    """Set one value and read it back. Raises StorageError where the kernel does not take it."""
    path = f"{_CLASS}/{setting.device.name}/queue/{setting.attribute}"
    try:
        tree.write(path, setting.after)
        complaint = ""
    except OSError as error:
        complaint = error.strerror or str(error)
    text = tree.text(path)
    found = parse_choice(text)[0] if setting.attribute == "scheduler" else text
    if complaint or found != setting.after:
        raise StorageError(
            f"Expected {path} to take {setting.after}. Found {complaint or found}. "
            "To do: see whether the kernel has this scheduler and the disk is well, or leave the disk as it is."
        )


def rules(settings: Sequence[Setting]) -> str:
    """The udev rules that make the settings again whenever one of the devices appears; empty without settings."""
    lines: dict[str, list[str]] = {}
    for setting in settings:
        lines.setdefault(setting.device.match, []).append(f'ATTR{{queue/{setting.attribute}}}="{setting.after}"')
    return "".join(
        f'ACTION=="add|change", SUBSYSTEM=="block", ENV{{DEVTYPE}}=="disk", {match}, {", ".join(assignments)}\n'
        for match, assignments in sorted(lines.items())
    )
