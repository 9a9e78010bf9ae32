# SPDX-License-Identifier: GPL-3.0-or-later
"""The model of an engine: continuous batching with chunked prefill over paged key-value memory, in simulated time.

Card profiles and the duration of a step are those of the stand-in engine (``cards.py``, where their sources are). The
order within a step is vLLM's: running sequences first, in order of arrival, each with the tokens it lacks as far as
the token budget goes; then waiting ones, as far as blocks for all of their prompt are free; when a running sequence
finds no block, the youngest is preempted and computed again later. Unlike the stand-in, sequences are numbers of
tokens, not texts, and runs of steps in which nothing but decoding happens are taken in one leap, so that a day is
simulated in minutes.
"""

from __future__ import annotations

import math
from collections import OrderedDict, deque
from collections.abc import Callable

from standin_engine import cards

LONGEST_LEAP = 0.25
"""Seconds of decoding that are taken in one leap at most, so that the counters are never older."""


class Sequence:
    """One request inside an engine; tokens as integers, times in seconds of simulated time.

    ``output`` is the number of tokens it will produce. ``prefix`` names the beginning it shares with others, of
    ``prefix_tokens``.
    """

    __slots__ = (
        "computed",
        "first_token_at",
        "output",
        "prefix",
        "prefix_tokens",
        "preemptions",
        "produced",
        "prompt",
        "request",
        "reserved",
    )

    def __init__(self, request: object, prompt: int, output: int, prefix: str | None, prefix_tokens: int) -> None:
        self.request = request
        self.prompt = prompt
        self.output = output
        self.prefix = prefix
        self.prefix_tokens = prefix_tokens
        self.computed = 0
        self.produced = 0
        self.reserved = 0
        self.preemptions = 0
        self.first_token_at: float | None = None

    @property
    def total(self) -> int:
        """Tokens whose keys and values must be there before the next one."""
        return self.prompt + self.produced


