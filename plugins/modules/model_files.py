#!/usr/bin/python
# Copyright (c) 2026, the Ringmaster authors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: model_files
short_description: Put a model's weights on a host, checked, and switch to them in one step
version_added: 0.1.0
description:
  - Brings the files of a manifest from a directory of the controller or of the host, from an HTTP mirror, or from a
    mirror of a model hub. Each file is checked against its SHA-256 while it is written.
  - A version is a directory of its own, named by names and contents of its files. It comes into service by a link that
    is replaced in one step, C(ROOT/NAME/current). Until then, and after any failure, the former version stays in
    service.
  - What was fetched is kept over a run that was killed, and the next one goes on with it. Only when the disk is full it
    is removed. Files that another version on the host has are not fetched again but get a second name.
  - While it works, the task shows how far it is.
options:
  name:
    description:
      - Name of the model on the host. Letters, digits, C(.), C(_) and C(-), 128 at most.
    type: str
    required: true
  root:
    description:
      - Directory of all models. It is made with mode 0750 if it is missing.
    type: path
    default: /srv/ringmaster/models
  state:
    description:
      - V(present) has the files of O(manifest) on the host and in service.
      - V(previous) puts the version in service that was so before.
      - V(absent) removes the model with all its versions.
      - V(read) changes nothing and tells what is there; with O(manifest), also what is not right with it.
    type: str
    choices: [present, previous, absent, read]
    default: present
  manifest:
    description:
      - The manifest itself, not its path, as JSON (see M(ringmaster.inference.model_manifest)) or as the lines of
        C(sha256sum). Required if O(state=present).
      - Absolute paths, C(..), characters that can't be seen, and files named twice are refused.
    type: str
  source:
    description:
      - Where the files come from. Required if O(state=present). It is not asked when nothing is missing.
    type: dict
    suboptions:
      kind:
        description:
          - V(controller) is a directory of the controller, V(directory) one of the host, such as a network file system,
            V(http) is a mirror with the files below O(source.url), and V(hub) one with the paths of a model hub,
            C(URL/REPOSITORY/resolve/REVISION/FILE).
        type: str
        choices: [controller, directory, http, hub]
        required: true
      path:
        description:
          - The directory, for V(controller) and V(directory).
        type: path
      url:
        description:
          - The mirror's address, for V(http) and V(hub). Without user, password and query.
        type: str
      repository:
        description:
          - For V(hub), such as C(Qwen/Qwen2-7B-Instruct).
        type: str
      revision:
        description:
          - For V(hub), a branch, tag or commit. If the hub itself tells the SHA-256 of a file and it is another than
            the manifest's, the file is refused before it is fetched.
        type: str
        default: main
      token:
        description:
          - Sent to the mirror as a bearer token, and to no other host that it redirects to.
        type: str
      proxy:
        description:
          - URL of a proxy. Without it, C(http_proxy), C(https_proxy) and C(no_proxy) of the task's environment count.
        type: str
      ca_path:
        description:
          - File of the host with the certificates by which the mirror is known. Without it, the host's own ones.
        type: path
      follow_links:
        description:
          - Whether symbolic links in a directory count as what they point to.
        type: bool
        default: false
  owner:
    description:
      - Owner of directories (0750) and files (0640). Another user than the engine's, so that the engine can't change
        them.
    type: str
    default: root
  group:
    description:
      - Group that may read them, to which the engine's user belongs.
    type: str
    default: root
  keep:
    description:
      - How many older versions stay beside the one in service, 0 or more. With 0 there is nothing to go back to.
    type: int
    default: 1
  reserve_bytes:
    description:
      - Bytes of the file system that stay free, 0 or more.
    type: int
    default: 5368709120
  verify:
    description:
      - V(quick) takes a file as unchanged if its size and modification time are those that it had when it was checked.
        V(full) reads every byte again.
    type: str
    choices: [quick, full]
    default: quick
  pickles_allowed:
    description:
      - Whether files may be Python pickles (C(*.bin), C(*.pt), C(*.pkl) and the like). Whoever loads one runs what its
        author wrote.
    type: bool
    default: false
  time_limit:
    description:
      - After how many seconds one call on the host ends with what is done, 0 for never. The task calls again until all
        is done, and shows how far it is each time.
    type: int
    default: 20
  part:
    description:
      - For the task's own use, bytes that it brought from the controller.
    type: dict
    suboptions:
      path:
        description: File with the bytes.
        type: path
        required: true
      sha256:
        description: Its SHA-256.
        type: str
        required: true
      spans:
        description: What they are, in their order.
        type: list
        elements: dict
        required: true
        suboptions:
          file:
            description: File of the manifest.
            type: str
            required: true
          offset:
            description: Where in the file they begin.
            type: int
            required: true
          length:
            description: How many bytes.
            type: int
            required: true
