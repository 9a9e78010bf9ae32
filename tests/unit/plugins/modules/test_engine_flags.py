# SPDX-License-Identifier: GPL-3.0-or-later
"""The module around the verdicts: arguments, results and failures as Ansible sees them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ansible_collections.ringmaster.inference.plugins.module_utils.engine_flags_catalogue import built_in
from ansible_collections.ringmaster.inference.plugins.module_utils.engine_flags_installed import (
    Installed,
    InstalledEngine,
    InstalledError,
)
from ansible_collections.ringmaster.inference.plugins.modules import engine_flags

Run = Callable[..., dict[str, Any]]


@pytest.fixture
def call(module_run: Run) -> Run:
    def run(**arguments: Any) -> dict[str, Any]:
        return module_run(engine_flags.main, **arguments)

    return run


def test_options_that_are_right(call: Run) -> None:
    result = call(version="0.32.0", options={"max-num-seqs": 256, "enforce-eager": False})
    assert not result["changed"]
    assert result["source"] == "catalogue"
    assert result["words"] == ["--no-enforce-eager", "--max-num-seqs", "256"]
    assert [verdict["flag"] for verdict in result["verdicts"]] == ["--enforce-eager", "--max-num-seqs"]
    assert result["refused"] == []
    assert result["msg"] == "vllm 0.32.0 takes all 2 things given."


def test_words_are_not_masked_for_what_a_variable_holds(call: Run) -> None:
    options = {"default-chat-template-kwargs": {"enable_thinking": False}, "max-num-batched-tokens": 16384}
    environment = {"TOKENIZERS_PARALLELISM": "false", "VLLM_MAX_TOKENS_PER_EXPERT_FP4_MOE": "16384", "KEY": "4"}
    result = call(version="0.32.0", options=options, environment=environment, refuse=False)
    assert result["words"] == [
        *("--default-chat-template-kwargs", '{"enable_thinking": false}', "--max-num-batched-tokens", "16384")
    ]


def test_one_message_for_all_that_is_refused(call: Run) -> None:
    arguments = {
        "version": "0.32.0",
        "options": {"kv-cache-dtype": "fp16", "num-scheduler-steps": 4},
        "environment": {"NCCL_IB_TIMEOUT": 60},
    }
    result = call(**arguments)
    assert result["failed"]
    assert result["refused"] == ["--kv-cache-dtype", "--num-scheduler-steps", "NCCL_IB_TIMEOUT"]
    assert "3 things refused" in result["msg"]
    told = call(**arguments, refuse=False)
    assert not told.get("failed")
    assert told["refused"] == result["refused"]
    assert told == call(**arguments, refuse=False, _ansible_check_mode=True)


@pytest.mark.parametrize("command", ["vllm serve m --seed 1", ["vllm", "serve", "m", "--seed", 1]])
def test_a_command_line_with_options_after_it(call: Run, command: Any) -> None:
    result = call(version="0.32.0", command_line=command, options={"max-num-seqs": 0}, refuse=False)
    assert [verdict["flag"] for verdict in result["verdicts"]] == ["model", "--seed", "--max-num-seqs"]
    assert result["refused"] == ["--max-num-seqs"]


def test_a_version_that_only_the_history_knows(call: Run) -> None:
    result = call(version="0.9.2", options={"num-scheduler-steps": 4})
    assert result["source"] == "history"
    assert not result["refused"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"version": "latest"}, "Expected a version"),
        ({"version": "0.32.0", "command_line": "vllm serve 'm"}, "Expected a command line"),
        ({"version": "0.32.0", "command_line": {"a": 1}}, "Expected command_line to be text or a list"),
        ({}, "one of the following is required"),
        ({"version": "0.32.0", "executable": "/opt/vllm"}, "mutually exclusive"),
        ({"executable": "/no/such/vllm"}, "To do: install the engine"),
        ({"version": "0.32.0", "engine": "other"}, "must be one of"),
    ],
)
def test_what_it_can_not_work_with(call: Run, arguments: dict[str, Any], message: str) -> None:
    result = call(**arguments)
    assert result["failed"]
    assert message in result["msg"]


@pytest.fixture
def program(tmp_path: Path) -> str:
    path = tmp_path / "python3"
    path.write_text("", encoding="utf-8")
    path.chmod(0o755)
    return str(path)


def answering(monkeypatch: pytest.MonkeyPatch, complaint: str | None, cached: bool = False) -> list[tuple[Any, bool]]:
    """Let every installed engine be 0.32.0; gives what it is asked."""
    asked: list[tuple[Any, bool]] = []
    catalogue = built_in("vllm", "0.32.0")
    assert catalogue is not None

    def ask(self: InstalledEngine, words: Any, keep: bool = True) -> Installed:
        asked.append((words, keep))
        return Installed(catalogue, complaint, cached)

    monkeypatch.setattr(InstalledEngine, "ask", ask)
    return asked


def test_the_installed_engine_is_asked(call: Run, monkeypatch: pytest.MonkeyPatch, program: str) -> None:
    asked = answering(monkeypatch, None, cached=True)
    result = call(executable=program, command_line="A=1 vllm serve m", options={"seed": 1})
    assert (result["source"], result["cached"], result["complaint"]) == ("installed", True, None)
    call(executable=program, options={"seed": 1}, _ansible_check_mode=True)
    assert asked == [(["m", "--seed", "1"], True), (["model", "--seed", "1"], False)]


def test_what_only_the_engines_own_parser_finds_is_refused(
    call: Run, monkeypatch: pytest.MonkeyPatch, program: str
) -> None:
    answering(monkeypatch, "argument --profiler-config: no such profiler, key s3cret-value")
    result = call(executable=program, options={"api-key": "s3cret-value", "profiler-config": {}}, accepted=["api-key"])
    assert result["failed"]
    assert result["refused"] == []
    assert "argument --profiler-config: no such profiler, key ***" in result["msg"]
    assert "s3cret" not in str(result)


def test_an_engine_that_can_not_be_asked(call: Run, monkeypatch: pytest.MonkeyPatch, program: str) -> None:
    def ask(self: InstalledEngine, words: Any, keep: bool = True) -> Installed:
        raise InstalledError("an engine", "s3cret-value", "mend it")

    monkeypatch.setattr(InstalledEngine, "ask", ask)
    result = call(executable=program, environment={"VLLM_API_KEY": "s3cret-value"})
    assert result["failed"]
    assert result["msg"] == "Expected an engine. Found ***. To do: mend it."
