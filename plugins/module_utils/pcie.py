# Copyright (c) 2026, the Ringmaster authors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""GPUs and network adapters on PCI Express, with the ports between them and the root complex.

Sources: the kernel's ``Documentation/ABI/testing/sysfs-bus-pci`` and ``sysfs-bus-pci-devices-aer_stats``, and the
configuration space. Nothing here imports Ansible.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from ansible_collections.ringmaster.inference.plugins.module_utils.counters import Baseline, Counted, growth
from ansible_collections.ringmaster.inference.plugins.module_utils.file_tree import (
    FileTree,
    parse_choice,
    parse_cpus,
    parse_integer,
)
from ansible_collections.ringmaster.inference.plugins.module_utils.findings import Findings, why
from ansible_collections.ringmaster.inference.plugins.module_utils.pci_configuration import (
    ACS_CONTROLS,
    ACS_REDIRECTING,
    HEADER_SIZE,
    ConfigurationSpace,
)

DEVICES = "/sys/bus/pci/devices"
ASPM_POLICY = "/sys/module/pcie_aspm/parameters/policy"

SEVERITIES = ("correctable", "nonfatal", "fatal")
ROOT_PORT_FILES = {
    "correctable": "aer_rootport_total_err_cor",
    "nonfatal": "aer_rootport_total_err_nonfatal",
    "fatal": "aer_rootport_total_err_fatal",
}
# Field -> file and hexadecimal digits.
IDENTITY_FILES = {
    "class_code": ("class", 6),
    "vendor_id": ("vendor", 4),
    "device_id": ("device", 4),
    "subsystem_vendor_id": ("subsystem_vendor", 4),
    "subsystem_device_id": ("subsystem_device", 4),
    "revision": ("revision", 2),
}
UPSTREAM = "switch_upstream_port"
NO_CAPABILITY = "the function has no PCI Express capability"
UNKNOWN_WIDTHS = (0, 255)  # what the kernel shows for a link that is down and for a function that does not answer
LARGEST_COUNTER = (1 << 64) - 1

# Base class, subclass -> words, from the PCI Code and ID Assignment Specification.
_CLASSES = {
    0x0200: "Ethernet controller",
    0x0207: "InfiniBand controller",
    0x0280: "Network controller",
    0x0300: "VGA compatible controller",
    0x0302: "3D controller",
    0x0380: "Display controller",
    0x0604: "PCI bridge",
    0x0C06: "InfiniBand controller",
    0x1200: "Processing accelerator",
}
# Vendor identifiers of the PCI-SIG, of those who make what stands in such servers.
_VENDORS = {
    0x1000: "Broadcom",
    0x1002: "AMD",
    0x1022: "AMD",
    0x1077: "Marvell QLogic",
    0x10B5: "Broadcom PLX",
    0x10DE: "NVIDIA",
    0x10EC: "Realtek",
    0x11F8: "Microchip",
    0x1414: "Microsoft",
    0x1425: "Chelsio",
    0x14E4: "Broadcom",
    0x15AD: "VMware",
    0x15B3: "NVIDIA Mellanox",
    0x177D: "Marvell",
    0x19E5: "Huawei",
    0x1AF4: "Red Hat",
    0x1B36: "Red Hat",
    0x1D0F: "Amazon",
    0x1DD8: "AMD Pensando",
    0x8086: "Intel",
}
_ADDRESS = re.compile(r"[0-9a-f]{4,8}:[0-9a-f]{2}:[01][0-9a-f]\.[0-7]\Z")
_SPEED = re.compile(r"([0-9]{1,4}(?:\.[0-9]{1,4})?) GT/s")
_ASPM_STATES = {(False, False): "disabled", (True, False): "l0s", (False, True): "l1", (True, True): "l0s_l1"}


def is_address(text: str) -> bool:
    """Whether `text` is an address as the kernel writes it: ``0000:07:00.0`` (a domain of more digits: Intel VMD)."""
    return bool(_ADDRESS.match(text))


def normal_address(text: str) -> str | None:
    """An address in the kernel's form, from that form, from NVML's (eight digits of domain) or without a domain."""
    address = text.strip().lower()
    if address.count(":") == 1:
        address = f"0000:{address}"
    domain, _colon, rest = address.partition(":")
    return f"{int(domain, 16):04x}:{rest}" if is_address(address) else None


