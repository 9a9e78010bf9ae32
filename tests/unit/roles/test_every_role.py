# SPDX-License-Identifier: GPL-3.0-or-later
"""Every role keeps to the skeleton and the rules of docs/conventions.md ("A role")."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

ROLES = Path(__file__).resolve().parents[3] / "roles"
TASK_FILES = ("main.yml", "measure.yml", "apply.yml", "verify.yml", "rollback.yml")
# The module, and what takes its place on a host without Python.
OPERATION_STATES = ("ringmaster.inference.operation_state", "ringmaster.inference.raw_operation_state")
# Secrets of the site that roles are given through their own variables (docs/conventions.md, "Inventory").
SITE_SECRETS = frozenset({"vllm_api_key", "edge_api_keys", "scheduler_api_token"})
BLOCK_PARTS = ("block", "rescue", "always")


@pytest.fixture(params=sorted(path.name for path in ROLES.iterdir() if path.is_dir()))
def role(request: pytest.FixtureRequest) -> Path:
    """Each role in turn."""
    return ROLES / str(request.param)


def load(path: Path) -> Any:
    """Return what a YAML file holds."""
    return yaml.safe_load(path.read_text(encoding="utf-8"))


def options(role: Path) -> dict[str, dict[str, Any]]:
    """Return the options of all entry points of a role's argument specification."""
    entry_points = load(role / "meta" / "argument_specs.yml")["argument_specs"]
    return {name: option for entry in entry_points.values() for name, option in entry.get("options", {}).items()}


def holds_secret(option: dict[str, Any]) -> bool:
    """Tell whether an option or one inside of it is marked as a secret."""
    return bool(option.get("no_log")) or any(holds_secret(inner) for inner in option.get("options", {}).values())


def secrets(role: Path) -> frozenset[str]:
    """Return the names of the variables that hold a secret when the role runs."""
    return SITE_SECRETS | {name for name, option in options(role).items() if holds_secret(option)}


def used(names: frozenset[str], text: str) -> set[str]:
    """Return those of the names whose value a text uses: in an expression or a statement, not in a mere condition."""
    jinja = " ".join(re.findall(r"\{\{.*?\}\}|\{%(?!-?\s*(?:if|elif)\b).*?%\}", text, re.DOTALL))
    return {name for name in names if re.search(rf"\b{re.escape(name)}\b", jinja)}


def templates_of(role: Path, task: dict[str, Any]) -> list[Path]:
    """Return the files that a template task can render; its source may be an expression."""
    source = (task.get("ansible.builtin.template") or {}).get("src", "")
    return list((role / "templates").glob(re.sub(r"\{\{.*?\}\}", "*", source))) if source else []


