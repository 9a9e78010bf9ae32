# SPDX-License-Identifier: GPL-3.0-or-later
"""Faults of simulated hardware, by the words in which people speak of them: `xid 79`, `roce loss 0.1 %`, `pfc off`.

The table `FAULTS` says for each what it does to the state. What lasts is recorded below ``faults/`` in the state, so
that `mend`, or the end that the fault was given, puts back what was there before. Counters that grow are advanced by
one process (`keep`) that runs only while there is something to advance or to end: the commands and the kernel's files
then tell the same numbers at every moment, and a ratio of two counters never mixes two clocks.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rehearsal.hardware import Machine, kernel_log
from rehearsal.hardware.lifecycle import LINK_ERRORS
from rehearsal.hardware.profiles import PORT_DEFAULTS
from rehearsal.hardware.state import ENVIRONMENT, TYPE_CHECKING, State

if TYPE_CHECKING:
    from rehearsal.hardware.state import Value

SERVICE = "ringmaster-rehearsal-faults.service"
TICK = 0.25  # seconds between two steps of growing counters
# RoCE packets a second of a busy port: 4 KiB each, about 13 Gbit/s. Any window of a few seconds has enough of them.
PACKETS = 50_000
PACKET_BYTES = 4096
# Counters of the adapter's queues have 32 bits; those of congestion (np_, rp_) have 64.
QUEUE_COUNTER = re.compile(r"ports/[0-9]+/hw_counters/(?!np_|rp_)")


class UnknownFaultError(Exception):
    """No fault, or no part of this machine, has that name; the message lists what there is."""


@dataclass
class Effect:
    """What a fault does: values until it ends, counts once, rates a second until it ends, and lines in the log."""

    values: dict[str, Value] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)
    rates: dict[str, float] = field(default_factory=dict)
    log: list[str] = field(default_factory=list)
    # Words of commands for the real network interface: now, and at the end.
    commands: list[list[str]] = field(default_factory=list)
    undo: list[list[str]] = field(default_factory=list)
    # Card that a process shall hold, and how many MiB of it.
    holder: tuple[str, int] | None = None


Build = Callable[[Machine, str, "dict[str, str]"], Effect]


@dataclass(frozen=True)
class Fault:
    """A fault: the words that name it (a regular expression), what it is about, and what it does.

    `about` is "card", "port", "device" (a card or a port) or "host". `at_boot`: it "stays" (broken hardware), "ends" (a
    boot cures it), or is "forgotten" (a setting that someone changed: nothing puts it back by itself).
    """

    words: str
    example: str
    about: str
    build: Build
    at_boot: str = "ends"


# -- effects -----------------------------------------------------------------------------------------------------------

REASONS = {
    "power cap": 0x4,
    "hardware": 0x8,
    "thermal": 0x20,
    "hardware thermal": 0x40,
    "power brake": 0x80,
}
RECOVERY = {
    "none": (0, "None"),
    "reset": (1, "GPU Reset Required"),
    "reboot": (2, "Node Reboot Required"),
    "drain p2p": (3, "Drain P2P"),
    "drain and reset": (4, "Drain and Reset"),
}
XIDS = {
    13: "pid=2117, name=python3, Graphics SM Warp Exception on (GPC 2, TPC 1, SM 0): Out Of Range Address",
    31: (
        "pid=2117, name=python3, Ch 00000008, intr 00000000. MMU Fault: ENGINE GRAPHICS GPCCLIENT_T1_0 faulted @ "
        "0x7f2b_4a000000. Fault is of type FAULT_PDE ACCESS_TYPE_VIRT_READ"
    ),
    43: "pid=2117, name=python3, Ch 00000008",
    45: "pid=2117, name=python3, Ch 00000010",
    48: "pid='<unknown>', name=<unknown>, DBE (double bit error) ECC Error",
    63: "pid=1896, Row Remapper: New row marked for remapping, reset gpu to activate.",
    64: "pid=1896, Row Remapper: Failed to remap a row.",
    74: "pid='<unknown>', name=<unknown>, NVLink: fatal error detected on link 0(0x0, 0x0, 0x10000, 0x0)",
    79: "pid='<unknown>', name=<unknown>, GPU has fallen off the bus.",
    92: "pid='<unknown>', name=<unknown>, High single-bit ECC error rate",
    94: "pid=2117, name=python3, Contained: SM (0x1). RST: No, D-RST: No",
    95: "pid=2117, name=python3, Uncontained: LTC TAG (0x2,0x0). RST: Yes, D-RST: No",
    119: "pid=2117, name=python3, Timeout after 6s of waiting for RPC response from GPU0 GSP! Expected function 76.",
}
# Codes after which the driver asks for a reset of the card.
RESET_XIDS = (46, 48, 62, 64, 95, 109, 110, 119, 120, 136, 140, 143, 155, 156, 158)


def _address(machine: Machine, index: str) -> str:
    return machine.state.text(f"gpus/{index}/pci_address")


def _xid_line(machine: Machine, index: str, code: int) -> str:
    where = _address(machine, index).rpartition(".")[0]
    return f"NVRM: Xid (PCI:{where}): {code}, {XIDS.get(code, f'pid=<unknown>, name=<unknown>, {code}')}"


def _action(machine: Machine, index: str, name: str) -> Effect:
    code, words = RECOVERY[name]
    where = _address(machine, index).rpartition(".")[0]
    line = f"NVRM: Xid (PCI:{where}): 154, GPU recovery action changed from 0x0 (None) to 0x{code:x} ({words})"
    return Effect(values={f"gpus/{index}/recovery_action": code}, log=[line])


def _xid(machine: Machine, index: str, given: dict[str, str]) -> Effect:
    code, gpu = int(given["code"]), f"gpus/{index}"
    effect = Effect(log=[_xid_line(machine, index, code)])
    if code == 79:
        effect.values[f"{gpu}/lost"] = 1
        effect.log.append(f"NVRM: GPU {_address(machine, index)}: GPU has fallen off the bus.")
    if code in (48, 94, 95):
        effect.counts.update(dict.fromkeys((f"{gpu}/ecc/{since}/uncorrected/dram" for since in _SINCE), 1))
    if code == 63:
        _pend_row(machine.state, index, effect)
    if code == 64 and machine.state.has(f"{gpu}/remapped_rows_failure"):
        effect.values[f"{gpu}/remapped_rows_failure"] = 1
    if code == 74:
        effect.counts.update(
            {f"{gpu}/nvlinks/{link}/replay_errors": 3 for link in machine.state.names(f"{gpu}/nvlinks")}
        )
    if code in RESET_XIDS:
        action = _action(machine, index, "reset")
        effect.values.update(action.values)
        effect.log += action.log
    return effect


_SINCE = ("volatile", "aggregate")


def _pend_row(state: State, index: str, effect: Effect) -> None:
    """A row waits to be remapped (on cards that retire pages: a page to be retired)."""
    gpu = f"gpus/{index}"
    if state.has(f"{gpu}/remapped_rows_pending"):
        effect.values[f"{gpu}/remapped_rows_pending"] = 1
        effect.counts[f"{gpu}/remapped_rows_uncorrectable"] = 1
        effect.counts[f"{gpu}/remapper_banks_high"] = 1
        effect.counts[f"{gpu}/remapper_banks_maximum"] = -1
    else:
        effect.values[f"{gpu}/retired_pages_pending"] = 1
        effect.values[f"{gpu}/retired_pages/1/{0x3F1A + state.integer('host/kernel_messages'):#x}"] = (
            time.time_ns() // 1000
        )


def _ecc_errors(machine: Machine, index: str, given: dict[str, str]) -> Effect:
    kind, count = given["kind"], int(given["count"] or 1)
    effect = Effect(counts={f"gpus/{index}/ecc/{since}/{kind}/dram": count for since in _SINCE})
    if kind == "uncorrected":
        contained = machine.state.text(f"gpus/{index}/mig_current") != ""  # data centre cards with containment have MIG
        effect.log = [_xid_line(machine, index, 94 if contained else 48), _xid_line(machine, index, 63)]
        _pend_row(machine.state, index, effect)
    return effect


def _ecc_off(_machine: Machine, index: str, _given: dict[str, str]) -> Effect:
    return Effect(values={f"gpus/{index}/ecc_current": 0, f"gpus/{index}/ecc_pending": 0})


def _row_pending(machine: Machine, index: str, _given: dict[str, str]) -> Effect:
    effect = Effect(log=[_xid_line(machine, index, 63)])
    _pend_row(machine.state, index, effect)
    return effect


def _throttle(machine: Machine, index: str, given: dict[str, str]) -> Effect:
    gpu, reason = f"gpus/{index}", given["reason"] or "thermal"
    effect = Effect(values={f"{gpu}/clocks_event_reasons": REASONS[reason], f"{gpu}/clock_graphics_mhz": 705})
    if "thermal" in reason:
        effect.values[f"{gpu}/temperature_celsius"] = machine.state.text(f"{gpu}/temperature_slowdown_celsius")
    return effect


def _peer_of_link(state: State, index: str, link: str) -> str:
    """Path of the other end's link: the same one in the row of those that join the two cards; empty at an NVSwitch."""
    here, remote = state.text(f"gpus/{index}/pci_address"), state.text(f"gpus/{index}/nvlinks/{link}/remote_address")
    number = [
        one
        for one in state.names(f"gpus/{index}/nvlinks")
        if state.text(f"gpus/{index}/nvlinks/{one}/remote_address") == remote
    ].index(link)
    for other in state.names("gpus"):
        if state.text(f"gpus/{other}/pci_address") == remote:
            links = f"gpus/{other}/nvlinks"
            back = [one for one in state.names(links) if state.text(f"{links}/{one}/remote_address") == here]
            return f"{links}/{back[number]}"
    return ""


