# SPDX-License-Identifier: GPL-3.0-or-later
"""The table of health rules as an operator writes it, checked.

Each rule is an entry of an object, by its name. What every rule has:

* ``kind``: the condition, one of `KINDS`; with its thresholds, which that kind names.
* ``window_s`` and ``windows``: over how many seconds it is judged, and how many bad windows in a row make it hold.
* ``effect``: what then becomes of the weight: a factor from 0.01 to 1 (1 only names the reason), ``proportional`` (what
  is left of the capability, not under ``floor``), ``out`` (gets nothing, even as the last engine of its pool), or
  ``last_resort`` (gets nothing as long as another engine of its pool is usable).
* ``back``: how many good windows in a row end it.
* ``hold_s``: its effect changes at most once in so many seconds.

The table itself stands in the scheduler role; docs/health.md has the reason and the source of each number.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from ansible_collections.ringmaster.inference.plugins.module_utils import xid_table
from ringmaster_scheduler.merge import MOST_RECENT

OUT: Final = "out"
LAST_RESORT: Final = "last_resort"
PROPORTIONAL: Final = "proportional"

LEAST_FACTOR: Final = 0.01
"""HAProxy's smallest weight beside its 100; a soft rule takes nobody out."""


READERS: Final = {"gpu": "gpu", "nvlink": "nvlink", "pcie": "pcie", "port": "rdma", "xid": "xid"}
"""The agent's reader that reads the subjects of a first word, and whose clock their windows go by."""


class RuleError(ValueError):
    """A rule is missing something, or has something unknown or out of its range; the message names rule and key."""


class Number(NamedTuple):
    """The range of a threshold, and whether it is a whole number."""

    lowest: float
    highest: float
    whole: bool = False


class Kind(NamedTuple):
    """A condition. `scope` is ``host`` where it is about a host's hardware and all its engines, else ``engine``.

    `subjects` are the first words of the subjects it looks at, see `READERS`; none for what the scheduler sees by
    itself. `numbers` are its thresholds; `lists` of words and
    `choices` of one word, each with the words there are. `measures` says that it tells how much is lost, which
    ``proportional`` needs.
    """

    text: str
    scope: str
    subjects: tuple[str, ...] = ()
    numbers: Mapping[str, Number] = {}
    lists: Mapping[str, tuple[str, ...]] = {}
    choices: Mapping[str, tuple[str, ...]] = {}
    measures: bool = False


_RATE: Final = Number(0, 1e9)
_AGE: Final = Number(1, 86_400)

