# SPDX-License-Identifier: GPL-3.0-or-later
"""Real vLLM behind the edge: what it answers reaches the client as it is, and the site copes with what befalls it.

The last tests restart engines, so the order in this file is the order of the run.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from rehearsal import inventory, site
from tests.contract.exchanges import SCHEMA, TOOL
from tests.contract.shapes import answer
from tests.e2e.conftest import Site, changed_tasks
from tests.e2e.gateway import get, placements, wait_until

MODEL = "tiny"
HOSTS = ("engine-1", "engine-2")
ENGINE_PORT = 8100
AGENT_PORT = 8409
START = 480.0  # seconds that an engine gets until its first token (inventories/rehearsal-vllm)
HUNG_AFTER = 10.0
CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "Hello, world!"}], "max_tokens": 12, "temperature": 0}
COMPLETION = {"model": MODEL, "prompt": "Hello, world!", "max_tokens": 12, "temperature": 0}
OF_SCHEMA = {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}
USAGE = {"stream": True, "stream_options": {"include_usage": True}}
REQUESTS: dict[str, tuple[str, dict[str, Any]]] = {
    "a chat": ("chat/completions", CHAT),
    "a streamed chat": ("chat/completions", {**CHAT, **USAGE}),
    "a chat that stops": ("chat/completions", {**CHAT, "stop": ["e", "a"], "max_tokens": 40}),
    "a streamed chat that stops": ("chat/completions", {**CHAT, **USAGE, "stop": ["e", "a"], "max_tokens": 40}),
    "log probabilities": ("chat/completions", {**CHAT, "logprobs": True, "top_logprobs": 3}),
    "streamed log probabilities": ("chat/completions", {**CHAT, "stream": True, "logprobs": True}),
    "tools": ("chat/completions", {**CHAT, "tools": [TOOL], "tool_choice": "required", "max_tokens": 64}),
    "streamed tools": ("chat/completions", {**CHAT, **USAGE, "tools": [TOOL], "tool_choice": "auto"}),
    "a schema": ("chat/completions", {**CHAT, "response_format": OF_SCHEMA}),
    "two answers": ("completions", {**COMPLETION, "n": 2, "temperature": 1, "seed": 7}),
    "a prompt of token ids": ("completions", {**COMPLETION, "prompt": [300, 301, 302]}),
    "several prompts": ("completions", {**COMPLETION, "prompt": ["Hello", "world"]}),
    "a streamed completion": ("completions", {**COMPLETION, **USAGE}),
    "a temperature that is none": ("completions", {**COMPLETION, "temperature": -1}),
    "a chat of no messages": ("chat/completions", {**CHAT, "messages": []}),
    "a token that is not there": ("completions", {**COMPLETION, "prompt": [999999]}),
}
# What differs from one answer to the next by its nature.
OF_A_MOMENT = ("id", "created", "system_fingerprint")

Answer = tuple[int, dict[str, str], bytes]


def ask(address: str, key: str, path: str, body: dict[str, Any]) -> Answer:
    connection = http.client.HTTPConnection(address, timeout=120)
    try:
        headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
        connection.request("POST", f"/v1/{path}", json.dumps(body), headers)
        response = connection.getresponse()
        return response.status, dict(response.getheaders()), response.read()
    finally:
        connection.close()


def edge(real_site: Site) -> str:
    return f"{real_site.addresses['gw1']}:{site.PUBLIC_PORT}"


def engine(real_site: Site, host: str) -> str:
    return f"{real_site.addresses[host]}:{ENGINE_PORT}"


def lasting(value: Any) -> Any:
    """A document without what differs by its nature, wherever it stands."""
    if isinstance(value, dict):
        return {name: lasting(each) for name, each in value.items() if name not in OF_A_MOMENT}
    return [lasting(each) for each in value] if isinstance(value, list) else value


def content(found: Answer) -> Any:
    """Status and content of an answer. Of a stream what its events say together: how many tokens an event carries is a
    matter of the moment."""
    status, _headers, body = found
    text = body.decode()
    if not text.startswith("data: "):
        return status, lasting(json.loads(text))
    assert text.endswith("data: [DONE]\n\n")
    pieces = [json.loads(line[len("data: ") :]) for line in text.splitlines() if line.startswith("data: {")]
    choices = [choice for piece in pieces for choice in piece["choices"]]
    return (
        status,
        "".join(str(choice.get("delta", choice).get("content", choice.get("text")) or "") for choice in choices),
        [choice["finish_reason"] for choice in choices if choice.get("finish_reason")],
        [token for choice in choices for token in (choice.get("logprobs") or {}).get("content", [])],
        [piece["usage"] for piece in pieces if piece.get("usage")],
    )


def shape_of(found: Answer) -> dict[str, Any]:
    """Status, type and fields, of a stream its framing; HAProxy may add headers of its own."""
    status, headers, body = found
    kept = {name: value for name, value in headers.items() if name.lower() == "content-type"}
    shape = answer(status, kept, body)
    # Which fields an event has depends on how many tokens came together.
    shape.pop("events", None)
    return shape


@pytest.mark.parametrize("host", HOSTS)
@pytest.mark.parametrize("name", REQUESTS)
def test_the_edge_gives_what_the_engine_answers(name: str, host: str, real_site: Site) -> None:
    path, body = REQUESTS[name]
    # While an engine computes another request as well, sums are rounded in another order, and a random model has close
    # calls: of three pairs one has to be equal, and all of one shape.
    for attempt in range(3):
        through = ask(edge(real_site), real_site.edge_key, path, body)
        direct = ask(engine(real_site, host), real_site.engine_key, path, body)
        assert shape_of(through) == shape_of(direct)
        if content(through) == content(direct):
            return
        print(f"attempt {attempt}: {content(through)} through the edge, {content(direct)} from {host}")
    raise AssertionError("three answers that differ")


def test_a_prompt_that_is_too_long_is_refused_as_the_engine_refuses_it(real_site: Site) -> None:
    """The edge knows the prompt's tokens and refuses without an engine; a client can tell by the words alone."""
    body = {**COMPLETION, "prompt": [300] * 3000}
    through = ask(edge(real_site), real_site.edge_key, "completions", body)
    direct = ask(engine(real_site, HOSTS[0]), real_site.engine_key, "completions", body)
    assert through[0] == direct[0] == 400
    assert json.loads(through[2])["error"].keys() == json.loads(direct[2])["error"].keys()


