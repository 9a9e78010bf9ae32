# SPDX-License-Identifier: GPL-3.0-or-later
"""Keeps HAProxy as the core wants it, and the core informed of what HAProxy does.

Two loops. *Caps* follow the core's ``adjust`` within milliseconds, because requests wait for them. The *look* compares
all else a few times a second with what HAProxy shows of itself, and mends what differs: weights, drained servers,
servers that are missing or too many. So nothing has to be remembered about what was pushed to which process: after a
start or reload of HAProxy the next look finds the difference. Until then, or for longer where this daemon is gone,
HAProxy has those drains and weights that it also keeps when this daemon ends; it reads them from a file.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import re
from collections.abc import Collection, Sequence
from typing import Final

from ringmaster_scheduler.core import HOSTS_LEFT, Cap, DecisionCore, EngineView
from ringmaster_scheduler.domain import Engine, Health, ServerCounts
from ringmaster_scheduler.haproxy import (
    LOOK,
    HaproxyAbsentError,
    HaproxyError,
    KeptServer,
    RuntimeApi,
    ServerRow,
    ServerStateFile,
    Statistics,
    pool_name,
    statistics,
    word,
)

_STRETCH: Final = 10
"""An adjustment may take this part of the time between two: with a thousand engines it takes milliseconds."""

_URGENT: Final = 0.001
"""Seconds for which an urgent cap waits for others that can go with it."""

_DONE: Final = re.compile("^New server registered|^Server deleted| changed from ")
"""Answers that say that all is well; most commands answer with nothing."""

logger = logging.getLogger(__name__)


class Control:
    """The link to one HAProxy. `adjust_interval` and `look_interval` in seconds; `server_options` is what a server
    line that is added at run time has besides its address."""

    def __init__(
        self,
        core: DecisionCore,
        api: RuntimeApi,
        adjust_interval: float,
        look_interval: float,
        server_options: str,
        maxconn_percent: int = 100,
        server_state_file: str = "",
    ) -> None:
        self._core = core
        self._api = api
        self._adjust_interval = adjust_interval
        self._look_interval = look_interval
        self._server_options = server_options
        self._maxconn_percent = maxconn_percent
        self._server_state = ServerStateFile(server_state_file)
        self._unkept = ""
        self._loop = asyncio.get_running_loop()
        self._push_now = asyncio.Event()
        self._urgent: asyncio.TimerHandle | None = None
        self._pid: int | None = None
        self._complaints: set[str] = set()
        # Servers that were put into maintenance, or added in it, from here: they are to leave it again.
        self._closed: set[tuple[str, str]] = set()
        self._tasks: list[asyncio.Task[None]] = []
        self._stopping = False
        self.error = "not asked yet"
        self.absent = False
        self.pushes = 0
        self.failures = 0

    def start(self, connected: bool) -> list[asyncio.Task[None]]:
        """Begin to adjust; and, where there is an HAProxy to connect to, to push and to look. Return the tasks, which
        end by `stop` only."""
        self._tasks = [self._loop.create_task(self._keep_adjusting())]
        if connected:
            self._tasks.append(self._loop.create_task(self._keep_looking()))
        return list(self._tasks)

    async def stop(self) -> None:
        """Stop, and give HAProxy the caps with which it does well alone."""
        # A cancellation that meets the end of a time-out is lost in some releases of Python; hence the flag.
        self._stopping = True
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._keep()
        if not self.error:
            views = self._views()
            drained = [view.engine.name for view in views if view.drained]
            try:
                out = [view.engine.name for view in views if not view.weight]
                await release(self._api, [view.engine for view in views], drained, self._maxconn_percent, out)
            except HaproxyError as error:
                logger.warning("HAProxy keeps the last caps: %s", error)

    def decided(self) -> None:
        """Note that a decision was made: one that depends on a cap must not wait for the next adjustment."""
        if self._core.urgent and self._urgent is None and not self.error:
            self._urgent = self._loop.call_later(_URGENT, self._wake)

    def _wake(self) -> None:
        self._push_now.set()

    def _views(self) -> list[EngineView]:
        return self._core.views(self._loop.time())

    async def _keep_adjusting(self) -> None:
        due = self._loop.time()
        while not self._stopping:
            now = self._loop.time()
            if now >= due:
                self._core.adjust(now)
                due = now + max(self._adjust_interval, _STRETCH * (self._loop.time() - now))
            # Before the push: what becomes urgent during it has to be pushed after it.
            self._push_now.clear()
            self._urgent = None
            if not self.error:
                await self._push_caps()
            timer = self._loop.call_at(due, self._wake)
            try:
                await self._push_now.wait()
            finally:
                timer.cancel()

    async def _push_caps(self) -> None:
        caps = self._core.caps()
        if not caps:
            return
        # A grant is one batch: what is ready for the moment must not stay so.
        batches = [[cap for cap in caps if not cap.granted], *([cap] for cap in caps if cap.granted)]
        for batch in filter(None, batches):
            commands = [command for cap in batch for command in _of_cap(cap)]
            try:
                answers = await self._api.run(commands)
            except HaproxyError as error:
                self._fail(error)
                return
            now = self._loop.time()
            for cap in batch:
                # A server that HAProxy does not have (yet) is the look's matter.
                self._core.applied(cap, now)
            for command, answer in zip(commands, answers):
                if answer:
                    self._complain(f"{command}: {answer}")
                else:
                    self.pushes += 1

    async def _keep_looking(self) -> None:
        while not self._stopping:
            begun_at = self._loop.time()
            self._keep()
            try:
                info, stat = await self._api.run(LOOK)
                found = statistics(info, stat)
                self._take(found, begun_at)
                for commands in self.differences(found.servers):
                    await self._mend(commands)
            except HaproxyError as error:
                self._fail(error)
            else:
                if self.error:
                    logger.info("HAProxy follows, pid %d", self._pid)
                self.error = ""
                self.absent = False
            await asyncio.sleep(max(0.0, begun_at + self._look_interval - self._loop.time()))

    def _take(self, found: Statistics, begun_at: float) -> None:
        if found.pid != self._pid:
            self._pid = found.pid
            self._complaints.clear()
            self._closed.clear()
        models = {pool_name(model): model for model in self._core.models}
        self._core.record_counts(
            {
                # Whether one is drained is decided here, and a server that is named gets requests in spite of it.
                row.name: ServerCounts(row.current, row.queued, row.up or row.status == "DRAIN", row.maxconn)
                for row in found.servers
                if row.backend in models
            },
            {models[backend]: count for backend, count in found.waiting.items() if backend in models},
            begun_at,
        )

    def _keep(self) -> None:
        """Keep for HAProxy's next start what may outlive this daemon: weights, and the drains that `release` leaves.
        An engine that is ill for now, or held back, is drained again by the next look, if there is one."""
        views = self._views()
        if not views:
            return  # the members are not known (yet): what they were is the better guess
        stays = _staying(
            [view.engine for view in views],
            [view.engine.name for view in views if view.drained],
            [view.engine.name for view in views if not view.weight],
        )
        kept = [
            KeptServer(
                pool_name(view.engine.model),
                view.engine.name,
                view.engine.port,
                view.engine.name in stays,
                _percent(view.weight) if view.weight else 100,
            )
            for view in views
        ]
        try:
            self._server_state.save(kept)
            self._unkept = ""
        except OSError as error:
            if str(error) != self._unkept:
                logger.error("drains and weights are not kept for HAProxy's next start: %s", error)
            self._unkept = str(error)

    def differences(self, servers: Sequence[ServerRow]) -> list[list[str]]:
        """Return the commands that mend what differs, those that belong together in one list."""
        rows = {(row.backend, row.name): row for row in servers}
        backends = {row.backend for row in servers}
        wanted: dict[tuple[str, str], EngineView] = {
            (pool_name(view.engine.model), view.engine.name): view for view in self._views()
        }
        serving = {
            view.engine.model
            for view in wanted.values()
            if view.health is Health.HEALTHY and not view.drained and view.weight
        }
        # Hosts with a server that HAProxy can use and that is not held back. It may know better than the core.
        left: dict[str, set[str]] = {}
        for (backend, name), view in wanted.items():
            row = rows.get((backend, name))
            if row is not None and row.up and not view.held_back and not view.drained and view.weight:
                left.setdefault(backend, set()).add(view.engine.host)
        mends: list[list[str]] = []
        for (backend, name), view in wanted.items():
            row = rows.get((backend, name))
            server = f"{backend}/{word(name)}"
            if row is None:
                if backend in backends:
                    self._closed.add((backend, name))
                    mends.append(self._addition(server, view))
                else:
                    self._complain(f"HAProxy has no backend {backend}; the edge role makes it")
                continue
            if row.address and _moved(view.engine, row.address):
                mends.append([f"set server {server} addr {word(view.engine.address)} port {view.engine.port}"])
            # HAProxy's queue would feed an engine that is known to be ill, if there is another one.
            ill = view.health is Health.UNHEALTHY and view.engine.model in serving
            # One that is out by a rule answers wrong or not at all: nothing is better, even where there is no other.
            if view.drained or ill or not view.weight:
                if row.status not in ("DRAIN", "MAINT", "DOWN"):
                    mends.append([f"set server {server} state drain"])
                continue
            held_back = view.held_back and len(left.get(backend, ())) >= HOSTS_LEFT
            weight = _percent(view.weight)
            if row.weight != weight and (row.up or row.status == "DRAIN"):
                mends.append([f"set weight {server} {weight}"])
            # To be ready moves nothing out of the queue; to be told one's maxconn does.
            ready = [f"set server {server} state ready", f"set maxconn server {server} {view.cap}"]
            if row.status == "MAINT" and (backend, name) in self._closed:
                mends.append([f"enable health {server}", *ready])
            elif row.status == "DRAIN" and not held_back:
                mends.append(ready)
            elif held_back and row.up and not row.queued:
                # What waits there by name would lose its place (2.6), or be sent all at once (3.0).
                mends.append([f"set server {server} state drain"])
        filled = {backend for backend, _unused in wanted}
        for (backend, name), row in rows.items():
            # An empty backend answers 503 to everybody: its last servers stay, whatever the members say.
            if (backend, name) in wanted or backend not in filled:
                continue
            if row.status != "MAINT":
                self._closed.add((backend, name))
                mends.append([f"set server {backend}/{word(name)} state maint"])
            elif row.current == 0 and row.queued == 0:
                mends.append([f"del server {backend}/{word(name)}"])
        # What is ready again first: a backend is never left with nothing on the way.
        mends.sort(key=lambda commands: commands[-1].endswith("state drain"))
        return mends

    def _addition(self, server: str, view: EngineView) -> list[str]:
        engine = view.engine
        address = f"[{engine.address}]" if ":" in engine.address else engine.address
        return [
            f"add server {server} {word(address)}:{engine.port} maxconn {view.cap} weight 100 {self._server_options}",
            f"enable health {server}",
            f"enable server {server}",
        ]

    async def _mend(self, commands: list[str]) -> None:
        for command, answer in zip(commands, await self._api.run(commands)):
            verb = command.split(" ", 1)[0]
            if not answer or _DONE.search(answer):
                self.pushes += 1
                if verb in ("add", "del"):
                    logger.info("HAProxy: %s", command)
            else:
                self._complain(f"{command}: {answer}")

    def _complain(self, text: str) -> None:
        """Log what HAProxy refuses, once a process of HAProxy's."""
        self.failures += 1
        if text not in self._complaints:
            self._complaints.add(text)
            logger.warning("HAProxy: %s", text)

    def _fail(self, error: HaproxyError) -> None:
        self.failures += 1
        if str(error) != self.error:
            logger.warning("HAProxy does not follow: %s", error)
        self.error = str(error)
        self.absent = isinstance(error, HaproxyAbsentError)


