# SPDX-License-Identifier: GPL-3.0-or-later
"""The driver stack of hosts of both families, whole, half installed, damaged, and of hosts that tell nothing."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from ansible_collections.ringmaster.inference.plugins.module_utils.commands import Answer, CommandRunner
from ansible_collections.ringmaster.inference.plugins.module_utils.driver_stack import DriverStackReader
from ansible_collections.ringmaster.inference.plugins.module_utils.file_tree import FileTree
from ansible_collections.ringmaster.inference.plugins.module_utils.stack_plan import plan
from tests.support.stack import profile
from tests.support.unknown import assert_every_null_has_a_reason

KERNEL = "6.1.0-57-amd64"
SECURE_BOOT = "/sys/firmware/efi/efivars/SecureBoot-8be4df61-93ca-11d2-aa0d-00e098032b8c"
OPEN = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.159.04  Release Build\n"
PROPRIETARY = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.309.01  Tue Sep 23 10:11:12 UTC 2025\n"
MODINFO = "version:        535.309.01\nlicense:        NVIDIA\nsigner:         DKMS module signing key\n"
DPKG = (
    f"linux-image-{KERNEL}\t6.1.192-3\thi \nlinux-headers-{KERNEL}\t6.1.192-3\tii \ngcc-12\t12.2.0-14\tii \n"
    "nvidia-smi\t535.309.01-0+deb12u1\thi \nnvidia-kernel-dkms\t535.309.01-0+deb12u1\tii \nlibcuda1\t1\trc \n"
    "nvidia-cuda-toolkit\t11.8.89~11.8.0-5~deb12u1\tii \nrdma-core\t44.0-2\tii \n"
)


class Host(CommandRunner):
    """A folder as the host's root, and the answers of its commands; those that are not named are not installed."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.answers: dict[str, Answer] = {}
        self.asked: list[str] = []

    def write(self, path: str, content: str | bytes = "") -> None:
        target = self.root / path.lstrip("/")
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(content.encode() if isinstance(content, str) else content)

    def link(self, path: str, target: str) -> None:
        (self.root / path.lstrip("/")).parent.mkdir(parents=True, exist_ok=True)
        (self.root / path.lstrip("/")).symlink_to(target)

    def run(self, command: Sequence[str], timeout: float = 1.0) -> Answer:
        text = " ".join(command)
        self.asked.append(text)
        match = next((answer for start, answer in self.answers.items() if text.startswith(start)), None)
        return match or Answer(None, complaint=f"not found: {command[0]}")

    def read(self, wanted: dict[str, Any] | None = None) -> dict[str, Any]:
        found = DriverStackReader(FileTree(str(self.root)), self).read(wanted)
        assert_every_null_has_a_reason(found)
        return found


@pytest.fixture
def bare(tmp_path: Path) -> Host:
    return Host(tmp_path)


@pytest.fixture
def debian(tmp_path: Path) -> Host:
    """As the real packages leave a Debian 12 host: the module's file is named nvidia-current."""
    host = Host(tmp_path)
    host.write("/etc/os-release", 'ID=debian\nVERSION_ID="12"\n')
    host.write("/proc/sys/kernel/osrelease", f"{KERNEL}\n")
    host.write(f"/boot/vmlinuz-{KERNEL}")
    host.write(f"/lib/modules/{KERNEL}/kernel/modules.order")
    host.write(f"/lib/modules/{KERNEL}/updates/dkms/nvidia-current.ko")
    host.write(f"/lib/modules/{KERNEL}/updates/dkms/nvidia-current-uvm.ko")
    host.write(f"/usr/src/linux-headers-{KERNEL}/Makefile")
    host.link(f"/lib/modules/{KERNEL}/build", f"/usr/src/linux-headers-{KERNEL}")
    host.write("/lib/modules/6.1.0-50-amd64/updates/dkms/nvidia-current.ko")  # left of a kernel that is gone
    host.write("/proc/driver/nvidia/version", PROPRIETARY)
    host.write("/sys/module/nvidia/version", "535.309.01\n")
    host.write("/usr/lib/x86_64-linux-gnu/nvidia/current/libnvidia-ml.so.535.309.01")
    host.write(SECURE_BOOT, struct.pack("<IB", 6, 0))
    host.write("/sys/class/infiniband/mlx5_0/fw_ver", "1")
    for address, device, kind in (("0000:07:00.0", 0x20B2, 0x030200), ("0000:08:00.0", 0x1AF1, 0x068000)):
        for name, value in (("vendor", 0x10DE), ("device", device), ("class", kind)):
            host.write(f"/sys/bus/pci/devices/{address}/{name}", f"0x{value:04x}\n")
    host.answers = {
        "uname -m": Answer(0, "x86_64\n"),
        "dpkg-query": Answer(0, DPKG),
        f"modinfo -k {KERNEL} nvidia-current": Answer(0, MODINFO),
        "modinfo": Answer(1, complaint="modinfo: ERROR: Module nvidia not found."),
        "dkms status": Answer(0, f"nvidia-current/535.309.01, {KERNEL}, x86_64: installed\n"),
        "systemctl is-active": Answer(4, "inactive\n"),
    }
    return host


