# SPDX-License-Identifier: GPL-3.0-or-later
"""A chat with the site through its edge, as a client would have it, with the times that a client feels."""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import dataclass

import aiohttp

from rehearsal.checkout import RehearsalError

PROMPT = "Say in one paragraph what a ringmaster does."
TIMEOUT = aiohttp.ClientTimeout(total=60, connect=5)


@dataclass(frozen=True)
class Answer:
    """One answer, with its request's id in the logs, and the tokens of the prompt as the engine counted them.

    Times in seconds from the request's first byte; rate in tokens a second after the first token.
    """

    request_id: str
    text: str
    prompt_tokens: int
    tokens: int
    first_token: float | None
    seconds: float

    @property
    def rate(self) -> float:
        """Tokens a second: over the stream after its first token, or over the whole time when nothing was streamed."""
        if self.first_token is None:
            return self.tokens / self.seconds
        return (self.tokens - 1) / max(self.seconds - self.first_token, 1e-9)


def ask(address: str, key: str, model: str, *, stream: bool, prompt: str = PROMPT, max_tokens: int = 48) -> Answer:
    """Send one chat completion to `http://address`; raises RehearsalError with the body when the site refuses."""
    return asyncio.run(_ask(address, key, model, stream=stream, prompt=prompt, max_tokens=max_tokens))


async def _ask(address: str, key: str, model: str, *, stream: bool, prompt: str, max_tokens: int) -> Answer:
    body: dict[str, object] = {
        "model": model,
        "messages": [{"role": "user", "content": prompt}],
        "max_tokens": max_tokens,
        "temperature": 0,
        "stream": stream,
    }
    if stream:
        body["stream_options"] = {"include_usage": True}
    url = f"http://{address}/v1/chat/completions"
    started = time.monotonic()
    try:
        async with (
            aiohttp.ClientSession(timeout=TIMEOUT, headers={"Authorization": f"Bearer {key}"}) as session,
            session.post(url, json=body) as response,
        ):
            if response.status != 200:
                raise RehearsalError(
                    f"expected 200 from {url}, found {response.status}: {(await response.text())[:500]}"
                )
            if not stream:
                document = await response.json()
                text = document["choices"][0]["message"]["content"]
                usage, seconds = document["usage"], time.monotonic() - started
                identity = response.headers["X-Request-Id"]
                return Answer(identity, text, usage["prompt_tokens"], usage["completion_tokens"], None, seconds)
            return await _read_stream(response, started)
    except (aiohttp.ClientError, asyncio.TimeoutError) as error:
        raise RehearsalError(f"expected an answer from {url}, found {type(error).__name__}: {error}") from error


async def _read_stream(response: aiohttp.ClientResponse, started: float) -> Answer:
    pieces: list[str] = []
    tokens = prompt_tokens = 0
    first_token: float | None = None
    async for line in response.content:
        if not line.startswith(b"data: "):
            continue
        data = line[6:].strip()
        if data == b"[DONE]":
            seconds, identity = time.monotonic() - started, response.headers["X-Request-Id"]
            return Answer(identity, "".join(pieces), prompt_tokens, tokens, first_token, seconds)
        document = json.loads(data)
        usage = document.get("usage") or {}
        prompt_tokens, tokens = usage.get("prompt_tokens", prompt_tokens), usage.get("completion_tokens", tokens)
        for choice in document["choices"]:
            piece = choice["delta"].get("content")
            if piece:
                first_token = first_token or time.monotonic() - started
                pieces.append(piece)
    raise RehearsalError("expected the stream to end with [DONE], found its end without it")
