# SPDX-License-Identifier: GPL-3.0-or-later
"""The gateway against others on one core: requests and decisions a second, chunks of streams, time to first byte.

Usage: python -m tests.bench.gateway [--rounds N] [--seconds S] [--haproxy SUITE …] [--skip-routers]

What is measured has the machine's last core to itself: HAProxy with the role's configuration and every rule of it in
use (key, limits of the key and of addresses, decision, log to the scheduler), and the scheduler; or HAProxy with
nothing but the engines in it; or a router from PyPI, in a virtual environment of the bench's own. Load and 16 engines,
which answer at once, share the first core. The contenders take turns, one starting after the other has ended, and each
figure is the median of the rounds, so that what else the machine does meets all alike. Absolute figures are the
machine's; ratios count.

Everything is on loopback. Needs two cores, gcc, and what tests/run/tools unpacks; about 25 s a contender and round.
"""

from __future__ import annotations

import abc
import argparse
import contextlib
import hashlib
import json
import os
import re
import socket
import statistics
import subprocess
import sys
import tempfile
import urllib.request
import venv
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ansible.plugins.loader import init_plugin_loader

from tests.support.waiting import wait_until
from tests.unit.edge.rendering import engine, members, render

ROOT = Path(__file__).resolve().parents[3]
HERE = Path(__file__).resolve().parent
CACHE = ROOT / ".cache" / "bench"
TOOLS = ROOT / ".cache" / "tools" / "bin"
# The scheduler's own package, and the collection whose tables it reads.
SCHEDULER_PATH = f"{ROOT / 'roles' / 'scheduler' / 'files'}:{ROOT / '.cache' / 'collections'}"
MODEL = "bench"
KEY = "sk-bench-of-gateways"
PATH = "/v1/chat/completions"
ENGINES = 16
TOKENS = 200
"""Events of a stream; its answer takes some milliseconds flat out."""
CORES = sorted(os.sched_getaffinity(0))
LOAD_CORE, GATEWAY_CORE = CORES[0], CORES[-1]
PATIENCE = 30.0
PLAIN = """\
global
    nbthread 1
    maxconn 4000
defaults
    mode http
    option http-no-delay
    timeout connect 1s
    timeout client 1m
    timeout server 1m
frontend plain
    bind 127.0.0.1:{port}
    default_backend engines
backend engines
    balance leastconn
{servers}
"""


@dataclass(frozen=True)
class Workload:
    """What the load does: connections, events of a stream (0: one JSON answer), requests a second (0: flat out)."""

    connections: int
    tokens: int = 0
    rate: int = 0


WORKLOADS = {
    "requests": Workload(64),
    "streams": Workload(64, tokens=TOKENS),
    "first byte, flat out": Workload(16),
    "first byte, paced": Workload(16, rate=2000),
}


@dataclass
class Figures:
    """Results of a contender: one of each workload and round, as the load printed it."""

    results: dict[str, list[dict[str, float]]] = field(default_factory=dict)
    notes: dict[str, list[float]] = field(default_factory=dict)

    def median(self, workload: str, of: Callable[[dict[str, float]], float]) -> float:
        """Median over the rounds of something of each result."""
        return statistics.median(of(result) for result in self.results[workload])

    def core_time(self) -> float:
        """Time of the core that a request costs all processes of a contender, in µs; no other load on the machine
        changes much about it."""
        return sum(statistics.median(each) for each in self.notes.values())


def per_second(name: str) -> Callable[[dict[str, float]], float]:
    """A count of a result in a second."""
    return lambda result: result[name] / result["seconds"]


def free_ports(count: int) -> int:
    """First of some ports in a row that are free."""
    for first in range(20000, 60000, count):
        with contextlib.ExitStack() as bound, contextlib.suppress(OSError):
            for port in range(first, first + count):
                bound.enter_context(socket.socket()).bind(("127.0.0.1", port))
            return first
    raise SystemExit("no free ports")


def answers(port: int) -> bool:
    """Whether a gateway answers a request with 200."""
    body = json.dumps({"model": MODEL, "messages": [{"role": "user", "content": "ping"}]}).encode()
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}{PATH}",
        data=body,
        headers={"Authorization": f"Bearer {KEY}", "Content-Type": "application/json"},
    )
    try:
        with urllib.request.urlopen(request, timeout=5) as response:
            return bool(response.status == 200)
    except OSError:
        return False


