# SPDX-License-Identifier: GPL-3.0-or-later
"""Command lines taken apart as argparse and vLLM's preparation before it do."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ansible_collections.ringmaster.inference.plugins.module_utils.engine_flags_catalogue import Catalogue, built_in
from ansible_collections.ringmaster.inference.plugins.module_utils.engine_flags_words import (
    CommandLine,
    CommandLineError,
    from_options,
    read,
    serve_words,
    split,
)


def catalogue() -> Catalogue:
    found = built_in("vllm", "0.32.0")
    assert found is not None
    return found


def line(text: str) -> CommandLine:
    return read(catalogue(), split(text))


def values(text: str) -> dict[str, list[str]]:
    return {given.option.flag if given.option else given.written: given.values for given in line(text).given}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("m --max-num-seqs 4", {"--max-num-seqs": ["4"]}),
        ("m --max-num-seqs=4", {"--max-num-seqs": ["4"]}),
        ("m --max_num_seqs=4_0", {"--max-num-seqs": ["4_0"]}),
        ("m -tp 4 -pp=2", {"--tensor-parallel-size": ["4"], "--pipeline-parallel-size": ["2"]}),
        ("m -n2 -r0", {"--nnodes": ["2"], "--node-rank": ["0"]}),
        ("m -q awq", {"--quantization": ["awq"]}),
        ("m -O3", {"--optimization-level": ["3"]}),
        ("m -O=2", {"--optimization-level": ["2"]}),
        ("m -O 1", {"--optimization-level": ["1"]}),
        ("m --api-key a b --port 1", {"--api-key": ["a", "b"], "--port": ["1"]}),
        ("m --api-key=a", {"--api-key": ["a"]}),
        ("m --hf-token --port 1", {"--hf-token": [], "--port": ["1"]}),
        ("m --seed -1", {"--seed": ["-1"]}),
        ("m --chat-template '-a b'", {"--chat-template": ["-a b"]}),
        ("m --compilation-config.mode 3", {"--compilation-config": ['{"mode": 3}']}),
        (
            "m -cc.pass_config.fuse_norm_quant=true -cc.mode=3",
            {"--compilation-config": ['{"pass_config": {"fuse_norm_quant": true}, "mode": 3}']},
        ),
        ("m --compilation_config.custom_ops+ a,b", {"--compilation-config": ['{"custom_ops": ["a", "b"]}']}),
        ("m --kv-transfer-config.kv_port 14k", {"--kv-transfer-config": ['{"kv_port": 14000}']}),
        ("m --max-num-batched 1", {"--max-num-batched-tokens": ["1"]}),
    ],
)
def test_options_and_values(text: str, expected: dict[str, list[str]]) -> None:
    assert values(text) == expected
    assert line(text).model == "m"
    assert not line(text).stray


@pytest.mark.parametrize(
    ("text", "model", "stray"),
    [
        ("m", "m", []),
        ("--port 1 m", "m", []),
        ("--port 1 m --seed 2", "m", []),
        ("m other", "m", ["other"]),
        ("m --enforce-eager true", "m", ["true"]),
        ("-- m", "m", []),
        ("m -- --port", "m", ["--port"]),
        ("m --port 1 --", "m", ["--"]),
        ("--served-model-name a b", None, []),
        ("", None, []),
    ],
)
def test_what_belongs_to_no_option(text: str, model: str | None, stray: list[str]) -> None:
    found = line(text)
    assert (found.model, found.stray) == (model, stray)


def test_negations_and_abbreviations() -> None:
    found = {given.written: given for given in line("m --no-enable-prefix-c --enforce-eag --enable-log").given}
    assert found["--no-enable-prefix-c"].negated
    assert found["--enforce-eag"].option == catalogue().options["--enforce-eager"]
    assert found["--enable-log"].option is None
    assert "--enable-log-requests" in found["--enable-log"].candidates


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("m --port", "given none"),
        ("m --port --seed 1", "given none"),
        ("m --port -- 1", "given none"),
        ("m --enforce-eager=true", "takes no value"),
        ("m --api-key", "given none"),
        ("m --watermark -0.5", "a word with a dot"),
    ],
)
def test_a_wrong_number_of_values(text: str, problem: str) -> None:
    assert problem in " ".join(given.problem or "" for given in line(text).given)


def test_the_model_option_comes_first() -> None:
    found = line("--port 1 --model q --seed 2")
    assert [given.written for given in found.given] == ["--model", "--port", "--seed"]
    assert found.model is None


@pytest.mark.parametrize(
    ("text", "needs"),
    [
        ("--served-model-name a", True),
        ("--port 1 --served_model_name=a", True),
        ("--served-model-name a --model m", False),
        ("--served-model-name a --config f.yaml", False),
        ("m --served-model-name a", False),
        ("python -m vllm.entrypoints.openai.api_server --served-model-name a", False),
    ],
)
def test_a_served_name_wants_the_model_first(text: str, needs: bool) -> None:
    assert line(text).needs_model is needs


@pytest.mark.parametrize(
    ("text", "environment", "program", "rest"),
    [
        ("vllm serve m --seed 1", {}, ("vllm", "serve"), ["m", "--seed", "1"]),
        ("A=1 env B=x=y /opt/v/bin/vllm serve m", {"A": "1", "B": "x=y"}, ("env", "/opt/v/bin/vllm", "serve"), ["m"]),
        ("python3 -m vllm.entrypoints.openai.api_server --seed 1", {}, None, ["--seed", "1"]),
        ("--seed 1", {}, (), ["--seed", "1"]),
        ("A=1", {}, (), ["A=1"]),
    ],
)
def test_the_program_before_the_options(
    text: str, environment: dict[str, str], program: tuple[str, ...] | None, rest: list[str]
) -> None:
    found = line(text)
    assert found.environment == environment
    assert program is None or found.program == program
    assert serve_words(split(text)) == rest


def test_text_is_split_as_a_shell_does() -> None:
    assert split("vllm serve \\\n  m --chat-template 'a b' \\\r\n --seed 1") == [
        *("vllm", "serve", "m", "--chat-template", "a b", "--seed", "1")
    ]
    assert split(["a b", 1]) == ["a b", "1"]
    with pytest.raises(CommandLineError):
        split("vllm serve 'm")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"max-num-seqs": 256}, ["--max-num-seqs", "256"]),
        ({"max_model_len": "32k"}, ["--max-model-len", "32k"]),
        ({"enforce-eager": True, "enable-prefix-caching": False}, ["--no-enable-prefix-caching", "--enforce-eager"]),
        ({"compilation-config": {"mode": 3}}, ["--compilation-config", '{"mode": 3}']),
        ({"compilation-config.pass_config": 1}, ["--compilation-config.pass_config", "1"]),
        ({"lora-modules": ["a=b", "c=d"]}, ["--lora-modules", "a=b", "c=d"]),
        ({"quantization": None}, []),
        ({}, []),
    ],
)
def test_words_of_options(options: dict[str, Any], words: list[str]) -> None:
    assert from_options(options) == words


_WORDS = st.lists(
    st.sampled_from(
        [*catalogue().by_name, "--", "-", "-O", "-0.5", "-x", "m", "--no-", "--a.b", "-cc.x+", "=", "--model"]
    )
    | st.text(max_size=12),
    max_size=8,
)


@given(_WORDS)
def test_no_word_is_lost(words: list[str]) -> None:
    """Whatever is given, it is read, and each option that is known is with its values or with a problem."""
    found = read(catalogue(), words)
    for given_option in found.given:
        option = given_option.option
        if option is not None and option.takes == "one" and given_option.problem is None:
            assert len(given_option.values) == 1


@given(st.text(max_size=80))
def test_any_text_is_split_or_refused(text: str) -> None:
    try:
        words = split(text)
    except CommandLineError:
        return
    read(catalogue(), words)
