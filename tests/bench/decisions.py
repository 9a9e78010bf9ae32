# SPDX-License-Identifier: GPL-3.0-or-later
"""Decisions a second: the scheduler's core alone, and its SPOE server on loopback with pipelining.

Usage: python tests/bench/decisions.py [--seconds S]

The core runs with 16 and with 1,000 engines, which are all read four times a second of simulated time (20,000 decisions
a second), as in service. The server runs in a process of its own pinned to one core, with 16 engines; the questions are
those that the edge asks, sent over four connections with 32 of them in flight on each, from another core where there
is one. Every answer is decoded after the clock has stopped: a wrong one ends the bench.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import os
import socket
import sys
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import cast

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "roles" / "scheduler" / "files"))

import uvloop

from ringmaster_scheduler import spop
from ringmaster_scheduler.core import DecisionCore, Engine, Outcome, Reading, Request, Settings
from ringmaster_scheduler.server import SpoeServer

MODEL = "qwen2-7b-instruct"
SETTINGS = Settings(stale_after=1.0, placement_grace=0.5, retry_after=5)
RATE = 20_000
READING_INTERVAL = 0.25
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


def bench_core(count: int, seconds: float) -> float:
    """Return decisions a second of the core alone."""
    engines = make_engines(count)
    core = DecisionCore(SETTINGS)
    core.set_engines(engines)
    request = Request(model=MODEL)
    for engine in engines:
        core.record_reading(engine, Reading(0.0, 0, 0))
    now, decided, next_engine = 0.0, 0, 0
    readings_each = count / READING_INTERVAL / RATE
    due = 0.0
    begun_at = time.perf_counter()
    while time.perf_counter() - begun_at < seconds:
        for _unused in range(1000):
            now += 1 / RATE
            due += readings_each
            while due >= 1:
                due -= 1
                core.record_reading(engines[next_engine], Reading(now, next_engine % 7, 0))
                next_engine = (next_engine + 1) % count
            core.decide(request, now)
        decided += 1000
    elapsed = time.perf_counter() - begun_at
    if core.outcomes[Outcome.PLACED] != decided:
        raise SystemExit("the core left requests unplaced")
    return decided / elapsed


def serve(port_to: Connection, processor: int) -> None:
    """Run the SPOE server on one core until the process is ended."""
    os.sched_setaffinity(0, {processor})
    loop = uvloop.new_event_loop()
    asyncio.set_event_loop(loop)
    core = DecisionCore(SETTINGS)
    engines = make_engines(16)
    core.set_engines(engines)

    def read_engines() -> None:
        for engine in engines:
            core.record_reading(engine, Reading(loop.time(), 0, 0))
        loop.call_later(READING_INTERVAL, read_engines)

    read_engines()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    loop.run_until_complete(SpoeServer(lambda request: core.decide(request, loop.time())).start("127.0.0.1", port))
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
        if [variable.name for variable in variables] != ["server"]:
            raise SystemExit(f"expected a server for every request, found {variables}")
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
    for count in (16, 1000):
        print(f"core alone, {count:>5} engines: {bench_core(count, seconds):>9,.0f} decisions/s", flush=True)
    pipelining = f"{CONNECTIONS} connections with {IN_FLIGHT} in flight"
    print(f"SPOE server on one core, 16 engines, {pipelining}: {bench_server(seconds):>9,.0f} decisions/s")


if __name__ == "__main__":
    main()
