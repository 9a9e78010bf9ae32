# SPDX-License-Identifier: GPL-3.0-or-later
"""A site in miniature on loopback: engines and a scheduler that a test controls, and a real HAProxy in front."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import shutil
import socket
import socketserver
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Protocol

from ringmaster_scheduler import spop
from ringmaster_scheduler.haproxy import LOOK, ServerRow, statistics
from tests.support.ports import port_of, reserve_port
from tests.unit.edge.rendering import render


def _installed() -> dict[str, str]:
    """Version → program of each HAProxy there is: those that tests/run/tools unpacked, else the system's."""
    unpacked = sorted((Path(__file__).resolve().parents[3] / ".cache" / "tools" / "bin").glob("haproxy-*"))
    system = shutil.which("haproxy", path=f"{os.environ['PATH']}:/usr/sbin")
    found = {}
    for program in map(str, unpacked) if unpacked else [system] if system else []:
        text = subprocess.run([program, "-v"], capture_output=True, text=True, check=True).stdout
        found[text.split()[2].rpartition(".")[0]] = program
    return found


HAPROXIES = _installed()
CLIENT_KEY = "sk-client-key-of-team-a"
ENGINE_KEY = "key-of-the-engines"
PATIENCE = 60.0  # seconds until a test gives up waiting for something that has to happen
ANSWER_PATIENCE = 20.0  # seconds until a client gives up an answer: less than the role lets a request wait in a queue


def wait_until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline, f"waited {PATIENCE} s in vain: {what}"
        time.sleep(0.02)


class Stoppable(Protocol):
    """A part of a site."""

    def stop(self) -> None:
        """End it."""


class Quiet(socketserver.BaseServer):
    """A connection that HAProxy or a test cut is no news."""

    def handle_error(self, request: Any, client_address: Any) -> None:
        pass


class HttpServer(Quiet, ThreadingHTTPServer):
    daemon_threads = True


class SpoeServer(Quiet, socketserver.ThreadingTCPServer):
    daemon_threads = True
    allow_reuse_address = True


