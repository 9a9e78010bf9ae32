# SPDX-License-Identifier: GPL-3.0-or-later
"""HAProxy's runtime API over its stats socket, and what its answers say.

One connection a batch, in HAProxy's non-interactive mode: commands in one line, separated by semicolons, are carried
out in order, each answer ends with an empty line, and HAProxy closes. Source: HAProxy's management guide, chapter 9.3.
"""

from __future__ import annotations

import asyncio
import csv
import re
from collections.abc import Sequence
from typing import Final, NamedTuple

from ringmaster_scheduler.replacing import replace

# A batch has to fit into HAProxy's buffer, 16 kB by default.
_LONGEST_BATCH: Final = 8192
_LARGEST_ANSWER: Final = 64 * 1024 * 1024

_SAFE_WORD: Final = re.compile(r"[A-Za-z0-9_.:\[\]/-]+\Z")


class HaproxyError(Exception):
    """HAProxy cannot be asked, or says something else than was expected; the message says what."""


class HaproxyAbsentError(HaproxyError):
    """No HAProxy is there to be asked."""


class ServerRow(NamedTuple):
    """A server line as ``show stat`` has it. `current` are its connections, `queued` those that wait for it alone;
    `status` is the first word, such as UP, DOWN, DRAIN, MAINT, or "no" for "no check"; `weight` as it counts now;
    `maxconn` as it is set now, None for a server without one."""

    backend: str
    name: str
    current: int
    queued: int
    status: str
    weight: int
    address: str = ""
    maxconn: int | None = None

    @property
    def up(self) -> bool:
        """Whether HAProxy sends requests there."""
        return self.status in ("UP", "no")


class Statistics(NamedTuple):
    """One look at HAProxy: the process, how many wait in each backend unbound, and the servers."""

    pid: int
    uptime: int
    waiting: dict[str, int]
    servers: list[ServerRow]


def pool_name(model: str) -> str:
    """Return the name of a model's backend, by docs/conventions.md."""
    return "pool_" + re.sub(r"[^A-Za-z0-9_.-]", "_", model)


def word(text: str) -> str:
    """Return a word for a command as it is. Raises ValueError for what HAProxy would take for something else."""
    if not _SAFE_WORD.match(text):
        raise ValueError(f"{text!r} can't stand in a command")
    return text


class RuntimeApi:
    """The stats socket at `path`; `timeout` in seconds for a batch."""

    def __init__(self, path: str, timeout: float) -> None:
        self.path = path
        self._timeout = timeout

    async def run(self, commands: Sequence[str]) -> list[str]:
        """Carry out commands in order and return their answers, stripped; an empty one is what most say when all is
        well.

        Raises HaproxyError.
        """
        answers: list[str] = []
        batch: list[str] = []
        length = 0
        for command in commands:
            if batch and length + len(command) > _LONGEST_BATCH:
                answers += await self._batch(batch)
                batch, length = [], 0
            batch.append(command)
            length += len(command) + 1
        if batch:
            answers += await self._batch(batch)
        return answers

    async def _batch(self, commands: list[str]) -> list[str]:
        try:
            text = await asyncio.wait_for(self._exchange(";".join(commands) + "\n"), self._timeout)
        except asyncio.TimeoutError as error:
            raise HaproxyError(f"{self.path}: no answer within {self._timeout:g} s") from error
        except (FileNotFoundError, ConnectionRefusedError) as error:
            raise HaproxyAbsentError(f"{self.path}: {error.strerror}") from error
        except OSError as error:
            raise HaproxyError(f"{self.path}: {error.strerror or error}") from error
        return split_answers(text, len(commands))

    async def _exchange(self, line: str) -> str:
        reader, writer = await asyncio.open_unix_connection(self.path)
        try:
            writer.write(line.encode())
            received = bytearray()
            while chunk := await reader.read(65536):
                received += chunk
                if len(received) > _LARGEST_ANSWER:
                    raise HaproxyError(f"{self.path}: over {_LARGEST_ANSWER} bytes")
        finally:
            writer.close()
        return received.decode("utf-8", "replace")