@pytest.fixture
def enterprise(tmp_path: Path) -> Host:
    host = Host(tmp_path)
    release = "5.14.0-503.11.1.el9_5.x86_64"
    host.write("/etc/os-release", 'ID="rocky"\nID_LIKE="rhel centos fedora"\nVERSION_ID="9.5"\n')
    host.write("/proc/sys/kernel/osrelease", f"{release}\n")
    host.write(f"/lib/modules/{release}/vmlinuz")
    host.write(f"/lib/modules/{release}/extra/nvidia.ko.xz")
    host.write("/proc/driver/nvidia/version", OPEN)
    host.write("/sys/module/nvidia/version", "580.159.04")
    host.write("/sys/firmware/efi/systab")
    host.write("/var/lib/dkms/mok.pub")
    host.write("/usr/local/cuda-13.0/version.json", '{"cuda": {"version": "13.0.2"}}')
    host.link("/usr/local/cuda", "/usr/local/cuda-13.0")
    host.write("/etc/dnf/plugins/versionlock.list", "nvidia-driver-cuda-3:580.159.04-1.el9.*\n")
    host.answers = {
        "uname -m": Answer(0, "x86_64\n"),
        "rpm -qa": Answer(
            0,
            "kernel-core\t5.14.0-503.11.1.el9_5\nnvidia-driver-cuda\t3:580.159.04-1.el9\n"
            "nvidia-fabricmanager\t580.159.04-1\nlibnccl\t2.28.9-1+cuda13.0\nbash\t5.1.8-9.el9\n",
        ),
        f"modinfo -k {release} nvidia": Answer(0, "version: 580.159.04\nlicense: Dual MIT/GPL\n"),
        "mokutil --sb-state": Answer(0, "SecureBoot enabled\n"),
        "mokutil --test-key": Answer(0, "/var/lib/dkms/mok.pub is not enrolled\n"),
        "ofed_info -s": Answer(0, "OFED-internal-25.04-0.6.1:\n"),
        "systemctl is-active": Answer(0, "active\n"),
    }
    return host


def test_debian_host(debian: Host) -> None:
    found = debian.read()
    assert found["os"] == {
        "family": "Debian",
        "distribution": "Debian",
        "version": "12",
        "architecture": "x86_64",
        "unknown": {},
    }
    assert found["packages"]["driver"] == {
        "nvidia-kernel-dkms": ["535.309.01-0+deb12u1"],
        "nvidia-smi": ["535.309.01-0+deb12u1"],
    }
    assert "gcc-12" not in str(found["packages"])
    assert found["held"]["packages"] == [f"linux-image-{KERNEL}", "nvidia-smi"]
    assert found["kernel"]["installed"] == [{"release": KERNEL, "headers": True}]
    assert found["driver"]["loaded"]["version"] == "535.309.01"
    assert found["driver"]["loaded"]["modules"] == "proprietary"
    (module,) = found["driver"]["on_disk"]
    assert (module["name"], module["version"], module["signer"]) == (
        *("nvidia-current", "535.309.01", "DKMS module signing key"),
    )
    assert found["driver"]["libraries"] == ["535.309.01"]
    assert found["dkms"]["modules"][0]["state"] == "installed"
    assert found["secure_boot"]["enabled"] is False
    assert found["rdma"]["flavour"] == "inbox"
    assert found["cuda"]["toolkits"] == [{"path": "/usr", "version": "11.8.0"}]
    assert found["fabric_manager"]["active"] is False
    assert found["hardware"]["nvswitches"] == 1
    assert [card["architecture"] for card in found["hardware"]["cards"]] == ["ampere"]
    assert (found["pending_reboot"]["due"], found["pending_reboot"]["reasons"]) == (False, [])


