# SPDX-License-Identifier: GPL-3.0-or-later
"""Receives HAProxy's access log as datagrams, one line of JSON each, and hands on how each request ended.

What is lost on the way (the socket's buffer holds some hundred lines) is made up for by HAProxy's counts. Nothing of a
line is kept but what `domain.Ended` has.
"""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Callable
from typing import Any, Final

from ringmaster_scheduler.domain import Ended
from ringmaster_scheduler.haproxy import pool_name

_LARGEST_LINE: Final = 65_535
_AT_ONCE: Final = 200
"""Lines that are taken before questions of HAProxy's have their turn again."""

_GATHER: Final = 0.002
"""Seconds for which lines gather before they are taken together. To wake up for each would cost more than to take them
all, and the free slot of an engine is HAProxy's to give away, not the scheduler's."""

_BUFFER: Final = 4 * 1024 * 1024
"""Bytes asked for the socket's buffer; the system gives what net.core.rmem_max allows."""

NO_SERVER: Final = "<NOSRV>"
_POOL: Final = pool_name("")


class LineError(ValueError):
    """A datagram is no line of the access log."""


def parse(line: bytes) -> Ended | None:
    """Return the end of a request that a line tells; None for one that no pool was given, of which nothing is known:
    it was refused before the decision, and its id may be that of another one.

    Raises LineError if it is no JSON object with an id, a server, a status and times as numbers of milliseconds.
    """
    try:
        content = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise LineError(f"no JSON: {error}") from error
    if not isinstance(content, dict):
        raise LineError("no object")
    get = content.get
    request_id, engine, status = get("request_id"), get("engine"), get("status")
    if not isinstance(request_id, str) or not isinstance(engine, str) or not isinstance(status, int):
        raise LineError("request_id, engine or status is missing")
    pool = get("pool", _POOL)
    if not isinstance(pool, str) or not pool.startswith(_POOL):
        return None
    return Ended(
        request_id,
        None if engine in (NO_SERVER, "") else engine,
        status,
        _seconds(get("ms_queue")),
        _seconds(get("ms_first_byte")),
        _seconds(get("ms_total")),
    )


def _seconds(value: Any) -> float | None:
    """Return a time; HAProxy writes -1 for what a request did not come to."""
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 <= value < 1e12:
        return None
    return value / 1000


class LogReceiver:
    """A UDP socket on which HAProxy's lines come. The counters are since the start."""

    def __init__(self, ended: Callable[[Ended], None]) -> None:
        self._ended = ended
        self._socket: socket.socket | None = None
        self._timer: asyncio.TimerHandle | None = None
        self.lines = 0
        self.errors = 0

    def start(self, address: str, port: int) -> None:
        """Listen. Raises OSError if the address cannot be bound."""
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self._socket = socket.socket(family, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
        try:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _BUFFER)
            self._socket.bind((address, port))
        except OSError:
            self.close()
            raise
        self._wait()

    @property
    def port(self) -> int:
        """The port that is bound."""
        assert self._socket is not None
        port: int = self._socket.getsockname()[1]
        return port

    def close(self) -> None:
        """Stop listening."""
        if self._timer is not None:
            self._timer.cancel()
        if self._socket is not None:
            asyncio.get_running_loop().remove_reader(self._socket.fileno())
            self._socket.close()
            self._socket = None

    def _wait(self) -> None:
        """Wait for the first line of a time when none has come."""
        assert self._socket is not None
        asyncio.get_running_loop().add_reader(self._socket.fileno(), self._gather)

    def _gather(self) -> None:
        """Let more lines come before they are taken."""
        assert self._socket is not None
        loop = asyncio.get_running_loop()
        loop.remove_reader(self._socket.fileno())
        self._timer = loop.call_later(_GATHER, self._take)

    def _take(self) -> None:
        found = _AT_ONCE
        try:
            found = self._receive()
        finally:  # whatever went wrong with one line, the next ones are taken
            if found:
                self._timer = asyncio.get_running_loop().call_later(_GATHER, self._take)
            else:
                self._timer = None
                self._wait()

    def _receive(self) -> int:
        """Take the lines that are there, and give their number."""
        assert self._socket is not None
        receive = self._socket.recv
        for count in range(_AT_ONCE):
            try:
                line = receive(_LARGEST_LINE)
            except (BlockingIOError, InterruptedError):
                return count
            except OSError:  # what the kernel has to say about an earlier datagram
                self.errors += 1
                return count
            try:
                ended = parse(line)
            except LineError:
                self.errors += 1
            else:
                self.lines += 1
                if ended is not None:
                    self._ended(ended)
        return _AT_ONCE
