# SPDX-License-Identifier: GPL-3.0-or-later
"""The whole daemon as a process of its own, with engines and an HAProxy that the test plays."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import pytest_asyncio
from aiohttp import web

from ringmaster_scheduler import control_program
from ringmaster_scheduler.configuration import Configuration
from ringmaster_scheduler.daemon import Daemon
from ringmaster_scheduler.probe import ProbeError, probe
from tests.support.ports import port_of, reserve_port
from tests.unit.scheduler.fake_agent import TABLE, FakeAgent
from tests.unit.scheduler.fake_consul import FakeConsul, instance
from tests.unit.scheduler.fake_haproxy import FakeHaproxy, FakeServer

PACKAGE_PARENT = Path(__file__).resolve().parents[3] / "roles" / "scheduler" / "files"
# What the role copies beside the program; here it comes from the checkout.
COLLECTIONS = Path(__file__).resolve().parents[3] / ".cache" / "collections"
PATIENCE = 60.0  # seconds until a test gives up waiting for something that has to happen
# Long enough for a busy machine not to make a good engine look bad, and no longer than it has to be waited for.
SCRAPE_TIMEOUT_MS = 1000
STALE_AFTER_MS = 2000


TOKEN = "a-token-of-the-test"


def free_udp_port() -> int:
    """Of UDP a port can't be reserved: whoever is bound to it takes its datagrams."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as receiver:
        receiver.bind(("127.0.0.1", 0))
        return int(receiver.getsockname()[1])


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
        self.log_port = free_udp_port()
        self.haproxy = FakeHaproxy(directory / "admin.sock", servers={"a": FakeServer(), "b": FakeServer()})
        self.token = directory / "token"
        self.token.write_text(f"{TOKEN}\n")
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
                    "log_port": self.log_port,
                    "haproxy_socket": str(self.haproxy.path),
                    "look_interval_ms": 50,
                    # Nothing that a test asks for is ever served, so that all of it counts as work before an engine.
                    "policy": {"prefill_window": 60},
                    "token_file": str(self.token),
                    "drained_file": str(directory / "drained.json"),
                    "kept_file": str(directory / "out.json"),
                    "health_rules": {
                        "hung": {**TABLE["hung"], "window_s": 1, "hold_s": 0},
                        "card_lost": {**TABLE["card_lost"], "window_s": 0.2, "hold_s": 0},
                        "pcie_link_narrow": {**TABLE["pcie_link_narrow"], "window_s": 0.2, "hold_s": 0, "back": 1},
                    },
                }
            )
        )

    def write_members(self, *entries: dict[str, Any], agents: Sequence[dict[str, Any]] = ()) -> None:
        replacement = self.members.with_suffix(".new")
        replacement.write_text(json.dumps({"schema": 1, "engines": entries, "agents": agents}))
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
                "PYTHONPATH": f"{PACKAGE_PARENT}:{COLLECTIONS}",
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
        await self.haproxy.stop()
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

    async def decide(self, model: str = "m") -> dict[str, Any]:
        """Return what HAProxy is told, without what says why and until when."""
        answer = await asyncio.to_thread(probe, "127.0.0.1", self.spoe_port, PATIENCE, model)
        decision = answer["decision"]
        assert isinstance(decision, dict)
        return {name: value for name, value in decision.items() if name not in ("reason", "priority")}

    async def post(self, path: str, token: str | None = None) -> tuple[int, Any]:
        headers = {} if token is None else {"Authorization": f"Bearer {token}"}
        async with (
            aiohttp.ClientSession() as session,
            session.post(f"http://127.0.0.1:{self.http_port}{path}", headers=headers) as response,
        ):
            return response.status, await response.json()

    def log(self, line: bytes) -> None:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender:
            sender.sendto(line, ("127.0.0.1", self.log_port))

    async def ctl(self, *arguments: str) -> tuple[int, str]:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-I",
            str(PACKAGE_PARENT / "ringmaster_scheduler" / "control_program.py"),
            f"--url=http://127.0.0.1:{self.http_port}",
            f"--token-file={self.token}",
            *arguments,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        output, _unused = await asyncio.wait_for(process.communicate(), PATIENCE)
        assert process.returncode is not None
        return process.returncode, output.decode()


