# Copyright (c) 2026, the Ringmaster authors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The ledger of a host's card resets: what was tried, how far it got, how it ended.

``/var/lib/ringmaster/gpu_reset/ledger.jsonl`` holds one JSON object a line, is only ever appended to, and each line is
on the disk before what it announces is begun. So whatever is killed, and whenever, the ledger names the last thing that
can have happened. The order of the lines of one run is::

    opened    the plan, who opened it (process of the controller) and how long it may take until the host's part begins
    phase     drain (only with a hook)
    handed    the host's part begins: a worker process of its own carries it out; again if a run is taken up once more
    worker    a process of the worker has started
    phase     stop, persistence_off, prove, reset, persistence_on, start, verify; `detail` says of what
    reset     what nvidia-smi said
    outcome   how the host's part ended
    phase     undrain (only with a hook)
    closed    nothing is left to be done

A run without ``closed`` is unfinished, and no other one is opened on the host meanwhile. A line that was cut by a loss
of power is skipped and reported. ``refused`` lines stand alone: an attempt that changed nothing. Nothing here imports
Ansible.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import math
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from datetime import datetime, timezone
from typing import Any

from ansible_collections.ringmaster.inference.plugins.module_utils.durable import sync_directory

SCHEMA = 1
DIRECTORY = "/var/lib/ringmaster/gpu_reset"


@dataclass(frozen=True)
class Process:
    """A process that can't be mistaken for a later one: its number is used again, but not with the same start time.

    `started` is in clock ticks since the boot (field 22 of ``/proc/PID/stat``); `namespace` is the PID namespace as
    ``/proc/self/ns/pid`` names it, since containers on one kernel share the boot id and count processes on their own.
    """

    boot_id: str
    namespace: str
    pid: int
    started: int

    def document(self) -> dict[str, Any]:
        """The process as the ledger keeps it."""
        return {
            "boot_id": self.boot_id,
            "namespace": self.namespace,
            "pid": self.pid,
            "started": self.started,
        }

    @staticmethod
    def parse(document: object) -> Process | None:
        """The process of a ledger line; None if it is none."""
        if not isinstance(document, dict):
            return None
        boot_id, namespace = document.get("boot_id"), document.get("namespace")
        pid, started = document.get("pid"), document.get("started")
        if not (isinstance(boot_id, str) and isinstance(namespace, str) and boot_id and namespace):
            return None
        if not (isinstance(pid, int) and isinstance(started, int)):
            return None
        return Process(boot_id, namespace, pid, started)


@dataclass
class Run:
    """One run as its lines tell it. Times are UTC, ISO 8601; `opened_seconds` and `lease_seconds` are of the host's
    uptime.

    `outcome` is the last one since the host's part was last handed over, else None.
    """

    name: str
    boot_id: str
    uuid: str
    uuids: list[str]
    opened_at: str
    opened_seconds: float
    lease_seconds: float
    opened_by: Process | None
    plan: dict[str, Any]
    phases: list[dict[str, Any]] = field(default_factory=list)
    handed: list[str] = field(default_factory=list)
    workers: int = 0
    worker: Process | None = None
    reset_at: str = ""
    reset_answer: dict[str, Any] | None = None
    outcome: dict[str, Any] | None = None
    outcome_boot_id: str = ""
    log_position: str = ""
    closed: str = ""

    @property
    def phase(self) -> str:
        """The last phase that was begun; empty if none was."""
        return str(self.phases[-1]["phase"]) if self.phases else ""

    @property
    def host_phases(self) -> list[str]:
        """The phases of the host's part that were begun."""
        return [each["phase"] for each in self.phases if each["phase"] not in ("drain", "undrain")]


class LedgerError(Exception):
    """The ledger can't be read or written; the text says what was expected, what was found and what to do."""


def now() -> str:
    """The time of the host's clock, UTC, to the second."""
    return datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")


