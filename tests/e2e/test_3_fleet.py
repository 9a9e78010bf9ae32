# SPDX-License-Identifier: GPL-3.0-or-later
"""The fleet itself: repaired whatever died, beside a second checkout, and gone without a trace."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from rehearsal import fleet
from rehearsal.checkout import Checkout, RehearsalError
from rehearsal.podman import podman, podman_json
from tests.e2e.conftest import Site, wait_until


@pytest.fixture
def small(tmp_path: Path, running_site: Site) -> Iterator[Checkout]:
    """A second rehearsal with two hosts, as another checkout on this machine would have it."""
    inventory = tmp_path / "hosts.yml"
    hosts = {"one": {"rehearsal_image": "debian12"}, "two": {"rehearsal_image": "debian13-no-python"}}
    inventory.write_text(yaml.safe_dump({"all": {"hosts": hosts}}))
    checkout = Checkout(running_site.checkout.root, inventory, tmp_path / "state")
    try:
        yield checkout
    finally:
        fleet.down(checkout, keep_images=True)


def traces(checkout: Checkout) -> list[str]:
    """What is on the machine of a rehearsal: containers, networks, interfaces' routes, state."""
    found = [name for container in podman_json("ps", "--all") for name in container["Names"]]
    found += [network["name"] for network in podman_json("network", "ls")]
    found += [str(path) for path in checkout.state.glob("*")]
    return [name for name in found if checkout.identity in name or str(checkout.state) in name]


def answers(checkout: Checkout, host: str) -> bool:
    """Whether a host answers over SSH."""
    command = [*fleet.ssh_command(checkout, fleet.address_of(checkout, host)), "true"]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


def test_second_checkout_does_not_collide_and_leaves_nothing_behind(small: Checkout, running_site: Site) -> None:
    addresses = fleet.up(small)
    assert set(addresses.values()).isdisjoint(running_site.addresses.values())
    assert answers(small, "one")
    assert answers(small, "two")
    routes = subprocess.run(["ip", "route"], capture_output=True, text=True, check=True).stdout
    fleet.down(small, keep_images=True)
    assert traces(small) == []
    assert subprocess.run(["ip", "route"], capture_output=True, text=True, check=True).stdout != routes
    assert answers(running_site.checkout, "gw1"), "the first checkout's fleet is still there"


def test_failed_start_leaves_nothing_behind(small: Checkout) -> None:
    document = yaml.safe_load(small.inventory.read_text())
    fleet.up(small)
    document["all"]["hosts"]["three"] = {"rehearsal_image": "no-such-image"}
    small.inventory.write_text(yaml.safe_dump(document))
    with pytest.raises(RehearsalError, match="no-such-image"):
        fleet.up(small)
    fleet.down(small, keep_images=True)
    assert traces(small) == []


def test_bigger_and_smaller_list_is_a_bigger_and_smaller_fleet(small: Checkout) -> None:
    before = fleet.up(small)
    document = yaml.safe_load(small.inventory.read_text())
    document["all"]["hosts"]["a-first"] = {"rehearsal_image": "debian13-no-python"}
    del document["all"]["hosts"]["two"]
    small.inventory.write_text(yaml.safe_dump(document))
    after = fleet.up(small)
    assert set(after) == {"a-first", "one"}
    assert after["one"] == before["one"], "a host keeps its address"
    assert podman_json("ps", "--all", "--filter", f"name={small.container('two')}") == []


def test_whatever_died_is_repaired(small: Checkout) -> None:
    fleet.up(small)
    inspected = {name: podman_json("inspect", small.container(name))[0] for name in ("one", "two")}
    # The monitor and the host's own init, killed together: podman takes the container for running.
    for kind in ("ConmonPid", "Pid"):
        os.kill(inspected["one"]["State"][kind], signal.SIGKILL)
    podman("stop", "--time", "0", small.container("two"))
    time.sleep(1)
    fleet.up(small)
    assert answers(small, "one")
    assert answers(small, "two")


def test_reboot_comes_back_by_itself(small: Checkout) -> None:
    fleet.up(small)
    booted = "cut -d ' ' -f 22 /proc/1/stat"  # when the first process began
    command = [*fleet.ssh_command(small, fleet.address_of(small, "one"))]
    before = subprocess.run([*command, booted], capture_output=True, text=True, check=True).stdout
    subprocess.run([*command, "sudo systemctl reboot"], capture_output=True, check=False)

    def came_back() -> bool:
        after = subprocess.run([*command, booted], capture_output=True, text=True, check=False)
        return after.returncode == 0 and after.stdout != before

    wait_until(came_back, "the host answers, with another first process")
