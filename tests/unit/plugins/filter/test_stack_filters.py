# SPDX-License-Identifier: GPL-3.0-or-later
"""The filters of the driver stack as a role's checks use them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from ansible.errors import AnsibleFilterError

from ansible_collections.ringmaster.inference.plugins.filter.stack_fit import stack_fit
from ansible_collections.ringmaster.inference.plugins.filter.stack_transaction import stack_transaction
from tests.support.stack import NAMES, profile

SIMULATIONS = Path(__file__).parents[1] / "module_utils" / "simulations"


def test_fit_names_the_nearest_profile() -> None:
    verdict = stack_fit(profile("notes-centos7"), [profile(name) for name in NAMES], today="2026-11-30")
    assert verdict["refused"]
    assert verdict["nearest"] == "el9-r580"


def test_fit_is_for_today_and_for_the_host() -> None:
    assert not stack_fit(profile("el9-r580"), today="2027-01-01")["problems"]
    assert stack_fit(profile("el9-r580"), today="2033-01-01")["refused"]
    assert stack_fit(profile("el9-r580"), host={"os": {"family": "Debian"}}, today="2027-01-01")["refused"]
    assert "problems" in stack_fit(profile("el9-r580"))


@pytest.mark.parametrize(
    ("arguments", "options", "complaint"),
    [
        ([{"schema": 1}], {}, "summary: is missing"),
        ([profile("el9-r580"), [{}]], {}, "schema: is missing"),
        ([profile("el9-r580")], {"today": "tomorrow"}, "today must be a date"),
        ([profile("el9-r580")], {"host": "gpu-a1"}, "host must be what driver_stack_info returned"),
    ],
)
def test_fit_of_something_else(arguments: list[Any], options: dict[str, Any], complaint: str) -> None:
    with pytest.raises(AnsibleFilterError, match=complaint):
        stack_fit(*arguments, **options)


def test_transaction_tells_changes_problems_and_what_comes_along() -> None:
    text = (SIMULATIONS / "apt_cuda.txt").read_text(encoding="utf-8")
    verdict = stack_transaction(text, profile("debian12-r535"), operations=["cuda"])
    assert verdict["problems"] == []
    assert {
        "name": "nvidia-cuda-toolkit",
        "action": "install",
        "before": None,
        "after": "11.8.89~11.8.0-5~deb12u1",
    } in (verdict["changes"])
    assert "g++-11" in verdict["along"]
    assert "libcublas11" not in verdict["along"]
    refused = stack_transaction(text, profile("debian12-r535"), operations=["nccl"])
    assert "which belongs to cuda" in refused["problems"][0]["reason"]


def test_transaction_of_the_whole_set_needs_what_is_installed() -> None:
    text = (SIMULATIONS / "apt_cuda.txt").read_text(encoding="utf-8")
    document = profile("debian12-r535")
    missing = [problem["reason"] for problem in stack_transaction(text, document)["problems"]]
    assert "rdma-core 44.0-2 is wanted, nothing is installed, and nothing would change that" in missing
    installed = {
        name: {package: [version] for package, version in document[name]["packages"].items()}
        for name in ("rdma", "driver", "kernel")
    }
    installed["kernel"].update({name: [version] for name, version in document["kernel"]["headers"]["packages"].items()})
    assert stack_transaction(text, document, installed=installed)["problems"] == []


def test_transaction_with_the_hosts_kernel() -> None:
    text = (SIMULATIONS / "dnf_nothing.txt").read_text(encoding="utf-8")
    verdict = stack_transaction(
        text, profile("el9-r580"), operations=["kernel"], release="5.14.0-503.11.1.el9_5.x86_64"
    )
    assert "kernel-core 5.14.0-503.11.1.el9_5 is wanted" in verdict["problems"][0]["reason"]


@pytest.mark.parametrize(
    ("arguments", "options", "complaint"),
    [
        ([None, profile("el9-r580")], {}, "the text that the package manager printed"),
        (["", {}], {}, "schema: is missing"),
        (["", profile("el9-r580")], {"operations": ["edge"]}, "edge is none of kernel"),
        (["", profile("el9-r580")], {"installed": ["x"]}, "installed must be packages"),
    ],
)
def test_transaction_of_something_else(arguments: list[Any], options: dict[str, Any], complaint: str) -> None:
    with pytest.raises(AnsibleFilterError, match=complaint):
        stack_transaction(*arguments, **options)