def _nvlink(machine: Machine, index: str, given: dict[str, str]) -> Effect:
    state, link = machine.state, given["link"]
    here = f"gpus/{index}/nvlinks/{link}"
    if not state.has(here):
        raise UnknownFaultError(f"expected an NVLink of card {index}, found {link}")
    if given["what"] == "down":
        ends = [here, _peer_of_link(state, index, link)]
        return Effect(values={f"{end}/state": 0 for end in ends if end})
    return Effect(rates={f"{here}/{error}_errors": 20.0 for error in LINK_ERRORS[:3]})


def _holder(_machine: Machine, index: str, given: dict[str, str]) -> Effect:
    return Effect(holder=(index, int(given["mib"] or 4096)))


def _card_value(name: str, value: Value) -> Build:
    """A fault that is one value of a card."""
    return lambda _machine, index, _given: Effect(values={f"gpus/{index}/{name}": value})


def _given_value(name: str, word: str) -> Build:
    """A fault that is one value of a card, said in the words."""
    return lambda _machine, index, given: Effect(values={f"gpus/{index}/{name}": given[word]})


def _memory_full(machine: Machine, index: str, _given: dict[str, str]) -> Effect:
    gpu = f"gpus/{index}"
    room = machine.state.integer(f"{gpu}/memory_total_mib") - machine.state.integer(f"{gpu}/memory_reserved_mib")
    return Effect(values={f"{gpu}/memory_used_mib": room - 512})


