# SPDX-License-Identifier: GPL-3.0-or-later
"""What the daemon relies on, whether the members come from the file or from Consul."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Protocol

import pytest
import pytest_asyncio

from ringmaster_scheduler import consul
from ringmaster_scheduler.consul import ConsulMembers, ConsulSettings
from ringmaster_scheduler.domain import Agent
from ringmaster_scheduler.members import MembersFile, MembersSource
from tests.unit.scheduler.fake_consul import FakeConsul, instance
from tests.unit.scheduler.test_members import entry

PATIENCE = 20.0
AGENT = {"host": "gpu-a1", "address": "10.89.7.13", "port": 8409}


class Registry(Protocol):
    """Where the members are written; `source` is how the daemon follows them."""

    source: MembersSource

    async def write(self, *engines: dict[str, Any], agents: Any = (), gateways: int = 1) -> None: ...

    async def spoil(self) -> None:
        """Put something there that is no document."""

    async def remove(self) -> None:
        """Take away whatever is there, and put it back with the next write."""


class FileRegistry:
    def __init__(self, path: Path) -> None:
        self.path = path
        self.source: MembersSource = MembersFile(str(path))

    async def write(self, *engines: dict[str, Any], agents: Any = (), gateways: int = 1) -> None:
        listed = [{"name": f"gw{number}"} for number in range(gateways)]
        replacement = self.path.with_suffix(".new")
        replacement.write_text(
            json.dumps({"schema": 1, "engines": engines, "agents": list(agents), "gateways": listed})
        )
        replacement.replace(self.path)

    async def spoil(self) -> None:
        self.path.write_text('{"schema": 1, "engines": [')

    async def remove(self) -> None:
        self.path.unlink()


class ConsulRegistry:
    def __init__(self, fake: FakeConsul) -> None:
        self.fake = fake
        self.running = False
        self.source: MembersSource = ConsulMembers(ConsulSettings((fake.address,), wait=0.2))

    async def write(self, *engines: dict[str, Any], agents: Any = (), gateways: int = 1) -> None:
        self.fake.body = None
        self.fake.set(
            [instance("engines", engine) for engine in engines]
            + [instance("agents", agent) for agent in agents]
            + [instance("gateways", {"name": f"gw{number}"}) for number in range(gateways)]
        )
        if not self.running:
            await self.fake.start()
            self.running = True

    async def spoil(self) -> None:
        self.fake.body = b'[{"Node": {'
        self.fake.set([])

    async def remove(self) -> None:
        await self.fake.stop()
        self.running = False


@pytest_asyncio.fixture(params=["file", "consul"])
async def registry(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Registry]:
    if request.param == "file":
        yield FileRegistry(tmp_path / "members.json")
        return
    monkeypatch.setattr(consul, "_SHORTEST_PAUSE", 0.01)
    monkeypatch.setattr(consul, "_LONGEST_WAIT", 0.05)
    monkeypatch.setattr(consul, "_HOLD", 0.0)
    fake = FakeConsul()
    of_consul = ConsulRegistry(fake)
    tasks = of_consul.source.start()
    yield of_consul
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await of_consul.source.close()
    await fake.close()


async def news(source: MembersSource, error: str = "", *members: str) -> None:
    """Poll as the daemon does until these members, and an error that matches, are what there is."""
    deadline = asyncio.get_running_loop().time() + PATIENCE
    seen = False
    while True:
        seen = source.poll() or seen
        names = [engine.name for engine in source.engines or ()]
        if seen and names == list(members) and (re.search(error, source.error) if error else not source.error):
            return
        assert asyncio.get_running_loop().time() < deadline, (seen, names, source.error)
        await asyncio.sleep(0.01)


async def test_members_come_change_and_go(registry: Registry) -> None:
    source = registry.source
    assert (source.engines, source.agents, source.gateways, source.maintained) == (None, (), 1, frozenset())
    await registry.write(entry(name="a"), agents=[AGENT], gateways=3)
    await news(source, "", "a")
    assert (source.agents, source.gateways) == ((Agent("gpu-a1", "10.89.7.13", 8409),), 3)
    assert not source.poll()
    assert source.poll(force=True)
    await registry.write(entry(name="a"), entry(name="b", port=8101))
    await news(source, "", "a", "b")
    await registry.write(entry(name="b", port=8101))
    await news(source, "", "b")


async def test_nothing_there_is_said_and_no_members_are_made_up(registry: Registry) -> None:
    await news(registry.source, ".")
    assert registry.source.engines is None
    assert registry.source.failures >= 1 or registry.source.error == "not asked yet"


@pytest.mark.parametrize(
    ("engines", "agents", "message"),
    [
        ([entry(name="b", port=0)], [], r"engines\[0\].port: expected an integer from 1 to 65535, found 0"),
        ([entry(name="b"), entry(name="b")], [], "two engines are named b"),
        ([entry(name="b", address="fe80::1%x;show info")], [], r"engines\[0\].address: expected an IP address"),
        ([entry(name="b"), entry(name="c", model="sql")], [], "has the name of a model"),
        ([entry(name="b")], [{"host": "a", "address": "10.0.0.1"}], r"agents\[0\].port: expected an integer"),
        ([entry(name="b")], [AGENT, AGENT], "two agents are on gpu-a1"),
    ],
)
async def test_what_is_wrong_in_one_place_is_not_used_at_all(
    registry: Registry, engines: list[dict[str, Any]], agents: list[dict[str, Any]], message: str
) -> None:
    await registry.write(entry(name="a"), agents=[AGENT])
    await news(registry.source, "", "a")
    await registry.write(*engines, agents=agents)
    await news(registry.source, message, "a")
    assert registry.source.agents == (Agent("gpu-a1", "10.89.7.13", 8409),)
    assert registry.source.failures >= 1
    await registry.write(entry(name="b"))
    await news(registry.source, "", "b")


async def test_what_is_no_document_and_what_is_gone_keep_the_former_members(registry: Registry) -> None:
    await registry.write(entry(name="a"))
    await news(registry.source, "", "a")
    await registry.spoil()
    await news(registry.source, "not a JSON document", "a")
    await registry.write(entry(name="a"), entry(name="b"))
    await news(registry.source, "", "a", "b")
    await registry.remove()
    await news(registry.source, "No such file|Cannot connect", "a", "b")
    await registry.write(entry(name="a"))
    await news(registry.source, "", "a")
