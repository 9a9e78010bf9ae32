# SPDX-License-Identifier: GPL-3.0-or-later
"""What 200 agents' streams cost the scheduler: processor time of one core, and what it does to decisions.

Usage: python -m tests.bench.streams [--agents N] [--seconds S] [--engines N]

The scheduler's part (follow the streams, merge them, judge by the role's table of rules four times a second, push the
weights into a core that has an engine a host) runs in a process of its own, pinned to one core; its processor time is
what the kernel counts for it. The agents are one other process. Each host has eight cards and eight RoCE ports; in each
second it tells of all of them once, with everything changed that changes on a busy host, and of its engines five times.
Beside that, decisions are timed in the scheduler's loop: alone, and with the streams.
"""

from __future__ import annotations

import argparse
import asyncio
import copy
import json
import multiprocessing
import os
import resource
import sys
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

CHECKOUT = Path(__file__).resolve().parents[2]
sys.path[:0] = [
    str(CHECKOUT),
    str(CHECKOUT / "roles" / "scheduler" / "files"),
    str(CHECKOUT / ".cache" / "collections"),
]

import uvloop  # noqa: E402
import yaml  # noqa: E402
from aiohttp import web  # noqa: E402

from ringmaster_scheduler import health_rules  # noqa: E402
from ringmaster_scheduler.agents import AgentReader  # noqa: E402
from ringmaster_scheduler.core import DecisionCore, Settings  # noqa: E402
from ringmaster_scheduler.domain import Agent, Ended, Engine, Reading, Request  # noqa: E402
from ringmaster_scheduler.health import HealthBook  # noqa: E402

ALLOWED = 0.15
"""Share of one core that 200 streams may cost."""

CARDS = PORTS = 8
ENGINE_CHANGES = 5
WEIGH = 0.25
DECISIONS_EVERY = 0.005
MODEL = "m"


def _host(name: str) -> dict[str, Any]:
    """Return the subjects of a host, as its snapshot has them."""
    subjects: dict[str, Any] = {}
    for index in range(CARDS):
        address = f"0000:{index + 5:02x}:00.0"
        subjects[f"gpu/GPU-{name}-{index}"] = {
            "index": index,
            "pci_address": address,
            "model": "NVIDIA A100-SXM4-80GB",
            "state": "ok",
            "ecc_uncorrected_volatile": 0,
            "ecc_corrected_volatile": 0,
            "remapped_rows_pending": False,
            "remapped_rows_failed": False,
            "recovery_action": "none",
            "clock_event_reasons": [],
            "clock_lost_seconds": 0.0,
            "pcie_replay_counter": 0,
            "pcie_width": 16,
            "pcie_width_max": 16,
            "pcie_generation": 4,
            "pcie_generation_max": 4,
            "utilization_percent": 50,
            "temperature_celsius": 60,
            "power_watts": 250.0,
        }
        subjects[f"nvlink/GPU-{name}-{index}"] = {"links": 12, "expected": 12, "down": [], "errors": 0}
        counters = {f"{above}{kind}": 0 for above in ("", "above_") for kind in ("correctable", "nonfatal", "fatal")}
        subjects[f"pcie/{address}"] = {"kind": "gpu", **counters, "width": 16, "width_max": 16}
        subjects[f"pcie/0000:{index + 0x30:02x}:00.0"] = {"kind": "nic", **counters, "width": 16, "width_max": 16}
        subjects[f"xid/{address[:-2]}"] = {}
    for index in range(PORTS):
        hardware = dict.fromkeys(
            ("packet_seq_err", "local_ack_timeout_err", "implied_nak_seq_err", "out_of_sequence"), 0
        )
        ethernet = dict.fromkeys(("tx_vport_rdma_unicast_packets", "rx_vport_rdma_unicast_packets"), 0)
        sample = {"seconds": 0.0, "boot": "boot", "driver": "driver", "hardware": hardware, "ethernet": ethernet}
        subjects[f"port/mlx5_{index}/1"] = {"netdev": f"ens{index}", "state": "ACTIVE", "sample": sample}
    return subjects


