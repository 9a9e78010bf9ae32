#!/usr/bin/python
# Copyright (c) 2026, the Ringmaster authors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: host_tuning_info
short_description: Read what decides a host's latency, from sleep states to Secure Boot
version_added: 0.1.0
description:
  - Reads sleep states (C-states) and frequency governors of the CPUs, ASPM policy, IOMMU, kernel lockdown, Secure Boot,
    NUMA nodes, I/O schedulers, swap, transparent huge pages, the state of the clock and the limits of services.
  - A value that can't be known is V(null), and C(unknown) beside it holds the reason under the value's name. What has
    no file in C(/sys) or C(/proc) is not known; it is never taken for "disabled".
  - In a container nearly all of it is the machine's, which RV(container) tells.
  - Works for any user. Only root may read kernel lockdown, and on some hosts EFI variables.
options: {}
seealso:
  - module: ringmaster.inference.host_tuning
  - module: ringmaster.inference.pcie_info
extends_documentation_fragment:
  - ringmaster.inference.attributes
  - ringmaster.inference.attributes.reader
author:
  - Ringmaster authors (@ringmaster)
"""

EXAMPLES = r"""
- name: The host's settings are read
  ringmaster.inference.host_tuning_info:
  register: host

- name: No CPU takes longer than 10 microseconds to wake up
  ansible.builtin.assert:
    that: host.cpu_idle.greatest_latency_microseconds <= 10
    fail_msg: "{{ host.cpu_idle.deepest_enabled.name }} is enabled. {{ host.cpu_idle.notes | join('. ') }}"
  when: host.cpu_idle.greatest_latency_microseconds is not none

- name: All CPUs are governed for performance
  ansible.builtin.assert:
    that: host.cpu_frequency.governors.keys() | list == ['performance']
  when: host.cpu_frequency.governors is not none

- name: The IOMMU translates nothing that goes between the cards
  ansible.builtin.assert:
    that: host.iommu.mode in ['off', 'passthrough']
    fail_msg: "Expected iommu=pt. Found {{ host.iommu.group_types }}. To do: add it to the kernel's command line and
    reboot."
  when: host.iommu.mode is not none

- name: What was not to be known is shown
  ansible.builtin.debug:
    var: host.unknown
"""

RETURN = r"""
container:
  description: Kind of container that this host is, V(podman) for instance. Empty if it is none.
  type: str
  returned: success
  sample: ""
kernel:
  description: The kernel.
  type: dict
  returned: success
  contains:
    release:
      description: Release.
      type: str
      sample: 6.8.0-52-generic
    command_line:
      description: Command line it was started with.
      type: str
      sample: BOOT_IMAGE=/vmlinuz root=/dev/sda2 iommu=pt
    command_line_tool:
      description: What changes the command line on this host, V(update-grub) or V(grubby).
      type: str
      sample: update-grub
    unknown:
      description: Reasons for values that are null.
      type: dict
      sample: {}
