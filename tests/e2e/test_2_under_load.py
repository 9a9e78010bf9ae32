# SPDX-License-Identifier: GPL-3.0-or-later
"""Promises under load: nothing is held back, and a failure costs no more than what it must."""

from __future__ import annotations

import json
import threading
import time
import urllib.request

import pytest

from rehearsal import site
from tests.e2e.conftest import ENGINES, Site
from tests.support import load
from tests.support.load import Outcome, percentile


def failures(outcomes: list[Outcome]) -> list[str]:
    """What went wrong, a line a request."""
    return [f"started {outcome.started:.3f}: {outcome.error}" for outcome in outcomes if outcome.error]


SESSIONS = ("haproxy_server_current_sessions{", "haproxy_server_current_queue{")


class Background:
    """A load that runs while the test breaks something."""

    def __init__(self, what: load.Load) -> None:
        self.outcomes: list[Outcome] = []
        self.thread = threading.Thread(target=lambda: self.outcomes.extend(load.run(what)))

    def __enter__(self) -> Background:
        self.thread.start()
        return self

    def __exit__(self, *_exception: object) -> None:
        self.thread.join()


def server_sessions(running_site: Site, gateway: str, server: str) -> int:
    """Requests that HAProxy has at one server now, in flight or in its queue."""
    url = f"http://{running_site.addresses[gateway]}:8405/metrics?scope=server"
    total = 0.0
    for line in urllib.request.urlopen(url, timeout=5).read().decode().splitlines():
        name, _space, value = line.rpartition(" ")
        if name.startswith(SESSIONS) and f'server="{server}"' in name:
            total += float(value)
    return int(total)


def answering_engines(running_site: Site, gateway: str, since: float) -> dict[str, str]:
    """Request id → engine, from the edge's access log."""
    log = running_site.on(gateway, f"journalctl --unit haproxy --since @{since:.0f} --no-pager --output cat")
    engines = {}
    for line in log.splitlines():
        at = line.find("{")
        if at >= 0 and '"request_id"' in line:
            entry = json.loads(line[at:])
            engines[entry["request_id"]] = entry["engine"]
    return engines


@pytest.fixture(autouse=True)
def healthy_site(running_site: Site) -> None:
    """Each test starts, and leaves the next one, with all engines up at both gateways."""
    end = time.monotonic() + 30
    up = 0
    while time.monotonic() < end:
        up = 0
        for gateway in ("gw1", "gw2"):
            state = json.loads(
                urllib.request.urlopen(
                    f"http://{running_site.addresses[gateway]}:{site.SCHEDULER_PORT}/v1/state", timeout=5
                ).read()
            )
            up += sum(1 for engine in state["engines"] if engine["healthy"])
        if up == 2 * len(ENGINES):
            return
        time.sleep(0.5)
    raise AssertionError(f"expected {2 * len(ENGINES)} healthy engines at the schedulers, found {up}")


def test_two_hundred_streams_for_thirty_seconds(running_site: Site) -> None:
    started = time.time()
    outcomes = load.run(running_site.load(200, 30))
    assert failures(outcomes) == []
    intervals = [interval for outcome in outcomes for interval in outcome.intervals]
    assert len(intervals) > 10_000
    at_client = percentile(intervals, 0.99) * 1000
    at_engines = []
    for engine in ENGINES:
        url = f"http://{running_site.addresses[engine]}:8100/standin/intervals?since={started}"
        at_engines.append(json.loads(urllib.request.urlopen(url, timeout=5).read())["p99"])
    print(f"p99 between chunks: client {at_client:.1f} ms, engines {at_engines} ms")
    assert at_client <= 1.2 * max(at_engines)


