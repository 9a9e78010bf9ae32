# Copyright (c) 2026, the Ringmaster authors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
name: engine_secrets
short_description: Options and variables of an engine that hold a secret
version_added: 0.1.0
description:
  - Names the options and the environment variables of an engine that hold a secret by their names, such as
    C(--hf-token) or C(AWS_SECRET_ACCESS_KEY). Command lines and units can be read by every user of a host, so that none
    belongs there.
positional: environment
options:
  _input:
    description: Options without the dashes, as in C(vllm_engines[].options).
    type: dict
    required: true
  environment:
    description: Environment variables.
    type: dict
    default: {}
author:
  - Ringmaster authors (@ringmaster)
"""

EXAMPLES = r"""
secret: "{{ {'hf-token': 'hf_x'} | ringmaster.inference.engine_secrets({'HF_HOME': '/srv'}) }}"  # ['--hf-token']
"""

RETURN = r"""
_value:
  description: The names, of options as they stand on a command line. Never a value.
  type: list
  elements: str
  sample: [--hf-token, AWS_SECRET_ACCESS_KEY]
"""

from collections.abc import Callable, Mapping
from typing import Any

from ansible.errors import AnsibleFilterError

from ansible_collections.ringmaster.inference.plugins.module_utils.engine_flags import secret_names


def engine_secrets(options: Any, environment: Any = None) -> list[str]:
    environment = {} if environment is None else environment
    for given in (options, environment):
        if not isinstance(given, Mapping):
            raise AnsibleFilterError(f"engine_secrets: needs dictionaries, not {type(given).__name__}")
    return secret_names(options, {str(name): value for name, value in environment.items()})


class FilterModule:
    """The filter in this file."""

    def filters(self) -> dict[str, Callable[..., Any]]:
        return {"engine_secrets": engine_secrets}
