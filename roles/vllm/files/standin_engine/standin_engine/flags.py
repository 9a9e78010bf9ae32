# SPDX-License-Identifier: GPL-3.0-or-later
"""vLLM's command line: every option of 0.32 is known, kinds and choices are checked, anything else is refused.

The table in ``vllm_flags.json`` is made from the catalogue that module ``engine_flags`` has of vLLM 0.32
(tests/run/engine_catalogue.py), so that what the one refuses the other does not take. Each entry says what is not as
usual (one word of text): ``names`` besides the first, ``takes`` as argparse counts, ``kind``, ``choices``, ``none``
(the word None stands for no value), ``negatable``, ``limits`` (``least``, ``above``, ``most``, ``below``).
"""

from __future__ import annotations

import argparse
import json
import operator
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

FLAGS_FILE = Path(__file__).with_name("vllm_flags.json")

_SIZE = re.compile(r"(\d+(?:\.\d+)?)([kmgtKMGT])")
_DECIMAL = {"k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_BINARY = {"K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


def size(text: str) -> int:
    """Read a count that may carry a suffix: ``32k`` is 32000, ``32K`` is 32768, ``auto`` is -1.

    Raises:
        argparse.ArgumentTypeError: a fraction with a binary suffix.
        ValueError: not a number.
    """
    text = text.strip()
    if text == "auto":
        return -1
    return plain_size(text)


def plain_size(text: str) -> int:
    """Read a count as ``size`` does, without ``auto``."""
    match = _SIZE.fullmatch(text)
    if match is None:
        return int(text)
    number, suffix = match.groups()
    if suffix in _DECIMAL:
        return int(float(number) * _DECIMAL[suffix])
    if "." in number:
        raise argparse.ArgumentTypeError(f"decimals are not allowed with binary suffixes like {suffix}")
    return int(number) * _BINARY[suffix]


def json_value(text: str) -> Any:
    """Read a JSON value.

    Raises:
        argparse.ArgumentTypeError: not valid JSON.
    """
    try:
        return json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"Value {text} cannot be converted to <function loads>.") from error


def json_object(text: str) -> dict[str, Any]:
    """Read a JSON object.

    Raises:
        argparse.ArgumentTypeError: not valid JSON, or no object.
    """
    value = json_value(text)
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"Value {text} is no object.")
    return value


def json_or_text(text: str) -> Any:
    """Read a JSON object; any other text stands for itself."""
    return json_object(text) if text.lstrip().startswith("{") else text


def lowered(text: str) -> str:
    """Read a name, whatever its case and whether its words are joined by ``-`` or ``_``."""
    return text.lower().replace("-", "_")


def comma_list(text: str) -> list[Any]:
    """Read a list of words; whole numbers among them are numbers."""
    return [int(word) if word.isdecimal() else word for word in text.split(",")]


_READERS: dict[str, Callable[[str], Any]] = {
    "integer": int,
    "number": float,
    "size": plain_size,
    "size_or_auto": size,
    "json": json_value,
    "json_or_text": json_or_text,
    "object": json_object,
    "lowered": lowered,
    "comma_list": comma_list,
    "text": str,
    "lora_modules": str,
}


def _reader(entry: dict[str, Any]) -> Callable[[str], Any]:
    reader = _READERS[entry.get("kind", "text")]
    if not entry.get("none") or entry.get("kind") == "lora_modules":
        return reader

    def read(text: str) -> Any:
        return None if text in ("None", "") else reader(text)

    # argparse names what it could not read by this name.
    read.__name__ = getattr(reader, "__name__", "value")
    return read


def table() -> dict[str, dict[str, Any]]:
    """The options by their first long name."""
    entries: dict[str, dict[str, Any]] = json.loads(FLAGS_FILE.read_text(encoding="utf-8"))
    return entries


def build_parser() -> argparse.ArgumentParser:
    """Build the parser of ``serve`` from the table of flags; a flag that was not given is ``None``."""
    parser = argparse.ArgumentParser(
        prog="standin-engine serve",
        usage="standin-engine serve [model_tag] [options]",
        description="Serve canned answers over vLLM's HTTP interface; the options are vLLM's own.",
    )
    parser.add_argument("model_tag", nargs="?", help="the model to serve")
    for flag, entry in table().items():
        names = [flag, *entry.get("names", ())]
        if entry.get("takes") == 0:
            action: Any = argparse.BooleanOptionalAction if entry.get("negatable") else "store_true"
            parser.add_argument(*names, action=action, default=None)
        else:
            choices = entry.get("choices")
            parser.add_argument(
                *names,
                nargs=entry.get("takes"),
                type=_reader(entry),
                choices=[*choices, None] if choices and entry.get("none") else choices,
                default=None,
                metavar=flag[2:].upper().replace("-", "_"),
            )
    return parser


def with_dashes(arguments: Sequence[str]) -> list[str]:
    """Write flags given with underscores (``--max_model_len``) with dashes, and ``-O3`` in full, as vLLM does."""
    result = []
    for argument in arguments:
        if argument.startswith("--"):
            name, equals, value = argument.partition("=")
            name, dot, field = name.partition(".")
            result.append(name.replace("_", "-") + dot + field + equals + value)
        elif argument.startswith("-O"):
            result += ["--optimization-level", *([level] if (level := argument[2:].removeprefix("=")) else [])]
        else:
            result.append(argument)
    return result


def with_fields(arguments: Sequence[str]) -> list[str]:
    """Gather fields given by dotted names (``--compilation-config.mode 3``, ``--flag.list+ a,b``) into objects, as vLLM
    does."""
    result: list[str] = []
    objects: dict[str, dict[str, Any]] = {}
    words = iter(arguments)
    for argument in words:
        name, equals, value = argument.partition("=")
        flag, dot, path = name.partition(".")
        if not (flag.startswith("-") and dot and path and not flag[1:2].isdecimal()):
            result.append(argument)
            continue
        if not equals:
            value = next(words, "")
        place = objects.setdefault(flag, {})
        *parents, last = path.removesuffix("+").split(".")
        for parent in parents:
            place = place.setdefault(parent, {})
        if path.endswith("+"):
            place[last] = [*place.get(last, ()), *value.split(",")]
            continue
        try:
            place[last] = json.loads(value)
        except ValueError:
            place[last] = value
    for flag, document in objects.items():
        result += [flag, json.dumps(document)]
    return result


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Parse what follows ``serve``; a wrong flag or value ends the process with status 2, as argparse does."""
    return build_parser().parse_args(with_fields(with_dashes(arguments)))


_LIMITS: dict[str, tuple[Callable[[float, float], bool], str]] = {
    "least": (operator.ge, "at least"),
    "above": (operator.gt, "over"),
    "most": (operator.le, "at most"),
    "below": (operator.lt, "under"),
}


def out_of_range(options: argparse.Namespace) -> Iterator[str]:
    """What is wrong with numbers that the parser took: vLLM's configuration refuses them after it."""
    for flag, entry in table().items():
        value = getattr(options, flag[2:].replace("-", "_"))
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            continue
        for name, (holds, words) in _LIMITS.items():
            limit = entry.get("limits", {}).get(name)
            if limit is not None and not holds(value, limit):
                yield f"{flag[2:].replace('-', '_')} has to be {words} {limit}, got {value}"
