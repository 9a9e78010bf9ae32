# SPDX-License-Identifier: GPL-3.0-or-later
"""The table of rules: what makes a card good, and what does not make it bad."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ansible_collections.ringmaster.inference.plugins.module_utils.gpu import READINGS, RECOVERY_ACTIONS
from ansible_collections.ringmaster.inference.plugins.module_utils.gpu_health import (
    DECISIVE,
    RECOVERY,
    RULES,
    STATES,
    VERDICTS,
    judge,
    worst,
)

HEALTHY: dict[str, Any] = {
    "state": "answers",
    "unknown": {},
    "unread": [],
    "memory_used_bytes": 85899345920,
    "memory_total_bytes": 85899345920,
    "utilization_percent": 0,
    "clock_event_reasons": ["gpu_idle"],
    "ecc_current": True,
    "ecc_pending": True,
    "ecc_uncorrected_volatile": 0,
    "ecc_uncorrected_aggregate": 7,
    "remapped_rows_corrected": 0,
    "remapped_rows_uncorrected": 0,
    "remapped_rows_pending": False,
    "remapped_rows_failed": False,
    "remap_banks": {"max": 640, "high": 0, "partial": 0, "low": 0, "none": 0},
    "retired_pages_pending": None,
    "pcie_width": 16,
    "pcie_width_max": 16,
    "pcie_generation": 1,
    "pcie_generation_max": 4,
    "mig_current": False,
    "mig_pending": False,
    "recovery_action": "none",
}


def rules(**changes: Any) -> list[tuple[str, str]]:
    return [(each["rule"], each["verdict"]) for each in judge(HEALTHY | changes)["reasons"]]


def test_a_full_memory_an_idle_link_and_old_errors_are_no_faults() -> None:
    assert judge(HEALTHY) == {"verdict": "ok", "reasons": []}


@pytest.mark.parametrize(
    ("changes", "rule", "verdict"),
    [
        ({"remapped_rows_failed": True}, "row_remapping_failed", "replace"),
        ({"remapped_rows_corrected": 13, "remapped_rows_uncorrected": 500}, "too_many_remapped_rows", "replace"),
        ({"remapped_rows_pending": True}, "row_remapping_pending", "watch"),
        ({"remap_banks": {"max": 639, "none": 1}}, "bank_without_spare_rows", "watch"),
        ({"retired_pages_pending": True}, "page_retirement_pending", "watch"),
        ({"ecc_uncorrected_volatile": 1}, "uncorrected_ecc_errors", "watch"),
        ({"ecc_uncorrected_volatile": 1, "recovery_action": None}, "uncorrected_ecc_errors", "drain"),
        ({"ecc_pending": False}, "ecc_change_pending", "watch"),
        ({"mig_pending": True}, "mig_change_pending", "watch"),
        ({"pcie_width": 8}, "pcie_width", "watch"),
        ({"utilization_percent": 99, "clock_event_reasons": []}, "pcie_generation", "watch"),
        ({"clock_event_reasons": ["hw_slowdown"]}, "slowed_down", "watch"),
        ({"clock_event_reasons": ["sw_thermal_slowdown"]}, "slowed_down", "watch"),
        ({"clock_event_reasons": ["hw_thermal_slowdown"]}, "slowed_down", "watch"),
        ({"clock_event_reasons": ["hw_power_brake_slowdown"]}, "slowed_down", "watch"),
        ({"recovery_action": "reset"}, "recovery_action", "reset"),
        ({"recovery_action": "drain_and_reset"}, "recovery_action", "reset"),
        ({"recovery_action": "reboot"}, "recovery_action", "reboot"),
        ({"recovery_action": "system_reboot"}, "recovery_action", "reboot"),
        ({"recovery_action": "bus_reset"}, "recovery_action", "reboot"),
        ({"recovery_action": "drain_p2p"}, "recovery_action", "drain"),
        ({"recovery_action": "unknown_8"}, "recovery_action", "unknown"),
        ({"state": "lost", "recovery_action": None}, "lost", "power_cycle"),
        ({"state": "reset_required"}, "reset_required", "reset"),
        ({"state": "no_answer"}, "no_answer", "unknown"),
        ({"state": "not_listed"}, "not_listed", "unknown"),
        ({"state": "failed"}, "failed", "unknown"),
    ],
)
def test_each_rule(changes: dict[str, Any], rule: str, verdict: str) -> None:
    assert rules(**changes) == [(rule, verdict)]
    assert judge(HEALTHY | changes)["verdict"] == verdict


@pytest.mark.parametrize(
    "changes",
    [
        {"remapped_rows_corrected": 12, "remapped_rows_uncorrected": 500},
        {"utilization_percent": 99},
        {"utilization_percent": 49, "clock_event_reasons": []},
        {"clock_event_reasons": ["sw_power_cap", "applications_clocks_setting", "sync_boost"]},
        {"pcie_generation": 4, "utilization_percent": 100, "clock_event_reasons": []},
        {"recovery_action": None},
    ],
)
def test_just_below_each_rule(changes: dict[str, Any]) -> None:
    assert rules(**changes) == []


def test_the_worst_reason_decides_and_comes_first() -> None:
    found = judge(HEALTHY | {"remapped_rows_failed": True, "recovery_action": "reset", "pcie_width": 8})
    assert found["verdict"] == "replace"
    assert [each["verdict"] for each in found["reasons"]] == ["replace", "reset", "watch"]


def test_the_reason_tells_what_was_found() -> None:
    (reason,) = judge(HEALTHY | {"pcie_width": 8})["reasons"]
    assert reason["reason"] == "its PCIe link has 8 lanes of 16"
    assert "seating" in reason["action"]


def test_a_decisive_reading_that_failed_hides_a_fault() -> None:
    hidden = {
        "remapped_rows_failed": None,
        "unread": ["remapped_rows_failed"],
        "unknown": {"remapped_rows_failed": "no permission"},
    }
    found = judge(HEALTHY | hidden)
    assert found["verdict"] == "unknown"
    assert found["reasons"][0]["reason"] == "remapped_rows_failed: no permission"
    assert judge(HEALTHY | hidden | {"recovery_action": "reset"})["verdict"] == "reset"
    # What this card does not have hides nothing, nor does what would make it watched at most.
    assert judge(HEALTHY | hidden | {"unread": []})["verdict"] == "ok"
    assert judge(HEALTHY | {"pcie_width": None, "unread": ["pcie_width"]})["verdict"] == "ok"


def test_the_table_is_whole() -> None:
    assert {action for action in RECOVERY_ACTIONS.values() if action != "none"} == RECOVERY.keys()
    for rule in RULES:
        assert rule.verdict in VERDICTS
        assert set(rule.needs) <= set(READINGS)
        assert rule.action
        assert rule.source
    assert {verdict for verdict, _reason, _action, _source in STATES.values()} <= set(VERDICTS)
    assert "remapped_rows_failed" in DECISIVE
    assert len({rule.name for rule in RULES}) == len(RULES)


@given(st.lists(st.sampled_from(VERDICTS)))
def test_the_worst_of_some(verdicts: list[str]) -> None:
    assert worst(verdicts) == (max(verdicts, key=VERDICTS.index) if verdicts else "ok")
