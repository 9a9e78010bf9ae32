# SPDX-License-Identifier: GPL-3.0-or-later
"""A Consul agent that the test plays: blocking queries about one service, and every way to answer them wrongly."""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import Iterable
from typing import Any

from aiohttp import web

from tests.support.ports import port_of, reserve_port


def instance(kind: str, entry: dict[str, Any], *checks: str, piece: int = 512, **meta: Any) -> dict[str, Any]:
    """Return a member as `/v1/health/service/NAME` lists it, its document in pieces of so many characters."""
    text = json.dumps(entry)
    pieces = {f"document_{index // piece:02}": text[index : index + piece] for index in range(0, len(text), piece)}
    identifier = f"{kind[:-1]}:{entry.get('name', entry.get('host'))}"
    return {
        "Node": {"Node": entry.get("host", "node"), "Address": "10.0.0.1"},
        "Service": {
            "ID": identifier,
            "Service": "ringmaster",
            "Tags": [kind[:-1]],
            "Meta": {"list": kind, "schema": "1", **pieces, **meta},
            "Address": entry.get("address", ""),
            "Port": entry.get("port", 0),
        },
        "Checks": [{"CheckID": "serfHealth", "Status": "passing", "ServiceID": ""}]
        + [{"CheckID": check.replace("ID", identifier), "Status": "critical", "ServiceID": ""} for check in checks],
    }


class FakeConsul:
    """`listed` is what it lists as of `index`; `body`, `status`, `header` and `leader` replace parts of the answer;
    with `hang` it answers never, with `cut` only the first half, with `drip` a byte every 50 ms."""

    def __init__(self, scheme: str = "http") -> None:
        self.index = 10
        self.listed: list[Any] = []
        self.body: bytes | None = None
        self.status = 200
        self.header: str | None = None
        self.leader = "true"
        self.hang = False
        self.cut = False
        self.drip = False
        self.redirect = ""
        self.questions: list[dict[str, str]] = []
        self.tokens: list[str | None] = []
        self.reservation = reserve_port()
        self.address = f"{scheme}://127.0.0.1:{port_of(self.reservation)}"
        self._changed = asyncio.Event()
        self._runner: web.AppRunner | None = None

    def set(self, instances: Iterable[Any], index: int | None = None) -> None:
        """List these from now on; whoever waits for a change is answered."""
        self.listed = list(instances)
        self.index = self.index + 1 if index is None else index
        self.wake()

    def wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def start(self, context: ssl.SSLContext | None = None) -> None:
        application = web.Application()
        application.add_routes([web.get("/v1/health/service/ringmaster", self._answer)])
        self._runner = web.AppRunner(application, access_log=None, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", port_of(self.reservation), ssl_context=context).start()

    async def stop(self) -> None:
        self.wake()
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    async def close(self) -> None:
        await self.stop()
        self.reservation.close()

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        self.questions.append(dict(request.query))
        self.tokens.append(request.headers.get("X-Consul-Token"))
        assert "stale" in request.query
        if self.redirect:
            raise web.HTTPTemporaryRedirect(self.redirect)
        if self.hang:
            await asyncio.sleep(3600)
        if self.status == 200 and int(request.query.get("index", 0)) == self.index:
            wait = request.query["wait"]
            assert wait.endswith("ms")
            try:
                await asyncio.wait_for(self._changed.wait(), int(wait[:-2]) / 1000)
            except asyncio.TimeoutError:
                pass
        body = json.dumps(self.listed).encode() if self.body is None else self.body
        headers = {
            "X-Consul-Index": str(self.index) if self.header is None else self.header,
            "X-Consul-KnownLeader": self.leader,
        }
        if self.cut or self.drip:
            response = web.StreamResponse(headers={**headers, "Content-Length": str(len(body))})
            await response.prepare(request)
            for index in range(len(body) if self.drip else 0):
                await response.write(body[index : index + 1])
                await asyncio.sleep(0.05)
            await response.write(body[: len(body) // 2])
            assert request.transport is not None
            request.transport.abort()
            return response
        return web.Response(body=body, status=self.status, headers=headers)
