#!/usr/bin/python
# Copyright (c) 2026, the Ringmaster authors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: nvlink_info
short_description: Read the NVLinks of a host's NVIDIA cards and compare them with what the cards should have
version_added: 0.1.0
description:
  - Reads through NVML the state, speed, version, peer and error counters of each NVLink, and compares them with what is
    known of the model of card (an A100-SXM4 has 12 links of 25 GB/s a direction, an L40S has none).
  - That a card has no NVLink is no fault. For a model that is not known here nothing is expected, and C(unknown) says
    so.
  - A value that can't be known is null, and C(unknown) has the reason.
seealso:
  - module: ringmaster.inference.gpu_info
  - module: ringmaster.inference.xid_info
extends_documentation_fragment:
  - ringmaster.inference.nvml
  - ringmaster.inference.nvml.cards
  - ringmaster.inference.attributes
  - ringmaster.inference.attributes.reader
author:
  - Ringmaster authors (@ringmaster)
"""

EXAMPLES = r"""
- name: Links of all cards are read
  ringmaster.inference.nvlink_info:
  register: nvlink

- name: Each card has the links that its model should have
  ansible.builtin.assert:
    that: nvlink.as_expected is true
    fail_msg: "{{ nvlink.deviations or nvlink.gpus | map(attribute='unknown') | list }}"

- name: A card whose links have to be recovered is shown
  ansible.builtin.debug:
    msg: "{{ item.0.pci_address }} link {{ item.1.link }}: {{ item.1.recovery_errors }} recoveries"
  loop: "{{ nvlink.gpus | rejectattr('links', 'none') | subelements('links') }}"
  loop_control:
    label: "{{ item.0.pci_address }} {{ item.1.link }}"
  when: item.1.recovery_errors | default(0, true) > 0

- name: Cards that one card's links lead to are known, for a reset of all of them together
  ansible.builtin.set_fact:
    peers: "{{ nvlink.gpus[0].links | map(attribute='peer_pci_address') | select | unique }}"
  when: nvlink.gpus[0].links is not none
"""

RETURN = r"""
as_expected:
  description:
    - V(true) if every card that was read has the links it should have, V(false) if one has not. Null if that can't be
      told of a card and no other deviates.
  type: bool
  returned: success
  sample: true
deviations:
  description: Deviations of all cards that were read, each with the card's PCI address.
  type: list
  elements: str
  returned: success
  sample: ["0000:07:00.0: link 3 is inactive, expected active"]
gpus:
  description: The cards in the order of their PCI addresses. Fields that can't be known are null.
  type: list
  elements: dict
  returned: success
  contains:
    index:
      description: NVML's index. Null for a card that NVML does not list.
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
      description: The card's name, as the driver tells it.
      type: str
      sample: NVIDIA A100-SXM4-80GB
    links:
      description: The card's links by number. Empty for a card without NVLink.
      type: list
      elements: dict
      contains:
        link:
          description: Number of the link.
          type: int
          sample: 0
        state:
          description: V(active), V(inactive), V(sleep) or V(active_traffic_disabled).
          type: str
          sample: active
        speed_mb_per_second:
          description: Speed in one direction, in megabytes (10^6) a second. Null for a link that is not active.
          type: int
          sample: 25000
        version:
          description: Version of NVLink.
          type: str
          sample: "3.1"
        peer_kind:
          description: What is at the other end, V(gpu), V(switch) or V(ibm_npu).
          type: str
          sample: switch
        peer_pci_address:
          description: PCI address of what is at the other end.
          type: str
          sample: "0000:c4:00.0"
        replay_errors:
          description: Packets that were sent again, since the driver was loaded or the card was reset.
          type: int
          sample: 0
        recovery_errors:
          description: Recoveries of the link.
          type: int
          sample: 0
        crc_flit_errors:
          description: CRC errors in flow control units.
          type: int
          sample: 0
        crc_data_errors:
          description: CRC errors in data.
          type: int
          sample: 0
        ecc_data_errors:
          description: ECC errors in data. Null on cards that do not count them.
          type: int
          sample: null
        unknown:
          description: Why a field is null, by the field's name.
          type: dict
          sample: {ecc_data_errors: NVML does not know this of this card (invalid argument)}
    links_active:
      description: How many links are active.
      type: int
      sample: 12
    expected:
      description: What is expected of a card of this model. Null for a model that is not known here.
      type: dict
      contains:
        links:
          description: Number of links.
          type: int
          sample: 12
        speed_mb_per_second:
          description: Least speed of a link in one direction, in megabytes (10^6) a second. Null without links.
          type: int
          sample: 25000
        bridge:
          description: Whether the links are active only where a bridge joins two cards; then none or all are.
          type: bool
          sample: false
    as_expected:
      description: Whether the card has the links it should have. Null if that can't be told.
      type: bool
      sample: true
    deviations:
      description: How the card differs from what is expected.
      type: list
      elements: str
      sample: []
    unknown:
      description: Why a field is null, by the field's name.
      type: dict
      sample: {}
"""

from typing import Any

from ansible.module_utils.basic import AnsibleModule

from ansible_collections.ringmaster.inference.plugins.module_utils.file_tree import FileTree
from ansible_collections.ringmaster.inference.plugins.module_utils.nvlink import NvlinkReader, survey_links
from ansible_collections.ringmaster.inference.plugins.module_utils.nvml import (
    GpuError,
    Nvml,
    ReaderProcess,
    find_library,
)


def read(wanted: list[str], timeout: float) -> dict[str, Any]:
    """The result in the form of RETURN. Raises GpuError."""
    files = FileTree("/")
    with ReaderProcess(NvlinkReader(Nvml(find_library(), files), files), timeout) as process:
        gpus = survey_links(process.call, files, wanted)
    answers = [card["as_expected"] for card in gpus]
    return {
        "gpus": gpus,
        "as_expected": False if False in answers else None if None in answers else True,
        "deviations": [
            f"{card['pci_address'] or card['index']}: {deviation}" for card in gpus for deviation in card["deviations"]
        ],
    }


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "gpus": {"type": "list", "elements": "str", "default": []},
            "timeout": {"type": "float", "default": 20},
        },
        supports_check_mode=True,
    )
    try:
        module.exit_json(changed=False, **read(module.params["gpus"], module.params["timeout"]))
    except GpuError as error:
        module.fail_json(msg=str(error))


if __name__ == "__main__":
    main()
