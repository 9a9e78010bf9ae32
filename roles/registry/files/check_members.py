# SPDX-License-Identifier: GPL-3.0-or-later
"""Tell whether a file is a members document that its readers can rely on.

Usage: python3 check_members.py FILE

The schema is the one of docs/conventions.md ("Members"), version 1. Exit status 0 and no output: the file is good.
Exit status 1: every fault on a line of its own on standard error, with what was expected and what was found.
Ansible runs this on a new document before it takes the place of the former one; an operator can run it on any file.
"""

from __future__ import annotations

import json
import re
import sys
from collections import Counter
from pathlib import Path
from typing import Any

SCHEMA = 1
HOST_LISTS = ("gateways", "monitors", "preprocessors")
ENGINE_TEXTS = ("name", "host", "address", "kind", "model", "card")
# Largest value of each whole number; the smallest is 1.
ENGINE_NUMBERS = {"port": 65535, "max_num_seqs": 1_000_000, "max_model_len": 1_000_000_000}
# An engine's name is a server's name in HAProxy's configuration, which takes no other characters.
ENGINE_NAME = re.compile(r"[A-Za-z0-9_.:-]{1,255}\Z")


def describe(value: object) -> str:
    """Return the value as JSON, cut to what fits in one line of a message."""
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 60 else text[:59] + "…"


def is_integer(value: object) -> bool:
    """Tell whether the value is an integer; true and false are not, though Python counts them as such."""
    return isinstance(value, int) and not isinstance(value, bool)


def is_text(value: object) -> bool:
    """Tell whether the value is a text of printable characters, at least one."""
    return isinstance(value, str) and value != "" and value.isprintable()


def repeated(values: list[str]) -> list[str]:
    """Return the values that occur more than once, sorted."""
    return sorted(value for value, count in Counter(values).items() if count > 1)


def faults_of_texts(where: str, entry: dict[str, Any], keys: tuple[str, ...]) -> list[str]:
    """Return one fault for each key of the entry whose value is no text."""
    return [
        f"{where}.{key}: expected printable text, found {describe(entry.get(key))}"
        for key in keys
        if not is_text(entry.get(key))
    ]


def faults_of_list(
    document: dict[str, Any], name: str, keys: tuple[str, ...]
) -> tuple[list[dict[str, Any]], list[str]]:
    """Return the well-formed entries of one list of the document, and what is wrong with the list and its entries."""
    found = document.get(name)
    if not isinstance(found, list):
        return [], [f"{name}: expected a list, found {describe(found)}"]
    entries: list[dict[str, Any]] = []
    faults: list[str] = []
    for position, entry in enumerate(found):
        where = f"{name}[{position}]"
        if not isinstance(entry, dict):
            faults.append(f"{where}: expected an object, found {describe(entry)}")
            continue
        faults_here = faults_of_texts(where, entry, keys)
        faults += faults_here
        if not faults_here:
            entries.append(entry)
    faults += [
        f"{name}: expected each name once, found {value} again" for value in repeated([e["name"] for e in entries])
    ]
    return entries, faults


def faults_of_engine(engine: dict[str, Any]) -> list[str]:
    """Return what is wrong with one engine whose texts are texts."""
    where = f"engine {engine['name']}"
    faults: list[str] = []
    if not ENGINE_NAME.match(engine["name"]):
        faults.append(f"{where}: expected a name of letters, digits and _.:- only")
    for key, largest in ENGINE_NUMBERS.items():
        value: Any = engine.get(key)
        if not is_integer(value) or not 1 <= value <= largest:
            faults.append(f"{where}: expected in {key} an integer from 1 to {largest}, found {describe(value)}")
    adapters = engine.get("adapters")
    if not isinstance(adapters, list) or not all(is_text(adapter) for adapter in adapters):
        faults.append(f"{where}: expected in adapters a list of names, found {describe(adapters)}")
    return faults


def faults_of_engines(document: dict[str, Any]) -> list[str]:
    """Return what is wrong with the engines, each on its own and together."""
    engines, faults = faults_of_list(document, "engines", ENGINE_TEXTS)
    if document.get("engines") == []:
        faults.append("engines: expected at least one, found none")
    sound: list[dict[str, Any]] = []
    for engine in engines:
        faults_here = faults_of_engine(engine)
        faults += faults_here
        if not faults_here:
            sound.append(engine)
    endpoints = [f"{engine['address']} port {engine['port']}" for engine in sound]
    faults += [f"engines: expected each address and port once, found {value} again" for value in repeated(endpoints)]
    # A client asks for an adapter by its name as for a model, so one name cannot stand for both.
    names = {engine["model"] for engine in sound} & {adapter for engine in sound for adapter in engine["adapters"]}
    faults += [f"engines: expected {name} to be a model or an adapter, found both" for name in sorted(names)]
    return faults


def faults_of_agents(document: dict[str, Any]) -> list[str]:
    """Return what is wrong with the node agents; a site without any may leave the list out."""
    if "agents" not in document:
        return []
    found = document["agents"]
    if not isinstance(found, list):
        return [f"agents: expected a list, found {describe(found)}"]
    faults: list[str] = []
    hosts: list[str] = []
    for position, agent in enumerate(found):
        where = f"agents[{position}]"
        if not isinstance(agent, dict):
            faults.append(f"{where}: expected an object, found {describe(agent)}")
            continue
        faults += faults_of_texts(where, agent, ("host", "address"))
        port: Any = agent.get("port")
        if not is_integer(port) or not 1 <= port <= ENGINE_NUMBERS["port"]:
            faults.append(
                f"{where}.port: expected an integer from 1 to {ENGINE_NUMBERS['port']}, found {describe(port)}"
            )
        if is_text(agent.get("host")):
            hosts.append(agent["host"])
    return faults + [f"agents: expected each host once, found {value} again" for value in repeated(hosts)]


def faults_of_document(document: object) -> list[str]:
    """Return everything that keeps the parsed document from being a members document; an empty list if nothing does."""
    if not isinstance(document, dict):
        return [f"expected a JSON object, found {describe(document)}"]
    faults: list[str] = []
    schema = document.get("schema")
    if not is_integer(schema) or schema != SCHEMA:
        faults.append(f"schema: expected {SCHEMA}, found {describe(schema)}")
    faults += faults_of_engines(document)
    faults += faults_of_agents(document)
    for name in HOST_LISTS:
        entries, faults_here = faults_of_list(document, name, ("name", "address"))
        faults += faults_here
        faults += [
            f"{name}: expected each address once, found {value} again"
            for value in repeated([entry["address"] for entry in entries])
        ]
    return faults


def faults_of_file(path: Path) -> list[str]:
    """Return everything that keeps the file from being a members document; an empty list if nothing does."""
    try:
        return faults_of_document(json.loads(path.read_text(encoding="utf-8")))
    except OSError as error:
        return [f"expected a readable file, found: {error.strerror}"]
    except (ValueError, RecursionError) as error:  # bytes that are no UTF-8, text that is no JSON or is nested too deep
        return [f"expected JSON in UTF-8, found: {error}"]


def main(arguments: list[str]) -> int:
    """Check the one file that is named; return the exit status."""
    if len(arguments) != 1:
        print("usage: python3 check_members.py FILE", file=sys.stderr)
        return 2
    faults = faults_of_file(Path(arguments[0]))
    for fault in faults:
        print(f"{arguments[0]}: {fault}", file=sys.stderr)
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
