# SPDX-License-Identifier: GPL-3.0-or-later
"""The members document, and the file that is followed while others write it."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringmaster_scheduler import members
from ringmaster_scheduler.domain import Agent, Engine
from ringmaster_scheduler.members import MembersError, MembersFile


def entry(**replaced: Any) -> dict[str, Any]:
    return {
        "name": "gpu-a1.main",
        "host": "gpu-a1",
        "address": "10.89.7.13",
        "port": 8100,
        "kind": "standin",
        "model": "qwen2-7b-instruct",
        "adapters": ["sql"],
        "card": "a100-80g",
        "max_num_seqs": 256,
        "max_model_len": 32768,
        **replaced,
    }


def document(*entries: Any, **replaced: Any) -> bytes:
    return json.dumps({"schema": 1, "engines": entries, "gateways": [], **replaced}).encode()


def test_engines_of_the_agreed_document() -> None:
    other = entry(name="gpu-a2.main", adapters=[], later_key=[1])
    assert members.parse(document(entry(), other, later_list=[])) == (
        Engine(
            "gpu-a1.main",
            "gpu-a1",
            "10.89.7.13",
            8100,
            "standin",
            "qwen2-7b-instruct",
            ("sql",),
            "a100-80g",
            256,
            32768,
        ),
        Engine("gpu-a2.main", "gpu-a1", "10.89.7.13", 8100, "standin", "qwen2-7b-instruct", (), "a100-80g", 256, 32768),
    )


def test_agents_are_optional_and_sorted_as_they_stand(tmp_path: Path) -> None:
    path = tmp_path / "members.json"
    path.write_bytes(document(entry()))
    file = MembersFile(str(path))
    assert file.poll()
    assert file.agents == ()
    path.write_bytes(document(entry(), agents=[{"host": "gpu-a1", "address": "10.89.7.13", "port": 8409, "later": 1}]))
    assert file.poll()
    assert file.agents == (Agent("gpu-a1", "10.89.7.13", 8409),)


@pytest.mark.parametrize(
    ("listed", "message"),
    [
        ({}, "expected a list of agents"),
        ([1], r"agents\[0\]: expected an object"),
        ([{"host": "a", "address": "10.0.0.1"}], r"agents\[0\].port: expected an integer"),
        ([{"host": "a", "address": "10.0.0.1/x", "port": 1}], r"agents\[0\].address: expected an IP address"),
        ([{"host": "a", "address": "10.0.0.1", "port": 1}] * 2, "two agents are on a"),
    ],
)
def test_wrong_agents_keep_the_former_members(listed: Any, message: str, tmp_path: Path) -> None:
    path = tmp_path / "members.json"
    path.write_bytes(document(entry()))
    file = MembersFile(str(path))
    file.poll()
    path.write_bytes(document(entry(), entry(name="other"), agents=listed))
    assert file.poll()
    assert re.search(message, file.error)
    assert file.engines is not None
    assert len(file.engines) == 1


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "not a JSON document"),
        (b"\xff\xfe", "not a JSON document"),
        (document(entry())[:-5], "not a JSON document"),
        (b"[" * 100_000, "not a JSON document"),
        (b"[]", "expected an object at the top"),
        (document(schema=2), "expected schema 1, found 2"),
        (document(schema=None), "expected schema 1, found None"),
        (b'{"schema": 1}', "expected a list of engines"),
        (document("text"), r"engines\[0\]: expected an object"),
        (document(entry(), entry()), "two engines are named gpu-a1.main"),
        (document(entry(name="two words")), r"engines\[0\].name: expected letters"),
        (document(entry(name="a\n")), r"engines\[0\].name: expected printable text"),
        (document(entry(address="")), r"engines\[0\].address: expected printable text, found ''"),
        (document(entry(address="gpu a")), r"engines\[0\].address: expected an IP address without a zone"),
        (document(entry(address="fe80::1%x;show info")), r"engines\[0\].address: expected an IP address without"),
        (document(entry(model=None)), r"engines\[0\].model: expected printable text, found None"),
        (document(entry(port=0)), r"engines\[0\].port: expected an integer from 1 to 65535, found 0"),
        (document(entry(port=True)), r"engines\[0\].port"),
        (document(entry(port="8100")), r"engines\[0\].port"),
        (document(entry(max_num_seqs=0)), r"engines\[0\].max_num_seqs"),
        (document(entry(adapters="sql")), r"engines\[0\].adapters: expected a list of names"),
        (document(entry(adapters=[""])), r"engines\[0\].adapters: expected a list of names"),
        (document(entry(), entry(name="b", model="sql")), "adapter sql of engine gpu-a1.main has the name of a model"),
    ],
)
def test_document_that_is_refused(content: bytes, message: str) -> None:
    with pytest.raises(MembersError, match=message):
        members.parse(content)


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


@given(st.sampled_from(sorted(entry())), JSON_VALUES)
def test_any_value_anywhere_is_used_or_refused(key: str, value: object) -> None:
    try:
        engines = members.parse(document(entry(**{key: value})))
    except MembersError:
        return
    assert len(engines) == 1


@pytest.mark.parametrize(
    ("gateways", "count"), [([], 1), ([{"name": "gw1"}, {"name": "gw2"}], 2), (None, 1), ("two", 1)]
)
def test_gateways_are_counted(gateways: object, count: int) -> None:
    assert members.count_gateways(document(entry(), gateways=gateways)) == count


def test_file_is_read_when_it_changes(tmp_path: Path) -> None:
    path = tmp_path / "members.json"
    path.write_bytes(document(entry()))
    file = MembersFile(str(path))
    assert file.poll()
    assert not file.poll()
    replacement = tmp_path / "new"
    replacement.write_bytes(document(entry(), entry(name="b")))
    replacement.replace(path)
    assert file.poll()
    assert file.engines is not None
    assert [engine.name for engine in file.engines] == ["gpu-a1.main", "b"]
    assert file.poll(force=True)
    assert (file.error, file.failures) == ("", 0)


def test_half_written_file_keeps_the_former_members(tmp_path: Path) -> None:
    path = tmp_path / "members.json"
    whole = document(entry(), entry(name="b"))
    path.write_bytes(document(entry()))
    file = MembersFile(str(path))
    file.poll()
    former = file.engines
    path.write_bytes(whole[: len(whole) // 2])
    assert file.poll()
    assert file.engines == former
    assert "not a JSON document" in file.error
    assert not file.poll()  # reported once
    path.write_bytes(whole)
    assert file.poll()
    assert (file.error, file.failures, len(file.engines or ())) == ("", 1, 2)


def test_file_that_is_gone_keeps_the_former_members_and_may_return(tmp_path: Path) -> None:
    path = tmp_path / "members.json"
    file = MembersFile(str(path))
    assert file.poll()
    assert (file.engines, file.error, file.failures) == (None, "No such file or directory", 1)
    assert not file.poll()
    path.write_bytes(document(entry()))
    assert file.poll()
    path.rename(tmp_path / "away")
    assert file.poll()
    assert (len(file.engines or ()), file.error) == (1, "No such file or directory")
    (tmp_path / "away").rename(path)  # the same inode, size and time as before
    assert file.poll()
    assert file.error == ""


def test_what_is_no_file_or_too_large_is_reported(tmp_path: Path) -> None:
    file = MembersFile(str(tmp_path))
    assert file.poll()
    assert file.error == "Is a directory"
    large = tmp_path / "large"
    with large.open("wb") as stream:
        stream.truncate(17 * 1024 * 1024)
    file = MembersFile(str(large))
    assert file.poll()
    assert file.error == "over 16777216 bytes"
