# Copyright (c) 2026, the Ringmaster authors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The retransmit event ratio of a RoCE port over a window, and when it makes a port bad or well again.

There is no counter of lost packets. What a card counts are the events that follow from loss: sequence errors, timeouts.
One event can stand for one lost packet or for mere reordering, and go-back-N may send many packets again for it; so the
figure is called *retransmit event ratio* and compared only with itself. It is the larger of two:

sender
    (packet_seq_err + local_ack_timeout_err + implied_nak_seq_err) / tx_vport_rdma_unicast_packets
receiver
    out_of_sequence / rx_vport_rdma_unicast_packets

where every name stands for its growth over the window. Local drops, host starvation, congestion and corruption are told
apart and never mixed in. Sources: Linux ``drivers/infiniband/hw/mlx5/counters.c`` and
``Documentation/networking/device_drivers/ethernet/mellanox/mlx5/counters.rst``. Nothing here imports Ansible or reads
anything.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

# Over 0.03 % of the packets a port is bad. Under 100,000 packets a single event would decide.
THRESHOLD = 3e-4
MINIMUM_PACKETS = 100_000
MINIMUM_SECONDS = 60.0
BAD_WINDOWS = 3
GOOD_WINDOWS = 6

SENDER_EVENTS = ("packet_seq_err", "local_ack_timeout_err", "implied_nak_seq_err")
SENDER_PACKETS = "tx_vport_rdma_unicast_packets"
RECEIVER_EVENTS = ("out_of_sequence",)
RECEIVER_PACKETS = "rx_vport_rdma_unicast_packets"

# Congestion counters and counters of the physical port have 64 bits; all others below hw_counters are queue counters,
# which have 32 bits in the card and start again at 0.
WIDE_HARDWARE_COUNTERS = frozenset(
    {"np_cnp_sent", "np_ecn_marked_roce_packets", "rp_cnp_handled", "rp_cnp_ignored", "rx_icrc_encapsulated"}
)
_QUEUE_COUNTER = 1 << 32

# All counters that a judgement looks at; a sample needs no others.
HARDWARE_COUNTERS = (
    *SENDER_EVENTS,
    *RECEIVER_EVENTS,
    "out_of_buffer",
    "rnr_nak_retry_err",
    *sorted(WIDE_HARDWARE_COUNTERS),
)
ETHERNET_COUNTERS = (
    SENDER_PACKETS,
    RECEIVER_PACKETS,
    *("rx_packets_phy", "rx_discards_phy", "rx_crc_errors_phy", "rx_symbol_err_phy"),
    *(f"rx_prio{priority}_discards" for priority in range(8)),
    *(f"{direction}_prio{priority}_pause_duration" for direction in ("rx", "tx") for priority in range(8)),
)

MEASURED, INSUFFICIENT, UNKNOWN = "measured", "insufficient_traffic", "unknown"
_UNCOUNTED = "this card, function or driver does not count it"


@dataclass(frozen=True)
class Sample:
    """Counters of one port at one moment.

    `seconds` is a clock that runs since the boot and that nobody sets. `boot` and `driver` tell lives apart: they are
    other ones after a reboot, and after the driver was loaded again; None where that can't be told. `hardware` are the
    files of ``hw_counters``, `ethernet` the counters of ``ethtool -S``; one that the card does not have is missing.
    """

    seconds: float
    boot: str | None
    driver: str | None
    hardware: Mapping[str, int]
    ethernet: Mapping[str, int]

    def document(self) -> dict[str, Any]:
        """The sample as JSON can hold it."""
        return {
            "seconds": self.seconds,
            "boot": self.boot,
            "driver": self.driver,
            "hardware": dict(self.hardware),
            "ethernet": dict(self.ethernet),
        }

    @classmethod
    def from_document(cls, document: Any) -> Sample:
        """A sample that was kept. Raises ValueError for anything that :meth:`document` does not write."""
        if not isinstance(document, dict):
            raise ValueError("no JSON object")
        seconds, boot, driver = (document.get(key) for key in ("seconds", "boot", "driver"))
        if isinstance(seconds, bool) or not isinstance(seconds, (int, float)) or not 0 <= seconds < math.inf:
            raise ValueError("no time")
        for mark in (boot, driver):
            if mark is not None and not isinstance(mark, str):
                raise ValueError("no mark of boot or driver")
        return cls(float(seconds), boot, driver, *(_counters(document.get(key)) for key in ("hardware", "ethernet")))


def _counters(value: Any) -> dict[str, int]:
    if not isinstance(value, dict):
        raise ValueError("no counters")
    for number in value.values():
        if isinstance(number, bool) or not isinstance(number, int) or number < 0:
            raise ValueError("a counter that is no number")
    return value


