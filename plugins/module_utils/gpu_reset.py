# Copyright (c) 2026, the Ringmaster authors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""When a card may be reset, which cards go with it, and whether it is well afterwards: rules on facts, nothing else.

Sources: NVIDIA's "XID Errors" and "GPU Memory Error Management" for what a reset can mend, the manual of ``nvidia-smi``
(``--gpu-reset``) for the cards that have to be reset together. Nothing here imports Ansible or touches the host.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import datetime, timezone
from typing import Any

from ansible_collections.ringmaster.inference.plugins.module_utils.gpu_reset_ledger import Run, number
from ansible_collections.ringmaster.inference.plugins.module_utils.xid import (
    FALLEN_OFF_THE_BUS,
    RECOVERY_ACTION_CHANGED,
)

# nvmlDeviceArchitecture_t in nvml.h.
AMPERE = 7
HOPPER = 9

# Recovery actions of the driver (NVML's field 230) by what they mean here; the names are those of gpu_info.
ASKS_FOR_RESET = ("reset", "drain_and_reset")
ASKS_FOR_REBOOT = ("reboot", "system_reboot", "bus_reset")
ASKS_FOR_OTHER = {
    "drain_p2p": "stop the work that uses peer-to-peer traffic with this card",
    "recover_imex_domain": "recover the IMEX domain (nvidia-imex) that the card belongs to",
}

# What comes after a reset that did not help.
NEXT_STEPS = {
    "run_again": "run this task again",
    "start_services": "see why the service does not start (`systemctl status`), start it, then run this task again",
    "reboot": "reboot the host, then run this task again: it verifies the card and lets requests in",
    "power_cycle": "power-cycle the host (a reboot is not enough), check the card's seating and power cables, then run "
    "this task again: it verifies the card and lets requests in",
    "replace": "take the card out of service, run NVIDIA's field diagnostics and have it replaced if they confirm it",
}

# Xids that the reset itself, the stop of an application or an application's own fault bring about: no sign of a bad
# card.
HARMLESS_XIDS = frozenset({13, 31, 43, 45})

# States of a card (gpu_info) in which it is there; the others are lost, no_answer, not_listed and failed.
ANSWERING = ("answers", "reset_required")

PERSISTENCE_DAEMON = "nvidia-persistenced.service"
AGENT = "ringmaster-agent.service"
# Units that hold every card where they run, and that need not be named: stopped in this order, after those that are.
HOLDERS = (AGENT, PERSISTENCE_DAEMON)
FABRIC_MANAGER = "nvidia-fabricmanager.service"

_UUID = re.compile(r"GPU-[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}\Z")
_ADDRESS = re.compile(r"(?:[0-9a-f]{1,8}:)?[0-9a-f]{1,2}:[0-9a-f]{1,2}(?:\.[0-7])?\Z", re.IGNORECASE)
_UNIT = re.compile(r"[A-Za-z0-9:_.\\@-]{1,255}\Z")
_UNIT_TYPES = (".service", ".socket", ".timer", ".path", ".target", ".mount", ".scope", ".slice", ".automount", ".swap")
# Words for memory in use, and for faults of memory.
_MEMORY_USE = re.compile(
    r"out[ -]of[ -]memory|\boom\b|\bvram\b|\bkv[ -]cache\b"
    r"|\bmemory\b.*(?:\b(?:full|usage|used?|pressure|leak\w*|exhausted)\b|[0-9] ?%)"
    r"|(?:\b(?:full|free|clear|release|empty|reclaim)\b|[0-9] ?%).*\bmemory\b",
    re.IGNORECASE,
)
_MEMORY_FAULT = re.compile(
    r"\b(?:ecc|xid|remap\w*|retire\w*|(?:un)?correct\w*|(?:un)?contained|corrupt\w*)\b", re.IGNORECASE
)


