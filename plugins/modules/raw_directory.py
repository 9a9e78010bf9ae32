#!/usr/bin/python
# Copyright (c) 2026, the Ringmaster authors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

# The work is done on the controller, by the action plugin of the same name. This file is its documentation.

from __future__ import annotations

DOCUMENTATION = r"""
module: raw_directory
short_description: A directory on a host without Python
version_added: 0.1.0
description:
  - Keeps a directory with its mode and owner, or removes it with all it holds.
  - Needs no Python on the host, but C(sh) and coreutils or busybox.
  - A directory in which a file system is mounted is not removed. A symbolic link to a directory is refused.
options:
  path:
    description: Absolute path of the directory on the host.
    type: str
    required: true
  state:
    description:
      - V(present) makes the directory, and missing parents with mode 0755. V(absent) removes it with all it holds.
    type: str
    choices: [present, absent]
    default: present
  mode:
    description:
      - Permission bits as three or four octal digits in quotation marks, like V('0644'). A number is refused, because
        YAML reads V(0644) and V(644) as other modes than they look like.
      - Without it, an existing directory keeps its mode, and a new one gets V(0755).
    type: raw
  owner:
    description:
      - Name or number of the owner. Without it, the owner stays as it is.
    type: str
  group:
    description:
      - Name or number of the group. Without it, the group stays as it is.
    type: str
attributes:
  diff_mode:
    description: Shows mode and owner.
    support: full
extends_documentation_fragment:
  - ringmaster.inference.attributes
  - ringmaster.inference.attributes.setter
author:
  - Ringmaster authors (@ringmaster)
"""

EXAMPLES = r"""
- name: Folder of the configuration exists
  ringmaster.inference.raw_directory:
    path: /etc/example
    owner: root
    group: root
    mode: "0755"
"""

RETURN = r"""
path:
  description: The path, normalised.
  type: str
  returned: success
  sample: /etc/example
"""
