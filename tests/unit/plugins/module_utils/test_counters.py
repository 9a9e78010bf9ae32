# SPDX-License-Identifier: GPL-3.0-or-later
"""Counters against a baseline: a delta is what happened since, or is not told at all."""

from __future__ import annotations

import contextlib
import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ansible_collections.ringmaster.inference.plugins.module_utils import counters
from ansible_collections.ringmaster.inference.plugins.module_utils.counters import (
    Baseline,
    BaselineError,
    BaselineFile,
    Counted,
    growth,
    parse,
    take,
)

SLOT = "0000:07:00.0"
IDENTITY = {"vendor_id": "0x10de", "serial_number": None}


def baseline(values: dict[str, int], boot_id: str | None = "boot", **identity: str | None) -> Baseline:
    return Baseline("2026-03-01T12:00:00Z", boot_id, {SLOT: Counted({**IDENTITY, **identity}, values)})


def now(**values: int) -> Counted:
    return Counted(dict(IDENTITY), values)


def test_growth_of_each_counter() -> None:
    grown = growth(SLOT, now(RxErr=5, BadTLP=2), "boot", baseline({"RxErr": 3, "BadTLP": 2}))
    assert grown.deltas == {"RxErr": 2, "BadTLP": 0}
    assert grown.reason == ""


def test_a_counter_that_the_baseline_lacks_has_no_delta() -> None:
    grown = growth(SLOT, now(RxErr=5, New=2), "boot", baseline({"RxErr": 3, "Gone": 1}))
    assert grown.deltas == {"RxErr": 2, "New": None}
    assert grown.reason == ""


@pytest.mark.parametrize(
    ("before", "boot_id", "says"),
    [
        (None, "boot", "no baseline"),
        (Baseline("2026-03-01T12:00:00Z", "boot", {}), "boot", "was not there"),
        (baseline({"RxErr": 1}, boot_id="former"), "boot", "was booted since"),
        (baseline({"RxErr": 1}, boot_id=None), "boot", "not known whether the host was booted"),
        (baseline({"RxErr": 1}), None, "not known whether the host was booted"),
        (baseline({"RxErr": 1}, vendor_id="0x15b3"), "boot", "another device"),
        # One counter fell, so the other one started anew as well, though it does not show.
        (baseline({"RxErr": 1, "BadTLP": 4}), "boot", "BadTLP fell from 4 to 3"),
    ],
)
def test_no_delta_where_it_would_be_a_guess(before: Baseline | None, boot_id: str | None, says: str) -> None:
    grown = growth(SLOT, now(RxErr=5, BadTLP=3), boot_id, before)
    assert grown.deltas == {"RxErr": None, "BadTLP": None}
    assert says in grown.reason


def test_an_identity_that_is_not_known_on_one_side_does_not_tell_devices_apart() -> None:
    """The serial number can be read by root only; the baseline may have been taken by another user."""
    before = baseline({"RxErr": 1}, serial_number="b8-3f-d2-03-00-a1-b2-c4")
    assert growth(SLOT, now(RxErr=1), "boot", before).deltas == {"RxErr": 0}


counts = st.dictionaries(st.text(max_size=5), st.integers(0, 1 << 64), max_size=4)


@given(counts, counts)
def test_deltas_are_never_negative_and_name_what_is_counted_now(before: dict[str, int], after: dict[str, int]) -> None:
    grown = growth(SLOT, Counted({}, after), "boot", baseline(before))
    assert grown.deltas.keys() == after.keys()
    for name, delta in grown.deltas.items():
        assert delta is None or delta == after[name] - before[name] >= 0
    if any(after[name] < before.get(name, 0) for name in after):
        assert set(grown.deltas.values()) == {None}
        assert grown.reason


@given(st.dictionaries(st.text(max_size=5), counts, max_size=3), st.none() | st.text())
def test_a_baseline_is_read_as_it_was_written(
    tmp_path_factory: pytest.TempPathFactory, devices: dict[str, dict[str, int]], boot_id: str | None
) -> None:
    file = BaselineFile(str(tmp_path_factory.mktemp("pcie") / "baseline.json"))
    taken = take(boot_id, {name: Counted(dict(IDENTITY), values) for name, values in devices.items()})
    file.save(taken)
    assert file.load() == taken