@dataclass(frozen=True)
class Problem:
    """Something that is not as it has to be. `code` is a stable word for playbooks, the rest is for people.

    `step` is the one of NEXT_STEPS that mends it; empty where `to_do` says it in other words.
    """

    code: str
    expected: str
    found: str
    to_do: str
    step: str = ""

    def __str__(self) -> str:
        return f"Expected {self.expected}. Found {self.found}. To do: {self.to_do}."

    def document(self) -> dict[str, str]:
        """The problem as results and the ledger hold it."""
        return asdict(self)


def needs(step: str, code: str, expected: str, found: str) -> Problem:
    """A problem that one of NEXT_STEPS mends."""
    return Problem(code, expected, found, NEXT_STEPS[step], step)


@dataclass(frozen=True)
class Link:
    """One NVLink. `up` and `remote` are None where NVML does not tell.

    `remote` is ``gpu``, ``switch`` or ``other``; `remote_address` is the peer's PCI address, if it is a card.
    """

    number: int
    up: bool | None
    remote: str | None = None
    remote_address: str | None = None


@dataclass(frozen=True)
class Card:
    """What the rules look at of a card. None: not known. `state` is that of gpu_info (``answers``, ``lost`` …)."""

    uuid: str | None
    pci_address: str | None
    model: str | None = None
    state: str = "answers"
    architecture: int | None = None
    minor: int | None = None
    recovery_action: str | None = None
    persistence: bool | None = None
    ecc_current: bool | None = None
    ecc_pending: bool | None = None
    rows_pending: bool | None = None
    rows_failed: bool | None = None
    pages_pending: bool | None = None
    processes: tuple[int, ...] | None = None
    links: tuple[Link, ...] = ()
    links_expected: int | None = None

    @property
    def name(self) -> str:
        """The card for people."""
        return (
            f"{self.uuid or 'a card that does not tell its uuid'} ({self.model or 'model unknown'}, {self.pci_address})"
        )

    @property
    def links_up(self) -> tuple[int, ...]:
        """Numbers of the links that are up."""
        return tuple(link.number for link in self.links if link.up)

    def document(self) -> dict[str, Any]:
        """The card as results and the ledger hold it."""
        return {
            "uuid": self.uuid,
            "pci_address": self.pci_address,
            "model": self.model,
            "state": self.state,
            "recovery_action": self.recovery_action,
            "persistence_mode": self.persistence,
            "ecc_current": self.ecc_current,
            "ecc_pending": self.ecc_pending,
            "remapped_rows_pending": self.rows_pending,
            "remapped_rows_failed": self.rows_failed,
            "retired_pages_pending": self.pages_pending,
            "nvlinks_up": list(self.links_up),
            "nvlinks_expected": self.links_expected,
        }

    @staticmethod
    def parse(document: object) -> Card | None:
        """The card of a plan in the ledger, as far as verification needs it; None if it is none."""
        if not isinstance(document, dict):
            return None
        links = document.get("nvlinks_up")
        expected = document.get("nvlinks_expected")
        return Card(
            uuid=_text(document.get("uuid")),
            pci_address=_text(document.get("pci_address")),
            model=_text(document.get("model")),
            state=_text(document.get("state")) or "answers",
            recovery_action=_text(document.get("recovery_action")),
            persistence=_flag(document.get("persistence_mode")),
            ecc_current=_flag(document.get("ecc_current")),
            ecc_pending=_flag(document.get("ecc_pending")),
            rows_pending=_flag(document.get("remapped_rows_pending")),
            rows_failed=_flag(document.get("remapped_rows_failed")),
            pages_pending=_flag(document.get("retired_pages_pending")),
            links=tuple(Link(link, True) for link in links if isinstance(link, int)) if isinstance(links, list) else (),
            links_expected=expected if isinstance(expected, int) else None,
        )


