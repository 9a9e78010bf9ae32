# Copyright (c) 2026, the Ringmaster authors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Whether NCCL's environment variables hold values that NCCL takes, and that belong into service.

Ranges: NVIDIA's NCCL documentation, ``env.html``, and its source (2.30), which reads numbers with ``strtoll`` of base
0. A value that NCCL can't read is not refused by it but replaced by its default, with a line in a log that is off:
that is why it has to be refused here. Of a variable that is not listed nothing is known, and nothing is said against
it.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

OK = "ok"
OUT_OF_RANGE = "out_of_range"
WRONG_TYPE = "wrong_type"
NOT_A_CHOICE = "not_a_choice"
HARMFUL = "harmful"
NOT_KNOWN = "not_known"

MOST_DEVICES = 32  # NCCL reads no more from NCCL_IB_HCA
_LONGEST_NETDEV = 15  # characters; IFNAMSIZ of Linux less the final NUL
_DEVICE = re.compile(r"[A-Za-z0-9_.-]{1,63}(:[0-9]{1,3})?\Z")
_NETDEV = re.compile(rf"[^\s/:,]{{1,{_LONGEST_NETDEV}}}\Z")
_LEVELS = ("LOC", "PIX", "PXB", "PHB", "SYS")
_ALGORITHMS = ("ring", "tree", "collnetdirect", "collnetchain", "nvls", "nvlstree", "pat")
_DEBUGGING = "for debugging only"


@dataclass(frozen=True)
class Verdict:
    """About one variable. ``expected`` and ``reason`` are empty if there is nothing to say."""

    name: str
    verdict: str
    expected: str = ""
    reason: str = ""

    @property
    def refused(self) -> bool:
        """Whether an engine must not be started with it."""
        return self.verdict not in (OK, NOT_KNOWN)


def number(text: str) -> int | None:
    """The number that NCCL reads: decimal, octal (a zero in front) or hexadecimal (0x); None if it reads none."""
    match = re.fullmatch(r"([+-]?)(0[xX][0-9a-fA-F]+|0[0-7]*|[1-9][0-9]*)", text)
    if match is None or len(text) > 20:
        return None
    digits = match[2]
    base = 16 if digits[:2] in ("0x", "0X") else 8 if digits[0] == "0" else 10
    return int(digits, base) * (-1 if match[1] == "-" else 1)


def check(environment: Mapping[str, str]) -> list[Verdict]:
    """A verdict for each variable whose name begins with ``NCCL_``, in the order of the names."""
    return [verdict(name, value) for name, value in sorted(environment.items()) if name.startswith("NCCL_")]


def verdict(name: str, value: str) -> Verdict:
    """What is to be said of one variable of NCCL."""
    rule = _RULES.get(name)
    return rule(name, value) if rule else Verdict(name, NOT_KNOWN, reason="its values are not known here")


_Rule = Callable[[str, str], Verdict]


def _whole(least: int, most: int, why: str = "") -> _Rule:
    def rule(name: str, value: str) -> Verdict:
        found = number(value)
        expected = f"a whole number from {least} to {most}"
        if found is None:
            return Verdict(name, WRONG_TYPE, expected, "NCCL would take its default instead")
        return Verdict(name, OK) if least <= found <= most else Verdict(name, OUT_OF_RANGE, expected, why)

    return rule


def _word(words: tuple[str, ...], why: str = "") -> _Rule:
    def rule(name: str, value: str) -> Verdict:
        if value.upper() in words:
            return Verdict(name, OK)
        return Verdict(name, NOT_A_CHOICE, "one of " + ", ".join(words), why)

    return rule


def _switch_for_debugging(what: str) -> _Rule:
    """0 leaves things as they are; anything else turns something off."""

    def rule(name: str, value: str) -> Verdict:
        found = number(value)
        if found is None:
            return Verdict(name, WRONG_TYPE, "0 or 1", "NCCL would take its default instead")
        if found == 0:
            return Verdict(name, OK)
        return Verdict(name, HARMFUL, "unset", f"{_DEBUGGING}: {what}")

    return rule


