# SPDX-License-Identifier: GPL-3.0-or-later
"""Health moves weight: what breaks in the fleet is seen by the node's agent or by the scheduler, named, and undone when
it is over. The windows of the rules are seconds here (inventories/rehearsal)."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest

from rehearsal import faults, site
from tests.e2e.conftest import ENGINES, Site
from tests.e2e.gateway import (
    GATEWAY,
    GATEWAYS,
    SCHEDULER_UNIT,
    access_log,
    failures,
    get,
    placements,
    steady_load,
    wait_until,
)

HURT = "gpu-b1"
WINDOW = 3.0  # seconds, of most rules in the rehearsal
LATE = 6.0  # seconds that a busy machine may take longer than the rule says
ROCE_WINDOWS, ROCE_GOOD = 3, 6
CANARY_PERIOD = 5.0
HUNG_AFTER = 10.0


def node(running_site: Site, host: str, gateway: str = GATEWAY) -> dict[str, Any]:
    """What the gateway's scheduler knows of a host: its agent, its only engine's weight and reasons."""
    document = json.loads(get(running_site.addresses[gateway], site.SCHEDULER_PORT, f"/v1/nodes/{host}"))
    [found] = document["nodes"]
    [found["engine"]] = found["engines"]
    return dict(found)


def weight(running_site: Site, host: str) -> float:
    """The host's weight."""
    return float(node(running_site, host)["engine"]["weight"])


def rules(running_site: Site, host: str) -> set[str]:
    """Names of the rules that make the host's weight what it is."""
    return {reason["rule"] for reason in node(running_site, host)["engine"]["reasons"]}


def all_well(running_site: Site) -> bool:
    """Whether every engine is healthy and has its whole weight."""
    engines = [node(running_site, host)["engine"] for host in ENGINES]
    return all(engine["weight"] == 1 and engine["health"] == "healthy" for engine in engines)


@pytest.fixture(autouse=True)
def healthy_site(running_site: Site) -> Iterator[None]:
    """Each test starts with all engines well, and ends what it broke."""
    wait_until(lambda: all_well(running_site), "every engine is well", 120)
    yield
    faults.switch_hardware_fault(running_site.checkout, "none")


@pytest.fixture(scope="module", autouse=True)
def nothing_left(running_site: Site) -> Iterator[None]:
    """Cards count their ECC errors until the driver is loaded anew, and the site's verdict on them would stay."""
    yield
    running_site.reboot("gpu-a2")
    wait_until(lambda: all_well(running_site), "every engine is well", 120)


def scheduler_start(running_site: Site, gateway: str) -> str:
    """When the gateway's scheduler was started; nothing while none is there."""
    asked = f"systemctl show --property ActiveState --property ExecMainStartTimestampMonotonic {SCHEDULER_UNIT}"
    found = dict(line.partition("=")[::2] for line in running_site.on(gateway, asked).splitlines())
    return found["ExecMainStartTimestampMonotonic"] if found["ActiveState"] == "active" else ""


class Given(NamedTuple):
    """Requests that a gateway gave to the engines over some time: to one host's, and to all."""

    host: int
    total: int


def given(running_site: Site, host: str, seconds: float) -> list[Given]:
    """What each gateway gives to a host over so many seconds from now."""
    before = [placements(running_site, gateway) for gateway in GATEWAYS]
    time.sleep(seconds)
    found = []
    for gateway, placed in zip(GATEWAYS, before):
        after = placements(running_site, gateway)
        new = {name: after[name] - placed[name] for name in after}
        found.append(Given(new[f"{host}.main"], sum(new.values())))
    return found


def share(gateways: list[Given]) -> float:
    """A host's share of what all gateways gave, the site's: of what the gateways take together, one may have most for a
    while, for it finds the engine free more often than the other."""
    requests = sum(gateway.total for gateway in gateways)
    return sum(gateway.host for gateway in gateways) / requests if requests > 50 * len(gateways) else math.nan