@dataclass(frozen=True)
class Holder:
    """A process that has a card open. `how` is ``open``, ``mapped`` or ``compute`` (NVML); `unit` empty: of no unit."""

    pid: int
    command: str
    user: str
    unit: str
    device: str
    how: str

    def __str__(self) -> str:
        unit = f"unit {self.unit}" if self.unit else "no unit of systemd"
        return f"process {self.pid} ({self.command}), user {self.user}, {unit}, has {self.device} {self.how}"

    def document(self) -> dict[str, Any]:
        """The holder as results and the ledger hold it."""
        return asdict(self)


@dataclass(frozen=True)
class Unit:
    """A unit of systemd. `dependents` are the units that stop with it. `kill_after_seconds`: None is never."""

    name: str
    loaded: str = "loaded"
    active: str = "inactive"
    dependents: tuple[str, ...] = ()
    kill_after_seconds: float | None = None

    @property
    def runs(self) -> bool:
        """Whether it has to be stopped: it runs, or is about to."""
        return self.active in ("active", "activating", "reloading", "refreshing", "maintenance")


@dataclass(frozen=True)
class Request:
    """What is asked for. `services` are the units to stop, in order. Times are in seconds."""

    uuid: str
    reason: str = ""
    services: tuple[str, ...] = ()
    max_resets: int = 2
    window: float = 86400.0

    def document(self) -> dict[str, Any]:
        """The request as the ledger keeps it."""
        return {**asdict(self), "services": list(self.services)}

    @staticmethod
    def parse(document: object) -> Request | None:
        """The request of a plan in the ledger; None if it is none."""
        if not isinstance(document, dict) or not isinstance(document.get("uuid"), str):
            return None
        most = document.get("max_resets")
        return Request(
            uuid=document["uuid"],
            reason=_text(document.get("reason")) or "",
            services=tuple(_texts(document.get("services"))),
            max_resets=most if isinstance(most, int) else Request.max_resets,
            window=number(document.get("window"), Request.window),
        )


@dataclass(frozen=True)
class Facts:
    """What the host looks like. `now` is Unix time in seconds.

    `running_reset` names a ``nvidia-smi --gpu-reset`` that someone else runs; `fallen` holds the PCI addresses with
    Xid 79 since the boot (None: the kernel log can't be read); `blind` says what kept the search for holders from
    looking everywhere.
    """

    now: float
    boot_id: str
    root: bool
    cards: tuple[Card, ...]
    holders: tuple[Holder, ...] = ()
    units: Mapping[str, Unit] = field(default_factory=dict)
    fabric_manager: bool = False
    running_reset: str = ""
    fallen: frozenset[str] | None = frozenset()
    blind: str = ""
    runs: tuple[Run, ...] = ()


@dataclass(frozen=True)
class Plan:
    """What is going to be done. `services` are the units to stop, in order, all of which run now."""

    uuids: tuple[str, ...]
    reason: str
    services: tuple[str, ...]
    cards: tuple[Card, ...]
    warnings: tuple[str, ...] = ()

    def document(self) -> dict[str, Any]:
        """The plan as results and the ledger hold it."""
        return {
            "uuids": list(self.uuids),
            "reason": self.reason,
            "services": list(self.services),
            "cards": [card.document() for card in self.cards],
            "warnings": list(self.warnings),
        }

    @staticmethod
    def parse(document: object) -> Plan | None:
        """The plan in the ledger; None if it is none."""
        if not isinstance(document, dict) or not isinstance(document.get("cards"), list):
            return None
        cards = [card for card in map(Card.parse, document["cards"]) if card is not None]
        uuids = tuple(_texts(document.get("uuids")))
        if not uuids or not set(uuids) <= {card.uuid for card in cards}:
            return None
        return Plan(uuids, _text(document.get("reason")) or "", tuple(_texts(document.get("services"))), tuple(cards))

    def steps(self, drain: str, undrain: str) -> list[str]:
        """The plan for people, a line a step."""
        lines = [f"drain: {drain}"] if drain else []
        lines += [f"stop {unit}" for unit in self.services]
        kept = [card.uuid for card in self.cards if card.persistence and card.uuid in self.uuids]
        lines += [f"persistence mode off: {uuid}" for uuid in kept]
        lines.append("prove that no process holds " + ", ".join(self.uuids))
        lines.append(f"nvidia-smi -r -i {','.join(self.uuids)}")
        lines += [f"persistence mode on: {uuid}" for uuid in kept]
        lines += [f"start {unit}" for unit in reversed(self.services)]
        lines.append("verify number of cards, uuids, ECC, pending rows and pages, links, Xids")
        return lines + ([f"undrain: {undrain}"] if undrain else [])


