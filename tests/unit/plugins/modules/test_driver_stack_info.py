# SPDX-License-Identifier: GPL-3.0-or-later
"""The module around the reader and the planner: what it returns is what its documentation says."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from ansible_collections.ringmaster.inference.plugins.module_utils.file_tree import FileTree
from ansible_collections.ringmaster.inference.plugins.modules import driver_stack_info
from tests.support.stack import profile
from tests.support.unknown import assert_every_null_has_a_reason

Run = Callable[..., dict[str, Any]]


def assert_documented(found: Any, described: dict[str, Any], place: str = "") -> None:
    """Every key that is returned is described, and every described one is returned."""
    assert found.keys() == described.keys(), place
    for name, description in described.items():
        if "contains" in description and found[name] is not None:
            assert_documented(found[name], description["contains"], f"{place}.{name}")


@pytest.mark.parametrize("wanted", [None, "debian12-r535", "el9-r580", "notes-centos7"])
def test_documentation_names_what_is_returned(
    module_run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wanted: str | None
) -> None:
    monkeypatch.setattr(driver_stack_info, "FileTree", lambda: FileTree(str(tmp_path)))
    arguments = {} if wanted is None else {"profile": profile(wanted)}
    result = module_run(driver_stack_info.main, **arguments)
    assert result.pop("changed") is False
    result.pop("invocation")
    assert_documented(result, yaml.safe_load(driver_stack_info.RETURN))
    assert_every_null_has_a_reason({name: value for name, value in result.items() if name != "plan"})
    assert (result["plan"] is None) == (wanted is None)


def test_this_machine_can_be_read_in_check_mode(module_run: Run) -> None:
    result = module_run(driver_stack_info.main, _ansible_check_mode=True, profile=profile("ubuntu2404-r580"))
    assert result["changed"] is False
    assert result["kernel"]["running"]
    assert result["plan"]["kernel"] == result["kernel"]["running"]


def test_profile_that_is_none_is_refused_with_every_problem(module_run: Run) -> None:
    result = module_run(driver_stack_info.main, profile={"schema": 1, "name": "x"})
    assert result["msg"].startswith("Expected a stack profile. Found: summary: is missing; os: is missing; ")
