#!/usr/bin/python
# Copyright (c) 2026, the Ringmaster authors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: rdma_qos
short_description: Set what makes a RoCE port lossless, and keep it over reboots
version_added: 0.1.0
description:
  - Sets MTU, DSCP trust, the map from DSCP to priority, priority flow control, ECN, global pause, RoCE version and
    traffic
    class of one RoCE port. Options that are left out leave their setting as it is.
  - Reads first, sets only what differs, and reads back what it set. Everything is checked before anything is changed.
  - Uses C(dcb) of iproute2 or C(mlnx_qos) of NVIDIA's tools, whichever the host has, besides C(ethtool), C(ip),
    configfs and the files of NVIDIA's driver.
  - Neither driver nor card keeps these settings. With O(persistent=true) the unit
    C(ringmaster-rdma-qos@NETDEV.service) sets them at each boot and whenever the interface comes back. It holds the
    settings of the last run, as commands that can be read.
  - Refuses PFC, trust and map of a port whose settings C(lldpad) or the card's firmware negotiates (DCBX), since they
    would overwrite them.
options:
  netdev:
    description:
      - Network interface of the port, for example V(ens1f0np0). Not a VLAN or bond on it.
    type: str
    required: true
  state:
    description:
      - V(present) brings the port to the settings that are given.
      - V(absent) removes the unit and what keeps the MTU. The port keeps its settings until the next boot. What they
        were before is not known here; set them with O(persistent=false) to go back.
    type: str
    choices: [present, absent]
    default: present
  mtu:
    description:
      - MTU of the interface in bytes. RoCE's own MTU is derived from it. 1500 gives 1024, 4192 or more gives 4096. Use
        9000 on hosts, and 9216 on switches.
      - The interface stands still for a moment. Do not change the one that carries Ansible's connection without
        thought.
      - With O(persistent=true) it is kept by what manages the interface, which is a drop-in of systemd-networkd (if the
        C(.network) file is for this interface alone), a section in the configuration of NetworkManager, or else the
        unit.
    type: int
  trust:
    description:
      - What tells the priority of a packet. The in-tree mlx5 driver trusts DSCP while the map has an entry, so that
        V(dscp) needs one in O(dscp_to_priority), and V(pcp) removes all.
    type: str
    choices: [dscp, pcp]
  dscp_to_priority:
    description:
      - Priority (0 to 7) for each DSCP (0 to 63). Implies O(trust=dscp). Entries of other DSCPs stay.
    type: dict
  dscp_exclusive:
    description:
      - Whether entries that are not in O(dscp_to_priority) are removed.
    type: bool
    default: false
  pfc_priorities:
    description:
      - Priorities with priority flow control, all others without. An empty list turns it off. One is enough for RoCE.
    type: list
    elements: int
  ecn_priorities:
    description:
      - Priorities on which the port tells the sender of congestion and slows down itself, all others not.
      - Only NVIDIA's driver (MLNX_OFED, DOCA-OFED) can do this. With the inbox driver it is the matter of the firmware
        and is reported in RV(unsupported).
    type: list
    elements: int
  global_pause_rx:
    description:
      - Whether the port obeys pause frames for all traffic. Must be V(false) where PFC is used.
    type: bool
  global_pause_tx:
    description:
      - Whether the port sends pause frames for all traffic. Must be V(false) where PFC is used.
    type: bool
  roce_mode:
    description:
      - RoCE version of connections that are made with rdma_cm. NCCL makes its own and chooses by GID.
    type: str
    choices: [RoCE v2, IB/RoCE v1]
  traffic_class:
    description:
      - Traffic class, 0 to 255, of connections that are made with rdma_cm, and of all connections where NVIDIA's driver
        has a file for that. It is the DSCP times four, plus 2 for ECN. DSCP 26 gives 106.
      - NCCL has its own, C(NCCL_IB_TC).
    type: int
  dcbx:
    description:
      - V(keep) leaves the negotiation with whom it is. V(host) takes it from the card's firmware.
    type: str
    choices: [keep, host]
    default: keep
  required:
    description:
      - Settings that have to be possible. One that is wanted, not possible on this host and listed here is a failure;
        otherwise it is reported in RV(unsupported).
    type: list
    elements: str
    choices:
      - mtu
      - global_pause_rx
      - global_pause_tx
      - trust
      - dscp_to_priority
      - pfc_priorities
      - ecn_priorities
      - roce_mode
      - traffic_class
    default:
      - mtu
      - global_pause_rx
      - global_pause_tx
      - trust
      - dscp_to_priority
      - pfc_priorities
      - roce_mode
      - traffic_class
  persistent:
    description:
      - Whether the settings are kept over reboots. V(false) removes the unit of an earlier run.
    type: bool
    default: true
