# SPDX-License-Identifier: GPL-3.0-or-later
"""The table of health rules: the role's own is good and documented, and a wrong one is refused by its name."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringmaster_scheduler import health_rules
from ringmaster_scheduler.health_rules import KINDS, RuleError
from tests.unit.scheduler.fake_agent import TABLE, rules

DOCUMENT = Path(__file__).resolve().parents[3] / "docs" / "health.md"


def test_the_roles_table_is_good_and_uses_every_kind() -> None:
    parsed = rules()
    assert [rule.name for rule in parsed] == sorted(TABLE)
    assert {rule.kind for rule in parsed} == set(KINDS)


def test_every_rule_and_kind_is_documented_with_its_numbers() -> None:
    text = DOCUMENT.read_text()
    for rule in rules():
        row = next(line for line in text.splitlines() if line.startswith(f"| `{rule.name}`"))
        effect = str(rule.effect if rule.factor is None else f"× {rule.factor:g}")
        for told in (f"{rule.windows} × {rule.window:g} s", effect, f"{rule.back}", f"{rule.hold:g} s"):
            assert told in row, (rule.name, told)
    assert all(f"`{kind}`" in text for kind in KINDS)


def test_a_rule_survives_its_own_document() -> None:
    assert health_rules.parse({rule.name: _plain(rule.document()) for rule in rules()}) == rules()


def _plain(document: dict[str, Any]) -> dict[str, Any]:
    return {key: list(value) if isinstance(value, tuple) else value for key, value in document.items()}


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("hung", {"kind": "hangs"}, "hung.kind: expected one of retransmit_ratio, "),
        ("hung", {"kind": ["xid"]}, "hung.kind: expected one of"),
        ("hung", {"windows": 0}, "hung.windows: expected a whole number from 1 to 10000, found 0"),
        ("hung", {"windows": 1.5}, "hung.windows: expected a whole number"),
        ("hung", {"back": True}, "hung.back: expected a whole number"),
        ("hung", {"window_s": "8"}, "hung.window_s: expected a number from 0.1 to 86400, found '8'"),
        ("hung", {"window_s": float("nan")}, "hung.window_s: expected a number"),
        ("hung", {"effect": "gone"}, "hung.effect: expected a factor from 0.01 to 1, out, last_resort or proportional"),
        ("hung", {"effect": 0}, "hung.effect: expected a factor"),
        ("hung", {"effect": 1.1}, "hung.effect: expected a factor"),
        ("hung", {"effect": True}, "hung.effect: expected a factor"),
        ("hung", {"effect": "proportional", "floor": 0.1}, "hung.effect: no_progress does not tell how much is lost"),
        ("hung", {"floor": 0.1}, "hung.floor: expected only where the effect is proportional"),
        ("throttled", {"floor": 0}, "throttled.floor: expected a number from 0.01 to 1, found 0"),
        ("hung", {"over": 1}, "hung: unknown key 'over'; of no_progress known: back, "),
        ("roce_retransmits", {"packets": -1}, "roce_retransmits.packets: expected a whole number"),
        ("xid_fatal", {"actions": []}, "xid_fatal.actions: expected a list of some of none, restart_application"),
        ("xid_fatal", {"actions": ["explode"]}, "xid_fatal.actions: expected a list"),
        ("canary_wrong", {"compare": "all"}, "canary_wrong.compare: expected one of pool, card; found 'all'"),
        ("hung", {"enabled": "no"}, "hung.enabled: expected true or false, found 'no'"),
        ("a b", {"kind": "no_progress"}, "'a b': expected a name of letters, digits and _"),
        ("mine", {"kind": "no_progress"}, "mine.back is missing"),
    ],
)
def test_wrong_rule_is_named(name: str, change: dict[str, Any], message: str) -> None:
    with pytest.raises(RuleError) as caught:
        rules(**{name: change})
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize("key", ["kind", "window_s", "windows", "effect", "back", "hold_s", "over"])
def test_missing_key_is_named(key: str) -> None:
    table = copy.deepcopy(TABLE)
    del table["nvlink_errors"][key]
    with pytest.raises(RuleError, match=f"nvlink_errors.{key}"):
        health_rules.parse(table)


def test_rule_can_be_left_out_and_added() -> None:
    own = {"kind": "no_progress", "window_s": 60, "windows": 1, "effect": 0.5, "back": 1, "hold_s": 0}
    names = [rule.name for rule in rules(hung={"enabled": False}, slow=own)]
    assert "hung" not in names
    assert "slow" in names


VALUES = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.lists(st.text(max_size=3))


@given(st.dictionaries(st.sampled_from(sorted(TABLE)), st.dictionaries(st.text(max_size=8), VALUES) | VALUES))
def test_any_document_is_used_or_refused(changes: dict[str, Any]) -> None:
    table = {
        name: {**TABLE[name], **change} if isinstance(change, dict) else change for name, change in changes.items()
    }
    try:
        parsed = health_rules.parse(table)
    except RuleError:
        return
    for rule in parsed:
        for loss in (0.0, 0.3, 1.0):
            assert rule.value(loss) == 0 if rule.closes else 0.01 <= rule.value(loss) <= 1
