# SPDX-License-Identifier: GPL-3.0-or-later
"""The scheduler's HTTP interface.

Read by anybody on the management network: ``/healthz``, ``/metrics``, the console page ``/``, ``/v1/state``,
``/v1/queue``, ``/v1/nodes`` and ``/v1/nodes/NAME`` (a host, or that of an engine), ``/v1/explain/ID`` and
``/v1/explain`` (the last decisions), ``/v1/rules``.

With a token (``Authorization: Bearer TOKEN``): ``POST /v1/engines/NAME/drain`` and ``/undrain``.
"""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import Callable
from typing import Any, Final, NamedTuple

from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

from ringmaster_scheduler import console
from ringmaster_scheduler.explanations import Explanations
from ringmaster_scheduler.metrics import make_registry
from ringmaster_scheduler.status import Snapshot

_HEADERS: Final = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
}
_LAST: Final = 50
"""Decisions that ``/v1/explain`` shows."""

_MOST_CONNECTIONS: Final = 256
"""Connections at a time. Whoever takes them all keeps operators and Prometheus out, but never HAProxy: descriptors for
its questions are left."""


class Source(NamedTuple):
    """Where the answers come from. `rules`, `queue` and `nodes` give plain types; `drain` takes a name and whether to
    drain it, and returns whether that changed anything; it raises KeyError for an engine that is no member."""

    snapshot: Callable[[], Snapshot]
    queue: Callable[[], list[dict[str, Any]]]
    nodes: Callable[[], list[dict[str, Any]]]
    rules: Callable[[], dict[str, Any]]
    drain: Callable[[str, bool], bool]
    explanations: Explanations


class _Refusal(asyncio.Protocol):
    """A connection that is one too many."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        transport.close()


class HttpApi:
    """Answers from a snapshot taken anew for each request. `token` is empty where nothing may be changed."""

    def __init__(self, source: Source, token: str) -> None:
        self._source = source
        self._token = token.encode()
        self._registry = make_registry(source.snapshot)
        application = web.Application()
        application.add_routes(
            [
                web.get("/", self._console),
                web.get("/healthz", self._health),
                web.get("/metrics", self._metrics),
                web.get("/v1/state", self._state),
                web.get("/v1/queue", self._queue),
                web.get("/v1/nodes", self._nodes),
                web.get("/v1/nodes/{name}", self._node),
                web.get("/v1/rules", self._rules),
                web.get("/v1/explain", self._explain_last),
                web.get("/v1/explain/{id}", self._explain),
                web.post("/v1/engines/{name}/{action:drain|undrain}", self._drain),
            ]
        )
        self._runner = web.AppRunner(application, access_log=None)

        self._listener: asyncio.AbstractServer | None = None

    async def start(self, address: str, port: int) -> None:
        """Listen. Raises OSError if the address cannot be bound."""
        await self._runner.setup()
        self._listener = await asyncio.get_running_loop().create_server(self._accept, address, port)

    def _accept(self) -> asyncio.Protocol:
        server = self._runner.server
        assert server is not None
        return server() if len(server.connections) < _MOST_CONNECTIONS else _Refusal()

    async def close(self) -> None:
        """Answer what was asked and stop listening."""
        if self._listener is not None:
            self._listener.close()
        await self._runner.cleanup()

    async def _console(self, _unused: web.Request) -> web.Response:
        page = console.render(self._source.snapshot())
        return web.Response(text=page, content_type="text/html", headers=_HEADERS)

    async def _health(self, _unused: web.Request) -> web.Response:
        document = self._source.snapshot().health_document()
        return _json(document, 503 if document["reasons"] else 200)

    async def _metrics(self, _unused: web.Request) -> web.Response:
        page = generate_latest(self._registry)
        return web.Response(body=page, headers={**_HEADERS, "Content-Type": CONTENT_TYPE_LATEST})

    async def _state(self, _unused: web.Request) -> web.Response:
        return _json(self._source.snapshot().document())

    async def _queue(self, _unused: web.Request) -> web.Response:
        return _json({"queues": self._source.queue()})

    async def _nodes(self, _unused: web.Request) -> web.Response:
        return _json({"nodes": self._source.nodes()})

    async def _node(self, request: web.Request) -> web.Response:
        name = request.match_info["name"]
        nodes = self._source.nodes()
        found = [node for node in nodes if name in (node["host"], *(engine["name"] for engine in node["engines"]))]
        if not found:
            known = ", ".join(node["host"] for node in nodes)
            return _error(404, f"no host or engine is named {name}; hosts: {known or 'none'}")
        return _json({"nodes": found})

    async def _rules(self, _unused: web.Request) -> web.Response:
        return _json(self._source.rules())

    async def _explain_last(self, _unused: web.Request) -> web.Response:
        return _json({"decisions": self._source.explanations.last(_LAST)})

    async def _explain(self, request: web.Request) -> web.Response:
        found = self._source.explanations.find(request.match_info["id"])
        if not found:
            return _error(
                404,
                "no decision about this request is kept: the edge refused it without asking (HAProxy's journal says"
                " why), or it came before the last start, or too long ago",
            )
        return _json({"decisions": found})

    async def _drain(self, request: web.Request) -> web.Response:
        if not self._token:
            return _error(403, "no token is configured, so that nothing can be changed here")
        scheme, _unused, token = request.headers.get("Authorization", "").partition(" ")
        sent = token.strip().encode("utf-8", "surrogateescape")
        if scheme.lower() != "bearer" or not hmac.compare_digest(sent, self._token):
            return web.json_response(
                {"error": "a token is needed: Authorization: Bearer TOKEN"},
                status=401,
                headers={**_HEADERS, "WWW-Authenticate": "Bearer"},
            )
        name, drained = request.match_info["name"], request.match_info["action"] == "drain"
        try:
            changed = self._source.drain(name, drained)
        except KeyError:
            return _error(404, f"no engine is named {name}")
        except OSError as error:
            return _error(500, f"the drained engines can't be kept: {error.strerror}")
        return _json({"engine": name, "drained": drained, "changed": changed})


def _json(document: dict[str, Any], status: int = 200) -> web.Response:
    return web.json_response(document, status=status, headers=_HEADERS)


def _error(status: int, text: str) -> web.Response:
    return _json({"error": text}, status)