attributes:
  check_mode:
    description: Says what would be fetched, whether it fits on the disk, and what would come into service.
    support: full
  diff_mode:
    description: Shows the version in service before and after.
    support: full
  idempotent:
    description: A second run changes nothing and, with O(verify=quick), reads no file.
    support: full
extends_documentation_fragment:
  - ringmaster.inference.attributes
author:
  - Ringmaster authors (@ringmaster)
"""

EXAMPLES = r"""
- name: The model's weights are in place
  ringmaster.inference.model_files:
    name: qwen2-7b-instruct
    manifest: "{{ lookup('ansible.builtin.file', 'manifests/qwen2-7b-instruct.json') }}"
    source:
      kind: hub
      url: https://hub-mirror.example
      repository: Qwen/Qwen2-7B-Instruct
      revision: f2826a00ceef68f0f2b946d945ecc0477ce4450c
      token: "{{ vault_hub_token }}"
    group: ringmaster-models

- name: Every byte of the weights is as it has to be
  ringmaster.inference.model_files:
    name: qwen2-7b-instruct
    state: read
    verify: full
    manifest: "{{ lookup('ansible.builtin.file', 'manifests/qwen2-7b-instruct.json') }}"
    group: ringmaster-models
  register: weights
  failed_when: weights.differences != []

- name: The former weights are in service again
  ringmaster.inference.model_files:
    name: qwen2-7b-instruct
    state: previous
    group: ringmaster-models
"""

RETURN = r"""
path:
  description: What engines load, a link to the version in service.
  type: str
  returned: success
  sample: /srv/ringmaster/models/qwen2-7b-instruct/current
version:
  description: Version in service, null if there is none.
  type: str
  returned: success
  sample: 4f0c1a7d9be25e38
previous:
  description: Version that was in service before, null if there is none.
  type: str
  returned: success
  sample: 93be1d44a07c52ef
versions:
  description: All whole versions on the host.
  type: list
  elements: str
  returned: success
  sample: [4f0c1a7d9be25e38, 93be1d44a07c52ef]
incoming:
  description: Bytes on the host of versions that are not whole yet.
  type: dict
  returned: success
  sample: {}
files:
  description: Files of the version in service.
  type: int
  returned: success
  sample: 12
bytes:
  description: Bytes of the version in service.
  type: int
  returned: success
  sample: 15242825728
identity:
  description: Version that the manifest stands for.
  type: str
  returned: if O(manifest) is given
  sample: 4f0c1a7d9be25e38
differences:
  description:
    - What is not right with that version on the host, or was before it was mended, each with the file's name. Empty if
      it is right, or was never there.
  type: list
  elements: str
  returned: if O(manifest) is given
  sample: ["model-00002-of-00004.safetensors: SHA-256 1b2e… instead of 9f86…"]
complete:
  description: Whether the manifest's version is in service with nothing left to do.
  type: bool
  returned: if O(manifest) is given
  sample: true
total_bytes:
  description: Bytes of the manifest's files.
  type: int
  returned: if something had to be fetched
  sample: 15242825728
needed_bytes:
  description: Bytes that had to be fetched when the call began.
  type: int
  returned: if something had to be fetched
  sample: 15242825728
free_bytes:
  description: Bytes that were free on the file system when the call began.
  type: int
  returned: if something had to be fetched
  sample: 839204823040
removed:
  description: Older versions that were removed.
  type: list
  elements: str
  returned: if O(state=present)
  sample: []
wanted:
  description: For the task's own use, files that are to be brought from the controller.
  type: list
  elements: dict
  returned: if O(source.kind=controller) and something is missing
  sample: [{file: model.safetensors, offset: 0}]
