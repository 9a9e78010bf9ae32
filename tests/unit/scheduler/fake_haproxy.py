# SPDX-License-Identifier: GPL-3.0-or-later
"""An HAProxy's stats socket that a test controls: one backend, commands carried out and remembered."""

from __future__ import annotations

import asyncio
import contextlib
import re
from dataclasses import dataclass, field
from pathlib import Path


@dataclass
class FakeServer:
    maxconn: int = 256
    weight: int = 100
    status: str = "UP"
    current: int = 0
    queued: int = 0


@dataclass
class FakeHaproxy:
    """Speaks the runtime API, as far as the scheduler uses it."""

    path: Path
    backend: str = "pool_m"
    servers: dict[str, FakeServer] = field(default_factory=dict)
    waiting: int = 0
    pid: int = 100
    hang: bool = False
    commands: list[str] = field(default_factory=list)

    async def start(self) -> None:
        self._server = await asyncio.start_unix_server(self._serve, str(self.path))

    async def stop(self) -> None:
        self._server.close()
        with contextlib.suppress(FileNotFoundError):
            self.path.unlink()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        line = (await reader.readline()).decode()
        if self.hang:
            await reader.read()
        elif line:
            for command in line.strip().split(";"):
                if not command.startswith("show"):
                    self.commands.append(command)
                writer.write((self._do(command) + "\n").encode())
        writer.close()

    def _do(self, command: str) -> str:
        if command == "show info":
            return f"Name: HAProxy\nPid: {self.pid}\nUptime_sec: 5\n"
        if command.startswith("show stat"):
            return self._stat()
        match = re.fullmatch(
            r"(\S+) (?:(server|weight|maxconn server|health|enable server) )?(\S+)/(\S+) ?(.*)", command
        )
        assert match, command
        verb, kind, backend, name, rest = match.groups()
        if backend != self.backend:
            return "No such backend.\n"
        if verb == "add":
            found = re.search(r"maxconn (\d+) weight (\d+)", rest)
            assert found
            self.servers[name] = FakeServer(int(found[1]), int(found[2]), "MAINT")
            return "New server registered.\n"
        server = self.servers.get(name)
        if server is None:
            return "No such server.\n"
        if verb == "del":
            del self.servers[name]
            return "Server deleted.\n"
        if verb == "set" and kind == "maxconn server":
            server.maxconn = int(rest)
        elif verb == "set" and kind == "weight":
            server.weight = int(rest)
        elif verb == "set" and rest.startswith("state "):
            server.status = {"drain": "DRAIN", "ready": "UP", "maint": "MAINT"}[rest.split()[1]]
        elif verb == "enable" and kind == "server":
            server.status = "UP"
        else:
            assert (verb, kind) == ("enable", "health"), command
        return ""

    def _stat(self) -> str:
        lines = ["# pxname,svname,qcur,qmax,scur,slim,status,weight,"]
        lines += [
            f"{self.backend},{name},{each.queued},0,{each.current},{each.maxconn},{each.status},{each.weight},"
            for name, each in self.servers.items()
        ]
        lines += [f"{self.backend},BACKEND,{self.waiting},0,0,,UP,0,", "keys,BACKEND,0,0,0,,UP,0,"]
        return "\n".join(lines) + "\n"
