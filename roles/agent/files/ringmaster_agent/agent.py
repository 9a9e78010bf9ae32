# SPDX-License-Identifier: GPL-3.0-or-later
"""The daemon: readers, state, and those who listen, on one event loop."""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import signal
from collections.abc import Coroutine, Mapping
from typing import Any

from ansible_collections.ringmaster.inference.plugins.module_utils.commands import CommandRunner
from ansible_collections.ringmaster.inference.plugins.module_utils.file_tree import FileTree
from ansible_collections.ringmaster.inference.plugins.module_utils.service_manager import ServiceManager
from ringmaster_agent.books import EngineBook, HardwareBook
from ringmaster_agent.canary import Canary, phase
from ringmaster_agent.changes import State
from ringmaster_agent.configuration import Configuration, Engine
from ringmaster_agent.engines import EngineReader
from ringmaster_agent.hardware_process import boottime
from ringmaster_agent.hardware_worker import HardwareWorker
from ringmaster_agent.http_api import HttpApi
from ringmaster_agent.metrics import make_registry
from ringmaster_agent.stream import Stream
from ringmaster_agent.xid_log import XidLog

# An engine that told its load so many seconds ago at most is asked a canary's question.
_READY_SECONDS = 5.0

logger = logging.getLogger(__name__)


class Agent:
    """One agent. `root` is where ``/sys``, ``/proc`` and ``/dev`` of the host lie."""

    def __init__(self, configuration: Configuration, root: str = "/") -> None:
        self._configuration = configuration
        self._loop = asyncio.get_running_loop()
        self._stop = asyncio.Event()
        files = FileTree(root)
        self.state = State(secrets.token_hex(8), configuration.host, files.boot_id() or "")
        self._hardware_book = HardwareBook(self.state)
        self._engine_book = EngineBook(self.state)
        self._hardware = HardwareWorker(
            root,
            configuration.hardware_interval_ms / 1000,
            configuration.hang_after_ms / 1000,
            self._take_hardware,
            self._fail_hardware,
        )
        self._xid = XidLog(self.state, files, CommandRunner(), self._changed)
        self._stream = Stream(self.state, boottime, self._xid.look)
        self._http = HttpApi(self.state, self._stream, make_registry(self.state, self._stream))
        self._key = read_key(configuration.key_file, os.environ)
        self._manager = ServiceManager(os.environ)
        self.failed = False

    def _changed(self) -> None:
        self._stream.changed()

    def _take_hardware(self, report: dict[str, Any]) -> None:
        self._hardware_book.take(report)
        self._stream.changed()

    def _fail_hardware(self, reason: str) -> None:
        self._hardware_book.fail(reason)
        self._stream.changed()

    def _take_engine(self, engine: Engine, quantities: dict[str, Any] | None, reason: str) -> None:
        self._engine_book.take(engine, quantities, reason, boottime())
        self._stream.changed()

    def _take_canary(self, engine: Engine, quantities: dict[str, Any]) -> None:
        self._engine_book.take_canary(engine, quantities, boottime())
        self._stream.changed()

    async def run(self) -> None:
        """Work until a signal says stop. Raises OSError if the address cannot be bound."""
        for number in (signal.SIGTERM, signal.SIGINT):
            self._loop.add_signal_handler(number, self._stop.set)
        tasks: list[asyncio.Task[None]] = []
        try:
            await self._http.start(self._configuration.http_address, self._configuration.http_port)
            logger.info("listening at %s port %d", self._configuration.http_address, self._configuration.http_port)
            for work in self._work():
                tasks.append(self._loop.create_task(work))
                tasks[-1].add_done_callback(self._look_at_the_end)
            self._manager.tell("READY=1")
            await self._stop.wait()
            self._manager.tell("STOPPING=1")
            logger.info("stopping")
        finally:
            await _cancel(tasks)
            self._stream.close()
            await self._http.close()
            self._manager.close()

    def _work(self) -> list[Coroutine[Any, Any, None]]:
        configuration = self._configuration
        work: list[Coroutine[Any, Any, None]] = [self._hardware.run(), self._xid.run()]
        interval = configuration.engine_interval_ms / 1000
        for position, engine in enumerate(configuration.engines):
            reader = EngineReader(engine, interval, configuration.engine_timeout_ms / 1000, self._take_engine)
            work.append(reader.run(interval * position / len(configuration.engines)))
            if configuration.canary_prompt:
                work.append(self._canary(engine, reader))
        if self._manager.watchdog_interval is not None:
            work.append(self._feed_watchdog(self._manager.watchdog_interval))
        return work

    def _canary(self, engine: Engine, reader: EngineReader) -> Coroutine[Any, Any, None]:
        configuration = self._configuration

        def ready() -> bool:
            return reader.answered_at is not None and boottime() - reader.answered_at < _READY_SECONDS

        timeout, interval = configuration.canary_timeout_ms / 1000, configuration.canary_interval_ms / 1000
        canary = Canary(engine, configuration.canary_prompt, self._key, timeout, ready, self._take_canary)
        return canary.run(phase(configuration.host, engine.name, interval), interval)

    def _look_at_the_end(self, task: asyncio.Task[None]) -> None:
        """Stop when a part has failed that is to run for ever: half an agent would be believed."""
        if not task.cancelled() and task.exception() is not None:
            logger.critical("stopping, for a part of the agent has failed", exc_info=task.exception())
            self.failed = True
            self._stop.set()

    async def _feed_watchdog(self, interval: float) -> None:
        """Show systemd that the loop turns: a loop that hangs does not get here."""
        while True:
            self._manager.tell("WATCHDOG=1")
            await asyncio.sleep(interval)


async def _cancel(tasks: list[asyncio.Task[None]]) -> None:
    """Cancel tasks until they are: one may be told in a moment in which what it awaits takes no notice."""
    pending = set(tasks)
    while pending:
        for task in pending:
            task.cancel()
        pending = (await asyncio.wait(pending, timeout=1.0))[1]


def read_key(path: str, environment: Mapping[str, str]) -> str:
    """The key in a file, without white space around it; a path that is not absolute is the name of one of systemd's
    credentials. An empty path gives an empty key.

    Raises OSError if the file cannot be read.
    """
    if not path:
        return ""
    with open(os.path.join(environment.get("CREDENTIALS_DIRECTORY", "/"), path), encoding="utf-8") as file:
        return file.read().strip()


async def serve(configuration: Configuration, root: str = "/") -> str | None:
    """Run an agent to its end; gives what kept it from starting, if anything did."""
    try:
        agent = Agent(configuration, root)
    except OSError as error:
        return f"cannot read the engines' key: {error}"
    try:
        await agent.run()
    except OSError as error:
        return f"cannot listen: {error}"
    return "a part of the agent has failed, see above" if agent.failed else None