@dataclass(frozen=True)
class Side:
    """Sender's or receiver's part of a window. `verdict` is ``measured``, ``insufficient_traffic`` or ``unknown``."""

    verdict: str
    events: int | None = None
    packets: int | None = None
    ratio: float | None = None
    reason: str = ""

    def document(self) -> dict[str, Any]:
        """The side as the module returns it."""
        result = {"verdict": self.verdict, "events": self.events, "packets": self.packets, "ratio": self.ratio}
        return {**result, "unknown": {"ratio": self.reason} if self.ratio is None else {}}


@dataclass(frozen=True)
class Window:
    """What two samples say. `ratio` is None unless `verdict` is ``measured``, and `reason` then says why.

    `sender`, `receiver` and `apart` are empty where the window was discarded. One that is `too_short` may become long
    enough if the first sample is kept.
    """

    verdict: str
    seconds: float | None
    threshold: float
    ratio: float | None = None
    reason: str = ""
    sender: Side | None = None
    receiver: Side | None = None
    apart: dict[str, Any] = field(default_factory=dict)
    too_short: bool = False

    @property
    def bad(self) -> bool | None:
        """Whether the ratio is over the threshold; None if it is not known."""
        return None if self.ratio is None else self.ratio > self.threshold

    def document(self) -> dict[str, Any]:
        """The window as the module returns it."""
        return {
            "verdict": self.verdict,
            "seconds": None if self.seconds is None else round(self.seconds, 3),
            "ratio": self.ratio,
            "threshold": self.threshold,
            "over_threshold": self.bad,
            "sender": self.sender.document() if self.sender else None,
            "receiver": self.receiver.document() if self.receiver else None,
            **{name: self.apart.get(name) for name in ("local_drops", "host_starvation", "congestion", "corruption")},
            "unknown": {"ratio": self.reason} if self.ratio is None else {},
        }


def judge(
    before: Sample,
    after: Sample,
    threshold: float = THRESHOLD,
    minimum_packets: int = MINIMUM_PACKETS,
    minimum_seconds: float = 0.0,
) -> Window:
    """What happened on a port between two samples.

    A window is discarded (``unknown``) if host or driver started again in it, if a counter was reset, or if it is
    shorter than `minimum_seconds`.
    """
    seconds = after.seconds - before.seconds
    reason = _discarded(before, after, seconds)
    if reason:
        return Window(UNKNOWN, seconds if seconds > 0 else None, threshold, reason=reason)
    if seconds < minimum_seconds:
        reason = f"the window of {seconds:.1f} s is shorter than {minimum_seconds:g} s"
        return Window(UNKNOWN, seconds, threshold, reason=reason, too_short=True)
    growth = _Growth(before, after)
    sender = _side(growth, SENDER_EVENTS, SENDER_PACKETS, minimum_packets)
    receiver = _side(growth, RECEIVER_EVENTS, RECEIVER_PACKETS, minimum_packets)
    # Read before the resets are asked for: each reading may find one.
    apart = _apart(growth, seconds)
    if growth.resets:
        reason = f"counters were reset within the window: {', '.join(sorted(growth.resets))}"
        return Window(UNKNOWN, seconds, threshold, reason=reason)
    verdict, ratio, reason = _larger(sender, receiver, threshold)
    return Window(verdict, seconds, threshold, ratio, reason, sender, receiver, apart)


def _discarded(before: Sample, after: Sample, seconds: float) -> str:
    if None not in (before.boot, after.boot) and before.boot != after.boot:
        return "the host was started again within the window"
    if None not in (before.driver, after.driver) and before.driver != after.driver:
        return "the driver was loaded again within the window"
    if not seconds > 0:
        return "the second sample is not later than the first"
    return ""


class _Growth:
    """How much counters grew from one sample to the other, and which of them were reset in between."""

    def __init__(self, before: Sample, after: Sample) -> None:
        self.before, self.after = before, after
        self.resets: set[str] = set()
        packets = [self.ethernet(name) for name in (SENDER_PACKETS, RECEIVER_PACKETS)]
        # More events than packets went through the port are not a counter that went past its end.
        self.most = max([MINIMUM_PACKETS, *(number for number in packets if number is not None)])

    def ethernet(self, name: str) -> int | None:
        """Growth of a counter of 64 bits of the network interface; None if it is missing or was reset."""
        return self._wide(name, self.before.ethernet.get(name), self.after.ethernet.get(name))

    def hardware(self, name: str) -> int | None:
        """Growth of a file of ``hw_counters``; None if it is missing or was reset."""
        first, last = self.before.hardware.get(name), self.after.hardware.get(name)
        if first is None or last is None or last >= first:
            return None if first is None or last is None else last - first
        if name in WIDE_HARDWARE_COUNTERS or first >= _QUEUE_COUNTER:
            return self._wide(name, first, last)
        wrapped = last - first + _QUEUE_COUNTER
        if wrapped > self.most:
            self.resets.add(name)
            return None
        return wrapped

    def _wide(self, name: str, first: int | None, last: int | None) -> int | None:
        if first is None or last is None:
            return None
        if last < first:
            self.resets.add(name)
            return None
        return last - first


