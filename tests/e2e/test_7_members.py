# SPDX-License-Identifier: GPL-3.0-or-later
"""A host leaves the site and joins it again while it serves."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import yaml

from tests.e2e.conftest import Site, changed_tasks, run_playbook
from tests.e2e.gateway import failures, placements, steady_load, wait_until

HOST, GROUP = "gpu-b1", "l40s"
ENGINE = f"{HOST}.main"


@pytest.fixture
def inventory_without_host(running_site: Site, tmp_path: Path) -> Path:
    """The site's inventory without the host."""
    folder = tmp_path / "inventory"
    shutil.copytree(running_site.checkout.inventory, folder)
    hosts = yaml.safe_load((folder / "hosts.yml").read_text())
    del hosts["all"]["children"]["engines"]["children"][GROUP]["hosts"][HOST]
    (folder / "hosts.yml").write_text(yaml.safe_dump(hosts))
    return folder


def test_host_leaves_and_joins_and_no_request_fails(running_site: Site, inventory_without_host: Path) -> None:
    """May fail: nothing. Leaving: drain, out of the inventory, its operations rolled back. Joining: one run that
    changes the host and the registry, and nothing else."""
    with steady_load(running_site, 8, 1200) as outcomes:
        finished, _unused = running_site.playbook("drain.yml", "-e", f"node={HOST}")
        assert finished.returncode == 0, finished.stdout
        finished, _unused = run_playbook(
            running_site.checkout, "site.yml", ["--tags", "registry"], inventory_without_host
        )
        assert finished.returncode == 0, finished.stdout
        for gateway in ("gw1", "gw2"):
            wait_until(lambda at=gateway: ENGINE not in placements(running_site, at), f"{gateway} has no {ENGINE}")
        for operation in ("agent", "vllm"):
            finished, _unused = running_site.playbook("rollback.yml", "-e", f"operation={operation}", "--limit", HOST)
            assert finished.returncode == 0, finished.stdout

        finished, document = running_site.playbook(
            "site.yml", "--limit", f"{HOST}:gateways", "--tags", "registry,vllm,agent"
        )
        assert finished.returncode == 0, finished.stdout
        assert document is not None
        changed = set(changed_tasks(document))
        assert {f"{HOST}/vllm", f"{HOST}/agent", "gw1/registry", "gw2/registry"} <= changed
        assert {each for each in changed if not each.startswith(f"{HOST}/")} == {"gw1/registry", "gw2/registry"}
        finished, _unused = running_site.playbook("drain.yml", "-e", f"node={HOST}", "-e", "state=active")
        assert finished.returncode == 0, finished.stdout
        wait_until(lambda: placements(running_site).get(ENGINE, 0) > 3, f"{ENGINE} gets requests", 60)
    assert failures(outcomes) == []
    assert len(outcomes) > 100