"""

import grp
import pwd
from typing import Any

from ansible.module_utils.basic import AnsibleModule

from ansible_collections.ringmaster.inference.plugins.module_utils.model_manifest import Manifest, ModelError, parse
from ansible_collections.ringmaster.inference.plugins.module_utils.model_sources import (
    DirectorySource,
    HttpSource,
    HubSource,
    Source,
)
from ansible_collections.ringmaster.inference.plugins.module_utils.model_store import Part, Situation, Store

PART = {
    "type": "dict",
    "options": {
        "path": {"type": "path", "required": True},
        "sha256": {"type": "str", "required": True},
        "spans": {
            "type": "list",
            "elements": "dict",
            "required": True,
            "options": {
                "file": {"type": "str", "required": True},
                "offset": {"type": "int", "required": True},
                "length": {"type": "int", "required": True},
            },
        },
    },
}
SOURCE = {
    "type": "dict",
    "options": {
        "kind": {"type": "str", "choices": ["controller", "directory", "http", "hub"], "required": True},
        "path": {"type": "path"},
        "url": {"type": "str"},
        "repository": {"type": "str"},
        "revision": {"type": "str", "default": "main"},
        "token": {"type": "str", "no_log": True},
        "proxy": {"type": "str", "no_log": True},  # it may hold a password
        "ca_path": {"type": "path"},
        "follow_links": {"type": "bool", "default": False},
    },
    "required_if": [
        ("kind", "controller", ["path"]),
        ("kind", "directory", ["path"]),
        ("kind", "http", ["url"]),
        ("kind", "hub", ["url", "repository"]),
    ],
}


class Run:
    """One call of the module."""

    def __init__(self, module: AnsibleModule) -> None:
        self.parameters = module.params
        self.write = not module.check_mode
        self.diff = module._diff
        self.store = Store(
            self.parameters["root"],
            self.parameters["name"],
            self._number("owner"),
            self._number("group"),
            self.parameters["reserve_bytes"],
        )

    def perform(self) -> dict[str, Any]:
        """Do what O(state) asks; the result in the form of RETURN. Raises ModelError and OSError."""
        before = self.store.document()
        result = getattr(self, self.parameters["state"])()
        document = self.store.document()
        result = {**document, **result}
        if self.diff and result["changed"]:
            after = {key: result[key] for key in ("version", "previous")} if document["version"] else {}
            after.update(result.pop("after", {}))
            header = f"{self.store.base}"
            result["diff"] = {
                "before_header": header,
                "after_header": header,
                "before": {key: before[key] for key in ("version", "previous")} if before["version"] else {},
                "after": after,
            }
        result.pop("after", None)
        return result

    def read(self) -> dict[str, Any]:
        if not self.parameters["manifest"]:
            return {"changed": False}
        manifest = self._manifest()
        situation = self.store.situation(manifest, self.parameters["verify"] == "full")
        return {"changed": False, **self._told(situation)}

    def absent(self) -> dict[str, Any]:
        return {"changed": self.store.remove() if self.write else self.store.exists(), "after": {}}

    def previous(self) -> dict[str, Any]:
        version = self.store.previous()
        if version is None:
            raise ModelError(
                f"a version of {self.store.name} that was in service before",
                f"none on the host (whole versions: {', '.join(self.store.versions()) or 'none'})",
                "keep older versions, or place the wanted one by its manifest",
            )
        if not self.write:
            current = self.store.current()
            return {"changed": current != version, "version": version, "previous": current}
        with self.store.locked():
            return {"changed": self.store.activate(version)}

    def present(self) -> dict[str, Any]:
        manifest = self._manifest()
        if not self.write:
            return self._forecast(manifest)
        with self.store.locked():
            if self.parameters["part"]:
                self.store.append(manifest, self._part(manifest))
            situation = self.store.situation(manifest, self.parameters["verify"] == "full")
            changed = False
            if situation.version is None:
                changed = True
                told = self._fetch(situation, manifest)
                if not told["complete"]:
                    return told
                situation.version = self.store.place(manifest)
            else:
                if situation.differences:
                    changed = True
                    self.store.mend_attributes(situation.version)
                self.store.note_unchanged(situation.version, manifest)
                told = self._told(situation)
            changed = self.store.activate(situation.version) or changed
            removed = self.store.prune(self.parameters["keep"])
            return {**told, "changed": changed or bool(removed), "complete": True, "removed": removed}

    def _forecast(self, manifest: Manifest) -> dict[str, Any]:
        situation = self.store.situation(manifest, self.parameters["verify"] == "full")
        told = self._told(situation)
        current = self.store.current()
        if situation.version is None:
            self.store.demand(situation, manifest, self._source())
            self.store.check_room(situation)
            told.update(self._sizes(situation), complete=False)
        if situation.version is not None and situation.version == current:
            removed = self.store.outdated(self.parameters["keep"])
            return {**told, "changed": bool(situation.differences or removed), "removed": removed}
        version = situation.version or manifest.identity
        after: dict[str, Any] = {"version": version, "previous": current}
        if situation.version is None:
            after["to_fetch_bytes"] = situation.needed_bytes
        return {**told, "changed": True, "complete": False, "removed": [], "after": after}

    def _fetch(self, situation: Situation, manifest: Manifest) -> dict[str, Any]:
        self.store.distrust(situation, manifest)
        source = self._source()
        self.store.demand(situation, manifest, source)
        self.store.check_room(situation)
        told = {**self._told(situation), **self._sizes(situation), "changed": True}
        if source is None:
            wanted = self.store.wanted(manifest)
            told["wanted"] = [{"file": path, "offset": offset} for path, offset in wanted]
            told["complete"] = not wanted
        else:
            told["complete"] = self.store.fetch(manifest, source, self.parameters["time_limit"])
        return told

    def _told(self, situation: Situation) -> dict[str, Any]:
        return {
            "identity": situation.identity,
            "differences": [str(each) for each in situation.differences],
            "complete": situation.version is not None
            and situation.version == self.store.current()
            and not situation.differences,
        }

    @staticmethod
    def _sizes(situation: Situation) -> dict[str, int]:
        return {
            "total_bytes": situation.total_bytes,
            "needed_bytes": situation.needed_bytes,
            "free_bytes": situation.free_bytes,
        }

    def _manifest(self) -> Manifest:
        return parse(self.parameters["manifest"] or "", self.parameters["pickles_allowed"])

    def _source(self) -> Source | None:
        """None if the bytes are brought from the controller."""
        source = self.parameters["source"]
        if source is None:  # given, but as null
            raise ModelError("a source", "null", "say where the files come from")
        if source["kind"] == "controller":
            return None
        if source["kind"] == "directory":
            return DirectorySource(source["path"], source["follow_links"])
        options: dict[str, Any] = {name: source[name] or "" for name in ("token", "ca_path", "proxy")}
        if source["kind"] == "http":
            return HttpSource(source["url"], **options)
        return HubSource(source["url"], source["repository"], source["revision"], **options)

    def _part(self, manifest: Manifest) -> Part:
        part = self.parameters["part"]
        sizes = {file.path: file.size for file in manifest.files}
        spans = [(span["file"], span["offset"], span["length"]) for span in part["spans"]]
        for path, offset, length in spans:
            size = sizes.get(path)
            if size is None or offset < 0 or length < 0 or offset + length > size:
                raise ModelError("parts of files whose sizes the manifest gives", repr(path), "run again")
        return Part(part["path"], part["sha256"], spans)

    def _number(self, option: str) -> int:
        name = self.parameters[option]
        try:
            return pwd.getpwnam(name).pw_uid if option == "owner" else grp.getgrnam(name).gr_gid
        except KeyError:
            # In check mode it may be one that an earlier task would make; nothing on the host belongs to it then.
            if not self.write or self.parameters["state"] in ("read", "absent"):
                return -1
            raise ModelError(f"{option} {name!r} on the host", "none", "make it first") from None


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "name": {"type": "str", "required": True},
            "root": {"type": "path", "default": "/srv/ringmaster/models"},
            "state": {"type": "str", "choices": ["present", "previous", "absent", "read"], "default": "present"},
            "manifest": {"type": "str"},
            "source": SOURCE,
            "owner": {"type": "str", "default": "root"},
            "group": {"type": "str", "default": "root"},
            "keep": {"type": "int", "default": 1},
            "reserve_bytes": {"type": "int", "default": 5 << 30},
            "verify": {"type": "str", "choices": ["quick", "full"], "default": "quick"},
            "pickles_allowed": {"type": "bool", "default": False},
            "time_limit": {"type": "int", "default": 20},
            "part": PART,
        },
        required_if=[("state", "present", ["manifest", "source"])],
        supports_check_mode=True,
    )
    for option in ("keep", "reserve_bytes", "time_limit"):
        if module.params[option] < 0:
            module.fail_json(msg=f"Expected {option} of 0 or more. Found {module.params[option]}. To do: raise it.")
    try:
        module.exit_json(**Run(module).perform())
    except ModelError as error:
        module.fail_json(msg=str(error))
    except OSError as error:
        module.fail_json(
            msg=f"Expected to read and write below {module.params['root']}. Found {error}. To do: mend that and run "
            "again; what was in service stays so."
        )


if __name__ == "__main__":
    main()
