#!/usr/bin/python
# Copyright (c) 2026, the Ringmaster authors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: model_manifest
short_description: Write down what a model consists of, from a directory that is trusted
version_added: 0.1.0
description:
  - Reads every byte of the files in a directory and writes their names, sizes and SHA-256 into a manifest, by which
    M(ringmaster.inference.model_files) later checks what it places on hosts.
  - The manifest is as trustworthy as the directory. Make it once, where the model's origin was checked, and keep it
    with the inventory.
  - Names that begin with a dot are passed over. Links are refused unless O(follow_links=true), and pickles unless
    O(pickles_allowed=true).
options:
  directory:
    description:
      - Directory that holds the model's files.
    type: path
    required: true
  manifest:
    description:
      - File to write, as JSON. It is replaced in one step.
    type: path
    required: true
  follow_links:
    description:
      - Whether symbolic links to files count as what they point to, as the cache of a model hub's client needs it.
    type: bool
    default: false
  pickles_allowed:
    description:
      - Whether files may be Python pickles (C(*.bin), C(*.pt), C(*.pkl) and the like). Whoever loads one runs what its
        author wrote.
    type: bool
    default: false
attributes:
  check_mode:
    description: Reads the directory, says whether the manifest would change, and writes nothing.
    support: full
  diff_mode:
    description: Shows the manifest before and after.
    support: full
extends_documentation_fragment:
  - ringmaster.inference.attributes.setter
  - ringmaster.inference.attributes
author:
  - Ringmaster authors (@ringmaster)
"""

EXAMPLES = r"""
- name: The model's manifest is kept with the inventory
  ringmaster.inference.model_manifest:
    directory: /srv/trusted/Qwen2-7B-Instruct
    manifest: "{{ inventory_dir }}/manifests/qwen2-7b-instruct.json"
  delegate_to: localhost
  run_once: true
"""

RETURN = r"""
identity:
  description: Name of the version, 16 hexadecimal digits that stand for names and contents of all files.
  type: str
  returned: success
  sample: 4f0c1a7d9be25e38
files:
  description: How many files it has.
  type: int
  returned: success
  sample: 12
bytes:
  description: Bytes of all files.
  type: int
  returned: success
  sample: 15242825728
"""

import os
from typing import Any

from ansible.module_utils.basic import AnsibleModule

from ansible_collections.ringmaster.inference.plugins.module_utils import durable
from ansible_collections.ringmaster.inference.plugins.module_utils.model_manifest import ModelError, of_directory


def perform(module: AnsibleModule) -> dict[str, Any]:
    """Read the directory and write the manifest; the result in the form of RETURN. Raises ModelError and OSError."""
    parameters = module.params
    made = of_directory(parameters["directory"], parameters["follow_links"], parameters["pickles_allowed"])
    target = parameters["manifest"]
    try:
        with open(target, encoding="utf-8", errors="replace") as file:
            before = file.read()
    except FileNotFoundError:
        before = ""
    after = made.text()
    if before != after and not module.check_mode:
        durable.replace(target, after, 0o644)
        durable.sync_directory(os.path.dirname(os.path.abspath(target)))
    result: dict[str, Any] = {
        "changed": before != after,
        "identity": made.identity,
        "files": len(made.files),
        "bytes": made.size,
    }
    if module._diff:
        result["diff"] = {"before_header": target, "after_header": target, "before": before, "after": after}
    return result


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "directory": {"type": "path", "required": True},
            "manifest": {"type": "path", "required": True},
            "follow_links": {"type": "bool", "default": False},
            "pickles_allowed": {"type": "bool", "default": False},
        },
        supports_check_mode=True,
    )
    try:
        module.exit_json(**perform(module))
    except ModelError as error:
        module.fail_json(msg=str(error))
    except OSError as error:
        module.fail_json(
            msg=f"Expected to write {module.params['manifest']}. Found {error.strerror or error}. To do: mend that."
        )


if __name__ == "__main__":
    main()
