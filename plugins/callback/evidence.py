# Copyright (c) 2026, the Ringmaster authors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
name: evidence
type: aggregate
short_description: What each operation measured, changed and verified, as a document and as a summary
version_added: 0.1.0
description:
  - Writes one JSON document a run. For each host it has the operations (roles) in their order, each with what it
    measured before, the tasks that changed something, what it verified or why it failed, and the seconds it took.
  - An operation reports by setting the facts C(NAME_measured) and C(NAME_verified), where C(NAME) is the role's name.
  - The document is written at the start of each play and at the end, so that one of a run that was killed is there too,
    with status V(running). Results of tasks with C(no_log) are not recorded.
  - Prints a summary at the end of the run.
  - A document that cannot be written gives a warning and never fails a run.
requirements:
  - Enable it with C(callbacks_enabled = ringmaster.inference.evidence) in C(ansible.cfg).
options:
  directory:
    description: Where the documents go. Made with mode 0700 if it is missing. The files have mode 0600.
    type: path
    default: ~/.ringmaster/evidence
    env:
      - name: RINGMASTER_EVIDENCE_DIRECTORY
    ini:
      - section: ringmaster_evidence
        key: directory
  summary:
    description: Whether the summary is printed.
    type: bool
    default: true
    env:
      - name: RINGMASTER_EVIDENCE_SUMMARY
    ini:
      - section: ringmaster_evidence
        key: summary
  summary_lines:
    description:
      - Text printed below the summary, for instance the addresses of consoles. Several lines are allowed.
    type: str
    default: ""
    env:
      - name: RINGMASTER_EVIDENCE_SUMMARY_LINES
    ini:
      - section: ringmaster_evidence
        key: summary_lines
author:
  - Ringmaster authors (@ringmaster)
"""

import json
import os
import re
import secrets
import shutil
import time
from collections.abc import Iterator, Mapping
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from ansible import context
from ansible.playbook.block import Block
from ansible.plugins.callback import CallbackBase
from ansible.release import __version__ as ansible_core

from ansible_collections.ringmaster.inference.plugins.module_utils.evidence import Recorder, render, write

COLLECTION = "ringmaster.inference."
# Ansible's check of a role's arguments has the tag always: it alone does not mean that the operation was run.
ARGUMENT_CHECK = "ansible.builtin.validate_argument_spec"


class CallbackModule(CallbackBase):  # type: ignore[misc] # ansible carries no types
    """Translates Ansible's events for the recorder."""

    CALLBACK_VERSION = 2.0
    CALLBACK_TYPE = "aggregate"
    CALLBACK_NAME = "ringmaster.inference.evidence"
    CALLBACK_NEEDS_ENABLED = True

    def __init__(self) -> None:
        super().__init__()
        self._recorder: Recorder | None = None
        self._began = 0.0
        self._running: dict[tuple[str, str], tuple[str, float]] = {}
        self._warned = False

    def v2_playbook_on_start(self, playbook: Any) -> None:
        name = os.path.basename(playbook._file_name)
        word = re.sub(r"[^A-Za-z0-9_-]", "_", os.path.splitext(name)[0])
        self._began = time.monotonic()
        self._running = {}
        self._recorder = Recorder(
            run=f"{datetime.now(timezone.utc):%Y%m%dT%H%M%SZ}-{word}-{secrets.token_hex(3)}",
            playbook=name,
            started_at=now(),
            check_mode=bool(context.CLIARGS.get("check", False)),
            collection_version=collection_version(),
            ansible_core=ansible_core,
        )

    def v2_playbook_on_play_start(self, play: Any) -> None:
        if self._recorder is None:
            return
        for host in play.get_variable_manager().get_vars(play=play).get("ansible_play_hosts_all", ()):
            self._recorder.host(str(host))
        self._write()

    def v2_runner_on_start(self, host: Any, task: Any) -> None:
        self._running[host.get_name(), task._uuid] = (now(), time.monotonic())

    def v2_runner_on_ok(self, result: Any) -> None:
        self._take(result)

    def v2_runner_on_skipped(self, result: Any) -> None:
        self._take(result)

    def v2_runner_on_failed(self, result: Any, ignore_errors: bool = False) -> None:
        tolerated = ignore_errors or is_rescued(result._task)
        self._take(result, failure=None if tolerated else failure_text(result._result))

    def v2_runner_on_unreachable(self, result: Any) -> None:
        tolerated = bool(result._task.ignore_unreachable)
        self._take(result, failure=None if tolerated else failure_text(result._result), unreachable=True)

    def v2_playbook_on_stats(self, stats: Any) -> None:
        if self._recorder is None:
            return
        counts = {host: stats.summarize(host) for host in stats.processed}
        self._recorder.finish(now(), time.monotonic() - self._began, counts)
        path = self._write()
        if self.get_option("summary"):
            lines = self.get_option("summary_lines").splitlines()
            if path:
                lines.append(f"Evidence: {path}")
            width = max(shutil.get_terminal_size((120, 24)).columns, 80)
            self._display.display("\n" + render(self._recorder.document, lines, width))

    def _take(self, result: Any, failure: str | None = None, unreachable: bool = False) -> None:
        if self._recorder is None:
            return
        # The public names without an underscore came with ansible-core 2.19.
        task, host, outcome = result._task, result._host.get_name(), result._result
        if task.action == ARGUMENT_CHECK and failure is None:
            return
        started_at, began = self._running.pop((host, task._uuid), (now(), time.monotonic()))
        self._recorder.task(
            host,
            operation_name(task),
            name=str(task.name or task.action),
            action=str(task.action),
            started_at=started_at,
            seconds=time.monotonic() - began,
            changed=bool(outcome.get("changed", False)),
            facts=facts(outcome),
            failure=failure,
            unreachable=unreachable,
        )

    def _write(self) -> str | None:
        """Store the document as it is now. Says once what is in the way and goes on without."""
        if self._recorder is None:
            return None
        directory = os.path.expanduser(self.get_option("directory"))
        try:
            return write(self._recorder.document, directory)
        except OSError as error:
            if not self._warned:
                self._warned = True
                self._display.warning(
                    f"Expected to write the evidence of this run to {directory}. Found: {error.strerror}. To do: make "
                    "room or give another directory in RINGMASTER_EVIDENCE_DIRECTORY. The run goes on."
                )
            return None


