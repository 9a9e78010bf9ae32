# Copyright (c) 2026, the Ringmaster authors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
name: engine_words
short_description: Options of an engine as words of its command line
version_added: 0.1.0
description:
  - Gives the words that options of an inventory make on a command line, in the order of their names. It is what module
    M(ringmaster.inference.engine_flags) judges.
options:
  _input:
    description:
      - Options without the dashes, as in C(vllm_engines[].options). V(true) gives the bare option, V(false) the
        option with C(no-) before it, a list several values, a dictionary JSON, null nothing.
    type: dict
    required: true
author:
  - Ringmaster authors (@ringmaster)
"""

EXAMPLES = r"""
words: "{{ {'max-num-seqs': 256, 'enforce-eager': false} | ringmaster.inference.engine_words }}"
"""

RETURN = r"""
_value:
  description: The words.
  type: list
  elements: str
  sample: [--no-enforce-eager, --max-num-seqs, "256"]
"""

from collections.abc import Callable, Mapping
from typing import Any

from ansible.errors import AnsibleFilterError

from ansible_collections.ringmaster.inference.plugins.module_utils.engine_flags_words import from_options


def engine_words(options: Any) -> list[str]:
    if not isinstance(options, Mapping):
        raise AnsibleFilterError(f"engine_words: needs a dictionary of options, not {type(options).__name__}")
    return from_options(options)


class FilterModule:
    """The filter in this file."""

    def filters(self) -> dict[str, Callable[..., Any]]:
        return {"engine_words": engine_words}
