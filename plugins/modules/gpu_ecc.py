#!/usr/bin/python
# Copyright (c) 2026, the Ringmaster authors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: gpu_ecc
short_description: Turn ECC of NVIDIA cards on or off
version_added: 0.1.0
description:
  - Sets the ECC mode that a card has after the next reboot, if it is not what is desired, and reads it back. It never
    reboots and never resets; RV(reboot_required) says whether the desired state still waits for a reboot.
  - A card whose pending mode is the desired one already is not a change, also while its current mode is another.
  - Cards without ECC are in RV(unsupported).
  - No card is set before it is known that each of them can be.
options:
  state:
    description:
      - Desired state of ECC.
      - V(disabled) is refused for the A100, for which NVIDIA does not support it and where ECC costs no memory. On an
        L40S or a T4 it frees some memory and bandwidth, and errors in memory go unnoticed.
    type: str
    choices: [enabled, disabled]
    required: true
  gpus:
    description:
      - Cards, by uuid, by NVML's index or by PCI address in any usual form. All cards that NVML lists if empty.
    type: list
    elements: str
    default: []
  unsupported:
    description:
      - What to do about a card without ECC. V(report) only lists it in RV(unsupported), V(fail) fails before any card
        is changed.
    type: str
    choices: [report, fail]
    default: report
  timeout:
    description:
      - Seconds that one card may take to answer, more than 0.
    type: float
    default: 20
requirements:
  - To be root, if something has to be set
attributes:
  check_mode:
    description: Says what would be set and sets nothing.
    support: full
  diff_mode:
    description: Shows the pending mode of each card that changes.
    support: full
  idempotent:
    description: A second run changes nothing, before and after the reboot.
    support: full
seealso:
  - module: ringmaster.inference.gpu_info
extends_documentation_fragment:
  - ringmaster.inference.nvml
  - ringmaster.inference.attributes
author:
  - Ringmaster authors (@ringmaster)
"""

EXAMPLES = r"""
- name: ECC is on after the next reboot
  ringmaster.inference.gpu_ecc:
    state: enabled
  register: ecc

- name: The host is rebooted if that is what ECC waits for
  ansible.builtin.reboot:
  when: ecc.reboot_required

- name: ECC is in effect
  ringmaster.inference.gpu_ecc:
    state: enabled
  check_mode: true
  register: ecc_now
  failed_when: ecc_now is changed or ecc_now.reboot_required

- name: ECC of two L40S is off after the next reboot
  ringmaster.inference.gpu_ecc:
    state: disabled
    gpus: ["0000:17:00.0", GPU-5f1c0b1e-0a52-4d5e-9a63-2f0e8d9c7b11]

- name: A host with a card without ECC is refused
  ringmaster.inference.gpu_ecc:
    state: enabled
    unsupported: fail
"""

RETURN = r"""
reboot_required:
  description: Whether the current mode of a card is not its pending one. In check mode, whether that would be so.
  type: bool
  returned: success
  sample: true
gpus:
  description: The cards that have ECC.
  type: list
  elements: dict
  returned: success
  contains:
    index:
      description: NVML's index.
      type: int
      sample: 0
    uuid:
      description: The card's uuid.
      type: str
      sample: GPU-5f1c0b1e-0a52-4d5e-9a63-2f0e8d9c7b11
    pci_address:
      description: PCI domain, bus, device and function, with a domain of four digits, in small letters.
      type: str
      sample: "0000:07:00.0"
    model:
      description: The card's name.
      type: str
      sample: NVIDIA L40S
    before:
      description: Whether ECC was on (C(current)) and would be on after the next reboot (C(pending)).
      type: dict
      sample: {current: false, pending: false}
    after:
      description: The same after the run. In check mode, as it would be.
      type: dict
      sample: {current: false, pending: true}
    changed:
      description: Whether the pending mode was set.
      type: bool
      sample: true
    reboot_required:
      description: Whether the current mode is not the pending one.
      type: bool
      sample: true
unsupported:
  description: Cards without ECC.
  type: list
  elements: dict
  returned: success
  contains:
    index:
      description: NVML's index.
      type: int
      sample: 1
    uuid:
      description: The card's uuid.
      type: str
      sample: GPU-0b1e5f1c-0a52-4d5e-9a63-2f0e8d9c7b11
    pci_address:
      description: PCI address.
      type: str
      sample: "0000:65:00.0"
    model:
      description: The card's name.
      type: str
      sample: NVIDIA GeForce GTX 1080
    reason:
      description: What NVML says.
      type: str
      sample: this card has none, or its driver does not tell (not supported)
"""

from typing import Any

from ansible.module_utils.basic import AnsibleModule

from ansible_collections.ringmaster.inference.plugins.module_utils.file_tree import FileTree
from ansible_collections.ringmaster.inference.plugins.module_utils.gpu_ecc import EccReader, bring_ecc
from ansible_collections.ringmaster.inference.plugins.module_utils.nvml import (
    GpuError,
    Nvml,
    ReaderProcess,
    find_library,
)


def perform(parameters: dict[str, Any], write: bool) -> dict[str, Any]:
    """The result in the form of RETURN. Raises GpuError."""
    files = FileTree("/")
    with ReaderProcess(EccReader(Nvml(find_library(), files), files), parameters["timeout"]) as process:
        found = bring_ecc(
            process.call,
            files,
            parameters["state"] == "enabled",
            parameters["gpus"],
            refuse_without=parameters["unsupported"] == "fail",
            write=write,
        )
    return {
        "changed": any(card["changed"] for card in found["gpus"]),
        "reboot_required": any(card["reboot_required"] for card in found["gpus"]),
        **found,
    }


def pending(result: dict[str, Any], moment: str) -> dict[str, str]:
    """One side of the diff."""
    return {
        card["pci_address"] or str(card["index"]): "enabled" if card[moment]["pending"] else "disabled"
        for card in result["gpus"]
        if card["changed"]
    }


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "state": {"type": "str", "choices": ["enabled", "disabled"], "required": True},
            "gpus": {"type": "list", "elements": "str", "default": []},
            "unsupported": {"type": "str", "choices": ["report", "fail"], "default": "report"},
            "timeout": {"type": "float", "default": 20},
        },
        supports_check_mode=True,
    )
    try:
        result = perform(module.params, write=not module.check_mode)
        if module._diff and result["changed"]:
            header = "ECC after the next reboot"
            result["diff"] = {
                "before_header": header,
                "after_header": header,
                "before": pending(result, "before"),
                "after": pending(result, "after"),
            }
        module.exit_json(**result)
    except GpuError as error:
        module.fail_json(msg=str(error))


if __name__ == "__main__":
    main()
