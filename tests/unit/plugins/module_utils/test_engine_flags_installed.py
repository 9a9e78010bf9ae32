# SPDX-License-Identifier: GPL-3.0-or-later
"""Asking an installed engine: a small one in an environment of its own, with a parser like vLLM's."""

from __future__ import annotations

import json
import os
import stat
import sys
import sysconfig
import textwrap
import venv
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from ansible_collections.ringmaster.inference.plugins.module_utils.commands import Answer, CommandRunner
from ansible_collections.ringmaster.inference.plugins.module_utils.engine_flags_installed import (
    InstalledEngine,
    InstalledError,
    python_of,
)

ENGINE = """
import argparse
import dataclasses
import json
import sys

from vllm.config import Cache, Level


def optional(convert):
    def converted(text):
        return None if text in ("", "None") else convert(text)

    return converted


def parse_json(text):
    try:
        return json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError("no JSON") from error


def parse_cache(text, configuration=Cache):
    try:
        return configuration(**json.loads(text))
    except (TypeError, ValueError) as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def size(text):
    return int(text[:-1]) * 1000 if text.endswith("k") else int(text)


class Parser(argparse.ArgumentParser):
    def parse_args(self, args=None, namespace=None):
        words = sys.argv[1:] if args is None else args
        words = [word.replace("_", "-") if word.startswith("--") else word for word in words]
        return super().parse_args(words, namespace)


def main():
    print("the engine prints what it likes")
    argparse.ArgumentParser(prog="something else").parse_known_args([])
    parser = Parser(prog="vllm")
    serve = parser.add_subparsers(dest="command").add_parser("serve")
    serve.add_argument("model_tag", nargs="?")
    cache = serve.add_argument_group("Cache")
    cache.add_argument("--tensor-parallel-size", "-tp", type=int, default=1)
    cache.add_argument("--utilization", type=float)
    cache.add_argument("--level")
    serve.add_argument("--enforce-eager", action=argparse.BooleanOptionalAction)
    serve.add_argument("--headless", action="store_true")
    serve.add_argument("--length", type=optional(size))
    serve.add_argument("--dtype", type=optional(str), choices=["auto", "half", None])
    serve.add_argument("--rank", type=int, choices=[8, 16])
    serve.add_argument("--parser", metavar="{hermes,qwen} or one of a plugin")
    serve.add_argument("--origins", type=parse_json)
    serve.add_argument("--middleware", action="append")
    serve.add_argument("--keys", nargs="+")
    serve.add_argument("--devices", type=lambda text: [int(x) if x.isdigit() else x for x in text.split(",")])
    serve.add_argument("--cache-config", type=parse_cache)
    serve.add_argument("--odd", type=lambda text: 1 / 0 if text == "{}" else 3)
    parser.parse_args()
    raise AssertionError("the engine would start")
"""

CONFIG = """
import dataclasses
import enum
import types
import typing


class Level(enum.IntEnum):
    LOW = 0
    HIGH = 1


class Ge:
    ge = 1


class Within:
    gt = 0
    le = 1


@dataclasses.dataclass
class Cache:
    tensor_parallel_size: int = 1
    utilization: float = 0.9
    level: Level = Level.LOW
    kind: typing.Literal["a", "b"] = "a"
    clear: typing.Any = 1

    def __post_init__(self):
        if not isinstance(self.clear, int):
            raise ValueError("not clear")


Cache.__pydantic_config__ = {"extra": "forbid"}
Cache.__pydantic_fields__ = {
    "tensor_parallel_size": types.SimpleNamespace(metadata=[Ge()]),
    "utilization": types.SimpleNamespace(metadata=[Within()]),
}
"""