@pytest.mark.parametrize("path", ["chat/completions", "completions"])
def test_the_preprocessor_counts_as_the_engine_does(path: str, real_site: Site) -> None:
    status, headers, body = ask(edge(real_site), real_site.edge_key, path, CHAT if "chat" in path else COMPLETION)
    assert status == 200
    request_id = {name.lower(): value for name, value in headers.items()}["x-request-id"]
    way = site.way_of(real_site.checkout, "gw1", request_id)
    counted = json.loads(body)["usage"]["prompt_tokens"]
    assert "gw1 → pi1 → gw1 → engine-" in way
    assert f", {counted} tokens of the prompt counted" in way


def test_the_second_run_changes_nothing(real_site: Site) -> None:
    finished, document = real_site.playbook("site.yml")
    assert finished.returncode == 0, finished.stdout[-3000:]
    assert document is not None
    assert changed_tasks(document) == {}


def node(real_site: Site, host: str) -> dict[str, Any]:
    """What the gateway's scheduler knows of a host's only engine."""
    document = json.loads(get(real_site.addresses["gw1"], site.SCHEDULER_PORT, f"/v1/nodes/{host}"))
    [found] = document["nodes"]
    [known] = found["engines"]
    return dict(known)


def all_well(real_site: Site) -> bool:
    return all(node(real_site, host)["weight"] == 1 and node(real_site, host)["health"] == "healthy" for host in HOSTS)


def test_prometheus_agent_and_scheduler_read_its_metrics(real_site: Site) -> None:
    def in_prometheus() -> bool:
        query = "/api/v1/query?query=vllm:kv_cache_usage_perc"
        found = json.loads(get(real_site.addresses["cpu-c1"], site.PROMETHEUS_PORT, query))["data"]["result"]
        return {each["metric"]["host"] for each in found} == set(HOSTS)

    def agents() -> list[dict[str, Any]]:
        return [json.loads(get(real_site.addresses[host], AGENT_PORT, "/v1/state"))["values"] for host in HOSTS]

    def canaries() -> set[str | None]:
        return {
            values.get(f"canary/{host}.main", {}).get("answer") for host, values in zip(HOSTS, agents(), strict=True)
        }

    wait_until(in_prometheus, "Prometheus has the engines' metrics", 60)
    wait_until(lambda: len(canaries()) == 1 and None not in canaries(), "both engines answer the canary alike", 60)
    for host, values in zip(HOSTS, agents(), strict=True):
        known = values[f"engine/{host}.main"]
        assert known["running"] is not None
        assert known["waiting"] is not None
        assert 0 <= known["kv_use"] <= 1
        assert known["generation_tokens"] > 0
        assert known["prompt_tokens"] > 0
        assert known["iterations"] > 0
    wait_until(lambda: all_well(real_site), "the scheduler holds both engines for well", 120)


