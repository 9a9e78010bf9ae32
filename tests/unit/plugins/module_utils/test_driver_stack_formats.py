# SPDX-License-Identifier: GPL-3.0-or-later
"""Texts that tell about the driver stack, as tools print them, older and newer forms, and damaged."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ansible_collections.ringmaster.inference.plugins.module_utils.driver_stack_formats import (
    architecture_of,
    locked,
    module_kind,
    parse_dkms,
    parse_dpkg,
    parse_modinfo,
    parse_nvidia_version,
    parse_ofed_info,
    parse_os_release,
    parse_pins,
    parse_rpm,
    parse_secure_boot,
    parse_test_key,
    parse_toolkit,
    parse_versionlock,
)

INSTALLED = "nvidia-current/535.309.01, 6.1.0-57-amd64, x86_64: installed"


@pytest.mark.parametrize(
    ("line", "module", "version", "kernel", "state", "notes"),
    [
        (INSTALLED, "nvidia-current", "535.309.01", "6.1.0-57-amd64", "installed", []),
        (f"{INSTALLED} (WARNING! Diff between built and installed module!)",
         "nvidia-current", "535.309.01", "6.1.0-57-amd64", "installed",
         ["WARNING! Diff between built and installed module!"]),
        ("nvidia-current/535.309.01: added", "nvidia-current", "535.309.01", None, "added", []),
        ("nvidia, 470.57.02, 5.4.0-80-generic, x86_64: installed",
         "nvidia", "470.57.02", "5.4.0-80-generic", "installed", []),
        ("nvidia, 470.57.02: added", "nvidia", "470.57.02", None, "added", []),
        ("mlnx-ofed-kernel/24.10, 6.8.0-52-generic, x86_64: built (original_module exists)",
         "mlnx-ofed-kernel", "24.10", "6.8.0-52-generic", "built", ["original_module exists"]),
        ("nvidia/580.159.04, 5.14.0-503.11.1.el9_5.x86_64, x86_64: installed (original_module exists) (WARNING! Diff!)",
         "nvidia", "580.159.04", "5.14.0-503.11.1.el9_5.x86_64", "installed",
         ["original_module exists", "WARNING! Diff!"]),
        ("Error! nvidia/550.1: Missing the module source directory or the symbolic link pointing to it.",
         "nvidia", "550.1", None, "broken", ["its source is missing"]),
        ("nvidia/550.1: broken", "nvidia", "550.1", None, "broken", []),
    ],
)  # fmt: skip
def test_dkms_state(line: str, module: str, version: str, kernel: str | None, state: str, notes: list[str]) -> None:
    (found,), strange = parse_dkms(f"{line}\n")
    assert strange == []
    assert [found[name] for name in ("module", "version", "kernel", "state", "notes")] == [
        *(module, version, kernel, state, notes)
    ]


def test_dkms_lines_that_are_something_else_are_kept_apart() -> None:
    modules, strange = parse_dkms("Deprecated feature: REMAKE_INITRD\n\nnvidia/1: added\nnvidia/1: exploded\nsh: oops")
    assert [module["state"] for module in modules] == ["added"]
    assert strange == ["nvidia/1: exploded", "sh: oops"]
    assert parse_dkms("") == ([], [])


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.95.05  Release Build  (dvs-builder@U22)",
         ("580.95.05", "open")),
        ("NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.309.01  Tue Sep 23 10:11:12 UTC 2025\nGCC version:",
         ("535.309.01", "proprietary")),
        ("NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.78", ("550.78", "proprietary")),
        ("NVRM version: NVIDIA UNIX Open Kernel Module for", (None, None)),
        ("GCC version:  gcc version 535.1.1", (None, None)),
        ("", (None, None)),
    ],
)  # fmt: skip
def test_loaded_module(text: str, found: tuple[str | None, str | None]) -> None:
    assert parse_nvidia_version(text) == found


def test_modinfo_of_debian() -> None:
    fields = parse_modinfo(
        "filename:       /lib/modules/6.1.0-57-amd64/updates/dkms/nvidia-current.ko\n"
        "version:        535.309.01\nlicense:        NVIDIA\nname:           nvidia\n"
        "signer:         DKMS module signing key\nsignature:      50:78:A6\n\t\tA8:2A:F9\nparm:  a:b\nversion: 2"
    )
    assert (fields["version"], fields["signer"], fields["name"]) == ("535.309.01", "DKMS module signing key", "nvidia")
    assert module_kind(fields["license"]) == "proprietary"
    assert module_kind("Dual MIT/GPL") == "open"
    assert module_kind("GPL") is None
    assert module_kind(None) is None


@pytest.mark.parametrize(
    ("text", "family", "distribution", "version"),
    [
        ('ID=debian\nVERSION_ID="12"\n', "Debian", "Debian", "12"),
        ('NAME="Ubuntu"\nID=ubuntu\nID_LIKE=debian\nVERSION_ID="24.04"', "Debian", "Ubuntu", "24.04"),
        ("ID='rocky'\nID_LIKE=\"rhel centos fedora\"\nVERSION_ID=9.4", "RedHat", "Rocky", "9.4"),
        ('ID="rhel"\nID_LIKE="fedora"\nVERSION_ID="9.6"', "RedHat", "RedHat", "9.6"),
        ('ID=linuxmint\nID_LIKE="ubuntu debian"\nVERSION_ID=22', "Debian", "linuxmint", "22"),
        ("ID=arch\n", None, "arch", None),
        ("ID=debian\nVERSION_ID=sid", "Debian", "Debian", None),
        ("", None, None, None),
    ],
)
def test_os_release(text: str, family: str | None, distribution: str | None, version: str | None) -> None:
    assert parse_os_release(text) == {"family": family, "distribution": distribution, "version": version}


def test_dpkg_database() -> None:
    text = (
        "libcuda1\t1-1\tii \nlibcuda1\t1-1\tii \nnvidia-smi\t1-1\thi \nhalf\t2-1\tiF \n"
        "gone\t1\trc \nnever\t\tun \nkept\t3\thc "
    )
    assert parse_dpkg(text) == ({"libcuda1": ["1-1"], "nvidia-smi": ["1-1"], "half": ["2-1"]}, ["nvidia-smi"])
    assert parse_dpkg("") == ({}, [])
    assert parse_dpkg("dpkg-query: error: parsing file") is None
    assert parse_dpkg("libcuda1\t1-1\tii \nlibcu") is None  # cut


def test_rpm_database() -> None:
    text = "kernel-core\t5.14.0-427.el9\nkernel-core\t5.14.0-503.el9\nnvidia-driver-cuda\t3:580.159.04-1.el9\n"
    assert parse_rpm(text) == {
        "kernel-core": ["5.14.0-427.el9", "5.14.0-503.el9"],
        "nvidia-driver-cuda": ["3:580.159.04-1.el9"],
    }
    assert parse_rpm("error: rpmdb open failed") is None
    assert parse_rpm("") == {}


def test_pins() -> None:
    text = """# comment
