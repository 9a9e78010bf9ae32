# SPDX-License-Identifier: GPL-3.0-or-later
"""The kernel's files of simulated hardware: ``/sys``, ``/proc`` and ``/dev`` below a root, written from the state.

Formats are the kernel's own (`Documentation/ABI`). `build` writes everything, `refresh` what can change while a host
runs; what an operator may write (governors, MTU, ACS bits) is left as it stands.
"""

from __future__ import annotations

import os
import struct
from pathlib import Path

from rehearsal.hardware import pci
from rehearsal.hardware.profiles import GENERATIONS, KINDS
from rehearsal.hardware.state import State

CORRECTABLE = ("RxErr", "BadTLP", "BadDLLP", "Rollover", "Timeout", "NonFatalErr", "CorrIntErr", "HeaderOF")
UNCORRECTABLE = (
    *("Undefined", "DLP", "SDES", "TLP", "FCP", "CmpltTO", "CmpltAbrt", "UnxCmplt", "RxOF", "MalfTLP", "ECRC"),
    *("UnsupReq", "ACSViol", "UncorrIntErr", "BlockedTLP", "AtomicOpBlocked", "TLPBlockedErr", "PoisonTLPBlocked"),
)
AER = {
    "correctable": (CORRECTABLE, "TOTAL_ERR_COR"),
    "nonfatal": (UNCORRECTABLE, "TOTAL_ERR_NONFATAL"),
    "fatal": (UNCORRECTABLE, "TOTAL_ERR_FATAL"),
}
PORT_COUNTERS = (
    *("VL15_dropped", "excessive_buffer_overrun_errors", "link_downed", "link_error_recovery"),
    *("local_link_integrity_errors", "multicast_rcv_packets", "multicast_xmit_packets"),
    *("port_rcv_constraint_errors", "port_rcv_data", "port_rcv_errors", "port_rcv_packets"),
    *("port_rcv_remote_physical_errors", "port_rcv_switch_relay_errors", "port_xmit_constraint_errors"),
    *("port_xmit_data", "port_xmit_discards", "port_xmit_packets", "port_xmit_wait", "symbol_error"),
    *("unicast_rcv_packets", "unicast_xmit_packets"),
)
HARDWARE_COUNTERS = (
    *("duplicate_request", "implied_nak_seq_err", "local_ack_timeout_err", "np_cnp_sent"),
    *("np_ecn_marked_roce_packets", "out_of_buffer", "out_of_sequence", "packet_seq_err", "req_cqe_error"),
    *("req_cqe_flush_error", "req_remote_access_errors", "req_remote_invalid_request", "resp_cqe_error"),
    *("resp_cqe_flush_error", "resp_local_length_error", "resp_remote_access_errors", "rnr_nak_retry_err"),
    *("roce_adp_retrans", "roce_adp_retrans_to", "roce_slow_restart", "roce_slow_restart_cnps"),
    *("roce_slow_restart_trans", "rp_cnp_handled", "rp_cnp_ignored", "rx_atomic_requests", "rx_dct_connect"),
    *("rx_icrc_encapsulated", "rx_read_requests", "rx_write_requests"),
)
GID_SLOTS = 16
# Files of which an operator writes one word and the kernel shows all choices with that one in brackets.
ASPM_POLICY = "sys/module/pcie_aspm/parameters/policy"
HUGE_PAGES = "sys/kernel/mm/transparent_hugepage/enabled"
CHOICES = {
    ASPM_POLICY: ("default", "performance", "powersave", "powersupersave"),
    HUGE_PAGES: ("always", "madvise", "never"),
    "sys/block/nvme0n1/queue/scheduler": ("none", "mq-deadline", "kyber", "bfq"),
}
# EFI variables start with four bytes of attributes: here boot service and run time access.
SECURE_BOOT = "sys/firmware/efi/efivars/SecureBoot-8be4df61-93ca-11d2-aa0d-00e098032b8c"
IDLE_STATES = (("POLL", 0), ("C1", 1), ("C2", 800))  # name, latency in microseconds


