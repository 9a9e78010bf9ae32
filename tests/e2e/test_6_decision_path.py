# SPDX-License-Identifier: GPL-3.0-or-later
"""The decision path under load and in trouble: each test says what may fail, and shows that nothing else did."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from rehearsal import site
from tests.e2e.conftest import ENGINES, MODEL, Site
from tests.support import load
from tests.support.load import Outcome

GATEWAY = "gw1"
POOL = f"pool_{MODEL}"
METRICS_PORT = 8405
ENGINE_PORT = 8100
SCHEDULER_UNIT = "ringmaster-scheduler.service"
PATIENCE = 30.0
ADMIN = """
import socket
client = socket.socket(socket.AF_UNIX)
client.connect("/run/haproxy/admin.sock")
client.sendall(b"{command}\\n")
while part := client.recv(65536):
    print(part.decode(), end="")
"""


@contextlib.contextmanager
def background(what: load.Load) -> Iterator[list[Outcome]]:
    """A load that runs while the test breaks something; its outcomes are there when the block has ended."""
    outcomes: list[Outcome] = []
    thread = threading.Thread(target=lambda: outcomes.extend(load.run(what)))
    thread.start()
    try:
        yield outcomes
    finally:
        thread.join()


def wait_until(condition: Callable[[], bool], what: str, patience: float = PATIENCE) -> float:
    """Wait for something that has to happen; gives the seconds that it took."""
    began = time.monotonic()
    while not condition():
        assert time.monotonic() - began < patience, f"waited {patience:g} s in vain: {what}"
        time.sleep(0.1)
    return time.monotonic() - began


def get(address: str, port: int, path: str) -> str:
    """The body of an answer."""
    with urllib.request.urlopen(f"http://{address}:{port}{path}", timeout=5) as response:
        return bytes(response.read()).decode()


def sample(text: str, name: str, **labels: str) -> float:
    """Sum of the samples of one metric that have some labels."""
    total = 0.0
    for line in text.splitlines():
        if line.startswith(f"{name}{{") and all(f'{key}="{value}"' in line for key, value in labels.items()):
            total += float(line.rpartition(" ")[2])
    return total


def edge_metrics(running_site: Site) -> str:
    """HAProxy's metrics of the gateway."""
    return get(running_site.addresses[GATEWAY], METRICS_PORT, "/metrics")


def engines_up(running_site: Site) -> int:
    """Engines of the pool that the gateway holds for up."""
    return int(sample(edge_metrics(running_site), "haproxy_backend_active_servers", proxy=POOL))


def in_work(running_site: Site) -> int:
    """Requests that the gateway has at engines or in its queue."""
    text = edge_metrics(running_site)
    names = ("haproxy_server_current_sessions", "haproxy_backend_current_queue", "haproxy_server_current_queue")
    return int(sum(sample(text, name, proxy=POOL) for name in names))


def running_at_engines(running_site: Site) -> int:
    """Requests that the engines themselves count as running or waiting."""
    total = 0.0
    for engine in ENGINES:
        text = get(running_site.addresses[engine], ENGINE_PORT, "/metrics")
        total += sample(text, "vllm:num_requests_running") + sample(text, "vllm:num_requests_waiting")
    return int(total)


def admin(running_site: Site, command: str) -> str:
    """What HAProxy answers on its stats socket."""
    return running_site.on(GATEWAY, "python3 -", stdin=ADMIN.replace("{command}", command))


def access_log(running_site: Site, since: float) -> list[dict[str, Any]]:
    """Lines of the access log since a Unix time."""
    text = running_site.on(GATEWAY, f"journalctl --unit haproxy --since @{since:.0f} --no-pager --output cat")
    return [json.loads(line[line.find("{") :]) for line in text.splitlines() if '"request_id"' in line]


def failures(outcomes: list[Outcome]) -> list[str]:
    """What went wrong, a line a request."""
    return [f"started {outcome.started:.3f}: {outcome.error}" for outcome in outcomes if outcome.error]


def scheduler_asks(running_site: Site) -> bool:
    """Whether the gateway has a scheduler that it asks."""
    return sample(edge_metrics(running_site), "haproxy_backend_active_servers", proxy="spoe-agents") == 1


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
        before = running_site.on(GATEWAY, "pidof haproxy")
        running_site.on(GATEWAY, "systemctl reload haproxy.service")
        wait_until(
            lambda: bool(set(running_site.on(GATEWAY, "pidof haproxy").split()) - set(before.split())), "a new worker"
        )
        # The scheduler puts right whatever else is set, in the new process as in the old one.
        admin(running_site, f"set maxconn server {marked} 7")
        wait_until(lambda: pushed()[f"{ENGINES[0]}.main"].split(",")[0] != "7", "the scheduler has set maxconn again")
    assert failures(outcomes) == []
    assert len(outcomes) > 100


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
