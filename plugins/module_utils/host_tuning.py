# Copyright (c) 2026, the Ringmaster authors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What decides the latency of a host below the engines: sleep states, clocks, IOMMU, memory, disks, time.

Sources: the kernel's ``Documentation/admin-guide`` (pm/cpuidle, pm/cpufreq, kernel-parameters, mm/transhuge) and
``Documentation/ABI`` (sysfs-devices-system-cpu, sysfs-kernel-iommu_groups, sysfs-bus-pci), ``swapon(8)``,
``adjtimex(2)``, and for Secure Boot the UEFI specification. Nothing here imports Ansible.
"""

from __future__ import annotations

import ctypes
import os
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from ansible_collections.ringmaster.inference.plugins.module_utils.commands import CommandRunner
from ansible_collections.ringmaster.inference.plugins.module_utils.file_tree import (
    FileTree,
    format_cpus,
    parse_choice,
    parse_cpus,
    parse_integer,
)
from ansible_collections.ringmaster.inference.plugins.module_utils.findings import Findings, why
from ansible_collections.ringmaster.inference.plugins.module_utils.pcie import ASPM_POLICY

CPUS = "/sys/devices/system/cpu"
NODES = "/sys/devices/system/node"
IOMMU_UNITS, IOMMU_GROUPS = "/sys/class/iommu", "/sys/kernel/iommu_groups"
LOCKDOWN = "/sys/kernel/security/lockdown"
FIRMWARE = "/sys/firmware"
# The GUID is EFI_GLOBAL_VARIABLE of the UEFI specification.
EFI_VARIABLE = "/sys/firmware/efi/efivars/{}-8be4df61-93ca-11d2-aa0d-00e098032b8c"
DISKS = "/sys/block"
SWAPS = "/proc/swaps"
HUGEPAGES = "/sys/kernel/mm/transparent_hugepage"
COMMAND_LINE = "/proc/cmdline"

# Unit -> the name its package is known by. The first that runs is the one that keeps the time.
TIME_SERVICES = {
    "chrony.service": "chrony",
    "chronyd.service": "chrony",
    "systemd-timesyncd.service": "systemd-timesyncd",
    "ntpsec.service": "ntpsec",
    "ntpd.service": "ntp",
    "ntp.service": "ntp",
    "openntpd.service": "openntpd",
}
IDLE_ARGUMENTS = ("intel_idle.max_cstate", "processor.max_cstate", "idle", "cpuidle.off")
IOMMU_ARGUMENTS = ("iommu", "intel_iommu", "amd_iommu", "iommu.passthrough", "iommu.strict")
ASPM_ARGUMENTS = ("pcie_aspm", "pcie_aspm.policy")

_STA_UNSYNC = 0x0040  # adjtimex(2): the clock is not synchronised
_TIME_ERROR = 5  # the same, as adjtimex's return value
_EFI_ATTRIBUTES = 4  # bytes before the value in a file of efivarfs


@dataclass(frozen=True)
class KernelClock:
    """What the kernel knows of its own clock. The errors are in microseconds, as its time daemon told it."""

    synchronized: bool
    maximum_error: int
    estimated_error: int


class _Timex(ctypes.Structure):
    # The beginning of struct timex, and room for the rest of it on every architecture.
    _fields_ = [
        ("modes", ctypes.c_uint),
        ("offset", ctypes.c_long),
        ("freq", ctypes.c_long),
        ("maxerror", ctypes.c_long),
        ("esterror", ctypes.c_long),
        ("status", ctypes.c_int),
        ("rest", ctypes.c_byte * 512),
    ]


def kernel_clock() -> KernelClock:
    """Ask this machine's kernel, without changing anything. Raises OSError where it may not be asked."""
    try:
        adjtimex = ctypes.CDLL(None, use_errno=True).adjtimex
    except AttributeError as error:
        raise OSError(0, "the C library has no adjtimex") from error
    timex = _Timex()
    state = adjtimex(ctypes.byref(timex))
    if state < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return KernelClock(state != _TIME_ERROR and not timex.status & _STA_UNSYNC, timex.maxerror, timex.esterror)


