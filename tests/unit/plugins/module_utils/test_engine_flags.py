# SPDX-License-Identifier: GPL-3.0-or-later
"""Verdicts: the start command of the field notes line by line, other versions, harm and contradictions."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ansible_collections.ringmaster.inference.plugins.module_utils.engine_flags import (
    MASK,
    Verdict,
    judge,
    render,
    secret_names,
    secrets,
    shown_words,
)
from ansible_collections.ringmaster.inference.plugins.module_utils.engine_flags_catalogue import Catalogue, built_in
from ansible_collections.ringmaster.inference.plugins.module_utils.engine_flags_words import split

FIELD_NOTES = """
python -m vllm.entrypoints.api_server --model qwen/Qwen2-72B-Instruct --tensor-parallel-size 4
  --pipeline-parallel-size 2 --max-model-len 32768 --max-num-batched-tokens 8192 --max-num-seqs 256
  --gpu-memory-utilization 0.85 --enforce-eager --disable-custom-all-reduce --block-size 32 --enable-chunked-prefill
  --num-scheduler-steps 4 --quantization awq --kv-cache-dtype fp16 --seed 42 --port 8000 --host 0.0.0.0
  --disable-nccl-p2p
"""


def verdicts(text: str, version: str = "0.32.0", **environment: str) -> dict[str, Verdict]:
    return {verdict.flag: verdict for verdict in judge(version, split(text), environment=environment).verdicts}


def refused(text: str, version: str = "0.32.0", **environment: str) -> list[str]:
    return [verdict.flag for verdict in judge(version, split(text), environment=environment).refused]


def test_the_start_command_of_the_field_notes() -> None:
    found = verdicts(FIELD_NOTES, NCCL_IB_TIMEOUT="60", NCCL_P2P_DISABLE="1")
    assert {flag: (verdict.verdict, verdict.refused) for flag, verdict in found.items()} == {
        "vllm.entrypoints.api_server": ("removed", True),
        "--model": ("deprecated", False),
        "--tensor-parallel-size": ("ok", False),
        "--pipeline-parallel-size": ("ok", False),
        "--max-model-len": ("ok", False),
        "--max-num-batched-tokens": ("ok", False),
        "--max-num-seqs": ("ok", False),
        "--gpu-memory-utilization": ("ok", False),
        "--enforce-eager": ("harmful", True),
        "--disable-custom-all-reduce": ("ok", False),
        "--block-size": ("ok", False),
        "--enable-chunked-prefill": ("ok", False),
        "--num-scheduler-steps": ("removed", True),
        "--quantization": ("ok", False),
        "--kv-cache-dtype": ("not_a_choice", True),
        "--seed": ("ok", False),
        "--port": ("ok", False),
        "--host": ("harmful", False),
        "--disable-nccl-p2p": ("unknown", True),
        "NCCL_IB_TIMEOUT": ("out_of_range", True),
        "NCCL_P2P_DISABLE": ("harmful", True),
    }
    assert found["--num-scheduler-steps"].since == "0.10.1"
    assert found["--kv-cache-dtype"].nearest == ["float16"]
    assert "NCCL_P2P_LEVEL" in found["--disable-nccl-p2p"].reason
    assert "never" not in found["--seed"].reason
    assert "backend chooses" in found["--block-size"].reason


def test_the_message_names_each_refused_option_once() -> None:
    text = render(judge("0.32.0", split(FIELD_NOTES)))
    assert text.startswith("vllm 0.32.0 is not to be started so: 5 things refused. The running engine was not touched.")
    assert text.count("expected: ") == text.count("to do: ") == text.count("found: ") == 5
    assert "found:    --kv-cache-dtype fp16" in text
    assert "--max-num-seqs" not in text


@pytest.mark.parametrize(
    ("text", "flag", "verdict", "instead"),
    [
        ("m --disable-log-requests", "--disable-log-requests", "renamed", "--no-enable-log-requests"),
        ("m --worker-use-ray", "--worker-use-ray", "renamed", "--distributed-executor-backend ray"),
        ("m --task embed", "--task", "renamed", "--runner"),
        ("m --swap_space 4", "--swap-space", "removed", ""),
        ("m --device cuda", "--device", "removed", ""),
        ("m --max-seq-len-to-capture 8192", "--max-seq-len-to-capture", "removed", ""),
        ("m --max-num-partial-prefills=2", "--max-num-partial-prefills", "renamed", "--long-prefill-token-threshold"),
        ("m --no-calculate-kv-scales", "--no-calculate-kv-scales", "removed", ""),
        ("m --override-pooler-config.a 1", "--override-pooler-config", "renamed", "--pooler-config"),
    ],
)
def test_removed_and_renamed(text: str, flag: str, verdict: str, instead: str) -> None:
    found = verdicts(text)[flag]
    assert (found.verdict, found.instead, found.refused) == (verdict, instead, True)
    assert found.reason


@pytest.mark.parametrize(
    ("text", "version", "flag", "verdict", "is_refused"),
    [
        ("m --num-scheduler-steps 4", "0.9.2", "--num-scheduler-steps", "ok", False),
        ("m --num-scheduler-steps 4 --enable-chunked-prefill", "0.6.0", "--num-scheduler-steps", "contradictory", True),
        ("m --disable-log-requests", "0.10.0", "--disable-log-requests", "ok", False),
        ("m --disable-log-requests", "0.10.1", "--disable-log-requests", "deprecated", False),
        ("m --device cpu", "0.10.0", "--device", "deprecated", False),
        ("m --nnodes 2", "0.9.2", "--nnodes", "not_yet", True),
        ("m --block-size 64", "0.6.3", "--block-size", "not_a_choice", True),
        ("m --block-size 64", "0.9.0", "--block-size", "ok", False),
        ("m --block-size 48", "0.32.0", "--block-size", "ok", False),
        ("m --kv-cache-dtype float16", "0.12.0", "--kv-cache-dtype", "not_a_choice", True),
        ("m --swap-space 4", "0.17.1", "--swap-space", "not_known", False),
        ("m --max-num-seqs many", "0.31.0", "--max-num-seqs", "ok", False),
        ("m --of-tomorrow 1", "0.40.0", "--of-tomorrow", "not_known", False),
        ("m --swap-space 1", "0.40.0", "--swap-space", "removed", True),
        ("m --disable-nccl-p2p", "0.40.0", "--disable-nccl-p2p", "unknown", True),
        ("m --log-config-file f", "0.32.0", "--log-config-file", "deprecated", False),
    ],
)
def test_other_versions(text: str, version: str, flag: str, verdict: str, is_refused: bool) -> None:
    found = verdicts(text, version)[flag]
    assert (found.verdict, found.refused) == (verdict, is_refused)


def test_a_short_option_is_shown_as_it_was_written() -> None:
    found = verdicts("m -n2 -pp 2 --master-addr a")["--nnodes"]
    assert (found.written, found.values, found.reason) == ("-n", ["2"], "")


def test_the_server_for_demonstrations_is_refused_where_it_still_is() -> None:
    found = verdicts("python -m vllm.entrypoints.api_server", "0.9.0")["vllm.entrypoints.api_server"]
    assert (found.verdict, found.refused, found.instead) == ("harmful", True, "vllm serve")
    old = verdicts("python -m vllm.entrypoints.openai.api_server")["vllm.entrypoints.openai.api_server"]
    assert (old.verdict, old.refused) == ("deprecated", False)


def installed(version: str, without: str) -> Catalogue:
    whole = built_in("vllm", "0.32.0")
    assert whole is not None
    options = {flag: option for flag, option in whole.options.items() if flag != without}
    by_name = {name: option for name, option in whole.by_name.items() if option.flag != without}
    return dataclasses.replace(whole, version=version, options=options, by_name=by_name)


def test_an_installed_engine_without_an_option_that_others_had() -> None:
    judgement = judge("0.34.0", ["m", "--log-config-file", "f"], installed("0.34.0", "--log-config-file"))
    (verdict,) = judgement.refused
    assert verdict.verdict == "renamed"
    assert verdict.reason.startswith("0.32.0 had it, the installed 0.34.0 has not")


@pytest.mark.parametrize(
    ("text", "flag", "verdict", "nearest"),
    [
        ("m --max-num-sequences 4", "--max-num-sequences", "unknown", "--max-num-seqs"),
        ("m --gpu-memory-utilisation 0.9", "--gpu-memory-utilisation", "unknown", "--gpu-memory-utilization"),
        ("m --enable-log", "--enable-log", "ambiguous", "--enable-log-deltas"),
        ("m --tool-call-parser herms", "--tool-call-parser", "not_a_choice", "hermes"),
    ],
)
def test_what_may_have_been_meant(text: str, flag: str, verdict: str, nearest: str) -> None:
    found = verdicts(text)[flag]
    assert found.verdict == verdict
    assert found.nearest[0] == nearest


@pytest.mark.parametrize(
    ("text", "flags"),
    [
        ("m --enable-log-outputs", ["--enable-log-outputs"]),
        ("m --enable-log-outputs --enable-log-requests", ["--enable-log-outputs"]),
        ("m --no-enable-log-outputs", []),
        ("m -O0", ["--optimization-level"]),
        ("m -O3", []),
        ("m --api-key a", ["--api-key"]),
        ("m --load-format dummy", ["--load-format"]),
        ("m --disable-log-stats", ["--disable-log-stats"]),
        ("m --tool-server demo", ["--tool-server"]),
        ("m --trust-remote-code", []),
        ("m --log-level DEBUG", []),
        ("m --log-level DEBUG --enable-log-requests", ["--log-level"]),
        ("m --enable-auto-tool-choice", ["--enable-auto-tool-choice"]),
        ("m --enable-auto-tool-choice --tool-call-parser hermes", []),
        ("m --tool-call-parser ours", ["--tool-call-parser"]),
        ("m --tool-call-parser ours --tool-parser-plugin ours.py", []),
        ("m --max-num-seqs 512 --max-num-batched-tokens 256", ["--max-num-seqs"]),
        ("m --max-num-batched-tokens 1k --max-model-len 2k --no-enable-chunked-prefill", ["--max-num-batched-tokens"]),
        ("m --max-num-batched-tokens 1k --max-model-len 2k", []),
        ("m --long-prefill-token-threshold 9 --max-model-len auto", []),
        ("m --max-loras 4 --max-cpu-loras 2 --enable-lora", ["--max-loras"]),
        ("m --headless --api-server-count 2", ["--headless"]),
        ("m --headless --api-server-count 0", []),
        ("m --data-parallel-hybrid-lb --data-parallel-rank 0", ["--data-parallel-rank"]),
        ("m -dp 2 -dpn 2", ["--data-parallel-rank"]),
        ("m --data-parallel-external-lb", ["--data-parallel-external-lb"]),
        ("m --numa-bind-nodes 0", ["--numa-bind-nodes"]),
        ("m --enable-eplb --enable-expert-parallel", ["--enable-eplb"]),
        ("m --enable-eplb --enable-expert-parallel -tp 2", []),
        ("m -tp 4 -dcp 3", ["--tensor-parallel-size"]),
        ("m --nnodes 2 -pp 2 --node-rank 1", []),
        ("m --nnodes 2 -pp 3", ["--nnodes"]),
        ("m --nnodes 2 -pp 2 --node-rank 2", ["--node-rank"]),
        ("m --nnodes 2 -pp 2 --distributed-executor-backend ray", ["--distributed-executor-backend"]),
        ("m --spec-method ngram --speculative-config.method ngram", ["--spec-method"]),
        ("m --device-ids 0,0", ["--device-ids"]),
        ("m --device-ids 0,1", []),
        ("m --ssl-keyfile k", ["--ssl-keyfile"]),
        ("m --ssl-keyfile k --ssl-certfile c", []),
        ("m --seed 1 --seed 2", ["--seed"]),
        ("m --seed 1 --seed 1", []),
        ("m --enable-lora --no-enable-lora", ["--enable-lora"]),
        ("m --middleware a --middleware b", []),
        ('m --compilation-config {"mode":3} -cc.mode 2', ["--compilation-config"]),
        ("m --config=f.yaml", ["--config"]),
        ("m --config f.yaml", []),
        ("m --help", ["--help"]),
        ("--served-model-name a", ["--served-model-name"]),
        ("m --model other", ["m"]),
    ],
)
def test_harm_and_contradictions(text: str, flags: list[str]) -> None:
    assert refused(text.replace('{"', "'{\"").replace("3}", "3}'") if "{" in text else text) == flags


@pytest.mark.parametrize(
    ("variable", "value", "is_refused"),
    [
        ("CUDA_LAUNCH_BLOCKING", "1", True),
        ("CUDA_LAUNCH_BLOCKING", "0", False),
        ("VLLM_SERVER_DEV_MODE", "1", True),
        ("VLLM_TRACE_FUNCTION", "1", True),
        ("VLLM_DEBUG_LOG_API_SERVER_RESPONSE", "True", True),
        ("VLLM_DEBUG_LOG_API_SERVER_RESPONSE", "False", False),
        ("VLLM_LOGGING_LEVEL", "debug", False),
        ("NCCL_CROSS_NIC", "2", False),
    ],
)
def test_environment(variable: str, value: str, is_refused: bool) -> None:
    assert (variable in refused("m", **{variable: value})) is is_refused


def test_prompts_in_the_log_are_refused_by_the_variable_as_well() -> None:
    assert refused("m --enable-log-requests", VLLM_LOGGING_LEVEL="debug") == ["VLLM_LOGGING_LEVEL"]
    assert refused("VLLM_LOGGING_LEVEL=debug vllm serve m --enable-log-requests") == ["VLLM_LOGGING_LEVEL"]


def test_harm_that_is_accepted_is_told_and_does_not_refuse() -> None:
    words = ["m", "--enforce-eager", "--max-num-seqs", "x"]
    judgement = judge(
        "0.32.0",
        words,
        environment={"NCCL_P2P_DISABLE": "1"},
        accepted=["enforce_eager", "NCCL_P2P_DISABLE", "max-num-seqs"],
    )
    assert [verdict.verdict for verdict in judgement.verdicts] == ["ok", "harmful", "wrong_type", "harmful"]
    assert [verdict.flag for verdict in judgement.refused] == ["--max-num-seqs"]


def test_an_engine_for_cpus_has_no_graphs_to_lose() -> None:
    assert refused("m --enforce-eager", "0.32.0+cpu") == []
    assert verdicts("m --enforce-eager", "0.32.0+cpu")["--enforce-eager"].verdict == "harmful"


def test_the_environment_tells_of_an_engine_for_cpus_too() -> None:
    assert refused("m --enforce-eager", VLLM_TARGET_DEVICE="cpu") == []


def test_a_switch_without_a_negation_is_not_corrected_to_its_opposite() -> None:
    found = verdicts("m --no-headless")["--no-headless"]
    assert (found.verdict, found.refused, found.nearest) == ("unknown", True, [])
    assert found.to_do == "leave it out"


def test_secrets_are_not_shown() -> None:
    text = "m --api-key s3cret-one --hf_token=s3cret-two --api-keyy s3cret-three --tokenizer shown"
    judgement = judge(
        "0.32.0", split(text), environment={"VLLM_API_KEY": "s3cret-four", "NCCL_API_TOKEN": "s3cret-five"}
    )
    assert "s3cret" not in render(judgement)
    assert "s3cret" not in str([verdict.document() for verdict in judgement.verdicts])
    assert [MASK] in [verdict.values for verdict in judgement.verdicts]
    assert verdicts("m --max-num-batched-tokens 8192")["--max-num-batched-tokens"].values == ["8192"]
    assert ["shown"] in [verdict.values for verdict in judgement.verdicts]
    assert set(secrets(split(text), {"VLLM_API_KEY": "s3cret-four"})) == {
        *("s3cret-one", "s3cret-two", "s3cret-three", "s3cret-four")
    }


def test_a_name_is_secret_by_its_whole_parts() -> None:
    """The engine counts tokens and caches keys; the variables that say how many are no secrets."""
    environment = {
        "TOKENIZERS_PARALLELISM": "false",
        "VLLM_MAX_TOKENS_PER_EXPERT_FP4_MOE": "16384",
        "VLLM_DISABLED_KERNELS": "a",
        "MONKEY": "b",
    }
    assert secrets(["m"], environment) == []
    for name in ("HF_TOKEN", "VLLM_API_KEY", "AWS_SECRET_ACCESS_KEY", "DB_PASSWORD", "TOKEN"):
        assert secrets(["m"], environment | {name: "s3cret"}) == ["s3cret"], name
        assert secret_names({}, environment | {name: "s3cret"}) == [name]


def test_only_a_secret_options_own_value_is_masked_among_the_words() -> None:
    options = {"hf-token": "false", "max-num-seqs": 4, "a": {"b": False}, "api_key": ["x", "false"], "c-token": True}
    assert shown_words(options) == [
        *("--a", '{"b": false}', "--api-key", MASK, MASK, "--c-token", "--hf-token", MASK, "--max-num-seqs", "4")
    ]
    assert secret_names(options, {}) == ["--api-key", "--hf-token"]


def test_long_and_hostile_values_do_not_break_the_message() -> None:
    text = render(judge("0.32.0", ["m", "--max-num-seqs", "1\n2. --port: ok" + "x" * 5000, "--\x1b[31m", "4"]))
    assert len(text) < 3000
    assert "\x1b" not in text
    assert "\n2. --port" not in text


@given(
    st.sampled_from(["0.5.0", "0.10.2", "0.32.0", "0.99"]),
    st.lists(st.text(max_size=20) | st.sampled_from(["--max-num-seqs", "--swap-space", "-tp", "4", "--"]), max_size=6),
    st.dictionaries(st.text(max_size=12) | st.sampled_from(["NCCL_IB_TC"]), st.text(max_size=12), max_size=3),
)
def test_anything_is_judged(version: str, words: list[str], environment: dict[str, str]) -> None:
    judgement = judge(version, words, environment=environment)
    for verdict in judgement.refused:
        assert verdict.verdict != "ok"
        assert verdict.expected
        assert verdict.to_do
    assert render(judgement)
