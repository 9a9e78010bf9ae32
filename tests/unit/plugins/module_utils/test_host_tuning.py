# SPDX-License-Identifier: GPL-3.0-or-later
"""A host's settings from the kernel's files: as they are, on hosts that lack them, and damaged."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ansible_collections.ringmaster.inference.plugins.module_utils.commands import Answer, CommandRunner
from ansible_collections.ringmaster.inference.plugins.module_utils.file_tree import FileTree
from ansible_collections.ringmaster.inference.plugins.module_utils.host_tuning import (
    HostTuningReader,
    KernelArguments,
    KernelClock,
    container,
    file_system,
    kernel_clock,
    parse_swaps,
)
from tests.support.unknown import assert_every_null_has_a_reason

CPU = "/sys/devices/system/cpu"
SWAPS = "Filename\t\t\t\tType\t\tSize\t\tUsed\t\tPriority\n"
SECURE_BOOT = "/sys/firmware/efi/efivars/SecureBoot-8be4df61-93ca-11d2-aa0d-00e098032b8c"
UNITS = """Id=chrony.service
LoadState=loaded
ActiveState=active
UnitFileState=enabled

Id=chrony.service
LoadState=loaded
ActiveState=active
UnitFileState=enabled

Id=systemd-timesyncd.service
LoadState=masked
ActiveState=inactive
UnitFileState=masked

