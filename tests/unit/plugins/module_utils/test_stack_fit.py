# SPDX-License-Identifier: GPL-3.0-or-later
"""The rules by which parts of a stack go together: each broken alone, and the shipped profiles."""

from __future__ import annotations

import datetime
from typing import Any

import pytest

from ansible_collections.ringmaster.inference.plugins.module_utils.stack_fit import (
    RULES,
    TOOLKIT_DRIVERS,
    judge,
    nearest,
    problems,
)
from ansible_collections.ringmaster.inference.plugins.module_utils.stack_profiles import validate
from tests.support.stack import NAMES, profile

TODAY = datetime.date(2026, 11, 30)
EVERY = [profile(name) for name in NAMES]


def broken(document: dict[str, Any], host: dict[str, Any] | None = None, today: datetime.date = TODAY) -> set[str]:
    return {problem["rule"] for problem in problems(validate(document), today, host or {})}


def cards(*architectures: str, nvswitches: int = 0) -> dict[str, Any]:
    return {
        "hardware": {
            "cards": [{"architecture": architecture} for architecture in architectures],
            "nvswitches": nvswitches,
        }
    }


@pytest.mark.parametrize(
    ("name", "rules"),
    [
        ("debian12-r535", {"os_security_support_ended", "gpudirect_rdma_unavailable", "driver_branch_ended"}),
        ("debian13-r550", set()),
        ("ubuntu2204-r580", set()),
        ("ubuntu2404-r580", set()),
        ("el9-r580", set()),
    ],
)
def test_shipped_profile_goes_together(name: str, rules: set[str]) -> None:
    assert broken(profile(name)) == rules
    assert not judge(profile(name), EVERY, TODAY, cards("ampere", "ada"))["refused"]


def test_stack_of_the_notes_is_refused_with_every_reason_and_the_nearest_profile() -> None:
    verdict = judge(validate(profile("notes-centos7")), EVERY, TODAY, {})
    refusals = [problem["rule"] for problem in verdict["problems"] if problem["severity"] == "refuse"]
    assert verdict["refused"]
    assert set(refusals) == {
        "os_support_ended",
        "glibc_too_old",
        "kernel_not_of_os",
        "headers_missing",
        "rdma_incomplete",
        "rdma_no_such_build",
        "nccl_no_such_build",
    }
    assert verdict["nearest"] == "el9-r580"
    assert verdict["message"].startswith("Stack profile notes-centos7 is refused.\n- support of CentOS 7 ended on")
    assert verdict["message"].endswith("Nearest supported profile: el9-r580.")
    # The driver alone would do for this CUDA: the notes are wrong in what they say of it, not in the pair.
    assert "driver_below_cuda_minimum" not in refusals


@pytest.mark.parametrize(
    ("name", "changes", "rule"),
    [
        ("debian12-r535", {"cuda__version": "13.0"}, "driver_below_cuda_minimum"),
        ("debian12-r535", {"cuda__version": "12.4"}, "driver_below_toolkit"),
        ("debian12-r535", {"cuda__version": "14.0"}, "cuda_not_known"),
        ("el9-r580", {"cuda": None, "nccl__cuda": "14.1"}, "cuda_not_known"),
        ("debian13-r550", {"nccl__cuda": "12.5"}, "nccl_other_cuda"),
        ("debian13-r550", {"nccl__version": "2.14.3"}, "nccl_no_such_build"),
        ("el9-r580", {"fabric_manager__version": "580.126.20"}, "fabric_manager_other_version"),
        ("debian12-r535", {"kernel__headers": None}, "headers_missing"),
        ("debian12-r535", {"kernel__headers__release": "6.1.0-56-amd64"}, "headers_other_kernel"),
        (
            "debian12-r535",
            {"kernel__headers__packages": {"linux-headers-6.1.0-56-amd64": None}},
            "headers_other_kernel",
        ),
        (
            "debian12-r535",
            {"kernel__headers__packages": {"linux-headers-6.1.0-57-amd64": "6.1.176-1"}},
            "headers_other_kernel",
        ),
        ("debian12-r535", {"kernel__release": "6.18.1-amd64"}, "kernel_not_of_os"),
        ("debian12-r535", {"driver__newest_kernel": "6.0"}, "kernel_newer_than_driver"),
        ("debian12-r535", {"driver__packages": {"nvidia-smi": "535.261.03-1"}}, "package_other_version"),
        ("debian13-r550", {"nccl__packages": {"libnccl2": "2.21.5-1"}}, "package_other_version"),
        ("el9-r580", {"nccl__packages": {"libnccl": "2.28.9-1+cuda12.9"}}, "package_other_version"),
        ("el9-r580", {"cuda__packages": {"cuda-toolkit-13-0": "12.9.1-*"}}, "package_other_version"),
        ("el9-r580", {"fabric_manager__packages": {"nvidia-fabricmanager": "580.1.1-1"}}, "package_other_version"),
        (
            "el9-r580",
            {"driver__branch": 620, "driver__version": "620.1", "driver__modules": "proprietary"},
            "proprietary_modules_new_branch",
        ),
        ("el9-r580", {"driver__branch": 510, "driver__version": "510.47.03"}, "open_modules_old_branch"),
        ("el9-r580", {"os__glibc": "2.27"}, "glibc_too_old"),
        ("el9-r580", {"rdma__flavour": "doca_ofed"}, "rdma_incomplete"),
        ("el9-r580", {"rdma__flavour": "mlnx_ofed", "rdma__version": "25.01-0.6.0"}, "rdma_no_such_build"),
        ("el9-r580", {"rdma__flavour": "mlnx_ofed", "rdma__version": "24.10-0.7.0.0"}, "rdma_mlnx_ofed_ended"),
        ("el9-r580", {"kernel__release": "5.10.0-1.el9.x86_64"}, "gpudirect_rdma_unavailable"),
    ],
)
def test_part_that_does_not_fit(name: str, changes: dict[str, Any], rule: str) -> None:
    assert rule not in broken(profile(name))
    assert rule in broken(profile(name, **changes))


