# SPDX-License-Identifier: GPL-3.0-or-later
"""A card of a serving host is reset: what may not be is refused, and no request is lost that was not on its engine."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rehearsal import fleet
from tests.e2e.conftest import MODEL, PATIENCE, ROOT, Site, wait_until
from tests.e2e.test_2_under_load import GATEWAYS, Background, answering_engines, failures, wait_until_healthy

HOST = "gpu-b1"
ENGINE = f"{HOST}.main"
SERVICE = "standin-engine@main.service"
LEDGER = "/var/lib/ringmaster/gpu_reset/ledger.jsonl"
FAULT = "env PYTHONPATH=/usr/local/lib/ringmaster-rehearsal python3 -m rehearsal.hardware.faults"


@pytest.fixture(autouse=True)
def well(running_site: Site) -> Iterator[None]:
    """Each test starts with engines that serve, and leaves no fault and no ledger behind."""
    wait_until_healthy(running_site)
    yield
    running_site.on(HOST, f"{FAULT} mend; rm -rf /var/lib/ringmaster/gpu_reset")


def uuid_of(running_site: Site, card: int) -> str:
    """The uuid of a card by its index."""
    return running_site.on(HOST, f"nvidia-smi --id={card} --query-gpu=uuid --format=csv,noheader").strip()


def hook(running_site: Site, state: str) -> dict[str, Any]:
    """The hook that drains the engine at both gateways, or lets requests in."""
    gateways = [shlex.join(fleet.ssh_command(running_site.checkout, running_site.addresses[name])) for name in GATEWAYS]
    program = str(ROOT / "tests" / "support" / "haproxy_server.py")
    return {"command": [sys.executable, program, state, f"pool_{MODEL}/{ENGINE}", "100", *gateways], "timeout": 120}


def task(running_site: Site, card: int, *, drained: bool = True, **more: Any) -> dict[str, Any]:
    """A task that resets a card."""
    options = {"uuid": uuid_of(running_site, card), "services": [SERVICE], **more}
    if drained:
        options.update(drain=hook(running_site, "drain"), undrain=hook(running_site, "ready"))
    return {"name": "Card is reset", "ringmaster.inference.gpu_reset": options}


class Play:
    """A playbook of one play on the host, and what its last task returned."""

    def __init__(self, running_site: Site, folder: Path, *tasks: dict[str, Any]) -> None:
        self.site, self.answer = running_site, folder / "answer.json"
        self.playbook = folder / "play.json"
        last = {**tasks[-1], "register": "answer"}
        keep = {
            "name": "Answer is kept",
            "ansible.builtin.copy": {"dest": str(self.answer), "content": "{{ answer | to_json }}"},
            "delegate_to": "localhost",
            "become": False,
        }
        block = {"block": [*tasks[:-1], last], "always": [keep]}
        play = {"name": "Test", "hosts": HOST, "gather_facts": False, "become": True, "tasks": [block]}
        self.playbook.write_text(json.dumps([play]))

    def start(self) -> subprocess.Popen[str]:
        """Start it."""
        self.answer.unlink(missing_ok=True)
        return subprocess.Popen(
            ["ansible-playbook", "-i", str(self.site.checkout.inventory), str(self.playbook)],
            env=self.site.checkout.environment,
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def run(self) -> dict[str, Any]:
        """Run it to its end; gives what the last task returned."""
        output, _unused = self.start().communicate(timeout=900)
        print(output)
        assert self.answer.exists(), output[-3000:]
        answer: dict[str, Any] = json.loads(self.answer.read_text())
        return answer


def descendants(process: subprocess.Popen[str]) -> list[int]:
    """A process and all that it started: Ansible's workers are no members of its process group."""
    parents: dict[int, list[int]] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        parents.setdefault(int(fields[1]), []).append(int(folder.name))
    found = [process.pid]
    for pid in found:
        found += parents.get(pid, [])
    return found


def kill(pids: list[int]) -> None:
    """Kill processes that may have ended meanwhile."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def program(pid: int) -> str:
    """The name of a process' program; empty if it has ended."""
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return ""


def last_phases(running_site: Site) -> list[str]:
    """Phases and events of the ledger, in order."""
    lines = running_site.on(HOST, f"cat {LEDGER}", check=False).splitlines()
    return [record.get("phase", record["event"]) for record in map(json.loads, lines)]


def test_card_with_a_process_on_it_is_not_reset(running_site: Site, tmp_path: Path) -> None:
    running_site.on(
        HOST,
        'systemd-run --unit=training --uid=nobody --quiet sh -c "exec sleep infinity 3</dev/nvidia0"',
    )
    try:
        answer = Play(running_site, tmp_path, task(running_site, 0, reason="Xid 119")).run()
    finally:
        running_site.on(HOST, "systemctl stop training.service")
    assert answer["failed"]
    assert not answer["changed"]
    assert [problem["code"] for problem in answer["problems"]] == ["held"]
    assert "(sleep infinity), user nobody, unit training.service, has /dev/nvidia0 open" in answer["msg"]
    assert last_phases(running_site) == ["refused"]


