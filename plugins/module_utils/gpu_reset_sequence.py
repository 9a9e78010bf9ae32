# Copyright (c) 2026, the Ringmaster authors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The host's part of a card's reset, as a sequence that may be killed anywhere and then still comes to an end.

It goes towards the reset only once, from its beginning: stop the services, persistence mode off, prove that nothing
holds the card, reset. Whatever comes of that, also if a killed sequence is taken up again, it goes on with bringing the
host
back: persistence mode, services, and then looks at the cards. So a run can't reset a card twice, and all that a run
taken up again has to know is what ran before it (the plan) and whether a reset was begun (the ledger). Nothing here
imports Ansible.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from ansible_collections.ringmaster.inference.plugins.module_utils.commands import Answer
from ansible_collections.ringmaster.inference.plugins.module_utils.gpu_reset import (
    NEXT_STEPS,
    PERSISTENCE_DAEMON,
    Card,
    Facts,
    Plan,
    Problem,
    Request,
    Unit,
    make_plan,
    needs,
    next_step,
    verify,
)
from ansible_collections.ringmaster.inference.plugins.module_utils.gpu_reset_ledger import LedgerError, Run, number

VERIFY_INTERVAL = 2.0  # seconds between two looks at the cards
# A process that ends takes a moment to let go of a card, and one that looks at cards (nvidia-smi) has them open for
# one.
LETTING_GO = 15.0  # seconds
# Results of the host's part. `unknown`: killed while the reset ran, and nothing shows whether it was carried out.
RESULTS = ("verified", "aborted", "failed", "unknown")


# Problems of the verification that were there before the reset, if it was not carried out.
SYMPTOMS = ("recovery_action", "rows_pending", "pages_pending", "state", "links")
RUNNING = ("active", "reloading", "refreshing")


class HostError(Exception):
    """The host does not tell what has to be known; the text says what was expected, what was found and what to do."""


class Host(Protocol):
    """What the sequence does to a host and sees of it. Each method may take long, and may be cut short by a kill."""

    def boot_id(self) -> str:
        """The kernel's id of this boot."""

    def facts(self, request: Request) -> Facts:
        """All that the rules look at. Raises HostError."""

    def cards(self) -> tuple[Card, ...]:
        """The cards alone. Raises HostError."""

    def unit(self, name: str) -> Unit:
        """A unit of systemd as it is now."""

    def stop(self, unit: str, seconds: float) -> str:
        """Stop a unit in its own way; gives a complaint if it has not stopped after `seconds`, else an empty text."""

    def start(self, unit: str, seconds: float) -> str:
        """Start a unit and wait until it is up; gives a complaint if it is not after `seconds`, else an empty text."""

    def set_persistence(self, uuid: str, on: bool) -> str:
        """Switch a card's persistence mode; gives a complaint or an empty text."""

    def reset(self, uuids: Sequence[str], seconds: float) -> Answer:
        """Reset cards in one command."""

    def running_reset(self) -> str:
        """A reset that is running now, for people; empty if there is none."""

    def log_position(self) -> str:
        """Where the kernel log is now; never empty."""

    def xids(self, position: str, addresses: Sequence[str]) -> list[int] | None:
        """Xids of cards since `position` (empty: since the boot); None if the kernel log can't be read."""

    def monotonic(self) -> float:
        """Seconds of a clock that is never set."""

    def sleep(self, seconds: float) -> None:
        """Wait."""


@dataclass(frozen=True)
class Limits:
    """How long each part may take, in seconds."""

    stop: float = 300.0
    start: float = 1800.0
    reset: float = 300.0
    verify: float = 60.0

    @staticmethod
    def parse(document: object) -> Limits:
        """The limits of a plan in the ledger; what is missing or no number has its default."""
        values = document if isinstance(document, dict) else {}
        names = ("stop", "start", "reset", "verify")
        return Limits(**{name: number(values.get(name), getattr(Limits, name)) for name in names})


@dataclass(frozen=True)
class Outcome:
    """How the host's part ended. `problems` is empty only if `result` is ``verified``."""

    result: str
    reset: bool
    rebooted: bool
    problems: tuple[Problem, ...]
    step: str
    cards: tuple[Card, ...] | None

    def document(self) -> dict[str, Any]:
        """The outcome as results and the ledger hold it."""
        return {
            "result": self.result,
            "reset": self.reset,
            "rebooted": self.rebooted,
            "problems": [problem.document() for problem in self.problems],
            "next_step": self.step,
            "cards": None if self.cards is None else [card.document() for card in self.cards],
        }


def settled_plan(host: Host, request: Request, seconds: float) -> tuple[Plan | None, list[Problem]]:
    """The plan and what speaks against it, once only processes that hold a card are left to be waited for.

    Raises HostError.
    """
    end = host.monotonic() + seconds
    while True:
        plan, problems = make_plan(request, host.facts(request))
        if any(problem.code != "held" for problem in problems) or not problems or host.monotonic() >= end:
            return plan, problems
        host.sleep(1.0)