Id=ntpd.service
LoadState=not-found
ActiveState=inactive
UnitFileState=
"""
DEFAULTS = "DefaultLimitNOFILE=524288\nDefaultLimitNOFILESoft=1024\nDefaultLimitMEMLOCK=infinity\n"


class Recorded(CommandRunner):
    """Answers that were recorded."""

    def __init__(self, units: Answer | None = None, defaults: Answer | None = None) -> None:
        self.units = units or Answer(0, UNITS)
        self.defaults = defaults or Answer(0, DEFAULTS)

    def run(self, command: Sequence[str], timeout: float = 1.0) -> Answer:
        assert command[:2] == ["systemctl", "show"]
        return self.units if "chrony.service" in command else self.defaults


def right_clock() -> KernelClock:
    return KernelClock(True, 28500, 12)


def forbidden_clock() -> KernelClock:
    raise PermissionError(1, "Operation not permitted")


class Host:
    """A tree like that of a server with two sockets."""

    def __init__(self, root: Path) -> None:
        self.root = root
        for cpu in range(4):
            for index, (name, latency) in enumerate((("POLL", 0), ("C1", 2), ("C1E", 10), ("C6", 133))):
                folder = f"{CPU}/cpu{cpu}/cpuidle/state{index}"
                self.write(f"{folder}/name", name)
                self.write(f"{folder}/latency", str(latency))
                self.write(f"{folder}/disable", "0")
            self.write(f"{CPU}/cpu{cpu}/cpufreq/scaling_driver", "intel_pstate")
            self.write(f"{CPU}/cpu{cpu}/cpufreq/scaling_governor", "powersave")
            self.write(f"{CPU}/cpu{cpu}/cpufreq/scaling_available_governors", "performance powersave")
            self.write(f"{CPU}/cpu{cpu}/cpufreq/energy_performance_preference", "balance_performance")
        for path, content in {
            "/proc/cmdline": "BOOT_IMAGE=/vmlinuz root=/dev/sda2 ro quiet iommu=pt",
            "/proc/sys/kernel/osrelease": "6.8.0-52-generic",
            "/proc/sys/kernel/numa_balancing": "1",
            "/proc/sys/fs/file-max": "9223372036854775807",
            "/proc/sys/fs/nr_open": "1048576",
            "/proc/sys/vm/max_map_count": "65530",
            "/proc/swaps": SWAPS + "/dev/sda3                               partition\t8388604\t\t0\t\t-2",
            "/usr/sbin/update-grub": "",
            "/run/systemd/system/x": "",
            f"{CPU}/online": "0-3",
            f"{CPU}/cpuidle/current_driver": "intel_idle",
            f"{CPU}/cpuidle/current_governor": "menu",
            f"{CPU}/intel_pstate/no_turbo": "0",
            "/sys/devices/system/node/online": "0-1",
            "/sys/devices/system/node/node0/cpulist": "0-1",
            "/sys/devices/system/node/node0/distance": "10 21",
            "/sys/devices/system/node/node0/meminfo": "Node 0 MemTotal:       527764204 kB\nNode 0 MemFree: 5 kB",
            "/sys/devices/system/node/node1/cpulist": "2-3",
            "/sys/devices/system/node/node1/distance": "21 10",
            "/sys/devices/system/node/node1/meminfo": "Node 1 MemTotal:       528437000 kB",
            "/sys/module/pcie_aspm/parameters/policy": "[default] performance powersave powersupersave",
            "/sys/kernel/security/lockdown": "none [integrity] confidentiality",
            "/sys/kernel/mm/transparent_hugepage/enabled": "always [madvise] never",
            "/sys/kernel/mm/transparent_hugepage/defrag": "always defer defer+madvise [madvise] never",
            "/sys/module/zswap/parameters/enabled": "N",
            "/sys/class/iommu/dmar0/x": "",
            "/sys/kernel/iommu_groups/0/type": "identity",
            "/sys/kernel/iommu_groups/1/type": "identity",
            "/sys/devices/pci0000:00/nvme/nvme0/nvme0n1/queue/scheduler": "[none] mq-deadline kyber bfq",
            "/sys/devices/pci0000:00/nvme/nvme0/nvme0n1/queue/rotational": "0",
            "/sys/devices/pci0000:00/ata1/sda/queue/scheduler": "none [mq-deadline]",
            "/sys/devices/pci0000:00/ata1/sda/queue/rotational": "1",
            "/sys/devices/virtual/block/dm-0/queue/scheduler": "none",
            "/sys/devices/virtual/block/loop0/queue/scheduler": "none",
        }.items():
            self.write(path, content)
        self.write(SECURE_BOOT, b"\x06\0\0\0\x01")
        for name, target in {
            "nvme0n1": "pci0000:00/nvme/nvme0/nvme0n1",
            "sda": "pci0000:00/ata1/sda",
            "dm-0": "virtual/block/dm-0",
            "loop0": "virtual/block/loop0",
        }.items():
            (root / "sys/block").mkdir(exist_ok=True)
            (root / "sys/block" / name).symlink_to(f"../devices/{target}")

    def write(self, path: str, content: str | bytes) -> None:
        file = self.root / path.lstrip("/")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(content if isinstance(content, bytes) else f"{content}\n".encode())

    def remove(self, path: str) -> None:
        (self.root / path.lstrip("/")).unlink()

    def read(self, runner: CommandRunner | None = None, clock: Any = right_clock) -> dict[str, Any]:
        found = HostTuningReader(FileTree(str(self.root)), runner or Recorded(), clock).read()
        json.dumps(found, allow_nan=False).encode("utf-8")
        assert_every_null_has_a_reason(found)
        return found


@pytest.fixture
def host(tmp_path: Path) -> Host:
    return Host(tmp_path)


@pytest.fixture(scope="module")
def shared_host(tmp_path_factory: pytest.TempPathFactory) -> Host:
    """For tests that leave it as they found it."""
    return Host(tmp_path_factory.mktemp("host"))


def test_a_server(host: Host) -> None:
    found = host.read()
    assert found["unknown"] == {}
    assert found["container"] == ""
    assert found["kernel"] == {
        "release": "6.8.0-52-generic",
        "command_line": "BOOT_IMAGE=/vmlinuz root=/dev/sda2 ro quiet iommu=pt",
        "command_line_tool": "update-grub",
        "unknown": {},
    }
    idle = found["cpu_idle"]
    assert (idle["driver"], idle["governor"]) == ("intel_idle", "menu")
    assert [group["cpus"] for group in idle["groups"]] == ["0-3"]
    assert idle["deepest_enabled"]["name"] == "C6"
    assert idle["greatest_latency_microseconds"] == 133
    assert idle["deviating_cpus"] == ""
    assert found["cpu_frequency"] == {
        "drivers": {"intel_pstate": "0-3"},
        "governors": {"powersave": "0-3"},
        "available_governors": ["performance", "powersave"],
        "energy_performance_preferences": {"balance_performance": "0-3"},
        "turbo": True,
        "unknown": {},
    }
    assert found["aspm"]["policy"] == "default"
    assert found["iommu"] == {
        "active": True,
        "units": ["dmar0"],
        "groups": 2,
        "group_types": {"identity": 2},
        "mode": "passthrough",
        "arguments": {"iommu": "pt"},
        "unknown": {},
    }
    assert found["kernel_lockdown"] == "integrity"
    assert found["secure_boot"]["efi"] is True
    assert found["secure_boot"]["enabled"] is True
    assert found["secure_boot"]["setup_mode"] is None
    assert found["numa"]["nodes"][0] == {
        "node": 0,
        "cpus": "0-1",
        "memory_bytes": 527764204 * 1024,
        "distances": {"0": 10, "1": 21},
        "unknown": {},
    }
    assert found["numa"]["balancing"] is True
    assert {disk["device"]: (disk["kind"], disk["scheduler"]) for disk in found["disks"]} == {
        "dm-0": ("virtual", "none"),
        "nvme0n1": ("nvme", "none"),
        "sda": ("hdd", "mq-deadline"),
    }
    assert found["swap"]["active"] is True
    assert found["swap"]["areas"][0]["size_bytes"] == 8388604 * 1024
    assert found["transparent_hugepages"] == {"enabled": "madvise", "defrag": "madvise", "unknown": {}}
    assert found["time"]["service"] == "chrony"
    assert found["time"]["services"] == {
        "chrony.service": {"active": "active", "enabled": "enabled"},
        "systemd-timesyncd.service": {"active": "inactive", "enabled": "masked"},
    }
    assert found["time"]["synchronized"] is True
    assert found["limits"]["service_open_files_soft"] == 1024
    assert found["limits"]["service_locked_memory_bytes"] == "infinity"


def test_a_host_that_shows_nothing(tmp_path: Path) -> None:
    """Nothing is zero, off or disabled because its file is not there."""
    empty = HostTuningReader(
        FileTree(str(tmp_path)), Recorded(Answer(None, complaint="not found: systemctl")), forbidden_clock
    )
    found = empty.read()
    assert_every_null_has_a_reason(found)
    assert found["container"] is None
    assert found["kernel_lockdown"] is None
    for section, fields in {
        "kernel": ("release", "command_line", "command_line_tool"),
        "cpu_idle": ("driver", "groups", "deepest_enabled", "greatest_latency_microseconds", "deviating_cpus"),
        "cpu_frequency": ("drivers", "governors", "available_governors", "turbo"),
        "aspm": ("policy", "choices"),
        "iommu": ("active", "units", "groups", "group_types", "mode"),
        "secure_boot": ("efi", "enabled", "setup_mode"),
        "numa": ("nodes", "balancing"),
        "swap": ("active", "areas", "zswap"),
        "transparent_hugepages": ("enabled", "defrag"),
        "time": ("synchronized", "maximum_error_microseconds", "services", "service"),
        "limits": ("open_files", "open_files_per_process"),
    }.items():
        assert [found[section][field] for field in fields] == [None] * len(fields), section
    assert found["disks"] == []
    assert found["time"]["unknown"]["services"] == "not found: systemctl"
    assert "Operation not permitted" in found["time"]["unknown"]["synchronized"]


def test_cpus_that_deviate(host: Host) -> None:
    for cpu in range(4):
        host.write(f"{CPU}/cpu{cpu}/cpuidle/state3/disable", "0" if cpu == 2 else "1")
    idle = host.read()["cpu_idle"]
    assert [group["cpus"] for group in idle["groups"]] == ["0-1,3", "2"]
    assert idle["deepest_enabled"]["name"] == "C1E"
    assert idle["deviating_cpus"] == "2"
    assert idle["greatest_latency_microseconds"] == 133, "one CPU is enough to be late"


def test_cpus_that_are_off_line_do_not_count(host: Host) -> None:
    host.write(f"{CPU}/online", "0-1")
    host.write(f"{CPU}/cpu3/cpufreq/scaling_governor", "performance")
    found = host.read()
    assert found["cpu_idle"]["groups"][0]["cpus"] == "0-1"
    assert found["cpu_frequency"]["governors"] == {"powersave": "0-1"}


def test_a_latency_that_is_not_known_makes_the_greatest_unknown(host: Host) -> None:
    host.write(f"{CPU}/cpu1/cpuidle/state1/latency", "junk")
    assert host.read()["cpu_idle"]["greatest_latency_microseconds"] is None
    for cpu in range(4):
        host.write(f"{CPU}/cpu{cpu}/cpuidle/state1/disable", "1")
    assert host.read()["cpu_idle"]["greatest_latency_microseconds"] == 133, "a disabled state is not waited for"


@pytest.mark.parametrize(
    ("line", "driver", "note"),
    [
        ("intel_idle.max_cstate=0", "acpi_idle", "not the C-states"),
        ("intel_idle.max_cstate=1", "acpi_idle", "does nothing here: the driver is acpi_idle"),
        ("processor.max_cstate=1", "intel_idle", "does nothing here"),
        ("idle=poll", "intel_idle", "never sleep"),
        ("intel_idle.max_cstate=1", "intel_idle", None),
        ("processor.max_cstate=1", "acpi_idle", None),
        ("quiet", "intel_idle", None),
    ],
)
def test_what_arguments_for_sleep_states_truly_do(host: Host, line: str, driver: str, note: str | None) -> None:
    host.write("/proc/cmdline", line)
    host.write(f"{CPU}/cpuidle/current_driver", driver)
    notes = host.read()["cpu_idle"]["notes"]
    assert len(notes) == (0 if note is None else 1)
    assert note is None or note in notes[0]


def test_pcie_aspm_off_is_not_off(host: Host) -> None:
    host.write("/proc/cmdline", "pcie_aspm=off")
    assert "does not switch it off" in host.read()["aspm"]["notes"][0]


@pytest.mark.parametrize(
    ("types", "mode"),
    [
        ((), "off"),
        (("identity", "identity"), "passthrough"),
        (("DMA", "DMA-FQ"), "translated"),
        (("identity", "DMA"), "mixed"),
        (("identity", None), None),
        ((None, None), None),
    ],
)
def test_iommu(tmp_path: Path, types: Sequence[str | None], mode: str | None) -> None:
    (tmp_path / "sys/class/iommu").mkdir(parents=True)
    groups = tmp_path / "sys/kernel/iommu_groups"
    groups.mkdir(parents=True)
    for index, kind in enumerate(types):
        (groups / str(index)).mkdir()
        if kind:
            (groups / str(index) / "type").write_text(kind)
    iommu = HostTuningReader(FileTree(str(tmp_path)), Recorded(), right_clock).iommu()
    assert iommu["mode"] == mode
    assert iommu["active"] is bool(types)
    assert_every_null_has_a_reason(iommu)


@pytest.mark.parametrize(
    ("content", "enabled"),
    [
        (b"\x06\0\0\0\x01", True),
        (b"\x06\0\0\0\0", False),
        (b"\x06\0\0\0\x02", None),
        (b"\x06\0\0\0", None),
        (b"\x06\0\0\0\x01\0", None),
        (b"1", None),
        (b"", None),
    ],
)
def test_secure_boot(host: Host, content: bytes, enabled: bool | None) -> None:
    host.write(SECURE_BOOT, content)
    assert host.read()["secure_boot"]["enabled"] is enabled


def test_a_host_that_was_not_booted_by_efi(tmp_path: Path) -> None:
    (tmp_path / "sys/firmware/acpi").mkdir(parents=True)
    boot = HostTuningReader(FileTree(str(tmp_path)), Recorded(), right_clock).secure_boot()
    assert boot["efi"] is False
    assert boot["enabled"] is None
    assert boot["unknown"]["enabled"] == "the host was not booted by EFI"


@pytest.mark.parametrize(
    ("rows", "areas"),
    [
        ("", []),
        ("/dev/zram0  partition 10 5 100\n", [("/dev/zram0", "compressed_memory", 10240, 5120, 100)]),
        ("/swap\\040file file 4 0 -3", [("/swap file", "file", 4096, 0, -3)]),
        ("/swapfile\\040(deleted) file 4 0 -3", [("/swapfile (deleted)", "file", 4096, 0, -3)]),
        ("/dev/sda3 partition 4 0", None),
        ("/dev/sda3 partition four 0 -2", None),
        ("junk", None),
    ],
)
def test_swap_areas(rows: str, areas: list[tuple[Any, ...]] | None) -> None:
    found = parse_swaps(SWAPS + rows)
    assert (None if found is None else [tuple(area.values()) for area in found]) == areas


def test_no_swap_is_known_and_no_file_is_not(host: Host) -> None:
    host.write("/proc/swaps", SWAPS)
    assert host.read()["swap"]["active"] is False
    host.remove("/proc/swaps")
    assert host.read()["swap"]["active"] is None


@pytest.mark.parametrize(
    ("line", "name", "value"),
    [
        ("iommu=pt", "iommu", "pt"),
        ("iommu=pt iommu=off", "iommu", "off"),
        ("quiet", "quiet", ""),
        ("intel-idle.max-cstate=1", "intel_idle.max_cstate", "1"),
        ('dyndbg="file a.c +p" iommu=pt', "iommu", "pt"),
        ('dyndbg="file iommu=pt"', "iommu", None),
        ('a="open iommu=pt', "iommu", None),
        ("single -- iommu=pt", "iommu", None),
        ("iommu=a=b", "iommu", "a=b"),
        ("", "iommu", None),
    ],
)
def test_kernel_arguments(line: str, name: str, value: str | None) -> None:
    assert KernelArguments(line).value(name) == value


def test_an_argument_as_it_is_written() -> None:
    arguments = KernelArguments("quiet iommu=pt")
    assert arguments.has("iommu=pt")
    assert arguments.has("quiet")
    assert not arguments.has("iommu=off")
    assert not arguments.has("iommu")
    assert not arguments.has("intel_iommu=on")


@pytest.mark.parametrize(
    ("files", "kind"),
    [
        ({"/run/systemd/container": "podman", "/run/systemd/system/x": ""}, "podman"),
        ({"/run/.containerenv": ""}, "podman"),
        ({"/.dockerenv": ""}, "docker"),
        ({"/run/systemd/system/x": ""}, ""),
        ({}, None),
    ],
)
def test_container(tmp_path: Path, files: dict[str, str], kind: str | None) -> None:
    for path, content in files.items():
        file = tmp_path / path.lstrip("/")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(content)
    assert container(FileTree(str(tmp_path))) == kind


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/", "ext4"),
        ("/etc/hosts", "ext4"),
        ("/sys/x", "tmpfs"),
        ("/sys", "tmpfs"),
        ("/sys/fs/cgroup/x", "cgroup2"),
        ("/sysx", "ext4"),
        ("/proc/swaps", "proc"),
    ],
)
def test_file_system_of_a_path(tmp_path: Path, path: str, kind: str) -> None:
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/mountinfo").write_text(
        "21 1 8:1 / / rw - ext4 /dev/sda1 rw\n"
        "22 21 0:20 / /proc rw,nosuid shared:4 - proc proc rw\n"
        "23 21 0:21 / /sys rw - sysfs sysfs rw\n"
        "junk - \n- - -\n\n1 2 3 4 5 6 7\n"
        "24 21 0:22 / /sys rw - tmpfs own rw\n"
        "25 24 0:23 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw",
        encoding="ascii",
    )
    assert file_system(FileTree(str(tmp_path)), path) == kind
    assert file_system(FileTree(str(tmp_path / "proc")), path) is None


@given(st.text(max_size=80) | st.text(alphabet="1 /-ab\n", max_size=80))
def test_no_mounts_make_the_reader_fail(tmp_path_factory: pytest.TempPathFactory, text: str) -> None:
    root = tmp_path_factory.mktemp("mounts")
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/self/mountinfo").write_text(text, encoding="utf-8")
    file_system(FileTree(str(root)), "/sys/x")


def test_nobody_keeps_the_time(host: Host) -> None:
    stopped = UNITS.replace("ActiveState=active", "ActiveState=failed")
    time = host.read(Recorded(units=Answer(0, stopped)))["time"]
    assert time["service"] is None
    assert time["unknown"]["service"] == "none of them runs"
    assert time["services"]["chrony.service"]["active"] == "failed"


def test_systemctl_that_fails(host: Host) -> None:
    found = host.read(Recorded(units=Answer(1), defaults=Answer(1, complaint="Host is down")))
    assert found["time"]["unknown"]["services"] == "systemctl ended with status 1"
    assert found["limits"]["unknown"]["service_open_files_hard"] == "Host is down"


def test_distances_that_do_not_fit_the_nodes(host: Host) -> None:
    host.write("/sys/devices/system/node/node0/distance", "10 21 21")
    assert host.read()["numa"]["nodes"][0]["distances"] is None


def test_the_machines_own_clock_is_asked_without_a_change() -> None:
    try:
        clock = kernel_clock()
    except OSError:
        pytest.skip("the kernel may not be asked here")
    assert clock.maximum_error >= 0
    assert isinstance(clock.synchronized, bool)


@given(st.text(max_size=80), st.text(alphabet='a="- \n', max_size=40))
def test_no_text_makes_a_parser_fail(text: str, almost: str) -> None:
    for each in (text, almost):
        parse_swaps(each)
        parse_swaps(SWAPS + each)
        arguments = KernelArguments(each)
        arguments.value(each)
        arguments.has(each)


FILES = (
    "/proc/cmdline",
    "/proc/swaps",
    "/proc/sys/kernel/numa_balancing",
    f"{CPU}/online",
    f"{CPU}/cpu1/cpuidle/state2/latency",
    f"{CPU}/cpu1/cpuidle/state2/disable",
    f"{CPU}/cpu1/cpufreq/scaling_governor",
    "/sys/devices/system/node/node0/distance",
    "/sys/devices/system/node/node0/meminfo",
    "/sys/devices/system/node/online",
    "/sys/module/pcie_aspm/parameters/policy",
    "/sys/kernel/iommu_groups/0/type",
    "/sys/block/sda/queue/rotational",
    SECURE_BOOT,
)


@given(
    st.dictionaries(st.sampled_from(FILES), st.none() | st.binary(max_size=60), max_size=4),
    st.text(max_size=60) | st.text(alphabet="Id=chrony.sevLoadSt\n", max_size=60),
)
def test_no_files_and_no_answers_make_the_reader_fail(
    shared_host: Host, files: dict[str, bytes | None], output: str
) -> None:
    intact = {path: (shared_host.root / path.lstrip("/")).read_bytes() for path in files}
    for path, content in files.items():
        if content is None:
            shared_host.remove(path)
        else:
            shared_host.write(path, content)
    try:
        shared_host.read(Recorded(Answer(0, output), Answer(0, output)))
    finally:
        for path, content in intact.items():
            shared_host.write(path, content)
