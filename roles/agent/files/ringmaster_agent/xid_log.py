# SPDX-License-Identifier: GPL-3.0-or-later
"""Follows the kernel log for Xids, with one ``journalctl`` that runs all the time.

To start one every second would take more than all the rest of the agent together.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Callable
from typing import Any, Final

from ansible_collections.ringmaster.inference.plugins.module_utils.commands import SYSTEM_PATH, CommandRunner
from ansible_collections.ringmaster.inference.plugins.module_utils.file_tree import FileTree
from ansible_collections.ringmaster.inference.plugins.module_utils.xid import XidReader, cursor_of, followed, printable
from ringmaster_agent.books import XidBook
from ringmaster_agent.changes import State
from ringmaster_agent.children import end
from ringmaster_agent.hardware_process import boottime

READER: Final = "xid"
LONGEST_PAUSE: Final = 60.0
# The kernel logs something at every boot: a journal that shows nothing of it within this time shows nothing at all.
FIRST_LINE_SECONDS: Final = 10.0
# journald cuts lines of the kernel at 48 KiB; as JSON one of bytes takes five times that.
_LARGEST_LINE: Final = 1024 * 1024

logger = logging.getLogger(__name__)


class XidLog:
    """Follows the log for ever."""

    def __init__(self, state: State, files: FileTree, commands: CommandRunner, changed: Callable[[], None]) -> None:
        """`changed` is called after each entry into the state."""
        self._state = state
        self._changed = changed
        self._book = XidBook(state)
        self._reader = XidReader(files, commands)
        self._commands = commands
        self._boot_id = files.boot_id()
        self._last: bytes | None = None
        self._complaint = ""
        self._following = False

    def look(self) -> None:
        """Enter that the log is followed now, if it is: no line is as good as one."""
        if self._following:
            self._state.succeed(READER, boottime())

    async def run(self) -> None:
        """Work until cancelled."""
        pause = 1.0
        while True:
            begun_at = time.monotonic()
            reason = await self._follow()
            self._state.explain(READER, reason)
            self._changed()
            logger.warning("Xids are not known: %s", reason)
            pause = min(pause * 2, LONGEST_PAUSE) if time.monotonic() - begun_at < LONGEST_PAUSE else 1.0
            await asyncio.sleep(pause)

    async def _follow(self) -> str:
        """Follow the log to the end of journalctl; gives why it ended."""
        cursor = cursor_of(self._last) if self._last else None
        words = self._reader.follow(cursor)
        program = self._commands.locate(words[0])
        if program is None:
            return f"this host has no {words[0]}"
        self._complaint = ""
        try:
            process = await asyncio.create_subprocess_exec(
                program,
                *words[1:],
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                limit=_LARGEST_LINE,
                env={**os.environ, "LC_ALL": "C", "PATH": SYSTEM_PATH},
            )
        except OSError as error:
            return f"{words[0]} can't be run: {error}"
        assert process.stdout is not None
        assert process.stderr is not None
        complaints = asyncio.get_running_loop().create_task(self._listen(process.stderr))
        try:
            reason = await self._hear(process.stdout, cursor)
        finally:
            complaints.cancel()
            await end(process)
        return reason

    async def _hear(self, output: asyncio.StreamReader, cursor: str | None) -> str:
        """Take line after line; gives up on a journal that shows nothing."""
        reading = asyncio.get_running_loop().create_task(self._read(output, cursor))
        try:
            await asyncio.wait([reading], timeout=FIRST_LINE_SECONDS)
            if not reading.done() and not self._following:
                return self._complaint or "the journal shows no line of the kernel"
            return await reading
        finally:
            self._following = False
            reading.cancel()

    async def _read(self, output: asyncio.StreamReader, cursor: str | None) -> str:
        while True:
            try:
                line = await output.readline()
            except ValueError:  # longer than the limit, and passed over
                continue
            if not line.endswith(b"\n"):
                return self._complaint or "journalctl ended"
            if not line.startswith(b"{"):
                continue
            if not self._following:
                self._following = True
                self._state.explain(READER, "")
                if cursor is None:
                    self._book.clear()
                elif cursor_of(line) == cursor:
                    continue  # it was taken before
                else:
                    self._last = None
                    return "the journal no longer has the place where reading was interrupted"
            self._take(line)
            self._changed()

    def _take(self, line: bytes) -> None:
        if b"__CURSOR" in line:
            self._last = line
        event, complaint = followed(line, self._boot_id)
        if complaint:
            logger.warning("a line that begins as an Xid line does is none: %s", complaint)
        if event is not None and event["this_boot"] is not False:
            self._book.take(event, _boottime_of(event))
            logger.info("Xid %d of %s: %s", event["xid"], event["pci_slot"], event["action"])

    async def _listen(self, complaints: asyncio.StreamReader) -> None:
        """Keep the first thing that journalctl complains of."""
        async for line in complaints:
            self._complaint = self._complaint or f"journalctl: {printable(line.decode('utf-8', 'replace'))}"


def _boottime_of(event: dict[str, Any]) -> float:
    """When an event happened, on CLOCK_BOOTTIME; the journal has CLOCK_MONOTONIC, which stands still in a sleep."""
    since: float | None = event["since_boot_seconds"]
    slept = boottime() - time.clock_gettime(time.CLOCK_MONOTONIC)
    return boottime() if since is None else since + slept