attributes:
  diff_mode:
    description: Shows the settings and the files that keep them, before and after.
    support: full
notes:
  - Run as root (C(become)).
  - C(lldpad) counts as owner of every port as soon as it runs.
  - PFC has to be set on the switches too, for the same priority.
seealso:
  - module: ringmaster.inference.rdma_info
extends_documentation_fragment:
  - ringmaster.inference.attributes.setter
  - ringmaster.inference.attributes
author:
  - Ringmaster authors (@ringmaster)
"""

EXAMPLES = r"""
- name: The port carries RoCE on priority 3, losslessly
  ringmaster.inference.rdma_qos:
    netdev: ens1f0np0
    mtu: 9000
    trust: dscp
    dscp_to_priority:
      26: 3
    pfc_priorities: [3]
    global_pause_rx: false
    global_pause_tx: false
    roce_mode: RoCE v2
    traffic_class: 106

- name: ECN is on, and the run fails where the driver can't do that
  ringmaster.inference.rdma_qos:
    netdev: ens1f0np0
    ecn_priorities: [3]
    required: [ecn_priorities]

- name: All RoCE ports of the host are known
  ringmaster.inference.rdma_info:
    gather: [qos]
  register: rdma

- name: All of them have PFC on priority 3, but not the one that carries Ansible
  ringmaster.inference.rdma_qos:
    netdev: "{{ item }}"
    dscp_to_priority: {26: 3}
    pfc_priorities: [3]
  loop: "{{ rdma.ports | selectattr('roce') | map(attribute='netdev') | difference(rdma.session_netdevs or []) }}"

- name: The negotiation is taken from the card's firmware
  ringmaster.inference.rdma_qos:
    netdev: ens1f0np0
    pfc_priorities: [3]
    dcbx: host

- name: PFC is off until the next boot, and nothing is kept over it
  ringmaster.inference.rdma_qos:
    netdev: ens1f0np0
    pfc_priorities: []
    persistent: false

- name: Nothing of an earlier run is kept over reboots
  ringmaster.inference.rdma_qos:
    netdev: ens1f0np0
    state: absent
"""

RETURN = r"""
netdev:
  description: The network interface.
  type: str
  returned: success
  sample: ens1f0np0
device:
  description: The RDMA device behind it.
  type: str
  returned: if O(state=present)
  sample: mlx5_0
port:
  description: Number of its port.
  type: int
  returned: if O(state=present)
  sample: 1
tool:
  description: What sets trust and PFC, V(dcb) or V(mlnx_qos). V(null) if the host has neither.
  type: str
  returned: if O(state=present)
  sample: dcb
settings:
  description:
    - The settings that were asked for, as they are in force after the run. In check mode, as they would be. Units and
      forms are those of the options. With O(dcbx=host) there is C(dcbx_owner), too.
  type: dict
  returned: if O(state=present)
  sample: {mtu: 9000, trust: dscp, dscp_to_priority: {"26": 3}, pfc_priorities: [3], global_pause_rx: false}
changed_settings:
  description: Those of them that were changed, or would be.
  type: list
  elements: str
  returned: if O(state=present)
  sample: [pfc_priorities]
unsupported:
  description: Settings that were asked for and that this host can't do, with the reason.
  type: dict
  returned: if O(state=present)
  sample: {ecn_priorities: "/sys/class/net/ens1f0np0/ecn/roce_np/enable: no such file"}
