# Copyright (c) 2026, the Ringmaster authors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from ansible.errors import AnsibleError, AnsibleUndefinedVariable
from ansible.plugins.action import ActionBase
from ansible.release import __version__ as ansible_core

from ansible_collections.ringmaster.inference.plugins.module_utils.preflight import (
    GROUPS,
    VARIABLES,
    Unreadable,
    check,
    render,
)


class ActionModule(ActionBase):  # type: ignore[misc] # ansible carries no types
    """Checks the inventory on the controller; see the module's documentation."""

    _VALID_ARGS: frozenset[str] = frozenset()
    _requires_connection = False
    TRANSFERS_FILES = False

    def run(self, tmp: str | None = None, task_vars: dict[str, Any] | None = None) -> dict[str, Any]:
        result: dict[str, Any] = super().run(tmp, task_vars)
        task_vars = task_vars or {}
        groups = {group: list(task_vars["groups"].get(group, ())) for group in GROUPS}
        hosts = {host for names in groups.values() for host in names}
        problems = check(groups, {host: read(task_vars["hostvars"][host]) for host in sorted(hosts)}, ansible_core)
        result.update(changed=False, msg="Nothing is wrong with the inventory.")
        if problems:
            result.update(failed=True, msg=render(problems))
            if ansible_core.startswith("2.18."):
                # It shows a failure's text as one line of JSON only; later versions print it as it is.
                self._display.error(render(problems), wrap_text=False)
        return result


def read(variables: Mapping[str, Any]) -> dict[str, Any]:
    """The variables that preflight looks at. One whose template fails becomes Unreadable instead of ending the run."""
    values = {}
    for name in VARIABLES:
        if name in variables:
            values[name] = read_one(variables, name)
    return values


def read_one(variables: Mapping[str, Any], name: str) -> Any:
    try:
        return plain(variables[name])
    except AnsibleError as error:
        return Unreadable(reason(error))


def plain(value: Any) -> Any:
    """Evaluate what is evaluated only on access, so that errors come up here."""
    if isinstance(value, Mapping):
        return {plain(key): plain(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(each) for each in value]
    return value


def reason(error: BaseException) -> str:
    """Why a value cannot be had. Texts of errors can quote values, so nothing but names is taken out of them."""
    chain = list(causes(error))
    if any("Vault" in type(each).__name__ or "vault secrets" in str(each) for each in chain):
        return "a vault value that cannot be decrypted (is the vault password given, and the right one?)"
    for each in chain:
        if isinstance(each, AnsibleUndefinedVariable):
            name = re.search(r"'(\w+)' is undefined", str(each))
            return f"a template that refers to {name[1]}, which is undefined" if name else "a template with no value"
    for each in chain:
        plugin = re.search(r"lookup plugin '([\w.]+)'", str(each))
        if plugin:
            return f"a template whose lookup ({plugin[1]}) fails"
    return f"a template that cannot be evaluated ({type(error).__name__})"


def causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__
