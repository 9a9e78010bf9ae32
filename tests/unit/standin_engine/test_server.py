# SPDX-License-Identifier: GPL-3.0-or-later
"""The HTTP interface as clients, Prometheus and HAProxy see it, over real sockets."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer
from prometheus_client.parser import text_string_to_metric_families

from standin_engine import flags
from standin_engine.config import build
from standin_engine.faults import Faults
from standin_engine.server import Server

FACTS: dict[str, dict[str, Any]] = json.loads(Path(__file__).with_name("vllm_metrics.json").read_text())
MODEL = "qwen2-7b-instruct"
KEY = {"Authorization": "Bearer secret"}
CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "Why is the sky blue?"}], "temperature": 0}
PATIENCE = 60.0  # seconds until a test gives up waiting for something that has to happen


class PlainServer(TestServer):
    """The library's test server would itself cancel the requests of departed clients; the engine's runner does not."""

    async def _make_runner(self, **_unused: Any) -> web.AppRunner:
        return web.AppRunner(self.app)


class Running:
    """An engine that serves, fast, on a free port of loopback."""

    def __init__(self, server: Server, client: TestClient[Any, Any], faults: Faults) -> None:
        self.server = server
        self.client = client
        self.faults = faults

    async def post(self, path: str, document: Any, **arguments: Any) -> tuple[int, Any]:
        arguments.setdefault("headers", KEY)
        async with self.client.post(path, json=document, **arguments) as response:
            return response.status, await response.json()

    async def events(self, path: str, document: dict[str, Any]) -> list[Any]:
        """Events of a stream, decoded, without the mark of the end."""
        async with self.client.post(path, json={**document, "stream": True}, headers=KEY) as response:
            assert response.status == 200
            assert response.headers["Content-Type"] == "text/event-stream; charset=utf-8"
            body = (await response.read()).decode()
        lines = body.split("\n\n")
        assert lines[-2:] == ["data: [DONE]", ""]
        assert all(line.startswith("data: ") for line in lines[:-1])
        return [json.loads(line[6:]) for line in lines[:-2]]

    async def metrics(self) -> dict[str, float]:
        """Samples of the engine, by name and own labels."""
        async with self.client.get("/metrics") as response:
            text = await response.text()
        samples: dict[str, float] = {}
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                labels = [f"{k}={v}" for k, v in sorted(sample.labels.items()) if k not in ("engine", "model_name")]
                samples[",".join([sample.name, *labels])] = sample.value
        return samples

    async def until_fault(self, name: str, on: bool = True) -> None:
        """Wait until the engine has seen that a fault was switched."""
        end = time.monotonic() + PATIENCE
        while self.faults.is_on(name) != on:
            assert time.monotonic() < end, f"the engine never saw that {name} was switched"
            await asyncio.sleep(0.02)

    async def until(self, condition: Callable[[dict[str, float]], bool]) -> dict[str, float]:
        """Wait for the metrics to say something."""
        end = time.monotonic() + PATIENCE
        while True:
            samples = await self.metrics()
            if condition(samples):
                return samples
            assert time.monotonic() < end, "the metrics never said it"
            await asyncio.sleep(0.02)


@contextlib.asynccontextmanager
async def serving(
    *arguments: str, faults: Path | None = None, scale: str = "0.01", **environment: str
) -> AsyncIterator[Running]:
    options = flags.parse(["org/model", "--served-model-name", MODEL, "--api-key", "secret", *arguments])
    switched = Faults(faults)
    server = Server(build(options, {"STANDIN_TIME_SCALE": scale, **environment}), switched)
    jobs = [asyncio.ensure_future(job) for job in (server.engine.run(), server.watch())]
    try:
        async with TestClient(PlainServer(server.application())) as client:
            try:
                yield Running(server, client, switched)
            finally:
                await server.drain(0)
    finally:
        for job in jobs:
            job.cancel()
        await asyncio.gather(*jobs, return_exceptions=True)


# Interface.


async def test_small_routes_need_no_key_and_say_what_vllm_says() -> None:
    async with serving() as engine:
        for method, path in (("GET", "/health"), ("GET", "/ping"), ("POST", "/ping")):
            async with engine.client.request(method, path) as response:
                assert (response.status, await response.read()) == (200, b"")
        async with engine.client.get("/version") as response:
            assert await response.json() == {"version": "0.32.0"}
            assert response.headers["Content-Type"] == "application/json"
        async with engine.client.get("/load") as response:
            assert await response.json() == {"server_load": 0}


@pytest.mark.parametrize("headers", [{}, {"Authorization": "Bearer wrong"}, {"Authorization": "Basic secret"}])
async def test_the_api_needs_the_key(headers: dict[str, str]) -> None:
    async with serving() as engine:
        for path in ("/v1/completions", "/v1/chat/completions", "/v1/nothing"):
            assert await engine.post(path, CHAT, headers=headers) == (401, {"error": "Unauthorized"})
        async with engine.client.get("/v1/models", headers=headers) as response:
            assert response.status == 401


async def test_unknown_paths_and_methods_are_told() -> None:
    async with serving() as engine:
        async with engine.client.get("/nothing") as response:
            assert (response.status, await response.json()) == (404, {"detail": "Not Found"})
        async with engine.client.get("/v1/completions", headers=KEY) as response:
            assert (response.status, await response.json()) == (405, {"detail": "Method Not Allowed"})
        async with engine.client.get("/standin/intervals") as response:
            assert response.status == 404


async def test_models_and_adapters_are_listed_and_answer() -> None:
    async with serving("--enable-lora", "--lora-modules", "sql=/models/sql", "--max-model-len", "4096") as engine:
        async with engine.client.get("/v1/models", headers=KEY) as response:
            models = {model["id"]: model for model in (await response.json())["data"]}
        assert (models[MODEL]["root"], models[MODEL]["parent"], models[MODEL]["max_model_len"]) == (
            "org/model",
            None,
            4096,
        )
        assert (models["sql"]["root"], models["sql"]["parent"]) == ("/models/sql", MODEL)
        status, answer = await engine.post("/v1/completions", {"model": "sql", "prompt": "a", "temperature": 0})
        assert (status, answer["model"]) == (200, "sql")
        samples = await engine.metrics()
        assert any(name.startswith("vllm:lora_requests_info,max_lora=1") for name in samples)


async def test_an_unknown_model_is_not_found() -> None:
    async with serving() as engine:
        status, answer = await engine.post("/v1/chat/completions", {**CHAT, "model": "gpt"})
        message = f"The model `gpt` does not exist. Valid aliases: {MODEL}."
        assert status == 404
        assert answer == {"error": {"message": message, "type": "NotFoundError", "param": "model", "code": 404}}


async def test_a_root_path_is_served_with_and_without_it() -> None:
    async with serving("--root-path", "/engine") as engine:
        for prefix in ("", "/engine"):
            async with engine.client.get(f"{prefix}/v1/models") as response:
                assert response.status == 401
            status, _unused = await engine.post(f"{prefix}/v1/chat/completions", {**CHAT, "max_tokens": 1})
            assert status == 200


async def test_request_ids_are_echoed_only_if_asked_for() -> None:
    headers = {**KEY, "X-Request-Id": "abc"}
    for arguments, echoed in (((), None), (("--enable-request-id-headers",), "abc")):
        async with serving(*arguments) as engine:
            for stream in (False, True):
                document = {**CHAT, "max_tokens": 1, "stream": stream}
                async with engine.client.post("/v1/chat/completions", json=document, headers=headers) as response:
                    assert response.headers.get("X-Request-Id") == echoed
                    assert b"chatcmpl-abc" in await response.read()
    async with serving("--enable-request-id-headers") as engine, engine.client.get("/version") as response:
        assert re.fullmatch("[0-9a-f]{32}", response.headers["X-Request-Id"])


# Answers.


async def test_a_chat_has_vllms_form_and_is_the_same_streamed_or_not() -> None:
    async with serving() as engine:
        status, whole = await engine.post("/v1/chat/completions", {**CHAT, "max_tokens": 20})
        assert status == 200
        assert list(whole) == [
            *("id", "object", "created", "model", "choices", "service_tier", "system_fingerprint", "usage"),
            *(
                "prompt_logprobs",
                "prompt_token_ids",
                "prompt_text",
                "kv_transfer_params",
                "ec_transfer_params",
                "metrics",
            ),
        ]
        choice = whole["choices"][0]
        assert list(choice) == [
            *("index", "message", "logprobs", "finish_reason", "stop_reason", "token_ids", "routed_experts")
        ]
        assert (choice["finish_reason"], choice["stop_reason"]) == ("length", None)
        usage = whole["usage"]
        assert usage["completion_tokens"] == 20
        assert usage["total_tokens"] == usage["prompt_tokens"] + 20

        options = {"stream_options": {"include_usage": True}}
        events = await engine.events("/v1/chat/completions", {**CHAT, **options, "max_tokens": 20})
        assert events[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
        assert "".join(event["choices"][0]["delta"]["content"] for event in events[:-1]) == choice["message"]["content"]
        assert [event["choices"][0]["finish_reason"] for event in events[:-1]] == [None] * 20 + ["length"]
        assert events[-1]["choices"] == []
        assert events[-1]["usage"] == {
            key: usage[key] for key in ("prompt_tokens", "total_tokens", "completion_tokens")
        }
        assert all("usage" not in event for event in events[:-1])
        assert len({event["id"] for event in events}) == 1
        assert list(events[5]) == ["id", "object", "created", "model", "choices"]
        assert list(events[5]["choices"][0]) == ["index", "delta", "logprobs", "finish_reason", "token_ids"]


async def test_a_completion_has_vllms_form_and_is_the_same_streamed_or_not() -> None:
    document = {"model": MODEL, "prompt": "Once upon a time", "temperature": 0}
    async with serving() as engine:
        status, whole = await engine.post("/v1/completions", document)
        assert status == 200
        choice = whole["choices"][0]
        assert list(choice) == [
            *("index", "text", "logprobs", "finish_reason", "stop_reason", "token_ids"),
            *("prompt_logprobs", "prompt_token_ids", "routed_experts"),
        ]
        assert whole["usage"]["completion_tokens"] == 16
        events = await engine.events("/v1/completions", document)
        assert "".join(event["choices"][0]["text"] for event in events) == choice["text"]
        assert list(events[5]["choices"][0]) == [
            *("index", "text", "logprobs", "finish_reason", "stop_reason", "prompt_token_ids", "token_ids")
        ]


async def test_all_engines_give_the_same_answer_at_temperature_zero_and_seeds_are_kept() -> None:
    texts: list[str] = []
    for card in ("a100-80g", "l40s"):
        async with serving(STANDIN_CARD=card) as engine:
            seeded = {**CHAT, "temperature": 1, "seed": 7}
            for document in (CHAT, seeded):
                _unused, answer = await engine.post("/v1/chat/completions", document)
                texts += [answer["choices"][0]["message"]["content"]]
            free = {**CHAT, "temperature": 1}
            some = [await engine.post("/v1/chat/completions", free) for _unused in range(2)]
            assert some[0][1]["choices"][0]["message"] != some[1][1]["choices"][0]["message"]
    assert texts[:2] == texts[2:]
    assert texts[0] != texts[1]


async def test_an_answer_ends_by_itself_unless_it_must_not() -> None:
    async with serving() as engine:
        _unused, short = await engine.post("/v1/chat/completions", CHAT)
        tokens = short["usage"]["completion_tokens"]
        assert short["choices"][0]["finish_reason"] == "stop"
        assert short["choices"][0]["message"]["content"]
        _unused, longer = await engine.post("/v1/chat/completions", {**CHAT, "min_tokens": tokens + 5})
        assert longer["usage"]["completion_tokens"] >= tokens + 5
        _unused, longest = await engine.post(
            "/v1/chat/completions", {**CHAT, "ignore_eos": True, "max_tokens": tokens + 50}
        )
        assert longest["usage"]["completion_tokens"] == tokens + 50
        assert longest["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("include", [False, True])
async def test_a_stop_string_ends_the_answer(stream: bool, include: bool) -> None:
    async with serving() as engine:
        _unused, whole = await engine.post("/v1/chat/completions", CHAT)
        text = whole["choices"][0]["message"]["content"]
        stop = text[20:27]  # Across the border of two tokens.
        document = {**CHAT, "stop": ["nowhere", stop], "include_stop_str_in_output": include}
        expected = text[: text.index(stop) + (len(stop) if include else 0)]
        if stream:
            events = await engine.events("/v1/chat/completions", document)
            shown = "".join(event["choices"][0]["delta"]["content"] for event in events)
            choice = events[-1]["choices"][0]
        else:
            choice = (await engine.post("/v1/chat/completions", document))[1]["choices"][0]
            shown = choice["message"]["content"]
        assert shown == expected
        assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", stop)


async def test_token_prompts_count_as_tokenize_says_and_detokenize_gives_the_text_back() -> None:
    prompt = "A prompt, as tokens: 123 über."
    async with serving() as engine:
        _unused, tokens = await engine.post("/tokenize", {"model": MODEL, "prompt": prompt, "return_token_strs": True})
        assert tokens["count"] == len(tokens["tokens"]) == len(tokens["token_strs"])
        assert await engine.post("/detokenize", {"tokens": tokens["tokens"]}) == (200, {"prompt": prompt})
        answers = [
            (await engine.post("/v1/completions", {"prompt": form, "temperature": 0}))[1]
            for form in (prompt, tokens["tokens"])
        ]
        assert answers[0]["choices"][0]["text"] == answers[1]["choices"][0]["text"]
        assert answers[0]["usage"] == answers[1]["usage"]
        assert answers[0]["usage"]["prompt_tokens"] == tokens["count"]
        _unused, chat = await engine.post("/tokenize", {"messages": CHAT["messages"]})
        _unused, answer = await engine.post("/v1/chat/completions", {**CHAT, "max_tokens": 1})
        assert answer["usage"]["prompt_tokens"] == chat["count"]
        status, _unused = await engine.post("/v1/completions", {"prompt": [10**9]})
        assert status == 400


async def test_lists_of_prompts_and_n_give_one_choice_each() -> None:
    async with serving() as engine:
        document = {"prompt": ["one", "two"], "n": 2, "seed": 1, "max_tokens": 3, "echo": True}
        _unused, answer = await engine.post("/v1/completions", document)
        assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
        assert [choice["text"][:3] for choice in answer["choices"]] == ["one", "one", "two", "two"]
        assert answer["usage"]["completion_tokens"] == 12
        events = await engine.events("/v1/completions", document)
        texts = ["", "", "", ""]
        for event in events:
            texts[event["choices"][0]["index"]] += event["choices"][0]["text"]
        assert texts == [choice["text"] for choice in answer["choices"]]
        chat = {**CHAT, "temperature": 1, "n": 2, "max_tokens": 2}
        events = await engine.events("/v1/chat/completions", chat)
        assert [event["choices"][0]["delta"].get("role") for event in events[:3]] == ["assistant", "assistant", None]


async def test_echo_without_tokens_gives_the_prompt_alone() -> None:
    async with serving() as engine:
        _unused, answer = await engine.post(
            "/v1/completions", {"prompt": "Say it again", "echo": True, "max_tokens": 0}
        )
        assert answer["choices"][0]["text"] == "Say it again"


async def test_logprobs_have_the_form_of_each_route() -> None:
    async with serving() as engine:
        document = {"prompt": "a", "temperature": 0, "logprobs": 3, "max_tokens": 4}
        _unused, answer = await engine.post("/v1/completions", document)
        logprobs = answer["choices"][0]["logprobs"]
        assert "".join(logprobs["tokens"]) == answer["choices"][0]["text"]
        assert logprobs["text_offset"][0] == 0
        assert all(logprob < 0 for logprob in logprobs["token_logprobs"])
        assert all(len(top) == 3 and max(top.values()) <= 0 for top in logprobs["top_logprobs"])
        events = await engine.events("/v1/completions", document)
        assert [event["choices"][0]["logprobs"]["text_offset"][0] for event in events] == logprobs["text_offset"]
        _unused, answer = await engine.post(
            "/v1/chat/completions", {**CHAT, "logprobs": True, "top_logprobs": 2, "max_tokens": 2}
        )
        content = answer["choices"][0]["logprobs"]["content"]
        assert len(content) == 2
        assert bytes(content[0]["bytes"]).decode() == content[0]["token"] == content[0]["top_logprobs"][0]["token"]


async def test_continuous_usage_and_token_ids_are_in_every_chunk() -> None:
    async with serving() as engine:
        options = {"stream_options": {"include_usage": True, "continuous_usage_stats": True}, "return_token_ids": True}
        events = await engine.events("/v1/completions", {"prompt": "abc", "max_tokens": 5, "temperature": 0, **options})
        assert [event["usage"]["completion_tokens"] for event in events] == [1, 2, 3, 4, 5, 5]
        assert all(len(event["choices"][0]["token_ids"]) == 1 for event in events[:-1])
        assert events[0]["choices"][0]["prompt_token_ids"]
        assert events[1]["choices"][0]["prompt_token_ids"] is None


async def test_a_stream_interval_gathers_tokens() -> None:
    async with serving("--stream-interval", "4") as engine:
        events = await engine.events(
            "/v1/completions", {"prompt": "abc", "max_tokens": 10, "ignore_eos": True, "temperature": 0}
        )
        _unused, whole = await engine.post(
            "/v1/completions", {"prompt": "abc", "max_tokens": 10, "ignore_eos": True, "temperature": 0}
        )
        assert len(events) == 4  # 1, 4, 4 and the last one.
        assert "".join(event["choices"][0]["text"] for event in events) == whole["choices"][0]["text"]


async def test_a_slow_reader_loses_nothing() -> None:
    async with serving(scale="0.0001") as engine:
        document = {**CHAT, "ignore_eos": True, "max_tokens": 6000, "stream": True}
        host, port = engine.client.server.host, engine.client.server.port
        assert port is not None
        reader, writer = await asyncio.open_connection(host, port, limit=1024)
        writer.write(raw_request("/v1/chat/completions", document, "1.0"))
        await engine.until(lambda samples: samples["vllm:request_success_total,finished_reason=length"] == 1)
        body = (await reader.read()).decode()
        while chunk := await reader.read(65536):
            body += chunk.decode()
        events = [
            json.loads(line[6:]) for line in body.split("\r\n\r\n", 1)[1].split("\n\n") if line.startswith("data: {")
        ]
        shown = "".join(event["choices"][0]["delta"]["content"] for event in events)
        _unused, whole = await engine.post("/v1/chat/completions", {**document, "stream": False})
        assert shown == whole["choices"][0]["message"]["content"]
        writer.close()


async def test_a_stream_has_one_frame_an_event_and_leaves_the_connection_open() -> None:
    async with serving() as engine:
        reader, writer = await asyncio.open_connection(engine.client.server.host, engine.client.server.port)
        for _unused in range(2):
            writer.write(raw_request("/v1/chat/completions", {**CHAT, "max_tokens": 3, "stream": True}))
            head = await reader.readuntil(b"\r\n\r\n")
            assert b"Transfer-Encoding: chunked" in head
            frames = []
            while length := int(await reader.readuntil(b"\r\n"), 16):
                frames.append((await reader.readexactly(length + 2)).decode())
            assert await reader.readexactly(2) == b"\r\n"
            assert len(frames) == 5  # The role, three tokens, the mark of the end.
            assert all(re.fullmatch(r"data: [^\n]+\n\n\r\n", frame) for frame in frames)
            assert frames[-1] == "data: [DONE]\n\n\r\n"
        writer.close()


async def test_http_1_0_streams_without_chunked_encoding() -> None:
    async with serving() as engine:
        reader, writer = await asyncio.open_connection(engine.client.server.host, engine.client.server.port)
        writer.write(raw_request("/v1/chat/completions", {**CHAT, "max_tokens": 2, "stream": True}, "1.0"))
        head, body = (await reader.read()).split(b"\r\n\r\n", 1)
        assert b"chunked" not in head.lower()
        assert body.startswith(b"data: {")
        assert body.endswith(b"data: [DONE]\n\n")
        writer.close()


def raw_request(path: str, document: Any, version: str = "1.1") -> bytes:
    body = json.dumps(document).encode()
    return (
        f"POST {path} HTTP/{version}\r\nHost: engine\r\nAuthorization: Bearer secret\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    ).encode() + body


# Load.


async def test_metrics_have_vllms_names_types_and_labels() -> None:
    async with serving() as engine:
        await engine.post("/v1/completions", {"prompt": "a"})
        await engine.events("/v1/chat/completions", CHAT)
        async with engine.client.get("/metrics") as response:
            assert response.headers["Content-Type"].startswith("text/plain; version=")
            text = await response.text()
    types = dict(re.findall(r"^# TYPE (\S+) (\S+)$", text, re.MULTILINE))
    assert {name: fact["type"] for name, fact in FACTS.items()} == {
        name: kind for name, kind in types.items() if name != "process_threads"
    }
    labels: dict[str, set[str]] = {}
    for name, found in re.findall(r"^([a-z0-9_:]+)(?:\{([^}]*)\})? ", text, re.MULTILINE):
        base = name if name in types else re.sub("_(bucket|sum|count)$", "", name)
        labels.setdefault(base, set()).update(set(re.findall(r'(\w+)="', found)) - {"le"})
    for name, fact in FACTS.items():
        assert labels[name] == set(fact["labels"] or []), name
    assert 'engine="0"' in text
    assert f'model_name="{MODEL}"' in text


async def test_metrics_count_what_happened() -> None:
    async with serving() as engine:
        for _unused in range(2):
            await engine.post("/v1/chat/completions", {**CHAT, "max_tokens": 40, "ignore_eos": True})
        await engine.post("/v1/chat/completions", {**CHAT, "model": "none"})
        samples = await engine.metrics()
        prompt = samples["vllm:prompt_tokens_total"] / 2
        cached = prompt - (prompt - 1) % 16 - 1
        assert samples["vllm:generation_tokens_total"] == 80
        assert samples["vllm:request_success_total,finished_reason=length"] == 2
        assert samples["vllm:prefix_cache_queries_total"] == 2 * prompt
        assert samples["vllm:prefix_cache_hits_total"] == cached > 0
        assert samples["vllm:prompt_tokens_by_source_total,source=local_cache_hit"] == cached
        assert samples["vllm:prompt_tokens_by_source_total,source=local_compute"] == 2 * prompt - cached
        assert samples["vllm:time_to_first_token_seconds_count"] == 2
        assert samples["vllm:inter_token_latency_seconds_count"] == 78
        assert samples["vllm:e2e_request_latency_seconds_count"] == 2
        parts = ("request_queue_time", "request_prefill_time", "request_decode_time")
        assert samples["vllm:e2e_request_latency_seconds_sum"] == pytest.approx(
            sum(samples[f"vllm:{part}_seconds_sum"] for part in parts)
        )
        assert samples["vllm:inter_token_latency_seconds_sum"] == pytest.approx(
            samples["vllm:request_decode_time_seconds_sum"]
        )
        assert samples["vllm:kv_cache_usage_perc"] == samples["vllm:num_requests_running"] == 0
        assert samples["http_requests_total,handler=/v1/chat/completions,method=POST,status=2xx"] == 2
        assert samples["http_requests_total,handler=/v1/chat/completions,method=POST,status=4xx"] == 1
        assert not any("handler=/metrics" in name for name in samples)


SLOW = '{"slow": {"factor": 30}}'
"""Makes a step of a third of a second: what is to be looked at meanwhile stays until the fault is switched off."""


async def test_over_max_num_seqs_requests_wait_and_are_seen_waiting(tmp_path: Path) -> None:
    path = tmp_path / "faults.json"
    path.write_text(SLOW)
    async with serving("--max-num-seqs", "2", scale="1", faults=path) as engine:
        await engine.until_fault("slow")
        document = {**CHAT, "ignore_eos": True, "max_tokens": 60}
        asked = [asyncio.ensure_future(engine.post("/v1/chat/completions", document)) for _unused in range(5)]
        samples = await engine.until(lambda samples: samples["vllm:num_requests_waiting"] == 3)
        assert samples["vllm:num_requests_running"] == 2
        assert samples["vllm:num_requests_waiting_by_reason,reason=capacity"] == 3
        assert samples["vllm:kv_cache_usage_perc"] > 0
        path.unlink()
        assert {status for status, _unused in await asyncio.gather(*asked)} == {200}
        samples = await engine.metrics()
        assert samples["vllm:request_queue_time_seconds_sum"] > samples["vllm:request_prefill_time_seconds_sum"]


async def test_out_of_blocks_a_request_is_preempted_and_still_answered_the_same() -> None:
    arguments = ("--num-gpu-blocks-override", "12", "--max-model-len", "160", "--no-enable-prefix-caching")
    document = {**CHAT, "ignore_eos": True, "max_tokens": 100}
    async with serving(*arguments) as engine:
        _unused, alone = await engine.post("/v1/chat/completions", document)
        answers = await asyncio.gather(*(engine.post("/v1/chat/completions", document) for _unused in range(3)))
        assert all(answer["choices"] == alone["choices"] for _unused, answer in answers)
        samples = await engine.metrics()
        assert samples["vllm:num_preemptions_total"] > 0
        assert samples["vllm:request_num_preemptions_sum"] == samples["vllm:num_preemptions_total"]


async def test_a_full_queue_is_told_with_503(tmp_path: Path) -> None:
    path = tmp_path / "faults.json"
    path.write_text(SLOW)
    async with serving("--max-num-queued-reqs", "1", scale="1", faults=path) as engine:
        await engine.until_fault("slow")
        document = {**CHAT, "ignore_eos": True, "max_tokens": 60}
        first = asyncio.ensure_future(engine.post("/v1/chat/completions", document))
        await engine.until(lambda samples: samples["vllm:num_requests_running"] == 1)
        for stream in (False, True):
            status, answer = await engine.post("/v1/chat/completions", {**CHAT, "stream": stream})
            assert (status, answer["error"]["type"]) == (503, "Service Unavailable")
        path.unlink()
        assert (await first)[0] == 200
        samples = await engine.metrics()
        assert samples["vllm:admission_rejections_total,reason=max_num_queued_reqs"] == 2


@pytest.mark.parametrize("state", ["streaming", "not streaming", "queued"])
async def test_a_client_that_leaves_frees_its_slot_and_blocks_within_a_second(state: str, tmp_path: Path) -> None:
    path = tmp_path / "faults.json"
    async with serving("--max-num-seqs", "1", scale="1", faults=path) as engine:
        stay: asyncio.Future[tuple[int, Any]] | None = None
        if state == "queued":
            path.write_text(SLOW)
            await engine.until_fault("slow")
            stay = asyncio.ensure_future(
                engine.post("/v1/chat/completions", {**CHAT, "ignore_eos": True, "max_tokens": 100})
            )
            await engine.until(lambda samples: samples["vllm:num_requests_running"] == 1)
        document = {**CHAT, "ignore_eos": True, "stream": state == "streaming"}  # as long as the context: minutes
        gauge = "vllm:num_requests_waiting" if state == "queued" else "vllm:num_requests_running"
        seconds: list[float] = []
        # A machine that stands still for a second is no fault of the engine: one time of three has to be short.
        while len(seconds) < 3 and min(seconds, default=1.0) >= 1:
            reader, writer = await asyncio.open_connection(engine.client.server.host, engine.client.server.port)
            writer.write(raw_request("/v1/chat/completions", document))
            await engine.until(lambda samples: samples[gauge] == 1)
            if state == "streaming":
                await reader.readuntil(b'"content":" ')
            writer.close()
            left = time.monotonic()
            samples = await engine.until(lambda samples: samples[gauge] == 0)
            seconds.append(time.monotonic() - left)
            assert samples["vllm:request_success_total,finished_reason=abort"] == len(seconds)
        assert min(seconds) < 1
        path.unlink(missing_ok=True)
        if stay is not None:
            assert (await stay)[0] == 200
        samples = await engine.metrics()
        assert samples["vllm:kv_cache_usage_perc"] == 0


async def test_the_trace_tells_the_times_between_chunks() -> None:
    async with serving(scale="1", STANDIN_TRACE="1") as engine:
        medians: list[float] = []
        # A step of the card takes 10 ms. On a machine that stands still again and again the engine makes up for it with
        # shorter ones: one time of three has to be undisturbed.
        while len(medians) < 3 and max(medians, default=0.0) <= 8:
            before = time.time()
            await engine.events("/v1/chat/completions", {**CHAT, "ignore_eos": True, "max_tokens": 30})
            milliseconds = (time.time() - before) * 1000
            async with engine.client.get("/standin/intervals", params={"since": str(before)}) as response:
                found = await response.json()
            assert found["count"] == 31  # The role, thirty tokens, and the mark of the end.
            assert 8 < found["max"] <= milliseconds
            assert found["p50"] <= milliseconds / 15  # half of the intervals are no shorter than the median
            medians.append(found["p50"])
        assert max(medians) > 8
        async with engine.client.get("/standin/intervals", params={"since": str(time.time())}) as response:
            assert (await response.json())["count"] == 0
        async with engine.client.get("/standin/intervals", params={"since": "yesterday"}) as response:
            assert response.status == 400


# Faults.


async def test_a_hung_engine_is_healthy_and_answers_when_the_fault_is_over(tmp_path: Path) -> None:
    path = tmp_path / "faults.json"
    async with serving(faults=path) as engine:
        path.write_text('{"hang": {}}')
        await engine.until_fault("hang")
        asked = asyncio.ensure_future(engine.post("/v1/chat/completions", CHAT))
        samples = await engine.until(lambda samples: samples["vllm:num_requests_waiting"] == 1)
        async with engine.client.get("/health") as response:
            assert response.status == 200
        await asyncio.sleep(0.3)
        assert (await engine.metrics())["vllm:generation_tokens_total"] == samples["vllm:generation_tokens_total"]
        assert not asked.done()
        path.unlink()
        assert (await asyncio.wait_for(asked, PATIENCE))[0] == 200


async def test_a_hang_ends_by_itself_at_its_time(tmp_path: Path) -> None:
    path = tmp_path / "faults.json"
    async with serving(faults=path) as engine:
        end = time.time() + 1
        path.write_text(json.dumps({"hang": {"until": end}}))
        engine.faults.refresh()  # not left to the engine, which may come to it only after the end
        assert (await asyncio.wait_for(engine.post("/v1/chat/completions", CHAT), PATIENCE))[0] == 200
        assert time.time() >= end


async def test_a_client_that_leaves_a_hung_engine_is_forgotten(tmp_path: Path) -> None:
    path = tmp_path / "faults.json"
    path.write_text('{"hang": {}}')
    async with serving(faults=path) as engine:
        await engine.until_fault("hang")
        _reader, writer = await asyncio.open_connection(engine.client.server.host, engine.client.server.port)
        writer.write(raw_request("/v1/chat/completions", CHAT))
        await engine.until(lambda samples: samples["vllm:num_requests_waiting"] == 1)
        writer.close()
        await engine.until(lambda samples: samples["vllm:num_requests_waiting"] == 0)


async def test_garbage_has_status_200_and_another_text(tmp_path: Path) -> None:
    path = tmp_path / "faults.json"
    async with serving(faults=path) as engine:
        _unused, good = await engine.post("/v1/chat/completions", CHAT)
        path.write_text('{"garbage": {}}')
        await engine.until_fault("garbage")
        status, bad = await engine.post("/v1/chat/completions", CHAT)
        assert status == 200
        assert bad["choices"][0]["message"]["content"] != good["choices"][0]["message"]["content"]


async def test_a_slow_engine_takes_longer(tmp_path: Path) -> None:
    path = tmp_path / "faults.json"
    document = {**CHAT, "max_tokens": 10, "ignore_eos": True}
    async with serving(faults=path, scale="1") as engine:

        async def seconds() -> float:
            before = (await engine.metrics())["vllm:e2e_request_latency_seconds_sum"]
            await engine.post("/v1/chat/completions", document)
            return (await engine.metrics())["vllm:e2e_request_latency_seconds_sum"] - before

        fast = min([await seconds() for _unused in range(3)])  # a busy machine makes some slow, hardly all
        path.write_text('{"slow": {"factor": 6}}')
        await engine.until_fault("slow")
        assert await seconds() > 3 * fast


async def test_a_body_over_the_limit_and_one_that_cannot_be_unpacked_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("standin_engine.server.MAX_BODY_BYTES", 1000)
    async with serving() as engine:
        status, answer = await engine.post("/v1/completions", {"prompt": "x" * 1000})
        assert (status, answer) == (413, {"detail": "Request Entity Too Large"})
        headers = {**KEY, "Content-Type": "application/json", "Content-Encoding": "gzip"}
        async with engine.client.post("/v1/completions", data=b"not packed", headers=headers) as response:
            assert response.status == 400
            assert (await response.json())["error"]["type"] == "Bad Request"
            assert response.headers["Connection"] == "close"
        assert (await engine.post("/v1/chat/completions", {**CHAT, "max_tokens": 1}))[0] == 200


async def test_a_refused_body_does_not_end_the_connection() -> None:
    async with serving() as engine, aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=1)) as session:
        url = engine.client.make_url("/v1/chat/completions")
        for body, status in (("{", 400), (json.dumps({**CHAT, "max_tokens": 1}), 200)):
            headers = {**KEY, "Content-Type": "application/json"}
            async with session.post(url, data=body, headers=headers) as response:
                assert response.status == status
