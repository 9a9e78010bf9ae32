# SPDX-License-Identifier: GPL-3.0-or-later
"""A host and its controller made up for tests of gpu_reset: what runs can be killed before or after anything it does.

What outlives a kill is the world's: services, persistence mode, cards, the ledger (a real one), whether the engine is
drained. What does not is the process that was killed, which raises :class:`Killed`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import ansible_collections.ringmaster.inference.plugins.action.gpu_reset as action_plugin
import ansible_collections.ringmaster.inference.plugins.modules.gpu_reset as module
from ansible_collections.ringmaster.inference.plugins.module_utils.commands import Answer
from ansible_collections.ringmaster.inference.plugins.module_utils.file_tree import FileTree
from ansible_collections.ringmaster.inference.plugins.module_utils.gpu_reset import (
    Card,
    Facts,
    Holder,
    Link,
    Request,
    Unit,
)
from ansible_collections.ringmaster.inference.plugins.module_utils.gpu_reset_ledger import Ledger, LedgerError, Process
from ansible_collections.ringmaster.inference.plugins.module_utils.gpu_reset_options import ARGUMENTS
from ansible_collections.ringmaster.inference.plugins.module_utils.gpu_reset_processes import Processes
from ansible_collections.ringmaster.inference.plugins.module_utils.gpu_reset_sequence import HostError
from ansible_collections.ringmaster.inference.plugins.module_utils.gpu_reset_steps import Steps
from ansible_collections.ringmaster.inference.plugins.module_utils.gpu_reset_worker import Workers, work

UUID = "GPU-00000000-0000-0000-0000-000000000001"
OTHER = "GPU-00000000-0000-0000-0000-000000000002"
ENGINE = "engine@main.service"
EXPORTER = "exporter.service"
DAEMON = "nvidia-persistenced.service"


class Killed(BaseException):
    """The process that was running is gone. Not an Exception: nothing may catch it on the way."""


class PowerLost(Killed):
    """The host is gone with all its processes, and comes back with another boot."""


def card(uuid: str = UUID, **values: Any) -> Card:
    """An L40S that is well, unless `values` say otherwise."""
    known: dict[str, Any] = {
        "pci_address": f"0000:0{uuid[-1]}:00.0",
        "model": "NVIDIA L40S",
        "architecture": 8,
        "minor": int(uuid[-1]),
        "recovery_action": "none",
        "persistence": False,
        "ecc_current": True,
        "ecc_pending": True,
        "rows_pending": False,
        "rows_failed": False,
        "processes": (),
    }
    return Card(uuid, **{**known, **values})


def links(*peers: str, up: bool = True) -> tuple[Link, ...]:
    """NVLinks to cards at these PCI addresses; ``switch`` is an NVSwitch."""
    return tuple(
        Link(number, up, "switch" if peer == "switch" else "gpu", None if peer == "switch" else peer)
        for number, peer in enumerate(peers)
    )


@dataclass
class World:
    """One host. `left` counts down to the next kill of what is running (None: never), `kill` is how it dies.

    Faults: `stuck` units do not stop, `broken` units do not start, `held` is who has the card open, `smi` is
    nvidia-smi's answer to a reset, `mends` is whether a reset helps, `full` counts down to a ledger with a full disk.
    """

    directory: Path
    enabled: bool = True
    recovery: str = "reset"
    boot: int = 1
    clock: float = 1_000_000.0
    left: int | None = None
    kill: type[Killed] = Killed
    active: dict[str, bool] = field(default_factory=lambda: {ENGINE: True, EXPORTER: True, DAEMON: True})
    persistence: dict[str, bool] = field(default_factory=lambda: {UUID: True, OTHER: True})
    needs: dict[str, str] = field(default_factory=dict)
    resets: list[tuple[str, ...]] = field(default_factory=list)
    drained: bool = False
    stuck: set[str] = field(default_factory=set)
    broken: set[str] = field(default_factory=set)
    held: tuple[Holder, ...] = ()
    smi: Answer = field(default_factory=lambda: Answer(0, "GPU was successfully reset."))
    mends: bool = True
    full: int | None = None
    unit_of_worker: str = ""
    lost: set[str] = field(default_factory=set)
    said: list[str] = field(default_factory=list)
    controllers: int = 0
    living: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.needs = {UUID: self.recovery, OTHER: "none"}
        self.ledger: Ledger = WorldLedger(self)

    def moment(self) -> None:
        """A moment in which the running process may be killed."""
        if self.left is not None:
            self.left -= 1
            if self.left < 0:
                self.left = None
                raise self.kill

    def act(self, effect: Callable[[], Any]) -> Any:
        """Do something that lasts; the kill may come just before or just after it."""
        self.moment()
        result = effect()
        self.moment()
        return result

    def reboot(self) -> None:
        """Lose all that runs. A boot resets every card; services that are enabled start with it."""
        self.boot += 1
        self.unit_of_worker = ""
        self.living.clear()
        self.persistence = dict.fromkeys(self.persistence, self.enabled)
        self.active = dict.fromkeys(self.active, self.enabled)
        if self.mends:
            self.needs = dict.fromkeys(self.needs, "none")

    def background(self) -> None:
        """Let the worker that systemd has run; it is started again when it was killed."""
        starts = 0
        while self.unit_of_worker:
            starts += 1
            assert starts < 20, "a worker that dies for ever must be given up"
            try:
                work(self.unit_of_worker, self.ledger, WorldHost(self), Process(f"boot-{self.boot}", "pid", starts, 1))
            except PowerLost:
                self.reboot()
            except (Killed, LedgerError):
                if self.full is not None and starts > 5:
                    self.unit_of_worker = ""  # systemd's own limit
                continue
            else:
                self.unit_of_worker = ""


class WorldLedger(Ledger):
    """The ledger in the world's directory: a kill may come before or after a line, and the disk may be full."""

    def __init__(self, world: World) -> None:
        super().__init__(str(world.directory / "gpu_reset"))
        self.world = world

    def append(self, event: str, run: str, **more: Any) -> None:
        if self.world.full is not None:
            self.world.full -= 1
            if self.world.full < 0:
                raise LedgerError("no space left on device")
        self.world.act(lambda: Ledger.append(self, event, run, **more))


