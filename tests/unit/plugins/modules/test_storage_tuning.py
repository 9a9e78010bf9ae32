# SPDX-License-Identifier: GPL-3.0-or-later
"""The module around the disks: check mode, values that come back, and what documentation and arguments say."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from ansible_collections.ringmaster.inference.plugins.module_utils.file_tree import FileTree
from ansible_collections.ringmaster.inference.plugins.modules import storage_tuning

Run = Callable[..., dict[str, Any]]
QUEUE = "sys/devices/pci/nvme0n1/queue"


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / QUEUE).mkdir(parents=True)
    (tmp_path / QUEUE / "read_ahead_kb").write_text("128\n")
    (tmp_path / QUEUE / "scheduler").write_text("none [mq-deadline]\n")
    (tmp_path / "run/systemd/system").mkdir(parents=True)
    device = tmp_path.stat().st_dev
    for link in (f"sys/dev/block/{device >> 8 & 0xFFF}:{device & 0xFF}", "sys/class/block/nvme0n1"):
        (tmp_path / link).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / link).symlink_to("/sys/devices/pci/nvme0n1")
    monkeypatch.setattr(storage_tuning, "FileTree", lambda _root: FileTree(str(tmp_path)))
    monkeypatch.setattr(
        "ansible_collections.ringmaster.inference.plugins.module_utils.storage.os.major", lambda _number: 259
    )
    monkeypatch.setattr(
        "ansible_collections.ringmaster.inference.plugins.module_utils.storage.os.minor", lambda _number: 0
    )
    (tmp_path / "sys/dev/block/259:0").symlink_to("/sys/devices/pci/nvme0n1")
    return tmp_path


def test_set_and_brought_back(module_run: Run, machine: Path) -> None:
    arguments = {"path": str(machine)}
    would = module_run(storage_tuning.main, _ansible_check_mode=True, _ansible_diff=True, **arguments)
    assert would["changed"]
    assert would["diff"]["after"] == {"nvme0n1": {"scheduler": "none", "read_ahead_kb": "4096"}}
    assert (machine / QUEUE / "scheduler").read_text() == "none [mq-deadline]\n"

    # A file, unlike the kernel's, keeps what is written: then the value alone is the list.
    done = module_run(storage_tuning.main, **arguments)
    assert done["changed"]
    assert done["before"] == {"nvme0n1": {"scheduler": "mq-deadline", "read_ahead_kb": "128"}}
    assert (done["device"], done["disks"]) == ("nvme0n1", {"nvme0n1": "nvme"})
    assert 'ATTR{queue/scheduler}="none"' in done["rules"]
    assert not module_run(storage_tuning.main, **arguments)["changed"]

    former = {**done["before"], "sdz": {"scheduler": "bfq"}}
    assert module_run(storage_tuning.main, values=former, **arguments)["changed"]
    assert (machine / QUEUE / "read_ahead_kb").read_text() == "128"
    assert not module_run(storage_tuning.main, values=former, **arguments)["changed"]


@pytest.mark.parametrize("sign", ["run/.containerenv", ".dockerenv"])
def test_a_container_changes_nothing_of_its_host(module_run: Run, machine: Path, sign: str) -> None:
    (machine / sign).write_text("")
    for values in (None, {"nvme0n1": {"scheduler": "none"}}):
        result = module_run(storage_tuning.main, path=str(machine), values=values)
        assert not result["changed"]
        assert (result["device"], result["disks"], result["rules"]) == (None, {}, "")


@pytest.mark.parametrize("read_ahead_kb", [-1, 1 << 21])
def test_read_ahead_out_of_range_is_refused(module_run: Run, machine: Path, read_ahead_kb: int) -> None:
    result = module_run(storage_tuning.main, path=str(machine), read_ahead_kb=read_ahead_kb)
    assert "Expected read_ahead_kb of 0 to 1048576" in result["msg"]


def test_documentation_agrees_with_the_arguments() -> None:
    options = yaml.safe_load(storage_tuning.DOCUMENTATION)["options"]
    assert options["read_ahead_kb"]["default"] == storage_tuning.READ_AHEAD_KB
    assert options["schedulers"]["default"] == {kind: list(names) for kind, names in storage_tuning.SCHEDULERS.items()}
