# SPDX-License-Identifier: GPL-3.0-or-later
"""The stand-in answers as vLLM does, but for the words: held to what tests/contract recorded of vLLM itself."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from standin_engine import flags
from standin_engine.config import build
from standin_engine.faults import Faults
from standin_engine.server import Server
from tests.contract.exchanges import CONTEXT, EXCHANGES, KEY, MODEL, Exchange
from tests.contract.record import ask
from tests.contract.shapes import answer, events, shape

CONTRACT = Path(__file__).resolve().parents[2] / "contract" / "vllm-0.32.0.json"
RECORDED: dict[str, dict[str, Any]] = json.loads(CONTRACT.read_text(encoding="utf-8"))


@contextlib.contextmanager
def serving() -> Iterator[str]:
    """The stand-in on a free port of loopback, in a thread of its own; gives its address."""
    words = ["model", "--served-model-name", MODEL, "--max-model-len", str(CONTEXT), "--enable-auto-tool-choice"]
    config = build(
        flags.parse([*words, "--tool-call-parser", "hermes", "--api-key", KEY]), {"STANDIN_TIME_SCALE": "0.01"}
    )
    loop, started, places = asyncio.new_event_loop(), threading.Event(), []

    async def start() -> None:
        server = Server(config, Faults(None))
        runner = web.AppRunner(server.application())
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        places.append(runner.addresses[0])
        started.set()
        jobs = [asyncio.ensure_future(job) for job in (server.engine.run(), server.watch())]
        try:
            await asyncio.gather(*jobs)
        finally:
            await runner.cleanup()

    task = loop.create_task(start())

    def run() -> None:
        with contextlib.suppress(asyncio.CancelledError):
            loop.run_until_complete(task)
        loop.close()

    thread = threading.Thread(target=run)
    thread.start()
    assert started.wait(30)
    try:
        yield "{}:{}".format(*places[0][:2])
    finally:
        loop.call_soon_threadsafe(task.cancel)
        thread.join()


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with serving() as place:
        yield place


def test_every_exchange_was_recorded_once() -> None:
    names = [exchange.name for exchange in EXCHANGES]
    assert sorted(RECORDED) == sorted(names)


@pytest.mark.parametrize("exchange", EXCHANGES, ids=lambda exchange: exchange.name)
def test_the_standin_answers_as_vllm_does(exchange: Exchange, address: str) -> None:
    assert ask(address, exchange) == RECORDED[exchange.name]


def test_shapes_tell_fields_types_and_framing_apart() -> None:
    assert shape({"a": 1, "role": "user"}) != shape({"a": "1", "role": "user"})
    assert shape({"role": "user"}) != shape({"role": "tool"})
    assert shape([1, 2]) == shape([3]) != shape([3, None])
    assert shape([]) != shape([1])
    assert events('data: {"a": 1}\n\ndata: {"a": 2}\n\ndata: [DONE]\n\n') == [{"a": "number"}]
    for damaged in ("", "data: [DONE]", "data: {}\n\n\n", "[DONE]\n\n", "event: x\ndata: [DONE]\n\n"):
        with pytest.raises(ValueError, match="not framed"):
            events(damaged)
    for unended in ("data: {}\n\n", "data: [DONE]\n\ndata: {}\n\n", "data: [DONE]\n\ndata: [DONE]\n\n"):
        with pytest.raises(ValueError, match="as the last event"):
            events(unended)


def test_answers_that_take_turns_have_the_same_shape_whoever_comes_first() -> None:
    def piece(index: int, reason: str | None) -> str:
        return f"data: {json.dumps({'choices': [{'index': index, 'finish_reason': reason}]})}\n\n"

    ends = [piece(0, "stop"), piece(1, "length")]
    beginnings = [piece(0, None), piece(1, None)]
    one = "".join([*beginnings, *ends, "data: [DONE]\n\n"])
    other = "".join([beginnings[1], ends[1], beginnings[0], ends[0], "data: [DONE]\n\n"])
    assert events(one) == events(other)
    assert events(one) != events("".join([*ends, *beginnings, "data: [DONE]\n\n"]))


def test_only_what_belongs_to_the_connection_is_left_out() -> None:
    assert answer(200, {"Content-Type": "text/plain", "Date": "x"}, b"") == {
        "status": 200,
        "headers": ["content-type"],
        "type": "text/plain",
    }
