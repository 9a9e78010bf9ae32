# Copyright (c) 2026, the Ringmaster authors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""RDMA devices and ports of a host: what they are, how they stand, and what they count.

Reads ``/sys/class/infiniband``, and for what is not there ``ip``, ``ethtool`` and ``ibv_devinfo``. Changes nothing. A
value that can't be known is None and has its reason in ``unknown``. Nothing here imports Ansible.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from ansible_collections.ringmaster.inference.plugins.module_utils import rdma_formats as formats
from ansible_collections.ringmaster.inference.plugins.module_utils.commands import CommandRunner
from ansible_collections.ringmaster.inference.plugins.module_utils.file_tree import FileTree, parse_integer
from ansible_collections.ringmaster.inference.plugins.module_utils.rdma_health import Sample

DEVICES = "/sys/class/infiniband"
INTERFACES = "/sys/class/net"

# How long values are cached in milliseconds; the one file of hw_counters that counts nothing.
NOT_A_COUNTER = "lifespan"
# Port data is counted in words of four bytes.
DATA_WORD = 4
# Longer chains of parent processes than this are no way from a module to its SSH server.
_MOST_PARENTS = 40
_SSH_CONNECTION = re.compile(r"SSH_CONNECTION=(\S+) \d+ (\S+) \d")


@dataclass(frozen=True)
class Port:
    """One port of an RDMA device. `netdev` is its network interface, `driver` the kernel driver of its PCI function."""

    device: str
    number: int
    link_layer: str | None
    netdev: str | None
    pci_address: str | None
    driver: str | None

    @property
    def path(self) -> str:
        """Its folder in sysfs."""
        return f"{DEVICES}/{self.device}/ports/{self.number}"

    @property
    def name(self) -> str:
        """``mlx5_0/1``, as ``rdma`` of iproute2 names it."""
        return f"{self.device}/{self.number}"

    @property
    def roce(self) -> bool:
        """Whether RDMA goes over Ethernet here. The link layer tells; the transport is InfiniBand in any case."""
        return self.link_layer == "Ethernet"


