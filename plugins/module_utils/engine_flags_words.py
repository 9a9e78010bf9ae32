# Copyright (c) 2026, the Ringmaster authors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Splits a command line into the engine's options and their values, as the engine's parser does.

That parser is argparse (abbreviations allowed, ``--flag=value``, ``-n2``, negative numbers, options that take several
words) behind vLLM's own preparation: underscores are dashes, ``-O3`` is ``--optimization-level 3``, ``--model`` is
moved to the front, and dotted options are gathered into one JSON object (vLLM 0.32,
``vllm/utils/argparse_utils.py``). Unlike the parser, which stops at the first mistake, this goes on, so that every
option gets its verdict.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ansible_collections.ringmaster.inference.plugins.module_utils.engine_flags_catalogue import ONE, Catalogue, Option
from ansible_collections.ringmaster.inference.plugins.module_utils.engine_flags_values import size

_ASSIGNMENT = re.compile(r"[A-Za-z_][A-Za-z0-9_]*=")
_NEGATIVE_NUMBER = re.compile(
    r"-(?:\d+(?:_\d+)*(?:\.\d+(?:_\d+)*)?|\.\d+(?:_\d+)*)$"
)  # argparse of Python 3.14, and before
_WITHOUT_VALUE = "vLLM takes a word with a dot for a field of an option, and finds no value after it"
_BEFORE_DOT = re.compile(r"(?<=--)[^.]*")


class CommandLineError(Exception):
    """A text is no command line (a quote that is not closed)."""


@dataclass
class Given:
    """An option as it was given.

    ``written`` is what stands on the command line (without a value after ``=``); ``option`` what it names, None if
    nothing. ``candidates`` are the options that an abbreviation may mean, if several. ``problem`` is what the parser
    says of the number of its words, None if it has nothing to say. ``attached``: the value stands after ``=``, or in
    the same word. ``dotted``: it is what dotted options were gathered into.
    """

    written: str
    option: Option | None = None
    values: list[str] = field(default_factory=list)
    negated: bool = False
    candidates: tuple[str, ...] = ()
    problem: str | None = None
    attached: bool = False
    dotted: bool = False


@dataclass
class CommandLine:
    """``program`` is what comes before the engine's own options, ``environment`` what was set there; ``model`` the
    model that stands there without an option, ``stray`` words that belong to nothing. ``needs_model``: an option is
    there that vLLM takes only if the model comes first.
    """

    program: tuple[str, ...] = ()
    environment: dict[str, str] = field(default_factory=dict)
    given: list[Given] = field(default_factory=list)
    model: str | None = None
    stray: list[str] = field(default_factory=list)
    needs_model: bool = False

    @property
    def serve(self) -> bool:
        """Whether it is for ``vllm serve``, and not for a module that is run by name."""
        return not any(word.startswith("vllm.") for word in self.program)


def split(command: str | Sequence[Any]) -> list[str]:
    """The words of a command line as a shell splits it; a list is taken as it is.

    Raises:
        CommandLineError: a quote is not closed.
    """
    if not isinstance(command, str):
        return [str(word) for word in command]
    try:
        return shlex.split(re.sub(r"\\\r?\n", "", command))
    except ValueError as error:
        raise CommandLineError(str(error)) from None


