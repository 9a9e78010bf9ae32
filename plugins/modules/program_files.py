#!/usr/bin/python
# Copyright (c) 2026, the Ringmaster authors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: program_files
short_description: Put a Python program of this collection into a folder of a host
version_added: 0.1.0
description:
  - Makes a folder hold the packages of a program and nothing of a former one, in one question to the host. Copied one
    by one, some dozen files take longer than all the rest of a run.
  - What a package imports from C(plugins/module_utils) of this collection comes with it, to lie below O(path) under the
    same import path. The folders of that path become packages. Otherwise a collection that the host's own Python has
    would hide them.
  - Every file belongs to the user that the task runs as and has mode 0644, every folder 0755.
  - A file is replaced in one step. What a run left that was killed between two files is done by the next one.
  - In the packages, Python sources that are not of the program are removed. Caches of Python are left alone.
options:
  path:
    description:
      - Absolute path of the program's folder. It is made with the folders above it.
    type: path
    required: true
  packages:
    description:
      - Folders with the program's packages, on the controller, looked for as other tasks do, so in a role's C(files).
        Each comes to lie below O(path) under its own name, without what is in folders below it and without files whose
        names begin with a dot.
    type: list
    elements: path
    required: true
  files:
    description:
      - For the task's own use, which reads the sources on the controller. Text by name below O(path).
    type: dict
attributes:
  diff_mode:
    description: Shows every file that is written or removed.
    support: full
extends_documentation_fragment:
  - ringmaster.inference.attributes
  - ringmaster.inference.attributes.setter
author:
  - Ringmaster authors (@ringmaster)
"""

EXAMPLES = r"""
- name: The program is in place
  ringmaster.inference.program_files:
    path: /opt/example
    packages: [example]
  notify: Restart the example
"""

RETURN = r"""
written:
  description: Names below O(path) of the files that were written, in check mode those that would be.
  type: list
  elements: str
  returned: success
  sample: [example/__main__.py]
removed:
  description: Names below O(path) of the files that were removed, in check mode those that would be.
  type: list
  elements: str
  returned: success
  sample: [example/former.py]
"""

from typing import Any

from ansible.module_utils.basic import AnsibleModule

from ansible_collections.ringmaster.inference.plugins.module_utils.program_files import Program, ProgramError


def perform(module: AnsibleModule) -> dict[str, Any]:
    """Make the folder hold the program; the result in the form of RETURN. Raises OSError, ProgramError."""
    program = Program(module.params["path"], module.params["files"] or {})
    plan = program.plan()
    result: dict[str, Any] = {"changed": plan.changes, "written": plan.written, "removed": plan.removed}
    if module._diff:
        result["diff"] = program.diff(plan)
    if not module.check_mode:
        program.carry_out(plan)
    return result


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "path": {"type": "path", "required": True},
            "packages": {"type": "list", "elements": "path", "required": True},
            "files": {"type": "dict"},
        },
        supports_check_mode=True,
    )
    # What was asked for, without the texts: else each result would carry the whole program back.
    asked = {"module_args": {**module.params, "files": sorted(module.params["files"] or {})}}
    try:
        module.exit_json(invocation=asked, **perform(module))
    except ProgramError as error:
        module.fail_json(msg=str(error), invocation=asked)
    except OSError as error:
        module.fail_json(
            msg=f"Expected a folder for the program at {module.params['path']} that can be written. Found: {error}. "
            "To do: see to the disk and to the rights of the user that the task runs as.",
            invocation=asked,
        )


if __name__ == "__main__":
    main()
