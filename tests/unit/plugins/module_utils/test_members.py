# SPDX-License-Identifier: GPL-3.0-or-later
"""The members document from an inventory."""

from __future__ import annotations

import contextlib
import json
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ansible_collections.ringmaster.inference.plugins.module_utils.members import (
    DEFAULT_MAX_NUM_SEQS,
    MembersError,
    members,
    option,
    pool_name,
    whole_number,
)

MODELS = {"qwen2-7b-instruct": {"max_model_len": 32768, "adapters": ["sql"]}, "small": {"max_model_len": 4096}}


def engine_host(*engines: dict[str, Any], **variables: Any) -> dict[str, Any]:
    return {
        "ringmaster_models": MODELS,
        "ringmaster_card": "a100-80g",
        "vllm_engine": "standin",
        "vllm_engines": list(engines or ({"name": "main", "model": "qwen2-7b-instruct", "port": 8100},)),
        **variables,
    }


def test_document_of_the_conventions() -> None:
    """The example in docs/conventions.md, to the letter."""
    groups = {
        "gateways": ["gw1"],
        "engines": ["gpu-a1"],
        "monitors": ["cpu-c1"],
        "preprocessors": ["pi1"],
        "others": ["x"],
    }
    hostvars = {
        "gw1": {"ansible_host": "10.89.7.11"},
        "gpu-a1": engine_host(ansible_host="10.89.7.13"),
        "cpu-c1": {"ringmaster_address": "10.89.7.16", "ansible_host": "192.168.1.1"},
        "pi1": {"ansible_host": "10.89.7.17"},
    }
    assert members(groups, hostvars) == {
        "schema": 1,
        "engines": [
            {
                "name": "gpu-a1.main",
                "host": "gpu-a1",
                "address": "10.89.7.13",
                "port": 8100,
                "kind": "standin",
                "model": "qwen2-7b-instruct",
                "adapters": ["sql"],
                "card": "a100-80g",
                "max_num_seqs": 256,
                "max_model_len": 32768,
            }
        ],
        "gateways": [{"name": "gw1", "address": "10.89.7.11"}],
        "monitors": [{"name": "cpu-c1", "address": "10.89.7.16"}],
        "preprocessors": [{"name": "pi1", "address": "10.89.7.17"}],
        "agents": [{"host": "gpu-a1", "address": "10.89.7.13", "port": 8409}],
    }


def test_lists_are_sorted_by_name_and_address_falls_back_to_the_name() -> None:
    document = members(
        {"gateways": ["gw2", "gw10", "gw1"], "engines": ["b", "a"]},
        {
            "gw2": {},
            "gw10": {},
            "gw1": {},
            "b": engine_host(),
            "a": engine_host(
                {"name": "z", "model": "small", "port": 8101}, {"name": "main", "model": "small", "port": 8100}
            ),
        },
    )
    assert [each["name"] for each in document["engines"]] == ["a.main", "a.z", "b.main"]
    assert document["gateways"] == [{"name": name, "address": name} for name in ("gw1", "gw10", "gw2")]


@pytest.mark.parametrize(
    ("options", "max_num_seqs", "max_model_len"),
    [
        ({}, DEFAULT_MAX_NUM_SEQS, 32768),
        ({"max-num-seqs": 16}, 16, 32768),
        ({"max_num_seqs": "16"}, 16, 32768),
        ({"max-model-len": 8192}, DEFAULT_MAX_NUM_SEQS, 8192),
    ],
)
def test_limits_come_from_options_or_the_model(options: dict[str, Any], max_num_seqs: int, max_model_len: int) -> None:
    engine = {"name": "main", "model": "qwen2-7b-instruct", "port": "8100", "options": options}
    found = members({"engines": ["a"]}, {"a": engine_host(engine)})["engines"][0]
    assert (found["max_num_seqs"], found["max_model_len"], found["port"]) == (max_num_seqs, max_model_len, 8100)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"vllm_engines": "main"}, "vllm_engines"),
        ({"vllm_engines": ["main"]}, "vllm_engines[0]"),
        ({"vllm_engines": [{}]}, "vllm_engines[0].name"),
        ({"vllm_engines": [{"name": "m", "model": "small", "port": True}]}, "vllm_engines[0].port"),
        ({"vllm_engines": [{"name": "m", "model": "small", "port": 65536}]}, "vllm_engines[0].port"),
        ({"vllm_engines": [{"name": "m", "model": "unknown", "port": 8100}]}, "unknown"),
        ({"ringmaster_models": None}, "ringmaster_models"),
        ({"ringmaster_models": {"qwen2-7b-instruct": {}}}, "max_model_len"),
        ({"ringmaster_models": {"qwen2-7b-instruct": {"max_model_len": 1, "adapters": "sql"}}}, "adapters"),
        ({"ringmaster_card": None}, "ringmaster_card"),
        ({"vllm_engine": ""}, "vllm_engine"),
        ({"ansible_host": " "}, "ansible_host"),
        ({"ringmaster_address": 10}, "ringmaster_address"),
    ],
)
def test_errors_name_the_host_and_the_variable(change: dict[str, Any], named: str) -> None:
    with pytest.raises(MembersError) as caught:
        members({"engines": ["gpu-a1"]}, {"gpu-a1": engine_host(**change)})
    assert str(caught.value).startswith("gpu-a1: ")
    assert named in str(caught.value)


