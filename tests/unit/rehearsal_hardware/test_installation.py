# SPDX-License-Identifier: GPL-3.0-or-later
"""What a host is given, and the command line that breaks it."""

from __future__ import annotations

import argparse
import io
import subprocess
import tarfile
from pathlib import Path
from typing import Any

import pytest

from rehearsal import faults, inventory
from rehearsal.checkout import Checkout, RehearsalError
from rehearsal.hardware import installation, library
from tests.unit.rehearsal_hardware.conftest import BUILT

ROOT = Path(__file__).resolve().parents[3]


def test_archive_holds_program_library_commands_and_state() -> None:
    content = installation.archive("l40sx4", "gpu-b1", {0: "10.1.2.3", 1: "10.1.6.3"}, BUILT)
    with tarfile.open(fileobj=io.BytesIO(content)) as tar:
        members = {member.name: member for member in tar.getmembers()}
        address = tar.extractfile("var/lib/ringmaster-rehearsal/hardware/ports/1/address")
        assert address is not None
        assert address.read() == b"10.1.6.3\n"
    assert members["usr/local/bin/nvidia-smi"].mode == 0o755
    assert members["usr/local/lib/libnvidia-ml.so.1"].mode == 0o755
    assert members["etc/systemd/system/sys-kernel-config.mount"].linkname == "/dev/null"
    assert f"{installation.PROGRAM}/rehearsal/hardware/boot.py" in members
    assert not any(name.startswith("/") or "__pycache__" in name for name in members)


def test_hosts_program_needs_nothing_but_python(tmp_path: Path) -> None:
    """Imported as on a host: from the archive alone, without the site's packages."""
    content = installation.archive("a100-sxm4x4", "gpu-a1", {}, BUILT)
    subprocess.run(["tar", "-x", "-C", str(tmp_path)], input=content, check=True)
    modules = sorted(
        ".".join(path.relative_to(tmp_path / installation.PROGRAM).with_suffix("").parts)
        for path in (tmp_path / installation.PROGRAM).rglob("*.py")
    )
    code = f"import importlib\nfor name in {[one for one in modules if not one.endswith('__main__')]!r}:"
    finished = subprocess.run(
        ["/usr/bin/python3", "-S", "-c", f"{code}\n    importlib.import_module(name.removesuffix('.__init__'))"],
        env={"PYTHONPATH": str(tmp_path / installation.PROGRAM)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert finished.stderr == ""


def test_digest_tells_profiles_and_sources_apart(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    former = installation.digest("l40sx4")
    assert installation.digest("l40sx4") == former
    assert installation.digest("a100-sxm4x4") != former
    changed = tmp_path / "changed.py"
    changed.write_text("# another source\n")
    monkeypatch.setattr(installation, "_sources", lambda: [changed])
    assert installation.digest("l40sx4") != former


def test_library_that_can_not_be_built_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    broken = tmp_path / "broken.c"
    broken.write_text("int nvml(\n")
    monkeypatch.setattr(library, "SOURCE", broken)
    with pytest.raises(library.CompilerError, match="gcc could not build"):
        library.compile_library(tmp_path / "built")
    assert list((tmp_path / "built").iterdir()) == []
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(library.CompilerError, match="expected gcc, found none"):
        library.compile_library(tmp_path / "built")


class Fleet:
    """A fleet of three hosts that notes what it is told."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        self.checkout = Checkout(ROOT, ROOT / "inventories" / "rehearsal", tmp_path)
        self.told: list[tuple[str, str, str]] = []
        hosts: dict[str, dict[str, Any]] = {
            "gw1": {},
            "gpu-a1": {"rehearsal_hardware": "a100-sxm4x4"},
            "gpu-0": {"rehearsal_hardware": "l40sx4"},
        }
        monkeypatch.setattr(inventory, "read", lambda _checkout: inventory.Inventory({}, hosts))
        monkeypatch.setattr(faults, "_on_host", self._on_host)

    def _on_host(
        self, _checkout: Checkout, host: str, command: str, text: str = ""
    ) -> subprocess.CompletedProcess[str]:
        self.told.append((host, command.partition("rehearsal.hardware.faults ")[2] or command, text))
        return subprocess.CompletedProcess([], 0, "card 2\n", "")

    def fault(self, line: str) -> None:
        """Run `python -m rehearsal fault LINE`."""
        parser = argparse.ArgumentParser()
        faults.add_arguments(parser)
        faults.switch(self.checkout, parser.parse_args(line.split()))


@pytest.fixture
def three_hosts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Fleet:
    """A fleet of three hosts, two with hardware."""
    return Fleet(monkeypatch, tmp_path)


@pytest.mark.parametrize(
    ("line", "host", "told"),
    [
        ("xid 79 on gpu-a1/2", "gpu-a1", "inject - 2 'xid 79'"),
        ("roce loss 0.1 % on gpu-0 --seconds 60", "gpu-0", "inject 60.0 - 'roce loss 0.1 %'"),
        ("nvlink 3 down", "gpu-a1", "inject - - 'nvlink 3 down'"),
        ("pfc off", "gpu-0", "inject - - 'pfc off'"),
        ("aer storm on gpu-a1/mlx5_1", "gpu-a1", "inject - mlx5_1 'aer storm'"),
        ("global pause on on gpu-a1", "gpu-a1", "inject - - 'global pause on'"),
        ("none on gpu-a1/2", "gpu-a1", "mend 2"),
    ],
)
def test_phrases_reach_the_host_they_mean(line: str, host: str, told: str, three_hosts: Fleet) -> None:
    three_hosts.fault(line)
    assert [(one[0], one[1]) for one in three_hosts.told] == [(host, told)]


def test_none_alone_mends_all_hosts(three_hosts: Fleet) -> None:
    three_hosts.fault("none")
    assert [(host, told) for host, told, _text in three_hosts.told] == [("gpu-0", "mend"), ("gpu-a1", "mend")]


def test_faults_of_engines_are_as_before(three_hosts: Fleet) -> None:
    three_hosts.fault("gpu-a1.main slow --factor 3")
    ((host, command, text),) = three_hosts.told
    assert host == "gpu-a1"
    assert "/run/standin-engine/main/faults.json" in command
    assert text == '{"slow": {"until": null, "factor": 3.0}}'


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("gpu-a1.main sulk", "expected a fault of an engine"),
        ("sulk on gpu-a1", "expected a fault such as"),
        ("xid 79 on gw1", "expected a host with hardware"),
        ("xid 79 on nowhere/1", "expected a host with hardware"),
    ],
)
def test_what_nothing_knows_is_told(line: str, expected: str, three_hosts: Fleet) -> None:
    with pytest.raises(RehearsalError, match=expected):
        three_hosts.fault(line)
    assert three_hosts.told == []
