# Copyright (c) 2026, the Ringmaster authors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The evidence of a run: what each operation measured, changed and verified on each host, and its summary as text.

The document is plain data (JSON), so that a stored one can be rendered again at any time. Times are UTC, ISO 8601;
durations are in seconds. Nothing here imports Ansible, and nothing reads a clock.

An operation's ``seconds`` are the sum of its tasks' times on that host: under the linear strategy a host also waits for
others, and that is not its time.
"""

from __future__ import annotations

import json
import math
import os
import textwrap
from collections.abc import Iterable, Mapping
from typing import Any

from ansible_collections.ringmaster.inference.plugins.module_utils.durable import replace

SCHEMA = 1

# Changes and failures of tasks that belong to no role are kept under this name.
OUTSIDE_ROLES = "playbook"

# Up to here each host and operation has its row (8 hosts with 17 operations are 136); above, hosts with the same
# outcome share one.
MOST_SINGLE_ROWS = 200
LONGEST_MESSAGE = 2000  # characters kept of a failure's text
DEEPEST = 20  # nested containers kept of a value; what is below is kept as text

COUNTS = ("ok", "changed", "failures", "unreachable", "skipped", "rescued", "ignored")


class Recorder:
    """Collects the document of one run."""

    def __init__(
        self, run: str, playbook: str, started_at: str, check_mode: bool, collection_version: str, ansible_core: str
    ) -> None:
        self.document: dict[str, Any] = {
            "schema": SCHEMA,
            "run": run,
            "playbook": playbook,
            "check_mode": check_mode,
            "collection_version": collection_version,
            "ansible_core": ansible_core,
            "started_at": started_at,
            "finished_at": None,
            "seconds": None,
            "status": "running",
            "hosts": {},
        }
        self._operations: dict[tuple[str, str], dict[str, Any]] = {}

    def host(self, host: str) -> dict[str, Any]:
        """The host's part of the document. A host that takes part is in it even if no operation runs there."""
        part: dict[str, Any] = self.document["hosts"].setdefault(
            host, {"status": "ok", "counts": dict.fromkeys(COUNTS, 0), "operations": []}
        )
        return part

    def task(
        self,
        host: str,
        operation: str | None,
        name: str,
        action: str,
        started_at: str,
        seconds: float,
        changed: bool = False,
        facts: Mapping[str, Any] | None = None,
        failure: str | None = None,
        unreachable: bool = False,
    ) -> None:
        """Take in a task's end on a host.

        ``operation`` is the role the task belongs to, or None. ``facts`` are variables that the task set;
        ``OPERATION_measured`` and ``OPERATION_verified`` are kept, the first measured and the last verified of a run.
        ``failure`` is the text of a failure that nothing rescued or ignored.
        """
        part = self.host(host)
        if failure is not None and part["status"] == "ok":
            part["status"] = "unreachable" if unreachable else "failed"
        if operation is None and not changed and failure is None:
            return
        entry = self._operation(host, operation or OUTSIDE_ROLES, started_at)
        entry["seconds"] = round(entry["seconds"] + max(seconds, 0.0), 3)
        if changed:
            entry["changed"].append({"task": name, "action": action})
        if failure is not None:
            entry["status"] = "unreachable" if unreachable else "failed"
            entry["failure"] = {"task": name, "message": failure[:LONGEST_MESSAGE]}
        measured = (facts or {}).get(f"{operation}_measured")
        verified = (facts or {}).get(f"{operation}_verified")
        if measured is not None and entry["measured"] is None:
            entry["measured"] = plain(measured)
        if verified is not None:
            entry["verified"] = plain(verified)

    def finish(self, finished_at: str, seconds: float, counts: Mapping[str, Mapping[str, int]]) -> None:
        """The run is over. ``counts`` are Ansible's own for each host: ok, changed, failures and the rest."""
        for host, numbers in counts.items():
            part = self.host(host)
            part["counts"] = {name: int(numbers.get(name, 0)) for name in COUNTS}
            if part["counts"]["unreachable"]:
                part["status"] = "unreachable"
            elif part["counts"]["failures"]:
                part["status"] = "failed"
        well = all(part["status"] == "ok" for part in self.document["hosts"].values())
        self.document.update(finished_at=finished_at, seconds=round(seconds, 3), status="ok" if well else "failed")

    def _operation(self, host: str, operation: str, started_at: str) -> dict[str, Any]:
        key = (host, operation)
        if key not in self._operations:
            operations = self.host(host)["operations"]
            self._operations[key] = {
                "name": operation,
                "order": len(operations) + 1,
                "status": "ok",
                "started_at": started_at,
                "seconds": 0.0,
                "measured": None,
                "changed": [],
                "verified": None,
                "failure": None,
            }
            operations.append(self._operations[key])
        return self._operations[key]


