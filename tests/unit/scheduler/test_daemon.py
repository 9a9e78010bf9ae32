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

PACKAGE_PARENT = Path(__file__).resolve().parents[3] / "roles" / "scheduler" / "files"


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
        return port


async def eventually(condition: Callable[[], Awaitable[bool]], seconds: float = 5.0) -> None:
    """Wait until the condition holds; how long that takes is no matter of these tests."""
    deadline = asyncio.get_running_loop().time() + seconds
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
        self.port = free_port()
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
        self.http_port = free_port()
        self.spoe_port = free_port()
        self.engines = [FakeEngine("a"), FakeEngine("b")]
        self.manager = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.manager.setblocking(False)
        self.manager_address = str(directory / "notify")
        self.manager.bind(self.manager_address)
        self.process: asyncio.subprocess.Process | None = None
        self.configuration.write_text(
            json.dumps(
                {
                    "http_address": "127.0.0.1",
                    "http_port": self.http_port,
                    "spoe_port": self.spoe_port,
                    "members_file": str(self.members),
                    "scrape_interval_ms": 50,
                    "scrape_timeout_ms": 200,
                    "stale_after_ms": 600,
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

    async def told(self) -> str:
        """Return the next datagram to the service manager that is not the watchdog's."""
        while True:
            data = await asyncio.wait_for(asyncio.get_running_loop().sock_recv(self.manager, 4096), 10)
            if data != b"WATCHDOG=1":
                return data.decode()

    async def stop(self, number: signal.Signals = signal.SIGTERM) -> tuple[int | None, str]:
        """End the process; return its exit status and its log."""
        assert self.process is not None
        if self.process.returncode is None:
            self.process.send_signal(number)
        output, _unused = await asyncio.wait_for(self.process.communicate(), 10)
        return self.process.returncode, output.decode()

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
        return (await asyncio.to_thread(probe, "127.0.0.1", self.spoe_port, 2.0, model))["decision"]


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
        if site.process is not None and site.process.returncode is None:
            await site.stop(signal.SIGKILL)
        for engine in site.engines:
            await engine.stop()
        site.manager.close()


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
    loop = asyncio.get_running_loop()
    for _unused in range(3):
        assert await asyncio.wait_for(loop.sock_recv(site.manager, 4096), 5) == b"WATCHDOG=1"


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
    reason = "no answer within 0.2 s" if fault == "hang" else "no vllm:num_requests_running"
    assert f"engine a is unhealthy: {reason}" in json.loads((await site.get("/healthz"))[1])["warnings"]


async def test_scheduler_that_stood_still_refuses_nothing(site: Site) -> None:
    await site.start()
    await eventually(lambda: all_healthy(site))
    assert site.process is not None
    site.process.send_signal(signal.SIGSTOP)
    await asyncio.sleep(1.0)  # longer than a reading stays good
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
    with socket.socket() as other:
        other.bind(("127.0.0.1", site.spoe_port))
        other.listen()
        await site.spawn()
        assert site.process is not None
        output, _unused = await asyncio.wait_for(site.process.communicate(), 10)
    assert site.process.returncode == 1
    assert "ERROR cannot listen" in output.decode()
    assert "Traceback" not in output.decode()


async def test_probe_says_what_is_wrong(site: Site) -> None:
    with pytest.raises(ProbeError, match=r"SPOE at 127\.0\.0\.1 port \d+: .*refused"):
        await site.decide()
    with pytest.raises(ProbeError, match="SPOE at 127"):
        await asyncio.to_thread(probe, "127.0.0.1", site.engines[0].port, 2.0)
