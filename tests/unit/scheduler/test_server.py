# SPDX-License-Identifier: GPL-3.0-or-later
"""The SPOE server on loopback, asked by an HAProxy written for the test."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest

from ringmaster_scheduler import server as server_module
from ringmaster_scheduler import spop
from ringmaster_scheduler.domain import Decision, Outcome, Request
from ringmaster_scheduler.server import MAX_FRAME_SIZE, SpoeServer, actions_for, request_from
from ringmaster_scheduler.spop import DataType, FrameType, Status

Decide = Callable[[Request], Decision]
PATIENCE = 60.0  # seconds until a test gives up waiting for something that has to happen


def place(request: Request) -> Decision:
    return Decision(Outcome.PLACED, engine=f"{request.model}.main")


def question(stream_id: int, model: str, message: str = "decide") -> bytes:
    return spop.encode_notify(stream_id, 1, [(message, [("model", DataType.STRING, model)])])


class FakeHAProxy:
    """One connection of HAProxy's."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    async def frame(self) -> tuple[spop.Frame, bytes]:
        prefix = await asyncio.wait_for(self.reader.readexactly(4), PATIENCE)
        encoded = prefix + await asyncio.wait_for(self.reader.readexactly(int.from_bytes(prefix, "big")), PATIENCE)
        return spop.decode_frame(encoded, 0, len(encoded)), encoded

    async def greet(self, size: int = 16380, healthcheck: bool = False) -> spop.AgentHello:
        self.writer.write(spop.encode_haproxy_hello(size, healthcheck))
        frame, encoded = await self.frame()
        assert frame.type == FrameType.AGENT_HELLO
        return spop.decode_agent_hello(encoded, frame.payload, len(encoded))

    async def answer(self) -> tuple[bytes, dict[str, spop.Value]]:
        frame, encoded = await self.frame()
        assert frame.type == FrameType.ACK
        variables = spop.decode_ack(encoded, frame.payload, len(encoded))
        assert all(variable.scope == spop.Scope.TRANSACTION for variable in variables)
        return frame.identifiers, {variable.name: variable.value for variable in variables}

    async def disconnected(self) -> int:
        """Return the status of the AGENT-DISCONNECT that came, after which the connection must end."""
        frame, encoded = await self.frame()
        assert frame.type == FrameType.AGENT_DISCONNECT
        assert await asyncio.wait_for(self.reader.read(), PATIENCE) == b""
        return spop.decode_disconnect(encoded, frame.payload, len(encoded)).status


@asynccontextmanager
async def connected(decide: Decide = place) -> AsyncIterator[tuple[FakeHAProxy, SpoeServer]]:
    server = SpoeServer(decide)
    await server.start("127.0.0.1", 0)
    assert server._server is not None
    port = server._server.sockets[0].getsockname()[1]  # type: ignore[attr-defined]
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        yield FakeHAProxy(reader, writer), server
    finally:
        writer.close()
        await server.stop(PATIENCE)
        assert not server.connections


async def test_answers_carry_the_identifiers_of_their_questions() -> None:
    async with connected() as (haproxy, _unused):
        assert await haproxy.greet() == ("2.0", 16380, "pipelining")
        for stream_id in (0, 239, 240, 70_000, 2**40):
            haproxy.writer.write(question(stream_id, "m"))
            assert await haproxy.answer() == (spop.encode_identifiers(stream_id, 1), {"server": "m.main"})


async def test_pipelined_questions_are_all_answered_whatever_the_reads() -> None:
    questions = [question(index, f"m{index}") for index in range(200)]
    stream = spop.encode_haproxy_hello(16380, healthcheck=False) + b"".join(questions)
    async with connected() as (haproxy, server):
        for size in (1, 7, 50, 3, 1000, 2, 20_000):  # sizes of what arrives at once
            haproxy.writer.write(stream[:size])
            stream = stream[size:]
            await haproxy.writer.drain()
            await asyncio.sleep(0.001)
        assert stream == b""
        frame, _unused = await haproxy.frame()
        assert frame.type == FrameType.AGENT_HELLO
        for index in range(200):
            assert await haproxy.answer() == (spop.encode_identifiers(index, 1), {"server": f"m{index}.main"})
        assert server.protocol_errors == 0


async def test_health_check_is_answered_and_closed() -> None:
    async with connected() as (haproxy, server):
        assert (await haproxy.greet(healthcheck=True)).version == "2.0"
        assert await asyncio.wait_for(haproxy.reader.read(), PATIENCE) == b""
        assert server.protocol_errors == 0


async def test_smaller_frame_size_holds() -> None:
    async with connected() as (haproxy, _unused):
        assert (await haproxy.greet(size=2**31)).max_frame_size == MAX_FRAME_SIZE
    async with connected() as (haproxy, _unused):
        assert (await haproxy.greet(size=300)).max_frame_size == 300
        haproxy.writer.write(question(1, "m" * 300))
        assert await haproxy.disconnected() == Status.FRAME_TOO_BIG


