# SPDX-License-Identifier: GPL-3.0-or-later
"""Waiting, ending, going elsewhere: the queue of a pool, its limits, and what the scheduler changes at run time."""

from __future__ import annotations

import http.client
import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from ringmaster_scheduler.haproxy import KeptServer, ServerStateFile
from tests.support.ports import port_of, reserve_port
from tests.unit.edge.loopback_site import (
    CLIENT_KEY,
    ENGINE_KEY,
    PATIENCE,
    Answer,
    Edge,
    Engine,
    LogReceiver,
    Scheduler,
    background,
    running,
    wait_until,
)
from tests.unit.edge.rendering import engine, members

POOL = "pool_alpha"
QUEUED = f'haproxy_backend_current_queue{{proxy="{POOL}"}}'
NO_SERVER = "<NOSRV>"


class Site:
    """Two engines of one model that take one request at a time, a scheduler, a receiver of log lines, and the edge."""

    def __init__(self, directory: Path, version: str, *, patient: bool = True, **variables: Any) -> None:
        """The edge waits for every answer of the scheduler, or no longer than the role lets it: not `patient`."""
        self.engines = {"a.main": Engine(), "b.main": Engine()}
        self.scheduler = Scheduler()
        self.receiver = LogReceiver()
        self.edge = Edge(
            directory,
            version,
            **{
                "edge_members": members(
                    *(engine(name, "alpha", each.port, max_num_seqs=1) for name, each in self.engines.items())
                ),
                **(
                    {"scheduler": self.scheduler} if patient else {"edge_scheduler": f"127.0.0.1:{self.scheduler.port}"}
                ),
                "edge_scheduler_log": self.receiver.address,
                "edge_timeout_queue": "5s",
                "edge_queue_max": 4,
                **variables,
            },
        )
        self.edge.wait_for_engines(POOL, 2)
        self.edge.wait_for_engines("spoe-agents", 1)

    def stop(self) -> None:
        for part in (*self.engines.values(), self.edge, self.scheduler, self.receiver):
            part.stop()

    def hold(self, *names: str) -> None:
        """Let engines answer nothing until they are released."""
        for name in names or self.engines:
            self.engines[name].hold = True
            self.engines[name].go_on.clear()

    def release(self, *names: str) -> None:
        for name in names or self.engines:
            self.engines[name].go_on.set()

    def ask(self, request_id: str, prompt: str = "x", **more: Any) -> Answer:
        headers = {"X-Request-Id": request_id}
        return self.edge.ask("POST", "/v1/completions", {"model": "alpha", "prompt": prompt, **more}, headers=headers)

    def wait_for_queue(self, length: int) -> None:
        wait_until(lambda: self.edge.metric(QUEUED) == length, f"{length} requests wait")

    def queue_up(
        self, start: Callable[..., Future[Any]], names: Iterable[str], prompts: Mapping[str, str] | None = None
    ) -> list[Future[Any]]:
        """Ask one after the other, each when the one before waits in the queue, which is empty at first."""
        answers = []
        for number, name in enumerate(names):
            answers.append(start(self.ask, name, (prompts or {}).get(name, "x")))
            self.wait_for_queue(number + 1)
        return answers

    def arrived(self) -> list[str]:
        """Ids of the requests that engines have got, in order for each engine."""
        return [headers["x-request-id"] for each in self.engines.values() for _path, headers, _body in each.requests]

    def seen_by(self, name: str) -> int:
        return len(self.engines[name].requests)


@pytest.fixture
def site(tmp_path: Path, version: str) -> Iterator[Site]:
    site = Site(tmp_path, version)
    try:
        yield site
    finally:
        site.release()
        site.stop()


@pytest.fixture
def impatient(tmp_path: Path, version: str) -> Iterator[Site]:
    """A site whose edge finds out that its scheduler hangs, and waits so long for an answer that a test sees it."""
    site = Site(tmp_path, version, patient=False, edge_timeout_decision="2s")
    try:
        yield site
    finally:
        site.stop()


# Order and limits of the queue ---------------------------------------------------------------------------------------