def _lost(_machine: Machine, index: str, given: dict[str, str]) -> Effect:
    del given
    return Effect(values={f"gpus/{index}/lost": 1})


def _new_uuid(machine: Machine, index: str, _given: dict[str, str]) -> Effect:
    former = machine.state.text(f"gpus/{index}/uuid")
    return Effect(
        values={f"gpus/{index}/uuid_after_reset": f"{former[:-4]}{'beef' if former[-4:] != 'beef' else 'cafe'}"}
    )


def _recovery(machine: Machine, index: str, given: dict[str, str]) -> Effect:
    return _action(machine, index, given["action"])


def _function(machine: Machine, device: str) -> str:
    """PCI address of a card or port that `device` names: ``gpus/2``, ``ports/0``."""
    return machine.state.text(f"{device}/pci_address")


def _chain(machine: Machine, address: str) -> Iterator[str]:
    while address:
        yield address
        address = machine.state.text(f"pci/{address}/above")


def _aer(machine: Machine, device: str, given: dict[str, str]) -> Effect:
    """Errors on the link of a device: both its ends see them, and the root port reports them."""
    function, *above = _chain(machine, _function(machine, device))
    root = above[-1]
    if given["what"] == "storm":
        rates = {f"pci/{function}/aer/correctable/BadTLP": 200.0, f"pci/{above[0]}/aer/correctable/RxErr": 300.0}
        line = f"pcieport {root}: AER: Multiple Correctable error message received from {function}"
        return Effect(rates={**rates, f"pci/{root}/aer/reported/correctable": 500.0}, log=[line])
    severity, name = given["what"], {"fatal": "DLP", "nonfatal": "CmpltTO"}[given["what"]]
    words = {"fatal": "Fatal", "nonfatal": "Non-Fatal"}[severity]
    return Effect(
        counts={f"pci/{function}/aer/{severity}/{name}": 1, f"pci/{root}/aer/reported/{severity}": 1},
        log=[f"pcieport {root}: AER: Uncorrectable ({words}) error message received from {function}"],
    )


