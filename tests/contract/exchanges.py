# SPDX-License-Identifier: GPL-3.0-or-later
"""What the engines are asked: each exchange with what is sent. ``MODEL`` stands for the served model's name.

An answer that the contract is about depends on nothing but its request: prompts are fixed, temperatures are 0 where
several answers are not wanted, and texts are never compared.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

MODEL = "tiny"
KEY = "secret-for-contract"
CONTEXT = 2048
"""Tokens of the longest context that the engine is started with."""

JSON = {"Content-Type": "application/json"}
AUTHORIZED = {"Authorization": f"Bearer {KEY}"}


@dataclass(frozen=True)
class Exchange:
    """One request. ``body`` is sent as JSON unless it is text."""

    name: str
    method: str
    path: str
    body: Any = None
    headers: dict[str, str] = field(default_factory=lambda: {**JSON, **AUTHORIZED})

    @property
    def stream(self) -> bool:
        """Whether the answer is asked for as a stream of events."""
        return isinstance(self.body, dict) and self.body.get("stream") is True


def _get(name: str, path: str, **more: Any) -> Exchange:
    return Exchange(name, "GET", path, None, more.get("headers", {}))


def _chat(name: str, **body: Any) -> Exchange:
    messages = [{"role": "user", "content": "Hello, world!"}]
    document = {"model": MODEL, "messages": messages, "max_tokens": 6, "temperature": 0, **body}
    return Exchange(name, "POST", "/v1/chat/completions", {k: v for k, v in document.items() if v != "absent"})


def _completion(name: str, **body: Any) -> Exchange:
    document = {"model": MODEL, "prompt": "Hello, world!", "max_tokens": 6, "temperature": 0, **body}
    return Exchange(name, "POST", "/v1/completions", {k: v for k, v in document.items() if v != "absent"})


# Strict, or a model that says anything would say anything as the arguments.
TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "strict": True,
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "enum": ["Rome"]}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}


def _function(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


REQUIRED = {"tools": [TOOL], "tool_choice": "required"}
NAMED = {"tools": [TOOL], "tool_choice": _function("weather")}
SCHEMA = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"], "additionalProperties": False}
LONG = "word " * (CONTEXT + 100)
# Chats that answer with no end-of-text of their own: as long as asked for.
LENGTH = {"ignore_eos": True}

EXCHANGES = (
    _get("health", "/health"),
    _get("ping", "/ping"),
    _get("version", "/version"),
    _get("load", "/load"),
    _get("models", "/v1/models", headers=AUTHORIZED),
    _get("models without a key", "/v1/models"),
    _get("models with a wrong key", "/v1/models", headers={"Authorization": "Bearer wrong"}),
    _get("a path that is not there", "/v1/nothing", headers=AUTHORIZED),
    _get("a method that is not there", "/v1/completions", headers=AUTHORIZED),
    Exchange("a completion without a key", "POST", "/v1/completions", {"model": MODEL, "prompt": "x"}, JSON),
    Exchange("another media type", "POST", "/v1/completions", "{}", {**AUTHORIZED, "Content-Type": "text/plain"}),
    Exchange("no JSON", "POST", "/v1/completions", '{"model": '),
    Exchange("no object", "POST", "/v1/completions", "[]"),
    Exchange("no body", "POST", "/v1/completions", ""),
    Exchange("tokenize", "POST", "/tokenize", {"model": MODEL, "prompt": "Hello, world!"}),
    Exchange(
        "tokenize with texts", "POST", "/tokenize", {"model": MODEL, "prompt": "Hello", "return_token_strs": True}
    ),
    Exchange("tokenize a chat", "POST", "/tokenize", {"model": MODEL, "messages": [{"role": "user", "content": "x"}]}),
    Exchange("tokenize another model", "POST", "/tokenize", {"model": "other", "prompt": "Hello"}),
    Exchange("detokenize", "POST", "/detokenize", {"model": MODEL, "tokens": [300, 301]}),
    Exchange("detokenize nothing", "POST", "/detokenize", {"model": MODEL}),
    _completion("completion", **LENGTH),
    _completion("completion of no model", model="absent", **LENGTH),
    _completion("completion of several prompts", prompt=["Hello", "world"], **LENGTH),
    _completion("completion of token ids", prompt=[300, 301, 302], **LENGTH),
    _completion("completion of several lists of token ids", prompt=[[300, 301], [302]], **LENGTH),
    _completion("completion, two answers", n=2, temperature=1, seed=1, **LENGTH),
    _completion("completion with log probabilities", logprobs=2, **LENGTH),
    _completion("completion that repeats the prompt", echo=True, **LENGTH),
    _completion("completion with token ids", return_token_ids=True, **LENGTH),
    # Whatever the first token is, it is one of these: the engines' vocabularies have more.
    _completion("completion that stops at a token", stop_token_ids=list(range(900)), logit_bias={"300": 100}),
    _completion("a stop token that is not there", stop_token_ids=[999999]),
    _completion("completion, streamed", stream=True, **LENGTH),
    _completion("completion, streamed with usage", stream=True, stream_options={"include_usage": True}, **LENGTH),
    _completion(
        "completion, streamed with usage all along",
        stream=True,
        stream_options={"include_usage": True, "continuous_usage_stats": True},
        **LENGTH,
    ),
    _completion("completion, streamed with log probabilities", stream=True, logprobs=1, **LENGTH),
    _completion("completion, streamed with token ids", stream=True, return_token_ids=True, **LENGTH),
    _completion("completion without a prompt", prompt="absent"),
    _completion("completion of nothing", prompt=""),
    _completion("completion of an empty list", prompt=[]),
    _completion("completion of a token that is not there", prompt=[999999]),
    _completion("completion that is too long", prompt=LONG),
    _completion("completion of too many token ids", prompt=[300] * (CONTEXT + 100)),
    _completion("completion that leaves no room for an answer", prompt=[300] * CONTEXT),
    _completion("completion that asks for too much", max_tokens=CONTEXT + 1),
    _completion("completion of another model", model="other"),
    _completion("temperature below 0", temperature=-1),
    _completion("temperature above 2", temperature=3),
    _completion("top_p above 1", top_p=2),
    _completion("top_k below -1", top_k=-2),
    _completion("n of 0", n=0),
    _completion("n of 2, greedy", n=2),
    _completion("too many log probabilities", logprobs=99),
    _completion("max_tokens of 0", max_tokens=0),
    _completion("max_tokens below 0", max_tokens=-1),
    _completion("max_tokens that is text", max_tokens="many"),
    _completion("presence_penalty above 2", presence_penalty=3),
    _completion("stream_options without a stream", stream_options={"include_usage": True}),
    _completion("an empty stop", stop=""),
    _completion("stop that is a number", stop=1),
    _chat("chat", **LENGTH),
    _chat("chat with max_completion_tokens", max_tokens="absent", max_completion_tokens=4, **LENGTH),
    _chat("chat, two answers", n=2, temperature=1, seed=1, **LENGTH),
    _chat("chat with log probabilities", logprobs=True, top_logprobs=2, **LENGTH),
    _chat("chat with token ids", return_token_ids=True, **LENGTH),
    _chat("chat, streamed", stream=True, **LENGTH),
    _chat("chat, streamed with usage", stream=True, stream_options={"include_usage": True}, **LENGTH),
    _chat(
        "chat, streamed with usage all along",
        stream=True,
        stream_options={"include_usage": True, "continuous_usage_stats": True},
        **LENGTH,
    ),
    _chat("chat, streamed, two answers", stream=True, n=2, temperature=1, seed=1, **LENGTH),
    _chat("chat, streamed with log probabilities", stream=True, logprobs=True, top_logprobs=1, **LENGTH),
    _chat("chat, streamed with token ids", stream=True, return_token_ids=True, **LENGTH),
    _chat("chat in parts", messages=[{"role": "user", "content": [{"type": "text", "text": "Hello"}]}], **LENGTH),
    _chat("chat with a tool that is not used", tools=[TOOL], tool_choice="none", **LENGTH),
    _chat("chat with tools", tools=[TOOL], **LENGTH),
    # A random model does not end its documents.
    _chat("chat of JSON", max_tokens=1, response_format={"type": "json_object"}),
    _chat(
        "chat of a schema",
        max_tokens=1,
        response_format={"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}},
    ),
    _chat("chat without messages", messages="absent"),
    _chat("chat of no messages", messages=[]),
    _chat("chat of a message without a role", messages=[{"content": "x"}]),
    _chat("chat of messages that are text", messages="x"),
    _chat("chat of another model", model="other"),
    _chat("chat that is too long", messages=[{"role": "user", "content": LONG}]),
    _chat("chat that asks for too much", max_tokens=CONTEXT + 1),
    _chat("chat with top_logprobs alone", top_logprobs=2),
    _chat("chat with too many top_logprobs", logprobs=True, top_logprobs=99),
    _chat("chat with a temperature below 0", temperature=-1),
    _chat("chat with an unknown response_format", response_format={"type": "poem"}),
    _chat("chat of a schema that is missing", response_format={"type": "json_schema"}),
    _chat("chat with a tool that has to be used", max_tokens=64, **REQUIRED),
    _chat("chat with a tool that has to be used, streamed", max_tokens=64, stream=True, **REQUIRED),
    _chat("chat with a tool that has to be used, cut off", max_tokens=3, **REQUIRED),
    _chat("chat with a tool that has to be used, cut off, streamed", max_tokens=3, stream=True, **REQUIRED),
    _chat("chat with a tool that is named", max_tokens=64, **NAMED),
    _chat("chat with a tool that is named, streamed", max_tokens=64, stream=True, **NAMED),
    _chat("chat with a tool that is named, cut off", max_tokens=1, **NAMED),
    _chat("chat with a tool that is not there", tools=[TOOL], tool_choice=_function("other")),
    _chat("chat with a tool that has no name", tools=[TOOL], tool_choice={"type": "function", "function": {}}),
    _chat("chat with a tool of no kind", tools=[TOOL], tool_choice={"type": "function"}),
    _chat("chat with an unknown tool_choice", tools=[TOOL], tool_choice="perhaps"),
    _chat("chat with tool_choice and no tools", tool_choice="required"),
    _chat("chat with no tools at all", tools=[]),
    _chat("chat with tools that are none", tools=[{}]),
    _chat("chat with a function that has no name", tools=[{"type": "function", "function": {}}]),
    _chat("chat with tools that are text", tools="weather"),
    _chat("chat with stream_options without a stream", stream_options={"include_usage": True}),
)
