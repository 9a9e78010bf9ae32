#!/usr/bin/python
# Copyright (c) 2026, the Ringmaster authors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: rdma_info
short_description: RDMA devices and ports, their RoCE settings and counters, and packet loss over a window
version_added: 0.1.0
description:
  - Tells what RDMA devices a host has, how each port stands, which GID to use for RoCE v2, how priority flow control,
    DSCP trust, ECN and global pause are set, what the port has counted, and how often packets had to be sent again over
    a window.
  - Reads C(/sys/class/infiniband), configfs, C(ip), C(ethtool), C(ibv_devinfo), and C(dcb) or C(mlnx_qos), whichever
    the host has. A tool that is missing costs only what it alone can tell.
  - A value that can't be known is V(null), and C(unknown) of the same object holds the reason under its name. It is
    never 0, and never "off".
  - A host without RDMA devices is no error; it has empty lists.
options:
  devices:
    description:
      - RDMA devices to look at, for example V(mlx5_0). Empty means all.
    type: list
    elements: str
    default: []
  netdevs:
    description:
      - Network interfaces of the ports to look at, for example V(ens1f0np0). Empty means all.
    type: list
    elements: str
    default: []
  gather:
    description:
      - What to tell of each port besides what it is.
      - V(counters) are the counters as they stand. V(qos) are the settings of the port, which cost some commands a
        port.
    type: list
    elements: str
    choices: [counters, qos]
    default: [counters, qos]
  address:
    description:
      - IP address that the chosen GID has to stand for. By default the first IPv4 address of the interface, else a
        routable IPv6 address.
    type: str
  gid_netdev:
    description:
      - Interface for which RV(ports[].roce_v2_gid_index) is chosen, if it is another than the port's own, for example a
        VLAN on it, which has GIDs of its own.
    type: str
  window_seconds:
    description:
      - Takes two samples of the counters this many seconds apart and judges what happened in between. 60 or more is
        advised. The module waits that long.
    type: float
  sample_file:
    description:
      - Absolute path of a file on the host. The counters are compared with the samples that an earlier run kept there,
        and kept there for the next one, so that nobody has to wait.
      - In check mode the file is read and not written.
      - A window that is shorter than O(minimum_window_seconds) leaves the earlier sample in the file.
    type: path
  minimum_window_seconds:
    description:
      - A window since the samples of O(sample_file) that is shorter than this says nothing.
    type: float
    default: 60
  retransmit_threshold:
    description:
      - Retransmit event ratio over which a window is bad. V(0.0003) is 0.03 %.
    type: float
    default: 0.0003
  minimum_packets:
    description:
      - RoCE packets that have to go in one direction within a window. With fewer a single event would decide, and the
        verdict is V(insufficient_traffic).
    type: int
    default: 100000
attributes:
  check_mode:
    description: Changes nothing in any mode. Only O(sample_file), if it is given, is written, and not in check mode.
    support: full
  diff_mode:
    description: There is nothing to show.
    support: none
  idempotent:
    description: Never reports a change.
    support: full
notes:
  - Run as root (C(become)). Other users can't read the settings and the counters of C(ethtool) on many hosts.
  - There is no counter of lost packets. The card counts the events that follow from loss, and one event can stand for
    one lost packet or for mere reordering. Compare the ratio with itself, not with a loss rate of a switch.
  - C(lldpad) counts as owner of every port as soon as it runs.
seealso:
  - module: ringmaster.inference.rdma_qos
extends_documentation_fragment:
  - ringmaster.inference.attributes
author:
  - Ringmaster authors (@ringmaster)
"""

EXAMPLES = r"""
- name: RDMA ports are known
  ringmaster.inference.rdma_info:
  register: rdma

- name: Every RoCE port is up, with jumbo frames and PFC on priority 3
  ansible.builtin.assert:
    that:
      - item.state == 'ACTIVE'
      - item.roce_mtu_bytes == 4096
      - item.qos.trust == 'dscp'
      - item.qos.pfc_priorities == [3]
      - not item.qos.global_pause_rx
    fail_msg: "{{ item.netdev }}: {{ item.qos }}"
  loop: "{{ rdma.ports | selectattr('roce') }}"

