# Copyright (c) 2026, the Ringmaster authors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What makes a RoCE port lossless: read, compared with what is wanted, and set where it differs.

Priority flow control, DSCP trust and the map from DSCP go through ``dcb`` or ``mlnx_qos``; global pause through
``ethtool``, the MTU through ``ip``. The default RoCE version and traffic class of connections that are made with
rdma_cm are files in configfs; ECN and the driver's own traffic class are files that only NVIDIA's driver (MLNX_OFED,
DOCA-OFED) has. Where a file is absent the value is unknown, never "off". Nothing here imports Ansible.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Union

from ansible_collections.ringmaster.inference.plugins.module_utils import dcb, rdma_formats
from ansible_collections.ringmaster.inference.plugins.module_utils.commands import CommandRunner
from ansible_collections.ringmaster.inference.plugins.module_utils.file_tree import FileTree, parse_integer
from ansible_collections.ringmaster.inference.plugins.module_utils.rdma import DEVICES, INTERFACES, Port, RdmaReader

CONFIGFS = "/sys/kernel/config/rdma_cm"
ROCE_MODES = (rdma_formats.ROCE_V1, rdma_formats.ROCE_V2)
LARGEST_TRAFFIC_CLASS = 255
# The least an IPv4 host has to take, and what the field in the kernel's interface could hold at most.
SMALLEST_MTU, LARGEST_MTU = 68, 65535

# In the order in which they are set. Pause is turned off before PFC comes, since a port has one or the other.
SETTINGS = (
    "mtu",
    "global_pause_rx",
    "global_pause_tx",
    "trust",
    "dscp_to_priority",
    "pfc_priorities",
    "ecn_priorities",
    "roce_mode",
    "traffic_class",
)
# What an LLDP agent or the card's firmware negotiates, and overwrites.
NEGOTIATED = ("trust", "dscp_to_priority", "pfc_priorities")

# The file may hold classes of single peers, too; the global one has this name, or stands there alone as it was written.
_GLOBAL_CLASS = re.compile(r"(?:\A|.*^Global tclass=)(\d{1,3})\s*$", re.ASCII | re.MULTILINE | re.DOTALL)
# Names that are a part of a systemd unit's name as they are, which all that drivers and udev give are.
_NETDEV = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,14}\Z")


class RdmaQosError(Exception):
    """Something is not as it has to be; the text says what was expected, what was found and what to do.

    `details` are further values for the module's result.
    """

    def __init__(self, expected: str, found: str, remedy: str, **details: Any) -> None:
        super().__init__(f"Expected {expected}. Found {found.rstrip('.')}. To do: {remedy}.")
        self.details = details


@dataclass(frozen=True)
class Quality:
    """A port's settings as found. What isn't known is None, with its reason in `unknown`.

    `ecn_priorities` are those on which the port both marks congestion to the sender (notification point) and slows down
    (reaction point). `traffic_class` is that of rdma_cm, `driver_traffic_class` the driver's own for all connections.
    `dcbx_owner` is ``host``, ``firmware`` or ``lldpad``.
    """

    tool: str | None
    dcbx_owner: str | None
    trust: str | None
    dscp_to_priority: dict[int, int] | None
    pfc_priorities: list[int] | None
    pfc_capacity: int | None
    ecn_priorities: list[int] | None
    ecn_notification_priorities: list[int] | None
    ecn_reaction_priorities: list[int] | None
    global_pause_rx: bool | None
    global_pause_tx: bool | None
    roce_mode: str | None
    traffic_class: int | None
    driver_traffic_class: int | None
    unknown: dict[str, str]

    def document(self) -> dict[str, Any]:
        """The settings as the modules return them; the keys of a JSON object are text."""
        result = {each.name: getattr(self, each.name) for each in fields(self)}
        return {**result, "dscp_to_priority": _with_text_keys(self.dscp_to_priority)}


