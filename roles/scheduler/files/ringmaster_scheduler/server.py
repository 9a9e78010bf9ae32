# SPDX-License-Identifier: GPL-3.0-or-later
"""The scheduler as HAProxy's SPOE agent.

One `asyncio.Protocol` a connection, without streams or tasks: everything that a read brought is answered before the
next read, in one write. An answer is never held back, for HAProxy would not see its client leave meanwhile.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Final, cast

from ringmaster_scheduler import spop
from ringmaster_scheduler.domain import Decision, Request

MESSAGE: Final = "decide"
# Arguments are short; HAProxy offers its own buffer's size, and the smaller of the two holds.
MAX_FRAME_SIZE: Final = 1024 * 1024
# HAProxy speaks at once; whoever does not is no HAProxy. In seconds.
_HELLO_TIMEOUT: Final = 5.0
_BACKLOG: Final = 1024

logger = logging.getLogger(__name__)


def request_from(arguments: Mapping[str, spop.Value]) -> Request:
    """Return the question in a message's arguments.

    One of another type than agreed counts as missing: HAProxy is configured on its own, maybe by a newer release.
    """
    get = arguments.get
    model = get("model")
    return Request(
        model if isinstance(model, str) and model else None,
        _text(get("id")),
        _count(get("prompt_tokens")),
        _count(get("body_bytes")),
        _count(get("max_tokens")),
        _text(get("key_id")),
        _text(get("prefix")) or None,
    )


def _text(value: spop.Value) -> str:
    return value if isinstance(value, str) else ""


def _count(value: spop.Value) -> int | None:
    return value if isinstance(value, int) and value >= 0 and value is not True and value is not False else None


@lru_cache(maxsize=16384)
def _fixed_actions(engine: str | None, status: int, reason: str) -> bytes:
    """Return the actions for what is the same in many decisions."""
    actions = b""
    if engine is not None:
        actions += spop.encode_set_variable(spop.Scope.TRANSACTION, "server", spop.DataType.STRING, engine)
    if status:
        actions += spop.encode_set_variable(spop.Scope.TRANSACTION, "status", spop.DataType.UINT32, status)
    if reason:
        actions += spop.encode_set_variable(spop.Scope.TRANSACTION, "reason", spop.DataType.STRING, reason)
    return actions


@lru_cache(maxsize=4096)
def _retry_after_action(seconds: int) -> bytes:
    return spop.encode_set_variable(spop.Scope.TRANSACTION, "retry_after", spop.DataType.UINT32, seconds)


@lru_cache(maxsize=65536)
def _priority_action(milliseconds: int) -> bytes:
    return spop.encode_set_variable(spop.Scope.TRANSACTION, "priority", spop.DataType.INT32, milliseconds)


def actions_for(decision: Decision) -> bytes:
    """Return the actions that tell HAProxy a decision, as docs/conventions.md has it: variables in the scope of the
    transaction."""
    _unused, engine, status, retry_after, priority, reason = decision
    actions = _fixed_actions(engine, status, reason)
    if retry_after is not None:
        actions += _retry_after_action(retry_after)
    if priority is not None:
        actions += _priority_action(priority)
    return actions


class SpoeServer:
    """Listens for HAProxy and answers with what `decide` says. The counters are all since the start."""

    def __init__(self, decide: Callable[[Request], Decision]) -> None:
        self.decide = decide
        self.connections: set[SpoeConnection] = set()
        self.protocol_errors = 0
        self.internal_errors = 0
        self._server: asyncio.AbstractServer | None = None

    async def start(self, address: str, port: int) -> None:
        """Listen. Raises OSError if the address cannot be bound."""
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(lambda: SpoeConnection(self), address, port, backlog=_BACKLOG)

    @property
    def listening(self) -> bool:
        """Whether connections are accepted."""
        return self._server is not None and self._server.is_serving()

    async def stop(self, patience: float) -> None:
        """Accept nothing more, and tell every HAProxy that the connection ends; nothing is left unanswered. Wait until
        all are closed, `patience` seconds at most."""
        if self._server is not None:
            self._server.close()
        for connection in tuple(self.connections):
            connection.disconnect(spop.Status.NORMAL, "the scheduler stops")
        if self.connections:
            await asyncio.wait([connection.closed for connection in self.connections], timeout=patience)

    def answer(self, arguments: Mapping[str, spop.Value]) -> bytes:
        """Return the actions that answer a message. A fault in the decision leaves the request to HAProxy."""
        try:
            return actions_for(self.decide(request_from(arguments)))
        except Exception:  # whatever the fault, it must cost a good placement only, not the connection
            self.internal_errors += 1
            logger.exception("a decision failed, request left to HAProxy")
            return b""


class SpoeConnection(asyncio.Protocol):
    """One connection of one HAProxy thread."""

    def __init__(self, server: SpoeServer) -> None:
        self._server = server
        self._buffer = bytearray()
        self._max_frame_size = MAX_FRAME_SIZE
        self._greeted = False
        self._closing = False
        self._transport: asyncio.Transport = cast(asyncio.Transport, None)  # set before any other call
        self._hello_timer: asyncio.TimerHandle | None = None
        self.closed: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self._server.connections.add(self)
        self._hello_timer = asyncio.get_running_loop().call_later(
            _HELLO_TIMEOUT, self._protocol_error, spop.ProtocolError(spop.Status.TIMEOUT, "no HAPROXY-HELLO came")
        )

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 - the interface of asyncio
        self._closing = True
        self._cancel_hello_timer()
        self._server.connections.discard(self)
        self.closed.set_result(None)

    def pause_writing(self) -> None:
        """Read no more questions from a HAProxy that does not take the answers."""
        self._transport.pause_reading()

    def resume_writing(self) -> None:
        self._transport.resume_reading()

    def data_received(self, data: bytes) -> None:
        if self._closing:
            return
        # Most reads bring whole frames: only a rest is copied into the buffer.
        buffer: spop.Buffer = data
        if self._buffer:
            self._buffer += data
            buffer = self._buffer
        answers: list[bytes] = []
        offset = 0
        failure: spop.ProtocolError | None = None
        try:
            while not self._closing:
                end = spop.frame_end(buffer, offset, self._max_frame_size)
                if end is None:
                    break
                answers.append(self._answer(buffer, offset, end))
                offset = end
        except spop.ProtocolError as error:
            failure = error
        if answers:
            self._transport.write(b"".join(answers))
        if failure is not None:
            self._protocol_error(failure)
        elif self._closing:
            self._transport.close()
        elif buffer is self._buffer:
            del self._buffer[:offset]
        elif offset < len(data):
            self._buffer += data[offset:]

    def disconnect(self, status: spop.Status, message: str) -> None:
        """Say why the connection ends, and end it once that is sent."""
        if not self._closing:
            self._closing = True
            self._transport.write(spop.encode_disconnect(spop.FrameType.AGENT_DISCONNECT, status, message))
            self._transport.close()

    def _protocol_error(self, error: spop.ProtocolError) -> None:
        self._server.protocol_errors += 1
        logger.warning("SPOE connection closed, status %d: %s", error.status, error.message)
        self.disconnect(error.status, error.message)

    def _cancel_hello_timer(self) -> None:
        if self._hello_timer is not None:
            self._hello_timer.cancel()
            self._hello_timer = None

    def _answer(self, buffer: spop.Buffer, offset: int, end: int) -> bytes:
        frame = spop.decode_frame(buffer, offset, end)
        if frame.type == spop.FrameType.NOTIFY and self._greeted:
            actions = b""
            for name, arguments in spop.decode_notify(buffer, frame.payload, end):
                if name == MESSAGE:
                    actions += self._server.answer(arguments)
            return spop.encode_ack(frame.identifiers, actions)
        if frame.type == spop.FrameType.HAPROXY_HELLO and not self._greeted:
            return self._greet(spop.decode_haproxy_hello(buffer, frame.payload, end))
        if frame.type == spop.FrameType.HAPROXY_DISCONNECT:
            reason = spop.decode_disconnect(buffer, frame.payload, end)
            # It also ends connections that nothing was asked on for a while.
            if reason.status not in (spop.Status.NORMAL, spop.Status.TIMEOUT):
                logger.warning("HAProxy closes an SPOE connection, status %d: %s", reason.status, reason.message)
            self._closing = True
            return spop.encode_disconnect(spop.FrameType.AGENT_DISCONNECT, spop.Status.NORMAL, "as asked")
        raise spop.ProtocolError(spop.Status.INVALID_FRAME, f"a frame of type {frame.type} is not expected here")

    def _greet(self, hello: spop.Hello) -> bytes:
        self._cancel_hello_timer()
        self._greeted = True
        self._max_frame_size = min(hello.max_frame_size, MAX_FRAME_SIZE)
        self._closing = hello.healthcheck
        return spop.encode_agent_hello(self._max_frame_size, hello.pipelining)
