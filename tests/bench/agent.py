# SPDX-License-Identifier: GPL-3.0-or-later
"""What the agent costs a host with eight cards: processor time of one core, and memory.

Usage: python -m tests.bench.agent [--seconds S] [--streams N]

The agent and the process that reads the hardware run as in service, pinned to one core, on a simulated host with eight
A100, their NVLinks, six NVSwitches and eight RoCE ports. Power and temperature of every card change each second, other
readings and the ports' counters do not. A stand-in engine under a steady load is read five times a
second, and a scheduler's connection takes the stream. What counts is the processor time of both processes, as the
kernel has it, and their proportional share of memory (PSS). A journal with the kernel's lines is not there: what
journalctl costs, which waits for such lines, is left out.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

from rehearsal.hardware import Machine, build, library
from tests.bench.standin_engine import KEY, MODEL, engine, free_port
from tests.support import load

ROOT = Path(__file__).resolve().parents[2]
CORES = sorted(os.sched_getaffinity(0))
LOAD_CORE, AGENT_CORE = CORES[0], CORES[-1]
ALLOWED = 0.01
"""Share of one core that the agent may cost."""
ALLOWED_BYTES = 60 * 1024 * 1024
READERS = {"gpu", "nvlink", "pcie", "rdma", "engine"}
WARM_UP = 5.0
PATIENCE = 20.0
RUN = """
import asyncio, sys
from pathlib import Path
from ringmaster_agent import agent, configuration
sys.exit(asyncio.run(agent.serve(configuration.parse(Path(sys.argv[1]).read_bytes()), sys.argv[2])))
"""


def processes(pid: int) -> list[int]:
    """The agent and its process that reads the hardware."""
    children = " ".join(path.read_text() for path in Path(f"/proc/{pid}/task").glob("*/children")).split()
    reading = [child for child in children if b"hardware_process" in Path(f"/proc/{child}/cmdline").read_bytes()]
    return [pid, *map(int, reading)]


def processor_seconds(pid: int) -> float:
    """Time that all threads of a process have spent on the processor."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    ticks = int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def memory_bytes(pid: int) -> int:
    """A process's proportional share of memory."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    (line,) = [line for line in lines if line.startswith("Pss:")]
    return int(line.split()[1]) * 1024


@contextlib.contextmanager
def running(machine: Machine, libraries: Path, engine_port: int, folder: Path) -> Iterator[tuple[int, int]]:
    """An agent at work; gives its process and its port."""
    port = free_port()
    configuration = folder / "agent.json"
    one = {"name": "gpu-1.main", "address": "127.0.0.1", "port": engine_port, "model": MODEL}
    configuration.write_text(
        json.dumps({"host": "gpu-1", "http_address": "127.0.0.1", "http_port": port, "engines": [one]})
    )
    paths = [ROOT / "roles" / "agent" / "files", ROOT / ".cache" / "collections"]
    process = subprocess.Popen(
        [sys.executable, "-c", RUN, str(configuration), machine.root],
        env={
            **os.environ,
            "PYTHONPATH": ":".join(map(str, paths)),
            "RINGMASTER_REHEARSAL_HARDWARE": str(machine.state.folder),
            "LD_LIBRARY_PATH": str(libraries),
        },
    )
    os.sched_setaffinity(process.pid, {AGENT_CORE})
    try:
        yield process.pid, port
    finally:
        process.terminate()
        process.wait(10)


def wait_for_hardware(port: int) -> None:
    """Wait until every reader has read."""
    deadline = time.monotonic() + PATIENCE
    readers = {}
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{port}/healthz") as answer:
            readers = json.loads(answer.read())["readers"]
            read = {name.partition(":")[0] for name, reader in readers.items() if reader["age_seconds"] is not None}
            if read >= READERS:
                return
        time.sleep(0.2)
    raise SystemExit(f"expected readings of {', '.join(sorted(READERS))} within {PATIENCE:g} s, found {readers}")


def follow(port: int, lines: list[int]) -> None:
    """Take the stream as a scheduler does, until the agent ends it; counts its lines."""
    with contextlib.suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{port}/v1/stream") as stream:
        for line in stream:
            lines[0] += bool(line.strip())


def change(machine: Machine, ended: threading.Event) -> None:
    """Change what a busy host changes."""
    source = random.Random(1)
    count = 0
    while not ended.wait(1.0):
        count += 1
        for index in machine.state.names("gpus"):
            machine.state.set(f"gpus/{index}/power_milliwatts", 300_000 + source.randrange(100_000))
            machine.state.set(f"gpus/{index}/temperature_celsius", 55 + source.randrange(20))


def main() -> int:
    """Print the figures; status 1 if a target is missed."""
    parser = argparse.ArgumentParser(description="What the agent costs a host with eight cards.")
    parser.add_argument("--seconds", type=float, default=30.0, help="length of the measurement")
    parser.add_argument("--streams", type=int, default=8, help="streams that the engine answers meanwhile")
    options = parser.parse_args()
    with contextlib.ExitStack() as parts:
        folder = Path(parts.enter_context(tempfile.TemporaryDirectory(prefix="ringmaster-bench-")))
        machine = build("a100-sxm4x8", folder)
        libraries = library.compile_library(folder / "libraries").parent
        served = parts.enter_context(engine(LOAD_CORE, options.streams, 1.0))
        pid, port = parts.enter_context(running(machine, libraries, served.port, folder))
        wait_for_hardware(port)
        lines = [0]
        ended = threading.Event()
        seconds = WARM_UP + options.seconds + 2
        asked = load.Load("127.0.0.1", served.port, KEY, MODEL, options.streams, seconds=seconds, max_tokens=200)
        workers = [
            threading.Thread(target=follow, args=(port, lines), daemon=True),
            threading.Thread(target=change, args=(machine, ended), daemon=True),
            threading.Thread(target=load.run, args=(asked,), daemon=True),
        ]
        for worker in workers:
            worker.start()
        time.sleep(WARM_UP)
        told = lines[0]
        begun_at = time.monotonic()
        before = {each: processor_seconds(each) for each in processes(pid)}
        time.sleep(options.seconds)
        took = time.monotonic() - begun_at
        used = {each: (processor_seconds(each) - before[each]) / took for each in before}
        memory = {each: memory_bytes(each) for each in before}
        ended.set()
        workers[2].join()
        told = lines[0] - told
    share, size = sum(used.values()), sum(memory.values())
    print(f"agent, 8 cards, 8 ports, 1 engine: {share:.2%} of one core (at most {ALLOWED:.0%}),", end=" ")
    print(f"{size / 2**20:.1f} MiB (at most {ALLOWED_BYTES / 2**20:.0f}); {told / took:.1f} lines/s of the stream")
    for each, name in zip(before, ("agent", "reading process")):
        print(f"  {name}: {used[each]:.2%}, {memory[each] / 2**20:.1f} MiB")
    return int(share > ALLOWED or size > ALLOWED_BYTES)


if __name__ == "__main__":
    sys.exit(main())
