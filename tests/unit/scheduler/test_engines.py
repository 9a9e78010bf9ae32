# SPDX-License-Identifier: GPL-3.0-or-later
"""The adapter that reads the engines' metrics, against a server that plays one."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest
from aiohttp import web

from ringmaster_scheduler.core import DecisionCore, Settings
from ringmaster_scheduler.domain import Engine, Health, Reading
from ringmaster_scheduler.engines import EngineReader

PAGE = "vllm:num_requests_running 0\nvllm:num_requests_waiting 0\n"


async def test_fault_with_one_reading_costs_no_other_and_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    seen: list[Reading] = []

    def observe(engine: Engine, reading: Reading, placed_at: Sequence[float]) -> None:
        seen.append(reading)
        if len(seen) <= 3:
            raise KeyError("a fault of this program")

    async def metrics(request: web.Request) -> web.Response:
        return web.Response(text=PAGE)

    application = web.Application()
    application.add_routes([web.get("/metrics", metrics)])
    runner = web.AppRunner(application, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    engine = Engine("a.main", "a", "127.0.0.1", runner.addresses[0][1], "vllm", "m", (), "a100-80g", 8)
    core = DecisionCore(Settings(stale_after=10.0, placement_grace=0.5, retry_after=5))
    core.set_engines([engine])
    reader = EngineReader(core, observe, interval=0.01, timeout=5.0)
    try:
        reader.follow([engine])
        for _unused in range(3000):
            if len(seen) >= 6:
                break
            await asyncio.sleep(0.01)
        [view] = core.views(asyncio.get_running_loop().time())
    finally:
        await reader.close()
        await runner.cleanup()
    assert view.health is Health.HEALTHY
    assert view.reason == ""
    assert reader.failures == {"a.main": 3}
    assert len([record for record in caplog.records if "a reading of engine a.main" in record.message]) == 1
