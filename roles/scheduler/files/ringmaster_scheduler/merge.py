# SPDX-License-Identifier: GPL-3.0-or-later
"""A node's state, put together from the lines of its agent's stream.

Pure: no socket, no clock. The stream's form is set down in docs/conventions.md. What comes over the network is checked
before any of it is taken up: a line is used as a whole or not at all. Quantities that no rule looks at are not kept, so
that an agent cannot fill the memory with them.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any, Final, NamedTuple

from ansible_collections.ringmaster.inference.plugins.module_utils.rdma_health import (
    ETHERNET_COUNTERS,
    HARDWARE_COUNTERS,
    Sample,
)

SCHEMA: Final = 1
LONGEST_LINE: Final = 1024 * 1024
"""Bytes. A snapshot of a host with eight cards and eight ports has about 30 kB."""

_MOST_SUBJECTS: Final = 4096
_MOST_WORDS: Final = 256
_MOST_XIDS: Final = 1024
"""Pairs of card and code of a host."""

MOST_RECENT: Final = 32
"""Times of Xids that an agent tells for each card and code."""

_LARGEST: Final = 1 << 64
_LATEST: Final = 1e12


class StreamError(Exception):
    """The connection is of no more use: what came is not of the agreed form, or something is missing before it.

    `hostile` tells the first, which no good agent does, from the second, which happens.
    """

    def __init__(self, text: str, hostile: bool = True) -> None:
        super().__init__(text)
        self.hostile = hostile


class Message(NamedTuple):
    """A line of the stream, checked. `seconds` and `read` are of the agent's clock since the boot of its host."""

    type: str
    agent: str
    host: str
    boot: str
    sequence: int
    seconds: float
    read: dict[str, float]
    values: dict[str, dict[str, Any] | None]
    unknown: dict[str, str | None]


class Change(NamedTuple):
    """What a line changed: whether everything is new, whether the agent or the host started again before it, which
    readers read, and which subjects have other values."""

    snapshot: bool
    new_agent: bool
    new_boot: bool
    read: frozenset[str]
    subjects: frozenset[str]


def _refuse_constant(text: str) -> Any:
    raise ValueError(f"{text} is no number of JSON")


_decode: Final = json.JSONDecoder(parse_constant=_refuse_constant).decode


