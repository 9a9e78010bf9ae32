# SPDX-License-Identifier: GPL-3.0-or-later
"""What the documentation of every module has to say, read as Ansible reads it: with its fragments."""

from __future__ import annotations

from pathlib import Path

import pytest
from ansible.plugins.loader import fragment_loader
from ansible.utils.plugin_docs import get_docstring

MODULES = sorted((Path(__file__).resolve().parents[4] / "plugins" / "modules").glob("*.py"))


@pytest.mark.parametrize("module", MODULES, ids=lambda module: module.stem)
def test_documentation_says_how_the_module_behaves(module: Path) -> None:
    documentation, examples, returned, _metadata = get_docstring(
        str(module), fragment_loader, collection_name="ringmaster.inference", plugin_type="module"
    )
    assert documentation["attributes"].keys() >= {"check_mode", "diff_mode", "idempotent", "platform"}
    for name, attribute in documentation["attributes"].items():
        assert attribute["support"] in ("full", "partial", "none"), name
        assert attribute["description"], name
    assert examples
    assert returned
