# SPDX-License-Identifier: GPL-3.0-or-later
"""A preprocessor on the loopback interface between clients of the tests and a gateway that plays the engine."""

from __future__ import annotations

import contextlib
import hashlib
import http.client
import json
import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

KEY = "key-of-team-a"


def salted(key: str, salt: str = "73616c74") -> str:
    """Return a line's hash for a key, with a salt."""
    plain = hashlib.sha256(key.encode()).hexdigest()
    return f"{salt}:{hashlib.sha256(bytes.fromhex(salt) + plain.encode()).hexdigest()}"


class Gateway:
    """What plays dispatch and engine: it notes requests and answers what the test wants."""

    def __init__(self, address: str = "127.0.0.1") -> None:
        self.requests: list[tuple[str, dict[str, str], bytes]] = []
        self.answer: dict[str, Any] = {
            "choices": [{"index": 0, "message": {"content": "fine"}, "finish_reason": "stop"}]
        }
        self.events: list[str] | None = None
        self.streams = ("/v1/chat/completions", "/v1/completions")
        self.pause = 0.0
        self.sent_at: list[float] = []
        self.broken_off = 0
        self.status = 200
        self.connections: list[socket.socket] = []
        gateway = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def setup(self) -> None:
                super().setup()
                gateway.connections.append(self.connection)

            def do_GET(self) -> None:
                self.do_POST()

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
                gateway.requests.append(
                    (self.path, {name.lower(): value for name, value in self.headers.items()}, body)
                )
                if gateway.events is None or self.path not in gateway.streams:
                    content = json.dumps(gateway.answer, indent=1).encode()
                    self.send_response(gateway.status)
                    self.send_header("Content-Type", "application/json")
                    self.send_header("Content-Length", str(len(content)))
                    self.send_header("X-Secret-Of-The-Engine", "1")
                    self.end_headers()
                    time.sleep(gateway.pause)
                    self.wfile.write(content)
                    return
                self.send_response(gateway.status)
                self.send_header("Content-Type", "text/event-stream; charset=utf-8")
                self.send_header("Transfer-Encoding", "chunked")
                self.end_headers()
                try:
                    for event in gateway.events:
                        data = event.encode()
                        gateway.sent_at.append(time.monotonic())
                        self.wfile.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")
                        time.sleep(gateway.pause)
                    self.wfile.write(b"0\r\n\r\n")
                except OSError:
                    gateway.broken_off += 1
                    self.close_connection = True

            def log_message(self, *_arguments: object) -> None:
                pass

        self.server = ThreadingHTTPServer((address, 0), Handler)
        self.server.daemon_threads = True
        self.port = self.server.server_address[1]
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def say(self, *contents: str, index: int = 0, finish: str = "stop") -> None:
        """Answer with a stream of these contents."""
        self.events = [chunk(content, index) for content in contents]
        self.events += [chunk("", index, finish), "data: [DONE]\n\n"]

    def close(self) -> None:
        """Stop listening and cut all connections."""
        self.server.shutdown()
        self.server.server_close()
        for connection in self.connections:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
            connection.close()


def chunk(content: str, index: int = 0, finish: str | None = None) -> str:
    """Return an event of a chat."""
    choice = {"index": index, "delta": {"content": content}, "finish_reason": finish}
    body = {"id": "c", "object": "chat.completion.chunk", "created": 1, "model": "m", "choices": [choice]}
    return f"data: {json.dumps(body, ensure_ascii=False)}\n\n"


