# Copyright (c) 2026, the Ringmaster authors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Priority flow control and DSCP trust of a port, through ``dcb`` of iproute2 or ``mlnx_qos`` of NVIDIA's tools.

Both are clients of the kernel's DCB netlink interface. The in-tree mlx5 driver has no switch for trust: it trusts DSCP
while there is at least one DSCP application entry, and PCP while there is none; ``mlnx_qos --trust`` does the same
through such entries, or through ``qos/trust`` in sysfs where NVIDIA's own driver has it.

Sources: iproute2 ``dcb/dcb_pfc.c``, ``dcb_app.c``, ``dcb_dcbx.c``, ``dcb_apptrust.c``; Mellanox/mlnx-tools
``mlnx_qos``; Linux ``drivers/net/ethernet/mellanox/mlx5/core/en_dcbnl.c``. Nothing here imports Ansible.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from ansible_collections.ringmaster.inference.plugins.module_utils.commands import Answer, CommandRunner
from ansible_collections.ringmaster.inference.plugins.module_utils.file_tree import FileTree

PRIORITIES = range(8)
DSCPS = range(64)
TRUSTS = ("pcp", "dscp")

_MLNX_PRIORITY = re.compile(r"\s*prio:([0-7])\s+dscp:([0-9, ]*)\Z", re.ASCII)


@dataclass(frozen=True)
class PortDcb:
    """What a port is set to. A value that isn't known is None, and `unknown` has the reason under its name."""

    tool: str | None = None
    trust: str | None = None
    dscp_to_priority: dict[int, int] | None = None
    pfc_priorities: list[int] | None = None
    pfc_capacity: int | None = None
    dcbx_host: bool | None = None
    unknown: dict[str, str] = field(default_factory=dict)


def parse_pfc(text: str) -> tuple[list[int], int | None] | None:
    """Priorities with PFC, and how many may have it, of ``dcb -j pfc show``."""
    document = _object(text)
    flags = document.get("prio_pfc") if document else None
    if (
        not isinstance(flags, list)
        or len(flags) != len(PRIORITIES)
        or not all(isinstance(each, bool) for each in flags)
    ):
        return None
    capacity = document.get("pfc_cap") if document else None
    if not _in(capacity, range(1, 9)):
        capacity = None
    return [priority for priority in PRIORITIES if flags[priority]], capacity


def parse_app(text: str) -> dict[int, int] | None:
    """DSCP -> priority of ``dcb -j -N app show``. Of several entries for one DSCP the highest priority counts.

    Some releases print a third element in each entry; it says nothing.
    """
    document = _object(text)
    entries = document.get("dscp_prio", []) if document is not None else None
    if not isinstance(entries, list):
        return None
    found: dict[int, int] = {}
    for entry in entries:
        if not isinstance(entry, list) or len(entry) < 2 or not _in(entry[0], DSCPS) or not _in(entry[1], PRIORITIES):
            return None
        found[entry[0]] = max(entry[1], found.get(entry[0], 0))
    return found


def parse_dcbx(text: str) -> bool | None:
    """Whether the host negotiates itself, of ``dcb -j dcbx show``; flags that are off are not printed."""
    document = _object(text)
    return None if document is None else document.get("host") is True and document.get("lld_managed") is not True


def parse_apptrust(text: str) -> str | None:
    """What comes first in the order of trust of ``dcb -j apptrust show``, if it is DSCP or PCP."""
    document = _object(text)
    order = document.get("order") if document else None
    first = next(iter(order), None) if isinstance(order, list) else None
    return first if first in TRUSTS else None


