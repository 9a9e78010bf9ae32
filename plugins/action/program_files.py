# Copyright (c) 2026, the Ringmaster authors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Reads the sources of a program on the controller and hands them to module program_files on the host."""

from __future__ import annotations

import ast
import os
from collections.abc import Iterable, Iterator
from pathlib import Path, PurePosixPath
from typing import Any

from ansible.errors import AnsibleActionFail, AnsibleError
from ansible.plugins.action import ActionBase

MODULE = "ringmaster.inference.program_files"
COLLECTION = PurePosixPath("ansible_collections/ringmaster/inference")
MODULE_UTILS = COLLECTION / "plugins" / "module_utils"
PREFIX = ".".join(MODULE_UTILS.parts) + "."
SOURCES = Path(__file__).resolve().parents[1] / "module_utils"


class ActionModule(ActionBase):  # type: ignore[misc] # ansible carries no types
    """Collects the files of a program; see the module's documentation."""

    _supports_check_mode = True
    _supports_async = False

    def run(self, tmp: str | None = None, task_vars: dict[str, Any] | None = None) -> dict[str, Any]:
        result: dict[str, Any] = super().run(tmp, task_vars)
        _validated, arguments = self.validate_argument_spec(
            argument_spec={
                "path": {"type": "path", "required": True},
                "packages": {"type": "list", "elements": "path", "required": True},
            }
        )
        files: dict[str, str] = {}
        for package in arguments["packages"]:
            files.update(self._package(package))
        if not files:
            raise AnsibleActionFail("Expected packages of a program. Found none. To do: name them.")
        files.update(_shared(files))
        result.update(
            self._execute_module(module_name=MODULE, module_args={**arguments, "files": files}, task_vars=task_vars)
        )
        return result

    def _package(self, package: str) -> Iterator[tuple[str, str]]:
        try:
            folder = Path(self._find_needle("files", package))
        except AnsibleError as error:
            raise AnsibleActionFail(
                f"Expected the package {package} on the controller. Found none: {error}. To do: correct packages."
            ) from error
        names = sorted(entry.name for entry in os.scandir(folder) if entry.is_file()) if folder.is_dir() else []
        wanted = [name for name in names if not name.startswith(".")]
        if not wanted:
            raise AnsibleActionFail(
                f"Expected a folder with files at {folder}. Found something else. To do: correct packages."
            )
        for name in wanted:
            yield f"{folder.name}/{name}", _text(folder / name)


def _shared(files: dict[str, str]) -> dict[str, str]:
    """What the files, and what they share themselves, import from the collection, by its name on the host."""
    found: dict[str, str] = {}
    pending = sorted(_imported(files))
    while pending:
        name = pending.pop()
        path = f"{MODULE_UTILS}/{name}.py"
        if path in found:
            continue
        source = SOURCES / f"{name}.py"
        if not source.is_file():
            raise AnsibleActionFail(
                f"Expected the collection to have {path}, which the program imports. Found none. "
                "To do: install the collection anew, or correct the import."
            )
        found[path] = _text(source)
        pending += sorted(_imported({path: found[path]}))
    if found:
        found.update({f"{folder}/__init__.py": "" for folder in (MODULE_UTILS, *MODULE_UTILS.parents[:-1])})
    return found


def _imported(files: dict[str, str]) -> set[str]:
    """Names of the modules below plugins/module_utils that the files import."""
    modules: set[str] = set()
    for name, text in files.items():
        if not name.endswith(".py"):
            continue
        try:
            tree = ast.parse(text)
        except (SyntaxError, ValueError) as error:
            raise AnsibleActionFail(
                f"Expected Python in {name}. Found: {error}. To do: install the collection anew."
            ) from error
        modules.update(_modules(tree))
    return {module[len(PREFIX) :].partition(".")[0] for module in modules if module.startswith(PREFIX)}


def _modules(tree: ast.AST) -> Iterable[str]:
    """Full names of what a source imports; of ``from a import b`` that is ``a.b``, whether b is a module or not."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise AnsibleActionFail(
            f"Expected the source {path} on the controller as UTF-8. Found: {error}. "
            "To do: install the collection anew."
        ) from error
