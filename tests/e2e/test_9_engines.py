# SPDX-License-Identifier: GPL-3.0-or-later
"""An engine is restarted for a changed variable, and removed, by the site's own playbook while it serves."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.e2e.conftest import MODEL, Site, changed_tasks, run_playbook
from tests.e2e.gateway import failures, placements, steady_load, wait_until

HOST, GROUP = "gpu-b1", "l40s"
ENGINE = f"{HOST}.main"
UNIT = "standin-engine@main.service"
ONLY_ENGINE = ("--tags", "vllm", "--limit", HOST)


@pytest.fixture
def inventory_with_another_engine(running_site: Site, tmp_path: Path) -> Path:
    """The site's inventory, in which the host has another engine."""
    folder = tmp_path / "inventory"
    shutil.copytree(running_site.checkout.inventory, folder)
    hosts = yaml.safe_load((folder / "hosts.yml").read_text())
    group = hosts["all"]["children"]["engines"]["children"][GROUP]["hosts"]
    group[HOST] = {**(group[HOST] or {}), "vllm_engines": [{"name": "second", "model": MODEL, "port": 8101}]}
    (folder / "hosts.yml").write_text(yaml.safe_dump(hosts))
    return folder


def serves(site: Site) -> None:
    """Wait until the gateway under load sends requests to the engine."""
    before = placements(site).get(ENGINE, 0)
    wait_until(lambda: placements(site).get(ENGINE, 0) > before, f"{ENGINE} gets requests", 60)


def drained(document: dict[str, Any] | None) -> bool:
    """Whether a run drained the engine."""
    assert document is not None
    return "The engine is drained (main)" in changed_tasks(document).get(f"{HOST}/vllm", [])


def process(site: Site) -> str:
    return site.on(HOST, f"systemctl show --property=MainPID --value {UNIT}").strip()


def test_engine_is_restarted_for_a_changed_variable_and_no_request_fails(running_site: Site) -> None:
    """May fail: nothing. Nobody said where the schedulers are; the inventory does."""
    before = process(running_site)
    with steady_load(running_site, 8, 600) as outcomes:
        finished, document = running_site.playbook(
            "site.yml", *ONLY_ENGINE, "-e", '{"vllm_environment": {"CHANGED": "1"}}'
        )
        assert finished.returncode == 0, finished.stdout
        assert drained(document)
        changed = process(running_site)
        assert changed not in (before, "0")
        serves(running_site)
        finished, _unused = running_site.playbook("site.yml", *ONLY_ENGINE)
        assert finished.returncode == 0, finished.stdout
        assert process(running_site) not in (changed, "0")
        serves(running_site)
    assert failures(outcomes) == []
    assert len(outcomes) > 100


def test_engine_gives_way_to_another_one_and_comes_back_and_no_request_fails(
    running_site: Site, inventory_with_another_engine: Path
) -> None:
    """May fail: nothing, though the registry was not told. It comes back in service, not drained."""
    with steady_load(running_site, 8, 600) as outcomes:
        finished, document = run_playbook(running_site.checkout, "site.yml", ONLY_ENGINE, inventory_with_another_engine)
        assert finished.returncode == 0, finished.stdout
        assert drained(document)
        assert process(running_site) == "0"
        finished, _unused = running_site.playbook("site.yml", *ONLY_ENGINE)
        assert finished.returncode == 0, finished.stdout
        serves(running_site)
    assert failures(outcomes) == []
    assert len(outcomes) > 100
