# Copyright (c) 2026, the Ringmaster authors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Asks the command-line parser of an installed vLLM what it accepts.

The text of this file is run by the Python of the engine's virtual environment (``python -I -B -c TEXT REQUEST``), so it
imports the standard library only. No engine is started and no card is touched: the program lets the engine's own
console script build its parser, and takes the parser away at the moment it would parse. That works for every version
whose console script has the subcommand ``serve``.

``REQUEST`` is a file with a JSON object: ``{"engine": "vllm", "words": [...] or null, "catalogue": true, "environment":
{...}}``, the last being what the engine will have in its environment (its build for CPUs looks there). The answer is
one JSON object on the standard output: ``identity`` and ``version``; ``catalogue``, if it was asked for; and
``complaint``, if words were given: what the engine's own parser says of them, null if it takes them. What the engine
itself prints goes to the standard error.

What a value has to look like is found by behaviour: each option's converter is given samples (``SAMPLES``), and the
ones it takes tell its kind. So it does not matter how a version of the engine declares its types.
"""

from __future__ import annotations

import argparse
import dataclasses
import enum
import hashlib
import importlib.metadata
import json
import os
import platform
import re
import sys
import typing
from collections.abc import Iterator, Sequence
from typing import Any

# Kinds of value, each with what its converter does with the samples; the first that agrees is taken. "=" stands for the
# sample itself, None for a refusal, anything else for the value that comes out.
SAMPLES = ("7", "1.5", "1k", "auto", "{}", "[1]", "Wo-rd")
KINDS: dict[str, tuple[Any, ...]] = {
    "integer": (7, None, None, None, None, None, None),
    "number": (7.0, 1.5, None, None, None, None, None),
    "size": (7, None, 1000, None, None, None, None),
    "size_or_auto": (7, None, 1000, -1, None, None, None),
    "json": (7, 1.5, None, None, {}, [1], None),
    "json_or_text": ("=", "=", "=", "=", {}, "=", "="),
    "text": ("=", "=", "=", "=", "=", "=", "="),
    "lowered": ("=", "=", "=", "=", "=", "=", "wo_rd"),
    "comma_list": ([7], ["1.5"], ["1k"], ["auto"], ["{}"], ["[1]"], ["Wo-rd"]),
}
# Text is not among what is told of a field: a word that none is refused for may still be one of a few that it takes.
SAMPLES_OF_JSON: dict[str, tuple[Any, ...]] = {
    "null": (None,),
    "boolean": (True, False),
    "integer": (0, 1, 2, 7, 64),
    "number": (0.5, 1.5),
    "text": ("Wo-rd", "7", "auto"),
    "list": ([], ["Wo-rd"], [7]),
    "object": ({}, {"Wo-rd": 7}),
}
# A class of configuration: takes an object, nothing else of the samples.
OBJECT = (None, None, None, None, "object", None, None)
# Nothing is known of the values; only the engine can judge them.
OPAQUE = "opaque"

_DEEPEST = 6  # levels of configuration classes within each other


class ParserTaken(BaseException):
    """Carries the parser out of the console script; no `except Exception` on the way stops it."""

    def __init__(self, parser: argparse.ArgumentParser, serve: argparse.ArgumentParser) -> None:
        super().__init__()
        self.parser = parser
        self.serve = serve


class RefusedError(Exception):
    """The engine's parser refused the words; the text is its complaint."""


def identity(engine: str) -> dict[str, str]:
    """The engine's version, and a digest over all that is installed beside it: plugins may add options of their own."""
    installed = sorted({f"{each.metadata['Name']}=={each.version}" for each in importlib.metadata.distributions()})
    digest = hashlib.sha256("\n".join([platform.python_version(), *installed]).encode("utf-8")).hexdigest()
    return {"identity": digest, "version": importlib.metadata.version(engine)}


def console_script(name: str) -> Any:
    """The function behind a console script. Raises LookupError if no installed distribution has it."""
    for distribution in importlib.metadata.distributions():
        for entry in distribution.entry_points:
            if entry.group == "console_scripts" and entry.name == name:
                return entry.load()
    raise LookupError(f"no installed distribution has the console script {name}")


