# SPDX-License-Identifier: GPL-3.0-or-later
"""What the check of a members file takes and refuses; whatever it takes, the scheduler can read."""

from __future__ import annotations

import copy
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import check_members
from ringmaster_scheduler import members as scheduler_members

CHECK = Path(check_members.__file__)
ENGINE = {
    "name": "gpu-a1.main",
    "host": "gpu-a1",
    "address": "192.0.2.13",
    "port": 8100,
    "kind": "standin",
    "model": "qwen2-7b-instruct",
    "adapters": ["sql"],
    "card": "a100-80g",
    "max_num_seqs": 256,
    "max_model_len": 32768,
}
OTHER_ENGINE = {**ENGINE, "name": "gpu-b1.main", "host": "gpu-b1", "address": "192.0.2.15", "card": "l40s"}
DOCUMENT: dict[str, Any] = {
    "schema": 1,
    "engines": [ENGINE, OTHER_ENGINE],
    "gateways": [{"name": "gw1", "address": "192.0.2.11"}],
    "monitors": [{"name": "cpu-c1", "address": "192.0.2.16"}],
    "preprocessors": [],
}


def changed(path: tuple[str | int, ...], value: object) -> dict[str, Any]:
    """Return the good document with one value replaced."""
    document = copy.deepcopy(DOCUMENT)
    place: Any = document
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    return document


def run(file: Path) -> subprocess.CompletedProcess[str]:
    """Run the check as Ansible does."""
    return subprocess.run(
        [sys.executable, str(CHECK), str(file)], capture_output=True, text=True, check=False, timeout=120
    )


def test_a_good_file_passes_in_silence(tmp_path: Path) -> None:
    file = tmp_path / "members.json"
    file.write_text(json.dumps(DOCUMENT), encoding="utf-8")
    finished = run(file)
    assert (finished.returncode, finished.stdout, finished.stderr) == (0, "", "")


@pytest.mark.parametrize(
    ("document", "fault"),
    [
        ([], "expected a JSON object, found []"),
        (changed(("schema",), 2), "schema: expected 1, found 2"),
        (changed(("schema",), True), "schema: expected 1, found true"),
        (changed(("engines",), []), "engines: expected at least one, found none"),
        (changed(("engines",), {}), "engines: expected a list, found {}"),
        (changed(("engines", 0), "gpu-a1"), 'engines[0]: expected an object, found "gpu-a1"'),
        (changed(("engines", 0, "model"), ""), 'engines[0].model: expected printable text, found ""'),
        (changed(("engines", 0, "address"), None), "engines[0].address: expected printable text, found null"),
        (changed(("engines", 0, "name"), "gpu a1"), "engine gpu a1: expected a name of letters, digits and _.:- only"),
        (
            changed(("engines", 0, "port"), 0),
            "engine gpu-a1.main: expected in port an integer from 1 to 65535, found 0",
        ),
        (
            changed(("engines", 0, "port"), True),
            "engine gpu-a1.main: expected in port an integer from 1 to 65535, found true",
        ),
        (
            changed(("engines", 0, "port"), "8100"),
            'engine gpu-a1.main: expected in port an integer from 1 to 65535, found "8100"',
        ),
        (
            changed(("engines", 0, "adapters"), [7]),
            "engine gpu-a1.main: expected in adapters a list of names, found [7]",
        ),
        (changed(("engines", 1, "name"), "gpu-a1.main"), "engines: expected each name once, found gpu-a1.main again"),
        (
            changed(("engines", 1, "address"), "192.0.2.13"),
            "engines: expected each address and port once, found 192.0.2.13 port 8100 again",
        ),
        (
            changed(("engines", 1, "model"), "sql"),
            "engines: expected sql to be a model or an adapter, found both",
        ),
        (changed(("gateways",), None), "gateways: expected a list, found null"),
        (changed(("gateways",), [{"name": "gw1"}]), "gateways[0].address: expected printable text, found null"),
        (changed(("gateways",), DOCUMENT["gateways"] * 2), "gateways: expected each name once, found gw1 again"),
        (
            changed(("monitors",), [{"name": "a", "address": "192.0.2.1"}, {"name": "b", "address": "192.0.2.1"}]),
            "monitors: expected each address once, found 192.0.2.1 again",
        ),
    ],
)
def test_each_fault_is_named(document: object, fault: str) -> None:
    assert fault in check_members.faults_of_document(document)


