#!/usr/bin/python
# Copyright (c) 2026, the Ringmaster authors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

# The work is done on the controller, by the action plugin of the same name. This file is its documentation.

from __future__ import annotations

DOCUMENTATION = r"""
module: site_preflight
short_description: Check the inventory before any host is touched
version_added: 0.1.0
description:
  - Reads the groups and variables of all hosts in the inventory, also of those outside C(--limit), and fails once with
    everything that is wrong. Each problem names the hosts, the variable, what was expected, what was found and the fix.
  - Runs on the controller and opens no connection.
  - Values of secrets are never shown.
  - Checked are the groups C(gateways), C(engines), C(monitors) and C(preprocessors), the hosts' names and addresses,
    C(ringmaster_models), C(vllm_engines), C(vllm_engine), C(ringmaster_card), C(vllm_api_key), C(edge_api_keys), the
    ports of the collection, and the version of ansible-core.
attributes:
  check_mode:
    description: Says what would be changed and changes nothing.
    support: full
  diff_mode:
    description: Shows what is changed. Nothing ever is.
    support: none
  idempotent:
    description: A second run changes nothing.
    support: full
  platform:
    description: Systems on which the module works.
    support: full
    platforms: posix
author:
  - Ringmaster authors (@ringmaster)
"""

EXAMPLES = r"""
- name: Preflight
  hosts: all
  gather_facts: false
  any_errors_fatal: true
  tags: [always]
  tasks:
    - name: Inventory is right
      ringmaster.inference.site_preflight:
      run_once: true
"""

RETURN = r"""
msg:
  description: All problems, or that there is none.
  type: str
  returned: always
  sample: |-
    Preflight found 1 problem in the inventory. No host was touched.
    1. vllm_engines[0].model of gpu-a1
       expected: a model of ringmaster_models (qwen2-7b-instruct)
       found:    'qwen2-7b'
       fix:      correct the name, or add the model to ringmaster_models
"""
