#!/usr/bin/python
# Copyright (c) 2026, the Ringmaster authors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: gpu_info
short_description: Read every NVIDIA card of a host and give a verdict on each
version_added: 0.1.0
description:
  - Reads through NVML what each card is (uuid, model, PCI address, serial, VBIOS) and how it is (memory, ECC, remapped
    rows, retired pages, PCIe link, temperatures, power, clock event reasons, MIG, processes, recovery action), and
    judges it by one table of rules. Each reason of a verdict says what to do and where the rule comes from.
  - A value that can't be known is null, and C(unknown) has the reason. It is never 0, never V(false), never a guess.
  - A card that fell off its bus, hangs, or is on the PCI bus but not in NVML is among the results, with its
    RV(gpus[].state).
  - Memory that is full, a link that an idle card slowed down, and power below the limit are no faults.
  - Each card is read in a process of its own time limit, so that a card that hangs its driver can't hold the module.
seealso:
  - module: ringmaster.inference.nvlink_info
  - module: ringmaster.inference.xid_info
  - module: ringmaster.inference.gpu_ecc
extends_documentation_fragment:
  - ringmaster.inference.nvml
  - ringmaster.inference.nvml.cards
  - ringmaster.inference.attributes
  - ringmaster.inference.attributes.reader
author:
  - Ringmaster authors (@ringmaster)
"""

EXAMPLES = r"""
- name: Every card is read
  ringmaster.inference.gpu_info:
  register: cards

- name: The host has its eight cards, and each is well
  ansible.builtin.assert:
    that:
      - cards.gpus | length == 8
      - cards.gpus | rejectattr('verdict', 'eq', 'ok') | list == []
    fail_msg: "{{ cards.gpus | map(attribute='reasons') | flatten | map(attribute='reason') | join('; ') }}"

- name: One card is read by its PCI address
  ringmaster.inference.gpu_info:
    gpus: ["0000:07:00.0"]
  register: card

- name: Nobody uses the card
  ansible.builtin.assert:
    that:
      - card.gpus[0].processes is not none
      - card.gpus[0].processes | length == 0

- name: The host is drained if a card has to be reset or worse
  ansible.builtin.command:
    argv: [/usr/local/sbin/drain-this-host]
  changed_when: true
  when: cards.worst in ['drain', 'reset', 'reboot', 'power_cycle', 'replace']

- name: What can't be known of a card is shown with its reason
  ansible.builtin.debug:
    var: item.unknown
  loop: "{{ cards.gpus }}"
  loop_control:
    label: "{{ item.pci_address }}"
"""

RETURN = r"""
driver_version:
  description: Version of the loaded driver. Null if unknown.
  type: str
  returned: success
  sample: 580.95.05
nvml_version:
  description: Version of NVML. Null if unknown.
  type: str
  returned: success
  sample: "13.580.95.05"
worst:
  description: The worst verdict of the cards that were read; V(ok) if there is none.
  type: str
  returned: success
  sample: ok
