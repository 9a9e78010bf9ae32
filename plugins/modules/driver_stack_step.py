#!/usr/bin/python
# Copyright (c) 2026, the Ringmaster authors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: driver_stack_step
short_description: Bring one operation's packages of the driver stack to a profile and hold them, or bring them back
version_added: 0.1.0
description:
  - Brings the packages of one operation (V(kernel), V(rdma), V(driver), V(cuda), V(nccl)) to the versions of a stack
    profile, up or down, and holds them there (C(apt-mark hold) and pins of priority 1001, or dnf's version lock).
  - Before anything is changed, what a killed run left is finished, the repositories are asked with their keys in a
    scratch folder, the transaction of the whole set and then that of the step are simulated and held against
    P(ringmaster.inference.stack_transaction#filter), and the package files are fetched, also those to go back with.
  - A step that fails half-way, also by a DKMS build that gives no module, is taken back.
  - Does not reboot, and does not judge whether the parts of the profile go together; see
    P(ringmaster.inference.stack_fit#filter).
options:
  profile:
    description:
      - Stack profile, as the lookup P(ringmaster.inference.stack_profile#lookup) gives it.
      - Required if O(state=present) or O(state=mirrored). Going back needs none.
    type: dict
  operation:
    description:
      - Whose packages to bring there. Packages of other operations are not touched.
    type: str
    choices: [kernel, rdma, driver, cuda, nccl]
    required: true
  state:
    description:
      - V(present) brings the packages to the profile and holds them.
      - V(confirmed) notes that the host came back healthy with them. Until then the last change of
        O(operation=driver) counts as one that may have to be taken back.
      - V(restored) brings packages, holds and pins back. It asks no repository.
      - V(mirrored) changes no package, and fills O(mirror) with what a host like this one lacks for all operations of
        the profile, whatever O(operation) says, and what of it is installed here.
    type: str
    choices: [present, confirmed, restored, mirrored]
    default: present
  to:
    description:
      - With O(state=restored), whether to go back to what was before the first change, or before the last one.
    type: str
    choices: [first, last]
    default: first
  offline:
    description:
      - Take packages from the mirror directory only, whatever other sources the host has.
    type: bool
    default: false
  mirror:
    description:
      - Directory on the host with the packages of the profile and their index, as the playbook C(mirror) makes it.
    type: path
    default: /srv/ringmaster/mirror
  keep_previous:
    description:
      - Whether a change is refused if the file of a package that it replaces can't be had. With V(if_available) it is
        done all the same, and there is no way back to that package.
    type: str
    choices: [required, if_available]
    default: required
  lock_timeout:
    description:
      - Seconds to wait for another process that has the package manager's lock.
    type: int
    default: 300
attributes:
  check_mode:
    description: Says which packages, files and holds would change; fetches indexes into a scratch folder.
    support: full
  diff_mode:
    description: Shows packages with their versions, files and holds.
    support: full
  idempotent:
    description: A second run changes nothing, and asks no repository.
    support: full
extends_documentation_fragment:
  - ringmaster.inference.attributes
author:
  - Ringmaster authors (@ringmaster)
"""

EXAMPLES = r"""
- name: The driver is the profile's, and held
  ringmaster.inference.driver_stack_step:
    profile: "{{ lookup('ringmaster.inference.stack_profile', 'debian12-r535') }}"
    operation: driver

- name: The driver is what it was before the last change
  ringmaster.inference.driver_stack_step:
    operation: driver
    state: restored
    to: last
"""

RETURN = r"""
packages:
  description:
    - What changed, or in check mode would change, with C(name), C(action) (V(install), V(upgrade), V(downgrade),
      V(reinstall), V(remove), V(put back), V(fetch)), C(before) and C(after).
  type: list
  elements: dict
  returned: success
  sample: [{name: nvidia-smi, action: upgrade, before: 535.261.03-1, after: 535.309.01-1}]
along:
  description: Names of packages of no operation that come along.
  type: list
  elements: str
  returned: success
  sample: [dkms]
files:
  description: Paths of repositories, keys, pins and locks that were written or removed.
  type: list
  elements: str
  returned: success
  sample: [/etc/apt/preferences.d/ringmaster-driver]
holds:
  description: Packages that were not held yet.
  type: list
  elements: str
  returned: success
  sample: [nvidia-smi]
recovered:
  description: What a run that was killed had left half done, and was finished first.
  type: list
  elements: str
  returned: success
  sample: ["dpkg left half done: nvidia-smi"]
generation:
  description:
    - The last change of the operation, with C(number), C(state) (V(open) if it was cut, V(applied) until the host is
      known to be healthy, V(confirmed)), C(profile), C(entries) (packages with C(before), C(after) and the C(file) to
      go back with), C(held), and C(facts) (C(loaded) driver, number of C(cards) and id of the C(boot) before; of the
      kernel on the EL family also C(default_kernel), the image that booted before, and C(wanted_kernel), the one that
      is to). V(null) if there was none.
  type: dict
  returned: success
  sample:
    number: 1
    state: applied
    profile: debian12-r535
    entries: [{name: nvidia-smi, before: null, after: 535.309.01-1, file: null}]
    held: []
    facts: {loaded: null, cards: 4, boot: 2f0c5e1b-7f5f-4f0e-9d49-5c2b1a7e9d10}
lines:
  description: What changed, for people.
  type: list
  elements: str
  returned: success
  sample: ["upgrade nvidia-smi 535.261.03-1 → 535.309.01-1", "hold nvidia-smi"]
"""

from typing import Any

from ansible.module_utils.basic import AnsibleModule

from ansible_collections.ringmaster.inference.plugins.module_utils.commands import CommandRunner
from ansible_collections.ringmaster.inference.plugins.module_utils.file_tree import FileTree
from ansible_collections.ringmaster.inference.plugins.module_utils.stack_generations import GenerationsError
from ansible_collections.ringmaster.inference.plugins.module_utils.stack_packages import OPERATIONS
from ansible_collections.ringmaster.inference.plugins.module_utils.stack_profiles import ProfileError, validate
from ansible_collections.ringmaster.inference.plugins.module_utils.stack_step import Options, Outcome, Step, StepError


def lines(outcome: Outcome) -> list[str]:
    """The changes for people."""
    text = [f"{each}, finished first" for each in outcome.recovered]
    for package in outcome.packages:
        versions = " → ".join(version for version in (package["before"], package["after"]) if version)
        text.append(f"{package['action']} {package['name']} {versions}".rstrip())
    text += [f"write {path}" for path in outcome.files]
    return text + ([f"hold {', '.join(outcome.holds)}"] if outcome.holds else [])


def perform(module: AnsibleModule, tree: FileTree, runner: CommandRunner) -> dict[str, Any]:
    """Do what O(state) asks and return the result in the form of RETURN."""
    given = module.params
    options = Options(
        operation=given["operation"],
        offline=given["offline"],
        mirror=given["mirror"],
        keep=given["keep_previous"],
        lock_timeout=given["lock_timeout"],
        check_mode=module.check_mode,
    )
    step = Step(None if given["profile"] is None else validate(given["profile"]), options, tree, runner)
    if given["state"] == "present":
        outcome = step.present()
    elif given["state"] == "mirrored":
        outcome = step.mirrored()
    elif given["state"] == "confirmed":
        outcome = step.confirm()
    else:
        outcome = step.restored(given["to"] == "first")
    for warning in outcome.warnings:
        module.warn(warning)
    told = lines(outcome)
    result: dict[str, Any] = {
        "changed": outcome.changed,
        "packages": outcome.packages,
        "along": outcome.along,
        "files": outcome.files,
        "holds": outcome.holds,
        "recovered": outcome.recovered,
        "generation": outcome.generation,
        "lines": told,
    }
    if module._diff and told:
        header = f"{given['operation']}: packages, files and holds"
        result["diff"] = {
            "before_header": header,
            "after_header": header,
            "before": "",
            "after": "\n".join(told) + "\n",
        }
    return result


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "profile": {"type": "dict"},
            "operation": {"type": "str", "choices": list(OPERATIONS), "required": True},
            "state": {"type": "str", "choices": ["present", "confirmed", "restored", "mirrored"], "default": "present"},
            "to": {"type": "str", "choices": ["first", "last"], "default": "first"},
            "offline": {"type": "bool", "default": False},
            "mirror": {"type": "path", "default": "/srv/ringmaster/mirror"},
            "keep_previous": {
                "type": "str",
                "choices": ["required", "if_available"],
                "default": "required",
                "no_log": False,
            },
            "lock_timeout": {"type": "int", "default": 300},
        },
        required_if=[("state", "present", ["profile"]), ("state", "mirrored", ["profile"])],
        supports_check_mode=True,
    )
    try:
        module.exit_json(**perform(module, FileTree(), CommandRunner()))
    except ProfileError as error:
        found = "; ".join(error.problems)
        module.fail_json(msg=f"Expected a stack profile. Found: {found}. To do: take one from lookup stack_profile.")
    except (StepError, GenerationsError) as error:
        module.fail_json(msg=str(error))


if __name__ == "__main__":
    main()
