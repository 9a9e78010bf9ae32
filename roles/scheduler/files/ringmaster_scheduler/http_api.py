# SPDX-License-Identifier: GPL-3.0-or-later
"""The scheduler's HTTP interface, read-only: ``/healthz``, ``/metrics``, ``/v1/state`` and the console page ``/``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

from ringmaster_scheduler import console
from ringmaster_scheduler.metrics import make_registry
from ringmaster_scheduler.status import Snapshot

_HEADERS: Final = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
}


class HttpApi:
    """Answers from a snapshot taken anew for each request."""

    def __init__(self, snapshot: Callable[[], Snapshot]) -> None:
        self._snapshot = snapshot
        self._registry = make_registry(snapshot)
        application = web.Application()
        application.add_routes(
            [
                web.get("/", self._console),
                web.get("/healthz", self._health),
                web.get("/metrics", self._metrics),
                web.get("/v1/state", self._state),
            ]
        )
        self._runner = web.AppRunner(application, access_log=None)

    async def start(self, address: str, port: int) -> None:
        """Listen. Raises OSError if the address cannot be bound."""
        await self._runner.setup()
        await web.TCPSite(self._runner, address, port).start()

    async def close(self) -> None:
        """Answer what was asked and stop listening."""
        await self._runner.cleanup()

    async def _console(self, _unused: web.Request) -> web.Response:
        return web.Response(text=console.render(self._snapshot()), content_type="text/html", headers=_HEADERS)

    async def _health(self, _unused: web.Request) -> web.Response:
        document = self._snapshot().health_document()
        return web.json_response(document, status=503 if document["reasons"] else 200, headers=_HEADERS)

    async def _metrics(self, _unused: web.Request) -> web.Response:
        page = generate_latest(self._registry)
        return web.Response(body=page, headers={**_HEADERS, "Content-Type": CONTENT_TYPE_LATEST})

    async def _state(self, _unused: web.Request) -> web.Response:
        return web.json_response(self._snapshot().document(), headers=_HEADERS)