class QualityReader:
    """Reads the settings of ports."""

    def __init__(self, tree: FileTree, runner: CommandRunner) -> None:
        self.tree, self.runner = tree, runner
        self._lldpad: bool | None = None

    def read(self, port: Port) -> Quality:
        """Settings of a port. Without a network interface, or on InfiniBand, only rdma_cm's are known."""
        unknown: dict[str, str] = {}
        found = self._dcb(port)
        unknown.update(found.unknown)
        owner = self._owner(found)
        if owner is None:
            unknown["dcbx_owner"] = unknown.pop("dcbx_host", "unknown")
        unknown.pop("dcbx_host", None)
        notification, reaction = (self._ecn(port, side, unknown) for side in ("notification", "reaction"))
        both = None if notification is None or reaction is None else sorted({*notification} & {*reaction})
        if both is None:
            unknown["ecn_priorities"] = unknown.get("ecn_notification_priorities") or unknown["ecn_reaction_priorities"]
        pause = self._pause(port, unknown)
        return Quality(
            found.tool,
            owner,
            found.trust,
            found.dscp_to_priority,
            found.pfc_priorities,
            found.pfc_capacity,
            both,
            notification,
            reaction,
            *pause,
            self._roce_mode(port, unknown),
            self._traffic_class(port, unknown),
            self._driver_traffic_class(port, unknown),
            unknown,
        )

    def lldpad_runs(self) -> bool:
        """Whether the LLDP agent runs; looked up once."""
        if self._lldpad is None:
            self._lldpad = dcb.lldpad_runs(self.tree)
        return self._lldpad

    def _dcb(self, port: Port) -> dcb.PortDcb:
        names = ("trust", "dscp_to_priority", "pfc_priorities", "pfc_capacity", "dcbx_host")
        if port.netdev is None or not port.roce:
            return dcb.PortDcb(unknown=dict.fromkeys(names, "the port is no RoCE port with a network interface"))
        tool = dcb.tool_for(port.netdev, self.tree, self.runner)
        if tool is None:
            return dcb.PortDcb(unknown=dict.fromkeys(names, "neither dcb nor mlnx_qos is installed"))
        return tool.read(port.netdev, port.driver)

    def _owner(self, found: dcb.PortDcb) -> str | None:
        if self.lldpad_runs():
            return "lldpad"
        return None if found.dcbx_host is None else "host" if found.dcbx_host else "firmware"

    def _ecn(self, port: Port, side: str, unknown: dict[str, str]) -> list[int] | None:
        folder = ecn_folder(port, side)
        values = [self.tree.text(f"{folder}/{priority}") for priority in dcb.PRIORITIES]
        if any(value not in ("0", "1") for value in values):
            unknown[f"ecn_{side}_priorities"] = f"{folder}: {self.tree.complaint(folder + '/0') or 'no 0 or 1'}"
            return None
        return [priority for priority in dcb.PRIORITIES if values[priority] == "1"]

    def _pause(self, port: Port, unknown: dict[str, str]) -> tuple[bool | None, bool | None]:
        complaint = "the port has no network interface"
        pause: tuple[bool | None, bool | None] = (None, None)
        if port.netdev is not None:
            answer = self.runner.run(["ethtool", "-a", port.netdev])
            pause = rdma_formats.parse_ethtool_pause(answer.output) if answer.ok else pause
            complaint = answer.complaint or f"ethtool -a {port.netdev} does not tell it"
        for name, value in zip(("global_pause_rx", "global_pause_tx"), pause):
            if value is None:
                unknown[name] = complaint
        return pause

    def _roce_mode(self, port: Port, unknown: dict[str, str]) -> str | None:
        path = f"{configfs_folder(port)}/default_roce_mode"
        mode = self.tree.text(path)
        if mode in ROCE_MODES:
            return mode
        unknown["roce_mode"] = self._no_configfs(port, path)
        return None

    def _traffic_class(self, port: Port, unknown: dict[str, str]) -> int | None:
        path = f"{configfs_folder(port)}/default_roce_tos"
        value = self.tree.integer(path)
        if value is not None and 0 <= value <= LARGEST_TRAFFIC_CLASS:
            return value
        unknown["traffic_class"] = self._no_configfs(port, path)
        return None

    def _no_configfs(self, port: Port, path: str) -> str:
        if not self.tree.exists(CONFIGFS):
            return f"{CONFIGFS}: no such folder; kernel module rdma_cm is not loaded, or configfs is not mounted"
        folder = f"{CONFIGFS}/{port.device}"
        if not self.tree.exists(folder):
            return f"{folder}: nobody made this folder; the kernel shows the value only once it is there"
        return f"{path}: {self.tree.complaint(path) or 'holds nothing that is understood'}"

    def _driver_traffic_class(self, port: Port, unknown: dict[str, str]) -> int | None:
        path = driver_class_path(port)
        found = _GLOBAL_CLASS.match(self.tree.text(path) or "")
        if found and int(found.group(1)) <= LARGEST_TRAFFIC_CLASS:
            return int(found.group(1))
        unknown["driver_traffic_class"] = f"{path}: {self.tree.complaint(path) or 'no global class is set'}"
        return None