class Ledger:
    """The ledger in `directory`. Raises LedgerError where the file system refuses."""

    def __init__(self, directory: str = DIRECTORY) -> None:
        self.directory = directory
        self.path = os.path.join(directory, "ledger.jsonl")

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the host's lock for a decision that rests on what the ledger says. The kernel frees it at our end."""
        try:
            self._make_directory()
            handle = os.open(
                os.path.join(self.directory, "lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600
            )
        except OSError as error:
            raise self._refused(error) from error
        try:
            fcntl.flock(handle, fcntl.LOCK_EX)
            yield
        finally:
            os.close(handle)

    def append(self, event: str, run: str, **more: Any) -> None:
        """Write one line and wait until it is on the disk."""
        record = {"schema": SCHEMA, "at": now(), "event": event, "run": run, **more}
        line = json.dumps(record, sort_keys=True, ensure_ascii=True).encode("ascii") + b"\n"
        try:
            self._make_directory()
            new = not os.path.lexists(self.path)
            handle = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            try:
                size = os.fstat(handle).st_size
                # A line that was cut must not swallow the next one.
                if size and os.pread(handle, 1, size - 1) != b"\n":
                    line = b"\n" + line
                written = os.write(handle, line)
                os.fsync(handle)
            finally:
                os.close(handle)
            if new:
                sync_directory(self.directory)
        except OSError as error:
            raise self._refused(error) from error
        if written != len(line):
            raise LedgerError(
                f"Expected room for a line in {self.path}. Found a full disk. To do: free some space and run again."
            )

    def read(self) -> tuple[list[dict[str, Any]], list[int]]:
        """All lines in order, and the numbers (from 1) of the lines that can't be read."""
        try:
            with open(self.path, "rb") as file:
                content = file.read()
        except FileNotFoundError:
            return [], []
        except OSError as error:
            raise self._refused(error) from error
        records: list[dict[str, Any]] = []
        damaged: list[int] = []
        for number, line in enumerate(content.split(b"\n"), 1):
            if not line.strip():
                continue
            record = _parse(line)
            if record is None:
                damaged.append(number)
            else:
                records.append(record)
        return records, damaged

    def runs(self) -> list[Run]:
        """All runs, the oldest first."""
        return fold(self.read()[0])

    def unfinished(self) -> Run | None:
        """The run that is not closed; there is never more than one."""
        return next((run for run in reversed(self.runs()) if not run.closed), None)

    def run(self, name: str) -> Run | None:
        """The run of that name."""
        return next((run for run in self.runs() if run.name == name), None)

    def _make_directory(self) -> None:
        if os.path.isdir(self.directory):
            return
        os.makedirs(os.path.dirname(self.directory), 0o755, exist_ok=True)
        os.mkdir(self.directory, 0o700)
        sync_directory(os.path.dirname(self.directory))

    def _refused(self, error: OSError) -> LedgerError:
        return LedgerError(
            f"Expected to read and write {self.directory}. Found: {error.strerror or error}. "
            "To do: run as root (become), and look at the disk's free space, mode and health."
        )


def fold(records: Iterable[dict[str, Any]]) -> list[Run]:
    """The runs that the lines tell of, the oldest first. Lines of no known run or event say nothing."""
    runs: dict[str, Run] = {}
    for record in records:
        name, event = record.get("run"), record.get("event")
        if not isinstance(name, str) or not isinstance(event, str) or not name:
            continue
        if event == "opened":
            opened = _opened(name, record)
            if opened is not None and name not in runs:
                runs[name] = opened
        elif name in runs:
            _add(runs[name], event, record)
    return list(runs.values())


def _opened(name: str, record: dict[str, Any]) -> Run | None:
    plan, uuid, boot_id = record.get("plan"), record.get("uuid"), record.get("boot_id")
    if not isinstance(plan, dict) or not isinstance(uuid, str) or not isinstance(boot_id, str):
        return None
    uuids = plan.get("uuids")
    return Run(
        name=name,
        boot_id=boot_id,
        uuid=uuid,
        uuids=[each for each in uuids if isinstance(each, str)] if isinstance(uuids, list) else [uuid],
        opened_at=str(record.get("at", "")),
        opened_seconds=number(record.get("uptime_seconds")),
        lease_seconds=number(record.get("lease_seconds")),
        opened_by=Process.parse(record.get("opened_by")),
        plan=plan,
    )


def _add(run: Run, event: str, record: dict[str, Any]) -> None:
    if event == "phase" and isinstance(record.get("phase"), str):
        run.phases.append({key: record[key] for key in ("at", "phase", "detail") if key in record})
        if record["phase"] == "reset" and not run.reset_at:
            run.reset_at = str(record.get("at", ""))
            run.log_position = str(record.get("log", ""))
    elif event == "handed":
        run.handed.append(str(record.get("key", "")))
        run.opened_by = Process.parse(record.get("by"))
        run.outcome, run.worker, run.workers = None, None, 0
    elif event == "worker":
        run.worker, run.workers = Process.parse(record.get("process")), run.workers + 1
    elif event == "reset" and isinstance(record.get("answer"), dict):
        run.reset_answer = record["answer"]
        run.log_position = str(record.get("log", ""))
    elif event == "outcome" and isinstance(record.get("outcome"), dict):
        run.outcome, run.outcome_boot_id = record["outcome"], str(record.get("boot_id", ""))
    elif event == "closed":
        run.closed = str(record.get("how") or "closed")


def _parse(line: bytes) -> dict[str, Any] | None:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return record if isinstance(record, dict) else None


def number(value: object, default: float = 0.0) -> float:
    """A number of a line, from 0 to 10^12; `default` for what is none."""
    if (
        isinstance(value, bool)
        or not isinstance(value, (int, float))
        or (isinstance(value, float) and math.isnan(value))
    ):
        return default
    return float(min(max(value, 0), 1e12))