@pytest_asyncio.fixture
async def site(tmp_path: Path) -> AsyncIterator[Site]:
    """A site with two engines that answer, and no scheduler yet."""
    site = Site(tmp_path)
    for engine in site.engines:
        await engine.start()
    await site.haproxy.start()
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


async def weights(site: Site) -> dict[str, float]:
    _unused, text = await site.get("/v1/state")
    return {engine["name"]: engine["weight"] for engine in json.loads(text)["engines"]}


async def test_hung_engine_gets_nothing_until_it_moves_and_a_restart_of_the_scheduler_keeps_that(site: Site) -> None:
    def page(running: int, tokens: int) -> bytes:
        return (
            f"vllm:num_requests_running {running}\nvllm:num_requests_waiting 0\nvllm:generation_tokens_total {tokens}\n"
        ).encode()

    site.engines[0].page, site.engines[1].page = page(0, 7), page(0, 7)
    await site.start()
    await eventually(lambda: all_healthy(site))
    site.engines[0].page = page(3, 7)

    async def out() -> bool:
        return await weights(site) == {"a": 0.0, "b": 1.0}

    await eventually(out)
    assert [await site.decide() for _unused in range(4)] == [{"server": "b"}] * 4
    status, text = await site.ctl("explain-node", "a")
    assert status == 0
    assert "weight out" in text
    assert "gets nothing: hung on engine/a" in text
    _unused, metrics = await site.get("/metrics")
    assert 'ringmaster_scheduler_engine_rule_active{engine="a",rule="hung"} 1.0' in metrics
    assert 'ringmaster_scheduler_weight_changes_total{engine="a"} 1.0' in metrics

    async def drained() -> bool:
        return site.haproxy.servers["a"].status == "DRAIN"

    await eventually(drained)
    assert "hung on engine/a" in (await site.get("/"))[1]
    _unused_status, log = await site.stop()
    assert "engine a has weight 0, had 1: hung on engine/a: 3 requests run" in log
    assert site.haproxy.servers["a"].status == "DRAIN"
    assert await site.told() == "STOPPING=1"
    await site.start()
    assert await weights(site) == {"a": 0.0, "b": 1.0}
    site.engines[0].page = page(3, 8)

    async def back() -> bool:
        return await weights(site) == {"a": 1.0, "b": 1.0} and site.haproxy.servers["a"].status == "UP"

    await eventually(back)


