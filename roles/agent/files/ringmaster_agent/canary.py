# SPDX-License-Identifier: GPL-3.0-or-later
"""A fixed greedy prompt now and then, so that engines of one pool can be compared by their answers.

What an answer means is for those who see several of them: here it is only hashed. Nothing of it is kept or logged.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Callable
from typing import Any, Final

import aiohttp

from ringmaster_agent.configuration import Engine
from ringmaster_agent.hardware_process import boottime

MAX_TOKENS: Final = 16
SEED: Final = 0
# Sixteen tokens with all that an engine says around them; one that never ends must not fill the memory.
LARGEST_ANSWER: Final = 256 * 1024

Take = Callable[[Engine, "dict[str, Any]"], None]
"""Takes the quantities of an engine's canary."""


def prompt_id(prompt: str) -> str:
    """What tells prompts apart: answers can be compared only if they are to the same one, asked in the same way."""
    return hashlib.sha256(f"{MAX_TOKENS} {SEED} {prompt}".encode()).hexdigest()[:16]


def phase(host: str, name: str, interval: float) -> float:
    """When in each interval an engine is asked, in seconds: spread over the site, the same after each start."""
    number = int.from_bytes(hashlib.sha256(f"{host} {name}".encode()).digest()[:8], "big")
    return interval * (number / (1 << 64))


def answer_of(body: bytes) -> str:
    """The hash of the text of an answer. Raises ValueError if it has none."""
    content = json.loads(body)
    choices = content.get("choices") if isinstance(content, dict) else None
    first = choices[0] if isinstance(choices, list) and choices else None
    text = first.get("text") if isinstance(first, dict) else None
    if not isinstance(text, str):
        raise ValueError("no text")
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


class Canary:
    """Asks one engine, one question at a time. Times in seconds."""

    def __init__(
        self, engine: Engine, prompt: str, key: str, timeout: float, ready: Callable[[], bool], take: Take
    ) -> None:
        self._engine = engine
        self._prompt = prompt
        self._key = key
        self._timeout = timeout
        self._ready = ready
        self._take = take
        self._number = 0
        self._interval = 0.0

    async def run(self, first: float, interval: float) -> None:
        """Ask for ever, the first time after `first` seconds. An engine that does not even tell its load is let be."""
        self._interval = interval
        await asyncio.sleep(first)
        loop = asyncio.get_running_loop()
        due = loop.time()
        while True:
            if self._ready():
                await self._ask()
            while due <= loop.time():
                due += interval
            await asyncio.sleep(due - loop.time())

    async def _ask(self) -> None:
        self._number += 1
        quantities: dict[str, Any] = {
            "prompt": prompt_id(self._prompt),
            "answer": None,
            "number": self._number,
            "asked": round(boottime(), 3),
            "interval": self._interval,
            "timed_out": False,
            "error": None,
        }
        try:
            quantities["answer"] = answer_of(await self._post())
        except asyncio.TimeoutError:
            quantities["timed_out"] = True
            quantities["error"] = f"no answer within {self._timeout:g} s"
        except aiohttp.ClientConnectionError:
            quantities["error"] = "the connection failed"
        except aiohttp.ClientError as error:
            quantities["error"] = str(error) if isinstance(error, _StatusError) else "no answer of HTTP/1.1"
        except (ValueError, RecursionError):
            quantities["error"] = "the answer has no text"  # and nothing of it may be told
        self._take(self._engine, quantities)

    async def _post(self) -> bytes:
        host = f"[{self._engine.address}]" if ":" in self._engine.address else self._engine.address
        question = {
            "model": self._engine.model,
            "prompt": self._prompt,
            "max_tokens": MAX_TOKENS,
            "temperature": 0,
            "seed": SEED,
            "stream": False,
        }
        headers = {"Authorization": f"Bearer {self._key}"} if self._key else {}
        # A session for each question: what is kept open for a minute is closed by the other side in the wrong moment.
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=self._timeout)) as session:
            url = f"http://{host}:{self._engine.port}/v1/completions"
            async with session.post(url, json=question, headers=headers, allow_redirects=False) as response:
                if response.status != 200:
                    raise _StatusError(f"HTTP status {response.status}")
                body = await response.content.read(LARGEST_ANSWER)
                while not response.content.at_eof():
                    piece = await response.content.read(LARGEST_ANSWER)
                    body += piece
                    if len(body) > LARGEST_ANSWER:
                        raise ValueError("too long")
                return body


class _StatusError(aiohttp.ClientError):
    """The engine answered, but with another status than 200."""
