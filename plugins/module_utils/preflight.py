# Copyright (c) 2026, the Ringmaster authors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What is wrong with an inventory, found before any host is touched.

A pure function over the groups and the hosts' variables. Values of secrets never get into a problem. Nothing here
imports Ansible.
"""

from __future__ import annotations

import hashlib
import ipaddress
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from ansible_collections.ringmaster.inference.plugins.module_utils.members import (
    LARGEST_PORT,
    MembersError,
    address,
    members,
    option,
    pool_name,
    whole_number,
)

OLDEST_ANSIBLE_CORE = (2, 18)  # as in meta/runtime.yml
GROUPS = ("gateways", "engines", "monitors", "preprocessors")
ENGINES = ("standin", "vllm")
CARDS = ("a100-80g", "l40s")
ENGINE_KEYS = ("name", "model", "port", "options", "accepted", "cards", "environment", "version")
SMALLEST_ENGINE_PORT = 1024  # an engine's user may not bind a port below
SHORTEST_KEY = 8  # characters; as the edge asks of its clients' keys
SHORTEST_TOKEN = 16  # of what may drain engines; the scheduler role asks for it as well


@dataclass(frozen=True)
class Port:
    """A port that the collection uses on each host of a group, unless the variable says another."""

    group: str
    variable: str
    default: int


PORTS = (
    Port("gateways", "edge_public_port", 8080),
    Port("gateways", "edge_dispatch_port", 8081),
    Port("gateways", "edge_metrics_port", 8405),
    Port("gateways", "scheduler_http_port", 8406),
    Port("gateways", "scheduler_spoe_port", 8407),
    Port("gateways", "scheduler_log_port", 8408),
    Port("engines", "agent_http_port", 8409),
    Port("preprocessors", "preprocessor_port", 8410),
    Port("preprocessors", "preprocessor_metrics_port", 8411),
    Port("monitors", "observability_port", 9090),
)

# Every variable that is read, so that the caller can read no more than these.
VARIABLES = (
    "ringmaster_address",
    "ansible_host",
    "ringmaster_card",
    "ringmaster_models",
    "vllm_engines",
    "vllm_engine",
    "vllm_api_key",
    "edge_api_keys",
    "scheduler_api_token",
    *(port.variable for port in PORTS),
)

# Flags that the vllm role sets itself; a unit test holds them equal to the role's own list.
RESERVED_OPTIONS = (
    "host",
    "port",
    "uds",
    "api-key",
    "served-model-name",
    "enable-lora",
    "lora-modules",
    "shutdown-timeout",
)

# Networks for documentation (RFC 5737, RFC 3849): an address from there is one that was never filled in.
DOCUMENTATION_NETWORKS = tuple(
    ipaddress.ip_network(network) for network in ("192.0.2.0/24", "198.51.100.0/24", "203.0.113.0/24", "2001:db8::/32")
)

_SERVER_NAME = re.compile(r"[A-Za-z0-9_.:-]+\Z")  # what HAProxy takes as the name of a server
_ENGINE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_-]*\Z")  # a folder, a systemd instance, and part of a server's name
# What clients ask for by name stands in HAProxy's maps and in JSON; the edge role refuses anything else.
_SERVED_NAME = re.compile(r"[A-Za-z0-9_.:/@+-]{1,128}\Z")
_CLIENT_ID = re.compile(r"[A-Za-z0-9_.-]{1,64}\Z")
_HOST_NAME = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_.-]*[A-Za-z0-9_])?\Z")
_KEY = re.compile(r"[!-~]+\Z")  # a header's value: ASCII that can be seen
_SHA256 = re.compile(r"[0-9a-fA-F]{64}\Z")
_PLACEHOLDERS = frozenset(
    {"todo", "tbd", "fixme", "placeholder", "secret", "password", "example", "none", "null", "xxx"}
)

Variables = Mapping[str, Any]


@dataclass(frozen=True)
class Unreadable:
    """Stands for a variable whose value cannot be had. ``reason`` must not hold a secret."""

    reason: str


@dataclass(frozen=True, order=True)
class Problem:
    """Something to be mended. ``hosts`` is empty if it is not about single hosts."""

    variable: str
    expected: str
    found: str
    fix: str
    hosts: tuple[str, ...] = field(default=())


@dataclass(frozen=True)
class _Site:
    groups: Mapping[str, tuple[str, ...]]
    hosts: Mapping[str, Variables]


def check(
    groups: Mapping[str, Iterable[str]], hosts: Mapping[str, Variables], ansible_core: str = "2.18"
) -> list[Problem]:
    """Everything that is wrong, in a fixed order. Problems that differ only in the host are one.

    ``groups`` gives the hosts of each group, ``hosts`` the variables of each host, where a variable that cannot be
    evaluated is ``Unreadable``; ``ansible_core`` is the version of ansible-core that runs.
    """
    site = _Site(
        {group: tuple(sorted({str(host) for host in groups.get(group, ())})) for group in GROUPS},
        {str(host): variables for host, variables in hosts.items()},
    )
    problems = [
        *_check_version(ansible_core),
        *_check_groups(site),
        *_check_addresses(site),
        *_check_models(site),
        *_check_engines(site),
        *_check_ports(site),
        *_check_engine_key(site),
        *_check_clients(site),
        *_check_scheduler_token(site),
    ]
    if not problems:
        # What the roles will ask for; a form that only this finds is a problem as well.
        try:
            members(site.groups, site.hosts)
        except MembersError as error:
            problems.append(Problem("members", "a members document", str(error), "correct that variable"))
    return _merged(problems)


def render(problems: list[Problem]) -> str:
    """The problems for a person to read, at most as many lines as needed."""
    count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
    lines = [f"Preflight found {count} in the inventory. No host was touched."]
    for number, problem in enumerate(problems, 1):
        lines += [
            f"{number}. {problem.variable}" + (f" of {_listed(problem.hosts)}" if problem.hosts else ""),
            f"   expected: {problem.expected}",
            f"   found:    {problem.found}",
            f"   fix:      {problem.fix}",
        ]
    return "\n".join(lines)


def _merged(problems: Iterable[Problem]) -> list[Problem]:
    hosts: dict[Problem, set[str]] = {}
    for problem in problems:
        key = Problem(problem.variable, problem.expected, problem.found, problem.fix)
        hosts.setdefault(key, set()).update(problem.hosts)
    return sorted(
        Problem(key.variable, key.expected, key.found, key.fix, tuple(sorted(names))) for key, names in hosts.items()
    )


def _listed(names: Iterable[str], most: int = 8) -> str:
    names = list(names)
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def _say(value: Any) -> str:
    """A value that is no secret, short enough for a message."""
    if isinstance(value, Unreadable):
        return value.reason
    if value is None:
        return "undefined"
    text = repr(str(value)) if isinstance(value, str) else f"{type(value).__name__} {value!r}"
    return text if len(text) <= 80 else text[:77] + "..."


def _check_version(ansible_core: str) -> Iterator[Problem]:
    found = re.match(r"(\d{1,9})\.(\d{1,9})", ansible_core)
    if not found or (int(found[1]), int(found[2])) < OLDEST_ANSIBLE_CORE:
        oldest = ".".join(map(str, OLDEST_ANSIBLE_CORE))
        yield Problem("ansible_version", f"ansible-core {oldest} or newer", ansible_core, "upgrade ansible-core")


def _check_groups(site: _Site) -> Iterator[Problem]:
    for group, what in (("gateways", "HAProxy and the scheduler"), ("engines", "engines")):
        if not site.groups[group]:
            yield Problem(
                f"groups['{group}']",
                f"at least one host that runs {what}",
                "no host",
                f"add a host to group {group} of the inventory",
            )
    for group in ("gateways", "engines", "monitors"):
        for host in sorted(set(site.groups[group]) & set(site.groups["preprocessors"])):
            yield Problem(
                f"groups['{group}']",
                "no host of group preprocessors, which carry no Python",
                "one that is in both",
                f"take it out of {group} or out of preprocessors",
                (host,),
            )
    for host in _all_hosts(site):
        if not _SERVER_NAME.match(host):
            yield Problem(
                "inventory_hostname",
                "letters, digits and _ . : - only, because HAProxy uses the name",
                repr(host),
                "rename the host in the inventory; its address goes into ansible_host",
                (host,),
            )
        if host not in site.hosts:
            yield Problem(
                "hostvars", "variables of each host in a group", "none", "add the host to the inventory", (host,)
            )


def _all_hosts(site: _Site) -> list[str]:
    return sorted({host for hosts in site.groups.values() for host in hosts})


def _variables(site: _Site, host: str) -> Variables:
    return site.hosts.get(host, {})


def _check_addresses(site: _Site) -> Iterator[Problem]:
    hosts = _all_hosts(site)
    taken: dict[str, list[str]] = {}
    for host in hosts:
        variables = _variables(site, host)
        variable = next(
            (name for name in ("ringmaster_address", "ansible_host") if variables.get(name) is not None), "ansible_host"
        )
        try:
            found = address(host, variables)
        except MembersError:
            found = ""
        network = _network_address(found)
        if not found or (network is None and not _HOST_NAME.match(found)):
            yield Problem(
                variable,
                "a host name or an IP address, without a port",
                _say(variables.get(variable, host)),
                f"set {variable} to the address at which the other hosts reach this one",
                (host,),
            )
            continue
        documentation = next((each for each in DOCUMENTATION_NETWORKS if network is not None and network in each), None)
        if documentation is not None:
            yield Problem(
                variable,
                "an address of this site",
                f"one of {documentation}, which is for documentation",
                f"set {variable} to the address at which the other hosts reach this one",
                (host,),
            )
        unreachable = found == "localhost" if network is None else network.is_loopback or network.is_unspecified
        if unreachable and len(hosts) > 1:
            yield Problem(
                "ringmaster_address",
                "an address that other hosts can reach",
                found,
                "set ringmaster_address to the address at which the other hosts reach this one",
                (host,),
            )
        else:
            taken.setdefault(str(network or found.lower()), []).append(host)
    for found, sharing in taken.items():
        if len(sharing) > 1:
            yield Problem(
                "ringmaster_address",
                "an address of its own for each host",
                f"{found} for all of them",
                "correct ansible_host or ringmaster_address of all but one",
                tuple(sharing),
            )


def _network_address(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(text)
    except ValueError:
        return None


def _served_models(variables: Variables) -> dict[str, Mapping[str, Any]]:
    """Models with a usable name and definition; the others are reported by _check_models."""
    models = variables.get("ringmaster_models")
    if not isinstance(models, Mapping):
        return {}
    return {str(name): model for name, model in models.items() if isinstance(name, str) and isinstance(model, Mapping)}


def _check_models(site: _Site) -> Iterator[Problem]:
    hosts = sorted({*site.groups["gateways"], *site.groups["engines"]})
    values = {host: _variables(site, host).get("ringmaster_models") for host in hosts}
    for host, models in values.items():
        if not isinstance(models, Mapping) or not models:
            yield Problem(
                "ringmaster_models",
                "a mapping with at least one model: {NAME: {max_model_len: 32768}}",
                _say(models),
                "define the served models in group_vars/all",
                (host,),
            )
            continue
        if models != values[hosts[0]]:
            yield Problem(
                "ringmaster_models",
                f"the same on every host, as on {hosts[0]}",
                "another value",
                "define it once, in group_vars/all",
                (host,),
            )
        for problem in _check_model_definitions(models):
            yield Problem(problem.variable, problem.expected, problem.found, problem.fix, (host,))


def _check_model_definitions(models: Mapping[Any, Any]) -> Iterator[Problem]:
    pools: dict[str, list[str]] = {}
    owners: dict[str, list[str]] = {}
    for name, model in models.items():
        if not isinstance(name, str) or not _SERVED_NAME.match(name):
            yield Problem(
                "ringmaster_models",
                "names of models made of A-Z a-z 0-9 _ . : / @ + - (128 characters at most)",
                _say(name),
                "rename the model as clients ask for it",
            )
            continue
        where = f"ringmaster_models[{name}]"
        pools.setdefault(pool_name(name), []).append(name)
        if not isinstance(model, Mapping):
            yield Problem(where, "a mapping with max_model_len", _say(model), "write {max_model_len: 32768}")
            continue
        if whole_number(model.get("max_model_len"), 1) is None:
            yield Problem(
                f"{where}.max_model_len",
                "a whole number of tokens, 1 or more",
                _say(model.get("max_model_len")),
                "set it to the longest prompt and answer together that the model takes",
            )
        adapters = model.get("adapters", [])
        if not isinstance(adapters, list) or not all(
            isinstance(each, str) and _SERVED_NAME.match(each) for each in adapters
        ):
            yield Problem(
                f"{where}.adapters",
                "a list of names made of A-Z a-z 0-9 _ . : / @ + - (128 characters at most)",
                _say(adapters),
                "write [NAME, NAME], or leave it out",
            )
            continue
        for adapter in adapters:
            owners.setdefault(str(adapter), []).append(name)
    for pool, names in pools.items():
        if len(names) > 1:
            yield Problem(
                "ringmaster_models",
                "names that stay different with every character outside A-Z a-z 0-9 _ . - made _ (HAProxy's backends)",
                f"{_listed(sorted(names))}, which all become {pool}",
                "rename all but one",
            )
    for adapter, names in owners.items():
        if adapter in models:
            yield Problem(
                f"ringmaster_models[{names[0]}].adapters",
                "names that no model has, because clients ask for both by name",
                f"{adapter}, which is a model as well",
                "rename the adapter or the model",
            )
        if len(names) > 1:
            yield Problem(
                f"ringmaster_models[{names[0]}].adapters",
                "each adapter once, because clients ask for it by name alone",
                f"{adapter} in {_listed(names)}",
                "rename or remove all but one",
            )


def _check_engines(site: _Site) -> Iterator[Problem]:
    names: dict[str, list[str]] = {}
    for host in site.groups["engines"]:
        variables = _variables(site, host)
        yield from _check_choice(host, variables, "vllm_engine", ENGINES, "the engine to install")
        yield from _check_choice(host, variables, "ringmaster_card", CARDS, "the model of the host's cards")
        engines = variables.get("vllm_engines")
        if not isinstance(engines, list) or not engines:
            yield Problem(
                "vllm_engines",
                "a list with at least one engine: [{name: main, model: NAME, port: 8100}]",
                "no engine" if isinstance(engines, list) else _say(engines),
                "define the host's engines; to remove the last one, first run ansible-playbook -i INVENTORY "
                "ringmaster.inference.rollback -e operation=vllm --limit HOST, then take HOST out of group engines",
                (host,),
            )
            continue
        for index, engine in enumerate(engines):
            where = f"vllm_engines[{index}]"
            if not isinstance(engine, Mapping):
                yield Problem(
                    where, "a mapping with name, model and port", _say(engine), "write {name: main, …}", (host,)
                )
                continue
            yield from _check_engine(host, variables, engine, where)
            name = engine.get("name")
            if isinstance(name, str):
                names.setdefault(f"{host}.{name}", []).append(f"{where} of {host}")
    for name, places in names.items():
        if len(places) > 1:
            yield Problem(
                "vllm_engines",
                "a name of its own (HOST.ENGINE) for each engine of the site",
                f"{name} at {_listed(places)}",
                "rename all but one of these engines",
            )


def _check_ports(site: _Site) -> Iterator[Problem]:
    for host in _all_hosts(site):
        variables = _variables(site, host)
        ports = [
            (port.variable, whole_number(variables.get(port.variable, port.default), 1, LARGEST_PORT))
            for port in PORTS
            if host in site.groups[port.group]
        ]
        engines = variables.get("vllm_engines") if host in site.groups["engines"] else []
        for index, engine in enumerate(engines if isinstance(engines, list) else []):
            if isinstance(engine, Mapping):
                ports.append((f"vllm_engines[{index}].port", whole_number(engine.get("port"), 1, LARGEST_PORT)))
        used: dict[int, str] = {}
        for variable, number in ports:
            if number is None:
                if variable in variables:  # else it is an engine's, which is reported with the engine
                    yield Problem(
                        variable,
                        f"a port from 1 to {LARGEST_PORT}",
                        _say(variables[variable]),
                        "correct it, or leave it out to take the default",
                        (host,),
                    )
                continue
            if number in used:
                yield Problem(
                    variable,
                    "a port that nothing else of the collection uses on this host",
                    f"{number}, which is {used[number]}",
                    "give one of the two another port" + (", engines 8100 upwards" if "[" in variable else ""),
                    (host,),
                )
            used.setdefault(number, variable)


def _check_choice(host: str, variables: Variables, name: str, choices: tuple[str, ...], what: str) -> Iterator[Problem]:
    if variables.get(name) not in choices:
        yield Problem(
            name,
            f"{what}, one of {', '.join(choices)}",
            _say(variables.get(name)),
            f"set {name} for this host",
            (host,),
        )


def _check_engine(host: str, variables: Variables, engine: Mapping[Any, Any], where: str) -> Iterator[Problem]:
    unknown = sorted(str(key) for key in engine if key not in ENGINE_KEYS)
    if unknown:
        yield Problem(
            where, f"only {', '.join(ENGINE_KEYS)}", _listed(unknown), "remove or correct these keys", (host,)
        )
    name, model, port = (engine.get(key) for key in ("name", "model", "port"))
    if not isinstance(name, str) or not _ENGINE_NAME.match(name):
        yield Problem(
            f"{where}.name",
            "letters, digits, _ and - only, because folders, systemd and HAProxy use the name",
            _say(name),
            "name the engine, for instance main",
            (host,),
        )
    if whole_number(port, SMALLEST_ENGINE_PORT, LARGEST_PORT) is None:
        yield Problem(
            f"{where}.port",
            f"a port from {SMALLEST_ENGINE_PORT} to {LARGEST_PORT}",
            _say(port),
            "give the engine a port, 8100 upwards",
            (host,),
        )
    models = _served_models(variables)
    if not isinstance(model, str) or model not in models:
        yield Problem(
            f"{where}.model",
            f"a model of ringmaster_models ({_listed(sorted(models)) or 'which has none'})",
            _say(model),
            "correct the name, or add the model to ringmaster_models",
            (host,),
        )
    options = engine.get("options", {})
    if not isinstance(options, Mapping) or any(not isinstance(key, str) or key.startswith("-") for key in options):
        yield Problem(
            f"{where}.options",
            "a mapping of vLLM's flags without the dashes in front: {max-num-seqs: 256}",
            _say(options),
            "rewrite the options in this form",
            (host,),
        )
        return
    twice = [key for key in options if key.replace("_", "-") in RESERVED_OPTIONS]
    if twice:
        yield Problem(
            f"{where}.options",
            f"none of {', '.join(RESERVED_OPTIONS)}, which the vllm role sets from variables of its own",
            _listed(sorted(twice)),
            "use the engine's port and model, vllm_listen_address, vllm_api_key, vllm_stop_timeout, ringmaster_models",
            (host,),
        )
    max_num_seqs = option(options, "max-num-seqs")
    if max_num_seqs is not None and whole_number(max_num_seqs, 1) is None:
        yield Problem(
            f"{where}.options.max-num-seqs",
            "a whole number of 1 or more",
            _say(max_num_seqs),
            "correct it or leave it out",
            (host,),
        )
    limit = whole_number(models.get(str(model), {}).get("max_model_len"), 1)
    max_model_len = option(options, "max-model-len")
    if max_model_len is not None and whole_number(max_model_len, 1, limit) is None:
        yield Problem(
            f"{where}.options.max-model-len",
            f"a whole number of tokens from 1 to {limit or 'max_model_len'} (max_model_len of the model)",
            _say(max_model_len),
            "lower it, or leave it out to take the model's",
            (host,),
        )


def _wrong_secret(value: Any) -> str | None:
    """What is wrong with a secret, without its value."""
    if isinstance(value, Unreadable):
        return value.reason
    if value is None:
        return "undefined"
    if not isinstance(value, str):
        return f"no text but {type(value).__name__}"
    if not value.strip():
        return "empty"
    if "{{" in value or "{%" in value:
        return "a template that could not be evaluated"
    bare = re.sub(r"[^a-z0-9]", "", value.lower())
    if "changeme" in bare or "replaceme" in bare or bare in _PLACEHOLDERS or not bare:
        return "a placeholder"
    if not _KEY.match(value):
        return "text with spaces, line ends or other characters that no header can carry"
    if len(value) < SHORTEST_KEY:
        return f"text of fewer than {SHORTEST_KEY} characters"
    return None


def _check_engine_key(site: _Site) -> Iterator[Problem]:
    fix = "set vllm_api_key in group_vars/all from a vault or a file outside the repository (openssl rand -hex 32)"
    keys: dict[str, Any] = {}
    for host in sorted({*site.groups["gateways"], *site.groups["engines"]}):
        value = _variables(site, host).get("vllm_api_key")
        wrong = _wrong_secret(value)
        if wrong:
            yield Problem("vllm_api_key", "a secret key of visible ASCII characters", wrong, fix, (host,))
        else:
            keys[host] = value
    if len(set(keys.values())) > 1:
        yield Problem(
            "vllm_api_key",
            "one key for all gateways and engines, because the edge shows every engine the same",
            "different keys",
            "set it once, in group_vars/all",
            tuple(keys),
        )


def _check_scheduler_token(site: _Site) -> Iterator[Problem]:
    """It may be left out: then nobody changes a scheduler's state over the network."""
    for host in site.groups["gateways"]:
        value = _variables(site, host).get("scheduler_api_token")
        if value is None or value == "":
            continue
        wrong = _wrong_secret(value)
        if wrong is None and len(value) < SHORTEST_TOKEN:
            wrong = f"text of fewer than {SHORTEST_TOKEN} characters"
        if wrong:
            yield Problem(
                "scheduler_api_token",
                f"a secret token of {SHORTEST_TOKEN} or more visible ASCII characters, or none",
                wrong,
                "set it in group_vars/all from a vault or a file outside the repository (openssl rand -hex 32)",
                (host,),
            )