def test_killed_engine_costs_only_what_it_was_answering(running_site: Site) -> None:
    with Background(running_site.load(60, 12, max_tokens=64)) as background:
        time.sleep(4)
        at_kill = server_sessions(running_site, "gw1", "gpu-a1.main")
        killed = time.time()
        running_site.on("gpu-a1", "systemctl kill --signal=KILL --kill-whom=main standin-engine@main.service")
        killed_by = time.time()
    failed = [outcome for outcome in background.outcomes if outcome.error]
    assert at_kill > 0, "the test must kill an engine that is answering"
    # What started between the two readings may have been placed on the engine just before it died.
    late = [outcome for outcome in failed if outcome.started > killed_by]
    assert failures(late) == []
    placed_meanwhile = sum(1 for outcome in background.outcomes if killed <= outcome.started <= killed_by)
    assert len(failed) <= at_kill + placed_meanwhile
    engines = answering_engines(running_site, "gw1", since=killed - 10)
    assert {engines.get(outcome.request_id) for outcome in failed if outcome.request_id} <= {"gpu-a1.main"}
    after = [outcome for outcome in background.outcomes if outcome.started > killed_by]
    assert len(after) > 50
    assert max(outcome.first_chunk - outcome.started for outcome in after) < 2.0


def test_killed_scheduler_fails_no_request(running_site: Site) -> None:
    with Background(running_site.load(60, 10, max_tokens=64)) as background:
        time.sleep(3)
        running_site.on("gw1", "systemctl kill --signal=KILL --kill-whom=main ringmaster-scheduler.service")
    assert failures(background.outcomes) == []
    assert len(background.outcomes) > 100


def test_stopped_scheduler_fails_no_request_and_the_edge_shares_the_load(running_site: Site) -> None:
    running_site.on("gw1", "systemctl stop ringmaster-scheduler.service")
    try:
        with Background(running_site.load(60, 6, max_tokens=64)) as background:
            time.sleep(3)
            shares = [server_sessions(running_site, "gw1", f"{engine}.main") for engine in ENGINES]
    finally:
        running_site.on("gw1", "systemctl start ringmaster-scheduler.service")
    assert failures(background.outcomes) == []
    assert min(shares) >= 10, shares


def test_hung_scheduler_fails_no_request(running_site: Site) -> None:
    with Background(running_site.load(60, 8, max_tokens=64)) as background:
        time.sleep(2)
        running_site.on("gw1", "systemctl kill --signal=STOP --kill-whom=main ringmaster-scheduler.service")
        time.sleep(3)
        # The watchdog may have ended it meanwhile.
        resume = "systemctl kill --signal=CONT --kill-whom=main ringmaster-scheduler.service"
        running_site.on("gw1", resume, check=False)
    assert failures(background.outcomes) == []
    assert max(outcome.first_chunk - outcome.started for outcome in background.outcomes) < 2.0


def test_reload_of_the_edge_fails_no_request(running_site: Site) -> None:
    before = running_site.on("gw1", "pidof haproxy")
    with Background(running_site.load(60, 8, max_tokens=64)) as background:
        time.sleep(3)
        running_site.on("gw1", "systemctl reload haproxy.service")
        time.sleep(1)
        during = running_site.on("gw1", "pidof haproxy")
    assert set(during.split()) - set(before.split()), "expected a new worker"
    assert failures(background.outcomes) == []
    assert len(background.outcomes) > 100


def test_load_is_shared_by_what_each_engine_has(running_site: Site) -> None:
    # Averages: streams of one length that began together end together, and for that moment no share says anything.
    samples: dict[str, list[int]] = {engine: [] for engine in ENGINES}
    with Background(running_site.load(90, 10, max_tokens=64)) as background:
        time.sleep(2)
        for _unused in range(12):
            for engine in ENGINES:
                samples[engine].append(server_sessions(running_site, "gw1", f"{engine}.main"))
            time.sleep(0.5)
    assert failures(background.outcomes) == []
    shares = {engine: sum(counts) / len(counts) for engine, counts in samples.items()}
    assert sum(shares.values()) > 70, shares
    assert max(shares.values()) <= 1.5 * min(shares.values()), shares
