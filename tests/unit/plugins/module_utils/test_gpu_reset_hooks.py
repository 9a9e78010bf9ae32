# SPDX-License-Identifier: GPL-3.0-or-later
"""Hooks: a command of a real process, a request to a real server, and what goes wrong with either."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest
from ansible.module_utils.urls import open_url

from ansible_collections.ringmaster.inference.plugins.module_utils.commands import CommandRunner
from ansible_collections.ringmaster.inference.plugins.module_utils.gpu_reset_hooks import Hook, describe


class Server(HTTPServer):
    """Gives the answers of a test, one after the other, the last one for ever."""

    answers: list[tuple[int, dict[str, str]]]
    requests: list[tuple[str, str, dict[str, str], bytes]]


class Handler(BaseHTTPRequestHandler):
    server: Server

    def answer(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.server.requests.append((self.command, self.path, dict(self.headers), body))
        status, headers = self.server.answers.pop(0) if len(self.server.answers) > 1 else self.server.answers[0]
        self.send_response(status)
        for name, value in {"Content-Length": "0", **headers}.items():
            self.send_header(name, value)
        self.end_headers()

    do_GET = do_POST = do_PUT = answer  # noqa: N815

    def log_message(self, *_arguments: Any) -> None:
        """Nothing on the tests' output."""


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    server = Server(("127.0.0.1", 0), Handler)
    server.answers, server.requests = [(200, {})], []
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


class Clock:
    """Time that passes only when somebody waits."""

    def __init__(self) -> None:
        self.now = 0.0
        self.waits: list[float] = []

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.waits.append(seconds)
        self.now += seconds


def call(option: dict[str, Any], clock: Clock | None = None) -> str:
    clock = clock or Clock()
    return Hook({"timeout": 60, **option}, CommandRunner(), open_url, clock.monotonic, clock.sleep).run()


def url_of(server: Server, path: str = "/drain") -> str:
    return f"http://127.0.0.1:{server.server_port}{path}"


@pytest.mark.parametrize("status", [200, 201, 204, 299])
def test_success(server: Server, status: int) -> None:
    server.answers = [(status, {})]
    assert call({"url": url_of(server)}) == ""
    assert server.requests[0][:2] == ("POST", "/drain")


def test_method_headers_and_body(server: Server) -> None:
    option = {"url": url_of(server), "method": "PUT", "headers": {"X-Key": "k"}, "body": {"server": "a.main"}}
    assert call(option) == ""
    method, _path, headers, body = server.requests[0]
    assert method == "PUT"
    assert headers["X-Key"] == "k"
    assert headers["Content-Type"] == "application/json"
    assert json.loads(body) == {"server": "a.main"}


def test_text_as_body_with_a_type_of_its_own(server: Server) -> None:
    call({"url": url_of(server), "headers": {"content-type": "text/plain"}, "body": "drain ä"})
    assert server.requests[0][3].decode() == "drain ä"
    assert [value for name, value in server.requests[0][2].items() if name.lower() == "content-type"] == ["text/plain"]


def test_not_yet_is_asked_again(server: Server) -> None:
    server.answers = [(202, {}), (503, {"Retry-After": "7"}), (429, {"Retry-After": "0"}), (200, {})]
    clock = Clock()
    assert call({"url": url_of(server)}, clock) == ""
    assert clock.waits == [2.0, 7.0, 2.0]
    assert len(server.requests) == 4


@pytest.mark.parametrize("hint", ["tomorrow", "-1", "1e9", "999999", "²"])
def test_odd_hints_of_when_to_come_again(server: Server, hint: str) -> None:
    server.answers = [(202, {"Retry-After": hint.encode("ascii", "ignore").decode()}), (200, {})]
    clock = Clock()
    call({"url": url_of(server), "timeout": 600}, clock)
    assert 2.0 <= clock.waits[0] <= 60.0


def test_not_yet_for_ever(server: Server) -> None:
    server.answers = [(202, {})]
    complaint = call({"url": url_of(server), "timeout": 5})
    assert "still status 202 after 5 s" in complaint
    assert len(server.requests) == 3


@pytest.mark.parametrize("status", [301, 302, 400, 401, 404, 500])
def test_refused(server: Server, status: int) -> None:
    server.answers = [(status, {"Location": url_of(server, "/other")})]
    assert f"status {status}" in call({"url": url_of(server)})
    assert len(server.requests) == 1, "a redirection could carry the headers elsewhere"


def test_nobody_listens(server: Server) -> None:
    complaint = call({"url": "http://127.0.0.1:9/drain?key=SECRET", "headers": {"Authorization": "SECRET"}})
    assert "POST http://127.0.0.1:9/drain" in complaint
    assert "SECRET" not in complaint


@pytest.mark.parametrize(
    "url", ["nonsense", "ftp://127.0.0.1:9/", "http://", "http://127.0.0.1:99999/", "http://[::bad/"]
)
def test_what_is_no_url(url: str) -> None:
    assert call({"url": url}) != ""


def test_command() -> None:
    assert call({"command": ["true"]}) == ""
    complaint = call({"command": ["sh", "-c", "echo no such server >&2; exit 3"]})
    assert complaint == "command sh: status 3, it said: no such server"
    assert call({"command": ["sh", "-c", "echo on output; exit 1"]}).endswith("it said: on output")
    assert "nothing" in call({"command": ["false"]})


def test_command_that_is_missing_or_does_not_end() -> None:
    assert "not found: no-such-hook" in call({"command": ["no-such-hook"]})
    assert "no end" in call({"command": ["sleep", "60"], "timeout": 0.2})
    assert call({"command": []}) != ""


def test_description_holds_no_secret() -> None:
    assert describe({"url": "https://host/drain?token=SECRET", "method": "PUT"}) == "PUT https://host/drain"
    assert describe({"url": "https://user:SECRET@host/drain"}) == "POST https://host/drain"
    assert describe({"command": ["drain", "--token", "SECRET"]}) == "command drain"
