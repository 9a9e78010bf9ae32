# SPDX-License-Identifier: GPL-3.0-or-later
"""The decision path under load and in trouble: each test says what may fail, and shows that nothing else did."""

from __future__ import annotations

import asyncio
import json
import re
import time
import urllib.error
import urllib.request

import pytest

from rehearsal import site
from tests.e2e.conftest import ENGINES, MODEL, Site
from tests.e2e.gateway import (
    GATEWAY,
    POOL,
    SCHEDULER_UNIT,
    access_log,
    admin,
    background,
    edge_metrics,
    engines_up,
    failures,
    in_work,
    running_at_engines,
    sample,
    wait_until,
)
from tests.support import load


def scheduler_asks(running_site: Site) -> bool:
    """Whether the gateway has a scheduler that it asks."""
    return sample(edge_metrics(running_site), "haproxy_backend_active_servers", proxy="spoe-agents") == 1


def reload_haproxy(running_site: Site) -> None:
    """Reload HAProxy, and wait for its new worker."""
    before = running_site.on(GATEWAY, "pidof haproxy").split()
    running_site.on(GATEWAY, "systemctl reload haproxy.service")
    wait_until(lambda: bool(set(running_site.on(GATEWAY, "pidof haproxy").split()) - set(before)), "a new worker")


@pytest.fixture(autouse=True)
def healthy_site(running_site: Site) -> None:
    """Each test starts, and leaves the next one, with all engines up, nothing in work, and a scheduler asked."""
    wait_until(
        lambda: (
            engines_up(running_site) == len(ENGINES) and scheduler_asks(running_site) and in_work(running_site) == 0
        ),
        "the site is whole and idle",
        60,
    )


def test_scheduler_that_is_killed_costs_no_request_and_decides_again_within_seconds(running_site: Site) -> None:
    """May fail: nothing."""
    began = time.time()
    with background(running_site.load(60, 10, GATEWAY, max_tokens=64)) as outcomes:
        time.sleep(3)
        running_site.on(GATEWAY, f"systemctl kill --signal=KILL --kill-whom=main {SCHEDULER_UNIT}")
        killed = time.time()
        wait_until(lambda: not scheduler_asks(running_site) or time.time() > killed + 2, "HAProxy has seen it")
        wait_until(lambda: scheduler_asks(running_site), "the scheduler is asked again")
        back = time.time()
    assert failures(outcomes) == []
    lines = access_log(running_site, began)
    later = [line for line in lines if line["time"] > back + 2]
    assert later, "the load has to go on for a while after the return"
    undecided = [line["request_id"] for line in later if line["decision_reason"] in {"-", "nothing_known"}]
    assert undecided == []


def test_scheduler_that_hangs_costs_no_request_and_hardly_time(running_site: Site) -> None:
    """May fail: nothing. A request may wait for `timeout processing` until the check has found the scheduler hung."""
    with background(running_site.load(60, 12, GATEWAY, max_tokens=64)) as outcomes:
        time.sleep(3)
        running_site.on(GATEWAY, f"systemctl kill --signal=STOP --kill-whom=main {SCHEDULER_UNIT}")
        stopped = time.time()
        wait_until(lambda: not scheduler_asks(running_site), "the check finds it hung")
        found = time.time()
        # systemd's watchdog ends it, and starts another one.
        wait_until(lambda: scheduler_asks(running_site), "a scheduler is asked again")
    assert failures(outcomes) == []
    meanwhile = [outcome for outcome in outcomes if stopped <= outcome.started]
    assert meanwhile
    assert max(outcome.first_chunk - outcome.started for outcome in meanwhile) < 2.0
    assert found - stopped < 3.0


def test_engine_that_is_killed_costs_only_answers_that_it_had_begun(running_site: Site) -> None:
    """May fail: streams whose head this engine had sent. What had got nothing from it is answered by another one."""
    victim = ENGINES[0]
    began = time.time()
    with background(running_site.load(90, 12, GATEWAY, max_tokens=64)) as outcomes:
        time.sleep(4)
        running_site.on(victim, "systemctl kill --signal=KILL --kill-whom=main standin-engine@main.service")
        killed = time.time()
    failed = [outcome for outcome in outcomes if outcome.error]
    begun = {line["request_id"]: line for line in access_log(running_site, began)}
    for outcome in failed:
        assert outcome.status == 200, outcome.error
        assert begun[outcome.request_id]["engine"] == f"{victim}.main"
        assert outcome.started <= killed
    assert len([outcome for outcome in outcomes if outcome.started > killed]) > 50


def test_reload_of_haproxy_costs_no_request_and_run_time_state_is_pushed_again(running_site: Site) -> None:
    """May fail: nothing."""

    def pushed() -> dict[str, str]:
        rows = [line.split(",") for line in admin(running_site, "show stat").splitlines()]
        names = rows[0]
        columns = [names.index(name) for name in ("svname", "slim", "weight")]
        return {row[columns[0]]: ",".join(row[column] for column in columns[1:]) for row in rows if row[0] == POOL}

    marked = f"{POOL}/{ENGINES[0]}.main"
    with background(running_site.load(60, 12, GATEWAY, max_tokens=64)) as outcomes:
        time.sleep(3)
        reload_haproxy(running_site)
        # The scheduler puts right whatever else is set, in the new process as in the old one.
        admin(running_site, f"set maxconn server {marked} 7")
        wait_until(lambda: pushed()[f"{ENGINES[0]}.main"].split(",")[0] != "7", "the scheduler has set maxconn again")
    assert failures(outcomes) == []
    assert len(outcomes) > 100


