# SPDX-License-Identifier: GPL-3.0-or-later
"""The daemon: the decision core and its adapters on one event loop."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import time
from collections.abc import Mapping
from typing import Any, Final

from ansible_collections.ringmaster.inference.plugins.module_utils.service_manager import ServiceManager
from ringmaster_scheduler import nodes
from ringmaster_scheduler.agents import AgentReader
from ringmaster_scheduler.configuration import Configuration
from ringmaster_scheduler.consul import ConsulMembers, ConsulSettings
from ringmaster_scheduler.control import Control, release
from ringmaster_scheduler.core import DecisionCore, Settings
from ringmaster_scheduler.domain import Decision, Ended, Health, Request
from ringmaster_scheduler.drained import DrainedFile
from ringmaster_scheduler.engines import EngineReader
from ringmaster_scheduler.explanations import Explanations
from ringmaster_scheduler.haproxy import HaproxyError, RuntimeApi
from ringmaster_scheduler.health import HealthBook
from ringmaster_scheduler.http_api import HttpApi, Source
from ringmaster_scheduler.kept import KeptFile
from ringmaster_scheduler.log_receiver import LogReceiver
from ringmaster_scheduler.members import MembersFile, MembersSource
from ringmaster_scheduler.server import SpoeServer
from ringmaster_scheduler.status import AgentView, Snapshot, describe

# How often it is looked whether the members are others and changes of health are logged, in seconds.
_TICK: Final = 1.0
# How often the health rules are asked for the engines' weights, in seconds: as often as the engines are read.
_WEIGH: Final = 0.25
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
            ),
            configuration.policy,
        )
        self._drained = DrainedFile(configuration.drained_file)
        # By an operator at this scheduler; engines that the registry has in maintenance come on top.
        self._drained_here = self._drained.load()
        self._core.set_drained(self._drained_here)
        if self._drained.error:
            logger.error("drained engines are not known: %s", self._drained.error)
        self._book = HealthBook(configuration.health_rules)
        self._kept = KeptFile(configuration.kept_file)
        self._kept_taken = False
        self._agents = AgentReader(self._book.observe_agent)
        self._weight_changes: dict[str, int] = {}
        self._explanations = Explanations(configuration.explanations, time.time() - self._loop.time())
        self._members = members_source(configuration)
        self._members_taken = False
        self._reader = EngineReader(
            self._core,
            self._book.observe_reading,
            configuration.scrape_interval_ms / 1000,
            configuration.scrape_timeout_ms / 1000,
        )
        self._spoe = SpoeServer(self._decide)
        self._log = LogReceiver(self._end)
        self._control = Control(
            self._core,
            RuntimeApi(configuration.haproxy_socket, configuration.haproxy_timeout_ms / 1000),
            configuration.adjust_interval_ms / 1000,
            configuration.look_interval_ms / 1000,
            configuration.haproxy_server_options,
            configuration.maxconn_percent,
            configuration.haproxy_server_state_file,
        )
        self._http = HttpApi(
            Source(self.snapshot, self._queue, self._nodes, self._rules, self._drain, self._explanations),
            read_token(configuration.token_file, os.environ),
        )
        self._health: dict[str, Health] = {}
        self._manager = ServiceManager(os.environ)
        self.failed = False

    def _decide(self, request: Request) -> Decision:
        now = self._loop.time()
        decision = self._core.decide(request, now)
        self._explanations.keep(now, request, decision, self._core.last)
        self._control.decided()
        return decision

    def _end(self, ended: Ended) -> None:
        self._core.record_end(ended, self._loop.time())

    def _queue(self) -> list[dict[str, Any]]:
        now = self._loop.time()
        return [
            {
                "model": line.model,
                "unknown": line.unknown,
                "drain_tokens_per_s": round(line.drain_rate, 1),
                "waiting": [
                    {
                        "id": request.id,
                        "class": request.class_name,
                        "key_id": request.key_id,
                        "tokens": request.tokens,
                        "waited_s": round(now - request.at, 3),
                        "deadline_in_s": round(request.deadline - now, 3),
                    }
                    for request in line.waiting
                ],
            }
            for line in self._core.lines()
        ]

    def _rules(self) -> dict[str, Any]:
        return {
            "policy": self._core.policy.document(),
            "health_rules": {rule.name: {**rule.document(), "condition": rule.about.text} for rule in self._book.rules},
            "output_tokens_learnt": self._core.lengths(),
        }

    def _nodes(self) -> list[dict[str, Any]]:
        now = self._loop.time()
        agents = {view.host: view for view in self._agent_views(now)}
        return nodes.documents(self._book, self._core.views(now), agents, now)

    def _agent_views(self, now: float) -> tuple[AgentView, ...]:
        return tuple(
            AgentView(
                host,
                follower.agent.address,
                follower.agent.port,
                follower.connected_at is not None,
                follower.error,
                None if follower.heard_at is None else now - follower.heard_at,
                follower.lines,
                follower.connections,
                follower.refused,
            )
            for host, follower in sorted(self._agents.followers.items())
        )

    def _drain(self, name: str, drained: bool) -> bool:
        """Drain an engine or end that; return whether that changed anything.

        Raises KeyError for an engine that is neither a member nor drained, and OSError if it can't be kept.
        """
        names = set(self._drained_here)
        if name not in names and all(view.engine.name != name for view in self._core.views(self._loop.time())):
            raise KeyError(name)
        if (name in names) == drained:
            return False
        names ^= {name}
        self._drained.save(names)
        self._drained.error = ""
        self._drained_here = names
        self._core.set_drained(names | self._members.maintained)
        logger.info("engine %s is %s", name, "drained" if drained else "no longer drained")
        return True

    def snapshot(self) -> Snapshot:
        """Return the daemon as it is now."""
        now = self._loop.time()
        return Snapshot(
            engines=tuple(self._core.views(now)),
            outcomes=dict(self._core.outcomes),
            read_failures=dict(self._reader.failures),
            members_kind=self._members.kind,
            members_file=self._members.path,
            members_loaded=self._members.engines is not None,
            members_error=self._members.error,
            members_failures=self._members.failures,
            members_held=tuple(sorted(self._members.held)),
            members_age=None if self._members.confirmed_at is None else now - self._members.confirmed_at,
            spoe_listening=self._spoe.listening,
            spoe_connections=len(self._spoe.connections),
            spoe_protocol_errors=self._spoe.protocol_errors,
            internal_errors=self._spoe.internal_errors,
            estimated=self._core.estimated,
            log_lines=self._log.lines,
            log_errors=self._log.errors,
            haproxy_error=self._control.error if self._configuration.haproxy_socket else "",
            haproxy_absent=self._control.absent,
            drained_error=self._drained.error,
            haproxy_pushes=self._control.pushes,
            haproxy_failures=self._control.failures,
            lines=tuple(self._core.lines()),
            shares=self._core.shares(),
            uptime=now - self._begun_at,
            agents=self._agent_views(now),
            weight_changes=dict(self._weight_changes),
            kept_error=self._kept.error,
        )

    async def run(self) -> None:
        """Work until a signal says stop. Raises OSError if an address cannot be bound."""
        for number in (signal.SIGTERM, signal.SIGINT):
            self._loop.add_signal_handler(number, self._stop.set)
        self._loop.add_signal_handler(signal.SIGHUP, self._follow_members, True)
        tasks: list[asyncio.Task[None]] = []
        try:
            tasks += self._members.start()
            self._follow_members()
            self._log.start(self._configuration.log_address, self._configuration.log_port)
            tasks += self._control.start(bool(self._configuration.haproxy_socket))
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
            tasks.append(self._loop.create_task(self._keep_weighing()))
            if self._manager.watchdog_interval is not None:
                tasks.append(self._loop.create_task(self._feed_watchdog(self._manager.watchdog_interval)))
            for task in tasks:
                task.add_done_callback(self._look_at_the_end)
            self._manager.tell("READY=1")
            await self._stop.wait()
            self._manager.tell("STOPPING=1")
            logger.info("stopping")
        finally:
            for task in tasks:
                task.cancel()
            await self._close()

    def _look_at_the_end(self, task: asyncio.Task[None]) -> None:
        """Stop when a part has failed that is to run for ever: half a scheduler would be believed."""
        if not task.cancelled() and task.exception() is not None:
            logger.critical("stopping, for a part of the scheduler has failed", exc_info=task.exception())
            self.failed = True
            self._stop.set()

    async def _close(self) -> None:
        await self._spoe.stop(_FAREWELL)
        await self._control.stop()
        self._log.close()
        await self._http.close()
        await self._reader.close()
        await self._agents.close()
        await self._members.close()
        self._manager.close()

    def _follow_members(self, force: bool = False) -> None:
        if not self._members.poll(force):
            return
        if self._members.error:
            logger.warning("members %s not used: %s: %s", self._members.kind, self._members.path, self._members.error)
            # What was kept of an earlier run is better than nothing.
            if self._members_taken or self._members.engines is None:
                return
        self._members_taken = True
        engines = self._members.engines or ()
        self._core.set_engines(engines, self._members.gateways)
        self._core.set_drained(self._drained_here | self._members.maintained)
        now = self._loop.time()
        self._book.set_members(engines, [agent.host for agent in self._members.agents], now)
        if not self._kept_taken:
            self._kept_taken = True
            self._book.restore(self._kept.load()[0], now)
            if self._kept.error:
                logger.warning("which engines were out is not known: %s", self._kept.error)
        self._weigh()
        self._reader.follow(engines)
        self._agents.follow(self._members.agents)
        logger.info(
            "members: %d engines, %d agents from %s", len(engines), len(self._members.agents), self._members.path
        )

    def _weigh(self) -> None:
        """Take up what the health rules say."""
        now = self._loop.time()
        before = self._core.weights()
        verdicts = self._book.evaluate(now, self._core.well(now))
        for name, verdict in verdicts.items():
            weight, reasons = before[name]
            if verdict == (weight, reasons):
                continue
            self._core.set_weight(name, verdict.weight, now, verdict.reasons)
            if verdict.weight != weight:
                self._weight_changes[name] = self._weight_changes.get(name, 0) + 1
                because = "; ".join(map(describe, verdict.reasons)) or "no rule holds any more"
                logger.info("engine %s has weight %g, had %g: %s", name, verdict.weight, weight, because)
        self._weight_changes = {name: count for name, count in self._weight_changes.items() if name in verdicts}
        if self._kept_taken:  # what was kept is not to be lost before it was taken
            self._kept.save(self._book.closed(), {name for name, verdict in verdicts.items() if not verdict.weight})

    async def _keep_weighing(self) -> None:
        while True:
            await asyncio.sleep(_WEIGH)
            self._weigh()

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


def read_token(path: str, environment: Mapping[str, str]) -> str:
    """Return the token in a file, without white space around it; a path that is not absolute is the name of one of
    systemd's credentials. An empty path gives an empty token.

    Raises OSError if the file cannot be read.
    """
    if not path:
        return ""
    with open(os.path.join(environment.get("CREDENTIALS_DIRECTORY", "/"), path), encoding="utf-8") as file:
        return file.read().strip()


def members_source(configuration: Configuration) -> MembersSource:
    """Return what the configuration chooses. Raises OSError if Consul's token or authorities cannot be read."""
    if configuration.members_from == "file":
        return MembersFile(configuration.members_file)
    credentials = os.environ.get("CREDENTIALS_DIRECTORY", "/")
    return ConsulMembers(
        ConsulSettings(
            addresses=configuration.consul_addresses,
            service=configuration.consul_service,
            token=read_token(configuration.consul_token_file, os.environ),
            ca_file=configuration.consul_ca_file and os.path.join(credentials, configuration.consul_ca_file),
            wait=configuration.consul_wait_ms / 1000,
            kept_file=configuration.consul_kept_file,
        )
    )


