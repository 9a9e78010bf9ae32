# SPDX-License-Identifier: GPL-3.0-or-later
"""Processor time and memory of all processes of the agent: python3 budget.py SECONDS MEGABYTES.

Status 1 if they take more memory together than that. Processor time depends on what else the machine does; no test can
tell whether it is too much.
"""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

PROC = Path("/proc")


def processes() -> list[Path]:
    """The agent's main process and its children."""
    command = ["systemctl", "show", "--value", "--property=MainPID", "ringmaster-agent.service"]
    main = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    stats = {path.parent: path.read_text().rpartition(")")[2].split() for path in PROC.glob("[0-9]*/stat")}
    return [PROC / main, *(folder for folder, words in stats.items() if words[1] == main)]


def seconds(folder: Path) -> float:
    """Processor time of a process in seconds, all threads."""
    return sum(int(path.read_text().split()[0]) for path in folder.glob("task/*/schedstat")) / 1e9


def memory(folder: Path) -> dict[str, float]:
    """Resident and proportional set size in MB."""
    lines = [line.split() for line in (folder / "smaps_rollup").read_text().splitlines()]
    return {words[0].rstrip(":"): int(words[1]) / 1000 for words in lines if words[0] in ("Rss:", "Pss:")}


def main(length: float, most: float) -> int:
    """Print the figures."""
    found = processes()
    before = {folder: seconds(folder) for folder in found}
    time.sleep(length)
    total = {"cpu": 0.0, "Rss": 0.0, "Pss": 0.0}
    for folder in found:
        figures = {"cpu": (seconds(folder) - before[folder]) / length * 100, **memory(folder)}
        total = {name: total[name] + figures[name] for name in total}
        name = " ".join((folder / "cmdline").read_text().split("\0")[:3])
        print(f"{name}: {figures['cpu']:.2f} % CPU, RSS {figures['Rss']:.1f} MB, PSS {figures['Pss']:.1f} MB")
    print(f"all: {total['cpu']:.2f} % CPU, RSS {total['Rss']:.1f} MB, PSS {total['Pss']:.1f} MB")
    # What processes share counts once: the proportional set size.
    return int(total["Pss"] > most)


if __name__ == "__main__":
    sys.exit(main(float(sys.argv[1]), float(sys.argv[2])))
