# SPDX-License-Identifier: GPL-3.0-or-later
"""What role vllm makes of an engine's entry: its command line, its environment, and where its weights lie."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from ansible.parsing.dataloader import DataLoader
from ansible.template import Templar, trust_as_template

from tests.support.templates import trusted

ROLE = Path(__file__).resolve().parents[4] / "roles" / "vllm"


def load(path: str) -> Any:
    return yaml.safe_load((ROLE / path).read_text(encoding="utf-8"))


def known(item: dict[str, Any], engine: str = "vllm", **variables: Any) -> dict[str, Any]:
    """Variables of the role for one engine of a host."""
    given = {
        "inventory_hostname": "node",
        "ringmaster_address": "10.0.0.1",
        "ringmaster_card": "l40s",
        "ringmaster_models": {
            "m": {"max_model_len": 4096, "adapters": ["sql", "x"], "adapter_paths": {"x": "/data/x"}},
        },
        "vllm_engine": engine,
        "vllm_suffix": "-12345678",
        "vllm_item": {"name": "main", "model": "m", "port": 8100} | item,
    }
    families = trusted(load("vars/Debian.yml"))
    return trusted(load("defaults/main.yml")) | trusted(load("vars/main.yml")) | families | given | variables


def evaluate(template: str, variables: dict[str, Any]) -> Any:
    return Templar(loader=DataLoader(), variables=variables).template(trust_as_template(template))


def test_the_command_line_has_the_model_first_and_adapters_at_their_places() -> None:
    words = evaluate("{{ vllm_own_words }}", known({}))
    assert words[:3] == ["/srv/ringmaster/models/m/current", "--served-model-name", "m"]
    assert words[-4:] == ["--enable-lora", "--lora-modules", "sql=/srv/ringmaster/models/sql/current", "x=/data/x"]
    assert words[words.index("--max-model-len") + 1] == "4096"
    assert all(isinstance(word, str) for word in words)


@pytest.mark.parametrize("name", ["max-model-len", "max_model_len"])
def test_an_engine_s_own_context_goes_before_the_models(name: str) -> None:
    assert "--max-model-len" not in evaluate("{{ vllm_own_words }}", known({"options": {name: 1024}}))


def test_a_stand_in_names_its_model_and_a_real_engine_a_folder() -> None:
    assert evaluate("{{ vllm_model_path }}", known({}, "standin")) == "m"
    assert evaluate("{{ vllm_model_path }}", known({}, vllm_models={"m": {"path": "/data/m"}})) == "/data/m"


def test_an_engine_s_version_goes_before_the_hosts() -> None:
    assert evaluate("{{ vllm_release }}", known({})) == "0.32.0-12345678"
    assert evaluate("{{ vllm_release }}", known({"version": "0.33.1"})) == "0.33.1-12345678"
    engines = [{"name": "a"}, {"name": "b", "version": "0.33.1"}]
    assert evaluate("{{ vllm_wanted_versions }}", known({}, vllm_engines=engines)) == ["0.32.0", "0.33.1"]
    assert evaluate("{{ vllm_wanted_versions }}", known({}, vllm_engines=engines, vllm_only=["b"])) == ["0.33.1"]


def test_cards_and_environments_come_together() -> None:
    item = {"cards": ["GPU-a", "GPU-b"], "environment": {"NCCL_IB_TC": 106}}
    environment = evaluate("{{ vllm_whole_environment }}", known(item, vllm_environment={"NCCL_IB_TC": 0, "A": "b"}))
    assert environment == {"CUDA_VISIBLE_DEVICES": "GPU-a,GPU-b", "NCCL_IB_TC": 106, "A": "b"}
    assert evaluate("{{ vllm_whole_environment }}", known({})) == {}
    without_cards = evaluate("{{ vllm_whole_environment }}", known({}, vllm_device="cpu"))
    assert without_cards == {"CUDA_VISIBLE_DEVICES": ""}


def command_line(variables: dict[str, Any]) -> tuple[str, list[str]]:
    """The ExecStart line of an engine's drop-in that starts something, and all lines of the drop-in."""
    template = trust_as_template((ROLE / "templates" / "engine.conf.j2").read_text(encoding="utf-8"))
    # As the module `template` reads a file: backslashes stand for themselves there.
    text = Templar(loader=DataLoader(), variables=variables).template(template, escape_backslashes=False)
    lines = text.splitlines()
    (command,) = [line for line in lines if line.startswith('ExecStart="')]
    return command, lines


def test_words_reach_the_engine_as_they_are() -> None:
    """Quotes and backslashes escaped, no specifier, no variable, one line (systemd.service, "Command lines")."""
    option = {"a": 'quote " back \\ percent % dollar $ line\nend'}
    command, lines = command_line(known({"environment": {"A": 'b $c 100% "d"'}, "options": option}))
    assert 'Environment="A=b $c 100%% \\"d\\""' in lines
    assert command.endswith('"--a" "quote \\" back \\\\ percent %% dollar $$ line\\nend"')
    assert lines.count("ExecStart=") == 1
    assert lines.index("ExecStart=") < lines.index(command)