def _text(value: object) -> str | None:
    return value if isinstance(value, str) else None


def _flag(value: object) -> bool | None:
    return value if isinstance(value, bool) else None


def _texts(value: object) -> list[str]:
    return [each for each in value if isinstance(each, str)] if isinstance(value, list) else []


def check_uuid(text: str) -> Problem | None:
    """Why `text` can't name a card to be reset: only a uuid stays with a card."""
    if _UUID.match(text):
        return None
    expected = "a card's uuid, like GPU-5f1c0d3a-…: 'GPU-' and 36 small hexadecimal digits and dashes"
    to_do = "take the uuid from ringmaster.inference.gpu_info or `nvidia-smi -L`"
    if text.isascii() and text.isdigit():
        found = f"the index {text}, which another card gets when one falls off the bus or a driver is loaded anew"
    elif _ADDRESS.match(text):
        found = f"the PCI address {text}, which changes with slots, firmware settings and kernel versions"
    elif text.startswith("MIG-"):
        found = f"{text}, a MIG slice: only a whole card can be reset"
    else:
        found = repr(text[:80])
    return Problem("uuid_form", expected, found, to_do)


def unit_name(text: str) -> str | None:
    """The unit's full name; a name without a type is a service, as for systemctl. None: no name of a single unit."""
    if not _UNIT.match(text) or text.startswith("-"):
        return None
    return text if text.endswith(_UNIT_TYPES) else f"{text}.service"


def reset_together(card: Card, cards: Sequence[Card], fabric_manager: bool) -> list[Card]:
    """The cards that have to be reset in one command with `card`, itself first.

    Hopper and later: alone. Ampere: alone while Fabric Manager runs. Else all that NVLinks join, directly or through
    others. Where NVML does not tell what a link leads to (down, or to an NVSwitch), every card with links counts as
    joined: nvidia-smi refuses a set that is too small, and never one that is too large. A card of unknown architecture
    is treated as an old one.
    """
    architecture = card.architecture or 0
    if architecture >= HOPPER or (architecture >= AMPERE and fabric_manager):
        return [card]
    linked = [each for each in cards if _joined_by_links(each, cards)]
    if card not in linked:
        return [card]
    together = [card]
    for member in together:
        together += [each for each in linked if each not in together and _may_join(member, each)]
    return together


def _joined_by_links(card: Card, cards: Sequence[Card]) -> bool:
    """Whether its links are in use. A board that no bridge joins has links as well, all of them down for ever."""
    named = any(link.remote_address == card.pci_address for each in cards for link in each.links if each is not card)
    return bool(card.links) and (bool(card.links_up) or named or card.links_expected != 0)


def _may_join(one: Card, other: Card) -> bool:
    exact = all(link.up and link.remote == "gpu" and link.remote_address for link in (*one.links, *other.links))
    if not exact:
        return True
    return any(link.remote_address == other.pci_address for link in one.links) or any(
        link.remote_address == one.pci_address for link in other.links
    )


def services_to_stop(services: Sequence[str], units: Mapping[str, Unit]) -> tuple[str, ...]:
    """The units to stop, in order: those asked for and what depends on them, as far as they run; then the node agent,
    and last the daemon that keeps persistence mode on: both hold every card."""
    ordered: list[str] = []
    for name in (*services, *HOLDERS):
        _collect(name, units, ordered, ())
    return tuple(ordered)