class WorldHost:
    """The world as the sequence and the steps see it."""

    def __init__(self, world: World) -> None:
        self.world = world

    def boot_id(self) -> str:
        return f"boot-{self.world.boot}"

    def uptime(self) -> float:
        return self.world.clock

    def facts(self, request: Request) -> Facts:
        return Facts(
            now=self.world.clock,
            boot_id=self.boot_id(),
            root=True,
            cards=self.cards(),
            holders=self.world.held,
            units={name: self.unit(name) for name in (*request.services, DAEMON)},
            runs=tuple(self.world.ledger.runs()),
        )

    def cards(self) -> tuple[Card, ...]:
        self.world.moment()
        if self.world.lost:
            raise HostError("NVML does not answer")
        return tuple(
            card(uuid, recovery_action=self.world.needs[uuid], persistence=self.world.persistence[uuid])
            for uuid in (UUID, OTHER)
        )

    def unit(self, name: str) -> Unit:
        if name not in self.world.active:
            return Unit(name, "not-found", "inactive")
        return Unit(name, "loaded", "active" if self.world.active[name] else "inactive")

    def stop(self, unit: str, seconds: float) -> str:
        if unit in self.world.stuck:
            self.world.moment()
            return f"it in state deactivating after {seconds:g} s"
        self.world.act(lambda: self.world.active.update({unit: False}))
        if unit == DAEMON:
            self.world.persistence = dict.fromkeys(self.world.persistence, False)
        return ""

    def start(self, unit: str, seconds: float) -> str:
        if unit in self.world.broken:
            self.world.moment()
            return f"it in state failed after {seconds:g} s"
        self.world.act(lambda: self.world.active.update({unit: True}))
        if unit == DAEMON:
            self.world.persistence = dict.fromkeys(self.world.persistence, True)
        return ""

    def set_persistence(self, uuid: str, on: bool) -> str:
        self.world.act(lambda: self.world.persistence.update({uuid: on}))
        return ""

    def reset(self, uuids: Sequence[str], seconds: float) -> Answer:
        world = self.world
        run = world.ledger.unfinished()
        assert run is not None
        assert run.phase == "reset", "the ledger must know of it before"
        assert run.boot_id == self.boot_id(), "the host was restarted since the plan"
        assert not any(world.active[name] for name in run.plan["services"]), "services must be stopped"
        assert not world.held, "nothing may hold the card"
        assert not any(world.persistence[uuid] for uuid in uuids), "persistence mode must be off"
        world.moment()
        world.resets.append((run.name, *uuids))
        if world.smi.ok and world.mends:
            world.needs.update(dict.fromkeys(uuids, "none"))
        world.moment()
        return world.smi

    def running_reset(self) -> str:
        return ""

    def log_position(self) -> str:
        return str(self.world.clock)

    def xids(self, position: str, addresses: Sequence[str]) -> list[int] | None:
        return []

    def monotonic(self) -> float:
        return self.world.clock

    def sleep(self, seconds: float) -> None:
        self.world.clock += seconds


