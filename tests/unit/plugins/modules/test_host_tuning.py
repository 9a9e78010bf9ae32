# SPDX-License-Identifier: GPL-3.0-or-later
"""The module around the settings: arguments, check mode, diff, and what is required."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from ansible_collections.ringmaster.inference.plugins.module_utils.file_tree import FileTree
from ansible_collections.ringmaster.inference.plugins.modules import host_tuning

Run = Callable[..., dict[str, Any]]
POLICY = "sys/module/pcie_aspm/parameters/policy"
BALANCING = "proc/sys/kernel/numa_balancing"

# What a host without any of it gives.
NONE = dict.fromkeys(("governor", "idle_states", "aspm_policy", "acs", "swap"))


class Host:
    """A host with an ASPM policy and a kernel parameter, and without frequency control."""

    def __init__(self, root: Path, module_run: Run) -> None:
        self.root = root
        self.module_run = module_run
        self.write(POLICY, "[default] performance powersave powersupersave\n")
        self.write(BALANCING, "1\n")
        self.write("run/systemd/system/x", "")

    def write(self, path: str, content: str) -> None:
        (self.root / path).parent.mkdir(parents=True, exist_ok=True)
        (self.root / path).write_text(content, encoding="utf-8")

    def call(self, **arguments: Any) -> dict[str, Any]:
        return self.module_run(host_tuning.main, **arguments)


@pytest.fixture
def host(tmp_path: Path, module_run: Run, monkeypatch: pytest.MonkeyPatch) -> Host:
    monkeypatch.setattr(host_tuning, "FileTree", lambda: FileTree(str(tmp_path)))
    return Host(tmp_path, module_run)


def test_life_of_a_setting(host: Host) -> None:
    wanted = {"aspm_policy": "performance", "sysctls": {"kernel.numa_balancing": 0}}
    would = host.call(**wanted, _ansible_check_mode=True, _ansible_diff=True)
    assert would["changed"]
    assert would["diff"] == {
        "before": {**NONE, "aspm_policy": "default", "sysctls.kernel.numa_balancing": "1"},
        "after": {**NONE, "aspm_policy": "performance", "sysctls.kernel.numa_balancing": "0"},
    }
    assert (host.root / BALANCING).read_text(encoding="utf-8") == "1\n"

    first = host.call(**wanted)
    assert first["changed"]
    assert "diff" not in first
    assert first["boot"]["writes"][0] == {"path": f"/{POLICY}", "value": "performance"}
    second = host.call(**wanted, _ansible_diff=True)
    assert not second["changed"]
    assert "diff" not in second

    assert host.call(restore=first["before"], _ansible_check_mode=True)["changed"]
    restored = host.call(restore=first["before"])
    assert restored["changed"]
    assert restored["after"] == {"aspm_policy": "default", "sysctls.kernel.numa_balancing": "1"}
    assert not host.call(restore=first["before"])["changed"]


def test_what_is_not_asked_for_is_read_and_left_alone(host: Host) -> None:
    result = host.call()
    assert not result["changed"]
    assert result["before"] == result["after"] == {**NONE, "aspm_policy": "default"}
    assert result["unavailable"] == {}
    assert result["boot"] == {"writes": [], "acs": [], "swap": False}


def test_unavailable_is_told_and_fails_only_if_required(host: Host) -> None:
    result = host.call(governor="performance", aspm_policy="performance")
    assert result["changed"]
    assert result["before"]["governor"] is None
    assert "not there" in result["unavailable"]["governor"]

    host.write(POLICY, "[default] performance\n")
    result = host.call(governor="performance", aspm_policy="performance", required=["governor", "aspm_policy"])
    assert result["failed"]
    assert result["msg"].startswith("Expected governor to be set. Found governor: ")
    assert " To do: " in result["msg"]
    assert result["changed"], "the others are set nevertheless"


def test_what_is_required_has_to_be_asked_for(host: Host) -> None:
    result = host.call(aspm_policy="performance", required=["governer"])
    assert result["failed"]
    assert "governer: it was not asked for" in result["msg"]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"idle_latency_limit_microseconds": 0}, "Expected idle_latency_limit_microseconds of 1 or more. Found 0."),
        ({"aspm_policy": "off"}, "value of aspm_policy must be one of"),
        ({"sysctls": {"../../etc/passwd": 1}}, "Expected names of kernel parameters"),
        ({"restore": {"aspm_policy": 5}}, "Expected names of kernel parameters, and in restore"),
        ({"restore": {}, "governor": "performance"}, "mutually exclusive"),
        ({"restore": {}, "sysctls": {}}, "mutually exclusive"),
    ],
)
def test_wrong_arguments_say_what_is_expected(host: Host, arguments: dict[str, Any], says: str) -> None:
    result = host.call(**arguments)
    assert result["failed"]
    assert says in result["msg"]


def test_documentation_agrees_with_the_arguments(host: Host) -> None:
    documented = yaml.safe_load(host_tuning.DOCUMENTATION)
    assert documented["options"].keys() == {*host_tuning.SETTINGS, "sysctls", "restore", "required"}
    assert documented["options"]["aspm_policy"]["choices"] == list(host_tuning.ASPM_POLICIES)
    result = host.call(aspm_policy="default")
    assert result.keys() - {"changed", "invocation"} == yaml.safe_load(host_tuning.RETURN).keys()
