# SPDX-License-Identifier: GPL-3.0-or-later
"""Hands the messages of the stream to everyone who listens.

A message is made once and written to each connection as it is. One that takes them too slowly is cut off: what it was
not sent it gets in one piece when it comes back, and nobody waits for it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

from ringmaster_agent.changes import State

# Bytes that wait for one listener at most: some seconds of everything changing on a large node.
LARGEST_BACKLOG: Final = 1024 * 1024
MOST_LISTENERS: Final = 64
# Changes that come within this time go into one message, in seconds.
COALESCE: Final = 0.05
# After so long without a message it is said that the agent lives, in seconds.
ALIVE: Final = 1.0


class Stream:
    """Writes what changes in `state` to transports, as chunks of HTTP/1.1.

    `now` gives CLOCK_BOOTTIME. `look` is called before anything is told: what only goes on as before is entered then.
    """

    def __init__(self, state: State, now: Callable[[], float], look: Callable[[], None]) -> None:
        self._state = state
        self._now = now
        self._look = look
        self._listeners: dict[asyncio.Transport, asyncio.Event] = {}
        self._loop = asyncio.get_running_loop()
        self._flush: asyncio.TimerHandle | None = None
        self._sent_at = self._loop.time()
        self._alive = self._loop.call_later(ALIVE, self._say_alive)
        self.cut_off = 0

    @property
    def listeners(self) -> int:
        """How many listen."""
        return len(self._listeners)

    def changed(self) -> None:
        """To be called after every entry into the state."""
        if self._flush is None and self._state.changed:
            self._flush = self._loop.call_later(COALESCE, self.flush)

    def flush(self) -> None:
        """Tell now what has changed."""
        if self._flush is not None:
            self._flush.cancel()
            self._flush = None
        self._look()
        if self._state.changed:
            self._send(self._state.change(self._now()))

    def snapshot(self) -> bytes:
        """Everything, as a message; those who listen are told first what they don't know of it."""
        self.flush()
        if self._state.untold:
            self._send(self._state.change(self._now()))
        return self._state.snapshot(self._now())

    def join(self, transport: asyncio.Transport) -> asyncio.Event:
        """Send all messages from now on; the event is set when that ends. The snapshot before them is the caller's."""
        ended = asyncio.Event()
        self._listeners[transport] = ended
        return ended

    def leave(self, transport: asyncio.Transport) -> None:
        """Send nothing more to a transport."""
        self._drop(transport)

    def close(self) -> None:
        """Send nothing more."""
        self._alive.cancel()
        if self._flush is not None:
            self._flush.cancel()
        for transport in list(self._listeners):
            self._drop(transport)

    def _say_alive(self) -> None:
        if self._loop.time() - self._sent_at >= ALIVE:
            self.flush()
            if self._loop.time() - self._sent_at >= ALIVE:
                self._send(self._state.alive(self._now()))
        self._alive = self._loop.call_at(self._sent_at + ALIVE, self._say_alive)

    def _send(self, message: bytes) -> None:
        self._sent_at = self._loop.time()
        if self._listeners:
            chunk = _chunk(message)
            for transport in list(self._listeners):
                self._write(transport, chunk)

    def _write(self, transport: asyncio.Transport, chunk: bytes) -> None:
        if transport.is_closing():
            self._drop(transport)
        elif transport.get_write_buffer_size() > LARGEST_BACKLOG:
            self.cut_off += 1
            transport.abort()
            self._drop(transport)
        else:
            transport.write(chunk)

    def _drop(self, transport: asyncio.Transport) -> None:
        ended = self._listeners.pop(transport, None)
        if ended is not None:
            ended.set()


def _chunk(message: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(message), message)
