#!/usr/bin/python
# Copyright (c) 2026, the Ringmaster authors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: driver_stack_info
short_description: Read the driver stack of a host, from kernel to NCCL, and what comes next
version_added: 0.1.0
description:
  - Reads which kernels, RDMA, NVIDIA driver, CUDA and NCCL are installed, held, on disk and loaded, the state of DKMS
    for each kernel, Secure Boot, and whether a reboot is pending and why.
  - With O(profile), tells the steps from there to the profile with their exact packages and reboots, and which comes
    next. That is the same on a host where a run was cut.
  - A value that can't be known is V(null), and C(unknown) beside it holds the reason under the value's name.
  - For the Debian and the EL family. Works for any user; only root may read EFI variables on some hosts.
options:
  profile:
    description:
      - Stack profile to which to tell the way, as the lookup P(ringmaster.inference.stack_profile#lookup) gives it. It
        is checked against the schema here. Whether it fits is told by the filter
        P(ringmaster.inference.stack_fit#filter).
    type: dict
seealso:
  - plugin: ringmaster.inference.stack_profile
    plugin_type: lookup
  - plugin: ringmaster.inference.stack_fit
    plugin_type: filter
  - module: ringmaster.inference.gpu_info
  - module: ringmaster.inference.rdma_info
extends_documentation_fragment:
  - ringmaster.inference.attributes
  - ringmaster.inference.attributes.reader
author:
  - Ringmaster authors (@ringmaster)
"""

EXAMPLES = r"""
- name: The driver stack is read
  ringmaster.inference.driver_stack_info:
    profile: "{{ lookup('ringmaster.inference.stack_profile', 'debian12-r535') }}"
  register: stack

- name: What would happen is shown
  ansible.builtin.debug:
    msg: "{{ stack.plan.lines }}"

- name: The driver that is loaded is the one on disk
  ansible.builtin.assert:
    that: not stack.pending_reboot.due
    fail_msg: "{{ stack.pending_reboot.reasons | join('. ') }}"
  when: stack.pending_reboot.due is not none
"""

RETURN = r"""
os:
  description: The system, in the words of Ansible's facts.
  type: dict
  returned: success
  contains:
    family:
      description: V(Debian) or V(RedHat).
      type: str
      sample: Debian
    distribution:
      description: Distribution.
      type: str
      sample: Ubuntu
    version:
      description: Version.
      type: str
      sample: "24.04"
    architecture:
      description: Processor.
      type: str
      sample: x86_64
    unknown:
      description: Reasons for values that are null.
      type: dict
      sample: {}
packages:
  description: Versions of installed packages by operation and name. Of kernels several versions can be installed.
  type: dict
  returned: success
  sample:
    kernel: {linux-image-6.1.0-57-amd64: [6.1.192-3]}
    rdma: {rdma-core: [44.0-2]}
    driver: {nvidia-smi: [535.309.01-0+deb12u1]}
    cuda: {}
    nccl: {}
held:
  description: What keeps packages of the stack where they are.
  type: dict
  returned: success
  contains:
    tool:
      description: V(apt-mark) or V(versionlock).
      type: str
      sample: apt-mark
    packages:
      description: Installed packages of the stack that are held.
      type: list
      elements: str
      sample: [nvidia-smi]
    pins:
      description: Records of apt's preferences, with their file. A pin above 1000 also downgrades.
      type: list
      elements: dict
      sample: [{packages: [nvidia-smi], pin: version 535.309.01-0+deb12u1, priority: 1001,
        file: /etc/apt/preferences.d/ringmaster}]
    locks:
      description: Entries of dnf's version lock.
      type: list
      elements: dict
      sample: [{package: nvidia-driver-cuda, version: "3:580.159.04-1.el9"}]
    unknown:
      description: Reasons for values that are null.
      type: dict
      sample: {}
kernel:
  description: Kernels.
  type: dict
  returned: success
  contains:
    running:
      description: Release of the one that runs.
      type: str
      sample: 6.1.0-57-amd64
    installed:
      description: Those that are installed, and whether their headers are.
      type: list
      elements: dict
      sample: [{release: 6.1.0-57-amd64, headers: true}]
    newest_installed:
      description: Newest one of the flavour that runs.
      type: str
      sample: 6.1.0-57-amd64
    unknown:
      description: Reasons for values that are null.
      type: dict
      sample: {}
driver:
  description: NVIDIA's driver.
  type: dict
  returned: success
  contains:
    loaded:
      description: The module that is loaded.
      type: dict
      contains:
        loaded:
          description: Whether one is.
          type: bool
          sample: true
        nouveau:
          description: Whether nouveau is, which keeps NVIDIA's out.
          type: bool
          sample: false
        version:
          description: Version.
          type: str
          sample: 535.309.01
        modules:
          description: V(open) or V(proprietary).
          type: str
          sample: proprietary
        unknown:
          description: Reasons for values that are null.
          type: dict
          sample: {}
    on_disk:
      description:
        - The module that each kernel would load, with C(kernel), C(name), C(version), C(modules) (V(open) or
          V(proprietary)) and C(signer) (empty if it is not signed). Kernels without one are left out.
      type: list
      elements: dict
      sample: [{kernel: 6.1.0-57-amd64, name: nvidia-current, version: 535.309.01, modules: proprietary,
        signer: DKMS module signing key, unknown: {}}]
    libraries:
      description: Versions of the libraries.
      type: list
      elements: str
      sample: [535.309.01]
    package_versions:
      description: Versions of the packages with programs and libraries, without their revisions.
      type: list
      elements: str
      sample: [535.309.01]
    unknown:
      description: Reasons for values that are null.
      type: dict
      sample: {}
dkms:
  description: DKMS.
  type: dict
  returned: success
  contains:
    installed:
      description: Whether it is.
      type: bool
      sample: true
    modules:
      description:
        - State of each module for each kernel. C(state) is V(added), V(built), V(installed) or V(broken); C(kernel) is
          V(null) while it is only added.
      type: list
      elements: dict
      sample: [{module: nvidia-current, version: 535.309.01, kernel: 6.1.0-57-amd64, architecture: x86_64,
        state: installed, notes: []}]
    unknown:
      description: Reasons for values that are null.
      type: dict
      sample: {}
secure_boot:
  description: Secure Boot.
  type: dict
  returned: success
  contains:
    enabled:
      description: Whether only signed modules are let in. V(false) on a host that was not booted by EFI.
      type: bool
      sample: true
    key:
      description: File of the key that DKMS signs modules with.
      type: str
      sample: /var/lib/dkms/mok.pub
    key_enrolled:
      description: Whether the firmware knows it.
      type: bool
      sample: false
    unknown:
      description: Reasons for values that are null.
      type: dict
      sample: {}
rdma:
  description: RDMA.
  type: dict
  returned: success
  contains:
    flavour:
      description: V(inbox), V(doca_ofed), V(mlnx_ofed) or V(none).
      type: str
      sample: inbox
    version:
      description: Version of DOCA-OFED or MLNX_OFED.
      type: str
      sample: 25.04-0.6.1.0
    loaded_version:
      description: Version of the loaded mlx5_core.
      type: str
      sample: 25.04-0.6.1
    on_disk_version:
      description: Version of the one on disk.
      type: str
      sample: 25.04-0.6.1
    unknown:
      description: Reasons for values that are null.
      type: dict
      sample: {}
cuda:
  description: CUDA.
  type: dict
  returned: success
  contains:
    toolkits:
      description: Toolkits, with their folder.
      type: list
      elements: dict
      sample: [{path: /usr/local/cuda-13.0, version: 13.0.2}]
    default:
      description: Where C(/usr/local/cuda) leads to.
      type: str
      sample: /usr/local/cuda-13.0
    unknown:
      description: Reasons for values that are null.
      type: dict
      sample: {}
nccl:
  description: NCCL of the system; Python wheels bring their own.
  type: dict
  returned: success
  contains:
    version:
      description: Version of the package.
      type: str
      sample: 2.28.9
    cuda:
      description: CUDA that it is built for.
      type: str
      sample: "13.0"
    libraries:
      description: Versions of the libraries.
      type: list
      elements: str
      sample: [2.28.9]
    unknown:
      description: Reasons for values that are null.
      type: dict
      sample: {}
fabric_manager:
  description: Fabric Manager.
  type: dict
  returned: success
  contains:
    version:
      description: Version.
      type: str
      sample: 580.159.04
    active:
      description: Whether its service runs.
      type: bool
      sample: true
    unknown:
      description: Reasons for values that are null.
      type: dict
      sample: {}
hardware:
  description: What of NVIDIA's is on the PCI bus.
  type: dict
  returned: success
  contains:
    cards:
      description:
        - Cards, with C(pci_address), C(device) and C(architecture) (V(before_turing), V(turing), V(ampere), V(ada),
          V(hopper), V(blackwell)).
      type: list
      elements: dict
      sample: [{pci_address: "0000:07:00.0", device: "0x20b2", architecture: ampere, unknown: {}}]
    nvswitches:
      description: Number of NVSwitches.
      type: int
      sample: 6
    unknown:
      description: Reasons for values that are null.
      type: dict
      sample: {}
pending_reboot:
  description: Whether what runs is not what is installed.
  type: dict
  returned: success
  contains:
    due:
      description: Whether a reboot is due.
      type: bool
      sample: true
    reasons:
      description: Why.
      type: list
      elements: str
      sample: ["kernel 6.1.0-56-amd64 runs, and 6.1.0-57-amd64 is installed"]
    unknown:
      description: Reasons for values that are null.
      type: dict
      sample: {}
plan:
  description: The way to O(profile). V(null) if none was given.
  type: dict
  returned: success
  contains:
    kernel:
      description: Release of the kernel that the profile comes to on this host.
      type: str
      sample: 6.1.0-57-amd64
    steps:
      description:
        - All steps in their order, V(kernel), V(kernel_reboot), V(rdma), V(driver), V(driver_reboot),
          V(fabric_manager), V(cuda), V(nccl). C(state) is V(done), V(due), V(not_wanted) or V(unknown). C(packages) has
          C(action) (V(install), V(upgrade), V(downgrade), V(keep)). C(required) tells of a reboot that there is no
          other way.
      type: list
      elements: dict
      sample:
        - step: driver
          operation: driver
          state: due
          why: ["nvidia-smi is absent, wanted is 535.309.01-0+deb12u1"]
          packages: [{name: nvidia-smi, installed: [], wanted: 535.309.01-0+deb12u1, action: install}]
          hold: [nvidia-smi]
          reboot: false
          required: false
          verify: ["a module of the wanted version and kind is on disk for the wanted kernel, its packages are held"]
    next:
      description: The first step that is not done, with its operation and why. V(null) if all is done.
      type: dict
      sample: {step: driver, operation: driver, why: ["nvidia-smi is absent, wanted is 535.309.01-0+deb12u1"]}
    reboots:
      description: Reboots to come.
      type: list
      elements: str
      sample: [driver_reboot]
    lines:
      description: The plan for people.
      type: list
      elements: str
      sample: ["driver: install nvidia-smi 535.309.01-0+deb12u1", "driver: hold nvidia-smi",
        "driver_reboot: reboot (no module of the driver is loaded; loading it can be enough)"]
unknown:
  description: Reasons for values that are null.
  type: dict
  returned: success
  sample: {plan: no profile was given}
"""

from typing import Any

from ansible.module_utils.basic import AnsibleModule

from ansible_collections.ringmaster.inference.plugins.module_utils.commands import CommandRunner
from ansible_collections.ringmaster.inference.plugins.module_utils.driver_stack import DriverStackReader
from ansible_collections.ringmaster.inference.plugins.module_utils.file_tree import FileTree
from ansible_collections.ringmaster.inference.plugins.module_utils.stack_plan import lines, plan
from ansible_collections.ringmaster.inference.plugins.module_utils.stack_profiles import ProfileError, validate


def perform(profile: Any, tree: FileTree, runner: CommandRunner) -> dict[str, Any]:
    """Read the host and return the result in the form of RETURN. Raises ProfileError for a profile that is none."""
    wanted = None if profile is None else validate(profile)
    found = DriverStackReader(tree, runner).read(wanted)
    found["plan"] = None
    if wanted is None:
        found["unknown"]["plan"] = "no profile was given"
    else:
        found["plan"] = plan(wanted, found)
        found["plan"]["lines"] = lines(found["plan"])
    return found


def main() -> None:
    module = AnsibleModule(argument_spec={"profile": {"type": "dict"}}, supports_check_mode=True)
    try:
        module.exit_json(changed=False, **perform(module.params["profile"], FileTree(), CommandRunner()))
    except ProfileError as error:
        found = "; ".join(error.problems)
        module.fail_json(msg=f"Expected a stack profile. Found: {found}. To do: take one from lookup stack_profile.")


if __name__ == "__main__":
    main()
