#!/usr/bin/python
# Copyright (c) 2026, the Ringmaster authors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: pcie_info
short_description: Read PCI Express links, errors, ASPM and ACS of GPUs and network adapters
version_added: 0.1.0
description:
  - Reads every GPU and every network or InfiniBand adapter of a host, and each port above them up to the root port.
    For each it gives its link's width and speed, its error counters (Advanced Error Reporting, AER), power management
    of the link (ASPM), access control services (ACS), NUMA node, CPUs, driver and what it is.
  - Error counters can be compared with a baseline that is kept on the host; see O(baseline).
  - A value that can't be known is V(null), and C(unknown) beside it holds the reason under the value's name. It
    is never replaced by zero or by "disabled".
  - A link with fewer lanes than the device has is named in RV(devices[].problems), be it that lanes failed or that the
    slot has fewer. A link that is slower than it could be is not; idle GPUs lower the speed of their link by design.
  - Virtual functions are left out where their physical function is on the same host, because they share its link. So
    are display controllers without a link (those of a server's management controller).
  - Works for any user. Only root may read ASPM of a link from its configuration space (else the kernel's switches are
    read, where there are some), ACS, the serial number and the type of port.
options:
  addresses:
    description:
      - Reads only these functions and the ports above them. An empty list means all.
      - Forms V(0000:07:00.0), V(00000000:07:00.0) as NVML gives it, and V(07:00.0).
    type: list
    elements: str
    default: []
  baseline:
    description:
      - Absolute path of a file on the host that holds the error counters of an earlier moment. With it, each counter
        has a delta.
      - The file is JSON with C(schema) 1, C(taken_at), C(boot_id), and for each address under C(devices) its
        C(identity) (ids, revision, serial number) and its C(counters) (C(correctable.RxErr) and so on).
      - The kernel's counters start at zero at each boot, hot plug and rescan. Deltas are therefore V(null), with the
        reason, where the host was booted since, another device is in the place, or a counter fell. They are never
        negative.
      - A file that is damaged counts as none; RV(baseline.unknown) has the reason.
    type: path
  baseline_state:
    description:
      - V(keep) never writes O(baseline).
      - V(update) compares with O(baseline) as it is and then replaces it with the counters of now. Entries of devices
        that O(addresses) leaves out stay, if they are of this boot. It is not written in check mode.
    type: str
    choices: [keep, update]
    default: keep
attributes:
  check_mode:
    description: Reads as always. A baseline is not written.
    support: full
  diff_mode:
    description: Nothing of the host's configuration is changed, so there is no difference to show.
    support: none
  idempotent:
    description:
      - A second run gives what is found then. The baseline is the collection's own record and no change of the host.
    support: full
extends_documentation_fragment:
  - ringmaster.inference.attributes
author:
  - Ringmaster authors (@ringmaster)
"""

EXAMPLES = r"""
- name: PCI Express links are read
  ringmaster.inference.pcie_info:
  register: pcie

- name: No link has lost lanes
  ansible.builtin.assert:
    that: pcie.devices | selectattr('link.width_downgraded', 'equalto', true) | length == 0
    fail_msg: "{{ pcie.devices | map(attribute='problems') | flatten }}"

- name: Errors are counted from now on
  ringmaster.inference.pcie_info:
    baseline: /var/lib/ringmaster/pcie/baseline.json
    baseline_state: update

- name: Errors since then are read
  ringmaster.inference.pcie_info:
    baseline: /var/lib/ringmaster/pcie/baseline.json
  register: pcie

# A delta that is not known is null, and neither passes nor fails here.
- name: GPUs and their ports had no new uncorrectable error
  ansible.builtin.assert:
    that: (item.errors[severity] or {}).delta | default(0, true) == 0
    fail_msg: "{{ item.pci_address }}: {{ item.problems | join(', ') }}"
  loop: "{{ pcie.devices }}"
  loop_control:
    label: "{{ item.pci_address }}"
  vars:
    severity: nonfatal

- name: One card and the ports above it are read, by the address that NVML gives
  ringmaster.inference.pcie_info:
    addresses: ["00000000:07:00.0"]
  register: card

- name: Peer-to-peer traffic below this card's ports does not go through the root complex
  ansible.builtin.assert:
    that: card.devices | selectattr('acs.redirects_peer_to_peer', 'equalto', true) | length == 0
"""

RETURN = r"""
devices:
  description: GPUs, network adapters and the ports above them, in order of address.
  type: list
  elements: dict
  returned: success
  contains:
    pci_address:
      description: Address in the kernel's form.
      type: str
      sample: "0000:07:00.0"
    kind:
      description: V(gpu) (also other accelerators), V(nic), V(switch_port) or V(root_port).
      type: str
      sample: gpu
    port_type:
      description:
        - What the function itself says it is, V(endpoint), V(legacy_endpoint), V(root_port), V(switch_upstream_port),
          V(switch_downstream_port), V(bridge_to_pci), V(bridge_from_pci), V(integrated_endpoint) or V(event_collector).
      type: str
      sample: endpoint
    ports_above:
      description: Addresses of the ports above it, the nearest first, the root port last.
      type: list
      elements: str
      sample: ["0000:06:00.0", "0000:05:00.0", "0000:00:01.1"]
    class:
      description: Class in words.
      type: str
      sample: 3D controller
    class_code:
      description: Class, subclass and programming interface, hexadecimal.
      type: str
      sample: "0x030200"
    vendor:
      description: Vendor in words.
      type: str
      sample: NVIDIA
    vendor_id:
      description:
        - Vendor, hexadecimal. So are C(device_id), C(subsystem_vendor_id), C(subsystem_device_id) and C(revision).
      type: str
      sample: "0x10de"
    device_id:
      description: Model of the device.
      type: str
      sample: "0x20b2"
    subsystem_vendor_id:
      description: Vendor of the board.
      type: str
      sample: "0x10de"
    subsystem_device_id:
      description: Model of the board.
      type: str
      sample: "0x1463"
    revision:
      description: Revision of the device.
      type: str
      sample: "0xa1"
    serial_number:
      description: Device serial number from the configuration space, as lspci writes it.
      type: str
      sample: b8-3f-d2-03-00-a1-b2-c4
    driver:
      description: Driver that is bound to it.
      type: str
      sample: nvidia
    numa_node:
      description: NUMA node it is attached to.
      type: int
      sample: 0
    local_cpus:
      description: CPUs next to it, as the kernel lists them.
      type: str
      sample: 0-31,64-95
    netdevs:
      description: Network interfaces of a network adapter.
      type: list
      elements: str
      returned: if C(kind) is V(nic)
      sample: [ens1f0np0]
    rdma_devices:
      description: RDMA devices of a network adapter.
      type: list
      elements: str
      returned: if C(kind) is V(nic)
      sample: [mlx5_0]
    link:
      description: The link towards the root complex; of a port that faces down, the link below it.
      type: dict
      contains:
        speed_gt_per_second:
          description: Speed now, in GT/s on each lane (2.5, 5, 8, 16, 32 or 64).
          type: float
          sample: 16.0
        speed_maximum_gt_per_second:
          description: Greatest speed of the function itself, in GT/s.
          type: float
          sample: 16.0
        speed_below_maximum:
          description: Whether it is slower than it could be. Normal while a GPU idles.
          type: bool
          sample: false
        width:
          description: Lanes now.
          type: int
          sample: 16
        width_maximum:
          description: Greatest number of lanes of the function itself.
          type: int
          sample: 16
        width_expected:
          description:
            - Lanes that the link should have. C(width_maximum), for a port that faces down at most that of the device
              below.
          type: int
          sample: 16
        width_downgraded:
          description:
            - Whether C(width) is less than C(width_expected). A fault (seating, riser, lane), or a slot with fewer
              lanes.
          type: bool
          sample: false
        unknown:
          description: Reasons for values that are null.
          type: dict
          sample: {}
    aspm:
      description: Power management of the link.
      type: dict
      contains:
        state:
          description: States the function lets its link go to. V(disabled), V(l0s), V(l1) or V(l0s_l1).
          type: str
          sample: disabled
        source:
          description: V(link_control) is the register itself, V(sysfs) the kernel's switches.
          type: str
          sample: link_control
        supported:
          description: States the function is able to, in the same words.
          type: str
          sample: l0s_l1
        unknown:
          description: Reasons for values that are null.
          type: dict
          sample: {}
    acs:
      description: Access control services.
      type: dict
      contains:
        supported:
          description: Whether the function has them.
          type: bool
          sample: true
        control:
          description: Control register, hexadecimal.
          type: str
          sample: "0x001d"
        controls:
          description: Each control, by name, and whether it is on.
          type: dict
          sample: {source_validation: true, request_redirect: true, egress_control: false}
        redirects_peer_to_peer:
          description:
            - Whether traffic between two devices below this port is sent up to the root complex (a redirect or upstream
              forwarding is on). Slow for GPUs on bare metal; needed in virtual machines.
          type: bool
          sample: true
        unknown:
          description: Reasons for values that are null.
          type: dict
          sample: {}
    errors:
      description:
        - Errors by severity, V(correctable), V(nonfatal) and V(fatal), and for root ports V(root_port), the errors that
          were reported to it, with the severities as names.
        - V(correctable) errors were mended by the hardware. A few are normal, a steady growth tells of a bad link.
      type: dict
      contains:
        correctable:
          description: One severity; the others have the same form.
          type: dict
          contains:
            counts:
              description: Number of errors by the kernel's name for them, since the device was enumerated.
              type: dict
              sample: {RxErr: 0, BadTLP: 2, Timeout: 0}
            reported_total:
              description: The kernel's own total, which need not be the sum.
              type: int
              sample: 2
            deltas:
              description: Growth of each counter since the baseline.
              type: dict
              sample: {RxErr: 0, BadTLP: 1, Timeout: 0}
            delta:
              description: Sum of C(deltas).
              type: int
              sample: 1
            unknown:
              description: Reasons for values that are null.
              type: dict
              sample: {}
        unknown:
          description: Reasons for severities that are null.
          type: dict
          sample: {}
    problems:
      description:
        - Sentences for people. Lanes that are missing, new uncorrectable errors since the baseline, a function that
          does not answer (its configuration space reads as all ones).
      type: list
      elements: str
      sample: ["link runs on 8 of 16 lanes"]
    unknown:
      description: Reasons for values that are null.
      type: dict
      sample: {serial_number: "the function has none"}
missing:
  description:
    - Those of O(addresses) that are not on the bus (a card that fell off it, for instance) or are no GPU and no
      adapter.
  type: list
  elements: str
  returned: success
  sample: []
aspm_policy:
  description: The kernel's policy, V(default), V(performance), V(powersave) or V(powersupersave).
  type: str
  returned: success
  sample: performance
boot_id:
  description: The kernel's identifier of this boot.
  type: str
  returned: success
  sample: 5f0c1d5e-1c5b-4b9c-9a53-0a6a2c1f9b11
baseline:
  description: The baseline that was compared with.
  type: dict
  returned: if O(baseline) is given
  contains:
    path:
      description: File on the host.
      type: str
      sample: /var/lib/ringmaster/pcie/baseline.json
    taken_at:
      description: When it was taken, UTC.
      type: str
      sample: "2026-03-01T12:00:00Z"
    boot_id:
      description: Boot during which it was taken.
      type: str
      sample: 5f0c1d5e-1c5b-4b9c-9a53-0a6a2c1f9b11
    updated:
      description: Whether it was replaced by the counters of now.
      type: bool
      sample: false
    unknown:
      description: Reasons for values that are null.
      type: dict
      sample: {}
unknown:
  description: Reasons for values that are null.
  type: dict
  returned: success
  sample: {}
"""

from typing import Any

from ansible.module_utils.basic import AnsibleModule

from ansible_collections.ringmaster.inference.plugins.module_utils.counters import BaselineError, BaselineFile, take
from ansible_collections.ringmaster.inference.plugins.module_utils.file_tree import BOOT_ID, FileTree
from ansible_collections.ringmaster.inference.plugins.module_utils.findings import Findings
from ansible_collections.ringmaster.inference.plugins.module_utils.pcie import (
    ASPM_POLICY,
    PcieReader,
    normal_address,
)


def compare(reader: PcieReader, devices: list[dict[str, Any]], path: str, update: bool, whole: bool) -> dict[str, Any]:
    """Add the deltas to `devices`; the result is RV(baseline). `whole`: the devices are all that the host has."""
    file = BaselineFile(path)
    baseline, reason = None, f"there is no baseline in {path} yet; to do: run with baseline_state=update"
    try:
        baseline = file.load()
    except BaselineError as error:
        reason = str(error)
    reader.compare(devices, baseline, reason)
    if update:
        kept = {} if whole or baseline is None or baseline.boot_id != reader.tree.boot_id() else baseline.devices
        file.save(take(reader.tree.boot_id(), {**kept, **reader.counted(devices)}))
    found = Findings()
    found.note("path", path)
    found.note("taken_at", baseline.taken_at if baseline else None, reason)
    found.note("boot_id", baseline.boot_id if baseline else None, reason)
    found.note("updated", update)
    return found.document()


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "addresses": {"type": "list", "elements": "str", "default": []},
            "baseline": {"type": "path"},
            "baseline_state": {"type": "str", "choices": ["keep", "update"], "default": "keep"},
        },
        required_if=[("baseline_state", "update", ["baseline"])],
        supports_check_mode=True,
    )
    addresses = {given: normal_address(given) for given in module.params["addresses"]}
    wrong = [given for given, address in addresses.items() if address is None]
    if wrong:
        module.fail_json(
            msg=f"Expected PCI addresses like 0000:07:00.0. Found {', '.join(wrong)}. To do: take them from lspci -D."
        )
    wanted = {address for address in addresses.values() if address is not None}
    reader = PcieReader(FileTree())
    devices = reader.devices(wanted)
    found = Findings()
    found.note("devices", devices)
    found.note("missing", sorted(wanted - {device["pci_address"] for device in devices}))
    found.note("aspm_policy", reader.aspm_policy(), f"{ASPM_POLICY} tells none: the kernel does not manage ASPM")
    found.note("boot_id", reader.tree.boot_id(), f"{BOOT_ID} can't be read")
    try:
        if module.params["baseline"]:
            update = module.params["baseline_state"] == "update" and not module.check_mode
            found.note("baseline", compare(reader, devices, module.params["baseline"], update, not wanted))
        else:
            reader.compare(devices, None, "no baseline was asked for")
    except BaselineError as error:
        module.fail_json(msg=str(error))
    module.exit_json(changed=False, **found.document())


if __name__ == "__main__":
    main()
