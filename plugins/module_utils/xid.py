# Copyright (c) 2026, the Ringmaster authors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Xids: what NVIDIA's driver writes into the kernel log about a card's faults, with meaning and action.

:class:`XidReader` reads them from the journal since a cursor, else from the kernel's own ring. Nothing here imports
Ansible. What a code means is in :mod:`.xid_table`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from typing import Any

from ansible_collections.ringmaster.inference.plugins.module_utils.commands import Answer, CommandRunner
from ansible_collections.ringmaster.inference.plugins.module_utils.file_tree import FileTree
from ansible_collections.ringmaster.inference.plugins.module_utils.gpu import RECOVERY_ACTION_WORDS, RECOVERY_ACTIONS
from ansible_collections.ringmaster.inference.plugins.module_utils.gpu_health import RECOVERY
from ansible_collections.ringmaster.inference.plugins.module_utils.nvml import pci_address
from ansible_collections.ringmaster.inference.plugins.module_utils.xid_table import XIDS

FALLEN_OFF_THE_BUS = 79
RECOVERY_ACTION_CHANGED = 154

# Only at the start of a line: a process can put the same words into its own name, which is part of these lines.
_XID_LINE = re.compile(r"NVRM: Xid \((?:PCI:)?([0-9a-fA-F:.]{5,16})(?: [^():]{0,60}(?::[0-9a-fA-F]+)?)?\)[^:]{0,60}: ")
_CODE = re.compile(r"([0-9]{1,9})(?:,|\s|\Z)")
_FALLEN_LINE = re.compile(r"NVRM: GPU (?:at )?(?:PCI:)?([0-9a-fA-F:.]{5,16}): GPU has fallen off the bus")
_PROCESS = re.compile(r"pid=(?:'?<unknown>'?|([0-9]{1,10}))(?:, *name=([^,]*))?(?:, *|\Z)")
_RECOVERY = re.compile(r"to (?:(0x[0-9a-fA-F]{1,8}|[0-9]{1,8}) *)?\(([^()]{1,60})\)")

# Without --quiet, so that journalctl says if it may not show the kernel's lines.
_JOURNALCTL = ("journalctl", "--no-pager", "--output=json", "--output-fields=MESSAGE")
_MESSAGE_IN_BYTES = re.compile(rb'"MESSAGE"\s*:\s*\[')
_CURSOR = re.compile(r"[A-Za-z0-9=;_.:-]{1,500}")

LONGEST_MESSAGE = 1000
"""Characters of a line that are kept; the driver's own are far shorter."""


def parse(message: str) -> dict[str, Any] | None:
    """The event that a line of the kernel log tells; None if it is no Xid line.

    ``{xid, pci_slot, pid, process, recovery_action, message, meaning, action, to_do, unknown}``. The driver leaves the
    PCI function out: `pci_slot` is domain, bus and device, ``0000:07:00``. Raises ValueError for a line that begins as
    an Xid line does and goes on otherwise.
    """
    text = printable(message)
    fallen = _FALLEN_LINE.match(text)
    if fallen:
        return _event(FALLEN_OFF_THE_BUS, fallen.group(1), "", text)
    if not text.startswith("NVRM: Xid"):
        return None
    head = _XID_LINE.match(text)
    code = _CODE.match(text, head.end()) if head else None
    if not head or not code:
        raise ValueError(text)
    return _event(int(code.group(1)), head.group(1), text[code.end() :].strip(), text)


def _event(code: int, place: str, rest: str, text: str) -> dict[str, Any]:
    address = pci_address(place)
    if address is None:
        raise ValueError(text)
    unknown = {}
    process = _PROCESS.match(rest)
    pid = int(process.group(1)) if process and process.group(1) else None
    name = process.group(2).strip() if process and process.group(2) else None
    if name in ("", "<unknown>"):
        name = None
    for field, value in (("pid", pid), ("process", name)):
        if value is None:
            unknown[field] = "the line names none"
    known = XIDS.get(code)
    if known is None:
        meaning, action, to_do = None, "report", "look it up in NVIDIA's catalogue of Xids, and report it"
        unknown["meaning"] = f"Xid {code} is not in the table of this version"
    else:
        meaning, action, to_do = known.meaning, known.action, known.to_do
    recovery = _recovery_action(rest) if code == RECOVERY_ACTION_CHANGED else None
    if recovery is None:
        unknown["recovery_action"] = (
            "the line names none that is known" if code == RECOVERY_ACTION_CHANGED else "only Xid 154 tells it"
        )
    elif recovery == "none":
        action, to_do = "none", "none; the card needs no recovery any more"
    else:
        action, to_do = RECOVERY[recovery]
    return {
        "xid": code,
        "pci_slot": address[:-2],
        "pid": pid,
        "process": name,
        "recovery_action": recovery,
        "message": text,
        "meaning": meaning,
        "action": action,
        "to_do": to_do,
        "unknown": unknown,
    }