def in_order(options: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """Options in the order that they have on a command line: that of their names."""
    return sorted(options.items(), key=lambda item: str(item[0]))


def from_options(options: Mapping[str, Any]) -> list[str]:
    """The words for options as an inventory has them: true gives the bare option, false the option with ``no-``
    before it, a list several values, a mapping JSON, null nothing. The order is that of the names."""
    words: list[str] = []
    for name, value in in_order(options):
        flag = "--" + _with_dashes(str(name).lstrip("-"))
        if value is None:
            continue
        if isinstance(value, bool):
            words.append(flag if value else "--no-" + flag[2:])
        elif isinstance(value, Mapping):
            words += [flag, json.dumps(value, sort_keys=True)]
        elif isinstance(value, (list, tuple)):
            words += [flag, *(str(each) for each in value)]
        else:
            words += [flag, str(value)]
    return words


def read(catalogue: Catalogue, words: Sequence[str]) -> CommandLine:
    """Read a whole command line (program, assignments before it) or what follows ``serve`` alone."""
    line = CommandLine()
    rest = _take_program(line, list(words))
    prepared = _prepare(_model_first(rest) if line.serve else rest)
    _parse(catalogue, prepared.words, line)
    for given in line.given:
        given.dotted = given.written in prepared.dotted and given.values == [prepared.dotted[given.written]]
    line.given += [Given(word, problem=_WITHOUT_VALUE) for word in prepared.lost]
    line.needs_model = (
        line.serve
        and bool(rest)
        and rest[0].startswith("-")
        and not any(re.match(r"--(model|config)(=.+|$)", word) for word in rest)
        and any(re.match(r"--served[-_]model[-_]name(=.+|$)", word) for word in rest)
    )
    return line


def serve_words(words: Sequence[str]) -> list[str]:
    """What follows the program in a whole command line: the words that the parser of ``vllm serve`` gets."""
    return _take_program(CommandLine(), list(words))


def _take_program(line: CommandLine, words: list[str]) -> list[str]:
    start = 0
    for index, word in enumerate(words):
        following = words[index + 1] if index + 1 < len(words) else ""
        module = word == "-m" and following.startswith("vllm.")
        if module or (word.rpartition("/")[2] == "vllm" and following == "serve"):
            start = index + 2
            break
    program = words[:start]
    for word in program:
        if _ASSIGNMENT.match(word):
            name, _equals, value = word.partition("=")
            line.environment[name] = value
    line.program = tuple(word for word in program if not _ASSIGNMENT.match(word))
    return words[start:]


def _with_dashes(name: str) -> str:
    before, dot, after = name.partition(".")
    return before.replace("_", "-") + dot + after


def _model_first(words: list[str]) -> list[str]:
    """vLLM takes the first --model for the word that names the model, whatever stands before it."""
    for index, word in enumerate(words):
        name, equals, value = word.partition("=")
        if name == "--model" and equals and value:
            return ["--model", value, *words[:index], *words[index + 1 :]]
        if word == "--model":
            return [*words[index : index + 2], *words[:index], *words[index + 2 :]]
    return words


@dataclass
class _Prepared:
    """The words as argparse sees them; the options in them that dotted ones were gathered into; and dotted words at the
    very end, which lack a value: vLLM's parser falls over them."""

    words: list[str]
    dotted: dict[str, str]
    lost: list[str]


def _prepare(words: list[str]) -> _Prepared:
    """What vLLM does to the words before argparse sees them."""
    processed: list[str] = []
    for index, word in enumerate(words):
        following = words[index + 1] if index + 1 < len(words) else ""
        if word.startswith("--help="):
            processed.append("--help")
        elif word.startswith("--"):
            name, equals, value = word.partition("=")
            processed.append(
                _BEFORE_DOT.sub(lambda match: match.group().replace("_", "-"), name, count=1) + equals + value
            )
        elif word.startswith("-O") and word != "-O":
            processed += ["--optimization-level", word[3:] if word[2] == "=" else word[2:]]
        elif word == "-O" and following in {"0", "1", "2", "3"}:
            processed.append("--optimization-level")
        else:
            processed.append(word)
    return _gather_dotted(processed)


def _gather_dotted(words: list[str]) -> _Prepared:
    objects: dict[str, dict[str, Any]] = {}
    rest: list[str] = []
    lost: list[str] = []
    index = 0
    while index < len(words):
        word = words[index]
        index += 1
        name, equals, value = word.partition("=")
        if not (word.startswith("-") and "." in name):
            rest.append(word)
            continue
        if not equals:
            if index == len(words):
                lost.append(word)
                continue
            value = words[index]
            index += 1
        if name.endswith("+"):
            name, value = name[:-1], json.dumps(value.split(","))
        key, *path = name.split(".")
        _put(objects.setdefault(key, {}), path, _value(value))
    gathered = {key: json.dumps(content) for key, content in objects.items()}
    return _Prepared(rest + [word for item in gathered.items() for word in item], gathered, lost)


def _value(word: str) -> Any:
    try:
        return json.loads(word)
    except (ValueError, RecursionError):
        try:
            return size(word)
        except (ValueError, OverflowError):
            return word


def _put(target: dict[str, Any], path: list[str], value: Any) -> None:
    for name in path[:-1]:
        if not isinstance(target.get(name), dict):
            target[name] = {}
        target = target[name]
    if isinstance(value, dict) and isinstance(target.get(path[-1]), dict):
        for name, inner in value.items():
            _put(target[path[-1]], [name], inner)
    elif isinstance(value, list) and isinstance(target.get(path[-1]), list):
        target[path[-1]] += value
    else:
        target[path[-1]] = value


@dataclass
class _Match:
    """What argparse makes of one word: None for `given` means a word that is no option."""

    given: Given | None
    attached: str | None = None


def _parse(catalogue: Catalogue, words: list[str], line: CommandLine) -> None:
    end = words.index("--") if "--" in words else len(words)  # after it nothing is an option
    matches = [_match(catalogue, word) for word in words[:end]] + [_Match(None) for _word in words[end:]]
    index = 0
    while index < len(words):
        match = matches[index]
        if match.given is None:
            if index == end and (line.model is None or words[index - 1] is line.model):
                pass  # "--" goes with the model, before or after it
            elif line.model is None:
                line.model = words[index]
            else:
                line.stray.append(words[index])
            index += 1
            continue
        available = 0
        while index + 1 + available < end and matches[index + 1 + available].given is None:
            available += 1
        used = _take_values(match.given, match.attached, words[index + 1 : index + 1 + available])
        line.given.append(match.given)
        index += 1 + used


def _match(catalogue: Catalogue, word: str) -> _Match:
    """argparse's `_parse_optional`: exact, then `name=value`, then abbreviations, then numbers and texts with
    spaces."""
    if not word.startswith("-") or len(word) == 1:
        return _Match(None)
    if catalogue.find(word):
        return _Match(_named(catalogue, word, word))
    name, equals, value = word.partition("=")
    if equals and catalogue.find(name):
        return _Match(_named(catalogue, name, name), value)
    found: list[tuple[str, str | None]] = []
    if word.startswith("--"):
        found = [(each, value if equals else None) for each in catalogue.by_name if each.startswith(name)]
    else:
        for each in catalogue.by_name:
            if each == word[:2]:
                found.append((each, word[2:]))
            elif each.startswith(name):
                found.append((each, value if equals else None))
    if len(found) == 1:
        written = word[:2] if found[0][0] == word[:2] else name
        return _Match(_named(catalogue, found[0][0], written), found[0][1])
    if found:
        return _Match(
            Given(name, candidates=tuple(sorted(each for each, _attached in found))), value if equals else None
        )
    if _NEGATIVE_NUMBER.match(word) or " " in word:
        return _Match(None)
    return _Match(Given(name), value if equals else None)


def _named(catalogue: Catalogue, name: str, written: str) -> Given:
    option = catalogue.find(name)
    return Given(written, option, negated=option is not None and name in option.negations)


def _take_values(given: Given, attached: str | None, following: list[str]) -> int:
    """Give an option its words; how many of `following` they are."""
    option = given.option
    given.attached = attached is not None
    if option is None:
        # Nothing is known of it. What follows is shown with it, as its writer meant it.
        given.values = [attached] if attached is not None else list(following)
        return 0 if attached is not None else len(following)
    if attached is not None:
        if option.switch:
            given.problem = f"takes no value, but was given {attached!r}"
        elif isinstance(option.takes, int) and option.takes > 1:
            given.problem = f"takes {option.takes} values"
        given.values = [attached]
        return 0
    if isinstance(option.takes, int):
        least = most = option.takes
    else:
        least = 0 if option.takes in ("?", "*") else 1
        most = 1 if option.takes in (ONE, "?") else len(following)
    used = min(most, len(following))
    given.values = following[:used]
    if used < least:
        given.problem = "takes a value, but was given none" if least == 1 else f"takes {least} values"
    return used
