# SPDX-License-Identifier: GPL-3.0-or-later
"""The preprocessor as its clients and the gateways see it."""

from __future__ import annotations

import contextlib
import gzip
import http.client
import json
import shutil
import socket
import threading
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from tests.unit.preprocessor import made_tokenizers
from tests.unit.preprocessor.proxy_world import KEY, Gateway, Proxy, chunk, free_port, salted, text_of, wait_until


@pytest.fixture
def gateway() -> Iterator[Gateway]:
    made = Gateway()
    yield made
    made.close()


@pytest.fixture(scope="module")
def chat_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("chat") / "model"
    made_tokenizers.write_model(directory, "qwen2", chat_template=made_tokenizers.CHATML)
    return directory


@pytest.fixture
def directory(tmp_path: Path, chat_model: Path) -> Path:
    shutil.copytree(chat_model, tmp_path / "model")
    (tmp_path / "words").write_text("# names\nsecret\n敏感\n", encoding="utf-8")
    return tmp_path


@pytest.fixture
def start(binary: Path, directory: Path, gateway: Gateway) -> Iterator[Callable[..., Proxy]]:
    started: list[Proxy] = []

    def run(gateways: list[int | str] | None = None, model: dict[str, Any] | None = None, **settings: Any) -> Proxy:
        served = {
            "name": "m",
            "directory": str(directory / "model"),
            "max_model_len": 100,
            "adapters": ["sql"],
            "block_size": 4,
        }
        models = [{**served, **(model or {})}, {"name": "other", "max_model_len": 50}]
        proxy = Proxy(binary, directory / "run", models, gateways or [gateway.port], **settings)
        started.append(proxy)
        return proxy

    yield run
    for proxy in started:
        proxy.close()


def ids_of_chat(directory: Path, content: str) -> list[int]:
    text = f"<|im_start|>user\n{content}<|im_end|>\n<|im_start|>assistant\n"
    return list(Tokenizer.from_file(str(directory / "model/tokenizer.json")).encode(text, add_special_tokens=False).ids)


def word_list(directory: Path, **more: Any) -> list[dict[str, Any]]:
    return [{"name": "names", "file": str(directory / "words"), **more}]


def test_dispatch_is_told_what_was_found_out(start: Callable[..., Proxy], gateway: Gateway, directory: Path) -> None:
    proxy = start(classes=[{"name": "fast", "prompt_tokens_max": 50}, {"name": "slow"}])
    status, answer = proxy.chat("Hello world", max_tokens=7)
    assert (status, answer["choices"][0]["message"]["content"]) == (200, "fine")
    path, headers, body = gateway.requests[0]
    count = len(ids_of_chat(directory, "Hello world"))
    assert path == "/v1/chat/completions"
    assert headers["x-ringmaster-key-id"] == "team-a"
    assert headers["x-ringmaster-model"] == "m"
    assert headers["x-ringmaster-prompt-tokens"] == str(count)
    assert headers["x-ringmaster-max-tokens"] == "7"
    assert headers["x-ringmaster-class"] == "fast"
    assert len(headers["x-ringmaster-prefix"]) == 16
    assert len(headers["x-ringmaster-prefix-blocks"].split(",")) == count // 4
    assert "authorization" not in headers
    assert json.loads(body)["messages"][0]["content"] == "Hello world"


def test_prompts_with_the_same_beginning_have_the_same_hashes(start: Callable[..., Proxy], gateway: Gateway) -> None:
    proxy = start(affinity_tokens=8)
    for content, model in [
        ("one two three four five", "m"),
        ("one two three four six", "m"),
        ("one two three four six", "sql"),
    ]:
        proxy.chat(content, model=model)
    first, second, adapter = (headers for _path, headers, _body in gateway.requests)
    assert first["x-ringmaster-prefix"] == second["x-ringmaster-prefix"] != adapter["x-ringmaster-prefix"]
    assert first["x-ringmaster-prefix-blocks"] != second["x-ringmaster-prefix-blocks"]
    assert "x-ringmaster-adapter" not in first
    assert adapter["x-ringmaster-adapter"] == adapter["x-ringmaster-model"] == "sql"