def _link(machine: Machine, device: str, given: dict[str, str]) -> Effect:
    """A PCIe link that came up narrower or slower; the functions of one adapter share theirs."""
    name = {"width": "pcie_width", "generation": "pcie_generation"}[given["what"]]
    if device.startswith("gpus/"):
        return Effect(values={f"{device}/{name}": given["value"]})
    slot = _function(machine, device)[:-1]
    functions = [address for address in machine.state.names("pci") if address.startswith(slot)]
    return Effect(values={f"pci/{address}/{name}": given["value"] for address in functions})


def _traffic(port: str) -> dict[str, float]:
    rates = {
        f"{port}/{group}": float(PACKETS)
        for group in (
            *("ethtool/tx_vport_rdma_unicast_packets", "ethtool/rx_vport_rdma_unicast_packets"),
            *("ethtool/tx_packets_phy", "ethtool/rx_packets_phy"),
            *("counters/unicast_xmit_packets", "counters/unicast_rcv_packets"),
            *("counters/port_xmit_packets", "counters/port_rcv_packets"),
        )
    }
    for way in ("tx", "rx"):
        rates[f"{port}/ethtool/{way}_vport_rdma_unicast_bytes"] = float(PACKETS * PACKET_BYTES)
        rates[f"{port}/ethtool/{way}_prio3_packets"] = float(PACKETS)
    for name in ("port_xmit_data", "port_rcv_data"):
        rates[f"{port}/counters/{name}"] = PACKETS * PACKET_BYTES / 4  # counted in words of four octets
    rates[f"{port}/hw_counters/rx_write_requests"] = PACKETS / 16
    return rates


