# Copyright (c) 2026, the Ringmaster authors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The driver stack of a host as it is: kernels, RDMA, driver, CUDA, NCCL; installed, held, on disk and loaded.

Sources: proc(5), the kernel's ``Documentation/ABI`` (sysfs-module, sysfs-bus-pci), ``reboot-required`` of Debian's
packages, NVIDIA's Driver Installation Guide. Nothing here imports Ansible.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from ansible_collections.ringmaster.inference.plugins.module_utils.commands import Answer, CommandRunner
from ansible_collections.ringmaster.inference.plugins.module_utils.driver_stack_formats import (
    architecture_of,
    locked,
    module_kind,
    parse_dkms,
    parse_dpkg,
    parse_modinfo,
    parse_nvidia_version,
    parse_ofed_info,
    parse_os_release,
    parse_pins,
    parse_rpm,
    parse_secure_boot,
    parse_test_key,
    parse_toolkit,
    parse_versionlock,
)
from ansible_collections.ringmaster.inference.plugins.module_utils.file_tree import FileTree
from ansible_collections.ringmaster.inference.plugins.module_utils.findings import Findings
from ansible_collections.ringmaster.inference.plugins.module_utils.host_tuning import HostTuningReader
from ansible_collections.ringmaster.inference.plugins.module_utils.stack_packages import OPERATIONS, owner
from ansible_collections.ringmaster.inference.plugins.module_utils.stack_profiles import operations_of
from ansible_collections.ringmaster.inference.plugins.module_utils.stack_versions import (
    compare,
    leading_numbers,
    upstream,
)

OS_RELEASE = ("/etc/os-release", "/usr/lib/os-release")
RUNNING = "/proc/sys/kernel/osrelease"
MODULES = "/lib/modules"
NVIDIA_VERSION = "/proc/driver/nvidia/version"
PCI = "/sys/bus/pci/devices"
PREFERENCES = "/etc/apt/preferences"
VERSION_LOCKS = ("/etc/dnf/plugins/versionlock.list", "/etc/yum/pluginconf.d/versionlock.list")
NEW_VERSION_LOCK = "/etc/dnf/versionlock.toml"  # dnf 5, whose form is another
REBOOT_REQUIRED = ("/run/reboot-required", "/var/run/reboot-required")
# Keys that DKMS signs modules with: Ubuntu's, Debian's and EL's.
SIGNING_KEYS = ("/var/lib/shim-signed/mok/MOK.der", "/var/lib/dkms/mok.pub")
# Name of the driver's module file: Debian adds a flavour to it.
_MODULE_FILE = re.compile(r"(nvidia(?:-current|-tesla-[0-9]+|-tesla|-legacy-[0-9a-z]+)?)\.ko(?:\.(?:xz|zst|gz))?\Z")
_NVIDIA = 0x10DE
_PACKAGE_TIMEOUT = 60.0  # seconds; a database of thousands of packages on a busy disk