class RdmaReader:
    """Devices and ports below the root of `tree`."""

    def __init__(self, tree: FileTree, runner: CommandRunner) -> None:
        self.tree, self.runner = tree, runner
        self._links: dict[str, formats.Link] | None = None
        self._active_mtus: dict[tuple[str, int], int] | None = None

    # Which there are

    def device_names(self) -> list[str]:
        """RDMA devices, in order; empty on a host without."""
        return self.tree.names(DEVICES)

    def ports(self, device: str) -> list[Port]:
        """Ports of a device."""
        base = f"{DEVICES}/{device}"
        function = self.tree.resolve(f"{base}/device") or ""
        driver = self.tree.resolve(f"{base}/device/driver")
        ports = []
        for name in self.tree.names(f"{base}/ports"):
            number = parse_integer(name)
            if number is None:
                continue
            netdev = self._netdev(base, number)
            ports.append(
                Port(
                    device,
                    number,
                    self.tree.text(f"{base}/ports/{name}/link_layer"),
                    netdev,
                    _pci_address(function),
                    driver.rsplit("/", 1)[-1] if driver else None,
                )
            )
        return ports

    def all_ports(self) -> list[Port]:
        """Ports of all devices."""
        return [port for device in self.device_names() for port in self.ports(device)]

    def _netdev(self, base: str, number: int) -> str | None:
        """The interface of a port: below the same PCI function, and the one that the port's GIDs belong to."""
        attributes = f"{base}/ports/{number}/gid_attrs/ndevs"
        of_gids = [self.tree.text(f"{attributes}/{index}") for index in self.tree.names(attributes)[:2]]
        below = self.tree.names(f"{base}/device/net")
        for netdev in of_gids:
            if netdev in below:
                return netdev
        for netdev in below:
            # Two ports of one function are told apart by this number, which begins at 0.
            if self.tree.integer(f"{base}/device/net/{netdev}/dev_port") == number - 1:
                return netdev
        if len(below) == 1:
            return below[0]
        return None if below else next((netdev for netdev in of_gids if netdev), None)

    def _function(self, device: str) -> str | None:
        """``physical``, ``virtual`` (SR-IOV) or ``sub``: whether the port itself is this one's to set."""
        path = self.tree.resolve(f"{DEVICES}/{device}/device")
        if path is None or _pci_address(path) is None:
            return None
        if self.tree.exists(f"{DEVICES}/{device}/device/physfn"):
            return "virtual"
        return "physical" if formats.parse_pci_address(path) else "sub"

    # Devices

    def device(self, name: str) -> dict[str, Any]:
        """What a device is, without its ports."""
        base = f"{DEVICES}/{name}"
        facts = _Facts(self.tree)
        hca_type = facts.text("hca_type", f"{base}/hca_type")
        function = self.tree.resolve(f"{base}/device") or ""
        driver = self.tree.resolve(f"{base}/device/driver")
        node = facts.text("node_type", f"{base}/node_type")
        facts.values.update(
            device=name,
            model=formats.MODELS.get(hca_type or ""),
            firmware=facts.text("firmware", f"{base}/fw_ver"),
            psid=facts.text("psid", f"{base}/board_id"),
            node_guid=facts.text("node_guid", f"{base}/node_guid"),
            node_type=(node.partition(":")[2].strip() or node) if node else None,
            pci_address=_pci_address(function),
            driver=driver.rsplit("/", 1)[-1] if driver else None,
            numa_node=facts.numa_node(f"{base}/device/numa_node"),
        )
        facts.explain("model", f"no name is known for type {hca_type}" if hca_type else "the type is unknown")
        facts.explain("pci_address", "the device lies below no PCI function")
        facts.explain("driver", f"{base}/device/driver leads nowhere")
        return facts.document()

    # Ports

    def port(self, port: Port, address: str | None = None, wanted_netdev: str | None = None) -> dict[str, Any]:
        """How a port stands. The GID is chosen for `wanted_netdev` (default: the port's own) and `address`."""
        facts = _Facts(self.tree)
        rate_path = f"{port.path}/rate"
        rate = formats.parse_rate(self.tree.text(rate_path))
        gids = self.gids(port)
        facts.values.update(
            device=port.device,
            port=port.number,
            netdev=port.netdev,
            pci_address=port.pci_address,
            link_layer=facts.text("link_layer", f"{port.path}/link_layer"),
            roce=port.roce,
            state=facts.parsed("state", f"{port.path}/state", formats.parse_state),
            phys_state=facts.parsed("phys_state", f"{port.path}/phys_state", formats.parse_state),
            rate_gb_per_second=rate.gigabits if rate else None,
            lanes=rate.lanes if rate else None,
            generation=rate.generation if rate else None,
            function=self._function(port.device),
            numa_node=facts.numa_node(f"{DEVICES}/{port.device}/device/numa_node"),
            gids=gids,
        )
        facts.explain("function", "the device lies below no PCI function")
        facts.explain("netdev", "no network interface belongs to this port in this network namespace")
        facts.explain("pci_address", "the device lies below no PCI function")
        for name in ("rate_gb_per_second", "lanes", "generation"):
            facts.explain(name, facts.why_no(rate_path) if rate is None else "the kernel does not tell it")
        self._choose_gids(facts, port, gids, address, wanted_netdev)
        self._mtus(facts, port)
        return facts.document()

    def gids(self, port: Port) -> list[dict[str, Any]]:
        """Occupied slots of the GID table: index, GID, type, interface, and the IP address that a RoCE GID stands for.

        Type and interface of a slot that is emptied in that moment can't be read: it counts as empty.
        """
        found = []
        for name in self.tree.names(f"{port.path}/gids"):
            index = parse_integer(name)
            gid = formats.parse_gid(self.tree.text(f"{port.path}/gids/{name}"))
            kind = self.tree.text(f"{port.path}/gid_attrs/types/{name}") if gid else None
            if index is None or gid is None or (port.roce and kind is None):
                continue
            found.append(
                {
                    "index": index,
                    "gid": gid,
                    "type": kind,
                    "netdev": self.tree.text(f"{port.path}/gid_attrs/ndevs/{name}") or None,
                    "address": formats.gid_address(gid) if port.roce else None,
                }
            )
        return found

    def _choose_gids(
        self,
        facts: _Facts,
        port: Port,
        gids: list[dict[str, Any]],
        address: str | None,
        wanted_netdev: str | None,
    ) -> None:
        netdevs = list(dict.fromkeys(gid["netdev"] for gid in gids if gid["netdev"]))
        by_netdev = {
            netdev: choose_gid(gids, netdev, [address] if address else self._addresses(netdev), bool(address))
            for netdev in netdevs
        }
        wanted = wanted_netdev or port.netdev
        master = self.tree.resolve(f"{INTERFACES}/{port.netdev}/master") if port.netdev else None
        if not wanted_netdev and wanted not in by_netdev and master:
            wanted = master.rsplit("/", 1)[-1]  # the GIDs of a bond's ports belong to the bond
        chosen = by_netdev.get(wanted) if wanted else None
        facts.values.update(gid_netdev=wanted, roce_v2_gid_index=chosen, roce_v2_gid_index_by_netdev=by_netdev)
        facts.explain("gid_netdev", "the port has no network interface")
        if not port.roce:
            facts.explain("roce_v2_gid_index", "the port is not a RoCE port")
        facts.explain(
            "roce_v2_gid_index",
            f"no RoCE v2 GID of {wanted} has " + (f"the address {address}" if address else "a routable address"),
        )

    def _addresses(self, netdev: str) -> list[str]:
        link = self.links().get(netdev)
        return list(link.addresses) if link else []

    def _mtus(self, facts: _Facts, port: Port) -> None:
        mtu = facts.integer("mtu_bytes", f"{INTERFACES}/{port.netdev}/mtu") if port.netdev else None
        active = self.active_mtus().get((port.device, port.number))
        derived = formats.roce_mtu(mtu) if mtu is not None and port.roce else None
        facts.values.update(
            mtu_bytes=mtu,
            roce_mtu_bytes=active if active is not None else derived,
            roce_mtu_source="ibv_devinfo" if active is not None else "derived" if derived is not None else None,
        )
        facts.explain("mtu_bytes", "the port has no network interface")
        for name in ("roce_mtu_bytes", "roce_mtu_source"):
            facts.explain(name, "ibv_devinfo does not tell it, and it can't be derived from the interface's MTU")

    def links(self) -> dict[str, formats.Link]:
        """Network interfaces with their addresses, as ``ip`` knows them; empty where there is no ``ip``."""
        if self._links is None:
            answer = self.runner.run(["ip", "-json", "-details", "address", "show"])
            self._links = formats.parse_links(answer.output) if answer.ok else {}
        return self._links

    def active_mtus(self) -> dict[tuple[str, int], int]:
        """MTU in bytes in use on each port, by ``ibv_devinfo`` where it is installed; sysfs does not have it."""
        if self._active_mtus is None:
            answer = self.runner.run(["ibv_devinfo"])
            self._active_mtus = formats.parse_active_mtus(answer.output) if answer.ok else {}
        return self._active_mtus

    # Counters

    def counters(self, port: Port) -> dict[str, Any]:
        """Counters as they stand: the PMA view, the card's own, and the network interface's."""
        facts = _Facts(self.tree)
        pma = facts.counters("counters", f"{port.path}/counters")
        hardware = facts.counters("hw_counters", f"{port.path}/hw_counters")
        ethernet, complaint = self.ethernet_counters(port)
        facts.values.update(
            counters=pma,
            saturated_counters=[
                name
                for name, bits in formats.SATURATING_BITS.items()
                if (pma.get(name) or 0) >= (1 << bits) - 1  # a kernel that reads wider fields has more
            ],
            received_bytes=_times(pma.get("port_rcv_data"), DATA_WORD),
            sent_bytes=_times(pma.get("port_xmit_data"), DATA_WORD),
            hw_counters=hardware,
            ethtool_counters=ethernet,
        )
        for name, counter in (("received_bytes", "port_rcv_data"), ("sent_bytes", "port_xmit_data")):
            facts.explain(name, f"there is no counter {counter}")
        facts.explain("ethtool_counters", complaint)
        return facts.document()

    def ethernet_counters(self, port: Port) -> tuple[dict[str, int] | None, str]:
        """The port's counters by ``ethtool -S``, and the reason if there are none."""
        if port.netdev is None:
            return None, "the port has no network interface"
        answer = self.runner.run(["ethtool", "-S", port.netdev])
        if not answer.ok:
            return None, answer.complaint or f"ethtool -S {port.netdev} ended with status {answer.status}"
        return formats.parse_ethtool_statistics(answer.output), ""

    def sample(
        self, port: Port, ethernet: Mapping[str, int] | None = None, names: Iterable[str] | None = None
    ) -> Sample:
        """Counters of a port now, for a window. `ethernet` spares a call of ``ethtool`` where they were just read.

        `names` limits the files of ``hw_counters`` that are read, to ``rdma_health.HARDWARE_COUNTERS`` for example.
        """
        folder = f"{port.path}/hw_counters"
        wanted = self.tree.names(folder) if names is None else names
        hardware = {name: self.tree.integer(f"{folder}/{name}") for name in wanted}
        if ethernet is None:
            ethernet = self.ethernet_counters(port)[0] or {}
        # A driver that is loaded again makes a new interface, and every new interface gets a new number.
        number = self.tree.text(f"{INTERFACES}/{port.netdev}/ifindex") if port.netdev else None
        return Sample(
            time.clock_gettime(time.CLOCK_BOOTTIME),
            self.tree.boot_id(),
            number,
            {name: value for name, value in hardware.items() if value is not None and name != NOT_A_COUNTER},
            ethernet,
        )

    # Which interface must not be touched

    def session_netdevs(
        self, environment: Mapping[str, str] | None = None, process: int | None = None
    ) -> list[str] | None:
        """Interfaces that carry the SSH session of this process, with those beneath them (a bond's ports).

        None if the session is not known, or is no SSH session. sudo hides the session's environment from this process,
        but not from root, who can read it in a parent.
        """
        here = self._session_address(os.environ if environment is None else environment, process or os.getpid())
        if here is None:
            return None
        holders = [link.netdev for link in self.links().values() if _holds(link, here)]
        found: list[str] = []
        while holders:
            netdev = holders.pop()
            if netdev not in found:
                found.append(netdev)
                entries = self.tree.names(f"{INTERFACES}/{netdev}")
                holders += [entry[len("lower_") :] for entry in entries if entry.startswith("lower_")]
        return sorted(found) or None

    def _session_address(self, environment: Mapping[str, str], process: int) -> str | None:
        texts = [f"SSH_CONNECTION={environment.get('SSH_CONNECTION', '')}"]
        for _unused in range(_MOST_PARENTS):
            if process < 1:
                break
            texts.append(self.tree.raw(f"/proc/{process}/environ") or "")
            # The name in brackets may hold anything; state and parent follow its last bracket.
            words = (self.tree.text(f"/proc/{process}/stat") or "").rpartition(")")[2].split()
            process = (parse_integer(words[1]) if len(words) > 1 else None) or 0
        return next((found.group(2) for found in map(_SSH_CONNECTION.search, texts) if found), None)


