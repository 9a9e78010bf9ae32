# SPDX-License-Identifier: GPL-3.0-or-later
"""Texts of repositories, pins and locks: read back by what reads them on a host."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ansible_collections.ringmaster.inference.plugins.module_utils import stack_settings as settings
from ansible_collections.ringmaster.inference.plugins.module_utils.driver_stack_formats import (
    locked,
    parse_pins,
    parse_versionlock,
)

NAMES = st.from_regex(r"[a-z][a-z0-9+.-]{0,20}[a-z0-9]", fullmatch=True)
VERSIONS = st.from_regex(r"([1-9]:)?[0-9]{1,3}(\.[0-9]{1,3}){0,3}-[0-9]{1,2}(\.el9)?", fullmatch=True)


@given(st.dictionaries(NAMES, VERSIONS, min_size=1, max_size=8))
def test_pins_are_read_as_they_were_meant(versions: dict[str, str]) -> None:
    text = settings.preferences(versions)
    assert settings.pinned(text) == versions
    assert {pin["packages"][0]: pin["pin"] for pin in parse_pins(text)} == {
        name: f"version {version}" for name, version in versions.items()
    }
    assert all(pin["priority"] == 1001 for pin in parse_pins(text))


def test_no_pins_are_no_file() -> None:
    assert settings.preferences({}) == ""
    assert settings.pinned("Package: *\nPin: release a=stable\nPin-Priority: 500\n") == {}


@given(
    st.dictionaries(NAMES, st.lists(VERSIONS, min_size=1, max_size=2, unique=True), min_size=1, max_size=5),
    st.sampled_from(["", "# by hand\nvim-2:9.0-1.*\n", "vim-2:9.0-1.*"]),
)
def test_locks_of_an_operation_come_and_go_and_leave_the_rest(versions: dict[str, list[str]], rest: str) -> None:
    text = settings.version_locks(rest, "driver", versions)
    assert {name: sorted(found) for name, found in settings.locked_by(text, "driver").items()} == {
        name: sorted(found) for name, found in versions.items()
    }
    assert set(locked(parse_versionlock(text), versions)) == set(versions)
    other = settings.version_locks(text, "kernel", {"kernel-core": ["5.14.0-1.el9"]})
    assert settings.locked_by(other, "driver") == settings.locked_by(text, "driver")
    assert settings.version_locks(other, "driver", versions) != ""
    both_gone = settings.version_locks(settings.version_locks(other, "driver", {}), "kernel", {})
    assert both_gone.rstrip("\n") == rest.rstrip("\n")


def test_locks_are_written_the_same_twice() -> None:
    once = settings.version_locks("", "driver", {"b": ["2-1"], "a": ["3:1-1", "3:2-1"]})
    assert settings.version_locks(once, "driver", {"a": ["3:2-1", "3:1-1"], "b": ["2-1"]}) == once


def test_locks_stay_in_their_place_beside_those_of_other_operations() -> None:
    both = settings.version_locks(settings.version_locks("", "kernel", {"a": ["1-1"]}), "driver", {"b": ["2-1"]})
    assert settings.version_locks(both, "kernel", {"a": ["1-1"]}) == both
    assert settings.version_locks(both, "kernel", {"a": ["2-1"]}) == both.replace("a-0:1-1", "a-0:2-1")
    twice = both + settings.version_locks("", "kernel", {"a": ["9-1"]})
    assert settings.version_locks(twice, "kernel", {"a": ["1-1"]}) == both


@pytest.mark.parametrize(
    ("key", "right"),
    [
        (b"-----BEGIN PGP PUBLIC KEY BLOCK-----\n", True),
        (b"\x99\x01\x0d\x04", True),  # old header, public key
        (b"\xc6\x33\x04", True),  # new header, public key
        (b"\x95\x01", False),  # a secret key
        (b"<html>not found</html>", False),
        (b"", False),
    ],
)
def test_what_is_no_key_is_told(key: bytes, right: bool) -> None:
    assert settings.is_key(key) is right


MENU = """
menuentry 'Debian GNU/Linux' --class debian $menuentry_id_option 'gnulinux-simple-uuid' {
\tlinux /vmlinuz-6.1.0-58-amd64
}
submenu 'Advanced options for Debian GNU/Linux' $menuentry_id_option 'gnulinux-advanced-uuid' {
\tmenuentry 'Debian, with Linux 6.1.0-58' --class os $menuentry_id_option 'gnulinux-6.1.0-58-amd64-advanced-uuid' {
\t\tlinux /vmlinuz-6.1.0-58-amd64
\t}
\tmenuentry 'Linux 6.1.0-57-amd64 (recovery)' $menuentry_id_option 'gnulinux-6.1.0-57-amd64-recovery-uuid' {
\t}
\tmenuentry 'Linux 6.1.0-57-amd64' --class os $menuentry_id_option 'gnulinux-6.1.0-57-amd64-advanced-uuid' {
\t}
}
menuentry 'Flat' $menuentry_id_option 'gnulinux-6.1.0-9-amd64-advanced-uuid' {
}
"""


@pytest.mark.parametrize(
    ("release", "entry"),
    [
        ("6.1.0-57-amd64", "gnulinux-advanced-uuid>gnulinux-6.1.0-57-amd64-advanced-uuid"),
        ("6.1.0-9-amd64", "gnulinux-6.1.0-9-amd64-advanced-uuid"),
        ("6.1.0-5", None),
        ("6.1.0-57-amd6.", None),
    ],
)
def test_entry_of_the_boot_menu(release: str, entry: str | None) -> None:
    assert settings.boot_entry(MENU, release) == entry