- name: NCCL uses the GID of the port's IPv4 address
  ansible.builtin.lineinfile:
    path: /etc/nccl.conf
    regexp: ^NCCL_IB_GID_INDEX=
    line: NCCL_IB_GID_INDEX={{ rdma.ports[0].roce_v2_gid_index }}
  when: rdma.ports[0].roce_v2_gid_index is not none

- name: Loss over a minute is measured, and nothing else is read
  ringmaster.inference.rdma_info:
    window_seconds: 60
    gather: []
  register: minute

- name: No port loses packets
  ansible.builtin.assert:
    that: minute.ports | map(attribute='retransmission') | selectattr('over_threshold', 'eq', true) | length == 0

- name: Loss since the last run, without waiting
  ringmaster.inference.rdma_info:
    sample_file: /var/lib/ringmaster/rdma-samples.json
    minimum_window_seconds: 300
  register: since_last_run

- name: What could not be known is shown
  ansible.builtin.debug:
    msg: "{{ item.device }}: {{ item.unknown | combine(item.qos.unknown) }}"
  loop: "{{ since_last_run.ports }}"
"""

RETURN = r"""
devices:
  description: RDMA devices, in the order of their names.
  returned: success
  type: list
  elements: dict
  contains:
    device:
      description: Name of the RDMA device.
      type: str
      returned: always
      sample: mlx5_0
    model:
      description: Name of the card for C(hca_type).
      type: str
      returned: always
      sample: ConnectX-6 Dx
    hca_type:
      description: Type as the driver names it.
      type: str
      returned: always
      sample: MT4125
    firmware:
      description: Version of the firmware that runs. Compare it as numbers, not as text.
      type: str
      returned: always
      sample: 22.41.1000
    psid:
      description: Parameter-set identification of the board, for which firmware is made.
      type: str
      returned: always
      sample: MT_0000000359
    node_guid:
      description: GUID of the node.
      type: str
      returned: always
      sample: b83f:d203:00a1:b2c4
    node_type:
      description: Kind of node.
      type: str
      returned: always
      sample: CA
    pci_address:
      description: Address of its PCI function.
      type: str
      returned: always
      sample: "0000:3b:00.0"
    driver:
      description: Kernel driver of the PCI function.
      type: str
      returned: always
      sample: mlx5_core
    numa_node:
      description: Number of the NUMA node that the card is next to.
      type: int
      returned: always
      sample: 0
    unknown:
      description: Reason for each value that is V(null).
      type: dict
      returned: always
      sample: {}
