# SPDX-License-Identifier: GPL-3.0-or-later
"""Faults that can be switched on while the engine runs, by a JSON file.

``{"hang": {"until": null}, "slow": {"factor": 5, "until": 1790000000.5}}``: a fault is on while its name is in the
file, until the Unix time ``until`` if there is one.

=============== =======================================================================================
hang            requests are accepted and never answered; ``/health`` says 200, ``/metrics`` answers
slow            every step takes ``factor`` times as long (over 0, at most 1000; default 5)
garbage         answers come with status 200 and make no sense
crash           the process kills itself with SIGKILL; only if switched on after the process started, so that
                a restarted engine lives
oom_at_start    the process says that it is out of CUDA memory and exits with status 1 at its next start
=============== =======================================================================================
"""

from __future__ import annotations

import json
import logging
import os
import time
from pathlib import Path
from typing import Any

NAMES = frozenset({"hang", "slow", "garbage", "crash", "oom_at_start"})
DEFAULT_SLOW_FACTOR = 5.0
MAX_SLOW_FACTOR = 1000.0
"""Steps take tens of milliseconds: beyond this ``slow`` would be a hang that outlives its own end."""

logger = logging.getLogger("standin_engine.faults")


def parse(text: str) -> dict[str, dict[str, Any]]:
    """Read the document.

    Raises:
        ValueError: it is no JSON, or does not say what is written above.
    """
    document = json.loads(text)
    if not isinstance(document, dict):
        raise ValueError("the document is no object")
    for name, fault in document.items():
        if name not in NAMES:
            raise ValueError(f"unknown fault {name!r}")
        if not isinstance(fault, dict):
            raise ValueError(f"{name} is no object")
        until = fault.get("until")
        if until is not None and (isinstance(until, bool) or not isinstance(until, (int, float))):
            raise ValueError(f"{name}.until is neither a Unix time nor null")
        factor = fault.get("factor", DEFAULT_SLOW_FACTOR)
        if isinstance(factor, bool) or not isinstance(factor, (int, float)) or not 0 < factor <= MAX_SLOW_FACTOR:
            raise ValueError(f"{name}.factor is no number over 0 and at most {MAX_SLOW_FACTOR:g}")
    return document


class Faults:
    """The faults that are on now; ``refresh`` looks at the file.

    Args:
        path: the file; it need not exist.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._seen: tuple[int, ...] | None = None
        self._faults: dict[str, dict[str, Any]] = {}
        self._started = time.time()

    def refresh(self) -> None:
        """Read the file if it has changed; a broken one is said once, and the faults stay as they were."""
        if self._path is None:
            return
        try:
            status = os.stat(self._path)
            seen: tuple[int, ...] | None = (status.st_mtime_ns, status.st_size, status.st_ino)
        except OSError:
            seen = None
        if seen == self._seen:
            return
        self._seen = seen
        if seen is None:
            self._faults = {}
        else:
            try:
                self._faults = parse(self._path.read_text(encoding="utf-8"))
            except (OSError, ValueError) as error:
                logger.warning("The faults file %s is ignored, faults stay as they were: %s", self._path, error)
                return
        logger.info("Faults switched on: %s", ", ".join(sorted(self._faults)) or "none")

    def is_on(self, name: str) -> bool:
        """Whether a fault acts now."""
        fault = self._faults.get(name)
        if fault is None:
            return False
        until = fault.get("until")
        return until is None or time.time() < until

    @property
    def slow_factor(self) -> float:
        """Factor on the time of a step; 1 when the fault is off."""
        return float(self._faults["slow"].get("factor", DEFAULT_SLOW_FACTOR)) if self.is_on("slow") else 1.0

    @property
    def crash_is_due(self) -> bool:
        """Whether the process has to die: the file that says so is younger than the process."""
        return self.is_on("crash") and self._seen is not None and self._seen[0] / 1e9 >= self._started
