# SPDX-License-Identifier: GPL-3.0-or-later
"""Engines that answer, answer otherwise, slowly, or not at all, and how that is judged."""

from __future__ import annotations

import http.server
import json
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import yaml

from ansible_collections.ringmaster.inference.plugins.module_utils.engine_canary import (
    PROMPTS,
    Limits,
    agreement,
    compare,
)
from ansible_collections.ringmaster.inference.plugins.modules import engine_canary

Run = Callable[..., dict[str, Any]]
KEY = "key-of-the-engine"


class Engine(http.server.ThreadingHTTPServer):
    """Answers completions; the attributes say how."""

    daemon_threads = True
    seconds = 0.0
    text = "token {number} of {prompt} "
    status = 200
    raw: bytes | None = None

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.asked: list[dict[str, Any]] = []

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that has gone is no matter."""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class _Handler(http.server.BaseHTTPRequestHandler):
    server: Engine

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.asked.append(body)
        status = self.server.status if self.headers["Authorization"] == f"Bearer {KEY}" else 401
        self.send_response(status)
        self.end_headers()
        if self.server.raw is not None:
            self.wfile.write(self.server.raw)
            return
        for number in range(body["max_tokens"]):
            time.sleep(self.server.seconds)
            text = self.server.text.format(number=number, prompt=body["prompt"])
            self.wfile.write(b"data: " + json.dumps({"choices": [{"text": text}]}).encode() + b"\n\n")
        usage = {"choices": [], "usage": {"completion_tokens": body["max_tokens"]}}
        self.wfile.write(b"data: " + json.dumps(usage).encode() + b"\n\ndata: [DONE]\n\n")

    def log_message(self, *_arguments: Any) -> None:
        """Says nothing."""


@pytest.fixture
def engine() -> Iterator[Engine]:
    server = Engine()
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


@pytest.fixture
def call(module_run: Run, engine: Engine) -> Run:
    def run(**arguments: Any) -> dict[str, Any]:
        given = {"url": engine.url, "api_key": KEY, "model": "m", "rounds": 2, "max_tokens": 4, **arguments}
        return module_run(engine_canary.main, **given)

    return run


def test_an_engine_that_stays_the_same(call: Run, engine: Engine) -> None:
    before = call()
    assert not before["changed"]
    assert before["measured"]["requests"] == 2 * len(PROMPTS)
    assert before["measured"]["errors"] == []
    assert before["measured"]["first_token_seconds"] > 0
    assert set(before["measured"]["answers"]) == set(PROMPTS)
    assert {body["temperature"] for body in engine.asked} == {0}
    assert KEY not in json.dumps(before)
    after = call(before=before["measured"], latency_slack_seconds=5)
    assert after["worse"] == []
    assert after["figures"]["agreement"] == [1.0, 1.0]
    assert call(before=before["measured"], latency_slack_seconds=5, _ansible_check_mode=True)["worse"] == []


def test_an_engine_that_answers_otherwise(call: Run, engine: Engine) -> None:
    before = call(prompts=["a", "b"])["measured"]
    engine.text = "nonsense"
    worse = call(before=before, latency_slack_seconds=5)["worse"]
    assert worse == ["0% of the former answers came again, 50% are needed (among themselves they agreed to 100%)"]
    assert call(before=before, latency_slack_seconds=5, agreement=0)["worse"] == []
    assert {body["prompt"] for body in engine.asked} == {"a", "b"}


def test_an_engine_that_became_slow(call: Run, engine: Engine) -> None:
    before = call(prompts=["a"])["measured"]
    engine.seconds = 0.1
    worse = call(before=before)["worse"]
    assert ["ms to the first token" in worse[0], "ms for each further token" in worse[1]] == [True, True]
    assert call(before=before, latency_slack_seconds=5)["worse"] == []


@pytest.mark.parametrize(
    ("status", "raw", "error"),
    [
        (503, b"", "status 503"),
        (200, b"", "ended without"),
        (200, b"data: {", "ended without|JSONDecodeError"),
        (200, b"data: {\n\n", "JSONDecodeError"),
        (200, b"data: []\n\n", "TypeError|ValueError|AttributeError"),
        (200, b"data: [DONE]\n\n", "without a token"),
        (200, b'data: {"choices": [{"text": ""}]}\n\ndata: [DONE]\n\n', "without a token"),
        (200, b'data: {"choices": [{}]}\n\n', "KeyError"),
        (200, b'data: {"error": {"message": "engine is dead"}}\n\n', "engine is dead"),
        (200, b"data: \xc3(\n\n", "UnicodeDecodeError"),
        (200, b"data: 1\n\n", "TypeError"),
    ],
)
def test_an_engine_that_is_broken(call: Run, engine: Engine, status: int, raw: bytes, error: str) -> None:
    before = call(prompts=["a"])["measured"]
    engine.status, engine.raw = status, raw
    after = call(before=before)
    assert len(after["measured"]["errors"]) == 2
    assert any(each in after["measured"]["errors"][0] for each in error.split("|"))
    assert after["worse"][0].startswith("100.0% of requests failed, 0.0% before")
    assert after["measured"]["first_token_seconds"] is None
    # That it was broken before makes an engine that answers nothing no better.
    assert call(before=after["measured"])["worse"][0].startswith("100.0% of requests failed, 100.0% before, 0.0% are")


def test_an_engine_that_hangs_has_an_end(call: Run, engine: Engine) -> None:
    engine.seconds = 0.2
    assert call(prompts=["a"], rounds=1, timeout=0.1)["measured"]["errors"]


def test_an_engine_that_is_gone(call: Run) -> None:
    errors = call(url="http://127.0.0.1:1", prompts=["a"])["measured"]["errors"]
    assert "ConnectionRefusedError" in errors[0]


def test_some_more_errors_can_be_allowed() -> None:
    def measured(errors: int) -> dict[str, Any]:
        return {
            "requests": 10,
            "errors": ["status 503"] * errors,
            "first_token_seconds": 0.1,
            "further_token_seconds": None,
            "answers": {"a": ["x"]},
        }

    assert compare(measured(1), measured(2), Limits(error_rate=0.1))[0] == []
    assert compare(measured(1), measured(3), Limits(error_rate=0.1))[0] == [
        "30.0% of requests failed, 10.0% before, 20.0% are allowed (status 503)"
    ]
    # All failed before: that says nothing of how many may fail.
    assert compare(measured(10), measured(1), Limits(error_rate=0.1))[0] == []
    assert compare(measured(10), measured(9), Limits(error_rate=0.1))[0] == [
        "90.0% of requests failed, 100.0% before, 10.0% are allowed (status 503)"
    ]
    assert compare(measured(10), measured(10), Limits(error_rate=1.0))[0] == [
        "100.0% of requests failed, 100.0% before, 100.0% are allowed (status 503)"
    ]


def test_answers_that_never_agreed_are_no_measure() -> None:
    before = {"requests": 2, "errors": [], "first_token_seconds": 0.1, "further_token_seconds": 0.1}
    worse, figures = compare(
        {**before, "answers": {"a": ["abcd", "xbcd"]}}, {**before, "answers": {"a": ["abxx", "abxx"]}}, Limits()
    )
    assert (worse, figures["agreement"]) == ([], [0.5, 0.5])
    assert [agreement("", ""), agreement("a", ""), agreement("ab", "ac"), agreement("ab", "ab")] == [1.0, 0.0, 0.5, 1.0]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"url": "https://engine:8100"}, "Expected an engine's address"),
        ({"url": "engine"}, "Expected an engine's address"),
        ({"prompts": []}, "one prompt or more"),
        ({"rounds": 0}, "Expected rounds of 1"),
        ({"max_tokens": 0}, "Expected max_tokens of 1"),
        ({"timeout": 0}, "Expected timeout of"),
        ({"latency_factor": 0.5}, "Expected latency_factor of 1"),
        ({"agreement": 2}, "Expected agreement of 0 to 1"),
        ({"before": {"x": 1}}, "Expected in before"),
    ],
)
def test_options_that_are_none(call: Run, arguments: dict[str, Any], says: str) -> None:
    result = call(**arguments)
    assert result["failed"]
    assert says in result["msg"]


def test_documentation_agrees_with_the_limits() -> None:
    options = yaml.safe_load(engine_canary.DOCUMENTATION)["options"]
    for name in engine_canary.LIMITS:
        assert options[name]["default"] == getattr(Limits(), name)
