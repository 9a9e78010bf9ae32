#!/usr/bin/python
# Copyright (c) 2026, the Ringmaster authors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: storage_tuning
short_description: Read-ahead and IO scheduler of the disks under a directory
version_added: 0.1.0
description:
  - Finds the block device that a directory lies on, and the disks that this lies on, and sets the device's read-ahead
    and each disk's IO scheduler by its kind.
  - Where no block device can be found (overlay, tmpfs, NFS, btrfs, ZFS, or inside a container) nothing is changed, and
    RV(unavailable) says why.
  - The values hold until the next boot; RV(rules) are the rules for udev that make them again.
options:
  path:
    description:
      - Directory. If it is missing, the nearest one above it that is there.
    type: path
    required: true
  read_ahead_kb:
    description:
      - Read-ahead of the device that the directory's file system is on, in KiB, 0 to 1048576. 0 leaves it as it is.
    type: int
    default: 4096
  schedulers:
    description:
      - For each kind of disk the schedulers by preference, of which the first one is taken that the kernel has for the
        disk. A kind with an empty list is left as it is. Virtual disks are always left as they are.
    type: dict
    default: {nvme: [none], solid_state: [mq-deadline], rotating: [bfq, mq-deadline]}
    suboptions:
      nvme:
        description: For NVMe.
        type: list
        elements: str
        default: [none]
      solid_state:
        description: For SATA and SAS disks that do not rotate.
        type: list
        elements: str
        default: [mq-deadline]
      rotating:
        description: For SATA and SAS disks that rotate.
        type: list
        elements: str
        default: [bfq, mq-deadline]
  values:
    description:
      - Instead, exactly these values by device, in the form of RV(before). Devices that are gone are passed over.
    type: dict
attributes:
  diff_mode:
    description: Shows the values before and after.
    support: full
extends_documentation_fragment:
  - ringmaster.inference.attributes.setter
  - ringmaster.inference.attributes
author:
  - Ringmaster authors (@ringmaster)
"""

EXAMPLES = r"""
- name: The disks under the models read from beginning to end
  ringmaster.inference.storage_tuning:
    path: /srv/ringmaster/models
  register: storage

- name: They do so after the next boot
  ansible.builtin.copy:
    content: "{{ storage.rules }}"
    dest: /etc/udev/rules.d/90-models.rules
    mode: "0644"
  when: storage.rules != ''
"""

RETURN = r"""
before:
  description: The values that were found, by device, of those that are wanted.
  type: dict
  returned: success
  sample: {nvme0n1: {scheduler: mq-deadline, read_ahead_kb: "128"}}
after:
  description: The values now, in check mode those that would be.
  type: dict
  returned: success
  sample: {nvme0n1: {scheduler: none, read_ahead_kb: "4096"}}
device:
  description: Device that the directory's file system is on, null if it is not known.
  type: str
  returned: success
  sample: dm-0
disks:
  description: Kind of each disk under it, V(nvme), V(solid_state), V(rotating) or V(other).
  type: dict
  returned: success
  sample: {nvme0n1: nvme}
unavailable:
  description: Why something was left as it is, by the directory or by device and setting.
  type: dict
  returned: success
  sample: {/srv/ringmaster/models: "a file system without a block device (overlay, tmpfs, NFS, btrfs, ZFS)"}
rules:
  description: Rules for udev that make these values whenever one of the devices appears, empty if there are none.
  type: str
  returned: success
  sample: |
    ACTION=="add|change", SUBSYSTEM=="block", ENV{DEVTYPE}=="disk", ATTR{wwid}=="eui.0025385b21404f25", …
"""

from typing import Any

from ansible.module_utils.basic import AnsibleModule

from ansible_collections.ringmaster.inference.plugins.module_utils.file_tree import FileTree
from ansible_collections.ringmaster.inference.plugins.module_utils.host_tuning import container
from ansible_collections.ringmaster.inference.plugins.module_utils.storage import (
    MOST_READ_AHEAD_KB,
    READ_AHEAD_KB,
    SCHEDULERS,
    Setting,
    StorageError,
    StorageReader,
    rules,
    wanted,
    write,
)


def former(reader: StorageReader, values: dict[str, Any]) -> list[Setting]:
    """The settings that bring back O(values)."""
    settings = []
    for name, attributes in sorted(values.items()):
        device = reader.device(name)
        if device is None:
            continue
        found = {"scheduler": device.scheduler or "", "read_ahead_kb": str(device.read_ahead_kb)}
        settings += [
            Setting(device, attribute, value, str(attributes[attribute]))
            for attribute, value in found.items()
            if attribute in attributes
        ]
    return settings


def shown(settings: list[Setting], when: str) -> dict[str, dict[str, str]]:
    result: dict[str, dict[str, str]] = {}
    for setting in settings:
        result.setdefault(setting.device.name, {})[setting.attribute] = getattr(setting, when)
    return result


def perform(module: AnsibleModule, tree: FileTree) -> dict[str, Any]:
    """Set what is wanted; the result in the form of RETURN. Raises StorageError."""
    parameters = module.params
    kind = container(tree)
    reader = StorageReader(tree, "not known whether it is one" if kind is None else kind)
    storage = reader.find(parameters["path"])
    unavailable: dict[str, str] = {}
    if parameters["values"] is not None:
        settings = former(reader, parameters["values"]) if storage.device else []
    else:
        settings, unavailable = wanted(storage, parameters["read_ahead_kb"], parameters["schedulers"])
    differing = [setting for setting in settings if setting.before != setting.after]
    if not module.check_mode:
        for setting in differing:
            write(tree, setting)
    result: dict[str, Any] = {
        "changed": bool(differing),
        "before": shown(settings, "before"),
        "after": shown(settings, "after"),
        "device": storage.device.name if storage.device else None,
        "disks": {disk.name: disk.kind for disk in storage.disks},
        "unavailable": unavailable,
        "rules": rules(settings),
    }
    if module._diff:
        result["diff"] = {key: result[key] for key in ("before", "after")}
    return result


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "path": {"type": "path", "required": True},
            "read_ahead_kb": {"type": "int", "default": READ_AHEAD_KB},
            "schedulers": {
                "type": "dict",
                "default": {kind: list(names) for kind, names in SCHEDULERS.items()},
                "options": {
                    kind: {"type": "list", "elements": "str", "default": list(names)}
                    for kind, names in SCHEDULERS.items()
                },
            },
            "values": {"type": "dict"},
        },
        supports_check_mode=True,
    )
    read_ahead_kb = module.params["read_ahead_kb"]
    if not 0 <= read_ahead_kb <= MOST_READ_AHEAD_KB:
        module.fail_json(
            msg=f"Expected read_ahead_kb of 0 to {MOST_READ_AHEAD_KB}. Found {read_ahead_kb}. To do: give KiB."
        )
    try:
        module.exit_json(**perform(module, FileTree("/")))
    except StorageError as error:
        module.fail_json(msg=str(error))


if __name__ == "__main__":
    main()
