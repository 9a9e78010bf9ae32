#!/usr/bin/python
# Copyright (c) 2026, the Ringmaster authors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

# The work is done on the controller, by the action plugin of the same name. This file is its documentation.

from __future__ import annotations

DOCUMENTATION = r"""
module: raw_info
short_description: What a host without Python is
version_added: 0.1.0
description:
  - Reads what M(ansible.builtin.setup) can't on a host without Python, and looks at files as M(ansible.builtin.stat)
    does.
  - Needs no Python on the host, but C(sh) and coreutils or busybox.
  - Tells whether there is a Python interpreter. They are looked for in the folders of the system and of its users, by
    their names.
options:
  paths:
    description: Absolute paths to look at.
    type: list
    elements: str
    default: []
extends_documentation_fragment:
  - ringmaster.inference.attributes
  - ringmaster.inference.attributes.reader
author:
  - Ringmaster authors (@ringmaster)
"""

EXAMPLES = r"""
- name: Host is looked at
  ringmaster.inference.raw_info:
    paths: [/etc/example.conf]
  register: example

- name: No Python is installed
  ansible.builtin.assert:
    that: example.host.python == []
"""

RETURN = r"""
host:
  description:
    - The host. What can't be known is null, and RV(host.unknown) says why.
  type: dict
  returned: success
  contains:
    distribution:
      description: C(ID) of os-release(5).
      type: str
      sample: debian
    version:
      description: C(VERSION_ID) of os-release(5).
      type: str
      sample: "13"
    codename:
      description: C(VERSION_CODENAME) of os-release(5).
      type: str
      sample: trixie
    family:
      description: V(Debian) or V(RedHat), as in C(ansible_facts['os_family']); null for others.
      type: str
      sample: Debian
    architecture:
      description: Of the kernel, as C(uname -m) has it.
      type: str
      sample: aarch64
    kernel:
      description: Release of the kernel.
      type: str
      sample: 6.12.47+rpt-rpi-v8
    node:
      description: Name of the host, as it has it itself.
      type: str
      sample: pi1
    root:
      description: Whether the task runs as root.
      type: bool
    systemd:
      description: Whether systemd is the first process.
      type: bool
    container:
      description: Kind of the container; empty for none.
      type: str
      sample: ""
    memory_total_bytes:
      description: Memory, in bytes.
      type: int
      sample: 4147822592
    memory_available_bytes:
      description: Memory that programs could get without swapping, in bytes.
      type: int
      sample: 3821453312
    swap_total_bytes:
      description: All swap that is on, in bytes.
      type: int
      sample: 0
    swaps:
      description: Swap that is on.
      type: list
      elements: dict
      sample: [{path: /var/swap, type: file, size_bytes: 536870912}]
    swap_tool:
      description:
        - What manages swap on a Raspberry Pi. V(rpi-swap) if C(/etc/rpi/swap.conf) is there, V(dphys-swapfile) if
          C(/etc/dphys-swapfile) is, else V(none).
      type: str
      sample: dphys-swapfile
    python:
      description: Interpreters of Python, links followed. Empty if there is none.
      type: list
      elements: str
      sample: []
    watchdogs:
      description: Devices of watchdogs.
      type: list
      elements: str
      sample: [/dev/watchdog, /dev/watchdog0]
    tools:
      description: Where C(systemctl), C(apt-get), C(dnf), C(logrotate) and C(swapoff) are, as far as they are there.
      type: dict
      sample: {systemctl: /usr/bin/systemctl}
    fstab:
      description: Lines of C(/etc/fstab), with C(source), C(path), C(type), C(options), C(dump) and C(passno).
      type: list
      elements: dict
    mounts:
      description: What is mounted, in the same form.
      type: list
      elements: dict
    unknown:
      description: Why a value is null, by its name.
      type: dict
      sample: {}
paths:
  description:
    - Each of O(paths), with C(state) (V(file), V(directory), V(link), V(special) or V(absent)), C(owner), C(group), and
      C(mode), C(sha256) and C(size_bytes) or C(target) where there are such.
  type: dict
  returned: success
  sample:
    /etc/example.conf: {state: absent}
"""