def kind_of(class_code: int) -> str | None:
    """``gpu``, ``nic`` or None, by the class code (24 bits)."""
    base, subclass = class_code >> 16, class_code >> 8 & 0xFF
    if base in (0x03, 0x12):
        return "gpu"
    if base == 0x02 or (base, subclass) == (0x0C, 0x06):
        return "nic"
    return None


def parse_speed(text: str | None) -> float | None:
    """Transfers a second in GT/s: ``16.0 GT/s PCIe`` and ``16 GT/s`` → 16.0; None for ``Unknown`` and all else."""
    match = _SPEED.match(text or "")
    return float(match[1]) if match else None


def parse_errors(text: str) -> tuple[dict[str, int], int | None, list[str]]:
    """Counters of an ``aer_dev_*`` file by name, the total that the kernel gives, and the lines that are neither.

    Any name is taken. The total is not the sum of the counters on every kernel, so it is only handed on.
    """
    counts: dict[str, int] = {}
    total: int | None = None
    strange: list[str] = []
    for line in text.splitlines():
        name, _space, number = line.strip().rpartition(" ")
        count = parse_integer(number)
        if not name.strip() or count is None or not 0 <= count <= LARGEST_COUNTER:
            if line.strip():
                strange.append(line.strip())
        elif name.startswith("TOTAL_ERR_"):
            total = count
        else:
            counts[name.strip()] = count
    return counts, total, strange


@dataclass(frozen=True)
class Endpoint:
    """A GPU (`kind` ``gpu``) or an adapter (``nic``), and the ports above it, the nearest first."""

    address: str
    kind: str
    ports: tuple[str, ...]


