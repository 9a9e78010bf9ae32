# SPDX-License-Identifier: GPL-3.0-or-later
"""Promises under load: nothing is held back, and a failure costs no more than what it must."""

from __future__ import annotations

import contextlib
import json
import threading
import time
import urllib.request
from collections.abc import Iterator

import pytest

from rehearsal import faults, site
from tests.e2e.conftest import ENGINES, MODEL, Site, wait_until, within
from tests.e2e.gateway import GATEWAYS
from tests.support import load
from tests.support.load import Outcome, percentile

METRICS_PORT = 8405
SESSIONS = ("haproxy_server_current_sessions{", "haproxy_server_current_queue{")
LONGEST_LOAD = 300.0  # seconds; a load in the background ends with its block, which does not take that long
KILLED = "gpu-a1"


def fetch(url: str) -> str:
    """The body of an answer."""
    text: str = urllib.request.urlopen(url, timeout=30).read().decode()
    return text


def failures(outcomes: list[Outcome]) -> list[str]:
    """What went wrong, a line a request."""
    return [f"started {outcome.started:.3f}: {outcome.error}" for outcome in outcomes if outcome.error]


def slowest_first_chunk(outcomes: list[Outcome]) -> float:
    """The longest time in seconds from a request to its first chunk."""
    return max(outcome.first_chunk - outcome.started for outcome in outcomes)


class Background:
    """A load that goes on for as long as the block does, while the test breaks something."""

    def __init__(self, running_site: Site, streams: int) -> None:
        self.outcomes: list[Outcome] = []
        self._stop = threading.Event()
        what = running_site.load(streams, LONGEST_LOAD, max_tokens=64)
        self._thread = threading.Thread(target=load.run, args=(what, self.outcomes, self._stop.is_set))

    def __enter__(self) -> Background:
        self._thread.start()
        return self

    def __exit__(self, *_exception: object) -> None:
        self._stop.set()
        self._thread.join()

    def started_after(self, moment: float) -> list[Outcome]:
        """Requests that started after a Unix time."""
        return [outcome for outcome in list(self.outcomes) if outcome.started > moment]

    def wait_for_answers(self, count: int, after: float = 0.0) -> None:
        """Wait until so many requests that started after a Unix time have ended, well or not."""
        wait_until(
            lambda: sum(1 for outcome in self.started_after(after) if outcome.ended) >= count,
            f"{count} answers under load",
        )


def sessions(running_site: Site, gateway: str) -> dict[str, int]:
    """Requests that HAProxy has at each engine at one moment, in flight or in its queue."""
    found = dict.fromkeys(ENGINES, 0)
    for line in fetch(f"http://{running_site.addresses[gateway]}:{METRICS_PORT}/metrics?scope=server").splitlines():
        name, _space, value = line.rpartition(" ")
        for engine in ENGINES:
            if name.startswith(SESSIONS) and f'server="{engine}.main"' in name:
                found[engine] += int(float(value))
    return found


def average_sessions(running_site: Site, gateway: str) -> dict[str, float]:
    """Averages over six seconds: streams of one length that began together end together, and for that moment no share
    says anything."""
    samples = []
    for _unused in range(12):
        samples.append(sessions(running_site, gateway))
        time.sleep(0.5)
    return {engine: sum(sample[engine] for sample in samples) / len(samples) for engine in ENGINES}


def answering_engines(running_site: Site, gateway: str, since: float, asked: set[str]) -> dict[str, str]:
    """Request id → engine, from the edge's access log, which has a request's line some time after its end."""
    engines: dict[str, str] = {}

    def all_are_logged() -> bool:
        log = running_site.on(gateway, f"journalctl --unit haproxy --since @{int(since)} --no-pager --output cat")
        for line in log.splitlines():
            at = line.find("{")
            if at >= 0 and '"request_id"' in line:
                entry = json.loads(line[at:])
                if entry["pool"] != "preprocessors":
                    engines[entry["request_id"]] = entry["engine"]
        return asked <= engines.keys()

    wait_until(all_are_logged, "the access log has every request")
    return engines


