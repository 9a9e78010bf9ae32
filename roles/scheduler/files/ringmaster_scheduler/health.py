# SPDX-License-Identifier: GPL-3.0-or-later
"""From what is known of hosts and engines to one weight an engine, with the reasons for it.

Pure: no socket, no file, no clock; `now` is in seconds of any clock that does not run backwards.

How a rule comes to its effect:

* A *watch* follows one rule on one subject (a port, a card, an engine). Each window gives it evidence: bad, good, or
  none. So many bad windows in a row make the rule hold there, so many good ones end it; no evidence changes nothing.
* A *gate* is the rule on a host, or on an engine. It follows its watches, but never changes twice within the rule's
  hold time.
* An engine's weight is the product of the factors of its own gates and its host's. A gate that closes wins.

Windows go by the agent's clock, which runs since its host's start, and only while the reader they belong to reads. A
window is thrown away if that clock and the scheduler's own disagree about its length, if the agent or its host was
started again within it, or if it has a gap. A state that is bad at a window's end must be so at the next reading too.

A host's hardware concerns all its engines: the stream does not say which cards an engine uses.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from typing import Any, Final, NamedTuple

from ansible_collections.ringmaster.inference.plugins.module_utils import rdma_health
from ringmaster_scheduler.conditions import GROWTHS, NOTHING, STATES, Evidence
from ringmaster_scheduler.domain import Engine, Reading, Reason
from ringmaster_scheduler.health_rules import LAST_RESORT, LEAST_FACTOR, OUT, READERS, Rule
from ringmaster_scheduler.merge import AgentState, Change

HARDWARE_READERS: Final = tuple(dict.fromkeys(READERS.values()))

_NEVER: Final = float("-inf")

_FORGOTTEN_AFTER: Final = 1800.0
_FORGOTTEN_WINDOWS: Final = 3
"""Seconds, and windows, without any evidence after which a rule holds no more: nobody can say that it still does, and
an engine must not stay out because whoever saw the fault is gone."""

_ROW_FADES_AFTER: Final = 10
"""Windows without evidence after which a row of them is none any more."""

_STOOD_STILL: Final = 5.0
"""Seconds between two evaluations over which it was the scheduler that stood still; silence in that time is its own."""

_UNREADABLE_AFTER: Final = 5.0
"""Seconds since an engine's last reading after which its host's agent may be silent too: the host is being started."""

_LONGEST_WINDOW: Final = 2.5
_SLACK: Final = 5.0
"""A window that lasted more than so many times its length, and so many seconds or two periods of its reader, has a
gap."""

_CLOCKS_DIFFER: Final = 2.0
"""Seconds, or a fifth of the window, by which the agent's clock and the scheduler's may differ about its length: a line
may be under way for a while, but no clock runs so wrong without being set."""

_LEAST_READINGS: Final = 3
"""Readings without progress that it takes to call an engine hung, besides the time: one pause of everything is none."""

_MISSED_QUESTIONS: Final = 2
_HIDDEN_IDLE: Final = 180.0
"""Seconds without anything owed after which an engine is tried again that hung while it showed no request: that it goes
on showing none says nothing. Long enough for the canary's next question to come, or its answer."""

_LONGEST_PERIOD: Final = 86_400.0
"""Seconds between two questions of a canary that an agent may tell, as many as its configuration allows."""

_VOTES_FADE_AFTER: Final = 5
_MOST_PROMPTS: Final = 64
_MOST_CARDS: Final = 256

_MENTIONED_AFTER: Final = 90.0
"""Seconds after an agent's start in which it says of each reader that it read or why it can't: the process that reads
may take a minute to start. A reader that is not mentioned then has nothing to read any more."""

_SAME_START: Final = 2.0
"""Seconds by which the start of one process may seem to differ."""


class Verdict(NamedTuple):
    """An engine's weight: 0 for one that is to get nothing, else 0.01 to 1; and the reasons, the gravest first."""

    weight: float
    reasons: tuple[Reason, ...]


WELL: Final = Verdict(1.0, ())