Explanation: by hand
Package: nvidia-smi libnvidia-*
Pin: version 535.309.01-0+deb12u1
Pin-Priority: 1001
# another
Package:
 a
 b
Pin: release n=trixie*
Pin-Priority: -1

Package: no-priority
Pin: version 1
"""
    first, *rest = parse_pins(text.replace("1001\n# another", "1001\n\n# another"))
    assert first == {"packages": ["nvidia-smi", "libnvidia-*"], "pin": "version 535.309.01-0+deb12u1", "priority": 1001}
    assert rest == [{"packages": ["a", "b"], "pin": "release n=trixie*", "priority": -1}]


def test_version_lock_of_dnf_4() -> None:
    entries = parse_versionlock(
        "\n# Added lock on Mon Nov 30 02:43:13 2026\nnvidia-driver-cuda-3:580.159.04-1.el9.*\n"
        "kernel-core-0:5.14.0-503.11.1.el9_5.x86_64\n!bash-0:5.1-1.*\nnvidia-*\nlibnccl-2.28.9-1+cuda13.0.x86_64"
    )
    assert entries == [
        {"package": "nvidia-driver-cuda", "version": "3:580.159.04-1.el9"},
        {"package": "kernel-core", "version": "0:5.14.0-503.11.1.el9_5"},
        {"package": "nvidia-*", "version": "*"},
        {"package": "libnccl", "version": "2.28.9-1+cuda13.0"},
    ]
    assert locked(entries, ["nvidia-persistenced", "kernel-core", "kernel-devel", "libnccl-devel"]) == [
        *("nvidia-persistenced", "kernel-core")
    ]


@pytest.mark.parametrize(
    ("text", "enabled"),
    [
        ("SecureBoot enabled\n", True),
        ("SecureBoot enabled\nSecureBoot validation is disabled in shim\n", True),
        ("SecureBoot disabled\nPlatform is in Setup Mode\n", False),
        ("EFI variables are not supported on this system\n", False),
        ("Failed to read SecureBoot", None),
        ("", None),
    ],
)
def test_secure_boot(text: str, enabled: bool | None) -> None:
    assert parse_secure_boot(text) is enabled


@pytest.mark.parametrize(
    ("text", "enrolled"),
    [
        ("/var/lib/dkms/mok.pub is already enrolled\n", True),
        ("/var/lib/dkms/mok.pub is not enrolled\n", False),
        ("/var/lib/dkms/mok.pub is already in the enrollment request\n", False),
        ("EFI variables are not supported on this system", None),
    ],
)
def test_enrolled_key(text: str, enrolled: bool | None) -> None:
    assert parse_test_key(text) is enrolled


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("MLNX_OFED_LINUX-24.10-0.7.0.0:\n", ("mlnx_ofed", "24.10-0.7.0.0")),
        ("OFED-internal-25.04-0.6.1:", ("doca_ofed", "25.04-0.6.1")),
        ("OFED-internal-25.04-0.6.1: more", (None, None)),
        ("", (None, None)),
    ],
)
def test_ofed_info(text: str, found: tuple[str | None, str | None]) -> None:
    assert parse_ofed_info(text) == found


@pytest.mark.parametrize(
    ("text", "version"),
    [
        ('{"cuda": {"name": "CUDA SDK", "version": "13.0.2"}}', "13.0.2"),
        ("CUDA Version 10.2.89\n", "10.2.89"),
        ('{"cuda": {"version": 13}}', None),
        ('{"cuda": []}', None),
        ("[]", None),
        ("CUDA", None),
    ],
)
def test_toolkit(text: str, version: str | None) -> None:
    assert parse_toolkit(text) == version


@pytest.mark.parametrize(
    ("device", "architecture"),
    [
        (0x1B38, "before_turing"),  # P40
        (0x1DB6, "before_turing"),  # V100
        (0x1EB8, "turing"),  # T4
        (0x20B2, "ampere"),  # A100
        (0x2236, "ampere"),  # A10
        (0x26B9, "ada"),  # L40S
        (0x2330, "hopper"),  # H100
        (0x2901, "blackwell"),  # B200
        (0x0FFF, None),
        (0xFFFF, None),
    ],
)
def test_generation_of_a_card(device: int, architecture: str | None) -> None:
    assert architecture_of(device) == architecture


PARSERS: tuple[Any, ...] = (
    *(parse_dkms, parse_dpkg, parse_modinfo, parse_nvidia_version, parse_ofed_info, parse_os_release, parse_pins),
    *(parse_rpm, parse_secure_boot, parse_test_key, parse_toolkit, parse_versionlock),
)


@given(st.sampled_from(PARSERS), st.text(max_size=80) | st.text("abNI: /,.-()[]{}\"'=\n\t0123456789", max_size=120))
def test_any_text_is_answered(parser: Any, text: str) -> None:
    parser(text)


WORD = st.from_regex(r"[a-z][a-z0-9-]{0,10}[a-z0-9]", fullmatch=True)
NUMBER = st.from_regex(r"[0-9]{1,3}(\.[0-9]{1,3}){0,2}", fullmatch=True)


@given(st.lists(st.tuples(WORD, NUMBER, NUMBER, st.sampled_from(("built", "installed"))), max_size=5), st.booleans())
def test_dkms_lines_are_read_back(made: list[tuple[str, str, str, str]], old: bool) -> None:
    between = ", " if old else "/"
    text = "\n".join(
        f"{name}{between}{version}, {kernel}-amd64, x86_64: {state}" for name, version, kernel, state in made
    )
    modules, strange = parse_dkms(text)
    assert strange == []
    assert [(each["module"], each["version"], each["kernel"], each["state"]) for each in modules] == [
        (name, version, f"{kernel}-amd64", state) for name, version, kernel, state in made
    ]
