# SPDX-License-Identifier: GPL-3.0-or-later
"""Policies side by side, in simulated time: round-robin, least-connections, random, power of two, and the scheduler's
core.

Usage: python tests/bench/policies.py [--trace FILE] [--seeds N] [--scenario NAME]

The fleet is 2 × A100 and 1 × L40S (card profiles: the stand-in engine's). Without a trace file four scenarios are
played:

* *bursts*: 80 requests in 0.5 s, then 3 s of nothing, 2 % of them with 4,000 to 8,000 tokens, answers of 600 tokens on
  average; and the same without the long ones.
* *prefixes*: prompts that begin with one of 600 texts of 4,000 tokens, wanted unequally, on four A100.
* *overload*: steady load from half to three times what the fleet can do.
* *estimates*: the bursts again, with lengths of prompts estimated from the body, which is wrong by up to a half.
* *weights*: one of the engines has a tenth of its health weight for two minutes of four, at a low, a medium and a full
  load. Asked: its share is then a tenth, relative to what it can, which is its share at full load before.

Ratios are what counts; the last lines compare them with what is asked of the scheduler.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

CHECKOUT = Path(__file__).resolve().parents[2]
sys.path[:0] = [
    str(CHECKOUT),
    str(CHECKOUT / "roles" / "scheduler" / "files"),
    str(CHECKOUT / "roles" / "vllm" / "files" / "standin_engine"),
]

from tests.bench.simulator import traces  # noqa: E402
from tests.bench.simulator.engines import Engine  # noqa: E402
from tests.bench.simulator.policies import (  # noqa: E402
    LeastConnections,
    PowerOfTwo,
    Random,
    Ringmaster,
    RoundRobin,
)
from tests.bench.simulator.site import Policy, Request, Site  # noqa: E402

MakePolicy = Callable[[], Policy]
POLICIES: dict[str, MakePolicy] = {
    "round-robin": RoundRobin,
    "least-connections": LeastConnections,
    "random": Random,
    "power-of-two": PowerOfTwo,
    "ringmaster": Ringmaster,
}
SHORT = 2048
"""Tokens up to which a prompt counts as short here: the scheduler's class fast."""

CAPACITY = 28.0
"""Requests/s of the overload scenario that the fleet can serve for long, whatever the policy."""

PATIENCE = 20.0
"""Seconds to the first token within which an answer counts as good in the overload scenario."""


class Result(NamedTuple):
    """What one policy made of one trace; times in seconds, lengths in tokens."""

    first_token: list[float]
    first_token_short: list[float]
    produced: int
    load: dict[str, int]
    requests: list[Request]

    @property
    def mean(self) -> float:
        """Mean time to the first token."""
        return sum(self.first_token) / len(self.first_token)

    @property
    def imbalance(self) -> float:
        """Requests of the busiest engine over the mean."""
        return max(self.load.values()) / (sum(self.load.values()) / len(self.load))


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that is not exceeded by that share of the values; NaN of none."""
    ordered = sorted(values)
    return ordered[max(0, -int(-share * len(ordered) // 1) - 1)] if ordered else float("nan")


def fleet() -> list[Engine]:
    """Return fresh engines."""
    return [Engine("a100-1", "a100-80g"), Engine("a100-2", "a100-80g"), Engine("l40s-1", "l40s")]


def even_fleet() -> list[Engine]:
    """Return engines of one card, for what has nothing to do with mixed ones."""
    return [Engine(f"a100-{number}", "a100-80g") for number in range(1, 5)]


def play(make: MakePolicy, trace: list[traces.Ask], engines: Callable[[], list[Engine]] = fleet) -> Result:
    """Play a trace. What an engine has produced counts until the trace's last request came and 3 s more."""
    site = Site(engines(), make(), queue_timeout=60.0)
    produced: list[int] = []
    end = trace[-1].at + 3.0
    site.at(end, lambda: produced.append(sum(each.engine.generation_tokens for each in site.servers.values())))
    requests = site.run(trace)
    good = [request for request in requests if request.status == 200]
    times = [(request.time_to_first_token or 0.0, request.ask.prompt) for request in good]
    load = dict.fromkeys(site.servers, 0)
    for request in good:
        load[request.engine or ""] += 1
    return Result(
        [time for time, _unused in times],
        [time for time, prompt in times if prompt <= SHORT],
        produced[0] if produced else sum(request.ask.output for request in good),
        load,
        requests,
    )