def test_reset_under_load_loses_no_request(running_site: Site, tmp_path: Path) -> None:
    running_site.on(HOST, f'{FAULT} inject - 1 "recovery action reset"')
    play = Play(running_site, tmp_path, task(running_site, 1))
    with Background(running_site, 30) as background:
        background.wait_for_answers(30)
        answer = play.run()
        wait_until_healthy(running_site)
        background.wait_for_answers(60, after=time.time())
    assert answer["outcome"] == "verified", answer["msg"]
    assert answer["uuids"] == [uuid_of(running_site, 1)], "an L40S is reset alone"
    assert failures(background.outcomes) == []
    assert running_site.on(HOST, f"systemctl is-active {SERVICE}").strip() == "active"


def test_reset_without_a_hook_loses_only_what_its_engine_had(running_site: Site, tmp_path: Path) -> None:
    running_site.on(HOST, f'{FAULT} inject - 1 "recovery action reset"')
    play = Play(running_site, tmp_path, task(running_site, 1, drained=False))
    started = time.time()
    with Background(running_site, 30) as background:
        background.wait_for_answers(30)
        answer = play.run()
        wait_until_healthy(running_site)
    assert answer["outcome"] == "verified", answer["msg"]
    failed = {outcome.request_id for outcome in background.outcomes if outcome.error}
    assert "" not in failed, "every client was let in"
    engines = answering_engines(running_site, "gw1", started - 1, failed)
    assert {engines[request] for request in failed} <= {ENGINE}


def test_reset_goes_on_without_its_controller_and_the_next_run_finishes_it(running_site: Site, tmp_path: Path) -> None:
    running_site.on(HOST, f'{FAULT} inject - 2 "recovery action reset"')
    play = Play(running_site, tmp_path, task(running_site, 2))
    with Background(running_site, 30) as background:
        background.wait_for_answers(30)
        controller = play.start()
        try:
            wait_until(lambda: "stop" in last_phases(running_site), "the host's part begins")
        finally:
            kill(descendants(controller))
            controller.communicate()
        wait_until(lambda: last_phases(running_site)[-1:] == ["outcome"], "the host comes to its end alone")
        assert last_phases(running_site).count("reset") == 2, "phase and answer of one reset"
        assert running_site.on(HOST, f"systemctl is-active {SERVICE}").strip() == "active"
        answer = play.run()
        wait_until_healthy(running_site)
        background.wait_for_answers(60, after=time.time())
    assert answer["outcome"] == "verified", answer["msg"]
    assert answer["resumed"]
    assert last_phases(running_site).count("reset") == 2
    assert last_phases(running_site)[-2:] == ["undrain", "closed"]
    assert failures(background.outcomes) == []


def test_reset_is_followed_to_its_end_over_lost_connections(running_site: Site, tmp_path: Path) -> None:
    running_site.on(HOST, f'{FAULT} inject - 2 "recovery action reset"')
    play = Play(running_site, tmp_path, task(running_site, 2))
    controller = play.start()
    wait_until(lambda: "handed" in last_phases(running_site), "the host's part begins")
    killed = 0
    while killed < 2 and controller.poll() is None:
        connections = [pid for pid in descendants(controller) if program(pid) == "ssh"]
        kill(connections)
        killed += len(connections)
        time.sleep(0.2)
    output, _unused = controller.communicate(timeout=PATIENCE * 3)
    assert killed, "the test must cut a connection"
    assert "the connection is lost" in output
    answer = json.loads(play.answer.read_text())
    assert answer["outcome"] == "verified", output[-3000:]
    assert last_phases(running_site).count("reset") == 2, "phase and answer of one reset"


def test_killed_worker_leaves_the_host_as_it_was(running_site: Site, tmp_path: Path) -> None:
    running_site.on(HOST, f'{FAULT} inject - 2 "recovery action reset"')
    play = Play(running_site, tmp_path, task(running_site, 2))
    controller = play.start()
    wait_until(lambda: "stop" in last_phases(running_site), "the host's part begins")
    running_site.on(HOST, "systemctl kill --signal=KILL --kill-whom=main ringmaster-gpu-reset.service")
    output, _unused = controller.communicate(timeout=PATIENCE * 3)
    answer = json.loads(play.answer.read_text())
    # Where it was killed decides how it ends, but it ends, and the service runs.
    assert answer["outcome"] in ("aborted", "verified", "unknown"), output[-3000:]
    assert running_site.on(HOST, f"systemctl is-active {SERVICE}").strip() == "active"
    if answer["outcome"] != "verified":
        assert answer["next_step"] in ("", "run_again")
        assert Play(running_site, tmp_path, task(running_site, 2)).run()["outcome"] == "verified"
    assert last_phases(running_site)[-1] == "closed"


def test_ecc_comes_back_with_a_reboot(running_site: Site, tmp_path: Path) -> None:
    running_site.on(HOST, f'{FAULT} inject - 3 "ecc off"')
    ecc = {"name": "ECC is on", "ringmaster.inference.gpu_ecc": {"state": "enabled"}}
    asked = Play(running_site, tmp_path, ecc).run()
    assert asked["changed"]
    assert asked["reboot_required"]
    again = Play(running_site, tmp_path, ecc).run()
    assert not again["changed"]
    assert again["reboot_required"]
    reboot = {"name": "Host is rebooted", "ansible.builtin.reboot": {}}
    after = Play(running_site, tmp_path, reboot, ecc).run()
    assert not after["changed"]
    assert not after["reboot_required"]
    info = {"name": "Cards are looked at", "ringmaster.inference.gpu_info": {}}
    cards = Play(running_site, tmp_path, info).run()["gpus"]
    assert [(card["ecc_current"], card["ecc_pending"]) for card in cards] == [(True, True)] * 4
    wait_until_healthy(running_site)
