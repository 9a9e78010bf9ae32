# SPDX-License-Identifier: GPL-3.0-or-later
"""What the end-to-end tests ask of a gateway, and the load that they send through it."""

from __future__ import annotations

import contextlib
import json
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from typing import Any

from rehearsal import site
from tests.e2e.conftest import ENGINES, MODEL, Site
from tests.support import load
from tests.support.load import Outcome

GATEWAY = "gw1"
GATEWAYS = (GATEWAY, "gw2")
SCHEDULER_UNIT = "ringmaster-scheduler.service"
POOL = f"pool_{MODEL}"
METRICS_PORT = 8405
ENGINE_PORT = 8100
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


@contextlib.contextmanager
def steady_load(
    running_site: Site, streams: int, seconds: float = 300, gateway: str = GATEWAY
) -> Iterator[list[Outcome]]:
    """A load for as long as the block lasts, at most so many seconds; the list grows with each request."""
    outcomes: list[Outcome] = []
    over = threading.Event()
    what = running_site.load(streams, seconds, gateway, max_tokens=32)
    thread = threading.Thread(target=load.run, args=(what, outcomes, over.is_set))
    thread.start()
    try:
        yield outcomes
    finally:
        over.set()
        thread.join()


def placements(running_site: Site, gateway: str = GATEWAY) -> dict[str, int]:
    """The engines that a gateway's scheduler knows, with the requests it gave them."""
    state = json.loads(get(running_site.addresses[gateway], site.SCHEDULER_PORT, "/v1/state"))
    return {engine["name"]: engine["placements"] for engine in state["engines"]}


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
    """Lines of the access log since a Unix time, of requests that came to be decided."""
    text = running_site.on(GATEWAY, f"journalctl --unit haproxy --since @{since:.0f} --no-pager --output cat")
    lines = [json.loads(line[line.find("{") :]) for line in text.splitlines() if '"request_id"' in line]
    return [line for line in lines if line["pool"] != "preprocessors"]


def failures(outcomes: list[Outcome]) -> list[str]:
    """What went wrong, a line a request."""
    return [f"started {outcome.started:.3f}: {outcome.error}" for outcome in outcomes if outcome.error]
