# SPDX-License-Identifier: GPL-3.0-or-later
"""The members document: which engines the site has. Read from the file that the registry role renders, or from Consul
(`consul`), by the same parser."""

from __future__ import annotations

import asyncio
import ipaddress
import json
import os
import re
from typing import Any, Final, Protocol

from ringmaster_scheduler.domain import Agent, Engine

SCHEMA: Final = 1
# A site of 10,000 engines needs about 3 MB.
_LARGEST_FILE: Final = 16 * 1024 * 1024
# An engine's name is a server's name in HAProxy's configuration as well.
_NAME: Final = re.compile(r"[A-Za-z0-9_.:-]{1,255}\Z")


_ADDRESS: Final = re.compile(r"[A-Za-z0-9]([A-Za-z0-9.-]{0,251}[A-Za-z0-9])?\Z")


class MembersError(Exception):
    """The members document cannot be read or used; the message names the place and what was expected there."""


def parse(document: bytes) -> tuple[Engine, ...]:
    """Return the engines of a members document, in its order. Keys that are not known are ignored.

    Raises MembersError: a document that is wrong in one place is not used at all, for half of a site is worse than
    yesterday's whole.
    """
    try:
        content = json.loads(document)
    except (ValueError, RecursionError) as error:
        raise MembersError(f"not a JSON document: {error}") from error
    if not isinstance(content, dict):
        raise MembersError("expected an object at the top")
    if content.get("schema") != SCHEMA:
        raise MembersError(f"expected schema {SCHEMA}, found {content.get('schema')!r}")
    listed = content.get("engines")
    if not isinstance(listed, list):
        raise MembersError("expected a list of engines")
    engines = tuple(_engine(entry, f"engines[{index}]") for index, entry in enumerate(listed))
    names = [engine.name for engine in engines]
    if len(set(names)) != len(names):
        raise MembersError(f"two engines are named {next(name for name in names if names.count(name) > 1)}")
    models = {engine.model for engine in engines}
    for engine in engines:
        for adapter in engine.adapters:
            if adapter in models:
                raise MembersError(f"adapter {adapter} of engine {engine.name} has the name of a model")
    return engines


def count_gateways(document: bytes) -> int:
    """Return how many gateways share the engines of a members document that can be parsed; 1 where it does not tell."""
    gateways = json.loads(document).get("gateways")
    return max(1, len(gateways)) if isinstance(gateways, list) else 1


def agents(document: bytes) -> tuple[Agent, ...]:
    """Return the agents of a members document that can be parsed, in its order; none where it does not tell.

    Raises MembersError.
    """
    listed = json.loads(document).get("agents", [])
    if not isinstance(listed, list):
        raise MembersError("expected a list of agents")
    found = tuple(_agent(entry, f"agents[{index}]") for index, entry in enumerate(listed))
    hosts = [agent.host for agent in found]
    if len(set(hosts)) != len(hosts):
        raise MembersError(f"two agents are on {next(host for host in hosts if hosts.count(host) > 1)}")
    return found


def maintained(document: bytes) -> frozenset[str]:
    """Return which engines of a members document that can be parsed get no requests because Consul has them in
    maintenance; only the file in which a scheduler keeps what Consul told has any."""
    names = json.loads(document).get("maintained", [])
    return frozenset(filter(_is_text, names)) if isinstance(names, list) else frozenset()


def _agent(entry: Any, place: str) -> Agent:
    if not isinstance(entry, dict):
        raise MembersError(f"{place}: expected an object")
    return Agent(_text(entry, "host", place), _address(entry, place), _integer(entry, "port", place, 65535))


def _address(entry: dict[str, Any], place: str) -> str:
    address = _text(entry, "address", place)
    if not _ADDRESS.match(address) and not _is_ipv6(address):
        raise MembersError(
            f"{place}.address: expected an IP address without a zone, or a host's name, found {address!r}"
        )
    return address