def _algorithms(name: str, value: str) -> Verdict:
    words = value.lower().lstrip("^").split(",")
    # From 2.24 on a list may be given for each operation: "allreduce:tree,ring;broadcast:ring".
    if not re.search(r"[:;]", value) and not set(words) <= set(_ALGORITHMS):
        return Verdict(name, NOT_A_CHOICE, "one or more of " + ", ".join(_ALGORITHMS))
    return Verdict(name, HARMFUL, "unset", f"{_DEBUGGING}: NCCL chooses by topology and size of the message")


def _pinned(name: str, _value: str) -> Verdict:
    return Verdict(name, HARMFUL, "unset", f"{_DEBUGGING}: NCCL chooses by topology and size of the message")


def _listed(value: str) -> list[str]:
    """The entries of a list that may begin with ``^`` (all but these) and ``=`` (exactly these), in this order."""
    return re.sub(r"\A\^?=?", "", value).split(",")


def _devices(name: str, value: str) -> Verdict:
    devices = _listed(value)
    expected = "devices as in =mlx5_0:1,mlx5_1:1 (= exactly these, ^ all but these)"
    if not all(_DEVICE.match(device) for device in devices):
        return Verdict(name, WRONG_TYPE, expected)
    if len(devices) > MOST_DEVICES:
        return Verdict(name, OUT_OF_RANGE, f"{MOST_DEVICES} devices at most", "NCCL leaves out what is more")
    return Verdict(name, OK)


def _netdevs(name: str, value: str) -> Verdict:
    if all(_NETDEV.match(netdev) for netdev in _listed(value)):
        return Verdict(name, OK)
    return Verdict(name, WRONG_TYPE, "network devices as in =ens1f0 (= exactly these, ^ all but these)")


def _gid_index(name: str, value: str) -> Verdict:
    found = number(value)
    if found is None or not -1 <= found <= 255:
        return Verdict(name, OUT_OF_RANGE if found is not None else WRONG_TYPE, "-1, or an index from 0 to 255")
    if found == -1:
        return Verdict(name, OK)
    return Verdict(
        name,
        OK,
        reason="the index depends on the port's addresses; unset (-1), NCCL 2.21 and later finds the RoCE v2 one",
    )


def _address_range(name: str, value: str) -> Verdict:
    try:
        ipaddress.ip_network(value, strict=False)
    except ValueError:
        return Verdict(name, WRONG_TYPE, "a network as in 192.168.0.0/16")
    return Verdict(name, OK)


_RULES: dict[str, _Rule] = {
    "NCCL_IB_TIMEOUT": _whole(
        1,
        31,
        "it is an exponent, 4.096 µs × 2^n; 0, and 32 and more, mean no timeout: a dead peer then hangs the engine for "
        "ever. With seven retries 20 is about 30 s, 22 about 2 min, 23 about 4 min",
    ),
    "NCCL_IB_RETRY_CNT": _whole(0, 7),
    "NCCL_IB_TC": _whole(0, 255),
    "NCCL_IB_QPS_PER_CONNECTION": _whole(1, 128),
    "NCCL_CROSS_NIC": _whole(0, 2),
    "NCCL_IB_ROCE_VERSION_NUM": _whole(1, 2),
    "NCCL_IB_ADDR_FAMILY": _word(("AF_INET", "AF_INET6")),
    "NCCL_IB_ADDR_RANGE": _address_range,
    "NCCL_IB_GID_INDEX": _gid_index,
    "NCCL_IB_HCA": _devices,
    "NCCL_SOCKET_IFNAME": _netdevs,
    "NCCL_NET_GDR_LEVEL": _word(_LEVELS),
    "NCCL_P2P_LEVEL": _word((_LEVELS[0], "NVL", *_LEVELS[1:])),
    "NCCL_ALGO": _algorithms,
    "NCCL_PROTO": _pinned,
    "NCCL_P2P_DISABLE": _switch_for_debugging("it turns NVLink off as well; NCCL_P2P_LEVEL limits what goes over PCIe"),
    "NCCL_SHM_DISABLE": _switch_for_debugging("cards of one host then talk over the network"),
    "NCCL_IB_DISABLE": _switch_for_debugging("hosts then talk over TCP instead of RDMA"),
}
NAMES = tuple(_RULES)
