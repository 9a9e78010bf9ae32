# Copyright (c) 2026, the Ringmaster authors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
name: members
short_description: Who is in the site, from the inventory
version_added: 0.1.0
description:
  - Gives the members document, which is the one description of the site that roles use. It lists the engines with
    their addresses, models and limits, the gateways, the monitors and the preprocessors, each list sorted by name.
  - Engines come from the hosts of group C(engines) and their variables C(vllm_engines), C(vllm_engine),
    C(ringmaster_models), C(ringmaster_card) and C(ringmaster_address). No other host variable is read.
  - C(max_num_seqs) is the engine's option, or 256 as in vLLM. C(max_model_len) is the engine's option, or that of the
    model.
positional: hostvars
options:
  _input:
    description: The groups of the inventory, that is the variable C(groups).
    type: dict
    required: true
  hostvars:
    description: The variables of all hosts, that is the variable C(hostvars).
    type: dict
    required: true
author:
  - Ringmaster authors (@ringmaster)
"""

EXAMPLES = r"""
registry_members: "{{ groups | ringmaster.inference.members(hostvars) }}"
"""

RETURN = r"""
_value:
  description: The members document.
  type: dict
  sample:
    schema: 1
    engines:
      - name: gpu-a1.main
        host: gpu-a1
        address: 10.89.7.13
        port: 8100
        kind: standin
        model: qwen2-7b-instruct
        adapters: [sql]
        card: a100-80g
        max_num_seqs: 256
        max_model_len: 32768
    gateways:
      - {name: gw1, address: 10.89.7.11}
    monitors:
      - {name: cpu-c1, address: 10.89.7.16}
    preprocessors: []
    agents:
      - {host: gpu-a1, address: 10.89.7.13, port: 8409}
"""

from collections.abc import Callable, Mapping
from typing import Any

from ansible.errors import AnsibleFilterError

from ansible_collections.ringmaster.inference.plugins.module_utils.members import MembersError, members


def members_filter(groups: Any, hostvars: Any) -> dict[str, Any]:
    if not isinstance(groups, Mapping) or not isinstance(hostvars, Mapping):
        raise AnsibleFilterError("members: use it as groups | ringmaster.inference.members(hostvars)")
    try:
        return members(groups, hostvars)
    except MembersError as error:
        raise AnsibleFilterError(f"members: {error}") from error


class FilterModule:
    """The filter in this file."""

    def filters(self) -> dict[str, Callable[..., Any]]:
        return {"members": members_filter}