class Watch:
    """One rule on one subject. `row` counts the windows in a row that speak against its state; `window` is how many
    seconds they last, more than the rule has it where evidence comes more seldom; `baseline` is where the present one
    begins, `stretched` how many it has been lengthened by."""

    __slots__ = (
        "active",
        "baseline",
        "checked_at",
        "evidence_at",
        "loss",
        "row",
        "rule",
        "stretched",
        "subject",
        "text",
        "window",
    )

    def __init__(self, rule: Rule, subject: str) -> None:
        self.rule = rule
        self.subject = subject
        self.window = rule.window
        self.active = False
        self.row = 0
        self.loss = 0.0
        self.text = ""
        self.evidence_at = _NEVER
        self.checked_at = _NEVER
        self.baseline: Any = None
        self.stretched = 0

    @property
    def forgotten_after(self) -> float:
        """Seconds without evidence after which the rule holds no more."""
        return max(_FORGOTTEN_AFTER, _FORGOTTEN_WINDOWS * self.window)

    def take(self, evidence: Evidence, now: float) -> None:
        """Take a window into account."""
        if evidence.bad is None:
            return
        if now - self.evidence_at > _ROW_FADES_AFTER * self.window:
            self.row = 0
        self.evidence_at = now
        if evidence.text or evidence.bad:
            self.text = evidence.text
        if evidence.bad:
            self.loss = evidence.loss
        if evidence.bad == self.active:
            self.row = 0
            return
        self.row += 1
        if self.row >= (self.rule.back if self.active else self.rule.windows):
            self.active = not self.active
            self.row = 0


class Gate:
    """One rule on a host or an engine: `value` is the factor of the weight, 0 where the rule closes, 1 where it does
    not hold; `text` and `subject` tell what it was set for."""

    __slots__ = ("active", "changed_at", "rule", "scope", "subject", "text", "value")

    def __init__(self, rule: Rule, scope: str) -> None:
        self.rule = rule
        self.scope = scope
        self.value = 1.0
        self.active = False
        self.changed_at = _NEVER
        self.subject = ""
        self.text = ""

    def settle(self, watches: Iterable[Watch], now: float) -> None:
        """Follow the watches, if the hold time lets it."""
        worst = max((watch for watch in watches if watch.active), key=lambda watch: watch.loss, default=None)
        value = 1.0 if worst is None else self.rule.value(worst.loss)
        active = worst is not None
        if (value, active) == (self.value, self.active):
            if worst is not None:
                self.subject, self.text = worst.subject, worst.text
            return
        if now - self.changed_at < self.rule.hold:
            return
        self.value, self.active, self.changed_at = value, active, now
        if worst is not None:
            self.subject, self.text = worst.subject, worst.text


class _Window:
    """The present window of a rule on a host: its start by the agent's clock and by the scheduler's, and the subjects
    that were bad at its end and have to be so once more."""

    __slots__ = ("now", "start", "suspects")

    def __init__(self, start: float, now: float) -> None:
        self.start = start
        self.now = now
        self.suspects: frozenset[str] | None = None


class _Period:
    """When a reader last read, by the agent's clock, and how long after the time before that."""

    __slots__ = ("at", "seconds")

    def __init__(self, at: float) -> None:
        self.at = at
        self.seconds = 0.0


class Host:
    """What is followed of a host. `arrived` is when each reader's last reading came, by the scheduler's clock, or when
    it was first said that it can't read; `periods` the time between its last two readings, by the agent's; `began_at`
    is when the first snapshot of the present agent came."""

    __slots__ = ("arrived", "began_at", "heard_at", "name", "periods", "state", "up_links", "watches", "windows")

    def __init__(self, name: str, now: float) -> None:
        self.name = name
        self.state: AgentState | None = None
        self.heard_at = now
        self.began_at = now
        self.arrived: dict[str, float] = {}
        self.periods: dict[str, _Period] = {}
        self.windows: dict[tuple[str, str], _Window] = {}
        self.watches: dict[str, dict[str, Watch]] = {}
        # Cards of which a link was up since the host's start.
        self.up_links: set[str] = set()