def _engine(entry: Any, place: str) -> Engine:
    if not isinstance(entry, dict):
        raise MembersError(f"{place}: expected an object")
    name = _text(entry, "name", place)
    if not _NAME.match(name):
        raise MembersError(f"{place}.name: expected letters, digits and _.:- only, found {name!r}")
    address = _address(entry, place)
    adapters = entry.get("adapters", [])
    if not isinstance(adapters, list) or not all(_is_text(adapter) for adapter in adapters):
        raise MembersError(f"{place}.adapters: expected a list of names")
    return Engine(
        name=name,
        host=_text(entry, "host", place),
        address=address,
        port=_integer(entry, "port", place, 65535),
        kind=_text(entry, "kind", place),
        model=_text(entry, "model", place),
        adapters=tuple(adapters),
        card=_text(entry, "card", place),
        max_num_seqs=_integer(entry, "max_num_seqs", place, 1_000_000),
        max_model_len=_integer(entry, "max_model_len", place, 1_000_000_000) if "max_model_len" in entry else 0,
    )


def _is_ipv6(address: str) -> bool:
    try:
        ipaddress.IPv6Address(address)
    except ValueError:
        return False
    return "%" not in address


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and value != "" and value.isprintable()


def _text(entry: dict[str, Any], key: str, place: str) -> str:
    value = entry.get(key)
    if not _is_text(value):
        raise MembersError(f"{place}.{key}: expected printable text, found {value!r}")
    assert isinstance(value, str)
    return value


def _integer(entry: dict[str, Any], key: str, place: str, most: int) -> int:
    value = entry.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= most:
        raise MembersError(f"{place}.{key}: expected an integer from 1 to {most}, found {value!r}")
    return value


class MembersSource(Protocol):
    """Where a daemon has the members from, and the last good ones; `engines` is None until there were any.

    `kind` is `file` or `registry`, `path` says where that is; `error` why its present content is not used, and is empty
    while it is; `failures` counts how often that happened. `maintained` names engines that are to get no requests,
    `held` those that are listed no more and are kept for a while. `confirmed_at` is the loop's time when the members
    were last known to be right, None where that has no meaning.
    """

    kind: str
    error: str
    failures: int
    engines: tuple[Engine, ...] | None
    agents: tuple[Agent, ...]
    gateways: int
    maintained: frozenset[str]
    held: frozenset[str]
    confirmed_at: float | None

    @property
    def path(self) -> str: ...

    def poll(self, force: bool = False) -> bool:
        """Return whether there is anything new since the last call, members or an error; always with `force`."""

    def start(self) -> list[asyncio.Task[None]]:
        """Begin to follow; return tasks that are to run for ever."""

    async def close(self) -> None:
        """Give back what was opened, after the tasks were cancelled."""


class MembersFile:
    """The members file, read again whenever it is another one than last time.

    `error` says why its present content is not used, and is empty while it is. `engines`, `agents` and `gateways` are
    those of the last good content, which is `document`; `engines` is None until there was one.
    """

    kind = "file"
    held: frozenset[str] = frozenset()
    confirmed_at: float | None = None

    def __init__(self, path: str) -> None:
        self.path = path
        self.document = b""
        self.error = ""
        self.failures = 0
        self.engines: tuple[Engine, ...] | None = None
        self.agents: tuple[Agent, ...] = ()
        self.gateways = 1
        self.maintained: frozenset[str] = frozenset()
        self._signature: tuple[int, int, int] | None = None

    def poll(self, force: bool = False) -> bool:
        """Read the file if it changed, or always with `force`; return whether there is anything new: engines or
        an error. A file that is broken or gone keeps the engines of the last good one."""
        try:
            status = os.stat(self.path)
            signature = (status.st_mtime_ns, status.st_ino, status.st_size)
            if signature == self._signature and not force:
                return False
            # Noted before reading: a file that changes meanwhile is looked at again by the next poll.
            self._signature = signature
            with open(self.path, "rb") as file:
                document = file.read(_LARGEST_FILE + 1)
            if len(document) > _LARGEST_FILE:
                raise MembersError(f"over {_LARGEST_FILE} bytes")
            engines = parse(document)
            listed = agents(document)
        except (OSError, MembersError) as error:
            text = f"{error.strerror}" if isinstance(error, OSError) else str(error)
            if isinstance(error, OSError):
                self._signature = None
                if self.error == text:
                    return False
            self.error = text
            self.failures += 1
            return True
        self.error = ""
        self.engines = engines
        self.agents = listed
        self.gateways = count_gateways(document)
        self.maintained = maintained(document)
        self.document = document
        return True

    def start(self) -> list[asyncio.Task[None]]:
        """Nothing runs between two polls."""
        return []

    async def close(self) -> None:
        """Nothing is open between two polls."""
