# SPDX-License-Identifier: GPL-3.0-or-later
"""The way through preprocessors, with real ones, and the way without them."""

from __future__ import annotations

import hashlib
import json
import platform
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from rehearsal import preprocessor, standin_tokenizer
from tests.support.ports import port_of, reserve_port
from tests.unit.edge.loopback_site import (
    CLIENT_KEY,
    Edge,
    Engine,
    LogReceiver,
    Scheduler,
    background,
    running,
    wait_until,
)
from tests.unit.edge.rendering import engine, members

FIRST, SECOND = "127.0.0.1", "127.0.0.2"
UP = 'haproxy_backend_active_servers{proxy="preprocessors"}'
# Of the stand-in's tokenizer, "a secret prompt": "a", " sec", "ret", " pro", "mpt".
TOKENS = 5


class Preprocessor:
    """A real preprocessor; what it takes goes to the dispatch frontend of an edge."""

    def __init__(self, directory: Path, address: str, port: int, dispatch_port: int) -> None:
        directory.mkdir(parents=True)
        standin_tokenizer.write(directory / "tokenizer")
        digest = hashlib.sha256(CLIENT_KEY.encode()).hexdigest()
        (directory / "keys").write_text(f"{digest} team-a\n")
        model = {
            "name": "alpha",
            "adapters": ["sql"],
            "max_model_len": 32768,
            "directory": str(directory / "tokenizer"),
        }
        configuration = {
            "listen": f"{address}:{port}",
            "dispatch": [f"127.0.0.1:{dispatch_port}"],
            "keys_file": str(directory / "keys"),
            "models": [model],
            "classes": [{"name": "fast"}],
            "threads": 1,
        }
        (directory / "preprocessor.json").write_text(json.dumps(configuration))
        self._log = (directory / "log").open("wb")
        program = preprocessor.ensured(platform.machine())
        self._process = subprocess.Popen(
            [str(program), "--config", str(directory / "preprocessor.json")],
            stdout=self._log,
            stderr=subprocess.STDOUT,
        )

    def kill(self) -> None:
        """End it at once."""
        self._process.kill()
        self._process.wait()
        self._log.close()

    stop = kill


class Chain:
    """Two preprocessors, an edge in front of and behind them, and one engine."""

    def __init__(self, directory: Path, version: str, **variables: Any) -> None:
        self.engine, self.scheduler, self.log = Engine(), Scheduler(), LogReceiver()
        self.reservations = [reserve_port()]
        self.port = port_of(self.reservations[0])
        self.edge = Edge(
            directory,
            version,
            scheduler=self.scheduler,
            edge_members=members(engine("a.main", "alpha", self.engine.port, adapters=["sql"])),
            edge_preprocessors=[{"name": "pi1", "address": FIRST}, {"name": "pi2", "address": SECOND}],
            edge_preprocessor_port=self.port,
            edge_scheduler_log=self.log.address,
            edge_timeout_queue="10m",
            **variables,
        )
        self.preprocessors: dict[str, Preprocessor] = {}
        self.directory = directory

    def start(self, *addresses: str) -> None:
        """Start preprocessors, and wait until the edge has them up."""
        for address in addresses:
            place = self.directory / f"preprocessor-{address}-{time.monotonic_ns()}"
            self.preprocessors[address] = Preprocessor(place, address, self.port, self.edge.ports["dispatch"])
        self.edge.wait_for_engines("pool_alpha", 1)
        self.wait_for(len(addresses))

    def wait_for(self, count: int) -> None:
        wait_until(lambda: self.edge.metric(UP) == count, f"{count} preprocessors up")

    def passes(self, request_id: str) -> dict[str, dict[str, Any]]:
        """Frontend → line of the access log, of a request whose first pass has ended."""

        def lines() -> dict[str, dict[str, Any]]:
            found = [json.loads(line) for line in self.edge.journal() if line.startswith("{")]
            return {line["frontend"]: line for line in found if line["request_id"] == request_id}

        wait_until(lambda: "public" in lines(), f"a line of {request_id}")
        return lines()

    def stop(self) -> None:
        for part in (self.edge, *self.preprocessors.values(), self.engine, self.scheduler, self.log):
            part.stop()
        for reservation in self.reservations:
            reservation.close()


