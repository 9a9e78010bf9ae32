# SPDX-License-Identifier: GPL-3.0-or-later
"""A wrong inventory stops before any host is touched, and the message names the variable and the fix."""

from __future__ import annotations

import copy
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
GOOD: dict[str, Any] = {
    "all": {
        "vars": {
            "ringmaster_models": {"qwen2-7b-instruct": {"max_model_len": 32768, "adapters": ["sql"]}},
            "vllm_engine": "standin",
            "vllm_api_key": "an-engine-key-of-good-length",
            "edge_api_keys": [{"id": "team-a", "key": "a-client-key-of-good-length"}],
        },
        "children": {
            "gateways": {"hosts": {"gw1": {"ansible_host": "10.255.0.11"}}},
            "engines": {
                "vars": {
                    "ringmaster_card": "l40s",
                    "vllm_engines": [{"name": "main", "model": "qwen2-7b-instruct", "port": 8100}],
                },
                "hosts": {"gpu1": {"ansible_host": "10.255.0.12"}, "gpu2": {"ansible_host": "10.255.0.13"}},
            },
            "monitors": {"hosts": {"cpu1": {"ansible_host": "10.255.0.14"}}},
        },
    }
}


def no_engine(site: dict[str, Any]) -> None:
    site["children"]["engines"]["hosts"] = {}


def unknown_model(site: dict[str, Any]) -> None:
    site["children"]["engines"]["vars"]["vllm_engines"][0]["model"] = "llama-of-another-site"


def same_address(site: dict[str, Any]) -> None:
    site["children"]["engines"]["hosts"]["gpu2"]["ansible_host"] = "10.255.0.12"


def no_engine_key(site: dict[str, Any]) -> None:
    del site["vars"]["vllm_api_key"]


def secret_of_an_undefined_variable(site: dict[str, Any]) -> None:
    site["vars"]["edge_api_keys"] = [{"id": "team-a", "key": "{{ vault_of_nobody }}"}]


def run(tmp_path: Path, site: dict[str, Any], *arguments: str) -> tuple[subprocess.CompletedProcess[str], list[str]]:
    """Run site.yml; gives the process and the ssh command lines that it tried."""
    (tmp_path / "hosts.yml").write_text(yaml.safe_dump(site))
    calls = tmp_path / "calls"
    calls.touch()
    ssh = tmp_path / "ssh"
    ssh.write_text(f'#!/bin/sh\necho "$@" >>{calls}\nexit 255\n')
    ssh.chmod(0o755)
    environment = {
        **os.environ,
        "ANSIBLE_SSH_EXECUTABLE": str(ssh),
        "ANSIBLE_CONFIG": str(ROOT / "ansible.cfg"),
        "RINGMASTER_EVIDENCE_DIRECTORY": str(tmp_path / "evidence"),
        "PATH": f"{ROOT / '.venv' / 'bin'}:{os.environ['PATH']}",
    }
    command = ["ansible-playbook", "-i", str(tmp_path / "hosts.yml"), *arguments, "playbooks/site.yml"]
    finished = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    return finished, calls.read_text().splitlines()


@pytest.mark.parametrize(
    ("breakage", "words"),
    [
        (no_engine, ["engines", "add a host to group engines"]),
        (unknown_model, ["vllm_engines", "llama-of-another-site", "ringmaster_models"]),
        (same_address, ["gpu1", "gpu2", "10.255.0.12", "ansible_host"]),
        (no_engine_key, ["vllm_api_key"]),
        (secret_of_an_undefined_variable, ["edge_api_keys", "vault_of_nobody"]),
    ],
)
@pytest.mark.parametrize("arguments", [(), ("--check", "--diff"), ("--limit", "gpu1"), ("--tags", "edge")])
def test_wrong_inventory_touches_no_host(
    tmp_path: Path, breakage: Callable[[dict[str, Any]], None], words: list[str], arguments: tuple[str, ...]
) -> None:
    site = copy.deepcopy(GOOD)
    breakage(site["all"])
    if breakage is no_engine and "gpu1" in arguments:
        pytest.skip("the host to limit to is what is missing")
    finished, calls = run(tmp_path, site, *arguments)
    output = finished.stdout + finished.stderr
    assert finished.returncode != 0, output
    assert calls == [], "a host was touched"
    for word in words:
        assert word in output, output
    assert "a-client-key-of-good-length" not in output
    assert "an-engine-key-of-good-length" not in output


def test_good_inventory_passes_preflight_and_goes_on_to_the_hosts(tmp_path: Path) -> None:
    calls = run(tmp_path, copy.deepcopy(GOOD))[1]
    assert calls != [], "expected the run to go on to the hosts (which refuse here)"