def test_only_some_headers_pass(start: Callable[..., Proxy], gateway: Gateway) -> None:
    proxy = start()
    body = {"model": "m", "messages": [{"role": "user", "content": "x"}]}
    sent = {
        "X_Ringmaster_Key_Id": "admin",
        "X_Other": "1",
        "X_Request_Id": "r-1",
        "Traceparent": "00-a-b-01",
        "Cookie": "c",
    }
    status, headers, _content = proxy.ask("POST", "/v1/chat/completions", body, **sent)
    _path, seen, _body = gateway.requests[0]
    assert status == 200
    assert seen["x-ringmaster-key-id"] == "team-a"
    assert seen["x-request-id"] == headers["x-request-id"] == "r-1"
    assert seen["traceparent"] == "00-a-b-01"
    assert not {"x-other", "cookie", "user-agent", "accept-encoding"} & seen.keys()
    assert "x-secret-of-the-engine" not in headers


@pytest.mark.parametrize(
    ("method", "path", "key", "body", "status", "code"),
    [
        ("POST", "/v1/chat/completions", None, {}, 401, "api_key_missing"),
        ("POST", "/v1/chat/completions", "wrong", {}, 401, "invalid_api_key"),
        ("GET", "/v1/chat/completions", KEY, None, 405, "method_not_supported"),
        ("POST", "/v1/models", KEY, {}, 405, "method_not_supported"),
        ("POST", "/v1/load_lora_adapter", KEY, {}, 404, "unknown_url"),
        ("POST", "/v1/chat/completions/", KEY, {}, 404, "unknown_url"),
        ("GET", "/metrics", KEY, None, 404, "unknown_url"),
        ("POST", "/v1/chat/completions", KEY, {"model": "none", "messages": []}, 404, "model_not_found"),
        ("POST", "/v1/chat/completions", KEY, {"messages": []}, 400, "model_missing"),
        ("POST", "/v1/chat/completions", KEY, {"model": 1}, 400, "invalid_type"),
        ("POST", "/v1/chat/completions", KEY, {"model": "m"}, 400, "missing_required_parameter"),
        ("POST", "/v1/chat/completions", KEY, {"model": "m", "messages": [{"content": "x"}]}, 400, "invalid_type"),
        ("POST", "/v1/chat/completions", KEY, {"model": "m", "messages": [], "stream": "yes"}, 400, "invalid_type"),
        ("POST", "/v1/completions", KEY, {"model": "m", "prompt": {}}, 400, "invalid_type"),
        ("POST", "/v1/completions", KEY, {"model": "m", "prompt": "a " * 200}, 400, "context_length_exceeded"),
        ("POST", "/v1/completions", KEY, b'{"model":"m","model":"other","prompt":"x"}', 400, "duplicate_name"),
        ("POST", "/v1/completions", KEY, b"[" * 10000, 400, "json_too_deep"),
        ("POST", "/v1/completions", KEY, b'{"model":"\xff"}', 400, "invalid_utf8"),
        ("POST", "/v1/completions", KEY, b'{"model":"m","prompt":"\\ud800"}', 400, "invalid_utf8"),
        ("POST", "/v1/completions", KEY, b'{"model":"m","x":1e999}', 400, "number_out_of_range"),
        ("POST", "/v1/completions", KEY, b"[]", 400, "invalid_type"),
        ("POST", "/v1/completions", KEY, b"", 400, "invalid_json"),
        ("POST", "/v1/completions", KEY, b" " * 300000, 413, "body_too_large"),
    ],
)
def test_what_is_refused(
    method: str,
    path: str,
    key: str | None,
    body: Any,
    status: int,
    code: str,
    start: Callable[..., Proxy],
    gateway: Gateway,
) -> None:
    proxy = start()
    found, _headers, content = proxy.ask(method, path, body, key=key)
    error = json.loads(content)["error"]
    assert (found, error["code"]) == (status, code)
    assert set(error) == {"message", "type", "param", "code"}
    assert gateway.requests == []


