# SPDX-License-Identifier: GPL-3.0-or-later
"""One page after the other from one server, over a connection that is kept: the least that HTTP/1.1 asks of a client.

An engine's page is read five times a second. aiohttp's client takes twice the time for it, which is a third of all that
the agent may take; what is asked once a minute (`canary`) goes through aiohttp.
"""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import Callable
from typing import Final, NamedTuple, cast

# A page of vLLM has about 100 kB; one that never ends must not fill the memory.
LARGEST_ANSWER: Final = 4 * 1024 * 1024
LARGEST_HEAD: Final = 64 * 1024
_STATUS_LINE: Final = re.compile(rb"HTTP/1\.([01]) ([1-5][0-9]{2})(?: [^\r\n]*)?\r\n")
_HEADER: Final = re.compile(rb"([!#$%&'*+.^_`|~0-9A-Za-z-]+):[ \t]*([^\r\n]*?)[ \t]*\r\n")
_CHUNK_SIZE: Final = re.compile(rb"([0-9A-Fa-f]{1,8})[ \t]*(?:;[^\r\n]*)?\r\n")


class AnswerError(Exception):
    """What came is no answer of HTTP/1.1, or too long; the text says what is wrong, and nothing of what came."""


Page = tuple[int, bytes]
"""Status and body."""


class Answer(NamedTuple):
    """An answer. `consumed`: bytes of it; `kept`: whether the connection may be used again."""

    status: int
    body: bytes
    consumed: int
    kept: bool


def parse(data: bytes | bytearray, ended: bool = False) -> Answer | None:
    """The answer at the beginning of `data`; None if it is not all there yet. `ended`: nothing will follow.

    Raises AnswerError.
    """
    head_end = data.find(b"\r\n\r\n", 0, LARGEST_HEAD)
    if head_end < 0:
        if len(data) >= LARGEST_HEAD or ended:
            raise AnswerError("the answer has no end of its headers")
        return None
    line = _STATUS_LINE.match(data)
    if not line:
        raise AnswerError("no answer of HTTP/1.1")
    status, old = int(line.group(2)), line.group(1) == b"0"
    headers: dict[bytes, bytes] = {}
    position = line.end()
    while position < head_end + 2:
        header = _HEADER.match(data, position)
        if not header:
            raise AnswerError("a header is malformed")
        name = bytes(header.group(1)).lower()
        if name in headers and name in (b"content-length", b"transfer-encoding"):
            raise AnswerError("two headers tell the length")
        headers[name] = bytes(header.group(2))
        position = header.end()
    begin = head_end + 4
    kept = not old and headers.get(b"connection", b"").lower() != b"close"
    if 100 <= status < 200 or status in (204, 304):
        return Answer(status, b"", begin, kept)
    if b"transfer-encoding" in headers:
        if headers[b"transfer-encoding"].lower() != b"chunked":
            raise AnswerError("the answer has a coding that was not asked for")
        return _chunked(data, begin, status, kept, ended)
    length = headers.get(b"content-length")
    if length is None:
        # Its end is the end of the connection.
        _check_length(len(data) - begin)
        return Answer(status, bytes(data[begin:]), len(data), False) if ended else None
    if not re.fullmatch(rb"[0-9]{1,15}", length):
        raise AnswerError("the length is no number")
    end = begin + int(length)
    _check_length(end - begin)
    if len(data) < end:
        return _not_yet(ended)
    return Answer(status, bytes(data[begin:end]), end, kept)


def _chunked(data: bytes | bytearray, position: int, status: int, kept: bool, ended: bool) -> Answer | None:
    body = bytearray()
    while True:
        size = _CHUNK_SIZE.match(data, position)
        if not size:
            # A line of a size is far shorter than this.
            if len(data) - position > 1024 or data.find(b"\n", position) >= 0:
                raise AnswerError("a chunk has no size")
            return _not_yet(ended)
        length = int(size.group(1), 16)
        begin, end = size.end(), size.end() + length
        _check_length(len(body) + length)
        if length == 0:
            # Trailers are not asked for and mean nothing here; an empty line ends them.
            if data[begin : begin + 2] == b"\r\n":
                return Answer(status, bytes(body), begin + 2, kept)
            last = data.find(b"\r\n\r\n", begin)
            if last < 0:
                if len(data) - begin > LARGEST_HEAD:
                    raise AnswerError("the answer has no end of its trailers")
                return _not_yet(ended)
            return Answer(status, bytes(body), last + 4, kept)
        if len(data) < end + 2:
            return _not_yet(ended)
        if data[end : end + 2] != b"\r\n":
            raise AnswerError("a chunk does not end where its size says")
        body += data[begin:end]
        position = end + 2