class KernelArguments:
    """The kernel's command line. Names may be written with ``-`` or ``_``; of one given twice the last one counts."""

    def __init__(self, line: str) -> None:
        self.line = line
        self.values: dict[str, str] = {}
        for word in _words(line):
            if word == "--":
                break  # what follows is for the first process
            name, _equals, value = word.partition("=")
            self.values[_plain(name)] = value

    def value(self, name: str) -> str | None:
        """Value of an argument (empty for one without); None if it is not given."""
        return self.values.get(_plain(name))

    def has(self, argument: str) -> bool:
        """Whether an argument stands there as it is written in `argument` (``iommu=pt`` or ``quiet``)."""
        name, _equals, value = argument.partition("=")
        return self.value(name) == value

    def chosen(self, names: Iterable[str]) -> dict[str, str]:
        """Those of `names` that are given, with their values."""
        return {name: value for name in names if (value := self.value(name)) is not None}


def _words(line: str) -> list[str]:
    """The kernel's own way to split: white space outside of double quotes, which are dropped."""
    return [word.replace('"', "") for word in re.findall(r'(?:"[^"]*"?|[^\s"])+', line)]


def _plain(name: str) -> str:
    return name.replace("-", "_")


@dataclass(frozen=True)
class IdleState:
    """One state a CPU can sleep in. `latency` is the time to wake up, in microseconds; `folder` is ``state2``."""

    folder: str
    name: str
    latency: int | None
    disabled: bool | None

    def document(self) -> dict[str, Any]:
        """For a module's result."""
        found = Findings()
        found.note("state", self.folder)
        found.note("name", self.name or None, "the kernel gives no name")
        found.note("latency_microseconds", self.latency, "the file latency holds no number")
        found.note("disabled", self.disabled, "the file disable holds neither 0 nor 1")
        return found.document()


def online_cpus(tree: FileTree) -> list[int]:
    """Numbers of the CPUs that are on line."""
    present = [int(name[3:]) for name in tree.names(CPUS) if re.match(r"cpu[0-9]{1,6}\Z", name)]
    online = parse_cpus(tree.text(f"{CPUS}/online"))
    return present if online is None else [number for number in present if number in set(online)]


def idle_states(tree: FileTree, cpu: int) -> list[IdleState]:
    """States of one CPU, the shallowest first; empty if there are none."""
    states = []
    folder = f"{CPUS}/cpu{cpu}/cpuidle"
    for name in tree.names(folder):
        if re.match(r"state[0-9]{1,3}\Z", name):
            disabled = tree.integer(f"{folder}/{name}/disable")
            latency = tree.integer(f"{folder}/{name}/latency")
            states.append(
                IdleState(
                    name,
                    tree.text(f"{folder}/{name}/name") or "",
                    latency if latency is not None and latency >= 0 else None,
                    None if disabled is None else disabled != 0,
                )
            )
    return states


def governor(tree: FileTree, cpu: int) -> str | None:
    """The CPU's frequency governor; None if it has none."""
    return tree.text(f"{CPUS}/cpu{cpu}/cpufreq/scaling_governor") or None


def parse_swaps(text: str) -> list[dict[str, Any]] | None:
    """Swap areas of ``/proc/swaps``: ``path``, ``kind``, ``size_bytes``, ``used_bytes``, ``priority``; None for junk.

    ``kind`` is ``partition``, ``file`` or ``compressed_memory`` (zram). Sizes are in KiB there.
    """
    areas = []
    for line in text.splitlines()[1:]:
        match = re.match(r"(\S+)\s+(partition|file)\s+([0-9]{1,18})\s+([0-9]{1,18})\s+(-?[0-9]{1,9})\s*\Z", line)
        if not match:
            return None
        path = re.sub(r"\\([0-7]{3})", lambda octal: chr(int(octal[1], 8)), match[1])
        areas.append(
            {
                "path": path,
                "kind": "compressed_memory" if re.match(r"/dev/zram[0-9]+\Z", path) else match[2],
                "size_bytes": int(match[3]) * 1024,
                "used_bytes": int(match[4]) * 1024,
                "priority": int(match[5]),
            }
        )
    return areas


def container(tree: FileTree) -> str | None:
    """Kind of container that this host is (``podman``); empty for none, None if it can't be told."""
    kind = tree.text("/run/systemd/container")
    if kind:
        return kind
    if tree.exists("/run/.containerenv"):
        return "podman"
    if tree.exists("/.dockerenv"):
        return "docker"
    return "" if tree.exists("/run/systemd/system") else None


