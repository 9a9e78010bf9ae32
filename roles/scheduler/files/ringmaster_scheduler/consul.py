# SPDX-License-Identifier: GPL-3.0-or-later
"""The members of the site as Consul's catalog lists them, followed by blocking queries.

Every member is an instance of one service: one answer lists the whole site, as of one moment. What it is, and the same
document as in the members file, stand in the instance's meta data, which Consul limits to 512 bytes a value
(agent/structs, metaValueMaxLength); so the document is cut into pieces, `document_00`, `document_01` and so on.

Queries allow stale answers: any server may give them, also while there is no leader. What a server says that knows no
leader is used only by a scheduler that knows nothing else, for it is never newer than what was heard before.
"""

from __future__ import annotations

import asyncio
import json
import logging
import random
import re
import ssl
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import aiohttp

from ringmaster_scheduler import members
from ringmaster_scheduler.domain import Agent, Engine
from ringmaster_scheduler.members import MembersError, MembersFile
from ringmaster_scheduler.replacing import replace

# Each instance comes with its node and its checks, about 2 KiB; a site of 10,000 engines needs about 20 MiB.
_LARGEST_ANSWER: Final = 64 * 1024 * 1024
# Seconds that an answer may take besides the time that Consul was told to wait. Consul itself adds up to a sixteenth of
# that (its documentation of blocking queries).
_MARGIN: Final = 5.0
# Seconds between two questions at least, however often something changes: reading an answer costs the event loop time.
_SHORTEST_PAUSE: Final = 1.0
# Seconds before all addresses are tried again: doubled each time, shortened by chance by up to a half.
_FIRST_WAIT: Final = 0.25
_LONGEST_WAIT: Final = 10.0
# Seconds after which the first address, the agent of this host, is tried again while another one is in use.
_RETURN_AFTER: Final = 60.0
# Seconds for which a member that is missing is kept after an interruption. Agents register their services anew within a
# minute, in sites of over 128 hosts within two or three (Consul's anti-entropy): a lost catalog fills up again.
_HOLD: Final = 180.0
_NAMED_BY: Final = {
    "engines": "name",
    "agents": "host",
    "gateways": "name",
    "monitors": "name",
    "preprocessors": "name",
}
# Characters of an error: it may quote what anybody wrote into the catalog.
_LONGEST_ERROR: Final = 300
_PIECE: Final = re.compile(r"document_[0-9]{2}\Z")

logger = logging.getLogger(__name__)

Lists = dict[str, list[dict[str, Any]]]


class ConsulError(Exception):
    """An answer did not come, or cannot be used; the message says why."""


class ConsulSettings(NamedTuple):
    """Where Consul is asked: `addresses` are URLs without a path, the agent of this host first; `ca_file` is empty
    where the system's authorities are trusted; `wait` in seconds; an empty `kept_file` keeps nothing over a restart."""

    addresses: tuple[str, ...]
    service: str = "ringmaster"
    token: str = ""
    ca_file: str = ""
    wait: float = 10.0
    kept_file: str = ""


def read_answer(answer: bytes) -> tuple[Lists, frozenset[str]]:
    """Return what an answer of `/v1/health/service/NAME` lists, each list in order of the names, and the names of the
    engines that are in maintenance, on their own or with their host.

    Instances of a list that is not known are ignored, one of another schema is not. Raises MembersError.
    """
    try:
        content = json.loads(answer)
    except (ValueError, RecursionError) as error:
        raise MembersError(f"not a JSON document: {error}") from error
    if not isinstance(content, list):
        raise MembersError("expected a list of instances")
    lists: Lists = {name: [] for name in _NAMED_BY}
    maintained: set[str] = set()
    for index, instance in enumerate(content):
        place = f"instance {index}"
        service = _object(_object(instance, place).get("Service"), f"{place}.Service")
        meta = _object(service.get("Meta"), f"{place}.Service.Meta")
        place = f"instance {service.get('ID')!r}"
        name = meta.get("list")
        if not isinstance(name, str) or name not in _NAMED_BY:
            continue
        if meta.get("schema") != str(members.SCHEMA):
            raise MembersError(f"{place}: expected schema {members.SCHEMA}, found {meta.get('schema')!r}")
        entry = _entry(meta, place)
        if not isinstance(entry.get(_NAMED_BY[name]), str):
            raise MembersError(f"{place}: expected a document with {_NAMED_BY[name]}")
        lists[name].append(entry)
        if name == "engines" and _in_maintenance(instance.get("Checks"), service.get("ID"), place):
            maintained.add(entry["name"])
    for name, listed in lists.items():
        listed.sort(key=lambda entry, key=_NAMED_BY[name]: str(entry[key]))  # type: ignore[misc]
    return lists, frozenset(maintained)


