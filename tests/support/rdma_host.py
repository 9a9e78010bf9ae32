# SPDX-License-Identifier: GPL-3.0-or-later
"""A host with ConnectX-6 Dx ports for unit tests: sysfs below a folder, and its tools with a state of their own.

Formats are those of Linux' sysfs, of ``dcb`` and ``ip`` of iproute2, ``mlnx_qos`` of mlnx-tools, and ``ethtool``.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ansible_collections.ringmaster.inference.plugins.module_utils.commands import Answer, CommandRunner
from ansible_collections.ringmaster.inference.plugins.module_utils.file_tree import FileTree

HARDWARE_COUNTERS = (
    *("duplicate_request", "implied_nak_seq_err", "local_ack_timeout_err", "np_cnp_sent"),
    *("np_ecn_marked_roce_packets", "out_of_buffer", "out_of_sequence", "packet_seq_err", "rnr_nak_retry_err"),
    *("rp_cnp_handled", "rp_cnp_ignored", "rx_icrc_encapsulated"),
)


@dataclass
class PortState:
    """What the tools of one port would answer."""

    pfc: set[int] = field(default_factory=set)
    pfc_capacity: int = 8
    apps: dict[int, int] = field(default_factory=dict)
    trust: str = "pcp"
    host_dcbx: bool = True
    pause_rx: bool = True
    pause_tx: bool = True
    statistics: dict[str, int] = field(default_factory=dict)


class RdmaHost(CommandRunner):
    """Sysfs of the host, and the runner that answers for its tools. `ofed` adds what only NVIDIA's driver has."""

    def __init__(self, root: Path, ports: int = 1, tools: Sequence[str] = ("dcb",), ofed: bool = False) -> None:
        self.root = root
        self.tree = FileTree(str(root))
        self.tools = {*tools, "ip", "ethtool", "systemctl"}
        self.ofed = ofed
        self.ports: dict[str, PortState] = {}
        self.addresses: dict[str, list[str]] = {"eno1": ["10.0.0.5"], "lo": ["127.0.0.1"]}
        self.failed_units: set[str] = set()
        self.commands: list[list[str]] = []
        self.broken: Callable[[Sequence[str]], Answer | None] = lambda _command: None
        self.write("/proc/sys/kernel/random/boot_id", "2f0c5e1b-7f5f-4f0e-9d49-5c2b1a7e9d10\n")
        (root / "sys/kernel/config/rdma_cm").mkdir(parents=True)
        for index in range(ports):
            self._port(index)

    # Files

    def write(self, path: str, content: str | bytes) -> None:
        """Write a file of the host; sysfs files get what the kernel would print."""
        target = Path(self.tree.locate(path))
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(content if isinstance(content, bytes) else content.encode())

    def link(self, path: str, target: str) -> None:
        """Make a link, absolute as seen from the host."""
        folder, _slash, name = path.rpartition("/")
        place = Path(self.tree.locate(folder)) / name
        place.parent.mkdir(parents=True, exist_ok=True)
        place.symlink_to(target)

    def remove(self, path: str) -> None:
        """Take a file away."""
        os.unlink(self.tree.locate(path))

    def read(self, path: str) -> str:
        """Content of a file."""
        return Path(self.tree.locate(path)).read_text()

    def port_file(self, index: int, name: str) -> str:
        """Path of a file of a port."""
        return f"/sys/class/infiniband/mlx5_{index}/ports/1/{name}"

    def _port(self, index: int) -> None:
        netdev, device = f"ens{index + 1}np0", f"mlx5_{index}"
        function = f"/sys/devices/pci0000:3a/0000:3a:00.0/0000:{0x3B + index:02x}:00.0"
        base = f"{function}/infiniband/{device}"
        files = {
            "fw_ver": "22.41.1000\n",
            "board_id": "MT_0000000359\n",
            "hca_type": "MT4125\n",
            "node_guid": "b83f:d203:00a1:b2c4\n",
            "node_type": "1: CA\n",
            "ports/1/state": "4: ACTIVE\n",
            "ports/1/phys_state": "5: LinkUp\n",
            "ports/1/rate": "100 Gb/sec (4X EDR)\n",
            "ports/1/link_layer": "Ethernet\n",
            "ports/1/counters/symbol_error": "0\n",
            "ports/1/counters/link_downed": "255\n",
            "ports/1/counters/port_rcv_data": "1000\n",
            "ports/1/counters/port_xmit_data": "2000\n",
            "ports/1/counters/port_xmit_wait": "N/A (no PMA)\n",
            "ports/1/hw_counters/lifespan": "10\n",
        }
        files.update({f"ports/1/hw_counters/{name}": "0\n" for name in HARDWARE_COUNTERS})
        mapped = f"0000:0000:0000:0000:0000:ffff:c0a8:{index:02x}05"
        local = "fe80:0000:0000:0000:ba3f:d2ff:fea1:b2c4"
        for slot, (gid, kind) in enumerate(
            [(local, "IB/RoCE v1"), (local, "RoCE v2"), (mapped, "IB/RoCE v1"), (mapped, "RoCE v2")]
        ):
            files[f"ports/1/gids/{slot}"] = f"{gid}\n"
            files[f"ports/1/gid_attrs/types/{slot}"] = f"{kind}\n"
            files[f"ports/1/gid_attrs/ndevs/{slot}"] = f"{netdev}\n"
        files["ports/1/gids/4"] = ":".join(["0000"] * 8) + "\n"
        for name, content in files.items():
            self.write(f"{base}/{name}", content)
        # Reading these of an empty slot fails; a folder in their place does, too.
        for attribute in ("types", "ndevs"):
            (self.root / base.lstrip("/") / f"ports/1/gid_attrs/{attribute}/4").mkdir()
        self.link(f"{base}/device", function)
        self.link(f"/sys/class/infiniband/{device}", base)
        self.write(f"{function}/numa_node", "0\n")
        self.write("/sys/bus/pci/drivers/mlx5_core/bind", "")
        self.link(f"{function}/driver", "/sys/bus/pci/drivers/mlx5_core")
        for name, content in {"mtu": "1500\n", "ifindex": f"{4 + index}\n", "dev_port": "0\n"}.items():
            self.write(f"{function}/net/{netdev}/{name}", content)
        self.link(f"{function}/net/{netdev}/device", function)
        self.link(f"/sys/class/net/{netdev}", f"{function}/net/{netdev}")
        for name in ("default_roce_mode", "default_roce_tos"):
            value = "RoCE v2\n" if name.endswith("mode") else "0\n"
            self.write(f"/sys/kernel/config/rdma_cm/{device}/ports/1/{name}", value)
        if self.ofed:
            self.write(f"{base}/tc/1/traffic_class", "")
            self.write(f"{function}/net/{netdev}/qos/trust", "pcp\n")
            for side in ("np", "rp"):
                for priority in range(8):
                    self.write(f"{function}/net/{netdev}/ecn/roce_{side}/enable/{priority}", "1\n")
        self.ports[netdev] = PortState()
        self.addresses[netdev] = [f"192.168.{index}.5"]

    # Tools

    def locate(self, name: str) -> str | None:
        """Path of a tool of the host."""
        return f"/usr/sbin/{name}" if name in self.tools else None

    def run(self, command: Sequence[str], timeout: float = 20.0) -> Answer:
        """Answer as the tool would."""
        words = list(command)
        self.commands.append(words)
        broken = self.broken(words)
        if broken is not None:
            return broken
        if words[0] not in self.tools:
            return Answer(None, complaint=f"not found: {words[0]}")
        answer: Answer = getattr(self, f"_{words[0]}")(words[1:])
        return answer

    @property
    def changes(self) -> list[list[str]]:
        """Commands that change something, in order."""
        reading = {"show", "-S", "-a", "is-failed"}
        return [
            words
            for words in self.commands
            if not reading & set(words)
            and words[0] != "ibv_devinfo"
            and not (words[0] == "mlnx_qos" and len(words) == 3)
        ]

    def _dcb(self, words: list[str]) -> Answer:
        options = [word for word in words if word.startswith("-")]
        kind, verb, _dev, netdev, *rest = [word for word in words if word not in options]
        if netdev not in self.ports:
            return Answer(1, complaint="Attribute read: No such device")
        port = self.ports[netdev]
        if kind == "apptrust":
            return Answer(1, complaint='Object "apptrust" is unknown')
        if verb == "show":
            documents = {
                "pfc": {
                    "pfc_cap": port.pfc_capacity,
                    "macsec_bypass": False,
                    "delay": 0,
                    "prio_pfc": [priority in port.pfc for priority in range(8)],
                },
                "dcbx": {"host": True, "ieee": True} if port.host_dcbx else {"ieee": True},
                "app": {"dscp_prio": [[dscp, port.apps[dscp], " "] for dscp in sorted(port.apps)]} if port.apps else {},
            }
            return Answer(0, json.dumps(documents[kind]))
        if kind == "pfc":
            port.pfc = {int(word[0]) for word in rest if word.endswith(":on")}
        elif kind == "dcbx":
            port.host_dcbx = True
        elif verb == "flush":
            port.apps = {}
        else:
            for dscp, priority in (map(int, word.split(":")) for word in rest[1:]):
                if verb == "replace":
                    port.apps[dscp] = priority
                else:
                    del port.apps[dscp]
        return Answer(0)

    def _mlnx_qos(self, words: list[str]) -> Answer:
        netdev, rest = words[1], words[2:]
        port = self.ports[netdev]
        if "--trust" in rest and "--dscp2prio" in rest:
            return Answer(1, "trust and dscp2prio commands cannot be used at the same time.\n")
        while rest:
            option, value, *rest = rest
            if option == "--trust":
                if value != port.trust:
                    port.apps = {dscp: dscp >> 3 for dscp in range(64)} if value == "dscp" else {}
                port.trust = value
            elif option == "--pfc":
                port.pfc = {priority for priority, flag in enumerate(value.split(",")) if flag == "1"}
            elif option == "-d":
                port.host_dcbx = value == "os"
            else:
                verb, dscp, priority = value.split(",")
                if verb == "set":
                    port.apps[int(dscp)] = int(priority)
                else:
                    port.apps.pop(int(dscp), None)
        return Answer(0, self._mlnx_qos_text(port))

    @staticmethod
    def _mlnx_qos_text(port: PortState) -> str:
        lines = [
            f"DCBX mode: {'OS' if port.host_dcbx else 'Firmware'} controlled",
            f"Priority trust state: {port.trust}",
        ]
        if port.trust == "dscp":
            lines.append("dscp2prio mapping:")
            for priority in range(8):
                dscps = [f"{dscp:02d}," for dscp in sorted(port.apps) if port.apps[dscp] == priority]
                rows = [dscps[start : start + 8] for start in range(0, len(dscps), 8)]
                lines += [f"\tprio:{priority} dscp:{''.join(row)}" for row in rows]
        lines += [
            "Receive buffer size (bytes): 130944,130944,0,0,0,0,0,0,max_buffer_size=262016",
            "Cable len: 7",
            "PFC configuration:",
            "\tpriority    0   1   2   3   4   5   6   7",
            "\tenabled     " + "".join(f"{int(priority in port.pfc)}   " for priority in range(8)),
            "\tbuffer      0   0   0   1   0   0   0   0   ",
            "tc: 0 ratelimit: unlimited, tsa: vendor",
            "\t priority:  1",
        ]
        return "\n".join(lines) + "\n"

    def _ethtool(self, words: list[str]) -> Answer:
        option, netdev, *rest = words
        port = self.ports[netdev]
        if option == "-A":
            for direction, value in zip(rest[::2], rest[1::2]):
                setattr(port, f"pause_{direction}", value == "on")
            return Answer(0)
        if option == "-a":
            on = {True: "on", False: "off"}
            text = f"Pause parameters for {netdev}:\nAutonegotiate:\toff\nRX:\t\t{on[port.pause_rx]}\n"
            return Answer(0, f"{text}TX:\t\t{on[port.pause_tx]}\n\n")
        lines = [f"     {name}: {value}" for name, value in port.statistics.items()]
        return Answer(0, "\n".join(["NIC statistics:", "     rx0_packets: 17", *lines]) + "\n")

    def _ip(self, words: list[str]) -> Answer:
        if words[-1] == "show":
            links = [
                {
                    "ifname": netdev,
                    "mtu": 1500,
                    "min_mtu": 68,
                    "max_mtu": 9978,
                    "addr_info": [{"family": "inet", "local": address, "prefixlen": 24} for address in addresses],
                }
                for netdev, addresses in self.addresses.items()
            ]
            return Answer(0, json.dumps(links))
        netdev, mtu = words[words.index("dev") + 1], words[words.index("mtu") + 1]
        self.write(f"/sys/class/net/{netdev}/mtu", f"{mtu}\n")
        return Answer(0)

    def _systemctl(self, words: list[str]) -> Answer:
        units = self.root / "etc/systemd/system"
        if words[0] == "is-failed":
            return Answer(0 if self.failed_units & {words[-1]} else 1)
        if words[0] == "reenable":
            for line in (units / words[1]).read_text().splitlines():
                if line.startswith("WantedBy="):
                    folder = units / f"{line.partition('=')[2]}.wants"
                    folder.mkdir(parents=True, exist_ok=True)
                    if not (folder / words[1]).is_symlink():
                        (folder / words[1]).symlink_to(f"/etc/systemd/system/{words[1]}")
        elif words[0] == "disable":
            for folder in units.glob("*.wants"):
                (folder / words[1]).unlink(missing_ok=True)
        return Answer(0)