def parse(line: bytes) -> Message:
    """Return what a line says. Raises StreamError."""
    try:
        content = _decode(line.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise StreamError(f"a line that is no JSON: {str(error)[:120]}") from error
    if not isinstance(content, dict):
        raise StreamError("a line that is no object")
    if content.get("schema") != SCHEMA or isinstance(content["schema"], bool):
        raise StreamError(f"expected schema {SCHEMA}, found {_short(content.get('schema'))}")
    kind = content.get("type")
    if kind not in ("snapshot", "change", "alive"):
        raise StreamError(f"a line of type {_short(kind)}")
    sequence = content.get("sequence")
    if not isinstance(sequence, int) or not _is_count(sequence):
        raise StreamError(f"sequence is {_short(sequence)}")
    return Message(
        kind,
        _identity(content, "agent"),
        _identity(content, "host"),
        _identity(content, "boot"),
        sequence,
        _seconds(content.get("seconds"), "seconds"),
        {name: _seconds(value, f"read.{name[:60]}") for name, value in _object(content, "read").items()},
        _values(_object(content, "values")),
        _reasons(_object(content, "unknown")),
    )


class AgentState:
    """What is known of a host. `subjects` holds the quantities of each, those that are known; `unknown` the reasons for
    what is not; `read` when each reader last succeeded, by the agent's clock."""

    def __init__(self, host: str) -> None:
        self.host = host
        self.agent = ""
        self.boot = ""
        self.sequence = 0
        self.seconds = 0.0
        self.read: dict[str, float] = {}
        self.subjects: dict[str, dict[str, Any]] = {}
        self.unknown: dict[str, str] = {}

    def apply(self, message: Message, first: bool) -> Change:
        """Take up a line; `first` says that it is the first of its connection.

        Raises StreamError if it does not follow what came before; then nothing has changed.
        """
        if message.host != self.host:
            raise StreamError(f"the agent of another host, {_short(message.host)}")
        if first != (message.type == "snapshot"):
            raise StreamError("expected a snapshot as the first line and only there")
        if message.type == "snapshot":
            return self._replace(message)
        if (message.agent, message.boot) != (self.agent, self.boot):
            raise StreamError("the agent or its host was started again", hostile=False)
        expected = self.sequence + (message.type == "change")
        if message.sequence != expected:
            raise StreamError(f"expected sequence {expected}, found {message.sequence}", hostile=False)
        if len(self.subjects) + len(message.values) > _MOST_SUBJECTS:
            raise StreamError(f"over {_MOST_SUBJECTS} subjects")
        if len(self.unknown) + len(message.unknown) > _MOST_SUBJECTS:
            raise StreamError(f"over {_MOST_SUBJECTS} reasons")
        if len(self.read) + len(message.read) > _MOST_SUBJECTS:
            raise StreamError(f"over {_MOST_SUBJECTS} readers")
        self._check_xids(message.values, self.subjects)
        self.sequence = message.sequence
        self.seconds = message.seconds
        self.read.update(message.read)
        for subject, quantities in message.values.items():
            self._merge(subject, quantities)
        for name, reason in message.unknown.items():
            if reason is None:
                self.unknown.pop(name, None)
            else:
                self.unknown[name] = reason
        return Change(False, False, False, frozenset(message.read), frozenset(message.values))

    def _replace(self, message: Message) -> Change:
        if max(len(message.values), len(message.read), len(message.unknown)) > _MOST_SUBJECTS:
            raise StreamError(f"over {_MOST_SUBJECTS} subjects")
        self._check_xids(message.values, {})
        new_boot = self.boot not in ("", message.boot)
        new_agent = self.agent not in ("", message.agent)
        self.agent, self.boot = message.agent, message.boot
        self.sequence, self.seconds = message.sequence, message.seconds
        read = frozenset(name for name, seconds in message.read.items() if new_boot or self.read.get(name) != seconds)
        self.read = dict(message.read)
        before = self.subjects
        self.subjects = {}
        for subject, quantities in message.values.items():
            self._merge(subject, quantities)
        self.unknown = {name: reason for name, reason in message.unknown.items() if reason is not None}
        return Change(True, new_agent, new_boot, read, frozenset({*before, *self.subjects}))

    @staticmethod
    def _check_xids(values: dict[str, dict[str, Any] | None], known: dict[str, dict[str, Any]]) -> None:
        """Raise StreamError for more Xids than a host has: their codes are names that the agent chooses."""
        if not any(subject.startswith("xid/") for subject in values):
            return
        pairs = {
            (subject, code)
            for subjects in (known, values)
            for subject, codes in subjects.items()
            if subject.startswith("xid/")
            for code in codes or ()
        }
        if len(pairs) > _MOST_XIDS:
            raise StreamError(f"Xids of over {_MOST_XIDS} cards and codes")

    def _merge(self, subject: str, quantities: dict[str, Any] | None) -> None:
        if quantities is None:
            self.subjects.pop(subject, None)
            return
        known = self.subjects.setdefault(subject, {})
        for name, value in quantities.items():
            if value is None:
                known.pop(name, None)
            else:
                known[name] = value


def _short(value: Any) -> str:
    return repr(value)[:60]


def _object(content: dict[str, Any], key: str) -> dict[str, Any]:
    value = content.get(key, {})
    if not isinstance(value, dict):
        raise StreamError(f"{key} is no object")
    return value


def _identity(content: dict[str, Any], key: str) -> str:
    value = content.get(key)
    if not isinstance(value, str) or not 0 < len(value) <= 255 or not value.isprintable():
        raise StreamError(f"{key} is {_short(value)}")
    return value


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= _LARGEST


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value <= _LARGEST


def _seconds(value: Any, what: str) -> float:
    if not _is_number(value) or not value <= _LATEST or not math.isfinite(value):
        raise StreamError(f"{what} is {_short(value)}")
    return float(value)


def _reasons(content: dict[str, Any]) -> dict[str, str | None]:
    for reason in content.values():
        if reason is not None and not isinstance(reason, str):
            raise StreamError(f"a reason that is {_short(reason)}")
    return {name[:255]: None if reason is None else reason[:500] for name, reason in content.items()}


def _count(value: Any) -> int:
    if not _is_count(value):
        raise ValueError("no count")
    return int(value)


def _measure(value: Any) -> float:
    if not _is_number(value):
        raise ValueError("no number of zero or more")
    return float(value)


def _flag(value: Any) -> bool:
    if not isinstance(value, bool) and value not in (0, 1):
        raise ValueError("neither true nor false")
    return bool(value)


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError("no text")
    return value[:255]


def _texts(value: Any) -> tuple[str, ...]:
    if not isinstance(value, list) or len(value) > _MOST_WORDS or not all(isinstance(word, str) for word in value):
        raise ValueError("no list of words")
    return tuple(word[:255] for word in value)


def _counts(value: Any) -> tuple[int, ...]:
    if not isinstance(value, list) or len(value) > _MOST_WORDS or not all(_is_count(number) for number in value):
        raise ValueError("no list of counts")
    return tuple(value)


class XidEvents(NamedTuple):
    """The Xids of one code on one card: `recent` are the times of the last ones by the agent's clock, the latest is
    `seconds`."""

    seconds: float
    action: str
    recent: tuple[float, ...]


def _xid(value: Any) -> XidEvents:
    if not isinstance(value, dict):
        raise ValueError("no object")
    seconds, recent = _measure(value.get("seconds")), value.get("recent")
    if recent is None:
        return XidEvents(seconds, _text(value.get("action", "")), (seconds,))
    if not isinstance(recent, list) or len(recent) > MOST_RECENT:
        raise ValueError("no list of times")
    return XidEvents(seconds, _text(value.get("action", "")), tuple(map(_measure, recent)))


def _sample(value: Any) -> Sample:
    """Return the counters that a judgement looks at; what else there is is not kept."""
    sample = Sample.from_document(value)
    hardware, ethernet = (
        {name: _count(counters[name]) for name in names if name in counters}
        for counters, names in ((sample.hardware, HARDWARE_COUNTERS), (sample.ethernet, ETHERNET_COUNTERS))
    )
    boot, driver = (None if mark is None else mark[:255] for mark in (sample.boot, sample.driver))
    return Sample(_seconds(sample.seconds, "seconds"), boot, driver, hardware, ethernet)


_READ: Final[dict[str, dict[str, Callable[[Any], Any]]]] = {
    "gpu": {
        "index": _count,
        "pci_address": _text,
        "model": _text,
        "state": _text,
        "ecc_uncorrected_volatile": _count,
        "remapped_rows_pending": _flag,
        "remapped_rows_failed": _flag,
        "recovery_action": _text,
        "clock_event_reasons": _texts,
        "clock_lost_seconds": _measure,
        "pcie_replay_counter": _count,
        "pcie_width": _count,
        "pcie_width_max": _count,
        "pcie_generation": _count,
        "pcie_generation_max": _count,
        "utilization_percent": _measure,
    },
    "nvlink": {"links": _count, "expected": _count, "bridge": _flag, "down": _counts, "errors": _count},
    "port": {"netdev": _text, "sample": _sample},
    "pcie": {
        "kind": _text,
        **{f"{above}{name}": _count for above in ("", "above_") for name in ("correctable", "nonfatal", "fatal")},
        "width": _count,
        "width_max": _count,
    },
    "canary": {
        "prompt": _text,
        "answer": _text,
        "number": _count,
        "asked": _measure,
        "interval": _measure,
        "timed_out": _flag,
        "error": _text,
    },
}
"""The quantities that are kept, by the first word of the subject, each with what checks it."""


def _values(content: dict[str, Any]) -> dict[str, dict[str, Any] | None]:
    values: dict[str, dict[str, Any] | None] = {}
    for subject, quantities in content.items():
        kind = subject.partition("/")[0]
        if kind == "xid":
            readers: dict[str, Callable[[Any], Any]] | None = None
        elif kind in _READ:
            readers = _READ[kind]
        else:
            continue
        if len(subject) > 255 or not subject.isprintable():
            raise StreamError(f"a subject that is {_short(subject)}")
        if quantities is None:
            values[subject] = None
            continue
        if not isinstance(quantities, dict):
            raise StreamError(f"{subject} is {_short(quantities)}")
        values[subject] = _xids(subject, quantities) if readers is None else _quantities(subject, quantities, readers)
    return values


def _quantities(subject: str, quantities: dict[str, Any], readers: dict[str, Callable[[Any], Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in quantities.items():
        reader = readers.get(name)
        if reader is not None:
            try:
                found[name] = None if value is None else reader(value)
            except (ValueError, OverflowError) as error:
                raise StreamError(f"{subject} {name}: {error}: {_short(value)}") from error
    return found


def _xids(subject: str, quantities: dict[str, Any]) -> dict[str, Any]:
    if len(quantities) > _MOST_WORDS:
        raise StreamError(f"{subject}: over {_MOST_WORDS} codes")
    for code in quantities:
        if not (code.isascii() and code.isdigit()) or len(code) > 9:
            raise StreamError(f"{subject}: a code that is {_short(code)}")
    return _quantities(subject, quantities, dict.fromkeys(quantities, _xid))
