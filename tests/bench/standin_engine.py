# SPDX-License-Identifier: GPL-3.0-or-later
"""What one stand-in engine holds on one core: streams at a steady pace, and as many tokens as it can make.

Usage: PYTHONPATH=. python tests/bench/standin_engine.py [--streams N] [--rate R] [--seconds S]

The engine is a process of its own pinned to one core, the load runs on another core where there is one. First the
pace is set so that a step with all streams takes 1/R s and every stream gets R tokens a second; then the card is made
so fast that the processor sets the pace, which gives the most tokens a second that the engine can stream. Times between
chunks are those after the last stream began: before that the card computes prompts, and is slower by its own model.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "roles" / "vllm" / "files" / "standin_engine"))

from standin_engine import cards
from tests.support import load
from tests.support.load import percentile

PROGRAM = Path(__file__).resolve().parents[2] / "roles" / "vllm" / "files" / "standin_engine"
MODEL = "bench"
CARD = "l40s"
KEY = "bench"
PROMPT_TOKENS = 30
FLAT_OUT = 1e-4
"""Factor on the duration of a step that leaves only the processor's own time."""


@dataclasses.dataclass
class Engine:
    """A running engine: its process and its port on loopback."""

    process: subprocess.Popen[bytes]
    port: int

    def get(self, path: str) -> bytes:
        """The body that the engine answers."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}", timeout=10) as response:
            return bytes(response.read())

    def processor_seconds(self) -> tuple[float, float]:
        """Time that the process has spent on the processor, and ready to run but waiting for it, since its start."""
        fields = Path(f"/proc/{self.process.pid}/schedstat").read_text().split()
        return int(fields[0]) / 1e9, int(fields[1]) / 1e9


def free_port() -> int:
    """A port of loopback that nothing listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextlib.contextmanager
def engine(core: int, streams: int, time_scale: float) -> Iterator[Engine]:
    """An engine that answers, pinned to a core."""
    port = free_port()
    process = subprocess.Popen(
        [sys.executable, "-m", "standin_engine", "serve", MODEL, "--host", "127.0.0.1", "--port", str(port)]
        + ["--max-num-seqs", str(streams), "--uvicorn-log-level", "warning"],
        env={
            **os.environ,
            "PYTHONPATH": str(PROGRAM),
            "VLLM_API_KEY": KEY,
            "STANDIN_CARD": CARD,
            "STANDIN_TIME_SCALE": str(time_scale),
            "STANDIN_TRACE": "1",
        },
    )
    try:
        os.sched_setaffinity(process.pid, {core})
        running = Engine(process, port)
        for _unused in range(200):
            with contextlib.suppress(OSError):
                running.get("/health")
                break
            time.sleep(0.05)
        yield running
    finally:
        process.terminate()
        process.wait()


def intervals_since(outcome: load.Outcome, since: float) -> Iterator[float]:
    """Seconds between the chunks of a request, for those that came after a Unix time."""
    time_of_chunk = outcome.first_chunk
    for interval in outcome.intervals:
        time_of_chunk += interval
        if time_of_chunk > since:
            yield interval


def measure(core: int, streams: int, tokens: int, time_scale: float) -> int:
    """Let every stream ask for one answer of that many tokens and print what came of it; gives the failed requests."""
    with engine(core, streams, time_scale) as running:
        # No answer ends within a second, so that nobody asks twice.
        what = load.Load("127.0.0.1", running.port, KEY, MODEL, streams, seconds=1, max_tokens=tokens)
        started, before = time.time(), running.processor_seconds()
        outcomes = load.run(what)
        took = time.time() - started
        busy, waited = (now - then for now, then in zip(running.processor_seconds(), before))
        whole = [outcome for outcome in outcomes if not outcome.error]
        all_run = max((outcome.first_chunk for outcome in whole), default=started)
        own: dict[str, Any] = json.loads(running.get(f"/standin/intervals?since={all_run}"))
    if whole:
        intervals = [interval * 1000 for outcome in whole for interval in intervals_since(outcome, all_run)]
        all_ended = max(outcome.ended for outcome in whole)
        rates = [(tokens - 1) / (outcome.ended - outcome.first_chunk) for outcome in whole]
        at_client = ", ".join(f"p{share} {percentile(intervals, share / 100):.1f}" for share in (50, 99))
        print(f"  {len(whole)} of {len(outcomes)} answered; {tokens * len(whole) / took:.0f} tokens/s in {took:.1f} s")
        print(f"  a stream's tokens/s: p50 {percentile(rates, 0.5):.1f}, slowest {min(rates):.1f}")
        print(
            f"  engine's core: {100 * busy / took:.0f} % busy, {1e6 * busy / (tokens * len(whole)):.0f} µs a token;"
            f" other processes made it wait {100 * waited / took:.0f} % of the time"
        )
        print(f"  when all streams run: {own['count'] / (all_ended - all_run):.0f} chunks/s")
        print(
            f"  ms between chunks: at the client {at_client}; at the engine p50 {own['p50']:.1f}, p99 {own['p99']:.1f}"
        )
    failed = [outcome.error for outcome in outcomes if outcome.error]
    for error in failed[:1]:
        print(f"  {len(failed)} failed: {error}")
    return len(failed)


def main() -> int:
    """Print the figures; status 1 when a request failed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--streams", type=int, default=500)
    parser.add_argument("--rate", type=float, default=20.0, help="tokens a second of each stream")
    parser.add_argument("--seconds", type=float, default=20.0)
    options = parser.parse_args()
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[-1]})
    streams: int = options.streams
    tokens = round(options.rate * options.seconds)
    context = streams * (PROMPT_TOKENS + tokens // 2)
    step = cards.StepClock(cards.CARDS[CARD], cards.MODEL).seconds(streams, streams, context)
    print(f"{streams} streams at {options.rate:g} tokens/s each, {streams * options.rate:.0f} tokens/s asked for:")
    failed = measure(cores[0], streams, tokens, 1 / options.rate / step)
    print(f"{streams} streams as fast as the processor can:")
    failed += measure(cores[0], streams, tokens, FLAT_OUT)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
