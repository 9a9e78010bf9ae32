# SPDX-License-Identifier: GPL-3.0-or-later
"""Runs a playbook until a run of it comes to its end: ``python3 killed_runs.py INVENTORY PLAYBOOK``.

callbacks/killed.py kills each run after its first task that changed something. Prints that task for each run. Fails
when a run fails, when one after the other is killed at the same task (a run must leave its work done), and when none
was.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import tempfile
import time

MOST_RUNS = 100
SAME_TASK = 3  # times in a row: a task of a loop over roles, or of two hosts one after the other, may come twice


def main(inventory: str, playbook: str) -> int:
    """The exit status."""
    killed_at: list[str] = []
    while len(killed_at) < MOST_RUNS:
        begun = time.monotonic()
        with tempfile.TemporaryFile("w+") as output:
            status = subprocess.run(
                ["ansible-playbook", "--inventory", inventory, playbook], stdout=output, stderr=output, check=False
            ).returncode
            output.seek(0)
            lines = output.read().splitlines()
        found = next((line for line in lines if line.startswith("killed after ")), "")
        if status == -signal.SIGKILL and found:
            print(f"{len(killed_at) + 1}: {found} ({time.monotonic() - begun:.0f} s)", flush=True)
            killed_at.append(found)
            if killed_at[-SAME_TASK:] == [found] * SAME_TASK:
                break
        elif status == 0 and killed_at:
            return 0
        else:
            break
    print("\n".join(lines), file=sys.stderr)
    expected = "expected runs that are killed at different tasks until one ends well"
    print(f"{expected}, found status {status} after {killed_at}", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
