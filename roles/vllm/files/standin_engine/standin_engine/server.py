# SPDX-License-Identifier: GPL-3.0-or-later
"""vLLM's HTTP interface on aiohttp."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
import secrets
import signal
import socket
import time
import traceback
import uuid
from collections.abc import Awaitable, Coroutine, Sequence
from http import HTTPStatus
from typing import Any, Callable

from aiohttp import web
from aiohttp.abc import AbstractAccessLogger
from aiohttp.http_exceptions import HttpProcessingError
from prometheus_client import CONTENT_TYPE_LATEST

from . import VLLM_VERSION
from .answers import Writer, WrittenAnswer, answer_seed, build_tokenizer
from .config import Adapter, Config
from .engine import Engine, Generation, Group, QueueFullError
from .faults import Faults
from .metrics import HttpMetrics, MetricsPage
from .protocol import (
    ApiError,
    Fields,
    GenerationRequest,
    check_limits,
    model_not_found,
    parse_body,
    parse_chat,
    parse_completion,
    parse_messages,
    refused,
)
from .responses import Envelope, EventStream, Vocabulary, encode
from .trace import IntervalTrace

logger = logging.getLogger("standin_engine")

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

WATCH_SECONDS = 0.1
"""How often departed clients and the faults file are looked for."""

MAX_BODY_BYTES = 64 * 2**20
"""Largest request body; vLLM has no limit of its own."""

GUARDED_PREFIXES = ("/v1", "/v2", "/inference", "/cohere")
"""Paths that need the key, as in vLLM; all others are open."""

BACKLOG = 2048
"""Connections that may wait to be accepted, as in uvicorn."""

CLOSE_SECONDS = 1.0
"""How long connections get to close after their requests were aborted."""

GREEDY_TEMPERATURE = 1e-5
"""Below this vLLM takes the most likely token."""


def json_response(document: Any, status: int = 200) -> web.Response:
    """An answer in JSON, with vLLM's content type."""
    return web.Response(body=encode(document), status=status, content_type="application/json")


