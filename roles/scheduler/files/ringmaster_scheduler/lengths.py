# SPDX-License-Identifier: GPL-3.0-or-later
"""How long answers are, learnt per key and class.

``max_tokens`` says what a client allows, not what it gets: most set it far too high or not at all. What one
application asks for, under its key and in one class of prompts, is alike; so a fading mean per key and class is a good
guess, and until a key is known, that of the class, and before that a number of the policy.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Final

from ringmaster_scheduler.policy import Policy

_MOST_KEYS: Final = 10_000
"""Keys that are remembered; the one that was not used for longest is forgotten first."""

_ENOUGH: Final = 5
"""Answers after which a key's own mean is believed."""


class OutputLengths:
    """Learnt lengths of answers, in tokens."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._of_key: OrderedDict[tuple[str, str], tuple[int, float]] = OrderedDict()
        self._of_class: dict[str, tuple[int, float]] = {}

    def expect(self, key_id: str, class_name: str, max_tokens: int | None) -> int:
        """Return how many tokens an answer will probably have, 1 or more."""
        known = self._of_key.get((key_id, class_name))
        if known is None or known[0] < _ENOUGH:
            known = self._of_class.get(class_name)
        tokens = self._policy.output_tokens if known is None else round(known[1])
        if max_tokens is not None and 0 < max_tokens < tokens:
            return max_tokens
        return max(1, tokens)

    def learn(self, key_id: str, class_name: str, tokens: float) -> None:
        """Take the length of an answer that came to its end."""
        key = (key_id, class_name)
        self._of_key[key] = self._mean(self._of_key.get(key), tokens)
        self._of_key.move_to_end(key)
        if len(self._of_key) > _MOST_KEYS:
            self._of_key.popitem(last=False)
        self._of_class[class_name] = self._mean(self._of_class.get(class_name), tokens)

    def _mean(self, known: tuple[int, float] | None, tokens: float) -> tuple[int, float]:
        count, mean = known or (0, 0.0)
        count = min(count + 1, self._policy.length_memory)
        return count, mean + (tokens - mean) / count

    def document(self) -> dict[str, dict[str, float]]:
        """Return the learnt lengths by class and key, for people."""
        found: dict[str, dict[str, float]] = {}
        for (key_id, class_name), (_count, mean) in self._of_key.items():
            found.setdefault(class_name, {})[key_id] = round(mean, 1)
        return found
