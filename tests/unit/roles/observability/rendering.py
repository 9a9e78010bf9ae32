# SPDX-License-Identifier: GPL-3.0-or-later
"""Renders the templates of the role ``observability`` as Ansible does, with the role's own defaults and variables."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import yaml
from ansible.parsing.dataloader import DataLoader
from ansible.template import Templar, trust_as_template

from tests.support.templates import trusted

ROLE = Path(__file__).resolve().parents[4] / "roles" / "observability"
MEMBERS = {
    "schema": 1,
    "engines": [
        {
            "name": "gpu-a1.main",
            "host": "gpu-a1",
            "address": "192.0.2.13",
            "port": 8100,
            "model": "chat",
            "card": "l40s",
        },
        {
            "name": "gpu-b1.main",
            "host": "gpu-b1",
            "address": "2001:db8::15",
            "port": 8101,
            "model": 'o"d: d',
            "card": "l40s",
        },
    ],
    "agents": [
        {"host": "gpu-a1", "address": "192.0.2.13", "port": 8409},
        {"host": "gpu-b1", "address": "2001:db8::15", "port": 8410},
    ],
    "gateways": [{"name": "gw1", "address": "192.0.2.11"}, {"name": "gw2", "address": "gw2.example"}],
    "monitors": [{"name": "cpu-c1", "address": "2001:db8::16"}],
    "preprocessors": [{"name": "pi1", "address": "192.0.2.17"}],
}


def evaluate(expression: str, **variables: Any) -> Any:
    """Return what an expression gives in the role's tasks on a host of the Debian family."""
    known: dict[str, Any] = {}
    for file in ("defaults/main.yml", "vars/main.yml", "vars/Debian.yml"):
        known.update(trusted(yaml.safe_load((ROLE / file).read_text(encoding="utf-8"))))
    known.update(
        preprocessor_binaries={"aarch64": "/srv/preprocessor"},
        observability_members=MEMBERS,
        inventory_hostname="cpu-c1",
        ansible_search_path=[str(ROLE)],
    )
    known.update(variables)
    return Templar(loader=DataLoader(), variables=known).template(trust_as_template("{{ " + expression + " }}"))


def render(template: str, delimiters: str = "", **variables: Any) -> str:
    """Return the text of one of the role's templates; the delimiters are arguments of the lookup."""
    return str(evaluate(f"lookup('template', '{ROLE}/templates/{template}'{delimiters})", **variables))


def render_rules(**variables: Any) -> str:
    """Return the rules, rendered with the delimiters that the role's task gives."""
    return render("ringmaster.rules.yml.j2", ", variable_start_string='[[', variable_end_string=']]'", **variables)


def promtool(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run promtool and return what it said."""
    return subprocess.run(["promtool", *arguments], capture_output=True, text=True, check=False, timeout=180)
