# SPDX-License-Identifier: GPL-3.0-or-later
"""The module around the reader: what it returns is what its documentation says."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from ansible_collections.ringmaster.inference.plugins.module_utils.file_tree import FileTree
from ansible_collections.ringmaster.inference.plugins.modules import host_tuning_info

Run = Callable[..., dict[str, Any]]


def assert_documented(found: Any, described: dict[str, Any], place: str = "") -> None:
    """Every key that is returned is described, and every described one is returned."""
    assert found.keys() == described.keys(), place
    for name, description in described.items():
        value = found[name][0] if isinstance(found[name], list) and found[name] else found[name]
        if "contains" in description and isinstance(value, dict):
            assert_documented(value, description["contains"], f"{place}.{name}")


def test_documentation_names_what_is_returned(module_run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_tuning_info, "FileTree", lambda: FileTree(str(tmp_path)))
    result = module_run(host_tuning_info.main)
    assert result.pop("changed") is False
    result.pop("invocation")
    assert_documented(result, yaml.safe_load(host_tuning_info.RETURN))


def test_this_machine_can_be_read_in_check_mode(module_run: Run) -> None:
    result = module_run(host_tuning_info.main, _ansible_check_mode=True)
    assert result["changed"] is False
    assert result["kernel"]["release"]