def join(results: Sequence[Result]) -> Result:
    """Return several runs as one."""
    load: dict[str, int] = {}
    for result in results:
        for name, count in result.load.items():
            load[name] = load.get(name, 0) + count
    return Result(
        [time for result in results for time in result.first_token],
        [time for result in results for time in result.first_token_short],
        sum(result.produced for result in results),
        load,
        [request for result in results for request in result.requests],
    )


def compare(
    title: str,
    trace_of: Callable[[int], list[traces.Ask]],
    seeds: int,
    policies: dict[str, MakePolicy] | None = None,
    engines: Callable[[], list[Engine]] = fleet,
) -> dict[str, Result]:
    """Play a trace under every policy, or those that are given, and print a table."""
    print(f"\n{title}")
    print(
        f"{'policy':<20} {'answers':>8} {'refused':>8} {'TTFT mean':>10} {'p50':>7} {'p99':>7} {'short p99':>10}"
        f" {'tokens':>10} {'busiest':>8}"
    )
    results = {}
    for name, make in (policies or POLICIES).items():
        result = join([play(make, trace_of(seed), engines) for seed in range(1, seeds + 1)])
        results[name] = result
        refused = sum(request.status == 429 for request in result.requests)
        print(
            f"{name:<20} {len(result.first_token):>8} {refused:>8} {result.mean:>10.3f}"
            f" {percentile(result.first_token, 0.5):>7.3f} {percentile(result.first_token, 0.99):>7.3f}"
            f" {percentile(result.first_token_short, 0.99):>10.3f} {result.produced:>10,} {result.imbalance:>8.2f}",
            flush=True,
        )
    return results


def check(text: str, value: float, limit: float, at_most: bool = True) -> bool:
    """Print a ratio beside what is asked; whether it is reached."""
    right = value <= limit if at_most else value >= limit
    print(
        f"  {'ok  ' if right else 'MISS'} {text}: {value:.2f}, asked {'at most' if at_most else 'at least'} {limit:g}"
    )
    return right


def bench_bursts(seeds: int) -> None:
    """Bursts with a share of long prompts, and without."""

    def with_long(seed: int) -> list[traces.Ask]:
        return traces.bursts(40, long=(4000, 8000), long_share=0.02, output=600, seed=seed)

    def without_long(seed: int) -> list[traces.Ask]:
        return traces.bursts(40, long=(4000, 8000), long_share=-0.02, output=600, seed=seed)

    found = compare("bursts, 2 % of the prompts long", with_long, seeds)
    bare = compare("the same without the long ones", without_long, seeds)
    ours = found["ringmaster"]
    p99 = percentile(ours.first_token, 0.99)
    check("p99 TTFT over round-robin's", p99 / percentile(found["round-robin"].first_token, 0.99), 0.5)
    check("p99 TTFT over least-connections'", p99 / percentile(found["least-connections"].first_token, 0.99), 0.7)
    best = max(found["round-robin"].produced, found["least-connections"].produced)
    check("tokens produced over the better of both", ours.produced / best, 1.0, at_most=False)
    short = percentile(ours.first_token_short, 0.99)
    check(
        "short requests' p99 over theirs without long ones",
        short / percentile(bare["ringmaster"].first_token, 0.99),
        1.3,
    )


def bench_prefixes(seeds: int) -> None:
    """Prompts with shared beginnings."""
    found = compare(
        "shared beginnings, four A100",
        lambda seed: traces.shared_prefixes(8.0, 600.0, seed=seed),
        seeds,
        engines=even_fleet,
    )
    ours = found["ringmaster"]
    check("mean TTFT over random's", ours.mean / found["random"].mean, 0.5)
    check("busiest engine over the mean", ours.imbalance, 1.3)


def bench_overload(seeds: int) -> None:
    """Goodput from half to three times the capacity, and whether Retry-After is true."""
    print(f"\noverload: answers whose first token came within {PATIENCE:g} s, a second")
    goodput = {}
    true = [0, 0]
    for factor in (0.5, 1.0, 1.5, 2.0, 3.0):
        good = 0
        for seed in range(1, seeds + 1):
            trace = traces.steady(CAPACITY * factor, 120.0, (600, 1400), 150, keys=["one"], seed=seed)
            requests = play(Ringmaster, trace).requests
            good += sum(
                request.status == 200 and (request.time_to_first_token or PATIENCE) < PATIENCE and request.ask.at > 30
                for request in requests
            )
            if factor > 1:
                for index, value in enumerate(retry_after(requests)):
                    true[index] += value
        goodput[factor] = good / 90 / seeds
        print(f"  offered {CAPACITY * factor:>5.0f}/s, good {goodput[factor]:>6.1f}/s", flush=True)
    check("goodput at three times the load over its peak", goodput[3.0] / max(goodput.values()), 0.9, at_most=False)
    check("refusals whose Retry-After is right within 30 %", true[0] / max(1, sum(true)), 0.9, at_most=False)


