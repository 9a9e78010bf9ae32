# SPDX-License-Identifier: GPL-3.0-or-later
"""Whether an engine gets on: busy or idle is not hung; one that owes answers and stands still is."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ansible_collections.ringmaster.inference.plugins.module_utils.engine_metrics import EngineMetrics
from ringmaster_agent.progress import Progress


def reading(running: int = 1, waiting: int = 0, **counters: Any) -> EngineMetrics:
    return EngineMetrics(running, waiting, **{"generation_tokens": 10, "prompt_tokens": 5, "iterations": 3, **counters})


def test_standing_still_with_requests_is_counted_from_the_first_such_reading() -> None:
    progress = Progress()
    assert [progress.stalled(reading(), 100 + seconds) for seconds in (0, 0.2, 5, 12)] == [0, 0.2, 5, 12]


@pytest.mark.parametrize("counter", ["generation_tokens", "prompt_tokens", "iterations"])
def test_any_growth_is_progress(counter: str) -> None:
    progress = Progress()
    progress.stalled(reading(), 0)
    assert progress.stalled(reading(**{counter: 11}), 9) == 0
    assert progress.stalled(reading(**{counter: 11}), 10) == 1


def test_idle_engine_never_stalls() -> None:
    progress = Progress()
    assert [progress.stalled(reading(0), moment) for moment in (0, 100, 1000)] == [0, 0, 0]
    # What comes after a long idle time is counted from then on.
    assert progress.stalled(reading(1), 1001) <= 1  # type: ignore[operator]
    assert progress.stalled(reading(1), 1004) <= 4  # type: ignore[operator]


def test_requests_that_only_wait_are_owed_an_answer() -> None:
    progress = Progress()
    progress.stalled(reading(0, 3), 0)
    assert progress.stalled(reading(0, 3), 8) == 8


def test_new_life_begins_anew() -> None:
    progress = Progress()
    progress.stalled(reading(process_start=1.0), 0)
    assert progress.stalled(reading(process_start=1.0), 9) == 9
    assert progress.stalled(reading(process_start=2.0), 10) == 0
    assert progress.stalled(reading(process_start=2.0, generation_tokens=0), 11) == 0  # fell: another one


def test_engine_without_counters_is_unknown_while_it_owes() -> None:
    progress = Progress()
    bare = EngineMetrics(1, 0)
    assert progress.stalled(bare, 0) is None
    assert progress.stalled(EngineMetrics(0, 0), 5) == 0


def test_a_busy_engine_with_a_long_queue_for_ten_minutes() -> None:
    """500 requests queue; a step every half second, at times one of four seconds with a long prompt."""
    progress = Progress()
    moment, tokens, steps, worst = 0.0, 0, 0, 0.0
    while moment < 600:
        moment += 0.2
        if steps % 50 == 49 and moment % 5 < 4:
            pass  # in the middle of the long step nothing is counted
        elif int(moment * 10) % 5 == 0:
            tokens, steps = tokens + 256, steps + 1
        stalled = progress.stalled(reading(256, 500, generation_tokens=tokens, iterations=steps), moment)
        worst = max(worst, stalled or 0)
    assert worst < 5


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 3)), min_size=1, max_size=30))
def test_never_longer_than_since_the_last_growth(happened: list[tuple[int, int]]) -> None:
    progress, tokens, grew_at = Progress(), 0, 0.0
    for moment, (running, grown) in enumerate(happened):
        tokens += grown
        if grown or not running:
            grew_at = float(moment)
        stalled = progress.stalled(reading(running, generation_tokens=tokens), float(moment))
        assert stalled is not None
        assert 0 <= stalled <= moment - grew_at
        assert running or stalled == 0
