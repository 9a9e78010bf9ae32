# Copyright (c) 2026, the Ringmaster authors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""From what was read of a card to a verdict: one table of rules, each with what to do and where it comes from.

Memory that is merely full is no fault (engines fill it by design), nor is a link that an idle card slowed down, nor
power that is below its limit: no rule looks at them. Nothing here imports Ansible.

Sources: XID is NVIDIA's "XID Errors" and "GPU Memory Error Management" (docs.nvidia.com/deploy/xid-errors,
…/a100-gpu-mem-error-mgmt), RMA its "RMA Process" (…/rma-process), NVML its API reference (…/nvml-api).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

# From best to worst; a card's verdict is the worst of its reasons. Not to know is worse than to watch: nobody should
# place work on a card because its fault could not be read.
VERDICTS = ("ok", "watch", "unknown", "drain", "reset", "reboot", "power_cycle", "replace")

LARGEST_REMAPS = 512
"""More remapped rows than this and the card is to be replaced (RMA)."""

UNDER_LOAD_PERCENT = 50
"""From this utilization on, a card's PCIe link must run at its full speed. A rule of thumb: NVML's sampling period is
at most a second, so that the card has worked long enough to have raised a link that it slows down when idle."""

SLOWDOWNS = ("hw_slowdown", "sw_thermal_slowdown", "hw_thermal_slowdown", "hw_power_brake_slowdown")

Card = dict[str, Any]


@dataclass(frozen=True)
class Rule:
    """`holds` is asked only if every field of `needs` is known. `reason` and `action` are for people.

    Braces in `reason` stand for fields of the card. `unless_driver_tells`: the recovery action that the driver tells
    outranks this rule's verdict, which then is ``watch``.
    """

    name: str
    verdict: str
    needs: tuple[str, ...]
    holds: Callable[[Card], bool]
    reason: str
    action: str
    source: str
    unless_driver_tells: bool = False


STATES = {
    "lost": (
        "power_cycle",
        "has fallen off the bus",
        "drain the host, power-cycle it, check the card's seating, power cables and PCIe errors; a reset can't work",
        "XID 79",
    ),
    "reset_required": ("reset", "answers no more until it is reset", "drain, stop what uses it, reset it", "NVML 16"),
    "failed": ("unknown", "NVML can't open it", "read `nvidia-smi -q` and the kernel log (xid_info)", "NVML"),
    "no_answer": (
        "unknown",
        "gave no answer in time; a card that fell off its bus does that",
        "drain, and read the kernel log (xid_info) for Xid 79, 119 or 120",
        "NVML",
    ),
    "not_listed": (
        "unknown",
        "is on the PCI bus but not in NVML",
        "read `dmesg | grep -i nvrm`; a card that is given to a virtual machine belongs to vfio-pci on purpose",
        "NVML",
    ),
}

# What the driver itself recommends (field 230, nvidia-smi's GPU Recovery Action, Xid 154). It outranks the Xid table.
RECOVERY = {
    "reset": ("reset", "drain, stop what uses the card, reset it"),
    "drain_and_reset": ("reset", "let running work end (new work fails), then stop what uses the card and reset it"),
    "reboot": ("reboot", "drain the host and reboot it"),
    "system_reboot": ("reboot", "drain the host and reboot it"),
    "bus_reset": ("reboot", "drain the host and reboot it, which resets the bus"),
    "drain_p2p": ("drain", "stop work that uses peer-to-peer traffic with this card"),
    "recover_imex_domain": ("drain", "recover the IMEX domain (nvidia-imex) that the card belongs to"),
}

