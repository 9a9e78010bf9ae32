#!/usr/bin/python
# Copyright (c) 2026, the Ringmaster authors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

# The work is done on the controller, by the action plugin of the same name. This file is its documentation.

from __future__ import annotations

DOCUMENTATION = r"""
module: raw_swap
short_description: Swap switched on or off on a host without Python
version_added: 0.1.0
description:
  - Switches swap on or off until the next boot. What brings it at boot (C(/etc/fstab), dphys-swapfile, rpi-swap) is
    another task's matter.
  - Needs no Python on the host, but C(sh) and coreutils or busybox, and C(swapon) and C(swapoff).
  - In a container nothing is changed, because the swap is the machine's; RV(unavailable) says so.
options:
  state:
    description: Whether swap is on.
    type: str
    choices: ["on", "off"]
    required: true
  devices:
    description:
      - Absolute paths of devices and files. Required if O(state=on). With O(state=off) and none, all.
    type: list
    elements: str
attributes:
  diff_mode:
    description: Shows which swap is on.
    support: full
extends_documentation_fragment:
  - ringmaster.inference.attributes
  - ringmaster.inference.attributes.setter
author:
  - Ringmaster authors (@ringmaster)
"""

EXAMPLES = r"""
- name: No swap is on
  ringmaster.inference.raw_swap:
    state: "off"
"""

RETURN = r"""
swaps:
  description: Devices and files with swap that is on at the end.
  type: list
  elements: str
  returned: success
  sample: [/var/swap]
unavailable:
  description: Why nothing was changed.
  type: str
  returned: in a container where something would have to be changed
  sample: this host is a container
"""
