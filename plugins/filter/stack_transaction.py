# Copyright (c) 2026, the Ringmaster authors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
name: stack_transaction
short_description: Whether a simulated transaction of the package manager keeps to its step
version_added: 0.1.0
description:
  - Reads what C(apt-get --simulate) or C(dnf --assumeno) printed (with C(LC_ALL=C), standard output followed by
    standard error), and tells what of it the step may not do. It may not touch a package of another step, remove a
    package of nobody, leave a wanted package at another version, or bring parts of another driver along.
  - A text that is not whole is refused. The changes have to tally with the summary.
positional: profile
options:
  _input:
    description: What the package manager printed.
    type: str
    required: true
  profile:
    description: Stack profile, with the kernel's release in it.
    type: dict
    required: true
  operations:
    description: Operations whose packages may change. By default all, that is the whole set at once.
    type: list
    elements: str
    choices: [kernel, rdma, driver, cuda, nccl]
    default: [kernel, rdma, driver, cuda, nccl]
  installed:
    description: RV(ringmaster.inference.driver_stack_info#module:packages) of the host.
    type: dict
    default: {}
  release:
    description: Release of the host's kernel, for a profile that leaves it to the host.
    type: str
author:
  - Ringmaster authors (@ringmaster)
"""

EXAMPLES = r"""
- name: The driver's transaction touches nothing else
  vars:
    said: "{{ simulation.stdout ~ '\n' ~ simulation.stderr }}"
    verdict: "{{ said | ringmaster.inference.stack_transaction(driver_profile, operations=['driver'],
      installed=stack.packages, release=stack.plan.kernel) }}"
  ansible.builtin.assert:
    that: verdict.problems == []
    fail_msg: "{{ verdict.problems | map(attribute='reason') | join('. ') }}"
"""

RETURN = r"""
_value:
  description:
    - C(changes) has C(name), C(action) (V(install), V(upgrade), V(downgrade), V(reinstall), V(remove)), C(before) and
      C(after) of each package. dnf does not tell C(before) of what it replaces. C(problems) has C(reason) and C(to_do).
      C(along) are the packages of no operation that come along.
  type: dict
  sample:
    changes: [{name: nvidia-smi, action: install, before: null, after: 535.309.01-0+deb12u1}]
    problems: []
    along: [dkms]
"""

from collections.abc import Callable, Mapping
from typing import Any

from ansible.errors import AnsibleFilterError

from ansible_collections.ringmaster.inference.plugins.module_utils.stack_packages import OPERATIONS
from ansible_collections.ringmaster.inference.plugins.module_utils.stack_plan import flat
from ansible_collections.ringmaster.inference.plugins.module_utils.stack_profiles import (
    ProfileError,
    for_kernel,
    validate,
)
from ansible_collections.ringmaster.inference.plugins.module_utils.stack_transactions import along, check, parse


def stack_transaction(
    output: Any, profile: Any, operations: Any = OPERATIONS, installed: Any = None, release: Any = None
) -> dict[str, Any]:
    if not isinstance(output, str):
        raise AnsibleFilterError("stack_transaction: use it on the text that the package manager printed")
    strange = set(operations) - set(OPERATIONS)
    if strange:
        raise AnsibleFilterError(f"stack_transaction: {', '.join(sorted(strange))} is none of {', '.join(OPERATIONS)}")
    if installed is not None and not isinstance(installed, Mapping):
        raise AnsibleFilterError("stack_transaction: installed must be packages of driver_stack_info")
    try:
        wanted = validate(profile)
    except ProfileError as error:
        raise AnsibleFilterError(f"stack_transaction: {error}") from error
    if release:
        wanted = for_kernel(wanted, str(release))
    transaction = parse(wanted["os"]["family"], output)
    return {
        "changes": [change.document() for change in transaction.changes],
        "problems": check(transaction, wanted, operations, flat(installed) or {}),
        "along": along(transaction, wanted),
    }


class FilterModule:
    """The filter in this file."""

    def filters(self) -> dict[str, Callable[..., Any]]:
        return {"stack_transaction": stack_transaction}
