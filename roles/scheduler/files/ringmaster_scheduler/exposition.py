# SPDX-License-Identifier: GPL-3.0-or-later
"""Reads the few series the scheduler needs out of an engine's ``/metrics``, in the Prometheus text format.

An engine's page has some 100 kB, nearly all of it histograms, and is read several times a second from every engine. So
the wanted names are searched for, and nothing else is parsed.

Names, current and former, of vLLM's metrics; the newer one wins where a release shows both:

* ``vllm:num_requests_running``, ``vllm:num_requests_waiting``; plus ``vllm:num_requests_swapped`` (gone about 0.10),
  requests pushed out of the KV cache that the engine still owes an answer.
* ``vllm:kv_cache_usage_perc``; before 0.9.2 ``vllm:gpu_cache_usage_perc``. A share from 0 to 1 despite the name.
* ``vllm:cache_config_info``, whose labels ``num_gpu_blocks`` and ``block_size`` give the size of the KV pool.

* ``vllm:num_preemptions_total``, ``vllm:generation_tokens_total``.
* ``vllm:prompt_tokens_by_source_total`` with ``source="local_compute"``: prompt tokens that were computed. Where it is
  missing, ``vllm:prompt_tokens_total``, which counts those from the prefix cache as well.
* ``vllm:iteration_tokens_total_count``: steps of the engine's scheduler, its heartbeat. ``process_start_time_seconds``
  tells one process from the next.
* ``vllm:lora_requests_info``, whose labels tell how many adapters may run and which do. Every state leaves a series
  behind; its value is when it was so, and the latest counts.

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
PREEMPTIONS: Final = b"vllm:num_preemptions_total"
GENERATION_TOKENS: Final = b"vllm:generation_tokens_total"
PROMPT_TOKENS_BY_SOURCE: Final = b"vllm:prompt_tokens_by_source_total"
PROMPT_TOKENS: Final = b"vllm:prompt_tokens_total"
ADAPTERS: Final = b"vllm:lora_requests_info"
ITERATIONS: Final = b"vllm:iteration_tokens_total_count"
PROCESS_START: Final = b"process_start_time_seconds"

# No engine holds so many requests; a number beyond is a fault of the page, and would otherwise be believed for ever.
_MOST_REQUESTS: Final = 1_000_000
_MOST_TOKENS: Final = 1_000_000_000_000_000
_MOST_ADAPTERS: Final = 100_000
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
    """What a page says; `kv_use` is from 0 to 1, counters are since the engine's start. All but the first two are
    None, or empty, where it does not tell, or nothing credible. The order is that of a reading's fields."""

    running: int
    waiting: int
    kv_use: float | None
    kv_tokens: int | None
    preemptions: int | None
    prompt_tokens: int | None
    generation_tokens: int | None
    adapters: tuple[str, ...]
    max_adapters: int | None
    iterations: int | None
    process_start: float | None


def parse(page: bytes) -> EngineMetrics:
    """Return what an engine's metrics page says of its load.

    Raises ExpositionError if running or waiting requests are missing, not finite, negative or absurdly many: such an
    engine cannot be compared with others. All else may be missing.
    """
    adapters, max_adapters = _adapters(page)
    computed = _counter(page, PROMPT_TOKENS_BY_SOURCE, b"local_compute")
    return EngineMetrics(
        running=_requests(page, RUNNING),
        waiting=_requests(page, WAITING) + (_requests(page, SWAPPED) if _has(page, SWAPPED) else 0),
        kv_use=_kv_use(page),
        kv_tokens=_kv_tokens(page),
        preemptions=_counter(page, PREEMPTIONS),
        prompt_tokens=_counter(page, PROMPT_TOKENS) if computed is None else computed,
        generation_tokens=_counter(page, GENERATION_TOKENS),
        adapters=adapters,
        max_adapters=max_adapters,
        iterations=_counter(page, ITERATIONS),
        process_start=_process_start(page),
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


def _counter(page: bytes, name: bytes, source: bytes | None = None) -> int | None:
    """Return a counter, summed over its series; with `source` only over those that have this label."""
    values = [
        value
        for labels, value in _series(page, name)
        if source is None or (b"source", source) in _LABEL.findall(labels)
    ]
    if not values or not all(0 <= value <= _MOST_TOKENS for value in values):
        return None
    return round(math.fsum(values))


def _process_start(page: bytes) -> float | None:
    values = [value for _unused, value in _series(page, PROCESS_START)]
    return values[0] if len(values) == 1 and 0 < values[0] <= _MOST_TOKENS else None


def _adapters(page: bytes) -> tuple[tuple[str, ...], int | None]:
    """Return the adapters that run, sorted, and how many may; of several ranks, all that run on any."""
    latest: dict[bytes, tuple[float, dict[bytes, bytes]]] = {}
    for labels, at in _series(page, ADAPTERS):
        found = dict(_LABEL.findall(labels))
        rank = found.get(b"engine", b"")
        if math.isfinite(at) and (rank not in latest or at > latest[rank][0]):
            latest[rank] = at, found
    running: set[str] = set()
    most: int | None = None
    for _unused, found in latest.values():
        names = found.get(b"running_lora_adapters", b"").decode("utf-8", "replace")
        running.update(name.strip() for name in names.split(",") if name.strip())
        limit = _positive(found.get(b"max_lora", b""), _MOST_ADAPTERS)
        if limit is not None:
            most = limit if most is None else min(most, limit)
    return (tuple(sorted(running)), most) if most is not None else ((), None)


def _positive(digits: bytes, most: int) -> int | None:
    if not digits.isdigit() or len(digits) > len(str(most)):
        return None
    number = int(digits)
    return number if 0 < number <= most else None