def lost_log_lines(running_site: Site, gateway: str) -> float:
    """Lines of its logs that this process of HAProxy could not hand on since its start."""
    metrics = fetch(f"http://{running_site.addresses[gateway]}:{METRICS_PORT}/metrics?scope=global").splitlines()
    [lost] = (line.split()[1] for line in metrics if line.startswith("haproxy_process_dropped_logs_total "))
    return float(lost)


def wait_until_healthy(running_site: Site) -> None:
    """Wait until the schedulers and the edges of both gateways have all engines up, and the edges their schedulers."""
    servers = {f'haproxy_backend_active_servers{{proxy="pool_{MODEL}"}} {len(ENGINES)}'}
    servers.add('haproxy_backend_active_servers{proxy="spoe-agents"} 1')

    def healthy() -> bool:
        try:
            for gateway in GATEWAYS:
                base = f"http://{running_site.addresses[gateway]}"
                state = json.loads(fetch(f"{base}:{site.SCHEDULER_PORT}/v1/state"))
                if [engine["healthy"] for engine in state["engines"]] != [True] * len(ENGINES):
                    return False
                if not servers <= set(fetch(f"{base}:{METRICS_PORT}/metrics?scope=backend").splitlines()):
                    return False
        except OSError:  # it is just being started
            return False
        return True

    wait_until(healthy, f"{len(ENGINES)} healthy engines at both gateways")


@pytest.fixture(autouse=True)
def healthy_site(running_site: Site) -> None:
    """Each test starts with all engines up at both gateways, whatever the one before it did."""
    wait_until_healthy(running_site)


@contextlib.contextmanager
def slower_engines(running_site: Site, factor: float) -> Iterator[None]:
    """Every step of every engine takes so many times as long."""
    try:
        for engine in ENGINES:
            faults.switch_fault(running_site.checkout, engine, "main", "slow", seconds=LONGEST_LOAD, factor=factor)
        yield
    finally:
        for engine in ENGINES:
            faults.switch_fault(running_site.checkout, engine, "main", "none")


def test_two_hundred_streams_for_thirty_seconds(running_site: Site) -> None:
    """At some 14 tokens a second and stream, so that the fleet's two cores have room: 40 fill four fifths of them, and
    chunks wait for a core then, at the engines and between. A chunk that a hop holds back until the next one doubles
    the time between two."""

    def client_to_engines() -> float:
        lost_before = lost_log_lines(running_site, "gw1")
        started = time.time()
        outcomes = load.run(running_site.load(200, 30))
        assert failures(outcomes) == []
        assert lost_log_lines(running_site, "gw1") == lost_before
        intervals = [interval for outcome in outcomes for interval in outcome.intervals]
        assert len(intervals) > 10_000
        at_client = percentile(intervals, 0.99) * 1000
        at_engines = [
            json.loads(fetch(f"http://{running_site.addresses[engine]}:8100/standin/intervals?since={started}"))["p99"]
            for engine in ENGINES
        ]
        print(f"p99 between chunks: client {at_client:.1f} ms, engines {at_engines} ms")
        return at_client / float(max(at_engines))

    with slower_engines(running_site, 3):
        within(1.2, client_to_engines)


