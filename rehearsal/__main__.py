# SPDX-License-Identifier: GPL-3.0-or-later
"""`python -m rehearsal COMMAND`: what the Makefile's targets run."""

from __future__ import annotations

import argparse
import os
import shlex
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# The collection's own code is imported by its name, as Ansible does.
sys.path.insert(0, str(ROOT / ".cache" / "collections"))

from rehearsal import faults, fleet, real_engine, site  # noqa: E402
from rehearsal.checkout import Checkout, RehearsalError, say, warn  # noqa: E402

# Inventory and state folder of the rehearsal with each engine: two fleets, which can stand side by side.
ENGINES = {"standin": ("rehearsal", ".rehearsal"), "vllm": ("rehearsal-vllm", ".rehearsal-vllm")}


def main(arguments: list[str] | None = None) -> int:
    """Run one command; gives the exit status (2: something expected was not found, the message says what to do)."""
    parser = argparse.ArgumentParser(prog="rehearsal", description="The rehearsal fleet and the main job on it.")
    parser.add_argument("--inventory", type=Path, help="default: the one of the engine")
    parser.add_argument("--state", type=Path, help="folder of keys, addresses and evidence; default: the engine's own")
    parser.add_argument("--engine", choices=tuple(ENGINES), default="standin", help="vllm: real vLLM on two hosts")
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("up", help="start the fleet, or repair it")
    down = commands.add_parser("down", help="remove all that was made")
    down.add_argument("--keep-images", action="store_true", help="the next start need not build them again")
    run = commands.add_parser("run", help="the main job: fleet, site, a chat, the summary")
    run.add_argument("playbook_arguments", nargs="*", help="more arguments for ansible-playbook, after --")
    commands.add_parser("status", help="hosts and addresses")
    shell = commands.add_parser("ssh", help="a shell, or one command, on a host")
    shell.add_argument("host")
    shell.add_argument("remote", nargs=argparse.REMAINDER)
    faults.add_arguments(commands.add_parser("fault", help="break an engine or hardware by name, or mend it"))
    options = parser.parse_args(arguments)
    inventory, state = ENGINES[options.engine]
    checkout = Checkout(
        ROOT,
        (options.inventory or ROOT / "inventories" / inventory).resolve(),
        (options.state or Path(os.environ.get("RINGMASTER_REHEARSAL_STATE", ROOT / state))).absolute(),
    )
    try:
        if options.command in ("status", "ssh", "fault"):
            return _on_running_fleet(checkout, options)
        with checkout.lock():
            if options.command == "run":
                return site.run(checkout, options.playbook_arguments)
            if options.engine == "vllm" and options.command != "down":
                real_engine.ensure(checkout)
            if options.command == "down":
                fleet.down(checkout, keep_images=options.keep_images)
            else:
                fleet.up(checkout)
                say("the fleet is up")
    except RehearsalError as error:
        warn(str(error))
        return 2
    return 0


def _on_running_fleet(checkout: Checkout, options: argparse.Namespace) -> int:
    """Commands that do not change the fleet itself, and so need not wait for one that does."""
    addresses = fleet.addresses(checkout)
    if options.command == "status":
        for host, address in addresses.items():
            print(f"{host:12} {address}")
        return 0
    if options.command == "fault":
        faults.switch(checkout, options)
        return 0
    # The remote shell reads one line: quoting keeps the words of the command apart.
    remote = [shlex.join(options.remote)] if options.remote else []
    command = [*fleet.ssh_command(checkout, fleet.address_of(checkout, options.host)), *remote]
    return subprocess.run(command, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
