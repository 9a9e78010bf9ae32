# SPDX-License-Identifier: GPL-3.0-or-later
"""The agent as a whole on a simulated host: what it serves, and that nothing that hangs or dies keeps it from that."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from prometheus_client.parser import text_string_to_metric_families

from rehearsal.hardware import Machine, build, library
from ringmaster_agent import hardware_worker, stream
from ringmaster_agent.agent import Agent, read_key
from ringmaster_agent.configuration import Configuration, Engine
from tests.support.ports import port_of, reserve_port


@pytest.fixture(scope="module")
def nvml(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return library.compile_library(tmp_path_factory.mktemp("library"))


@pytest.fixture
def machine(tmp_path: Path, nvml: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    """A host with four cards, for the process that reads the hardware."""
    built = build("a100-sxm4x4", tmp_path)
    monkeypatch.setenv("RINGMASTER_REHEARSAL_HARDWARE", str(built.state.folder))
    monkeypatch.setenv("LD_LIBRARY_PATH", str(nvml.parent))
    return built


@contextlib.asynccontextmanager
async def running(root: Path, **changes: Any) -> AsyncIterator[tuple[Agent, str]]:
    """An agent that runs, and its URL."""
    with contextlib.closing(reserve_port()) as reservation:
        configuration = Configuration(
            **{
                "host": "gpu-1",
                "http_address": "127.0.0.1",
                "http_port": port_of(reservation),
                "hardware_interval_ms": 100,
                "hang_after_ms": 500,
                **changes,
            }
        )
        agent = Agent(configuration, str(root))
        task = asyncio.create_task(agent.run())
        try:
            yield agent, f"http://127.0.0.1:{configuration.http_port}"
        finally:
            agent._stop.set()
            await task
        assert not agent.failed


async def get(url: str) -> Any:
    async with aiohttp.ClientSession() as session, session.get(url) as response:
        assert response.status == 200
        return json.loads(await response.read())


async def until(condition: Callable[[], Any]) -> None:
    for _unused in range(1500):
        if condition():
            return
        await asyncio.sleep(0.02)
    raise AssertionError("it did not come")


def states(agent: Agent) -> list[Any]:
    found = [told["state"] for name, told in agent.state.values.items() if name.startswith("gpu/")]
    return sorted(found, key=str)


async def test_snapshot_has_the_host(machine: Machine) -> None:
    async with running(machine.root) as (agent, url):
        await until(lambda: {"gpu", "nvlink", "pcie", "rdma"} <= set(agent.state.read))
        snapshot = await get(f"{url}/v1/state")
        assert {"schema": 1, "type": "snapshot", "host": "gpu-1"}.items() <= snapshot.items()
        kinds = [subject.partition("/")[0] for subject in snapshot["values"]]
        assert {kind: kinds.count(kind) for kind in set(kinds)} == {"gpu": 4, "nvlink": 4, "pcie": 6, "port": 2}
        health = await get(f"{url}/healthz")
        assert health["status"] == "ok"
        assert health["readers"]["gpu"]["reason"] is None


async def test_card_that_hangs_hangs_nobody_else_and_comes_back(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hardware_worker, "FIRST_PAUSE", 0.5)
    async with running(machine.root) as (agent, url):
        await until(lambda: states(agent) == ["ok"] * 4)
        machine.state.set("gpus/2/hang", 1)
        await until(lambda: states(agent) == ["no_answer", "ok", "ok", "ok"])
        read = agent.state.read["pcie"]
        await until(lambda: agent.state.read["pcie"] > read + 1)
        assert (await get(f"{url}/healthz"))["status"] == "ok"
        assert [reason for name, reason in agent.state.unknown.items() if "no answer within 0.5 s" in reason]
        machine.state.set("gpus/2/hang", 0)
        await until(lambda: states(agent) == ["ok"] * 4)


def reading_process() -> int:
    """The child that reads the hardware."""
    children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    (found,) = [pid for pid in children if b"hardware_process" in Path(f"/proc/{pid}/cmdline").read_bytes()]
    return int(found)


async def test_process_that_is_killed_is_started_again(machine: Machine) -> None:
    async with running(machine.root) as (agent, _url):
        await until(lambda: states(agent) == ["ok"] * 4)
        os.kill(reading_process(), signal.SIGKILL)
        await until(lambda: "gpu" in agent.state.unknown)
        assert states(agent) == [None] * 4
        assert "ended with status -9" in agent.state.unknown["gpu"]
        await until(lambda: states(agent) == ["ok"] * 4)


async def test_host_without_hardware_has_a_log_and_engines_only(tmp_path: Path) -> None:
    async with running(tmp_path) as (agent, url):
        await until(lambda: agent._hardware.restarts == 1)
        assert set(agent.state.read) | set(agent.state.unknown) <= {"xid"}
        assert (await get(f"{url}/v1/state"))["values"] == {}


PAGE = """vllm:num_requests_running{{engine="0"}} {running}
vllm:num_requests_waiting{{engine="0"}} 0.0
vllm:generation_tokens_total{{engine="0"}} {tokens}
"""


@contextlib.asynccontextmanager
async def engine(pages: Callable[[], str]) -> AsyncIterator[Engine]:
    application = web.Application()

    async def metrics(_request: web.Request) -> web.Response:
        return web.Response(text=pages())

    async def complete(request: web.Request) -> web.Response:
        assert request.headers["Authorization"] == "Bearer the-key"
        return web.json_response({"choices": [{"text": "a secret answer"}]})

    application.router.add_get("/metrics", metrics)
    application.router.add_post("/v1/completions", complete)
    runner = web.AppRunner(application, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield Engine("gpu-1.main", "127.0.0.1", runner.addresses[0][1], "m")
    finally:
        await runner.cleanup()


async def test_engine_is_read_asked_and_seen_to_stall(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level("DEBUG")
    (tmp_path / "key").write_text("the-key\n")
    tokens = [10.0]
    changes: dict[str, Any] = {
        "engine_interval_ms": 50,
        "canary_interval_ms": 1000,
        "canary_prompt": "Count",
        "key_file": str(tmp_path / "key"),
    }
    async with engine(lambda: PAGE.format(running=2, tokens=tokens[0])) as one:
        async with running(tmp_path, engines=(one,), **changes) as (agent, _url):
            told = agent.state.values
            await until(lambda: told.get("engine/gpu-1.main", {}).get("running") == 2)
            await until(lambda: (told["engine/gpu-1.main"]["stalled_seconds"] or 0) >= 0.5)
            tokens[0] = 11.0
            await until(lambda: told["engine/gpu-1.main"]["stalled_seconds"] == 0)
            await until(lambda: told.get("canary/gpu-1.main", {}).get("answer"))
            assert "secret answer" not in caplog.text
            assert "the-key" not in caplog.text + json.dumps(told)


async def test_stream_is_a_snapshot_and_changes_in_a_row(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream, "ALIVE", 0.1)
    async with running(machine.root) as (agent, url):
        await until(lambda: states(agent) == ["ok"] * 4)
        async with aiohttp.ClientSession() as session, session.get(f"{url}/v1/stream") as response:
            assert response.headers["Content-Type"] == "application/x-ndjson"
            lines = [json.loads(await response.content.readline()) for _unused in range(10)]
        assert [line["type"] for line in lines].index("snapshot") == 0
        assert {line["type"] for line in lines[1:]} <= {"change", "alive"}
        numbers = [line["sequence"] for line in lines if line["type"] != "alive"]
        assert numbers == list(range(numbers[0], numbers[0] + len(numbers)))
        assert len({line["agent"] for line in lines}) == 1
        assert all(earlier["seconds"] <= later["seconds"] for earlier, later in zip(lines, lines[1:]))
        await until(lambda: agent._stream.listeners == 0)


async def test_snapshot_that_is_asked_for_has_nothing_that_the_stream_was_not_told(tmp_path: Path) -> None:
    async with running(tmp_path) as (agent, url):
        async with aiohttp.ClientSession() as session:
            await until_listening(session, url)
            async with session.get(f"{url}/v1/stream") as response:
                known = json.loads(await response.content.readline())
                for moment in (1.0, 1.1, 1.2):  # no reason for a message of its own
                    agent.state.succeed("gpu", moment)
                    snapshot = await get(f"{url}/v1/state")
                    while known["sequence"] < snapshot["sequence"]:
                        message = json.loads(await response.content.readline())
                        known["read"].update(message["read"])
                        known["sequence"] = message["sequence"]
                    assert known["read"] == snapshot["read"]


async def test_one_that_reads_too_slowly_is_cut_off_and_the_others_are_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream, "LARGEST_BACKLOG", 100_000)
    async with running(tmp_path) as (agent, url):
        await until(lambda: agent._manager is not None)
        async with aiohttp.ClientSession(read_bufsize=1 << 24) as session:
            await until_listening(session, url)
            async with session.get(f"{url}/v1/stream") as response:
                reader, writer = await asyncio.open_connection(
                    "127.0.0.1", int(url.rpartition(":")[2]), limit=1000, family=socket.AF_INET
                )
                writer.write(b"GET /v1/stream HTTP/1.1\r\nHost: a\r\n\r\n")
                await until(lambda: agent._stream.listeners == 2)
                for number in range(400):
                    agent.state.put("gpu/a", {"text": f"{number}" + "x" * 50_000})
                    agent._stream.flush()
                    # The one reads on.
                    while json.loads(await response.content.readline())["type"] != "change":
                        pass
                    if agent._stream.cut_off:
                        break
                assert agent._stream.cut_off == 1
                assert agent._stream.listeners == 1
                writer.close()
                del reader


async def until_listening(session: aiohttp.ClientSession, url: str) -> None:
    for _unused in range(200):
        with contextlib.suppress(aiohttp.ClientConnectionError):
            async with session.get(f"{url}/healthz"):
                return
        await asyncio.sleep(0.02)


async def test_metrics_say_what_is_known_and_leave_out_what_is_not(machine: Machine) -> None:
    async with running(machine.root, engines=(Engine("gpu-1.main", "127.0.0.1", 1, "m"),)) as (agent, url):
        await until(lambda: states(agent) == ["ok"] * 4 and "port/mlx5_0/1" in agent.state.values)
        await until(lambda: "engine:gpu-1.main" in agent.state.unknown)
        async with aiohttp.ClientSession() as session, session.get(f"{url}/metrics") as response:
            text = await response.text()
        found = {
            (sample.name, *sorted(sample.labels.values())): sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
        }
        uuid = machine.state.text("gpus/0/uuid")
        assert found["ringmaster_agent_reader_up", "gpu"] == 1
        assert found["ringmaster_agent_reader_up", "engine:gpu-1.main"] == 0
        assert found["ringmaster_agent_reader_age_seconds", "gpu"] < 60
        assert ("ringmaster_agent_reader_age_seconds", "engine:gpu-1.main") not in found
        assert ("ringmaster_agent_engine_requests_running", "gpu-1.main") not in found
        assert found["ringmaster_agent_gpu_state", uuid, "ok"] == 1
        assert found["ringmaster_agent_gpu_power_watts", uuid] == 62.31
        assert found["ringmaster_agent_gpu_sm_clock_max_hertz", uuid] == 1.41e9
        assert found["ringmaster_agent_gpu_ecc_uncorrected_errors_total", uuid] == 0
        assert found["ringmaster_agent_nvlink_links_down", uuid] == 0
        assert found["ringmaster_agent_rdma_hardware_total", "mlx5_0/1", "out_of_sequence"] == 0


def test_key_is_a_credential_or_a_file(tmp_path: Path) -> None:
    (tmp_path / "engine-key").write_text(" k \n")
    assert read_key("", {}) == ""
    assert read_key("engine-key", {"CREDENTIALS_DIRECTORY": str(tmp_path)}) == "k"
    assert read_key(str(tmp_path / "engine-key"), {"CREDENTIALS_DIRECTORY": "/nowhere"}) == "k"
    with pytest.raises(OSError, match="No such file"):
        read_key("engine-key", {})
