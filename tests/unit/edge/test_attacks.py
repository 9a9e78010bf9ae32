# SPDX-License-Identifier: GPL-3.0-or-later
"""What the edge does with clients that are slow, greedy or hostile: raw bytes on a real HAProxy."""

from __future__ import annotations

import contextlib
import json
import re
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.unit.edge.loopback_site import (
    CLIENT_KEY,
    ENGINE_KEY,
    PATIENCE,
    Edge,
    Engine,
    LogReceiver,
    running,
    wait_until,
)
from tests.unit.edge.rendering import engine, members

KEY = f"Authorization: Bearer {CLIENT_KEY}\r\n".encode()
HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: edge\r\n"
BODY = b'{"model": "alpha"}'
LENGTH = b"Content-Length: %d\r\n" % len(BODY)
LIMIT = 8192  # of headers
# What HAProxy refuses before it has a request, it answers with a page of its own there, whatever is configured.
HTML_BELOW_REQUESTS = {"2.6", "3.0"}


class Site:
    """One engine and the edge, with short patience for slow clients."""

    def __init__(self, directory: Path, version: str) -> None:
        self.engine = Engine()
        self.receiver = LogReceiver()
        self.edge = Edge(
            directory,
            version,
            edge_members=members(engine("a.main", "alpha", self.engine.port)),
            edge_scheduler_log=self.receiver.address,
            edge_timeout_headers="400ms",
            edge_timeout_body="400ms",
            edge_source_connections_max=20,
        )
        self.edge.wait_for_engines("pool_alpha", 1)


@pytest.fixture(scope="module")
def whole_site(tmp_path_factory: pytest.TempPathFactory, version: str) -> Iterator[Site]:
    site = Site(tmp_path_factory.mktemp("edge"), version)
    with running(site.edge, site.engine, site.receiver):
        yield site


@pytest.fixture
def site(whole_site: Site) -> Site:
    whole_site.engine.requests.clear()
    return whole_site


def send(edge: Edge, *parts: bytes, pause: float = 0.0) -> bytes:
    """Send bytes, in pieces if wanted, and return all that comes until HAProxy closes or says nothing for a moment."""
    with edge.connected() as client:
        for part in parts:
            with contextlib.suppress(OSError):  # HAProxy may have had enough
                client.sendall(part)
            time.sleep(pause)
        client.settimeout(0.4)
        received = b""
        with contextlib.suppress(TimeoutError, ConnectionError):
            while data := client.recv(65536):
                received += data
        return received


def statuses(received: bytes) -> list[int]:
    """The statuses of all answers in some bytes."""
    return [int(each) for each in re.findall(rb"HTTP/1\.[01] (\d{3}) ", received)]


# Slow ----------------------------------------------------------------------------------------------------------------


def test_headers_that_trickle_are_cut_off_while_others_are_served(site: Site) -> None:
    began = time.monotonic()
    received: dict[int, bytes] = {}
    with contextlib.ExitStack() as open_clients:
        slow = [open_clients.enter_context(site.edge.connected()) for _unused in range(10)]
        for client in slow:
            client.sendall(HEAD + b"X-Slow: ")
            client.settimeout(0.01)
        while len(received) < len(slow):
            for number, client in enumerate(slow):
                if number not in received:
                    with contextlib.suppress(OSError):
                        client.sendall(b"x")
                    with contextlib.suppress(TimeoutError):
                        received[number] = client.recv(65536)
            assert site.edge.complete().status == 200
            assert time.monotonic() - began < PATIENCE
    assert time.monotonic() - began < 3
    assert {tuple(statuses(each)) for each in received.values()} == {(408,)}
    if site.edge.version not in HTML_BELOW_REQUESTS:
        assert all(b'"code": "request_timeout"' in each for each in received.values())


def test_body_that_trickles_never_reaches_an_engine(site: Site) -> None:
    received = send(site.edge, HEAD, KEY, b"Content-Length: 50\r\n\r\n", *[b"x"] * 8, pause=0.1)
    assert statuses(received) == [408]
    assert not site.engine.requests


def test_one_address_cannot_take_all_connections(site: Site) -> None:
    with contextlib.ExitStack() as open_clients:
        accepted = []
        for _unused in range(30):
            with contextlib.suppress(ConnectionError):  # turned away already
                accepted.append(open_clients.enter_context(site.edge.connected()))
        assert len([client for client in accepted if _stays_open(client)]) <= 20
    wait_until(lambda: _served(site.edge), "the address is served again")


def _stays_open(client: socket.socket) -> bool:
    client.settimeout(0.005)
    try:
        return client.recv(1) != b""
    except TimeoutError:
        return True
    except ConnectionError:
        return False


def _served(edge: Edge) -> bool:
    try:
        return edge.complete().status == 200
    except (ConnectionError, OSError):
        return False


