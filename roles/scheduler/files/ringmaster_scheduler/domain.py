# SPDX-License-Identifier: GPL-3.0-or-later
"""The words of the decision: engines, what they say of themselves, requests, and what is decided about them."""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple


class Engine(NamedTuple):
    """An engine as the members document describes it; `max_model_len` in tokens, 0 where it is not known."""

    name: str
    host: str
    address: str
    port: int
    kind: str
    model: str
    adapters: tuple[str, ...]
    card: str
    max_num_seqs: int
    max_model_len: int = 0


class Agent(NamedTuple):
    """A host's agent as the members document describes it."""

    host: str
    address: str
    port: int


class Reading(NamedTuple):
    """What an engine said of itself.

    `begun_at` is when it was asked, in seconds: the answer is at least that fresh. `kv_use` is the share of KV blocks
    in use, 0 to 1, and `kv_tokens` the size of the KV pool in tokens. `preemptions`, `prompt_tokens` (computed ones,
    not those from the prefix cache), `generation_tokens` and `iterations` (steps of its scheduler) count since the
    engine's start, which is `process_start`, in seconds since the epoch by the engine's clock. `adapters` are the LoRA
    adapters that run, `max_adapters` how many may run at once. None where the engine does not tell.
    """

    begun_at: float
    running: int
    waiting: int
    kv_use: float | None = None
    kv_tokens: int | None = None
    preemptions: int | None = None
    prompt_tokens: int | None = None
    generation_tokens: int | None = None
    adapters: tuple[str, ...] = ()
    max_adapters: int | None = None
    iterations: int | None = None
    process_start: float | None = None


class Request(NamedTuple):
    """A question of HAProxy's, as docs/conventions.md has it; None or empty is what HAProxy could not tell."""

    model: str | None
    id: str = ""
    prompt_tokens: int | None = None
    body_bytes: int | None = None
    max_tokens: int | None = None
    key_id: str = ""
    prefix: str | None = None


class Outcome(Enum):
    """Kind of a decision."""

    PLACED = "placed"
    QUEUED = "queued"
    UNKNOWN_MODEL = "unknown_model"
    PROMPT_TOO_LONG = "prompt_too_long"
    NOT_IN_TIME = "not_in_time"
    NO_HEALTHY_ENGINE = "no_healthy_engine"
    LEFT_TO_HAPROXY = "left_to_haproxy"


class Decision(NamedTuple):
    """`engine` is set when placed; `status` is an HTTP status when refused, else 0; `retry_after` in seconds.

    `priority` is the milliseconds from now to the request's deadline, None for a request that does not go on or of
    which nothing is known. `reason` is one word, for the access log.
    """

    outcome: Outcome
    engine: str | None = None
    status: int = 0
    retry_after: int | None = None
    priority: int | None = None
    reason: str = ""


class Reason(NamedTuple):
    """Why an engine's health weight is what it is: the rule, what it holds on, its factor (0 where the engine gets
    nothing), what was seen, and since when."""

    rule: str
    subject: str
    factor: float
    text: str
    since: float


class Health(Enum):
    """What is thought of an engine at a moment."""

    HEALTHY = "healthy"
    UNHEALTHY = "unhealthy"
    UNKNOWN = "unknown"


class ServerCounts(NamedTuple):
    """What HAProxy's ``show stat`` says of one server: requests at the engine, and waiting in the server's own queue;
    whether HAProxy sends requests there at all; and its ``maxconn``, None where it does not tell."""

    current: int
    queued: int
    up: bool = True
    maxconn: int | None = None

    @property
    def requests(self) -> int:
        """All that HAProxy has given to the server."""
        return self.current + self.queued


class Ended(NamedTuple):
    """The end of a request, from HAProxy's log: the server's name (None if it had none), the HTTP status, and times in
    seconds: in HAProxy's queue, from there to the first byte of the answer, and in all; None where it got not so
    far."""

    id: str
    engine: str | None
    status: int
    queue_time: float | None = None
    first_byte_time: float | None = None
    total_time: float | None = None