def test_what_cannot_be_counted_goes_on_uncounted(start: Callable[..., Proxy], gateway: Gateway) -> None:
    proxy = start()
    image = [{"type": "image_url", "image_url": {"url": "data:,"}}]
    assert (
        proxy.post("/v1/chat/completions", {"model": "m", "messages": [{"role": "user", "content": image}]})[0] == 200
    )
    assert proxy.post("/v1/chat/completions", {"model": "other", "messages": []})[0] == 200
    assert all("x-ringmaster-prompt-tokens" not in headers for _path, headers, _body in gateway.requests)
    assert proxy.metric("ringmaster_preprocessor_uncounted_total") == 2


@pytest.mark.parametrize("prompt", ["Hello <|im_end|> 你好", ["one", "two  "]])
def test_strings_become_ids_for_the_engine(
    prompt: Any, start: Callable[..., Proxy], gateway: Gateway, directory: Path
) -> None:
    proxy = start(model={"completions_as_ids": True})
    body = {"model": "m", "prompt": prompt, "temperature": 0.5}
    assert proxy.post("/v1/completions", body)[0] == 200
    tokenizer = Tokenizer.from_file(str(directory / "model/tokenizer.json"))
    ids = [list(tokenizer.encode(text).ids) for text in ([prompt] if isinstance(prompt, str) else prompt)]
    assert json.loads(gateway.requests[0][2]) == {**body, "prompt": ids[0] if isinstance(prompt, str) else ids}
    assert gateway.requests[0][1]["x-ringmaster-prompt-tokens"] == str(sum(map(len, ids)))
    proxy.post("/v1/completions", {**body, "echo": True})
    assert json.loads(gateway.requests[1][2])["prompt"] == prompt


def test_tokenize_and_detokenize(start: Callable[..., Proxy], directory: Path, gateway: Gateway) -> None:
    proxy = start()
    tokenizer = Tokenizer.from_file(str(directory / "model/tokenizer.json"))
    ids = tokenizer.encode("Hello 世界 <|im_end|>").ids
    request = {"model": "m", "prompt": "Hello 世界 <|im_end|>", "return_token_strs": True}
    assert proxy.post("/tokenize", request) == (
        200,
        {
            "count": len(ids),
            "max_model_len": 100,
            "tokens": ids,
            "token_strs": [tokenizer.id_to_token(one) for one in ids],
        },
    )
    chat = proxy.post("/tokenize", {"model": "m", "messages": [{"role": "user", "content": "Hi"}]})[1]
    assert (chat["tokens"], chat["token_strs"]) == (ids_of_chat(directory, "Hi"), None)
    assert proxy.post("/detokenize", {"model": "m", "tokens": ids}) == (200, {"prompt": "Hello 世界 <|im_end|>"})
    assert proxy.post("/detokenize", {"model": "m", "tokens": [-1]})[0] == 400
    assert gateway.requests == []


def test_words_are_replaced_in_whole_answers(start: Callable[..., Proxy], gateway: Gateway, directory: Path) -> None:
    proxy = start(model={"word_lists": ["names"]}, word_lists=word_list(directory))
    gateway.answer = {
        "choices": [{"index": 0, "message": {"content": "a SECRET 很敏感"}, "logprobs": [1], "finish_reason": "stop"}]
    }
    _status, headers, content = proxy.ask("POST", "/v1/chat/completions", {"model": "m", "messages": []})
    assert (
        content.decode()
        == '{"choices":[{"index":0,"message":{"content":"a *** 很***"},"logprobs":null,"finish_reason":"stop"}]}'
    )
    assert headers["content-length"] == str(len(content))
    assert proxy.metric("ringmaster_preprocessor_words_found_total") == 2


def test_words_are_replaced_in_streams(start: Callable[..., Proxy], gateway: Gateway, directory: Path) -> None:
    proxy = start(model={"word_lists": ["names"]}, word_lists=word_list(directory))
    gateway.say("my sec", "ret", " is 敏", "感", " secretary", " sec")
    pieces = [piece for _time, piece in proxy.stream()]
    assert text_of(pieces) == ("my *** is *** secretary sec", "stop")
    assert b"".join(pieces).endswith(b"data: [DONE]\n\n")


