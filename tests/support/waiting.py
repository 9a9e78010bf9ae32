# SPDX-License-Identifier: GPL-3.0-or-later
"""Waiting in the benches, which are programs and end where a test would fail."""

from __future__ import annotations

import time
from collections.abc import Callable


def wait_until(condition: Callable[[], bool], what: str, patience: float) -> None:
    """Wait for something that has to happen, `patience` seconds at most. Raises SystemExit if it does not."""
    end = time.monotonic() + patience
    while not condition():
        if time.monotonic() > end:
            raise SystemExit(f"waited {patience:g} s in vain: {what}")
        time.sleep(0.1)
