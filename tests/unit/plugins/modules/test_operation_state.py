# SPDX-License-Identifier: GPL-3.0-or-later
"""The module around the record: arguments, results, check mode and diffs as Ansible sees them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from ansible_collections.ringmaster.inference.plugins.modules import operation_state

Run = Callable[..., dict[str, Any]]


@pytest.fixture
def call(module_run: Run, tmp_path: Path) -> Run:
    def run(state: str, **arguments: Any) -> dict[str, Any]:
        directory = str(tmp_path / "operations")
        return module_run(operation_state.main, name="edge", state=state, directory=directory, **arguments)

    return run


def test_life_of_a_record(call: Run, tmp_path: Path) -> None:
    configuration = tmp_path / "haproxy.cfg"
    configuration.write_text("before\n", encoding="utf-8")
    configuration.chmod(0o644)
    wanted = {"measured": {"version": "absent"}, "files": [str(configuration)]}

    nothing = {"changed": False, "recorded": False, "measured": {}, "files": {}, "others": {}, "paths": []}
    assert call("read") == nothing | rest(call)
    would = call("recorded", _ansible_check_mode=True, **wanted)
    assert would["changed"]
    assert not call("read")["recorded"]

    first = call("recorded", **wanted)
    assert first["changed"]
    assert first["paths"] == [str(configuration)]
    assert first["files"][str(configuration)]["mode"] == "0644"
    second = call("recorded", measured={"version": "3.0"}, files=[str(configuration)])
    assert not second["changed"]
    assert second["measured"] == {"version": "absent"}
    assert second["recorded_at"] == first["recorded_at"]

    configuration.write_text("after\n", encoding="utf-8")
    assert call("restored", _ansible_check_mode=True)["changed"]
    assert configuration.read_text(encoding="utf-8") == "after\n"
    restored = call("restored")
    assert restored["changed"]
    assert restored["measured"] == {"version": "absent"}
    assert configuration.read_text(encoding="utf-8") == "before\n"
    assert not call("restored")["changed"]

    assert call("absent")["changed"]
    assert not call("absent")["changed"]
    assert not call("restored")["recorded"]


def rest(call: Run) -> dict[str, Any]:
    """What Ansible itself adds to each result."""
    return {"invocation": call("read")["invocation"]}


def test_reading_tells_what_others_measured(call: Run, module_run: Run, tmp_path: Path) -> None:
    directory = str(tmp_path / "operations")
    module_run(
        operation_state.main, name="vllm", state="recorded", directory=directory, measured={"python3-uvloop": "1"}
    )
    assert "others" not in call("recorded", measured={"version": "3.0"})
    assert call("read")["others"] == {"vllm": {"python3-uvloop": "1"}}


def test_diff_only_if_asked(call: Run) -> None:
    assert "diff" not in call("recorded", measured={}, files=["/etc/hostname"])
    call("absent")
    diff = call("recorded", measured={"a": 1}, files=["/etc/hostname"], _ansible_diff=True)["diff"]
    assert diff[0]["after"]["measured"] == {"a": 1}
    assert diff[0]["before"] == {}


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"state": "recorded"}, "measured"),
        ({"state": "gone"}, "value of state must be one of"),
        ({"state": "recorded", "measured": {}, "files": ["etc"]}, "Expected absolute paths"),
        ({"state": "recorded", "measured": "text"}, "measured"),
    ],
)
def test_wrong_arguments_say_what_is_expected(call: Run, arguments: dict[str, Any], says: str) -> None:
    result = call(**arguments)
    assert result["failed"]
    assert says in result["msg"]


def test_damaged_record_fails_with_what_to_do(call: Run, tmp_path: Path) -> None:
    call("recorded", measured={}, files=[])
    (tmp_path / "operations" / "edge" / "state.json").write_text("{", encoding="utf-8")
    result = call("restored")
    assert result["failed"]
    assert "Expected a record" in result["msg"]
    assert "To do: " in result["msg"]


def test_documentation_agrees_with_the_arguments() -> None:
    documented = yaml.safe_load(operation_state.DOCUMENTATION)
    assert documented["options"]["directory"]["default"] == operation_state.DEFAULT_DIRECTORY
