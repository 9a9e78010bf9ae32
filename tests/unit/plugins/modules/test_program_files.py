# SPDX-License-Identifier: GPL-3.0-or-later
"""The module on a host, and the task that reads the sources for it on the controller."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ansible_collections.ringmaster.inference.plugins.modules import program_files
from tests.support.controller import CHECKOUT, Controller

Run = Callable[..., dict[str, Any]]
SHARED = "ansible_collections/ringmaster/inference/plugins/module_utils"


def test_dry_run_run_and_second_run(module_run: Run, tmp_path: Path) -> None:
    folder = tmp_path / "program"
    arguments = {"path": str(folder), "packages": ["a"], "files": {"a/b.py": "text\n"}}
    would = module_run(program_files.main, _ansible_check_mode=True, _ansible_diff=True, **arguments)
    assert (would["changed"], would["written"], would["removed"]) == (True, ["a/b.py"], [])
    assert [(entry["before"], entry["after"]) for entry in would["diff"]] == [("", "text\n")]
    assert not folder.exists()
    done = module_run(program_files.main, **arguments)
    assert (done["changed"], done["written"], "diff" in done) == (True, ["a/b.py"], False)
    again = module_run(program_files.main, _ansible_diff=True, **arguments)
    assert (again["changed"], again["written"], again["diff"]) == (False, [], [])

    (folder / "a" / "former.py").write_text("old\n")
    would = module_run(program_files.main, _ansible_check_mode=True, _ansible_diff=True, **arguments)
    assert (would["changed"], would["removed"]) == (True, ["a/former.py"])
    assert [(entry["before"], entry["after"]) for entry in would["diff"]] == [("old\n", "")]
    assert module_run(program_files.main, **arguments)["removed"] == ["a/former.py"]
    assert not (folder / "a" / "former.py").exists()


def test_a_result_does_not_carry_the_program_back(module_run: Run, tmp_path: Path) -> None:
    arguments = {"path": str(tmp_path / "program"), "packages": ["a"], "files": {"a/b.py": "the text of it\n"}}
    assert "the text of it" not in json.dumps(module_run(program_files.main, **arguments))
    (tmp_path / "program").rename(tmp_path / "former")
    (tmp_path / "program").write_text("")
    refused = module_run(program_files.main, **arguments)
    assert refused["msg"].startswith(f"Expected the folder {tmp_path}/program, or nothing of that name.")
    assert "the text of it" not in json.dumps(refused)


def test_a_disk_that_takes_nothing_is_said(module_run: Run) -> None:
    refused = module_run(program_files.main, path="/proc/program", packages=["a"], files={"a/b.py": ""})
    assert refused["msg"].startswith("Expected a folder for the program at /proc/program that can be written. Found:")


PLAYBOOK = """
- hosts: localhost
  connection: local
  gather_facts: false
  roles: [ringmaster.inference.example]
"""
TASK = """
- name: The program is in place
  ringmaster.inference.program_files:
    path: {folder}
    packages: {packages}
  register: done
- ansible.builtin.copy:
    content: "{{{{ done }}}}"
    dest: {result}
"""


def play(controller: Controller, packages: Any, *arguments: str) -> tuple[str, dict[str, Any]]:
    task = TASK.format(
        folder=controller.root / "host", packages=json.dumps(packages), result=controller.root / "result.json"
    )
    controller.role("example", task)
    controller.write("inventory.yml", "all: {hosts: {localhost: {ansible_connection: local}}}\n")
    finished = controller.play(controller.write("play.yml", PLAYBOOK), *arguments)
    result = controller.root / "result.json"
    return finished.stdout, json.loads(result.read_text()) if result.exists() else {}


def source(controller: Controller, name: str, text: str) -> None:
    controller.write(f"ansible_collections/ringmaster/inference/roles/example/files/{name}", text)


def test_sources_of_the_role_and_what_they_import(controller: Controller) -> None:
    source(controller, "example/__main__.py", f"from {SHARED.replace('/', '.')} import findings, xid\n")
    source(controller, "example/other.py", f"import {SHARED.replace('/', '.')}.durable\nfrom . import __main__\n")
    source(controller, "example/data.json", "{}")
    source(controller, "example/.hidden", "")
    source(controller, "example/__pycache__/other.cpython-313.pyc", "")
    output, result = play(controller, ["example"])
    assert result["changed"], output
    names = set(result["written"])
    assert {"example/__main__.py", "example/other.py", "example/data.json"} <= names
    assert not any(".hidden" in name or "pycache" in name for name in names)
    shared = {name.rpartition("/")[2] for name in names if name.startswith(f"{SHARED}/")}
    # xid imports xid_table and others; the packages above have what makes them packages.
    assert {"findings.py", "xid.py", "xid_table.py", "durable.py", "__init__.py"} <= shared
    assert f"{SHARED.split('/', maxsplit=1)[0]}/__init__.py" in names
    assert (controller.root / "host" / SHARED / "xid.py").read_text() == (
        CHECKOUT / "plugins/module_utils/xid.py"
    ).read_text()
    assert not play(controller, ["example"])[1]["changed"]


@pytest.mark.parametrize(
    ("packages", "said"),
    [
        (["missing"], "Expected the package missing on the controller"),
        (["empty"], "Expected a folder with files at"),
        (["example/__main__.py"], "Expected a folder with files at"),
        (["broken"], "Expected Python in broken/x.py"),
        (["foreign"], f"Expected the collection to have {SHARED}/no_such_thing.py"),
        (["latin"], "as UTF-8"),
        ([], "Expected packages"),
    ],
)
def test_sources_that_are_none(controller: Controller, packages: list[str], said: str) -> None:
    source(controller, "example/__main__.py", "")
    source(controller, "empty/.hidden", "")
    source(controller, "broken/x.py", "def\n")
    source(controller, "foreign/x.py", f"from {SHARED.replace('/', '.')} import no_such_thing\n")
    source(controller, "latin/x.py", "")
    folder = controller.collection / "roles/example/files/latin/x.py"
    folder.write_bytes(b"# \xe4\n")
    output, result = play(controller, packages)
    assert said in " ".join(output.split())
    assert not result
    assert not (controller.root / "host").exists()


@pytest.mark.parametrize("role", ["agent", "scheduler"])
def test_programs_come_whole(controller: Controller, role: str) -> None:
    """Each program of the collection, in a folder of its own, finds all that it imports there."""
    package = f"ringmaster_{role}"
    files = controller.collection / "roles/example/files"
    files.parent.mkdir(parents=True)
    files.symlink_to(CHECKOUT / "roles" / role / "files")
    output, _result = play(controller, [package])
    assert "failed=0" in output, output
    present = {path.name for path in (controller.root / "host" / package).glob("*.py")}
    assert present == {path.name for path in (CHECKOUT / "roles" / role / "files" / package).glob("*.py")}
    assert (controller.root / "host" / SHARED / "service_manager.py").is_file()
