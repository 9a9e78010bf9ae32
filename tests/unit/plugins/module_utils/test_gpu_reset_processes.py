# SPDX-License-Identifier: GPL-3.0-or-later
"""Who has a card open is found by the real ``/proc`` and by a made-up one with everything that may be in it."""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ansible_collections.ringmaster.inference.plugins.module_utils.file_tree import FileTree
from ansible_collections.ringmaster.inference.plugins.module_utils.gpu_reset import Holder
from ansible_collections.ringmaster.inference.plugins.module_utils.gpu_reset_ledger import Process
from ansible_collections.ringmaster.inference.plugins.module_utils.gpu_reset_processes import LONGEST_COMMAND, Processes
from tests.support.gpu_reset_world import OTHER, UUID, card

STAT = "{pid} ({name}) {state} 1 1 1 0 -1 4194560 1 2 3 4 5 6 7 8 20 0 1 0 {started} 9 10\n"


class Host:
    """A ``/proc`` with processes of a test."""

    def __init__(self, root: Path) -> None:
        self.root = root
        for name in ("nvidia0", "nvidia1", "nvidia2", "nvidiactl", "nvidia-uvm", "null"):
            self.write(f"dev/{name}", "")
        self.write("proc/sys/kernel/random/boot_id", "3f1b\n")
        (root / "proc/self/ns").mkdir(parents=True)
        (root / "proc/self/ns/pid").symlink_to("pid:[4026531836]")
        self.processes = Processes(FileTree(str(root)))

    def write(self, path: str, text: str | bytes) -> Path:
        target = self.root / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(text.encode() if isinstance(text, str) else text)
        return target

    def process(self, pid: int, *opens: str, maps: str = "", command: str = "engine", **more: Any) -> None:
        values = {
            "name": "engine",
            "state": "S",
            "started": 77,
            "cgroup": "0::/system.slice/engine@main.service\n",
            **more,
        }
        self.write(f"proc/{pid}/cmdline", command.replace(" ", "\0") + "\0")
        self.write(f"proc/{pid}/comm", f"{values['name']}\n")
        self.write(f"proc/{pid}/stat", STAT.format(pid=pid, **values))
        self.write(f"proc/{pid}/maps", maps)
        self.write(f"proc/{pid}/cgroup", values["cgroup"])
        folder = self.root / f"proc/{pid}/fd"
        folder.mkdir()
        for number, target in enumerate(opens):
            (folder / str(number)).symlink_to(target)

    def holders(self, **values: Any) -> tuple[Holder, ...]:
        found, blind = self.processes.holders([card(UUID, **values)])
        assert blind == ""
        return found


@pytest.fixture
def host(tmp_path: Path) -> Host:
    return Host(tmp_path)


def test_open_device_is_told_with_all_that_helps(host: Host) -> None:
    host.process(4711, "/dev/null", "socket:[99]", "/dev/nvidia1", command="python3 -m engine --port 8100")
    (holder,) = host.holders()
    assert (holder.pid, holder.command, holder.unit) == (4711, "python3 -m engine --port 8100", "engine@main.service")
    assert (holder.device, holder.how) == ("/dev/nvidia1", "open")
    assert holder.user in ("root", str(os.getuid())) or holder.user


def test_devices_of_other_cards_and_of_all_cards_do_not_count(host: Host) -> None:
    host.process(1, "/dev/nvidia0", "/dev/nvidia2", "/dev/nvidiactl", "/dev/nvidia-uvm", "/dev/null")
    assert host.holders() == ()


def test_device_that_is_only_mapped(host: Host) -> None:
    line = "7f1c8a000000-7f1c8a001000 rw-s 00000000 00:06 512                        /dev/nvidia1\n"
    host.process(5, maps="7f00-7f01 r-xp 0 08:01 12 /usr/lib/libc.so.6\n7f02-7f03 rw-p 0 00:00 0\n" + line)
    (holder,) = host.holders()
    assert (holder.device, holder.how) == ("/dev/nvidia1", "mapped")


