# SPDX-License-Identifier: GPL-3.0-or-later
"""Every integration target, on a host of the fleet with simulated hardware, after the site was brought up there."""

from __future__ import annotations

import pytest

from tests.e2e.conftest import ROOT, Site, ansible

TARGETS = sorted(path.parent.parent.name for path in (ROOT / "tests/integration/targets").glob("*/tasks/main.yml"))
MODULES = {path.stem for path in (ROOT / "plugins/modules").glob("*.py")}
# Tested where they are used: on the controller, in every role's own scenario, in that of the driver stack, and, those
# for hosts without Python, in that of the preprocessor.
WITHOUT_TARGET = {"site_preflight", "operation_state", "driver_stack_step"}
WITHOUT_TARGET |= {name for name in MODULES if name.startswith("raw_")}


def test_every_module_has_a_target() -> None:
    assert set(TARGETS) == MODULES - WITHOUT_TARGET


@pytest.mark.parametrize("target", TARGETS)
def test_target_passes(running_site: Site, target: str) -> None:
    finished = ansible(
        running_site.checkout, "ansible-playbook", "-e", f"target={target}", "tests/integration/target.yml"
    )
    assert finished.returncode == 0, finished.stdout[-6000:] + finished.stderr[-2000:]
