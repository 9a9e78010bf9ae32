# SPDX-License-Identifier: GPL-3.0-or-later
"""Token ids of the binary and of Python's `tokenizers`, for the same files and strings.

EQUALITY_STRINGS is the number of random strings for each tokenizer; 100000 for a long look.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from tests.unit.preprocessor import made_tokenizers

STRINGS = int(os.environ.get("EQUALITY_STRINGS", "3000"))

# What breaks the limits of matchers and merges: long runs, with and without something behind them.
LONG = [
    *[
        " " * 5000,
        " " * 5000 + "a",
        "\n" * 3000 + " x",
        "\t \n" * 2000,
        "a" * 20000,
        "ab" * 5000,
        "1" * 5000,
        "!" * 5000,
    ],
    *["é" * 3000, "e\u0301" * 3000, "你" * 3000, "😀" * 2000, "\u200d" * 2000, "'s" * 2000, "aA" * 3000, "\x00" * 2000],
]


def ids_of(binary: Path, directory: Path, strings: list[str]) -> list[list[int]]:
    """Return the ids that the binary gives for each string."""
    lines = "".join(json.dumps(string, ensure_ascii=False) + "\n" for string in strings)
    command = [str(binary), "--tokenize", str(directory)]
    done = subprocess.run(command, input=lines.encode(), capture_output=True, check=True)
    return [json.loads(line) for line in done.stdout.decode().splitlines()]


@pytest.mark.parametrize("kind", made_tokenizers.KINDS)
def test_ids_are_those_of_the_reference(kind: str, binary: Path, model_directory: Callable[[str], Path]) -> None:
    directory = model_directory(kind)
    reference = Tokenizer.from_file(str(directory / "tokenizer.json"))
    strings = [*made_tokenizers.strings(11, STRINGS), *made_tokenizers.corpus(12, 200), *LONG]
    for string, ids in zip(strings, ids_of(binary, directory, strings), strict=True):
        assert ids == reference.encode(string, add_special_tokens=False).ids, repr(string[:200])
