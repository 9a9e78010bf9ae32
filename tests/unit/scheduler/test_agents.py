# SPDX-License-Identifier: GPL-3.0-or-later
"""The adapter that follows the agents' streams, against servers that play agents, good and bad ones."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest
import pytest_asyncio
from aiohttp import web

from ringmaster_scheduler import agents
from ringmaster_scheduler.agents import AgentReader
from ringmaster_scheduler.domain import Agent
from ringmaster_scheduler.merge import LONGEST_LINE, AgentState, Change
from tests.unit.scheduler.fake_agent import FakeAgent

Speak = Callable[[web.StreamResponse, int], Awaitable[None]]


class Server:
    """Plays an agent: `speak` writes a stream, and is told which connection it is."""

    def __init__(self, speak: Speak) -> None:
        self.speak = speak
        self.connections = 0
        self.port = 0
        self._runner: web.AppRunner | None = None

    async def start(self) -> None:
        application = web.Application()
        application.add_routes([web.get("/v1/stream", self._stream)])
        self._runner = web.AppRunner(application, access_log=None, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        self.port = self._runner.addresses[0][1]

    async def stop(self) -> None:
        assert self._runner is not None
        await self._runner.cleanup()

    async def _stream(self, request: web.Request) -> web.StreamResponse:
        self.connections += 1
        response = web.StreamResponse(headers={"Content-Type": "application/x-ndjson"})
        await response.prepare(request)
        await self.speak(response, self.connections)
        return response


class Followed:
    """A reader and what it has handed on."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, bool]] = []
        self.states: dict[str, AgentState] = {}
        self.reader = AgentReader(self._observe)
        self.servers: list[Server] = []

    def _observe(self, state: AgentState, change: Change | None, now: float) -> None:
        self.states[state.host] = state
        self.seen.append((state.host, change is not None and change.snapshot))

    async def agent(self, speak: Speak, host: str = "a") -> Server:
        server = Server(speak)
        await server.start()
        self.servers.append(server)
        self.reader.follow([Agent(host, "127.0.0.1", server.port)])
        return server

    @property
    def error(self) -> str:
        return self.reader.followers["a"].error


@pytest_asyncio.fixture
async def followed(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Followed]:
    monkeypatch.setattr(agents, "_FIRST_WAIT", 0.02)
    monkeypatch.setattr(agents, "_HOSTILE_WAIT", 0.02)
    found = Followed()
    yield found
    await found.reader.close()
    for server in found.servers:
        await server.stop()


async def eventually(condition: Callable[[], bool]) -> None:
    deadline = asyncio.get_running_loop().time() + 60
    while not condition():
        assert asyncio.get_running_loop().time() < deadline, "did not come true"
        await asyncio.sleep(0.01)


async def rest(response: web.StreamResponse) -> None:
    """Keep a connection open."""
    await asyncio.sleep(120)


async def test_stream_is_followed_and_cut_lines_are_put_together(followed: Followed) -> None:
    agent = FakeAgent("a")
    agent.advance()

    async def speak(response: web.StreamResponse, _number: int) -> None:
        text = agent.snapshot() + b"\n" + agent.alive() + b"\n"
        for _unused in range(3):
            agent.advance()
            text += agent.change() + b"\n"
        for start in range(0, len(text), 999):
            await response.write(text[start : start + 999])
        await rest(response)

    await followed.agent(speak)
    await eventually(lambda: len(followed.seen) == 5)
    follower = followed.reader.followers["a"]
    assert (follower.error, follower.lines, follower.connections, follower.refused) == ("", 5, 1, 0)
    assert follower.connected_at is not None
    assert followed.states["a"].sequence == 3


async def test_gap_is_healed_by_a_new_connection(followed: Followed) -> None:
    agent = FakeAgent("a")

    async def speak(response: web.StreamResponse, number: int) -> None:
        agent.advance()
        await response.write(agent.snapshot() + b"\n")
        if number == 1:
            agent.change()
            agent.advance()
            await response.write(agent.change() + b"\n")
        await rest(response)

    server = await followed.agent(speak)
    await eventually(lambda: server.connections == 2 and len(followed.seen) == 2)
    assert followed.seen == [("a", True), ("a", True)]
    assert followed.reader.followers["a"].refused == 0


async def test_silence_ends_the_connection(followed: Followed, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agents, "SILENCE", 0.3)
    followed.reader._session._timeout = agents.aiohttp.ClientTimeout(total=None, sock_connect=3, sock_read=0.3)
    agent = FakeAgent("a")

    async def speak(response: web.StreamResponse, _number: int) -> None:
        await response.write(agent.snapshot() + b"\n")
        await rest(response)

    server = await followed.agent(speak)
    await eventually(lambda: server.connections >= 2)
    await eventually(lambda: followed.reader.followers["a"].connections >= 2)


HOSTILE: list[tuple[bytes, str]] = [
    (b"no json\n", "no JSON"),
    (b'{"schema": 9}\n', "expected schema 1"),
    (b"x" * (LONGEST_LINE + 2), f"a line of over {LONGEST_LINE} bytes"),
    (b"\n" * 2000, "over 1000 lines"),
    (b"\x00\xff\n", "no JSON"),
]


@pytest.mark.parametrize(("text", "message"), HOSTILE)
async def test_hostile_agent_is_cut_off_counted_and_said_once(
    text: bytes, message: str, followed: Followed, caplog: pytest.LogCaptureFixture
) -> None:
    async def speak(response: web.StreamResponse, _number: int) -> None:
        await response.write(text)
        await rest(response)

    await followed.agent(speak)
    await eventually(lambda: followed.reader.followers["a"].refused >= 3)
    assert message in followed.error
    assert len([record for record in caplog.records if message in record.message]) == 1
    assert followed.seen == []


async def test_fault_of_the_scheduler_costs_one_stream_only(
    followed: Followed, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    agent = FakeAgent("a")
    monkeypatch.setattr(followed.reader, "_observe", lambda *_unused: 1 / 0)

    async def speak(response: web.StreamResponse, _number: int) -> None:
        await response.write(agent.snapshot() + b"\n")
        await rest(response)

    server = await followed.agent(speak)
    await eventually(lambda: server.connections >= 2)
    assert "ZeroDivisionError" in caplog.text


async def test_agent_that_goes_and_comes(followed: Followed) -> None:
    agent = FakeAgent("a")

    async def speak(response: web.StreamResponse, number: int) -> None:
        agent.restart()
        await response.write(agent.snapshot() + b"\n")
        if number > 3:
            await rest(response)

    await followed.agent(speak)
    await eventually(lambda: len(followed.seen) >= 4)
    followed.reader.follow([])
    assert followed.reader.followers == {}
    seen = len(followed.seen)
    await asyncio.sleep(0.1)
    assert len(followed.seen) == seen


async def test_that_nobody_is_there_is_said(followed: Followed) -> None:
    server = await followed.agent(lambda response, _number: rest(response))
    await server.stop()
    followed.servers.clear()
    followed.reader.follow([])
    followed.reader.follow([Agent("a", "127.0.0.1", server.port)])
    await eventually(lambda: "Connect" in followed.error or "connect" in followed.error)