def _recovery_action(rest: str) -> str | None:
    found = _RECOVERY.search(rest)
    if not found:
        return None
    number, words = found.groups()
    if number is not None:
        return RECOVERY_ACTIONS.get(int(number, 16 if number.startswith("0x") else 10))
    return RECOVERY_ACTION_WORDS.get(words.strip().lower())


def printable(text: str) -> str:
    """The text as one line that disturbs no terminal and no log, cut to LONGEST_MESSAGE."""
    line = text[:LONGEST_MESSAGE].strip()
    return "".join(character if character.isprintable() else "\ufffd" for character in line)


@dataclass(frozen=True)
class LogLine:
    """A line of the kernel log. `cursor` and `boot` are the journal's, times are None if the log does not tell them."""

    message: str
    cursor: str | None = None
    boot: str | None = None
    realtime_microseconds: int | None = None
    since_boot_seconds: float | None = None


@dataclass(frozen=True)
class Log:
    """What was read of the log: the driver's `lines`, how many lines in all, and the cursor of the last of them."""

    lines: list[LogLine]
    count: int = 0
    cursor: str | None = None


class XidReader:
    """Reads Xid lines with the host's own ``journalctl``, else ``dmesg``."""

    PAGE = 50_000
    """Lines of the journal that are read at once, about 20 MB."""
    PAGES = 20
    """Pages that one call reads at most; the returned cursor leads to the next ones."""

    def __init__(self, files: FileTree, commands: CommandRunner) -> None:
        self.files = files
        self.commands = commands

    def read(self, cursor: str | None = None) -> dict[str, Any]:
        """Events after `cursor`, or since the host's start.

        ``{events, unparsed, cursor, source, start, gap, unknown}`` as xid_info documents them. `events` is None if
        nothing can be known of the kernel log.
        """
        gap = None
        if cursor:
            log, gap = self._since(cursor)
            if log is not None:
                return self._result(log, "journal", "cursor", gap)
        log, reason = self._since_boot()
        if log is not None:
            if log.count >= self.PAGE:
                left_out = f"only the last {self.PAGE} lines of the kernel log since the host's start were read"
                gap = f"{gap}; {left_out}" if gap else left_out
            return self._result(log, "journal", "boot", gap)
        ring, ring_reason = self._ring()
        if ring is not None:
            if cursor:
                gap = f"{gap or reason}; what was written before the kernel's own ring began can't be read"
            result = self._result(ring, "kernel_ring", "boot", gap)
            result["unknown"]["cursor"] = "the kernel's own ring has no cursor"
            return result
        nothing = dict.fromkeys(("events", "unparsed", "source", "start"))
        unknown = dict.fromkeys(nothing, f"{reason}; {ring_reason}")
        if not cursor:
            unknown["cursor"] = reason
        return {**nothing, "cursor": cursor or None, "gap": gap, "unknown": unknown}

    def follow(self, cursor: str | None = None) -> list[str]:
        """The command that tells the kernel's lines as they come, for ever: since the boot, or from `cursor` on.

        The entry of the cursor itself comes first; if another one does, the journal no longer has it. What the command
        prints, line by line, is for :func:`followed`. Raises ValueError for what is no cursor.
        """
        if cursor and not _CURSOR.fullmatch(cursor):
            raise ValueError("what was given as cursor is none")
        since = f"--cursor={cursor}" if cursor else "--boot"
        return [*_JOURNALCTL, "--follow", "--no-tail", "_TRANSPORT=kernel", since]

    def _result(self, log: Log, source: str, start: str, gap: str | None) -> dict[str, Any]:
        boot = (self.files.boot_id() or "").replace("-", "").lower()
        events = []
        unparsed = []
        for line in log.lines:
            try:
                event = parse(line.message)
            except ValueError as error:
                unparsed.append(str(error))
                continue
            if event is not None:
                events.append(_placed(event, line, boot, source))
        return {
            "events": events,
            "unparsed": unparsed,
            "cursor": log.cursor,
            "source": source,
            "start": start,
            "gap": gap,
            "unknown": {},
        }

    def _journal(self, *arguments: str) -> Answer:
        return self.commands.run(
            [*_JOURNALCTL, *arguments],
            timeout=60,
        )

    def _since(self, cursor: str) -> tuple[Log | None, str | None]:
        """What was logged after `cursor`, and what is missing; None if the journal has that cursor no more.

        The entry itself is asked for as well: ``--after-cursor`` silently starts somewhere if it is gone. ``--dmesg``
        is of no use here, because it leaves out what was written before the last start.
        """
        if not _CURSOR.fullmatch(cursor):
            return None, "what was given as cursor is none"
        lines: list[LogLine] = []
        count = 0
        for _page in range(self.PAGES):
            answer = self._journal("_TRANSPORT=kernel", f"--cursor={cursor}", f"--lines={self.PAGE + 1}")
            page = entries(answer.output)
            first = next(page, None)
            if not answer.ok or first is None or not _same_entry(first.cursor, cursor):
                if count:
                    return Log(lines, count, cursor), f"the journal was rotated while it was read, after {cursor}"
                return None, f"the journal no longer has the cursor {cursor}: what was written after it may be lost"
            log = _collect(page)
            lines += log.lines
            count += log.count
            cursor = log.cursor or cursor
            if log.count < self.PAGE:
                return Log(lines, count, cursor), None
        return Log(lines, count, cursor), f"only {count} lines were read; call again with the returned cursor"

    def _since_boot(self) -> tuple[Log | None, str]:
        answer = self._journal("--dmesg", f"--lines={self.PAGE}")
        if answer.missing:
            return None, "this host has no journalctl"
        log = _collect(entries(answer.output))
        if log.count:
            return log, ""
        complaint = printable(answer.complaint) or (
            "the journal holds no line of the kernel since the host's start" if answer.ok else f"status {answer.status}"
        )
        return None, f"journalctl: {complaint}"

    def _ring(self) -> tuple[Log | None, str]:
        answer = self.commands.run(["dmesg"])
        if answer.ok and answer.output.strip():
            return _collect(_ring_line(line) for line in answer.output.splitlines()), ""
        complaint = printable(answer.complaint) or ("nothing" if answer.ok else f"status {answer.status}")
        return None, f"dmesg: {complaint}"