async def test_disconnect_is_answered() -> None:
    async with connected() as (haproxy, server):
        await haproxy.greet()
        haproxy.writer.write(spop.encode_disconnect(FrameType.HAPROXY_DISCONNECT, Status.NORMAL, "bye"))
        assert await haproxy.disconnected() == Status.NORMAL
        assert server.protocol_errors == 0


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (question(1, "m"), Status.INVALID_FRAME),  # before the greeting
        (spop.encode_frame(FrameType.HAPROXY_HELLO, b"\0\0", b""), Status.NO_VERSION),
        (b"GET / HTTP/1.1\r\n\r\n", Status.FRAME_TOO_BIG),
        (b"\0\0\0\0", Status.INVALID_FRAME),
    ],
)
async def test_wrong_start_is_refused(sent: bytes, status: Status) -> None:
    async with connected() as (haproxy, server):
        haproxy.writer.write(sent)
        assert await haproxy.disconnected() == status
        assert server.protocol_errors == 1


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (spop.encode_haproxy_hello(16380, healthcheck=False), Status.INVALID_FRAME),  # twice
        (spop.encode_frame(FrameType.ACK, b"\1\1", b""), Status.INVALID_FRAME),
        (spop.encode_frame(FrameType.NOTIFY, b"\1\1", b"\xff"), Status.INVALID_FRAME),
        (b"\0\0\0\x07\x03\0\0\0\0\1\1", Status.FRAGMENTATION_NOT_SUPPORTED),
    ],
)
async def test_wrong_frame_ends_the_connection_after_the_answers_before_it(sent: bytes, status: Status) -> None:
    async with connected() as (haproxy, _unused):
        await haproxy.greet()
        haproxy.writer.write(question(9, "m") + sent + question(10, "m"))
        assert await haproxy.answer() == (spop.encode_identifiers(9, 1), {"server": "m.main"})
        assert await haproxy.disconnected() == status


async def test_silent_connection_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "_HELLO_TIMEOUT", 0.05)
    async with connected() as (haproxy, _unused):
        assert await haproxy.disconnected() == Status.TIMEOUT


async def test_unknown_messages_are_acknowledged() -> None:
    async with connected() as (haproxy, _unused):
        await haproxy.greet()
        haproxy.writer.write(question(1, "m", message="later"))
        assert await haproxy.answer() == (spop.encode_identifiers(1, 1), {})
        haproxy.writer.write(spop.encode_notify(2, 1, [("later", []), ("decide", [("model", DataType.STRING, "m")])]))
        assert await haproxy.answer() == (spop.encode_identifiers(2, 1), {"server": "m.main"})


async def test_fault_in_the_decision_costs_the_answer_only(caplog: pytest.LogCaptureFixture) -> None:
    def decide(request: Request) -> Decision:
        if request.model == "bad":
            raise RuntimeError("a fault")
        return place(request)

    async with connected(decide) as (haproxy, server):
        await haproxy.greet()
        with caplog.at_level(logging.ERROR):
            haproxy.writer.write(question(1, "bad") + question(2, "m"))
            assert await haproxy.answer() == (spop.encode_identifiers(1, 1), {})
            assert await haproxy.answer() == (spop.encode_identifiers(2, 1), {"server": "m.main"})
        assert server.internal_errors == 1
        assert "a decision failed" in caplog.text


async def test_stop_says_goodbye_to_every_haproxy() -> None:
    async with connected() as (haproxy, server):
        await haproxy.greet()
        haproxy.writer.write(question(1, "m"))
        await haproxy.answer()
        await server.stop(PATIENCE)
        assert await haproxy.disconnected() == Status.NORMAL
        assert not server.listening


async def test_haproxy_that_takes_no_answers_is_read_no_further() -> None:
    async with connected() as (haproxy, server):
        await haproxy.greet()
        burst = b"".join(question(index, "m" * 1000) for index in range(100))

        async def send_without_reading() -> None:
            for _unused in range(2000):  # 200 MB
                haproxy.writer.write(burst)
                await haproxy.writer.drain()

        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(send_without_reading(), 1.0)
        (connection,) = server.connections
        assert connection._transport.get_write_buffer_size() < 4_000_000
        haproxy.writer.transport.abort()


@pytest.mark.parametrize(
    ("arguments", "request_meant"),
    [
        ({}, Request(None)),
        ({"model": None, "id": None, "prompt_tokens": None, "key_id": None}, Request(None)),
        ({"model": "", "prefix": ""}, Request(None)),
        ({"model": 7, "id": b"x", "prompt_tokens": "5", "body_bytes": True, "max_tokens": -1}, Request(None)),
        ({"model": "m", "prompt_tokens": 5, "later": b"x"}, Request("m", prompt_tokens=5)),
        (
            {
                "id": "i",
                "model": "m",
                "prompt_tokens": 1,
                "body_bytes": 2,
                "max_tokens": 0,
                "key_id": "k",
                "prefix": "p",
            },
            Request("m", "i", 1, 2, 0, "k", "p"),
        ),
    ],
)
def test_arguments_of_any_kind(arguments: dict[str, spop.Value], request_meant: Request) -> None:
    assert request_from(arguments) == request_meant


@pytest.mark.parametrize(
    ("decision", "variables"),
    [
        (
            Decision(Outcome.PLACED, engine="a.main", priority=2000, reason="least_loaded"),
            {"server": "a.main", "priority": 2000, "reason": "least_loaded"},
        ),
        (
            Decision(Outcome.QUEUED, priority=-5, retry_after=3, reason="queued"),
            {"priority": -5, "retry_after": 3, "reason": "queued"},
        ),
        (
            Decision(Outcome.UNKNOWN_MODEL, status=404, reason="unknown_model"),
            {"status": 404, "reason": "unknown_model"},
        ),
        (
            Decision(Outcome.NO_HEALTHY_ENGINE, status=503, retry_after=5, reason="no_engine"),
            {"status": 503, "retry_after": 5, "reason": "no_engine"},
        ),
        (Decision(Outcome.LEFT_TO_HAPROXY, reason="nothing_known"), {"reason": "nothing_known"}),
    ],
)
def test_variables_as_agreed(decision: Decision, variables: dict[str, spop.Value]) -> None:
    actions = actions_for(decision)
    assert {name: value for _unused, name, value in spop.decode_ack(actions, 0, len(actions))} == variables
