# SPDX-License-Identifier: GPL-3.0-or-later
"""The model of paged key-value memory and continuous batching."""

from __future__ import annotations

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from standin_engine.scheduler import BlockPool, Scheduler, SequenceState, Step


def run_step(scheduler: Scheduler, token: int = 7) -> tuple[Step, list[SequenceState]]:
    """One step in which every sequence that is due makes the same token."""
    step = scheduler.schedule()
    made = []
    for sequence in scheduler.advance(step):
        scheduler.append(sequence, token)
        made.append(sequence)
    return step, made


def prompt(length: int, start: int = 0) -> list[int]:
    return list(range(start, start + length))


def test_a_prefill_is_cut_to_the_token_budget_and_shares_it_with_decodes() -> None:
    scheduler = Scheduler(blocks=100, max_num_batched_tokens=32, prefix_caching=False)
    short, long = SequenceState(prompt(8)), SequenceState(prompt(60))
    scheduler.add(short)
    scheduler.add(long)
    computed: list[int] = []
    for _unused in range(3):
        step, made = run_step(scheduler)
        assert short in made
        computed += [tokens for sequence, tokens in step.sequences if sequence is long]
        assert step.tokens <= 32
    assert computed == [24, 31, 5]
    assert long.outputs == [7]


def test_no_more_than_max_num_seqs_run_and_the_others_come_in_order_of_arrival() -> None:
    scheduler = Scheduler(blocks=100, max_num_seqs=2)
    sequences = [SequenceState(prompt(4, 10 * number)) for number in range(4)]
    for sequence in sequences:
        scheduler.add(sequence)
    run_step(scheduler)
    assert scheduler.running == sequences[:2]
    scheduler.remove(sequences[0])
    run_step(scheduler)
    assert scheduler.running == [sequences[1], sequences[2]]
    assert list(scheduler.waiting) == [sequences[3]]


def test_out_of_blocks_the_youngest_is_preempted_and_computed_again() -> None:
    scheduler = Scheduler(blocks=4, block_size=4, prefix_caching=False)
    old, young = SequenceState(prompt(8)), SequenceState(prompt(7, 100))
    scheduler.add(old)
    scheduler.add(young)
    run_step(scheduler)
    step, made = run_step(scheduler)  # The ninth token of the old one needs a third block; none is free.
    assert step.preempted == [young]
    assert made == [old]
    assert (young.preemptions, young.computed, young.blocks) == (1, 0, [])
    assert scheduler.preemptions == 1
    scheduler.remove(old)
    step, made = run_step(scheduler)
    assert step.sequences == [(young, 8)]  # Seven tokens of the prompt and the one that it had made.
    assert made == [young]


def test_a_second_prompt_with_the_same_beginning_computes_the_rest_only() -> None:
    scheduler = Scheduler(blocks=100, block_size=4)
    first, second = SequenceState(prompt(18)), SequenceState([*prompt(16), 99, 98])
    scheduler.add(first)
    run_step(scheduler)
    scheduler.remove(first)
    scheduler.add(second)
    step, _unused = run_step(scheduler)
    assert step.sequences == [(second, 2)]
    assert second.cached == 16
    assert (scheduler.prefix_queries, scheduler.prefix_hits) == (36, 16)


def test_a_prompt_that_is_cached_whole_still_computes_its_last_block() -> None:
    scheduler = Scheduler(blocks=100, block_size=4)
    steps = []
    for _unused in range(2):
        sequence = SequenceState(prompt(8))
        scheduler.add(sequence)
        step, made = run_step(scheduler)
        assert made == [sequence]
        steps.append([tokens for _unused, tokens in step.sequences])
        scheduler.remove(sequence)
    assert steps == [[8], [4]]


@pytest.mark.parametrize(("adapter", "salt"), [("sql", ""), ("", "mine")])
def test_adapters_and_salts_do_not_share_the_prefix_cache(adapter: str, salt: str) -> None:
    scheduler = Scheduler(blocks=100, block_size=4)
    for sequence in (SequenceState(prompt(16)), SequenceState(prompt(16), adapter, salt)):
        scheduler.add(sequence)
        run_step(scheduler)
    assert scheduler.prefix_hits == 0


def test_a_running_sequence_shares_its_blocks_and_a_released_block_stays_until_it_is_needed() -> None:
    scheduler = Scheduler(blocks=8, block_size=4)
    first, second = SequenceState(prompt(17)), SequenceState(prompt(17))
    scheduler.add(first)
    run_step(scheduler)
    scheduler.add(second)
    run_step(scheduler)
    assert first.blocks[:4] == second.blocks[:4]
    assert scheduler.pool.free == 2
    scheduler.remove(first)
    scheduler.remove(second)
    assert scheduler.pool.usage == 0
    other = SequenceState(prompt(31, 500))
    scheduler.add(other)
    run_step(scheduler)
    scheduler.remove(other)
    again = SequenceState(prompt(17))
    scheduler.add(again)
    run_step(scheduler)
    assert again.cached == 0


