# SPDX-License-Identifier: GPL-3.0-or-later
"""Stack profiles: the shipped ones are right, and what is wrong with another is said at once and exactly."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ansible_collections.ringmaster.inference.plugins.module_utils.stack_profiles import (
    ProfileError,
    for_kernel,
    overridden,
    packages,
    parse_date,
    validate,
)
from tests.support.stack import NAMES, profile


def complaints(document: Any) -> list[str]:
    with pytest.raises(ProfileError) as raised:
        validate(document)
    return raised.value.problems


def test_profiles_of_the_issue_are_shipped() -> None:
    assert NAMES == [
        "debian12-r535",
        "debian13-r550",
        "el9-r580",
        "notes-centos7",
        "ubuntu2204-r580",
        "ubuntu2404-r580",
    ]


@pytest.mark.parametrize("name", NAMES)
def test_shipped_profile_is_one(name: str) -> None:
    assert validate(profile(name)) == profile(name)
    assert profile(name)["name"] == name


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"driver__version": "550.1"}, "driver.version: expected a version of branch 535, found 550.1"),
        ({"driver__version": 535.3}, "driver.version: expected a version of numbers and dots in quotes, found 535.3"),
        ({"driver__branch": "535"}, "driver.branch: expected a number like 580, found '535'"),
        ({"driver__branch": True}, "driver.branch: expected a number like 580, found True"),
        ({"driver__modules": "opne"}, "driver.modules: expected one of open, proprietary, found 'opne'"),
        ({"schema": 2}, "schema: expected 1, found 2"),
        ({"schema": True}, "schema: expected 1, found True"),
        ({"os__support_ends": "2028-02-30"}, 'os.support_ends: expected a date in quotes, "2028-06-30", or null'),
        ({"os__architectures": []}, "os.architectures: expected a list of 1 or more, found []"),
        ({"os__support_ends": None}, "os.support_ends: is null, and unknown does not say why"),
        ({"cuda__packages": {"x": 12.4}}, "cuda.packages: expected a mapping of package name to version"),
        ({"cuda__packages": {"a b": None}}, "'a b' is no package's name"),
        ({"cuda__packages": {"x": "1 --force"}}, "the version of x must be text"),
        ({"cuda__packages": {"nvidia-smi": None}}, "cuda: package nvidia-smi is already in driver"),
        ({"kernel": None}, "kernel: expected a mapping, found None"),
        ({"repositories": [{"name": "x"}]}, "repositories[0].url: is missing"),
        ({"unknown": {"x": ""}}, "unknown: expected a mapping of field to the reason why it is null"),
    ],
)
def test_wrong_field_is_named_with_what_was_expected(changes: dict[str, Any], complaint: str) -> None:
    assert any(complaint in problem for problem in complaints(profile("debian12-r535", **changes)))


def test_every_problem_is_told_at_once_and_a_near_name_is_suggested() -> None:
    document = profile("debian12-r535", driver__versoin="1", os__glibc=2.36)
    del document["rdma"]
    assert complaints(document) == [
        "os.glibc: expected a version of numbers and dots in quotes, or null, found 2.36",
        "rdma: is missing",
        "driver: 'versoin' is no field (did you mean version?)",
    ]


def test_repository_of_the_other_family_is_refused() -> None:
    document = profile("el9-r580")
    document["repositories"].append({"name": "epel", "type": "deb", "url": "https://x/y", "key": "/k"})
    assert complaints(document) == [
        "repositories[1].name: epel is there twice",
        "repositories[2].type: expected rpm for RedHat",
        "repositories[2].suites: is missing",
        "repositories[2].name: epel is there twice",
    ]


def test_archive_of_the_distribution_has_no_address_where_apt_finds_it() -> None:
    accepted = validate(profile("debian12-r535"))
    assert [repository["url"] for repository in accepted["repositories"]] == [None, None]
    other = profile("el9-r580")
    other["repositories"][1]["url"] = None
    assert complaints(other) == [
        "repositories[1].url: expected an address; null stands for suites of apt's sources only"
    ]


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(max_size=5),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
        max_leaves=8,
    )
)
def test_anything_else_is_refused_and_never_an_accident(document: Any) -> None:
    assert complaints(document)


@given(
    st.sampled_from(sorted({*profile("debian13-r550")} - {"schema", "name", "summary", "repositories"})),
    st.none() | st.integers() | st.text(max_size=4) | st.just([]),
)
def test_section_replaced_by_something_else_is_complained_about(section: str, value: Any) -> None:
    document = profile("debian13-r550", **{section: value})
    if value is None and section in ("cuda", "nccl", "fabric_manager"):
        assert validate(document)[section] is None
    else:
        assert any(section in problem for problem in complaints(document))


def test_validated_profile_is_a_copy() -> None:
    document = profile("debian12-r535")
    validate(document)["driver"]["packages"].clear()
    assert document == profile("debian12-r535")


def test_kernel_of_the_host_is_filled_in() -> None:
    ubuntu = for_kernel(profile("ubuntu2404-r580"), "6.8.0-52-generic")
    assert packages(ubuntu, "kernel") == {
        "linux-image-6.8.0-52-generic": None,
        "linux-modules-6.8.0-52-generic": None,
        "linux-headers-6.8.0-52-generic": None,
    }
    enterprise = for_kernel(profile("el9-r580"), "5.14.0-503.11.1.el9_5.x86_64")
    assert packages(enterprise, "kernel")["kernel-core"] == "5.14.0-503.11.1.el9_5"
    assert enterprise["kernel"]["headers"]["release"] == "5.14.0-503.11.1.el9_5.x86_64"


def test_kernel_of_the_profile_stays() -> None:
    assert for_kernel(profile("debian12-r535"), "6.12.1-cloud") == profile("debian12-r535")


def test_packages_of_fabric_manager_are_the_drivers() -> None:
    assert "nvidia-fabricmanager" in packages(profile("el9-r580"), "driver")
    assert packages(profile("debian12-r535"), "nccl") == {}


def test_overrides_join_mappings_and_replace_the_rest() -> None:
    before = profile("debian12-r535")
    kept = copy.deepcopy(before)
    after = overridden(
        before,
        {
            "driver": {"packages": {"nvidia-smi": "1", "libcuda1": "absent"}},
            "os": {"architectures": ["aarch64"]},
            "cuda": None,
            "fabric_manager": {"version": "1", "packages": {}},
        },
    )
    assert before == kept
    assert after["driver"]["packages"]["nvidia-smi"] == "1"
    assert "libcuda1" not in after["driver"]["packages"]
    assert after["driver"]["branch"] == 535
    assert after["os"]["architectures"] == ["aarch64"]
    assert after["cuda"] is None
    assert after["fabric_manager"] == {"version": "1", "packages": {}}


@pytest.mark.parametrize("text", ["2028-6-30", "2028-06-31", "20280630", "", None, 20280630, "２０２８-06-30"])
def test_what_is_no_date(text: Any) -> None:
    assert parse_date(text) is None
