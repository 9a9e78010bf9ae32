# SPDX-License-Identifier: GPL-3.0-or-later
"""The whole daemon as a process of its own, with engines and an HAProxy that the test plays."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import pytest_asyncio
from aiohttp import web

from ringmaster_scheduler.probe import ProbeError, probe
from tests.support.ports import port_of, reserve_port

PACKAGE_PARENT = Path(__file__).resolve().parents[3] / "roles" / "scheduler" / "files"
PATIENCE = 60.0  # seconds until a test gives up waiting for something that has to happen
# Long enough for a busy machine not to make a good engine look bad, and no longer than it has to be waited for.
SCRAPE_TIMEOUT_MS = 1000
STALE_AFTER_MS = 2000


async def eventually(condition: Callable[[], Awaitable[bool]]) -> None:
    """Wait until the condition holds; how long that takes is no matter of these tests."""
    deadline = asyncio.get_running_loop().time() + PATIENCE
    while not await condition():
        assert asyncio.get_running_loop().time() < deadline, "did not come true"
        await asyncio.sleep(0.02)


class FakeEngine:
    """Answers /metrics with what the test sets; `hang` makes it answer not before it stops."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.running = 0
        self.hang = False
        self.page: bytes | None = None
        self.reservation = reserve_port()  # kept while the engine is stopped: it is to come back there
        self.port = port_of(self.reservation)
        self._runner: web.AppRunner | None = None
        self._stopping = asyncio.Event()

    async def start(self) -> None:
        application = web.Application()
        application.add_routes([web.get("/metrics", self._metrics)])
        self._runner = web.AppRunner(application, access_log=None)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", self.port).start()

    async def stop(self) -> None:
        self._stopping.set()
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    async def _metrics(self, _unused: web.Request) -> web.Response:
        if self.hang:
            await self._stopping.wait()
        page = f"vllm:num_requests_running {self.running}\nvllm:num_requests_waiting 0\nvllm:kv_cache_usage_perc 0.5\n"
        return web.Response(body=page.encode() if self.page is None else self.page)

    def member(self, **replaced: Any) -> dict[str, Any]:
        return {
            "name": self.name,
            "host": "host",
            "address": "127.0.0.1",
            "port": self.port,
            "kind": "standin",
            "model": "m",
            "adapters": [],
            "card": "<b>l40s</b>",
            "max_num_seqs": 100,
            "max_model_len": 4096,
            **replaced,
        }