def test_a_stopped_answer_ends_the_work_of_the_engine(
    start: Callable[..., Proxy], gateway: Gateway, directory: Path
) -> None:
    proxy = start(model={"word_lists": ["names"]}, word_lists=word_list(directory, action="stop"))
    gateway.events = [chunk("a "), chunk("sec"), chunk("ret "), *[chunk("more ") for _event in range(2000)]]
    gateway.pause = 0.005
    pieces = [piece for _time, piece in proxy.stream()]
    assert text_of(pieces) == ("a ", "content_filter")
    assert b"".join(pieces).endswith(b"data: [DONE]\n\n")
    wait_until(lambda: gateway.broken_off == 1)


@pytest.mark.parametrize("filtered", [False, True])
@pytest.mark.parametrize("coding", ["", "gzip", "zstd"])
def test_each_event_arrives_when_it_was_sent(
    filtered: bool, coding: str, start: Callable[..., Proxy], gateway: Gateway, directory: Path
) -> None:
    proxy = start(model={"word_lists": ["names"] if filtered else []}, word_lists=word_list(directory))
    gateway.say("one ", "two ", "three ")
    gateway.pause = 0.1
    arrivals = list(proxy.stream(headers={"Accept-Encoding": coding} if coding else {}))
    assert len(arrivals) >= 3
    # One event later may have been sent meanwhile, on a machine that is busy; two may not.
    assert arrivals[0][0] < gateway.sent_at[2]
    assert arrivals[1][0] < gateway.sent_at[3]
    whole = b"".join(piece for _time, piece in arrivals)
    if coding == "gzip":
        whole = zlib.decompressobj(31).decompress(whole)
    if coding != "zstd":
        assert text_of(whole) == ("one two three ", "stop")
    else:
        assert whole.startswith(b"\x28\xb5\x2f\xfd")


def test_whole_answers_are_compressed_if_it_is_worth_it(start: Callable[..., Proxy], gateway: Gateway) -> None:
    proxy = start()
    body = {"model": "m", "messages": [{"role": "user", "content": "x"}]}
    gateway.answer = {"choices": [], "text": "word " * 500}
    _status, headers, content = proxy.ask("POST", "/v1/chat/completions", body, Accept_Encoding="gzip")
    assert headers["content-encoding"] == "gzip"
    assert json.loads(gzip.decompress(content)) == gateway.answer
    gateway.answer = {"choices": []}
    _status, headers, content = proxy.ask("POST", "/v1/chat/completions", body, Accept_Encoding="gzip")
    assert "content-encoding" not in headers
    assert content == b'{"choices":[]}'


def test_a_client_that_leaves_is_passed_on(start: Callable[..., Proxy], gateway: Gateway) -> None:
    proxy = start()
    gateway.events = [chunk("more ") for _event in range(2000)]
    gateway.pause = 0.005
    stream = proxy.stream()
    next(stream)
    stream.close()
    wait_until(lambda: gateway.broken_off == 1)
    wait_until(lambda: proxy.metric("ringmaster_preprocessor_requests_open") == 0)


def test_a_request_goes_back_to_the_gateway_that_it_came_from(start: Callable[..., Proxy], gateway: Gateway) -> None:
    other, port = Gateway("127.0.0.2"), free_port()
    start(gateways=[gateway.port, f"127.0.0.2:{other.port}"], listen=f"0.0.0.0:{port}")
    body = json.dumps({"model": "m", "messages": [{"role": "user", "content": "Hello"}]})
    headers = {"Authorization": f"Bearer {KEY}", "Content-Type": "application/json"}

    def ask(source: str) -> int:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20, source_address=(source, 0))
        with contextlib.closing(connection):
            connection.request("POST", "/v1/chat/completions", body, headers)
            return connection.getresponse().status

    assert [ask("127.0.0.2") for _unused in range(4)] == [200] * 4
    assert (len(gateway.requests), len(other.requests)) == (0, 4)
    assert [ask("127.0.0.1") for _unused in range(3)] == [200] * 3
    assert (len(gateway.requests), len(other.requests)) == (3, 4)
    assert [ask("127.0.0.3") for _unused in range(4)] == [200] * 4, "one that is no gateway is served in turn"
    assert (len(gateway.requests), len(other.requests)) == (5, 6)
    other.close()
    assert [ask("127.0.0.2") for _unused in range(3)] == [200] * 3, "and by another one if its own is gone"
    assert len(gateway.requests) == 8


