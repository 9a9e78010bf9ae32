# SPDX-License-Identifier: GPL-3.0-or-later
"""The filters as templates use them: hostvars that are templates themselves, and errors that name a variable."""

from __future__ import annotations

import json
from typing import Any

import pytest
from ansible.errors import AnsibleFilterError

from ansible_collections.ringmaster.inference.plugins.filter import (
    engine_secrets,
    engine_words,
    members,
    pool_name,
    scheduler_urls,
)

INVENTORY = """
all:
  vars:
    the_model: qwen2-7b
    ringmaster_models: {"{{ 'qwen2' }}-7b": {max_model_len: 4096}, qwen2-7b: {max_model_len: "{{ 4096 * 2 }}"}}
    vllm_engine: standin
  children:
    gateways: {hosts: {gw1: {ansible_host: "10.0.0.{{ 5 + 6 }}"}}}
    engines:
      hosts:
        gpu-a1:
          ansible_host: 10.0.0.13
          ringmaster_address: "{{ ansible_host | replace('10.', '11.') }}"
          ringmaster_card: l40s
          vllm_engines: [{name: main, model: "{{ the_model }}", port: 8100}]
          never_read: "{{ lookup('ansible.builtin.file', '/nonexistent') }}"
"""
PLAY = """
- hosts: gw1
  gather_facts: false
  tasks:
    - ansible.builtin.copy:
        content: "{{ {'members': groups | ringmaster.inference.members(hostvars),
                      'pool': 'Qwen/Q 2' | ringmaster.inference.pool_name} | to_json }}"
        dest: "{{ playbook_dir }}/result.json"
        mode: "0600"
      delegate_to: localhost
      vars: {ansible_connection: local}
"""


def test_templates_in_variables_are_evaluated_for_their_host(controller: Any) -> None:
    controller.write("inventory.yml", INVENTORY)
    run = controller.play(controller.write("play.yml", PLAY))
    assert run.returncode == 0, run.stdout
    result = json.loads((controller.root / "result.json").read_text(encoding="utf-8"))
    assert result["pool"] == "pool_Qwen_Q_2"
    assert result["members"]["gateways"] == [{"name": "gw1", "address": "10.0.0.11"}]
    (engine,) = result["members"]["engines"]
    assert (engine["address"], engine["model"], engine["max_model_len"]) == ("11.0.0.13", "qwen2-7b", 8192)


def test_error_names_the_host_and_the_variable(controller: Any) -> None:
    controller.write("inventory.yml", INVENTORY.replace("          ringmaster_card: l40s\n", ""))
    run = controller.play(controller.write("play.yml", PLAY))
    assert run.returncode == 2
    assert "gpu-a1: ringmaster_card must be a name" in run.stdout


def test_wrong_use_is_told() -> None:
    with pytest.raises(AnsibleFilterError, match="use it as groups"):
        members.members_filter([], {})
    with pytest.raises(AnsibleFilterError, match="needs the name of a model"):
        pool_name.pool_name_filter(None)


def test_filters_of_an_engines_options_name_what_they_need() -> None:
    assert engine_words.engine_words({"b": True, "a": None, "c": [1, 2]}) == ["--b", "--c", "1", "2"]
    assert engine_secrets.engine_secrets({"hf-token": "x"}, {"A_KEY": "y"}) == ["--hf-token", "A_KEY"]
    assert engine_secrets.engine_secrets({}) == []
    with pytest.raises(AnsibleFilterError, match="needs a dictionary of options, not str"):
        engine_words.engine_words("--a")
    with pytest.raises(AnsibleFilterError, match="needs dictionaries, not list"):
        engine_secrets.engine_secrets({}, [])


def test_schedulers_are_those_of_the_gateways_whatever_else_the_inventory_lacks() -> None:
    hosts = {"gw2": {"ansible_host": "fd00::2"}, "gw1": {"ringmaster_address": "10.0.0.1", "scheduler_http_port": "9"}}
    groups = {"gateways": ["gw2", "gw1"], "engines": ["e"]}
    assert scheduler_urls.scheduler_urls_filter(groups, hosts) == ["http://10.0.0.1:9", "http://[fd00::2]:8406"]
    assert scheduler_urls.scheduler_urls_filter({}, {}) == []
    with pytest.raises(AnsibleFilterError, match="gw1: scheduler_http_port must be a port, not 'x'"):
        scheduler_urls.scheduler_urls_filter({"gateways": ["gw1"]}, {"gw1": {"scheduler_http_port": "x"}})
    with pytest.raises(AnsibleFilterError, match="use it as"):
        scheduler_urls.scheduler_urls_filter([], {})
