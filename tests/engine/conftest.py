# SPDX-License-Identifier: GPL-3.0-or-later
"""A fleet of its own with real vLLM on two hosts, for the tests of what no stand-in can show."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from rehearsal import real_engine
from rehearsal.checkout import Checkout
from tests.e2e.conftest import ROOT, Site, brought_up


@pytest.fixture(scope="session")
def real_site() -> Iterator[Site]:
    """The site with real engines."""
    checkout = Checkout(ROOT, ROOT / "inventories" / "rehearsal-vllm", ROOT / ".rehearsal-engine-test")
    with brought_up(checkout, real_engine.ensure) as site_up:
        yield site_up
