# SPDX-License-Identifier: GPL-3.0-or-later
"""Reads a model's files into the page cache, so that an engine that starts next finds them there.

    model_preload.py NAME DIRECTORY REPORT [--reserve-percent 10]

Says in lines how far it is, and leaves what it measured in REPORT, as JSON. Sizes are in bytes, rates in bytes a
second; what can't be known is null, and ``unknown`` says why. No more is read than the memory that is available, less a
reserve of all memory; pages that are there already are only counted.

The disk's own speed is measured before, by direct reads of the same files in the same pattern, past the page cache.
"""

from __future__ import annotations

import argparse
import errno
import json
import mmap
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

CHUNK = 8 << 20  # bytes of one read
READERS = 4  # reads at a time: one alone leaves an NVMe waiting, many make a rotating disk seek
SAMPLE = 1 << 30  # bytes of the direct reads, at most
SAMPLE_SECONDS = 3.0
# What is read in fewer bytes is over before a disk or a network is at its speed.
LEAST_FOR_RATE = 64 << 20
PROGRESS = 5.0  # seconds
ALIGNMENT = 4096  # of direct reads, which no disk asks more of

Span = tuple[str, int, int]  # path, offset, bytes


@dataclass
class Counts:
    """What the readers did so far."""

    read: int = 0
    cached: int | None = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def done(self) -> int:
        return self.read + (self.cached or 0)


def files_of(directory: str) -> list[tuple[str, int]]:
    """Regular files below a directory, by name, each with its size. Links are not followed."""
    found = []
    for folder, folders, names in os.walk(directory):
        folders.sort()
        for name in sorted(names):
            path = os.path.join(folder, name)
            if os.path.isfile(path) and not os.path.islink(path):
                found.append((path, os.path.getsize(path)))
    return found


def spans_of(files: Sequence[tuple[str, int]], limit: int) -> Iterator[Span]:
    """The files in pieces, in their order, `limit` bytes of them at most."""
    for path, size in files:
        for offset in range(0, size, CHUNK):
            length = min(CHUNK, size - offset, limit)
            if length <= 0:
                return
            limit -= length
            yield path, offset, length


def available_memory(root: str = "/") -> tuple[int, int]:
    """Bytes that can be used without swapping, by the kernel's estimate and the limits of the control groups that this
    process is in; and bytes of all memory. Raises ValueError if the kernel does not tell."""
    with open(os.path.join(root, "proc/meminfo"), encoding="ascii") as file:
        told = dict(re.findall(r"(?m)^(\w+): +([0-9]+) kB$", file.read()))
    if "MemAvailable" not in told or "MemTotal" not in told:
        raise ValueError("/proc/meminfo tells no MemAvailable")
    available, total = int(told["MemAvailable"]) << 10, int(told["MemTotal"]) << 10
    for limit, used in _group_limits(root):
        available, total = min(available, max(limit - used, 0)), min(total, limit)
    return available, total


def _group_limits(root: str) -> Iterator[tuple[int, int]]:
    """Limit and use of each control group above, where there are limits (cgroup v2)."""
    try:
        with open(os.path.join(root, "proc/self/cgroup"), encoding="utf-8") as file:
            found = re.search(r"(?m)^0::(/.*)$", file.read())
    except OSError:
        return
    group = found.group(1).strip("/") if found else ""
    while True:
        folder = os.path.join(root, "sys/fs/cgroup", group)
        try:
            with open(os.path.join(folder, "memory.max"), encoding="ascii") as file:
                limit = file.read().strip()
            with open(os.path.join(folder, "memory.current"), encoding="ascii") as file:
                used = file.read().strip()
        except OSError:
            limit, used = "max", "0"
        if limit.isdecimal() and used.isdecimal():
            yield int(limit), int(used)
        if not group:
            return
        group = os.path.dirname(group)


def each_in_parallel(spans: Iterator[Span], work: Callable[[Span, mmap.mmap], None]) -> None:
    """Do `work` for each span with a page-aligned buffer, some at a time. Raises the first error of it."""
    lock = threading.Lock()

    def run() -> None:
        with mmap.mmap(-1, CHUNK) as buffer:
            while True:
                with lock:
                    span = next(spans, None)
                if span is None:
                    return
                work(span, buffer)

    with ThreadPoolExecutor(READERS) as executor:
        for future in [executor.submit(run) for _unused in range(READERS)]:
            future.result()


def disk_speed(files: Sequence[tuple[str, int]], clock: Callable[[], float] = time.monotonic) -> float:
    """Bytes a second of direct reads. Raises ValueError with the reason where that can't be told."""
    whole = [(path, size - size % ALIGNMENT) for path, size in files]
    if sum(size for _path, size in whole) < LEAST_FOR_RATE:
        raise ValueError(f"fewer than {LEAST_FOR_RATE >> 20} MiB to read")
    counts = Counts()
    begin = clock()

    def work(span: Span, buffer: mmap.mmap) -> None:
        if clock() - begin > SAMPLE_SECONDS:
            return
        path, offset, length = span
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECT | os.O_CLOEXEC)
        try:
            with memoryview(buffer)[:length] as piece:
                count = os.preadv(descriptor, [piece], offset)
        finally:
            os.close(descriptor)
        with counts.lock:
            counts.read += count

    try:
        each_in_parallel(spans_of(whole, SAMPLE), work)
    except OSError as error:
        raise ValueError(f"the file system takes no direct reads ({error.strerror})") from error
    return counts.read / max(clock() - begin, 1e-9)