def test_errors_of_gateways_are_passed_on_or_told(start: Callable[..., Proxy], gateway: Gateway) -> None:
    proxy = start(gateways=[free_port(), gateway.port])
    assert [proxy.chat()[0] for _request in range(4)] == [200] * 4
    gateway.status, gateway.answer = 429, {"error": {"code": "busy"}}
    assert proxy.chat() == (429, {"error": {"code": "busy"}})
    gateway.close()
    status, answer = proxy.chat()
    assert (status, answer["error"]["code"]) == (503, "no_gateway")


def test_keys_lists_and_tokenizers_are_reloaded_without_a_failed_request(
    start: Callable[..., Proxy], gateway: Gateway, directory: Path
) -> None:
    proxy = start(model={"word_lists": ["names"]}, word_lists=word_list(directory))
    gateway.answer = {"choices": [{"index": 0, "message": {"content": "fine word"}, "finish_reason": "stop"}]}
    statuses: list[int] = []
    ended = threading.Event()

    def load() -> None:
        while not ended.is_set():
            statuses.append(proxy.chat()[0])

    threads = [threading.Thread(target=load) for _thread in range(3)]
    for thread in threads:
        thread.start()
    proxy.keys.write_text(f"{salted(KEY)} team-a\n{salted('another-key')} team-b\n", encoding="utf-8")
    (directory / "words").write_text("word\n", encoding="utf-8")
    wait_until(lambda: proxy.ask("GET", "/v1/models", key="another-key")[0] == 200)
    wait_until(lambda: proxy.chat()[1]["choices"][0]["message"]["content"] == "fine ***")
    before = proxy.post("/tokenize", {"model": "m", "prompt": "hello 世界"})[1]["tokens"]
    made_tokenizers.write_model(directory / "model", "wordlevel", chat_template=made_tokenizers.CHATML)
    wait_until(lambda: proxy.post("/tokenize", {"model": "m", "prompt": "hello 世界"})[1]["tokens"] != before)
    proxy.keys.write_text("not a key\n", encoding="utf-8")
    wait_until(lambda: proxy.metric("ringmaster_preprocessor_last_reload_failed") == 1)
    ended.set()
    for thread in threads:
        thread.join()
    assert set(statuses) == {200}


def test_a_drain_lets_streams_end(start: Callable[..., Proxy], gateway: Gateway) -> None:
    proxy = start(limits={"drain_notice_seconds": 0.5})
    gateway.events = [chunk(f"{index} ") for index in range(40)] + [chunk("", 0, "stop"), "data: [DONE]\n\n"]
    gateway.pause = 0.05
    stream = proxy.stream()
    pieces = [next(stream)[1]]
    proxy.terminate()
    wait_until(lambda: proxy.ask("GET", "/healthz")[0] == 503)
    assert proxy.ask("GET", "/v1/models")[0] == 200, "requests are still served while the edge takes notice"
    pieces += [piece for _time, piece in stream]
    assert text_of(pieces) == ("".join(f"{index} " for index in range(40)), "stop")
    assert proxy.process.wait(timeout=10) == 0
    with pytest.raises(ConnectionRefusedError):
        proxy.ask("GET", "/healthz")


def request_lines(proxy: Proxy) -> list[dict[str, Any]]:
    """What was logged of requests for answers."""
    lines = [json.loads(line) for line in proxy.log().splitlines()]
    return [line for line in lines if line["event"] == "request" and line["path"].startswith("/v1/chat")]


def test_a_stream_that_the_client_leaves_is_not_logged_as_complete(
    start: Callable[..., Proxy], gateway: Gateway
) -> None:
    proxy = start()
    gateway.say("whole")
    assert [piece for _time, piece in proxy.stream()]
    wait_until(lambda: [line["complete"] for line in request_lines(proxy)] == [True])
    gateway.events, gateway.pause = [chunk("more ")] * 1000, 0.02
    stream = proxy.stream()
    next(stream)
    stream.close()
    wait_until(lambda: [line["complete"] for line in request_lines(proxy)] == [True, False])


