# SPDX-License-Identifier: GPL-3.0-or-later
"""All `_info` modules on one host with eight cards and eight network ports, against as many modules that do nothing.

The host is a container of its own with simulated hardware, started and removed by the bench. Both playbooks run in
alternation; what is printed are the medians and their difference: the time beyond Ansible's own.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time
from pathlib import Path

from rehearsal import fleet
from rehearsal.checkout import Checkout

ROOT = Path(__file__).resolve().parents[3]
FOLDER = Path(__file__).parent
TARGET_SECONDS = 2.0


def main() -> int:
    """Print the figures; status 1 when the modules take longer than the target."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    checkout = Checkout(ROOT, FOLDER / "inventory", ROOT / ".rehearsal-bench")
    try:
        fleet.up(checkout)
        play(checkout, "prepare.yml")
        times: dict[bool, list[float]] = {True: [], False: []}
        for _unused in range(options.rounds):
            for nothing in (True, False):
                times[nothing].append(play(checkout, "modules.yml", "-e", f"nothing={str(nothing).lower()}"))
    finally:
        fleet.down(checkout, keep_images=True)
    idle, reading = (statistics.median(times[nothing]) for nothing in (True, False))
    beyond = reading - idle
    print(f"six modules that do nothing {idle:.2f} s, six _info modules {reading:.2f} s (medians of {options.rounds})")
    print(f"beyond Ansible's own: {beyond:.2f} s (target: under {TARGET_SECONDS:g} s), ratio {reading / idle:.2f}")
    return 0 if beyond < TARGET_SECONDS else 1


def play(checkout: Checkout, playbook: str, *arguments: str) -> float:
    """Run a playbook of the bench; gives its seconds. Raises CalledProcessError, its output printed, when it fails."""
    started = time.monotonic()
    finished = subprocess.run(
        ["ansible-playbook", "-i", str(checkout.inventory), *arguments, str(FOLDER / playbook)],
        env={**checkout.environment, "RINGMASTER_EVIDENCE_SUMMARY": "false"},
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    if finished.returncode != 0:
        print(finished.stdout[-6000:], finished.stderr[-2000:], file=sys.stderr)
        finished.check_returncode()
    return time.monotonic() - started


if __name__ == "__main__":
    sys.exit(main())
