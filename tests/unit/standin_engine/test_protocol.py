# SPDX-License-Identifier: GPL-3.0-or-later
"""Request bodies, against what vLLM 0.32 answers to the same ones."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from standin_engine.protocol import ApiError, check_limits, parse_body, parse_chat, parse_completion

MESSAGES = [{"role": "user", "content": "Hello"}]
TOOLS: list[dict[str, Any]] = [{"type": "function", "function": {"name": "f"}}]
FUNCTION = "body.tools.0.function"


@pytest.mark.parametrize(
    ("document", "kind", "parameter", "message"),
    [
        ({}, "BadRequestError", "prompt", "Either prompt or prompt_embeds must be provided and non-empty."),
        ({"prompt": ""}, "BadRequestError", "prompt", "Either prompt or prompt_embeds must be provided"),
        ({"prompt": []}, "BadRequestError", None, "You must pass at least one prompt"),
        ({"prompt": {"a": 1}}, "Bad Request", "body.prompt", "1 validation error:"),
        ({"prompt": ["a", 1]}, "Bad Request", "body.prompt", "1 validation error:"),
        ({"prompt": [1, True]}, "Bad Request", "body.prompt", "1 validation error:"),
        ({"prompt": [-1]}, "Bad Request", "body.prompt", "greater than or equal to 0"),
        ({"prompt": ["a"] * 1025}, "BadRequestError", "prompt", "exceeds the maximum allowed count of 1024"),
        (
            {"prompt": "a", "max_tokens": "ten"},
            "Bad Request",
            "body.max_tokens",
            "unable to parse string as an integer",
        ),
        ({"prompt": "a", "max_tokens": 1.5}, "Bad Request", "body.max_tokens", "got a number with a fractional part"),
        ({"prompt": "a", "max_tokens": [1]}, "Bad Request", "body.max_tokens", "Input should be a valid integer"),
        ({"prompt": "a", "stream": "maybe"}, "Bad Request", "body.stream", "Input should be a valid boolean"),
        ({"prompt": "a", "temperature": -1}, "BadRequestError", "temperature", "temperature must be non-negative"),
        ({"prompt": "a", "temperature": 2.5}, "BadRequestError", "temperature", "temperature must be in [0, 2]"),
        ({"prompt": "a", "temperature": "inf"}, "BadRequestError", "temperature", "must be a finite number"),
        ({"prompt": "a", "top_p": 0}, "BadRequestError", "top_p", "top_p must be in (0, 1]"),
        ({"prompt": "a", "n": 0}, "BadRequestError", None, "n must be at least 1, got 0."),
        ({"prompt": "a", "n": 2, "temperature": 0}, "BadRequestError", None, "n must be 1 when using greedy sampling"),
        ({"prompt": "a", "stop": [""]}, "BadRequestError", None, "stop cannot contain an empty string."),
        ({"prompt": "a", "stop": [1]}, "Bad Request", "body.stop.0", "Input should be a valid string"),
        ({"prompt": "a", "logprobs": -2}, "BadRequestError", "logprobs", "`logprobs` must be a positive value or -1."),
        ({"prompt": "a", "min_tokens": -1}, "BadRequestError", None, "min_tokens must be greater than or equal to 0"),
        ({"prompt": "a", "model": 3}, "Bad Request", "body.model", "Input should be a valid string"),
        (
            {"prompt": "a", "stream_options": {"include_usage": True}},
            "BadRequestError",
            "stream_options",
            "Stream options can only be defined when `stream=True`.",
        ),
    ],
)
def test_a_completion_that_vllm_refuses(
    document: dict[str, Any], kind: str, parameter: str | None, message: str
) -> None:
    with pytest.raises(ApiError) as refusal:
        parse_completion(document)
    assert refusal.value.status == 400
    error = refusal.value.body["error"]
    assert (error["type"], error["param"], error["code"]) == (kind, parameter, 400)
    assert message in error["message"]
    json.dumps(refusal.value.body, allow_nan=False)


@pytest.mark.parametrize(
    ("document", "kind", "parameter", "message"),
    [
        ({}, "Bad Request", "body.messages", "Field required"),
        ({"messages": "Hello"}, "Bad Request", "body.messages", "Input should be a valid list"),
        ({"messages": []}, "BadRequestError", None, "to an empty conversation"),
        ({"messages": ["Hello"]}, "Bad Request", "body.messages.0", "Input should be a valid dictionary"),
        (
            {"messages": [{"content": "x"}]},
            "Bad Request",
            "body.messages.0.ChatCompletionDeveloperMessageParam.role",
            "Field required",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
            "BadRequestError",
            None,
            "At most 0 image(s) may be provided in one prompt.",
        ),
        (
            {"messages": MESSAGES, "top_logprobs": 2},
            "BadRequestError",
            "top_logprobs",
            "`logprobs` must be set to true",
        ),
        (
            {"messages": MESSAGES, "response_format": {"type": "poem"}},
            "Bad Request",
            "body.response_format.type",
            "Input should be 'text', 'json_object' or 'json_schema'",
        ),
        (
            {"messages": MESSAGES, "response_format": {"type": "json_schema"}},
            "BadRequestError",
            "response_format",
            "must be provided",
        ),
        ({"messages": MESSAGES, "tools": []}, "BadRequestError", "tools", "must not be an empty array"),
        ({"messages": MESSAGES, "tool_choice": "auto"}, "BadRequestError", "tool_choice", "`tools` must be set"),
        ({"messages": MESSAGES, "tools": TOOLS}, "BadRequestError", None, "requires --enable-auto-tool-choice"),
        (
            {"messages": MESSAGES, "tools": TOOLS, "tool_choice": "required"},
            "BadRequestError",
            None,
            'tool_choice="required" requires --tool-call-parser to be set',
        ),
        (
            {"messages": MESSAGES, "tools": TOOLS, "tool_choice": {"function": {"name": "f"}}},
            "BadRequestError",
            None,
            'tool_choice=function "f" requires --tool-call-parser to be set',
        ),
        (
            {"messages": MESSAGES, "tools": TOOLS, "tool_choice": {"function": {"name": 1}}},
            "BadRequestError",
            "tool_choice.function.name",
            "Invalid `name` in `function`: `1`",
        ),
        ({"messages": MESSAGES, "tools": ["f"]}, "Bad Request", "body.tools.0", "or object to extract fields from"),
        *(
            (
                {"messages": MESSAGES, "tools": [{"function": {"name": "f", **more}}]},
                "Bad Request",
                f"{FUNCTION}.{place}",
                text,
            )
            for more, place, text in (
                ({"name": None}, "name", "a valid string"),
                ({"parameters": [1]}, "parameters", "a valid dictionary"),
                ({"description": 5}, "description", "a valid string"),
                ({"strict": "perhaps"}, "strict", "a valid boolean"),
            )
        ),
        ({"messages": MESSAGES, "tools": [{"function": None}]}, "Bad Request", FUNCTION, "to extract fields from"),
        (
            {"messages": MESSAGES, "tools": [{**TOOLS[0], "type": "retrieval"}]},
            "Bad Request",
            "body.tools.0.type",
            "Input should be 'function'",
        ),
        (
            {"messages": MESSAGES, "tools": TOOLS, "tool_choice": {"type": "x", "function": {"name": "f"}}},
            "Bad Request",
            "body.tool_choice.literal['none']",
            "Input should be 'none'",
        ),
    ],
)
def test_a_chat_that_vllm_refuses(document: dict[str, Any], kind: str, parameter: str | None, message: str) -> None:
    with pytest.raises(ApiError) as refusal:
        parse_chat(document, auto_tool_choice=False)
    error = refusal.value.body["error"]
    assert (error["type"], error["param"], error["code"]) == (kind, parameter, 400)
    assert message in error["message"]


@pytest.mark.parametrize(
    ("media_type", "body", "message"),
    [
        ("text/plain", b"{}", "Unsupported Media Type"),
        ("application/json", b"", "Field required"),
        ("application/json", b'{"prompt"', "JSON decode error"),
        ("application/json", b"[1]", "valid dictionary"),
        ("application/json", b'{"prompt": "\xff"}', "error parsing the body"),
        ("application/json", b'{"seed": ' + b"9" * 5000 + b"}", "error parsing the body"),
        ("application/json", b"[" * 100_000, "error parsing the body"),
    ],
)
def test_a_body_that_is_no_json_object_is_refused(media_type: str, body: bytes, message: str) -> None:
    with pytest.raises(ApiError) as refusal:
        parse_body(media_type, body)
    assert refusal.value.status == 400
    assert message in refusal.value.body["error"]["message"]


def test_a_long_value_is_not_sent_back_whole() -> None:
    with pytest.raises(ApiError) as refusal:
        parse_completion({"prompt": "a", "max_tokens": "x" * 100_000})
    assert len(refusal.value.body["error"]["message"]) < 1000


def test_prompts_come_as_text_tokens_or_lists_of_them() -> None:
    assert parse_completion({"prompt": "a"}).prompts == ["a"]
    assert parse_completion({"prompt": [1, 2]}).prompts == [[1, 2]]
    assert parse_completion({"prompt": ["a", "b"]}).prompts == ["a", "b"]
    assert parse_completion({"prompt": [[1], [2, 3]]}).prompts == [[1], [2, 3]]


def test_parts_of_a_message_are_joined() -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    _unused, messages = parse_chat({"messages": [{"role": "user", "content": parts}]}, auto_tool_choice=False)
    assert messages == [{"role": "user", "content": "one\ntwo"}]


def test_the_newer_name_of_the_limit_wins() -> None:
    request, _unused = parse_chat(
        {"messages": MESSAGES, "max_tokens": 5, "max_completion_tokens": 7}, auto_tool_choice=False
    )
    assert request.sampling.max_tokens == 7


def test_a_completion_has_sixteen_tokens_unless_told_and_a_chat_all_that_fit() -> None:
    completion = parse_completion({"prompt": "a", "max_tokens": None})
    assert check_limits(completion, 10, 100, 20) == 16
    assert check_limits(completion, 90, 100, 20) == 10
    chat, _unused = parse_chat({"messages": MESSAGES}, auto_tool_choice=False)
    assert check_limits(chat, 10, 100, 20) == 90


@pytest.mark.parametrize(
    ("fields", "prompt_tokens", "parameter", "message"),
    [
        ({"max_tokens": 0}, 10, "max_tokens", "max_tokens must be at least 1, got 0."),
        ({"max_tokens": 101}, 10, "max_tokens", "max_tokens=101 cannot be greater than max_model_len=100."),
        (
            {},
            101,
            "input_tokens",
            "maximum context length is 100 tokens. However, your prompt contains at least 101 input tokens",
        ),
        ({}, 100, "max_tokens", "max_tokens must be at least 1, got 0."),
        ({"min_tokens": 17}, 10, None, "min_tokens must be less than or equal to max_tokens=16, got 17."),
        ({"logprobs": 21}, 10, "logprobs", "greater than max allowed: 20"),
    ],
)
def test_what_does_not_fit_is_refused(
    fields: dict[str, Any], prompt_tokens: int, parameter: str | None, message: str
) -> None:
    request = parse_completion({"prompt": "a", **fields})
    with pytest.raises(ApiError) as refusal:
        check_limits(request, prompt_tokens, 100, 20)
    assert refusal.value.body["error"]["param"] == parameter
    assert message in refusal.value.body["error"]["message"]


anything: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
FIELDS = [
    *("model", "prompt", "messages", "max_tokens", "max_completion_tokens", "n", "seed", "stop", "stream"),
    *("stream_options", "temperature", "top_p", "top_k", "logprobs", "top_logprobs", "echo", "ignore_eos"),
    *("min_tokens", "stop_token_ids", "return_token_ids", "stream_interval", "tools", "tool_choice", "request_id"),
    *("cache_salt", "truncate_prompt_tokens", "presence_penalty"),
]


@pytest.mark.parametrize("parse", [parse_completion, lambda document: parse_chat(document, auto_tool_choice=True)])
@given(document=st.dictionaries(st.sampled_from(FIELDS), anything))
def test_no_body_makes_anything_but_a_request_or_a_refusal(
    parse: Callable[[dict[str, Any]], object], document: dict[str, Any]
) -> None:
    try:
        parse(document)
    except ApiError as refusal:
        assert refusal.status == 400  # noqa: PT017 - most documents are refused, some are not
