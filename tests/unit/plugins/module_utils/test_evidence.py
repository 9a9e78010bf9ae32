# SPDX-License-Identifier: GPL-3.0-or-later
"""The evidence of a run: what gets into the document, how it is stored, and how it reads."""

from __future__ import annotations

import errno
import json
import os
import stat
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ansible_collections.ringmaster.inference.plugins.module_utils.evidence import (
    COUNTS,
    LONGEST_MESSAGE,
    Recorder,
    plain,
    render,
    write,
)

STARTED = "2026-03-01T12:00:00Z"
OPERATIONS = [f"operation_{number:02}" for number in range(1, 18)]


def recorder(check_mode: bool = False) -> Recorder:
    return Recorder("20260301T120000Z-site-abc123", "site.yml", STARTED, check_mode, "0.1.0", "2.19.14")


def task(record: Recorder, host: str, operation: str | None, **details: Any) -> None:
    details = {"name": "Task", "action": "ansible.builtin.debug", "started_at": STARTED, "seconds": 0.5, **details}
    record.task(host, operation, **details)


def finish(record: Recorder) -> dict[str, Any]:
    counts = {}
    for host, part in record.document["hosts"].items():
        changed = sum(len(operation["changed"]) for operation in part["operations"])
        counts[host] = {"ok": 1, "changed": changed, "failures": int(part["status"] == "failed")}
    record.finish("2026-03-01T12:01:32Z", 92.4, counts)
    return record.document


def site_of(hosts: int, operations: list[str], changes: int = 0) -> Recorder:
    record = recorder()
    for number in range(1, hosts + 1):
        for operation in operations:
            host = f"gpu-{number:03}"
            task(record, host, operation, facts={f"{operation}_measured": {"version": "absent"}})
            for change in range(changes):
                task(record, host, operation, name=f"Change {change}", changed=True)
            task(record, host, operation, facts={f"{operation}_verified": {"service": "active", "port": "open"}})
    return record


def test_operation_has_what_it_reported() -> None:
    record = recorder()
    task(record, "gw1", "edge", facts={"edge_measured": {"version": "absent"}, "other": "x", "other_measured": {}})
    task(record, "gw1", "edge", name="HAProxy is installed", action="ansible.builtin.apt", changed=True)
    task(record, "gw1", "edge", facts={"edge_measured": {"version": "3.0"}, "edge_verified": {"port": "closed"}})
    task(record, "gw1", "edge", facts={"edge_verified": {"port": "open"}})
    task(record, "gw1", "observability", seconds=1.0)
    document = finish(record)
    assert document["status"] == "ok"
    assert document["hosts"]["gw1"]["operations"][0] == {
        "name": "edge",
        "order": 1,
        "status": "ok",
        "started_at": STARTED,
        "seconds": 2.0,
        "measured": {"version": "absent"},
        "changed": [{"task": "HAProxy is installed", "action": "ansible.builtin.apt"}],
        "verified": {"port": "open"},
        "failure": None,
    }
    assert document["hosts"]["gw1"]["operations"][1]["order"] == 2


def test_failure_and_unreachable_are_kept_and_text_is_bounded() -> None:
    record = recorder()
    task(record, "gw1", "edge", name="Port answers", failure="x" * 10_000)
    task(record, "gw2", "edge", failure="no route", unreachable=True)
    document = finish(record)
    assert document["status"] == "failed"
    assert document["hosts"]["gw1"]["operations"][0]["failure"] == {
        "task": "Port answers",
        "message": "x" * LONGEST_MESSAGE,
    }
    assert [document["hosts"][host]["status"] for host in ("gw1", "gw2")] == ["failed", "unreachable"]


def test_tasks_outside_roles_count_only_if_they_did_something() -> None:
    record = recorder()
    task(record, "gw1", None)
    assert record.host("gw1")["operations"] == []
    task(record, "gw1", None, changed=True)
    assert [operation["name"] for operation in record.host("gw1")["operations"]] == ["playbook"]


def test_counts_come_from_ansible() -> None:
    record = recorder()
    record.host("pi1")
    record.finish("x", 1.0, {"gw1": {"ok": 3, "changed": 2, "failures": 0, "unreachable": 1}})
    assert record.document["hosts"]["gw1"]["counts"] == {
        **dict.fromkeys(COUNTS, 0),
        "ok": 3,
        "changed": 2,
        "unreachable": 1,
    }
    assert record.document["hosts"]["gw1"]["status"] == "unreachable"
    assert record.document["hosts"]["pi1"]["status"] == "ok"


# Stored documents