async def test_agent_that_tells_of_a_fault_moves_the_weight(site: Site) -> None:
    agent = FakeAgent("host")

    async def stream(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "application/x-ndjson"})
        await response.prepare(request)
        await response.write(agent.snapshot() + b"\n")
        while True:
            await asyncio.sleep(0.1)
            agent.advance(0.1)
            await response.write(agent.change() + b"\n")

    application = web.Application()
    application.add_routes([web.get("/v1/stream", stream)])
    runner = web.AppRunner(application, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    port = runner.addresses[0][1]
    try:
        members = [engine.member() for engine in site.engines]
        members[1]["host"] = "another"
        site.write_members(*members, agents=[{"host": "host", "address": "127.0.0.1", "port": port}])
        await site.start()
        await eventually(lambda: all_healthy(site))
        agent.gpu["pcie_width"] = 8

        async def half() -> bool:
            return await weights(site) == {"a": 0.5, "b": 1.0} and site.haproxy.servers["a"].weight == 50

        await eventually(half)
        _unused, text = await site.get("/v1/nodes/a")
        (node,) = json.loads(text)["nodes"]
        assert (node["host"], node["agent"]["up"], node["agent"]["error"]) == ("host", True, "")
        assert node["engines"][0]["reasons"][0]["rule"] == "pcie_link_narrow"
        assert (await site.get("/v1/nodes/nobody"))[0] == 404
        assert 'ringmaster_scheduler_agent_up{host="host"} 1.0' in (await site.get("/metrics"))[1]
        status, shown = await site.ctl("rules")
        assert status == 0
        assert "pcie_link_narrow" in shown
        assert "0.5" in (await site.ctl("status"))[1]
        agent.gpu["pcie_width"] = 16

        async def whole() -> bool:
            return await weights(site) == {"a": 1.0, "b": 1.0}

        await eventually(whole)
    finally:
        await runner.cleanup()


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

    async def named() -> bool:  # HAProxy has to be given the server first
        return await site.decide("sql") == {"server": "b"}

    await eventually(named)
    _unused, log = await site.stop()
    assert "members file not used" in log


async def test_connections_to_the_interface_are_limited_and_questions_of_haproxy_are_not(site: Site) -> None:
    await site.start()
    await eventually(lambda: all_healthy(site))
    half = [await asyncio.open_connection("127.0.0.1", site.http_port) for _unused in range(300)]
    for _reader, writer in half:
        writer.write(b"GET /metrics HTTP/1.1\r\nHost: ")
    ends = await asyncio.gather(
        *(asyncio.wait_for(reader.read(1), 1) for reader, _writer in half), return_exceptions=True
    )
    # One that was refused is reset, or at its end; the others wait for the rest of what they ask.
    assert sum(not isinstance(end, asyncio.TimeoutError) for end in ends) >= 40
    assert "server" in await site.decide()
    for _reader, writer in half:
        writer.close()

    async def answers() -> bool:
        with contextlib.suppress(aiohttp.ClientError):
            return (await site.get("/healthz"))[0] == 200
        return False

    await eventually(answers)


async def test_drains_that_cannot_be_read_are_said(site: Site) -> None:
    (site.configuration.parent / "drained.json").write_text("garbage")
    await site.start()
    assert "drains may be forgotten" in (await site.get("/healthz"))[1]
    _unused, log = await site.stop()
    assert "drained engines are not known" in log


@pytest.mark.parametrize("arguments", [["--json", "rules"], ["rules", "--json"]])
async def test_json_is_asked_for_before_or_behind_the_command(site: Site, arguments: list[str]) -> None:
    await site.start()
    status, text = await site.ctl(*arguments)
    assert status == 0
    assert "policy" in json.loads(text)


async def test_url_that_is_none_is_one_clear_line(site: Site) -> None:
    status, text = await site.ctl("--url=nonsense", "rules")
    assert (status, text.count("\n")) == (1, 1)
    assert "nonsense" in text


async def test_part_that_fails_ends_the_daemon(caplog: pytest.LogCaptureFixture) -> None:
    """Half a scheduler would go on to decide on counts that nobody brings any more."""

    async def fail() -> None:
        raise RuntimeError("of the test")

    daemon = Daemon(Configuration("127.0.0.1"))
    task = asyncio.get_running_loop().create_task(fail())
    task.add_done_callback(daemon._look_at_the_end)
    await asyncio.wait([task])
    await asyncio.sleep(0)
    assert daemon.failed
    assert daemon._stop.is_set()
    assert "of the test" in caplog.text
    await daemon._close()


async def test_address_that_is_taken_is_one_clear_line(site: Site) -> None:
    site.spoe_reservation.listen()
    await site.spawn()
    assert site.process is not None
    output, _unused = await asyncio.wait_for(site.process.communicate(), PATIENCE)
    assert site.process.returncode == 1
    assert "ERROR cannot listen" in output.decode()
    assert "Traceback" not in output.decode()


async def haproxy_follows(site: Site) -> bool:
    return "haproxy_follows 1.0" in (await site.get("/metrics"))[1]


async def test_only_a_token_drains_and_a_restart_keeps_it(site: Site) -> None:
    await site.start()
    await eventually(lambda: all_healthy(site))
    path = "/v1/engines/a/drain"
    assert (await site.post(path))[0] == 401
    assert (await site.post(path, "wrong"))[0] == 401
    assert (await site.post("/v1/engines/nobody/drain", TOKEN))[0] == 404
    assert [await site.decide() for _unused in range(2)] != [{"server": "b"}] * 2
    assert await site.post(path, TOKEN) == (200, {"engine": "a", "drained": True, "changed": True})
    assert await site.post(path, TOKEN) == (200, {"engine": "a", "drained": True, "changed": False})
    assert [await site.decide() for _unused in range(3)] == [{"server": "b"}] * 3
    await eventually(lambda: status_of(site, "a", "DRAIN"))
    await site.stop()
    assert await site.told() == "STOPPING=1"
    site.haproxy.servers["a"].status = "UP"
    await site.start()
    await eventually(lambda: all_healthy(site))
    assert [await site.decide() for _unused in range(3)] == [{"server": "b"}] * 3
    await eventually(lambda: status_of(site, "a", "DRAIN"))
    assert (await site.post("/v1/engines/a/undrain", TOKEN))[0] == 200
    await eventually(lambda: status_of(site, "a", "UP"))


async def status_of(site: Site, name: str, status: str) -> bool:
    return site.haproxy.servers[name].status == status


async def test_without_a_token_nothing_can_be_changed(site: Site) -> None:
    content = json.loads(site.configuration.read_text())
    site.configuration.write_text(json.dumps({**content, "token_file": ""}))
    await site.start()
    assert (await site.post("/v1/engines/a/drain", ""))[0] == 403


async def test_log_lines_end_requests_and_junk_does_not(site: Site) -> None:
    await site.start()
    await eventually(lambda: all_healthy(site))
    await eventually(lambda: haproxy_follows(site))
    for junk in (b"", b"\xff" * 100, b"{", b"[]", b'{"request_id":"x"}', b"[" * 50_000):
        site.log(junk)
    site.log(b'{"request_id":"x","engine":"a","status":200,"ms_queue":-1,"ms_first_byte":5,"ms_total":9}')

    async def counted() -> bool:
        _unused, metrics = await site.get("/metrics")
        return "log_lines_total 1.0" in metrics and "log_errors_total 6.0" in metrics

    await eventually(counted)
    _unused, log = await site.stop()
    assert "Traceback" not in log


async def test_restarted_scheduler_knows_what_haproxy_holds(site: Site) -> None:
    site.haproxy.servers["a"].current = 40
    site.haproxy.servers["b"].current = 2
    await site.start()
    await eventually(lambda: all_healthy(site))
    await eventually(lambda: haproxy_follows(site))

    async def known() -> bool:
        engines = json.loads((await site.get("/v1/state"))[1])["engines"]
        return [engine["held"] for engine in engines] == [40, 2]

    await eventually(known)
    assert [await site.decide() for _unused in range(5)] == [{"server": "b"}] * 5


async def test_killed_scheduler_leaves_caps_that_the_unit_releases(site: Site) -> None:
    await site.start()
    await eventually(lambda: haproxy_follows(site))
    await site.stop(signal.SIGKILL)
    site.haproxy.servers["a"].maxconn = 1
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "ringmaster_scheduler",
        "--config",
        str(site.configuration),
        "--release",
        env={**os.environ, "PYTHONPATH": f"{PACKAGE_PARENT}:{COLLECTIONS}", "PYTHONDONTWRITEBYTECODE": "1"},
    )
    assert await asyncio.wait_for(process.wait(), 10) == 0
    assert [server.maxconn for server in site.haproxy.servers.values()] == [100, 100]


