# SPDX-License-Identifier: GPL-3.0-or-later
"""The module against schedulers on loopback that a test controls."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from ansible_collections.ringmaster.inference.plugins.modules import node_state

Run = Callable[..., dict[str, Any]]
TOKEN = "a-token-of-the-test"


class FakeScheduler:
    """Two engines of one host and one of another; every look lets the answers of one request more come to their end."""

    def __init__(self) -> None:
        self.engines: dict[str, dict[str, Any]] = {
            name: {"drained": False, "held": 0, "running": 0} for name in ("gpu-a1.main", "gpu-a1.b", "other.main")
        }
        self.gone: set[str] = set()  # drained, and no members any more
        self.posts: list[str] = []
        self.page: bytes | None = None
        self.haproxy_error = ""
        scheduler = self

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, format: str, *args: Any) -> None:  # noqa: A002  the base class names it
                pass

            def do_GET(self) -> None:
                self.answer(200, scheduler.state())

            def do_POST(self) -> None:
                scheduler.posts.append(self.path)
                if self.headers.get("Authorization") != f"Bearer {TOKEN}":
                    self.answer(401, {"error": "a token is needed"})
                    return
                _empty, _version, _engines, name, action = self.path.split("/")
                if name not in scheduler.engines:
                    known = name in scheduler.gone
                    scheduler.gone.discard(name)
                    self.answer(200 if known else 404, {} if known else {"error": "no engine is named so"})
                    return
                scheduler.engines[name]["drained"] = action == "drain"
                self.answer(200, {})

            def answer(self, status: int, document: dict[str, Any]) -> None:
                body = scheduler.page if scheduler.page is not None else json.dumps(document).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()

    def state(self) -> dict[str, Any]:
        shown = [
            {"name": name, "host": name.split(".", maxsplit=1)[0], "health": "healthy", "waiting": 0, **values}
            for name, values in self.engines.items()
        ]
        for values in self.engines.values():
            values["held"] = max(0, values["held"] - 1)
            if values["running"] is not None:
                values["running"] = values["held"]
        return {
            "engines": shown,
            "haproxy": {"error": self.haproxy_error, "absent": "No such file" in self.haproxy_error},
        }

    def stop(self) -> None:
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture
def schedulers() -> Iterator[list[FakeScheduler]]:
    found = [FakeScheduler(), FakeScheduler()]
    yield found
    for scheduler in found:
        scheduler.stop()


@pytest.fixture
def call(module_run: Run, schedulers: list[FakeScheduler]) -> Run:
    def run(state: str, **arguments: Any) -> dict[str, Any]:
        return module_run(
            node_state.main,
            **{
                "name": "gpu-a1",
                "state": state,
                "schedulers": [scheduler.url for scheduler in schedulers],
                "token": TOKEN,
                "wait_interval": 0.01,
                **arguments,
            },
        )

    return run


def drained(scheduler: FakeScheduler) -> list[str]:
    return [name for name, values in scheduler.engines.items() if values["drained"]]


def test_host_is_drained_at_every_scheduler_and_comes_back(call: Run, schedulers: list[FakeScheduler]) -> None:
    would = call("drained", _ansible_check_mode=True, _ansible_diff=True)
    assert would["changed"]
    assert would["diff"]["after"] == "gpu-a1.b: drained\ngpu-a1.main: drained\n"
    assert schedulers[0].posts == []
    first = call("drained")
    assert first["changed"]
    assert [each["name"] for each in first["engines"]] == ["gpu-a1.b", "gpu-a1.main"]
    assert all(each["drained"] for each in first["engines"])
    assert [drained(scheduler) for scheduler in schedulers] == [["gpu-a1.main", "gpu-a1.b"]] * 2
    assert not call("drained")["changed"]
    assert call("active")["changed"]
    assert [drained(scheduler) for scheduler in schedulers] == [[], []]
    assert not call("active")["changed"]


def test_one_engine_alone(call: Run, schedulers: list[FakeScheduler]) -> None:
    assert call("drained", name="gpu-a1.b")["changed"]
    assert drained(schedulers[1]) == ["gpu-a1.b"]


def test_engine_that_only_one_scheduler_has_drained(call: Run, schedulers: list[FakeScheduler]) -> None:
    schedulers[0].engines["gpu-a1.main"]["drained"] = True
    found = call("empty")["engines"]
    assert [each["drained"] for each in found] == [False, False]
    assert call("drained")["changed"]
    assert len(schedulers[0].posts) == 1


def test_it_is_waited_until_nothing_runs(call: Run, schedulers: list[FakeScheduler]) -> None:
    schedulers[0].engines["gpu-a1.main"].update(held=4, running=4)
    schedulers[1].engines["other.main"].update(held=1000, running=1000)
    result = call("drained", wait=True)
    assert [each["requests"] for each in result["engines"]] == [0, 0]
    schedulers[1].engines["gpu-a1.b"].update(held=3, running=3)
    assert not call("empty")["changed"]


def test_check_mode_waits_for_nothing(call: Run, schedulers: list[FakeScheduler]) -> None:
    schedulers[0].engines["gpu-a1.main"].update(held=1000)
    assert call("drained", wait=True, _ansible_check_mode=True)["changed"]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"state": "gone"}, "value of state must be one of"),
        ({"state": "drained", "token": None}, "token"),
        ({"state": "drained", "token": "wrong"}, "HTTP status 401: a token is needed"),
        ({"state": "drained", "name": "nobody"}, "to know a host or engine named nobody"),
        ({"state": "drained", "schedulers": []}, "Expected the addresses of all schedulers"),
        ({"state": "empty", "wait_interval": 0}, "Expected wait_interval over 0"),
        ({"state": "empty", "timeout": -1}, "Expected timeout over 0"),
    ],
)
def test_what_is_refused(call: Run, arguments: dict[str, Any], says: str) -> None:
    result = call(**arguments)
    assert result["failed"]
    assert says in result["msg"]
    assert TOKEN not in json.dumps(result["msg"])


def test_node_that_does_not_become_empty(call: Run, schedulers: list[FakeScheduler]) -> None:
    schedulers[0].engines["gpu-a1.main"].update(held=1000, running=1000)
    result = call("empty", wait_timeout=0.05)
    assert result["failed"]
    assert "Expected no request on gpu-a1 after 0.05 s. Found 99" in result["msg"]


def test_scheduler_that_does_not_answer_changes_nothing_anywhere(call: Run, schedulers: list[FakeScheduler]) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        gone = f"http://127.0.0.1:{closed.getsockname()[1]}"
        result = call("drained", schedulers=[schedulers[0].url, gone])
    assert result["failed"]
    assert f"Expected the scheduler at {gone} to answer" in result["msg"]
    assert schedulers[0].posts == []


@pytest.mark.parametrize("page", [b"", b"\xff\xfe", b"<html>", b"[]", b"{}", b'{"engines": 5}', b'{"engines": [{}]}'])
def test_what_is_no_scheduler(call: Run, schedulers: list[FakeScheduler], page: bytes) -> None:
    schedulers[1].page = page
    result = call("drained")
    assert result["failed"]
    assert f"Expected the scheduler at {schedulers[1].url} to answer" in result["msg"]


@pytest.mark.parametrize(
    ("engine", "haproxy", "says"),
    [
        ({"health": "unknown"}, "", "has not read it yet"),
        ({"running": None}, "", "has not read it yet"),
        ({}, "not asked yet", "HAProxy does not tell: not asked yet"),
    ],
)
def test_engine_that_nobody_has_looked_at_is_not_empty(
    call: Run, schedulers: list[FakeScheduler], engine: dict[str, Any], haproxy: str, says: str
) -> None:
    schedulers[1].engines["gpu-a1.main"].update(engine)
    schedulers[1].haproxy_error = haproxy
    result = call("empty", wait_timeout=0.2)
    assert result["failed"]
    assert says in result["msg"]
    shown = call("active")["engines"][1]
    assert (shown["name"], shown["requests"]) == ("gpu-a1.main", None)
    assert says in shown["unknown"]["requests"]


def test_gateway_without_an_haproxy_has_nothing_under_way(call: Run, schedulers: list[FakeScheduler]) -> None:
    schedulers[1].haproxy_error = "/run/haproxy/admin.sock: No such file or directory"
    assert call("empty", wait_timeout=0.5)["engines"][1]["requests"] == 0


def test_engine_that_does_not_answer_and_has_nothing_is_empty(call: Run, schedulers: list[FakeScheduler]) -> None:
    for scheduler in schedulers:
        scheduler.engines["gpu-a1.main"].update(health="unhealthy", running=None)  # type: ignore[call-overload]
    assert call("empty", wait_timeout=0.5)["engines"][1]["requests"] == 0


def test_a_scheduler_that_does_not_know_the_engine_has_none_of_it(call: Run, schedulers: list[FakeScheduler]) -> None:
    """As while the members document changes: one knows the engine already, or still."""
    del schedulers[0].engines["other.main"]
    schedulers[1].engines["other.main"]["held"] = 2
    assert "to know a host or engine named other.main" in call("drained", name="other.main")["msg"]
    found = call("drained", name="other.main", must_exist=False, wait=True)
    assert found["changed"]
    assert [each["name"] for each in found["engines"]] == ["other.main"]
    assert (schedulers[0].posts, schedulers[1].posts) == ([], ["/v1/engines/other.main/drain"])
    nowhere = call("drained", name="nobody", must_exist=False, wait=True)
    assert (nowhere["changed"], nowhere["engines"]) == (False, [])


def test_a_scheduler_forgets_the_drain_of_an_engine_that_left(call: Run, schedulers: list[FakeScheduler]) -> None:
    """Else it would be drained when it comes back under its name, and by nobody's wish."""
    name = "gpu-c1.main"
    schedulers[1].gone.add(name)
    assert not call("active", name=name, must_exist=False, _ansible_check_mode=True)["changed"]
    assert call("active", name=name, must_exist=False)["changed"]
    assert schedulers[1].gone == set()
    assert not call("active", name=name, must_exist=False)["changed"]
    assert "HTTP status 401" in call("active", name=name, must_exist=False, token="another")["msg"]
