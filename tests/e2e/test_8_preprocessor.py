# SPDX-License-Identifier: GPL-3.0-or-later
"""The way through the preprocessors: what they find out, and what their deaths cost."""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest

from rehearsal import chat, site
from tests.e2e.conftest import MODEL, PREPROCESSORS, Site, wait_until
from tests.e2e.test_6_decision_path import background, edge_metrics, failures, sample

UNIT = "ringmaster-preprocessor.service"
GATEWAYS = ("gw1", "gw2")


def preprocessors_up(running_site: Site) -> int:
    """Preprocessors that the gateway holds for up."""
    return int(sample(edge_metrics(running_site), "haproxy_backend_active_servers", proxy="preprocessors"))


def passes(running_site: Site, gateway: str, request_id: str) -> dict[str, dict[str, Any]]:
    """Frontend → line of a request in a gateway's access log, once its first pass is there."""
    found: dict[str, dict[str, Any]] = {}

    def is_there() -> bool:
        lines = site.access_log(running_site.checkout, gateway, request_id)
        found.update({line["frontend"]: line for line in lines})
        return "public" in found

    wait_until(is_there, f"{gateway} has logged {request_id}")
    return found


def ask(running_site: Site, gateway: str = "gw1", stream: bool = False) -> chat.Answer:
    """A chat through a gateway."""
    address = f"{running_site.addresses[gateway]}:{site.PUBLIC_PORT}"
    return chat.ask(address, running_site.edge_key, MODEL, stream=stream)


def firing(running_site: Site) -> set[str]:
    """Alerts that fire."""
    url = f"http://{running_site.addresses['cpu-c1']}:{site.PROMETHEUS_PORT}/api/v1/alerts"
    with urllib.request.urlopen(url, timeout=10) as response:
        alerts = json.loads(response.read())["data"]["alerts"]
    return {alert["labels"]["alertname"] for alert in alerts if alert["state"] == "firing"}


@pytest.fixture(autouse=True)
def preprocessors_are_back(running_site: Site) -> Iterator[None]:
    """Each test starts with all of them up, and leaves them so."""
    wait_until(lambda: preprocessors_up(running_site) == len(PREPROCESSORS), "all preprocessors are up")
    yield
    for host in PREPROCESSORS:
        running_site.on(host, f"systemctl reset-failed {UNIT}; systemctl start {UNIT}", check=False)
    wait_until(lambda: preprocessors_up(running_site) == len(PREPROCESSORS), "all preprocessors are up again")


@pytest.mark.parametrize("gateway", GATEWAYS)
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streaming"])
def test_chat_goes_through_a_preprocessor_that_counts_as_the_engine_does(
    running_site: Site, gateway: str, stream: bool
) -> None:
    answer = ask(running_site, gateway, stream)
    lines = passes(running_site, gateway, answer.request_id)
    assert lines["public"]["pool"] == "preprocessors"
    assert lines["public"]["engine"] in PREPROCESSORS
    assert lines["dispatch"]["client"] == running_site.addresses[lines["public"]["engine"]]
    assert lines["dispatch"]["pool"] == f"pool_{MODEL}"
    assert lines["dispatch"]["prompt_tokens_from"] == "header"
    assert int(lines["dispatch"]["prompt_tokens"]) == answer.prompt_tokens
    assert {line["key_id"] for line in lines.values()} == {"rehearsal"}


def test_preprocessor_that_dies_under_load_costs_only_what_it_was_carrying(running_site: Site) -> None:
    """May fail: what this preprocessor was carrying. systemd starts it again, and it is asked again."""
    victim = PREPROCESSORS[0]
    with background(running_site.load(60, 12, max_tokens=64)) as outcomes:
        time.sleep(4)
        running_site.on(victim, f"systemctl kill --signal=KILL --kill-whom=main {UNIT}")
        killed = time.time()
    failed = [outcome for outcome in outcomes if outcome.error]
    for outcome in failed:
        assert outcome.started <= killed + 0.5
        assert passes(running_site, "gw1", outcome.request_id)["public"]["engine"] == victim
    assert len([outcome for outcome in outcomes if outcome.started > killed + 1]) > 50
    wait_until(lambda: preprocessors_up(running_site) == len(PREPROCESSORS), "it is up again")


def test_without_preprocessors_keys_are_checked_tokens_estimated_and_an_alert_is_raised(running_site: Site) -> None:
    """May fail: what the preprocessors were carrying. Where that had no answer yet, HAProxy closes the client's
    connection if it was not the first on it: the client may send it once more."""
    with background(running_site.load(20, 15, max_tokens=32)) as outcomes:
        time.sleep(3)
        for host in PREPROCESSORS:
            running_site.on(host, f"systemctl kill --signal=KILL --kill-whom=main {UNIT}; systemctl stop {UNIT}")
        stopped = time.time()
        wait_until(lambda: preprocessors_up(running_site) == 0, "the gateway has none")
    for outcome in (each for each in outcomes if each.error):
        assert outcome.started <= stopped + 0.5, outcome.error
        assert passes(running_site, "gw1", outcome.request_id)["public"]["engine"] in PREPROCESSORS, outcome.error
    later = [outcome for outcome in outcomes if outcome.started > stopped + 1]
    assert len(later) > 20
    assert failures(later) == []
    answer = ask(running_site)
    lines = passes(running_site, "gw1", answer.request_id)
    assert lines["public"]["engine"] == "without"
    assert lines["dispatch"]["prompt_tokens_from"] == "body_bytes"
    assert lines["dispatch"]["key_id"] == "rehearsal"
    request = urllib.request.Request(
        f"http://{running_site.addresses['gw1']}:{site.PUBLIC_PORT}/v1/models", headers={"Authorization": "Bearer x"}
    )
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(request, timeout=5)
    refused.value.close()
    assert refused.value.code == 401
    wait_until(lambda: {"NoPreprocessor", "PreprocessorDown"} <= firing(running_site), "the alerts fire")


def test_preprocessor_restarts_without_a_failed_request(running_site: Site) -> None:
    """May fail: nothing. It says that it drains before it takes no more, and ends what it has."""
    with background(running_site.load(30, 15, max_tokens=64)) as outcomes:
        time.sleep(3)
        running_site.on(PREPROCESSORS[0], f"systemctl restart {UNIT}")
    assert failures(outcomes) == []
    assert len(outcomes) > 100


def test_dispatch_believes_nobody_but_members(running_site: Site) -> None:
    body = json.dumps({"model": MODEL, "prompt": "x", "max_tokens": 1}).encode()
    headers = {"Content-Type": "application/json", "X-Ringmaster-Key-Id": "rehearsal"}
    request = urllib.request.Request(f"http://{running_site.addresses['gw1']}:8081/v1/completions", body, headers)
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(request, timeout=5)
    refused.value.close()
    assert refused.value.code == 403