cpu_idle:
  description: Sleep states of the CPUs that are on line.
  type: dict
  returned: success
  contains:
    driver:
      description: Driver, V(intel_idle), V(acpi_idle), V(none) and so on.
      type: str
      sample: intel_idle
    governor:
      description: Governor that chooses a state.
      type: str
      sample: menu
    groups:
      description: CPUs with the same states, the largest group first.
      type: list
      elements: dict
      contains:
        cpus:
          description: CPUs, as the kernel lists them.
          type: str
          sample: 0-63
        states:
          description: States, the shallowest first.
          type: list
          elements: dict
          sample: [{state: state2, name: C1E, latency_microseconds: 10, disabled: true, unknown: {}}]
    deepest_enabled:
      description: Deepest state that the largest group may use, in the same form.
      type: dict
      sample: {state: state1, name: C1, latency_microseconds: 2, disabled: false, unknown: {}}
    deviating_cpus:
      description: CPUs outside of the largest group, as the kernel lists them. Empty for none.
      type: str
      sample: ""
    greatest_latency_microseconds:
      description: Longest time that any CPU can take to wake up, in microseconds.
      type: int
      sample: 2
    arguments:
      description:
        - Those of C(intel_idle.max_cstate), C(processor.max_cstate), C(idle) and C(cpuidle.off) that stand on the
          kernel's command line.
      type: dict
      sample: {intel_idle.max_cstate: "1"}
    notes:
      description: What these arguments truly do, where that is often taken for something else.
      type: list
      elements: str
      sample: ["intel_idle.max_cstate=0 switches the driver intel_idle off, not the C-states: acpi_idle takes its
      place"]
    unknown:
      description: Reasons for values that are null.
      type: dict
      sample: {}
cpu_frequency:
  description: Frequencies of the CPUs that are on line.
  type: dict
  returned: success
  contains:
    drivers:
      description: Drivers, and the CPUs that have them.
      type: dict
      sample: {intel_pstate: 0-63}
    governors:
      description: Governors, and the CPUs that have them.
      type: dict
      sample: {performance: 0-63}
    available_governors:
      description: Governors that every CPU offers.
      type: list
      elements: str
      sample: [performance, powersave]
    energy_performance_preferences:
      description: Preferences between energy and performance, and the CPUs that have them.
      type: dict
      sample: {performance: 0-63}
    turbo:
      description: Whether CPUs may go above their base frequency.
      type: bool
      sample: true
    unknown:
      description: Reasons for values that are null.
      type: dict
      sample: {}
aspm:
  description: Power management of PCI Express links by the kernel. What each link does is read by C(pcie_info).
  type: dict
  returned: success
  contains:
    policy:
      description: Policy, V(default), V(performance), V(powersave) or V(powersupersave).
      type: str
      sample: performance
    choices:
      description: Policies the kernel offers.
      type: list
      elements: str
      sample: [default, performance, powersave, powersupersave]
    arguments:
      description: Those of C(pcie_aspm) and C(pcie_aspm.policy) that stand on the kernel's command line.
      type: dict
      sample: {pcie_aspm: "off"}
    notes:
      description: What these arguments truly do, where that is often taken for something else.
      type: list
      elements: str
      sample: ["pcie_aspm=off: the kernel leaves ASPM as the firmware set it; it does not switch it off"]
    unknown:
      description: Reasons for values that are null.
      type: dict
      sample: {}
iommu:
  description: The IOMMU.
  type: dict
  returned: success
  contains:
    active:
      description: Whether the kernel uses one.
      type: bool
      sample: true
    units:
      description: Its units.
      type: list
      elements: str
      sample: [dmar0, dmar1]
    groups:
      description: Number of groups of devices.
      type: int
      sample: 42
    group_types:
      description: Number of groups by the type of their domain. V(identity) is passthrough.
      type: dict
      sample: {identity: 42}
    mode:
      description:
        - V(off), V(passthrough) (no group is translated), V(translated) (all are) or V(mixed).
      type: str
      sample: passthrough
    arguments:
      description:
        - Those of C(iommu), C(intel_iommu), C(amd_iommu), C(iommu.passthrough) and C(iommu.strict) that stand on the
          kernel's command line.
      type: dict
      sample: {iommu: pt}
    unknown:
      description: Reasons for values that are null.
      type: dict
      sample: {}
kernel_lockdown:
  description: Lockdown of the kernel, V(none), V(integrity) or V(confidentiality). It refuses writes to configuration
    spaces.
  type: str
  returned: success
  sample: none
secure_boot:
  description: Secure Boot, as the firmware's variables tell it.
  type: dict
  returned: success
  contains:
    efi:
      description: Whether the host was booted by EFI.
      type: bool
      sample: true
    enabled:
      description: Whether Secure Boot was on.
      type: bool
      sample: false
    setup_mode:
      description: Whether the firmware has no platform key yet.
      type: bool
      sample: false
    unknown:
      description: Reasons for values that are null.
      type: dict
      sample: {}
numa:
  description: Memory nodes.
  type: dict
  returned: success
  contains:
    nodes:
      description: Nodes, each with its C(cpus), C(memory_bytes), and C(distances) to each node (10 is the node itself).
      type: list
      elements: dict
      sample: [{node: 0, cpus: "0-31", memory_bytes: 540431048704, distances: {"0": 10, "1": 21}, unknown: {}}]
    balancing:
      description: Whether the kernel moves pages between nodes by itself.
      type: bool
      sample: false
    unknown:
      description: Reasons for values that are null.
      type: dict
      sample: {}
disks:
  description:
    - Block devices, except loop devices, memory disks, optical and floppy drives. Each with its C(scheduler), the
      C(schedulers) it offers, and its C(kind), V(nvme), V(ssd), V(hdd), V(paravirtual) or V(virtual) (made of others).
  type: list
  elements: dict
  returned: success
  sample: [{device: nvme0n1, kind: nvme, scheduler: none, schedulers: [none, mq-deadline], unknown: {}}]
swap:
  description: Swap.
  type: dict
  returned: success
  contains:
    active:
      description: Whether any swap area is in use.
      type: bool
      sample: false
    areas:
      description:
        - Areas in use, each with C(path), C(kind) (V(partition), V(file) or V(compressed_memory)), C(size_bytes),
          C(used_bytes) and C(priority).
      type: list
      elements: dict
      sample: [{path: /dev/sda3, kind: partition, size_bytes: 8589930496, used_bytes: 0, priority: -2}]
    zswap:
      description: Whether pages are compressed on their way to swap.
      type: bool
      sample: false
    unknown:
      description: Reasons for values that are null.
      type: dict
      sample: {}
transparent_hugepages:
  description: Transparent huge pages. C(enabled) is V(always), V(madvise) or V(never); C(defrag) says who waits for
    them.
  type: dict
  returned: success
  sample: {enabled: madvise, defrag: madvise, unknown: {}}
time:
  description: The clock.
  type: dict
  returned: success
  contains:
    synchronized:
      description: Whether the kernel was told by a time daemon that its clock is right.
      type: bool
      sample: true
    maximum_error_microseconds:
      description: Bound of its error, in microseconds.
      type: int
      sample: 28500
    estimated_error_microseconds:
      description: Estimate of its error, in microseconds.
      type: int
      sample: 12
    service:
      description: Time daemon that runs, V(chrony), V(systemd-timesyncd), V(ntpsec), V(ntp) or V(openntpd).
      type: str
      sample: chrony
    services:
      description: Units of time daemons that are installed, with their states.
      type: dict
      sample: {chrony.service: {active: active, enabled: enabled}}
    unknown:
      description: Reasons for values that are null.
      type: dict
      sample: {}
limits:
  description: Limits.
  type: dict
  returned: success
  contains:
    open_files:
      description: Open files of the whole host.
      type: int
      sample: 9223372036854775807
    open_files_per_process:
      description: Greatest limit of open files that a process can have.
      type: int
      sample: 1048576
    memory_maps_per_process:
      description: Memory maps of a process.
      type: int
      sample: 65530
    service_open_files_soft:
      description: Open files of a service that asks for nothing, soft limit. A number or V(infinity).
      type: raw
      sample: 1024
    service_open_files_hard:
      description: The same, hard limit.
      type: raw
      sample: 524288
    service_locked_memory_bytes:
      description: Locked memory of a service that asks for nothing, in bytes. A number or V(infinity).
      type: raw
      sample: 8388608
    unknown:
      description: Reasons for values that are null.
      type: dict
      sample: {}
unknown:
  description: Reasons for values that are null.
  type: dict
  returned: success
  sample: {kernel_lockdown: "/sys/kernel/security/lockdown: no such file"}
"""

from ansible.module_utils.basic import AnsibleModule

from ansible_collections.ringmaster.inference.plugins.module_utils.commands import CommandRunner
from ansible_collections.ringmaster.inference.plugins.module_utils.file_tree import FileTree
from ansible_collections.ringmaster.inference.plugins.module_utils.host_tuning import HostTuningReader


def main() -> None:
    module = AnsibleModule(argument_spec={}, supports_check_mode=True)
    module.exit_json(changed=False, **HostTuningReader(FileTree(), CommandRunner()).read())


if __name__ == "__main__":
    main()