def test_no_value_of_a_variable_is_taken_out_of_an_option() -> None:
    """A value that looks like a secret by its variable's name may be a word of an option, or a part of one."""
    item = {
        "environment": {"TOKENIZERS_PARALLELISM": "false", "A_KEY": "batched-tokens"},
        "options": {"default-chat-template-kwargs": {"enable_thinking": False}, "max-num-batched-tokens": 16384},
    }
    command, _lines = command_line(known(item))
    assert '"{\\"enable_thinking\\": false}" "--max-num-batched-tokens" "16384"' in command


@pytest.mark.parametrize(
    ("item", "secret"),
    [
        ({}, []),
        ({"options": {"hf_token": "hf_x", "max-num-seqs": 4}}, ["--hf-token"]),
        ({"options": {"hf_token": True}}, []),
        ({"environment": {"HF_TOKEN": "hf_x", "TOKENIZERS_PARALLELISM": "false", "B_SECRET": ""}}, ["HF_TOKEN"]),
        ({"environment": {"HF_TOKEN": "hf_x"}, "accepted": ["HF_TOKEN"]}, []),
        ({"options": {"ssl-token": "x"}, "accepted": ["ssl-token"]}, []),
        ({"options": {"ssl_token": "x"}, "accepted": ["ssl_token"]}, []),
    ],
)
def test_a_secret_is_refused_where_every_user_could_read_it(item: dict[str, Any], secret: list[str]) -> None:
    (task,) = (each for each in load("tasks/checks.yml") if each["name"].startswith("No secret"))
    variables = known(item)
    assert evaluate(task["vars"]["vllm_secrets"], variables) == secret


def test_the_suffix_of_a_release_depends_on_all_that_it_is_made_of() -> None:
    suffixes = {
        json.dumps(evaluate("{{ vllm_made_of }}", known({}, **changed)))
        for changed in (
            {},
            {"vllm_device": "cpu"},
            {"vllm_prebuilt_path": "/x"},
            {"vllm_python_requirements": ["a"]},
            {"vllm_python_constraints": ["a"]},
            {"vllm_python_interpreter": "/usr/bin/python3.12"},
        )
    }
    assert len(suffixes) == 6


def facts(name: str, variables: dict[str, Any]) -> dict[str, Any]:
    """What a set_fact task of measure.yml sets."""
    (task,) = (each for each in load("tasks/measure.yml") if each["name"].startswith(name))
    more = trusted(task.get("vars", {}))
    return {
        key: evaluate(value, variables | more)
        for key, value in task["ansible.builtin.set_fact"].items()
        if value is not None
    }


def test_links_and_releases_on_the_host_are_measured() -> None:
    found = {
        "vllm_releases_found": {
            "stdout_lines": ["/opt/ringmaster/vllm/versions/0.32.0-aaaaaaaa", "/x/0.31.0-bbbbbbbb"]
        },
        "vllm_links_found": {
            "stdout_lines": [
                "main/current=../../versions/0.32.0-aaaaaaaa",
                "main/previous=../../versions/0.31.0-bbbbbbbb",
            ]
        },
        "vllm_packages_found": {
            "results": [{"stdout": "installed 1.2-3"}, *[{"stdout": ""}] * 2, {"stdout": "installed 4"}]
        },
        "vllm_engines_found": {"files": [{"path": "/etc/ringmaster/vllm/main"}]},
        "vllm_users_found": {"results": [{"rc": 0}, {"rc": 2}]},
        "vllm_files_found": {"results": [{"stat": {"exists": False}}] * 4},
    }
    variables = known({}) | found
    variables |= facts("What the wanted releases are made of", variables)
    assert variables["vllm_releases"] == ["0.31.0-bbbbbbbb", "0.32.0-aaaaaaaa"]
    assert variables["vllm_links"]["main/previous"] == "0.31.0-bbbbbbbb"
    assert variables["vllm_suffix"].startswith("-")
    assert len(variables["vllm_suffix"]) == 9
    assert facts("What was found of the engines", variables)["vllm_measured"] == {
        "g++": "1.2-3",
        "libnuma1": "absent",
        "python3-dev": "absent",
        "python3-venv": "4",
        "engine main": "0.32.0-aaaaaaaa",
        "engines": "main",
        "user standin-engine": "present",
        "user vllm": "absent",
        "versions": "0.31.0-bbbbbbbb, 0.32.0-aaaaaaaa",
        "unit": "absent",
    }


def test_a_new_host_has_nothing() -> None:
    variables = known({}) | {
        "vllm_releases_found": {"skipped": True},
        "vllm_links_found": {"skipped": True},
        "vllm_engines_found": {"skipped": True},
        "vllm_packages_found": {"results": [{"stdout": ""}] * 4},
        "vllm_users_found": {"results": [{"rc": 2}, {"rc": 2}]},
        "vllm_files_found": {"results": [{"stat": {"exists": False}}] * 4},
    }
    variables |= facts("What the wanted releases are made of", variables)
    assert (variables["vllm_releases"], variables["vllm_links"]) == ([], {})
    measured = facts("What was found of the engines", variables)["vllm_measured"]
    assert set(measured.values()) == {"absent", "none"}