class Progress:
    """Whether an engine gets on with its work, by its own counters.

    `last` is the last reading, `grew_at` when the counters last grew, `moved_at` since when it owes answers without
    that, `idle_since` since when it owes none. What it owes are the requests that it shows, running or waiting. One
    whose core hangs while it has nothing to do goes on showing none, for it counts them only where it does steps; so it
    also owes what was placed there since it last got on, and `unanswered` questions of the canary, in a row.
    """

    __slots__ = (
        "grew_at",
        "hides",
        "idle_since",
        "last",
        "moved_at",
        "readings",
        "told",
        "unanswered",
        "watch",
    )

    def __init__(self, watch: Watch) -> None:
        self.watch = watch
        self.last: Reading | None = None
        self.grew_at = 0.0
        self.moved_at = 0.0
        self.idle_since: float | None = None
        self.readings = 0
        self.told = 0
        self.unanswered = 0
        # Whether it was found to hang while it showed no request.
        self.hides = False

    def observe(self, reading: Reading, placed: Sequence[float]) -> bool:
        """Take a reading, and when each request that it has from here was placed, the oldest first; return whether the
        watch had evidence."""
        last, self.last = self.last, reading
        if last is None or not _tells(reading):
            self._grew(reading.begun_at)
            return False
        steps = [
            now - before
            for now, before in zip(_counters(reading), _counters(last))
            if now is not None and before is not None
        ]
        started = (
            reading.process_start is not None
            and last.process_start is not None
            and abs(reading.process_start - last.process_start) > _SAME_START
        )
        if started or any(steps):
            self._grew(reading.begun_at)
            text = "started again" if started or min(steps, default=0) < 0 else "makes progress"
            return self._tell(Evidence(False, 0.0, text), reading.begun_at)
        shown = reading.running + reading.waiting
        unseen = [] if shown else [at for at in placed if at > self.grew_at]
        if not shown and not unseen:
            if self.unanswered:
                self._moved(reading.begun_at)
                return False
            idle_since = reading.begun_at if self.idle_since is None else self.idle_since
            self._moved(reading.begun_at)
            self.idle_since = idle_since
            # Only once it has been so for a while: an engine that hangs may show nothing running for a moment.
            patience = _HIDDEN_IDLE if self.hides else self.watch.rule.window
            if reading.begun_at - idle_since >= patience:
                return self._tell(Evidence(False, 0.0, "has nothing to do"), reading.begun_at)
            return False
        self.idle_since = None
        self.readings += 1
        stalled = reading.begun_at - max(self.moved_at, min(unseen, default=self.moved_at))
        passed = int(stalled / self.watch.rule.window)
        if passed <= self.told or self.readings < _LEAST_READINGS:
            return False
        self.told = passed
        self.hides = not shown
        owed = f"{len(unseen)} requests were placed" if unseen else f"{reading.running} requests run"
        if not unseen and not reading.running:
            owed = f"{reading.waiting} requests wait"
        text = f"{owed}, and no token or iteration for {stalled:.0f} s"
        return self._tell(Evidence(True, 1.0, text), reading.begun_at)

    def miss(self, asked_at: float, now: float) -> bool:
        """Take that a question of the canary, asked at that time, was not answered in time; return whether the watch
        had evidence. A busy engine may be late; one that did nothing at all since then, twice in a row, hangs."""
        if self.last is None or not _tells(self.last) or now - self.last.begun_at > _UNREADABLE_AFTER:
            return False
        if asked_at <= self.grew_at:
            return False
        self.unanswered += 1
        if self.unanswered < _MISSED_QUESTIONS:
            return False
        self.hides = not self.last.running + self.last.waiting
        text = f"{self.unanswered} questions in a row without an answer, and no token or iteration since the first"
        return self._tell(Evidence(True, 1.0, text), now)

    def stalled(self) -> float:
        """Return for how long it has made no progress with what runs, by its last reading."""
        return 0.0 if self.last is None or not self.readings else self.last.begun_at - self.moved_at

    def _grew(self, at: float) -> None:
        self.grew_at = at
        self.unanswered = 0
        self.hides = False
        self._moved(at)

    def _moved(self, at: float) -> None:
        self.moved_at = at
        self.idle_since = None
        self.readings = self.told = 0

    def _tell(self, evidence: Evidence, now: float) -> bool:
        # A good engine says so four times a second; only what may change anything is worth the time.
        if evidence.bad == self.watch.active and not self.watch.row and not evidence.bad:
            return False
        self.watch.take(evidence, now)
        return True


def _counters(reading: Reading) -> tuple[int | None, int | None, int | None]:
    return reading.generation_tokens, reading.prompt_tokens, reading.iterations


def _tells(reading: Reading) -> bool:
    """Whether it shows any counter of work."""
    return any(count is not None for count in _counters(reading))


class _Answer(NamedTuple):
    """An engine's answer, when it came, and how often that engine is asked, in seconds."""

    text: str
    at: float
    window: float


