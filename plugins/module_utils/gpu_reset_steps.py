# Copyright (c) 2026, the Ringmaster authors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What the controller asks of the host during a reset, one step a call.

Each step may be asked twice, since a controller that lost its connection can't know whether the first one arrived.
Nothing here imports Ansible.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Mapping
from typing import Any

from ansible_collections.ringmaster.inference.plugins.module_utils.gpu_reset import (
    Problem,
    Request,
    unit_name,
)
from ansible_collections.ringmaster.inference.plugins.module_utils.gpu_reset_host import SystemHost
from ansible_collections.ringmaster.inference.plugins.module_utils.gpu_reset_ledger import Ledger, LedgerError, Run, now
from ansible_collections.ringmaster.inference.plugins.module_utils.gpu_reset_sequence import (
    HostError,
    Outcome,
    settled_plan,
)
from ansible_collections.ringmaster.inference.plugins.module_utils.gpu_reset_worker import UNIT, Workers

# A process that only looks at the cards (nvidia-smi) has them open for a moment.
PASSING_BY = 3.0  # seconds
WATCH_INTERVAL = 0.5  # seconds


class Steps:
    """The steps on one host. Each gives a dictionary for the controller, with ``problems`` if it can't be done.

    Raises HostError and LedgerError.
    """

    def __init__(
        self,
        ledger: Ledger,
        host: SystemHost,
        workers: Workers,
        sleep: Callable[[float], None] = time.sleep,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self.ledger, self.host, self.workers = ledger, host, workers
        self._sleep, self._monotonic = sleep, monotonic

    def plan(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """What a reset would do and what speaks against it; nothing is written."""
        unfinished = self.ledger.unfinished()
        request, problems = request_of(options)
        plan = None
        # What is unfinished is finished first, and the cards may not even be there until then.
        if not problems and (unfinished is None or options["unfinished"] == "abandon"):
            try:
                plan, problems = settled_plan(self.host, request, PASSING_BY)
            except HostError as error:
                to_do = "see what `nvidia-smi` and the kernel log (xid_info) say; a reset through the driver needs both"
                problems = [Problem("cards", "to read the cards", str(error), to_do)]
        return {
            "unfinished": None if unfinished is None else self.describe(unfinished),
            "boot_id": self.host.boot_id(),
            "plan": None if plan is None else plan.document(),
            "problems": [problem.document() for problem in problems],
            "damaged_lines": self.ledger.read()[1],
        }

    def open(
        self, options: Mapping[str, Any], by: Mapping[str, Any] | None, lease: float, drain: bool
    ) -> dict[str, Any]:
        """Open a run, unless one is unfinished or something speaks against it (which is written down, too)."""
        with self.ledger.locked():
            found = self.plan(options)
            if found["unfinished"] is not None:
                return found
            if found["problems"]:
                self.ledger.append(
                    "refused",
                    "",
                    uuid=options["uuid"],
                    boot_id=found["boot_id"],
                    reason=options.get("reason") or "",
                    problems=found["problems"],
                )
                return found
            name = f"{now().replace('-', '').replace(':', '')}-{secrets.token_hex(4)}"
            plan = {
                **found["plan"],
                "request": request_of(options)[0].document(),
                "limits": {part: options[f"{part}_timeout"] for part in ("stop", "start", "reset", "verify")},
            }
            self.ledger.append(
                "opened",
                name,
                uuid=options["uuid"],
                boot_id=found["boot_id"],
                uptime_seconds=self.host.uptime(),
                lease_seconds=lease,
                opened_by=by,
                plan=plan,
            )
            if drain:
                self.ledger.append("phase", name, phase="drain")
            return {**found, "run": name}

    def begin(self, name: str, key: str, by: Mapping[str, Any] | None) -> dict[str, Any]:
        """Hand the run over to a worker. `key` tells a call that is asked again from a new one."""
        with self.ledger.locked():
            run = self._run(name)
            if run.closed:
                return self._refused(run, _ended(run))
            alive = self.workers.alive()
            if key not in run.handed and not alive:
                if not run.handed and run.outcome is not None:
                    return self._refused(run, _ended(run))
                if not run.handed and self.host.boot_id() != run.boot_id:
                    found = f"another boot ({self.host.boot_id()}): the host was restarted since the plan was made"
                    return self._refused(
                        run,
                        Problem("boot_changed", f"the boot {run.boot_id}", found, "run this task again"),
                    )
                if run.outcome is None or run.outcome.get("result") == "failed" or self._stale(run):
                    self.ledger.append("handed", name, key=key, by=by, boot_id=self.host.boot_id())
                    run = self._run(name)
            if run.outcome is None and not alive:
                complaint = self.workers.start(name)
                if complaint:
                    to_do = f"see what systemd says (`journalctl --unit {UNIT}`), then run this task again"
                    return self._refused(run, Problem("worker", "to start the worker", complaint, to_do))
            return self.describe(run)

    def watch(self, name: str, seen: int, seconds: float) -> dict[str, Any]:
        """The run as soon as there is more of it than `seen` phases, it has ended, or `seconds` are over."""
        end = self._monotonic() + seconds
        while True:
            # The worker first: one that has just ended wrote its outcome before.
            alive = self.workers.alive()
            run = self._run(name)
            if run.outcome is not None or run.closed or not alive or len(run.phases) > seen:
                return self.describe(run, alive)
            if self._monotonic() >= end:
                return self.describe(run, alive)
            self._sleep(WATCH_INTERVAL)

    def abort(self, name: str, why: Mapping[str, str]) -> dict[str, Any]:
        """End a run whose host part was not begun."""
        with self.ledger.locked():
            run = self._run(name)
            if run.handed or run.closed:
                return self._refused(run, _ended(run))
            if run.outcome is None:
                problem = Problem(why["code"], why["expected"], why["found"], why["to_do"])
                self.ledger.append(
                    "outcome", name, outcome=Outcome("aborted", False, False, (problem,), "", None).document()
                )
            return self.describe(self._run(name))

    def note(self, name: str, phase: str) -> dict[str, Any]:
        """Write down that the controller begins a phase."""
        self.ledger.append("phase", self._run(name).name, phase=phase)
        return self.describe(self._run(name))

    def close(self, name: str, how: str) -> dict[str, Any]:
        """Write down that nothing is left to be done for a run."""
        with self.ledger.locked():
            run = self._run(name)
            if how == "abandoned" and self.workers.alive():
                problem = Problem(
                    "reset_under_way",
                    "no worker",
                    f"that {UNIT} runs",
                    "wait until it has ended, then run this task again",
                )
                return self._refused(run, problem)
            if not run.closed:
                self.ledger.append("closed", name, how=how)
            return self.describe(self._run(name))

    def describe(self, run: Run, alive: bool | None = None) -> dict[str, Any]:
        """The run for the controller."""
        same_boot = self.host.boot_id() == run.boot_id
        left = run.opened_seconds + run.lease_seconds - self.host.uptime() if same_boot else 0.0
        return {
            "run": run.name,
            "uuid": run.uuid,
            "uuids": run.uuids,
            "plan": run.plan,
            "opened_at": run.opened_at,
            "opened_by": run.opened_by.document() if run.opened_by else None,
            "lease_left_seconds": round(max(left, 0.0)),
            "same_boot": same_boot,
            "handed": len(run.handed),
            "phases": run.phases,
            "reset_at": run.reset_at,
            "outcome": run.outcome,
            "stale": self._stale(run),
            "closed": run.closed,
            "alive": self.workers.alive() if alive is None else alive,
            "problems": [],
        }

    def _stale(self, run: Run) -> bool:
        """Whether the host was restarted since the outcome of its part: its services may not run now."""
        return bool(run.handed) and run.outcome is not None and run.outcome_boot_id != self.host.boot_id()

    def _run(self, name: str) -> Run:
        run = self.ledger.run(name)
        if run is None:
            raise LedgerError(
                f"Expected the run {name} in {self.ledger.path}. Found no such run. To do: run this task again."
            )
        return run

    def _refused(self, run: Run, problem: Problem) -> dict[str, Any]:
        return {**self.describe(run), "problems": [problem.document()]}


def request_of(options: Mapping[str, Any]) -> tuple[Request, list[Problem]]:
    """The request that the module's options describe, and what is wrong with its unit names."""
    problems = []
    services = []
    for text in options.get("services") or []:
        name = unit_name(text)
        if name is None:
            expected = "names of units of systemd, without patterns"
            problems.append(Problem("unknown_service", expected, repr(text[:80]), "name each unit in services"))
        elif name not in services:
            services.append(name)
    request = Request(
        uuid=options["uuid"],
        reason=options.get("reason") or "",
        services=tuple(services),
        max_resets=options["max_resets"],
        window=float(options["window"]),
    )
    return request, problems


def _ended(run: Run) -> Problem:
    found = f"that it was ended by another task ({run.closed or (run.outcome or {}).get('result', 'taken over')})"
    return Problem(
        "run_ended", f"the run {run.name} to be unfinished", found, "look at the ledger and run this task again"
    )