KINDS: Final[dict[str, Kind]] = {
    "retransmit_ratio": Kind(
        "retransmit events of a RoCE port over its packets are over `over`; a window has at least `packets`, and while"
        " the rule holds is lengthened up to `lengthen` windows for want of them",
        "host",
        ("port",),
        {"over": Number(0, 1), "packets": Number(1, 1e12, True), "lengthen": Number(1, 1000, True)},
    ),
    "pcie_correctable_rate": Kind(
        "a device or the ports above it had more than `over` correctable PCIe errors a second",
        "host",
        ("pcie",),
        {"over": _RATE},
    ),
    "pcie_uncorrected": Kind(
        "a device or the ports above it had more than `over` uncorrectable PCIe errors in the window",
        "host",
        ("pcie",),
        {"over": _RATE},
    ),
    "pcie_replay_rate": Kind(
        "a card's PCIe replay counter grew by more than `over` a second", "host", ("gpu",), {"over": _RATE}
    ),
    "pcie_width": Kind(
        "a card's PCIe link, or that of a network adapter, has fewer lanes than it can",
        "host",
        ("gpu", "pcie"),
        measures=True,
    ),
    "pcie_speed": Kind(
        "a card's PCIe link runs at a lower generation than it can while the card has `load_percent` to do",
        "host",
        ("gpu",),
        {"load_percent": Number(1, 100)},
        measures=True,
    ),
    "ecc_uncorrected": Kind(
        "a card had more than `over` uncorrectable ECC errors in the window", "host", ("gpu",), {"over": _RATE}
    ),
    "remap_pending": Kind("a memory row of a card waits for its remapping", "host", ("gpu",)),
    "remap_failed": Kind("remapping a memory row of a card failed", "host", ("gpu",)),
    "nvlink_down": Kind("NVLinks of a card are down, or fewer than its model has", "host", ("nvlink",)),
    "nvlink_error_rate": Kind(
        "a card's NVLinks had more than `over` replay, recovery and CRC errors a second",
        "host",
        ("nvlink",),
        {"over": _RATE},
    ),
    "clock_lost": Kind(
        "heat or a power brake took more than `over` (share of 1) of a card's clock over the window",
        "host",
        ("gpu",),
        {"over": Number(0, 1)},
        measures=True,
    ),
    "card_state": Kind(
        "a card is in one of `states`",
        "host",
        ("gpu",),
        lists={"states": ("lost", "reset_required", "failed", "no_answer", "not_listed")},
    ),
    "recovery_action": Kind("the driver asks for a recovery action of a card", "host", ("gpu",)),
    "xid": Kind(
        "the kernel log had `count` Xids in the last `age_s` seconds that ask for one of `actions`; `driver`: what the"
        " driver's own recommendation after it must be: `asks_nothing`, or `not_heard`",
        "host",
        ("xid",),
        {"age_s": _AGE, "count": Number(1, MOST_RECENT, True)},
        {"actions": xid_table.ACTIONS},
        {"driver": ("asks_nothing", "not_heard", "any")},
    ),
    "agent_age": Kind("the node's agent was silent for more than `over_s`", "host", numbers={"over_s": _AGE}),
    "reader_age": Kind(
        "the agent is there, and what one of its readers of the hardware read is older than `over_s`",
        "host",
        numbers={"over_s": _AGE},
    ),
    "canary": Kind(
        "the engine's answer to the fixed question differs from the majority's; of `compare`: `pool` or `card`. A"
        " window is one answer; those that are older than five times `window_s` have no vote",
        "engine",
        choices={"compare": ("pool", "card")},
    ),
    "no_progress": Kind(
        "requests run, wait or were placed, and for `window_s` neither tokens nor iterations grew; a window without"
        " either is one bad one, and so are two questions of the canary in a row that came to no answer meanwhile",
        "engine",
    ),
}

_COMMON: Final = {
    "window_s": Number(0.1, 86_400),
    "windows": Number(1, 10_000, True),
    "back": Number(1, 10_000, True),
    "hold_s": Number(0, 86_400),
}


@dataclass(frozen=True)
class Rule:
    """One rule; times in seconds. `factor` is None unless the effect is one. `options` are the thresholds of its
    kind."""

    name: str
    kind: str
    window: float
    windows: int
    effect: str
    factor: float | None
    floor: float
    back: int
    hold: float
    options: Mapping[str, Any]

    @property
    def about(self) -> Kind:
        """What its kind is."""
        return KINDS[self.kind]

    @property
    def closes(self) -> bool:
        """Whether its effect is that an engine gets nothing."""
        return self.effect in (OUT, LAST_RESORT)

    def value(self, loss: float) -> float:
        """Return the factor of the weight while the rule holds and the share `loss` of the capability is lost; 0 where
        the effect is that an engine gets nothing.

        What is proportional goes in twentieths, so that noise moves no weight.
        """
        if self.closes:
            return 0.0
        if self.factor is not None:
            return self.factor
        return max(self.floor, round((1.0 - min(1.0, max(0.0, loss))) * 20) / 20)

    def document(self) -> dict[str, Any]:
        """Return the rule as plain types, in the form that `parse` takes."""
        document = {
            "kind": self.kind,
            **self.options,
            "window_s": self.window,
            "windows": self.windows,
            "effect": self.effect if self.factor is None else self.factor,
            "back": self.back,
            "hold_s": self.hold,
        }
        if self.effect == PROPORTIONAL:
            document["floor"] = self.floor
        return document


def parse(content: Any) -> tuple[Rule, ...]:
    """Return the rules that are in force, in order of their names. One with ``enabled: false`` is left out.

    Raises RuleError.
    """
    if not isinstance(content, dict):
        raise RuleError(f"expected an object of rules by name, found {content!r}")
    return tuple(_rule(name, content[name]) for name in sorted(content) if _enabled(name, content[name]))