def _object(value: Any, place: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise MembersError(f"{place}: expected an object")
    return value


def _entry(meta: dict[str, Any], place: str) -> dict[str, Any]:
    pieces = [meta[key] for key in sorted(meta) if _PIECE.match(key)]
    if not all(isinstance(piece, str) for piece in pieces):
        raise MembersError(f"{place}: expected texts as the pieces of its document")
    try:
        entry = json.loads("".join(pieces))
    except (ValueError, RecursionError) as error:
        raise MembersError(f"{place}: its document is not JSON: {error}") from error
    return _object(entry, f"{place}, its document")


def _in_maintenance(checks: Any, identifier: Any, place: str) -> bool:
    """Tell whether one of Consul's own maintenance checks is among the checks (agent/agent.go, serviceMaintCheckID)."""
    if not isinstance(checks, list):
        raise MembersError(f"{place}: expected a list of checks")
    found = [_object(check, f"{place}, a check").get("CheckID") for check in checks]
    return "_node_maintenance" in found or f"_service_maintenance:{identifier}" in found


def merge(former: Lists, present: Lists) -> Lists:
    """Return the lists with those of the former entries that are missing there."""
    merged: Lists = {}
    for name, key in _NAMED_BY.items():
        names = {entry[key] for entry in present[name]}
        missing = [entry for entry in former[name] if entry[key] not in names]
        merged[name] = sorted(present[name] + missing, key=lambda entry, key=key: str(entry[key]))  # type: ignore[misc]
    return merged


class ConsulMembers:
    """The members that Consul lists, the same to its user as `MembersFile`.

    `error` says why they are not known to be right now, and is empty while they are; the members are then the last
    known ones, also over a restart. `maintained` names the engines that are in maintenance, `held` those that Consul
    does not list after an interruption and that are kept for a while. `confirmed_at` is the loop's time at which the
    members were last known to be right.
    """

    kind = "registry"

    def __init__(self, settings: ConsulSettings) -> None:
        """Take up the kept members. Raises OSError if the authorities' file cannot be used."""
        self._settings = settings
        self._loop = asyncio.get_running_loop()
        self._address = settings.addresses[0]
        self.failures = 0
        self.engines: tuple[Engine, ...] | None = None
        self.agents: tuple[Agent, ...] = ()
        self.gateways = 1
        self.maintained: frozenset[str] = frozenset()
        self.held: frozenset[str] = frozenset()
        self.confirmed_at: float | None = None
        self.error = "not asked yet"
        self._lists: Lists = {name: [] for name in _NAMED_BY}
        # What the next question waits to be passed, 0 for an answer at once; and the index of the last answer.
        self._index = 0
        self._seen = 0
        self._answer = b""
        self._holding = False
        self._hold_until = self._loop.time() + _HOLD
        self._news = True
        self._kept = b""
        self._chance = random.Random()
        self._session: aiohttp.ClientSession | None = None
        self._ssl = ssl.create_default_context(cafile=settings.ca_file or None)
        self._load()

    @property
    def path(self) -> str:
        """Where the members come from, for people."""
        return f"Consul at {self._address}"

    def poll(self, force: bool = False) -> bool:
        """Return whether there is anything new since the last call: members or an error."""
        news, self._news = self._news or force, False
        return news

    def start(self) -> list[asyncio.Task[None]]:
        """Begin to follow; the task ends only when it is cancelled."""
        self._session = aiohttp.ClientSession(
            # An answer that came compressed could be any size.
            auto_decompress=False,
            headers={"Accept-Encoding": "identity"},
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=2 * self._settings.wait),
        )
        return [self._loop.create_task(self._keep_following())]

    async def close(self) -> None:
        """Close the connections; the task has been cancelled before."""
        if self._session is not None:
            await self._session.close()

    async def _keep_following(self) -> None:
        addresses: Sequence[str] = self._settings.addresses
        chosen, tried = 0, 0
        left_first_at = 0.0
        wait = _FIRST_WAIT
        while True:
            begun_at = self._loop.time()
            if chosen and begun_at - left_first_at >= _RETURN_AFTER:
                chosen, left_first_at, self._index = 0, begun_at, 0
            try:
                await self._ask(addresses[chosen])
            except ConsulError as error:
                reason = f"{addresses[chosen]}: {error}"
                # Whatever was missed meanwhile: the next question is answered at once.
                self._index = 0
                if chosen == 0:
                    left_first_at = self._loop.time()
                chosen, tried = (chosen + 1) % len(addresses), tried + 1
                if tried < len(addresses):
                    continue
                self._fail(reason)
                tried = 0
                await asyncio.sleep(wait * self._chance.uniform(0.5, 1.0))
                wait = min(_LONGEST_WAIT, 2 * wait)
                continue
            tried, wait = 0, _FIRST_WAIT
            # By chance, so that the schedulers of a site do not ask all at once after each change.
            pause = _SHORTEST_PAUSE * self._chance.uniform(0.5, 1.0)
            await asyncio.sleep(max(0.0, pause - (self._loop.time() - begun_at)))

    async def _ask(self, address: str) -> None:
        """Ask once and take up the answer. Raises ConsulError."""
        assert self._session is not None
        query = {"stale": ""}
        patience = _MARGIN
        if self._index:
            query.update(index=str(self._index), wait=f"{self._settings.wait * 1000:.0f}ms")
            patience += self._settings.wait * (1 + 1 / 16)
        try:
            async with self._session.get(
                f"{address}/v1/health/service/{self._settings.service}",
                params=query,
                headers={"X-Consul-Token": self._settings.token} if self._settings.token else {},
                ssl=self._ssl,
                # The token is for this address alone.
                allow_redirects=False,
                timeout=aiohttp.ClientTimeout(total=patience, sock_connect=_MARGIN),
            ) as response:
                answer = await _read(response)
                headers = response.headers
                if response.status != 200:
                    text = "".join(filter(str.isprintable, answer[:200].decode(errors="replace")))
                    raise ConsulError(f"HTTP status {response.status}: {text or 'no reason given'}")
        except asyncio.TimeoutError as error:
            raise ConsulError(f"no answer within {patience:g} s") from error
        except (aiohttp.ClientError, OSError, ValueError) as error:
            raise ConsulError(f"{error}" or type(error).__name__) from error
        index = headers.get("X-Consul-Index", "")
        if not re.fullmatch(r"[0-9]{1,20}", index):
            raise ConsulError(f"expected a number as X-Consul-Index, found {index[:40]!r}")
        leader = headers.get("X-Consul-KnownLeader", "")
        if leader != "true" and self.engines is not None:
            raise ConsulError("the servers have no leader")
        self._take(answer, int(index))
        self._address = address
        if leader != "true":
            self.confirmed_at = None
            raise ConsulError("the servers have no leader")

    def _take(self, answer: bytes, index: int) -> None:
        """Use an answer. Raises ConsulError if it can't be used; then the former members stay."""
        now = self._loop.time()
        if index < self._seen:
            # The catalog was restored or lost, or the server is behind: what is missing may be about to come.
            self._hold_until = now + _HOLD
        holding = now < self._hold_until
        if answer == self._answer and not (self._holding and not holding):
            self._confirm(index)
            return
        try:
            lists, maintained = read_answer(answer)
            # An empty catalog, or a token that may see nothing: Consul answers both alike.
            if not lists["engines"]:
                raise MembersError("lists no engine")
            document, missing, held = _document(lists, maintained), False, frozenset[str]()
            members.parse(document)
            if holding:
                merged = merge(self._lists, lists)
                missing = merged != lists
                absent = _names(merged) - _names(lists)
                with_missing = _usable(_document(merged, maintained | (self.maintained & absent)))
                if with_missing is not None:
                    document, held = with_missing, absent
            self._use(document)
        except MembersError as error:
            raise ConsulError(f"not used: {error}") from error
        except RecursionError as error:
            raise ConsulError("not used: a document is nested too deeply") from error
        self._answer, self._holding, self.held = answer, missing, held
        self._confirm(index)

    def _confirm(self, index: int) -> None:
        # An index that went backwards is good for nothing, and one of 0 would not wait (Consul's documentation).
        self._index, self._seen = 0 if index < self._seen else index, index
        self.confirmed_at = self._loop.time()
        if self.error:
            self.error = ""
            self._news = True

    def _fail(self, reason: str) -> None:
        self.failures += 1
        if len(reason) > _LONGEST_ERROR:
            reason = f"{reason[: _LONGEST_ERROR - 1]}…"
        # A server that answers something else each time must not fill the log: one change of state is one news.
        self._news = self._news or not self.error or self.failures == 1
        self.error = reason
        self._hold_until = self._loop.time() + _HOLD

    def _use(self, document: bytes) -> None:
        """Take up a members document, and keep it. Raises MembersError."""
        engines, agents = members.parse(document), members.agents(document)
        self.gateways, self.maintained = members.count_gateways(document), members.maintained(document)
        self.engines, self.agents = engines, agents
        self._lists = _lists_of(document)
        self._news = True
        self._save(document)

    def _load(self) -> None:
        if not self._settings.kept_file:
            return
        kept = MembersFile(self._settings.kept_file)
        kept.poll()
        if not kept.engines:
            return
        self.engines, self.agents = kept.engines, kept.agents
        self.gateways, self.maintained = kept.gateways, kept.maintained
        self._lists, self._kept = _lists_of(kept.document), kept.document
        self.error = "not asked yet, members as of the last run"

    def _save(self, document: bytes) -> None:
        """Keep a document over a restart. What can't be written is not kept: only without Consul is it needed."""
        if not self._settings.kept_file or document == self._kept:
            return
        try:
            replace(self._settings.kept_file, document)
        except OSError as error:
            logger.error("members are not kept over a restart: %s: %s", self._settings.kept_file, error.strerror)
            return
        self._kept = document


async def _read(response: aiohttp.ClientResponse) -> bytes:
    answer = bytearray()
    async for chunk in response.content.iter_any():
        answer += chunk
        if len(answer) > _LARGEST_ANSWER:
            raise ConsulError(f"an answer of over {_LARGEST_ANSWER} bytes")
    return bytes(answer)


def _lists_of(document: bytes) -> Lists:
    """Return the lists of a members document that can be parsed, without entries that have no name."""
    content = json.loads(document)
    return {
        name: [
            entry
            for entry in (content[name] if isinstance(content.get(name), list) else [])
            if isinstance(entry, dict) and isinstance(entry.get(key), str)
        ]
        for name, key in _NAMED_BY.items()
    }


def _names(lists: Lists) -> frozenset[str]:
    """Return the engines' names."""
    return frozenset(entry["name"] for entry in lists["engines"])


def _document(lists: Lists, maintained: frozenset[str]) -> bytes:
    return json.dumps({"schema": members.SCHEMA, **lists, "maintained": sorted(maintained)}).encode()


def _usable(document: bytes) -> bytes | None:
    """Return the document if it is one: entries of two moments need not fit together."""
    try:
        members.parse(document)
        members.agents(document)
    except MembersError:
        return None
    return document
