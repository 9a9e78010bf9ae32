# SPDX-License-Identifier: GPL-3.0-or-later
"""The runtime API: its answers, and a real HAProxy's where one is installed."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringmaster_scheduler.control import Control, release
from ringmaster_scheduler.core import Cap, DecisionCore, Settings
from ringmaster_scheduler.domain import Engine, Reading, Request
from ringmaster_scheduler.haproxy import (
    LOOK,
    HaproxyError,
    RuntimeApi,
    ServerRow,
    pool_name,
    split_answers,
    statistics,
    word,
)
from tests.unit.scheduler.fake_haproxy import FakeHaproxy, FakeServer

HAPROXY = shutil.which("haproxy", path=f"{os.environ['PATH']}:/usr/sbin")
INFO = "Name: HAProxy\nPid: 7\nUptime_sec: 3\nUptime: 0d 0h00m03s"
STAT = (
    "# pxname,svname,qcur,qmax,scur,smax,slim,stot,status,weight,act,\n"
    "pool_m,a.main,2,2,5,5,256,9,UP,100,1,\n"
    "pool_m,b.main,,,0,0,256,0,UP 1/2,50,1,\n"
    "pool_m,BACKEND,4,5,5,5,200,9,UP,150,2,"
)


def engine(name: str, model: str = "m") -> Engine:
    return Engine(name, name, "127.0.0.1", 9, "vllm", model, (), "l40s", 256)


def test_statistics() -> None:
    found = statistics(INFO, STAT)
    assert (found.pid, found.uptime, found.waiting) == (7, 3, {"pool_m": 4})
    assert found.servers == [
        ServerRow("pool_m", "a.main", 5, 2, "UP", 100, maxconn=256),
        ServerRow("pool_m", "b.main", 0, 0, "UP", 50, maxconn=256),
    ]


@given(st.text(max_size=200), st.text(max_size=200))
def test_any_answer_is_understood_or_refused(info: str, stat: str) -> None:
    try:
        statistics(info, stat)
    except HaproxyError:
        return


@pytest.mark.parametrize(
    ("text", "count", "answers"),
    [
        ("\n", 1, [""]),
        ("\n\n", 2, ["", ""]),
        ("No such server.\n\n\n", 2, ["No such server.", ""]),
        ("\nServer deleted.\n", 2, ["", "Server deleted."]),
        ("a: 1\nb: 2\n\n# x,y,\n1,2,\n\n", 2, ["a: 1\nb: 2", "# x,y,\n1,2,"]),
    ],
)
def test_answers_of_a_batch(text: str, count: int, answers: list[str]) -> None:
    assert split_answers(text, count) == answers


@pytest.mark.parametrize("text", ["", "half", "a: 1\nb: 2\n"])
def test_answer_that_was_cut(text: str) -> None:
    with pytest.raises(HaproxyError, match="expected 1 answers"):
        split_answers(text, 1)


@pytest.mark.parametrize("text", ["", "a b", "a;shutdown", "a\n", "ä"])
def test_word_that_would_be_another_command(text: str) -> None:
    with pytest.raises(ValueError, match="can't stand in a command"):
        word(text)


def test_name_of_a_pool() -> None:
    assert pool_name("org/Model 7B") == "pool_org_Model_7B"


async def test_socket_that_is_missing_hangs_or_talks_nonsense(tmp_path: Path) -> None:
    api = RuntimeApi(str(tmp_path / "socket"), 0.1)
    with pytest.raises(HaproxyError, match="No such file"):
        await api.run(["show info"])
    haproxy = FakeHaproxy(tmp_path / "socket", hang=True)
    await haproxy.start()
    with pytest.raises(HaproxyError, match=r"no answer within 0\.1 s"):
        await api.run(["show info"])
    await haproxy.stop()


async def test_long_batch_is_split_and_stays_in_order(tmp_path: Path) -> None:
    servers = {f"engine-with-a-long-name-{index:04}": FakeServer() for index in range(500)}
    haproxy = FakeHaproxy(tmp_path / "socket", servers=servers)
    await haproxy.start()
    commands = [f"set maxconn server pool_m/{name} {number + 1}" for number, name in enumerate(servers)]
    assert await RuntimeApi(str(haproxy.path), 2.0).run(commands) == [""] * 500
    assert haproxy.commands == commands
    assert [each.maxconn for each in servers.values()] == list(range(1, 501))
    await haproxy.stop()


class Linked:
    """A core and its control over a fake HAProxy."""

    def __init__(self, directory: Path, *names: str) -> None:
        self.haproxy = FakeHaproxy(directory / "socket", servers={name: FakeServer() for name in names})
        self.core = DecisionCore(Settings(60.0, 0.5, 5))
        self.core.set_engines([engine(name) for name in names])
        self.now = asyncio.get_running_loop().time
        for name in names:
            self.core.record_reading(engine(name), Reading(self.now(), 0, 0))
        self.state_file = directory / "haproxy-servers"
        self.control = Control(
            self.core, RuntimeApi(str(self.haproxy.path), 1.0), 0.01, 0.05, "check inter 1s", 100, str(self.state_file)
        )

    async def __aenter__(self) -> Linked:
        await self.haproxy.start()
        self.control.start(True)
        await self.until(lambda: not self.control.error)
        return self

    async def __aexit__(self, *_unused: object) -> None:
        await self.control.stop()
        await self.haproxy.stop()

    async def until(self, condition: object) -> None:
        deadline = time.monotonic() + 5
        assert callable(condition)
        while not condition():
            assert time.monotonic() < deadline, f"did not come true: {self.haproxy.servers}, {self.control.error}"
            await asyncio.sleep(0.01)


async def test_caps_follow_and_are_wide_again_at_the_end(tmp_path: Path) -> None:
    async with Linked(tmp_path, "a") as linked:
        server = linked.haproxy.servers["a"]
        await linked.until(lambda: server.maxconn == 256)
        for number in range(40):
            linked.core.decide(Request("m", str(number), prompt_tokens=2000), linked.now())
            server.current += number == 0
            linked.control.decided()
        await linked.until(lambda: 1 <= server.maxconn <= 2)
    assert server.maxconn == 256


async def test_new_process_gets_everything_again(tmp_path: Path) -> None:
    async with Linked(tmp_path, "a", "b") as linked:
        linked.core.set_drained(["b"])
        linked.core.set_weight("a", 0.1, linked.now())
        await linked.until(lambda: linked.haproxy.servers["b"].status == "DRAIN")
        await linked.until(lambda: linked.haproxy.servers["a"].weight == 10)
        linked.haproxy.servers = {"a": FakeServer(maxconn=1), "b": FakeServer(maxconn=1)}
        linked.haproxy.pid += 1
        await linked.until(lambda: linked.haproxy.servers["b"].status == "DRAIN")
        await linked.until(lambda: [each.maxconn for each in linked.haproxy.servers.values()] == [256, 1])
        await linked.until(lambda: linked.haproxy.servers["a"].weight == 10)
        linked.core.set_drained([])
        await linked.until(lambda: linked.haproxy.servers["b"].status == "UP")
        await linked.until(lambda: linked.haproxy.servers["b"].maxconn == 256)


async def test_ill_engine_is_not_fed_by_the_queue_and_comes_back(tmp_path: Path) -> None:
    async with Linked(tmp_path, "a", "b") as linked:
        servers = linked.haproxy.servers
        linked.core.record_failure(engine("b"), "hangs", gone=True)
        await linked.until(lambda: (servers["b"].status, servers["b"].maxconn) == ("DRAIN", 1))
        assert (servers["a"].status, servers["a"].maxconn) == ("UP", 256)
        # The last ones are HAProxy's own matter: an empty pool answers nobody.
        linked.core.record_failure(engine("a"), "hangs", gone=True)
        await linked.until(lambda: servers["b"].status == "UP")
        assert servers["a"].status == "UP"
        for name in ("a", "b"):
            linked.core.record_reading(engine(name), Reading(linked.now(), 0, 0))
        await linked.until(lambda: [each.maxconn for each in servers.values()] == [256, 256])


async def test_ill_engine_is_let_in_again_when_the_scheduler_ends(tmp_path: Path) -> None:
    async with Linked(tmp_path, "a", "b", "c") as linked:
        servers = linked.haproxy.servers
        linked.core.record_failure(engine("b"), "hangs", gone=True)
        linked.core.set_drained(["c"])
        await linked.until(lambda: (servers["b"].status, servers["c"].status) == ("DRAIN", "DRAIN"))
    assert [(each.status, each.maxconn) for each in servers.values()] == [("UP", 256), ("UP", 256), ("DRAIN", 256)]


async def test_engine_that_is_out_is_drained_even_as_the_last(tmp_path: Path) -> None:
    async with Linked(tmp_path, "a", "b") as linked:
        servers = linked.haproxy.servers
        linked.core.set_weight("b", 0.0, linked.now())
        await linked.until(lambda: (servers["a"].status, servers["b"].status) == ("UP", "DRAIN"))
        linked.core.set_weight("a", 0.0, linked.now())
        await linked.until(lambda: servers["a"].status == "DRAIN")
        linked.core.set_weight("b", 0.1, linked.now())
        await linked.until(lambda: (servers["b"].status, servers["b"].weight) == ("UP", 10))


async def test_engine_of_little_weight_is_held_back_and_granted_what_it_has_gained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with Linked(tmp_path, "a", "b", "c") as linked:
        servers, core = linked.haproxy.servers, linked.core
        core.set_weight("c", 0.1, linked.now())
        await linked.until(lambda: (servers["c"].status, servers["c"].weight) == ("DRAIN", 10))
        assert (servers["a"].status, servers["b"].status) == ("UP", "UP")
        grants = [[Cap("m", "c", 2, granted=1)]]
        monkeypatch.setattr(core, "caps", lambda: grants.pop() if grants else [])
        await linked.until(lambda: servers["c"].maxconn == 2)
        monkeypatch.undo()
        place = linked.haproxy.commands.index("set maxconn server pool_m/c 2")
        around = linked.haproxy.commands[place - 1], linked.haproxy.commands[place + 1]
        assert around == ("set server pool_m/c state ready", "set server pool_m/c state drain")
        core.set_weight("c", 1.0, linked.now())
        await linked.until(lambda: (servers["c"].status, servers["c"].weight) == ("UP", 100))


async def test_what_haproxy_shows_decides_whether_an_engine_is_held_back(tmp_path: Path) -> None:
    def row(name: str, status: str = "UP", **more: int) -> ServerRow:
        found = {"weight": 100, "current": 0, "queued": 0, **more}
        return ServerRow("pool_m", name, found["current"], found["queued"], status, found["weight"], "127.0.0.1:9", 256)

    async with Linked(tmp_path, "a", "b", "c") as linked:
        await linked.control.stop()
        core, differences = linked.core, linked.control.differences
        core.record_counts({}, {}, linked.now())
        core.set_weight("c", 0.1, linked.now())
        core.adjust(linked.now())
        drain, ready = [["set server pool_m/c state drain"]], "set server pool_m/c state ready"
        others = [row("a"), row("b")]
        assert differences([*others, row("c", weight=10)]) == drain
        assert differences([*others, row("c", "DRAIN", weight=10)]) == []
        # Its weight is right whatever happens next; and who waits there by name does not lose the place.
        assert differences([*others, row("c", "DRAIN")]) == [["set weight pool_m/c 10"]]
        assert differences([*others, row("c", weight=10, queued=1)]) == []
        # HAProxy has seen first that another one is gone: what is left of the queue's servers comes first.
        [[first, *_rest]] = differences([row("a"), row("b", "DOWN"), row("c", "DRAIN", weight=10)])
        assert first == ready
        core.set_weight("a", 0.0, linked.now())
        core.adjust(linked.now())
        [[first, cap], *later] = differences([row("a"), row("b"), row("c", "DRAIN", weight=10)])
        assert (first, cap.startswith("set maxconn server pool_m/c ")) == (ready, True)
        assert later == [["set server pool_m/a state drain"]]


async def test_engine_of_little_weight_is_left_to_haproxy_with_fewer_than_two_others(tmp_path: Path) -> None:
    async with Linked(tmp_path, "a", "b", "c") as linked:
        servers, core = linked.haproxy.servers, linked.core
        core.set_weight("c", 0.1, linked.now())
        await linked.until(lambda: servers["c"].status == "DRAIN")
        core.record_failure(engine("b"), "hangs", gone=True)
        await linked.until(lambda: servers["c"].status == "UP")
        core.record_reading(engine("b"), Reading(linked.now(), 0, 0))
        await linked.until(lambda: servers["c"].status == "DRAIN")
    assert servers["c"].status == "UP"


@pytest.mark.parametrize(("others", "expected"), [((), "DRAIN"), (("b",), "UP")], ids=["others are left", "the last"])
async def test_haproxy_alone_keeps_an_engine_out_while_there_is_another(
    others: tuple[str, ...], expected: str, tmp_path: Path
) -> None:
    async with Linked(tmp_path, "a", "b") as linked:
        servers = linked.haproxy.servers
        for name in ("a", *others):
            linked.core.set_weight(name, 0.0, linked.now())
        await linked.until(lambda: all(servers[name].status == "DRAIN" for name in ("a", *others)))
    assert servers["a"].status == expected
    assert servers["b"].status == "UP"


def kept_of(linked: Linked) -> list[list[str]]:
    """Name, state of administration, weight and port of each server that is kept."""
    lines = linked.state_file.read_text().splitlines()
    assert lines[0] == "1"
    assert len(lines[1].removeprefix("# ").split()) == 25
    fields = [line.split() for line in lines[2:]]
    assert all(len(each) == 25 for each in fields)
    return [[each[index] for index in (3, 6, 7, 18)] for each in fields]


async def test_drains_and_weights_are_kept_for_the_next_start_of_haproxy(tmp_path: Path) -> None:
    async with Linked(tmp_path, "a", "b", "c", "d") as linked:
        linked.core.set_drained(["b"])
        linked.core.set_weight("c", 0.5, linked.now())
        linked.core.set_weight("d", 0.0, linked.now())
        port = str(engine("b").port)
        expected = [["b", "8", "100", port], ["c", "0", "50", port], ["d", "8", "100", port]]
        # A server that is down shows nothing of its drain.
        linked.haproxy.servers["b"].status = "DOWN"
        await linked.until(lambda: kept_of(linked) == expected)
        linked.core.set_drained([])
        for name in ("c", "d"):
            linked.core.set_weight(name, 1.0, linked.now())
        await linked.until(lambda: kept_of(linked) == [])
        linked.core.set_drained(["a"])
    # However soon it ends after that.
    assert kept_of(linked) == [["a", "8", "100", port]]


async def test_drains_that_end_with_the_scheduler_are_not_kept(tmp_path: Path) -> None:
    async with Linked(tmp_path, "a", "b", "c") as linked:
        servers, core = linked.haproxy.servers, linked.core
        core.set_weight("c", 0.1, linked.now())
        await linked.until(lambda: servers["c"].status == "DRAIN")
        core.record_failure(engine("b"), "hangs", gone=True)
        await linked.until(lambda: servers["b"].status == "DRAIN")
        assert kept_of(linked) == [["c", "0", "10", str(engine("c").port)]]
        # HAProxy is gone before the scheduler ends, as when a gateway is rebooted.
        await linked.haproxy.stop()
        await linked.until(lambda: linked.control.absent)
        core.set_drained(["a"])
    assert [name for name, drained, *_rest in kept_of(linked) if drained == "8"] == ["a"]


async def test_engine_that_is_out_is_not_kept_so_if_it_is_its_pools_last(tmp_path: Path) -> None:
    async with Linked(tmp_path, "a", "b") as linked:
        linked.core.set_drained(["a"])
        linked.core.set_weight("b", 0.0, linked.now())
        await linked.until(lambda: linked.haproxy.servers["b"].status == "DRAIN")
        assert kept_of(linked) == [["a", "8", "100", str(engine("a").port)]]


async def test_what_is_kept_stays_while_no_member_is_known(tmp_path: Path) -> None:
    async with Linked(tmp_path, "a", "b") as linked:
        linked.core.set_drained(["b"])
        await linked.until(lambda: kept_of(linked) != [])
        kept = linked.state_file.read_text()
        linked.core.set_engines([])
        await asyncio.sleep(0.2)
        assert linked.state_file.read_text() == kept
    assert linked.state_file.read_text() == kept


async def test_state_that_cannot_be_kept_is_said_once_and_stops_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "haproxy-servers.new").mkdir()
    async with Linked(tmp_path, "a", "b") as linked:
        linked.core.set_drained(["b"])
        await linked.until(lambda: linked.haproxy.servers["b"].status == "DRAIN")
        await asyncio.sleep(0.2)
        assert not linked.control.error
        assert caplog.text.count("drains and weights are not kept") == 1
        (tmp_path / "haproxy-servers.new").rmdir()
        await linked.until(linked.state_file.exists)


async def test_configured_maxconn_comes_back_when_the_scheduler_ends(tmp_path: Path) -> None:
    haproxy = FakeHaproxy(tmp_path / "socket", servers={"a": FakeServer(maxconn=3)})
    await haproxy.start()
    await release(RuntimeApi(str(haproxy.path), 1.0), [engine("a")], [], 50)
    assert haproxy.servers["a"].maxconn == 128
    await haproxy.stop()


async def test_member_that_returns_before_its_server_is_gone_is_let_in(tmp_path: Path) -> None:
    async with Linked(tmp_path, "a", "b") as linked:
        servers = linked.haproxy.servers
        servers["b"].current = 1
        linked.core.set_engines([engine("a")])
        await linked.until(lambda: servers["b"].status == "MAINT")
        linked.core.set_engines([engine("a"), engine("b")])
        await linked.until(lambda: servers["b"].status == "UP")
        servers["a"].status = "MAINT"  # by somebody else, who will have a reason
        await asyncio.sleep(0.2)
        assert servers["a"].status == "MAINT"


async def test_control_that_fails_is_seen(tmp_path: Path) -> None:
    linked = Linked(tmp_path, "a")
    linked.core.adjust = lambda _unused: 1 / 0  # type: ignore[method-assign,assignment,return-value]
    [task] = linked.control.start(False)
    with pytest.raises(ZeroDivisionError):
        await asyncio.wait_for(task, 5)


async def test_engines_appear_and_disappear_at_run_time(tmp_path: Path) -> None:
    async with Linked(tmp_path, "a", "b") as linked:
        linked.haproxy.servers["b"].current = 1
        linked.core.set_engines([engine("a"), engine("c")])
        await linked.until(lambda: "c" in linked.haproxy.servers and linked.haproxy.servers["c"].status == "UP")
        assert linked.haproxy.commands.count("enable health pool_m/c") == 1
        await linked.until(lambda: linked.haproxy.servers["b"].status == "MAINT")
        await asyncio.sleep(0.2)
        assert "b" in linked.haproxy.servers  # a stream still runs
        linked.haproxy.servers["b"].current = 0
        await linked.until(lambda: "b" not in linked.haproxy.servers)


async def test_last_servers_of_a_backend_stay(tmp_path: Path) -> None:
    async with Linked(tmp_path, "a") as linked:
        linked.core.set_engines([])
        await asyncio.sleep(0.2)
        assert linked.haproxy.servers["a"].status == "UP"


async def test_haproxy_that_goes_away_and_comes_back(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with Linked(tmp_path, "a") as linked:
        await linked.haproxy.stop()
        await linked.until(lambda: "No such file" in linked.control.error and linked.control.absent)
        await linked.haproxy.start()
        await linked.until(lambda: not linked.control.error and not linked.control.absent)
    assert caplog.text.count("HAProxy does not follow") <= 2


def haproxy() -> str:
    """The program."""
    if HAPROXY is None:
        pytest.fail("expected HAProxy, found none; to do: run the tests with tests/run/unit, which unpacks it")
    return HAPROXY


@pytest.fixture
def real_haproxy(tmp_path: Path) -> Iterator[Path]:
    """A running HAProxy with one pool of two servers where nothing listens."""
    program = haproxy()
    path = tmp_path / "admin.sock"
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    configuration = tmp_path / "haproxy.cfg"
    configuration.write_text(
        f"""global
    stats socket {path} mode 600 level admin
    # Adding a server stops all threads; with more threads than free cores that takes seconds.
    nbthread 1
