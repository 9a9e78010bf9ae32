# SPDX-License-Identifier: GPL-3.0-or-later
"""A fleet of its own with real vLLM on two hosts, for the tests of what no stand-in can show."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from rehearsal import fleet, real_engine, site
from rehearsal.checkout import Checkout
from tests.e2e.conftest import Site

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="session")
def real_site() -> Iterator[Site]:
    """The site with real engines after the first run of the main job."""
    checkout = Checkout(ROOT, ROOT / "inventories" / "rehearsal-vllm", ROOT / ".rehearsal-engine-test")
    try:
        real_engine.ensure(checkout)
        started = time.time()
        status = site.run(checkout, [])
        document = site.newest_evidence(checkout, started)
        assert status == 0, "the main job failed; its output above says what was expected and what to do"
        assert document is not None, "the main job wrote no evidence"
        yield Site(checkout, fleet.addresses(checkout), document)
    finally:
        if not os.environ.get("KEEP_FLEET"):
            fleet.down(checkout, keep_images=True)