@contextlib.contextmanager
def started(command: list[str], log: Path, core: int, **environment: str) -> Iterator[subprocess.Popen[bytes]]:
    """A process pinned to a core; what it says goes to a file."""
    with log.open("ab") as output:
        process = subprocess.Popen(
            ["taskset", "--cpu-list", str(core), *command],
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, **environment},
        )
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def processor_us(process: subprocess.Popen[bytes]) -> float:
    """Time of the processor that a process has used, in microseconds."""
    fields = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) * 1e6 / os.sysconf("SC_CLK_TCK")


class Gateway(abc.ABC):
    """A contender; `serving` gives its port and the processes that it is made of, by name."""

    name: str

    @abc.abstractmethod
    def serving(self, folder: Path, first_engine: int) -> contextlib.AbstractContextManager[tuple[int, dict[str, Any]]]:
        """Start it and end it; it may be asked once it answers."""

    def decisions(self) -> dict[str, float]:
        """Decisions of a scheduler since it was started, by outcome."""
        return {}


class Direct(Gateway):
    """No gateway: what the load and one engine can do."""

    name = "engine"

    @contextlib.contextmanager
    def serving(self, folder: Path, first_engine: int) -> Iterator[tuple[int, dict[str, Any]]]:
        yield first_engine, {}


class Plain(Gateway):
    """HAProxy that does nothing but balance."""

    def __init__(self, suite: str) -> None:
        self.name = f"HAProxy {suite}, bare"
        self._program = str(TOOLS / f"haproxy-{suite}")

    @contextlib.contextmanager
    def serving(self, folder: Path, first_engine: int) -> Iterator[tuple[int, dict[str, Any]]]:
        port = free_ports(1)
        configuration = folder / "haproxy.cfg"
        servers = "\n".join(f"    server e{index} 127.0.0.1:{first_engine + index}" for index in range(ENGINES))
        configuration.write_text(PLAIN.format(port=port, servers=servers))
        with started([self._program, "-db", "-f", str(configuration)], folder / "log", GATEWAY_CORE) as process:
            yield port, {"HAProxy": process}


class Ringmaster(Gateway):
    """The role's HAProxy and the scheduler."""

    def __init__(self, suite: str) -> None:
        self.name = f"Ringmaster, HAProxy {suite}"
        self._program = str(TOOLS / f"haproxy-{suite}")
        self._http_port = 0

    @contextlib.contextmanager
    def serving(self, folder: Path, first_engine: int) -> Iterator[tuple[int, dict[str, Any]]]:
        ports = free_ports(6)
        self._http_port = ports + 3
        # In the journal's place: takes every line, so that HAProxy does all it does for a journal, and reads none.
        journal = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        journal.bind(("127.0.0.1", 0))
        document = members(*(engine(f"e{index}.main", MODEL, first_engine + index) for index in range(ENGINES)))
        (folder / "members.json").write_text(json.dumps(document))
        edge_socket = folder / "admin.sock"
        haproxy = render(
            folder,
            edge_members=document,
            edge_address="127.0.0.1",
            edge_public_address="127.0.0.1",
            edge_public_port=ports,
            edge_dispatch_port=ports + 1,
            edge_metrics_port=ports + 2,
            edge_stats_socket=str(edge_socket),
            edge_server_state_path=str(folder / "haproxy-servers"),
            edge_api_keys=[{"id": "bench", "key": KEY}],
            edge_requests_per_minute=10**8,
            edge_prompt_tokens_per_minute=10**9,
            edge_concurrent_requests=10**6,
            edge_engine_api_key="key-of-the-engines",
            edge_scheduler=f"127.0.0.1:{ports + 4}",
            edge_scheduler_log=f"127.0.0.1:{ports + 5}",
            edge_log_address=f"127.0.0.1:{journal.getsockname()[1]}",
            edge_threads=1,
        )
        configuration = folder / "scheduler.json"
        wanted = {
            "http_address": "127.0.0.1",
            "http_port": self._http_port,
            "spoe_address": "127.0.0.1",
            "spoe_port": ports + 4,
            "log_address": "127.0.0.1",
            "log_port": ports + 5,
            "haproxy_socket": str(edge_socket),
            "haproxy_server_state_file": str(folder / "haproxy-servers"),
            "members_file": str(folder / "members.json"),
            # What engines that answer at once cannot be measured by: that they take a prompt in no time.
            "policy": {"prefill_rate": 1_000_000},
        }
        configuration.write_text(json.dumps(wanted))
        command = [sys.executable, "-m", "ringmaster_scheduler", "--config", str(configuration)]
        with (
            journal,
            started(command, folder / "scheduler.log", GATEWAY_CORE, PYTHONPATH=SCHEDULER_PATH) as scheduler,
            started([self._program, "-db", "-f", str(haproxy)], folder / "log", GATEWAY_CORE) as process,
        ):
            wait_until(
                lambda: answers(ports) and self.decisions().get("placed", 0) > 0,
                "the scheduler places a request",
                PATIENCE,
            )
            yield ports, {"HAProxy": process, "scheduler": scheduler}

    def decisions(self) -> dict[str, float]:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self._http_port}/metrics", timeout=5) as response:
                text = response.read().decode()
        except OSError:
            return {}
        return {name: float(count) for name, count in re.findall(r'_decisions_total\{outcome="(\w+)"\} (\S+)', text)}