ports:
  description: Ports of these devices.
  returned: success
  type: list
  elements: dict
  contains:
    device:
      description: Name of the RDMA device.
      type: str
      returned: always
      sample: mlx5_0
    port:
      description: Number of the port, from 1.
      type: int
      returned: always
      sample: 1
    netdev:
      description: Its network interface.
      type: str
      returned: always
      sample: ens1f0np0
    pci_address:
      description: Address of its PCI function.
      type: str
      returned: always
      sample: "0000:3b:00.0"
    function:
      description:
        - V(physical), V(virtual) (of SR-IOV) or V(sub). Trust, PFC and pause of a port belong to its physical function.
      type: str
      returned: always
      sample: physical
    numa_node:
      description: Number of the NUMA node that the card is next to.
      type: int
      returned: always
      sample: 0
    link_layer:
      description: V(Ethernet) or V(InfiniBand).
      type: str
      returned: always
      sample: Ethernet
    roce:
      description: Whether RDMA goes over Ethernet here, which the link layer tells.
      type: bool
      returned: always
      sample: true
    state:
      description: Logical state of the port.
      type: str
      returned: always
      sample: ACTIVE
    phys_state:
      description: Physical state of the link.
      type: str
      returned: always
      sample: LinkUp
    rate_gb_per_second:
      description: Speed of the link in gigabits a second.
      type: float
      returned: always
      sample: 100.0
    lanes:
      description: Number of lanes.
      type: int
      returned: always
      sample: 4
    generation:
      description: Signalling of each lane.
      type: str
      returned: always
      sample: EDR
    gids:
      description:
        - Occupied slots of the GID table. C(type) is V(RoCE v2) or V(IB/RoCE v1). C(address) is the IP address that the
          GID stands for, and V(null) on InfiniBand.
      type: list
      elements: dict
      returned: always
      sample:
        - index: 3
          gid: "0000:0000:0000:0000:0000:ffff:c0a8:d3f2"
          type: RoCE v2
          netdev: ens1f0np0
          address: 192.168.211.242
    gid_netdev:
      description: Interface for which the GID was chosen. The GIDs of a bond's ports belong to the bond.
      type: str
      returned: always
      sample: ens1f0np0
    roce_v2_gid_index:
      description:
        - Index of the GID to use for RoCE v2, the one of the interface's IPv4 address, else of a routable IPv6 address.
          Never the link-local one.
      type: int
      returned: always
      sample: 3
    roce_v2_gid_index_by_netdev:
      description: The same for every interface that has GIDs on this port, VLANs among them.
      type: dict
      returned: always
      sample: {ens1f0np0: 3, ens1f0np0.100: 5}
    mtu_bytes:
      description: MTU of the network interface in bytes.
      type: int
      returned: always
      sample: 9000
    roce_mtu_bytes:
      description: MTU of RDMA in bytes, one of 256, 512, 1024, 2048 and 4096.
      type: int
      returned: always
      sample: 4096
    roce_mtu_source:
      description:
        - V(ibv_devinfo) if the port itself says it; V(derived) if it was computed from the interface's MTU, as the
          kernel does it.
      type: str
      returned: always
      sample: derived
    qos:
      description: Settings of the port as they are in force.
      type: dict
      returned: if V(qos) is in O(gather)
      contains:
        tool:
          description: Tool that was asked, V(dcb) or V(mlnx_qos).
          type: str
          returned: always
          sample: dcb
        dcbx_owner:
          description:
            - Who decides about trust and PFC. V(host), V(firmware) (the card negotiates by itself) or V(lldpad).
          type: str
          returned: always
          sample: host
        trust:
          description: What tells the priority of a packet, V(dscp) or V(pcp).
          type: str
          returned: always
          sample: dscp
        dscp_to_priority:
          description: Priority (0 to 7) of each DSCP (0 to 63, as text) that has an entry.
          type: dict
          returned: always
          sample: {"26": 3}
        pfc_priorities:
          description: Priorities with priority flow control.
          type: list
          elements: int
          returned: always
          sample: [3]
        pfc_capacity:
          description: How many priorities can have it at the same time. C(mlnx_qos) does not tell it.
          type: int
          returned: always
          sample: 8
        ecn_priorities:
          description:
            - Priorities on which the port both tells the sender of congestion and slows down itself. Only NVIDIA's
              driver (MLNX_OFED, DOCA-OFED) tells it.
          type: list
          elements: int
          returned: always
          sample: [3]
        ecn_notification_priorities:
          description: Priorities on which the receiver tells the sender of congestion (notification point).
          type: list
          elements: int
          returned: always
          sample: [3]
        ecn_reaction_priorities:
          description: Priorities on which the sender slows down (reaction point).
          type: list
          elements: int
          returned: always
          sample: [3]
        global_pause_rx:
          description: Whether the port obeys pause frames for all traffic. It must be off where PFC is used.
          type: bool
          returned: always
          sample: false
        global_pause_tx:
          description: Whether the port sends them.
          type: bool
          returned: always
          sample: false
        roce_mode:
          description:
            - RoCE version of connections made with rdma_cm, V(RoCE v2) or V(IB/RoCE v1). The kernel shows it only once
              somebody made the device's folder in configfs.
          type: str
          returned: always
          sample: RoCE v2
        traffic_class:
          description: Traffic class of such connections, 0 to 255. It is the DSCP times four, plus 2 for ECN.
          type: int
          returned: always
          sample: 106
        driver_traffic_class:
          description: Traffic class that NVIDIA's driver gives all connections, 0 to 255.
          type: int
          returned: always
          sample: 106
        unknown:
          description: Reason for each value that is V(null).
          type: dict
          returned: always
          sample: {driver_traffic_class: "/sys/class/infiniband/mlx5_0/tc/1/traffic_class: no such file"}
    counters:
      description:
        - The port's counters as the kernel names them. C(port_rcv_data) and C(port_xmit_data) count words of four
          bytes, C(port_xmit_wait) ticks, the rest packets or events.
        - The error fields stop at their largest value. C(symbol_error), C(port_rcv_errors) and C(port_xmit_discards)
          have 16 bits, C(link_downed) and C(link_error_recovery) 8, C(local_link_integrity_errors) and
          C(excessive_buffer_overrun_errors) 4.
      type: dict
      returned: if V(counters) is in O(gather)
      sample: {link_downed: 0, port_rcv_data: 4711, port_xmit_data: 4712, symbol_error: 0}
    saturated_counters:
      description: Names of those that have reached their largest value and count no further.
      type: list
      elements: str
      returned: if V(counters) is in O(gather)
      sample: []
    received_bytes:
      description: C(port_rcv_data) in bytes.
      type: int
      returned: if V(counters) is in O(gather)
      sample: 18844
    sent_bytes:
      description: C(port_xmit_data) in bytes.
      type: int
      returned: if V(counters) is in O(gather)
      sample: 18848
    hw_counters:
      description:
        - The card's own counters of events. Queue counters have 32 bits and start again at 0; C(np_*) and C(rp_*) have
          64.
      type: dict
      returned: if V(counters) is in O(gather)
      sample: {local_ack_timeout_err: 0, np_cnp_sent: 12, out_of_sequence: 3, packet_seq_err: 0}
    ethtool_counters:
      description:
        - Counters of the network interface that concern the whole port. Packets, bytes or events; C(*_pause_duration)
          in microseconds.
      type: dict
      returned: if V(counters) is in O(gather)
      sample: {rx_discards_phy: 0, rx_vport_rdma_unicast_packets: 9000123, tx_vport_rdma_unicast_packets: 9000456}
    retransmission:
      description: What happened over the window. V(null) if none was asked for.
      type: dict
      returned: always
      contains:
        verdict:
          description:
            - V(measured), V(insufficient_traffic) or V(unknown). Unknown is a window in which host or driver started
              again or counters were reset, one that is too short, and a port that lacks the counters, as virtual
              functions do.
          type: str
          returned: always
          sample: measured
        ratio:
          description: The larger of the sender's and the receiver's ratio, 0 or more.
          type: float
          returned: always
          sample: 0.00002
        over_threshold:
          description: Whether that is over O(retransmit_threshold). V(null) unless the verdict is V(measured).
          type: bool
          returned: always
          sample: false
        threshold:
          description: The threshold.
          type: float
          returned: always
          sample: 0.0003
        seconds:
          description: Length of the window.
          type: float
          returned: always
          sample: 60.004
        sender:
          description:
            - The sender's part, with C(verdict), C(events) (sequence errors, acknowledgements that timed out, implied
              sequence errors), C(packets) and C(ratio). V(null) if the window was discarded.
          type: dict
          returned: always
          sample: {verdict: measured, events: 20, packets: 1000000, ratio: 0.00002, unknown: {}}
        receiver:
          description: The receiver's part, in the same form; its events are packets out of sequence.
          type: dict
          returned: always
          sample: {verdict: measured, events: 0, packets: 900000, ratio: 0.0, unknown: {}}
        local_drops:
          description: Packets that this port itself dropped for want of room. C(ratio) is of all packets received.
          type: dict
          returned: always
          sample:
            rx_discards_phy: 0
            rx_packets_phy: 900000
            ratio: 0.0
            rx_discards_by_priority: {"3": 0}
            unknown: {}
        host_starvation:
          description: Events in which a host, this one or the peer, had posted no place to receive into.
          type: dict
          returned: always
          sample: {out_of_buffer: 0, rnr_nak_retry_err: 0, unknown: {}}
        congestion:
          description:
            - Congestion notification packets and marked packets, and pause in microseconds by counter. C(pause_ratio)
              is the share of the window that the most paused priority stood still, 0 to 1.
          type: dict
          returned: always
          sample:
            np_cnp_sent: 12
            np_ecn_marked_roce_packets: 40
            rp_cnp_handled: 0
            rp_cnp_ignored: 0
            pause_microseconds: {rx_prio3_pause_duration: 600}
            pause_ratio: 0.00001
            unknown: {}
        corruption:
          description: Packets that arrived damaged, and symbol errors of the link.
          type: dict
          returned: always
          sample: {rx_icrc_encapsulated: 0, rx_crc_errors_phy: 0, rx_symbol_err_phy: 0, unknown: {}}
        unknown:
          description: Why there is no ratio.
          type: dict
          returned: always
          sample: {}
    unknown:
      description: Reason for each value that is V(null). A counter's name follows its group, as in
        C(counters.symbol_error).
      type: dict
      returned: always
      sample: {netdev: no network interface belongs to this port in this network namespace}
