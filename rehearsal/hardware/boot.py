# SPDX-License-Identifier: GPL-3.0-or-later
"""What a host of the fleet does before its init starts: bring the simulated hardware to where a kernel shows it.

/sys is composed anew: the simulated tree, with the parts that systemd and the network need from the real one bound in.
The container's mounts are its own, so that nothing of this reaches the machine. It takes a few tenths of a second.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from rehearsal.hardware import Machine, faults, kernel_log, lifecycle
from rehearsal.hardware.state import State
from rehearsal.hardware.tree import Tree, driver_name

STAGE = Path("/mnt")
# What stays the machine's own: control groups, and devices without hardware (network interfaces of containers).
REAL = ("fs", "devices/virtual")
# Reading it fails with EINVAL, as reading the attributes of an empty GID slot does.
EMPTY_SLOT = "/sys/devices/virtual/net/lo/speed"


def _mount(*arguments: str) -> None:
    subprocess.run(["mount", *arguments], check=True)


def main() -> int:
    """Boot the simulated machine."""
    os.umask(0o022)
    state = State.of_this_host()
    state.set("host/empty_slot", EMPTY_SLOT)
    lifecycle.boot(state)
    _mount("-t", "tmpfs", "-o", "mode=0755,size=64m", "hardware", str(STAGE))
    staged = Tree(STAGE, state)
    for part in REAL:
        place = STAGE / "sys" / part
        place.mkdir(parents=True)
        _mount("--rbind", f"/sys/{part}", str(place))
    staged.link_real_devices()
    staged.build()
    boot_id = STAGE / "boot_id"
    boot_id.write_text(f"{state.text('host/boot_id')}\n")
    _mount("--rbind", str(STAGE / "sys"), "/sys")
    _mount("--bind", str(STAGE / "proc/driver"), "/proc/driver")
    _mount("--bind", str(STAGE / "proc/cmdline"), "/proc/cmdline")
    _mount("--bind", str(boot_id), "/proc/sys/kernel/random/boot_id")
    subprocess.run(["umount", "--lazy", str(STAGE)], check=True)
    _devices(state)
    _commands(state)
    machine = Machine.of_this_host()
    for line in _first_lines(state):
        kernel_log.write(state, machine.tree, line, kernel_log.INFORMATION)
    faults.boot(machine)
    machine.tree.refresh()
    return 0


def _devices(state: State) -> None:
    Tree("/", state).devices()
    log = Path("/dev/kmsg")
    log.unlink(missing_ok=True)
    os.mkfifo(log, 0o644)
    # systemd and journald open it to write, which waits for a reader; one that has it open both ways lets nobody wait.
    with log.open("r+b", buffering=0) as pipe:
        subprocess.Popen(["sleep", "infinity"], stdin=pipe, start_new_session=True)
    for index in state.names("ports"):
        # Interfaces come from the machine with its own MTU; an adapter's driver starts with Ethernet's.
        subprocess.run(["ip", "link", "set", state.text(f"ports/{index}/netdev"), "mtu", "1500"], check=False)


def _first_lines(state: State) -> list[str]:
    """What a kernel and the drivers of this hardware log as they start."""
    version = state.text("driver/version")
    return [
        f"Linux version {state.text('host/kernel')}",
        f"Command line: {state.text('host/cmdline')}",
        f"NVRM: loading {driver_name(state)}  {version}  Release Build",
        *(
            f"mlx5_core {state.text(f'ports/{index}/pci_address')}: "
            f"firmware version: {state.text(f'ports/{index}/firmware_version')}"
            for index in state.names("ports")
        ),
    ]


def _commands(state: State) -> None:
    """A host has dcb, mlnx_qos or both; iproute2 brings a dcb of its own, which is put out of the way if need be."""
    subprocess.run(["ldconfig"], check=False)
    for name in state.names("host/commands"):
        standin, present = Path("/usr/local/sbin", name), state.text(f"host/commands/{name}") == "1"
        if not present:
            standin.unlink(missing_ok=True)
        real = shutil.which(name, path="/usr/sbin:/usr/bin")
        if real and not present:
            os.chmod(real, 0o644)


if __name__ == "__main__":
    sys.exit(main())
