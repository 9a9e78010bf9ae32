# Copyright (c) 2026, the Ringmaster authors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""All RDMA ports of a host at once, and what happened on them over a window.

A window is either waited for between two samples, or reaches back to the samples that an earlier run kept in a file.
Ports are read at the same time, so that eight of them take little longer than one. Nothing here imports Ansible.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from ansible_collections.ringmaster.inference.plugins.module_utils import rdma_health
from ansible_collections.ringmaster.inference.plugins.module_utils.commands import CommandRunner
from ansible_collections.ringmaster.inference.plugins.module_utils.durable import replace
from ansible_collections.ringmaster.inference.plugins.module_utils.file_tree import FileTree
from ansible_collections.ringmaster.inference.plugins.module_utils.rdma import Port, RdmaReader
from ansible_collections.ringmaster.inference.plugins.module_utils.rdma_health import Sample, Window
from ansible_collections.ringmaster.inference.plugins.module_utils.rdma_qos import QualityReader

SCHEMA = 1
SUBSETS = ("counters", "qos")
# Commands of different ports at the same time; a port's own follow one another.
_WORKERS = 8


class RdmaSurveyError(Exception):
    """Something is not as it has to be; the text says what was expected, what was found and what to do."""

    def __init__(self, expected: str, found: str, remedy: str) -> None:
        super().__init__(f"Expected {expected}. Found {found}. To do: {remedy}.")


@dataclass(frozen=True)
class Wish:
    """What is to be told. `devices` and `netdevs` narrow it down; `gather` are the subsets besides what ports are.

    `window_seconds` waits between two samples; `sample_file` compares with the samples in that file. `threshold` is a
    ratio, `minimum_packets` a count in one direction.
    """

    devices: tuple[str, ...] = ()
    netdevs: tuple[str, ...] = ()
    gather: frozenset[str] = frozenset(SUBSETS)
    address: str | None = None
    gid_netdev: str | None = None
    window_seconds: float | None = None
    sample_file: str | None = None
    threshold: float = rdma_health.THRESHOLD
    minimum_packets: int = rdma_health.MINIMUM_PACKETS
    minimum_window_seconds: float = rdma_health.MINIMUM_SECONDS