class Router(Gateway):
    """A router from PyPI, told its engines on the command line."""

    def __init__(self, name: str, module: str, python: Path) -> None:
        self.name = name
        self._module = module
        self._python = python

    @contextlib.contextmanager
    def serving(self, folder: Path, first_engine: int) -> Iterator[tuple[int, dict[str, Any]]]:
        port = free_ports(2)
        options = {
            "--host": "127.0.0.1",
            "--port": port,
            "--prometheus-port": port + 1,
            "--log-level": "error",
            "--policy": "round_robin",
        }
        words = [str(word) for option in options.items() for word in option]
        urls = [f"http://127.0.0.1:{first_engine + index}" for index in range(ENGINES)]
        command = [str(self._python), "-m", self._module, *words, "--worker-urls", *urls]
        with started(command, folder / "log", GATEWAY_CORE) as process:
            yield port, {"router": process}


def routers() -> list[Gateway]:
    """The routers, installed where they are not yet."""
    folder = CACHE / "venv"
    wanted = hashlib.sha256((HERE / "routers.txt").read_bytes()).hexdigest()
    ready = folder / ".ready"
    if not ready.exists() or ready.read_text() != wanted:
        venv.create(folder, clear=True, with_pip=True)
        pip = [str(folder / "bin" / "pip"), "--quiet", "--disable-pip-version-check"]
        subprocess.run([*pip, "install", "--require-hashes", "-r", str(HERE / "routers.txt")], check=True)
        ready.write_text(wanted)
    python = folder / "bin" / "python"
    return [
        Router("vllm-router", "vllm_router.launch_router", python),
        Router("sglang-router", "sglang_router.launch_router", python),
    ]


def program() -> str:
    """The program that makes load and engines, built where it is not yet."""
    source = HERE / "traffic.c"
    built = CACHE / f"traffic-{hashlib.sha256(source.read_bytes()).hexdigest()[:16]}"
    if not built.exists():
        CACHE.mkdir(parents=True, exist_ok=True)
        subprocess.run(["gcc", "-O2", "-Wall", "-Wextra", "-o", str(built), str(source)], check=True)
    return str(built)


def measure(gateway: Gateway, traffic: str, first_engine: int, seconds: float, figures: Figures) -> None:
    """One round of a contender: every workload once."""
    with tempfile.TemporaryDirectory(prefix="ringmaster-bench-") as folder:
        with gateway.serving(Path(folder), first_engine) as (port, processes):
            wait_until(lambda: answers(port), f"{gateway.name} answers", PATIENCE)
            for name, workload in WORKLOADS.items():
                used = {part: processor_us(process) for part, process in processes.items()}
                before = gateway.decisions()
                load = [traffic, "load", port, PATH, KEY, workload.connections, seconds, workload.tokens, workload.rate]
                command = ["taskset", "--cpu-list", str(LOAD_CORE), *map(str, load)]
                result = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
                if not result["answered"]:
                    raise SystemExit(f"{gateway.name}, {name}: nothing was answered; {result}")
                after = gateway.decisions()
                result["decided"] = sum(after.values()) - sum(before.values())
                result["placed"] = after.get("placed", 0) - before.get("placed", 0)
                figures.results.setdefault(name, []).append(result)
                if name == "requests":
                    for part, process in processes.items():
                        cost = (processor_us(process) - used[part]) / result["answered"] * result["seconds"] / seconds
                        figures.notes.setdefault(part, []).append(cost)


