# SPDX-License-Identifier: GPL-3.0-or-later
"""What roles tell pip of package indexes: in a file of root's, for an index's address may hold a key."""

from __future__ import annotations

import configparser
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from ansible.parsing.dataloader import DataLoader
from ansible.template import Templar, trust_as_template

ROLES = Path(__file__).resolve().parents[3] / "roles"
FILES = {
    "agent": "virtual_environment.yml",
    "gpu": "virtual_environment.yml",
    "scheduler": "virtual_environment.yml",
    "vllm": "engines/standin/virtual_environment.yml",
}
KEY_URL = "https://user:s3cret%40@index.example/simple"


def settings(role: str, **variables: Any) -> dict[str, str]:
    """The settings that pip gets from a role with some of its variables."""
    tasks = yaml.safe_load((ROLES / role / "tasks" / FILES[role]).read_text(encoding="utf-8"))
    (written,) = (each for each in tasks if each.get("ansible.builtin.copy", {}).get("dest", "").endswith("/pip.conf"))
    assert written["ansible.builtin.copy"]["mode"] == "0600"
    (pip,) = (each for each in tasks if "ansible.builtin.pip" in each)
    known = {f"{role}_python_{name}": "" for name in ("index_url", "find_links")} | {f"{role}_python_offline": False}
    known |= {f"{role}_python_{name}": value for name, value in variables.items()}
    place = written["ansible.builtin.copy"]["dest"]
    roles_own = yaml.safe_load((ROLES / role / "vars" / "main.yml").read_text(encoding="utf-8"))
    assert pip["environment"] == f"{{{{ {role}_pip_environment }}}}"
    known[f"{role}_directory"] = "/opt/it"
    environment = Templar(loader=DataLoader(), variables=known).template(
        trust_as_template(roles_own[f"{role}_pip_environment"])
    )
    told = {"PIP_CONFIG_FILE": place.replace(f"{{{{ {role}_directory }}}}", "/opt/it"), "PIP_INDEX_URL": ""}
    assert environment == (told if variables else {})
    template = trust_as_template(written["ansible.builtin.copy"]["content"])
    read = configparser.RawConfigParser()  # as pip reads it
    read.read_string(Templar(loader=DataLoader(), variables=known).template(template))
    return dict(read["install"])


@pytest.mark.parametrize("role", FILES)
def test_pip_is_told_what_the_variables_say(role: str) -> None:
    assert settings(role) == {}
    assert settings(role, index_url=KEY_URL) == {"index-url": KEY_URL}
    given = settings(role, index_url=KEY_URL, find_links="/srv/wheels", offline=True)
    assert given == {"no-index": "true", "find-links": "/srv/wheels"}


def test_no_role_puts_an_index_on_a_command_line_or_into_the_environment_of_a_task() -> None:
    found = []
    for path in ROLES.glob("*/tasks/**/*.yml"):
        text = path.read_text(encoding="utf-8")
        found += [f"{path}: {word}" for word in re.findall(r"--(?:extra-)?index-url|--find-links", text)]
        found += [f"{path}: {line}" for line in re.findall(r"environment:.*(?:_index|installer_environment).*", text)]
    assert found == []