def load(spans: Iterator[Span], counts: Counts) -> None:
    """Have all spans in the page cache."""

    def work(span: Span, buffer: mmap.mmap) -> None:
        path, offset, length = span
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            with memoryview(buffer)[:length] as piece:
                was_there = _is_cached(descriptor, piece, offset)
                if not was_there:
                    os.preadv(descriptor, [piece], offset)
        finally:
            os.close(descriptor)
        with counts.lock:
            if was_there and counts.cached is not None:
                counts.cached += length
            else:
                counts.read += length
            if was_there is None:
                counts.cached = None

    each_in_parallel(spans, work)


def _is_cached(descriptor: int, piece: memoryview, offset: int) -> bool | None:
    """Whether a span is in the page cache, which is where a read that may not wait can have it from; None where the
    file system knows no such reads."""
    try:
        return os.preadv(descriptor, [piece], offset, os.RWF_NOWAIT) == len(piece)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno in (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS):
            return None
        raise


def preload(name: str, directory: str, reserve_percent: float, say: Callable[[str], None]) -> dict[str, Any]:
    """Do all of it. The report, as it is written. Raises OSError and ValueError."""
    resolved = os.path.realpath(directory)
    files = files_of(resolved)
    total = sum(size for _path, size in files)
    available, memory = available_memory()
    budget = max(int(available - memory * reserve_percent / 100), 0)
    wanted = min(total, budget)
    say(f"{name}: {shown(wanted)} of {shown(total)} into memory, {shown(available)} of {shown(memory)} are available")
    unknown: dict[str, str] = {}
    speed: float | None = None
    try:
        speed = disk_speed(files)
    except ValueError as error:
        unknown["disk_bytes_per_second"] = str(error)
    counts = Counts()
    begin = time.monotonic()
    stop = threading.Event()

    def progress() -> None:
        while not stop.wait(PROGRESS):
            rate = counts.read / (time.monotonic() - begin)
            say(f"{name}: {shown(counts.done)} of {shown(wanted)}, {shown(rate)}/s")

    teller = threading.Thread(target=progress, daemon=True)
    teller.start()
    try:
        load(spans_of(files, wanted), counts)
    finally:
        stop.set()
        teller.join()
    seconds = time.monotonic() - begin
    rate: float | None = None
    if counts.cached is None:
        unknown["cached_bytes"] = "the file system does not tell what is in memory"
        unknown["bytes_per_second"] = "some of it may have been in memory"
    elif counts.read < LEAST_FOR_RATE:
        unknown["bytes_per_second"] = f"fewer than {LEAST_FOR_RATE >> 20} MiB were read from the disk"
    else:
        rate = counts.read / seconds
    report = {
        "version": os.path.basename(resolved),
        "total_bytes": total,
        "loaded_bytes": wanted,
        "cached_bytes": counts.cached,
        "read_bytes": counts.read,
        "seconds": round(seconds, 3),
        "bytes_per_second": None if rate is None else round(rate),
        "disk_bytes_per_second": None if speed is None else round(speed),
        "percent_of_disk_speed": round(100 * rate / speed) if rate is not None and speed else None,
        "unknown": unknown,
    }
    report["summary"] = summary(report)
    say(f"{name}: {report['summary']}")
    return report


def summary(report: dict[str, Any]) -> str:
    """The report in a sentence."""
    parts = [f"{shown(report['loaded_bytes'])} in memory after {report['seconds']:.1f} s"]
    if report["cached_bytes"]:
        parts.append(f"{shown(report['cached_bytes'])} were there before")
    if report["bytes_per_second"] is not None:
        parts.append(f"read at {shown(report['bytes_per_second'])}/s")
    if report["disk_bytes_per_second"] is not None:
        share = report["percent_of_disk_speed"]
        parts.append(
            f"the disk's own speed is {shown(report['disk_bytes_per_second'])}/s"
            + ("" if share is None else f" ({share} % of it)")
        )
    if report["loaded_bytes"] < report["total_bytes"]:
        parts.append(f"{shown(report['total_bytes'] - report['loaded_bytes'])} left out for lack of memory")
    for name, reason in sorted(report["unknown"].items()):
        parts.append(f"{name} unknown: {reason}")
    return "; ".join(parts)


def shown(count: float) -> str:
    """Bytes for people."""
    for unit in ("bytes", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "bytes" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} GiB"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Reads a model's files into the page cache.")
    parser.add_argument("name")
    parser.add_argument("directory")
    parser.add_argument("report")
    parser.add_argument("--reserve-percent", type=float, default=10.0)
    options = parser.parse_args(arguments)
    try:
        report = preload(options.name, options.directory, options.reserve_percent, lambda text: print(text, flush=True))
        temporary = f"{options.report}.new"
        with open(temporary, "w", encoding="utf-8") as file:
            json.dump(report, file, indent=1)
        os.replace(temporary, options.report)
    except (OSError, ValueError) as error:
        print(f"{options.name}: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