def parse_mlnx_qos(text: str) -> PortDcb:
    """What ``mlnx_qos -i`` prints. The map from DSCP is printed only while DSCP is trusted."""
    host: bool | None = None
    trust: str | None = None
    mapping: dict[int, int] = {}
    priorities: list[int] | None = None
    for line in text.splitlines():
        if line.startswith("DCBX mode:"):
            host = {"os controlled": True, "firmware controlled": False}.get(line.partition(":")[2].strip().lower())
        elif line.startswith("Priority trust state:"):
            word = line.partition(":")[2].strip().lower()
            trust = word if word in TRUSTS else None
        elif _MLNX_PRIORITY.match(line):
            mapping.update(_mlnx_priority(line))
        elif line.split()[:1] == ["enabled"] and priorities is None:
            flags = line.split()[1:]
            if len(flags) == len(PRIORITIES) and all(flag in ("0", "1") for flag in flags):
                priorities = [priority for priority in PRIORITIES if flags[priority] == "1"]
    unknown = {"pfc_capacity": "mlnx_qos does not tell it"}
    for name, value in (("trust", trust), ("pfc_priorities", priorities), ("dcbx_host", host)):
        if value is None:
            unknown[name] = "mlnx_qos printed nothing about it"
    if trust is None:
        unknown["dscp_to_priority"] = unknown["trust"]
    elif trust == "pcp":
        mapping = {}
    return PortDcb("mlnx_qos", trust, None if trust is None else mapping, priorities, None, host, unknown)


def _mlnx_priority(line: str) -> dict[int, int]:
    found = _MLNX_PRIORITY.match(line)
    if not found:
        return {}
    words = [word.strip() for word in found.group(2).split(",")]
    return {int(word): int(found.group(1)) for word in words if word.isdigit() and int(word) in DSCPS}


def _object(text: str) -> dict[str, Any] | None:
    try:
        document = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return document if isinstance(document, dict) else None


def _in(value: Any, numbers: range) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value in numbers


class DcbTool:
    """``dcb`` of iproute2 (5.11 and later)."""

    name = "dcb"

    def __init__(self, tree: FileTree, runner: CommandRunner) -> None:
        self.tree, self.runner = tree, runner

    def read(self, netdev: str, driver: str | None) -> PortDcb:
        """What the port is set to; `driver` is the name of its kernel driver, None if that is unknown."""
        unknown: dict[str, str] = {}

        def ask(field_name: str, *words: str) -> str:
            answer = self.runner.run(["dcb", *words, "dev", netdev])
            if not answer.ok:
                unknown[field_name] = _why(answer, " ".join(("dcb", *words)))
            return answer.output if answer.ok else ""

        pfc = parse_pfc(ask("pfc_priorities", "-j", "pfc", "show"))
        mapping = parse_app(ask("dscp_to_priority", "-j", "-N", "app", "show"))
        host = parse_dcbx(ask("dcbx_host", "-j", "dcbx", "show"))
        for name, value in (("pfc_priorities", pfc), ("dscp_to_priority", mapping), ("dcbx_host", host)):
            if value is None:
                unknown.setdefault(name, "dcb printed nothing that is understood")
        priorities, capacity = pfc or (None, None)
        if capacity is None:
            unknown["pfc_capacity"] = unknown.get("pfc_priorities", "dcb does not tell it")
        trust = self._trust(netdev, driver, mapping, unknown)
        return PortDcb("dcb", trust, mapping, priorities, capacity, host, unknown)

    def _trust(
        self, netdev: str, driver: str | None, mapping: Mapping[int, int] | None, unknown: dict[str, str]
    ) -> str | None:
        path = f"/sys/class/net/{netdev}/qos/trust"
        in_sysfs = self.tree.text(path)
        if in_sysfs in TRUSTS:
            return in_sysfs
        if driver == "mlx5_core":
            if mapping is None:
                unknown["trust"] = unknown["dscp_to_priority"]
                return None
            return "dscp" if mapping else "pcp"
        answer = self.runner.run(["dcb", "-j", "apptrust", "show", "dev", netdev])
        trust = parse_apptrust(answer.output) if answer.ok else None
        if trust is None:
            unknown["trust"] = f"how driver {driver or '(unknown)'} trusts is not known: no {path}, no dcb apptrust"
        return trust

    def trust_and_map(
        self, netdev: str, trust: str | None, mapping: Mapping[int, int], surplus: Mapping[int, int]
    ) -> list[list[str]]:
        """Commands that set the entries of `mapping`, remove those of `surplus`, and so bring `trust` about."""
        if trust == "pcp":
            return [["dcb", "app", "flush", "dev", netdev, "dscp-prio"]]
        commands = []
        if mapping:
            commands.append(["dcb", "app", "replace", "dev", netdev, "dscp-prio", *_pairs(mapping)])
        if surplus:
            commands.append(["dcb", "app", "del", "dev", netdev, "dscp-prio", *_pairs(surplus)])
        return commands

    def pfc(self, netdev: str, priorities: Collection[int]) -> list[str]:
        """Command that turns PFC on for these priorities and off for all others."""
        switched_on = [f"{each}:on" for each in sorted(priorities)]
        return ["dcb", "pfc", "set", "dev", netdev, "prio-pfc", "all:off", *switched_on]

    def dcbx(self, netdev: str) -> list[str]:
        """Command that takes the negotiation from the card's firmware."""
        return ["dcb", "dcbx", "set", "dev", netdev, "host", "ieee"]


