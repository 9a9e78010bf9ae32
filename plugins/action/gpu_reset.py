# Copyright (c) 2026, the Ringmaster authors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

import json
import os
import time
import uuid
from collections.abc import Mapping
from typing import Any

from ansible.errors import AnsibleConnectionFailure, AnsibleError
from ansible.module_utils.urls import open_url
from ansible.plugins.action import ActionBase

from ansible_collections.ringmaster.inference.plugins.module_utils.commands import CommandRunner
from ansible_collections.ringmaster.inference.plugins.module_utils.file_tree import FileTree
from ansible_collections.ringmaster.inference.plugins.module_utils.gpu_reset import (
    NEXT_STEPS,
    Plan,
    Problem,
    check_uuid,
)
from ansible_collections.ringmaster.inference.plugins.module_utils.gpu_reset_hooks import Hook, describe
from ansible_collections.ringmaster.inference.plugins.module_utils.gpu_reset_ledger import Process
from ansible_collections.ringmaster.inference.plugins.module_utils.gpu_reset_options import ARGUMENTS, POSITIVE
from ansible_collections.ringmaster.inference.plugins.module_utils.gpu_reset_processes import Processes

MODULE = "ringmaster.inference.gpu_reset"
# How long a host that can't be reached is asked again while its worker goes on.
RECONNECT = 180.0  # seconds
RECONNECT_INTERVAL = 3.0  # seconds
# One call waits this long for news; a connection that is idle for longer may be cut on its way.
WATCH = 20.0  # seconds
# What the steps before and after the drain hook may take, beyond the hook itself.
LEASE = 120.0  # seconds
# A worker that is gone without an outcome is started again so often by one task.
MOST_RESTARTS = 2


# Calls that end without an answer may do so this often, one after the other.
MOST_CUTS = 3


class StepError(Exception):
    """The host could not do a step; the text says why."""


class CutError(StepError):
    """The module was cut before it answered, as when its ssh is killed; or it can't run on this host at all."""


class ActionModule(ActionBase):  # type: ignore[misc] # ansible carries no types
    """Leads a card's reset from the controller; see the module's documentation."""

    _supports_check_mode = True
    _supports_async = False
    TRANSFERS_FILES = False

    def run(self, tmp: str | None = None, task_vars: dict[str, Any] | None = None) -> dict[str, Any]:
        problems = self._task_problems()
        if problems:
            return {"changed": False, **_refused(problems)}
        result: dict[str, Any] = super().run(tmp, task_vars)
        _validation, options = self.validate_argument_spec(ARGUMENTS)
        problems = _option_problems(options)
        if problems:
            return {**result, "changed": False, **_refused(problems)}
        lead = Lead(self, options, task_vars or {})
        try:
            result.update(lead.carry_out())
        except StepError as error:
            result.update(_base(), failed=True, changed=lead.touched, outcome="failed", msg=str(error))
            if lead.run_name:
                result.update(run=lead.run_name, next_step="run_again")
        result.update(lead.passed_on)
        return result

    def _task_problems(self) -> list[Problem]:
        """Keywords that would run a reset twice, or without anyone who waits for it."""
        given = self._task.get_ds() or {}
        found = [
            name
            for name, set_here in (
                ("until", bool(self._task.until)),
                ("retries", self._task.retries is not None),
                ("async", bool(self._task.async_val)),
                ("poll", isinstance(given, Mapping) and "poll" in given),
            )
            if set_here
        ]
        if not found:
            return []
        return [
            Problem(
                "task_keyword",
                "a task that runs once and is waited for",
                f"the keywords {', '.join(found)}",
                "remove them: a reset is never repeated by itself, and goes on by itself when the connection is lost",
            )
        ]


