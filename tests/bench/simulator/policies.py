# SPDX-License-Identifier: GPL-3.0-or-later
"""The policies that are compared: three that HAProxy or any router could follow, and the scheduler's core."""

from __future__ import annotations

import random
from collections.abc import Callable

from ringmaster_scheduler import domain
from ringmaster_scheduler.core import DecisionCore, Settings
from ringmaster_scheduler.policy import Policy as Numbers
from tests.bench.simulator.site import Policy, Request, Site, Verdict

MODEL = "model"

READING_INTERVAL = 0.25
"""Seconds between two readings of an engine, as in service."""

COUNTS_INTERVAL = 0.2
"""Seconds between two looks at HAProxy's counts, as in service."""

ADJUST_INTERVAL = 0.02
"""Seconds between two adjustments of the caps, as in service."""

PUSH_TIME = 0.002
"""Seconds from a decision until HAProxy has taken the caps that follow from it."""

LOG_TIME = 0.001
"""Seconds until the datagram of a request's end has come."""


class _Stateless:
    """What the simple policies share."""

    name = ""

    def start(self, site: Site) -> None:
        self.site = site
        self.names = list(site.servers)

    def ended(self, request: Request, now: float) -> None:
        """The end of a request means nothing to them."""


class RoundRobin(_Stateless):
    """One after the other, or, as HAProxy's ``roundrobin`` does where servers have a ``maxconn``, the next one that has
    a free slot."""

    name = "round-robin"

    def __init__(self, skip_full: bool = False) -> None:
        self.skip_full = skip_full

    def start(self, site: Site) -> None:
        super().start(site)
        self.next = 0

    def decide(self, request: Request, now: float) -> Verdict:
        for _unused in self.names:
            self.next += 1
            name = self.names[self.next % len(self.names)]
            if not self.skip_full or self.site.servers[name].has_slot():
                return Verdict(name)
        return Verdict()


class LeastConnections(_Stateless):
    """The engine with the fewest requests, HAProxy's ``leastconn``."""

    name = "least-connections"

    def decide(self, request: Request, now: float) -> Verdict:
        return Verdict()


class Random(_Stateless):
    """Any engine."""

    name = "random"

    def start(self, site: Site) -> None:
        super().start(site)
        self.source = random.Random(1)

    def decide(self, request: Request, now: float) -> Verdict:
        return Verdict(self.source.choice(self.names))


class PowerOfTwo(Random):
    """Of two engines at random, the one with fewer requests."""

    name = "power-of-two"

    def decide(self, request: Request, now: float) -> Verdict:
        pair = self.source.sample(self.names, 2)
        return Verdict(min(pair, key=lambda name: len(self.site.servers[name].served)))


class Ringmaster:
    """The scheduler's core, with everything that its adapters would tell it, as often and as late."""

    name = "ringmaster"

    def __init__(
        self,
        numbers: Numbers | None = None,
        count_tokens: bool = True,
        pace: float = 1.0,
        source: random.Random | None = None,
    ) -> None:
        """`count_tokens`: whether a preprocessor counts them; else `source` makes bodies of 2 to 6 bytes a token.
        `pace`: a factor on the intervals at which things are looked at; a day is simulated with a larger one."""
        self.core = DecisionCore(Settings(stale_after=pace, placement_grace=0.5, retry_after=5), numbers)
        self.count_tokens = count_tokens
        self.source = source
        self.pace = pace
        # Whether a line of HAProxy's log comes; a test may lose some.
        self.hears: Callable[[], bool] = lambda: True
        self._push_planned = False

    def start(self, site: Site) -> None:
        self.site = site
        self.members = {
            name: domain.Engine(
                name, name, "192.0.2.1", 8100, "standin", MODEL, (), server.engine.card, server.engine.max_num_seqs
            )
            for name, server in site.servers.items()
        }
        self.core.set_engines(self.members.values())
        self._read()
        self._count()
        self._adjust()
        site.every(READING_INTERVAL * self.pace, self._read)
        site.every(COUNTS_INTERVAL * self.pace, self._count)
        site.every(ADJUST_INTERVAL * self.pace, self._adjust)

    def decide(self, request: Request, now: float) -> Verdict:
        ask = request.ask
        decision = self.core.decide(
            domain.Request(
                MODEL,
                request.id,
                ask.prompt if self.count_tokens else None,
                round(ask.prompt * (4.0 if self.source is None else self.source.uniform(2, 6))),
                ask.max_tokens,
                ask.key,
                ask.prefix,
            ),
            now,
        )
        if self.core.urgent and not self._push_planned:
            self._push_planned = True
            self.site.after(PUSH_TIME, self._push)
        return Verdict(decision.engine, decision.priority or 0, decision.status, decision.retry_after)

    def ended(self, request: Request, now: float) -> None:
        if request.status == 429 and request.engine is None and not request.queued:
            return
        started = request.started_at
        queue_time = (started if started is not None else now) - request.ask.at
        first_byte = None if request.first_token_at is None or started is None else request.first_token_at - started
        ended = domain.Ended(request.id, request.engine, request.status, queue_time, first_byte, now - request.ask.at)
        if self.hears():
            self.site.after(LOG_TIME, lambda: self.core.record_end(ended, self.site.now))

    def _read(self) -> None:
        for name, server in self.site.servers.items():
            engine = server.engine
            if not engine.alive:
                self.core.record_failure(self.members[name], "down", gone=True)
                continue
            self.core.record_reading(
                self.members[name],
                domain.Reading(
                    self.site.now,
                    len(engine.running),
                    len(engine.waiting),
                    engine.kv_use,
                    engine.kv_tokens,
                    engine.preemptions,
                    engine.prompt_tokens - engine.prompt_tokens_cached,
                    engine.generation_tokens,
                ),
            )

    def _count(self) -> None:
        self.core.record_counts(
            {
                name: domain.ServerCounts(len(server.served), self.site.queued(name))
                for name, server in self.site.servers.items()
            },
            {MODEL: self.site.queued()},
            self.site.now,
        )

        for view in self.core.views(self.site.now):
            self.site.set_drained(view.engine.name, view.drained or not view.weight or view.held_back)

    def _adjust(self) -> None:
        self.core.adjust(self.site.now)
        self._push()

    def _push(self) -> None:
        self._push_planned = False
        for cap in self.core.caps():
            (self.site.grant if cap.granted else self.site.set_maxconn)(cap.engine, cap.maxconn)
            self.core.applied(cap, self.site.now)


POLICIES: tuple[Callable[[], Policy], ...] = (RoundRobin, LeastConnections, Random, PowerOfTwo, Ringmaster)
