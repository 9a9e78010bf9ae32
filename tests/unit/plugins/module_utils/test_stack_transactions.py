# SPDX-License-Identifier: GPL-3.0-or-later
"""Simulated transactions as apt 2.6 (Debian 12) and dnf 4.14 really print them, whole, cut and made up."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ansible_collections.ringmaster.inference.plugins.module_utils.stack_packages import OPERATIONS
from ansible_collections.ringmaster.inference.plugins.module_utils.stack_profiles import for_kernel
from ansible_collections.ringmaster.inference.plugins.module_utils.stack_transactions import (
    ACTIONS,
    Change,
    Transaction,
    along,
    check,
    parse,
    parse_apt,
    parse_dnf,
)
from tests.support.stack import profile

RECORDED = Path(__file__).with_name("simulations")
NAMES = sorted(path.stem for path in RECORDED.glob("*.txt"))
OLD, NEW = "535.261.03-1", "535.309.01-0+deb12u1"


def recorded(name: str) -> str:
    return (RECORDED / f"{name}.txt").read_text(encoding="utf-8")


def parsed(name: str) -> Transaction:
    return parse("RedHat" if name.startswith("dnf") else "Debian", recorded(name))


def counts(transaction: Transaction) -> dict[str, int]:
    found = {action: sum(change.action == action for change in transaction.changes) for action in ACTIONS}
    return {action: number for action, number in found.items() if number}


def reasons(transaction: Transaction, document: dict[str, Any], *operations: str, **installed: list[str]) -> list[str]:
    here = {name.replace("_", "-"): versions for name, versions in installed.items()}
    return [problem["reason"] for problem in check(transaction, document, operations, here)]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("apt_driver", {"install": 74}),
        ("apt_cuda", {"install": 58}),
        ("apt_nccl", {"install": 2, "upgrade": 3}),
        ("apt_downgrade", {"downgrade": 11}),
        ("apt_downgrade_held", {"install": 2, "downgrade": 3, "remove": 5}),
        ("apt_remove", {"install": 2, "remove": 8}),
        ("apt_purge", {"remove": 1}),
        ("apt_reinstall", {"reinstall": 1}),
        ("apt_nothing", {}),
        ("dnf_install", {"install": 8}),
        ("dnf_upgrade", {"upgrade": 5}),
        ("dnf_downgrade", {"downgrade": 5}),
        ("dnf_conflict_erase", {"install": 1, "remove": 3}),
        ("dnf_remove", {"remove": 7}),
        ("dnf_glob", {"install": 1}),
        ("dnf_reinstall", {"reinstall": 1}),
        ("dnf_nothing", {}),
    ],
)
def test_recorded_simulation_is_read_whole(name: str, expected: dict[str, int]) -> None:
    transaction = parsed(name)
    assert transaction.errors == ()
    assert counts(transaction) == expected


@pytest.mark.parametrize(
    ("name", "error"),
    [
        ("apt_missing_version", "Version '999' for 'nvidia-smi' was not found"),
        ("apt_missing_package", "Unable to locate package nvidia-nonsuch"),
        ("apt_partial", "nvidia-smi : Depends: nvidia-alternative (= 535.261.03-1) but 535.309.01-0+deb12u1 is to be"),
        ("apt_downgrade_no_flag", "Packages were downgraded and -y was used without --allow-downgrades."),
        ("apt_held_y", "Held packages were changed and -y was used without --allow-change-held-packages."),
        ("dnf_missing", "No match for argument: nvidia-nonsuch-1"),
        ("dnf_locked", "Error: Unable to find a match: nvidia-driver-cuda-580.126.20"),
        ("dnf_broken", "nothing provides nonsuch-library >= 5 needed by broken-1-1.noarch"),
        ("dnf_conflict", "package conflicting-1-1.noarch conflicts with nvidia-driver-cuda provided by"),
    ],
)
def test_reason_of_the_package_manager_is_kept(name: str, error: str) -> None:
    assert any(each.startswith(error) for each in parsed(name).errors)


def test_change_has_its_versions() -> None:
    changes = {change.name: change for change in parsed("apt_downgrade").changes}
    assert changes["nvidia-smi"] == Change("nvidia-smi", "downgrade", NEW, OLD)
    changes = {change.name: change for change in parsed("dnf_conflict_erase").changes}
    assert changes["nvidia-driver-cuda"] == Change("nvidia-driver-cuda", "remove", "3:580.126.20-1.el9", None)
    assert changes["conflicting"] == Change("conflicting", "install", None, "1-1")


def test_held_package_is_named() -> None:
    assert parsed("apt_downgrade_held").held == ("nvidia-smi",)
    assert "nvidia-smi is held and would be changed" in reasons(
        parsed("apt_downgrade_held"), profile("debian12-r535"), "driver"
    )


@pytest.mark.parametrize("name", [name for name in NAMES if parsed(name).changes])
def test_simulation_that_was_cut_is_not_believed(name: str) -> None:
    text = recorded(name)
    lines = text.splitlines(keepends=True)
    complete = parsed(name)
    for end in range(len(lines)):
        short = parse("RedHat" if name.startswith("dnf") else "Debian", "".join(lines[:end]))
        assert short.errors or counts(short) == counts(complete), end


def test_line_that_is_missing_in_the_middle_is_noticed() -> None:
    lines = recorded("apt_driver").splitlines()
    lines.remove(next(line for line in lines if line.startswith("Inst nvidia-smi ")))
    assert parse_apt("\n".join(lines)).errors == ("the simulation's summary says 74 to install, its lines 73",)
    lines = recorded("dnf_install").splitlines()
    lines.remove(next(line for line in lines if line.startswith(" dkms ")))
    assert parse_dnf("\n".join(lines)).errors == ("the simulation's summary says 8 to install, its lines 7",)


def test_row_that_goes_on_in_the_next_line() -> None:
    text = recorded("dnf_install")
    row = next(line for line in text.splitlines() if line.startswith(" a-package-with"))
    name, rest = row.split(maxsplit=1)
    wrapped = text.replace(row, f" {name}\n{' ' * 30}{rest}")
    assert parse_dnf(wrapped) == parse_dnf(text)
    assert parse_dnf(text).changes[0].name == name


def test_form_of_dnf_5() -> None:
    text = """Updating and loading repositories:
