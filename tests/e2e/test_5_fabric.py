# SPDX-License-Identifier: GPL-3.0-or-later
"""A RoCE port that somebody changed by hand: found, mended, and mended over a reboot."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.e2e.conftest import Site, ansible, changed_tasks, wait_until

# Host → how an operator there switches PFC off, and asks for it: the kernel's driver with dcb, NVIDIA's with mlnx_qos.
PORT = "ens1f0np0"
HOSTS = {
    "gpu-a1": (f"dcb pfc set dev {PORT} prio-pfc all:off", f"dcb pfc show dev {PORT} prio-pfc", "3:on"),
    "gpu-b1": (f"mlnx_qos -i {PORT} --pfc 0,0,0,0,0,0,0,0", f"mlnx_qos -i {PORT}", "enabled     0   0   0   1"),
}


def rdma_info(running_site: Site, host: str) -> dict[str, dict[str, Any]]:
    """What the module finds on a host: interface → port."""
    module = ["-m", "ringmaster.inference.rdma_info", "-a", '{"gather": ["qos"]}']
    finished = ansible(running_site.checkout, "ansible", host, "--become", *module)
    assert finished.returncode == 0, finished.stdout + finished.stderr
    result = json.loads(finished.stdout.partition("=>")[2])
    return {port["netdev"]: port for port in result["ports"]}


def apply(running_site: Site, host: str) -> list[str]:
    """Run the fabric's play on a host; gives the tasks that changed something."""
    finished, document = running_site.playbook("site.yml", "--tags", "fabric", "--limit", host)
    assert finished.returncode == 0, finished.stdout[-6000:]
    assert document is not None
    changed = changed_tasks(document)
    assert set(changed) <= {f"{host}/fabric"}
    return changed.get(f"{host}/fabric", [])


@pytest.mark.parametrize("host", ["gpu-a1", "gpu-a2", "gpu-b1"])
def test_main_job_left_every_port_lossless(running_site: Site, host: str) -> None:
    ports = rdma_info(running_site, host)
    assert sorted(ports) == ["ens1f0np0", "ens1f1np1"]
    for port in ports.values():
        assert (port["mtu_bytes"], port["roce_mtu_bytes"]) == (9000, 4096)
        assert (port["qos"]["trust"], port["qos"]["pfc_priorities"]) == ("dscp", [3])
        assert port["qos"]["dscp_to_priority"]["26"] == 3
        assert (port["qos"]["global_pause_rx"], port["qos"]["global_pause_tx"]) == (False, False)
        # The kernel's own driver has no switch for ECN: unknown, and never "off".
        if host == "gpu-b1":
            assert port["qos"]["ecn_priorities"] == [3]
        else:
            assert port["qos"]["ecn_priorities"] is None
            assert "ecn_priorities" in port["qos"]["unknown"]


@pytest.mark.parametrize("host", HOSTS)
def test_pfc_switched_off_by_hand_is_found_mended_and_stays_mended(running_site: Site, host: str) -> None:
    switch_off, ask, on = HOSTS[host]
    running_site.on(host, switch_off)
    assert on not in running_site.on(host, ask)
    found = rdma_info(running_site, host)
    assert found[PORT]["qos"]["pfc_priorities"] == []
    assert found["ens1f1np1"]["qos"]["pfc_priorities"] == [3]

    assert apply(running_site, host) == ["The ports are set, and stay so over reboots"]
    assert on in running_site.on(host, ask)
    assert apply(running_site, host) == []

    running_site.reboot(host)
    # By the unit alone: nothing was run on the host since.
    wait_until(lambda: on in running_site.on(host, ask, check=False), f"PFC of {PORT} on {host} is on again")
    assert rdma_info(running_site, host)[PORT]["mtu_bytes"] == 9000
    assert apply(running_site, host) == []
