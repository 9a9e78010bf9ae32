# SPDX-License-Identifier: GPL-3.0-or-later
"""What the unit tests share: the import paths of the checkout and the settings of hypothesis."""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from tests.support.controller import Controller

CHECKOUT = Path(__file__).resolve().parents[2]
COLLECTIONS = CHECKOUT / ".cache" / "collections"


def link_collection() -> None:
    """Make the checkout importable as ``ansible_collections.ringmaster.inference``, whatever its own folder is named.

    Ansible asks for the parent folders ``ansible_collections/ringmaster/``; a link under ``.cache`` provides them. It
    is replaced in one step, so that two test runs in one checkout do not disturb each other.
    """
    link = COLLECTIONS / "ansible_collections" / "ringmaster" / "inference"
    link.parent.mkdir(parents=True, exist_ok=True)
    if link.is_symlink() and link.readlink() == CHECKOUT:
        return
    replacement = link.with_name(f"inference.{os.getpid()}")
    replacement.symlink_to(CHECKOUT)
    replacement.replace(link)


def import_roots() -> list[str]:
    """Return the folders from which the daemons in the roles are imported: above each outermost package or program."""
    roots = set()
    for file in CHECKOUT.glob("roles/*/files/**/*.py"):
        folder = file.parent
        while (folder / "__init__.py").exists():
            folder = folder.parent
        roots.add(str(folder))
    return sorted(roots)


link_collection()
os.environ["ANSIBLE_COLLECTIONS_PATH"] = str(COLLECTIONS)  # for tests that start ansible-playbook or ansible-doc
sys.path[:0] = [str(COLLECTIONS), str(CHECKOUT), *import_roots()]
# Ansible's own importer of collections has to be there before the first import of one, whichever test comes first.
importlib.import_module("ansible.plugins.loader").init_plugin_loader([str(COLLECTIONS)])

# Same examples in each run: a red test is red for everybody. New ground is broken on purpose, with
# HYPOTHESIS_PROFILE=explore, which keeps what it finds in .hypothesis/.
settings.register_profile(
    "checkout",
    derandomize=True,
    deadline=None,
    max_examples=100,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.register_profile("explore", settings.get_profile("checkout"), derandomize=False, max_examples=5000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "checkout"))


@pytest.fixture
def controller(tmp_path: Path) -> Controller:
    return Controller(tmp_path)