# Too much ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        (b"X-Long: " + b"x" * LIMIT + b"\r\n", 431),
        (
            b"".join(
                b"X-Many-%d: xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx\r\n" % n
                for n in range(90)
            ),
            200,
        ),
        (b"".join(b"X-Many-%d: %s\r\n" % (n, b"x" * 100) for n in range(90)), 431),
        (b"".join(b"X-Many-%d: x\r\n" % n for n in range(200)), 400),
        (b"X-Long: " + b"x" * 200_000 + b"\r\n", 400),
        (b"X" * 5000 + b": x\r\n", 400),
    ],
)
def test_flood_of_headers_is_refused(site: Site, headers: bytes, status: int) -> None:
    received = send(site.edge, HEAD + KEY + LENGTH + headers + b"\r\n" + BODY)
    # An answer that comes while the client still sends is lost with the connection.
    assert statuses(received) in ([status], [] if status == 400 else [status])
    assert len(site.engine.requests) == (status == 200)


def test_endless_url_is_refused(site: Site) -> None:
    received = send(site.edge, b"GET /" + b"x" * 300_000 + b" HTTP/1.1\r\nHost: edge\r\n\r\n")
    assert statuses(received) in ([400], [414], [])


@pytest.mark.parametrize("length", [10**7, 2**31, 2**63 - 1])
def test_huge_body_is_refused_before_it_comes(site: Site, length: int) -> None:
    began = time.monotonic()
    received = send(site.edge, HEAD + KEY + b"Content-Length: %d\r\n\r\n" % length)
    assert statuses(received) == [413]
    assert b"body_too_large" in received
    assert time.monotonic() - began < 3
    assert not site.engine.requests


def test_body_without_a_key_is_not_waited_for(site: Site) -> None:
    received = send(site.edge, HEAD + b"Content-Length: 1000\r\n\r\n")
    assert statuses(received) == [401]


# Smuggling -----------------------------------------------------------------------------------------------------------

SMUGGLED = b"POST /v1/completions HTTP/1.1\r\nHost: edge\r\nX-Request-Id: smuggled\r\nContent-Length: 0\r\n\r\n"


@pytest.mark.parametrize(
    "framing",
    [
        # A length and chunks: the chunks count, and what follows them is a request without a key.
        b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        b"Transfer-Encoding: chunked\r\nContent-Length: 300\r\n\r\n0\r\n\r\n",
        b"Content-Length: 0\r\nContent-Length: 300\r\n\r\n",
        b"Content-Length: 0, 300\r\n\r\n",
        b"Content-Length: +0\r\n\r\n",
        b"Content-Length: -1\r\n\r\n",
        b"Content-Length: 0x0\r\n\r\n",
        b"Content-Length:\r\n\r\n",
        b"Content-Length: 99999999999999999999999\r\n\r\n",
        b"Transfer-Encoding: xchunked\r\nContent-Length: 0\r\n\r\n",
        b"Transfer-Encoding: chunked, identity\r\n\r\n0\r\n\r\n",
        b"Transfer-Encoding: chunked\r\nTransfer-Encoding: identity\r\n\r\n0\r\n\r\n",
        b"Transfer-Encoding : chunked\r\nContent-Length: 0\r\n\r\n",
        b"Transfer-Encoding:\x0bchunked\r\nContent-Length: 0\r\n\r\n",
        b" Transfer-Encoding: chunked\r\nContent-Length: 0\r\n\r\n",
        b"X: y\r\n\tContent-Length: 300\r\n\r\n",
        b"X: y\nContent-Length: 0\r\n\r\n",
        b"X: \x00\r\nContent-Length: 0\r\n\r\n",
        b"Transfer-Encoding: chunked\r\n\r\n0;\n\r\n\r\n",
        b"Transfer-Encoding: chunked\r\n\r\n-1\r\n\r\n",
        b"Transfer-Encoding: chunked\r\n\r\nffffffffffffffffff\r\n\r\n",
        b"Transfer-Encoding: chunked\r\n\r\n0\r\nContent-Length: 300\r\n\r\n",
    ],
)
def test_no_request_is_smuggled_past_the_key(site: Site, framing: bytes) -> None:
    received = send(site.edge, HEAD + KEY + framing + SMUGGLED)
    # Whatever the first one is, what is hidden in it is either a request of its own, and without a key, or nothing.
    assert all(status in {200, 400, 401, 408, 411, 413, 501} for status in statuses(received)), received
    assert statuses(received)[1:] in ([], [401], [400])
    assert len(site.engine.requests) <= 1
    for _path, headers, body in site.engine.requests:
        assert headers["x-request-id"] != "smuggled"
        assert not ("content-length" in headers and "transfer-encoding" in headers)
        assert b"smuggled" not in body
    # The engine's connection is still in step.
    assert site.edge.complete().status == 200


