# SPDX-License-Identifier: GPL-3.0-or-later
"""Command line: run the scheduler, check a configuration, or probe a scheduler that runs."""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import logging
import sys

import uvloop

from ringmaster_scheduler import __version__, configuration, daemon
from ringmaster_scheduler.probe import ProbeError, probe

_PROBE_TIMEOUT_S = 2.0


def main(arguments: list[str] | None = None) -> int:
    """Return the exit status: 0 well, 1 failed, 2 wrong use or configuration."""
    parser = argparse.ArgumentParser(prog="ringmaster_scheduler", description="Ringmaster's scheduler.")
    parser.add_argument("--config", required=True, metavar="FILE", help="the configuration, JSON")
    parser.add_argument("--version", action="version", version=__version__)
    mode = parser.add_mutually_exclusive_group()
    mode.add_argument("--check", action="store_true", help="check the configuration and do nothing else")
    mode.add_argument(
        "--release",
        action="store_true",
        help="give HAProxy the caps with which it does well alone; for when the scheduler has ended",
    )
    mode.add_argument("--probe", action="store_true", help="ask the scheduler that runs as HAProxy would")
    parser.add_argument(
        "--model", help="with --probe: ask for this model, which places a request; default: one unserved"
    )
    options = parser.parse_args(arguments)
    try:
        settings = configuration.load(options.config)
    except configuration.ConfigurationError as error:
        print(f"{options.config}: {error}", file=sys.stderr)
        return 2
    if options.check:
        return 0
    if options.probe:
        try:
            print(json.dumps(probe(settings.spoe_address, settings.spoe_port, _PROBE_TIMEOUT_S, options.model)))
        except ProbeError as error:
            print(error, file=sys.stderr)
            return 1
        return 0
    if options.release:
        failure = asyncio.run(daemon.release_haproxy(settings))
        if failure:
            print(failure, file=sys.stderr)
        return 1 if failure else 0
    # The journal adds the time.
    logging.basicConfig(stream=sys.stdout, level=logging.INFO, format="%(levelname)s %(message)s")
    failure = _run(settings)
    if failure:
        logging.getLogger(__name__).error("%s", failure)
        return 1
    return 0


def _run(settings: configuration.Configuration) -> str | None:
    # Modules stay to the end. To go through them at each full collection would hold up all decisions ten times as long.
    gc.collect()
    gc.freeze()
    loop = uvloop.new_event_loop()
    try:
        return loop.run_until_complete(daemon.serve(settings))
    finally:
        loop.close()


if __name__ == "__main__":
    sys.exit(main())
