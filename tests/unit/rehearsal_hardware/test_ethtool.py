# SPDX-License-Identifier: GPL-3.0-or-later
"""The kernel's ethtool interface of simulated ports: it tells the same as the stand-in for the command."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from ansible_collections.ringmaster.inference.plugins.module_utils.rdma_formats import parse_ethtool_statistics
from rehearsal.hardware import Machine, build, library
from rehearsal.hardware.commands import ethtool, set_pfc

CHECKOUT = Path(__file__).resolve().parents[3]
PROGRAM = """
import json, sys
from ansible_collections.ringmaster.inference.plugins.module_utils.ethernet_statistics import EthernetStatistics
print(json.dumps([EthernetStatistics().read(netdev) for netdev in sys.argv[1:]]))
"""


@pytest.fixture(scope="module")
def preloaded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return library.compile_ethtool(tmp_path_factory.mktemp("library"))


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return build("a100-sxm4x8", tmp_path)


def read(machine: Machine, preloaded: Path, *netdevs: str) -> list[tuple[dict[str, int] | None, str]]:
    """What a program reads that has the library preloaded."""
    finished = subprocess.run(
        [sys.executable, "-c", PROGRAM, *netdevs],
        env={
            **os.environ,
            "PYTHONPATH": str(CHECKOUT / ".cache" / "collections"),
            "LD_PRELOAD": str(preloaded),
            "RINGMASTER_REHEARSAL_HARDWARE": str(machine.state.folder),
        },
        capture_output=True,
        text=True,
        check=True,
    )
    return [(each[0], each[1]) for each in json.loads(finished.stdout)]


def test_counters_are_those_of_the_command(
    machine: Machine, preloaded: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    machine.state.set("ports/1/ethtool/tx_vport_rdma_unicast_packets", 12345678901234567890 % (1 << 63))
    machine.state.set("ports/1/ethtool/rx_prio3_pause_duration", 90_000)
    machine.state.set("ports/7/ethtool/rx_discards_phy", 1)
    for flags in ([False] * 8, [False, False, False, True, False, False, False, True]):
        set_pfc(machine.state, "ports/1", flags)
        netdevs = [machine.state.text(f"ports/{index}/netdev") for index in (0, 1, 7)]
        for netdev, (counters, reason) in zip(netdevs, read(machine, preloaded, *netdevs)):
            assert ethtool.run(["-S", netdev], machine) == 0
            assert reason == ""
            assert counters == parse_ethtool_statistics(capsys.readouterr().out)
            assert ("rx_prio3_pause_duration" in (counters or {})) is (flags[3] and netdev == netdevs[1])


def test_other_interfaces_are_the_kernels(machine: Machine, preloaded: Path) -> None:
    (nothing, reason), (loopback, _unused) = read(machine, preloaded, "none0", "lo")
    assert nothing is None
    assert reason == "none0: No such device"
    assert loopback is None  # its driver counts nothing


def test_library_builds_without_a_warning(tmp_path: Path) -> None:
    built = tmp_path / library.ETHTOOL_NAME
    command = ["gcc", *library.FLAGS, *library.WARNINGS, "-o", str(built), str(library.ETHTOOL_SOURCE)]
    finished = subprocess.run(command, capture_output=True, text=True, check=False)
    assert finished.returncode == 0, finished.stderr
    exported = subprocess.run(["nm", "-D", "--defined-only", str(built)], capture_output=True, text=True, check=True)
    assert [line.split()[-1] for line in exported.stdout.splitlines()] == ["ioctl"]


def test_library_needs_no_newer_libc_than_the_oldest_host_has(preloaded: Path) -> None:
    symbols = subprocess.run(["objdump", "-T", str(preloaded)], check=True, capture_output=True, text=True).stdout
    versions = {tuple(map(int, text.split("."))) for text in re.findall(r"GLIBC_([0-9.]+)", symbols)}
    assert versions
    assert max(versions) <= (2, 17)
