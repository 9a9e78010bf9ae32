# SPDX-License-Identifier: GPL-3.0-or-later
"""What preflight finds wrong, and that it never shows a secret and never fails by itself."""

from __future__ import annotations

import copy
import random
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from ansible_collections.ringmaster.inference.plugins.module_utils import preflight
from ansible_collections.ringmaster.inference.plugins.module_utils.members import members
from ansible_collections.ringmaster.inference.plugins.module_utils.preflight import Problem, Unreadable, check, render

CHECKOUT = Path(__file__).resolve().parents[4]
KEY = "5f0c8e3ab1"
OTHER_KEY = "77aa00bb11"
SHA256 = "ab" * 32
GROUPS = {
    "gateways": ["gw1", "gw2"],
    "engines": ["gpu-a1", "gpu-b1"],
    "monitors": ["cpu-c1"],
    "preprocessors": ["pi1"],
}


def site() -> dict[str, dict[str, Any]]:
    """The variables of a site where nothing is wrong."""
    models = {"qwen2-7b": {"max_model_len": 32768, "adapters": ["sql"]}, "small": {"max_model_len": 4096}}
    common = {
        "ringmaster_models": models,
        "vllm_engine": "standin",
        "vllm_api_key": KEY,
        "edge_api_keys": [{"id": "team-a", "key": OTHER_KEY}, {"id": "team-b", "sha256": SHA256}],
    }
    hosts = {host: copy.deepcopy(common) for names in GROUPS.values() for host in names}
    for number, host in enumerate(sorted(hosts), 11):
        hosts[host]["ansible_host"] = f"10.0.0.{number}"
    for host, card in (("gpu-a1", "a100-80g"), ("gpu-b1", "l40s")):
        hosts[host]["ringmaster_card"] = card
        hosts[host]["vllm_engines"] = [{"name": "main", "model": "qwen2-7b", "port": 8100}]
    return hosts


def test_nothing_is_wrong() -> None:
    assert check(GROUPS, site(), "2.19.14") == []


def test_smallest_site_is_one_host() -> None:
    hosts = {"localhost": {**site()["gpu-a1"]}}
    del hosts["localhost"]["ansible_host"]
    assert check({"gateways": ["localhost"], "engines": ["localhost"], "monitors": ["localhost"]}, hosts) == []


def changed(hosts: Iterable[str], variable: str, value: Any) -> list[Problem]:
    """The problems of a site where one variable of some hosts has another value, or none."""
    variables = site()
    for host in hosts:
        variables[host][variable] = value
        if value is None:
            del variables[host][variable]
    return check(GROUPS, variables)


def assert_named(problems: list[Problem], variable: str, hosts: Iterable[str], says: str) -> None:
    matching = [problem for problem in problems if problem.variable == variable and problem.hosts == tuple(hosts)]
    assert any(says in f"{problem.expected} {problem.found} {problem.fix}" for problem in matching), problems
    assert all(problem.fix for problem in problems)


ENGINE = {"name": "main", "model": "qwen2-7b", "port": 8100}


@pytest.mark.parametrize(
    ("change", "part", "says"),
    [
        ({"gpus": 4}, "", "gpus"),
        ({"model": "qwen"}, ".model", "qwen2-7b, small"),
        ({"model": None}, ".model", "undefined"),
        ({"name": "a b"}, ".name", "HAProxy"),
        ({"name": "a/b"}, ".name", "HAProxy"),
        ({"name": ""}, ".name", "HAProxy"),
        ({"name": ".."}, ".name", "HAProxy"),
        ({"name": "a:b"}, ".name", "HAProxy"),
        ({"name": "a.b"}, ".name", "HAProxy"),
        ({"name": "-a"}, ".name", "HAProxy"),
        ({"options": {"api_key": "x"}}, ".options", "vllm role"),
        ({"port": 80}, ".port", "1024 to 65535"),
        ({"port": 65536}, ".port", "1024 to 65535"),
        ({"port": "x"}, ".port", "1024 to 65535"),
        ({"options": []}, ".options", "flags"),
        ({"options": {"--seed": 1}}, ".options", "without the dashes"),
        ({"options": {"max_num_seqs": 0}}, ".options.max-num-seqs", "1 or more"),
        ({"options": {"max-model-len": 32769}}, ".options.max-model-len", "from 1 to 32768"),
    ],
)
def test_each_mistake_in_an_engine_is_named(change: dict[str, Any], part: str, says: str) -> None:
    problems = changed(["gpu-a1"], "vllm_engines", [{**ENGINE, **change}])
    assert_named(problems, f"vllm_engines[0]{part}", ["gpu-a1"], says)