class MlnxQosTool:
    """``mlnx_qos`` of MLNX_OFED, DOCA-OFED and mlnx-tools."""

    name = "mlnx_qos"

    def __init__(self, tree: FileTree, runner: CommandRunner) -> None:
        self.tree, self.runner = tree, runner

    def read(self, netdev: str, driver: str | None) -> PortDcb:
        """What the port is set to. `driver` plays no part here: the tool says itself what is trusted."""
        del driver
        answer = self.runner.run(["mlnx_qos", "-i", netdev])
        if answer.ok:
            return parse_mlnx_qos(answer.output)
        reason = _why(answer, f"mlnx_qos -i {netdev}")
        names = ("trust", "dscp_to_priority", "pfc_priorities", "pfc_capacity", "dcbx_host")
        return PortDcb("mlnx_qos", unknown=dict.fromkeys(names, reason))

    def trust_and_map(
        self, netdev: str, trust: str | None, mapping: Mapping[int, int], surplus: Mapping[int, int]
    ) -> list[list[str]]:
        """As :meth:`DcbTool.trust_and_map`.

        The tool refuses trust and entries in one call, and trust brings default entries, so that it goes first.
        """
        commands = [["mlnx_qos", "-i", netdev, "--trust", trust]] if trust else []
        changes = [f"set,{dscp},{priority}" for dscp, priority in sorted(mapping.items())]
        changes += [f"del,{dscp},{priority}" for dscp, priority in sorted(surplus.items())]
        if changes and trust != "pcp":
            commands.append(["mlnx_qos", "-i", netdev, *(word for each in changes for word in ("--dscp2prio", each))])
        return commands

    def pfc(self, netdev: str, priorities: Collection[int]) -> list[str]:
        """As :meth:`DcbTool.pfc`."""
        return ["mlnx_qos", "-i", netdev, "--pfc", ",".join("1" if each in priorities else "0" for each in PRIORITIES)]

    def dcbx(self, netdev: str) -> list[str]:
        """As :meth:`DcbTool.dcbx`."""
        return ["mlnx_qos", "-i", netdev, "-d", "os"]


def tool_for(netdev: str, tree: FileTree, runner: CommandRunner) -> DcbTool | MlnxQosTool | None:
    """The tool of this host for this port; None if it has neither.

    Where NVIDIA's own driver keeps trust in sysfs, its own tool knows better; else ``dcb``, which distributions have.
    """
    has_dcb, has_mlnx_qos = (runner.locate(name) is not None for name in ("dcb", "mlnx_qos"))
    if has_mlnx_qos and (not has_dcb or tree.exists(f"/sys/class/net/{netdev}/qos/trust")):
        return MlnxQosTool(tree, runner)
    return DcbTool(tree, runner) if has_dcb else None


def lldpad_runs(tree: FileTree) -> bool:
    """Whether the LLDP agent runs; it sets PFC and application entries of every port as it negotiates them."""
    return any(name.isdigit() and tree.text(f"/proc/{name}/comm") == "lldpad" for name in tree.names("/proc"))


def _pairs(mapping: Mapping[int, int]) -> list[str]:
    return [f"{dscp}:{priority}" for dscp, priority in sorted(mapping.items())]


def _why(answer: Answer, command: str) -> str:
    if answer.status is None:
        return answer.complaint
    said = answer.complaint or answer.output.strip()
    return f"`{command}` failed: {said.splitlines()[-1] if said else f'exit status {answer.status}'}"