def test_the_file_is_made_with_its_folders_and_for_its_owner_only(tmp_path: Path) -> None:
    path = tmp_path / "lib/pcie/baseline.json"
    file = BaselineFile(str(path))
    assert file.load() is None
    file.save(baseline({"RxErr": 1}))
    assert path.stat().st_mode & 0o777 == 0o600
    assert os.listdir(path.parent) == ["baseline.json"]
    assert json.loads(path.read_text())["schema"] == counters.SCHEMA


def test_a_full_disk_leaves_the_former_baseline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = BaselineFile(str(tmp_path / "baseline.json"))
    file.save(baseline({"RxErr": 1}))

    def full(_descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(BaselineError, match=r"Expected .* Found: .*No space left.* To do: "):
        file.save(baseline({"RxErr": 2}))
    assert file.load() == baseline({"RxErr": 1})
    assert os.listdir(tmp_path) == ["baseline.json"]


def test_a_path_that_can_not_hold_a_baseline(tmp_path: Path) -> None:
    with pytest.raises(BaselineError, match="absolute"):
        BaselineFile("baseline.json")
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").touch()
    for path in (tmp_path / "folder", tmp_path / "file/below"):
        with pytest.raises(BaselineError):
            BaselineFile(str(path)).save(baseline({}))
    with pytest.raises(BaselineError, match="not a regular file"):
        BaselineFile(str(tmp_path / "folder")).load()
    assert sorted(os.listdir(tmp_path)) == ["file", "folder"]


GOOD: dict[str, Any] = {
    "schema": 1,
    "taken_at": "2026-03-01T12:00:00Z",
    "boot_id": "boot",
    "devices": {SLOT: {"identity": {"vendor_id": "0x10de"}, "counters": {"RxErr": 1}}},
}


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"\xff\xfe",
        b"null",
        b"[]",
        b"[" * 100_000,
        json.dumps({**GOOD, "schema": 2}).encode(),
        json.dumps({**GOOD, "taken_at": None}).encode(),
        json.dumps({**GOOD, "boot_id": 1}).encode(),
        json.dumps({**GOOD, "devices": []}).encode(),
        json.dumps({**GOOD, "devices": {SLOT: None}}).encode(),
        json.dumps({**GOOD, "devices": {SLOT: {"identity": {}}}}).encode(),
        json.dumps({**GOOD, "devices": {SLOT: {"identity": {"vendor_id": 1}, "counters": {}}}}).encode(),
        json.dumps({**GOOD, "devices": {SLOT: {"identity": {}, "counters": {"RxErr": -1}}}}).encode(),
        json.dumps({**GOOD, "devices": {SLOT: {"identity": {}, "counters": {"RxErr": 1.5}}}}).encode(),
        json.dumps({**GOOD, "devices": {SLOT: {"identity": {}, "counters": {"RxErr": True}}}}).encode(),
        json.dumps({**GOOD, "devices": {SLOT: {"identity": {}, "counters": {"RxErr": float("nan")}}}}).encode(),
        json.dumps(GOOD).encode()[:-5],
    ],
)
def test_a_damaged_file_is_told_with_what_to_do(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "baseline.json").write_bytes(content)
    with pytest.raises(BaselineError, match=r"Expected a baseline of schema 1 .* Found: .+ To do: take a new one"):
        BaselineFile(str(tmp_path / "baseline.json")).load()


def test_the_good_document_of_the_damaged_ones_is_read() -> None:
    assert parse(GOOD).devices[SLOT].counters == {"RxErr": 1}


documents = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["schema", "devices", "taken_at", "identity", "counters", SLOT]), inner)
    ),
    max_leaves=10,
)


@given(documents)
def test_no_document_makes_the_parser_fail_otherwise(document: Any) -> None:
    for each in (document, {**GOOD, "devices": document}, {**GOOD, "devices": {SLOT: document}}):
        with contextlib.suppress(ValueError):
            parse(each)
