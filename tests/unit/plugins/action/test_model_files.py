# SPDX-License-Identifier: GPL-3.0-or-later
"""Models brought by real runs of ansible-playbook, and how what lies on the controller is put into parts."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from ansible_collections.ringmaster.inference.plugins.action import model_files
from ansible_collections.ringmaster.inference.plugins.module_utils.model_manifest import of_directory

PLAY = """
- hosts: all
  gather_facts: false
  tasks:
    - ringmaster.inference.model_files:
        name: qwen2
        root: {root}
        owner: "{{{{ lookup('ansible.builtin.pipe', 'id -un') }}}}"
        group: "{{{{ lookup('ansible.builtin.pipe', 'id -gn') }}}}"
        reserve_bytes: 0
        manifest: "{{{{ lookup('ansible.builtin.file', '{manifest}') }}}}"
        source: {source}
      register: result
    - ansible.builtin.debug:
        msg: >-
          changed {{{{ result.changed }}}} complete {{{{ result.complete }}}}
          needed {{{{ result.needed_bytes | default(0) }}}}
"""


@pytest.fixture
def model(tmp_path: Path) -> Path:
    directory = tmp_path / "source"
    (directory / "sub").mkdir(parents=True)
    (directory / "config.json").write_text("{}")
    (directory / "empty").write_text("")
    (directory / "sub" / "odd name's.safetensors").write_bytes(os.urandom(50_000))
    return directory


@pytest.fixture
def play(controller: Any, model: Path) -> Any:
    def run(source: str, *arguments: str, manifest: str = "") -> str:
        controller.write("inventory.yml", "all: {hosts: {gpu1: {ansible_connection: local}}}")
        controller.write("manifest", manifest or of_directory(str(model)).text())
        playbook = controller.write(
            "play.yml",
            PLAY.format(root=controller.root / "models", manifest=controller.root / "manifest", source=source),
        )
        done = controller.play(playbook, *arguments)
        return str(done.stdout)

    return run


def served(controller: Any) -> dict[str, bytes]:
    directory = controller.root / "models" / "qwen2" / "current"
    return {str(path.relative_to(directory)): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


def content(model: Path) -> dict[str, bytes]:
    return {str(path.relative_to(model)): path.read_bytes() for path in model.rglob("*") if path.is_file()}


def test_from_the_controller(play: Any, controller: Any, model: Path) -> None:
    source = f"{{kind: controller, path: {model}}}"
    output = play(source, "--check", "--diff")
    assert "changed True complete False needed 50002" in output
    assert '"to_fetch_bytes": 50002' in output
    assert not (controller.root / "models").exists()
    # Lines of sha256sum have no sizes: the files on the controller tell them.
    sums = "".join(f"{file.sha256}  {file.path}\n" for file in of_directory(str(model)).files)
    output = play(source, "--diff", manifest=sums)
    assert "changed True complete True needed 50002" in output
    assert "[gpu1] qwen2: 0 bytes of 48.8 KiB" in output
    assert served(controller) == content(model)
    assert "changed False complete True" in play(source)

    (model / "config.json").write_text("[1]")
    manifest = of_directory(str(model)).text()
    (model / "config.json").write_text("[2]")
    output = play(source, manifest=manifest)
    assert "config.json of qwen2 with SHA-256" in output
    assert "from the controller" in output
    assert served(controller)["config.json"] == b"{}"


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("{{kind: controller, path: {model}/gone}}", "To do: "),
        ("{{kind: controller}}", "path"),
        ("text", "dict"),
        ("{{kind: controller, path: {model}/links}}", "link"),
    ],
)
def test_sources_that_are_none(play: Any, controller: Any, model: Path, source: str, says: str) -> None:
    manifest = of_directory(str(model)).text()
    (model / "links").mkdir()
    (model / "links" / "config.json").symlink_to("/etc/hostname")
    output = play(source.format(model=model), manifest=manifest)
    assert "failed=1" in output
    assert "Traceback" not in output
    assert says in output


def test_parts_are_filled_with_whole_and_broken_files() -> None:
    files = [{"file": name, "offset": offset} for name, offset in (("a", 10), ("b", 0), ("c", 0))]

    class Sized:
        class _File:
            def __init__(self, path: str, size: int) -> None:
                self.path, self.size = path, size

        files = (_File("a", 20), _File("b", 0), _File("c", model_files.PART_BYTES))

    spans = model_files.ActionModule._next_spans(Sized, files)
    assert [vars(span) for span in spans] == [
        {"file": "a", "offset": 10, "length": 10},
        {"file": "b", "offset": 0, "length": 0},
        {"file": "c", "offset": 0, "length": model_files.PART_BYTES - 10},
    ]