def test_port_that_loses_packets_has_little_of_its_share_and_no_request_fails(running_site: Site) -> None:
    """May fail: nothing, at either gateway, also while one's scheduler is killed and the other's hangs. The L40S has
    little of the requests, so that one slot, filled again and again, would be all of it: its tenth is less than that.
    New schedulers read the port's counters over as many windows as the rule has, and learn anew what the engine usually
    takes: its tenth is one of what it is presumed to take, as an equal of the others."""
    checkout, hurt = running_site.checkout, HURT

    def weights() -> list[float]:
        try:
            return [float(node(running_site, hurt, gateway)["engine"]["weight"]) for gateway in GATEWAYS]
        except OSError:  # it is just being started
            return []

    with steady_load(running_site, 45) as first, steady_load(running_site, 45, gateway=GATEWAYS[1]) as second:
        faults.switch_hardware_fault(checkout, f"roce traffic on {hurt}")
        time.sleep(10)
        whole = given(running_site, hurt, 15)
        faults.switch_hardware_fault(checkout, f"roce loss 0.1 % on {hurt}")
        took = wait_until(lambda: weights() == [0.1, 0.1], "the weight is a tenth")
        assert rules(running_site, hurt) == {"roce_retransmits"}
        assert took < (ROCE_WINDOWS + 1) * WINDOW + LATE
        ill = given(running_site, hurt, 15)
        began = {gateway: scheduler_start(running_site, gateway) for gateway in GATEWAYS}
        for gateway, signal in zip(GATEWAYS, ("KILL", "STOP")):
            running_site.on(gateway, f"systemctl kill --signal={signal} --kill-whom=main {SCHEDULER_UNIT}")
        wait_until(
            lambda: all(scheduler_start(running_site, gateway) not in {"", began[gateway]} for gateway in GATEWAYS),
            "systemd has started other schedulers",
            60,
        )
        wait_until(lambda: weights() == [0.1, 0.1], "the weight is a tenth again", 60)
        later = given(running_site, hurt, 15)
        faults.switch_hardware_fault(checkout, f"none on {hurt}")
        faults.switch_hardware_fault(checkout, f"roce traffic on {hurt}")
        back = wait_until(lambda: weights() == [1, 1], "the weight is whole again")
        assert back < (ROCE_GOOD + 1) * WINDOW + LATE
        again = given(running_site, hurt, 15)
    print(f"requests: {whole}, ill {ill} after {took:.1f} s, new schedulers {later}, again {again} after {back:.1f} s")
    assert failures(first + second) == []
    assert all(gateway.host > 0 for gateway in ill + later)
    assert share(ill) < 0.35 * share(whole)
    assert share(later) < 0.6 * share(whole)
    assert share(again) > 2 * share(ill)


@pytest.mark.parametrize(
    ("words", "host", "rule", "moved", "seconds"),
    [
        ("aer storm", "gpu-b1", "pcie_correctable_storm", lambda found: found == 0.5, 3 * WINDOW),
        ("nvlink 3 down", "gpu-a1", "nvlink_down", lambda found: found == 0.1, 2 * WINDOW),
        ("throttle thermal", "gpu-b1", "throttled", lambda found: 0.1 <= found < 1, 2 * WINDOW),
        ("ecc uncorrected 1", "gpu-a2", "ecc_uncorrected", lambda found: found == 0.1, WINDOW),
        ("xid 79", "gpu-b1", "card_lost", lambda found: found == 0, 4.0),
        ("recovery action reset", "gpu-a1", "recovery_action", lambda found: found == 0, 4.0),
    ],
)
def test_fault_moves_the_weight_as_its_rule_says_and_is_named(
    running_site: Site, words: str, host: str, rule: str, moved: Callable[[float], bool], seconds: float
) -> None:
    """May fail: nothing; the faults are of the hardware, and the stand-in engines answer all the same."""
    with steady_load(running_site, 20) as outcomes:
        faults.switch_hardware_fault(running_site.checkout, f"{words} on {host}")
        took = wait_until(lambda: rule in rules(running_site, host), f"{rule} is named")
        found = weight(running_site, host)
        print(f"{words}: {rule} after {took:.1f} s, weight {found}")
        assert moved(found)
        assert took < seconds + WINDOW + LATE
        others = [weight(running_site, other) for other in ENGINES if other != host]
        faults.switch_hardware_fault(running_site.checkout, f"none on {host}")
        wait_until(lambda: weight(running_site, host) == 1, "the weight is whole again", 90)
    assert others == [1, 1]
    assert failures(outcomes) == []


