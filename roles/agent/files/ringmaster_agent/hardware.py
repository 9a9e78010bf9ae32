# SPDX-License-Identifier: GPL-3.0-or-later
"""What the readers of ``module_utils`` say of a host's hardware, as subjects and quantities of the stream.

Each lane reads one kind of hardware, whole, whenever it is asked, and names each step before it takes it: a step that
does not end tells which card or port it was. Steps that are suspended (a card whose driver hangs) are left out, and
what they would have read is unknown, with the reason. The step named like its lane is the one without which the lane
reads nothing; who suspends that, does not ask the lane.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

from ansible_collections.ringmaster.inference.plugins.module_utils import gpu as gpu_module
from ansible_collections.ringmaster.inference.plugins.module_utils import rdma_health
from ansible_collections.ringmaster.inference.plugins.module_utils.commands import CommandRunner
from ansible_collections.ringmaster.inference.plugins.module_utils.ethernet_statistics import EthernetStatistics
from ansible_collections.ringmaster.inference.plugins.module_utils.file_tree import FileTree, KeptFileTree
from ansible_collections.ringmaster.inference.plugins.module_utils.nvlink import NvlinkReader
from ansible_collections.ringmaster.inference.plugins.module_utils.nvml import (
    Nvml,
    NvmlUnavailableError,
    find_library,
)
from ansible_collections.ringmaster.inference.plugins.module_utils.pcie import SEVERITIES, Endpoint, PcieReader
from ansible_collections.ringmaster.inference.plugins.module_utils.rdma import DEVICES as RDMA_DEVICES
from ansible_collections.ringmaster.inference.plugins.module_utils.rdma import Port, RdmaReader
from ansible_collections.ringmaster.inference.plugins.module_utils.rdma_formats import parse_state

# How often it is looked which devices there are, in seconds. They come and go with a reset, a driver or a rescan.
RESCAN_SECONDS: Final = 30.0
# How long a session of NVML is kept with which a card could not be read: after a reset only a new one finds the card.
ILL_SESSION_SECONDS: Final = 30.0

Step = Callable[[str], None]
"""Says which step is taken next, by name."""


@dataclass
class Report:
    """What a lane read: subjects with their quantities and why some are not known, and why a whole reader failed.

    A subject that is not in it is gone; of a reader that failed, all that it reads is unknown.
    """

    values: dict[str, dict[str, Any]] = field(default_factory=dict)
    unknown: dict[str, str] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)

    def put(self, subject: str, quantities: Mapping[str, Any], unknown: Mapping[str, str]) -> None:
        """Keep a subject, and its reasons in one text."""
        self.values[subject] = dict(quantities)
        names: dict[str, list[str]] = {}
        for name, reason in unknown.items():
            if name in quantities:
                names.setdefault(reason, []).append(name)
        if names:
            self.unknown[subject] = "; ".join(f"{_list(found)}: {reason}" for reason, found in names.items())


def _list(names: list[str]) -> str:
    """The names, or the first of many: a card that is lost tells none of twenty quantities for one reason."""
    return ", ".join(names if len(names) <= 3 else [*names[:2], f"{len(names) - 2} others"])


class Lane(Protocol):
    """One kind of hardware, and the readers of the stream that it feeds."""

    readers: tuple[str, ...]

    def read(self, suspended: Mapping[str, str], step: Step) -> Report:
        """Read everything but the suspended steps."""


class _Bus:
    """Where silent cards are, and which ones NVML does not list, by a walk over the bus every now and then."""

    def __init__(self, files: FileTree) -> None:
        self._files = files
        self._walked_at = 0.0
        self._cards: list[tuple[Any, ...]] | None = None
        self._placed: dict[int, dict[str, Any]] = {}
        self._unlisted: list[dict[str, Any]] = []

    def place(self, cards: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Give cards that do not tell where they are their places; gives the cards that are on the bus only."""
        now = time.monotonic()
        found = [(card["index"], card["uuid"], card["pci_address"]) for card in cards]
        silent = [card for card in cards if card["pci_address"] is None]
        if found != self._cards or now - self._walked_at > RESCAN_SECONDS:
            gpu_module.place(cards, self._files)
            names = ("pci_address", "uuid", "model")
            self._placed = {card["index"]: {name: card[name] for name in names} for card in silent}
            self._unlisted = gpu_module.unlisted(cards, self._files)
            self._walked_at, self._cards = now, found
        else:
            for card in silent:
                card.update(self._placed[card["index"]])
        return [dict(card) for card in self._unlisted]


class CardLane:
    """Cards and their NVLinks, through one session of NVML.

    Raises NvmlUnavailableError from `read` if nothing can be read.
    """

    readers: tuple[str, ...] = ("gpu", "nvlink")

    def __init__(self, files: FileTree, library: Callable[[], Any] = find_library) -> None:
        self._files = files
        self._library = library
        self._reader: NvlinkReader | None = None
        self._well_at = 0.0
        self._bus = _Bus(files)

    def read(self, suspended: Mapping[str, str], step: Step) -> Report:
        """Read all cards that NVML lists; those that it does not are looked for on the bus."""
        step("nvml")
        if self._reader is None:
            self._reader = NvlinkReader(Nvml(self._library(), self._files), self._files)
            self._well_at = time.monotonic()
        try:
            count = self._reader.system()["count"]
        except NvmlUnavailableError:
            self._reader = None
            raise
        cards = []
        for index in range(count):
            name = f"gpu {index}"
            if name in suspended:
                cards.append(gpu_module.no_answer(index, suspended[name]))
                continue
            step(name)
            card = self._reader.vitals(index)
            card["nvlink"] = self._reader.health(index, card["model"])
            cards.append(card)
        step("nvml")
        cards += self._bus.place(cards)
        self._renew(cards)
        report = Report()
        for card in cards:
            _put_card(report, card)
        return report

    def _renew(self, cards: list[dict[str, Any]]) -> None:
        now = time.monotonic()
        if all(card["state"] in ("answers", "no_answer") for card in cards):
            self._well_at = now
        elif now - self._well_at > ILL_SESSION_SECONDS and self._reader is not None:
            self._reader.nvml.call("nvmlShutdown")
            self._reader = None


