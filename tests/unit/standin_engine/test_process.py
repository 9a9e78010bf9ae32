# SPDX-License-Identifier: GPL-3.0-or-later
"""The engine as a process, as a service manager sees it."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import standin_engine

ROOT = Path(standin_engine.__file__).resolve().parents[1]
SECRET_PROMPT = "zebra crossing"
KEY = "sesame"
HEADERS = {"Content-Type": "application/json", "Authorization": f"Bearer {KEY}"}
LONG = {"prompt": SECRET_PROMPT, "max_tokens": 200, "ignore_eos": True, "stream": True}
ENDLESS = {**LONG, "max_tokens": 30_000}  # five minutes: only a fault or a signal ends it within a test
PATIENCE = 60  # seconds until a test gives up waiting for something that has to happen


class Connection(http.client.HTTPConnection):
    """HTTP over a Unix socket: no port of the machine is needed."""

    def __init__(self, path: Path) -> None:
        super().__init__("engine", timeout=PATIENCE)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(PATIENCE)
        self.sock.connect(str(self._path))


@contextlib.contextmanager
def process(tmp_path: Path, *arguments: str, **environment: str) -> Iterator[tuple[subprocess.Popen[str], Path]]:
    """A running engine that has said that it is ready, and its socket."""
    path = tmp_path / "engine.socket"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as notifications:
        notifications.bind(str(tmp_path / "notify"))
        notifications.settimeout(PATIENCE)
        running = start(
            "serve", "m", "--uds", str(path), *arguments, NOTIFY_SOCKET=str(tmp_path / "notify"), **environment
        )
        try:
            assert notifications.recv(100) == b"READY=1"
            yield running, path
        finally:
            running.kill()
            running.communicate()


def start(*arguments: str, **environment: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "standin_engine", *arguments],
        env={"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1", **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


@contextlib.contextmanager
def post(path: Path, document: Any) -> Iterator[http.client.HTTPResponse]:
    """The head of an answer to a completion; its body can be read."""
    with contextlib.closing(Connection(path)) as connection:
        connection.request("POST", "/v1/completions", json.dumps(document), HEADERS)
        with connection.getresponse() as response:
            yield response


@pytest.mark.parametrize(
    ("arguments", "environment", "status", "message"),
    [
        (["serve", "m", "--worker-use-ray"], {}, 2, "error: unrecognized arguments: --worker-use-ray"),
        (["chat"], {}, 2, "usage: standin-engine serve"),
        (["serve"], {}, 1, "the model is missing"),
        (["serve", "m"], {"STANDIN_CARD": "abacus"}, 1, "STANDIN_CARD is 'abacus'"),
        (["serve", "m", "--uds", "/nowhere/socket"], {}, 1, "The engine stops"),
    ],
)
def test_what_cannot_start_says_why(
    arguments: list[str], environment: dict[str, str], status: int, message: str
) -> None:
    running = start(*arguments, **environment)
    output, _unused = running.communicate(timeout=PATIENCE)
    assert running.returncode == status
    assert message in output
    assert "Traceback" not in output


def test_out_of_memory_at_start_ends_with_status_1(tmp_path: Path) -> None:
    (tmp_path / "faults.json").write_text('{"oom_at_start": {}}')
    running = start("serve", "m", STANDIN_FAULTS=str(tmp_path / "faults.json"))
    output, _unused = running.communicate(timeout=PATIENCE)
    assert running.returncode == 1
    assert "torch.OutOfMemoryError: CUDA out of memory" in output


def test_a_crash_looks_like_a_kill_and_the_next_start_lives(tmp_path: Path) -> None:
    faults = tmp_path / "faults.json"
    with process(tmp_path, STANDIN_FAULTS=str(faults)) as (running, path):
        with post(path, ENDLESS) as response:
            faults.write_text('{"crash": {}}')
            assert running.wait(PATIENCE) == -signal.SIGKILL
            with pytest.raises(http.client.IncompleteRead):
                response.read()
    path.unlink()
    (tmp_path / "notify").unlink()
    with process(tmp_path, STANDIN_FAULTS=str(faults)) as (running, path):
        time.sleep(0.5)
        assert running.poll() is None
        with post(path, {"prompt": "a", "max_tokens": 1}) as response:
            assert response.status == 200


def test_sigterm_lets_requests_in_flight_end_within_their_time(tmp_path: Path) -> None:
    with process(tmp_path, "--shutdown-timeout", str(PATIENCE)) as (running, path):
        with contextlib.closing(Connection(path)) as idle:
            idle.request("GET", "/health")
            idle.getresponse().read()
            with post(path, LONG) as response:
                running.send_signal(signal.SIGTERM)
                assert response.read().endswith(b"data: [DONE]\n\n")
            assert running.wait(PATIENCE) == 0
            with pytest.raises(OSError, match=r"Connection refused|No such file"), post(path, LONG):
                pass


def test_sigterm_without_a_time_cuts_requests_in_flight(tmp_path: Path) -> None:
    with process(tmp_path) as (running, path):
        with post(path, ENDLESS) as response:
            response.read1(10)
            running.send_signal(signal.SIGTERM)
            assert running.wait(PATIENCE) == 0
            with pytest.raises(http.client.IncompleteRead):
                response.read()


def test_no_prompt_no_answer_and_no_key_is_in_the_log(tmp_path: Path) -> None:
    head = f"POST /v1/completions HTTP/1.1\r\nHost: engine\r\nAuthorization: Bearer {KEY}\r\n"
    broken = [
        f"GET /v1/models?key={KEY} HTTP/1.1\r\nHost: engine\r\n\r\n",
        f"GET /health HTTP/1.1\r\nHost: engine\r\nAuthori zation: Bearer {KEY}\r\n\r\n",
        f"{head}Content-Length: 2\r\n\r\n{{}}{SECRET_PROMPT}\r\n\r\n",
        f"{head}Transfer-Encoding: chunked\r\n\r\n{SECRET_PROMPT}\r\n",
        f"{head}Content-Encoding: gzip\r\nContent-Length: {len(SECRET_PROMPT)}\r\n\r\n{SECRET_PROMPT}",
        f"{head}Content-Length: 1000\r\n\r\n{SECRET_PROMPT}",
    ]
    arguments = ("--uvicorn-log-level", "trace")
    with process(tmp_path, *arguments, VLLM_API_KEY=KEY) as (running, path):
        with post(path, {**LONG, "stream": False}) as response:
            text = json.loads(response.read())["choices"][0]["text"]
        with post(path, {"prompt": SECRET_PROMPT, "max_tokens": SECRET_PROMPT}) as response:
            assert response.status == 400
        for request in broken:
            with socket.socket(socket.AF_UNIX) as client:
                client.connect(str(path))
                client.sendall(request.encode())
                client.shutdown(socket.SHUT_WR)
                client.settimeout(PATIENCE)
                while client.recv(65536):
                    pass
        running.send_signal(signal.SIGTERM)
        output, _unused = running.communicate(timeout=PATIENCE)
    assert '"POST /v1/completions HTTP/1.1" 200' in output
    assert '"GET /v1/models HTTP/1.1" 401' in output
    for secret in ("zebra", KEY, text[:20]):
        assert secret not in output
    assert "Traceback" not in output
    assert "File " not in output
