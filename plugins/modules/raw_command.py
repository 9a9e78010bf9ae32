#!/usr/bin/python
# Copyright (c) 2026, the Ringmaster authors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

# The work is done on the controller, by the action plugin of the same name. This file is its documentation.

from __future__ import annotations

DOCUMENTATION = r"""
module: raw_command
short_description: A command on a host without Python
version_added: 0.1.0
description:
  - Runs a command that is given as a list of words, as M(ansible.builtin.command) does.
  - Needs no Python on the host, but C(sh) and coreutils or busybox.
  - No word is read by a shell, whatever is in it. The command has no standard input.
options:
  argv:
    description: The command and its arguments.
    type: list
    elements: str
    required: true
attributes:
  check_mode:
    description: Is skipped in check mode. A command that only reads is run with C(check_mode=false) at the task.
    support: partial
  diff_mode:
    description: Has nothing to show.
    support: none
  idempotent:
    description: Runs the command each time. Use C(changed_when).
    support: none
extends_documentation_fragment:
  - ringmaster.inference.attributes
author:
  - Ringmaster authors (@ringmaster)
"""

EXAMPLES = r"""
- name: State of the unit is read
  ringmaster.inference.raw_command:
    argv: [systemctl, show, --property=ActiveState, example.service]
  register: example_state
  changed_when: false
  check_mode: false
"""

RETURN = r"""
cmd:
  description: The command.
  type: list
  elements: str
  returned: always
  sample: [systemctl, is-active, example.service]
rc:
  description: Status of the command. The task fails if it is not 0.
  type: int
  returned: unless skipped
  sample: 0
stdout:
  description: Output, without the line ends at its end.
  type: str
  returned: unless skipped
  sample: active
stderr:
  description: Errors, without the line ends at their end.
  type: str
  returned: unless skipped
  sample: ""
stdout_lines:
  description: The output in lines.
  type: list
  elements: str
  returned: unless skipped
  sample: [active]
stderr_lines:
  description: The errors in lines.
  type: list
  elements: str
  returned: unless skipped
  sample: []
"""