def _of_cap(cap: Cap) -> list[str]:
    """The commands for a cap. A server that is ready while its ``maxconn`` is set takes what that has room for out of
    the queue, at that moment; to be ready alone moves nothing (seen with 2.6, 3.0 and 3.2)."""
    server = f"{pool_name(cap.model)}/{word(cap.engine)}"
    command = f"set maxconn server {server} {cap.maxconn}"
    return (
        [f"set server {server} state ready", command, f"set server {server} state drain"] if cap.granted else [command]
    )


def _moved(engine: Engine, address: str) -> bool:
    """Whether HAProxy has another address of an engine. What it shows of a name says nothing: what that resolves to."""
    try:
        known = ipaddress.ip_address(engine.address)
    except ValueError:
        return False
    return address != (f"[{known}]:{engine.port}" if known.version == 6 else f"{known}:{engine.port}")


def _percent(weight: float) -> int:
    """A weight as HAProxy has it, never 0."""
    return max(1, round(100 * weight))


def _staying(engines: Sequence[Engine], drained: Collection[str], out: Collection[str]) -> set[str]:
    """Names of the engines that HAProxy alone is to leave drained: those that an operator has `drained`, and those that
    a rule keeps `out` while their pool has another one: nobody would bring back a pool's last one."""
    left = {engine.model for engine in engines if engine.name not in out and engine.name not in drained}
    return {
        engine.name for engine in engines if engine.name in drained or (engine.name in out and engine.model in left)
    }


async def release(
    api: RuntimeApi,
    engines: Sequence[Engine],
    drained: Collection[str],
    maxconn_percent: int,
    out: Collection[str] = (),
) -> None:
    """Give HAProxy what it does well with alone: the ``maxconn`` of its configuration, which is so many percent of the
    engine's ``max_num_seqs``, and every engine but those that stay drained, see `_staying`.

    Raises HaproxyError.
    """
    stays = _staying(engines, drained, out)
    info, stat = await api.run(LOOK)
    # One that is down shows nothing else, and may be drained as well.
    resting = {(row.backend, row.name) for row in statistics(info, stat).servers if row.status in ("DRAIN", "DOWN")}
    commands = []
    for engine in engines:
        backend = pool_name(engine.model)
        server = f"{backend}/{word(engine.name)}"
        commands.append(f"set maxconn server {server} {max(1, engine.max_num_seqs * maxconn_percent // 100)}")
        if (backend, engine.name) in resting and engine.name not in stays:
            commands.append(f"set server {server} state ready")
    await api.run(commands)
