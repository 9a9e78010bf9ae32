#!/usr/bin/python
# Copyright (c) 2026, the Ringmaster authors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

# The work is done on the controller, by the action plugin of the same name. This file is its documentation.

from __future__ import annotations

DOCUMENTATION = r"""
module: raw_mount
short_description: A line of fstab, and the mount, on a host without Python
version_added: 0.1.0
description:
  - Keeps a line of C(/etc/fstab) and mounts or unmounts the file system.
  - Needs no Python on the host, but C(sh) and coreutils or busybox, and C(mount) and C(umount).
  - Other lines and comments stay as they are. Lines are told apart by the mount point, those of swap by their source.
  - systemd is reloaded after a change of the file, since it makes units of it.
options:
  path:
    description: The mount point, or V(none) for swap.
    type: str
    required: true
  src:
    description: The device, or what stands for it. Required if O(state=mounted) or O(state=present), and for swap.
    type: str
  fstype:
    description: Type of the file system. Required if O(state=mounted) or O(state=present).
    type: str
  opts:
    description: Options of the mount, an item each.
    type: list
    elements: str
    default: [defaults]
  dump:
    description: Whether C(dump) saves it; see fstab(5).
    type: int
    default: 0
  passno:
    description: In which order C(fsck) checks it; see fstab(5).
    type: int
    default: 0
  state:
    description:
      - V(present) keeps the line alone. V(mounted) keeps the line and mounts the file system, with its mount point made
        where it is missing; if the line had to be changed, what is mounted is remounted. If another type of file system
        is mounted there, the task fails.
      - V(absent) unmounts it and removes the line. V(absent_from_fstab) removes the line alone.
      - V(remounted) changes nothing in the file, but mounts with O(opts) anew what has not all of them.
    type: str
    choices: [mounted, present, absent, absent_from_fstab, remounted]
    required: true
  fstab:
    description: Absolute path of the table.
    type: str
    default: /etc/fstab
attributes:
  diff_mode:
    description: Shows the table, and whether the file system is mounted.
    support: full
extends_documentation_fragment:
  - ringmaster.inference.attributes
  - ringmaster.inference.attributes.setter
author:
  - Ringmaster authors (@ringmaster)
"""

EXAMPLES = r"""
- name: Logs are kept in memory
  ringmaster.inference.raw_mount:
    path: /var/log
    src: tmpfs
    fstype: tmpfs
    opts: [rw, nosuid, nodev, noexec, size=32m, mode=0755]
    state: mounted
"""

RETURN = r"""
path:
  description: The mount point.
  type: str
  returned: success
  sample: /var/log
"""