def test_all_faults_are_named_at_once() -> None:
    document = changed(("engines", 0, "port"), 70000)
    document["schema"] = None
    document["monitors"] = 3
    assert len(check_members.faults_of_document(document)) == 3


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"\xff\xfe", b"[" * 100_000, b"members", b'{"schema": 1}x'],
    ids=["empty", "cut", "binary", "deep", "word", "tail"],
)
def test_a_file_that_is_no_json_fails_with_one_line(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "members.json"
    file.write_bytes(content)
    finished = run(file)
    assert finished.returncode == 1
    assert finished.stderr.startswith(f"{file}: expected JSON in UTF-8, found: ")
    assert finished.stderr.count("\n") == 1


def test_a_missing_file_fails_with_one_line(tmp_path: Path) -> None:
    finished = run(tmp_path / "members.json")
    assert finished.returncode == 1
    assert finished.stderr == f"{tmp_path}/members.json: expected a readable file, found: No such file or directory\n"


def test_wrong_usage_is_told() -> None:
    assert check_members.main([]) == 2


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=20,
)


@given(json_values)
def test_no_document_makes_a_traceback(document: object) -> None:
    for fault in check_members.faults_of_document(document):
        assert "\n" not in fault


texts = st.text(max_size=6) | st.sampled_from(["gpu-a1.main", "sql", "192.0.2.13", "a b", "é", "\x00"])
numbers = st.integers(-1, 2_000_000_000) | st.sampled_from([1, 8100, 65535, 65536]) | st.booleans() | st.floats(0, 10)
engines = st.fixed_dictionaries(
    {
        **{key: st.just(ENGINE[key]) | texts for key in check_members.ENGINE_TEXTS},
        **{key: st.just(ENGINE[key]) | numbers for key in check_members.ENGINE_NUMBERS},
        "adapters": st.lists(texts, max_size=3) | st.none(),
    }
)
documents = st.fixed_dictionaries(
    {
        "schema": st.just(1) | numbers,
        "engines": st.lists(engines, max_size=3),
        **{name: st.just([]) for name in check_members.HOST_LISTS},
    }
)


@given(documents)
def test_whatever_passes_can_be_read_by_the_scheduler(document: dict[str, Any]) -> None:
    if not check_members.faults_of_document(document):
        read = scheduler_members.parse(json.dumps(document).encode())
        assert [engine.name for engine in read] == [engine["name"] for engine in document["engines"]]


def test_the_good_document_can_be_read_by_the_scheduler() -> None:
    assert len(scheduler_members.parse(json.dumps(DOCUMENT).encode())) == 2


AGENT = {"host": "gpu-a1", "address": "192.0.2.13", "port": 8409}


def test_agents_may_be_there_or_not() -> None:
    for agents in ([], [AGENT], [AGENT, {**AGENT, "host": "gpu-b1"}]):
        assert check_members.faults_of_document({**DOCUMENT, "agents": agents}) == []


@pytest.mark.parametrize(
    ("agents", "fault"),
    [
        (None, "agents: expected a list, found null"),
        ({}, "agents: expected a list, found {}"),
        (["x"], 'agents[0]: expected an object, found "x"'),
        ([{**AGENT, "port": 0}], "agents[0].port: expected an integer from 1 to 65535, found 0"),
        ([{**AGENT, "port": True}], "agents[0].port: expected an integer from 1 to 65535, found true"),
        ([{**AGENT, "host": ""}], 'agents[0].host: expected printable text, found ""'),
        ([{"host": "a", "port": 1}], "agents[0].address: expected printable text, found null"),
        ([AGENT, AGENT], "agents: expected each host once, found gpu-a1 again"),
    ],
)
def test_wrong_agents_are_named(agents: object, fault: str) -> None:
    assert check_members.faults_of_document({**DOCUMENT, "agents": agents}) == [fault]