@pytest.mark.parametrize("count", [1, 20])
def test_streams_that_a_drain_cuts_have_their_lines(start: Callable[..., Proxy], gateway: Gateway, count: int) -> None:
    proxy = start(limits={"drain_notice_seconds": 0, "drain_seconds": 0.5})
    gateway.events, gateway.pause = [chunk("more ")] * 1000, 0.02
    streams = [proxy.stream() for _unused in range(count)]
    for stream in streams:
        next(stream)
    proxy.terminate()
    assert proxy.process.wait(timeout=10) == 0
    assert [line["complete"] for line in request_lines(proxy)] == [False] * count
    assert json.loads(proxy.log().splitlines()[-count - 1])["event"] == "stopped"


def test_nothing_of_a_request_or_an_answer_is_logged(start: Callable[..., Proxy], gateway: Gateway) -> None:
    proxy = start()
    gateway.answer["choices"][0]["message"]["content"] = "answer-text"
    proxy.chat("prompt-text")
    proxy.ask("POST", "/v1/chat/completions?query-text=1", {"model": "unknown-model-text"}, key="wrong-key-text")
    proxy.ask("POST", "/v1/chat/completions", b'{"prompt-text"', Accept_Encoding="gzip")
    proxy.terminate()
    proxy.process.wait(timeout=10)
    lines = [json.loads(line) for line in proxy.log().splitlines()]
    assert {line["event"] for line in lines} == {"ready", "request", "draining", "stopped"}
    assert not any(secret in proxy.log() for secret in ["-text", KEY])
    requests = [line for line in lines if line["event"] == "request"]
    assert [line["status"] for line in requests] == [200, 401, 400]
    assert requests[0]["key_id"] == "team-a"
    assert requests[0]["prompt_tokens"] > 0


def test_connections_are_used_again(start: Callable[..., Proxy]) -> None:
    proxy = start()
    connection = http.client.HTTPConnection("127.0.0.1", proxy.port, timeout=10)
    body = json.dumps({"model": "m", "messages": []})
    for _request in range(3):
        connection.request(
            "POST", "/v1/chat/completions", body, {"Authorization": f"Bearer {KEY}", "Content-Type": "application/json"}
        )
        response = connection.getresponse()
        response.read()
        assert response.status == 200
    assert proxy.metric("ringmaster_preprocessor_connections") >= 1
    connection.close()


@pytest.mark.parametrize("always", [False, True], ids=["reload", "crash"])
def test_a_gateway_that_closes_a_kept_connection_unanswered_is_asked_once_more(
    start: Callable[..., Proxy], always: bool
) -> None:
    """What a gateway does that reloads; one that does so on a new connection as well has crashed over the request."""
    body = json.dumps({"choices": [{"index": 0, "message": {"content": "fine"}, "finish_reason": "stop"}]}).encode()
    answer = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(body) + body
    requests: list[int] = []
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        for number in range(3):
            try:
                connection = listener.accept()[0]
            except OSError:
                return
            with connection, connection.makefile("rb") as stream:
                while stream.readline().strip():
                    length = 0
                    while line := stream.readline().strip():
                        name, _colon, value = line.partition(b":")
                        length = int(value) if name.lower() == b"content-length" else length
                    stream.read(length)
                    requests.append(number)
                    if len(requests) == 2 or (always and len(requests) > 2):
                        break
                    connection.sendall(answer)

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    proxy = start(gateways=[listener.getsockname()[1]])
    assert proxy.chat()[0] == 200
    assert proxy.chat()[0] == (502 if always else 200)
    assert requests == [0, 0, 1]
    listener.shutdown(socket.SHUT_RDWR)
    listener.close()
    proxy.close()
    thread.join(10)


def test_more_connections_than_there_may_be_are_closed_at_once(start: Callable[..., Proxy]) -> None:
    proxy = start(limits={"connections": 4, "header_seconds": 2})
    with contextlib.ExitStack() as stack:
        opened = [
            stack.enter_context(socket.create_connection(("127.0.0.1", proxy.port), timeout=1))
            for _connection in range(6)
        ]
        wait_until(lambda: proxy.metric("ringmaster_preprocessor_connections_refused_total") >= 2)
        assert opened[5].recv(1) == b""
        # Who says nothing is let go, and there is room again.
        wait_until(proxy.answers)