def _roce(_machine: Machine, device: str, given: dict[str, str]) -> Effect:
    rates, kind = _traffic(device), given["what"]
    ratio = float(given["percent"] or 0) / 100
    if kind == "loss":
        # One NAK for each packet that the peer missed, and what this side missed in turn.
        rates[f"{device}/hw_counters/packet_seq_err"] = PACKETS * ratio
        rates[f"{device}/hw_counters/out_of_sequence"] = PACKETS * ratio
    elif kind == "congestion":
        for name in ("np_ecn_marked_roce_packets", "np_cnp_sent", "rp_cnp_handled"):
            rates[f"{device}/hw_counters/{name}"] = PACKETS * 0.02
        rates[f"{device}/ethtool/rx_prio3_pause"] = 40.0
        rates[f"{device}/ethtool/rx_prio3_pause_duration"] = 90_000.0  # microseconds of each second
    elif kind == "drops":
        rates[f"{device}/ethtool/rx_discards_phy"] = 100.0
        rates[f"{device}/ethtool/rx_prio3_discards"] = 100.0
    return Effect(rates=rates)


def _port_value(**values: Value) -> Build:
    return lambda _machine, port, _given: Effect(values={f"{port}/{name}": value for name, value in values.items()})


def _port_down(machine: Machine, port: str, _given: dict[str, str]) -> Effect:
    netdev = machine.state.text(f"{port}/netdev")
    return Effect(
        values={f"{port}/link": 0},
        counts={f"{port}/counters/link_downed": 1, f"{port}/ethtool/link_down_events_phy": 1},
        commands=[["ip", "link", "set", netdev, "down"]],
        undo=[["ip", "link", "set", netdev, "up"]],
    )


def _mtu(machine: Machine, port: str, given: dict[str, str]) -> Effect:
    netdev = machine.state.text(f"{port}/netdev")
    former = machine.tree.read(f"sys/class/net/{netdev}/mtu")
    words = ["ip", "link", "set", netdev, "mtu"]
    return Effect(commands=[[*words, given["mtu"]]], undo=[[*words, former]])


def _lldpad(_machine: Machine, _host: str, _given: dict[str, str]) -> Effect:
    # A shell's own name is that of the file it was started as: enough for who looks for the agent.
    start = ["systemd-run", "--quiet", "--collect", "--unit=lldpad", "/usr/local/lib/ringmaster-rehearsal/lldpad"]
    return Effect(commands=[start], undo=[["systemctl", "stop", "lldpad"]])


def _host_value(path: str, value: Value) -> Build:
    return lambda _machine, _host, _given: Effect(values={path: value})


def _nvml_error(_machine: Machine, _host: str, given: dict[str, str]) -> Effect:
    return Effect(values={f"errors/{given['function']}": given["code"]})