@pytest.mark.parametrize(
    ("variable", "value", "named", "says"),
    [
        ("vllm_engines", None, "vllm_engines", "undefined"),
        ("vllm_engines", [], "vllm_engines", "no engine"),
        ("vllm_engines", [], "vllm_engines", "rollback -e operation=vllm --limit HOST, then"),
        ("vllm_engines", "main", "vllm_engines", "a list with at least one engine"),
        ("vllm_engines", ["main"], "vllm_engines[0]", "a mapping with name, model and port"),
        ("vllm_engines", [ENGINE, {**ENGINE, "name": "b"}], "vllm_engines[1].port", "which is vllm_engines[0].port"),
        ("vllm_engine", "sglang", "vllm_engine", "one of standin"),
        ("ringmaster_card", "h100", "ringmaster_card", "one of a100-80g, l40s"),
        ("ringmaster_card", None, "ringmaster_card", "undefined"),
        ("ansible_host", "10.0.0.13:22", "ansible_host", "without a port"),
        ("ansible_host", "", "ansible_host", "a host name or an IP address"),
        ("ansible_host", 10, "ansible_host", "int 10"),
        ("ansible_host", "127.0.0.1", "ringmaster_address", "other hosts can reach"),
        ("ansible_host", "192.0.2.4", "ansible_host", "documentation"),
        ("ansible_host", Unreadable("a template that fails"), "ansible_host", "a template that fails"),
    ],
)
def test_each_mistake_on_an_engine_host_is_named(variable: str, value: Any, named: str, says: str) -> None:
    assert_named(changed(["gpu-a1"], variable, value), named, ["gpu-a1"], says)


def test_two_engines_of_one_name() -> None:
    problems = changed(["gpu-a1"], "vllm_engines", [ENGINE, {**ENGINE, "port": 8101}])
    assert_named(problems, "vllm_engines", [], "gpu-a1.main at")


@pytest.mark.parametrize("variable", ["ansible_host", "ringmaster_address"])
def test_two_hosts_with_one_address(variable: str) -> None:
    problems = changed(["gpu-a1"], variable, site()["gpu-b1"]["ansible_host"])
    assert_named(problems, "ringmaster_address", ["gpu-a1", "gpu-b1"], "for all of them")


@pytest.mark.parametrize(
    ("models", "part", "says"),
    [
        (None, "", "at least one model"),
        ({}, "", "at least one model"),
        ({"a b": {"max_model_len": 1}}, "", "128 characters at most"),
        ({"a" * 129: {"max_model_len": 1}}, "", "128 characters at most"),
        ({"a\n": {"max_model_len": 1}}, "", "128 characters at most"),
        ({"a/b": {"max_model_len": 1}, "a:b": {"max_model_len": 1}}, "", "pool_a_b"),
        ({"m": 1}, "[m]", "a mapping"),
        ({"m": {}}, "[m].max_model_len", "tokens"),
        ({"m": {"max_model_len": 0}}, "[m].max_model_len", "1 or more"),
        ({"m": {"max_model_len": 1, "adapters": "sql"}}, "[m].adapters", "a list of names"),
        ({"m": {"max_model_len": 1, "adapters": ["m"]}}, "[m].adapters", "a model as well"),
        ({"m": {"max_model_len": 1, "adapters": ["a", "a"]}}, "[m].adapters", "each adapter once"),
    ],
)
def test_each_mistake_in_the_models_is_named(models: Any, part: str, says: str) -> None:
    problems = changed(site(), "ringmaster_models", models)
    assert_named(problems, f"ringmaster_models{part}", ["gpu-a1", "gpu-b1", "gw1", "gw2"], says)


def test_models_are_the_same_on_every_host() -> None:
    problems = changed(["gw2"], "ringmaster_models", {"qwen2-7b": {"max_model_len": 5}})
    assert_named(problems, "ringmaster_models", ["gw2"], "the same on every host")