defaults
    mode http
    timeout connect 1s
    timeout client 5s
    timeout server 5s
frontend f
    bind 127.0.0.1:{port}
    default_backend pool_m
backend pool_m
    balance leastconn
    server a 127.0.0.1:10 weight 100 maxconn 3
    server b 127.0.0.1:9 weight 100 maxconn 3
"""
    )
    process = subprocess.Popen([program, "-db", "-f", str(configuration)], stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 10
    while not path.exists():
        assert time.monotonic() < deadline
        time.sleep(0.02)
    yield path
    process.terminate()
    process.wait(10)


async def test_real_haproxy_understands_every_command(real_haproxy: Path) -> None:
    api = RuntimeApi(str(real_haproxy), 2.0)
    core = DecisionCore(Settings(60.0, 0.5, 5))
    core.set_engines([engine("a"), engine("c")])
    now = asyncio.get_running_loop().time()
    for name in ("a", "c"):
        core.record_reading(engine(name), Reading(now, 0, 0))
    core.set_weight("a", 0.25, now)
    core.set_drained(["c"])
    control = Control(core, api, 0.02, 0.05, "check inter 1s fastinter 250ms fall 3 rise 2")
    control.start(True)
    try:
        deadline = time.monotonic() + 30
        while True:
            found = statistics(*await api.run(LOOK))
            rows = {row.name: row for row in found.servers if row.backend == "pool_m"}
            if (
                set(rows) == {"a", "c"}
                and (rows["a"].weight, rows["a"].address) == (25, "127.0.0.1:9")
                and rows["c"].status in ("DRAIN", "DOWN")
            ):
                break
            assert time.monotonic() < deadline, (rows, control._complaints)
            await asyncio.sleep(0.05)
    finally:
        await control.stop()
    await release(api, [engine("a")], [], 30)
    assert {row.name: row.maxconn for row in statistics(*await api.run(LOOK)).servers}["a"] == 76
    (answer,) = await api.run(["show servers conn pool_m"])
    assert "pool_m" in answer
    assert control._complaints == set()


async def _ask(port: int) -> bytes:
    """Ask HAProxy for the server a; return the answer's last byte."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"GET / HTTP/1.1\r\nhost: x\r\nx-server: a\r\nconnection: close\r\n\r\n")
    answer = await reader.read()
    writer.close()
    return answer[-1:]