class Engine:
    """Answers as a test wants; remembers what it was asked."""

    def __init__(self) -> None:
        self.requests: list[tuple[str, dict[str, str], bytes]] = []
        self.status = 200
        self.die_without_answer = False
        self.die_in_stream = False
        self.go_on = threading.Event()  # a stream's second chunk and a held answer wait for it
        self.hold = False
        self.aborted = threading.Event()
        engine = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, format: str, *args: Any) -> None:  # noqa: A002  the base class names it
                pass

            def do_GET(self) -> None:
                self._answer({}) if self.path in {"/health", "/healthz"} else self.send_error(404)

            def do_POST(self) -> None:
                body = self._body()
                engine.requests.append((self.path, {k.lower(): v for k, v in self.headers.items()}, body))
                if engine.die_without_answer:
                    self.close_connection = True
                    return
                if engine.hold:
                    engine.go_on.wait(PATIENCE)
                if b'"stream"' in body:
                    self._stream()
                else:
                    self._answer({"port": engine.port, "bytes": len(body)})

            def _body(self) -> bytes:
                if "chunked" not in self.headers.get("Transfer-Encoding", ""):
                    return self.rfile.read(int(self.headers.get("Content-Length", 0)))
                parts = []
                while size := int(self.rfile.readline(), 16):
                    parts.append(self.rfile.read(size))
                    self.rfile.readline()
                self.rfile.readline()
                return b"".join(parts)

            def _answer(self, document: dict[str, Any]) -> None:
                body = json.dumps(document).encode()
                self.send_response(engine.status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def _stream(self) -> None:
                self.send_response(200)
                self.send_header("Content-Type", "text/event-stream")
                self.send_header("Transfer-Encoding", "chunked")
                self.end_headers()
                self.wfile.write(b"d\r\ndata: first\n\n\r\n")
                if engine.die_in_stream:
                    self.close_connection = True
                    return
                engine.go_on.wait(PATIENCE)
                try:
                    while not self.close_connection:
                        self.wfile.write(b"e\r\ndata: second\n\n\r\n")
                        if not engine.hold:
                            break
                        time.sleep(0.02)
                    self.wfile.write(b"0\r\n\r\n")
                except OSError:
                    engine.aborted.set()
                    self.close_connection = True

        # Kept while the engine is dead: another test's engine must not come to life on the port.
        self._reservation = reserve_port()
        self.port = port_of(self._reservation)
        self._server = HttpServer(("127.0.0.1", self.port), Handler)
        threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()

    def kill(self) -> None:
        """Listen no more."""
        self._server.shutdown()
        self._server.server_close()
        self.go_on.set()

    def stop(self) -> None:
        self.kill()
        self._reservation.close()


@dataclass
class Scheduler:
    """Speaks SPOP; what it answers is ``decide``'s result: variables to set, or None for never."""

    decide: Callable[[dict[str, Any]], dict[str, int | str] | None] = lambda _unused: {}
    asked: list[dict[str, Any]] = field(default_factory=list)
    port: int = 0
    hung: bool = False  # takes what comes and answers nothing, as a process that was stopped

    def __post_init__(self) -> None:
        scheduler = self
        self._connections: list[socket.socket] = []

        class Handler(socketserver.BaseRequestHandler):
            def handle(self) -> None:
                scheduler._connections.append(self.request)
                buffer = b""
                while data := self.request.recv(65536):
                    buffer += data
                    while scheduler.hung:
                        time.sleep(0.02)
                    while end := spop.frame_end(buffer, 0, 65536):
                        frame = spop.decode_frame(buffer, 0, end)
                        if frame.type == spop.FrameType.HAPROXY_HELLO:
                            self.request.sendall(spop.encode_agent_hello(16380, pipelining=True))
                        elif frame.type == spop.FrameType.NOTIFY:
                            self._decide(frame, buffer, end)
                        else:
                            return
                        buffer = buffer[end:]

            def _decide(self, frame: spop.Frame, buffer: bytes, end: int) -> None:
                [(message, arguments)] = spop.decode_notify(buffer, frame.payload, end)
                assert message == "decide"
                scheduler.asked.append(arguments)
                answer = scheduler.decide(arguments)
                if answer is None:
                    return
                actions = b"".join(
                    spop.encode_set_variable(
                        spop.Scope.TRANSACTION,
                        name,
                        spop.DataType.STRING if isinstance(value, str) else spop.DataType.INT32,
                        value,
                    )
                    for name, value in answer.items()
                )
                self.request.sendall(spop.encode_ack(frame.identifiers, actions))

        self._server = SpoeServer(("127.0.0.1", self.port), Handler)
        self.port = self._server.server_address[1]
        threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()

    def stop(self) -> None:
        """End as a process does: its connections end with it."""
        self._server.shutdown()
        self._server.server_close()
        for connection in self._connections:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)