def _collect(lines: Iterable[LogLine]) -> Log:
    """Only the driver's lines are kept: a storm of others must not fill the memory."""
    kept = []
    count = 0
    cursor = None
    for line in lines:
        count += 1
        cursor = line.cursor or cursor
        if line.message.lstrip().startswith("NVRM:"):
            kept.append(line)
    return Log(kept, count, cursor)


def entries(output: str) -> Iterator[LogLine]:
    """Lines of what ``journalctl --output=json`` printed; what is no entry (a note, a line that was cut) is left out.

    journald gives a message that is no UTF-8 as a list of bytes, several messages of one entry as a list of those, and
    null instead of one that is too long.
    """
    for text in output.split("\n"):
        if not text.startswith("{"):
            continue
        try:
            entry = json.loads(text)
        except (ValueError, RecursionError):
            continue
        if not isinstance(entry, dict):
            continue
        cursor, boot = entry.get("__CURSOR"), entry.get("_BOOT_ID")
        monotonic = _count(entry.get("__MONOTONIC_TIMESTAMP"))
        yield LogLine(
            message=_message(entry.get("MESSAGE")),
            cursor=cursor if isinstance(cursor, str) else None,
            boot=boot if isinstance(boot, str) else None,
            realtime_microseconds=_count(entry.get("__REALTIME_TIMESTAMP")),
            since_boot_seconds=None if monotonic is None else monotonic / 1_000_000,
        )


