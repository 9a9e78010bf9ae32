# SPDX-License-Identifier: GPL-3.0-or-later
"""The agent's HTTP interface: health, metrics, state and stream. Nothing here changes anything."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable

from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.registry import CollectorRegistry

from ringmaster_agent.changes import State
from ringmaster_agent.stream import MOST_LISTENERS, Stream

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class HttpApi:
    """Answers from the state."""

    def __init__(self, state: State, stream: Stream, registry: CollectorRegistry) -> None:
        self._state = state
        self._stream = stream
        self._registry = registry
        application = web.Application()
        for path, handler in (
            ("/healthz", self._health),
            ("/metrics", self._metrics),
            ("/v1/state", self._snapshot),
            ("/v1/stream", self._listen),
        ):
            application.router.add_get(path, handler, allow_head=False)
        self._runner = web.AppRunner(application, access_log=None)

    async def start(self, address: str, port: int) -> None:
        """Listen. Raises OSError if the address cannot be bound."""
        await self._runner.setup()
        await web.TCPSite(self._runner, address, port).start()

    async def close(self) -> None:
        """Accept nothing more and end what is open; streams have to be ended before, or they would be waited for."""
        await self._runner.cleanup()

    async def _health(self, _request: web.Request) -> web.Response:
        """The agent is well if it answers; a reader that fails is told, and no reason to restart anything."""
        now = time.clock_gettime(time.CLOCK_BOOTTIME)
        return web.json_response(
            {
                "status": "ok",
                "readers": {
                    reader: {
                        "age_seconds": round(now - self._state.read[reader], 3) if reader in self._state.read else None,
                        "reason": self._state.unknown.get(reader),
                    }
                    for reader in readers(self._state)
                },
            }
        )

    async def _metrics(self, _request: web.Request) -> web.Response:
        return web.Response(body=generate_latest(self._registry), headers={"Content-Type": CONTENT_TYPE_LATEST})

    async def _snapshot(self, _request: web.Request) -> web.Response:
        return web.Response(body=self._stream.snapshot(), content_type="application/json")

    async def _listen(self, request: web.Request) -> web.StreamResponse:
        if request.version < (1, 1):
            return web.Response(status=505, text="expected HTTP/1.1\n")
        transport = request.transport
        if transport is None:  # it has gone already
            return web.Response(status=400)
        if self._stream.listeners >= MOST_LISTENERS:
            return web.Response(status=503, text=f"{MOST_LISTENERS} listen already\n")
        response = web.StreamResponse(headers={"Content-Type": "application/x-ndjson", "Cache-Control": "no-store"})
        response.enable_chunked_encoding()
        await response.prepare(request)
        snapshot = self._stream.snapshot()
        ended = self._stream.join(transport)
        try:
            # Written before anything else can be: this gives way only to wait for the one who reads.
            await response.write(snapshot)
            await ended.wait()
        except ConnectionError:
            pass  # it has gone, or was cut off
        finally:
            self._stream.leave(transport)
            transport.abort()
        return response


def readers(state: State) -> list[str]:
    """The readers of which something is known: that they succeeded once, or why they fail."""
    return sorted(set(state.read) | {name for name in state.unknown if "/" not in name})
