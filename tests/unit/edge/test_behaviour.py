# SPDX-License-Identifier: GPL-3.0-or-later
"""What a client, an engine and a scheduler see of the edge: a real HAProxy with the role's configuration."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.unit.edge.loopback_site import (
    ANSWER_PATIENCE,
    CLIENT_KEY,
    ENGINE_KEY,
    PATIENCE,
    Edge,
    Engine,
    Scheduler,
    exchange,
    running,
    send_up_to_a_refusal,
    wait_until,
)
from tests.unit.edge.rendering import engine, members

LARGEST_BODY = 200_000
HEAD = f"POST /v1/completions HTTP/1.1\r\nHost: edge\r\nAuthorization: Bearer {CLIENT_KEY}\r\n".encode()
QUEUES = (
    'haproxy_backend_current_queue{proxy="pool_org_beta"}',
    'haproxy_server_current_queue{proxy="pool_org_beta",server="c.main"}',
)


class Site:
    """Two engines of the model alpha (adapter sql), one of beta, a scheduler, and the edge."""

    def __init__(self, directory: Path, version: str) -> None:
        self.alpha, self.other_alpha, self.beta = Engine(), Engine(), Engine()
        self.engines = {"a.main": self.alpha, "b.main": self.other_alpha, "c.main": self.beta}
        self.scheduler = Scheduler()
        self.edge = Edge(
            directory,
            version,
            scheduler=self.scheduler,
            edge_members=members(
                engine("a.main", "alpha", self.alpha.port, adapters=["sql"]),
                engine("b.main", "alpha", self.other_alpha.port, adapters=["sql"]),
                engine("c.main", "org/beta", self.beta.port, max_num_seqs=1, max_model_len=4096),
            ),
            edge_body_bytes_max=LARGEST_BODY,
            # No request of this site is to run into a time-out on a machine that is busy with something else.
            edge_timeout_queue="10m",
            edge_timeout_body="10m",
        )

    def reset(self) -> None:
        """Make the site as it was at first, with all servers up."""
        for pool, count in (("pool_alpha", 2), ("pool_org_beta", 1), ("spoe-agents", 1)):
            self.edge.wait_for_engines(pool, count)
        self.scheduler.asked.clear()
        self.scheduler.decide = lambda _unused: {}
        for each in self.engines.values():
            each.requests.clear()
            each.status, each.hold, each.die_without_answer = 200, False, False
            each.go_on.clear()
            each.aborted.clear()


@pytest.fixture(scope="module")
def whole_site(tmp_path_factory: pytest.TempPathFactory, version: str) -> Iterator[Site]:
    site = Site(tmp_path_factory.mktemp("edge"), version)
    with running(site.edge, site.scheduler, *site.engines.values()):
        yield site


@pytest.fixture
def site(whole_site: Site) -> Site:
    whole_site.reset()
    return whole_site


# Who may ask, and for what -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("authorization", "code"),
    [
        (None, None),
        ("Bearer sk-wrong", "invalid_api_key"),
        (f"Bearer {CLIENT_KEY}x", "invalid_api_key"),
        (f"Bearer {CLIENT_KEY[:-1]}", "invalid_api_key"),
        (f"Bearer {ENGINE_KEY}", "invalid_api_key"),
        (f"Basic {CLIENT_KEY}", None),
        ("Bearer ", None),
    ],
)
def test_without_a_known_key_nobody_gets_in(site: Site, authorization: str | None, code: str | None) -> None:
    headers = {} if authorization is None else {"Authorization": authorization}
    answer = site.edge.ask("POST", "/v1/completions", {"model": "alpha"}, key=None, headers=headers)
    assert answer.status == 401
    assert answer.error["code"] in {code, "invalid_api_key"}
    assert answer.headers["www-authenticate"] == "Bearer"
    assert not site.alpha.requests
    assert not site.scheduler.asked


@pytest.mark.parametrize(
    "path",
    [
        "/",
        "/metrics",
        "/health",
        "/version",
        "/v1/load_lora_adapter",
        "/v1/completions/",
        "/v1/completions/../../metrics",
        "/v1/completions%2f..%2f..%2fmetrics",
        "//metrics",
        "/V1/completions",
    ],
)
@pytest.mark.parametrize("method", ["GET", "POST"])
def test_what_is_not_meant_for_clients_is_out_of_reach(site: Site, method: str, path: str) -> None:
    answer = site.edge.ask(method, path)
    assert answer.status == 404
    assert answer.error["code"] == "unknown_url"
    assert not any(each.requests for each in site.engines.values())


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [("GET", "/v1/completions", "POST"), ("DELETE", "/v1/chat/completions", "POST"), ("POST", "/v1/models", "GET")],
)
def test_method_that_does_not_fit_is_refused_with_the_one_that_does(
    site: Site, method: str, path: str, allowed: str
) -> None:
    answer = site.edge.ask(method, path)
    assert (answer.status, answer.headers["allow"]) == (405, allowed)
    assert answer.error["code"] == "method_not_supported"


def test_engine_gets_its_own_key_and_nothing_a_client_claims(site: Site) -> None:
    claims = {"X-Ringmaster-Key-Id": "root", "X-Ringmaster-Model": "org/beta", "x-ringmaster-anything": "1"}
    answer = site.edge.complete(headers={**claims, "X-Request-Id": "request-1"})
    assert answer.status == 200
    [(path, headers, body)] = site.alpha.requests + site.other_alpha.requests
    assert path == "/v1/completions"
    assert json.loads(body) == {"prompt": "a secret prompt", "model": "alpha"}
    assert headers["authorization"] == f"Bearer {ENGINE_KEY}"
    assert headers["x-request-id"] == "request-1"
    assert not [name for name in headers if name.startswith("x-ringmaster")]
    assert CLIENT_KEY not in str(headers)
    [question] = site.scheduler.asked
    assert question == {
        "id": "request-1",
        "model": "alpha",
        "prompt_tokens": None,
        "body_bytes": len(body),
        "max_tokens": None,
        "key_id": "team-a",
        "prefix": None,
    }


@pytest.mark.parametrize("given", [None, "", "x" * 65, "with space", 'quote"', "new\tline"])
def test_request_id_is_made_where_the_clients_is_not_usable(site: Site, given: str | None) -> None:
    answer = site.edge.complete(headers={} if given is None else {"X-Request-Id": given})
    made = answer.headers["x-request-id"]
    assert len(made) == 36
    [(_unused, headers, _unused)] = site.alpha.requests + site.other_alpha.requests
    assert headers["x-request-id"] == made


def test_refusals_carry_the_request_id_too(site: Site) -> None:
    answer = site.edge.ask("GET", "/nowhere", key=None, headers={"X-Request-Id": "request-2"})
    assert answer.headers["x-request-id"] == "request-2"


# Models ------------------------------------------------------------------------------------------------------------


def test_models_of_all_pools_are_listed_as_vllm_does(site: Site) -> None:
    answer = site.edge.ask("GET", "/v1/models")
    assert answer.status == 200
    listed = {card["id"]: card for card in answer.document["data"]}
    assert set(listed) == {"alpha", "sql", "org/beta"}
    assert listed["alpha"]["max_model_len"] == 32768
    assert listed["org/beta"]["max_model_len"] == 4096
    assert listed["sql"]["parent"] == "alpha"
    assert listed["sql"]["max_model_len"] is None
    assert listed["alpha"]["created"] > 1_700_000_000
    assert site.edge.ask("GET", "/v1/models", key=None).status == 401


@pytest.mark.parametrize(("model", "names"), [("alpha", {"a.main", "b.main"}), ("sql", {"a.main", "b.main"})])
def test_adapter_goes_to_the_pool_of_its_model(site: Site, model: str, names: set[str]) -> None:
    for _unused in range(4):
        assert site.edge.complete(model).status == 200
    assert {name for name, each in site.engines.items() if each.requests} <= names


def test_model_behind_a_long_prompt_is_found(site: Site) -> None:
    body = {"prompt": "x" * (LARGEST_BODY - 100), "model": "org/beta"}
    answer = site.edge.ask("POST", "/v1/completions", body)
    assert answer.status == 200
    [(_unused, _unused, received)] = site.beta.requests
    assert json.loads(received) == body


def test_name_of_a_model_inside_the_prompt_is_not_taken(site: Site) -> None:
    body = {"messages": [{"role": "user", "model": "org/beta", "content": '"model": "org/beta"'}], "model": "alpha"}
    assert site.edge.ask("POST", "/v1/chat/completions", body).status == 200
    assert not site.beta.requests


@pytest.mark.parametrize("model", ["gamma", "Alpha", "alph", "alpha ", "#", 'a"b\\c', "tab\t", "x" * 5000, "", 7])
def test_unknown_model_is_refused_as_vllm_does(site: Site, model: str) -> None:
    answer = site.edge.complete(model)
    assert answer.status == 404
    error = answer.error
    assert (error["type"], error["param"], error["code"]) == ("NotFoundError", "model", 404)
    assert error["message"].startswith("The model `")
    assert not site.scheduler.asked


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[]", b"null", b'"model"', b'{"prompt": "x"}', b"\x00\xff", b'{"model": {}}']
)
def test_body_without_a_model_is_refused_when_there_is_a_choice(site: Site, body: bytes) -> None:
    answer = site.edge.ask("POST", "/v1/completions", body)
    assert answer.status == 400
    assert answer.error["param"] == "model"


def test_slash_may_be_escaped_as_php_does(site: Site) -> None:
    assert site.edge.ask("POST", "/v1/completions", rb'{"model": "org\/beta"}').status == 200
    assert len(site.beta.requests) == 1


def test_body_over_the_limit_is_refused(site: Site) -> None:
    answer = site.edge.complete("alpha" + "x" * LARGEST_BODY)
    assert answer.status == 413
    assert answer.error["code"] == "body_too_large"


def test_chunked_body_over_the_limit_is_refused(site: Site) -> None:
    connection = site.edge.connect()
    chunks = iter([b"x" * 10_000] * (LARGEST_BODY // 10_000 + 1))
    send_up_to_a_refusal(connection, "POST", "/v1/completions", chunks, {"Authorization": f"Bearer {CLIENT_KEY}"})
    response = connection.getresponse()
    assert response.status == 413
    connection.close()


def test_chunked_body_is_served(site: Site) -> None:
    connection = site.edge.connect()
    chunks = iter([b'{"model": ', b'"org/beta"}'])
    connection.request("POST", "/v1/completions", chunks, {"Authorization": f"Bearer {CLIENT_KEY}"})
    assert connection.getresponse().status == 200
    connection.close()
    assert site.beta.requests[0][2] == b'{"model": "org/beta"}'


def test_client_that_never_ends_its_body_is_let_go(tmp_path: Path, version: str) -> None:
    edge = Edge(tmp_path, version, edge_members=members(), edge_timeout_body="300ms")
    with running(edge):
        edge.wait_until_it_listens()
        with edge.connected() as client:
            answer = exchange(client, HEAD + b"Content-Length: 99\r\n\r\n{")
    assert answer.status == 408
    assert answer.error["code"] == "request_timeout"


def test_broken_chunk_is_refused(site: Site) -> None:
    with site.edge.connected() as client:
        answer = exchange(client, HEAD + b"Transfer-Encoding: chunked\r\n\r\nno size\r\n")
    assert answer.status == 400
    # Older ones answer with HAProxy's own body: below the level at which they ask for ours.
    assert (b'"code": "bad_request"' in answer.body) == (site.edge.version not in {"2.6", "3.0"})


# What the scheduler decides ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["a.main", "b.main"])
def test_request_goes_to_the_engine_that_the_scheduler_names(site: Site, name: str) -> None:
    site.scheduler.decide = lambda _unused: {"server": name}
    for _unused in range(4):
        assert site.edge.complete().status == 200
    assert len(site.engines[name].requests) == 4


@pytest.mark.parametrize("decision", [{}, {"status": 0}, {"server": "no.such"}, {"server": "c.main"}, {"unknown": 1}])
def test_decision_that_is_of_no_use_leaves_it_to_haproxy(site: Site, decision: dict[str, int | str]) -> None:
    site.scheduler.decide = lambda _unused: decision
    assert site.edge.complete().status == 200
    assert not site.beta.requests


@pytest.mark.parametrize(
    ("decision", "status", "retry_after"),
    [
        ({"status": 404}, 404, None),
        ({"status": 429, "retry_after": 17}, 429, "17"),
        ({"status": 429}, 429, "5"),
        ({"status": 503, "retry_after": 17}, 503, "17"),
        ({"status": 503}, 503, "5"),
    ],
)
def test_refusal_of_the_scheduler_reaches_the_client(
    site: Site, decision: dict[str, int | str], status: int, retry_after: str | None
) -> None:
    site.scheduler.decide = lambda _unused: decision
    answer = site.edge.complete()
    assert answer.status == status
    assert answer.error
    assert answer.headers.get("retry-after") == retry_after
    assert not [name for name in answer.headers if name.startswith("x-ringmaster")]
    assert not site.alpha.requests
    assert not site.other_alpha.requests


def test_late_scheduler_holds_nothing_up(tmp_path: Path, version: str) -> None:
    only, scheduler = Engine(), Scheduler(decide=lambda _unused: None)
    edge = Edge(
        tmp_path,
        version,
        edge_members=members(engine("a.main", "alpha", only.port)),
        edge_scheduler=f"127.0.0.1:{scheduler.port}",  # and not as the scheduler that it is to wait for
    )

    def served_though_asked() -> bool:
        begun = time.monotonic()
        assert edge.complete().status == 200
        assert time.monotonic() - begun < 10
        return bool(scheduler.asked)

    with running(edge, only, scheduler):
        edge.wait_for_engines("pool_alpha", 1)
        wait_until(served_though_asked, "the scheduler is asked")


def test_preprocessor_says_what_it_found_out(site: Site) -> None:
    found = {
        "X-Ringmaster-Key-Id": "team-b",
        "X-Ringmaster-Model": "org/beta",
        "X-Ringmaster-Prompt-Tokens": "123",
        "X-Ringmaster-Max-Tokens": "45",
        "X-Ringmaster-Prefix": "abc",
        "X-Ringmaster-Prefix-Blocks": "abc,def",
        "X-Ringmaster-Class": "fast",
    }
    # What the body says is what the preprocessor has read already; it is not read a second time.
    body = {"prompt": "x", "model": "alpha", "max_tokens": 6}
    answer = site.edge.ask("POST", "/v1/completions", body, headers=found, key=None, frontend="dispatch")
    assert answer.status == 200
    [question] = site.scheduler.asked
    del question["id"], question["body_bytes"]
    assert question == {
        "model": "org/beta",
        "prompt_tokens": 123,
        "max_tokens": 45,
        "key_id": "team-b",
        "prefix": "abc",
    }
    [(_unused, headers, _unused)] = site.beta.requests
    assert headers["authorization"] == f"Bearer {ENGINE_KEY}"
    assert not [name for name in headers if name.startswith("x-ringmaster")]


# Streams, queues, faults -------------------------------------------------------------------------------------------


def test_chunk_reaches_the_client_before_the_next_one_is_written(site: Site) -> None:
    connection = site.edge.connect()
    body = json.dumps({"model": "org/beta", "stream": True})
    connection.request("POST", "/v1/completions", body, {"Authorization": f"Bearer {CLIENT_KEY}"})
    response = connection.getresponse()
    assert response.readline() == b"data: first\n"  # the engine writes no more until it is told to
    site.beta.go_on.set()
    assert response.read() == b"\ndata: second\n\n"
    connection.close()


def test_client_that_leaves_frees_the_engine(site: Site) -> None:
    site.beta.hold = True
    connection = site.edge.connect()
    body = json.dumps({"model": "org/beta", "stream": True})
    site.beta.go_on.set()
    connection.request("POST", "/v1/completions", body, {"Authorization": f"Bearer {CLIENT_KEY}"})
    response = connection.getresponse()
    assert response.readline() == b"data: first\n"
    response.close()
    connection.close()
    assert site.beta.aborted.wait(PATIENCE)


def test_waiting_in_vain_is_429_with_the_time_to_come_again(tmp_path: Path, version: str) -> None:
    only = Engine()
    only.hold = True
    edge = Edge(
        tmp_path,
        version,
        edge_members=members(engine("a.main", "alpha", only.port, max_num_seqs=1)),
        edge_timeout_queue="300ms",
    )
    with running(edge, only):
        edge.wait_for_engines("pool_alpha", 1)
        held = threading.Thread(target=edge.complete)
        held.start()
        wait_until(lambda: len(only.requests) == 1, "the first request is being answered")
        answer = edge.complete()
        only.go_on.set()
        held.join()
    assert answer.status == 429
    assert answer.headers["retry-after"] == "5"
    assert answer.error["type"] == "overloaded"
    assert not [name for name in answer.headers if name.startswith("x-ringmaster")]
    assert len(only.requests) == 1


def test_client_that_leaves_the_queue_is_never_heard_of_by_the_engine(site: Site) -> None:
    site.beta.hold = True
    held = threading.Thread(target=site.edge.complete, args=("org/beta",))
    held.start()
    wait_until(lambda: len(site.beta.requests) == 1, "the first request is being answered")
    connection = site.edge.connect()
    connection.request(
        "POST", "/v1/completions", json.dumps({"model": "org/beta"}), {"Authorization": f"Bearer {CLIENT_KEY}"}
    )

    def waiting() -> float:
        samples = site.edge.metrics()
        return sum(samples[name] for name in QUEUES)

    wait_until(lambda: waiting() == 1, "a request waits")
    connection.close()
    wait_until(lambda: waiting() == 0, "nothing waits")
    site.beta.go_on.set()
    held.join()
    assert site.edge.complete("org/beta").status == 200
    assert len(site.beta.requests) == 2


def test_refusal_of_an_engine_stays_what_it_is(site: Site) -> None:
    site.beta.status = 503
    answer = site.edge.complete("org/beta")
    assert answer.status == 503
    assert answer.document["port"] == site.beta.port


def test_request_that_got_no_byte_goes_to_another_engine(site: Site) -> None:
    site.scheduler.decide = lambda _unused: {"server": "a.main"}
    site.alpha.die_without_answer = True
    body = {"prompt": "x" * 100_000, "model": "alpha"}
    answer = site.edge.ask("POST", "/v1/completions", body)
    assert answer.status == 200
    assert answer.document["port"] == site.other_alpha.port
    assert json.loads(site.other_alpha.requests[0][2]) == body


def test_log_has_one_json_line_a_request_and_none_of_its_content(site: Site) -> None:
    """HAProxy logs when the answer has left, so that lines of earlier requests may still come: lines are told by id."""

    def lines() -> list[dict[str, Any]]:
        # The rest is HAProxy's word on servers.
        return [json.loads(text) for text in site.edge.journal() if text.startswith("{")]

    def mine() -> dict[str, dict[str, Any]]:
        return {line["request_id"]: line for line in lines() if line["request_id"].startswith("log-")}

    body = {"prompt": "a secret prompt", "model": "sql"}
    answer = site.edge.ask("POST", "/v1/completions?token=1", body, headers={"X-Request-Id": "log-served"})
    assert answer.status == 200
    site.edge.ask("GET", "/healthz", headers={"X-Request-Id": "log-healthz"})
    site.edge.complete('quote"', headers={"X-Request-Id": "log-unknown"})
    site.edge.ask("GET", '/odd"path\\', key=None, headers={"X-Request-Id": "log-odd"})
    wait_until(lambda: len(mine()) == 3, "a line of each request but the health check's")
    text = "\n".join(site.edge.journal())
    assert "secret" not in text
    assert "token=" not in text
    assert CLIENT_KEY not in text
    assert ENGINE_KEY not in text
    assert len([line for line in lines() if line["request_id"].startswith("log-")]) == 3
    served, unknown, odd = (mine()[f"log-{name}"] for name in ("served", "unknown", "odd"))
    assert (served["status"], served["model"], served["key_id"], served["pool"]) == (200, "sql", "team-a", "pool_alpha")
    assert served["engine"] in {"a.main", "b.main"}
    assert served["path"] == "/v1/completions"
    assert (unknown["status"], unknown["model"]) == (404, 'quote"')
    assert odd["path"] == '/odd"path\\'


# One engine, no scheduler, nothing at all --------------------------------------------------------------------------


def test_killed_engine_costs_no_later_request_and_an_empty_pool_says_so(tmp_path: Path, version: str) -> None:
    first, second = Engine(), Engine()
    edge = Edge(
        tmp_path,
        version,
        edge_members=members(engine("a.main", "alpha", first.port), engine("b.main", "alpha", second.port)),
    )
    with running(edge, first, second):
        edge.wait_for_engines("pool_alpha", 2)
        assert edge.ask("GET", "/healthz", key=None).body == b"ok\n"
        first.kill()
        for _unused in range(20):
            assert edge.complete().status == 200
        edge.wait_for_engines("pool_alpha", 1)
        second.kill()
        edge.wait_for_engines("pool_alpha", 0)
        answer = edge.complete()
        assert answer.status == 503
        assert answer.error["code"] == "no_engine"
        assert edge.ask("GET", "/healthz", key=None).status == 503


def test_single_model_needs_no_name(tmp_path: Path, version: str) -> None:
    only = Engine()
    edge = Edge(tmp_path, version, edge_members=members(engine("a.main", "alpha", only.port)))
    with running(edge, only):
        edge.wait_for_engines("pool_alpha", 1)
        assert edge.ask("POST", "/v1/completions", {"prompt": "x"}).status == 200
        assert edge.ask("POST", "/v1/completions", b"no json").status == 200
        assert edge.complete("other").status == 404


def test_edge_without_engines_keys_and_scheduler_answers_for_itself(tmp_path: Path, version: str) -> None:
    edge = Edge(tmp_path, version, edge_members=members(), edge_api_keys=[], edge_engine_api_key="")
    with running(edge):
        edge.wait_until_it_listens()
        assert edge.ask("GET", "/generation", frontend="metrics").body == b"generation"
        assert edge.ask("GET", "/healthz", key=None).status == 503
        assert edge.complete().status == 401
        assert edge.complete(key="").status == 401
        assert edge.complete(key=None, frontend="dispatch").status == 404


def test_dispatch_is_for_members_only(tmp_path: Path, version: str) -> None:
    # The client's address is 127.0.0.1; the only members are somewhere else.
    site_members = {**members(), "gateways": [], "preprocessors": [{"name": "pi1", "address": "192.0.2.17"}]}
    edge = Edge(tmp_path, version, edge_members=site_members, edge_address="127.0.0.2")
    with running(edge):
        wait_until(lambda: _listens("127.0.0.2", edge.ports["dispatch"]), "HAProxy listens")
        dispatch = ("127.0.0.2", edge.ports["dispatch"])
        with socket.create_connection(dispatch, ANSWER_PATIENCE, ("127.0.0.1", 0)) as client:
            answer = exchange(client, b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nX-Ringmaster-Key-Id: root\r\n\r\n")
    assert answer.status == 403
    assert answer.error["code"] == "not_a_member"


def _listens(address: str, port: int) -> bool:
    with socket.socket() as client:
        return client.connect_ex((address, port)) == 0