def flatten(tasks: list[dict[str, Any]], inherited: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield blocks and the tasks in them, each with the keywords that it inherits from its blocks."""
    for task in tasks:
        own = {**inherited, **{key: value for key, value in task.items() if key not in BLOCK_PARTS}}
        yield own
        passed_on = {key: own[key] for key in ("no_log", "diff") if key in own}
        for part in BLOCK_PARTS:
            yield from flatten(task.get(part) or [], passed_on)


def tasks_of(file: Path) -> list[dict[str, Any]]:
    """Return all tasks of a file, those in blocks too."""
    return list(flatten(load(file) or [], {}))


def task_files(role: Path) -> list[Path]:
    """Return the files of a role that hold tasks or handlers."""
    return sorted(path for folder in ("tasks", "handlers") for path in (role / folder).rglob("*.yml"))


def described(role: Path, file: Path, task: dict[str, Any]) -> str:
    """Name a task in a message."""
    return f"{file.relative_to(role.parent)}: {task.get('name', 'a task without a name')}"


def states_of(role: Path, file_name: str) -> set[str]:
    """Return the states that the files of one step, also those of a backend, ask of operation_state."""
    return {
        task[name]["state"]
        for file in (role / "tasks").rglob(file_name)
        for task in tasks_of(file)
        for name in OPERATION_STATES
        if name in task
    }


def test_the_five_task_files_are_there(role: Path) -> None:
    missing = [name for name in TASK_FILES if not (role / "tasks" / name).is_file()]
    assert not missing, f"role {role.name}: expected tasks/{', '.join(missing)}"


def test_main_begins_with_what_the_role_does_to_a_machine(role: Path) -> None:
    lines = (role / "tasks" / "main.yml").read_text(encoding="utf-8").splitlines()
    body = lines[1:] if lines[0] == "---" else lines
    comment = []
    for line in body:
        if not line.startswith("#"):
            break
        comment.append(line.lstrip("# "))
    words = " ".join(comment).split()
    assert len(words) >= 10, (
        f"role {role.name}: expected tasks/main.yml to begin with a comment that tells, found {words}"
    )


def test_main_strings_measure_apply_and_verify_together(role: Path) -> None:
    steps = {
        str(task["ansible.builtin.import_tasks"]): task.get("tags")
        for task in load(role / "tasks" / "main.yml")
        if "ansible.builtin.import_tasks" in task
    }
    steps = {name: tags for name, tags in steps.items() if name in TASK_FILES}
    assert list(steps.items()) == [
        ("measure.yml", ["measure", "apply", "verify"]),
        ("apply.yml", ["apply"]),
        ("verify.yml", ["apply", "verify"]),
    ]


def test_apply_records_the_state_before_it_and_rollback_restores_it(role: Path) -> None:
    assert "recorded" in states_of(role, "apply.yml"), f"role {role.name}: expected apply.yml to record the state"
    assert "restored" in states_of(role, "rollback.yml"), (
        f"role {role.name}: expected rollback.yml to restore the state"
    )


def test_every_variable_starts_with_the_name_of_its_role(role: Path) -> None:
    files = [role / "defaults" / "main.yml", *sorted((role / "vars").glob("*.yml"))]
    names = [name for file in files for name in load(file) or {}] + list(options(role))
    strangers = sorted({name for name in names if not name.startswith(f"{role.name}_")})
    assert not strangers, f"role {role.name}: expected names that start with {role.name}_, found {', '.join(strangers)}"


def test_defaults_and_argument_specification_say_the_same(role: Path) -> None:
    defaults = load(role / "defaults" / "main.yml") or {}
    specified = options(role)
    # What is required, or optional without a default, has no place in the defaults.
    with_default = {name: option["default"] for name, option in specified.items() if "default" in option}
    assert sorted(defaults) == sorted(with_default), (
        f"role {role.name}: defaults and specification name other variables"
    )
    different = {
        name: (defaults[name], with_default[name]) for name in defaults if defaults[name] != with_default[name]
    }
    assert not different, f"role {role.name}: (defaults/main.yml, meta/argument_specs.yml) differ"


def test_every_option_has_a_type_and_a_meaning(role: Path) -> None:
    lacking = [
        f"{name}: {key}"
        for name, option in options(role).items()
        for key in ("type", "description")
        if not option.get(key)
    ]
    assert not lacking, f"role {role.name}: expected for every option a type and a description"


def test_every_task_has_a_name(role: Path) -> None:
    nameless = [
        f"{file.relative_to(role.parent)}: {sorted(task)}"
        for file in task_files(role)
        for task in tasks_of(file)
        if not task.get("name")
    ]
    assert not nameless, "expected a name that says what is true after the task"


def test_no_error_is_ignored(role: Path) -> None:
    careless = [
        described(role, file, task) for file in task_files(role) for task in tasks_of(file) if "ignore_errors" in task
    ]
    assert not careless, "expected failed_when with the condition that is a failure"


def test_no_request_goes_through_a_proxy(role: Path) -> None:
    through = [
        described(role, file, task)
        for file in task_files(role)
        for task in tasks_of(file)
        if "ansible.builtin.uri" in task and task["ansible.builtin.uri"].get("use_proxy") is not False
    ]
    assert not through, "expected use_proxy: false, as the roles ask the site's own services"


def test_a_task_that_uses_a_secret_is_not_logged(role: Path) -> None:
    names = secrets(role)
    logged = [
        f"{described(role, file, task)} ({', '.join(sorted(found))})"
        for file in task_files(role)
        for task in tasks_of(file)
        if (found := used(names, yaml.safe_dump(task))) and not task.get("no_log")
    ]
    assert not logged, "expected no_log: true"


def test_a_template_that_holds_a_secret_shows_no_difference(role: Path) -> None:
    names = secrets(role)
    shown = [
        described(role, file, task)
        for file in task_files(role)
        for task in tasks_of(file)
        if any(used(names, template.read_text(encoding="utf-8")) for template in templates_of(role, task))
        if not task.get("no_log") or task.get("diff", True) is True
    ]
    assert not shown, "expected no_log: true and diff: false"


def test_a_default_that_takes_a_secret_is_one(role: Path) -> None:
    names = secrets(role)
    defaults = load(role / "defaults" / "main.yml") or {}
    unmarked = [name for name, value in defaults.items() if name not in names and used(names, yaml.safe_dump(value))]
    assert not unmarked, f"role {role.name}: expected no_log: true in meta/argument_specs.yml"
