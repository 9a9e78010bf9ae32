# SPDX-License-Identifier: GPL-3.0-or-later
"""What a task of gpu_reset does, refuses and reports, on a made-up host; and which keywords no task may have."""

from __future__ import annotations

import json
import stat
from pathlib import Path
from typing import Any

import pytest
from ansible.errors import AnsibleConnectionFailure

from ansible_collections.ringmaster.inference.plugins.action import gpu_reset as action_plugin
from ansible_collections.ringmaster.inference.plugins.module_utils.commands import Answer
from ansible_collections.ringmaster.inference.plugins.module_utils.gpu_reset import Holder
from ansible_collections.ringmaster.inference.plugins.module_utils.gpu_reset_ledger import Ledger
from tests.support.controller import Controller
from tests.support.gpu_reset_world import (
    DAEMON,
    ENGINE,
    EXPORTER,
    OTHER,
    UUID,
    FakeHook,
    Killed,
    World,
    as_before,
    run_task,
)


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


def events(world: World) -> list[str]:
    """Events of the ledger, phases by their name."""
    return [record.get("phase", record["event"]) for record in world.ledger.read()[0]]


def codes(result: dict[str, Any]) -> list[str]:
    return [problem["code"] for problem in result["problems"]]


class DiesAfterDrain(FakeHook):
    """The controller is killed when its drain hook has just done its work."""

    def run(self) -> str:
        super().run()
        raise Killed