def test_packages_with_versions_of_their_own_are_no_mismatch() -> None:
    document = profile("debian13-r550")
    document["driver"]["packages"].update({"nvidia-modprobe": "570.133.07-1", "dkms": "3.2.2-1~deb13u1"})
    assert "package_other_version" not in broken(document)


def test_common_headers_belong_to_every_flavour() -> None:
    document = profile("debian12-r535")
    document["kernel"]["headers"]["packages"]["linux-headers-6.1.0-57-common"] = "6.1.192-3"
    assert "headers_other_kernel" not in broken(document)


@pytest.mark.parametrize(
    ("name", "changes", "host", "rule"),
    [
        ("el9-r580", {}, cards("before_turing", "ampere"), "modules_and_cards"),
        ("debian12-r535", {}, cards("blackwell"), "modules_and_cards"),
        ("debian12-r535", {}, cards("ampere", nvswitches=6), "fabric_manager_missing"),
        ("el9-r580", {"driver__branch": 595, "driver__version": "595.1"}, cards("before_turing"), "branch_and_cards"),
        ("el9-r580", {"driver__branch": 520, "driver__version": "520.1"}, cards("ada"), "branch_and_cards"),
        ("el9-r580", {}, {"os": {"family": "Debian"}}, "other_os"),
        ("el9-r580", {}, {"os": {"family": "RedHat", "distribution": "Rocky", "version": "8.10"}}, "other_os"),
        ("ubuntu2404-r580", {}, {"os": {"family": "Debian", "distribution": "Debian"}}, "other_os"),
        ("el9-r580", {}, {"os": {"architecture": "aarch64"}}, "other_architecture"),
        ("el9-r580", {}, {"secure_boot": {"enabled": True, "key_enrolled": False}}, "secure_boot_unsigned"),
        ("el9-r580", {}, {"secure_boot": {"enabled": True, "key_enrolled": None}}, "secure_boot_unsigned"),
        ("el9-r580", {}, {"secure_boot": {"enabled": None}}, "secure_boot_unknown"),
    ],
)
def test_profile_that_does_not_fit_the_host(
    name: str, changes: dict[str, Any], host: dict[str, Any], rule: str
) -> None:
    document = profile(name, **changes)
    assert rule not in broken(document)
    assert rule in broken(document, host)


@pytest.mark.parametrize(
    "host",
    [
        {},
        cards("ampere", "ada"),
        {"hardware": {"cards": None, "nvswitches": None}},
        {"hardware": None, "os": None, "secure_boot": None},
        {"os": {"family": "RedHat", "distribution": "AlmaLinux", "version": "9.5", "architecture": "x86_64"}},
        {"secure_boot": {"enabled": True, "key_enrolled": True}},
        {"secure_boot": {"enabled": False, "key_enrolled": None}},
    ],
)
def test_host_that_fits_or_is_not_known(host: dict[str, Any]) -> None:
    assert broken(profile("el9-r580"), host) == set()


def test_secure_boot_names_the_ways_out() -> None:
    host = {"secure_boot": {"enabled": True, "key_enrolled": None, "unknown": {"key_enrolled": "no mokutil"}}}
    verdict = judge(profile("el9-r580"), EVERY, TODAY, host)
    assert verdict["refused"]
    assert "no mokutil" in verdict["message"]
    assert "mokutil --import" in verdict["message"]
    assert "modules that are signed" in verdict["message"]
    assert not judge(profile("el9-r580", driver__signed=True, driver__build="prebuilt"), EVERY, TODAY, host)["refused"]


@pytest.mark.parametrize(
    ("day", "rules"),
    [
        ("2026-06-30", set()),
        ("2026-07-01", {"driver_branch_ended"}),
        ("2026-07-12", {"driver_branch_ended", "os_security_support_ended"}),
        ("2028-06-30", {"driver_branch_ended", "os_security_support_ended"}),
        ("2028-07-01", {"driver_branch_ended", "os_support_ended"}),
    ],
)
def test_support_ends_with_its_last_day(day: str, rules: set[str]) -> None:
    found = broken(profile("debian12-r535"), today=datetime.date.fromisoformat(day))
    assert found - {"gpudirect_rdma_unavailable"} == rules


def test_nearest_profile_is_supported_itself() -> None:
    late = datetime.date(2028, 7, 15)
    assert nearest(profile("debian12-r535"), EVERY, late, {}) == "debian13-r550"
    assert nearest(profile("ubuntu2204-r580"), EVERY, late, {}) == "ubuntu2404-r580"
    assert nearest(profile("debian12-r535"), EVERY, datetime.date(2040, 1, 1), {}) is None
    assert nearest(profile("debian12-r535"), [profile("debian12-r535")], TODAY, {}) is None
    # A host decides, too: nothing for another system is near.
    assert nearest(profile("notes-centos7"), EVERY, TODAY, {"os": {"family": "RedHat", "version": "7.9"}}) is None


def test_message_without_a_supported_profile() -> None:
    verdict = judge(profile("notes-centos7"), [], TODAY, {})
    assert verdict["nearest"] is None
    assert verdict["message"].endswith("No profile at hand is supported.")


def test_table_of_rules_is_whole() -> None:
    assert len({rule.name for rule in RULES}) == len(RULES)
    for rule in RULES:
        assert rule.severity in ("refuse", "warn")
        assert rule.to_do
        assert rule.source
    assert all(len(version.split(".")) == 2 for version in TOOLKIT_DRIVERS)