def followed(output: bytes, boot_id: str | None) -> tuple[dict[str, Any] | None, str]:
    """The event that a line of :meth:`XidReader.follow` tells (None: none), as xid_info documents it, and a complaint.

    The complaint is the text of a line that begins as an Xid line does and goes on otherwise; empty for all others.
    """
    # A storm of other lines must cost next to nothing. journald gives a message that is no UTF-8 as a list of bytes.
    if b"NVRM:" not in output and not _MESSAGE_IN_BYTES.search(output):
        return None, ""
    for line in entries(output.decode("utf-8", "replace")):
        try:
            event = parse(line.message)
        except ValueError as error:
            return None, str(error)
        if event is not None:
            return _placed(event, line, (boot_id or "").replace("-", "").lower(), "journal"), ""
    return None, ""


def cursor_of(output: bytes) -> str | None:
    """The cursor of a line of :meth:`XidReader.follow`; None if it has none."""
    return next((line.cursor for line in entries(output.decode("utf-8", "replace"))), None)


def attach(events: Iterable[dict[str, Any]], cards: Iterable[dict[str, Any]], reason: str = "") -> None:
    """Add ``pci_address``, ``uuid``, ``index`` and ``model`` of the card to each event.

    `cards` are as :func:`.gpu.identities` gives them; `reason` says why there are none.
    """
    by_slot = {card["pci_address"][:-2]: card for card in cards if card["pci_address"]}
    for event in events:
        card = by_slot.get(event["pci_slot"])
        for field in ("pci_address", "uuid", "index", "model"):
            event[field] = card[field] if card else None
            if event[field] is None:
                event["unknown"][field] = (
                    card["unknown"].get(field, "not known") if card else reason or "no card of the host is in this slot"
                )


def _placed(event: dict[str, Any], line: LogLine, boot: str, source: str) -> dict[str, Any]:
    unknown = event["unknown"]
    time = _time(line.realtime_microseconds)
    if time is None:
        unknown["time"] = "the kernel's ring has no time of day" if source == "kernel_ring" else "the entry has no time"
    if line.since_boot_seconds is None:
        unknown["since_boot_seconds"] = "the line has no time"
    this_boot = True if source == "kernel_ring" else None
    if line.boot is not None and boot:
        this_boot = line.boot.lower() == boot
    if this_boot is None:
        unknown["this_boot"] = "the host or the entry does not tell its boot id"
    return {"time": time, "since_boot_seconds": line.since_boot_seconds, "this_boot": this_boot, **event}


def _message(value: Any) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, list) and value:
        if all(isinstance(byte, int) and 0 <= byte <= 255 for byte in value):
            return bytes(value).decode("utf-8", "replace")
        return _message(value[0]) if isinstance(value[0], str) or _is_bytes(value[0]) else ""
    return ""


def _is_bytes(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(byte, int) for byte in value)


def _count(value: Any) -> int | None:
    text = str(value) if isinstance(value, (int, str)) and not isinstance(value, bool) else ""
    return int(text) if re.fullmatch(r"[0-9]{1,19}", text) else None


def _time(microseconds: int | None) -> str | None:
    if microseconds is None:
        return None
    try:
        moment = datetime(1970, 1, 1, tzinfo=timezone.utc) + timedelta(microseconds=microseconds)
    except OverflowError:
        return None
    return moment.strftime("%Y-%m-%dT%H:%M:%S.%fZ")


def _same_entry(one: str | None, other: str) -> bool:
    """Whether two cursors are of one entry. When journald moves from memory to disk, it numbers the entries anew."""
    if one is None:
        return False
    parts = [dict(part.split("=", 1) for part in cursor.split(";") if "=" in part) for cursor in (one, other)]
    names = ("b", "m", "t", "x")
    if all(name in part for part in parts for name in names):
        return [parts[0][name] for name in names] == [parts[1][name] for name in names]
    return one == other


def _ring_line(line: str) -> LogLine:
    found = re.match(r"(?:<[0-9]{1,3}>)?\[ *([0-9]{1,12}\.[0-9]{1,9})\] ?(.*)", line)
    return LogLine(found.group(2), since_boot_seconds=float(found.group(1))) if found else LogLine(line)
