# SPDX-License-Identifier: GPL-3.0-or-later
"""The module around the reader: check mode, diffs, idempotence, and what is asked of the operator."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from ansible_collections.ringmaster.inference.plugins.module_utils.file_tree import FileTree
from ansible_collections.ringmaster.inference.plugins.modules import gpu_ecc
from tests.support.nvml import Code, Library, a100, l40s

Run = Callable[..., dict[str, Any]]


class Cards(Library):
    """Cards whose ECC mode is kept in a file: each run of the module sets it in a process of its own."""

    def __init__(self, path: Path, *cards: dict[str, Any]) -> None:
        super().__init__(*cards)
        self.path = path

    def _set(self, what: str, handle: int, values: tuple[Any, ...]) -> None:
        super()._set(what, handle, values)
        self.path.write_text(f"{handle} {values[0]}\n")

    def after(self, reboot: bool = False) -> Cards:
        for line in self.path.read_text().splitlines():
            handle, value = (int(word) for word in line.split())
            current = value if reboot else self.cards[handle]["EccMode"][0]
            self.cards[handle]["EccMode"] = [current, value]
        return self


@pytest.fixture
def call(module_run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Run:
    def run(library: Library, state: str = "enabled", **arguments: Any) -> dict[str, Any]:
        monkeypatch.setattr(gpu_ecc, "find_library", lambda: library)
        monkeypatch.setattr(gpu_ecc, "FileTree", lambda _root: FileTree(str(tmp_path / "root")))
        return module_run(gpu_ecc.main, state=state, **arguments)

    return run


def test_off_then_on_then_rebooted(call: Run, tmp_path: Path) -> None:
    library = Cards(tmp_path / "set", a100(0, EccMode=[0, 0]), a100(1))
    would = call(library, _ansible_check_mode=True, _ansible_diff=True)
    assert (would["changed"], would["reboot_required"]) == (True, True)
    assert not library.path.exists()
    first = call(library, _ansible_diff=True)
    assert (first["changed"], first["reboot_required"]) == (True, True)
    assert first["diff"] == would["diff"]
    assert first["diff"]["before"] == {"0000:07:00.0": "disabled"}
    assert first["diff"]["after"] == {"0000:07:00.0": "enabled"}
    second = call(library.after(), _ansible_diff=True)
    assert (second["changed"], second["reboot_required"]) == (False, True)
    assert "diff" not in second
    rebooted = call(library.after(reboot=True))
    assert (rebooted["changed"], rebooted["reboot_required"]) == (False, False)


def test_no_diff_unless_asked(call: Run, tmp_path: Path) -> None:
    assert "diff" not in call(Cards(tmp_path / "set", l40s(0)), "disabled")


def test_cards_without_ecc(call: Run, tmp_path: Path) -> None:
    result = call(Library(l40s(0, EccMode=Code(3))))
    assert (result["changed"], result["reboot_required"], len(result["unsupported"])) == (False, False, 1)
    assert call(Library(l40s(0, EccMode=Code(3))), unsupported="fail")["failed"]


@pytest.mark.parametrize(
    ("library", "arguments", "says"),
    [
        (Library(a100(0)), {"state": "disabled"}, "does not support"),
        (Library(a100(0)), {"state": "off"}, "value of state must be one of"),
        (Library(init=Code(9)), {}, "modprobe"),
        (Library(a100(0, EccMode=[0, 0], **{"set EccMode": Code(4)})), {}, "become"),
    ],
)
def test_failures_say_what_to_do(call: Run, library: Library, arguments: dict[str, Any], says: str) -> None:
    result = call(library, **arguments)
    assert result["failed"]
    assert says in result["msg"]


def test_documentation_agrees_with_the_result(call: Run) -> None:
    documented = yaml.safe_load(gpu_ecc.RETURN)
    result = call(Library(l40s(0), l40s(1, EccMode=Code(3))))
    assert documented.keys() == result.keys() - {"changed", "invocation"}
    assert documented["gpus"]["contains"].keys() == result["gpus"][0].keys()
    assert documented["unsupported"]["contains"].keys() == result["unsupported"][0].keys()