def choose_gid(
    gids: Iterable[Mapping[str, Any]], netdev: str, addresses: list[str], only_these: bool = False
) -> int | None:
    """Index of the GID with which to speak RoCE v2 from `netdev`.

    The one that stands for an IPv4 address of the host, the first of `addresses` that has one; else one for a routable
    IPv6 address; never the link-local one. With `only_these` no other address than those will do.
    """
    usable = [
        gid
        for gid in gids
        if gid["type"] == formats.ROCE_V2
        and gid["netdev"] == netdev
        and gid["address"] is not None
        and not formats.is_link_local(gid["address"])
    ]
    listed = [gid for address in addresses for gid in usable if formats.same_address(gid["address"], address)]
    candidates = listed if listed or only_these else usable
    chosen = next((gid for gid in candidates if ":" not in gid["address"]), next(iter(candidates), None))
    return None if chosen is None else int(chosen["index"])


class _Facts:
    """Values that were read, with the reason for each that was not."""

    def __init__(self, tree: FileTree) -> None:
        self.tree = tree
        self.values: dict[str, Any] = {}
        self.unknown: dict[str, str] = {}

    def text(self, name: str, path: str) -> str | None:
        """Content of a file."""
        text = self.tree.text(path) or None
        self.values[name] = text
        if text is None:
            self.unknown[name] = self.why_no(path)
        return text

    def parsed(self, name: str, path: str, parse: Callable[[str | None], Any]) -> Any:
        """What a file says; None if it is unreadable or says something else."""
        value = parse(self.tree.text(path))
        if value is None:
            self.unknown[name] = self.why_no(path)
        return value

    def integer(self, name: str, path: str) -> int | None:
        """A number in a file."""
        value: int | None = self.parsed(name, path, parse_integer)
        return value

    def numa_node(self, path: str) -> int | None:
        """Number of the NUMA node; the kernel says -1 where the firmware tells none."""
        node = self.integer("numa_node", path)
        if node is not None and node < 0:
            self.unknown["numa_node"] = "the firmware tells no NUMA node"
        return node if node is not None and node >= 0 else None

    def counters(self, prefix: str, folder: str) -> dict[str, int | None]:
        """All counters in a folder; one that says ``N/A (no PMA)`` or can't be read is None, with the reason."""
        found: dict[str, int | None] = {}
        for name in self.tree.names(folder):
            if name != NOT_A_COUNTER:
                found[name] = self.integer(f"{prefix}.{name}", f"{folder}/{name}")
        if not found:
            self.unknown[prefix] = f"{folder}: no such folder, or nothing in it"
        return found

    def explain(self, name: str, reason: str) -> None:
        """Give the reason for a value, if it is None and has none yet."""
        if self.values.get(name) is None:
            self.unknown.setdefault(name, reason)

    def why_no(self, path: str) -> str:
        """Why a file has nothing to say."""
        complaint = self.tree.complaint(path)
        if complaint:
            return f"{path}: {complaint}"
        found = self.tree.text(path) or ""
        return f"{path} holds {found[:60]!r}" if found else f"{path} is empty"

    def document(self) -> dict[str, Any]:
        """The values, with ``unknown``."""
        return {**self.values, "unknown": self.unknown}


def _holds(link: formats.Link, address: str) -> bool:
    return any(formats.same_address(each, address) for each in link.addresses)


def _pci_address(path: str) -> str | None:
    """Address of the innermost PCI function on a path below ``/sys/devices``; a subfunction lies in a folder of it."""
    return next(filter(None, map(formats.parse_pci_address, reversed(path.split("/")))), None)


def _times(value: int | None, factor: int) -> int | None:
    return None if value is None else value * factor