def test_queue_is_in_the_order_of_what_the_scheduler_says(site: Site) -> None:
    offsets = {"late": 30_000, "soon": -524_287, "later": 60_000, "now": 0}
    site.scheduler.decide = lambda question: {"priority": offsets.get(question["id"], 0)}
    site.edge.admin(f"set server {POOL}/b.main state maint")
    site.hold()
    with background() as start:
        first = start(site.ask, "first")
        wait_until(lambda: site.seen_by("a.main") == 1, "the engine is busy")
        waiting = site.queue_up(start, offsets)
        site.release()
        assert [answer.result().status for answer in (first, *waiting)] == [200] * 5
    assert site.arrived() == ["first", "soon", "now", "late", "later"]


def test_without_the_scheduler_short_prompts_go_first_and_nothing_is_lost(site: Site) -> None:
    site.scheduler.stop()
    site.edge.wait_for_engines("spoe-agents", 0)
    site.edge.admin(f"set server {POOL}/b.main state maint")
    site.hold()
    prompts = {"slow": 40_000, "normal": 20_000, "fast": 40}
    with background() as start:
        first = start(site.ask, "first")
        wait_until(lambda: site.seen_by("a.main") == 1, "the engine is busy")
        waiting = site.queue_up(start, prompts, {name: "x" * length for name, length in prompts.items()})
        site.release()
        assert [answer.result().status for answer in (first, *waiting)] == [200] * 4
    assert site.arrived() == ["first", "fast", "normal", "slow"]


def test_request_that_is_bound_to_no_engine_takes_the_first_free_slot(site: Site) -> None:
    site.hold()
    with background() as start:
        busy = [start(site.ask, "one"), start(site.ask, "two")]
        wait_until(lambda: len(site.arrived()) == 2, "both engines are busy")
        waiting = start(site.ask, "three")
        site.wait_for_queue(1)
        site.release("b.main")
        assert waiting.result().document["port"] == site.engines["b.main"].port
        site.release()
        assert [answer.result().status for answer in busy] == [200, 200]


def test_time_in_the_queue_that_runs_out_is_429_with_the_schedulers_word_on_when_to_return(
    tmp_path: Path, version: str
) -> None:
    site = Site(tmp_path, version, edge_timeout_queue="300ms")
    site.scheduler.decide = lambda _unused: {"priority": 1, "retry_after": 23, "reason": "queued"}
    site.hold()
    with running(site), background() as start:
        busy = [start(site.ask, "one"), start(site.ask, "two")]
        wait_until(lambda: len(site.arrived()) == 2, "both engines are busy")
        answer = site.ask("three")
        site.release()
        assert [each.result().status for each in busy] == [200, 200]
        assert (answer.status, answer.headers["retry-after"], answer.error["code"]) == (429, "23", "queue_timeout")
        line = site.receiver.line("three")
        assert (line["status"], line["engine"], line["termination"]) == (429, NO_SERVER, "sQ")
        assert line["decision_reason"] == "queued"
        assert 250 <= line["ms_queue"] <= line["ms_total"]


def test_full_queue_refuses_at_once(site: Site) -> None:
    site.hold()
    with background() as start:
        busy = [start(site.ask, "one"), start(site.ask, "two")]
        wait_until(lambda: len(site.arrived()) == 2, "both engines are busy")
        busy += site.queue_up(start, [f"waits-{number}" for number in range(4)])
        answer = site.ask("over")
        assert (answer.status, answer.headers["retry-after"], answer.error["code"]) == (429, "5", "queue_full")
        site.release()
        assert [each.result().status for each in busy] == [200] * 6
    assert "over" not in site.arrived()


def test_client_that_leaves_the_queue_ends_in_the_log_and_never_reaches_an_engine(site: Site) -> None:
    site.hold()
    with background() as start:
        busy = [start(site.ask, "one"), start(site.ask, "two")]
        wait_until(lambda: len(site.arrived()) == 2, "both engines are busy")
        connection = site.edge.connect()
        headers = {"Authorization": f"Bearer {CLIENT_KEY}", "X-Request-Id": "leaves"}
        connection.request("POST", "/v1/completions", json.dumps({"model": "alpha"}), headers)
        site.wait_for_queue(1)
        connection.close()
        site.wait_for_queue(0)
        site.release()
        assert [each.result().status for each in busy] == [200, 200]
    line = site.receiver.line("leaves")
    assert (line["engine"], line["termination"][0]) == (NO_SERVER, "C")
    assert site.ask("next").status == 200
    assert "leaves" not in site.arrived()