class RdmaSurvey:
    """Reads what is wished for."""

    def __init__(self, tree: FileTree, runner: CommandRunner) -> None:
        self.tree = tree
        self.reader = RdmaReader(tree, runner)
        self.quality = QualityReader(tree, runner)

    def take(self, wish: Wish, write: bool = True) -> dict[str, Any]:
        """The result of the module. The sample file is written only with `write`.

        Raises RdmaSurveyError for names that are not there and for a sample file that can't be written.
        """
        ports = self._chosen(wish)
        devices = list(dict.fromkeys(port.device for port in ports)) if wish.devices or wish.netdevs else None
        # Before the threads: what all ports share is then read once.
        self.reader.links()
        self.reader.active_mtus()
        if "qos" in wish.gather:
            self.quality.lldpad_runs()
        with ThreadPoolExecutor(_WORKERS) as workers:
            before: dict[str, Sample] = {}
            if wish.window_seconds:
                began = time.monotonic()
                before = dict(zip((port.name for port in ports), workers.map(self.reader.sample, ports)))
                time.sleep(max(began + wish.window_seconds - time.monotonic(), 0))
            documents = list(workers.map(lambda port: self._port(port, wish, before.get(port.name)), ports))
        windows = {} if wish.sample_file is None else self._since_file(wish.sample_file, wish, ports, documents, write)
        for port, (document, _sample, window) in zip(ports, documents):
            window = windows.get(port.name, window)
            document["retransmission"] = window.document() if window else None
            if window is None:
                document["unknown"]["retransmission"] = "no window was asked for (window_seconds, sample_file)"
        session = self.reader.session_netdevs()
        return {
            "devices": [self.reader.device(name) for name in devices or self.reader.device_names()],
            "ports": [document for document, _sample, _window in documents],
            "session_netdevs": session,
            "unknown": {} if session else {"session_netdevs": "this is no SSH session, or its address is unknown here"},
        }

    def _chosen(self, wish: Wish) -> list[Port]:
        present = self.reader.device_names()
        _require("devices to be RDMA devices", wish.devices, present)
        ports = self.reader.all_ports()
        netdevs = [port.netdev for port in ports if port.netdev]
        _require("netdevs to be interfaces of RDMA ports", wish.netdevs, netdevs)
        return [
            port
            for port in ports
            if (not wish.devices or port.device in wish.devices) and (not wish.netdevs or port.netdev in wish.netdevs)
        ]

    def _port(
        self, port: Port, wish: Wish, before: Sample | None
    ) -> tuple[dict[str, Any], Sample | None, Window | None]:
        document = self.reader.port(port, wish.address, wish.gid_netdev)
        ethernet: Mapping[str, int] | None = None
        if "counters" in wish.gather:
            counters = self.reader.counters(port)
            document["unknown"].update(counters.pop("unknown"))
            document.update(counters)
            ethernet = counters["ethtool_counters"] or {}
        if "qos" in wish.gather:
            document["qos"] = self.quality.read(port).document()
        sample = window = None
        if before or wish.sample_file:
            sample = self.reader.sample(port, ethernet)
        if before and sample:
            window = rdma_health.judge(before, sample, wish.threshold, wish.minimum_packets)
        return document, sample, window

    # The file with the samples of an earlier run

    def _since_file(
        self,
        path: str,
        wish: Wish,
        ports: Iterable[Port],
        documents: Iterable[tuple[dict[str, Any], Sample | None, Window | None]],
        write: bool,
    ) -> dict[str, Window]:
        kept = load_samples(self.tree.raw(path))
        windows: dict[str, Window] = {}
        for port, (_document, sample, _window) in zip(ports, documents):
            if sample is None:
                continue
            earlier = kept.get(port.name)
            if earlier is None:
                reason = f"{path} has no earlier sample of this port"
                windows[port.name] = Window(rdma_health.UNKNOWN, None, wish.threshold, reason=reason)
            else:
                least = wish.minimum_window_seconds
                windows[port.name] = rdma_health.judge(earlier, sample, wish.threshold, wish.minimum_packets, least)
                if windows[port.name].too_short:
                    continue  # the earlier sample stays, so that the window can become long enough
            kept[port.name] = sample
        if write:
            self._save(path, kept)
        return windows

    def _save(self, path: str, samples: Mapping[str, Sample]) -> None:
        document = {"schema": SCHEMA, "samples": {name: sample.document() for name, sample in samples.items()}}
        place = self.tree.locate(path)
        try:
            os.makedirs(os.path.dirname(place), mode=0o755, exist_ok=True)
            replace(place, json.dumps(document), 0o600)
        except OSError as error:
            raise RdmaSurveyError(
                f"to write sample_file {path}",
                str(error.strerror or error),
                "name a path that this user may write, on a file system with room",
            ) from error


def _require(what: str, names: Iterable[str], present: Sequence[str]) -> None:
    """Raises RdmaSurveyError for names that are not among those of the host."""
    absent = [name for name in names if name not in present]
    if absent:
        raise RdmaSurveyError(
            f"{what} of this host ({', '.join(present) or 'it has none'})",
            ", ".join(absent),
            "name some of those, or leave the option out",
        )


def load_samples(text: str | None) -> dict[str, Sample]:
    """Samples by port from the text of a sample file; a damaged entry, or a damaged file, counts as none."""
    try:
        document = json.loads(text or "")
    except (ValueError, RecursionError):
        return {}
    entries = document.get("samples") if isinstance(document, dict) and document.get("schema") == SCHEMA else None
    samples = {name: _sample(entry) for name, entry in entries.items()} if isinstance(entries, dict) else {}
    return {name: sample for name, sample in samples.items() if sample is not None}


def _sample(entry: Any) -> Sample | None:
    try:
        return Sample.from_document(entry)
    except ValueError:
        return None