@dataclass
class Answer:
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def document(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> dict[str, Any]:
        """The error, after a check that its form is OpenAI's."""
        document = self.document
        assert self.headers["content-type"] == "application/json"
        assert set(document) == {"error"}
        assert set(document["error"]) == {"message", "type", "param", "code"}
        error: dict[str, Any] = document["error"]
        return error


class Datagrams:
    """Keeps what HAProxy sends to one of its logs."""

    def __init__(self) -> None:
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._socket.bind(("127.0.0.1", 0))
        self._socket.setblocking(False)
        self.address = f"127.0.0.1:{self._socket.getsockname()[1]}"
        self._datagrams: list[bytes] = []

    def all(self) -> list[bytes]:
        """Every datagram that has come."""
        with contextlib.suppress(BlockingIOError):
            while True:
                self._datagrams.append(self._socket.recv(65536))
        return self._datagrams

    def stop(self) -> None:
        self._socket.close()


class LogReceiver(Datagrams):
    """Takes the datagrams of the access log as the scheduler does."""

    def lines(self) -> dict[str, dict[str, Any]]:
        """Request id → line, of all that has come; HAProxy's words about itself are no JSON."""
        lines = [json.loads(datagram) for datagram in self.all() if datagram.startswith(b"{")]
        return {line["request_id"]: line for line in lines}

    def line(self, request_id: str) -> dict[str, Any]:
        """The line of a request, which is waited for."""
        wait_until(lambda: request_id in self.lines(), f"a log line of {request_id}")
        return self.lines()[request_id]


def answer_of(response: http.client.HTTPResponse) -> Answer:
    """Read a response to its end."""
    return Answer(response.status, {k.lower(): v for k, v in response.getheaders()}, response.read())


def exchange(client: socket.socket, request: bytes) -> Answer:
    """Send bytes as they are; give the answer, however many pieces it comes in."""
    client.sendall(request)
    with http.client.HTTPResponse(client) as response:
        response.begin()
        return answer_of(response)


def be_patient_with_the_scheduler(configuration: Path, generation: str) -> None:
    """Give a test's scheduler, a thread of a busy process, more time than the milliseconds that the role allows.

    What the edge does with an answer can be tested only if the answer is in time; what it does without one is a test of
    its own, with the role's times.
    """
    patient = rf"\1 {PATIENCE:.0f}s"
    text, begin, agents = configuration.read_text().partition("\ndefaults agents\n")
    agents, count = re.subn(r"(timeout (?:connect|check)) \S+", patient, agents)
    assert count == 2, "the times for the scheduler are no longer where this test looks for them"
    configuration.write_text(text + begin + agents)
    spoe = configuration.parent / generation / "spoe.conf"
    text, count = re.subn(r"(timeout hello) \S+", patient, spoe.read_text())
    assert count == 1, "the time for the greeting is no longer where this test looks for it"
    spoe.write_text(text)


def send_up_to_a_refusal(
    connection: http.client.HTTPConnection, method: str, path: str, body: Any, headers: dict[str, str]
) -> None:
    """Send a request. A refusal may come, and the connection be closed, before the whole body was sent."""
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        connection.request(method, path, body, headers)


class Edge:
    """A running HAProxy with the role's configuration; it waits for the answers of a scheduler that it is given."""

    def __init__(self, directory: Path, version: str, *, scheduler: Scheduler | None = None, **variables: Any) -> None:
        self.version = version
        self._reservations = {name: reserve_port() for name in ("public", "dispatch", "metrics", "scheduler")}
        self.ports = {name: port_of(reservation) for name, reservation in self._reservations.items()}
        self._directory = directory
        self._journal = Datagrams()
        self._socket = directory / "admin.sock"
        self.server_state = directory / "haproxy-servers"
        self._patient = scheduler is not None
        self._variables = {
            **{f"edge_{name}_port": self.ports[name] for name in ("public", "dispatch", "metrics")},
            "edge_stats_socket": str(self._socket),
            "edge_server_state_path": str(self.server_state),
            "edge_address": "127.0.0.1",
            "edge_public_address": "127.0.0.1",
            "edge_api_keys": [{"id": "team-a", "key": CLIENT_KEY}],
            "edge_engine_api_key": ENGINE_KEY,
            "edge_scheduler": f"127.0.0.1:{self.ports['scheduler']}",  # where nothing listens
            "edge_scheduler_log": "127.0.0.1:9",
            "edge_log_address": self._journal.address,
            **variables,
        }
        if scheduler is not None:
            self._variables["edge_scheduler"] = f"127.0.0.1:{scheduler.port}"
            self._variables["edge_timeout_decision"] = f"{PATIENCE:.0f}s"
        self._output = directory / "output"
        self._processes = [self._start(self._render(directory))]

    def _render(self, directory: Path, **changes: Any) -> Path:
        configuration = render(directory, **{**self._variables, **changes})
        if self._patient:
            be_patient_with_the_scheduler(configuration, changes.get("edge_generation", "generation"))
        return configuration

    def _start(self, configuration: Path, *arguments: str) -> subprocess.Popen[bytes]:
        with self._output.open("ab") as output:
            return subprocess.Popen(
                [HAPROXIES[self.version], "-db", "-f", str(configuration), *arguments],
                stdout=output,
                stderr=subprocess.STDOUT,
            )

    def reload(self, name: str, **changes: Any) -> None:
        """Let a new process with other variables take the listening sockets over, as a reload of the unit does."""
        configuration = self._render(self._directory / name, **changes, edge_generation=name)
        before = self.pid()
        self._processes.append(self._start(configuration, "-x", str(self._socket), "-sf", str(before)))
        wait_until(lambda: self.pid() != before, "the new process answers on the stats socket")
        # The old one is told to stop accepting after that.
        generation = name.encode()
        wait_until(
            lambda: all(self.ask("GET", "/generation", frontend="metrics").body == generation for _unused in range(5)),
            "the new process answers alone",
        )

    def pid(self) -> int:
        return int(next(line for line in self.admin("show info").splitlines() if line.startswith("Pid:"))[4:])

    def admin(self, command: str) -> str:
        """What HAProxy answers to a command on its stats socket."""
        with socket.socket(socket.AF_UNIX) as client:
            client.settimeout(PATIENCE)
            for _unused in range(100):
                with contextlib.suppress(FileNotFoundError, ConnectionRefusedError):
                    client.connect(str(self._socket))
                    break
                time.sleep(0.02)
            client.sendall(command.encode() + b"\n")
            parts = []
            while part := client.recv(65536):
                parts.append(part)
        return b"".join(parts).decode()

    def servers(self) -> list[ServerRow]:
        """What HAProxy shows of its servers."""
        return statistics(*(self.admin(command) for command in LOOK)).servers

    def stop(self) -> None:
        for process in self._processes:
            process.terminate()
            process.wait(PATIENCE)
        for reservation in self._reservations.values():
            reservation.close()
        self._journal.stop()

    def journal(self) -> list[str]:
        """What HAProxy has told the journal, without the head that syslog's format has: priority, time, tag."""
        return [line.decode().rstrip("\n").split("]: ", 1)[1] for line in self._journal.all()]

    def metrics(self) -> dict[str, float]:
        """The exporter's samples of one moment, named as they stand in the exposition; none before HAProxy listens."""
        try:
            lines = self.ask("GET", "/metrics", frontend="metrics").body.decode().splitlines()
        except ConnectionError:
            assert self._processes[-1].poll() is None, self._output.read_text()
            return {}
        samples = (line.rpartition(" ") for line in lines if line and not line.startswith("#"))
        return {name: float(value) for name, _unused, value in samples}

    def wait_until_it_listens(self) -> None:
        wait_until(lambda: bool(self.metrics()), "HAProxy listens")

    def metric(self, line: str) -> float:
        """Value of a sample of the exporter, named as it stands in the exposition; -1 if it is not there yet."""
        return self.metrics().get(line, -1)

    def wait_for_engines(self, pool: str, count: int) -> None:
        name = f'haproxy_backend_active_servers{{proxy="{pool}"}}'
        wait_until(lambda: self.metric(name) == count, f"{count} engines up in {pool}")

    def connect(self, frontend: str = "public") -> http.client.HTTPConnection:
        return http.client.HTTPConnection("127.0.0.1", self.ports[frontend], timeout=ANSWER_PATIENCE)

    def connected(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.ports["public"]), timeout=ANSWER_PATIENCE)

    def ask(
        self,
        method: str,
        path: str,
        body: Any = None,
        *,
        headers: dict[str, str] | None = None,
        key: str | None = CLIENT_KEY,
        frontend: str = "public",
    ) -> Answer:
        known = {"Authorization": f"Bearer {key}"} if key is not None else {}
        if isinstance(body, dict):
            known["Content-Type"] = "application/json"
        encoded = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        with contextlib.closing(self.connect(frontend)) as connection:
            send_up_to_a_refusal(connection, method, path, encoded, {**known, **(headers or {})})
            return answer_of(connection.getresponse())

    def complete(self, model: str = "alpha", **arguments: Any) -> Answer:
        return self.ask("POST", "/v1/completions", {"prompt": "a secret prompt", "model": model}, **arguments)


@contextmanager
def background(threads: int = 16) -> Iterator[Callable[..., Future[Any]]]:
    """Gives a function that calls another one in a thread: a request that has to wait."""
    with ThreadPoolExecutor(threads) as executor:
        yield executor.submit


@contextmanager
def running(*parts: Stoppable) -> Iterator[None]:
    try:
        yield
    finally:
        for part in parts:
            part.stop()
