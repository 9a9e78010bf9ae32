# SPDX-License-Identifier: GPL-3.0-or-later
"""The module rdma_info: its options, its result, and that RETURN names every key of it."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import yaml
from ansible.module_utils.testing import patch_module_args

from ansible_collections.ringmaster.inference.plugins.modules import rdma_info
from tests.support.rdma_host import RdmaHost


@pytest.fixture
def host(tmp_path: Path) -> Iterator[RdmaHost]:
    host = RdmaHost(tmp_path, ports=2)
    with (
        mock.patch.object(rdma_info, "FileTree", return_value=host.tree),
        mock.patch.object(rdma_info, "CommandRunner", return_value=host),
    ):
        yield host


def run(capsys: pytest.CaptureFixture[str], **arguments: Any) -> dict[str, Any]:
    """Run the module; its result."""
    with patch_module_args(arguments), contextlib.suppress(SystemExit):
        rdma_info.main()
    return json.loads(capsys.readouterr().out)


def documented(contains: dict[str, Any]) -> set[str]:
    """Keys of one level of RETURN."""
    return set(contains)


def test_result_is_what_return_says(host: RdmaHost, capsys: pytest.CaptureFixture[str]) -> None:
    result = run(capsys, window_seconds=0.01)
    returned = yaml.safe_load(rdma_info.RETURN)
    assert result["changed"] is False
    assert set(result) - {"changed", "invocation"} == documented(returned)
    for device in result["devices"]:
        assert set(device) == documented(returned["devices"]["contains"])
    contains = returned["ports"]["contains"]
    for port in result["ports"]:
        assert set(port) == documented(contains)
        assert set(port["qos"]) == documented(contains["qos"]["contains"])
        assert set(port["retransmission"]) == documented(contains["retransmission"]["contains"])


def test_samples_of_return_have_the_keys_of_the_result(host: RdmaHost, capsys: pytest.CaptureFixture[str]) -> None:
    port = run(capsys, window_seconds=0.01, minimum_packets=1)["ports"][0]
    contains = yaml.safe_load(rdma_info.RETURN)["ports"]["contains"]
    assert port["gids"][0].keys() == contains["gids"]["sample"][0].keys()
    window = contains["retransmission"]["contains"]
    for group in ("sender", "receiver", "local_drops", "host_starvation", "congestion", "corruption"):
        assert port["retransmission"][group].keys() == window[group]["sample"].keys()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"window_seconds": -1}, "window_seconds from 0"),
        ({"retransmit_threshold": 1.5}, "retransmit_threshold from 0 to 1"),
        ({"minimum_packets": 0}, "minimum_packets from 1"),
        ({"window_seconds": 1, "sample_file": "/a"}, "mutually exclusive"),
        ({"gather": ["everything"]}, "everything"),
        ({"devices": ["mlx5_9"]}, "mlx5_9"),
    ],
)
def test_options_that_make_no_sense(
    host: RdmaHost, capsys: pytest.CaptureFixture[str], arguments: dict[str, Any], message: str
) -> None:
    result = run(capsys, **arguments)
    assert result["failed"] is True
    assert message in result["msg"]


@pytest.mark.parametrize("check_mode", [False, True])
def test_sample_file_is_written_unless_in_check_mode(
    host: RdmaHost, capsys: pytest.CaptureFixture[str], check_mode: bool
) -> None:
    result = run(capsys, sample_file="/var/lib/samples.json", _ansible_check_mode=check_mode)
    assert result["changed"] is False
    assert host.tree.exists("/var/lib/samples.json") is not check_mode


def test_nothing_is_changed_on_the_host(host: RdmaHost, capsys: pytest.CaptureFixture[str]) -> None:
    run(capsys, window_seconds=0.01)
    assert host.changes == []


def test_defaults_are_those_of_the_rule() -> None:
    options = yaml.safe_load(rdma_info.DOCUMENTATION)["options"]
    assert options["retransmit_threshold"]["default"] == 3e-4
    assert options["minimum_packets"]["default"] == 100_000
    assert options["minimum_window_seconds"]["default"] == 60
