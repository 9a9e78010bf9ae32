# SPDX-License-Identifier: GPL-3.0-or-later
"""Reads the few series the scheduler needs out of an engine's ``/metrics``, in the Prometheus text format.

An engine's page has some 100 kB, nearly all of it histograms, and is read several times a second from every engine. So
the wanted names are searched for, and nothing else is parsed.

Names, current and former, of vLLM's metrics; the newer one wins where a release shows both:

* ``vllm:num_requests_running``, ``vllm:num_requests_waiting``; plus ``vllm:num_requests_swapped`` (gone about 0.10),
  requests pushed out of the KV cache that the engine still owes an answer.
* ``vllm:kv_cache_usage_perc``; before 0.9.2 ``vllm:gpu_cache_usage_perc``. A share from 0 to 1 despite the name.
* ``vllm:cache_config_info``, whose labels ``num_gpu_blocks`` and ``block_size`` give the size of the KV pool.

An engine with data parallelism shows one series a rank: requests and blocks are added up, of the KV use the highest
counts, for the fullest rank is the first to make requests wait.
"""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Iterator
from typing import Final, NamedTuple

RUNNING: Final = b"vllm:num_requests_running"
WAITING: Final = b"vllm:num_requests_waiting"
SWAPPED: Final = b"vllm:num_requests_swapped"
KV_USE: Final = (b"vllm:kv_cache_usage_perc", b"vllm:gpu_cache_usage_perc")
CACHE_CONFIG: Final = b"vllm:cache_config_info"

# No engine holds so many requests; a number beyond is a fault of the page, and would otherwise be believed for ever.
_MOST_REQUESTS: Final = 1_000_000
_MOST_BLOCK_SIZE: Final = 1_000_000
_MOST_BLOCKS: Final = 1_000_000_000

_QUOTED: Final = rb'"(?:[^"\\\n]|\\[^\n])*"'
# What follows a metric's name on its line: labels if any, value, and an optional time stamp. Quoted values of labels
# may hold braces and escaped quotes.
_SERIES: Final = re.compile(
    rb'(?:\{((?:[^"{}\n]|' + _QUOTED + rb")*)\})?[ \t]*(?<=[ \t}])"
    rb"([^ \t\r\n]+)(?:[ \t]+-?[0-9]+)?[ \t]*\r?(?:\n|$)"
)
_LABEL: Final = re.compile(rb'([A-Za-z_][A-Za-z0-9_]*)[ \t]*=[ \t]*"((?:[^"\\\n]|\\[^\n])*)"')


class ExpositionError(Exception):
    """The page lacks what a reading cannot do without, or shows it with an impossible value."""


class EngineMetrics(NamedTuple):
    """What a page says; `kv_use` from 0 to 1 and `kv_tokens` are None where it does not tell, or nothing credible."""

    running: int
    waiting: int
    kv_use: float | None
    kv_tokens: int | None


def parse(page: bytes) -> EngineMetrics:
    """Return what an engine's metrics page says of its load.

    Raises ExpositionError if running or waiting requests are missing, not finite, negative or absurdly many: such an
    engine cannot be compared with others. What is only good to know (KV use and pool) may be missing.
    """
    return EngineMetrics(
        running=_requests(page, RUNNING),
        waiting=_requests(page, WAITING) + (_requests(page, SWAPPED) if _has(page, SWAPPED) else 0),
        kv_use=_kv_use(page),
        kv_tokens=_kv_tokens(page),
    )


def _has(page: bytes, name: bytes) -> bool:
    return next(_series(page, name), None) is not None


def _series(page: bytes, name: bytes) -> Iterator[tuple[bytes, float]]:
    """Yield labels and value of every series of exactly this name; lines that break the format are no series."""
    start = page.find(name)
    while start >= 0:
        behind = start + len(name)
        if start == 0 or page[start - 1 : start] == b"\n":
            match = _SERIES.match(page, behind)
            if match:
                with contextlib.suppress(ValueError):
                    yield match.group(1) or b"", float(match.group(2))
        start = page.find(name, behind)


def _requests(page: bytes, name: bytes) -> int:
    values = [value for _unused, value in _series(page, name)]
    if not values:
        raise ExpositionError(f"no {name.decode()}")
    total = math.fsum(values) if all(map(math.isfinite, values)) else math.nan
    if not 0 <= total <= _MOST_REQUESTS or min(values) < 0:
        raise ExpositionError(f"{name.decode()} has an impossible value")
    return round(total)


def _kv_use(page: bytes) -> float | None:
    for name in KV_USE:
        values = [value for _unused, value in _series(page, name)]
        if values:
            return max(values) if all(0 <= value <= 1 for value in values) else None
    return None


def _kv_tokens(page: bytes) -> int | None:
    tokens = 0
    for labels, _unused in _series(page, CACHE_CONFIG):
        found = dict(_LABEL.findall(labels))
        blocks = _positive(found.get(b"num_gpu_blocks", b""), _MOST_BLOCKS)
        block_size = _positive(found.get(b"block_size", b""), _MOST_BLOCK_SIZE)
        if blocks is None or block_size is None:
            return None
        tokens += blocks * block_size
    return tokens or None


def _positive(digits: bytes, most: int) -> int | None:
    if not digits.isdigit() or len(digits) > len(str(most)):
        return None
    number = int(digits)
    return number if 0 < number <= most else None
