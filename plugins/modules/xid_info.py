#!/usr/bin/python
# Copyright (c) 2026, the Ringmaster authors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: xid_info
short_description: Read Xids, the faults that NVIDIA's driver writes into the kernel log, since a cursor
version_added: 0.1.0
description:
  - Reads the lines of the kernel log that tell of a card's faults, since a cursor or since the host's start, each with
    its meaning, its action and the card that it concerns.
  - The journal is read where there is one, with entries of former starts if the cursor is older. Without a journal the
    kernel's own ring is read, which has no cursor and forgets what is old.
  - What may be missing is said in RV(gap). That the log can't be read is never an empty list, see RV(events).
options:
  cursor:
    description:
      - RV(cursor) of a former call. Only what was written after it is read. Without it, all since the host's start.
      - If the journal no longer has it, all since the host's start is read, and RV(gap) says so.
    type: str
  cursor_file:
    description:
      - Absolute path of a file on the host that keeps the cursor from call to call. A file that is missing is like no
        cursor. It is written after each call, except in check mode; that is not a change.
      - Its directory must exist.
    type: path
  timeout:
    description:
      - Seconds that one card may take to tell who it is, more than 0.
    type: float
    default: 20
requirements:
  - To be root, or to be allowed to read the kernel log
  - >-
    For RV(events[].index), and for RV(events[].uuid) of every card, NVIDIA's driver and the Python library
    C(nvidia-ml-py); without them the driver's own list of cards is used
attributes:
  check_mode:
    description: Reads the same and does not write O(cursor_file).
    support: full
  diff_mode:
    description: Has nothing to show, because it changes nothing.
    support: none
  idempotent:
    description: Changes nothing however often it runs; O(cursor_file) is a bookmark and no state of the host.
    support: full
seealso:
  - module: ringmaster.inference.gpu_info
extends_documentation_fragment:
  - ringmaster.inference.attributes
author:
  - Ringmaster authors (@ringmaster)
"""

EXAMPLES = r"""
- name: Xids since the host's start are read
  ringmaster.inference.xid_info:
  register: xids

- name: No card has a fault that asks for more than a new start of the application
  ansible.builtin.assert:
    that:
      - xids.events is not none
      - xids.events | rejectattr('action', 'in', ['none', 'restart_application', 'watch']) | list == []
    fail_msg: "{{ xids.events | default([], true) | map(attribute='message') | list or xids.unknown }}"

- name: What is new since the last time is read
  ringmaster.inference.xid_info:
    cursor_file: /var/lib/ringmaster/xid.cursor
  register: news

- name: The operator is told which card needs what
  ansible.builtin.debug:
    msg: "{{ item.pci_slot }} (uuid {{ item.uuid }}): Xid {{ item.xid }}, {{ item.meaning }}. To do: {{ item.to_do }}"
  loop: "{{ news.events | default([], true) }}"
  loop_control:
    label: "{{ item.message }}"

- name: Xids of a test are those after this moment
  ringmaster.inference.xid_info:
    cursor: "{{ xids.cursor }}"
  register: of_the_test

- name: Nothing of the log is missing
  ansible.builtin.assert:
    that: of_the_test.gap is none
"""

RETURN = r"""
events:
  description:
    - One for each line, in the order of the log. Null if the log can't be read, with the reason in RV(unknown).
  type: list
  elements: dict
  returned: success
  contains:
    time:
      description: When the line was written, UTC. Null in the kernel's own ring.
      type: str
      sample: "2026-03-01T12:00:00.123456Z"
    since_boot_seconds:
      description: Seconds from the host's start to the line.
      type: float
      sample: 86400.5
    this_boot:
      description: Whether the line was written since the host's last start. An older one may be mended by that start.
      type: bool
      sample: true
    xid:
      description: The code. The line that says in words that a card has fallen off the bus has V(79), as its own Xid.
      type: int
      sample: 79
    pci_slot:
      description: PCI domain, bus and device as in the line, which leaves the function out.
      type: str
      sample: "0000:07:00"
    pci_address:
      description: The card's PCI address. Null if the host has no card in that slot.
      type: str
      sample: "0000:07:00.0"
    uuid:
      description: The card's uuid.
      type: str
      sample: GPU-5f1c0b1e-0a52-4d5e-9a63-2f0e8d9c7b11
    index:
      description: NVML's index of the card now. Null without NVML.
      type: int
      sample: 0
    model:
      description: The card's name.
      type: str
      sample: NVIDIA A100-SXM4-80GB
    pid:
      description: Process that the line names.
      type: int
      sample: 1896
    process:
      description: Name of the process, as it names itself.
      type: str
      sample: python3
    recovery_action:
      description:
        - For Xid 154 the recovery action that the driver now recommends, in the words of
          M(ringmaster.inference.gpu_info). Null for other codes.
      type: str
      sample: drain_and_reset
    message:
      description: The line, cut to 1000 characters, with U+FFFD for characters that can't be printed.
      type: str
      sample: "NVRM: Xid (PCI:0000:07:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus."
    meaning:
      description: What the code means. Null for a code that is not known here.
      type: str
      sample: the card has fallen off the bus
    action:
      description:
        - What to do, from harmless to grave V(none), V(restart_application), V(watch), V(report), V(reset_later) (at
          the next maintenance), V(drain), V(reset), V(reboot), V(power_cycle).
        - That of Xid 154 goes by the line's recovery action.
        - The recovery action that M(ringmaster.inference.gpu_info) shows outranks it.
      type: str
      sample: power_cycle
    to_do:
      description: The action in words.
      type: str
      sample: drain, power-cycle the host, check seating, power cables and PCIe; a GPU reset can't work
    unknown:
      description: Why a field is null, by the field's name.
      type: dict
      sample: {pid: the line names none}