def test_no_prompt_and_no_key_is_in_the_journal(real_site: Site) -> None:
    prompt = "a prompt that nobody has to read 4711"
    body = {**COMPLETION, "prompt": prompt}
    assert ask(edge(real_site), real_site.edge_key, "completions", body)[0] == 200
    for host in HOSTS:
        assert ask(engine(real_site, host), real_site.engine_key, "completions", body)[0] == 200
        journal = real_site.on(host, "journalctl --unit vllm@main --no-pager --output cat")
        assert "first token" in journal
        assert prompt not in journal
        assert real_site.engine_key not in journal


def process(real_site: Site, host: str) -> str:
    return real_site.on(host, "systemctl show --property=MainPID --value vllm@main").strip()


def run_with(real_site: Site, host: str, options: dict[str, Any], **variables: Any) -> tuple[int, str]:
    """Run the engines' part of the site on one host, with more options and other variables; gives its exit status and
    its output."""
    [found] = inventory.read(real_site.checkout).variables[host]["vllm_engines"]
    engines = [{**found, "options": {**found["options"], **options}}]
    finished, _document = real_site.playbook(
        "site.yml", "--tags", "vllm", "--limit", host, "-e", json.dumps({"vllm_engines": engines, **variables})
    )
    return finished.returncode, finished.stdout


def test_a_refused_option_touches_nothing(real_site: Site) -> None:
    before = process(real_site, "engine-1")
    status, output = run_with(real_site, "engine-1", {"num-scheduler-steps": 4})
    assert status != 0
    assert "--num-scheduler-steps: removed" in output
    assert process(real_site, "engine-1") == before


def test_a_tokenizer_that_is_not_the_preprocessors_touches_nothing(real_site: Site, tmp_path: Path) -> None:
    (tmp_path / "fingerprint.json").write_text('{"texts": "another"}')
    before = process(real_site, "engine-1")
    status, output = run_with(real_site, "engine-1", {"max-num-seqs": 7}, vllm_tokenizers={MODEL: str(tmp_path)})
    assert status != 0
    assert 'to be the one that preprocessors count with, {"texts": "another"}' in " ".join(output.split())
    assert process(real_site, "engine-1") == before


@dataclass
class Outcome:
    """One request through the edge. Unix times in seconds; `ended` is 0 and `error` "none yet" until it has ended."""

    started: float
    ended: float = 0.0
    error: str = "none yet"


@contextlib.contextmanager
def asking(real_site: Site) -> Iterator[list[Outcome]]:
    """Two requests a second for as long as the block lasts; all have ended when it has."""
    outcomes: list[Outcome] = []
    over = threading.Event()
    threads: list[threading.Thread] = []

    def one(outcome: Outcome, number: int) -> None:
        body = {**COMPLETION, "prompt": f"{number}: Hello", "max_tokens": 8}
        try:
            status, _headers, text = ask(edge(real_site), real_site.edge_key, "completions", body)
            outcome.error = "" if status == 200 else f"status {status}: {text[:200]!r}"
        except (OSError, http.client.HTTPException) as error:
            outcome.error = repr(error)
        outcome.ended = time.time()

    def all_of_them() -> None:
        while not over.wait(0.5):
            outcomes.append(Outcome(time.time()))
            threads.append(threading.Thread(target=one, args=(outcomes[-1], len(outcomes))))
            threads[-1].start()

    asker = threading.Thread(target=all_of_them)
    asker.start()
    try:
        yield outcomes
    finally:
        over.set()
        asker.join()
        for thread in threads:
            thread.join()


def failures(outcomes: list[Outcome]) -> list[str]:
    return [f"{outcome.started:.1f} to {outcome.ended:.1f}: {outcome.error}" for outcome in outcomes if outcome.error]


def is_out(real_site: Site, host: str) -> bool:
    known = node(real_site, host)
    return known["weight"] == 0 or known["health"] != "healthy"