_NUMBER = r"[0-9]+"
FAULTS = (
    Fault(rf"xid (?P<code>{_NUMBER})", "xid 79", "card", _xid),
    Fault(r"lost card for good", "lost card for good", "card", _lost, "stays"),
    Fault(r"(lost card|card lost)", "lost card", "card", _lost),
    Fault(r"(hung nvml|nvml hung)", "hung nvml", "card", _card_value("hang", 1)),
    Fault(rf"slow nvml (?P<ms>{_NUMBER}) ms", "slow nvml 500 ms", "card", _given_value("busy_milliseconds", "ms")),
    Fault(
        rf"nvml error (?P<code>{_NUMBER}) in (?P<function>nvml[A-Za-z0-9_]+)",
        *("nvml error 10 in nvmlDeviceGetPowerUsage", "host", _nvml_error),
    ),
    Fault(r"driver unloaded", "driver unloaded", "host", _host_value("driver/loaded", 0)),
    Fault(rf"nvlink (?P<link>{_NUMBER}) (?P<what>down)", "nvlink 3 down", "card", _nvlink, "stays"),
    Fault(rf"nvlink (?P<link>{_NUMBER}) (?P<what>errors)", "nvlink 3 errors", "card", _nvlink, "stays"),
    Fault(
        rf"ecc (?P<kind>corrected|uncorrected)( (?P<count>{_NUMBER}))?",
        "ecc uncorrected 1",
        "card",
        _ecc_errors,
        "ends",
    ),
    Fault(r"ecc off", "ecc off", "card", _ecc_off, "forgotten"),
    Fault(r"(row )?remap pending", "row remap pending", "card", _row_pending),
    Fault(r"(row )?remap failure", "row remap failure", "card", _card_value("remapped_rows_failure", 1), "stays"),
    Fault(
        r"throttle( (?P<reason>power cap|power brake|hardware thermal|hardware|thermal))?",
        *("throttle thermal", "card", _throttle),
    ),
    Fault(r"process holds( a card| card)?( (?P<mib>[0-9]+) mib)?", "process holds a card 4096 MiB", "card", _holder),
    Fault(r"memory full", "memory full", "card", _memory_full),
    Fault(
        r"recovery action (?P<action>reset|reboot|drain p2p|drain and reset)",
        *("recovery action drain and reset", "card", _recovery),
    ),
    Fault(r"persistence off", "persistence off", "card", _card_value("persistence", 0), "forgotten"),
    Fault(
        rf"reset fails (?P<times>{_NUMBER}) times",
        "reset fails 2 times",
        "card",
        _given_value("reset_failures", "times"),
    ),
    Fault(r"uuid changes", "uuid changes", "card", _new_uuid, "forgotten"),
    Fault(
        r"card gone after reset", "card gone after reset", "card", _card_value("present_after_reset", 0), "forgotten"
    ),
    Fault(r"aer (?P<what>storm|fatal|nonfatal)", "aer storm", "device", _aer),
    Fault(r"pcie (?P<what>width|generation) (?P<value>[0-9]+)", "pcie width 8", "device", _link, "stays"),
    Fault(r"roce (?P<what>loss) (?P<percent>[0-9]+(\.[0-9]+)?) ?%", "roce loss 0.1 %", "port", _roce),
    Fault(r"roce (?P<what>traffic|congestion|drops)(?P<percent>)", "roce traffic", "port", _roce),
    Fault(
        r"pfc off",
        "pfc off",
        "port",
        _port_value(pfc=PORT_DEFAULTS["pfc"], buffer=PORT_DEFAULTS["buffer"]),
        "forgotten",
    ),
    Fault(r"trust pcp", "trust pcp", "port", _port_value(trust="pcp", dscp_priority=""), "forgotten"),
    Fault(r"global pause on", "global pause on", "port", _port_value(pause_rx=1, pause_tx=1), "forgotten"),
    Fault(r"dcbx firmware", "dcbx firmware", "port", _port_value(dcbx="firmware"), "stays"),
    Fault(r"mtu (?P<mtu>[0-9]+)", "mtu 1500", "port", _mtu, "forgotten"),
    Fault(r"port down", "port down", "port", _port_down, "stays"),
    Fault(r"lldpad runs", "lldpad runs", "host", _lldpad),
)


# -- injecting and mending ---------------------------------------------------------------------------------------------


def find(phrase: str) -> tuple[Fault, dict[str, str]]:
    """The fault that a phrase names, and what the phrase gives it. Raises UnknownFaultError."""
    words = " ".join(phrase.split())
    for fault in FAULTS:
        matched = re.fullmatch(fault.words, words, re.IGNORECASE)
        if matched:
            given = {name: value or "" for name, value in matched.groupdict().items()}
            return fault, {name: value if name == "function" else value.lower() for name, value in given.items()}
    examples = ", ".join(fault.example for fault in FAULTS)
    raise UnknownFaultError(f"expected a fault such as {examples}; found {words!r}")


def parts_of(state: State, about: str, target: str) -> list[str]:
    """The parts of a machine that a target means: a card's number, or a port's RDMA device or interface.

    Without a target: card 0, the adapter's first port for a fault of either, and all ports for a fault of ports.
    """
    cards = {index: f"gpus/{index}" for index in state.names("gpus")}
    ports: dict[str, str] = {}
    for index in state.names("ports"):
        ports[state.text(f"ports/{index}/device")] = ports[state.text(f"ports/{index}/netdev")] = f"ports/{index}"
    known = {"card": cards, "port": ports, "device": {**cards, **ports}, "host": {"": ""}}[about]
    if target:
        if target not in known:
            raise UnknownFaultError(f"expected one of {', '.join(known) or 'nothing'} after the host, found {target!r}")
        return [known[target]]
    return list(dict.fromkeys(known.values())) if about == "port" else list(known.values())[:1]


