# SPDX-License-Identifier: GPL-3.0-or-later
"""Renders the templates of the role ``edge`` as Ansible does, with the role's own defaults and variables."""

from __future__ import annotations

import grp
import os
import pwd
from pathlib import Path
from typing import Any

import yaml
from ansible.parsing.dataloader import DataLoader
from ansible.template import Templar, trust_as_template

from tests.support.templates import trusted

ROLE = Path(__file__).resolve().parents[3] / "roles" / "edge"


def engine(name: str, model: str, port: int = 8100, **changes: Any) -> dict[str, Any]:
    """An engine as the members document has it."""
    return {
        "name": name,
        "host": name.split(".", maxsplit=1)[0],
        "address": "127.0.0.1",
        "port": port,
        "kind": "standin",
        "model": model,
        "adapters": [],
        "card": "l40s",
        "max_num_seqs": 256,
        "max_model_len": 32768,
        **changes,
    }


def members(*engines: dict[str, Any]) -> dict[str, Any]:
    """A members document with one gateway and one preprocessor."""
    return {
        "schema": 1,
        "engines": list(engines),
        "gateways": [{"name": "gw1", "address": "127.0.0.1"}],
        "monitors": [],
        "preprocessors": [{"name": "pi1", "address": "192.0.2.17"}],
    }


def _templar(directory: Path, variables: dict[str, Any]) -> Templar:
    known: dict[str, Any] = {}
    for part in ("defaults", "vars"):
        known.update(trusted(yaml.safe_load((ROLE / part / "main.yml").read_text())))
    known.update(
        inventory_hostname="127.0.0.1",
        edge_generation="generation",
        # HAProxy does not start without its user and its empty directory, which come with its package.
        edge_user=pwd.getpwuid(os.geteuid()).pw_name,
        edge_group=grp.getgrgid(os.getegid()).gr_name,
        edge_chroot=str(directory),
        edge_directory=str(directory),
        ansible_search_path=[str(ROLE)],
    )
    known.update(variables)
    return Templar(loader=DataLoader(), variables=known)


def evaluate(expression: str, **variables: Any) -> Any:
    """What an expression of the role's tasks gives."""
    return _templar(Path("/etc/haproxy/ringmaster"), variables).template(trust_as_template("{{ " + expression + " }}"))


def render(directory: Path, **variables: Any) -> Path:
    """Write the configuration and the files it refers to below ``directory``; return the configuration's path."""
    templar = _templar(directory, variables)

    def text(name: str) -> str:
        lookup = "{{ lookup('ansible.builtin.template', '" + str(ROLE / "templates" / name) + ".j2') }}"
        return str(templar.template(trust_as_template(lookup)))

    generation = directory / variables.get("edge_generation", "generation")
    generation.mkdir(parents=True)
    for file in templar.template(trust_as_template("{{ edge_files }}")):
        (generation / file["name"]).write_text(text(file["name"]))
    configuration = directory / "haproxy.cfg"
    configuration.write_text(text("haproxy.cfg"))
    return configuration
