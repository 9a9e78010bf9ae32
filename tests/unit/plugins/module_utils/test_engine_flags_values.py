# SPDX-License-Identifier: GPL-3.0-or-later
"""Values of options, as vLLM 0.32 reads them."""

from __future__ import annotations

import contextlib
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ansible_collections.ringmaster.inference.plugins.module_utils.engine_flags_catalogue import Option, built_in
from ansible_collections.ringmaster.inference.plugins.module_utils.engine_flags_values import (
    WrongValueError,
    nearest,
    read,
    values_in_words,
)

CATALOGUE = built_in("vllm", "0.32.0")


def option(flag: str) -> Option:
    assert CATALOGUE is not None
    return CATALOGUE.options[flag]


@pytest.mark.parametrize(
    ("flag", "word", "value"),
    [
        ("--max-num-seqs", "256", 256),
        ("--max-num-seqs", " 7 ", 7),
        ("--max-num-batched-tokens", "8k", 8000),
        ("--max-num-batched-tokens", "8K", 8192),
        ("--max-num-batched-tokens", "1.5k", 1500),
        ("--kv-cache-memory-bytes", "2T", 2 << 40),
        ("--kv-cache-memory-bytes", "None", None),
        ("--max-model-len", "AUTO", -1),
        ("--max-model-len", "32k", 32000),
        ("--gpu-memory-utilization", "1", 1.0),
        ("--gpu-memory-utilization", "1e-3", 0.001),
        ("--quantization", "", None),
        ("--tokenizer", "None", "None"),
        ("--kv-cache-dtype", "float16", "float16"),
        ("--max-lora-rank", "64", 64),
        ("--moe-backend", "Deep-GEMM", "deep_gemm"),
        ("--optimization-level", "3", "3"),
        ("--hf-overrides", "module.function", "module.function"),
        ("--hf-overrides", ' {"a": 1}\n', {"a": 1}),
        ("--allowed-origins", '["*"]', ["*"]),
        ("--speculative-config", "None", None),
        (
            "--compilation-config",
            '{"mode": 3, "cudagraph_num_of_warmups": "2"}',
            {"mode": 3, "cudagraph_num_of_warmups": "2"},
        ),
        ("--kv-transfer-config", '{"kv_port": 14k}', {"kv_port": 14000}),
        ("--lora-modules", "sql=adapters/sql", "sql=adapters/sql"),
        ("--lora-modules", '{"name": "sql", "path": "p"}', {"name": "sql", "path": "p"}),
    ],
)
def test_taken(flag: str, word: str, value: Any) -> None:
    assert read(option(flag), word) == value


@pytest.mark.parametrize(
    ("flag", "word", "verdict", "expected"),
    [
        ("--max-num-seqs", "many", "wrong_type", "a whole number"),
        ("--max-num-seqs", "1.5", "wrong_type", "a whole number"),
        ("--max-num-seqs", "32k", "wrong_type", "a whole number"),
        ("--max-num-seqs", "9" * 5000, "wrong_type", "a whole number"),
        ("--max-num-seqs", "0", "out_of_range", "1 or more"),
        ("--max-num-batched-tokens", "1.5K", "wrong_type", "a whole number"),
        ("--max-num-batched-tokens", "32 k", "wrong_type", "a whole number"),
        ("--max-num-batched-tokens", "auto", "wrong_type", "a whole number"),
        ("--gpu-memory-utilization", "85%", "wrong_type", "a number"),
        ("--gpu-memory-utilization", "0", "out_of_range", "over 0, 1 at most"),
        ("--gpu-memory-utilization", "1.01", "out_of_range", "over 0, 1 at most"),
        ("--gpu-memory-utilization", "nan", "out_of_range", "over 0, 1 at most"),
        ("--video-pruning-rate", "1", "out_of_range", "0 or more, under 1"),
        ("--tensor-parallel-size", "None", "wrong_type", "a whole number"),
        ("--kv-cache-dtype", "fp16", "not_a_choice", "one of auto"),
        ("--max-lora-rank", "48", "not_a_choice", "one of 1, 8"),
        ("--dtype", "Half", "not_a_choice", "one of auto"),
        ("--optimization-level", "4", "not_a_choice", "one of 0, 1, 2, 3"),
        ("--allowed-origins", "*", "wrong_type", "JSON"),
        ("--allowed-origins", "[" * 100_000, "wrong_type", "JSON"),
        ("--hf-overrides", "{a: 1}", "wrong_type", "text, or a JSON object"),
        ("--compilation-config", "3", "wrong_type", "a JSON object"),
        ("--compilation-config", '{"level": 3}', "unknown", "one of "),
        ("--compilation-config", '{"cudagraph_num_of_warmups": "two"}', "wrong_type", "integer"),
        ("--compilation-config", '{"dynamic_shapes_config": {"typ": 1}}', "unknown", "one of "),
        ("--kv-transfer-config", '{"kv_role": "both"}', "not_a_choice", "one of kv_"),
        ("--eplb-config", '{"window_size": 0}', "out_of_range", "over 0"),
        ("--lora-modules", "sql", "wrong_type", "NAME=PATH"),
        ("--lora-modules", '{"name": "sql"}', "wrong_type", "NAME=PATH"),
        ("--lora-modules", "a=b,c=d", "wrong_type", "NAME=PATH"),
    ],
)
def test_refused(flag: str, word: str, verdict: str, expected: str) -> None:
    with pytest.raises(WrongValueError) as refused:
        read(option(flag), word)
    assert refused.value.verdict == verdict
    assert refused.value.expected.startswith(expected)


def test_where_in_an_object() -> None:
    with pytest.raises(WrongValueError) as refused:
        read(option("--compilation-config"), '{"cudagraph_mod": 1}')
    assert refused.value.where == ".cudagraph_mod"
    assert refused.value.nearest[0] == "cudagraph_mode"


@pytest.mark.parametrize(
    ("word", "found"),
    [
        ("fp16", "float16"),
        ("BF16", "bfloat16"),
        ("fp8_e4m", "fp8_e4m3"),
        ("turboquant", "turboquant_k8v4"),
        ("", None),
        ("x" * 9999, None),
    ],
)
def test_what_may_have_been_meant(word: str, found: str | None) -> None:
    known = [str(choice) for choice in option("--kv-cache-dtype").choices]
    names = nearest(word, known)
    assert (names[0] if names else None) == found


@pytest.mark.parametrize(
    ("flag", "words"),
    [
        ("--enforce-eager", "no value"),
        ("--gpu-memory-utilization", "a number, over 0, 1 at most"),
        ("--lora-dtype", "one of auto, bfloat16, float16"),
        ("--api-key", "one or more times text"),
    ],
)
def test_values_in_words(flag: str, words: str) -> None:
    assert values_in_words(option(flag)) == words


@given(st.sampled_from(sorted(CATALOGUE.options) if CATALOGUE else []), st.text(max_size=60))
def test_any_word_is_read_or_refused(flag: str, word: str) -> None:
    with contextlib.suppress(WrongValueError):
        read(option(flag), word)


@given(
    st.sampled_from(["--compilation-config", "--kv-transfer-config", "--attention-config"]),
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
        max_leaves=6,
    ),
    st.data(),
)
def test_any_object_is_read_or_refused(flag: str, value: Any, data: st.DataObject) -> None:
    fields = option(flag).fields
    assert fields is not None
    name = data.draw(st.sampled_from(sorted(fields)))
    with contextlib.suppress(WrongValueError):
        assert read(option(flag), json.dumps({name: value}, ensure_ascii=False)) is not None