def now() -> str:
    return datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")


def collection_version() -> str:
    """The version from what is there: the manifest of an installed collection, or galaxy.yml of a checkout."""
    root = Path(__file__).resolve().parents[2]
    try:
        manifest = json.loads((root / "MANIFEST.json").read_text(encoding="utf-8"))
        return str(manifest["collection_info"]["version"])
    except (OSError, ValueError, KeyError, TypeError):
        pass
    try:
        found = re.search(r"^version:\s*(\S+)", (root / "galaxy.yml").read_text(encoding="utf-8"), re.MULTILINE)
    except OSError:
        return "unknown"
    return found[1] if found else "unknown"


def operation_name(task: Any) -> str | None:
    """The role that a task or a handler belongs to; roles of this collection by their short name."""
    if task._role is None:
        return None
    return str(task._role.get_name(include_role_fqcn=True)).removeprefix(COLLECTION)


def is_rescued(task: Any) -> bool:
    """Whether a block around the task catches its failure: one with a rescue, and the task is not in that rescue."""
    child, parent = task, task._parent
    while parent is not None:
        if isinstance(parent, Block) and parent.rescue and any(each._uuid == child._uuid for each in parent.block):
            return True
        child, parent = parent, parent._parent
    return False


def hidden(outcome: Mapping[str, Any]) -> bool:
    return bool(outcome.get("_ansible_no_log")) or "censored" in outcome


def single_results(outcome: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """The result itself and, of a loop, those of its items."""
    yield outcome
    items = outcome.get("results")
    if isinstance(items, list):
        yield from (item for item in items if isinstance(item, Mapping))


def facts(outcome: Mapping[str, Any]) -> dict[str, Any]:
    """Variables that a task set, none of a result that is not to be logged."""
    found: dict[str, Any] = {}
    if hidden(outcome):
        return found
    for single in single_results(outcome):
        variables = single.get("ansible_facts")
        if isinstance(variables, Mapping) and not hidden(single):
            found.update(variables)
    return found


def failure_text(outcome: Mapping[str, Any]) -> str:
    """Why a task failed, with the last line of what a command said."""
    if hidden(outcome):
        return "not shown (no_log)"
    texts: dict[str, None] = {}  # in order, each once
    for single in single_results(outcome):
        if single is not outcome and (hidden(single) or not (single.get("failed") or single.get("unreachable"))):
            continue
        said = str(single.get("stderr") or single.get("module_stderr") or "").strip().splitlines()
        for text in (str(single.get("msg") or "").strip(), said[-1] if said else ""):
            if text:
                texts.setdefault(text)
    return "\n".join(texts) or "no message"