def _collect(name: str, units: Mapping[str, Unit], ordered: list[str], above: tuple[str, ...]) -> None:
    unit = units.get(name)
    if unit is None or name in ordered or name in above:
        return
    for dependent in unit.dependents:
        _collect(dependent, units, ordered, (*above, name))
    if unit.runs:
        ordered.append(name)


def make_plan(request: Request, facts: Facts) -> tuple[Plan | None, list[Problem]]:
    """The plan, and everything that speaks against it; no plan if there is not even a card to plan for."""
    problem = check_uuid(request.uuid)
    if problem is not None:
        return None, [problem]
    problems = _host_problems(request, facts)
    card = next((each for each in facts.cards if each.uuid == request.uuid), None)
    if card is None:
        return None, [*problems, _unknown_card(request.uuid, facts.cards)]
    fabric_manager = facts.fabric_manager and FABRIC_MANAGER not in request.services
    together = reset_together(card, facts.cards, fabric_manager)
    services = services_to_stop(request.services, facts.units)
    uuids = tuple(each.uuid for each in together if each.uuid is not None)
    for each in together:
        problems += _card_problems(each, facts)
    if not problems:
        problems += _reason_problems(request, card, facts)
    problems += _history_problems(request, uuids, facts)
    problems += [_held(holder) for holder in facts.holders if holder.unit not in services]
    plan = Plan(uuids, _reason(request, card), services, facts.cards, tuple(_warnings(card, together, services, facts)))
    return plan, problems


def _host_problems(request: Request, facts: Facts) -> list[Problem]:
    problems = []
    if not facts.root:
        problems.append(Problem("not_root", "to run as root", "another user", "set become: true on the task"))
    if facts.running_reset:
        problems.append(
            Problem(
                "reset_under_way",
                "no other reset under way",
                facts.running_reset,
                "wait until it has ended, look at the card (gpu_info), then run this task again if it is still needed",
            )
        )
    if facts.blind:
        problems.append(
            Problem(
                "holders_unknown", "to be able to see what every process has open", facts.blind, "run as root (become)"
            )
        )
    for name in request.services:
        unit = facts.units.get(name)
        if unit is None or unit.loaded != "loaded":
            found = "a unit that systemd can't tell of" if unit is None else f"a unit in load state {unit.loaded}"
            problems.append(
                Problem("unknown_service", f"{name} to be a unit of systemd", found, "correct the name in services")
            )
    return problems


def _unknown_card(uuid: str, cards: Sequence[Card]) -> Problem:
    lost = [card for card in cards if card.state in ("lost", "no_answer", "not_listed") and card.uuid is None]
    known = ", ".join(sorted(card.uuid for card in cards if card.uuid)) or "none"
    if lost:
        return Problem(
            "card_lost",
            f"a card {uuid} that answers",
            f"the cards {known}, and one at {lost[0].pci_address} that does not answer and may be it",
            "read the kernel log (xid_info); a card that has fallen off the bus needs a power-cycle",
        )
    return Problem(
        "unknown_uuid", f"a card {uuid} on this host", f"the cards {known}", "name a card of this host (gpu_info)"
    )


def _card_problems(card: Card, facts: Facts) -> list[Problem]:
    # A card that answers is on the bus, whatever the log says of an earlier moment.
    if card.state == "lost" or (card.state not in ANSWERING and card.pci_address in (facts.fallen or ())):
        found = "that it has fallen off the bus (Xid 79)"
        return [needs("power_cycle", "card_lost", f"{card.name} to be on the bus", found)]
    if card.state not in ANSWERING:
        return [
            Problem(
                "card_silent",
                f"{card.name} to answer",
                f"the state {card.state}",
                "read the kernel log (xid_info); reboot the host, and power-cycle it if that does not help",
            )
        ]
    if card.uuid is None:
        return [needs("reboot", "card_silent", f"the uuid of {card.name}", "none")]
    return []


