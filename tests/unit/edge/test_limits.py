# SPDX-License-Identifier: GPL-3.0-or-later
"""What a key may use: requests and tokens in a minute, requests at the same time."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.unit.edge.loopback_site import (
    CLIENT_KEY,
    Answer,
    Edge,
    Engine,
    LogReceiver,
    background,
    running,
    wait_until,
)
from tests.unit.edge.rendering import engine, evaluate, members

OTHER_KEY = "sk-key-of-team-b"


@pytest.fixture
def served() -> Iterator[Engine]:
    each = Engine()
    with running(each):
        yield each


def limited(directory: Path, version: str, served: Engine, own: dict[str, int], **variables: Any) -> Edge:
    """An edge whose first client has limits of its own and whose second has what all have."""
    keys = [{"id": "team-a", "key": CLIENT_KEY, **own}, {"id": "team-b", "key": OTHER_KEY}]
    edge = Edge(
        directory,
        version,
        **{
            "edge_members": members(engine("a.main", "alpha", served.port)),
            "edge_api_keys": keys,
            **variables,
        },
    )
    edge.wait_for_engines("pool_alpha", 1)
    return edge


def ask(edge: Edge, key: str = CLIENT_KEY, prompt: str = "x") -> Answer:
    return edge.ask("POST", "/v1/completions", {"model": "alpha", "prompt": prompt}, key=key)


def count_served(edge: Edge, attempts: int, key: str = CLIENT_KEY, prompt: str = "x") -> tuple[int, Answer]:
    """How many of some requests were answered, and the last answer; those that were refused come last."""
    answers = [ask(edge, key, prompt) for _unused in range(attempts)]
    statuses = [answer.status for answer in answers]
    assert statuses == sorted(statuses)
    assert set(statuses) <= {200, 429}
    return statuses.count(200), answers[-1]


def test_requests_over_those_of_a_minute_are_refused_and_their_time_to_return_is_told(
    tmp_path: Path, version: str, served: Engine
) -> None:
    edge = limited(tmp_path, version, served, {"requests_per_minute": 20})
    with running(edge):
        passed, refusal = count_served(edge, 26)
        assert passed in {20, 21}  # one comes back in 3 s
        assert refusal.headers["retry-after"] in {"1", "2", "3"}
        assert (refusal.error["type"], refusal.error["code"]) == ("requests", "rate_limit_exceeded")
        assert len(served.requests) == passed
        assert count_served(edge, 30, OTHER_KEY)[0] == 30
        # A list of models costs no engine anything.
        assert edge.ask("GET", "/v1/models").status == 200


def test_request_comes_back_after_the_time_that_was_told(tmp_path: Path, version: str, served: Engine) -> None:
    edge = limited(tmp_path, version, served, {"requests_per_minute": 120})
    with running(edge):
        count_served(edge, 125)
        refusal = ask(edge)
        assert (refusal.status, refusal.headers["retry-after"]) == (429, "1")
        wait_until(lambda: ask(edge).status == 200, "the allowance is back")


def test_limit_of_all_counts_for_each_key_by_itself(tmp_path: Path, version: str, served: Engine) -> None:
    edge = limited(tmp_path, version, served, {"requests_per_minute": 0}, edge_requests_per_minute=5)
    with running(edge):
        assert count_served(edge, 12)[0] == 12
        assert count_served(edge, 8, OTHER_KEY)[0] == 5


def test_tokens_are_estimated_from_the_body_where_nothing_counted_them(
    tmp_path: Path, version: str, served: Engine
) -> None:
    edge = limited(tmp_path, version, served, {"prompt_tokens_per_minute": 1000})
    with running(edge):
        # 900 bytes and the JSON around them: some 235 tokens, four of which fit.
        passed, refusal = count_served(edge, 6, prompt="x" * 900)
        assert passed == 4
        assert refusal.error["type"] == "tokens"
        assert 1 <= int(refusal.headers["retry-after"]) <= 20


def test_tokens_that_a_preprocessor_counted_are_believed_and_marked(
    tmp_path: Path, version: str, served: Engine
) -> None:
    receiver = LogReceiver()
    edge = limited(tmp_path, version, served, {"prompt_tokens_per_minute": 1000}, edge_scheduler_log=receiver.address)
    with running(edge, receiver):

        def through_preprocessor(tokens: int, request_id: str) -> Answer:
            headers = {
                "X-Ringmaster-Key-Id": "team-a",
                "X-Ringmaster-Prompt-Tokens": str(tokens),
                "X-Request-Id": request_id,
            }
            return edge.complete(key=None, frontend="dispatch", headers=headers)

        assert through_preprocessor(600, "first").status == 200
        assert through_preprocessor(600, "second").status == 429
        assert through_preprocessor(300, "third").status == 200
        line = receiver.line("third")
        assert (line["prompt_tokens"], line["prompt_tokens_from"]) == ("300", "header")
        # The same key through the public frontend has used the same allowance.
        assert ask(edge, prompt="x" * 2000).status == 429
        # What a client claims there is not believed.
        claim = {"X-Ringmaster-Prompt-Tokens": "1", "X-Request-Id": "claim"}
        edge.complete(headers=claim)
        assert receiver.line("claim")["prompt_tokens_from"] == "body_bytes"


def test_prompt_over_the_whole_allowance_passes_once(tmp_path: Path, version: str, served: Engine) -> None:
    edge = limited(tmp_path, version, served, {"prompt_tokens_per_minute": 100})
    with running(edge):
        assert ask(edge, prompt="x" * 4000).status == 200
        refusal = ask(edge, prompt="x" * 4000)
        assert refusal.status == 429
        assert 50 <= int(refusal.headers["retry-after"]) <= 60


def test_requests_at_the_same_time_are_limited_and_one_that_ends_makes_room(
    tmp_path: Path, version: str, served: Engine
) -> None:
    edge = limited(tmp_path, version, served, {"concurrent_requests": 2})
    served.hold = True
    with running(edge), background() as start:
        held = [start(ask, edge), start(ask, edge)]
        wait_until(lambda: len(served.requests) == 2, "two are being answered")
        refusal = ask(edge)
        assert (refusal.status, refusal.headers["retry-after"]) == (429, "5")
        assert refusal.error["code"] == "rate_limit_exceeded"
        other = start(ask, edge, OTHER_KEY)
        wait_until(lambda: len(served.requests) == 3, "another key has a limit of its own")
        served.go_on.set()
        assert [each.result().status for each in (*held, other)] == [200, 200, 200]
        assert ask(edge).status == 200


def test_client_that_leaves_makes_room(tmp_path: Path, version: str, served: Engine) -> None:
    edge = limited(tmp_path, version, served, {"concurrent_requests": 1})
    served.hold = True
    with running(edge):
        connection = edge.connect()
        connection.request("POST", "/v1/completions", b'{"model": "alpha"}', {"Authorization": f"Bearer {CLIENT_KEY}"})
        wait_until(lambda: len(served.requests) == 1, "one is being answered")
        assert ask(edge).status == 429
        connection.close()
        served.hold = False
        wait_until(lambda: ask(edge).status == 200, "its place is free")
        served.go_on.set()


@pytest.mark.parametrize(
    ("clients", "common", "wrong"),
    [
        ([{"id": "a", "requests_per_minute": 1}], 0, []),
        ([{"id": "a", "requests_per_minute": 0}], 5, []),
        ([{"id": "a", "requests_per_minute": -1}], 0, ["a: requests_per_minute"]),
        ([{"id": "a", "concurrent_requests": "-3"}], 0, ["a: concurrent_requests"]),
        ([], -1, ["edge_*: requests_per_minute"]),
    ],
)
def test_limit_under_zero_is_named(clients: list[dict[str, Any]], common: int, wrong: list[str]) -> None:
    assert evaluate("edge_wrong_limits", edge_api_keys=clients, edge_requests_per_minute=common) == wrong


def test_without_a_limit_nothing_is_counted(tmp_path: Path, version: str, served: Engine) -> None:
    edge = limited(tmp_path, version, served, {})
    with running(edge):
        assert count_served(edge, 30)[0] == 30
        assert "used:0" in edge.admin("show table keys")
