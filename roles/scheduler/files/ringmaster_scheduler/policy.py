# SPDX-License-Identifier: GPL-3.0-or-later
"""Every number that the decision depends on, with its reason. An operator can change each one."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, Final, NamedTuple

PRIORITY_LIMIT: Final = 524_287
"""Largest offset in milliseconds that HAProxy's set-priority-offset takes, either way."""


class PolicyError(ValueError):
    """A number is missing, unknown, of the wrong kind or out of its range; the message names it."""


class RequestClass(NamedTuple):
    """Requests of one kind. `prompt_tokens_max` is the longest prompt that belongs to it, None for any; `deadline` is
    the time in seconds in which a request has to start, and by which the queue is ordered."""

    name: str
    prompt_tokens_max: int | None
    deadline: float


@dataclass(frozen=True)
class Policy:
    """The numbers; times in seconds, lengths in tokens, shares from 0 to 1.

    Attributes:
        classes: by ascending length of prompt, the last without a limit. A short prompt is a person who waits; one of
            over 8,192 tokens is prefilled for about a second on an A100, and is worth that to nobody who waits behind
            it.
        bytes_per_token: to estimate a prompt from its body where no header tells: English text in JSON.
        bytes_per_token_most: bytes that no token of a prompt exceeds on average; only a body longer than that is
            refused without knowing the tokens. Base64 and long runs of spaces make up to about 16.
        watermark: KV use over which an engine gets no more than `maxconn_low` requests, and up to which it is filled.
        watermark_low: KV use under which it gets all again. The gap is what one wave of requests changes.
        watermark_hold: an engine's watermark changes at most once in this time, unless it preempts.
        maxconn_low: requests an engine may hold over the watermark.
        prefill_window: seconds of prefill that an engine may have before it. More would order the engine's queue by
            arrival, where HAProxy orders by deadline; less would let it run dry between two adjustments, which are 20
            ms apart.
        prefill_rate: tokens/s that an engine is presumed to prefill before that was measured.
        sequence_rate: tokens/s that one running sequence is presumed to produce before that was measured.
        decode_weight: what a second of decoding counts beside a second of prefill; all slots of an engine full and its
            answers of mean length are one decoding time.
        kv_weight: seconds that a KV pool filled to the watermark counts.
        adapter_load_time: seconds it takes an engine to load an adapter that does not run there.
        adapter_wait_time: seconds a request is presumed to wait while as many other adapters run as may.
        affinity_bound: most load of an engine over the mean, at which requests are still sent there for their prefix.
        affinity_saving: share of a prompt that an engine which holds its prefix is presumed not to compute. Prefixes
            that are shared are system prompts and conversations, of which the last turn alone is new.
        affinity_memory: how long an engine is presumed to hold a prefix after its last use.
        affinity_prefixes: prefixes that are remembered at most.
        affinity_engines: engines that are remembered for one prefix, so that one that many want can spread.
        load_memory: time over which the work given to an engine is summed up for the bound.
        fairness_memory: time over which the use of a key is summed up.
        output_tokens: length of an answer before any was seen.
        length_memory: answers after which the learnt length of a key and class has forgotten the first ones.
        drain_memory: time over which the rate is measured at which the queue drains.
        control_timeout: how long after the last word from HAProxy it counts as following.
    """

    classes: tuple[RequestClass, ...] = (
        RequestClass("fast", 2048, 10.0),
        RequestClass("normal", 8192, 20.0),
        RequestClass("slow", None, 60.0),
    )
    bytes_per_token: float = 4.0
    bytes_per_token_most: float = 16.0
    watermark: float = 0.85
    watermark_low: float = 0.70
    watermark_hold: float = 2.0
    maxconn_low: int = 16
    prefill_window: float = 0.15
    prefill_rate: float = 8000.0
    sequence_rate: float = 40.0
    decode_weight: float = 3.0
    kv_weight: float = 0.2
    adapter_load_time: float = 0.5
    adapter_wait_time: float = 5.0
    affinity_bound: float = 1.25
    affinity_saving: float = 0.8
    affinity_memory: float = 600.0
    affinity_prefixes: int = 100_000
    affinity_engines: int = 4
    load_memory: float = 30.0
    fairness_memory: float = 60.0
    output_tokens: int = 256
    length_memory: int = 100
    drain_memory: float = 10.0
    control_timeout: float = 2.0

    def class_of(self, prompt_tokens: int) -> RequestClass:
        """Return the class of a prompt."""
        for each in self.classes:
            if each.prompt_tokens_max is None or prompt_tokens <= each.prompt_tokens_max:
                return each
        raise AssertionError("the last class takes every prompt")

    @property
    def longest_deadline(self) -> float:
        """Seconds after which even the most patient request has to have started."""
        return max(each.deadline for each in self.classes)

    def document(self) -> dict[str, Any]:
        """Return all numbers as plain types, in the form that `parse` takes."""
        document: dict[str, Any] = {each.name: getattr(self, each.name) for each in fields(self)}
        document["classes"] = [
            {"name": each.name, "prompt_tokens_max": each.prompt_tokens_max, "deadline_s": each.deadline}
            for each in self.classes
        ]
        return document