def test_device_that_was_deleted_meanwhile(host: Host) -> None:
    host.process(5, "/dev/nvidia1 (deleted)")
    host.process(6, maps="7f-80 rw-s 0 00:06 512 /dev/nvidia1 (deleted)")
    assert [holder.pid for holder in host.holders()] == [5, 6]


def test_without_the_cards_number_every_card_device_counts(host: Host) -> None:
    host.process(5, "/dev/nvidia0")
    host.process(6, "/dev/nvidiactl")
    assert [holder.pid for holder in host.holders(minor=None)] == [5]


def test_display_nodes_of_the_card_count(host: Host) -> None:
    for address, names in (("0000:01:00.0", ("card1", "renderD129")), ("0000:02:00.0", ("card2", "renderD130"))):
        for name in names:
            host.write(f"dev/dri/{name}", "")
            (host.root / f"sys/bus/pci/devices/{address}/drm/{name}").mkdir(parents=True)
    host.process(5, "/dev/dri/renderD129", command="Xorg")
    host.process(6, "/dev/dri/card2")
    assert [(holder.pid, holder.device) for holder in host.holders()] == [(5, "/dev/dri/renderD129")]


def test_process_that_only_nvml_knows(host: Host) -> None:
    host.process(8, command="engine")
    (holder,) = host.holders(processes=(8, 99))
    assert (holder.pid, holder.how) == (8, "in use (NVML)")


@pytest.mark.parametrize(
    ("cgroup", "unit"),
    [
        ("0::/system.slice/engine@main.service\n", "engine@main.service"),
        ("1:name=systemd:/system.slice/a.service\n0::/\n", "a.service"),
        (
            "4:memory:/system.slice/wrong.service\n1:name=systemd:/user.slice/user-0.slice/session-3.scope\n",
            "session-3.scope",
        ),
        ("0::/user.slice/user-1000.slice/user@1000.service/app.slice/train.service", "user@1000.service"),
        ("0::/system.slice/docker-4f.scope/inner.service", "docker-4f.scope"),
        ("0::/system.slice/_a.service", "a.service"),
        ("0::/", ""),
        ("", ""),
        ("junk\n\0\n::\n", ""),
    ],
)
def test_unit_by_control_group(host: Host, cgroup: str, unit: str) -> None:
    host.process(5, "/dev/nvidia1", cgroup=cgroup)
    assert host.holders()[0].unit == unit


@pytest.mark.parametrize(
    ("command", "shown"),
    [
        ("vllm serve m --api-key SECRET --port 1", "vllm serve m --api-key … --port 1"),
        ("vllm --api-key=SECRET", "vllm --api-key=…"),
        ("env HF_TOKEN=SECRET vllm", "env HF_TOKEN=… vllm"),
        ("vllm --api-key", "vllm --api-key"),
        ("x \x1b[31m", "x \N{REPLACEMENT CHARACTER}[31m"),
        ("", "engine"),
    ],
)
def test_command_lines_are_shown_without_secrets(host: Host, command: str, shown: str) -> None:
    host.process(5, "/dev/nvidia1", command=command)
    assert host.holders()[0].command == shown


def test_long_command_line_is_cut(host: Host) -> None:
    host.process(5, "/dev/nvidia1", command="x" * 1000)
    assert len(host.holders()[0].command) == LONGEST_COMMAND


def test_process_that_ends_while_it_is_looked_at(host: Host) -> None:
    (host.root / "proc/12").mkdir()
    (host.root / "proc/irq").mkdir()
    assert host.holders() == ()