def test_enterprise_host(enterprise: Host) -> None:
    found = enterprise.read()
    assert (found["os"]["family"], found["os"]["distribution"], found["os"]["version"]) == ("RedHat", "Rocky", "9.5")
    assert found["packages"]["nccl"] == {"libnccl": ["2.28.9-1+cuda13.0"]}
    assert found["held"]["tool"] == "versionlock"
    assert found["held"]["packages"] == ["nvidia-driver-cuda"]
    assert found["kernel"]["installed"] == [{"release": "5.14.0-503.11.1.el9_5.x86_64", "headers": False}]
    assert found["driver"]["loaded"]["modules"] == found["driver"]["on_disk"][0]["modules"] == "open"
    assert found["driver"]["on_disk"][0]["signer"] == ""
    assert (found["secure_boot"]["enabled"], found["secure_boot"]["key_enrolled"]) == (True, False)
    assert (found["rdma"]["flavour"], found["rdma"]["version"]) == ("doca_ofed", "25.04-0.6.1")
    assert found["cuda"]["default"] == "/usr/local/cuda-13.0"
    assert found["cuda"]["toolkits"] == [{"path": "/usr/local/cuda-13.0", "version": "13.0.2"}]
    assert (found["nccl"]["version"], found["nccl"]["cuda"]) == ("2.28.9", "13.0")
    assert found["fabric_manager"] == {"version": "580.159.04", "active": True, "unknown": {}}
    assert found["dkms"] == {"installed": False, "modules": [], "unknown": {}}


def test_host_that_tells_nothing(bare: Host) -> None:
    found = bare.read()
    assert found["packages"] is None
    assert found["held"]["packages"] is None
    assert found["kernel"]["running"] is None
    assert found["driver"]["loaded"]["loaded"] is None
    assert found["hardware"]["cards"] is None
    assert found["rdma"]["flavour"] is None
    assert found["pending_reboot"]["due"] is None
    planned = plan(profile("debian12-r535"), found)
    assert planned["next"]["step"] == "kernel"
    assert "not found: dpkg-query" in planned["next"]["why"][0]


def test_only_questions_are_asked(debian: Host) -> None:
    debian.read()
    asked = {command.split()[0] for command in debian.asked}
    assert asked <= {"uname", "dpkg-query", "modinfo", "dkms", "ofed_info", "systemctl", "mokutil"}
    assert all(command == "dkms status" for command in debian.asked if command.startswith("dkms"))
    assert all(command.startswith("systemctl is-active") for command in debian.asked if command.startswith("systemctl"))


@pytest.mark.parametrize(
    ("path", "content", "reason"),
    [
        ("/proc/driver/nvidia/version", OPEN, "says 580.159.04, /sys/module/nvidia/version 535.309.01"),
        ("/sys/module/nvidia/version", "550.1", "says 535.309.01, /sys/module/nvidia/version 550.1"),
    ],
)
def test_two_versions_of_the_loaded_module_are_no_version(debian: Host, path: str, content: str, reason: str) -> None:
    debian.write(path, content)
    loaded = debian.read()["driver"]["loaded"]
    assert loaded["version"] is None
    assert reason in loaded["unknown"]["version"]


@pytest.mark.parametrize("content", ["", "\0\0", b"\xff\xfe", "NVRM version: NVIDIA UNIX"])
def test_damaged_version_of_the_module(debian: Host, content: str | bytes) -> None:
    debian.write("/proc/driver/nvidia/version", content)
    loaded = debian.read()["driver"]["loaded"]
    assert (loaded["loaded"], loaded["version"], loaded["modules"]) == (True, "535.309.01", None)


def reboot_reasons(host: Host) -> list[str]:
    pending = host.read()["pending_reboot"]
    assert pending["due"] is True
    reasons: list[str] = pending["reasons"]
    return reasons