def retry_after(requests: Sequence[Request]) -> tuple[int, int]:
    """Return how many refusals told, within 30 %, when all that waited before them had started, and how many did
    not."""
    right = wrong = 0
    started = sorted((request.ask.at, request.started_at) for request in requests if request.started_at is not None)
    for refused in requests:
        if refused.status != 429 or refused.retry_after is None or not 40 < refused.ask.at < 100:
            continue
        ahead = [start for at, start in started if at < refused.ask.at < start]
        wait = max(ahead, default=refused.ask.at) - refused.ask.at
        if abs(refused.retry_after - wait) <= 0.3 * wait:
            right += 1
        else:
            wrong += 1
    return right, wrong


def bench_estimates(seeds: int) -> None:
    """Bursts where nobody counts tokens."""
    compare(
        "bursts, lengths counted and estimated",
        lambda seed: traces.bursts(40, long=(4000, 8000), long_share=0.02, output=600, seed=seed),
        seeds,
        {"counted": Ringmaster, "estimated": lambda: Ringmaster(count_tokens=False, source=random.Random(1))},
    )


def weighted_shares(
    load: float, weight: float, ill: str, engines: Callable[[], list[Engine]], seed: int
) -> dict[str, float]:
    """Return the share of all requests that the engine `ill` took in each minute or two: before, while it has the
    weight, and after; of what was offered, how much was refused is told as well."""
    policy = Ringmaster()
    site = Site(engines(), policy, queue_timeout=60.0)
    site.at(60.0, lambda: policy.core.set_weight(ill, weight, site.now))
    site.at(180.0, lambda: policy.core.set_weight(ill, 1.0, site.now))
    requests = site.run(traces.steady(load, 240.0, (600, 1400), 150, keys=["one"], seed=seed))

    def share(begin: float, end: float) -> float:
        taken = [request for request in requests if request.started_at and begin <= request.started_at < end]
        return sum(request.engine == ill for request in taken) / max(1, len(taken))

    return {
        "before": share(20.0, 60.0),
        "while": share(80.0, 180.0),
        "after": share(200.0, 240.0),
        "refused": sum(request.status == 429 for request in requests) / len(requests),
    }


def bench_weights(seeds: int) -> None:
    """What a tenth of the weight makes of an engine's share."""
    for title, engines, ill, capacity in (
        ("four A100", even_fleet, "a100-1", 44.0),
        ("2 × A100 and an L40S, the L40S ill", fleet, "l40s-1", CAPACITY),
        ("2 × A100 and an L40S, an A100 ill", fleet, "a100-1", CAPACITY),
    ):
        print(f"\nan engine of a tenth of its weight, {title}")
        full = 0.0
        for name, factor in (("full", 1.5), ("medium", 0.5), ("low", 0.1)):
            runs = [weighted_shares(capacity * factor, 0.1, ill, engines, seed) for seed in range(1, seeds + 1)]
            mean = {key: sum(run[key] for run in runs) / len(runs) for key in runs[0]}
            full = full or mean["before"]
            # A tenth of its capacity beside the others' whole.
            expected = 0.1 * full / (1 - 0.9 * full)
            print(
                f"  {name:<7} {capacity * factor:>5.1f}/s: share {mean['before']:.4f} before, {mean['while']:.4f} at a"
                f" tenth, {mean['after']:.4f} after; refused {mean['refused']:.1%}",
                flush=True,
            )
            check("    share over the one expected", mean["while"] / expected, 1.25)
            check("    share over the one expected", mean["while"] / expected, 0.75, at_most=False)


SCENARIOS = {
    "weights": bench_weights,
    "bursts": bench_bursts,
    "prefixes": bench_prefixes,
    "overload": bench_overload,
    "estimates": bench_estimates,
}


def main() -> None:
    """Print tables and ratios."""
    parser = argparse.ArgumentParser(description="Policies side by side, in simulated time.")
    parser.add_argument("--trace", type=Path, help="play this file instead of the scenarios")
    parser.add_argument("--seeds", type=int, default=3, help="runs of each scenario, each with another trace")
    parser.add_argument("--scenario", choices=SCENARIOS, help="only this one")
    options = parser.parse_args()
    if options.trace is not None:
        asks = traces.read(options.trace)
        compare(str(options.trace), lambda _unused: asks, 1)
        return
    for name, scenario in SCENARIOS.items():
        if options.scenario in (None, name):
            scenario(options.seeds)


if __name__ == "__main__":
    main()