class HostPart:
    """One worker's attempt at a run's host part. `note` writes a line of the ledger (event, then its fields)."""

    def __init__(
        self, run: Run, plan: Plan, request: Request, limits: Limits, host: Host, note: Callable[..., None]
    ) -> None:
        self.run, self.plan, self.request, self.limits = run, plan, request, limits
        self.host, self.note = host, note
        self.reset_begun = bool(run.reset_at)
        self.log_position = ""

    def carry_out(self) -> Outcome:
        """Go from wherever the run was left to its end."""
        rebooted = self.host.boot_id() != self.run.boot_id
        first = len(self.run.handed) == 1 and self.run.workers == 0 and not self.run.host_phases
        problems: list[Problem] = []
        if first and not rebooted:
            problems += self._reset()
        elif not self.reset_begun:
            problems.append(self._interrupted())
        restored = self._restore(rebooted)
        if not self.reset_begun and not rebooted:
            return self._outcome("failed" if restored else "aborted", rebooted, [*problems, *restored], None)
        found, cards = self._verify(rebooted)
        wrong = [*self._former_answer(rebooted), *restored, *found, *self._still_up(restored)]
        if not self.reset_begun:
            # The boot has reset the card, so that it may well be well. If not, it is as it was when the run was opened.
            if wrong and all(problem.code in SYMPTOMS for problem in wrong):
                return self._outcome("aborted", rebooted, problems, cards)
        elif not rebooted and self._may_not_be_reset(wrong):
            unknown = Problem(
                "reset_unknown",
                "an answer of nvidia-smi to the reset",
                "that the run was interrupted just before or during it, and nothing shows that it was carried out",
                NEXT_STEPS["run_again"],
                "run_again",
            )
            return self._outcome("unknown", rebooted, [unknown], cards)
        return self._outcome("failed" if wrong else "verified", rebooted, wrong, cards)

    def _interrupted(self) -> Problem:
        found = f"that it was interrupted in its phase {self.run.phase or 'drain'}, before the reset"
        return Problem("interrupted", "the run to come to its end", found, NEXT_STEPS["run_again"], "run_again")

    # Towards the reset

    def _reset(self) -> list[Problem]:
        try:
            return self._stop() or self._persistence_off() or self._prove() or self._run_reset()
        except (HostError, LedgerError) as error:
            return [Problem("host", "to know the host's state", str(error), NEXT_STEPS["run_again"], "run_again")]

    def _stop(self) -> list[Problem]:
        for unit in self.plan.services:
            self.note("phase", phase="stop", detail=unit)
            complaint = self.host.stop(unit, self.limits.stop)
            if complaint:
                return [
                    Problem(
                        "service_stop",
                        f"{unit} to stop within {self.limits.stop:g} s",
                        complaint,
                        f"see why it does not stop (`systemctl status {unit}`), or raise stop_timeout, then run again",
                    )
                ]
        return []

    def _persistence_off(self) -> list[Problem]:
        for uuid in self._kept(self.plan.uuids):
            self.note("phase", phase="persistence_off", detail=uuid)
            complaint = self.host.set_persistence(uuid, False)
            if complaint:
                to_do = f"switch it off by hand (`nvidia-smi -i {uuid} -pm 0`) and see what it says"
                return [Problem("persistence", f"persistence mode of {uuid} off", complaint, to_do)]
        return []

    def _prove(self) -> list[Problem]:
        """The same rules as for the plan, now that the services are stopped: nothing at all may hold the cards."""
        self.note("phase", phase="prove")
        plan, problems = settled_plan(self.host, self.request, LETTING_GO)
        if plan is not None and set(plan.uuids) != set(self.plan.uuids):
            problems.append(
                Problem(
                    "cards_changed",
                    f"to reset {', '.join(self.plan.uuids)} together",
                    f"that now {', '.join(plan.uuids)} would have to be reset together",
                    NEXT_STEPS["run_again"],
                    "run_again",
                )
            )
        if plan is not None and plan.services:
            problems.append(
                Problem(
                    "service_stop",
                    f"{', '.join(plan.services)} to stay stopped",
                    "that something has started it again",
                    "stop what starts it (a timer, a socket, an orchestrator): list that in services, too",
                )
            )
        return problems

    def _run_reset(self) -> list[Problem]:
        position = self.host.log_position()
        self.note("phase", phase="reset", detail=",".join(self.plan.uuids), boot_id=self.run.boot_id, log=position)
        self.reset_begun = True
        self.log_position = position
        answer = self.host.reset(self.plan.uuids, self.limits.reset)
        self.run.reset_answer = {
            "ok": answer.ok,
            "status": answer.status,
            "text": (answer.complaint or answer.output).strip()[:500],
        }
        self.note("reset", answer=self.run.reset_answer, log=self.host.log_position())
        # What the reset itself writes to the kernel log is no fault, what comes after it is; some is still on its way.
        self.host.sleep(1.0)
        self.log_position = self.host.log_position()
        return self._former_answer(rebooted=False)

    def _former_answer(self, rebooted: bool) -> list[Problem]:
        """What nvidia-smi said against the reset. A boot resets every card, so it does not matter after one."""
        answer = self.run.reset_answer
        if answer is None or answer.get("ok") is True or rebooted:
            return []
        found = f"status {answer.get('status')}: {answer.get('text') or 'no text'}"
        return [needs("reboot", "reset_failed", "nvidia-smi to reset the cards", found)]

    # Back

    def _restore(self, rebooted: bool) -> list[Problem]:
        if self.reset_begun and self.run.reset_answer is None and not rebooted:
            self._wait_for_reset()
        problems: list[Problem] = []
        order = list(reversed(self.plan.services))
        if PERSISTENCE_DAEMON in order:
            # It switches persistence mode on for all cards; what it does not, is done by hand.
            order.remove(PERSISTENCE_DAEMON)
            problems += self._start(PERSISTENCE_DAEMON)
        problems += self._persistence_on()
        for unit in order:
            problems += self._start(unit)
        return problems

    def _wait_for_reset(self) -> None:
        end = self.host.monotonic() + self.limits.reset
        while self.host.running_reset() and self.host.monotonic() < end:
            self.host.sleep(VERIFY_INTERVAL)

    def _persistence_on(self) -> list[Problem]:
        # All cards: when the daemon stops, each of them loses the mode.
        kept = self._kept([card.uuid for card in self.plan.cards if card.uuid])
        if not kept:
            return []
        try:
            now = {card.uuid: card for card in self.host.cards()}
        except HostError as error:
            return [needs("reboot", "cards", "to read the cards", str(error))]
        problems = []
        for uuid in kept:
            card = now.get(uuid)
            if card is None or card.persistence is True:
                continue  # a card that is missing is what the verification is for
            self._try_note("phase", phase="persistence_on", detail=uuid)
            complaint = self.host.set_persistence(uuid, True)
            if complaint:
                problems.append(needs("reboot", "persistence", f"persistence mode of {uuid} on, as before", complaint))
        return problems

    def _start(self, name: str) -> list[Problem]:
        if self.host.unit(name).active in RUNNING:
            return []
        self._try_note("phase", phase="start", detail=name)
        complaint = self.host.start(name, self.limits.start)
        if not complaint:
            return []
        return [needs("start_services", "service_start", f"{name} to run, as before", complaint)]

    def _verify(self, rebooted: bool) -> tuple[list[Problem], tuple[Card, ...] | None]:
        self._try_note("phase", phase="verify")
        addresses = [card.pci_address for card in self.plan.cards if card.uuid in self.plan.uuids and card.pci_address]
        position = "" if rebooted else self.log_position or self.run.log_position
        end = self.host.monotonic() + self.limits.verify
        while True:
            cards = None
            try:
                cards = self.host.cards()
                xids = self.host.xids(position, addresses) if position or rebooted else None
                problems = verify(self.plan.cards, cards, self.plan.uuids, xids)
            except HostError as error:
                problems = [needs("reboot", "cards", "to read the cards", str(error))]
            # Links train and counters settle within seconds; a new Xid stays.
            if not problems or self.host.monotonic() >= end or any(problem.code == "xid" for problem in problems):
                return problems, cards
            self.host.sleep(VERIFY_INTERVAL)

    def _still_up(self, restored: Sequence[Problem]) -> list[Problem]:
        """A service of a simple type counts as started before it has looked at its card: look again at the end."""
        if restored:
            return []
        states = {name: self.host.unit(name).active for name in self.plan.services}
        return [
            needs("start_services", "service_start", f"{name} to run, as before", f"it in state {state}")
            for name, state in states.items()
            if state not in RUNNING
        ]

    # Both

    def _kept(self, uuids: Sequence[str]) -> list[str]:
        """Those of `uuids` whose persistence mode was on before."""
        return [card.uuid for card in self.plan.cards if card.persistence and card.uuid and card.uuid in uuids]

    def _may_not_be_reset(self, problems: Sequence[Problem]) -> bool:
        """Whether nvidia-smi gave no answer, and the card is as it may have been before.

        That is so if all that is wrong with it is what the reset was to mend, or if nothing was to be seen of it
        anyway.
        """
        if self.run.reset_answer is not None:
            return False
        if problems:
            return all(problem.code in SYMPTOMS for problem in problems)
        card = next(card for card in self.plan.cards if card.uuid == self.request.uuid)
        symptoms = card.recovery_action not in ("none", None), card.rows_pending, card.pages_pending
        return not any(symptoms) and card.state == "answers"

    def _outcome(self, result: str, rebooted: bool, problems: list[Problem], cards: tuple[Card, ...] | None) -> Outcome:
        step = next_step(problems, rebooted) if result in ("failed", "unknown") else ""
        outcome = Outcome(result, self.reset_begun, rebooted, tuple(problems), step, cards)
        self.note("outcome", outcome=outcome.document(), boot_id=self.host.boot_id())
        return outcome

    def _try_note(self, event: str, **more: Any) -> None:
        """Bringing the host back goes on where nothing can be written any more (a full disk)."""
        try:
            self.note(event, **more)
        except LedgerError:
            pass
