# SPDX-License-Identifier: GPL-3.0-or-later
"""Ending of child processes, also of those that do not end."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Final

# A process that is killed is gone within milliseconds, unless the kernel holds it.
PATIENCE: Final = 1.0


async def end(process: asyncio.subprocess.Process) -> bool:
    """Kill a process; whether it has ended. One that the kernel holds is left behind after PATIENCE seconds."""
    with contextlib.suppress(ProcessLookupError):
        process.kill()
    waiting = asyncio.get_running_loop().create_task(process.wait())
    try:
        # Not wait_for, which before Python 3.12 takes no notice of being cancelled in the moment of success.
        await asyncio.wait([waiting], timeout=PATIENCE)
    finally:
        waiting.cancel()
    return process.returncode is not None
