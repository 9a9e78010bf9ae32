# Copyright (c) 2026, the Ringmaster authors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Counters that only grow while a device is there, compared with a baseline kept on the host.

The kernel's PCIe error counters start at zero when a device is enumerated: at a boot, a hot plug or a rescan. What they
grew by since a baseline can therefore be told only while host and device are still the ones of the baseline, and no
counter of the device fell. Everything else has no delta, and a reason instead. Nothing here imports Ansible.

A baseline is one JSON document::

    {"schema": 1, "taken_at": "2026-03-01T12:00:00Z", "boot_id": "5f0c…",
     "devices": {"0000:07:00.0": {"identity": {"vendor_id": "0x10de"}, "counters": {"correctable.RxErr": 0}}}}

``boot_id`` and values in ``identity`` may be null (not known then). Counters are integers of zero or more.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from datetime import datetime, timezone
from typing import Any

from ansible_collections.ringmaster.inference.plugins.module_utils.durable import replace
from ansible_collections.ringmaster.inference.plugins.module_utils.file_tree import FileTree

SCHEMA = 1


class BaselineError(Exception):
    """A baseline that can't be read or written; the text says what was expected, what was found and what to do."""


@dataclass(frozen=True)
class Counted:
    """One device: what tells it from another in the same slot, and its counters by name (integers, zero or more)."""

    identity: dict[str, str | None] = field(default_factory=dict)
    counters: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Baseline:
    """Counters of a host's devices at one moment. ``taken_at`` is UTC, ISO 8601."""

    taken_at: str
    boot_id: str | None
    devices: dict[str, Counted]


@dataclass(frozen=True)
class Growth:
    """By how much each counter grew. A counter without a delta has a reason; `reason` is set if none can be told."""

    deltas: dict[str, int | None]
    reason: str = ""


def take(boot_id: str | None, devices: Mapping[str, Counted]) -> Baseline:
    """A baseline of this moment."""
    return Baseline(datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"), boot_id, dict(devices))


def growth(name: str, now: Counted, boot_id: str | None, baseline: Baseline | None) -> Growth:
    """By how much the counters of device `name` grew since `baseline`; never negative.

    A counter that the baseline lacks has the delta None, and so have all of them if the host was booted since, the
    device is another one or came anew, or the baseline is missing.
    """
    reason = _incomparable(name, now, boot_id, baseline)
    before = baseline.devices[name].counters if baseline and not reason else {}
    deltas = {
        counter: value - before[counter] if counter in before else None for counter, value in now.counters.items()
    }
    return Growth(deltas, reason)


def _incomparable(name: str, now: Counted, boot_id: str | None, baseline: Baseline | None) -> str:
    """Why the counters can't be compared with the baseline; empty if they can."""
    if baseline is None:
        return "there is no baseline yet"
    if name not in baseline.devices:
        return "the device was not there when the baseline was taken"
    before = baseline.devices[name]
    if boot_id is None or baseline.boot_id is None:
        return "it is not known whether the host was booted since the baseline was taken"
    if boot_id != baseline.boot_id:
        return "the host was booted since the baseline was taken, which set the counters to zero"
    for key, value in now.identity.items():
        known = before.identity.get(key)
        if value is not None and known is not None and value != known:
            return f"another device is in its place since the baseline was taken ({key} {known} then, {value} now)"
    for counter, count in now.counters.items():
        if count < before.counters.get(counter, 0):
            return (
                f"{counter} fell from {before.counters[counter]} to {count}: the device was removed or rescanned since "
                "the baseline was taken, which set its counters to zero"
            )
    return ""


class BaselineFile:
    """A baseline in the file `path` (absolute) on the host.

    Raises:
        BaselineError: from both methods, if the file can't be read or written, or holds no baseline.
    """

    def __init__(self, path: str) -> None:
        if not os.path.isabs(path):
            raise BaselineError(f"Expected an absolute path for the baseline. Found {path!r}. To do: give one.")
        self.path = path

    def load(self) -> Baseline | None:
        """The baseline; None if there is no file."""
        tree = FileTree()
        content = tree.data(self.path)
        if content is None:
            complaint = tree.complaint(self.path)
            if complaint == "no such file":
                return None
            raise self._unusable(complaint)
        try:
            return parse(json.loads(content.decode("utf-8")))
        except (ValueError, RecursionError) as error:
            raise self._unusable(str(error) or type(error).__name__) from error

    def save(self, baseline: Baseline) -> None:
        """Replace the file in one step (mode 0600); folders that are missing are made with mode 0755."""
        document = json.dumps({"schema": SCHEMA, **asdict(baseline)}, sort_keys=True, indent=1) + "\n"
        try:
            os.makedirs(os.path.dirname(self.path), mode=0o755, exist_ok=True)
            replace(self.path, document, 0o600)
        except (OSError, ValueError) as error:
            raise BaselineError(
                f"Expected that the baseline can be written to {self.path}. Found: {error}. To do: make room or give "
                "another path."
            ) from error

    def _unusable(self, found: str) -> BaselineError:
        return BaselineError(
            f"Expected a baseline of schema {SCHEMA} in {self.path}. Found: {found}. To do: take a new one."
        )


def parse(document: Any) -> Baseline:
    """The baseline in a document of the form above; raises ValueError for anything else."""
    if not isinstance(document, dict) or document.get("schema") != SCHEMA:
        raise ValueError(f"no document of schema {SCHEMA}")
    taken_at, boot_id, devices = document.get("taken_at"), document.get("boot_id"), document.get("devices")
    if not isinstance(taken_at, str) or not (boot_id is None or isinstance(boot_id, str)):
        raise ValueError("taken_at or boot_id is no text")
    if not isinstance(devices, dict):
        raise ValueError("devices is no object")
    return Baseline(taken_at, boot_id, {name: _counted(name, entry) for name, entry in devices.items()})


def _counted(name: str, entry: Any) -> Counted:
    if not isinstance(entry, dict):
        raise ValueError(f"device {name} is no object")
    identity, counters = entry.get("identity"), entry.get("counters")
    if not isinstance(identity, dict) or not all(
        value is None or isinstance(value, str) for value in identity.values()
    ):
        raise ValueError(f"identity of device {name} is no object of texts")
    if not isinstance(counters, dict) or not all(
        isinstance(value, int) and not isinstance(value, bool) and value >= 0 for value in counters.values()
    ):
        raise ValueError(f"counters of device {name} are no object of integers of zero or more")
    return Counted(identity, counters)
