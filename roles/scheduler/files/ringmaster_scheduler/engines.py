# SPDX-License-Identifier: GPL-3.0-or-later
"""Reads the engines' ``/metrics``, each in a task of its own, so that one that hangs holds up no other."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Iterable, Sequence
from typing import Final

import aiohttp

from ringmaster_scheduler import exposition
from ringmaster_scheduler.core import DecisionCore
from ringmaster_scheduler.domain import Engine, Reading

# A page of vLLM has about 100 kB; one that never ends must not fill the memory.
_LARGEST_PAGE: Final = 4 * 1024 * 1024

logger = logging.getLogger(__name__)


class EngineReader:
    """Keeps the decision core supplied with readings of the engines it follows, and `observe` with the good ones, and
    where one shows no request, with when those were placed that the books have there. `interval` and `timeout` in
    seconds."""

    def __init__(
        self,
        core: DecisionCore,
        observe: Callable[[Engine, Reading, Sequence[float]], None],
        interval: float,
        timeout: float,
    ) -> None:
        self._core = core
        self._observe = observe
        self._interval = interval
        self._timeout = timeout
        self._tasks: dict[tuple[str, str, int], asyncio.Task[None]] = {}
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0),
            timeout=aiohttp.ClientTimeout(total=timeout),
            headers={"Accept-Encoding": "identity"},
        )
        self.failures: dict[str, int] = {}
        # Engines whose last reading met a fault of this program, so that each is logged once and not at every reading.
        self._faulty: set[str] = set()

    def follow(self, engines: Iterable[Engine]) -> None:
        """Read these engines from now on and no others; one whose name, address and port stay is not disturbed."""
        wanted = {(engine.name, engine.address, engine.port): engine for engine in engines}
        for key in self._tasks.keys() - wanted.keys():
            self._tasks.pop(key).cancel()
        names = {engine.name for engine in wanted.values()}
        self.failures = {name: self.failures.get(name, 0) for name in names}
        for position, (key, engine) in enumerate(wanted.items()):
            if key not in self._tasks:
                # All are read at once first, then evenly spread over the interval.
                phase = self._interval * position / len(wanted)
                self._tasks[key] = asyncio.get_running_loop().create_task(self._keep_reading(engine, phase))

    async def close(self) -> None:
        """Stop reading."""
        tasks = tuple(self._tasks.values())
        self._tasks.clear()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._session.close()

    async def _keep_reading(self, engine: Engine, phase: float) -> None:
        loop = asyncio.get_running_loop()
        await self._read(engine)
        await asyncio.sleep(phase)
        while True:
            begun_at = loop.time()
            await self._read(engine)
            await asyncio.sleep(max(0.0, begun_at + self._interval - loop.time()))

    async def _read(self, engine: Engine) -> None:
        """Hand the core one reading, or why there is none."""
        loop = asyncio.get_running_loop()
        begun_at = loop.time()
        gone = False
        try:
            self._take(engine, Reading(begun_at, *exposition.parse(await self._page(engine))))
            self._faulty.discard(engine.name)
            return
        except aiohttp.ClientConnectorError as error:
            gone = isinstance(error.os_error, ConnectionRefusedError)
            reason = f"cannot connect: {_describe(error.os_error)}"
        except asyncio.TimeoutError:
            reason = f"no answer within {self._timeout:g} s"
        except (aiohttp.ClientError, OSError) as error:
            reason = f"reading failed: {error}"
        except exposition.ExpositionError as error:
            reason = str(error)
        except Exception:  # whatever the fault, it must cost this reading only: the next one comes
            reason = "a reading could not be taken; see the log"
            if engine.name not in self._faulty:
                self._faulty.add(engine.name)
                logger.exception("a reading of engine %s could not be taken", engine.name)
        # A time-out that comes much too late says that this process stood still (suspended, starved), not the engine.
        if loop.time() - begun_at < 2 * self._timeout:
            self.failures[engine.name] = self.failures.get(engine.name, 0) + 1
            self._core.record_failure(engine, reason, gone)

    def _take(self, engine: Engine, reading: Reading) -> None:
        self._core.record_reading(engine, reading)
        idle = not reading.running + reading.waiting
        self._observe(engine, reading, self._core.placed_at(engine.name) if idle else ())

    async def _page(self, engine: Engine) -> bytes:
        host = f"[{engine.address}]" if ":" in engine.address else engine.address
        async with self._session.get(f"http://{host}:{engine.port}/metrics", allow_redirects=False) as response:
            if response.status != 200:
                raise exposition.ExpositionError(f"/metrics answers HTTP status {response.status}")
            page = bytearray()
            async for chunk in response.content.iter_any():
                page += chunk
                if len(page) > _LARGEST_PAGE:
                    raise exposition.ExpositionError(f"/metrics is over {_LARGEST_PAGE} bytes")
            return bytes(page)


def _describe(error: OSError) -> str:
    """Return the system's words for an error; asyncio has words of its own for some, with the address in them."""
    if error.errno is not None and error.errno > 0:
        return os.strerror(error.errno)
    return error.strerror or str(error)