def configfs_folder(port: Port) -> str:
    """Where rdma_cm keeps the defaults of a port; the device's folder is there once somebody made it."""
    return f"{CONFIGFS}/{port.device}/ports/{port.number}"


def driver_class_path(port: Port) -> str:
    """Where NVIDIA's driver keeps the traffic class of all connections."""
    return f"{DEVICES}/{port.device}/tc/{port.number}/traffic_class"


def ecn_folder(port: Port, side: str) -> str:
    """Where NVIDIA's driver keeps the switch of each priority for ``notification`` or ``reaction``."""
    return f"{INTERFACES}/{port.netdev}/ecn/roce_{side[0]}p/enable"


# What is wanted


@dataclass(frozen=True)
class Wanted:
    """Settings that a port is to have; None leaves one as it is.

    With `dscp_exclusive` entries of the map that are not in `dscp_to_priority` are removed. With `take_dcbx` the
    negotiation is taken from the card's firmware.
    """

    mtu: int | None = None
    global_pause_rx: bool | None = None
    global_pause_tx: bool | None = None
    trust: str | None = None
    dscp_to_priority: Mapping[int, int] | None = None
    pfc_priorities: Sequence[int] | None = None
    ecn_priorities: Sequence[int] | None = None
    roce_mode: str | None = None
    traffic_class: int | None = None
    dscp_exclusive: bool = False
    take_dcbx: bool = False

    @property
    def trusted(self) -> str | None:
        """What is to be trusted. Entries of the map mean nothing unless DSCP is."""
        return self.trust or ("dscp" if self.dscp_to_priority else None)

    @property
    def names(self) -> list[str]:
        """Settings that are wanted, in the order in which they are set."""
        return [name for name in SETTINGS if getattr(self, name) is not None]

    def without(self, names: Iterable[str]) -> Wanted:
        """The same without some settings."""
        absent: dict[str, Any] = dict.fromkeys(names)
        return replace(self, **absent)


def check_netdev(netdev: str) -> None:
    """Raise RdmaQosError for what can't be the name of a network interface, or no part of a unit's name."""
    if not _NETDEV.match(netdev):
        raise RdmaQosError(
            "netdev to be the name of a network interface: 1 to 15 letters, digits, dots, dashes or underscores",
            repr(netdev),
            "name the interface as `ip link` does",
        )


def parse_map(entries: Mapping[Any, Any]) -> dict[int, int]:
    """DSCP -> priority from a document whose keys and values may be text. Raises RdmaQosError for what is none."""
    found: dict[int, int] = {}
    for key, value in entries.items():
        dscp, priority = (each if isinstance(each, int) else parse_integer(str(each)) for each in (key, value))
        if isinstance(key, bool) or dscp is None or dscp not in dcb.DSCPS:
            raise RdmaQosError("DSCPs from 0 to 63 in dscp_to_priority", repr(key), "name the DSCP as a number")
        if isinstance(value, bool) or priority is None or priority not in dcb.PRIORITIES:
            raise RdmaQosError(
                "priorities from 0 to 7 in dscp_to_priority",
                f"{value!r} for DSCP {dscp}",
                "name a priority from 0 to 7",
            )
        if dscp in found:
            raise RdmaQosError(
                "each DSCP once in dscp_to_priority", f"DSCP {dscp} twice", "keep one of the two entries"
            )
        found[dscp] = priority
    return found


