# Copyright (c) 2026, the Ringmaster authors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Formats of what tells about the driver stack: DKMS, modules, package databases, holds, Secure Boot, OFED.

Each parser takes text and gives values, None where the text is something else. Sources: dkms(8) of 2.8 to 3.2 and its
shell code, modinfo(8), apt_preferences(5), dnf-versionlock(8), mokutil(1), os-release(5), NVIDIA's
``/proc/driver/nvidia/version``, the PCI ID database (``pci.ids``). Nothing here imports Ansible.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from fnmatch import fnmatchcase
from typing import Any

# First and last device id of NVIDIA's cards of a generation, from pci.ids of 2025-06-09.
_DEVICES = (
    (0x1340, 0x1D7F, "before_turing"),  # GM, GP
    (0x1D80, 0x1DFF, "before_turing"),  # GV
    (0x1E00, 0x1FFF, "turing"),  # TU10x
    (0x2080, 0x20FF, "ampere"),  # GA100
    (0x2180, 0x21FF, "turing"),  # TU11x
    (0x2200, 0x227F, "ampere"),  # GA102
    (0x2300, 0x23FF, "hopper"),  # GH100
    (0x2400, 0x25FF, "ampere"),  # GA103 to GA107
    (0x2600, 0x28FF, "ada"),  # AD10x
    (0x2900, 0x33FF, "blackwell"),  # GB1xx, GB2xx
)
_DISTRIBUTIONS = {  # os-release ID -> Ansible's name
    "almalinux": "AlmaLinux",
    "centos": "CentOS",
    "debian": "Debian",
    "fedora": "Fedora",
    "ol": "OracleLinux",
    "rhel": "RedHat",
    "rocky": "Rocky",
    "ubuntu": "Ubuntu",
}
_FAMILIES = {"debian": "Debian", "ubuntu": "Debian", "rhel": "RedHat", "fedora": "RedHat", "centos": "RedHat"}
DKMS_STATES = ("added", "built", "installed", "broken")


def architecture_of(device: int) -> str | None:
    """Generation of the NVIDIA card with a PCI device id; None for one that is not in the table."""
    return next((generation for first, last, generation in _DEVICES if first <= device <= last), None)


def parse_os_release(text: str) -> dict[str, str | None]:
    """``family``, ``distribution`` and ``version``, in Ansible's words; None for what is not known."""
    values = {}
    for line in text.splitlines():
        match = re.match(r"""\s*([A-Z_]+)=(["']?)(.*)\2\s*\Z""", line)
        if match:
            values[match[1]] = match[3]
    name = values.get("ID", "")
    likes = [name, *values.get("ID_LIKE", "").split()]
    version = values.get("VERSION_ID", "")
    return {
        "family": next((_FAMILIES[like] for like in likes if like in _FAMILIES), None),
        "distribution": _DISTRIBUTIONS.get(name) or name or None,
        "version": version if re.match(r"[0-9]+(\.[0-9]+)*\Z", version) else None,
    }


def parse_nvidia_version(text: str) -> tuple[str | None, str | None]:
    """Version and kind (open, proprietary) of the loaded module, from ``/proc/driver/nvidia/version``."""
    match = re.search(r"^NVRM version:\s*(.*?)\s+([0-9]{3,4}(?:\.[0-9]+){1,3})(?:\s|\Z)", text, re.MULTILINE)
    if not match:
        return None, None
    return match[2], "open" if re.search(r"\bOpen\b", match[1]) else "proprietary"


def parse_modinfo(text: str) -> dict[str, str]:
    """Fields of ``modinfo``; of one that is there several times the first."""
    fields: dict[str, str] = {}
    for line in text.splitlines():
        match = re.match(r"([a-z_]+):\s+(.*\S)\s*\Z", line)
        if match:
            fields.setdefault(match[1], match[2])
    return fields


