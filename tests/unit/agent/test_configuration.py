# SPDX-License-Identifier: GPL-3.0-or-later
"""The agent's configuration: what the role renders is taken, everything else is refused by its name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringmaster_agent.__main__ import main
from ringmaster_agent.configuration import Configuration, ConfigurationError, Engine, load, parse

GOOD: dict[str, Any] = {"host": "gpu-1", "http_address": "127.0.0.1"}
ENGINE = {"name": "gpu-1.main", "address": "10.0.0.1", "port": 8100, "model": "m"}


def test_defaults() -> None:
    assert parse(json.dumps(GOOD).encode()) == Configuration("gpu-1", "127.0.0.1")


def test_engines() -> None:
    found = parse(json.dumps({**GOOD, "engines": [{**ENGINE, "more": 1}]}).encode())
    assert found.engines == (Engine("gpu-1.main", "10.0.0.1", 8100, "m"),)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"host": None}, "host"),
        ({"host": ""}, "host"),
        ({"http_port": 0}, "http_port"),
        ({"http_port": "8409"}, "http_port"),
        ({"http_port": True}, "http_port"),
        ({"engine_interval_ms": 10}, "engine_interval_ms"),
        ({"canary_prompt": 1}, "canary_prompt"),
        ({"engines": {}}, "engines"),
        ({"engines": [1]}, r"engines\[0\]"),
        ({"engines": [{**ENGINE, "port": 65536}]}, r"engines\[0\].port"),
        ({"engines": [{**ENGINE, "model": "a\nb"}]}, r"engines\[0\].model"),
        ({"engines": [ENGINE, ENGINE]}, "two have one name"),
        ({"interval": 1}, "interval: no such key"),
    ],
)
def test_wrong_value_is_named(change: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigurationError, match=named):
        parse(json.dumps({**GOOD, **change}).encode())


@given(st.binary(max_size=50))
def test_no_file_makes_it_fail_otherwise(data: bytes) -> None:
    with pytest.raises(ConfigurationError):
        parse(data)


def test_check_of_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "agent.json"
    assert main(["--config", str(file), "--check"]) == 2
    assert "cannot be read: No such file" in capsys.readouterr().err
    file.write_text(json.dumps(GOOD))
    assert main(["--config", str(file), "--check"]) == 0
    assert load(str(file)).host == "gpu-1"
    file.write_text(json.dumps({**GOOD, "http_port": 0}))
    assert main(["--config", str(file), "--check"]) == 2
    assert "http_port: expected an integer" in capsys.readouterr().err
