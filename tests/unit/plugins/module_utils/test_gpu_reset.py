# SPDX-License-Identifier: GPL-3.0-or-later
"""The rules of a card's reset: what is refused, which cards go together, what is wrong afterwards."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ansible_collections.ringmaster.inference.plugins.module_utils.gpu_reset import (
    AGENT,
    FABRIC_MANAGER,
    NEXT_STEPS,
    PERSISTENCE_DAEMON,
    Card,
    Facts,
    Holder,
    Link,
    Plan,
    Problem,
    Request,
    Unit,
    check_uuid,
    make_plan,
    needs,
    next_step,
    reset_together,
    services_to_stop,
    unit_name,
    verify,
)
from ansible_collections.ringmaster.inference.plugins.module_utils.gpu_reset_ledger import Run
from tests.support.gpu_reset_world import OTHER, UUID, card, links

ENGINE = "engine@main.service"


def facts(*cards: Card, **more: Any) -> Facts:
    known: dict[str, Any] = {
        "now": 2e9,
        "boot_id": "boot",
        "root": True,
        "units": {ENGINE: Unit(ENGINE, active="active")},
    }
    return Facts(cards=cards or (card(recovery_action="reset"), card(OTHER)), **{**known, **more})


def request(**more: Any) -> Request:
    return Request(**{"uuid": UUID, "services": (ENGINE,), **more})


def codes(asked: Request, found: Facts) -> list[str]:
    return [problem.code for problem in make_plan(asked, found)[1]]


# Names


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("0", "the index 0"),
        ("12", "the index 12"),
        ("0000:07:00.0", "the PCI address 0000:07:00.0"),
        ("00000000:07:00.0", "the PCI address"),
        ("07:00.0", "the PCI address"),
        ("MIG-3eb87630-93d5-b2b6-b8ff-9b359caf4ee2", "a MIG slice"),
        ("GPU-5F1C0D3A-8F0E-4A51-9D2C-0B7F3F1F9A01", "GPU-5F1C0D3A"),
        ("GPU-5f1c0d3a", "GPU-5f1c0d3a"),
        (f"{UUID},{OTHER}", "GPU-"),
        (f"{UUID}\n", "GPU-"),
        ("", "''"),
        ("²", "²"),
    ],
)
def test_only_a_uuid_names_a_card(text: str, found: str) -> None:
    problem = check_uuid(text)
    assert problem is not None
    assert found in problem.found
    assert check_uuid(UUID) is None


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("engine", "engine.service"),
        ("engine@main", "engine@main.service"),
        ("nvidia-dcgm.service", "nvidia-dcgm.service"),
        ("engine.socket", "engine.socket"),
        ("a.b", "a.b.service"),
        ("engine@*", None),
        ("--help", None),
        ("engine main", None),
        ("", None),
        ("ä", None),
    ],
)
def test_unit_names(text: str, name: str | None) -> None:
    assert unit_name(text) == name


# Refusals


def test_recovery_action_is_reason_enough() -> None:
    plan, problems = make_plan(request(), facts())
    assert problems == []
    assert plan is not None
    assert plan.reason == "the driver's recovery action is reset"
    assert plan.uuids == (UUID,)


@pytest.mark.parametrize("action", ["none", None, "unknown_9"])
def test_no_reason(action: str | None) -> None:
    found = facts(card(recovery_action=action))
    assert codes(request(), found) == ["no_reason"]
    assert codes(request(reason="  "), found) == ["no_reason"]
    assert codes(request(reason="Xid 119"), found) == []


@pytest.mark.parametrize(
    "values", [{"rows_pending": True}, {"pages_pending": True}, {"state": "reset_required", "recovery_action": None}]
)
def test_what_a_reset_activates_is_reason_enough(values: dict[str, Any]) -> None:
    assert codes(request(), facts(card(**values))) == []


@pytest.mark.parametrize("action", ["reboot", "system_reboot", "bus_reset"])
def test_driver_that_asks_for_more_than_a_reset(action: str) -> None:
    _plan, problems = make_plan(request(reason="Xid 140"), facts(card(recovery_action=action)))
    assert [(problem.code, problem.step) for problem in problems] == [("reset_not_enough", "reboot")]


@pytest.mark.parametrize("action", ["drain_p2p", "recover_imex_domain"])
def test_driver_that_asks_for_something_else(action: str) -> None:
    assert codes(request(reason="Xid 155"), facts(card(recovery_action=action))) == ["reset_not_asked"]


@pytest.mark.parametrize(
    "reason",
    [
        "memory is full",
        "GPU memory 97% used",
        "CUDA out of memory",
        "OOM",
        "free the memory",
        "memory leak",
        "KV cache exhausted",
        "VRAM at 99 %",
        "95 % memory five times",
    ],
)
def test_memory_in_use_is_no_fault(reason: str) -> None:
    held = (Holder(7, "engine", "engine", ENGINE, "/dev/nvidia1", "open"),)
    assert codes(request(reason=reason), facts(card(), holders=held)) == ["memory_full"]
    assert codes(request(reason=reason), facts(card(processes=(7,)))) == ["memory_full"]


@pytest.mark.parametrize(
    "reason",
    [
        "uncontained memory error, Xid 95",
        "ECC error in memory",
        "row remapping",
        "clear ECC errors of the memory",
        "Xid 119, memory 90 %",
    ],
)
def test_faults_of_memory_are_faults(reason: str) -> None:
    assert codes(request(reason=reason), facts(card(processes=(7,)))) == []


def test_memory_that_nobody_holds_may_be_freed_by_a_reset() -> None:
    assert codes(request(reason="memory in use 40 GiB, but by no process"), facts(card())) == []


def test_unknown_card_names_the_known_ones() -> None:
    _plan, problems = make_plan(request(uuid="GPU-99999999-0000-0000-0000-000000000001"), facts())
    assert problems[0].code == "unknown_uuid"
    assert UUID in problems[0].found


def test_unknown_card_may_be_the_silent_one() -> None:
    silent = Card(None, "0000:41:00.0", state="no_answer")
    _plan, problems = make_plan(request(uuid="GPU-99999999-0000-0000-0000-000000000001"), facts(card(), silent))
    assert problems[0].code == "card_lost"
    assert "0000:41:00.0" in problems[0].found


def test_card_off_the_bus() -> None:
    _plan, problems = make_plan(request(reason="Xid 79"), facts(card(state="lost")))
    assert [(problem.code, problem.step) for problem in problems] == [("card_lost", "power_cycle")]
    silent = card(state="no_answer")
    assert codes(request(reason="x"), facts(silent)) == ["card_silent"]
    assert codes(request(reason="x"), facts(silent, fallen=frozenset({"0000:01:00.0"}))) == ["card_lost"]
    assert codes(request(reason="x"), facts(silent, fallen=frozenset({"0000:02:00.0"}))) == ["card_silent"]


def test_card_that_came_back_to_the_bus_is_warned_of() -> None:
    plan, problems = make_plan(request(), facts(card(recovery_action="reset"), fallen=frozenset({"0000:01:00.0"})))
    assert problems == []
    assert plan is not None
    assert any("Xid 79" in warning for warning in plan.warnings)


@pytest.mark.parametrize(
    ("more", "code"),
    [
        ({"root": False}, "not_root"),
        ({"running_reset": "process 5 (nvidia-smi -r)"}, "reset_under_way"),
        ({"blind": "that process 1 can't be looked into"}, "holders_unknown"),
        ({"units": {}}, "unknown_service"),
        ({"units": {ENGINE: Unit(ENGINE, "not-found")}}, "unknown_service"),
        ({"units": {ENGINE: Unit(ENGINE, "masked")}}, "unknown_service"),
    ],
)
def test_host_that_is_not_ready(more: dict[str, Any], code: str) -> None:
    assert codes(request(), facts(**more)) == [code]


def test_holders_of_services_to_stop_are_no_problem() -> None:
    own = Holder(1, "engine", "engine", ENGINE, "/dev/nvidia1", "open")
    foreign = Holder(2, "python3 train.py", "alice", "", "/dev/nvidia1", "mapped")
    plan, problems = make_plan(request(), facts(holders=(own, foreign)))
    assert plan is not None
    assert [problem.found for problem in problems] == [str(foreign)]
    assert "no unit of systemd" in str(problems[0])


def test_process_left_behind_by_a_service_that_does_not_run_is_a_problem() -> None:
    left = Holder(1, "engine", "engine", ENGINE, "/dev/nvidia1", "open")
    assert codes(request(), facts(holders=(left,), units={ENGINE: Unit(ENGINE, active="failed")})) == ["held"]


def run(at: str, uuids: tuple[str, ...] = (UUID,)) -> Run:
    return Run("r", "boot", uuids[0], list(uuids), at, 0, 0, None, {}, reset_at=at)


def test_resets_in_the_window_are_counted_for_every_card() -> None:
    now = 1_767_225_600.0  # 2026-01-01T00:00:00Z
    recent = (run("2025-12-31T23:00:00Z", (OTHER, UUID)), run("2025-12-31T23:30:00Z"))
    old = (run("2025-12-29T00:00:00Z"), run("2025-12-31T23:30:00Z"))
    assert codes(request(), facts(now=now, runs=recent)) == ["too_many_resets"]
    assert codes(request(max_resets=3), facts(now=now, runs=recent)) == []
    assert codes(request(), facts(now=now, runs=old)) == []
    assert codes(request(window=1e9), facts(now=now, runs=old)) == ["too_many_resets"]


def test_clock_that_was_set_back_and_damaged_times_count() -> None:
    assert codes(request(), facts(now=0.0, runs=(run("2026-01-01T00:00:00Z"),) * 2)) == ["too_many_resets"]
    assert codes(request(), facts(runs=(run("yesterday"),) * 2)) == ["too_many_resets"]
    assert codes(request(), facts(runs=(run(""),) * 2)) == []


# Cards that go together

A, B, C, D = (f"GPU-00000000-0000-0000-0000-00000000000{number}" for number in range(1, 5))


def together(cards: list[Card], fabric_manager: bool = False) -> list[str | None]:
    return [each.uuid for each in reset_together(cards[0], cards, fabric_manager)]


def mesh(architecture: int | None, model: str = "NVIDIA A100-SXM4-80GB") -> list[Card]:
    """Three cards, each linked to each, and a fourth one alone."""
    addresses = {uuid: f"0000:0{uuid[-1]}:00.0" for uuid in (A, B, C)}
    joined = [
        card(
            uuid,
            architecture=architecture,
            model=model,
            links=links(*(address for other, address in addresses.items() if other != uuid)),
            links_expected=2,
        )
        for uuid in addresses
    ]
    return [*joined, card(D, architecture=architecture, model=model)]


def test_cards_without_links_are_reset_alone() -> None:
    assert together([card(A), card(B)]) == [A]


@pytest.mark.parametrize("architecture", [5, 6, None])
@pytest.mark.parametrize("fabric_manager", [True, False])
def test_old_cards_go_with_their_peers(architecture: int | None, fabric_manager: bool) -> None:
    assert together(mesh(architecture), fabric_manager) == [A, B, C]


def test_ampere_goes_alone_only_with_fabric_manager() -> None:
    assert together(mesh(7), fabric_manager=True) == [A]
    assert together(mesh(7), fabric_manager=False) == [A, B, C]


@pytest.mark.parametrize("architecture", [9, 10, 13])
def test_hopper_and_later_go_alone(architecture: int) -> None:
    assert together(mesh(architecture)) == [A]


def test_peers_of_peers_go_along() -> None:
    chain = [
        card(A, architecture=5, links=links("0000:02:00.0")),
        card(B, architecture=5, links=links("0000:01:00.0", "0000:03:00.0")),
        card(C, architecture=5, links=links("0000:02:00.0")),
        card(D, architecture=5, links=links("0000:09:00.0")),
    ]
    assert together(chain) == [A, B, C]


def test_cards_on_nvswitches_go_together_without_fabric_manager() -> None:
    switched = [card(uuid, architecture=7, links=links("switch", "switch")) for uuid in (A, B, C, D)]
    assert together(switched) == [A, B, C, D]
    assert together(switched, fabric_manager=True) == [A]


def test_link_that_is_down_hides_its_peer_so_all_linked_cards_go_along() -> None:
    cards = mesh(7)
    down = replace(cards[0], links=(Link(0, False), Link(1, False)))
    assert together([down, *cards[1:]]) == [A, B, C]


def test_boards_that_no_bridge_joins_go_alone() -> None:
    boards = [card(uuid, architecture=7, links=links("", "", up=False), links_expected=0) for uuid in (A, B)]
    assert together(boards) == [A]


def test_fabric_manager_that_is_to_be_stopped_counts_as_stopped() -> None:
    cards = [replace(each, recovery_action="reset") for each in mesh(7)]
    units = {ENGINE: Unit(ENGINE, active="active"), FABRIC_MANAGER: Unit(FABRIC_MANAGER, active="active")}
    found = facts(*cards, fabric_manager=True, units=units)
    plan, problems = make_plan(request(uuid=A), found)
    assert plan is not None
    assert (plan.uuids, problems) == ((A,), [])
    plan, problems = make_plan(request(uuid=A, services=(ENGINE, FABRIC_MANAGER)), found)
    assert plan is not None
    assert (plan.uuids, problems) == ((A, B, C), [])
    assert any(B in warning for warning in plan.warnings)


def test_peer_that_is_lost_stops_the_reset_of_all() -> None:
    cards = mesh(7)
    assert codes(
        request(uuid=A, reason="Xid 74"), facts(replace(cards[0]), replace(cards[1], state="lost"), cards[2])
    ) == ["card_lost"]


# Services


def test_order_of_services() -> None:
    units = {
        "a.service": Unit("a.service", active="active", dependents=("a.socket", "monitor.service")),
        "a.socket": Unit("a.socket", active="active"),
        "monitor.service": Unit("monitor.service", active="activating"),
        "b.service": Unit("b.service", active="inactive", dependents=("c.service",)),
        "c.service": Unit("c.service", active="active"),
        PERSISTENCE_DAEMON: Unit(PERSISTENCE_DAEMON, active="active"),
        AGENT: Unit(AGENT, active="active"),
    }
    order = services_to_stop(("a.service", "b.service"), units)
    assert order == ("a.socket", "monitor.service", "a.service", "c.service", AGENT, PERSISTENCE_DAEMON)


def test_units_that_depend_on_each_other_in_a_circle() -> None:
    units = {
        "a.service": Unit("a.service", active="active", dependents=("b.service",)),
        "b.service": Unit("b.service", active="active", dependents=("a.service",)),
    }
    assert services_to_stop(("a.service",), units) == ("b.service", "a.service")


def test_systemd_that_would_kill_is_warned_of() -> None:
    units = {ENGINE: Unit(ENGINE, active="active", kill_after_seconds=90.0)}
    plan, _problems = make_plan(request(), facts(units=units))
    assert plan is not None
    assert [warning for warning in plan.warnings if "after 90 s" in warning]


# Verification


def wrong(before: Card, after: Card | None, xids: list[int] | None = None) -> list[tuple[str, str]]:
    others = (card(OTHER),)
    now = others if after is None else (after, *others)
    return [(problem.code, problem.step) for problem in verify((before, *others), now, (UUID,), xids)]


@pytest.mark.parametrize(
    ("before", "after", "found"),
    [
        ({}, {}, []),
        ({"recovery_action": "reset"}, {"recovery_action": "none"}, []),
        ({"recovery_action": "reset"}, {"recovery_action": "reset"}, [("recovery_action", "reboot")]),
        ({"recovery_action": "none"}, {"recovery_action": None}, [("recovery_action", "reboot")]),
        ({"recovery_action": None}, {"recovery_action": None}, []),
        ({"ecc_current": True}, {"ecc_current": False}, [("ecc", "reboot")]),
        ({"ecc_current": False, "ecc_pending": True}, {"ecc_current": True}, []),
        ({"ecc_current": False, "ecc_pending": True}, {"ecc_current": False}, []),
        ({"ecc_current": None, "ecc_pending": None}, {"ecc_current": None}, []),
        ({"state": "reset_required", "ecc_current": None, "ecc_pending": None}, {"ecc_current": True}, []),
        ({"rows_pending": True}, {"rows_pending": False}, []),
        ({"rows_pending": True}, {"rows_pending": True}, [("rows_pending", "reboot")]),
        ({"rows_pending": False}, {"rows_pending": None}, [("rows_pending", "reboot")]),
        ({"rows_pending": None}, {"rows_pending": None}, []),
        ({"pages_pending": True}, {"pages_pending": True}, [("pages_pending", "reboot")]),
        ({"rows_failed": True}, {"rows_failed": True}, [("rows_failed", "replace")]),
        ({}, {"state": "reset_required"}, [("state", "reboot")]),
        ({"links": links("a", "b")}, {"links": links("a", "b")}, []),
        ({"links": links("a", "b")}, {"links": links("a")}, [("links", "reboot")]),
        ({"links": links("a")}, {"links": links("a", "b"), "links_expected": 3}, [("links", "reboot")]),
    ],
)
def test_verification(before: dict[str, Any], after: dict[str, Any], found: list[tuple[str, str]]) -> None:
    assert wrong(card(**before), card(**after)) == found


def test_card_that_does_not_come_back() -> None:
    assert wrong(card(), None) == [("count", "reboot"), ("uuid", "reboot")]
    assert wrong(card(), card(state="lost")) == [("count", "reboot"), ("uuid", "power_cycle")]
    assert wrong(card(), card("GPU-99999999-0000-0000-0000-000000000001")) == [("uuid", "reboot")]


def test_other_card_that_was_lost_before_is_no_matter_of_the_reset() -> None:
    lost = card(OTHER, state="lost")
    assert verify((card(), lost), (card(), lost), (UUID,), []) == []
    assert [problem.code for problem in verify((card(), card(OTHER)), (card(), lost), (UUID,), [])] == ["count", "uuid"]


def test_new_xids() -> None:
    assert wrong(card(), card(), [43, 45, 13, 31, 154]) == []
    assert wrong(card(), card(), [119, 119, 79, 43]) == [("xid", "power_cycle"), ("xid", "reboot")]
    assert wrong(card(), card(), None) == []


def test_next_steps_get_stronger() -> None:
    one, two = needs("start_services", "x", "a", "b"), needs("reboot", "x", "a", "b")
    assert next_step([], rebooted_before=False) == "run_again"
    assert next_step([Problem("x", "a", "b", "c")], rebooted_before=False) == "run_again"
    assert next_step([one], rebooted_before=True) == "start_services"
    assert next_step([two, one], rebooted_before=False) == "reboot"
    assert next_step([two, one], rebooted_before=True) == "power_cycle"
    assert next_step([needs("replace", "x", "a", "b"), two], rebooted_before=True) == "replace"
    assert all(text.strip() == text and not text.endswith(".") for text in NEXT_STEPS.values())


# What the ledger keeps


def test_plan_comes_back_from_the_ledger_as_far_as_verification_needs_it() -> None:
    plan, _problems = make_plan(
        request(), facts(card(recovery_action="reset", links=links("a", "b"), links_expected=2))
    )
    assert plan is not None
    again = Plan.parse(plan.document())
    assert again is not None
    assert (again.uuids, again.services, again.reason) == (plan.uuids, plan.services, plan.reason)
    assert verify(again.cards, plan.cards, again.uuids, []) == verify(plan.cards, plan.cards, plan.uuids, [])
    assert Request.parse(request().document()) == request()


anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.just(10**400) | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=10,
)
plans = st.fixed_dictionaries(
    {},
    optional={
        "uuids": anything | st.just([UUID]),
        "cards": anything | st.lists(anything | st.just({"uuid": UUID, "nvlinks_up": [1, None, "2"]}), max_size=3),
        "services": anything,
        "reason": anything,
        "uuid": anything | st.just(UUID),
        "max_resets": anything,
        "window": anything,
    },
)


@given(plans | anything)
def test_no_document_breaks_the_readers(document: Any) -> None:
    plan = Plan.parse(document)
    assert plan is None or set(plan.uuids) <= {each.uuid for each in plan.cards}
    Request.parse(document)
    Card.parse(document)


states = st.sampled_from(["answers", "reset_required", "lost", "no_answer", "not_listed", "failed"])
maybe = st.sampled_from([True, False, None])
cards = st.builds(
    lambda uuid, state, action, rows, up, architecture, remote, expected: card(
        uuid,
        state=state,
        recovery_action=action,
        rows_pending=rows,
        architecture=architecture,
        links=(Link(0, up, remote, "0000:02:00.0"), Link(1, up, remote, None)),
        links_expected=expected,
    ),
    st.sampled_from([UUID, OTHER, C, D]),
    states,
    st.sampled_from(["none", "reset", "reboot", "drain_p2p", "unknown_8", None]),
    maybe,
    maybe,
    st.none() | st.integers(2, 13),
    st.sampled_from(["gpu", "switch", "other", None]),
    st.none() | st.integers(0, 12),
)


@given(st.lists(cards, max_size=4, unique_by=lambda each: each.uuid), st.booleans(), st.sampled_from(["", "Xid 119"]))
def test_any_host_gives_a_plan_or_says_why_not(found: list[Card], fabric_manager: bool, reason: str) -> None:
    plan, problems = make_plan(request(reason=reason), facts(*found, fabric_manager=fabric_manager))
    assert plan is not None or problems
    if plan is not None and not problems:
        assert plan.uuids[0] == UUID
        assert len(set(plan.uuids)) == len(plan.uuids)
        assert plan.reason
    for problem in verify(found, found[::-1], [UUID], [119]):
        assert problem.step in NEXT_STEPS
