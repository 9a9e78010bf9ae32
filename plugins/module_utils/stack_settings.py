# Copyright (c) 2026, the Ringmaster authors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Files that tell the package manager where packages of the driver stack come from, and keep them where they are.

Sources: sources.list(5) (deb822 style), apt_preferences(5), apt-key(8) on keyrings in ``/etc/apt/keyrings``;
dnf.conf(5), documentation of dnf's plugin versionlock. Only texts are made here. Nothing here imports Ansible.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence

APT_SOURCES = "/etc/apt/sources.list.d"
APT_PREFERENCES = "/etc/apt/preferences.d"
APT_KEYRINGS = "/etc/apt/keyrings"
DNF_REPOSITORIES = "/etc/yum.repos.d"
RPM_KEYS = "/etc/pki/rpm-gpg"
VERSION_LOCK = "/etc/dnf/plugins/versionlock.list"
PREFIX = "ringmaster-"
# Above 1000 apt also goes down to that version (apt_preferences(5)).
PIN_PRIORITY = 1001
_HEAD = "# Written by ringmaster.inference; a change by hand is lost with the next run.\n"
_ARMOUR = b"-----BEGIN PGP PUBLIC KEY BLOCK-----"


def source_path(name: str, family: str) -> str:
    """The file of a repository of a profile."""
    if family == "RedHat":
        return f"{DNF_REPOSITORIES}/{PREFIX}{name}.repo"
    return f"{APT_SOURCES}/{PREFIX}{name}.sources"


def key_path(name: str, family: str, key: bytes) -> str:
    """The file of a repository's key. apt tells by the extension whether it is text or binary."""
    if family == "RedHat":
        return f"{RPM_KEYS}/RPM-GPG-KEY-{PREFIX}{name}"
    return f"{APT_KEYRINGS}/{PREFIX}{name}.{'asc' if is_armoured(key) else 'gpg'}"


def is_armoured(key: bytes) -> bool:
    """Whether a key is in the form of text."""
    return _ARMOUR in key


def is_key(key: bytes) -> bool:
    """Whether bytes can be an OpenPGP public key: armoured, or beginning with the packet of one (RFC 9580, 4.2)."""
    if is_armoured(key):
        return True
    # Bit 7 is always set; the packet's type is in bits 5 to 2 of an old header, in bits 5 to 0 of a new one.
    if not key or not key[0] & 0x80:
        return False
    return (key[0] & 0x3F if key[0] & 0x40 else (key[0] & 0x3F) >> 2) == 6


def apt_source(uris: Sequence[str], suites: Sequence[str], components: Sequence[str], key: str | None) -> str:
    """A source in deb822 style. `key` is the keyring's path; None: what the host's apt trusts already."""
    lines = ["Types: deb", f"URIs: {' '.join(uris)}", f"Suites: {' '.join(suites)}"]
    lines += [f"Components: {' '.join(components)}"] if components else []
    lines += [f"Signed-By: {key}"] if key else []
    return _HEAD + "".join(f"{line}\n" for line in lines)


def apt_mirror(directory: str) -> str:
    """A mirror directory as a source. What is in it was checked against the repositories' keys when it was filled."""
    return _HEAD + f"Types: deb\nURIs: file://{directory}\nSuites: ./\nTrusted: yes\n"


def dnf_repository(name: str, url: str, key: str | None) -> str:
    """A repository of dnf. Packages are always checked against the key but in a mirror directory, whose are checked."""
    lines = [f"[{PREFIX}{name}]", f"name=Ringmaster: {name}", f"baseurl={url}", "enabled=1"]
    lines += ["gpgcheck=1", f"gpgkey=file://{key}"] if key else ["gpgcheck=0"]
    return _HEAD + "".join(f"{line}\n" for line in lines)


def preferences(versions: Mapping[str, str]) -> str:
    """Pins of packages at their exact versions, in order of their names; empty for none."""
    if not versions:
        return ""
    records = [
        f"Package: {name}\nPin: version {version}\nPin-Priority: {PIN_PRIORITY}\n"
        for name, version in sorted(versions.items())
    ]
    return _HEAD + "\n" + "\n".join(records)


def pinned(text: str) -> dict[str, str]:
    """Versions by name from what :func:`preferences` made."""
    return dict(re.findall(r"^Package: (\S+)\nPin: version (\S+)$", text, re.MULTILINE))


def version_locks(text: str, operation: str, versions: Mapping[str, Collection[str]]) -> str:
    """The text of dnf's version lock with the entries of one operation, and everything else as it was.

    An entry has no epoch where the version has none: ``*`` stands for it, as dnf's own ``versionlock add`` writes 0.
    """
    begin, end = _marks(operation)
    entries = [
        f"{name}-{version if ':' in version else f'0:{version}'}.*\n"
        for name, found in sorted(versions.items())
        for version in sorted(found)
    ]
    block = f"{begin}\n{''.join(entries)}{end}\n" if versions else ""
    # In its place, so that what is right already stays as it is, whichever operation's it is.
    present = re.compile(rf"^{re.escape(begin)}\n.*?^{re.escape(end)}(?:\n|\Z)", re.MULTILINE | re.DOTALL)
    before, *after = present.split(text)
    if not after and block and before and not before.endswith("\n"):
        before += "\n"
    return before + block + "".join(after)


def locked_by(text: str, operation: str) -> dict[str, list[str]]:
    """Versions by name that :func:`version_locks` has for an operation."""
    begin, end = _marks(operation)
    match = re.search(rf"^{re.escape(begin)}\n(.*?)^{re.escape(end)}$", text, re.MULTILINE | re.DOTALL)
    found: dict[str, list[str]] = {}
    for line in (match[1] if match else "").splitlines():
        entry = re.match(r"(\S+)-((?:[0-9]+:)?[^-\s]+-[^-\s]+)\.\*\Z", line)
        if entry:
            found.setdefault(entry[1], []).append(entry[2].removeprefix("0:"))
    return found


def _marks(operation: str) -> tuple[str, str]:
    return f"# ringmaster {operation}: begin", f"# ringmaster {operation}: end"


def boot_entry(grub_menu: str, release: str) -> str | None:
    """The name that ``GRUB_DEFAULT`` takes for a kernel: ids of its submenu and its entry in ``grub.cfg``.

    None where the menu has no ordinary entry of that kernel. (GRUB's manual, "Simple configuration".)
    """
    submenu, depth, submenu_depth = None, 0, 0
    for line in grub_menu.splitlines():
        entry = re.match(r"\s*(submenu|menuentry)\s.*\$menuentry_id_option\s+'([^']+)'\s*\{", line)
        if entry and entry[1] == "submenu":
            submenu, submenu_depth = entry[2], depth
        if entry and entry[1] == "menuentry" and re.match(rf"gnulinux-{re.escape(release)}-advanced(-|\Z)", entry[2]):
            return f"{submenu}>{entry[2]}" if submenu else entry[2]
        depth += len(re.findall(r"\{\s*\Z", line)) - (1 if line.strip() == "}" else 0)
        if submenu and depth <= submenu_depth:
            submenu = None
    return None
