#!/usr/bin/python
# Copyright (c) 2026, the Ringmaster authors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

# The work is done on the controller, by the action plugin of the same name. This file is its documentation.

from __future__ import annotations

DOCUMENTATION = r"""
module: raw_apt
short_description: Packages on a Debian host without Python
version_added: 0.1.0
description:
  - Installs or removes packages on Debian, Raspberry Pi OS and others with C(apt-get).
  - Needs no Python on the host, but C(sh) and coreutils or busybox.
  - No question is asked; where a configuration file was changed by hand, it stays. What has begun goes on when the
    connection is lost.
options:
  name:
    description: Packages, each as V(NAME), V(NAME:ARCHITECTURE) or V(NAME=VERSION).
    type: list
    elements: str
    default: []
  state:
    description:
      - V(present) installs what is missing, or has another version than is said. Nothing else is upgraded but what
        those packages need. V(absent) removes.
    type: str
    choices: [present, absent]
    default: present
  update_cache:
    description: Refresh the lists of packages first. This alone is not a change.
    type: bool
    default: false
  cache_valid_time:
    description: Lists that are younger, in seconds, are not refreshed.
    type: int
    default: 0
  install_recommends:
    description: Whether recommended packages are installed, too.
    type: bool
    default: false
  purge:
    description: Whether the configuration of a removed package goes, too.
    type: bool
    default: false
  lock_timeout:
    description: How long another package manager is waited for, in seconds.
    type: int
    default: 300
attributes:
  diff_mode:
    description: Shows the versions of the packages that are named.
    support: full
extends_documentation_fragment:
  - ringmaster.inference.attributes
  - ringmaster.inference.attributes.setter
author:
  - Ringmaster authors (@ringmaster)
"""

EXAMPLES = r"""
- name: Certificates are installed
  ringmaster.inference.raw_apt:
    name: [ca-certificates]
    update_cache: true
    cache_valid_time: 3600
"""

RETURN = r"""
packages:
  description: Packages that were installed or removed.
  type: list
  elements: str
  returned: success
  sample: [ca-certificates]
cache_updated:
  description: Whether the lists were refreshed, or would be.
  type: bool
  returned: success
  sample: false
"""
