# Copyright (c) 2026, the Ringmaster authors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The same prompts, asked greedily, before and after an engine changed: does it still answer, the same, and as fast?

Both times the engine is asked alone, one prompt after the other, when it is drained; so two measurements differ by the
engine and not by what else it did. Nothing here imports Ansible.
"""

from __future__ import annotations

import http.client
import json
import statistics
import time
import urllib.parse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

# Short, with an obvious continuation: what a healthy model says hardly depends on the rounding of a kernel.
PROMPTS = (
    "The capital of France is",
    "1, 2, 3, 4, 5, 6,",
    "Monday, Tuesday, Wednesday,",
    "def add(a, b):\n    return",
    "Water boils at a temperature of",
    "The opposite of hot is",
    '{"name": "Ada", "born":',
    "To be, or not to be, that is",
)
LARGEST_LINE = 1 << 20  # bytes of one event; an answer of some tokens has some hundreds


@dataclass(frozen=True)
class Answer:
    """One answer. Times are in seconds since the request was sent; ``error`` is empty if it came whole."""

    text: str
    tokens: int
    first_seconds: float
    seconds: float
    error: str = ""


@dataclass(frozen=True)
class Limits:
    """How much worse an engine may be.

    ``error_rate``: by how much the share of requests that failed may grow, 0 to 1. ``latency_factor``: how many times
    the former median the time to the first token, and per further token, may take, 1 or more; ``latency_slack_seconds``
    is allowed on top, because a few milliseconds are noise. ``agreement``: how much of the former answers must come
    again, as a share of how well those agreed among themselves, 0 to 1.
    """

    error_rate: float = 0.0
    latency_factor: float = 1.5
    latency_slack_seconds: float = 0.02
    agreement: float = 0.5


class Canary:
    """Asks one engine at ``url`` (``http://ADDRESS:PORT``) for ``max_tokens`` tokens a prompt."""

    def __init__(
        self,
        url: str,
        key: str,
        model: str,
        max_tokens: int,
        timeout: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        parts = urllib.parse.urlsplit(url)
        if parts.scheme != "http" or not parts.hostname:
            raise ValueError(f"expected an engine's address such as http://192.0.2.21:8100, found {url!r}")
        self._host, self._port = parts.hostname, parts.port
        self._key, self._model, self._max_tokens, self._timeout, self._clock = key, model, max_tokens, timeout, clock

    def measure(self, prompts: Sequence[str], rounds: int) -> dict[str, Any]:
        """Ask all prompts `rounds` times. What :func:`compare` takes: per prompt the answers, and of all requests the
        count, the errors and the medians of times in seconds (null without an answer)."""
        self.ask(prompts[0])  # what is compiled or cached at a first request is no matter of the release
        answers = [[self.ask(prompt) for _round in range(rounds)] for prompt in prompts]
        every = [answer for of_prompt in answers for answer in of_prompt]
        well = [answer for answer in every if not answer.error]
        paced = [(answer.seconds - answer.first_seconds) / (answer.tokens - 1) for answer in well if answer.tokens > 1]
        return {
            "requests": len(every),
            "errors": sorted(answer.error for answer in every if answer.error),
            "first_token_seconds": _median([answer.first_seconds for answer in well]),
            "further_token_seconds": _median(paced),
            "answers": {
                prompt: [answer.text for answer in of_prompt if not answer.error]
                for prompt, of_prompt in zip(prompts, answers)
            },
        }

    def ask(self, prompt: str) -> Answer:
        """One greedy answer. Never raises for what the engine does."""
        begin = self._clock()
        body = {
            "model": self._model,
            "prompt": prompt,
            "max_tokens": self._max_tokens,
            "temperature": 0,
            "seed": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        connection = http.client.HTTPConnection(self._host, self._port, timeout=self._timeout)
        try:
            headers = {"Content-Type": "application/json", "Authorization": f"Bearer {self._key}"}
            connection.request("POST", "/v1/completions", json.dumps(body).encode("utf-8"), headers)
            answer = connection.getresponse()
            if answer.status != 200:
                return Answer("", 0, 0.0, 0.0, f"status {answer.status}")
            return self._read(answer, begin)
        except (OSError, http.client.HTTPException, ValueError, LookupError, TypeError, AttributeError) as error:
            return Answer("", 0, 0.0, 0.0, f"{type(error).__name__}: {error}"[:200])
        finally:
            connection.close()

    def _read(self, answer: http.client.HTTPResponse, begin: float) -> Answer:
        texts: list[str] = []
        tokens = 0
        first: float | None = None
        while True:
            if self._clock() - begin > self._timeout:
                raise TimeoutError(f"no end within {self._timeout:g} s")
            line = answer.readline(LARGEST_LINE)
            if not line:
                raise ValueError("the stream ended without [DONE]")
            if not line.startswith(b"data:"):
                continue
            data = line[5:].strip()
            if data == b"[DONE]":
                break
            event = json.loads(data)
            if "error" in event:
                raise ValueError(str(event["error"]))
            # A chunk is a token, or some that came together: the engine itself says how many they were.
            if event.get("usage"):
                tokens = int(event["usage"]["completion_tokens"])
            for choice in event["choices"]:
                if choice["text"]:
                    first = self._clock() - begin if first is None else first
                    texts.append(str(choice["text"]))
        if first is None:
            raise ValueError("an answer without a token")
        return Answer("".join(texts), tokens, first, self._clock() - begin)


def compare(before: dict[str, Any], after: dict[str, Any], limits: Limits) -> tuple[list[str], dict[str, Any]]:
    """What is worse than the limits allow, in words with figures; and all figures. Both take what ``measure`` gave.

    An engine that answered nothing before is no measure for the errors after, and one that answers nothing after is
    worse whatever it was.
    """
    rate_before, rate_after = (len(each["errors"]) / max(each["requests"], 1) for each in (before, after))
    answered_before, answered_after = (len(each["errors"]) < each["requests"] for each in (before, after))
    rate_allowed = (rate_before if answered_before else 0.0) + limits.error_rate
    own, between = _agreements(before["answers"], after["answers"])
    figures: dict[str, Any] = {
        "error_rate": [round(rate_before, 4), round(rate_after, 4)],
        "agreement": [own, between],
    }
    worse = []
    if rate_after > rate_allowed or not answered_after:
        errors = ", ".join(sorted(set(after["errors"]))[:3])
        worse.append(
            f"{rate_after:.1%} of requests failed, {rate_before:.1%} before, {rate_allowed:.1%} are allowed ({errors})"
        )
    for name, meaning in (
        ("first_token_seconds", "to the first token"),
        ("further_token_seconds", "for each further token"),
    ):
        figures[name] = [before[name], after[name]]
        if before[name] is None or after[name] is None:
            continue  # then there are errors, or the answers have one token
        allowed = before[name] * limits.latency_factor + limits.latency_slack_seconds
        if after[name] > allowed:
            worse.append(
                f"{1000 * after[name]:.1f} ms {meaning}, {1000 * before[name]:.1f} ms before, "
                f"{1000 * allowed:.1f} ms are allowed"
            )
    if own is not None:
        needed = limits.agreement * own
        if (between or 0.0) < needed:
            worse.append(
                f"{between or 0.0:.0%} of the former answers came again, {needed:.0%} are needed "
                f"(among themselves they agreed to {own:.0%})"
            )
    return worse, figures


def agreement(first: str, second: str) -> float:
    """Share of two texts that is the same from their beginning on, 0 to 1: where greedy answers part, all after it may
    be another thing."""
    longest = max(len(first), len(second))
    same = 0
    for one, other in zip(first, second):
        if one != other:
            break
        same += 1
    return same / longest if longest else 1.0


def _agreements(before: dict[str, list[str]], after: dict[str, list[str]]) -> tuple[float | None, float | None]:
    """Mean agreement of the former answers among themselves, and with the present ones; None without answers."""
    own, between = [], []
    for prompt, former in before.items():
        if not former:
            continue
        own += [agreement(former[0], text) for text in former]
        between += [agreement(former[0], text) for text in after.get(prompt, [])] or [0.0]
    return _mean(own), _mean(between)


def _mean(values: Sequence[float]) -> float | None:
    return round(statistics.fmean(values), 4) if values else None


def _median(values: Sequence[float]) -> float | None:
    return round(statistics.median(values), 6) if values else None