@pytest.mark.parametrize(
    ("value", "says"),
    [
        (None, "undefined"),
        ("", "empty"),
        (" ", "empty"),
        ("CHANGE_ME", "a placeholder"),
        ("changeme-please", "a placeholder"),
        ("****", "a placeholder"),
        ("{{ vault_key }}", "a template"),
        ("two words", "no header can carry"),
        ("short", "fewer than 8 characters"),
        ("key\n", "no header can carry"),
        (12345, "no text but int"),
        (Unreadable("a lookup that fails"), "a lookup that fails"),
    ],
)
def test_each_mistake_in_a_secret_is_named(value: Any, says: str) -> None:
    assert_named(changed(["gw1"], "vllm_api_key", value), "vllm_api_key", ["gw1"], says)
    assert_named(changed(site(), "vllm_api_key", value), "vllm_api_key", ["gpu-a1", "gpu-b1", "gw1", "gw2"], says)
    if value is not None:
        clients = [{"id": "team-a", "key": value}]
        assert_named(changed(["gw1"], "edge_api_keys", clients), "edge_api_keys[0].key", ["gw1"], says)


@pytest.mark.parametrize(
    ("value", "says"),
    [
        ("CHANGE_ME", "a placeholder"),
        ("fifteen-letters", "fewer than 16 characters"),
        (Unreadable("a lookup"), "a lookup"),
    ],
)
def test_each_mistake_in_the_token_of_the_schedulers_is_named(value: Any, says: str) -> None:
    assert_named(changed(["gw1"], "scheduler_api_token", value), "scheduler_api_token", ["gw1"], says)


@pytest.mark.parametrize("value", [None, "", "a-token-of-the-schedulers"])
def test_token_of_the_schedulers_may_be_left_out(value: str | None) -> None:
    assert changed(["gw1"], "scheduler_api_token", value) == []


def test_one_engine_key_for_all() -> None:
    problems = changed(["gw1"], "vllm_api_key", "another-key")
    assert_named(problems, "vllm_api_key", ["gpu-a1", "gpu-b1", "gw1", "gw2"], "one key for all")


@pytest.mark.parametrize(
    ("clients", "part", "says"),
    [
        (None, "", "undefined"),
        ([], "", "no client"),
        ("a-secret-key", "", "text instead of a list"),
        (["a-secret-key"], "[0]", "write {id"),
        ([{"id": "a"}], "[0]", "neither"),
        ([{"id": "a", "key": "a-client-key", "sha256": SHA256}], "[0]", "both"),
        ([{"id": "a", "sha256": "abc"}], "[0].sha256", "64 hexadecimal digits"),
        ([{"id": "a b", "key": "a-client-key"}], "[0].id", "letters, digits"),
        ([{"key": "a-client-key"}], "[0].id", "undefined"),
        ([{"id": "a", "key": "a-client-key"}, {"id": "a", "key": "another-client-key"}], "[1].id", "edge_api_keys[0]"),
        ([{"id": "a", "key": "a-client-key"}, {"id": "b", "key": "a-client-key"}], "[1].key", "edge_api_keys[0]"),
    ],
)
def test_each_mistake_in_the_clients_is_named(clients: Any, part: str, says: str) -> None:
    assert_named(changed(["gw1", "gw2"], "edge_api_keys", clients), f"edge_api_keys{part}", ["gw1", "gw2"], says)


def test_hash_and_key_of_one_client_are_the_same_key() -> None:
    variables = site()
    digest = preflight.hashlib.sha256(OTHER_KEY.encode()).hexdigest().upper()
    variables["gw1"]["edge_api_keys"][1]["sha256"] = digest
    assert [problem.variable for problem in check(GROUPS, variables)] == ["edge_api_keys[1].key"]


@pytest.mark.parametrize("group", ["gateways", "engines"])
def test_group_without_a_host(group: str) -> None:
    problems = check({**GROUPS, group: []}, site())
    assert [problem.variable for problem in problems] == [f"groups['{group}']"]
    assert problems[0].found == "no host"
    assert group in problems[0].fix


@pytest.mark.parametrize("group", ["gateways", "engines", "monitors"])
def test_preprocessor_does_nothing_else(group: str) -> None:
    problems = check({**GROUPS, "preprocessors": ["pi1", GROUPS[group][0]]}, site())
    assert [(problem.variable, problem.hosts) for problem in problems] == [(f"groups['{group}']", (GROUPS[group][0],))]


def test_host_name_that_haproxy_cannot_take() -> None:
    variables = site()
    variables["gpu a1"] = variables.pop("gpu-a1")
    problems = check({**GROUPS, "engines": ["gpu a1", "gpu-b1"]}, variables)
    assert [(problem.variable, problem.hosts) for problem in problems] == [("inventory_hostname", ("gpu a1",))]


