# SPDX-License-Identifier: GPL-3.0-or-later
"""`python -m rehearsal COMMAND`: what the Makefile's targets run."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from rehearsal import fleet
from rehearsal.checkout import Checkout, RehearsalError, say, warn

ROOT = Path(__file__).resolve().parent.parent


def main(arguments: list[str] | None = None) -> int:
    """Run one command; gives the exit status (2: something expected was not found, the message says what to do)."""
    parser = argparse.ArgumentParser(prog="rehearsal", description="The rehearsal fleet and the main job on it.")
    parser.add_argument("--inventory", type=Path, default=ROOT / "inventories" / "rehearsal")
    parser.add_argument("--state", type=Path, default=Path(os.environ.get("RINGMASTER_REHEARSAL_STATE", ROOT / ".rehearsal")))
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("up", help="start the fleet, or repair it")
    commands.add_parser("down", help="remove all that was made")
    commands.add_parser("run", help="the main job: fleet, site, a chat, the summary")
    commands.add_parser("status", help="hosts and addresses")
    shell = commands.add_parser("ssh", help="a shell, or one command, on a host")
    shell.add_argument("host")
    shell.add_argument("remote", nargs=argparse.REMAINDER)
    options = parser.parse_args(arguments)
    checkout = Checkout(ROOT, options.inventory.resolve(), options.state.absolute())
    try:
        with checkout.lock():
            if options.command == "up":
                fleet.up(checkout)
                say("the fleet is up")
            elif options.command == "down":
                fleet.down(checkout)
            elif options.command == "status":
                for host, address in fleet.addresses(checkout).items():
                    print(f"{host:12} {address}")
    except RehearsalError as error:
        warn(str(error))
        return 2
    if options.command == "ssh":
        address = fleet.addresses(checkout).get(options.host)
        if address is None:
            warn(f"expected a host of the fleet, found {options.host!r}; to do: one of {', '.join(fleet.addresses(checkout))}")
            return 2
        os.execvp("ssh", [*fleet.ssh_command(checkout, address), *options.remote])
    return 0


if __name__ == "__main__":
    sys.exit(main())