class Site:
    """A scheduler's process and what it needs."""

    def __init__(self, directory: Path) -> None:
        self.members = directory / "members.json"
        self.configuration = directory / "scheduler.json"
        self.http_reservation, self.spoe_reservation = reserve_port(), reserve_port()
        self.http_port, self.spoe_port = port_of(self.http_reservation), port_of(self.spoe_reservation)
        self.engines = [FakeEngine("a"), FakeEngine("b")]
        self.manager = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.manager.setblocking(False)
        self.manager_address = str(directory / "notify")
        self.manager.bind(self.manager_address)
        # Read at once, as systemd does: the kernel keeps ten datagrams, and the watchdog alone would fill that.
        self.notifications: asyncio.Queue[str] = asyncio.Queue()
        self.listener = asyncio.get_running_loop().create_task(self._listen())
        self.process: asyncio.subprocess.Process | None = None
        self.configuration.write_text(
            json.dumps(
                {
                    "http_address": "127.0.0.1",
                    "http_port": self.http_port,
                    "spoe_port": self.spoe_port,
                    "members_file": str(self.members),
                    "scrape_interval_ms": 50,
                    "scrape_timeout_ms": SCRAPE_TIMEOUT_MS,
                    "stale_after_ms": STALE_AFTER_MS,
                    "placement_grace_ms": 50,
                }
            )
        )

    def write_members(self, *entries: dict[str, Any]) -> None:
        replacement = self.members.with_suffix(".new")
        replacement.write_text(json.dumps({"schema": 1, "engines": entries}))
        replacement.replace(self.members)

    async def spawn(self) -> None:
        self.process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "ringmaster_scheduler",
            "--config",
            str(self.configuration),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            env={
                **os.environ,
                "PYTHONPATH": str(PACKAGE_PARENT),
                "PYTHONDONTWRITEBYTECODE": "1",
                "NOTIFY_SOCKET": self.manager_address,
                "WATCHDOG_USEC": "200000",
            },
        )

    async def start(self) -> None:
        await self.spawn()
        assert await self.told() == "READY=1"

    async def _listen(self) -> None:
        while True:
            data = await asyncio.get_running_loop().sock_recv(self.manager, 4096)
            self.notifications.put_nowait(data.decode())

    async def notified(self) -> str:
        """Return the next datagram to the service manager."""
        return await asyncio.wait_for(self.notifications.get(), PATIENCE)

    async def told(self) -> str:
        """Return the next datagram to the service manager that is not the watchdog's."""
        while True:
            data = await self.notified()
            if data != "WATCHDOG=1":
                return data

    async def stop(self, number: signal.Signals = signal.SIGTERM) -> tuple[int | None, str]:
        """End the process; return its exit status and its log."""
        assert self.process is not None
        if self.process.returncode is None:
            self.process.send_signal(number)
        output, _unused = await asyncio.wait_for(self.process.communicate(), PATIENCE)
        return self.process.returncode, output.decode()

    async def close(self) -> None:
        """Give back whatever the site holds."""
        if self.process is not None and self.process.returncode is None:
            await self.stop(signal.SIGKILL)
        self.listener.cancel()
        await asyncio.gather(self.listener, return_exceptions=True)
        for engine in self.engines:
            await engine.stop()
            engine.reservation.close()
        for held in (self.manager, self.http_reservation, self.spoe_reservation):
            held.close()

    async def get(self, path: str) -> tuple[int, str]:
        async with (
            aiohttp.ClientSession() as session,
            session.get(f"http://127.0.0.1:{self.http_port}{path}") as response,
        ):
            return response.status, await response.text()

    async def health(self) -> dict[str, str]:
        _unused, text = await self.get("/v1/state")
        return {engine["name"]: engine["health"] for engine in json.loads(text)["engines"]}

    async def decide(self, model: str = "m") -> Any:
        return (await asyncio.to_thread(probe, "127.0.0.1", self.spoe_port, PATIENCE, model))["decision"]


@pytest_asyncio.fixture
async def site(tmp_path: Path) -> AsyncIterator[Site]:
    """A site with two engines that answer, and no scheduler yet."""
    site = Site(tmp_path)
    for engine in site.engines:
        await engine.start()
    site.write_members(*(engine.member() for engine in site.engines))
    try:
        yield site
    finally:
        await site.close()


async def all_healthy(site: Site) -> bool:
    return set((await site.health()).values()) == {"healthy"}


async def test_from_start_to_end(site: Site) -> None:
    await site.start()
    await eventually(lambda: all_healthy(site))
    assert (await site.get("/healthz"))[0] == 200
    site.engines[0].running = 50

    async def seen() -> bool:
        return '"running": 50' in (await site.get("/v1/state"))[1]

    await eventually(seen)
    assert [await site.decide() for _unused in range(3)] == [{"server": "b"}] * 3
    assert await site.decide("other") == {"status": 404}
    _unused, metrics = await site.get("/metrics")
    assert 'ringmaster_scheduler_decisions_total{outcome="placed"} 3.0' in metrics
    assert 'ringmaster_scheduler_placements_total{engine="b"} 3.0' in metrics
    assert 'ringmaster_scheduler_engine_running{engine="a"} 50.0' in metrics
    status, page = await site.get("/")
    assert status == 200
    assert "&lt;b&gt;l40s&lt;/b&gt;" in page
    assert "<b>" not in page
    status, log = await site.stop()
    assert status == 0
    assert await site.told() == "STOPPING=1"
    assert "Traceback" not in log


async def test_watchdog_is_fed(site: Site) -> None:
    await site.start()
    for _unused in range(3):
        assert await site.notified() == "WATCHDOG=1"