def test_process_that_hides_is_no_proof(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    host.process(5, "/dev/nvidia1")
    host.process(6, "/dev/nvidia1")
    original = os.listdir

    def listdir(path: str) -> list[str]:
        if path.endswith("proc/5/fd"):
            raise PermissionError(13, "Permission denied")
        return original(path)

    monkeypatch.setattr(os, "listdir", listdir)
    found, blind = host.processes.holders([card(UUID)])
    assert [holder.pid for holder in found] == [6]
    assert "process 5" in blind


@given(st.binary(max_size=80), st.binary(max_size=80), st.binary(max_size=40))
def test_no_content_of_proc_breaks_the_search(
    tmp_path_factory: pytest.TempPathFactory, maps: bytes, cgroup: bytes, stat: bytes
) -> None:
    host = Host(tmp_path_factory.mktemp("proc"))
    host.process(5, "/dev/nvidia1")
    for name, content in (("maps", maps), ("cgroup", cgroup), ("stat", stat), ("cmdline", maps)):
        host.write(f"proc/5/{name}", content)
    host.holders()
    host.processes.identity(5)
    host.processes.running_reset()


def test_running_reset_of_somebody_else(host: Host) -> None:
    host.process(5, command="nvidia-smi -q")
    assert host.processes.running_reset() == ""
    host.process(6, command="/usr/bin/nvidia-smi -r -i 0")
    assert "process 6 (/usr/bin/nvidia-smi -r -i 0)" in host.processes.running_reset()


def test_process_is_itself_only_with_its_start_time(host: Host) -> None:
    host.process(os.getpid(), started=10)
    host.process(5, started=77, name="a) R 1 2 (b")
    five = host.processes.identity(5)
    assert five == Process("3f1b", "pid:[4026531836]", 5, 77)
    assert host.processes.runs(five) is True
    assert host.processes.runs(Process("3f1b", "pid:[4026531836]", 5, 78)) is False
    assert host.processes.runs(Process("3f1b", "pid:[4026531836]", 6, 77)) is False
    assert host.processes.runs(Process("other", "pid:[4026531836]", 5, 77)) is None
    assert host.processes.runs(Process("3f1b", "pid:[1]", 5, 77)) is None


def test_process_that_waits_to_be_reaped_is_over(host: Host) -> None:
    host.process(5, state="Z")
    assert host.processes.identity(5) is None


def test_machine_without_proc_names_nothing(tmp_path: Path) -> None:
    processes = Processes(FileTree(str(tmp_path)))
    assert processes.identity(os.getpid()) is None
    assert processes.runs(Process("b", "n", 1, 1)) is None


# On this machine's own /proc, with an ordinary file as the device


def holders_of(path: Path) -> list[Holder]:
    """Holders of a file, by the real /proc."""
    processes = Processes(FileTree("/"))
    devices = {str(path): processes._status(str(path))}
    found = []
    for pid in processes._pids():
        try:
            held = processes._held(pid, devices)
        except PermissionError:
            continue
        if held:
            found.append(Holder(pid, processes.command(pid), "", "", *held))
    return found


def test_real_process_that_has_a_file_open_or_mapped(tmp_path: Path) -> None:
    device = tmp_path / "nvidia7"
    device.write_bytes(b"x" * mmap.PAGESIZE)
    assert holders_of(device) == []
    for how, program in (("open", OPEN), ("mapped", MAP)):
        holder = subprocess.Popen(
            [sys.executable, "-c", program, str(device)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        with holder:
            assert holder.stdout is not None
            assert holder.stdout.readline() == "1\n"
            found = holders_of(device)
            assert [(each.pid, each.how) for each in found] == [(holder.pid, how)]
            holder.kill()
    assert holders_of(device) == []


OPEN = "import sys; file = open(sys.argv[1]); print(1, flush=True); sys.stdin.read()"
# By the kernel's call: Python's own mmap keeps a descriptor open.
MAP = """
import ctypes, os, sys
libc = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t] + [ctypes.c_int] * 3 + [ctypes.c_long]
handle = os.open(sys.argv[1], os.O_RDWR)
assert libc.mmap(None, 4096, 3, 1, handle, 0) != ctypes.c_void_p(-1).value
os.close(handle)
print(1, flush=True)
sys.stdin.read()
"""


def test_link_to_a_device_by_another_name_is_the_same_device(tmp_path: Path) -> None:
    device, other = tmp_path / "nvidia7", tmp_path / "gpu"
    device.write_text("")
    os.link(device, other)
    with open(other, encoding="utf-8"):
        assert [holder.pid for holder in holders_of(device)] == [os.getpid()]


def test_two_cards_of_one_search(host: Host) -> None:
    host.process(5, "/dev/nvidia1")
    host.process(6, "/dev/nvidia2")
    found, _blind = host.processes.holders([card(UUID), card(OTHER)])
    assert [holder.pid for holder in found] == [5, 6]