def kill_in_drain(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patched:
        patched.setattr("tests.support.gpu_reset_world.FakeHook", DiesAfterDrain)
        with pytest.raises(Killed):
            run_task(world, patched)
    assert world.drained


def test_reset_in_the_only_safe_order(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    result = run_task(world, monkeypatch)
    assert result["outcome"] == "verified"
    assert not result["failed"]
    assert result["changed"]
    assert result["services"] == [ENGINE, EXPORTER, DAEMON]
    assert [phase["phase"] for phase in result["phases"]][:8] == [
        "drain",
        "stop",
        "stop",
        "stop",
        "persistence_off",
        "prove",
        "reset",
        "start",
    ]
    assert events(world)[0] == "opened"
    assert events(world)[-3:] == ["outcome", "undrain", "closed"]
    assert as_before(world)
    assert not world.drained
    assert result["msg"] == "The card was reset and is well."
    assert result["cards_before"][0]["recovery_action"] == "reset"
    assert result["cards_after"][0]["recovery_action"] == "none"


def test_ledger_is_for_root_only(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    run_task(world, monkeypatch)
    folder = Path(world.ledger.directory)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert stat.S_IMODE(Path(world.ledger.path).stat().st_mode) == 0o600
    assert all(record["at"].endswith("Z") for record in world.ledger.read()[0])


def test_second_reset_for_a_fault_that_is_gone_is_refused(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    run_task(world, monkeypatch)
    result = run_task(world, monkeypatch)
    assert result["outcome"] == "refused"
    assert codes(result) == ["no_reason"]
    assert not result["changed"]
    assert len(world.resets) == 1
    assert events(world)[-1] == "refused"
    assert not world.drained


def test_check_mode_shows_the_plan_and_leaves_no_trace(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    result = run_task(world, monkeypatch, check=True, diff=True)
    assert result["outcome"] == "planned"
    assert result["changed"]
    assert result["steps"] == [
        "drain: command drain",
        f"stop {ENGINE}",
        f"stop {EXPORTER}",
        f"stop {DAEMON}",
        f"persistence mode off: {UUID}",
        f"prove that no process holds {UUID}",
        f"nvidia-smi -r -i {UUID}",
        f"persistence mode on: {UUID}",
        f"start {DAEMON}",
        f"start {EXPORTER}",
        f"start {ENGINE}",
        "verify number of cards, uuids, ECC, pending rows and pages, links, Xids",
        "undrain: command undrain",
    ]
    assert result["diff"]["prepared"].splitlines() == result["steps"]
    assert not Path(world.ledger.directory).exists()
    assert world.resets == []


def test_check_mode_shows_refusals_and_leaves_no_trace(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    world.needs[UUID] = "none"
    result = run_task(world, monkeypatch, check=True)
    assert result["failed"]
    assert codes(result) == ["no_reason"]
    assert not Path(world.ledger.directory).exists()


def test_diff_shows_cards_before_and_after(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    result = run_task(world, monkeypatch, diff=True)
    assert '"recovery_action": "reset"' in result["diff"]["before"]
    assert '"recovery_action": "reset"' not in result["diff"]["after"]


def test_foreign_process_on_the_card_is_named_before_anything_is_touched(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.held = (Holder(4711, "python3 train.py", "alice", "session-3.scope", "/dev/nvidia1", "open"),)
    result = run_task(world, monkeypatch)
    assert codes(result) == ["held"]
    for part in ("4711", "python3 train.py", "alice", "session-3.scope", "/dev/nvidia1"):
        assert part in result["msg"]
    assert world.said == []
    assert not world.drained
    assert world.resets == []


def test_holder_of_a_service_to_stop_that_stays_is_found_after_the_stop(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.held = (Holder(99, "engine", "engine", ENGINE, "/dev/nvidia1", "mapped"),)
    result = run_task(world, monkeypatch)
    assert result["outcome"] == "aborted"
    assert result["failed"]
    assert codes(result) == ["held"]
    assert "engine@main.service" in result["msg"]
    assert world.resets == []
    assert as_before(world)
    assert not world.drained
    assert world.ledger.unfinished() is None


def test_service_that_does_not_stop_is_started_again_and_reported(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.stuck = {EXPORTER}
    result = run_task(world, monkeypatch)
    assert result["outcome"] == "aborted"
    assert codes(result) == ["service_stop"]
    assert EXPORTER in result["msg"]
    assert world.resets == []
    assert as_before(world)
    assert not world.drained


def test_reset_that_fails_is_not_repeated_until_the_host_was_rebooted(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.smi = Answer(255, "In use by another client")
    first = run_task(world, monkeypatch)
    assert first["outcome"] == "failed"
    assert first["next_step"] == "reboot"
    assert first["drained"]
    assert world.drained
    assert "In use by another client" in first["msg"]
    assert as_before(world), "the services run again, only no request reaches them"

    world.smi = Answer(0, "ok")
    second = run_task(world, monkeypatch)
    assert second["outcome"] == "failed"
    assert second["resumed"]
    assert second["next_step"] == "reboot"
    assert len(world.resets) == 1

    world.reboot()
    third = run_task(world, monkeypatch)
    assert third["outcome"] == "verified"
    assert third["rebooted"]
    assert len(world.resets) == 1
    assert not world.drained


def test_card_that_a_reboot_does_not_mend_needs_a_power_cycle(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    world.mends = False
    assert run_task(world, monkeypatch)["next_step"] == "reboot"
    world.reboot()
    result = run_task(world, monkeypatch)
    assert result["next_step"] == "power_cycle"
    assert "power-cycle" in result["msg"]
    assert world.drained


def test_service_that_does_not_start_leaves_the_card_drained_until_it_does(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.broken = {ENGINE}
    result = run_task(world, monkeypatch)
    assert result["next_step"] == "start_services"
    assert world.drained
    world.broken = set()
    result = run_task(world, monkeypatch)
    assert result["outcome"] == "verified"
    assert len(world.resets) == 1
    assert not world.drained


def test_card_of_another_unfinished_run_has_to_wait(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    world.mends = False
    run_task(world, monkeypatch)
    result = run_task(world, monkeypatch, uuid=OTHER, reason="Xid 119")
    assert codes(result) == ["reset_under_way"]
    assert UUID in result["msg"]
    assert "unfinished: abandon" in result["msg"]
    abandoned = run_task(world, monkeypatch, uuid=OTHER, reason="Xid 119", unfinished="abandon")
    assert abandoned["outcome"] == "verified"
    assert [run.closed for run in world.ledger.runs()] == ["abandoned", "verified"]


def test_second_controller_is_refused_while_the_first_lives(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    kill_in_drain(world, monkeypatch)
    world.living = {1}
    result = run_task(world, monkeypatch)
    assert codes(result) == ["reset_under_way"]
    assert world.drained, "it must not let requests in while the other one works"
    world.living = set()
    assert run_task(world, monkeypatch)["outcome"] == "verified"


def test_unknown_controller_has_its_time_to_drain(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    kill_in_drain(world, monkeypatch)
    monkeypatch.setattr(action_plugin.Process, "parse", staticmethod(lambda _document: None))
    assert codes(run_task(world, monkeypatch)) == ["reset_under_way"]
    world.clock += 181  # 60 s for the hook, 120 s for the rest
    assert run_task(world, monkeypatch)["outcome"] == "verified"


def test_failed_drain_touches_nothing_and_lets_requests_in(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    class DrainFails(FakeHook):
        def __init__(self, option: dict[str, Any], *ports: Any) -> None:
            super().__init__(option, *ports)
            self.complaint = "command drain: status 1, it said: no such server" if self.drains else ""

    world.drained = True
    monkeypatch.setattr("tests.support.gpu_reset_world.FakeHook", DrainFails)
    result = run_task(world, monkeypatch)
    assert result["outcome"] == "aborted"
    assert "no such server" in result["msg"]
    assert not world.drained
    assert world.ledger.runs()[0].host_phases == []


def test_failed_undrain_is_made_good_by_the_next_run(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    class UndrainFails(FakeHook):
        def __init__(self, option: dict[str, Any], *ports: Any) -> None:
            super().__init__(option, *ports)
            self.complaint = "" if self.drains else "POST https://…: status 500"

    with monkeypatch.context() as patched:
        patched.setattr("tests.support.gpu_reset_world.FakeHook", UndrainFails)
        result = run_task(world, patched)
    assert result["failed"]
    assert result["drained"]
    assert "status 500" in result["msg"]
    result = run_task(world, monkeypatch)
    assert result["outcome"] == "verified"
    assert not world.drained
    assert len(world.resets) == 1


def test_lost_connection_is_waited_for(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    original = action_plugin.Lead._ask

    def ask(self: Any, step: str, **more: Any) -> dict[str, Any]:
        asked.append(step)
        answer = original(self, step, **more)
        # The answer to every second call is lost: the step was done all the same.
        if step not in ("open", "plan") and len(asked) % 2:
            raise AnsibleConnectionFailure("Connection closed by remote host")
        return answer

    monkeypatch.setattr(action_plugin.Lead, "_ask", ask)
    monkeypatch.setattr(action_plugin, "RECONNECT_INTERVAL", 0)
    assert run_task(world, monkeypatch)["outcome"] == "verified"
    assert len(world.resets) == 1
    assert world.ledger.unfinished() is None
    assert any("the connection is lost" in line for line in world.said)


def test_answer_that_is_cut_is_asked_for_again(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """A killed ssh is no lost connection for Ansible, but a module that answered nonsense."""
    original = action_plugin.Lead._ask
    asked: list[str] = []

    def ask(self: Any, step: str, **more: Any) -> dict[str, Any]:
        asked.append(step)
        answer = original(self, step, **more)
        if step not in ("open", "plan") and len(asked) % 2:
            raise action_plugin.CutError("Module result deserialization failed: No start of json char found")
        return answer

    monkeypatch.setattr(action_plugin.Lead, "_ask", ask)
    monkeypatch.setattr(action_plugin, "RECONNECT_INTERVAL", 0)
    assert run_task(world, monkeypatch)["outcome"] == "verified"
    assert len(world.resets) == 1


def test_module_that_never_answers_is_given_up(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    original = action_plugin.Lead._ask

    def ask(self: Any, step: str, **more: Any) -> dict[str, Any]:
        if step == "watch":
            raise action_plugin.CutError("/usr/bin/python3: not found")
        return original(self, step, **more)

    monkeypatch.setattr(action_plugin.Lead, "_ask", ask)
    monkeypatch.setattr(action_plugin, "RECONNECT_INTERVAL", 0)
    result = run_task(world, monkeypatch)
    assert result["failed"]
    assert "python3: not found" in result["msg"]
    assert "run this task again" in result["msg"]


def test_connection_that_stays_lost_leaves_the_host_to_itself(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    original = action_plugin.Lead._ask

    def ask(self: Any, step: str, **more: Any) -> dict[str, Any]:
        if step == "watch":
            raise AnsibleConnectionFailure("No route to host")
        return original(self, step, **more)

    with monkeypatch.context() as patched:
        patched.setattr(action_plugin.Lead, "_ask", ask)
        patched.setattr(action_plugin, "RECONNECT", 0)
        with pytest.raises(AnsibleConnectionFailure, match="run this task again"):
            run_task(world, patched)
    world.background()
    assert len(world.resets) == 1
    assert as_before(world)
    assert world.drained
    result = run_task(world, monkeypatch)
    assert result["outcome"] == "verified"
    assert result["resumed"]
    assert not world.drained
    assert len(world.resets) == 1


def test_host_restarted_between_plan_and_act(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    class Restarts(FakeHook):
        def run(self) -> str:
            if self.drains:
                self.world.mends = False
                self.world.reboot()
                self.world.living = {self.world.controllers}
            return super().run()

    monkeypatch.setattr("tests.support.gpu_reset_world.FakeHook", Restarts)
    result = run_task(world, monkeypatch)
    assert result["outcome"] == "aborted"
    assert codes(result) == ["boot_changed"]
    assert world.resets == []
    assert not world.drained


def test_too_many_resets(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    for _attempt in range(2):
        world.needs[UUID] = "reset"
        assert run_task(world, monkeypatch)["outcome"] == "verified"
    world.needs[UUID] = "reset"
    result = run_task(world, monkeypatch)
    assert codes(result) == ["too_many_resets"]
    assert len(world.resets) == 2


def test_index_is_refused_without_asking_the_host(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    problems = action_plugin._option_problems({**_numbers(), "uuid": "2"})
    assert "index 2" in str(problems[0])
    assert action_plugin._option_problems({**_numbers(), "uuid": UUID, "max_resets": 0})[0].code == "option"


def _numbers() -> dict[str, Any]:
    return {**dict.fromkeys(action_plugin.POSITIVE, 1), "drain": None, "undrain": None}


def test_ledger_that_cannot_be_written_stops_before_anything(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    world.full = 0
    result = run_task(world, monkeypatch)
    assert result["failed"]
    assert "no space left" in result["msg"]
    assert world.resets == []
    assert not world.drained
    assert as_before(world)


def test_worker_that_dies_every_time_is_given_up(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    def dies(*_arguments: Any) -> str:
        raise Killed

    with monkeypatch.context() as patched:
        patched.setattr("tests.support.gpu_reset_world.WorldHost.stop", dies)
        patched.setattr("tests.support.gpu_reset_world.WorldHost.unit", dies)
        patched.setattr(
            "tests.support.gpu_reset_world.WorldHost.facts",
            _facts_without_units,
        )
        result = run_task(world, patched)
    assert result["outcome"] == "failed"
    assert "died" in result["msg"]
    assert result["next_step"] == "run_again"
    assert run_task(world, monkeypatch)["outcome"] == "verified"
    assert as_before(world)


def _facts_without_units(host: Any, request: Any) -> Any:
    from ansible_collections.ringmaster.inference.plugins.module_utils.gpu_reset import Facts, Unit

    units = {name: Unit(name, "loaded", "active") for name in (*request.services, DAEMON)}
    return Facts(host.world.clock, host.boot_id(), True, host.cards(), units=units)


def test_refused_attempts_are_in_the_ledger(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    world.needs[UUID] = "none"
    world.held = (Holder(99, "engine", "engine", ENGINE, "/dev/nvidia1", "open"),)
    assert codes(run_task(world, monkeypatch, reason="memory is full")) == ["memory_full"]
    (record,) = Ledger(world.ledger.directory).read()[0]
    assert record["event"] == "refused"
    assert record["uuid"] == UUID
    assert record["reason"] == "memory is full"


KEYWORDS = {
    "until": "register: answer\n      until: answer is succeeded\n      retries: 1\n      delay: 0",
    "retries": "retries: 1\n      delay: 0",
    "async": "async: 60",
    "poll": "poll: 15",
}


@pytest.mark.parametrize("keyword", KEYWORDS)
def test_keywords_that_run_a_task_again_or_unwatched_are_refused(controller: Controller, keyword: str) -> None:
    controller.write("inventory.yml", "all: {hosts: {localhost: {ansible_connection: local}}}")
    playbook = controller.write(
        "play.yml",
        f"""
- hosts: localhost
  gather_facts: false
  tasks:
    - ringmaster.inference.gpu_reset:
        uuid: {UUID}
      {KEYWORDS[keyword]}
""",
    )
    finished = controller.play(playbook)
    assert finished.returncode != 0
    assert "a task that runs once and is waited for" in finished.stdout
    assert keyword in finished.stdout


def test_wrong_name_of_a_card_is_refused_before_a_connection(controller: Controller) -> None:
    controller.write(
        "inventory.yml", "all: {hosts: {gpu-1: {ansible_host: 192.0.2.1, ansible_ssh_executable: /nowhere}}}"
    )
    playbook = controller.write(
        "play.yml",
        """
- hosts: all
  gather_facts: false
  tasks:
    - ringmaster.inference.gpu_reset:
        uuid: "0000:07:00.0"
        drain: {url: "https://scheduler", headers: {Authorization: SECRET-of-the-hook}}
      ignore_errors: true
      register: refused
    - ansible.builtin.debug:
        var: refused
""",
    )
    finished = controller.play(playbook, "-vvv")
    assert "the PCI address 0000:07:00.0" in finished.stdout
    assert "SECRET" not in finished.stdout
    assert '"outcome": "refused"' in finished.stdout


def test_hook_needs_exactly_one_way(controller: Controller) -> None:
    controller.write("inventory.yml", "all: {hosts: {localhost: {ansible_connection: local}}}")
    task = {"uuid": UUID, "drain": {"url": "https://scheduler", "command": ["drain"]}}
    playbook = controller.write(
        "play.yml",
        "- hosts: localhost\n  gather_facts: false\n  tasks:\n"
        f"    - ringmaster.inference.gpu_reset: {json.dumps(task)}\n",
    )
    finished = controller.play(playbook)
    assert "mutually exclusive: url|command" in finished.stdout
