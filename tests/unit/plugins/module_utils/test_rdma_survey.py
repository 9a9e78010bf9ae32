# SPDX-License-Identifier: GPL-3.0-or-later
"""All ports of a host at once, and windows between two samples or since a file of samples."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ansible_collections.ringmaster.inference.plugins.module_utils import rdma, rdma_survey
from ansible_collections.ringmaster.inference.plugins.module_utils.rdma_survey import (
    RdmaSurvey,
    RdmaSurveyError,
    Wish,
    load_samples,
)
from tests.support.rdma_host import RdmaHost

FILE = "/var/lib/ringmaster/rdma-samples.json"


class Clock:
    """A clock since the boot that the test sets; waiting only moves it, and lets the counters run."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, meanwhile: Callable[[], None]) -> None:
        self.now = 1000.0
        self.meanwhile = meanwhile
        monkeypatch.setattr(rdma.time, "clock_gettime", lambda _clock: self.now)
        monkeypatch.setattr(rdma_survey.time, "sleep", self.wait)
        monkeypatch.setattr(rdma_survey.time, "monotonic", lambda: self.now)

    def wait(self, seconds: float) -> None:
        """Time passes."""
        self.now += seconds
        self.meanwhile()


@pytest.fixture
def host(tmp_path: Path) -> RdmaHost:
    return RdmaHost(tmp_path, ports=2)


@pytest.fixture
def clock(host: RdmaHost, monkeypatch: pytest.MonkeyPatch) -> Clock:
    """A million packets a window go through each port; the second one loses a thousand."""
    packets = {"n": 0}

    def meanwhile() -> None:
        packets["n"] += 1_000_000
        for port in host.ports.values():
            port.statistics = {
                "tx_vport_rdma_unicast_packets": packets["n"],
                "rx_vport_rdma_unicast_packets": packets["n"],
            }
        host.write(host.port_file(1, "hw_counters/out_of_sequence"), f"{packets['n'] // 1000}\n")

    meanwhile()
    return Clock(monkeypatch, meanwhile)


def taken(host: RdmaHost, write: bool = True, **wish: Any) -> dict[str, Any]:
    """The result of the module."""
    result = RdmaSurvey(host.tree, host).take(Wish(**wish), write)
    json.dumps(result)
    return result


def windows(result: dict[str, Any]) -> list[dict[str, Any]]:
    """What happened on each port."""
    return [port["retransmission"] for port in result["ports"]]


def test_all_ports(host: RdmaHost) -> None:
    result = taken(host)
    assert [device["device"] for device in result["devices"]] == ["mlx5_0", "mlx5_1"]
    assert [port["netdev"] for port in result["ports"]] == ["ens1np0", "ens2np0"]
    assert all(port["qos"]["tool"] == "dcb" and "counters" in port for port in result["ports"])
    assert windows(result) == [None, None]
    assert "retransmission" in result["ports"][0]["unknown"]
    for shared in (["ip", "-json", "-details", "address", "show"], ["ibv_devinfo"]):
        assert host.commands.count(shared) == 1


def test_host_without_rdma(tmp_path: Path) -> None:
    result = taken(RdmaHost(tmp_path, ports=0), sample_file=FILE)
    assert (result["devices"], result["ports"]) == ([], [])


def test_only_what_is_wished_for(host: RdmaHost) -> None:
    result = taken(host, netdevs=("ens2np0",), gather=frozenset())
    assert [device["device"] for device in result["devices"]] == ["mlx5_1"]
    assert [port["device"] for port in result["ports"]] == ["mlx5_1"]
    assert not {"qos", "counters"} & result["ports"][0].keys()
    assert {command[0] for command in host.commands} <= {"ip", "ibv_devinfo"}
    assert [port["device"] for port in taken(host, devices=("mlx5_0",))["ports"]] == ["mlx5_0"]


@pytest.mark.parametrize(
    ("wish", "message"),
    [
        ({"devices": ("mlx5_7",)}, r"mlx5_0, mlx5_1\)\. Found mlx5_7"),
        ({"netdevs": ("eth0",)}, r"ens1np0, ens2np0\)\. Found eth0"),
    ],
)
def test_names_that_are_not_there(host: RdmaHost, wish: dict[str, Any], message: str) -> None:
    with pytest.raises(RdmaSurveyError, match=message):
        taken(host, **wish)