class PcieReader:
    """Reads the functions below ``/sys/bus/pci/devices`` of `tree`."""

    def __init__(self, tree: FileTree) -> None:
        self.tree = tree
        self._totals: dict[str, tuple[bytes, int | None]] = {}

    def aspm_policy(self) -> str | None:
        """``default``, ``performance``, ``powersave`` or ``powersupersave``; None if it can't be read."""
        return parse_choice(self.tree.text(ASPM_POLICY))[0]

    def devices(self, addresses: Collection[str] = ()) -> list[dict[str, Any]]:
        """GPUs, network adapters and the ports above them, in order of address; see the module ``pcie_info``.

        `addresses` limits it to these functions and the ports above them. A virtual function whose physical function is
        on this host shares its link and is left out, and so is a display controller without a link of its own (that of
        a server's management controller).
        """
        names = [name for name in self.tree.names(DEVICES) if is_address(name)]
        kinds = {name: kind for name in names if (kind := self._kind(name)) and (not addresses or name in addresses)}
        above = {name: self._ports_above(name) for name in kinds}
        ports = {port for chain in above.values() for port in chain}
        # What a port has at the lower end of its link.
        below = {port: child for name, chain in above.items() for port, child in zip(chain, [name, *chain])}
        above.update({port: self._ports_above(port) for port in ports})
        return [self._device(name, kinds.get(name), above[name], below.get(name)) for name in sorted(above)]

    def counted(self, devices: Collection[Mapping[str, Any]]) -> dict[str, Counted]:
        """Identity and counters of what :meth:`devices` gave, for a baseline."""
        return {device["pci_address"]: _counted(device) for device in devices}

    def compare(self, devices: Collection[dict[str, Any]], baseline: Baseline | None, reason: str = "") -> None:
        """Add to what :meth:`devices` gave by how much its error counters grew since `baseline`.

        `reason` says why there is no baseline.
        """
        boot_id = self.tree.boot_id()
        for device in devices:
            grown = growth(device["pci_address"], _counted(device), boot_id, baseline)
            why_not = (reason if baseline is None else "") or grown.reason
            for source, entry in device["errors"].items():
                if source != "unknown" and entry is not None:
                    _add_deltas(source, entry, grown.deltas, why_not)
            _add_error_problems(device)

    def endpoints(self) -> list[Endpoint]:
        """GPUs and RDMA adapters, in order of address; those that :meth:`devices` leaves out are left out here, too."""
        return [
            Endpoint(name, kind, tuple(self._ports_above(name)))
            for name in self.tree.names(DEVICES)
            if is_address(name)
            and (kind := self._kind(name))
            and (kind == "gpu" or self.tree.exists(f"{DEVICES}/{name}/infiniband"))
        ]

    def health(self, endpoint: Endpoint) -> dict[str, Any] | None:
        """Error totals and link of a function, for those that ask every second; None if it is gone.

        ``{kind, correctable, nonfatal, fatal, above_correctable, above_nonfatal, above_fatal, width, width_max, speed,
        speed_max, unknown}``: the totals that the kernel gives for the function since it was enumerated, and their sums
        over the ports above it that report errors; lanes and GT/s that the link has, and that the function and the port
        above it both can.
        """
        base = f"{DEVICES}/{endpoint.address}"
        if self.tree.data(f"{base}/class") is None:
            return None
        facts = Findings()
        facts.note("kind", endpoint.kind)
        for severity in SEVERITIES:
            path = f"{base}/aer_dev_{severity}"
            facts.note_file(severity, self._total(path), self.tree, path, "a total of errors")
            found = {port: self._total(f"{DEVICES}/{port}/aer_dev_{severity}") for port in endpoint.ports}
            known = [total for total in found.values() if total is not None]
            # A port that does not report errors has no such file; one whose file can't be read leaves the sum unknown.
            odd = [
                port
                for port, total in found.items()
                if total is None and self.tree.complaint(f"{DEVICES}/{port}/aer_dev_{severity}") != "no such file"
            ]
            reason = f"that of {', '.join(odd)} can't be read" if odd else "no port above reports errors"
            facts.note(f"above_{severity}", sum(known) if known and not odd else None, reason)
        for prefix, ending in (("current", ""), ("max", "_max")):
            # A function is not to be blamed for lanes that its slot does not have.
            ports = endpoint.ports[:1] if ending else ()
            path = f"{base}/{prefix}_link_width"
            width = self._width(path)
            slot = [self._width(f"{DEVICES}/{port}/max_link_width") for port in ports]
            facts.note_file(f"width{ending}", _least(width, *slot), self.tree, path, "1 to 32 lanes")
            path = f"{base}/{prefix}_link_speed"
            speed = parse_speed(self.tree.text(path))
            rate = [parse_speed(self.tree.text(f"{DEVICES}/{port}/max_link_speed")) for port in ports]
            facts.note_file(f"speed{ending}", _least(speed, *rate), self.tree, path, "GT/s")
        return facts.document()

    def _total(self, path: str) -> int | None:
        """The total of a file of error counters; taken apart only if the file is another one than at the last look."""
        content = self.tree.data(path)
        if content is None:
            return None
        known = self._totals.get(path)
        if known is None or known[0] != content:
            known = content, parse_errors(content.decode("utf-8", "replace"))[1]
            self._totals[path] = known
        return known[1]

    def _kind(self, name: str) -> str | None:
        class_code = self.tree.integer(f"{DEVICES}/{name}/class")
        kind = None if class_code is None else kind_of(class_code)
        if self.tree.exists(f"{DEVICES}/{name}/physfn"):
            return None
        if kind == "gpu" and not self.tree.exists(f"{DEVICES}/{name}/current_link_width"):
            return None
        return kind

    def _ports_above(self, name: str) -> list[str]:
        """Bridges from the function up to the root port, the nearest first."""
        path = self.tree.resolve(f"{DEVICES}/{name}") or ""
        chain = [part for part in path.split("/") if is_address(part)]
        return [port for port in reversed(chain) if port != name and self.tree.exists(f"{DEVICES}/{port}")]

    def _device(self, name: str, kind: str | None, ports: list[str], child: str | None) -> dict[str, Any]:
        base = f"{DEVICES}/{name}"
        content = self.tree.data(f"{base}/config")
        space = ConfigurationSpace(content or b"")
        device = Findings()
        device.note("pci_address", name)
        device.note("kind", kind or ("switch_port" if ports else "root_port"))
        self._note_identity(device, base, space)
        unreadable = _space_reason(space, content, "" if content is not None else self.tree.complaint(f"{base}/config"))
        device.note("port_type", space.port_type, unreadable or NO_CAPABILITY)
        device.note("ports_above", ports)
        driver = self.tree.resolve(f"{base}/driver")
        device.note("driver", driver.rpartition("/")[2] if driver else None, "no driver is bound")
        node = self.tree.integer(f"{base}/numa_node")
        if node == -1:
            device.note("numa_node", None, "the firmware gives no information (-1)")
        else:
            node = node if node is not None and node >= 0 else None
            device.note_file("numa_node", node, self.tree, f"{base}/numa_node", "a node")
        cpus = self.tree.text(f"{base}/local_cpulist")
        cpus = cpus if parse_cpus(cpus) is not None else None
        device.note_file("local_cpus", cpus, self.tree, f"{base}/local_cpulist", "a list of CPUs")
        if kind == "nic":
            # The interface of a paravirtual adapter lies one folder deeper.
            folders = [base, *(f"{base}/{name}" for name in self.tree.names(base) if name.startswith("virtio"))]
            device.note("netdevs", [name for folder in folders for name in self.tree.names(f"{folder}/net")])
            device.note("rdma_devices", self.tree.names(f"{base}/infiniband"))
        # Ports of a switch alternate on the way down from the root port, so that the place alone tells one.
        faces_up = kind is not None or (len(ports) % 2 == 1 if space.port_type is None else space.port_type == UPSTREAM)
        device.note("link", self._link(base, None if faces_up else child))
        device.note("aspm", self._aspm(base, space, unreadable))
        device.note("acs", _acs(space, unreadable))
        device.note("errors", self._errors(base, device.values["kind"] == "root_port"))
        device.note("problems", _problems(device.values, space))
        return device.document()

    def _note_identity(self, device: Findings, base: str, space: ConfigurationSpace) -> None:
        for field, (file, digits) in IDENTITY_FILES.items():
            number = self.tree.integer(f"{base}/{file}")
            value = f"0x{number:0{digits}x}" if number is not None and 0 <= number < 16**digits else None
            device.note_file(field, value, self.tree, f"{base}/{file}", f"a number of {digits} hexadecimal digits")
        vendor = self.tree.integer(f"{base}/vendor")
        device.note("vendor", _VENDORS.get(vendor or 0), "no name is known here for vendor_id")
        code = self.tree.integer(f"{base}/class") or 0
        device.note("class", _CLASSES.get(code >> 8), "no name is known here for class_code")
        reason = "the function has none" if space.whole else "the extended configuration space can't be read"
        device.note("serial_number", space.serial_number, reason)

    def _link(self, base: str, child: str | None) -> dict[str, Any]:
        """The link of the function; `child` is what a port has at the lower end of it."""
        link = Findings()
        widths: dict[str, int | None] = {}
        speeds: dict[str, float | None] = {}
        for prefix, ending in (("current", ""), ("max", "_maximum")):
            path = f"{base}/{prefix}_link_speed"
            speeds[prefix] = parse_speed(self.tree.text(path))
            link.note_file(f"speed{ending}_gt_per_second", speeds[prefix], self.tree, path, "GT/s")
            path = f"{base}/{prefix}_link_width"
            widths[prefix] = self._width(path)
            link.note_file(f"width{ending}", widths[prefix], self.tree, path, "1 to 32 lanes")
        # A port is not to be blamed for lanes that the device below it does not have.
        child_width = self._width(f"{DEVICES}/{child}/max_link_width") if child else None
        expected = min(widths["max"], child_width) if widths["max"] and child_width else widths["max"]
        link.note("width_expected", expected, "the greatest width is not known")
        link.note("width_downgraded", _less(widths["current"], expected), "a width is not known")
        link.note("speed_below_maximum", _less(speeds["current"], speeds["max"]), "a speed is not known")
        return link.document()

    def _width(self, path: str) -> int | None:
        width = self.tree.integer(path)
        return None if width is None or width in UNKNOWN_WIDTHS or not 1 <= width <= 32 else width

    def _aspm(self, base: str, space: ConfigurationSpace, unreadable: str) -> dict[str, Any]:
        """Link Control is the truth; the kernel's switches are there only where the kernel controls ASPM."""
        aspm = Findings()
        enabled, source = space.aspm_enabled, "link_control"
        if enabled is None:
            l0s, l1 = (self.tree.integer(f"{base}/link/{state}_aspm") for state in ("l0s", "l1"))
            if l0s in (0, 1) and l1 in (0, 1):
                enabled, source = (bool(l0s), bool(l1)), "sysfs"
        reason = f"{unreadable or NO_CAPABILITY}; {base}/link/l1_aspm gives nothing either"
        aspm.note("state", _ASPM_STATES[enabled] if enabled else None, reason)
        aspm.note("source", source if enabled else None, reason)
        supported = space.aspm_supported
        aspm.note("supported", _ASPM_STATES[supported] if supported else None, unreadable or NO_CAPABILITY)
        return aspm.document()

    def _errors(self, base: str, root_port: bool) -> dict[str, Any]:
        errors = Findings()
        for severity in SEVERITIES:
            path = f"{base}/aer_dev_{severity}"
            text = self.tree.text(path)
            if text is None:
                complaint = self.tree.complaint(path)
                if complaint == "no such file":
                    complaint += " (error reporting is not the operating system's here, or the kernel is before 4.19)"
                errors.note(severity, None, f"{path}: {complaint}")
                continue
            counts, total, strange = parse_errors(text)
            if not counts:
                errors.note(severity, None, why(self.tree, path, "lines of name and count"))
                continue
            entry = Findings()
            entry.note("counts", counts)
            entry.note("reported_total", total, f"{path}: no line with a total")
            for line in strange:
                entry.unknown["counts"] = f"{path}: expected lines of name and count, found also {line[:40]!r}"
            errors.note(severity, entry.document())
        if root_port:
            entry = Findings()
            counts = {}
            for severity, file in ROOT_PORT_FILES.items():
                count = self.tree.integer(f"{base}/{file}")
                if count is not None and 0 <= count <= LARGEST_COUNTER:
                    counts[severity] = count
                else:
                    entry.unknown[f"counts.{severity}"] = why(self.tree, f"{base}/{file}", "a count")
            entry.note("counts", counts)
            errors.note("root_port", entry.document() if counts else None, "; ".join(entry.unknown.values()))
        return errors.document()