def test_an_adapter_too_many_is_passed_over_until_another_one_has_gone() -> None:
    scheduler = Scheduler(blocks=100, max_loras=1)
    first, other, base = (SequenceState(prompt(4, 10 * n), name) for n, name in enumerate(["a", "b", ""]))
    for sequence in (first, other, base):
        scheduler.add(sequence)
    run_step(scheduler)
    assert scheduler.running == [first, base]
    assert scheduler.deferred == 1
    scheduler.remove(first)
    run_step(scheduler)
    assert scheduler.running == [base, other]
    assert scheduler.deferred == 0


def test_a_waiting_sequence_can_be_taken_out() -> None:
    scheduler = Scheduler(blocks=100, max_num_seqs=1)
    running, waiting = SequenceState(prompt(4)), SequenceState(prompt(4, 50))
    scheduler.add(running)
    scheduler.add(waiting)
    run_step(scheduler)
    scheduler.remove(waiting)
    scheduler.remove(running)
    assert scheduler.schedule().sequences == []
    assert scheduler.pool.usage == 0


def test_a_sequence_taken_out_while_a_step_is_computed_makes_no_token() -> None:
    scheduler = Scheduler(blocks=100)
    sequence = SequenceState(prompt(4))
    scheduler.add(sequence)
    step = scheduler.schedule()
    scheduler.remove(sequence)
    assert list(scheduler.advance(step)) == []


def test_a_prompt_over_the_capacity_and_a_card_without_room_are_refused() -> None:
    with pytest.raises(ValueError, match="does not fit"):
        Scheduler(blocks=2, block_size=4).add(SequenceState(prompt(8)))
    with pytest.raises(ValueError, match="no key-value block"):
        BlockPool(0)


class Traffic(RuleBasedStateMachine):
    """Requests come, run and leave in any order, also while a step is computed; all that stay end with their tokens."""

    @initialize(
        blocks=st.integers(26, 60),
        block_size=st.sampled_from([4, 16]),
        max_num_seqs=st.integers(1, 5),
        budget=st.integers(5, 64),
        prefix_caching=st.booleans(),
    )
    def start(self, blocks: int, block_size: int, max_num_seqs: int, budget: int, prefix_caching: bool) -> None:
        self.scheduler = Scheduler(blocks, block_size, max_num_seqs, budget, prefix_caching)
        self.wanted: dict[SequenceState, int] = {}
        self.step: Step | None = None

    @rule(
        length=st.integers(1, 60),
        beginning=st.integers(0, 2),
        tokens=st.integers(1, 40),
        adapter=st.sampled_from(["", "a", "b"]),
    )
    def submit(self, length: int, beginning: int, tokens: int, adapter: str) -> None:
        sequence = SequenceState(prompt(length, 1000 * beginning), adapter)
        self.wanted[sequence] = tokens
        self.scheduler.add(sequence)

    @precondition(lambda self: self.wanted)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        sequence = data.draw(st.sampled_from(list(self.wanted)))
        self.scheduler.remove(sequence)
        del self.wanted[sequence]

    @precondition(lambda self: self.step is None)
    @rule()
    def plan(self) -> None:
        scheduler = self.scheduler
        self.step = step = scheduler.schedule()
        assert step.tokens == sum(tokens for _unused, tokens in step.sequences) <= scheduler.max_num_batched_tokens
        assert all(tokens > 0 for _unused, tokens in step.sequences)
        # Only a sequence that ran alone and was preempted leaves nothing to compute, and not twice in a row.
        assert step.sequences or step.preempted or not self.wanted

    @precondition(lambda self: self.step is not None)
    @rule()
    def compute(self) -> None:
        assert self.step is not None
        for sequence in self.scheduler.advance(self.step):
            self.scheduler.append(sequence, 7)
            if len(sequence.outputs) == self.wanted[sequence]:
                self.scheduler.remove(sequence)
                del self.wanted[sequence]
        self.step = None

    @invariant()
    def nothing_is_lost(self) -> None:
        scheduler = self.scheduler
        members = [*scheduler.running, *scheduler.waiting]
        assert len(members) == len(self.wanted)
        assert set(members) == set(self.wanted)
        assert len(scheduler.running) <= scheduler.max_num_seqs
        assert len({sequence.adapter for sequence in scheduler.running if sequence.adapter}) <= 1
        used = {block for sequence in scheduler.running for block in sequence.blocks}
        assert len(used) == scheduler.pool.total - scheduler.pool.free
        for sequence in scheduler.running:
            assert len(set(sequence.blocks)) == len(sequence.blocks)
            assert len(sequence.blocks) * scheduler.block_size >= sequence.computed
        assert not any(sequence.blocks for sequence in scheduler.waiting)

    def teardown(self) -> None:
        if not hasattr(self, "scheduler"):
            return
        for _unused in range(5000):
            if self.step is not None:
                self.compute()
            if not self.wanted:
                break
            self.plan()
        assert not self.wanted
        assert self.scheduler.pool.usage == 0


TestTraffic = Traffic.TestCase
