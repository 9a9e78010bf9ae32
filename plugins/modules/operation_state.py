#!/usr/bin/python
# Copyright (c) 2026, the Ringmaster authors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: operation_state
short_description: Keep what a host looked like before an operation's first apply, and bring it back
version_added: 0.1.0
description:
  - Before an operation changes a host for the first time, keeps on that host what was measured and the files that the
    operation is going to own. Later, puts exactly that back.
  - A path is noted as a V(file) (content, owner, group, mode, SELinux label, capabilities, access control list), a
    V(directory) (the same without what is in it), a V(link) (target, owner, group) or V(absent).
  - Restoring a path that was V(absent) removes what is there now, a directory with all it holds. A directory that
    several operations share must therefore not be listed. Parent directories that were missing as well are removed if
    they have become empty.
  - The record is replaced in one step. A run that is killed or a disk that fills up leaves the record from before.
  - Modification times are not kept.
options:
  name:
    description:
      - Name of the operation, which is the role's name. A small letter, then small letters, digits and underscores.
    type: str
    required: true
  state:
    description:
      - V(recorded) keeps O(measured) and the present state of O(files), if nothing is recorded yet. An existing record
        stays as it is, except that paths it does not know are added. A new path beneath one that was absent at first
        is noted as absent.
      - V(restored) puts every recorded path back. Without a record nothing is changed. The record stays, so that a
        rollback that was interrupted can be run again.
      - V(read) only returns the record, and what other operations measured on the host. It fails if a record of one of
        them is damaged.
      - V(absent) forgets the record, a damaged one too. It is the last step of a rollback.
    type: str
    choices: [recorded, restored, read, absent]
    required: true
  measured:
    description:
      - What the operation measured on the host. Must not hold secrets.
      - Required if O(state=recorded).
    type: dict
  files:
    description:
      - Absolute paths that the operation is going to own.
    type: list
    elements: path
    default: []
  directory:
    description:
      - Absolute path of the directory that holds the records of all operations. It is made with mode 0700 if it is
        missing.
    type: path
    default: /var/lib/ringmaster/operations
attributes:
  diff_mode:
    description:
      - Shows what is recorded or put back. The content of a file that not every user of the host can read is never
        shown.
    support: full
extends_documentation_fragment:
  - ringmaster.inference.attributes
  - ringmaster.inference.attributes.setter
author:
  - Ringmaster authors (@ringmaster)
"""

EXAMPLES = r"""
- name: State before the first apply is recorded
  ringmaster.inference.operation_state:
    name: edge
    state: recorded
    measured: "{{ edge_measured }}"
    files:
      - /etc/haproxy/haproxy.cfg
      - /etc/haproxy/ringmaster

- name: What was there before is known
  ringmaster.inference.operation_state:
    name: edge
    state: read
  register: edge_before

- name: Files are as they were before the first apply
  ringmaster.inference.operation_state:
    name: edge
    state: restored
  register: edge_before

- name: HAProxy is not installed, as before
  ansible.builtin.package:
    name: haproxy
    state: absent
  when:
    - edge_before.recorded
    - edge_before.measured.version == "absent"

- name: Record of the operation is removed
  ringmaster.inference.operation_state:
    name: edge
    state: absent
"""

RETURN = r"""
recorded:
  description: Whether there is a record now. In check mode, whether there would be one.
  type: bool
  returned: success
  sample: true
recorded_at:
  description: When it was first recorded, UTC.
  type: str
  returned: if there is a record
  sample: "2026-03-01T12:00:00Z"
measured:
  description: What was measured before the first apply. Empty if there is no record.
  type: dict
  returned: success
  sample: {version: absent, service: absent}
files:
  description:
    - Each path as it was before the first apply. Empty if there is no record.
    - C(kind) is V(file), V(directory), V(link) or V(absent). C(owner) and C(group) are numbers. C(size) is in bytes.
  type: dict
  returned: success
  sample:
    /etc/haproxy/haproxy.cfg: {kind: file, owner: 0, group: 0, mode: "0644", size: 1287}
    /etc/haproxy/ringmaster: {kind: absent}
others:
  description:
    - What each other operation with a record in O(directory) measured before its first apply, by the operation's name.
    - A rollback leaves what another operation measured too, such as a package, because that one may rely on it.
  type: dict
  returned: if O(state=read)
  sample:
    scheduler: {python3-aiohttp: absent, user: absent}
paths:
  description: Paths that were added to the record, put back or removed.
  type: list
  elements: str
  returned: success
  sample: [/etc/haproxy/haproxy.cfg]
"""

from typing import Any

from ansible.module_utils.basic import AnsibleModule

from ansible_collections.ringmaster.inference.plugins.module_utils.operation_state import (
    DEFAULT_DIRECTORY,
    OperationState,
    OperationStateError,
    Outcome,
)


def perform(module: AnsibleModule) -> dict[str, Any]:
    """Do what O(state) asks and return the result in the form of RETURN."""
    parameters = module.params
    operation = OperationState(parameters["name"], parameters["directory"])
    write = not module.check_mode
    if parameters["state"] == "recorded":
        outcome = operation.record(parameters["measured"], parameters["files"], write=write)
    elif parameters["state"] == "restored":
        outcome = operation.restore(write=write, contents_in_diff=module._diff)
    elif parameters["state"] == "absent":
        outcome = operation.remove(write=write)
    else:
        outcome = Outcome(False, operation.load())
    result: dict[str, Any] = {
        "changed": outcome.changed,
        "recorded": outcome.record is not None,
        "measured": {},
        "files": {},
        "paths": outcome.paths,
    }
    if parameters["state"] == "read":
        result["others"] = operation.others()
    if outcome.record:
        result["recorded_at"] = outcome.record.recorded_at
        result["measured"] = outcome.record.measured
        result["files"] = {path: entry.summary() for path, entry in outcome.record.files.items()}
    if module._diff and outcome.diff:
        result["diff"] = outcome.diff
    return result


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "name": {"type": "str", "required": True},
            "state": {"type": "str", "choices": ["recorded", "restored", "read", "absent"], "required": True},
            "measured": {"type": "dict"},
            "files": {"type": "list", "elements": "path", "default": []},
            "directory": {"type": "path", "default": DEFAULT_DIRECTORY},
        },
        required_if=[("state", "recorded", ["measured"])],
        supports_check_mode=True,
    )
    try:
        module.exit_json(**perform(module))
    except OperationStateError as error:
        module.fail_json(msg=str(error))


if __name__ == "__main__":
    main()