unparsed:
  description: Lines that begin as an Xid line and go on in no known way. Null as RV(events).
  type: list
  elements: str
  returned: success
  sample: []
cursor:
  description: Where the next call goes on. Null if there is no journal.
  type: str
  returned: success
  sample: s=5c1f…;i=8f;b=9d0a…;m=5f5e100;t=5f3d8a1b2c3d4;x=ab12
source:
  description: V(journal) or V(kernel_ring).
  type: str
  returned: success
  sample: journal
start:
  description: Where reading began, V(cursor) or V(boot).
  type: str
  returned: success
  sample: cursor
gap:
  description: What may be missing, in words, because a cursor is gone or the log is too long. Null if nothing is.
  type: str
  returned: success
  sample: null
unknown:
  description: Why RV(events), RV(unparsed), RV(cursor), RV(source) or RV(start) is null, by name.
  type: dict
  returned: success
  sample: {}
"""

from typing import Any

from ansible.module_utils.basic import AnsibleModule

from ansible_collections.ringmaster.inference.plugins.module_utils.commands import CommandRunner
from ansible_collections.ringmaster.inference.plugins.module_utils.durable import replace
from ansible_collections.ringmaster.inference.plugins.module_utils.file_tree import FileTree
from ansible_collections.ringmaster.inference.plugins.module_utils.gpu import GpuReader, identities, unlisted
from ansible_collections.ringmaster.inference.plugins.module_utils.nvml import (
    GpuError,
    Nvml,
    ReaderProcess,
    find_library,
    time_limit,
)
from ansible_collections.ringmaster.inference.plugins.module_utils.xid import XidReader, attach

LONGEST_CURSOR = 1000


def read_cursor(path: str) -> str | None:
    """What the file holds; None if it is missing or empty. Raises GpuError."""
    try:
        with open(path, "rb") as file:
            content = file.read(LONGEST_CURSOR)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise refused(path, error) from error
    return content.decode("utf-8", "replace").strip() or None


def write_cursor(path: str, cursor: str) -> None:
    """Replace the file in one step. Raises GpuError."""
    try:
        replace(path, f"{cursor}\n", 0o644)
    except OSError as error:
        raise refused(path, error) from error


def refused(path: str, error: OSError) -> GpuError:
    return GpuError(
        f"to keep a cursor in {path}",
        str(error.strerror or error),
        "name a file in a directory that exists and that root can write",
    )


def cards(files: FileTree, timeout: float) -> tuple[list[dict[str, Any]], str]:
    """The host's cards, and why NVML does not tell them: then only the driver's files do."""
    try:
        with ReaderProcess(GpuReader(Nvml(find_library(), files), files), timeout) as process:
            return identities(process.call, files), ""
    except GpuError as error:
        found = unlisted([], files)
        for card in found:
            card["unknown"] = dict.fromkeys(card["unknown"], str(error))
        return found, str(error)


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "cursor": {"type": "str"},
            "cursor_file": {"type": "path"},
            "timeout": {"type": "float", "default": 20},
        },
        mutually_exclusive=[("cursor", "cursor_file")],
        supports_check_mode=True,
    )
    cursor, cursor_file = module.params["cursor"], module.params["cursor_file"]
    files = FileTree("/")
    try:
        time_limit(module.params["timeout"])
        before = read_cursor(cursor_file) if cursor_file else cursor
        result = XidReader(files, CommandRunner()).read(before)
        if result["events"]:
            attach(result["events"], *cards(files, module.params["timeout"]))
        if cursor_file and result["cursor"] and result["cursor"] != before and not module.check_mode:
            write_cursor(cursor_file, result["cursor"])
        module.exit_json(changed=False, **result)
    except GpuError as error:
        module.fail_json(msg=str(error))


if __name__ == "__main__":
    main()
