# SPDX-License-Identifier: GPL-3.0-or-later
"""The evidence that real runs leave: who changed what, what was verified, and what must not be in it."""

from __future__ import annotations

import json
import stat
from typing import Any

import pytest

INVENTORY = """
all:
  vars: {ansible_connection: local}
  hosts:
    good:
    bad:
    away: {ansible_connection: ssh, ansible_host: 127.0.0.1, ansible_port: 1}
    last:
    idle:
"""
ROLE = """
- name: What is there is known
  ansible.builtin.set_fact:
    NAME_measured: {version: "{{ 'ab' ~ 'sent' }}", host: "{{ inventory_hostname }}"}
- name: Something is changed
  ansible.builtin.debug: {msg: x}
  changed_when: true
  loop: [1, 2, 3]
  notify: Service is reloaded
- name: Secret is known
  ansible.builtin.set_fact:
    NAME_verified: {key: SECRET-value}
  no_log: true
- name: Failure is rescued
  block:
    - block:
        - name: Inner failure
          ansible.builtin.fail: {msg: rescued}
  rescue:
    - ansible.builtin.debug: {msg: mended}
- name: Failure is ignored
  ansible.builtin.fail: {msg: ignored}
  ignore_errors: true
- ansible.builtin.meta: flush_handlers
- name: Bad one fails
  ansible.builtin.command: sh -c 'echo the reason >&2; exit 3'
  changed_when: false
  when: inventory_hostname == 'bad'
- name: Away is not reached
  ansible.builtin.ping:
- name: Checks passed
  ansible.builtin.set_fact:
    NAME_verified: {port: "{{ 'open' }}", seen: [1, true, null]}
"""
SPECIFICATION = "argument_specs: {main: {options: {}}}"
HANDLER = """
- name: Service is reloaded
  ansible.builtin.debug: {msg: x}
  changed_when: true
"""
PLAY = """
- hosts: all:!idle
  gather_facts: false
  strategy: "{{ strategy | default('linear') }}"
  serial: "{{ batch | default('100%') }}"
  roles: [ringmaster.inference.first]
- hosts: all
  gather_facts: false
  tasks:
    - ansible.builtin.include_role: {name: ringmaster.inference.second}
      when: inventory_hostname == 'good'
"""


@pytest.fixture
def site(controller: Any) -> Any:
    controller.write("inventory.yml", INVENTORY)
    controller.write("play.yml", PLAY)
    for name in ("first", "second"):
        controller.role(name, ROLE.replace("NAME", name), handlers=HANDLER)
    return controller


def operations(document: dict[str, Any], host: str) -> dict[str, Any]:
    return {operation["name"]: operation for operation in document["hosts"][host]["operations"]}


@pytest.mark.parametrize("how", ["batch=5", "strategy=free", "batch=2"])
def test_document_tells_what_each_operation_did(site: Any, how: str) -> None:
    run = site.play("play.yml", "-e", how)
    (document,) = site.documents()
    assert document["status"] == "failed"
    assert document["playbook"] == "play.yml"
    assert document["collection_version"] == "0.1.0"
    assert document["check_mode"] is False
    assert document["finished_at"] >= document["started_at"]

    good = operations(document, "good")
    assert list(good) == ["first", "second"]
    for name, operation in good.items():
        assert operation["status"] == "ok"
        assert operation["measured"] == {"version": "absent", "host": "good"}
        assert operation["verified"] == {"port": "open", "seen": [1, True, None]}
        assert [change["task"] for change in operation["changed"]] == ["Something is changed", "Service is reloaded"], (
            name
        )
        assert operation["seconds"] > 0
    assert document["hosts"]["good"]["status"] == "ok"
    assert document["hosts"]["good"]["counts"]["changed"] == 4

    bad = operations(document, "bad")["first"]
    assert document["hosts"]["bad"]["status"] == bad["status"] == "failed"
    assert bad["failure"] == {"task": "Bad one fails", "message": "non-zero return code\nthe reason"}
    assert bad["verified"] is None
    away = operations(document, "away")["first"]
    assert document["hosts"]["away"]["status"] == away["status"] == "unreachable"
    assert document["hosts"]["idle"]["operations"] == []

    assert "SECRET" not in json.dumps(document)
    assert "Evidence: " in run.stdout
    assert "bad, first: Bad one fails" in run.stdout


def test_operation_that_a_tag_leaves_out_is_not_told(site: Any) -> None:
    """Ansible checks a role's arguments whatever the tags."""
    site.role("first", ROLE.replace("NAME", "first"), handlers=HANDLER, meta=SPECIFICATION)
    run = site.play("play.yml", "--limit", "good", "--tags", "other")
    assert "first : Validating arguments" in run.stdout
    assert operations(site.documents()[0], "good") == {}


def test_files_are_private_and_lines_are_added(site: Any) -> None:
    site.environment["RINGMASTER_EVIDENCE_SUMMARY_LINES"] = "Console: http://10.0.0.1:8406/\nPrometheus: http://x:9090/"
    run = site.play("play.yml", "--limit", "good", "--check")
    assert run.returncode == 0, run.stdout
    assert "Console: http://10.0.0.1:8406/\nPrometheus: http://x:9090/" in run.stdout
    assert "check mode: nothing was changed" in run.stdout
    (path,) = site.evidence.iterdir()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(site.evidence.stat().st_mode) == 0o700
    assert site.documents()[0]["check_mode"] is True


def test_summary_can_be_left_out(site: Any) -> None:
    site.environment["RINGMASTER_EVIDENCE_SUMMARY"] = "false"
    run = site.play("play.yml", "--limit", "good")
    assert "OPERATION" not in run.stdout
    assert len(site.documents()) == 1


def test_evidence_that_cannot_be_written_fails_no_run(site: Any) -> None:
    site.write("occupied", "a file where the directory should be")
    site.environment["RINGMASTER_EVIDENCE_DIRECTORY"] = str(site.root / "occupied")
    run = site.play("play.yml", "--limit", "good")
    assert run.returncode == 0, run.stdout
    said = " ".join(run.stdout.split())
    assert said.count("Expected to write the evidence") == 1
    assert "To do: make room or give another directory" in said
    assert "OPERATION" in run.stdout


def test_run_that_is_killed_leaves_what_it_knew(site: Any) -> None:
    site.write("play.yml", PLAY + KILL)
    run = site.play("play.yml", "--limit", "good")
    assert run.returncode == -9
    (document,) = site.documents()
    assert document["status"] == "running"
    assert document["finished_at"] is None
    assert operations(document, "good")["second"]["verified"]


def test_two_playbooks_leave_two_documents(site: Any) -> None:
    run = site.play("play.yml", "play.yml", "--limit", "good")
    assert run.returncode == 0, run.stdout
    assert len({document["run"] for document in site.documents()}) == 2


KILL = """
- hosts: good
  gather_facts: false
  tasks:
    - ansible.builtin.debug:
        msg: "{{ lookup('ansible.builtin.pipe', 'kill -9 $(ps -o ppid= -p $(ps -o ppid= -p $$))') }}"
"""