def test_pipelined_requests_are_each_checked_and_answered_in_order(site: Site) -> None:
    def request(name: bytes, key: bytes = KEY) -> bytes:
        return HEAD + key + LENGTH + b"X-Request-Id: " + name + b"\r\n\r\n" + BODY

    without_key = request(b"second", b"")
    received = send(site.edge, request(b"first") + without_key + request(b"third"))
    assert statuses(received)[:2] == [200, 401]
    names = re.findall(rb"(?i)x-request-id: (\w+)", received)
    assert names == [b"first", b"second", b"third"][: len(names)]
    assert "second" not in [headers["x-request-id"] for _path, headers, _body in site.engine.requests]


# Odd bytes -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "model",
    [
        b"\xff\xfe",
        b"alpha\xc0\x80",
        b"\xed\xa0\x80",
        b"\\u0000",
        b"\\ud800",
        b"a\x00b",
        b"\xf0\x9f\x92\xa9",
        b"%n%s",
        b"%[env(HOME)]",
    ],
)
def test_bytes_that_are_no_text_neither_match_nor_spoil_the_log(site: Site, model: bytes, version: str) -> None:
    body = b'{"model": "' + model + b'"}'
    length = b"Content-Length: %d\r\n" % len(body)
    request_id = f"odd-{version}-{model.hex()}"
    received = send(site.edge, HEAD + KEY + length + b"X-Request-Id: %s\r\n\r\n" % request_id.encode() + body)
    status = statuses(received)
    assert status[0] in {200, 404}  # what json_query does not take for a name is left to the only engine
    assert site.receiver.line(request_id)["status"] == status[0]
    document = json.loads(received.partition(b"\r\n\r\n")[2].split(b"\r\n0\r\n")[0])
    assert set(document) in ({"error"}, {"port", "bytes"})


@pytest.mark.parametrize(
    "line",
    [
        b"G\xc3\x89T /v1/models HTTP/1.1\r\n",
        b'G"T /v1/models HTTP/1.1\r\n',
        b"GET /v1/mod\x00els HTTP/1.1\r\n",
        b"GET /v1/mod\xff\xfeels HTTP/1.1\r\n",
        b"GET /v1/models\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\nrubbish",
        b"\r\n" * 2000,
        b"",
    ],
)
def test_what_is_no_request_is_refused_and_costs_no_line_its_form(site: Site, line: bytes) -> None:
    received = send(site.edge, line + b"Host: edge\r\n" + KEY + b"\r\n")
    assert not site.engine.requests
    assert all(status in {400, 404, 408, 505} for status in statuses(received)), received
    for each in list(site.receiver.lines().values()):  # raises where a line is no JSON
        assert CLIENT_KEY not in str(each)
    assert site.edge.complete().status == 200


@pytest.mark.parametrize(
    "headers",
    [
        KEY + KEY,
        KEY + b"Authorization: Bearer wrong\r\n",
        b"Authorization: Bearer wrong\r\n" + KEY,
        f"Authorization: Bearer wrong, Bearer {CLIENT_KEY}\r\n".encode(),
        f"Authorization: Bearer {CLIENT_KEY} {CLIENT_KEY}\r\n".encode(),
        f"Proxy-Authorization: Bearer {CLIENT_KEY}\r\n".encode(),
        f"authorization\t: Bearer {CLIENT_KEY}\r\n".encode(),
    ],
)
def test_key_that_is_given_twice_or_oddly_is_none(site: Site, headers: bytes) -> None:
    received = send(site.edge, HEAD + headers + LENGTH + b"\r\n" + BODY)
    assert statuses(received)[0] in {400, 401}
    assert not site.engine.requests


def test_of_headers_given_twice_an_engine_sees_one_meaning(site: Site) -> None:
    twice = b"X-Request-Id: first\r\nX-Request-Id: second\r\nContent-Length: %d\r\n" % len(BODY)
    received = send(site.edge, HEAD + KEY + LENGTH + twice + b"\r\n" + BODY)
    assert statuses(received) in ([200], [400])
    if site.engine.requests:
        [(_path, headers, body)] = site.engine.requests
        assert headers["x-request-id"] in {"first", "second"}
        assert body == BODY


@pytest.mark.parametrize(
    "name",
    [
        b"X-Ringmaster-Key-Id",
        b"x-RINGMASTER-key-id",
        b"X-Ringmaster-Key_Id",
        b"X_Ringmaster_Key_Id",
        b"X-Ringmaster-Error",
    ],
)
def test_header_of_the_sites_own_never_comes_from_a_client(site: Site, name: bytes) -> None:
    received = send(site.edge, HEAD + KEY + LENGTH + name + b": root\r\n\r\n" + BODY)
    assert statuses(received) == [200]
    [(_path, headers, _body)] = site.engine.requests
    assert not [each for each in headers if "ringmaster" in each.lower()]


def test_neither_key_leaves_by_an_answer_or_the_log(site: Site) -> None:
    received = send(site.edge, HEAD + KEY + LENGTH + b"X-Request-Id: clean\r\n\r\n" + BODY)
    line = json.dumps(site.receiver.line("clean"))
    for text in (received.decode(), line, "\n".join(site.edge.journal())):
        assert CLIENT_KEY not in text
        assert ENGINE_KEY not in text