def test_host_of_a_group_without_variables_is_named() -> None:
    with pytest.raises(MembersError, match=r"^gw1: is in group gateways"):
        members({"gateways": ["gw1"]}, {})


def test_host_without_engines_contributes_none() -> None:
    assert members({"engines": ["a", "b"]}, {"a": {}, "b": {"vllm_engines": []}})["engines"] == []


ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda each: st.lists(each, max_size=3) | st.dictionaries(st.text(max_size=5), each, max_size=3),
    max_leaves=8,
)
ENGINE = st.fixed_dictionaries(
    {},
    optional={
        "name": ANYTHING,
        "model": ANYTHING | st.just("m"),
        "port": ANYTHING,
        "options": ANYTHING | st.dictionaries(st.sampled_from(["max-num-seqs", "max_model_len"]), ANYTHING),
    },
)
HOST = st.fixed_dictionaries(
    {},
    optional={
        "vllm_engines": ANYTHING | st.lists(ENGINE | ANYTHING, max_size=3),
        "ringmaster_models": ANYTHING | st.fixed_dictionaries({"m": ANYTHING}),
        "ringmaster_card": ANYTHING,
        "vllm_engine": ANYTHING,
        "ansible_host": ANYTHING,
        "ringmaster_address": ANYTHING,
    },
)


@given(st.dictionaries(st.sampled_from(["a", "b"]), HOST))
def test_any_variables_give_a_document_or_a_named_error(hostvars: dict[str, Any]) -> None:
    groups = {"engines": ["a", "b"], "gateways": ["a"]}
    with contextlib.suppress(MembersError):
        document = members(groups, hostvars)
        assert json.loads(json.dumps(document)) == document
        assert document["engines"] == sorted(document["engines"], key=lambda engine: engine["name"])


@given(st.text())
def test_pool_names_are_what_haproxy_takes(model: str) -> None:
    assert re.fullmatch(r"pool_[A-Za-z0-9_.-]*", pool_name(model))
    assert len(pool_name(model)) == len(model) + 5


def test_pool_name_keeps_what_haproxy_takes() -> None:
    assert pool_name("Qwen/Qwen2-7B_v1.5") == "pool_Qwen_Qwen2-7B_v1.5"


def test_option_takes_both_spellings() -> None:
    assert option({"max-num-seqs": 1}, "max-num-seqs") == 1
    assert option({"max_num_seqs": 2}, "max-num-seqs") == 2
    assert option({}, "max-num-seqs") is None


@pytest.mark.parametrize("value", [0, -1, 11, "x", "", "1.0", 1.0, True, None, [], "١"])
def test_whole_number_takes_only_numbers_in_range(value: Any) -> None:
    assert whole_number(value, 1, 10) is None


def test_each_engine_host_has_an_agent_unless_it_is_not_wanted() -> None:
    document = members(
        {"engines": ["b", "a", "c", "d"], "gateways": ["e"]},
        {
            "a": engine_host(agent_http_port="9000"),
            "b": engine_host(ansible_host="10.0.0.2"),
            "c": engine_host(ringmaster_agents=False),
            "d": engine_host(ringmaster_agents="no"),
            "e": {},
        },
    )
    assert document["agents"] == [
        {"host": "a", "address": "a", "port": 9000},
        {"host": "b", "address": "10.0.0.2", "port": 8409},
    ]


@pytest.mark.parametrize(
    "variables",
    [{"agent_http_port": 0}, {"agent_http_port": 65536}, {"agent_http_port": None}, {"ringmaster_agents": "perhaps"}],
)
def test_wrong_variable_of_an_agent_is_named(variables: dict[str, Any]) -> None:
    with pytest.raises(MembersError, match=rf"a: {next(iter(variables))}"):
        members({"engines": ["a"]}, {"a": engine_host(**variables)})