class _Votes:
    """The answers of one model's engines to the fixed questions. Of each question, who answered what and when; and what
    was last agreed, by all and by the engines of each card."""

    def __init__(self) -> None:
        self.answers: dict[str, dict[str, _Answer]] = {}
        self.agreed: dict[tuple[str, str], str] = {}

    def judge(
        self, engine: Engine, card_of: dict[str, str], prompt: str, answer: str, rule: Rule, window: float, now: float
    ) -> Evidence:
        """Take an answer, and compare it with the others'; `window` is how often it is asked, in seconds."""
        if prompt not in self.answers and len(self.answers) >= _MOST_PROMPTS:
            oldest = min(self.answers, key=lambda each: max(given.at for given in self.answers[each].values()))
            del self.answers[oldest]
            self.agreed = {key: value for key, value in self.agreed.items() if key[0] != oldest}
        votes = self.answers.setdefault(prompt, {})
        votes[engine.name] = _Answer(answer, now, window)
        for name in [name for name in votes if name not in card_of]:
            del votes[name]
        fresh = {
            name: given.text for name, given in votes.items() if now - given.at <= _VOTES_FADE_AFTER * given.window
        }
        own_card = [text for name, text in fresh.items() if card_of[name] == engine.card]
        of_card, of_pool = _majority(own_card), _majority(list(fresh.values()))
        if of_card is not None:
            self.agreed[prompt, engine.card] = of_card
        if of_pool is not None:
            self.agreed[prompt, ""] = of_pool
        # Engines of one card that agree are right among themselves: another card may round otherwise.
        known = [of_card, self.agreed.get((prompt, engine.card))]
        if rule.options["compare"] == "pool":
            known = [of_card, of_pool, *known[1:], self.agreed.get((prompt, ""))]
        reference = next((text for text in known if text is not None), None)
        if reference is None:
            return NOTHING
        if answer == reference:
            return Evidence(False, 0.0, "answers as the others do")
        agreeing = sum(text == reference for text in fresh.values())
        return Evidence(
            True, 1.0, f"answers the question {prompt[:60]} otherwise than {agreeing} of {len(fresh)} engines do"
        )


def _majority(answers: Sequence[str]) -> str | None:
    """Return the answer that more than half gave, and at least two; None if there is none."""
    if len(answers) < 2:
        return None
    answer, count = Counter(answers).most_common(1)[0]
    return answer if count > 1 and 2 * count > len(answers) else None