def test_killed_engine_costs_only_what_it_was_answering(running_site: Site) -> None:
    def slowest_afterwards() -> float:
        wait_until_healthy(running_site)
        with Background(running_site, 60) as background:
            background.wait_for_answers(60)
            wait_until(lambda: sessions(running_site, "gw1")[KILLED] > 0, "the engine to be killed is answering")
            killed = time.time()
            running_site.on(KILLED, "systemctl kill --signal=KILL --kill-whom=main standin-engine@main.service")
            killed_by = time.time()
            background.wait_for_answers(60, after=killed_by)
            wait_until_healthy(running_site)
            background.wait_for_answers(60, after=time.time())
        failed = [outcome for outcome in background.outcomes if outcome.error]
        # What started between the two readings may have been placed on the engine just before it died.
        assert failures([outcome for outcome in failed if outcome.started > killed_by]) == []
        assert failures([outcome for outcome in failed if outcome.ended < killed]) == []
        assert failures([outcome for outcome in failed if not outcome.request_id]) == []
        ids = {outcome.request_id for outcome in failed}
        engines = answering_engines(running_site, "gw1", background.outcomes[0].started - 1, ids)
        assert {engines[request_id] for request_id in ids} <= {f"{KILLED}.main"}
        return slowest_first_chunk(background.started_after(killed_by))

    within(2.0, slowest_afterwards)


def test_killed_scheduler_fails_no_request(running_site: Site) -> None:
    with Background(running_site, 60) as background:
        background.wait_for_answers(60)
        running_site.on("gw1", "systemctl kill --signal=KILL --kill-whom=main ringmaster-scheduler.service")
        background.wait_for_answers(100, after=time.time())
        wait_until_healthy(running_site)
        background.wait_for_answers(60, after=time.time())
    assert failures(background.outcomes) == []


def test_stopped_scheduler_fails_no_request_and_the_edge_shares_the_load(running_site: Site) -> None:
    running_site.on("gw1", "systemctl stop ringmaster-scheduler.service")
    try:
        with Background(running_site, 60) as background:
            background.wait_for_answers(60)
            shares = average_sessions(running_site, "gw1")
    finally:
        running_site.on("gw1", "systemctl start ringmaster-scheduler.service")
    assert failures(background.outcomes) == []
    assert min(shares.values()) >= sum(shares.values()) / 6, shares


def test_hung_scheduler_fails_no_request(running_site: Site) -> None:
    def slowest() -> float:
        wait_until_healthy(running_site)
        with Background(running_site, 60) as background:
            background.wait_for_answers(60)
            try:
                running_site.on("gw1", "systemctl kill --signal=STOP --kill-whom=main ringmaster-scheduler.service")
                time.sleep(3)
            finally:
                # The watchdog may have ended it meanwhile.
                resume = "systemctl kill --signal=CONT --kill-whom=main ringmaster-scheduler.service"
                running_site.on("gw1", resume, check=False)
            wait_until_healthy(running_site)
            background.wait_for_answers(60, after=time.time())
        assert failures(background.outcomes) == []
        return slowest_first_chunk(background.outcomes)

    within(2.0, slowest)


def test_reload_of_the_edge_fails_no_request(running_site: Site) -> None:
    def processes() -> set[str]:
        return set(running_site.on("gw1", "pidof haproxy").split())

    with Background(running_site, 60) as background:
        background.wait_for_answers(60)
        before = processes()
        running_site.on("gw1", "systemctl reload haproxy.service")
        wait_until(lambda: bool(processes() - before), "a new worker runs")
        background.wait_for_answers(100, after=time.time())
    assert failures(background.outcomes) == []


def test_load_is_shared_by_what_each_engine_can_do(running_site: Site) -> None:
    """The two A100 have as much, and the L40S has less."""

    def most_to_least_of_equals() -> float:
        with Background(running_site, 90) as background:
            background.wait_for_answers(90)
            shares = average_sessions(running_site, "gw1")
        assert failures(background.outcomes) == []
        print(f"in flight of 90: {shares}")
        slow, equal = shares["gpu-b1"], [share for name, share in shares.items() if name != "gpu-b1"]
        # With a client that is late itself, too little is in flight for the shares to say anything.
        if sum(shares.values()) <= 70 or not 1.2 < min(equal) / slow < 4:
            return float("inf")
        return max(equal) / min(equal)

    within(1.5, most_to_least_of_equals)
