# SPDX-License-Identifier: GPL-3.0-or-later
"""The engine: runs the scheduler's steps in real time and hands every token to whoever asked for it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from operator import itemgetter
from typing import Protocol

from . import cards
from .answers import Answer
from .config import Config
from .faults import Faults
from .metrics import EngineMetrics
from .scheduler import Scheduler, SequenceState, Step
from .tokenizer import END_OF_TEXT, Tokenizer

logger = logging.getLogger("standin_engine")

HANG_POLL_SECONDS = 0.05
LAG_LIMIT_SECONDS = 0.05
"""A loop that is later than this does not try to catch up: the processor, not the card, sets the pace then."""


class QueueFullError(Exception):
    """The request was refused because too much waits already; its first argument is the message for the client."""


class StopScanner:
    """Looks for stop strings in text that comes in pieces, and holds back what may be the beginning of one."""

    def __init__(self, stops: Sequence[str], include: bool) -> None:
        self._stops = stops
        self._include = include
        self._hold = 0 if include else max(map(len, stops)) - 1
        self._longest = max(map(len, stops))
        self._held = ""
        self._tail = ""

    def feed(self, text: str, last: bool, active: bool) -> tuple[str, str | None]:
        """Add a piece; gives the text that may be shown and the stop string that was found, if any.

        Args:
            text: the new piece.
            last: whether nothing follows, so that nothing is held back.
            active: whether stop strings count yet (they do not before ``min_tokens``).
        """
        buffer = self._held + text
        if active:
            # With stop strings included, text is shown at once: a match may begin in what was shown already.
            window = self._tail + buffer
            found = [(window.index(stop) + len(stop), stop) for stop in self._stops if stop in window]
            if found:
                # As in vLLM the one that is complete first counts, and of those the one named first.
                end, stop = min(found, key=itemgetter(0))
                end -= len(self._tail) + (0 if self._include else len(stop))
                return buffer[: max(end, 0)], stop
        cut = len(buffer) if last else max(len(buffer) - self._hold, 0)
        self._held = buffer[cut:]
        if self._include:
            self._tail = (self._tail + buffer)[-(self._longest - 1) :] if self._longest > 1 else ""
        return buffer[:cut], None


class Sink(Protocol):
    """Receives the tokens of a request as they are made."""

    def push(self, generation: Generation, token: int, text: str | None) -> None:
        """Take a token.

        Args:
            generation: which of the request's answers it belongs to; its ``finish_reason`` is set on the last token.
            token: the token id.
            text: what may be shown now, if that is not simply the token's text.
        """


class Generation(SequenceState):
    """One answer of a request, with its limits and times (seconds of the event loop's clock)."""

    __slots__ = (
        "answer",
        "finish_reason",
        "first_token_time",
        "group",
        "ignore_eos",
        "index",
        "last_token_time",
        "max_tokens",
        "min_tokens",
        "scanner",
        "scheduled_time",
        "shown",
        "stop_reason",
        "stop_token_ids",
    )

    def __init__(
        self,
        prompt: Sequence[int],
        answer: Answer,
        *,
        index: int,
        max_tokens: int,
        min_tokens: int = 0,
        ignore_eos: bool = False,
        stops: Sequence[str] = (),
        include_stop: bool = False,
        stop_token_ids: Sequence[int] = (),
        adapter: str = "",
        salt: str = "",
    ) -> None:
        super().__init__(prompt, adapter, salt)
        self.answer = answer
        self.index = index
        self.max_tokens = max_tokens
        self.min_tokens = min_tokens
        self.ignore_eos = ignore_eos
        self.stop_token_ids = frozenset(stop_token_ids)
        self.scanner = StopScanner(stops, include_stop) if stops else None
        self.shown: list[str] = []
        """Text shown so far; kept only if there are stop strings."""
        self.finish_reason: str | None = None
        self.stop_reason: object | None = None
        self.scheduled_time: float | None = None
        self.first_token_time: float | None = None
        self.last_token_time = 0.0
        self.group: Group | None = None


class Group:
    """The answers that one HTTP request waits for.

    Attributes:
        done: set when the last of them has ended, or when the request was aborted.
    """

    __slots__ = ("arrival", "done", "generations", "left", "sink")

    def __init__(self, generations: Sequence[Generation], sink: Sink | None) -> None:
        self.generations = generations
        self.sink = sink
        self.left = len(generations)
        self.arrival = 0.0
        self.done = asyncio.Event()
        for generation in generations:
            generation.group = self


class Engine:
    """Owns the scheduler; ``run`` is the only place where time passes."""

    def __init__(self, config: Config, tokenizer: Tokenizer, faults: Faults) -> None:
        self._config = config
        self._faults = faults
        self._tokenizer = tokenizer
        self._clock = cards.StepClock(cards.CARDS[config.card], cards.MODEL, config.time_scale)
        self._scheduler = Scheduler(
            config.blocks,
            config.block_size,
            config.max_num_seqs,
            config.max_num_batched_tokens,
            config.prefix_caching,
            config.max_loras,
        )
        self.metrics = EngineMetrics(
            config.served_names[0],
            config.max_model_len,
            config.cache_config(),
            config.max_loras if config.enable_lora else None,
        )
        self.groups: set[Group] = set()
        self._work = asyncio.Event()
        self._last_step_end = 0.0
        self._texts = [piece.decode("utf-8", errors="replace") for piece in tokenizer.pieces]

    def check_queue(self, group: Group) -> None:
        """Ask whether a request may be queued.

        Raises:
            QueueFullError: ``--max-num-queued-reqs`` or ``--max-num-queued-tokens`` forbids it.
        """
        limit = self._config.max_num_queued_reqs
        if limit is not None and sum(waiting.left for waiting in self.groups) + group.left > limit:
            self.metrics.rejected["max_num_queued_reqs"] += 1
            raise QueueFullError(
                "The engine is currently busy and cannot accept new requests. "
                "Please try again later or on a different instance."
            )
        limit = self._config.max_num_queued_tokens
        if limit is not None and self._queued_tokens() >= limit:
            self.metrics.rejected["max_num_queued_tokens"] += 1
            raise QueueFullError(
                "The engine has reached its prefill token backlog limit. "
                "Please try again later or on a different instance."
            )

    def submit(self, group: Group) -> None:
        """Queue a request."""
        group.arrival = asyncio.get_running_loop().time()
        self.groups.add(group)
        for generation in group.generations:
            self._scheduler.add(generation)
        self._work.set()

    def abort(self, group: Group) -> None:
        """Forget a request whose client has left; its slots and blocks are free from now on."""
        if group not in self.groups:
            return
        for generation in group.generations:
            if generation.finish_reason is None:
                generation.finish_reason = "abort"
                self.metrics.finished["abort"] += 1
                self._scheduler.remove(generation)
        self.groups.discard(group)
        group.done.set()

    def refresh_metrics(self) -> None:
        """Bring the gauges and the scheduler's counters up to date."""
        metrics, scheduler = self.metrics, self._scheduler
        deferred = min(scheduler.deferred, len(scheduler.waiting))
        metrics.running = len(scheduler.running)
        metrics.waiting = {"capacity": len(scheduler.waiting) - deferred, "deferred": deferred}
        metrics.running_adapters = {sequence.adapter for sequence in scheduler.running if sequence.adapter}
        metrics.waiting_adapters = {sequence.adapter for sequence in scheduler.waiting if sequence.adapter}
        metrics.cache_usage = scheduler.pool.usage
        metrics.prefix_queries = scheduler.prefix_queries
        metrics.prefix_hits = scheduler.prefix_hits
        metrics.preemptions = scheduler.preemptions

    async def run(self) -> None:
        """Run step after step for ever."""
        loop = asyncio.get_running_loop()
        deadline = loop.time()
        while True:
            if self._faults.is_on("hang"):
                await asyncio.sleep(HANG_POLL_SECONDS)
                deadline = loop.time()
                continue
            step = self._scheduler.schedule()
            if not step.sequences:
                if self._scheduler.waiting or self._scheduler.running:
                    continue  # The only running sequence was preempted; it is admitted again at once.
                self._work.clear()
                await self._work.wait()
                deadline = loop.time()
                continue
            now = loop.time()
            self._note_admitted(step, now)
            seconds = self._clock.seconds(len(step.sequences), step.tokens, step.cached_tokens)
            # Deadlines follow each other, so that the rounding of timers (1 ms) does not add up.
            deadline += seconds * self._faults.slow_factor
            if deadline < now - LAG_LIMIT_SECONDS:
                deadline = now
            await asyncio.sleep(max(deadline - now, 0))
            self._finish_step(step, loop.time())

    def _queued_tokens(self) -> int:
        return sum(
            len(generation.prompt)
            for group in self.groups
            for generation in group.generations
            if generation.first_token_time is None and generation.finish_reason is None
        )

    @staticmethod
    def _note_admitted(step: Step, now: float) -> None:
        for generation in step.admitted:
            assert isinstance(generation, Generation)
            if generation.scheduled_time is None:
                generation.scheduled_time = now

    def _finish_step(self, step: Step, now: float) -> None:
        garbage = self._faults.is_on("garbage")
        last_step_end, self._last_step_end = self._last_step_end, now
        produced = steady = 0
        prompt_tokens = 0
        for generation in self._scheduler.advance(step):
            assert isinstance(generation, Generation)
            produced += 1
            if generation.first_token_time is None:
                prompt_tokens += len(generation.prompt) - generation.cached
                self._note_first_token(generation, now)
            elif generation.last_token_time == last_step_end:
                steady += 1
            else:
                self.metrics.inter_token_latency.observe(now - generation.last_token_time)
            generation.last_token_time = now
            self._produce(generation, garbage)
        if steady:
            self.metrics.inter_token_latency.observe(now - last_step_end, steady)
        if produced:
            self.metrics.generation_tokens += produced
            self.metrics.iteration_tokens.observe(prompt_tokens + produced)

    def _note_first_token(self, generation: Generation, now: float) -> None:
        assert generation.group is not None
        generation.first_token_time = now
        self.metrics.time_to_first_token.observe(now - generation.group.arrival)
        self.metrics.prompt_tokens += len(generation.prompt)
        self.metrics.prompt_tokens_cached += generation.cached

    def _produce(self, generation: Generation, garbage: bool) -> None:
        """Make the next token, decide whether it is the last one, and hand it over."""
        answer = generation.answer
        made = len(generation.outputs)
        if made >= answer.length and not generation.ignore_eos and made >= generation.min_tokens:
            token = END_OF_TEXT
        else:
            token = answer.garbage_token() if garbage else answer.next_token()
        self._scheduler.append(generation, token)
        made += 1
        if token == END_OF_TEXT:
            generation.finish_reason = "stop"
        elif token in generation.stop_token_ids and made >= generation.min_tokens:
            generation.finish_reason = "stop"
            generation.stop_reason = token
        elif made >= generation.max_tokens:
            generation.finish_reason = "length"
        text: str | None = None
        if generation.scanner is not None:
            text, stop = generation.scanner.feed(
                "" if token == END_OF_TEXT else self._texts[token],
                last=generation.finish_reason is not None,
                active=made > generation.min_tokens,
            )
            if stop is not None:
                generation.finish_reason = "stop"
                generation.stop_reason = stop
            generation.shown.append(text)
        group = generation.group
        assert group is not None
        if group.sink is not None:
            group.sink.push(generation, token, text)
        if generation.finish_reason is not None:
            self._finish(generation, group)

    def _finish(self, generation: Generation, group: Group) -> None:
        self._scheduler.remove(generation)
        metrics = self.metrics
        now = generation.last_token_time
        assert generation.finish_reason is not None
        assert generation.scheduled_time is not None
        assert generation.first_token_time is not None
        tokens = len(generation.outputs)
        decode = now - generation.first_token_time
        metrics.finished[generation.finish_reason] += 1
        metrics.e2e_request_latency.observe(now - group.arrival)
        metrics.request_queue_time.observe(generation.scheduled_time - group.arrival)
        metrics.request_prefill_time.observe(generation.first_token_time - generation.scheduled_time)
        metrics.request_decode_time.observe(decode)
        metrics.request_inference_time.observe(now - generation.scheduled_time)
        metrics.request_time_per_output_token.observe(decode / (tokens - 1) if tokens > 1 else 0.0)
        metrics.request_prompt_tokens.observe(len(generation.prompt))
        metrics.request_generation_tokens.observe(tokens)
        metrics.request_params_max_tokens.observe(generation.max_tokens)
        metrics.request_num_preemptions.observe(generation.preemptions)
        metrics.request_prefill_kv_computed_tokens.observe(len(generation.prompt) - generation.cached)
        group.left -= 1
        if group.left == 0:
            metrics.request_params_n.observe(len(group.generations))
            metrics.request_max_num_generation_tokens.observe(max(len(member.outputs) for member in group.generations))
            self.groups.discard(group)
            group.done.set()

    def text(self, generation: Generation) -> str:
        """All text of an answer that has ended."""
        if generation.scanner is not None:
            return "".join(generation.shown)
        return "".join([self._texts[token] for token in generation.outputs if token != END_OF_TEXT])

    async def log_statistics(self, period: float = 10.0) -> None:
        """Write a line on throughput and load every ``period`` seconds in which there was any."""
        prompt = generated = 0
        while True:
            await asyncio.sleep(period)
            self.refresh_metrics()
            metrics = self.metrics
            new_prompt, new_generated = metrics.prompt_tokens - prompt, metrics.generation_tokens - generated
            prompt, generated = metrics.prompt_tokens, metrics.generation_tokens
            if new_prompt or new_generated or metrics.running:
                logger.info(
                    "Prompt throughput: %.1f tokens/s, generation throughput: %.1f tokens/s, running: %d, waiting: %d, "
                    "KV cache usage: %.1f%%, prefix cache hit rate: %.1f%%",
                    new_prompt / period,
                    new_generated / period,
                    metrics.running,
                    sum(metrics.waiting.values()),
                    100 * metrics.cache_usage,
                    100 * metrics.prefix_hits / metrics.prefix_queries if metrics.prefix_queries else 0.0,
                )
