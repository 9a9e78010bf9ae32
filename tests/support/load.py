# SPDX-License-Identifier: GPL-3.0-or-later
"""A load of streaming chats that notes, for every request, whether it was answered whole and when its chunks came.

A protocol of its own on uvloop instead of a client library: at 10,000 chunks a second a library's cost a chunk would
fill a core and show up as chunks held back, which is what this is here to measure.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import secrets
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple, cast

import uvloop


@dataclasses.dataclass
class Outcome:
    """One request, with the id that it carries (empty when no connection was made). Times are Unix times in seconds,
    `ended` is 0 until it has ended; `error` is empty when it was answered whole."""

    started: float
    request_id: str = ""
    status: int = 0
    first_chunk: float = 0.0
    ended: float = 0.0
    chunks: int = 0
    intervals: list[float] = dataclasses.field(default_factory=list)
    error: str = ""


@dataclasses.dataclass(frozen=True)
class Load:
    """What to send: `streams` clients at a time, each sending its next chat when the last one ended."""

    address: str
    port: int
    key: str
    model: str
    streams: int
    seconds: float
    max_tokens: int = 128
    prompt: str = "Tell a story of a circus."
    timeout: float = 60.0

    def request(self, number: int, request_id: str) -> bytes:
        """The bytes of one request; each has a prompt of its own, so that no prefix cache makes it cheaper."""
        body = json.dumps(
            {
                "model": self.model,
                "messages": [{"role": "user", "content": f"{number}: {self.prompt}"}],
                "max_tokens": self.max_tokens,
                "ignore_eos": True,
                "stream": True,
            }
        ).encode()
        return post("/v1/chat/completions", f"{self.address}:{self.port}", self.key, request_id, body)


class Timed(NamedTuple):
    """One request of a trace: seconds from the trace's begin, its id, and its bytes."""

    at: float
    request_id: str
    request: bytes