def test_reboot_for_a_newer_kernel_of_the_same_flavour(debian: Host) -> None:
    debian.write("/boot/vmlinuz-6.1.0-58-cloud-amd64")
    debian.write("/lib/modules/6.1.0-58-cloud-amd64/kernel/x")
    debian.write("/boot/vmlinuz-6.1.0-9-amd64")
    debian.write("/lib/modules/6.1.0-9-amd64/kernel/x")
    assert debian.read()["pending_reboot"]["due"] is False
    debian.write("/lib/modules/6.1.0-100-amd64/kernel/x")
    assert reboot_reasons(debian) == [f"kernel {KERNEL} runs, and 6.1.0-100-amd64 is installed"]


def test_reboot_for_a_kernel_that_was_removed(debian: Host) -> None:
    debian.write("/proc/sys/kernel/osrelease", "6.1.0-50-amd64")
    assert "kernel 6.1.0-50-amd64 runs, and is no longer installed" in reboot_reasons(debian)


def test_reboot_for_the_driver(debian: Host) -> None:
    debian.write("/proc/driver/nvidia/version", PROPRIETARY.replace("535.309.01", "535.261.03"))
    debian.write("/sys/module/nvidia/version", "535.261.03")
    assert reboot_reasons(debian) == [
        "the driver's loaded module has version 535.261.03, the one on disk 535.309.01",
        "the driver's loaded module is 535.261.03, its libraries are 535.309.01",
    ]


def test_reboot_for_another_kind_of_modules(debian: Host) -> None:
    debian.answers[f"modinfo -k {KERNEL} nvidia-current"] = Answer(0, MODINFO.replace("NVIDIA", "Dual MIT/GPL"))
    assert reboot_reasons(debian) == ["the driver's loaded module has kind proprietary, the one on disk open"]


def test_reboot_that_packages_ask_for(debian: Host) -> None:
    debian.write("/run/reboot-required", "*** System restart required ***\n")
    debian.write("/run/reboot-required.pkgs", "linux-image-6.1.0-57-amd64\nlibc6\nlibc6\n")
    assert reboot_reasons(debian) == ["/run/reboot-required is there: linux-image-6.1.0-57-amd64, libc6"]


def test_reboot_because_nouveau_is_loaded(debian: Host) -> None:
    (debian.root / "proc/driver/nvidia/version").unlink()
    (debian.root / "sys/module/nvidia/version").unlink()
    (debian.root / "sys/module/nvidia").rmdir()
    debian.write("/sys/module/nouveau/refcnt", "0")
    found = debian.read()
    assert found["driver"]["loaded"]["loaded"] is False
    assert found["pending_reboot"]["reasons"] == ["nouveau is loaded, and NVIDIA's driver is installed"]


def test_reboot_for_rdma(enterprise: Host) -> None:
    enterprise.write("/sys/module/mlx5_core/version", "24.10-0.7.0")
    enterprise.answers["modinfo -k 5.14.0-503.11.1.el9_5.x86_64 mlx5_core"] = Answer(0, "version: 25.04-0.6.1\n")
    enterprise.answers = dict(sorted(enterprise.answers.items(), key=lambda each: -len(each[0])))
    assert "the loaded mlx5_core is 24.10-0.7.0, the one on disk 25.04-0.6.1" in reboot_reasons(enterprise)


def test_module_that_was_never_built_is_not_on_disk(debian: Host) -> None:
    del debian.answers[f"modinfo -k {KERNEL} nvidia-current"]
    found = debian.read()
    assert found["driver"]["on_disk"] == []


def test_module_that_can_not_be_asked_for_is_there_without_a_version(debian: Host) -> None:
    debian.answers = {name: answer for name, answer in debian.answers.items() if not name.startswith("modinfo")}
    (module,) = debian.read()["driver"]["on_disk"]
    assert (module["name"], module["version"]) == ("nvidia", None)
    assert "not found: modinfo" in module["unknown"]["version"]