def module_kind(license_name: str | None) -> str | None:
    """Kind of the driver's module by its license (``modinfo -F license nvidia``)."""
    return {"Dual MIT/GPL": "open", "NVIDIA": "proprietary"}.get(license_name or "")


def parse_dkms(text: str) -> tuple[list[dict[str, Any]], list[str]]:
    """Modules of ``dkms status``, and the lines that can't be read.

    Of each: ``module``, ``version``, ``kernel`` and ``architecture`` (None while it is only added), ``state`` (added,
    built, installed, broken) and ``notes`` (``original_module exists``, a difference between built and installed).

    Forms: ``nvidia/535.309.01, 6.1.0-57-amd64, x86_64: installed`` (3.x), ``nvidia, 470.57.02, 5.4.0-80-generic,
    x86_64: installed`` (2.x), ``nvidia/535.309.01: added``, with ``(WARNING! …)`` or ``(original_module exists)`` after
    it, and ``Error! nvidia/535.309.01: Missing the module source directory …``.
    """
    modules, strange = [], []
    for line in text.splitlines():
        stripped = line.strip()
        if not stripped:
            continue
        missing = re.match(r"Error! ([^\s/:]+)/([^\s:,]+): Missing the module source directory", stripped)
        if missing:
            modules.append(_dkms_module(missing[1], missing[2], None, None, "broken", ["its source is missing"]))
            continue
        match = re.match(
            r"([^\s/,:]+)(?:/|, )([^\s,:]+)(?:, ([^\s,]+), ([A-Za-z0-9_-]+))?: ([a-z]+)((?: ?\([^()]*\))*)\Z",
            stripped,
        )
        if not match or match[5] not in DKMS_STATES:
            if not stripped.startswith(("Deprecated feature", "Warning:")):
                strange.append(stripped[:200])
            continue
        notes = [note.strip() for note in re.findall(r"\(([^()]*)\)", match[6])]
        modules.append(_dkms_module(match[1], match[2], match[3], match[4], match[5], notes))
    return modules, strange


def _dkms_module(
    name: str, version: str, kernel: str | None, architecture: str | None, state: str, notes: list[str]
) -> dict[str, Any]:
    return {
        "module": name,
        "version": version,
        "kernel": kernel,
        "architecture": architecture,
        "state": state,
        "notes": notes,
    }


def parse_dpkg(text: str) -> tuple[dict[str, list[str]], list[str]] | None:
    """Versions of installed packages by name, and names of those on hold; None if a line is something else.

    ``dpkg-query --show --showformat '${Package}\\t${Version}\\t${db:Status-Abbrev}\\n'``: the first letter of the third
    field is the wish (``h`` hold), the second the state (``i`` installed, ``c`` only configuration files).
    """
    packages: dict[str, list[str]] = {}
    held = []
    for line in text.splitlines():
        fields = line.split("\t")
        if len(fields) != 3 or not fields[0] or len(fields[2].rstrip()) < 2:
            return None
        name, version, state = fields
        # Unpacked, half configured and half installed count: they are in the way all the same.
        if state[1] in "nc":
            continue
        versions = packages.setdefault(name, [])
        if version not in versions:
            versions.append(version)
        if state[0] == "h" and name not in held:
            held.append(name)
    return packages, held


def parse_rpm(text: str) -> dict[str, list[str]] | None:
    """Versions (``epoch:version-release``) of installed packages by name, from ``rpm -qa``; None if it is no such list.

    ``--qf '%{NAME}\\t%|EPOCH?{%{EPOCH}:}:{}|%{VERSION}-%{RELEASE}\\n'``
    """
    packages: dict[str, list[str]] = {}
    for line in text.splitlines():
        name, tab, version = line.partition("\t")
        if not tab or not name or "-" not in version:
            return None
        versions = packages.setdefault(name, [])
        if version not in versions:
            versions.append(version)
    return packages


