# SPDX-License-Identifier: GPL-3.0-or-later
"""The canary: one question at a time, and nothing of an answer but its hash."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Callable
from typing import Any

import pytest
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st

from ringmaster_agent import canary as canary_module
from ringmaster_agent.canary import Canary, answer_of, phase, prompt_id
from ringmaster_agent.configuration import Engine

KEY = "a-key-of-the-engines"
Respond = Callable[[web.Request], Any]


async def ask(respond: Respond, timeout: float = 5.0, count: int = 1, ready: bool = True) -> list[dict[str, Any]]:
    """Let a canary ask an engine that answers so; gives what it took."""
    taken: list[dict[str, Any]] = []
    application = web.Application()
    application.router.add_post("/v1/completions", respond)
    runner = web.AppRunner(application, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    engine = Engine("gpu-1.main", "127.0.0.1", runner.addresses[0][1], "m")
    canary = Canary(engine, "One, two,", KEY, timeout, lambda: ready, lambda _engine, what: taken.append(what))
    task = asyncio.create_task(canary.run(0.0, 0.05))
    try:
        for _unused in range(400):
            await asyncio.sleep(0.01)
            if len(taken) >= count:
                break
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await runner.cleanup()
    return taken


async def test_question_is_always_the_same_and_the_answer_is_hashed() -> None:
    seen: list[tuple[Any, ...]] = []

    async def respond(request: web.Request) -> web.Response:
        seen.append((request.headers["Authorization"], await request.text()))
        return web.json_response({"choices": [{"text": " three, four"}]})

    taken = await ask(respond, count=3)
    assert len(set(seen)) == 1
    assert seen[0][0] == f"Bearer {KEY}"
    assert json.loads(seen[0][1]) == {
        "model": "m",
        "prompt": "One, two,",
        "max_tokens": 16,
        "temperature": 0,
        "seed": 0,
        "stream": False,
    }
    assert [what["number"] for what in taken[:3]] == [1, 2, 3]
    assert {what["answer"] for what in taken} == {hashlib.sha256(b" three, four").hexdigest()}
    assert {what["prompt"] for what in taken} == {prompt_id("One, two,")}
    assert {what["error"] for what in taken} == {None}


@pytest.mark.parametrize(
    ("status", "body", "error"),
    [
        (500, "SECRET", "HTTP status 500"),
        (401, "SECRET", "HTTP status 401"),
        (302, "SECRET", "HTTP status 302"),
        (200, "SECRET", "the answer has no text"),
        (200, '{"choices": []}', "the answer has no text"),
        (200, '{"choices": [{"text": null}], "x": "SECRET"}', "the answer has no text"),
        (200, "[" * 100_000, "the answer has no text"),
        (200, json.dumps({"choices": [{"text": "x" * 300_000}]}), "the answer has no text"),
    ],
)
async def test_what_is_no_answer_is_an_error_without_its_content(status: int, body: str, error: str) -> None:
    async def respond(_request: web.Request) -> web.Response:
        return web.Response(status=status, text=body, headers={"Location": "http://127.0.0.1:1/"})

    (what, *_more) = await ask(respond)
    assert what["answer"] is None
    assert what["error"] == error


async def test_engine_that_does_not_answer_in_time() -> None:
    asked = 0

    async def respond(_request: web.Request) -> web.Response:
        nonlocal asked
        asked += 1
        await asyncio.sleep(0.5)
        return web.Response()

    (what, *_more) = await ask(respond, timeout=0.2)
    assert what["error"] == "no answer within 0.2 s"
    assert asked == 1  # never a second question beside the first


async def test_engine_that_is_not_ready_is_let_be() -> None:
    async def respond(_request: web.Request) -> web.Response:
        raise AssertionError("asked")

    assert await asyncio.wait_for(ask(respond, ready=False, count=1), 20) == []


def test_prompt_tells_how_it_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    before = prompt_id("a")
    assert before != prompt_id("b")
    monkeypatch.setattr(canary_module, "MAX_TOKENS", 17)
    assert prompt_id("a") != before


@given(st.text(max_size=20), st.text(max_size=20), st.floats(1, 1e5))
def test_phase_is_in_the_interval_and_stays(host: str, name: str, interval: float) -> None:
    host, name = host.encode("utf-8", "replace").decode(), name.encode("utf-8", "replace").decode()
    assert 0 <= phase(host, name, interval) < interval or phase(host, name, interval) == pytest.approx(interval)
    assert phase(host, name, interval) == phase(host, name, interval)


def test_phases_are_spread() -> None:
    phases = sorted(phase(f"gpu-{number}", f"gpu-{number}.main", 60) for number in range(100))
    assert max(later - earlier for earlier, later in zip(phases, phases[1:])) < 10


documents = st.recursive(
    st.none() | st.text(max_size=3) | st.integers(),
    lambda inner: st.lists(inner) | st.dictionaries(st.sampled_from(["choices", "text"]), inner),
    max_leaves=8,
)


@given(documents)
def test_any_document_is_an_answer_or_none(document: Any) -> None:
    try:
        assert len(answer_of(json.dumps(document).encode())) == 64
    except ValueError:
        pass
