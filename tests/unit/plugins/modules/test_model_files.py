# SPDX-License-Identifier: GPL-3.0-or-later
"""The modules around manifests and versions: states, check mode, diffs, secrets, and what they refuse."""

from __future__ import annotations

import grp
import json
import os
import pwd
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ansible_collections.ringmaster.inference.plugins.module_utils.model_manifest import of_directory
from ansible_collections.ringmaster.inference.plugins.modules import model_files, model_manifest
from tests.support.model_mirror import Mirror

Run = Callable[..., dict[str, Any]]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    directory = tmp_path / "source"
    directory.mkdir()
    (directory / "config.json").write_text("{}")
    (directory / "model.safetensors").write_bytes(os.urandom(5000))
    return directory


@pytest.fixture
def call(module_run: Run, tmp_path: Path, model: Path) -> Run:
    def run(**arguments: Any) -> dict[str, Any]:
        given = {
            "name": "qwen2",
            "root": str(tmp_path / "models"),
            "owner": pwd.getpwuid(os.getuid()).pw_name,
            "group": grp.getgrgid(os.getgid()).gr_name,
            "reserve_bytes": 0,
            **arguments,
        }
        if given.get("state", "present") == "present":
            given.setdefault("manifest", of_directory(str(model)).text())
            given.setdefault("source", {"kind": "directory", "path": str(model)})
        return module_run(model_files.main, **given)

    return run


def test_life_of_a_model(call: Run, model: Path, tmp_path: Path) -> None:
    would = call(_ansible_check_mode=True, _ansible_diff=True)
    assert would["changed"]
    assert not would["complete"]
    assert would["needed_bytes"] == 5002
    assert would["diff"]["before"] == {}
    assert would["diff"]["after"] == {"version": would["identity"], "previous": None, "to_fetch_bytes": 5002}
    assert not (tmp_path / "models").exists()

    first = call(_ansible_diff=True)
    assert first["changed"]
    assert first["complete"]
    assert first["version"] == first["identity"] == would["identity"]
    assert first["diff"]["after"] == {"version": first["version"], "previous": None}
    assert Path(first["path"], "config.json").read_text() == "{}"
    for arguments in ({}, {"verify": "full"}, {"_ansible_check_mode": True}):
        again = call(**arguments)
        assert not again["changed"]
        assert again["complete"]

    (model / "config.json").write_text("[]")
    assert call(_ansible_check_mode=True)["changed"]
    second = call()
    assert (second["version"], second["previous"]) == (second["identity"], first["version"])
    assert second["needed_bytes"] == 2

    would = call(state="previous", _ansible_check_mode=True)
    assert (would["changed"], would["version"], would["previous"]) == (True, first["version"], second["version"])
    back = call(state="previous")
    assert (back["changed"], back["version"], back["previous"]) == (True, first["version"], second["version"])

    # Forward again: nothing is fetched.
    forward = call(source={"kind": "directory", "path": "/nowhere"}, _ansible_diff=True)
    assert forward["changed"]
    assert forward["version"] == second["version"]

    read = call(state="read")
    assert (read["changed"], read["version"], read["files"], read["bytes"]) == (False, second["version"], 2, 5002)
    assert call(state="absent", _ansible_check_mode=True)["changed"]
    assert call(state="absent")["changed"]
    assert not call(state="absent")["changed"]
    assert call(state="read")["version"] is None


def test_reading_with_a_manifest_tells_what_is_wrong(call: Run, model: Path) -> None:
    manifest = of_directory(str(model)).text()
    assert not call(state="read", manifest=manifest)["complete"]
    path = call()["path"]
    assert call(state="read", manifest=manifest) | {"invocation": None} == call(state="read", manifest=manifest) | {
        "invocation": None
    }
    found = os.stat(f"{path}/model.safetensors")
    Path(path, "model.safetensors").write_bytes(b"\0" * 5000)
    os.utime(f"{path}/model.safetensors", ns=(found.st_atime_ns, found.st_mtime_ns))
    assert call(state="read", manifest=manifest)["complete"]
    full = call(state="read", manifest=manifest, verify="full")
    assert not full["complete"]
    assert full["differences"][0].startswith("model.safetensors: SHA-256 ")
    would = call(verify="full", _ansible_check_mode=True)
    assert would["changed"]
    mended = call(verify="full")
    assert mended["changed"]
    assert mended["differences"] == full["differences"]
    assert mended["version"] == f"{mended['identity']}-2"
    assert call(state="read", manifest=manifest, verify="full")["complete"]


def test_modes_are_mended(call: Run) -> None:
    path = call()["path"]
    os.chmod(f"{path}/config.json", 0o644)
    assert call(_ansible_check_mode=True)["changed"]
    mended = call()
    assert mended["changed"]
    assert mended["differences"] == [f"config.json: owner {os.getuid()}, group {os.getgid()}, mode 0644"]
    assert not call()["changed"]


def test_time_limit_gives_an_unfinished_answer(call: Run, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_files.Store, "fetch", lambda *_arguments: False)
    unfinished = call()
    assert unfinished["changed"]
    assert not unfinished["complete"]
    assert unfinished["needed_bytes"] == 5002
    assert unfinished["version"] is None