class Proxy:
    """A running preprocessor."""

    def __init__(
        self, binary: Path, directory: Path, models: list[dict[str, Any]], gateways: list[int | str], **settings: Any
    ) -> None:
        self.directory = directory
        directory.mkdir(parents=True, exist_ok=True)
        self.keys = directory / "keys"
        self.keys.write_text(f"{salted(KEY)} team-a\n", encoding="utf-8")
        self.metrics_port = free_port()
        self.configuration = {
            "listen": f"127.0.0.1:{free_port()}",
            "metrics_listen": f"127.0.0.1:{self.metrics_port}",
            "dispatch": [f"127.0.0.1:{gateway}" if isinstance(gateway, int) else gateway for gateway in gateways],
            "keys_file": str(self.keys),
            "models": models,
            "threads": 2,
            **settings,
        }
        self.port = int(self.configuration["listen"].rpartition(":")[2])
        self.path = directory / "preprocessor.json"
        self.path.write_text(json.dumps(self.configuration), encoding="utf-8")
        self.log_path = directory / "log"
        self.log_file = self.log_path.open("wb")
        self.process = subprocess.Popen(
            [str(binary), "--config", str(self.path)], stdout=self.log_file, stderr=self.log_file
        )
        wait_until(lambda: self.answers() or self.process.poll() is not None)
        assert self.process.poll() is None, self.log()

    def answers(self) -> bool:
        """Return whether /healthz says that it is well."""
        try:
            return self.ask("GET", "/healthz")[0] == 200
        except OSError:
            return False

    def log(self) -> str:
        """Return all that was logged."""
        return self.log_path.read_text(encoding="utf-8")

    def ask(
        self, method: str, path: str, body: Any = None, key: str | None = KEY, port: int | None = None, **headers: str
    ) -> tuple[int, dict[str, str], bytes]:
        """Send a request; return status, headers (small letters) and body."""
        connection = http.client.HTTPConnection("127.0.0.1", port or self.port, timeout=20)
        sent = {name.replace("_", "-"): value for name, value in headers.items()}
        if key is not None:
            sent["Authorization"] = f"Bearer {key}"
        data = None
        if body is not None:
            data = body if isinstance(body, bytes) else json.dumps(body).encode()
            sent.setdefault("Content-Type", "application/json")
        try:
            connection.request(method, path, data, sent)
            response = connection.getresponse()
            return response.status, {name.lower(): value for name, value in response.getheaders()}, response.read()
        finally:
            connection.close()

    def post(self, path: str, body: Any, **options: Any) -> tuple[int, Any]:
        """Send JSON; return status and JSON."""
        status, _headers, content = self.ask("POST", path, body, **options)
        return status, json.loads(content)

    def chat(self, content: str = "Hello", **more: Any) -> tuple[int, Any]:
        """Send a chat."""
        return self.post(
            "/v1/chat/completions", {"model": "m", "messages": [{"role": "user", "content": content}], **more}
        )

    def stream(self, content: str = "Hello", **more: Any) -> Iterator[tuple[float, bytes]]:
        """Send a chat with a streamed answer; yield time and bytes of each piece."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=20)
        headers = {"Authorization": f"Bearer {KEY}", "Content-Type": "application/json", **more.pop("headers", {})}
        body = {"model": "m", "stream": True, "messages": [{"role": "user", "content": content}], **more}
        connection.request("POST", "/v1/chat/completions", json.dumps(body), headers)
        response = connection.getresponse()
        try:
            assert response.status == 200, response.read()
            while piece := response.read1(65536):
                yield time.monotonic(), piece
        finally:
            response.close()
            connection.close()

    def metric(self, name: str) -> float:
        """Return the sum of a metric over its labels."""
        text = self.ask("GET", "/metrics", port=self.metrics_port)[2].decode()
        return sum(
            float(line.rsplit(" ", 1)[1]) for line in text.splitlines() if line.split("{")[0].split(" ")[0] == name
        )

    def resident_bytes(self) -> int:
        """Return the memory that the process holds."""
        pages = Path(f"/proc/{self.process.pid}/statm").read_text(encoding="ascii").split()[1]
        return int(pages) * os.sysconf("SC_PAGE_SIZE")

    def terminate(self) -> None:
        """Ask it to end."""
        self.process.send_signal(signal.SIGTERM)

    def close(self) -> None:
        """End it at once."""
        self.process.kill()
        self.process.wait()
        self.log_file.close()


def free_port() -> int:
    """Return a port of the loopback interface that is free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def wait_until(condition: Any, seconds: float = 15.0) -> None:
    """Wait for a condition to hold."""
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until, "it did not come true in time"
        time.sleep(0.02)


def text_of(pieces: list[bytes] | bytes, index: int = 0) -> tuple[str, str | None]:
    """Return the text of a choice that a client puts together from a stream, and why it ended."""
    whole = pieces if isinstance(pieces, bytes) else b"".join(pieces)
    text, reason = "", None
    for line in whole.decode().split("\n"):
        if line.startswith("data: {"):
            for choice in json.loads(line[6:]).get("choices", []):
                if choice["index"] == index:
                    text += choice.get("delta", {}).get("content") or ""
                    reason = choice.get("finish_reason") or reason
    return text, reason
