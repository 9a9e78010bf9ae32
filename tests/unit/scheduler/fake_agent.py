# SPDX-License-Identifier: GPL-3.0-or-later
"""A host as its agent tells it, second by second: what a test changes of it is in the next line of the stream."""

from __future__ import annotations

import copy
import json
import random
from pathlib import Path
from typing import Any

import yaml

from ringmaster_scheduler import health_rules
from ringmaster_scheduler.health_rules import Rule

ROLE = Path(__file__).resolve().parents[3] / "roles" / "scheduler"
TABLE: dict[str, dict[str, Any]] = yaml.safe_load((ROLE / "vars" / "health_rules.yml").read_text())[
    "scheduler_health_table"
]


def rules(**changes: dict[str, Any]) -> tuple[Rule, ...]:
    """Return the role's table with some entries changed."""
    table = copy.deepcopy(TABLE)
    for name, change in changes.items():
        table[name] = {**table.get(name, {}), **change}
    return health_rules.parse(table)


class FakeAgent:
    """Two cards with NVLinks, two RoCE ports and two engines. `noise` makes every input restless, without any fault."""

    def __init__(self, host: str, seed: int = 1, noise: bool = False, boot_seconds: float = 1000.0) -> None:
        self.host = host
        self.source = random.Random(seed)
        self.noise = noise
        self.agent = f"{host}-agent-1"
        self.boot = f"{host}-boot-1"
        self.sequence = 0
        self.seconds = boot_seconds
        self.readers = ["gpu", "nvlink", "pcie", "rdma", "xid"]
        self.read: dict[str, float] = {}
        self.subjects: dict[str, dict[str, Any]] = {}
        self.unknown: dict[str, str] = {}
        # Seconds between two readings of the hardware.
        self.interval = 1
        self.packets_per_second = 5000
        self.loss = 0.0
        # Subjects that a test took away and will bring back.
        self.missing: dict[str, dict[str, Any]] = {}
        self._sent: dict[str, dict[str, Any]] = {}
        self._sent_read: dict[str, float] = {}
        self._sent_unknown: dict[str, str] = {}
        for index in range(2):
            self.subjects[f"gpu/GPU-{host}-{index}"] = {
                "index": index,
                "pci_address": f"0000:0{index + 5}:00.0",
                "model": "NVIDIA A100-SXM4-80GB",
                "state": "ok",
                "ecc_uncorrected_volatile": 0,
                "ecc_corrected_volatile": 0,
                "remapped_rows_pending": False,
                "remapped_rows_failed": False,
                "recovery_action": "none",
                "clock_event_reasons": [],
                "clock_lost_seconds": 0.0,
                "pcie_replay_counter": 0,
                "pcie_width": 16,
                "pcie_width_max": 16,
                "pcie_generation": 4,
                "pcie_generation_max": 4,
                "utilization_percent": 90,
                "temperature_celsius": 60,
                "power_watts": 250.0,
            }
            self.subjects[f"nvlink/GPU-{host}-{index}"] = {
                "links": 12,
                "expected": 12,
                "bridge": False,
                "down": [],
                "errors": 0,
            }
            self.subjects[f"port/mlx5_{index}/1"] = {
                "netdev": f"ens{index}f0np0",
                "state": "ACTIVE",
                "sample": {
                    "seconds": self.seconds,
                    "boot": self.boot,
                    "driver": "driver-1",
                    "hardware": {
                        "packet_seq_err": 0,
                        "local_ack_timeout_err": 0,
                        "implied_nak_seq_err": 0,
                        "out_of_sequence": 0,
                    },
                    "ethernet": {"tx_vport_rdma_unicast_packets": 0, "rx_vport_rdma_unicast_packets": 0},
                },
            }
            self.subjects[f"pcie/0000:0{index + 5}:00.0"] = self._pcie("gpu")
            self.subjects[f"pcie/0000:3{index}:00.0"] = self._pcie("nic")
            self.subjects[f"xid/0000:0{index + 5}:00"] = {}
        self._events = [0.0, 0.0]

    @staticmethod
    def _pcie(kind: str) -> dict[str, Any]:
        counters = {f"{above}{name}": 0 for above in ("", "above_") for name in ("correctable", "nonfatal", "fatal")}
        return {"kind": kind, **counters, "width": 16, "width_max": 16, "speed": 16.0, "speed_max": 16.0}

    @property
    def gpu(self) -> dict[str, Any]:
        """The first card."""
        return self.subjects[f"gpu/GPU-{self.host}-0"]

    @property
    def nvlink(self) -> dict[str, Any]:
        """The first card's links."""
        return self.subjects[f"nvlink/GPU-{self.host}-0"]

    @property
    def sample(self) -> dict[str, Any]:
        """The first port's counters."""
        found: dict[str, Any] = self.subjects["port/mlx5_0/1"]["sample"]
        return found

    def pcie(self, kind: str = "nic") -> dict[str, Any]:
        """The first device of a kind."""
        return next(values for name, values in self.subjects.items() if name[:4] == "pcie" and values["kind"] == kind)

    def xid(self, code: int, action: str) -> None:
        """The driver writes an Xid of the first card."""
        events = self.subjects["xid/0000:05:00"]
        before = events.get(str(code), {"count": 0, "recent": []})
        events[str(code)] = {
            "count": before["count"] + 1,
            "seconds": self.seconds,
            "recent": [*before["recent"], self.seconds][-32:],
            "action": action,
        }

    def canary(
        self,
        engine: str,
        answer: str | None,
        prompt: str = "p",
        error: str | None = None,
        interval: float = 60.0,
        took: float = 0.0,
    ) -> None:
        """An engine answers the fixed question, or has not after `took` seconds."""
        former = self.subjects.get(f"canary/{engine}", {"number": 0})
        self.subjects[f"canary/{engine}"] = {
            "prompt": prompt,
            "answer": answer,
            "number": former["number"] + 1,
            "asked": self.seconds - took,
            "interval": interval,
            "timed_out": error is not None and error.startswith("no answer within"),
            "error": error,
        }

    def advance(self, seconds: float = 1.0) -> None:
        """Let time pass on the host, and let its readers read."""
        self.seconds += seconds
        for index in range(2):
            port = self.subjects.get(f"port/mlx5_{index}/1")
            sample = None if port is None else port.get("sample")
            if sample is None:
                continue
            packets = round(self.packets_per_second * seconds * (self.source.uniform(0.5, 1.5) if self.noise else 1))
            for direction in ("tx", "rx"):
                sample["ethernet"][f"{direction}_vport_rdma_unicast_packets"] += packets
            # A healthy network loses a packet now and then: a tenth of what is allowed.
            self._events[index] += packets * (self.loss if index == 0 else 0.0)
            if self.noise:
                self._events[index] += packets * 3e-5 * self.source.uniform(0, 2)
            lost, self._events[index] = int(self._events[index]), self._events[index] % 1
            sample["hardware"]["packet_seq_err"] = (sample["hardware"]["packet_seq_err"] + lost) % (1 << 32)
            sample["seconds"] = self.seconds
        if self.noise:
            self._rustle()
        if int(self.seconds) % self.interval == 0:
            self.read.update(dict.fromkeys(self.readers, self.seconds))

    def _rustle(self) -> None:
        chance = self.source.random
        for name, values in self.subjects.items():
            if name.startswith("gpu/") and values.get("pcie_width"):
                values["utilization_percent"] = self.source.randint(0, 100)
                values["temperature_celsius"] = self.source.randint(40, 85)
                values["power_watts"] = self.source.uniform(50, 400)
                values["ecc_corrected_volatile"] += chance() < 0.05
                values["pcie_replay_counter"] += chance() < 0.02
                idle = values["utilization_percent"] < 20
                values["clock_event_reasons"] = ["gpu_idle"] if idle else ["sw_power_cap"] if chance() < 0.3 else []
                values["pcie_generation"] = 1 if idle else 4
                if chance() < 0.01:
                    values["clock_event_reasons"] = ["sw_thermal_slowdown"]
                    values["clock_lost_seconds"] += self.source.uniform(0, 0.5)
                # A reading that is wrong once.
                values["pcie_width"] = 8 if chance() < 0.01 else 16
                values["state"] = "no_answer" if chance() < 0.01 else "ok"
            elif name.startswith("nvlink/") and values["links"]:
                values["errors"] += self.source.choice([0, 0, 0, 1])
                values["down"] = [3] if chance() < 0.01 else []
            elif name.startswith("pcie/") and values["kind"]:
                values["correctable"] += chance() < 0.1
                values["above_correctable"] += chance() < 0.1
                values["nonfatal"] += chance() < 0.0005
        if chance() < 0.001:
            self.xid(self.source.choice([43, 45]), "none")

    def restart(self) -> None:
        """The agent is started again."""
        self.agent += "x"
        self.sequence = 0
        self.read = {name: at for name, at in self.read.items() if name in self.readers}
        self._sent = {}
        for name, values in self.subjects.items():
            if name.startswith("gpu/") and values["pcie_width"]:
                values["clock_lost_seconds"] = 0.0
            if name.startswith("canary/"):
                values["number"] = 0

    def reload_driver(self) -> None:
        """The drivers are loaded again: their counters begin at zero."""
        for values in self.subjects.values():
            for key in ("ecc_uncorrected_volatile", "pcie_replay_counter", "errors"):
                if key in values:
                    values[key] = 0
            if values.get("sample"):
                values["sample"]["driver"] += "x"
                for counters in (values["sample"]["hardware"], values["sample"]["ethernet"]):
                    counters.update(dict.fromkeys(counters, 0))

    def reboot(self) -> None:
        """The host is started again."""
        self.boot += "x"
        self.seconds = 20.0
        self.read = {}
        self.reload_driver()
        for name, values in self.subjects.items():
            if values.get("sample"):
                values["sample"]["boot"] = self.boot
            if name.startswith("xid/"):
                values.clear()
            if name.startswith("pcie/"):
                values.update({key: 0 for key in values if "fatal" in key or "correctable" in key})
        self.restart()

    def _line(self, kind: str, values: dict[str, Any], read: dict[str, float], unknown: dict[str, Any]) -> bytes:
        return json.dumps(
            {
                "schema": 1,
                "type": kind,
                "agent": self.agent,
                "host": self.host,
                "boot": self.boot,
                "sequence": self.sequence,
                "seconds": self.seconds,
                "read": read,
                "values": values,
                "unknown": unknown,
            }
        ).encode()

    def snapshot(self) -> bytes:
        """The first line of a connection."""
        self._sent, self._sent_read = copy.deepcopy(self.subjects), dict(self.read)
        self._sent_unknown = dict(self.unknown)
        return self._line("snapshot", self.subjects, self.read, self.unknown)

    def change(self) -> bytes:
        """What has changed since the last line."""
        values: dict[str, Any] = {name: None for name in self._sent if name not in self.subjects}
        for name, quantities in self.subjects.items():
            before = self._sent.get(name, {})
            changed = {key: value for key, value in quantities.items() if before.get(key) != value or key not in before}
            changed.update({key: None for key in before if key not in quantities})
            if changed or name not in self._sent:
                values[name] = changed
        read = {name: at for name, at in self.read.items() if self._sent_read.get(name) != at}
        names = {**self._sent_unknown, **self.unknown}
        unknown = {
            name: self.unknown.get(name) for name in names if self._sent_unknown.get(name) != self.unknown.get(name)
        }
        self._sent, self._sent_read = copy.deepcopy(self.subjects), dict(self.read)
        self._sent_unknown = dict(self.unknown)
        self.sequence += 1
        return self._line("change", values, read, unknown)

    def alive(self) -> bytes:
        """That the agent is there."""
        return self._line("alive", {}, {}, {})
