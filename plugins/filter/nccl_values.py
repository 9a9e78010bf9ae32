# Copyright (c) 2026, the Ringmaster authors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
name: nccl_values
short_description: Whether NCCL takes the values of its variables
version_added: 0.1.0
description:
  - Judges variables of NCCL by its documentation and source. NCCL itself replaces a value that it can't read by its
    default, without a word.
  - A name that does not begin with C(NCCL_), and a value with a line end, is refused, because the file can't hold it.
options:
  _input:
    description: Names and values, as in C(/etc/nccl.conf).
    type: dict
    required: true
author:
  - Ringmaster authors (@ringmaster)
"""

EXAMPLES = r"""
- name: NCCL takes every value
  ansible.builtin.assert:
    that: nccl_environment | ringmaster.inference.nccl_values | selectattr('refused') | length == 0
"""

RETURN = r"""
_value:
  description:
    - For each variable in order of the names C(name), C(refused) (whether no process may be started with it), and
      C(message) for people, which is empty where there is nothing to say.
  type: list
  elements: dict
  sample: [{name: NCCL_IB_TC, refused: true, message: "NCCL_IB_TC=300: expected a whole number from 0 to 255"}]
"""

import re
from collections.abc import Callable, Mapping
from typing import Any

from ansible.errors import AnsibleFilterError

from ansible_collections.ringmaster.inference.plugins.module_utils.nccl_environment import verdict


def nccl_values(environment: Any) -> list[dict[str, Any]]:
    if not isinstance(environment, Mapping):
        raise AnsibleFilterError("nccl_values: expected a mapping of names to values")
    return [_judged(str(name), environment[name]) for name in sorted(environment, key=str)]


def _judged(name: str, value: Any) -> dict[str, Any]:
    # A number of YAML is meant as its digits; true and false are none of NCCL's words.
    text = str(value) if isinstance(value, (str, int)) and not isinstance(value, bool) else None
    if not re.match(r"NCCL_[A-Z0-9_]+\Z", name):
        return {"name": name, "refused": True, "message": f"{name!r}: expected a name of NCCL, like NCCL_IB_TC"}
    if text is None or re.search(r"[\x00-\x1f\x7f]", text) or text != text.strip():
        return {"name": name, "refused": True, "message": f"{name}={value!r}: expected text in one line, or a number"}
    judged = verdict(name, text)
    words = ": ".join([f"{name}={text}", *([f"expected {judged.expected}"] if judged.expected else [])])
    reason = f" ({judged.reason})" if judged.reason else ""
    return {"name": name, "refused": judged.refused, "message": f"{words}{reason}" if judged.refused else ""}


class FilterModule:
    """The filter in this file."""

    def filters(self) -> dict[str, Callable[..., Any]]:
        return {"nccl_values": nccl_values}