def _reason_problems(request: Request, card: Card, facts: Facts) -> list[Problem]:
    action = card.recovery_action
    if action in ASKS_FOR_REBOOT:
        found = f"that the driver asks for {action.replace('_', ' ')}"
        return [needs("reboot", "reset_not_enough", "a fault that a reset can mend", found)]
    if action in ASKS_FOR_RESET or card.state == "reset_required":
        return []
    if action in ASKS_FOR_OTHER:
        found = f"that the driver asks for {action.replace('_', ' ')}"
        return [Problem("reset_not_asked", "a fault that a reset can mend", found, ASKS_FOR_OTHER[action])]
    if card.rows_pending or card.pages_pending:
        return []
    if not request.reason.strip():
        found = "that its recovery action is none" if action == "none" else "that the driver tells no recovery action"
        return [
            Problem(
                "no_reason",
                f"a fault of {card.name} that asks for a reset, or an explicit reason",
                f"{found} and that no reason is given",
                "leave the card alone, or say in `reason` what is wrong with it",
            )
        ]
    uses_memory = _MEMORY_USE.search(request.reason) and not _MEMORY_FAULT.search(request.reason)
    if uses_memory and (card.processes or facts.holders):
        return [
            Problem(
                "memory_full",
                "a fault of the card",
                "a reason that speaks of memory in use, and processes that use it: an engine fills a card's memory by "
                "design, and the memory is free again when the process ends",
                "restart the service that holds the memory; a reset is for faults",
            )
        ]
    return []


def _history_problems(request: Request, uuids: Sequence[str], facts: Facts) -> list[Problem]:
    problems = []
    for uuid in uuids:
        recent = [run for run in facts.runs if uuid in run.uuids and _within(run, facts.now, request.window)]
        if len(recent) >= request.max_resets:
            problems.append(
                Problem(
                    "too_many_resets",
                    f"fewer than {request.max_resets} resets of {uuid} in {request.window:g} s",
                    f"{len(recent)}, the last one at {recent[-1].reset_at}",
                    "find out what is wrong (xid_info, the ledger); the next steps are a reboot and a power-cycle, not "
                    "another reset. max_resets and window set this limit",
                )
            )
    return problems


def _within(run: Run, now: float, window: float) -> bool:
    if not run.reset_at:
        return False
    try:
        at = datetime.strptime(run.reset_at, "%Y-%m-%dT%H:%M:%SZ").replace(tzinfo=timezone.utc).timestamp()
    except ValueError:
        return True
    # A time in the future is a clock that was set back: it counts.
    return now - at < window


def _held(holder: Holder) -> Problem:
    remedy = f"add {holder.unit} to services" if holder.unit.endswith(".service") else "end it in its own way"
    return Problem(
        "held",
        "no process to hold the card but those of the services to stop",
        str(holder),
        f"{remedy} (never by SIGKILL, which can freeze the card), then run this task again",
    )


def _reason(request: Request, card: Card) -> str:
    found = []
    if request.reason.strip():
        found.append(request.reason.strip())
    if card.recovery_action in ASKS_FOR_RESET:
        found.append(f"the driver's recovery action is {card.recovery_action}")
    if card.state == "reset_required":
        found.append("the card answers no more until it is reset")
    if card.rows_pending:
        found.append("a row remapping is pending")
    if card.pages_pending:
        found.append("a page retirement is pending")
    return "; ".join(found)


def _warnings(card: Card, together: Sequence[Card], services: Sequence[str], facts: Facts) -> Iterable[str]:
    others = [each.name for each in together if each is not card]
    if others:
        yield f"NVLink joins {card.name} to cards that are reset with it: {', '.join(others)}"
    for name in services:
        seconds = facts.units[name].kill_after_seconds
        if seconds is not None:
            yield f"systemd itself kills {name} if it has not stopped after {seconds:g} s (its TimeoutStopSec)"
    if card.pci_address in (facts.fallen or ()):
        yield f"{card.name} has fallen off the bus since the boot (Xid 79) and came back: check its seating and power"
    if facts.fallen is None:
        yield "the kernel log can't be read: neither Xid 79 before the reset nor new Xids after it are seen"