def test_dkms_that_fails_is_not_empty(debian: Host) -> None:
    debian.answers["dkms status"] = Answer(1, "", "Error! Could not locate dkms.conf file.")
    dkms = debian.read()["dkms"]
    assert dkms["installed"] is True
    assert dkms["modules"] is None
    assert "Could not locate dkms.conf" in dkms["unknown"]["modules"]
    debian.answers["dkms status"] = Answer(None, complaint="no answer within 60 s: dkms status")
    assert debian.read()["dkms"]["modules"] is None


def test_database_of_packages_that_fails_is_not_empty(debian: Host) -> None:
    debian.answers["dpkg-query"] = Answer(2, "nvidia-smi\t1", "dpkg-query: error: cannot read")
    found = debian.read()
    assert found["packages"] is None
    assert found["unknown"]["packages"] == "dpkg-query: error: cannot read"
    debian.answers["dpkg-query"] = Answer(0, "something else\n")
    assert debian.read()["packages"] is None


def test_pins_are_those_that_apt_reads(debian: Host) -> None:
    pin = "Package: nvidia-*\nPin: version 535*\nPin-Priority: 1001\n"
    for name in ("ringmaster", "site.pref", "old.bak", ".hidden", "a b"):
        debian.write(f"/etc/apt/preferences.d/{name}", pin)
    debian.write("/etc/apt/preferences", pin)
    assert [each["file"] for each in debian.read()["held"]["pins"]] == [
        "/etc/apt/preferences",
        "/etc/apt/preferences.d/ringmaster",
        "/etc/apt/preferences.d/site.pref",
    ]


def test_lock_of_dnf_5_is_not_taken_for_no_lock(enterprise: Host) -> None:
    (enterprise.root / "etc/dnf/plugins/versionlock.list").unlink()
    enterprise.write("/etc/dnf/versionlock.toml", 'version = "1.0"')
    held = enterprise.read()["held"]
    assert held["packages"] is None
    assert "dnf 5" in held["unknown"]["packages"]


@pytest.mark.parametrize(
    ("answer", "flavour"),
    [
        (Answer(0, "MLNX_OFED_LINUX-24.10-0.7.0.0:"), "mlnx_ofed"),
        (Answer(0, "hello"), None),
        (Answer(1, "", "ofed_info: broken"), None),
    ],
)
def test_flavour_of_rdma(debian: Host, answer: Answer, flavour: str | None) -> None:
    debian.answers["ofed_info"] = answer
    assert debian.read()["rdma"]["flavour"] == flavour


def test_no_rdma(debian: Host) -> None:
    debian.answers["dpkg-query"] = Answer(0, DPKG.replace("rdma-core\t44.0-2\tii \n", ""))
    (debian.root / "sys/class/infiniband/mlx5_0/fw_ver").unlink()
    (debian.root / "sys/class/infiniband/mlx5_0").rmdir()
    assert debian.read()["rdma"]["flavour"] == "none"


def test_secure_boot_of_a_host_without_efi(debian: Host) -> None:
    (debian.root / SECURE_BOOT.lstrip("/")).unlink()
    for folder in ("sys/firmware/efi/efivars", "sys/firmware/efi"):
        (debian.root / folder).rmdir()
    debian.write("/sys/firmware/dmi/tables/DMI", "x")
    assert debian.read()["secure_boot"]["enabled"] is False


def test_card_of_no_known_generation(debian: Host) -> None:
    debian.write("/sys/bus/pci/devices/0000:07:00.0/device", "0xfff0\n")
    debian.write("/sys/bus/pci/devices/0000:09:00.0/vendor", "0x8086\n")
    (card,) = debian.read()["hardware"]["cards"]
    assert (card["device"], card["architecture"]) == ("0xfff0", None)


def test_packages_of_the_profile_are_told_whatever_they_are_called(debian: Host) -> None:
    wanted = profile("debian12-r535")
    wanted["driver"]["packages"]["gcc-12"] = None
    assert debian.read(wanted)["packages"]["driver"]["gcc-12"] == ["12.2.0-14"]


def test_plan_of_a_host_as_the_real_packages_leave_it(debian: Host) -> None:
    wanted = profile("debian12-r535")
    found = debian.read(wanted)
    planned = plan(wanted, found)
    assert planned["next"]["step"] == "kernel"
    assert planned["next"]["why"] == [f"linux-headers-{KERNEL} is not held"]
    assert planned["reboots"] == ["driver_reboot"]  # packages of the driver are missing