def _check_clients(site: _Site) -> Iterator[Problem]:
    for host in site.groups["gateways"]:
        clients = _variables(site, host).get("edge_api_keys")
        if not isinstance(clients, list) or not clients:
            found = "no client" if isinstance(clients, list) else (_wrong_secret(clients) or "text instead of a list")
            yield Problem(
                "edge_api_keys",
                "a list with at least one client: [{id: team-a, key: …}] or [{id: team-a, sha256: …}]",
                found,
                "set edge_api_keys in group_vars/all from a vault or a file outside the repository",
                (host,),
            )
            continue
        ids: dict[str, int] = {}
        digests: dict[str, int] = {}
        for index, client in enumerate(clients):
            where = f"edge_api_keys[{index}]"
            if not isinstance(client, Mapping):
                found = _wrong_secret(client) or "text"
                yield Problem(where, "a mapping with id, and key or sha256", found, "write {id: …, key: …}", (host,))
                continue
            yield from _check_client(host, client, where)
            name, digest = client.get("id"), _client_digest(client)
            for value, seen, what in ((name, ids, "id"), (digest, digests, "key")):
                if not isinstance(value, str):
                    continue
                if value in seen:
                    yield Problem(
                        f"{where}.{what}",
                        f"a {what} of its own for each client",
                        f"the same as edge_api_keys[{seen[value]}]",
                        f"give one of them another {what}",
                        (host,),
                    )
                seen.setdefault(value, index)


