# SPDX-License-Identifier: GPL-3.0-or-later
"""Faults of the stand-in engines, switched by name while they run, with an end of their own."""

from __future__ import annotations

import argparse
import json
import subprocess
import time

from rehearsal import fleet
from rehearsal.checkout import Checkout, RehearsalError, say

# The stand-in engine watches this file on its host; roles/vllm/files/standin_engine says what each fault does.
FAULTS_FILE = "/run/standin-engine/{name}/faults.json"
FAULTS = ("hang", "slow", "garbage", "crash", "oom_at_start", "none")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command `fault`."""
    parser.add_argument("engine", help="HOST.ENGINE, for example gpu-a1.main")
    parser.add_argument("fault", choices=FAULTS, help="none: switch all faults of this engine off")
    parser.add_argument("--seconds", type=float, help="switch it off by itself after so long; default: it stays on")
    parser.add_argument("--factor", type=float, default=5.0, help="how many times slower, for slow (default 5)")


def switch(checkout: Checkout, options: argparse.Namespace) -> None:
    """Switch a fault on an engine. Raises RehearsalError when the host is unknown or can't be reached."""
    host, dot, name = options.engine.partition(".")
    if not dot:
        raise RehearsalError(f"expected HOST.ENGINE, for example gpu-a1.main; found {options.engine!r}")
    switch_fault(checkout, host, name, options.fault, seconds=options.seconds, factor=options.factor)
    say(f"{options.engine}: {options.fault}" + (f" for {options.seconds:g} s" if options.seconds else ""))


def switch_fault(
    checkout: Checkout, host: str, name: str, fault: str, *, seconds: float | None = None, factor: float = 5.0
) -> None:
    """Write the faults file of engine `name` on `host`; `seconds` None: until it is switched off."""
    document: dict[str, dict[str, float | None]] = {}
    if fault != "none":
        document[fault] = {"until": None if seconds is None else time.time() + seconds}
        if fault == "slow":
            document[fault]["factor"] = factor
    path = FAULTS_FILE.format(name=name)
    # Written beside and renamed, so that the engine never reads a half of it; the folder is the engine's own, and a
    # link that it put there is not followed.
    remote = f"""sudo sh -c 'new=$(mktemp {path}.XXXXXX) && cat >"$new" && chmod 0644 "$new" && mv -T "$new" {path}'"""
    finished = subprocess.run(
        [*fleet.ssh_command(checkout, fleet.address_of(checkout, host)), remote],
        input=json.dumps(document),
        capture_output=True,
        text=True,
        check=False,
    )
    if finished.returncode != 0:
        raise RehearsalError(f"expected the engine {host}.{name}, found: {finished.stderr.strip()}")