async def serve(configuration: Configuration) -> str | None:
    """Run a daemon to its end; return what kept it from starting, if anything did."""
    try:
        daemon = Daemon(configuration)
    except OSError as error:
        return f"cannot read a token, or the authorities of Consul: {error}"
    try:
        await daemon.run()
    except OSError as error:
        return f"cannot listen: {error}"
    return "a part of the scheduler has failed, see above" if daemon.failed else None


async def release_haproxy(configuration: Configuration) -> str | None:
    """Give HAProxy the caps with which it does well without a scheduler; return what went wrong, if anything did.

    Run by the unit whenever the daemon has ended, for one that was killed could not do it.
    """
    if not configuration.haproxy_socket:
        return None
    # What Consul last told is in a file of the same form.
    from_file = configuration.members_from == "file"
    members = MembersFile(configuration.members_file if from_file else configuration.consul_kept_file)
    members.poll()
    if members.engines is None:
        return f"{members.path}: {members.error}"
    api = RuntimeApi(configuration.haproxy_socket, configuration.haproxy_timeout_ms / 1000)
    try:
        drained = DrainedFile(configuration.drained_file).load() | members.maintained
        out = KeptFile(configuration.kept_file).load()[1]
        await release(api, members.engines, drained, configuration.maxconn_percent, out)
    except HaproxyError as error:
        return str(error)
    return None
