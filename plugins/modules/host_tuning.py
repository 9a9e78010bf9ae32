#!/usr/bin/python
# Copyright (c) 2026, the Ringmaster authors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: host_tuning
short_description: Set what decides a running host's latency, and bring it back to what it was
version_added: 0.1.0
description:
  - Sets the frequency governor and the sleep states of all CPUs, the ASPM policy, access control services of PCI
    Express ports, swap and kernel parameters. Each is read back after it was written.
  - An option that is not given leaves its setting alone.
  - A setting that the host does not have, or does not let one change, is named in RV(unavailable) and fails the module
    only if O(required) names it. The other settings are set nevertheless. In a container, what lies in the kernel's own
    C(/sys) and C(/proc) is unavailable, since it is the machine's, except for parameters of the network.
  - Nothing here outlives a reboot. RV(boot) holds what has to be written again then; the role C(baseline) has a unit
    for it.
options:
  governor:
    description:
      - Frequency governor of all CPUs. V(performance) keeps them at their highest clock.
    type: str
  idle_latency_limit_microseconds:
    description:
      - Sleep states whose time to wake up is this long or longer are disabled, shorter ones are enabled, as C(cpupower
        idle-set -D) does. In microseconds, 1 or more. The shallowest state of a CPU is always enabled.
    type: int
  aspm_policy:
    description:
      - Kernel's policy for the power management of PCI Express links. V(performance) disables it on every link that the
        kernel controls.
    type: str
    choices: [default, performance, powersave, powersupersave]
  acs:
    description:
      - V(disabled) clears the ACS control register of every port above a GPU or a network adapter, so that they reach
        each other without a way through the root complex. For bare metal only. Virtual machines that are given such a
        device need ACS to be kept apart.
    type: str
    choices: [disabled]
  swap:
    description:
      - V(disabled) takes every swap area out of use, compressed memory (zram) too. Needs memory for what is in it.
    type: str
    choices: [disabled]
  sysctls:
    description:
      - Kernel parameters by name, with their values.
    type: dict
  restore:
    description:
      - What an earlier run returned as RV(before). Brings these settings back to it. Values that are null stay as they
        are, and so do CPUs, ports and kernel parameters that are there no more.
    type: dict
  required:
    description:
      - Settings that must be available, by the names that RV(before) has. The module fails where one is not, after it
        has set the others.
    type: list
    elements: str
    default: []
attributes:
  check_mode:
    description:
      - Says what would be changed and changes nothing. What the kernel refuses only at the writing is not known then.
    support: full
  diff_mode:
    description: Shows RV(before) and RV(after).
    support: full
seealso:
  - module: ringmaster.inference.host_tuning_info
extends_documentation_fragment:
  - ringmaster.inference.attributes.setter
  - ringmaster.inference.attributes
author:
  - Ringmaster authors (@ringmaster)
"""

EXAMPLES = r"""
- name: CPUs answer at once, and links stay awake
  ringmaster.inference.host_tuning:
    governor: performance
    idle_latency_limit_microseconds: 10
    aspm_policy: performance
    required: [governor, idle_states]
  register: tuning

- name: What this host does not offer is shown
  ansible.builtin.debug:
    var: tuning.unavailable
  when: tuning.unavailable | length > 0

- name: GPUs of a bare-metal host reach each other directly
  ringmaster.inference.host_tuning:
    acs: disabled
    required: [acs]

- name: Pages stay where they are, and nothing is swapped
  ringmaster.inference.host_tuning:
    swap: disabled
    sysctls:
      kernel.numa_balancing: 0

- name: Everything is as it was
  ringmaster.inference.host_tuning:
    restore: "{{ tuning.before }}"

- name: How far the host is from what is wanted is known
  ringmaster.inference.host_tuning:
    governor: performance
  check_mode: true
  register: wanted
  failed_when: wanted is changed
"""

RETURN = r"""
before:
  description:
    - All settings as they were, and the kernel parameters that were asked for. Null for one that can't be read. With
      O(restore), only its settings.
    - C(governor) holds governors and their CPUs, C(idle_states) sleep states and the CPUs on which they are disabled,
      C(aspm_policy) a policy, C(acs) ports and their ACS control registers, C(swap) areas in use and their priorities.
      Kernel parameters are named C(sysctls.NAME).
  type: dict
  returned: success
  sample:
    governor: {powersave: 0-63}
    idle_states: {state0: "", state1: "", state2: ""}
    aspm_policy: default
    acs: {"0000:00:01.1": "0x001d"}
    swap: {/dev/sda3: -2}
    sysctls.kernel.numa_balancing: "1"
