# Copyright (c) 2026, the Ringmaster authors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
name: stack_fit
short_description: Whether the parts of a stack profile go together and go with a host
version_added: 0.1.0
description:
  - Holds a profile against one table of rules, among them the lowest driver for a CUDA version, NCCL and its CUDA,
    Fabric Manager and its driver, headers and their kernel, kind of modules and generation of the cards, Secure Boot,
    and the days on which support ends.
  - Changes nothing and asks nothing of the host.
positional: profiles
options:
  _input:
    description: A profile, as the lookup P(ringmaster.inference.stack_profile#lookup) gives it.
    type: dict
    required: true
  profiles:
    description: Profiles of which the nearest supported one is named if this one is refused.
    type: list
    elements: dict
    default: []
  today:
    description: The day for which to judge, as C(YYYY-MM-DD). By default this day on the controller, in UTC.
    type: str
  host:
    description:
      - What M(ringmaster.inference.driver_stack_info) found on the host. Without it, the profile alone is judged.
    type: dict
    default: {}
author:
  - Ringmaster authors (@ringmaster)
"""

EXAMPLES = r"""
- name: The profile goes together
  vars:
    profiles: "{{ query('ringmaster.inference.stack_profile') }}"
    fit: "{{ driver_profile | ringmaster.inference.stack_fit(profiles, host=driver_stack) }}"
  ansible.builtin.assert:
    that: not fit.refused
    fail_msg: "{{ fit.message }}"
"""

RETURN = r"""
_value:
  description:
    - C(refused) says whether a rule forbids the profile. C(problems) has C(rule), C(severity) (V(refuse) or V(warn)),
      C(reason), C(to_do) and C(source) of each. C(nearest) is the name of the nearest profile that is not refused.
      C(message) is all of it for people.
  type: dict
  sample:
    refused: false
    problems:
      - rule: driver_branch_ended
        severity: warn
        reason: NVIDIA's support of driver branch R535 ended on 2026-06-30
        to_do: move to R580 LTS or a later LTS branch
        source: DRV
    nearest: null
    message: "Stack profile debian12-r535: …"
"""

import datetime
from collections.abc import Callable, Mapping
from typing import Any

from ansible.errors import AnsibleFilterError

from ansible_collections.ringmaster.inference.plugins.module_utils.stack_fit import judge
from ansible_collections.ringmaster.inference.plugins.module_utils.stack_profiles import (
    ProfileError,
    parse_date,
    validate,
)


def stack_fit(profile: Any, profiles: Any = (), today: Any = None, host: Any = None) -> dict[str, Any]:
    day = datetime.datetime.now(datetime.timezone.utc).date() if today is None else parse_date(today)
    if day is None:
        raise AnsibleFilterError(f"stack_fit: today must be a date like 2028-06-30, not {today!r}")
    if host is not None and not isinstance(host, Mapping):
        raise AnsibleFilterError("stack_fit: host must be what driver_stack_info returned")
    try:
        return judge(validate(profile), [validate(candidate) for candidate in profiles], day, host or {})
    except ProfileError as error:
        raise AnsibleFilterError(f"stack_fit: {error}") from error


class FilterModule:
    """The filter in this file."""

    def filters(self) -> dict[str, Callable[..., Any]]:
        return {"stack_fit": stack_fit}