def parse_pins(text: str) -> list[dict[str, Any]]:
    """Records of an apt preferences file: ``packages`` (names and patterns), ``pin``, ``priority``."""
    pins = []
    for record in re.split(r"\n[ \t]*\n", "\n".join(line for line in text.splitlines() if not line.startswith("#"))):
        fields: dict[str, str] = {}
        name = ""
        for line in record.splitlines():
            if line[:1] in (" ", "\t") and name:
                fields[name] += " " + line.strip()
                continue
            key, colon, value = line.partition(":")
            if colon:
                name = key.strip().lower()
                fields[name] = value.strip()
        packages, priority = fields.get("package", "").split(), fields.get("pin-priority", "")
        if packages and fields.get("pin") and re.match(r"-?[0-9]{1,6}\Z", priority):
            pins.append({"packages": packages, "pin": fields["pin"], "priority": int(priority)})
    return pins


def parse_versionlock(text: str) -> list[dict[str, str]]:
    """Entries of ``versionlock.list`` of dnf 4: ``package``, ``version``; an exclusion (``!``) is none.

    An entry is ``name-epoch:version-release.architecture``, each part of which may be a pattern.
    """
    entries = []
    for line in text.splitlines():
        stripped = line.strip()
        if not stripped or stripped[0] in "#!":
            continue
        match = re.match(r"(\S+?)-((?:[0-9*]+:)?[^\s:-]+-[^\s:-]+?)\.([A-Za-z0-9_*]+)\Z", stripped)
        if match:
            entries.append({"package": match[1], "version": match[2]})
        elif re.match(r"[^\s:]+\Z", stripped):
            entries.append({"package": stripped, "version": "*"})
    return entries


def locked(entries: Iterable[dict[str, str]], packages: Iterable[str]) -> list[str]:
    """Which of the packages an entry of the version lock keeps where they are."""
    patterns = [entry["package"] for entry in entries]
    return [name for name in packages if any(fnmatchcase(name, pattern) for pattern in patterns)]


def parse_secure_boot(text: str) -> bool | None:
    """Whether Secure Boot is on, from ``mokutil --sb-state``; False on a host that was not booted by EFI."""
    if re.search(r"^SecureBoot enabled\b", text, re.MULTILINE):
        return True
    if re.search(r"^SecureBoot disabled\b", text, re.MULTILINE) or "EFI variables are not supported" in text:
        return False
    return None


def parse_test_key(text: str) -> bool | None:
    """Whether a key is enrolled, from ``mokutil --test-key FILE``, whose exit status says the contrary."""
    if re.search(r"\bis already enrolled\b", text):
        return True
    return False if re.search(r"\bis not enrolled\b|\bis already in the enrollment request\b", text) else None


def parse_ofed_info(text: str) -> tuple[str | None, str | None]:
    """Flavour and version from ``ofed_info -s``: ``MLNX_OFED_LINUX-24.10-0.7.0.0:`` or ``OFED-internal-25.04-0.6.1:``.

    DOCA-OFED answers with the second form.
    """
    match = re.match(r"(MLNX_OFED_LINUX|OFED-internal)-([0-9][^\s:]*):?\s*\Z", text.strip())
    if not match:
        return None, None
    return ("mlnx_ofed" if match[1] == "MLNX_OFED_LINUX" else "doca_ofed"), match[2]


def parse_toolkit(text: str) -> str | None:
    """Version of a CUDA toolkit, from its ``version.json`` or the older ``version.txt``."""
    try:
        document = json.loads(text)
    except ValueError:
        match = re.match(r"CUDA Version ([0-9]+(?:\.[0-9]+)+)\s*\Z", text)
        return match[1] if match else None
    cuda = document.get("cuda") if isinstance(document, dict) else None
    version = cuda.get("version") if isinstance(cuda, dict) else None
    return version if isinstance(version, str) and re.match(r"[0-9]+(\.[0-9]+)+\Z", version) else None