after:
  description: Settings as they are now, in the same form. In check mode, as they would be.
  type: dict
  returned: success
  sample: {governor: {performance: 0-63}}
unavailable:
  description: Settings that could not be brought to what was asked for, with the reason.
  type: dict
  returned: success
  sample: {swap: "the kernel is the machine's, not this container's (podman)"}
boot:
  description:
    - What keeps the settings over a reboot. C(writes) are paths (with wildcards of a shell) and the values to be
      written there, C(acs) addresses of ports whose ACS control register is to be zero, C(swap) whether all swap is to
      be switched off.
    - Without what is unavailable. Empty with O(restore).
  type: dict
  returned: success
  sample:
    writes:
      - {path: "/sys/devices/system/cpu/cpu[0-9]*/cpufreq/scaling_governor", value: performance}
    acs: []
    swap: true
"""

from collections.abc import Collection
from dataclasses import asdict
from typing import Any

from ansible.module_utils.basic import AnsibleModule

from ansible_collections.ringmaster.inference.plugins.module_utils.commands import CommandRunner
from ansible_collections.ringmaster.inference.plugins.module_utils.file_tree import FileTree
from ansible_collections.ringmaster.inference.plugins.module_utils.host_settings import (
    ASPM_POLICIES,
    SYSCTLS,
    HostSettings,
)

# Option -> setting.
SETTINGS = {
    "governor": "governor",
    "idle_latency_limit_microseconds": "idle_states",
    "aspm_policy": "aspm_policy",
    "acs": "acs",
    "swap": "swap",
}


def asked(parameters: dict[str, Any]) -> dict[str, Any]:
    """Settings that are asked for, with their options, or what they are to be brought back to."""
    if parameters["restore"] is not None:
        return dict(parameters["restore"])
    wanted = {SETTINGS[option]: parameters[option] for option in SETTINGS if parameters[option] is not None}
    return {**wanted, **{f"{SYSCTLS}{name}": value for name, value in (parameters["sysctls"] or {}).items()}}


def perform(module: AnsibleModule) -> dict[str, Any]:
    """Do what the options ask; the result has the form of RETURN. Raises ValueError for what can't be asked."""
    settings = HostSettings(FileTree(), CommandRunner())
    bring = settings.apply if module.params["restore"] is None else settings.restore
    outcome = bring(asked(module.params), not module.check_mode)
    result = asdict(outcome)
    if module._diff and outcome.changed:
        result["diff"] = {"before": outcome.before, "after": outcome.after}
    return result


def complaint(required: list[str], asked: Collection[str], unavailable: dict[str, str]) -> str:
    """What is wrong with settings that have to be available; empty if nothing is."""
    reasons = {name: unavailable.get(name, "") if name in asked else "it was not asked for" for name in required}
    lacking = sorted(name for name in required if reasons[name])
    if not lacking:
        return ""
    found = "; ".join(f"{name}: {reasons[name]}" for name in lacking)
    return (
        f"Expected {', '.join(lacking)} to be set. Found {found}. To do: make it available in the firmware or on the "
        "machine below this host, or do not require it."
    )


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "governor": {"type": "str"},
            "idle_latency_limit_microseconds": {"type": "int"},
            "aspm_policy": {"type": "str", "choices": list(ASPM_POLICIES)},
            "acs": {"type": "str", "choices": ["disabled"]},
            "swap": {"type": "str", "choices": ["disabled"]},
            "sysctls": {"type": "dict"},
            "restore": {"type": "dict"},
            "required": {"type": "list", "elements": "str", "default": []},
        },
        mutually_exclusive=[(option, "restore") for option in (*SETTINGS, "sysctls")],
        supports_check_mode=True,
    )
    limit = module.params["idle_latency_limit_microseconds"]
    if limit is not None and limit < 1:
        module.fail_json(
            msg=f"Expected idle_latency_limit_microseconds of 1 or more. Found {limit}. To do: give the shortest time "
            "to wake up that is too long, in microseconds."
        )
    try:
        result = perform(module)
    except ValueError as error:
        module.fail_json(
            msg="Expected names of kernel parameters, and in restore what an earlier run returned as before. Found: "
            f"{error}. To do: give them in that form."
        )
    else:
        lacking = complaint(module.params["required"], asked(module.params), result["unavailable"])
        if lacking:
            module.fail_json(msg=lacking, **result)
        module.exit_json(**result)


if __name__ == "__main__":
    main()