# What the scheduler changes at run time ------------------------------------------------------------------------------


def test_maxconn_that_grows_lets_waiting_requests_go_and_one_that_falls_holds_them(site: Site) -> None:
    site.edge.admin(f"set server {POOL}/b.main state maint")
    site.hold()
    with background() as start:
        answers = [start(site.ask, "one")]
        wait_until(lambda: site.seen_by("a.main") == 1, "the engine is busy")
        answers += site.queue_up(start, [f"waits-{number}" for number in range(3)])
        assert not site.edge.admin(f"set maxconn server {POOL}/a.main 3").strip()
        wait_until(lambda: site.seen_by("a.main") == 3, "two more have gone")
        site.wait_for_queue(1)
        assert not site.edge.admin(f"set maxconn server {POOL}/a.main 1").strip()
        answers.append(start(site.ask, "after"))
        site.wait_for_queue(2)
        assert site.seen_by("a.main") == 3
        site.release()
        assert [answer.result().status for answer in answers] == [200] * 5


def test_weight_in_percent_sends_an_engine_less(site: Site) -> None:
    for name in site.engines:
        site.edge.admin(f"set maxconn server {POOL}/{name} 0")
    assert not site.edge.admin(f"set weight {POOL}/a.main 10%").strip()
    site.hold()
    with background(24) as start:
        answers = []
        # One after the other: of several at once each thread of HAProxy would not know what the others just chose.
        for number in range(22):
            answers.append(start(site.ask, f"request-{number}"))
            wait_until(lambda seen=number + 1: len(site.arrived()) == seen, "it is being answered")
        assert 1 <= site.seen_by("a.main") < site.seen_by("b.main") / 2
        site.release()
        assert {answer.result().status for answer in answers} == {200}


def test_drained_engine_ends_what_it_has_and_gets_nothing_more(site: Site) -> None:
    site.hold("a.main")
    with background() as start:
        site.scheduler.decide = lambda _unused: {"server": "a.main"}
        running_one = start(site.ask, "one")
        wait_until(lambda: site.seen_by("a.main") == 1, "the engine is busy")
        site.scheduler.decide = lambda _unused: {}
        assert not site.edge.admin(f"set server {POOL}/a.main state drain").strip()
        for number in range(4):
            assert site.ask(f"later-{number}").document["port"] == site.engines["b.main"].port
        site.release()
        assert running_one.result().status == 200
    assert site.seen_by("a.main") == 1


def test_engine_that_is_held_back_takes_what_is_placed_there_and_of_the_queue_what_it_is_granted(site: Site) -> None:
    """The pacing of ill engines rests on it: a server that is ready while its maxconn is set takes as many as that has
    room for, and not one more."""
    a = f"{POOL}/a.main"
    assert not site.edge.admin(f"set server {a} state drain").strip()
    site.hold()
    with background() as start:
        answers = [start(site.ask, "at-b")]
        wait_until(lambda: site.seen_by("b.main") == 1, "the other engine is busy")
        answers += site.queue_up(start, [f"waits-{number}" for number in range(4)])
        # Free, and held back: the queue passes it over, whatever its maxconn.
        assert not site.edge.admin(f"set maxconn server {a} 2").strip()
        time.sleep(0.2)
        assert (site.seen_by("a.main"), site.edge.metric(QUEUED)) == (0, 4)
        for maxconn, taken in ((2, 2), (3, 3)):
            grant = f"set server {a} state ready;set maxconn server {a} {maxconn};set server {a} state drain"
            assert not site.edge.admin(grant).strip()
            wait_until(lambda taken=taken: site.seen_by("a.main") == taken, "what was granted has gone")
            time.sleep(0.2)
            assert (site.seen_by("a.main"), site.edge.metric(QUEUED)) == (taken, 4 - taken)
        # One ends, and the slot stays free; what is placed by name takes it.
        site.release("a.main")
        wait_until(lambda: sum(answer.done() for answer in answers) == 3, "what it had has ended")
        time.sleep(0.2)
        assert (site.seen_by("a.main"), site.edge.metric(QUEUED)) == (3, 1)
        site.scheduler.decide = lambda _unused: {"server": "a.main"}
        assert site.ask("by-name").document["port"] == site.engines["a.main"].port
        site.release()
        assert {answer.result().status for answer in answers} == {200}
    assert site.seen_by("b.main") == 2