unknown:
  description: Why RV(driver_version) or RV(nvml_version) is null, by name.
  type: dict
  returned: success
  sample: {}
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
    card:
      description: The model's short name, as in the inventory's C(ringmaster_card). Null for a model that is not known.
      type: str
      sample: a100-80g
    serial:
      description: Serial number of the board.
      type: str
      sample: "1564720004631"
    vbios_version:
      description: Version of the VBIOS.
      type: str
      sample: 92.00.36.00.02
    state:
      description:
        - V(answers), V(lost) (fell off the bus), V(reset_required), V(failed) (NVML can't open it), V(no_answer) (not
          within O(timeout)), or V(not_listed) (on the PCI bus, but not in NVML).
      type: str
      sample: answers
    verdict:
      description:
        - The worst of RV(gpus[].reasons), from best to worst V(ok), V(watch) (go on, look again), V(unknown) (it can't
          be told whether the card is well), V(drain), V(reset), V(reboot), V(power_cycle), V(replace).
        - The recovery action that the driver tells outranks the rules on errors.
      type: str
      sample: watch
    reasons:
      description: Why the verdict is not V(ok), the worst first. Empty if it is.
      type: list
      elements: dict
      contains:
        rule:
          description: Name of the rule.
          type: str
          sample: row_remapping_pending
        verdict:
          description: Verdict by this rule alone.
          type: str
          sample: watch
        reason:
          description: What was found.
          type: str
          sample: a row is marked for remapping, which takes effect at its next reset
        action:
          description: What to do.
          type: str
          sample: go on; reset it at the next maintenance
        source:
          description: Where the rule comes from.
          type: str
          sample: XID 63
    memory_total_bytes:
      description: Size of the card's memory.
      type: int
      sample: 85899345920
    memory_used_bytes:
      description: Memory in use, the driver's own part included.
      type: int
      sample: 4194304
    memory_free_bytes:
      description: Memory that is free.
      type: int
      sample: 85895151616
    utilization_percent:
      description: Share of the last sampling period (a second at most) in which a kernel ran.
      type: int
      sample: 0
    performance_state:
      description: From 0 (full performance) to 15.
      type: int
      sample: 0
    temperature_celsius:
      description: Temperature of the GPU.
      type: int
      sample: 34
    temperature_memory_celsius:
      description: Temperature of the memory.
      type: int
      sample: 41
    temperature_slowdown_celsius:
      description: Temperature from which on the card slows down.
      type: int
      sample: 89
    temperature_shutdown_celsius:
      description: Temperature at which the card turns itself off.
      type: int
      sample: 92
    power_watts:
      description: Power drawn now.
      type: float
      sample: 61.2
    power_limit_watts:
      description: Power limit that is set.
      type: float
      sample: 400.0
    power_limit_default_watts:
      description: Power limit after a reset.
      type: float
      sample: 400.0
    power_limit_min_watts:
      description: Least power limit that can be set.
      type: float
      sample: 100.0
    power_limit_max_watts:
      description: Largest power limit that can be set.
      type: float
      sample: 400.0
    clock_event_reasons:
      description:
        - Why clocks are not higher, in C(nvidia-smi)'s words, among V(gpu_idle), V(applications_clocks_setting),
          V(sw_power_cap), V(hw_slowdown), V(sync_boost), V(sw_thermal_slowdown), V(hw_thermal_slowdown),
          V(hw_power_brake_slowdown), V(display_clocks_setting). A reason that has no name here is V(unknown_0x200) and
          the like.
      type: list
      elements: str
      sample: [gpu_idle]
    ecc_current:
      description: Whether ECC is on. Null for a card without ECC.
      type: bool
      sample: true
    ecc_pending:
      description: Whether ECC is on after the next reboot.
      type: bool
      sample: true
    ecc_corrected_volatile:
      description: Corrected ECC errors since the driver was loaded or the card was reset.
      type: int
      sample: 0
    ecc_corrected_aggregate:
      description: Corrected ECC errors in the card's life.
      type: int
      sample: 3
    ecc_uncorrected_volatile:
      description: Uncorrectable ECC errors since the driver was loaded or the card was reset.
      type: int
      sample: 0
    ecc_uncorrected_aggregate:
      description: Uncorrectable ECC errors in the card's life.
      type: int
      sample: 0
    remapped_rows_corrected:
      description: Memory rows that were remapped because of correctable errors. Null on cards that retire pages (T4).
      type: int
      sample: 0
    remapped_rows_uncorrected:
      description: Memory rows that were remapped because of uncorrectable errors.
      type: int
      sample: 1
    remapped_rows_pending:
      description: Whether a row is marked for remapping, which takes effect at the next reset.
      type: bool
      sample: true
    remapped_rows_failed:
      description: Whether remapping a row ever failed.
      type: bool
      sample: false
    remap_banks:
      description:
        - Memory banks by how many spare rows they still have, in C(nvidia-smi)'s words V(max), V(high), V(partial),
          V(low), V(none).
      type: dict
      sample: {max: 639, high: 1, partial: 0, low: 0, none: 0}
    retired_pages_single_bit:
      description: Pages that were retired because of several single-bit errors. Null on cards that remap rows.
      type: int
      sample: null
    retired_pages_double_bit:
      description: Pages that were retired because of a double-bit error.
      type: int
      sample: null
    retired_pages_pending:
      description: Whether a page is marked for retirement, which takes effect when the driver is loaded anew.
      type: bool
      sample: null
    pcie_width:
      description: Lanes of the PCIe link now.
      type: int
      sample: 16
    pcie_width_max:
      description: Most lanes that card and host can have together.
      type: int
      sample: 16
    pcie_generation:
      description: Generation (speed) of the PCIe link now. Idle cards lower it.
      type: int
      sample: 4
    pcie_generation_max:
      description: Highest generation that card and host can have together.
      type: int
      sample: 4
    pcie_replay_counter:
      description: PCIe replays since the driver was loaded or the card was reset.
      type: int
      sample: 0
    mig_current:
      description: Whether MIG is on. Null for cards that can't be partitioned.
      type: bool
      sample: false
    mig_pending:
      description: Whether MIG is on after the next reset.
      type: bool
      sample: false
    persistence_mode:
      description: Whether the driver keeps the card ready while nobody uses it.
      type: bool
      sample: true
    recovery_action:
      description:
        - What the driver itself recommends, among V(none), V(reset), V(reboot), V(drain_p2p), V(drain_and_reset),
          V(recover_imex_domain), V(bus_reset), V(system_reboot). Null if the driver does not tell. V(unknown_9) and the
          like are actions that this version does not know.
      type: str
      sample: none
    processes:
      description: Processes that have the card open for work.
      type: list
      elements: dict
      contains:
        pid:
          description: Process id, in the host's own numbers.
          type: int
          sample: 4711
        type:
          description: V(compute), V(graphics) or V(mps).
          type: str
          sample: compute
        name:
          description: The process' program.
          type: str
          sample: /usr/bin/python3
        memory_bytes:
          description: The card's memory that it uses.
          type: int
          sample: 81604378624
        unknown:
          description: Why C(name) or C(memory_bytes) is null, by name.
          type: dict
          sample: {}
    unknown:
      description: Why a field is null, by the field's name.
      type: dict
      sample: {retired_pages_pending: "this card has none, or its driver does not tell (not supported)"}
    unread:
      description: Those of RV(gpus[].unknown) that the card should have, but whose reading failed.
      type: list
      elements: str
      sample: []
"""

from typing import Any

from ansible.module_utils.basic import AnsibleModule

from ansible_collections.ringmaster.inference.plugins.module_utils.commands import CommandRunner
from ansible_collections.ringmaster.inference.plugins.module_utils.file_tree import FileTree
from ansible_collections.ringmaster.inference.plugins.module_utils.gpu import GpuReader, survey
from ansible_collections.ringmaster.inference.plugins.module_utils.gpu_health import judge, worst
from ansible_collections.ringmaster.inference.plugins.module_utils.nvml import (
    GpuError,
    Nvml,
    ReaderProcess,
    find_library,
)


def read(wanted: list[str], timeout: float) -> dict[str, Any]:
    """The result in the form of RETURN. Raises GpuError."""
    files = FileTree("/")
    with ReaderProcess(GpuReader(Nvml(find_library(), files), files), timeout) as process:
        found = survey(process.call, files, CommandRunner(), wanted)
    gpus = [{**card, **judge(card)} for card in found["gpus"]]
    return {**found, "gpus": gpus, "worst": worst([card["verdict"] for card in gpus])}


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