# Lowest and highest value; the kind is that of the default.
_RANGES: Final[dict[str, tuple[float, float]]] = {
    "bytes_per_token": (0.1, 100),
    "bytes_per_token_most": (1, 10_000),
    "watermark": (0.1, 1),
    "watermark_low": (0.05, 1),
    "watermark_hold": (0, 600),
    "maxconn_low": (1, 100_000),
    "prefill_window": (0.01, 60),
    "prefill_rate": (1, 1e9),
    "sequence_rate": (0.01, 1e6),
    "decode_weight": (0, 1000),
    "kv_weight": (0, 1000),
    "adapter_load_time": (0, 600),
    "adapter_wait_time": (0, 600),
    "affinity_bound": (1, 100),
    "affinity_saving": (0, 1),
    "affinity_memory": (0, 86_400),
    "affinity_prefixes": (0, 10_000_000),
    "affinity_engines": (1, 1000),
    "load_memory": (0.1, 3600),
    "fairness_memory": (0.1, 86_400),
    "output_tokens": (1, 1_000_000),
    "length_memory": (1, 1_000_000),
    "drain_memory": (0.5, 600),
    "control_timeout": (0.1, 60),
}
_LONGEST_DEADLINE: Final = 250.0  # twice that, the most fairness makes of it, is still a priority HAProxy takes


def parse(content: Any) -> Policy:
    """Return the policy that a JSON object describes; what it does not name keeps its default.

    Raises PolicyError.
    """
    if not isinstance(content, dict):
        raise PolicyError(f"expected an object, found {content!r}")
    numbers: dict[str, Any] = {}
    for name, value in content.items():
        if name == "classes":
            numbers[name] = _classes(value)
        elif name in _RANGES:
            numbers[name] = _number(name, value)
        else:
            raise PolicyError(f"unknown key {name!r}; known: classes, {', '.join(_RANGES)}")
    policy = Policy(**numbers)
    if policy.watermark_low > policy.watermark:
        raise PolicyError("watermark_low: expected no more than watermark")
    if policy.bytes_per_token_most < policy.bytes_per_token:
        raise PolicyError("bytes_per_token_most: expected no less than bytes_per_token")
    return policy


def _number(name: str, value: Any) -> Any:
    lowest, highest = _RANGES[name]
    whole = isinstance(getattr(Policy, name), int)
    right = isinstance(value, int if whole else (int, float)) and not isinstance(value, bool)
    if not right or not lowest <= value <= highest:
        kind = "an integer" if whole else "a number"
        raise PolicyError(f"{name}: expected {kind} from {lowest:g} to {highest:g}, found {value!r}")
    return value if whole else float(value)


def _classes(value: Any) -> tuple[RequestClass, ...]:
    if not isinstance(value, list) or not value:
        raise PolicyError("classes: expected a list with at least one class")
    classes: list[RequestClass] = []
    for index, entry in enumerate(value):
        place = f"classes[{index}]"
        if not isinstance(entry, dict) or set(entry) != {"name", "prompt_tokens_max", "deadline_s"}:
            raise PolicyError(f"{place}: expected an object with name, prompt_tokens_max and deadline_s")
        name, most, deadline = entry["name"], entry["prompt_tokens_max"], entry["deadline_s"]
        if not isinstance(name, str) or not name.isidentifier():
            raise PolicyError(f"{place}.name: expected letters, digits and _, found {name!r}")
        if most is not None and (not isinstance(most, int) or isinstance(most, bool) or most < 1):
            raise PolicyError(f"{place}.prompt_tokens_max: expected an integer from 1 or null, found {most!r}")
        if (most is None) != (index == len(value) - 1):
            raise PolicyError(f"{place}.prompt_tokens_max: expected null for the last class and only there")
        if classes and most is not None and most <= (classes[-1].prompt_tokens_max or 0):
            raise PolicyError(f"{place}.prompt_tokens_max: expected more than the class before")
        if not isinstance(deadline, (int, float)) or isinstance(deadline, bool):
            raise PolicyError(f"{place}.deadline_s: expected a number, found {deadline!r}")
        if not 0.1 <= deadline <= _LONGEST_DEADLINE:
            raise PolicyError(f"{place}.deadline_s: expected 0.1 to {_LONGEST_DEADLINE:g}, found {deadline!r}")
        classes.append(RequestClass(name, most, float(deadline)))
    if len({each.name for each in classes}) != len(classes):
        raise PolicyError("classes: expected names that differ")
    return tuple(classes)