def split_answers(text: str, count: int) -> list[str]:
    """Return the answers to `count` commands. An answer ends with an empty line; one that says nothing is an empty line
    alone. Some, such as that to ``del server``, are one line and nothing else.

    Raises HaproxyError if there are fewer, or the last one was cut off.
    """
    answers: list[str] = []
    lines: list[str] = []
    *whole, rest = text.split("\n")
    for line in whole:
        if line:
            lines.append(line)
        else:
            answers.append("\n".join(lines))
            lines = []
    if len(lines) == 1 and len(answers) == count - 1:
        answers += lines
    if rest or len(answers) < count:
        raise HaproxyError(f"expected {count} answers, found {len(answers)}{' and a part of one' if rest else ''}")
    return answers[:count]


LOOK: Final = ("show info", "show stat -1 6 -1")
"""Commands whose answers `statistics` reads; 6 stands for backends and servers."""


def statistics(info: str, stat: str) -> Statistics:
    """Return what ``show info`` and ``show stat`` say.

    Raises HaproxyError if one of them lacks what is needed.
    """
    known = dict(line.split(": ", 1) for line in info.splitlines() if ": " in line)
    rows = csv.DictReader(stat[2:].splitlines() if stat.startswith("# ") else stat.splitlines())
    waiting: dict[str, int] = {}
    servers: list[ServerRow] = []
    try:
        for row in rows:
            if row["svname"] == "BACKEND":
                waiting[row["pxname"]] = int(row["qcur"] or 0)
            else:
                status = (row["status"] or "").split(" ", 1)[0]
                servers.append(
                    ServerRow(
                        row["pxname"],
                        row["svname"],
                        int(row["scur"] or 0),
                        int(row["qcur"] or 0),
                        status,
                        int(row["weight"] or 0),
                        row.get("addr") or "",
                        int(row["slim"]) if row.get("slim") else None,
                    )
                )
        return Statistics(int(known["Pid"]), int(known["Uptime_sec"]), waiting, servers)
    except (KeyError, ValueError, TypeError, csv.Error) as error:
        raise HaproxyError(f"show stat or show info lacks {error}") from error


_STATE_FIELDS: Final = (
    "be_id be_name srv_id srv_name srv_addr srv_op_state srv_admin_state srv_uweight srv_iweight"
    " srv_time_since_last_change srv_check_status srv_check_result srv_check_health srv_check_state srv_agent_state"
    " bk_f_forced_id srv_f_forced_id srv_fqdn srv_port srvrecord srv_use_ssl srv_check_port srv_check_addr"
    " srv_agent_addr srv_agent_port"
)
_DRAINED: Final = 8  # SRV_ADMF_FDRAIN
_CONFIGURED_WEIGHT: Final = 100


class KeptServer(NamedTuple):
    """A server that HAProxy is to start with otherwise than its configuration says."""

    backend: str
    name: str
    port: int
    drained: bool
    weight: int


def server_state(servers: Sequence[KeptServer]) -> str:
    """Return a server state file, version 1, for those of `servers` that differ from the configuration.

    HAProxy finds servers by their names and passes over those that it does not have. It believes a port (but no
    address), so the right one has to be given. All are taken for up, for what checks had found is old by then; one that
    is not is down after as many failed checks as in service, where a start without this file asks for one only. Source:
    HAProxy's management guide, "show servers state"; what is believed was seen with 2.6, 3.0 and 3.2.
    """
    lines = [
        f"0 {each.backend} 0 {each.name} - 2 {_DRAINED * each.drained} {each.weight} {_CONFIGURED_WEIGHT}"
        f" 0 1 0 3 6 0 0 0 - {each.port} - 0 0 - - 0"
        for each in servers
        if each.drained or each.weight != _CONFIGURED_WEIGHT
    ]
    return "\n".join(["1", f"# {_STATE_FIELDS}", *lines, ""])


class ServerStateFile:
    """What HAProxy takes over at a start or reload, by ``load-server-state-from-file``; an empty path keeps nothing."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._saved: str | None = None

    def save(self, servers: Sequence[KeptServer]) -> None:
        """Replace the file in one step, if it is another one than before. Raises OSError."""
        text = server_state(servers)
        if not self._path or text == self._saved:
            return
        replace(self._path, text.encode())
        self._saved = text
