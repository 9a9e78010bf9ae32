# SPDX-License-Identifier: GPL-3.0-or-later
"""The module by itself: it works only for its action plugin, and its documentation is enough to use it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import yaml

from ansible_collections.ringmaster.inference.plugins.action import gpu_reset as action_plugin
from ansible_collections.ringmaster.inference.plugins.module_utils.gpu_reset import NEXT_STEPS
from ansible_collections.ringmaster.inference.plugins.module_utils.gpu_reset_sequence import RESULTS
from ansible_collections.ringmaster.inference.plugins.modules import gpu_reset
from tests.support.gpu_reset_world import UUID, World, run_task


def test_other_caller_is_refused(module_run: Callable[..., dict[str, Any]]) -> None:
    result = module_run(gpu_reset.main, uuid=UUID)
    assert result["failed"]
    assert "action plugin" in result["msg"]


def test_every_result_is_documented(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    documented = set(yaml.safe_load(gpu_reset.RETURN)) | {"changed", "failed", "msg", "diff"}
    for given in ({}, {"check": True}, {"reason": "", "uuid": "GPU-99999999-0000-0000-0000-000000000001"}):
        world = World(tmp_path_factory.mktemp("world"))
        result = run_task(world, monkeypatch, **given)  # type: ignore[arg-type]
        assert set(result) <= documented, set(result) - documented


def test_every_outcome_and_step_is_documented() -> None:
    documented = yaml.safe_load(gpu_reset.RETURN)
    text = " ".join(documented["outcome"]["description"])
    for outcome in (*RESULTS, "refused", "planned"):
        assert f"V({outcome})" in text
    text = " ".join(documented["next_step"]["description"])
    for step in NEXT_STEPS:
        assert f"V({step})" in text


def test_examples_use_options_that_exist() -> None:
    options = set(yaml.safe_load(gpu_reset.DOCUMENTATION)["options"]) - {"internal"}
    assert options == set(action_plugin.ARGUMENTS)
    for task in yaml.safe_load(gpu_reset.EXAMPLES):
        assert set(task.get("ringmaster.inference.gpu_reset", {})) <= options