def subparser(parser: argparse.ArgumentParser, name: str) -> argparse.ArgumentParser | None:
    """The parser of a subcommand; None if `parser` has no such subcommand."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            found = action.choices.get(name)
            return found if isinstance(found, argparse.ArgumentParser) else None
    return None


def take_parser(engine: str) -> ParserTaken:
    """Let the console script build its parser, and stop it where it would parse.

    Raises LookupError if the console script is missing or ends without having parsed a subcommand `serve`.
    """
    parse = argparse.ArgumentParser.parse_known_args

    def taken(self: argparse.ArgumentParser, *arguments: Any, **named: Any) -> Any:
        serve = subparser(self, "serve")
        if serve is not None:
            raise ParserTaken(self, serve)
        return parse(self, *arguments, **named)

    script = console_script(engine)
    sys.argv = [engine, "serve", "model"]
    argparse.ArgumentParser.parse_known_args = taken  # type: ignore[method-assign]
    try:
        script()
    except ParserTaken as found:
        return found
    finally:
        argparse.ArgumentParser.parse_known_args = parse  # type: ignore[method-assign]
    raise LookupError(f"the console script {engine} ended without parsing its subcommand serve")


def complaint(found: ParserTaken, words: Sequence[str]) -> str | None:
    """What the engine's own parser says of `words` (what follows `serve`); None if it takes them."""

    def refuse(message: str) -> typing.NoReturn:
        raise RefusedError(message)

    found.parser.error = refuse  # type: ignore[method-assign]
    found.serve.error = refuse  # type: ignore[method-assign]
    sys.argv = [found.parser.prog, "serve", *words]
    try:
        found.parser.parse_args(["serve", *words])
    except RefusedError as error:
        return str(error)
    except SystemExit:
        return "the parser ends the program"  # --help, --version
    except Exception as error:  # noqa: BLE001 # the engine's converters raise whatever they like
        return f"{type(error).__name__}: {error}"
    return None


def catalogue(serve: argparse.ArgumentParser) -> dict[str, Any]:
    """Every option of the subcommand, by its first long name."""
    classes = {each.__name__: each for each in configuration_classes()}
    titles = {id(action): str(group.title) for group in serve._action_groups for action in group._group_actions}
    options = {}
    for action in serve._actions:
        long = [name for name in action.option_strings if name.startswith("--")]
        if long:
            configuration = classes.get(titles.get(id(action), ""))
            limits = limits_of(action.dest, configuration, classes)
            options[long[0]] = described(action, limits, levels_of(action.dest, configuration))
    return options


def described(action: argparse.Action, limits: dict[str, float], levels: list[str]) -> dict[str, Any]:
    """One option, without what is as usual: one name, one value of text, no choices, no limits."""
    result: dict[str, Any] = {}
    negations: list[str] = []
    if isinstance(action, argparse.BooleanOptionalAction):
        negations = [name for name in action.option_strings if name.startswith("--no-")]
    names = [name for name in action.option_strings if name not in negations]
    if len(names) > 1:
        result["names"] = names
    if negations:
        result["negations"] = negations
    if action.nargs is not None:
        result["takes"] = action.nargs
    if isinstance(action, (argparse._HelpAction, argparse._VersionAction)):
        result["ends"] = True
    if action.nargs == 0:
        return result
    if type(action).__name__ == "LoRAParserAction":
        kind, none = "lora_modules", True
    else:
        kind, none = kind_of(action.type)
    if isinstance(action, argparse._AppendAction):
        result["repeatable"] = True
    choices = list(action.choices) if action.choices is not None else None
    if choices is not None:
        result["choices"] = [choice for choice in choices if choice is not None]
        none = none and None in choices
    elif levels:
        result["allowed"] = levels
    elif known_of(action.metavar):
        result["known"] = known_of(action.metavar)
    if kind != "text":
        result["kind"] = kind
    if none:
        result["none"] = True
    if kind == "object":
        fields = fields_of(configuration_class(action.type), _DEEPEST)
        if isinstance(fields, dict):
            unclear = [name for name, value in fields.items() if value == "any"]
            result["fields"] = {**fields, **refusals(action.type, unclear)}
    if limits:
        result["limits"] = limits
    return result