def test_engines_come_and_go_without_a_reload(site: Site) -> None:
    before = site.edge.pid()
    new = Engine()
    name = f"{POOL}/c.main"
    try:
        server = f"127.0.0.1:{new.port} maxconn 1 weight 100 check inter 200ms observe layer4 on-error fail-check"
        assert "New server registered" in site.edge.admin(f"add server {name} {server}")
        for command in (f"enable health {name}", f"enable server {name}"):
            assert not site.edge.admin(command).strip()
        site.edge.wait_for_engines(POOL, 3)
        site.scheduler.decide = lambda _unused: {"server": "c.main"}
        answer = site.ask("at-new")
        assert (answer.status, answer.document["port"]) == (200, new.port)
        assert site.receiver.line("at-new")["engine"] == "c.main"
        assert new.requests[0][1]["authorization"] == f"Bearer {ENGINE_KEY}"
        assert not site.edge.admin(f"set server {name} state maint").strip()
        assert site.ask("elsewhere").document["port"] != new.port
        wait_until(
            lambda: "deleted" in site.edge.admin(f"del server {name}"), "its idle connections are gone and it too"
        )
        assert site.ask("after").status == 200
    finally:
        new.stop()
    assert site.edge.pid() == before


def test_scheduler_that_dies_and_returns_is_asked_again_without_a_reload(site: Site) -> None:
    assert site.ask("before").status == 200
    port = site.scheduler.port
    site.scheduler.stop()
    site.edge.wait_for_engines("spoe-agents", 0)
    began = time.monotonic()
    for number in range(20):
        assert site.ask(f"without-{number}").status == 200
    assert time.monotonic() - began < 20 * 0.05, "a dead scheduler is waited for"
    again = Scheduler(port=port)
    site.scheduler = again
    site.edge.wait_for_engines("spoe-agents", 1)
    assert site.ask("after").status == 200
    assert [question["id"] for question in again.asked] == ["after"]


def test_scheduler_that_hangs_costs_one_wait_until_it_is_found_and_none_after(impatient: Site) -> None:
    site = impatient
    assert site.ask("before").status == 200
    site.scheduler.hung = True
    began = time.monotonic()
    assert site.ask("meanwhile").status == 200
    assert time.monotonic() - began < 10, "more than the decision's time was waited"
    site.edge.wait_for_engines("spoe-agents", 0)
    began = time.monotonic()
    for number in range(20):
        assert site.ask(f"without-{number}").status == 200
    assert time.monotonic() - began < 20, "a hung scheduler is waited for"
    site.scheduler.hung = False
    site.edge.wait_for_engines("spoe-agents", 1)
    site.scheduler.asked.clear()

    def asked() -> bool:
        assert site.ask("after").status == 200
        return "after" in [question["id"] for question in site.scheduler.asked]

    wait_until(asked, "the scheduler is asked again")


def test_reload_and_start_leave_engines_drained_and_light_without_the_scheduler(site: Site) -> None:
    port = {name: each.port for name, each in site.engines.items()}
    kept = ServerStateFile(str(site.edge.server_state))
    kept.save(
        [
            KeptServer(POOL, "a.main", port["a.main"], drained=True, weight=100),
            KeptServer(POOL, "b.main", port["b.main"], drained=False, weight=10),
            KeptServer(POOL, "gone.main", 1, drained=True, weight=100),
        ]
    )
    site.edge.reload("second")
    assert [site.ask(f"request-{number}").status for number in range(10)] == [200] * 10
    assert (site.seen_by("a.main"), site.seen_by("b.main")) == (0, 10)
    weights = {row.name: row.weight for row in site.edge.servers() if row.backend == POOL}
    assert weights == {"a.main": 100, "b.main": 10}
    # What is undrained is undrained over the next reload as well.
    kept.save([])
    site.edge.reload("third")
    assert [site.ask(f"later-{number}").status for number in range(10)] == [200] * 10
    assert site.seen_by("a.main") > 0


