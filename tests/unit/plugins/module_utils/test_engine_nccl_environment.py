# SPDX-License-Identifier: GPL-3.0-or-later
"""NCCL's variables: ranges, forms, and what is for debugging only."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ansible_collections.ringmaster.inference.plugins.module_utils.nccl_environment import (
    NAMES,
    check,
    number,
    verdict,
)


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("NCCL_IB_TIMEOUT", "1", "ok"),
        ("NCCL_IB_TIMEOUT", "31", "ok"),
        ("NCCL_IB_TIMEOUT", "0x16", "ok"),
        ("NCCL_IB_TIMEOUT", "0", "out_of_range"),
        ("NCCL_IB_TIMEOUT", "32", "out_of_range"),
        ("NCCL_IB_TIMEOUT", "60", "out_of_range"),
        ("NCCL_IB_TIMEOUT", "-1", "out_of_range"),
        ("NCCL_IB_TIMEOUT", "20 ", "wrong_type"),
        ("NCCL_IB_TIMEOUT", "20s", "wrong_type"),
        ("NCCL_IB_TIMEOUT", "", "wrong_type"),
        ("NCCL_IB_RETRY_CNT", "7", "ok"),
        ("NCCL_IB_RETRY_CNT", "8", "out_of_range"),
        ("NCCL_IB_TC", "255", "ok"),
        ("NCCL_IB_TC", "256", "out_of_range"),
        ("NCCL_CROSS_NIC", "2", "ok"),
        ("NCCL_CROSS_NIC", "3", "out_of_range"),
        ("NCCL_IB_QPS_PER_CONNECTION", "128", "ok"),
        ("NCCL_IB_QPS_PER_CONNECTION", "0", "out_of_range"),
        ("NCCL_IB_HCA", "=mlx5_0:1,mlx5_1:1", "ok"),
        ("NCCL_IB_HCA", "^mlx5_2", "ok"),
        ("NCCL_IB_HCA", "^=mlx5_2", "ok"),
        ("NCCL_IB_HCA", "mlx5", "ok"),
        ("NCCL_IB_HCA", "mlx5_0, mlx5_1", "wrong_type"),
        ("NCCL_IB_HCA", "mlx5_0,", "wrong_type"),
        ("NCCL_IB_HCA", "", "wrong_type"),
        ("NCCL_IB_HCA", ",".join(f"mlx5_{index}" for index in range(32)), "ok"),
        ("NCCL_IB_HCA", ",".join(f"mlx5_{index}" for index in range(33)), "out_of_range"),
        ("NCCL_SOCKET_IFNAME", "=ens1f0", "ok"),
        ("NCCL_SOCKET_IFNAME", "^docker,lo", "ok"),
        ("NCCL_SOCKET_IFNAME", "a-name-of-sixteen", "wrong_type"),
        ("NCCL_SOCKET_IFNAME", "eth0 eth1", "wrong_type"),
        ("NCCL_NET_GDR_LEVEL", "phb", "ok"),
        ("NCCL_NET_GDR_LEVEL", "NVL", "not_a_choice"),
        ("NCCL_P2P_LEVEL", "NVL", "ok"),
        ("NCCL_P2P_LEVEL", "NODE", "not_a_choice"),
        ("NCCL_P2P_DISABLE", "0", "ok"),
        ("NCCL_P2P_DISABLE", "1", "harmful"),
        ("NCCL_P2P_DISABLE", "yes", "wrong_type"),
        ("NCCL_SHM_DISABLE", "1", "harmful"),
        ("NCCL_IB_DISABLE", "1", "harmful"),
        ("NCCL_ALGO", "Ring", "harmful"),
        ("NCCL_ALGO", "rings", "not_a_choice"),
        ("NCCL_ALGO", "allreduce:tree,ring;broadcast:ring", "harmful"),
        ("NCCL_PROTO", "Simple", "harmful"),
        ("NCCL_IB_GID_INDEX", "-1", "ok"),
        ("NCCL_IB_GID_INDEX", "3", "ok"),
        ("NCCL_IB_GID_INDEX", "256", "out_of_range"),
        ("NCCL_IB_ADDR_FAMILY", "AF_INET", "ok"),
        ("NCCL_IB_ADDR_FAMILY", "ipv4", "not_a_choice"),
        ("NCCL_IB_ADDR_RANGE", "192.168.0.0/16", "ok"),
        ("NCCL_IB_ADDR_RANGE", "192.168.0.0/33", "wrong_type"),
        ("NCCL_IB_ROCE_VERSION_NUM", "2", "ok"),
        ("NCCL_DEBUG", "INFO", "not_known"),
    ],
)
def test_values(name: str, value: str, expected: str) -> None:
    assert verdict(name, value).verdict == expected


def test_a_timeout_that_never_ends_is_refused_with_the_reason() -> None:
    (found,) = check({"NCCL_IB_TIMEOUT": "60", "PATH": "/bin"})
    assert found.refused
    assert found.expected == "a whole number from 1 to 31"
    assert "hangs" in found.reason


def test_a_fixed_gid_index_is_taken_with_a_warning() -> None:
    found = verdict("NCCL_IB_GID_INDEX", "3")
    assert not found.refused
    assert "depends on" in found.reason


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("0", 0),
        ("024", 20),
        ("0X1f", 31),
        ("-1", -1),
        ("+5", 5),
        ("09", None),
        ("1_0", None),
        ("٣", None),
        ("9" * 30, None),
    ],
)
def test_numbers_are_read_as_c_does(text: str, expected: int | None) -> None:
    assert number(text) == expected


@given(st.sampled_from([*NAMES, "NCCL_OTHER"]), st.text(max_size=40))
def test_any_value_gets_a_verdict(name: str, value: str) -> None:
    found = verdict(name, value)
    assert found.name == name
    assert not found.refused or found.expected
