# SPDX-License-Identifier: GPL-3.0-or-later
"""A process that holds a card: it has the device file open, and NVML counts memory of the card to it."""

from __future__ import annotations

import os
import signal
import sys

from rehearsal.hardware.state import State


def main(index: str, mib: str, device: str) -> int:
    """Hold card `index` with `mib` MiB until the process is told to end."""
    state, folder = State.of_this_host(), f"gpus/{index}/processes/{os.getpid()}"
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGINT})
    with open(device, "rb"):
        state.update(folder, {"kind": "compute", "memory_mib": mib})
        signal.sigwait({signal.SIGTERM, signal.SIGINT})
    state.remove(folder)
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
