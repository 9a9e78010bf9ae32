# SPDX-License-Identifier: GPL-3.0-or-later
"""The parser of engines' metrics: good pages of old and new releases, odd ones, hostile ones."""

from __future__ import annotations

from contextlib import suppress

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Gauge, generate_latest

from ringmaster_scheduler import exposition
from ringmaster_scheduler.exposition import EngineMetrics, ExpositionError

NEW = b"""# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="qwen2-7b-instruct"} 3.0
# HELP vllm:num_requests_waiting Number of requests waiting to be processed.
# TYPE vllm:num_requests_waiting gauge
vllm:num_requests_waiting{engine="0",model_name="qwen2-7b-instruct"} 2.0
# TYPE vllm:num_requests_waiting_by_reason gauge
vllm:num_requests_waiting_by_reason{engine="0",model_name="qwen2-7b-instruct",reason="capacity"} 99.0
vllm:kv_cache_usage_perc{engine="0",model_name="qwen2-7b-instruct"} 0.415
vllm:cache_config_info{block_size="16",cache_dtype="auto",num_gpu_blocks="27000",num_gpu_blocks_override="None"} 1.0
"""
OLD = b"""vllm:num_requests_running{model_name="m"} 4
vllm:num_requests_swapped{model_name="m"} 1
vllm:num_requests_waiting{model_name="m"} 2
vllm:gpu_cache_usage_perc{model_name="m"} 0.5
vllm:cpu_cache_usage_perc{model_name="m"} 0.9
"""
COUNTERS = b"""vllm:num_preemptions_total{engine="0"} 7.0
vllm:num_preemptions_created{engine="0"} 1.7e+09
vllm:generation_tokens_total{engine="0"} 123456.0
vllm:prompt_tokens_total{engine="0"} 5000.0
vllm:prompt_tokens_by_source_total{engine="0",source="local_compute"} 4000.0
vllm:prompt_tokens_by_source_total{engine="0",source="local_cache_hit"} 1000.0
vllm:iteration_tokens_total_bucket{engine="0",le="1.0"} 5.0
vllm:iteration_tokens_total_count{engine="0"} 777.0
vllm:iteration_tokens_total_sum{engine="0"} 9e+06
process_start_time_seconds 1.70000000025e+09
vllm:lora_requests_info{max_lora="2",running_lora_adapters="old",waiting_lora_adapters=""} 1700000000.5
vllm:lora_requests_info{max_lora="2",running_lora_adapters="sql,chat",waiting_lora_adapters="old"} 1700000001.5
"""
LEAST = b"vllm:num_requests_running 1\nvllm:num_requests_waiting 0\n"


def metrics(running: int, waiting: int, kv_use: float | None, kv_tokens: int | None) -> EngineMetrics:
    """Return what a page without counters says."""
    return EngineMetrics(running, waiting, kv_use, kv_tokens, None, None, None, (), None, None, None)


@pytest.mark.parametrize("value", [b"NaN", b"0", b"-1", b"1e300", b"soon", b"1\nprocess_start_time_seconds 2"])
def test_impossible_start_of_the_process_is_not_told(value: bytes) -> None:
    assert exposition.parse(LEAST + b"process_start_time_seconds " + value + b"\n").process_start is None


def test_counters_and_adapters() -> None:
    found = exposition.parse(LEAST + COUNTERS)
    assert found == EngineMetrics(1, 0, None, None, 7, 4000, 123456, ("chat", "sql"), 2, 777, 1700000000.25)


def test_prompt_tokens_of_releases_that_do_not_tell_their_source() -> None:
    page = b"".join(line for line in COUNTERS.splitlines(keepends=True) if b"by_source" not in line)
    assert exposition.parse(LEAST + page).prompt_tokens == 5000


@pytest.mark.parametrize("value", [b"NaN", b"-1", b"1e300"])
def test_impossible_counter_is_not_told(value: bytes) -> None:
    page = LEAST + b"vllm:generation_tokens_total " + value + b"\nvllm:num_preemptions_total 3\n"
    found = exposition.parse(page)
    assert (found.generation_tokens, found.preemptions) == (None, 3)


def test_present_names() -> None:
    assert exposition.parse(NEW) == metrics(3, 2, 0.415, 432_000)


def test_former_names() -> None:
    assert exposition.parse(OLD) == metrics(4, 3, 0.5, None)


def test_present_name_wins_where_both_are_shown() -> None:
    page = LEAST + b"vllm:gpu_cache_usage_perc 0.1\nvllm:kv_cache_usage_perc 0.2\n"
    assert exposition.parse(page).kv_use == 0.2


def test_ranks_are_added_up_and_the_fullest_cache_counts() -> None:
    page = b"".join(
        b'vllm:num_requests_running{engine="%d"} %d\nvllm:num_requests_waiting{engine="%d"} 1\n'
        b'vllm:kv_cache_usage_perc{engine="%d"} 0.%d\n'
        b'vllm:cache_config_info{engine="%d",num_gpu_blocks="100",block_size="16"} 1\n'
        % (rank, rank, rank, rank, rank, rank)
        for rank in (1, 2, 3)
    )
    assert exposition.parse(page) == metrics(6, 3, 0.3, 4800)


