# SPDX-License-Identifier: GPL-3.0-or-later
"""The page of metrics: written anew when something of it has changed, and then always."""

from __future__ import annotations

from typing import Any

import pytest

from standin_engine.metrics import Distribution, EngineMetrics, MetricsPage


def change(metrics: EngineMetrics, name: str) -> None:
    value: Any = getattr(metrics, name)
    if isinstance(value, Distribution):
        value.observe(1.0)
    elif isinstance(value, dict):
        value[next(iter(value))] += 1
    elif isinstance(value, (int, float)):
        setattr(metrics, name, value + 1)
    else:
        setattr(metrics, name, {"adapter"})


METRICS = EngineMetrics("m", 1000, {"block_size": "16"}, 2)
# What is set once, when the engine starts.
FIXED = {"_model_name", "_cache_config", "_max_loras", "_created"}


@pytest.mark.parametrize("name", sorted(vars(METRICS).keys() - FIXED))
def test_whatever_changes_is_seen(name: str) -> None:
    metrics = EngineMetrics("m", 1000, {"block_size": "16"}, 2)
    page = MetricsPage(metrics)
    before, state = page.text(), metrics.state()
    change(metrics, name)
    assert metrics.state() != state
    assert page.text() != before


def test_an_idle_engine_writes_what_it_says_of_itself_once(monkeypatch: pytest.MonkeyPatch) -> None:
    metrics = EngineMetrics("m", 1000, {"block_size": "16"}, None)
    page = MetricsPage(metrics)
    first = page.text()
    assert b'vllm:num_requests_running{engine="0",model_name="m"} 0.0' in first
    monkeypatch.setattr(EngineMetrics, "collect", lambda _self: pytest.fail("it was written again"))
    assert b'vllm:num_requests_running{engine="0",model_name="m"} 0.0' in page.text()
    assert b"process_start_time_seconds" in page.text()
