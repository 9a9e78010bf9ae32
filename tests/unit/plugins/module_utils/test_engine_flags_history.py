# SPDX-License-Identifier: GPL-3.0-or-later
"""Which version had which option."""

from __future__ import annotations

import pytest

from ansible_collections.ringmaster.inference.plugins.module_utils.engine_flags_history import (
    ABSENT,
    PRESENT,
    SAMPLED,
    UNKNOWN,
    past,
    values_at,
)


@pytest.mark.parametrize(
    ("flag", "version", "state"),
    [
        ("--worker-use-ray", "0.6.6", PRESENT),
        ("--worker-use-ray", "0.7.0", ABSENT),
        ("--worker-use-ray", "0.32.0", ABSENT),
        ("--use-v2-block-manager", "0.6.4", PRESENT),
        ("--use-v2-block-manager", "0.9.2", PRESENT),
        ("--use-v2-block-manager", "0.32.0", ABSENT),
        ("--num-scheduler-steps", "0.8.4", PRESENT),
        ("--num-scheduler-steps", "0.10.0", PRESENT),
        ("--num-scheduler-steps", "0.10.1", ABSENT),
        ("--num-scheduler-steps", "0.10.1.1", ABSENT),
        ("--disable-log-requests", "0.10.0", PRESENT),
        ("--disable-log-requests", "0.10.2", PRESENT),
        ("--disable-log-requests", "0.32.0", ABSENT),
        ("--enable-log-requests", "0.10.0", ABSENT),
        ("--enable-log-requests", "0.10.1", PRESENT),
        ("--max-seq-len-to-capture", "0.10.1", PRESENT),
        ("--max-seq-len-to-capture", "0.10.2", UNKNOWN),
        ("--max-seq-len-to-capture", "0.11.0", ABSENT),
        ("--swap-space", "0.17.0", PRESENT),
        ("--swap-space", "0.17.1", UNKNOWN),
        ("--swap-space", "0.18.0", ABSENT),
        ("--device", "0.10.0", PRESENT),
        ("--device", "0.15.0", ABSENT),
        ("--task", "0.12.0", PRESENT),
        ("--task", "0.32.0", ABSENT),
        ("--nnodes", "0.11.0", ABSENT),
        ("--nnodes", "0.12.0", PRESENT),
        ("--max-num-seqs", "0.5.0", UNKNOWN),
        ("--max-num-seqs", "0.32.0", PRESENT),
        ("--max-num-seqs", "0.33.0", UNKNOWN),
        ("--disable-nccl-p2p", "0.5.0", ABSENT),
        ("--never-heard-of", "0.32.0", UNKNOWN),
    ],
)
def test_states(flag: str, version: str, state: str) -> None:
    assert past(flag, version).state == state


@pytest.mark.parametrize(
    ("flag", "version", "values"),
    [
        ("--block-size", "0.4.1", None),
        ("--block-size", "0.6.3", ("8", "16", "32")),
        ("--block-size", "0.7.0", ("8", "16", "32", "1", "64", "128")),
        ("--block-size", "0.9.0", ("1", "8", "16", "32", "64", "128")),
        ("--block-size", "0.10.1", ("1", "8", "16", "32", "64", "128")),
        ("--block-size", "0.32.0", None),
        ("--kv-cache-dtype", "0.4.2", ("auto", "fp8")),
        ("--kv-cache-dtype", "0.5.3", ("auto", "fp8", "fp8_e5m2", "fp8_e4m3")),
        ("--kv-cache-dtype", "0.10.0", ("auto", "fp8", "fp8_e4m3", "fp8_e5m2", "fp8_inc")),
        ("--port", "0.9.0", None),
    ],
)
def test_values(flag: str, version: str, values: tuple[str, ...] | None) -> None:
    assert values_at(flag, version) == values


def test_between_two_releases_the_values_of_both_count() -> None:
    assert "bfloat16" in (values_at("--kv-cache-dtype", "0.10.2") or ())
    assert "bfloat16" not in (values_at("--kv-cache-dtype", "0.10.1") or ())


@pytest.mark.parametrize("version", SAMPLED)
def test_at_releases_that_were_read_nothing_is_unknown(version: str) -> None:
    for flag in ("--swap-space", "--nnodes", "--max-num-seqs", "--calculate-kv-scales", "--task"):
        assert past(flag, version).state != UNKNOWN
