# SPDX-License-Identifier: GPL-3.0-or-later
"""Decisions a second: the scheduler's core alone, and its SPOE server on loopback with pipelining.

Usage: python tests/bench/decisions.py [--seconds S]

The core runs with 16 to 1,000 engines with everything that it is told in service: all engines are read four times a
second of simulated time (20,000 decisions a second), every request ends after a while, caps are adjusted fifty times a
second, HAProxy's counts are taken five times. Of the two figures one is for the decisions alone, the other for all of
it. The server runs in a process of its own pinned to one core, with 16 engines; the questions are those that the edge
asks, sent over four connections with 32 of them in flight on each, from another core where there is one. Every answer
is decoded after the clock has stopped: a wrong one ends the bench.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import os
import socket
import sys
import time
from collections import deque
from multiprocessing.connection import Connection
from pathlib import Path
from typing import cast

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "roles" / "scheduler" / "files"))

import uvloop

from ringmaster_scheduler import spop
from ringmaster_scheduler.core import DecisionCore, Settings
from ringmaster_scheduler.domain import Decision, Ended, Engine, Outcome, Reading, Request, ServerCounts
from ringmaster_scheduler.policy import Policy
from ringmaster_scheduler.server import SpoeServer

MODEL = "qwen2-7b-instruct"
SETTINGS = Settings(stale_after=1.0, placement_grace=0.5, retry_after=5)
RATE = 20_000
READING_INTERVAL = 0.25
ADJUST_INTERVAL = 0.02
COUNTS_INTERVAL = 0.2
HELD = 8  # requests that each engine holds at a time
# Engines that prefill so fast have always room: every request is placed, which costs more than letting it wait.
POLICY = Policy(prefill_rate=1e9)
CONNECTIONS = 4
IN_FLIGHT = 32
FRAME_SIZE = 16380


def make_engines(count: int) -> list[Engine]:
    """Return engines of one pool, half of them with half the capacity, each with two adapters."""
    return [
        Engine(
            name=f"gpu-{index:04}.main",
            host=f"gpu-{index:04}",
            address="192.0.2.1",
            port=8100 + index,
            kind="vllm",
            model=MODEL,
            adapters=("sql", "translate"),
            card="a100-80g" if index % 2 else "l40s",
            max_num_seqs=256 if index % 2 else 128,
        )
        for index in range(count)
    ]


def bench_core(count: int, seconds: float) -> tuple[float, float]:
    """Return decisions a second of the core: alone, and with everything else that it is told."""
    engines = make_engines(count)
    core = DecisionCore(SETTINGS, POLICY)
    core.set_engines(engines)
    for engine in engines:
        core.record_reading(engine, Reading(0.0, 0, 0, 0.1, 1_000_000, 0, 0, 0))
    core.record_counts({}, {MODEL: 0}, 0.0)
    held: deque[tuple[str, str]] = deque()
    now = next_adjust = next_counts = due = deciding = 0.0
    number = next_engine = 0
    begun_at = time.perf_counter()
    while time.perf_counter() - begun_at < seconds:
        if now >= next_adjust:
            next_adjust = now + ADJUST_INTERVAL
            core.adjust(now)
            for cap in core.caps():
                core.applied(cap, now)
        if now >= next_counts:
            next_counts = now + COUNTS_INTERVAL
            counts = {view.engine.name: ServerCounts(view.held, 0) for view in core.views(now)}
            core.record_counts(counts, {MODEL: 0}, now)
        requests = [
            Request(MODEL, f"request-{number + index}", 1500, 6100, None, f"team-{index % 7}") for index in range(100)
        ]
        before = time.perf_counter()
        decisions = [core.decide(request, now) for request in requests]
        deciding += time.perf_counter() - before
        for request, decision in zip(requests, decisions):
            if decision.outcome is not Outcome.PLACED or decision.engine is None:
                raise SystemExit(f"the core left a request unplaced: {decision}")
            held.append((request.id, decision.engine))
        while len(held) > HELD * count:
            request_id, engine_name = held.popleft()
            core.record_end(Ended(request_id, engine_name, 200, 0.0, 0.1, 1.0), now)
        number += len(requests)
        now += len(requests) / RATE
        due += count / READING_INTERVAL * len(requests) / RATE
        while due >= 1:
            due -= 1
            engine = engines[next_engine]
            core.record_reading(engine, Reading(now, HELD, 0, 0.1, 1_000_000, 0, number, number))
            next_engine = (next_engine + 1) % count
    return number / deciding, number / (time.perf_counter() - begun_at)


def serve(port_to: Connection, processor: int) -> None:
    """Run the SPOE server on one core until the process is ended."""
    os.sched_setaffinity(0, {processor})
    loop = uvloop.new_event_loop()
    asyncio.set_event_loop(loop)
    core = DecisionCore(SETTINGS, POLICY)
    engines = make_engines(16)
    core.set_engines(engines)

    def read_engines() -> None:
        for engine in engines:
            core.record_reading(engine, Reading(loop.time(), 0, 0))
        loop.call_later(READING_INTERVAL, read_engines)

    def adjust() -> None:
        core.adjust(loop.time())
        loop.call_later(ADJUST_INTERVAL, adjust)

    def decide(request: Request) -> Decision:
        # Ends at once: what the log of HAProxy would tell comes with the question.
        now = loop.time()
        decision = core.decide(request, now)
        core.record_end(Ended(request.id, decision.engine, 200, 0.0, 0.1, 1.0), now)
        return decision

    read_engines()
    adjust()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    loop.run_until_complete(SpoeServer(decide).start("127.0.0.1", port))
    port_to.send(port)
    loop.run_forever()


def question(stream_id: int) -> bytes:
    """Return the NOTIFY frame of one request, as HAProxy sends it by docs/conventions.md."""
    return spop.encode_notify(
        stream_id,
        1,
        [
            (
                "decide",
                [
                    ("id", spop.DataType.STRING, f"7f0c5b1e-9d1f-4c62-8d0a-{stream_id:012}"),
                    ("model", spop.DataType.STRING, MODEL),
                    ("prompt_tokens", spop.DataType.INT64, 1500),
                    ("body_bytes", spop.DataType.INT64, 6100),
                    ("key_id", spop.DataType.STRING, "team-a"),
                    ("prefix", spop.DataType.NULL, None),
                ],
            )
        ],
    )


class Asker(asyncio.Protocol):
    """Keeps questions in flight on one connection, and all that came back."""

    def __init__(self) -> None:
        self.answered = 0
        self.received: list[bytes] = []
        self.questions = [question(1000 + index) for index in range(IN_FLIGHT)]
        self.burst = b"".join(self.questions)
        self.pending = b""
        self.greeted = False
        self.transport: asyncio.Transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)  # what uvloop passes is none by its class
        self.transport.write(spop.encode_haproxy_hello(FRAME_SIZE, healthcheck=False))

    def data_received(self, data: bytes) -> None:
        self.pending += data
        offset = frames = 0
        while (end := spop.frame_end(self.pending, offset, FRAME_SIZE)) is not None:
            offset = end
            frames += 1
        self.pending, whole = self.pending[offset:], self.pending[:offset]
        if not self.greeted:
            self.greeted = True
            self.transport.write(self.burst)
            return
        self.received.append(whole)
        self.answered += frames
        # As many new questions as answers came: what is in flight stays the same.
        self.transport.write(self.burst if frames == IN_FLIGHT else b"".join(self.questions[:frames]))


def check_answers(received: bytes) -> int:
    """Return how many answers placed a request. Ends the bench if one did anything else."""
    offset = count = 0
    while (end := spop.frame_end(received, offset, FRAME_SIZE)) is not None:
        frame = spop.decode_frame(received, offset, end)
        variables = spop.decode_ack(received, frame.payload, end)
        if {variable.name for variable in variables} != {"server", "priority", "reason"}:
            raise SystemExit(f"expected a server, a priority and a reason for every request, found {variables}")
        offset = end
        count += 1
    return count


async def ask(port: int, seconds: float) -> float:
    """Return decisions a second as the askers see them."""
    loop = asyncio.get_running_loop()
    askers = [(await loop.create_connection(Asker, "127.0.0.1", port))[1] for _unused in range(CONNECTIONS)]
    await asyncio.sleep(0.3)
    before, begun_at = sum(asker.answered for asker in askers), time.perf_counter()
    await asyncio.sleep(seconds)
    answered = sum(asker.answered for asker in askers) - before
    elapsed = time.perf_counter() - begun_at
    for asker in askers:
        asker.transport.abort()
        if check_answers(b"".join(asker.received)) != asker.answered:
            raise SystemExit("answers are missing")
    return answered / elapsed


def bench_server(seconds: float) -> float:
    """Return decisions a second of the SPOE server, pinned to one core."""
    processors = sorted(os.sched_getaffinity(0))
    port_from, port_to = multiprocessing.Pipe(duplex=False)
    server = multiprocessing.Process(target=serve, args=(port_to, processors[-1]), daemon=True)
    server.start()
    try:
        port = port_from.recv()
        os.sched_setaffinity(0, {processors[0]})
        loop = uvloop.new_event_loop()
        try:
            return loop.run_until_complete(ask(port, seconds))
        finally:
            loop.close()
    finally:
        os.sched_setaffinity(0, set(processors))
        server.terminate()
        server.join()


def main() -> None:
    """Print one line a measurement."""
    parser = argparse.ArgumentParser(description="Decisions a second of the scheduler.")
    parser.add_argument("--seconds", type=float, default=3.0, help="length of each measurement")
    seconds = parser.parse_args().seconds
    for count in (16, 128, 1000):
        alone, with_all = bench_core(count, seconds)
        print(
            f"core, {count:>5} engines: {alone:>9,.0f} decisions/s alone, {with_all:>9,.0f} with all it is told",
            flush=True,
        )
    pipelining = f"{CONNECTIONS} connections with {IN_FLIGHT} in flight"
    print(f"SPOE server on one core, 16 engines, {pipelining}: {bench_server(seconds):>9,.0f} decisions/s")


if __name__ == "__main__":
    main()
