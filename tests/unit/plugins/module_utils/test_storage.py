# SPDX-License-Identifier: GPL-3.0-or-later
"""Disks under a directory: found through partitions and volumes, by kind, and left alone where they can't be found."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from ansible_collections.ringmaster.inference.plugins.module_utils.file_tree import FileTree
from ansible_collections.ringmaster.inference.plugins.module_utils.storage import (
    SCHEDULERS,
    Setting,
    StorageError,
    StorageReader,
    rules,
    wanted,
    write,
)


class Machine:
    """A made-up ``/sys``."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.tree = FileTree(str(root))

    def disk(
        self,
        name: str,
        number: str,
        schedulers: str | None = "[none] mq-deadline kyber bfq",
        rotational: str = "0",
        folder: str = "pci0000:00/block",
        **attributes: str,
    ) -> Path:
        path = self.root / "sys/devices" / folder / name
        (path / "queue").mkdir(parents=True)
        (path / "queue/read_ahead_kb").write_text("128\n")
        (path / "queue/rotational").write_text(f"{rotational}\n")
        if schedulers is not None:
            (path / "queue/scheduler").write_text(f"{schedulers}\n")
        for attribute, value in attributes.items():
            target = path / attribute.replace("__", "/")
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(f"{value}\n")
        self.link(f"sys/class/block/{name}", path)
        self.link(f"sys/dev/block/{number}", path)
        return path

    def partition(self, disk: Path, name: str, number: str) -> Path:
        path = disk / name
        path.mkdir()
        (path / "partition").write_text("1\n")
        self.link(f"sys/class/block/{name}", path)
        self.link(f"sys/dev/block/{number}", path)
        return path

    def on(self, volume: Path, *below: Path) -> None:
        for each in below:
            self.link(str((volume / "slaves" / each.name).relative_to(self.root)), each)

    def link(self, path: str, target: Path) -> None:
        link = self.root / path
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(os.path.relpath(target, link.parent))

    def reader(self, number: str) -> StorageReader:
        major, minor = map(int, number.split(":"))
        return StorageReader(self.tree, device_number=lambda _path: os.makedev(major, minor))


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def nvme(machine: Machine) -> Path:
    return machine.disk("nvme0n1", "259:0", "none [mq-deadline] kyber", wwid="eui.0025385b21404f25")


def chosen(settings: list[Setting]) -> dict[str, str]:
    return {f"{setting.device.name}.{setting.attribute}": setting.after for setting in settings}


def test_partition_of_an_nvme(machine: Machine) -> None:
    machine.partition(nvme(machine), "nvme0n1p2", "259:2")
    storage = machine.reader("259:2").find("/srv/models")
    assert storage.device is not None
    assert (storage.device.name, storage.device.kind, storage.device.scheduler) == ("nvme0n1", "nvme", "mq-deadline")
    assert storage.device.read_ahead_kb == 128
    settings, unavailable = wanted(storage, 4096, SCHEDULERS)
    assert chosen(settings) == {"nvme0n1.read_ahead_kb": "4096", "nvme0n1.scheduler": "none"}
    assert unavailable == {}
    for setting in settings:
        write(machine.tree, setting)
    assert machine.tree.text("/sys/class/block/nvme0n1/queue/read_ahead_kb") == "4096"


@pytest.mark.parametrize(
    ("name", "rotational", "schedulers", "choice"),
    [
        ("nvme3n1", "0", "[none] mq-deadline", "none"),
        ("sda", "0", "[none] mq-deadline kyber bfq", "mq-deadline"),
        ("sdaa", "1", "[mq-deadline] none bfq", "bfq"),
        ("sdb", "1", "[mq-deadline] none", "mq-deadline"),
        ("sdb", "1", "[none]", "none of bfq, mq-deadline among none"),
        ("sdb", "0", "none", "none of mq-deadline among none"),
        ("sdb", "0", None, "none of mq-deadline among none"),
        ("sdb", "2", "[none] mq-deadline", None),
        ("vda", "1", "[mq-deadline] none", None),
        ("xvda", "0", "[mq-deadline] none", None),
        ("loop0", "1", "[mq-deadline] none", None),
        ("mmcblk0", "0", "[mq-deadline] none", None),
    ],
)
def test_scheduler_by_kind_and_by_what_the_kernel_has(
    machine: Machine, name: str, rotational: str, schedulers: str | None, choice: str | None
) -> None:
    machine.disk(name, "8:0", schedulers, rotational)
    settings, unavailable = wanted(machine.reader("8:0").find("/srv"), 0, SCHEDULERS)
    assert {**chosen(settings), **unavailable} == ({f"{name}.scheduler": choice} if choice else {})