class Lead:
    """One task's way through a run."""

    def __init__(self, action: ActionModule, options: dict[str, Any], task_vars: dict[str, Any]) -> None:
        self.action, self.task_vars = action, task_vars
        self.options = {name: value for name, value in options.items() if name not in ("drain", "undrain")}
        self.hooks = {"drain": options.get("drain"), "undrain": options.get("undrain")}
        self.processes = Processes(FileTree("/"))
        here = self.processes.identity(os.getpid())
        self.by = here.document() if here else None
        self.host_name = task_vars.get("inventory_hostname", "")
        self.run_name = ""
        self.touched = self.resumed = self.closed = False
        self.shown = 0
        self.passed_on: dict[str, Any] = {}

    def carry_out(self) -> dict[str, Any]:
        """The task's result. Raises StepError and AnsibleConnectionFailure."""
        if self.action._task.check_mode:
            return self._planned(self._ask("plan"))
        found = self._open()
        if found["unfinished"] is not None:
            ended = self._abandon(found) if self.options["unfinished"] == "abandon" else self._settle(found)
            if ended is not None:
                return ended
            found = self._open()
        if found["unfinished"] is not None:
            return self._refuse(found, [_another(found["unfinished"], "that another task has opened it just now")])
        if found["problems"]:
            return self._refuse(found, found["problems"])
        self.run_name, self.shown, self.resumed = found["run"], 0, False
        for warning in found["plan"]["warnings"]:
            self._say(warning)
        if self.hooks["drain"]:
            complaint = self._hook("drain")
            if complaint:
                problem = Problem(
                    "drain", "the drain hook to succeed", complaint, "mend the hook, then run this task again"
                )
                return self._finish(self._ask_again("abort", run=self.run_name, why=problem.document()))
        return self._finish(self._work(self.run_name))

    # The run

    def _open(self) -> dict[str, Any]:
        hook = self.hooks["drain"]
        lease = LEASE + (float(hook["timeout"]) if hook else 0.0)
        return self._ask("open", by=self.by, lease=lease, drain=bool(hook))

    def _work(self, run: str) -> dict[str, Any]:
        """Hand the run over to the host and wait for its outcome, as long as there is a worker."""
        self.touched = True
        state = self._begin(run)
        restarts = 0
        while state["outcome"] is None and not state["problems"]:
            state = self._ask_again("watch", run=run, seen=len(state["phases"]), seconds=WATCH)
            self._show(state)
            if state["outcome"] is None and not state["alive"]:
                if restarts == MOST_RESTARTS:
                    break
                restarts += 1
                self._say("the worker on the host is gone without an outcome; it is started again")
                state = self._begin(run)
        self._show(state)
        return state

    def _begin(self, run: str) -> dict[str, Any]:
        state = self._ask_again("begin", run=run, key=uuid.uuid4().hex, by=self.by)
        if state["problems"] and not state["handed"] and state["outcome"] is None:
            # Nothing was begun on the host: the run ends here.
            return self._ask_again("abort", run=run, why=state["problems"][0])
        return state

    def _settle(self, found: dict[str, Any]) -> dict[str, Any] | None:
        """Finish the unfinished run of the host. None: it ended with everything as before, a new one may begin."""
        state = found["unfinished"]
        if state["uuid"] != self.options["uuid"]:
            return self._refuse(found, [_another(state, f"the run {state['run']} of {state['uuid']}")])
        owner = Process.parse(state["opened_by"])
        # An earlier item of a loop is the same process, and is over.
        ours = owner is not None and owner.document() == self.by
        alive = self.processes.runs(owner) and not ours if owner else None
        if alive:
            return self._refuse(
                found, [_another(state, f"process {state['opened_by']['pid']} of this controller at it")]
            )
        if alive is None and not state["handed"] and state["lease_left_seconds"]:
            left = f"a run of another controller that may still drain the card for {state['lease_left_seconds']} s"
            return self._refuse(found, [_another(state, left)])
        self.resumed, self.run_name, self.shown = True, state["run"], len(state["phases"])
        self._say(f"the run {state['run']} of {state['opened_at']} is unfinished and is finished first")
        if not state["handed"]:
            if state["outcome"] is None:
                problem = Problem(
                    "interrupted",
                    "the controller to begin the host's part",
                    "that it was interrupted before",
                    NEXT_STEPS["run_again"],
                    "run_again",
                )
                state = self._ask_again("abort", run=state["run"], why=problem.document())
        elif state["outcome"] is None or state["outcome"]["result"] == "failed" or state["stale"]:
            state = self._work(state["run"])
        result = self._finish(state)
        if result["outcome"] == "aborted" and self.closed:
            return None
        return result

    def _abandon(self, found: dict[str, Any]) -> dict[str, Any] | None:
        state = self._ask("close", run=found["unfinished"]["run"], how="abandoned")
        if state["problems"]:
            return self._refuse(found, state["problems"])
        self._say(f"the run {state['run']} of {state['uuid']} is abandoned")
        return None

    def _finish(self, state: dict[str, Any]) -> dict[str, Any]:
        """Let requests in again if the card is fit for it, and close the run."""
        outcome = state["outcome"]
        result = self._result(state)
        result["drained"] = bool(self.hooks["drain"])
        if outcome is None:
            result["problems"] = state["problems"] or [_no_outcome(state).document()]
            result.update(outcome="failed", failed=True, next_step="run_again")
        elif outcome["result"] in ("verified", "aborted"):
            complaint = ""
            if self.hooks["undrain"]:
                if self._ask_again("note", run=state["run"], phase="undrain")["stale"]:
                    self._say("the host was restarted meanwhile; services and card are looked at again")
                    return self._finish(self._work(state["run"]))
                complaint = self._hook("undrain")
            if complaint:
                to_do = "mend the hook, then run this task again: it calls the hook and nothing else"
                problem = Problem("undrain", "the undrain hook to succeed", complaint, to_do)
                result["problems"] = [*result["problems"], problem.document()]
                result.update(failed=True, next_step="run_again")
            else:
                state = self._ask_again("close", run=state["run"], how=outcome["result"])
                result.update(phases=state["phases"], drained=bool(self.hooks["drain"]) and not self.hooks["undrain"])
                self.closed = True
        else:
            self._keep_out(state, result)
            if outcome["result"] == "unknown":
                self._ask_again("close", run=state["run"], how="unknown")
        result["msg"] = _message(result)
        return result

    def _keep_out(self, state: dict[str, Any], result: dict[str, Any]) -> None:
        """Drain the card again if an earlier attempt at this run had let requests in."""
        hooks = [each["phase"] for each in state["phases"] if each["phase"] in ("drain", "undrain")]
        if not self.hooks["drain"] or hooks[-1:] == ["drain"]:
            return
        self._ask_again("note", run=state["run"], phase="drain")
        complaint = self._hook("drain")
        if complaint:
            to_do = "take the card's engine out of service by hand"
            problem = Problem("drain", "the drain hook to succeed", complaint, to_do)
            result["problems"] = [*result["problems"], problem.document()]
            result["drained"] = False

    # Results

    def _result(self, state: dict[str, Any]) -> dict[str, Any]:
        outcome = state["outcome"] or {}
        plan = state["plan"]
        result = {
            **_base(),
            "run": state["run"],
            "changed": self.touched or bool(self.hooks["drain"]),
            "outcome": outcome.get("result", "failed"),
            "failed": outcome.get("result") != "verified",
            "next_step": outcome.get("next_step", ""),
            "problems": outcome.get("problems", []),
            "reset": bool(state["reset_at"]),
            "rebooted": bool(outcome.get("rebooted")),
            "resumed": self.resumed,
            "phases": state["phases"],
            **_of_plan(plan),
        }
        if outcome.get("cards") is not None:
            result["cards_after"] = outcome["cards"]
            if self.action._task.diff:
                result["diff"] = {
                    "before_header": f"cards of {self.host_name}",
                    "after_header": f"cards of {self.host_name}",
                    "before": _lines(plan["cards"]),
                    "after": _lines(outcome["cards"]),
                }
        return result

    def _planned(self, found: dict[str, Any]) -> dict[str, Any]:
        if found["unfinished"] is not None:
            state = found["unfinished"]
            if state["uuid"] == self.options["uuid"] and self.options["unfinished"] == "finish":
                text = f"The run {state['run']} is unfinished; this task would finish it."
                return {**_base(), **_of_plan(state["plan"]), "changed": True, "outcome": "planned", "msg": text}
            if self.options["unfinished"] == "finish":
                return self._refuse(found, [_another(state, f"the run {state['run']} of {state['uuid']}")])
        if found["problems"]:
            return self._refuse(found, found["problems"])
        plan = Plan.parse(found["plan"])
        if plan is None:
            raise AnsibleError(
                "Expected a plan of the host. Found something else. To do: run the task again with -vvv."
            )
        hooks = {name: describe(hook) if hook else "" for name, hook in self.hooks.items()}
        steps = plan.steps(hooks["drain"], hooks["undrain"])
        result = {**_base(), **_of_plan(found["plan"]), "changed": True, "outcome": "planned", "steps": steps}
        result["msg"] = "Would do, in this order: " + "; ".join(steps) + "."
        if self.action._task.diff:
            result["diff"] = {"prepared": "".join(f"{step}\n" for step in steps)}
        return result

    def _refuse(self, found: dict[str, Any], problems: list[Any]) -> dict[str, Any]:
        return {
            **_of_plan(found["plan"]),
            "changed": self.touched,
            **_refused(problems),
            "resumed": self.resumed,
        }

    # The host

    def _ask(self, step: str, **more: Any) -> dict[str, Any]:
        """Have the module do a step on the host."""
        arguments = {**self.options, "internal": {"step": step, **more}}
        if step == "hook":
            # What is not given must not be there: it would count as given.
            option = self.hooks[more["hook"]] or {}
            arguments[more["hook"]] = {name: value for name, value in option.items() if value is not None}
        answer: dict[str, Any] = self.action._execute_module(
            module_name=MODULE, module_args=arguments, task_vars=self.task_vars
        )
        for name in ("warnings", "deprecations"):
            self.passed_on.setdefault(name, []).extend(answer.get(name) or [])
        if answer.get("ansible_facts"):
            self.passed_on["ansible_facts"] = answer["ansible_facts"]
        if answer.get("failed"):
            # What the module says itself names the ledger; anything else is what is left of a call that was cut.
            text = str(answer.get("msg") or "The module failed and said nothing.")
            raise (StepError if "ledger" in answer else CutError)(text)
        return answer

    def _ask_again(self, step: str, **more: Any) -> dict[str, Any]:
        """The same for a host that goes on by itself: a lost connection is only waited for."""
        end = time.monotonic() + RECONNECT
        cut = 0
        answer = self._try(step, more)
        while isinstance(answer, Exception):
            cut += isinstance(answer, CutError)
            if time.monotonic() >= end or cut > MOST_CUTS:
                text = (
                    f"Expected to reach the host again within {RECONNECT:g} s. Found: {answer}. The run comes to its "
                    "end there by itself, but for letting requests in. To do: run this task again."
                )
                raise (StepError if isinstance(answer, CutError) else AnsibleConnectionFailure)(text) from answer
            self._say(f"the connection is lost, the host goes on by itself ({answer})")
            time.sleep(RECONNECT_INTERVAL)
            answer = self._try(step, more)
        return answer

    def _try(self, step: str, more: dict[str, Any]) -> dict[str, Any] | AnsibleConnectionFailure | CutError:
        try:
            return self._ask(step, **more)
        except (AnsibleConnectionFailure, CutError) as error:
            return error

    def _hook(self, name: str) -> str:
        """Call a hook. Gives a complaint or an empty text."""
        option: Mapping[str, Any] = self.hooks[name] or {}
        self.touched = True
        self._say(f"{name}: {describe(option)}")
        if option["where"] == "host":
            return str(self._ask_again("hook", hook=name)["complaint"])
        return Hook(option, CommandRunner(), open_url).run()

    def _show(self, state: dict[str, Any]) -> None:
        for phase in state["phases"][self.shown :]:
            if phase["phase"] not in ("drain", "undrain"):
                self._say(" ".join([phase["phase"].replace("_", " "), phase.get("detail", "")]).strip())
        self.shown = max(self.shown, len(state["phases"]))

    def _say(self, text: str) -> None:
        self.action._display.display(f"{self.host_name}: gpu_reset: {text}")