class Server:
    """Routes, keys, and the way from a request to the engine and back. Has to be made inside the running loop."""

    def __init__(self, config: Config, faults: Faults) -> None:
        self._config = config
        self._faults = faults
        tokenizer = build_tokenizer()
        self._tokenizer = tokenizer
        self._writer = Writer(tokenizer)
        self._vocabulary = Vocabulary(tokenizer)
        self.engine = Engine(config, tokenizer, faults)
        self._trace = IntervalTrace() if config.trace else None
        self._keys = [hashlib.sha256(key.encode()).digest() for key in config.api_keys]
        self._adapters = {adapter.name: adapter for adapter in config.adapters}
        self._clients: dict[Group, web.Request] = {}
        self._load = 0
        self._metrics_page = MetricsPage(self.engine.metrics)
        self._http_metrics = HttpMetrics(self._metrics_page.registry)

    def application(self) -> web.Application:
        """The application with all routes, under the root path, too, if there is one."""
        application = web.Application(middlewares=[self._surround], client_max_size=MAX_BODY_BYTES)
        application.on_response_prepare.append(self._name_server)
        routes: list[tuple[str, str, Handler]] = [
            ("GET", "/health", self._health),
            ("GET", "/ping", self._health),
            ("POST", "/ping", self._health),
            ("GET", "/version", self._version),
            ("GET", "/load", self._server_load),
            ("GET", "/metrics", self._metrics),
            ("GET", "/v1/models", self._models),
            ("POST", "/tokenize", self._tokenize),
            ("POST", "/detokenize", self._detokenize),
            ("POST", "/v1/completions", self._completions),
            ("POST", "/v1/chat/completions", self._chat_completions),
        ]
        if self._trace is not None:
            routes.append(("GET", "/standin/intervals", self._intervals))
        prefixes = {"", self._config.root_path}
        for prefix in sorted(prefixes):
            for method, path, handler in routes:
                application.router.add_route(method, prefix + path, handler)
        return application

    # What surrounds every request.

    @web.middleware
    async def _surround(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        started = time.perf_counter()
        response = await self._answer(request, handler)
        resource = request.match_info.route.resource
        self._http_metrics.observe(
            request.method,
            "none" if resource is None else resource.canonical[self._prefix_length(resource.canonical) :],
            response.status,
            time.perf_counter() - started,
            request.content_length or 0,
            response.content_length or 0,
        )
        return response

    def _prefix_length(self, path: str) -> int:
        root = self._config.root_path
        return len(root) if root and path.startswith(root) else 0

    async def _answer(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        path = request.path[self._prefix_length(request.path) :]
        if self._keys and path.startswith(GUARDED_PREFIXES) and not self._has_key(request):
            response: web.StreamResponse = json_response({"error": "Unauthorized"}, HTTPStatus.UNAUTHORIZED)
        else:
            try:
                response = await handler(request)
            except ApiError as error:
                response = json_response(error.body, error.status)
                if request.content.exception() is not None:
                    response.force_close()  # Where the broken body ends and a next request begins cannot be told.
            except web.HTTPException as error:
                response = json_response({"detail": error.reason}, error.status)
                if "Allow" in error.headers:
                    response.headers["Allow"] = error.headers["Allow"]
        if self._config.request_id_headers and not response.prepared:
            response.headers["X-Request-Id"] = self._request_id(request)
        if response.status != HTTPStatus.UNAUTHORIZED and not response.prepared:
            response.headers["Vary"] = "Origin"  # what looks at origins in vLLM stands behind what asks for the key
        return response

    def _has_key(self, request: web.Request) -> bool:
        if request.method == "OPTIONS":
            return True
        scheme, _unused, key = request.headers.get("Authorization", "").partition(" ")
        digest = hashlib.sha256(key.encode("utf-8", errors="surrogateescape")).digest()
        matches = [secrets.compare_digest(digest, known) for known in self._keys]
        return scheme.lower() == "bearer" and any(matches)

    @staticmethod
    def _request_id(request: web.Request, wanted: str | None = None) -> str:
        """The id in the client's header, else the wanted one, else a new one."""
        return request.headers.get("X-Request-Id") or wanted or uuid.uuid4().hex

    @staticmethod
    async def _name_server(_request: web.Request, response: web.StreamResponse) -> None:
        response.headers["Server"] = "standin-engine"

    # Small routes.

    async def _health(self, _request: web.Request) -> web.Response:
        return web.Response()

    async def _version(self, _request: web.Request) -> web.Response:
        return json_response({"version": VLLM_VERSION})

    async def _server_load(self, _request: web.Request) -> web.Response:
        return json_response({"server_load": self._load})

    async def _metrics(self, _request: web.Request) -> web.Response:
        self.engine.refresh_metrics()
        return web.Response(body=self._metrics_page.text(), headers={"Content-Type": CONTENT_TYPE_LATEST})

    async def _models(self, _request: web.Request) -> web.Response:
        names = self._config.served_names
        cards = [self._model_card(name, self._config.model, None, self._config.max_model_len) for name in names]
        cards += [
            self._model_card(adapter.name, adapter.path, adapter.base_model_name or names[0], None)
            for adapter in self._config.adapters
        ]
        return json_response({"object": "list", "data": cards})

    def _model_card(self, name: str, root: str, parent: str | None, max_model_len: int | None) -> dict[str, Any]:
        permission = {
            "id": f"modelperm-{uuid.uuid4().hex}",
            "object": "model_permission",
            "created": int(time.time()),
            "allow_create_engine": False,
            "allow_sampling": True,
            "allow_logprobs": True,
            "allow_search_indices": False,
            "allow_view": True,
            "allow_fine_tuning": False,
            "organization": "*",
            "group": None,
            "is_blocking": False,
        }
        return {
            "id": name,
            "object": "model",
            "created": int(time.time()),
            "owned_by": "vllm",
            "root": root,
            "parent": parent,
            "max_model_len": max_model_len,
            "permission": [permission],
        }

    async def _intervals(self, request: web.Request) -> web.Response:
        assert self._trace is not None
        try:
            since = float(request.query.get("since", "0"))
        except ValueError:
            raise refused("since must be a Unix time", "since", request.query["since"]) from None
        # Sorting up to a quarter of a million numbers must not hold up the tokens.
        return json_response(await asyncio.get_running_loop().run_in_executor(None, self._trace.summary, since))

    async def _tokenize(self, request: web.Request) -> web.Response:
        fields = Fields(await self._document(request))
        self._adapter(fields.text("model"))
        if fields.has("messages"):
            generation_prompt = fields.get("add_generation_prompt")
            tokens = self._tokenizer.encode_chat(parse_messages(fields), generation_prompt is not False)
        else:
            prompt = fields.text("prompt")
            if prompt is None:
                raise fields.missing("prompt")
            tokens = self._tokenizer.encode(prompt)
        texts = [self._tokenizer.decode([token]) for token in tokens] if fields.boolean("return_token_strs") else None
        return json_response(
            {
                "count": len(tokens),
                "max_model_len": self._config.max_model_len,
                "tokens": tokens,
                "token_strs": texts,
            }
        )

    async def _detokenize(self, request: web.Request) -> web.Response:
        fields = Fields(await self._document(request))
        self._adapter(fields.text("model"))
        if not fields.has("tokens"):
            raise fields.missing("tokens")
        tokens = fields.integers("tokens")
        self._check_vocabulary(tokens)
        return json_response({"prompt": self._tokenizer.decode(tokens)})

    # Generation.

    async def _completions(self, request: web.Request) -> web.StreamResponse:
        return await self._generate(request, parse_completion(await self._document(request)), None)

    async def _chat_completions(self, request: web.Request) -> web.StreamResponse:
        body, messages = parse_chat(await self._document(request), self._config.auto_tool_choice)
        return await self._generate(request, body, messages)

    async def _document(self, request: web.Request) -> dict[str, Any]:
        try:
            body = await request.read()
        except web.RequestPayloadError as error:
            raise ApiError(HTTPStatus.BAD_REQUEST, "There was an error parsing the body", "Bad Request") from error
        except ConnectionError:
            raise asyncio.CancelledError from None  # The client has left before its request was whole.
        return parse_body(request.headers.get("Content-Type", ""), body)

    def _adapter(self, model: str | None) -> Adapter | None:
        """The adapter that a model name means; None for the base model.

        Raises:
            ApiError: the name is not served.
        """
        if not model or model in self._config.served_names:
            return None
        if model not in self._adapters:
            raise model_not_found(model, self._config.served_names)
        return self._adapters[model]

    def _check_vocabulary(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            if not 0 <= token < self._tokenizer.size:
                raise refused(f"Token id {token} is out of vocabulary")

    def _prompt_tokens(self, body: GenerationRequest, prompt: str | Sequence[int]) -> Sequence[int]:
        if isinstance(prompt, str):
            tokens: Sequence[int] = self._tokenizer.encode(prompt)
        else:
            self._check_vocabulary(prompt)
            tokens = prompt
        limit = body.truncate_prompt_tokens
        if limit is not None:
            longest = self._config.max_model_len
            if limit > longest:
                raise refused(
                    f"truncate_prompt_tokens={limit} cannot be greater than max_model_len = {longest}. "
                    "Please request a smaller truncation size.",
                    "truncate_prompt_tokens",
                    limit,
                )
            tokens = tokens[max(len(tokens) - (longest if limit == -1 else limit), 0) :]
        if not tokens:
            raise refused("The decoder prompt cannot be empty")
        return tokens

    def _generations(
        self, body: GenerationRequest, prompts: Sequence[Sequence[int]], adapter: Adapter | None
    ) -> list[Generation]:
        sampling = body.sampling
        strangers = [token for token in sampling.stop_token_ids if not 0 <= token < self._tokenizer.size]
        if strangers:
            raise refused(
                f"token_id(s) {strangers} in stop_token_ids contain out-of-vocab token ids. Vocabulary size: "
                f"{self._tokenizer.size}",
                "stop_token_ids",
                strangers,
            )
        name = adapter.name if adapter else ""
        generations: list[Generation] = []
        for place, prompt in enumerate(prompts):
            counted = bool(body.prompts) and not isinstance(body.prompts[place], str)
            limit = check_limits(body, len(prompt), self._config.max_model_len, self._config.max_logprobs, counted)
            for choice in range(sampling.n):
                if sampling.temperature < GREEDY_TEMPERATURE:
                    key = "greedy"
                elif sampling.seed is not None:
                    key = f"seed {sampling.seed} temperature {sampling.temperature} choice {choice}"
                else:
                    key = f"random {secrets.token_hex(8)}"
                seed = answer_seed(name or self._config.served_names[0], prompt, key)
                document = body.document
                generations.append(
                    Generation(
                        prompt,
                        self._writer.answer(seed) if document is None else WrittenAnswer(self._writer, seed, document),
                        index=len(generations),
                        max_tokens=limit,
                        min_tokens=sampling.min_tokens,
                        ignore_eos=sampling.ignore_eos,
                        stops=sampling.stops,
                        include_stop=sampling.include_stop,
                        stop_token_ids=sampling.stop_token_ids,
                        adapter=name,
                        salt=body.salt,
                    )
                )
        return generations

    async def _generate(
        self, request: web.Request, body: GenerationRequest, messages: list[dict[str, Any]] | None
    ) -> web.StreamResponse:
        adapter = self._adapter(body.model)
        chat = messages is not None
        if messages is not None:
            rendered = self._prompt_tokens(body, self._tokenizer.encode_chat(messages))
            prompts: Sequence[Sequence[int]] = [rendered]
        else:
            prompts = [self._prompt_tokens(body, prompt) for prompt in body.prompts]
        generations = self._generations(body, prompts, adapter)
        if self._config.force_include_usage:
            body.include_usage = body.continuous_usage = True
        envelope = Envelope(
            body,
            chat=chat,
            identifier=f"{'chatcmpl' if chat else 'cmpl'}-{self._request_id(request, body.request_id)}",
            model=adapter.name if adapter else self._config.served_names[0],
            fingerprint=self._config.system_fingerprint,
            vocabulary=self._vocabulary,
            show_cached=self._config.prompt_tokens_details,
        )
        echoes = self._echoes(body, generations, messages)
        if self._config.server_load_tracking:
            self._load += 1
        try:
            if body.stream:
                return await self._stream(request, body, envelope, generations, echoes)
            return await self._complete(request, envelope, generations, echoes)
        finally:
            if self._config.server_load_tracking:
                self._load -= 1

    def _echoes(
        self, body: GenerationRequest, generations: Sequence[Generation], messages: list[dict[str, Any]] | None
    ) -> list[str]:
        """What is written before each answer: the prompt, or in a chat the last message if the assistant spoke it."""
        if not body.echo:
            return [""] * len(generations)
        if messages is not None:
            last = messages[-1]
            return [str(last["content"]) if last["role"] == "assistant" else ""] * len(generations)
        return [self._tokenizer.decode(generation.prompt) for generation in generations]

    async def _complete(
        self, request: web.Request, envelope: Envelope, generations: list[Generation], echoes: list[str]
    ) -> web.Response:
        group = Group(generations, None)
        self._check_queue(group)
        self.engine.submit(group)
        try:
            await self._wait(request, group)
        finally:
            self.engine.abort(group)
        texts = [self._text(envelope, generation) for generation in generations]
        return json_response(envelope.body(generations, texts, echoes))

    def _text(self, envelope: Envelope, generation: Generation) -> str:
        if envelope.request.echo and envelope.request.sampling.max_tokens == 0:
            return ""
        return self.engine.text(generation)

    async def _stream(
        self,
        request: web.Request,
        body: GenerationRequest,
        envelope: Envelope,
        generations: list[Generation],
        echoes: list[str],
    ) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8", "Vary": "Origin"})
        if self._config.request_id_headers:
            response.headers["X-Request-Id"] = self._request_id(request)
        framed = request.version >= (1, 1)
        if framed:
            response.enable_chunked_encoding()
        transport = request.transport
        if transport is None:
            return response
        stream = EventStream(
            envelope,
            transport,
            framed=framed,
            prompts=echoes,
            interval=max(body.stream_interval, self._config.stream_interval),
            trace=self._trace,
        )
        group = Group(generations, stream)
        # A full queue is told with a status, which cannot be changed once the headers are out; and the headers have to
        # be out before the engine can write the first token.
        self._check_queue(group)
        writer = await response.prepare(request)
        # From aiohttp 3.12 on headers wait for the first write unless they are sent by hand.
        send_headers = getattr(writer, "send_headers", None)
        if send_headers is not None:
            send_headers()
        self.engine.submit(group)
        try:
            await self._wait(request, group)
            stream.close(generations)
            await response.write_eof()
        finally:
            self.engine.abort(group)
        return response

    def _check_queue(self, group: Group) -> None:
        try:
            self.engine.check_queue(group)
        except QueueFullError as error:
            status = HTTPStatus.SERVICE_UNAVAILABLE
            raise ApiError(status, str(error), status.phrase) from error

    async def _wait(self, request: web.Request, group: Group) -> None:
        """Wait for all answers; a client that leaves meanwhile ends the wait."""
        self._clients[group] = request
        try:
            await group.done.wait()
        finally:
            del self._clients[group]
        if any(generation.finish_reason == "abort" for generation in group.generations):
            # Nobody is there to read an answer.
            raise asyncio.CancelledError

    async def watch(self) -> None:
        """Look for clients that have left and for faults that have been switched, for ever."""
        while True:
            await asyncio.sleep(WATCH_SECONDS)
            for group, request in list(self._clients.items()):
                transport = request.transport
                if transport is None or transport.is_closing():
                    self.engine.abort(group)
            self._faults.refresh()
            if self._faults.crash_is_due:
                os.kill(os.getpid(), signal.SIGKILL)

    async def drain(self, seconds: float) -> None:
        """Wait until no request is left, that long at most; then abort what is left."""
        deadline = time.monotonic() + seconds
        while self._clients and time.monotonic() < deadline:
            await asyncio.sleep(0.05)
        for group in list(self._clients):
            self.engine.abort(group)


class AccessLogger(AbstractAccessLogger):
    """Writes a line a request in uvicorn's form, without the query, which may hold a key."""

    def log(self, request: web.BaseRequest, response: web.StreamResponse, time: float) -> None:  # noqa: ARG002
        """Write the line."""
        path = request.raw_path.partition("?")[0]
        version = f"HTTP/{request.version.major}.{request.version.minor}"
        self.logger.info('%s - "%s %s %s" %d', request.remote, request.method, path, version, response.status)


def hide_input(record: logging.LogRecord) -> bool:
    """Filter for the web library's log, whose exceptions quote what a client sent: their messages are left out."""
    error = record.exc_info[1] if record.exc_info else None
    if error is not None:
        record.msg = f"{record.getMessage()}: {type(error).__name__}"
        if not isinstance(error, (HttpProcessingError, web.RequestPayloadError)):
            record.msg += "\n" + "".join(traceback.format_tb(error.__traceback__)).rstrip()
        record.args = record.exc_info = None
    return True


def notify(message: str) -> None:
    """Tell the service manager something, if there is one that listens (``sd_notify``)."""
    address = os.environ.get("NOTIFY_SOCKET")
    if not address:
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as connection:
        connection.connect("\0" + address[1:] if address.startswith("@") else address)
        connection.sendall(message.encode())


async def serve(config: Config, faults: Faults) -> None:
    """Serve until SIGTERM or SIGINT.

    Raises:
        OSError: the address cannot be bound.
    """
    loop = asyncio.get_running_loop()
    server = Server(config, faults)
    stopping = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopping.set)
    logging.getLogger("aiohttp.server").addFilter(hide_input)
    access_log = logging.getLogger("standin_engine.access") if config.access_log else None
    runner = web.AppRunner(server.application(), access_log=access_log, access_log_class=AccessLogger)
    await runner.setup()
    connections = runner.server
    assert connections is not None
    # Listening is done here rather than by a site of aiohttp: closing a site also cuts the requests in flight.
    if config.uds is not None:
        listener = await loop.create_unix_server(connections, config.uds, backlog=BACKLOG)
        place = config.uds
    else:
        listener = await loop.create_server(connections, config.host, config.port, backlog=BACKLOG)
        place = f"http://{config.host}:{config.port}"
    jobs: list[Coroutine[Any, Any, None]] = [server.engine.run(), server.watch()]
    if config.log_stats:
        jobs.append(server.engine.log_statistics())
    tasks = [asyncio.ensure_future(job) for job in jobs]
    logger.info("The stand-in engine serves %s on %s", config.served_names[0], place)
    notify("READY=1")

    stop = asyncio.ensure_future(stopping.wait())
    # A job that ends has failed: then the process ends, too, so that the service manager can start it anew.
    await asyncio.wait([stop, *tasks], return_when=asyncio.FIRST_COMPLETED)
    notify("STOPPING=1")
    listener.close()
    if stop.done():
        logger.info("Stopping; requests in flight have %d s", config.shutdown_timeout)
        for connection in connections.connections:
            connection.close()  # At once if it is idle, else after its present answer.
        await server.drain(config.shutdown_timeout)
    for task in tasks:
        task.cancel()
    results = await asyncio.gather(*tasks, return_exceptions=True)
    stop.cancel()
    await connections.shutdown(CLOSE_SECONDS)
    await runner.cleanup()
    for result in results:
        if isinstance(result, Exception):
            raise result