def _put_card(report: Report, card: dict[str, Any]) -> None:
    uuid, address = card["uuid"], card["pci_address"]
    name = uuid or (f"pci:{address}" if address else f"index:{card['index']}")
    quantities = {
        "index": card["index"],
        "pci_address": address,
        "model": card["model"],
        "state": "ok" if card["state"] == "answers" else card["state"],
        **{field: card.get(field) for field in gpu_module.VITALS},
    }
    # One that was not asked has one reason for everything.
    unknown = dict.fromkeys(("state", *gpu_module.VITALS), card["reason"]) if "reason" in card else card["unknown"]
    report.put(f"gpu/{name}", quantities, unknown)
    links = card.get("nvlink")
    if links is None:
        unread = dict.fromkeys(("links", "expected", "bridge", "down", "errors"))
        report.put(f"nvlink/{name}", unread, dict.fromkeys(unread, card["reason"]))
    elif links["links"] != 0 or links["expected"]:  # else a card without NVLink
        report.put(f"nvlink/{name}", links, links.pop("unknown"))


class PcieLane:
    """Cards and RDMA adapters on PCI Express."""

    readers: tuple[str, ...] = ("pcie",)

    def __init__(self, files: FileTree, kept: FileTree) -> None:
        self._scan = PcieReader(files)
        self._reader = PcieReader(kept)
        self._endpoints: list[Endpoint] = []
        self._scanned_at: float | None = None

    def read(self, suspended: Mapping[str, str], step: Step) -> Report:
        """Read error counters and links."""
        now = time.monotonic()
        if self._scanned_at is None or now - self._scanned_at > RESCAN_SECONDS:
            step("pcie")
            self._endpoints = self._scan.endpoints()
            self._scanned_at = now
        report = Report()
        for endpoint in self._endpoints:
            name = f"pcie {endpoint.address}"
            if name in suspended:
                unread = {"kind": endpoint.kind, **dict.fromkeys(SEVERITIES)}
                report.put(f"pcie/{endpoint.address}", unread, dict.fromkeys(SEVERITIES, suspended[name]))
                continue
            step(name)
            quantities = self._reader.health(endpoint)
            if quantities is None:
                self._scanned_at = None  # it is gone: look again
                continue
            report.put(f"pcie/{endpoint.address}", quantities, quantities.pop("unknown"))
        return report


class RdmaLane:
    """RDMA ports."""

    readers: tuple[str, ...] = ("rdma",)

    def __init__(self, files: FileTree, kept: FileTree, ethernet: EthernetStatistics) -> None:
        self._scan = RdmaReader(files, CommandRunner())
        self._reader = RdmaReader(kept, CommandRunner())
        self._kept = kept
        self._ethernet = ethernet
        self._ports: list[Port] = []
        self._scanned_at: float | None = None

    def read(self, suspended: Mapping[str, str], step: Step) -> Report:
        """Read state and counters of all ports."""
        now = time.monotonic()
        if self._scanned_at is None or now - self._scanned_at > RESCAN_SECONDS:
            step("rdma")
            self._ports = self._scan.all_ports()
            self._scanned_at = now
        report = Report()
        for port in self._ports:
            name = f"rdma {port.name}"
            if name in suspended:
                unread = {"netdev": port.netdev, "state": None, "sample": None}
                report.put(f"port/{port.name}", unread, dict.fromkeys(("state", "sample"), suspended[name]))
                continue
            step(name)
            state = parse_state(self._kept.text(f"{port.path}/state"))
            unknown = {}
            if state is None:
                self._scanned_at = None  # its driver may be gone: look again
                unknown["state"] = f"{port.path}/state: {self._kept.complaint(f'{port.path}/state') or 'no state'}"
            counters, complaint = (
                self._ethernet.read(port.netdev) if port.netdev else (None, "the port has no network interface")
            )
            if counters is None:
                unknown["sample"] = complaint
            told = counters or {}
            ethernet = {name: told[name] for name in rdma_health.ETHERNET_COUNTERS if name in told}
            sample = self._reader.sample(port, ethernet, rdma_health.HARDWARE_COUNTERS)
            quantities = {"netdev": port.netdev, "state": state, "sample": sample.document()}
            report.put(f"port/{port.name}", quantities, unknown)
        return report


def lanes(root: str, known: Collection[str] = ()) -> dict[str, Lane]:
    """The lanes whose hardware this host has, by name, without those that are `known`."""
    files = FileTree(root)
    found: dict[str, Lane] = {}
    if "nvml" not in known and gpu_module.on_the_bus(files):
        found["nvml"] = CardLane(files)
    if "pcie" not in known and PcieReader(files).endpoints():
        found["pcie"] = PcieLane(files, KeptFileTree(root))
    if "rdma" not in known and files.names(RDMA_DEVICES):
        found["rdma"] = RdmaLane(files, KeptFileTree(root), EthernetStatistics())
    return found