def test_hung_engine_is_out_within_ten_seconds_and_back_after_its_restart(running_site: Site) -> None:
    """May fail: what the engine was answering when it hung, once it is started again."""
    with steady_load(running_site, 30) as outcomes:
        time.sleep(3)
        hung = time.time()
        faults.switch_fault(running_site.checkout, "gpu-a2", "main", "hang")
        took = wait_until(lambda: weight(running_site, "gpu-a2") == 0, "the engine is out")
        out = time.time()
        assert "hung" in rules(running_site, "gpu-a2")
        status = running_site.on("gpu-a2", "systemctl is-active standin-engine@main.service").strip()
        time.sleep(5)
        running_site.on("gpu-a2", "systemctl kill --signal=KILL --kill-whom=main standin-engine@main.service")
        faults.switch_fault(running_site.checkout, "gpu-a2", "main", "none")
        back = wait_until(lambda: weight(running_site, "gpu-a2") == 1, "the engine is back", 60)
        time.sleep(3)
    print(f"out after {took:.1f} s, back {back:.1f} s after its restart")
    assert status == "active"
    assert took < HUNG_AFTER + 1
    assert failures([outcome for outcome in outcomes if outcome.started < hung - 3 or outcome.started > out]) == []
    ids = {outcome.request_id for outcome in outcomes if outcome.error}
    engines = {line["engine"] for line in access_log(running_site, hung - 30) if line["request_id"] in ids}
    assert engines <= {"gpu-a2.main"}


def test_engine_that_answers_wrong_is_out_within_two_canary_periods(running_site: Site) -> None:
    """May fail: nothing; answers are wrong until the engine is out."""
    with steady_load(running_site, 20) as outcomes:
        faults.switch_fault(running_site.checkout, "gpu-a1", "main", "garbage")
        took = wait_until(lambda: weight(running_site, "gpu-a1") == 0, "the engine is out")
        out = time.time()
        assert "canary_wrong" in rules(running_site, "gpu-a1")
        time.sleep(10)
        last = time.time()
        faults.switch_fault(running_site.checkout, "gpu-a1", "main", "none")
        wait_until(lambda: weight(running_site, "gpu-a1") == 1, "the engine is back", 90)
    assert failures(outcomes) == []
    # The answer itself takes a moment, too.
    assert took < 2 * CANARY_PERIOD + LATE
    after = {outcome.request_id for outcome in outcomes if out + 0.5 < outcome.started < last}
    wrong = [
        line
        for line in access_log(running_site, out)
        if line["request_id"] in after and line["engine"] == "gpu-a1.main"
    ]
    assert len(after) > 20
    assert len(wrong) < 0.01 * len(after)


def test_node_without_its_agent_is_trusted_less_and_named(running_site: Site) -> None:
    """May fail: nothing."""
    unit = "ringmaster-agent.service"
    with steady_load(running_site, 20) as outcomes:
        running_site.on(HURT, f"systemctl stop {unit}")
        try:
            wait_until(lambda: rules(running_site, HURT) == {"agent_silent"}, "the silence is named")
            assert weight(running_site, HURT) == 0.5
        finally:
            running_site.on(HURT, f"systemctl start {unit}")
        wait_until(lambda: weight(running_site, HURT) == 1, "the weight is whole again", 60)
    assert failures(outcomes) == []


def test_every_agent_is_heard_by_both_gateways_and_reads_all_there_is(running_site: Site) -> None:
    for gateway in ("gw1", "gw2"):
        for host in ENGINES:
            found = node(running_site, host, gateway)
            assert found["agent"]["up"], found
            # Containers have no kernel log of their own: there is none before the first simulated line.
            assert set(found["unknown"]) <= {"xid"}, found
