# SPDX-License-Identifier: GPL-3.0-or-later
"""A call of a tool, whole and in chunks of any size: the client puts together what the engine said."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from standin_engine import documents
from standin_engine.answers import Writer, WrittenAnswer, build_tokenizer
from standin_engine.tools import CallStream, ForcedCall

ARGUMENTS = '{"city": "Rome \\"}]</tool_call>", "days": [1, {"a": {}}]}'
NAMES = st.text(st.characters(codec="utf-8"), min_size=1, max_size=20)


def put_together(deltas: list[dict[str, Any]]) -> tuple[str, str, str]:
    """Text, function and arguments, as a client of OpenAI's interface collects them."""
    pieces = [call for delta in deltas for call in delta.get("tool_calls", [])]
    assert all(call["index"] == 0 for call in pieces)
    assert sum("id" in call for call in pieces) <= 1
    return (
        "".join(delta.get("content") or "" for delta in deltas),
        "".join(call["function"].get("name", "") for call in pieces),
        "".join(call["function"].get("arguments", "") for call in pieces),
    )


@given(NAMES, st.booleans(), st.lists(st.integers(1, 9), min_size=1, max_size=200))
def test_chunks_of_any_size_make_the_call(name: str, named: bool, sizes: list[int]) -> None:
    call = ForcedCall(name, ARGUMENTS, named)
    stream, place, deltas = CallStream(call), 0, []
    for size in [*sizes, len(call.text)]:
        deltas.append(stream.delta(call.text[place : place + size]))
        place += size
    assert put_together(deltas) == ("", name, ARGUMENTS)
    assert stream.delta("") == {}
    assert stream.finish_reason("stop") == ("stop" if named else "tool_calls")
    assert stream.finish_reason("length") == "length"
    assert json.loads(call.text[len("<tool_call>") : -len("</tool_call>")])["name"] == name


@pytest.mark.parametrize("missing", [0, len("</tool_call>")])
def test_a_call_that_is_whole_is_one(missing: int) -> None:
    call = ForcedCall("weather", ARGUMENTS, named=False)
    message = call.message(call.text[: len(call.text) - missing])
    assert message["content"] == ""
    assert message["tool_calls"][0]["function"] == {"name": "weather", "arguments": ARGUMENTS}


@pytest.mark.parametrize("text", ["", "<tool_call>", '<tool_call>{"name": "weather", "arguments": {', "rabble"])
def test_what_is_no_call_reaches_the_client_as_it_is(text: str) -> None:
    call = ForcedCall("weather", ARGUMENTS, named=False)
    assert call.message(text) == {"content": text}


def test_a_stream_that_never_came_to_the_call_ends_as_a_text_does() -> None:
    stream = CallStream(ForcedCall("weather", ARGUMENTS, named=False))
    assert [stream.delta(text) for text in ("<tool", "rabble", " more")] == [
        {},
        {"content": "<toolrabble"},
        {"content": " more"},
    ]
    assert stream.finish_reason("stop") == "stop"


@pytest.mark.parametrize("size", [1, 7, 1000])
def test_nothing_behind_a_call_or_astray_in_one_is_told(size: int) -> None:
    call = ForcedCall("weather", ARGUMENTS, named=False)
    for said, arguments in (
        (f"{call.text} And more.", ARGUMENTS),
        (f"{call.opening}{ARGUMENTS[:9]} rabble", ARGUMENTS[:9]),
    ):
        stream = CallStream(call)
        deltas = [stream.delta(said[place : place + size]) for place in range(0, len(said), size)]
        assert put_together(deltas) == ("", "weather", arguments)
    assert call.message(f"{call.text} And more.")["tool_calls"]


def test_last_chunk_that_announces_the_call_says_that_there_is_nothing_more() -> None:
    call = ForcedCall("weather", ARGUMENTS, named=False)
    [told] = CallStream(call).delta(call.announcement, last=True)["tool_calls"]
    assert told["function"] == {"name": "weather", "arguments": ""}


def test_what_is_not_ascii_comes_through_the_tokenizer() -> None:
    writer = Writer(build_tokenizer())
    call = ForcedCall(
        "météo", documents.text({"required": ["größe"], "properties": {"größe": {"const": "東京"}}}), False
    )
    answer = WrittenAnswer(writer, 1, call.text)
    text = "".join(writer.tokenizer.decode([answer.next_token()]) for _unused in range(answer.length))
    [told] = call.message(text)["tool_calls"]
    assert told["function"] == {"name": "météo", "arguments": '{"größe": "東京"}'}
