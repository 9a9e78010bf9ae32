# SPDX-License-Identifier: GPL-3.0-or-later
"""Manifests: both forms, what is refused, and what is made from a directory."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ansible_collections.ringmaster.inference.plugins.module_utils import model_manifest
from ansible_collections.ringmaster.inference.plugins.module_utils.model_manifest import (
    Manifest,
    ModelError,
    ModelFile,
    of_directory,
    open_file,
    parse,
    path_complaint,
)

ZEROES = "0" * 64
ONES = "1" * 64


def document(files: Any, schema: Any = 1) -> str:
    return json.dumps({"schema": schema, "files": files})


def refusal(text: str, **options: bool) -> str:
    with pytest.raises(ModelError) as raised:
        parse(text, **options)
    assert str(raised.value).startswith("Expected ")
    assert ". To do: " in str(raised.value)
    return str(raised.value)


def test_both_forms_are_one_version() -> None:
    sums = parse(f"{ONES}  b/model.safetensors\n{ZEROES} *config.json\n")
    assert sums.files == (ModelFile("b/model.safetensors", ONES, None), ModelFile("config.json", ZEROES, None))
    assert sums.size is None
    whole = parse(document({"config.json": {"sha256": ZEROES, "size": 3}, "b/model.safetensors": {"sha256": ONES}}))
    assert whole.identity == sums.identity
    assert parse(sums.text()) == sums
    assert parse(document({"a": {"sha256": ONES, "size": 3}, "b": {"sha256": ONES, "size": 4}})).size == 7


def test_every_change_is_another_version() -> None:
    texts = [
        f"{ONES}  a\n",
        f"{ZEROES}  a\n",
        f"{ONES}  b\n",
        f"{ONES}  a\n{ONES}  b\n",
        f"{ONES}  a\n{ONES}  c\n",
    ]
    assert len({parse(text).identity for text in texts}) == len(texts)


@pytest.mark.parametrize("options", [[], ["--tag"], ["--binary"]])
def test_what_sha256sum_writes_is_read(tmp_path: Path, options: list[str]) -> None:
    names = ["plain", "with space", "näme", "(odd) = name"]
    for name in names:
        (tmp_path / name).write_text(name)
    text = subprocess.run(
        ["sha256sum", *options, *names], cwd=tmp_path, check=True, capture_output=True, text=True
    ).stdout
    assert {file.path: file.sha256 for file in parse(text).files} == {
        name: hashlib.sha256(name.encode()).hexdigest() for name in names
    }


@pytest.mark.parametrize(
    "text",
    [
        f"# made by hand\n\n{ONES}  a\r\n{ZEROES.upper()}  ./b",  # no final newline, Windows line ends
        f"\N{ZERO WIDTH NO-BREAK SPACE}{ONES}  a\n{ZEROES}  b\n",
    ],
)
def test_forms_of_lines_that_do_no_harm(text: str) -> None:
    assert [file.path for file in parse(text).files] == ["a", "b"]


@pytest.mark.parametrize(
    "path",
    [
        "",
        "/etc/passwd",
        "../x",
        "a/../x",
        "a//b",
        "a/",
        "./a/.",
        "a/./b",
        "a\\b",
        "a\nb",
        "a\0b",
        "a\x1b[2J",
        "a\u202eb",
    ]
    + ["a\ud800", " a", "a ", "x/ a", "a" * 256, "/".join(["a" * 200] * 6), "é" * 128, "."],
)
def test_paths_that_lead_out_or_deceive_are_refused(path: str) -> None:
    assert path_complaint(path)
    assert "manifest" in refusal(document({path: {"sha256": ONES}}))


@given(st.text())
def test_a_path_without_complaint_stays_inside(path: str) -> None:
    if not path_complaint(path):
        assert os.path.normpath(os.path.join("/models/m", path)) == f"/models/m/{path}"
        assert path.isprintable()


def test_escaped_names_are_what_they_stand_for_and_then_refused() -> None:
    assert "backslash" in refusal(f"\\{ONES}  a\\\\b\n")
    assert "cannot be seen" in refusal(f"\\{ONES}  a\\nb\n")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "no file at all"),
        ("# only words\n", "no file at all"),
        ("\0\x7fELF\n", "line 1"),
        (f"{ONES[:-1]}  short\n", "line 1"),
        (f"{ONES} one space\n", "line 1"),
        ("d41d8cd98f00b204e9800998ecf8427e  md5\n", "line 1"),
        (f"{ONES}  a\n{ONES}  a\n", "'a' twice"),
        (f"{ONES}  a\n{ONES}  a/b\n", "as a file and as the folder"),
        ("{", "no JSON"),
        ("[]", "line 1"),
        ("{}", "schema"),
        (document({}, schema=2), "schema"),
        (document([]), "schema"),
        (document({}), "no file at all"),
        (document({"a": None}), "for 'a'"),
        (document({"a": {}}), "sha256 None"),
        (document({"a": {"sha256": ONES[1:]}}), "sha256"),
        (document({"a": {"sha256": ONES, "size": -1}}), "size -1"),
        (document({"a": {"sha256": ONES, "size": True}}), "size True"),
        (document({"a": {"sha256": ONES, "size": 1.5}}), "size 1.5"),
        (document({"a": {"sha256": ONES, "size": 1 << 60}}), "size"),
        (f'{{"schema": 1, "files": {{"a": {{"sha256": "{ONES}"}}, "a": {{"sha256": "{ZEROES}"}}}}}}', "one key twice"),
        ("[" * 100_000, "line 1"),
        ('{"a":' * 100_000, "no JSON"),
    ],
)
def test_what_is_no_manifest_is_refused(text: str, says: str) -> None:
    assert says in refusal(text)


def test_too_much_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_manifest, "MOST_FILES", 2)
    assert "more than 2 files" in refusal(document({name: {"sha256": ONES} for name in "abc"}))
    monkeypatch.setattr(model_manifest, "LARGEST_MANIFEST", 10)
    assert "characters" in refusal(f"{ONES}  a\n")


@given(st.text() | st.binary().map(lambda data: data.decode("latin-1")))
def test_any_text_is_read_or_refused(text: str) -> None:
    with contextlib.suppress(ModelError):
        assert isinstance(parse(text), Manifest)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "sub/model.PT", "x.pkl", "training_args.bin", "m.ckpt"])
def test_pickles_are_refused_with_the_reason_unless_allowed(name: str) -> None:
    text = f"{ONES}  config.json\n{ONES}  {name}\n"
    said = refusal(text)
    assert name in said
    assert "a pickle is a program" in said
    assert "safetensors" in said
    assert len(parse(text, pickles_allowed=True).files) == 2


def test_many_pickles_are_counted() -> None:
    assert "and 2 more" in refusal("".join(f"{ONES}  {number}.bin\n" for number in range(7)))


@pytest.fixture
def model(tmp_path: Path) -> Path:
    directory = tmp_path / "model"
    (directory / "sub").mkdir(parents=True)
    (directory / "config.json").write_text("{}")
    (directory / "sub" / "weights 1.safetensors").write_bytes(b"\0" * 5_000_000)
    (directory / ".gitattributes").write_text("*.safetensors filter=lfs\n")
    (directory / ".cache").mkdir()
    (directory / ".cache" / "lock").write_text("")
    return directory


def test_manifest_of_a_directory(model: Path) -> None:
    made = of_directory(str(model))
    assert [(file.path, file.size) for file in made.files] == [
        ("config.json", 2),
        ("sub/weights 1.safetensors", 5_000_000),
    ]
    for file in made.files:
        assert file.sha256 == hashlib.sha256((model / file.path).read_bytes()).hexdigest()
    assert parse(made.text()) == made


def made_refusal(directory: Path, **options: bool) -> str:
    with pytest.raises(ModelError) as raised:
        of_directory(str(directory), **options)
    return str(raised.value)


def test_links_are_refused_or_followed(model: Path) -> None:
    (model / "link.json").symlink_to(model / "config.json")
    assert "link.json" in made_refusal(model)
    followed = of_directory(str(model), follow_links=True)
    assert {file.path for file in followed.files} >= {"link.json", "config.json"}
    (model / "link.json").unlink()
    (model / "loop").symlink_to(model)
    assert "loop" in made_refusal(model)
    # A directory behind a link is not walked through: it could be one above.
    assert "neither" in made_refusal(model, follow_links=True)


def test_what_is_no_model_is_refused(model: Path, tmp_path: Path) -> None:
    assert "No such file" in made_refusal(tmp_path / "nowhere")
    assert "Not a directory" in made_refusal(model / "config.json")
    (tmp_path / "empty").mkdir()
    assert "no file at all" in made_refusal(tmp_path / "empty")
    os.mkfifo(model / "pipe")
    assert "neither" in made_refusal(model)
    (model / "pipe").unlink()
    (model / "model.bin").write_text("")
    assert "a pickle is a program" in made_refusal(model)
    assert len(of_directory(str(model), pickles_allowed=True).files) == 3
    os.mkfifo(model / os.fsdecode(b"\xff"))
    assert "neither" in made_refusal(model)
    (model / os.fsdecode(b"\xff")).unlink()
    (model / os.fsdecode(b"\xff.json")).write_text("")
    assert "cannot be seen" in made_refusal(model)


def test_only_a_regular_file_below_the_directory_is_opened(model: Path) -> None:
    with open_file(str(model), "config.json") as file:
        assert file.read() == b"{}"
    (model / "to-sub").symlink_to("sub")
    (model / "to-file").symlink_to("/etc/hostname")
    os.mkfifo(model / "pipe")
    for path, says in [
        ("to-sub/weights 1.safetensors", "link"),
        ("to-file", "link"),
        ("pipe", "regular file"),
        ("sub", "regular file"),
        ("gone", "No such file"),
        ("config.json/inside", "link"),
    ]:
        with pytest.raises(ModelError, match=says):
            open_file(str(model), path)
    with open_file(str(model), "to-sub/weights 1.safetensors", follow_links=True) as file:
        assert len(file.read()) == 5_000_000
