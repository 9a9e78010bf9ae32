# Copyright (c) 2026, the Ringmaster authors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

import hashlib
import shlex
from dataclasses import replace
from typing import Any, ClassVar

from ansible.errors import AnsibleError

from ansible_collections.ringmaster.inference.plugins.plugin_utils import raw_files as files
from ansible_collections.ringmaster.inference.plugins.plugin_utils.raw_action import Host, RawAction, difference
from ansible_collections.ringmaster.inference.plugins.plugin_utils.raw_shell import RawError, shown


class ActionModule(RawAction):
    """A file of a host without Python; see the module's documentation."""

    arguments: ClassVar[dict[str, Any]] = {
        "path": {"type": "str", "required": True},
        "state": {"type": "str", "choices": ["present", "absent"], "default": "present"},
        "content": {"type": "raw", "no_log": True},
        "src": {"type": "str"},
        "validate": {"type": "str"},
        **files.ATTRIBUTE_ARGUMENTS,
    }
    rules: ClassVar[dict[str, Any]] = {"mutually_exclusive": [("content", "src")]}

    def perform(self, host: Host, options: dict[str, Any]) -> dict[str, Any]:
        path = files.checked_path(options["path"])
        wanted = files.attributes(options)
        if options["state"] == "absent":
            return self._removed(host, path)
        validate = _validation(options["validate"])
        source = _Source(self, options)
        found = files.look(host, path, files.LARGEST_DIFF if self.diff_mode and source.given else 0)
        if found.kind not in ("file", "absent"):
            raise files.not_a_file(found)
        if not source.given and found.kind == "absent" and not self.check_mode:
            raise RawError(f"a file at {shown(path)}, or content or src", "nothing", "say what is to be in it")
        if found.missing_parents and not self.check_mode:
            parent = found.missing_parents[0]
            raise RawError(f"the directory {shown(parent)}", "none", "make it first (raw_directory)")
        rewritten = source.given and source.sha256 != found.sha256
        after = wanted.applied_to(replace(found, kind="file", mode=found.mode if found.kind == "file" else 0o600))
        lacking = wanted.missing_in(found)
        changed = rewritten or found.kind == "absent" or any(lacking.words())
        if changed and not self.check_mode:
            if rewritten:
                files.write(host, found, source.sent(host), source.sha256, wanted, validate)
            else:
                files.set_attributes(host, path, lacking)
        result: dict[str, Any] = {"changed": changed, "path": shown(path)}
        if source.given:
            result["checksum"] = source.sha256
        if self.diff_mode and changed:
            result["diff"] = []
            if found.summary() != after.summary():
                result["diff"].append(difference(path, found.summary(), after.summary()))
            if rewritten:
                after = replace(after, sha256=source.sha256)
                result["diff"].append(files.content_diff(found, source.for_diff(), after))
        return result

    def _removed(self, host: Host, path: str) -> dict[str, Any]:
        found = files.look(host, path)
        if found.kind == "directory":
            raise RawError(f"a file or nothing at {shown(path)}", "a directory", "use raw_directory to remove it")
        changed = found.kind != "absent"
        if changed and not self.check_mode:
            files.remove_file(host, path)
        result: dict[str, Any] = {"changed": changed, "path": shown(path)}
        if self.diff_mode and changed:
            result["diff"] = difference(path, found.summary(), {"state": "absent"})
        return result


class _Source:
    """The content that is wanted, from the task or from a file of the controller. It may be none."""

    def __init__(self, action: RawAction, options: dict[str, Any]) -> None:
        self.content: bytes | None = None
        self.file = ""
        self.sha256 = ""
        if options["content"] is not None:
            if not isinstance(options["content"], str):
                raise RawError("content to be text", "something else", "use a filter like to_json")
            self.content = options["content"].encode("utf-8", "surrogateescape")
            self.sha256 = hashlib.sha256(self.content).hexdigest()
        elif options["src"] is not None:
            try:
                # Decrypts what ansible-vault has encrypted.
                self.file = action._loader.get_real_file(action._find_needle("files", options["src"]))
                digest = hashlib.sha256()
                with open(self.file, "rb") as opened:
                    while chunk := opened.read(1 << 20):
                        digest.update(chunk)
            except (AnsibleError, OSError) as error:
                raise RawError(
                    f"src to be a readable file on the controller ({options['src']})", str(error), "correct src"
                ) from None
            self.sha256 = digest.hexdigest()

    @property
    def given(self) -> bool:
        """Whether the task says what is to be in the file."""
        return bool(self.sha256)

    def sent(self, host: Host) -> str:
        """Bring it to the host; gives its path there."""
        return host.send(self.content) if self.content is not None else host.send_file(self.file)

    def for_diff(self) -> bytes:
        """The content, up to one byte more than a diff shows."""
        if self.content is not None:
            return self.content
        with open(self.file, "rb") as opened:
            return opened.read(files.LARGEST_DIFF + 1)


def _validation(command: str | None) -> list[str]:
    if command is None:
        return []
    try:
        words = shlex.split(command)
    except ValueError as error:
        raise RawError("validate to be a command", f"{command!r} ({error})", "correct its quotation marks") from None
    if not any("%s" in word for word in words):
        raise RawError("validate to name the new file", repr(command), "put %s where its path belongs")
    return words
