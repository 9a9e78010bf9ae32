# SPDX-License-Identifier: GPL-3.0-or-later
"""Policies side by side on the fleet of `make rehearse`, and the simulator on the same traces.

Usage: python -m tests.bench.mixed_fleet [--bursts N] [--seed S]

The trace is that of the scenario *bursts* of policies.py: 80 requests in 0.5 s, then 3 s of nothing, 2 % of the prompts
long. It is played four times, the fleet being idle before each: through a bare HAProxy with ``balance roundrobin``,
through one with ``balance leastconn``, both with the edge's ``maxconn`` a server, through the first gateway, and
through the gateway without the long prompts. Engines run at the speed of the real cards meanwhile, at which the trace
is nearly all that they can do, and stream 32 tokens a chunk, so that the machine's processors do not set the pace; how
busy they were is printed. What is measured is what the simulator measures: the time from when a request was due to its
first token, and the tokens that the engines made until 3 s after the last request.

15 bursts, the default, take about 4 minutes; what the bursts before have left to do is there in full only after 30 or
more. Prompts are made such that the stand-in's tokenizer finds as many tokens in them as the edge estimates from the
body.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import re
import secrets
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from string import ascii_lowercase
from typing import NamedTuple

import uvloop

from rehearsal import faults, site
from rehearsal.checkout import Checkout
from tests.bench.policies import POLICIES, SHORT, MakePolicy, check, join, percentile, play
from tests.bench.rehearsed import rehearsed
from tests.bench.simulator.engines import Engine
from tests.bench.simulator.policies import RoundRobin
from tests.bench.simulator.traces import Ask, bursts
from tests.support import load
from tests.support.ports import port_of, reserve_port
from tests.support.waiting import wait_until

ROOT = Path(__file__).resolve().parents[2]
HAPROXY = ROOT / ".cache" / "tools" / "bin" / "haproxy-trixie"
"""The version of the fleet's gateways."""

PATH = "/v1/completions"
BYTES_PER_TOKEN = 4
"""``edge_bytes_per_token``."""

TOKENS_PER_CHUNK = 32
AFTER = 3.0
"""Seconds after the last request in which tokens still count, as in policies.py."""

PATIENCE = 60.0
"""Seconds to wait for a first token after that: the edge's ``timeout queue``."""

SIMULATIONS = 4
"""Runs of the simulator for each of the fleet."""

JITTER = 0.001
"""Standard deviation in seconds of when a request arrives against when it was due: timers of the client."""

POLICIES_OF_HAPROXY = {"round-robin": "roundrobin", "least-connections": "leastconn"}
OURS, OURS_SHORT = "ringmaster", "ringmaster, short only"

BARE = """\
global
    maxconn 4000
defaults
    mode http
    option http-no-delay
    option abortonclose
    timeout connect 500ms
    timeout client 1m
    timeout queue 60s
    timeout server 15m
listen bare
    bind 127.0.0.1:{port}
    balance {policy}
{servers}
"""


class Member(NamedTuple):
    """An engine of the fleet; `time_scale` is what a step takes over what it would take on the real card."""

    host: str
    name: str
    address: str
    port: int
    card: str
    slots: int
    time_scale: float

    def counters(self) -> tuple[float, float]:
        """Tokens made since its start, and requests that it has now."""
        with urllib.request.urlopen(f"http://{self.address}:{self.port}/metrics", timeout=5) as response:
            text = response.read().decode()
        made, running, waiting = (
            sum(float(value) for value in re.findall(rf"^vllm:{name}(?:{{.*}})? (\S+)$", text, re.MULTILINE))
            for name in ("generation_tokens_total", "num_requests_running", "num_requests_waiting")
        )
        return made, running + waiting


class Way(NamedTuple):
    """A contender: where its requests go, and with which key."""

    address: str
    port: int
    key: str


class Figures(NamedTuple):
    """What came of a trace; times to the first token in seconds, tokens/s over the trace. `busy` is the share of their
    time in which the machine's processors worked, None in the simulator."""

    requests: int
    refused: int
    failed: int
    first_token: list[float]
    first_token_short: list[float]
    tokens_per_second: float
    busy: float | None = None

    @property
    def p99(self) -> float:
        """p99 of the time to the first token."""
        return percentile(self.first_token, 0.99)


def body(model: str, ask: Ask, source: random.Random) -> bytes:
    """The body of a request whose prompt has as many tokens as the trace says, and which is as long as makes the edge
    estimate the same: a space and three letters are a token and four bytes, and shorter tokens make up for the rest of
    the body. A prompt's first tokens are its own, so that nothing of it is in an engine's cache."""
    document: dict[str, object] = {
        "model": model,
        "prompt": "",
        "max_tokens": ask.output,
        "ignore_eos": True,
        "stream": True,
        "stream_interval": TOKENS_PER_CHUNK,
    }
    surplus = len(json.dumps(document))
    twos, threes = divmod(surplus, 2)
    letters = [3] * (ask.prompt - twos - threes) + [2] * threes + [1] * twos
    document["prompt"] = "".join(" " + "".join(source.choices(ascii_lowercase, k=count)) for count in letters)
    return json.dumps(document).encode()