def tried(convert: Any, sample: str) -> Any:
    """What a converter makes of a sample; None if it refuses it."""
    try:
        value = convert(sample)
    except Exception:  # noqa: BLE001 # the engine's converters raise whatever they like
        return None
    if value == sample and isinstance(value, str):
        return "="
    if dataclasses.is_dataclass(value):
        return "object"
    return value


def kind_of(convert: Any) -> tuple[str, bool]:
    """The kind of an option's values, and whether the word None stands for no value."""
    if convert is None:
        return "text", False
    found = tuple(tried(convert, sample) for sample in SAMPLES)
    try:
        none = convert("None") is None
    except Exception:  # noqa: BLE001 # as above
        none = False
    for kind, expected in KINDS.items():
        # Types count as well: 7 is a whole number, 7.0 is not.
        if [(type(each), each) for each in found] == [(type(each), each) for each in expected]:
            return kind, none
    return ("object" if found == OBJECT else OPAQUE), none


def refusals(convert: Any, fields: list[str]) -> dict[str, Any]:
    """For fields whose declaration does not tell it: the types of JSON that the class refuses whatever the value.

    A field that refuses everything needs other fields beside it, so nothing is learnt of it.
    """
    found: dict[str, Any] = {}
    for field in fields:
        refused = [
            kind
            for kind, samples in SAMPLES_OF_JSON.items()
            if all(tried(convert, json.dumps({field: sample})) is None for sample in samples)
        ]
        if 0 < len(refused) < len(SAMPLES_OF_JSON):
            found[field] = {"refuses": [kind for kind in refused if kind != "text"]}
    return found


def configuration_class(convert: Any, depth: int = 4) -> Any:
    """The configuration class that a converter reads, looked for in its defaults and in what it encloses."""
    if isinstance(convert, type) and dataclasses.is_dataclass(convert):
        return convert
    if depth == 0:
        return None
    inner = list(getattr(convert, "__defaults__", None) or ())
    inner += [cell.cell_contents for cell in getattr(convert, "__closure__", None) or ()]
    for each in inner:
        if callable(each):
            found = configuration_class(each, depth - 1)
            if found is not None:
                return found
    return None


def configuration_classes() -> Iterator[Any]:
    """The engine's configuration classes that are loaded."""
    seen = set()
    for name, module in list(sys.modules.items()):
        if name.startswith(("vllm.config", "vllm.entrypoints")):
            for each in list(vars(module).values()):
                if isinstance(each, type) and dataclasses.is_dataclass(each) and id(each) not in seen:
                    seen.add(id(each))
                    yield each


def known_of(metavar: Any) -> list[str]:
    """The values that the help names where the parser takes others as well: a list, or text that begins ``{a,b}``."""
    if isinstance(metavar, (list, tuple)):
        return [str(each) for each in metavar]
    listed = re.match(r"\{([^{}]+)\}", metavar or "")
    return listed[1].split(",") if listed else []


def levels_of(field: str, configuration: Any) -> list[str]:
    """The numbers that the configuration takes after the parser took any text: those of an enumeration of numbers."""
    if configuration is None:
        return []
    try:
        hint = typing.get_type_hints(configuration).get(field)
    except (NameError, TypeError, AttributeError):
        return []
    if isinstance(hint, type) and issubclass(hint, enum.IntEnum):
        return [str(each.value) for each in hint]
    return []


def limits_of(field: str, configuration: Any, classes: dict[str, Any]) -> dict[str, float]:
    """The range that the engine declares for an option.

    It is declared at the field of the same name of the class that the option's group is named after; where that class
    has no such field, of the only class with one.
    """
    if configuration is not None and field in {each.name for each in dataclasses.fields(configuration)}:
        return declared_limits(configuration, field)
    found = [limits for each in classes.values() for limits in [declared_limits(each, field)] if limits]
    return found[0] if len(found) == 1 else {}