def _not_yet(ended: bool) -> Answer | None:
    """None for an answer that is not all there; one of which nothing will follow is none."""
    if ended:
        raise AnswerError("the answer ended before its end")
    return None


def _check_length(length: int) -> None:
    if length > LARGEST_ANSWER:
        raise AnswerError(f"the answer is over {LARGEST_ANSWER} bytes")


class PagePoller:
    """Reads one page of a server again and again, and hands over what came of it. Times in seconds.

    No task and no future stand between the socket and `take`: with several pages a second they would cost more than
    reading and taking apart the pages. `take` gets status and body, or None and why there is no answer. An answer that
    is later than `timeout` is not waited for; that is looked at once in `interval`.
    """

    def __init__(
        self,
        address: str,
        port: int,
        path: str,
        interval: float,
        timeout: float,
        take: Callable[[Page | None, str], None],
    ) -> None:
        self._address, self._port = address, port
        host = f"[{address}]" if ":" in address else address
        self.request = (
            f"GET {path} HTTP/1.1\r\nHost: {host}:{port}\r\nAccept: text/plain\r\nAccept-Encoding: identity\r\n\r\n"
        ).encode("ascii")
        self.interval = interval
        self.timeout = timeout
        self.take = take

    async def run(self) -> None:
        """Poll until cancelled, over one connection as long as it is kept."""
        loop = asyncio.get_running_loop()
        due = loop.time()
        while True:
            connection = _Connection(self)
            connecting = loop.create_task(self._connect(connection))
            try:
                # Not wait_for; see `children`.
                await asyncio.wait([connecting], timeout=self.timeout)
                if connecting.done():
                    connecting.result()
                    await connection.ended.wait()
                else:
                    self.take(None, self.too_late)
            except OSError as error:
                self.take(None, f"cannot connect: {_describe(error)}")
            finally:
                connecting.cancel()
                connection.close()
            # A server that is gone, or closes each connection, is asked no more often than another.
            due = max(due + self.interval, loop.time())
            await asyncio.sleep(due - loop.time())

    async def _connect(self, connection: _Connection) -> None:
        await asyncio.get_running_loop().create_connection(lambda: connection, self._address, self._port)

    @property
    def too_late(self) -> str:
        """Why there is no answer that is too late."""
        return f"no answer within {self.timeout:g} s"


class _Connection(asyncio.Protocol):
    """A connection: a question in each interval, as long as the one before was answered."""

    def __init__(self, poller: PagePoller) -> None:
        self._poller = poller
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._buffer = bytearray()
        self._due = 0.0
        self._asked_at: float | None = None  # None: nothing is waited for
        self._answered = False
        self.ended = asyncio.Event()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        if self.ended.is_set():  # it came too late
            self.close()
            return
        self._due = self._loop.time()
        self._tick()

    def _tick(self) -> None:
        now = self._loop.time()
        if self._asked_at is None and self._transport is not None:
            self._asked_at = now
            self._transport.write(self._poller.request)
        elif self._asked_at is not None and now - self._asked_at > self._poller.timeout:
            self._end(self._poller.too_late)
            return
        self._due = max(self._due + self._poller.interval, now)
        self._timer = self._loop.call_at(self._due, self._tick)

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        self._look(ended=False)

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        if self._buffer and exc is None:
            self._look(ended=True)
        # Between two questions a server may close what it kept, and in the moment of a question, too.
        silent = self._answered and not self._buffer
        self._end("" if silent else "the connection was closed")

    def _look(self, ended: bool) -> None:
        if self._asked_at is None:
            self._end("")  # what comes unasked belongs to no answer
            return
        try:
            answer = parse(self._buffer, ended)
        except AnswerError as error:
            self._end(str(error))
            return
        if answer is None:
            return
        del self._buffer[: answer.consumed]
        self._asked_at = None
        self._answered = True
        self._poller.take((answer.status, answer.body), "")
        if not answer.kept:
            self._end("")

    def _end(self, reason: str) -> None:
        """End, with a reason if a question stays without an answer."""
        if not self.ended.is_set():
            self.ended.set()
            if self._asked_at is not None and reason:
                self._poller.take(None, reason)
            self.close()

    def close(self) -> None:
        """Close the connection, whatever is still to come."""
        self.ended.set()
        if self._timer is not None:
            self._timer.cancel()
        if self._transport is not None:
            self._transport.abort()


def _describe(error: OSError) -> str:
    """The system's words for an error; asyncio has words of its own for some, with the address in them."""
    if error.errno is not None and error.errno > 0:
        return os.strerror(error.errno)
    return error.strerror or str(error) or type(error).__name__
