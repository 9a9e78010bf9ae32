# Copyright (c) 2026, the Ringmaster authors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Settings of a RoCE port, kept over reboots and over a network interface that comes back.

Neither driver nor card keeps them, so one systemd unit for each interface sets them anew: at each boot, and, where udev
makes device units, whenever the interface appears. It is a plain list of the commands that an operator would give.

The MTU belongs to whatever manages the interface: a drop-in of systemd-networkd for the file that matches this
interface alone, a section of NetworkManager's configuration, else the unit. Nothing here imports Ansible.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from ansible_collections.ringmaster.inference.plugins.module_utils.commands import CommandRunner
from ansible_collections.ringmaster.inference.plugins.module_utils.durable import replace
from ansible_collections.ringmaster.inference.plugins.module_utils.file_tree import FileTree
from ansible_collections.ringmaster.inference.plugins.module_utils.rdma import DEVICES, INTERFACES, Port
from ansible_collections.ringmaster.inference.plugins.module_utils.rdma_qos import Action, RdmaQosError

UNITS = "/etc/systemd/system"
NETWORKD_FILES = "/etc/systemd/network"
NETWORK_MANAGER_FILES = "/etc/NetworkManager/conf.d"
HEADER = "# Written by Ansible (ringmaster.inference.rdma_qos); changes here are lost.\n"

_UNIT = (
    HEADER
    + """\
[Unit]
Description=RoCE settings of {netdev}
# After whatever may set the interface up, and before what waits for the network. None of these is asked for.
After=network-pre.target systemd-modules-load.service sys-kernel-config.mount
After={device_unit} systemd-networkd.service NetworkManager.service networking.service
Before=network-online.target

[Service]
# It does not remain active: an interface that comes back starts it again. At a boot it waits 30 s for the driver.
Type=oneshot
ExecStartPre=/bin/sh -c "n=0; until {present}; do [ $$n -lt 300 ] || exit 1; n=$$((n + 1)); sleep 0.1; done"
{commands}
# 78 is what an older ethtool says of pause that is as it was asked for already.
SuccessExitStatus=78
TimeoutStartSec=90

UMask=0022
NoNewPrivileges=yes
CapabilityBoundingSet=CAP_NET_ADMIN
LockPersonality=yes
MemoryDenyWriteExecute=yes
PrivateDevices=yes
PrivateTmp=yes
ProtectClock=yes
ProtectControlGroups=yes
ProtectHome=yes
ProtectHostname=yes
ProtectKernelLogs=yes
ProtectKernelModules=yes
# /sys stays writable: that is where these settings are.
ProtectSystem=full
RestrictAddressFamilies=AF_INET AF_INET6 AF_NETLINK AF_UNIX
RestrictNamespaces=yes
RestrictRealtime=yes
RestrictSUIDSGID=yes
SystemCallArchitectures=native
SystemCallFilter=@system-service
SystemCallErrorNumber=EPERM

[Install]
WantedBy=multi-user.target
WantedBy={device_unit}
"""
)


@dataclass(frozen=True)
class Managed:
    """Who keeps an MTU: `manager` is ``networkd``, ``NetworkManager`` or ``unit``; and the file to write for it."""

    manager: str
    path: str = ""
    content: str = ""


