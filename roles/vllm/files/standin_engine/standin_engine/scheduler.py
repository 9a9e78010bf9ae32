# SPDX-License-Identifier: GPL-3.0-or-later
"""The model of vLLM's scheduler: paged key-value memory, continuous batching, chunked prefill, prefix caching.

Pure logic: no clock, no input or output. A step is planned by ``schedule`` and its tokens are counted by ``advance``.

Order within a step, as in vLLM: running sequences first, in order of arrival, each with the tokens it lacks, as far as
the token budget goes; when no block is free, the youngest running sequence is preempted (its blocks are freed, all its
tokens are computed again later) until the older one has its block; then, if nothing was preempted, waiting sequences
in order of arrival.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass


class BlockPool:
    """Key-value blocks, counted by reference; a block that is free keeps its content until it is needed.

    Free blocks stand in the order in which they were freed, so that the least recently used content goes first.
    """

    def __init__(self, blocks: int) -> None:
        if blocks < 1:
            raise ValueError("no key-value block fits into the memory of the card")
        self.total = blocks
        self._references = [0] * blocks
        self._hash_of: list[int | None] = [None] * blocks
        self._block_of: dict[int, int] = {}
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(blocks))

    @property
    def free(self) -> int:
        """Number of blocks that no sequence uses."""
        return len(self._free)

    @property
    def usage(self) -> float:
        """Share of blocks in use, 0 to 1."""
        return 1.0 - len(self._free) / self.total

    def allocate(self) -> int:
        """Take the block that was free for longest; its old content is forgotten.

        Raises:
            KeyError: no block is free.
        """
        block, _unused = self._free.popitem(last=False)
        content = self._hash_of[block]
        if content is not None:
            del self._block_of[content]
            self._hash_of[block] = None
        self._references[block] = 1
        return block

    def is_free(self, block: int) -> bool:
        """Whether the block would be taken from the free ones if it were shared."""
        return block in self._free

    def share(self, block: int) -> None:
        """Use a block whose content is already there."""
        if self._references[block] == 0:
            del self._free[block]
        self._references[block] += 1

    def release(self, blocks: Sequence[int]) -> None:
        """Give the blocks of a sequence back; the end of the sequence is forgotten before its beginning."""
        for block in reversed(blocks):
            self._references[block] -= 1
            if self._references[block] == 0:
                self._free[block] = None

    def remember(self, block: int, content: int) -> None:
        """Note the hash of a full block, unless another block holds the same content."""
        if content not in self._block_of and self._hash_of[block] is None:
            self._block_of[content] = block
            self._hash_of[block] = content

    def lookup(self, content: int) -> int | None:
        """The block that holds the content, used or free."""
        return self._block_of.get(content)


class SequenceState:
    """One answer in the making, as the scheduler sees it.

    Args:
        prompt: token ids of the prompt.
        adapter: name of the LoRA adapter, or "" for the base model.
        salt: separates the prefix cache of clients that do not want to share it.
    """

    __slots__ = (
        "adapter",
        "blocks",
        "cached",
        "computed",
        "hashes",
        "known_blocks",
        "outputs",
        "preemptions",
        "prompt",
        "running",
        "salt",
        "total",
    )

    def __init__(self, prompt: Sequence[int], adapter: str = "", salt: str = "") -> None:
        self.prompt = prompt
        self.adapter = adapter
        self.salt = salt
        self.outputs: list[int] = []
        self.total = len(prompt)
        """Tokens whose keys and values must be there before the next one: prompt and outputs."""
        self.computed = 0
        """Tokens whose keys and values are there."""
        self.cached = 0
        """Prompt tokens that came from the prefix cache, at the first admission."""
        self.blocks: list[int] = []
        self.hashes: list[int] = []
        """Hashes of the full blocks, each over all tokens up to its end."""
        self.known_blocks = 0
        """Blocks whose hash the pool knows."""
        self.preemptions = 0
        self.running = False

    def extend_hashes(self, block_size: int) -> None:
        """Hash the blocks that have become full."""
        have = len(self.hashes)
        if have == self.total // block_size:
            return
        tokens = [*self.prompt, *self.outputs] if self.outputs else self.prompt
        parent = self.hashes[-1] if self.hashes else hash((self.adapter, self.salt))
        for start in range(have * block_size, self.total - self.total % block_size, block_size):
            parent = hash((parent, tuple(tokens[start : start + block_size])))
            self.hashes.append(parent)


@dataclass
class Step:
    """What is computed together.

    Attributes:
        sequences: those that take part, each with the number of tokens computed for it.
        tokens: sum of these numbers; at most the token budget.
        cached_tokens: tokens whose keys and values are read.
        preempted: sequences that lost their blocks while the step was planned.
        admitted: sequences that left the queue with this step.
    """

    sequences: list[tuple[SequenceState, int]]
    tokens: int
    cached_tokens: int
    preempted: list[SequenceState]
    admitted: list[SequenceState]


class Scheduler:
    """Decides which sequences are computed together.

    Args:
        blocks: number of key-value blocks.
        block_size: tokens a block.
        max_num_seqs: sequences that may run at once.
        max_num_batched_tokens: tokens that a step may compute.
        prefix_caching: whether full blocks are shared between sequences of one beginning.
        max_loras: different adapters that may run at once.
    """

    def __init__(
        self,
        blocks: int,
        block_size: int = 16,
        max_num_seqs: int = 256,
        max_num_batched_tokens: int = 2048,
        prefix_caching: bool = True,
        max_loras: int = 1,
    ) -> None:
        self.pool = BlockPool(blocks)
        self.block_size = block_size
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.prefix_caching = prefix_caching
        self.max_loras = max_loras
        self.running: list[SequenceState] = []
        self.waiting: deque[SequenceState] = deque()
        self.deferred = 0
        """Waiting sequences that were passed over in the last step because too many adapters run."""
        self.prefix_queries = 0
        self.prefix_hits = 0
        self.preemptions = 0

    @property
    def capacity(self) -> int:
        """Tokens that fit into all blocks together."""
        return self.pool.total * self.block_size

    def add(self, sequence: SequenceState) -> None:
        """Queue a sequence.

        Raises:
            ValueError: the prompt alone does not fit into all blocks together.
        """
        if sequence.total + 1 > self.capacity:
            raise ValueError(f"a prompt of {sequence.total} tokens does not fit into {self.capacity}")
        self.waiting.append(sequence)

    def remove(self, sequence: SequenceState) -> None:
        """Take a sequence out, wherever it is, and free its blocks."""
        if sequence.running:
            self.running.remove(sequence)
            sequence.running = False
        elif sequence in self.waiting:
            self.waiting.remove(sequence)
        self._free(sequence)

    def schedule(self) -> Step:
        """Plan the next step; it is empty when nothing can run."""
        step = Step([], 0, 0, [], [])
        budget = self._continue_running(step, self.max_num_batched_tokens)
        if not step.preempted:
            self._admit(step, budget)
        return step

    def advance(self, step: Step) -> Iterator[SequenceState]:
        """Count the step as computed; gives the sequences that produced a token.

        The caller appends the token by ``append`` (or takes the sequence out by ``remove``) before it asks for the
        next sequence.
        """
        for sequence, tokens in step.sequences:
            if not sequence.running:
                continue  # Taken out while the step was computed.
            sequence.computed += tokens
            if self.prefix_caching:
                self._remember(sequence)
            if sequence.computed == sequence.total:
                yield sequence

    @staticmethod
    def append(sequence: SequenceState, token: int) -> None:
        """Add the token that a sequence has produced."""
        sequence.outputs.append(token)
        sequence.total += 1

    def _continue_running(self, step: Step, budget: int) -> int:
        running = self.running
        index = 0
        while index < len(running) and budget > 0:
            sequence = running[index]
            tokens = min(sequence.total - sequence.computed, budget)
            if not self._make_room(sequence, sequence.computed + tokens, step):
                break  # It was the youngest itself, and is preempted.
            step.sequences.append((sequence, tokens))
            step.tokens += tokens
            step.cached_tokens += sequence.computed
            budget -= tokens
            index += 1
        return budget

    def _make_room(self, sequence: SequenceState, tokens: int, step: Step) -> bool:
        """Give the sequence blocks for that many tokens, at the cost of younger ones; False if it was preempted."""
        blocks = sequence.blocks
        while len(blocks) * self.block_size < tokens:
            if self.pool.free:
                blocks.append(self.pool.allocate())
                continue
            victim = self.running.pop()
            victim.running = False
            victim.preemptions += 1
            self.preemptions += 1
            self._free(victim)
            victim.computed = 0
            self.waiting.appendleft(victim)
            step.preempted.append(victim)
            if victim is sequence:
                return False
        return True

    def _admit(self, step: Step, budget: int) -> None:
        adapters = {sequence.adapter for sequence in self.running if sequence.adapter}
        passed_over: list[SequenceState] = []
        while self.waiting and budget > 0 and len(self.running) < self.max_num_seqs:
            sequence = self.waiting[0]
            if sequence.adapter and sequence.adapter not in adapters and len(adapters) >= self.max_loras:
                passed_over.append(self.waiting.popleft())
                continue
            found = self._find_prefix(sequence)
            tokens = min(sequence.total - len(found) * self.block_size, budget)
            wanted = len(found) * self.block_size + tokens
            new_blocks = -(-wanted // self.block_size) - len(found)
            # Admitted only if all of it fits, even if a part of it is computed in this step (vLLM's default, too):
            # half a prompt that waits for blocks would hold what others could use.
            all_blocks = -(-sequence.total // self.block_size) - len(found)
            if all_blocks + sum(map(self.pool.is_free, found)) > self.pool.free:
                break
            self.waiting.popleft()
            for block in found:
                self.pool.share(block)
            sequence.blocks = found + [self.pool.allocate() for _unused in range(new_blocks)]
            sequence.computed = len(found) * self.block_size
            sequence.known_blocks = len(found)
            if sequence.preemptions == 0:
                sequence.cached = sequence.computed
                if self.prefix_caching:
                    self.prefix_queries += sequence.total
                    self.prefix_hits += sequence.computed
            sequence.running = True
            self.running.append(sequence)
            if sequence.adapter:
                adapters.add(sequence.adapter)
            step.sequences.append((sequence, tokens))
            step.admitted.append(sequence)
            step.tokens += tokens
            step.cached_tokens += sequence.computed
            budget -= tokens
        self.deferred = len(passed_over)
        self.waiting.extendleft(reversed(passed_over))

    def _find_prefix(self, sequence: SequenceState) -> list[int]:
        """Blocks that already hold the beginning of the sequence; at least one token is always left to compute."""
        if not self.prefix_caching:
            return []
        sequence.extend_hashes(self.block_size)
        found: list[int] = []
        for content in sequence.hashes[: (sequence.total - 1) // self.block_size]:
            block = self.pool.lookup(content)
            if block is None:
                break
            found.append(block)
        return found

    def _remember(self, sequence: SequenceState) -> None:
        full = sequence.computed // self.block_size
        if full > len(sequence.hashes):
            sequence.extend_hashes(self.block_size)
        known = sequence.known_blocks
        while known < full:
            self.pool.remember(sequence.blocks[known], sequence.hashes[known])
            known += 1
        sequence.known_blocks = known

    def _free(self, sequence: SequenceState) -> None:
        self.pool.release(sequence.blocks)
        sequence.blocks = []
        sequence.known_blocks = 0
