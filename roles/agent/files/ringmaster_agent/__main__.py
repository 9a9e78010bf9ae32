# SPDX-License-Identifier: GPL-3.0-or-later
"""Command line: run the agent, or check a configuration."""

from __future__ import annotations

import argparse
import asyncio
import logging
import sys

from ringmaster_agent import __version__, configuration


def main(arguments: list[str] | None = None) -> int:
    """Return the exit status: 0 well, 1 failed, 2 wrong use or configuration."""
    parser = argparse.ArgumentParser(prog="ringmaster_agent", description="Ringmaster's node agent.")
    parser.add_argument("--config", required=True, metavar="FILE", help="the configuration, JSON")
    parser.add_argument("--version", action="version", version=__version__)
    parser.add_argument("--check", action="store_true", help="check the configuration and do nothing else")
    options = parser.parse_args(arguments)
    try:
        settings = configuration.load(options.config)
    except configuration.ConfigurationError as error:
        print(f"{options.config}: {error}", file=sys.stderr)
        return 2
    if options.check:
        return 0
    from ringmaster_agent import agent  # a check needs none of the libraries

    # The journal adds the time.
    logging.basicConfig(stream=sys.stdout, level=logging.INFO, format="%(levelname)s %(message)s")
    failure = asyncio.run(agent.serve(settings))
    if failure:
        logging.getLogger(__name__).error("%s", failure)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
