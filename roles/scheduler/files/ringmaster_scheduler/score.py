# SPDX-License-Identifier: GPL-3.0-or-later
"""The pick: every term by which engines are compared, each with its reason. All terms are in seconds; less is better.

Seconds are what a client feels and what makes an A100 comparable with an L40S: tokens divided by what the engine was
measured to do. Counts of requests are not, and memory seen by NVML says nothing, for engines fill it by design.

* *Prefill*: how long the prompts before this one will take. It is nearly all of the time to the first token.
* *Decode*: the answers that are still to come, over what the engine would produce with all its sequences. Answers
  share each step with every other, so that this is small beside prefill, but it is what a slow card runs out of.
* *Memory*: how full the KV pool will be, in parts of the watermark. Near it an engine begins to preempt, so that of two
  engines with equal work the emptier is the safer.
* *Service*: one mean prompt, so that a slow engine is behind a fast one also where both have nothing to do.
* *Adapter*: what it costs if the engine has to load the request's LoRA adapter, or can't yet, as too many others run.

An engine's health weight is no term: it rules how often the engine is to be picked at all (`core`, its pace).
"""

from __future__ import annotations

from typing import NamedTuple

from ringmaster_scheduler.domain import Reading
from ringmaster_scheduler.policy import Policy


class Terms(NamedTuple):
    """The terms of one engine at a moment, in seconds."""

    prefill: float
    decode: float
    memory: float
    service: float

    @property
    def score(self) -> float:
        """What the pick compares, before the adapter's term."""
        return self.prefill + self.decode + self.memory + self.service


class Prices(NamedTuple):
    """What the score of one engine is made of between two readings: seconds per token of answers still to come, seconds
    per KV token that will be needed, and seconds of service."""

    decode: float
    memory: float
    service: float


def prices(
    policy: Policy,
    prefill_rate: float,
    sequence_rate: float,
    max_num_seqs: int,
    kv_tokens: int | None,
    mean_prompt: float,
) -> Prices:
    """Return the prices of an engine that prefills `prefill_rate` tokens/s, gives each of `max_num_seqs` sequences at
    most `sequence_rate` tokens/s, and has room for `kv_tokens`, None if that is not known."""
    return Prices(
        policy.decode_weight / (sequence_rate * max_num_seqs),
        policy.kv_weight / (policy.watermark * kv_tokens) if kv_tokens else 0.0,
        mean_prompt / prefill_rate,
    )


def adapter_time(policy: Policy, adapter: str | None, reading: Reading | None) -> float:
    """Return what the adapter of a request costs on an engine; None is the base model."""
    if adapter is None or reading is None or reading.max_adapters is None or adapter in reading.adapters:
        return 0.0
    if len(reading.adapters) >= reading.max_adapters:
        return policy.adapter_wait_time
    return policy.adapter_load_time


def affinity_pays(policy: Policy, load: float, mean_load: float, one: float, behind: float, saved: float) -> bool:
    """Whether to send a request where its prefix is known.

    The bound keeps one wanted prefix from making a hot spot: the engine may carry `affinity_bound` times the mean
    load, and at least one request. And recomputing must not be quicker than waiting there: the engine may be `behind`
    the best one by no more seconds than the prefill that is `saved` takes.
    """
    return load <= policy.affinity_bound * mean_load + one and behind <= saved
