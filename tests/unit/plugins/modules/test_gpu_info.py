# SPDX-License-Identifier: GPL-3.0-or-later
"""The module around the readers: arguments, results and failures as Ansible sees them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import yaml

from ansible_collections.ringmaster.inference.plugins.module_utils.file_tree import FileTree
from ansible_collections.ringmaster.inference.plugins.module_utils.gpu import IDENTITY, READINGS
from ansible_collections.ringmaster.inference.plugins.module_utils.nvml import NvmlUnavailableError
from ansible_collections.ringmaster.inference.plugins.modules import gpu_info
from tests.support.nvml import Code, Library, a100

Run = Callable[..., dict[str, Any]]


@pytest.fixture
def call(module_run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> Run:
    def run(library: Library, **arguments: Any) -> dict[str, Any]:
        monkeypatch.setattr(gpu_info, "find_library", lambda: library)
        monkeypatch.setattr(gpu_info, "FileTree", lambda _root: FileTree(str(tmp_path)))
        return module_run(gpu_info.main, **arguments)

    return run


@pytest.mark.parametrize("check", [False, True])
def test_cards_with_verdicts(call: Run, check: bool) -> None:
    library = Library(a100(0), a100(1, RemappedRows=(0, 1, 1, 0)), a100(2, RemappedRows=(0, 9, 0, 1)))
    result = call(library, _ansible_check_mode=check)
    assert result["changed"] is False
    assert [card["verdict"] for card in result["gpus"]] == ["ok", "watch", "replace"]
    assert result["worst"] == "replace"
    assert result["driver_version"] == "580.95.05"
    assert result["gpus"][1]["reasons"][0]["source"] == "XID 63"


def test_some_cards(call: Run) -> None:
    result = call(Library(a100(0), a100(1), a100(2)), gpus=["2", "0f:00.0"])
    assert [card["index"] for card in result["gpus"]] == [1, 2]
    assert result["worst"] == "ok"


def test_a_host_without_cards(call: Run) -> None:
    result = call(Library())
    assert (result["gpus"], result["worst"]) == ([], "ok")


@pytest.mark.parametrize(
    ("library", "arguments", "says"),
    [
        (Library(init=Code(9)), {}, "modprobe nvidia"),
        (Library(init=Code(12)), {}, "libnvidia-ml"),
        (Library(a100(0)), {"gpus": ["7"]}, "Expected a card 7"),
        (Library(a100(0)), {"timeout": 0}, "time limit"),
        (Library(a100(0)), {"timeout": "soon"}, "timeout"),
        (Library(a100(0)), {"root": "/tmp"}, "Unsupported parameters"),
    ],
)
def test_failures_say_what_to_do(call: Run, library: Library, arguments: dict[str, Any], says: str) -> None:
    result = call(library, **arguments)
    assert result["failed"]
    assert says in result["msg"]


def test_a_missing_library_is_a_failure_and_no_traceback(module_run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def none() -> None:
        raise NvmlUnavailableError("nvidia-ml-py", "none", "install it")

    monkeypatch.setattr(gpu_info, "find_library", none)
    assert module_run(gpu_info.main)["msg"] == "Expected nvidia-ml-py. Found none. To do: install it."


def test_documentation_agrees_with_the_result(call: Run) -> None:
    documented = yaml.safe_load(gpu_info.RETURN)
    result = call(Library(a100(0)))
    assert documented.keys() == result.keys() - {"changed", "invocation"}
    assert documented["gpus"]["contains"].keys() == result["gpus"][0].keys()
    assert documented["gpus"]["contains"].keys() >= {*IDENTITY, *READINGS}