def test_same_server_name_from_two_hosts() -> None:
    variables = site()
    variables["a.b"], variables["a"] = variables.pop("gpu-a1"), variables.pop("gpu-b1")
    variables["a.b"]["vllm_engines"][0]["name"] = "c"
    variables["a"]["vllm_engines"][0]["name"] = "b.c"
    problems = check({**GROUPS, "engines": ["a", "a.b"]}, variables)
    assert "a.b.c at vllm_engines[0] of a, vllm_engines[0] of a.b" in [problem.found for problem in problems]


@pytest.mark.parametrize(
    ("port", "variable"), [(8080, "edge_public_port"), (8407, "scheduler_spoe_port"), (9090, None)]
)
def test_engine_on_a_gateway_keeps_off_its_ports(port: int, variable: str | None) -> None:
    variables = site()
    variables["gpu-a1"]["vllm_engines"][0]["port"] = port
    problems = check({**GROUPS, "gateways": ["gpu-a1", "gw1"]}, variables)
    assert [problem.found for problem in problems] == ([f"{port}, which is {variable}"] if variable else [])


def test_port_that_was_moved_is_the_one_that_counts() -> None:
    variables = site()
    groups = {**GROUPS, "gateways": ["gpu-a1", "gw1"]}
    variables["gpu-a1"]["edge_public_port"] = 8100
    assert [problem.variable for problem in check(groups, variables)] == ["vllm_engines[0].port"]
    variables["gpu-a1"]["vllm_engines"][0]["port"] = 8080
    assert check(groups, variables) == []


@pytest.mark.parametrize("port", preflight.PORTS, ids=lambda port: port.variable)
@pytest.mark.parametrize("number", [0, 65536, "70000", "x", True, None, Unreadable("a template that fails")])
def test_port_that_no_host_has_is_refused(port: preflight.Port, number: Any) -> None:
    variables = site()
    host = GROUPS[port.group][0]
    variables[host][port.variable] = number
    assert_named(check(GROUPS, variables), port.variable, [host], "from 1 to 65535")
    other = GROUPS["gateways" if port.group == "engines" else "engines"][0]  # where the port is not used
    assert check(GROUPS, {**site(), other: {**site()[other], port.variable: number}}) == []


@pytest.mark.parametrize("name", preflight.RESERVED_OPTIONS)
@pytest.mark.parametrize("join", ["-", "_"])
def test_option_that_the_role_sets_is_refused(name: str, join: str) -> None:
    problems = changed(["gpu-a1"], "vllm_engines", [{**ENGINE, "options": {name.replace("-", join): "x"}}])
    assert_named(problems, "vllm_engines[0].options", ["gpu-a1"], name.replace("-", join))


def test_ports_of_one_gateway_differ() -> None:
    assert_named(changed(["gw1"], "edge_dispatch_port", "8080"), "edge_dispatch_port", ["gw1"], "edge_public_port")


@pytest.mark.parametrize(
    ("version", "right"),
    [("2.18.0", True), ("2.21.0rc1", True), ("3.0", True), ("2.17.9", False), ("2.9", False), ("?", False)],
)
def test_version_of_ansible_core(version: str, right: bool) -> None:
    assert (check(GROUPS, site(), version) == []) is right


def test_one_mistake_on_many_hosts_is_one_problem() -> None:
    hosts = site()
    groups = {**GROUPS, "engines": [f"gpu-{number}" for number in range(100)]}
    for number, host in enumerate(groups["engines"]):
        hosts[host] = {**hosts["gpu-a1"], "ansible_host": f"10.1.0.{number}", "ringmaster_card": "h100"}
    problems = check(groups, hosts)
    assert len(problems) == 1
    assert len(problems[0].hosts) == 100
    assert "and 92 more" in render(problems)


def test_text_lists_everything() -> None:
    text = render([Problem("a", "b", "c", "d", ("h1", "h2")), Problem("e", "f", "g", "h")])
    assert text.splitlines() == [
        "Preflight found 2 problems in the inventory. No host was touched.",
        "1. a of h1, h2",
        "   expected: b",
        "   found:    c",
        "   fix:      d",
        "2. e",
        "   expected: f",
        "   found:    g",
        "   fix:      h",
    ]


