# SPDX-License-Identifier: GPL-3.0-or-later
"""A wrong inventory stops the site before any host is touched, and no secret is shown."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

CHECKOUT = Path(__file__).resolve().parents[4]

# The ssh of this site is a program that leaves a mark when it is called.
INVENTORY = """
all:
  vars:
    ansible_ssh_executable: "{{ inventory_dir }}/ssh"
    ringmaster_models: {qwen2-7b: {max_model_len: 4096}}
    vllm_engine: standin
    vllm_api_key: SECRET-of-the-engines
    edge_api_keys: [{id: team-a, key: SECRET-of-team-a}]
  children:
    gateways: {hosts: {gw1: {ansible_host: 10.0.0.1}}}
    monitors: {hosts: {gw1: }}
    preprocessors: {hosts: {pi1: {ansible_host: 10.0.0.9}}}
    engines:
      vars:
        ringmaster_card: l40s
        vllm_engines: [{name: main, model: qwen2-7b, port: 8100}]
      hosts:
        gpu1: {ansible_host: 10.0.0.2}
        gpu2: {ansible_host: 10.0.0.3}
"""
# Encrypted with a password that nobody has.
VAULT = """!vault |
      $ANSIBLE_VAULT;1.1;AES256
      38643966633735653036613838363661303463313264663139393263323534303835303130343865
      3139386463303832626462643965383166336662393666330a313632386163613431313763663961
      33663564636139333766386461323661306437623332343334336630353137383235643133373437
      3864353931383835380a623861376661336639376131366661633737303631626335363832356634
      6161
"""
ENGINE_HOSTS = """      hosts:
        gpu1: {ansible_host: 10.0.0.2}
        gpu2: {ansible_host: 10.0.0.3}
"""
ENGINES_KEY = "SECRET-of-the-engines"
LOOKUP = """"{{ lookup('ansible.builtin.file', '/nonexistent') }}\""""
BROKEN = """"{{ 'SECRET' | ansible.builtin.b64decode('x') }}\""""
ENGINES_KEY_OF = "vllm_api_key of gpu1, gpu2, gw1"
# case: what is replaced in the inventory, by what, and what the message says
WRONG: dict[str, tuple[str, str, list[str]]] = {
    "no engine host": (ENGINE_HOSTS, "", ["groups['engines']", "add a host to group engines"]),
    "no engine": ("[{name: main, model: qwen2-7b, port: 8100}]", "[]", ["vllm_engines of gpu1, gpu2", "no engine"]),
    "unknown model": ("model: qwen2-7b", "model: qwen", ["vllm_engines[0].model of gpu1, gpu2", "add the model to"]),
    "one address": ("10.0.0.3", "10.0.0.2", ["ringmaster_address of gpu1, gpu2", "10.0.0.2 for all of them"]),
    "no secret": (f"    vllm_api_key: {ENGINES_KEY}\n", "", [ENGINES_KEY_OF, "undefined"]),
    "undefined secret": (ENGINES_KEY, '"{{ vault_key }}"', [ENGINES_KEY_OF, "refers to vault_key, which is undefined"]),
    "missing file": (ENGINES_KEY, LOOKUP, [ENGINES_KEY_OF, "lookup (ansible.builtin.file) fails"]),
    "missing vault password": (ENGINES_KEY, VAULT, [ENGINES_KEY_OF, "a vault value that cannot be decrypted"]),
    "broken template": (ENGINES_KEY, BROKEN, [ENGINES_KEY_OF, "a template that cannot be evaluated"]),
    "undefined address": ("10.0.0.3", '"{{ nothing }}"', ["ansible_host of gpu2", "refers to nothing"]),
    "undefined client": ("SECRET-of-team-a", '"{{ vault_a }}"', ["edge_api_keys of gw1", "refers to vault_a"]),
}


def site(controller: Any, inventory: str) -> None:
    mark = controller.root / "touched"
    controller.write("ssh", f"#!/bin/sh\ntouch {mark}\nexit 255\n").chmod(0o755)
    controller.write("inventory.yml", inventory)
    plays = yaml.safe_load((CHECKOUT / "playbooks" / "site.yml").read_text(encoding="utf-8"))
    for role in [role["role"].rpartition(".")[2] for play in plays for role in play.get("roles", [])]:
        controller.role(role, "[]")


@pytest.mark.parametrize("case", WRONG)
def test_wrong_inventory_stops_before_any_host_is_touched(controller: Any, case: str) -> None:
    right, wrong, says = WRONG[case]
    assert right in INVENTORY
    site(controller, INVENTORY.replace(right, wrong))
    run = controller.play(controller.collection / "playbooks" / "site.yml")
    assert run.returncode == 2, run.stdout
    assert "Preflight found 1 problem in the inventory. No host was touched." in run.stdout
    for text in says:
        assert text in run.stdout
    assert "   fix:      " in run.stdout
    assert "SECRET" not in run.stdout
    assert not (controller.root / "touched").exists()


@pytest.mark.parametrize(
    "arguments", [["--limit", "gpu1"], ["--limit", "pi1"], ["--tags", "edge"], ["--check", "--diff"]]
)
def test_every_way_to_run_is_checked_first(controller: Any, arguments: list[str]) -> None:
    site(controller, INVENTORY.replace("10.0.0.3", "10.0.0.2"))
    run = controller.play(controller.collection / "playbooks" / "site.yml", *arguments)
    assert run.returncode == 2, run.stdout
    assert "ringmaster_address of gpu1, gpu2" in run.stdout
    assert not (controller.root / "touched").exists()


def test_right_inventory_passes_without_a_connection(controller: Any) -> None:
    site(controller, INVENTORY)
    play = controller.write(
        "play.yml",
        "- hosts: all\n  gather_facts: false\n  tasks: [{ringmaster.inference.site_preflight: {}, run_once: true}]\n",
    )
    run = controller.play(play)
    assert run.returncode == 0, run.stdout
    assert not (controller.root / "touched").exists()
    assert controller.documents()[0]["hosts"].keys() == {"gw1", "gpu1", "gpu2", "pi1"}


def test_site_goes_on_to_the_hosts_if_all_is_right(controller: Any) -> None:
    """The mark that the other tests look for does appear."""
    site(controller, INVENTORY)
    run = controller.play(controller.collection / "playbooks" / "site.yml")
    assert run.returncode == 4, run.stdout
    assert (controller.root / "touched").exists()
