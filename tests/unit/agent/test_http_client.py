# SPDX-License-Identifier: GPL-3.0-or-later
"""The small HTTP client: whole answers only, over connections that break, lie and never end."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringmaster_agent import http_client
from ringmaster_agent.http_client import AnswerError, Page, PagePoller, parse

bodies = st.binary(max_size=200)
Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


def whole(body: bytes, *headers: bytes) -> bytes:
    head = b"".join(header + b"\r\n" for header in (b"Content-Length: %d" % len(body), *headers))
    return b"HTTP/1.1 200 OK\r\n" + head + b"\r\n" + body


def chunked(pieces: list[bytes], trailer: bytes = b"") -> bytes:
    chunks = b"".join(b"%x;note=1\r\n%b\r\n" % (len(piece), piece) for piece in pieces if piece)
    return b"HTTP/1.1 200 OK\r\ntransfer-encoding: Chunked\r\n\r\n" + chunks + b"0\r\n" + trailer + b"\r\n"


@given(st.lists(bodies, max_size=4), st.booleans(), bodies)
def test_answer_is_there_once_it_is_all_there(pieces: list[bytes], in_chunks: bool, behind: bytes) -> None:
    body = b"".join(pieces)
    data = chunked(pieces, b"Note: x\r\n") if in_chunks else whole(body)
    for end in range(len(data)):
        assert parse(data[:end]) is None
        with pytest.raises(AnswerError):
            parse(data[:end], ended=True)
    assert parse(bytearray(data + behind)) == (200, body, len(data), True)


@given(st.binary(max_size=300))
def test_nothing_makes_it_fail_otherwise(data: bytes) -> None:
    for ended in (False, True):
        for text in (
            data,
            b"HTTP/1.1 200 OK\r\n" + data,
            b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + data,
        ):
            with contextlib.suppress(AnswerError):
                answer = parse(text, ended)
                assert answer is None or answer.consumed <= len(text)


@pytest.mark.parametrize(
    ("data", "kept"),
    [
        (whole(b"x"), True),
        (whole(b"x", b"Connection: close"), False),
        (whole(b"x", b"Connection: Keep-Alive"), True),
        (b"HTTP/1.0" + whole(b"x")[8:], False),
        (b"HTTP/1.1 204 No Content\r\n\r\n", True),
    ],
)
def test_connection_that_is_kept(data: bytes, kept: bool) -> None:
    answer = parse(data)
    assert answer is not None
    assert answer.kept is kept


def test_end_of_the_connection_ends_an_answer_without_a_length() -> None:
    data = b"HTTP/1.1 200 OK\r\n\r\nhello"
    assert parse(data) is None
    assert parse(data, ended=True) == (200, b"hello", len(data), False)


@pytest.mark.parametrize(
    "data",
    [
        b"SSH-2.0-OpenSSH_9.2\r\n\r\n",
        b"HTTP/1.1 abc OK\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nno header\r\n\r\n",
        whole(b"x", b"Content-Length: 2"),
        b"HTTP/1.1 200 OK\r\nContent-Length: -1\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 99999999999\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nxyz\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nfffffff\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nabc\r\n",
        b"x" * http_client.LARGEST_HEAD,
    ],
)
def test_what_is_no_answer_is_refused(data: bytes) -> None:
    with pytest.raises(AnswerError):
        parse(data)


@contextlib.asynccontextmanager
async def poll(serve: Serve, timeout: float = 0.3) -> AsyncIterator[tuple[list[Page | None], list[str]]]:
    """Poll a server every 20 ms; gives the pages and reasons that come."""
    pages: list[Page | None] = []
    reasons: list[str] = []

    def take(page: Page | None, reason: str) -> None:
        pages.append(page)
        reasons.append(reason)

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await serve(reader, writer)
        finally:
            writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    task = asyncio.create_task(PagePoller("127.0.0.1", port, "/metrics", 0.02, timeout, take).run())
    try:
        yield pages, reasons
    finally:
        task.cancel()
        server.close()
        await asyncio.gather(task, return_exceptions=True)
    assert task.cancelled()


async def until(condition: Callable[[], bool]) -> None:
    for _unused in range(2000):
        if condition():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("it did not come")


async def test_one_connection_is_kept() -> None:
    connections = 0

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal connections
        connections += 1
        while request := await reader.readuntil(b"\r\n\r\n"):
            assert request.startswith(b"GET /metrics HTTP/1.1\r\nHost: 127.0.0.1:")
            writer.write(chunked([b"a", b"b"]))

    async with poll(serve) as (pages, reasons):
        await until(lambda: len(pages) >= 5)
    assert set(pages) == {(200, b"ab")}
    assert set(reasons) == {""}
    assert connections == 1


async def test_server_that_closes_after_each_answer_is_no_failure() -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(whole(b"x"))
        await writer.drain()

    async with poll(serve) as (pages, reasons):
        await until(lambda: len(pages) >= 4)
    assert set(reasons) == {""}


async def test_server_that_says_nothing_is_told_and_asked_again() -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await asyncio.sleep(60)

    async with poll(serve, timeout=0.1) as (pages, reasons):
        await until(lambda: len(pages) >= 2)
    assert pages[:2] == [None, None]
    assert reasons[:2] == ["no answer within 0.1 s"] * 2


async def test_answer_that_is_cut_is_none() -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(whole(b"x" * 100)[:-1])
        await writer.drain()

    async with poll(serve) as (pages, reasons):
        await until(lambda: len(pages) >= 1)
    assert pages[0] is None
    assert reasons[0] == "the answer ended before its end"


async def test_page_that_never_ends_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_client, "LARGEST_ANSWER", 10_000)

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
        with contextlib.suppress(ConnectionError):
            while True:
                writer.write(b"x" * 1000)
                await writer.drain()

    async with poll(serve, timeout=20) as (pages, reasons):
        await until(lambda: len(pages) >= 1)
    assert reasons[0] == "the answer is over 10000 bytes"


async def test_nobody_listens() -> None:
    reasons: list[str] = []
    server = await asyncio.start_server(lambda _reader, writer: writer.close(), "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    server.close()
    await server.wait_closed()
    task = asyncio.create_task(
        PagePoller("127.0.0.1", port, "/metrics", 0.02, 1, lambda _page, reason: reasons.append(reason)).run()
    )
    await until(lambda: len(reasons) >= 2)
    task.cancel()
    assert set(reasons) == {"cannot connect: Connection refused"}