def _least(own: Any, *others: Any) -> Any:
    """Return the least of a number and those of the others that are known; None where the own one is not."""
    return None if own is None else min(number for number in (own, *others) if number is not None)


def _less(value: float | None, other: float | None) -> bool | None:
    return None if value is None or other is None else value < other


def _space_reason(space: ConfigurationSpace, content: bytes | None, complaint: str) -> str:
    """Why registers beyond the header are not known; empty if they could be read."""
    if content is None:
        return f"configuration space: {complaint}"
    if space.silent:
        return "the function does not answer: its configuration space reads as all ones"
    if len(content) <= HEADER_SIZE:
        return "only root may read the configuration space beyond its first 64 bytes"
    return ""


def _acs(space: ConfigurationSpace, unreadable: str) -> dict[str, Any]:
    acs = Findings()
    control = space.acs_control
    if not unreadable and control is None and not space.whole:
        unreadable = "the extended configuration space can't be read"
    acs.note("supported", True if control is not None else None if unreadable else False, unreadable)
    no_control = unreadable or "the function has no access control services"
    controls = None if control is None else {name: bool(control >> bit & 1) for bit, name in ACS_CONTROLS.items()}
    acs.note("control", None if control is None else f"0x{control:04x}", no_control)
    acs.note("controls", controls, no_control)
    acs.note(
        "redirects_peer_to_peer",
        any(controls[name] for name in ACS_REDIRECTING) if controls else None if unreadable else False,
        unreadable,
    )
    return acs.document()


