# Copyright (c) 2026, the Ringmaster authors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
name: scheduler_urls
short_description: The schedulers of all gateways, from the inventory
version_added: 0.1.0
description:
  - Gives the addresses of the HTTP interfaces of the schedulers of all hosts in group C(gateways), which is what module
    M(ringmaster.inference.node_state) asks. They come from C(ringmaster_address) (or C(ansible_host)) and
    C(scheduler_http_port) of these hosts. Without such hosts the list is empty.
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
schedulers: "{{ groups | ringmaster.inference.scheduler_urls(hostvars) }}"
"""

RETURN = r"""
_value:
  description: The addresses, in the order of the gateways' names.
  type: list
  elements: str
  sample: ["http://10.89.7.11:8406", "http://10.89.7.12:8406"]
"""

from collections.abc import Callable, Mapping
from typing import Any

from ansible.errors import AnsibleFilterError

from ansible_collections.ringmaster.inference.plugins.module_utils.members import MembersError, scheduler_urls


def scheduler_urls_filter(groups: Any, hostvars: Any) -> list[str]:
    if not isinstance(groups, Mapping) or not isinstance(hostvars, Mapping):
        raise AnsibleFilterError("scheduler_urls: use it as groups | ringmaster.inference.scheduler_urls(hostvars)")
    try:
        return scheduler_urls(groups, hostvars)
    except MembersError as error:
        raise AnsibleFilterError(f"scheduler_urls: {error}") from error


class FilterModule:
    """The filter in this file."""

    def filters(self) -> dict[str, Callable[..., Any]]:
        return {"scheduler_urls": scheduler_urls_filter}
