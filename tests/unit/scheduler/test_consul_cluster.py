# SPDX-License-Identifier: GPL-3.0-or-later
"""The members of a real Consul: three servers as processes on loopback ports, which are killed one by one."""

from __future__ import annotations

import asyncio
import json
import shutil
import signal
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import pytest_asyncio

from ringmaster_scheduler import consul
from ringmaster_scheduler.consul import ConsulMembers, ConsulSettings
from tests.support.ports import port_of, reserve_port
from tests.unit.scheduler.fake_consul import instance
from tests.unit.scheduler.test_consul import Followed, names
from tests.unit.scheduler.test_members import entry

# Seconds until a test gives up; an election takes one or two on a machine that has nothing else to do.
PATIENCE = 90.0
PORTS = ("http", "server", "serf_lan", "serf_wan")
KEY = "c2l4dGVlbiBieXRlcyBhcmUgZW5vdWdoIGZvciBhIDE="


class Server:
    """One server of the cluster; killed and started again with what it has on disk."""

    def __init__(self, number: int, folder: Path) -> None:
        self.folder = folder / f"server{number}"
        self.folder.mkdir()
        self.reservations = {name: reserve_port() for name in PORTS}
        self.ports = {name: port_of(reservation) for name, reservation in self.reservations.items()}
        self.address = f"http://127.0.0.1:{self.ports['http']}"
        self.raft = f"127.0.0.1:{self.ports['server']}"
        self.name = f"server{number}"
        self.process: subprocess.Popen[bytes] | None = None

    def start(self, others: list[str]) -> None:
        (self.folder / "consul.json").write_text(
            json.dumps(
                {
                    "server": True,
                    "bootstrap_expect": 3,
                    "node_name": self.name,
                    "data_dir": str(self.folder / "data"),
                    "bind_addr": "127.0.0.1",
                    "ports": {**self.ports, "dns": -1},
                    "retry_join": others,
                    "retry_interval": "1s",
                    "encrypt": KEY,
                    "performance": {"raft_multiplier": 1},
                    "disable_update_check": True,
                }
            )
        )
        with (self.folder / "log").open("ab") as log:
            self.process = subprocess.Popen(
                [program(), "agent", f"-config-file={self.folder / 'consul.json'}"], stdout=log, stderr=log
            )

    def kill(self) -> None:
        assert self.process is not None
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()
        self.process = None


def program() -> str:
    found = shutil.which("consul")
    assert found is not None, "expected Consul on the path, found none; to do: run the tests with tests/run/unit"
    return found


class Cluster:
    def __init__(self, folder: Path) -> None:
        self.servers = [Server(number, folder) for number in range(3)]
        self.session = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=5))

    def start(self, *servers: Server) -> None:
        for server in servers or self.servers:
            server.start([f"127.0.0.1:{other.ports['serf_lan']}" for other in self.servers if other is not server])

    async def close(self) -> None:
        for server in self.servers:
            if server.process is not None:
                server.kill()
            for reservation in server.reservations.values():
                reservation.close()
        await self.session.close()

    async def get(self, server: Server, path: str) -> Any:
        """What a server answers, None while it does not."""
        try:
            async with self.session.get(f"{server.address}{path}") as response:
                return await response.json() if response.status == 200 else None
        except (aiohttp.ClientError, OSError, asyncio.TimeoutError):
            return None

    async def leader(self) -> Server | None:
        """The server that all others take for the leader, None while they do not agree."""
        running = [server for server in self.servers if server.process is not None]
        said = {await self.get(server, "/v1/status/leader") for server in running}
        if len(said) != 1:
            return None
        return next((server for server in running if server.raft in said), None)

    async def elected(self) -> Server:
        deadline = asyncio.get_running_loop().time() + PATIENCE
        while True:
            leader = await self.leader()
            if leader is not None:
                return leader
            assert asyncio.get_running_loop().time() < deadline, "no leader"
            await asyncio.sleep(0.2)

    async def register(self, server: Server, *members: str) -> None:
        """List engines at a server, as the host's agent does from its file."""
        for member in members:
            listed = instance("engines", entry(name=member, host=member, adapters=[]))["Service"]
            body = {
                "Name": listed["Service"],
                **{key: listed[key] for key in ("ID", "Tags", "Meta", "Address", "Port")},
            }
            async with self.session.put(f"{server.address}/v1/agent/service/register", json=body) as response:
                assert response.status == 200, await response.text()


