#!/usr/bin/python
# Copyright (c) 2026, the Ringmaster authors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

# The work is done on the controller, by the action plugin of the same name. This file is its documentation.

from __future__ import annotations

DOCUMENTATION = r"""
module: raw_sysctl
short_description: A kernel setting on a host without Python
version_added: 0.1.0
description:
  - Keeps a kernel setting, live by C(/proc/sys) and for the next boot by a line in a file of C(sysctl.d).
  - Needs no Python on the host, but C(sh) and coreutils or busybox.
  - The value is set live first. If the kernel refuses it, or makes another value of it, the file stays as it was.
  - Other files of C(sysctl.d) are not looked at; where several have the same setting, the last by name holds.
options:
  name:
    description:
      - Name of the setting, with dots or slashes. As with C(sysctl), the first of them decides, so that
        V(net.ipv4.conf.eth0/100.forwarding) is possible.
    type: str
    required: true
  value:
    description: The value, one line. Several numbers are separated by spaces. Required if O(state=present).
    type: str
  state:
    description:
      - V(absent) removes the line; the live value stays until the next boot. A file that has become empty is removed.
    type: str
    choices: [present, absent]
    default: present
  file:
    description: Absolute path of the file that keeps the setting. Other lines in it stay as they are.
    type: str
    default: /etc/sysctl.d/90-ansible.conf
  live:
    description: Whether the setting is changed at once, and not only from the next boot on.
    type: bool
    default: true
  persist:
    description: Whether the file is changed, and not only the live value.
    type: bool
    default: true
attributes:
  diff_mode:
    description: Shows the live value and the file.
    support: full
extends_documentation_fragment:
  - ringmaster.inference.attributes
  - ringmaster.inference.attributes.setter
author:
  - Ringmaster authors (@ringmaster)
"""

EXAMPLES = r"""
- name: Queue of waiting connections is long enough
  ringmaster.inference.raw_sysctl:
    name: net.core.somaxconn
    value: "4096"
    file: /etc/sysctl.d/90-example.conf
"""

RETURN = r"""
name:
  description: The setting.
  type: str
  returned: success
  sample: net.core.somaxconn
value:
  description: The live value; null where the kernel has no such setting.
  type: str
  returned: success
  sample: "4096"
"""
