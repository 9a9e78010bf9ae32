# SPDX-License-Identifier: GPL-3.0-or-later
"""The module around the step: what it asks for, what it says, and that what it returns is documented."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import yaml

from ansible_collections.ringmaster.inference.plugins.module_utils.stack_step import Outcome, Step, StepError
from ansible_collections.ringmaster.inference.plugins.modules import driver_stack_step
from tests.support.stack import profile

Run = Callable[..., dict[str, Any]]
DONE = Outcome(
    changed=True,
    packages=[{"name": "nvidia-smi", "action": "upgrade", "before": "1-1", "after": "2-1"}],
    files=["/etc/apt/preferences.d/ringmaster-driver"],
    holds=["nvidia-smi"],
    recovered=["dpkg left half done: nvidia-smi"],
)


def test_what_changed_is_told_in_lines_and_in_the_diff(module_run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Step, "present", lambda _step: DONE)
    result = module_run(
        driver_stack_step.main, profile=profile("debian12-r535"), operation="driver", _ansible_diff=True
    )
    assert result["lines"] == [
        "dpkg left half done: nvidia-smi, finished first",
        "upgrade nvidia-smi 1-1 → 2-1",
        "write /etc/apt/preferences.d/ringmaster-driver",
        "hold nvidia-smi",
    ]
    assert result["diff"]["after"].splitlines() == result["lines"]
    documented = set(yaml.safe_load(driver_stack_step.RETURN))
    assert set(result) - {"changed", "diff", "invocation"} == documented


@pytest.mark.parametrize("state", ["present", "mirrored"])
def test_a_profile_is_asked_for_where_it_is_needed(module_run: Run, state: str) -> None:
    assert "profile" in module_run(driver_stack_step.main, operation="driver", state=state)["msg"]


def test_what_is_no_profile_is_refused(module_run: Run) -> None:
    result = module_run(driver_stack_step.main, profile={"schema": 1}, operation="driver")
    assert result["msg"].startswith("Expected a stack profile. Found: ")


def test_failure_is_one_message(module_run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(_step: Step) -> Outcome:
        raise StepError("a", "b.", "c")

    monkeypatch.setattr(Step, "present", failing)
    result = module_run(driver_stack_step.main, profile=profile("el9-r580"), operation="cuda")
    assert (result["failed"], result["msg"]) == (True, "Expected a. Found b. To do: c.")