RULES = (
    Rule(
        "row_remapping_failed",
        "replace",
        ("remapped_rows_failed",),
        lambda card: bool(card["remapped_rows_failed"]),
        "remapping a row failed",
        "take it out of service, run NVIDIA's field diagnostics, have it replaced if they confirm it",
        "RMA, XID 64",
    ),
    Rule(
        "too_many_remapped_rows",
        "replace",
        ("remapped_rows_corrected", "remapped_rows_uncorrected"),
        lambda card: bool(card["remapped_rows_corrected"] + card["remapped_rows_uncorrected"] > LARGEST_REMAPS),
        "{remapped_rows_corrected} + {remapped_rows_uncorrected} rows are remapped, more than 512",
        "take it out of service, run NVIDIA's field diagnostics, have it replaced if they confirm it",
        "RMA",
    ),
    Rule(
        "uncorrected_ecc_errors",
        "drain",
        ("ecc_uncorrected_volatile",),
        lambda card: bool(card["ecc_uncorrected_volatile"] > 0),
        "{ecc_uncorrected_volatile} uncorrectable ECC errors since its driver was loaded or it was reset",
        "read the Xids (xid_info): 94 means restart the application, 95 means reset; reset it at the next maintenance",
        "XID 48, 94, 95",
        unless_driver_tells=True,
    ),
    Rule(
        "row_remapping_pending",
        "watch",
        ("remapped_rows_pending",),
        lambda card: bool(card["remapped_rows_pending"]),
        "a row is marked for remapping, which takes effect at its next reset",
        "go on; reset it at the next maintenance",
        "XID 63",
    ),
    Rule(
        "page_retirement_pending",
        "watch",
        ("retired_pages_pending",),
        lambda card: bool(card["retired_pages_pending"]),
        "a page is marked for retirement, which takes effect when its driver is loaded anew",
        "go on; reboot the host at the next maintenance",
        "XID 63",
    ),
    Rule(
        "bank_without_spare_rows",
        "watch",
        ("remap_banks",),
        lambda card: bool(card["remap_banks"]["none"] > 0),
        "a memory bank has no spare row left, so that its next uncorrectable error can't be remapped",
        "plan its replacement; the ninth uncorrectable error in a bank that carries eight makes it due",
        "RMA",
    ),
    Rule(
        "pcie_width",
        "watch",
        ("pcie_width", "pcie_width_max"),
        lambda card: bool(card["pcie_width"] < card["pcie_width_max"]),
        "its PCIe link has {pcie_width} lanes of {pcie_width_max}",
        "check its seating, its slot or riser and the PCIe errors (pcie_info)",
        "PCI",
    ),
    Rule(
        "pcie_generation",
        "watch",
        ("pcie_generation", "pcie_generation_max", "utilization_percent", "clock_event_reasons"),
        lambda card: (
            bool(card["pcie_generation"] < card["pcie_generation_max"])
            and card["utilization_percent"] >= UNDER_LOAD_PERCENT
            and "gpu_idle" not in card["clock_event_reasons"]
        ),
        "its PCIe link runs at generation {pcie_generation} of {pcie_generation_max} at {utilization_percent} % load",
        "check its seating, its slot or riser and the PCIe errors (pcie_info)",
        "PCI",
    ),
    Rule(
        "slowed_down",
        "watch",
        ("clock_event_reasons",),
        lambda card: any(reason in SLOWDOWNS for reason in card["clock_event_reasons"]),
        "its clocks are held down: {clock_event_reasons}",
        "for a thermal reason look at temperatures, air flow and fans (BMC), for a power brake at the power supplies",
        "NVML",
    ),
    Rule(
        "ecc_change_pending",
        "watch",
        ("ecc_current", "ecc_pending"),
        lambda card: bool(card["ecc_current"] != card["ecc_pending"]),
        "its ECC mode changes with the next reboot",
        "reboot the host at the next maintenance, or take the change back (gpu_ecc)",
        "NVML",
    ),
    Rule(
        "mig_change_pending",
        "watch",
        ("mig_current", "mig_pending"),
        lambda card: bool(card["mig_current"] != card["mig_pending"]),
        "its MIG mode changes with its next reset",
        "reset it at the next maintenance, or take the change back (nvidia-smi -mig)",
        "NVML",
    ),
)

# A reading that failed hides these: an otherwise good card can't be called good.
DECISIVE = frozenset(
    field for rule in RULES if VERDICTS.index(rule.verdict) > VERDICTS.index("unknown") for field in rule.needs
)


def judge(card: Card) -> dict[str, Any]:
    """``{verdict, reasons}`` for a card as :func:`.gpu.survey` gives it.

    Each of `reasons` is ``{rule, verdict, reason, action, source}``, the worst first; empty if the verdict is ``ok``.
    """
    reasons = [_recovery(card["recovery_action"])] if card["recovery_action"] not in (None, "none") else []
    if card["state"] in STATES:
        verdict, reason, action, source = STATES[card["state"]]
        reasons.append(_reason(card["state"], verdict, reason, action, source))
    for rule in RULES:
        if all(card[field] is not None for field in rule.needs) and rule.holds(card):
            verdict = "watch" if rule.unless_driver_tells and card["recovery_action"] is not None else rule.verdict
            shown = {
                field: ", ".join(value) if isinstance(value, list) else value
                for field, value in ((field, card[field]) for field in rule.needs)
            }
            reasons.append(_reason(rule.name, verdict, rule.reason.format_map(shown), rule.action, rule.source))
    hidden = sorted(DECISIVE.intersection(card["unread"]))
    if hidden and card["state"] == "answers":
        told = "; ".join(f"{field}: {card['unknown'].get(field, 'no reason')}" for field in hidden)
        reasons.append(_reason("not_read", "unknown", told, "mend what keeps it from being read", "NVML"))
    reasons.sort(key=lambda reason: -VERDICTS.index(reason["verdict"]))
    return {"verdict": reasons[0]["verdict"] if reasons else "ok", "reasons": reasons}


def worst(verdicts: list[str]) -> str:
    """The worst of some verdicts; ``ok`` of none."""
    return max(verdicts, key=VERDICTS.index, default="ok")


def _recovery(action: str) -> dict[str, str]:
    verdict, to_do = RECOVERY.get(
        action, ("unknown", "look the action up: nvidia-smi -q (GPU Recovery Action) and NVML's reference")
    )
    reason = f"the driver asks for the recovery action {action}"
    return _reason("recovery_action", verdict, reason, to_do, "NVML field 230, XID 154")


def _reason(rule: str, verdict: str, reason: str, action: str, source: str) -> dict[str, str]:
    return {"rule": rule, "verdict": verdict, "reason": reason, "action": action, "source": source}