def verify(
    before: Sequence[Card], after: Sequence[Card], uuids: Sequence[str], xids: Sequence[int] | None
) -> list[Problem]:
    """What is wrong with the cards after a reset of `uuids`. `xids` are the codes logged for them since, None: unknown.

    What NVML told neither before nor after (a card without ECC) is no problem; what it told before and not after is
    one.
    """
    problems = []
    counted = [sum(1 for card in cards if card.state in ANSWERING) for cards in (before, after)]
    if counted[1] < counted[0]:
        problems.append(needs("reboot", "count", f"{counted[0]} cards that answer", f"{counted[1]}"))
    now = {card.uuid: card for card in after if card.uuid}
    for old in before:
        if old.uuid is None or (old.uuid not in uuids and old.state not in ANSWERING):
            continue
        new = now.get(old.uuid)
        if new is None or new.state not in ANSWERING:
            found = "none" if new is None else f"it in state {new.state}"
            step = "power_cycle" if new is not None and new.state == "lost" else "reboot"
            problems.append(needs(step, "uuid", f"the card {old.name}", found))
        elif old.uuid in uuids:
            problems += _verify_card(old, new)
    # A change of the recovery action may be the one back to none; what it is now was read from the card.
    for code in sorted(set(xids or ()) - HARMLESS_XIDS - {RECOVERY_ACTION_CHANGED}):
        step = "power_cycle" if code == FALLEN_OFF_THE_BUS else "reboot"
        problems.append(needs(step, "xid", "no new Xid", f"Xid {code}"))
    return problems


def _verify_card(old: Card, new: Card) -> Iterable[Problem]:
    name = new.name
    if new.state == "reset_required":
        yield needs("reboot", "state", f"{name} to answer", "that it still has to be reset")
        return
    action = new.recovery_action
    if action not in ("none", None) or (action is None and old.recovery_action is not None):
        yield needs(
            "reboot", "recovery_action", f"no recovery action of {name}", action or "that the driver tells none"
        )
    if new.ecc_current not in (old.ecc_current, old.ecc_pending) and old.state == "answers":
        yield needs("reboot", "ecc", f"ECC of {name} {_mode(old.ecc_current)} as before", _mode(new.ecc_current))
    for code, text, was, value in (
        ("rows_pending", "row remapping", old.rows_pending, new.rows_pending),
        ("pages_pending", "page retirement", old.pages_pending, new.pages_pending),
    ):
        if value or (value is None and was is not None):
            found = "one" if value else "that the driver does not tell"
            yield needs("reboot", code, f"no pending {text} of {name}", found)
    if new.rows_failed:
        yield needs("replace", "rows_failed", f"no failed row remapping of {name}", "one")
    down = sorted(set(old.links_up) - set(new.links_up))
    if down:
        yield needs("reboot", "links", f"NVLinks {_numbers(old.links_up)} of {name} up", f"{_numbers(down)} down")
    elif new.links_expected is not None and len(new.links_up) < new.links_expected:
        yield needs("reboot", "links", f"{new.links_expected} NVLinks of {name} up", str(len(new.links_up)))


def next_step(problems: Sequence[Problem], rebooted_before: bool) -> str:
    """The strongest of NEXT_STEPS that one of `problems` needs.

    `rebooted_before`: the host was rebooted for this fault already, so another reboot does not help.
    """
    order = list(NEXT_STEPS)
    worst = max((problem.step for problem in problems if problem.step), key=order.index, default="run_again")
    return "power_cycle" if worst == "reboot" and rebooted_before else worst


def _mode(value: bool | None) -> str:
    return "unknown" if value is None else "on" if value else "off"


def _numbers(numbers: Iterable[int]) -> str:
    return ", ".join(str(number) for number in numbers)
