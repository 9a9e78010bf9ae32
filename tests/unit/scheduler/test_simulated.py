# SPDX-License-Identifier: GPL-3.0-or-later
"""The core in a simulated site: over a day nothing leaks, under overload nobody starves and Retry-After is true."""

from __future__ import annotations

import random

import pytest

from tests.bench.simulator import traces
from tests.bench.simulator.engines import Engine
from tests.bench.simulator.policies import MODEL, Ringmaster
from tests.bench.simulator.site import Request, Site

DAY = 24 * 3600.0


def mixed_fleet() -> list[Engine]:
    return [Engine("a1", "a100-80g"), Engine("a2", "a100-80g"), Engine("l1", "l40s")]


def wave(seed: int) -> list[traces.Ask]:
    """A day of a service: quiet at night, and clients of whom some lose patience."""
    source = random.Random(seed)
    asks = []
    for start in range(0, int(DAY), 600):
        for _unused in range(source.choice([0, 5, 20, 120])):
            prompt = source.choice([80, 700, 700, 3000, 12_000])
            asks.append(
                traces.Ask(
                    start + source.random() * source.choice([2, 600]),
                    prompt,
                    source.randint(1, 400),
                    source.choice("abcdef"),
                    patience=source.choice([None, None, 0.3, 5.0]),
                )
            )
    return sorted(asks, key=lambda ask: ask.at)


def test_a_day_leaks_no_count() -> None:
    source = random.Random(7)
    policy = Ringmaster(pace=20.0)
    policy.hears = lambda: source.random() > 0.05
    requests = Site(mixed_fleet(), policy).run(wave(7))
    assert len(requests) > 2000
    assert all(request.ended_at is not None for request in requests)
    assert {request.status for request in requests} <= {200, 429, 499}
    policy._count()
    policy.site.now += 10
    policy._count()
    core = policy.core
    assert core.in_flight == 0
    assert core._requests == {}
    assert [(view.held, view.foreign, view.tokens) for view in core.views(policy.site.now)] == [(0, 0, 0)] * 3
    assert sum(core.outcomes.values()) == len(requests)
    assert sum(view.placements for view in core.views(policy.site.now)) <= len(requests)
    assert len(core._pools[MODEL].heap) <= 64


def overload(rate: float) -> tuple[Ringmaster, list[Request]]:
    """Two minutes of more than the fleet can do, most of it by one key, with long prompts among it."""
    source = random.Random(3)
    asks = traces.steady(rate, 120.0, (1000, 2000), 60, keys=["heavy"], seed=1)
    asks += traces.steady(rate / 10, 120.0, (1000, 2000), 60, keys=["light"], seed=2)
    asks += [traces.Ask(source.random() * 120, 10_000, 50, "patient") for _unused in range(30)]
    policy = Ringmaster()
    return policy, Site(mixed_fleet(), policy).run(sorted(asks, key=lambda ask: ask.at))


@pytest.fixture(scope="module")
def overloaded() -> tuple[Ringmaster, list[Request]]:
    return overload(55.0)


def test_under_overload_nobody_starves(overloaded: tuple[Ringmaster, list[Request]]) -> None:
    policy, requests = overloaded
    numbers = policy.core.policy
    refused = [request for request in requests if request.status == 429]
    assert len(refused) > 0.2 * len(requests)
    for request in requests:
        if request.started_at is not None:
            waited = request.started_at - request.ask.at
            assert waited <= 2 * numbers.class_of(request.ask.prompt).deadline
    shares = {
        key: sum(request.status == 200 for request in requests if request.ask.key == key)
        / sum(request.ask.key == key for request in requests)
        for key in ("heavy", "light", "patient")
    }
    assert shares["light"] > 0.95
    assert shares["patient"] > 0.95
    assert 0.1 < shares["heavy"] < shares["light"]


def test_retry_after_is_when_those_before_have_started() -> None:
    site = Site(mixed_fleet(), Ringmaster())
    requests = site.run(traces.steady(70.0, 90.0, (1000, 2000), 60, keys=["one"], seed=1))
    refusals = [request for request in requests if request.status == 429 and 30 < request.ask.at < 70]
    assert len(refusals) > 500
    right = 0
    for refused in refusals:
        # Those that wait in its class, which all of this trace are in, start before it would have.
        ahead = [
            request.started_at
            for request in requests
            if request.started_at is not None and request.ask.at < refused.ask.at < request.started_at
        ]
        wait = max(ahead) - refused.ask.at
        assert refused.retry_after is not None
        right += abs(refused.retry_after - wait) <= 0.3 * wait
    assert right >= 0.9 * len(refusals)


def test_same_trace_gives_the_same_day() -> None:
    runs = [
        [
            (request.engine, request.started_at, request.status)
            for request in Site(mixed_fleet(), Ringmaster()).run(traces.bursts(3, seed=5))
        ]
        for _unused in range(2)
    ]
    assert runs[0] == runs[1]


@pytest.mark.parametrize("rate", [4.0, 22.0, 66.0], ids=["low", "medium", "full"])
def test_tenth_of_the_weight_is_a_tenth_of_the_share_at_any_load(rate: float) -> None:
    policy = Ringmaster()
    site = Site([Engine(name, "a100-80g") for name in ("a1", "a2", "a3", "a4")], policy)
    site.at(5.0, lambda: policy.core.set_weight("a1", 0.1, site.now))
    requests = site.run(traces.steady(rate, 125.0, (600, 1400), 150, keys=["one"], seed=1))
    # What it holds from before goes first.
    taken = [request for request in requests if request.started_at is not None and request.started_at > 25]
    share = sum(request.engine == "a1" for request in taken) / len(taken)
    assert share == pytest.approx(0.1 / 3.1, rel=0.2)


def test_who_waits_goes_elsewhere_when_an_engine_goes_out() -> None:
    policy = Ringmaster()
    site = Site([Engine("a1", "a100-80g"), Engine("a2", "a100-80g")], policy)
    site.at(20.0, lambda: policy.core.set_weight("a1", 0.0, site.now))
    requests = site.run(traces.steady(25.0, 40.0, (600, 1400), 150, keys=["one"], seed=1))
    late = [request for request in requests if request.started_at is not None and request.started_at > 20.5]
    waited = [request for request in late if request.ask.at < 20.0]
    assert waited
    # After the half second in which HAProxy is told.
    assert not any(request.engine == "a1" for request in late)


@pytest.mark.parametrize("rate", [20.0, 60.0, 120.0])
def test_tenth_of_a_small_engine_with_short_answers_is_less_than_a_slot(rate: float) -> None:
    """A slot is the least that HAProxy's queue gives, and it had kept half of the small engine's share."""
    policy = Ringmaster()
    site = Site([Engine("a1", "a100-80g"), Engine("a2", "a100-80g"), Engine("l1", "l40s")], policy)
    site.at(60.0, lambda: policy.core.set_weight("l1", 0.1, site.now))
    requests = site.run(traces.steady(rate, 120.0, (20, 60), 20, keys=["one"], seed=1))
    well = [request.engine == "l1" for request in requests if 20 < (request.started_at or 0) < 60]
    ill = [request.engine == "l1" for request in requests if (request.started_at or 0) > 65]
    assert all(request.status == 200 for request in requests)
    assert sum(ill) / len(ill) == pytest.approx(0.1 * sum(well) / len(well), rel=0.35)
