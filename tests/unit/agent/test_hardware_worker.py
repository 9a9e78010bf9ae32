# SPDX-License-Identifier: GPL-3.0-or-later
"""Whatever becomes of the process that reads the hardware, the agent goes on."""

from __future__ import annotations

import asyncio
import errno
import os
from typing import Any

import pytest

from ringmaster_agent import hardware_worker
from ringmaster_agent.hardware_worker import HardwareWorker

PATIENCE = 20.0


class Worker(HardwareWorker):
    """Starts a shell in the place of the process."""

    def __init__(self, script: str) -> None:
        self.script = script
        self.taken: list[dict[str, Any]] = []
        self.failed: list[str] = []
        super().__init__("/", 1.0, 5.0, self.taken.append, self.failed.append)

    async def _start(self) -> asyncio.subprocess.Process:
        return await asyncio.create_subprocess_exec(
            "sh", "-c", self.script, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
        )


async def until_failed(worker: HardwareWorker, failed: list[str], times: int) -> None:
    """Let it run until it has told so many failures; it must not end of them."""
    running = asyncio.get_running_loop().create_task(worker.run())
    try:
        deadline = asyncio.get_running_loop().time() + PATIENCE
        while len(failed) < times:
            assert not running.done(), running.exception()
            assert asyncio.get_running_loop().time() < deadline
            await asyncio.sleep(0.02)
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


@pytest.mark.parametrize("line", ["NVRM: API mismatch", "[]", "1", '"gpu"', "{", "\\377"])
async def test_line_that_a_driver_library_wrote_ends_the_process_and_not_the_agent(line: str) -> None:
    worker = Worker(f"printf '{{}}\\n{line}\\n'; exec sleep 60")
    await until_failed(worker, worker.failed, 2)
    assert set(worker.failed) == {hardware_worker._NO_LINES}
    assert worker.taken == []


async def test_process_that_cannot_be_started_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    async def refuse(*_words: Any, **_options: Any) -> asyncio.subprocess.Process:
        raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    monkeypatch.setattr(asyncio, "create_subprocess_exec", refuse)
    failed: list[str] = []
    worker = HardwareWorker("/", 1.0, 5.0, lambda _report: None, failed.append)
    await until_failed(worker, failed, 2)
    assert set(failed) == {f"the process that reads the hardware can't be started: {os.strerror(errno.EAGAIN)}"}
