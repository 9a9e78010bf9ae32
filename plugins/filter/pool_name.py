# Copyright (c) 2026, the Ringmaster authors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
name: pool_name
short_description: Name of HAProxy's backend for a model
version_added: 0.1.0
description:
  - Gives C(pool_) and the model's name, with each character that HAProxy does not take in a name replaced by C(_).
options:
  _input:
    description: Name of a model.
    type: str
    required: true
author:
  - Ringmaster authors (@ringmaster)
"""

EXAMPLES = r"""
backend: "{{ 'Qwen/Qwen2-7B' | ringmaster.inference.pool_name }}"  # pool_Qwen_Qwen2-7B
"""

RETURN = r"""
_value:
  description: Name of the backend.
  type: str
  sample: pool_Qwen_Qwen2-7B
"""

from collections.abc import Callable
from typing import Any

from ansible.errors import AnsibleFilterError

from ansible_collections.ringmaster.inference.plugins.module_utils.members import pool_name


def pool_name_filter(model: Any) -> str:
    if not isinstance(model, str) or not model:
        raise AnsibleFilterError(f"pool_name: needs the name of a model, not {model!r}")
    return pool_name(model)


class FilterModule:
    """The filter in this file."""

    def filters(self) -> dict[str, Callable[..., Any]]:
        return {"pool_name": pool_name_filter}