# Any inventory

SECRET = "Zq9-the-secret-Zq9"
ANYTHING = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=5)
    | st.sampled_from(["m", "main", "standin", "l40s", "10.0.0.1", "changeme"])
    | st.builds(Unreadable, st.text(max_size=3)),
    lambda each: st.lists(each, max_size=3) | st.dictionaries(st.text(max_size=3), each, max_size=3),
    max_leaves=6,
)
SECRETS = st.recursive(
    st.just(SECRET) | st.just(f"changeme {SECRET}") | st.just(f"{SECRET}\n") | st.none(),
    lambda each: (
        st.lists(each, max_size=3) | st.dictionaries(st.sampled_from(["id", "key", "sha256", "x"]), each, max_size=3)
    ),
    max_leaves=6,
)
ENGINES = st.fixed_dictionaries(
    {}, optional=dict.fromkeys(("name", "model", "port", "options", "x"), ANYTHING | st.just("m") | st.just(8100))
)
MODELS = st.dictionaries(
    st.sampled_from(["m", "a/b", "a:b"]) | st.text(max_size=3),
    ANYTHING | st.fixed_dictionaries({"max_model_len": ANYTHING, "adapters": ANYTHING}),
    max_size=3,
)
HOST = st.fixed_dictionaries(
    {},
    optional={
        **dict.fromkeys(preflight.VARIABLES, ANYTHING),
        "vllm_engines": ANYTHING | st.lists(ENGINES | ANYTHING, max_size=3),
        "ringmaster_models": ANYTHING | MODELS,
        "vllm_api_key": SECRETS,
        "edge_api_keys": SECRETS,
    },
)
NAMES = st.sampled_from(["a", "b", "c d", "é"])
INVENTORY = st.tuples(
    st.dictionaries(st.sampled_from(preflight.GROUPS), st.lists(NAMES, max_size=4)), st.dictionaries(NAMES, HOST)
)


def without_ids(hosts: dict[str, Any]) -> dict[str, Any]:
    """A client's id is no secret and is shown: here the secrets stand anywhere else."""
    for variables in hosts.values():
        clients = variables.get("edge_api_keys")
        for client in clients if isinstance(clients, list) else []:
            if isinstance(client, dict) and "id" in client:
                client["id"] = "team-a"
    return hosts


@given(INVENTORY)
def test_no_inventory_makes_a_traceback_or_shows_a_secret(inventory: tuple[dict[str, Any], dict[str, Any]]) -> None:
    groups, hosts = inventory[0], without_ids(inventory[1])
    problems = check(groups, hosts)
    assert SECRET not in render(problems)
    if not problems:
        members(groups, hosts)


@given(INVENTORY, st.randoms())
def test_same_inventory_same_problems(inventory: Any, shuffle: random.Random) -> None:
    groups, hosts = inventory
    names = list(hosts)
    shuffle.shuffle(names)
    shuffled = {group: shuffle.sample(members, len(members)) for group, members in groups.items()}
    assert check(groups, hosts) == check(shuffled, {name: hosts[name] for name in names})


# What others define


def specification(role: str) -> dict[str, Any]:
    path = CHECKOUT / "roles" / role / "meta" / "argument_specs.yml"
    options: dict[str, Any] = yaml.safe_load(path.read_text(encoding="utf-8"))["argument_specs"]["main"]["options"]
    return options


@pytest.mark.parametrize("port", preflight.PORTS, ids=lambda port: port.variable)
def test_ports_are_those_of_the_roles(port: preflight.Port) -> None:
    assert specification(port.variable.split("_")[0])[port.variable]["default"] == port.default


def test_engines_are_those_of_the_role() -> None:
    options = specification("vllm")
    assert tuple(options["vllm_engine"]["choices"]) == preflight.ENGINES
    assert set(options["vllm_engines"]["options"]) == set(preflight.ENGINE_KEYS)
    variables = yaml.safe_load((CHECKOUT / "roles" / "vllm" / "vars" / "main.yml").read_text())
    assert tuple(variables["vllm_reserved_options"]) == preflight.RESERVED_OPTIONS


def test_adapter_that_the_edge_would_refuse_is_refused() -> None:
    variables = site()
    for values in variables.values():
        values["ringmaster_models"] = {"m": {"max_model_len": 8, "adapters": ["sql v2"]}}
    assert any("adapters" in problem.variable for problem in check(GROUPS, variables))
