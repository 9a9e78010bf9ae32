# Copyright (c) 2026, the Ringmaster authors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
name: stack_profile
short_description: A profile of the driver stack, read and checked on the controller
version_added: 0.1.0
description:
  - A profile is a file that says which kernel, RDMA, driver, CUDA and NCCL belong together on a system, with exact
    versions, repositories with their keys, and the days on which support ends.
  - The collection brings V(debian12-r535), V(debian13-r550), V(ubuntu2204-r580), V(ubuntu2404-r580), V(el9-r580), and
    V(notes-centos7), which is there to be refused.
  - The file is checked against the schema. Whether the parts go together is told by the filter
    P(ringmaster.inference.stack_fit#filter).
options:
  _terms:
    description:
      - Names of profiles. With none, all that there are, in order of their names.
    type: list
    elements: str
  directories:
    description:
      - Folders with profiles of the site's own, which are looked in before the collection's. A file is named
        C(NAME.yml).
    type: list
    elements: path
    default: []
  overrides:
    description:
      - What to change in each profile. Mappings are joined field by field, everything else is replaced. A package that
        is set to V(absent) is left out.
    type: dict
    default: {}
author:
  - Ringmaster authors (@ringmaster)
"""

EXAMPLES = r"""
driver_profile: "{{ lookup('ringmaster.inference.stack_profile', 'debian12-r535') }}"

# Another kernel, and a driver from the site's own mirror
mirrored_profile: >-
  {{ lookup('ringmaster.inference.stack_profile', 'ubuntu2404-r580', directories=['/etc/ringmaster/stack_profiles'],
            overrides={'kernel': {'release': '6.8.0-52-generic'}}) }}

every_profile: "{{ query('ringmaster.inference.stack_profile') }}"
"""

RETURN = r"""
_raw:
  description: The profiles.
  type: list
  elements: dict
"""

from pathlib import Path
from typing import Any

import yaml
from ansible.errors import AnsibleLookupError
from ansible.plugins.lookup import LookupBase

from ansible_collections.ringmaster.inference.plugins.module_utils.stack_profiles import (
    ProfileError,
    overridden,
    validate,
)

SHIPPED = Path(__file__).resolve().parents[2] / "meta" / "stack_profiles"
SUFFIX = ".yml"


class LookupModule(LookupBase):  # type: ignore[misc] # ansible carries no types
    """Reads profiles; see the documentation."""

    def run(self, terms: list[str], variables: Any = None, **kwargs: Any) -> list[dict[str, Any]]:
        self.set_options(var_options=variables, direct=kwargs)
        directories = [Path(directory) for directory in self.get_option("directories")] + [SHIPPED]
        return [self._profile(name, directories) for name in terms or known(directories)]

    def _profile(self, name: str, directories: list[Path]) -> dict[str, Any]:
        path = next((each for directory in directories if (each := directory / f"{name}{SUFFIX}").is_file()), None)
        if path is None or Path(name).name != name:
            raise AnsibleLookupError(f"Expected one of the profiles {', '.join(known(directories))}. Found {name!r}.")
        document, overrides = load(path), self.get_option("overrides")
        try:
            profile = validate(overridden(document, overrides) if overrides else document)
        except ProfileError as error:
            problems = "".join(f"\n- {problem}" for problem in error.problems)
            raise AnsibleLookupError(f"{path} is no stack profile:{problems}") from error
        if profile["name"] != name:
            raise AnsibleLookupError(f"{path}: expected the name {name}, found {profile['name']}")
        return profile


class _Loader(yaml.SafeLoader):
    """YAML in which a key that is there twice is an error, and a date is text."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        names = [key.value for key, _value in node.value if isinstance(key, yaml.ScalarNode)]
        for name in names:
            if names.count(name) > 1:
                raise yaml.constructor.ConstructorError(None, None, f"{name} is there twice", node.start_mark)
        return super().construct_mapping(node, deep)


_Loader.add_constructor("tag:yaml.org,2002:timestamp", lambda _loader, node: node.value)


def known(directories: list[Path]) -> list[str]:
    """Names of all profiles in the directories."""
    return sorted({path.stem for directory in directories for path in directory.glob(f"*{SUFFIX}")})


def load(path: Path) -> Any:
    """The document in a file. Raises AnsibleLookupError where it can't be read or is no YAML."""
    try:
        return yaml.load(path.read_text(encoding="utf-8"), Loader=_Loader)  # a subclass of SafeLoader
    except (OSError, UnicodeError, yaml.YAMLError) as error:
        raise AnsibleLookupError(f"{path} can't be read: {error}") from error