def declared_limits(configuration: Any, field: str) -> dict[str, float]:
    """``least`` and ``most`` are allowed themselves, ``above`` and ``below`` are not."""
    information = getattr(configuration, "__pydantic_fields__", {}).get(field)
    result = {}
    for each in getattr(information, "metadata", ()):
        for name, ours in (("ge", "least"), ("gt", "above"), ("le", "most"), ("lt", "below")):
            limit = getattr(each, name, None)
            if isinstance(limit, (int, float)):
                result[ours] = limit
    return result


def fields_of(configuration: Any, depth: int) -> dict[str, Any] | str:
    """The fields of a configuration class: name -> what its value may be. "any" if they can't be told."""
    settings = getattr(configuration, "__pydantic_config__", None)
    if depth == 0 or configuration is None or not settings or settings.get("extra") != "forbid":
        return "any"
    try:
        hints = typing.get_type_hints(configuration)
    except (NameError, TypeError, AttributeError):
        hints = {}
    own = validated_by_the_class(configuration)
    result: dict[str, Any] = {}
    for field in dataclasses.fields(configuration):
        if field.init:
            hint = hints.get(field.name, Any)
            result[field.name] = "any" if field.name in own or "*" in own else value_of(hint, depth - 1)
            limits = declared_limits(configuration, field.name)
            if limits and isinstance(result[field.name], list):
                result[field.name] = [*result[field.name], limits]
    return result


def validated_by_the_class(configuration: Any) -> set[str]:
    """Fields whose values the class itself rewrites before they are checked."""
    decorators = getattr(configuration, "__pydantic_decorators__", None)
    found: set[str] = set()
    for each in getattr(decorators, "field_validators", {}).values():
        if each.info.mode != "after":
            found.update(each.info.fields)
    for each in getattr(decorators, "model_validators", {}).values():
        if each.info.mode != "after":
            found.add("*")
    return found


def value_of(hint: Any, depth: int) -> Any:
    """What a field may hold, as a list of alternatives: names of JSON's types, ``{"choices": …}``, ``{"fields":
    …}``."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Literal:
        return [{"choices": list(arguments)}]
    if origin is typing.Annotated:
        return value_of(arguments[0], depth)
    if arguments and (origin is typing.Union or type(hint).__name__ == "UnionType"):
        alternatives = [value_of(each, depth) for each in arguments]
        return "any" if "any" in alternatives else [each for several in alternatives for each in several]
    plain = {bool: "boolean", int: "integer", float: "number", str: "text", type(None): "null"}
    if hint in plain:
        return [plain[hint]]
    if isinstance(hint, type) and issubclass(hint, os.PathLike):
        return ["text"]
    if (origin or hint) in (list, tuple, set, frozenset):
        return ["list"]
    if (origin or hint) is dict:
        return ["object"]
    if isinstance(hint, type) and dataclasses.is_dataclass(hint):
        fields = fields_of(hint, depth)
        return "any" if fields == "any" else [{"fields": fields}]
    return "any"


def jsonable(value: Any) -> Any:
    """What of a catalogue JSON has no word for."""
    return value.value if isinstance(value, enum.Enum) else str(value)


def main() -> None:
    with open(sys.argv[1], encoding="utf-8") as file:
        request = json.load(file)
    # The engine must neither ask anybody nor write its statistics; what it prints must not get into the answer.
    os.environ.update(request["environment"])
    os.environ.update(HF_HUB_OFFLINE="1", VLLM_NO_USAGE_STATS="1", DO_NOT_TRACK="1", VLLM_LOGGING_LEVEL="ERROR")
    answer = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    result: dict[str, Any] = dict(identity(request["engine"]))
    if request["catalogue"] or request["words"] is not None:
        found = take_parser(request["engine"])
        if request["catalogue"]:
            result["catalogue"] = catalogue(found.serve)
        if request["words"] is not None:
            result["complaint"] = complaint(found, request["words"])
    json.dump(result, answer, default=jsonable)
    answer.close()
    os._exit(0)  # threads that the engine's libraries started don't hold the program up


if __name__ == "__main__":
    main()
