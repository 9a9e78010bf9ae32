# SPDX-License-Identifier: GPL-3.0-or-later
"""Every integration target, on a host of the fleet with simulated hardware, after the site was brought up there."""

from __future__ import annotations

import subprocess

import pytest

from tests.e2e.conftest import ROOT, Site

TARGETS = sorted(path.parent.parent.name for path in (ROOT / "tests/integration/targets").glob("*/tasks/main.yml"))
MODULES = {path.stem for path in (ROOT / "plugins/modules").glob("*.py")}
# Tested where they are used: on the controller, and in every role's own scenario.
WITHOUT_TARGET = {"site_preflight", "operation_state"}


def test_every_module_has_a_target() -> None:
    assert set(TARGETS) == MODULES - WITHOUT_TARGET


@pytest.mark.parametrize("target", TARGETS)
def test_target_passes(running_site: Site, target: str) -> None:
    finished = subprocess.run(
        ["ansible-playbook", "-i", str(running_site.checkout.inventory), "-e", f"target={target}"]
        + ["tests/integration/target.yml"],
        env=running_site.checkout.environment,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert finished.returncode == 0, finished.stdout[-6000:] + finished.stderr[-2000:]
