# SPDX-License-Identifier: GPL-3.0-or-later
"""What the role makes of cards: what it measures, what it calls a problem, and what it puts back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from ansible.parsing.dataloader import DataLoader
from ansible.template import Templar, trust_as_template

from tests.support.templates import trusted

ROLE = Path(__file__).resolve().parents[4] / "roles" / "gpu"
GPU_A, GPU_B = "GPU-aaaa", "GPU-bbbb"
LINES = [
    f"{GPU_A}, 00000000:07:00.0, 580.95.05, Enabled, Disabled, 400.00, 100.00, 400.00",
    f"{GPU_B}, 00000000:0F:00.0, 580.95.05, Disabled, Enabled, [N/A], [N/A], [N/A]",
]


def load(path: str) -> Any:
    return yaml.safe_load((ROLE / path).read_text(encoding="utf-8"))


def known(**variables: Any) -> dict[str, Any]:
    """Variables of the role on a host with two cards; `variables` replace some, None removes one."""
    given = {
        "inventory_hostname": "node",
        "gpu_card": "",
        "gpu_smi_found": {"rc": 0, "stdout_lines": LINES},
        "ansible_check_mode": False,
    }
    every = trusted(load("defaults/main.yml")) | trusted(load("vars/main.yml")) | given | variables
    return {name: value for name, value in every.items() if value is not None}


def evaluate(template: str, variables: dict[str, Any]) -> Any:
    return Templar(loader=DataLoader(), variables=variables).template(trust_as_template(template))


def card(**changes: Any) -> dict[str, Any]:
    return {
        "index": 0,
        "pci_address": "0000:07:00.0",
        "card": "a100-80g",
        "model": "NVIDIA A100-SXM4-80GB",
        "ecc_current": True,
        "persistence_mode": True,
        "power_limit_watts": 400.0,
        "pcie_width": 16,
        "pcie_width_max": 16,
        "verdict": "ok",
        "reasons": [],
    } | changes


def problems(*cards: dict[str, Any], deviations: list[str] | None = None, **variables: Any) -> list[str]:
    (task,) = (each for each in load("tasks/verify.yml")[0]["block"] if "ansible.builtin.assert" in each)
    template = task["vars"]["gpu_problems"].replace("problems.j2", str(ROLE / "templates/problems.j2"))
    cards_and_links = {"gpu_cards_now": {"gpus": list(cards)}, "gpu_links_now": {"deviations": deviations or []}}
    found: list[str] = evaluate(template, known(**cards_and_links, **variables))
    return found


def test_good_cards_have_no_problem() -> None:
    assert problems(card(), card(), gpu_count=2, gpu_card="a100-80g", gpu_power_limit_watts=400) == []


def test_what_can_not_be_known_is_no_problem_by_itself() -> None:
    unknown = dict.fromkeys(("ecc_current", "persistence_mode", "power_limit_watts", "pcie_width", "pcie_width_max"))
    assert problems(card(**unknown), gpu_power_limit_watts=300) == []


@pytest.mark.parametrize(
    ("changes", "variables", "says"),
    [
        ({}, {"gpu_count": 2}, "Expected 2 cards on node. Found 1: 0000:07:00.0."),
        ({}, {"gpu_card": "l40s"}, "to be an l40s. Found NVIDIA A100-SXM4-80GB."),
        ({"model": None, "card": None}, {"gpu_card": "l40s"}, "Found no answer."),
        ({"ecc_current": False}, {}, "`ringmaster_reboot: required_only`"),
        ({"ecc_current": False}, {"gpu_rebooted": {}}, "since a reboot did not change it"),
        ({"persistence_mode": False}, {}, "Expected persistence mode of card 0000:07:00.0 of node to be on"),
        ({"power_limit_watts": 350.0}, {"gpu_power_limit_watts": 300}, "Found 350.0 W."),
        ({"pcie_width": 8}, {}, "Expected 16 PCIe lanes of card 0000:07:00.0 of node. Found 8."),
        (
            {"verdict": "reset", "reasons": [{"reason": "why", "action": "how"}]},
            {},
            "Found reset: why. To do: how (consent to a reset: `gpu_reset_allowed: true`).",
        ),
        ({"verdict": "watch", "reasons": [{"reason": "why", "action": "how"}]}, {}, "Found watch: why. To do: how."),
    ],
)
def test_each_problem_says_what_was_expected_found_and_what_to_do(
    changes: dict[str, Any], variables: dict[str, Any], says: str
) -> None:
    (problem,) = problems(card(**changes), **variables)
    assert says in problem
    assert problem.startswith("Expected ")
    assert ". To do: " in problem


def test_a_verdict_that_the_operator_accepts() -> None:
    watched = card(verdict="watch", reasons=[{"reason": "why", "action": "how"}])
    assert problems(watched, gpu_verdicts=["ok", "watch"]) == []


def test_links_that_deviate() -> None:
    (problem,) = problems(card(), deviations=["0000:07:00.0: link 3 is inactive, expected active"])
    assert "link 3 is inactive" in problem


@pytest.mark.parametrize(
    ("variables", "present"),
    [
        ({}, True),
        ({"gpu_count": 0}, False),
        ({"gpu_count": 0, "gpu_card": "l40s"}, False),
        ({"gpu_smi_found": {"rc": 9}}, False),
        ({"gpu_smi_found": {"rc": 9}, "gpu_functions_found": {"stdout": "0000:07:00.0"}}, True),
        ({"gpu_smi_found": {"rc": 9}, "gpu_card": "l40s"}, True),
        ({"gpu_smi_found": {"rc": 9}, "gpu_count": 4}, True),
    ],
)
def test_whether_there_is_anything_to_do(variables: dict[str, Any], present: bool) -> None:
    without = {"gpu_functions_found": {"stdout": ""}}
    assert evaluate("{{ gpu_present }}", known(**(without | variables))) is present


def measured(**variables: Any) -> Any:
    task = load("tasks/measure.yml")[-1]
    found = {
        "gpu_functions_found": {"stdout": "", "stdout_lines": []},
        "gpu_packages": ["python3-venv"],
        "gpu_packages_found": {"stdout": "installed python3-venv 3.11"},
        "gpu_library_found": {
            "files": [{"path": "/opt/ringmaster/gpu/venv/lib/python3.11/site-packages/nvidia_ml_py-13.1.dist-info"}]
        },
        "gpu_units_found": {
            "stdout": "LoadState=loaded\nActiveState=active\nUnitFileState=enabled\n\n"
            "LoadState=not-found\nActiveState=inactive\nUnitFileState="
        },
    }
    return evaluate(
        task["ansible.builtin.set_fact"]["gpu_measured"], known(**(trusted(task["vars"]) | found | variables))
    )


def test_what_is_measured() -> None:
    assert measured() == {
        "cards": 2,
        "driver": "580.95.05",
        "drained": False,
        "nvidia_ml_py": "13.1",
        "persistenced": "active",
        "persistenced_enabled": "enabled",
        "unit": "absent",
        "python3-venv": "3.11",
        f"ecc_pending {GPU_A}": "Enabled",
        f"ecc_pending {GPU_B}": "Disabled",
        f"persistence_mode {GPU_A}": "Disabled",
        f"persistence_mode {GPU_B}": "Enabled",
        f"power_limit_watts {GPU_A}": "400.00",
        f"power_limit_watts {GPU_B}": "[N/A]",
    }


def test_what_is_measured_of_hosts_without_cards_or_driver() -> None:
    assert measured(gpu_smi_found={"rc": 2}, gpu_packages_found=None) == {
        "cards": 0,
        "driver": "absent",
    }
    bare = measured(
        gpu_smi_found={"rc": 2},
        gpu_functions_found={"stdout": "0000:07:00.0", "stdout_lines": ["0000:07:00.0"]},
        gpu_library_found={"files": [{"path": "/var/lib/ringmaster/gpu.drained"}]},
        gpu_packages_found={"stdout": ""},
        gpu_units_found={
            "stdout": "LoadState=not-found\nActiveState=inactive\nUnitFileState=\n\n"
            "LoadState=loaded\nActiveState=active\nUnitFileState=enabled"
        },
    )
    assert bare == {
        "cards": 1,
        "driver": "absent",
        "drained": True,
        "nvidia_ml_py": "absent",
        "persistenced": "absent",
        "persistenced_enabled": "absent",
        "unit": "active",
        "python3-venv": "absent",
    }


def test_a_rollback_sets_only_what_differs() -> None:
    text = (ROLE / "templates/restore.json.j2").read_text(encoding="utf-8")
    before = {
        f"ecc_pending {GPU_A}": "Enabled",
        f"ecc_pending {GPU_B}": "Enabled",
        f"persistence_mode {GPU_A}": "Enabled",
        f"persistence_mode {GPU_B}": "[N/A]",
        f"power_limit_watts {GPU_A}": "300.00",
        f"power_limit_watts {GPU_B}": "[N/A]",
        "ecc_pending GPU-gone": "Disabled",
    }
    result = evaluate(text, known(gpu_before={"measured": before}))
    assert (json.loads(result) if isinstance(result, str) else result) == [
        [GPU_A, "--persistence-mode", "1"],
        [GPU_A, "--power-limit", "300.00"],
        [GPU_B, "--ecc-config", "1"],
    ]


@pytest.mark.parametrize(
    ("ecc", "cards", "reasons", "uuids"),
    [
        ({}, [], [], []),
        ({"reboot_required": True}, [], ["ECC changes with a reboot"], []),
        (
            {"reboot_required": False},
            [card(uuid=GPU_A, verdict="reboot", reasons=[{"verdict": "reboot", "reason": "why"}])],
            ["why"],
            [],
        ),
        ({}, [card(uuid=GPU_A, verdict="reset", reasons=[{"verdict": "reset", "reason": "why"}])], [], [GPU_A]),
        ({}, [card(uuid=GPU_A, verdict="power_cycle", reasons=[{"verdict": "reset", "reason": "why"}])], [], []),
    ],
)
def test_what_waits_for_a_reboot_or_a_reset(
    ecc: dict[str, Any], cards: list[dict[str, Any]], reasons: list[str], uuids: list[str]
) -> None:
    variables = known(gpu_ecc_set=ecc, gpu_cards_found={"gpus": cards})
    assert evaluate("{{ gpu_reboot_reasons }}", variables) == reasons
    assert evaluate("{{ gpu_reset_uuids }}", variables) == uuids