class HealthBook:
    """All hosts and engines, and what the rules make of them."""

    def __init__(self, rules: Sequence[Rule]) -> None:
        self.rules = tuple(rules)
        self._by_name = {rule.name: rule for rule in self.rules}
        self._by_reader: dict[str, list[tuple[Rule, str]]] = {}
        for rule in self.rules:
            for kind in rule.about.subjects:
                self._by_reader.setdefault(READERS[kind], []).append((rule, kind))
        self._ages = [rule for rule in self.rules if rule.kind in ("agent_age", "reader_age")]
        self._canaries = [rule for rule in self.rules if rule.kind == "canary"]
        self._stalls = [rule for rule in self.rules if rule.kind == "no_progress"]
        self._engines: dict[str, Engine] = {}
        self._pools: dict[str, list[str]] = {}
        self._of_host: dict[str, list[str]] = {}
        self.hosts: dict[str, Host] = {}
        # By engine and then by rule.
        self._progress: dict[str, dict[str, Progress]] = {}
        self._canary_watches: dict[str, dict[str, Watch]] = {}
        self._asked: dict[str, tuple[str, int]] = {}
        self._read_at: dict[str, float] = {}
        self._votes: dict[str, _Votes] = {}
        # By scope, which is a host or an engine, and then by rule. A gate that never closed is not there.
        self._gates: dict[tuple[str, str], dict[str, Gate]] = {}
        self._evaluated_at: float | None = None
        self._aged_at = _NEVER

    # Members --------------------------------------------------------------------------------------------------------

    def set_members(self, engines: Iterable[Engine], agents: Iterable[str], now: float) -> None:
        """Take the engines and the names of the hosts that have an agent. What is known of those that stay is kept; an
        engine that moved is another one."""
        former = self._engines
        self._engines = {engine.name: engine for engine in engines}
        self._pools, self._of_host = {}, {}
        for engine in self._engines.values():
            self._pools.setdefault(engine.model, []).append(engine.name)
            self._of_host.setdefault(engine.host, []).append(engine.name)
        wanted = dict.fromkeys(agents)
        self.hosts = {name: self.hosts.get(name) or Host(name, now) for name in wanted}
        for name, engine in former.items():
            other = self._engines.get(name)
            if other is None or (other.address, other.port, other.model) != (engine.address, engine.port, engine.model):
                self._progress.pop(name, None)
                self._canary_watches.pop(name, None)
                self._asked.pop(name, None)
                self._read_at.pop(name, None)
                self._gates.pop(("engine", name), None)
        for scope in [scope for scope in self._gates if scope[0] == "host" and scope[1] not in self.hosts]:
            del self._gates[scope]
        self._votes = {model: votes for model, votes in self._votes.items() if model in self._pools}

    # What is seen ---------------------------------------------------------------------------------------------------

    def observe_agent(self, state: AgentState, change: Change | None, now: float) -> None:
        """Take a line of an agent's stream, which `state` holds already; without `change` it said only that the agent
        is there."""
        host = self.hosts.get(state.host)
        if host is None:
            return
        host.state = state
        host.heard_at = now
        if change is None:
            return
        if change.new_boot or change.new_agent:
            # Counters of the agent begin anew with it, all others with the host: what began before is no window.
            host.windows.clear()
            host.periods.clear()
            host.began_at = now
        if change.new_boot:
            host.up_links.clear()
        self._follow_readers(host, state, change, now)
        for subject in change.subjects:
            kind, _unused, name = subject.partition("/")
            if kind == "canary":
                self._answer(host, name, state, now)
            elif kind == "nvlink":
                self._see_links(host, subject, state)
        for reader in change.read & self._by_reader.keys():
            at = state.read[reader]
            for rule, kind in self._by_reader[reader]:
                self._advance(host, rule, kind, at, now)
            period = host.periods.setdefault(reader, _Period(at))
            period.at, period.seconds = at, max(0.0, at - period.at)

    @staticmethod
    def _follow_readers(host: Host, state: AgentState, change: Change, now: float) -> None:
        """Note which readers read, and since when those have not that can't."""
        if change.snapshot:
            told = {name: now - max(0.0, state.seconds - at) for name, at in state.read.items()}
        else:
            told = dict.fromkeys(change.read, now)
        for name in HARDWARE_READERS:
            if name in told:
                host.arrived[name] = told[name]
            # A journal that never showed a line of the kernel (a container's) is no fault that comes or goes.
            if name in state.unknown and name != "xid":
                host.arrived.setdefault(name, now)

    def observe_reading(self, engine: Engine, reading: Reading, placed: Sequence[float] = ()) -> None:
        """Take a good reading of an engine; where it shows no request, `placed` is when those were placed that it has
        from this gateway, the oldest first."""
        known = self._engines.get(engine.name)
        if known is None or (known.address, known.port, known.model) != (engine.address, engine.port, engine.model):
            return
        self._read_at[engine.name] = reading.begun_at
        of_engine = self._progress.get(engine.name)
        if of_engine is None:
            of_engine = self._progress[engine.name] = {
                rule.name: Progress(Watch(rule, f"engine/{engine.name}")) for rule in self._stalls
            }
        for progress in of_engine.values():
            if progress.last is not None and reading.begun_at < progress.last.begun_at:
                continue
            if progress.observe(reading, placed):
                self._settle(progress.watch.rule, ("engine", engine.name), (progress.watch,), reading.begun_at)

    @staticmethod
    def _see_links(host: Host, subject: str, state: AgentState) -> None:
        quantities = state.subjects.get(subject, {})
        down, links = quantities.get("down"), quantities.get("links")
        if down is not None and links is not None and len(down) < links and len(host.up_links) < _MOST_CARDS:
            host.up_links.add(subject)

    def _answer(self, host: Host, name: str, state: AgentState, now: float) -> None:
        """Take the answer of an engine to the fixed question; one that failed says nothing about right or wrong."""
        engine = self._engines.get(name)
        quantities = state.subjects.get(f"canary/{name}")
        if engine is None or engine.host != host.name or quantities is None:
            return
        number, prompt, answer = (quantities.get(key) for key in ("number", "prompt", "answer"))
        if number is None or self._asked.get(name) == (state.agent, number):
            return
        self._asked[name] = state.agent, number
        asked = quantities.get("asked")
        if quantities.get("timed_out") and asked is not None:
            for progress in self._progress.get(name, {}).values():
                if progress.miss(now - (state.seconds - asked), now):
                    self._settle(progress.watch.rule, ("engine", name), (progress.watch,), now)
        watches = self._canary_watches.setdefault(
            name, {rule.name: Watch(rule, f"canary/{name}") for rule in self._canaries}
        )
        for watch in watches.values():
            watch.window = max(watch.rule.window, min(quantities.get("interval", 0.0), _LONGEST_PERIOD))
        if quantities.get("error") or prompt is None or answer is None:
            return
        card_of = {other: self._engines[other].card for other in self._pools[engine.model]}
        votes = self._votes.setdefault(engine.model, _Votes())
        for watch in watches.values():
            watch.take(votes.judge(engine, card_of, prompt, answer, watch.rule, watch.window, now), now)
            self._settle(watch.rule, ("engine", name), (watch,), now)

    # Windows of a host's hardware -----------------------------------------------------------------------------------

    def _advance(self, host: Host, rule: Rule, kind: str, at: float, now: float) -> None:
        """Look whether a window of a rule on subjects of a kind has ended; their reader has just read, at `at` by the
        agent's clock."""
        window = host.windows.get((rule.name, kind))
        elapsed = 0.0 if window is None else at - window.start
        # The reading that a suspicion waits for may come late: what has no answer makes its reader slow.
        longest = self._longest(host, rule, kind)
        if window is None or elapsed < 0 or (elapsed > longest and window.suspects is None):
            self._begin(host, rule, kind, at, now)
            return
        if elapsed < rule.window or elapsed <= 0:
            return
        if abs(elapsed - (now - window.now)) > max(_CLOCKS_DIFFER, elapsed / 5):
            self._begin(host, rule, kind, at, now)
            return
        evidence = self._evidence(host, rule, kind, elapsed)
        if rule.kind in STATES:
            bad = frozenset(subject for subject, each in evidence.items() if each.bad)
            if bad and window.suspects is None:
                window.suspects = bad
                return
            for subject in bad - (window.suspects or frozenset()):
                evidence[subject] = NOTHING
        watches = host.watches.setdefault(rule.name, {})
        for subject, each in evidence.items():
            if each.bad is not None:
                watch = watches.get(subject)
                if watch is None:
                    watch = watches[subject] = Watch(rule, subject)
                watch.window = max(rule.window, min(elapsed, longest))
                watch.take(each, now)
        self._settle(rule, ("host", host.name), watches.values(), now)
        self._begin(host, rule, kind, at, now)

    @staticmethod
    def _longest(host: Host, rule: Rule, kind: str) -> float:
        """Return the seconds over which a window has a gap. A state takes two readings at a window's end."""
        period = host.periods.get(READERS[kind])
        return _LONGEST_WINDOW * rule.window + max(_SLACK, 0.0 if period is None else 2 * period.seconds)

    def _begin(self, host: Host, rule: Rule, kind: str, at: float, now: float) -> None:
        """Begin a window."""
        host.windows[rule.name, kind] = _Window(at, now)
        if rule.kind in STATES:
            return
        watches = host.watches.setdefault(rule.name, {})
        assert host.state is not None
        for subject, quantities in host.state.subjects.items():
            if subject.partition("/")[0] != kind:
                continue
            watch = watches.get(subject)
            if watch is None:
                watch = watches[subject] = Watch(rule, subject)
            if rule.kind != "retransmit_ratio":
                watch.baseline = dict(quantities)
            elif not watch.stretched:
                watch.baseline = quantities.get("sample")

    def _evidence(self, host: Host, rule: Rule, kind: str, seconds: float) -> dict[str, Evidence]:
        """Return what the window that ends now says of each subject."""
        state = host.state
        assert state is not None
        watches = host.watches.get(rule.name, {})
        found: dict[str, Evidence] = {}
        for subject, quantities in state.subjects.items():
            if subject.partition("/")[0] != kind:
                continue
            watch = watches.get(subject)
            if rule.kind in STATES:
                evidence = STATES[rule.kind](rule, subject, quantities, state)
                # Of a card that no bridge joins to another one no link was ever up.
                if rule.kind == "nvlink_down" and evidence.bad is None and evidence.loss and subject in host.up_links:
                    evidence = evidence._replace(bad=True)
                found[subject] = evidence
            elif watch is None or watch.baseline is None:
                continue
            elif rule.kind == "retransmit_ratio":
                found[subject] = _retransmits(watch, quantities.get("sample"))
            else:
                found[subject] = GROWTHS[rule.kind](rule, watch.baseline, quantities, seconds)
        own = [subject for subject in watches if subject.partition("/")[0] == kind]
        for subject in [subject for subject in own if subject not in state.subjects]:
            # What is not there any more does no harm: it is as good as well, but only as slowly as by good windows.
            if watches[subject].active:
                found[subject] = Evidence(False, 0.0, "is not there any more")
            else:
                del watches[subject]
        return found

    # The weight -----------------------------------------------------------------------------------------------------

    def _settle(self, rule: Rule, scope: tuple[str, str], watches: Iterable[Watch], now: float) -> None:
        gates = self._gates.setdefault(scope, {})
        gate = gates.get(rule.name)
        if gate is None:
            if not any(watch.active for watch in watches):
                return
            gate = gates[rule.name] = Gate(rule, scope[1])
        gate.settle(watches, now)

    def _watches(self, scope: tuple[str, str], rule: Rule) -> Collection[Watch]:
        kind, name = scope
        if kind == "host":
            host = self.hosts.get(name)
            return () if host is None else host.watches.get(rule.name, {}).values()
        progress = self._progress.get(name, {}).get(rule.name)
        canary = self._canary_watches.get(name, {}).get(rule.name)
        return [watch for watch in (None if progress is None else progress.watch, canary) if watch is not None]

    def evaluate(self, now: float, usable: Collection[str]) -> dict[str, Verdict]:
        """Return the verdict on every engine; to be called several times a second. `usable` are the engines that are
        healthy and that no operator has drained."""
        self._follow_silence(now)
        if now - self._aged_at >= 1.0:
            self._aged_at = now
            self._age(now)
        for scope, gates in self._gates.items():
            for gate in gates.values():
                watches = self._watches(scope, gate.rule)
                for watch in watches:
                    if watch.active and now - watch.evidence_at > watch.forgotten_after:
                        watch.active = False
                        watch.row = 0
                gate.settle(watches, now)
        verdicts: dict[str, Verdict] = {}
        spare: set[str] = set()
        for name, engine in self._engines.items():
            verdicts[name] = self._verdict(engine, spare)
        for names in self._pools.values():
            left = [name for name in names if name in spare]
            if left and not any(name in usable and verdicts[name].weight and name not in spare for name in names):
                continue
            for name in left:
                verdicts[name] = verdicts[name]._replace(weight=0.0)
        return verdicts

    def _verdict(self, engine: Engine, spare: set[str]) -> Verdict:
        """Return the verdict as it is if the engine has to serve; it is added to `spare` if another one should."""
        gates = [
            gate
            for scope in (("host", engine.host), ("engine", engine.name))
            for gate in self._gates.get(scope, {}).values()
            if gate.active
        ]
        if not gates:
            return WELL
        weight = 1.0
        for gate in gates:
            if gate.rule.effect == OUT:
                weight = 0.0
            elif gate.rule.effect == LAST_RESORT:
                spare.add(engine.name)
                weight = min(weight, LEAST_FACTOR)
            else:
                weight *= gate.value
        reasons = [Reason(gate.rule.name, gate.subject, gate.value, gate.text, gate.changed_at) for gate in gates]
        reasons.sort(key=lambda reason: (reason.factor, reason.rule))
        if weight:
            weight = round(max(LEAST_FACTOR, weight), 4)
        return Verdict(weight, tuple(reasons))

    def _follow_silence(self, now: float) -> None:
        """Do not hold against agents what is not theirs: time in which the scheduler stood still, and in which their
        host was being started."""
        before, self._evaluated_at = self._evaluated_at, now
        if before is None or now <= before:
            return
        passed = now - before
        for host in self.hosts.values():
            if passed > _STOOD_STILL or self._is_starting(host, now):
                host.heard_at += passed
                for name in host.arrived:
                    host.arrived[name] += passed

    def _is_starting(self, host: Host, now: float) -> bool:
        read_at = [self._read_at[name] for name in self._of_host.get(host.name, ()) if name in self._read_at]
        return bool(read_at) and now - max(read_at) > _UNREADABLE_AFTER

    def _age(self, now: float) -> None:
        for host in self.hosts.values():
            if host.state is not None and now - host.began_at > _MENTIONED_AFTER:
                known = host.state.read.keys() | host.state.unknown.keys()
                host.arrived = {name: at for name, at in host.arrived.items() if name in known}
            silence = now - host.heard_at
            for rule in self._ages:
                if rule.kind == "agent_age":
                    ages = {"agent": silence}
                else:
                    # While the agent is silent nothing is read, which is another rule's matter.
                    ages = {
                        name: host.heard_at - host.arrived[name] for name in HARDWARE_READERS if name in host.arrived
                    }
                self._take_ages(host, rule, ages, now)

    def _take_ages(self, host: Host, rule: Rule, ages: dict[str, float], now: float) -> None:
        watches = host.watches.setdefault(rule.name, {})
        for subject in [subject for subject in watches if subject not in ages]:
            ages[subject] = 0.0
        for subject, age in ages.items():
            old = age > rule.options["over_s"]
            watch = watches.get(subject)
            if watch is None:
                if not old:
                    continue
                watch = watches[subject] = Watch(rule, subject)
            if now - watch.checked_at >= rule.window:
                watch.checked_at = now
                what = "no word from the agent" if rule.kind == "agent_age" else f"the reader {subject} read nothing"
                watch.take(Evidence(old, 1.0, f"{what} for {age:.0f} s" if old else "is there"), now)
        self._settle(rule, ("host", host.name), watches.values(), now)

    # Over a restart of the scheduler ---------------------------------------------------------------------------------

    def closed(self) -> list[dict[str, str]]:
        """Return which rules keep engines out, for whoever keeps that over a restart."""
        return [
            {"kind": scope[0], "scope": scope[1], "rule": gate.rule.name, "subject": gate.subject, "text": gate.text}
            for scope, gates in self._gates.items()
            for gate in gates.values()
            if gate.active and gate.rule.closes
        ]

    def restore(self, entries: Iterable[dict[str, str]], now: float) -> None:
        """Take up what `closed` had told before a restart; what is no member or rule any more is left out. It goes on
        until the rule's good windows end it."""
        for entry in entries:
            rule = self._by_name.get(entry["rule"])
            kind, name = entry["kind"], entry["scope"]
            if rule is None or not rule.closes:
                continue
            watch = Watch(rule, entry["subject"])
            watch.active, watch.text, watch.loss, watch.evidence_at = True, entry["text"], 1.0, now
            if kind == "host" and name in self.hosts and rule.about.scope == "host":
                self.hosts[name].watches.setdefault(rule.name, {})[watch.subject] = watch
            elif kind == "engine" and name in self._engines and rule.kind == "canary":
                self._canary_watches.setdefault(
                    name, {each.name: Watch(each, f"canary/{name}") for each in self._canaries}
                )[rule.name] = watch
            elif kind == "engine" and name in self._engines and rule.kind == "no_progress":
                self._progress.setdefault(
                    name, {each.name: Progress(Watch(each, f"engine/{name}")) for each in self._stalls}
                )[rule.name] = Progress(watch)
            else:
                continue
            self._settle(rule, (kind, name), (watch,), now)

    # For people -----------------------------------------------------------------------------------------------------

    def stalled(self, engine: str) -> float:
        """Return for how many seconds an engine has made no progress with what runs."""
        return max((progress.stalled() for progress in self._progress.get(engine, {}).values()), default=0.0)

    def watches(self, host: str) -> list[tuple[Watch, Gate | None]]:
        """Return every watch of a host and of its engines that says anything, with its gate."""
        found: list[tuple[Watch, Gate | None]] = []
        known = self.hosts.get(host)
        if known is not None:
            for name, watches in known.watches.items():
                gate = self._gates.get(("host", host), {}).get(name)
                found += [(watch, gate) for watch in watches.values() if watch.active or watch.row]
        for engine in self._of_host.get(host, ()):
            gates = self._gates.get(("engine", engine), {})
            of_engine = [progress.watch for progress in self._progress.get(engine, {}).values()]
            of_engine += self._canary_watches.get(engine, {}).values()
            found += [(watch, gates.get(watch.rule.name)) for watch in of_engine if watch.active or watch.row]
        return found


def _retransmits(watch: Watch, sample: rdma_health.Sample | None) -> Evidence:
    """Return what a window of a RoCE port says; one with too little traffic says nothing.

    While the rule holds, that would be for ever: at a tenth of its weight a node has a tenth of the traffic. So the
    window is then lengthened until it has the packets; at its greatest length it is judged by what there was, and a
    port that carries nothing at all does no harm.
    """
    rule = watch.rule
    if sample is None:
        watch.stretched = 0
        return NOTHING
    stretched_out = watch.stretched + 1 >= rule.options["lengthen"]
    minimum = 1 if watch.active and stretched_out else rule.options["packets"]
    window = rdma_health.judge(watch.baseline, sample, rule.options["over"], minimum)
    if window.verdict == rdma_health.INSUFFICIENT and watch.active:
        if not stretched_out:
            watch.stretched += 1
            return NOTHING
        watch.stretched = 0
        return Evidence(False, 0.0, "carries no packets")
    watch.stretched = 0
    if window.bad is None or window.ratio is None:
        return NOTHING
    return Evidence(
        window.bad, 0.0, f"{window.ratio:.3%} retransmit events a packet, allowed {rule.options['over']:.3%}"
    )