class WorldProcesses(Processes):
    """The controller's processes: those that the world lets live."""

    def __init__(self, world: World) -> None:
        super().__init__(FileTree("/"))
        self.world = world

    def runs(self, process: Process) -> bool | None:
        return process.pid in self.world.living


class WorldWorkers(Workers):
    """systemd, which runs the worker whenever the world lets it."""

    def __init__(self, world: World) -> None:
        self.world = world

    def alive(self) -> bool:
        return bool(self.world.unit_of_worker)

    def start(self, run: str) -> str:
        self.world.act(lambda: setattr(self.world, "unit_of_worker", run))
        return ""


def steps_of(world: World) -> Steps:
    """The module's steps on the world's host."""

    def sleep(seconds: float) -> None:
        world.clock += seconds
        world.background()

    host: Any = WorldHost(world)
    return Steps(world.ledger, host, WorldWorkers(world), sleep, lambda: world.clock)


class FakeHook:
    """A hook that drains the world's engine, or lets requests in again."""

    world: World
    complaint = ""

    def __init__(self, option: dict[str, Any], *_ports: Any) -> None:
        self.drains = option["command"][0] == "drain"

    def run(self) -> str:
        if self.complaint:
            self.world.moment()
            return self.complaint
        self.world.act(lambda: setattr(self.world, "drained", self.drains))
        return ""


def options(**given: Any) -> dict[str, Any]:
    """The task's options as the action plugin gets them, with defaults."""
    known = {name: argument.get("default") for name, argument in ARGUMENTS.items()}
    hook = {"url": None, "where": "controller", "timeout": 60}
    known.update(
        uuid=UUID,
        services=[ENGINE, EXPORTER],
        drain={**hook, "command": ["drain"]},
        undrain={**hook, "command": ["undrain"]},
    )
    return {**known, **given}


def run_task(
    world: World, monkeypatch: Any, *, check: bool = False, diff: bool = False, **given: Any
) -> dict[str, Any]:
    """One task from its begin to its end. Raises Killed if the controller is killed."""
    FakeHook.world = world
    monkeypatch.setattr(action_plugin, "Hook", FakeHook)
    steps = steps_of(world)

    def execute(module_name: str, module_args: dict[str, Any], task_vars: dict[str, Any]) -> dict[str, Any]:
        world.moment()
        arguments = dict(module_args)
        asked = arguments.pop("internal")
        try:
            answer = {"changed": False, **module.perform(steps, arguments, asked)}
        except (LedgerError, HostError) as error:
            answer = {"failed": True, "msg": str(error), "ledger": world.ledger.path}
        except PowerLost:
            world.reboot()
            raise
        world.moment()
        return answer

    fake_action: Any = SimpleNamespace(
        _task=SimpleNamespace(check_mode=check, diff=diff),
        _execute_module=execute,
        _display=SimpleNamespace(display=world.said.append),
    )
    lead = action_plugin.Lead(fake_action, options(**given), {"inventory_hostname": "gpu-1"})
    world.controllers += 1
    number = world.controllers
    world.living.add(number)
    lead.by = Process("controller", "pid", number, 1).document()
    lead.processes = WorldProcesses(world)
    try:
        return lead.carry_out()
    except action_plugin.StepError as error:
        return {"outcome": "failed", "failed": True, "msg": str(error), "next_step": "run_again"}
    finally:
        world.living.discard(number)


def as_before(world: World) -> bool:
    """Whether services and persistence mode are as they were at the world's begin."""
    return all(world.active.values()) and all(world.persistence.values())
