# SPDX-License-Identifier: GPL-3.0-or-later
"""Order of versions, against examples of Debian Policy and rpm, and the laws that any order keeps."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ansible_collections.ringmaster.inference.plugins.module_utils.stack_versions import (
    FAMILIES,
    below,
    compare,
    fits,
    leading_numbers,
    numbers,
    upstream,
)

VERSIONS = st.text("019.~^+-:abZ_", min_size=0, max_size=8)


@pytest.mark.parametrize(
    ("family", "older", "newer"),
    [
        ("Debian", "1.0~rc1", "1.0"),
        ("Debian", "~~", "~"),
        ("Debian", "~", ""),
        ("Debian", "", "a"),
        ("Debian", "1.0", "1.0-0ubuntu1"),
        ("Debian", "1.0a", "1.0+"),
        ("Debian", "9", "1:0.1"),
        ("Debian", "535.261.03-1", "535.309.01-0+deb12u1"),
        ("Debian", "6.1.0-9", "6.1.0-57"),
        ("Debian", "12.4.131~12.4.1-2", "12.4.131-1"),
        ("RedHat", "1.0~rc1-1", "1.0-1"),
        ("RedHat", "1.0-1", "1.0^git1-1"),
        ("RedHat", "1.0^git1-1", "1.0.1-1"),
        ("RedHat", "1.0a-1", "1.0.1-1"),
        ("RedHat", "1.0-1.el9", "1.0-1.el9_5"),
        ("RedHat", "580.95.05-1.el9", "580.159.04-1.el9"),
        ("RedHat", "0:9-1", "3:1-1"),
    ],
)
def test_older_and_newer(family: str, older: str, newer: str) -> None:
    assert (compare(family, older, newer), compare(family, newer, older)) == (-1, 1)


@pytest.mark.parametrize(
    ("family", "first", "second"),
    [
        ("Debian", "1.0", "1.0-0"),
        ("Debian", "0:1.00", "1.0"),
        ("RedHat", "3:580.159.04-1.el9", "580.159.04-1.el9"),  # an epoch that only one names
        ("RedHat", "1.0-1", "1..0-1"),
        ("RedHat", "1.01-1", "1.1-1"),
    ],
)
def test_same(family: str, first: str, second: str) -> None:
    assert compare(family, first, second) == 0


@given(st.sampled_from(FAMILIES), VERSIONS, VERSIONS)
def test_order_is_antisymmetric(family: str, one: str, other: str) -> None:
    assert compare(family, one, other) == -compare(family, other, one)
    assert compare(family, one, one) == 0


@given(st.lists(VERSIONS, min_size=3, max_size=3))
def test_order_is_transitive(versions: list[str]) -> None:
    first, second, third = versions
    if compare("Debian", first, second) <= 0 and compare("Debian", second, third) <= 0:
        assert compare("Debian", first, third) <= 0


@pytest.mark.parametrize(
    ("family", "wanted", "installed", "fitting"),
    [
        ("Debian", None, "1-1", True),
        ("Debian", "580.159.04-*", "580.159.04-1ubuntu1", True),
        ("Debian", "580.159.04-*", "580.159.03-1ubuntu1", False),
        ("Debian", "580.159.0-*", "580.159.04-1", False),
        ("Debian", "1.0-1", "1.0-1+b1", False),
        ("RedHat", "580.159.04-*", "3:580.159.04-1.el9", True),
        ("RedHat", "580.159.04", "3:580.159.04-1.el9", True),
        ("RedHat", "580.159.04-1.el9", "3:580.159.04-1.el9", True),
        ("RedHat", "580.159.04-1.el9", "3:580.159.04-2.el9", False),
    ],
)
def test_installed_is_what_is_wanted(family: str, wanted: str | None, installed: str, fitting: bool) -> None:
    assert fits(family, wanted, installed) is fitting


def test_parts_of_versions() -> None:
    assert upstream("3:580.159.04-1.el9") == "580.159.04"
    assert upstream("2.22.3-1-1") == "2.22.3-1"
    assert upstream("1.2") == "1.2"
    assert numbers("535.129.03") == (535, 129, 3)
    assert numbers("535.129.03-1") is None
    assert numbers(None) is None
    assert leading_numbers("6.12.118+deb13-amd64") == (6, 12, 118)
    assert leading_numbers("x") is None


def test_below_fills_missing_numbers_with_zero() -> None:
    assert below("570", "570.26") is True
    assert below("570.26", "570.26.0") is False
    assert below("1.10", "1.9") is False
    assert below("unknown", "1") is None
    assert below("1", None) is None


@given(st.text(max_size=30))
def test_any_text_is_answered(text: str) -> None:
    upstream(text)
    leading_numbers(text)
    fits("RedHat", text, text)
    fits("Debian", text, "1-1")