Repositories loaded.
Package             Arch   Version              Repository        Size
Upgrading:
 nvidia-driver-cuda x86_64 3:580.159.04-1.el10  nvidia-cuda    1.2 MiB
   replacing nvidia-driver-cuda x86_64 3:580.126.20-1.el10 nvidia-cuda 1.2 MiB
Installing dependencies:
 dkms               noarch 3.2.1-1.el10         epel         100.0 KiB

Transaction Summary:
 Installing:        1 package
 Upgrading:         1 package
 Replacing:         1 package

Operation aborted by the user.
"""
    transaction = parse_dnf(text)
    assert transaction.errors == ()
    assert [(change.name, change.action) for change in transaction.changes] == [
        ("nvidia-driver-cuda", "upgrade"),
        ("dkms", "install"),
    ]


def test_summary_of_apt_3() -> None:
    text = "Summary:\n  Upgrading: 1, Installing: 1, Removing: 0, Not Upgrading: 2\n"
    text += "Inst a [1] (2 x [all])\nInst b (1 x [all])\n"
    assert counts(parse_apt(text)) == {"install": 1, "upgrade": 1}
    assert parse_apt(text).errors == ()
    assert parse_apt(text.replace("Installing: 1", "Installing: 2")).errors


def test_wanted_set_is_allowed_with_what_is_nobodys() -> None:
    debian = profile("debian12-r535", rdma__flavour="none", rdma__packages={})
    driver_and_kernel = parsed("apt_driver")
    assert check(driver_and_kernel, debian, ["kernel", "driver"], {}) == []
    assert {"dkms", "gcc-12", "libelf1"} <= set(along(driver_and_kernel, debian))
    assert check(parsed("apt_cuda"), debian, ["cuda"], {}) == []


def test_package_of_another_step_is_refused() -> None:
    found = reasons(parsed("apt_driver"), profile("debian12-r535"), "driver")
    assert found
    assert all("which belongs to kernel" in reason for reason in found)
    assert any("would install linux-image-6.1.0-57-amd64 (6.1.192-3)" in reason for reason in found)


def test_enterprise_driver_may_not_bring_the_kernels_headers_along() -> None:
    wanted = {
        "kmod-nvidia-open-dkms": "580.126.20-*",
        "nvidia-driver-cuda": "580.126.20-*",
        "nvidia-persistenced": "580.126.20-*",
    }
    document = profile("el9-r580", driver__version="580.126.20", driver__packages=wanted, fabric_manager=None)
    document = for_kernel(document, "5.14.0-503.11.1.el9_5.x86_64")
    assert reasons(parsed("dnf_install"), document, "driver") == [
        "would install kernel-devel-matched (5.14.0-503.11.1.el9_5), which belongs to kernel"
    ]
    upgraded = parsed("dnf_upgrade")
    assert "would upgrade nvidia-driver-cuda (3:580.159.04-1.el9), and the profile wants 580.126.20-*" in reasons(
        upgraded, document, "driver"
    )
    newer = profile("el9-r580", fabric_manager=None)
    assert check(upgraded, newer, ["driver"], {}) == []


def test_solution_that_takes_parts_of_another_driver_is_refused() -> None:
    # What apt really proposes for three packages of the older set: the libraries go, those of R470 come.
    found = reasons(parsed("apt_downgrade_held"), profile("debian12-r535"), "driver")
    assert any("would install nvidia-tesla-470-alternative" in reason and "not of driver" in reason for reason in found)
    assert f"would remove libcuda1 ({NEW}), which the profile wants" in found


def test_whole_older_set_is_a_downgrade_that_is_allowed() -> None:
    document = profile("debian12-r535", driver__version="535.261.03")
    document["driver"]["packages"] = {
        name: OLD if version == NEW else version for name, version in document["driver"]["packages"].items()
    }
    found = reasons(parsed("apt_downgrade"), document, "driver", nvidia_persistenced=["535.171.04-1~deb12u1"])
    assert found == []


def test_wanted_package_that_would_not_come_is_missed() -> None:
    document = profile("debian12-r535")
    assert reasons(parsed("apt_nothing"), document, "cuda") == [
        "nvidia-cuda-toolkit 11.8.89~11.8.0-5~deb12u1 is wanted, nothing is installed, and nothing would change that"
    ]
    assert reasons(parsed("apt_nothing"), document, "cuda", nvidia_cuda_toolkit=["11.8.89~11.8.0-5~deb12u1"]) == []


def test_package_of_nobody_may_neither_go_nor_go_back() -> None:
    document = profile("debian12-r535", cuda=None)
    transaction = Transaction((Change("openssh-server", "remove", "1", None), Change("libc6", "downgrade", "2", "1")))
    assert reasons(transaction, document, "cuda") == [
        "would remove openssh-server (1), which belongs to no operation",
        "would downgrade libc6 (2 → 1), which belongs to no operation",
    ]


def test_profile_decides_whose_a_package_is() -> None:
    document = profile("debian12-r535")
    document["cuda"]["packages"]["dkms"] = None
    transaction = Transaction((Change("dkms", "install", None, "3"),))
    assert any("belongs to cuda" in reason for reason in reasons(transaction, document, "driver"))


@given(st.text(max_size=200))
def test_any_text_without_a_summary_is_refused(text: str) -> None:
    assert parse_apt(text).errors or "upgraded," in text or "Upgrading:" in text
    assert parse_dnf(text).errors or "Nothing to do." in text or "Operation aborted" in text


ALPHABET = "abcdefghijklmnopqrstuvwxyz0123456789+.-"
PACKAGE = st.tuples(st.sampled_from("abxyz"), st.text(ALPHABET, max_size=20)).map("".join)
VERSION = st.tuples(st.sampled_from("0123456789"), st.text("0123456789abc.~+", max_size=10)).map("".join)
MADE = st.lists(
    st.tuples(PACKAGE, st.sampled_from(("install", "change", "remove")), VERSION, VERSION),
    max_size=8,
    unique_by=lambda each: each[0],
)


@given(MADE)
def test_what_apt_prints_is_read_back(made: list[tuple[str, str, str, str]]) -> None:
    lines = []
    for name, kind, before, after in made:
        old = "" if kind == "install" else f" [{before}]"
        new = "" if kind == "remove" else f" ({after} Debian:12.15/oldstable, Debian:13.8/stable [amd64])"
        lines.append(f"{'Remv' if kind == 'remove' else 'Inst'} {name}{old}{new}")
        lines.append(f"Conf {name}{new}")
    read = parse_apt("\n".join(lines))
    number = counts(read)
    summary = (
        f"{number.get('upgrade', 0)} upgraded, {number.get('install', 0)} newly installed, "
        f"{number.get('reinstall', 0)} reinstalled, {number.get('downgrade', 0)} downgraded, "
        f"{number.get('remove', 0)} to remove and 7 not upgraded."
    )
    again = parse_apt("\n".join([summary, *lines]))
    assert again.errors == ()
    assert [change.name for change in again.changes] == [name for name, *_rest in made]
    for change, (_name, kind, before, after) in zip(again.changes, made):
        assert change.before == (None if kind == "install" else before)
        assert change.after == (None if kind == "remove" else after)


@given(MADE, st.integers(40, 120))
def test_what_dnf_prints_is_read_back(made: list[tuple[str, str, str, str]], width: int) -> None:
    headings = {"install": "Installing", "change": "Upgrading", "remove": "Removing unused dependencies"}
    words = {"install": "Install", "change": "Upgrade", "remove": "Remove"}
    lines = ["Dependencies resolved.", "=" * width, " Package  Arch  Version  Repository  Size", "=" * width]
    for kind, heading in headings.items():
        rows = [each for each in made if each[1] == kind]
        lines += [f"{heading}:"] if rows else []
        for name, _kind, before, after in rows:
            rest = f"x86_64  {before if kind == 'remove' else after}-1.el9  repo  1.0 k"
            row = f" {name}  {rest}"
            lines += [row] if len(row) <= width else [f" {name}", f"{' ' * 8}{rest}"]
    lines += ["", "Transaction Summary", "=" * width]
    for kind, word in words.items():
        number = sum(each[1] == kind for each in made)
        lines += [f"{word}  {number} Package{'s' if number > 1 else ''}"] if number else []
    lines += ["", "Operation aborted."]
    transaction = parse_dnf("\n".join(lines))
    assert transaction.errors == ()
    assert {change.name for change in transaction.changes} == {name for name, *_rest in made}


@given(st.sampled_from(NAMES), st.integers(0, 4000), st.text(max_size=3), st.sampled_from(OPERATIONS))
def test_damage_is_never_an_accident(name: str, place: int, junk: str, operation: str) -> None:
    text = recorded(name)
    document = profile("el9-r580" if name.startswith("dnf") else "debian12-r535")
    check(parse(document["os"]["family"], text[:place] + junk + text[place + 1 :]), document, [operation], {})
