# SPDX-License-Identifier: GPL-3.0-or-later
"""The configuration and the arguments of Prometheus, as rendered from the members document."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.unit.roles.observability.rendering import MEMBERS, evaluate, promtool, render

needs_promtool = pytest.mark.skipif(
    shutil.which("promtool") is None, reason="promtool is not installed (package prometheus)"
)


def jobs(**variables: Any) -> dict[str, list[tuple[str, dict[str, str]]]]:
    """Return the targets of each job, with their labels."""
    configuration = yaml.safe_load(render("prometheus.yml.j2", **variables))
    return {
        job["job_name"]: [
            (target, group["labels"]) for group in job["static_configs"] or [] for target in group["targets"]
        ]
        for job in configuration["scrape_configs"]
    }


def test_every_member_is_a_target_with_its_labels() -> None:
    assert jobs() == {
        "prometheus": [("[2001:db8::16]:9090", {"host": "cpu-c1"})],
        "haproxy": [("192.0.2.11:8405", {"host": "gw1"}), ("gw2.example:8405", {"host": "gw2"})],
        "scheduler": [("192.0.2.11:8406", {"host": "gw1"}), ("gw2.example:8406", {"host": "gw2"})],
        "agent": [("192.0.2.13:8409", {"host": "gpu-a1"}), ("[2001:db8::15]:8410", {"host": "gpu-b1"})],
        "preprocessor": [("192.0.2.17:8411", {"host": "pi1"})],
        "engine": [
            ("192.0.2.13:8100", {"host": "gpu-a1", "engine": "gpu-a1.main", "model": "chat", "card": "l40s"}),
            ("[2001:db8::15]:8101", {"host": "gpu-b1", "engine": "gpu-b1.main", "model": 'o"d: d', "card": "l40s"}),
        ],
    }


def test_ports_are_the_operators() -> None:
    targets = jobs(observability_port=1, observability_haproxy_port=2, observability_scheduler_port=3)
    assert [
        target.rpartition(":")[2] for job in ("prometheus", "haproxy", "scheduler") for target, _unused in targets[job]
    ] == list("12233")


def test_ports_of_the_gateways_are_those_of_their_roles() -> None:
    targets = jobs(edge_metrics_port=2, scheduler_http_port=3)
    assert [target.rpartition(":")[2] for job in ("haproxy", "scheduler") for target, _unused in targets[job]] == list(
        "2233"
    )


def test_preprocessors_are_targets_where_they_run_the_program_alone() -> None:
    assert jobs(preprocessor_metrics_port=4)["preprocessor"] == [("192.0.2.17:4", {"host": "pi1"})]
    assert jobs(preprocessor_binaries={})["preprocessor"] == []
    assert "192.0.2.17:8411" not in evaluate("observability_endpoints", preprocessor_binaries={})


def test_verification_expects_the_targets_of_the_configuration() -> None:
    targets = [target for job in jobs().values() for target, _unused in job]
    assert sorted(evaluate("observability_endpoints")) == sorted(targets)


def test_a_member_that_leaves_is_no_target() -> None:
    without = {**MEMBERS, "engines": MEMBERS["engines"][1:]}
    assert [target for target, _unused in jobs(observability_members=without)["engine"]] == ["[2001:db8::15]:8101"]


@needs_promtool
@pytest.mark.parametrize(
    "members", [MEMBERS, {**MEMBERS, "engines": [], "gateways": []}], ids=["site", "monitor alone"]
)
def test_promtool_takes_the_configuration(tmp_path: Path, members: dict[str, Any]) -> None:
    file = tmp_path / "prometheus.yml"
    # The folder of the rules is another one here; promtool reads the rules that the configuration names.
    file.write_text(
        render("prometheus.yml.j2", observability_members=members, observability_rules_path=f"{tmp_path}/a")
    )
    finished = promtool("check", "config", str(file))
    assert finished.returncode == 0, finished.stdout + finished.stderr


@pytest.mark.parametrize(
    ("address", "endpoint"),
    [("192.0.2.16", "192.0.2.16:9090"), ("2001:db8::16", "[2001:db8::16]:9090"), ("cpu-c1", "cpu-c1:9090")],
)
def test_prometheus_listens_on_one_address(address: str, endpoint: str) -> None:
    arguments = evaluate("observability_arguments", observability_address=address)
    assert f"--web.listen-address={endpoint}" in arguments
    line = render("arguments.j2", observability_address=address).splitlines()[-1]
    assert line == f'ARGS="{" ".join(arguments)}"'