class Tree:
    """The kernel's files below `root`, for the hardware that `state` describes."""

    def __init__(self, root: Path | str, state: State) -> None:
        self.root = Path(root)
        self.state = state

    # -- files ---------------------------------------------------------------------------------------------------------

    def write(self, path: str, content: str | bytes) -> None:
        """Write a file in one step, if it does not hold that already; text gets its final newline."""
        data = f"{content}\n".encode() if isinstance(content, str) else content
        target = f"{self.root}/{path}"
        try:
            with open(target, "rb") as file:
                if file.read() == data:
                    return
        except FileNotFoundError:
            os.makedirs(os.path.dirname(target), exist_ok=True)
        # Outside the folders that others list, and on the same file system: nobody sees a half-written file.
        fresh = f"{self.root}/{path.partition('/')[0]}/.new-{os.getpid()}"
        with open(fresh, "wb") as file:
            file.write(data)
        os.replace(fresh, target)

    def link(self, path: str, target: str) -> None:
        """Make a link to another file of the tree, relative as the kernel's are."""
        place = self.root / path
        place.parent.mkdir(parents=True, exist_ok=True)
        if not place.is_symlink():
            place.symlink_to(os.path.relpath(self.root / target, place.parent))

    def read(self, path: str) -> str:
        """Content of a file, empty if there is none."""
        try:
            return (self.root / path).read_text().strip()
        except FileNotFoundError:
            return ""

    # -- everything ----------------------------------------------------------------------------------------------------

    def build(self) -> None:
        """Write all files, as after a boot."""
        self._host()
        for address in self.state.names("pci"):
            self._function(address)
        for index in self.state.names("ports"):
            self._port(index)
        self._nvidia()
        self.refresh()

    def link_real_devices(self) -> None:
        """Link what the container has itself, below ``sys/devices/virtual``: network interfaces, the machine's name."""
        for name in sorted(os.listdir(self.root / "sys/devices/virtual/net")):
            if not any(self.state.text(f"ports/{index}/netdev") == name for index in self.state.names("ports")):
                self.link(f"sys/class/net/{name}", f"sys/devices/virtual/net/{name}")
        if (self.root / "sys/devices/virtual/dmi/id").is_dir():
            self.link("sys/class/dmi/id", "sys/devices/virtual/dmi/id")

    def refresh(self) -> None:
        """Write what the state may have changed: PCIe links, AER counters, ports and their counters."""
        for address in self.state.names("pci"):
            self._link(address)
            self.refresh_aer(address)
        for index in self.state.names("ports"):
            self._port_state(index)
            self.refresh_counters(index)

    def written_files(self) -> list[str]:
        """The files of which an operator writes a word: those with choices, and the ASPM switch of each link."""
        files = [path for path in CHOICES if (self.root / path).exists()]
        return files + [f"{self.device(address)}/link/l1_aspm" for address in self.state.names("pci")]

    def settle(self) -> None:
        """Do what the kernel does with words that an operator wrote into its files."""
        for path, choices in CHOICES.items():
            found = self.read(path)
            if found in choices:
                self._choose(path, found)
                if path == ASPM_POLICY:
                    for address in self.state.names("pci"):
                        self.state.set(f"pci/{address}/aspm_l1", found != "performance")
                        self.write(f"{self.device(address)}/link/l1_aspm", str(int(found != "performance")))
        for address in self.state.names("pci"):
            written = self.read(f"{self.device(address)}/link/l1_aspm")
            if written in ("0", "1"):
                self.state.set(f"pci/{address}/aspm_l1", written)
            self._link(address)

    def _choose(self, path: str, chosen: str) -> None:
        self.write(path, " ".join(f"[{choice}]" if choice == chosen else choice for choice in CHOICES[path]))

    # -- host ----------------------------------------------------------------------------------------------------------

    def _host(self) -> None:
        state = self.state
        words = state.text("host/cmdline").split()
        self.write("proc/cmdline", state.text("host/cmdline"))
        policies = [word.partition("=")[2] for word in words if word.startswith("pcie_aspm.policy=")]
        self._choose(ASPM_POLICY, policies[-1] if policies and policies[-1] in CHOICES[ASPM_POLICY] else "default")
        for address in state.names("pci"):
            state.set(f"pci/{address}/aspm_l1", "performance" not in policies)
        self._choose(HUGE_PAGES, "always")
        lockdown = state.text("host/lockdown", "none")
        levels = ("none", "integrity", "confidentiality")
        self.write(
            "sys/kernel/security/lockdown", " ".join(f"[{level}]" if level == lockdown else level for level in levels)
        )
        self.write(SECURE_BOOT, struct.pack("<IB", 6, state.integer("host/secure_boot")))
        version = state.text("driver/version")
        self.write("sys/module/nvidia/version", version)
        self.write("sys/module/mlx5_core/version", state.text("host/kernel"))
        self._cpus(words)

    def _cpus(self, words: list[str]) -> None:
        count = self.state.integer("host/cpus", 1)
        folder = "sys/devices/system/cpu"
        for name in ("online", "possible", "present"):
            self.write(f"{folder}/{name}", _cpu_list(range(count)))
        idle = "acpi_idle"
        limits = [word.partition("=")[2] for word in words if word.startswith("processor.max_cstate=")]
        deepest = int(limits[-1]) if limits and limits[-1].isdecimal() else len(IDLE_STATES) - 1
        self.write(f"{folder}/cpuidle/current_driver", idle)
        self.write(f"{folder}/cpuidle/current_governor", "menu")
        self.write(f"{folder}/cpuidle/available_governors", "ladder menu teo")
        governor = self.state.text("host/governor")
        for cpu in range(count):
            for number, (name, latency) in enumerate(IDLE_STATES[: deepest + 1]):
                values = {
                    "name": name,
                    "latency": latency,
                    "disable": 0,
                    "usage": 4711 * cpu + number,
                    "time": 9_000_000,
                }
                for file, value in values.items():
                    self.write(f"{folder}/cpu{cpu}/cpuidle/state{number}/{file}", str(value))
            frequency = {
                "scaling_driver": "acpi-cpufreq",
                "scaling_governor": governor,
                "scaling_available_governors": "conservative ondemand userspace powersave performance schedutil",
                "scaling_min_freq": 1_500_000,
                "scaling_max_freq": 2_450_000,
                "scaling_cur_freq": 1_500_000,
                "cpuinfo_min_freq": 1_500_000,
                "cpuinfo_max_freq": 2_450_000,
            }
            for file, value in frequency.items():
                self.write(f"{folder}/cpufreq/policy{cpu}/{file}", str(value))
            self.link(f"{folder}/cpu{cpu}/cpufreq", f"{folder}/cpufreq/policy{cpu}")
            node = self._node_of(cpu, count)
            self.write(f"{folder}/cpu{cpu}/topology/core_id", str(cpu))
            self.write(f"{folder}/cpu{cpu}/topology/physical_package_id", str(node))
            # A thread a core, a package a node.
            siblings = {"thread_siblings": [cpu], "core_cpus": [cpu]}
            siblings |= dict.fromkeys(("core_siblings", "package_cpus"), self._cpus_of(node))
            for name, cpus in siblings.items():
                self.write(f"{folder}/cpu{cpu}/topology/{name}", _cpu_mask(cpus))
                self.write(f"{folder}/cpu{cpu}/topology/{name}_list", _cpu_list(cpus))
        self.write(f"{folder}/smt/control", "notsupported")
        self.write(f"{folder}/smt/active", "0")
        self.write("sys/devices/system/node/online", "0-1")
        for node in (0, 1):
            cpus = self._cpus_of(node)
            self.write(f"sys/devices/system/node/node{node}/cpulist", _cpu_list(cpus))
            self.write(f"sys/devices/system/node/node{node}/cpumap", _cpu_mask(cpus))
            self.write(f"sys/devices/system/node/node{node}/distance", "10 32" if node == 0 else "32 10")

    @staticmethod
    def _node_of(cpu: int, count: int) -> int:
        return 0 if cpu < (count + 1) // 2 else 1

    def _cpus_of(self, node: int) -> list[int]:
        count = self.state.integer("host/cpus", 1)
        return [cpu for cpu in range(count) if self._node_of(cpu, count) == node]

    # -- PCI -----------------------------------------------------------------------------------------------------------

    def device(self, address: str) -> str:
        """Path of a PCI function below ``sys/devices``, bridge by bridge."""
        chain = [address]
        while above := self.state.text(f"pci/{chain[0]}/above"):
            chain.insert(0, above)
        return "/".join(["sys/devices", f"pci{chain[0][:7]}", *chain])

    def _below(self, address: str) -> list[str]:
        return [one for one in self.state.names("pci") if self.state.text(f"pci/{one}/above") == address]

    def _last_bus(self, address: str) -> int:
        return max([int(address[5:7], 16), *(self._last_bus(one) for one in self._below(address))])

    def _function(self, address: str) -> None:
        state, folder = self.state, self.device(address)
        kind = KINDS[state.text(f"pci/{address}/kind")]
        node = state.integer(f"pci/{address}/numa_node", -1)
        index = self._gpu_at(address)
        device = kind.get("device") or state.text(f"gpus/{index}/pci_device")
        subsystem = kind.get("subsystem") or state.text(f"gpus/{index}/pci_subsystem", "0000")
        revision = kind.get("revision", "00")
        cpus = self._cpus_of(node)
        for file, text in {
            "vendor": f"0x{kind['vendor']}",
            "device": f"0x{device}",
            "subsystem_vendor": f"0x{kind['vendor']}",
            "subsystem_device": f"0x{subsystem}",
            "class": f"0x{kind['class']}",
            "revision": f"0x{revision}",
            "numa_node": str(node),
            "local_cpulist": _cpu_list(cpus),
            "local_cpus": f"{sum(1 << cpu for cpu in cpus):x}",
            "irq": "42",
            "enable": "1",
            "power/control": "on",
            "power_state": "D0",
            "resource": "\n".join(["0x0000000000000000 0x0000000000000000 0x0000000000000000"] * 13),
            "uevent": f"DRIVER={kind['driver']}\nPCI_SLOT_NAME={address}",
        }.items():
            self.write(f"{folder}/{file}", text)
        self.write(f"{folder}/link/l1_aspm", state.text(f"pci/{address}/aspm_l1"))
        below = self._below(address)
        self.write(
            f"{folder}/config",
            bytes(
                pci.space(
                    kind=state.text(f"pci/{address}/kind"),
                    vendor=int(kind["vendor"], 16),
                    device=int(device, 16),
                    class_code=int(kind["class"], 16),
                    revision=int(revision, 16),
                    subsystem=int(subsystem, 16),
                    buses=(
                        int(address[5:7], 16),
                        int(below[0][5:7], 16) if below else 0,
                        self._last_bus(address),
                    ),
                )
            ),
        )
        self.link(f"sys/bus/pci/devices/{address}", folder)
        self.link(f"sys/bus/pci/drivers/{kind['driver']}/{address}", folder)
        self.link(f"{folder}/driver", f"sys/bus/pci/drivers/{kind['driver']}")
        self.link(f"{folder}/subsystem", "sys/bus/pci")
        self._iommu(address, folder)
        if state.text(f"pci/{address}/kind") == "nvme":
            self._disk(folder)

    def _iommu(self, address: str, folder: str) -> None:
        words = self.state.text("host/cmdline").split()
        if "amd_iommu=off" in words or "iommu=off" in words:
            return
        group = f"sys/kernel/iommu_groups/{self.state.names('pci').index(address)}"
        self.write(f"{group}/type", "identity" if "iommu=pt" in words else "DMA-FQ")
        self.link(f"{group}/devices/{address}", folder)
        self.link(f"{folder}/iommu_group", group)
        self.write("sys/devices/virtual_iommu/ivhd0/amd-iommu/version", "1")
        self.link("sys/class/iommu/ivhd0", "sys/devices/virtual_iommu/ivhd0")

    def _disk(self, folder: str) -> None:
        disk = f"{folder}/nvme/nvme0/nvme0n1"
        self.link("sys/block/nvme0n1", disk)
        values = {"rotational": 0, "read_ahead_kb": 128, "nr_requests": 1023, "nomerges": 0, "rq_affinity": 1}
        for file, value in {**values, "logical_block_size": 512, "physical_block_size": 512}.items():
            self.write(f"{disk}/queue/{file}", str(value))
        for file, text in {"size": "7501476528", "removable": "0", "ro": "0", "dev": "259:0"}.items():
            self.write(f"{disk}/{file}", text)
        self._choose("sys/block/nvme0n1/queue/scheduler", "none")
        self.link("sys/dev/block/259:0", disk)
        self.link(f"{disk}/device", f"{folder}/nvme/nvme0")
        self.link(f"{folder}/nvme/nvme0/device", folder)
        self.write(f"{folder}/nvme/nvme0/model", "SAMSUNG MZQL23T8HCLS-00A07")
        self.write(f"{folder}/nvme/nvme0/numa_node", "0")
        self.link("sys/class/nvme/nvme0", f"{folder}/nvme/nvme0")

    def _gpu_at(self, address: str) -> str | None:
        for index in self.state.names("gpus"):
            if self.state.text(f"gpus/{index}/pci_address") == address:
                return index
        return None

    def _link_of(self, address: str) -> dict[str, int]:
        """Generation and width of the link that a function reports: a port that leads down tells of the one below."""
        kind, below = self.state.text(f"pci/{address}/kind"), self._below(address)
        if kind in ("root", "downstream") and below:
            return self._link_of(below[0])
        index = self._gpu_at(address)
        folder = f"pci/{address}" if index is None else f"gpus/{index}"
        names = ("generation", "generation_maximum", "width", "width_maximum")
        return {name: self.state.integer(f"{folder}/pcie_{name}") for name in names}

    def _is_lost(self, address: str) -> bool:
        index = self._gpu_at(address)
        return index is not None and bool(self.state.integer(f"gpus/{index}/lost"))

    def _link(self, address: str) -> None:
        folder, link = self.device(address), self._link_of(address)
        config = self.root / folder / "config"
        if self._is_lost(address):
            # Every read of a device that fell off its bus gives ones.
            for end in ("current", "max"):
                self.write(f"{folder}/{end}_link_speed", "Unknown")
                self.write(f"{folder}/{end}_link_width", "63")
            self._patch(config, config.read_bytes(), bytes([0xFF] * pci.SIZE))
            return
        for end, suffix in (("current", ""), ("max", "_maximum")):
            self.write(f"{folder}/{end}_link_speed", f"{GENERATIONS[link[f'generation{suffix}']]} GT/s PCIe")
            self.write(f"{folder}/{end}_link_width", str(link[f"width{suffix}"]))
        found = config.read_bytes()
        if found[:2] == b"\xff\xff":  # it came back
            self._function(address)
            found = config.read_bytes()
        content = bytearray(found)
        pci.set_link(content, link, bool(self.state.integer(f"pci/{address}/aspm_l1")))
        self._patch(config, found, bytes(content))

    @staticmethod
    def _patch(file: Path, found: bytes, content: bytes) -> None:
        """Write the bytes that differ, in place: setpci may write others of this file at the same moment."""
        changed = [offset for offset, byte in enumerate(content) if found[offset : offset + 1] != bytes([byte])]
        if changed:
            with file.open("r+b", buffering=0) as opened:
                for offset in changed:
                    os.pwrite(opened.fileno(), content[offset : offset + 1], offset)

    def refresh_aer(self, address: str) -> None:
        """Write the error counters of a PCI function."""
        folder = self.device(address)
        for severity, (names, total) in AER.items():
            counts = {name: self.state.integer(f"pci/{address}/aer/{severity}/{name}") for name in names}
            lines = [f"{name} {count}" for name, count in counts.items()] + [f"{total} {sum(counts.values())}"]
            self.write(f"{folder}/aer_dev_{severity}", "\n".join(lines))
            if self.state.text(f"pci/{address}/kind") == "root":
                short = {"correctable": "cor"}.get(severity, severity)
                reported = self.state.integer(f"pci/{address}/aer/reported/{severity}")
                self.write(f"{folder}/aer_rootport_total_err_{short}", str(reported))

    # -- network -------------------------------------------------------------------------------------------------------

    def _port(self, index: str) -> None:
        """An RDMA device with its one port, and the network interface below its PCI function."""
        port = f"ports/{index}"
        text = self.state.text
        function, device, netdev = (
            self.device(text(f"{port}/pci_address")),
            text(f"{port}/device"),
            text(f"{port}/netdev"),
        )
        folder = f"{function}/infiniband/{device}"
        guid = text(f"{port}/node_guid")
        colons = ":".join(guid[start : start + 4] for start in range(0, 16, 4))
        for file, value in {
            "fw_ver": text(f"{port}/firmware_version"),
            "board_id": text(f"{port}/psid"),
            "hca_type": text(f"{port}/hca_type"),
            "hw_rev": "0",
            "node_guid": colons,
            "sys_image_guid": colons,
            "node_type": "1: CA",
            "node_desc": f"{device}",
            "ports/1/link_layer": "Ethernet",
            "ports/1/lid": "0x0",
            "ports/1/sm_lid": "0x0",
            "ports/1/sm_sl": "0",
            "ports/1/lid_mask_count": "0",
            "ports/1/cap_mask": "0x04010000",
            "ports/1/pkeys/0": "0xffff",
            "ports/1/hw_counters/lifespan": "10",
        }.items():
            self.write(f"{folder}/{file}", value)
        self.link(f"{folder}/device", function)
        self.link(f"sys/class/infiniband/{device}", folder)
        self._gids(index, f"{folder}/ports/1")
        roce = f"sys/kernel/config/rdma_cm/{device}/ports/1"
        self.write(f"{roce}/default_roce_mode", "RoCE v2")
        self.write(f"{roce}/default_roce_tos", "0")
        self._netdev(index, function, netdev)
        if text("host/network_driver") == "ofed":
            self.write(f"{folder}/tc/1/traffic_class", "")
            for side in ("np", "rp"):
                for priority in range(8):
                    self.write(f"sys/class/net/{netdev}/ecn/roce_{side}/enable/{priority}", "1")
            for file, value in {"cnp_dscp": "48", "cnp_802p_prio": "6", "min_time_between_cnps": "4"}.items():
                self.write(f"sys/class/net/{netdev}/ecn/roce_np/{file}", value)

    def _netdev(self, index: str, function: str, netdev: str) -> None:
        """The interface's own files: those of the real interface where there is one, else files to read."""
        folder = f"{function}/net/{netdev}"
        real = self.root / f"sys/devices/virtual/net/{netdev}"
        self.link(f"sys/class/net/{netdev}", folder)
        for file, text in {"dev_port": function[-1], "phys_port_name": f"p{function[-1]}"}.items():
            self.write(f"{folder}/{file}", text)
        self.link(f"{folder}/device", function)
        if real.is_dir():
            for entry in sorted(os.listdir(real)):
                if entry not in ("dev_port", "device", "phys_port_name"):
                    self.link(f"{folder}/{entry}", f"sys/devices/virtual/net/{netdev}/{entry}")
            return
        values = {"address": self.state.text(f"ports/{index}/mac"), "mtu": "1500", "operstate": "up", "carrier": "1"}
        values |= {"ifindex": str(4 + int(index)), "type": "1", "tx_queue_len": "1000", "flags": "0x1003"}
        for file, text in values.items():
            self.write(f"{folder}/{file}", text)

    def _gids(self, index: str, folder: str) -> None:
        """The GID table: link-local and IPv4-mapped, each for both versions; other slots answer EINVAL."""
        port = f"ports/{index}"
        mac = self.state.text(f"{port}/mac").split(":")
        interface = f"{int(mac[0], 16) ^ 2:02x}{mac[1]}:{mac[2]}ff:fe{mac[3]}:{mac[4]}{mac[5]}"
        gids = [f"fe80:0000:0000:0000:{interface}"] * 2
        address = self.state.text(f"{port}/address")
        if address:
            parts = [int(part) for part in address.split(".")]
            mapped = f"{parts[0]:02x}{parts[1]:02x}:{parts[2]:02x}{parts[3]:02x}"
            gids += [f"0000:0000:0000:0000:0000:ffff:{mapped}"] * 2
        empty_slot = self.state.text("host/empty_slot")
        for slot in range(GID_SLOTS):
            used = slot < len(gids)
            self.write(f"{folder}/gids/{slot}", gids[slot] if used else ":".join(["0000"] * 8))
            if used:
                self.write(f"{folder}/gid_attrs/types/{slot}", "RoCE v2" if slot % 2 else "IB/RoCE v1")
                self.write(f"{folder}/gid_attrs/ndevs/{slot}", self.state.text(f"{port}/netdev"))
            elif empty_slot:
                # A real kernel file whose reading fails with EINVAL, as that of an empty slot does.
                for attribute in ("types", "ndevs"):
                    place = self.root / folder / "gid_attrs" / attribute / str(slot)
                    if not place.is_symlink():
                        place.symlink_to(empty_slot)

    def _port_folder(self, index: str) -> str:
        function = self.device(self.state.text(f"ports/{index}/pci_address"))
        return f"{function}/infiniband/{self.state.text(f'ports/{index}/device')}/ports/1"

    def _port_state(self, index: str) -> None:
        folder, up = self._port_folder(index), bool(self.state.integer(f"ports/{index}/link"))
        self.write(f"{folder}/state", "4: ACTIVE" if up else "1: DOWN")
        self.write(f"{folder}/phys_state", "5: LinkUp" if up else "3: Disabled")
        self.write(f"{folder}/rate", self.state.text(f"ports/{index}/rate") if up else "40 Gb/sec (4X QDR)")
        if self.state.text("host/network_driver") == "ofed":
            netdev = self.state.text(f"ports/{index}/netdev")
            self.write(f"sys/class/net/{netdev}/qos/trust", self.state.text(f"ports/{index}/trust"))

    def refresh_counters(self, index: str) -> None:
        """Write the counters of a port."""
        folder = self._port_folder(index)
        for group, names in (("counters", PORT_COUNTERS), ("hw_counters", HARDWARE_COUNTERS)):
            for name in names:
                self.write(f"{folder}/{group}/{name}", self.state.text(f"ports/{index}/{group}/{name}", "0"))

    # -- NVIDIA --------------------------------------------------------------------------------------------------------

    def _nvidia(self) -> None:
        version, folder = self.state.text("driver/version"), "proc/driver/nvidia"
        self.write(
            f"{folder}/version",
            f"NVRM version: {driver_name(self.state)}  {version}  Release Build  (rehearsal)\n"
            "GCC version:  gcc version 12.2.0 (Debian 12.2.0-14)",
        )
        for index in self.state.names("gpus"):
            gpu = f"gpus/{index}"
            address = self.state.text(f"{gpu}/pci_address")
            lines = {
                "Model": self.state.text(f"{gpu}/name"),
                "IRQ": "42",
                "GPU UUID": self.state.text(f"{gpu}/uuid"),
                "Video BIOS": self.state.text(f"{gpu}/vbios_version"),
                "Bus Type": "PCIe",
                "DMA Size": "47 bits",
                "DMA Mask": "0x7fffffffffff",
                "Bus Location": address,
                "Device Minor": self.state.text(f"{gpu}/minor_number"),
                "GPU Firmware": version,
                "GPU Excluded": "No",
            }
            text = "\n".join(f"{name}: \t{' ' if len(name) < 12 else ''}{value}" for name, value in lines.items())
            self.write(f"{folder}/gpus/{address}/information", text)

    def devices(self) -> None:
        """Make the device files: ordinary ones, so that a process can hold them open, and every user may."""
        cards = [self.state.text(f"gpus/{index}/minor_number") for index in self.state.names("gpus")]
        for name in (*cards, "ctl", "-uvm", "-uvm-tools"):
            self.write(f"dev/nvidia{name}", b"")
            (self.root / f"dev/nvidia{name}").chmod(0o666)


def driver_name(state: State) -> str:
    """What the loaded driver calls itself, by state ``driver/modules``: open, or proprietary."""
    if state.text("driver/modules", "open") == "proprietary":
        return "NVIDIA UNIX x86_64 Kernel Module"
    return "NVIDIA UNIX Open Kernel Module for x86_64"


def _cpu_mask(cpus: list[int] | range) -> str:
    """A set of processors as the kernel prints it: hexadecimal, with a comma after each 32 bits, the highest first."""
    mask = sum(1 << cpu for cpu in cpus)
    words: list[str] = []
    while mask or not words:
        mask, word = mask >> 32, mask & 0xFFFFFFFF
        words.append(f"{word:08x}" if mask else f"{word:x}")
    return ",".join(reversed(words))


def _cpu_list(cpus: list[int] | range) -> str:
    if not cpus:
        return ""
    return str(cpus[0]) if len(cpus) == 1 else f"{cpus[0]}-{cpus[-1]}"