@pytest.fixture
def chain(tmp_path: Path, version: str) -> Iterator[Callable[..., Chain]]:
    made: list[Chain] = []

    def make(*addresses: str, **variables: Any) -> Chain:
        made.append(Chain(tmp_path, version, **variables))
        made[0].start(*addresses)
        return made[0]

    yield make
    for each in made:
        each.stop()


def test_request_goes_through_a_preprocessor_and_is_decided_by_what_it_found(chain: Callable[..., Chain]) -> None:
    site = chain(FIRST, SECOND)
    forged = {"X-Ringmaster-Key-Id": "other", "X-Ringmaster-Prompt-Tokens": "1", "X-Ringmaster-Model": "other"}
    body = {"model": "sql", "prompt": "a secret prompt", "max_tokens": 7}
    answer = site.edge.ask("POST", "/v1/completions", body, headers={**forged, "X-Request-Id": "one"})
    assert answer.status == 200, answer.body
    assert answer.headers["x-request-id"] == "one"
    [question] = site.scheduler.asked
    assert question["prompt_tokens"] == TOKENS
    assert question["max_tokens"] == 7
    assert (question["id"], question["model"], question["key_id"]) == ("one", "sql", "team-a")
    lines = site.passes("one")
    assert (lines["public"]["pool"], lines["public"]["engine"][:2]) == ("preprocessors", "pi")
    assert (lines["dispatch"]["pool"], lines["dispatch"]["engine"]) == ("pool_alpha", "a.main")
    assert (lines["dispatch"]["prompt_tokens"], lines["dispatch"]["prompt_tokens_from"]) == (str(TOKENS), "header")
    # The scheduler hears of one end, the one of what it has decided.
    assert site.log.line("one")["frontend"] == "dispatch"
    [(_path, headers, sent)] = site.engine.requests
    assert json.loads(sent) == body
    assert not [name for name in headers if name.startswith("x-ringmaster")]
    assert CLIENT_KEY not in headers["authorization"]


def test_long_prompt_has_a_prefix_and_a_wrong_key_never_gets_to_a_preprocessor(chain: Callable[..., Chain]) -> None:
    site = chain(FIRST)
    prompt = " ".join(["circus"] * 200)
    assert site.edge.ask("POST", "/v1/completions", {"model": "alpha", "prompt": prompt}).status == 200
    assert len(site.scheduler.asked[0]["prefix"]) == 16
    for key in (None, "sk-wrong"):
        headers = {"X-Request-Id": f"refused-{key}"}
        assert site.edge.complete(key=key, headers=headers).status == 401
        assert site.passes(f"refused-{key}")["public"]["engine"] == "<NOSRV>"
    assert len(site.engine.requests) == 1


def test_models_are_listed_and_the_edge_refuses_what_it_refused_before(chain: Callable[..., Chain]) -> None:
    site = chain(FIRST, edge_body_bytes_max=65536)
    listed = site.edge.ask("GET", "/v1/models")
    assert {model["id"] for model in listed.document["data"]} == {"alpha", "sql"}
    assert site.edge.ask("GET", "/metrics").status == 404
    assert site.edge.ask("GET", "/v1/completions").status == 405
    assert site.edge.complete("no-such-model").error["code"] is not None
    too_large = {"model": "alpha", "prompt": "x" * 70000}
    assert site.edge.ask("POST", "/v1/completions", too_large).status == 413
    assert not site.engine.requests


def test_chunk_of_a_stream_is_passed_on_before_the_next_one_comes(chain: Callable[..., Chain]) -> None:
    site = chain(FIRST)
    connection = site.edge.connect()
    body = json.dumps({"model": "alpha", "prompt": "x", "stream": True})
    headers = {"Authorization": f"Bearer {CLIENT_KEY}", "Content-Type": "application/json"}
    connection.request("POST", "/v1/completions", body, headers)
    response = connection.getresponse()
    assert response.readline() == b"data: first\n"
    site.engine.go_on.set()
    assert b"data: second" in response.read()
    connection.close()