def _hardware(subjects: dict[str, Any], second: int) -> dict[str, Any]:
    """Return what changes in a second on a busy host, the same on all."""
    values: dict[str, Any] = {}
    for name, quantities in subjects.items():
        if name.startswith("gpu/"):
            values[name] = {
                "utilization_percent": 50 + second % 50,
                "temperature_celsius": 60 + second % 7,
                "power_watts": 250.0 + second % 11,
                "clock_event_reasons": ["sw_power_cap"] if second % 2 else [],
                "ecc_corrected_volatile": second // 9,
            }
        elif name.startswith("port/"):
            sample = copy.deepcopy(quantities["sample"])
            sample["seconds"] = float(second)
            for counter in sample["ethernet"]:
                sample["ethernet"][counter] = 1_000_000 * second
            sample["hardware"]["packet_seq_err"] = 20 * second
            values[name] = {"sample": sample}
        elif name.startswith("nvlink/") and second % 3 == 0:
            values[name] = {"errors": second // 3}
    return values


def agents(port_to: Connection, count: int) -> None:
    """Play all agents, on one port, until the process is ended."""
    subjects = _host("host")
    begun_at = time.monotonic()

    def line(host: str, kind: str, sequence: int, values: Any, read: dict[str, float]) -> bytes:
        seconds = time.monotonic() - begun_at
        head = {
            "schema": 1,
            "type": kind,
            "agent": f"agent-of-{host}",
            "host": host,
            "boot": "boot",
            "sequence": sequence,
        }
        return json.dumps({**head, "seconds": seconds, "read": read, "values": values, "unknown": {}}).encode() + b"\n"

    async def stream(request: web.Request) -> web.StreamResponse:
        host = request.match_info["host"]
        response = web.StreamResponse(headers={"Content-Type": "application/x-ndjson"})
        await response.prepare(request)
        hardware = ("gpu", "nvlink", "pcie", "rdma", "xid")
        await response.write(line(host, "snapshot", 0, subjects, dict.fromkeys(hardware, 0.0)))
        await asyncio.sleep(int(host[5:]) / count)
        sequence = 0
        while True:
            now = time.monotonic() - begun_at
            sequence += 1
            engine = {f"engine/{host}.main": {"running": sequence, "generation_tokens": sequence * 100, "kv_use": 0.5}}
            if sequence % ENGINE_CHANGES:
                text = line(host, "change", sequence, engine, {f"engine:{host}.main": now})
            else:
                values = {**_hardware(subjects, int(now)), **engine}
                text = line(host, "change", sequence, values, dict.fromkeys(hardware, now))
            try:
                await response.write(text)
            except ConnectionError:  # the scheduler has measured enough
                return response
            await asyncio.sleep(1 / ENGINE_CHANGES)

    async def serve() -> None:
        application = web.Application()
        application.add_routes([web.get("/{host}/v1/stream", stream)])
        runner = web.AppRunner(application, access_log=None)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        port_to.send(runner.addresses[0][1])
        await asyncio.sleep(3600)

    uvloop.new_event_loop().run_until_complete(serve())


class _Reader(AgentReader):
    """Asks for each host below a path of its own, for all agents are one process here."""

    def _address(self, agent: Agent) -> str:
        return f"http://127.0.0.1:{agent.port}/{agent.host}/v1/stream"


async def follow(port: int, count: int, seconds: float) -> dict[str, float]:
    """Run the scheduler's part; return its processor time and the times of decisions, in seconds."""
    loop = asyncio.get_running_loop()
    table = yaml.safe_load((CHECKOUT / "roles" / "scheduler" / "vars" / "health_rules.yml").read_text())
    hosts = [f"host-{index:03}" for index in range(count)]
    engines = [Engine(f"{host}.main", host, "192.0.2.1", 8100, "vllm", MODEL, (), "a100-80g", 256) for host in hosts]
    core = DecisionCore(Settings(stale_after=3600.0, placement_grace=0.5, retry_after=5))
    core.set_engines(engines)
    for engine in engines:
        core.record_reading(engine, Reading(loop.time(), 0, 0))
    book = HealthBook(health_rules.parse(table["scheduler_health_table"]))
    book.set_members(engines, hosts if port else [], loop.time())
    reader = _Reader(book.observe_agent)
    times: list[float] = []
    number = 0

    def decide() -> None:
        nonlocal number
        number += 1
        now = loop.time()
        before = time.perf_counter()
        decision = core.decide(Request(MODEL, f"request-{number}", 1500, key_id="team"), now)
        times.append(time.perf_counter() - before)
        core.record_end(Ended(f"request-{number}", decision.engine, 200, 0.0, 0.1, 1.0), now)
        loop.call_later(DECISIONS_EVERY, decide)

    late: list[float] = []

    def measure_delay(due: float) -> None:
        late.append(loop.time() - due)
        loop.call_later(0.01, measure_delay, loop.time() + 0.01)

    def weigh() -> None:
        before = core.weights()
        for name, verdict in book.evaluate(loop.time(), core.well(loop.time())).items():
            if before[name] != verdict:
                core.set_weight(name, verdict.weight, loop.time(), verdict.reasons)
        loop.call_later(WEIGH, weigh)

    if port:
        reader.follow([Agent(host, "127.0.0.1", port) for host in hosts])
        while sum(follower.lines > 3 for follower in reader.followers.values()) < count:
            await asyncio.sleep(0.1)
        weigh()
    await asyncio.sleep(1.0)
    begun_at, processor = loop.time(), time.process_time()
    lines = sum(follower.lines for follower in reader.followers.values())
    await asyncio.sleep(seconds)
    used = (time.process_time() - processor) / (loop.time() - begun_at)
    told = (sum(follower.lines for follower in reader.followers.values()) - lines) / (loop.time() - begun_at)
    decide()
    measure_delay(loop.time())
    await asyncio.sleep(seconds)
    weights = {weight for weight, _unused in core.weights().values()}
    failed = sum(bool(follower.error) for follower in reader.followers.values())
    await reader.close()
    times.sort()
    late.sort()
    return {
        "processor": used,
        "lines": told,
        "median": times[len(times) // 2],
        "p99": times[int(len(times) * 0.99)],
        "late_p99": late[int(len(late) * 0.99)],
        "moved": float(weights != {1.0}),
        "failed": failed,
        "memory": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    }


def scheduler(result_to: Connection, processor: int, port: int, count: int, seconds: float) -> None:
    """Run the scheduler's part pinned to one core."""
    os.sched_setaffinity(0, {processor})
    loop = uvloop.new_event_loop()
    result_to.send(loop.run_until_complete(follow(port, count, seconds)))


def measure(processor: int, port: int, count: int, seconds: float) -> dict[str, float]:
    """Return what a scheduler's process has measured; port 0 follows no agents."""
    result_from, result_to = multiprocessing.Pipe(duplex=False)
    process = multiprocessing.Process(target=scheduler, args=(result_to, processor, port, count, seconds))
    process.start()
    found: dict[str, float] = result_from.recv()
    process.join()
    return found


def main() -> int:
    """Print the figures; status 1 if the streams cost more than they may."""
    parser = argparse.ArgumentParser(description="What the agents' streams cost the scheduler.")
    parser.add_argument("--agents", type=int, default=200)
    parser.add_argument("--seconds", type=float, default=10.0, help="length of each measurement")
    options = parser.parse_args()
    processors = sorted(os.sched_getaffinity(0))
    port_from, port_to = multiprocessing.Pipe(duplex=False)
    players = multiprocessing.Process(target=agents, args=(port_to, options.agents), daemon=True)
    players.start()
    try:
        port = port_from.recv()
        alone = measure(processors[-1], 0, options.agents, options.seconds / 2)
        found = measure(processors[-1], port, options.agents, options.seconds)
    finally:
        players.terminate()
        players.join()
    print(
        f"{options.agents} agents, {found['lines']:,.0f} lines/s: {found['processor']:.1%} of one core"
        f" ({alone['processor']:.1%} without them), {found['memory']:.0f} MB"
    )
    for title, key in (("median", "median"), ("p99", "p99"), ("loop late p99", "late_p99")):
        print(f"  decision {title}: {found[key] * 1e6:,.0f} µs, without streams {alone[key] * 1e6:,.0f} µs")
    if found["moved"] or found["failed"]:
        print(f"  expected weights of 1 and no stream that failed, found {found}")
        return 1
    right = found["processor"] <= ALLOWED
    print(f"  {'ok  ' if right else 'MISS'} of one core: {found['processor']:.1%}, asked at most {ALLOWED:.0%}")
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
