# SPDX-License-Identifier: GPL-3.0-or-later
"""vLLM's options, and what is made of them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from standin_engine import cards, flags
from standin_engine.config import Adapter, Config, ConfigError, build

FLAGS: dict[str, dict[str, Any]] = json.loads(flags.FLAGS_FILE.read_text())
PARSER = flags.build_parser()
FITTING = {
    "integer": "1",
    "number": "0.5",
    "size": "32k",
    "size_or_auto": "auto",
    "json": '{"a": 1}',
    "object": "{}",
    "json_or_text": "text",
    "lowered": "Some-Name",
    "comma_list": "0,1",
    "text": "text",
    "lora_modules": "a=/x",
}
CATALOGUE = Path(__file__).resolve().parents[3] / "tests" / "run" / "engine_catalogue.py"


def configure(*arguments: str, **environment: str) -> Config:
    return build(flags.parse(["some/model", *arguments]), environment)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--no-such-flag"], "unrecognized arguments: --no-such-flag"),
        (["--num-scheduler-steps", "4"], "unrecognized arguments: --num-scheduler-steps"),
        (["--disable-nccl-p2p"], "unrecognized arguments: --disable-nccl-p2p"),
        (["--kv-cache-dtype", "fp16"], "argument --kv-cache-dtype: invalid choice: 'fp16'"),
        (["--max-num-seqs", "many"], "argument --max-num-seqs: invalid int value: 'many'"),
        (
            ["--gpu-memory-utilization", "most"],
            "argument --gpu-memory-utilization/--device-memory-utilization: invalid float value: 'most'",
        ),
        (["--max-lora-rank", "7"], "argument --max-lora-rank: invalid choice: 7"),
        (["--kv-transfer-config", "{"], "argument --kv-transfer-config: Value { cannot be converted"),
        (["--port"], "argument --port: expected one argument"),
        (["--max-model-len", "1.5K"], "decimals are not allowed with binary suffixes"),
        (["--enforce-eager=yes"], "argument --enforce-eager/--no-enforce-eager: ignored explicit argument 'yes'"),
    ],
)
def test_what_vllm_refuses_is_refused_as_argparse_does(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        flags.parse(["some/model", *arguments])
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err


def test_the_table_is_made_from_the_catalogue_of_engine_flags() -> None:
    made = subprocess.run([sys.executable, str(CATALOGUE), "--standin"], check=True, capture_output=True, text=True)
    assert flags.FLAGS_FILE.read_text(encoding="utf-8") == made.stdout


def test_every_flag_of_vllm_takes_a_fitting_value() -> None:
    for flag, entry in FLAGS.items():
        values = []
        if entry.get("takes") != 0:
            values = [str(choice) for choice in entry.get("choices", [FITTING[entry.get("kind", "text")]])]
        for name in [flag, *entry.get("names", [])]:
            for words in [[name, value] for value in values] or [[name]]:
                (found,) = {key for key, value in vars(PARSER.parse_args(words)).items() if value is not None}
                assert found == flag[2:].replace("-", "_")
        if entry.get("negatable"):
            assert vars(PARSER.parse_args(["--no-" + flag[2:]]))[found] is False


@pytest.mark.parametrize("flag", [flag for flag, entry in FLAGS.items() if entry.get("takes") in (None, "+")])
def test_a_flag_without_its_value_is_refused(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        PARSER.parse_args(["m", flag])
    assert stopped.value.code == 2
    assert "expected" in capsys.readouterr().err


def test_short_names_dotted_fields_and_the_word_none_are_understood() -> None:
    words = ["m", "-tp", "4", "-O3", "--compilation-config.mode", "3", "-cc.cudagraph_mode=NONE", "--hf-token", "x"]
    options = flags.parse([*words, "--dcp-comm-backend", "None"])
    assert (options.tensor_parallel_size, options.optimization_level) == (4, "3")
    assert options.compilation_config == {"cudagraph_mode": "NONE"}  # as in vLLM, the last of several objects wins
    assert options.dcp_comm_backend is None
    assert flags.parse(["m", "-cc.custom_ops+", "a,b"]).compilation_config == {"custom_ops": ["a", "b"]}
    assert flags.parse(["m", "--kv_transfer_config.kv_role=kv_both"]).kv_transfer_config == {"kv_role": "kv_both"}


def test_options_of_the_field_notes_that_exist_are_taken() -> None:
    options = flags.parse(
        [
            *("qwen/Qwen2-72B-Instruct", "--tensor-parallel-size", "4", "--pipeline-parallel-size", "2"),
            *("--max-model-len", "32768", "--max-num-batched-tokens", "8192", "--max-num-seqs", "256"),
            *("--gpu-memory-utilization", "0.85", "--enforce-eager", "--disable-custom-all-reduce"),
            *("--block-size", "32", "--enable-chunked-prefill", "--quantization", "awq", "--seed", "42"),
            *("--port", "8000", "--host", "0.0.0.0"),
        ]
    )
    assert options.enforce_eager is True
    assert options.max_model_len == 32768


def test_underscores_negations_suffixes_and_lists_are_understood() -> None:
    options = flags.parse(
        ["m", "--max_model_len=8k", "--no-enable-prefix-caching", "--served-model-name", "a", "b", "--seed", "1"]
    )
    assert options.max_model_len == 8000
    assert options.enable_prefix_caching is False
    assert options.served_model_name == ["a", "b"]
    assert flags.size("8K") == 8192
    assert flags.size("25.6k") == 25600
    assert flags.size("auto") == -1


def test_without_options_vllms_defaults_hold() -> None:
    config = configure()
    assert (config.max_num_seqs, config.max_num_batched_tokens, config.block_size) == (256, 2048, 16)
    assert (config.max_model_len, config.gpu_memory_utilization) == (32768, 0.92)
    assert config.served_names == ("some/model",)
    assert config.prefix_caching
    assert not config.trace


def test_a_smaller_card_and_a_smaller_share_leave_fewer_blocks() -> None:
    large, small, share = (
        config.blocks
        for config in (
            configure(STANDIN_CARD="a100-80g"),
            configure(STANDIN_CARD="l40s"),
            configure("--gpu-memory-utilization", "0.5"),
        )
    )
    # 85.9 GB × 0.92 less 15.2 GB of weights and about 1.3 GB of the rest, at 57344 bytes a token.
    assert large * 16 == pytest.approx((85.9e9 * 0.92 - 15.2e9 - 1.3e9) / 57344, rel=0.01)
    assert small < large
    assert share < large


@pytest.mark.parametrize(
    ("arguments", "environment", "message"),
    [
        ([], {"STANDIN_CARD": "h100"}, "STANDIN_CARD is 'h100', known cards: a100-80g, l40s"),
        ([], {"STANDIN_TIME_SCALE": "0"}, "expected a number over 0"),
        ([], {"STANDIN_TIME_SCALE": "fast"}, "expected a number over 0"),
        (["--gpu-memory-utilization", "1.2"], {}, r"must be in \(0, 1\]"),
        (["--gpu-memory-utilization", "0.1"], {}, "No available memory for the cache blocks"),
        (["--max-model-len", "40000"], {}, "greater than the derived max_model_len"),
        (["--max-num-seqs", "0"], {}, "max_num_seqs must be at least 1"),
        (["--port", "65536"], {}, r"port must be in \[0, 65535\], got 65536"),
        (["--max-num-batched-tokens", "64"], {}, "must be greater than or equal to max_num_seqs"),
        (["--num-gpu-blocks-override", "10"], {}, "estimated maximum model length is 160"),
        (["--tensor-parallel-size", "0"], {}, "tensor_parallel_size has to be at least 1, got 0"),
        (["--lora-modules", "sql=/x"], {}, "needs --enable-lora"),
        (["--enable-lora", "--lora-modules", "sql"], {}, "Invalid format for --lora-modules"),
        (["--enable-lora", "--lora-modules", '{"name": "x"}'], {}, "Invalid JSON format"),
        (["--enable-lora", "--lora-modules", '{"name": 3, "path": "/x"}'], {}, "Invalid JSON format"),
        (["--enable-lora", "--lora-modules", "a=/x", "a=/y"], {}, "names an adapter twice"),
        (["--enable-lora", "--lora-modules", "some/model=/x"], {}, "name of the served model"),
    ],
)
def test_what_cannot_be_served_is_refused(arguments: list[str], environment: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        configure(*arguments, **environment)


def test_adapters_are_read_in_both_forms() -> None:
    config = configure(
        "--enable-lora", "--lora-modules", "sql=/a", '{"name": "b", "path": "/b", "base_model_name": "m"}'
    )
    assert config.adapters == (Adapter("sql", "/a"), Adapter("b", "/b", "m"))


def test_the_longest_context_can_be_left_to_the_card() -> None:
    assert configure("--max-model-len", "auto", "--num-gpu-blocks-override", "100").max_model_len == 1600


def test_the_key_comes_from_the_flag_the_environment_or_the_credential_in_this_order(tmp_path: Path) -> None:
    (tmp_path / "api-key").write_text("from-file\n")
    place = {"CREDENTIALS_DIRECTORY": str(tmp_path)}
    assert configure("--api-key", "flag", VLLM_API_KEY="variable", **place).api_keys == ("flag",)
    assert configure(VLLM_API_KEY="variable", **place).api_keys == ("variable",)
    assert configure(**place).api_keys == ("from-file",)
    assert configure().api_keys == ()
    (tmp_path / "api-key").write_text("\n")
    with pytest.raises(ConfigError, match="is empty"):
        configure(**place)
    (tmp_path / "api-key").write_bytes(b"\xff")
    with pytest.raises(ConfigError, match="cannot be read: UnicodeDecodeError"):
        configure(**place)


def test_a_step_takes_longer_with_more_sequences_more_tokens_and_longer_contexts() -> None:
    clock = cards.StepClock(cards.CARDS["a100-80g"], cards.MODEL)
    alone = clock.seconds(1, 1, 1000)
    assert 0.009 < alone < 0.012  # 15.2 GB of weights at 80 % of 2039 GB/s take 9.3 ms.
    assert clock.seconds(256, 256, 1000) > alone * 2
    assert clock.seconds(1, 2048, 0) > alone * 15
    assert clock.seconds(1, 1, 500_000) > alone * 2
    slow = cards.StepClock(cards.CARDS["l40s"], cards.MODEL)
    assert slow.seconds(1, 1, 1000) > alone * 2
    assert cards.StepClock(cards.CARDS["a100-80g"], cards.MODEL, 4.0).seconds(1, 1, 1000) == pytest.approx(4 * alone)
