# Copyright (c) 2026, the Ringmaster authors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Who is in the site: the members document, from the inventory's groups and the hosts' variables.

The document's form is set down in docs/conventions.md. Nothing here imports Ansible: ``groups`` maps a group's name to
its hosts' names, ``hostvars`` a host's name to its variables, whatever kind of mapping both are.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

SCHEMA = 1

# vLLM takes this many sequences at a time if --max-num-seqs is not given (vLLM 0.32, serving on a GPU).
DEFAULT_MAX_NUM_SEQS = 256
DEFAULT_AGENT_PORT = 8409
DEFAULT_SCHEDULER_PORT = 8406
LARGEST_PORT = 65535


class MembersError(Exception):
    """A variable is missing or of the wrong form; the text names the host and the variable."""


def members(groups: Mapping[str, Iterable[str]], hostvars: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """The members document, its lists sorted by name.

    A host in group ``engines`` without ``vllm_engines`` contributes no engine. Each host of that group has a node
    agent, at port ``agent_http_port``, unless its ``ringmaster_agents`` is false.

    Raises:
        MembersError: if a variable the document needs is missing or of the wrong form.
    """
    engines = [
        engine
        for host in sorted(groups.get("engines", ()))
        for engine in _engines(host, _variables(host, "engines", hostvars))
    ]
    document: dict[str, Any] = {"schema": SCHEMA, "engines": sorted(engines, key=lambda engine: str(engine["name"]))}
    for group in ("gateways", "monitors", "preprocessors"):
        document[group] = [
            {"name": host, "address": address(host, _variables(host, group, hostvars))}
            for host in sorted(groups.get(group, ()))
        ]
    document["agents"] = [
        agent
        for host in sorted(groups.get("engines", ()))
        for agent in _agents(host, _variables(host, "engines", hostvars))
    ]
    return document


def scheduler_urls(groups: Mapping[str, Iterable[str]], hostvars: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """The HTTP interfaces of the schedulers of all gateways, sorted by the gateways' names; none without gateways.

    Raises:
        MembersError: if an address or a port (``scheduler_http_port``) is of the wrong form.
    """
    urls = []
    for host in sorted(groups.get("gateways", ())):
        variables = _variables(host, "gateways", hostvars)
        name = address(host, variables)
        given = variables.get("scheduler_http_port", DEFAULT_SCHEDULER_PORT)
        port = whole_number(given, 1, LARGEST_PORT)
        if port is None:
            raise MembersError(f"{host}: scheduler_http_port must be a port, not {given!r}")
        urls.append(f"http://{f'[{name}]' if ':' in name else name}:{port}")
    return urls


def pool_name(model: str) -> str:
    """HAProxy's backend for a model's engines: HAProxy takes only letters, digits and ``_.:-`` in a name."""
    return "pool_" + re.sub(r"[^A-Za-z0-9_.-]", "_", model)


def address(host: str, variables: Mapping[str, Any]) -> str:
    """The address at which other members reach a host: a name or an IP address, without a port."""
    for variable in ("ringmaster_address", "ansible_host"):
        value = variables.get(variable)
        if value is None:
            continue
        if not isinstance(value, str) or not value.strip():
            raise MembersError(f"{host}: {variable} must be a host name or an IP address, not {value!r}")
        return value
    return host


def option(options: Mapping[str, Any], name: str) -> Any:
    """The value of one of vLLM's flags, given without dashes in front; words joined by ``-`` or ``_`` are the same."""
    return options.get(name, options.get(name.replace("-", "_")))


def whole_number(value: Any, smallest: int, largest: int | None = None) -> int | None:
    """The number in ``value`` (an INI inventory and templates give text), or None if it is none or out of range."""
    if isinstance(value, str) and re.fullmatch(r"[0-9]{1,18}", value):
        value = int(value)
    if not isinstance(value, int) or isinstance(value, bool):
        return None
    # int(): Ansible's own kinds of int carry tags that have no place in a document.
    return int(value) if value >= smallest and (largest is None or value <= largest) else None


def _variables(host: str, group: str, hostvars: Mapping[str, Mapping[str, Any]]) -> Mapping[str, Any]:
    if host not in hostvars:
        raise MembersError(f"{host}: is in group {group} but not in the inventory's hosts")
    return hostvars[host]


def _engines(host: str, variables: Mapping[str, Any]) -> list[dict[str, Any]]:
    engines = variables.get("vllm_engines")
    if engines is None:
        return []
    if not isinstance(engines, list):
        raise MembersError(f"{host}: vllm_engines must be a list of engines, not {type(engines).__name__}")
    return [_engine(host, variables, engine, f"vllm_engines[{index}]") for index, engine in enumerate(engines)]


def _agents(host: str, variables: Mapping[str, Any]) -> list[dict[str, Any]]:
    wanted = _truth(host, variables.get("ringmaster_agents", True), "ringmaster_agents")
    port = variables.get("agent_http_port", DEFAULT_AGENT_PORT)
    entry = {"host": host, "address": address(host, variables)}
    return [{**entry, "port": _number(host, port, "agent_http_port", LARGEST_PORT)}] if wanted else []


def _engine(host: str, variables: Mapping[str, Any], engine: Any, where: str) -> dict[str, Any]:
    if not isinstance(engine, Mapping):
        raise MembersError(f"{host}: {where} must be a mapping with name, model and port")
    name = _text(host, engine.get("name"), f"{where}.name")
    model = _text(host, engine.get("model"), f"{where}.model")
    served = _mapping(host, _mapping(host, variables.get("ringmaster_models"), "ringmaster_models").get(model), model)
    options = _mapping(host, engine.get("options", {}), f"{where}.options")
    max_model_len = option(options, "max-model-len")
    if max_model_len is None:
        max_model_len = served.get("max_model_len")
    max_num_seqs = option(options, "max-num-seqs")
    adapters = served.get("adapters", [])
    if not isinstance(adapters, list):
        raise MembersError(f"{host}: ringmaster_models[{model}].adapters must be a list of names")
    return {
        "name": f"{host}.{name}",
        "host": host,
        "address": address(host, variables),
        "port": _number(host, engine.get("port"), f"{where}.port", LARGEST_PORT),
        "kind": _text(host, variables.get("vllm_engine"), "vllm_engine"),
        "model": model,
        "adapters": sorted(_text(host, each, f"ringmaster_models[{model}].adapters") for each in adapters),
        "card": _text(host, variables.get("ringmaster_card"), "ringmaster_card"),
        "max_num_seqs": _number(
            host, DEFAULT_MAX_NUM_SEQS if max_num_seqs is None else max_num_seqs, f"{where}.options.max-num-seqs"
        ),
        "max_model_len": _number(host, max_model_len, f"ringmaster_models[{model}].max_model_len"),
    }


def _text(host: str, value: Any, what: str) -> str:
    if not isinstance(value, str) or not value:
        raise MembersError(f"{host}: {what} must be a name, not {value!r}")
    return value


def _mapping(host: str, value: Any, what: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise MembersError(f"{host}: {what} must be a mapping, not {type(value).__name__}")
    return value


def _truth(host: str, value: Any, what: str) -> bool:
    # An INI inventory gives text.
    words = {"true": True, "yes": True, "false": False, "no": False}
    known = words.get(value.lower()) if isinstance(value, str) else value
    if not isinstance(known, bool):
        raise MembersError(f"{host}: {what} must be true or false, not {value!r}")
    return known


def _number(host: str, value: Any, what: str, largest: int | None = None) -> int:
    number = whole_number(value, 1, largest)
    if number is None:
        raise MembersError(f"{host}: {what} must be a whole number of 1 or more, not {value!r}")
    return number