def test_from_the_controller_it_says_what_it_wants(call: Run, model: Path) -> None:
    result = call(source={"kind": "controller", "path": str(model)})
    assert result["wanted"] == [{"file": "config.json", "offset": 0}, {"file": "model.safetensors", "offset": 0}]
    assert not result["complete"]


@pytest.mark.parametrize(
    "span",
    [("gone", 0, 1), ("config.json", 0, 3), ("config.json", -1, 1), ("config.json", 0, -1), ("config.json", 2, 1)],
)
def test_parts_of_nothing_are_refused(call: Run, model: Path, tmp_path: Path, span: tuple[str, int, int]) -> None:
    (tmp_path / "part").write_bytes(b"x")
    spans = [dict(zip(("file", "offset", "length"), span))]
    result = call(
        source={"kind": "controller", "path": str(model)},
        part={"path": str(tmp_path / "part"), "sha256": "0" * 64, "spans": spans},
    )
    assert "parts of files whose sizes" in result["msg"]


@pytest.mark.parametrize("kind", ["http", "hub"])
def test_from_a_mirror_and_no_secret_is_told(
    call: Run, model: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("http_proxy", raising=False)
    with Mirror(model) as mirror:
        mirror.behaviour.token = "token-of-the-hub"
        source = {"kind": kind, "url": mirror.url, "repository": "owner/name", "token": "wrong-token-of-the-hub"}
        refused = call(source=source)
        assert "status 401" in refused["msg"]
        result = call(source={**source, "token": "token-of-the-hub"})
    assert result["complete"]
    for answer in (refused, result):
        assert "token-of-the-hub" not in json.dumps(answer)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"manifest": None}, "manifest"),
        ({"source": None}, "source"),
        ({"source": {"kind": "http"}}, "url"),
        ({"source": {"kind": "hub", "url": "https://hub"}}, "repository"),
        ({"source": {"kind": "directory"}}, "path"),
        ({"source": {"kind": "directory", "path": "/nowhere"}}, "directory on the host"),
        ({"source": {"kind": "ftp"}}, "value of kind must be one of"),
        ({"manifest": "x"}, "Expected a manifest"),
        ({"manifest": f"{'0' * 64}  ../../etc/passwd"}, "'.' or '..'"),
        ({"manifest": f"{'0' * 64}  model.bin"}, "a pickle is a program"),
        ({"name": "../x"}, "name of letters"),
        ({"keep": -1}, "Expected keep of 0 or more"),
        ({"reserve_bytes": 1 << 60}, "free on the file system"),
        ({"group": "no-such-group-here"}, "Expected group 'no-such-group-here'"),
        ({"owner": "no-such-user-here"}, "Expected owner 'no-such-user-here'"),
        ({"state": "previous"}, "in service before"),
        ({"root": "/dev/null/models"}, "Expected "),
    ],
)
def test_what_is_refused_says_why(call: Run, arguments: dict[str, Any], says: str) -> None:
    result = call(**arguments)
    assert result["failed"]
    assert says in result["msg"]


def test_in_check_mode_owner_and_group_may_come_later(call: Run) -> None:
    assert call(group="no-such-group-here", _ansible_check_mode=True)["changed"]
    assert call(state="read", group="no-such-group-here")["version"] is None


def test_manifest_is_made_and_made_again(module_run: Run, model: Path, tmp_path: Path) -> None:
    arguments = {"directory": str(model), "manifest": str(tmp_path / "model.json")}
    would = module_run(model_manifest.main, _ansible_check_mode=True, **arguments)
    assert would["changed"]
    assert not (tmp_path / "model.json").exists()
    made = module_run(model_manifest.main, _ansible_diff=True, **arguments)
    assert (made["changed"], made["files"], made["bytes"]) == (True, 2, 5002)
    assert made["diff"]["before"] == ""
    assert (tmp_path / "model.json").read_text() == of_directory(str(model)).text() == made["diff"]["after"]
    assert not module_run(model_manifest.main, **arguments)["changed"]
    (tmp_path / "model.json").write_bytes(b"\xff\0")
    assert module_run(model_manifest.main, **arguments)["changed"]


def test_manifest_that_cannot_be_made_says_why(module_run: Run, model: Path, tmp_path: Path) -> None:
    gone = module_run(model_manifest.main, directory=str(tmp_path / "gone"), manifest=str(tmp_path / "x"))
    assert "To do: give the directory" in gone["msg"]
    nowhere = module_run(model_manifest.main, directory=str(model), manifest=str(tmp_path / "gone" / "x"))
    assert "Expected to write" in nowhere["msg"]
    (model / "model.bin").write_text("")
    pickle = module_run(model_manifest.main, directory=str(model), manifest=str(tmp_path / "x"))
    assert "a pickle is a program" in pickle["msg"]
    assert module_run(model_manifest.main, directory=str(model), manifest=str(tmp_path / "x"), pickles_allowed=True)[
        "changed"
    ]