async def test_scheduler_without_an_haproxy_still_decides(site: Site) -> None:
    await site.haproxy.stop()
    await site.start()
    await eventually(lambda: all_healthy(site))
    assert {tuple((await site.decide()).items()) for _unused in range(4)} == {(("server", "a"),), (("server", "b"),)}
    warnings = json.loads((await site.get("/healthz"))[1])["warnings"]
    assert any(text.startswith("HAProxy does not follow: ") for text in warnings)


async def test_ringmasterctl(site: Site) -> None:
    await site.start()
    await eventually(lambda: all_healthy(site))
    await site.decide()
    status, text = await site.ctl("status")
    assert (status, text.splitlines()[0][:2]) == (0, "ok")
    assert "ENGINE" in text
    assert "unhealthy" not in text
    status, text = await site.ctl("--json", "status")
    assert [engine["name"] for engine in json.loads(text)["engines"]] == ["a", "b"]
    assert await site.ctl("queue") == (0, "Nobody waits.\n")
    assert "prefill_window" in (await site.ctl("rules"))[1]
    assert "placed (least_loaded)" in (await site.ctl("explain"))[1]
    status, text = await site.ctl("explain", "../../v1/state")
    assert (status, text.partition(":")[0], "is kept: the edge refused it" in text) == (1, "ringmasterctl", True)
    status, text = await site.ctl("drain", "host")  # the host of both
    assert (status, [line.split() for line in text.splitlines()][1:]) == (0, [["a", "yes", "yes"], ["b", "yes", "yes"]])
    assert await site.decide() == {"status": 503, "retry_after": 5}
    assert (await site.ctl("undrain", "b"))[0] == 0
    assert await site.decide() == {"server": "b"}
    status, text = await site.ctl("drain", "nobody")
    assert (status, text) == (1, "ringmasterctl: no engine or host is named nobody; known: a, b\n")
    site.token.write_text("wrong")
    assert (await site.ctl("drain", "b"))[0] == 1
    await site.stop()
    status, text = await site.ctl("status")
    assert status == 1
    assert "is ringmaster-scheduler.service running?" in text