def check(wanted: Wanted) -> None:
    """Raise RdmaQosError for values that no port can have, or that contradict one another."""
    for name in ("pfc_priorities", "ecn_priorities"):
        wrong = [each for each in getattr(wanted, name) or () if each not in dcb.PRIORITIES]
        if wrong:
            raise RdmaQosError(
                f"priorities from 0 to 7 in {name}",
                ", ".join(map(str, wrong)),
                "name priorities from 0 to 7",
            )
    for name, least, most in (
        ("traffic_class", 0, LARGEST_TRAFFIC_CLASS),
        ("mtu", SMALLEST_MTU, LARGEST_MTU),
    ):
        value = getattr(wanted, name)
        if value is not None and not least <= value <= most:
            raise RdmaQosError(f"{name} from {least} to {most}", str(value), f"give a {name} in that range")
    if wanted.dscp_to_priority and wanted.trust == "pcp":
        raise RdmaQosError(
            "no entries in dscp_to_priority with trust=pcp, which does not look at the DSCP",
            f"{len(wanted.dscp_to_priority)} entries",
            "leave one of the two options out",
        )
    if wanted.pfc_priorities and (wanted.global_pause_rx or wanted.global_pause_tx):
        raise RdmaQosError(
            "global pause to be off where PFC is on: a port has one or the other",
            "pfc_priorities together with global_pause_rx or global_pause_tx",
            "set both global_pause options to false, or pfc_priorities to []",
        )


# What is done


@dataclass(frozen=True)
class Command:
    """A command of the host."""

    words: Sequence[str]

    def perform(self, tree: FileTree, runner: CommandRunner) -> str:
        """Run it; the reason if it failed, else nothing."""
        del tree
        answer = runner.run(self.words)
        if answer.ok:
            return ""
        said = answer.complaint or answer.output.strip() or f"exit status {answer.status}"
        return f"`{' '.join(self.words)}`: {said.splitlines()[-1]}"

    def line(self, runner: CommandRunner) -> str:
        """The same for ExecStart= of a unit, which wants the whole path."""
        return " ".join([runner.locate(self.words[0]) or self.words[0], *self.words[1:]])


@dataclass(frozen=True)
class Write:
    """A line for a file of the kernel. `folder` is made first where it is given."""

    path: str
    text: str
    folder: str = ""

    def perform(self, tree: FileTree, runner: CommandRunner) -> str:
        """Write it; the reason if that failed, else nothing."""
        del runner
        try:
            if self.folder and not tree.exists(self.folder):
                os.mkdir(tree.locate(self.folder))
            # Not created where it is missing: the kernel makes its files itself.
            with open(os.open(tree.locate(self.path), os.O_WRONLY | os.O_TRUNC), "w", encoding="ascii") as file:
                file.write(f"{self.text}\n")
        except OSError as error:
            return f"{self.path}: {error.strerror or error}"
        return ""

    def line(self, runner: CommandRunner) -> str:
        """The same for ExecStart= of a unit."""
        del runner
        make = f"mkdir -p {shlex.quote(self.folder)} && " if self.folder else ""
        return f'/bin/sh -c "{make}echo {shlex.quote(self.text)} > {shlex.quote(self.path)}"'


Action = Union[Command, Write]


@dataclass(frozen=True)
class Step:
    """What brings some settings about."""

    settings: tuple[str, ...]
    actions: Sequence[Action]


