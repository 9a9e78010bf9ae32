# SPDX-License-Identifier: GPL-3.0-or-later
"""What a window of a host's hardware says about a rule: bad, good, or nothing.

Pure functions of two moments of one subject. What is not known says nothing, and neither does a counter that fell: it
was reset, or went past its end. So no restart, reload or missing file is ever taken for a fault, nor for its end.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple

from ansible_collections.ringmaster.inference.plugins.module_utils import xid_table
from ansible_collections.ringmaster.inference.plugins.module_utils.gpu_health import RECOVERY, SLOWDOWNS
from ringmaster_scheduler.health_rules import Rule
from ringmaster_scheduler.merge import AgentState, XidEvents

Quantities = Mapping[str, Any]


class Evidence(NamedTuple):
    """What is known: `bad` is None where nothing is; `loss` the share of the capability that is lost, 0 to 1; `text`
    says what was seen."""

    bad: bool | None
    loss: float = 0.0
    text: str = ""


NOTHING: Final = Evidence(None)


def growth(before: Quantities, after: Quantities, *names: str) -> int | float | None:
    """Return the most that one of some counters grew; None if none of them is known at both moments, or one fell."""
    grown = [after[name] - before[name] for name in names if name in before and name in after]
    return None if not grown or min(grown) < 0 else max(grown)


def _over(amount: float | None, limit: float, text: str) -> Evidence:
    return NOTHING if amount is None else Evidence(amount > limit, 0.0, text.format(amount))


# Of counters: a rule, two moments, and the seconds between them ------------------------------------------------------


def _pcie_correctable(rule: Rule, before: Quantities, after: Quantities, seconds: float) -> Evidence:
    grown = growth(before, after, "correctable", "above_correctable")
    return _over(
        None if grown is None else grown / seconds, rule.options["over"], "{:.1f} correctable PCIe errors a second"
    )


def _pcie_uncorrected(rule: Rule, before: Quantities, after: Quantities, _seconds: float) -> Evidence:
    grown = growth(before, after, "nonfatal", "fatal", "above_nonfatal", "above_fatal")
    return _over(grown, rule.options["over"], "{} uncorrectable PCIe errors")


def _pcie_replays(rule: Rule, before: Quantities, after: Quantities, seconds: float) -> Evidence:
    grown = growth(before, after, "pcie_replay_counter")
    return _over(None if grown is None else grown / seconds, rule.options["over"], "{:.2f} PCIe replays a second")


def _ecc_uncorrected(rule: Rule, before: Quantities, after: Quantities, _seconds: float) -> Evidence:
    grown = growth(before, after, "ecc_uncorrected_volatile")
    return _over(grown, rule.options["over"], "{} uncorrectable ECC errors")


def _nvlink_errors(rule: Rule, before: Quantities, after: Quantities, seconds: float) -> Evidence:
    grown = growth(before, after, "errors")
    return _over(None if grown is None else grown / seconds, rule.options["over"], "{:.1f} NVLink errors a second")


def _clock_lost(rule: Rule, before: Quantities, after: Quantities, seconds: float) -> Evidence:
    lost = growth(before, after, "clock_lost_seconds")
    if lost is None:
        return NOTHING
    share = min(1.0, lost / seconds)
    reasons = [name for name in after.get("clock_event_reasons", ()) if name in SLOWDOWNS]
    because = f" ({', '.join(reasons)})" if reasons else ""
    return Evidence(share > rule.options["over"], share, f"{share:.0%} of the clock lost{because}")


GROWTHS: Final[dict[str, Callable[[Rule, Quantities, Quantities, float], Evidence]]] = {
    "pcie_correctable_rate": _pcie_correctable,
    "pcie_uncorrected": _pcie_uncorrected,
    "pcie_replay_rate": _pcie_replays,
    "ecc_uncorrected": _ecc_uncorrected,
    "nvlink_error_rate": _nvlink_errors,
    "clock_lost": _clock_lost,
}


# Of states: a rule, a subject, its quantities, and the host that it is on --------------------------------------------


def _pcie_width(_rule: Rule, subject: str, now: Quantities, _state: AgentState) -> Evidence:
    # Cards tell of their link themselves; of what sysfs shows only network adapters count.
    if subject.startswith("pcie/") and now.get("kind") != "nic":
        return NOTHING
    prefix = "" if subject.startswith("pcie/") else "pcie_"
    width, most = now.get(f"{prefix}width"), now.get(f"{prefix}width_max")
    # 0 and 255 are a link that is down and a function that does not answer: not known, as pcie_info has it.
    if not width or not most or 255 in (width, most):
        return NOTHING
    return Evidence(width < most, max(0.0, 1 - width / most), f"{width} PCIe lanes of {most}")


def _pcie_speed(rule: Rule, _subject: str, now: Quantities, _state: AgentState) -> Evidence:
    generation, most = now.get("pcie_generation"), now.get("pcie_generation_max")
    load, reasons = now.get("utilization_percent"), now.get("clock_event_reasons")
    if not generation or not most or generation > 20 or most > 20 or load is None or reasons is None:
        return NOTHING
    if generation >= most:
        return Evidence(False)
    # An idle card slows its link down by design: that says nothing about what the link can.
    if load < rule.options["load_percent"] or "gpu_idle" in reasons:
        return NOTHING
    return Evidence(
        True, 1 - 2.0 ** (generation - most), f"PCIe generation {generation} of {most} at {load:.0f} % load"
    )


def _flag(name: str, text: str) -> Callable[[Rule, str, Quantities, AgentState], Evidence]:
    def judge(_rule: Rule, _subject: str, now: Quantities, _state: AgentState) -> Evidence:
        return NOTHING if name not in now else Evidence(now[name], 0.0, text)

    return judge


def _nvlink_down(_rule: Rule, _subject: str, now: Quantities, _state: AgentState) -> Evidence:
    down, links = now.get("down"), now.get("links")
    if down is None or links is None:
        return NOTHING
    expected = now.get("expected")
    missing = 0 if expected is None else max(0, expected - links)
    if (links or expected) and len(down) >= links and (now.get("bridge") or not expected):
        # No link is up: a card that no bridge joins to another one looks like that. `HealthBook` knows if one ever was.
        # Of a model that is not known here nobody knows how its cards are joined.
        return Evidence(None, 1.0, f"all {max(links, expected or 0)} NVLinks are down")
    most = max(1, links + missing)
    which = f" ({', '.join(map(str, down))})" if down else ""
    lost = len(down) + missing
    return Evidence(lost > 0, lost / most, f"{lost} of {most} NVLinks are down or missing{which}")


_CARD_STATES: Final = {
    "lost": "has fallen off the bus",
    "reset_required": "answers no more until it is reset",
    "failed": "can't be opened by NVML",
    "no_answer": "gives no answer",
    "not_listed": "is on the bus but not in NVML",
}


def _card_state(rule: Rule, _subject: str, now: Quantities, _state: AgentState) -> Evidence:
    found = now.get("state")
    if found is not None and found in rule.options["states"]:
        return Evidence(True, 1.0, f"the card {_CARD_STATES[found]}")
    return Evidence(False) if found in ("ok", "answers") else NOTHING


def _recovery_action(_rule: Rule, _subject: str, now: Quantities, _state: AgentState) -> Evidence:
    action = now.get("recovery_action")
    if action == "none":
        return Evidence(False)
    return Evidence(True, 1.0, f"the driver asks for {action.replace('_', ' ')}") if action in RECOVERY else NOTHING


def _xids(rule: Rule, subject: str, now: Quantities, state: AgentState) -> Evidence:
    """An Xid counts while it is younger than ``age_s``; so its end needs no memory, and survives a restart of the
    scheduler."""
    read_at = state.read.get("xid")
    if read_at is None:
        return NOTHING
    found: list[tuple[str, XidEvents]] = []
    number = 0
    for code, events in now.items():
        action = events.action or (xid_table.XIDS[int(code)].action if int(code) in xid_table.XIDS else "report")
        young = sum(0 <= read_at - at < rule.options["age_s"] for at in events.recent)
        if young and action in rule.options["actions"]:
            number += young
            found.append((code, events))
    if number < rule.options["count"]:
        return Evidence(False)
    last = max(events.seconds for _unused, events in found)
    heard = _asks_nothing(subject, state, last)
    wanted = rule.options["driver"]
    if (wanted == "asks_nothing" and not heard) or (wanted == "not_heard" and heard):
        return Evidence(False)
    codes = ", ".join(f"Xid {code} ({events.action or 'no action told'})" for code, events in sorted(found))
    return Evidence(True, 1.0, f"{codes}, the last {read_at - last:.0f} s ago")


def _asks_nothing(subject: str, state: AgentState, since: float) -> bool:
    """Whether the driver, asked after the Xid, recommends nothing for that card: its word outranks the table of
    Xids."""
    if state.read.get("gpu", -1.0) <= since:
        return False
    address = subject.partition("/")[2].rpartition(".")[0] or subject.partition("/")[2]
    return any(
        quantities.get("recovery_action") == "none" and quantities.get("pci_address", "").startswith(address)
        for name, quantities in state.subjects.items()
        if name.startswith("gpu/")
    )


STATES: Final[dict[str, Callable[[Rule, str, Quantities, AgentState], Evidence]]] = {
    "pcie_width": _pcie_width,
    "pcie_speed": _pcie_speed,
    "remap_pending": _flag("remapped_rows_pending", "a row waits for its remapping, which the next reset brings"),
    "remap_failed": _flag("remapped_rows_failed", "remapping a row failed"),
    "nvlink_down": _nvlink_down,
    "card_state": _card_state,
    "recovery_action": _recovery_action,
    "xid": _xids,
}