class Persistence:
    """What keeps one interface's settings, as files below the root of `tree`."""

    def __init__(self, tree: FileTree, runner: CommandRunner, netdev: str) -> None:
        self.tree, self.runner, self.netdev = tree, runner, netdev
        self.unit = f"ringmaster-rdma-qos@{netdev}.service"
        self.unit_path = f"{UNITS}/{self.unit}"

    # What is to be there

    def wanted(self, port: Port, actions: Iterable[Action], mtu: Managed | None) -> dict[str, str]:
        """Path -> content of the files that keep the settings."""
        actions = list(actions)
        files = {self.unit_path: self._unit(port, actions)} if actions else {}
        if mtu and mtu.path:
            files[mtu.path] = mtu.content
        return files

    def _unit(self, port: Port, actions: Iterable[Action]) -> str:
        present = f"[ -e {INTERFACES}/{self.netdev} ] && [ -e {DEVICES}/{port.device} ]"
        return _UNIT.format(
            netdev=self.netdev,
            present=present,
            device_unit=device_unit(self.netdev),
            commands="\n".join(f"ExecStart={action.line(self.runner)}" for action in actions),
        )

    def mtu_keeper(self, mtu: int) -> Managed:
        """Who is to keep the MTU. Raises RdmaQosError if the manager's own configuration says another one."""
        network_file = self._network_file()
        if network_file and self._matches_this_alone(network_file):
            name = network_file.rsplit("/", 1)[-1]
            path = f"{NETWORKD_FILES}/{name}.d/{self._drop_in}"
            return Managed("networkd", path, f"{HEADER}[Link]\nMTUBytes={mtu}\n")
        profile = self._profile()
        if profile:
            self._refuse_profile(profile, mtu)
            section = f"[connection-ringmaster-{self.netdev}]\nmatch-device=interface-name:{self.netdev}\n"
            path = f"{NETWORK_MANAGER_FILES}/{self._drop_in}"
            return Managed("NetworkManager", path, f"{HEADER}{section}ethernet.mtu={mtu}\n")
        self._refuse_stanza(mtu)
        return Managed("unit")

    @property
    def _drop_in(self) -> str:
        return f"90-ringmaster-mtu-{self.netdev}.conf"

    def _network_file(self) -> str:
        """File by which systemd-networkd manages the interface; empty if it does not."""
        if not self._is_known_in("/run/systemd/netif/links"):
            return ""
        answer = self.runner.run(["networkctl", "status", self.netdev, "--no-pager"])
        found = re.search(r"^\s*Network File: (/\S+)\s*$", answer.output, re.MULTILINE) if answer.ok else None
        return found.group(1) if found else ""

    def _profile(self) -> str:
        """UUID of the profile by which NetworkManager manages the interface; empty if it does not."""
        if not self._is_known_in("/run/NetworkManager/devices"):
            return ""
        fields = "GENERAL.NM-MANAGED,GENERAL.CON-UUID"
        answer = self.runner.run(["nmcli", "--get-values", fields, "device", "show", self.netdev])
        lines = [line.strip() for line in answer.output.splitlines()] if answer.ok else []
        return lines[1] if len(lines) > 1 and lines[0] == "yes" else ""

    def _is_known_in(self, folder: str) -> bool:
        """Whether a manager that runs has a file for the interface there, which spares asking one that does not run."""
        index = self.tree.text(f"{INTERFACES}/{self.netdev}/ifindex")
        return bool(index) and self.tree.exists(f"{folder}/{index}")

    def _matches_this_alone(self, network_file: str) -> bool:
        """Whether a .network file is for this interface only; the MTU in one for many would be everyone's."""
        section, names = "", []
        for line in (self.tree.raw(network_file) or "").splitlines():
            line = line.strip()
            if line.startswith("["):
                section = line
            elif section == "[Match]" and "=" in line:
                key, _equals, value = (part.strip() for part in line.partition("="))
                names += value.split() if key == "Name" else []
        return names == [self.netdev]

    def _refuse_profile(self, uuid: str, mtu: int) -> None:
        answer = self.runner.run(["nmcli", "--get-values", "802-3-ethernet.mtu", "connection", "show", uuid])
        found = answer.output.strip() if answer.ok else ""
        if found.isdigit() and found not in ("0", str(mtu)):
            raise RdmaQosError(
                f"the profile of {self.netdev} in NetworkManager to leave the MTU to its defaults, or to say {mtu}",
                f"{found} in connection {uuid}",
                f"nmcli connection modify {uuid} 802-3-ethernet.mtu {mtu}, or ask for that MTU",
            )

    def _refuse_stanza(self, mtu: int) -> None:
        """ifupdown sets an MTU only if its stanza says one, and then after the unit or before it, as it happens."""
        folder = "/etc/network/interfaces.d"
        for path in ("/etc/network/interfaces", *(f"{folder}/{name}" for name in self.tree.names(folder))):
            interface = ""
            for words in (line.split() for line in (self.tree.raw(path) or "").splitlines()):
                if words[:1] == ["iface"]:
                    interface = words[1] if len(words) > 1 else ""
                elif words[:1] == ["mtu"] and interface == self.netdev and words[1:] != [str(mtu)]:
                    raise RdmaQosError(
                        f"the stanza of {self.netdev} in {path} to say no other MTU than {mtu}",
                        " ".join(words),
                        f"change that line to `mtu {mtu}`, or ask for that MTU",
                    )

    # What is there

    def present(self) -> dict[str, str]:
        """Path -> content of the files that an earlier run wrote for this interface."""
        paths = [self.unit_path, f"{NETWORK_MANAGER_FILES}/{self._drop_in}"]
        paths += [f"{NETWORKD_FILES}/{name}/{self._drop_in}" for name in self.tree.names(NETWORKD_FILES)]
        contents = {path: self.tree.raw(path) for path in paths}
        return {path: content for path, content in contents.items() if content is not None}

    def complete(self, files: Mapping[str, str]) -> bool:
        """Whether these files are all that keeps the settings, and the unit among them is started at each boot.

        A unit that failed when it was last started counts as incomplete: it would not do at the next boot either.
        """
        if self.present() != files or self.enabled() != (self.unit_path in files):
            return False
        return self.unit_path not in files or not self.runner.run(["systemctl", "is-failed", "--quiet", self.unit]).ok

    def enabled(self) -> bool:
        """Whether the unit is started at each boot, and whenever the interface appears."""
        return self.tree.exists(f"{UNITS}/multi-user.target.wants/{self.unit}") and self.tree.exists(
            f"{UNITS}/{device_unit(self.netdev)}.wants/{self.unit}"
        )

    # What is done

    def keep(self, files: Mapping[str, str]) -> None:
        """Bring the files about, enable the unit and run it once, which proves that it will do at the next boot.

        What an earlier run wrote and is not among the files is removed; with no files at all the port keeps its
        settings until the next boot. Raises RdmaQosError if a file can't be written, or if systemd does not take or run
        the unit.
        """
        present = self.present()
        if self.unit_path not in files and (self.unit_path in present or self.enabled()):
            self._systemctl("disable", self.unit)
        for path in present.keys() - files.keys():
            self._remove(path)
        for path, content in files.items():
            if present.get(path) != content:
                self._write(path, content)
        self._reload_managers(present, files)
        if self.unit_path in present or self.unit_path in files:
            self._systemctl("daemon-reload")
        if self.unit_path in files:
            self._systemctl("reenable", self.unit)
            self._systemctl("start", self.unit)

    def _reload_managers(self, before: Mapping[str, str], after: Mapping[str, str]) -> None:
        """NetworkManager takes its defaults up without touching a connection; networkd reads them when needed."""
        path = f"{NETWORK_MANAGER_FILES}/{self._drop_in}"
        if before.get(path) != after.get(path):
            self.runner.run(["nmcli", "general", "reload", "conf"])

    def _systemctl(self, *words: str) -> None:
        answer = self.runner.run(["systemctl", *words], timeout=120)
        if answer.ok:
            return
        remedy = f"read `journalctl --unit {self.unit}`, mend that and run again"
        if answer.missing:
            remedy = "set persistent=false on a host without systemd"
        said = (answer.complaint or answer.output).strip() or f"exit status {answer.status}"
        raise RdmaQosError(f"`systemctl {' '.join(words)}` to succeed", said.splitlines()[0], remedy)

    def _write(self, path: str, content: str) -> None:
        place = self.tree.locate(path)
        try:
            os.makedirs(os.path.dirname(place), mode=0o755, exist_ok=True)
            replace(place, content, 0o644)
        except OSError as error:
            raise RdmaQosError(
                f"to write {path}",
                str(error.strerror or error),
                "run as root (become), and see that the file system is writable and has room",
            ) from error

    def _remove(self, path: str) -> None:
        place = self.tree.locate(path)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(place)
        if path != self.unit_path:
            # The folder of a drop-in, if it is empty now; others' drop-ins keep it.
            with contextlib.suppress(OSError):
                if path.startswith(NETWORKD_FILES):
                    os.rmdir(os.path.dirname(place))


def device_unit(netdev: str) -> str:
    """Name of the unit that systemd makes for an interface that udev knows; escaped as `systemd-escape --path` does."""
    escaped = re.sub(r"[^A-Za-z0-9_.:]", lambda found: f"\\x{ord(found.group()):02x}", netdev)
    return f"sys-subsystem-net-devices-{escaped}.device"
