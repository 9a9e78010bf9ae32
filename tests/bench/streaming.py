# SPDX-License-Identifier: GPL-3.0-or-later
"""Streams through the edge: failures, first token, and chunks at the client against the engines' own.

On the fleet of `make rehearse`: 200 clients for 30 s by default, each sending its next chat when the last one ended.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import urllib.request

from rehearsal import site
from tests.bench.rehearsed import rehearsed
from tests.support import load
from tests.support.load import percentile


def main() -> int:
    """Print the figures; status 1 when a request failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streams", type=int, default=200)
    parser.add_argument("--seconds", type=float, default=30)
    options = parser.parse_args()
    fleet = rehearsed()
    started = time.time()
    what = load.Load(
        fleet.addresses[fleet.gateway],
        site.PUBLIC_PORT,
        fleet.secret("edge_api_key"),
        fleet.model,
        options.streams,
        options.seconds,
    )
    outcomes = load.run(what)
    seconds = time.time() - started
    failed = [outcome for outcome in outcomes if outcome.error]
    whole = [outcome for outcome in outcomes if not outcome.error]
    intervals = [interval * 1000 for outcome in whole for interval in outcome.intervals]
    first = [(outcome.first_chunk - outcome.started) * 1000 for outcome in whole]
    chunks = sum(outcome.chunks for outcome in whole)
    print(f"{options.streams} streams for {options.seconds:g} s through {fleet.gateway}")
    print(f"{len(outcomes)} requests, {len(failed)} failed, {chunks / seconds:.0f} chunks/s")
    print(f"first token: p50 {percentile(first, 0.5):.0f} ms, p99 {percentile(first, 0.99):.0f} ms")
    engines = {}
    for engine in fleet.hosts.groups["engines"]:
        url = f"http://{fleet.addresses[engine]}:8100/standin/intervals?since={started}"
        engines[engine] = json.loads(urllib.request.urlopen(url, timeout=5).read())
    for share in ("p50", "p99"):
        at_client = percentile(intervals, int(share[1:]) / 100)
        at_engine = max(found[share] for found in engines.values())
        ratio = at_client / at_engine
        print(
            f"between chunks, {share}: client {at_client:.1f} ms, slowest engine {at_engine:.1f} ms, ratio {ratio:.3f}"
        )
    for outcome in failed[:5]:
        print(f"failed: {outcome.error}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
