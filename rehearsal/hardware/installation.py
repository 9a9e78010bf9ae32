# SPDX-License-Identifier: GPL-3.0-or-later
"""What a host of the fleet is given so that it shows simulated hardware: an archive, unpacked before its start."""

from __future__ import annotations

import hashlib
import io
import tarfile
import tempfile
from collections.abc import Mapping
from pathlib import Path

from rehearsal.hardware import library, profiles
from rehearsal.hardware.state import FOLDER, State

PACKAGE = Path(__file__).parent
PROGRAM = "usr/local/lib/ringmaster-rehearsal"
# Run before a host's init. Mounts are still its own then, so that taking one away takes away no copy of it.
BOOT = f"PYTHONPATH=/{PROGRAM} /usr/bin/python3 -m rehearsal.hardware.boot"
# The program's name is the command's, as `ps` would show it of the real one. By its path
# it starts sooner than with `-m`.
LAUNCHER = f"""#!/usr/bin/env bash
export PYTHONPATH=/{PROGRAM} PYTHONHOME=/usr
exec -a "${{0##*/}}" /usr/bin/python3 -S /{PROGRAM}/rehearsal/hardware/commands/__main__.py "${{0##*/}}" "$@"
"""
COMMANDS = {
    "usr/local/bin": ("nvidia-smi", "ibv_devinfo"),
    "usr/local/sbin": ("dcb", "mlnx_qos", "ethtool", "rdma", "update-grub"),
}
_PROGRAM_UNIT = f"""
[Service]
Type=exec
Environment=PYTHONPATH=/{PROGRAM}
ExecStart=/usr/bin/python3 -S -m rehearsal.hardware.{{module}}
[Install]
WantedBy=multi-user.target
"""
UNITS = {
    "ringmaster-rehearsal-settle.service": (
        "[Unit]\nDescription=What a kernel does with words written into its files\n"
        + _PROGRAM_UNIT.format(module="settle")
    ),
    "ringmaster-rehearsal-faults.service": (
        "[Unit]\nDescription=Faults of the simulated hardware that grow or end\n"
        f"ConditionDirectoryNotEmpty={FOLDER}/faults\n" + _PROGRAM_UNIT.format(module="faults keep")
    ),
}
# The kernel's own file systems would hide the simulated files below these folders.
MASKED = ("sys-kernel-config.mount", "sys-kernel-debug.mount", "sys-kernel-tracing.mount")
# The LLDP agent by name only: who looks for it finds a process that is called so.
LLDPAD = "#!/bin/sh\nwhile sleep 3600; do :; done\n"


def digest(profile: str) -> str:
    """A hash of everything that decides what a host with this profile is given."""
    known = hashlib.sha256(profile.encode())
    for path in _sources():
        known.update(path.read_bytes())
    return known.hexdigest()[:16]


def archive(profile: str, host: str, addresses: Mapping[int, str], built: Path) -> bytes:
    """The archive for a host, paths from its root. `addresses`: those of its ports; `built`: folder of the library.

    Raises KeyError for an unknown profile and library.CompilerError if the library can't be built.
    """
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w") as tar:
        for path in _sources():
            _add(tar, f"{PROGRAM}/rehearsal/{path.relative_to(PACKAGE.parent)}", path.read_bytes())
        _add(tar, f"{PROGRAM}/rehearsal/__init__.py", (PACKAGE.parent / "__init__.py").read_bytes())
        _add(tar, f"{PROGRAM}/lldpad", LLDPAD.encode(), 0o755)
        _add(tar, f"usr/local/lib/{library.NAME}", library.compile_library(built).read_bytes(), 0o755)
        ethtool = f"usr/local/lib/{library.ETHTOOL_NAME}"
        _add(tar, ethtool, library.compile_ethtool(built).read_bytes(), 0o755)
        _add(tar, "etc/ld.so.preload", f"/{ethtool}\n".encode())
        for folder, names in COMMANDS.items():
            for name in names:
                _add(tar, f"{folder}/{name}", LAUNCHER.encode(), 0o755)
        _add(tar, "etc/default/grub", b'GRUB_CMDLINE_LINUX_DEFAULT="quiet"\nGRUB_CMDLINE_LINUX=""\n')
        with tempfile.TemporaryDirectory(prefix="ringmaster-hardware-") as folder:
            state = State(folder)
            profiles.write(profile, state, host)
            for index, address in addresses.items():
                state.set(f"ports/{index}/address", address)
            for path in sorted(state.folder.rglob("*")):
                if path.is_file():
                    _add(tar, f"{FOLDER[1:]}/{path.relative_to(state.folder)}", path.read_bytes())
        _add_units(tar)
    return content.getvalue()


def _sources() -> list[Path]:
    return sorted(path for path in PACKAGE.rglob("*") if path.suffix in (".py", ".c"))


def _add(tar: tarfile.TarFile, name: str, content: bytes, mode: int = 0o644) -> None:
    entry = tarfile.TarInfo(name)
    entry.size, entry.mode = len(content), mode
    tar.addfile(entry, io.BytesIO(content))


def _add_units(tar: tarfile.TarFile) -> None:
    folder = "etc/systemd/system"
    for name, text in UNITS.items():
        _add(tar, f"{folder}/{name}", text.encode())
        _link(tar, f"{folder}/multi-user.target.wants/{name}", f"../{name}")
    for name in MASKED:
        _link(tar, f"{folder}/{name}", "/dev/null")


def _link(tar: tarfile.TarFile, name: str, target: str) -> None:
    entry = tarfile.TarInfo(name)
    entry.type, entry.linkname = tarfile.SYMTYPE, target
    tar.addfile(entry)
