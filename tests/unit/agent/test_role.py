# SPDX-License-Identifier: GPL-3.0-or-later
"""What the role brings to a host: a configuration that the program takes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from ansible.parsing.dataloader import DataLoader
from ansible.template import Templar, trust_as_template

from ringmaster_agent import configuration

CHECKOUT = Path(__file__).resolve().parents[3]
ROLE = CHECKOUT / "roles" / "agent"


def variables() -> dict[str, Any]:
    found: dict[str, Any] = {}
    for file in ("defaults/main.yml", "vars/main.yml", "vars/Debian.yml"):
        found |= yaml.safe_load((ROLE / file).read_text(encoding="utf-8"))
    return found


@pytest.mark.parametrize("key", ["", "secret"])
def test_configuration_that_is_rendered_is_taken(key: str) -> None:
    engine = {
        "name": "gpu-1.main",
        "host": "gpu-1",
        "address": "10.0.0.1",
        "port": 8100,
        "kind": "standin",
        "model": "m",
    }
    known = {
        **variables(),
        "inventory_hostname": "gpu-1",
        "ansible_host": "10.0.0.1",
        "agent_members": {"engines": [engine, {**engine, "name": "gpu-2.main", "host": "gpu-2"}]},
        "agent_engine_key": key,
    }
    known = {name: trust_as_template(value) if isinstance(value, str) else value for name, value in known.items()}
    template = (ROLE / "templates" / "agent.json.j2").read_text(encoding="utf-8")
    rendered = Templar(loader=DataLoader(), variables=known).template(trust_as_template(template))
    text = rendered if isinstance(rendered, str) else json.dumps(rendered)
    found = configuration.parse(text.encode())
    assert found.engines == (configuration.Engine("gpu-1.main", "10.0.0.1", 8100, "m"),)
    assert found.key_file == ("engine-key" if key else "")
    assert "secret" not in text
    assert (found.hardware_interval_ms, found.engine_interval_ms, found.canary_interval_ms) == (1000, 200, 60_000)
    # What the role sets by default is what the program takes by default.
    bare = configuration.Configuration("gpu-1", "10.0.0.1")
    assert found._replace(engines=(), key_file="", canary_prompt="") == bare