def _enabled(name: str, entry: Any) -> bool:
    if not name.isidentifier():
        raise RuleError(f"{name!r}: expected a name of letters, digits and _")
    if not isinstance(entry, dict):
        raise RuleError(f"{name}: expected an object, found {entry!r}")
    enabled = entry.get("enabled", True)
    if not isinstance(enabled, bool):
        raise RuleError(f"{name}.enabled: expected true or false, found {enabled!r}")
    return enabled


def _rule(name: str, entry: dict[str, Any]) -> Rule:
    kind_name = entry.get("kind")
    kind = KINDS.get(kind_name) if isinstance(kind_name, str) else None
    if kind is None or not isinstance(kind_name, str):
        raise RuleError(f"{name}.kind: expected one of {', '.join(KINDS)}; found {kind_name!r}")
    own = {*kind.numbers, *kind.lists, *kind.choices}
    known = {"kind", "enabled", "effect", "floor", *_COMMON, *own}
    unknown = sorted(map(str, entry.keys() - known))
    if unknown:
        raise RuleError(f"{name}: unknown key {unknown[0]!r}; of {kind_name} known: {', '.join(sorted(known))}")
    missing = sorted({"effect", *_COMMON, *own} - entry.keys())
    if missing:
        raise RuleError(f"{name}.{missing[0]} is missing")
    options: dict[str, Any] = {key: _number(name, key, entry[key], limits) for key, limits in kind.numbers.items()}
    options.update({key: _words(name, key, entry[key], words) for key, words in kind.lists.items()})
    options.update({key: _word(name, key, entry[key], words) for key, words in kind.choices.items()})
    effect, factor, floor = _effect(name, entry, kind)
    common = {key: _number(name, key, entry[key], limits) for key, limits in _COMMON.items()}
    return Rule(
        name,
        kind_name,
        common["window_s"],
        common["windows"],
        effect,
        factor,
        floor,
        common["back"],
        common["hold_s"],
        options,
    )


def _effect(name: str, entry: dict[str, Any], kind: Kind) -> tuple[str, float | None, float]:
    effect = entry["effect"]
    if effect != PROPORTIONAL and "floor" in entry:
        raise RuleError(f"{name}.floor: expected only where the effect is {PROPORTIONAL}")
    if effect in (OUT, LAST_RESORT):
        return effect, None, LEAST_FACTOR
    if effect == PROPORTIONAL:
        if not kind.measures:
            raise RuleError(
                f"{name}.effect: {entry['kind']} does not tell how much is lost, so that nothing can be {effect}"
            )
        if "floor" not in entry:
            raise RuleError(f"{name}.floor is missing")
        return effect, None, _number(name, "floor", entry["floor"], Number(LEAST_FACTOR, 1))
    if isinstance(effect, (int, float)) and not isinstance(effect, bool) and LEAST_FACTOR <= effect <= 1:
        return "factor", float(effect), LEAST_FACTOR
    raise RuleError(
        f"{name}.effect: expected a factor from {LEAST_FACTOR:g} to 1, {OUT}, {LAST_RESORT} or {PROPORTIONAL};"
        f" found {effect!r}"
    )


def _number(name: str, key: str, value: Any, limits: Number) -> Any:
    right = isinstance(value, int if limits.whole else (int, float)) and not isinstance(value, bool)
    if not right or not limits.lowest <= value <= limits.highest:
        kind = "a whole number" if limits.whole else "a number"
        raise RuleError(f"{name}.{key}: expected {kind} from {limits.lowest:g} to {limits.highest:g}, found {value!r}")
    return value if limits.whole else float(value)


def _words(name: str, key: str, value: Any, words: tuple[str, ...]) -> tuple[str, ...]:
    if not isinstance(value, list) or not value or not all(each in words for each in value):
        raise RuleError(f"{name}.{key}: expected a list of some of {', '.join(words)}; found {value!r}")
    return tuple(value)


def _word(name: str, key: str, value: Any, words: tuple[str, ...]) -> str:
    if not isinstance(value, str) or value not in words:
        raise RuleError(f"{name}.{key}: expected one of {', '.join(words)}; found {value!r}")
    return value