class DriverStackReader:
    """Reads what the module ``driver_stack_info`` returns; see there for every field. Changes nothing."""

    def __init__(self, tree: FileTree, runner: CommandRunner) -> None:
        self.tree = tree
        self.runner = runner

    def read(self, profile: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """All of it. With a profile, its packages are told of too, whatever they are called."""
        found = Findings()
        system = self.system()
        found.note("os", system)
        packages, held = self._packages(found, system["family"], profile)
        found.note("held", held)
        installed = packages or {}
        found.note("kernel", self.kernel())
        running = found.values["kernel"]["running"]
        found.note("driver", self.driver(found.values["kernel"], installed))
        found.note("dkms", self.dkms())
        found.note("secure_boot", self.secure_boot())
        found.note("rdma", self.rdma(packages, running))
        found.note("cuda", self.cuda(installed))
        found.note("nccl", self.nccl(packages))
        found.note("fabric_manager", self.fabric_manager(packages))
        found.note("hardware", self.hardware())
        found.note("pending_reboot", self.pending_reboot(found.values))
        return found.document()

    # -- system and packages

    def system(self) -> dict[str, Any]:
        """Family, distribution, version and architecture, in Ansible's words."""
        system = Findings()
        text = next((text for path in OS_RELEASE if (text := self.tree.text(path))), None)
        parsed = parse_os_release(text or "")
        for field in ("family", "distribution", "version"):
            reason = f"{OS_RELEASE[0]} does not tell it" if text else f"{OS_RELEASE[0]} can't be read"
            system.note(field, parsed[field], reason)
        machine = self.runner.run(["uname", "-m"])
        system.note("architecture", machine.output.strip() or None if machine.ok else None, _said(machine, "uname -m"))
        return system.document()

    def _packages(
        self, found: Findings, family: str | None, profile: Mapping[str, Any] | None
    ) -> tuple[dict[str, list[str]] | None, dict[str, Any]]:
        listed = operations_of(profile) if profile else {}
        if family == "RedHat":
            command = ["rpm", "-qa", "--qf", r"%{NAME}\t%|EPOCH?{%{EPOCH}:}:{}|%{VERSION}-%{RELEASE}\n"]
            answer = self.runner.run(command, timeout=_PACKAGE_TIMEOUT)
            everything, on_hold = (parse_rpm(answer.output) if answer.ok else None), []
        else:
            command = ["dpkg-query", "--show", "--showformat", r"${Package}\t${Version}\t${db:Status-Abbrev}\n"]
            answer = self.runner.run(command, timeout=_PACKAGE_TIMEOUT)
            parsed = parse_dpkg(answer.output) if answer.ok else None
            everything, on_hold = parsed if parsed is not None else (None, [])
        reason = _said(answer, command[0]) if not answer.ok else f"{command[0]} answered something else than packages"
        mine = (
            None
            if everything is None
            else {name: everything[name] for name in sorted(everything) if name in listed or owner(name) is not None}
        )
        found.note("packages", None if mine is None else _by_operation(mine, listed), reason)
        return mine, self._held(family, mine, on_hold, reason)

    def _held(
        self, family: str | None, packages: Mapping[str, Sequence[str]] | None, on_hold: list[str], reason: str
    ) -> dict[str, Any]:
        """What keeps packages of the stack where they are."""
        held = Findings()
        if family == "RedHat":
            text = next((text for path in VERSION_LOCKS if (text := self.tree.raw(path)) is not None), None)
            entries = parse_versionlock(text or "")
            held.note("tool", "versionlock")
            held.note("pins", [])
            held.note("locks", entries)
            names = None if packages is None else locked(entries, packages)
            if text is None and self.tree.exists(NEW_VERSION_LOCK):
                names, reason = None, f"{NEW_VERSION_LOCK} of dnf 5 is not read"
        else:
            held.note("tool", "apt-mark")
            held.note("pins", self._pins())
            held.note("locks", [])
            names = None if packages is None else [name for name in on_hold if name in packages]
        held.note("packages", None if names is None else sorted(names), reason)
        return held.document()

    def _pins(self) -> list[dict[str, Any]]:
        folder = f"{PREFERENCES}.d"
        # As apt does: files without an extension or with .pref, of letters, digits, hyphens, underscores and dots.
        names = [name for name in self.tree.names(folder) if re.match(r"[A-Za-z0-9_-]+(\.pref)?\Z", name)]
        paths = [PREFERENCES, *(f"{folder}/{name}" for name in names)]
        return [{**pin, "file": path} for path in paths for pin in parse_pins(self.tree.raw(path) or "")]

    # -- kernel

    def kernel(self) -> dict[str, Any]:
        """The kernel that runs, and those that are installed, the oldest first."""
        kernel = Findings()
        running = self.tree.text(RUNNING) or None
        kernel.note_file("running", running, self.tree, RUNNING, "a release")
        releases = [name for name in self.tree.names(MODULES) if re.match(r"[0-9]", name)]
        releases = [name for name in releases if self._is_installed(name)]
        installed = [
            {"release": release, "headers": self.tree.exists(f"{MODULES}/{release}/build/Makefile")}
            for release in releases
        ]
        visible = self.tree.exists(MODULES)
        kernel.note("installed", installed if visible else None, f"{MODULES}: no such file")
        same = [release for release in releases if running and _flavour(release) == _flavour(running)]
        newest = None
        for release in same:
            if newest is None or compare("Debian", release, newest) > 0:
                newest = release
        kernel.note("newest_installed", newest, "no kernel of the running one's flavour is installed")
        return kernel.document()

    def _is_installed(self, release: str) -> bool:
        """Folders with nothing but DKMS' modules are left of kernels that were removed."""
        return any(
            self.tree.exists(path)
            for path in (
                f"/boot/vmlinuz-{release}",
                f"{MODULES}/{release}/vmlinuz",
                f"{MODULES}/{release}/kernel",
            )
        )

    # -- driver

    def driver(self, kernel: Mapping[str, Any], packages: Mapping[str, Sequence[str]]) -> dict[str, Any]:
        """The module that is loaded, those on disk for each kernel, and the libraries."""
        driver = Findings()
        driver.note("loaded", self._loaded())
        releases = [each["release"] for each in kernel["installed"] or []]
        if kernel["running"] and kernel["running"] not in releases:
            releases.append(kernel["running"])
        modules = [module for release in releases if (module := self._on_disk(release))]
        driver.note(
            "on_disk",
            None if kernel["installed"] is None and not modules else modules,
            "which kernels are installed is not known",
        )
        libraries = self._libraries("libnvidia-ml.so")
        driver.note("libraries", libraries)
        names = ("nvidia-smi", "nvidia-driver-cuda", "nvidia-utils", "libnvidia-compute", "libcuda1")
        versions = {
            upstream(version)
            for name, found in packages.items()
            if name.startswith(names) and owner(name) == "driver"
            for version in found
        }
        driver.note("package_versions", sorted(versions))
        return driver.document()

    def _loaded(self) -> dict[str, Any]:
        loaded = Findings()
        visible = self.tree.exists("/sys/module")
        text = self.tree.text(NVIDIA_VERSION)
        there = self.tree.exists("/sys/module/nvidia") or text is not None
        loaded.note("loaded", there if visible or there else None, "/sys/module: no such file")
        nouveau = self.tree.exists("/sys/module/nouveau")
        loaded.note("nouveau", nouveau if visible else None, "/sys/module: no such file")
        if not there:
            for field in ("version", "modules"):
                loaded.note(field, None, "no module of the driver is loaded")
            return loaded.document()
        version, modules = parse_nvidia_version(text or "")
        other = self.tree.text("/sys/module/nvidia/version") or None
        if version and other and version != other:
            reason = f"{NVIDIA_VERSION} says {version}, /sys/module/nvidia/version {other}"
            loaded.note("version", None, reason)
        else:
            loaded.note_file("version", version or other, self.tree, NVIDIA_VERSION, "a line NVRM version")
        loaded.note_file("modules", modules, self.tree, NVIDIA_VERSION, "a line NVRM version")
        return loaded.document()

    def _on_disk(self, release: str) -> dict[str, Any] | None:
        """The driver's module that a kernel would load; None if there is none."""
        names = ["nvidia", *(name for name in self._module_names(release) if name != "nvidia")]
        for name in names:
            answer = self.runner.run(["modinfo", "-k", release, name])
            fields = parse_modinfo(answer.output) if answer.ok else {}
            if not fields.get("version") and not answer.missing:
                continue
            if answer.missing and len(names) == 1:
                return None  # nothing on disk hints at a module, and there is no modinfo to ask
            module = Findings()
            module.note("kernel", release)
            module.note("name", name)
            reason = _said(answer, "modinfo") if not answer.ok else "modinfo does not tell it"
            module.note("version", fields.get("version"), reason)
            module.note("modules", module_kind(fields.get("license")), reason)
            module.note("signer", fields.get("signer") if not answer.ok else fields.get("signer", ""), reason)
            return module.document()
        return None

    def _module_names(self, release: str) -> list[str]:
        folders = ("updates/dkms", "updates", "extra", "kernel/drivers/video", "weak-updates")
        found = (
            match[1]
            for folder in folders
            for name in self.tree.names(f"{MODULES}/{release}/{folder}")
            if (match := _MODULE_FILE.match(name))
        )
        return list(dict.fromkeys(found))

    def _libraries(self, name: str) -> list[str]:
        """Versions in the names of a library's files."""
        folders = ["/usr/lib64", "/usr/lib"]
        folders += [f"/usr/lib/{each}" for each in self.tree.names("/usr/lib") if each.endswith("-linux-gnu")]
        folders += [f"{folder}/nvidia/current" for folder in folders]
        pattern = re.compile(re.escape(name) + r"\.([0-9]+(?:\.[0-9]+){1,3})\Z")
        versions = {
            match[1] for folder in folders for each in self.tree.names(folder) if (match := pattern.match(each))
        }
        return sorted(versions, key=lambda version: leading_numbers(version) or ())

    def dkms(self) -> dict[str, Any]:
        """What DKMS has of each module for each kernel."""
        dkms = Findings()
        answer = self.runner.run(["dkms", "status"], timeout=_PACKAGE_TIMEOUT)
        if answer.missing:
            dkms.note("installed", False)
            dkms.note("modules", [])
            return dkms.document()
        modules, strange = parse_dkms(f"{answer.output}\n{answer.complaint}")
        dkms.note("installed", True)
        reason = f"dkms status said {strange[0]!r}" if strange else _said(answer, "dkms status")
        dkms.note("modules", None if strange or answer.status is None else modules, reason)
        return dkms.document()

    def secure_boot(self) -> dict[str, Any]:
        """Whether the firmware lets only signed modules in, and whether the key that DKMS signs with is enrolled."""
        boot = Findings()
        read = HostTuningReader(self.tree, self.runner).secure_boot()
        enabled = False if read["efi"] is False else read["enabled"]
        reason = read["unknown"].get("enabled", "")
        if enabled is None:
            answer = self.runner.run(["mokutil", "--sb-state"])
            enabled = parse_secure_boot(f"{answer.output}\n{answer.complaint}")
        boot.note("enabled", enabled, reason)
        key = next((path for path in SIGNING_KEYS if self.tree.exists(path)), None)
        boot.note("key", key, f"neither {' nor '.join(SIGNING_KEYS)} is there")
        if key is None:
            boot.note("key_enrolled", None, "there is no key to look for")
        elif enabled is False:
            boot.note("key_enrolled", None, "not asked, because Secure Boot is off")
        else:
            answer = self.runner.run(["mokutil", "--test-key", key])
            state = parse_test_key(f"{answer.output}\n{answer.complaint}")
            boot.note("key_enrolled", state, _said(answer, "mokutil --test-key"))
        return boot.document()

    # -- the rest

    def rdma(self, packages: Mapping[str, Sequence[str]] | None, running: str | None) -> dict[str, Any]:
        """Whose RDMA it is, and whether the module that is loaded is the one on disk."""
        rdma = Findings()
        answer = self.runner.run(["ofed_info", "-s"])
        flavour, version = parse_ofed_info(answer.output) if answer.ok else (None, None)
        reason = ""
        if not answer.ok and not answer.missing:
            reason = _said(answer, "ofed_info -s")
        elif answer.ok and flavour is None:
            reason = f"ofed_info -s said {answer.output.strip()[:80]!r}"
        elif flavour is None:
            devices = bool(self.tree.names("/sys/class/infiniband"))
            if devices or "rdma-core" in (packages or {}):
                flavour = "inbox"
            elif packages is not None:
                flavour = "none"
            else:
                reason = "which packages are installed is not known"
        rdma.note("flavour", flavour, reason)
        rdma.note("version", version, reason or "the inbox driver has the kernel's version")
        loaded = self.tree.text("/sys/module/mlx5_core/version") or None
        rdma.note("loaded_version", loaded, "mlx5_core is not loaded, or has no version of its own (inbox)")
        disk = None
        if running and loaded:
            answer = self.runner.run(["modinfo", "-k", running, "mlx5_core"])
            disk = parse_modinfo(answer.output).get("version") if answer.ok else None
        rdma.note("on_disk_version", disk, "there is no mlx5_core on disk, or it has no version of its own (inbox)")
        return rdma.document()

    def cuda(self, packages: Mapping[str, Sequence[str]]) -> dict[str, Any]:
        """Toolkits, and the one that ``/usr/local/cuda`` leads to."""
        cuda = Findings()
        toolkits = []
        for name in self.tree.names("/usr/local"):
            if re.match(r"cuda-[0-9]+\.[0-9]+\Z", name):
                path = f"/usr/local/{name}"
                texts = [self.tree.text(f"{path}/version.{kind}") for kind in ("json", "txt")]
                version = next((found for text in texts if text and (found := parse_toolkit(text))), None)
                toolkits.append({"path": path, "version": version or name[len("cuda-") :]})
        for version in packages.get("nvidia-cuda-toolkit", ()):
            # 12.4.131~12.4.1-2: the version of nvcc, then that of the release
            release = re.search(r"~([0-9]+(?:\.[0-9]+)+)", version)
            toolkits.append({"path": "/usr", "version": release[1] if release else upstream(version)})
        cuda.note("toolkits", toolkits)
        default = self.tree.resolve("/usr/local/cuda")
        cuda.note("default", default, "/usr/local/cuda is not there")
        return cuda.document()

    def nccl(self, packages: Mapping[str, Sequence[str]] | None) -> dict[str, Any]:
        """The package, the CUDA it is built for, and the libraries that are there."""
        nccl = Findings()
        absent = "it is not installed as a package" if packages is not None else "packages can't be read"
        versions = [v for name in ("libnccl2", "libnccl") for v in (packages or {}).get(name, ())]
        nccl.note("version", upstream(versions[0]) if versions else None, absent)
        built_for = re.search(r"\+cuda([0-9]+\.[0-9]+)", versions[0]) if versions else None
        nccl.note(
            "cuda", built_for[1] if built_for else None, "the package's version does not tell" if versions else absent
        )
        nccl.note("libraries", self._libraries("libnccl.so"))
        return nccl.document()

    def fabric_manager(self, packages: Mapping[str, Sequence[str]] | None) -> dict[str, Any]:
        """Version and service; its version has to be the driver's."""
        manager = Findings()
        versions = [
            upstream(version)
            for name, found in (packages or {}).items()
            if re.match(r"nvidia-fabricmanager(-[0-9]+)?\Z|nvidia-fabric-manager\Z", name)
            for version in found
        ]
        absent = "it is not installed" if packages is not None else "packages can't be read"
        manager.note("version", versions[0] if versions else None, absent)
        answer = self.runner.run(["systemctl", "is-active", "nvidia-fabricmanager.service"])
        state = answer.output.strip()
        known = state in ("active", "inactive", "failed", "activating", "deactivating", "reloading")
        manager.note("active", state == "active" if known else None, _said(answer, "systemctl is-active"))
        return manager.document()

    def hardware(self) -> dict[str, Any]:
        """NVIDIA's cards and NVSwitches on the PCI bus."""
        hardware = Findings()
        cards, switches = [], 0
        for address in self.tree.names(PCI):
            if self.tree.integer(f"{PCI}/{address}/vendor") != _NVIDIA:
                continue
            device = self.tree.integer(f"{PCI}/{address}/device")
            kind = (self.tree.integer(f"{PCI}/{address}/class") or 0) >> 8
            if kind == 0x0680:  # bridge of another kind
                switches += 1
            elif kind in (0x0300, 0x0302):  # VGA and 3D controllers
                card = Findings()
                card.note("pci_address", address)
                card.note("device", None if device is None else f"0x{device:04x}", "the file device holds no number")
                generation = None if device is None else architecture_of(device)
                card.note("architecture", generation, "the device id is in no generation that is known here")
                cards.append(card.document())
        visible = self.tree.exists(PCI)
        hardware.note("cards", cards if visible else None, f"{PCI}: no such file")
        hardware.note("nvswitches", switches if visible else None, f"{PCI}: no such file")
        return hardware.document()

    def pending_reboot(self, found: Mapping[str, Any]) -> dict[str, Any]:
        """Whether what runs is not what is installed, and why."""
        pending = Findings()
        kernel, driver, rdma = found["kernel"], found["driver"], found["rdma"]
        loaded, running = driver["loaded"], kernel["running"]
        reasons = []
        path = next((path for path in REBOOT_REQUIRED if self.tree.exists(path)), None)
        if path:
            packages = (self.tree.text(f"{path}.pkgs") or "").split()
            names = ", ".join(dict.fromkeys(packages[:20])) or "it does not say by what"
            reasons.append(f"{path} is there: {names}")
        newest = kernel["newest_installed"]
        if running and newest and newest != running and compare("Debian", newest, running) > 0:
            reasons.append(f"kernel {running} runs, and {newest} is installed")
        releases = [each["release"] for each in kernel["installed"] or []]
        if running and releases and running not in releases:
            reasons.append(f"kernel {running} runs, and is no longer installed")
        module = next((each for each in driver["on_disk"] or [] if each["kernel"] == running), None)
        for field, what in (("version", "version"), ("modules", "kind")):
            if module and loaded[field] and module[field] and loaded[field] != module[field]:
                reasons.append(
                    f"the driver's loaded module has {what} {loaded[field]}, the one on disk {module[field]}"
                )
        libraries = driver["libraries"]
        if loaded["version"] and libraries and loaded["version"] not in libraries:
            reasons.append(
                f"the driver's loaded module is {loaded['version']}, its libraries are {', '.join(libraries)}"
            )
        if loaded["nouveau"] and (module or driver["package_versions"]):
            reasons.append("nouveau is loaded, and NVIDIA's driver is installed")
        if rdma["loaded_version"] and rdma["on_disk_version"] and rdma["loaded_version"] != rdma["on_disk_version"]:
            reasons.append(
                f"the loaded mlx5_core is {rdma['loaded_version']}, the one on disk {rdma['on_disk_version']}"
            )
        known = running is not None and loaded["loaded"] is not None
        pending.note("due", True if reasons else False if known else None, "what runs and is loaded is not known")
        pending.note("reasons", reasons)
        return pending.document()


def _by_operation(
    packages: Mapping[str, Sequence[str]], listed: Mapping[str, str]
) -> dict[str, dict[str, Sequence[str]]]:
    return {
        operation: {
            name: versions for name, versions in packages.items() if (listed.get(name) or owner(name)) == operation
        }
        for operation in OPERATIONS
    }


def _flavour(release: str) -> str:
    """What of a release tells one kind of kernel from another.

    ``rt-amd64`` of ``6.1.0-57-rt-amd64``, ``generic`` of ``6.8.0-52-generic``; on EL ``rt`` of ``5.14.0-503.11.1.el9_5.
    x86_64+rt``, and nothing of the ordinary kernel.
    """
    if re.search(r"\.el[0-9]", release):
        return release.partition("+")[2]
    match = re.match(r"[0-9][0-9.]*(?:[+~][a-z0-9.]+)?(?:-[0-9]+)?-(.*)\Z", release)
    return match[1] if match else ""


def _said(answer: Answer, command: str) -> str:
    """Why a command gave no value."""
    return answer.complaint or f"{command} ended with status {answer.status} and no word"