def processor_times() -> tuple[float, float]:
    """Time that all processors were busy, and all of their time, since the machine's start, in ticks."""
    ticks = [int(field) for field in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
    idle = ticks[3] + ticks[4]
    return sum(ticks) - idle, sum(ticks)


@contextlib.contextmanager
def bare_haproxy(policy: str, members: Sequence[Member], key: str) -> Iterator[Way]:
    """HAProxy that does nothing but balance over the engines."""
    servers = "\n".join(f"    server {each.host} {each.address}:{each.port} maxconn {each.slots}" for each in members)
    with tempfile.TemporaryDirectory(prefix="ringmaster-bench-") as folder, reserve_port() as reserved:
        way = Way("127.0.0.1", port_of(reserved), key)
        configuration = Path(folder) / "haproxy.cfg"
        configuration.write_text(BARE.format(port=way.port, policy=policy, servers=servers))
        process = subprocess.Popen([HAPROXY, "-db", "-f", configuration])
        try:
            wait_until(lambda: accepts(way), "HAProxy listens", PATIENCE)
            yield way
        finally:
            process.terminate()
            process.wait()


def accepts(way: Way) -> bool:
    """Whether somebody listens there."""
    try:
        with urllib.request.urlopen(f"http://{way.address}:{way.port}/health", timeout=5):
            return True
    except OSError:
        return False


@contextlib.contextmanager
def real_speed(checkout: Checkout, members: Sequence[Member]) -> Iterator[None]:
    """Let the stand-in engines run as fast as the cards that they stand for."""
    try:
        for each in members:
            faults.switch_fault(checkout, each.host, each.name, "slow", factor=1 / each.time_scale)
        yield
    finally:
        for each in members:
            faults.switch_fault(checkout, each.host, each.name, faults.NONE)


def on_fleet(way: Way, model: str, trace: Sequence[Ask], members: Sequence[Member]) -> Figures:
    """Play a trace through a contender, once the fleet is idle."""
    wait_until(lambda: not any(each.counters()[1] for each in members), "the fleet is idle", PATIENCE)
    time.sleep(1)  # whoever counts requests has seen it too
    name = secrets.token_hex(6)
    source = random.Random(name)
    requests = []
    for number, ask in enumerate(trace):
        request_id = f"{name}-{number}"
        content = body(model, ask, source)
        requests.append(
            load.Timed(ask.at, request_id, load.post(PATH, f"{way.address}:{way.port}", way.key, request_id, content))
        )
    seconds = trace[-1].at + AFTER

    def made() -> float:
        return sum(each.counters()[0] for each in members)

    async def replay() -> tuple[list[load.Outcome], float, tuple[float, float]]:
        playing = asyncio.ensure_future(load.replay(way.address, way.port, requests, seconds, PATIENCE))
        await asyncio.sleep(seconds)
        at_end = await asyncio.to_thread(made), processor_times()
        return await playing, *at_end

    made_before, (busy_before, all_before) = made(), processor_times()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        outcomes, made_after, (busy_after, all_after) = runner.run(replay())
    good = [
        (outcome.first_chunk - outcome.started, ask.prompt)
        for outcome, ask in zip(outcomes, trace)
        if not outcome.error
    ]
    refused = sum(outcome.status == 429 for outcome in outcomes)
    for error in [outcome.error for outcome in outcomes if outcome.error and outcome.status != 429][:3]:
        print(f"failed: {error}")
    return Figures(
        len(outcomes),
        refused,
        len(outcomes) - len(good) - refused,
        [seconds for seconds, _unused in good],
        [seconds for seconds, prompt in good if prompt <= SHORT],
        (made_after - made_before) / seconds,
        (busy_after - busy_before) / (all_after - all_before),
    )


def in_simulator(make: MakePolicy, trace: Sequence[Ask], members: Sequence[Member]) -> Figures:
    """Play a trace under a policy in the simulator, several times.

    A millisecond decides which engine a long prompt meets, and with it the slowest requests of a run: what can be
    compared with another run is what several have in common.
    """
    source = random.Random(1)

    def engines() -> list[Engine]:
        return [Engine(each.host, each.card, each.slots) for each in source.sample(members, len(members))]

    def jittered() -> list[Ask]:
        asks = [ask._replace(at=max(0.0, source.gauss(ask.at, JITTER))) for ask in trace]
        return sorted(asks, key=lambda ask: ask.at)

    result = join([play(make, jittered(), engines) for _unused in range(SIMULATIONS)])
    refused = sum(request.status == 429 for request in result.requests)
    return Figures(
        len(result.requests),
        refused,
        len(result.requests) - len(result.first_token) - refused,
        result.first_token,
        result.first_token_short,
        result.produced / SIMULATIONS / (trace[-1].at + AFTER),
    )


def show(title: str, figures: dict[str, Figures]) -> None:
    """Print a table."""
    print(f"\n{title}")
    print(
        f"{'policy':<24} {'requests':>8} {'refused':>8} {'failed':>7} {'TTFT p50':>9} {'p99':>7} {'short p50':>10}"
        f" {'p99':>7} {'tokens/s':>9} {'busy':>6}"
    )
    for name, each in figures.items():
        print(
            f"{name:<24} {each.requests:>8} {each.refused:>8} {each.failed:>7}"
            f" {percentile(each.first_token, 0.5):>9.3f} {each.p99:>7.3f}"
            f" {percentile(each.first_token_short, 0.5):>10.3f} {percentile(each.first_token_short, 0.99):>7.3f}"
            f" {each.tokens_per_second:>9,.0f} {'–' if each.busy is None else f'{each.busy:.0%}':>6}"
        )


def check_all(real: dict[str, Figures], simulated: dict[str, Figures]) -> bool:
    """Print ratios beside what is asked; whether all are reached."""
    ours = real[OURS]
    short = percentile(ours.first_token_short, 0.99) / real[OURS_SHORT].p99
    better = max(real[name].tokens_per_second for name in POLICIES_OF_HAPROXY)
    print()
    reached = [
        check("requests that failed", sum(each.failed for each in real.values()), 0),
        check("p99 TTFT over round-robin's", ours.p99 / real["round-robin"].p99, 0.5),
        check("p99 TTFT over least-connections'", ours.p99 / real["least-connections"].p99, 0.7),
        check("tokens/s over the better of both", ours.tokens_per_second / better, 1.0, at_most=False),
        check("short requests' p99 over theirs without long ones", short, 1.3),
    ]
    print("simulator against fleet, relative difference:")
    for name, each in real.items():
        in_time = abs(simulated[name].p99 / each.p99 - 1)
        in_tokens = abs(simulated[name].tokens_per_second / each.tokens_per_second - 1)
        reached += [check(f"p99 TTFT, {name}", in_time, 0.15), check(f"tokens/s, {name}", in_tokens, 0.15)]
    return all(reached)


def main() -> int:
    """Print the figures; status 1 when a request failed or a target is missed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--bursts", type=int, default=15, help="bursts of the trace, 3.5 s each")
    parser.add_argument("--seed", type=int, default=1, help="another trace of the same kind")
    options = parser.parse_args()
    checkout, addresses, hosts, gateway, model = found = rehearsed()
    members = [
        Member(
            host,
            engine["name"],
            addresses[host],
            engine["port"],
            hosts.variables[host]["ringmaster_card"],
            engine["options"]["max-num-seqs"],
            hosts.variables[host]["vllm_standin_time_scale"],
        )
        for host in hosts.groups["engines"]
        for engine in hosts.variables[host]["vllm_engines"]
    ]
    edge_key, engine_key = found.secret("edge_api_key"), found.secret("vllm_api_key")

    def trace(long_share: float) -> list[Ask]:
        asks = bursts(options.bursts, long=(4000, 8000), long_share=long_share, output=600, seed=options.seed)
        # One key, and what the client says of the answer's length, as on the fleet.
        return [ask._replace(key="rehearsal", max_tokens=ask.output) for ask in asks]

    mixed, short = trace(0.02), trace(-0.02)
    edge = Way(addresses[gateway], site.PUBLIC_PORT, edge_key)
    real: dict[str, Figures] = {}
    with real_speed(checkout, members):
        for name, policy in POLICIES_OF_HAPROXY.items():
            with bare_haproxy(policy, members, engine_key) as way:
                real[name] = on_fleet(way, model, mixed, members)
        real[OURS] = on_fleet(edge, model, mixed, members)
        real[OURS_SHORT] = on_fleet(edge, model, short, members)
    show(f"the fleet, {options.bursts} bursts through HAProxy and {gateway}", real)
    simulated = {
        "round-robin": in_simulator(lambda: RoundRobin(skip_full=True), mixed, members),
        "least-connections": in_simulator(POLICIES["least-connections"], mixed, members),
        OURS: in_simulator(POLICIES[OURS], mixed, members),
        OURS_SHORT: in_simulator(POLICIES[OURS], short, members),
    }
    show(f"the simulator, {SIMULATIONS} runs each", simulated)
    return 0 if check_all(real, simulated) else 1


if __name__ == "__main__":
    sys.exit(main())
