# SPDX-License-Identifier: GPL-3.0-or-later
"""What hostile clients send, and that others do not notice."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.unit.preprocessor import made_tokenizers
from tests.unit.preprocessor.proxy_world import KEY, Gateway, Proxy, chunk, wait_until

HEAD = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {KEY}\r\nContent-Type: application/json\r\n"
LIMITS = {"header_seconds": 1, "body_seconds": 1, "stall_seconds": 1, "connections": 64, "drain_notice_seconds": 0}


@pytest.fixture(scope="module")
def proxy(binary: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Proxy]:
    directory = tmp_path_factory.mktemp("attacked")
    made_tokenizers.write_model(directory / "model", "gpt2_prefix_space", chat_template=made_tokenizers.CHATML)
    gateway = Gateway()
    model = {"name": "m", "directory": str(directory / "model"), "max_model_len": 100000, "completions_as_ids": True}
    running = Proxy(binary, directory / "run", [model], [gateway.port], limits=LIMITS)
    running.gateway = gateway  # type: ignore[attr-defined]
    yield running
    running.close()
    gateway.close()


@pytest.fixture(autouse=True)
def _others_are_served(proxy: Proxy) -> Iterator[None]:
    """Ask for an answer all the time; none may fail or take long, and the process lives on with little memory."""
    ended = threading.Event()
    found: list[tuple[int, float]] = []

    def ask() -> None:
        while not ended.is_set():
            begun = time.monotonic()
            found.append((proxy.chat()[0], time.monotonic() - begun))

    thread = threading.Thread(target=ask)
    thread.start()
    yield
    ended.set()
    thread.join()
    assert {status for status, _seconds in found} == {200}
    assert max(seconds for _status, seconds in found) < 2
    assert proxy.process.poll() is None
    assert proxy.resident_bytes() < 100e6
    wait_until(lambda: proxy.metric("ringmaster_preprocessor_held_bytes") == 0)


def send(proxy: Proxy, *pieces: bytes, pause: float = 0.0) -> bytes:
    """Send bytes and return all that is answered until the other side closes."""
    with socket.create_connection(("127.0.0.1", proxy.port), timeout=15) as connection:
        with contextlib.suppress(OSError):
            for piece in pieces:
                connection.sendall(piece)
                time.sleep(pause)
        answer = b""
        with contextlib.suppress(OSError):
            while more := connection.recv(65536):
                answer += more
        return answer


def status_of(answer: bytes) -> int:
    return int(answer.split(b" ", 2)[1]) if answer else 0


def test_headers_that_never_end(proxy: Proxy) -> None:
    begun = time.monotonic()
    answers: list[bytes] = []
    pieces = [b"POST /v1/completions HTTP/1.1\r\n", *[f"X-{index}: 1\r\n".encode() for index in range(40)]]
    threads = [threading.Thread(target=lambda: answers.append(send(proxy, *pieces, pause=0.2))) for _slow in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {status_of(answer) for answer in answers} <= {0, 408}
    assert time.monotonic() - begun < 12


def test_a_body_that_never_ends(proxy: Proxy) -> None:
    answer = send(proxy, f"{HEAD}Content-Length: 100\r\n\r\n".encode(), *[b"{"] * 30, pause=0.1)
    assert status_of(answer) == 408


def test_a_body_of_a_gigabyte(proxy: Proxy) -> None:
    assert status_of(send(proxy, f"{HEAD}Content-Length: 1000000000\r\n\r\n".encode())) == 413
    block = b"10000\r\n" + b" " * 0x10000 + b"\r\n"
    answer = send(proxy, f"{HEAD}Transfer-Encoding: chunked\r\n\r\n".encode(), *[block] * 200)
    assert status_of(answer) in (0, 413), "a client that goes on sending may not hear why"


@pytest.mark.parametrize("count", [100, 10000])
def test_many_headers(count: int, proxy: Proxy) -> None:
    headers = "".join(f"X-Header-{index}: value\r\n" for index in range(count))
    assert status_of(send(proxy, f"{HEAD}{headers}Content-Length: 2\r\n\r\n{{}}".encode())) in (0, 400, 431)


@pytest.mark.parametrize(
    "tail",
    [
        "Transfer-Encoding: chunked\r\n\r\nzz\r\n{}\r\n0\r\n\r\n",
        "Transfer-Encoding: chunked\r\n\r\n2\r\n{}XX0\r\n\r\n",
        "Transfer-Encoding: chunked\r\n\r\nffffffffffffffffff\r\n{}\r\n0\r\n\r\n",
        "Transfer-Encoding: chunked\r\n\r\n-2\r\n{}\r\n0\r\n\r\n",
        "Transfer-Encoding: gzip\r\n\r\n",
        "Transfer-Encoding: gzip, chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n",
        "Content-Length: 2\r\nContent-Length: 3\r\n\r\n{}",
        "Content-Length: -2\r\n\r\n{}",
        "Content-Length: 2x\r\n\r\n{}",
        "Content-Length : 2\r\n\r\n{}",
        "Content-Type: text/plain\r\nContent-Length: 2\r\n\r\n{}",
        "X-Request-Id: a\r\nX-Request-Id: b\r\nContent-Length: 2\r\n\r\n{}",
        "Content-Encoding: gzip\r\nContent-Length: 2\r\n\r\n{}",
        f"Authorization: Bearer {KEY}\r\nContent-Length: 2\r\n\r\n{{}}",
        "X\x00Y: 1\r\nContent-Length: 2\r\n\r\n{}",
        "X: a\x00b\r\nContent-Length: 2\r\n\r\n{}",
    ],
)
def test_requests_that_are_none(tail: str, proxy: Proxy) -> None:
    proxy.gateway.requests.clear()  # type: ignore[attr-defined]
    answer = send(
        proxy, f"{HEAD.replace('Host: x', 'Host: x' + chr(13) + chr(10) + 'Connection: close')}{tail}".encode("latin-1")
    )
    assert status_of(answer) in (0, 400, 401, 408, 413, 415, 501)
    assert not [request for request in proxy.gateway.requests if request[0] == "/v1/completions"]  # type: ignore[attr-defined]


def test_both_lengths_make_one_request(proxy: Proxy) -> None:
    """Nothing that follows a chunked body may count as a second request."""
    hidden = "GET /v1/models HTTP/1.1\r\nHost: x\r\n\r\n"
    body = f"{len(hidden):x}\r\n{hidden}\r\n0\r\n\r\n"
    answer = send(
        proxy, f"{HEAD}Connection: close\r\nContent-Length: 6\r\nTransfer-Encoding: chunked\r\n\r\n{body}".encode()
    )
    assert answer.count(b"HTTP/1.1") <= 1


@pytest.mark.parametrize(
    "prompt",
    [" " * 200000 + "x", "a" * 200000, "1" * 200000, "\n " * 60000, "!" * 200000, "é" * 40000, "\U0001f600" * 20000],
)
def test_prompts_that_take_long_elsewhere(prompt: str, proxy: Proxy) -> None:
    begun = time.monotonic()
    status, _answer = proxy.post("/tokenize", {"model": "m", "prompt": prompt})
    assert status == 200
    assert time.monotonic() - begun < 5


def test_json_that_is_nested_or_wide(proxy: Proxy) -> None:
    for body in [
        '{"a":' * 40000,
        "[" * 250000,
        '{"x":[' + "0," * 120000 + "0]}",
        '{"model":"m","prompt":' + "[" * 1000 + "]" * 1000 + "}",
    ]:
        assert proxy.ask("POST", "/v1/completions", body.encode())[0] == 400
    names = ",".join(f'"n{index}":0' for index in range(20000))
    assert proxy.ask("POST", "/v1/completions", f'{{{names},"n7":1}}'.encode())[0] == 400


def test_a_client_that_takes_nothing_is_let_go(proxy: Proxy) -> None:
    gateway: Gateway = proxy.gateway  # type: ignore[attr-defined]
    body = json.dumps({"model": "m", "prompt": "x", "stream": True}).encode()
    broken_off = gateway.broken_off
    gateway.streams, gateway.events = ("/v1/completions",), [chunk("x" * 60000) for _event in range(400)]
    with socket.create_connection(("127.0.0.1", proxy.port)) as connection:
        connection.sendall(f"{HEAD}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        wait_until(lambda: gateway.broken_off == broken_off + 1)
    gateway.events = None


@pytest.mark.parametrize(
    "body", [b"", b"\x00" * 100, b"\x16\x03\x01\x02\x00\x01\x00", b"GET", b"\r\n" * 1000, b"A" * 100000]
)
def test_bytes_that_are_no_http(body: bytes, proxy: Proxy) -> None:
    assert status_of(send(proxy, body)) in (0, 400, 414, 431)