def post(path: str, host: str, key: str, request_id: str, body: bytes) -> bytes:
    """The bytes of a request with a JSON body."""
    return (
        f"POST {path} HTTP/1.1\r\nHost: {host}\r\nAuthorization: Bearer {key}\r\nX-Request-Id: {request_id}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    ).encode() + body


class _Stream(asyncio.Protocol):
    """One connection that carries one chat after the other."""

    def __init__(self) -> None:
        self.transport: asyncio.Transport
        self.outcome: Outcome | None = None
        self.done: asyncio.Future[None] | None = None
        self.head = b""
        self.tail = b""
        self.last = 0.0
        self.expected = 0
        self.closing = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports do not derive from asyncio's, which they equal in use.
        self.transport = cast(asyncio.Transport, transport)

    def send(self, request: bytes, request_id: str, expected: int) -> tuple[Outcome, asyncio.Future[None]]:
        """Send one request, which is to be answered by `expected` tokens, a chunk each."""
        self.outcome = Outcome(time.time(), request_id)
        self.done = asyncio.get_running_loop().create_future()
        self.head, self.tail, self.last, self.expected = b"", b"", 0.0, expected
        self.transport.write(request)
        return self.outcome, self.done

    def data_received(self, data: bytes) -> None:
        outcome = self.outcome
        if outcome is None:
            return
        now = time.monotonic()
        if not outcome.status:
            self.head += data
            if b"\r\n\r\n" not in self.head:
                return
            head, data = self.head.split(b"\r\n\r\n", 1)
            outcome.status = int(head.split(b" ", 2)[1])
            self.closing = b"\r\nconnection: close" in head.lower()
            if outcome.status != 200:
                # The rest of a refusal does not matter: close instead of reading it.
                self._finish(f"status {outcome.status}: {data[:300].decode(errors='replace')}")
                self.closing = True
                return
        events = data.count(b"data: ")
        if events:
            if self.last:
                outcome.intervals.append(now - self.last)
            else:
                outcome.first_chunk = time.time()
            self.last = now
            outcome.chunks += events
        # The end may be cut anywhere between two readings.
        self.tail = (self.tail + data)[-64:]
        if b'"error"' in data:
            self._finish(f"an error in the stream: {data[-300:].decode(errors='replace')}")
            self.closing = True
        elif self.tail.endswith(b"\r\n0\r\n\r\n"):
            whole = b"data: [DONE]" in self.tail and outcome.chunks >= self.expected
            self._finish(
                "" if whole else f"the stream ended after {outcome.chunks} of {self.expected} chunks: {self.tail!r}"
            )

    def connection_lost(self, exc: Exception | None) -> None:
        self.closing = True
        self._finish(f"connection closed after {self.outcome.chunks if self.outcome else 0} chunks: {exc}")

    def leave(self) -> None:
        """Go away; what has come of an answer that has begun stands as it is."""
        if self.outcome is not None:
            self._finish("" if self.outcome.chunks else "no chunk in time")
        self.transport.abort()

    def _finish(self, error: str) -> None:
        if self.done is not None and not self.done.done():
            assert self.outcome is not None
            self.outcome.error = error
            self.outcome.ended = time.time()
            self.outcome = None
            self.done.set_result(None)


async def _connect(load: Load) -> _Stream:
    connecting = asyncio.get_running_loop().create_connection(_Stream, load.address, load.port)
    return (await asyncio.wait_for(connecting, load.timeout))[1]


async def _client(load: Load, number: int, over: Callable[[], bool], outcomes: list[Outcome]) -> None:
    stream: _Stream | None = None
    sent = 0
    name = secrets.token_hex(6)
    while not over():
        if stream is None:
            try:
                stream = await _connect(load)
            except (OSError, asyncio.TimeoutError) as error:
                now = time.time()
                outcomes.append(Outcome(now, ended=now, error=f"no connection: {error}"))
                await asyncio.sleep(0.2)
                continue
        request_id = f"{name}-{sent}"
        request = load.request(number * 1_000_000 + sent, request_id)
        outcome, done = stream.send(request, request_id, load.max_tokens)
        sent += 1
        outcomes.append(outcome)
        try:
            await asyncio.wait_for(done, load.timeout)
        except asyncio.TimeoutError:
            outcome.error, outcome.ended = f"not ended after {load.timeout:g} s", time.time()
            stream.closing = True
        if stream.closing or stream.transport.is_closing():
            stream.transport.close()
            stream = None
    if stream is not None:
        stream.transport.close()


async def send(
    load: Load, outcomes: list[Outcome] | None = None, stopped: Callable[[], bool] = lambda: False
) -> list[Outcome]:
    """Send the load and wait for the last answer; requests are started for `load.seconds`, or until it is stopped.

    A list that is given receives each request as it is sent, so that another thread can follow.
    """
    outcomes = [] if outcomes is None else outcomes
    end = time.monotonic() + load.seconds

    def over() -> bool:
        return stopped() or time.monotonic() >= end

    await asyncio.gather(*(_client(load, number, over, outcomes) for number in range(load.streams)))
    return outcomes


async def replay(address: str, port: int, trace: Sequence[Timed], seconds: float, patience: float) -> list[Outcome]:
    """Send each request at its time, on a connection of its own, whatever became of the others.

    The clients stay for `seconds` from the trace's begin, and up to `patience` seconds more until each has a chunk of
    its answer or has failed; then they leave. A request's `started` is when it was due: a client that is late itself
    hides nothing.
    """
    loop = asyncio.get_running_loop()
    begun, begun_at = loop.time(), time.time()
    streams: list[_Stream] = []

    async def client(timed: Timed) -> Outcome:
        await asyncio.sleep(begun + timed.at - loop.time())
        due = begun_at + timed.at
        try:
            _unused, stream = await asyncio.wait_for(loop.create_connection(_Stream, address, port), patience)
        except (OSError, asyncio.TimeoutError) as error:
            return Outcome(due, ended=time.time(), error=f"no connection: {error}")
        streams.append(stream)
        outcome, ended = stream.send(timed.request, timed.request_id, expected=1)
        outcome.started = due
        ended.add_done_callback(lambda _unused: stream.transport.close())
        return outcome

    outcomes = await asyncio.gather(*(client(timed) for timed in trace))
    await asyncio.sleep(begun + seconds - loop.time())
    end = loop.time() + patience
    while loop.time() < end and not all(outcome.chunks or outcome.ended for outcome in outcomes):
        await asyncio.sleep(0.05)
    for stream in streams:
        stream.leave()
    return outcomes


def run(
    load: Load, outcomes: list[Outcome] | None = None, stopped: Callable[[], bool] = lambda: False
) -> list[Outcome]:
    """`send` in an event loop of its own."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(send(load, outcomes, stopped))


def percentile(values: Sequence[float], share: float) -> float:
    """Nearest-rank percentile; `share` from 0 to 1. Raises ValueError when there is no value."""
    if not values:
        raise ValueError("no values")
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, max(0, round(share * len(ordered)) - 1))]