def _side(growth: _Growth, events: Sequence[str], packets: str, minimum_packets: int) -> Side:
    counts = {name: growth.hardware(name) for name in events}
    known = [count for count in counts.values() if count is not None]
    total = sum(known) if len(known) == len(counts) else None
    volume = growth.ethernet(packets)
    if total is None or volume is None:
        missing = [name for name, count in {**counts, packets: volume}.items() if count is None]
        return Side(UNKNOWN, total, volume, reason=f"this card, function or driver has no {', '.join(missing)}")
    if volume < max(minimum_packets, 1):
        return Side(INSUFFICIENT, total, volume, reason=f"{volume} packets, fewer than {minimum_packets}")
    return Side(MEASURED, total, volume, total / volume)


def _larger(sender: Side, receiver: Side, threshold: float) -> tuple[str, float | None, str]:
    """Verdict, ratio and reason of both sides together.

    A side without traffic says nothing and leaves the word to the other. A side that can't be read might be the worse
    one: the other's ratio then holds only if it is over the threshold by itself.
    """
    ratios = [side.ratio for side in (sender, receiver) if side.ratio is not None]
    unknown = [side.reason for side in (sender, receiver) if side.verdict == UNKNOWN]
    if ratios and (not unknown or max(ratios) > threshold):
        return MEASURED, max(ratios), ""
    if unknown:
        return UNKNOWN, None, "; ".join(dict.fromkeys(unknown))
    return INSUFFICIENT, None, f"sender {sender.reason}; receiver {receiver.reason}"


def _apart(growth: _Growth, seconds: float) -> dict[str, Any]:
    """What else went wrong in the window, each by itself. Counters that the card does not have are null."""
    drops, received = growth.ethernet("rx_discards_phy"), growth.ethernet("rx_packets_phy")
    pause = {
        f"{direction}_prio{priority}_pause_duration": growth.ethernet(f"{direction}_prio{priority}_pause_duration")
        for direction in ("rx", "tx")
        for priority in range(8)
    }
    paused = {name: duration for name, duration in pause.items() if duration is not None}
    groups: dict[str, dict[str, Any]] = {
        "local_drops": {
            "rx_discards_phy": drops,
            "rx_packets_phy": received,
            "ratio": drops / received if drops is not None and received else None,
            "rx_discards_by_priority": {
                str(priority): growth.ethernet(f"rx_prio{priority}_discards") for priority in range(8)
            },
        },
        "host_starvation": {name: growth.hardware(name) for name in ("out_of_buffer", "rnr_nak_retry_err")},
        "congestion": {
            **{
                name: growth.hardware(name)
                for name in ("np_cnp_sent", "np_ecn_marked_roce_packets", "rp_cnp_handled", "rp_cnp_ignored")
            },
            # Microseconds of pause in each microsecond of the window, of the priority and direction that has most.
            "pause_microseconds": paused or None,
            "pause_ratio": max(paused.values()) / (seconds * 1e6) if paused else None,
        },
        "corruption": {
            "rx_icrc_encapsulated": growth.hardware("rx_icrc_encapsulated"),
            "rx_crc_errors_phy": growth.ethernet("rx_crc_errors_phy"),
            "rx_symbol_err_phy": growth.ethernet("rx_symbol_err_phy"),
        },
    }
    for group in groups.values():
        group["unknown"] = {name: _UNCOUNTED for name in group if group[name] is None}
    if groups["local_drops"]["ratio"] is None and drops is not None and received == 0:
        groups["local_drops"]["unknown"]["ratio"] = "no packet came in"
    if not paused:
        for name in ("pause_microseconds", "pause_ratio"):
            groups["congestion"]["unknown"][name] = "pause is counted only for priorities with PFC on"
    return groups


class RetransmitWatch:
    """Tells when a port is degraded: after three bad windows in a row, until six good ones.

    A window that says nothing (too little traffic, discarded, unknown) is no evidence: it neither extends nor breaks a
    row. How old evidence may become is the matter of the one who asks.
    """

    def __init__(self, bad_windows: int = BAD_WINDOWS, good_windows: int = GOOD_WINDOWS) -> None:
        self.degraded = False
        self._needed = {False: max(bad_windows, 1), True: max(good_windows, 1)}
        self._row = 0  # windows in a row that speak against the present state

    def observe(self, window: Window) -> bool:
        """Take the next window into account; returns whether the port is degraded now."""
        if window.bad is not None:
            self._row = self._row + 1 if window.bad != self.degraded else 0
            if self._row >= self._needed[self.degraded]:
                self.degraded = not self.degraded
                self._row = 0
        return self.degraded
