# SPDX-License-Identifier: GPL-3.0-or-later
"""The process that reads the hardware, once in an interval, and writes what it read to its standard output.

A call into the driver of a card that fell off its bus may never return, and nothing ends it but the end of its process.
So hardware is read in a process of its own, each lane in a thread of its own: one that hangs keeps neither the others
nor the agent waiting. The agent (`hardware_worker`) kills the process then, and starts it anew without what hung.

Its standard input holds one line, ``{"root", "interval", "hang_after", "suspended": {step: reason}}`` (times in
seconds), and stays open: its end is the end of the agent. Each line of its output is one of

* ``{"lane", "readers", "seconds", "values", "unknown", "failed"}``: what a lane read, and when (CLOCK_BOOTTIME);
* ``{"lane", "hangs": step}``: a lane has been in one step for too long;
* ``{}``, every few seconds: the process itself does not hang.

It ends with status NOTHING on a host that has no such hardware.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from typing import Any, Final

from ansible_collections.ringmaster.inference.plugins.module_utils.nvml import NvmlUnavailableError
from ringmaster_agent.hardware import Lane, Report, lanes

# A lane of which nothing can be read (no driver, no library) is tried again after so many seconds, doubled each time.
LONGEST_PAUSE: Final = 60.0
# How long a lane waits for another one to have read, in seconds.
TURN_SECONDS: Final = 0.2
# How often it is looked for hardware that was not there before, in seconds.
LOOK_SECONDS: Final = 60.0
# How often the process shows that it lives, in seconds.
ALIVE_SECONDS: Final = 5.0
NOTHING: Final = 3
"""Exit status where there is no hardware to read."""


class Turn:
    """Lets one thread read at a time, as long as it does not take long.

    Threads that read small files at the same time take Python's lock from each other at every one of them, which costs
    more than reading.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()

    @contextlib.contextmanager
    def taken(self) -> Iterator[None]:
        """The turn, or none if another thread does not give it back: that one may hang for ever."""
        got = self._lock.acquire(timeout=TURN_SECONDS)
        try:
            yield
        finally:
            if got:
                self._lock.release()


class LaneThread(threading.Thread):
    """Reads a lane once in `interval` seconds for ever."""

    def __init__(
        self, name: str, lane: Lane, interval: float, suspended: Mapping[str, str], turn: Turn, output: Output
    ) -> None:
        super().__init__(name=name, daemon=True)
        self._lane = lane
        self._turn = turn
        self._interval = interval
        self._suspended = suspended
        self._output = output
        self._step: tuple[str, float] | None = None
        self.told = False

    def hangs(self, seconds: float) -> str:
        """The step that has taken longer than that, empty if none has."""
        step = self._step
        return step[0] if step is not None and time.monotonic() - step[1] > seconds else ""

    def run(self) -> None:
        """Read."""
        pause = self._interval
        due = time.monotonic()
        while True:
            with self._turn.taken():
                report = self._read()
            self._step = None
            failed = len(report.failed) == len(self._lane.readers)
            pause = min(max(pause * 2, self._interval), LONGEST_PAUSE) if failed else self._interval
            head = {"lane": self.name, "readers": self._lane.readers, "seconds": boottime()}
            self._output.write({**head, **vars(report)})
            due = max(due + pause, time.monotonic())
            time.sleep(max(0.0, due - time.monotonic()))

    def _enter(self, step: str) -> None:
        self._step = step, time.monotonic()

    def _read(self) -> Report:
        if self.name in self._suspended:
            reason = self._suspended[self.name]
        else:
            try:
                return self._lane.read(self._suspended, self._enter)
            except NvmlUnavailableError as error:
                reason = str(error)
            except Exception as error:  # noqa: BLE001  whatever it was, the other lanes go on and the agent hears of it
                reason = f"reading failed ({error.__class__.__name__}: {error})"
        return Report(failed=dict.fromkeys(self._lane.readers, reason))


class Output:
    """Whole lines on a descriptor, from several threads."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._lock = threading.Lock()

    def write(self, document: Mapping[str, Any]) -> None:
        """Write a document as a line. The process ends where nobody reads any more."""
        line = json.dumps(document, separators=(",", ":")).encode("ascii") + b"\n"
        with self._lock:
            try:
                while line:
                    line = line[os.write(self._descriptor, line) :]
            except OSError:
                os._exit(1)


def boottime() -> float:
    """Seconds since the boot, those in which the host slept included."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def main() -> int:
    """Read until the standard input ends; gives the exit status."""
    options = json.loads(sys.stdin.buffer.readline())
    output = Output(sys.stdout.fileno())
    turn = Turn()
    threads: dict[str, LaneThread] = {}
    poll = select.poll()
    poll.register(sys.stdin.fileno(), select.POLLIN | select.POLLHUP)
    looked_at: float | None = None
    alive_at = 0.0
    while True:
        now = time.monotonic()
        if now - alive_at > ALIVE_SECONDS:
            alive_at = now
            output.write({})
        if looked_at is None or now - looked_at > LOOK_SECONDS:
            looked_at = now
            for name, lane in lanes(options["root"], threads).items():
                threads[name] = LaneThread(name, lane, options["interval"], options["suspended"], turn, output)
                threads[name].start()
            if not threads:
                return NOTHING
        for thread in threads.values():
            step = thread.hangs(options["hang_after"])
            if step and not thread.told:
                output.write({"lane": thread.name, "hangs": step})
                thread.told = True
        if poll.poll(min(1.0, options["hang_after"] / 4) * 1000):
            # Not sys.exit: a thread that hangs would be waited for.
            os._exit(0)


if __name__ == "__main__":
    sys.exit(main())