def _check_client(host: str, client: Mapping[Any, Any], where: str) -> Iterator[Problem]:
    name = client.get("id")
    if not isinstance(name, str) or not _CLIENT_ID.match(name):
        yield Problem(
            f"{where}.id",
            "1 to 64 letters, digits and _ . -",
            _say(name),
            "name the client, for instance team-a",
            (host,),
        )
    given = [key for key in ("key", "sha256") if client.get(key) is not None]
    if len(given) != 1:
        yield Problem(where, "either key or sha256", "both" if given else "neither", "give one of the two", (host,))
        return
    value = client[given[0]]
    wrong = _wrong_secret(value)
    if wrong is None and given[0] == "sha256" and not _SHA256.match(value):
        wrong = "something else"
    if wrong:
        expected = "a secret key of visible ASCII characters" if given[0] == "key" else "64 hexadecimal digits"
        yield Problem(
            f"{where}.{given[0]}", expected, wrong, "set it from a vault or a file outside the repository", (host,)
        )


def _client_digest(client: Mapping[Any, Any]) -> str | None:
    """The checksum under which the edge knows a client's key, so that keys are compared without showing them."""
    key, sha256 = client.get("key"), client.get("sha256")
    if isinstance(key, str) and _wrong_secret(key) is None:
        return hashlib.sha256(key.encode("utf-8")).hexdigest()
    return sha256.lower() if isinstance(sha256, str) else None
