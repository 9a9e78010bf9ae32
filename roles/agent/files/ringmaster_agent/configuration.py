# SPDX-License-Identifier: GPL-3.0-or-later
"""The agent's configuration file, rendered by the agent role and checked before it replaces the former one."""

from __future__ import annotations

import json
from typing import Any, Final, NamedTuple


class ConfigurationError(Exception):
    """The configuration cannot be used; the message names the key and what was expected."""


class Engine(NamedTuple):
    """An engine of this host: its name in the site (HOST.ENGINE), where it listens, and the model it serves."""

    name: str
    address: str
    port: int
    model: str


class Configuration(NamedTuple):
    """Keys of the configuration file; times in the unit that the name ends with, ports from 1 to 65535.

    `hang_after_ms` is how long one card, port or device may take to be read; a driver answers within milliseconds, so
    that one that takes longer hangs. A canary waits `canary_timeout_ms`, long enough for a full queue.
    """

    host: str
    http_address: str
    http_port: int = 8409
    engines: tuple[Engine, ...] = ()
    hardware_interval_ms: int = 1000
    hang_after_ms: int = 5000
    engine_interval_ms: int = 200
    engine_timeout_ms: int = 1000
    canary_interval_ms: int = 60_000
    canary_timeout_ms: int = 30_000
    canary_prompt: str = ""
    key_file: str = ""


_RANGES: Final = {
    "http_port": (1, 65535),
    "hardware_interval_ms": (100, 60_000),
    "hang_after_ms": (500, 600_000),
    "engine_interval_ms": (50, 60_000),
    "engine_timeout_ms": (50, 60_000),
    "canary_interval_ms": (1000, 86_400_000),
    "canary_timeout_ms": (100, 600_000),
}
_MAY_BE_EMPTY: Final = frozenset({"canary_prompt", "key_file"})


def parse(document: bytes) -> Configuration:
    """Return the configuration of a JSON document. Raises ConfigurationError for anything else."""
    try:
        content = json.loads(document)
    except (ValueError, RecursionError) as error:
        raise ConfigurationError(f"not a JSON document: {error}") from error
    if not isinstance(content, dict):
        raise ConfigurationError("expected an object at the top")
    unknown = sorted(set(content) - set(Configuration._fields))
    if unknown:
        raise ConfigurationError(f"{unknown[0]}: no such key")
    for key in ("host", "http_address"):
        if key not in content:
            raise ConfigurationError(f"{key}: expected text, found nothing")
    for key, value in content.items():
        if key != "engines":
            _check(key, value)
    return Configuration(**{**content, "engines": _engines(content.get("engines", []))})


def _check(key: str, value: Any) -> None:
    if key not in _RANGES:
        if not isinstance(value, str) or (not value and key not in _MAY_BE_EMPTY):
            raise ConfigurationError(f"{key}: expected text, found {value!r}")
        return
    lowest, highest = _RANGES[key]
    if not isinstance(value, int) or isinstance(value, bool) or not lowest <= value <= highest:
        raise ConfigurationError(f"{key}: expected an integer from {lowest} to {highest}, found {value!r}")


def _engines(listed: Any) -> tuple[Engine, ...]:
    if not isinstance(listed, list):
        raise ConfigurationError(f"engines: expected a list, found {listed!r}")
    engines = []
    for position, entry in enumerate(listed):
        where = f"engines[{position}]"
        if not isinstance(entry, dict):
            raise ConfigurationError(f"{where}: expected an object, found {entry!r}")
        for key in ("name", "address", "model"):
            if not isinstance(entry.get(key), str) or not entry[key] or not entry[key].isprintable():
                raise ConfigurationError(f"{where}.{key}: expected printable text, found {entry.get(key)!r}")
        port = entry.get("port")
        if not isinstance(port, int) or isinstance(port, bool) or not 1 <= port <= 65535:
            raise ConfigurationError(f"{where}.port: expected an integer from 1 to 65535, found {port!r}")
        engines.append(Engine(entry["name"], entry["address"], port, entry["model"]))
    names = [engine.name for engine in engines]
    if len(set(names)) != len(names):
        raise ConfigurationError("engines: two have one name")
    return tuple(engines)


def load(path: str) -> Configuration:
    """Return the configuration in a file. Raises ConfigurationError, also if it cannot be read."""
    try:
        with open(path, "rb") as file:
            return parse(file.read())
    except OSError as error:
        raise ConfigurationError(f"cannot be read: {error.strerror}") from error