@pytest.mark.parametrize(
    "page",
    [
        LEAST.rstrip(b"\n"),
        LEAST.replace(b"\n", b"\r\n"),
        LEAST.replace(b" 1", b"\t1 \t"),
        LEAST.replace(b" 1", b" 1 1700000000000"),
        LEAST.replace(b" 1", b'{a="}",b="\\"}",c="x y",d="\\\\"} 1e0'),
        LEAST.replace(b" 1", b'{a="b",} +1'),
        b"\xff\xfe\x00\n" + LEAST + b"\x00" * 50,
        b"about vllm:num_requests_running 7\n" + LEAST,
        b"vllm:num_requests_running_other 7\nvllm:num_requests_running\n" + LEAST,
        b'vllm:num_requests_running{open="7\n' + LEAST,
        b"vllm:num_requests_running seven\n" + LEAST,
    ],
)
def test_odd_but_readable(page: bytes) -> None:
    assert exposition.parse(page) == metrics(1, 0, None, None)


@pytest.mark.parametrize("value", [b"NaN", b"+Inf", b"-Inf", b"-1", b"1e300", b"1000001", b"9" * 5000])
@pytest.mark.parametrize("name", [exposition.RUNNING, exposition.WAITING, exposition.SWAPPED])
def test_impossible_number_of_requests(name: bytes, value: bytes) -> None:
    page = (
        b"".join(line + b"\n" for line in LEAST.splitlines() if not line.startswith(name)) + name + b" " + value + b"\n"
    )
    with pytest.raises(ExpositionError, match=f"{name.decode()} has an impossible value"):
        exposition.parse(page)


def test_negative_rank_is_not_hidden_by_another() -> None:
    with pytest.raises(ExpositionError, match="impossible"):
        exposition.parse(b'vllm:num_requests_running{engine="1"} -1\n' + LEAST)


@pytest.mark.parametrize("missing", [exposition.RUNNING, exposition.WAITING])
def test_missing_series_is_named(missing: bytes) -> None:
    page = b"".join(line + b"\n" for line in NEW.splitlines() if not line.startswith(missing + b"{"))
    with pytest.raises(ExpositionError, match=f"no {missing.decode()}"):
        exposition.parse(page)


@pytest.mark.parametrize("value", [b"NaN", b"+Inf", b"-0.1", b"1.5", b"100"])
def test_impossible_cache_use_is_unknown(value: bytes) -> None:
    assert exposition.parse(LEAST + b"vllm:kv_cache_usage_perc " + value).kv_use is None


@pytest.mark.parametrize(
    "labels",
    [
        b"",
        b'block_size="16"',
        b'block_size="16",num_gpu_blocks="None"',
        b'block_size="0",num_gpu_blocks="5"',
        b'block_size="-1",num_gpu_blocks="5"',
        b'block_size="16",num_gpu_blocks="' + b"9" * 5000 + b'"',
        b'user_specified_block_size="16",num_gpu_blocks="5"',
    ],
)
def test_pool_of_unknown_size(labels: bytes) -> None:
    assert exposition.parse(LEAST + b"vllm:cache_config_info{" + labels + b"} 1\n").kv_tokens is None


@given(running=st.integers(0, 10_000), waiting=st.integers(0, 10_000), use=st.floats(0, 1), label=st.text(max_size=20))
def test_page_of_the_client_library(running: int, waiting: int, use: float, label: str) -> None:
    registry = CollectorRegistry()
    for name, value in (
        ("vllm:num_requests_running", running),
        ("vllm:num_requests_waiting", waiting),
        ("vllm:kv_cache_usage_perc", use),
    ):
        Gauge(name, label, ["model_name"], registry=registry).labels(label).set(value)
    assert exposition.parse(generate_latest(registry)) == metrics(running, waiting, use, None)


@given(st.lists(st.one_of(st.binary(max_size=40), st.sampled_from(NEW.splitlines() + OLD.splitlines())), max_size=20))
@example([exposition.RUNNING + b"{" + b'"' * 1001])
@example([exposition.RUNNING + b"{" + b'a="\\' * 1001])
def test_junk_is_a_reading_or_an_error(lines: list[bytes]) -> None:
    with suppress(ExpositionError):
        metrics = exposition.parse(b"\n".join(lines))
        assert metrics.running >= 0
        assert metrics.waiting >= 0
        assert metrics.kv_use is None or 0 <= metrics.kv_use <= 1
        assert metrics.kv_tokens is None or metrics.kv_tokens > 0


@given(st.integers(0, len(NEW)), st.binary(max_size=8))
def test_damaged_page_is_a_reading_or_an_error(position: int, damage: bytes) -> None:
    with suppress(ExpositionError):
        exposition.parse(NEW[:position] + damage + NEW[position + len(damage) :])