def inject(machine: Machine, phrase: str, target: str = "", seconds: float | None = None) -> list[str]:
    """Break something; gives the parts that it was done to. `seconds` None: until `mend`, or as the fault goes.

    Raises UnknownFaultError.
    """
    fault, given = find(phrase)
    parts = parts_of(machine.state, fault.about, target)
    if not parts:
        raise UnknownFaultError(f"expected a machine with a {fault.about}, found none on this one")
    until = None if seconds is None else time.time() + seconds
    for part in parts:
        index = part.partition("/")[2] if fault.about == "card" else part
        _apply(machine, fault, fault.build(machine, index, given), {"phrase": phrase, "part": part, "until": until})
    machine.tree.refresh()
    return parts


def _apply(machine: Machine, fault: Fault, effect: Effect, record: dict[str, Any]) -> None:
    state = machine.state
    record["before"] = {path: state.text(path) if state.has(path) else None for path in effect.values}
    record.update(at_boot=fault.at_boot, rates=effect.rates, undo=effect.undo)
    for path, value in effect.values.items():
        state.set(path, value)
    for path, amount in effect.counts.items():
        state.add(path, amount)
    for line in effect.log:
        kernel_log.write(state, machine.tree, line)
    _run(machine, effect.commands)
    if effect.holder:
        record["holder"] = _start_holder(machine, *effect.holder)
    if effect.values or effect.rates or effect.undo or effect.holder:
        numbers = [int(name) for name in state.names("faults")]
        state.set(f"faults/{max(numbers, default=0) + 1}", json.dumps(record))


def _run(machine: Machine, commands: list[list[str]]) -> None:
    """Run commands on the real host; below another root there are no interfaces or units to change."""
    if str(machine.root) == "/":
        for command in commands:
            subprocess.run(command, check=False, capture_output=True)


def _start_holder(machine: Machine, index: str, mib: int) -> str:
    """Start a process that holds a card; gives the unit's name, or the process' number where there is no systemd."""
    minor = machine.state.text(f"gpus/{index}/minor_number")
    device = str(machine.root / f"dev/nvidia{minor}")
    command = [sys.executable, "-m", "rehearsal.hardware.holder", index, str(mib), device]
    variables = {"PYTHONPATH": str(Path(__file__).parents[2]), ENVIRONMENT: str(machine.state.folder)}
    if str(machine.root) == "/":
        unit = f"ringmaster-rehearsal-holder-{index}.service"
        options = [f"--setenv={name}={value}" for name, value in variables.items()]
        _run(machine, [["systemd-run", "--quiet", "--collect", f"--unit={unit}", *options, *command]])
        return unit
    started = subprocess.run(
        ["sh", "-c", '"$@" >/dev/null 2>&1 & echo $!', "sh", *command],
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        check=True,
    )
    return started.stdout.strip()


def records(machine: Machine) -> dict[str, dict[str, Any]]:
    """What is broken now: number → phrase, part, end and what was there before."""
    texts = {name: machine.state.text(f"faults/{name}") for name in machine.state.names("faults")}
    return {name: json.loads(text) for name, text in texts.items() if text}  # one may end while others are read


def mend(machine: Machine, target: str = "") -> int:
    """End the faults of a part, or all; gives how many there were. Counts and log lines stay, as in life."""
    parts = None if not target else parts_of(machine.state, "device", target)
    ended = [name for name, record in records(machine).items() if parts is None or record["part"] in parts]
    # The newest first: each puts back what it found.
    for name in reversed(ended):
        _end(machine, name)
    machine.tree.refresh()
    return len(ended)