def test_an_engine_that_stands_still_is_out_within_ten_seconds_and_back_when_it_goes_on(real_site: Site) -> None:
    """Stopped by a signal as a whole: it listens, and answers nothing, not even how it is."""
    control = "systemctl kill --kill-whom=all --signal={} vllm@main"
    wait_until(lambda: all_well(real_site), "both engines are well", 120)
    with asking(real_site) as outcomes:
        time.sleep(3)
        real_site.on("engine-1", control.format("STOP"))
        try:
            took = wait_until(lambda: is_out(real_site, "engine-1"), "the engine is out", 60)
            out = time.time()
            time.sleep(5)
        finally:
            real_site.on("engine-1", control.format("CONT"))
        back = wait_until(lambda: not is_out(real_site, "engine-1"), "the engine is back", 60)
    print(f"out after {took:.1f} s, back {back:.1f} s after it went on")
    assert took < HUNG_AFTER + 1
    # What it was asked is answered when it goes on, or was asked of the other engine.
    assert failures(outcomes) == []
    assert [
        outcome for outcome in outcomes if outcome.started > out and outcome.ended - outcome.started > HUNG_AFTER
    ] == []


def test_an_engine_whose_core_hangs_is_out_within_ten_seconds_and_back_after_its_restart(real_site: Site) -> None:
    """Its core stopped by a signal, it hangs as with a card that does: it listens, says how it is, and makes no token.

    May fail: what the engine was answering when it hung, once it is killed.
    """
    wait_until(lambda: all_well(real_site), "both engines are well", 120)
    main = process(real_site, "engine-1")
    with asking(real_site) as outcomes:
        time.sleep(3)
        hung = time.time()
        real_site.on("engine-1", f"pgrep --uid vllm | grep -vx {main} | xargs kill -STOP")
        took = wait_until(lambda: is_out(real_site, "engine-1"), "the engine is out", 60)
        out = time.time()
        reasons = {reason["rule"] for reason in node(real_site, "engine-1")["reasons"]}
        time.sleep(5)
        assert real_site.on("engine-1", "systemctl is-active vllm@main").strip() == "active"
        real_site.on("engine-1", "systemctl kill --kill-whom=main --signal=KILL vllm@main")
        back = wait_until(lambda: all_well(real_site), "the engine is back", START)
        # Up only after a token: until then the unit says that it is being started.
        assert real_site.on("engine-1", "systemctl is-active vllm@main").strip() == "active"
        time.sleep(3)
    print(f"out after {took:.1f} s by {reasons}, back {back:.1f} s after its death")
    assert reasons == {"hung"}
    assert took < HUNG_AFTER + 1
    assert failures([outcome for outcome in outcomes if outcome.ended < hung or outcome.started > out]) == []


def test_a_killed_engine_costs_only_what_it_was_answering(real_site: Site) -> None:
    wait_until(lambda: all_well(real_site), "both engines are well", 120)
    with asking(real_site) as outcomes:
        time.sleep(3)
        killed = time.time()
        real_site.on("engine-2", "systemctl kill --kill-whom=main --signal=KILL vllm@main")
        killed_by = time.time()
        wait_until(lambda: process(real_site, "engine-2") not in ("", "0"), "the engine is started again", 60)
        wait_until(lambda: all_well(real_site), "the engine is back", START)
    assert failures([outcome for outcome in outcomes if outcome.ended < killed or outcome.started > killed_by]) == []


def test_one_changed_flag_restarts_one_engine_without_a_failed_request(real_site: Site) -> None:
    before = {host: process(real_site, host) for host in HOSTS}
    with asking(real_site) as outcomes:
        status, output = run_with(real_site, "engine-1", {"max-num-seqs": 8})
        assert status == 0, output[-3000:]
        time.sleep(3)
    after = {host: process(real_site, host) for host in HOSTS}
    assert after["engine-1"] != before["engine-1"]
    assert after["engine-2"] == before["engine-2"]
    assert failures(outcomes) == []
    assert node(real_site, "engine-1")["weight"] == 1
    placed = placements(real_site, "gw1")["engine-1.main"]
    for number in range(8):
        ask(edge(real_site), real_site.edge_key, "completions", {**COMPLETION, "prompt": f"{number}: Hello"})
    assert placements(real_site, "gw1")["engine-1.main"] > placed
