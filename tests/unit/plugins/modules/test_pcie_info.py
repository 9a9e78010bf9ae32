# SPDX-License-Identifier: GPL-3.0-or-later
"""The module around the reader: arguments, the baseline's life, check mode and documentation."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from ansible_collections.ringmaster.inference.plugins.module_utils.file_tree import FileTree
from ansible_collections.ringmaster.inference.plugins.modules import pcie_info

Run = Callable[..., dict[str, Any]]
GPU, PORT, OTHER = "0000:07:00.0", "0000:00:01.1", "0000:08:00.0"


class Host:
    """Two GPUs, one at a root port, and the module that reads them."""

    def __init__(self, root: Path, module_run: Run) -> None:
        self.root = root
        self.module_run = module_run
        self.baseline = root / "var/lib/pcie/baseline.json"
        self.write("proc/sys/kernel/random/boot_id", "first")
        for place, class_code in ((PORT, "0x060400"), (f"{PORT}/{GPU}", "0x030200"), (OTHER, "0x030200")):
            folder = f"sys/devices/pci0000:00/{place}"
            self.write(f"{folder}/class", class_code)
            self.write(f"{folder}/vendor", "0x10de")
            self.write(f"{folder}/current_link_width", "16")
            self.write(f"{folder}/aer_dev_correctable", "RxErr 0\n")
            link = root / "sys/bus/pci/devices" / Path(place).name
            link.parent.mkdir(parents=True, exist_ok=True)
            link.symlink_to(f"/{folder}")

    def write(self, path: str, content: str) -> None:
        (self.root / path).parent.mkdir(parents=True, exist_ok=True)
        (self.root / path).write_text(content, encoding="utf-8")

    def errors(self, place: str, count: int) -> None:
        self.write(f"sys/devices/pci0000:00/{place}/aer_dev_correctable", f"RxErr {count}\n")

    def call(self, **arguments: Any) -> dict[str, Any]:
        result = self.module_run(pcie_info.main, **arguments)
        assert not result.get("changed")
        return result

    def deltas(self, **arguments: Any) -> dict[str, int | None]:
        devices = self.call(baseline=str(self.baseline), **arguments)["devices"]
        return {device["pci_address"]: device["errors"]["correctable"]["delta"] for device in devices}


@pytest.fixture
def host(tmp_path: Path, module_run: Run, monkeypatch: pytest.MonkeyPatch) -> Host:
    monkeypatch.setattr(pcie_info, "FileTree", lambda: FileTree(str(tmp_path)))
    return Host(tmp_path, module_run)


def test_all_devices_without_a_baseline(host: Host) -> None:
    result = host.call()
    assert [device["pci_address"] for device in result["devices"]] == [PORT, GPU, OTHER]
    assert "baseline" not in result
    assert result["boot_id"] == "first"
    assert result["aspm_policy"] is None
    assert "aspm_policy" in result["unknown"]
    fatal = result["devices"][1]["errors"]["correctable"]
    assert fatal["delta"] is None
    assert fatal["unknown"]["delta"] == "no baseline was asked for"


def test_addresses_in_nvmls_form_and_one_that_is_gone(host: Host) -> None:
    result = host.call(addresses=["00000000:07:00.0", "0000:C1:00.0"])
    assert [device["pci_address"] for device in result["devices"]] == [PORT, GPU]
    assert result["missing"] == ["0000:c1:00.0"]


def test_life_of_a_baseline(host: Host) -> None:
    assert host.deltas() == {PORT: None, GPU: None, OTHER: None}
    assert not host.baseline.exists(), "keep never writes"
    assert host.deltas(baseline_state="update", _ansible_check_mode=True) == {PORT: None, GPU: None, OTHER: None}
    assert not host.baseline.exists(), "check mode never writes"

    first = host.call(baseline=str(host.baseline), baseline_state="update")
    assert first["baseline"]["updated"] is True
    assert first["baseline"]["taken_at"] is None
    assert "baseline_state=update" in first["baseline"]["unknown"]["taken_at"]

    host.errors(f"{PORT}/{GPU}", 3)
    assert host.deltas() == {PORT: 0, GPU: 3, OTHER: 0}
    assert host.deltas() == {PORT: 0, GPU: 3, OTHER: 0}, "a baseline that is kept stays"
    assert host.deltas(baseline_state="update") == {PORT: 0, GPU: 3, OTHER: 0}, "what is replaced is told once more"
    assert host.deltas() == {PORT: 0, GPU: 0, OTHER: 0}

    host.errors(f"{PORT}/{GPU}", 1)
    assert host.deltas() == {PORT: 0, GPU: None, OTHER: 0}
    host.write("proc/sys/kernel/random/boot_id", "second")
    assert host.deltas() == {PORT: None, GPU: None, OTHER: None}


def test_an_update_of_some_devices_keeps_the_others_of_this_boot(host: Host) -> None:
    host.call(baseline=str(host.baseline), baseline_state="update")
    host.errors(f"{PORT}/{GPU}", 3)
    host.errors(OTHER, 5)
    host.call(baseline=str(host.baseline), baseline_state="update", addresses=[GPU])
    assert host.deltas() == {PORT: 0, GPU: 0, OTHER: 5}
    host.write("proc/sys/kernel/random/boot_id", "second")
    host.call(baseline=str(host.baseline), baseline_state="update", addresses=[GPU])
    assert host.deltas() == {PORT: 0, GPU: 0, OTHER: None}


def test_a_damaged_baseline_is_told_and_replaced_on_demand(host: Host) -> None:
    host.write("var/lib/pcie/baseline.json", "{")
    result = host.call(baseline=str(host.baseline))
    assert "To do: take a new one" in result["baseline"]["unknown"]["taken_at"]
    assert host.baseline.read_text(encoding="utf-8") == "{"
    host.call(baseline=str(host.baseline), baseline_state="update")
    assert json.loads(host.baseline.read_text(encoding="utf-8"))["boot_id"] == "first"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"addresses": ["7"]}, "Expected PCI addresses like 0000:07:00.0. Found 7. To do: "),
        ({"baseline_state": "update"}, "baseline"),
        ({"baseline": "baseline.json"}, "Expected an absolute path"),
        ({"baseline": "/proc/no/such", "baseline_state": "update"}, "Expected that the baseline can be written"),
    ],
)
def test_wrong_arguments_say_what_is_expected(host: Host, arguments: dict[str, Any], says: str) -> None:
    result = host.call(**arguments)
    assert result["failed"]
    assert says in result["msg"]


def test_documentation_names_what_is_returned(host: Host) -> None:
    host.call(baseline=str(host.baseline), baseline_state="update")
    result = host.call(baseline=str(host.baseline), addresses=[GPU])
    documented = yaml.safe_load(pcie_info.RETURN)
    assert result.keys() - {"changed", "invocation"} == documented.keys()
    for device in result["devices"]:
        described = documented["devices"]["contains"]
        assert device.keys() - described.keys() == set()
        for part in ("link", "aspm", "acs"):
            assert device[part].keys() == described[part]["contains"].keys(), part
        assert (
            device["errors"]["correctable"].keys() == described["errors"]["contains"]["correctable"]["contains"].keys()
        )
    assert result["baseline"].keys() == documented["baseline"]["contains"].keys()
