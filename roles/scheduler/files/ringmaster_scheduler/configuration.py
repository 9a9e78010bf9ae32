# SPDX-License-Identifier: GPL-3.0-or-later
"""The daemon's configuration file, rendered by the scheduler role and checked before it replaces the former one."""

from __future__ import annotations

import json
import re
from typing import Any, Final, NamedTuple

from ringmaster_scheduler import health_rules
from ringmaster_scheduler import policy as policy_module
from ringmaster_scheduler.health_rules import Rule
from ringmaster_scheduler.policy import Policy

_HOUR_IN_MS: Final = 3_600_000


class ConfigurationError(Exception):
    """The configuration cannot be used; the message names the key and what was expected."""


class Configuration(NamedTuple):
    """Keys of the configuration file; times in the unit that the name ends with, ports from 1 to 65535.

    Each default comes from what it must bridge. A reading every 250 ms costs an engine and the scheduler under 1 ms;
    its time-out of 500 ms outlasts a busy engine's event loop, and together they stay under `stale_after_ms`, so that
    one missed reading alone makes nobody unhealthy. `placement_grace_ms` covers the way through HAProxy and the
    engine's tokenizer, and one long prefill step, during which vLLM does not bring its counts up to date.
    """

    http_address: str
    spoe_address: str = "127.0.0.1"
    http_port: int = 8406
    spoe_port: int = 8407
    members_from: str = "file"
    members_file: str = "/etc/ringmaster/members.json"
    consul_addresses: tuple[str, ...] = ("https://127.0.0.1:8501",)
    consul_service: str = "ringmaster"
    consul_token_file: str = ""
    consul_ca_file: str = ""
    consul_wait_ms: int = 10_000
    consul_kept_file: str = ""
    scrape_interval_ms: int = 250
    scrape_timeout_ms: int = 500
    stale_after_ms: int = 1000
    placement_grace_ms: int = 500
    retry_after_s: int = 5
    adjust_interval_ms: int = 20
    look_interval_ms: int = 200
    log_address: str = "127.0.0.1"
    log_port: int = 8408
    haproxy_socket: str = ""
    haproxy_timeout_ms: int = 1000
    maxconn_percent: int = 100
    haproxy_server_options: str = "check inter 1s fastinter 250ms fall 3 rise 2"
    haproxy_server_state_file: str = ""
    token_file: str = ""
    drained_file: str = ""
    kept_file: str = ""
    explanations: int = 10_000
    policy: Policy = Policy()
    health_rules: tuple[Rule, ...] = ()


_RANGES: Final = {
    "http_port": (1, 65535),
    "spoe_port": (1, 65535),
    "scrape_interval_ms": (20, _HOUR_IN_MS),
    "scrape_timeout_ms": (20, _HOUR_IN_MS),
    "stale_after_ms": (20, _HOUR_IN_MS),
    "placement_grace_ms": (0, _HOUR_IN_MS),
    "retry_after_s": (1, 3600),
    "adjust_interval_ms": (5, 1000),
    "look_interval_ms": (50, 10_000),
    "log_port": (1, 65535),
    "haproxy_timeout_ms": (20, 60_000),
    "maxconn_percent": (1, 1000),
    "consul_wait_ms": (100, 600_000),
    "explanations": (0, 10_000_000),
}
_MAY_BE_EMPTY: Final = (
    "haproxy_socket",
    "haproxy_server_options",
    "haproxy_server_state_file",
    "token_file",
    "drained_file",
    "kept_file",
    "consul_token_file",
    "consul_ca_file",
    "consul_kept_file",
)
_MEMBERS_FROM: Final = ("file", "consul")
_CONSUL_ADDRESS: Final = re.compile(r"https?://(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9.-]+):[0-9]{1,5}\Z")
# It becomes a part of a path.
_CONSUL_SERVICE: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9-]{0,62}\Z")


def parse(document: bytes) -> Configuration:
    """Return a configuration.

    Raises ConfigurationError for anything that is missing, unknown, of another type, or out of its range.
    """
    try:
        content = json.loads(document)
    except (ValueError, RecursionError) as error:
        raise ConfigurationError(f"not a JSON document: {error}") from error
    if not isinstance(content, dict):
        raise ConfigurationError("expected an object at the top")
    unknown = sorted(content.keys() - set(Configuration._fields))
    if unknown:
        raise ConfigurationError(f"unknown key {unknown[0]!r}; known: {', '.join(Configuration._fields)}")
    if "http_address" not in content:
        raise ConfigurationError("http_address is missing")
    for key, value in content.items():
        _check(key, value)
    if "consul_addresses" in content:
        content["consul_addresses"] = tuple(content["consul_addresses"])
    if "policy" in content:
        try:
            content["policy"] = policy_module.parse(content["policy"])
        except policy_module.PolicyError as error:
            raise ConfigurationError(f"policy: {error}") from error
    if "health_rules" in content:
        try:
            content["health_rules"] = health_rules.parse(content["health_rules"])
        except health_rules.RuleError as error:
            raise ConfigurationError(f"health_rules: {error}") from error
    configuration = Configuration(**content)
    if configuration.scrape_interval_ms + configuration.scrape_timeout_ms > configuration.stale_after_ms:
        raise ConfigurationError(
            "expected stale_after_ms of at least scrape_interval_ms + scrape_timeout_ms, so that one slow reading makes"
            f" no engine unhealthy; found {configuration.stale_after_ms}"
        )
    return configuration


def _check(key: str, value: Any) -> None:
    if key in ("policy", "health_rules"):
        return
    if key == "consul_addresses":
        if not isinstance(value, list) or not value or not all(_is_address(each) for each in value):
            raise ConfigurationError(
                f"{key}: expected a list of addresses like https://127.0.0.1:8501, without a path, found {value!r}"
            )
        return
    if key == "members_from" and value not in _MEMBERS_FROM:
        raise ConfigurationError(f"{key}: expected one of {', '.join(_MEMBERS_FROM)}, found {value!r}")
    if key == "consul_service" and not (isinstance(value, str) and _CONSUL_SERVICE.match(value)):
        raise ConfigurationError(f"{key}: expected letters, digits and -, found {value!r}")
    if key not in _RANGES:
        if not isinstance(value, str) or (not value and key not in _MAY_BE_EMPTY):
            raise ConfigurationError(f"{key}: expected text, found {value!r}")
        return
    lowest, highest = _RANGES[key]
    if not isinstance(value, int) or isinstance(value, bool) or not lowest <= value <= highest:
        raise ConfigurationError(f"{key}: expected an integer from {lowest} to {highest}, found {value!r}")


def _is_address(value: Any) -> bool:
    return isinstance(value, str) and _CONSUL_ADDRESS.match(value) is not None


def load(path: str) -> Configuration:
    """Return the configuration in a file. Raises ConfigurationError, also if it cannot be read."""
    try:
        with open(path, "rb") as file:
            return parse(file.read())
    except OSError as error:
        raise ConfigurationError(f"cannot be read: {error.strerror}") from error
