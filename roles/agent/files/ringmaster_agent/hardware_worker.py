# SPDX-License-Identifier: GPL-3.0-or-later
"""Keeps the process that reads the hardware at work: starts it, hears it, and kills it when something in it hangs."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import signal
import sys
import time
from collections.abc import Callable
from typing import Any, Final

from ringmaster_agent.children import end
from ringmaster_agent.hardware_process import ALIVE_SECONDS, NOTHING

# What hung is tried again after the first of these, in seconds; the time doubles up to the second.
FIRST_PAUSE: Final = 30.0
LONGEST_PAUSE: Final = 600.0
# A process that ended by itself is started again after a second, doubled up to this.
LONGEST_RESTART: Final = 60.0
# How often it is looked for hardware on a host that has none, in seconds.
LOOK_SECONDS: Final = 600.0
# The process shows that it lives more often than this, whatever its readers do.
SILENCE: Final = 3 * ALIVE_SECONDS
# Python's start with all readers, on a machine that has much else to do, in seconds.
START_SECONDS: Final = 60.0
_LARGEST_LINE: Final = 4 * 1024 * 1024
_NO_LINES: Final = "the process that reads the hardware wrote something else than its lines"

logger = logging.getLogger(__name__)


class _Suspension:
    """A step that is left out: why, since which process, until when, and how long the next time."""

    def __init__(self) -> None:
        self.reason = ""
        self.until = 0.0
        self.pause = FIRST_PAUSE
        self.process: asyncio.subprocess.Process | None = None

    @property
    def active(self) -> bool:
        """Whether the step is left out now."""
        return bool(self.reason)

    def over(self, now: float) -> bool:
        """Whether the step can be tried again: a driver that still holds the former process would hold the next one."""
        return self.active and now >= self.until and (self.process is None or self.process.returncode is not None)


class HardwareWorker:
    """Hands each report to `take`, and to `fail` why there will be none for now. Times in seconds."""

    def __init__(
        self,
        root: str,
        interval: float,
        hang_after: float,
        take: Callable[[dict[str, Any]], None],
        fail: Callable[[str], None],
    ) -> None:
        self._root = root
        self._interval = interval
        self._hang_after = hang_after
        self._take = take
        self._fail = fail
        self._steps: dict[str, _Suspension] = {}
        self._heard_at = 0.0
        self.restarts = 0

    async def run(self) -> None:
        """Work until cancelled."""
        pause = 1.0
        while True:
            begun_at = time.monotonic()
            try:
                process = await self._start()
            except OSError as error:  # no memory, no process or no descriptor left; or Python was upgraded just now
                self._fail(f"the process that reads the hardware can't be started: {error.strerror or error}")
                await asyncio.sleep(pause)
                pause = min(pause * 2, LONGEST_RESTART)
                continue
            try:
                reason = await self._hear(process)
            finally:
                await end(process)
            self.restarts += 1
            if not reason:
                continue  # it was ended here, to leave a step out or to try one again
            status = await process.wait()
            if status == NOTHING:
                await asyncio.sleep(LOOK_SECONDS)
                continue
            self._fail(reason)
            logger.warning("%s", reason)
            if status < 0 and status != -signal.SIGKILL:
                # Of all that runs in there, only the driver's library is no Python.
                self._suspend("nvml", f"NVML ended its process ({signal.Signals(-status).name})", None)
            pause = min(pause * 2, LONGEST_RESTART) if time.monotonic() - begun_at < LONGEST_RESTART else 1.0
            await asyncio.sleep(pause)

    async def _start(self) -> asyncio.subprocess.Process:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "ringmaster_agent.hardware_process",
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            limit=_LARGEST_LINE,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        )
        options = {
            "root": self._root,
            "interval": self._interval,
            "hang_after": self._hang_after,
            "suspended": {name: step.reason for name, step in self._steps.items() if step.active},
        }
        assert process.stdin is not None
        process.stdin.write(json.dumps(options).encode("ascii") + b"\n")
        with contextlib.suppress(ConnectionError):
            await process.stdin.drain()
        return process

    async def _hear(self, process: asyncio.subprocess.Process) -> str:
        """Take what a process says. Gives why it ended by itself; empty if it is to be replaced."""
        assert process.stdout is not None
        hearing = asyncio.get_running_loop().create_task(self._listen(process, process.stdout))
        begun_at = self._heard_at = time.monotonic()
        try:
            while not hearing.done():
                await asyncio.wait([hearing], timeout=SILENCE / 3)
                patience = START_SECONDS if self._heard_at == begun_at else SILENCE
                if time.monotonic() - self._heard_at > patience:
                    self._suspend("nvml", f"the driver kept its whole process for {patience:g} s", process)
                    return ""
            return hearing.result()
        finally:
            hearing.cancel()

    async def _listen(self, process: asyncio.subprocess.Process, output: asyncio.StreamReader) -> str:
        while True:
            try:
                line = await output.readline()
            except ValueError:  # longer than the limit
                return _NO_LINES
            if not line.endswith(b"\n"):
                status = await process.wait()
                return f"the process that reads the hardware ended with status {status}"
            self._heard_at = time.monotonic()
            try:
                document = json.loads(line)
            except ValueError:
                document = None
            if not isinstance(document, dict):  # the driver's library has the same standard output
                return _NO_LINES
            if "hangs" in document:
                self._suspend(document["hangs"], f"no answer within {self._hang_after:g} s", process)
                return ""
            if document:
                self._take(document)
            if self._resume():
                return ""

    def _suspend(self, name: str, reason: str, process: asyncio.subprocess.Process | None) -> None:
        step = self._steps.setdefault(name, _Suspension())
        step.reason, step.process = reason, process
        step.until = time.monotonic() + step.pause
        logger.warning("%s: %s; tried again in %g s", name, reason, step.pause)
        step.pause = min(step.pause * 2, LONGEST_PAUSE)

    def _resume(self) -> bool:
        """Whether a step is to be tried again, which takes a new process."""
        now = time.monotonic()
        over = [step for step in self._steps.values() if step.over(now)]
        for step in over:
            step.reason = ""
        return bool(over)
