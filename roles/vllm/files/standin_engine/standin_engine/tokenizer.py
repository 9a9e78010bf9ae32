# SPDX-License-Identifier: GPL-3.0-or-later
"""A tokenizer without data files: the same text has the same tokens on every engine, and tokens give the text back.

The vocabulary is 256 bytes, three control tokens of the ChatML template, the words of the answers (whole words cost
one token, as common words do in real vocabularies), and every string of one to three small letters with and without a
space before it. A word that is not known whole is cut into pieces of three letters; capitals, digits, punctuation and
other scripts fall to bytes. That gives about 3 characters a token for English text (4 in real vocabularies).
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Sequence
from functools import lru_cache
from string import ascii_lowercase
from typing import Any

END_OF_TEXT = 256
TURN_START = 257
TURN_END = 258
_CONTROL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_LONGEST_CACHED = 24

_PIECES = re.compile(r" ?[A-Za-z]+|[^A-Za-z ]+| +(?![A-Za-z])| ", re.ASCII)


class Tokenizer:
    """Text to token ids and back.

    Args:
        words: words that get a token of their own, with and without a space before them. Order matters: it gives the
            ids, so that all engines must use the same words.
    """

    def __init__(self, words: Iterable[str]) -> None:
        pieces = [bytes([value]) for value in range(256)]
        pieces += [text.encode() for text in _CONTROL]
        known: dict[str, int] = {}
        fragments = (
            "".join(letters) for length in (1, 2, 3) for letters in itertools.product(ascii_lowercase, repeat=length)
        )
        for word in itertools.chain(words, fragments):
            for form in (word, " " + word):
                if form not in known:
                    known[form] = len(pieces)
                    pieces.append(form.encode())
        self.pieces = pieces
        self._known = known
        self._cut_cached = lru_cache(maxsize=65536)(self._cut)

    @property
    def size(self) -> int:
        """Number of tokens in the vocabulary; ids run from 0 to one less."""
        return len(self.pieces)

    def encode(self, text: str) -> list[int]:
        """Token ids of a text; lone surrogates become question marks."""
        tokens: list[int] = []
        for piece in _PIECES.findall(text):
            # Long pieces do not come twice; kept out, they cannot fill the memory either.
            tokens += self._cut_cached(piece) if len(piece) <= _LONGEST_CACHED else self._cut(piece)
        return tokens

    def _cut(self, piece: str) -> tuple[int, ...]:
        known = self._known
        whole = known.get(piece)
        if whole is not None:
            return (whole,)
        tokens: list[int] = []
        position = 0
        while position < len(piece):
            # A leading space rides on the first letters; the longest known fragment is three letters.
            longest = 4 if piece[position] == " " else 3
            for length in range(min(longest, len(piece) - position), 0, -1):
                token = known.get(piece[position : position + length])
                if token is not None:
                    tokens.append(token)
                    position += length
                    break
            else:
                tokens += piece[position].encode("utf-8", errors="replace")
                position += 1
        return tuple(tokens)

    def decode(self, tokens: Sequence[int]) -> str:
        """Text of token ids; broken UTF-8 becomes replacement characters.

        Raises:
            IndexError: an id outside the vocabulary.
        """
        return b"".join([self.pieces[token] for token in tokens]).decode("utf-8", errors="replace")

    def encode_chat(self, messages: Sequence[dict[str, Any]], add_generation_prompt: bool = True) -> list[int]:
        """Token ids of messages (``role`` and a text ``content``) in the ChatML template."""
        tokens: list[int] = []
        newline = self.encode("\n")
        for message in messages:
            tokens.append(TURN_START)
            tokens += self.encode(f"{message['role']}\n{message['content']}")
            tokens.append(TURN_END)
            tokens += newline
        if add_generation_prompt:
            tokens.append(TURN_START)
            tokens += self.encode("assistant\n")
        return tokens
