#!/usr/bin/python
# Copyright (c) 2026, the Ringmaster authors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: engine_canary
short_description: Ask an engine the same prompts before and after a change, and compare
version_added: 0.1.0
description:
  - Asks one engine over its own interface, greedily and one prompt after the other, and measures errors, latency and
    the answers themselves.
  - With what it measured before a change, says what is worse than the limits allow.
  - The engine should be drained, so that nothing but the change makes a difference.
options:
  url:
    description:
      - Address of the engine, C(http://ADDRESS:PORT).
    type: str
    required: true
  api_key:
    description:
      - Key that the engine asks for.
    type: str
    required: true
  model:
    description:
      - Model as clients ask for it.
    type: str
    required: true
  prompts:
    description:
      - What is asked, one or more. They and the answers are in the result, so that they should hold nothing
        confidential.
    type: list
    elements: str
  max_tokens:
    description:
      - Tokens of each answer, 1 or more.
    type: int
    default: 16
  rounds:
    description:
      - How often each prompt is asked, 1 or more.
    type: int
    default: 3
  timeout:
    description:
      - Seconds that one answer may take, over 0.
    type: float
    default: 60
  before:
    description:
      - RV(measured) of an earlier run, to be compared with.
    type: dict
  error_rate:
    description:
      - By how much the share of failed requests may grow, 0 to 1.
    type: float
    default: 0
  latency_factor:
    description:
      - How many times the former median the time to the first token and for each further token may take, 1 or more.
    type: float
    default: 1.5
  latency_slack_seconds:
    description:
      - Seconds that are allowed on top, because a few milliseconds are noise.
    type: float
    default: 0.02
  agreement:
    description:
      - How much of the former answers must come again, from their beginning on, 0 to 1. It is a share of how well the
        former answers agreed among themselves.
    type: float
    default: 0.5
attributes:
  check_mode:
    description: Asks all the same.
    support: full
extends_documentation_fragment:
  - ringmaster.inference.attributes.reader
  - ringmaster.inference.attributes
author:
  - Ringmaster authors (@ringmaster)
"""

EXAMPLES = r"""
- name: The engine is measured before the change
  ringmaster.inference.engine_canary:
    url: http://192.0.2.21:8100
    api_key: "{{ vllm_api_key }}"
    model: qwen2-7b-instruct
  register: before

- name: The engine is no worse than before
  ringmaster.inference.engine_canary:
    url: http://192.0.2.21:8100
    api_key: "{{ vllm_api_key }}"
    model: qwen2-7b-instruct
    before: "{{ before.measured }}"
  register: after
  failed_when: after.worse != []
"""

RETURN = r"""
measured:
  description:
    - C(requests), C(errors) (a text each), the medians C(first_token_seconds) and C(further_token_seconds) (null
      without an answer), and C(answers) by prompt.
  type: dict
  returned: success
  sample:
    requests: 24
    errors: []
    first_token_seconds: 0.041
    further_token_seconds: 0.019
    answers: {"The capital of France is": [" Paris.", " Paris.", " Paris."]}
worse:
  description: What is worse than the limits allow, with figures. Empty if nothing is.
  type: list
  elements: str
  returned: if O(before) is given
  sample: ["95.0 ms for each further token, 19.0 ms before, 48.5 ms are allowed"]
figures:
  description:
    - What was compared, before and after. C(agreement) is that of the former answers among themselves, and with these.
  type: dict
  returned: if O(before) is given
  sample:
    error_rate: [0, 0]
    agreement: [1.0, 0.94]
    first_token_seconds: [0.041, 0.039]
    further_token_seconds: [0.019, 0.095]
"""

from typing import Any

from ansible.module_utils.basic import AnsibleModule

from ansible_collections.ringmaster.inference.plugins.module_utils.engine_canary import (
    PROMPTS,
    Canary,
    Limits,
    compare,
)

LIMITS = ("error_rate", "latency_factor", "latency_slack_seconds", "agreement")


def complaint(parameters: dict[str, Any]) -> str:
    """What is wrong with the options; empty if nothing is."""
    ranges = (
        ("max_tokens", 1, 4096),
        ("rounds", 1, 1000),
        ("timeout", 0.001, 86400),
        ("error_rate", 0, 1),
        ("latency_factor", 1, 1000),
        ("latency_slack_seconds", 0, 3600),
        ("agreement", 0, 1),
    )
    for name, least, most in ranges:
        if not least <= parameters[name] <= most:
            return f"Expected {name} of {least} to {most}. Found {parameters[name]}. To do: correct it."
    if parameters["prompts"] == []:
        return "Expected one prompt or more. Found none. To do: give some, or leave the option out."
    return ""


def perform(parameters: dict[str, Any]) -> dict[str, Any]:
    """Ask and compare; the result in the form of RETURN. Raises ValueError for options that are none."""
    canary = Canary(
        parameters["url"], parameters["api_key"], parameters["model"], parameters["max_tokens"], parameters["timeout"]
    )
    before = parameters["before"]
    if before is not None and not before.keys() >= {"requests", "errors", "answers", "first_token_seconds"}:
        raise ValueError("expected in before what an earlier run measured, found something else")
    # What is compared is what was asked before.
    prompts = list(before["answers"]) if before else parameters["prompts"] or list(PROMPTS)
    measured = canary.measure(prompts, parameters["rounds"])
    result: dict[str, Any] = {"measured": measured}
    if before is not None:
        result["worse"], result["figures"] = compare(before, measured, Limits(*(parameters[name] for name in LIMITS)))
    return result


def main() -> None:
    limits = Limits()
    module = AnsibleModule(
        argument_spec={
            "url": {"type": "str", "required": True},
            "api_key": {"type": "str", "required": True, "no_log": True},
            "model": {"type": "str", "required": True},
            "prompts": {"type": "list", "elements": "str"},
            "max_tokens": {"type": "int", "default": 16, "no_log": False},  # tokens of text
            "rounds": {"type": "int", "default": 3},
            "timeout": {"type": "float", "default": 60},
            "before": {"type": "dict"},
            "error_rate": {"type": "float", "default": 0},
            "latency_factor": {"type": "float", "default": limits.latency_factor},
            "latency_slack_seconds": {"type": "float", "default": limits.latency_slack_seconds},
            "agreement": {"type": "float", "default": limits.agreement},
        },
        supports_check_mode=True,
    )
    wrong = complaint(module.params)
    if wrong:
        module.fail_json(msg=wrong)
    try:
        module.exit_json(changed=False, **perform(module.params))
    except ValueError as error:
        module.fail_json(msg=f"{str(error).capitalize()}. To do: correct the option.")


if __name__ == "__main__":
    main()
