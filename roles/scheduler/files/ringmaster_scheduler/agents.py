# SPDX-License-Identifier: GPL-3.0-or-later
"""Follows the streams of the nodes' agents, one connection each, in tasks of their own.

A connection ends when the agent or the network ends it, when something is missing in it, when it says nothing for three
seconds, or when what comes is not of the agreed form. Then it is made anew, later each time and never at the same
moment as all others; the snapshot that comes first heals whatever was missed.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Iterable
from typing import Final, Optional

import aiohttp

from ringmaster_scheduler.domain import Agent
from ringmaster_scheduler.merge import LONGEST_LINE, AgentState, Change, StreamError, parse

SILENCE: Final = 3.0
"""Seconds without a line after which a connection is made anew; an agent says every second that it is there."""

_FIRST_WAIT: Final = 0.25
_LONGEST_WAIT: Final = 10.0
"""Seconds before a connection is tried again: doubled each time, and shortened by chance by up to a half."""

_HOSTILE_WAIT: Final = 10.0
"""Seconds before one is asked again that did not speak as an agent does."""

_MOST_LINES: Final = 1000
_MOST_BYTES: Final = 8 * 1024 * 1024
"""What one agent may send in a second: eight engines and the hardware make about 50 lines. More would cost the time
that decisions need."""

_QUIET: Final = 60.0
"""Seconds for which what is wrong with one agent is not said again."""

_PROVEN: Final = 10.0
"""Seconds after which a connection that ends was a good one, so that the next is tried soon."""

logger = logging.getLogger(__name__)

Observe = Callable[[AgentState, Optional[Change], float], None]


class Follower:
    """One agent's stream. `error` is empty while it comes; `connected_at` is None while it does not. The counts are
    since the daemon's start."""

    def __init__(self, agent: Agent) -> None:
        self.agent = agent
        self.state = AgentState(agent.host)
        self.error = "not connected yet"
        self.connected_at: float | None = None
        self.heard_at: float | None = None
        self.said_at = float("-inf")
        self.lines = 0
        self.connections = 0
        self.refused = 0


class AgentReader:
    """Hands every line of the agents that it follows to `observe`, which takes the state, what changed (None if the
    agent only said that it is there), and the time."""

    def __init__(self, observe: Observe) -> None:
        self._observe = observe
        self._loop = asyncio.get_running_loop()
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=SILENCE, sock_read=SILENCE),
            headers={"Accept-Encoding": "identity"},
            read_bufsize=LONGEST_LINE,
        )
        self._tasks: dict[Agent, asyncio.Task[None]] = {}
        self.followers: dict[str, Follower] = {}
        self._chance = random.Random()

    def follow(self, agents: Iterable[Agent]) -> None:
        """Follow these agents from now on and no others; a connection to one that stays is not disturbed."""
        wanted = dict.fromkeys(agents)
        for agent in self._tasks.keys() - wanted.keys():
            self._tasks.pop(agent).cancel()
            self.followers.pop(agent.host, None)
        for agent in wanted:
            if agent not in self._tasks:
                follower = self.followers[agent.host] = Follower(agent)
                self._tasks[agent] = self._loop.create_task(self._keep_following(follower))

    async def close(self) -> None:
        """Stop following."""
        tasks = tuple(self._tasks.values())
        self._tasks.clear()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._session.close()

    async def _keep_following(self, follower: Follower) -> None:
        wait = _FIRST_WAIT
        while True:
            begun_at = self._loop.time()
            try:
                await self._stream(follower)
                reason, hostile = "the agent ended the stream", False
            except StreamError as error:
                reason, hostile = str(error), error.hostile
            except asyncio.TimeoutError:
                reason, hostile = f"no answer or line for {SILENCE:g} s", False
            except (aiohttp.ClientError, OSError, ValueError) as error:
                reason, hostile = f"{error}" or type(error).__name__, False
            except Exception:  # whatever the fault, it must cost one agent's stream only
                logger.exception("a line of the agent of %s could not be taken", follower.agent.host)
                reason, hostile = "a line could not be taken; see the log", True
            now = self._loop.time()
            follower.connected_at = None
            if hostile:
                follower.refused += 1
            # An agent that is down says the same for hours, and one that talks nonsense always something else.
            if reason != follower.error and now - follower.said_at >= _QUIET:
                follower.said_at = now
                logger.warning("agent of %s: %s", follower.agent.host, reason)
            follower.error = reason
            if hostile:
                wait = _HOSTILE_WAIT
            elif now - begun_at >= _PROVEN:
                wait = _FIRST_WAIT
            await asyncio.sleep(wait * self._chance.uniform(0.5, 1.0))
            wait = min(_LONGEST_WAIT, 2 * wait)

    def _address(self, agent: Agent) -> str:
        host = f"[{agent.address}]" if ":" in agent.address else agent.address
        return f"http://{host}:{agent.port}/v1/stream"

    async def _stream(self, follower: Follower) -> None:
        async with self._session.get(self._address(follower.agent), allow_redirects=False) as response:
            if response.status != 200:
                raise StreamError(f"/v1/stream answers HTTP status {response.status}", hostile=False)
            first = True
            rest = b""
            second, amount, count = 0, 0, 0
            async for chunk in response.content.iter_any():
                if second != int(self._loop.time()):
                    second, amount, count = int(self._loop.time()), 0, 0
                amount += len(chunk)
                count += chunk.count(b"\n")
                if amount > _MOST_BYTES or count > _MOST_LINES:
                    raise StreamError(f"over {_MOST_LINES} lines or {_MOST_BYTES} bytes in a second")
                lines = (rest + chunk).split(b"\n")
                rest = lines.pop()
                if len(rest) > LONGEST_LINE:
                    raise StreamError(f"a line of over {LONGEST_LINE} bytes")
                for line in lines:
                    self._take(follower, line, first)
                    first = False

    def _take(self, follower: Follower, line: bytes, first: bool) -> None:
        if len(line) > LONGEST_LINE:
            raise StreamError(f"a line of over {LONGEST_LINE} bytes")
        message = parse(line)
        change = follower.state.apply(message, first)
        now = self._loop.time()
        follower.heard_at = now
        follower.lines += 1
        if first:
            follower.connections += 1
            follower.connected_at = now
            if follower.error:
                logger.info("agent of %s: the stream comes", follower.agent.host)
            follower.error = ""
        self._observe(follower.state, None if message.type == "alive" else change, now)