def test_a_volume_on_two_partitions_of_two_disks(machine: Machine) -> None:
    ssd = machine.disk("sda", "8:0", device__wwid="naa.5002538f00000001")
    rotating = machine.disk("sdb", "8:16", "[mq-deadline] bfq none", "1", device__wwid='t10.ATA "odd" *')
    md = machine.disk("md0", "9:0", None, folder="virtual/block")
    dm = machine.disk("dm-0", "253:0", "none", folder="virtual/block", dm__uuid="LVM-abc")
    machine.on(md, machine.partition(ssd, "sda1", "8:1"), machine.partition(rotating, "sdb1", "8:17"))
    machine.on(dm, md)
    storage = machine.reader("253:0").find("/srv/models")
    assert [disk.name for disk in storage.disks] == ["sda", "sdb"]
    settings, unavailable = wanted(storage, 4096, SCHEDULERS)
    assert chosen(settings) == {"dm-0.read_ahead_kb": "4096", "sda.scheduler": "mq-deadline", "sdb.scheduler": "bfq"}
    assert unavailable == {}
    # What a rule can't hold safely is not in one: then the name has to do.
    begin = 'ACTION=="add|change", SUBSYSTEM=="block", ENV{DEVTYPE}=="disk", '
    assert rules(settings).splitlines() == [
        begin + 'ATTRS{wwid}=="naa.5002538f00000001", ATTR{queue/scheduler}="mq-deadline"',
        begin + 'ATTR{dm/uuid}=="LVM-abc", ATTR{queue/read_ahead_kb}="4096"',
        begin + 'KERNEL=="sdb", ATTR{queue/scheduler}="bfq"',
    ]


def test_volumes_in_a_circle_have_an_end(machine: Machine) -> None:
    first, second = (machine.disk(name, number) for name, number in (("dm-0", "253:0"), ("dm-1", "253:1")))
    machine.on(first, second)
    machine.on(second, first)
    assert machine.reader("253:0").find("/srv").disks


@pytest.mark.parametrize(
    ("reader", "says"),
    [
        (lambda machine: machine.reader("0:45"), "without a block device"),
        (lambda machine: machine.reader("8:99"), "/sys/dev/block/8:99"),
        (lambda machine: StorageReader(machine.tree, "podman"), "a container (podman)"),
    ],
)
def test_what_cannot_be_found_is_left_alone(
    machine: Machine, reader: Callable[[Machine], StorageReader], says: str
) -> None:
    nvme(machine)
    storage = reader(machine).find("/srv/models")
    assert (storage.device, storage.disks) == (None, [])
    settings, unavailable = wanted(storage, 4096, SCHEDULERS)
    assert settings == []
    assert says in unavailable["/srv/models"]
    assert rules(settings) == ""


def test_the_nearest_directory_that_is_there_counts(machine: Machine, tmp_path: Path) -> None:
    asked: list[str] = []

    def number(path: str) -> int:
        asked.append(path)
        return 0

    StorageReader(machine.tree, device_number=number).find(str(tmp_path / "not" / "yet"))
    assert asked == [str(tmp_path)]


@pytest.mark.parametrize("text", ["", "N/A", "-", "\0\xff"])
def test_read_ahead_that_the_kernel_does_not_tell(machine: Machine, text: str) -> None:
    path = nvme(machine)
    (path / "queue/read_ahead_kb").write_text(text)
    settings, unavailable = wanted(machine.reader("259:0").find("/srv"), 4096, {})
    assert settings == []
    assert unavailable == {"nvme0n1.read_ahead_kb": "the kernel tells none"}


def test_a_value_that_is_not_taken_is_told(machine: Machine) -> None:
    path = nvme(machine)
    settings, _unavailable = wanted(machine.reader("259:0").find("/srv"), 0, SCHEDULERS)
    (path / "queue/scheduler").unlink()
    (path / "queue/scheduler").mkdir()
    with pytest.raises(StorageError, match="to take none"):
        write(machine.tree, settings[0])


def test_devices_by_name(machine: Machine) -> None:
    nvme(machine)
    found = machine.reader("259:0").device("nvme0n1")
    assert found is not None
    assert found.schedulers == ("none", "mq-deadline", "kyber")
    assert machine.reader("259:0").device("sdz") is None
