# Copyright (c) 2026, the Ringmaster authors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""NVLinks of a host's cards: what they are, what they should be, and how the two differ.

NVLink has no width, and its speed does not fall with the temperature: what tells of a fault is the state of each link,
its speed and its error counters. A card without NVLink (L40S) has an empty list, which is as it should be. Nothing here
imports Ansible.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

from ansible_collections.ringmaster.inference.plugins.module_utils.cards import card_model
from ansible_collections.ringmaster.inference.plugins.module_utils.file_tree import FileTree
from ansible_collections.ringmaster.inference.plugins.module_utils.gpu import (
    IDENTITY,
    Call,
    GpuReader,
    as_address,
    ask,
    identities,
    select,
)
from ansible_collections.ringmaster.inference.plugins.module_utils.nvml import (
    INVALID_ARGUMENT,
    NOT_APPLICABLE,
    NOT_SUPPORTED,
    Facts,
    Nvml,
    Reading,
    as_integer,
)

# nvmlDeviceGetNvLinkState, and NVML_NVLINK_STATE_… in nvml.h for what newer drivers give.
STATES = {0: "inactive", 1: "active", 2: "sleep", 3: "active_traffic_disabled"}
# NVML_NVLINK_VERSION_… in nvml.h: the function gives a number of this list, not a version.
VERSIONS = {1: "1.0", 2: "2.0", 3: "2.2", 4: "3.0", 5: "3.1", 6: "4.0", 7: "5.0", 8: "6.0"}
# nvmlIntNvLinkDeviceType_t in nvml.h.
PEER_KINDS = {0: "gpu", 1: "ibm_npu", 2: "switch"}
# nvmlNvLinkErrorCounter_t in nvml.h, by NVML's number. A driver that does not know the last of them says so.
ERROR_COUNTERS = {
    "replay_errors": 0,
    "recovery_errors": 1,
    "crc_flit_errors": 2,
    "crc_data_errors": 3,
    "ecc_data_errors": 4,
}

FIELD_LINK_COUNT = 91
FIELD_SPEED = 164  # with the link as its scope
FIELD_STATE = 165  # with the link as its scope
# NVML_FI_DEV_NVLINK_…_ERROR_COUNT_TOTAL of flow control CRC, data CRC, replay and recovery: the sum over all links.
FIELDS_ERROR_TOTAL = (38, 45, 52, 59)
# NVML_FI_DEV_NVLINK_ERROR_DL_REPLAY, …_RECOVERY, …_CRC, with the link as their scope: what newer cards count instead.
FIELDS_LINK_ERRORS = (161, 162, 163)
# NVML_FI_DEV_NVLINK_SPEED_MBPS_L0 … L11
FIELD_SPEED_OF_LINK = (84, 85, 86, 87, 88, 89, 132, 133, 134, 135, 136, 137)
MOST_LINKS = 64  # more than any card has, so that a broken answer does not ask for ever