def test_client_that_leaves_is_gone_at_the_engine(chain: Callable[..., Chain]) -> None:
    site = chain(FIRST)
    site.engine.hold = True
    site.engine.go_on.set()
    connection = site.edge.connect()
    body = json.dumps({"model": "alpha", "prompt": "x", "stream": True})
    headers = {"Authorization": f"Bearer {CLIENT_KEY}", "Content-Type": "application/json"}
    connection.request("POST", "/v1/completions", body, headers)
    response = connection.getresponse()
    assert response.readline() == b"data: first\n"
    response.close()
    connection.close()
    assert site.engine.aborted.wait(20)


def test_without_preprocessors_keys_are_checked_and_tokens_estimated(chain: Callable[..., Chain]) -> None:
    site = chain(FIRST, SECOND)
    for each in site.preprocessors.values():
        each.kill()
    # At once, before any check has seen it: not one request is lost.
    forged = {"X-Ringmaster-Key-Id": "other", "X-Ringmaster-Prompt-Tokens": "1"}
    for number in range(5):
        assert site.edge.complete(headers={**forged, "X-Request-Id": f"direct-{number}"}).status == 200
    site.wait_for(0)
    assert site.edge.complete(headers={**forged, "X-Request-Id": "later"}).status == 200
    lines = site.passes("later")
    assert (lines["public"]["pool"], lines["public"]["engine"]) == ("preprocessors", "without")
    assert lines["dispatch"]["prompt_tokens_from"] == "body_bytes"
    assert lines["dispatch"]["key_id"] == "team-a"
    assert {question["key_id"] for question in site.scheduler.asked} == {"team-a"}
    assert {question["prompt_tokens"] for question in site.scheduler.asked} == {None}
    assert site.edge.complete(key="sk-wrong").status == 401
    assert site.edge.complete("no-such-model").status == 404
    site.start(SECOND)
    assert site.edge.complete(headers={"X-Request-Id": "back"}).status == 200
    assert site.passes("back")["public"]["engine"] == "pi2"


def test_preprocessor_that_dies_with_unanswered_requests_costs_none(chain: Callable[..., Chain]) -> None:
    site = chain(FIRST, SECOND)
    site.engine.hold = True
    with background() as submit:
        answers = [submit(site.edge.complete) for _unused in range(8)]
        wait_until(lambda: len(site.engine.requests) == 8, "all are at the engine")
        site.preprocessors[FIRST].kill()
        time.sleep(0.5)
        site.engine.go_on.set()
        assert [answer.result().status for answer in answers] == [200] * 8


def test_limits_of_a_key_are_counted_once(chain: Callable[..., Chain]) -> None:
    site = chain(FIRST, edge_requests_per_minute=3)
    assert [site.edge.complete().status for _unused in range(4)] == [200, 200, 200, 429]
    refused = site.edge.complete()
    assert refused.error["code"] == "rate_limit_exceeded"
    assert int(refused.headers["retry-after"]) >= 1
    site.preprocessors[FIRST].kill()
    assert site.edge.complete().status == 429


def test_health_of_a_gateway_is_that_of_its_engines(tmp_path: Path, version: str) -> None:
    only = Engine()
    edge = Edge(
        tmp_path,
        version,
        edge_members=members(engine("a.main", "alpha", only.port)),
        edge_preprocessors=[{"name": "pi1", "address": FIRST}],
        edge_preprocessor_port=9,
    )
    with running(edge, only):
        edge.wait_for_engines("pool_alpha", 1)
        assert edge.ask("GET", "/healthz", key=None).status == 200
        only.kill()
        wait_until(lambda: edge.ask("GET", "/healthz", key=None).status == 503, "no engine is up")
        answer = edge.complete()
        assert answer.status == 503
        assert answer.error["code"] == "no_engine"
