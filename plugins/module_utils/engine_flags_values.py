# Copyright (c) 2026, the Ringmaster authors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Whether a word is a value that an option of the engine takes, read as the engine reads it.

Rules: vLLM 0.32, ``vllm/utils/argparse_utils.py`` (sizes), ``vllm/engine/arg_utils.py`` (None, JSON, objects) and
``vllm/entrypoints/launchers/cli_args.py`` (adapters). Objects are checked by what their classes declare: fields,
types in pydantic's forgiving mode, choices and ranges; a field of which nothing is declared takes anything.
"""

from __future__ import annotations

import difflib
import json
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from ansible_collections.ringmaster.inference.plugins.module_utils.engine_flags_catalogue import Option

WRONG_TYPE = "wrong_type"
NOT_A_CHOICE = "not_a_choice"
OUT_OF_RANGE = "out_of_range"

_SIZE = re.compile(r"(\d+(?:\.\d+)?)([kKmMgGtT])")
_SIZE_IN_JSON = re.compile(r"\b\d+(?:\.\d+)?[kKmMgGtT]\b")
_QUOTED = re.compile(r'("(?:[^"\\]|\\.)*")')
_FACTORS = {
    **{suffix: 10 ** (3 * power) for power, suffix in enumerate("kmgt", 1)},
    **{suffix: 2 ** (10 * power) for power, suffix in enumerate("KMGT", 1)},
}
# Names of number formats that people write, and the engine's own.
_SPELLINGS = {
    "fp16": "float16",
    "bf16": "bfloat16",
    "fp32": "float32",
    "half": "float16",
    "int8": "int8_per_token_head",
}
_ADAPTER = {"name": ["text"], "path": ["text"], "base_model_name": ["text", "null"], "is_3d_lora_weight": ["boolean"]}


class WrongValueError(Exception):
    """A value that the engine refuses. ``expected`` completes "expected …"."""

    def __init__(self, verdict: str, expected: str, nearest: Sequence[str] = (), where: str = "") -> None:
        super().__init__(expected)
        self.verdict = verdict
        self.expected = expected
        self.nearest = list(nearest)
        self.where = where  # the field within an object, with a dot before it


def read(option: Option, word: str) -> Any:
    """The value that the engine makes of a word.

    Raises:
        WrongValueError: it takes no such word, or refuses the value when it starts.
    """
    if option.none and word in ("", "None"):
        return None
    value = _READERS.get(option.kind, _opaque)(word)
    if option.choices and value not in option.choices:
        raise WrongValueError(NOT_A_CHOICE, _one_of(option.choices), nearest(str(value), map(str, option.choices)))
    if option.allowed and value not in option.allowed:
        raise WrongValueError(NOT_A_CHOICE, _one_of(option.allowed))
    if isinstance(value, (int, float)):
        _check_limits(option.limits, value)
    if option.kind == "object" and option.fields is not None:
        _check_fields(option.fields, value)
    return value


def nearest(word: str, names: Iterable[str], most: int = 3) -> list[str]:
    """Names that somebody who wrote `word` may have meant, likeliest first."""
    known = list(names)
    meant = [_SPELLINGS[word.lower()]] if _SPELLINGS.get(word.lower()) in known else []
    found = difflib.get_close_matches(word[:200], known, n=most, cutoff=0.72)
    return (meant + [each for each in found if each not in meant])[:most]


def size(word: str) -> int:
    """``32k`` is 32000, ``32K`` is 32768, ``1.5k`` is 1500; a fraction goes with the small letters only."""
    word = word.strip()
    match = _SIZE.fullmatch(word)
    if match is None:
        return int(word)
    number, suffix = match.groups()
    return int(float(number) * _FACTORS[suffix]) if suffix.islower() else int(number) * _FACTORS[suffix]


def _guarded(read_word: Callable[[str], Any], expected: str) -> Callable[[str], Any]:
    def guarded(word: str) -> Any:
        try:
            return read_word(word)
        except (ValueError, OverflowError, RecursionError):
            raise WrongValueError(WRONG_TYPE, expected) from None

    return guarded


def _size_or_auto(word: str) -> int:
    return -1 if word.strip().lower() == "auto" else size(word)


def _json_or_text(word: str) -> Any:
    # The engine takes a word for JSON if it begins and ends as an object does.
    return json.loads(word) if re.match(r"(?s)^\s*{.*}\s*$", word) else word


def _object(word: str) -> Any:
    parts = _QUOTED.split(word)
    for index in range(0, len(parts), 2):  # what stands between quotes is left alone
        parts[index] = _SIZE_IN_JSON.sub(lambda match: str(size(match.group())), parts[index])
    value = json.loads("".join(parts))
    if not isinstance(value, dict):
        raise ValueError("not an object")
    return value


def _adapter(word: str) -> Any:
    if "=" in word and "," not in word:
        return word
    value = json.loads(word)
    if not isinstance(value, dict) or not {"name", "path"} <= value.keys() or not value.keys() <= _ADAPTER.keys():
        raise ValueError("not an adapter")
    return value


def _opaque(word: str) -> str:
    return word


_SIZES = "a whole number, which may end in k, m, g, t (thousands) or K, M, G, T (times 1024)"
_KIND_WORDS = {
    "integer": "a whole number",
    "number": "a number",
    "size": _SIZES,
    "size_or_auto": _SIZES + ", or auto",
    "json": "JSON",
    "json_or_text": "text, or a JSON object",
    "object": "a JSON object",
    "lora_modules": 'NAME=PATH, or a JSON object with "name" and "path"',
    "text": "text",
    "comma_list": "values with commas between them",
}
_READERS: dict[str, Callable[[str], Any]] = {
    "integer": _guarded(int, _KIND_WORDS["integer"]),
    "number": _guarded(float, _KIND_WORDS["number"]),
    "size": _guarded(size, _KIND_WORDS["size"]),
    "size_or_auto": _guarded(_size_or_auto, _KIND_WORDS["size_or_auto"]),
    "json": _guarded(json.loads, _KIND_WORDS["json"]),
    "json_or_text": _guarded(_json_or_text, _KIND_WORDS["json_or_text"]),
    "object": _guarded(_object, _KIND_WORDS["object"]),
    "lora_modules": _guarded(_adapter, _KIND_WORDS["lora_modules"]),
    "lowered": lambda word: word.lower().replace("-", "_"),
}


def _one_of(values: Iterable[Any]) -> str:
    return "one of " + ", ".join(str(value) for value in values)


def values_in_words(option: Option) -> str:
    """What an option takes, in words: "a whole number, 1 or more"."""
    if option.switch:
        return "no value"
    words = _KIND_WORDS.get(option.kind, "a value")
    if option.choices or option.allowed:
        words = _one_of(option.choices or option.allowed)
    count = {"?": "nothing, or ", "+": "one or more times ", "*": "any number of times "}.get(str(option.takes), "")
    return ", ".join(filter(None, [count + words, limits_in_words(option.limits)]))


def limits_in_words(limits: Mapping[str, float]) -> str:
    """ "over 0, 1 at most" """
    words = {"least": "{:g} or more", "above": "over {:g}", "most": "{:g} at most", "below": "under {:g}"}
    return ", ".join(text.format(limits[name]) for name, text in words.items() if name in limits)


def _check_limits(limits: Mapping[str, float], value: float, where: str = "") -> None:
    # Written so that a value that is no number (NaN) is refused wherever there is a limit.
    within = (
        ("least" not in limits or value >= limits["least"])
        and ("above" not in limits or value > limits["above"])
        and ("most" not in limits or value <= limits["most"])
        and ("below" not in limits or value < limits["below"])
    )
    if not within:
        raise WrongValueError(OUT_OF_RANGE, limits_in_words(limits), where=where)


def _check_fields(fields: Mapping[str, Any], value: Mapping[str, Any], where: str = "") -> None:
    for name, found in value.items():
        if name not in fields:
            raise WrongValueError(
                "unknown", _one_of(sorted(fields)), nearest(str(name), fields), where=f"{where}.{str(name)[:80]}"
            )
        if isinstance(fields[name], Sequence) and not isinstance(fields[name], str):
            _check_field(fields[name], found, f"{where}.{name}")
        elif isinstance(fields[name], Mapping) and _type_of_json(found) in fields[name].get("refuses", ()):
            taken = [kind for kind in _TYPES_OF_JSON if kind not in fields[name]["refuses"]]
            raise WrongValueError(WRONG_TYPE, " or ".join(taken), where=f"{where}.{name}")


def _check_field(alternatives: Sequence[Any], value: Any, where: str) -> None:
    """A field takes the value if one of its alternatives does; the ranges among them hold for numbers."""
    plain = [each for each in alternatives if isinstance(each, str)]
    if any(_FITS[each](value) for each in plain if each in _FITS) or any(each not in _FITS for each in plain):
        if _number(value) and not isinstance(value, bool):
            for each in alternatives:
                if isinstance(each, Mapping) and not each.keys() & {"choices", "fields"}:
                    _check_limits(each, float(value), where)
        return
    for each in alternatives:
        if isinstance(each, Mapping) and "choices" in each and value in each["choices"]:
            return
        if isinstance(each, Mapping) and isinstance(each.get("fields"), Mapping) and isinstance(value, Mapping):
            _check_fields(each["fields"], value, where)
            return
    for each in alternatives:
        if isinstance(each, Mapping) and "choices" in each and isinstance(value, (str, int, float)):
            found = nearest(str(value), map(str, each["choices"]))
            raise WrongValueError(NOT_A_CHOICE, _one_of(each["choices"]), found, where)
    expected = ["object" if isinstance(each, Mapping) else each for each in alternatives]
    raise WrongValueError(WRONG_TYPE, " or ".join(dict.fromkeys(expected)), where=where)


_TYPES_OF_JSON: dict[str, type] = {
    "null": type(None),
    "boolean": bool,
    "integer": int,
    "number": float,
    "text": str,
    "list": list,
    "object": dict,
}


def _type_of_json(value: Any) -> str:
    return next(name for name, kind in _TYPES_OF_JSON.items() if isinstance(value, kind))  # a bool is an int as well


def _number(value: Any) -> bool:
    if isinstance(value, str):
        try:
            return math.isfinite(float(value))
        except ValueError:
            return False
    return isinstance(value, (int, float))


def _whole(value: Any) -> bool:
    return _number(value) and (isinstance(value, int) or float(value).is_integer())


# pydantic's forgiving mode: https://docs.pydantic.dev/latest/concepts/conversion_table/
_BOOLEANS = ("0", "off", "f", "false", "n", "no", "1", "on", "t", "true", "y", "yes")
_FITS: dict[str, Callable[[Any], bool]] = {
    "boolean": lambda value: value in (0, 1) or (isinstance(value, str) and value.lower() in _BOOLEANS),
    "integer": _whole,
    "number": _number,
    "text": lambda value: isinstance(value, str),
    "null": lambda value: value is None,
    "list": lambda value: isinstance(value, list),
    "object": lambda value: isinstance(value, dict),
}