def _problems(device: dict[str, Any], space: ConfigurationSpace) -> list[str]:
    problems = []
    link = device["link"]
    if space.silent:
        problems.append("does not answer: its configuration space reads as all ones")
    if link["width_downgraded"]:
        problems.append(f"link runs on {link['width']} of {link['width_expected']} lanes")
    return problems


def _add_deltas(source: str, entry: dict[str, Any], deltas: Mapping[str, int | None], reason: str) -> None:
    """Add ``deltas`` and ``delta``, their sum, to one source of errors: a severity, or the root port's own counters."""
    if reason:
        entry.update(deltas=None, delta=None)
        entry["unknown"].update(deltas=reason, delta=reason)
        return
    own = {name: deltas[f"{source}.{name}"] for name in entry["counts"]}
    known = [delta for delta in own.values() if delta is not None]
    entry.update(deltas=own, delta=sum(known) if len(known) == len(own) else None)
    for name, delta in own.items():
        if delta is None:
            entry["unknown"][f"deltas.{name}"] = "the baseline lacks this counter"
            entry["unknown"]["delta"] = "the baseline lacks a counter"


def _add_error_problems(device: dict[str, Any]) -> None:
    for severity in ("nonfatal", "fatal"):
        grown = {
            name: delta for name, delta in ((device["errors"][severity] or {}).get("deltas") or {}).items() if delta
        }
        if grown:
            names = ", ".join(f"{name} {delta}" for name, delta in sorted(grown.items()))
            device["problems"].append(f"new {severity} errors since the baseline: {names}")


def _counted(device: Mapping[str, Any]) -> Counted:
    return Counted(
        {field: device[field] for field in (*IDENTITY_FILES, "serial_number")},
        {
            f"{source}.{name}": count
            for source, entry in device["errors"].items()
            if source != "unknown" and entry is not None
            for name, count in entry["counts"].items()
        },
    )