class Engine:
    """An engine of one card. ``step`` plans and computes; the caller advances the clock to ``busy_until``."""

    def __init__(
        self,
        name: str,
        card: str,
        max_num_seqs: int = cards.MAX_NUM_SEQS,
        token_budget: int = cards.MAX_NUM_BATCHED_TOKENS,
        kv_tokens: int | None = None,
        time_scale: float = 1.0,
        adapters: tuple[str, ...] = (),
        long_prefill_tokens: int = 0,
    ) -> None:
        self.name = name
        self.card = card
        self.max_num_seqs = max_num_seqs
        self.token_budget = token_budget
        blocks = cards.blocks_that_fit(
            cards.CARDS[card], cards.MODEL, cards.GPU_MEMORY_UTILIZATION, token_budget, cards.BLOCK_SIZE
        )
        self.kv_tokens = kv_tokens or blocks * cards.BLOCK_SIZE
        self.adapters = adapters
        # vLLM's --long-prefill-token-threshold: most tokens of one prompt in one step; 0 is no limit but the budget.
        self.chunk = long_prefill_tokens or token_budget
        self.clock = cards.StepClock(cards.CARDS[card], cards.MODEL, time_scale)
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.reserved = 0
        self.alive = True
        # Beginnings whose keys and values are still in free blocks, least recently used first, with their tokens.
        self._prefixes: OrderedDict[str, int] = OrderedDict()
        self._prefix_total = 0
        # Counters as the engine's metrics show them.
        self.prompt_tokens = 0
        self.prompt_tokens_cached = 0
        self.generation_tokens = 0
        self.preemptions = 0
        self.busy_seconds = 0.0
        self._step: list[tuple[Sequence, int]] = []
        self._step_begun_at = 0.0
        self._step_seconds = 0.0
        self._leap = 1
        self.busy_until: float | None = None

    @property
    def kv_use(self) -> float:
        """Share of the key-value memory in use, 0 to 1."""
        return self.reserved / self.kv_tokens

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence."""
        self.waiting.append(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Forget a sequence whose client has left."""
        if sequence in self.running:
            self.running.remove(sequence)
            self._release(sequence)
        elif sequence in self.waiting:
            self.waiting.remove(sequence)

    def begin(self, now: float) -> bool:
        """Plan the next step and set ``busy_until``; False if there is nothing to do."""
        step: list[tuple[Sequence, int]] = []
        budget = self.token_budget
        tokens = cached = 0
        preempted = False
        index = 0
        while index < len(self.running) and budget > 0:
            sequence = self.running[index]
            wanted = min(sequence.total - sequence.computed, budget, self.chunk)
            if not self._make_room(sequence, sequence.computed + wanted):
                preempted = True
                break
            step.append((sequence, wanted))
            tokens += wanted
            cached += sequence.computed
            budget -= wanted
            index += 1
        if not preempted:
            while self.waiting and budget > 0 and len(self.running) < self.max_num_seqs:
                sequence = self.waiting[0]
                found = self._cached(sequence)
                if self.reserved + sequence.total > self.kv_tokens:
                    break
                self.waiting.popleft()
                wanted = min(sequence.total - found, budget, self.chunk)
                sequence.computed = found
                if sequence.preemptions == 0:
                    self.prompt_tokens_cached += found
                self._reserve(sequence, sequence.total)
                self.running.append(sequence)
                step.append((sequence, wanted))
                tokens += wanted
                cached += found
                budget -= wanted
        if not step:
            self.busy_until = None
            return False
        seconds = self.clock.seconds(len(step), tokens, cached)
        self._leap = 1
        if tokens == len(step) and not self.waiting and len(step) == len(self.running):
            # Only decoding, nobody waits: the same step again until the first ends or memory is short.
            limit = min(sequence.output - sequence.produced for sequence in self.running)
            room = (self.kv_tokens - self.reserved) // len(step) // cards.BLOCK_SIZE * cards.BLOCK_SIZE
            self._leap = max(1, min(limit, room, int(LONGEST_LEAP / seconds)))
        self._step = step
        self._step_begun_at = now
        self._step_seconds = seconds
        self.busy_until = now + seconds * self._leap
        return True

    def interrupt(self, now: float) -> bool:
        """End a leap with the step that runs now, for something has come in; whether ``busy_until`` has moved."""
        if self._leap == 1 or self.busy_until is None:
            return False
        done = max(1, math.ceil((now - self._step_begun_at) / self._step_seconds))
        if done >= self._leap:
            return False
        self._leap = done
        self.busy_until = self._step_begun_at + self._step_seconds * done
        return True

    def finish(self, now: float, first_token: Callable[[Sequence], None], ended: Callable[[Sequence], None]) -> None:
        """Count the step that ends now."""
        leap = self._leap
        self.busy_seconds += self._step_seconds * leap
        for sequence, tokens in self._step:
            if sequence.reserved == 0:
                continue  # taken out or preempted meanwhile
            sequence.computed += tokens + leap - 1
            if leap > 1:
                self._reserve(sequence, sequence.computed)
            if sequence.computed < sequence.total:
                continue
            sequence.produced += leap
            self.generation_tokens += leap
            if sequence.first_token_at is None:
                sequence.first_token_at = now
                self.prompt_tokens += sequence.prompt
                first_token(sequence)
            if sequence.produced >= sequence.output:
                self.running.remove(sequence)
                self._release(sequence)
                self._remember(sequence)
                ended(sequence)
        self._step = []
        self.busy_until = None

    def _reserve(self, sequence: Sequence, tokens: int) -> None:
        """Grow a sequence's share of the memory to ``tokens``, in whole blocks."""
        wanted = math.ceil(tokens / cards.BLOCK_SIZE) * cards.BLOCK_SIZE
        if wanted > sequence.reserved:
            self.reserved += wanted - sequence.reserved
            sequence.reserved = wanted

    def _release(self, sequence: Sequence) -> None:
        self.reserved -= sequence.reserved
        sequence.reserved = 0

    def _make_room(self, sequence: Sequence, tokens: int) -> bool:
        wanted = math.ceil(tokens / cards.BLOCK_SIZE) * cards.BLOCK_SIZE - sequence.reserved
        while wanted > 0 and self.reserved + wanted > self.kv_tokens:
            victim = self.running.pop()
            self._release(victim)
            victim.computed = 0
            victim.preemptions += 1
            self.preemptions += 1
            self.waiting.appendleft(victim)
            if victim is sequence:
                return False
        self._reserve(sequence, tokens)
        return True

    def _cached(self, sequence: Sequence) -> int:
        """Tokens of the prompt whose keys and values are there already; one is always left to compute."""
        if sequence.prefix is None or sequence.prefix not in self._prefixes:
            return 0
        self._prefixes.move_to_end(sequence.prefix)
        found = min(sequence.prefix_tokens, sequence.prompt - 1)
        return found - found % cards.BLOCK_SIZE

    def _remember(self, sequence: Sequence) -> None:
        if sequence.prefix is None:
            return
        if sequence.prefix not in self._prefixes:
            self._prefixes[sequence.prefix] = sequence.prefix_tokens
            self._prefix_total += sequence.prefix_tokens
        self._prefixes.move_to_end(sequence.prefix)
        while self._prefix_total > max(0, self.kv_tokens - self.reserved):
            _unused, tokens = self._prefixes.popitem(last=False)
            self._prefix_total -= tokens