def test_window_that_is_waited_for(host: RdmaHost, clock: Clock) -> None:
    good, bad = windows(taken(host, window_seconds=60))
    assert (good["verdict"], good["ratio"], good["over_threshold"], good["seconds"]) == ("measured", 0, False, 60)
    assert (bad["ratio"], bad["over_threshold"]) == (1e-3, True)
    calls = [command for command in host.commands if command[:2] == ["ethtool", "-S"]]
    assert len(calls) == 4, "one for each port and sample"


def test_limits_can_be_changed(host: RdmaHost, clock: Clock) -> None:
    assert windows(taken(host, window_seconds=1, threshold=0.01))[1]["over_threshold"] is False
    assert windows(taken(host, window_seconds=1, minimum_packets=2_000_000))[1]["verdict"] == "insufficient_traffic"


def test_window_since_the_last_run(host: RdmaHost, clock: Clock) -> None:
    first = windows(taken(host, sample_file=FILE))
    assert [window["verdict"] for window in first] == ["unknown", "unknown"]
    assert "no earlier sample" in first[0]["unknown"]["ratio"]
    clock.wait(90)
    second = windows(taken(host, sample_file=FILE))
    assert [(window["seconds"], window["over_threshold"]) for window in second] == [(90, False), (90, True)]
    clock.wait(60)
    assert windows(taken(host, sample_file=FILE))[0]["seconds"] == 60


def test_short_window_leaves_the_earlier_sample(host: RdmaHost, clock: Clock) -> None:
    taken(host, sample_file=FILE)
    clock.wait(30)
    short = windows(taken(host, sample_file=FILE))[0]
    assert (short["verdict"], short["ratio"]) == ("unknown", None)
    assert "shorter than 60 s" in short["unknown"]["ratio"]
    clock.wait(30)
    assert windows(taken(host, sample_file=FILE))[0]["seconds"] == 60


def test_check_mode_writes_no_samples(host: RdmaHost, clock: Clock) -> None:
    taken(host, write=False, sample_file=FILE)
    assert not host.tree.exists(FILE)


def test_reboot_discards_the_window_and_starts_a_new_one(host: RdmaHost, clock: Clock) -> None:
    taken(host, sample_file=FILE)
    host.write("/proc/sys/kernel/random/boot_id", "another\n")
    clock.wait(90)
    assert "started again" in windows(taken(host, sample_file=FILE))[0]["unknown"]["ratio"]
    clock.wait(90)
    assert windows(taken(host, sample_file=FILE))[0]["verdict"] == "measured"


def test_interface_made_anew_is_a_driver_loaded_anew(host: RdmaHost, clock: Clock) -> None:
    taken(host, sample_file=FILE)
    host.write("/sys/class/net/ens1np0/ifindex", "17\n")
    clock.wait(90)
    first, second = windows(taken(host, sample_file=FILE))
    assert "driver was loaded again" in first["unknown"]["ratio"]
    assert second["verdict"] == "measured"


@pytest.mark.parametrize("content", ["", "[]", "junk", '{"schema": 2, "samples": {}}', '{"schema": 1, "samples": []}'])
def test_damaged_file_counts_as_none_and_is_replaced(host: RdmaHost, clock: Clock, content: str) -> None:
    host.write(FILE, content)
    assert windows(taken(host, sample_file=FILE))[0]["verdict"] == "unknown"
    clock.wait(60)
    assert windows(taken(host, sample_file=FILE))[0]["verdict"] == "measured"


def test_file_that_can_not_be_written(host: RdmaHost) -> None:
    host.write("/var/lib/ringmaster", "a file")
    with pytest.raises(RdmaSurveyError, match="to write sample_file"):
        taken(host, sample_file=FILE)


@given(st.one_of(st.none(), st.text(), st.binary().map(lambda data: data.decode("utf-8", "replace"))))
def test_no_content_of_the_file_makes_a_traceback(text: str | None) -> None:
    assert load_samples(text) == {}


entries = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: (
        st.lists(inner) | st.dictionaries(st.sampled_from(["seconds", "boot", "driver", "hardware", "ethernet"]), inner)
    ),
)


@given(st.dictionaries(st.text(), entries))
def test_no_entry_of_the_file_makes_a_traceback(samples: dict[str, Any]) -> None:
    load_samples(json.dumps({"schema": 1, "samples": samples}))
