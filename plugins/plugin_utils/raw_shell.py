# Copyright (c) 2026, the Ringmaster authors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Scripts for the shell of a host without Python: how their arguments are quoted, and how their answers are read.

A script is a constant. What differs from task to task comes as its arguments (``"$1"``, ``"$2"`` …), each quoted by
:func:`quote`, so that no name and no value is ever read as a part of the script. Scripts use what POSIX has of ``sh``,
and of the tools what GNU's coreutils and busybox have in common.

An answer is a number of lines ``NAME HEXADECIMAL`` between two marks. Hexadecimal, because the way back may change line
ends (a terminal) and code points (locales); marks, because a login can say things of its own before and after. An
answer without its second mark was cut on the way.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

BEGIN = "ringmaster-raw-begin"
END = "ringmaster-raw-end"

# say NAME VALUE: one line of the answer. say_file NAME PATH: the same with a file's content as the value.
# trouble STEP COMPLAINT: the answer ends here, with what could not be done.
# attempt STEP COMMAND…: run a command, which must succeed. Its output is the complaint when it does not.
# The folders of the system's tools are searched after those that the login gave: the PATH of an ordinary user's shell
# has no sbin.
_PRELUDE = f"""
set -u
export LC_ALL=C
export PATH="$PATH:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
hexadecimal() {{ od -An -v -tx1 | tr -d " \\n"; }}
say() {{ printf "%s " "$1"; printf "%s" "$2" | hexadecimal; echo; }}
say_file() {{ printf "%s " "$1"; hexadecimal <"$2"; echo; }}
trouble() {{ say trouble "$1"; say complaint "$2"; echo {END}; exit 1; }}
attempt() {{ step=$1; shift; complaint=$("$@" 2>&1 </dev/null) || trouble "$step" "$complaint"; }}
echo {BEGIN}
"""

_LONGEST_BATCH = 8192  # characters
_LINE = re.compile(r"([a-z_]+) ((?:[0-9a-f]{2})*)\Z")


class RawError(Exception):
    """Something on the host, or in the task, is not as it has to be.

    The text says what was expected, what was found and what to do.
    """

    def __init__(self, expected: str, found: str, remedy: str) -> None:
        super().__init__(f"Expected {expected}. Found {found}. To do: {remedy}.")


class StepError(Exception):
    """A step of a script failed on the host."""

    def __init__(self, step: str, complaint: str) -> None:
        super().__init__(f"{step}: {complaint}")
        self.step = step
        self.complaint = complaint


class Answer:
    """What a script said: names and values in their order. A name can come several times."""

    def __init__(self, pairs: Sequence[tuple[str, bytes]]) -> None:
        self.pairs = list(pairs)

    def has(self, name: str) -> bool:
        """Whether a value of this name was said."""
        return any(each == name for each, _value in self.pairs)

    def data(self, name: str) -> bytes:
        """The first value of this name, as bytes. Raises RawError where there is none."""
        for each, value in self.pairs:
            if each == name:
                return value
        raise RawError(
            f"the host to tell its {name}",
            "an answer without it",
            "see what the shell says (ansible-playbook -vvvv), and what of coreutils is missing",
        )

    def text(self, name: str) -> str:
        """The first value of this name. Bytes that are no UTF-8 come as surrogates, as they do in Python's paths."""
        return self.data(name).decode("utf-8", "surrogateescape")

    def texts(self, name: str) -> list[str]:
        """All values of this name."""
        return [value.decode("utf-8", "surrogateescape") for each, value in self.pairs if each == name]

    def groups(self, name: str) -> list[Answer]:
        """The answer in parts, each of which begins with a value of this name. What comes before them is left out."""
        parts: list[Answer] = []
        for pair in self.pairs:
            if pair[0] == name:
                parts.append(Answer([pair]))
            elif parts:
                parts[-1].pairs.append(pair)
        return parts


def quote(word: str) -> str:
    """The word as one argument for any POSIX shell, whatever characters are in it. Raises RawError for a NUL.

    Everything is literal between single quotes but the single quote itself, which is put between double quotes.
    """
    if "\0" in word:
        raise RawError("text that a command line can hold", "a NUL character in it", "take the NUL out")
    return "'" + word.replace("'", "'\"'\"'") + "'"


def command(script: str, words: Sequence[str]) -> str:
    """The command line that runs a script with its arguments and lets it answer.

    Raises RawError when a word holds a NUL.
    """
    whole = f"{_PRELUDE}{script.strip()}\necho {END}\n"
    return " ".join(["/bin/sh", "-c", quote(whole), "raw", *(quote(word) for word in words)])


def batches(words: Sequence[str]) -> Iterator[list[str]]:
    """The words in parts that are short enough for one command line each. Linux takes 128 KiB for one argument, and the
    whole script is one to the shell of a login; each quotation on the way makes it longer.
    """
    part: list[str] = []
    length = 0
    for word in words:
        if part and length + len(word) > _LONGEST_BATCH:
            yield part
            part, length = [], 0
        part.append(word)
        length += len(word) + 1
    if part:
        yield part


def read(output: str) -> Answer:
    """The answer in a script's output.

    Raises:
        StepError: a step of the script failed.
        ValueError: there is no whole answer in the output.
    """
    lines = [line.rstrip("\r") for line in output.split("\n")]
    if BEGIN not in lines:
        raise ValueError("no answer")
    first = lines.index(BEGIN) + 1
    if END not in lines[first:]:
        raise ValueError("an answer that was cut")
    pairs: list[tuple[str, bytes]] = []
    for line in lines[first : lines.index(END, first)]:
        found = _LINE.match(line)
        # What a tool wrote to a terminal, past the script, stands between the lines. It is no part of the answer.
        if found:
            pairs.append((found[1], bytes.fromhex(found[2])))
    answer = Answer(pairs)
    if answer.has("trouble"):
        raise StepError(answer.text("trouble"), shown(answer.text("complaint")).strip())
    return answer


def shown(text: str) -> str:
    """Text of a host as it may stand in a message or a result: what is no UTF-8 is written as an escape."""
    return text.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")