@pytest.fixture(scope="module")
def installation(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("engine") / "venv"
    venv.create(root, with_pip=False, symlinks=True)
    packages = root / Path(sysconfig.get_path("purelib", vars={"base": "", "platbase": ""}).lstrip("/"))
    package, information = packages / "vllm", packages / "vllm-9.9.0.dist-info"
    package.mkdir()
    information.mkdir()
    (package / "__init__.py").write_text("", encoding="utf-8")
    (package / "config.py").write_text(CONFIG, encoding="utf-8")
    (package / "cli.py").write_text(ENGINE, encoding="utf-8")
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 9.9.0+here\n", encoding="utf-8")
    (information / "entry_points.txt").write_text("[console_scripts]\nvllm = vllm.cli:main\n", encoding="utf-8")
    program = root / "bin" / "vllm"
    program.write_text(f"#!{root}/bin/python\n", encoding="utf-8")
    program.chmod(0o755)
    return root


class Counting(CommandRunner):
    """Runs commands, and keeps what each was asked."""

    def __init__(self) -> None:
        self.asked: list[dict[str, Any]] = []

    def run(self, command: Sequence[str], timeout: float = 20.0) -> Answer:
        path = Path(command[-1])
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        self.asked.append(json.loads(path.read_text(encoding="utf-8")))
        answer = super().run(command, timeout)
        assert path.exists()
        return answer


def engine(installation: Path, cache: Path | None, runner: CommandRunner | None = None) -> InstalledEngine:
    kept = None if cache is None else str(cache)
    return InstalledEngine("vllm", str(installation / "bin" / "vllm"), runner or Counting(), {"A": "1"}, kept)


def test_what_the_parser_takes_is_found_by_behaviour(installation: Path) -> None:
    found = engine(installation, None).ask(["m", "--enforce-eager", "-tp", "2"])
    assert found.complaint is None
    assert not found.cached
    options = found.catalogue.options
    assert found.catalogue.version == "9.9.0+here"
    assert {flag: option.kind for flag, option in options.items() if not option.switch} == {
        "--tensor-parallel-size": "integer",
        "--utilization": "number",
        "--level": "text",
        "--length": "size",
        "--dtype": "text",
        "--rank": "integer",
        "--parser": "text",
        "--origins": "json",
        "--middleware": "text",
        "--keys": "text",
        "--devices": "comma_list",
        "--cache-config": "object",
        "--odd": "opaque",
    }
    assert found.catalogue.find("-tp") is options["--tensor-parallel-size"]
    assert options["--tensor-parallel-size"].limits == {"least": 1}
    assert options["--utilization"].limits == {"above": 0, "most": 1}
    assert options["--level"].allowed == ("0", "1")
    assert options["--enforce-eager"].negations == ("--no-enforce-eager",)
    assert options["--headless"].switch
    assert options["--help"].ends
    assert (options["--dtype"].choices, options["--dtype"].none) == (("auto", "half"), True)
    assert options["--length"].none
    assert options["--rank"].choices == (8, 16)
    assert options["--parser"].known == ("hermes", "qwen")
    assert options["--middleware"].repeatable
    assert options["--keys"].takes == "+"
    fields = options["--cache-config"].fields
    assert fields is not None
    assert fields["kind"] == [{"choices": ["a", "b"]}]
    assert fields["utilization"] == ["number", {"above": 0, "most": 1}]
    assert fields["clear"] == {"refuses": ["null", "number", "list", "object"]}


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["m", "--bogus"], "unrecognized arguments: --bogus"),
        (["m", "--rank", "9"], "argument --rank: invalid choice: 9"),
        (["--help"], "the parser ends the program"),
        (["m", "--odd", "{}"], "ZeroDivisionError"),
    ],
)
def test_the_parsers_own_complaint(installation: Path, words: list[str], complaint: str) -> None:
    assert (engine(installation, None).ask(words).complaint or "").startswith(complaint)


def test_an_answer_is_kept_until_something_is_installed(installation: Path, tmp_path: Path) -> None:
    cache, runner = tmp_path / "kept" / "here", Counting()
    first = engine(installation, cache, runner).ask(["m", "--keys", "s3cret"])
    second = engine(installation, cache, runner).ask(["m", "--keys", "s3cret"])
    assert (first.cached, second.cached) == (False, True)
    assert first.catalogue == second.catalogue
    assert [asked["catalogue"] for asked in runner.asked] == [False, True, False]
    (kept,) = cache.iterdir()
    assert kept.name == "vllm-9.9.0+here.json"
    assert "s3cret" not in kept.read_text(encoding="utf-8")

    other = engine(installation, cache, runner).ask(["m", "--bogus"])
    assert other.complaint
    assert not runner.asked[-1]["catalogue"]  # the options are known, only the words are not
    assert engine(installation, cache, runner).ask(["m", "--keys", "s3cret"]).cached

    plugin = next(installation.glob("lib*/python*/site-packages")) / "plugin-1.dist-info"
    plugin.mkdir()
    (plugin / "METADATA").write_text("Metadata-Version: 2.1\nName: plugin\nVersion: 1\n", encoding="utf-8")
    try:
        assert not engine(installation, cache, runner).ask(["m", "--keys", "s3cret"]).cached
    finally:
        (plugin / "METADATA").unlink()
        plugin.rmdir()


