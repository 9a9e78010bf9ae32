# SPDX-License-Identifier: GPL-3.0-or-later
"""The agent's Prometheus metrics, collected from the state when asked. What is unknown is absent.

Names end in their unit; counters are those of the kernel, the card and the engine, and fall when these start again.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from typing import Any, Final, NamedTuple

from prometheus_client import GCCollector, PlatformCollector, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily, Metric
from prometheus_client.registry import Collector, CollectorRegistry

from ringmaster_agent import __version__
from ringmaster_agent.changes import State
from ringmaster_agent.stream import Stream

_PREFIX: Final = "ringmaster_agent"


class _Series(NamedTuple):
    """A quantity of a kind of subject as a metric. `factor` makes its unit the base unit."""

    quantity: str
    name: str
    text: str
    counter: bool = False
    factor: float = 1.0


_COUNTER: Final = True
# Kind of subject → labels of its subjects, and the metrics.
_SERIES: Final[Mapping[str, tuple[tuple[str, ...], tuple[_Series, ...]]]] = {
    "gpu": (
        ("uuid",),
        (
            _Series("ecc_corrected_volatile", "gpu_ecc_corrected_errors", "Corrected ECC errors.", _COUNTER),
            _Series("ecc_uncorrected_volatile", "gpu_ecc_uncorrected_errors", "Uncorrectable ECC errors.", _COUNTER),
            _Series("remapped_rows_corrected", "gpu_remapped_rows_corrected", "Rows remapped for corrected errors."),
            _Series("remapped_rows_uncorrected", "gpu_remapped_rows_uncorrected", "Rows remapped for others."),
            _Series("remapped_rows_pending", "gpu_remapped_rows_pending", "1 while a row waits for a reset."),
            _Series("remapped_rows_failed", "gpu_remapped_rows_failed", "1 if remapping a row failed."),
            _Series("clock_lost_seconds", "gpu_clock_lost_seconds", "Full clock lost to heat or brake.", _COUNTER),
            _Series("sm_clock_mhz", "gpu_sm_clock_hertz", "Clock of the multiprocessors.", factor=1e6),
            _Series("sm_clock_max_mhz", "gpu_sm_clock_max_hertz", "Greatest clock of these.", factor=1e6),
            _Series("pcie_replay_counter", "gpu_pcie_replays", "PCIe replays.", _COUNTER),
            _Series("pcie_width", "gpu_pcie_lanes", "Lanes of the PCIe link."),
            _Series("pcie_width_max", "gpu_pcie_lanes_max", "Lanes that it could have."),
            _Series("pcie_generation", "gpu_pcie_generation", "Generation at which the PCIe link runs."),
            _Series("pcie_generation_max", "gpu_pcie_generation_max", "Generation at which it could."),
            _Series("utilization_percent", "gpu_utilization_ratio", "Share of time with work, 0 to 1.", factor=0.01),
            _Series("temperature_celsius", "gpu_temperature_celsius", "Temperature of the GPU."),
            _Series("power_watts", "gpu_power_watts", "Power draw."),
        ),
    ),
    "nvlink": (
        ("uuid",),
        (
            _Series("links", "nvlink_links", "NVLinks of the card."),
            _Series("expected", "nvlink_links_expected", "NVLinks that its model has."),
            _Series("errors", "nvlink_errors", "Replays, recoveries and CRC errors of all links.", _COUNTER),
        ),
    ),
    "pcie": (
        ("pci_address",),
        (
            *(
                _Series(f"{place}{severity}", f"pcie_{place}{severity}_errors", f"AER, {severity}{text}.", _COUNTER)
                for severity in ("correctable", "nonfatal", "fatal")
                for place, text in (("", ""), ("above_", ", of the ports above"))
            ),
            _Series("width", "pcie_lanes", "Lanes of the link."),
            _Series("width_max", "pcie_lanes_max", "Lanes that it could have."),
            _Series("speed", "pcie_transfers_per_second", "Speed of the link.", factor=1e9),
            _Series("speed_max", "pcie_transfers_per_second_max", "Speed that it could have.", factor=1e9),
        ),
    ),
    "engine": (
        ("engine",),
        (
            _Series("running", "engine_requests_running", "Requests that run."),
            _Series("waiting", "engine_requests_waiting", "Requests that wait in the engine."),
            _Series("kv_use", "engine_kv_use_ratio", "Share of KV blocks in use, 0 to 1."),
            _Series("generation_tokens", "engine_generation_tokens", "Tokens made.", _COUNTER),
            _Series("prompt_tokens", "engine_prompt_tokens", "Prompt tokens taken in.", _COUNTER),
            _Series("iterations", "engine_iterations", "Steps done.", _COUNTER),
            _Series("preemptions", "engine_preemptions", "Requests put back for want of memory.", _COUNTER),
            _Series("process_start", "engine_start_time_seconds", "Start of the engine since the epoch."),
            _Series("stalled_seconds", "engine_stalled_seconds", "Owes answers and has not got on for so long."),
        ),
    ),
    "canary": (
        ("engine",),
        (_Series("number", "canary_questions", "Questions since the agent's start.", _COUNTER),),
    ),
}


class StateCollector(Collector):
    """Turns the state into metrics."""

    def __init__(self, state: State, stream: Stream) -> None:
        self._state = state
        self._stream = stream

    def collect(self) -> Iterator[Metric]:
        """Give all metrics."""
        yield InfoMetricFamily(_PREFIX, "The node agent.", {"version": __version__})
        yield from self._readers()
        yield GaugeMetricFamily(f"{_PREFIX}_listeners", "Open streams.", value=self._stream.listeners)
        yield CounterMetricFamily(
            f"{_PREFIX}_listeners_cut_off",
            "Streams cut off because they were read too slowly.",
            value=self._stream.cut_off,
        )
        kinds = _by_kind(self._state.values)
        for kind, (labels, series) in _SERIES.items():
            for one in series:
                family = _family(one, labels)
                for name, quantities in kinds.get(kind, {}).items():
                    value = quantities.get(one.quantity)
                    if value is not None:
                        family.add_metric([name], float(value) * one.factor)
                yield family
        yield from _cards(kinds.get("gpu", {}), kinds.get("nvlink", {}))
        yield from _ports(kinds.get("port", {}))
        yield from _xids(kinds.get("xid", {}))
        yield from _answered(kinds.get("canary", {}))

    def _readers(self) -> Iterator[Metric]:
        up = GaugeMetricFamily(f"{_PREFIX}_reader_up", "1 while the reader succeeds.", labels=["reader"])
        age = GaugeMetricFamily(f"{_PREFIX}_reader_age_seconds", "Since it last succeeded.", labels=["reader"])
        now = time.clock_gettime(time.CLOCK_BOOTTIME)
        for reader in sorted(set(self._state.read) | {name for name in self._state.unknown if "/" not in name}):
            up.add_metric([reader], int(reader not in self._state.unknown))
            if reader in self._state.read:
                age.add_metric([reader], round(now - self._state.read[reader], 3))
        yield up
        yield age


def _by_kind(values: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Mapping[str, Any]]]:
    kinds: dict[str, dict[str, Mapping[str, Any]]] = {}
    for subject, quantities in sorted(values.items()):
        kind, _slash, name = subject.partition("/")
        kinds.setdefault(kind, {})[name] = quantities
    return kinds


def _family(one: _Series, labels: tuple[str, ...]) -> CounterMetricFamily | GaugeMetricFamily:
    make = CounterMetricFamily if one.counter else GaugeMetricFamily
    return make(f"{_PREFIX}_{one.name}", one.text, labels=labels)


def _cards(cards: Mapping[str, Mapping[str, Any]], links: Mapping[str, Mapping[str, Any]]) -> Iterator[Metric]:
    info = InfoMetricFamily(f"{_PREFIX}_gpu", "A card.", labels=["uuid"])
    state = GaugeMetricFamily(f"{_PREFIX}_gpu_state", "1 for the state that the card is in.", labels=["uuid", "state"])
    reasons = GaugeMetricFamily(
        f"{_PREFIX}_gpu_clock_event", "1 for each reason why the clock is as it is.", labels=["uuid", "reason"]
    )
    recovery = GaugeMetricFamily(
        f"{_PREFIX}_gpu_recovery_action", "1 for the recovery that the driver asks for.", labels=["uuid", "action"]
    )
    down = GaugeMetricFamily(f"{_PREFIX}_nvlink_links_down", "NVLinks that are not up.", labels=["uuid"])
    for uuid, card in cards.items():
        described = {name: str(card[name]) for name in ("index", "pci_address", "model") if card.get(name) is not None}
        info.add_metric([uuid], described)
        if card.get("state") is not None:
            state.add_metric([uuid, card["state"]], 1)
        for reason in card.get("clock_event_reasons") or ():
            reasons.add_metric([uuid, reason], 1)
        if card.get("recovery_action") is not None:
            recovery.add_metric([uuid, card["recovery_action"]], 1)
    for uuid, card in links.items():
        if card.get("down") is not None:
            down.add_metric([uuid], len(card["down"]))
    yield from (info, state, reasons, recovery, down)


def _ports(ports: Mapping[str, Mapping[str, Any]]) -> Iterator[Metric]:
    active = GaugeMetricFamily(f"{_PREFIX}_rdma_port_active", "1 while the port is active.", labels=["port"])
    hardware = CounterMetricFamily(
        f"{_PREFIX}_rdma_hardware", "Counters of the adapter, by the kernel's names.", labels=["port", "counter"]
    )
    ethernet = CounterMetricFamily(
        f"{_PREFIX}_rdma_ethernet",
        "Counters of the network interface, by the driver's names.",
        labels=["port", "counter"],
    )
    for name, port in ports.items():
        if port.get("state") is not None:
            active.add_metric([name], int(port["state"] == "ACTIVE"))
        for family, group in ((hardware, "hardware"), (ethernet, "ethernet")):
            for counter, value in ((port.get("sample") or {}).get(group) or {}).items():
                family.add_metric([name, counter], value)
    yield from (active, hardware, ethernet)


def _xids(cards: Mapping[str, Mapping[str, Any]]) -> Iterator[Metric]:
    count = CounterMetricFamily(f"{_PREFIX}_xids", "Xids since the boot.", labels=["pci_address", "xid", "action"])
    for address, codes in cards.items():
        for code, known in codes.items():
            if known is not None:
                count.add_metric([address, code, known["action"]], known["count"])
    yield count


def _answered(canaries: Mapping[str, Mapping[str, Any]]) -> Iterator[Metric]:
    answered = GaugeMetricFamily(
        f"{_PREFIX}_canary_answered", "1 if the last question was answered, right or wrong.", labels=["engine"]
    )
    for name, canary in canaries.items():
        if canary.get("number") is not None:
            answered.add_metric([name], int(canary.get("answer") is not None))
    yield answered


def make_registry(state: State, stream: Stream) -> CollectorRegistry:
    """A registry with the metrics of the state and those of the agent's process."""
    registry = CollectorRegistry()
    ProcessCollector(registry=registry)
    PlatformCollector(registry=registry)
    GCCollector(registry=registry)
    registry.register(StateCollector(state, stream))
    return registry
