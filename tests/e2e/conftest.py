# SPDX-License-Identifier: GPL-3.0-or-later
"""A fleet of its own for the end-to-end tests: a rehearsal that somebody has running is left alone."""

from __future__ import annotations

import contextlib
import os
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from rehearsal import fleet, inventory, site
from rehearsal.checkout import Checkout
from tests.support.load import Load

ROOT = Path(__file__).resolve().parents[2]
MODEL = "qwen2-7b-instruct"
ENGINES = ("gpu-a1", "gpu-a2", "gpu-b1")
PREPROCESSORS = ("pi1", "pi2")
PATIENCE = 120.0  # seconds until a test gives up waiting for something that has to happen


def wait_until(condition: Callable[[], bool], what: str) -> None:
    """Wait for something that has to happen, however busy the machine is."""
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline, f"waited {PATIENCE:g} s in vain: {what}"
        time.sleep(0.2)


def within(limit: float, measure: Callable[[], float]) -> None:
    """Demand that one of three measurements is within the limit.

    For what a busy machine can spoil, such as times; what holds whatever the machine does, `measure` asserts itself.
    """
    found: list[float] = []
    while len(found) < 3:
        if found:
            time.sleep(15)  # what disturbed the last one may be over then
        found.append(measure())
        print(f"measured {found[-1]:.3f}, at most {limit:g} is to be reached")
        if found[-1] <= limit:
            return
    raise AssertionError(f"expected at most {limit:g} in one of three measurements, found {found}")


@dataclass(frozen=True)
class Site:
    """The rehearsal's site, up and serving."""

    checkout: Checkout
    addresses: dict[str, str]
    first_run: dict[str, Any]

    @property
    def edge_key(self) -> str:
        """Key of the rehearsal's client."""
        return (self.checkout.state / "secrets" / "edge_api_key").read_text().strip()

    @property
    def engine_key(self) -> str:
        """Key that the engines ask for."""
        return (self.checkout.state / "secrets" / "vllm_api_key").read_text().strip()

    def load(self, streams: int, seconds: float, gateway: str = "gw1", **more: Any) -> Load:
        """A load of streaming chats through a gateway."""
        return Load(self.addresses[gateway], site.PUBLIC_PORT, self.edge_key, MODEL, streams, seconds, **more)

    def on(self, host: str, command: str, check: bool = True, stdin: str = "") -> str:
        """Run a command line on a host as root; gives its output. A secret goes by stdin: sudo logs the line."""
        finished = subprocess.run(
            [*fleet.ssh_command(self.checkout, self.addresses[host]), f"sudo sh -c '{command}'"],
            capture_output=True,
            text=True,
            input=stdin,
            timeout=PATIENCE,
            check=False,
        )
        if check and finished.returncode != 0:
            raise AssertionError(f"{host}: {command}: status {finished.returncode}: {finished.stderr}")
        return finished.stdout

    def reboot(self, host: str) -> None:
        """Restart a host and wait until it is back."""
        command = "cat /proc/sys/kernel/random/boot_id"
        boot = self.on(host, command)
        self.on(host, "systemctl reboot", check=False)
        wait_until(lambda: self.on(host, command, check=False) not in ("", boot), f"{host} comes back from its reboot")

    def playbook(self, name: str, *arguments: str) -> tuple[subprocess.CompletedProcess[str], dict[str, Any] | None]:
        """Run a playbook; gives the finished process and the evidence document that it wrote."""
        return run_playbook(self.checkout, name, arguments)


def ansible(
    checkout: Checkout, program: str, *arguments: str, inventory_path: Path | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a program of Ansible's (ansible, ansible-playbook) from the checkout's root with an inventory."""
    return subprocess.run(
        [program, "-i", str(inventory_path or checkout.inventory), *arguments],
        env=checkout.environment,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )


def run_playbook(
    checkout: Checkout, name: str, arguments: Sequence[str] = (), inventory_path: Path | None = None
) -> tuple[subprocess.CompletedProcess[str], dict[str, Any] | None]:
    """Run a playbook with an inventory; gives the finished process and its evidence document (None: wrote none)."""
    started = time.time()
    finished = ansible(checkout, "ansible-playbook", *arguments, f"playbooks/{name}", inventory_path=inventory_path)
    return finished, site.newest_evidence(checkout, started)


def changed_tasks(document: dict[str, Any]) -> dict[str, list[str]]:
    """HOST/OPERATION → what changed, for every operation of an evidence document that changed something."""
    return {
        f"{host}/{operation['name']}": [change["task"] for change in operation["changed"]]
        for host, values in document["hosts"].items()
        for operation in values["operations"]
        if operation["changed"]
    }


@contextlib.contextmanager
def brought_up(checkout: Checkout, prepare: Callable[[Checkout], None] | None = None) -> Iterator[Site]:
    """The site after the first run of the main job on a fresh fleet, for which `prepare` may make something first."""
    try:
        if prepare is not None:
            prepare(checkout)
        started = time.time()
        status = site.run(checkout, [])
        document = site.newest_evidence(checkout, started)
        assert status == 0, "the main job failed; its output above says what was expected and what to do"
        assert document is not None, "the main job wrote no evidence"
        yield Site(checkout, fleet.addresses(checkout), document)
    finally:
        if os.environ.get("KEEP_FLEET") != "1":
            fleet.down(checkout, keep_images=True)


@pytest.fixture(scope="session")
def running_site() -> Iterator[Site]:
    """The site of the rehearsal."""
    with brought_up(Checkout(ROOT, ROOT / "inventories" / "rehearsal", ROOT / ".rehearsal-test")) as site_up:
        yield site_up


@pytest.fixture(scope="session")
def site_inventory(running_site: Site) -> inventory.Inventory:
    """The inventory of the running site."""
    return inventory.read(running_site.checkout)