async def test_request_that_waits_in_the_queue_of_an_engine_that_goes_out_goes_elsewhere(tmp_path: Path) -> None:
    program = haproxy()
    hung = asyncio.Event()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, name: bytes) -> None:
        await reader.readuntil(b"\r\n\r\n")
        if name == b"a":
            await hung.wait()
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 1\r\nconnection: close\r\n\r\n" + name)
        writer.close()

    engines = [
        await asyncio.start_server(lambda r, w, name=name: answer(r, w, name), "127.0.0.1", 0) for name in (b"a", b"b")
    ]
    ports = [server.sockets[0].getsockname()[1] for server in engines]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    path = tmp_path / "admin.sock"
    configuration = tmp_path / "haproxy.cfg"
    # What the edge role has for a pool, as far as it matters here.
    configuration.write_text(
        f"""global
    stats socket {path} mode 600 level admin
    nbthread 1
defaults
    mode http
    timeout connect 1s
    timeout client 60s
    timeout server 60s
    timeout queue 60s
frontend f
    bind 127.0.0.1:{port}
    default_backend pool_m
backend pool_m
    balance leastconn
    option redispatch 1
    use-server a if {{ req.hdr(x-server) a }}
    server a 127.0.0.1:{ports[0]} weight 100 maxconn 1
    server b 127.0.0.1:{ports[1]} weight 100 maxconn 9
"""
    )
    process = await asyncio.create_subprocess_exec(
        program, "-db", "-f", str(configuration), stderr=asyncio.subprocess.DEVNULL
    )
    api = RuntimeApi(str(path), 2.0)

    async def until(condition: Callable[[ServerRow], bool]) -> None:
        deadline = time.monotonic() + 30
        while True:
            with contextlib.suppress(HaproxyError):
                if condition({row.name: row for row in statistics(*await api.run(LOOK)).servers}["a"]):
                    return
            assert time.monotonic() < deadline
            await asyncio.sleep(0.02)

    try:
        await until(lambda _row: True)
        first = asyncio.ensure_future(_ask(port))
        await until(lambda row: row.current == 1)
        second = asyncio.ensure_future(_ask(port))
        await until(lambda row: row.queued == 1)
        core = DecisionCore(Settings(60.0, 0.5, 5))
        core.set_engines([engine("a"), engine("b")])
        now = asyncio.get_running_loop().time()
        for name in ("a", "b"):
            core.record_reading(engine(name), Reading(now, 0, 0))
        core.set_weight("a", 0.0, now)
        control = Control(core, api, 0.02, 0.05, "check")
        for commands in control.differences(statistics(*await api.run(LOOK)).servers):
            if "state drain" in commands[0]:
                await api.run(commands)
        assert await asyncio.wait_for(second, 30) == b"b"
        hung.set()
        assert await asyncio.wait_for(first, 30) == b"a"
    finally:
        process.terminate()
        await process.wait()
        for server in engines:
            server.close()