class RdmaQos:
    """Brings a port to the settings that are wanted."""

    def __init__(self, tree: FileTree, runner: CommandRunner) -> None:
        self.tree, self.runner = tree, runner
        self.reader = RdmaReader(tree, runner)
        self.quality = QualityReader(tree, runner)

    def find(self, netdev: str) -> Port:
        """The RoCE port behind a network interface. Raises RdmaQosError if there is none."""
        check_netdev(netdev)
        ports = self.reader.all_ports()
        port = next((port for port in ports if port.netdev == netdev), None)
        known = ", ".join(port.netdev for port in ports if port.netdev and port.roce) or "none"
        if port is None:
            beneath = [
                entry[len("lower_") :]
                for entry in self.tree.names(f"{INTERFACES}/{netdev}")
                if entry.startswith("lower_")
            ]
            what = "no such interface" if not self.tree.exists(f"{INTERFACES}/{netdev}") else "no RDMA device behind it"
            hint = f"it stands on {', '.join(beneath)}; the settings belong there" if beneath else ""
            raise RdmaQosError(
                f"netdev to be the interface of a RoCE port of this host ({known})",
                f"{netdev}: {hint or what}",
                "name one of those interfaces" if known != "none" else "see that the card's RDMA driver is loaded",
            )
        if not port.roce:
            raise RdmaQosError(
                f"{netdev} to be a RoCE port (link layer Ethernet)",
                f"link layer {port.link_layer or 'unknown'} on {port.name}",
                "leave this port out; InfiniBand is lossless by itself",
            )
        return port

    def impossible(self, port: Port, wanted: Wanted, found: Quality) -> dict[str, str]:
        """Settings that are wanted and that driver or host can't do, with the reason."""
        reasons: dict[str, str] = {}
        for name in wanted.names:
            if name == "roce_mode":
                possible = self.tree.exists(CONFIGFS)
            elif name == "traffic_class":
                possible = bool(self._class_paths(port))
            else:
                possible = name == "mtu" or getattr(found, name) is not None
            if not possible:
                reasons[name] = found.unknown.get(name, "it can't be read")
        return reasons

    def check_port(self, port: Port, wanted: Wanted, found: Quality) -> None:
        """Raise RdmaQosError if the port is another's, or can't hold the values."""
        negotiated = [name for name in NEGOTIATED if name in wanted.names]
        if negotiated and found.dcbx_owner == "lldpad":
            raise RdmaQosError(
                f"{', '.join(negotiated)} of {port.netdev} to be the host's to set",
                "lldpad running, which overwrites them with what it negotiates",
                "stop it (systemctl disable --now lldpad.service lldpad.socket), or set these values through lldptool "
                "and leave them out here",
            )
        if negotiated and found.dcbx_owner == "firmware" and not wanted.take_dcbx:
            raise RdmaQosError(
                f"{', '.join(negotiated)} of {port.netdev} to be the host's to set",
                "that the card's firmware negotiates them (DCBX)",
                f"set dcbx=host, which is `dcb dcbx set dev {port.netdev} host ieee` or "
                f"`mlnx_qos -i {port.netdev} -d os`, or turn DCBX off in the firmware",
            )
        most = found.pfc_capacity
        if wanted.pfc_priorities is not None and most is not None and len(set(wanted.pfc_priorities)) > most:
            raise RdmaQosError(
                f"PFC on at most {most} priorities of {port.netdev} (pfc_cap)",
                f"{len(set(wanted.pfc_priorities))} in pfc_priorities",
                "name fewer priorities; RoCE needs one",
            )
        if (
            wanted.trust == "dscp"
            and found.tool == "dcb"
            and not wanted.dscp_to_priority
            and not found.dscp_to_priority
        ):
            raise RdmaQosError(
                f"entries in dscp_to_priority: the driver of {port.netdev} trusts DSCP only while there are some",
                "none, neither wanted nor present",
                "give the entry of RoCE's DSCP, for example {26: 3}",
            )
        self._check_mtu(port, wanted.mtu)

    def _check_mtu(self, port: Port, mtu: int | None) -> None:
        link = self.reader.links().get(port.netdev or "")
        if mtu is None or link is None:
            return
        least, most = link.minimum_mtu or SMALLEST_MTU, link.maximum_mtu or LARGEST_MTU
        if not least <= mtu <= most:
            raise RdmaQosError(
                f"an mtu from {least} to {most}, the range of {port.netdev}'s driver",
                str(mtu),
                "give an mtu in that range",
            )

    def differences(self, port: Port, wanted: Wanted, found: Quality) -> dict[str, tuple[Any, Any]]:
        """Setting -> what is there and what is to be, where the two are not the same."""
        result: dict[str, tuple[Any, Any]] = {}
        if wanted.take_dcbx and found.dcbx_owner == "firmware":
            result["dcbx_owner"] = ("firmware", "host")
        for name in wanted.names:
            target = getattr(wanted, name)
            present = self.mtu(port) if name == "mtu" else getattr(found, name)
            places: list[Any] = [present]
            if name == "dscp_to_priority":
                target = {**({} if wanted.dscp_exclusive else self._entries(wanted, found)), **target}
            elif name in ("pfc_priorities", "ecn_priorities"):
                target = sorted(set(target))
            if name == "ecn_priorities":
                places = [found.ecn_notification_priorities, found.ecn_reaction_priorities]
            elif name == "traffic_class":
                by_path = {CONFIGFS: found.traffic_class, driver_class_path(port): found.driver_traffic_class}
                places = [value for path, value in by_path.items() if self.tree.exists(path)] or [None]
            others = [place for place in places if place != target]
            if others:
                result[name] = (others[0], target)
        return result

    @staticmethod
    def _entries(wanted: Wanted, found: Quality) -> dict[int, int]:
        """Entries of the map that are there once DSCP is trusted: ``mlnx_qos`` brings one for each DSCP with that."""
        if found.tool == "mlnx_qos" and found.trust == "pcp" and wanted.trusted == "dscp":
            return {dscp: dscp >> 3 for dscp in dcb.DSCPS}
        return dict(found.dscp_to_priority or {})

    def mtu(self, port: Port) -> int | None:
        """MTU in bytes of the port's interface."""
        return self.tree.integer(f"{INTERFACES}/{port.netdev}/mtu")

    def steps(self, port: Port, wanted: Wanted, found: Quality, changing: Iterable[str] | None = None) -> list[Step]:
        """What brings the settings named in `changing` about (default: all that are wanted, as after a boot)."""
        netdev = port.netdev or ""
        tool = dcb.tool_for(netdev, self.tree, self.runner)
        names = set(wanted.names if changing is None else changing)
        steps: list[Step] = []

        def add(settings: Iterable[str], *actions: Action) -> None:
            steps.append(Step(tuple(name for name in settings if name in names), actions))

        if tool and wanted.take_dcbx and (changing is None or found.dcbx_owner == "firmware"):
            steps.append(Step(("dcbx_owner",), [Command(tool.dcbx(netdev))]))
        if "mtu" in names:
            add(["mtu"], Command(["ip", "link", "set", "dev", netdev, "mtu", str(wanted.mtu)]))
        pause = self._pause_words(wanted, names)
        if pause and "on" not in pause:
            add(["global_pause_rx", "global_pause_tx"], Command(["ethtool", "-A", netdev, *pause]))
        if tool and names & {"trust", "dscp_to_priority"}:
            add(["trust", "dscp_to_priority"], *self._trust(tool, netdev, wanted, found, changing is None))
        if tool and "pfc_priorities" in names:
            add(["pfc_priorities"], Command(tool.pfc(netdev, set(wanted.pfc_priorities or ()))))
        if pause and "on" in pause:
            add(["global_pause_rx", "global_pause_tx"], Command(["ethtool", "-A", netdev, *pause]))
        if "ecn_priorities" in names:
            add(["ecn_priorities"], *self._ecn(port, wanted, found, changing is None))
        if "roce_mode" in names:
            folder = configfs_folder(port)
            device = f"{CONFIGFS}/{port.device}"
            add(["roce_mode"], Write(f"{folder}/default_roce_mode", wanted.roce_mode or "", device))
        if "traffic_class" in names:
            writes = [Write(path, str(wanted.traffic_class), folder) for path, folder in self._class_paths(port)]
            add(["traffic_class"], *writes)
        return steps

    @staticmethod
    def _pause_words(wanted: Wanted, names: set[str]) -> list[str]:
        words = []
        for name, direction in (("global_pause_rx", "rx"), ("global_pause_tx", "tx")):
            if name in names:
                words += [direction, "on" if getattr(wanted, name) else "off"]
        return words

    def _trust(
        self,
        tool: dcb.DcbTool | dcb.MlnxQosTool,
        netdev: str,
        wanted: Wanted,
        found: Quality,
        whole: bool,
    ) -> list[Command]:
        mapping = dict(wanted.dscp_to_priority or {})
        trust = wanted.trusted
        surplus: dict[int, int] = {}
        if not whole:
            if wanted.dscp_exclusive:
                entries = self._entries(wanted, found)
                surplus = {dscp: priority for dscp, priority in entries.items() if dscp not in mapping}
            present = found.dscp_to_priority or {}
            mapping = {dscp: priority for dscp, priority in mapping.items() if present.get(dscp) != priority}
            if trust == found.trust:
                trust = None
        return [Command(words) for words in tool.trust_and_map(netdev, trust, mapping, surplus)]

    @staticmethod
    def _ecn(port: Port, wanted: Wanted, found: Quality, whole: bool) -> list[Write]:
        target = set(wanted.ecn_priorities or ())
        sides = {"notification": found.ecn_notification_priorities, "reaction": found.ecn_reaction_priorities}
        return [
            Write(f"{ecn_folder(port, side)}/{priority}", "1" if priority in target else "0")
            for side, present in sides.items()
            for priority in dcb.PRIORITIES
            if whole or (priority in target) != (priority in (present or ()))
        ]

    def _class_paths(self, port: Port) -> list[tuple[str, str]]:
        """Files that hold the traffic class here, each with the folder to make first."""
        paths = []
        if self.tree.exists(CONFIGFS):
            paths.append((f"{configfs_folder(port)}/default_roce_tos", f"{CONFIGFS}/{port.device}"))
        if self.tree.exists(driver_class_path(port)):
            paths.append((driver_class_path(port), ""))
        return paths

    def apply(self, port: Port, wanted: Wanted, found: Quality, changing: Iterable[str]) -> Quality:
        """Set what differs and read it back. Raises RdmaQosError, which names what is in force, if it can't be had."""
        names = list(changing)
        for step in self.steps(port, wanted, found, names):
            for action in step.actions:
                complaint = action.perform(self.tree, self.runner)
                if complaint:
                    raise self._half_done(port, wanted, step.settings, f"that it failed: {complaint}")
        after = self.quality.read(port)
        left = self.differences(port, wanted, after)
        if left:
            text = "; ".join(f"{name} is {_shown(has)}, not {_shown(target)}" for name, (has, target) in left.items())
            raise self._half_done(port, wanted, tuple(left), f"after commands that said they succeeded: {text}", after)
        return after

    def _half_done(
        self,
        port: Port,
        wanted: Wanted,
        failed: tuple[str, ...],
        found: str,
        after: Quality | None = None,
    ) -> RdmaQosError:
        quality = after or self.quality.read(port)
        left = self.differences(port, wanted, quality)
        in_force = {name: self.value(port, quality, name) for name in wanted.names if name not in left}
        still = {name: self.value(port, quality, name) for name in wanted.names if name in left}
        described = ", ".join(f"{name}={_shown(value)}" for name, value in in_force.items()) or "none of them"
        return RdmaQosError(
            f"to set {', '.join(failed)} of {port.netdev}",
            f"{found}. In force now: {described}. Not as wanted: "
            + (", ".join(f"{name}={_shown(value)}" for name, value in still.items()) or "none"),
            "look at the driver's messages (journalctl -k), mend that and run again. What is set holds until the next "
            "boot; a unit of an earlier run was left as it was",
            failed_settings=list(failed),
            in_force=in_force,
            not_in_force=still,
        )

    def value(self, port: Port, quality: Quality, name: str) -> Any:
        """One setting as found, in the form of the module's result."""
        if name == "mtu":
            return self.mtu(port)
        value = getattr(quality, name)
        return _with_text_keys(value) if name == "dscp_to_priority" else value


def _with_text_keys(mapping: Mapping[int, int] | None) -> dict[str, int] | None:
    return None if mapping is None else {str(key): mapping[key] for key in sorted(mapping)}


def _shown(value: Any) -> str:
    if value is None:
        return "unknown"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key}: {each}" for key, each in sorted(value.items())) + "}"
    return str(value)
