# SPDX-License-Identifier: GPL-3.0-or-later
"""The daemon: the decision core and its adapters on one event loop."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from typing import Final

from ringmaster_scheduler.configuration import Configuration
from ringmaster_scheduler.core import DecisionCore, Health, Settings
from ringmaster_scheduler.engines import EngineReader
from ringmaster_scheduler.http_api import HttpApi
from ringmaster_scheduler.members import MembersFile
from ringmaster_scheduler.server import SpoeServer
from ringmaster_scheduler.service_manager import ServiceManager
from ringmaster_scheduler.status import Snapshot

# How often the members file is looked at and changes of health are logged, in seconds.
_TICK: Final = 1.0
# How long HAProxy gets to close its connections at the end, in seconds.
_FAREWELL: Final = 1.0

logger = logging.getLogger(__name__)


class Daemon:
    """One scheduler."""

    def __init__(self, configuration: Configuration) -> None:
        self._configuration = configuration
        self._loop = asyncio.get_running_loop()
        self._begun_at = self._loop.time()
        self._stop = asyncio.Event()
        self._core = DecisionCore(
            Settings(
                stale_after=configuration.stale_after_ms / 1000,
                placement_grace=configuration.placement_grace_ms / 1000,
                retry_after=configuration.retry_after_s,
            )
        )
        self._members = MembersFile(configuration.members_file)
        self._reader = EngineReader(
            self._core, configuration.scrape_interval_ms / 1000, configuration.scrape_timeout_ms / 1000
        )
        self._spoe = SpoeServer(lambda request: self._core.decide(request, self._loop.time()))
        self._http = HttpApi(self.snapshot)
        self._health: dict[str, Health] = {}
        self._manager = ServiceManager(os.environ)

    def snapshot(self) -> Snapshot:
        """Return the daemon as it is now."""
        now = self._loop.time()
        return Snapshot(
            engines=tuple(self._core.views(now)),
            outcomes=dict(self._core.outcomes),
            read_failures=dict(self._reader.failures),
            members_file=self._members.path,
            members_loaded=self._members.engines is not None,
            members_error=self._members.error,
            members_failures=self._members.failures,
            spoe_listening=self._spoe.listening,
            spoe_connections=len(self._spoe.connections),
            spoe_protocol_errors=self._spoe.protocol_errors,
            internal_errors=self._spoe.internal_errors,
            uptime=now - self._begun_at,
        )

    async def run(self) -> None:
        """Work until a signal says stop. Raises OSError if an address cannot be bound."""
        for number in (signal.SIGTERM, signal.SIGINT):
            self._loop.add_signal_handler(number, self._stop.set)
        self._loop.add_signal_handler(signal.SIGHUP, self._follow_members, True)
        tasks: list[asyncio.Task[None]] = []
        try:
            self._follow_members()
            await self._http.start(self._configuration.http_address, self._configuration.http_port)
            await self._spoe.start(self._configuration.spoe_address, self._configuration.spoe_port)
            logger.info(
                "listening, HTTP at %s port %d, SPOE at %s port %d",
                self._configuration.http_address,
                self._configuration.http_port,
                self._configuration.spoe_address,
                self._configuration.spoe_port,
            )
            tasks.append(self._loop.create_task(self._keep_house()))
            if self._manager.watchdog_interval is not None:
                tasks.append(self._loop.create_task(self._feed_watchdog(self._manager.watchdog_interval)))
            self._manager.tell("READY=1")
            await self._stop.wait()
            self._manager.tell("STOPPING=1")
            logger.info("stopping")
        finally:
            for task in tasks:
                task.cancel()
            await self._close()

    async def _close(self) -> None:
        await self._spoe.stop(_FAREWELL)
        await self._http.close()
        await self._reader.close()
        self._manager.close()

    def _follow_members(self, force: bool = False) -> None:
        if not self._members.poll(force):
            return
        if self._members.error:
            logger.warning("members file not used: %s: %s", self._members.path, self._members.error)
            return
        engines = self._members.engines or ()
        self._core.set_engines(engines)
        self._reader.follow(engines)
        logger.info("members: %d engines from %s", len(engines), self._members.path)

    def _log_health(self) -> None:
        views = self._core.views(self._loop.time())
        for view in views:
            if self._health.get(view.engine.name, Health.UNKNOWN) is not view.health:
                logger.info(
                    "engine %s is %s%s", view.engine.name, view.health.value, view.reason and f": {view.reason}"
                )
        self._health = {view.engine.name: view.health for view in views}

    async def _keep_house(self) -> None:
        while True:
            await asyncio.sleep(_TICK)
            self._follow_members()
            self._log_health()

    async def _feed_watchdog(self, interval: float) -> None:
        """Show systemd that the loop turns: a loop that hangs does not get here."""
        while True:
            self._manager.tell("WATCHDOG=1")
            await asyncio.sleep(interval)


async def serve(configuration: Configuration) -> str | None:
    """Run a daemon to its end; return what kept it from starting, if anything did."""
    try:
        await Daemon(configuration).run()
    except OSError as error:
        return f"cannot listen: {error}"
    return None
