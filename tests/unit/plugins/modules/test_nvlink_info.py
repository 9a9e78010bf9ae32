# SPDX-License-Identifier: GPL-3.0-or-later
"""The module around the readers: arguments, results and failures as Ansible sees them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import yaml

from ansible_collections.ringmaster.inference.plugins.module_utils.file_tree import FileTree
from ansible_collections.ringmaster.inference.plugins.modules import nvlink_info
from tests.support.nvml import Code, Library, a100, l40s

Run = Callable[..., dict[str, Any]]


@pytest.fixture
def call(module_run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> Run:
    def run(library: Library, **arguments: Any) -> dict[str, Any]:
        monkeypatch.setattr(nvlink_info, "find_library", lambda: library)
        monkeypatch.setattr(nvlink_info, "FileTree", lambda _root: FileTree(str(tmp_path)))
        return module_run(nvlink_info.main, **arguments)

    return run


def test_one_answer_for_all_cards(call: Run) -> None:
    right, wrong, unknown = a100(0), a100(1, NvLinkState={(link,): int(link != 4) for link in range(12)}), l40s(2)
    unknown["Name"] = "NVIDIA Z900"
    assert call(Library(right))["as_expected"] is True
    assert call(Library(right, unknown))["as_expected"] is None
    result = call(Library(right, unknown, wrong), _ansible_check_mode=True)
    assert result["as_expected"] is False
    assert result["deviations"] == ["0000:0f:00.0: link 4 is inactive, expected active"]
    assert result["changed"] is False
    assert call(Library(right, unknown, wrong), gpus=["0"])["as_expected"] is True


def test_failures_say_what_to_do(call: Run) -> None:
    assert "modprobe" in call(Library(init=Code(9)))["msg"]
    assert "Expected a card 5" in call(Library(a100(0)), gpus=["5"])["msg"]


def test_documentation_agrees_with_the_result(call: Run) -> None:
    documented = yaml.safe_load(nvlink_info.RETURN)
    result = call(Library(a100(0)))
    assert documented.keys() == result.keys() - {"changed", "invocation"}
    card = documented["gpus"]["contains"]
    assert card.keys() == result["gpus"][0].keys()
    assert card["links"]["contains"].keys() == result["gpus"][0]["links"][0].keys()
    assert card["expected"]["contains"].keys() == result["gpus"][0]["expected"].keys()
