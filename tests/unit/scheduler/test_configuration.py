# SPDX-License-Identifier: GPL-3.0-or-later
"""The configuration file and the command line that checks it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringmaster_scheduler import __main__, configuration
from ringmaster_scheduler.configuration import Configuration, ConfigurationError
from tests.unit.scheduler.fake_agent import rules

KEYS = st.sampled_from(Configuration._fields)
VALUES = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.lists(st.none(), max_size=1)


def test_defaults_fit_together() -> None:
    assert configuration.parse(b'{"http_address": "10.0.0.1"}') == Configuration("10.0.0.1")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "not a JSON document"),
        ("[]", "expected an object"),
        ("{}", "http_address is missing"),
        ('{"http_address": "a", "http_prot": 1}', "unknown key 'http_prot'; known: http_address"),
        ('{"http_address": ""}', "http_address: expected text, found ''"),
        ('{"http_address": "a", "spoe_port": 65536}', "spoe_port: expected an integer from 1 to 65535, found 65536"),
        ('{"http_address": "a", "spoe_port": true}', "spoe_port: expected an integer"),
        ('{"http_address": "a", "scrape_interval_ms": 0}', "scrape_interval_ms: expected an integer from 20"),
        ('{"http_address": "a", "stale_after_ms": 700}', "expected stale_after_ms of at least"),
        ('{"http_address": "a", "policy": []}', "policy: expected an object"),
        ('{"http_address": "a", "members_from": "etcd"}', "members_from: expected one of file, consul, found 'etcd'"),
        ('{"http_address": "a", "members_from": []}', "members_from: expected one of file, consul"),
        ('{"http_address": "a", "consul_addresses": []}', "consul_addresses: expected a list of addresses"),
        ('{"http_address": "a", "consul_addresses": "http://a:1"}', "consul_addresses: expected a list of addresses"),
        ('{"http_address": "a", "consul_addresses": ["file:///x"]}', "consul_addresses: expected a list of addresses"),
        ('{"http_address": "a", "consul_addresses": ["http://a:1/x"]}', "consul_addresses: expected a list"),
        ('{"http_address": "a", "consul_service": "a/../b"}', "consul_service: expected letters, digits and -"),
        ('{"http_address": "a", "consul_wait_ms": 0}', "consul_wait_ms: expected an integer from 100 to 600000"),
        ('{"http_address": "a", "policy": {"watermrk": 1}}', "policy: unknown key 'watermrk'; known: classes, "),
        (
            '{"http_address": "a", "policy": {"watermark": 1.5}}',
            "watermark: expected a number from 0.1 to 1, found 1.5",
        ),
        ('{"http_address": "a", "policy": {"watermark": 0.5}}', "watermark_low: expected no more than watermark"),
        ('{"http_address": "a", "policy": {"maxconn_low": 1.5}}', "maxconn_low: expected an integer from 1"),
        ('{"http_address": "a", "policy": {"maxconn_low": true}}', "maxconn_low: expected an integer from 1"),
        ('{"http_address": "a", "policy": {"classes": []}}', "classes: expected a list with at least one class"),
        (
            '{"http_address": "a", "policy": {"classes": [{"name": "a", "prompt_tokens_max": 5, "deadline_s": 1}]}}',
            "classes[0].prompt_tokens_max: expected null for the last class",
        ),
        (
            '{"http_address":"a","policy":{"classes":[{"name":"a","prompt_tokens_max":null,"deadline_s":999}]}}',
            "classes[0].deadline_s: expected 0.1 to 250, found 999",
        ),
    ],
)
def test_wrong_configuration_is_named(
    content: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "scheduler.json"
    path.write_text(content)
    assert __main__.main(["--config", str(path), "--check"]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"{path}: ")
    assert message in error


def test_configuration_that_is_missing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "scheduler.json"
    assert __main__.main(["--config", str(path), "--check"]) == 2
    assert capsys.readouterr().err == f"{path}: cannot be read: No such file or directory\n"


def test_good_configuration_passes_the_check(tmp_path: Path) -> None:
    path = tmp_path / "scheduler.json"
    whole = Configuration("127.0.0.1", health_rules=rules())
    path.write_text(
        json.dumps(
            {
                **whole._asdict(),
                "policy": whole.policy.document(),
                "health_rules": {rule.name: rule.document() for rule in whole.health_rules},
            }
        )
    )
    assert configuration.load(str(path)) == whole
    assert __main__.main(["--config", str(path), "--check"]) == 0


@given(st.dictionaries(KEYS, VALUES))
def test_any_document_is_used_or_refused(content: dict[str, Any]) -> None:
    try:
        parsed = configuration.parse(json.dumps(content).encode())
    except ConfigurationError:
        return
    assert parsed.scrape_interval_ms + parsed.scrape_timeout_ms <= parsed.stale_after_ms


def test_consul_is_chosen_with_several_addresses() -> None:
    addresses = ["https://127.0.0.1:8501", "https://[2001:db8::1]:8501", "http://consul.example:8500"]
    document = {"http_address": "a", "members_from": "consul", "consul_addresses": addresses}
    parsed = configuration.parse(json.dumps(document).encode())
    assert (parsed.members_from, parsed.consul_addresses) == ("consul", tuple(addresses))