def _option_problems(options: dict[str, Any]) -> list[Problem]:
    problem = check_uuid(options["uuid"])
    problems = [problem] if problem else []
    numbers = {name: options[name] for name in POSITIVE}
    numbers.update({f"{name}.timeout": options[name]["timeout"] for name in ("drain", "undrain") if options.get(name)})
    for name, number in numbers.items():
        if number < 1:
            problems.append(Problem("option", f"{name} to be at least 1", str(number), "correct it"))
    return problems


def _another(state: dict[str, Any], found: str) -> Problem:
    at = f", at {state['phases'][-1]['phase']}" if state["phases"] else ""
    return Problem(
        "reset_under_way",
        "no unfinished run on the host but one of this card that nobody is at",
        found,
        f"wait for it, or finish it: run the task for {state['uuid']} (run {state['run']}{at}); if that card is no "
        "longer in the host, set unfinished: abandon",
    )


def _no_outcome(state: dict[str, Any]) -> Problem:
    last = state["phases"][-1]["phase"] if state["phases"] else "the beginning"
    return Problem(
        "worker",
        "the worker on the host to come to its end",
        f"that it is gone, after {last}",
        "read `journalctl --unit ringmaster-gpu-reset.service` and the ledger on the host, then run this task again",
        "run_again",
    )


