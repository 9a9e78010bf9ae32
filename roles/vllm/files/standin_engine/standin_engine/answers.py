# SPDX-License-Identifier: GPL-3.0-or-later
"""What the stand-in answers: readable sentences, the same for the same prompt on every engine at temperature 0."""

from __future__ import annotations

import hashlib
import math
from array import array
from collections.abc import Sequence
from statistics import NormalDist

from .tokenizer import END_OF_TEXT, Tokenizer

_SUBJECTS = (
    "the operator",
    "a careful engineer",
    "the night shift",
    "the old cluster",
    "every good runbook",
    "the second gateway",
    "a quiet network",
    "the first request",
    "the long queue",
    "a patient reader",
    "the small model",
    "the scheduler",
)
_VERBS = (
    "reads",
    "measures",
    "follows",
    "explains",
    "repairs",
    "remembers",
    "trusts",
    "replaces",
    "watches",
    "keeps",
    "describes",
    "compares",
)
_OBJECTS = (
    "the log",
    "a short list of facts",
    "the last known state",
    "each answer",
    "the oldest machine in the rack",
    "a plan that can be undone",
    "the time between two tokens",
    "the weight of every node",
    "what the card reports",
    "the promise made to the client",
    "a single clear message",
    "the room that is left",
)
_ENDINGS = (
    "before anything is changed",
    "when the load is high",
    "because numbers do not argue",
    "and writes down the result",
    "without haste",
    "until the night is over",
    "so that nobody has to guess",
    "as the notes say",
)

MEDIAN_LENGTH = 120
"""Tokens of the median answer that nothing else ends; chat answers of public traces lie between 100 and 250."""

LENGTH_SPREAD = 0.6
"""Standard deviation of the logarithm of the length."""

MAX_LENGTH = 1024
"""Tokens after which an answer ends by itself, whatever its drawn length."""

_MULTIPLIER = 6364136223846793005
_INCREMENT = 1442695040888963407
_MASK = 2**64 - 1


def _words() -> list[str]:
    """Words of the answers in both spellings that occur: as written and with a capital."""
    words: list[str] = []
    for phrase in (*_SUBJECTS, *_VERBS, *_OBJECTS, *_ENDINGS):
        words += phrase.split()
    return list(dict.fromkeys(form for word in words for form in (word, word.capitalize())))


def build_tokenizer() -> Tokenizer:
    """The tokenizer that all engines share."""
    return Tokenizer(_words())


class Writer:
    """Gives the tokens of answers; sentences are tokenised once."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self._sentences: dict[int, tuple[int, ...]] = {}

    def sentence(self, number: int) -> tuple[int, ...]:
        """Tokens of one of the sentences; any number names one. It starts with a space."""
        number, subject = divmod(number, len(_SUBJECTS))
        number, verb = divmod(number, len(_VERBS))
        number, thing = divmod(number, len(_OBJECTS))
        ending = number % len(_ENDINGS)
        key = ((ending * len(_OBJECTS) + thing) * len(_VERBS) + verb) * len(_SUBJECTS) + subject
        tokens = self._sentences.get(key)
        if tokens is None:
            text = f"{_SUBJECTS[subject]} {_VERBS[verb]} {_OBJECTS[thing]} {_ENDINGS[ending]}."
            tokens = tuple(self.tokenizer.encode(" " + text[0].upper() + text[1:]))
            self._sentences[key] = tokens
        return tokens

    def answer(self, seed: int) -> Answer:
        """An answer that the seed (64 bits) determines."""
        return Answer(self, seed)


class Answer:
    """An endless stream of tokens and the length at which the model would end it."""

    __slots__ = ("_pending", "_position", "_state", "_writer", "length")

    def __init__(self, writer: Writer, seed: int) -> None:
        self._writer = writer
        self._state = seed
        first = list(writer.sentence(self._draw()))
        # An answer does not start with a space.
        start = writer.tokenizer.decode(first[:1]).lstrip()
        self._pending: Sequence[int] = [*writer.tokenizer.encode(start), *first[1:]]
        self._position = 0
        share = (self._draw() % 1000000 + 0.5) / 1000000
        drawn = MEDIAN_LENGTH * math.exp(LENGTH_SPREAD * NormalDist().inv_cdf(share))
        self.length = max(1, min(MAX_LENGTH, round(drawn)))

    def _draw(self) -> int:
        self._state = (self._state * _MULTIPLIER + _INCREMENT) & _MASK
        return self._state >> 24

    def next_token(self) -> int:
        """The next token; never the end-of-text token."""
        if self._position == len(self._pending):
            self._pending = self._writer.sentence(self._draw())
            self._position = 0
        token = self._pending[self._position]
        self._position += 1
        return token

    def garbage_token(self) -> int:
        """A token that makes no sense, as a broken card or a bad network path makes the model say."""
        return END_OF_TEXT + 3 + self._draw() % (self._writer.tokenizer.size - END_OF_TEXT - 3)


class WrittenAnswer(Answer):
    """An answer whose text is given: a document of a form that a client asked for."""

    __slots__ = ()

    def __init__(self, writer: Writer, seed: int, text: str) -> None:
        super().__init__(writer, seed)
        self._pending = writer.tokenizer.encode(text)
        self.length = len(self._pending)


def answer_seed(model: str, prompt: Sequence[int], sampling: str) -> int:
    """Seed of an answer: 64 bits of a hash over model, prompt and sampling, so that it is the same on every engine."""
    digest = hashlib.blake2b(f"{model}\n{sampling}\n".encode(), digest_size=8)
    digest.update(array("I", prompt).tobytes())
    return int.from_bytes(digest.digest(), "big")
