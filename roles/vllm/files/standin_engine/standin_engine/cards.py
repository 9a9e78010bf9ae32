# SPDX-License-Identifier: GPL-3.0-or-later
"""What a card can hold and how long a step takes on it, derived from public figures.

Cards, from NVIDIA's data sheets ("NVIDIA A100 Tensor Core GPU", "NVIDIA L40S"): memory bandwidth 2039 GB/s (A100 80GB
SXM) and 864 GB/s; bf16 tensor throughput without sparsity 312 and 362 TFLOPS. Memory is what ``nvidia-smi`` shows as
total: 81920 MiB and, with ECC on, 46068 MiB.

Model, from the published configuration of Qwen2-7B: 7.616e9 parameters, 28 layers, hidden size 3584, intermediate size
18944, 4 key-value heads of 128, up to 32768 positions; bf16 everywhere. Whatever model is named, this one is modelled.

A decode step reads all weights once and the keys and values of every running sequence, so it is bound by bandwidth;
with more than about 150 tokens a step (A100) the arithmetic of the tokens takes longer than reading the weights, so a
prefill is bound by throughput. That is the roofline model; two factors say how much of a data sheet is reached.
"""

from __future__ import annotations

from dataclasses import dataclass

GIB = 2**30

REACHED_BANDWIDTH = 0.80
"""Share of the bandwidth of the data sheet that large reads reach; usual for HBM2e and GDDR6 in stream benchmarks."""

REACHED_THROUGHPUT = 0.55
"""Share of tensor throughput that the matrix products of a 7B model reach; usual in published prefill measurements."""

STEP_OVERHEAD_SECONDS = 0.0008
"""Scheduling and kernel launch of a step with CUDA graphs; a constant of the engine, not of the card."""

SEQUENCE_OVERHEAD_SECONDS = 0.000010
"""Sampling and bookkeeping of one running sequence in a step."""


@dataclass(frozen=True)
class Card:
    """A GPU: bytes of memory, bytes and floating point operations a second."""

    name: str
    memory_bytes: int
    bandwidth: float
    throughput: float


@dataclass(frozen=True)
class Model:
    """A transformer in bf16: sizes in elements, not bytes."""

    parameters: int
    layers: int
    hidden_size: int
    intermediate_size: int
    key_value_width: int
    max_positions: int

    @property
    def weight_bytes(self) -> int:
        """Bytes of the weights, two a parameter."""
        return self.parameters * 2

    @property
    def key_value_bytes(self) -> int:
        """Bytes of keys and values that one token occupies: two tensors a layer, two bytes an element."""
        return 2 * self.layers * self.key_value_width * 2

    def activation_bytes(self, batched_tokens: int) -> int:
        """Bytes of the largest intermediate tensors of a step of that many tokens (gate and up, in and out)."""
        return batched_tokens * 2 * (self.intermediate_size + self.hidden_size) * 2


CARDS = {
    "a100-80g": Card("a100-80g", 81920 * 2**20, 2039e9, 312e12),
    "l40s": Card("l40s", 46068 * 2**20, 864e9, 362e12),
}

MODEL = Model(
    parameters=7_615_616_512,
    layers=28,
    hidden_size=3584,
    intermediate_size=18944,
    key_value_width=4 * 128,
    max_positions=32768,
)

CUDA_GRAPH_BYTES = GIB
"""Memory of CUDA graphs and of the CUDA context; about 1 GiB in the start-up log of a 7B model."""

MAX_NUM_SEQS = 256
"""vLLM's default on both cards (cards with less than 70 GiB, and the A100)."""

MAX_NUM_BATCHED_TOKENS = 2048
"""vLLM's default of the API server on both cards."""

GPU_MEMORY_UTILIZATION = 0.92
"""vLLM's default."""

BLOCK_SIZE = 16
"""Tokens a block: vLLM's default on CUDA."""


def blocks_that_fit(card: Card, model: Model, utilization: float, batched_tokens: int, block_size: int) -> int:
    """Number of key-value blocks that are left beside weights, activations and graphs; may be 0 or less."""
    free = (
        card.memory_bytes * utilization - model.weight_bytes - model.activation_bytes(batched_tokens) - CUDA_GRAPH_BYTES
    )
    return int(free // (model.key_value_bytes * block_size))


class StepClock:
    """Seconds that a step takes on a card.

    Args:
        time_scale: factor on every step, over 0. Two cores that stand in for several cards cannot serve at their
            speed; a rehearsal slows the cards down rather than let the processor be the bottleneck.
    """

    def __init__(self, card: Card, model: Model, time_scale: float = 1.0) -> None:
        self.base = STEP_OVERHEAD_SECONDS * time_scale
        self.per_sequence = SEQUENCE_OVERHEAD_SECONDS * time_scale
        self.weights = model.weight_bytes / (card.bandwidth * REACHED_BANDWIDTH) * time_scale
        self.per_token = 2 * model.parameters / (card.throughput * REACHED_THROUGHPUT) * time_scale
        self.per_cached_token = model.key_value_bytes / (card.bandwidth * REACHED_BANDWIDTH) * time_scale

    def seconds(self, sequences: int, tokens: int, cached_tokens: int) -> float:
        """Duration of a step that computes ``tokens`` of ``sequences`` and reads the keys and values of others."""
        return (
            self.base
            + self.per_sequence * sequences
            + max(self.weights, self.per_token * tokens)
            + self.per_cached_token * cached_tokens
        )