def _base() -> dict[str, Any]:
    return {
        "next_step": "",
        "problems": [],
        "reset": False,
        "rebooted": False,
        "resumed": False,
        "drained": False,
        "ledger": "/var/lib/ringmaster/gpu_reset/ledger.jsonl",
    }


def _refused(problems: list[Any]) -> dict[str, Any]:
    documents = [problem.document() if isinstance(problem, Problem) else problem for problem in problems]
    result = {**_base(), "failed": True, "outcome": "refused", "problems": documents}
    result["next_step"] = next((problem["step"] for problem in documents if problem["step"]), "")
    result["msg"] = _message(result)
    return result


def _of_plan(plan: dict[str, Any] | None) -> dict[str, Any]:
    if plan is None:
        return {}
    return {
        "uuids": plan["uuids"],
        "reason": plan["reason"],
        "services": plan["services"],
        "plan_warnings": plan["warnings"],
        "cards_before": plan["cards"],
    }


def _message(result: dict[str, Any]) -> str:
    heads = {
        "refused": "The card is not reset, nothing was changed.",
        "aborted": "The card was not reset; services and persistence mode are as before.",
        "failed": "The card is not well or a service does not run.",
        "unknown": "The card may or may not have been reset.",
    }
    if result["outcome"] == "verified":
        head = "The card was reset and is well." if result["reset"] else "The host was rebooted, and the card is well."
    else:
        head = heads[result["outcome"]]
    if result["drained"] and result["failed"]:
        head += " It is left out of service."
    lines = [head]
    lines += [
        f"Expected {problem['expected']}. Found {problem['found']}. To do: {problem['to_do']}."
        for problem in result["problems"]
    ]
    if result["next_step"]:
        lines.append(f"Next step: {NEXT_STEPS[result['next_step']]}.")
    return "\n".join(lines)


def _lines(cards: list[dict[str, Any]]) -> str:
    return "".join(json.dumps(card, sort_keys=True, indent=1) + "\n" for card in cards)