def report(gateways: list[Gateway], all_figures: dict[str, Figures], seconds: float) -> None:
    """Print a table and the ratios."""
    titles = ("requests/s", "core µs each", "chunks/s", "TTFB at 16, µs: flat out", "paced", "failed")
    widths = (12, 14, 12, 26, 16, 8)
    print("\n" + " " * 28 + "".join(f"{title:>{width}}" for title, width in zip(titles, widths)))
    for gateway in gateways:
        figures = all_figures[gateway.name]
        late = [
            f"{figures.median(name, _p50):.0f} / {figures.median(name, _p99):.0f}"
            for name in ("first byte, flat out", "first byte, paced")
        ]
        cells = (
            f"{figures.median('requests', per_second('answered')):,.0f}",
            f"{figures.core_time():.1f}" if figures.notes else "–",
            f"{figures.median('streams', per_second('events')):,.0f}",
            *late,
            f"{sum(result['failed'] for results in figures.results.values() for result in results):.0f}",
        )
        print(f"{gateway.name:28}" + "".join(f"{cell:>{width}}" for cell, width in zip(cells, widths)))
    direct = all_figures[Direct.name]
    for gateway in gateways:
        if not isinstance(gateway, Ringmaster):
            continue
        figures = all_figures[gateway.name]
        print(f"\n{gateway.name}:")
        cost = ", ".join(f"{part} {statistics.median(each):.1f} µs" for part, each in figures.notes.items())
        decided = figures.median("requests", lambda each: each["decided"] / seconds)
        placed = figures.median("requests", lambda each: each["placed"] / max(1, each["decided"]))
        print(f"  decisions/s: {decided:,.0f}, of them placed at once {placed:.1%}; core time a request: {cost}")
        for other in gateways:
            if isinstance(other, Router):
                ratio = _ratio(figures, all_figures[other.name], "requests", "answered")
                cheaper = all_figures[other.name].core_time() / figures.core_time()
                print(f"  requests/s against {other.name}: {ratio:.2f}; by core time: {cheaper:.2f}")
            if isinstance(other, Plain) and other.name.split(",")[0] in gateway.name:
                ratio = _ratio(figures, all_figures[other.name], "streams", "events")
                print(f"  chunks/s against {other.name}: {ratio:.2f}")
        for name in ("first byte, flat out", "first byte, paced"):
            added = [figures.median(name, by) - direct.median(name, by) for by in (_p50, _p99)]
            print(f"  added to {name}: p50 {added[0] / 1000:.2f} ms, p99 {added[1] / 1000:.2f} ms")


def _p50(result: dict[str, float]) -> float:
    return result["p50_us"]


def _p99(result: dict[str, float]) -> float:
    return result["p99_us"]


def _ratio(ours: Figures, theirs: Figures, workload: str, what: str) -> float:
    return ours.median(workload, per_second(what)) / theirs.median(workload, per_second(what))


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(description="The gateway against others on one core.")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=3.0, help="length of each measurement")
    parser.add_argument("--haproxy", nargs="+", default=["trixie"], help="suites whose HAProxy is measured")
    parser.add_argument("--skip-routers", action="store_true")
    options = parser.parse_args()
    if len(CORES) < 2:
        raise SystemExit("expected two cores, one for the gateway and one for the load, found one")
    init_plugin_loader([str(ROOT / ".cache" / "collections")])  # for the role's templates
    traffic = program()
    gateways: list[Gateway] = [Direct()]
    for suite in options.haproxy:
        gateways += [Plain(suite), Ringmaster(suite)]
    if not options.skip_routers:
        gateways += routers()
    all_figures = {gateway.name: Figures() for gateway in gateways}
    first_engine = free_ports(ENGINES)
    with tempfile.TemporaryDirectory(prefix="ringmaster-bench-") as folder:
        command = [traffic, "engines", str(first_engine), str(ENGINES)]
        with started(command, Path(folder) / "log", LOAD_CORE):
            wait_until(lambda: answers(first_engine), "the engines answer", PATIENCE)
            for number in range(options.rounds):
                for gateway in gateways:
                    print(f"round {number + 1} of {options.rounds}: {gateway.name}", flush=True)
                    measure(gateway, traffic, first_engine, options.seconds, all_figures[gateway.name])
    report(gateways, all_figures, options.seconds)


if __name__ == "__main__":
    main()