def test_reload_ends_open_streams_and_takes_new_requests(site: Site) -> None:
    site.hold("a.main")
    site.scheduler.decide = lambda _unused: {"server": "a.main"}
    with background() as start:
        stream = start(site.ask, "stream", stream=True)
        wait_until(lambda: site.seen_by("a.main") == 1, "a stream is open")
        site.scheduler.decide = lambda _unused: {"server": "b.main"}
        other_key = "sk-another-client"
        keys = [{"id": "team-a", "key": CLIENT_KEY}, {"id": "team-b", "key": other_key}]
        site.edge.reload("second", edge_api_keys=keys)
        assert site.edge.ask("GET", "/generation", frontend="metrics").body == b"second"
        assert site.edge.complete(key=other_key).status == 200
        site.engines["a.main"].hold = False
        site.release()
        assert stream.result().body == b"data: first\n\ndata: second\n\n"


# The end of a request ------------------------------------------------------------------------------------------------


def test_end_of_each_request_is_told_to_the_scheduler(site: Site) -> None:
    site.scheduler.decide = lambda _unused: {"server": "b.main", "priority": 10_000, "reason": "least_loaded"}
    assert site.ask("served", max_tokens=7).status == 200
    site.scheduler.decide = lambda _unused: {"status": 429, "retry_after": 3, "reason": "deadline"}
    assert site.ask("refused").status == 429
    served, refused = site.receiver.line("served"), site.receiver.line("refused")
    assert (served["engine"], served["status"], served["decision_reason"]) == ("b.main", 200, "least_loaded")
    assert (served["max_tokens"], served["prompt_tokens_from"]) == ("7", "body_bytes")
    for name in ("ms_queue", "ms_first_byte", "ms_total"):
        assert isinstance(served[name], int)
        assert served[name] >= 0
    assert (refused["engine"], refused["status"], refused["decision_reason"]) == (NO_SERVER, 429, "deadline")
    assert len([1 for datagram in site.receiver.all() if b'"served"' in datagram]) == 1


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ({"max_tokens": 5}, 5),
        ({"max_completion_tokens": 6, "max_tokens": 5}, 6),
        ({"max_tokens": None}, None),
        ({}, None),
        ({"messages": [{"max_tokens": 9}]}, None),
    ],
)
def test_tokens_that_a_client_asks_for_are_told(site: Site, body: dict[str, Any], expected: int | None) -> None:
    assert site.ask("asks", **body).status == 200
    [question] = site.scheduler.asked
    assert question["max_tokens"] == expected


@pytest.mark.parametrize(("status", "code"), [(400, "context_length_exceeded"), (413, "context_length_exceeded")])
def test_prompt_that_fits_no_engine_is_refused_as_the_scheduler_says(site: Site, status: int, code: str) -> None:
    site.scheduler.decide = lambda _unused: {"status": status, "reason": "prompt_too_long"}
    answer = site.ask("too-long")
    assert (answer.status, answer.error["code"]) == (status, code)
    assert not site.arrived()


def test_without_a_receiver_nothing_is_held_up(site: Site) -> None:
    site.receiver.stop()
    began = time.monotonic()
    for number in range(20):
        assert site.ask(f"request-{number}").status == 200
    assert time.monotonic() - began < PATIENCE


# A second try --------------------------------------------------------------------------------------------------------


def test_second_try_is_the_last(site: Site) -> None:
    for each in site.engines.values():
        each.die_without_answer = True
    answer = site.ask("both-die")
    assert (answer.status, answer.error["code"]) == (502, "engine_failed")
    assert site.arrived() == ["both-die", "both-die"]
    assert {name: site.seen_by(name) for name in site.engines} == {"a.main": 1, "b.main": 1}


def believed_up(edge: Edge, *names: str) -> None:
    """Let HAProxy take engines for up whatever the checks say, as it does until they have failed often enough."""
    for name in names:
        edge.admin(f"disable health {POOL}/{name}")
        edge.admin(f"set server {POOL}/{name} health up")
    edge.wait_for_engines(POOL, len(names))


def test_engine_that_cannot_be_reached_costs_a_request_nothing(tmp_path: Path, version: str) -> None:
    alive = Engine()
    scheduler = Scheduler(decide=lambda _unused: {"server": "a.main"})
    receiver = LogReceiver()
    dead = reserve_port()
    edge = Edge(
        tmp_path,
        version,
        edge_members=members(engine("a.main", "alpha", port_of(dead)), engine("b.main", "alpha", alive.port)),
        scheduler=scheduler,
        edge_scheduler_log=receiver.address,
    )
    with dead, running(edge, alive, scheduler, receiver):
        edge.wait_for_engines("spoe-agents", 1)
        believed_up(edge, "a.main", "b.main")
        answer = edge.complete(headers={"X-Request-Id": "redispatched"})
        assert (answer.status, answer.document["port"]) == (200, alive.port)
        assert receiver.line("redispatched")["retries"] in {"1", "+1"}


