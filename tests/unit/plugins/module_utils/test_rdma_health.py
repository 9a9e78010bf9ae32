# SPDX-License-Identifier: GPL-3.0-or-later
"""The retransmit event ratio of a window, honest about what it can't know, and the rows of windows that follow."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ansible_collections.ringmaster.inference.plugins.module_utils import rdma_health
from ansible_collections.ringmaster.inference.plugins.module_utils.rdma_health import (
    BAD_WINDOWS,
    GOOD_WINDOWS,
    RetransmitWatch,
    Sample,
    Side,
    Window,
    judge,
)

EVENTS = dict.fromkeys((*rdma_health.SENDER_EVENTS, *rdma_health.RECEIVER_EVENTS), 0)
PACKETS = {rdma_health.SENDER_PACKETS: 0, rdma_health.RECEIVER_PACKETS: 0}
WRAP = 2**32


def sample(seconds: float = 0.0, boot: str | None = "b", driver: str | None = "4", **counters: int) -> Sample:
    """A sample; counters of the card and of the interface by name, all others 0."""
    ethernet = {
        name: value for name, value in counters.items() if name.startswith(("rx_", "tx_")) and "icrc" not in name
    }
    hardware = {name: value for name, value in counters.items() if name not in ethernet}
    return Sample(seconds, boot, driver, {**EVENTS, **hardware}, {**PACKETS, **ethernet})


def traffic(tx: int = 1_000_000, rx: int = 1_000_000) -> dict[str, int]:
    """Packets of both directions."""
    return {rdma_health.SENDER_PACKETS: tx, rdma_health.RECEIVER_PACKETS: rx}


def test_larger_of_sender_and_receiver() -> None:
    after = sample(
        60, packet_seq_err=100, local_ack_timeout_err=20, implied_nak_seq_err=3, out_of_sequence=50, **traffic()
    )
    window = judge(sample(), after)
    assert window.verdict == "measured"
    assert window.ratio == pytest.approx(123e-6)
    assert window.sender == Side("measured", 123, 1_000_000, 123 / 1_000_000)
    assert window.receiver == Side("measured", 50, 1_000_000, 50 / 1_000_000)
    assert window.bad is False
    assert judge(sample(), sample(60, out_of_sequence=900, **traffic())).ratio == pytest.approx(9e-4)


def test_other_counters_are_never_mixed_in() -> None:
    others = {
        "out_of_buffer": 10**6,
        "rnr_nak_retry_err": 10**6,
        "duplicate_request": 10**6,
        "rx_icrc_encapsulated": 10**6,
        "np_cnp_sent": 10**6,
        "rx_discards_phy": 10**6,
        "rx_packets_phy": 10**7,
        "roce_adp_retrans": 10**6,
    }
    zeros = dict.fromkeys(others, 0)
    assert judge(sample(**zeros), sample(60, **others, **traffic())).ratio == 0


@pytest.mark.parametrize(("events", "bad"), [(299, False), (300, False), (301, True)])
def test_bad_is_over_three_hundredths_of_a_percent(events: int, bad: bool) -> None:
    assert judge(sample(), sample(60, out_of_sequence=events, **traffic())).bad is bad


def test_too_few_packets_say_nothing() -> None:
    window = judge(sample(), sample(60, packet_seq_err=90_000, **traffic(99_999, 99_999)))
    assert (window.verdict, window.ratio, window.bad) == ("insufficient_traffic", None, None)
    assert "99999 packets" in window.document()["unknown"]["ratio"]
    assert judge(sample(), sample(60, **traffic(100_000, 0))).verdict == "measured"


def test_side_without_traffic_leaves_the_word_to_the_other() -> None:
    window = judge(sample(), sample(60, out_of_sequence=1000, **traffic(0, 1_000_000)))
    assert window.sender is not None
    assert window.sender.verdict == "insufficient_traffic"
    assert (window.verdict, window.ratio) == ("measured", 1e-3)


def without(which: Sample, *names: str) -> Sample:
    """A sample of a card that lacks some counters."""
    return dataclasses.replace(
        which,
        hardware={name: value for name, value in which.hardware.items() if name not in names},
        ethernet={name: value for name, value in which.ethernet.items() if name not in names},
    )


@pytest.mark.parametrize("missing", [*rdma_health.SENDER_EVENTS, rdma_health.SENDER_PACKETS])
def test_missing_counter_is_unknown_and_never_zero(missing: str) -> None:
    window = judge(without(sample(), missing), without(sample(60, out_of_sequence=10, **traffic()), missing))
    assert (window.verdict, window.ratio, window.bad) == ("unknown", None, None)
    assert missing in window.reason


def test_virtual_function_without_denominators_is_unknown() -> None:
    window = judge(without(sample(), *PACKETS), without(sample(60, packet_seq_err=7), *PACKETS))
    assert window.verdict == "unknown"
    assert window.sender is not None
    assert window.sender.events == 7


def test_one_side_that_is_bad_by_itself_is_enough() -> None:
    names = rdma_health.SENDER_EVENTS
    after = without(sample(60, out_of_sequence=1000, **traffic()), *names)
    assert judge(without(sample(), *names), after).bad is True


def test_queue_counter_of_32_bits_that_wraps() -> None:
    after = sample(60, packet_seq_err=5, **traffic())
    window = judge(sample(packet_seq_err=WRAP - 10), after)
    assert window.sender is not None
    assert window.sender.events == 15
    assert window.verdict == "measured"


def test_queue_counter_that_fell_by_more_than_a_wrap_was_reset() -> None:
    window = judge(sample(packet_seq_err=3_000_000_000), sample(60, packet_seq_err=5, **traffic()))
    assert (window.verdict, window.sender, window.apart) == ("unknown", None, {})
    assert "packet_seq_err" in window.reason


def test_queue_counter_beyond_32_bits_does_not_wrap() -> None:
    window = judge(sample(out_of_sequence=WRAP + 10), sample(60, out_of_sequence=WRAP + 5, **traffic()))
    assert window.verdict == "unknown"


@pytest.mark.parametrize("name", ["tx_vport_rdma_unicast_packets", "rx_discards_phy", "np_cnp_sent", "rp_cnp_handled"])
def test_counter_of_64_bits_that_falls_was_reset(name: str) -> None:
    window = judge(sample(**{name: 2**63}), sample(60, **{**traffic(), name: 2**63 - 1}))
    assert window.verdict == "unknown"
    assert name in window.reason


def test_reboot_and_reloaded_driver_discard_the_window() -> None:
    after = sample(60, **traffic())
    assert "host was started" in judge(sample(boot="a"), after).reason
    assert "driver was loaded" in judge(sample(driver="3"), after).reason
    assert judge(sample(boot=None, driver=None), after).verdict == "measured"


def test_time_that_does_not_pass() -> None:
    assert judge(sample(60), sample(60, **traffic())).verdict == "unknown"
    assert judge(sample(61), sample(60, **traffic())).seconds is None


def test_short_window_can_still_become_long_enough() -> None:
    window = judge(sample(), sample(59.5, **traffic()), minimum_seconds=60)
    assert window.too_short
    assert (window.verdict, window.ratio) == ("unknown", None)
    assert not judge(sample(boot="a"), sample(1), minimum_seconds=60).too_short, "a reboot is no matter of patience"


def test_what_is_told_apart() -> None:
    before = sample(rx_discards_phy=5, rx_packets_phy=0, rx_prio3_discards=1, out_of_buffer=1, np_cnp_sent=0)
    after = sample(
        60,
        **traffic(),
        rx_discards_phy=25,
        rx_packets_phy=2_000_000,
        rx_prio3_discards=21,
        out_of_buffer=4,
        np_cnp_sent=12,
    )
    before = dataclasses.replace(before, ethernet={**before.ethernet, "rx_prio3_pause_duration": 1000})
    after = dataclasses.replace(after, ethernet={**after.ethernet, "rx_prio3_pause_duration": 6_001_000})
    document = judge(before, after).document()
    assert document["local_drops"]["ratio"] == pytest.approx(1e-5)
    assert document["local_drops"]["rx_discards_by_priority"]["3"] == 20
    assert document["host_starvation"]["out_of_buffer"] == 3
    assert document["host_starvation"]["rnr_nak_retry_err"] is None
    assert "rnr_nak_retry_err" in document["host_starvation"]["unknown"]
    assert document["congestion"]["np_cnp_sent"] == 12
    assert document["congestion"]["pause_microseconds"] == {"rx_prio3_pause_duration": 6_000_000}
    assert document["congestion"]["pause_ratio"] == pytest.approx(0.1)
    assert document["corruption"]["rx_crc_errors_phy"] is None


def test_no_packet_came_in() -> None:
    same = {"rx_discards_phy": 0, "rx_packets_phy": 7}
    drops = judge(sample(**same), sample(60, **same, **traffic())).document()["local_drops"]
    assert drops["ratio"] is None
    assert drops["unknown"]["ratio"] == "no packet came in"


def test_every_null_has_its_reason() -> None:
    for window in (judge(sample(), sample(60, **traffic())), judge(sample(), sample(60))):
        document = window.document()
        assert (document["ratio"] is None) == ("ratio" in document["unknown"])
        for group in ("local_drops", "host_starvation", "congestion", "corruption", "sender", "receiver"):
            nulls = {name for name, value in document[group].items() if value is None}
            assert nulls == set(document[group]["unknown"])


def test_sample_survives_being_kept() -> None:
    kept = sample(12.5, packet_seq_err=2**40, **traffic())
    assert Sample.from_document(json.loads(json.dumps(kept.document()))) == kept


@pytest.mark.parametrize(
    "change",
    [
        {"seconds": None},
        {"seconds": -1},
        {"seconds": float("inf")},
        {"seconds": True},
        {"boot": 7},
        {"hardware": []},
        {"hardware": {"a": -1}},
        {"ethernet": {"a": 1.5}},
        {"ethernet": {"a": True}},
    ],
)
def test_kept_sample_that_is_none(change: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"no|number"):
        Sample.from_document({**sample().document(), **change})


counters = st.dictionaries(
    st.sampled_from([*EVENTS, *PACKETS, "rx_discards_phy", "np_cnp_sent", "rx_prio3_pause_duration", "rx_packets_phy"]),
    st.integers(0, 2**64),
)
samples = st.builds(
    Sample, st.floats(0, 1e9), st.sampled_from([None, "a", "b"]), st.sampled_from([None, "4"]), counters, counters
)


@given(samples, samples)
def test_no_two_samples_make_a_traceback_or_a_senseless_answer(before: Sample, after: Sample) -> None:
    window = judge(before, after)
    json.dumps(window.document())
    assert (window.ratio is not None) == (window.verdict == "measured")
    assert window.ratio is None or window.ratio >= 0
    assert window.ratio is not None or window.reason


@given(st.integers(0, WRAP - 1), st.integers(0, 100_000))
def test_every_wrap_by_fewer_events_than_packets_is_counted(first: int, events: int) -> None:
    window = judge(sample(out_of_sequence=first), sample(60, out_of_sequence=(first + events) % WRAP, **traffic()))
    assert window.receiver is not None
    assert window.receiver.events == events


# Rows of windows


def window(bad: bool | None) -> Window:
    """A bad, a good, or a window that says nothing."""
    ratio = {True: 1e-3, False: 1e-5, None: None}[bad]
    return Window("unknown" if bad is None else "measured", 60.0, rdma_health.THRESHOLD, ratio)


def observed(*bad: bool | None) -> list[bool]:
    """Whether the port was degraded after each window."""
    watch = RetransmitWatch()
    return [watch.observe(window(each)) for each in bad]


def test_three_bad_windows_in_a_row_degrade_and_six_good_ones_recover() -> None:
    assert (BAD_WINDOWS, GOOD_WINDOWS) == (3, 6)
    assert observed(True, True, True) == [False, False, True]
    assert observed(*[True] * 3, *[False] * 6)[-2:] == [True, False]


def test_one_good_window_breaks_a_bad_row_and_one_bad_window_a_good_one() -> None:
    assert observed(True, True, False, True, True) == [False] * 5
    assert observed(*[True] * 3, *[False] * 5, True, *[False] * 5)[-1] is True


def test_window_that_says_nothing_neither_breaks_nor_extends_a_row() -> None:
    assert observed(True, True, None, None, True) == [False, False, False, False, True]
    assert observed(*[None] * 20) == [False] * 20
    assert observed(*[True] * 3, *[None] * 20)[-1] is True


@given(st.lists(st.sampled_from([True, False, None])))
def test_state_flips_only_on_full_rows(rows: list[bool | None]) -> None:
    states = observed(*rows)
    for index in range(1, len(states)):
        if states[index] != states[index - 1]:
            measured = [bad for bad in rows[: index + 1] if bad is not None]
            needed = BAD_WINDOWS if states[index] else GOOD_WINDOWS
            assert measured[-needed:] == [states[index]] * needed
