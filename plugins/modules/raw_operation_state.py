#!/usr/bin/python
# Copyright (c) 2026, the Ringmaster authors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

# The work is done on the controller, by the action plugin of the same name. This file is its documentation.

from __future__ import annotations

DOCUMENTATION = r"""
module: raw_operation_state
short_description: Keep what a host without Python looked like before an operation's first apply, and bring it back
version_added: 0.1.0
description:
  - Does what M(ringmaster.inference.operation_state) does, with the same options and results, and keeps the same files
    on the host.
  - Needs no Python on the host, but C(sh) and coreutils or busybox.
  - Extended attributes (SELinux label, capabilities, access control list) are not kept.
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
    elements: str
    default: []
  directory:
    description:
      - Absolute path of the directory that holds the records of all operations. It is made with mode 0700 if it is
        missing.
    type: str
    default: /var/lib/ringmaster/operations
attributes:
  diff_mode:
    description: Shows what is recorded or put back, but no content of a file.
    support: full
extends_documentation_fragment:
  - ringmaster.inference.attributes
  - ringmaster.inference.attributes.setter
author:
  - Ringmaster authors (@ringmaster)
"""

EXAMPLES = r"""
- name: State before the first apply is recorded
  ringmaster.inference.raw_operation_state:
    name: preprocessor
    state: recorded
    measured: "{{ preprocessor_measured }}"
    files: [/etc/ringmaster/preprocessor.json]

- name: Files are as they were before the first apply
  ringmaster.inference.raw_operation_state:
    name: preprocessor
    state: restored
"""

RETURN = r"""
recorded:
  description: Whether there is a record now. In check mode, whether there would be one.
  type: bool
  returned: success
  sample: true
recorded_at:
  description: When it was first recorded, UTC, by the controller's clock.
  type: str
  returned: if there is a record
  sample: "2026-03-01T12:00:00Z"
measured:
  description: What was measured before the first apply. Empty if there is no record.
  type: dict
  returned: success
  sample: {service: absent}
files:
  description:
    - Each path as it was before the first apply. Empty if there is no record.
    - C(kind) is V(file), V(directory), V(link) or V(absent). C(owner) and C(group) are numbers. C(size) is in bytes.
  type: dict
  returned: success
  sample:
    /etc/ringmaster/preprocessor.json: {kind: absent}
others:
  description:
    - What each other operation with a record in O(directory) measured before its first apply, by the operation's name.
  type: dict
  returned: if O(state=read)
  sample: {}
paths:
  description: Paths that were added to the record, put back or removed.
  type: list
  elements: str
  returned: success
  sample: [/etc/ringmaster/preprocessor.json]
"""
