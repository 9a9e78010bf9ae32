# SPDX-License-Identifier: GPL-3.0-or-later
"""The record of changes: what it says to go back to, and what a damaged one says."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ansible_collections.ringmaster.inference.plugins.module_utils.stack_generations import (
    APPLIED,
    CONFIRMED,
    OPEN,
    Entry,
    Generations,
    GenerationsError,
)


def record(folder: Path, *changes: list[tuple[str, str | None, str | None]]) -> Generations:
    generations = Generations("driver", str(folder))
    for entries in changes:
        generation = generations.begin("p")
        generation.entries = [Entry(name, before, after, f"{name}_{before}.deb") for name, before, after in entries]
        generation.state = CONFIRMED
    return generations


def target(generations: Generations, first: bool) -> set[tuple[str, str | None, str | None]]:
    return {(entry.name, entry.before, entry.after) for entry in generations.target(first)}


def test_back_to_the_last_and_to_the_first(tmp_path: Path) -> None:
    generations = record(
        tmp_path, [("a", None, "1"), ("b", "1", "2")], [("a", "1", "2"), ("b", "2", "3")], [("a", "2", "1")]
    )
    assert target(generations, first=False) == {("a", "2", "1")}
    assert target(generations, first=True) == {("a", None, "1"), ("b", "1", "3")}
    assert {entry.file for entry in generations.target(True) if entry.name == "b"} == {"b_1.deb"}


def test_what_is_as_at_first_needs_no_way_back(tmp_path: Path) -> None:
    assert target(record(tmp_path, [("a", "1", "2")], [("a", "2", "1")]), first=True) == set()


def test_kernels_that_stand_beside_each_other_go_each(tmp_path: Path) -> None:
    generations = record(tmp_path, [("kernel-core", None, "1")], [("kernel-core", None, "2")])
    assert target(generations, first=True) == {("kernel-core", None, "1"), ("kernel-core", None, "2")}


def test_change_by_another_hand_in_between_does_not_hide_the_beginning(tmp_path: Path) -> None:
    generations = record(tmp_path, [("a", "1", "2")], [("a", "7", "8")])
    assert {(entry.name, entry.before) for entry in generations.target(True)} == {("a", "1")}


def test_a_change_that_was_cut_goes_on(tmp_path: Path) -> None:
    generations = record(tmp_path, [("a", None, "1")])
    generation = generations.begin("q")
    assert (generation.number, generation.state) == (2, OPEN)
    generations.save()
    again = Generations("driver", str(tmp_path))
    assert again.begin("other").number == 2
    again.begin("other").state = APPLIED
    assert again.begin("next").number == 3


def test_record_is_kept_and_files_that_nobody_names_go(tmp_path: Path) -> None:
    generations = record(tmp_path, [("a", "1", "2")])
    generations.save()
    for name in ("a_1.deb", "a_2.deb", "old.deb"):
        (Path(generations.files) / name).write_text("x")
    generations.prune(["a_2.deb"])
    assert sorted(path.name for path in Path(generations.files).iterdir()) == ["a_1.deb", "a_2.deb"]
    assert Generations("driver", str(tmp_path)).generations == generations.generations
    assert Generations("kernel", str(tmp_path)).others() == ["driver"]
    generations.remove()
    assert not tmp_path.exists()


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", "\x00\xff", json.dumps({"schema": 2}), json.dumps({"schema": 1, "generations": [{"number": 1}]})],
)
def test_damaged_record_is_no_empty_one(tmp_path: Path, text: str) -> None:
    (tmp_path / "driver").mkdir()
    (tmp_path / "driver" / "generations.json").write_text(text, encoding="latin-1")
    with pytest.raises(GenerationsError, match=r"generations\.json"):
        Generations("driver", str(tmp_path))
