# SPDX-License-Identifier: GPL-3.0-or-later
"""What an engine's metrics page says of load and progress, and that no page is believed too much."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ansible_collections.ringmaster.inference.plugins.module_utils.engine_metrics import (
    EngineMetrics,
    EngineMetricsError,
    parse,
    series,
)
from standin_engine.metrics import EngineMetrics as StandinMetrics
from standin_engine.metrics import MetricsPage

LOAD = b'vllm:num_requests_running{engine="0"} 2\nvllm:num_requests_waiting{engine="0"} 1\n'


def test_page_of_a_whole_engine() -> None:
    engine = StandinMetrics("m", 4096, {"num_gpu_blocks": "100", "block_size": "16"}, 4)
    engine.running, engine.cache_usage, engine.preemptions = 3, 0.25, 7
    engine.waiting["capacity"] = 5
    engine.generation_tokens, engine.prompt_tokens = 1000, 500
    engine.iteration_tokens.observe(8, times=42)
    found = parse(MetricsPage(engine).text())
    assert found == EngineMetrics(3, 5, 0.25, 1000, 500, 42, 7, found.process_start)
    assert found.process_start is not None
    assert found.process_start > 1e9


def test_old_names_and_several_ranks() -> None:
    page = (
        b'vllm:num_requests_running{engine="0"} 2.0\nvllm:num_requests_running{engine="1"} 3.0\n'
        b"vllm:num_requests_waiting 1\nvllm:num_requests_swapped 4\n"
        b'vllm:gpu_cache_usage_perc{engine="0"} 0.25\nvllm:gpu_cache_usage_perc{engine="1"} 0.5\n'
        b'vllm:generation_tokens_total{a="}",b="\\"{"} 10 1700000000000\r\nvllm:generation_tokens_total{a="x"} 1e3'
    )
    assert parse(page) == EngineMetrics(5, 5, kv_use=0.5, generation_tokens=1010)


def test_names_that_only_begin_alike_are_others() -> None:
    page = (
        LOAD + b"vllm:generation_tokens_total_x 5\n# vllm:generation_tokens_total 6\nxvllm:generation_tokens_total 7\n"
    )
    assert parse(page).generation_tokens is None
    assert list(series(page, b"vllm:num_requests_running")) == [(b'engine="0"', 2.0)]


@pytest.mark.parametrize("value", [b"nan", b"+Inf", b"-1", b"1e30", b"x", b"", b"1 2 3"])
def test_impossible_numbers_are_not_taken(value: bytes) -> None:
    found = parse(LOAD + b"vllm:generation_tokens_total " + value + b"\nvllm:kv_cache_usage_perc " + value + b"\n")
    assert (found.generation_tokens, found.kv_use) == (None, None)
    with pytest.raises(EngineMetricsError):
        parse(b"vllm:num_requests_running " + value + b"\nvllm:num_requests_waiting 0\n")


@given(st.binary(max_size=200), st.binary(max_size=50))
def test_no_page_makes_it_fail_otherwise(junk: bytes, more: bytes) -> None:
    for page in (junk, LOAD + junk, LOAD + b"vllm:generation_tokens_total" + junk + more):
        with contextlib.suppress(EngineMetricsError):
            found = parse(page)
            assert 0 <= found.running <= 1_000_000
            assert found.kv_use is None or 0 <= found.kv_use <= 1