@pytest_asyncio.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[Cluster]:
    cluster = Cluster(tmp_path)
    try:
        cluster.start()
        await cluster.elected()
        yield cluster
    finally:
        await cluster.close()


async def true_within_patience(source: ConsulMembers, error: bool, *members: str) -> None:
    deadline = asyncio.get_running_loop().time() + PATIENCE
    while bool(source.error) is not error or names(source) != list(members):
        assert asyncio.get_running_loop().time() < deadline, (source.error, names(source))
        await asyncio.sleep(0.05)


async def put(cluster: Cluster, server: Server, path: str) -> None:
    async with cluster.session.put(f"{server.address}{path}") as response:
        assert response.status == 200, await response.text()


async def test_one_voter_the_leader_and_all_are_lost_and_come_back(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(consul, "_HOLD", 3.0)
    monkeypatch.setattr(consul, "_SHORTEST_PAUSE", 0.1)
    monkeypatch.setattr(consul, "_LONGEST_WAIT", 0.5)
    first = cluster.servers[0]
    await cluster.register(first, "a", "b")
    kept = tmp_path / "members.json"
    addresses = tuple(server.address for server in cluster.servers)
    settings = ConsulSettings(addresses, wait=1.0, kept_file=str(kept))
    async with Followed(settings) as source:
        await true_within_patience(source, False, "a", "b")
        failures = source.failures

        await put(cluster, first, "/v1/agent/service/maintenance/engine:b?enable=true")
        while source.maintained != {"b"}:
            await asyncio.sleep(0.05)

        # A voter that does not lead: nothing is missed, and nothing is said to be.
        leader = await cluster.elected()
        voter = next(server for server in cluster.servers if server is not leader)
        voter.kill()
        registrar = next(server for server in cluster.servers if server.process is not None)
        await cluster.register(registrar, "c")
        await true_within_patience(source, False, "a", "b", "c")
        assert source.failures == failures
        cluster.start(voter)

        # The leader: there may be a moment without one, and then another one.
        while await cluster.get(voter, "/v1/status/leader") in (None, ""):
            await asyncio.sleep(0.2)
        (await cluster.elected()).kill()
        await cluster.elected()
        await true_within_patience(source, False, "a", "b", "c")

        # Two of three: the last one still answers, and is not believed.
        survivor, lost = (server for server in cluster.servers if server.process is not None)
        lost.kill()
        await true_within_patience(source, True, "a", "b", "c")
        async with Followed(ConsulSettings((survivor.address,), wait=1.0, kept_file=str(kept))) as of_survivor:
            await true_within_patience(of_survivor, True, "a", "b", "c")
            while "no leader" not in of_survivor.error and "No cluster leader" not in of_survivor.error:
                await asyncio.sleep(0.05)

        # All: the members stay, and it is said that nobody confirms them.
        survivor.kill()
        await true_within_patience(source, True, "a", "b", "c")
        assert source.maintained == {"b"}
        confirmed_at = source.confirmed_at

        async with Followed(settings) as restarted:
            assert (names(restarted), restarted.maintained) == (["a", "b", "c"], {"b"})
            await true_within_patience(restarted, True, "a", "b", "c")

        # They come back with what is on their disks.
        cluster.start()
        await true_within_patience(source, False, "a", "b", "c")
        assert source.confirmed_at is not None
        assert confirmed_at is not None
        assert source.confirmed_at > confirmed_at
        await cluster.elected()
        await put(cluster, first, "/v1/agent/service/deregister/engine:a")
        await true_within_patience(source, False, "b", "c")