files:
  description: Files that keep the settings over reboots.
  type: list
  elements: str
  returned: success
  sample: [/etc/systemd/system/ringmaster-rdma-qos@ens1f0np0.service]
mtu_kept_by:
  description: What keeps the MTU, V(networkd), V(NetworkManager) or V(unit). V(null) if O(mtu) is not given or not
    kept.
  type: str
  returned: if O(state=present)
  sample: unit
failed_settings:
  description: Settings that could not be set, or read otherwise afterwards.
  type: list
  elements: str
  returned: if some were changed before a failure
  sample: [pfc_priorities]
in_force:
  description: Settings that are as they were asked for, after a failure.
  type: dict
  returned: if some were changed before a failure
  sample: {mtu: 9000}
not_in_force:
  description: Settings that are not, with their present values.
  type: dict
  returned: if some were changed before a failure
  sample: {pfc_priorities: []}
"""

from typing import Any

from ansible.module_utils.basic import AnsibleModule

from ansible_collections.ringmaster.inference.plugins.module_utils.commands import CommandRunner
from ansible_collections.ringmaster.inference.plugins.module_utils.dcb import TRUSTS
from ansible_collections.ringmaster.inference.plugins.module_utils.file_tree import FileTree
from ansible_collections.ringmaster.inference.plugins.module_utils.rdma_persistence import Managed, Persistence
from ansible_collections.ringmaster.inference.plugins.module_utils.rdma_qos import (
    ROCE_MODES,
    SETTINGS,
    RdmaQos,
    RdmaQosError,
    Wanted,
    check,
    check_netdev,
    parse_map,
)


def forget(parameters: dict[str, Any], keeper: Persistence, write: bool) -> dict[str, Any]:
    """O(state=absent)."""
    present = keeper.present()
    changed = not keeper.complete({})
    if changed and write:
        keeper.keep({})
    return {
        "changed": changed,
        "netdev": parameters["netdev"],
        "files": [],
        "diff": file_diffs(present, {}),
    }


def bring_about(parameters: dict[str, Any], qos: RdmaQos, keeper: Persistence, write: bool) -> dict[str, Any]:
    """O(state=present)."""
    wanted = wanted_settings(parameters)
    if not wanted.names and not wanted.take_dcbx:
        raise RdmaQosError(f"a setting for {parameters['netdev']}", "none", "give one, or state=absent")
    check(wanted)
    port = qos.find(parameters["netdev"])
    found = qos.quality.read(port)
    unsupported = qos.impossible(port, wanted, found)
    missing = {name: reason for name, reason in unsupported.items() if name in parameters["required"]}
    if missing:
        raise RdmaQosError(
            f"{', '.join(missing)} of {port.netdev} to be possible on this host",
            "; ".join(f"{name}: {reason}" for name, reason in missing.items()),
            "install iproute2 with dcb, or mlnx-tools, and ethtool; load kernel module rdma_cm for roce_mode and "
            "traffic_class; or leave the setting out of `required`",
        )
    wanted = wanted.without(unsupported)
    qos.check_port(port, wanted, found)
    mtu: Managed | None = None
    if wanted.mtu is not None and parameters["persistent"]:
        mtu = keeper.mtu_keeper(wanted.mtu)
    kept_by_unit = wanted.without(["mtu"]) if mtu and mtu.manager != "unit" else wanted
    actions = [action for step in qos.steps(port, kept_by_unit, found) for action in step.actions]
    files_before = keeper.present()
    files = keeper.wanted(port, actions, mtu) if parameters["persistent"] else {}
    files_differ = not keeper.complete(files)
    differing = qos.differences(port, wanted, found)

    names = [*wanted.names, *(["dcbx_owner"] if wanted.take_dcbx else [])]
    before = {name: qos.value(port, found, name) for name in names}
    if write and differing:
        after_quality = qos.apply(port, wanted, found, differing)
        after = {name: qos.value(port, after_quality, name) for name in names}
    else:
        after = {**before, **{name: in_result(name, target) for name, (_found, target) in differing.items()}}
    if write and files_differ:
        try:
            keeper.keep(files)
        except RdmaQosError as error:
            error.details["in_force"] = after
            raise
    return {
        "changed": bool(differing) or files_differ,
        "netdev": port.netdev,
        "device": port.device,
        "port": port.number,
        "tool": found.tool,
        "settings": after,
        "changed_settings": list(differing),
        "unsupported": unsupported,
        "files": sorted(files),
        "mtu_kept_by": mtu.manager if mtu else None,
        "warnings": pause_beside_pfc({**vars(found), **after}),
        "diff": [
            {
                "before_header": f"settings of {port.netdev}",
                "after_header": f"settings of {port.netdev}",
                "before": before,
                "after": after,
            },
            *file_diffs(files_before, files),
        ],
    }


def pause_beside_pfc(settings: dict[str, Any]) -> list[str]:
    """Warning about a port that has both, of which it can only use one."""
    if not settings["pfc_priorities"] or not (settings["global_pause_rx"] or settings["global_pause_tx"]):
        return []
    return ["Global pause is on beside priority flow control. Set global_pause_rx and global_pause_tx to false."]


def wanted_settings(parameters: dict[str, Any]) -> Wanted:
    """The settings in the options. Raises RdmaQosError for a map that is none."""
    values = {name: parameters[name] for name in SETTINGS}
    if values["dscp_to_priority"] is not None:
        values["dscp_to_priority"] = parse_map(values["dscp_to_priority"])
    return Wanted(**values, dscp_exclusive=parameters["dscp_exclusive"], take_dcbx=parameters["dcbx"] == "host")


def in_result(name: str, value: Any) -> Any:
    """A wanted value in the form of the result, whose keys are text."""
    return {str(dscp): value[dscp] for dscp in sorted(value)} if name == "dscp_to_priority" else value


def file_diffs(before: dict[str, str], after: dict[str, str]) -> list[dict[str, str]]:
    """Diffs of the files that keep the settings."""
    return [
        {
            "before_header": path,
            "after_header": path,
            "before": before.get(path, ""),
            "after": after.get(path, ""),
        }
        for path in sorted({*before, *after})
        if before.get(path) != after.get(path)
    ]


def perform(module: AnsibleModule, tree: FileTree, runner: CommandRunner) -> dict[str, Any]:
    """Do what the options ask for and return the result in the form of RETURN."""
    parameters = module.params
    check_netdev(parameters["netdev"])
    keeper = Persistence(tree, runner, parameters["netdev"])
    if parameters["state"] == "absent":
        result = forget(parameters, keeper, write=not module.check_mode)
    else:
        result = bring_about(parameters, RdmaQos(tree, runner), keeper, write=not module.check_mode)
    for warning in result.pop("warnings", []):
        module.warn(warning)
    if not module._diff:
        del result["diff"]
    return result


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "netdev": {"type": "str", "required": True},
            "state": {"type": "str", "choices": ["present", "absent"], "default": "present"},
            "mtu": {"type": "int"},
            "trust": {"type": "str", "choices": sorted(TRUSTS)},
            "dscp_to_priority": {"type": "dict"},
            "dscp_exclusive": {"type": "bool", "default": False},
            "pfc_priorities": {"type": "list", "elements": "int"},
            "ecn_priorities": {"type": "list", "elements": "int"},
            "global_pause_rx": {"type": "bool"},
            "global_pause_tx": {"type": "bool"},
            "roce_mode": {"type": "str", "choices": list(reversed(ROCE_MODES))},
            "traffic_class": {"type": "int"},
            "dcbx": {"type": "str", "choices": ["keep", "host"], "default": "keep"},
            "required": {
                "type": "list",
                "elements": "str",
                "choices": list(SETTINGS),
                "default": [name for name in SETTINGS if name != "ecn_priorities"],
            },
            "persistent": {"type": "bool", "default": True},
        },
        supports_check_mode=True,
    )
    try:
        module.exit_json(**perform(module, FileTree(), CommandRunner()))
    except RdmaQosError as error:
        module.fail_json(msg=str(error), **error.details)


if __name__ == "__main__":
    main()
