# SPDX-License-Identifier: GPL-3.0-or-later
"""What an engine can do, measured: tokens/s of prefill, tokens/s of a running sequence, and how far its prefill is.

Nothing here presumes a card: both rates come from the engine's own counters, read several times a second.

*Prefill.* Between two readings that both show requests waiting for no lack of slots or memory, the engine was never
idle, so that what it prefilled is what it can. That holds if those that wait have more than a step to be prefilled:
short prompts that come one by one wait for the end of a step each, and say nothing. (How much was prefilled must not
matter for whether it counts, or slow intervals alone would.) A long prompt enters the counter in one piece, when it is
done, often in the interval in which the queue empties; there it counts as far as the time before had too little. The
mean over ten seconds is a lower bound. As queues are short and rare when all is well, engines of one card lend each
other what was measured, and each one's own measurement counts by its length.

*Decoding.* What a running sequence produced, added up from interval to interval, is a position that each sequence
moves on by alike. An answer's length is the difference of two positions: nobody has to count tokens.

*Prefill clock.* `prefill_until` is when all prompts that were sent will be prefilled: each placement moves it on by
its tokens over the rate, and it is never in the past. So the work before an engine falls by itself, second by second,
between readings, and a reading that shows nobody waiting pulls it back to what one prompt may still take.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Final

from ringmaster_scheduler.domain import Reading
from ringmaster_scheduler.policy import Policy

_MEMORY: Final = 10.0
"""Seconds after which a measurement has lost its weight to newer ones: bursts of a chat service are seconds apart."""

_ENOUGH: Final = 0.4
"""Seconds of measured time before a measurement replaces what was presumed: two readings at the usual interval."""

_LENT: Final = 10.0
"""Seconds that the measurement of all engines of a card counts beside an engine's own."""

_LOWEST_RATE: Final = 1.0

_STEP: Final = 0.1
"""Seconds that a request may wait though nothing is before it: until a step ends, which is 0.02 to 0.1 s with many
sequences (the stand-in's card profiles)."""

_NEARLY: Final = 0.95
"""Share of the slots in use from which their number is what requests wait for."""


class _Rate:
    """A rate as two sums that fade together."""

    __slots__ = ("amount", "time")

    def __init__(self) -> None:
        self.amount = 0.0
        self.time = 0.0

    def add(self, amount: float, time: float, elapsed: float) -> None:
        kept = math.exp(-elapsed / _MEMORY)
        self.amount = self.amount * kept + amount
        self.time = self.time * kept + time

    def value(self, presumed: float) -> float:
        if self.time < _ENOUGH:
            return presumed
        return max(_LOWEST_RATE, self.amount / self.time)


class PrefillOfCard:
    """What all engines of one card and model have measured together."""

    __slots__ = ("_amount", "_time")

    def __init__(self, engines: Iterable[Capacity]) -> None:
        self._amount = self._time = 0.0
        for each in engines:
            self._amount += each._busy.amount
            self._time += each._busy.time

    def rate(self, presumed: float) -> float:
        """Return the rate in tokens/s; `presumed` until enough was measured."""
        return presumed if self._time < _ENOUGH else max(_LOWEST_RATE, self._amount / self._time)


class Capacity:
    """The measured capacity of one engine. Rates in tokens/s."""

    __slots__ = (
        "_any",
        "_busy",
        "_lacking",
        "_policy",
        "_position",
        "_position_at",
        "_position_rate",
        "_sequence",
        "last_prompt",
        "prefill_rate",
        "prefill_until",
        "sequence_rate",
    )

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._busy = _Rate()
        self._any = _Rate()
        self._sequence = _Rate()
        self._lacking = 0.0
        self.prefill_rate = policy.prefill_rate
        self.sequence_rate = policy.sequence_rate
        self.prefill_until = 0.0
        self.last_prompt = 0.0
        self._position = 0.0
        self._position_at = 0.0
        self._position_rate = policy.sequence_rate

    def position(self, now: float) -> float:
        """Return the tokens that one sequence would have produced so far, had it run all the time."""
        return self._position + max(0.0, now - self._position_at) * self._position_rate

    def work(self, now: float) -> float:
        """Return the seconds of prefill that a request would find before it."""
        left = self.prefill_until - now
        return left if left > 0 else 0.0

    def place(self, prompt_tokens: float, now: float) -> None:
        """Count a prompt that is on its way."""
        begin = self.prefill_until
        self.prefill_until = (max(now, begin)) + prompt_tokens / self.prefill_rate
        self.last_prompt = prompt_tokens

    def observe(
        self, before: Reading | None, reading: Reading, max_num_seqs: int, unseen_tokens: int, mean_prompt: float
    ) -> None:
        """Learn from a reading and the one before it. `unseen_tokens` are those of the prompts that were sent so late
        that the reading cannot show them, `mean_prompt` the tokens of a prompt as they are sent of late."""
        if before is not None and reading.begun_at > before.begun_at:
            self._learn_prefill(before, reading, max_num_seqs, mean_prompt)
            self._learn_decoding(before, reading)
        if reading.waiting == 0:
            # All prompts it knows of have begun; of one, the last, all may be left.
            longest = reading.begun_at + (self.last_prompt + unseen_tokens) / self.prefill_rate
            self.prefill_until = min(self.prefill_until, longest)

    def _learn_prefill(self, before: Reading, reading: Reading, max_num_seqs: int, mean_prompt: float) -> None:
        if reading.prompt_tokens is None or before.prompt_tokens is None:
            return
        elapsed = reading.begun_at - before.begun_at
        done = reading.prompt_tokens - before.prompt_tokens
        if done < 0:  # the engine was started anew
            return
        self._any.add(done, elapsed, elapsed)
        short_of_slots = max(before.running, reading.running) >= _NEARLY * max_num_seqs
        short_of_memory = max(before.kv_use or 0.0, reading.kv_use or 0.0) >= self._policy.watermark
        # Not the measured rate alone: once it is too low, a few tokens would be more than a step.
        step = _STEP * max(self.prefill_rate, self._policy.prefill_rate)
        if not before.waiting or short_of_slots or short_of_memory:
            self._lacking = 0.0
        elif min(before.waiting, reading.waiting) * mean_prompt >= step:
            self._busy.add(done, elapsed, elapsed)
            self._lacking = max(0.0, self._lacking + self.prefill_rate * elapsed - done)
        else:
            usual = self.prefill_rate * elapsed
            if done >= usual:
                self._busy.add(min(done, usual + self._lacking), elapsed, elapsed)
            self._lacking = 0.0

    def settle(self, card: PrefillOfCard) -> None:
        """Bring the rate of prefill up to date, with what all engines of the card have measured."""
        lent = card.rate(self._policy.prefill_rate)
        self.prefill_rate = max(
            (self._busy.amount + lent * _LENT) / (self._busy.time + _LENT), self._any.value(_LOWEST_RATE)
        )

    def _learn_decoding(self, before: Reading, reading: Reading) -> None:
        if reading.generation_tokens is None or before.generation_tokens is None:
            return
        elapsed = reading.begun_at - before.begun_at
        made = reading.generation_tokens - before.generation_tokens
        running = (before.running + reading.running) / 2
        if made < 0 or not running:
            return
        if before.running and reading.running:
            self._sequence.add(made, running * elapsed, elapsed)
            self.sequence_rate = self._sequence.value(self._policy.sequence_rate)
        self._position += made / running
        self._position_at = reading.begun_at
        self._position_rate = made / running / elapsed
