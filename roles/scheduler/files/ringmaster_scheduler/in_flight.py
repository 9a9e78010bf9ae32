# SPDX-License-Identifier: GPL-3.0-or-later
"""Which requests are under way, where, and with how many tokens: the books of the scheduler.

Four witnesses keep them right, each for what the others cannot see:

* the *decision* puts a request on an engine or in the line;
* HAProxy's *log* says when it ended, and on which server;
* HAProxy's *counts* (``show stat``) say how many requests of this gateway each server has, known or not;
* the engine's *reading* says how many it has from all gateways.

A request needs a moment from the decision until the others see it, so that a surplus or lack counts only beyond that
grace. What no witness confirms any more is dropped, the oldest first, so that no lost log line leaks for longer than
that.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ringmaster_scheduler.core import EngineState, Line
    from ringmaster_scheduler.domain import Decision, Ended
    from ringmaster_scheduler.score import Terms


class InFlight:
    """One request that was let in; times in seconds, lengths in tokens. What it holds is also what `explain` shows."""

    __slots__ = (
        "at",
        "class_name",
        "deadline",
        "decided",
        "ended",
        "engine",
        "estimated",
        "expected",
        "guessed",
        "id",
        "key_id",
        "line",
        "model",
        "placed_at",
        "position",
        "prefill_time",
        "prompt",
        "same_id",
        "state",
        "terms",
        "waiting",
    )

    def __init__(
        self,
        request_id: str,
        model: str,
        key_id: str,
        class_name: str,
        prompt: int,
        estimated: bool,
        expected: int,
        at: float,
        deadline: float,
        line: Line,
    ) -> None:
        self.id = request_id
        self.model = model
        self.key_id = key_id
        self.class_name = class_name
        self.prompt = prompt
        self.estimated = estimated
        self.expected = expected
        self.at = at
        self.deadline = deadline
        self.line = line
        self.decided: Decision | None = None
        self.ended: Ended | None = None
        self.state: EngineState | None = None
        # The engine it was given to, also when it has left the books, and how that engine stood at that moment.
        self.engine: str | None = None
        self.terms: Terms | None = None
        self.placed_at: float | None = None
        self.position = 0.0
        self.prefill_time = 0.0
        self.waiting = False
        self.guessed = False
        self.same_id: InFlight | None = None

    @property
    def tokens(self) -> int:
        """Tokens that it will need in all: its prompt and the expected answer."""
        return self.prompt + self.expected
