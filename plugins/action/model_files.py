# Copyright (c) 2026, the Ringmaster authors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Calls module model_files on the host until all is done, shows how far it is, and brings what lies on the controller.

A call on the host ends after some seconds, so that a run that is killed leaves nothing at work there, a connection is
never idle for long, and nothing has to be polled. The next call goes on where the one before was.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from ansible import constants
from ansible.errors import AnsibleActionFail
from ansible.module_utils.parsing.convert_bool import boolean
from ansible.plugins.action import ActionBase
from ansible.utils.display import Display

from ansible_collections.ringmaster.inference.plugins.module_utils.model_manifest import (
    CHUNK,
    Manifest,
    ModelError,
    checked,
    open_file,
    parse,
)
from ansible_collections.ringmaster.inference.plugins.module_utils.model_store import format_bytes

MODULE = "ringmaster.inference.model_files"
# Bytes brought to the host at a time: they lie in the temporary directories of both sides, and a run that is killed
# loses no more than them. Fewer would spend more time on calls than on bytes.
PART_BYTES = 128 << 20

display = Display()


@dataclass
class Span:
    """Bytes of one file that go into a part."""

    file: str
    offset: int
    length: int


class ActionModule(ActionBase):  # type: ignore[misc] # ansible carries no types
    """Leads the placing of a model from the controller; see the module's documentation."""

    _supports_check_mode = True
    _supports_async = False
    TRANSFERS_FILES = True

    def run(self, tmp: str | None = None, task_vars: dict[str, Any] | None = None) -> dict[str, Any]:
        result: dict[str, Any] = super().run(tmp, task_vars)
        variables = task_vars or {}
        arguments = dict(self._task.args)
        if "part" in arguments:
            raise AnsibleActionFail("Expected no part, which is for this task's own use. Found one. To do: remove it.")
        try:
            if self._from_controller(arguments):
                arguments["manifest"] = self._with_sizes(arguments).text()
            result.update(self._lead(arguments, variables))
        except ModelError as error:
            result.update(failed=True, msg=str(error))
        return result

    @staticmethod
    def _from_controller(arguments: dict[str, Any]) -> bool:
        source = arguments.get("source")
        state = arguments.get("state", "present")
        return state == "present" and isinstance(source, dict) and source.get("kind") == "controller"

    def _lead(self, arguments: dict[str, Any], variables: dict[str, Any]) -> dict[str, Any]:
        name = arguments.get("name")
        host = variables.get("inventory_hostname", "")
        begin = time.monotonic()
        first: dict[str, Any] = {}
        changed = False
        while True:
            answer: dict[str, Any] = self._execute_module(
                module_name=MODULE, module_args=arguments, task_vars=variables
            )
            changed = changed or bool(answer.get("changed"))
            arguments.pop("part", None)
            if not first:
                first = answer
                arguments["verify"] = "quick"  # every byte was read once, and what was wrong is on record
            unfinished = answer.get("complete") is False and "needed_bytes" in answer and not self._task.check_mode
            if answer.get("failed") or not unfinished:
                return self._summed(answer, first, changed)
            self._show(host, name, first, answer, begin)
            if answer.get("wanted"):
                spans = self._next_spans(self._with_sizes(arguments), answer["wanted"])
                arguments["part"] = self._bring(arguments, spans)

    @staticmethod
    def _summed(last: dict[str, Any], first: dict[str, Any], changed: bool) -> dict[str, Any]:
        """The last answer, with what only the first one could tell."""
        result = {**last, "changed": changed}
        for field in ("total_bytes", "needed_bytes", "free_bytes", "differences"):
            if field in first:
                result[field] = first[field]
        if last is not first and isinstance(last.get("diff"), dict) and isinstance(first.get("diff"), dict):
            result["diff"] = {**last["diff"], "before": first["diff"]["before"]}
        result.pop("wanted", None)
        return result

    @staticmethod
    def _show(host: str, name: Any, first: dict[str, Any], answer: dict[str, Any], begin: float) -> None:
        # What an answer says is how it was when its call began.
        fetched = first["needed_bytes"] - answer["needed_bytes"]
        done = answer["total_bytes"] - answer["needed_bytes"]
        text = f"  [{host}] {name}: {format_bytes(done)} of {format_bytes(answer['total_bytes'])}"
        if fetched > 0:
            rate = fetched / max(time.monotonic() - begin, 1e-3)
            text += f", {format_bytes(round(rate))}/s, {answer['needed_bytes'] / rate:.0f} s left"
        display.display(text)

    # From the controller

    def _with_sizes(self, arguments: dict[str, Any]) -> Manifest:
        """The manifest with the size of every file, by which the host knows when one is whole."""
        allowed = boolean(arguments.get("pickles_allowed", False))
        manifest = parse(str(arguments.get("manifest") or ""), allowed)
        if manifest.size is not None:
            return manifest
        files = []
        for file in manifest.files:
            if file.size is None:
                with self._opened(arguments, file.path) as opened:
                    file = replace(file, size=os.fstat(opened.fileno()).st_size)
            files.append(file)
        return checked(files, allowed)

    @staticmethod
    def _opened(arguments: dict[str, Any], path: str) -> Any:
        source = arguments["source"]
        directory = os.path.abspath(os.path.expanduser(str(source.get("path") or "")))
        return open_file(directory, path, boolean(source.get("follow_links", False)))

    @staticmethod
    def _next_spans(manifest: Manifest, wanted: list[dict[str, Any]]) -> list[Span]:
        """The next bytes that are missing, as many as go into one part, of one file or of many."""
        sizes = {file.path: file.size or 0 for file in manifest.files}
        room = PART_BYTES
        spans = []
        for entry in wanted:
            length = min(sizes[entry["file"]] - entry["offset"], room)
            spans.append(Span(entry["file"], entry["offset"], length))
            room -= length
            if room <= 0:
                break
        return spans

    def _bring(self, arguments: dict[str, Any], spans: list[Span]) -> dict[str, Any]:
        digest = hashlib.sha256()
        descriptor, local = tempfile.mkstemp(dir=constants.DEFAULT_LOCAL_TMP)
        try:
            with open(descriptor, "wb") as part:
                for span in spans:
                    for chunk in self._bytes(arguments, span):
                        digest.update(chunk)
                        part.write(chunk)
            remote = self._remote_part()
            self._transfer_file(local, remote)
            self._fixup_perms2((self._connection._shell.tmpdir, remote))
        finally:
            os.unlink(local)
        return {"path": remote, "sha256": digest.hexdigest(), "spans": [vars(span) for span in spans]}

    def _remote_part(self) -> str:
        # The same file for each part, in the task's directory on the host, which Ansible removes.
        if self._connection._shell.tmpdir is None:
            self._make_tmp_path()
        path: str = self._connection._shell.join_path(self._connection._shell.tmpdir, "part")
        return path

    def _bytes(self, arguments: dict[str, Any], span: Span) -> Iterator[bytes]:
        with self._opened(arguments, span.file) as opened:
            opened.seek(span.offset)
            left = span.length
            while left:
                chunk = opened.read(min(CHUNK, left))
                if not chunk:
                    raise ModelError(
                        f"{span.file} on the controller with the size of the manifest",
                        "a shorter file",
                        "see that source and manifest belong together",
                    )
                left -= len(chunk)
                yield chunk