@pytest.mark.parametrize("family", ["Debian", "RedHat"])
def test_each_kind_has_its_packages(family: str) -> None:
    packages = {}
    for engine in ("standin", "vllm"):
        variables = known({}, engine) | trusted(load(f"vars/{family}.yml"))
        packages[engine] = set(evaluate("{{ vllm_kind_packages }}", variables))
    assert packages["standin"] | packages["vllm"] == set(load(f"vars/{family}.yml")["vllm_packages"])
    assert not packages["standin"] & packages["vllm"]


def test_the_record_before_the_first_apply_is_of_both_kinds() -> None:
    (task,) = (each for each in load("tasks/apply.yml") if each["name"].startswith("The state before"))
    files = evaluate(task["ringmaster.inference.operation_state"]["files"], known({}))
    assert files == [
        "/etc/ringmaster/vllm",
        "/opt/ringmaster/standin-engine",
        "/opt/ringmaster/vllm",
        "/etc/systemd/system/standin-engine@.service",
        "/etc/systemd/system/vllm@.service",
    ]


@pytest.mark.parametrize(
    ("measured", "brought"),
    [
        ({"user standin-engine": "absent", "user vllm": "present", "g++": "absent"}, ["standin-engine"]),
        ({"user standin-engine": "absent", "user vllm": "absent"}, ["standin-engine", "vllm"]),
        ({"user standin-engine": "present", "user vllm": "present"}, []),
        # As 0.1.0 recorded it.
        ({"user": "absent", "unit": "absent"}, ["standin-engine"]),
        ({"user": "present", "unit": "absent"}, []),
    ],
)
def test_a_rollback_removes_the_users_that_the_role_brought(measured: dict[str, str], brought: list[str]) -> None:
    [expression] = [task["vars"]["vllm_users_brought"] for task in load("tasks/rollback.yml") if "vars" in task]
    variables = known({}) | {"vllm_before": {"measured": measured}}
    assert evaluate(trusted(expression), variables) == brought


def test_the_cause_is_found_above_the_end_of_a_long_trace() -> None:
    lines = [
        "(APIServer pid=1) WARNING 11-30 11:03:02 [system_utils.py:255] like `OSError: [Errno 24]`",
        "no token yet: URLError",
        *["(EngineCore pid=2) ERROR 11-30 11:04:56 [core.py:1510] RuntimeError: Insufficient space in /dev/shm"] * 2,
        *["    frame"] * 40,
        "RuntimeError: Engine core initialization failed. See root cause above.",
        "vllm@main.service: Failed with result 'exit-code'.",
    ]
    [task] = [task for task in load("tasks/journal.yml") if "ansible.builtin.set_fact" in task]
    template = task["ansible.builtin.set_fact"]["vllm_journal_says"]
    said = evaluate(template, known({}) | {"vllm_journal": {"stdout_lines": lines}})
    assert "Errors in it: RuntimeError: Insufficient space in /dev/shm / RuntimeError: Engine core init" in said
    assert said.strip().endswith("Failed with result 'exit-code'.")
    silent = evaluate(template, known({}) | {"vllm_journal": {"stdout_lines": []}})
    assert "Errors in it: none." in silent


SAME, OTHER = {"texts": 2000, "tokenizer": "a"}, {"texts": 2000, "tokenizer": "b"}
WARNING = "Triton is installed, but doesn't include CPU backend. Disabling Triton."


@pytest.mark.parametrize(
    ("said", "status", "passes", "found"),
    [
        ([WARNING, json.dumps(SAME)], 0, True, json.dumps(SAME)),
        ([json.dumps(SAME), "a line after it"], 0, True, json.dumps(SAME)),
        ([json.dumps(OTHER)], 0, False, json.dumps(OTHER)),
        ([json.dumps(SAME)], 1, False, json.dumps(SAME)),
        (
            ["Traceback (most recent call last):", "ModuleNotFoundError: No module named 'transformers'"],
            1,
            False,
            "No mod",
        ),
        ([], 0, False, "nothing"),
    ],
)
def test_the_fingerprint_is_found_among_what_a_script_s_terminal_shows(
    tmp_path: Path, said: list[str], status: int, passes: bool, found: str
) -> None:
    (tmp_path / "fingerprint.json").write_text(json.dumps(SAME))
    [_script, task] = load("tasks/tokenizer.yml")
    judged = trusted(task["vars"])
    variables = known({}, vllm_tokenizers={"m": str(tmp_path)}, vllm_fingerprint={"rc": status, "stdout_lines": said})
    assert evaluate("{{ " + task["ansible.builtin.assert"]["that"] + " }}", variables | judged) is passes
    assert found in evaluate(task["ansible.builtin.assert"]["fail_msg"], variables | judged)
