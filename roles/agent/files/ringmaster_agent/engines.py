# SPDX-License-Identifier: GPL-3.0-or-later
"""Reads the metrics of this host's engines, each for itself, so that one that hangs holds up no other."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import fields
from typing import Any, Final, Optional

from ansible_collections.ringmaster.inference.plugins.module_utils import engine_metrics
from ringmaster_agent.configuration import Engine
from ringmaster_agent.hardware_process import boottime
from ringmaster_agent.http_client import Page, PagePoller
from ringmaster_agent.progress import Progress

Take = Callable[[Engine, Optional[dict[str, Any]], str], None]
"""Takes the quantities of an engine, or None and why there are none."""

_QUANTITIES: Final = tuple(field.name for field in fields(engine_metrics.EngineMetrics))


class EngineReader:
    """Reads one engine. `interval` and `timeout` in seconds."""

    def __init__(self, engine: Engine, interval: float, timeout: float, take: Take) -> None:
        self.engine = engine
        self._take = take
        self._poller = PagePoller(engine.address, engine.port, "/metrics", interval, timeout, self._take_page)
        self._progress = Progress()
        self.answered_at: float | None = None

    async def run(self, phase: float) -> None:
        """Read for ever, `phase` seconds after the other readers."""
        await asyncio.sleep(phase)
        await self._poller.run()

    def _take_page(self, page: Page | None, reason: str) -> None:
        if page is None:
            self._take(self.engine, None, reason)
            return
        status, body = page
        if status != 200:
            self._take(self.engine, None, f"/metrics answers HTTP status {status}")
            return
        try:
            metrics = engine_metrics.parse(body)
        except engine_metrics.EngineMetricsError as error:
            self._take(self.engine, None, str(error))
            return
        self.answered_at = boottime()
        quantities = {name: getattr(metrics, name) for name in _QUANTITIES}
        quantities["stalled_seconds"] = self._progress.stalled(metrics, self.answered_at)
        self._take(self.engine, quantities, "")