def test_drained_engine_stays_drained_when_haproxy_is_reloaded_without_a_scheduler(running_site: Site) -> None:
    """May fail: nothing, and the drained engine gets nothing."""
    drained = f"{ENGINES[0]}.main"

    def servers() -> dict[str, tuple[str, int]]:
        """Status of each server, and how many requests its process of HAProxy has sent there."""
        names, *rows = [line.split(",") for line in admin(running_site, "show stat").splitlines() if "," in line]
        name, status, total = (names.index(column) for column in ("svname", "status", "stot"))
        return {row[name]: (row[status], int(row[total])) for row in rows if row[0] == POOL and row[name] != "BACKEND"}

    running_site.on(GATEWAY, f"ringmasterctl drain {drained}")
    try:
        wait_until(lambda: servers()[drained][0] == "DRAIN", "HAProxy has drained it")
        wait_until(
            lambda: f" {drained} " in running_site.on(GATEWAY, "cat /var/lib/ringmaster-scheduler/haproxy-servers"),
            "that is kept",
        )
        with background(running_site.load(60, 10, GATEWAY, max_tokens=64)) as outcomes:
            time.sleep(2)
            running_site.on(GATEWAY, f"systemctl stop {SCHEDULER_UNIT}")
            reload_haproxy(running_site)
        found = servers()
        assert failures(outcomes) == []
        assert found[drained] == ("DRAIN", 0)
        assert sum(total for _status, total in found.values()) > 50
    finally:
        running_site.on(GATEWAY, f"systemctl start {SCHEDULER_UNIT}")
        wait_until(lambda: scheduler_asks(running_site), "the scheduler is back")
        running_site.on(GATEWAY, f"ringmasterctl undrain {drained}")


def test_pool_that_is_empty_for_a_while_says_so_and_serves_again(running_site: Site) -> None:
    """May fail: streams that had begun when the engines ended, and what came while none was up: 503 at once, with a
    time to come again, in OpenAI's form. Nothing hangs, and nothing fails once they are back."""
    with background(running_site.load(30, 40, GATEWAY, max_tokens=64)) as outcomes:
        time.sleep(3)
        for engine in ENGINES:
            running_site.on(engine, "systemctl stop --no-block standin-engine@main.service")
        wait_until(lambda: engines_up(running_site) == 0, "the pool is empty")
        empty = time.time()
        request = urllib.request.Request(
            f"http://{running_site.addresses[GATEWAY]}:{site.PUBLIC_PORT}/v1/completions",
            json.dumps({"model": MODEL, "prompt": "Hello", "max_tokens": 1}).encode(),
            {"Authorization": f"Bearer {running_site.edge_key}", "Content-Type": "application/json"},
        )
        with pytest.raises(urllib.error.HTTPError) as refused:
            urllib.request.urlopen(request, timeout=5)
        assert refused.value.code == 503
        assert int(refused.value.headers["Retry-After"]) >= 1
        assert json.loads(refused.value.read())["error"]["code"] == "no_engine"
        took = time.time() - empty
        for engine in ENGINES:
            running_site.on(engine, "systemctl start standin-engine@main.service")
        wait_until(lambda: engines_up(running_site) == len(ENGINES), "all engines are back")
        back = time.time()
    assert took < 2.0
    others = [
        error
        for error in failures(outcomes)
        if not re.search(r": (status (503|429|502): |connection closed after|the stream ended after)", error)
    ]
    assert others == []
    late = [outcome for outcome in outcomes if outcome.error and outcome.started > back + 3]
    assert failures(late) == []
    assert [outcome for outcome in outcomes if not outcome.error and outcome.started > back + 3]
    assert max(outcome.ended - outcome.started for outcome in outcomes if "503" in outcome.error) < 2.0


async def _come_and_leave(what: load.Load, clients: int, stay: float) -> int:
    """Send a chat on each of many connections, wait, and close them all without a word; gives how many were sent."""
    writers = []
    for number in range(clients):
        reader, writer = await asyncio.open_connection(what.address, what.port)
        del reader  # whatever comes is left unread
        writer.write(what.request(10**9 + number, f"leaves-{number}"))
        writers.append(writer)
    await asyncio.sleep(stay)
    for writer in writers:
        writer.transport.abort()
    return len(writers)


def test_thousand_clients_that_leave_free_all_that_they_had(running_site: Site) -> None:
    """May fail: while the thousand are there, another request that could not start in time gets 429. Engines and
    queue forget those who left within seconds."""
    what = running_site.load(1, 1, GATEWAY, max_tokens=2000)
    began = time.time()
    with background(running_site.load(10, 20, GATEWAY, max_tokens=16)) as outcomes:
        sent = asyncio.run(_come_and_leave(what, 1000, 3.0))
        left = time.time()
        forgotten = wait_until(lambda: in_work(running_site) <= 10, "the gateway has forgotten those who left")
        wait_until(lambda: running_at_engines(running_site) <= 10, "the engines have forgotten them, too")
    crowded = [outcome for outcome in outcomes if outcome.status == 429 and began < outcome.started < left + 1]
    assert failures([outcome for outcome in outcomes if outcome not in crowded]) == []
    assert forgotten < 5.0
    assert sent == 1000
    assert len([outcome for outcome in outcomes if outcome.started > left]) > 10
    wait_until(lambda: in_work(running_site) == 0, "nothing is in work")
    # Those who had waited in the queue never got to an engine.
    waited = [line for line in access_log(running_site, began) if line["termination"].startswith("CQ")]
    assert {line["engine"] for line in waited} <= {"<NOSRV>"}