def plain(value: Any, depth: int = 0) -> Any:
    """``value`` in JSON's own types. What has none becomes text; Ansible's tagged values lose their tags."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else _text(value)
    if isinstance(value, str):
        # A lone surrogate cannot be written as UTF-8.
        return "".join(value).encode("utf-8", "replace").decode("utf-8")
    if depth < DEEPEST and isinstance(value, Mapping):
        return {_text(key): plain(each, depth + 1) for key, each in value.items()}
    if depth < DEEPEST and isinstance(value, (list, tuple, set, frozenset)):
        return [plain(each, depth + 1) for each in value]
    return _text(value)


def _text(value: Any) -> str:
    return str(value).encode("utf-8", "replace").decode("utf-8")


def write(document: Mapping[str, Any], directory: str) -> str:
    """Store the document as ``RUN.json`` in ``directory``, in one step, readable by its owner only; returns the path.

    The directory is made, with mode 0700, if it is missing.

    Raises:
        OSError: if that is not possible. An earlier document of the run is then as it was.
    """
    os.makedirs(directory, mode=0o700, exist_ok=True)
    path = os.path.join(directory, f"{document['run']}.json")
    replace(path, json.dumps(document, indent=1, ensure_ascii=False) + "\n", 0o600)
    return path


def render(document: Mapping[str, Any], lines: Iterable[str] = (), width: int = 120) -> str:
    """The summary of a run: a table, what failed, totals, counts for each host, then ``lines``.

    ``width`` is in columns. Only the last column of the table, the names of the changes, is cut to it.
    """
    hosts: Mapping[str, Any] = document["hosts"]
    would = "would change" if document["check_mode"] else "changed"
    title = f"{document['playbook']} on {_count(len(hosts), 'host')}, {document['started_at']}, run {document['run']}"
    if document["check_mode"]:
        title += " (check mode: nothing was changed)"
    blocks = [title, _table(hosts, would, width)]
    failures = _failures(hosts, width)
    if failures:
        blocks.append(failures)
    blocks.append(f"{_totals(document, would)}\n{_counts(hosts, width)}")
    extra = "\n".join(lines)
    return "\n\n".join(blocks + ([extra] if extra else []))


def _count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def _one_line(text: str) -> str:
    return " ".join("".join(character if character.isprintable() else " " for character in text).split())


def _cut(text: str, width: int) -> str:
    return text if len(text) <= width else text[: max(width - 1, 0)] + "…"


def _outcome(operation: Mapping[str, Any]) -> str:
    if operation["status"] != "ok":
        return str(operation["status"]).upper()
    verified = operation["verified"]
    if verified is None:
        return "-"
    return _count(len(verified), "check") if isinstance(verified, (dict, list)) else "yes"


def _table(hosts: Mapping[str, Any], would: str, width: int) -> str:
    pairs = [(host, operation) for host, part in hosts.items() for operation in part["operations"]]
    rows = [("HOST", "OPERATION", would.upper(), "VERIFIED", "SECONDS", "WHAT")]
    rows += _single_rows(hosts) if len(pairs) <= MOST_SINGLE_ROWS else _shared_rows(hosts, pairs)
    if not any(row[5] for row in rows[1:]):
        rows[0] = (*rows[0][:5], "")
    widths = [max(len(row[column]) for row in rows) for column in range(5)]
    lines = []
    for host, operation, changed, verified, seconds, what in rows:
        left = (
            f"{host:<{widths[0]}}  {operation:<{widths[1]}}  {changed:>{widths[2]}}  {verified:<{widths[3]}}  "
            f"{seconds:>{widths[4]}}"
        )
        lines.append(f"{left}  {_cut(what, max(width - len(left) - 2, 20))}".rstrip())
    return "\n".join(lines)


def _what(operation: Mapping[str, Any]) -> str:
    return _one_line("; ".join(change["task"] for change in operation["changed"]))


def _single_rows(hosts: Mapping[str, Any]) -> list[tuple[str, str, str, str, str, str]]:
    rows = []
    for host, part in sorted(hosts.items()):
        rows += [
            (
                _one_line(host),
                _one_line(operation["name"]),
                str(len(operation["changed"])),
                _outcome(operation),
                f"{operation['seconds']:.1f}",
                _what(operation),
            )
            for operation in part["operations"]
        ] or [(_one_line(host), "-", "0", "-", "-", "")]
    return rows


def _shared_rows(
    hosts: Mapping[str, Any], pairs: list[tuple[str, Mapping[str, Any]]]
) -> list[tuple[str, str, str, str, str, str]]:
    """One row for all hosts with the same outcome of an operation, in the order in which operations came."""
    order: dict[str, int] = {}
    shared: dict[tuple[str, int, str, str], list[tuple[str, float]]] = {}
    for host, operation in pairs:
        name = operation["name"]
        order[name] = max(order.get(name, 0), operation["order"])
        # A host that failed is on a row of its own.
        alone = "" if operation["status"] == "ok" else host
        key = (name, len(operation["changed"]), _outcome(operation), alone)
        shared.setdefault(key, []).append((host, operation["seconds"]))
    what = {(operation["name"], len(operation["changed"])): _what(operation) for _host, operation in reversed(pairs)}
    rows = [
        (
            _hosts(sorted(host for host, _seconds in members)),
            _one_line(name),
            str(changed),
            outcome,
            f"{max(seconds for _host, seconds in members):.1f}",
            what[name, changed],
        )
        for (name, changed, outcome, _alone), members in sorted(
            shared.items(), key=lambda item: (order[item[0][0]], item[0])
        )
    ]
    idle = sorted(host for host, part in hosts.items() if not part["operations"])
    return [*rows, (_hosts(idle), "-", "0", "-", "-", "")] if idle else rows


def _hosts(names: list[str]) -> str:
    return _one_line(names[0]) + (f" and {len(names) - 1} more" if len(names) > 1 else "")


def _failures(hosts: Mapping[str, Any], width: int) -> str:
    paragraphs = []
    for host, part in sorted(hosts.items()):
        for operation in part["operations"]:
            failure = operation["failure"]
            if failure is None:
                continue
            lines = [f"{_one_line(host)}, {_one_line(operation['name'])}: {_one_line(failure['task'])}"]
            for line in failure["message"].splitlines():
                lines += textwrap.wrap(_one_line(line), max(width, 40), initial_indent="    ", subsequent_indent="    ")
            paragraphs.append("\n".join(lines))
    return "\n".join(paragraphs)


def _totals(document: Mapping[str, Any], would: str) -> str:
    operations = [operation for part in document["hosts"].values() for operation in part["operations"]]
    tasks = sum(len(operation["changed"]) for operation in operations)
    verified = sum(operation["verified"] is not None for operation in operations)
    failed = sum(operation["status"] != "ok" for operation in operations)
    total = (
        f"{_count(len(document['hosts']), 'host')}, {_count(len(operations), 'operation')}: "
        f"{_count(tasks, 'task')} {would}, {verified} verified, {failed} failed"
    )
    return f"{total}, {document['seconds']:.1f} s" if document["seconds"] is not None else f"{total}, not finished"


def _counts(hosts: Mapping[str, Any], width: int) -> str:
    same: dict[tuple[int, int, int], list[str]] = {}
    for host, part in sorted(hosts.items()):
        counts = part["counts"]
        same.setdefault((counts["changed"], counts["failures"], counts["unreachable"]), []).append(_one_line(host))
    lines = []
    for (changed, failures, unreachable), names in sorted(same.items()):
        head = f"changed={changed} failed={failures} unreachable={unreachable}: "
        lines += textwrap.wrap(
            ", ".join(names), max(width, 40), initial_indent=head, subsequent_indent="    ", break_on_hyphens=False
        )
    return "\n".join(lines)
