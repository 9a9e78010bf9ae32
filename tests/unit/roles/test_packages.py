# SPDX-License-Identifier: GPL-3.0-or-later
"""Packages of roles: when their query failed, and which of them a rollback removes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from ansible.parsing.dataloader import DataLoader
from ansible.template import Templar, trust_as_template

ROLES = Path(__file__).resolve().parents[3] / "roles"


def packages(role: str, family: str) -> Any:
    """Return the packages that a role installs on a family."""
    return yaml.safe_load((ROLES / role / "vars" / f"{family}.yml").read_text(encoding="utf-8"))[f"{role}_packages"]


def task(role: str, file: str, name: str) -> dict[str, Any]:
    """Return one of the outermost tasks of a file of a role."""
    tasks = yaml.safe_load((ROLES / role / "tasks" / file).read_text(encoding="utf-8"))
    return next(each for each in tasks if each["name"] == name)


def evaluate(template: str, role: str, family: str, **variables: Any) -> Any:
    """Return what a template of a role gives on a host of a family."""
    known = {"ansible_facts": {"os_family": family}, f"{role}_packages": packages(role, family), **variables}
    return Templar(loader=DataLoader(), variables=known).template(trust_as_template(template))


@pytest.mark.parametrize(
    ("family", "status", "failed"),
    [
        ("Debian", 0, False),
        ("Debian", 1, False),
        ("Debian", 2, True),
        ("Debian", -9, True),
        ("RedHat", 0, False),
        ("RedHat", 2, False),
        ("RedHat", 3, True),
        ("RedHat", -9, True),
    ],
)
def test_query_that_cannot_tell_is_not_taken_for_absent(family: str, status: int, failed: bool) -> None:
    condition = task("scheduler", "measure.yml", "The installed versions of the scheduler's packages are read")[
        "failed_when"
    ]
    assert evaluate("{{ " + condition + " }}", "scheduler", family, scheduler_packages_found={"rc": status}) is failed


@pytest.mark.parametrize(
    ("role", "name"),
    [
        ("scheduler", "The scheduler is as it was before the first apply"),
        ("vllm", "The host is as it was before the first apply"),
    ],
)
@pytest.mark.parametrize(
    ("others", "gone"),
    [
        ({}, ["python3-aiohttp", "python3-uvloop"]),
        ({"edge": {"version": "absent"}}, ["python3-aiohttp", "python3-uvloop"]),
        ({"edge": {}, "registry": {"python3-uvloop": "0.17"}}, ["python3-aiohttp"]),
        ({"a": {"python3-uvloop": "absent"}, "b": {"python3-aiohttp": "3.8"}}, []),
    ],
)
def test_package_that_another_operation_uses_stays(
    role: str, name: str, others: dict[str, Any], gone: list[str]
) -> None:
    before = {
        "measured": {
            "python3-aiohttp": "absent",
            "python3-prometheus-client": "0.16",  # was there before, so it is not the role's to remove
            "python3-uvloop": "absent",
            "user": "absent",
        },
        "others": others,
    }
    template = task(role, "rollback.yml", name)["vars"][f"{role}_packages_brought"]
    assert evaluate(template, role, "Debian", **{f"{role}_before": before}) == gone


@pytest.mark.parametrize(
    ("role", "name"),
    [
        ("baseline", "The host is as it was before the first apply"),
        ("gpu", "The cards are as they were before the first apply"),
        ("scheduler", "The scheduler is as it was before the first apply"),
        ("vllm", "The host is as it was before the first apply"),
    ],
)
def test_packages_that_nobody_else_uses_go_in_one_order(role: str, name: str) -> None:
    shared, *own = sorted(packages(role, "Debian"))
    before = {
        "measured": dict.fromkeys([*reversed(own), shared, "user"], "absent"),
        "others": {"edge": {"version": "absent", shared: "1"}},
    }
    template = task(role, "rollback.yml", name)["vars"][f"{role}_packages_brought"]
    assert evaluate(template, role, "Debian", **{f"{role}_before": before}) == own