session_netdevs:
  description:
    - Interfaces that carry the SSH session of this very task, with those beneath them, as the ports of a bond. V(null)
      if the task came over another kind of connection.
  returned: success
  type: list
  elements: str
  sample: [eno1]
unknown:
  description: Why RV(session_netdevs) is V(null).
  returned: success
  type: dict
  sample: {}
"""

from typing import Any

from ansible.module_utils.basic import AnsibleModule

from ansible_collections.ringmaster.inference.plugins.module_utils import rdma_health
from ansible_collections.ringmaster.inference.plugins.module_utils.commands import CommandRunner
from ansible_collections.ringmaster.inference.plugins.module_utils.file_tree import FileTree
from ansible_collections.ringmaster.inference.plugins.module_utils.rdma_survey import (
    SUBSETS,
    RdmaSurvey,
    RdmaSurveyError,
    Wish,
)

# A module that waits longer than a day was given milliseconds.
LONGEST_WINDOW = 86400.0


def perform(module: AnsibleModule, tree: FileTree, runner: CommandRunner) -> dict[str, Any]:
    """Read what the options ask for and return the result in the form of RETURN."""
    parameters = module.params
    wish = Wish(
        devices=tuple(parameters["devices"]),
        netdevs=tuple(parameters["netdevs"]),
        gather=frozenset(parameters["gather"]),
        address=parameters["address"],
        gid_netdev=parameters["gid_netdev"],
        window_seconds=parameters["window_seconds"],
        sample_file=parameters["sample_file"],
        threshold=parameters["retransmit_threshold"],
        minimum_packets=parameters["minimum_packets"],
        minimum_window_seconds=parameters["minimum_window_seconds"],
    )
    for name, least, most in (
        ("window_seconds", 0.0, LONGEST_WINDOW),
        ("retransmit_threshold", 0.0, 1.0),
        ("minimum_packets", 1, float("inf")),
        ("minimum_window_seconds", 0.0, float("inf")),
    ):
        value = parameters[name]
        if value is not None and not least <= value <= most:
            raise RdmaSurveyError(f"{name} from {least:g} to {most:g}", f"{value:g}", "give a value in that range")
    return RdmaSurvey(tree, runner).take(wish, write=not module.check_mode)


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "devices": {"type": "list", "elements": "str", "default": []},
            "netdevs": {"type": "list", "elements": "str", "default": []},
            "gather": {"type": "list", "elements": "str", "choices": list(SUBSETS), "default": list(SUBSETS)},
            "address": {"type": "str"},
            "gid_netdev": {"type": "str"},
            "window_seconds": {"type": "float"},
            "sample_file": {"type": "path"},
            "minimum_window_seconds": {"type": "float", "default": rdma_health.MINIMUM_SECONDS},
            "retransmit_threshold": {"type": "float", "default": rdma_health.THRESHOLD},
            "minimum_packets": {"type": "int", "default": rdma_health.MINIMUM_PACKETS},
        },
        mutually_exclusive=[("window_seconds", "sample_file")],
        supports_check_mode=True,
    )
    try:
        module.exit_json(changed=False, **perform(module, FileTree(), CommandRunner()))
    except RdmaSurveyError as error:
        module.fail_json(msg=str(error))


if __name__ == "__main__":
    main()