class NvlinkReader(GpuReader):
    """Reads the links of one card at a time."""

    def __init__(self, nvml: Nvml, files: FileTree) -> None:
        super().__init__(nvml, files)
        self._link_counts: dict[int, int] = {}
        self._without: set[int] = set()
        self._link_errors: dict[int, dict[tuple[int, int], int]] = {}

    def links(self, index: int) -> dict[str, Any]:
        """`identity` and ``links``, a list, or None with the reason in ``unknown``."""
        card = self.identity(index)
        handle = self.nvml.call("nvmlDeviceGetHandleByIndex", index)
        if handle.reason:
            return {**card, "links": None, "unknown": {**card["unknown"], "links": handle.reason}}
        states = self._states(handle.value)
        failed = next((state for state in states[:1] if state.failed), None)
        if failed is not None and len(states) == 1:
            return {**card, "links": None, "unknown": {**card["unknown"], "links": failed.reason}}
        speeds = self._speeds(handle.value, len(states))
        links = [
            self._link(handle.value, link, state, speeds[link])
            for link, state in enumerate(states)  # by NVML's number
        ]
        return {**card, "links": links}

    def health(self, index: int, model: str | None) -> dict[str, Any]:
        """Whether the links of a card are up, and how many errors they counted, for those that ask every second.

        ``{links, expected, bridge, down, errors, unknown}``: how many there are, how many a card of this `model` has,
        whether they are up only if a bridge joins two cards, the numbers of those that are not up, and the sum of their
        replays, recoveries and CRC errors since the driver was loaded. It takes one or two calls of NVML, whatever the
        number of links. Raises NvmlUnavailableError.
        """
        self.nvml.open()
        facts = Facts()
        known = card_model(model)
        expected = known.nvlinks if known else None
        unknown = "it is not known for this model"
        facts.put("expected", Reading(expected, "" if expected is not None else unknown))
        facts.put("bridge", Reading(known.bridge) if known else Reading(reason=unknown))
        handle = self.nvml.call("nvmlDeviceGetHandleByIndex", index)
        if handle.reason:
            for field in ("links", "down", "errors"):
                facts.put(field, handle)
            return {**facts.values, "unknown": facts.unknown}
        none: tuple[list[Reading], list[Reading]] = ([], [])
        states, totals = none if index in self._without else self._states_and_totals(handle.value, index)
        if not states:
            # Nothing plugs links into a card that runs, so that it need not be asked again.
            self._without.add(index)
        # As in `links`: a card that does not even tell of its first link tells of none.
        failed = states[0] if len(states) == 1 and states[0].failed else None
        facts.put("links", failed or Reading(len(states)))
        facts.put("down", failed or _down(states))
        facts.put("errors", failed or (self._errors(handle.value, index, totals) if states else Reading(0)))
        return {**facts.values, "unknown": facts.unknown}

    def _states_and_totals(self, handle: Any, index: int) -> tuple[list[Reading], list[Reading]]:
        """State of each link and the totals of FIELDS_ERROR_TOTAL, in one call if the number of links is as before."""
        before = self._link_counts.get(index, 0)
        fields: list[int | tuple[int, int]] = [FIELD_LINK_COUNT, *FIELDS_ERROR_TOTAL]
        answers = self.nvml.fields(handle, fields + [(FIELD_STATE, link) for link in range(before)])
        totals, scoped = answers[1 : len(fields)], answers[len(fields) :]
        count = as_integer(answers[0], most=MOST_LINKS)
        if count.value == before and all(state.code not in (NOT_SUPPORTED, INVALID_ARGUMENT) for state in scoped):
            return [_as_one_of(state, STATES) for state in scoped], totals
        # Another number of links, or a driver that does not tell states by field.
        states = self._states(handle)
        self._link_counts[index] = count.value or 0
        return states, totals

    def _errors(self, handle: Any, index: int, totals: list[Reading]) -> Reading:
        told = [as_integer(total) for total in totals if total.code not in NOT_APPLICABLE]
        if told:
            return next(
                (total for total in told if total.reason), Reading(sum(total.value for total in told if total.value))
            )
        links = range(self._link_counts.get(index, 0))
        fields = [(field, link) for link in links for field in FIELDS_LINK_ERRORS]
        counted = self._link_errors.setdefault(index, {})
        for field, answer in zip(fields, self.nvml.fields(handle, list(fields)) if fields else []):
            number = as_integer(answer)
            if number.failed:
                return number
            # A link that is down tells nothing; what it counted until then stays in the sum.
            if not number.reason:
                counted[field] = number.value
        if not counted:
            return Reading(reason="the driver counts no errors of this card's links", code=NOT_SUPPORTED)
        return Reading(sum(counted.values()))

    def _states(self, handle: Any) -> list[Reading]:
        """A reading for each link. Without a count from the driver, the first that NVML does not know ends them."""
        count = as_integer(self.nvml.fields(handle, [FIELD_LINK_COUNT])[0], most=MOST_LINKS)
        limit = count.value if not count.reason else getattr(self.nvml.library, "NVML_NVLINK_MAX_LINKS", 18)
        states = []
        for link in range(min(limit, MOST_LINKS)):
            state = self.nvml.call("nvmlDeviceGetNvLinkState", handle, link)
            if count.reason and state.code in (NOT_SUPPORTED, INVALID_ARGUMENT):
                break
            states.append(_as_one_of(state, STATES))
            if state.failed and not state.value and link == 0:
                break  # a card that does not tell of its first link tells of none
        return states

    def _speeds(self, handle: Any, count: int) -> list[Reading]:
        speeds = [Reading(reason="the driver tells no speed of this link", code=NOT_SUPPORTED)] * count
        named = self.nvml.fields(handle, list(FIELD_SPEED_OF_LINK[:count])) if count else []
        speeds[: len(named)] = named
        missing = [link for link, speed in enumerate(speeds) if speed.reason]
        if missing:
            scoped = self.nvml.fields(handle, [(FIELD_SPEED, link) for link in missing])
            for link, speed in zip(missing, scoped):
                if not speed.reason:
                    speeds[link] = speed
        return speeds

    def _link(self, handle: Any, link: int, state: Reading, speed: Reading) -> dict[str, Any]:
        facts = Facts()
        facts.values["link"] = link
        facts.put("state", state)
        up = state.value == "active"
        down = Reading(reason="the link is not active", code=NOT_SUPPORTED)
        facts.put("speed_mb_per_second", as_integer(speed, 1, 10_000_000) if up else down)
        version = self.nvml.call("nvmlDeviceGetNvLinkVersion", handle, link) if up else down
        facts.put("version", _as_one_of(version, VERSIONS))
        kind = self.nvml.call("nvmlDeviceGetNvLinkRemoteDeviceType", handle, link) if up else down
        facts.put("peer_kind", _as_one_of(kind, PEER_KINDS))
        peer = self.nvml.call("nvmlDeviceGetNvLinkRemotePciInfo", handle, link) if up else down
        facts.put("peer_pci_address", as_address(peer))
        for name, counter in ERROR_COUNTERS.items():
            facts.put(name, as_integer(self.nvml.call("nvmlDeviceGetNvLinkErrorCounter", handle, link, counter)))
        return {**facts.values, "unknown": facts.unknown}


