#!/usr/bin/python
# Copyright (c) 2026, the Ringmaster authors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: node_state
short_description: Drain the engines of a node, bring them back, and wait until nothing runs there
version_added: 0.1.0
description:
  - Tells the scheduler of every gateway that an engine, or all engines of a host, get no more requests, or that they
    get them again. Requests that run there come to their end; requests that wait go elsewhere.
  - A drain outlasts restarts of schedulers and of HAProxy.
  - Every scheduler is asked before anything is changed. One that does not answer is a failure, for its gateway would
    go on sending requests.
options:
  name:
    description:
      - Name of a host of the members document, for all its engines, or of one engine.
    type: str
    required: true
  state:
    description:
      - V(drained) sends no more requests there, V(active) sends them again.
      - V(empty) changes nothing, and waits until no request runs or waits there.
    type: str
    choices: [drained, active, empty]
    required: true
  schedulers:
    description:
      - Addresses of the HTTP interfaces of the schedulers of B(all) gateways.
    type: list
    elements: str
    required: true
  token:
    description:
      - What O(ringmaster.inference.scheduler#role:main:scheduler_api_token) is on these gateways. Required unless
        O(state=empty).
    type: str
  must_exist:
    description:
      - Whether it is a failure that a scheduler does not know the name, as of an engine that is not in the members
        document yet, or no longer. With V(false) such a scheduler sends nothing there, and has nothing to drain; with
        O(state=active) it forgets that an engine of this name was drained.
    type: bool
    default: true
  wait:
    description:
      - With O(state=drained), whether to wait until no request runs or waits there.
    type: bool
    default: false
  wait_timeout:
    description:
      - Seconds to wait, at most. Long answers take minutes.
    type: float
    default: 900
  wait_interval:
    description:
      - Seconds between two questions, over 0.
    type: float
    default: 1
  timeout:
    description:
      - Seconds that a scheduler gets to answer, over 0.
    type: float
    default: 5
attributes:
  check_mode:
    description: Says what would be changed, changes nothing and waits for nothing.
    support: full
  diff_mode:
    description: Shows which engines are drained before and after.
    support: full
extends_documentation_fragment:
  - ringmaster.inference.attributes.setter
  - ringmaster.inference.attributes
author:
  - Ringmaster authors (@ringmaster)
"""

EXAMPLES = r"""
- name: No request runs on the node any more
  ringmaster.inference.node_state:
    name: "{{ inventory_hostname }}"
    state: drained
    wait: true
    schedulers: >-
      {{ groups['gateways'] | map('extract', hostvars, 'ansible_host')
         | map('regex_replace', '^(.*)$', 'http://\1:8406') }}
    token: "{{ scheduler_api_token }}"
  delegate_to: localhost

- name: The node serves again
  ringmaster.inference.node_state:
    name: "{{ inventory_hostname }}"
    state: active
    schedulers:
      - http://192.0.2.11:8406
      - http://192.0.2.12:8406
    token: "{{ scheduler_api_token }}"
  delegate_to: localhost
"""

RETURN = r"""
engines:
  description: The engines of the node, in order of name.
  type: list
  elements: dict
  returned: success
  contains:
    name:
      description: Name of the engine.
      type: str
    drained:
      description: Whether every scheduler has drained it. In check mode, whether it would have.
      type: bool
    requests:
      description: Requests that run or wait there; null where a scheduler does not know, as in its first seconds.
      type: int
    unknown:
      description: Why something is null, by its name.
      type: dict
  sample: [{name: gpu-a1.main, drained: true, requests: 0, unknown: {}}]
waited_seconds:
  description: How long it was waited.
  type: float
  returned: success
  sample: 12.4
"""

from typing import Any

from ansible.module_utils.basic import AnsibleModule

from ansible_collections.ringmaster.inference.plugins.module_utils.node_state import (
    NodeState,
    NodeStateError,
    Outcome,
    Scheduler,
)


def perform(module: AnsibleModule) -> dict[str, Any]:
    """Do what O(state) asks and return the result in the form of RETURN."""
    parameters = module.params
    schedulers = [Scheduler(url, parameters["token"] or "", parameters["timeout"]) for url in parameters["schedulers"]]
    node = NodeState(schedulers, parameters["name"], parameters["must_exist"])
    wait = parameters["state"] == "empty" or (parameters["state"] == "drained" and parameters["wait"])
    if parameters["state"] == "empty":
        outcome = Outcome(False, node.read())
    else:
        outcome = node.set(parameters["state"] == "drained", write=not module.check_mode)
    if wait and not module.check_mode:
        waited = node.wait_until_empty(parameters["wait_timeout"], parameters["wait_interval"])
        outcome.engines, outcome.waited = waited.engines, waited.waited
    result: dict[str, Any] = {
        "changed": outcome.changed,
        "engines": [
            {
                "name": each.name,
                "drained": each.drained,
                "requests": None if each.unknown else each.requests,
                "unknown": {"requests": each.unknown} if each.unknown else {},
            }
            for each in outcome.engines
        ],
        "waited_seconds": round(outcome.waited, 1),
    }
    if module._diff and outcome.diff:
        result["diff"] = outcome.diff
    return result


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "name": {"type": "str", "required": True},
            "state": {"type": "str", "choices": ["drained", "active", "empty"], "required": True},
            "schedulers": {"type": "list", "elements": "str", "required": True},
            "token": {"type": "str", "no_log": True},
            "must_exist": {"type": "bool", "default": True},
            "wait": {"type": "bool", "default": False},
            "wait_timeout": {"type": "float", "default": 900},
            "wait_interval": {"type": "float", "default": 1},
            "timeout": {"type": "float", "default": 5},
        },
        required_if=[("state", "drained", ["token"]), ("state", "active", ["token"])],
        supports_check_mode=True,
    )
    if not module.params["schedulers"]:
        module.fail_json(msg="Expected the addresses of all schedulers in schedulers. Found none. To do: list them.")
    for name in ("wait_interval", "timeout"):
        if module.params[name] <= 0:
            module.fail_json(msg=f"Expected {name} over 0. Found {module.params[name]}. To do: give a longer time.")
    try:
        module.exit_json(**perform(module))
    except NodeStateError as error:
        module.fail_json(msg=str(error))


if __name__ == "__main__":
    main()
