# Copyright (c) 2026, the Ringmaster authors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What an engine's ``/metrics`` says of its load and of its progress, in the Prometheus text format.

A page of vLLM has some 100 kB, nearly all of it histograms, and is read several times a second. So the wanted names are
searched for, and nothing else is parsed. Names are vLLM's, former ones included:

* ``vllm:num_requests_running``, ``vllm:num_requests_waiting``, and ``vllm:num_requests_swapped`` (gone about 0.10),
  which the engine still owes an answer;
* ``vllm:kv_cache_usage_perc``, before 0.9.2 ``vllm:gpu_cache_usage_perc``: a share from 0 to 1 despite the name;
* ``vllm:generation_tokens_total``, ``vllm:prompt_tokens_total``, ``vllm:num_preemptions_total``;
* ``vllm:iteration_tokens_total_count``: how many steps the engine has done (the histogram's name ends in ``_total``);
* ``process_start_time_seconds`` of prometheus_client, which an engine of several processes does not show.

An engine with data parallelism shows one series a rank: numbers are added up, of the KV use the highest counts. Nothing
here imports Ansible.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass

# No engine holds so many requests or has done so many tokens; a number beyond is a fault of the page.
_MOST_REQUESTS = 1_000_000
_MOST_COUNTED = 1_000_000_000_000_000
_LATEST_START = 1 << 40  # seconds since the epoch

_QUOTED = rb'"(?:[^"\\\n]|\\[^\n])*"'
# What follows a metric's name on its line: labels if any, value, and an optional time stamp. Quoted values of labels
# may hold braces and escaped quotes.
_SERIES = re.compile(
    rb'(?:\{((?:[^"{}\n]|' + _QUOTED + rb")*)\})?[ \t]*(?<=[ \t}])"
    rb"([^ \t\r\n]+)(?:[ \t]+-?[0-9]+)?[ \t]*\r?(?:\n|$)"
)


class EngineMetricsError(Exception):
    """The page lacks what a reading cannot do without, or shows it with an impossible value."""


@dataclass(frozen=True)
class EngineMetrics:
    """What a page says. All but the first two are None where it does not tell, or tells nothing credible.

    `kv_use` is from 0 to 1, counters are since the engine's start, `process_start` is in seconds since the epoch.
    """

    running: int
    waiting: int
    kv_use: float | None = None
    generation_tokens: int | None = None
    prompt_tokens: int | None = None
    iterations: int | None = None
    preemptions: int | None = None
    process_start: float | None = None


def parse(page: bytes) -> EngineMetrics:
    """What a metrics page says.

    Raises EngineMetricsError if running or waiting requests are missing, not finite, negative or absurdly many.
    """
    running = _sum(page, b"vllm:num_requests_running", _MOST_REQUESTS)
    waiting = _sum(page, b"vllm:num_requests_waiting", _MOST_REQUESTS)
    swapped = _sum(page, b"vllm:num_requests_swapped", _MOST_REQUESTS)
    if running is None or waiting is None:
        raise EngineMetricsError("the page does not tell how many requests run and wait")
    return EngineMetrics(
        running=running,
        waiting=waiting + (swapped or 0),
        kv_use=_kv_use(page),
        generation_tokens=_sum(page, b"vllm:generation_tokens_total", _MOST_COUNTED),
        prompt_tokens=_sum(page, b"vllm:prompt_tokens_total", _MOST_COUNTED),
        iterations=_sum(page, b"vllm:iteration_tokens_total_count", _MOST_COUNTED),
        preemptions=_sum(page, b"vllm:num_preemptions_total", _MOST_COUNTED),
        process_start=_start(page),
    )


def series(page: bytes, name: bytes) -> Iterator[tuple[bytes, float]]:
    """Labels (as they stand between the braces) and value of every series of exactly this name.

    Lines that break the format are no series.
    """
    start = page.find(name)
    while start >= 0:
        behind = start + len(name)
        if start == 0 or page[start - 1 : start] == b"\n":
            match = _SERIES.match(page, behind)
            if match:
                try:
                    yield match.group(1) or b"", float(match.group(2))
                except ValueError:
                    pass
        start = page.find(name, behind)


def _sum(page: bytes, name: bytes, most: int) -> int | None:
    values = [value for _unused, value in series(page, name)]
    if not values or not all(0 <= value <= most for value in values):
        return None
    total = math.fsum(values)
    return round(total) if total <= most else None


def _kv_use(page: bytes) -> float | None:
    for name in (b"vllm:kv_cache_usage_perc", b"vllm:gpu_cache_usage_perc"):
        values = [value for _unused, value in series(page, name)]
        if values:
            return max(values) if all(0 <= value <= 1 for value in values) else None
    return None


def _start(page: bytes) -> float | None:
    values = [value for _unused, value in series(page, b"process_start_time_seconds")]
    return values[0] if len(values) == 1 and 0 < values[0] < _LATEST_START else None
