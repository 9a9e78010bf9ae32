# SPDX-License-Identifier: GPL-3.0-or-later
"""Each test that asks for ``version`` runs once with each HAProxy there is."""

from __future__ import annotations

import pytest

from tests.unit.edge.loopback_site import HAPROXIES


@pytest.fixture(scope="module", params=sorted(HAPROXIES) or [None])
def version(request: pytest.FixtureRequest) -> str:
    """Return a version of HAProxy, major and minor."""
    if request.param is None:
        pytest.fail("expected HAProxy, found none; to do: run the tests with tests/run/unit, which unpacks it")
    return str(request.param)