def file_system(tree: FileTree, path: str) -> str | None:
    """Kind of the file system that holds `path` (``sysfs``, ``proc``, ``tmpfs``); None if it can't be told."""
    resolved = tree.resolve(path) or path
    longest, kind = -1, None
    for line in (tree.text("/proc/self/mountinfo") or "").splitlines():
        # proc(5): number, parent, device, root, mount point, options …, a dash, kind, source, options
        mount, dash, rest = line.partition(" - ")
        fields, kinds = mount.split(" "), rest.split(" ")
        point = fields[4].rstrip("/") if len(fields) > 5 and dash else None
        # Of two on one mount point the later one covers the other.
        if point is not None and f"{resolved}/".startswith(f"{point}/") and len(point) >= longest:
            longest, kind = len(point), kinds[0]
    return kind


class HostTuningReader:
    """Reads what the module ``host_tuning_info`` returns; see there for every field.

    `clock` asks the kernel for the state of its clock.
    """

    def __init__(self, tree: FileTree, runner: CommandRunner, clock: Callable[[], KernelClock] = kernel_clock) -> None:
        self.tree = tree
        self.runner = runner
        self.clock = clock
        self.arguments = KernelArguments(tree.text(COMMAND_LINE) or "")

    def read(self) -> dict[str, Any]:
        """All of it."""
        found = Findings()
        kind = container(self.tree)
        found.note("container", kind, "neither systemd nor a container's mark is there")
        found.note("kernel", self.kernel())
        found.note("cpu_idle", self.cpu_idle())
        found.note("cpu_frequency", self.cpu_frequency())
        found.note("aspm", self.aspm())
        found.note("iommu", self.iommu())
        lockdown = parse_choice(self.tree.text(LOCKDOWN))[0]
        found.note_file("kernel_lockdown", lockdown, self.tree, LOCKDOWN, "a word in brackets")
        found.note("secure_boot", self.secure_boot())
        found.note("numa", self.numa())
        found.note("disks", self.disks())
        found.note("swap", self.swap())
        found.note("transparent_hugepages", self.hugepages())
        found.note("time", self.time())
        found.note("limits", self.limits())
        return found.document()

    def kernel(self) -> dict[str, Any]:
        """Release and command line, and what changes the command line on this host."""
        found = Findings()
        release = "/proc/sys/kernel/osrelease"
        found.note_file("release", self.tree.text(release) or None, self.tree, release, "a release")
        line = self.tree.text(COMMAND_LINE)
        found.note_file("command_line", line or None, self.tree, COMMAND_LINE, "a command line")
        tool = next((tool for tool in ("update-grub", "grubby") if self._has_command(tool)), None)
        found.note("command_line_tool", tool, "neither update-grub (Debian family) nor grubby (EL family) is installed")
        return found.document()

    def cpu_idle(self) -> dict[str, Any]:
        """Sleep states, CPUs with the same ones together, and what the command line says about them."""
        found = Findings()
        for name in ("driver", "governor"):
            path = f"{CPUS}/cpuidle/current_{name}"
            value = self.tree.text(path) or self.tree.text(f"{path}_ro")
            found.note_file(name, value or None, self.tree, path, f"a {name}")
        groups: dict[tuple[IdleState, ...], list[int]] = {}
        for cpu in online_cpus(self.tree):
            groups.setdefault(tuple(idle_states(self.tree, cpu)), []).append(cpu)
        groups.pop((), None)
        ordered = sorted(groups.items(), key=lambda group: (-len(group[1]), group[1][0]))
        no_states = f"{CPUS}/cpu*/cpuidle: no states (the kernel or the hypervisor manages none)"
        documents = [
            {"cpus": format_cpus(cpus), "states": [state.document() for state in states]} for states, cpus in ordered
        ]
        found.note("groups", documents or None, no_states)
        deepest = _deepest(ordered[0][0]) if ordered else None
        found.note("deepest_enabled", deepest.document() if deepest else None, no_states)
        # The most common set of states is what the host was meant to have.
        others = [cpu for _states, cpus in ordered[1:] for cpu in cpus]
        found.note("deviating_cpus", format_cpus(others) if ordered else None, no_states)
        latencies = [state.latency for states, _cpus in ordered for state in states if not state.disabled]
        known = [latency for latency in latencies if latency is not None]
        greatest = max(known) if known and len(known) == len(latencies) else None
        found.note(
            "greatest_latency_microseconds",
            greatest,
            "the latency of an enabled state is not known" if ordered else no_states,
        )
        found.note("arguments", self.arguments.chosen(IDLE_ARGUMENTS))
        found.note("notes", _idle_notes(found.values["arguments"], found.values["driver"]))
        return found.document()

    def cpu_frequency(self) -> dict[str, Any]:
        """Drivers and governors with the CPUs that have them."""
        found = Findings()
        no_scaling = f"{CPUS}/cpu*/cpufreq: not there (the kernel or the hypervisor gives no control of frequencies)"
        cpus = online_cpus(self.tree)
        for field, file in {
            "drivers": "scaling_driver",
            "governors": "scaling_governor",
            "energy_performance_preferences": "energy_performance_preference",
        }.items():
            values: dict[str, list[int]] = {}
            for cpu in cpus:
                value = self.tree.text(f"{CPUS}/cpu{cpu}/cpufreq/{file}")
                if value:
                    values.setdefault(value, []).append(cpu)
            grouped = {value: format_cpus(having) for value, having in sorted(values.items())}
            found.note(
                field, grouped or None, no_scaling if field != "energy_performance_preferences" else f"no {file}"
            )
        offered = [self.tree.text(f"{CPUS}/cpu{cpu}/cpufreq/scaling_available_governors") for cpu in cpus]
        lists = [text.split() for text in offered if text]
        common = [name for name in lists[0] if all(name in each for each in lists)] if lists else None
        found.note("available_governors", common, no_scaling)
        boost = self.tree.integer(f"{CPUS}/cpufreq/boost")
        no_turbo = self.tree.integer(f"{CPUS}/intel_pstate/no_turbo")
        turbo = boost if boost in (0, 1) else 1 - no_turbo if no_turbo in (0, 1) else None
        found.note(
            "turbo", None if turbo is None else bool(turbo), "neither cpufreq/boost nor intel_pstate/no_turbo tells"
        )
        return found.document()

    def aspm(self) -> dict[str, Any]:
        """The kernel's policy for PCI Express links; what each link does is in ``pcie_info``."""
        found = Findings()
        policy, choices = parse_choice(self.tree.text(ASPM_POLICY))
        found.note_file("policy", policy, self.tree, ASPM_POLICY, "a word in brackets")
        found.note_file("choices", choices or None, self.tree, ASPM_POLICY, "words")
        found.note("arguments", self.arguments.chosen(ASPM_ARGUMENTS))
        notes = []
        if self.arguments.value("pcie_aspm") == "off":
            notes.append("pcie_aspm=off: the kernel leaves ASPM as the firmware set it; it does not switch it off")
        found.note("notes", notes)
        return found.document()

    def iommu(self) -> dict[str, Any]:
        """Whether an IOMMU is in use, and whether it translates what devices do."""
        found = Findings()
        units = self.tree.names(IOMMU_UNITS)
        groups = self.tree.names(IOMMU_GROUPS)
        visible = self.tree.exists(IOMMU_GROUPS)
        no_view = f"{IOMMU_GROUPS}: no such file"
        found.note("units", units if self.tree.exists(IOMMU_UNITS) else None, f"{IOMMU_UNITS}: no such file")
        active = bool(units or groups) if visible or units else None
        found.note("active", active, no_view)
        found.note("groups", len(groups) if visible else None, no_view)
        types: dict[str, int] = {}
        for group in groups:
            kind = self.tree.text(f"{IOMMU_GROUPS}/{group}/type") or "unknown"
            types[kind] = types.get(kind, 0) + 1
        found.note("group_types", types if visible else None, no_view)
        mode = _iommu_mode(types) if groups else "off" if active is False else None
        reason = "no group tells its type (kernel before 5.11)" if groups else no_view if not visible else "no groups"
        found.note("mode", mode, reason)
        found.note("arguments", self.arguments.chosen(IOMMU_ARGUMENTS))
        return found.document()

    def secure_boot(self) -> dict[str, Any]:
        """State at boot; a variable of the firmware."""
        found = Findings()
        efi = True if self.tree.exists(f"{FIRMWARE}/efi") else False if self.tree.names(FIRMWARE) else None
        found.note("efi", efi, f"{FIRMWARE} shows nothing")
        for field, variable in {"enabled": "SecureBoot", "setup_mode": "SetupMode"}.items():
            path = EFI_VARIABLE.format(variable)
            content = self.tree.data(path)
            value = content[-1] if content is not None and len(content) == _EFI_ATTRIBUTES + 1 else None
            reason = (
                "the host was not booted by EFI" if efi is False else why(self.tree, path, "4 bytes and then 0 or 1")
            )
            found.note(field, bool(value) if value in (0, 1) else None, reason)
        return found.document()

    def numa(self) -> dict[str, Any]:
        """Memory nodes."""
        found = Findings()
        numbers = [int(name[4:]) for name in self.tree.names(NODES) if re.match(r"node[0-9]{1,5}\Z", name)]
        nodes = [self._node(number, numbers) for number in numbers]
        found.note("nodes", nodes or None, f"{NODES}: no nodes")
        path = "/proc/sys/kernel/numa_balancing"
        balancing = self.tree.integer(path)
        found.note_file("balancing", None if balancing is None else balancing != 0, self.tree, path, "a number")
        return found.document()

    def _node(self, number: int, numbers: list[int]) -> dict[str, Any]:
        node = Findings()
        folder = f"{NODES}/node{number}"
        node.note("node", number)
        cpus = self.tree.text(f"{folder}/cpulist")
        node.note_file(
            "cpus", cpus if parse_cpus(cpus) is not None else None, self.tree, f"{folder}/cpulist", "a list of CPUs"
        )
        memory = re.search(r"MemTotal:\s+([0-9]{1,18}) kB", self.tree.text(f"{folder}/meminfo") or "")
        node.note_file(
            "memory_bytes", int(memory[1]) * 1024 if memory else None, self.tree, f"{folder}/meminfo", "a line MemTotal"
        )
        # One number for each node that is on line, in their order.
        online = parse_cpus(self.tree.text(f"{NODES}/online")) or numbers
        distances = [parse_integer(word) for word in (self.tree.text(f"{folder}/distance") or "").split()]
        fits = len(distances) == len(online) and None not in distances
        node.note_file(
            "distances",
            {str(other): distance for other, distance in zip(online, distances)} if fits else None,
            self.tree,
            f"{folder}/distance",
            "a number for each node",
        )
        return node.document()

    def disks(self) -> list[dict[str, Any]]:
        """Block devices with an I/O scheduler, except loop devices and memory disks."""
        return [
            self._disk(name) for name in self.tree.names(DISKS) if not re.match(r"(loop|ram|zram|sr|fd)[0-9]", name)
        ]

    def _disk(self, name: str) -> dict[str, Any]:
        disk = Findings()
        disk.note("device", name)
        path = f"{DISKS}/{name}/queue/scheduler"
        scheduler, schedulers = parse_choice(self.tree.text(path))
        disk.note_file("scheduler", scheduler, self.tree, path, "a word in brackets")
        disk.note_file("schedulers", schedulers or None, self.tree, path, "words")
        rotational = self.tree.integer(f"{DISKS}/{name}/queue/rotational")
        kind = None
        if name.startswith("nvme"):
            kind = "nvme"
        elif "/virtual/" in (self.tree.resolve(f"{DISKS}/{name}") or ""):
            kind = "virtual"
        elif re.match(r"(vd|xvd)", name):
            kind = "paravirtual"  # what its rotational says is the hypervisor's default and no news of the disk
        elif rotational in (0, 1):
            kind = "hdd" if rotational else "ssd"
        disk.note("kind", kind, f"{DISKS}/{name}/queue/rotational holds neither 0 nor 1")
        return disk.document()

    def swap(self) -> dict[str, Any]:
        """Swap areas in use."""
        found = Findings()
        text = self.tree.text(SWAPS)
        areas = parse_swaps(text) if text else None
        found.note_file("areas", areas, self.tree, SWAPS, "swap areas")
        found.note_file("active", None if areas is None else bool(areas), self.tree, SWAPS, "swap areas")
        path = "/sys/module/zswap/parameters/enabled"
        zswap = {"Y": True, "N": False}.get(self.tree.text(path) or "")
        found.note_file("zswap", zswap, self.tree, path, "Y or N")
        return found.document()

    def hugepages(self) -> dict[str, Any]:
        """Transparent huge pages."""
        found = Findings()
        for field in ("enabled", "defrag"):
            path = f"{HUGEPAGES}/{field}"
            found.note_file(field, parse_choice(self.tree.text(path))[0], self.tree, path, "a word in brackets")
        return found.document()

    def time(self) -> dict[str, Any]:
        """Who keeps the time, and whether the kernel knows its clock to be right."""
        found = Findings()
        fields = ("synchronized", "maximum_error_microseconds", "estimated_error_microseconds")
        try:
            clock = self.clock()
            values: tuple[Any, ...] = (clock.synchronized, clock.maximum_error, clock.estimated_error)
            complaint = ""
        except OSError as error:
            values, complaint = (None, None, None), f"the kernel may not be asked for its clock: {error.strerror}"
        for field, value in zip(fields, values):
            found.note(field, value, complaint)
        units, complaint = self._units(TIME_SERVICES)
        found.note("services", units, complaint)
        active = [TIME_SERVICES[unit] for unit, state in (units or {}).items() if state["active"] == "active"]
        found.note("service", active[0] if active else None, complaint or "none of them runs")
        return found.document()

    def _units(self, names: Iterable[str]) -> tuple[dict[str, dict[str, str]] | None, str]:
        """State of those of the units that are installed, and why there is none to tell."""
        command = ["systemctl", "show", "--property=Id,LoadState,ActiveState,UnitFileState", *names]
        answer = self.runner.run(command)
        if not answer.ok:
            return None, answer.complaint or f"systemctl ended with status {answer.status}"
        units = {}
        for block in answer.output.split("\n\n"):
            unit = _properties(block)
            # An alias (chronyd.service on Debian) answers with the name of the real unit.
            if unit.get("LoadState") in ("loaded", "masked") and unit.get("Id") in TIME_SERVICES:
                units[unit["Id"]] = {"active": unit.get("ActiveState", ""), "enabled": unit.get("UnitFileState", "")}
        return units, ""

    def limits(self) -> dict[str, Any]:
        """The kernel's bounds, and what systemd gives a service that asks for nothing."""
        found = Findings()
        for field, path in {
            "open_files": "/proc/sys/fs/file-max",
            "open_files_per_process": "/proc/sys/fs/nr_open",
            "memory_maps_per_process": "/proc/sys/vm/max_map_count",
        }.items():
            found.note_file(field, self.tree.integer(path), self.tree, path, "a number")
        names = {
            "service_open_files_soft": "DefaultLimitNOFILESoft",
            "service_open_files_hard": "DefaultLimitNOFILE",
            "service_locked_memory_bytes": "DefaultLimitMEMLOCK",
        }
        answer = self.runner.run(["systemctl", "show", *(f"--property={name}" for name in names.values())])
        properties = _properties(answer.output) if answer.ok else {}
        for field, name in names.items():
            text = properties.get(name)
            value = text if text == "infinity" else parse_integer(text)
            found.note(field, value, answer.complaint or f"systemctl tells no {name}")
        return found.document()

    def _has_command(self, name: str) -> bool:
        folders = ("/usr/local/sbin", "/usr/sbin", "/sbin", "/usr/bin", "/bin")
        return any(self.tree.exists(f"{folder}/{name}") for folder in folders)