def test_document_is_its_owners_alone(tmp_path: Path) -> None:
    directory = tmp_path / "a" / "evidence"
    old = os.umask(0)
    try:
        path = Path(write(finish(recorder()), str(directory)))
    finally:
        os.umask(old)
    assert path.name == "20260301T120000Z-site-abc123.json"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    assert json.loads(path.read_text(encoding="utf-8"))["playbook"] == "site.yml"


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_full_disk_leaves_the_earlier_document(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    record = recorder()
    path = Path(write(record.document, str(tmp_path)))
    before = path.read_bytes()

    def full(*arguments: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        patched.setattr(os, call, full)
        with pytest.raises(OSError, match="No space left"):
            write(finish(record), str(tmp_path))
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


# The text


def test_table_for_people() -> None:
    record = recorder()
    record.host("pi1")
    task(record, "gw1", "edge", name="HAProxy runs the new configuration", changed=True)
    task(record, "gw1", "edge", facts={"edge_verified": {"port": "open"}}, seconds=2.04)
    task(record, "gw2", "edge", name="Port answers", failure="Expected open, found closed.\nTo do: look at the log.")
    lines = render(finish(record), ["Console: http://10.0.0.1:8406/"]).splitlines()
    assert lines == [
        "site.yml on 3 hosts, 2026-03-01T12:00:00Z, run 20260301T120000Z-site-abc123",
        "",
        "HOST  OPERATION  CHANGED  VERIFIED  SECONDS  WHAT",
        "gw1   edge             1  1 check       2.5  HAProxy runs the new configuration",
        "gw2   edge             0  FAILED        0.5",
        "pi1   -                0  -               -",
        "",
        "gw2, edge: Port answers",
        "    Expected open, found closed.",
        "    To do: look at the log.",
        "",
        "3 hosts, 2 operations: 1 task changed, 1 verified, 1 failed, 92.4 s",
        "changed=0 failed=0 unreachable=0: pi1",
        "changed=0 failed=1 unreachable=0: gw2",
        "changed=1 failed=0 unreachable=0: gw1",
        "",
        "Console: http://10.0.0.1:8406/",
    ]


def test_second_run_says_that_nothing_changed() -> None:
    text = render(finish(site_of(3, ["registry", "edge"])))
    assert "WHAT" not in text
    assert "changed=0 failed=0 unreachable=0: gpu-001, gpu-002, gpu-003" in text


def test_check_mode_and_unfinished_runs_are_told() -> None:
    record = recorder(check_mode=True)
    task(record, "gw1", "edge", changed=True)
    text = render(record.document)
    assert "WOULD CHANGE" in text
    assert "check mode: nothing was changed" in text
    assert "not finished" in text


def test_whole_site_has_a_row_each_and_fits_the_width() -> None:
    lines = render(finish(site_of(8, OPERATIONS, changes=3)), width=100).splitlines()
    assert sum(line.startswith("gpu-") for line in lines) == 8 * 17
    assert max(map(len, lines)) <= 100


def test_large_site_shares_rows_but_never_hides_a_failure() -> None:
    record = site_of(100, OPERATIONS, changes=3)
    task(record, "gpu-042", "operation_04", name="Module is loaded", failure="not loaded", seconds=9.0)
    task(record, "gpu-050", "operation_04", name="One more", changed=True, seconds=33.0)
    record.host("pi1")
    text = render(finish(record))
    table = text.split("\n\n")[1]
    rows = [line.split() for line in table.splitlines()[1:]]
    assert [row[4] for row in rows if row[3] == "more"] == OPERATIONS
    alone = [" ".join(row[:4]) for row in rows if row[3] != "more"]
    assert alone == ["gpu-042 operation_04 3 FAILED", "gpu-050 operation_04 4 2", "pi1 - 0 -"]
    assert len(text.splitlines()) < 60


ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary() | st.builds(object),
    lambda each: (
        st.lists(each, max_size=3)
        | st.dictionaries(st.text(max_size=3) | st.integers(), each, max_size=3)
        | st.tuples(each)
    ),
    max_leaves=8,
)
TASK = st.fixed_dictionaries(
    {
        "host": st.sampled_from(["a", "b", "\x1b[31mred", "long" * 20]) | st.text(min_size=1),
        "operation": st.none() | st.sampled_from(["edge", "vllm"]) | st.text(),
        "name": st.text(),
        "seconds": st.floats(-1, 1e9),
        "changed": st.booleans(),
        "facts": st.none() | st.fixed_dictionaries({}, optional={"edge_measured": ANYTHING, "vllm_verified": ANYTHING}),
        "failure": st.none() | st.text(),
        "unreachable": st.booleans(),
    }
)


@given(st.lists(TASK, max_size=8), st.booleans(), st.integers(0, 300))
def test_any_run_can_be_stored_and_read(tasks: list[dict[str, Any]], check_mode: bool, width: int) -> None:
    record = recorder(check_mode)
    for each in tasks:
        task(record, **each)
    for document in (record.document, finish(record)):
        stored = json.loads(json.dumps(document, allow_nan=False))
        assert stored == document, "nothing but JSON's own types"
        text = render(stored, width=width)
        assert text == render(document, width=width)
        assert "\x1b" not in text.replace("\n", "")


def test_values_that_are_not_json_become_text() -> None:
    deep: Any = "end"
    for _level in range(100):
        deep = [deep]
    json.dumps(plain({1: {2.5}, "deep": deep, "infinite": float("inf"), "bytes": b"x", "lone": "\ud800"}))
    assert plain({1: (True, None, 1.5)}) == {"1": [True, None, 1.5]}
    assert plain(float("nan")) == "nan"


def test_tagged_values_lose_their_tags() -> None:
    tagging = pytest.importorskip("ansible.module_utils._internal._datatag._tags")
    tag = tagging.Deprecated(msg="x")
    assert tagging.Deprecated.is_tagged_on(tag.tag("text"))
    assert not tagging.Deprecated.is_tagged_on(plain({"a": [tag.tag("text")]})["a"][0])