def survey_links(call: Call, files: FileTree, wanted: Iterable[str] = ()) -> list[dict[str, Any]]:
    """The cards with their links, what is expected of them, and deviations, in the order of their PCI addresses.

    `call` runs a :class:`NvlinkReader`'s methods. Raises NvmlUnavailableError and UnknownGpuError.
    """
    known = identities(call, files)
    cards = []
    for place in known:
        asked = place["state"] not in ("not_listed", "no_answer")
        card = ask(call, "links", place["index"]) if asked else dict(place)
        for field in IDENTITY:
            card[field] = place[field] if card[field] is None else card[field]
        card["unknown"] = {name: reason for name, reason in card["unknown"].items() if card.get(name) is None}
        card.setdefault("links", None)
        if card["links"] is None:
            card["unknown"].setdefault("links", card.pop("reason", "NVML does not tell"))
        cards.append(card)
    asymmetric = _asymmetric(cards)
    chosen = select(cards, wanted) if wanted else cards
    chosen.sort(key=lambda card: (card["pci_address"] is None, card["pci_address"] or "", card["index"] or 0))
    return [_judged(card, asymmetric.get(card["pci_address"], [])) for card in chosen]


def _judged(card: dict[str, Any], asymmetric: list[str]) -> dict[str, Any]:
    links = card["links"]
    unknown = dict(card["unknown"])
    model = card_model(card["model"])
    expected: dict[str, Any] | None = None
    if model is not None and model.nvlinks is not None:
        expected = {
            "links": model.nvlinks,
            "speed_mb_per_second": model.nvlink_mb_per_second,
            "bridge": model.bridge,
        }
    else:
        unknown["expected"] = (
            "it is not known which card it is"
            if card["model"] is None
            else f"the number of NVLinks of the model {card['model']} is not known here"
        )
    found, certain = _deviations(links, expected) if links is not None and expected else ([], False)
    found += asymmetric
    as_expected: bool | None = False if found else True if certain else None
    if as_expected is None:
        unknown["as_expected"] = unknown.get("links") or unknown.get("expected") or "a link's state or speed is unknown"
    active = None if links is None else sum(link["state"] == "active" for link in links)
    if active is None:
        unknown["links_active"] = unknown["links"]
    return {
        **{field: card[field] for field in IDENTITY if field != "serial"},
        "links": links,
        "links_active": active,
        "expected": expected,
        "as_expected": as_expected,
        "deviations": found,
        "unknown": {name: reason for name, reason in unknown.items() if name != "serial"},
    }


def _deviations(links: list[dict[str, Any]], expected: dict[str, Any]) -> tuple[list[str], bool]:
    """How the links differ from what is expected, in words, and whether that is all there is to know."""
    found = []
    certain = True
    active = [link for link in links if link["state"] == "active"]
    if expected["bridge"] and not active:
        return [], all(link["state"] is not None for link in links)
    if len(links) != expected["links"]:
        found.append(f"{len(links)} links, expected {expected['links']}")
    for link in links:
        name, state, speed = link["link"], link["state"], link["speed_mb_per_second"]
        if state is None:
            certain = False
        elif state != "active" and expected["links"]:
            joined = " (of cards that a bridge joins, all must be)" if expected["bridge"] else ""
            found.append(f"link {name} is {state.replace('_', ' ')}, expected active{joined}")
        elif state == "active" and expected["speed_mb_per_second"] is not None:
            if speed is None:
                certain = False
            elif speed < expected["speed_mb_per_second"]:
                found.append(f"link {name} runs at {speed} MB/s, expected {expected['speed_mb_per_second']}")
    return found, certain


def _asymmetric(cards: list[dict[str, Any]]) -> dict[str | None, list[str]]:
    """Pairs of cards of which one says that it has more links to the other than the other says, by PCI address."""
    between: dict[str, Counter[str]] = {}
    for card in cards:
        if card["pci_address"] is None or card["links"] is None:
            continue
        peers = [link["peer_pci_address"] for link in card["links"] if link["state"] == "active"]
        if None not in peers:
            between[card["pci_address"]] = Counter(peers)
    found: dict[str | None, list[str]] = {}
    for one in between:
        for other in between:
            there, back = between[one][other], between[other][one]
            if there != back:
                found.setdefault(one, []).append(f"{there} links to {other}, which has {back} links to it")
    return found


def _down(states: list[Reading]) -> Reading:
    """Numbers of the links that are not up; a link that sleeps while nothing is to be sent is up."""
    down = [link for link, state in enumerate(states) if state.value not in ("active", "sleep")]
    unread = next((state for state in states if state.reason), None)
    return Reading(down) if unread is None else unread


def _as_one_of(reading: Reading, names: dict[int, str]) -> Reading:
    answer = as_integer(reading)
    if answer.reason:
        return answer
    name = names.get(answer.value)
    return Reading(name) if name else Reading(reason=f"NVML gave {answer.value}, which has no name here")
