# SPDX-License-Identifier: GPL-3.0-or-later
"""Lines of the kernel log: written into the pipe that stands in for /dev/kmsg, from where journald reads them."""

from __future__ import annotations

import fcntl
import os
import stat
import time

from rehearsal.hardware.state import State
from rehearsal.hardware.tree import Tree

PATH = "dev/kmsg"
WARNING, INFORMATION = 4, 6


def write(state: State, tree: Tree, message: str, level: int = WARNING) -> None:
    """Log a line as the kernel would: level, number, time since boot in microseconds (`Documentation/ABI/…/dev-kmsg`).

    journald takes only numbers in a row. Below a root without such a pipe (a unit test) lines go to a plain file.
    """
    target = tree.root / PATH
    target.parent.mkdir(parents=True, exist_ok=True)
    # Read and write: opening a pipe to write would wait for a reader.
    handle = os.open(target, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        if stat.S_ISFIFO(os.fstat(handle).st_mode):
            # A read of /dev/kmsg gives one line. So does one of a pipe in packet mode, pipe(2).
            fcntl.fcntl(handle, fcntl.F_SETFL, os.O_DIRECT)
        fcntl.flock(handle, fcntl.LOCK_EX)
        number = state.integer("host/kernel_messages")
        state.set("host/kernel_messages", number + 1)
        os.write(handle, f"{level},{number},{time.monotonic_ns() // 1000},-;{message}\n".encode())
    finally:
        os.close(handle)