async def test_dead_engine_is_out_and_comes_back(site: Site) -> None:
    await site.start()
    await eventually(lambda: all_healthy(site))
    await site.engines[0].stop()

    async def out() -> bool:
        return await site.health() == {"a": "unhealthy", "b": "healthy"}

    await eventually(out)
    assert [await site.decide() for _unused in range(3)] == [{"server": "b"}] * 3
    await site.engines[1].stop()

    async def refused() -> bool:
        return bool(await site.decide() == {"status": 503, "retry_after": 5})

    await eventually(refused)
    status, text = await site.get("/healthz")
    document = json.loads(text)
    assert (status, document["reasons"]) == (503, ["no engine is healthy"])
    assert document["warnings"] == [f"engine {name} is unhealthy: cannot connect: Connection refused" for name in "ab"]
    await site.engines[0].start()

    async def back() -> bool:
        return bool(await site.decide() == {"server": "a"})

    await eventually(back)


@pytest.mark.parametrize("fault", ["hang", "page"])
async def test_engine_that_hangs_or_talks_nonsense_is_out_and_disturbs_no_other(site: Site, fault: str) -> None:
    await site.start()
    await eventually(lambda: all_healthy(site))
    setattr(site.engines[0], fault, True if fault == "hang" else b"<html>\xff</html>")

    async def out() -> bool:
        return await site.health() == {"a": "unhealthy", "b": "healthy"}

    await eventually(out)
    for _unused in range(20):
        assert await site.decide() == {"server": "b"}
        await asyncio.sleep(0.02)
    reason = f"no answer within {SCRAPE_TIMEOUT_MS / 1000:g} s" if fault == "hang" else "no vllm:num_requests_running"
    assert f"engine a is unhealthy: {reason}" in json.loads((await site.get("/healthz"))[1])["warnings"]


async def test_scheduler_that_stood_still_refuses_nothing(site: Site) -> None:
    await site.start()
    await eventually(lambda: all_healthy(site))
    assert site.process is not None
    site.process.send_signal(signal.SIGSTOP)
    # Longer than a reading stays good, and than twice the time-out: then the scheduler knows that it stood still.
    await asyncio.sleep((max(STALE_AFTER_MS, 2 * SCRAPE_TIMEOUT_MS) + 500) / 1000)
    waiting = [asyncio.create_task(site.decide()) for _unused in range(5)]
    await asyncio.sleep(0.1)
    site.process.send_signal(signal.SIGCONT)
    for decision in await asyncio.gather(*waiting):
        assert "status" not in decision
    await eventually(lambda: all_healthy(site))


async def test_members_are_followed(site: Site) -> None:
    site.members.unlink()
    await site.start()
    assert await site.decide() == {}
    status, text = await site.get("/healthz")
    assert status == 503
    assert json.loads(text)["reasons"] == [f"no members: {site.members}: No such file or directory"]
    site.write_members(site.engines[0].member())

    async def joined() -> bool:
        return await site.health() == {"a": "healthy"}

    await eventually(joined)
    site.members.write_text('{"schema": 1, "engines": [')
    assert site.process is not None
    site.process.send_signal(signal.SIGHUP)

    async def reported() -> bool:
        return "ringmaster_scheduler_members_current 0.0" in (await site.get("/metrics"))[1]

    await eventually(reported)
    assert await site.decide() == {"server": "a"}
    site.write_members(site.engines[1].member(adapters=["sql"]))

    async def replaced() -> bool:
        return await site.health() == {"b": "healthy"}

    await eventually(replaced)
    assert await site.decide("sql") == {"server": "b"}
    _unused, log = await site.stop()
    assert "members file not used" in log


async def test_address_that_is_taken_is_one_clear_line(site: Site) -> None:
    site.spoe_reservation.listen()
    await site.spawn()
    assert site.process is not None
    output, _unused = await asyncio.wait_for(site.process.communicate(), PATIENCE)
    assert site.process.returncode == 1
    assert "ERROR cannot listen" in output.decode()
    assert "Traceback" not in output.decode()


async def test_probe_says_what_is_wrong(site: Site) -> None:
    with pytest.raises(ProbeError, match=r"SPOE at 127\.0\.0\.1 port \d+: .*refused"):
        await site.decide()
    with pytest.raises(ProbeError, match="SPOE at 127"):
        await asyncio.to_thread(probe, "127.0.0.1", site.engines[0].port, PATIENCE)