@pytest.mark.parametrize(
    "damage",
    [b"", b"{", b"\xff\xfe\x00", b"[]", b'{"schema": 1}', b'{"schema": 9}', b"[" * 100_000],
)
def test_a_damaged_cache_is_asked_again(installation: Path, tmp_path: Path, damage: bytes) -> None:
    engine(installation, tmp_path).ask(None)
    (kept,) = tmp_path.iterdir()
    kept.write_bytes(damage)
    assert not engine(installation, tmp_path).ask(None).cached
    assert engine(installation, tmp_path).ask(None).cached


def test_a_cache_that_holds_no_catalogue_is_asked_again(installation: Path, tmp_path: Path) -> None:
    engine(installation, tmp_path).ask(None)
    (kept,) = tmp_path.iterdir()
    document = json.loads(kept.read_text(encoding="utf-8"))
    kept.write_text(json.dumps({**document, "catalogue": {"--a": 3}}), encoding="utf-8")
    assert "--rank" in engine(installation, tmp_path).ask(None).catalogue.options


def test_nothing_is_written_where_nothing_may_be(installation: Path, tmp_path: Path) -> None:
    engine(installation, tmp_path / "kept").ask(None, keep=False)
    assert not (tmp_path / "kept").exists()
    (tmp_path / "file").write_text("", encoding="utf-8")
    assert engine(installation, tmp_path / "file" / "kept").ask(None).catalogue.options


class Saying(CommandRunner):
    """A runner whose commands say what a test says."""

    def __init__(self, answer: Answer) -> None:
        self.answer = answer

    def run(self, command: Sequence[str], timeout: float = 20.0) -> Answer:
        return self.answer


@pytest.mark.parametrize(
    ("answer", "found"),
    [
        (Answer(1, complaint="Traceback\nPackageNotFoundError: vllm"), "PackageNotFoundError: vllm (status 1)"),
        (Answer(None, complaint="no answer within 180 s: python -c TEXT"), "no answer within 180 s (status None)"),
        (Answer(-9, complaint="killed by signal 9"), "killed by signal 9"),
        (Answer(0, output=""), "JSONDecodeError"),
        (Answer(0, output="[]"), "TypeError"),
        (Answer(0, output='{"version": "1"}'), "KeyError"),
        (Answer(0, output="[" * 100_000), "RecursionError"),
        (Answer(0, output='{"version": "1", "identity": "x", "catalogue": 3}'), "something else"),
    ],
)
def test_an_engine_that_does_not_answer(installation: Path, answer: Answer, found: str) -> None:
    with pytest.raises(InstalledError) as refused:
        engine(installation, None, Saying(answer)).ask(None)
    assert found in str(refused.value)
    assert "To do: " in str(refused.value)


def test_the_python_of_a_program(installation: Path, tmp_path: Path) -> None:
    beside = str(installation / "bin")
    assert python_of(f"{beside}/vllm").startswith(beside)
    assert python_of(f"{beside}/python3") == f"{beside}/python3"
    program = tmp_path / "vllm"
    program.write_text(f"#!{sys.executable}\n", encoding="utf-8")
    program.chmod(0o755)
    assert os.path.samefile(python_of(str(program)), sys.executable)


@pytest.mark.parametrize("first", ["", "#!/bin/sh\n", "#!python\n", "\x7fELF\x00", "#!/no/such/python3\n"])
def test_a_program_without_a_python(tmp_path: Path, first: str) -> None:
    program = tmp_path / "vllm"
    program.write_text(textwrap.dedent(first), encoding="utf-8")
    program.chmod(0o755)
    with pytest.raises(InstalledError, match="name the Python"):
        python_of(str(program))
    with pytest.raises(InstalledError, match="install the engine"):
        python_of(str(tmp_path / "missing"))