def _end(machine: Machine, name: str) -> None:
    record = records(machine)[name]
    _put_back(machine.state, record["before"])
    _run(machine, record["undo"])
    holder = record.get("holder", "")
    if holder.endswith(".service"):
        _run(machine, [["systemctl", "stop", holder]])
    elif holder:
        subprocess.run(["kill", holder], check=False, capture_output=True)
    machine.state.remove(f"faults/{name}")


def _put_back(state: State, before: dict[str, str | None]) -> None:
    for path, value in before.items():
        if value is None:
            state.remove(path)
        else:
            state.set(path, value)


def boot(machine: Machine) -> None:
    """What a boot makes of the faults. Called after the state was started anew."""
    for name, record in records(machine).items():
        machine.state.remove(f"faults/{name}")
        if record["at_boot"] == "ends":
            _put_back(machine.state, record["before"])
        elif record["at_boot"] == "stays":
            _put_back(machine.state, record["before"])
            if record["until"] is not None and record["until"] <= time.time():
                continue
            fault, given = find(record["phrase"])
            index = record["part"].partition("/")[2] if fault.about == "card" else record["part"]
            effect = fault.build(machine, index, given)
            effect.counts, effect.log = {}, []
            _apply(machine, fault, effect, {key: record[key] for key in ("phrase", "part", "until")})


# -- time --------------------------------------------------------------------------------------------------------------


def advance(machine: Machine, seconds: float, remainders: dict[str, float] | None = None) -> None:
    """Let counters grow for so long. `remainders` keeps what is left of a count from one call to the next."""
    left = {} if remainders is None else remainders
    touched = set()
    for record in records(machine).values():
        for path, rate in record["rates"].items():
            whole, left[path] = divmod(left.get(path, 0.0) + rate * seconds, 1)
            count = machine.state.integer(path) + int(whole)
            machine.state.set(path, count % (1 << 32) if QUEUE_COUNTER.match(path) else count)
            touched.add("/".join(path.split("/")[:2]))
    for part in touched:
        kind, name = part.split("/")
        if kind == "ports":
            machine.tree.refresh_counters(name)
        elif kind == "pci":
            machine.tree.refresh_aer(name)


def keep(machine: Machine) -> None:
    """Advance counters and end faults in time, until there is nothing left to advance or to end."""
    remainders: dict[str, float] = {}
    former = time.monotonic()
    while True:
        active = records(machine)
        for name in [name for name, one in active.items() if one["until"] is not None and one["until"] <= time.time()]:
            _end(machine, name)
            machine.tree.refresh()
            active.pop(name)
        ends = [record["until"] for record in active.values() if record["until"] is not None]
        grows = any(record["rates"] for record in active.values())
        if not grows and not ends:
            return
        time.sleep(TICK if grows else max(0.05, min(ends) - time.time()))
        now = time.monotonic()
        advance(machine, now - former, remainders)
        former = now


def main(arguments: list[str]) -> int:
    """The program on a host: ``keep``, ``mend [TARGET]`` or ``inject SECONDS TARGET PHRASE`` ("-" for none)."""
    machine = Machine.of_this_host()
    if arguments[0] == "keep":
        keep(machine)
        return 0
    try:
        if arguments[0] == "mend":
            print(f"{mend(machine, ''.join(arguments[1:]))} faults ended")
        else:
            seconds, target, phrase = arguments[1:]
            parts = inject(machine, phrase, target.strip("-"), None if seconds == "-" else float(seconds))
            print(", ".join(_name(machine.state, part) for part in parts))
    except UnknownFaultError as error:
        print(error, file=sys.stderr)
        return 2
    subprocess.run(["systemctl", "restart", "--no-block", SERVICE], check=False)
    return 0


def _name(state: State, part: str) -> str:
    if part.startswith("gpus/"):
        return f"card {part[5:]} ({state.text(f'{part}/pci_address')})"
    return state.text(f"{part}/device") if part else "the host"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