def _properties(text: str) -> dict[str, str]:
    """Lines ``NAME=VALUE`` of systemctl."""
    return {name: value for name, equals, value in (line.partition("=") for line in text.splitlines()) if equals}


def _deepest(states: Iterable[IdleState]) -> IdleState | None:
    enabled = [state for state in states if not state.disabled]
    return enabled[-1] if enabled else None


def _iommu_mode(types: Mapping[str, int]) -> str | None:
    known = set(types) - {"unknown"}
    if not known or "unknown" in types:
        return None
    if known == {"identity"}:
        return "passthrough"
    return "mixed" if "identity" in known else "translated"


def _idle_notes(arguments: Mapping[str, str], driver: str | None) -> list[str]:
    """What the arguments truly do, where that is often taken for something else."""
    notes = []
    limit = arguments.get("intel_idle.max_cstate")
    if limit == "0":
        notes.append(
            "intel_idle.max_cstate=0 switches the driver intel_idle off, not the C-states: acpi_idle takes its place"
        )
    elif limit is not None and driver not in (None, "intel_idle"):
        notes.append(f"intel_idle.max_cstate={limit} does nothing here: the driver is {driver}")
    if "processor.max_cstate" in arguments and driver == "intel_idle":
        notes.append("processor.max_cstate does nothing here: it is for acpi_idle, and the driver is intel_idle")
    if arguments.get("idle") == "poll":
        notes.append("idle=poll: CPUs never sleep; they take full power and leave no room for turbo")
    return notes