def test_table_of_hostile_names() -> None:
    text = control_program.table(("A", "B"), [("\x1b[2Jname\n", 1.5), (None, None)])
    assert text == "A            B\n?[2Jname?  1.5\n-            -"


async def test_probe_says_what_is_wrong(site: Site) -> None:
    with pytest.raises(ProbeError, match=r"SPOE at 127\.0\.0\.1 port \d+: .*refused"):
        await site.decide()
    with pytest.raises(ProbeError, match="SPOE at 127"):
        await asyncio.to_thread(probe, "127.0.0.1", site.engines[0].port, PATIENCE)


async def test_what_was_kept_outlasts_a_start_without_members(site: Site) -> None:
    rule = {"kind": "canary", "scope": "engine", "rule": "canary_wrong", "subject": "a.main", "text": "answers wrong"}
    kept = site.members.parent / "out.json"
    kept.write_text(json.dumps({"rules": [rule], "out": ["a.main"]}))
    site.members.write_text("{")
    await site.start()
    await asyncio.sleep(1)  # several times the interval in which weights are worked out
    assert json.loads(kept.read_text())["out"] == ["a.main"]


async def test_consul_is_followed_and_its_loss_outlived_also_by_a_new_process(site: Site, tmp_path: Path) -> None:
    registry = FakeConsul()
    listed = [instance("engines", engine.member()) for engine in site.engines]
    registry.set(listed)
    configuration = json.loads(site.configuration.read_text())
    kept = tmp_path / "kept.json"
    configuration.update(members_from="consul", consul_addresses=[registry.address], consul_wait_ms=200)
    configuration.update(consul_kept_file=str(kept), consul_token_file=str(site.token))
    site.configuration.write_text(json.dumps(configuration))
    site.members.unlink()
    await registry.start()
    try:
        await site.start()
        await eventually(lambda: all_healthy(site))
        assert set(registry.tokens) == {TOKEN}
        assert json.loads((await site.get("/v1/state"))[1])["members"]["from"] == "registry"

        # In maintenance for the whole site: drained here, though nobody drained it here.
        registry.set([instance("engines", site.engines[0].member(), "_service_maintenance:ID"), listed[1]])

        async def drained() -> bool:
            return "engine a is drained" in (await site.get("/healthz"))[1]

        await eventually(drained)
        assert [await site.decide() for _unused in range(3)] == [{"server": "b"}] * 3
        assert (await site.post("/v1/engines/b/drain", TOKEN))[0] == 200
        assert (await site.post("/v1/engines/b/undrain", TOKEN))[0] == 200
        assert await drained()

        # A catalog that was lost fills up again: who is missing stays meanwhile, which is said.
        registry.set([instance("engines", site.engines[0].member(), "_service_maintenance:ID")], index=3)

        async def held() -> bool:
            return (
                "engine b is kept for a while, though the registry lists it no more" in (await site.get("/healthz"))[1]
            )

        await eventually(held)
        assert json.loads((await site.get("/v1/state"))[1])["members"]["held"] == ["b"]
        assert await site.decide() == {"server": "b"}

        await registry.stop()

        async def said() -> bool:
            return "members registry not used, former members kept" in (await site.get("/healthz"))[1]

        await eventually(said)
        assert "ringmaster_scheduler_members_current 0.0" in (await site.get("/metrics"))[1]
        await site.stop(signal.SIGKILL)
        await site.start()
        await eventually(lambda: all_healthy(site))
        await eventually(drained)
        assert [await site.decide() for _unused in range(3)] == [{"server": "b"}] * 3
        assert await said()
        assert not site.members.exists()
    finally:
        await registry.close()
