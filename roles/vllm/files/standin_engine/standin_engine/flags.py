# SPDX-License-Identifier: GPL-3.0-or-later
"""vLLM's command line: every flag of 0.32 is known, types and choices are checked, anything else is refused.

The table in ``vllm_flags.json`` was read off vLLM 0.32's own help and declarations. Not accepted, though vLLM takes
them: one-letter short forms (``-tp``) and dotted keys (``--compilation-config.mode 3``); the long form does the same.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable, Sequence
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


_READERS: dict[str, Callable[[str], Any]] = {
    "integer": int,
    "number": float,
    "size": size,
    "json": json_value,
    "text": str,
}
_ARITY: dict[str, str | None] = {"one": None, "many": "+", "optional": "?"}


def build_parser() -> argparse.ArgumentParser:
    """Build the parser of ``serve`` from the table of flags; a flag that was not given is ``None``."""
    parser = argparse.ArgumentParser(
        prog="standin-engine serve",
        usage="standin-engine serve [model_tag] [options]",
        description="Serve canned answers over vLLM's HTTP interface; the options are vLLM's own.",
    )
    parser.add_argument("model_tag", nargs="?", help="the model to serve")
    table: dict[str, dict[str, Any]] = json.loads(FLAGS_FILE.read_text(encoding="utf-8"))
    for flag, entry in table.items():
        if entry["values"] == "none":
            action: Any = argparse.BooleanOptionalAction if entry.get("negatable") else "store_true"
            parser.add_argument(flag, action=action, default=None)
        else:
            parser.add_argument(
                flag,
                nargs=_ARITY[entry["values"]],
                type=_READERS[entry["type"]],
                choices=entry.get("choices"),
                default=None,
                metavar=flag[2:].upper().replace("-", "_"),
            )
    return parser


def with_dashes(arguments: Sequence[str]) -> list[str]:
    """Write flags given with underscores (``--max_model_len``) with dashes, as vLLM does."""
    result = []
    for argument in arguments:
        if argument.startswith("--"):
            name, equals, value = argument.partition("=")
            argument = name.replace("_", "-") + equals + value
        result.append(argument)
    return result


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Parse what follows ``serve``; a wrong flag or value ends the process with status 2, as argparse does."""
    return build_parser().parse_args(with_dashes(arguments))
