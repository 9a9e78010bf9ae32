# SPDX-License-Identifier: GPL-3.0-or-later
"""Traces: what clients ask, as files and as generators of the shapes that matter.

A trace file has one JSON object a line: ``at`` (seconds), ``prompt`` and ``output`` (tokens), and optionally ``key``
(whose), ``prefix`` (name of a shared beginning), ``prefix_tokens``, ``max_tokens`` (what the client asks for at most)
and ``patience`` (seconds after which the client leaves if it has no byte).
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple


class Ask(NamedTuple):
    """One request of a trace; times in seconds, lengths in tokens."""

    at: float
    prompt: int
    output: int
    key: str = "key"
    prefix: str | None = None
    prefix_tokens: int = 0
    max_tokens: int | None = None
    patience: float | None = None


def read(path: Path) -> list[Ask]:
    """Return the requests of a trace file in order of time. Raises ValueError for a line that is no request."""
    asks = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if not line.strip():
            continue
        try:
            ask = Ask(**json.loads(line))
        except TypeError as error:
            raise ValueError(f"{path}:{number}: {error}") from error
        if not (ask.at >= 0 and ask.prompt >= 1 and ask.output >= 1):
            raise ValueError(f"{path}:{number}: expected at of 0 or more, prompt and output of 1 or more")
        asks.append(ask)
    return sorted(asks, key=lambda ask: ask.at)


def write(path: Path, asks: Iterable[Ask]) -> None:
    """Write a trace file."""
    path.write_text(
        "".join(
            json.dumps({name: value for name, value in ask._asdict().items() if value is not None}) + "\n"
            for ask in asks
        ),
        encoding="utf-8",
    )


def _output(source: random.Random, mean: int) -> int:
    """A length of output: exponential, as chats are; at least 1 token and at most eight means."""
    return max(1, min(8 * mean, round(source.expovariate(1 / mean))))


def bursts(
    count: int = 20,
    requests: int = 80,
    seconds: float = 0.5,
    pause: float = 3.0,
    short: tuple[int, int] = (100, 700),
    long: tuple[int, int] = (6000, 12000),
    long_share: float = 0.05,
    output: int = 150,
    keys: Sequence[str] = ("a", "b", "c", "d"),
    seed: int = 1,
) -> list[Ask]:
    """Bursts of requests with pauses between; a share of the prompts is long. Without a share, the long ones are left
    out and the short ones stay exactly as they were."""
    source = random.Random(seed)
    asks = []
    for burst in range(count):
        for _unused in range(requests):
            at = burst * (seconds + pause) + source.random() * seconds
            is_long = source.random() < abs(long_share)
            prompt = source.randint(*(long if is_long else short))
            answer = _output(source, output)
            key = source.choice(keys)
            if not is_long or long_share > 0:
                asks.append(Ask(at, prompt, answer, key))
    return sorted(asks, key=lambda ask: ask.at)


def _arrivals(source: random.Random, rate: float, seconds: float) -> Iterator[float]:
    """When requests come that come at random, ``rate`` a second on average."""
    now = source.expovariate(rate)
    while now <= seconds:
        yield now
        now += source.expovariate(rate)


def steady(
    rate: float,
    seconds: float,
    prompt: tuple[int, int] = (100, 1500),
    output: int = 150,
    keys: Sequence[str] = ("a", "b", "c", "d"),
    seed: int = 1,
) -> list[Ask]:
    """Requests that come at random, ``rate`` a second on average."""
    source = random.Random(seed)
    return [
        Ask(at, source.randint(*prompt), _output(source, output), source.choice(keys))
        for at in _arrivals(source, rate, seconds)
    ]


def shared_prefixes(
    rate: float,
    seconds: float,
    prefixes: int = 600,
    prefix_tokens: int = 4000,
    rest: tuple[int, int] = (50, 250),
    output: int = 60,
    seed: int = 1,
) -> list[Ask]:
    """Requests whose prompts begin with one of many long texts, together more than one engine's memory holds; some are
    more wanted than others (Zipf's law with an exponent of one half)."""
    source = random.Random(seed)
    weights = [(rank + 1) ** -0.5 for rank in range(prefixes)]
    names = [f"prefix-{rank}" for rank in range(prefixes)]
    asks = []
    for at in _arrivals(source, rate, seconds):
        prefix = source.choices(names, weights)[0]
        prompt = prefix_tokens + source.randint(*rest)
        asks.append(Ask(at, prompt, _output(source, output), prefix=prefix, prefix_tokens=prefix_tokens))
    return asks