def test_engines_that_cannot_be_reached_are_no_reason_to_say_busy(tmp_path: Path, version: str) -> None:
    dead = reserve_port()
    edge = Edge(
        tmp_path,
        version,
        edge_members=members(engine("a.main", "alpha", port_of(dead)), engine("b.main", "alpha", port_of(dead))),
    )
    with dead, running(edge):
        believed_up(edge, "a.main", "b.main")
        answer = edge.complete()
    assert answer.status == 503
    assert answer.headers["retry-after"] == "5"


def test_stream_that_breaks_is_cut_and_not_begun_again(site: Site) -> None:
    for each in site.engines.values():
        each.die_in_stream = True
    connection = site.edge.connect()
    headers = {"Authorization": f"Bearer {CLIENT_KEY}", "X-Request-Id": "cut"}
    body = json.dumps({"model": "alpha", "stream": True})
    connection.request("POST", "/v1/completions", body, headers)
    response = connection.getresponse()
    with pytest.raises((http.client.IncompleteRead, ConnectionError)):
        response.read()
    connection.close()
    assert site.arrived() == ["cut"]
    # Both sides end at once; HAProxy names the one that it has seen first.
    assert site.receiver.line("cut")["termination"][0] in {"S", "C"}


# Bodies that are held, and longer ones -------------------------------------------------------------------------------

HELD = 20_000


@pytest.fixture
def narrow(tmp_path: Path, version: str) -> Iterator[Site]:
    site = Site(tmp_path, version, edge_body_bytes_held=HELD, edge_body_bytes_max=400_000)
    try:
        yield site
    finally:
        site.stop()


def test_body_that_is_held_is_sent_again(narrow: Site) -> None:
    narrow.scheduler.decide = lambda _unused: {"server": "a.main"}
    narrow.engines["a.main"].die_without_answer = True
    prompt = "x" * (HELD - 100)
    answer = narrow.ask("held", prompt)
    assert (answer.status, answer.document["port"]) == (200, narrow.engines["b.main"].port)
    assert json.loads(narrow.engines["b.main"].requests[0][2])["prompt"] == prompt


def test_longer_body_passes_whole_and_is_not_sent_again(narrow: Site) -> None:
    prompt = "x" * 300_000
    assert narrow.ask("long", prompt).status == 200
    [(_path, _headers, body)] = [request for each in narrow.engines.values() for request in each.requests]
    assert json.loads(body)["prompt"] == prompt
    [question] = narrow.scheduler.asked
    assert question["body_bytes"] == len(body)
    for each in narrow.engines.values():
        each.die_without_answer = True
    assert narrow.ask("dies", prompt).status == 502
    assert narrow.arrived().count("dies") == 1


def test_longer_body_without_a_length_is_refused(narrow: Site) -> None:
    connection = narrow.edge.connect()
    chunks = iter([b"x" * 1000] * 25)  # more than is held, and less than HAProxy's buffer: it reads it to the end
    connection.request("POST", "/v1/completions", chunks, {"Authorization": f"Bearer {CLIENT_KEY}"})
    assert connection.getresponse().status == 411
    connection.close()
    assert not narrow.arrived()


@pytest.mark.parametrize(("first", "status"), [("model", 200), ("prompt", 413)])
def test_of_several_models_one_is_named_in_front_of_a_longer_body(
    tmp_path: Path, version: str, first: str, status: int
) -> None:
    served = Engine()
    edge = Edge(
        tmp_path,
        version,
        edge_members=members(engine("a.main", "alpha", served.port), engine("b.main", "beta", served.port)),
        edge_body_bytes_held=HELD,
    )
    with running(edge, served):
        edge.wait_for_engines(POOL, 1)
        content = {"model": "alpha", "prompt": "x" * 100_000}
        body = {first: content.pop(first), **content}
        answer = edge.ask("POST", "/v1/completions", body)
        assert answer.status == status
        if status == 413:
            assert answer.error["code"] == "model_out_of_reach"
